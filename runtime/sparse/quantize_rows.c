/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize_rows.c: rows in few bits a number.
 */
#include "sparse_internal.h"
#include "../../kernels/quantize.h"

#include <perilune/ops.h>

static peri_status check_format(const char *f, const peri_row_format *r)
{
    if (r->codes < 0 || r->codes >= PERI_QUANTIZE_COUNT)
        return peri__fail(PERI_EINVAL, "%s: codes %d, allowed: 0..3", f, r->codes);
    if (r->alignment < 0 || r->alignment > 4096)
        return peri__fail(PERI_EINVAL, "%s: alignment %d, allowed: 1..4096, or 0: 1", f, r->alignment);
    if (r->codes == PERI_QUANTIZE_FP8) {
        if (r->exponent_bits == 0 && r->exponent_bias != 0)
            return peri__fail(PERI_EINVAL, "%s: exponent bias %d without exponent bits", f, r->exponent_bias);
        if (r->exponent_bits != 0 && (r->exponent_bits < 2 || r->exponent_bits > 5))
            return peri__fail(PERI_EINVAL, "%s: %d exponent bits, allowed: 2..5, or 0: 4 and a bias of 7", f,
                              r->exponent_bits);
        if (r->exponent_bias < 0 || r->exponent_bias > 63)
            return peri__fail(PERI_EINVAL, "%s: exponent bias %d, allowed: 0..63", f, r->exponent_bias);
        if (r->scale_dtype != -1 && r->scale_dtype != PERI_F32)
            return peri__fail(PERI_EINVAL, "%s: fp8 rows with scales of %s, allowed: f32, none", f,
                              peri_dtype_name(r->scale_dtype));
        return PERI_OK;
    }
    if (r->scale_dtype != PERI_F16 && (r->scale_dtype != PERI_F32 || r->codes != PERI_QUANTIZE_INT8))
        return peri__fail(PERI_EINVAL, "%s: scales of %s, allowed: %s", f,
                          r->scale_dtype < 0 ? "no dtype" : peri_dtype_name(r->scale_dtype),
                          r->codes == PERI_QUANTIZE_INT8 ? "f32, f16" : "f16");
    return PERI_OK;
}

static const int32_t bits_of[] = {8, 4, 2, 8};

peri_status peri__rows_layout(const char *f, const peri_row_format *r, int64_t cols, peri_k_rows_args *out)
{
    PERI_TRY(check_format(f, r));
    if (cols < 0 || cols >= (int64_t)1 << 40)
        return peri__fail(PERI_ERANGE, "%s: rows of %lld numbers, allowed: 0..2^40", f, (long long)cols);
    bool fp8 = r->codes == PERI_QUANTIZE_FP8, scaled = r->scale_dtype >= 0;
    int64_t codes = peri__ceil_div(cols * bits_of[r->codes], 8),
            scales = scaled ? 2 * peri_dtype_size(r->scale_dtype) : 0;
    if (fp8 && scaled) codes = (codes + 3) & ~(int64_t)3;
    const int64_t alignment = r->alignment ? r->alignment : 1;
    int64_t bytes = peri__ceil_div(codes + scales, alignment) * alignment;
    *out = (peri_k_rows_args){.cols = cols, .stride = bytes, .codes_at = r->scale_first ? scales : 0,
                              .scale_at = !scaled ? -1 : r->scale_first ? 0 : codes, .bits = bits_of[r->codes],
                              .exponent_bits = !fp8 ? 0 : r->exponent_bits ? r->exponent_bits : 4,
                              .exponent_bias = !fp8 ? 0 : r->exponent_bits ? r->exponent_bias : 7,
                              .half = r->scale_dtype == PERI_F16};
    return PERI_OK;
}

peri_status peri_quantize_row_bytes(const peri_row_format *format, int64_t cols, int64_t *out)
{
    PERI_NEED(format);
    PERI_NEED(out);
    peri_k_rows_args args;
    PERI_TRY(peri__rows_layout("peri_quantize_row_bytes", format, cols, &args));
    *out = args.stride;
    return PERI_OK;
}

/** @t with another last size and dtype. */
static peri_status new_like(const peri_tensor *t, int64_t last, int32_t dtype, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[t->ndim - 1] = last;
    return peri_tensor_new(peri__device(t), dtype, t->ndim, shape, out);
}

static int64_t rows_of_tensor(const peri_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d + 1 < t->ndim; d++) n *= t->shape[d];
    return n;
}

static int64_t rows_per_thread(int64_t cols) { return peri__max(1, PERI_INT_GRAIN / peri__max(cols, 1)); }

/** Codes of fp8 have no NaN, and without a scale nothing else could say that there was one. @x contiguous. Waits for
 *  the device. */
static peri_status check_numbers(const char *f, peri_tensor *x)
{
    int64_t n = peri__numel(x), cols = x->shape[x->ndim - 1];
    peri_tensor *wide = NULL, *total = NULL;
    float *numbers = NULL;
    double sum = 0;
    peri_status status;
    if (n == 0) return PERI_OK;
    PERI_TRY_GOTO(peri_tensor_to(x, PERI_F32, NULL, &wide), out);
    PERI_TRY_GOTO(peri_op_sum(wide, NULL, 0, false, &total), out);
    PERI_TRY_GOTO(peri_tensor_item(total, 0, &sum), out);
    if (sum == sum) goto out; /* no NaN */
    numbers = peri__alloc(sizeof *numbers * (size_t)n);
    status = numbers ? peri_tensor_read(wide, numbers, n * (int64_t)sizeof *numbers) : PERI_ENOMEM;
    for (int64_t i = 0; i < n && status >= 0; i++)
        if (numbers[i] != numbers[i])
            status =
                peri__fail(PERI_ERANGE, "%s: row %lld, number %lld is nan, which fp8 without a scale has no code for",
                           f, (long long)(i / cols), (long long)(i % cols));
out:
    peri__free(numbers);
    peri_tensor_release(wide);
    peri_tensor_release(total);
    return status;
}

peri_status peri_quantize_rows(peri_tensor *x, const peri_row_format *format, peri_tensor *min_max, peri_tensor **out)
{
    PERI_NEED(format);
    static const char f[] = "peri_quantize_rows";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "x", x, -1, -1));
    if (!peri__small_float(x->dtype) || x->ndim < 1)
        return peri__fail(PERI_EINVAL, "%s: x is %s, allowed: rows of f32, f16, bf16", f,
                          peri__tensor_text(x, text, sizeof text));
    peri_k_rows_args args;
    PERI_TRY(peri__rows_layout(f, format, x->shape[x->ndim - 1], &args));
    int64_t rows = rows_of_tensor(x);
    if (min_max) {
        PERI_TRY(peri__check_tensor(f, "min_max", min_max, PERI_F32, 2));
        PERI_TRY(peri__check_same_device(f, min_max, x));
        if (min_max->shape[0] != rows || min_max->shape[1] != 2 || !args.half)
            return peri__fail(PERI_EINVAL, "%s: min_max is %s for %lld rows, wanted two numbers a row, and f16 scales",
                              f, peri__tensor_text(min_max, text, sizeof text), (long long)rows);
    }
    peri_tensor *src = NULL, *limits = NULL, *result = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(x, &src), out);
    if (min_max) PERI_TRY_GOTO(peri_tensor_contiguous(min_max, &limits), out);
    if (args.scale_at < 0) PERI_TRY_GOTO(check_numbers(f, src), out);
    PERI_TRY_GOTO(new_like(x, args.stride, PERI_U8, &result), out);
    args.bytes = peri__data(result);
    args.x = peri__data(src);
    args.min_max = limits ? peri__data(limits) : NULL;
    args.dtype = src->dtype;
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), rows_quantize, &args, rows, rows_per_thread(args.cols)), out);
    *out = result;
    result = NULL;
out:
    peri_tensor_release(src);
    peri_tensor_release(limits);
    peri_tensor_release(result);
    return status;
}

peri_status peri_quantize_restore(peri_tensor *rows, const peri_row_format *format, int64_t cols, int32_t dtype,
                                  peri_tensor **out)
{
    PERI__NOT_AT_BORDER;
    static const char f[] = "peri_quantize_restore";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "rows", rows, PERI_U8, -1));
    if (!peri__small_float(dtype))
        return peri__fail(PERI_EINVAL, "%s: dtype %s, allowed: f32, f16, bf16", f, peri_dtype_name(dtype));
    peri_k_rows_args args;
    PERI_TRY(peri__rows_layout(f, format, cols, &args));
    if (rows->ndim < 1 || rows->shape[rows->ndim - 1] != args.stride)
        return peri__fail(PERI_EINVAL, "%s: rows are %s, wanted %lld bytes for %lld numbers", f,
                          peri__tensor_text(rows, text, sizeof text), (long long)args.stride, (long long)cols);
    peri_tensor *src = NULL, *result = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(rows, &src), out);
    PERI_TRY_GOTO(new_like(rows, cols, dtype, &result), out);
    args.bytes = peri__data(src);
    args.x = peri__data(result);
    args.dtype = dtype;
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(rows), rows_restore, &args, rows_of_tensor(rows), rows_per_thread(cols)),
                  out);
    *out = result;
    result = NULL;
out:
    peri_tensor_release(src);
    peri_tensor_release(result);
    return status;
}
