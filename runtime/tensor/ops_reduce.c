/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_reduce.c: sums and means over dimensions, the largest element of a dimension.
 */
#include "internal.h"

#include <perilune/ops.h>

/* -- sum and mean ---------------------------------------------------------------------------------------------------------------- */

/** The gradient is repeated. number: the scale; integer: the input's ndim and shape, the mask. */
static peri_status sum_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    int32_t ndim = (int32_t)node->integer[0];
    const int64_t *shape = node->integer + 1;
    uint32_t mask = (uint32_t)node->integer[1 + PERI_MAX_DIMS];
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

static peri_status sum_wide(const char *function, peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, bool mean,
                            peri_tensor **out)
{
    PERI_TRY(peri__check_float(function, "x", x));
    if (!out || (n > 0 && !dims)) return peri__fail(PERI_EINVAL, "%s: %s is missing", function, out ? "dims" : "out");
    uint32_t mask = n ? 0 : (1u << x->ndim) - 1;
    for (int32_t i = 0; i < n; i++) {
        int32_t d;
        peri__words words;
        PERI_TRY(peri__dim(function, x, dims[i], &d));
        if (mask >> d & 1) return peri__fail(PERI_EINVAL, "%s: %s is named twice", function, peri__dim_text(d, &words));
        mask |= 1u << d;
    }
    int64_t shape[PERI_MAX_DIMS], count = 1;
    int32_t ndim = 0;
    for (int32_t d = 0; d < x->ndim; d++) {
        bool reduced = mask >> d & 1;
        if (reduced) count *= x->shape[d];
        if (!reduced || keepdim) shape[ndim++] = reduced ? 1 : x->shape[d];
    }
    double scale = mean ? 1 / (double)count : 1; /* the mean of nothing is NaN: 0 * inf */
    peri_tensor *kept, *y;
    peri__node *node;
    PERI_TRY(peri__reduce(x, mask, scale, &kept));
    peri_status status = peri__tensor_view(kept, ndim, shape, NULL, kept->offset, &y);
    peri_tensor_release(kept);
    PERI_TRY(status);
    status = peri__attach(&sum_vtab, &x, 1, &y, 1, &node);
    if (status < 0) {
        peri_tensor_release(y);
        return status;
    }
    if (node) {
        node->number[0] = scale;
        node->integer[0] = x->ndim;
        memcpy(node->integer + 1, x->shape, sizeof x->shape);
        node->integer[1 + PERI_MAX_DIMS] = mask;
    }
    *out = y;
    return PERI_OK;
}

static peri_status sum(const char *function, peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, bool mean,
                       peri_tensor **out)
{
    peri__operands o;
    PERI_TRY(peri__widen(&o, mean ? PERI__IN_ANY : PERI__IN_F32, &x, 1));
    return peri__narrow(&o, sum_wide(function, o.in[0], dims, n, keepdim, mean, out ? &o.out : NULL), out);
}

peri_status peri_op_sum(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, peri_tensor **out)
{
    return sum("peri_op_sum", x, dims, n, keepdim, false, out);
}

peri_status peri_op_mean(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, peri_tensor **out)
{
    return sum("peri_op_mean", x, dims, n, keepdim, true, out);
}

/* -- means over ranks ------------------------------------------------------------------------------------------------------------- */

static peri_status check_sum(const char *function, const peri_tensor *sum)
{
    char text[128];
    PERI_TRY(peri__check_float(function, "sum", sum));
    if (peri__numel(sum) == 1) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: sum is %s, wanted one element", function, peri__tensor_text(sum, text, sizeof text));
}

peri_status peri_op_mean_parts(peri_tensor *sum, peri_tensor *count, double number, peri_tensor **out)
{
    static const char *const function = "peri_op_mean_parts";
    PERI_NEED(out);
    PERI_TRY(check_sum(function, sum));
    char text[128];
    int64_t two = 2;
    peri_tensor *n = NULL, *parts = NULL;
    peri_status status;
    if (count) {
        PERI_TRY(peri__check_same_device(function, sum, count));
        if (peri__numel(count) != 1)
            return peri__fail(PERI_EINVAL, "%s: count is %s, wanted one element", function, peri__tensor_text(count, text, sizeof text));
        PERI_TRY(peri_tensor_new(peri__device(count), PERI_F64, count->ndim, count->shape, &n));
        PERI_TRY_GOTO(peri_tensor_copy(n, count), out);
    }
    PERI_TRY_GOTO(peri_tensor_new(peri__device(sum), PERI_F64, 1, &two, &parts), out);
    peri_k_mean_args args = {.parts = peri__data(parts), .sum = peri__data(sum), .count = n ? peri__data(n) : NULL, .dtype = PERI_F64,
                             .sum_dtype = sum->dtype, .number = number};
    status = PERI_LAUNCH(peri__device(sum), mean, &args, 1, 1);
out:
    peri_tensor_release(n);
    if (status < 0) peri_tensor_release(parts);
    else *out = parts;
    return status;
}

/** saved: the scale. integer: the ndim and shape of the sum, sizes of 1. */
static peri_status mean_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g;
    PERI_TRY(peri__binary("mean_of backward", PERI_BINARY_MUL, grad_out[0], node->saved[0], &g));
    peri_status status = peri__tensor_view(g, (int32_t)node->integer[0], node->integer + 1, NULL, g->offset, &grad_in[0]);
    peri_tensor_release(g);
    return status;
}

static const peri__node_vtab mean_vtab = {.name = "mean_of", .backward = mean_backward};

peri_status peri_op_mean_of(peri_tensor *sum, peri_tensor *parts, double number, int32_t ranks, peri_tensor **out)
{
    static const char *const function = "peri_op_mean_of";
    PERI_NEED(out);
    PERI_TRY(check_sum(function, sum));
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
    peri_k_mean_args args = {.value = peri__data(value), .scale = peri__data(scale), .sum = parts ? peri__data(parts) : peri__data(sum),
                             .count = parts ? both + 1 : NULL, .dtype = sum->dtype, .sum_dtype = parts ? PERI_F64 : sum->dtype,
                             .number = number, .ranks = ranks};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(sum), mean, &args, 1, 1), out);
    PERI_TRY_GOTO(peri__attach(&mean_vtab, &sum, 1, &value, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, scale);
        node->integer[0] = sum->ndim;
        memcpy(node->integer + 1, sum->shape, sizeof sum->shape);
    }
out:
    peri_tensor_release(scale);
    if (status < 0) peri_tensor_release(value);
    else *out = value;
    return status;
}

/* -- max ----------------------------------------------------------------------------------------------------------------------- */

/** saved: the places. integer: dim, then the input's ndim and shape. */
static peri_status max_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g, *dx = NULL;
    int64_t outer, n, inner;
    peri_status status;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    PERI_TRY_GOTO(peri__tensor_like(g, (int32_t)node->integer[1], node->integer + 2, &dx), out);
    peri__around(dx, (int32_t)node->integer[0], &outer, &n, &inner);
    peri_k_max_dim_grad_args args = {.dx = peri__data(dx), .dy = peri__data(g), .indices = peri__data(node->saved[0]), .dtype = g->dtype,
                                     .n = n, .inner = inner};
    status = PERI_LAUNCH(peri__device(g), max_dim_grad, &args, outer * inner, peri__ceil_div(PERI_ELEMENT_GRAIN, n));
out:
    peri_tensor_release(g);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab max_vtab = {.name = "max", .backward = max_backward};

static peri_status max(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values, peri_tensor **indices)
{
    char text[128];
    peri__words words;
    int32_t d, ndim = 0;
    PERI_TRY(peri__check_float("peri_op_max", "x", x));
    PERI_TRY(peri__dim("peri_op_max", x, dim, &d));
    if (x->shape[d] == 0)
        return peri__fail(PERI_EINVAL, "peri_op_max: %s of %s is empty", peri__dim_text(d, &words),
                          peri__tensor_text(x, text, sizeof text));
    int64_t shape[PERI_MAX_DIMS], outer, n, inner;
    for (int32_t i = 0; i < x->ndim; i++)
        if (i != d || keepdim) shape[ndim++] = i == d ? 1 : x->shape[i];
    peri__around(x, d, &outer, &n, &inner);
    peri_tensor *flat = NULL, *value = NULL, *index = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(x, &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(x, ndim, shape, &value), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(x), PERI_I64, ndim, shape, &index), out);
    peri_k_max_dim_args args = {.values = peri__data(value), .indices = peri__data(index), .x = peri__data(flat), .dtype = x->dtype,
                                .n = n, .inner = inner};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), max_dim, &args, outer * inner, peri__ceil_div(PERI_ELEMENT_GRAIN, n)), out);
    PERI_TRY_GOTO(peri__attach(&max_vtab, &x, 1, &value, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, index);
        node->integer[0] = d;
        node->integer[1] = x->ndim;
        memcpy(node->integer + 2, x->shape, sizeof x->shape);
    }
out:
    peri_tensor_release(flat);
    if (status >= 0 && indices) *indices = index;
    else peri_tensor_release(index);
    if (status >= 0) *values = value;
    else peri_tensor_release(value);
    return status;
}

peri_status peri_op_max(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values, peri_tensor **indices)
{
    PERI_NEED(values);
    peri__operands o;
    peri_tensor *index = NULL;
    PERI_TRY(peri__widen(&o, PERI__IN_ANY, &x, 1));
    peri_status status = peri__narrow(&o, max(o.in[0], dim, keepdim, &o.out, &index), values);
    if (status >= 0 && indices) *indices = index;
    else peri_tensor_release(index);
    return status;
}
