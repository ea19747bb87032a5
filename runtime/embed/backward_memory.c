/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_memory.c: the backward pass with the optimizer, in memory: sums by row for the optimizers that work row by
 * row, or Shampoo.
 */
#include "row_watch.h"

/** An error if the device lacks one of the operations that the backward pass and the optimizer of @tbe need. It is
 *  asked before the pass begins, which changes counters, averages and rows one after the other and takes none back. */
static peri_status need_update(const peri_tbe *tbe, bool grad_weights)
{
    static const char f[] = "peri_tbe_backward";
    peri_device *device = tbe->device;
    PERI_TRY(PERI_NEED_WORK(f, device, PERI_OP_tbe_prepare));
    if (grad_weights) PERI_TRY(PERI_NEED_WORK(f, device, PERI_OP_tbe_weight_gradient));
    if (tbe->optimizer.kind == PERI_TBE_NONE) return PERI_OK;
    if (tbe->optimizer.kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD)
        PERI_TRY(PERI_NEED_WORK(f, device, PERI_OP_tbe_ema));
    if (peri__counter_wants_most(&tbe->optimizer)) PERI_TRY(PERI_NEED_WORK(f, device, PERI_K_tbe_most_counted));
    if (tbe->optimizer.kind == PERI_TBE_SHAMPOO)
        PERI_TRY(PERI_NEED_WORK(f, device, PERI_K_tbe_run_tables, PERI_OP_tbe_shampoo));
    return PERI_NEED_WORK(f, device, PERI_OP_tbe_sort, PERI_OP_tbe_update);
}

/** Sort the batch, and tell the watches its rows. Of tables behind a cache memory has slots; the tier tells their
 *  rows. */
static peri_status tell_rows(peri_tbe_batch *b)
{
    const peri_tbe *tbe = b->tbe;
    if (!tbe->watches || !tbe->store->whole || tbe->optimizer.kind == PERI_TBE_NONE) return PERI_OK;
    PERI_TRY(peri__batch_sort(b));
    if (!b->sorted) return PERI_OK;
    return peri__tbe_tell(b->tbe, &(peri__row_change){.form = PERI__ROWS_SORTED,
                                                      .part = -1,
                                                      .sorted = b->sorted->keys,
                                                      .n = b->sorted->n,
                                                      .capacity = b->sorted->capacity,
                                                      .payload_bits = b->sorted->payload_bits});
}

peri_status peri__tbe_backward(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights)
{
    peri_tbe *tbe = b->tbe;
    PERI_TRY(need_update(tbe, grad_weights != NULL));
    PERI_TRY(tell_rows(b));
    PERI_TRY(peri__tbe_ema_alone(tbe));
    if (grad_weights) PERI_TRY(peri__tbe_weight_gradient(b, grad, grad_weights));
    if (tbe->optimizer.kind == PERI_TBE_NONE) return PERI_OK;
    PERI_TRY(peri__counter_refresh(tbe, tbe->iteration + 1));
    tbe->iteration++;
    peri_status status =
        tbe->optimizer.kind == PERI_TBE_SHAMPOO ? peri__tbe_shampoo(b, grad) : peri__tbe_update(b, grad, NULL, NULL);
    if (status < 0) tbe->iteration--;
    else tbe->updates++;
    return status;
}
