/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_reduce.c: sums and means over dimensions, the largest element of a dimension.
 */
#include "../base/floats.h"
#include "tensor_internal.h"
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"

#include <perilune/ops.h>

/* -- sum and mean -------------------------------------------------------------------------------------------------- */

enum { KEPT_MASK }; /* of sums and of extremes over several dimensions: which */
enum { KEPT_DIM };  /* of what goes along one */

/** The gradient is repeated. number: the scale; shape: the input's. */
static peri_status sum_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int32_t ndim = node->shape[0].ndim;
    const int64_t *shape = node->shape[0].size;
    const uint32_t mask = (uint32_t)node->kept[KEPT_MASK];
    int64_t kept[PERI_MAX_DIMS];
    for (int32_t d = 0; d < ndim; d++) kept[d] = mask >> d & 1 ? 1 : shape[d];
    peri_tensor *g = NULL, *view = NULL;
    peri_status status;
    if (node->number[0] != 1) PERI_TRY_GOTO(peri__unary(grad_out[0], PERI_UNARY_AFFINE, node->number[0], 0, &g), out);
    else PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &g), out);
    PERI_TRY_GOTO(peri__tensor_view(g, ndim, kept, NULL, g->offset, &view), out);
    status = peri__expand(view, ndim, shape, &grad_in[0]);
out:
    peri_tensor_release(g);
    peri_tensor_release(view);
    return status;
}

static const peri__node_vtab sum_vtab = {.name = "sum", .backward = sum_backward};

peri_status peri__mask_of(const char *function, const peri_tensor *x, const int32_t *dims, int32_t n, uint32_t *mask)
{
    if (n > 0 && !dims) return peri__fail(PERI_EINVAL, "%s: dims is missing", function);
    if (n < 0) return peri__fail(PERI_EINVAL, "%s: %d dimensions, allowed: 0 (all) and more", function, n);
    *mask = n ? 0 : (1u << x->ndim) - 1;
    for (int32_t i = 0; i < n; i++) {
        int32_t d;
        peri__words words;
        PERI_TRY(peri__along(function, x, dims[i], &d));
        if (*mask >> d & 1)
            return peri__fail(PERI_EINVAL, "%s: %s is named twice", function, peri__dim_text(d, &words));
        *mask |= 1u << d;
    }
    return PERI_OK;
}

/** Give *y (owned) memory of its own where it still lies in @x's, as the sum over dimensions of size 1 does: a change
 *  of one of them in place must not change the other. */
static peri_status set_apart(const peri_tensor *x, peri_tensor **y)
{
    if (peri__numel(x) == 0 || peri__data(*y) != peri__data(x)) return PERI_OK;
    PERI__HELD peri_tensor *view = *y;
    *y = NULL;
    PERI__HELD peri_tensor *copy = NULL;
    PERI_TRY(peri__tensor_like(view, view->ndim, view->shape, &copy));
    PERI_TRY(peri_tensor_copy(copy, view));
    *y = peri__hand_over(&copy);
    return PERI_OK;
}

static peri_status sum_wide(const char *function, peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim,
                            bool mean, peri_tensor **out)
{
    PERI__OWN_FLOATS;
    uint32_t mask;
    PERI_TRY(peri__check_float(function, "x", x));
    if (!out) return peri__fail(PERI_EINVAL, "%s: out is missing", function);
    PERI_TRY(peri__mask_of(function, x, dims, n, &mask));
    int64_t shape[PERI_MAX_DIMS], count = 1;
    int32_t ndim = 0;
    for (int32_t d = 0; d < x->ndim; d++) {
        bool reduced = mask >> d & 1;
        if (reduced) count *= x->shape[d];
        if (!reduced || keepdim) shape[ndim++] = reduced ? 1 : x->shape[d];
    }
    double scale = mean ? 1 / (double)count : 1; /* the mean of nothing is NaN: 0 * inf */
    peri_tensor *y;
    peri__node *node;
    PERI_TRY(peri__reduce(x, mask, scale, &y));
    peri_status status = set_apart(x, &y);
    if (status >= 0) status = peri__shaped(&y, ndim, shape);
    if (status >= 0) status = peri__attach(&sum_vtab, &x, 1, &y, 1, &node);
    if (status < 0) {
        peri_tensor_release(y);
        return status;
    }
    if (node) {
        node->number[0] = scale;
        node->shape[0] = peri__shape_of(x);
        node->kept[KEPT_MASK] = mask;
    }
    *out = y;
    return PERI_OK;
}

static peri_status sum_of_dims(const char *function, peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim,
                               bool mean, peri_tensor **out)
{
    peri__operands o;
    PERI_TRY(peri__widen_operands(&o, mean ? PERI__IN_ANY : PERI__IN_F32, &x, 1));
    return peri__narrow(&o, sum_wide(function, o.in[0], dims, n, keepdim, mean, out ? &o.out : NULL), out);
}


peri_status peri_op_mean(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, peri_tensor **out)
{
    return sum_of_dims("peri_op_mean", x, dims, n, keepdim, true, out);
}

/* -- means over ranks ---------------------------------------------------------------------------------------------- */

static peri_status check_one_element(const char *function, const peri_tensor *sum)
{
    char text[128];
    PERI_TRY(peri__check_float(function, "sum", sum));
    if (peri__numel(sum) == 1) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: sum is %s, wanted one element", function,
                      peri__tensor_text(sum, text, sizeof text));
}

peri_status peri_op_mean_parts(peri_tensor *sum, peri_tensor *count, double number, peri_tensor **out)
{
    static const char *const function = "peri_op_mean_parts";
    PERI_NEED(out);
    PERI_TRY(check_one_element(function, sum));
    char text[128];
    int64_t two = 2;
    peri_tensor *n = NULL, *parts = NULL;
    peri_status status;
    if (count) {
        PERI_TRY(peri__check_same_device(function, sum, count));
        if (peri__numel(count) != 1)
            return peri__fail(PERI_EINVAL, "%s: count is %s, wanted one element", function,
                              peri__tensor_text(count, text, sizeof text));
        PERI_TRY(peri_tensor_new(peri__device(count), PERI_F64, count->ndim, count->shape, &n));
        PERI_TRY_GOTO(peri_tensor_copy(n, count), out);
    }
    PERI_TRY_GOTO(peri_tensor_new(peri__device(sum), PERI_F64, 1, &two, &parts), out);
    peri_k_mean_args args = {.parts = peri__data(parts),
                             .sum = peri__data(sum),
                             .count = n ? peri__data(n) : NULL,
                             .dtype = PERI_F64,
                             .sum_dtype = sum->dtype,
                             .number = number};
    status = PERI_LAUNCH(peri__device(sum), mean, &args, 1, 1);
out:
    peri_tensor_release(n);
    if (status < 0) peri_tensor_release(parts);
    else *out = parts;
    return status;
}

/** saved: the scale; shape: the sum's, sizes of 1. */
static peri_status mean_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g = node->saved[0];
    if (node->of_one) peri_tensor_retain(g); /* 1 * scale */
    else PERI_TRY(peri__binary("mean_of backward", PERI_BINARY_MUL, grad_out[0], node->saved[0], &g));
    peri_status status = peri__tensor_view(g, node->shape[0].ndim, node->shape[0].size, NULL, g->offset, &grad_in[0]);
    peri_tensor_release(g);
    return status;
}

static const peri__node_vtab mean_vtab = {.name = "mean_of", .acts = PERI__ONE, .backward = mean_backward};

peri_status peri_op_mean_of(peri_tensor *sum, peri_tensor *parts, double number, int32_t ranks, peri_tensor **out)
{
    static const char *const function = "peri_op_mean_of";
    PERI_NEED(out);
    PERI_TRY(check_one_element(function, sum));
    if (parts) {
        char text[128];
        PERI_TRY(peri__check_tensor(function, "parts", parts, PERI_F64, 1));
        PERI_TRY(peri__check_same_device(function, sum, parts));
        if (parts->shape[0] != 2 || !peri__contiguous(parts))
            return peri__fail(PERI_EINVAL, "%s: parts is %s, wanted f64 [2] of peri_op_mean_parts", function,
                              peri__tensor_text(parts, text, sizeof text));
    }
    peri_tensor *value = NULL, *scale = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_like(sum, 0, NULL, &value), out);
    PERI_TRY_GOTO(peri__tensor_like(sum, 0, NULL, &scale), out);
    const double *both = parts ? peri__data(parts) : NULL;
    peri_k_mean_args args = {.value = peri__data(value),
                             .scale = peri__data(scale),
                             .sum = parts ? peri__data(parts) : peri__data(sum),
                             .count = parts ? both + 1 : NULL,
                             .dtype = sum->dtype,
                             .sum_dtype = parts ? PERI_F64 : sum->dtype,
                             .number = number,
                             .ranks = ranks};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(sum), mean, &args, 1, 1), out);
    PERI_TRY_GOTO(peri__attach(&mean_vtab, &sum, 1, &value, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, scale);
        node->shape[0] = peri__shape_of(sum);
    }
out:
    peri_tensor_release(scale);
    if (status < 0) peri_tensor_release(value);
    else *out = value;
    return status;
}

/* -- max ----------------------------------------------------------------------------------------------------------- */

/** saved: the places; shape: the input's. */
static peri_status max_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g, *dx = NULL;
    int64_t outer, n, inner;
    peri_status status;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    PERI_TRY_GOTO(peri__tensor_like(g, node->shape[0].ndim, node->shape[0].size, &dx), out);
    peri__around(dx, (int32_t)node->kept[KEPT_DIM], &outer, &n, &inner);
    peri_k_max_dim_grad_args args = {.dx = peri__data(dx),
                                     .dy = peri__data(g),
                                     .indices = peri__data(node->saved[0]),
                                     .dtype = g->dtype,
                                     .n = n,
                                     .inner = inner};
    status = PERI_LAUNCH(peri__device(g), max_dim_grad, &args, outer * inner, peri__ceil_div(PERI_ELEMENT_GRAIN, n));
out:
    peri_tensor_release(g);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab max_vtab = {.name = "max", .backward = max_backward};
static const peri__node_vtab min_vtab = {.name = "min", .backward = max_backward};

/** @values and @indices: new tensors of @shape[ndim], of the largest or smallest of contiguous @x along dimension
 *  @d. */
static peri_status extremes(peri_tensor *x, int32_t d, int32_t ndim, const int64_t *shape, bool least,
                            peri_tensor **values, peri_tensor **indices)
{
    int64_t outer, n, inner;
    peri__around(x, d, &outer, &n, &inner);
    PERI_TRY(peri__tensor_like(x, ndim, shape, values));
    PERI_TRY(peri_tensor_new(peri__device(x), PERI_I64, ndim, shape, indices));
    peri_k_max_dim_args args = {.values = peri__data(*values),
                                .indices = peri__data(*indices),
                                .x = peri__data(x),
                                .dtype = x->dtype,
                                .least = least,
                                .n = n,
                                .inner = inner};
    return PERI_LAUNCH(peri__device(x), max_dim, &args, outer * inner, peri__ceil_div(PERI_ELEMENT_GRAIN, n));
}

static peri_status extreme_along(const char *function, peri_tensor *x, int32_t dim, bool keepdim, bool least,
                           peri_tensor **values, peri_tensor **indices)
{
    char text[128];
    peri__words words;
    int32_t d, ndim = 0;
    PERI_TRY(peri__along(function, x, dim, &d));
    if (peri__along_size(x, d) == 0)
        return peri__fail(PERI_EINVAL, "%s: %s of %s is empty", function, peri__dim_text(d, &words),
                          peri__tensor_text(x, text, sizeof text));
    int64_t shape[PERI_MAX_DIMS];
    for (int32_t i = 0; i < x->ndim; i++)
        if (i != d || keepdim) shape[ndim++] = i == d ? 1 : x->shape[i];
    peri_tensor *flat = NULL, *value = NULL, *index = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(x, &flat), out);
    PERI_TRY_GOTO(extremes(flat, d, ndim, shape, least, &value, &index), out);
    status = peri__attach_places(least ? &min_vtab : &max_vtab, x, d, index, value);
out:
    peri_tensor_release(flat);
    if (status >= 0 && indices) *indices = index;
    else peri_tensor_release(index);
    if (status >= 0) *values = value;
    else peri_tensor_release(value);
    return status;
}

/** *wide = x as the kernels of maxima take it, recorded; *back: the dtype that results are cast back to, -1: they stay.
 *  Integers and bool go through i64, which holds all of them. */
static peri_status ordered(const char *function, peri_tensor *x, peri_tensor **wide, int32_t *back)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, "x", x, -1, -1));
    *back = -1;
    if (x->dtype == PERI_C64 || x->dtype == PERI_C128)
        return peri__fail(PERI_EINVAL, "%s: x is %s; complex numbers have no order", function,
                          peri__tensor_text(x, text, sizeof text));
    if (x->dtype == PERI_F32 || x->dtype == PERI_F64 || x->dtype == PERI_I64) {
        peri_tensor_retain(*wide = x);
        return PERI_OK;
    }
    *back = x->dtype;
    return peri_tensor_to(x, peri__is_16(x->dtype) ? PERI_F32 : PERI_I64, NULL, wide);
}

/** Cast @result (taken) back. */
static peri_status restored(peri_tensor *result, int32_t back, peri_tensor **out)
{
    peri_status status = peri_tensor_to(result, back, NULL, out);
    peri_tensor_release(result);
    return status;
}

/** The dtype that a result which was computed in f32 of 16-bit @x is cast back to; -1: none, as in a region of
 *  autocast, where products and running sums stay f32 as sums do. */
static int32_t dtype_back(const peri_tensor *x)
{
    return peri__is_16(x->dtype) && peri__autocast(peri__device(x)) < 0 ? x->dtype : -1;
}

static peri_status extreme_of_any_dtype(const char *function, peri_tensor *x, int32_t dim, bool keepdim, bool least,
                              peri_tensor **values, peri_tensor **indices)
{
    if (!values) return peri__fail(PERI_EINVAL, "%s: values is missing", function);
    peri_tensor *wide, *value, *index = NULL;
    int32_t back;
    PERI_TRY(ordered(function, x, &wide, &back));
    peri_status status = extreme_along(function, wide, dim, keepdim, least, &value, &index);
    peri_tensor_release(wide);
    if (status >= 0) status = restored(value, back, values);
    if (status >= 0 && indices) *indices = index;
    else peri_tensor_release(index);
    return status;
}

peri_status peri_op_max(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values, peri_tensor **indices)
{
    PERI__NOT_AT_BORDER;
    return extreme_of_any_dtype("peri_op_max", x, dim, keepdim, false, values, indices);
}

peri_status peri_op_min(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values, peri_tensor **indices)
{
    PERI__NOT_AT_BORDER;
    return extreme_of_any_dtype("peri_op_min", x, dim, keepdim, true, values, indices);
}

/** saved: x, y. Elements that are equal to y share; where that is NaN, those that are NaN. */
static peri_status amax_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    static const char *const function = "amax backward";
    peri_tensor *x = node->saved[0], *y = node->saved[1], *g = NULL, *view = NULL, *equal = NULL, *nan = NULL;
    peri_tensor *mine = NULL, *ones = NULL, *count = NULL, *part = NULL;
    const uint32_t mask = (uint32_t)node->kept[KEPT_MASK];
    peri_status status;
    PERI_TRY_GOTO(peri__compare(function, PERI_COMPARE_EQ, x, y, 0, 0, &equal), out);
    PERI_TRY_GOTO(peri__compare(function, PERI_COMPARE_NE, x, x, 0, 0, &nan), out);
    PERI_TRY_GOTO(peri__where(function, nan, nan, equal, &mine), out);
    PERI_TRY_GOTO(peri__cast(mine, x->dtype, &ones), out);
    PERI_TRY_GOTO(peri__reduce(ones, mask, 1, &count), out);
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &g), out);
    PERI_TRY_GOTO(peri__tensor_view(g, y->ndim, y->shape, NULL, g->offset, &view), out);
    PERI_TRY_GOTO(peri__binary(function, PERI_BINARY_DIV, view, count, &part), out);
    status = peri__where(function, mine, part, NULL, &grad_in[0]);
out:
    peri_tensor_release(g);
    peri_tensor_release(view);
    peri_tensor_release(equal);
    peri_tensor_release(nan);
    peri_tensor_release(mine);
    peri_tensor_release(ones);
    peri_tensor_release(count);
    peri_tensor_release(part);
    return status;
}

static const peri__node_vtab amax_vtab = {.name = "amax", .backward = amax_backward};

/** *y (new) = the largest of contiguous @x over @mask, whose dimensions stay with size 1: one dimension after the
 *  other, or, where there is work for one thread only, all dimensions that are neighbours at once. */
static peri_status reduce_extremes(peri_tensor *x, uint32_t mask, bool least, peri_tensor **y)
{
    peri_tensor_retain(*y = x);
    for (int32_t d = x->ndim - 1; d >= 0; d--) {
        if (!(mask >> d & 1)) continue;
        peri_tensor lines = **y; /* dimensions d to last of y are dimension d of these */
        const int32_t last = d;
        while (d > 0 && mask >> (d - 1) & 1 && peri__numel(*y) <= PERI_ELEMENT_GRAIN) {
            lines.shape[d - 1] *= lines.shape[d];
            lines.shape[d--] = 1;
        }
        int64_t shape[PERI_MAX_DIMS];
        memcpy(shape, (*y)->shape, sizeof shape);
        for (int32_t i = d; i <= last; i++) shape[i] = 1;
        peri_tensor *value = NULL, *index = NULL;
        peri_status status = extremes(&lines, d, x->ndim, shape, least, &value, &index);
        peri_tensor_release(index);
        peri_tensor_release(*y);
        *y = value;
        PERI_TRY(status);
    }
    return PERI_OK;
}

static peri_status amax(peri_tensor *x, uint32_t mask, bool keepdim, bool least, peri_tensor **out)
{
    static const char *const function = "peri_op_amax";
    char text[128];
    peri__words words;
    int64_t shape[PERI_MAX_DIMS];
    int32_t ndim = 0;
    for (int32_t d = 0; d < x->ndim; d++) {
        const bool reduced = mask >> d & 1;
        if (reduced && x->shape[d] == 0)
            return peri__fail(PERI_EINVAL, "%s: %s of %s is empty", function, peri__dim_text(d, &words),
                              peri__tensor_text(x, text, sizeof text));
        if (!reduced || keepdim) shape[ndim++] = reduced ? 1 : x->shape[d];
    }
    peri_tensor *flat = NULL, *kept = NULL, *y = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(x, &flat), out);
    PERI_TRY_GOTO(reduce_extremes(flat, mask, least, &kept), out);
    PERI_TRY_GOTO(peri__tensor_view(kept, ndim, shape, NULL, kept->offset, &y), out);
    PERI_TRY_GOTO(peri__attach(&amax_vtab, &x, 1, &y, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, x);
        peri__node_save(node, 1, kept);
        node->kept[KEPT_MASK] = mask;
    }
out:
    peri_tensor_release(flat);
    peri_tensor_release(kept);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_amax(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, bool least, peri_tensor **out)
{
    static const char *const function = "peri_op_amax";
    uint32_t mask;
    peri_tensor *wide, *y;
    int32_t back;
    PERI_NEED(out);
    PERI_TRY(ordered(function, x, &wide, &back));
    peri_status status = peri__mask_of(function, wide, dims, n, &mask);
    if (status >= 0) status = amax(wide, mask, keepdim, least, &y);
    peri_tensor_release(wide);
    return status < 0 ? status : restored(y, back, out);
}

/* -- products ------------------------------------------------------------------------------------------------------ */

enum { KEPT_RUNNING = KEPT_DIM + 1 }; /* each element has a product, of those up to it; else a line has one */

/** saved: x. */
static peri_status products_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g = NULL, *x = NULL, *dx = NULL;
    int64_t outer, n, inner;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &g), out);
    PERI_TRY_GOTO(peri__contiguous_of(node->saved[0], &x), out);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &dx), out);
    peri__around(x, (int32_t)node->kept[KEPT_DIM], &outer, &n, &inner);
    peri_k_product_dim_grad_args args = {.dx = peri__data(dx),
                                         .dy = peri__data(g),
                                         .x = peri__data(x),
                                         .dtype = g->dtype,
                                         .n = n,
                                         .inner = inner};
    const int64_t lines = outer * inner, grain = peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(n, 1));
    status = node->kept[KEPT_RUNNING] ? PERI_LAUNCH(peri__device(x), running_product_grad, &args, lines, grain)
                                      : PERI_LAUNCH(peri__device(x), product_dim_grad, &args, lines, grain);
out:
    peri_tensor_release(g);
    peri_tensor_release(x);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab prod_vtab = {.name = "prod", .backward = products_backward};
static const peri__node_vtab cumprod_vtab = {.name = "cumprod", .backward = products_backward};

/** *out (new, of @shape) = the products along dimension @d of @x. */
static peri_status products(peri_tensor *x, int32_t d, bool running, int32_t ndim, const int64_t *shape,
                            peri_tensor **out)
{
    int64_t outer, n, inner;
    peri_tensor *flat, *y = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY(peri__contiguous_of(x, &flat));
    PERI_TRY_GOTO(peri__tensor_like(x, ndim, shape, &y), out);
    peri__around(flat, d, &outer, &n, &inner);
    peri_k_product_dim_args args = {
        .y = peri__data(y), .x = peri__data(flat), .dtype = x->dtype, .n = n, .inner = inner};
    const int64_t lines = outer * inner, grain = peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(n, 1));
    PERI_TRY_GOTO(running ? PERI_LAUNCH(peri__device(x), running_product, &args, lines, grain)
                          : PERI_LAUNCH(peri__device(x), product_dim, &args, lines, grain), out);
    PERI_TRY_GOTO(peri__attach(running ? &cumprod_vtab : &prod_vtab, &x, 1, &y, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, x);
        node->kept[KEPT_DIM] = d;
        node->kept[KEPT_RUNNING] = running;
    }
out:
    peri_tensor_release(flat);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** Check x and dim, and make products in a dtype that they can be made in. */
static peri_status products_of(const char *function, peri_tensor *x, int32_t dim, bool running, bool keepdim,
                               peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    int32_t d, back, ndim = 0;
    peri_tensor *wide, *y;
    PERI_TRY(ordered(function, x, &wide, &back));
    peri_status status = peri__along(function, wide, dim, &d);
    for (int32_t i = 0; i < wide->ndim && status >= 0; i++)
        if (i != d || running || keepdim) shape[ndim++] = i == d && !running ? 1 : wide->shape[i];
    if (status >= 0) status = products(wide, d, running, ndim, shape, &y);
    peri_tensor_release(wide);
    return status < 0 ? status : restored(y, dtype_back(x), out);
}

peri_status peri_op_prod(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **out)
{
    PERI_NEED(out);
    return products_of("peri_op_prod", x, dim, false, keepdim, out);
}

peri_status peri_op_running_product(peri_tensor *x, int32_t dim, peri_tensor **out)
{
    PERI_NEED(out);
    return products_of("peri_op_running_product", x, dim, true, true, out);
}

/* -- running sums -------------------------------------------------------------------------------------------------- */

static peri_status run_sums(peri_tensor *x, int32_t d, bool backwards, peri_tensor **out)
{
    peri_tensor *flat, *y;
    int64_t outer, n, inner;
    PERI_TRY(peri__contiguous_of(x, &flat));
    peri_status status = peri__tensor_like(x, x->ndim, x->shape, &y);
    if (status >= 0) {
        peri__around(flat, d, &outer, &n, &inner);
        peri_k_running_sum_args args = {.y = peri__data(y),
                                        .x = peri__data(flat),
                                        .dtype = x->dtype,
                                        .backwards = backwards,
                                        .n = n,
                                        .inner = inner};
        status = PERI_LAUNCH(peri__device(x), running_sum, &args, outer * inner,
                             peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(n, 1)));
        if (status < 0) peri_tensor_release(y);
        else *out = y;
    }
    peri_tensor_release(flat);
    return status;
}

static peri_status cumsum_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    return run_sums(grad_out[0], (int32_t)node->kept[KEPT_DIM], true, &grad_in[0]);
}

static const peri__node_vtab cumsum_vtab = {.name = "cumsum", .backward = cumsum_backward};

peri_status peri_op_running_sum(peri_tensor *x, int32_t dim, peri_tensor **out)
{
    static const char *const function = "peri_op_running_sum";
    peri_tensor *wide, *y;
    peri__node *node;
    int32_t d, back;
    PERI_NEED(out);
    PERI_TRY(ordered(function, x, &wide, &back));
    peri_status status = peri__along(function, wide, dim, &d);
    if (status >= 0) status = run_sums(wide, d, false, &y);
    if (status >= 0) {
        status = peri__attach(&cumsum_vtab, &wide, 1, &y, 1, &node);
        if (status < 0) peri_tensor_release(y);
        else if (node) node->kept[KEPT_DIM] = d;
    }
    peri_tensor_release(wide);
    return status < 0 ? status : restored(y, dtype_back(x), out);
}

/* -- sums of integers ---------------------------------------------------------------------------------------------- */

enum { SUM_BLOCK = 1024 }; /* rows that one thread adds up; their sums are added up after them */

/** *out (new, i64 [outer][blocks][inner]) = sums of blocks of @block rows of contiguous @x, which is taken as
 *  [outer][n][inner]. */
static peri_status sum_blocks(const peri_tensor *x, int64_t outer, int64_t n, int64_t block, int64_t inner,
                              peri_tensor **out)
{
    const int64_t blocks = peri__max(peri__ceil_div(n, block), 1), shape[3] = {outer, blocks, inner};
    PERI__HELD peri_tensor *y = NULL;
    PERI_TRY(peri_tensor_new(peri__device(x), PERI_I64, 3, shape, &y));
    peri_k_integer_sum_args args = {.dst = peri__data(y), .x = peri__data(x), .dtype = x->dtype, .n = n, .block = block,
                                    .blocks = blocks, .inner = inner};
    PERI_TRY(PERI_LAUNCH(peri__device(x), integer_sum, &args, peri__numel(y),
                         peri__ceil_div(PERI_ELEMENT_GRAIN, peri__min(block, peri__max(n, 1)))));
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/** *t (taken, contiguous) becomes its sum over the dimensions @first..@last, [outer][1][inner]. */
static peri_status sum_along(peri_tensor **t, const int64_t *shape, int32_t ndim, int32_t first, int32_t last)
{
    int64_t outer = 1, n = 1, inner = 1;
    for (int32_t d = 0; d < ndim; d++) *(d < first ? &outer : d > last ? &inner : &n) *= shape[d];
    for (bool done = false; !done; n = peri__max(peri__ceil_div(n, SUM_BLOCK), 1)) {
        PERI__HELD peri_tensor *x = *t;
        *t = NULL;
        done = n <= SUM_BLOCK;
        PERI_TRY(sum_blocks(x, outer, n, SUM_BLOCK, inner, t));
    }
    return PERI_OK;
}

static peri_status sum_integers(const char *function, peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim,
                                peri_tensor **out)
{
    uint32_t mask;
    int64_t left[PERI_MAX_DIMS], shape[PERI_MAX_DIMS];
    int32_t ndim = 0;
    PERI__HELD peri_tensor *t = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__mask_of(function, x, dims, n, &mask));
    PERI_TRY(peri__contiguous_of(x, &t));
    memcpy(left, x->shape, sizeof left);
    if (x->ndim == 0) PERI_TRY(sum_along(&t, left, 0, 0, 0)); /* a copy of its element */
    for (int32_t last = x->ndim - 1, first; last >= 0; last = first - 1) { /* neighbours are one dimension */
        first = last;
        if (!(mask >> last & 1)) continue;
        while (first > 0 && mask >> (first - 1) & 1) first--;
        PERI_TRY(sum_along(&t, left, x->ndim, first, last));
        for (int32_t d = first; d <= last; d++) left[d] = 1;
    }
    for (int32_t d = 0; d < x->ndim; d++)
        if (!(mask >> d & 1) || keepdim) shape[ndim++] = left[d];
    PERI_TRY(peri__shaped(&t, ndim, shape));
    *out = peri__hand_over(&t);
    return PERI_OK;
}

peri_status peri_op_sum(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, peri_tensor **out)
{
    static const char *const function = "peri_op_sum";
    PERI_TRY(peri__check_tensor(function, "x", x, -1, -1));
    const bool whole = x->dtype != PERI_F32 && x->dtype != PERI_F64 && !peri__is_16(x->dtype) && x->dtype < PERI_C64;
    if (whole) return sum_integers(function, x, dims, n, keepdim, out);
    return sum_of_dims(function, x, dims, n, keepdim, false, out);
}
