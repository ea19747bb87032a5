/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_values.h: rows of every format of kernels/tbe.h as f32, sixteen columns at a time.
 */
#ifndef PERI_KERNELS_TBE_VALUES_H
#define PERI_KERNELS_TBE_VALUES_H

#include "../ref/tbe_value.h"
#include "tbe_simd.h"

/** A row's codes, and what they mean. */
typedef struct tbe_codes {
    const void *at;
    v16 scale, bias; /* of the int8 formats */
} tbe_codes;

TBE_INLINE tbe_codes tbe_row_codes(const char *row, int64_t cols, const int32_t format)
{
    if (format == PERI_K_ROWS_INT8) {
        float pair[2];
        __builtin_memcpy(pair, row + cols, 8);
        return (tbe_codes){row, v16_set(pair[0]), v16_set(pair[1])};
    }
    if (format == PERI_K_ROWS_INT8_HALF) {
        int32_t pair;
        __builtin_memcpy(&pair, row, 4);
        __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(pair));
        return (tbe_codes){row + 4, v16_set(_mm_cvtss_f32(both)), v16_set(_mm_cvtss_f32(_mm_movehdup_ps(both)))};
    }
    return (tbe_codes){.at = row};
}

#if defined(__AVX512F__)
TBE_INLINE v16 v16_of_u8(__m128i x) { return (v16){_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x))}; }
TBE_INLINE v16 v16_of_f16(__m256i x) { return (v16){_mm512_cvtph_ps(x)}; }
TBE_INLINE __m128i tbe_bytes_part(const uint8_t *p, int64_t n) { return _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p); }
#else
TBE_INLINE v16 v16_of_u8(__m128i x)
{
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
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
#endif

/** FP8 by way of f16, which has one bit of exponent more and another bias: sign, exponent and mantissa move, TBE_FP8_SCALE times the
 *  result is the number. */
#define TBE_FP8_SCALE 256.0f
TBE_INLINE v16 v16_of_fp8(__m128i x)
{
    __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7); /* the sign is in bits 15 and 14 now */
    return v16_of_f16(_mm256_and_si256(w, _mm256_set1_epi16((short)0xbfff)));
}

/** Columns [d, d + 16) of a row, or the first n <= 16 of them. @scaled: the caller multiplies those of FP8 rows by TBE_FP8_SCALE. */
TBE_INLINE v16 tbe_row_values(const tbe_codes *codes, int64_t d, int64_t n, const int32_t format, const bool scaled)
{
    if (format == PERI_F32 || format == PERI_F16 || format == PERI_BF16) return tbe_get_weights(codes->at, d, n, format);
    const uint8_t *p = (const uint8_t *)codes->at + d;
    __m128i bytes = n >= 16 ? _mm_loadu_si128((const __m128i *)p) : tbe_bytes_part(p, n);
    if (format == PERI_K_ROWS_FP8) return scaled ? v16_of_fp8(bytes) : v16_mul(v16_of_fp8(bytes), v16_set(TBE_FP8_SCALE));
    return v16_fma(v16_of_u8(bytes), codes->scale, codes->bias);
}

#endif
