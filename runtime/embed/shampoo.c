/* SPDX-License-Identifier: Apache-2.0
 *
 * shampoo.c: the backward pass with Shampoo. It needs all rows of a batch at once, so it goes by way of their gradient
 * as sparse rows.
 */
#include "embed_internal.h"

/** What follows the sums: statistics, roots, rows. */
static peri_status precondition_rows(peri_tbe *tbe, const peri_tbe_sparse *rows)
{
    peri_k_tbe_shampoo args = {.tables = peri__data(tbe->layout_tensor),
                               .n_tables = tbe->n_tables,
                               .rows = peri__tbe_kernel_tables(tbe),
                               .optimizer = peri__tbe_kernel_optimizer(tbe, tbe->iteration),
                               .values = peri__data(rows->values),
                               .stride = tbe->max_cols,
                               .run_rows = peri__data(rows->rows),
                               .first = peri__data(rows->first),
                               .gram = peri__state_data(tbe, PERI__STATE_PRECONDITIONER),
                               .most_rows = peri__numel(rows->rows),
                               .eps = tbe->optimizer.eps};
    for (int64_t t = 0; t < tbe->n_tables; t++) {
        args.all_cols += tbe->layout[t].cols;
        args.squares += tbe->layout[t].cols * tbe->layout[t].cols;
    }
    return PERI_RUN(tbe->device, tbe_shampoo, &args);
}

peri_status peri__tbe_shampoo(peri_tbe_batch *b, peri_tensor *grad)
{
    peri_tbe_sparse rows;
    PERI_TRY(peri__tbe_sparse(b, grad, NULL, &rows));
    peri_status status = precondition_rows(b->tbe, &rows);
    peri_tensor_release(rows.rows);
    peri_tensor_release(rows.values);
    peri_tensor_release(rows.first);
    return status;
}
