/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_parts.c: parts that dense operations and their gradients share: functions of one number, arithmetic with
 * broadcasting, sums. Nothing here is recorded.
 *
 * A long sum is cut into blocks of a fixed size, whose sums are summed again: the order of additions depends on shapes
 * only.
 */
#include "tensor_internal.h"
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"

#include <math.h>
#include <stdio.h>

/** Elements of one block: of contiguous numbers, and of rows. */
enum { BLOCK_ELEMENTS = 4096, BLOCK_ROWS = 128 };

const char *peri__pair_text(const peri_tensor *a, const peri_tensor *b, char *buffer, size_t len)
{
    char x[128], y[128];
    snprintf(buffer, len, "%s and %s", peri__tensor_text(a, x, sizeof x), peri__tensor_text(b, y, sizeof y));
    return buffer;
}

peri_status peri__expand(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    int64_t stride[PERI_MAX_DIMS];
    PERI_TRY(peri__expanded("peri_tensor_expand", t, ndim, shape, stride));
    return peri__tensor_view(t, ndim, shape, stride, t->offset, out);
}

peri_status peri__unary(peri_tensor *t, int32_t op, double a, double b, peri_tensor **out)
{
    peri_tensor *x, *y = NULL;
    PERI_TRY(peri__contiguous_of(t, &x));
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_like(t, t->ndim, t->shape, &y), out);
    peri_k_unary_args args = {.dst = peri__data(y), .x = peri__data(x), .dtype = t->dtype, .op = op, .a = a, .b = b};
    status = PERI_LAUNCH(peri__device(t), unary, &args, peri__numel(t), PERI_ELEMENT_GRAIN);
out:
    peri_tensor_release(x);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri__broadcast_shape(const char *function, const peri_tensor *a, const peri_tensor *b, int32_t *ndim,
                                  int64_t *shape)
{
    char text[300];
    *ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int32_t d = 0; d < *ndim; d++) {
        int32_t i = d - (*ndim - a->ndim), j = d - (*ndim - b->ndim);
        int64_t x = i < 0 ? 1 : a->shape[i], y = j < 0 ? 1 : b->shape[j];
        if (x != y && x != 1 && y != 1)
            return peri__fail(PERI_EINVAL,
                              "%s: %s do not broadcast: sizes %lld and %lld, allowed: equal, or one of them 1",
                              function, peri__pair_text(a, b, text, sizeof text), (long long)x, (long long)y);
        shape[d] = x == 1 ? y : x;
    }
    return PERI_OK;
}

int32_t peri__fold(int32_t ndim, int64_t *shape, int64_t *const *stride, int32_t operands)
{
    int32_t n = 0;
    for (int32_t d = 0; d < ndim; d++) {
        if (shape[d] == 1) continue;
        int64_t size = shape[d];
        bool joins = n > 0;
        for (int32_t k = 0; k < operands; k++) joins = joins && stride[k][n - 1] == stride[k][d] * size;
        if (joins) n--, size *= shape[n];
        shape[n] = size;
        for (int32_t k = 0; k < operands; k++) stride[k][n] = stride[k][d];
        n++;
    }
    return n;
}

/** The arguments of a kernel for @a op @b, broadcast, and room for its result. */
static peri_status two_operands(const char *function, int32_t op, peri_tensor *a, peri_tensor *b,
                                peri_k_binary_args *args, peri_tensor **y)
{
    int32_t ndim;
    *args = (peri_k_binary_args){.dtype = a->dtype, .op = op, .a = peri__data(a), .b = peri__data(b)};
    PERI_TRY(peri__broadcast_shape(function, a, b, &ndim, args->shape));
    PERI_TRY(peri__expanded(function, a, ndim, args->shape, args->a_stride));
    PERI_TRY(peri__expanded(function, b, ndim, args->shape, args->b_stride));
    PERI_TRY(peri__tensor_like(a, ndim, args->shape, y));
    args->dst = peri__data(*y);
    args->ndim = peri__fold(ndim, args->shape, (int64_t *[]){args->a_stride, args->b_stride}, 2);
    return PERI_OK;
}

/** @y, which is owned, as the result of a launch of @status. */
static peri_status launched(peri_status status, peri_tensor *y, peri_tensor **out)
{
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri__binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    peri_k_binary_args args;
    peri_tensor *y;
    PERI_TRY(two_operands(function, op, a, b, &args, &y));
    return launched(PERI_LAUNCH(peri__device(a), binary, &args, peri__numel(y), PERI_ELEMENT_GRAIN), y, out);
}

peri_status peri__integer(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    peri_k_binary_args args;
    peri_tensor *y;
    PERI_TRY(two_operands(function, op, a, b, &args, &y));
    return launched(PERI_LAUNCH(peri__device(a), integer, &args, peri__numel(y), PERI_ELEMENT_GRAIN), y, out);
}

/** @sum = @scale times the sums of blocks of @block along n, of the contiguous @x. */
static peri_status sum_block(const peri_tensor *x, int64_t outer, int64_t n, int64_t inner, int64_t block, double scale,
                             peri_tensor *sum)
{
    int64_t blocks = n ? peri__ceil_div(n, block) : 1, parts = peri__ceil_div(inner, PERI_SUM_COLUMNS);
    peri_k_sum_dim_args args = {.dst = peri__data(sum),
                                .x = peri__data(x),
                                .dtype = sum->dtype,
                                .outer = outer,
                                .n = n,
                                .inner = inner,
                                .block = block,
                                .scale = scale};
    /* elements per unit of the range */
    int64_t work = peri__max(1, peri__min(n, block) * peri__min(inner, PERI_SUM_COLUMNS));
    return PERI_LAUNCH(peri__device(sum), sum_dim, &args, outer * blocks * parts,
                       peri__ceil_div(PERI_ELEMENT_GRAIN, work));
}

/** *x (owned, contiguous memory of outer * n * inner elements) = scale * its sum over n. */
static peri_status reduce_once(peri_tensor **x, int64_t outer, int64_t n, int64_t inner, double scale)
{
    int64_t block = inner == 1 ? BLOCK_ELEMENTS : BLOCK_ROWS;
    for (bool done = false; !done;) {
        int64_t blocks = n ? peri__ceil_div(n, block) : 1, size = outer * blocks * inner;
        done = blocks == 1;
        peri_tensor *sum;
        PERI_TRY(peri__tensor_like(*x, 1, &size, &sum));
        peri_status status = sum_block(*x, outer, n, inner, block, done ? scale : 1, sum);
        peri_tensor_release(*x);
        *x = sum;
        PERI_TRY(status);
        n = blocks;
    }
    return PERI_OK;
}

static peri_status reduce_wide(peri_tensor *t, uint32_t mask, double scale, peri_tensor **out)
{
    int64_t size[PERI_MAX_DIMS], shape[PERI_MAX_DIMS];
    bool sum[PERI_MAX_DIMS], any = false;
    int32_t n = 0;
    /* neighbours of one kind become one group; those of size 1 are of both kinds */
    for (int32_t d = 0; d < t->ndim; d++) {
        bool reduced = mask >> d & 1;
        shape[d] = reduced ? 1 : t->shape[d];
        if (t->shape[d] == 1) continue;
        if (n > 0 && sum[n - 1] == reduced) {
            size[n - 1] *= t->shape[d];
        } else {
            size[n] = t->shape[d];
            sum[n++] = reduced;
        }
        any = any || reduced;
    }
    peri_tensor *x;
    peri_status status = PERI_OK;
    PERI_TRY(peri__contiguous_of(t, &x));
    if (!any && scale != 1) {
        peri_tensor *scaled = NULL;
        status = peri__unary(x, PERI_UNARY_AFFINE, scale, 0, &scaled);
        peri_tensor_release(x);
        PERI_TRY(status);
        x = scaled;
    }
    for (int32_t g = n - 1; g >= 0; g--) {
        if (!sum[g]) continue;
        int64_t outer = 1, inner = 1;
        for (int32_t i = 0; i < g; i++) outer *= size[i];
        for (int32_t i = g + 1; i < n; i++) inner *= size[i];
        PERI_TRY_GOTO(reduce_once(&x, outer, size[g], inner, scale), out);
        size[g] = 1;
        if (isfinite(scale)) scale = 1; /* that of a mean of nothing has not reached a result if no group had one yet */
    }
    PERI_TRY_GOTO(peri__shaped(&x, t->ndim, shape), out);
    *out = x;
    return PERI_OK;
out:
    peri_tensor_release(x);
    return status;
}

peri_status peri__reduce(peri_tensor *t, uint32_t mask, double scale, peri_tensor **out)
{
    if (!peri__is_16(t->dtype)) return reduce_wide(t, mask, scale, out);
    peri_tensor *wide, *sum = NULL;
    PERI_TRY(peri__cast(t, PERI_F32, &wide));
    peri_status status = reduce_wide(wide, mask, scale, &sum);
    if (status >= 0) status = peri__cast(sum, t->dtype, out);
    peri_tensor_release(wide);
    peri_tensor_release(sum);
    return status;
}

static int64_t element_count(int32_t ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int32_t d = 0; d < ndim; d++) n *= shape[d];
    return n;
}

peri_status peri__grad_partial(const peri__node *node, int32_t i, int32_t dtype, int64_t rows, int32_t own,
                               int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    if (rows == 1 && dtype == own) return peri__grad_new(node, i, dtype, ndim, shape, out);
    return peri_tensor_new(peri__device(node->grad_out[0]), dtype, 2, (int64_t[]){rows, element_count(ndim, shape)},
                           out);
}

peri_status peri__grad_sums(const peri__node *node, int32_t i, peri_tensor *partial, int32_t own, int32_t ndim,
                            const int64_t *shape, peri_tensor **out)
{
    const int64_t rows = partial->shape[0], cols = element_count(ndim, shape),
                  block = cols == 1 ? BLOCK_ELEMENTS : BLOCK_ROWS;
    const bool whole = partial->ndim == ndim && !memcmp(partial->shape, shape, sizeof *shape * (size_t)ndim);
    peri_tensor *total = NULL, *grad = NULL;
    peri_status status = PERI_OK;
    if (partial->dtype == own && whole) { /* of one block */
        grad = partial;
        peri_tensor_retain(grad);
    } else if (partial->dtype == own && rows <= block) {
        PERI_TRY_GOTO(peri__grad_new(node, i, own, ndim, shape, &grad), out);
        status = sum_block(partial, 1, rows, cols, block, 1, grad);
    } else {
        PERI_TRY_GOTO(peri__reduce(partial, 1, 1, &total), out);
        PERI_TRY_GOTO(peri__shaped(&total, ndim, shape), out);
        PERI_TRY_GOTO(peri__grad_new(node, i, own, ndim, shape, &grad), out);
        status = peri_tensor_copy(grad, total);
    }
out:
    peri_tensor_release(total);
    if (status < 0) peri_tensor_release(grad);
    else *out = grad;
    return status;
}

peri_status peri__sum_to(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    uint32_t mask = 0;
    for (int32_t d = 0; d < t->ndim; d++) {
        int32_t own = d - (t->ndim - ndim);
        if (own < 0 || (shape[own] == 1 && t->shape[d] != 1)) mask |= 1u << d;
    }
    if (!mask) {
        peri_tensor_retain(t);
        *out = t;
        return PERI_OK;
    }
    peri_tensor *sum;
    PERI_TRY(peri__reduce(t, mask, 1, &sum));
    peri_status status = peri__shaped(&sum, ndim, shape);
    if (status < 0) peri_tensor_release(sum);
    else *out = sum;
    return status;
}
