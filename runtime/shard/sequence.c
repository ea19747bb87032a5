/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence.c: the stages of a sharded EmbeddingCollection, which returns one row for each id, in the order of the ids.
 *
 * To an owner each id is a bag of its own. No row is added to another, so rows of tables that are cut by rows come back from the one rank
 * that has them: the router keeps where it put each id, and what returns lies in the same order.
 */
#include "module.h"

#include "../base/tune.h"

/** Output @o, from row @row on, and from row @joined on if its rows are put together (else: -1); of a copy: piece @copy. */
static void add_rows(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a, const peri__output *o,
                     int64_t row, int64_t joined, int32_t copy)
{
    peri_k_rows k = peri__home_rows(r, h, rank, at, o, copy);
    k.column = o->column % a->cols;
    k.divisor = a->divisor[o->table];
    k.sent_divisor = a->sent_divisor[o->table];
    k.row = row;
    k.all = o->n_pieces == 1 && k.place_first >= 0 &&
            h->strand_ids[r->lookups[r->pieces[o->first_piece].lookup].strand] == h->feature_ids[o->feature];
    memcpy(h->up.host + h->outputs + (int64_t)sizeof k * h->n_outputs++, &k, sizeof k);
    k.row = joined;
    if (joined >= 0) memcpy(h->up.host + h->joined + (int64_t)sizeof k * h->n_joined++, &k, sizeof k);
}

/** Where the rows of @o lie, if that is as its result has them: all columns, from one owner, who was sent each id of the feature. Else an
 *  offset below 0. */
static peri_k_piece whole_of(const peri__routes *r, const peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a,
                             const peri__output *o)
{
    const peri__piece *piece = &r->pieces[o->first_piece];
    bool whole = o->cols == a->cols && o->n_pieces == 1;
    if (whole && piece->rank >= 0) whole = h->strand_ids[r->lookups[piece->lookup].strand] == h->feature_ids[o->feature];
    return whole ? peri__home_piece(r, h, rank, at, *piece) : (peri_k_piece){.offset = -1};
}

static peri_status lay_out(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a)
{
    const int64_t most = peri__max(r->n_outputs, r->n_pieces);
    int64_t row = 0;
    int32_t result = 0;
    h->outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_rows) * most);
    h->joined = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_rows) * most);
    h->pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    PERI_TRY(peri__upload_open(&h->up, a->device));
    h->whole = peri__alloc(sizeof *h->whole * (size_t)peri__max(1, r->n_outputs));
    h->wanted = peri__alloc(sizeof *h->wanted * (size_t)peri__max(1, r->n_outputs));
    if (!h->whole || !h->wanted) return PERI_ENOMEM;
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        const peri__piece *first = &r->pieces[o->first_piece];
        bool copied = first->rank >= 0 && r->partitions[r->strands[r->lookups[first->lookup].strand].partition].copied;
        const peri_k_piece whole = whole_of(r, h, rank, at, a, o);
        const int64_t joined = whole.offset < 0 ? h->joined_rows : -1;
        h->wanted[i] = (peri__wanted_rows){joined, result};
        if (!copied) add_rows(r, h, rank, at, a, o, row, joined, -1);
        for (int32_t k = 0; copied && k < o->n_pieces; k++) /* home: those of this rank; to owners: all of them learn */
            if (!h->rule.to_homes || k == rank) add_rows(r, h, rank, at, a, o, row, joined, k);
        if (o->column % a->cols + o->cols < a->cols) continue;
        h->whole[result++] = whole; /* that was the last block of columns of these rows */
        row += h->feature_ids[o->feature];
        if (whole.offset < 0) h->joined_rows += h->feature_ids[o->feature];
    }
    return PERI_OK;
}

static peri_k_route_rows_args rows_args(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *values,
                                        peri_tensor *own, peri_tensor *received)
{
    const int64_t past = peri__tune(PERI__TUNE_lookup_past);
    return (peri_k_route_rows_args){.values = peri__data(values), .stride = e->cols, .received = peri__data(received),
                                    .own = peri__data(own), .ids = peri__data(given->ids),
                                    .places = given->places ? peri__data(given->places) : NULL,
                                    .origins = given->origins ? peri__data(given->origins) : NULL,
                                    .partitions = peri__upload_at(&h->outbound->up, h->outbound->partitions),
                                    .bounds = peri__upload_at(&h->outbound->up, h->outbound->bounds),
                                    .outputs = peri__upload_at(&h->up, h->outputs), .pieces = peri__upload_at(&h->up, h->pieces),
                                    .n_outputs = h->n_outputs, .ids_i32 = given->ids->dtype == PERI_I32,
                                    .past = past > 0 && h->rows * e->cols * (int64_t)sizeof(float) >= past};
}

enum { GRAIN = 256 }; /* rows */

static peri_status combine(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *own, peri_tensor *received,
                           int there, const peri__direct *direct, peri_tensor *out)
{
    peri_k_route_rows_args args = rows_args(e, h, given, out, own, received); /* replicas' are whole results */
    args.placed = there & PERI__OWN_THERE;
    args.direct = direct;
    args.outputs = peri__upload_at(&h->up, h->joined);
    args.n_outputs = h->n_joined;
    return h->n_joined ? PERI_LAUNCH(e->device, route_rows, &args, h->joined_rows, GRAIN) : PERI_OK;
}

static peri_status spread(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                          peri_tensor *sent, int there, const peri__direct *direct)
{
    (void)there; /* one gradient of all results is never read in place */
    peri_k_route_rows_args args = rows_args(e, h, given, grad, own, sent);
    args.direct = direct;
    return PERI_LAUNCH(e->device, route_rows_back, &args, h->rows, GRAIN);
}

static int64_t address(const peri_tensor *t) { return (int64_t)(uintptr_t)peri__data(t); }

/** Each output's rows are those of one result; where that result's gradient lies goes into the output's first column. */
static peri_status spread_parts(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *const *grad,
                                peri_tensor *own, peri_tensor *sent, int there, const peri__direct *direct)
{
    peri_k_route_rows_args args = rows_args(e, h, given, grad[0], own, sent);
    args.placed = there & PERI__OWN_THERE;
    args.direct = direct;
    peri_k_rows *outputs = peri__alloc(sizeof *outputs * (size_t)peri__max(h->n_outputs, 1));
    if (!outputs) return PERI_ENOMEM;
    int64_t first = 0; /* row of result i */
    int32_t i = 0, n = 0;
    for (int32_t o = 0; o < h->n_outputs; o++) {
        peri_k_rows *k = &outputs[n];
        *k = args.outputs[o];
        if (k->ids == 0 || ((there & PERI__REPLICAS_THERE) && k->place_first < 0)) continue; /* ids of a replica are sent nowhere */
        if (k->place_first >= 0 && args.placed && args.direct) continue;
        if (k->all && (args.pieces[k->first_piece].own ? args.placed : args.direct)) continue;
        for (; k->row >= first + h->feature_rows[e->result_feature[i]]; i++) first += h->feature_rows[e->result_feature[i]];
        k->column += (address(grad[i]) - address(grad[0])) / (int64_t)sizeof(float) - first * e->cols;
        n++;
    }
    args.outputs = outputs;
    args.n_outputs = n;
    peri_status status = n ? PERI_LAUNCH(e->device, route_rows_back, &args, h->rows, GRAIN) : PERI_OK;
    peri__free(outputs);
    return status;
}

const peri__kind peri__sequence = {.name = "EmbeddingCollection", .by_id = true, .lay_out = lay_out, .combine = combine, .spread = spread,
                                   .spread_parts = spread_parts};
