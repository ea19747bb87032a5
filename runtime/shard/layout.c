/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c: see layout.h.
 */
#include "layout.h"

/* -- the home side ----------------------------------------------------------------------------------------------------------------- */

/** Where the rows of each slot lie on this rank: those of its own slots in the own buffer, those of others among what comes back. Fills in
 *  what the home says of sizes. @at new. */
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
        for (int32_t s = r->rank_slot[i]; s < r->rank_slot[i + 1] && i != rank; s++)
            h->rank_out[r->slots[s].lane * world + i] += r->slots[s].cols * h->outbound->feature_bags[r->slots[s].feature];
    for (int32_t k = 0; k < PERI__LANES * world; k++) {
        next[k] = h->received_out;
        h->received_out += h->rank_out[k];
        h->lane_out[k / world] += h->rank_out[k];
    }
    for (int32_t i = 0; i < world; i++)
        for (int32_t s = r->rank_slot[i]; s < r->rank_slot[i + 1]; s++) {
            int64_t *from = i == rank ? &h->own_out : &next[r->slots[s].lane * world + i];
            place[s] = *from;
            *from += r->slots[s].cols * h->outbound->feature_bags[r->slots[s].feature];
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
            peri_k_piece piece = {.own = from < 0 || from == rank, .offset = from < 0 ? h->replica_offset[slot] : at[slot]};
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

peri_status peri__owner_new(const peri__routes *r, int32_t rank, const int64_t *counts, int64_t own, peri__owner **out)
{
    int32_t slots = r->rank_slot[rank + 1] - r->rank_slot[rank], streams = r->rank_wire[rank + 1] - r->rank_wire[rank];
    peri__owner *o = peri__alloc_zero(sizeof *o);
    if (!o) return PERI_ENOMEM;
    o->blocks = peri__alloc(sizeof *o->blocks * (size_t)peri__max(1, (int64_t)slots * r->world_size));
    size_t bytes = sizeof *counts * (size_t)streams * (size_t)r->world_size;
    o->counts = peri__alloc(peri__max(bytes, 1));
    o->source_out = peri__alloc_zero(sizeof *o->source_out * PERI__LANES * (size_t)r->world_size);
    int64_t *first = peri__alloc(sizeof *first * (size_t)peri__max(1, streams));
    if (!o->blocks || !o->counts || !o->source_out || !first) {
        peri__free(first);
        peri__owner_free(o);
        return PERI_ENOMEM;
    }
    int64_t at_lane[PERI__LANES] = {0}, at_own = 0;
    for (int32_t source = 0; source < r->world_size; source++)
        for (int32_t i = 0; i < slots && source != rank; i++) {
            const peri__slot *s = &r->slots[r->rank_slot[rank] + i];
            int64_t n = s->cols * counts[(int64_t)source * streams + s->place];
            o->source_out[s->lane * r->world_size + source] += n;
            o->lane_out[s->lane] += n;
        }
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        at_lane[lane] = own + o->sent_out;
        o->sent_out += o->lane_out[lane];
    }
    for (int32_t source = 0; source < r->world_size; source++) {
        const int64_t *n = counts + (int64_t)source * streams;
        for (int32_t k = 0; k < streams; k++) {
            first[k] = o->bags;
            o->bags += n[k];
        }
        for (int32_t i = 0; i < slots; i++) {
            const peri__slot *s = &r->slots[r->rank_slot[rank] + i];
            int64_t *at = source == rank ? &at_own : &at_lane[s->lane];
            o->blocks[o->n_blocks++] = (peri__block){.first_bag = first[s->place], .bags = n[s->place], .out_offset = *at,
                                                     .out_stride = s->cols, .slot = r->rank_slot[rank] + i, .source = source};
            *at += s->cols * n[s->place];
        }
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
