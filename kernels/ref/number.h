/* SPDX-License-Identifier: Apache-2.0
 *
 * number.h: scalar conversions that ref, the instruction-set variants and CUDA share: f16, bf16 and 8-bit floats with
 * round to nearest even. On a GPU its own instructions convert f16 and bf16: they give the same bits, but for the
 * payload of a NaN.
 */
#ifndef PERI_KERNELS_NUMBER_H
#define PERI_KERNELS_NUMBER_H

#include "../inline.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline int64_t ref_min(int64_t a, int64_t b) { return a < b ? a : b; }

K_INLINE uint32_t k_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

K_INLINE float k_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

K_INLINE float k_bf16_to_f32(uint16_t h) { return k_float((uint32_t)h << 16); }

K_INLINE uint16_t k_f32_to_bf16(float x)
{
#if defined(__CUDA_ARCH__)
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    uint32_t u = k_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u); /* NaN stays NaN, and becomes quiet */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}

K_INLINE float k_f16_to_f32(uint16_t h)
{
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
#else
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    if (exponent == 31) return k_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent) return k_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    float value = (float)mantissa * 0x1p-24f; /* subnormal, exact */
    return sign ? -value : value;
#endif
}

K_INLINE uint16_t k_f32_to_f16(float x)
{
#if defined(__CUDA_ARCH__)
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    uint32_t u = k_bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu)); /* NaN */
    /* 65520 and more round to infinity */
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        /* Subnormal f16 come in steps of 2^-24, which is the spacing of f32 at 0.5: the addition rounds to them. */
        float shifted = k_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (k_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}

/** 2^e for -149 <= e <= 127. */
K_INLINE float k_two_to(int32_t e) { return e >= -126 ? k_float((uint32_t)(e + 127) << 23) : k_float(1u << (e + 149)); }

/* 8-bit floats of sign, e bits of exponent and m = 7 - e of mantissa, with exponent bias b: kernels/quantize.h,
 * kernels/codec.h. */

K_INLINE float k_fp8_largest(int32_t e, int32_t b) { return k_two_to((1 << e) - 2 - b) * (2 - k_two_to(e - 7)); }

K_INLINE uint8_t k_f32_to_fp8(float x, int32_t e, int32_t b)
{
    int32_t m = 7 - e, drop = 23 - m;
    float largest = k_fp8_largest(e, b), magnitude = fabsf(x);
    uint32_t sign = k_bits(x) >> 24 & 0x80u, u;
    if (!(magnitude < largest)) magnitude = largest;
    if (magnitude < k_two_to(1 - b)) return (uint8_t)(sign | (uint32_t)rintf(magnitude * k_two_to(b - 1 + m)));
    u = k_bits(magnitude);
    u += (1u << (drop - 1)) - 1 + (u >> drop & 1u); /* a carry into the exponent is right */
    return (uint8_t)(sign | ((u >> drop) - ((uint32_t)(127 - b) << m)));
}

K_INLINE float k_fp8_to_f32(uint8_t code, int32_t e, int32_t b)
{
    int32_t m = 7 - e, field = (code & 0x7f) >> m;
    uint32_t mantissa = code & ((1u << m) - 1);
    float x = field ? k_float(((uint32_t)(field + 127 - b) << 23) | mantissa << (23 - m))
                    : (float)mantissa * k_two_to(1 - b - m);
    return code & 0x80 ? -x : x;
}

#endif
