/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c: see layout.h.
 */
#include "layout.h"

/* -- the home side ----------------------------------------------------------------------------------------------------------------- */

/** Whether the rows of a slot of rank @owner stay there: @rank is that one, and no other adds to them. */
static bool stays(const peri__slot *s, int32_t owner, int32_t rank) { return owner == rank && s->lane != PERI__NODE_LANE; }

/** The rank from which @rank gets the rows of a slot of rank @owner. For rows that were added up within a node that is the node's gateway,
 *  and the slot of its first rank stands for those of all (-1). */
static int32_t sender(const peri__routes *r, const peri__slot *s, int32_t owner, int32_t rank)
{
    if (s->lane != PERI__NODE_LANE) return owner;
    return r->nodes.place[owner] == 0 ? peri__gateway(&r->nodes, r->nodes.of[owner], rank) : -1;
}

/** Where the rows of each slot lie on this rank: those of its own slots in the own buffer, others among what comes back. Fills in what the
 *  home says of sizes. @at new. */
static peri_status place_slots(const peri__routes *r, peri__home *h, int32_t rank, int64_t **at)
{
    const int32_t world = r->world_size;
    int64_t *place = peri__alloc(sizeof *place * (size_t)peri__max(1, r->rank_slot[world]));
    int64_t *next = peri__alloc(sizeof *next * PERI__LANES * (size_t)world); /* where the next row of each lane and rank begins */
    if (!place || !next) {
        peri__free(place);
        peri__free(next);
        return PERI_ENOMEM;
    }
    memset(h->rank_out, 0, sizeof *h->rank_out * PERI__LANES * (size_t)world);
    for (int32_t i = 0; i < world; i++)
        for (int32_t k = r->rank_slot[i]; k < r->rank_slot[i + 1]; k++) {
            const peri__slot *s = &r->slots[k];
            int32_t from = sender(r, s, i, rank);
            if (from < 0 || stays(s, i, rank)) continue;
            h->rank_out[s->lane * world + from] += s->cols * h->outbound->feature_bags[s->feature];
        }
    for (int32_t k = 0; k < PERI__LANES * world; k++) {
        next[k] = h->received_out;
        h->received_out += h->rank_out[k];
        h->lane_out[k / world] += h->rank_out[k];
    }
    for (int32_t i = 0; i < world; i++)
        for (int32_t k = r->rank_slot[i]; k < r->rank_slot[i + 1]; k++) {
            const peri__slot *s = &r->slots[k];
            int32_t from = sender(r, s, i, rank);
            if (from < 0) continue;
            int64_t *here = stays(s, i, rank) ? &h->own_out : &next[s->lane * world + from];
            place[k] = *here;
            *here += s->cols * h->outbound->feature_bags[s->feature];
        }
    peri__free(next);
    *at = place;
    return PERI_OK;
}

/** @at: as of place_slots. */
static peri_status add_outputs(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const int64_t *inverse,
                               const double *divisor, const double *sent_divisor)
{
    for (int32_t i = 0; i < r->n_replicas; i++) {
        h->replica_offset[i] = h->own_out + h->replica_out;
        h->replica_out += r->replicas[i].cols * h->outbound->feature_bags[r->replicas[i].feature];
    }
    h->outputs = peri__upload_add(&h->up, NULL, (int64_t)sizeof(peri_k_output) * r->n_outputs);
    h->pieces = peri__upload_add(&h->up, NULL, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    h->output_bags = peri__upload_add(&h->up, NULL, (int64_t)sizeof(int64_t) * r->n_outputs);
    if (h->outputs < 0 || h->pieces < 0 || h->output_bags < 0) return PERI_ENOMEM;
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        h->most_bags = peri__max(h->most_bags, h->outbound->feature_bags[o->feature]);
        peri_k_output k = {.column = o->column, .cols = o->cols, .first_piece = o->first_piece, .n_pieces = o->n_pieces,
                           .inverse = inverse ? inverse[o->feature] : -1, .divisor = divisor[o->table],
                           .sent_divisor = sent_divisor[o->table]};
        memcpy(h->up.host + h->outputs + (int64_t)sizeof k * i, &k, sizeof k);
        memcpy(h->up.host + h->output_bags + (int64_t)sizeof(int64_t) * i, &h->outbound->feature_bags[o->feature], sizeof(int64_t));
        for (int32_t p = o->first_piece; p < o->first_piece + o->n_pieces; p++) {
            int32_t from = r->pieces[p].rank, slot = r->pieces[p].slot;
            peri_k_piece piece = {.own = from < 0 || stays(&r->slots[slot], from, rank),
                                  .offset = from < 0 ? h->replica_offset[slot] : at[slot]};
            memcpy(h->up.host + h->pieces + (int64_t)sizeof piece * p, &piece, sizeof piece);
        }
    }
    return PERI_OK;
}

peri_status peri__home_new(const peri__routes *r, int32_t rank, peri__outbound *outbound, int64_t rows, const int64_t *inverse,
                           const double *divisor, const double *sent_divisor, peri_device *device, peri__home **out)
{
    int64_t *at = NULL;
    peri__home *h = peri__alloc_zero(sizeof *h);
    if (!h) return PERI_ENOMEM;
    peri__refs_init(&h->refs);
    peri__refs_add(&outbound->refs);
    h->outbound = outbound;
    size_t features = sizeof(int64_t) * (size_t)peri__max(r->n_features, 1);
    h->feature_inverse = inverse ? peri__alloc(features) : NULL;
    h->rank_out = peri__alloc(sizeof *h->rank_out * PERI__LANES * (size_t)r->world_size);
    h->replica_offset = peri__alloc(sizeof *h->replica_offset * (size_t)peri__max(1, r->n_replicas));
    peri_status status = (h->feature_inverse || !inverse) && h->rank_out && h->replica_offset ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    if (inverse) memcpy(h->feature_inverse, inverse, sizeof *inverse * (size_t)r->n_features);
    h->rows = rows;
    h->variable = inverse != NULL;
    PERI_TRY_GOTO(place_slots(r, h, rank, &at), out);
    PERI_TRY_GOTO(add_outputs(r, h, rank, at, inverse, divisor, sent_divisor), out);
    PERI_TRY_GOTO(peri__upload_send(&h->up, device), out);
    *out = h;
out:
    peri__free(at);
    if (status < 0) peri__home_release(h);
    return status;
}

void peri__home_release(peri__home *h)
{
    if (!h || !peri__refs_drop(&h->refs)) return;
    peri__upload_fini(&h->up);
    peri__outbound_release(h->outbound);
    peri__free(h->feature_inverse);
    peri__free(h->rank_out);
    peri__free(h->replica_offset);
    peri__free(h);
}

/* -- the owner side ---------------------------------------------------------------------------------------------------------------- */

/** Elements for each rank: lane after lane, and in the node lane by gateway. Where each lane begins, after @own. */
static void count_elements(const peri__routes *r, int32_t rank, const int64_t *counts, int64_t own, peri__owner *o, int64_t *lane_at)
{
    const peri__nodes *nodes = &r->nodes;
    const int32_t world = r->world_size, streams = peri__streams_of(r, rank), node = nodes->of[rank];
    for (int32_t source = 0; source < world; source++) {
        const int32_t place = peri__gateway_place(nodes, node, source);
        for (int32_t i = r->rank_slot[rank]; i < r->rank_slot[rank + 1]; i++) {
            const peri__slot *s = &r->slots[i];
            int64_t n = s->cols * counts[(int64_t)source * streams + s->place];
            if (stays(s, rank, source)) continue;
            o->lane_out[s->lane] += n;
            if (s->lane == PERI__NODE_LANE) o->sum_out[place] += n;
            if (s->lane != PERI__NODE_LANE || place == nodes->place[rank]) o->source_out[s->lane * world + source] += n;
        }
    }
    for (int32_t i = 0; i < peri__node_size(nodes, node); i++) o->sum_in[i] = o->sum_out[nodes->place[rank]];
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        lane_at[lane] = own + o->sent_out;
        o->sent_out += o->lane_out[lane];
    }
}

/** The blocks of one rank's bags. @at: where its rows go, by lane, and (PERI__LANES) those that stay; moved on. */
static void add_blocks(const peri__routes *r, int32_t rank, const int64_t *counts, int32_t source, const int64_t *first, int64_t *at,
                       peri__owner *o)
{
    for (int32_t i = r->rank_slot[rank]; i < r->rank_slot[rank + 1]; i++) {
        const peri__slot *s = &r->slots[i];
        int64_t *here = stays(s, rank, source) ? &at[PERI__LANES] : &at[s->lane], bags = counts[s->place];
        o->blocks[o->n_blocks++] = (peri__block){.first_bag = first[s->place], .bags = bags, .out_offset = *here, .out_stride = s->cols,
                                                 .slot = i, .source = source};
        *here += s->cols * bags;
    }
}

/** Where the node lane's rows for each rank begin, if the lane begins at @at: by gateway, then by rank. */
static void place_sums(const peri__routes *r, int32_t rank, const int64_t *counts, int64_t at, int64_t *by_source)
{
    const int32_t world = r->world_size, streams = peri__streams_of(r, rank), node = r->nodes.of[rank];
    for (int32_t place = 0; place < peri__node_size(&r->nodes, node); place++)
        for (int32_t source = 0; source < world; source++) {
            if (peri__gateway_place(&r->nodes, node, source) != place) continue;
            by_source[source] = at;
            for (int32_t i = r->rank_slot[rank]; i < r->rank_slot[rank + 1]; i++)
                if (r->slots[i].lane == PERI__NODE_LANE) at += r->slots[i].cols * counts[(int64_t)source * streams + r->slots[i].place];
        }
}

peri_status peri__owner_new(const peri__routes *r, int32_t rank, const int64_t *counts, int64_t own, peri__owner **out)
{
    const int64_t world = r->world_size, slots = r->rank_slot[rank + 1] - r->rank_slot[rank], streams = peri__streams_of(r, rank);
    const int64_t mates = peri__node_size(&r->nodes, r->nodes.of[rank]);
    peri__owner *o = peri__alloc_zero(sizeof *o);
    if (!o) return PERI_ENOMEM;
    o->blocks = peri__alloc(sizeof *o->blocks * (size_t)peri__max(1, slots * world));
    size_t bytes = sizeof *counts * (size_t)(streams * world);
    o->counts = peri__alloc(peri__max(bytes, 1));
    o->source_out = peri__alloc_zero(sizeof *o->source_out * (size_t)(PERI__LANES * world + 2 * mates));
    int64_t *first = peri__alloc(sizeof *first * (size_t)(streams + world)), *sums = first + streams;
    if (!o->blocks || !o->counts || !o->source_out || !first) {
        peri__free(first);
        peri__owner_free(o);
        return PERI_ENOMEM;
    }
    o->sum_out = o->source_out + PERI__LANES * world;
    o->sum_in = o->sum_out + mates;
    int64_t at[PERI__LANES + 1] = {0};
    count_elements(r, rank, counts, own, o, at);
    if (o->lane_out[PERI__NODE_LANE]) place_sums(r, rank, counts, at[PERI__NODE_LANE], sums);
    for (int32_t source = 0; source < world; source++) {
        const int64_t *n = counts + source * streams;
        for (int32_t k = 0; k < streams; k++) {
            first[k] = o->bags;
            o->bags += n[k];
        }
        if (o->lane_out[PERI__NODE_LANE]) at[PERI__NODE_LANE] = sums[source];
        add_blocks(r, rank, n, source, first, at, o);
    }
    memcpy(o->counts, counts, bytes);
    peri__free(first);
    *out = o;
    return PERI_OK;
}

void peri__owner_free(peri__owner *o)
{
    if (!o) return;
    peri__free(o->counts);
    peri__free(o->source_out);
    peri__free(o->blocks);
    peri__free(o);
}
