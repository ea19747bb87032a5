/* SPDX-License-Identifier: Apache-2.0
 *
 * dtypes.c: kinds of dtypes, their ranges, and the dtype that operands of different dtypes become: PyTorch's rules.
 */
#include "tensor_internal.h"

/** What counts first where dtypes meet. */
typedef enum category { BOOL, INTEGER, REAL, COMPLEX } category;

static category dtype_category(int32_t dtype)
{
    switch (dtype) {
    case PERI_BOOL: return BOOL;
    case PERI_I64:
    case PERI_I32:
    case PERI_I16:
    case PERI_I8:
    case PERI_U8: return INTEGER;
    case PERI_C64:
    case PERI_C128: return COMPLEX;
    default: return REAL;
    }
}

bool peri__is_integer(int32_t dtype) { return dtype_category(dtype) <= INTEGER; }

/** The dtype that holds what both hold; -1: there is none, or it is none of ours. */
static int32_t both(int32_t a, int32_t b)
{
    if (a < 0 || a == b) return b;
    const category x = dtype_category(a), y = dtype_category(b);
    if (x == COMPLEX || y == COMPLEX) return -1;
    if (x != y) return x > y ? a : b;
    if (x == REAL) return a == PERI_F64 || b == PERI_F64 ? PERI_F64 : PERI_F32; /* f16 and bf16: f32 */
    if (peri_dtype_size(a) != peri_dtype_size(b)) return peri_dtype_size(a) > peri_dtype_size(b) ? a : b;
    return PERI_I16; /* i8 and u8 */
}

/** The common dtype of those of @in that have dimensions, or of those that have none; -1: of no tensor. @known: becomes
 *  false where there is none. */
static int32_t common_of(peri_tensor *const *in, int32_t n, bool numbers, bool *known)
{
    int32_t dtype = -1;
    for (int32_t i = 0; i < n; i++) {
        if (!in[i] || (in[i]->ndim == 0) != numbers) continue;
        dtype = both(dtype, in[i]->dtype);
        if (dtype < 0) {
            *known = false;
            return -1;
        }
    }
    return dtype;
}

int32_t peri__common_dtype(peri_tensor *const *in, int32_t n)
{
    bool known = true;
    const int32_t large = common_of(in, n, false, &known), small = common_of(in, n, true, &known);
    if (!known) return -1;
    if (large < 0 || small < 0) return large < 0 ? small : large;
    /* A tensor without dimensions counts as a number would: it lifts the others to its category, not within theirs. */
    return dtype_category(small) > dtype_category(large) ? both(large, small) : large;
}

void peri__range_of(int32_t dtype, double *least, double *past)
{
    switch (dtype) {
    case PERI_I64: *least = -0x1p63, *past = 0x1p63; break;
    case PERI_I32: *least = -0x1p31, *past = 0x1p31; break;
    case PERI_I16: *least = -0x1p15, *past = 0x1p15; break;
    case PERI_I8: *least = -0x1p7, *past = 0x1p7; break;
    case PERI_U8: *least = 0, *past = 0x1p8; break;
    default: *least = 0, *past = 2; break;
    }
}
