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
/** Is the size of any of these f32 above that of bits @most? */
TBE_INLINE bool u16x_beyond(u16x x, uint32_t most)
{
    return _mm512_cmpgt_epu32_mask((__m512i)(x & 0x7fffffffu), _mm512_set1_epi32((int)most));
}
TBE_INLINE u16x u16x_max(u16x x, u16x y) { return (u16x)_mm512_max_epu32((__m512i)x, (__m512i)y); }
/** tbe_round_f16 of numbers of at most 65504. */
TBE_INLINE h16x v16_round_f16(v16 x, u16x bits)
{
    const __m512 least = _mm512_set1_ps(0x1p-14f), sign = _mm512_set1_ps(-0.0f);
    __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), least, _CMP_LT_OQ);
    __m512 moved = _mm512_mask_add_ps(x.v, small, x.v, _mm512_or_ps(least, _mm512_and_ps(sign, x.v)));
    __m256i h = (__m256i)u16x_to_f16_down((u16x)moved + bits); /* what the bits carry into the last place stays there */
    return (h16x)_mm256_mask_sub_epi16(h, small, h, _mm256_set1_epi16(0x400));
}
/** 32 bf16, the high halves of x and y. */
TBE_INLINE void u16x_store_high(uint16_t *p, u16x x, u16x y)
{
    static const uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16((__m512i)x, _mm512_loadu_si512(odd), (__m512i)y));
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
TBE_INLINE bool u16x_beyond(u16x x, uint32_t most)
{
    __m256i half[2], limit = _mm256_set1_epi32((int)most);
    x &= 0x7fffffffu;
    memcpy(half, &x, sizeof half);
    __m256i odd = _mm256_or_si256(_mm256_cmpgt_epi32(half[0], limit), _mm256_cmpgt_epi32(half[1], limit));
    return !_mm256_testz_si256(odd, odd);
}
TBE_INLINE u16x u16x_max(u16x x, u16x y)
{
    __m256i a[2], b[2];
    memcpy(a, &x, sizeof a);
    memcpy(b, &y, sizeof b);
    a[0] = _mm256_max_epu32(a[0], b[0]);
    a[1] = _mm256_max_epu32(a[1], b[1]);
    memcpy(&x, a, sizeof x);
    return x;
}
/** tbe_round_f16 of numbers of at most 65504. */
TBE_INLINE h16x v16_round_f16(v16 x, u16x bits)
{
    u16x u = u16x_of(x), small = (u16x)((u & 0x7fffffffu) < 0x38800000u);
    f16x away = (f16x)(small & ((u & 0x80000000u) | 0x38800000u));
    u16x moved = (small & (u16x)((f16x)u + away)) | (~small & u);
    return u16x_to_f16_down(moved + bits) - __builtin_convertvector(small & 0x400u, h16x); /* what the bits carry stays */
}
/** 32 bf16, the high halves of x and y. */
TBE_INLINE void u16x_store_high(uint16_t *p, u16x x, u16x y)
{
    *(h16x_unaligned *)p = __builtin_convertvector(x >> 16, h16x);
    *(h16x_unaligned *)(p + 16) = __builtin_convertvector(y >> 16, h16x);
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

/** The largest numbers, as bits of f32. */
enum { TBE_MOST_F16 = 0x477fe000, TBE_MOST_BF16 = 0x7f7f0000 };

/* Rounding, by tbe_round.h. Infinities, NaN and numbers beyond the largest are rare: off the path. */

static __attribute__((noinline)) h16x v16_round_bf16_odd(v16 x, u16x bits)
{
    u16x u = u16x_of(x), size = u & 0x7fffffffu, most = size * 0 + TBE_MOST_BF16;
    u16x odd = (u16x)(size > 0x7f7fffffu), low = u16x_select((u16x)(size > most), most, size);
    u16x h = (u >> 16 & 0x8000u) | (low + bits) >> 16;
    return u16x_narrow(u16x_select(odd, u16x_bf16(u), h));
}

static __attribute__((noinline)) h16x v16_round_f16_odd(v16 x, u16x bits)
{
    u16x u = u16x_of(x), size = u & 0x7fffffffu, most = size * 0 + TBE_MOST_F16;
    h16x odd = u16x_narrow((u16x)(size > 0x7f7fffffu));
    u16x low = (u & 0x80000000u) | u16x_select((u16x)(size > most), most, size);
    return (odd & v16_to_f16(x)) | (~odd & v16_round_f16(v16_of((f16x)low), bits));
}

/** To f16 or bf16, with TBE_BITS_F16 or TBE_BITS_BF16 random bits for each. */
TBE_INLINE h16x v16_round(v16 x, u16x bits, const int32_t dtype)
{
    u16x u = u16x_of(x);
    if (dtype == PERI_BF16) return u16x_beyond(u, TBE_MOST_BF16) ? v16_round_bf16_odd(x, bits) : u16x_narrow((u + bits) >> 16);
    return u16x_beyond(u, TBE_MOST_F16) ? v16_round_f16_odd(x, bits) : v16_round_f16(x, bits);
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
TBE_INLINE u16x tbe_random_first(u16x words, const int32_t dtype) { return words & (dtype == PERI_F16 ? 0x1fffu : 0xffffu); }
TBE_INLINE u16x tbe_random_other(u16x words, const int32_t dtype) { return words >> (dtype == PERI_F16 ? 19 : 16); }
TBE_INLINE void tbe_random_group(uint64_t key, uint32_t lane, uint16_t *out, const int32_t dtype)
{
    u16x x = tbe_random_words(key, lane);
    *(h16x_unaligned *)out = u16x_narrow(tbe_random_first(x, dtype));
    *(h16x_unaligned *)(out + 16) = u16x_narrow(tbe_random_other(x, dtype));
}
