/* SPDX-License-Identifier: Apache-2.0
 *
 * row_formats.c: the table of what rows of tables are stored as: numbers, and bytes (PERI_ROWS_*) with their layout.
 */
#include "embed_internal.h"

#include <stdio.h>

/** How rows are stored. */
struct row_kind {
    const char *name;
    int32_t bits, codes; /* of a number; PERI_QUANTIZE_*, of rows of bytes */
    int32_t scale;       /* dtype of the scale and the bias of a row of bytes; -1: it has none */
};

/** NULL: no table holds rows of @dtype. */
static const struct row_kind *row_kind_of(int32_t dtype)
{
    static const struct row_kind numbers[] = {
        [PERI_F32] = {"FP32", 32, 0, 0}, [PERI_F16] = {"FP16", 16, 0, 0}, [PERI_BF16] = {"BF16", 16, 0, 0}};
    static const struct row_kind bytes[] = {
        [PERI_ROWS_INT8 - PERI_ROWS_INT8] = {"INT8", 8, PERI_QUANTIZE_INT8, PERI_F32},
        [PERI_ROWS_INT8_HALF - PERI_ROWS_INT8] = {"INT8_HALF", 8, PERI_QUANTIZE_INT8, PERI_F16},
        [PERI_ROWS_FP8 - PERI_ROWS_INT8] = {"FP8", 8, PERI_QUANTIZE_FP8, -1},
        [PERI_ROWS_INT4 - PERI_ROWS_INT8] = {"INT4", 4, PERI_QUANTIZE_INT4, PERI_F16},
        [PERI_ROWS_INT2 - PERI_ROWS_INT8] = {"INT2", 2, PERI_QUANTIZE_INT2, PERI_F16}};
    const bool coded = dtype >= PERI_ROWS_INT8;
    const struct row_kind *list = coded ? bytes : numbers;
    const int64_t i = coded ? dtype - PERI_ROWS_INT8 : dtype;
    const int64_t n = (int64_t)(coded ? sizeof bytes / sizeof *bytes : sizeof numbers / sizeof *numbers);
    return i >= 0 && i < n && list[i].name ? &list[i] : NULL;
}

const char *peri_row_format_name(int32_t dtype)
{
    const struct row_kind *kind = row_kind_of(dtype);
    return kind ? kind->name : NULL;
}

int32_t peri_row_format_bits(int32_t dtype)
{
    const struct row_kind *kind = row_kind_of(dtype);
    return kind ? kind->bits : 0;
}

const char *peri__data_type_name(int32_t dtype)
{
    return peri_row_format_name(dtype == PERI_ROWS_INT8_HALF ? PERI_ROWS_INT8 : dtype);
}

peri_status peri_row_format_text(int32_t dtype, int64_t cols, char *text, int64_t bytes)
{
    PERI_NEED(text);
    if (bytes < 1) return peri__fail(PERI_EINVAL, "peri_row_format_text: %lld bytes, allowed: >= 1", (long long)bytes);
    *text = 0;
    if (!peri__rows_are_bytes(dtype)) return PERI_OK;
    snprintf(text, (size_t)bytes, "%s x %lld", peri__data_type_name(dtype), (long long)cols);
    return PERI_OK;
}

bool peri__rows_are_bytes(int32_t dtype) { return dtype >= PERI_ROWS_INT8 && row_kind_of(dtype); }

peri_row_format peri__tbe_row_format(int32_t dtype)
{
    const struct row_kind *kind = row_kind_of(dtype);
    const bool fp8 = kind->codes == PERI_QUANTIZE_FP8;
    return (peri_row_format){.codes = kind->codes,
                             .scale_dtype = kind->scale,
                             .scale_first = kind->scale == PERI_F16,
                             .alignment = 1,
                             .exponent_bits = fp8 ? 4 : 0,
                             .exponent_bias = fp8 ? 7 : 0};
}

peri_status peri_row_format_of(int32_t dtype, peri_row_format *out)
{
    PERI_NEED(out);
    if (!peri__rows_are_bytes(dtype))
        return peri__fail(PERI_EINVAL, "peri_row_format_of: %d is none of PERI_ROWS_*, whose rows are bytes", dtype);
    *out = peri__tbe_row_format(dtype);
    return PERI_OK;
}

int64_t peri__tbe_stride(int32_t dtype, int64_t cols)
{
    if (!peri__rows_are_bytes(dtype)) return cols;
    const struct row_kind *kind = row_kind_of(dtype);
    return peri__ceil_div(cols, 8 / kind->bits) + (kind->scale < 0 ? 0 : 2 * peri_dtype_size(kind->scale));
}
