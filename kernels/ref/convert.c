/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.c (ref): see kernels/convert.h.
 */

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
        if (m >> 53) m = ((m >> 11) | ((m & 0x7ffu) != 0)) << 11; /* what a double cannot hold goes into its lowest bit */
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

static void ref_fill(const void *args, int64_t begin, int64_t end)
{
    const peri_k_fill_args *a = args;
    bool integer = a->dtype >= PERI_I64 && a->dtype <= PERI_BOOL;
    ref_value v = {.integer = integer, .i = a->ivalue, .re = a->value};
    for (int64_t i = begin; i < end; i++) ref_store(a->dst, i, a->dtype, v);
}

static void ref_convert(const void *args, int64_t begin, int64_t end)
{
    const peri_k_convert_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t rest = i, dst = 0, src = 0;
        for (int32_t d = a->ndim - 1; d >= 0; d--) {
            int64_t at = rest % a->shape[d];
            rest /= a->shape[d];
            dst += at * a->dst_stride[d];
            src += at * a->src_stride[d];
        }
        ref_store(a->dst, dst, a->dst_dtype, ref_load(a->src, src, a->src_dtype));
    }
}

/** Word @i of the stream: Philox4x32 with 10 rounds. */
static uint32_t ref_random_word(uint64_t seed, uint64_t stream, uint64_t i)
{
    uint32_t c[4] = {(uint32_t)(i >> 2), (uint32_t)(i >> 34), (uint32_t)stream, (uint32_t)(stream >> 32)};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        uint64_t p0 = 0xd2511f53ull * c[0], p1 = 0xcd9e8d57ull * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1, (uint32_t)p0};
        memcpy(c, next, sizeof c);
    }
    return c[i & 3];
}

static void ref_random(const void *args, int64_t begin, int64_t end)
{
    const peri_k_random_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        uint64_t index = (uint64_t)((a->row_offset + i / a->cols) * a->total_cols + a->col_offset + i % a->cols);
        ref_value v = {0};
        if (a->kind == PERI_RANDOM_UNIFORM) {
            v.re = a->low + (a->high - a->low) * ((double)(ref_random_word(a->seed, a->random_stream, index) >> 8) * 0x1p-24);
        } else {
            double u1 = ((double)ref_random_word(a->seed, a->random_stream, index & ~(uint64_t)1) + 1) * 0x1p-32;
            double angle = 6.283185307179586476925 * ((double)ref_random_word(a->seed, a->random_stream, index | 1) * 0x1p-32);
            v.re = a->low + a->high * sqrt(-2 * log(u1)) * (index & 1 ? sin(angle) : cos(angle));
        }
        ref_store(a->dst, i, a->dtype, v);
    }
}

/** One step of a reduction; floats narrower than f64 are kept in f32. */
static ref_value ref_combine(ref_value a, ref_value b, int32_t reduce, bool wide)
{
    if (reduce == PERI_REDUCE_SUM) {
        a.i = (int64_t)((uint64_t)a.i + (uint64_t)b.i);
        a.re = wide ? a.re + b.re : (double)((float)a.re + (float)b.re);
        a.im = wide ? a.im + b.im : (double)((float)a.im + (float)b.im);
        return a;
    }
    if (a.integer) return (reduce == PERI_REDUCE_MIN ? b.i < a.i : b.i > a.i) ? b : a;
    if (a.re != a.re) return a;
    return b.re != b.re || (reduce == PERI_REDUCE_MIN ? b.re < a.re : b.re > a.re) ? b : a;
}

static void ref_reduce(const void *args, int64_t begin, int64_t end)
{
    const peri_k_reduce_args *a = args;
    bool wide = a->dtype == PERI_F64 || a->dtype == PERI_C128;
    for (int64_t i = begin; i < end; i++) {
        ref_value v = ref_load(a->src[0], i, a->dtype);
        for (int32_t k = 1; k < a->n; k++) v = ref_combine(v, ref_load(a->src[k], i, a->dtype), a->reduce, wide);
        ref_store(a->dst, i, a->dtype, v);
    }
}

static void ref_divide(const void *args, int64_t begin, int64_t end)
{
    const peri_k_divide_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        if (a->dtype == PERI_F32) ((float *)a->dst)[i] = ((const float *)a->src)[i] / (float)a->divisor;
        else ((double *)a->dst)[i] = ((const double *)a->src)[i] / a->divisor;
    }
}
