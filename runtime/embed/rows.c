/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c: tables whose rows are bytes (PERI_ROWS_*): their layout, and numbers in and out.
 */
#include "internal.h"

#include <perilune/quantize.h>

_Static_assert((int)PERI_ROWS_INT8 == (int)PERI_K_ROWS_INT8 && (int)PERI_ROWS_INT8_HALF == (int)PERI_K_ROWS_INT8_HALF &&
                   (int)PERI_ROWS_FP8 == (int)PERI_K_ROWS_FP8,
               "row formats");

bool peri__tbe_bytes(int32_t dtype) { return dtype >= PERI_ROWS_INT8 && dtype <= PERI_ROWS_FP8; }

int64_t peri__tbe_stride(int32_t dtype, int64_t cols)
{
    return cols + (dtype == PERI_ROWS_INT8 ? 8 : dtype == PERI_ROWS_INT8_HALF ? 4 : 0);
}

static peri_row_format format_of(int32_t dtype)
{
    if (dtype == PERI_ROWS_FP8)
        return (peri_row_format){.codes = PERI_CODES_FP8, .scale_dtype = -1, .alignment = 1, .exponent_bits = 4, .exponent_bias = 7};
    bool half = dtype == PERI_ROWS_INT8_HALF;
    return (peri_row_format){.codes = PERI_CODES_INT8, .scale_dtype = half ? PERI_F16 : PERI_F32, .scale_first = half, .alignment = 1};
}

/** @t is rows of @table's numbers. */
static peri_status check_numbers(const char *function, const peri_tbe *tbe, int64_t table, const peri_tensor *t)
{
    char text[128];
    if (table < 0 || table >= tbe->n_tables)
        return peri__fail(PERI_ERANGE, "%s: table %lld, allowed: 0..%lld", function, (long long)table, (long long)tbe->n_tables - 1);
    int64_t cols = tbe->layout[table].cols;
    if (t->ndim == 2 && t->shape[1] == cols) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s for rows of table '%s', which has %lld columns (or, as u8, %lld bytes a row)", function,
                      peri__tensor_text(t, text, sizeof text), tbe->tables[table].name, (long long)cols,
                      (long long)tbe->layout[table].stride);
}

peri_status peri__tbe_read_numbers(peri_tbe *tbe, int64_t table, const char *name, int64_t row, peri_tensor *dst)
{
    PERI_TRY(check_numbers("peri_tbe_read", tbe, table, dst));
    const peri_row_format format = format_of(tbe->dtype);
    peri_tensor *bytes = NULL, *numbers = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_U8, 2, (int64_t[]){dst->shape[0], tbe->layout[table].stride}, &bytes), out);
    PERI_TRY_GOTO(peri_tbe_read(tbe, table, name, row, bytes), out);
    PERI_TRY_GOTO(peri_quantize_restore(bytes, &format, dst->shape[1], PERI_F32, &numbers), out);
    status = peri_tensor_copy(dst, numbers);
out:
    peri_tensor_release(bytes);
    peri_tensor_release(numbers);
    return status;
}

peri_status peri__tbe_write_numbers(peri_tbe *tbe, int64_t table, const char *name, int64_t row, const peri_tensor *src)
{
    PERI_TRY(check_numbers("peri_tbe_write", tbe, table, src));
    const peri_row_format format = format_of(tbe->dtype);
    peri_tensor *bytes = NULL, *numbers = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_F32, 2, src->shape, &numbers), out);
    PERI_TRY_GOTO(peri_tensor_copy(numbers, src), out);
    PERI_TRY_GOTO(peri_quantize_rows(numbers, &format, NULL, &bytes), out);
    status = peri_tbe_write(tbe, table, name, row, bytes);
out:
    peri_tensor_release(bytes);
    peri_tensor_release(numbers);
    return status;
}
