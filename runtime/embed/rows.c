/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c: tables whose rows are bytes (PERI_ROWS_*): their layout.
 */
#include "internal.h"

bool peri__tbe_bytes(int32_t dtype) { return dtype >= PERI_ROWS_INT8 && dtype <= PERI_ROWS_INT2; }

int64_t peri__tbe_stride(int32_t dtype, int64_t cols)
{
    switch (dtype) {
    case PERI_ROWS_INT8: return cols + 8;
    case PERI_ROWS_INT8_HALF: return cols + 4;
    case PERI_ROWS_INT4: return peri__ceil_div(cols, 2) + 4;
    case PERI_ROWS_INT2: return peri__ceil_div(cols, 4) + 4;
    default: return cols;
    }
}

peri_row_format peri__tbe_row_format(int32_t dtype)
{
    if (dtype == PERI_ROWS_FP8)
        return (peri_row_format){.codes = PERI_CODES_FP8, .scale_dtype = -1, .alignment = 1, .exponent_bits = 4, .exponent_bias = 7};
    bool half = dtype != PERI_ROWS_INT8;
    int32_t codes = dtype == PERI_ROWS_INT4 ? PERI_CODES_INT4 : dtype == PERI_ROWS_INT2 ? PERI_CODES_INT2 : PERI_CODES_INT8;
    return (peri_row_format){.codes = codes, .scale_dtype = half ? PERI_F16 : PERI_F32, .scale_first = half, .alignment = 1};
}
