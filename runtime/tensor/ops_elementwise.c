/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_elementwise.c: functions of one number, arithmetic with broadcasting, expand.
 */
#include "../base/floats.h"
#include "tensor_internal.h"
#include "../../kernels/dense.h"

#include <perilune/ops.h>

/* -- functions of one number --------------------------------------------------------------------------------------- */

/** Whether the function has the derivative 0 wherever it has one. Its gradient is 0 then, also where the gradient of
 *  its result is infinite or NaN, as in PyTorch. */
static bool is_flat(int32_t op, double a)
{
    return (op >= PERI_UNARY_FLOOR && op <= PERI_UNARY_SIGN) || (op == PERI_UNARY_POW && a == 0);
}

static bool reads_saved(int32_t op) { return op != PERI_UNARY_IDENTITY && op != PERI_UNARY_AFFINE; }

enum { KEPT_OP };

/** saved[0]: y or x, as the function wants; number: a, b. */
static peri_status unary_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    int32_t op = (int32_t)node->kept[KEPT_OP];
    peri_tensor *dy = NULL, *saved = NULL, *dx = NULL;
    bool own = peri__exclusive(grad_out[0]);
    peri_status status;
    if (is_flat(op, node->number[0])) {
        PERI_TRY(peri__tensor_like(grad_out[0], grad_out[0]->ndim, grad_out[0]->shape, &dx));
        status = peri_tensor_fill(dx, 0);
        goto out;
    }
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &dy), out);
    if (reads_saved(op)) PERI_TRY_GOTO(peri__contiguous_of(node->saved[0], &saved), out);
    if (own) peri_tensor_retain(dx = dy);
    else PERI_TRY_GOTO(peri__tensor_like(dy, dy->ndim, dy->shape, &dx), out);
    peri_k_unary_grad_args args = {.dx = peri__data(dx),
                                   .dy = peri__data(dy),
                                   .saved = saved ? peri__data(saved) : NULL,
                                   .dtype = dy->dtype,
                                   .op = op,
                                   .a = node->number[0],
                                   .b = node->number[1]};
    status = PERI_LAUNCH(peri__device(dy), unary_grad, &args, peri__numel(dy), PERI_ELEMENT_GRAIN);
out:
    peri_tensor_release(dy);
    peri_tensor_release(saved);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab unary_vtab = {.name = "unary", .backward = unary_backward};

static peri_status unary_wide(const char *function, int32_t op, peri_tensor *x, double a, double b, peri_tensor **out)
{
    PERI_TRY(peri__check_real(function, "x", x));
    if (!out) return peri__fail(PERI_EINVAL, "%s: out is missing", function);
    peri_tensor *y;
    peri__node *node;
    PERI_TRY(peri__unary(x, op, a, b, &y));
    peri_status status = peri__attach(&unary_vtab, &x, 1, &y, 1, &node);
    if (status >= 0 && node) {
        node->name = function;
        node->kept[KEPT_OP] = op;
        node->number[0] = a;
        node->number[1] = b;
        if (op <= PERI_UNARY_FROM_OUTPUT) status = peri__node_save_output(node, 0, y);
        else if (reads_saved(op) && !is_flat(op, a)) peri__node_save(node, 0, x);
    }
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** Whether autocast computes the function in f32. */
static bool in_f32(int32_t op)
{
    return op == PERI_UNARY_EXP || op == PERI_UNARY_LOG || op == PERI_UNARY_POW || op == PERI_UNARY_SQUARE ||
        op == PERI_UNARY_RECIPROCAL || op == PERI_UNARY_SOFTPLUS || op == PERI_UNARY_LOG1P ||
        op == PERI_UNARY_EXPM1 || op == PERI_UNARY_RSQRT;
}

static peri_status unary(const char *function, int32_t op, peri_tensor *x, double a, double b, peri_tensor **out)
{
    peri__operands o;
    if (x && peri__is_integer(x->dtype)) {
        PERI_NEED(out);
        if (!peri__becomes_float(op, a, b)) return peri__integer_unary(function, op, x, a, b, out);
        PERI_TRY(peri_tensor_to(x, PERI_F32, NULL, &x));
        peri_status status = unary(function, op, x, a, b, out);
        peri_tensor_release(x);
        return status;
    }
    PERI_TRY(peri__widen_operands(&o, in_f32(op) ? PERI__IN_F32 : PERI__IN_OWN, &x, 1));
    return peri__narrow(&o, unary_wide(function, op, o.in[0], a, b, out ? &o.out : NULL), out);
}

#define PLAIN(NAME, name)                                                                                              \
    peri_status peri_op_##name(peri_tensor *x, peri_tensor **out)                                                      \
    {                                                                                                                  \
        return unary("peri_op_" #name, PERI_UNARY_##NAME, x, 0, 0, out);                                               \
    }
PERI_UNARY_PLAIN(PLAIN)
#undef PLAIN

peri_status peri_op_leaky_relu(peri_tensor *x, double slope, peri_tensor **out)
{
    return unary("peri_op_leaky_relu", PERI_UNARY_LEAKY_RELU, x, slope, 0, out);
}
peri_status peri_op_clamp(peri_tensor *x, double low, double high, peri_tensor **out)
{
    PERI__OWN_FLOATS;
    /* where elements are equal to a bound */
    if (x && x->dtype == PERI_F32) low = (double)(float)low, high = (double)(float)high;
    if (x && !peri__is_integer(x->dtype) && (low != low || high != high)) /* NaN everywhere, as in PyTorch */
        return unary("peri_op_clamp", PERI_UNARY_AFFINE, x, 0, (double)NAN, out);
    return unary("peri_op_clamp", PERI_UNARY_CLAMP, x, low, high, out);
}
peri_status peri_op_pow(peri_tensor *x, double exponent, peri_tensor **out)
{
    return unary("peri_op_pow", PERI_UNARY_POW, x, exponent, 0, out);
}
peri_status peri_op_affine(peri_tensor *x, double scale, double shift, peri_tensor **out)
{
    return unary("peri_op_affine", PERI_UNARY_AFFINE, x, scale, shift, out);
}
peri_status peri_op_reciprocal(peri_tensor *x, double numerator, peri_tensor **out)
{
    return unary("peri_op_reciprocal", PERI_UNARY_RECIPROCAL, x, numerator, 0, out);
}

/* -- arithmetic ---------------------------------------------------------------------------------------------------- */

static peri_status check_pair(const char *function, const peri_tensor *a, const peri_tensor *b)
{
    char text[300];
    PERI_TRY(peri__check_real(function, "a", a));
    PERI_TRY(peri__check_real(function, "b", b));
    if (a->dtype != b->dtype)
        return peri__fail(PERI_EINVAL, "%s: dtypes differ: %s", function, peri__pair_text(a, b, text, sizeof text));
    return peri__check_same_device(function, a, b);
}

/** out = the part of @g that input @i of the larger or the smaller of two gets: nothing where the other one is it, half
 *  where both are. */
static peri_status extreme_grad(const char *function, int32_t op, peri_tensor *g, peri_tensor *const *saved, int32_t i,
                                peri_tensor **out)
{
    const int32_t loses = op == PERI_BINARY_MAX ? PERI_COMPARE_LT : PERI_COMPARE_GT;
    peri_tensor *lost = NULL, *equal = NULL, *half = NULL, *won = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__compare(function, loses, saved[i], saved[1 - i], 0, 0, &lost), out);
    PERI_TRY_GOTO(peri__compare(function, PERI_COMPARE_EQ, saved[0], saved[1], 0, 0, &equal), out);
    PERI_TRY_GOTO(peri__unary(g, PERI_UNARY_AFFINE, 0.5, 0, &half), out);
    PERI_TRY_GOTO(peri__where(function, lost, NULL, g, &won), out);
    status = peri__where(function, equal, half, won, out);
out:
    peri_tensor_release(lost);
    peri_tensor_release(equal);
    peri_tensor_release(half);
    peri_tensor_release(won);
    return status;
}

/** out = the part of @g that input @i of a function of two numbers gets that is not plain arithmetic. */
static peri_status rare_grad(const char *function, int32_t op, peri_tensor *g, peri_tensor *const *saved, int32_t i,
                             peri_tensor **out)
{
    const bool power = op == PERI_BINARY_POW;
    if (i == 0 && !power) { /* what is left of a, which is a - b times a whole number */
        peri_tensor_retain(*out = g);
        return PERI_OK;
    }
    const int32_t factor = power ? (i == 0 ? PERI_BINARY_POW_BASE : PERI_BINARY_POW_EXPONENT)
                                 : (op == PERI_BINARY_REMAINDER ? PERI_BINARY_FLOOR : PERI_BINARY_TRUNC);
    peri_tensor *by, *product;
    PERI_TRY(peri__binary(function, factor, saved[0], saved[1], &by));
    peri_status status = peri__binary(function, PERI_BINARY_MUL, g, by, power ? out : &product);
    peri_tensor_release(by);
    if (status < 0 || power) return status;
    status = peri__unary(product, PERI_UNARY_AFFINE, -1, 0, out);
    peri_tensor_release(product);
    return status;
}

/** saved: a, b, and for a quotient y; shape: a's, b's. */
static peri_status binary_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    static const char *const function = "binary backward";
    int32_t op = (int32_t)node->kept[KEPT_OP];
    peri_tensor *g = grad_out[0];
    for (int32_t i = 0; i < 2; i++) {
        if (!peri__needs(node, i)) continue;
        peri_tensor *full = NULL, *part = NULL;
        peri_status status = PERI_OK;
        if (op == PERI_BINARY_ADD || (op == PERI_BINARY_SUB && i == 0)) {
            full = g;
            peri_tensor_retain(full);
        } else if (op == PERI_BINARY_MAX || op == PERI_BINARY_MIN) {
            status = extreme_grad(function, op, g, node->saved, i, &full);
        } else if (op > PERI_BINARY_LAST_PLAIN) {
            status = rare_grad(function, op, g, node->saved, i, &full);
        } else if (op == PERI_BINARY_SUB) {
            status = peri__unary(g, PERI_UNARY_AFFINE, -1, 0, &full);
        } else if (op == PERI_BINARY_MUL) {
            status = peri__binary(function, PERI_BINARY_MUL, g, node->saved[1 - i], &full);
        } else if (i == 0) {
            status = peri__binary(function, PERI_BINARY_DIV, g, node->saved[1], &full);
        } else { /* -g y / b */
            peri_tensor *product = NULL, *integer_quotient = NULL;
            status = peri__binary(function, PERI_BINARY_MUL, g, node->saved[2], &product);
            if (status >= 0)
                status = peri__binary(function, PERI_BINARY_DIV, product, node->saved[1], &integer_quotient);
            if (status >= 0) status = peri__unary(integer_quotient, PERI_UNARY_AFFINE, -1, 0, &full);
            peri_tensor_release(product);
            peri_tensor_release(integer_quotient);
        }
        if (status >= 0) status = peri__sum_to(full, node->shape[i].ndim, node->shape[i].size, &part);
        peri_tensor_release(full);
        PERI_TRY(status);
        grad_in[i] = part;
    }
    return PERI_OK;
}

static const peri__node_vtab binary_vtab = {.name = "binary", .backward = binary_backward};

static peri_status binary_wide(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    PERI_TRY(check_pair(function, a, b));
    if (!out) return peri__fail(PERI_EINVAL, "%s: out is missing", function);
    peri_tensor *y, *in[2] = {a, b};
    peri__node *node;
    PERI_TRY(peri__binary(function, op, a, b, &y));
    if (op == PERI_BINARY_FLOOR) { /* flat wherever it has a derivative */
        *out = y;
        return PERI_OK;
    }
    peri_status status = peri__attach(&binary_vtab, in, 2, &y, 1, &node);
    if (status >= 0 && node) {
        node->name = function;
        node->kept[KEPT_OP] = op;
        for (int32_t i = 0; i < 2; i++) node->shape[i] = peri__shape_of(in[i]);
        const bool both = op >= PERI_BINARY_MAX; /* extremes and the rare ones */
        if ((op == PERI_BINARY_MUL && b->requires_grad) || both) peri__node_save(node, 0, a);
        if ((op == PERI_BINARY_MUL && a->requires_grad) || op == PERI_BINARY_DIV || both)
            peri__node_save(node, 1, b);
        if (op == PERI_BINARY_DIV && b->requires_grad) status = peri__node_save_output(node, 2, y);
    }
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** Of integers, which is f32. */
static peri_status integer_quotient(const char *function, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    peri_tensor *x, *y = NULL;
    PERI_TRY(peri__cast(a, PERI_F32, &x));
    peri_status status = peri__cast(b, PERI_F32, &y);
    if (status >= 0) status = binary_wide(function, PERI_BINARY_DIV, x, y, out);
    peri_tensor_release(x);
    peri_tensor_release(y);
    return status;
}

peri_status peri__float_binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    peri__operands o;
    peri_tensor *in[2] = {a, b};
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 2));
    return peri__narrow(&o, binary_wide(function, op, o.in[0], o.in[1], out ? &o.out : NULL), out);
}

static peri_status binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    peri__operands o;
    peri_tensor *in[2] = {a, b};
    const bool integer = a && b && peri__is_integer(a->dtype) && peri__is_integer(b->dtype);
    if (integer && op == PERI_BINARY_DIV) return integer_quotient(function, a, b, out);
    if (!integer || !out) return peri__float_binary(function, op, a, b, out);
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 2));
    return peri__narrow(&o, peri__integer_binary(function, op, o.in[0], o.in[1], &o.out), out);
}

peri_status peri_op_add(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return binary("peri_op_add", PERI_BINARY_ADD, a, b, out);
}
peri_status peri_op_sub(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return binary("peri_op_sub", PERI_BINARY_SUB, a, b, out);
}
peri_status peri_op_mul(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return binary("peri_op_mul", PERI_BINARY_MUL, a, b, out);
}
peri_status peri_op_div(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return binary("peri_op_div", PERI_BINARY_DIV, a, b, out);
}

peri_status peri_op_power(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    static const char *const function = "peri_op_power";
    if (!a || !b || !out || peri__autocast(peri__device(a)) < 0) return binary(function, PERI_BINARY_POW, a, b, out);
    peri__operands o;
    peri_tensor *in[2] = {a, b};
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, in, 2));
    return peri__narrow(&o, binary(function, PERI_BINARY_POW, o.in[0], o.in[1], &o.out), out);
}

peri_status peri_op_maximum(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return binary("peri_op_maximum", PERI_BINARY_MAX, a, b, out);
}
peri_status peri_op_minimum(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return binary("peri_op_minimum", PERI_BINARY_MIN, a, b, out);
}

/** saved: a, b. The gradient of c is the upstream one. */
static peri_status muladd_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    for (int32_t i = 0; i < 2; i++)
        if (peri__needs(node, i))
            PERI_TRY(peri__binary("muladd backward", PERI_BINARY_MUL, grad_out[0], node->saved[1 - i], &grad_in[i]));
    if (peri__needs(node, 2)) {
        peri_tensor_retain(grad_out[0]);
        grad_in[2] = grad_out[0];
    }
    return PERI_OK;
}

static const peri__node_vtab muladd_vtab = {.name = "muladd", .backward = muladd_backward};

static peri_status muladd(peri_tensor *a, peri_tensor *b, peri_tensor *c, peri_tensor **out)
{
    char text[300];
    peri_tensor *in[3] = {a, b, c}, *flat[3] = {NULL}, *y = NULL;
    for (int32_t i = 1; i < 3; i++) {
        PERI_TRY(check_pair("peri_op_muladd", a, in[i]));
        if (!peri__same_shape(a, in[i]))
            return peri__fail(PERI_EINVAL, "peri_op_muladd: shapes differ: %s",
                              peri__pair_text(a, in[i], text, sizeof text));
    }
    peri_status status;
    peri__node *node;
    for (int32_t i = 0; i < 3; i++) PERI_TRY_GOTO(peri__contiguous_of(in[i], &flat[i]), out);
    PERI_TRY_GOTO(peri__tensor_like(a, a->ndim, a->shape, &y), out);
    peri_k_muladd_args args = {.dst = peri__data(y),
                               .a = peri__data(flat[0]),
                               .b = peri__data(flat[1]),
                               .c = peri__data(flat[2]),
                               .dtype = a->dtype,
                               .scale = 1};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(a), muladd, &args, peri__numel(y), PERI_ELEMENT_GRAIN), out);
    PERI_TRY_GOTO(peri__attach(&muladd_vtab, in, 3, &y, 1, &node), out);
    if (node) {
        peri__node_save(node, 0, a);
        peri__node_save(node, 1, b);
    }
out:
    for (int32_t i = 0; i < 3; i++) peri_tensor_release(flat[i]);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_muladd(peri_tensor *a, peri_tensor *b, peri_tensor *c, peri_tensor **out)
{
    PERI_NEED(out);
    peri__operands o;
    peri_tensor *in[3] = {a, b, c};
    static const char *const names[] = {"a", "b", "c"};
    for (int32_t i = 0; i < 3; i++) PERI_TRY(peri__check_real("peri_op_muladd", names[i], in[i]));
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 3));
    return peri__narrow(&o, muladd(o.in[0], o.in[1], o.in[2], &o.out), out);
}

/* -- expand -------------------------------------------------------------------------------------------------------- */

static peri_status expand_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    return peri__sum_to(grad_out[0], node->shape[0].ndim, node->shape[0].size, &grad_in[0]);
}

static const peri__node_vtab expand_vtab = {.name = "expand", .backward = expand_backward};

peri_status peri_tensor_expand(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    if (ndim > 0) PERI_NEED(shape);
    peri_tensor *view;
    peri__node *node;
    peri__words words;
    for (int32_t d = 0; d < ndim && d < PERI_MAX_DIMS; d++)
        if (shape[d] < 0)
            return peri__fail(PERI_EINVAL, "peri_tensor_expand: the size %lld of %s", (long long)shape[d],
                              peri__dim_text(d, &words));
    PERI_TRY(peri__expand(t, ndim, shape, &view));
    peri_status status = peri__attach(&expand_vtab, &t, 1, &view, 1, &node);
    if (status < 0) {
        peri_tensor_release(view);
        return status;
    }
    if (node) node->shape[0] = peri__shape_of(t);
    *out = view;
    return PERI_OK;
}
