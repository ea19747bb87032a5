/* SPDX-License-Identifier: Apache-2.0
 *
 * shampoo.c: the backward pass with Shampoo. It needs all rows of a batch at once, so it goes by way of their gradient as sparse rows.
 */
#include "internal.h"

/** The steps after the sums: statistics, roots, rows. */
static peri_status steps(peri_tbe *tbe, const peri_tbe_sparse *rows)
{
    enum { CHUNK_ROWS = 64, MOST = 256 };
    int64_t squares = 0, cols = 0;
    for (int64_t t = 0; t < tbe->n_tables; t++) squares += tbe->layout[t].cols * tbe->layout[t].cols;
    void *root, *room, *scratch;
    PERI_TRY(peri__tbe_workspace(tbe, PERI__TBE_ROOTS, PERI_F32, squares, &root));
    PERI_TRY(peri__tbe_workspace(tbe, PERI__TBE_ROOT_ROOM, PERI_F64, 2 * squares, &room));
    for (int64_t t = 0; t < tbe->n_tables; t++) cols += tbe->layout[t].cols;
    peri_k_tbe_shampoo args = {.tables = peri__data(tbe->layout_tensor),
                               .n_tables = tbe->n_tables,
                               .rows = peri__tbe_rows(tbe),
                               .optimizer = peri__tbe_optimizer(tbe, tbe->iteration),
                               .values = peri__data(rows->values),
                               .stride = tbe->max_cols,
                               .run_rows = peri__data(rows->rows),
                               .first = peri__data(rows->first),
                               .gram = peri__state_data(tbe, PERI__STATE_PRECONDITIONER),
                               .root = root,
                               .room = room,
                               .eps = tbe->optimizer.eps,
                               .chunks = peri__max(1, peri__min(MOST, peri__numel(rows->rows) / CHUNK_ROWS)),
                               .scratch_stride = peri__tbe_scratch_stride(tbe)};
    PERI_TRY(peri__tbe_workspace(tbe, PERI__TBE_SCRATCH, PERI_F32, args.chunks * args.scratch_stride, &scratch));
    args.scratch = scratch;
    PERI_TRY(PERI_LAUNCH(tbe->device, tbe_gram, &args, cols, 8));
    PERI_TRY(PERI_LAUNCH(tbe->device, tbe_root, &args, tbe->n_tables, 1));
    return PERI_LAUNCH(tbe->device, tbe_precondition, &args, args.chunks, 1);
}

peri_status peri__tbe_shampoo(peri_tbe_batch *b, peri_tensor *grad)
{
    peri_tbe_sparse rows;
    PERI_TRY(peri__tbe_sparse(b, grad, NULL, &rows));
    peri_status status = steps(b->tbe, &rows);
    peri_tensor_release(rows.rows);
    peri_tensor_release(rows.values);
    peri_tensor_release(rows.first);
    return status;
}
