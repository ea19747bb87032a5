/* SPDX-License-Identifier: Apache-2.0
 *
 * value.cuh: numbers of every dtype: on their way between dtypes without loss (peri_value), and types by which
 * templates load and store f32, f16 and bf16 as f32 (peri_f32, ...).
 */
#ifndef PERI_KERNELS_CUDA_VALUE_CUH
#define PERI_KERNELS_CUDA_VALUE_CUH

#include "cuda.h"

#include "../ref/number.h"

/** Types of elements: what lies in memory, and how a float gets there and back. */
struct peri_f32 {
    typedef float type;
    static __device__ __forceinline__ float load(const float *p, int64_t i) { return p[i]; }
    static __device__ __forceinline__ void store(float *p, int64_t i, float x) { p[i] = x; }
};
struct peri_f16 {
    typedef uint16_t type;
    static __device__ __forceinline__ float load(const uint16_t *p, int64_t i) { return k_f16_to_f32(p[i]); }
    static __device__ __forceinline__ void store(uint16_t *p, int64_t i, float x) { p[i] = k_f32_to_f16(x); }
    /** Two neighbours, the first one in the low half. */
    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
#if defined(__CUDA_ARCH__)
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#else
        return k_f32_to_f16(low) | (uint32_t)k_f32_to_f16(high) << 16;
#endif
    }
};
struct peri_bf16 {
    typedef uint16_t type;
    static __device__ __forceinline__ float load(const uint16_t *p, int64_t i) { return k_bf16_to_f32(p[i]); }
    static __device__ __forceinline__ void store(uint16_t *p, int64_t i, float x) { p[i] = k_f32_to_bf16(x); }
    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
#if defined(__CUDA_ARCH__)
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#else
        return k_f32_to_bf16(low) | (uint32_t)k_f32_to_bf16(high) << 16;
#endif
    }
};

/** Elements i and i + 1. p + i is a multiple of both. */
template <class T>
static __device__ __forceinline__ void peri_store_two(typename T::type *p, int64_t i, float x, float y)
{
    T::store(p, i, x);
    T::store(p, i + 1, y);
}
template <> __device__ __forceinline__ void peri_store_two<peri_f16>(uint16_t *p, int64_t i, float x, float y)
{
    const uint32_t both = peri_f16::pair(x, y);
    memcpy(p + i, &both, 4);
}
template <> __device__ __forceinline__ void peri_store_two<peri_bf16>(uint16_t *p, int64_t i, float x, float y)
{
    const uint32_t both = peri_bf16::pair(x, y);
    memcpy(p + i, &both, 4);
}

K_INLINE int64_t peri_dtype_bytes(int32_t dtype)
{
    switch (dtype) {
    case PERI_C128: return 16;
    case PERI_F64: case PERI_I64: case PERI_C64: return 8;
    case PERI_F32: case PERI_I32: return 4;
    case PERI_F16: case PERI_BF16: case PERI_I16: return 2;
    default: return 1;
    }
}

/** Floats as double, integers as int64: nothing is lost. */
struct peri_value {
    bool integer;
    int64_t i;
    double re, im;
};

K_INLINE peri_value peri_load(const void *p, int64_t i, int32_t dtype)
{
    peri_value v = {false, 0, 0, 0};
    switch (dtype) {
    case PERI_F64: v.re = ((const double *)p)[i]; break;
    case PERI_F32: v.re = ((const float *)p)[i]; break;
    case PERI_F16: v.re = k_f16_to_f32(((const uint16_t *)p)[i]); break;
    case PERI_BF16: v.re = k_bf16_to_f32(((const uint16_t *)p)[i]); break;
    case PERI_I64: v.integer = true, v.i = ((const int64_t *)p)[i]; break;
    case PERI_I32: v.integer = true, v.i = ((const int32_t *)p)[i]; break;
    case PERI_I16: v.integer = true, v.i = ((const int16_t *)p)[i]; break;
    case PERI_I8: v.integer = true, v.i = ((const int8_t *)p)[i]; break;
    case PERI_U8: v.integer = true, v.i = ((const uint8_t *)p)[i]; break;
    case PERI_BOOL: v.integer = true, v.i = ((const uint8_t *)p)[i] != 0; break;
    case PERI_C64: v.re = ((const float *)p)[2 * i], v.im = ((const float *)p)[2 * i + 1]; break;
    case PERI_C128: v.re = ((const double *)p)[2 * i], v.im = ((const double *)p)[2 * i + 1]; break;
    default: break;
    }
    return v;
}

/** A float such that rounding it again, to 16 bits, is as rounding once: the inexact are made odd. */
K_INLINE float peri_odd_float(const peri_value &v)
{
    double x = v.re;
    if (v.integer) {
        uint64_t m = v.i < 0 ? 0u - (uint64_t)v.i : (uint64_t)v.i;
        if (m >> 53) m = ((m >> 11) | ((m & 0x7ffu) != 0)) << 11;
        x = v.i < 0 ? -(double)m : (double)m;
    }
    float f = (float)x;
    if (!(x - x == 0) || !(f - f == 0) || (double)f == x) return f;
    uint32_t bits = k_bits(f);
    if (bits & 1u) return f;
    return k_float(fabs((double)f) > fabs(x) ? bits - 1u : bits + 1u);
}

/** Towards zero, saturating; NaN: 0. An integer as it is. */
K_INLINE int64_t peri_to_int(const peri_value &v, double low, double high, int64_t min, int64_t max)
{
    if (v.integer) return v.i;
    return v.re != v.re ? 0 : v.re <= low ? min : v.re >= high ? max : (int64_t)v.re;
}

K_INLINE void peri_store(void *p, int64_t i, int32_t dtype, const peri_value &v)
{
    float f = v.integer ? (float)v.i : (float)v.re;
    double d = v.integer ? (double)v.i : v.re;
    switch (dtype) {
    case PERI_F64: ((double *)p)[i] = d; break;
    case PERI_F32: ((float *)p)[i] = f; break;
    case PERI_F16: ((uint16_t *)p)[i] = k_f32_to_f16(peri_odd_float(v)); break;
    case PERI_BF16: ((uint16_t *)p)[i] = k_f32_to_bf16(peri_odd_float(v)); break;
    case PERI_I64: ((int64_t *)p)[i] = peri_to_int(v, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX); break;
    case PERI_I32: ((int32_t *)p)[i] = (int32_t)peri_to_int(v, INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX); break;
    case PERI_I16: ((int16_t *)p)[i] = (int16_t)peri_to_int(v, INT16_MIN, INT16_MAX, INT16_MIN, INT16_MAX); break;
    case PERI_I8: ((int8_t *)p)[i] = (int8_t)peri_to_int(v, INT8_MIN, INT8_MAX, INT8_MIN, INT8_MAX); break;
    case PERI_U8: ((uint8_t *)p)[i] = (uint8_t)peri_to_int(v, 0, UINT8_MAX, 0, UINT8_MAX); break;
    case PERI_BOOL: ((uint8_t *)p)[i] = v.integer ? v.i != 0 : v.re != 0 || v.im != 0; break;
    case PERI_C64: ((float *)p)[2 * i] = f, ((float *)p)[2 * i + 1] = (float)v.im; break;
    case PERI_C128: ((double *)p)[2 * i] = d, ((double *)p)[2 * i + 1] = v.im; break;
    default: break;
    }
}

#endif
