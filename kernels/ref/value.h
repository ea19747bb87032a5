/* SPDX-License-Identifier: Apache-2.0
 *
 * value.h: one element of any dtype, read and stored: for ref, where it is slow and obvious.
 */
#ifndef PERI_KERNELS_REF_VALUE_H
#define PERI_KERNELS_REF_VALUE_H

#include <perilune/base.h>

#include <math.h>

#include "number.h"

/** A value on its way between dtypes: floats as double, integers as int64, so that nothing is lost. */
typedef struct ref_value {
    bool integer;
    int64_t i;
    double re, im;
} ref_value;

static ref_value ref_load(const void *p, int64_t i, int32_t dtype)
{
    ref_value v = {0};
    switch (dtype) {
    case PERI_F64: v.re = ((const double *)p)[i]; break;
    case PERI_F32: v.re = ((const float *)p)[i]; break;
    case PERI_F16: v.re = k_f16_to_f32(((const uint16_t *)p)[i]); break;
    case PERI_BF16: v.re = k_bf16_to_f32(((const uint16_t *)p)[i]); break;
    case PERI_I64: v.integer = true; v.i = ((const int64_t *)p)[i]; break;
    case PERI_I32: v.integer = true; v.i = ((const int32_t *)p)[i]; break;
    case PERI_I16: v.integer = true; v.i = ((const int16_t *)p)[i]; break;
    case PERI_I8: v.integer = true; v.i = ((const int8_t *)p)[i]; break;
    case PERI_U8: v.integer = true; v.i = ((const uint8_t *)p)[i]; break;
    case PERI_BOOL: v.integer = true; v.i = ((const uint8_t *)p)[i] != 0; break;
    case PERI_C64: v.re = ((const float *)p)[2 * i]; v.im = ((const float *)p)[2 * i + 1]; break;
    case PERI_C128: v.re = ((const double *)p)[2 * i]; v.im = ((const double *)p)[2 * i + 1]; break;
    default: break;
    }
    return v;
}

/** Nearest float of an integer or double, rounded once. */
static float ref_to_f32(ref_value v) { return v.integer ? (float)v.i : (float)v.re; }
static double ref_to_f64(ref_value v) { return v.integer ? (double)v.i : v.re; }

/** Round to a float so that a second rounding, to a 16-bit float, gives what one rounding would (round to odd). */
static float ref_to_odd(ref_value v)
{
    double x = v.re;
    if (v.integer) {
        uint64_t m = v.i < 0 ? 0u - (uint64_t)v.i : (uint64_t)v.i;
        /* what a double cannot hold goes into its lowest bit */
        if (m >> 53) m = ((m >> 11) | ((m & 0x7ffu) != 0)) << 11;
        x = v.i < 0 ? -(double)m : (double)m;
    }
    float f = (float)x;
    if (!(x - x == 0) || !(f - f == 0) || (double)f == x) return f; /* infinity, NaN, overflow, exact */
    uint32_t bits = k_bits(f);
    if (bits & 1u) return f; /* inexact and odd already */
    return k_float(fabs((double)f) > fabs(x) ? bits - 1u : bits + 1u);
}

static int64_t ref_to_int(ref_value v, double low, double high, int64_t min, int64_t max)
{
    if (v.integer) return v.i;
    if (v.re != v.re) return 0;
    if (v.re <= low) return min;
    if (v.re >= high) return max;
    return (int64_t)v.re;
}

static void ref_store(void *p, int64_t i, int32_t dtype, ref_value v)
{
    switch (dtype) {
    case PERI_F64: ((double *)p)[i] = ref_to_f64(v); break;
    case PERI_F32: ((float *)p)[i] = ref_to_f32(v); break;
    case PERI_F16: ((uint16_t *)p)[i] = k_f32_to_f16(ref_to_odd(v)); break;
    case PERI_BF16: ((uint16_t *)p)[i] = k_f32_to_bf16(ref_to_odd(v)); break;
    case PERI_I64: ((int64_t *)p)[i] = ref_to_int(v, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX); break;
    case PERI_I32: ((int32_t *)p)[i] = (int32_t)ref_to_int(v, INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX); break;
    case PERI_I16: ((int16_t *)p)[i] = (int16_t)ref_to_int(v, INT16_MIN, INT16_MAX, INT16_MIN, INT16_MAX); break;
    case PERI_I8: ((int8_t *)p)[i] = (int8_t)ref_to_int(v, INT8_MIN, INT8_MAX, INT8_MIN, INT8_MAX); break;
    case PERI_U8: ((uint8_t *)p)[i] = (uint8_t)ref_to_int(v, 0, UINT8_MAX, 0, UINT8_MAX); break;
    case PERI_BOOL: ((uint8_t *)p)[i] = v.integer ? v.i != 0 : v.re != 0 || v.im != 0; break;
    case PERI_C64: ((float *)p)[2 * i] = ref_to_f32(v); ((float *)p)[2 * i + 1] = (float)v.im; break;
    case PERI_C128: ((double *)p)[2 * i] = ref_to_f64(v); ((double *)p)[2 * i + 1] = v.im; break;
    default: break;
    }
}

#endif
