/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/quantize.h: matrices whose rows are stored in 8, 4 or 2 bits a number, each row with a scale and a bias of
 * its own: FBGEMM's byte layouts. Functions are local, do not communicate, return tensors that are *new*, borrow their
 * arguments, and leave outputs untouched on failure. They have no gradient.
 *
 * Threads: any; operands as tensor.h says.
 */
#ifndef PERILUNE_QUANTIZE_H
#define PERILUNE_QUANTIZE_H

#include <perilune/tensor.h>

/** What the codes of a row are. */
enum {
    PERI_QUANTIZE_INT8 = 0,
    PERI_QUANTIZE_INT4 = 1, /* two a byte, the earlier one in the low bits */
    PERI_QUANTIZE_INT2 = 2, /* four a byte, likewise */
    PERI_QUANTIZE_FP8 = 3,  /* sign, exponent, mantissa; no infinities, no NaN */
    PERI_QUANTIZE_COUNT = 4
};

/** How a row of numbers lies in memory: its codes, and before or behind them scale and bias; then padding of zeros.
 *  kernels/quantize.h has the formulas. */
typedef struct peri_row_format {
    int32_t codes;       /* PERI_QUANTIZE_* */
    int32_t scale_dtype; /* of scale and bias: PERI_F32 (INT8; FP8: scale and 0, codes padded to a multiple of 4),
                            PERI_F16 (INT8, INT4, INT2); -1: there are none (FP8) */
    bool scale_first;    /* before the codes */
    int32_t alignment;   /* the bytes of a row are a multiple of it, 1..4096; 0: 1 */
    int32_t exponent_bits, exponent_bias; /* FP8: 2..5 and 0..63, or both 0: 4 and 7; else ignored */
} peri_row_format;

/** Bytes of a row of @cols numbers. */
PERI_API peri_status peri_quantize_row_bytes(const peri_row_format *format, int64_t cols, int64_t *out);
/** @x [..., cols] (f32, f16 or bf16) as u8 [..., bytes of a row]. @min_max f32 [rows, 2] or NULL: least and largest
 *  number to be represented, by row, instead of the row's own (with f16 scales). A row with a number that is not
 *  finite, or with a range that the scale cannot hold, gets NaN as scale and bias. FP8 without scales saturates,
 *  infinities too; a NaN, which it has no code for, is PERI_ERANGE (waits for the device). */
PERI_API peri_status peri_quantize_rows(peri_tensor *x, const peri_row_format *format, peri_tensor *min_max,
                                        peri_tensor **out);
/** u8 @rows [..., bytes of a row] as numbers [..., cols] of @dtype (f32, f16 or bf16). */
PERI_API peri_status peri_quantize_restore(peri_tensor *rows, const peri_row_format *format, int64_t cols,
                                           int32_t dtype, peri_tensor **out);

#endif
