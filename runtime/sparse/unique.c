/* SPDX-License-Identifier: Apache-2.0
 *
 * unique.c: distinct ids in ascending order, where each id went, and how many there are of each.
 */
#include "sparse_internal.h"
#include "../../kernels/sparse.h"

/** Room for all of @n ids to be different. */
static peri_status allocate_unique_result(const peri_tensor *ids, int64_t n, bool inverse, bool counts,
                                          peri_unique_result *r)
{
    peri_device *device = peri__device(ids);
    PERI_TRY(peri__tensor_like(ids, 1, &n, &r->unique));
    if (inverse) PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &n, &r->inverse));
    if (counts) PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &n, &r->counts));
    return PERI_OK;
}

/** Make *t its first @n elements: a view if that leaves less than half of it unused, else a copy. */
static peri_status cut_tensor(peri_tensor **t, int64_t n)
{
    int64_t all = (*t)->shape[0], one = 1;
    peri_tensor *part, *copy = NULL;
    if (n == all) return PERI_OK;
    PERI_TRY(peri__tensor_view(*t, 1, &n, &one, 0, &part));
    if (2 * n < all) {
        peri_status status = peri__tensor_like(part, 1, &n, &copy);
        if (status >= 0) status = peri_tensor_copy(copy, part);
        peri_tensor_release(part);
        if (status < 0) peri_tensor_release(copy);
        PERI_TRY(status);
        part = copy;
    }
    peri_tensor_release(*t);
    *t = part;
    return PERI_OK;
}

static peri_status find_distinct(const peri_tensor *ids, peri_unique_result *r)
{
    peri_device *device = peri__device(ids);
    int64_t one = 1, least, most, total;
    peri_tensor *count;
    peri_status status;
    PERI_TRY(peri__extent(ids, &least, &most));
    PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &one, &count));
    peri_op_unique args = {.x = peri__data(ids),
                           .unique = peri__data(r->unique),
                           .inverse = r->inverse ? peri__data(r->inverse) : NULL,
                           .counts = r->counts ? peri__data(r->counts) : NULL,
                           .total = peri__data(count),
                           .n = ids->shape[0],
                           .least = least,
                           .most = most,
                           .dtype = ids->dtype};
    PERI_TRY_GOTO(PERI_RUN(device, unique, &args), out);
    PERI_TRY_GOTO(peri__word_at(count, 0, &total), out);
    PERI_TRY_GOTO(cut_tensor(&r->unique, total), out);
    if (r->counts) status = cut_tensor(&r->counts, total);
out:
    peri_tensor_release(count);
    return status;
}

peri_status peri_sparse_unique(peri_tensor *ids, bool inverse, bool counts, peri_unique_result *out)
{
    static const char f[] = "peri_sparse_unique";
    PERI_TRY(peri__check_ints(f, "ids", ids, 1, NULL));
    int64_t n = ids->shape[0];
    if (n > UINT32_MAX) return peri__fail(PERI_ERANGE, "%s: %lld ids, allowed: less than 2^32", f, (long long)n);
    peri_unique_result r = {0};
    peri_tensor *flat;
    PERI_TRY(peri_tensor_contiguous(ids, &flat));
    peri_status status = allocate_unique_result(flat, n, inverse, counts, &r);
    if (status >= 0 && n > 0) status = find_distinct(flat, &r);
    peri_tensor_release(flat);
    if (status < 0) peri__unique_release(&r);
    else *out = r;
    return status;
}
