/* SPDX-License-Identifier: Apache-2.0
 *
 * table_lookup.c: rows of tables by lists of ids.
 */
#include "../../kernels/tbe.h"
#include "run.h"

/** Bytes of rows that are asked for before they are needed. */
enum { ROWS_AHEAD = 8 << 10 };

void peri__model_rows_of(const run *r, const peri__model_rows *rows, const void *data, int64_t columns, const lists *l)
{
    const int64_t ids = l->offsets[l->n];
    const peri_k_tbe_table table = {.rows = l->rows, .cols = columns, .stride = rows->stride, .pooling = l->pooling};
    const peri_k_tbe_block block = {.bags = l->n, .out_offset = 0, .out_stride = l->out_stride};
    peri_k_tbe_span spans[2];
    peri_k_tbe_prepare_args prepare = {.list = {.ids = l->ids,
                                                .offsets = l->offsets,
                                                .weights = l->weights,
                                                .tables = &table,
                                                .blocks = &block,
                                                .ordered = &block,
                                                .spans = spans,
                                                .n_ids = ids,
                                                .n_bags = l->n,
                                                .n_tables = 1,
                                                .n_blocks = 1,
                                                .capacity = ids,
                                                .ids_dtype = PERI_I64,
                                                .offsets_dtype = PERI_I64,
                                                .all_bags = l->n,
                                                .most_bags = l->n,
                                                .width = table.cols}};
    CALL(r, tbe_prepare, &prepare, 1);
    const peri_k_tbe_forward_args forward = {.list = prepare.list, .weight = data, .out = l->out, .chunks = 1,
                                             .weight_dtype = rows->format, .out_dtype = PERI_F32,
                                             .reach = {.ahead = ROWS_AHEAD, .near = true, .in_order = true}};
    CALL(r, tbe_forward, &forward, 1);
}

static void look_up_rows(const run *r, const peri__model_bag *bag, const lists *l)
{
    const peri_model *m = r->c->model;
    const peri__model_rows *rows = &m->rows[bag->table];
    peri__model_rows_of(r, rows, peri__model_data(m, rows->section), m->tables[bag->table].columns, l);
}

/** The weights of lists whose offsets are @offsets[n + 1], by places. */
static const float *place_weights(const run *r, const peri__model_bag *bag, const int64_t *offsets, int64_t n)
{
    const float *places = r->c->at[bag->positions];
    for (int64_t b = 0; b < n; b++)
        memcpy(r->c->weights + offsets[b], places, sizeof *places * (size_t)(offsets[b + 1] - offsets[b]));
    return r->c->weights;
}

/** The same where rows of raw ids, or weights of places, are made first: of as many samples at a time as the context
 *  has room for. */
static void look_up_made_rows(const run *r, const peri__model_bag *bag, const lists *all)
{
    lists part = *all;
    for (int64_t first = 0; first < all->n; first += part.n) {
        const int64_t *offsets = all->offsets + first, begin = offsets[0];
        part.n = 1; /* no list is longer than max_ids */
        while (first + part.n < all->n && offsets[part.n + 1] - begin <= r->c->max_ids) part.n++;
        for (int64_t i = 0; i <= part.n; i++) r->c->moved[i] = offsets[i] - begin;
        part.ids = all->ids + begin;
        part.offsets = r->c->moved;
        part.weights = all->weights ? all->weights + begin : NULL;
        if (bag->positions >= 0) part.weights = place_weights(r, bag, part.offsets, part.n);
        if (bag->map >= 0) {
            peri__model_map_find(r->c->model, &r->c->model->maps[bag->map], part.ids, offsets[part.n] - begin,
                                 r->c->rows);
            part.ids = r->c->rows;
        }
        part.out = all->out + first * all->out_stride;
        look_up_rows(r, bag, &part);
    }
}

void peri__model_look_up(const run *r, const peri__model_bag *bag, const lists *all)
{
    if ((bag->map < 0 && bag->positions < 0) || all->offsets[all->n] == all->offsets[0]) look_up_rows(r, bag, all);
    else look_up_made_rows(r, bag, all);
}

lists peri__model_lists(const run *r, const peri__model_bag *bag)
{
    const peri_model *m = r->c->model;
    const peri_model_values *v = &r->inputs[bag->input];
    return (lists){.ids = v->ids,
                   .weights = v->weights,
                   .offsets = v->offsets ? v->offsets + r->first : r->c->offsets,
                   .n = r->samples,
                   .rows = bag->map < 0 ? m->inputs[bag->input].rows : m->tables[bag->table].rows,
                   .out = r->out,
                   .out_stride = r->columns,
                   .pooling = bag->pooling};
}

int64_t peri__model_ask_for(const run *r, const peri__model_bag *bag, int64_t most)
{
    const lists all = peri__model_lists(r, bag);
    const peri__model_rows *rows = &r->c->model->rows[bag->table];
    const char *data = peri__model_data(r->c->model, rows->section);
    if (bag->map >= 0) return 0;
    const int64_t n = peri__min(all.offsets[all.n] - all.offsets[0], most / rows->row_bytes);
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = all.ids[all.offsets[0] + i];
        if ((uint64_t)id >= (uint64_t)all.rows) continue;
        const char *row = data + id * rows->row_bytes;
        for (int64_t at = 0; at < rows->row_bytes; at += 64) __builtin_prefetch(row + at);
        __builtin_prefetch(row + rows->row_bytes - 1); /* rows begin anywhere in a line */
    }
    return n * rows->row_bytes;
}
