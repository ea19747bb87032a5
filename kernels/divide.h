/* SPDX-License-Identifier: Apache-2.0
 *
 * divide.h: division of many numbers by one, without a division. A processor divides 64-bit numbers in some 20 to 40
 * cycles, a GPU in some 100 instructions; a multiplication by the reciprocal, of which the high half counts, takes 4 to
 * 12. The host makes the reciprocal once a call (Granlund and Montgomery, "Division by invariant integers using
 * multiplication", 1994).
 *
 * With d in (2^(l - 1), 2^l] and m = ceil(2^(63 + l) / d), which is below 2^64, m d = 2^(63 + l) + e for an e in [0,
 * d). So n m / 2^(63 + l) = n / d + n e / (d 2^(63 + l)), whose last term is below 1 / d for all n < 2^63: both have
 * the same whole part.
 */
#ifndef PERI_KERNELS_DIVIDE_H
#define PERI_KERNELS_DIVIDE_H

#include "spread.h"

/** A number to divide by. */
typedef struct peri_k_divisor {
    uint64_t by;         /* d, in [1, 2^63) */
    uint64_t multiplier; /* m */
    int32_t shift;       /* l */
} peri_k_divisor;

/** @d in [1, 2^63). On the host: this one divides. */
static inline peri_k_divisor peri_k_divisor_of(int64_t d)
{
    int32_t l = 0;
    while (l < 63 && (uint64_t)1 << l < (uint64_t)d) l++;
    unsigned __int128 one = (unsigned __int128)1 << (63 + l);
    peri_k_divisor divisor = {(uint64_t)d, (uint64_t)((one + (uint64_t)d - 1) / (uint64_t)d), l};
    return divisor;
}

/** n / d for n < 2^32: two multiplications. */
K_INLINE uint32_t peri_k_quotient_32(uint32_t n, const peri_k_divisor *d)
{
    /* n m / 2^32 */
    const uint64_t high = (uint64_t)n * (d->multiplier >> 32) + ((uint64_t)n * (uint32_t)d->multiplier >> 32);
    return d->shift ? (uint32_t)(high >> 32 >> (d->shift - 1)) : n;
}

/** n / d for n < 2^63: four. */
K_INLINE uint64_t peri_k_quotient_63(uint64_t n, const peri_k_divisor *d)
{
    return peri_k_high(n << 1, d->multiplier) >> d->shift;
}

/** The same, for numbers most of which are below 2^32. */
K_INLINE uint64_t peri_k_quotient(uint64_t n, const peri_k_divisor *d)
{
    return n >> 32 ? peri_k_quotient_63(n, d) : peri_k_quotient_32((uint32_t)n, d);
}

/** n / d for any n; *rest = n % d. The quotient of n / 2 comes first: twice that is n / d, or one less. */
K_INLINE uint64_t peri_k_divide(uint64_t n, const peri_k_divisor *d, uint64_t *rest)
{
    uint64_t q = peri_k_quotient(n >> 1, d) << 1;
    *rest = n - q * d->by;
    if (*rest >= d->by) {
        *rest -= d->by;
        q++;
    }
    return q;
}

#endif
