/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence_stages.c: the stages of a sharded EmbeddingCollection, which returns one row for each id, in the order of
 * the ids.
 *
 * To an owner each id is a bag of its own. No row is added to another, so rows of tables that are cut by rows come back
 * from the one rank that has them: the router keeps where it put each id, and what returns lies in the same order.
 */
#include "rows.h"
#include "../../kernels/route.h"

#include "../base/tune.h"

/** Output @o; of a copy: its piece @copy, else -1. */
static void add_rows(peri__home *h, const peri__output *o, int32_t copy, const peri__end *end)
{
    const peri_sharded *e = h->e;
    peri_k_rows k = peri__home_rows(h, o, copy);
    k.column = o->col_offset;
    k.divisor = e->tables[o->table].divisor;
    k.sent_divisor = e->tables[o->table].sent_divisor;
    k.row = end->row;
    k.all = k.place_first >= 0 && !end->cut;
    memcpy(h->up.host + h->outputs + (int64_t)sizeof k * h->n_outputs++, &k, sizeof k);
    k.row = end->to;
    if (end->alone) memcpy(h->up.host + h->joined + (int64_t)sizeof k * h->n_joined++, &k, sizeof k);
}

/** Add output @o. If its rows lie as its result has them (all columns, from one owner, who was sent each id of the
 *  feature), they are not put together with others. */
static void add_output(peri__home *h, const peri__output *o, peri__end *end)
{
    const bool copied = peri__piece_partition(h->e->routes, o->first_piece)->copied;
    end->cut = !peri__home_has_all_ids(h, o);
    end->alone = o->cols < h->e->cols || end->cut;
    if (!copied) add_rows(h, o, -1, end);
    for (int32_t k = 0; copied && k < o->n_pieces; k++) /* home: those of this rank; to owners: all of them learn */
        if (!h->rule.to_homes || k == h->e->rank) add_rows(h, o, k, end);
}

static peri_status lay_out_sequence_home(peri__home *h)
{
    const peri__routes *r = h->e->routes;
    const int64_t most = peri__max(r->n_outputs, r->n_pieces);
    peri__end end = {0};
    h->outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_rows) * most);
    h->joined = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_rows) * most);
    h->pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    PERI_TRY(peri__upload_open(&h->up, h->e->device));
    h->whole = peri__alloc(sizeof *h->whole * (size_t)peri__max(1, r->n_outputs));
    h->ends = peri__alloc(sizeof *h->ends * (size_t)peri__max(1, r->n_outputs));
    if (!h->whole || !h->ends) return PERI_ENOMEM;
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        end.to = h->joined_rows;
        add_output(h, o, &end);
        h->ends[i] = end;
        if (o->col_offset + o->cols < h->e->tables[o->table].cols) continue;
        /* that was the last block of columns of these rows */
        const peri__line line = peri__home_line(h, o->first_piece);
        h->whole[end.result++] =
            (peri_k_piece){.own = line.space >= PERI__OWN_ROWS, .offset = end.alone ? -1 : line.at};
        end.row += h->feature_ids[o->feature];
        if (end.alone) h->joined_rows += h->feature_ids[o->feature];
    }
    return PERI_OK;
}

/** @outputs: @n of the home's. */
static peri_k_route_rows_args rows_args(const peri__rows *rows, const peri_k_rows *outputs, int32_t n)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    const peri__routing *r = &rows->input->routing;
    const int64_t past = peri__tune(PERI__TUNE_lookup_past);
    return (peri_k_route_rows_args){.in = peri__routing_ids(r),
                                    .values = peri__data(rows->ends[0]),
                                    .stride = e->cols,
                                    .received = peri__data(rows->away),
                                    .own = peri__data(rows->own),
                                    .places = r->places ? peri__data(r->places) : NULL,
                                    .origins = r->origins ? peri__data(r->origins) : NULL,
                                    .outputs = outputs,
                                    .pieces = peri__upload_at(&h->up, h->pieces),
                                    .n_outputs = n,
                                    .past = past > 0 && h->rows * e->cols * (int64_t)sizeof(float) >= past,
                                    .placed = rows->in_place >> PERI__OWN_ROWS & 1,
                                    /* of rows of ids it is all lanes, or none */
                                    .direct = (rows->in_place & PERI__ALL_LANES) != 0};
}

enum { GRAIN = 256 }; /* rows */

static peri_status gather_rows_of_ids(const peri__rows *rows)
{
    const peri__home *h = rows->layout->home;
    const peri_k_route_rows_args args = rows_args(rows, peri__upload_at(&h->up, h->joined), h->n_joined);
    return h->n_joined ? PERI_LAUNCH(rows->e->device, route_rows, &args, h->joined_rows, GRAIN) : PERI_OK;
}

/** Outputs whose gradients go through the buffer: some of their rows do. */
static peri_status list_outputs_left(const peri__rows *rows, peri__left *left)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    const peri_k_rows *all = (const peri_k_rows *)(h->up.host + h->outputs);
    left->outputs = peri__upload_add(&left->up, (int64_t)sizeof *all * h->n_outputs);
    PERI_TRY(peri__upload_open(&left->up, e->device));
    peri_k_rows *to = (peri_k_rows *)(left->up.host + left->outputs);
    for (int32_t o = 0; o < h->n_outputs; o++) {
        const peri_k_rows *k = &all[o];
        const int32_t first = (int32_t)k->first_piece,
                      n = k->place_first < 0 || k->all ? 1 : e->routes->partitions[k->partition].n_parts;
        bool any = false;
        for (int32_t p = first; p < first + n && !any; p++) {
            const peri__line line = peri__home_line(h, p);
            any = line.n > 0 && !peri__rows_in_place(rows, &line);
        }
        if (any) to[left->n++] = *k;
    }
    return peri__upload_send(&left->up);
}

/** Gradients lie apart, each output's rows in one: where that is goes into the output's first column. @outputs: @n of a
 *  list, copied. */
static peri_status spread_apart(const peri__rows *rows, const peri_k_rows *outputs, int32_t n)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    PERI__SCRATCH peri_k_rows *moved = peri__alloc(sizeof *moved * (size_t)peri__max(n, 1));
    if (!moved) return PERI_ENOMEM;
    memcpy(moved, outputs, sizeof *moved * (size_t)n);
    for (int32_t o = 0; o < n; o++) {
        const peri__end *end = &h->ends[e->routes->pieces[moved[o].first_piece].output];
        moved[o].column +=
            peri__rows_address(rows->ends[end->result]) - peri__rows_address(rows->ends[0]) - end->row * e->cols;
    }
    const peri_k_route_rows_args args = rows_args(rows, moved, n);
    return n ? PERI_LAUNCH(e->device, route_rows_back, &args, h->rows, GRAIN) : PERI_OK;
}

static peri_status spread_gradients_of_ids(const peri__rows *rows)
{
    const peri__home *h = rows->layout->home;
    peri__to_move left;
    PERI_TRY(peri__rows_list_left(rows, &left));
    if (rows->apart) return spread_apart(rows, left.outputs, left.n);
    const peri_k_route_rows_args args = rows_args(rows, left.outputs, left.n);
    return left.n ? PERI_LAUNCH(rows->e->device, route_rows_back, &args, h->rows, GRAIN) : PERI_OK;
}

const peri__kind peri__sequence = {.name = "EmbeddingCollection",
                                   .by_id = true,
                                   .lay_out = lay_out_sequence_home,
                                   .list = list_outputs_left,
                                   .combine = gather_rows_of_ids,
                                   .spread = spread_gradients_of_ids};
