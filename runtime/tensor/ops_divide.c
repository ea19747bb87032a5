/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_divide.c: divisions whose quotient is whole: what it is, and what is left. Of integers and of floats.
 */
#include "tensor_internal.h"
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"

#include <perilune/ops.h>

#include <math.h>

/** An error if one of the divisors is 0. Waits for them. */
static peri_status check_divisors(const char *function, peri_tensor *b)
{
    peri_tensor *zero, *sum = NULL;
    double count = 0;
    PERI_TRY(peri__compare(function, PERI_COMPARE_EQ, b, NULL, 0, 0, &zero));
    peri_status status = peri_op_sum(zero, NULL, 0, false, &sum);
    if (status >= 0) status = peri_tensor_item(sum, 0, &count);
    peri_tensor_release(zero);
    peri_tensor_release(sum);
    if (status < 0 || count == 0) return status;
    char text[128];
    return peri__fail(PERI_ERANGE, "%s: %.0f of %lld divisors are 0: %s", function, count, (long long)peri__numel(b),
                      peri__tensor_text(b, text, sizeof text));
}

/** A division that has a whole quotient, by its name among integers and among floats. */
typedef struct division {
    const char *function;
    int32_t integer, real;
} division;
static const division floor_divide = {"peri_op_floor_divide", PERI_INTEGER_FLOOR, PERI_BINARY_FLOOR},
                      remainder_of = {"peri_op_remainder", PERI_INTEGER_REMAINDER, PERI_BINARY_REMAINDER},
                      fmod_of = {"peri_op_fmod", PERI_INTEGER_FMOD, PERI_BINARY_FMOD};

static peri_status check_bool(const division *d, const peri_tensor *a, const peri_tensor *b, int32_t common)
{
    char text[300];
    if (common != PERI_BOOL) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: a and b are %s, allowed: integers and floats; cast them (in Lua t:to \"i64\")",
                      d->function, peri__pair_text(a, b, text, sizeof text));
}

static peri_status divide_whole(const division *d, peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    peri__operands o;
    peri_tensor *in[2] = {a, b};
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(d->function, "a", a, -1, -1));
    PERI_TRY(peri__check_tensor(d->function, "b", b, -1, -1));
    PERI_TRY(peri__check_same_device(d->function, a, b));
    const int32_t common = peri__common_dtype(in, 2);
    PERI_TRY(check_bool(d, a, b, common));
    if (!peri__is_integer(common)) return peri__float_binary(d->function, d->real, a, b, out);
    PERI_TRY(peri__widen_operands(&o, PERI__IN_OWN, in, 2));
    peri_status status = peri__numel(a) > 0 ? check_divisors(d->function, o.in[1]) : PERI_OK; /* else none divides */
    if (status >= 0) status = peri__integer(d->function, d->integer, o.in[0], o.in[1], &o.out);
    return peri__narrow(&o, status, out);
}

peri_status peri_op_floor_divide(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return divide_whole(&floor_divide, a, b, out);
}
peri_status peri_op_remainder(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return divide_whole(&remainder_of, a, b, out);
}
peri_status peri_op_fmod(peri_tensor *a, peri_tensor *b, peri_tensor **out)
{
    return divide_whole(&fmod_of, a, b, out);
}

/* -- by a number --------------------------------------------------------------------------------------------------- */

/** @x divided by a number, which counts as a tensor without dimensions: beside integers a whole one is of their dtype
 *  (beside bool: i64), another makes floats of them. */
static peri_status divide_by(const division *d, peri_tensor *x, double divisor, peri_tensor **out)
{
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(d->function, "a", x, -1, -1));
    const bool integer = peri__is_integer(x->dtype), fraction = divisor != floor(divisor) || !isfinite(divisor);
    peri_tensor *wide, *number;
    if (!integer || fraction) {
        const int32_t dtype = integer ? PERI_F32 : x->dtype;
        PERI_TRY(peri_tensor_full(peri__device(x), dtype, 0, NULL, divisor, &number));
        peri_status status = peri__float_binary(d->function, d->real, x, number, out);
        peri_tensor_release(number);
        return status;
    }
    if (divisor == 0 && peri__numel(x) > 0) return peri__fail(PERI_ERANGE, "%s: the divisor is 0", d->function);
    PERI_TRY(peri__cast(x, x->dtype == PERI_BOOL ? PERI_I64 : x->dtype, &wide));
    peri_status status = peri__integer_with_number(d->function, d->integer, wide, divisor, out);
    peri_tensor_release(wide);
    return status;
}

peri_status peri_op_floor_divide_number(peri_tensor *x, double divisor, peri_tensor **out)
{
    return divide_by(&floor_divide, x, divisor, out);
}
peri_status peri_op_remainder_number(peri_tensor *x, double divisor, peri_tensor **out)
{
    return divide_by(&remainder_of, x, divisor, out);
}
peri_status peri_op_fmod_number(peri_tensor *x, double divisor, peri_tensor **out)
{
    return divide_by(&fmod_of, x, divisor, out);
}
