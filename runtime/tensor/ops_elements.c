/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_elements.c: elements compared, chosen by a condition, picked by an index, sorted; numbers in a row.
 */
#include "tensor_internal.h"
#include "../../kernels/sparse.h"
#include "../../kernels/elements.h"

#include <perilune/ops.h>

#include <math.h>

static bool is_complex(int32_t dtype) { return dtype == PERI_C64 || dtype == PERI_C128; }

static peri_status check_order(const char *function, const char *what, const peri_tensor *t)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, what, t, -1, -1));
    if (!is_complex(t->dtype)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is %s; complex numbers have no order", function, what,
                      peri__tensor_text(t, text, sizeof text));
}

static peri_status check_alike(const char *function, const peri_tensor *a, const peri_tensor *b)
{
    char text[300];
    if (a->dtype == b->dtype) return peri__check_same_device(function, a, b);
    return peri__fail(PERI_EINVAL, "%s: dtypes differ: %s; cast one of them", function,
                      peri__pair_text(a, b, text, sizeof text));
}

/* -- comparing ----------------------------------------------------------------------------------------------------- */

peri_status peri__compare(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, double value,
                          int64_t integer, peri_tensor **out)
{
    peri_k_compare_args k = {.dtype = a->dtype, .op = op, .value = value, .integer = integer};
    int32_t ndim = a->ndim;
    peri_tensor *y;
    memcpy(k.shape, a->shape, sizeof k.shape);
    if (b) {
        PERI_TRY(peri__broadcast_shape(function, a, b, &ndim, k.shape));
        PERI_TRY(peri__expanded(function, b, ndim, k.shape, k.b_stride));
        k.b = peri__data(b);
    }
    PERI_TRY(peri__expanded(function, a, ndim, k.shape, k.a_stride));
    PERI_TRY(peri_tensor_new(peri__device(a), PERI_BOOL, ndim, k.shape, &y));
    k.dst = peri__data(y);
    k.a = peri__data(a);
    k.ndim = peri__fold(ndim, k.shape, (int64_t *[]){k.a_stride, k.b_stride}, b ? 2 : 1);
    peri_status status = PERI_LAUNCH(peri__device(a), compare, &k, peri__numel(y), PERI_ELEMENT_GRAIN);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** Comparing integers with @x, which need be no integer nor in their range: the same as comparing them with *integer,
 *  or, where it is the same for all of them, as comparing each with itself. Returns whether it is the former; *op may
 *  change in the latter case. */
static bool integer_comparison(int32_t dtype, int32_t *op, double x, int64_t *integer)
{
    const bool up = *op == PERI_COMPARE_LT || *op == PERI_COMPARE_GE,
               equality = *op == PERI_COMPARE_EQ || *op == PERI_COMPARE_NE;
    const double rounded = up ? ceil(x) : floor(x);
    double least, past;
    peri__range_of(dtype, &least, &past);
    if (rounded >= least && rounded < past && (!equality || rounded == x)) {
        *integer = (int64_t)rounded;
        return true;
    }
    /* where all integers of the dtype are; neither with NaN */
    const bool below = rounded >= past, above = rounded < least;
    const bool all = *op == PERI_COMPARE_NE || (below && (*op == PERI_COMPARE_LT || *op == PERI_COMPARE_LE)) ||
        (above && (*op == PERI_COMPARE_GT || *op == PERI_COMPARE_GE));
    *op = all ? PERI_COMPARE_EQ : PERI_COMPARE_NE;
    return false;
}

static peri_status compare_number(const char *function, peri_tensor *a, int32_t op, double number, peri_tensor **out)
{
    int64_t integer = 0;
    if (!peri__is_float(a->dtype))
        return integer_comparison(a->dtype, &op, number, &integer)
                   ? peri__compare(function, op, a, NULL, 0, integer, out)
                   : peri__compare(function, op, a, a, 0, 0, out);
    /* what rounds to infinity */
    const double past = a->dtype == PERI_F16 ? 65520 : a->dtype == PERI_F64 ? INFINITY : 0x1.ffffffp127;
    return peri__compare(function, op, a, NULL,
                         number >= past    ? INFINITY
                         : number <= -past ? -INFINITY
                                           : number,
                         0, out);
}

peri_status peri_op_compare(peri_tensor *a, int32_t op, peri_tensor *b, double number, peri_tensor **out)
{
    static const char *const function = "peri_op_compare";
    PERI_NEED(out);
    if (op < 0 || op >= PERI_COMPARE_COUNT)
        return peri__fail(PERI_EINVAL, "%s: comparison %d, allowed: 0..%d", function, op, PERI_COMPARE_COUNT - 1);
    PERI_TRY(check_order(function, "a", a));
    if (!b) return compare_number(function, a, op, number, out);
    PERI_TRY(check_order(function, "b", b));
    peri_tensor *in[2] = {a, b};
    peri__operands o;
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 2));
    o.back = -1; /* a bool is not cast */
    peri_status status = check_alike(function, o.in[0], o.in[1]);
    if (status >= 0) status = peri__compare(function, op, o.in[0], o.in[1], 0, 0, &o.out);
    return peri__narrow(&o, status, out);
}

/* -- choosing ------------------------------------------------------------------------------------------------------ */

peri_status peri__where(const char *function, peri_tensor *condition, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    const peri_tensor *one = a ? a : b;
    peri_k_where_args k = {.width = (int32_t)peri_dtype_size(one->dtype), .condition = peri__data(condition)};
    int32_t ndim;
    peri_tensor both = *one, *y; /* both: the shape of a and b */
    if (a && b) PERI_TRY(peri__broadcast_shape(function, a, b, &both.ndim, both.shape));
    PERI_TRY(peri__broadcast_shape(function, condition, &both, &ndim, k.shape));
    PERI_TRY(peri__expanded(function, condition, ndim, k.shape, k.condition_stride));
    if (a) PERI_TRY(peri__expanded(function, a, ndim, k.shape, k.a_stride));
    if (b) PERI_TRY(peri__expanded(function, b, ndim, k.shape, k.b_stride));
    PERI_TRY(peri__tensor_like(one, ndim, k.shape, &y));
    k.dst = peri__data(y);
    k.a = a ? peri__data(a) : NULL;
    k.b = b ? peri__data(b) : NULL;
    k.ndim = peri__fold(ndim, k.shape, (int64_t *[]){k.condition_stride, k.a_stride, k.b_stride}, 3);
    peri_status status = PERI_LAUNCH(peri__device(one), where, &k, peri__numel(y), PERI_ELEMENT_GRAIN);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** saved: the condition; shape: a's, b's. */
static peri_status where_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    for (int32_t i = 0; i < 2; i++) {
        if (!peri__needs(node, i)) continue;
        peri_tensor *full, *g = grad_out[0];
        PERI_TRY(peri__where("where backward", node->saved[0], i ? NULL : g, i ? g : NULL, &full));
        peri_status status = peri__sum_to(full, node->shape[i].ndim, node->shape[i].size, &grad_in[i]);
        peri_tensor_release(full);
        PERI_TRY(status);
    }
    return PERI_OK;
}

static const peri__node_vtab where_vtab = {.name = "where", .backward = where_backward};

static peri_status where_alike(const char *function, peri_tensor *condition, peri_tensor *a, peri_tensor *b,
                               peri_tensor **out)
{
    peri_tensor *y, *in[2] = {a, b};
    peri__node *node;
    PERI_TRY(check_alike(function, a, b));
    PERI_TRY(peri__where(function, condition, a, b, &y));
    peri_status status = peri__attach(&where_vtab, in, 2, &y, 1, &node);
    if (status >= 0 && node) {
        peri__node_save(node, 0, condition);
        for (int32_t i = 0; i < 2; i++) {
            node->shape[i] = peri__shape_of(in[i]);
        }
    }
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_where(peri_tensor *condition, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    static const char *const function = "peri_op_where";
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "condition", condition, PERI_BOOL, -1));
    PERI_TRY(peri__check_tensor(function, "a", a, -1, -1));
    PERI_TRY(peri__check_tensor(function, "b", b, -1, -1));
    PERI_TRY(peri__check_same_device(function, condition, a));
    peri_tensor *in[2] = {a, b};
    peri__operands o;
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 2));
    return peri__narrow(&o, where_alike(function, condition, o.in[0], o.in[1], &o.out), out);
}

/* -- picking ------------------------------------------------------------------------------------------------------- */

/** dst[.., index[.., j, ..], ..] += src[.., j, ..] along @dim, or = if @put; @dst contiguous, f32, f64 or i64; @src
 *  and @index of one shape. */
static peri_status take_add(peri_tensor *dst, const peri_tensor *src, const peri_tensor *index, int32_t dim, bool put)
{
    peri_k_take_add_args k = {.dst = peri__data(dst),
                              .src = peri__data(src),
                              .index = peri__data(index),
                              .dtype = dst->dtype,
                              .ndim = src->ndim,
                              .dim = dim,
                              .put = put,
                              .size = peri__along_size(dst, dim)};
    memcpy(k.shape, src->shape, sizeof k.shape);
    if (k.ndim == 0) k.shape[k.ndim++] = 1; /* a line of one element */
    memcpy(k.dst_stride, dst->stride, sizeof k.dst_stride);
    memcpy(k.src_stride, src->stride, sizeof k.src_stride);
    memcpy(k.index_stride, index->stride, sizeof k.index_stride);
    return peri__numel(src) ? PERI_RUN(peri__device(dst), take_add, &k) : PERI_OK;
}

enum { KEPT_DIM };

/** saved: the index; shape: x's. */
static peri_status gather_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int32_t dtype = grad_out[0]->dtype;
    peri_tensor *g, *sum = NULL;
    peri_status status;
    PERI_TRY(peri__cast(grad_out[0], peri__is_16(dtype) ? PERI_F32 : dtype, &g));
    PERI_TRY_GOTO(peri__tensor_like(g, node->shape[0].ndim, node->shape[0].size, &sum), out);
    PERI_TRY_GOTO(peri__tensor_zero(sum), out);
    PERI_TRY_GOTO(take_add(sum, g, node->saved[0], (int32_t)node->kept[KEPT_DIM], false), out);
    status = peri__cast(sum, dtype, &grad_in[0]);
out:
    peri_tensor_release(g);
    peri_tensor_release(sum);
    return status;
}

static const peri__node_vtab gather_vtab = {.name = "gather", .backward = gather_backward};

/** @index fits @x, of which it names elements along @dim. */
static peri_status check_gather(const char *function, const peri_tensor *x, int32_t dim, const peri_tensor *index)
{
    char text[300];
    peri__words words;
    PERI_TRY(peri__check_same_device(function, x, index));
    if (index->dtype != PERI_I64 && index->dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: the index is %s, wanted i64 or i32", function,
                          peri__tensor_text(index, text, sizeof text));
    if (index->ndim != x->ndim)
        return peri__fail(PERI_EINVAL, "%s: x and the index are %s; as many dimensions are needed", function,
                          peri__pair_text(x, index, text, sizeof text));
    for (int32_t d = 0; d < x->ndim; d++)
        if (d != dim && index->shape[d] > x->shape[d])
            return peri__fail(PERI_EINVAL, "%s: x and the index are %s; the index may not be larger in %s", function,
                              peri__pair_text(x, index, text, sizeof text), peri__dim_text(d, &words));
    return PERI_OK;
}

/** Wait for contiguous i64 @index and look for a number outside 0..n-1. */
static peri_status check_places(const char *function, peri_tensor *index, int64_t n)
{
    int64_t one = 1, bad = 0, value = 0;
    peri_tensor *found = NULL, *view = NULL;
    peri_device *device = peri__device(index);
    if (peri__numel(index) == 0) return PERI_OK;
    if (!peri__immediate(device)) PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &one, &found));
    peri_op_index_check args = {.x = peri__data(index), .bad = found ? peri__data(found) : &bad,
                                .n = peri__numel(index), .limit = n, .dtype = PERI_I64};
    peri_status status = PERI_RUN(device, index_check, &args);
    if (status >= 0 && found) status = peri_tensor_read(found, &bad, sizeof bad);
    peri_tensor_release(found);
    if (status < 0 || bad == INT64_MAX) return status;
    int64_t stride = 1;
    PERI_TRY(peri__tensor_view(index, 1, &one, &stride, index->offset + bad, &view));
    status = peri_tensor_read(view, &value, sizeof value);
    peri_tensor_release(view);
    PERI_TRY(status);
    if (n == 0)
        return peri__fail(PERI_ERANGE, "%s: index %lld at flat position %lld, and nothing is allowed", function,
                          (long long)value, (long long)bad);
    return peri__fail(PERI_ERANGE, "%s: index %lld at flat position %lld, allowed: 0..%lld", function, (long long)value,
                      (long long)bad, (long long)n - 1);
}

/** *places (new) = @index as contiguous i64, which waits: its numbers are below x's size along @dim. */
static peri_status checked_places(const char *function, peri_tensor *x, int32_t dim, peri_tensor *index,
                                  peri_tensor **places)
{
    peri_tensor *wide;
    PERI_TRY(peri__cast(index, PERI_I64, &wide));
    peri_status status = peri__contiguous_of(wide, places);
    peri_tensor_release(wide);
    PERI_TRY(status);
    status = check_places(function, *places, peri__along_size(x, dim));
    if (status < 0) peri_tensor_release(*places);
    return status;
}

/** *out (new) = the elements of @x that @places picks: gather without a tape. */
static peri_status taken(peri_tensor *x, int32_t dim, peri_tensor *places, peri_tensor **out)
{
    peri_tensor *y;
    PERI_TRY(peri__tensor_like(x, places->ndim, places->shape, &y));
    peri_k_take_args k = {.dst = peri__data(y), .src = peri__data(x), .index = peri__data(places),
                          .width = (int32_t)peri_dtype_size(x->dtype), .ndim = x->ndim, .dim = dim};
    memcpy(k.shape, places->shape, sizeof k.shape);
    if (k.ndim == 0) k.shape[k.ndim++] = 1; /* a line of one element */
    memcpy(k.src_stride, x->stride, sizeof k.src_stride);
    memcpy(k.index_stride, places->stride, sizeof k.index_stride);
    peri_status status = PERI_LAUNCH(peri__device(x), take, &k, peri__numel(y), PERI_ELEMENT_GRAIN);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

static peri_status gather_along(const char *function, peri_tensor *x, int32_t dim, peri_tensor *index,
                                peri_tensor **out)
{
    peri_tensor *places, *y = NULL;
    peri_status status;
    PERI_TRY(checked_places(function, x, dim, index, &places));
    PERI_TRY_GOTO(taken(x, dim, places, &y), out);
    status = peri__attach_places(&gather_vtab, x, dim, places, y);
out:
    peri_tensor_release(places);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_gather(peri_tensor *x, int32_t dim, peri_tensor *index, peri_tensor **out)
{
    static const char *const function = "peri_op_gather";
    int32_t d;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "x", x, -1, -1));
    PERI_TRY(peri__check_tensor(function, "index", index, -1, -1));
    PERI_TRY(peri__along(function, x, dim, &d));
    PERI_TRY(check_gather(function, x, d, index));
    return gather_along(function, x, d, index, out);
}

/* -- scattering ---------------------------------------------------------------------------------------------------- */

enum { KEPT_ADD = KEPT_DIM + 1 };

/** *out (new) = @x, contiguous, in memory of its own, of the dtype @dtype. */
static peri_status copied(peri_tensor *x, int32_t dtype, peri_tensor **out)
{
    peri_tensor *y;
    PERI_TRY(peri_tensor_new(peri__device(x), dtype, x->ndim, x->shape, &y));
    peri_status status = peri_tensor_copy(y, x);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** saved: the places; shape[0]: src's. The gradient of x is the result's, but where something was put: 0; that of src
 *  is picked, and added up if src is one element. */
static peri_status scatter_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *g = grad_out[0], *places = node->saved[0], *zeros = NULL, *kept = NULL, *picked = NULL;
    const int32_t dim = (int32_t)node->kept[KEPT_DIM];
    peri_status status = PERI_OK;
    if (peri__needs(node, 0) && node->kept[KEPT_ADD]) peri_tensor_retain(grad_in[0] = g);
    else if (peri__needs(node, 0)) {
        PERI_TRY_GOTO(copied(g, peri__is_16(g->dtype) ? PERI_F32 : g->dtype, &kept), out);
        PERI_TRY_GOTO(peri__tensor_like(kept, places->ndim, places->shape, &zeros), out);
        PERI_TRY_GOTO(peri__tensor_zero(zeros), out);
        PERI_TRY_GOTO(take_add(kept, zeros, places, dim, true), out);
        PERI_TRY_GOTO(peri__cast(kept, g->dtype, &grad_in[0]), out);
    }
    if (peri__needs(node, 1)) {
        PERI_TRY_GOTO(taken(g, dim, places, &picked), out);
        status = peri__sum_to(picked, node->shape[0].ndim, node->shape[0].size, &grad_in[1]);
    }
out:
    peri_tensor_release(picked);
    peri_tensor_release(zeros);
    peri_tensor_release(kept);
    return status;
}

static const peri__node_vtab scatter_vtab = {.name = "scatter", .backward = scatter_backward};

/** The dtype that elements of @dtype are added and put in: i64 holds all integers and bool, f32 all 16-bit floats. */
static int32_t summed_in(int32_t dtype)
{
    return peri__is_16(dtype) ? PERI_F32 : peri__is_float(dtype) ? dtype : PERI_I64;
}

static peri_status scatter_along(const char *function, peri_tensor *x, int32_t dim, peri_tensor *index,
                                 peri_tensor *src, bool add, peri_tensor **out)
{
    peri_tensor *places = NULL, *sum = NULL, *from = NULL, *y = NULL, *in[2] = {x, src};
    peri__node *node;
    peri_status status;
    PERI_TRY(checked_places(function, x, dim, index, &places));
    PERI_TRY_GOTO(copied(x, summed_in(x->dtype), &sum), out);
    PERI_TRY_GOTO(peri__cast(src, summed_in(x->dtype), &from), out);
    peri_tensor each = *from; /* src, or its one element at all places */
    each.ndim = places->ndim;
    PERI_TRY_GOTO(peri__expanded(function, from, places->ndim, places->shape, each.stride), out);
    memcpy(each.shape, places->shape, sizeof each.shape);
    PERI_TRY_GOTO(take_add(sum, &each, places, dim, !add), out);
    PERI_TRY_GOTO(peri__cast(sum, x->dtype, &y), out);
    PERI_TRY_GOTO(peri__attach(&scatter_vtab, in, 2, &y, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, places);
        node->kept[KEPT_DIM] = dim;
        node->kept[KEPT_ADD] = add;
        node->shape[0] = peri__shape_of(src);
    }
out:
    peri_tensor_release(places);
    peri_tensor_release(sum);
    peri_tensor_release(from);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_scatter(peri_tensor *x, int32_t dim, peri_tensor *index, peri_tensor *src, bool add,
                            peri_tensor **out)
{
    static const char *const function = "peri_op_scatter";
    char text[300];
    int32_t d;
    PERI_NEED(out);
    PERI_TRY(check_order(function, "x", x));
    PERI_TRY(check_order(function, "src", src));
    PERI_TRY(peri__check_tensor(function, "index", index, -1, -1));
    PERI_TRY(peri__along(function, x, dim, &d));
    PERI_TRY(check_gather(function, x, d, index));
    PERI_TRY(check_alike(function, x, src));
    bool alike = src->ndim == index->ndim || src->ndim == 0;
    for (int32_t k = 0; k < src->ndim && alike; k++) alike = src->shape[k] == index->shape[k];
    if (!alike)
        return peri__fail(PERI_EINVAL, "%s: src and the index are %s, wanted one shape, or src without dimensions",
                          function, peri__pair_text(src, index, text, sizeof text));
    if (!add && src->ndim < index->ndim && src->requires_grad) /* of one place that is named twice it would get two */
        return peri__fail(PERI_EINVAL, "%s: src is one element that wants a gradient, allowed: to add it; to put it, "
                          "expand it to the index", function);
    return scatter_along(function, x, d, index, src, add, out);
}

peri_status peri_op_one_hot(peri_tensor *ids, int64_t classes, peri_tensor **out)
{
    static const char *const function = "peri_op_one_hot";
    char text[128];
    int64_t shape[PERI_MAX_DIMS], n, one = 1;
    PERI__HELD peri_tensor *places = NULL, *column = NULL, *ones = NULL, *rows = NULL, *y = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "ids", ids, -1, -1));
    if (!peri__is_integer(ids->dtype) || ids->ndim == PERI_MAX_DIMS || classes < 0)
        return peri__fail(PERI_EINVAL, "%s: ids are %s for %lld classes, allowed: integers of at most %d dimensions, 0 "
                          "classes and more", function, peri__tensor_text(ids, text, sizeof text), (long long)classes,
                          PERI_MAX_DIMS - 1);
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->ndim] = classes;
    n = peri__numel(ids);
    PERI_TRY(peri_tensor_new(peri__device(ids), PERI_I64, ids->ndim + 1, shape, &y));
    const int64_t wide[2] = {n, classes}, narrow[2] = {n, 1}, nothing[2] = {0, 0};
    PERI_TRY(peri__cast(ids, PERI_I64, &places));
    PERI_TRY(peri__tensor_zero(y));
    PERI_TRY(peri_tensor_reshape(places, 2, narrow, &column));
    PERI_TRY(check_places(function, column, classes));
    PERI_TRY(peri_tensor_full(peri__device(ids), PERI_I64, 1, &one, 1, &ones));
    PERI_TRY(peri__tensor_view(ones, 2, narrow, nothing, 0, &rows));
    peri_tensor flat = *y;
    flat.ndim = 2;
    memcpy(flat.shape, wide, sizeof wide);
    flat.stride[0] = classes, flat.stride[1] = 1;
    PERI_TRY(take_add(&flat, rows, column, 1, true));
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/* -- searching ----------------------------------------------------------------------------------------------------- */

static peri_status search_sorted(const char *function, peri_tensor *sorted, peri_tensor *x, bool right,
                                 peri_tensor **out)
{
    char text[300];
    bool alike = sorted->ndim == 1 || sorted->ndim == x->ndim;
    for (int32_t d = 0; d + 1 < sorted->ndim && alike; d++) alike = sorted->shape[d] == x->shape[d];
    if (!alike)
        return peri__fail(PERI_EINVAL, "%s: sorted and x are %s; sorted has one dimension, or all sizes of x but the "
                          "last", function, peri__pair_text(sorted, x, text, sizeof text));
    peri_tensor *lines = NULL, *flat = NULL, *y = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(sorted, &lines), out);
    PERI_TRY_GOTO(peri__contiguous_of(x, &flat), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(x), PERI_I64, x->ndim, x->shape, &y), out);
    peri_k_search_args k = {.dst = peri__data(y), .sorted = peri__data(lines), .x = peri__data(flat),
                            .dtype = x->dtype, .right = right, .one = sorted->ndim == 1,
                            .n = sorted->shape[sorted->ndim - 1], .per_line = x->ndim ? x->shape[x->ndim - 1] : 1};
    status = PERI_LAUNCH(peri__device(x), search, &k, peri__numel(y), PERI_ELEMENT_GRAIN);
out:
    peri_tensor_release(lines);
    peri_tensor_release(flat);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_searchsorted(peri_tensor *sorted, peri_tensor *x, bool right, peri_tensor **out)
{
    static const char *const function = "peri_op_searchsorted";
    char text[128];
    PERI_NEED(out);
    PERI_TRY(check_order(function, "sorted", sorted));
    PERI_TRY(check_order(function, "x", x));
    if (sorted->ndim == 0)
        return peri__fail(PERI_EINVAL, "%s: sorted is %s, wanted one dimension or more", function,
                          peri__tensor_text(sorted, text, sizeof text));
    peri_tensor *in[2] = {sorted, x};
    peri__operands o;
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 2));
    o.back = -1; /* places are not cast */
    peri_status status = check_alike(function, o.in[0], o.in[1]);
    if (status >= 0) status = search_sorted(function, o.in[0], o.in[1], right, &o.out);
    return peri__narrow(&o, status, out);
}

/** Of operands of one dtype, which are not recorded. */
static peri_status is_in(peri_tensor *x, peri_tensor *tests, peri_tensor **out)
{
    PERI__HELD peri_tensor *flat = NULL, *line = NULL, *sorted = NULL, *y = NULL;
    PERI_TRY(peri_tensor_reshape(tests, 1, (int64_t[]){peri__numel(tests)}, &line));
    PERI_TRY(peri_op_sort(line, 0, false, -1, &sorted, NULL));
    PERI_TRY(peri__contiguous_of(x, &flat));
    PERI_TRY(peri_tensor_new(peri__device(x), PERI_BOOL, x->ndim, x->shape, &y));
    peri_k_member_args k = {.dst = peri__data(y), .sorted = peri__data(sorted), .x = peri__data(flat),
                            .dtype = x->dtype, .n = sorted->shape[0]};
    PERI_TRY(PERI_LAUNCH(peri__device(x), member, &k, peri__numel(y), PERI_ELEMENT_GRAIN / 4));
    *out = peri__hand_over(&y);
    return PERI_OK;
}

peri_status peri_op_isin(peri_tensor *x, peri_tensor *tests, peri_tensor **out)
{
    static const char *const function = "peri_op_isin";
    PERI__HELD peri_tensor *own = NULL, *others = NULL;
    peri__operands o;
    PERI_NEED(out);
    PERI_TRY(check_order(function, "x", x));
    PERI_TRY(check_order(function, "tests", tests));
    PERI_TRY(peri__detached(x, &own));
    PERI_TRY(peri__detached(tests, &others));
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, (peri_tensor *[]){own, others}, 2));
    o.back = -1;
    peri_status status = check_alike(function, o.in[0], o.in[1]);
    if (status >= 0) status = is_in(o.in[0], o.in[1], &o.out);
    return peri__narrow(&o, status, out);
}

/* -- sorting ------------------------------------------------------------------------------------------------------- */

static const peri__node_vtab sort_vtab = {.name = "sort", .backward = gather_backward};

/** Which ones of each line are wanted. */
typedef struct {
    bool descending, nan_first;
    bool mode; /* the one that is there most often; nothing else is set but k, which is 1 */
    int64_t first, k;
} ranks;

/** Along the last dimension. */
static peri_status sort_lines(const char *function, peri_tensor *x, ranks wanted, peri_tensor **values,
                              peri_tensor **indices)
{
    const int32_t d = x->ndim - 1;
    int64_t shape[PERI_MAX_DIMS], n = x->shape[d], lines = n ? peri__numel(x) / n : 0;
    peri_tensor *flat = NULL, *value = NULL, *index = NULL;
    peri_status status;
    memcpy(shape, x->shape, sizeof shape);
    shape[d] = wanted.k;
    if (peri__numel(x) > INT32_MAX)
        return peri__fail(PERI_EINVAL, "%s: %lld elements, allowed: below 2^31", function, (long long)peri__numel(x));
    PERI_TRY_GOTO(peri__contiguous_of(x, &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, shape, &value), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(x), PERI_I64, x->ndim, shape, &index), out);
    peri_op_sort_lines args = {.x = peri__data(flat),
                               .values = peri__data(value),
                               .indices = peri__data(index),
                               .dtype = x->dtype,
                               .descending = wanted.descending,
                               .nan_first = wanted.nan_first,
                               .lines = lines,
                               .n = n,
                               .first = wanted.first,
                               .k = wanted.k};
    if (lines * wanted.k > 0) PERI_TRY_GOTO(PERI_RUN(peri__device(x), sort_lines, &args), out);
    status = peri__attach_places(&sort_vtab, x, d, index, value);
out:
    peri_tensor_release(flat);
    if (status < 0) {
        peri_tensor_release(value);
        peri_tensor_release(index);
    } else {
        *values = value;
        *indices = index;
    }
    return status;
}

/** The most frequent element of each line of the last dimension, which is not empty. */
static peri_status mode_lines(const char *function, peri_tensor *x, peri_tensor **values, peri_tensor **indices)
{
    const int32_t d = x->ndim - 1;
    int64_t shape[PERI_MAX_DIMS], n = x->shape[d];
    PERI__HELD peri_tensor *own = NULL, *sorted = NULL, *places = NULL, *value = NULL, *index = NULL;
    memcpy(shape, x->shape, sizeof shape);
    shape[d] = 1;
    PERI_TRY(peri__detached(x, &own));
    PERI_TRY(sort_lines(function, own, (ranks){.k = n}, &sorted, &places));
    PERI_TRY(peri__tensor_like(x, x->ndim, shape, &value));
    PERI_TRY(peri_tensor_new(peri__device(x), PERI_I64, x->ndim, shape, &index));
    peri_k_mode_args args = {.values = peri__data(value), .indices = peri__data(index), .sorted = peri__data(sorted),
                             .places = peri__data(places), .dtype = x->dtype, .n = n};
    PERI_TRY(PERI_LAUNCH(peri__device(x), mode_line, &args, peri__numel(value), peri__ceil_div(PERI_ELEMENT_GRAIN, n)));
    PERI_TRY(peri__attach_places(&sort_vtab, x, d, index, value));
    *values = peri__hand_over(&value);
    *indices = peri__hand_over(&index);
    return PERI_OK;
}

/** *out (new, recorded) = @x, whose dimension @d goes to the end, or comes back from there. A tensor without dimensions
 *  (`single`) has one there. */
static peri_status to_end(peri_tensor *x, int32_t d, bool single, peri_tensor **out)
{
    return single ? peri_tensor_reshape(x, 1, (int64_t[]){-1}, out) : peri__exchange_last(x, d, out);
}
static peri_status dim_moved_back(peri_tensor *x, int32_t d, bool single, peri_tensor **out)
{
    return single ? peri_tensor_reshape(x, 0, NULL, out) : peri__exchange_last(x, d, out);
}

/** Along @d. @indices may be NULL. */
static peri_status sort_along(const char *function, peri_tensor *x, int32_t d, ranks wanted, peri_tensor **values,
                              peri_tensor **indices)
{
    const bool single = x->ndim == 0;
    peri_tensor *last = NULL, *value = NULL, *index = NULL, *places = NULL;
    peri_status status;
    PERI_TRY_GOTO(to_end(x, d, single, &last), out);
    if (wanted.mode) PERI_TRY_GOTO(mode_lines(function, last, &value, &index), out);
    else PERI_TRY_GOTO(sort_lines(function, last, wanted, &value, &index), out);
    if (indices) PERI_TRY_GOTO(dim_moved_back(index, d, single, &places), out);
    status = dim_moved_back(value, d, single, values);
out:
    peri_tensor_release(last);
    peri_tensor_release(value);
    peri_tensor_release(index);
    if (status >= 0 && indices) *indices = places;
    else peri_tensor_release(places);
    return status;
}

/** A tensor without dimensions has no line of another length than 1 in its place. */
static peri_status check_single(const char *function, const peri_tensor *x, int64_t k)
{
    if (x->ndim > 0 || k == 1) return PERI_OK;
    return peri__fail(PERI_ERANGE, "%s: %lld elements of a tensor without dimensions, allowed: 1", function,
                      (long long)k);
}

/** What is ordered along a dimension: *d is dimension @dim of @x, whose elements have an order, and *n its size. */
static peri_status order_along(const char *function, const peri_tensor *x, int32_t dim, int32_t *d, int64_t *n)
{
    PERI_TRY(check_order(function, "x", x));
    PERI_TRY(peri__along(function, x, dim, d));
    *n = peri__along_size(x, *d);
    return PERI_OK;
}

peri_status peri_op_sort(peri_tensor *x, int32_t dim, bool descending, int64_t k, peri_tensor **values,
                         peri_tensor **indices)
{
    static const char *const function = "peri_op_sort";
    char text[128];
    peri__words words;
    int32_t d;
    int64_t n;
    PERI_NEED(values);
    PERI_TRY(order_along(function, x, dim, &d, &n));
    if (k < 0) k = n;
    if (k > n)
        return peri__fail(PERI_ERANGE, "%s: the first %lld of %s of %s, allowed: 0..%lld", function, (long long)k,
                          peri__dim_text(d, &words), peri__tensor_text(x, text, sizeof text), (long long)n);
    PERI_TRY(check_single(function, x, k));
    return sort_along(function, x, d, (ranks){.descending = descending, .k = k}, values, indices);
}

/** The element of rank @rank along @d, which is gone from the results unless @keepdim. */
static peri_status one_rank(const char *function, peri_tensor *x, int32_t d, bool keepdim, ranks wanted,
                            peri_tensor **values, peri_tensor **indices)
{
    peri_tensor *value, *index = NULL, *place = NULL;
    PERI_TRY(sort_along(function, x, d, wanted, &value, indices ? &index : NULL));
    if (keepdim || x->ndim == 0) {
        *values = value;
        if (indices) *indices = index;
        return PERI_OK;
    }
    peri_status status = indices ? peri_tensor_select(index, d, 0, &place) : PERI_OK;
    if (status >= 0) status = peri_tensor_select(value, d, 0, values);
    peri_tensor_release(value);
    peri_tensor_release(index);
    if (status >= 0 && indices) *indices = place;
    else peri_tensor_release(place);
    return status;
}

peri_status peri_op_kthvalue(peri_tensor *x, int64_t k, int32_t dim, bool keepdim, peri_tensor **values,
                             peri_tensor **indices)
{
    static const char *const function = "peri_op_kthvalue";
    char text[128];
    peri__words words;
    int32_t d;
    int64_t n;
    PERI_NEED(values);
    PERI_TRY(order_along(function, x, dim, &d, &n));
    if (k < 1 || k > n)
        return peri__fail(PERI_ERANGE, "%s: k is %lld of %s of %s, allowed: 1..%lld", function, (long long)k,
                          peri__dim_text(d, &words), peri__tensor_text(x, text, sizeof text), (long long)n);
    return one_rank(function, x, d, keepdim, (ranks){.first = k - 1, .k = 1}, values, indices);
}

peri_status peri_op_ranks(peri_tensor *x, int32_t dim, int64_t first, int64_t k, peri_tensor **values,
                          peri_tensor **indices)
{
    static const char *const function = "peri_op_ranks";
    char text[128];
    peri__words words;
    int32_t d;
    int64_t n;
    PERI_NEED(values);
    PERI_TRY(order_along(function, x, dim, &d, &n));
    if (first < 0 || k < 0 || first > n - k)
        return peri__fail(PERI_ERANGE, "%s: %lld ranks from %lld on of %s of %s, allowed: from 0 on, %lld in all",
                          function, (long long)k, (long long)first, peri__dim_text(d, &words),
                          peri__tensor_text(x, text, sizeof text), (long long)n);
    PERI_TRY(check_single(function, x, k));
    return sort_along(function, x, d, (ranks){.first = first, .k = k, .nan_first = true}, values, indices);
}

/** order_along of a dimension that may not be empty. */
static peri_status order_some(const char *function, const peri_tensor *x, int32_t dim, int32_t *d, int64_t *n)
{
    char text[128];
    peri__words words;
    PERI_TRY(order_along(function, x, dim, d, n));
    if (*n > 0) return PERI_OK;
    return peri__fail(PERI_ERANGE, "%s: %s of %s is empty", function, peri__dim_text(*d, &words),
                      peri__tensor_text(x, text, sizeof text));
}

peri_status peri_op_mode(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values, peri_tensor **indices)
{
    static const char *const function = "peri_op_mode";
    int32_t d;
    int64_t n;
    PERI_NEED(values);
    PERI_TRY(order_some(function, x, dim, &d, &n));
    return one_rank(function, x, d, keepdim, (ranks){.mode = true, .k = 1}, values, indices);
}

peri_status peri_op_median(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values, peri_tensor **indices)
{
    static const char *const function = "peri_op_median";
    int32_t d;
    int64_t n;
    PERI_NEED(values);
    PERI_TRY(order_some(function, x, dim, &d, &n));
    const ranks middle = {.first = (n - 1) / 2, .k = 1, .nan_first = true};
    return one_rank(function, x, d, keepdim, middle, values, indices);
}

/* -- running extremes ---------------------------------------------------------------------------------------------- */

static const peri__node_vtab running_vtab = {.name = "running extreme", .backward = gather_backward};

static peri_status running_extreme(const char *function, peri_tensor *x, int32_t dim, bool least, peri_tensor **values,
                                   peri_tensor **indices)
{
    int32_t d;
    int64_t outer, n, inner;
    peri_tensor *flat = NULL, *value = NULL, *index = NULL;
    peri_status status;
    PERI_NEED(values);
    PERI_TRY(order_along(function, x, dim, &d, &n));
    PERI_TRY_GOTO(peri__contiguous_of(x, &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &value), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(x), PERI_I64, x->ndim, x->shape, &index), out);
    peri__around(flat, d, &outer, &n, &inner);
    peri_k_running_extreme_args args = {.values = peri__data(value),
                                        .indices = peri__data(index),
                                        .x = peri__data(flat),
                                        .dtype = x->dtype,
                                        .least = least,
                                        .n = n,
                                        .inner = inner};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), running_extreme, &args, n ? outer * inner : 0,
                              peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(n, 1))),
                  out);
    status = peri__attach_places(&running_vtab, x, d, index, value);
out:
    peri_tensor_release(flat);
    if (status >= 0) *values = value;
    else peri_tensor_release(value);
    if (status >= 0 && indices) *indices = index;
    else peri_tensor_release(index);
    return status;
}

peri_status peri_op_cummax(peri_tensor *x, int32_t dim, peri_tensor **values, peri_tensor **indices)
{
    return running_extreme("peri_op_cummax", x, dim, false, values, indices);
}
peri_status peri_op_cummin(peri_tensor *x, int32_t dim, peri_tensor **values, peri_tensor **indices)
{
    return running_extreme("peri_op_cummin", x, dim, true, values, indices);
}

/* -- numbers in a row ---------------------------------------------------------------------------------------------- */

peri_status peri_tensor_arange(peri_device *device, int32_t dtype, double start, double step, int64_t n,
                               peri_tensor **out)
{
    static const char *const function = "peri_tensor_arange";
    const bool real = dtype == PERI_F32 || dtype == PERI_F64;
    const double last = start + step * (double)peri__max(n - 1, 0), most = dtype == PERI_I32 ? 0x1p31 - 1 : 0x1p53;
    peri_tensor *t;
    PERI_NEED(out);
    if (!real && dtype != PERI_I64 && dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: dtype %s, allowed: f32, f64, i64, i32", function, peri_dtype_name(dtype));
    if (!isfinite(start) || !isfinite(step) || (!real && (start != floor(start) || step != floor(step))))
        return peri__fail(PERI_EINVAL, "%s: from %g by %g, allowed: %s", function, start, step,
                          real ? "finite numbers" : "whole numbers");
    if (!real && (fabs(start) > most || fabs(last) > most))
        return peri__fail(PERI_ERANGE, "%s: numbers from %.0f to %.0f in %s, allowed: -%.0f..%.0f", function, start,
                          last, peri_dtype_name(dtype), most, most);
    PERI_TRY(peri_tensor_new(device, dtype, 1, &n, &t));
    peri_k_iota_args args = {.dst = peri__data(t),
                             .dtype = dtype,
                             .start = start,
                             .step = step,
                             .integer_start = real ? 0 : (int64_t)start,
                             .integer_step = real ? 0 : (int64_t)step};
    peri_status status = PERI_LAUNCH(device, iota, &args, n, PERI_ELEMENT_GRAIN);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}
