/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_matmul.c: linear layers and matrix products, over the operation gemm.
 */
#include "../base/between.h"
#include "tensor_internal.h"
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"

#include <perilune/ops.h>

/** A stack of matrices as gemm wants it: rows x cols, one of the strides 1. `tensor` (retained) owns the memory: the
 *  operand itself, or a copy where its strides do not fit. */
typedef struct matrices {
    peri_tensor *tensor;
    int64_t rows, cols, ld, batch, batch_stride;
    bool transposed; /* stored cols x rows */
} matrices;

/** Describe @t as matrices by its last two dimensions; false if its strides do not fit. Leading dimensions must fold
 *  into one. */
static bool describe(const peri_tensor *t, matrices *m)
{
    int32_t n = t->ndim;
    int64_t rs = t->stride[n - 2], cs = t->stride[n - 1];
    m->rows = t->shape[n - 2];
    m->cols = t->shape[n - 1];
    m->batch = 1;
    m->batch_stride = 0;
    for (int32_t d = n - 3; d >= 0; d--) {
        if (t->shape[d] == 1) continue;
        if (m->batch == 1) m->batch_stride = t->stride[d];
        else if (t->stride[d] != m->batch_stride * m->batch) return false;
        m->batch *= t->shape[d];
    }
    m->transposed = false;
    m->ld = m->rows > 1 ? rs : m->cols;
    if ((cs == 1 || m->cols <= 1) && m->ld >= m->cols) goto fits;
    m->transposed = true;
    m->ld = m->cols > 1 ? cs : m->rows;
    if ((rs == 1 || m->rows <= 1) && m->ld >= m->rows) goto fits;
    return false;
fits:
    m->ld = peri__max(m->ld, 1);
    return true;
}

static peri_status matrices_or_copy(peri_tensor *t, matrices *m)
{
    m->tensor = NULL; /* nothing to release after an error */
    if (describe(t, m)) {
        peri_tensor_retain(t);
        m->tensor = t;
        return PERI_OK;
    }
    peri_tensor *copy;
    PERI_TRY(peri__tensor_like(t, t->ndim, t->shape, &copy));
    peri_status status = peri_tensor_copy(copy, t);
    if (status < 0) {
        peri_tensor_release(copy);
        return status;
    }
    m->tensor = copy;
    describe(copy, m);
    return PERI_OK;
}

/** The arguments of c[batch] = op(a) op(b), c contiguous. @ta, @tb exchange the operands' dimensions. */
static peri_op_gemm gemm_of(const peri_tensor *c, const matrices *a, bool ta, const matrices *b, bool tb)
{
    int64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols, n = tb ? b->rows : b->cols;
    return (peri_op_gemm){.dtype = a->tensor->dtype,
                          .c_dtype = c->dtype,
                          .trans_a = a->transposed != ta,
                          .trans_b = b->transposed != tb,
                          .tf32 = peri__tf32(),
                          .ordered = peri_products_ordered() && a->tensor->dtype == PERI_F32,
                          .m = m,
                          .n = n,
                          .k = k,
                          .batch = peri__max(a->batch, b->batch),
                          .alpha = 1,
                          .beta = 0,
                          .a = peri__data(a->tensor),
                          .b = peri__data(b->tensor),
                          .c = peri__data(c),
                          .lda = a->ld,
                          .ldb = b->ld,
                          .ldc = peri__max(n, 1),
                          .stride_a = a->batch > 1 ? a->batch_stride : 0,
                          .stride_b = b->batch > 1 ? b->batch_stride : 0,
                          .stride_c = m * n};
}

/** Whether @device has this product, and there is something to compute. */
static bool has_gemm(const peri_device *device, const peri_op_gemm *g)
{
    return g->m > 0 && g->n > 0 && g->k > 0 && g->batch > 0 && device->vtab->has(device->ctx, PERI_OP_gemm, g);
}

/** The product of 16-bit floats where the device has none of them: in f32. */
static peri_status product_wide(peri_tensor *c, const matrices *a, bool ta, const matrices *b, bool tb, bool add);

/** c[batch] = op(a) op(b), or, @add, c += that, c contiguous. */
static peri_status multiply_into(peri_tensor *c, const matrices *a, bool ta, const matrices *b, bool tb, bool add)
{
    peri_op_gemm g = gemm_of(c, a, ta, b, tb);
    g.beta = add;
    if (peri__numel(c) == 0) return PERI_OK;
    if (g.k == 0) return add ? PERI_OK : peri__tensor_zero(c);
    peri_device *device = peri__device(c);
    if (!has_gemm(device, &g)) {
        if (peri__is_16(g.dtype)) return product_wide(c, a, ta, b, tb, add);
        return peri__fail(PERI_EUNSUPPORTED, "device %s has no product of %s matrices of %lld x %lld and %lld x %lld",
                          device->name, peri_dtype_name(c->dtype), (long long)g.m, (long long)g.k, (long long)g.k,
                          (long long)g.n);
    }
    PERI_TRY(PERI_RUN(device, gemm, &g));
    peri__between(); /* most of a step's time goes by here */
    return PERI_OK;
}

/** @m in f32. */
static peri_status widen(const matrices *m, matrices *wide)
{
    peri_tensor *cast;
    PERI_TRY(peri__cast(m->tensor, PERI_F32, &cast));
    describe(cast, wide); /* contiguous, as casts are */
    wide->tensor = cast;
    if (m->batch == 1) { /* of a batch: `multiply` has joined its matrices, or takes the first for all */
        wide->batch = 1;
        wide->rows = m->rows;
    }
    return PERI_OK;
}

static peri_status product_wide(peri_tensor *c, const matrices *a, bool ta, const matrices *b, bool tb, bool add)
{
    matrices x = {0}, y = {0};
    peri_tensor *z = NULL;
    peri_status status;
    PERI_TRY_GOTO(widen(a, &x), out);
    PERI_TRY_GOTO(widen(b, &y), out);
    if (c->dtype == PERI_F32) peri_tensor_retain(z = c);
    else PERI_TRY_GOTO(peri_tensor_new(peri__device(c), PERI_F32, c->ndim, c->shape, &z), out);
    if (z != c && add) PERI_TRY_GOTO(peri_tensor_copy(z, c), out);
    PERI_TRY_GOTO(multiply_into(z, &x, ta, &y, tb, add), out);
    if (z != c) status = peri_tensor_copy(c, z);
out:
    peri_tensor_release(x.tensor);
    peri_tensor_release(y.tensor);
    peri_tensor_release(z);
    return status;
}

static peri_status multiply_matrices(peri_tensor *c, const matrices *a, bool ta, const matrices *b, bool tb)
{
    return multiply_into(c, a, ta, b, tb, false);
}

peri_status peri__product(peri_tensor *c, peri_tensor *a, bool ta, peri_tensor *b, bool tb, bool add)
{
    matrices x = {.tensor = a}, y = {.tensor = b};
    describe(a, &x);
    describe(b, &y);
    return multiply_into(c, &x, ta, &y, tb, add);
}

/* -- linear -------------------------------------------------------------------------------------------------------- */

static const int32_t activations[] = {PERI_UNARY_IDENTITY, PERI_UNARY_RELU, PERI_UNARY_SIGMOID, PERI_UNARY_TANH};

/** A view of @t as one matrix: all dimensions but the last folded; a copy where they do not fold. */
static peri_status as_rows(peri_tensor *t, peri_tensor **out)
{
    int64_t shape[2] = {1, t->shape[t->ndim - 1]}, stride[2] = {shape[1], 1};
    bool folds = t->stride[t->ndim - 1] == 1 || shape[1] == 1, first = true;
    for (int32_t d = t->ndim - 2; d >= 0; d--) {
        if (t->shape[d] == 1) continue;
        if (first) stride[0] = t->stride[d];
        else folds = folds && t->stride[d] == stride[0] * shape[0];
        first = false;
        shape[0] *= t->shape[d];
    }
    if (folds && stride[0] >= shape[1]) return peri__tensor_view(t, 2, shape, stride, t->offset, out);
    peri_tensor *copy;
    PERI_TRY(peri__tensor_like(t, t->ndim, t->shape, &copy));
    peri_status status = peri_tensor_copy(copy, t);
    if (status >= 0) status = peri__tensor_view(copy, 2, shape, NULL, 0, out);
    peri_tensor_release(copy);
    return status;
}

/** dz = g * f'(y), and db = its column sums if input 2 of @node wants them, of @dtype. @g is a matrix by rows; where f
 *  is the identity, *dz is g itself, and if @own says that g may be changed, it is made of g in place. */
static peri_status linear_dz(const peri__node *node, peri_tensor *g, bool own, peri_tensor *y, int32_t act,
                             int32_t dtype, peri_tensor **dz, peri_tensor **db)
{
    const bool want_bias = peri__needs(node, 2);
    int64_t rows = g->shape[0], cols = g->shape[1], shape[2] = {peri__ceil_div(rows, PERI_SUM_ROWS), cols};
    const int32_t sums = peri__is_16(g->dtype) ? PERI_F32 : g->dtype;
    peri_tensor *z = NULL, *partial = NULL;
    peri_status status = PERI_OK;
    bool identity = act == PERI_UNARY_IDENTITY;
    if (identity || own) {
        z = g;
        peri_tensor_retain(z);
    } else {
        PERI_TRY_GOTO(peri__tensor_like(g, 2, g->shape, &z), out);
    }
    if (want_bias) PERI_TRY_GOTO(peri__grad_partial(node, 2, sums, shape[0], dtype, 1, &cols, &partial), out);
    if (!identity || partial) {
        peri_k_act_grad_args args = {.dz = identity ? NULL : peri__data(z),
                                     .partial = partial ? peri__data(partial) : NULL,
                                     .dy = peri__data(g),
                                     .y = y ? peri__data(y) : NULL,
                                     .dtype = g->dtype,
                                     .act = act,
                                     .rows = rows,
                                     .cols = cols,
                                     .dy_stride = g->stride[0]};
        PERI_TRY_GOTO(PERI_LAUNCH(peri__device(g), act_grad, &args, shape[0],
                                  peri__ceil_div(PERI_ELEMENT_GRAIN, PERI_SUM_ROWS * peri__max(cols, 1))),
                      out);
    }
    if (partial) status = peri__grad_sums(node, 2, partial, dtype, 1, &cols, db);
out:
    peri_tensor_release(partial);
    if (status < 0) peri_tensor_release(z);
    else *dz = z;
    return status;
}

enum { KEPT_ACT, KEPT_DTYPES }; /* of linear; dtypes: of its three inputs */

/** saved: x and weight as they were multiplied, y (if f has a derivative); shape: x's. Inputs: x, weight, bias. */
static peri_status linear_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    int32_t act = (int32_t)node->kept[KEPT_ACT], dtypes[3];
    for (int i = 0; i < 3; i++) dtypes[i] = (int32_t)node->kept[KEPT_DTYPES + i];
    peri_tensor *g = NULL, *dz = NULL, *x = NULL;
    matrices mz = {0}, mx = {0}, mw = {0};
    bool own = peri__exclusive(grad_out[0]);
    peri_status status;
    PERI_TRY_GOTO(as_rows(grad_out[0], &g), out);
    PERI_TRY_GOTO(linear_dz(node, g, own, node->saved[2], act, dtypes[2], &dz, &grad_in[2]), out);
    PERI_TRY_GOTO(matrices_or_copy(dz, &mz), out);
    if (peri__needs(node, 1)) {
        PERI_TRY_GOTO(as_rows(node->saved[0], &x), out);
        PERI_TRY_GOTO(matrices_or_copy(x, &mx), out);
        PERI_TRY_GOTO(peri__grad_new(node, 1, dtypes[1], 2, (int64_t[]){mz.cols, mx.cols}, &grad_in[1]), out);
        PERI_TRY_GOTO(multiply_matrices(grad_in[1], &mz, true, &mx, false), out);
    }
    if (peri__needs(node, 0)) {
        PERI_TRY_GOTO(matrices_or_copy(node->saved[1], &mw), out);
        PERI_TRY_GOTO(
            peri_tensor_new(peri__device(dz), dtypes[0], node->shape[0].ndim, node->shape[0].size, &grad_in[0]), out);
        status = multiply_matrices(grad_in[0], &mz, false, &mw, false);
    }
out:
    peri_tensor_release(mz.tensor);
    peri_tensor_release(mx.tensor);
    peri_tensor_release(mw.tensor);
    peri_tensor_release(g);
    peri_tensor_release(dz);
    peri_tensor_release(x);
    for (int32_t i = 0; status < 0 && i < 3; i++) {
        peri_tensor_release(grad_in[i]);
        grad_in[i] = NULL;
    }
    return status;
}

static const peri__node_vtab linear_vtab = {.name = "linear", .backward = linear_backward};

static peri_status check_linear(const peri_tensor *x, const peri_tensor *weight, const peri_tensor *bias,
                                int32_t activation)
{
    static const char *const function = "peri_op_linear";
    char text[300];
    PERI_TRY(peri__check_real(function, "x", x));
    PERI_TRY(peri__check_real(function, "weight", weight));
    PERI_TRY(peri__check_tensor(function, "weight", weight, -1, 2));
    PERI_TRY(peri__check_same_device(function, x, weight));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != weight->shape[1])
        return peri__fail(PERI_EINVAL, "%s: x is %s, wanted [*, %lld]", function,
                          strchr(peri__tensor_text(x, text, sizeof text), '['), (long long)weight->shape[1]);
    if (bias) {
        PERI_TRY(peri__check_real(function, "bias", bias));
        PERI_TRY(peri__check_tensor(function, "bias", bias, -1, 1));
        PERI_TRY(peri__check_same_device(function, x, bias));
        if (bias->shape[0] != weight->shape[0])
            return peri__fail(PERI_EINVAL, "%s: weight and bias are %s; their first sizes must agree", function,
                              peri__pair_text(weight, bias, text, sizeof text));
    }
    if (activation < 0 || activation > PERI_ACTIVATION_TANH)
        return peri__fail(PERI_EINVAL, "%s: activation %d, allowed: 0..%d", function, activation, PERI_ACTIVATION_TANH);
    return PERI_OK;
}

/** The inputs in the dtype that they are multiplied in: that of the autocast region that the thread is in, else their
 *  own. */
static peri_status linear_inputs(peri_tensor *const *in, peri_tensor **cast)
{
    const int32_t low = peri__autocast(peri__device(in[0]));
    bool wide = false;
    for (int i = 0; i < 3; i++) wide = wide || (in[i] && in[i]->dtype == PERI_F64);
    for (int i = 0; i < 3; i++) {
        if (!in[i]) continue;
        if (low >= 0 && !wide) PERI_TRY((i ? peri__cast_weight : peri__cast)(in[i], low, &cast[i]));
        else peri_tensor_retain(cast[i] = in[i]);
    }
    PERI_TRY(peri__check_tensor("peri_op_linear", "x", cast[0], cast[1]->dtype, -1));
    return in[2] ? peri__check_tensor("peri_op_linear", "bias", cast[2], cast[0]->dtype, -1) : PERI_OK;
}

/** y = f(y + bias), of @rows rows. @bias contiguous, of y's dtype; NULL: none. */
static peri_status bias_act(peri_tensor *y, peri_tensor *bias, int32_t act, int64_t rows)
{
    const int64_t cols = y->shape[y->ndim - 1], grain = peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(cols, 1));
    peri_k_bias_act_args args = {
        .y = peri__data(y), .bias = bias ? peri__data(bias) : NULL, .dtype = y->dtype, .act = act, .cols = cols};
    return PERI_LAUNCH(peri__device(y), bias_act, &args, rows, grain);
}

/** y = x W^T + bias, rounded once: by the device's product alone where it can. */
static peri_status biased(const matrices *x, const matrices *weight, peri_tensor *bias, peri_tensor *y)
{
    peri_device *device = peri__device(y);
    peri_op_gemm g = gemm_of(y, x, false, weight, true);
    g.biased = true;
    g.bias = peri__data(bias);
    if (has_gemm(device, &g)) {
        PERI_TRY(PERI_RUN(device, gemm, &g));
        peri__between();
        return PERI_OK;
    }
    peri_tensor *wide = NULL, *b = NULL;
    const int32_t dtype = peri__is_16(y->dtype) ? PERI_F32 : y->dtype;
    peri_status status;
    if (dtype == y->dtype) peri_tensor_retain(wide = y);
    else PERI_TRY(peri_tensor_new(device, dtype, y->ndim, y->shape, &wide));
    PERI_TRY_GOTO(peri__cast(bias, dtype, &b), out);
    PERI_TRY_GOTO(multiply_matrices(wide, x, false, weight, true), out);
    PERI_TRY_GOTO(bias_act(wide, b, PERI_UNARY_IDENTITY, x->rows), out);
    if (wide != y) status = peri_tensor_copy(y, wide);
out:
    peri_tensor_release(wide);
    peri_tensor_release(b);
    return status;
}

/** y = f(x W^T + bias), y contiguous. Of 16-bit floats f is a function of the rounded sum, as it is where it is an
 *  operation of its own. */
static peri_status linear_forward(const matrices *x, const matrices *weight, peri_tensor *bias, int32_t act,
                                  peri_tensor *y)
{
    if (act == PERI_UNARY_IDENTITY && !bias) return multiply_matrices(y, x, false, weight, true);
    if (act == PERI_UNARY_IDENTITY) return biased(x, weight, bias, y);
    if (bias && peri__is_16(y->dtype)) {
        PERI_TRY(biased(x, weight, bias, y));
        return bias_act(y, NULL, act, x->rows);
    }
    PERI_TRY(multiply_matrices(y, x, false, weight, true));
    return bias_act(y, bias, act, x->rows);
}

peri_status peri_op_linear(peri_tensor *x, peri_tensor *weight, peri_tensor *bias, int32_t activation,
                           peri_tensor **out)
{
    PERI_TRY(check_linear(x, weight, bias, activation));
    int32_t act = activations[activation];
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = weight->shape[0];
    peri_tensor *in[3] = {x, weight, bias}, *cast[3] = {NULL}, *rows = NULL, *flat = NULL, *y = NULL;
    matrices mx = {0}, mw = {0};
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(linear_inputs(in, cast), out);
    PERI_TRY_GOTO(as_rows(cast[0], &rows), out);
    PERI_TRY_GOTO(matrices_or_copy(rows, &mx), out);
    PERI_TRY_GOTO(matrices_or_copy(cast[1], &mw), out);
    if (bias) PERI_TRY_GOTO(peri__contiguous_of(cast[2], &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(cast[0], x->ndim, shape, &y), out);
    PERI_TRY_GOTO(linear_forward(&mx, &mw, flat, act, y), out);
    PERI_TRY_GOTO(peri__attach(&linear_vtab, in, 3, &y, 1, &node), out);
    if (node) {
        node->kept[KEPT_ACT] = act;
        node->shape[0] = peri__shape_of(x);
        for (int32_t i = 0; i < 3; i++) node->kept[KEPT_DTYPES + i] = in[i] ? in[i]->dtype : -1;
        for (int32_t i = 0; i < 2; i++) peri__node_save(node, i, cast[i]);
        if (act != PERI_UNARY_IDENTITY) status = peri__node_save_output(node, 2, y);
    }
out:
    for (int32_t i = 0; i < 3; i++) peri_tensor_release(cast[i]);
    peri_tensor_release(mx.tensor);
    peri_tensor_release(mw.tensor);
    peri_tensor_release(rows);
    peri_tensor_release(flat);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/* -- matmul -------------------------------------------------------------------------------------------------------- */

/** A view of an operand with leading dimensions repeated to @batch[n]. */
static peri_status repeat_batch(peri_tensor *t, int32_t n, const int64_t *batch, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, batch, sizeof *shape * (size_t)n);
    shape[n] = t->shape[t->ndim - 2];
    shape[n + 1] = t->shape[t->ndim - 1];
    return peri__expand(t, n + 2, shape, out);
}

/** out [batch, m, n] = op(a) op(b), where the matrices of a and b are repeated to @batch[n]. */
static peri_status multiply(peri_tensor *a, bool ta, peri_tensor *b, bool tb, int32_t n, const int64_t *batch,
                            peri_tensor **out)
{
    peri_tensor *wide_a = NULL, *wide_b = NULL, *c = NULL;
    matrices ma = {0}, mb = {0};
    int64_t shape[PERI_MAX_DIMS];
    peri_status status;
    PERI_TRY_GOTO(repeat_batch(a, n, batch, &wide_a), out);
    PERI_TRY_GOTO(repeat_batch(b, n, batch, &wide_b), out);
    PERI_TRY_GOTO(matrices_or_copy(wide_a, &ma), out);
    PERI_TRY_GOTO(matrices_or_copy(wide_b, &mb), out);
    memcpy(shape, batch, sizeof *shape * (size_t)n);
    shape[n] = ta ? ma.cols : ma.rows;
    shape[n + 1] = tb ? mb.rows : mb.cols;
    PERI_TRY_GOTO(peri__tensor_like(a, n + 2, shape, &c), out);
    if (!ta && !ma.transposed && mb.batch > 1 && mb.batch_stride == 0 && ma.batch_stride == ma.rows * ma.ld) {
        ma.rows *= ma.batch; /* one b for all: one tall product */
        ma.batch = mb.batch = 1;
    }
    status = multiply_matrices(c, &ma, ta, &mb, tb);
out:
    peri_tensor_release(wide_a);
    peri_tensor_release(wide_b);
    peri_tensor_release(ma.tensor);
    peri_tensor_release(mb.tensor);
    if (status < 0) peri_tensor_release(c);
    else *out = c;
    return status;
}

/** The product of matrices of integers, in their own dtype. */
static peri_status multiply_integers(peri_tensor *a, peri_tensor *b, int32_t n, const int64_t *batch, peri_tensor **out)
{
    const int64_t *const sa = a->stride + a->ndim - 2, *const sb = b->stride + b->ndim - 2;
    peri_k_integer_product_args k = {.a = peri__data(a),
                                     .b = peri__data(b),
                                     .dtype = a->dtype,
                                     .ndim = n,
                                     .rows = a->shape[a->ndim - 2],
                                     .cols = b->shape[b->ndim - 1],
                                     .k = b->shape[b->ndim - 2],
                                     .a_row = sa[0],
                                     .a_col = sa[1],
                                     .b_row = sb[0],
                                     .b_col = sb[1]};
    peri_tensor *wide_a = NULL, *wide_b = NULL, *c = NULL;
    int64_t shape[PERI_MAX_DIMS];
    peri_status status;
    PERI_TRY_GOTO(repeat_batch(a, n, batch, &wide_a), out);
    PERI_TRY_GOTO(repeat_batch(b, n, batch, &wide_b), out);
    memcpy(k.shape, batch, sizeof *batch * (size_t)n);
    memcpy(shape, batch, sizeof *batch * (size_t)n);
    memcpy(k.a_stride, wide_a->stride, sizeof *batch * (size_t)n);
    memcpy(k.b_stride, wide_b->stride, sizeof *batch * (size_t)n);
    shape[n] = k.rows;
    shape[n + 1] = k.cols;
    PERI_TRY_GOTO(peri__tensor_like(a, n + 2, shape, &c), out);
    k.dst = peri__data(c);
    if (k.cols > 0)
        status = PERI_LAUNCH(peri__device(a), integer_product, &k, peri__numel(c) / k.cols,
                             peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(k.cols * k.k, 1)));
out:
    peri_tensor_release(wide_a);
    peri_tensor_release(wide_b);
    if (status < 0) peri_tensor_release(c);
    else *out = c;
    return status;
}

/** The gradient of an unbatched b: one product over all rows of the batch. */
static peri_status rows_product(peri_tensor *a, peri_tensor *g, peri_tensor **out)
{
    peri_tensor *x = NULL, *z = NULL, *c = NULL;
    matrices mx = {0}, mz = {0};
    peri_status status;
    PERI_TRY_GOTO(as_rows(a, &x), out);
    PERI_TRY_GOTO(as_rows(g, &z), out);
    PERI_TRY_GOTO(matrices_or_copy(x, &mx), out);
    PERI_TRY_GOTO(matrices_or_copy(z, &mz), out);
    PERI_TRY_GOTO(peri__tensor_like(a, 2, (int64_t[]){mx.cols, mz.cols}, &c), out);
    status = multiply_matrices(c, &mx, true, &mz, false);
out:
    peri_tensor_release(x);
    peri_tensor_release(z);
    peri_tensor_release(mx.tensor);
    peri_tensor_release(mz.tensor);
    if (status < 0) peri_tensor_release(c);
    else *out = c;
    return status;
}

/** saved: a, b (both with two dimensions or more). */
static peri_status matmul_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g = grad_out[0], *a = node->saved[0], *b = node->saved[1];
    for (int32_t i = 0; i < 2; i++) {
        if (!peri__needs(node, i)) continue;
        peri_tensor *own = i == 0 ? a : b, *full, *part = NULL;
        /* da = g b^T, db = a^T g */
        if (i == 0) PERI_TRY(multiply(g, false, b, true, g->ndim - 2, g->shape, &full));
        else if (b->ndim == 2 && a->ndim == g->ndim) PERI_TRY(rows_product(a, g, &full));
        else PERI_TRY(multiply(a, true, g, false, g->ndim - 2, g->shape, &full));
        peri_status status = peri__sum_to(full, own->ndim, own->shape, &part);
        peri_tensor_release(full);
        PERI_TRY(status);
        grad_in[i] = part;
    }
    return PERI_OK;
}

static const peri__node_vtab matmul_vtab = {.name = "matmul", .backward = matmul_backward};

/** Both operands have two dimensions or more. */
static peri_status matmul(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    char text[300];
    int32_t n = (a->ndim > b->ndim ? a->ndim : b->ndim) - 2;
    int64_t batch[PERI_MAX_DIMS];
    if (a->shape[a->ndim - 1] != b->shape[b->ndim - 2])
        return peri__fail(PERI_EINVAL, "peri_op_matmul: %s: the last size of a must be b's last but one",
                          peri__pair_text(a, b, text, sizeof text));
    for (int32_t d = 0; d < n; d++) {
        int32_t i = d - n + a->ndim - 2, j = d - n + b->ndim - 2;
        int64_t x = i < 0 ? 1 : a->shape[i], y = j < 0 ? 1 : b->shape[j];
        if (x != y && x != 1 && y != 1)
            return peri__fail(PERI_EINVAL, "peri_op_matmul: %s: leading sizes %lld and %lld do not broadcast",
                              peri__pair_text(a, b, text, sizeof text), (long long)x, (long long)y);
        batch[d] = x == 1 ? y : x;
    }
    peri_tensor *in[2] = {a, b}, *y;
    peri__node *node;
    if (peri__is_integer(a->dtype)) return multiply_integers(a, b, n, batch, out);
    PERI_TRY(multiply(a, false, b, false, n, batch, &y));
    peri_status status = peri__attach(&matmul_vtab, in, 2, &y, 1, &node);
    if (status < 0) {
        peri_tensor_release(y);
        return status;
    }
    if (node) {
        peri__node_save(node, 0, a);
        peri__node_save(node, 1, b);
    }
    *out = y;
    return PERI_OK;
}

/** Of operands in the dtype that they are multiplied in. */
static peri_status multiplied(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    static const char *const function = "peri_op_matmul";
    char text[300];
    PERI_TRY(peri__check_tensor(function, "a", a, -1, -1));
    if (!peri__is_integer(a->dtype) || a->dtype == PERI_BOOL) PERI_TRY(peri__check_real(function, "a", a));
    PERI_TRY(peri__check_tensor(function, "b", b, a->dtype, -1));
    PERI_TRY(peri__check_same_device(function, a, b));
    if (a->ndim < 1 || b->ndim < 1)
        return peri__fail(PERI_EINVAL, "%s: %s; at least one dimension each", function,
                          peri__pair_text(a, b, text, sizeof text));
    if (a->ndim > 1 && b->ndim > 1) return matmul(a, b, out);
    peri_tensor *x = NULL, *y = NULL, *c = NULL;
    peri_status status;
    if (a->ndim == 1) PERI_TRY_GOTO(peri_tensor_reshape(a, 2, (int64_t[]){1, a->shape[0]}, &x), out);
    if (b->ndim == 1) PERI_TRY_GOTO(peri_tensor_reshape(b, 2, (int64_t[]){b->shape[0], 1}, &y), out);
    PERI_TRY_GOTO(matmul(x ? x : a, y ? y : b, &c), out);
    int64_t shape[PERI_MAX_DIMS];
    int32_t n = 0;
    for (int32_t d = 0; d < c->ndim; d++)
        if (!(x && d == c->ndim - 2) && !(y && d == c->ndim - 1)) shape[n++] = c->shape[d];
    status = peri_tensor_reshape(c, n, shape, out);
out:
    peri_tensor_release(x);
    peri_tensor_release(y);
    peri_tensor_release(c);
    return status;
}

peri_status peri_op_matmul(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    PERI_NEED(out);
    const int32_t low = a && b ? peri__autocast(peri__device(a)) : -1;
    const bool whole = low >= 0 && peri__is_integer(a->dtype) && peri__is_integer(b->dtype);
    if (low < 0 || whole || a->dtype == PERI_F64 || b->dtype == PERI_F64) return multiplied(a, b, out);
    peri_tensor *x = NULL, *y = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__check_real("peri_op_matmul", "a", a), out);
    PERI_TRY_GOTO(peri__check_real("peri_op_matmul", "b", b), out);
    PERI_TRY_GOTO(peri_tensor_to(a, low, NULL, &x), out);
    PERI_TRY_GOTO(peri_tensor_to(b, low, NULL, &y), out);
    status = multiplied(x, y, out);
out:
    peri_tensor_release(x);
    peri_tensor_release(y);
    return status;
}
