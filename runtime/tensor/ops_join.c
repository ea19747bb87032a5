/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_join.c: cat and stack, whose gradients are views of the upstream gradient: nothing is copied; and split, with one
 * gradient of all its parts.
 */
#include "tensor_internal.h"

#include <perilune/ops.h>

/** A window [start, start + size) of dimension @dim. */
static peri_status window(peri_tensor *t, int32_t dim, int64_t start, int64_t size, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[dim] = size;
    return peri__tensor_view(t, t->ndim, shape, t->stride, t->offset + start * t->stride[dim], out);
}

enum { KEPT_DIM };

/** state: the inputs' sizes along the dimension, and then their dtypes. */
static peri_status cat_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int64_t *size = node->state, *dtype = size + node->n_in;
    int64_t start = 0;
    for (int32_t i = 0; i < node->n_in; start += size[i++]) {
        peri_tensor *part;
        if (!peri__needs(node, i)) continue;
        PERI_TRY(window(grad_out[0], (int32_t)node->kept[KEPT_DIM], start, size[i], &part));
        peri_status status = peri__cast(part, (int32_t)dtype[i], &grad_in[i]);
        peri_tensor_release(part);
        PERI_TRY(status);
    }
    return PERI_OK;
}

static void cat_fini(peri__node *node)
{
    peri__free(node->state);
    node->state = NULL;
}

static const peri__node_vtab cat_vtab = {.name = "cat", .backward = cat_backward, .fini = cat_fini};

static peri_status check_cat(const char *function, peri_tensor *const *tensors, int32_t n, int32_t dim)
{
    char text[300];
    peri__words words, second;
    for (int32_t i = 1; i < n; i++) {
        peri_tensor *a = tensors[0], *b = tensors[i];
        bool same = peri__common_dtype((peri_tensor *[]){a, b}, 2) >= 0 && a->ndim == b->ndim;
        for (int32_t d = 0; same && d < a->ndim; d++) same = d == dim || a->shape[d] == b->shape[d];
        if (!same)
            return peri__fail(PERI_EINVAL, "%s: the 1st and %s are %s; they may differ in %s", function,
                              peri__place_text(i, "tensor", &second), peri__pair_text(a, b, text, sizeof text),
                              dim < 0 ? "nothing" : peri__dim_text(dim, &words));
        PERI_TRY(peri__check_same_device(function, a, b));
    }
    return PERI_OK;
}

/** Copy the tensors into one another's neighbourhood along @dim of a new tensor. */
static peri_status cat_copied(peri_tensor *const *tensors, int32_t n, int32_t dim, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS], start = 0;
    memcpy(shape, tensors[0]->shape, sizeof shape);
    for (int32_t i = 1; i < n; i++) shape[dim] += tensors[i]->shape[dim];
    peri_tensor *y, *part;
    PERI_TRY(peri_tensor_new(peri__device(tensors[0]), peri__common_dtype(tensors, n), tensors[0]->ndim, shape, &y));
    for (int32_t i = 0; i < n; i++) {
        peri_status status = window(y, dim, start, tensors[i]->shape[dim], &part);
        if (status >= 0) {
            status = peri_tensor_copy(part, tensors[i]);
            peri_tensor_release(part);
        }
        if (status < 0) {
            peri_tensor_release(y);
            return status;
        }
        start += tensors[i]->shape[dim];
    }
    *out = y;
    return PERI_OK;
}

static peri_status cat_recorded(const char *function, peri_tensor *const *tensors, int32_t n, int32_t dim,
                                peri_tensor **out)
{
    PERI_TRY(check_cat(function, tensors, n, dim));
    peri_tensor *y;
    PERI_TRY(cat_copied(tensors, n, dim, &y));
    peri__node *node = NULL;
    int64_t *sizes = NULL;
    peri_status status = PERI_OK;
    if (peri__recording(tensors, n)) {
        sizes = peri__alloc(sizeof *sizes * 2 * (size_t)n);
        status = sizes ? peri__record(&cat_vtab, tensors, n, &y, 1, &node) : PERI_ENOMEM;
    }
    if (status < 0) {
        peri__free(sizes);
        peri_tensor_release(y);
        return status;
    }
    if (node) {
        for (int32_t i = 0; i < n; i++) sizes[i] = tensors[i]->shape[dim], sizes[n + i] = tensors[i]->dtype;
        node->kept[KEPT_DIM] = dim;
        node->state = sizes;
    }
    *out = y;
    return PERI_OK;
}

peri_status peri_op_cat(peri_tensor *const *tensors, int32_t n, int32_t dim, peri_tensor **out)
{
    PERI_NEED(tensors);
    PERI_NEED(out);
    int32_t d;
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_op_cat: %d tensors, at least one is needed", n);
    PERI_TRY(peri__check_list("peri_op_cat", "the tensors", tensors, n));
    PERI_TRY(peri__dim("peri_op_cat", tensors[0], dim, &d));
    return cat_recorded("peri_op_cat", tensors, n, d, out);
}

peri_status peri_op_stack(peri_tensor *const *tensors, int32_t n, int32_t dim, peri_tensor **out)
{
    PERI_NEED(tensors);
    PERI_NEED(out);
    char text[128];
    peri__words words;
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_op_stack: %d tensors, at least one is needed", n);
    PERI_TRY(peri__check_list("peri_op_stack", "the tensors", tensors, n));
    const peri_tensor *first = tensors[0];
    int32_t ndim = first->ndim + 1, d = dim < 0 ? dim + ndim : dim;
    if (d < 0 || d >= ndim || ndim > PERI_MAX_DIMS)
        return peri__fail(
            PERI_EINVAL, "peri_op_stack: %s as a new one of tensors %s, which then have %d, allowed: up to %d in all",
            peri__dim_text(dim, &words), peri__tensor_text(first, text, sizeof text), ndim, PERI_MAX_DIMS);
    PERI_TRY(check_cat("peri_op_stack", tensors, n, -1));
    int64_t shape[PERI_MAX_DIMS];
    for (int32_t i = 0; i < ndim; i++) shape[i] = i < d ? first->shape[i] : i == d ? 1 : first->shape[i - 1];
    peri_tensor **wide = peri__alloc_zero(sizeof *wide * (size_t)n);
    if (!wide) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) status = peri_tensor_reshape(tensors[i], ndim, shape, &wide[i]);
    if (status >= 0) status = cat_recorded("peri_op_stack", wide, n, d, out);
    for (int32_t i = 0; i < n; i++) peri_tensor_release(wide[i]);
    peri__free(wide);
    return status;
}

/* -- cutting ------------------------------------------------------------------------------------------------------- */

/** state: the parts' sizes along the dimension. Parts without a gradient count as zeros. */
static peri_status split_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int64_t *size = node->state;
    const int32_t dim = (int32_t)node->kept[KEPT_DIM];
    const peri_tensor *any = NULL;
    int64_t shape[PERI_MAX_DIMS], start = 0;
    for (int32_t i = 0; i < node->n_out && !any; i++) any = grad_out[i];
    if (!any) return PERI_OK;
    memcpy(shape, any->shape, sizeof shape);
    shape[dim] = 0;
    for (int32_t i = 0; i < node->n_out; i++) shape[dim] += size[i];
    peri_tensor *whole, *part;
    PERI_TRY(peri__tensor_like(any, any->ndim, shape, &whole));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < node->n_out && status >= 0; start += size[i++]) {
        status = window(whole, dim, start, size[i], &part);
        if (status < 0) break;
        status = grad_out[i] ? peri_tensor_copy(part, grad_out[i]) : peri_tensor_fill(part, 0);
        peri_tensor_release(part);
    }
    if (status < 0) peri_tensor_release(whole);
    else grad_in[0] = whole;
    return status;
}

static const peri__node_vtab split_vtab = {.name = "split", .backward = split_backward, .fini = cat_fini};

static peri_status check_split(const peri_tensor *x, const int64_t *sizes, int32_t n, int32_t dim)
{
    char text[128];
    peri__words words;
    int64_t left = x->shape[dim];
    for (int32_t i = 0; i < n; i++) {
        if (sizes[i] < 0 || sizes[i] > left)
            return peri__fail(PERI_ERANGE,
                              "peri_op_split: sizes[%d] is %lld, allowed: 0..%lld, what is left of %s of %s", i,
                              (long long)sizes[i], (long long)left, peri__dim_text(dim, &words),
                              peri__tensor_text(x, text, sizeof text));
        left -= sizes[i];
    }
    if (left)
        return peri__fail(PERI_ERANGE, "peri_op_split: the sizes add up to %lld, %s of %s is %lld",
                          (long long)(x->shape[dim] - left), peri__dim_text(dim, &words),
                          peri__tensor_text(x, text, sizeof text), (long long)x->shape[dim]);
    return PERI_OK;
}

static peri_status record_split(peri_tensor *x, const int64_t *sizes, int32_t n, int32_t dim, peri_tensor *const *parts)
{
    const size_t bytes = sizeof *sizes * (size_t)n;
    int64_t *copy = peri__alloc(bytes);
    if (!copy) return PERI_ENOMEM;
    memcpy(copy, sizes, bytes);
    peri__node *node;
    peri_status status = peri__record(&split_vtab, &x, 1, parts, n, &node);
    if (status < 0) {
        peri__free(copy);
        return status;
    }
    node->kept[KEPT_DIM] = dim;
    node->state = copy;
    return PERI_OK;
}

peri_status peri_op_split(peri_tensor *x, const int64_t *sizes, int32_t n, int32_t dim, peri_tensor **out)
{
    PERI_NEED(x);
    PERI_NEED(sizes);
    PERI_NEED(out);
    int32_t d, made = 0;
    int64_t start = 0;
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_op_split: %d parts, at least one is needed", n);
    PERI_TRY(peri__dim("peri_op_split", x, dim, &d));
    PERI_TRY(check_split(x, sizes, n, d));
    peri_status status = PERI_OK;
    for (; made < n && status >= 0; made += status >= 0) {
        status = window(x, d, start, sizes[made], &out[made]);
        start += sizes[made];
    }
    if (status >= 0 && peri__recording(&x, 1)) status = record_split(x, sizes, n, d, out);
    while (status < 0 && made > 0) peri_tensor_release(out[--made]);
    return status;
}
