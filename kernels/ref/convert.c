/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.c (ref): see kernels/convert.h.
 */
#include "value.h"

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
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1,
                            (uint32_t)p0};
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
            v.re = a->low +
                   (a->high - a->low) * ((double)(ref_random_word(a->seed, a->random_stream, index) >> 8) * 0x1p-24);
        } else {
            double u1 = ((double)ref_random_word(a->seed, a->random_stream, index & ~(uint64_t)1) + 1) * 0x1p-32;
            double angle =
                6.283185307179586476925 * ((double)ref_random_word(a->seed, a->random_stream, index | 1) * 0x1p-32);
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
