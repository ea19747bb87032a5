/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor/pinned.h (L2): host memory that a device reads while its copies run.
 *
 * A block of it looks so; tensors lie behind the head:
 *
 *     | head, 64 bytes: device, event, capacity | the bytes of one tensor ... |
 *
 * Blocks are kept when their tensors are gone, and given out again. A copy to the device that was queued from a block
 * may read it after the tensor is gone, so a block is given out only when the event behind its last copy has passed.
 */
#ifndef PERI_TENSOR_PINNED_H
#define PERI_TENSOR_PINNED_H

#include "tensor_internal.h"

/** Queue a copy of the contiguous @src to the contiguous @dst, of the same bytes and of a device. True in *@done: @src
 *  is in memory that is pinned for that device, and the copy may read it until the device's current stream has come
 *  past it. False: nothing was done. */
peri_status peri__pinned_copy(const peri_tensor *dst, const peri_tensor *src, bool *done);

#endif
