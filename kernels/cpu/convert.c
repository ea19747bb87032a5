/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.c (cpu): the common cases of fill and convert as straight loops: contiguous rows of equal dtype, of f32 to and from the
 * 16-bit floats and f64, and of i32 to and from i64. Everything else goes through ref's scalar rules row by row.
 */
#include "../ref/convert.c"

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
    static const int8_t sizes[PERI_DTYPE_COUNT] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16};
    return sizes[dtype];
}

/** One row of n elements, element strides ds and ss. */
static void cpu_convert_row(void *dst, int32_t dd, int64_t ds, const void *src, int32_t sd, int64_t ss, int64_t n)
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
        if (nd > 0 && a.dst_stride[nd - 1] == a.dst_stride[d] * a.shape[d] && a.src_stride[nd - 1] == a.src_stride[d] * a.shape[d]) {
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
        cpu_convert_row((char *)a.dst + dst * dsize, a.dst_dtype, ds, (const char *)a.src + src * ssize, a.src_dtype, ss, n);
        i += n;
    }
}

#define K_CPU_CONVERT [PERI_K_fill] = cpu_fill, [PERI_K_convert] = cpu_convert,
