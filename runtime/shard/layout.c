/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c: see layout.h.
 */
#include "module.h"
#include "../../kernels/route.h"
#include "../../kernels/tbe.h"

/* -- the home side ------------------------------------------------------------------------------------------------- */

/** Whether the rows of a lookup of rank @owner stay there: @rank is that one, and no other adds to them. */
static bool rows_stay(const peri__lookup *s, int32_t owner, int32_t rank)
{
    return owner == rank && s->lane != PERI__NODE_LANE;
}

/** The rank whose lookups say what rank @from sends @rank in a lane; -1: it sends nothing. Rows that were added up
 *  within a node come from its gateway, and the lookups of its first rank stand for those of all. */
static int32_t owner_of(const peri__nodes *nodes, int32_t lane, int32_t from, int32_t rank)
{
    const int32_t node = nodes->of[from];
    if (lane != PERI__NODE_LANE) return from;
    return peri__gateway_rank(nodes, node, rank) == from ? nodes->ranks[nodes->first[node]] : -1;
}

static const peri__partition *lookup_partition(const peri__routes *r, const peri__lookup *s)
{
    return &r->partitions[r->strands[s->strand].partition];
}

/** Rows of a lookup of rank @owner that belong to this home. */
static int64_t rows_of(const peri__home *h, const peri__lookup *s, int32_t owner)
{
    if (!h->rule.by_id && !h->rule.to_homes) return h->feature_rows[s->feature];
    const peri__partition *p = lookup_partition(h->e->routes, s);
    if (peri__rows_absent(h->rule, p, owner, h->e->rank)) return 0;
    return peri__rows_by_id(h->rule, p) ? h->strand_ids[s->strand] : h->feature_rows[s->feature];
}

/** The lookups of rank @owner in a lane have their rows one behind the other. @k: no lookup of this lane is before it;
 *  returns the first one behind them. */
static int32_t place_rank(peri__home *h, int32_t lane, int32_t owner, int32_t k)
{
    const peri__routes *r = h->e->routes;
    const int32_t end = r->rank_lookup[owner + 1];
    while (k < end && r->lookups[k].lane < lane) k++;
    for (; k < end && r->lookups[k].lane == lane; k++) {
        const peri__lookup *s = &r->lookups[k];
        const bool own = rows_stay(s, owner, h->e->rank);
        int64_t *here = own ? &h->own_out : &h->received_out;
        h->at[k] = *here;
        h->lookup_rows[k] = rows_of(h, s, owner);
        *here += s->cols * h->lookup_rows[k];
        if (!own && s->piece < 0) h->covered &= ~(1u << lane);
        else if (!own) h->travelling[h->n_travelling++] = s->piece;
    }
    return k;
}

/** Where the rows of each lookup lie on this rank: those of its own in the own buffer, others among what comes back.
 *  Fills in what the home says of sizes. */
static peri_status place_lookups(peri__home *h)
{
    const peri__routes *r = h->e->routes;
    const int32_t world = r->world_size;
    h->at = peri__alloc(2 * sizeof *h->at * (size_t)peri__max(1, r->rank_lookup[world]));
    h->travelling = peri__alloc(sizeof *h->travelling * (size_t)peri__max(1, r->n_pieces));
    h->covered = UINT32_MAX;
    /* by rank: its first lookup that has no place yet */
    PERI__SCRATCH int32_t *next = peri__alloc(sizeof *next * (size_t)world);
    if (!h->at || !h->travelling || !next) return PERI_ENOMEM;
    h->lookup_rows = h->at + r->rank_lookup[world];
    memcpy(next, r->rank_lookup, sizeof *next * (size_t)world);
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        const int64_t begin = h->received_out;
        for (int32_t from = 0; from < world; from++) {
            const int64_t before = h->received_out;
            const int32_t owner = owner_of(r->nodes, lane, from, h->e->rank);
            if (owner >= 0) next[owner] = place_rank(h, lane, owner, next[owner]);
            h->rank_out[lane * world + from] = h->received_out - before;
        }
        h->lane_out[lane] = h->received_out - begin;
    }
    return PERI_OK;
}

static int64_t replica_rows(const peri__home *h, const peri__replica *x)
{
    return (h->rule.by_id ? h->feature_ids : h->feature_rows)[x->feature];
}

/** Replicas' rows lie behind those of the own lookups. */
static void place_replicas(peri__home *h)
{
    const peri__routes *r = h->e->routes;
    for (int32_t i = 0; i < r->n_replicas; i++) {
        h->replica_offset[i] = h->own_out + h->replica_out;
        h->replica_out += r->replicas[i].cols * replica_rows(h, &r->replicas[i]);
    }
}

static inline const peri__partition *piece_partition(const peri__routes *r, int32_t p)
{
    const peri__piece *from = &r->pieces[p];
    return from->rank < 0 ? &r->partitions[r->replicas[from->lookup].partition]
                          : lookup_partition(r, &r->lookups[from->lookup]);
}

const peri__partition *peri__piece_partition(const peri__routes *r, int32_t p) { return piece_partition(r, p); }

/** What of a line says where its rows are in a buffer. */
static inline __attribute__((always_inline)) peri__line line_place(const peri__home *h, int32_t p)
{
    const peri_sharded *e = h->e;
    const peri__routes *r = e->routes;
    const peri__piece *from = &r->pieces[p];
    if (from->rank < 0) {
        const peri__replica *replica = &r->replicas[from->lookup];
        return (peri__line){.space = PERI__REPLICA_ROWS,
                            .n = replica_rows(h, replica),
                            .at = h->replica_offset[from->lookup],
                            .divisor = e->tables[replica->table].divisor};
    }
    const peri__lookup *s = &r->lookups[from->lookup];
    const bool own = rows_stay(s, from->rank, e->rank), by_id = peri__rows_by_id(h->rule, lookup_partition(r, s));
    return (peri__line){.space = own ? PERI__OWN_ROWS : s->lane,
                        .n = h->lookup_rows[from->lookup],
                        .at = h->at[from->lookup],
                        .first = by_id ? h->strand_first[s->strand] : 0,
                        .divisor = own ? e->tables[s->table].divisor : e->tables[s->table].sent_divisor};
}

/** Line @p. Inlined, so that write_pieces, which asks for every line of each new batch, computes only what it uses. */
static inline __attribute__((always_inline)) peri__line home_line(const peri__home *h, int32_t p)
{
    const peri__routes *r = h->e->routes;
    const int32_t output = r->pieces[p].output;
    const peri__output *o = &r->outputs[output];
    const peri__partition *partition = piece_partition(r, p);
    const bool copied = h->rule.to_homes && partition->copied; /* of copies, that of this rank */
    peri__line x = line_place(h, p);
    x.feature = o->feature;
    x.cols = o->cols;
    x.column = o->column;
    if (copied && p != o->first_piece + h->e->rank) x.space = -1;
    if (h->ends) {
        const peri__end *end = &h->ends[output];
        x.column = o->col_offset;
        x.row = end->row;
        x.to = end->to;
        x.result = end->result;
        /* rows of replicas go through the buffer, or are the result */
        x.alone = end->alone && r->pieces[p].rank >= 0;
        x.cut = end->cut;
    } else {
        x.pooled = peri__rows_by_id(h->rule, partition);
        x.alone = !x.pooled && (copied || o->n_pieces == 1);
    }
    return x;
}

peri__line peri__home_line(const peri__home *h, int32_t p) { return home_line(h, p); }

/** Write the pieces of the routes for kernels. */
static void write_pieces(peri__home *h)
{
    peri_k_piece *pieces = (peri_k_piece *)(h->up.host + h->pieces);
    for (int32_t p = 0; p < h->e->routes->n_pieces; p++) {
        const peri__line x = home_line(h, p);
        if (x.space < 0) continue;
        *(x.alone ? &h->alone : &h->shared) |= 1u << x.space;
        pieces[p] = (peri_k_piece){
            .offset = x.at - x.first * x.cols, .own = x.space >= PERI__OWN_ROWS, .first = x.first, .n = x.n};
    }
}

peri_k_rows peri__home_rows(const peri__home *h, const peri__output *o, int32_t copy)
{
    const peri__routes *r = h->e->routes;
    const int32_t first = o->first_piece + (copy < 0 ? 0 : copy);
    const int32_t partition = (int32_t)(peri__piece_partition(r, first) - r->partitions);
    return (peri_k_rows){.ids = h->feature_ids[o->feature], .cols = o->cols, .first_id = h->first_ids[o->feature],
                         .place_first = h->partition_first[partition], .first_piece = first, .partition = partition};
}

bool peri__home_has_all_ids(const peri__home *h, const peri__output *o)
{
    const peri__routes *r = h->e->routes;
    const peri__piece *piece = &r->pieces[o->first_piece];
    if (o->n_pieces != 1 || piece->rank < 0) return o->n_pieces == 1;
    return h->strand_ids[r->lookups[piece->lookup].strand] == h->feature_ids[o->feature];
}

/** Where ids begin: those of each strand on the wire, those of each partition among the places. */
static void place_ids(peri__home *h)
{
    const peri__routes *r = h->e->routes;
    int64_t at = 0;
    for (int32_t w = 0; w < r->n_strands; w++) {
        h->strand_first[r->wire[w]] = at;
        at += h->strand_ids[r->wire[w]];
    }
    at = 0;
    for (int32_t i = 0; i < r->n_partitions; i++) {
        h->partition_first[i] = r->partitions[i].n_parts ? at : -1;
        if (r->partitions[i].n_parts) at += h->feature_ids[r->partitions[i].feature];
    }
}

static peri_status take_numbers(peri__home *h, const peri__home_args *a)
{
    const peri__routes *r = h->e->routes;
    const int64_t n = r->n_features, strands = r->n_strands, numbers = peri__home_numbers(r, a->counted);
    const bool by_id = h->e->kind->by_id;
    h->feature_inverse =
        peri__alloc(sizeof(int64_t) * (size_t)(numbers + (a->counted ? strands + r->n_partitions : 0)));
    if (!h->feature_inverse) return PERI_ENOMEM;
    memcpy(h->feature_inverse, a->numbers, sizeof *a->numbers * (size_t)numbers);
    h->feature_ids = h->feature_inverse + n;
    h->first_ids = h->feature_ids + n;
    h->feature_rows = by_id ? h->feature_ids : h->outbound->feature_bags;
    h->feature_first = by_id ? h->first_ids : h->outbound->feature_first;
    if (!a->counted) return PERI_OK;
    h->strand_ids = h->first_ids + n;
    h->strand_first = h->strand_ids + strands;
    h->partition_first = h->strand_first + strands;
    place_ids(h);
    return PERI_OK;
}

bool peri__home_fits(const peri__home *h, const peri__home_args *a)
{
    return h->outbound == a->outbound && h->rows == a->rows && h->variable == a->variable &&
           h->counted == a->counted && h->rule.by_id == a->rule.by_id && h->rule.to_homes == a->rule.to_homes &&
           !memcmp(h->feature_inverse, a->numbers,
                   sizeof *a->numbers * (size_t)peri__home_numbers(h->e->routes, a->counted));
}

peri_status peri__home_new(const peri_sharded *e, const peri__home_args *a, peri__home **out)
{
    const peri__routes *r = e->routes;
    peri__home *h = peri__alloc_zero(sizeof *h);
    if (!h) return PERI_ENOMEM;
    peri__refs_init(&h->refs);
    peri__refs_add(&a->outbound->refs);
    h->outbound = a->outbound;
    h->e = e;
    h->rule = a->rule;
    h->rows = a->rows;
    h->variable = a->variable;
    h->counted = a->counted;
    h->rank_out = peri__alloc(sizeof *h->rank_out * PERI__LANES * (size_t)r->world_size);
    h->replica_offset = peri__alloc(sizeof *h->replica_offset * (size_t)peri__max(1, r->n_replicas));
    peri_status status = h->rank_out && h->replica_offset ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) status = take_numbers(h, a);
    if (status >= 0) status = place_lookups(h);
    if (status >= 0) place_replicas(h);
    if (status >= 0) status = e->kind->lay_out(h);
    if (status >= 0) write_pieces(h);
    if (status >= 0) status = peri__upload_send(&h->up);
    if (status < 0) peri__home_release(h);
    else *out = h;
    return status;
}

void peri__left_free(peri__left *left)
{
    if (left) peri__upload_fini(&left->up);
    peri__free(left);
}

void peri__home_release(peri__home *h)
{
    if (!h || !peri__refs_drop(&h->refs)) return;
    for (int i = 0; i < 2; i++) peri__left_free(h->left[i]);
    peri__upload_fini(&h->up);
    peri__outbound_release(h->outbound);
    peri__free(h->feature_inverse);
    peri__free(h->rank_out);
    peri__free(h->replica_offset);
    peri__free(h->at);
    peri__free(h->travelling);
    peri__free(h->ends);
    peri__free(h->whole);
    peri__free(h->output_feature);
    peri__free(h);
}

/* -- the owner side ------------------------------------------------------------------------------------------------ */

/** Rows of a lookup of this rank for rank @source. */
static inline int64_t rows_for_rank(const peri__owner *o, const peri__lookup *s, int32_t source)
{
    const peri__routes *r = o->e->routes;
    const int64_t at = (int64_t)source * peri__strands_of(r, o->e->rank) + r->strands[s->strand].index;
    if (!o->rule.to_homes && !o->ids) return o->counts[at];
    const peri__partition *p = lookup_partition(r, s);
    if (peri__rows_absent(o->rule, p, o->e->rank, source)) return 0;
    return o->ids && peri__rows_by_id(o->rule, p) ? o->ids[at] : o->counts[at];
}

/** Elements for each rank: lane after lane, and in the node lane by gateway. */
static void count_elements(peri__owner *o)
{
    const peri__routes *r = o->e->routes;
    const peri__nodes *nodes = r->nodes;
    const int32_t world = r->world_size, rank = o->e->rank, node = nodes->of[rank];
    for (int32_t source = 0; source < world; source++) {
        const int32_t gateway = peri__gateway_member(nodes, node, source);
        for (int32_t i = r->rank_lookup[rank]; i < r->rank_lookup[rank + 1]; i++) {
            const peri__lookup *s = &r->lookups[i];
            int64_t n = s->cols * rows_for_rank(o, s, source);
            if (rows_stay(s, rank, source)) continue;
            o->lane_out[s->lane] += n;
            if (s->lane != PERI__NODE_LANE || gateway == nodes->member[rank])
                o->source_out[s->lane * world + source] += n;
            if (s->lane != PERI__NODE_LANE) continue;
            o->sum_out[gateway] += n;
            o->sum_at[source] += n;
        }
    }
    int64_t at = 0;
    for (int32_t gateway = 0; gateway < peri__node_size(nodes, node); gateway++) {
        o->sum_in[gateway] = o->sum_out[nodes->member[rank]];
        for (int32_t source = 0; source < world; source++) {
            if (peri__gateway_member(nodes, node, source) != gateway) continue;
            const int64_t n = o->sum_at[source];
            o->sum_at[source] = at;
            at += n;
        }
    }
    for (int32_t lane = 0; lane < PERI__LANES; lane++) o->sent_out += o->lane_out[lane];
}

/** Where one rank's bags are, and their rows go. */
typedef struct source_place {
    int32_t source;
    int64_t *first, *first_id;      /* by strand, its first bag, and (o->ids) its first id */
    int64_t bags, ids;              /* before those of this rank */
    int64_t at[PERI__LANES + 1];    /* where the next rows go, by lane, and those that stay */
} source_place;

/** Go on to the bags of @x's rank. */
static void enter_source(const peri__owner *o, int64_t strands, source_place *x)
{
    const int64_t *counts = o->counts + x->source * strands, *ids = o->ids ? o->ids + x->source * strands : NULL;
    for (int64_t k = 0; k < strands; k++) {
        x->first[k] = x->bags;
        x->bags += counts[k];
        x->first_id[k] = x->ids;
        x->ids += ids ? ids[k] : 0;
    }
}

/** The blocks of one rank's bags. */
static void add_blocks(const peri__owner *o, source_place *x, peri__next_block *next)
{
    const peri__routes *r = o->e->routes;
    const int32_t rank = o->e->rank;
    const peri__lookup *lookups = r->lookups + r->rank_lookup[rank];
    const int32_t n = r->rank_lookup[rank + 1] - r->rank_lookup[rank];
    for (int32_t i = 0; i < n; i++) {
        const peri__lookup *s = &lookups[i];
        const peri__set_table to = peri__set_table_of(o->e, s->table, s->shard);
        const bool own = rows_stay(s, rank, x->source);
        int64_t *here = own ? &x->at[PERI__LANES] : &x->at[s->lane], rows = rows_for_rank(o, s, x->source);
        const int64_t *begin = o->ids && peri__rows_by_id(o->rule, lookup_partition(r, s)) ? x->first_id : x->first;
        const int64_t offset = *here;
        *here += s->cols * rows;
        if (to.set < 0) continue; /* no rows: zeros in the sum */
        *next[to.set].line++ = own ? s->piece : -1;
        *next[to.set].block++ = (peri_k_tbe_block){.first_bag = begin[r->strands[s->strand].index],
                                                   .bags = rows,
                                                   .out_offset = offset,
                                                   .out_stride = s->cols,
                                                   .table = to.table,
                                                   .feature = s->feature};
    }
}

peri_status peri__owner_layout_new(const peri_sharded *e, peri__rule rule, const int64_t *counts, const int64_t *ids,
                            peri__owner **out)
{
    const peri__routes *r = e->routes;
    const int64_t world = r->world_size, n = world * peri__strands_of(r, e->rank),
                  mates = peri__node_size(r->nodes, r->nodes->of[e->rank]);
    peri__owner *o = peri__alloc_zero(sizeof *o);
    if (!o) return PERI_ENOMEM;
    o->e = e;
    o->rule = rule;
    o->counts = peri__alloc(sizeof *counts * (ids ? 2 : 1) * (size_t)n);
    o->source_out = peri__alloc_zero(sizeof *o->source_out * (size_t)((PERI__LANES + 1) * world + 2 * mates));
    if (!o->counts || !o->source_out) {
        peri__owner_layout_free(o);
        return PERI_ENOMEM;
    }
    memcpy(o->counts, counts, sizeof *counts * (size_t)n);
    if (ids) o->ids = memcpy(o->counts + n, ids, sizeof *ids * (size_t)n);
    o->sum_out = o->source_out + PERI__LANES * world;
    o->sum_in = o->sum_out + mates;
    o->sum_at = o->sum_in + mates;
    count_elements(o);
    *out = o;
    return PERI_OK;
}

peri_status peri__owner_layout_blocks(const peri__owner *o, const peri__home *home, peri__next_block *next)
{
    const int64_t strands = peri__strands_of(o->e->routes, o->e->rank);
    PERI__SCRATCH int64_t *first = peri__alloc(sizeof *first * (size_t)peri__max(1, 2 * strands));
    if (!first) return PERI_ENOMEM;
    source_place x = {.first = first, .first_id = first + strands, .at = {home->own_out + home->replica_out}};
    for (int32_t lane = 1; lane < PERI__LANES; lane++) x.at[lane] = x.at[lane - 1] + o->lane_out[lane - 1];
    const int64_t sums = x.at[PERI__NODE_LANE];
    for (; x.source < o->e->world_size; x.source++) {
        enter_source(o, strands, &x);
        x.at[PERI__NODE_LANE] = sums + o->sum_at[x.source];
        add_blocks(o, &x, next);
    }
    return PERI_OK;
}

void peri__owner_layout_free(peri__owner *o)
{
    if (!o) return;
    peri__free(o->counts);
    peri__free(o->source_out);
    peri__free(o);
}
