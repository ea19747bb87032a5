/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_simd.h: sixteen f32 as one value, on every instruction set, because the sums of kernels/tbe.h are defined in
 * sixteens: one register with AVX-512, two with AVX2. Products and sums fuse only where `v16_fma` says so.
 */
#ifndef PERI_KERNELS_TBE_SIMD_H
#define PERI_KERNELS_TBE_SIMD_H

#include "simd.h"

#define TBE_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
typedef struct v16 {
    __m512 v;
} v16;
enum { TBE_PANEL = 16 }; /* accumulators that fit into the registers, in sixteens */

TBE_INLINE v16 v16_zero(void) { return (v16){_mm512_setzero_ps()}; }
TBE_INLINE v16 v16_set(float x) { return (v16){_mm512_set1_ps(x)}; }
TBE_INLINE v16 v16_load(const float *p) { return (v16){_mm512_loadu_ps(p)}; }
TBE_INLINE void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a.v); }
/** The first eight; the others read as 0 and are not written. */
TBE_INLINE v16 v16_load8(const float *p) { return (v16){_mm512_zextps256_ps512(_mm256_loadu_ps(p))}; }
TBE_INLINE void v16_store8(float *p, v16 a) { _mm256_storeu_ps(p, _mm512_castps512_ps256(a.v)); }
/** Past the caches; p is the begin of a line. */
TBE_INLINE void v16_stream(float *p, v16 a) { _mm512_stream_ps(p, a.v); }
/** The first n of sixteen (0 <= n <= 16): the others read as 0 and are not written. By a register no wider than it must
 *  be: of an AMD a masked load waits for all lines that its width touches, masked out or not, and nobody asked for the
 *  line behind a narrow row. */
TBE_INLINE v16 v16_load_part(const float *p, int64_t n)
{
    const uint32_t mask = (1u << n) - 1u;
    if (n > 8) return (v16){_mm512_maskz_loadu_ps((__mmask16)mask, p)};
    if (n > 4) return (v16){_mm512_zextps256_ps512(_mm256_maskz_loadu_ps((__mmask8)mask, p))};
    return (v16){_mm512_zextps128_ps512(_mm_maskz_loadu_ps((__mmask8)mask, p))};
}
TBE_INLINE void v16_store_part(float *p, v16 a, int64_t n)
{
    const uint32_t mask = (1u << n) - 1u;
    __m256 low8 = _mm512_castps512_ps256(a.v);
    __m128 low4 = _mm512_castps512_ps128(a.v);
    /* gcc would make one instruction of cast and store, a masked vextractf32x4 to memory: that one faults for lanes
       masked out too (its class of exceptions is E6NF), where the row before the end of a mapping is not a multiple of
       four columns */
    __asm__("" : "+v"(low8), "+v"(low4));
    if (n > 8) _mm512_mask_storeu_ps(p, (__mmask16)mask, a.v);
    else if (n > 4) _mm256_mask_storeu_ps(p, (__mmask8)mask, low8);
    else _mm_mask_storeu_ps(p, (__mmask8)mask, low4);
}
TBE_INLINE v16 v16_add(v16 a, v16 b) { return (v16){_mm512_add_ps(a.v, b.v)}; }
TBE_INLINE v16 v16_sub(v16 a, v16 b) { return (v16){_mm512_sub_ps(a.v, b.v)}; }
TBE_INLINE v16 v16_mul(v16 a, v16 b) { return (v16){_mm512_mul_ps(a.v, b.v)}; }
TBE_INLINE v16 v16_div(v16 a, v16 b) { return (v16){_mm512_div_ps(a.v, b.v)}; }
TBE_INLINE v16 v16_sqrt(v16 a) { return (v16){_mm512_sqrt_ps(a.v)}; }
/** a * b + c, rounded once. */
TBE_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return (v16){_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/** Clamp to +-most; NaN stays. */
TBE_INLINE v16 v16_clamp(v16 a, v16 most)
{
    return (v16){_mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), most.v), _mm512_min_ps(most.v, a.v))};
}
/** Sixteen f16, or the first n (0 <= n <= 16): the others read as 0. */
TBE_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return (v16){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
}
TBE_INLINE __m256i h16_load_part(const uint16_t *p, int64_t n)
{
    const uint32_t mask = (1u << n) - 1u;
    if (n > 8) return _mm256_maskz_loadu_epi16((__mmask16)mask, p);
    return _mm256_zextsi128_si256(_mm_maskz_loadu_epi16((__mmask8)mask, p));
}
TBE_INLINE v16 v16_load_f16_part(const uint16_t *p, int64_t n) { return (v16){_mm512_cvtph_ps(h16_load_part(p, n))}; }
TBE_INLINE v16 v16_of_bf16(__m256i h)
{
    return (v16){_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
TBE_INLINE v16 v16_load_bf16(const uint16_t *p) { return v16_of_bf16(_mm256_loadu_si256((const __m256i *)p)); }
TBE_INLINE v16 v16_load_bf16_part(const uint16_t *p, int64_t n) { return v16_of_bf16(h16_load_part(p, n)); }
/** The last steps of sum16. */
TBE_INLINE float v16_sum(v16 a)
{
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
#else
typedef struct v16 {
    __m256 a, b;
} v16;
enum { TBE_PANEL = 4 };

TBE_INLINE v16 v16_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TBE_INLINE v16 v16_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TBE_INLINE v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TBE_INLINE void v16_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
TBE_INLINE v16 v16_load8(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_setzero_ps()}; }
TBE_INLINE void v16_store8(float *p, v16 x) { _mm256_storeu_ps(p, x.a); }
TBE_INLINE void v16_stream(float *p, v16 x)
{
    _mm256_stream_ps(p, x.a);
    _mm256_stream_ps(p + 8, x.b);
}
TBE_INLINE v16 v16_load_part(const float *p, int64_t n)
{
    if (n > 8) return (v16){_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, k_mask(n - 8))};
    if (n > 4) return (v16){_mm256_maskload_ps(p, k_mask(n)), _mm256_setzero_ps()};
    return (v16){_mm256_zextps128_ps256(_mm_maskload_ps(p, _mm256_castsi256_si128(k_mask(n)))), _mm256_setzero_ps()};
}
/** Not by a masked store: of an AMD before Zen 4 that is some 40 operations. */
TBE_INLINE void v16_store_part(float *p, v16 x, int64_t n)
{
    __m256 eight = x.a;
    if (n & 16) {
        v16_store(p, x);
        return;
    }
    if (n & 8) {
        _mm256_storeu_ps(p, eight);
        p += 8;
        eight = x.b;
    }
    __m128 four = _mm256_castps256_ps128(eight);
    if (n & 4) {
        _mm_storeu_ps(p, four);
        p += 4;
        four = _mm256_extractf128_ps(eight, 1);
    }
    if (n & 2) {
        _mm_storel_pi((__m64 *)p, four);
        p += 2;
        four = _mm_movehl_ps(four, four);
    }
    if (n & 1) _mm_store_ss(p, four);
}
TBE_INLINE v16 v16_add(v16 x, v16 y) { return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TBE_INLINE v16 v16_sub(v16 x, v16 y) { return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TBE_INLINE v16 v16_mul(v16 x, v16 y) { return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TBE_INLINE v16 v16_div(v16 x, v16 y) { return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TBE_INLINE v16 v16_sqrt(v16 x) { return (v16){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
TBE_INLINE v16 v16_fma(v16 x, v16 y, v16 z)
{
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
TBE_INLINE v16 v16_clamp(v16 x, v16 most)
{
    __m256 least = _mm256_sub_ps(_mm256_setzero_ps(), most.a);
    return (v16){_mm256_max_ps(least, _mm256_min_ps(most.a, x.a)), _mm256_max_ps(least, _mm256_min_ps(most.b, x.b))};
}
/** Sixteen f16, or the first n (0 <= n <= 16): the others read as 0. */
TBE_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
TBE_INLINE __m256 v8_of_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
TBE_INLINE v16 v16_load_bf16(const uint16_t *p)
{
    return (v16){v8_of_bf16(_mm_loadu_si128((const __m128i *)p)),
                 v8_of_bf16(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline v16 v16_load_f16_part(const uint16_t *p, int64_t n)
{
    uint16_t room[16] = {0};
    __builtin_memcpy(room, p, (size_t)n * 2);
    return v16_load_f16(room);
}
static inline v16 v16_load_bf16_part(const uint16_t *p, int64_t n)
{
    uint16_t room[16] = {0};
    __builtin_memcpy(room, p, (size_t)n * 2);
    return v16_load_bf16(room);
}
TBE_INLINE float v16_sum(v16 x)
{
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
#endif

/** Bytes of a weight of an f32, f16 or bf16 table. */
TBE_INLINE int64_t tbe_weight_bytes(int32_t dtype) { return dtype == PERI_F32 ? 4 : 2; }

/** Up to sixteen weights of a row from element d on; n: elements that are left, what lies beyond reads as 0. @dtype
 *  (PERI_F32, PERI_F16, PERI_BF16) is best known at compile time. */
TBE_INLINE v16 tbe_get_weights(const void *row, int64_t d, int64_t n, const int32_t dtype)
{
    const uint16_t *half = (const uint16_t *)row + d;
    if (dtype == PERI_F16) return n >= 16 ? v16_load_f16(half) : v16_load_f16_part(half, n);
    if (dtype == PERI_BF16) return n >= 16 ? v16_load_bf16(half) : v16_load_bf16_part(half, n);
    return n >= 16 ? v16_load((const float *)row + d) : v16_load_part((const float *)row + d, n);
}

enum { TBE_LINE = 64 }; /* bytes that a prefetch fetches */

/** Fetch a cache line into the second-level cache, or @near into the first, whose few miss buffers gathers of rows run
 *  into on some processors. */
TBE_INLINE void tbe_prefetch_line(const char *p, const bool near)
{
    if (near) _mm_prefetch(p, _MM_HINT_T0);
    else _mm_prefetch(p, _MM_HINT_T1);
}

/** tbe_prefetch_line for @lines lines. */
TBE_INLINE void tbe_prefetch(const char *p, int64_t lines, const bool near)
{
    if (near)
        for (int64_t l = 0; l < lines; l++) tbe_prefetch_line(p + l * TBE_LINE, true);
    else
        for (int64_t l = 0; l < lines; l++) tbe_prefetch_line(p + l * TBE_LINE, false);
}

#endif
