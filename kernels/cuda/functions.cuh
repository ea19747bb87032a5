/* SPDX-License-Identifier: Apache-2.0
 *
 * functions.cuh: the functions of `unary` (kernels/dense.h) and their derivatives, in float or double.
 */
#ifndef PERI_KERNELS_CUDA_FUNCTIONS_CUH
#define PERI_KERNELS_CUDA_FUNCTIONS_CUH

#include "cuda.h"

#include "../dense.h"

#include <math.h>

/* The overloads of <cmath> by name: nvcc and the host's compiler find them alike. */
static __device__ __forceinline__ float peri_exp(float x) { return expf(x); }
static __device__ __forceinline__ double peri_exp(double x) { return exp(x); }
static __device__ __forceinline__ float peri_log(float x) { return logf(x); }
static __device__ __forceinline__ double peri_log(double x) { return log(x); }
static __device__ __forceinline__ float peri_log1p(float x) { return log1pf(x); }
static __device__ __forceinline__ double peri_log1p(double x) { return log1p(x); }
static __device__ __forceinline__ float peri_sqrt(float x) { return sqrtf(x); }
static __device__ __forceinline__ double peri_sqrt(double x) { return sqrt(x); }
static __device__ __forceinline__ float peri_tanh(float x) { return tanhf(x); }
static __device__ __forceinline__ double peri_tanh(double x) { return tanh(x); }
static __device__ __forceinline__ float peri_normal_cdf(float x) { return normcdff(x); }
static __device__ __forceinline__ double peri_normal_cdf(double x) { return normcdf(x); }
static __device__ __forceinline__ float peri_pow(float x, float y) { return powf(x, y); }
static __device__ __forceinline__ double peri_pow(double x, double y) { return pow(x, y); }
static __device__ __forceinline__ float peri_abs(float x) { return fabsf(x); }
static __device__ __forceinline__ double peri_abs(double x) { return fabs(x); }
static __device__ __forceinline__ float peri_expm1(float x) { return expm1f(x); }
static __device__ __forceinline__ double peri_expm1(double x) { return expm1(x); }
static __device__ __forceinline__ float peri_sin(float x) { return sinf(x); }
static __device__ __forceinline__ double peri_sin(double x) { return sin(x); }
static __device__ __forceinline__ float peri_cos(float x) { return cosf(x); }
static __device__ __forceinline__ double peri_cos(double x) { return cos(x); }
static __device__ __forceinline__ float peri_erf(float x) { return erff(x); }
static __device__ __forceinline__ double peri_erf(double x) { return erf(x); }
static __device__ __forceinline__ float peri_floor(float x) { return floorf(x); }
static __device__ __forceinline__ double peri_floor(double x) { return floor(x); }
static __device__ __forceinline__ float peri_ceil(float x) { return ceilf(x); }
static __device__ __forceinline__ double peri_ceil(double x) { return ceil(x); }
static __device__ __forceinline__ float peri_rint(float x) { return rintf(x); }
static __device__ __forceinline__ double peri_rint(double x) { return rint(x); }
static __device__ __forceinline__ float peri_trunc(float x) { return truncf(x); }
static __device__ __forceinline__ double peri_trunc(double x) { return trunc(x); }
static __device__ __forceinline__ float peri_fma(float a, float b, float c) { return fmaf(a, b, c); }
static __device__ __forceinline__ double peri_fma(double a, double b, double c) { return fma(a, b, c); }

template <class T> static __device__ __forceinline__ T peri_sigmoid(T x)
{
    T e = peri_exp(-peri_abs(x)), y = T(1) / (T(1) + e);
    return x >= 0 ? y : e * y;
}
template <class T> static __device__ __forceinline__ T peri_softplus(T x)
{
    return (x > 0 ? x : x != x ? x : T(0)) + peri_log1p(peri_exp(-peri_abs(x)));
}
template <class T> static __device__ __forceinline__ T peri_cube(T x) { return x * x * x; }
/** exp(-x^2 / 2): what the square was rounded by is multiplied in, since it counts where the square is large. Beyond 40
 *  it is 0. */
template <class T> static __device__ __forceinline__ T peri_gauss(T x)
{
    const T near = peri_abs(x) > T(40) ? T(40) : x, square = near * near, left = peri_fma(near, near, -square);
    const T y = peri_exp(T(-0.5) * square);
    return peri_fma(T(-0.5) * y, left, y);
}

template <class T> static __device__ __forceinline__ T peri_f(int32_t op, T x, T a, T b)
{
    switch (op) {
    case PERI_UNARY_RELU: return x < 0 ? T(0) : x;
    case PERI_UNARY_SIGMOID: return peri_sigmoid(x);
    case PERI_UNARY_TANH: return peri_tanh(x);
    case PERI_UNARY_EXP: return peri_exp(x);
    case PERI_UNARY_SQRT: return peri_sqrt(x);
    case PERI_UNARY_SILU: return x * peri_sigmoid(x);
    case PERI_UNARY_GELU: return x * peri_normal_cdf(x);
    case PERI_UNARY_SOFTPLUS: return peri_softplus(x);
    case PERI_UNARY_LOGSIGMOID: return -peri_softplus(-x);
    case PERI_UNARY_LEAKY_RELU: return x > 0 ? x : a * x;
    case PERI_UNARY_LOG: return peri_log(x);
    case PERI_UNARY_ABS: return peri_abs(x);
    case PERI_UNARY_SQUARE: return x * x;
    case PERI_UNARY_POW: return peri_pow(x, a);
    case PERI_UNARY_AFFINE: return peri_fma(a, x, b);
    case PERI_UNARY_RECIPROCAL: return a / x;
    case PERI_UNARY_CLAMP: x = x < a ? a : x; return x > b ? b : x;
    case PERI_UNARY_ROOT: return peri_sqrt(x);
    case PERI_UNARY_LOG1P: return peri_log1p(x);
    case PERI_UNARY_EXPM1: return peri_expm1(x);
    case PERI_UNARY_RSQRT: return T(1) / peri_sqrt(x);
    case PERI_UNARY_SIN: return peri_sin(x);
    case PERI_UNARY_COS: return peri_cos(x);
    case PERI_UNARY_ERF: return peri_erf(x);
    case PERI_UNARY_FLOOR: return peri_floor(x);
    case PERI_UNARY_CEIL: return peri_ceil(x);
    case PERI_UNARY_ROUND: return peri_rint(x);
    case PERI_UNARY_TRUNC: return peri_trunc(x);
    case PERI_UNARY_SIGN: return x > 0 ? T(1) : x < 0 ? T(-1) : T(0);
    default: return x;
    }
}

/** f' from s: y where op <= PERI_UNARY_FROM_OUTPUT, else x. */
template <class T> static __device__ __forceinline__ T peri_df(int32_t op, T s, T a, T b)
{
    T sigmoid;
    switch (op) {
    case PERI_UNARY_RELU: return s > 0 ? T(1) : T(0);
    case PERI_UNARY_SIGMOID: return s * (T(1) - s);
    case PERI_UNARY_TANH: return T(1) - s * s;
    case PERI_UNARY_EXP: return s;
    case PERI_UNARY_SQRT: return T(0.5) / s;
    case PERI_UNARY_SILU: sigmoid = peri_sigmoid(s); return sigmoid * (T(1) + s * (T(1) - sigmoid));
    case PERI_UNARY_GELU: return peri_normal_cdf(s) + s * T(0.39894228040143267794) * peri_gauss(s);
    case PERI_UNARY_SOFTPLUS: return peri_sigmoid(s);
    case PERI_UNARY_LOGSIGMOID: return peri_sigmoid(-s);
    case PERI_UNARY_LEAKY_RELU: return s > 0 ? T(1) : a;
    case PERI_UNARY_LOG: return T(1) / s;
    case PERI_UNARY_ABS: return s > 0 ? T(1) : s < 0 ? T(-1) : T(0);
    case PERI_UNARY_SQUARE: return T(2) * s;
    case PERI_UNARY_POW: return a == 0 ? T(0) : a * peri_pow(s, a - T(1));
    case PERI_UNARY_AFFINE: return a;
    case PERI_UNARY_RECIPROCAL: return -a / (s * s);
    case PERI_UNARY_CLAMP: return (s > a || a == -(T)INFINITY) && (s < b || b == (T)INFINITY) ? T(1) : T(0);
    case PERI_UNARY_ROOT: return s == 0 ? T(0) : T(0.5) / peri_sqrt(s);
    case PERI_UNARY_LOG1P: return T(1) / (T(1) + s);
    case PERI_UNARY_EXPM1: return peri_exp(s);
    case PERI_UNARY_RSQRT: return T(-0.5) * peri_cube(T(1) / peri_sqrt(s));
    case PERI_UNARY_SIN: return peri_cos(s);
    case PERI_UNARY_COS: return -peri_sin(s);
    case PERI_UNARY_ERF: return T(1.12837916709551257390) * peri_exp(-s * s);
    case PERI_UNARY_FLOOR:
    case PERI_UNARY_CEIL:
    case PERI_UNARY_ROUND:
    case PERI_UNARY_TRUNC:
    case PERI_UNARY_SIGN: return T(0);
    default: return T(1);
    }
}

/** dy times f'. Where RELU and CLAMP are flat nothing of it comes through, be it infinite. */
template <class T> static __device__ __forceinline__ T peri_chain(int32_t op, T dy, T s, T a, T b)
{
    const T slope = peri_df(op, s, a, b);
    return slope == T(0) && (op == PERI_UNARY_RELU || op == PERI_UNARY_CLAMP) ? T(0) : dy * slope;
}

/** x op y, of PERI_BINARY_*. */
template <class T> static __device__ __forceinline__ T peri_both(int32_t op, T x, T y)
{
    switch (op) {
    case PERI_BINARY_ADD: return x + y;
    case PERI_BINARY_SUB: return x - y;
    case PERI_BINARY_MUL: return x * y;
    case PERI_BINARY_MAX: return x > y || x != x ? x : y;
    case PERI_BINARY_MIN: return x < y || x != x ? x : y;
    default: return x / y;
    }
}

/** Whether x op y holds, of PERI_COMPARE_*. */
template <class T> static __device__ __forceinline__ bool peri_holds(int32_t op, T x, T y)
{
    switch (op) {
    case PERI_COMPARE_EQ: return x == y;
    case PERI_COMPARE_NE: return x != y;
    case PERI_COMPARE_LT: return x < y;
    case PERI_COMPARE_LE: return x <= y;
    case PERI_COMPARE_GT: return x > y;
    default: return x >= y;
    }
}

#endif
