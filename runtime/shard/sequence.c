/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence.c: the stages of a sharded EmbeddingCollection, which returns one row for each id, in the order of the ids.
 *
 * To an owner each id is a bag of its own. No row is added to another, so rows of tables that are cut by rows come back from the one rank
 * that has them: the router keeps where it put each id, and what returns lies in the same order.
 */
#include "module.h"

/** First entry of each partition in the places, as peri__routing.place_first has it; -1: not routed. */
static int64_t place_first(const peri__routes *r, const peri__home *h, int32_t partition)
{
    int64_t at = 0;
    if (!r->partitions[partition].n_parts) return -1;
    for (int32_t i = 0; i < partition; i++)
        if (r->partitions[i].n_parts) at += h->feature_rows[r->partitions[i].feature];
    return at;
}

/** Ids on the wire before each strand's. */
static void strand_starts(const peri__routes *r, const peri__home *h, int64_t *start)
{
    int64_t at = 0;
    for (int32_t w = 0; w < r->n_strands; w++) {
        start[r->wire[w]] = at;
        at += h->by_id[r->wire[w]];
    }
}

static peri_status lay_out(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a)
{
    int64_t row = 0, *start = peri__alloc(sizeof *start * (size_t)peri__max(1, r->n_strands));
    h->outputs = peri__upload_add(&h->up, NULL, (int64_t)sizeof(peri_k_rows) * r->n_outputs);
    h->pieces = peri__upload_add(&h->up, NULL, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    if (!start || h->outputs < 0 || h->pieces < 0) {
        peri__free(start);
        return PERI_ENOMEM;
    }
    strand_starts(r, h, start);
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        const int64_t column = o->column % a->cols, ids = h->feature_rows[o->feature];
        const peri__piece *first = &r->pieces[o->first_piece];
        int32_t partition = first->rank < 0 ? 0 : r->strands[r->lookups[first->lookup].strand].partition;
        peri_k_rows k = {.row = row, .ids = ids, .column = column, .cols = o->cols, .first_id = h->feature_first[o->feature],
                         .place_first = first->rank < 0 ? -1 : place_first(r, h, partition), .first_piece = o->first_piece,
                         .divisor = a->divisor[o->table], .sent_divisor = a->sent_divisor[o->table], .partition = partition};
        memcpy(h->up.host + h->outputs + (int64_t)sizeof k * i, &k, sizeof k);
        for (int32_t p = o->first_piece; p < o->first_piece + o->n_pieces; p++) {
            peri_k_piece piece = peri__home_piece(r, h, rank, at, r->pieces[p]);
            if (r->pieces[p].rank >= 0) /* places count the ids of the whole wire */
                piece.offset -= start[r->lookups[r->pieces[p].lookup].strand] * o->cols;
            memcpy(h->up.host + h->pieces + (int64_t)sizeof piece * p, &piece, sizeof piece);
        }
        if (column + o->cols == a->cols) row += ids; /* the last block of columns of these rows */
    }
    peri__free(start);
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
                                    .n_outputs = e->routes->n_outputs, .ids_i32 = given->ids->dtype == PERI_I32};
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

const peri__kind peri__sequence = {.name = "EmbeddingCollection", .by_id = true, .lay_out = lay_out, .combine = combine, .spread = spread};
