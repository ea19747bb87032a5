/* SPDX-License-Identifier: Apache-2.0
 *
 * routes.c: see routes.h.
 */
#include "../base/buffer.h"
#include "routes.h"

/** Append @element [@size] to a growing array of *@n. */
static peri_status append(void **array, int32_t *n, const void *element, size_t size)
{
    PERI_TRY(peri__grow_one(array, *n, size));
    memcpy((char *)*array + size * (size_t)(*n)++, element, size);
    return PERI_OK;
}

/** Append an element, whose fields or value follow. */
#define APPEND(array, n, ...)                                                                                          \
    append((void **)&(array), &(n), &(__typeof__(*(array))){__VA_ARGS__}, sizeof *(array))

/** Whether ids are routed to a shard: if it has rows, or its rank takes part in a sum. */
static bool gets_ids(const peri__route_table *t, const peri_shard *s)
{
    return s->rows > 0 || t->lane == PERI__NODE_LANE;
}

/** The bucket that begins at row @row; at the end: their number. */
static int64_t bucket_at(const peri__route_table *t, int64_t row)
{
    int64_t b = 0;
    while (b < t->buckets && t->segments[b] < row) b++;
    return b;
}

/** How the rows of a table, or its buckets, are cut: part i has [bounds[i], bounds[i + 1]) and lies on ranks[i]. */
typedef struct row_cut {
    int32_t n;
    int64_t *bounds; /* n + 1 */
    int32_t *ranks;
} row_cut;

/** The parts of a table for one column offset, in order of rows. @x has room for them. */
static void find_row_parts(const peri__route_table *t, int64_t col_offset, row_cut *x)
{
    x->n = 0;
    x->bounds[0] = 0;
    for (int32_t s = 0; s < t->n_shards; s++) {
        const peri_shard *shard = &t->shards[s];
        if (shard->col_offset != col_offset || !gets_ids(t, shard)) continue;
        x->ranks[x->n] = shard->rank;
        x->bounds[x->n + 1] = t->raw ? bucket_at(t, shard->row_offset + shard->rows) : x->bounds[x->n] + shard->rows;
        x->n++;
    }
}

/** Which of those parts shard @s is. */
static int32_t row_part_of_shard(const peri__route_table *t, int32_t s)
{
    int32_t n = 0;
    for (int32_t i = 0; i < s; i++)
        n += t->shards[i].col_offset == t->shards[s].col_offset && gets_ids(t, &t->shards[i]);
    return n;
}

/** Whether the ids of @p go where those of @wanted are to go, which is cut like @cut. Raw ids are rows of one table
 *  only: nobody shares them. */
static bool same_partition(const peri__routes *r, const peri__partition *p, const peri__partition *wanted,
                           const row_cut *cut)
{
    if (p->feature != wanted->feature || p->raw != wanted->raw) return false;
    if (p->raw) return p->table == wanted->table;
    if (p->n_parts != cut->n || p->rows != wanted->rows) return false;
    if (p->by_id != wanted->by_id || p->copied != wanted->copied) return false;
    for (int32_t i = 0; i < cut->n; i++)
        if (r->strands[p->first_strand + i].rank != cut->ranks[i]) return false;
    return !memcmp(r->bounds + p->first_bound, cut->bounds, sizeof *cut->bounds * (size_t)(cut->n + 1));
}

/** A partition of @feature as table @table, which is @t, asks for it; its parts are not said yet. */
static peri__partition partition_for(const peri__route_table *t, int32_t table, int32_t feature)
{
    return (peri__partition){.feature = feature, .table = table, .bounds_check = t->bounds_check,
                             .rows = t->raw ? t->buckets : t->rows, .raw = t->raw, .bucket_ids = t->bucket_ids,
                             .by_id = t->by_id, .copied = t->copied};
}

/** Find or make the partition @wanted, cut like @cut; its index, or an error. Column blocks of one table on one rank,
 *  and tables that are cut alike, share it: ids travel once. */
static int32_t find_or_add_partition(peri__routes *r, peri__partition wanted, const row_cut *cut)
{
    for (int32_t i = 0; i < r->n_partitions; i++) {
        peri__partition *p = &r->partitions[i];
        if (!same_partition(r, p, &wanted, cut)) continue;
        if (wanted.bounds_check < p->bounds_check) { /* modes are numbered from the strictest on */
            p->bounds_check = wanted.bounds_check;
            p->table = wanted.table;
        }
        return i;
    }
    bool even = cut->n > 1;
    for (int32_t i = 0; i < cut->n - 1; i++)
        even = even && cut->bounds[i + 1] - cut->bounds[i] == cut->bounds[1];
    wanted.block = even ? cut->bounds[1] : 0;
    wanted.n_parts = cut->n;
    wanted.first_strand = r->n_strands;
    wanted.first_bound = r->n_bounds;
    PERI_TRY(append((void **)&r->partitions, &r->n_partitions, &wanted, sizeof wanted));
    for (int32_t i = 0; i <= cut->n; i++) PERI_TRY(APPEND(r->bounds, r->n_bounds, cut->bounds[i]));
    for (int32_t i = 0; i < cut->n; i++)
        PERI_TRY(APPEND(r->strands, r->n_strands, .partition = r->n_partitions - 1, .part = i,
                        .rank = cut->ranks[i], .index = -1));
    return r->n_partitions - 1;
}

/** The partition of ids that are checked, but go nowhere: those of replicas. */
static int32_t find_or_add_unrouted(peri__routes *r, const peri__route_table *t, int32_t table, int32_t feature)
{
    return find_or_add_partition(r, partition_for(t, table, feature), &(row_cut){.bounds = (int64_t[]){0}});
}

/** A lookup of all rows and columns of @feature on every rank. Their ids are checked once. */
static peri_status add_copies(peri__routes *r, const peri__route_table *table, int32_t t, int32_t feature,
                              int32_t *n_lookups)
{
    peri__partition wanted = partition_for(table, t, feature);
    for (int32_t rank = 0; rank < r->world_size; rank++, wanted.bounds_check = PERI_BOUNDS_NONE) {
        const int32_t p = find_or_add_partition(
            r, wanted, &(row_cut){.n = 1, .bounds = (int64_t[]){0, table->rows}, .ranks = &rank});
        if (p < 0) return p;
        PERI_TRY(APPEND(r->lookups, *n_lookups, .table = t, .shard = -1, .feature = feature,
                        .strand = r->partitions[p].first_strand, .lane = table->lane, .cols = table->cols));
    }
    return PERI_OK;
}

/** Make the partitions and lookups of all tables. @x: room for the parts of each. */
static peri_status make_lookups(peri__routes *r, const peri__route_table *tables, row_cut *x, int32_t *n_lookups)
{
    for (int32_t t = 0; t < r->n_tables; t++) {
        const peri__route_table *table = &tables[t];
        for (int32_t s = 0; s < table->n_shards; s++) {
            const peri_shard *shard = &table->shards[s];
            if (!gets_ids(table, shard)) continue;
            const int32_t part = row_part_of_shard(table, s);
            find_row_parts(table, shard->col_offset, x);
            for (int32_t f = 0; f < table->n_features; f++) {
                const int32_t p = find_or_add_partition(r, partition_for(table, t, table->features[f]), x);
                if (p < 0) return p;
                PERI_TRY(APPEND(r->lookups, *n_lookups, .table = t, .shard = s, .feature = table->features[f],
                                .strand = r->partitions[p].first_strand + part, .lane = table->lane,
                                .cols = shard->cols));
            }
        }
        for (int32_t f = 0; f < table->n_features && table->copied; f++)
            PERI_TRY(add_copies(r, table, t, table->features[f], n_lookups));
        for (int32_t f = 0; f < table->n_features && table->data_parallel && !table->copied; f++)
            PERI_TRY(find_or_add_unrouted(r, table, t, table->features[f]));
    }
    return PERI_OK;
}

/** By rank and lane. */
static int32_t lookup_sort_key(const peri__routes *r, const peri__lookup *lookup)
{
    return r->strands[lookup->strand].rank * PERI__LANES + lookup->lane;
}

/** @out: lookups by rank and lane, otherwise in their order. Fills in rank_lookup. */
static peri_status sort_lookups(peri__routes *r, int32_t n_lookups, peri__lookup *out)
{
    const int32_t keys = r->world_size * PERI__LANES;
    /* by rank and lane: where its next one goes */
    PERI__SCRATCH int32_t *next = peri__alloc_zero(sizeof *next * (size_t)(keys + 1));
    if (!next) return PERI_ENOMEM;
    for (int32_t i = 0; i < n_lookups; i++) next[lookup_sort_key(r, &r->lookups[i]) + 1]++;
    for (int32_t k = 0; k < keys; k++) next[k + 1] += next[k];
    for (int32_t rank = 0; rank <= r->world_size; rank++) r->rank_lookup[rank] = next[rank * PERI__LANES];
    for (int32_t i = 0; i < n_lookups; i++) out[next[lookup_sort_key(r, &r->lookups[i])]++] = r->lookups[i];
    return PERI_OK;
}

/** Number each rank's strands by first use, in the order of its lookups, and lay the wire out. */
static void number_strands(peri__routes *r)
{
    int32_t wire = 0;
    for (int32_t rank = 0; rank < r->world_size; rank++) {
        for (int32_t i = r->rank_lookup[rank]; i < r->rank_lookup[rank + 1]; i++) {
            const peri__lookup *lookup = &r->lookups[i];
            peri__strand *strand = &r->strands[lookup->strand];
            if (strand->index >= 0) continue;
            strand->index = wire - r->rank_wire[rank];
            r->wire_feature[wire] = lookup->feature;
            r->wire[wire++] = lookup->strand;
        }
        r->rank_wire[rank + 1] = wire;
    }
    PERI_ASSERT(wire == r->n_strands);
}

/** Sort lookups by rank and lane, and lay the wire out. */
static peri_status order_by_rank(peri__routes *r, int32_t n_lookups)
{
    const size_t strands = (size_t)peri__max(r->n_strands, 1);
    PERI__SCRATCH peri__lookup *sorted = peri__alloc_zero(sizeof *sorted * (size_t)peri__max(n_lookups, 1));
    r->wire = peri__alloc_zero(sizeof *r->wire * strands);
    r->wire_feature = peri__alloc_zero(sizeof *r->wire_feature * strands);
    r->rank_lookup = peri__alloc_zero(sizeof *r->rank_lookup * (size_t)(r->world_size + 1));
    r->rank_wire = peri__alloc_zero(sizeof *r->rank_wire * (size_t)(r->world_size + 1));
    if (!sorted || !r->wire || !r->wire_feature || !r->rank_lookup || !r->rank_wire) return PERI_ENOMEM;
    PERI_TRY(sort_lookups(r, n_lookups, sorted));
    if (n_lookups) memcpy(r->lookups, sorted, sizeof *sorted * (size_t)n_lookups);
    number_strands(r);
    return PERI_OK;
}

/** The lookup of (table, shard, feature) on a rank; it exists for every shard that ids are routed to. */
static peri__piece find_piece(const peri__routes *r, int32_t table, int32_t shard, int32_t feature, int32_t rank)
{
    for (int32_t i = r->rank_lookup[rank]; i < r->rank_lookup[rank + 1]; i++) {
        const peri__lookup *s = &r->lookups[i];
        if (s->table == table && s->shard == shard && s->feature == feature)
            return (peri__piece){.rank = rank, .lookup = i};
    }
    return (peri__piece){.rank = -1, .lookup = -1};
}

static peri_status add_piece(peri__routes *r, peri__output *out, peri__piece piece)
{
    PERI_TRY(APPEND(r->pieces, r->n_pieces, piece.rank, piece.lookup, (int32_t)(out - r->outputs)));
    out->n_pieces++;
    *(piece.rank >= 0 ? &r->lookups[piece.lookup].piece : &r->replicas[piece.lookup].piece) = r->n_pieces - 1;
    return PERI_OK;
}

/** The output columns of one feature of one table: a replica is one block, and so are copies, with a piece for each
 *  rank; shards are one block for each column offset. */
static peri_status add_outputs(peri__routes *r, const peri__route_table *table, int32_t t, int32_t feature)
{
    for (int32_t s = table->data_parallel ? -1 : 0; s < table->n_shards; s++) {
        const peri_shard whole = {.rows = table->rows, .cols = table->cols},
                         *first = s < 0 ? &whole : &table->shards[s];
        if (first->row_offset != 0 || first->rows == 0) continue; /* a column block is listed by its first rows */
        PERI_TRY(APPEND(r->outputs, r->n_outputs, .table = t, .feature = feature,
                        .column = r->out_cols + first->col_offset, .cols = first->cols,
                        .col_offset = first->col_offset, .first_piece = r->n_pieces));
        peri__output *out = &r->outputs[r->n_outputs - 1];
        for (int32_t rank = 0; rank < r->world_size && table->copied; rank++)
            PERI_TRY(add_piece(r, out, find_piece(r, t, -1, feature, rank)));
        if (s < 0 && !table->copied) {
            const int32_t p = find_or_add_unrouted(r, table, t, feature);
            if (p < 0) return p;
            PERI_TRY(APPEND(r->replicas, r->n_replicas, .table = t, .feature = feature, .partition = p,
                            .cols = table->cols));
            PERI_TRY(add_piece(r, out, (peri__piece){.rank = -1, .lookup = r->n_replicas - 1}));
        }
        for (int32_t k = 0; k < table->n_shards && s >= 0; k++) {
            const peri_shard *shard = &table->shards[k];
            bool sum = table->lane == PERI__NODE_LANE, head = r->nodes->member[shard->rank] == 0;
            if (shard->col_offset == first->col_offset && (sum ? head : shard->rows > 0))
                PERI_TRY(add_piece(r, out, find_piece(r, t, k, feature, shard->rank)));
        }
    }
    return PERI_OK;
}

/** Lay out the output: feature after feature of each table, in the module's order. */
static peri_status make_outputs(peri__routes *r, const peri__route_table *tables)
{
    for (int32_t i = 0; i < r->rank_lookup[r->world_size]; i++) r->lookups[i].piece = -1;
    for (int32_t t = 0; t < r->n_tables; t++)
        for (int32_t f = 0; f < tables[t].n_features; f++) {
            PERI_TRY(add_outputs(r, &tables[t], t, tables[t].features[f]));
            r->out_cols += tables[t].cols;
        }
    return PERI_OK;
}

peri_status peri__routes_new(const peri__nodes *nodes, const peri__route_table *tables, int32_t n_tables,
                             int32_t n_features, peri__routes **out)
{
    int32_t most = 1, n_lookups = 0;
    for (int32_t t = 0; t < n_tables; t++) most = (int32_t)peri__max(most, tables[t].n_shards);
    peri__routes *r = peri__alloc_zero(sizeof *r);
    PERI__SCRATCH int64_t *bounds = peri__alloc(sizeof *bounds * (size_t)(most + 1));
    PERI__SCRATCH int32_t *ranks = peri__alloc(sizeof *ranks * (size_t)most);
    row_cut room = {.bounds = bounds, .ranks = ranks};
    peri_status status = r && bounds && ranks ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    r->nodes = nodes;
    r->world_size = nodes->first[nodes->n];
    r->n_tables = n_tables;
    r->n_features = n_features;
    PERI_TRY_GOTO(make_lookups(r, tables, &room, &n_lookups), out);
    PERI_TRY_GOTO(order_by_rank(r, n_lookups), out);
    PERI_TRY_GOTO(make_outputs(r, tables), out);
    *out = r;
out:
    if (status < 0) peri__routes_free(r);
    return status;
}

void peri__routes_free(peri__routes *r)
{
    if (!r) return;
    void *parts[] = {r->partitions, r->strands,   r->bounds,  r->wire,   r->wire_feature, r->rank_wire, r->lookups,
                     r->rank_lookup, r->outputs, r->pieces, r->replicas};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) peri__free(parts[i]);
    peri__free(r);
}
