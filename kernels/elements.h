/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/elements.h: elements compared, chosen, picked by an index, added up one after the other, numbered and sorted.
 * Strides count elements; 0 repeats. What is called `dst` is contiguous.
 */
#ifndef PERI_KERNELS_ELEMENTS_H
#define PERI_KERNELS_ELEMENTS_H

#include <math.h>
#include <perilune/base.h>

#include "dense.h"
#include "inline.h"
#include "work.h"

/** For each index in row-major order of shape: dst[i] = a[..] op b[..], 0 or 1. b NULL: the number `value` (floats) or
 *  `integer` (integers and bool) stands for each b. Any dtype that is not complex, the same for a and b; with a NaN
 *  only NE is true. range: elements. */
typedef struct peri_k_compare_args {
    uint8_t *dst;
    const void *a, *b;
    int32_t dtype, op, ndim; /* op: PERI_COMPARE_* (perilune/base.h) */
    double value;
    int64_t integer;
    int64_t shape[PERI_MAX_DIMS], a_stride[PERI_MAX_DIMS], b_stride[PERI_MAX_DIMS];
} peri_k_compare_args;

/** Arithmetic of integers, which wraps around. FLOOR and REMAINDER are those of Python: the quotient is rounded down,
 *  and what is left has the sign of the divisor; by 0 they are 0 (who calls them has refused it). */
enum {
    PERI_INTEGER_ADD = 0,
    PERI_INTEGER_SUB = 1,
    PERI_INTEGER_MUL = 2,
    PERI_INTEGER_MAX = 3,
    PERI_INTEGER_MIN = 4,
    PERI_INTEGER_FLOOR = 5,
    PERI_INTEGER_REMAINDER = 6,
    PERI_INTEGER_FMOD = 7, /* what C's % leaves, with the sign of the dividend */
    PERI_INTEGER_POW = 8,  /* by a negative exponent: the power's part before the point, 0 for a base of 0 */
    PERI_INTEGER_COUNT = 9
};

/** x to the power y, by squares: the bits of y from the lowest. */
K_INLINE int64_t peri_integer_power(int64_t x, int64_t y)
{
    if (y < 0) return x == 1 ? 1 : x != -1 ? 0 : y % 2 ? -1 : 1;
    uint64_t power = 1;
    for (uint64_t square = (uint64_t)x; y; y >>= 1, square *= square)
        if (y & 1) power *= square;
    return (int64_t)power;
}

/** x op y of 64 bits; of narrower integers it is what is left of it in their bits. */
K_INLINE int64_t peri_integer(int32_t op, int64_t x, int64_t y)
{
    switch (op) {
    case PERI_INTEGER_ADD: return (int64_t)((uint64_t)x + (uint64_t)y);
    case PERI_INTEGER_SUB: return (int64_t)((uint64_t)x - (uint64_t)y);
    case PERI_INTEGER_MUL: return (int64_t)((uint64_t)x * (uint64_t)y);
    case PERI_INTEGER_MAX: return x > y ? x : y;
    case PERI_INTEGER_MIN: return x < y ? x : y;
    case PERI_INTEGER_POW: return peri_integer_power(x, y);
    default: break;
    }
    if (y == 0) return 0;
    /* the least number by -1 does not fit, and the processor would stop at it */
    if (y == -1) return op == PERI_INTEGER_FLOOR ? (int64_t)(0 - (uint64_t)x) : 0;
    const int64_t left = x % y;
    if (op == PERI_INTEGER_FMOD) return left;
    const bool apart = left != 0 && (left < 0) != (y < 0);
    return op == PERI_INTEGER_FLOOR ? x / y - apart : left + (apart ? y : 0);
}

/* integer: what `binary` is (peri_k_binary_args), of integers: op is PERI_INTEGER_*, and all three are of one dtype,
 * integers or bool. */

/** Products of matrices of integers, a batch of them: dst[..][r][c] = the sum of a[..][r][i] * b[..][i][c] over i < k,
 *  which wraps around. shape and the strides of a and b are those of the batch (ndim may be 0); dst is contiguous, [..]
 *  [rows][cols]. All three of one integer dtype. range: rows of dst, shape[0] * .. * shape[ndim - 1] * rows. */
typedef struct peri_k_integer_product_args {
    void *dst;
    const void *a, *b;
    int32_t dtype, ndim;
    int64_t rows, cols, k, a_row, a_col, b_row, b_col; /* a_row .. b_col: strides within a matrix */
    int64_t shape[PERI_MAX_DIMS], a_stride[PERI_MAX_DIMS], b_stride[PERI_MAX_DIMS];
} peri_k_integer_product_args;

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

/** Operation take_add, and its step, the adjoint of take: for each line u along the dimension `dim` of shape (lines in
 *  row-major order of the other dimensions), and j from 0 up to shape[dim] - 1: dst[.., index[.., j, ..], ..] +=
 *  src[.., j, ..]; `put`: = instead of +=, so that of several the last one stays. Strides of all three; no two lines
 *  share elements of dst. f32, f64, and i64, which wraps. The step's range: lines. */
typedef struct peri_k_take_add_args {
    void *dst;
    const void *src;
    const int64_t *index;
    int32_t dtype, ndim, dim;
    bool put;
    int64_t size; /* of dst along dim */
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

/* running_product, of peri_k_product_dim_args (dense.h), y being as large as x: y[o][r][i] = x[o][0][i] * ... *
 * x[o][r][i], each result rounded once.
 * running_product_grad, of peri_k_product_dim_grad_args, dy being as large as x: dx[o][r][i] = the sum over q >= r of
 * dy[o][q][i] times the product of x[o][p][i] over p <= q but r, without a division: x may be 0; dx keeps what stands
 * before r meanwhile, rounded. */

/** x, values and indices are [outer][n][inner]: values[o][r][i] is the largest (`least`: the smallest) of x[o][0][i],
 *  ..., x[o][r][i], and indices[o][r][i] its place 0..r, of equal elements the last one's; from a NaN on it is the last
 *  NaN. Any dtype that is not complex. range: outer * inner. */
typedef struct peri_k_running_extreme_args {
    void *values;
    int64_t *indices;
    const void *x;
    int32_t dtype;
    bool least;
    int64_t n, inner;
} peri_k_running_extreme_args;

/** dst[i] = how many elements of a line of `sorted` are smaller than x[i] (`right`: not larger), that is where x[i]
 *  goes among them. sorted is [lines][n], or [n] for all if `one`; x and dst are [lines][per_line]. Lines rise, as
 *  sort_lines has them; NaN is larger than all numbers. Any dtype that is not complex. range: elements. */
typedef struct peri_k_search_args {
    int64_t *dst;
    const void *sorted, *x;
    int32_t dtype;
    bool right, one;
    int64_t n, per_line;
} peri_k_search_args;

/** dst[i] = start + i * step, in f64 for f32 and f64, in i64 for i32 and i64. range: elements. */
typedef struct peri_k_iota_args {
    void *dst;
    int32_t dtype;
    double start, step;
    int64_t integer_start, integer_step;
} peri_k_iota_args;

/** Operation sort_lines: of each line of x [lines][n] k elements in rising (`descending`: falling) order, from rank
 *  `first` on, with their places: values[l][r], indices[l][r]. NaN is larger than all numbers; elements that are equal
 *  (-0 and 0, two NaNs) keep their order. `nan_first`: of a line that has a NaN all k are its first NaN. Any dtype that
 *  is not complex. 0 <= first, 0 <= k, first + k <= n; lines * n < 2^31. */
typedef struct peri_op_sort_lines {
    const void *x;
    void *values;     /* lines * k */
    int64_t *indices; /* lines * k */
    int32_t dtype;
    bool descending, nan_first;
    int64_t lines, n, first, k;
} peri_op_sort_lines;

/** Of each line of `sorted` [lines][n], n >= 1, which rises, and of the places of its elements, as sort_lines has them:
 *  the element that is there most often, of several the smallest, and the last of its places. No NaN equals another.
 *  range: lines. */
typedef struct peri_k_mode_args {
    void *values;     /* lines */
    int64_t *indices; /* lines */
    const void *sorted;
    const int64_t *places;
    int32_t dtype;
    int64_t n;
} peri_k_mode_args;

/** dst[i] = the number of the interval that has x[i] among `bins` of one width from least to most, the last one with
 *  its upper bound; `bins` for elements of no interval, NaN among them. In f64 for f64 and integers, else in f32, where
 *  bins times the distance of the bounds is finite and above 0. Any dtype that is not complex. range: elements. */
typedef struct peri_k_bin_args {
    int32_t *dst;
    const void *x;
    int32_t dtype, bins; /* bins: 1..2^30 */
    double least, most;
} peri_k_bin_args;

/** dst[i][d] = the coordinate d of element flat[i] of an array of `shape`, in row-major order. range: rows of dst. */
typedef struct peri_k_unravel_args {
    int64_t *dst;
    const int64_t *flat;
    int32_t ndim;
    int64_t shape[PERI_MAX_DIMS];
} peri_k_unravel_args;

/** Logits of items that are negatives of each other, x and dst [n][n]: dst[i][j] = scale * x[i][j] - log_q[j], but
 *  `fill` where item j is another one with the id of item i: i != j and ids[i] == ids[j]. ids and log_q may be NULL.
 *  x, dst and log_q: f32 or f64. range: rows. */
typedef struct peri_k_in_batch_logits_args {
    void *dst;
    const void *x, *log_q;
    const int64_t *ids;
    int32_t dtype;
    int64_t n;
    double scale, fill;
} peri_k_in_batch_logits_args;

/** Sums of blocks of rows, x [outer][n][inner] and dst [outer][blocks][inner]: dst[o][k][i] = the sum of x[o][r][i]
 *  over the rows r of block k, which begins with row k * block and has `block` rows, or what is left of n. x: integers
 *  or bool; sums are 64 bits, and wrap. blocks = ceil(n / block), at least 1. range: outer * blocks * inner. */
typedef struct peri_k_integer_sum_args {
    int64_t *dst;
    const void *x;
    int32_t dtype;
    int64_t n, block, blocks, inner;
} peri_k_integer_sum_args;

/** Triangles of matrices, x and dst [matrices][rows][cols] of elements of `width` bytes: dst[m][r][c] = x[m][r][c]
 *  where c <= r + k (`upper`: c >= r + k), elsewhere `fill`. range: matrices * rows. */
typedef struct peri_k_triangle_args {
    void *dst;
    const void *x;
    int32_t width; /* 1, 2, 4, 8 or 16 */
    bool upper;
    int64_t rows, cols, k; /* |k| <= 2^62 */
    uint8_t fill[16];
} peri_k_triangle_args;

/** The cosine of the angle between rows of a and b [rows][cols]: y[r] = a . b / (|a| |b|). A size |a| below eps counts
 *  as eps; added > 0: it is sqrt(a . a + added). In f64; of f32 and f64. sizes[r] has what the gradient needs: 1 / |a|,
 *  1 / |b|, and the factors of y a and y b in it: 1 / |a| over the true size of a (0: 0), or 1 / |a|^2 if added > 0,
 *  and that of b. range: rows. */
typedef struct peri_k_cosine_args {
    void *y;
    double *sizes; /* [rows][4] */
    const void *a, *b;
    int32_t dtype;
    double eps, added;
    int64_t cols;
} peri_k_cosine_args;

/** da = dy (b / (|a| |b|) - y sizes[2] a), db likewise; da or db may be NULL. range: rows. */
typedef struct peri_k_cosine_grad_args {
    void *da, *db;
    const void *dy, *y, *a, *b;
    const double *sizes;
    int32_t dtype;
    int64_t cols;
} peri_k_cosine_grad_args;

/** What sizes has of a and of b whose squares add up to @a and @b; returns 1 / (|a| |b|). */
K_INLINE double k_cosine_sizes(double a, double b, double eps, double added, double *sizes)
{
    const double squares[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        const double size = sqrt(squares[i] + added), counted = added > 0 || !(size < eps) ? size : eps;
        sizes[i] = 1 / counted;
        sizes[2 + i] = size > 0 ? 1 / (counted * size) : 0;
    }
    return sizes[0] * sizes[1];
}

/** dst[i] = whether x[i] is one of sorted[n], which rises as sort_lines has it. No NaN is. Any dtype that is not
 *  complex. range: elements. */
typedef struct peri_k_member_args {
    uint8_t *dst;
    const void *sorted, *x;
    int32_t dtype;
    int64_t n;
} peri_k_member_args;

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
