/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.c (cpu): the common cases of fill and convert as straight loops: contiguous rows of equal dtype, of f32 to
 * and from the 16-bit floats and f64, and of i32 to and from i64. Everything else goes through ref's scalar rules row
 * by row. Random numbers are made for 4 K_LANES places at once.
 */
#include "convert.h"
#include "philox.h"

static void cpu_fill(const void *args, int64_t begin, int64_t end)
{
    const peri_k_fill_args *a = args;
    if (a->dtype == PERI_F32) {
        float *dst = a->dst, value = (float)a->value;
        for (int64_t i = begin; i < end; i++) dst[i] = value;
    } else if (a->dtype == PERI_I64) {
        int64_t *dst = a->dst;
        for (int64_t i = begin; i < end; i++) dst[i] = a->ivalue;
    } else {
        ref_fill(args, begin, end);
    }
}

static int64_t cpu_element_size(int32_t dtype)
{
    static const int8_t sizes[PERI_DTYPE_COUNT] = PERI_DTYPE_SIZES;
    return sizes[dtype];
}

void cpu_convert_row(void *dst, int32_t dd, int64_t ds, const void *src, int32_t sd, int64_t ss, int64_t n)
{
    if (dd == sd && ds == 1 && ss == 1) {
        memcpy(dst, src, (size_t)(n * cpu_element_size(dd)));
    } else if (dd == PERI_F32 && sd == PERI_F32) {
        float *d = dst;
        const float *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = s[i * ss];
    } else if (dd == PERI_F32 && sd == PERI_F64) {
        float *d = dst;
        const double *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = (float)s[i * ss];
    } else if (dd == PERI_F64 && sd == PERI_F32) {
        double *d = dst;
        const float *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = s[i * ss];
    } else if (dd == PERI_I64 && sd == PERI_I32) {
        int64_t *d = dst;
        const int32_t *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = s[i * ss];
    } else if (dd == PERI_I32 && sd == PERI_I64) {
        int32_t *d = dst;
        const int64_t *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = (int32_t)s[i * ss];
    } else if (dd == PERI_F32 && sd == PERI_I64) {
        float *d = dst;
        const int64_t *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = (float)s[i * ss];
    } else if (dd == PERI_F32 && sd == PERI_I32) {
        float *d = dst;
        const int32_t *s = src;
        for (int64_t i = 0; i < n; i++) d[i * ds] = (float)s[i * ss];
    } else if (ds == 1 && ss == 1 && sd == PERI_F32 && (dd == PERI_F16 || dd == PERI_BF16)) {
        uint16_t *d = dst;
        const float *s = src;
        int64_t i = 0;
        if (dd == PERI_F16)
            for (; i + K_LANES <= n; i += K_LANES) k_store_f16(d + i, k_load(s + i));
        for (; i < n; i++) d[i] = dd == PERI_F16 ? k_f32_to_f16(s[i]) : k_f32_to_bf16(s[i]);
    } else if (ds == 1 && ss == 1 && dd == PERI_F32 && (sd == PERI_F16 || sd == PERI_BF16)) {
        float *d = dst;
        const uint16_t *s = src;
        int64_t i = 0;
        for (; i + K_LANES <= n; i += K_LANES) k_store(d + i, sd == PERI_F16 ? k_load_f16(s + i) : k_load_bf16(s + i));
        for (; i < n; i++) d[i] = sd == PERI_F16 ? k_f16_to_f32(s[i]) : k_bf16_to_f32(s[i]);
    } else {
        for (int64_t i = 0; i < n; i++) ref_store(dst, i * ds, dd, ref_load(src, i * ss, sd));
    }
}

static void cpu_convert(const void *args, int64_t begin, int64_t end)
{
    peri_k_convert_args a = *(const peri_k_convert_args *)args;
    /* Fold dimensions that lie behind each other in both layouts, so that rows are as long as they can be. */
    int32_t nd = 0;
    for (int32_t d = 0; d < a.ndim; d++) {
        if (a.shape[d] == 1) continue;
        if (nd > 0 && a.dst_stride[nd - 1] == a.dst_stride[d] * a.shape[d] &&
            a.src_stride[nd - 1] == a.src_stride[d] * a.shape[d]) {
            a.shape[nd - 1] *= a.shape[d];
            a.dst_stride[nd - 1] = a.dst_stride[d];
            a.src_stride[nd - 1] = a.src_stride[d];
        } else {
            a.shape[nd] = a.shape[d];
            a.dst_stride[nd] = a.dst_stride[d];
            a.src_stride[nd++] = a.src_stride[d];
        }
    }
    int64_t row = nd ? a.shape[nd - 1] : 1, ds = nd ? a.dst_stride[nd - 1] : 1, ss = nd ? a.src_stride[nd - 1] : 1;
    int64_t dsize = cpu_element_size(a.dst_dtype), ssize = cpu_element_size(a.src_dtype);
    for (int64_t i = begin; i < end;) {
        int64_t in_row = i % row, n = row - in_row < end - i ? row - in_row : end - i, rest = i / row;
        int64_t dst = in_row * ds, src = in_row * ss;
        for (int32_t d = nd - 2; d >= 0; d--) {
            int64_t at = rest % a.shape[d];
            rest /= a.shape[d];
            dst += at * a.dst_stride[d];
            src += at * a.src_stride[d];
        }
        cpu_convert_row((char *)a.dst + dst * dsize, a.dst_dtype, ds, (const char *)a.src + src * ssize, a.src_dtype,
                        ss, n);
        i += n;
    }
}

/* -- reduce: blocks that stay in the nearest cache while all sources pass through them ----------------------------- */

enum { K_REDUCE_BLOCK = 1024 };

#define K_REDUCE_SUM(x, y) ((x) + (y))
#define K_REDUCE_MIN(x, y) ((x) != (x) || (x) < (y) ? (x) : (y))
#define K_REDUCE_MAX(x, y) ((x) != (x) || (x) > (y) ? (x) : (y))
/* acc[0, n) = load(src[0]) op load(src[1]) ...; two sources, the usual case, need no pass for the first. */
#define K_REDUCE_LOOP(type, load, op)                                                                                  \
    do {                                                                                                               \
        if (a->n == 1)                                                                                                 \
            for (int64_t j = 0; j < n; j++) acc[j] = load(((const type *)a->src[0])[i + j]);                           \
        else                                                                                                           \
            for (int64_t j = 0; j < n; j++)                                                                            \
                acc[j] = op(load(((const type *)a->src[0])[i + j]), load(((const type *)a->src[1])[i + j]));           \
        for (int32_t k = 2; k < a->n; k++) {                                                                           \
            const type *s = (const type *)a->src[k] + i;                                                               \
            for (int64_t j = 0; j < n; j++) acc[j] = op(acc[j], load(s[j]));                                           \
        }                                                                                                              \
    } while (0)
#define K_REDUCE_TYPE(name, type, wide, load, store)                                                                   \
    static void name(const peri_k_reduce_args *a, int64_t begin, int64_t end)                                          \
    {                                                                                                                  \
        wide acc[K_REDUCE_BLOCK];                                                                                      \
        for (int64_t i = begin; i < end; i += K_REDUCE_BLOCK) {                                                        \
            int64_t n = end - i < K_REDUCE_BLOCK ? end - i : K_REDUCE_BLOCK;                                           \
            if (a->reduce == PERI_REDUCE_SUM) K_REDUCE_LOOP(type, load, K_REDUCE_SUM);                                 \
            else if (a->reduce == PERI_REDUCE_MIN) K_REDUCE_LOOP(type, load, K_REDUCE_MIN);                            \
            else K_REDUCE_LOOP(type, load, K_REDUCE_MAX);                                                              \
            type *d = (type *)a->dst + i;                                                                              \
            for (int64_t j = 0; j < n; j++) d[j] = store(acc[j]);                                                      \
        }                                                                                                              \
    }
#define K_REDUCE_SAME(x) (x)
K_REDUCE_TYPE(cpu_reduce_f64, double, double, K_REDUCE_SAME, K_REDUCE_SAME)
K_REDUCE_TYPE(cpu_reduce_f32, float, float, K_REDUCE_SAME, K_REDUCE_SAME)
K_REDUCE_TYPE(cpu_reduce_f16, uint16_t, float, k_f16_to_f32, k_f32_to_f16)
K_REDUCE_TYPE(cpu_reduce_bf16, uint16_t, float, k_bf16_to_f32, k_f32_to_bf16)

static void cpu_reduce(const void *args, int64_t begin, int64_t end)
{
    const peri_k_reduce_args *a = args;
    switch (a->dtype) {
    case PERI_C128: cpu_reduce_f64(a, 2 * begin, 2 * end); break;
    case PERI_F64: cpu_reduce_f64(a, begin, end); break;
    case PERI_C64: cpu_reduce_f32(a, 2 * begin, 2 * end); break;
    case PERI_F32: cpu_reduce_f32(a, begin, end); break;
    case PERI_F16: cpu_reduce_f16(a, begin, end); break;
    case PERI_BF16: cpu_reduce_bf16(a, begin, end); break;
    default: ref_reduce(args, begin, end);
    }
}

static void cpu_divide(const void *args, int64_t begin, int64_t end)
{
    const peri_k_divide_args *a = args;
    if (a->dtype == PERI_F32) {
        float *d = a->dst, by = (float)a->divisor;
        const float *s = a->src;
        for (int64_t i = begin; i < end; i++) d[i] = s[i] / by;
    } else {
        ref_divide(args, begin, end);
    }
}

/* No product and sum in one within a function: gcc is told in front of it, clang in its body. */
#if defined(__clang__)
#define CPU_APART
#define CPU_APART_BODY _Pragma("STDC FP_CONTRACT OFF")
#else
#define CPU_APART __attribute__((optimize("fp-contract=off")))
#define CPU_APART_BODY
#endif

/** out[k] = element k of `words`, whose first one is of an even index, as f64. Sums and products stay apart: every
 *  instruction set makes the same bits. */
CPU_APART static void cpu_random_values(const peri_k_random_args *a, const uint32_t words[4 * K_LANES],
                                        double out[4 * K_LANES])
{
    CPU_APART_BODY
    if (a->kind == PERI_RANDOM_UNIFORM) {
        const double low = a->low, range = a->high - a->low;
        for (int k = 0; k < 4 * K_LANES; k++) out[k] = low + range * ((double)(int32_t)(words[k] >> 8) * 0x1p-24);
        return;
    }
    for (int k = 0; k < 4 * K_LANES; k += 2) {
        const double u1 = ((double)words[k] + 1) * 0x1p-32;
        const double angle = 6.283185307179586476925 * ((double)words[k + 1] * 0x1p-32);
        const double radius = a->high * sqrt(-2 * log(u1));
        out[k] = a->low + radius * cos(angle);
        out[k + 1] = a->low + radius * sin(angle);
    }
}

/** Random numbers in rows of consecutive indices. */
static void cpu_random(const void *args, int64_t begin, int64_t end)
{
    enum { GROUP = 4 * K_LANES };
    const peri_k_random_args *a = args;
    for (int64_t i = begin; i < end;) {
        int64_t in_row = i % a->cols, n = a->cols - in_row < end - i ? a->cols - in_row : end - i;
        uint64_t index = (uint64_t)((a->row_offset + i / a->cols) * a->total_cols + a->col_offset + in_row);
        if (a->cols == a->total_cols) n = end - i; /* rows follow each other without a gap */
        while (n > 0) { /* a group starts at a multiple of four words, wherever the index lies in it */
            uint32_t words[GROUP];
            double values[GROUP];
            const int64_t skip = (int64_t)(index & 3), m = GROUP - skip < n ? GROUP - skip : n;
            k_philox_words(a->seed, a->random_stream, index >> 2, words);
            cpu_random_values(a, words, values);
            if (a->dtype == PERI_F32)
                for (int64_t k = 0; k < m; k++) ((float *)a->dst)[i + k] = (float)values[skip + k];
            else if (a->dtype == PERI_F64)
                memcpy((double *)a->dst + i, values + skip, sizeof *values * (size_t)m);
            else
                for (int64_t k = 0; k < m; k++) ref_store(a->dst, i + k, a->dtype, (ref_value){.re = values[skip + k]});
            i += m;
            index += (uint64_t)m;
            n -= m;
        }
    }
}

#define K_CPU_CONVERT                                                                                                  \
    [PERI_K_fill] = cpu_fill, [PERI_K_convert] = cpu_convert, [PERI_K_random] = cpu_random,                            \
    [PERI_K_reduce] = cpu_reduce, [PERI_K_divide] = cpu_divide,
