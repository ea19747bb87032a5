/* SPDX-License-Identifier: Apache-2.0
 *
 * dense_cases.h: one list of cases of the kernels of kernels/dense.h and kernels/optim.h, for correctness and for
 * speed: arguments, the range, and which arrays come out.
 */
#ifndef PERI_TESTS_DENSE_CASES_H
#define PERI_TESTS_DENSE_CASES_H

#include "kernels/kernels.h"
#include "kernels/ref/number.h"

#include <math.h>
#include <stdlib.h>

enum { DENSE_OUTS = 12, DENSE_ARGS = 4096, DENSE_INPUTS = 24 };

/** An array that a kernel writes: where its pointer lies in the arguments, how many elements, of which type. */
typedef struct dense_out {
    size_t slot;
    int64_t n;
    int32_t dtype;
    const void *initial; /* contents before the run, n elements; NULL: garbage */
} dense_out;

typedef struct dense_case {
    char name[96];
    int32_t kernel;
    _Alignas(16) char args[DENSE_ARGS];
    int64_t range;
    dense_out out[DENSE_OUTS];
    int32_t outs;
    double tolerance; /* of f32 results: tolerance * (1 + |want|); of f16 and bf16 those of their rounding besides */
    void *input[DENSE_INPUTS]; /* owned */
    int32_t inputs;
    uint64_t seed;
} dense_case;

/** Receives each case; it is released afterwards. */
typedef void (*dense_visit)(dense_case *c, void *ctx);

static inline int64_t dense_size(int32_t dtype) { return dtype == PERI_F64 ? 8 : dtype == PERI_F32 ? 4 : 2; }
/** The dtype of biases and sums beside numbers of @dtype. */
static inline int32_t dense_wide(int32_t dtype) { return dtype == PERI_F64 ? PERI_F64 : PERI_F32; }
/** How much further apart two roundings to @dtype may be than two results in f32: a unit in the last place. */
static inline double dense_unit(int32_t dtype) { return dtype == PERI_F16 ? 0x1p-10 : dtype == PERI_BF16 ? 0x1p-7 : 0; }

/** Whether arrays begin at multiples of 16 bytes, or one element behind. */
static bool dense_aligned;

/** Where an array begins in its memory. */
static inline char *dense_place(char *p, int32_t dtype)
{
    return dense_aligned ? p + (-(uintptr_t)p & 15) : p + dense_size(dtype);
}

/** @n numbers in [low, high). */
static inline void *dense_numbers(dense_case *c, int64_t n, int32_t dtype, double low, double high)
{
    char *p = malloc((size_t)((n + 1) * dense_size(dtype)) + (dense_aligned ? 16 : 0));
    c->input[c->inputs++] = p;
    p = dense_place(p, dtype);
    for (int64_t i = 0; i < n; i++) {
        c->seed = c->seed * 6364136223846793005u + 1442695040888963407u;
        double x = low + (high - low) * (double)(c->seed >> 40) * 0x1p-24;
        if (dtype == PERI_F32) ((float *)p)[i] = (float)x;
        else if (dtype == PERI_F64) ((double *)p)[i] = x;
        else ((uint16_t *)p)[i] = dtype == PERI_F16 ? k_f32_to_f16((float)x) : k_f32_to_bf16((float)x);
    }
    return p;
}

static inline void dense_add_out(dense_case *c, size_t slot, int64_t n, int32_t dtype, const void *initial)
{
    c->out[c->outs++] = (dense_out){slot, n, dtype, initial};
}

static inline dense_case dense_begin(const char *name, int32_t kernel, int32_t dtype, int64_t a, int64_t b)
{
    dense_case c = {.kernel = kernel, .tolerance = 2e-6, .seed = 12345 + (uint64_t)kernel};
    snprintf(c.name, sizeof c.name, "%s %s %lld x %lld", name,
             dtype == PERI_F32   ? "f32"
             : dtype == PERI_F64 ? "f64"
             : dtype == PERI_F16 ? "f16"
                                 : "bf16",
             (long long)a, (long long)b);
    return c;
}

static inline void dense_end(dense_case *c, const void *args, size_t size, int64_t range, dense_visit visit, void *ctx)
{
    memcpy(c->args, args, size);
    c->range = range;
    visit(c, ctx);
    for (int32_t i = 0; i < c->inputs; i++) free(c->input[i]);
}

#define DENSE_OUT(c, type, field, n, dtype, initial) dense_add_out((c), offsetof(type, field), (n), (dtype), (initial))

/* -- elementwise kernels over n elements --------------------------------------------------------------------------- */

static inline void dense_elementwise(int64_t n, int32_t dtype, dense_visit visit, void *ctx)
{
    static const char *const unary[] = {"identity", "relu",     "sigmoid",    "tanh",       "exp", "sqrt", "silu",
                                        "gelu",     "softplus", "logsigmoid", "leaky_relu", "log", "abs",  "square",
                                        "pow",      "affine",   "reciprocal", "clamp",      "root", "log1p", "expm1",
                                        "rsqrt",    "sin",      "cos",        "erf",        "floor", "ceil", "round",
                                        "trunc",    "sign"};
    for (int32_t op = 0; op < PERI_UNARY_COUNT; op++) {
        bool positive = op == PERI_UNARY_SQRT || op == PERI_UNARY_LOG || op == PERI_UNARY_POW ||
                        op == PERI_UNARY_RECIPROCAL || op == PERI_UNARY_ROOT || op == PERI_UNARY_LOG1P ||
                        op == PERI_UNARY_RSQRT;
        double low = positive ? 0.01 : -9, a = op == PERI_UNARY_POW ? 2.5 : 0.3;
        dense_case c = dense_begin(unary[op], PERI_K_unary, dtype, n, 1);
        peri_k_unary_args u = {.x = dense_numbers(&c, n, dtype, low, 9), .dtype = dtype, .op = op, .a = a, .b = 0.7};
        DENSE_OUT(&c, peri_k_unary_args, dst, n, dtype, NULL);
        dense_end(&c, &u, sizeof u, n, visit, ctx);
        c = dense_begin(unary[op], PERI_K_unary_grad, dtype, n, 1);
        peri_k_unary_grad_args g = {.dy = dense_numbers(&c, n, dtype, -1, 1),
                                    .saved = dense_numbers(&c, n, dtype, positive ? 0.1 : -1, 1),
                                    .dtype = dtype,
                                    .op = op,
                                    .a = a,
                                    .b = 0.7};
        DENSE_OUT(&c, peri_k_unary_grad_args, dx, n, dtype, NULL);
        dense_end(&c, &g, sizeof g, n, visit, ctx);
    }
    dense_case c = dense_begin("axpy", PERI_K_axpy, dtype, n, 1);
    peri_k_axpy_args axpy = {.x = dense_numbers(&c, n, dtype, -1, 1), .dtype = dtype, .alpha = 0.7};
    DENSE_OUT(&c, peri_k_axpy_args, y, n, dtype, dense_numbers(&c, n, dtype, -1, 1));
    dense_end(&c, &axpy, sizeof axpy, n, visit, ctx);
    c = dense_begin("muladd", PERI_K_muladd, dtype, n, 1);
    peri_k_muladd_args m = {.a = dense_numbers(&c, n, dtype, -1, 1), .b = dense_numbers(&c, n, dtype, -1, 1),
                            .c = dense_numbers(&c, n, dtype, -1, 1), .dtype = dtype, .scale = 0.5};
    DENSE_OUT(&c, peri_k_muladd_args, dst, n, dtype, NULL);
    dense_end(&c, &m, sizeof m, n, visit, ctx);
    if (dense_unit(dtype) > 0) return;
    c = dense_begin("dropout", PERI_K_dropout, dtype, n, 1);
    peri_k_dropout_args d = {.x = dense_numbers(&c, n, dtype, -1, 1), .dtype = dtype, .threshold = 1u << 30, .seed = 7,
                             .random_stream = 1ull << 40, .offset = 5, .scale = 4.0 / 3};
    DENSE_OUT(&c, peri_k_dropout_args, y, n, dtype, NULL);
    dense_end(&c, &d, sizeof d, n, visit, ctx);
    c = dense_begin("dropout, drawn", PERI_K_dropout, dtype, n, 1);
    uint64_t *drawn = dense_numbers(&c, 3, PERI_F64, 0, 1);
    memcpy(drawn, &d.seed, 3 * sizeof *drawn);
    d.x = dense_numbers(&c, n, dtype, -1, 1), d.seed = d.random_stream = d.offset = 0, d.drawn = drawn;
    DENSE_OUT(&c, peri_k_dropout_args, y, n, dtype, NULL);
    dense_end(&c, &d, sizeof d, n, visit, ctx);
    for (int32_t kind = 0; kind < 2 * PERI_LOSS_KIND_COUNT; kind++) {
        bool weights = kind >= PERI_LOSS_KIND_COUNT, bce = kind % PERI_LOSS_KIND_COUNT == PERI_LOSS_KIND_BCE;
        c = dense_begin(weights ? "weighted loss" : "loss", PERI_K_loss, dtype, n, kind);
        peri_k_loss_args l = {.x = dense_numbers(&c, n, dtype, bce ? 0 : -20, bce ? 1 : 20),
                              .t = dense_numbers(&c, n, dtype, 0, 1),
                              .weight = weights ? dense_numbers(&c, n, dtype, 0, 2) : NULL,
                              .pos_weight = weights ? dense_numbers(&c, n, dtype, 0, 2) : NULL,
                              .dtype = dtype,
                              .kind = kind % PERI_LOSS_KIND_COUNT};
        DENSE_OUT(&c, peri_k_loss_args, dst, n, dtype, NULL);
        dense_end(&c, &l, sizeof l, n, visit, ctx);
    }
}

/** Strided operands of binary over rows x cols. */
static inline void dense_binary(int64_t rows, int64_t cols, int32_t dtype, dense_visit visit, void *ctx)
{
    static const int64_t strides[][2] = {{1, 1}, {1, 0}, {0, 1}, {2, 1}, {0, 0}}; /* of the columns, in a and b */
    for (int32_t i = 0; i < 5; i++)
        for (int32_t op = 0; op < PERI_BINARY_COUNT; op++) {
            dense_case c = dense_begin("binary", PERI_K_binary, dtype, rows, cols);
            int64_t sa = strides[i][0], sb = strides[i][1];
            peri_k_binary_args b = {.a = dense_numbers(&c, rows * cols * 2, dtype, -1, 1),
                                    .b = dense_numbers(&c, rows * cols * 2, dtype, 0.5, 1),
                                    .dtype = dtype,
                                    .op = op,
                                    .ndim = 2,
                                    .shape = {rows, cols},
                                    .a_stride = {sa * cols, sa},
                                    .b_stride = {i == 3 ? 0 : cols, sb}};
            DENSE_OUT(&c, peri_k_binary_args, dst, rows * cols, dtype, NULL);
            dense_end(&c, &b, sizeof b, rows * cols, visit, ctx);
        }
}

/** A formula with a step of each kind, of which one result is a register in the middle, on inputs like those of
 *  binary. */
static inline void dense_formula(int64_t rows, int64_t cols, int32_t dtype, dense_visit visit, void *ctx)
{
    static const int64_t strides[][2] = {{1, 1}, {1, 0}, {0, 1}, {2, 1}, {0, 0}}; /* of the columns, in a and b */
    for (int32_t i = 0; i < 5; i++) {
        dense_case c = dense_begin("formula", PERI_K_formula, dtype, rows, cols);
        int64_t sa = strides[i][0], sb = strides[i][1];
        peri_k_formula_args f = {.in = {dense_numbers(&c, rows * cols * 2, dtype, -1, 1),
                                        dense_numbers(&c, rows * cols * 2, dtype, 0.5, 1)},
                                 .dtype = dtype,
                                 .ndim = 2,
                                 .n_in = 2,
                                 .n_steps = 10,
                                 .n_results = 2,
                                 .result = {11, 4},
                                 .shape = {rows, cols},
                                 .stride = {{sa * cols, sa}, {i == 3 ? 0 : cols, sb}},
                                 .step = {{PERI_FORMULA_BINARY, PERI_BINARY_SUB, 0, 1, 0, 0, 0},
                                          {PERI_FORMULA_UNARY, PERI_UNARY_TANH, 2, 0, 0, 0, 0},
                                          {PERI_FORMULA_CHAIN, PERI_UNARY_TANH, 1, 3, 0, 0, 0},
                                          {PERI_FORMULA_NUMBER, 0, 0, 0, 0, 0.25, 0},
                                          {PERI_FORMULA_COMPARE, PERI_COMPARE_LT, 0, 5, 0, 0, 0},
                                          {PERI_FORMULA_WHERE, 0, 6, 4, 1, 0, 0},
                                          {PERI_FORMULA_UNARY, PERI_UNARY_AFFINE, 7, 0, 0, -2, 0.5},
                                          {PERI_FORMULA_CHAIN, PERI_UNARY_CLAMP, 8, 0, 0, -0.5, 0.5},
                                          {PERI_FORMULA_BINARY, PERI_BINARY_MAX, 9, 0, 0, 0, 0},
                                          {PERI_FORMULA_BINARY, PERI_BINARY_DIV, 10, 1, 0, 0, 0}}};
        DENSE_OUT(&c, peri_k_formula_args, dst[0], rows * cols, dtype, NULL);
        DENSE_OUT(&c, peri_k_formula_args, dst[1], rows * cols, dtype, NULL);
        dense_end(&c, &f, sizeof f, rows * cols, visit, ctx);
    }
}

/* -- kernels over rows --------------------------------------------------------------------------------------------- */

static inline void dense_rows(int64_t rows, int64_t cols, int32_t dtype, dense_visit visit, void *ctx)
{
    int64_t n = rows * cols, blocks = (rows + PERI_SUM_ROWS - 1) / PERI_SUM_ROWS;
    dense_case c;
    for (int32_t act = 0; act <= PERI_UNARY_FROM_OUTPUT; act++)
        for (int32_t bias = 0; bias < 2; bias++) {
            double low = act == PERI_UNARY_SQRT ? 1 : -1;
            c = dense_begin(bias ? "bias_act" : "act", PERI_K_bias_act, dtype, rows, cols);
            peri_k_bias_act_args b = {
                .bias = bias ? dense_numbers(&c, cols, dtype, low, 2) : NULL, .dtype = dtype, .act = act, .cols = cols};
            DENSE_OUT(&c, peri_k_bias_act_args, y, n, dtype, dense_numbers(&c, n, dtype, low, 2));
            dense_end(&c, &b, sizeof b, rows, visit, ctx);
            c = dense_begin("act_grad", PERI_K_act_grad, dtype, rows, cols);
            peri_k_act_grad_args g = {.dy = dense_numbers(&c, rows * (cols + 3), dtype, -1, 1),
                                      .y = dense_numbers(&c, n, dtype, low, 2),
                                      .dtype = dtype,
                                      .act = act,
                                      .rows = rows,
                                      .cols = cols,
                                      .dy_stride = cols + 3};
            DENSE_OUT(&c, peri_k_act_grad_args, dz, n, dtype, NULL);
            if (bias) DENSE_OUT(&c, peri_k_act_grad_args, partial, blocks * cols, dense_wide(dtype), NULL);
            /* sums of z, before or after it is rounded */
            if (dense_unit(dtype) > 0) c.tolerance = 64 * dense_unit(dtype);
            dense_end(&c, &g, sizeof g, blocks, visit, ctx);
        }
    for (int32_t flags = 0; flags < 8; flags++) {
        bool bias = flags & 1, add = flags & 2, same = flags & 4;
        if (!bias && (add || same)) continue;
        if (!add && !same) {
            c = dense_begin(bias ? "cross" : "cross without bias", PERI_K_cross, dtype, rows, cols);
            peri_k_cross_args f = {.x0 = dense_numbers(&c, n, dtype, -1, 1), .u = dense_numbers(&c, n, dtype, -1, 1),
                                   .bias = bias ? dense_numbers(&c, cols, dense_wide(dtype), -1, 1) : NULL,
                                   .x = dense_numbers(&c, n, dtype, -1, 1), .dtype = dtype, .cols = cols};
            DENSE_OUT(&c, peri_k_cross_args, y, n, dtype, NULL);
            dense_end(&c, &f, sizeof f, rows, visit, ctx);
        }
        c = dense_begin(add ? "cross_grad, added" : "cross_grad", PERI_K_cross_grad, dtype, rows, cols);
        peri_k_cross_grad_args g = {.dy = dense_numbers(&c, n, dtype, -1, 1),
                                    .x0 = dense_numbers(&c, n, dtype, -1, 1),
                                    .u = dense_numbers(&c, n, dtype, -1, 1),
                                    .bias = bias ? dense_numbers(&c, cols, dense_wide(dtype), -1, 1) : NULL,
                                    .dtype = dtype,
                                    .add = add,
                                    .same = same,
                                    .rows = rows,
                                    .cols = cols};
        DENSE_OUT(&c, peri_k_cross_grad_args, du, n, dtype, NULL);
        DENSE_OUT(&c, peri_k_cross_grad_args, dx0, n, dtype, add ? dense_numbers(&c, n, dtype, -1, 1) : NULL);
        if (bias) DENSE_OUT(&c, peri_k_cross_grad_args, partial, blocks * cols, dense_wide(dtype), NULL);
        dense_end(&c, &g, sizeof g, blocks, visit, ctx);
    }
    if (dense_unit(dtype) > 0) return;
    for (int32_t affine = 0; affine < 2; affine++) {
        if (cols == 0) break;
        c = dense_begin("layer_norm", PERI_K_layer_norm, dtype, rows, cols);
        peri_k_layer_norm_args l = {.x = dense_numbers(&c, n, dtype, -1, 3),
                                    .weight = affine ? dense_numbers(&c, cols, dtype, 0, 2) : NULL,
                                    .bias = affine ? dense_numbers(&c, cols, dtype, -1, 1) : NULL,
                                    .dtype = dtype,
                                    .cols = cols,
                                    .eps = 1e-5};
        DENSE_OUT(&c, peri_k_layer_norm_args, y, n, dtype, NULL);
        DENSE_OUT(&c, peri_k_layer_norm_args, mean, rows, dtype, NULL);
        DENSE_OUT(&c, peri_k_layer_norm_args, rstd, rows, dtype, NULL);
        c.tolerance = cols == 1 ? 1e-4 : 1e-5; /* one column: the variance is all rounding */
        dense_end(&c, &l, sizeof l, rows, visit, ctx);
        c = dense_begin("layer_norm_grad", PERI_K_layer_norm_grad, dtype, rows, cols);
        peri_k_layer_norm_grad_args g = {.dy = dense_numbers(&c, n, dtype, -1, 1),
                                         .x = dense_numbers(&c, n, dtype, -1, 1),
                                         .mean = dense_numbers(&c, rows, dtype, -0.1, 0.1),
                                         .rstd = dense_numbers(&c, rows, dtype, 1, 2),
                                         .weight = affine ? dense_numbers(&c, cols, dtype, 0, 2) : NULL,
                                         .dtype = dtype,
                                         .rows = rows,
                                         .cols = cols};
        DENSE_OUT(&c, peri_k_layer_norm_grad_args, dx, n, dtype, NULL);
        DENSE_OUT(&c, peri_k_layer_norm_grad_args, dweight, blocks * cols, dtype, NULL);
        DENSE_OUT(&c, peri_k_layer_norm_grad_args, dbias, blocks * cols, dtype, NULL);
        c.tolerance = 2e-5;
        dense_end(&c, &g, sizeof g, blocks, visit, ctx);
    }
    for (int32_t log = 0; log < 2; log++) {
        c = dense_begin(log ? "log_softmax" : "softmax", PERI_K_softmax, dtype, rows, cols);
        peri_k_softmax_args s = {
            .x = dense_numbers(&c, n, dtype, -9, 9), .dtype = dtype, .log = log, .n = cols, .inner = 1};
        DENSE_OUT(&c, peri_k_softmax_args, y, n, dtype, NULL);
        dense_end(&c, &s, sizeof s, rows, visit, ctx);
        c = dense_begin(log ? "log_softmax_grad" : "softmax_grad", PERI_K_softmax_grad, dtype, rows, cols);
        peri_k_softmax_grad_args g = {.dy = dense_numbers(&c, n, dtype, -1, 1),
                                      .y = dense_numbers(&c, n, dtype, log ? -5 : 0, log ? -1 : 0.1),
                                      .dtype = dtype,
                                      .log = log,
                                      .n = cols,
                                      .inner = 1};
        DENSE_OUT(&c, peri_k_softmax_grad_args, dx, n, dtype, NULL);
        c.tolerance = 1e-5;
        dense_end(&c, &g, sizeof g, rows, visit, ctx);
    }
    if (cols == 0) return;
    int64_t *labels = malloc((size_t)(rows + 1) * sizeof *labels);
    for (int64_t r = 0; r < rows; r++) labels[r] = r * 7 % cols;
    for (int32_t options = 0; options < 8; options++) {
        const bool weighs = options & 1;
        const peri_k_class_shares of = {.smoothing = options & 2 ? 0.25 : 0, .ignores = options & 4, .ignored = -100};
        if (of.ignores && rows > 1) labels[1] = of.ignored;
        c = dense_begin(options ? "cross_entropy, options" : "cross_entropy", PERI_K_cross_entropy, dtype, rows, cols);
        peri_k_cross_entropy_args e = {
            .x = dense_numbers(&c, n, dtype, -9, 9), .labels = labels, .dtype = dtype, .classes = cols, .of = of};
        if (weighs) e.of.weight = dense_numbers(&c, cols, dtype, 0, 2);
        DENSE_OUT(&c, peri_k_cross_entropy_args, loss, rows, dtype, NULL);
        DENSE_OUT(&c, peri_k_cross_entropy_args, lse, rows, dtype, NULL);
        if (weighs || of.ignores) DENSE_OUT(&c, peri_k_cross_entropy_args, counts, rows, dtype, NULL);
        c.tolerance = 1e-5;
        dense_end(&c, &e, sizeof e, rows, visit, ctx);
        c = dense_begin(options ? "cross_entropy_grad, options" : "cross_entropy_grad", PERI_K_cross_entropy_grad,
                        dtype, rows, cols);
        peri_k_cross_entropy_grad_args g = {.g = dense_numbers(&c, rows, dtype, -1, 1),
                                            .x = dense_numbers(&c, n, dtype, -1, 1),
                                            .lse = dense_numbers(&c, rows, dtype, 2, 4),
                                            .labels = labels,
                                            .dtype = dtype,
                                            .classes = cols,
                                            .g_stride = 1,
                                            .scale = 0.5,
                                            .of = of};
        if (weighs) g.of.weight = dense_numbers(&c, cols, dtype, 0, 2);
        DENSE_OUT(&c, peri_k_cross_entropy_grad_args, dx, n, dtype, NULL);
        dense_end(&c, &g, sizeof g, rows, visit, ctx);
    }
    free(labels);
}

/** Sums of [outer][n][inner] in blocks. */
static inline void dense_sums(int64_t outer, int64_t n, int64_t inner, int64_t block, int32_t dtype, dense_visit visit,
                              void *ctx)
{
    dense_case c = dense_begin("sum_dim", PERI_K_sum_dim, dtype, n, inner);
    int64_t blocks = n ? (n + block - 1) / block : 1, parts = (inner + PERI_SUM_COLUMNS - 1) / PERI_SUM_COLUMNS;
    peri_k_sum_dim_args s = {.x = dense_numbers(&c, outer * n * inner, dtype, -1, 1),
                             .dtype = dtype,
                             .outer = outer,
                             .n = n,
                             .inner = inner,
                             .block = block,
                             .scale = n ? 0.5 : INFINITY}; /* the mean of nothing: NaN */
    DENSE_OUT(&c, peri_k_sum_dim_args, dst, outer * blocks * inner, dtype, NULL);
    c.tolerance = 1e-5;
    dense_end(&c, &s, sizeof s, outer * blocks * parts, visit, ctx);
}

static inline void dense_interaction(int64_t batch, int64_t features, int64_t dim, int32_t dtype, dense_visit visit,
                                     void *ctx)
{
    int64_t width = dim + features * (features + 1) / 2, pad = 3;
    dense_case c = dense_begin("interaction", PERI_K_interaction, dtype, features, dim);
    const void *dense = dense_numbers(&c, batch * (dim + pad), dtype, -1, 1);
    const void *sparse = dense_numbers(&c, batch * features * (dim + pad), dtype, -1, 1);
    peri_k_interaction_args f = {.dense = dense, .sparse = sparse, .dtype = dtype, .features = features, .dim = dim,
                                 .dense_stride = dim + pad,
                                 .sparse_stride = features * (dim + pad), .feature_stride = dim + pad};
    DENSE_OUT(&c, peri_k_interaction_args, y, batch * width, dtype, NULL);
    c.tolerance = 1e-5;
    dense_end(&c, &f, sizeof f, batch, visit, ctx);
    c = dense_begin("interaction_grad", PERI_K_interaction_grad, dtype, features, dim);
    dense = dense_numbers(&c, batch * (dim + pad), dtype, -1, 1);
    sparse = dense_numbers(&c, batch * features * (dim + pad), dtype, -1, 1);
    peri_k_interaction_grad_args g = {.dy = dense_numbers(&c, batch * (width + pad), dtype, -1, 1),
                                      .dense = dense,
                                      .sparse = sparse,
                                      .dtype = dtype,
                                      .features = features,
                                      .dim = dim,
                                      .dy_stride = width + pad,
                                      .dense_stride = dim + pad,
                                      .sparse_stride = features * (dim + pad),
                                      .feature_stride = dim + pad};
    DENSE_OUT(&c, peri_k_interaction_grad_args, ddense, batch * dim, dtype, NULL);
    DENSE_OUT(&c, peri_k_interaction_grad_args, dsparse, batch * features * dim, dtype, NULL);
    c.tolerance = 1e-5;
    dense_end(&c, &g, sizeof g, batch, visit, ctx);
}

/* -- optimizers ---------------------------------------------------------------------------------------------------- */

/** A launch has three parameters: one of n elements, one of 5, and one of n + 2. Each optimizer gets fresh ones; the
 *  options are bits of
 *  @options. */
enum { DENSE_PARTS = 3 };

static inline int64_t dense_part(int32_t q, int64_t n) { return q == 0 ? n : q == 1 ? 5 : n + 2; }

/** Fill the list of @args, at @list in it: gradients, and as outputs the parameters and `states` (a bit each) states,
 *  in [low, 1). Returns the range. */
static inline int64_t dense_list(dense_case *c, char *args, size_t list, int64_t n, int32_t dtype, bool gradients,
                                 int32_t states, double low)
{
    peri_optim_list *l = (peri_optim_list *)(void *)(args + list);
    int64_t end = 0;
    l->n = DENSE_PARTS;
    for (int32_t q = 0; q < DENSE_PARTS; q++) {
        const size_t at = list + offsetof(peri_optim_list, part) + (size_t)q * sizeof(peri_optim_part);
        const int64_t size = dense_part(q, n);
        l->part[q] = (peri_optim_part){
            .g = gradients ? dense_numbers(c, size, dtype, -1, 1) : NULL, .end = end += size, .n = size};
        dense_add_out(c, at + offsetof(peri_optim_part, w), size, dtype, dense_numbers(c, size, dtype, -1, 1));
        for (int32_t s = 0; s < 3; s++)
            if (states >> s & 1)
                dense_add_out(c, at + offsetof(peri_optim_part, state) + (size_t)s * sizeof(void *), size, dtype,
                              dense_numbers(c, size, dtype, low, 1));
    }
    return end;
}
#define DENSE_LIST(c, args, n, dtype, gradients, states, low)                                                          \
    dense_list((c), (char *)&(args), (size_t)((char *)&(args).list - (char *)&(args)), (n), (dtype), (gradients),      \
               (states), (low))

static inline void dense_optimizers(int64_t n, int32_t dtype, int32_t options, dense_visit visit, void *ctx)
{
    bool one = options & 1, two = options & 2, maximize = options & 4;
    double decay = options & 8 ? 0.1 : 0;
    dense_case c = dense_begin("sgd", PERI_K_optim_sgd, dtype, n, options);
    peri_k_optim_sgd_args sgd = {.dtype = dtype,
                                 .maximize = maximize,
                                 .nesterov = two,
                                 .first = false,
                                 .lr = 0.1,
                                 .momentum = 0.9,
                                 .dampening = two ? 0 : 0.2,
                                 .weight_decay = decay};
    int64_t range = DENSE_LIST(&c, sgd, n, dtype, true, one, -1);
    dense_end(&c, &sgd, sizeof sgd, range, visit, ctx);
    c = dense_begin("adagrad", PERI_K_optim_adagrad, dtype, n, options);
    peri_k_optim_adagrad_args adagrad = {
        .dtype = dtype, .maximize = maximize, .lr = 0.1, .weight_decay = decay, .eps = 1e-3};
    range = DENSE_LIST(&c, adagrad, n, dtype, true, 1, 0);
    dense_end(&c, &adagrad, sizeof adagrad, range, visit, ctx);
    c = dense_begin("adam", PERI_K_optim_adam, dtype, n, options);
    peri_k_optim_adam_args adam = {.dtype = dtype,
                                   .maximize = maximize,
                                   .decoupled = two,
                                   .lr = 0.1,
                                   .beta1 = 0.9,
                                   .beta2 = 0.99,
                                   .eps = 1e-3,
                                   .weight_decay = decay,
                                   .step_size = 0.2,
                                   .root = 0.3};
    range = DENSE_LIST(&c, adam, n, dtype, true, one ? 7 : 3, 0);
    dense_end(&c, &adam, sizeof adam, range, visit, ctx);
    c = dense_begin("rmsprop", PERI_K_optim_rmsprop, dtype, n, options);
    peri_k_optim_rmsprop_args rms = {.dtype = dtype,
                                     .maximize = maximize,
                                     .lr = 0.1,
                                     .alpha = 0.9,
                                     .eps = 1e-2,
                                     .weight_decay = decay,
                                     .momentum = 0.9};
    range = DENSE_LIST(&c, rms, n, dtype, true, 1 + 2 * one + 4 * two, 0.5);
    c.tolerance = one ? 1e-4 : 1e-5; /* centered: the difference of two squares */
    dense_end(&c, &rms, sizeof rms, range, visit, ctx);
    c = dense_begin("clip_norm", PERI_K_clip_norm, dtype, n, 1);
    double norm = 3;
    peri_k_clip_norm_args k = {.norm = &norm, .dtype = dtype, .limit = 1};
    range = DENSE_LIST(&c, k, n, dtype, false, 0, 0);
    dense_end(&c, &k, sizeof k, range, visit, ctx);
    c = dense_begin("clip_value", PERI_K_clip_value, dtype, n, 1);
    peri_k_clip_value_args v = {.dtype = dtype, .limit = 0.25};
    range = DENSE_LIST(&c, v, n, dtype, false, 0, 0);
    dense_end(&c, &v, sizeof v, range, visit, ctx);
}

/** Rows of @cols numbers: 3, none, and 5 of them. */
static inline void dense_rowwise(int64_t cols, int32_t dtype, bool maximize, dense_visit visit, void *ctx)
{
    static const int64_t rows[DENSE_PARTS] = {3, 0, 5};
    dense_case c = dense_begin("rowwise_adagrad", PERI_K_optim_rowwise_adagrad, dtype, 8, cols);
    peri_k_optim_rowwise_adagrad_args a = {.dtype = dtype,
                                           .maximize = maximize,
                                           .lr = 0.1,
                                           .weight_decay = maximize ? 0.1 : 0,
                                           .eps = 1e-3,
                                           .list.n = DENSE_PARTS};
    int64_t end = 0;
    for (int32_t q = 0; q < DENSE_PARTS; q++) {
        const size_t at = offsetof(peri_k_optim_rowwise_adagrad_args, list.part) + (size_t)q * sizeof(peri_optim_part);
        int64_t n = rows[q] * cols;
        a.list.part[q] = (peri_optim_part){.g = dense_numbers(&c, n, dtype, -1, 1), .end = end += rows[q], .n = n};
        dense_add_out(&c, at + offsetof(peri_optim_part, w), n, dtype, dense_numbers(&c, n, dtype, -1, 1));
        dense_add_out(&c, at + offsetof(peri_optim_part, state), rows[q], dtype,
                      dense_numbers(&c, rows[q], dtype, 0, 1));
    }
    dense_end(&c, &a, sizeof a, end, visit, ctx);
}

/** Norms of two arrays, of n and n + 3 numbers. */
static inline void dense_norms(int64_t n, int32_t dtype, double p, dense_visit visit, void *ctx)
{
    dense_case c = dense_begin("norm", PERI_K_norm_partial, dtype, n, isinf(p) ? -1 : (int64_t)p);
    peri_k_norm_partial_args a = {.dtype = dtype, .p = p, .list.n = 2};
    int64_t end = 0;
    for (int32_t q = 0; q < 2; q++) {
        int64_t size = n + 3 * q;
        end += (size + PERI_NORM_BLOCK - 1) / PERI_NORM_BLOCK;
        a.list.part[q] = (peri_optim_part){.w = dense_numbers(&c, size, dtype, -1, 1), .end = end, .n = size};
    }
    DENSE_OUT(&c, peri_k_norm_partial_args, partial, end, PERI_F64, NULL);
    dense_end(&c, &a, sizeof a, end, visit, ctx);
}

#endif
