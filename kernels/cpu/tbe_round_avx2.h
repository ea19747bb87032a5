/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_round_avx2.h: part of tbe_round.h: sixteen 32-bit lanes in two registers, in intrinsics: what GCC makes of
 * vectors of sixteen lanes goes through memory, and lane by lane where they become narrower.
 */
#ifndef PERI_KERNELS_TBE_ROUND_AVX2_H
#define PERI_KERNELS_TBE_ROUND_AVX2_H

typedef struct u16x {
    __m256i a, b;
} u16x;

TBE_INLINE u16x u16x_of(v16 x) { return (u16x){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
/** Absolute values of f32, as bits. */
TBE_INLINE __m256i v8_abs(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0x7fffffff)); }

TBE_INLINE __m256 v8_sign(__m256 c)
{
    __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1);
    __m256 up = _mm256_blendv_ps(c, one, _mm256_cmp_ps(c, zero, _CMP_GT_OQ));
    return _mm256_blendv_ps(up, _mm256_sub_ps(zero, one), _mm256_cmp_ps(c, zero, _CMP_LT_OQ));
}
TBE_INLINE v16 v16_sign(v16 c) { return (v16){v8_sign(c.a), v8_sign(c.b)}; }

/** Whether the absolute value of any of these f32 is above that of the f32 whose bits are @most. */
TBE_INLINE bool u16x_beyond(u16x x, uint32_t most)
{
    __m256i limit = _mm256_set1_epi32((int)most);
    __m256i odd = _mm256_or_si256(_mm256_cmpgt_epi32(v8_abs(x.a), limit), _mm256_cmpgt_epi32(v8_abs(x.b), limit));
    return !_mm256_testz_si256(odd, odd);
}
/** Lanes of at most 16 bits, narrowed. */
TBE_INLINE h16x u16x_narrow(u16x x)
{
    return (h16x)_mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), _MM_SHUFFLE(3, 1, 2, 0));
}
TBE_INLINE u16x u16x_widen(const uint16_t *p)
{
    const __m128i *from = (const __m128i *)p;
    return (u16x){_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
}
TBE_INLINE void u16x_store(uint32_t *p, u16x x)
{
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
TBE_INLINE void h16_store(uint16_t *p, h16x h, int64_t n)
{
    if (n >= 16) *(h16x_unaligned *)p = h;
    else memcpy(p, &h, (size_t)n * 2);
}

/** To bf16, to nearest even: bits in the low halves. */
TBE_INLINE __m256i v8_bf16(__m256i u)
{
    __m256i nan = _mm256_cmpgt_epi32(v8_abs(u), _mm256_set1_epi32(0x7f800000)), high = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i near = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    return _mm256_blendv_epi8(near, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
TBE_INLINE h16x v16_to_bf16(v16 x)
{
    u16x u = u16x_of(x);
    return u16x_narrow((u16x){v8_bf16(u.a), v8_bf16(u.b)});
}
TBE_INLINE h16x v16_to_f16(v16 x)
{
    __m128i a = _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT), b = _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
    return (h16x)_mm256_set_m128i(b, a);
}

/** Eight f16 of numbers of at most 65504, which are below 2^-14 in *small: those are moved away from 0, where f16 are
 *  whole numbers of 2^-24 too, and become 0x400 too large. The others have 0 added, which leaves them: they are no
 *  zeros. */
TBE_INLINE __m128i v8_round_f16(__m256 x, __m256i bits, __m256i *small)
{
    const __m256i least = _mm256_set1_epi32(0x38800000), sign = _mm256_set1_epi32(INT32_MIN);
    __m256i u = _mm256_castps_si256(x);
    *small = _mm256_cmpgt_epi32(least, v8_abs(u));
    __m256i away = _mm256_and_si256(*small, _mm256_or_si256(least, _mm256_and_si256(u, sign)));
    __m256i moved = _mm256_castps_si256(_mm256_add_ps(x, _mm256_castsi256_ps(away)));
    return _mm256_cvtps_ph(_mm256_castsi256_ps(_mm256_add_epi32(moved, bits)), _MM_FROUND_TO_ZERO);
}
/** tbe_round_f16 of numbers below 2^64 in size: beyond 65504 the conversion ends there. */
TBE_INLINE h16x v16_round_f16(v16 x, u16x bits)
{
    __m256i a, b;
    __m128i low = v8_round_f16(x.a, bits.a, &a), high = v8_round_f16(x.b, bits.b, &b);
    __m256i small = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), _MM_SHUFFLE(3, 1, 2, 0));
    return (h16x)_mm256_sub_epi16(_mm256_set_m128i(high, low), _mm256_and_si256(small, _mm256_set1_epi16(0x400)));
}
/** tbe_round_bf16 of numbers of at most the largest bf16. */
TBE_INLINE h16x v16_round_bf16(v16 x, u16x bits)
{
    u16x u = u16x_of(x);
    return u16x_narrow((u16x){_mm256_srli_epi32(_mm256_add_epi32(u.a, bits.a), 16),
                              _mm256_srli_epi32(_mm256_add_epi32(u.b, bits.b), 16)});
}
/** v16_round_bf16 of 32 columns, stored. */
TBE_INLINE void v16_store_round_bf16(uint16_t *p, v16 x, u16x x_bits, v16 y, u16x y_bits)
{
    *(h16x_unaligned *)p = v16_round_bf16(x, x_bits);
    *(h16x_unaligned *)(p + 16) = v16_round_bf16(y, y_bits);
}

/** Eight of the words below, which begin with @x. */
TBE_INLINE __m256i v8_random(__m256i x, __m256i high)
{
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(0x7feb352d));
    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), high);
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int)0x846ca68bu));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}
/** Random words of 32 columns: the lowest bits are of the first sixteen, the highest of the others. */
TBE_INLINE u16x tbe_random_words(uint64_t key, uint32_t lane)
{
#define PLACE(i) (int)((i) * 0x9e3779b9u)
    const __m256i a = _mm256_setr_epi32(PLACE(0), PLACE(1), PLACE(2), PLACE(3), PLACE(4), PLACE(5), PLACE(6), PLACE(7));
    const __m256i b =
        _mm256_setr_epi32(PLACE(8), PLACE(9), PLACE(10), PLACE(11), PLACE(12), PLACE(13), PLACE(14), PLACE(15));
#undef PLACE
    __m256i first = _mm256_set1_epi32((int)(lane * 0x9e3779b9u + (uint32_t)key)),
            high = _mm256_set1_epi32((int)(key >> 32));
    return (u16x){v8_random(_mm256_add_epi32(a, first), high), v8_random(_mm256_add_epi32(b, first), high)};
}
/** A word of random bits rounds two numbers. Of each word, those for the first: the low TBE_BITS_F16 or TBE_BITS_BF16
 *  bits. */
TBE_INLINE u16x tbe_random_first(u16x words, const int32_t dtype)
{
    const __m256i mask = _mm256_set1_epi32(dtype == PERI_F16 ? 0x1fff : 0xffff);
    return (u16x){_mm256_and_si256(words.a, mask), _mm256_and_si256(words.b, mask)};
}
/** Of each word, those for the other number: the high bits. */
TBE_INLINE u16x tbe_random_other(u16x words, const int32_t dtype)
{
    const int by = dtype == PERI_F16 ? 19 : 16;
    return (u16x){_mm256_srli_epi32(words.a, by), _mm256_srli_epi32(words.b, by)};
}

#endif
