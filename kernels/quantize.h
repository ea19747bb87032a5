/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/quantize.h: rows of numbers in 8, 4 or 2 bits each, with a scale and a bias of their own (FBGEMM's fused
 * row-wise formats).
 */
#ifndef PERI_KERNELS_QUANTIZE_H
#define PERI_KERNELS_QUANTIZE_H

#include <perilune/base.h>

#include "work.h"

/** A row of `cols` numbers x lies in `stride` bytes of any alignment: codes at `codes_at`, scale and bias, one after
 *  the other, at `scale_at` (-1: there are none); all other bytes are 0. least and largest: of the row, or
 *  min_max[row]; -0 counts as 0. All arithmetic is single f32 operations; rint rounds to nearest even.
 *
 *  bits 8, f32 scale   scale = (largest - least) / 255, bias = least, code = rint((x - least) * (255 / (largest - least
 *                      + 1e-8)))
 *  bits b, f16 scale   bias = f16(least), scale = f16((largest - bias) / (2^b - 1)), 1 if that is 0 or its inverse is
 *                      infinite; code = min(max(rint((x - bias) * (1 / scale)), 0), 2^b - 1)
 *  back                x = fma(code, scale, bias)
 *  fp8                 e = exponent_bits, m = 7 - e, b = exponent_bias, max = 2^(2^e - 2 - b) * (2 - 2^-m). a =
 *                      min(|x|, max), NaN becomes max; a is rounded to nearest even: to m bits behind the point of its
 *                      binary form, below 2^(1 - b) to multiples of 2^(1 - b - m). code = sign, e bits, m bits; back:
 *                      exponent field 0: mantissa * 2^(1 - b - m), else (1 + mantissa / 2^m) * 2^(field - b).
 *  fp8, f32 scale      scale = max / (1e-20 + largest |x|), bias = 0; the codes are those of x * scale; back: value /
 *                      scale
 *
 *  A row with a number that is not finite, or with a scale or bias that is not, has NaN for both and codes 0 (fp8
 *  without scale: see above). Numbers are f32, f16 or bf16; results are rounded to nearest even. range: rows. */
typedef struct peri_k_rows_args {
    void *bytes;          /* rows x stride */
    void *x;              /* rows x cols; restore writes it */
    const float *min_max; /* rows x 2, or NULL */
    int64_t cols, stride, codes_at, scale_at;
    int32_t dtype;                        /* of x */
    int32_t bits;                         /* 8, 4, 2 */
    int32_t exponent_bits, exponent_bias; /* exponent_bits > 0: fp8 */
    bool half;                            /* scale and bias are f16 */
} peri_k_rows_args;

PERI_KERNELS_QUANTIZE(PERI_K_ARGS_OF)

#endif
