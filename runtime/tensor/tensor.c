/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor.c: tensors, copies between layouts, dtypes and devices, reading and writing from the host. Nothing here is
 * recorded: see views.c.
 */
#include "../base/floats.h"
#include "report.h"
#include "../../kernels/convert.h"

#include <math.h>
#include <stdio.h>

const char *peri__tensor_text(const peri_tensor *t, char *buffer, size_t len)
{
    size_t used = (size_t)snprintf(buffer, len, "%s [", peri_dtype_name(t->dtype));
    for (int32_t d = 0; d < t->ndim && used < len; d++)
        used += (size_t)snprintf(buffer + used, len - used, d ? ", %lld" : "%lld", (long long)t->shape[d]);
    if (used < len) snprintf(buffer + used, len - used, "]");
    return buffer;
}

const char *peri__place_text(int32_t place, const char *what, peri__words *words)
{
    int64_t n = place < 0 ? -(int64_t)place : (int64_t)place + 1;
    int64_t last = n / 10 % 10 == 1 ? 0 : n % 10; /* 11th, 12th, 13th */
    snprintf(words->text, sizeof words->text, "the %lld%s %s%s", (long long)n,
             last == 1 ? "st" : last == 2 ? "nd" : last == 3 ? "rd" : "th", what, place < 0 ? " from the end" : "");
    return words->text;
}

const char *peri__dim_text(int32_t dim, peri__words *words) { return peri__place_text(dim, "dimension", words); }

bool peri__contiguous(const peri_tensor *t)
{
    int64_t expected = 1;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] == 0) return true;
        if (t->shape[d] != 1 && t->stride[d] != expected) return false;
        expected *= t->shape[d];
    }
    return true;
}

/* -- checks -------------------------------------------------------------------------------------------------------- */

peri_status peri__check_tensor(const char *function, const char *what, const peri_tensor *t, int32_t dtype,
                               int32_t ndim)
{
    char text[128];
    if (peri__border_refuses(function)) return PERI_EINVAL;
    if (!t) return peri__fail(PERI_EINVAL, "%s: %s is missing", function, what);
    if (dtype >= 0 && t->dtype != dtype)
        return peri__fail(PERI_EINVAL, "%s: %s is %s, wanted %s", function, what,
                          peri__tensor_text(t, text, sizeof text), peri_dtype_name(dtype));
    if (ndim >= 0 && t->ndim != ndim)
        return peri__fail(PERI_EINVAL, "%s: %s is %s, wanted %d dimensions", function, what,
                          peri__tensor_text(t, text, sizeof text), ndim);
    return PERI_OK;
}

peri_status peri__check_float(const char *function, const char *what, const peri_tensor *t)
{
    PERI_TRY(peri__check_tensor(function, what, t, -1, -1));
    if (t->dtype == PERI_F32 || t->dtype == PERI_F64) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is %s, allowed: f32, f64%s", function, what, peri_dtype_name(t->dtype),
                      peri__is_integer(t->dtype) ? "; cast it (in Lua t:to \"f32\")" : "");
}

peri_status peri__check_real(const char *function, const char *what, const peri_tensor *t)
{
    PERI_TRY(peri__check_tensor(function, what, t, -1, -1));
    if (peri__is_float(t->dtype)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is %s, allowed: f32, f64, f16, bf16%s", function, what,
                      peri_dtype_name(t->dtype), peri__is_integer(t->dtype) ? "; cast it (in Lua t:to \"f32\")" : "");
}

peri_status peri__check_same_device(const char *function, const peri_tensor *a, const peri_tensor *b)
{
    if (peri__device(a) == peri__device(b)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: tensors of different devices, %s and %s", function, peri__device(a)->name,
                      peri__device(b)->name);
}

peri_status peri__check_list(const char *function, const char *what, const void *list, int32_t n)
{
    const void *const *objects = list;
    if (n > 0 && !objects) return peri__fail(PERI_EINVAL, "%s: %s are missing", function, what);
    for (int32_t i = 0; i < n; i++)
        if (!objects[i]) return peri__fail(PERI_EINVAL, "%s: number %d of %s is missing", function, i + 1, what);
    return PERI_OK;
}

peri_status peri__dim(const char *function, const peri_tensor *t, int32_t dim, int32_t *out)
{
    char text[128];
    peri__words words;
    int32_t d = dim < 0 ? dim + t->ndim : dim;
    if (d < 0 || d >= t->ndim)
        return peri__fail(PERI_EINVAL, "%s: %s of %s, which has %d", function, peri__dim_text(dim, &words),
                          peri__tensor_text(t, text, sizeof text), t->ndim);
    *out = d;
    return PERI_OK;
}

peri_status peri__along(const char *function, const peri_tensor *t, int32_t dim, int32_t *out)
{
    *out = 0;
    return t->ndim == 0 && (dim == 0 || dim == -1) ? PERI_OK : peri__dim(function, t, dim, out);
}

void peri__around(const peri_tensor *t, int32_t dim, int64_t *outer, int64_t *n, int64_t *inner)
{
    *outer = *inner = 1;
    *n = peri__along_size(t, dim);
    for (int32_t d = 0; d < dim; d++) *outer *= t->shape[d];
    for (int32_t d = dim + 1; d < t->ndim; d++) *inner *= t->shape[d];
}

peri_status peri__shape_bytes(const char *function, int32_t dtype, int32_t ndim, const int64_t *shape, int64_t *bytes)
{
    if (peri_dtype_size(dtype) == 0) return peri__fail(PERI_EINVAL, "%s: %d is no dtype", function, dtype);
    if (ndim < 0 || ndim > PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "%s: %d dimensions, allowed: 0..%d", function, ndim, PERI_MAX_DIMS);
    if (ndim > 0 && !shape) return peri__fail(PERI_EINVAL, "%s: shape is missing", function);
    int64_t n = peri_dtype_size(dtype), nonzero = n;
    peri__words words;
    for (int32_t d = 0; d < ndim; d++) {
        if (shape[d] < 0)
            return peri__fail(PERI_EINVAL, "%s: the size %lld of %s is negative", function, (long long)shape[d],
                              peri__dim_text(d, &words));
        if (shape[d] > 0 && nonzero > INT64_MAX / 2 / shape[d])
            return peri__fail(PERI_EINVAL, "%s: more than 2^62 bytes from %s on, of size %lld", function,
                              peri__dim_text(d, &words), (long long)shape[d]);
        if (shape[d] > 0) nonzero *= shape[d];
        n *= shape[d];
    }
    *bytes = n;
    return PERI_OK;
}

/* -- making -------------------------------------------------------------------------------------------------------- */

/** @t is contiguous. */
static void set_shape(peri_tensor *t, int32_t ndim, const int64_t *shape)
{
    int64_t stride = 1;
    t->ndim = ndim;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        t->shape[d] = shape[d];
        t->stride[d] = stride;
        stride *= peri__max(shape[d], 1);
    }
}

/** Make a tensor of @t, which is zeros. */
static peri_tensor *tensor_init(peri_tensor *t, peri__storage *s, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    peri__refs_init(&t->refs);
    t->storage = s;
    t->dtype = dtype;
    set_shape(t, ndim, shape);
    peri__object_count(1);
    return t;
}

/** A view of @s, whose reference it takes; NULL: no memory. */
static peri_tensor *tensor_of(peri__storage *s, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    peri_tensor *t = peri__alloc_zero(sizeof *t);
    return t ? tensor_init(t, s, dtype, ndim, shape) : NULL;
}

peri_status peri__tensor_placed(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, bool mapped,
                                peri_tensor **out)
{
    int64_t bytes = 0;
    if (!device) return peri__fail(PERI_EINVAL, "peri_tensor_new: no device");
    PERI_TRY(peri__shape_bytes("peri_tensor_new", dtype, ndim, shape, &bytes));
    peri__storage *s;
    PERI_TRY(peri__storage_new(device, bytes, mapped, &s));
    *out = tensor_init(&s->first, s, dtype, ndim, shape);
    return PERI_OK;
}

peri_status peri__tensor_lent(peri_device *device, int32_t dtype, int64_t n, void *data, void (*give_back)(void *data),
                              peri_tensor **out)
{
    peri__storage *s;
    PERI_TRY(peri__storage_lent(device, n * peri_dtype_size(dtype), data, give_back, &s));
    *out = tensor_init(&s->first, s, dtype, 1, &n);
    return PERI_OK;
}

static void release_nothing(void *ctx, void *data) { (void)ctx, (void)data; }

peri_status peri__tensor_host(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, void *data,
                              void (*release)(void *ctx, void *data), void *ctx, peri_tensor **out)
{
    static const char function[] = "peri_host_tensor";
    int64_t bytes = 0;
    if (!device) return peri__fail(PERI_EINVAL, "%s: device is missing", function);
    PERI_TRY(peri__shape_bytes(function, dtype, ndim, shape, &bytes));
    if (!peri__immediate(device))
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: device %s has a memory of its own, or works in the host's at times of its own; allowed: "
                          "cpu (peri_tensor_to copies from there)",
                          function, device->name);
    const int64_t element = peri_dtype_size(dtype),
                  unit = dtype == PERI_C64 || dtype == PERI_C128 ? element / 2 : element;
    if (!data && bytes > 0) return peri__fail(PERI_EINVAL, "%s: data is missing", function);
    if ((uintptr_t)data % (uintptr_t)unit)
        return peri__fail(PERI_EINVAL, "%s: data is at %p, wanted an address that %lld divides, as elements of %s have",
                          function, data, (long long)unit, peri_dtype_name(dtype));
    peri__storage *s;
    PERI_TRY(peri__storage_lent(device, bytes, data, NULL, &s));
    s->release = release ? release : release_nothing;
    atomic_store(&s->exposed, true);
    s->ctx = ctx;
    *out = tensor_init(&s->first, s, dtype, ndim, shape);
    return PERI_OK;
}

peri_status peri_tensor_new(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    PERI_NEED(out);
    return peri__tensor_placed(device, dtype, ndim, shape, false, out);
}

peri_status peri__tensor_like(const peri_tensor *like, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    return peri_tensor_new(peri__device(like), like->dtype, ndim, shape, out);
}

peri_status peri__tensor_view(peri_tensor *base, int32_t ndim, const int64_t *shape, const int64_t *stride,
                              int64_t offset, peri_tensor **out)
{
    peri_tensor *t = tensor_of(base->storage, base->dtype, ndim, shape);
    if (!t) return PERI_ENOMEM;
    if (stride) memcpy(t->stride, stride, sizeof *stride * (size_t)ndim);
    t->offset = offset;
    peri__refs_add(&t->storage->refs);
    *out = t;
    return PERI_OK;
}

peri_status peri__shaped(peri_tensor **t, int32_t ndim, const int64_t *shape)
{
    peri_tensor *x = *t, *view;
    if (atomic_load(&x->refs) == 1 && !x->requires_grad) { /* nobody else sees it */
        set_shape(x, ndim, shape);
        return PERI_OK;
    }
    PERI_TRY(peri__tensor_view(x, ndim, shape, NULL, x->offset, &view));
    peri_tensor_release(x);
    *t = view;
    return PERI_OK;
}

peri_status peri__tensor_in(peri__storage *s, const peri_tensor *like, peri_tensor **out)
{
    peri_tensor *t = tensor_of(s, like->dtype, like->ndim, like->shape);
    if (!t) {
        peri__storage_release(s);
        return PERI_ENOMEM;
    }
    memcpy(t->stride, like->stride, sizeof t->stride);
    t->offset = like->offset;
    *out = t;
    return PERI_OK;
}

peri_status peri__detached(peri_tensor *t, peri_tensor **out)
{
    return peri__tensor_view(t, t->ndim, t->shape, t->stride, t->offset, out);
}
int64_t peri_tensor_version(const peri_tensor *t) { return t ? (int64_t)peri__version(t) : 0; }

peri_status peri_tensor_detach(peri_tensor *t, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    return peri__detached(t, out);
}

peri_status peri_tensor_describe(const peri_tensor *t, peri_tensor_info *out)
{
    PERI_NEED(t);
    peri_tensor_info now = {.dtype = t->dtype,
                            .ndim = t->ndim,
                            .numel = peri__numel(t),
                            .device = peri__device(t),
                            .contiguous = peri__contiguous(t),
                            .requires_grad = t->requires_grad,
                            .leaf = !t->node,
                            .mapped = t->storage->mapped};
    memcpy(now.shape, t->shape, sizeof now.shape);
    memcpy(now.stride, t->stride, sizeof now.stride);
    return PERI_GIVE(peri_tensor_info, out, &now);
}

/* -- filling and copying ------------------------------------------------------------------------------------------- */

/** Queue dst = cast(src) on their common device; @src has been expanded to dst's shape. */
static peri_status convert(peri_tensor *dst, const peri_tensor *src)
{
    int64_t n = peri__numel(dst);
    if (dst->dtype == src->dtype && peri__contiguous(dst) && peri__contiguous(src))
        return peri__copy(peri__device(dst), peri__data(dst), peri__data(src), n * peri_dtype_size(dst->dtype),
                          PERI_COPY_D2D);
    peri_k_convert_args args = {.dst = peri__data(dst),
                                .src = peri__data(src),
                                .dst_dtype = dst->dtype,
                                .src_dtype = src->dtype,
                                .ndim = dst->ndim};
    memcpy(args.shape, dst->shape, sizeof args.shape);
    memcpy(args.dst_stride, dst->stride, sizeof args.dst_stride);
    memcpy(args.src_stride, src->stride, sizeof args.src_stride);
    return PERI_LAUNCH(peri__device(dst), convert, &args, n, PERI_ELEMENT_GRAIN);
}

/** Strides of @t when repeated to @shape; PERI_EINVAL if it cannot be. */
peri_status peri__expanded(const char *function, const peri_tensor *t, int32_t ndim, const int64_t *shape,
                           int64_t *stride)
{
    char a[128];
    peri__words words;
    if (ndim < t->ndim || ndim > PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "%s: %s cannot expand to %d dimensions", function,
                          peri__tensor_text(t, a, sizeof a), ndim);
    for (int32_t d = 0; d < ndim; d++) {
        int32_t own = d - (ndim - t->ndim);
        bool repeated = own < 0 || (t->shape[own] == 1 && shape[d] != 1);
        if (!repeated && t->shape[own] != shape[d])
            return peri__fail(PERI_EINVAL, "%s: %s does not expand to size %lld in %s", function,
                              peri__tensor_text(t, a, sizeof a), (long long)shape[d], peri__dim_text(d, &words));
        stride[d] = repeated ? 0 : t->stride[own];
    }
    return PERI_OK;
}

peri_status peri__contiguous_of(const peri_tensor *t, peri_tensor **out)
{
    if (peri__contiguous(t)) {
        *out = (peri_tensor *)(uintptr_t)t;
        peri_tensor_retain(*out);
        return PERI_OK;
    }
    peri_tensor *copy;
    PERI_TRY(peri__tensor_like(t, t->ndim, t->shape, &copy));
    peri_status status = convert(copy, t);
    if (status < 0) peri_tensor_release(copy);
    else *out = copy;
    return status;
}

/** Copy the elements to host memory in row-major order, in t's dtype, and wait for them. */
static peri_status fetch(const peri_tensor *t, void *dst, int64_t bytes)
{
    peri_tensor *flat;
    PERI_TRY(peri__contiguous_of(t, &flat));
    /* The copy itself may block until all before it has run, where @dst is ordinary memory. */
    peri_status status = peri__stream_dry(peri_stream_current(peri__device(t)));
    if (status >= 0) status = peri__copy(peri__device(t), dst, peri__data(flat), bytes, PERI_COPY_D2H);
    if (status >= 0) status = peri__stream_dry(peri_stream_current(peri__device(t)));
    peri_tensor_release(flat);
    return status < 0 ? status : peri__late_on(peri__device(t));
}

static peri_status check_bytes(const char *function, const peri_tensor *t, int64_t bytes)
{
    char text[128];
    int64_t wanted = peri__numel(t) * peri_dtype_size(t->dtype);
    if (bytes == wanted) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %lld bytes given for %s, which has %lld", function, (long long)bytes,
                      peri__tensor_text(t, text, sizeof text), (long long)wanted);
}

peri_status peri_tensor_read(const peri_tensor *t, void *dst, int64_t bytes)
{
    PERI_NEED(t);
    PERI_TRY(check_bytes("peri_tensor_read", t, bytes));
    if (!dst && bytes > 0) return peri__fail(PERI_EINVAL, "peri_tensor_read: dst is missing");
    return fetch(t, dst, bytes);
}

/** An error if several elements of @t, which is to be written, are one place of memory. */
static peri_status check_distinct(const char *function, const peri_tensor *t)
{
    char text[128];
    peri__words words;
    for (int32_t d = 0; d < t->ndim; d++)
        if (t->stride[d] == 0 && t->shape[d] > 1)
            return peri__fail(PERI_EINVAL,
                              "%s: elements of %s of %s are all one place of memory (it was expanded); write to a copy",
                              function, peri__dim_text(d, &words), peri__tensor_text(t, text, sizeof text));
    return PERI_OK;
}

peri_status peri_tensor_write(peri_tensor *t, const void *src, int64_t bytes)
{
    PERI_NEED(t);
    PERI_TRY(check_bytes("peri_tensor_write", t, bytes));
    if (!src && bytes > 0) return peri__fail(PERI_EINVAL, "peri_tensor_write: src is missing");
    PERI_TRY(check_distinct("peri_tensor_write", t));
    peri__changed(t);
    peri_device *device = peri__device(t);
    if (peri__contiguous(t)) return peri__copy(device, peri__data(t), src, bytes, PERI_COPY_H2D);
    peri_tensor *flat;
    PERI_TRY(peri__tensor_like(t, t->ndim, t->shape, &flat));
    peri_status status = peri__copy(device, peri__data(flat), src, bytes, PERI_COPY_H2D);
    if (status >= 0) status = convert(t, flat);
    peri_tensor_release(flat);
    return status;
}

peri_status peri_tensor_item(const peri_tensor *t, int64_t index, double *out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    PERI__OWN_FLOATS;
    char text[128];
    int64_t n = peri__numel(t), at = t->offset, rest = index;
    if (index < 0 || index >= n)
        return peri__fail(PERI_ERANGE, "peri_tensor_item: element %lld of %s, allowed: 0..%lld", (long long)index,
                          peri__tensor_text(t, text, sizeof text), (long long)n - 1);
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        at += rest % t->shape[d] * t->stride[d];
        rest /= t->shape[d];
    }
    peri_tensor one = *t; /* a borrowed one-element view on the stack */
    one.ndim = 0;
    one.offset = at;
    char raw[16];
    const int64_t bytes = peri_dtype_size(t->dtype);
    bool found;
    PERI_TRY(peri__item_ahead_read(&one, peri__data(&one), bytes, raw, &found));
    if (found) PERI_TRY(peri__late_on(peri__device(t)));
    else PERI_TRY(fetch(&one, raw, bytes));
    peri_k_convert_args args = {.dst = out, .src = raw, .dst_dtype = PERI_F64, .src_dtype = t->dtype, .ndim = 0};
    peri_kernels_get()->fn[PERI_K_convert](&args, 0, 1);
    if (*out != *out) *out = (double)NAN; /* bindings may give other NaN bits a meaning (LuaJIT does) */
    return PERI_OK;
}

peri_status peri_tensor_data(peri_tensor *t, void **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    char text[128];
    if (!peri_device_host_access(peri__device(t)))
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_tensor_data: the host cannot touch memory of device %s; use peri_tensor_read",
                          peri__device(t)->name);
    if (!peri__contiguous(t))
        return peri__fail(PERI_EUNSUPPORTED, "peri_tensor_data: %s is not contiguous",
                          peri__tensor_text(t, text, sizeof text));
    PERI_TRY(peri__stream_dry(peri_stream_current(peri__device(t))));
    atomic_store(&t->storage->exposed, true);
    *out = peri__data(t);
    return PERI_OK;
}

/** What an integer or floating dtype can hold. Finite numbers beyond a float's largest would become infinities; a
 *  double from 2^53 on may be another whole number that was rounded, so no i64 is made of it. */
static const struct {
    int32_t dtype;
    bool whole;
    double least, past; /* least <= number < past; -past < number < past for floats */
    const char *text;
} ranges[] = {{PERI_I64, true, 1 - 0x1p53, 0x1p53, "whole numbers -2^53 + 1..2^53 - 1 (others: peri_tensor_write; in "
                                               "Lua 64-bit ones: 9007199254740993LL)"},
              {PERI_I32, true, -0x1p31, 0x1p31, "whole numbers -2147483648..2147483647"},
              {PERI_I16, true, -32768, 32768, "whole numbers -32768..32767"},
              {PERI_I8, true, -128, 128, "whole numbers -128..127"},
              {PERI_U8, true, 0, 256, "whole numbers 0..255"},
              {PERI_F32, false, -0x1.ffffffp127, 0x1.ffffffp127, "-3.4028235e38..3.4028235e38, inf, nan"},
              {PERI_F16, false, -65520, 65520, "-65504..65504, inf, nan"},
              {PERI_BF16, false, -0x1.ffp127, 0x1.ffp127, "-3.3895314e38..3.3895314e38, inf, nan"}};

peri_status peri__check_fits(const char *function, int32_t dtype, double value)
{
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        if (ranges[i].dtype != dtype) continue;
        bool inside =
            value < ranges[i].past && (value > ranges[i].least || (ranges[i].whole && value == ranges[i].least));
        bool fits = ranges[i].whole ? inside && value == floor(value) : inside || !isfinite(value);
        if (fits) return PERI_OK;
        return peri__fail(PERI_ERANGE, "%s: %.17g does not fit %s, allowed: %s", function,
                          value == value ? value : (double)NAN, peri_dtype_name(dtype), ranges[i].text);
    }
    return PERI_OK;
}

peri_status peri_tensor_fill(peri_tensor *t, double value)
{
    PERI_NEED(t);
    PERI__OWN_FLOATS;
    PERI_TRY(peri__check_fits("peri_tensor_fill", t->dtype, value));
    peri__changed(t);
    if (!peri__contiguous(t)) {
        int64_t one = 1;
        peri_tensor *scalar;
        PERI_TRY(peri__tensor_like(t, 0, &one, &scalar));
        peri_status status = peri_tensor_fill(scalar, value);
        if (status >= 0) status = peri_tensor_copy(t, scalar);
        peri_tensor_release(scalar);
        return status;
    }
    double clipped = value != value ? 0 : value < -0x1p63 ? -0x1p63 : value;
    peri_k_fill_args args = {.dst = peri__data(t),
                             .dtype = t->dtype,
                             .value = value,
                             .ivalue = clipped >= 0x1p63 ? INT64_MAX : (int64_t)clipped};
    if (t->dtype == PERI_BOOL) args.ivalue = value != 0;
    return PERI_LAUNCH(peri__device(t), fill, &args, peri__numel(t), PERI_ELEMENT_GRAIN);
}

peri_status peri__tensor_zero(peri_tensor *dst) { return peri_tensor_fill(dst, 0); }

peri_status peri_tensor_full(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, double value,
                             peri_tensor **out)
{
    PERI_NEED(out);
    peri_tensor *t;
    PERI_TRY(peri_tensor_new(device, dtype, ndim, shape, &t));
    peri_status status = peri_tensor_fill(t, value);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

static peri_status random_tensor(const char *function, peri_device *device, int32_t dtype, int32_t ndim,
                                 const int64_t *shape, int32_t kind, double low, double high, uint64_t seed,
                                 uint64_t stream, peri_tensor **out)
{
    if (!out) return peri__fail(PERI_EINVAL, "%s: out is missing", function);
    if (dtype != PERI_F32 && dtype != PERI_F64)
        return peri__fail(PERI_EINVAL, "%s: dtype %s, allowed: f32, f64", function, peri_dtype_name(dtype));
    const bool uniform = kind == PERI_RANDOM_UNIFORM;
    if (!isfinite(low) || !isfinite(high) || high < (uniform ? low : 0))
        return peri__fail(PERI_EINVAL, uniform ? "%s: numbers from %g to %g, allowed: finite ones, in this order"
                                               : "%s: mean %g and deviation %g, allowed: finite ones, and a "
                                                 "deviation of 0 and more",
                          function, low, high);
    peri_tensor *t;
    PERI_TRY(peri_tensor_new(device, dtype, ndim, shape, &t));
    int64_t n = peri__numel(t);
    peri_k_random_args args = {.dst = peri__data(t), .dtype = dtype, .kind = kind, .cols = n, .total_cols = n,
                               .low = low, .high = high, .seed = seed, .random_stream = stream};
    peri_status status = PERI_LAUNCH(device, random, &args, n, 4096);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

peri_status peri_tensor_uniform(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, double low,
                                double high, uint64_t seed, uint64_t stream, peri_tensor **out)
{
    PERI__NOT_AT_BORDER;
    return random_tensor("peri_tensor_uniform", device, dtype, ndim, shape, PERI_RANDOM_UNIFORM, low, high, seed,
                         stream, out);
}

peri_status peri_tensor_normal(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, double mean,
                               double deviation, uint64_t seed, uint64_t stream, peri_tensor **out)
{
    PERI__NOT_AT_BORDER;
    return random_tensor("peri_tensor_normal", device, dtype, ndim, shape, PERI_RANDOM_NORMAL, mean, deviation, seed,
                         stream, out);
}

/** Copy between devices through host memory; both contiguous and of one dtype. */
static peri_status across(peri_tensor *dst, const peri_tensor *src)
{
    int64_t bytes = peri__numel(src) * peri_dtype_size(src->dtype);
    if (peri_device_host_access(peri__device(src))) {
        PERI_TRY(peri__stream_dry(peri_stream_current(peri__device(src))));
        return peri__copy(peri__device(dst), peri__data(dst), peri__data(src), bytes, PERI_COPY_H2D);
    }
    if (peri_device_host_access(peri__device(dst))) {
        PERI_TRY(peri__stream_dry(peri_stream_current(peri__device(dst))));
        return fetch(src, peri__data(dst), bytes);
    }
    void *host = peri__alloc((size_t)peri__max(bytes, 1));
    if (!host) return PERI_ENOMEM;
    peri_status status = fetch(src, host, bytes);
    if (status >= 0) status = peri__copy(peri__device(dst), peri__data(dst), host, bytes, PERI_COPY_H2D);
    peri__free(host);
    return status;
}

/** First and last place of @t's elements in its storage, in elements (strides are not negative). */
static void extent(const peri_tensor *t, int64_t *first, int64_t *last)
{
    *first = *last = t->offset;
    for (int32_t d = 0; d < t->ndim; d++) *last += (t->shape[d] - 1) * t->stride[d];
}

/** True if writing @dst in some order may change elements of @src (of dst's shape) before they are read. */
static bool overlap(const peri_tensor *dst, const peri_tensor *src)
{
    int64_t first, last, from, to;
    if (dst->storage != src->storage || peri__numel(dst) == 0) return false;
    extent(dst, &first, &last);
    extent(src, &from, &to);
    bool same = dst->offset == src->offset;
    for (int32_t d = 0; d < dst->ndim; d++) same = same && (dst->stride[d] == src->stride[d] || dst->shape[d] == 1);
    return !same && first <= to && from <= last;
}

/** @src: of dst's shape. */
static peri_status copy_elements(peri_tensor *dst, const peri_tensor *src)
{
    if (overlap(dst, src)) {
        peri_tensor *apart;
        PERI_TRY(peri__tensor_like(src, src->ndim, src->shape, &apart));
        peri_status copied = convert(apart, src);
        if (copied >= 0) copied = convert(dst, apart);
        peri_tensor_release(apart);
        return copied;
    }
    if (peri__device(dst) == peri__device(src)) return convert(dst, src);
    peri_tensor *from = NULL, *to = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(src, &from), out);
    if (dst->dtype == src->dtype && peri__contiguous(dst)) {
        status = across(dst, from);
    } else {
        PERI_TRY_GOTO(peri_tensor_new(peri__device(dst), src->dtype, dst->ndim, dst->shape, &to), out);
        PERI_TRY_GOTO(across(to, from), out);
        status = convert(dst, to);
    }
out:
    if (from != src) peri_tensor_release(from);
    peri_tensor_release(to);
    return status;
}

/** @wide = a borrowed view of @src, repeated to dst's shape. */
static peri_status widen(const peri_tensor *dst, const peri_tensor *src, peri_tensor *wide)
{
    *wide = *src;
    PERI_TRY(peri__expanded("peri_tensor_copy", src, dst->ndim, dst->shape, wide->stride));
    wide->ndim = dst->ndim;
    memcpy(wide->shape, dst->shape, sizeof wide->shape);
    return PERI_OK;
}

peri_status peri_tensor_copy(peri_tensor *dst, const peri_tensor *src)
{
    peri_tensor wide;
    PERI_NEED(dst);
    PERI_NEED(src);
    PERI_TRY(widen(dst, src, &wide));
    PERI_TRY(check_distinct("peri_tensor_copy", dst));
    peri__changed(dst);
    return copy_elements(dst, &wide);
}

peri_status peri__tensor_arrive(peri_tensor *dst, const peri_tensor *src)
{
    peri_tensor wide;
    PERI_TRY(widen(dst, src, &wide));
    return copy_elements(dst, &wide);
}
