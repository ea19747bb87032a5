/* SPDX-License-Identifier: Apache-2.0
 *
 * split.h: kernels launched over a range in several ways, whose results must not differ.
 */
#ifndef PERI_TESTS_SPLIT_H
#define PERI_TESTS_SPLIT_H

#include "kernels/kernels.h"

#include <string.h>

/** How a launch splits its range: whole, one by one from the end (on tests/cuda_host, where a launch costs more, in
 *  five parts), or in two uneven parts, the last one first. */
enum { WHOLE, BACKWARDS, UNEVEN, SPLITS };

static inline void run(const peri_kernels *k, int32_t kernel, const void *args, int64_t n, int split)
{
    if (split == WHOLE || n < 2) {
        k->fn[kernel](args, 0, n);
    } else if (split == BACKWARDS) {
        int64_t step = !strcmp(k->isa, "cuda_host") ? n / 5 + 1 : 1;
        for (int64_t i = n; i > 0; i -= step) k->fn[kernel](args, i > step ? i - step : 0, i);
    } else {
        int64_t third = n / 3 + 1 < n ? n / 3 + 1 : n - 1;
        k->fn[kernel](args, third, n);
        k->fn[kernel](args, 0, third);
    }
}

#endif
