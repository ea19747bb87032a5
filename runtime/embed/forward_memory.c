/* SPDX-License-Identifier: Apache-2.0
 *
 * forward_memory.c: forward in memory.
 */
#include "embed_internal.h"
#include "reach.h"

peri_k_tbe_rows peri__tbe_kernel_tables(const peri_tbe *tbe)
{
    const int64_t *slot_row = tbe->slot_row ? peri__data(tbe->slot_row) : NULL;
    return (peri_k_tbe_rows){.tables = peri__data(tbe->layout_tensor),
                             .n_tables = tbe->n_tables,
                             .total_rows = tbe->total_rows,
                             .max_cols = tbe->max_cols,
                             .weight = peri__data(tbe->weight),
                             .weight_dtype = tbe->dtype,
                             .momentum1 = peri__state_data(tbe, PERI__STATE_MOMENTUM1),
                             .momentum2 = peri__state_data(tbe, PERI__STATE_MOMENTUM2),
                             .row_counter = peri__state_data(tbe, PERI__STATE_ROW_COUNTER),
                             .prev_iter = peri__state_data(tbe, PERI__STATE_PREV_ITER),
                             .max_counter = peri__state_data(tbe, PERI__STATE_MAX_COUNTER),
                             .slot_row = slot_row};
}

/* -- forward ------------------------------------------------------------------------------------------------------- */

peri_status peri__tbe_forward(peri_tbe_batch *b, peri_tensor *out, bool check)
{
    peri_tbe *tbe = b->tbe;
    peri_k_tbe_forward_args args = {
        .weight = peri__data(tbe->weight), .weight_dtype = tbe->dtype, .out = peri__data(out), .out_dtype = out->dtype,
        .reach = peri__tbe_reach_lookup()};
    if (check) PERI_TRY(peri__batch_report(b, &args.report));
    PERI_TRY(peri__batch_kernel_list(b, true, &args.list));
    PERI_TRY(PERI_RUN(tbe->device, tbe_forward, &args));
    atomic_fetch_add_explicit(&tbe->lookups, 1, memory_order_relaxed);
    if (!check) return PERI_OK;
    peri_k_tbe_report_args describe = {.list = args.list,
                                       .report = args.report,
                                       .counters = (int64_t *)peri__data(tbe->counters) + PERI__TBE_COUNT_BAD_IDS};
    return peri__tbe_queue_counting(tbe, PERI_OP_tbe_report, &describe, sizeof describe);
}
