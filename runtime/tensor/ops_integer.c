/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_integer.c: arithmetic of integers and bool. Nothing here has a gradient.
 */
#include "tensor_internal.h"
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"

#include <perilune/ops.h>

#include <math.h>

/* -- two operands -------------------------------------------------------------------------------------------------- */

static peri_status refuse_bool(const char *function, const peri_tensor *x)
{
    if (x->dtype != PERI_BOOL) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: x is bool, which has no numbers; cast it (in Lua t:to \"i64\")", function);
}

peri_status peri__integer_binary(const char *function, int32_t op, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    static const int32_t ops[] = {[PERI_BINARY_ADD] = PERI_INTEGER_ADD, [PERI_BINARY_SUB] = PERI_INTEGER_SUB,
                                  [PERI_BINARY_MUL] = PERI_INTEGER_MUL, [PERI_BINARY_MAX] = PERI_INTEGER_MAX,
                                  [PERI_BINARY_MIN] = PERI_INTEGER_MIN, [PERI_BINARY_POW] = PERI_INTEGER_POW};
    int32_t integer = ops[op];
    PERI_TRY(peri__check_same_device(function, a, b));
    if (a->dtype == PERI_BOOL) { /* "or" and "and", as in PyTorch */
        if (op == PERI_BINARY_SUB || op == PERI_BINARY_POW) return refuse_bool(function, a);
        if (op == PERI_BINARY_ADD) integer = PERI_INTEGER_MAX;
        if (op == PERI_BINARY_MUL) integer = PERI_INTEGER_MIN;
    }
    return peri__integer(function, integer, a, b, out);
}

/* -- one operand and numbers --------------------------------------------------------------------------------------- */

static bool is_fraction(double x) { return !isfinite(x) || x != floor(x); }

bool peri__becomes_float(int32_t op, double a, double b)
{
    switch (op) {
    case PERI_UNARY_EXP:
    case PERI_UNARY_LOG:
    case PERI_UNARY_SQRT:
    case PERI_UNARY_SIGMOID:
    case PERI_UNARY_TANH:
    case PERI_UNARY_LOG1P:
    case PERI_UNARY_EXPM1:
    case PERI_UNARY_RSQRT:
    case PERI_UNARY_SIN:
    case PERI_UNARY_COS:
    case PERI_UNARY_ERF:
    case PERI_UNARY_RECIPROCAL: return true;
    case PERI_UNARY_AFFINE: return is_fraction(a) || is_fraction(b);
    case PERI_UNARY_POW: return is_fraction(a);
    case PERI_UNARY_CLAMP: return (isfinite(a) && is_fraction(a)) || (isfinite(b) && is_fraction(b));
    default: return false;
    }
}

/** out = the whole number @value as a tensor of @x's dtype. Unsigned ones take negative numbers, too, which they are
 *  counted down by. */
static peri_status number_of(const char *function, const peri_tensor *x, double value, peri_tensor **out)
{
    if (x->dtype == PERI_U8 && value < 0 && value > -0x1p8) value += 0x1p8;
    PERI_TRY(peri__check_fits(function, x->dtype, value));
    return peri_tensor_full(peri__device(x), x->dtype, 0, NULL, value, out);
}

peri_status peri__integer_with_number(const char *function, int32_t op, peri_tensor *x, double value, peri_tensor **out)
{
    peri_tensor *number;
    PERI_TRY(number_of(function, x, value, &number));
    peri_status status = peri__integer(function, op, x, number, out);
    peri_tensor_release(number);
    return status;
}

/** out = scale x + shift */
static peri_status affine(const char *function, peri_tensor *x, double scale, double shift, peri_tensor **out)
{
    peri_tensor *scaled;
    if (scale == 1 && shift != 0) return peri__integer_with_number(function, PERI_INTEGER_ADD, x, shift, out);
    PERI_TRY(peri__integer_with_number(function, PERI_INTEGER_MUL, x, scale, &scaled));
    if (shift == 0) {
        *out = scaled;
        return PERI_OK;
    }
    peri_status status = peri__integer_with_number(function, PERI_INTEGER_ADD, scaled, shift, out);
    peri_tensor_release(scaled);
    return status;
}

static peri_status absolute_value(const char *function, peri_tensor *x, peri_tensor **out)
{
    peri_tensor *negative;
    PERI_TRY(peri__integer_with_number(function, PERI_INTEGER_MUL, x, x->dtype == PERI_U8 ? 1 : -1, &negative));
    peri_status status = peri__integer(function, PERI_INTEGER_MAX, x, negative, out);
    peri_tensor_release(negative);
    return status;
}

/** Bounds that no number of the dtype is beyond are none. The result is a tensor of its own in any case. */
static peri_status clamp(const char *function, peri_tensor *x, double low, double high, peri_tensor **out)
{
    double least, past;
    peri_tensor *raised;
    if (low != low || high != high)
        return peri__fail(PERI_EINVAL, "%s: a bound of %s is NaN, allowed: numbers", function,
                          peri_dtype_name(x->dtype));
    peri__range_of(x->dtype, &least, &past);
    const bool raise = low > least, lower = high < past - 1;
    if (!raise && !lower) return peri__integer_with_number(function, PERI_INTEGER_MUL, x, 1, out);
    if (!lower) return peri__integer_with_number(function, PERI_INTEGER_MAX, x, low, out);
    if (!raise) return peri__integer_with_number(function, PERI_INTEGER_MIN, x, high, out);
    PERI_TRY(peri__integer_with_number(function, PERI_INTEGER_MAX, x, low, &raised));
    peri_status status = peri__integer_with_number(function, PERI_INTEGER_MIN, raised, high, out);
    peri_tensor_release(raised);
    return status;
}

/** *x (owned) = *x times @y */
static peri_status multiply(const char *function, peri_tensor **x, peri_tensor *y)
{
    peri_tensor *product;
    PERI_TRY(peri__integer(function, PERI_INTEGER_MUL, *x, y, &product));
    peri_tensor_release(*x);
    *x = product;
    return PERI_OK;
}

/** By squares: the exponent's bits from the lowest. */
static peri_status power(const char *function, peri_tensor *x, double exponent, peri_tensor **out)
{
    peri_tensor *y = NULL, *square = x;
    peri_status status;
    if (exponent < 0 || exponent >= 0x1p53)
        return peri__fail(PERI_ERANGE, "%s: the exponent %.0f of %s, allowed: 0..2^53 - 1; of floats any (in Lua "
                          "t:to \"f32\")", function, exponent, peri_dtype_name(x->dtype));
    peri_tensor_retain(square);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &y), out);
    PERI_TRY_GOTO(peri_tensor_fill(y, 1), out);
    for (int64_t e = (int64_t)exponent; e > 0; e >>= 1) {
        if (e & 1) PERI_TRY_GOTO(multiply(function, &y, square), out);
        if (e > 1) PERI_TRY_GOTO(multiply(function, &square, square), out);
    }
    status = PERI_OK;
out:
    peri_tensor_release(square);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

static peri_status one_operand(const char *function, int32_t op, peri_tensor *x, double a, double b, peri_tensor **out)
{
    switch (op) {
    case PERI_UNARY_AFFINE: return affine(function, x, a, b, out);
    case PERI_UNARY_SQUARE: return peri__integer(function, PERI_INTEGER_MUL, x, x, out);
    case PERI_UNARY_POW: return power(function, x, a, out);
    default: break;
    }
    PERI_TRY(refuse_bool(function, x));
    switch (op) {
    case PERI_UNARY_ABS: return absolute_value(function, x, out);
    case PERI_UNARY_RELU: return peri__integer_with_number(function, PERI_INTEGER_MAX, x, 0, out);
    case PERI_UNARY_CLAMP: return clamp(function, x, a, b, out);
    case PERI_UNARY_SIGN: return clamp(function, x, -1, 1, out);
    case PERI_UNARY_FLOOR:
    case PERI_UNARY_CEIL:
    case PERI_UNARY_ROUND:
    case PERI_UNARY_TRUNC: return peri__integer_with_number(function, PERI_INTEGER_MUL, x, 1, out);
    default: return peri__check_real(function, "x", x); /* which it is not */
    }
}

peri_status peri__integer_unary(const char *function, int32_t op, peri_tensor *x, double a, double b, peri_tensor **out)
{
    const bool counted = x->dtype == PERI_BOOL &&
        (op == PERI_UNARY_AFFINE || op == PERI_UNARY_SQUARE || op == PERI_UNARY_POW || op == PERI_UNARY_CLAMP);
    /* counted: bool among numbers is i64 */
    peri_tensor *wide;
    PERI_TRY(peri__cast(x, counted ? PERI_I64 : x->dtype, &wide));
    peri_status status = one_operand(function, op, wide, a, b, out);
    peri_tensor_release(wide);
    return status;
}
