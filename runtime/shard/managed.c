/* SPDX-License-Identifier: Apache-2.0
 *
 * managed.c: tables of raw ids (managed collision). Ids are routed by their bucket, and when all are here the owner's
 * map makes rows of them, before anything is looked up: all features of a table in one call, one call a batch, in the
 * order in which batches are prefetched or looked up. Rows that got another id start again right before the lookup of
 * the batch that brought it, not earlier: until then they may be those of a batch in flight.
 */
#include "../base/buffer.h"
#include "module_batch.h"
#include "../tensor/jagged_internal.h"

/** Rows that start again at the lookup of batch @batch. */
typedef struct waiting {
    peri_tensor *rows;
    int64_t batch;
} waiting;

/** A table of raw ids. */
struct peri__managed {
    peri_collision *map;     /* of the buckets that are here; NULL: none */
    peri__time time;         /* of its table of the module */
    peri__set_table here;    /* where its shard is on this rank */
    int64_t first_row;       /* of that shard */
    int32_t n_features, first; /* first: the number of its first feature among those of all tables of raw ids */
    int32_t *strand;         /* n_features: which of this rank's strands has its ids */
    waiting *waiting;
    int64_t n_waiting, room;
};

/* -- making -------------------------------------------------------------------------------------------------------- */

/** Which of this rank's strands has the raw ids of feature @feature of table @table. */
static int32_t strand_of(const peri_sharded *e, int32_t table, int32_t feature)
{
    const peri__routes *r = e->routes;
    for (int32_t w = r->rank_wire[e->rank]; w < r->rank_wire[e->rank + 1]; w++) {
        const peri__strand *s = &r->strands[r->wire[w]];
        const peri__partition *p = &r->partitions[s->partition];
        if (p->raw && p->table == table && p->feature == feature) return s->index;
    }
    return -1;
}

/** The map is of the rows that the shard has. */
static peri_status check_map(const peri_sharded *e, const peri__managed *m, const peri_shard *shard)
{
    const char *f = "peri_sharded_new";
    if (!m->map) return peri__fail(PERI_EINVAL, "%s: table '%s': rank %d has rows %lld..%lld and no map of them", f,
                                   e->table_names[m->time.table], e->rank, (long long)shard->row_offset,
                                   (long long)(shard->row_offset + shard->rows) - 1);
    if (peri_collision_first_row(m->map) == shard->row_offset && peri_collision_rows(m->map) == shard->rows)
        return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: table '%s': the map of rank %d has rows %lld..%lld, its shard rows %lld..%lld",
                      f, e->table_names[m->time.table], e->rank, (long long)peri_collision_first_row(m->map),
                      (long long)(peri_collision_first_row(m->map) + peri_collision_rows(m->map)) - 1,
                      (long long)shard->row_offset, (long long)(shard->row_offset + shard->rows) - 1);
}

static peri_status add_table(peri_sharded *e, const peri_sharded_table *from, int32_t table)
{
    peri__managed *m = &e->managed[e->n_managed++];
    *m = (peri__managed){.time = {.now = -1, .table = table}, .here = {.set = -1}, .n_features = from->n_features};
    m->first = m == e->managed ? 0 : m[-1].first + m[-1].n_features;
    m->strand = peri__alloc(sizeof *m->strand * (size_t)from->n_features);
    if (!m->strand) return PERI_ENOMEM;
    const peri__route_table *t = &e->tables[table];
    for (int32_t s = 0; s < t->n_shards; s++) {
        if (t->here[1 + s].set < 0) continue;
        m->here = t->here[1 + s];
        m->first_row = t->shards[s].row_offset;
        m->map = from->collision->map;
        if (m->map) peri_collision_retain(m->map);
        PERI_TRY(check_map(e, m, &t->shards[s]));
    }
    for (int32_t f = 0; f < m->n_features && m->map; f++) m->strand[f] = strand_of(e, table, from->features[f]);
    return PERI_OK;
}

peri_status peri__managed_new(peri_sharded *e, const peri_sharded_config *c)
{
    int32_t n = 0;
    e->training = true;
    for (int32_t t = 0; t < c->n_tables; t++) n += c->tables[t].collision != NULL;
    if (n == 0) return PERI_OK;
    e->managed = peri__alloc_zero(sizeof *e->managed * (size_t)n);
    if (!e->managed) return PERI_ENOMEM;
    for (int32_t t = 0; t < c->n_tables; t++)
        if (c->tables[t].collision) PERI_TRY(add_table(e, &c->tables[t], t));
    return PERI_OK;
}

void peri__managed_free(peri_sharded *e)
{
    for (int32_t i = 0; i < e->n_managed; i++) {
        peri__managed *m = &e->managed[i];
        for (int64_t k = 0; k < m->n_waiting; k++) peri_tensor_release(m->waiting[k].rows);
        peri_collision_release(m->map);
        peri__free(m->waiting);
        peri__free(m->strand);
    }
    peri__free(e->managed);
}

peri__time peri__managed_time(const peri_sharded *e, int32_t i) { return e->managed[i].time; }

peri_status peri__managed_check(const char *f, const peri_sharded_config *c, const peri_sharded_table *table)
{
    const peri_sharded_collision *x = table->collision;
    /* an id's bucket is on one rank, wherever that is */
    const int32_t against = PERI_SHARDING_CUTS_COLUMNS | PERI_SHARDING_IN_NODE | PERI_SHARDING_REPLICA;
    char allowed[120];
    if (peri_sharding_type_facts(table->sharding_type) & against)
        return peri__fail(PERI_EUNSUPPORTED, "%s: table '%s' has raw ids and sharding type %s, allowed: %s", f,
                          table->name, peri_sharding_type_name(table->sharding_type),
                          peri__sharding_types_text(against, 0, allowed, sizeof allowed));
    if (table->compute_kernel != PERI_KERNEL_FUSED)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s' has raw ids and the compute kernel %s, allowed: fused, fused_uvm_caching "
                          "(rows that get another "
                          "id start again, with what their optimizer knows)",
                          f, table->name, peri__option_text("compute_kernel", table->compute_kernel));
    if (c->places > 1)
        return peri__fail(PERI_EUNSUPPORTED, "%s: table '%s': raw ids and %d places", f, table->name, c->places);
    if (c->index_dedup)
        return peri__fail(
            PERI_EUNSUPPORTED,
            "%s: table '%s': raw ids and use_index_dedup, which would hide from the map how often an id came; allowed: "
            "false",
            f, table->name);
    if (x->buckets < 1 || !x->segments || x->spread < PERI_SPREAD_HASH || x->spread > PERI_SPREAD_RANGE)
        return peri__fail(PERI_EINVAL, "%s: table '%s': %d buckets%s, spread %d", f, table->name, x->buckets,
                          x->segments ? "" : " without segments", x->spread);
    if (x->spread == PERI_SPREAD_RANGE && x->input_hash_size < 1)
        return peri__fail(PERI_EINVAL, "%s: table '%s': input_hash_size %lld, allowed: >= 1", f, table->name,
                          (long long)x->input_hash_size);
    for (int32_t b = 0; b <= x->buckets; b++)
        if (b == 0 ? x->segments[0] != 0 : x->segments[b] <= x->segments[b - 1])
            return peri__fail(PERI_EINVAL,
                              "%s: table '%s': segments[%d] is %lld, wanted rising numbers from 0 to %lld rows", f,
                              table->name, b, (long long)x->segments[b], (long long)table->rows);
    if (x->segments[x->buckets] == table->rows) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: table '%s': segments end at %lld, the table has %lld rows", f, table->name,
                      (long long)x->segments[x->buckets], (long long)table->rows);
}

/* -- rows of what arrived ------------------------------------------------------------------------------------------ */

/** What becomes of a batch's raw ids. */
struct peri__arrival {
    int32_t done;         /* managed tables whose ids have become rows */
    int64_t batch;        /* its number among those that arrived; 0: not yet */
    peri_tensor *sent;    /* i64, as received: rows of the whole table, to go home; NULL: nobody asked */
    peri__transfer back;
    int32_t n;            /* features of all tables of raw ids */
    peri_tensor *lists[]; /* by feature: local rows, and behind them its raw ids; NULL: not yet, or in their places */
};

static void drop_lists(peri__arrival *a)
{
    for (int32_t i = 0; i < 2 * a->n; i++) {
        peri_tensor_release(a->lists[i]);
        a->lists[i] = NULL;
    }
}

void peri__managed_batch_free(peri__arrival *a)
{
    if (!a) return;
    drop_lists(a);
    peri_tensor_release(a->sent);
    peri__transfer_fini(&a->back);
    peri__free(a);
}

static peri_status managed_batch_new(const peri_sharded *e, peri__arrival **out)
{
    const peri__managed *last = &e->managed[e->n_managed - 1];
    const int32_t n = last->first + last->n_features;
    peri__arrival *a = peri__alloc_zero(sizeof *a + sizeof *a->lists * 2 * (size_t)n);
    if (!a) return PERI_ENOMEM;
    a->n = n;
    *out = a;
    return PERI_OK;
}

/** Ids of strand @k of this rank: from rank @source they are at *@at of what was received; returns how many. */
static int64_t strand_from_rank(const peri_sharded *e, const peri__routing *r, int32_t source, int32_t k, int64_t *at)
{
    const int64_t mine = peri__strands_of(e->routes, e->rank), *ids = r->ids + source * mine;
    *at = peri__sum(r->source_ids, source) + peri__sum(ids, k);
    return ids[k];
}

/** Copy the numbers (i64) of strand @k of this rank between what was received of all ranks and one tensor; @out: into
 *  the former. */
static peri_status move_strand(const peri_sharded *e, const peri__routing *r, int32_t k, peri_tensor *received,
                               peri_tensor *one, bool out)
{
    const int64_t size = (int64_t)sizeof(int64_t);
    char *base = peri__data(received), *other = peri__data(one);
    for (int32_t s = 0; s < e->world_size; s++) {
        int64_t at, n = strand_from_rank(e, r, s, k, &at) * size;
        char *there = base + at * size;
        if (n) PERI_TRY(peri__copy(e->device, out ? there : other, out ? other : there, n, PERI_COPY_D2D));
        other += n;
    }
    return PERI_OK;
}

/** The raw ids of a table, feature by feature, of all ranks. */
static peri_status collect_raw_ids(const peri_sharded *e, const peri__routing *r, const peri__managed *m,
                                   peri_tensor **ids)
{
    for (int32_t f = 0; f < m->n_features; f++) {
        int64_t n = 0, at;
        for (int32_t s = 0; s < e->world_size; s++) n += strand_from_rank(e, r, s, m->strand[f], &at);
        if (ids[f]) continue;
        PERI_TRY(peri_tensor_new(e->device, PERI_I64, 1, &n, &ids[f]));
        PERI_TRY(move_strand(e, r, m->strand[f], r->received[PERI__IDS], ids[f], false));
    }
    return PERI_OK;
}

/** The map's answer; an error says which rank it is of. */
static peri_status ask_map(const peri_sharded *e, const peri__managed *m, peri_tensor *const *ids, bool training,
                       peri_tensor **rows)
{
    peri_status status = peri_collision_remap(m->map, ids, m->n_features, training, rows);
    if (status >= 0) return status;
    char text[600];
    snprintf(text, sizeof text, "%s", peri_error_message());
    return peri__fail(status, "%s; rank %d", text, e->rank);
}

/** Rows that start again at the lookup of @batch. */
static peri_status queue_row_resets(peri__managed *m, int64_t batch)
{
    PERI__HELD peri_tensor *rows = NULL;
    PERI_TRY(peri_collision_evicted(m->map, &rows));
    if (!rows) return PERI_OK;
    PERI_TRY(peri__grow((void **)&m->waiting, &m->room, m->n_waiting + 1, sizeof *m->waiting));
    m->waiting[m->n_waiting++] = (waiting){.rows = peri__hand_over(&rows), .batch = batch};
    return PERI_OK;
}

/** Numbers of an i64 or i32 tensor on the host, as i64; to be freed, also when this fails. */
static peri_status numbers_of(peri_tensor *t, int64_t **out)
{
    PERI__HELD peri_tensor *wide = NULL;
    int64_t n = peri__numel(t);
    *out = peri__alloc(sizeof **out * (size_t)peri__max(1, n));
    if (!*out) return PERI_ENOMEM;
    PERI_TRY(peri_tensor_to(t, PERI_I64, NULL, &wide));
    return peri_tensor_read(wide, *out, n * (int64_t)sizeof **out);
}

/** rows + @by, of the device, but for those that are none; @out new. Waits. */
static peri_status shift_rows(const peri_sharded *e, peri_tensor *rows, int64_t by, peri_tensor **out)
{
    const int64_t n = peri__numel(rows);
    PERI__SCRATCH int64_t *host = NULL;
    PERI_TRY(numbers_of(rows, &host));
    for (int64_t i = 0; i < n; i++) host[i] += host[i] < 0 ? 0 : by;
    return peri__upload_i64(e->device, host, n, out);
}

/** Rows in the place of raw ids, in what was received and, if somebody asks for them, in what goes home. */
static peri_status replace_raw_ids(peri__input_dist *d)
{
    peri_sharded *e = d->ebc;
    peri__routing *r = &d->routing;
    peri__arrival *a = d->arrival;
    peri_tensor *raw = r->received[PERI__IDS];
    PERI__HELD peri_tensor *fresh = NULL;
    int64_t n = peri__numel(raw);
    PERI_TRY(peri_tensor_new(e->device, PERI_I64, 1, &n, &fresh));
    PERI_TRY(peri_tensor_copy(fresh, raw));
    if (e->returns_rows && !a->sent) PERI_TRY(peri_tensor_new(e->device, PERI_I64, 1, &n, &a->sent));
    for (int32_t i = 0; i < e->n_managed; i++) {
        const peri__managed *m = &e->managed[i];
        for (int32_t f = 0; f < m->n_features && m->map; f++) {
            PERI__HELD peri_tensor *whole = NULL;
            PERI_TRY(move_strand(e, r, m->strand[f], fresh, a->lists[m->first + f], true));
            if (!a->sent) continue;
            PERI_TRY(shift_rows(e, a->lists[m->first + f], m->first_row, &whole));
            PERI_TRY(move_strand(e, r, m->strand[f], a->sent, whole, true));
        }
    }
    peri_tensor_release(raw);
    r->received[PERI__IDS] = peri__hand_over(&fresh);
    return PERI_OK;
}

peri_status peri__managed_map_ids(peri__input_dist *d)
{
    peri_sharded *e = d->ebc;
    if (e->n_managed == 0 || (d->arrival && d->arrival->batch)) return PERI_OK;
    if (!d->arrival) PERI_TRY(managed_batch_new(e, &d->arrival));
    peri__arrival *a = d->arrival;
    peri_tensor **rows = a->lists, **ids = rows + a->n;
    e->in_flight += d->training && !d->in_flight;
    d->in_flight = d->training;
    for (; a->done < e->n_managed; a->done++) {
        peri__managed *m = &e->managed[a->done];
        if (!m->map) continue;
        PERI_TRY(collect_raw_ids(e, &d->routing, m, ids + m->first));
        peri_status status = ask_map(e, m, ids + m->first, d->training, rows + m->first);
        if (status != PERI_OK) return status;
        PERI_TRY(queue_row_resets(m, e->arrived + 1));
    }
    PERI_TRY(replace_raw_ids(d));
    drop_lists(a);
    a->batch = ++e->arrived;
    return PERI_OK;
}

/** Rows that start again at the lookup of batch @batch or before. */
static peri_status reset_until(peri_sharded *e, int64_t batch)
{
    for (int32_t i = 0; i < e->n_managed; i++) {
        peri__managed *m = &e->managed[i];
        int64_t left = 0, k = 0;
        peri_status status = PERI_OK;
        for (; k < m->n_waiting && status >= 0; k++) {
            waiting w = m->waiting[k];
            if (w.batch > batch) m->waiting[left++] = w;
            else if ((status = peri_tbe_rows_reset(e->sets[m->here.set].tbe, m->here.table, w.rows)) < 0) break;
            else peri_tensor_release(w.rows);
        }
        for (; k < m->n_waiting; k++) m->waiting[left++] = m->waiting[k]; /* after an error */
        m->n_waiting = left;
        PERI_TRY(status);
    }
    return PERI_OK;
}

peri_status peri__managed_reset(peri__input_dist *d) { return reset_until(d->ebc, d->arrival->batch); }

peri_status peri_sharded_settle(peri_sharded *e)
{
    PERI_NEED(e);
    for (int32_t g = 0; g < e->n_sets; g++) PERI_TRY(peri_tbe_settled(e->sets[g].tbe));
    if (e->in_flight == 0) return reset_until(e, INT64_MAX); /* what is left is of batches that were given up */
    return peri__fail(PERI_EINVAL,
                      "peri_sharded_settle: maps of raw ids have learned from %lld batch%s ahead of training "
                      "(prefetched, or looked up ahead, or of a forward pass that did not use what the module "
                      "returned), so that maps and rows are of different moments; take the state when nothing is in "
                      "flight: before the first step, after the last one, or after pipeline:stop() and the steps until "
                      "progress returns nil",
                      (long long)e->in_flight, e->in_flight == 1 ? "" : "es");
}

int64_t peri_sharded_ahead(const peri_sharded *e) { return e ? e->in_flight : 0; }

/** Tell the files of @m's rows which map they are of. */
static peri_status mark_ids(const peri_sharded *e, const peri__managed *m)
{
    peri_table_file file;
    peri_ids_mark mark;
    if (!m->map) return PERI_OK;
    peri_tbe *tbe = e->sets[m->here.set].tbe;
    PERI_TRY(peri_tbe_table_file(tbe, m->here.table, &file));
    if (!file.path) return PERI_OK;
    PERI_TRY(peri_collision_mark(m->map, &mark.sum, &mark.iteration));
    return peri_tbe_ids_mark_set(tbe, m->here.table, &mark);
}

peri_status peri__managed_flush(peri_sharded *e)
{
    if (e->n_managed == 0) return PERI_OK;
    PERI_TRY(peri_sharded_settle(e));
    for (int32_t i = 0; i < e->n_managed; i++) PERI_TRY(mark_ids(e, &e->managed[i]));
    return PERI_OK;
}

/* -- rows back to the ranks that asked ----------------------------------------------------------------------------- */

peri_status peri__managed_post(peri__input_dist *d)
{
    if (!d->ebc->returns_rows || d->ebc->world_size == 1) return PERI_OK;
    return peri__routing_return(&d->routing, d->arrival->sent, &d->arrival->back);
}

peri_status peri__managed_batch_test(peri__arrival *a) { return a ? peri__transfer_test(&a->back) : PERI_OK; }

peri_status peri__managed_rows(const peri__input_dist *d, peri_tensor **out)
{
    const peri_sharded *e = d->ebc;
    const peri__routing *r = &d->routing;
    const peri__outbound *h = r->outbound;
    PERI__SCRATCH int64_t *ids = NULL, *places = NULL, *rows = NULL, *offsets = NULL;
    PERI_TRY(numbers_of(r->values, &ids));
    PERI_TRY(numbers_of(r->places, &places));
    PERI_TRY(numbers_of(r->offsets_in, &offsets));
    PERI_TRY(numbers_of(e->world_size > 1 ? d->arrival->back.numbers : d->arrival->sent, &rows));
    for (int32_t i = 0; i < e->routes->n_partitions; i++) {
        const peri__partition *p = &e->routes->partitions[i];
        if (!p->raw) continue;
        int64_t first = offsets[h->feature_first[p->feature]],
                past = offsets[h->feature_first[p->feature] + h->feature_bags[p->feature]];
        for (int64_t k = first; k < past; k++) {
            int64_t place = places[r->place_first[i] + k - first];
            ids[k] = place < 0 ? -1 : rows[place];
        }
    }
    return peri__upload_i64(e->device, ids, peri__numel(r->values), out);
}

peri_status peri__managed_time_set(peri_sharded *e, int32_t i, int64_t now)
{
    if (e->managed[i].map) PERI_TRY(peri_collision_time_set(e->managed[i].map, now));
    e->managed[i].time.now = now;
    return PERI_OK;
}

peri_status peri_sharded_training_set(peri_sharded *e, bool training)
{
    PERI_NEED(e);
    e->training = training;
    return PERI_OK;
}
