/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence.c: the stages of a sharded EmbeddingCollection, which returns one row for each id, in the order of the ids.
 *
 * To an owner each id is a bag of its own. No row is added to another, so rows of tables that are cut by rows come back from the one rank
 * that has them: the router keeps where it put each id, and what returns lies in the same order.
 */
#include "module.h"

/** Output @o, from row @row on; of a copy: piece @copy. */
static void add_rows(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a, const peri__output *o,
                     int64_t row, int32_t copy)
{
    peri_k_rows k = peri__home_rows(r, h, rank, at, o, copy);
    k.row = row;
    k.column = o->column % a->cols;
    k.divisor = a->divisor[o->table];
    k.sent_divisor = a->sent_divisor[o->table];
    memcpy(h->up.host + h->outputs + (int64_t)sizeof k * h->n_outputs++, &k, sizeof k);
}

static peri_status lay_out(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a)
{
    int64_t row = 0;
    h->outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_rows) * peri__max(r->n_outputs, r->n_pieces));
    h->pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    PERI_TRY(peri__upload_open(&h->up, a->device));
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        const peri__piece *first = &r->pieces[o->first_piece];
        bool copied = first->rank >= 0 && r->partitions[r->strands[r->lookups[first->lookup].strand].partition].copied;
        if (!copied) add_rows(r, h, rank, at, a, o, row, -1);
        for (int32_t k = 0; copied && k < o->n_pieces; k++) /* home: those of this rank; to owners: all of them learn */
            if (!h->rule.to_homes || k == rank) add_rows(r, h, rank, at, a, o, row, k);
        if (o->column % a->cols + o->cols == a->cols) row += h->feature_ids[o->feature]; /* the last block of columns of these rows */
    }
    return PERI_OK;
}

static peri_k_route_rows_args rows_args(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *values,
                                        peri_tensor *own, peri_tensor *received)
{
    return (peri_k_route_rows_args){.values = peri__data(values), .stride = e->cols, .received = peri__data(received),
                                    .own = peri__data(own), .ids = peri__data(given->ids),
                                    .places = given->places ? peri__data(given->places) : NULL,
                                    .partitions = peri__upload_at(&h->outbound->up, h->outbound->partitions),
                                    .bounds = peri__upload_at(&h->outbound->up, h->outbound->bounds),
                                    .outputs = peri__upload_at(&h->up, h->outputs), .pieces = peri__upload_at(&h->up, h->pieces),
                                    .n_outputs = h->n_outputs, .ids_i32 = given->ids->dtype == PERI_I32};
}

enum { GRAIN = 256 }; /* rows */

static peri_status combine(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *own, peri_tensor *received,
                           peri_tensor **out)
{
    int64_t shape[2] = {h->rows, e->cols};
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 2, shape, out));
    peri_k_route_rows_args args = rows_args(e, h, given, *out, own, received);
    peri_status status = PERI_LAUNCH(e->device, route_rows, &args, h->rows, GRAIN);
    if (status < 0) peri_tensor_release(*out);
    return status;
}

static peri_status spread(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                          peri_tensor *sent)
{
    peri_k_route_rows_args args = rows_args(e, h, given, grad, own, sent);
    return PERI_LAUNCH(e->device, route_rows_back, &args, h->rows, GRAIN);
}

static int64_t address(const peri_tensor *t) { return (int64_t)(uintptr_t)peri__data(t); }

/** Each output's rows are those of one result; where that result's gradient lies goes into the output's first column. */
static peri_status spread_parts(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *const *grad,
                                peri_tensor *own, peri_tensor *sent)
{
    peri_k_route_rows_args args = rows_args(e, h, given, grad[0], own, sent);
    peri_k_rows *outputs = peri__alloc(sizeof *outputs * (size_t)peri__max(h->n_outputs, 1));
    if (!outputs) return PERI_ENOMEM;
    memcpy(outputs, args.outputs, sizeof *outputs * (size_t)h->n_outputs);
    int64_t first = 0; /* row of result i */
    int32_t i = 0;
    for (int32_t o = 0; o < h->n_outputs; o++) {
        if (outputs[o].ids == 0) continue;
        for (; outputs[o].row >= first + h->feature_rows[e->result_feature[i]]; i++) first += h->feature_rows[e->result_feature[i]];
        outputs[o].column += (address(grad[i]) - address(grad[0])) / (int64_t)sizeof(float) - first * e->cols;
    }
    args.outputs = outputs;
    peri_status status = PERI_LAUNCH(e->device, route_rows_back, &args, h->rows, GRAIN);
    peri__free(outputs);
    return status;
}

const peri__kind peri__sequence = {.name = "EmbeddingCollection", .by_id = true, .lay_out = lay_out, .combine = combine, .spread = spread,
                                   .spread_parts = spread_parts};
