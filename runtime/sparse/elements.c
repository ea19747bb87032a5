/* SPDX-License-Identifier: Apache-2.0
 *
 * elements.c: elements of tensors of any shape that are picked by a mask, distinct elements, and how many elements fall
 * into intervals. All wait, since the sizes of results, or what is allowed, depend on the elements.
 */
#include "sparse_internal.h"
#include "../../kernels/elements.h"
#include "../../kernels/lookup.h"

#include <perilune/ops.h>

#include <float.h>
#include <math.h>

/* -- by mask ------------------------------------------------------------------------------------------------------- */

/** *out (new, recorded) = @t, repeated to @shape[ndim], as one dimension. */
static peri_status flatten_repeated(peri_tensor *t, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    PERI__HELD peri_tensor *wide = NULL;
    PERI_TRY(peri_tensor_expand(t, ndim, shape, &wide));
    return peri_tensor_reshape(wide, 1, (int64_t[]){-1}, out);
}

peri_status peri_sparse_masked_elements(peri_tensor *x, peri_tensor *mask, peri_tensor **out)
{
    static const char f[] = "peri_sparse_masked_elements";
    int64_t shape[PERI_MAX_DIMS];
    int32_t ndim;
    PERI__HELD peri_tensor *flat = NULL, *chosen = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(f, "x", x, -1, -1));
    PERI_TRY(peri__check_tensor(f, "mask", mask, PERI_BOOL, -1));
    PERI_TRY(peri__check_same_device(f, mask, x));
    PERI_TRY(peri__broadcast_shape(f, x, mask, &ndim, shape));
    PERI_TRY(flatten_repeated(x, ndim, shape, &flat));
    PERI_TRY(flatten_repeated(mask, ndim, shape, &chosen));
    return peri__rows_masked(flat, chosen, out);
}

peri_status peri_sparse_masked_parts(peri_tensor *x, peri_tensor *mask, peri_tensor **out)
{
    static const char f[] = "peri_sparse_masked_parts";
    char text[128], mask_text[128];
    int64_t shape[PERI_MAX_DIMS + 1];
    PERI__HELD peri_tensor *rows = NULL, *flat = NULL, *chosen = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(f, "x", x, -1, -1));
    PERI_TRY(peri__check_tensor(f, "mask", mask, PERI_BOOL, -1));
    PERI_TRY(peri__check_same_device(f, mask, x));
    const int32_t own = mask->ndim, rest = x->ndim - own;
    if (rest < 0 || memcmp(x->shape, mask->shape, sizeof *x->shape * (size_t)own) != 0)
        return peri__fail(PERI_EINVAL, "%s: %s: a mask %s, wanted the first sizes of it", f,
                          peri__tensor_text(x, text, sizeof text),
                          peri__tensor_text(mask, mask_text, sizeof mask_text));
    shape[0] = peri__numel(mask);
    memcpy(shape + 1, x->shape + own, sizeof *shape * (size_t)rest);
    if (own == 0 && rest == PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "%s: a mask without dimensions for %d of them, allowed: fewer", f, rest);
    PERI_TRY(peri_tensor_reshape(x, 1 + rest, shape, &rows));
    PERI_TRY(peri_tensor_contiguous(rows, &flat));
    PERI_TRY(peri_tensor_reshape(mask, 1, shape, &chosen));
    PERI_TRY(peri_tensor_contiguous(chosen, &mask));
    const peri_status status = peri__rows_masked(flat, mask, out);
    peri_tensor_release(mask);
    return status;
}

/** *out (new) = the numbers, from 0, of the elements of contiguous @mask that are true. */
static peri_status numbers_of_true(peri_tensor *mask, peri_tensor **out)
{
    const int64_t n = peri__numel(mask);
    PERI__HELD peri_tensor *all = NULL;
    peri_tensor flat = *mask;
    flat.ndim = 1, flat.shape[0] = n;
    PERI_TRY(peri_tensor_arange(peri__device(mask), PERI_I64, 0, 1, n, &all));
    return peri__rows_masked(all, &flat, out);
}

peri_status peri_sparse_nonzero(peri_tensor *x, peri_tensor **out)
{
    static const char f[] = "peri_sparse_nonzero";
    PERI__HELD peri_tensor *mask = NULL, *flat = NULL, *places = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(f, "x", x, -1, -1));
    PERI_TRY(peri_op_compare(x, PERI_COMPARE_NE, NULL, 0, &mask));
    PERI_TRY(numbers_of_true(mask, &flat));
    const int64_t shape[2] = {flat->shape[0], x->ndim};
    if (x->ndim == 1) {
        PERI_TRY(peri__shaped(&flat, 2, shape));
        *out = peri__hand_over(&flat);
        return PERI_OK;
    }
    PERI_TRY(peri__tensor_like(flat, 2, shape, &places));
    peri_k_unravel_args args = {.dst = peri__data(places), .flat = peri__data(flat), .ndim = x->ndim};
    memcpy(args.shape, x->shape, sizeof args.shape);
    if (x->ndim > 0) PERI_TRY(PERI_LAUNCH(peri__device(x), unravel, &args, shape[0], PERI_INT_GRAIN / 8));
    *out = peri__hand_over(&places);
    return PERI_OK;
}

/* -- distinct elements --------------------------------------------------------------------------------------------- */

void peri__unique_release(peri_unique_result *r)
{
    peri_tensor_release(r->unique);
    peri_tensor_release(r->inverse);
    peri_tensor_release(r->counts);
}

/** *out (new) = where elements of contiguous @sorted [n], which rise, differ from the one before them, as the first one
 *  does, and every NaN. */
static peri_status starts_of_runs(const peri_tensor *sorted, peri_tensor **out)
{
    const int64_t n = sorted->shape[0], size = peri_dtype_size(sorted->dtype);
    peri_device *device = peri__device(sorted);
    PERI__HELD peri_tensor *mask = NULL;
    PERI_TRY(peri_tensor_new(device, PERI_BOOL, 1, &n, &mask));
    char *x = peri__data(sorted);
    uint8_t *dst = peri__data(mask);
    /* nothing is a NaN: the first element differs from it */
    peri_k_compare_args first = {.dst = dst, .a = x, .dtype = sorted->dtype, .op = PERI_COMPARE_NE, .ndim = 1,
                                 .value = NAN, .shape = {1}, .a_stride = {1}};
    peri_k_compare_args others = {.dst = dst + 1, .a = x + size, .b = x, .dtype = sorted->dtype,
                                  .op = PERI_COMPARE_NE, .ndim = 1, .shape = {n - 1}, .a_stride = {1},
                                  .b_stride = {1}};
    if (n > 0) PERI_TRY(PERI_LAUNCH(device, compare, &first, 1, 1));
    if (n > 1) PERI_TRY(PERI_LAUNCH(device, compare, &others, n - 1, PERI_INT_GRAIN));
    *out = peri__hand_over(&mask);
    return PERI_OK;
}

/** The results beside r->unique, of elements that lay at @places before they were sorted; @starts as above. */
static peri_status ranks_of_elements(peri_tensor *starts, peri_tensor *places, bool inverse, bool counts,
                                     peri_unique_result *r)
{
    PERI__HELD peri_tensor *upto = NULL, *number = NULL;
    PERI_TRY(peri_op_running_sum(starts, 0, &upto));
    PERI_TRY(peri_op_affine(upto, 1, -1, &number));
    if (inverse) PERI_TRY(peri_op_scatter(number, 0, places, number, false, &r->inverse));
    return counts ? peri_sparse_counts(number, peri__numel(r->unique), &r->counts) : PERI_OK;
}

/** Of floats @x [n]. */
static peri_status unique_floats(peri_tensor *x, bool inverse, bool counts, peri_unique_result *r)
{
    PERI__HELD peri_tensor *sorted = NULL, *places = NULL, *starts = NULL;
    PERI_TRY(peri_op_sort(x, 0, false, -1, &sorted, &places));
    PERI_TRY(starts_of_runs(sorted, &starts));
    PERI_TRY(peri__rows_masked(sorted, starts, &r->unique));
    return inverse || counts ? ranks_of_elements(starts, places, inverse, counts, r) : PERI_OK;
}

peri_status peri_sparse_unique_elements(peri_tensor *x, bool inverse, bool counts, peri_unique_result *out)
{
    static const char f[] = "peri_sparse_unique_elements";
    char text[128];
    PERI__HELD peri_tensor *own = NULL, *wide = NULL, *flat = NULL;
    peri_tensor *back;
    peri_unique_result r = {0};
    peri_status status;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(f, "x", x, -1, -1));
    const bool whole = peri__is_integer(x->dtype);
    if (x->dtype == PERI_C64 || x->dtype == PERI_C128)
        return peri__fail(PERI_EINVAL, "%s: x is %s; complex numbers have no order", f,
                          peri__tensor_text(x, text, sizeof text));
    const int32_t dtype = whole && x->dtype != PERI_I32 ? PERI_I64 : x->dtype; /* peri_sparse_unique takes these */
    PERI_TRY(peri__detached(x, &own));
    PERI_TRY(peri__cast(own, dtype, &wide));
    PERI_TRY(peri_tensor_reshape(wide, 1, (int64_t[]){-1}, &flat));
    PERI_TRY_GOTO((whole ? peri_sparse_unique : unique_floats)(flat, inverse, counts, &r), out);
    PERI_TRY_GOTO(peri__cast(r.unique, x->dtype, &back), out);
    peri_tensor_release(r.unique);
    r.unique = back;
    if (r.inverse) status = peri__shaped(&r.inverse, x->ndim, x->shape);
out:
    if (status < 0) peri__unique_release(&r);
    else *out = r;
    return status;
}

/* -- intervals ----------------------------------------------------------------------------------------------------- */

/** *number = the smallest (@least) or the largest element of @x, which has some. */
static peri_status extreme_element(peri_tensor *x, bool least, double *number)
{
    PERI__HELD peri_tensor *y = NULL;
    PERI_TRY(peri_op_amax(x, NULL, 0, false, least, &y));
    return peri_tensor_item(y, 0, number);
}

/** How many of contiguous @x fall into each of @bins intervals. */
static peri_status count_in_bins(const peri_tensor *x, int64_t bins, double min, double max, peri_tensor **out)
{
    const int64_t n = peri__numel(x), all = bins + 1; /* the last one: those of no interval */
    peri_device *device = peri__device(x);
    PERI__HELD peri_tensor *bin = NULL, *counts = NULL, *inside = NULL;
    PERI_TRY(peri_tensor_new(device, PERI_I32, 1, &n, &bin));
    PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &all, &counts));
    peri_k_bin_args args = {.dst = peri__data(bin), .x = peri__data(x), .dtype = x->dtype, .bins = (int32_t)bins,
                            .least = min, .most = max};
    PERI_TRY(PERI_LAUNCH(device, bin_number, &args, n, PERI_INT_GRAIN / 4));
    peri_k_weights_by_id_args count = {.ids = peri__data(bin), .out = peri__data(counts), .n = n, .numbers = all,
                                       .dtype = PERI_I64, .ids_dtype = PERI_I32};
    PERI_TRY(PERI_RUN(device, weights_by_id, &count));
    PERI_TRY(peri__tensor_view(counts, 1, &bins, NULL, 0, &inside));
    return peri__cast(inside, x->dtype, out);
}

peri_status peri_sparse_histogram(peri_tensor *x, int64_t bins, double min, double max, peri_tensor **out)
{
    static const char f[] = "peri_sparse_histogram";
    char text[128];
    PERI__HELD peri_tensor *own = NULL, *flat = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(f, "x", x, -1, -1));
    if (x->dtype == PERI_C64 || x->dtype == PERI_C128)
        return peri__fail(PERI_EINVAL, "%s: x is %s; complex numbers have no order", f,
                          peri__tensor_text(x, text, sizeof text));
    PERI_TRY(peri__detached(x, &own));
    if (min == 0 && max == 0 && peri__numel(x) > 0) {
        PERI_TRY(extreme_element(own, true, &min));
        PERI_TRY(extreme_element(own, false, &max));
    }
    if (min == max) min -= 1, max += 1;
    const bool wide = x->dtype == PERI_F64 || peri__is_integer(x->dtype);
    const double apart = wide ? max - min : (double)((float)max - (float)min);
    if (!(apart > 0 && apart * (double)bins < (wide ? DBL_MAX : FLT_MAX)) || bins < 1 || bins > 1 << 30)
        return peri__fail(PERI_ERANGE, "%s: %lld bins from %g to %g, wanted 1..2^30, between finite bounds that rise",
                          f, (long long)bins, min, max);
    PERI_TRY(peri__contiguous_of(own, &flat));
    return count_in_bins(flat, bins, min, max, out);
}
