/* SPDX-License-Identifier: Apache-2.0
 *
 * upload.c: see upload.h.
 */
#include "upload.h"

int64_t peri__upload_add(peri__upload *up, int64_t bytes)
{
    int64_t at = up->bytes;
    up->bytes += (bytes + 7) / 8 * 8;
    return at;
}

peri_status peri__upload_open(peri__upload *up, peri_device *device)
{
    PERI_TRY(peri_tensor_new(device, PERI_U8, 1, &up->bytes, &up->device));
    up->host = peri__immediate(device) ? peri__data(up->device) : peri__alloc((size_t)up->bytes);
    return up->host || up->bytes == 0 ? PERI_OK : PERI_ENOMEM;
}

peri_status peri__upload_send(peri__upload *up)
{
    peri_device *device = peri__device(up->device);
    if (up->host == peri__data(up->device)) return PERI_OK;
    return peri__copy(device, peri__data(up->device), up->host, up->bytes, PERI_COPY_H2D);
}

void peri__upload_fini(peri__upload *up)
{
    if (up->device && up->host != peri__data(up->device)) peri__free(up->host);
    peri_tensor_release(up->device);
    *up = (peri__upload){0};
}
