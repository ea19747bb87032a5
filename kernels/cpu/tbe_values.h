/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_values.h: rows of every format of kernels/tbe.h as f32, sixteen columns at a time, and in which order their lines
 * are read.
 */
#ifndef PERI_KERNELS_TBE_VALUES_H
#define PERI_KERNELS_TBE_VALUES_H

#include "../ref/tbe_value.h"
#include "tbe_simd.h"

/** A row's codes, and what they mean. */
typedef struct tbe_codes {
    const void *at;
    v16 scale, bias; /* of the formats that have them */
    v16 values;      /* of the 16 codes of four bits; of the 4 codes of two bits, again and again. Without AVX-512 of
                        the latter only */
} tbe_codes;

/** What the codes of four or two bits stand for: a row's numbers are looked up then. */
TBE_INLINE v16 tbe_code_values(v16 scale, v16 bias, const int32_t format)
{
    static const float codes[2][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                       {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}};
    return v16_fma(v16_load(codes[format == PERI_ROWS_INT2]), scale, bias);
}

TBE_INLINE tbe_codes tbe_row_codes(const char *row, int64_t cols, const int32_t format)
{
    if (format == PERI_ROWS_INT8) {
        float pair[2];
        __builtin_memcpy(pair, row + cols, 8);
        return (tbe_codes){row, v16_set(pair[0]), v16_set(pair[1]), v16_zero()};
    }
    if (tbe_halves_first(format)) {
        int32_t pair;
        __builtin_memcpy(&pair, row, 4);
        __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(pair));
        tbe_codes c = {row + 4, v16_set(_mm_cvtss_f32(both)), v16_set(_mm_cvtss_f32(_mm_movehdup_ps(both))),
                       v16_zero()};
        if (format != PERI_ROWS_INT8_HALF) c.values = tbe_code_values(c.scale, c.bias, format);
        return c;
    }
    return (tbe_codes){.at = row};
}

#if defined(__AVX512F__)
TBE_INLINE v16 v16_of_u8(__m128i x) { return (v16){_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x))}; }
TBE_INLINE v16 v16_of_f16(__m256i x) { return (v16){_mm512_cvtph_ps(x)}; }
TBE_INLINE __m128i tbe_bytes_part(const uint8_t *p, int64_t n)
{
    return _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p);
}
/** Sixteen codes of four or two bits, from the lowest bits of @bytes on. A lane's shift leaves bits of other codes
 *  above its own: the lookup of four bits does not see them, and that of two finds the same value whatever the two bits
 *  above are. */
TBE_INLINE v16 tbe_packed_values(const tbe_codes *codes, __m128i bytes, const int32_t format)
{
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i by4 = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i by2 = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i all = format == PERI_ROWS_INT2 ? _mm512_broadcastd_epi32(bytes)
                                             : _mm512_permutexvar_epi32(halves, _mm512_castsi128_si512(bytes));
    return (v16){_mm512_permutexvar_ps(_mm512_srlv_epi32(all, format == PERI_ROWS_INT2 ? by2 : by4), codes->values.v)};
}
#else
TBE_INLINE v16 v16_of_u8(__m128i x)
{
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
                 _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
TBE_INLINE v16 v16_of_f16(__m256i x)
{
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
TBE_INLINE __m128i tbe_bytes_part(const uint8_t *p, int64_t n)
{
    uint8_t room[16] = {0};
    __builtin_memcpy(room, p, (size_t)n);
    return _mm_loadu_si128((const __m128i *)room);
}
/** As above; sixteen values are too many for a lookup here, so codes of four bits become numbers as those of eight
 *  do. */
TBE_INLINE v16 tbe_packed_values(const tbe_codes *codes, __m128i bytes, const int32_t format)
{
    const __m256i by4 = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), most = _mm256_set1_epi32(15);
    const __m256i by2 = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
                  behind = _mm256_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30);
    __m256i all = _mm256_broadcastd_epi32(bytes);
    if (format == PERI_ROWS_INT2)
        return (v16){_mm256_permutevar8x32_ps(codes->values.a, _mm256_srlv_epi32(all, by2)),
                     _mm256_permutevar8x32_ps(codes->values.a, _mm256_srlv_epi32(all, behind))};
    __m256i rest = _mm256_broadcastd_epi32(_mm_srli_si128(bytes, 4));
    v16 x = {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(all, by4), most)),
             _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(rest, by4), most))};
    return v16_fma(x, codes->scale, codes->bias);
}
#endif

/** Sixteen codes of four or two bits from @p on, or the bytes of the first n of them. */
TBE_INLINE __m128i tbe_packed_bytes(const uint8_t *p, int64_t n, const int32_t format)
{
    if (n < 16) return tbe_bytes_part(p, (n * tbe_bits(format) + 7) / 8);
    return format == PERI_ROWS_INT2 ? _mm_loadu_si32(p) : _mm_loadl_epi64((const __m128i *)p);
}

/** FP8 by way of f16, which has one bit of exponent more and another bias: sign, exponent and mantissa move,
 *  TBE_FP8_SCALE times the result is the number. */
#define TBE_FP8_SCALE 256.0f
TBE_INLINE v16 v16_of_fp8(__m128i x)
{
    __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7); /* the sign is in bits 15 and 14 now */
    return v16_of_f16(_mm256_and_si256(w, _mm256_set1_epi16((short)0xbfff)));
}

/** Columns [d, d + 16) of a row, or the first n <= 16 of them. @scaled: the caller multiplies those of FP8 rows by
 *  TBE_FP8_SCALE. */
TBE_INLINE v16 tbe_row_values(const tbe_codes *codes, int64_t d, int64_t n, const int32_t format, const bool scaled)
{
    if (format == PERI_F32 || format == PERI_F16 || format == PERI_BF16)
        return tbe_get_weights(codes->at, d, n, format);
    if (tbe_bits(format) < 8)
        return tbe_packed_values(
            codes, tbe_packed_bytes((const uint8_t *)codes->at + d * tbe_bits(format) / 8, n, format), format);
    const uint8_t *p = (const uint8_t *)codes->at + d;
    __m128i bytes = n >= 16 ? _mm_loadu_si128((const __m128i *)p) : tbe_bytes_part(p, n);
    if (format == PERI_ROWS_FP8) return scaled ? v16_of_fp8(bytes) : v16_mul(v16_of_fp8(bytes), v16_set(TBE_FP8_SCALE));
    return v16_fma(v16_of_u8(bytes), codes->scale, codes->bias);
}

/** Which of n neighbouring lines is read k-th. Processors that see neighbouring lines asked for one after the other
 *  fetch the lines behind them too, which with random rows are nobody's: 1.5 times the time of rows of 4 or 8 lines on
 *  a Zen 4. Out of order they do not. */
TBE_INLINE int tbe_scattered_line(const int k, const int n)
{
    static const int of8[8] = {2, 6, 5, 7, 3, 0, 4, 1}, of4[4] = {3, 1, 0, 2}, of3[3] = {2, 0, 1};
    return n == 3 ? of3[k] : n == 4 ? of4[k] : n % 8 == 0 ? k / 8 * 8 + of8[k % 8] : k;
}

/** Which of a row's @nv sixteens is read k-th. */
TBE_INLINE int tbe_scattered(const int k, const int nv, const int32_t format)
{
    const int each = TBE_LINE / (2 * tbe_bits(format)); /* sixteens in a line */
    return nv % each ? k : tbe_scattered_line(k / each, nv / each) * each + k % each;
}

#endif
