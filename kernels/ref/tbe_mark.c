/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_mark.c: kernels/tbe.h: rows in a bitmap.
 */

#include "tbe_sorted.h"

static void ref_tbe_mark(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_mark_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        const uint64_t row = tbe_marked_row(a, i);
        if (row >= (uint64_t)a->total_rows) continue;
        const uint64_t bit = (uint64_t)1 << row % 64,
                       old = __atomic_fetch_or(&a->bits[row / 64], bit, __ATOMIC_RELAXED);
        if (!(old & bit) && a->fresh) a->fresh[__atomic_fetch_add(a->n_fresh, 1, __ATOMIC_RELAXED)] = (int64_t)row;
    }
}
