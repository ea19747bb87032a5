/* SPDX-License-Identifier: Apache-2.0
 *
 * closing.c: the end of all devices, and of what is kept for them.
 */
#include "tensor_internal.h"

static void drop_kept(peri_device *device)
{
    peri__pinned_trim(device);
    peri__reports_drop(device);
}

void peri__devices_close(void) { peri__devices_end(drop_kept); }
