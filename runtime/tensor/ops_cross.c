/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_cross.c: the layers of a cross network as one operation. A layer is two products (one, if its matrix is whole)
 * and one pass over what they made; backwards, three more products and one pass. The gradient of x0, to which every
 * layer adds, stays in one array.
 */
#include "tensor_internal.h"
#include "../../kernels/dense.h"

#include <perilune/ops.h>

/** What the backward pass needs of each layer: its input x, and x as it was multiplied; t = V x, u = W t (no t without
 *  V: u = W x); V, W and the bias as they were used. Products are of one dtype: x0's, or in an autocast region, where
 *  x0 is f32, the region's. Then u, x and their gradients stay f32, as PyTorch has it. */
enum { KEPT_X, KEPT_FACTOR, KEPT_T, KEPT_U, KEPT_V, KEPT_W, KEPT_BIAS, KEPT };

typedef struct layers {
    int32_t n;
    bool low_rank, biased;
    int32_t dtype; /* of the products' factors */
    int64_t rows, cols;
    peri_tensor *kept[]; /* [n][KEPT] retained, or NULL */
} layers;

/** The number of an input of the node: x0, then all V, all W, all biases. */
static int32_t place_of(const layers *s, int32_t kind, int32_t l)
{
    if (kind == KEPT_X) return 0;
    if (kind == KEPT_V) return 1 + l;
    return 1 + l + (s->low_rank + (kind == KEPT_BIAS)) * s->n;
}
static int32_t input_count(const layers *s) { return 1 + s->n * (1 + s->low_rank + s->biased); }
static peri_tensor **saved_of_layer(layers *s, int32_t l, int32_t kind) { return &s->kept[l * KEPT + kind]; }

static void layers_free(layers *s)
{
    if (!s) return;
    for (int32_t i = 0; i < s->n * KEPT; i++) peri_tensor_release(s->kept[i]);
    peri__free(s);
}

static layers *layers_new(int32_t n, bool low_rank, bool biased)
{
    layers *s = peri__alloc_zero(sizeof *s + sizeof *s->kept * KEPT * (size_t)n);
    if (!s) return NULL;
    s->n = n;
    s->low_rank = low_rank;
    s->biased = biased;
    return s;
}

/** A new matrix of @like's device that is a product. */
static peri_status product_new(const peri_tensor *like, int32_t dtype, int64_t rows, int64_t cols, peri_tensor *a,
                               bool ta, peri_tensor *b, bool tb, peri_tensor **out)
{
    peri_tensor *c;
    PERI_TRY(peri_tensor_new(peri__device(like), dtype, 2, (int64_t[]){rows, cols}, &c));
    peri_status status = peri__product(c, a, ta, b, tb, false);
    if (status < 0) peri_tensor_release(c);
    else *out = c;
    return status;
}

/** @t, contiguous and of @dtype, with the given shape: a view of it where that is what it is. */
static peri_status as(const peri_tensor *t, int32_t dtype, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    peri_tensor *flat;
    peri_status status = PERI_OK;
    if (t->dtype == dtype) {
        PERI_TRY(peri__contiguous_of(t, &flat));
    } else {
        PERI_TRY(peri_tensor_new(peri__device(t), dtype, t->ndim, t->shape, &flat));
        status = peri_tensor_copy(flat, (peri_tensor *)(uintptr_t)t);
    }
    if (status >= 0) status = peri__tensor_view(flat, ndim, shape, NULL, flat->offset, out);
    peri_tensor_release(flat);
    return status;
}

/* -- backwards ----------------------------------------------------------------------------------------------------- */

/** Give a gradient (taken) to an input: in the input's dtype and shape. */
static peri_status hand_on(const peri__node *node, peri_tensor **grad_in, int32_t kind, int32_t l, peri_tensor *grad)
{
    const int32_t i = place_of(node->state, kind, l);
    const peri_tensor *to = node->saved[i];
    peri_status status = as(grad, to->dtype, to->ndim, to->shape, &grad_in[i]);
    peri_tensor_release(grad);
    return status;
}

/** The gradient of a matrix of layer @l: the product of @a, transposed, and @b. */
static peri_status matrix_back(const peri__node *node, const layers *s, int32_t kind, int32_t l, peri_tensor *a,
                               peri_tensor *b, peri_tensor **grad_in)
{
    const int32_t i = place_of(s, kind, l);
    const peri_tensor *to = node->saved[i];
    if (!peri__needs(node, i)) return PERI_OK;
    PERI_TRY(peri__grad_new(node, i, to->dtype, to->ndim, to->shape, &grad_in[i]));
    return peri__product(grad_in[i], a, true, b, false, false);
}

/** The products of layer @l backwards: gradients of its matrices, and *dx += what comes through them. */
static peri_status products_back(peri__node *node, layers *s, int32_t l, peri_tensor *dx, peri_tensor **grad_in)
{
    peri_tensor *w = *saved_of_layer(s, l, KEPT_W), *v = *saved_of_layer(s, l, KEPT_V),
                *x = *saved_of_layer(s, l, KEPT_FACTOR);
    peri_tensor *t = s->low_rank ? *saved_of_layer(s, l, KEPT_T) : x, *du = NULL, *dt = NULL;
    peri_status status;
    PERI_TRY(peri__cast(*saved_of_layer(s, l, KEPT_U), s->dtype, &du));
    PERI_TRY_GOTO(matrix_back(node, s, KEPT_W, l, du, t, grad_in), out);
    if (!s->low_rank) {
        status = peri__product(dx, du, false, w, false, true);
        goto out;
    }
    PERI_TRY_GOTO(product_new(du, s->dtype, s->rows, t->shape[1], du, false, w, false, &dt), out);
    PERI_TRY_GOTO(matrix_back(node, s, KEPT_V, l, dt, x, grad_in), out);
    status = peri__product(dx, dt, false, v, false, true);
out:
    peri_tensor_release(du);
    peri_tensor_release(dt);
    return status;
}

/** Layer @l backwards: *dy, the gradient of its output, becomes that of its input; that of x0 is added to *dx0. In
 *  layer 0 both are one: dx0. u becomes du. */
static peri_status layer_back(peri__node *node, layers *s, int32_t l, peri_tensor *dy, peri_tensor **dx0,
                              peri_tensor **grad_in)
{
    const bool add = *dx0 != NULL, want_bias = s->biased && peri__needs(node, place_of(s, KEPT_BIAS, l));
    const int64_t blocks = peri__ceil_div(s->rows, PERI_SUM_ROWS);
    const int32_t wide = dy->dtype == PERI_F64 ? PERI_F64 : PERI_F32;
    const int32_t bias_input = place_of(s, KEPT_BIAS, l);
    const peri_tensor *to = want_bias ? node->saved[bias_input] : NULL;
    peri_tensor *partial = NULL, *bias = *saved_of_layer(s, l, KEPT_BIAS);
    peri_status status;
    if (!add) PERI_TRY(peri__tensor_like(dy, 2, (int64_t[]){s->rows, s->cols}, dx0));
    if (want_bias)
        PERI_TRY(peri__grad_partial(node, bias_input, wide, blocks, to->dtype, to->ndim, to->shape, &partial));
    peri_k_cross_grad_args args = {.du = peri__data(*saved_of_layer(s, l, KEPT_U)),
                                   .dx0 = peri__data(*dx0),
                                   .partial = partial ? peri__data(partial) : NULL,
                                   .dy = peri__data(dy),
                                   .x0 = peri__data(*saved_of_layer(s, 0, KEPT_X)),
                                   .u = peri__data(*saved_of_layer(s, l, KEPT_U)),
                                   .bias = bias ? peri__data(bias) : NULL,
                                   .dtype = dy->dtype,
                                   .add = add,
                                   .same = l == 0,
                                   .rows = s->rows,
                                   .cols = s->cols};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(dy), cross_grad, &args, blocks,
                              peri__ceil_div(PERI_ELEMENT_GRAIN, PERI_SUM_ROWS * peri__max(s->cols, 1))),
                  out);
    if (partial)
        PERI_TRY_GOTO(peri__grad_sums(node, bias_input, partial, to->dtype, to->ndim, to->shape, &grad_in[bias_input]),
                      out);
    status = products_back(node, s, l, l == 0 ? *dx0 : dy, grad_in);
out:
    peri_tensor_release(partial);
    return status;
}

static peri_status cross_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    layers *s = node->state;
    const int64_t shape[2] = {s->rows, s->cols};
    peri_tensor *dy = NULL, *dx0 = NULL;
    peri_status status = PERI_OK;
    if (peri__exclusive(grad_out[0])) {
        PERI_TRY(peri__tensor_view(grad_out[0], 2, shape, NULL, grad_out[0]->offset, &dy));
    } else { /* layers add to it */
        peri_tensor *whole;
        PERI_TRY(peri__tensor_like(grad_out[0], grad_out[0]->ndim, grad_out[0]->shape, &whole));
        status = peri_tensor_copy(whole, grad_out[0]);
        if (status >= 0) status = peri__tensor_view(whole, 2, shape, NULL, 0, &dy);
        peri_tensor_release(whole);
    }
    for (int32_t l = s->n - 1; l >= 0 && status >= 0; l--) status = layer_back(node, s, l, dy, &dx0, grad_in);
    if (status >= 0 && peri__needs(node, 0)) status = hand_on(node, grad_in, KEPT_X, 0, dx0);
    else peri_tensor_release(dx0);
    peri_tensor_release(dy);
    for (int32_t i = 0; status < 0 && i < input_count(s); i++) {
        peri_tensor_release(grad_in[i]);
        grad_in[i] = NULL;
    }
    return status;
}

static void cross_fini(peri__node *node)
{
    layers_free(node->state);
    node->state = NULL;
}

static const peri__node_vtab cross_vtab = {.name = "cross_net", .backward = cross_backward, .fini = cross_fini};

/* -- forwards ------------------------------------------------------------------------------------------------------ */

/** A matrix or bias of layer @l: of x0's dtype, or f32 beside x0 of 16 bits. */
static peri_status check_given(const char *what, int32_t l, const peri_tensor *x0, const peri_tensor *t)
{
    static const char *const function = "peri_op_cross_net";
    char name[64], text[300];
    snprintf(name, sizeof name, "%s[%d]", what, l);
    PERI_TRY(peri__check_tensor(function, name, t, -1, -1));
    PERI_TRY(peri__check_same_device(function, x0, t));
    if (t->dtype == x0->dtype || (t->dtype == PERI_F32 && x0->dtype != PERI_F64)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: x0 and %s are %s; %s must be of x0's dtype, or f32 beside f16 and bf16",
                      function, name, peri__pair_text(x0, t, text, sizeof text), name);
}

static peri_status check_shape(const char *what, int32_t l, const peri_tensor *t, int64_t rows, int64_t cols)
{
    char text[128];
    if (t->ndim == 2 && t->shape[0] == rows && t->shape[1] == cols) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_op_cross_net: %s[%d] is %s, wanted [%lld, %lld]", what, l,
                      peri__tensor_text(t, text, sizeof text), (long long)rows, (long long)cols);
}

static peri_status check_layers(const layers *s, const peri_tensor *x0, peri_tensor *const *v, peri_tensor *const *w,
                         peri_tensor *const *bias)
{
    char text[128];
    const int64_t n = s->cols;
    for (int32_t l = 0; l < s->n; l++) {
        PERI_TRY(check_given("w", l, x0, w[l]));
        if (v) PERI_TRY(check_given("v", l, x0, v[l]));
        const peri_tensor *in = v ? v[l] : w[l]; /* the matrix that x is multiplied by */
        if (w[l]->ndim == 2 && in->ndim == 2 && w[l]->shape[0] == in->shape[1] && in->shape[1] != n)
            return peri__fail(PERI_EINVAL, "peri_op_cross_net: x0 is %s, wanted [*, %lld], for w[%d]",
                              peri__tensor_text(x0, text, sizeof text), (long long)w[l]->shape[0], l);
        if (v) PERI_TRY(check_shape("v", l, v[l], v[l]->ndim == 2 ? v[l]->shape[0] : -1, n));
        PERI_TRY(check_shape("w", l, w[l], n, v ? v[l]->shape[0] : n));
        if (!bias) continue;
        PERI_TRY(check_given("bias", l, x0, bias[l]));
        if (peri__numel(bias[l]) != n)
            return peri__fail(PERI_EINVAL, "peri_op_cross_net: bias[%d] is %s, wanted %lld numbers", l,
                              peri__tensor_text(bias[l], text, sizeof text), (long long)n);
    }
    return PERI_OK;
}

/** Keep what the caller gave for layer @l, in the dtype and shape in which it is used. */
static peri_status prepare(layers *s, int32_t l, const peri_tensor *x0, peri_tensor *const *v, peri_tensor *const *w,
                           peri_tensor *const *bias)
{
    const int32_t wide = x0->dtype == PERI_F64 ? PERI_F64 : PERI_F32;
    PERI_TRY(as(w[l], s->dtype, 2, w[l]->shape, saved_of_layer(s, l, KEPT_W)));
    if (v) PERI_TRY(as(v[l], s->dtype, 2, v[l]->shape, saved_of_layer(s, l, KEPT_V)));
    if (bias) PERI_TRY(as(bias[l], wide, 1, &s->cols, saved_of_layer(s, l, KEPT_BIAS)));
    return PERI_OK;
}

/** The output of layer @l, as a new matrix. @recorded: keep t and u; else the output takes u's memory. */
static peri_status layer(layers *s, int32_t l, bool recorded, peri_tensor **out)
{
    peri_tensor *x = *saved_of_layer(s, l, KEPT_X), *w = *saved_of_layer(s, l, KEPT_W),
                *bias = *saved_of_layer(s, l, KEPT_BIAS), *t, *u, *y;
    PERI_TRY(peri__cast(x, s->dtype, saved_of_layer(s, l, KEPT_FACTOR)));
    t = *saved_of_layer(s, l, KEPT_FACTOR);
    if (s->low_rank) {
        peri_tensor *v = *saved_of_layer(s, l, KEPT_V);
        PERI_TRY(product_new(x, s->dtype, s->rows, v->shape[0], t, false, v, true, saved_of_layer(s, l, KEPT_T)));
        t = *saved_of_layer(s, l, KEPT_T);
    }
    PERI_TRY(product_new(x, x->dtype, s->rows, s->cols, t, false, w, true, saved_of_layer(s, l, KEPT_U)));
    y = u = *saved_of_layer(s, l, KEPT_U);
    if (recorded) PERI_TRY(peri__tensor_like(x, 2, x->shape, &y));
    else peri_tensor_retain(y);
    peri_k_cross_args args = {.y = peri__data(y),
                              .x0 = peri__data(*saved_of_layer(s, 0, KEPT_X)),
                              .u = peri__data(u),
                              .bias = bias ? peri__data(bias) : NULL,
                              .x = peri__data(x),
                              .dtype = x->dtype,
                              .cols = s->cols};
    peri_status status =
        PERI_LAUNCH(peri__device(x), cross, &args, s->rows, peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(s->cols, 1)));
    for (int32_t i = KEPT_FACTOR; i <= KEPT_U && !recorded; i++) {
        peri_tensor_release(*saved_of_layer(s, l, i));
        *saved_of_layer(s, l, i) = NULL;
    }
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** Record the operation; the node gets @s, and saves all inputs, whose dtypes and shapes their gradients have. */
static peri_status record(layers *s, peri_tensor *x0, peri_tensor *const *v, peri_tensor *const *w,
                          peri_tensor *const *bias, peri_tensor *y)
{
    const int32_t n = input_count(s);
    peri__node *node;
    peri_tensor **in = peri__alloc(sizeof *in * (size_t)n);
    if (!in) return PERI_ENOMEM;
    in[0] = x0;
    for (int32_t l = 0; l < s->n; l++) {
        if (v) in[place_of(s, KEPT_V, l)] = v[l];
        in[place_of(s, KEPT_W, l)] = w[l];
        if (bias) in[place_of(s, KEPT_BIAS, l)] = bias[l];
    }
    peri_status status = peri__record(&cross_vtab, in, n, &y, 1, &node);
    for (int32_t i = 0; i < n && status >= 0; i++) peri__node_save(node, i, in[i]);
    if (status >= 0) node->state = s;
    peri__free(in);
    return status;
}

static bool any_recorded(peri_tensor *x0, peri_tensor *const *v, peri_tensor *const *w, peri_tensor *const *bias,
                      int32_t n)
{
    return peri__recording(&x0, 1) || (v && peri__recording(v, n)) || peri__recording(w, n) ||
           (bias && peri__recording(bias, n));
}

peri_status peri_op_cross_net(peri_tensor *x0, peri_tensor *const *v, peri_tensor *const *w, peri_tensor *const *bias,
                              int32_t n, peri_tensor **out)
{
    static const char *const function = "peri_op_cross_net";
    char text[128];
    PERI_NEED(w);
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "x0", x0, -1, -1));
    if (!peri__is_float(x0->dtype) || x0->ndim < 1)
        return peri__fail(PERI_EINVAL, "%s: x0 is %s, wanted f32, f64, f16 or bf16 with one dimension or more",
                          function, peri__tensor_text(x0, text, sizeof text));
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d layers, at least one is needed", function, n);
    PERI_TRY(peri__check_list(function, "w", w, n));
    if (v) PERI_TRY(peri__check_list(function, "v", v, n));
    if (bias) PERI_TRY(peri__check_list(function, "the biases", bias, n));
    layers *s = layers_new(n, v != NULL, bias != NULL);
    if (!s) return PERI_ENOMEM;
    const int32_t low = x0->dtype == PERI_F32 ? peri__autocast(peri__device(x0)) : -1;
    s->dtype = low >= 0 ? low : x0->dtype;
    s->cols = x0->shape[x0->ndim - 1];
    s->rows = 1;
    for (int32_t d = 0; d < x0->ndim - 1; d++) s->rows *= x0->shape[d];
    const bool recorded = any_recorded(x0, v, w, bias, n);
    peri_tensor *x = NULL, *y = NULL;
    peri_status status;
    PERI_TRY_GOTO(check_layers(s, x0, v, w, bias), out);
    PERI_TRY_GOTO(as(x0, x0->dtype, 2, (int64_t[]){s->rows, s->cols}, &x), out);
    for (int32_t l = 0; l < n; l++) {
        *saved_of_layer(s, l, KEPT_X) = x;
        x = NULL;
        PERI_TRY_GOTO(prepare(s, l, x0, v, w, bias), out);
        PERI_TRY_GOTO(layer(s, l, recorded, &x), out);
        if (l > 0 && !recorded) {
            peri_tensor_release(*saved_of_layer(s, l, KEPT_X));
            *saved_of_layer(s, l, KEPT_X) = NULL;
        }
    }
    PERI_TRY_GOTO(peri__tensor_view(x, x0->ndim, x0->shape, NULL, 0, &y), out);
    if (recorded) {
        PERI_TRY_GOTO(record(s, x0, v, w, bias, y), out);
        s = NULL; /* the node's */
    }
out:
    peri_tensor_release(x);
    layers_free(s);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}
