/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/elements.h: elements compared, chosen, picked by an index, added up one after the other, numbered and sorted.
 * Strides count elements; 0 repeats. What is called `dst` is contiguous.
 */
#ifndef PERI_KERNELS_ELEMENTS_H
#define PERI_KERNELS_ELEMENTS_H

#include <perilune/base.h>

#include "list.h"

/** For each index in row-major order of shape: dst[i] = a[..] op b[..], 0 or 1. b NULL: the number `value` (floats) or
 *  `whole` (integers and bool) stands for each b. Any dtype that is not complex, the same for a and b; with a NaN only
 *  NE is true. range: elements. */
typedef struct peri_k_compare_args {
    uint8_t *dst;
    const void *a, *b;
    int32_t dtype, op, ndim; /* op: PERI_COMPARE_* (perilune/base.h) */
    double value;
    int64_t whole;
    int64_t shape[PERI_MAX_DIMS], a_stride[PERI_MAX_DIMS], b_stride[PERI_MAX_DIMS];
} peri_k_compare_args;

/** dst[i] = condition[..] ? a[..] : b[..], elements of `width` (1, 2, 4, 8 or 16) bytes. A NULL a or b stands for zeros
 *  everywhere. range: elements. */
typedef struct peri_k_where_args {
    void *dst;
    const uint8_t *condition;
    const void *a, *b;
    int32_t width, ndim;
    int64_t shape[PERI_MAX_DIMS], condition_stride[PERI_MAX_DIMS], a_stride[PERI_MAX_DIMS], b_stride[PERI_MAX_DIMS];
} peri_k_where_args;

/** dst[i] = src[place], place being that of i with index[..] as its coordinate of dimension `dim`. Indices have been
 *  checked. `width` as in where. range: elements. */
typedef struct peri_k_take_args {
    void *dst;
    const void *src;
    const int64_t *index;
    int32_t width, ndim, dim;
    int64_t shape[PERI_MAX_DIMS], src_stride[PERI_MAX_DIMS], index_stride[PERI_MAX_DIMS];
} peri_k_take_args;

/** The adjoint of take: for each line u along the dimension `dim` of shape (lines in row-major order of the other
 *  dimensions), and j from 0 up to shape[dim] - 1: dst[.., index[.., j, ..], ..] += src[.., j, ..]. Strides of all
 *  three; no two lines share elements of dst. f32 and f64. range: lines. */
typedef struct peri_k_take_add_args {
    void *dst;
    const void *src;
    const int64_t *index;
    int32_t dtype, ndim, dim;
    int64_t shape[PERI_MAX_DIMS], dst_stride[PERI_MAX_DIMS], src_stride[PERI_MAX_DIMS], index_stride[PERI_MAX_DIMS];
} peri_k_take_add_args;

/** x and y are [outer][n][inner]: y[o][r][i] = x[o][0][i] + ... + x[o][r][i]; backwards: x[o][r][i] + ... + x[o][n -
 *  1][i]. f32 and f64 add up in f64 and round each result once; i64 wraps. range: outer * inner. */
typedef struct peri_k_running_sum_args {
    void *y;
    const void *x;
    int32_t dtype;
    bool backwards;
    int64_t n, inner;
} peri_k_running_sum_args;

/** dst[i] = start + i * step, in f64 for f32 and f64, in i64 for i32 and i64. range: elements. */
typedef struct peri_k_iota_args {
    void *dst;
    int32_t dtype;
    double start, step;
    int64_t whole_start, whole_step;
} peri_k_iota_args;

/** Operation sort_lines: of each line of x [lines][n] the first k elements in rising (`descending`: falling) order with
 *  their places: values[l][r], indices[l][r]. NaN is larger than all numbers; elements that are equal (-0 and 0, two
 *  NaNs) keep their order. Any dtype that is not complex. 0 <= k <= n; lines * n < 2^31. */
typedef struct peri_op_sort_lines {
    const void *x;
    void *values;     /* lines * k */
    int64_t *indices; /* lines * k */
    int32_t dtype;
    bool descending;
    int64_t lines, n, k;
} peri_op_sort_lines;

/** An element to be sorted: its key (k_sort_key below) and its place. */
typedef struct peri_k_sort_entry {
    uint64_t key;
    int64_t place;
} peri_k_sort_entry;

/** The operation sort_lines of some lines. range: lines. */
typedef struct peri_k_sort_line_args {
    peri_op_sort_lines sort;
    peri_k_sort_entry *room; /* 2 * n entries for each line */
} peri_k_sort_line_args;

PERI_KERNELS_ELEMENTS(PERI_K_ARGS_OF) PERI_OPS_ELEMENTS(PERI_OP_ARGS_OF)

#endif
