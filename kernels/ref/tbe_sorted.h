/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_sorted.h: sorted items of kernels/tbe.h: the sums and the rows of their runs. Shared by ref and the instruction
 * sets.
 */
#ifndef PERI_KERNELS_TBE_SORTED_H
#define PERI_KERNELS_TBE_SORTED_H

#include "../tbe.h"

#include <string.h>

/** `big` of an exact sum. */
static double tbe_exact_big(double largest, int64_t items)
{
    uint64_t bits, e, l = 0;
    memcpy(&bits, &largest, 8);
    e = bits >> 52;
    if (e == 0 || e >= 0x7ff) return 0; /* 0 (products of two f32 are no subnormal doubles), infinite */
    while ((int64_t)1 << l < items) l++;
    bits = (e + 1 + l + 1) << 52 | (uint64_t)1 << 51;
    memcpy(&largest, &bits, 8);
    return largest;
}

/** The linear row that item @i names; total_rows or more: none. */
static uint64_t tbe_marked_row(const peri_k_tbe_mark_args *a, int64_t i)
{
    if (a->touched) return i >= a->first && a->touched[i] != 0 ? (uint64_t)i : UINT64_MAX;
    if (!a->sorted) return (uint64_t)(a->first + i);
    if (i >= *a->n) return UINT64_MAX;
    const uint64_t row = a->sorted[i] >> a->payload_bits;
    if (row < (uint64_t)a->first) return UINT64_MAX;
    return i > 0 && a->sorted[i - 1] >> a->payload_bits == row ? UINT64_MAX : row;
}

#endif
