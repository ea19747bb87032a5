/* SPDX-License-Identifier: Apache-2.0
 *
 * views.c: what looks at the elements of a tensor in another way, or copies them into another dtype or device:
 * recorded.
 */
#include "pinned.h"

enum { KEPT_OFFSET, KEPT_STRIDES }; /* of view: those that it would have in a contiguous base */
enum { KEPT_A, KEPT_B };             /* of transpose: dimensions */
enum { KEPT_DTYPE };                 /* of to: the input's */

/** The gradient of every view: put it back where the view looked. shape: the base's. */
static peri_status view_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *base, *window = NULL;
    PERI_TRY(peri__tensor_like(grad_out[0], node->shape[0].ndim, node->shape[0].size, &base));
    peri_status status = peri__tensor_zero(base);
    if (status >= 0) status = peri__tensor_view(base, grad_out[0]->ndim, grad_out[0]->shape, node->kept + KEPT_STRIDES,
                                              node->kept[KEPT_OFFSET], &window);
    if (status >= 0) status = peri_tensor_copy(window, grad_out[0]);
    peri_tensor_release(window);
    if (status < 0) peri_tensor_release(base);
    else grad_in[0] = base;
    return status;
}

static const peri__node_vtab view_vtab = {.name = "view", .backward = view_backward};

/** Strides by which the elements of @t, in their order, are those of @shape; false: there are none. */
static bool strides_as(const peri_tensor *t, const peri__shape *shape, int64_t *stride)
{
    int32_t d = shape->ndim - 1;
    for (int32_t last = t->ndim - 1; last >= 0;) { /* dimensions first..last of @t are apart as if they were one */
        int32_t first = last;
        int64_t left = t->shape[last], step = t->stride[last];
        for (; first > 0 && t->stride[first - 1] == t->shape[first] * t->stride[first]; first--)
            left *= t->shape[first - 1];
        for (; d >= 0 && left % shape->size[d] == 0 && (left > 1 || shape->size[d] == 1); d--) {
            stride[d] = step;
            step *= shape->size[d];
            left /= shape->size[d];
        }
        if (left != 1) return false;
        last = first - 1;
    }
    return d < 0;
}

/** reshape's gradient is a reshape. shape: the base's. A window of a gradient stays one where it can. */
static peri_status reshape_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *grad = grad_out[0];
    const peri__shape *shape = &node->shape[0];
    int64_t stride[PERI_MAX_DIMS];
    if (peri__numel(grad) > 0 && strides_as(grad, shape, stride))
        return peri__tensor_view(grad, shape->ndim, shape->size, stride, grad->offset, &grad_in[0]);
    bool before = peri__grad_swap(false);
    peri_status status = peri_tensor_reshape(grad, shape->ndim, shape->size, &grad_in[0]);
    peri__grad_swap(before);
    return status;
}

static const peri__node_vtab reshape_vtab = {.name = "reshape", .backward = reshape_backward};

/** transpose's gradient is the same transpose. */
static peri_status transpose_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    bool before = peri__grad_swap(false);
    peri_status status =
        peri_tensor_transpose(grad_out[0], (int32_t)node->kept[KEPT_A], (int32_t)node->kept[KEPT_B], &grad_in[0]);
    peri__grad_swap(before);
    return status;
}

static const peri__node_vtab transpose_vtab = {.name = "transpose", .backward = transpose_backward};

/** Record @view of @base; on failure release it. @kept: n numbers, those of the vtab's KEPT_*. */
static peri_status record_view(const peri__node_vtab *vtab, peri_tensor *base, peri_tensor *view, const int64_t *kept,
                               int32_t n, peri_tensor **out)
{
    if (peri__recording(&base, 1)) {
        peri__node *node;
        peri_status status = peri__record(vtab, &base, 1, &view, 1, &node);
        if (status < 0) {
            peri_tensor_release(view);
            return status;
        }
        node->shape[0] = peri__shape_of(base);
        if (n) memcpy(node->kept, kept, sizeof *kept * (size_t)n);
    }
    *out = view;
    return PERI_OK;
}

peri_status peri_tensor_reshape(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    if (ndim > 0) PERI_NEED(shape);
    char text[128];
    int64_t wanted[PERI_MAX_DIMS], known = 1, n = peri__numel(t);
    peri__words words;
    int32_t open = -1;
    if (ndim < 0 || ndim > PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "peri_tensor_reshape: %d dimensions, allowed: 0..%d", ndim, PERI_MAX_DIMS);
    for (int32_t d = 0; d < ndim; d++) {
        wanted[d] = shape[d];
        if (shape[d] == -1 && open < 0) open = d;
        else if (shape[d] < 0)
            return peri__fail(PERI_EINVAL, "peri_tensor_reshape: the size %lld of %s", (long long)shape[d],
                              peri__dim_text(d, &words));
        else if (__builtin_mul_overflow(known, shape[d], &known))
            return peri__fail(PERI_EINVAL, "peri_tensor_reshape: more than 2^63 elements from %s on, of size %lld",
                              peri__dim_text(d, &words), (long long)shape[d]);
    }
    if (open >= 0 && known == 0)
        return peri__fail(PERI_EINVAL, "peri_tensor_reshape: %s to a size of -1 beside 0: it may be any number; name "
                          "it",
                          peri__tensor_text(t, text, sizeof text));
    if (open >= 0) wanted[open] = n / known;
    if (open >= 0) known *= wanted[open];
    if (known != n)
        return peri__fail(PERI_EINVAL, "peri_tensor_reshape: %s has %lld elements, the new shape %lld",
                          peri__tensor_text(t, text, sizeof text), (long long)n, (long long)known);
    peri_tensor *flat, *view;
    PERI_TRY(peri__contiguous_of(t, &flat));
    peri_status status = peri__tensor_view(flat, ndim, wanted, NULL, flat->offset, &view);
    peri_tensor_release(flat);
    PERI_TRY(status);
    return record_view(&reshape_vtab, t, view, NULL, 0, out);
}

peri_status peri_tensor_transpose(peri_tensor *t, int32_t a, int32_t b, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    int32_t x, y;
    PERI_TRY(peri__along("peri_tensor_transpose", t, a, &x));
    PERI_TRY(peri__along("peri_tensor_transpose", t, b, &y));
    int64_t shape[PERI_MAX_DIMS], stride[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    memcpy(stride, t->stride, sizeof stride);
    shape[x] = t->shape[y], shape[y] = t->shape[x];
    stride[x] = t->stride[y], stride[y] = t->stride[x];
    peri_tensor *view;
    PERI_TRY(peri__tensor_view(t, t->ndim, shape, stride, t->offset, &view));
    return record_view(&transpose_vtab, t, view, (int64_t[]){x, y}, 2, out);
}

peri_status peri__exchange_last(peri_tensor *t, int32_t d, peri_tensor **out)
{
    if (d != t->ndim - 1) return peri_tensor_transpose(t, d, -1, out);
    peri_tensor_retain(*out = t);
    return PERI_OK;
}

peri_status peri_tensor_slice(peri_tensor *t, int32_t dim, int64_t start, int64_t stop, int64_t step, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    char text[128];
    peri__words words;
    int32_t d;
    PERI_TRY(peri__dim("peri_tensor_slice", t, dim, &d));
    if (start < 0 || stop < start || stop > t->shape[d] || step < 1)
        return peri__fail(
            PERI_ERANGE,
            "peri_tensor_slice: [%lld, %lld) by %lld of %s of %s, allowed: 0 <= start <= stop <= %lld, step >= 1",
            (long long)start, (long long)stop, (long long)step, peri__dim_text(d, &words),
            peri__tensor_text(t, text, sizeof text), (long long)t->shape[d]);
    int64_t shape[PERI_MAX_DIMS], stride[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    memcpy(stride, t->stride, sizeof stride);
    shape[d] = peri__ceil_div(stop - start, step);
    stride[d] *= step;
    peri_tensor *view;
    PERI_TRY(peri__tensor_view(t, t->ndim, shape, stride, t->offset + start * t->stride[d], &view));
    /* The gradient lands in a fresh contiguous base: same slice of it. */
    int64_t kept[KEPT_STRIDES + PERI_MAX_DIMS] = {0}, dense = 1;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        kept[KEPT_STRIDES + i] = i == d ? dense * step : dense;
        if (i == d) kept[KEPT_OFFSET] = start * dense;
        dense *= peri__max(t->shape[i], 1);
    }
    return record_view(&view_vtab, t, view, kept, KEPT_STRIDES + PERI_MAX_DIMS, out);
}

peri_status peri_tensor_select(peri_tensor *t, int32_t dim, int64_t index, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    char text[128];
    peri__words words;
    int32_t d;
    PERI_TRY(peri__dim("peri_tensor_select", t, dim, &d));
    const int64_t size = t->shape[d], at = index < 0 ? index + size : index;
    if (size == 0)
        return peri__fail(PERI_ERANGE, "peri_tensor_select: element %lld of %s of %s, which is empty", (long long)index,
                          peri__dim_text(d, &words), peri__tensor_text(t, text, sizeof text));
    if (at < 0 || at >= size)
        return peri__fail(PERI_ERANGE, "peri_tensor_select: element %lld of %s of %s, allowed: %lld..%lld",
                          (long long)index, peri__dim_text(d, &words), peri__tensor_text(t, text, sizeof text),
                          (long long)-size, (long long)size - 1);
    int64_t shape[PERI_MAX_DIMS], stride[PERI_MAX_DIMS], kept[KEPT_STRIDES + PERI_MAX_DIMS] = {0}, dense = 1;
    /* the gradient lands in a contiguous base: the strides of the same window of it */
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        if (i != d) {
            const int32_t to = i < d ? i : i - 1;
            shape[to] = t->shape[i], stride[to] = t->stride[i];
            kept[KEPT_STRIDES + to] = dense;
        } else {
            kept[KEPT_OFFSET] = at * dense;
        }
        dense *= peri__max(t->shape[i], 1);
    }
    peri_tensor *view;
    PERI_TRY(peri__tensor_view(t, t->ndim - 1, shape, stride, t->offset + at * t->stride[d], &view));
    return record_view(&view_vtab, t, view, kept, KEPT_STRIDES + PERI_MAX_DIMS, out);
}

/** A view with other dimensions of size 1: its gradient is reshaped. */
static peri_status view_as(peri_tensor *t, int32_t ndim, const int64_t *shape, const int64_t *stride, peri_tensor **out)
{
    peri_tensor *view;
    PERI_TRY(peri__tensor_view(t, ndim, shape, stride, t->offset, &view));
    return record_view(&reshape_vtab, t, view, NULL, 0, out);
}

peri_status peri_tensor_squeeze(peri_tensor *t, int32_t dim, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    int32_t d, n = 0;
    PERI_TRY(peri__along("peri_tensor_squeeze", t, dim, &d));
    int64_t shape[PERI_MAX_DIMS], stride[PERI_MAX_DIMS];
    for (int32_t i = 0; i < t->ndim; i++) {
        if (i == d && t->shape[i] == 1) continue;
        shape[n] = t->shape[i], stride[n++] = t->stride[i];
    }
    return view_as(t, n, shape, stride, out);
}

peri_status peri_tensor_unsqueeze(peri_tensor *t, int32_t dim, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    char text[128];
    const int32_t n = t->ndim + 1, d = dim < 0 ? dim + n : dim;
    if (n > PERI_MAX_DIMS || d < 0 || d >= n)
        return peri__fail(PERI_EINVAL,
                          "peri_tensor_unsqueeze: a new dimension %d of %s, allowed: %d of them, and at most %d in all",
                          dim, peri__tensor_text(t, text, sizeof text), n, PERI_MAX_DIMS);
    int64_t shape[PERI_MAX_DIMS], stride[PERI_MAX_DIMS];
    for (int32_t i = 0, from = 0; i < n; i++) {
        shape[i] = i == d ? 1 : t->shape[from];
        stride[i] = i == d ? 1 : t->stride[from];
        from += i != d;
    }
    return view_as(t, n, shape, stride, out);
}

peri_status peri_tensor_contiguous(peri_tensor *t, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    if (peri__contiguous(t)) {
        peri_tensor_retain(t);
        *out = t;
        return PERI_OK;
    }
    return peri_tensor_reshape(t, t->ndim, t->shape, out);
}

/** A cast's gradient is the cast back. The device comes from the gradient's way back: see `to`. */
static peri_status to_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    bool before = peri__grad_swap(false);
    peri_status status = peri_tensor_to(grad_out[0], (int32_t)node->kept[KEPT_DTYPE], node->state, &grad_in[0]);
    peri__grad_swap(before);
    return status;
}

static const peri__node_vtab to_vtab = {.name = "to", .backward = to_backward};

peri_status peri_tensor_clone(peri_tensor *t, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    peri_tensor *copy;
    peri__node *node;
    PERI_TRY(peri__tensor_like(t, t->ndim, t->shape, &copy));
    peri_status status = peri_tensor_copy(copy, t);
    if (status >= 0) status = peri__attach(&to_vtab, &t, 1, &copy, 1, &node);
    if (status >= 0 && node) {
        node->kept[KEPT_DTYPE] = t->dtype;
        node->state = peri__device(t);
    }
    if (status < 0) peri_tensor_release(copy);
    else *out = copy;
    return status;
}

/** @queued: peri_tensor_upload. */
static peri_status to(peri_tensor *t, int32_t dtype, peri_device *device, bool queued, peri_tensor **out)
{
    if (dtype == -1) dtype = t->dtype;
    if (!device) device = peri__device(t);
    if (dtype == t->dtype && device == peri__device(t)) {
        peri_tensor_retain(t);
        *out = t;
        return PERI_OK;
    }
    peri_tensor *copy;
    PERI_TRY(peri_tensor_new(device, dtype, t->ndim, t->shape, &copy));
    peri_status status = PERI_OK;
    bool done = false;
    if (queued && dtype == t->dtype && peri__contiguous(t)) status = peri__pinned_copy(copy, t, &done);
    if (status >= 0 && !done) status = peri_tensor_copy(copy, t);
    peri__node *node;
    if (status >= 0 && peri__is_float(dtype) && peri__recording(&t, 1)) {
        status = peri__record(&to_vtab, &t, 1, &copy, 1, &node);
        if (status >= 0) {
            node->kept[KEPT_DTYPE] = t->dtype;
            node->state = peri__device(t);
        }
    }
    if (status < 0) peri_tensor_release(copy);
    else *out = copy;
    return status;
}

peri_status peri_tensor_to(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    return to(t, dtype, device, false, out);
}

peri_status peri_tensor_upload(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    return to(t, dtype, device, true, out);
}
