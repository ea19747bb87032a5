/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_round.c: storing f32 as f16 and bf16, to nearest even and stochastically: kernels/ref/tbe_round.h in sixteens. Written with
 * vectors of sixteen 32-bit lanes, which the compiler splits in two where registers are half as wide.
 */
typedef uint32_t u16x __attribute__((vector_size(64)));
typedef float f16x __attribute__((vector_size(64)));
typedef uint16_t h16x __attribute__((vector_size(32)));
typedef uint16_t h16x_unaligned __attribute__((vector_size(32), aligned(2)));

#if defined(__AVX512F__)
TBE_INLINE u16x u16x_of(v16 x) { return (u16x)x.v; }
TBE_INLINE v16 v16_of(f16x x) { return (v16){(__m512)x}; }
TBE_INLINE v16 v16_sign(v16 c)
{
    __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1);
    __m512 up = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(c.v, zero, _CMP_GT_OQ), c.v, one);
    return (v16){_mm512_mask_blend_ps(_mm512_cmp_ps_mask(c.v, zero, _CMP_LT_OQ), up, _mm512_sub_ps(zero, one))};
}
TBE_INLINE h16x v16_to_f16(v16 x) { return (h16x)_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
TBE_INLINE h16x u16x_to_f16_down(u16x x) { return (h16x)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_ZERO); }
/** Is any of the numbers, 0 apart, outside [least, most]? All are below 2^31. */
TBE_INLINE bool u16x_beyond(u16x x, uint32_t least, uint32_t most)
{
    __m512i v = (__m512i)x;
    __mmask16 some = _mm512_test_epi32_mask(v, v);
    return _mm512_mask_cmpgt_epu32_mask(some, _mm512_sub_epi32(v, _mm512_set1_epi32((int)least)), _mm512_set1_epi32((int)(most - least)));
}
TBE_INLINE void h16_store(uint16_t *p, h16x h, int64_t n)
{
    if (n >= 16) *(h16x_unaligned *)p = h;
    else _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)h);
}
#else
TBE_INLINE u16x u16x_of(v16 x)
{
    u16x u;
    memcpy(&u, &x, sizeof u);
    return u;
}
TBE_INLINE v16 v16_of(f16x x)
{
    v16 v;
    memcpy(&v, &x, sizeof v);
    return v;
}
TBE_INLINE __m256 v8_sign(__m256 c)
{
    __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1);
    __m256 up = _mm256_blendv_ps(c, one, _mm256_cmp_ps(c, zero, _CMP_GT_OQ));
    return _mm256_blendv_ps(up, _mm256_sub_ps(zero, one), _mm256_cmp_ps(c, zero, _CMP_LT_OQ));
}
TBE_INLINE v16 v16_sign(v16 c) { return (v16){v8_sign(c.a), v8_sign(c.b)}; }
TBE_INLINE h16x v16_to_f16(v16 x)
{
    __m128i a = _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT), b = _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
    return (h16x)_mm256_set_m128i(b, a);
}
TBE_INLINE h16x u16x_to_f16_down(u16x x)
{
    __m256 half[2];
    memcpy(half, &x, sizeof half);
    return (h16x)_mm256_set_m128i(_mm256_cvtps_ph(half[1], _MM_FROUND_TO_ZERO), _mm256_cvtps_ph(half[0], _MM_FROUND_TO_ZERO));
}
TBE_INLINE __m256i v8_beyond(__m256i x, uint32_t least, uint32_t most)
{
    __m256i none = _mm256_cmpeq_epi32(x, _mm256_setzero_si256()), below = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)least), x);
    return _mm256_or_si256(_mm256_andnot_si256(none, below), _mm256_cmpgt_epi32(x, _mm256_set1_epi32((int)most)));
}
/** Is any of the numbers, 0 apart, outside [least, most]? All are below 2^31. */
TBE_INLINE bool u16x_beyond(u16x x, uint32_t least, uint32_t most)
{
    __m256i half[2];
    memcpy(half, &x, sizeof half);
    __m256i odd = _mm256_or_si256(v8_beyond(half[0], least, most), v8_beyond(half[1], least, most));
    return !_mm256_testz_si256(odd, odd);
}
TBE_INLINE void h16_store(uint16_t *p, h16x h, int64_t n) { memcpy(p, &h, (size_t)(n >= 16 ? 16 : n) * 2); }
#endif

/** c ? x : y, lane by lane; c is all ones or all zeros. */
TBE_INLINE u16x u16x_select(u16x c, u16x x, u16x y) { return (c & x) | (~c & y); }
TBE_INLINE h16x u16x_narrow(u16x x) { return __builtin_convertvector(x, h16x); }

/** bf16 bits of f32 bits, to nearest even. */
TBE_INLINE u16x u16x_bf16(u16x u)
{
    u16x nan = (u16x)((u & 0x7fffffffu) > 0x7f800000u);
    return u16x_select(nan, u >> 16 | 0x40u, (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
TBE_INLINE h16x v16_to_bf16(v16 x) { return u16x_narrow(u16x_bf16(u16x_of(x))); }

/* Rounding, by tbe_round.h. What makes it long, infinities, NaN, the largest numbers and f16's subnormals, is rare: off the path. */

static __attribute__((noinline)) h16x v16_round_bf16_odd(v16 x, u16x bits)
{
    u16x u = u16x_of(x), size = u & 0x7fffffffu, most = size * 0 + 0x7f7f0000u;
    u16x odd = (u16x)(size > 0x7f7fffffu), low = u16x_select((u16x)(size > most), most, size);
    u16x h = (u >> 16 & 0x8000u) | (low + bits) >> 16;
    return u16x_narrow(u16x_select(odd, u16x_bf16(u), h));
}

static __attribute__((noinline)) h16x v16_round_f16_odd(v16 x, u16x bits)
{
    u16x u = u16x_of(x), size = u & 0x7fffffffu, most = size * 0 + 0x477fe000u;
    u16x odd = (u16x)(size > 0x7f7fffffu), low = u16x_select((u16x)(size > most), most, size);
    u16x normal = (low - 0x38000000u + (bits >> 3)) >> 13, small = (u16x)(low < 0x38800000u);
    f16x steps = (f16x)(small & low) * 0x1p24f; /* 0 where it is not asked for, so that the conversion stays in range */
    typedef int32_t i16x __attribute__((vector_size(64)));
    i16x whole = __builtin_convertvector(steps, i16x);
    f16x rest = steps - __builtin_convertvector(whole, f16x);
    f16x edge = __builtin_convertvector((i16x)bits, f16x) * 0x1p-16f + 0x1p-17f;
    u16x subnormal = (u16x)whole - (u16x)(rest > edge);
    u16x h = (u >> 16 & 0x8000u) | u16x_select(small, subnormal, normal);
    u16x plain = __builtin_convertvector(v16_to_f16(x), u16x);
    return u16x_narrow(u16x_select(odd, plain, h));
}

/** To f16 or bf16, with 16 random bits for each. */
TBE_INLINE h16x v16_round(v16 x, u16x bits, const int32_t dtype)
{
    u16x u = u16x_of(x), size = u & 0x7fffffffu;
    if (dtype == PERI_BF16) return u16x_beyond(size, 0, 0x7f7f0000u) ? v16_round_bf16_odd(x, bits) : u16x_narrow((u + bits) >> 16);
    /* What the bits carry into the f16's last place stays there when the rest is cut off. */
    return u16x_beyond(size, 0x38800000u, 0x477fe000u) ? v16_round_f16_odd(x, bits) : u16x_to_f16_down(u + (bits >> 3));
}

/** Random words of 32 columns: the low halves are of the first sixteen, the high ones of the others. */
TBE_INLINE u16x tbe_random_words(uint64_t key, uint32_t lane)
{
    static const u16x places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    u16x x = places * 0x9e3779b9u + (lane * 0x9e3779b9u + (uint32_t)key);
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0x846ca68bu;
    return x ^ x >> 16;
}
TBE_INLINE void tbe_random_group(uint64_t key, uint32_t lane, uint16_t *out)
{
    u16x x = tbe_random_words(key, lane);
    *(h16x_unaligned *)out = u16x_narrow(x & 0xffffu);
    *(h16x_unaligned *)(out + 16) = u16x_narrow(x >> 16);
}
