/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_round_avx512.h: part of tbe_round.h: sixteen 32-bit lanes in one register.
 */
#ifndef PERI_KERNELS_TBE_ROUND_AVX512_H
#define PERI_KERNELS_TBE_ROUND_AVX512_H

typedef uint32_t u16x __attribute__((vector_size(64)));

TBE_INLINE u16x u16x_of(v16 x) { return (u16x)x.v; }
TBE_INLINE v16 v16_sign(v16 c)
{
    __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1);
    __m512 up = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(c.v, zero, _CMP_GT_OQ), c.v, one);
    return (v16){_mm512_mask_blend_ps(_mm512_cmp_ps_mask(c.v, zero, _CMP_LT_OQ), up, _mm512_sub_ps(zero, one))};
}
TBE_INLINE h16x v16_to_f16(v16 x) { return (h16x)_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
TBE_INLINE h16x u16x_to_f16_down(u16x x) { return (h16x)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_ZERO); }
/** Whether the absolute value of any of these f32 is above that of the f32 whose bits are @most. */
TBE_INLINE bool u16x_beyond(u16x x, uint32_t most)
{
    return _mm512_cmpgt_epu32_mask((__m512i)(x & 0x7fffffffu), _mm512_set1_epi32((int)most));
}
/** The low halves. */
TBE_INLINE h16x u16x_narrow(u16x x) { return __builtin_convertvector(x, h16x); }
TBE_INLINE u16x u16x_widen(const uint16_t *p) { return __builtin_convertvector(*(const h16x_unaligned *)p, u16x); }
TBE_INLINE void u16x_store(uint32_t *p, u16x x) { _mm512_storeu_si512(p, (__m512i)x); }

/** To bf16, to nearest even. */
TBE_INLINE h16x v16_to_bf16(v16 x)
{
    u16x u = u16x_of(x), nan = (u16x)((u & 0x7fffffffu) > 0x7f800000u);
    return u16x_narrow((nan & (u >> 16 | 0x40u)) | (~nan & ((u + 0x7fffu + (u >> 16 & 1u)) >> 16)));
}
/** tbe_round_f16 of numbers below 2^64 in size: beyond 65504 the conversion ends there. */
TBE_INLINE h16x v16_round_f16(v16 x, u16x bits)
{
    const __m512 least = _mm512_set1_ps(0x1p-14f), sign = _mm512_set1_ps(-0.0f);
    __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), least, _CMP_LT_OQ);
    __m512 moved = _mm512_mask_add_ps(x.v, small, x.v, _mm512_or_ps(least, _mm512_and_ps(sign, x.v)));
    __m256i h = (__m256i)u16x_to_f16_down((u16x)moved + bits); /* what the bits carry into the last place stays there */
    return (h16x)_mm256_mask_sub_epi16(h, small, h, _mm256_set1_epi16(0x400));
}
/** tbe_round_bf16 of numbers of at most the largest bf16. */
TBE_INLINE h16x v16_round_bf16(v16 x, u16x bits) { return u16x_narrow((u16x_of(x) + bits) >> 16); }
/** v16_round_bf16 of 32 columns, stored. */
TBE_INLINE void v16_store_round_bf16(uint16_t *p, v16 x, u16x x_bits, v16 y, u16x y_bits)
{
    static const uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    __m512i low = (__m512i)(u16x_of(x) + x_bits), high = (__m512i)(u16x_of(y) + y_bits);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(low, _mm512_loadu_si512(odd), high));
}
TBE_INLINE void h16_store(uint16_t *p, h16x h, int64_t n)
{
    if (n >= 16) *(h16x_unaligned *)p = h;
    else _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)h);
}

/** Random words of 32 columns: the lowest bits are of the first sixteen, the highest of the others. */
TBE_INLINE u16x tbe_random_words(uint64_t key, uint32_t lane)
{
    static const u16x places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    u16x x = places * 0x9e3779b9u + (lane * 0x9e3779b9u + (uint32_t)key);
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0x846ca68bu;
    return x ^ x >> 16;
}
/** A word of random bits rounds two numbers. Of each word, those for the first: the low TBE_BITS_F16 or TBE_BITS_BF16
 *  bits. */
TBE_INLINE u16x tbe_random_first(u16x words, const int32_t dtype)
{
    return words & (dtype == PERI_F16 ? 0x1fffu : 0xffffu);
}
/** Of each word, those for the other number: the high bits. */
TBE_INLINE u16x tbe_random_other(u16x words, const int32_t dtype) { return words >> (dtype == PERI_F16 ? 19 : 16); }

#endif
