/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_norm.c: softmax, layer norm, dropout.
 */
#include "../base/floats.h"
#include "capture.h"
#include "../../kernels/dense.h"

#include <perilune/ops.h>
#include <math.h>

/* -- softmax ------------------------------------------------------------------------------------------------------- */

enum { KEPT_DIM, KEPT_LOG }; /* of softmax */
enum { KEPT_COLS };          /* of layer norm */

/** saved: y. */
static peri_status softmax_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *y = node->saved[0], *g, *dx = NULL;
    int64_t outer, n, inner;
    peri__around(y, (int32_t)node->kept[KEPT_DIM], &outer, &n, &inner);
    peri_status status;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    PERI_TRY_GOTO(peri__tensor_like(y, y->ndim, y->shape, &dx), out);
    peri_k_softmax_grad_args args = {.dx = peri__data(dx), .dy = peri__data(g), .y = peri__data(y), .dtype = y->dtype,
                                     .log = node->kept[KEPT_LOG], .n = n, .inner = inner};
    status = PERI_LAUNCH(peri__device(y), softmax_grad, &args, outer * inner,
                         peri__ceil_div(PERI_ELEMENT_GRAIN, 8 * peri__max(n, 1)));
out:
    peri_tensor_release(g);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab softmax_vtab = {.name = "softmax", .backward = softmax_backward};

static peri_status softmax_wide(const char *function, peri_tensor *x, int32_t dim, bool log, bool zeros,
                                peri_tensor **out)
{
    int32_t d;
    int64_t outer, n, inner;
    PERI_TRY(peri__check_float(function, "x", x));
    if (!out) return peri__fail(PERI_EINVAL, "%s: out is missing", function);
    PERI_TRY(peri__along(function, x, dim, &d));
    peri__around(x, d, &outer, &n, &inner);
    peri_tensor *flat, *y = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY(peri__contiguous_of(x, &flat));
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &y), out);
    peri_k_softmax_args args = {.y = peri__data(y), .x = peri__data(flat), .dtype = x->dtype, .log = log,
                                .zeros = zeros, .n = n, .inner = inner};
    int64_t grain = peri__ceil_div(PERI_ELEMENT_GRAIN, 8 * peri__max(n, 1));
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), softmax, &args, outer * inner, grain), out);
    PERI_TRY_GOTO(peri__attach(&softmax_vtab, &x, 1, &y, 1, &node), out);
    if (node) {
        node->kept[KEPT_DIM] = d;
        node->kept[KEPT_LOG] = log;
        status = peri__node_save_output(node, 0, y);
    }
out:
    peri_tensor_release(flat);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

static peri_status softmax(const char *function, peri_tensor *x, int32_t dim, bool log, bool zeros, peri_tensor **out)
{
    peri__operands o;
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, &x, 1));
    return peri__narrow(&o, softmax_wide(function, o.in[0], dim, log, zeros, out ? &o.out : NULL), out);
}

peri_status peri_op_softmax(peri_tensor *x, int32_t dim, peri_tensor **out)
{
    return softmax("peri_op_softmax", x, dim, false, false, out);
}
peri_status peri_op_log_softmax(peri_tensor *x, int32_t dim, peri_tensor **out)
{
    return softmax("peri_op_log_softmax", x, dim, true, false, out);
}
peri_status peri__attention_weights(const char *function, peri_tensor *scores, peri_tensor **out)
{
    return softmax(function, scores, -1, false, true, out);
}

/* -- layer norm ---------------------------------------------------------------------------------------------------- */

/** saved: x, mean, rstd, weight, bias (for its shape). Inputs: x, weight, bias. */
static peri_status layer_norm_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *const *saved = node->saved;
    peri_tensor *x = NULL, *g = NULL, *weight = NULL, *dx = NULL, *dweight = NULL, *dbias = NULL;
    int64_t cols = node->kept[KEPT_COLS], rows = peri__numel(saved[1]), blocks = peri__ceil_div(rows, PERI_SUM_ROWS);
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(saved[0], &x), out);
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &g), out);
    if (saved[3]) PERI_TRY_GOTO(peri__contiguous_of(saved[3], &weight), out);
    if (peri__needs(node, 0)) PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &dx), out);
    for (int32_t i = 1; i <= 2; i++) {
        const peri_tensor *to = saved[2 + i];
        if (peri__needs(node, i))
            PERI_TRY_GOTO(peri__grad_partial(node, i, x->dtype, blocks, x->dtype, to->ndim, to->shape,
                                             i == 1 ? &dweight : &dbias),
                          out);
    }
    peri_k_layer_norm_grad_args args = {.dx = dx ? peri__data(dx) : NULL,
                                        .dweight = dweight ? peri__data(dweight) : NULL,
                                        .dbias = dbias ? peri__data(dbias) : NULL,
                                        .dy = peri__data(g),
                                        .x = peri__data(x),
                                        .mean = peri__data(saved[1]),
                                        .rstd = peri__data(saved[2]),
                                        .weight = weight ? peri__data(weight) : NULL,
                                        .dtype = x->dtype,
                                        .rows = rows,
                                        .cols = cols};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), layer_norm_grad, &args, blocks,
                              peri__ceil_div(PERI_ELEMENT_GRAIN, PERI_SUM_ROWS * peri__max(cols, 1))),
                  out);
    if (dweight)
        PERI_TRY_GOTO(peri__grad_sums(node, 1, dweight, dweight->dtype, saved[3]->ndim, saved[3]->shape, &grad_in[1]),
                      out);
    if (dbias)
        PERI_TRY_GOTO(peri__grad_sums(node, 2, dbias, dbias->dtype, saved[4]->ndim, saved[4]->shape, &grad_in[2]), out);
    grad_in[0] = dx;
    dx = NULL;
out:
    peri_tensor_release(x);
    peri_tensor_release(g);
    peri_tensor_release(weight);
    peri_tensor_release(dx);
    peri_tensor_release(dweight);
    peri_tensor_release(dbias);
    return status;
}

static const peri__node_vtab layer_norm_vtab = {.name = "layer_norm", .backward = layer_norm_backward};

static peri_status check_affine(const peri_tensor *x, int32_t dims, const char *what, const peri_tensor *p)
{
    char text[300];
    if (!p) return PERI_OK;
    PERI_TRY(peri__check_tensor("peri_op_layer_norm", what, p, x->dtype, dims));
    PERI_TRY(peri__check_same_device("peri_op_layer_norm", x, p));
    if (memcmp(p->shape, x->shape + x->ndim - dims, sizeof *p->shape * (size_t)dims) != 0)
        return peri__fail(PERI_EINVAL, "peri_op_layer_norm: x and %s are %s; %s must have x's last %d sizes", what,
                          peri__pair_text(x, p, text, sizeof text), what, dims);
    return PERI_OK;
}

static peri_status layer_norm(peri_tensor *x, int32_t dims, peri_tensor *weight, peri_tensor *bias, double eps,
                              peri_tensor **out)
{
    PERI_TRY(peri__check_float("peri_op_layer_norm", "x", x));
    if (dims < 1 || dims > x->ndim)
        return peri__fail(PERI_EINVAL, "peri_op_layer_norm: the last %d dimensions, allowed: 1..%d", dims, x->ndim);
    if (!(eps >= 0)) return peri__fail(PERI_EINVAL, "peri_op_layer_norm: eps %g, allowed: 0 and more", eps);
    PERI_TRY(check_affine(x, dims, "weight", weight));
    PERI_TRY(check_affine(x, dims, "bias", bias));
    int64_t cols = 1, rows = 1;
    for (int32_t d = 0; d < x->ndim; d++) *(d < x->ndim - dims ? &rows : &cols) *= x->shape[d];
    peri_tensor *in[3] = {x, weight, bias}, *flat[3] = {NULL}, *y = NULL, *mean = NULL, *rstd = NULL;
    peri__node *node;
    peri_status status;
    for (int32_t i = 0; i < 3; i++)
        if (in[i]) PERI_TRY_GOTO(peri__contiguous_of(in[i], &flat[i]), out);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &y), out);
    PERI_TRY_GOTO(peri__tensor_like(x, 1, &rows, &mean), out);
    PERI_TRY_GOTO(peri__tensor_like(x, 1, &rows, &rstd), out);
    peri_k_layer_norm_args args = {.y = peri__data(y),
                                   .mean = peri__data(mean),
                                   .rstd = peri__data(rstd),
                                   .x = peri__data(flat[0]),
                                   .weight = weight ? peri__data(flat[1]) : NULL,
                                   .bias = bias ? peri__data(flat[2]) : NULL,
                                   .dtype = x->dtype,
                                   .cols = cols,
                                   .eps = eps};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), layer_norm, &args, rows,
                              peri__ceil_div(PERI_ELEMENT_GRAIN, 4 * peri__max(cols, 1))),
                  out);
    PERI_TRY_GOTO(peri__attach(&layer_norm_vtab, in, 3, &y, 1, &node), out);
    if (node) {
        peri_tensor *saved[5] = {x, mean, rstd, weight, bias};
        for (int32_t i = 0; i < 5; i++) peri__node_save(node, i, saved[i]);
        node->kept[KEPT_COLS] = cols;
    }
out:
    for (int32_t i = 0; i < 3; i++) peri_tensor_release(flat[i]);
    peri_tensor_release(mean);
    peri_tensor_release(rstd);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_layer_norm(peri_tensor *x, int32_t dims, peri_tensor *weight, peri_tensor *bias, double eps,
                               peri_tensor **out)
{
    PERI_NEED(out);
    peri__operands o;
    peri_tensor *in[3] = {x, weight, bias};
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, in, 3));
    return peri__narrow(&o, layer_norm(o.in[0], dims, o.in[1], o.in[2], eps, &o.out), out);
}

/* -- dropout ------------------------------------------------------------------------------------------------------- */

/** Of the upstream gradient as of x: the same mask, made again. state: the arguments. */
static peri_status dropped(peri_tensor *x, const peri_k_dropout_args *mask, peri_tensor **out)
{
    peri_tensor *flat, *y = NULL;
    peri_status status;
    PERI_TRY(peri__contiguous_of(x, &flat));
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &y), out);
    peri_k_dropout_args args = *mask;
    args.y = peri__data(y);
    args.x = peri__data(flat);
    status = PERI_LAUNCH(peri__device(x), dropout, &args, peri__numel(x), 1 << 13);
out:
    peri_tensor_release(flat);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

static peri_status dropout_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    return dropped(grad_out[0], node->state, &grad_in[0]);
}

static void dropout_fini(peri__node *node)
{
    peri__free(node->state);
    node->state = NULL;
}

static const peri__node_vtab dropout_vtab = {.name = "dropout", .backward = dropout_backward, .fini = dropout_fini};

static peri_status dropout(peri_tensor *x, double p, uint64_t seed, uint64_t stream, uint64_t offset, peri_tensor **out)
{
    PERI__OWN_FLOATS;
    PERI_TRY(peri__check_float("peri_op_dropout", "x", x));
    if (!(p >= 0 && p < 1)) return peri__fail(PERI_EINVAL, "peri_op_dropout: probability %g, allowed: 0 <= p < 1", p);
    double words = floor(p * 0x1p32 + 0.5);
    peri_k_dropout_args mask = {.dtype = x->dtype,
                                .threshold = words < 0x1p32 ? (uint32_t)words : UINT32_MAX,
                                .seed = seed,
                                .random_stream = stream,
                                .offset = offset,
                                .scale = 1 / (1 - p)};
    peri_tensor *y;
    if (peri__device_is_captured(peri__device(x))) PERI_TRY(peri__capture_draw(seed, stream, offset, &mask.drawn));
    PERI_TRY(dropped(x, &mask, &y));
    peri_k_dropout_args *kept = NULL;
    peri__node *node = NULL;
    peri_status status = PERI_OK;
    if (peri__recording(&x, 1)) {
        kept = peri__alloc(sizeof *kept);
        status = kept ? peri__record(&dropout_vtab, &x, 1, &y, 1, &node) : PERI_ENOMEM;
    }
    if (status < 0) {
        peri__free(kept);
        peri_tensor_release(y);
        return status;
    }
    if (node) {
        *kept = mask;
        node->state = kept;
    }
    *out = y;
    return PERI_OK;
}

peri_status peri_op_dropout(peri_tensor *x, double p, uint64_t seed, uint64_t stream, uint64_t offset,
                            peri_tensor **out)
{
    PERI_NEED(out);
    peri__operands o;
    PERI_TRY(peri__widen_operands(&o, PERI__IN_ANY, &x, 1));
    return peri__narrow(&o, dropout(o.in[0], p, seed, stream, offset, &o.out), out);
}
