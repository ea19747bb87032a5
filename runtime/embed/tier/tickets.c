/* SPDX-License-Identifier: Apache-2.0
 *
 * tickets.c: lookups in tables behind a cache: tickets, room, prefetches. See tier.h.
 */
#include "../row_watch.h"
#include "tier.h"
#include "../../../kernels/dense.h"

/* -- tickets ------------------------------------------------------------------------------------------------------- */

/** The oldest ticket in @state, or NULL. */
static peri__ticket *oldest_ticket(peri__tier *tier, int32_t state)
{
    peri__ticket *found = NULL;
    for (int i = 0; i < PERI__TICKETS; i++)
        if (tier->ticket[i].state == state && (!found || tier->ticket[i].sequence < found->sequence))
            found = &tier->ticket[i];
    return found;
}

/** End what a batch that does not come has under way, which the cache keeps, and make the ticket free for another. */
static void ticket_release(peri__tier *tier, peri__ticket *t)
{
    /* What is under way belongs to the cache, also when this batch does not come. A failure shows when somebody asks
     * for the row again. */
    if (peri__ticket_fill(tier, t) >= 0) peri__ticket_forget(tier, t);
}

/** A ticket for @owner that holds nothing yet. */
static peri_status open_ticket(peri__tier *tier, peri_tbe_batch *owner, peri__ticket **out)
{
    peri__ticket *t = oldest_ticket(tier, PERI__TICKET_FREE);
    if (!t) {
        t = oldest_ticket(tier, PERI__TICKET_LOOKED_UP);
        if (!t) t = oldest_ticket(tier, PERI__TICKET_PREFETCHED);
        ticket_release(tier, t);
    }
    PERI_TRY(peri__records_written(tier, &t->out));
    t->state = PERI__TICKET_OPEN;
    t->sequence = ++tier->sequence;
    t->complete = t->filled = true;
    t->depends = t->fetched = t->updated = false;
    t->bad_ids = 0;
    t->layers = 1;
    t->owner = owner;
    owner->ticket = t;
    *out = t;
    return PERI_OK;
}

/* -- layers: blocks that share bags look into different tables, so their ids become different slots ---------------- */

/** Give every block a layer so that blocks of a layer share no bags, and later blocks lie in later layers than those
 *  they share with. The list of ids that have become slots holds one copy of the batch's ids for each layer: the bags
 *  of layer l are those of the batch, moved by l * (bags + 1), and their ids are moved by l * n_ids. A table that does
 *  not pool writes a row where its id stands in the list; the results shall lie where they would without layers, so its
 *  out_offset goes back by as much. */
static peri_status layer_blocks(peri__tier *tier, const peri_tbe_input *in, int64_t bags, int64_t n_ids)
{
    const peri_tbe_blocks *b = in->blocks;
    if (tier->layered == b->serial && tier->layered_bags == bags && (tier->layered_ids == n_ids || !b->none))
        return PERI_OK;
    tier->layered = 0;
    int64_t *layer = peri__realloc(tier->block_layer, sizeof *layer * (size_t)peri__max(b->n, 1));
    if (!layer) return PERI_ENOMEM;
    tier->block_layer = layer;
    tier->layers = 1;
    peri_tbe_block *list = peri__alloc(sizeof *list * (size_t)peri__max(b->n, 1));
    if (!list) return PERI_ENOMEM;
    for (int64_t k = 0; k < b->n; k++) {
        const peri_k_tbe_block *x = &b->block[k];
        layer[k] = 0;
        for (int64_t i = 0; i < k && b->multiplicity > 1; i++) {
            const peri_k_tbe_block *y = &b->block[i];
            bool share =
                x->bags && y->bags && x->first_bag < y->first_bag + y->bags && y->first_bag < x->first_bag + x->bags;
            if (share) layer[k] = peri__max(layer[k], layer[i] + 1);
        }
        tier->layers = peri__max(tier->layers, layer[k] + 1);
        memcpy(&list[k], x, sizeof *list);
        list[k].first_bag += layer[k] * (bags + 1);
        if (tier->tbe->layout[x->table].pooling == PERI_POOLING_NONE)
            list[k].out_offset -= layer[k] * n_ids * x->out_stride;
    }
    peri_status status = PERI_OK;
    peri_tbe_blocks_release(tier->layer_blocks);
    tier->layer_blocks = NULL;
    if (tier->layers > 1) status = peri__tbe_blocks_new(tier->tbe, list, b->n, &tier->layer_blocks);
    peri__free(list);
    PERI_TRY(status);
    tier->layered = b->serial;
    tier->layered_bags = bags;
    tier->layered_ids = n_ids;
    return PERI_OK;
}

/** Offsets for each layer's copy of the ids. */
static peri_status layer_offsets(peri__tier *tier, peri__ticket *t, const int64_t *offsets, int64_t bags, int64_t n_ids)
{
    int64_t n = t->layers * (bags + 1);
    int64_t *all = peri__alloc(sizeof *all * (size_t)n);
    if (!all) return PERI_ENOMEM;
    for (int64_t l = 0; l < t->layers; l++)
        for (int64_t b = 0; b <= bags; b++) /* unsigned: not checked yet, and outside the blocks never */
            all[l * (bags + 1) + b] = (int64_t)((uint64_t)(l * n_ids) + (uint64_t)offsets[b]);
    peri_status status = peri_tensor_new(tier->tbe->device, PERI_I64, 1, &n, &t->layer_offsets);
    if (status >= 0) status = peri_tensor_write(t->layer_offsets, all, n * (int64_t)sizeof *all);
    peri__free(all);
    return status;
}

/** Undo peri__tier_map and forget the ticket; the error record stays. */
static void give_up_ticket(peri__tier *tier, peri__ticket *t)
{
    for (int64_t i = 0; i < t->n_wants; i++)
        if (t->wants[i].slot < 0 &&
            peri__cache_find(tier->tables[t->wants[i].table].cache, t->wants[i].row) & PERI__WANTED)
            peri__cache_unwant(tier->tables[t->wants[i].table].cache, t->wants[i].row);
    peri__ticket_forget(tier, t);
}

/* -- room ---------------------------------------------------------------------------------------------------------- */

static peri_status fail_small(const char *function, const peri__tier *tier, const peri__ticket *t, int32_t table)
{
    const peri__cache *c = tier->tables[table].cache;
    int64_t needed = tier->tables[table].need;
    for (int64_t i = 0; i < t->n_pins; i++) needed += t->pins[i].table == table;
    double enough = (double)needed / (double)c->rows + 0.00005;
    return peri__fail(PERI_ENOMEM,
                      "%s: table '%.120s': the batch needs %lld different rows, its cache holds %d of %lld; set a "
                      "load_factor of %.4g%s "
                      "(less reserved_memory, if that made it small), or make the batch smaller",
                      function, tier->tbe->tables[table].name, (long long)needed, c->slots, (long long)c->rows,
                      enough < 1 ? enough : 1, enough < 1 ? " to 1" : "");
}

/** Make room for what @t wants, at the cost of other batches in flight; a prefetch only counts what will not fit. */
static peri_status make_room(const char *function, peri__tier *tier, peri__ticket *t, bool prefetch)
{
    for (int32_t i = 0; i < tier->n_tables; i++) {
        peri__tier_table *table = &tier->tables[i];
        while (table->need > peri__cache_rows_that_fit(table->cache)) {
            if (prefetch) {
                table->stats.conflict_misses += table->need - peri__cache_rows_that_fit(table->cache);
                t->complete = false;
                break;
            }
            peri__ticket *other = oldest_ticket(tier, PERI__TICKET_LOOKED_UP);
            if (!other) other = oldest_ticket(tier, PERI__TICKET_PREFETCHED);
            if (!other) return fail_small(function, tier, t, i);
            ticket_release(tier, other);
        }
    }
    return PERI_OK;
}

/** Memory and files are ready for the rows that @t wants. */
static peri_status get_room_ready(peri__tier *tier, peri__ticket *t)
{
    int64_t bytes = 0;
    if (t->n_wants == 0) return PERI_OK;
    PERI_TRY(peri__tier_wait_writes(tier));
    for (int32_t i = 0; i < tier->n_tables; i++) {
        peri__row_file *f = tier->tables[i].file;
        bytes += tier->tables[i].need * f->header.record_bytes;
        if (tier->tables[i].need && tier->dirty) PERI_TRY(peri__row_file_mark_unclean(f));
    }
    PERI_TRY(peri__records_reserve(tier, &t->in, t->n_wants, bytes));
    return peri__records_reserve(tier, &t->out, t->n_wants, bytes);
}

/** Undo what take_slots has taken: nothing has been moved yet. */
static void return_slots(peri__tier *tier, peri__ticket *t)
{
    for (int64_t i = t->n_wants - 1; i >= 0; i--) {
        peri__tier_want *w = &t->wants[i];
        if (w->slot >= 0) peri__cache_untake(tier->tables[w->table].cache, (uint32_t)w->slot, w->victim, w->flags);
    }
    t->n_wants = t->in.n = t->out.n = 0;
}

/** Slots for what @t wants; victims that changed go to the file. Nothing but the device can fail here. */
static peri_status take_slots(peri__tier *tier, peri__ticket *t, bool prefetch)
{
    for (int64_t i = 0; i < t->n_wants; i++) {
        peri__tier_want *w = &t->wants[i];
        peri__tier_table *table = &tier->tables[w->table];
        if (peri__cache_rows_that_fit(table->cache) == 0) {
            peri__cache_unwant(table->cache, w->row);
            continue;
        }
        uint32_t slot;
        w->strayed = peri__cache_take(table->cache, w->row, &slot, &w->victim, &w->flags);
        w->slot = (int32_t)slot;
        t->in.moves[t->in.n++] = (peri_k_cache_move){.row = w->row, .table = w->table, .slot = w->slot};
        if (prefetch) *peri__tier_flags(tier, w->table, w->slot) |= PERI__SLOT_FETCHED;
        if (w->flags & PERI__SLOT_DIRTY)
            t->out.moves[t->out.n++] = (peri_k_cache_move){.row = w->victim, .table = w->table, .slot = w->slot};
    }
    peri_status status = peri__records_spill(tier, &t->out);
    if (status < 0) {
        return_slots(tier, t);
        return status;
    }
    t->filled = t->in.n == 0;
    for (int64_t i = 0; i < t->n_wants; i++) {
        peri_tbe_cache_stats *stats = &tier->tables[t->wants[i].table].stats;
        stats->prefetched += prefetch && t->wants[i].slot >= 0;
        stats->evictions += t->wants[i].slot >= 0 && t->wants[i].victim >= 0;
        stats->set_conflicts += t->wants[i].slot >= 0 && t->wants[i].strayed;
    }
    peri__records_write(tier, &t->out);
    peri__records_read(tier, &t->in);
    return PERI_OK;
}

/* -- resolving ----------------------------------------------------------------------------------------------------- */

/** Memory for the mapped ids: on the device, and where the host writes them. */
static peri_status mapped_new(peri__tier *tier, peri__ticket *t, int64_t n, int32_t **host)
{
    if (!t->mapped_store || peri__numel(t->mapped_store) < n) {
        int64_t more = peri__max(1, n + n / 4);
        peri_tensor *fresh;
        PERI_TRY(peri_tensor_new(tier->tbe->device, PERI_I32, 1, &more, &fresh));
        peri__tbe_free_later(tier->tbe, &t->mapped_store);
        t->mapped_store = fresh;
    }
    PERI_TRY(peri__tensor_view(t->mapped_store, 1, &n, NULL, 0, &t->mapped));
    *host = peri__data(t->mapped);
    if (tier->direct) return PERI_OK;
    if (n > tier->mapped_capacity) {
        peri__free(tier->mapped_host);
        tier->mapped_capacity = 0;
        tier->mapped_host = peri__alloc(sizeof **host * (size_t)n);
        if (!tier->mapped_host) return PERI_ENOMEM;
        tier->mapped_capacity = n;
    }
    *host = tier->mapped_host;
    return PERI_OK;
}

static peri_status map_batch(const char *function, peri__tier *tier, peri__ticket *t, const peri__tier_batch *b,
                             bool prefetch)
{
    int32_t *mapped;
    PERI_TRY(mapped_new(tier, t, t->layers * b->n_ids, &mapped));
    for (int64_t i = 0; i < tier->n_tables; i++) {
        peri__cache_begin(tier->tables[i].cache);
        tier->tables[i].need = 0;
    }
    PERI_TRY(peri__tier_map(function, tier, t, b, mapped));
    PERI_TRY(make_room(function, tier, t, prefetch));
    PERI_TRY(get_room_ready(tier, t));
    if (t->n_wants) PERI_TRY(take_slots(tier, t, prefetch));
    for (int64_t i = 0; t->n_wants && i < t->layers * b->n_ids; i++)
        if (mapped[i] < -1) mapped[i] = t->wants[-2 - mapped[i]].slot;
    if (!tier->direct) PERI_TRY(peri_tensor_write(t->mapped, mapped, t->layers * b->n_ids * (int64_t)sizeof *mapped));
    return PERI_OK;
}

/** A new ticket for @batch: its rows are pinned and on their way. */
static peri_status new_ticket_for(const char *function, peri__tier *tier, peri_tbe_batch *batch, bool prefetch,
                           peri__ticket **out)
{
    const peri_tbe_input *in = &batch->in;
    peri__tier_batch b = {0};
    peri__ticket *t = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__tier_batch_init(tier, in, &b), out);
    PERI_TRY_GOTO(layer_blocks(tier, in, b.bags, b.n_ids), out);
    PERI_TRY_GOTO(open_ticket(tier, batch, &t), out);
    t->layers = tier->layers;
    if (t->layers > 1) {
        t->layer_blocks = tier->layer_blocks;
        peri_tbe_blocks_retain(t->layer_blocks);
        PERI_TRY_GOTO(layer_offsets(tier, t, b.offsets, b.bags, b.n_ids), out);
    }
    status = map_batch(function, tier, t, &b, prefetch);
out:
    if (status < 0 && t) give_up_ticket(tier, t);
    if (status >= 0) *out = t;
    peri__tier_batch_fini(&b);
    return status;
}

/** Everything that @t needs is in its slots when this has run. */
static peri_status fill_slots(const char *function, peri__tier *tier, peri__ticket *t)
{
    PERI_TRY(peri__ticket_fill(tier, t));
    if (!t->depends) return PERI_OK;
    PERI_TRY(peri__tier_fill_slots(tier));
    for (int64_t i = 0; i < t->n_pins; i++)
        if (*peri__tier_flags(tier, t->pins[i].table, t->pins[i].slot) & PERI__SLOT_FILLING)
            return peri__fail(PERI_EIO,
                              "%s: a row of table '%s' that an earlier prefetch should have brought could not be read",
                              function, tier->tbe->tables[t->pins[i].table].name);
    t->depends = false;
    return PERI_OK;
}

static void count_hits(peri__tier *tier, const peri__ticket *t, bool again, bool prefetched)
{
    for (int64_t i = 0; i < t->n_wants; i++) {
        peri_tbe_cache_stats *s = &tier->tables[t->wants[i].table].stats;
        if (again) s->conflict_misses++;
        else if (prefetched) s->hits++;
        else s->misses++;
    }
    if (again) return;
    for (int64_t i = 0; i < t->n_pins; i++) tier->tables[t->pins[i].table].stats.hits++;
    for (int64_t i = t->fetched ? 0 : t->n_pins; i < t->n_pins + (prefetched ? t->n_wants : 0); i++) {
        bool pin = i < t->n_pins;
        int32_t table = pin ? t->pins[i].table : t->wants[i - t->n_pins].table,
                slot = pin ? t->pins[i].slot : t->wants[i - t->n_pins].slot;
        uint8_t *flags = peri__tier_flags(tier, table, slot);
        if (*flags & PERI__SLOT_FETCHED) tier->tables[table].stats.prefetch_hits++;
        *flags &= (uint8_t)~PERI__SLOT_FETCHED;
    }
}

/** Say what is wrong with the ids, as a table batch in memory does: its check, with the numbers of rows of the whole
 *  tables. */
static peri_status report_bad_ids(const char *function, peri__tier *tier, peri_tbe_batch *batch, int64_t bad)
{
    peri_tbe *tbe = tier->tbe;
    if (bad == 0 || tbe->bounds_check == PERI_BOUNDS_NONE) return PERI_OK;
    tier->bad_ids += bad;
    if (tbe->bounds_check == PERI_BOUNDS_IGNORE) return PERI_OK;
    int64_t bytes = (int64_t)sizeof(peri_k_tbe_table) * tbe->n_tables;
    peri_k_tbe_table *tables = peri__alloc((size_t)bytes);
    peri_tensor *layout = NULL;
    peri_status status = tables ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    memcpy(tables, tbe->layout, (size_t)bytes);
    for (int64_t t = 0; t < tbe->n_tables; t++) tables[t].rows = tbe->tables[t].config.rows;
    PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_U8, 1, &bytes, &layout), out);
    PERI_TRY_GOTO(peri_tensor_write(layout, tables, bytes), out);
    peri_k_tbe_check_args check = {0};
    PERI_TRY_GOTO(peri__batch_report(batch, &check.report), out);
    PERI_TRY_GOTO(peri__batch_kernel_list(batch, false, &check.list), out);
    check.list.tables = peri__data(layout);
    peri_k_tbe_report_args describe = {.list = check.list, .report = check.report};
    PERI_TRY_GOTO(PERI_RUN(tbe->device, tbe_check, &check), out);
    PERI_TRY_GOTO(PERI_RUN(tbe->device, tbe_report, &describe), out);
    peri_k_tbe_report found;
    PERI_TRY_GOTO(peri_tensor_read(batch->report, &found, sizeof found), out);
    status = peri__tbe_status(tbe, function, &found);
out:
    peri_tensor_release(layout);
    peri__free(tables);
    return status;
}

/** @t repeated once for each layer. */
static peri_status repeat_layers(const peri_tensor *t, int64_t layers, peri_tensor **out)
{
    int64_t n = peri__numel(t), all = n * layers;
    peri_tensor *r;
    PERI_TRY(peri__tensor_like(t, 1, &all, &r));
    peri_status status = PERI_OK;
    for (int64_t l = 0; l < layers && status >= 0; l++)
        status = peri__copy(peri__device(t), (char *)peri__data(r) + l * n * 4, peri__data(t), n * 4, PERI_COPY_D2D);
    if (status < 0) peri_tensor_release(r);
    else *out = r;
    return status;
}

/** As repeat_layers, with one 1 behind each copy: offsets of layers have one bag more. */
static peri_status repeat_scale(const peri_tensor *t, int64_t layers, peri_tensor **out)
{
    int64_t n = peri__numel(t), shape[2] = {layers, n + 1}, rows[2] = {layers, n}, stride[2] = {n + 1, 1},
            repeated[2] = {0, 1};
    peri_tensor *r = NULL, *to = NULL, *from = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_full(peri__device(t), PERI_F32, 2, shape, 1, &r), out);
    PERI_TRY_GOTO(peri__tensor_view(r, 2, rows, stride, 0, &to), out);
    PERI_TRY_GOTO(peri__tensor_view((peri_tensor *)(uintptr_t)t, 2, rows, repeated, t->offset, &from), out);
    PERI_TRY_GOTO(peri_tensor_copy(to, from), out);
    /* The last entry is one bag too many. */
    int64_t flat = layers * (n + 1) - 1;
    status = peri__tensor_view(r, 1, &flat, NULL, 0, out);
out:
    peri_tensor_release(r);
    peri_tensor_release(to);
    peri_tensor_release(from);
    return status;
}

/** The batch in slots: ids mapped, and with several layers everything once for each. */
static peri_status batch_in_slots(peri__tier *tier, peri__ticket *t, const peri_tbe_input *in)
{
    peri_tbe_input inner = {.ids = t->mapped, .offsets = in->offsets, .blocks = in->blocks};
    peri_tensor *weights = NULL, *scale = NULL;
    if (t->inner) return PERI_OK;
    peri_status status = PERI_OK;
    if (t->layers > 1) {
        inner.offsets = t->layer_offsets;
        inner.blocks = t->layer_blocks;
        if (in->weights) PERI_TRY_GOTO(repeat_layers(in->weights, t->layers, &weights), out);
        if (in->scale) PERI_TRY_GOTO(repeat_scale(in->scale, t->layers, &scale), out);
    }
    inner.weights = weights ? weights : in->weights;
    inner.scale = scale ? scale : in->scale;
    status = peri__batch_acquire(tier->tbe, &inner, &t->inner);
out:
    peri_tensor_release(weights);
    peri_tensor_release(scale);
    return status;
}

/** The ticket for looking @batch up, its own or a new one; ticket->inner is ready. @again: for an update, whose lookup
 *  was counted already. */
static peri_status tier_begin(const char *function, peri__tier *tier, peri_tbe_batch *batch, bool again,
                              peri__ticket **ticket)
{
    peri__ticket *t = batch->ticket, *partial = NULL;
    /* a second lookup: the same tensors may hold other ids by now */
    if (t && !again && t->state == PERI__TICKET_LOOKED_UP) {
        ticket_release(tier, t);
        t = NULL;
    }
    bool prefetched = t && !again;
    if (t && !t->complete) {
        partial = t; /* its rows stay pinned until this lookup has pinned them itself */
        t = NULL;
        prefetched = false;
    }
    if (!t) {
        uint64_t sequence = partial ? partial->sequence : 0;
        peri_status resolved = new_ticket_for(function, tier, batch, false, &t);
        /* else it was given up */
        bool there = partial && partial->state != PERI__TICKET_FREE && partial->sequence == sequence;
        if (resolved < 0 && there) batch->ticket = partial;
        PERI_TRY(resolved);
        if (there) ticket_release(tier, partial);
        count_hits(tier, t, again, false);
    } else if (!again) {
        count_hits(tier, t, false, prefetched);
    }
    peri_status status = again ? PERI_OK : report_bad_ids(function, tier, batch, t->bad_ids);
    if (status >= 0) status = fill_slots(function, tier, t);
    if (status >= 0) status = batch_in_slots(tier, t, &batch->in);
    if (status < 0) {
        peri__ticket_forget(tier, t);
        return status;
    }
    *ticket = t;
    return PERI_OK;
}

/* -- the public functions, for cached tables ----------------------------------------------------------------------- */

static peri_status tier_forward(const char *function, peri_tbe_batch *batch, peri_tensor *out)
{
    peri__tier *tier = peri__tier_of(batch->tbe);
    peri__ticket *t;
    PERI_TRY(tier_begin(function, tier, batch, false, &t));
    peri_status status = peri__tbe_forward(t->inner, out, false);
    if (peri_grad_enabled() && status >= 0) t->state = PERI__TICKET_LOOKED_UP;
    else peri__ticket_forget(tier, t);
    return status;
}

peri_status peri__tier_forward(const char *function, peri_tbe_batch *batch, peri_tensor *out)
{
    PERI_TRY(peri__batch_enter(function, batch, true));
    return peri__batch_leave(batch, true, tier_forward(function, batch, out));
}

/** @total[i] = sum over the layers of @parts[layer, i], in order. */
static peri_status sum_layers(peri_tensor *parts, int64_t layers, peri_tensor *total)
{
    int64_t n = peri__numel(total);
    peri_tensor *sum = NULL;
    peri_status status = peri__tensor_view(parts, 1, &n, NULL, 0, &sum);
    for (int64_t l = 1; l < layers && status >= 0; l++) {
        peri_tensor *part = NULL, *more = NULL;
        status = peri__tensor_view(parts, 1, &n, NULL, l * n, &part);
        if (status >= 0) status = peri__binary("peri_tbe_backward", PERI_BINARY_ADD, sum, part, &more);
        peri_tensor_release(part);
        if (status < 0) break;
        peri_tensor_release(sum);
        sum = more;
    }
    if (status >= 0) status = peri_tensor_copy(total, sum);
    peri_tensor_release(sum);
    return status;
}

/** Tell the watches the rows of a ticket that is about to be updated, table by table. */
static peri_status tell_rows(const peri__tier *tier, const peri__ticket *t)
{
    const int64_t all = t->n_pins + t->n_wants;
    if (!tier->tbe->watches || all == 0) return PERI_OK;
    int64_t *rows = peri__alloc(sizeof *rows * (size_t)all), n = 0;
    peri_status status = rows ? PERI_OK : PERI_ENOMEM;
    for (int64_t i = 0; i < all && status >= 0; i++) {
        const bool pin = i < t->n_pins;
        const int32_t table = pin ? t->pins[i].table : t->wants[i - t->n_pins].table;
        rows[n++] = pin ? tier->tables[table].cache->slot[t->pins[i].slot].row : t->wants[i - t->n_pins].row;
        const int64_t k = i + 1;
        if (k < t->n_pins ? t->pins[k].table == table : k < all && t->wants[k - t->n_pins].table == table) continue;
        const peri__row_change change = {.form = PERI__ROWS_LIST, .part = -1, .table = table, .rows = rows, .count = n};
        status = peri__tbe_tell(tier->tbe, &change);
        n = 0;
    }
    peri__free(rows);
    return status;
}

static peri_status tier_backward(const char *function, peri_tbe_batch *batch, peri_tensor *grad,
                                 peri_tensor *grad_weights)
{
    peri__tier *tier = peri__tier_of(batch->tbe);
    peri__ticket *t;
    peri_tensor *parts = NULL;
    PERI_TRY(tier_begin(function, tier, batch, true, &t));
    peri_status status = PERI_OK;
    int64_t n = peri__numel(t->mapped);
    if (grad_weights && t->layers > 1) PERI_TRY_GOTO(peri_tensor_new(batch->tbe->device, PERI_F32, 1, &n, &parts), out);
    PERI_TRY_GOTO(tell_rows(tier, t), out);
    t->updated = true;
    tier->dirty = tier->dirty || t->n_pins || t->n_wants;
    tier->prepared = false;
    PERI_TRY_GOTO(peri__tbe_backward(t->inner, grad, parts ? parts : grad_weights), out);
    if (parts) status = sum_layers(parts, t->layers, grad_weights);
out:
    peri_tensor_release(parts);
    peri__ticket_forget(tier, t);
    return status;
}

peri_status peri__tier_backward(const char *function, peri_tbe_batch *batch, peri_tensor *grad,
                                peri_tensor *grad_weights)
{
    PERI_TRY(peri__batch_enter(function, batch, true));
    return peri__batch_leave(batch, true, tier_backward(function, batch, grad, grad_weights));
}

static peri_status tier_prefetch(const char *function, peri_tbe_batch *batch)
{
    peri__tier *tier = peri__tier_of(batch->tbe);
    peri__ticket *t;
    if (batch->ticket) return PERI_OK;
    PERI_TRY(new_ticket_for(function, tier, batch, true, &t));
    t->state = PERI__TICKET_PREFETCHED;
    bool here = tier->in_memory && !t->in.job.queued; /* no file is read for it */
    return here ? peri__ticket_fill(tier, t) : PERI_OK;
}

peri_status peri__tier_prefetch(const char *function, peri_tbe_batch *batch)
{
    PERI_TRY(peri__batch_enter(function, batch, true));
    return peri__batch_leave(batch, true, tier_prefetch(function, batch));
}

void peri__tier_drop(peri_tbe_batch *batch)
{
    /* A device that is lost: the ticket's memory goes with the tier. */
    bool alone = peri__tbe_enter(batch->tbe, true) >= 0;
    if (batch->ticket && alone) ticket_release(peri__tier_of(batch->tbe), batch->ticket);
    else if (batch->ticket) batch->ticket->owner = NULL;
    if (alone) (void)peri__tbe_leave(batch->tbe, true, PERI_OK);
    batch->ticket = NULL;
}
