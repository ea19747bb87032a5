/* SPDX-License-Identifier: Apache-2.0
 *
 * fence.h: for programs of tests/kernels whose kernels run on a GPU: their memory is made known to it.
 */
#ifndef PERI_TESTS_FENCE_H
#define PERI_TESTS_FENCE_H

#include <stdbool.h>
#include <stddef.h>

/** Have the GPU reach these bytes; false: it cannot. */
typedef bool fence_share(void *p, size_t bytes);

/** From now on malloc's blocks lie in memory that was shared; NULL: at closed pages, as at first. Not there under
 *  sanitizers, which bring a malloc of their own. */
__attribute__((weak)) void fence_open(fence_share *with);

#endif
