/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/convert.h: filling, copying between layouts and dtypes, random numbers, combining the buffers of several
 * ranks.
 */
#ifndef PERI_KERNELS_CONVERT_H
#define PERI_KERNELS_CONVERT_H

#include <perilune/base.h>

#include "work.h"

/** for i in range: dst[i] = value, converted to dtype like `convert` does. range: elements. */
typedef struct peri_k_fill_args {
    void *dst;
    int32_t dtype;
    double value;
    int64_t ivalue; /* used instead of value by the integer dtypes and bool */
} peri_k_fill_args;

/** for each index (i0, ..., i{ndim-1}) in row-major order: dst[sum i*dst_stride] = cast(src[sum i*src_stride]).
 *  range: elements in row-major order of `shape`. Strides are in elements and may be 0 on the source (broadcast).
 *
 *  Casts: between floats, round to nearest even; f16 and bf16 overflow to infinity, NaN stays NaN. Float to integer
 *  truncates towards zero, saturates at the integer's range, NaN becomes 0. Integer to narrower integer keeps the low
 *  bits. To bool: x != 0 (NaN is true). bool to number: 0 or 1. Real to complex: imaginary part 0; complex to real: the
 *  real part. */
typedef struct peri_k_convert_args {
    void *dst;
    const void *src;
    int32_t dst_dtype, src_dtype, ndim;
    int64_t shape[PERI_MAX_DIMS], dst_stride[PERI_MAX_DIMS], src_stride[PERI_MAX_DIMS];
} peri_k_convert_args;

enum { PERI_RANDOM_UNIFORM = 0, PERI_RANDOM_NORMAL = 1 };

/** Element (r, c) of a rows x cols block of a larger matrix of total_cols columns, whose place in that matrix is
 *  index = (row_offset + r) * total_cols + col_offset + c:
 *    word(i) = Philox4x32-10 (Salmon et al. 2011) with key seed, counter (i / 4, random_stream), output word i % 4
 *    uniform: low + (high - low) * u,  u = (word(index) >> 8) * 2^-24
 *    normal:  low + high * sqrt(-2 ln u1) * (cos if index is even, sin if odd)(2 pi u2),
 *             u1 = (word(index & ~1) + 1) * 2^-32, u2 = word(index | 1) * 2^-32
 *  in f64, rounded once: the value depends on (seed, random_stream, index) only, not on how the matrix is cut.
 *  range: elements of the block, row-major, contiguous. */
typedef struct peri_k_random_args {
    void *dst;
    int32_t dtype; /* PERI_F32, PERI_F64, PERI_F16, PERI_BF16 */
    int32_t kind;  /* PERI_RANDOM_* */
    int64_t cols, row_offset, col_offset, total_cols;
    double low, high; /* normal: mean, deviation */
    uint64_t seed, random_stream;
} peri_k_random_args;

/** dst[i] = src[0][i] op src[1][i] op ... op src[n-1][i], combined in this order: f16 and bf16 in f32, rounded once at
 *  the end; integers wrap; min and max give NaN if any is NaN; bool and complex as peri_coll_all_reduce allows. range:
 *  elements. dst may be one of the sources. */
typedef struct peri_k_reduce_args {
    void *dst;
    const void *const *src; /* n pointers, in the device's memory */
    int32_t n, dtype, reduce; /* PERI_REDUCE_* */
} peri_k_reduce_args;

/** dst[i] = src[i] / divisor, in dtype (f32, f64). range: elements. dst may be src. */
typedef struct peri_k_divide_args {
    void *dst;
    const void *src;
    int32_t dtype;
    double divisor;
} peri_k_divide_args;

PERI_KERNELS_CONVERT(PERI_K_ARGS_OF)

#endif
