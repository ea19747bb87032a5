/* SPDX-License-Identifier: Apache-2.0
 *
 * order.h: keys whose order as unsigned numbers is that of elements (kernels/elements.h, sort), for the host and for
 * GPUs.
 */
#ifndef PERI_KERNELS_ORDER_H
#define PERI_KERNELS_ORDER_H

#include "inline.h"
#include "ref/number.h"

#include <perilune/base.h>

/** Bits of the keys of a dtype. */
K_INLINE int32_t k_sort_bits(int32_t dtype) { return dtype == PERI_F64 || dtype == PERI_I64 ? 64 : 32; }

/** Of the bits of a float: all bits of a negative number are turned, of others the sign; -0 becomes 0. */
K_INLINE uint32_t k_sort_key_f32(float x)
{
    if (x != x) return UINT32_MAX;
    uint32_t u = x == 0 ? 0 : k_bits(x);
    return u >> 31 ? ~u : u | 0x80000000u;
}

K_INLINE uint64_t k_sort_key_f64(double x)
{
    uint64_t u = 0;
    if (x != x) return UINT64_MAX;
    if (x != 0) memcpy(&u, &x, 8);
    return u >> 63 ? ~u : u | (uint64_t)1 << 63;
}

/** The key of x[i]. Equal keys: equal elements, or two NaNs. */
K_INLINE uint64_t k_sort_key(const void *x, int64_t i, int32_t dtype, bool descending)
{
    uint64_t key;
    switch (dtype) {
    case PERI_F64: key = k_sort_key_f64(((const double *)x)[i]); break;
    case PERI_F16: key = k_sort_key_f32(k_f16_to_f32(((const uint16_t *)x)[i])); break;
    case PERI_BF16: key = k_sort_key_f32(k_bf16_to_f32(((const uint16_t *)x)[i])); break;
    case PERI_I64: key = (uint64_t)((const int64_t *)x)[i] ^ (uint64_t)1 << 63; break;
    case PERI_I32: key = (uint32_t)((const int32_t *)x)[i] ^ 0x80000000u; break;
    case PERI_I16: key = (uint32_t)(((const int16_t *)x)[i] + 0x8000); break;
    case PERI_I8: key = (uint32_t)(((const int8_t *)x)[i] + 0x80); break;
    case PERI_U8:
    case PERI_BOOL: key = ((const uint8_t *)x)[i]; break;
    default: key = k_sort_key_f32(((const float *)x)[i]); break;
    }
    if (!descending) return key;
    return k_sort_bits(dtype) == 64 ? ~key : (uint32_t)~key;
}

/** Whether x[i] is a NaN. */
K_INLINE bool k_is_nan(const void *x, int64_t i, int32_t dtype)
{
    switch (dtype) {
    case PERI_F64: return k_sort_key(x, i, dtype, false) == UINT64_MAX;
    case PERI_F32:
    case PERI_F16:
    case PERI_BF16: return k_sort_key(x, i, dtype, false) == UINT32_MAX;
    default: return false;
    }
}

/** Whether x[i] takes the place of x[best], which stands before it, as the largest (@least: the smallest): it does if
 *  they are equal, and if it is a NaN; else a NaN stays. */
K_INLINE bool k_is_extreme(const void *x, int64_t i, int64_t best, int32_t dtype, bool least)
{
    if (k_is_nan(x, i, dtype)) return true;
    if (k_is_nan(x, best, dtype)) return false;
    return k_sort_key(x, i, dtype, least) >= k_sort_key(x, best, dtype, least);
}

/** Where the longest run of equal elements ends (its last one's place) among the rising sorted[begin], ...,
 *  sorted[begin + n - 1], n >= 1, counted from `begin`; of several runs the first. No NaN equals another. */
K_INLINE int64_t k_longest_run(const void *sorted, int64_t begin, int64_t n, int32_t dtype)
{
    int64_t first = 0, longest = 0, end = 0;
    uint64_t key = k_sort_key(sorted, begin, dtype, false);
    for (int64_t r = 0; r < n; r++) {
        const uint64_t next = k_sort_key(sorted, begin + r, dtype, false);
        if (next != key || k_is_nan(sorted, begin + r, dtype)) first = r;
        key = next;
        if (r - first + 1 <= longest) continue;
        longest = r - first + 1;
        end = r;
    }
    return end;
}

/** The number of the interval that has @x, see bin_number: in f64 and in f32. */
K_INLINE int32_t k_bin_f64(double x, double least, double most, int32_t bins)
{
    if (!(x >= least && x <= most)) return bins;
    const int32_t bin = (int32_t)((x - least) * bins / (most - least));
    return bin < bins ? bin : bins - 1;
}
K_INLINE int32_t k_bin_f32(float x, float least, float most, int32_t bins)
{
    if (!(x >= least && x <= most)) return bins;
    const int32_t bin = (int32_t)((x - least) * (float)bins / (most - least));
    return bin < bins ? bin : bins - 1;
}

/** How many of the rising elements sorted[begin], ..., sorted[begin + n - 1] are smaller than x[i]; @right: not
 *  larger. */
K_INLINE int64_t k_search(const void *sorted, int64_t begin, int64_t n, const void *x, int64_t i, int32_t dtype,
                          bool right)
{
    const uint64_t key = k_sort_key(x, i, dtype, false);
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const uint64_t other = k_sort_key(sorted, begin + middle, dtype, false);
        if (right ? other <= key : other < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

/** Whether x[i] is one of the rising elements sorted[0], ..., sorted[n - 1]; a NaN is none. */
K_INLINE bool k_is_member(const void *sorted, int64_t n, const void *x, int64_t i, int32_t dtype)
{
    if (k_is_nan(x, i, dtype)) return false;
    const int64_t at = k_search(sorted, 0, n, x, i, dtype, false);
    return at < n && k_sort_key(sorted, at, dtype, false) == k_sort_key(x, i, dtype, false);
}

#endif
