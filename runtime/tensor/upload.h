/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor/upload.h (L2): small arrays that the host writes and kernels of a device read, in one block of its memory.
 */
#ifndef PERI_TENSOR_UPLOAD_H
#define PERI_TENSOR_UPLOAD_H

#include "tensor_internal.h"

/** Several small arrays that the host writes and a device reads: each is given its place, then there is room for all,
 *  and once they are written they are sent. */
typedef struct peri__upload {
    char *host; /* from open to the end; where the host works in the device's memory, that itself */
    int64_t bytes;
    peri_tensor *device; /* u8 */
} peri__upload;

/** The place of an array of @bytes among them, 8-byte aligned. */
int64_t peri__upload_add(peri__upload *up, int64_t bytes);
/** Room for all of them. What is not written is of any value. */
peri_status peri__upload_open(peri__upload *up, peri_device *device);
/** Everything is written: to the device. */
peri_status peri__upload_send(peri__upload *up);
void peri__upload_fini(peri__upload *up);
/** The device address of an offset from peri__upload_add. */
static inline void *peri__upload_at(const peri__upload *up, int64_t offset)
{
    return (char *)peri__data(up->device) + offset;
}

#endif
