/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/dense.h: the dense part of a model. All kernels take f32 or f64; f32 results of the vectorised kernels may
 * differ from ref's by rounding (ref computes each element in f64 and rounds once). Kernels that say "16 bits too" also
 * take f16 and bf16: what they read is computed in f32 or better and rounded to the dtype when it is stored. Arrays are
 * contiguous unless a stride is given.
 */
#ifndef PERI_KERNELS_DENSE_H
#define PERI_KERNELS_DENSE_H

#include <perilune/base.h>

#include "inline.h"
#include "work.h"

#include <math.h>

/** Operation: C = alpha * op(A) * op(B) + beta * C, row-major, `batch` times with element strides between the matrices.
 *  op(A) is m x k, op(B) is k x n, C is m x n; lda, ldb, ldc are elements from one stored row to the next. beta = 0
 *  never reads C. In what order products are added is the device's affair; they are added in f32 (f64: in f64), and the
 *  sum is rounded once. */
typedef struct peri_op_gemm {
    int32_t dtype;          /* of A and B: PERI_F32 or PERI_F64; PERI_F16 and PERI_BF16 where the device can */
    int32_t c_dtype;        /* of C and bias: `dtype`, or PERI_F32 */
    bool biased;            /* bias[j] is added to each C[i][j] before it is rounded; batch 1, alpha 1, beta 0. Where
                               the device can */
    bool trans_a, trans_b;  /* A is stored k x m; B is stored n x k */
    bool tf32;              /* factors of PERI_F32 may be rounded to TF32 (10 bits of mantissa) */
    bool ordered;           /* products of PERI_F32 are added as panel_product adds them, whatever m and n are. Where
                               the device can */
    int64_t m, n, k, batch; /* batch >= 1 */
    double alpha, beta;
    const void *a, *b, *bias;
    void *c;
    int64_t lda, ldb, ldc;
    int64_t stride_a, stride_b, stride_c; /* elements; 0 repeats the same matrix (a and b only) */
} peri_op_gemm;

/** y[i] += alpha * x[i]. 16 bits too. range: elements. y may be x. */
typedef struct peri_k_axpy_args {
    void *y;
    const void *x;
    int32_t dtype;
    double alpha;
} peri_k_axpy_args;

/* -- elementwise --------------------------------------------------------------------------------------------------- */

/** f(x) of `unary`; the comment names its derivative in terms of x or of y = f(x): what `unary_grad` wants as `saved`.
 *  Where RELU and CLAMP have the derivative 0 the result is 0 for an infinite dy, too. */
enum {
    PERI_UNARY_IDENTITY = 0,   /* x                                    1 */
    PERI_UNARY_RELU = 1,       /* x < 0 ? 0 : x (NaN and -0 stay)      y > 0 ? 1 : 0 */
    PERI_UNARY_SIGMOID = 2,    /* 1 / (1 + exp(-x))                    y (1 - y) */
    PERI_UNARY_TANH = 3,       /* tanh x                               1 - y^2 */
    PERI_UNARY_EXP = 4,        /* exp x                                y */
    PERI_UNARY_SQRT = 5,       /* sqrt x                               1 / (2 y) */
    PERI_UNARY_SILU = 6,       /* x sigmoid(x)                         s (1 + x (1 - s)), s = sigmoid(x) */
    PERI_UNARY_GELU = 7,       /* x (1 + erf(x / sqrt 2)) / 2          (1 + erf(x / sqrt 2)) / 2 + x exp(-x^2 / 2) /
                                  sqrt(2 pi) */
    PERI_UNARY_SOFTPLUS = 8,   /* log(1 + exp x)                       sigmoid(x) */
    PERI_UNARY_LOGSIGMOID = 9, /* -log(1 + exp(-x))                    1 - sigmoid(x) */
    PERI_UNARY_LEAKY_RELU = 10, /* x > 0 ? x : a x                     x > 0 ? 1 : a */
    PERI_UNARY_LOG = 11,       /* log x                                1 / x */
    PERI_UNARY_ABS = 12,       /* |x|                                  sign x, 0 at 0 */
    PERI_UNARY_SQUARE = 13,    /* x^2                                  2 x */
    PERI_UNARY_POW = 14,       /* x^a                                  a x^(a - 1), 0 if a = 0 */
    PERI_UNARY_AFFINE = 15,    /* a x + b                              a */
    PERI_UNARY_RECIPROCAL = 16, /* a / x                               -a / x^2 */
    PERI_UNARY_CLAMP = 17,     /* x below a: a, above b: b (NaN stays) 1 where a < x < b, else 0; infinite bounds are
                                  none */
    PERI_UNARY_ROOT = 18,      /* sqrt x                               1 / (2 sqrt x), 0 at 0 */
    PERI_UNARY_LOG1P = 19,     /* log(1 + x)                           1 / (1 + x) */
    PERI_UNARY_EXPM1 = 20,     /* exp(x) - 1                           exp x */
    PERI_UNARY_RSQRT = 21,     /* 1 / sqrt x                           -(1 / sqrt x)^3 / 2 (of -0: infinity) */
    PERI_UNARY_SIN = 22,       /* sin x                                cos x */
    PERI_UNARY_COS = 23,       /* cos x                                -sin x */
    PERI_UNARY_ERF = 24,       /* the error function                   2 / sqrt(pi) exp(-x^2) */
    PERI_UNARY_FLOOR = 25,     /* x rounded down                       0 */
    PERI_UNARY_CEIL = 26,      /* x rounded up                         0 */
    PERI_UNARY_ROUND = 27,     /* the nearest whole number, the even one of two      0 */
    PERI_UNARY_TRUNC = 28,     /* x rounded towards 0                  0 */
    PERI_UNARY_SIGN = 29,      /* 1, -1, or 0 (of NaN too)             0 */
    PERI_UNARY_COUNT = 30
};
/** Their names, in this order: what model files call them. */
#define PERI_UNARY_NAMES                                                                                               \
    {                                                                                                                  \
        "identity", "relu", "sigmoid", "tanh", "exp", "sqrt", "silu", "gelu", "softplus", "logsigmoid", "leaky_relu",  \
            "log", "abs", "square", "pow", "affine", "reciprocal", "clamp", "root", "log1p", "expm1", "rsqrt", "sin",  \
            "cos", "erf", "floor", "ceil", "round", "trunc", "sign"                                                    \
    }
/** X(NAME, name) for those of x alone, which are operations on tensors: peri_op_<name>(x, out). */
#define PERI_UNARY_PLAIN(X)                                                                                            \
    X(RELU, relu)                                                                                                      \
    X(SIGMOID, sigmoid) X(TANH, tanh) X(EXP, exp) X(SQRT, sqrt) X(SILU, silu) X(GELU, gelu) X(SOFTPLUS, softplus)      \
        X(LOGSIGMOID, logsigmoid) X(LOG, log) X(ABS, abs) X(SQUARE, square) X(ROOT, root) X(LOG1P, log1p)              \
            X(EXPM1, expm1) X(RSQRT, rsqrt) X(SIN, sin) X(COS, cos) X(ERF, erf) X(FLOOR, floor) X(CEIL, ceil)          \
                X(ROUND, round) X(TRUNC, trunc) X(SIGN, sign)
/** The last function whose derivative is a function of y alone. */
enum { PERI_UNARY_FROM_OUTPUT = PERI_UNARY_SQRT };

/** dst[i] = f(x[i]). 16 bits too. range: elements. dst may be x. */
typedef struct peri_k_unary_args {
    void *dst;
    const void *x;
    int32_t dtype, op; /* PERI_UNARY_* */
    double a, b;
} peri_k_unary_args;

/** dx[i] = dy[i] * f'. saved: y for op <= PERI_UNARY_FROM_OUTPUT, else x; not read by IDENTITY and AFFINE. 16 bits too.
 *  range: elements. dx may be dy. a and b are those of unary. */
typedef struct peri_k_unary_grad_args {
    void *dx;
    const void *dy, *saved;
    int32_t dtype, op;
    double a, b;
} peri_k_unary_grad_args;

/** MAX and MIN: the larger and the smaller one; NaN if either is. Those after PERI_BINARY_LAST_PLAIN are computed in
 *  f64 and rounded once: peri_binary_rare below says what they are. */
enum {
    PERI_BINARY_ADD = 0,
    PERI_BINARY_SUB = 1,
    PERI_BINARY_MUL = 2,
    PERI_BINARY_DIV = 3,
    PERI_BINARY_MAX = 4,
    PERI_BINARY_MIN = 5,
    PERI_BINARY_LAST_PLAIN = PERI_BINARY_MIN,
    PERI_BINARY_POW = 6,
    PERI_BINARY_POW_BASE = 7,     /* what the gradient of a power is multiplied by for its base */
    PERI_BINARY_POW_EXPONENT = 8, /* and for its exponent */
    PERI_BINARY_FLOOR = 9,        /* x / y rounded down */
    PERI_BINARY_TRUNC = 10,       /* x / y rounded towards 0 */
    PERI_BINARY_REMAINDER = 11,   /* x - y FLOOR(x, y), of the sign of y */
    PERI_BINARY_FMOD = 12,        /* x - y TRUNC(x, y), of the sign of x */
    PERI_BINARY_COUNT = 13
};

/** x / y rounded down. The remainder is taken off first, so that the quotient is near a whole number. */
K_INLINE double peri_floor_quotient(double x, double y)
{
    const double left = fmod(x, y);
    if (y == 0) return x / y;
    const double quotient = (x - left) / y - (left != 0 && (left < 0) != (y < 0)), down = floor(quotient);
    return quotient == 0 ? copysign(0.0, x / y) : quotient - down > 0.5 ? down + 1 : down;
}

/** Functions of two numbers after PERI_BINARY_LAST_PLAIN, as PyTorch has them. */
K_INLINE double peri_binary_rare(int32_t op, double x, double y)
{
    double left;
    switch (op) {
    case PERI_BINARY_POW: return pow(x, y);
    case PERI_BINARY_POW_BASE: return y == 0 ? 0 : y * pow(x, y - 1);
    case PERI_BINARY_POW_EXPONENT: return x == 0 && y >= 0 ? 0 : pow(x, y) * log(x);
    case PERI_BINARY_FLOOR: return peri_floor_quotient(x, y);
    case PERI_BINARY_TRUNC: return trunc(x / y);
    case PERI_BINARY_REMAINDER: left = fmod(x, y); return left != 0 && (left < 0) != (y < 0) ? left + y : left;
    default: return fmod(x, y);
    }
}

/** For each index in row-major order of shape: dst[i] = a[sum index*a_stride] op b[sum index*b_stride]. Strides are in
 *  elements; 0 repeats. dst is contiguous and may be a or b where that one is laid out like it. 16 bits too. range:
 *  elements. */
typedef struct peri_k_binary_args {
    void *dst;
    const void *a, *b;
    int32_t dtype, op, ndim;
    int64_t shape[PERI_MAX_DIMS], a_stride[PERI_MAX_DIMS], b_stride[PERI_MAX_DIMS];
} peri_k_binary_args;

/** dst[i] = a[i] * b[i] + c[i] * scale. 16 bits too. range: elements. dst may be any of them. */
typedef struct peri_k_muladd_args {
    void *dst;
    const void *a, *b, *c;
    int32_t dtype;
    double scale;
} peri_k_muladd_args;

/* -- formulas ------------------------------------------------------------------------------------------------------ */

/** What a step of a formula computes of the registers that it names (a, b, c) and of its numbers (x, y). */
enum {
    PERI_FORMULA_UNARY = 0,   /* f(a), f = op (PERI_UNARY_*) with the numbers x and y */
    PERI_FORMULA_CHAIN = 1,   /* a f'(b), as unary_grad has it: b is what that wants as `saved` */
    PERI_FORMULA_BINARY = 2,  /* a op b (PERI_BINARY_*, up to PERI_BINARY_LAST_PLAIN) */
    PERI_FORMULA_COMPARE = 3, /* 1 if a op b (PERI_COMPARE_*), else 0 */
    PERI_FORMULA_WHERE = 4,   /* b if a is not 0, else c */
    PERI_FORMULA_NUMBER = 5,  /* x */
    PERI_FORMULA_KINDS = 6
};

typedef struct peri_k_formula_step {
    uint8_t kind, op, a, b, c;
    double x, y;
} peri_k_formula_step;

/** Whether a comparison (PERI_COMPARE_*) holds; of f32 it is the same of the numbers as doubles. */
static inline bool peri_compared(int32_t op, double x, double y)
{
    switch (op) {
    case PERI_COMPARE_EQ: return x == y;
    case PERI_COMPARE_NE: return x != y;
    case PERI_COMPARE_LT: return x < y;
    case PERI_COMPARE_LE: return x <= y;
    case PERI_COMPARE_GT: return x > y;
    default: return x >= y;
    }
}

enum { PERI_FORMULA_INPUTS = 5, PERI_FORMULA_STEPS = 64, PERI_FORMULA_RESULTS = 4 };

/** Several functions of elements one after the other, without memory for what is between them. Each element has
 *  registers: the first n_in are the elements of the inputs, and step k writes register n_in + k. For |x - t| of two
 *  inputs: n_in = 2, n_steps = 2,
 *
 *    register   0  1  2                       3
 *    is         x  t  step 0: BINARY SUB 0 1  step 1: UNARY ABS 2      result[0] = 3
 *
 *  For each index in row-major order of shape dst[k], which is contiguous, gets register result[k]. Strides are in
 *  elements; 0 repeats. Each step is rounded to the dtype: f32 or f64. range: elements. */
typedef struct peri_k_formula_args {
    void *dst[PERI_FORMULA_RESULTS];
    const void *in[PERI_FORMULA_INPUTS];
    int32_t dtype, ndim, n_in, n_steps, n_results;
    uint8_t result[PERI_FORMULA_RESULTS];
    int64_t shape[PERI_MAX_DIMS], stride[PERI_FORMULA_INPUTS][PERI_MAX_DIMS];
    peri_k_formula_step step[PERI_FORMULA_STEPS];
} peri_k_formula_args;

/* -- the sides of a linear layer ----------------------------------------------------------------------------------- */

/** y[r][c] = f(y[r][c] + bias[c]), in place; f = `act`, one of the unary functions up to PERI_UNARY_FROM_OUTPUT; bias
 *  may be NULL. 16 bits too. range: rows. */
typedef struct peri_k_bias_act_args {
    void *y;
    const void *bias;
    int32_t dtype, act;
    int64_t cols;
} peri_k_bias_act_args;

/** Columns of a panel; numbers of a row that products of bf16 add together before they add them to what came before. */
enum { PERI_PANEL = 16, PERI_HALVES_STEP = 32 };

/** Step: y[r][c] = f(s + bias[c]), s = the sum of x[r][k] * w[c][k] over k < inner: it begins with +0, and each
 *  product, in the order of k, is added by one fma (rounded once). So a row of y is a function of its row of x alone,
 *  and where `act` is IDENTITY or RELU every instruction set computes the same bits. bias may be NULL: nothing is
 *  added. f = `act` as in bias_act. f32.
 *  w lies in panels of PERI_PANEL columns, f32 or bf16 (which are f32 before they are multiplied): w[c][k] is
 *  panels[((c / PERI_PANEL) * inner + k) * PERI_PANEL + c % PERI_PANEL]; what is behind the last column is read and
 *  does not matter. Panels of i8 have codes there, and after the codes of each panel a scale (f32) for each of its
 *  columns: the sum is of x and codes, and is multiplied by the scale before the bias is added.
 *  With `codes` the numbers of x are rounded first, too, to the dtype of the panels. `codes` is room for
 *  peri_codes_bytes(inner, dtype) for each row, which the rows of the range are written to. Every instruction set
 *  computes the same bits here as well.
 *  Of i8 (inner up to PERI_CODES_MOST) they are codes, as peri_codes_of (codes.h) makes them of each row: s = sum of
 *  codes, which is exact and in any order, as f32, times the column's scale, times the row's.
 *  Of bf16 they are bf16 (peri_bf16_of), and s is what the tiles of AMX (TDPBF16PS) compute. It begins with +0. Of each
 *  PERI_HALVES_STEP numbers the products with an even k are added to one sum, and those with an odd k to another, in
 *  the order of k, by fma; both begin with +0. The two are added, and this sum to s. Numbers of w below 2^-126 count as
 *  0. So does each result that is below 2^-126 when it is rounded to 24 bits, and in the end -0 as +0.
 *  Strides in elements. range: rows. */
typedef struct peri_k_panel_product_args {
    float *y;
    const float *x, *bias;
    const void *panels;
    void *codes;
    int32_t act, dtype; /* dtype: of the panels */
    int64_t inner, cols, x_stride, y_stride;
} peri_k_panel_product_args;

/** Numbers of a matrix of @cols x @inner in panels. */
static inline int64_t peri_panel_size(int64_t cols, int64_t inner)
{
    return (cols + PERI_PANEL - 1) / PERI_PANEL * PERI_PANEL * inner;
}

/** Bytes of so many columns of panels of @dtype. */
static inline int64_t peri_panel_bytes(int64_t cols, int64_t inner, int32_t dtype)
{
    const int64_t n = peri_panel_size(cols, inner);
    return dtype == PERI_I8 ? n + (cols + PERI_PANEL - 1) / PERI_PANEL * PERI_PANEL * 4
                            : n * (dtype == PERI_BF16 ? 2 : 4);
}

/** Put w[c][k] = from[c * c_stride + k * k_stride] into panels; zeros behind the last column. */
static inline void peri_panel_pack(float *panels, const float *from, int64_t cols, int64_t inner, int64_t c_stride,
                                   int64_t k_stride)
{
    for (int64_t c = 0; c < cols; c += PERI_PANEL)
        for (int64_t k = 0; k < inner; k++)
            for (int64_t i = 0; i < PERI_PANEL; i++)
                *panels++ = c + i < cols ? from[(c + i) * c_stride + k * k_stride] : 0;
}

/** Rows of one partial sum of act_grad, cross_grad and layer_norm_grad. */
enum { PERI_SUM_ROWS = 64 };

/** dz[r][c] = dy[r * dy_stride + c] * f'(y[r][c]) (dz may be NULL: not stored; y is not read by IDENTITY), and, if
 *  partial is not NULL, partial[k][c] = sum of dz[r][c] over rows [64 k, 64 (k + 1)). dz may be dy if dy_stride = cols.
 *  16 bits too, with f32 partial sums. range: blocks of PERI_SUM_ROWS rows. */
typedef struct peri_k_act_grad_args {
    void *dz, *partial;
    const void *dy, *y;
    int32_t dtype, act;
    int64_t rows, cols, dy_stride;
} peri_k_act_grad_args;

/* -- a layer of a cross network ------------------------------------------------------------------------------------ */

/** y[r][c] = x0[r][c] * (u[r][c] + bias[c]) + x[r][c]. bias may be NULL. 16 bits too, with a bias of f32. y may be any
 *  of x0, u and x. range: rows. */
typedef struct peri_k_cross_args {
    void *y;
    const void *x0, *u, *bias, *x;
    int32_t dtype;
    int64_t cols;
} peri_k_cross_args;

/** The gradients of cross, but for that of x, which is dy:
 *    du[r][c] = dy[r][c] * x0[r][c], and, if partial is not NULL, partial[k][c] = sum of du[r][c] over rows [64 k, 64
 *    (k + 1)); dx0[r][c] = dy[r][c] * (u[r][c] + bias[c]); `same` says that x is x0, which adds dy[r][c]; `add` adds it
 *    to what dx0 holds.
 *  bias may be NULL. 16 bits too, with a bias and partial sums of f32; partial sums are of du as it is stored. du may
 *  be u, dx0 may be dy where `add` is not set. range: blocks of PERI_SUM_ROWS rows. */
typedef struct peri_k_cross_grad_args {
    void *du, *dx0, *partial;
    const void *dy, *x0, *u, *bias;
    int32_t dtype;
    bool add, same;
    int64_t rows, cols;
} peri_k_cross_grad_args;

/* -- reductions ---------------------------------------------------------------------------------------------------- */

/** Columns that one element of sum_dim's range covers. */
enum { PERI_SUM_COLUMNS = 1024 };

/** x is [outer][n][inner], dst [outer][blocks][inner], blocks = ceil(n / block) or 1 if n = 0:
 *    dst[o][k][i] = scale * sum of x[o][r][i] over r in [k block, (k + 1) block). If n = 0 the sum
 *    is 0, and the mean of nothing, whose scale is infinite, NaN.
 *  range: outer * blocks * ceil(inner / PERI_SUM_COLUMNS), the columns innermost. */
typedef struct peri_k_sum_dim_args {
    void *dst;
    const void *x;
    int32_t dtype;
    int64_t outer, n, inner, block;
    double scale;
} peri_k_sum_dim_args;

/** x is [outer][n][inner], n >= 1: values[o][i] = the largest x[o][r][i] (`least`: the smallest), NaN if there is one;
 *  indices[o][i] = the first r that has it. f32, f64 and i64. range: outer * inner. */
typedef struct peri_k_max_dim_args {
    void *values;
    int64_t *indices;
    const void *x;
    int32_t dtype;
    bool least;
    int64_t n, inner;
} peri_k_max_dim_args;

/** dx[o][r][i] = r == indices[o][i] ? dy[o][i] : 0. range: outer * inner. */
typedef struct peri_k_max_dim_grad_args {
    void *dx;
    const void *dy;
    const int64_t *indices;
    int32_t dtype;
    int64_t n, inner;
} peri_k_max_dim_grad_args;

/** x is [outer][n][inner]: y[o][i] = the product of x[o][r][i] over r, 1 if n = 0. f32 and f64 are multiplied in f64
 *  and rounded once; i64 wraps. range: outer * inner. */
typedef struct peri_k_product_dim_args {
    void *y;
    const void *x;
    int32_t dtype;
    int64_t n, inner;
} peri_k_product_dim_args;

/** dx[o][r][i] = dy[o][i] times the product of x[o][q][i] over all q but r, without a division: x may be 0. f32 and
 *  f64, in f64. range: outer * inner. */
typedef struct peri_k_product_dim_grad_args {
    void *dx;
    const void *dy, *x;
    int32_t dtype;
    int64_t n, inner;
} peri_k_product_dim_grad_args;

/** x and y are [outer][n][inner]; along n: y = exp(x - max) / sum exp(x - max), or its logarithm. zeros: of
 *  lines whose elements are all -infinity y is 0, else NaN (not with log). range: outer * inner. */
typedef struct peri_k_softmax_args {
    void *y;
    const void *x;
    int32_t dtype;
    bool log, zeros;
    int64_t n, inner;
} peri_k_softmax_args;

/** dx = y (dy - sum dy y), or, for the logarithm, dy - exp(y) sum dy. range: outer * inner. */
typedef struct peri_k_softmax_grad_args {
    void *dx;
    const void *dy, *y;
    int32_t dtype;
    bool log;
    int64_t n, inner;
} peri_k_softmax_grad_args;

/** For each row: mean, rstd = 1 / sqrt(variance + eps) (biased variance), y = (x - mean) rstd * weight + bias. weight
 *  and bias may be NULL (1 and 0). range: rows. */
typedef struct peri_k_layer_norm_args {
    void *y, *mean, *rstd; /* [rows][cols], [rows], [rows] */
    const void *x, *weight, *bias;
    int32_t dtype;
    int64_t cols;
    double eps;
} peri_k_layer_norm_args;

/** With h = (x - mean) rstd and g = dy * weight: dx = rstd (g - mean(g) - h mean(g h)); per block k of PERI_SUM_ROWS
 *  rows dweight[k][c] = sum dy h and dbias[k][c] = sum dy. dx, dweight and dbias may be NULL. range: blocks of
 *  PERI_SUM_ROWS rows. */
typedef struct peri_k_layer_norm_grad_args {
    void *dx, *dweight, *dbias;
    const void *dy, *x, *mean, *rstd, *weight;
    int32_t dtype;
    int64_t rows, cols;
} peri_k_layer_norm_grad_args;

/* -- dropout ------------------------------------------------------------------------------------------------------- */

/** y[i] = word(offset + i) >= threshold ? x[i] * scale : 0, where word is that of kernels/convert.h (seed,
 *  random_stream): the mask depends on the element's number in the whole batch, not on how the batch is cut. range:
 *  elements. y may be x. */
typedef struct peri_k_dropout_args {
    void *y;
    const void *x;
    int32_t dtype;
    uint32_t threshold; /* round(p * 2^32) */
    uint64_t seed, random_stream, offset;
    double scale;          /* 1 / (1 - p) */
    const uint64_t *drawn; /* NULL, or where seed, random_stream and offset are instead: a launch that is captured finds
                              others there each time */
} peri_k_dropout_args;

/* -- pairwise dot products ----------------------------------------------------------------------------------------- */

/** Of each sample, v[0] = its row of dense and v[1..features] = its rows of sparse, all of `dim` numbers:
 *    y[b] = (dense[b], v[i] . v[j] for 0 <= i < j <= features, i outermost), dim + features (features + 1) / 2 numbers.
 *  Strides in elements; the last dimension is contiguous. range: samples. */
typedef struct peri_k_interaction_args {
    void *y;
    const void *dense, *sparse;
    int32_t dtype;
    int64_t features, dim, dense_stride, sparse_stride, feature_stride;
} peri_k_interaction_args;

/** ddense[b] = dy[b][0..dim) + sum over j > 0 of g[0][j] v[j]; dsparse[b][i - 1] = sum over j != i of g[i][j] v[j],
 *  where g is dy's triangle made symmetric. ddense and dsparse are contiguous; either may be NULL. range: samples. */
typedef struct peri_k_interaction_grad_args {
    void *ddense, *dsparse;
    const void *dy, *dense, *sparse;
    int32_t dtype;
    int64_t features, dim, dy_stride, dense_stride, sparse_stride, feature_stride;
} peri_k_interaction_grad_args;

/* -- losses -------------------------------------------------------------------------------------------------------- */

/** One element's loss of prediction x and target t, with weight w (1 if NULL) and, for BCE_LOGITS, p = pos_weight (1 if
 *  NULL). */
enum {
    PERI_LOSS_KIND_BCE_LOGITS = 0, /* w ((1 - t) x + (1 + (p - 1) t) log(1 + exp(-x))) */
    PERI_LOSS_KIND_BCE = 1, /* -w (t max(log x, -100) + (1 - t) max(log(1 - x), -100)); NaN for x or t outside [0, 1] */
    PERI_LOSS_KIND_MSE = 2,        /* w (x - t)^2 */
    PERI_LOSS_KIND_COUNT = 3
};

/** dst[i] = loss(x[i], t[i]). range: elements. */
typedef struct peri_k_loss_args {
    void *dst;
    const void *x, *t, *weight, *pos_weight;
    int32_t dtype, kind;
} peri_k_loss_args;

/** dx[i] = scale * g[i * g_stride] * d loss / dx. The derivative of BCE is w (x - t) / max(x (1 - x), 1e-12). range:
 *  elements. */
typedef struct peri_k_loss_grad_args {
    void *dx;
    const void *g, *x, *t, *weight, *pos_weight;
    int32_t dtype, kind;
    int64_t g_stride; /* 0 or 1 */
    double scale;
} peri_k_loss_grad_args;

/** One number, the mean of a loss over ranks: total = sum[0], n = count ? count[0] : number. Whatever of the outputs is
 *    not NULL: parts[0] = total, parts[1] = n: what ranks add up;  value[0] = total / max(n, 1e-30);  scale[0] = ranks
 *    / max(n, 1e-30).
 *  Quotients are made in f64. range: 1. */
typedef struct peri_k_mean_args {
    double *parts;
    void *value, *scale;
    const void *sum;
    const double *count;
    int32_t dtype, sum_dtype; /* of value and scale; of sum */
    double number, ranks;
} peri_k_mean_args;

/** What a class counts in a cross entropy, and how much of a row's target is shared by all classes. */
typedef struct peri_k_class_shares {
    const void *weight; /* [classes], or NULL: 1 each */
    double smoothing;   /* 0..1 */
    bool ignores;       /* rows whose label is `ignored`, which may be no class, count nothing */
    int64_t ignored;
} peri_k_class_shares;

/** lse[r] = log(sum over c of exp(x[r][c])); with the label l = labels[r], and w[c] = the weight of class c:
 *
 *    loss[r] = (1 - smoothing) * w[l] * (lse[r] - x[r][l])
 *              + smoothing / classes * sum over c of w[c] * (lse[r] - x[r][c])
 *
 *  counts[r] = w[l] (counts may be NULL). Of rows that are ignored both are 0. Labels have been checked. range:
 *  rows. */
typedef struct peri_k_cross_entropy_args {
    void *loss, *lse, *counts;
    const void *x;
    const int64_t *labels;
    int32_t dtype;
    int64_t classes;
    peri_k_class_shares of;
} peri_k_cross_entropy_args;

/** dx[r][c] = scale * g[r * g_stride] * (the derivative of loss[r] by x[r][c]). range: rows. */
typedef struct peri_k_cross_entropy_grad_args {
    void *dx;
    const void *g, *x, *lse;
    const int64_t *labels;
    int32_t dtype;
    int64_t classes, g_stride;
    double scale;
    peri_k_class_shares of;
} peri_k_cross_entropy_grad_args;

PERI_KERNELS_DENSE(PERI_K_ARGS_OF) PERI_OPS_DENSE(PERI_OP_ARGS_OF)

#endif
