/* SPDX-License-Identifier: Apache-2.0
 *
 * retrieval.c: the largest products of queries and items.
 */
#include "sparse_internal.h"

#include <perilune/ops.h>
#include <perilune/retrieval.h>

#include "../../kernels/nearest.h"

_Static_assert((int)PERI_TOP_MOST == (int)PERI_NEAREST_MOST, "the kernel finds as many as the interface promises");

enum { FOUND = 1 << 16 }; /* entries of results that one pass over the items makes: what its parts find takes scratch */

/** The layout of the items in @op, from what they are. */
static peri_status check_items(const char *f, const peri_tensor *items, const peri_row_format *format, int64_t dim,
                               peri_op_nearest *op)
{
    char text[128];
    if (format) {
        PERI_TRY(peri__rows_layout(f, format, dim, &op->format));
        if (items->dtype != PERI_U8 || items->shape[1] != op->format.stride)
            return peri__fail(
                PERI_EINVAL, "%s: items are %s, wanted u8 rows of %lld bytes, for %lld numbers in this format", f,
                peri__tensor_text(items, text, sizeof text), (long long)op->format.stride, (long long)dim);
        return PERI_OK;
    }
    if (!peri__small_float(items->dtype) || items->shape[1] != dim)
        return peri__fail(
            PERI_EINVAL,
            "%s: items are %s, wanted rows of %lld numbers of f32, f16 or bf16, or rows of codes and a format", f,
            peri__tensor_text(items, text, sizeof text), (long long)dim);
    return PERI_OK;
}

static peri_status check_search(const char *f, peri_tensor *queries, peri_tensor *items, const peri_row_format *format,
                                int64_t k, peri_op_nearest *op)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "queries", queries, -1, 2));
    PERI_TRY(peri__check_tensor(f, "items", items, -1, 2));
    PERI_TRY(peri__check_same_device(f, queries, items));
    if (!peri__small_float(queries->dtype) || queries->shape[1] < 1)
        return peri__fail(PERI_EINVAL, "%s: queries are %s, allowed: rows of at least 1 number of f32, f16 or bf16", f,
                          peri__tensor_text(queries, text, sizeof text));
    PERI_TRY(check_items(f, items, format, queries->shape[1], op));
    const int64_t most = peri__min(items->shape[0], PERI_TOP_MOST);
    if (k < 1 || k > most)
        return peri__fail(PERI_ERANGE, "%s: k is %lld, allowed: 1..%lld (of %lld items, and %d at most)", f,
                          (long long)k, (long long)most, (long long)items->shape[0], PERI_TOP_MOST);
    op->dim = queries->shape[1];
    op->n_items = items->shape[0];
    op->k = k;
    op->dtype = items->dtype;
    return PERI_OK;
}

peri_status peri_top_products(peri_tensor *queries, peri_tensor *items, const peri_row_format *format, int64_t k,
                              peri_tensor **scores, peri_tensor **indices)
{
    static const char f[] = "peri_top_products";
    peri_op_nearest op = {0};
    PERI_NEED(scores);
    PERI_NEED(indices);
    PERI_TRY(check_search(f, queries, items, format, k, &op));
    peri_tensor *wide = NULL, *rows = NULL, *best[2] = {NULL};
    peri_device *device = peri__device(queries);
    const int64_t n = queries->shape[0], shape[2] = {n, k}, step = peri__max(1, FOUND / k);
    const bool recording = peri__grad_swap(false);
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_to(queries, PERI_F32, NULL, &wide), out);
    if (!peri__contiguous(wide)) {
        peri_tensor *copy;
        PERI_TRY_GOTO(peri_tensor_contiguous(wide, &copy), out);
        peri_tensor_release(wide);
        wide = copy;
    }
    PERI_TRY_GOTO(items->stride[1] == 1 || items->shape[1] == 1 ? (peri_tensor_retain(rows = items), PERI_OK)
                                                                : peri_tensor_contiguous(items, &rows), out);
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_F32, 2, shape, &best[0]), out);
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 2, shape, &best[1]), out);
    op.items = peri__data(rows);
    op.stride = rows->stride[0] * peri_dtype_size(rows->dtype);
    for (int64_t q = 0; q < n; q += step) {
        op.n_queries = peri__min(step, n - q);
        op.queries = (const float *)peri__data(wide) + q * op.dim;
        op.scores = (float *)peri__data(best[0]) + q * k;
        op.indices = (int64_t *)peri__data(best[1]) + q * k;
        PERI_TRY_GOTO(PERI_RUN(device, nearest, &op), out);
    }
    *scores = best[0];
    *indices = best[1];
    best[0] = best[1] = NULL;
out:
    peri__grad_swap(recording);
    peri_tensor_release(wide);
    peri_tensor_release(rows);
    for (int i = 0; i < 2; i++) peri_tensor_release(best[i]);
    return status;
}
