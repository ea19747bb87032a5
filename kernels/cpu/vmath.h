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

#endif
