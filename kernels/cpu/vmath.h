/* SPDX-License-Identifier: Apache-2.0
 *
 * vmath.h: functions of a vector of f32, accurate to a few units in the last place unless they say otherwise.
 * Infinities,
 * NaN, zeros and signs come out as in libm; subnormal results of k_exp are flushed to zero.
 */
#ifndef PERI_KERNELS_VMATH_H
#define PERI_KERNELS_VMATH_H

#include "simd.h"

static inline k_vec k_select(k_ivec mask, k_vec yes, k_vec no)
{
    return (k_vec)((mask & (k_ivec)yes) | (~mask & (k_ivec)no));
}
static inline k_vec k_abs(k_vec x) { return (k_vec)((k_ivec)x & 0x7fffffff); }

/** @whole with the sign of @x, so that a zero has it; x itself from 2^23 on, where all numbers are whole, and NaN. */
static inline k_vec k_or_whole(k_vec x, k_vec whole)
{
    const k_vec signed_ = (k_vec)((k_ivec)whole | ((k_ivec)x & (int32_t)0x80000000));
    return k_select(k_abs(x) < k_set(0x1p23f), signed_, x);
}
/** x rounded towards 0, where |x| < 2^23. */
static inline k_vec k_part(k_vec x)
{
    const k_vec small = k_select(k_abs(x) < k_set(0x1p23f), x, k_set(0));
    return __builtin_convertvector(__builtin_convertvector(small, k_ivec), k_vec);
}
static inline k_vec k_trunc(k_vec x) { return k_or_whole(x, k_part(x)); }
static inline k_vec k_floor(k_vec x)
{
    const k_vec part = k_part(x);
    return k_or_whole(x, k_select(part > x, part - 1, part));
}
static inline k_vec k_ceil(k_vec x)
{
    const k_vec part = k_part(x);
    return k_or_whole(x, k_select(part < x, part + 1, part));
}
/** To the nearest, of two the even one: what the addition does. */
static inline k_vec k_round(k_vec x) { return k_or_whole(x, k_abs(x) + k_set(0x1p23f) - k_set(0x1p23f)); }

/** e^r - 1 for |r| <= ln 2 / 2: the Taylor series to r^7 (next term below 6e-9). */
static inline k_vec k_exp_small(k_vec r)
{
    k_vec p = k_fma(r, k_set(1 / 5040.0f), k_set(1 / 720.0f));
    p = k_fma(p, r, k_set(1 / 120.0f));
    p = k_fma(p, r, k_set(1 / 24.0f));
    p = k_fma(p, r, k_set(1 / 6.0f));
    p = k_fma(p, r, k_set(0.5f));
    return k_fma(p * r, r, r);
}

/** e^x: x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its series. */
static inline k_vec k_exp(k_vec x)
{
    const k_vec shift = k_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    k_vec t = k_fma(x, k_set(1.44269504f), shift), n = t - shift;
    k_vec r = k_fma(n, k_set(-0x1.62e4p-1f), x); /* ln 2 in two parts: the first has few bits, so that n times it is
                                                    exact */
    r = k_fma(n, k_set(-0x1.7f7d1cp-20f), r);
    const k_vec p = k_exp_small(r);
    /* n sits in the low bits of t; 2^n in two factors, because 2^128 is no float. */
    k_ivec whole = (k_ivec)((k_uvec)t - 0x4b400000u), half = whole >> 1;
    k_vec y = (p + 1) * (k_vec)((k_uvec)(half + 127) << 23) * (k_vec)((k_uvec)(whole - half + 127) << 23);
    y = k_select(x > k_set(88.7228355f), k_set(1) / k_set(0), y);
    y = k_select(x < k_set(-87.3365402f), k_set(0), y);
    return k_select(x == x, y, x);
}

/** ln x: x = 2^e m with m in [sqrt(1/2), sqrt 2), ln m = 2 artanh s with s = (m - 1) / (m + 1), to s^11 (next term
 *  below 2e-11). */
static inline k_vec k_log(k_vec x)
{
    k_ivec tiny = x < k_set(0x1p-126f);
    k_vec y = k_select(tiny, x * k_set(0x1p23f), x);
    k_ivec e = (k_ivec)((k_uvec)y - 0x3f3504f3u) >> 23;
    k_vec m = (k_vec)((k_uvec)y - ((k_uvec)e << 23)),
          exponent = __builtin_convertvector(e, k_vec) - k_select(tiny, k_set(23), k_set(0));
    k_vec f = m - 1, s = f / (f + 2), s2 = s * s;
    k_vec p = k_fma(s2, k_set(2 / 11.0f), k_set(2 / 9.0f));
    p = k_fma(p, s2, k_set(2 / 7.0f));
    p = k_fma(p, s2, k_set(2 / 5.0f));
    p = k_fma(p, s2, k_set(2 / 3.0f));
    /* ln m = 2 s + s^3 p, and 2 s = f - s f: that form keeps the rounding of s out of the leading term. */
    k_vec lower = k_fma(exponent, k_set(0x1.7f7d1cp-20f), s * (s2 * p - f));
    k_vec result = k_fma(exponent, k_set(0x1.62e4p-1f), f + lower);
    result = k_select(x == k_set(0), k_set(-1) / k_set(0), result);
    result = k_select(x < k_set(0), k_set(0) / k_set(0), result);
    return k_select(x < k_set(1) / k_set(0), result, x); /* infinity and NaN: themselves */
}

/** ln(1 + x) for finite x: the quotient undoes the rounding of 1 + x. */
static inline k_vec k_log1p(k_vec x)
{
    k_vec u = x + 1, d = u - 1;
    return k_select(d == k_set(0), x, k_log(u) * (x / k_select(d == k_set(0), k_set(1), d)));
}

static inline k_vec k_sigmoid(k_vec x)
{
    k_vec e = k_exp(-k_abs(x)), y = 1 / (e + 1);
    return k_select(x < k_set(0), e * y, y);
}

/** ln(1 + e^x) */
static inline k_vec k_softplus(k_vec x) { return k_max(x, k_set(0)) + k_log1p(k_exp(-k_abs(x))); }

/** tanh: a series where the quotient would cancel, else (1 - e^-2|x|) / (1 + e^-2|x|) with x's sign. */
static inline k_vec k_tanh(k_vec x)
{
    k_vec a = k_abs(x), e = k_exp(-2 * a), big = (1 - e) / (1 + e), x2 = x * x;
    k_vec p = k_fma(x2, k_set(-1382 / 155925.0f), k_set(62 / 2835.0f));
    p = k_fma(p, x2, k_set(-17 / 315.0f));
    p = k_fma(p, x2, k_set(2 / 15.0f));
    p = k_fma(p, x2, k_set(-1 / 3.0f));
    k_vec small = k_fma(p * x2, a, a);
    k_vec y = k_select(a < k_set(0.35f), small, big);
    return (k_vec)((k_ivec)y | ((k_ivec)x & (int32_t)0x80000000));
}

/** exp(-x^2 / 2), as k_exp is made, for results that are no subnormals: beyond |x| = 13.2 it is 0. What the square was
 *  rounded by is taken off r, since it counts where the square is large. */
static inline k_vec k_gauss(k_vec x)
{
    const k_vec shift = k_set(12582912.0f), square = x * x, z = square * k_set(-0.5f);
    const k_vec t = k_fma(z, k_set(1.44269504f), shift), n = t - shift;
    k_vec r = k_fma(k_fma(x, x, -square), k_set(-0.5f), k_fma(n, k_set(-0x1.62e4p-1f), z));
    r = k_fma(n, k_set(-0x1.7f7d1cp-20f), r);
    const k_vec p = k_exp_small(r);
    const k_vec y = (k_vec)((k_uvec)(p + 1) + ((k_uvec)t << 23)); /* times 2^n, whose n sits in the low bits of t */
    return k_select(k_abs(x) > k_set(13.2f), k_set(0), y);
}

/** The normal distribution function (1 + erf(x / sqrt 2)) / 2, @gauss being k_gauss(x). Of the side that x lies on it
 *  is gauss * t * p, t = 1 / (|x| + 3); p is a polynomial in s = (|x| - 3) / (|x| + 3), fitted to what that leaves of
 *  it up to |x| = 14 with a relative error below 5e-8. */
static inline k_vec k_normal_cdf(k_vec x, k_vec gauss)
{
    const k_vec t = 1 / (k_abs(x) + 3), s = k_fma(t, k_set(-6), k_set(1));
    k_vec p = k_fma(s, k_set(-0.000266768562f), k_set(-0.000903254317f));
    p = k_fma(p, s, k_set(0.00107603904f));
    p = k_fma(p, s, k_set(0.00692392373f));
    p = k_fma(p, s, k_set(-0.0104799364f));
    p = k_fma(p, s, k_set(-0.0472561009f));
    p = k_fma(p, s, k_set(0.230019346f));
    p = k_fma(p, s, k_set(-0.509332299f));
    p = k_fma(p, s, k_set(0.729083657f));
    const k_vec tail = p * t * gauss;
    return k_select(x < k_set(0), tail, 1 - tail);
}

/* -- sine and cosine, computed in f64 ------------------------------------------------------------------------------ */

typedef double k_dvec __attribute__((vector_size(K_LANES * 4)));
typedef float k_half __attribute__((vector_size(K_LANES * 2)));

/** 2 / pi in binary, behind a word of zeros. */
static const uint32_t k_two_over_pi[8] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1,
                                          0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};

/** x = q pi / 2 + r, |r| <= pi / 4, for |x| >= 2^20; NaN for infinities and NaN. |x| is m 2^e, m being whole: of its
 *  product with 2 / pi the bits that stand for multiples of 4 need not be known, so 96 bits of 2 / pi are enough,
 *  beginning with the one that is worth 2 m. All but 2^-62 of the product's fraction is kept, and no f32 comes nearer
 *  to a multiple of pi / 2 than 2^-29. */
static inline double k_far_angle(float x, int64_t *q)
{
    uint32_t bits, w[3];
    memcpy(&bits, &x, 4);
    const int32_t e = (int32_t)(bits >> 23 & 255) - 150, first = e + 30;
    const uint64_t m = (bits & 0x7fffff) | 0x800000;
    *q = 0;
    if (e == 105) return (double)(x - x);
    for (int32_t i = 0; i < 3; i++) {
        const uint32_t *at = k_two_over_pi + first / 32 + i;
        w[i] = (uint32_t)(((uint64_t)at[0] << 32 | at[1]) >> (32 - first % 32));
    }
    const uint64_t low = m * w[2], middle = m * w[1] + (low >> 32), high = m * w[0] + (middle >> 32);
    const uint64_t turns = high << 32 | (middle & 0xffffffff), whole = (turns + ((uint64_t)1 << 61)) >> 62;
    const double r = (double)(int64_t)(turns - (whole << 62)) * 0x1.921fb54442d18p-62;
    *q = bits >> 31 ? -(int64_t)whole : (int64_t)whole;
    return bits >> 31 ? -r : r;
}

/** sin(v + quarter pi / 2); `far`: some |v| are 2^20 or more. v = q pi / 2 + r: pi / 2 in two parts, of which the first
 *  has 33 bits, so that q times it is exact for |v| < 2^20, and so is what v leaves. The series to r^11 and r^10 leave
 *  less than 2e-10 of the result: it is rounded once, to f32. */
static inline k_half k_sin_half(k_half v, bool far, int64_t quarter)
{
    const k_dvec x = __builtin_convertvector(v, k_dvec), shift = (k_dvec){0} + 0x1.8p52;
    const k_dvec t = x * 0x1.45f306dc9c883p-1 + shift, n = t - shift; /* the sum rounds to a whole number */
    k_dvec r = (x - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
    k_lvec q = (k_lvec)t; /* whose low bits are n */
    for (int32_t i = 0; far && i < K_LANES / 2; i++) {
        int64_t whole;
        if (fabsf(v[i]) < 0x1p20f) continue;
        r[i] = k_far_angle(v[i], &whole);
        q[i] = whole;
    }
    q += quarter;
    const k_dvec r2 = r * r;
    k_dvec s = r2 * (-1 / 39916800.0) + 1 / 362880.0, c = r2 * (-1 / 3628800.0) + 1 / 40320.0;
    s = s * r2 - 1 / 5040.0;
    s = s * r2 + 1 / 120.0;
    s = s * r2 - 1 / 6.0;
    s = (s * r2 + 1) * r;
    c = c * r2 - 1 / 720.0;
    c = c * r2 + 1 / 24.0;
    c = c * r2 - 0.5;
    c = c * r2 + 1;
    const k_lvec odd = -(q & 1);
    const k_lvec y = ((odd & (k_lvec)c) | (~odd & (k_lvec)s)) ^ (k_lvec)((q & 2) << 62);
    return __builtin_convertvector((k_dvec)y, k_half);
}

static inline k_vec k_turned(k_vec x, int64_t quarter)
{
    const bool far = k_any(~(k_abs(x) < k_set(0x1p20f)));
    k_half half[2];
    memcpy(half, &x, sizeof x);
    half[0] = k_sin_half(half[0], far, quarter);
    half[1] = k_sin_half(half[1], far, quarter);
    memcpy(&x, half, sizeof x);
    return x;
}
static inline k_vec k_sin(k_vec x) { return k_turned(x, 0); }
static inline k_vec k_cos(k_vec x) { return k_turned(x, 1); }

#endif
