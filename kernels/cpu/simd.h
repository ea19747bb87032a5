/* SPDX-License-Identifier: Apache-2.0
 *
 * simd.h: one vector of f32, as wide as the instruction set: the few words in which the families are written. GCC's
 * vector extension carries the arithmetic; loads, stores and conversions that need an instruction are named here.
 */
#ifndef PERI_KERNELS_SIMD_H
#define PERI_KERNELS_SIMD_H

#include "intrinsics.h"
#include <stdint.h>

#if defined(__AVX512F__)
enum { K_LANES = 16 };
#else
enum { K_LANES = 8 };
#endif

typedef float k_vec __attribute__((vector_size(K_LANES * 4)));
typedef float k_vec_unaligned __attribute__((vector_size(K_LANES * 4), aligned(4)));
typedef int32_t k_ivec __attribute__((vector_size(K_LANES * 4)));
typedef uint32_t k_uvec __attribute__((vector_size(K_LANES * 4)));
typedef uint32_t k_uvec __attribute__((vector_size(K_LANES * 4)));

typedef int64_t k_lvec __attribute__((vector_size(K_LANES * 4)));
typedef int64_t k_lvec_unaligned __attribute__((vector_size(K_LANES * 4), aligned(8)));
enum { K_LONGS = K_LANES / 2 };

static inline k_vec k_load(const float *p) { return *(const k_vec_unaligned *)p; }
static inline void k_store(float *p, k_vec v) { *(k_vec_unaligned *)p = v; }
static inline k_vec k_set(float x) { return x - (k_vec){0}; }

#if defined(__AVX512F__)
static inline k_vec k_sqrt(k_vec v) { return (k_vec)_mm512_sqrt_ps((__m512)v); }
static inline k_vec k_max(k_vec a, k_vec b) { return (k_vec)_mm512_max_ps((__m512)a, (__m512)b); }
/* a b + c */
static inline k_vec k_fma(k_vec a, k_vec b, k_vec c) { return (k_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
/** Whether any lane of a comparison's result is true. */
static inline bool k_any(k_ivec mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }
static inline k_vec k_load_f16(const uint16_t *p)
{
    return (k_vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void k_store_f16(uint16_t *p, k_vec v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
static inline k_vec k_load_bf16(const uint16_t *p)
{
    return (k_vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
static inline k_vec k_load_i8(const int8_t *p)
{
    return (k_vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline float k_sum(k_vec v) { return _mm512_reduce_add_ps((__m512)v); }
static inline k_lvec k_widen(const int32_t *p)
{
    return (k_lvec)_mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)p));
}
/** Lane i: the sum of lanes 0..i. */
static inline k_lvec k_scan(k_lvec v)
{
    const __m512i zero = _mm512_setzero_si512();
    v += (k_lvec)_mm512_alignr_epi64((__m512i)v, zero, 7);
    v += (k_lvec)_mm512_alignr_epi64((__m512i)v, zero, 6);
    return v + (k_lvec)_mm512_alignr_epi64((__m512i)v, zero, 4);
}
/** The last lane in all of them. */
static inline k_lvec k_last(k_lvec v) { return (k_lvec)_mm512_permutexvar_epi64(_mm512_set1_epi64(7), (__m512i)v); }
/** Lanes 0..n-1 (n < K_LANES); the others read as zero and are not written. */
static inline k_vec k_load_part(const float *p, int64_t n)
{
    return (k_vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
static inline void k_store_part(float *p, k_vec v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
}
#else
static inline k_vec k_sqrt(k_vec v) { return (k_vec)_mm256_sqrt_ps((__m256)v); }
static inline k_vec k_max(k_vec a, k_vec b) { return (k_vec)_mm256_max_ps((__m256)a, (__m256)b); }
/* a b + c */
static inline k_vec k_fma(k_vec a, k_vec b, k_vec c) { return (k_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline bool k_any(k_ivec mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
static inline k_vec k_load_f16(const uint16_t *p)
{
    return (k_vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void k_store_f16(uint16_t *p, k_vec v)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
static inline k_vec k_load_bf16(const uint16_t *p)
{
    return (k_vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
static inline k_vec k_load_i8(const int8_t *p)
{
    return (k_vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline float k_sum(k_vec v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline k_lvec k_widen(const int32_t *p)
{
    return (k_lvec)_mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)p));
}
static inline k_lvec k_scan(k_lvec v)
{
    v += (k_lvec)_mm256_blend_epi32(_mm256_permute4x64_epi64((__m256i)v, _MM_SHUFFLE(2, 1, 0, 0)),
                                    _mm256_setzero_si256(), 0x03);
    return v + (k_lvec)_mm256_permute2x128_si256((__m256i)v, (__m256i)v, 0x08);
}
static inline k_lvec k_last(k_lvec v) { return (k_lvec)_mm256_permute4x64_epi64((__m256i)v, _MM_SHUFFLE(3, 3, 3, 3)); }
static inline __m256i k_mask(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline k_vec k_load_part(const float *p, int64_t n) { return (k_vec)_mm256_maskload_ps(p, k_mask(n)); }
static inline void k_store_part(float *p, k_vec v, int64_t n) { _mm256_maskstore_ps(p, k_mask(n), (__m256)v); }
#endif

#endif
