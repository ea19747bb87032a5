/* SPDX-License-Identifier: Apache-2.0
 *
 * expand.c: from the pooled rows of distinct bags to the full batch. It is a lookup: the pooled rows are tables, the
 * inverse indices ids of bags of one id each; its gradient sums what goes back to the same row, in the order of the
 * batch.
 */
#include "embed_internal.h"

#include <stdio.h>

static peri_status check_args(const peri_tbe_expand_args *a)
{
    char text[128];
    PERI_TRY(peri__check_tensor("peri_tbe_expand", "pooled", a->pooled, PERI_F32, -1));
    PERI_TRY(peri__check_tensor("peri_tbe_expand", "inverse", a->inverse, -1, 2));
    if (a->inverse->dtype != PERI_I64 && a->inverse->dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "peri_tbe_expand: inverse is %s, allowed: i64, i32",
                          peri__tensor_text(a->inverse, text, sizeof text));
    PERI_TRY(peri__check_same_device("peri_tbe_expand", a->pooled, a->inverse));
    if (!peri__contiguous(a->pooled) || !peri__contiguous(a->inverse))
        return peri__fail(PERI_EINVAL, "peri_tbe_expand: pooled and inverse must be contiguous");
    int64_t elements = 0;
    for (int64_t f = 0; f < a->features; f++) {
        if (a->rows[f] < 0 || a->cols[f] < 1)
            return peri__fail(PERI_EINVAL, "peri_tbe_expand: feature %lld has %lld rows of %lld columns", (long long)f,
                              (long long)a->rows[f], (long long)a->cols[f]);
        if (a->inverse_row[f] < 0 || a->inverse_row[f] >= a->inverse->shape[0])
            return peri__fail(PERI_ERANGE,
                              "peri_tbe_expand: feature %lld uses row %lld of the inverse indices, allowed: 0..%lld",
                              (long long)f, (long long)a->inverse_row[f], (long long)a->inverse->shape[0] - 1);
        if (!a->names || !a->names[f])
            return peri__fail(PERI_EINVAL, "peri_tbe_expand: feature %lld has no name", (long long)f);
        elements += a->rows[f] * a->cols[f];
    }
    if (elements == peri__numel(a->pooled)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_tbe_expand: pooled is %s, the features have %lld elements",
                      peri__tensor_text(a->pooled, text, sizeof text), (long long)elements);
}

/** The pooled rows as a table batch, and the columns of the output as its blocks. */
static peri_status as_tables(const peri_tbe_expand_args *a, peri_tbe **tbe, peri_tbe_blocks **blocks, int64_t *width)
{
    int64_t batch = a->inverse->shape[1], column = 0;
    peri_table_config *tables = peri__alloc_zero(sizeof *tables * (size_t)peri__max(a->features, 1));
    peri_tbe_block *list = peri__alloc_zero(sizeof *list * (size_t)peri__max(a->features, 1));
    peri_status status = PERI_ENOMEM;
    if (!tables || !list) goto out;
    for (int64_t f = 0; f < a->features; f++) *width += a->cols[f];
    for (int64_t f = 0; f < a->features; f++) {
        tables[f] = (peri_table_config){.size = sizeof(peri_table_config),
                                        .name = a->names[f],
                                        .rows = a->rows[f],
                                        .cols = a->cols[f],
                                        .init = PERI_INIT_NONE};
        list[f] = (peri_tbe_block){.first_bag = a->inverse_row[f] * batch,
                                   .bags = batch,
                                   .out_offset = column,
                                   .out_stride = *width,
                                   .table = (int32_t)f,
                                   .feature = -1};
        column += a->cols[f];
    }
    peri_tbe_config config = {.size = sizeof config,
                              .device = peri__device(a->pooled),
                              .dtype = PERI_F32,
                              .n_tables = a->features,
                              .tables = tables,
                              .optimizer = &peri__no_optimizer};
    PERI_TRY_GOTO(peri__tbe_borrowing(&config, a->pooled, tbe), out);
    (*tbe)->of_inverse = true;
    status = peri_tbe_blocks_new(*tbe, list, a->features, blocks);
    if (status < 0) {
        peri_tbe_release(*tbe);
        *tbe = NULL;
    }
out:
    peri__free(tables);
    peri__free(list);
    return status;
}

peri_status peri_tbe_expand(const peri_tbe_expand_args *a, peri_tensor **out)
{
    PERI_NEED(a);
    PERI_NEED(out);
    PERI_TRY(check_args(a));
    int64_t batch = a->inverse->shape[1], bags = a->inverse->shape[0] * batch, width = 0;
    peri_tensor *ids = NULL, *offsets = NULL, *rows = NULL;
    peri_tbe *tbe = NULL;
    peri_tbe_blocks *blocks = NULL;
    peri_tbe_batch *look = NULL;
    peri_status status;
    PERI_TRY_GOTO(as_tables(a, &tbe, &blocks, &width), out);
    PERI_TRY_GOTO(peri__tensor_view(a->inverse, 1, &bags, NULL, a->inverse->offset, &ids), out);
    PERI_TRY_GOTO(peri__offsets_of_equal(peri__device(a->pooled), bags, 1, &offsets), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(a->pooled), PERI_F32, 2, (int64_t[]){batch, width}, &rows), out);
    peri_tbe_input in = {.ids = ids, .offsets = offsets, .blocks = blocks};
    PERI_TRY_GOTO(peri_tbe_batch_new(tbe, &in, &look), out);
    PERI_TRY_GOTO(peri__batch_forward("peri_tbe_expand", look, rows), out);
    PERI_TRY_GOTO(peri__borrowed_record(a->pooled, look, rows), out);
    *out = rows;
    rows = NULL;
out:
    peri_tensor_release(ids);
    peri_tensor_release(offsets);
    peri_tensor_release(rows);
    peri_tbe_batch_release(look);
    peri_tbe_blocks_release(blocks);
    peri_tbe_release(tbe);
    return status;
}
