/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_round.h: storing f32 as f16 and bf16, to nearest even and stochastically: kernels/ref/tbe_round.h in sixteens.
 */
#ifndef PERI_KERNELS_CPU_TBE_ROUND_H
#define PERI_KERNELS_CPU_TBE_ROUND_H

#include "../ref/tbe_round.h"
#include "tbe_simd.h"

typedef uint16_t h16x __attribute__((vector_size(32)));
typedef uint16_t h16x_unaligned __attribute__((vector_size(32), aligned(2)));

#if defined(__AVX512F__)
#include "tbe_round_avx512.h"
#else
#include "tbe_round_avx2.h"
#endif

/** The largest numbers, as bits of f32. */
enum { TBE_MOST_F16 = 0x477fe000, TBE_MOST_BF16 = 0x7f7f0000, TBE_MOST_F32 = 0x7f7fffff };

/** Infinities, NaN and numbers beyond the largest are rare: off the path. */
static __attribute__((noinline)) h16x v16_round_odd(v16 x, u16x bits, int32_t dtype)
{
    float number[16];
    uint32_t random[16];
    uint16_t out[16];
    v16_store(number, x);
    u16x_store(random, bits);
    for (int i = 0; i < 16; i++)
        out[i] = dtype == PERI_F16 ? tbe_round_f16(number[i], random[i]) : tbe_round_bf16(number[i], random[i]);
    return *(const h16x_unaligned *)out;
}

/** To f16 or bf16, with TBE_BITS_F16 or TBE_BITS_BF16 random bits for each. */
TBE_INLINE h16x v16_round(v16 x, u16x bits, const int32_t dtype)
{
    if (u16x_beyond(u16x_of(x), dtype == PERI_F16 ? TBE_MOST_F16 : TBE_MOST_BF16)) return v16_round_odd(x, bits, dtype);
    return dtype == PERI_F16 ? v16_round_f16(x, bits) : v16_round_bf16(x, bits);
}

TBE_INLINE void tbe_random_group(uint64_t key, uint32_t lane, uint16_t *out, const int32_t dtype)
{
    u16x x = tbe_random_words(key, lane);
    *(h16x_unaligned *)out = u16x_narrow(tbe_random_first(x, dtype));
    *(h16x_unaligned *)(out + 16) = u16x_narrow(tbe_random_other(x, dtype));
}

#endif
