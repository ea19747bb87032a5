/* SPDX-License-Identifier: Apache-2.0
 *
 * update.c: the backward pass: sort the items of a batch by row, sum each row's gradient, run the optimizer on it.
 */
#include "embed_internal.h"
#include "../base/tune.h"
#include "reach.h"
#include "row_watch.h"

/* -- the sort ------------------------------------------------------------------------------------------------------ */

static int32_t bit_length(uint64_t x)
{
    int32_t n = 0;
    for (; x; x >>= 1) n++;
    return n;
}

bool peri__tbe_keys_have_room(const peri_tbe *tbe, int64_t extent)
{
    return bit_length((uint64_t)extent) + bit_length((uint64_t)tbe->total_rows) <= 64;
}

/** Keys hold a row in as many high bits as rows need, and below the place of an item or, without @items, of its
 *  gradient. */
static peri_status payload_bits(const peri_tbe_batch *b, bool items, int32_t *bits)
{
    const peri_tbe *tbe = b->tbe;
    const peri_tbe_input *in = &b->in;
    int64_t most = peri__numel(in->ids) * in->blocks->multiplicity;
    int64_t payload = items ? most : b->there ? b->there->out_extent : peri__tbe_extent(tbe, in);
    /* kernels count places in 32 bits, and go on by 256 behind the last one */
    if (most > UINT32_MAX - 256)
        return peri__fail(PERI_EUNSUPPORTED, "peri_tbe_backward: %lld ids in one batch, allowed: up to %lld",
                          (long long)most, (long long)UINT32_MAX - 256);
    *bits = 64 - bit_length((uint64_t)tbe->total_rows);
    if (bit_length((uint64_t)payload) > *bits)
        return peri__fail(PERI_EUNSUPPORTED, "peri_tbe_backward: %lld rows and %lld %s do not fit into 64 bits",
                          (long long)tbe->total_rows, (long long)payload, items ? "ids" : "elements of the gradient");
    return PERI_OK;
}

/** Queue the sort of a batch's items; factors that are all 1 need no list. */
static peri_status sort_items(peri_tbe_batch *batch, peri__sorted *s)
{
    peri_tbe *tbe = batch->tbe;
    const peri_tbe_input *in = &batch->in;
    peri_op_tbe_sort sort = {.total_rows = tbe->total_rows};
    bool factors = in->weights || in->scale || in->blocks->mean;
    void *keys, *items = NULL;
    PERI_TRY(payload_bits(batch, factors, &sort.payload_bits));
    PERI_TRY(peri__batch_kernel_list(batch, false, &sort.list));
    PERI_TRY(peri__tbe_blocks_sorted(tbe, batch->there ? batch->there : in->blocks, &sort.list.ordered));
    int64_t most = sort.list.capacity, bytes = (int64_t)sizeof(peri_k_tbe_item) * most;
    PERI_TRY(peri__reserve(tbe->device, &s->room[PERI__SORT_KEYS], s->done, PERI_I64, most, &keys));
    if (factors) PERI_TRY(peri__reserve(tbe->device, &s->room[PERI__SORT_ITEMS], s->done, PERI_U8, bytes, &items));
    s->keys = sort.keys = keys;
    s->items = sort.items = items;
    s->payload_bits = sort.payload_bits;
    s->n = &sort.list.spans[sort.list.n_blocks].items;
    s->capacity = most;
    s->work = peri_k_tbe_work(&sort.list);
    return PERI_RUN(tbe->device, tbe_sort, &sort);
}

/** Whether the batch has no rows to sum. */
static bool nothing_to_sum(const peri_tbe_batch *b)
{
    return b->tbe->total_rows == 0 || peri__numel(b->in.ids) == 0 || b->in.blocks->total_bags == 0;
}

peri_status peri__batch_sort(peri_tbe_batch *b)
{
    if (b->sorted || nothing_to_sum(b)) return PERI_OK;
    PERI_TRY(peri__sorted_acquire(b->tbe, &b->sorted));
    peri_status status = sort_items(b, b->sorted);
    if (status < 0) peri__sorted_recycle(b);
    return status;
}

/* -- updates ------------------------------------------------------------------------------------------------------- */

peri_status peri__tbe_gradient_check(const char *function, const peri_tbe *tbe, const peri_tbe_input *in,
                                     const peri_tensor *grad, const peri_tensor *grad_weights)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, "the gradient", grad, PERI_F32, -1));
    if (peri__device(grad) != tbe->device || !peri__contiguous(grad))
        return peri__fail(PERI_EINVAL, "%s: the gradient must be contiguous and on device %s", function,
                          tbe->device->name);
    if (peri__numel(grad) < peri__tbe_extent(tbe, in))
        return peri__fail(PERI_EINVAL, "%s: the gradient is %s, the blocks read up to element %lld", function,
                          peri__tensor_text(grad, text, sizeof text), (long long)peri__tbe_extent(tbe, in) - 1);
    if (peri__rows_are_bytes(tbe->dtype))
        return peri__fail(PERI_EUNSUPPORTED, "%s: rows of bytes have no gradients", function);
    if (!grad_weights) return PERI_OK;
    PERI_TRY(peri__check_tensor(function, "the gradient of the weights", grad_weights, PERI_F32, 1));
    if (peri__device(grad_weights) != tbe->device || !peri__contiguous(grad_weights) ||
        peri__numel(grad_weights) != peri__numel(in->ids))
        return peri__fail(
            PERI_EINVAL,
            "%s: the gradient of the weights is %s, wanted: contiguous, one for each of %lld ids, on device %s",
            function, peri__tensor_text(grad_weights, text, sizeof text), (long long)peri__numel(in->ids),
            tbe->device->name);
    return PERI_OK;
}

peri_status peri__tbe_weight_gradient(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights)
{
    peri_tbe *tbe = b->tbe;
    peri_k_tbe_weight_gradient_args args = {.weight = peri__data(tbe->weight),
                                            .weight_dtype = tbe->dtype,
                                            .grad = peri__data(grad),
                                            .grad_weights = peri__data(grad_weights),
                                            .reach = peri__tbe_reach_lookup()};
    PERI_TRY(peri__batch_kernel_list(b, false, &args.list));
    return PERI_RUN(tbe->device, tbe_weight_gradient, &args);
}

/** Make an update store its rows in @sparse. */
static peri_status sparse_args(peri_tbe *tbe, const peri_tbe_sparse *sparse, peri_k_tbe_update_args *args)
{
    void *room;
    PERI_TRY(peri__tbe_workspace(tbe, PERI__TBE_RUNS, PERI_I64, 1 + peri__numel(sparse->rows), &room));
    args->optimizer.kind = PERI_TBE_NONE;
    args->runs = room;
    args->run_rows = args->runs + 1;
    args->run_values = peri__data(sparse->values);
    args->run_stride = tbe->max_cols;
    return PERI_OK;
}

/** Whether rows of a table's gradient, @bytes of them, lie so far apart that the sets of a processor's own cache which
 *  have them are full of them by half. Rows at a stride of 2^k bytes, or odd multiples of it, begin in one set of 2^k
 *  bytes' worth of sets. */
static bool crowded(int64_t bytes, int64_t row_bytes, int64_t stride_bytes)
{
    const int64_t apart = stride_bytes & -stride_bytes;
    return 2 * bytes * (apart / peri__max(1, peri__min(apart, row_bytes))) > peri__own_cache_bytes();
}

/** How an update reaches rows. Rows of the gradient are worth keeping where several ids read each, those of a table fit
 *  into their share of the cache, the gradient is larger than all of it, and they would drive each other out of it. */
static peri_k_tbe_reach choose_reach(const peri_tbe_batch *b, const peri_tensor *grad)
{
    enum { IDS_A_BAG = 4 };
    const peri_tbe_blocks *l = b->in.blocks;
    const int64_t number = sizeof(float), bytes = l->largest * b->tbe->max_cols * number;
    peri_k_tbe_reach reach = peri__tbe_reach_update();
    bool worth = l->n > 0 && !l->none && b->sorted->capacity >= IDS_A_BAG * l->total_bags && bytes <= reach.kept &&
                 peri__numel(grad) * number > peri__own_cache_bytes() &&
                 crowded(bytes, b->tbe->max_cols * number, l->block[0].out_stride * number);
    reach.kept = worth ? (int32_t)bytes : 0;
    return reach;
}

/** peri__tbe_update of a batch that is sorted. */
static peri_status update_sorted(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *dense,
                                 const peri_tbe_sparse *sparse)
{
    peri_tbe *tbe = b->tbe;
    peri_k_tbe_update_args args = {.rows = peri__tbe_kernel_tables(tbe),
                                   .grad = peri__data(grad),
                                   .n = b->sorted->n,
                                   .sorted = b->sorted->keys,
                                   .items = b->sorted->items,
                                   .payload_bits = b->sorted->payload_bits,
                                   .capacity = b->sorted->capacity,
                                   .work = b->sorted->work,
                                   .halvings = tbe->halvings,
                                   .reach = choose_reach(b, grad)};
    args.optimizer = peri__tbe_kernel_optimizer(tbe, tbe->iteration);
    args.updated = (int64_t *)peri__data(tbe->counters) + PERI__TBE_COUNT_ROWS;
    if (dense) {
        args.optimizer.kind = PERI_TBE_NONE;
        args.dense = peri__data(dense);
        args.touched = args.dense + tbe->total_elements;
    }
    if (sparse) PERI_TRY(sparse_args(tbe, sparse, &args));
    PERI_TRY(PERI_RUN(tbe->device, tbe_update, &args));
    if (!sparse) return PERI_OK;
    peri_k_tbe_run_tables_args tables = {.tables = args.rows.tables,
                                         .run_rows = args.run_rows,
                                         .runs = args.runs,
                                         .rows = peri__data(sparse->rows),
                                         .first = peri__data(sparse->first),
                                         .n_tables = tbe->n_tables};
    return PERI_LAUNCH(tbe->device, tbe_run_tables, &tables, tbe->n_tables, 1);
}

peri_status peri__tbe_update(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *dense, const peri_tbe_sparse *sparse)
{
    if (nothing_to_sum(b)) return PERI_OK;
    PERI_TRY(peri__batch_sort(b));
    peri_status status = update_sorted(b, grad, dense, sparse);
    peri__sorted_recycle(b);
    return status;
}

/* -- dense gradients ----------------------------------------------------------------------------------------------- */

/** Within a call: add the gradients to @dense. */
static peri_status add_dense_gradient(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights,
                                      peri_tensor *dense)
{
    if (grad_weights) PERI_TRY(peri__tbe_weight_gradient(b, grad, grad_weights));
    return peri__tbe_update(b, grad, dense, NULL);
}

static peri_status new_dense_gradient(const char *function, peri_tbe_batch *b, peri_tensor *grad,
                                      peri_tensor *grad_weights, peri_tensor **out)
{
    peri_tbe *tbe = b->tbe;
    if (!b->there) PERI_TRY(peri__tbe_gradient_check(function, tbe, &b->in, grad, grad_weights));
    if (!tbe->store->whole) return peri__fail(PERI_EUNSUPPORTED, "%s: cached tables have no dense gradients", function);
    int64_t n = tbe->total_elements + tbe->total_rows;
    peri_tensor *dense;
    PERI_TRY(peri_tensor_full(tbe->device, PERI_F32, 1, &n, 0, &dense));
    peri_status status = peri__batch_enter(function, b, true);
    if (status >= 0) status = peri__batch_leave(b, true, add_dense_gradient(b, grad, grad_weights, dense));
    if (status < 0) peri_tensor_release(dense);
    else *out = dense;
    return status;
}

peri_status peri_tbe_batch_gradient(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights, peri_tensor **out)
{
    PERI_NEED(b);
    PERI_NEED(grad);
    PERI_NEED(out);
    return new_dense_gradient("peri_tbe_batch_gradient", b, grad, grad_weights, out);
}

peri_status peri_tbe_gradient(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *grad, peri_tensor *grad_weights,
                              peri_tensor **out)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(grad);
    PERI_NEED(out);
    peri_tbe_batch *b;
    PERI_TRY(peri__tbe_input_check("peri_tbe_gradient", tbe, in));
    PERI_TRY(peri__batch_acquire(tbe, in, &b));
    peri_status status = new_dense_gradient("peri_tbe_gradient", b, grad, grad_weights, out);
    peri__batch_recycle(b);
    return status;
}

peri_status peri__tbe_sparse(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights, peri_tbe_sparse *out)
{
    peri_tbe *tbe = b->tbe;
    int64_t most = peri__min(peri__numel(b->in.ids) * b->in.blocks->multiplicity, tbe->total_rows),
            n = tbe->n_tables + 1;
    peri_tbe_sparse s = {0};
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_I64, 1, &most, &s.rows), out);
    PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_F32, 2, (int64_t[]){most, peri__max(tbe->max_cols, 1)}, &s.values),
                  out);
    PERI_TRY_GOTO(peri_tensor_full(tbe->device, PERI_I64, 1, &n, 0, &s.first), out);
    if (grad_weights) PERI_TRY_GOTO(peri__tbe_weight_gradient(b, grad, grad_weights), out);
    status = peri__tbe_update(b, grad, NULL, &s);
out:
    if (status >= 0) {
        *out = s;
        return status;
    }
    peri_tensor_release(s.rows);
    peri_tensor_release(s.values);
    peri_tensor_release(s.first);
    return status;
}

peri_status peri_tbe_gradient_sparse(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *grad,
                                     peri_tensor *grad_weights, peri_tbe_sparse *out)
{
    static const char *const f = "peri_tbe_gradient_sparse";
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(grad);
    PERI_NEED(out);
    peri_tbe_batch *b;
    PERI_TRY(peri__tbe_input_check(f, tbe, in));
    PERI_TRY(peri__tbe_gradient_check(f, tbe, in, grad, grad_weights));
    if (!tbe->store->whole)
        return peri__fail(PERI_EUNSUPPORTED, "%s: cached tables update with every backward pass", f);
    PERI_TRY(peri__batch_acquire(tbe, in, &b));
    peri_status status = peri__batch_enter(f, b, true);
    if (status >= 0) status = peri__batch_leave(b, true, peri__tbe_sparse(b, grad, grad_weights, out));
    peri__batch_recycle(b);
    return status;
}

static peri_status check_dense(const char *function, const peri_tbe *tbe, const peri_tensor *gradient)
{
    char text[128];
    int64_t n = tbe->total_elements + tbe->total_rows;
    PERI_TRY(peri__check_tensor(function, "the gradient", gradient, PERI_F32, 1));
    if (peri__numel(gradient) == n && peri__contiguous(gradient) && peri__device(gradient) == tbe->device)
        return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is no gradient of this table batch, which has %lld numbers on device %s",
                      function, peri__tensor_text(gradient, text, sizeof text), (long long)n, tbe->device->name);
}

/** Within a call. */
static peri_status apply_gradient(peri_tbe *tbe, const peri_tensor *gradient)
{
    PERI_TRY(PERI_NEED_WORK("peri_tbe_gradient_apply", tbe->device, PERI_OP_tbe_dense_update));
    const float *touched = (const float *)peri__data(gradient) + tbe->total_elements;
    PERI_TRY(peri__tbe_tell(tbe, &(peri__row_change){.form = PERI__ROWS_TOUCHED, .part = -1, .touched = touched}));
    PERI_TRY(peri__tbe_ema_alone(tbe));
    PERI_TRY(peri__counter_refresh(tbe, tbe->iteration + 1));
    peri_k_tbe_dense_update_args args = {.rows = peri__tbe_kernel_tables(tbe),
                                         .optimizer = peri__tbe_kernel_optimizer(tbe, tbe->iteration + 1),
                                         .dense = peri__data(gradient),
                                         .touched = touched};
    PERI_TRY(PERI_RUN(tbe->device, tbe_dense_update, &args));
    tbe->iteration++;
    tbe->updates++;
    return PERI_OK;
}

peri_status peri_tbe_gradient_apply(peri_tbe *tbe, peri_tensor *gradient)
{
    PERI_NEED(tbe);
    PERI_NEED(gradient);
    if (!tbe->store->whole)
        return peri__fail(PERI_EUNSUPPORTED, "peri_tbe_gradient_apply: cached tables have no dense gradients");
    PERI_TRY(check_dense("peri_tbe_gradient_apply", tbe, gradient));
    if (tbe->optimizer.kind == PERI_TBE_NONE)
        return peri__fail(PERI_EINVAL, "peri_tbe_gradient_apply: this table batch has no optimizer");
    if (tbe->optimizer.kind == PERI_TBE_SHAMPOO)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_tbe_gradient_apply: shampoo updates from the ids' gradients, not from dense ones");
    PERI_TRY(peri__tbe_enter(tbe, true));
    return peri__tbe_leave(tbe, true, apply_gradient(tbe, gradient));
}

peri_status peri_tbe_gradient_table(peri_tbe *tbe, peri_tensor *gradient, int64_t table, peri_tensor **out)
{
    PERI_NEED(tbe);
    PERI_NEED(gradient);
    PERI_NEED(out);
    PERI_TRY(check_dense("peri_tbe_gradient_table", tbe, gradient));
    if (table < 0 || table >= tbe->n_tables)
        return peri__fail(PERI_ERANGE, "peri_tbe_gradient_table: table %lld, allowed: 0..%lld", (long long)table,
                          (long long)tbe->n_tables - 1);
    const peri_k_tbe_table *t = &tbe->layout[table];
    return peri__tensor_view(gradient, 2, (int64_t[]){t->rows, t->cols}, (int64_t[]){t->stride, 1},
                             gradient->offset + t->offset, out);
}
