/* SPDX-License-Identifier: Apache-2.0
 *
 * predict.c: the operations of a model, over a block of samples at a time. Each is a kernel that the training runtime
 * uses too, called with the same arguments, so that a model file answers what the model answered.
 */
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"
#include "../../kernels/nearest.h"
#include "../base/floats.h"
#include "../sparse/sparse_internal.h"
#include "../embed/embed_internal.h"
#include "run.h"

/* -- lookups ------------------------------------------------------------------------------------------------------- */

/** The rows of one feature in one table, into columns [at, at + columns of the table) of the result. */
static void run_bag(const run *r, const peri__model_bag *bag, int64_t at)
{
    lists all = peri__model_lists(r, bag);
    all.out += at;
    peri__model_look_up(r, bag, &all);
}

static void run_lookup(const run *r)
{
    int64_t at = 0;
    for (int32_t b = 0; b < r->o->n_bags; b++) {
        run_bag(r, &r->o->bags[b], at);
        at += r->c->model->tables[r->o->bags[b].table].columns;
    }
}

/** Of each sample the rows of its first ids, one after the other, and the padding behind them. */
static void run_rows(const run *r)
{
    const peri__model_bag *bag = r->o->bags;
    const int64_t most = r->o->sizes[0], columns = r->o->sizes[1];
    const lists all = peri__model_lists(r, bag);
    for (int64_t b = 0; b < r->n; b++) {
        const int64_t n = peri__min(all.offsets[b + 1] - all.offsets[b], most), offsets[2] = {0, n};
        lists one = {.ids = all.ids + (n ? all.offsets[b] : 0), .offsets = offsets, .n = 1, .rows = all.rows,
                     .out = r->out + b * r->columns, .out_stride = columns, .pooling = PERI_POOLING_NONE};
        for (int64_t i = n * columns; i < r->columns; i++) one.out[i] = (float)r->o->numbers[0];
        if (n > 0) peri__model_look_up(r, bag, &one);
    }
}

static void run_lengths(const run *r)
{
    const lists all = peri__model_lists(r, r->o->bags);
    for (int64_t b = 0; b < r->n; b++) r->out[b] = (float)(all.offsets[b + 1] - all.offsets[b]);
}

/* -- products ------------------------------------------------------------------------------------------------------ */

static void run_linear(const run *r)
{
    const int64_t inner = r->o->sizes[0], cols = r->o->sizes[1];
    const peri_k_panel_product_args args = {.y = r->out,
                                            .x = in(r, 0),
                                            .panels = peri__model_data(r->c->model, r->o->weight),
                                            .dtype = r->o->weight_dtype,
                                            .codes = r->o->products != PERI_F32 ? r->c->scratch : NULL,
                                            .bias = r->o->n_in > 1 ? in(r, 1) : NULL,
                                            .act = r->o->code,
                                            .inner = inner,
                                            .cols = cols,
                                            .x_stride = inner,
                                            .y_stride = cols};
    CALL(r, panel_product, &args, r->n * (r->columns / cols));
}

/** One of a sample's matrices of @s: its left factor, in rows that lie together. */
static const float *left_factor(const int64_t *s, const float *x, float *room)
{
    if (s[6] == 1) return x;
    for (int64_t i = 0; i < s[1]; i++)
        for (int64_t k = 0; k < s[3]; k++) room[i * s[3] + k] = x[i * s[5] + k * s[6]];
    return room;
}

static void run_matmul(const run *r)
{
    const int64_t *s = r->o->sizes;
    float *panels = r->c->scratch, *room = panels + peri_panel_size(s[2], s[3]);
    for (int64_t b = 0; b < r->n * s[0]; b++) {
        const float *x = in(r, 0) + b / s[0] * in_step(r, 0) + b % s[0] * s[4];
        const float *y = in(r, 1) + b / s[0] * in_step(r, 1) + b % s[0] * s[7];
        peri_panel_pack(panels, y, s[2], s[3], s[9], s[8]);
        const peri_k_panel_product_args args =
            {.y = r->out + b * s[1] * s[2], .x = left_factor(s, x, room), .panels = panels,
             .act = PERI_UNARY_IDENTITY, .inner = s[3], .cols = s[2],
             .x_stride = s[6] == 1 ? s[5] : s[3], .y_stride = s[2]};
        CALL(r, panel_product, &args, s[1]);
    }
}

static void run_interaction(const run *r)
{
    const int64_t features = r->o->sizes[0], dim = r->o->sizes[1];
    const peri_k_interaction_args args = {.y = r->out,
                                          .dense = in(r, 0),
                                          .sparse = in(r, 1),
                                          .dtype = PERI_F32,
                                          .features = features,
                                          .dim = dim,
                                          .dense_stride = dim,
                                          .sparse_stride = features * dim,
                                          .feature_stride = dim};
    CALL(r, interaction, &args, r->n);
}

/* -- element by element -------------------------------------------------------------------------------------------- */

static void run_unary(const run *r)
{
    const peri_k_unary_args args = {.dst = r->out,
                                    .x = in(r, 0),
                                    .dtype = PERI_F32,
                                    .op = r->o->code,
                                    .a = r->o->numbers[0],
                                    .b = r->o->numbers[1]};
    CALL(r, unary, &args, r->n * r->columns);
}

static void run_binary(const run *r)
{
    const int32_t ndim = (int32_t)r->o->sizes[0];
    const int64_t *shape = r->o->sizes + 1;
    peri_k_binary_args args = {
        .dst = r->out, .a = in(r, 0), .b = in(r, 1), .dtype = PERI_F32, .op = r->o->code, .ndim = ndim + 1};
    args.shape[0] = r->n;
    args.a_stride[0] = in_step(r, 0);
    args.b_stride[0] = in_step(r, 1);
    for (int32_t d = 0; d < ndim; d++) {
        args.shape[d + 1] = shape[d];
        args.a_stride[d + 1] = shape[ndim + d];
        args.b_stride[d + 1] = shape[2 * ndim + d];
    }
    CALL(r, binary, &args, r->n * r->columns);
}

/** Dimensions [d, ndim) of one sample of compare (1 or 2 values) and where (3), in row-major order; returns the end of
 *  what was written. */
static float *choose_elements(const run *r, float *to, const float *const *x, int32_t d)
{
    const int32_t ndim = (int32_t)r->o->sizes[0], n = r->o->n_in;
    const int64_t size = r->o->sizes[1 + d];
    const float *at[3] = {x[0], x[n > 1], x[n > 2 ? 2 : 0]};
    for (int64_t i = 0; i < size; i++) {
        if (d + 1 < ndim) to = choose_elements(r, to, at, d + 1);
        else if (n == 3) *to++ = *at[0] != 0 ? *at[1] : *at[2];
        else *to++ = peri_compared(r->o->code, *at[0], n == 2 ? *at[1] : (float)r->o->numbers[0]) ? 1.0f : 0.0f;
        for (int32_t k = 0; k < n; k++) at[k] += r->o->sizes[1 + (k + 1) * ndim + d];
    }
    return to;
}

static void run_compare(const run *r)
{
    for (int64_t b = 0; b < r->n; b++) {
        const float *x[3] = {NULL};
        for (int32_t k = 0; k < r->o->n_in; k++) x[k] = in(r, k) + b * in_step(r, k);
        choose_elements(r, r->out + b * r->columns, x, 0);
    }
}

static void run_where(const run *r) { run_compare(r); }

static void run_muladd(const run *r)
{
    const peri_k_muladd_args args = {.dst = r->out, .a = in(r, 0), .b = in(r, 1), .c = in(r, 2), .dtype = PERI_F32,
                                     .scale = r->o->numbers[0]};
    CALL(r, muladd, &args, r->n * r->columns);
}

static void run_cross(const run *r)
{
    const int64_t cols = r->o->sizes[0];
    const peri_k_cross_args args = {.y = r->out,
                                    .x0 = in(r, 0),
                                    .u = in(r, 1),
                                    .bias = r->o->n_in > 3 ? in(r, 3) : NULL,
                                    .x = in(r, 2),
                                    .dtype = PERI_F32,
                                    .cols = cols};
    CALL(r, cross, &args, r->n * (r->columns / cols));
}

/* -- moving -------------------------------------------------------------------------------------------------------- */

/** Dimensions [d, ndim) of a view, in row-major order; returns the end of what was written. */
static float *copy_view(float *to, const float *from, const int64_t *shape, const int64_t *stride, int32_t ndim)
{
    if (ndim == 1 && *stride == 1) {
        memcpy(to, from, sizeof *to * (size_t)*shape);
        return to + *shape;
    }
    for (int64_t i = 0; i < *shape; i++) {
        if (ndim == 1) *to++ = from[i * *stride];
        else to = copy_view(to, from + i * *stride, shape + 1, stride + 1, ndim - 1);
    }
    return to;
}

static void run_copy(const run *r)
{
    const int32_t ndim = (int32_t)r->o->sizes[0];
    const int64_t *shape = r->o->sizes + 2;
    for (int64_t b = 0; b < r->n; b++)
        copy_view(r->out + b * r->columns, in(r, 0) + b * in_step(r, 0) + r->o->sizes[1], shape, shape + ndim, ndim);
}

static void run_cat(const run *r)
{
    const int64_t outer = r->o->sizes[0], inner = r->o->sizes[1], row = r->columns / outer;
    int64_t at = 0;
    for (int32_t i = 0; i < r->o->n_in; i++) {
        const int64_t part = r->o->sizes[2 + i] * inner;
        for (int64_t b = 0; b < r->n; b++)
            for (int64_t k = 0; k < outer; k++)
                memcpy(r->out + b * r->columns + k * row + at, in(r, i) + b * in_step(r, i) + k * part,
                       sizeof(float) * (size_t)part);
        at += part;
    }
}

/* -- along a dimension --------------------------------------------------------------------------------------------- */

static void run_sum(const run *r)
{
    const int64_t outer = r->o->sizes[0] * r->n, n = r->o->sizes[1], inner = r->o->sizes[2],
                  block = peri__min(r->o->sizes[3], n);
    const peri_k_sum_dim_args args = {.dst = r->out,
                                      .x = in(r, 0),
                                      .dtype = PERI_F32,
                                      .outer = outer,
                                      .n = n,
                                      .inner = inner,
                                      .block = block,
                                      .scale = r->o->numbers[0]};
    CALL(r, sum_dim, &args, outer * peri__ceil_div(n, block) * peri__ceil_div(inner, PERI_SUM_COLUMNS));
}

static void run_softmax(const run *r)
{
    const peri_k_softmax_args args = {
        .y = r->out, .x = in(r, 0), .dtype = PERI_F32, .log = r->o->code, .n = r->o->sizes[1], .inner = r->o->sizes[2]};
    CALL(r, softmax, &args, r->n * r->o->sizes[0] * r->o->sizes[2]);
}

static void run_layer_norm(const run *r)
{
    const int64_t rows = r->o->sizes[0] * r->n;
    const peri_k_layer_norm_args args = {.y = r->out,
                                         .mean = r->c->scratch,
                                         .rstd = r->c->scratch + rows,
                                         .x = in(r, 0),
                                         .weight = r->o->n_in > 1 ? in(r, 1) : NULL,
                                         .bias = r->o->n_in > 2 ? in(r, 2) : NULL,
                                         .dtype = PERI_F32,
                                         .cols = r->o->sizes[1],
                                         .eps = r->o->numbers[0]};
    CALL(r, layer_norm, &args, rows);
}

static void run_running(const run *r)
{
    const int64_t n = r->o->sizes[1], inner = r->o->sizes[2], lines = r->n * r->o->sizes[0] * inner;
    const peri_k_running_sum_args sum = {.y = r->out, .x = in(r, 0), .dtype = PERI_F32, .n = n, .inner = inner};
    const peri_k_product_dim_args product = {.y = r->out, .x = in(r, 0), .dtype = PERI_F32, .n = n, .inner = inner};
    if (r->o->code == 0) CALL(r, running_sum, &sum, lines);
    else CALL(r, running_product, &product, lines);
}

int64_t peri__model_extreme_scratch(int64_t out) { return out / 2 * (int64_t)(sizeof(int64_t) / sizeof(float)); }

/** Of each sample the running extremes, and then their places. */
static void run_extreme(const run *r)
{
    const int64_t n = r->o->sizes[1], inner = r->o->sizes[2], all = r->columns / 2;
    int64_t *places = (int64_t *)(void *)r->c->scratch;
    for (int64_t b = 0; b < r->n; b++) {
        float *out = r->out + b * r->columns;
        const peri_k_running_extreme_args args = {.values = out,
                                                  .indices = places,
                                                  .x = in(r, 0) + b * in_step(r, 0),
                                                  .dtype = PERI_F32,
                                                  .least = r->o->code == 1,
                                                  .n = n,
                                                  .inner = inner};
        CALL(r, running_extreme, &args, r->o->sizes[0] * inner);
        for (int64_t i = 0; i < all; i++) out[all + i] = (float)places[i];
    }
}

int64_t peri__model_cosine_scratch(int64_t rows) { return rows * 4 * (int64_t)(sizeof(double) / sizeof(float)); }

static void run_cosine(const run *r)
{
    const peri_k_cosine_args args = {.y = r->out,
                                     .sizes = (double *)(void *)r->c->scratch,
                                     .a = in(r, 0),
                                     .b = in(r, 1),
                                     .dtype = PERI_F32,
                                     .eps = r->o->numbers[0],
                                     .cols = r->o->sizes[0]};
    CALL(r, cosine, &args, r->n * r->columns);
}

/* -- in order ------------------------------------------------------------------------------------------------------ */

enum { RISING, FALLING, RISING_OR_NAN, MODE };

/** How many elements of each line are sorted: mode wants all of them. */
static int64_t sorted_of(const peri__model_operation *o) { return o->code == MODE ? o->sizes[0] : o->sizes[2]; }

int64_t peri__model_order_scratch(const peri__model_operation *o, int64_t out)
{
    /* places; the room of the first line, in which all lines of a call are sorted; sorted elements, places of modes */
    const int64_t found = out / 2, sorted = found / o->sizes[2] * sorted_of(o);
    return (sorted * (int64_t)sizeof(int64_t) + 2 * o->sizes[0] * (int64_t)sizeof(peri_k_sort_entry)) /
               (int64_t)sizeof(float) +
           (o->code == MODE ? 2 * found + sorted : 0);
}

/** Of each sample the elements of its lines, and then their places. */
static void run_order(const run *r)
{
    const int64_t found = r->columns / 2, k = sorted_of(r->o), lines = found / r->o->sizes[2];
    int64_t *places = (int64_t *)(void *)r->c->scratch, *found_places = places;
    peri_k_sort_entry *room = (peri_k_sort_entry *)(void *)(places + lines * k);
    float *sorted = NULL;
    if (r->o->code == MODE) {
        found_places = (int64_t *)(void *)(room + 2 * r->o->sizes[0]);
        sorted = (float *)(void *)(found_places + found);
    }
    for (int64_t b = 0; b < r->n; b++) {
        float *out = r->out + b * r->columns;
        const peri_k_sort_line_args args = {.sort = {.x = in(r, 0) + b * in_step(r, 0),
                                                     .values = sorted ? sorted : out,
                                                     .indices = places,
                                                     .dtype = PERI_F32,
                                                     .descending = r->o->code == FALLING,
                                                     .nan_first = r->o->code == RISING_OR_NAN,
                                                     .lines = lines,
                                                     .n = r->o->sizes[0],
                                                     .first = r->o->sizes[1],
                                                     .k = k},
                                            .room = room};
        CALL(r, sort_line, &args, lines);
        const peri_k_mode_args mode = {.values = out,
                                       .indices = found_places,
                                       .sorted = sorted,
                                       .places = places,
                                       .dtype = PERI_F32,
                                       .n = k};
        if (sorted) CALL(r, mode_line, &mode, lines);
        for (int64_t i = 0; i < found; i++) out[found + i] = (float)found_places[i];
    }
}

enum { SEARCHED = 256 }; /* numbers at a time, whose places are whole */

static void run_search(const run *r)
{
    int64_t places[SEARCHED];
    peri_k_search_args args = {.dst = places,
                               .sorted = in(r, 1),
                               .dtype = PERI_F32,
                               .right = r->o->code == 1,
                               .one = true,
                               .n = in_columns(r, 1),
                               .per_line = SEARCHED};
    for (int64_t first = 0, n; first < r->n * r->columns; first += n) {
        n = peri__min(SEARCHED, r->n * r->columns - first);
        args.x = in(r, 0) + first;
        CALL(r, search, &args, n);
        for (int64_t i = 0; i < n; i++) r->out[first + i] = (float)places[i];
    }
}

/** Dimensions [d, ndim) of one sample of pick, in row-major order; @places moves on with @to. */
static float *pick_elements(const run *r, float *to, const float *x, const float **places, int32_t d)
{
    const int64_t *s = r->o->sizes, *shape = s + 3, *stride = shape + s[2];
    for (int64_t i = 0; i < shape[d]; i++, x += stride[d]) {
        if (d + 1 < s[2]) {
            to = pick_elements(r, to, x, places, d + 1);
            continue;
        }
        const float place = *(*places)++;
        const bool there = place > -1 && place < (float)s[0] && (int64_t)place < s[0]; /* NaN is no place */
        *to++ = there ? x[(int64_t)place * s[1]] : 0;
    }
    return to;
}

static void run_pick(const run *r)
{
    for (int64_t b = 0; b < r->n; b++) {
        const float *places = in(r, 1) + b * in_step(r, 1);
        pick_elements(r, r->out + b * r->columns, in(r, 0) + b * in_step(r, 0), &places, 0);
    }
}

/** Dimensions [d, ndim) of one sample of put, in row-major order; @places and @src move on. */
static void put_elements(const run *r, float *to, const float **places, const float **src, int32_t d)
{
    const int64_t *s = r->o->sizes, *shape = s + 3, *stride = shape + s[2];
    for (int64_t i = 0; i < shape[d]; i++, to += stride[d]) {
        if (d + 1 < s[2]) {
            put_elements(r, to, places, src, d + 1);
            continue;
        }
        const float place = *(*places)++, x = *(*src)++;
        if (!(place > -1 && place < (float)s[0] && (int64_t)place < s[0])) continue; /* NaN is no place */
        float *at = to + (int64_t)place * s[1];
        *at = r->o->code == 1 ? *at + x : x;
    }
}

static void run_put(const run *r)
{
    for (int64_t b = 0; b < r->n; b++) {
        const float *places = in(r, 1) + b * in_step(r, 1), *src = in(r, 2) + b * in_step(r, 2);
        float *out = r->out + b * r->columns;
        memcpy(out, in(r, 0) + b * in_step(r, 0), sizeof *out * (size_t)r->columns);
        put_elements(r, out, &places, &src, 0);
    }
}

/* -- retrieval ----------------------------------------------------------------------------------------------------- */

enum { TOP_QUERIES = 16 }; /* that are looked for in one pass over the items */

int64_t peri__model_top_scratch(const peri_model *m, const peri__model_operation *o)
{
    return TOP_QUERIES * o->sizes[0] * 6 + PERI_NEAREST_ROWS * m->tables[o->table].columns;
}

/** Of each sample the scores of the items with the largest products, and then their numbers. */
static void run_top(const run *r)
{
    const peri_model *m = r->c->model;
    const peri_model_table *t = &m->tables[r->o->table];
    const peri__model_rows *rows = &m->rows[r->o->table];
    const int64_t k = r->o->sizes[0], room = TOP_QUERIES * k;
    int64_t *found = (int64_t *)(void *)r->c->scratch;
    float *scores = (float *)(found + 2 * room);
    peri_k_nearest_args a = {.op = {.items = peri__model_data(m, rows->section),
                                    .scores = scores,
                                    .indices = found,
                                    .n_items = t->rows,
                                    .dim = t->columns,
                                    .k = k,
                                    .stride = rows->row_bytes,
                                    .dtype = rows->format},
                             .part_scores = scores + room,
                             .part_indices = found + room,
                             .rows = scores + 2 * room,
                             .parts = 1};
    if (peri__rows_are_bytes(rows->format)) {
        const peri_row_format format = peri__tbe_row_format(rows->format);
        /* all formats of tables have one */
        if (peri__rows_layout("peri_model_predict", &format, t->columns, &a.op.format) < 0) return;
    }
    for (int64_t q = 0; q < r->n; q += a.op.n_queries) {
        a.op.n_queries = peri__min(TOP_QUERIES, r->n - q);
        a.op.queries = in(r, 0) + q * t->columns;
        CALL(r, nearest_part, &a, 1);
        CALL(r, nearest_merge, &a, a.op.n_queries);
        for (int64_t i = 0; i < a.op.n_queries; i++) {
            float *out = r->out + (q + i) * r->columns;
            memcpy(out, scores + i * k, sizeof *out * (size_t)k);
            for (int64_t j = 0; j < k; j++) out[k + j] = (float)found[i * k + j];
        }
    }
}

/* -- all of them --------------------------------------------------------------------------------------------------- */

enum { ROWS_ASKED = 32 << 10 }; /* bytes */

static void (*const functions[PERI__MODEL_OPERATION_COUNT])(const run *r) = {
#define X(name, least, most) run_##name,
    PERI__MODEL_OF_SAMPLES(X)
#undef X
#define X(name, least, most) peri__run_##name,
    PERI__MODEL_OF_MEMBERS(X)
#undef X
};

/** The members of lists of inputs, those of sample @first being the first ones. */
static void lists_of_block(peri_model_context *c, int64_t first, int64_t n, const peri_model_values *inputs)
{
    const peri_model *m = c->model;
    for (int32_t l = 0; l < m->n_lists; l++) {
        const int64_t *offsets = m->lists[l].n_inputs > 0 ? inputs[m->lists[l].first].offsets : NULL;
        for (int64_t b = 0; b <= n; b++)
            peri__model_list_of(c, l)[b] = offsets ? offsets[first + b] - offsets[first] : 0;
    }
}

/** The numbers of samples from @first on, or of their lists' members, that the caller gives for value @v. */
static const float *given_numbers(const peri_model_context *c, int32_t v, int64_t first,
                                  const peri_model_values *inputs)
{
    const peri__model_value *value = &c->model->values[v];
    const peri_model_values *from = &inputs[value->input];
    if (value->list < 0) return from->dense ? from->dense + first * value->columns : c->values[v];
    return from->weights ? from->weights + from->offsets[first] : NULL; /* NULL: there are no members */
}

/** Ask for the first rows of all lookups. Each bag is of another table: a few samples would wait for memory once for
 *  each of them, and it has time while the operations before the lookup run. */
static void ask_for_rows(const run *r)
{
    const peri_model *m = r->c->model;
    int64_t left = ROWS_ASKED;
    for (int32_t i = 0; i < m->n_operations && left > 0; i++) {
        const peri__model_operation *o = &m->operations[i];
        for (int32_t b = 0; o->kind == PERI__MODEL_lookup && b < o->n_bags && left > 0; b++)
            left -= peri__model_ask_for(r, &o->bags[b], left);
    }
}

/** Run all operations of the model for samples [first, first + n). */
static void run_samples(peri_model_context *c, int64_t first, int64_t n, const peri_model_values *inputs)
{
    const peri_model *m = c->model;
    PERI__OWN_FLOATS;
    run r = {.c = c, .kernels = peri_kernels_get(), .inputs = inputs, .first = first, .samples = n};
    ask_for_rows(&r);
    lists_of_block(c, first, n, inputs);
    for (int32_t v = 0; v < m->n_values; v++)
        if (m->values[v].input >= 0) c->at[v] = given_numbers(c, v, first, inputs);
    for (int32_t i = 0; i < m->n_operations; i++) {
        r.o = &m->operations[i];
        r.out = c->values[r.o->out];
        const peri__model_value *v = &m->values[r.o->out];
        r.columns = v->columns;
        const bool keeps = r.o->kind == PERI__MODEL_select || r.o->kind == PERI__MODEL_slice; /* makes its list */
        r.n = v->list < 0 || keeps ? n : peri__model_list_of(c, v->list)[n];
        if (r.n > 0) functions[r.o->kind](&r);
    }
}

/** Numbers of output @i for samples [first, first + n), behind those of the samples before. */
static void give_output(const peri_model_context *c, int32_t i, int64_t first, int64_t n, float *to, int64_t *offsets)
{
    const int64_t columns = c->model->outputs[i].columns;
    const float *result = c->values[c->model->output_values[i]];
    int64_t at = first, count = n;
    if (peri__model_output_list(c->model, i) >= 0) {
        const int64_t *list = peri__model_list_of(c, c->model->values[c->model->output_values[i]].list);
        at = offsets[first];
        count = list[n];
        for (int64_t b = 0; b < n; b++) offsets[first + b + 1] = at + list[b + 1];
    }
    memcpy(to + at * columns, result, sizeof(float) * (size_t)(count * columns));
}

static peri_status check_outputs(const char *function, const peri_model *m, float *const *outputs,
                                 int64_t *const *offsets)
{
    if (!outputs) return peri__fail(PERI_EINVAL, "%s: outputs is missing", function);
    for (int32_t i = 0; i < m->n_outputs; i++) {
        if (!outputs[i] || peri__model_output_list(m, i) < 0) continue;
        if (!offsets)
            return peri__fail(PERI_EUNSUPPORTED,
                              "%s: output '%s' is a list of each sample, allowed: with peri_model_predict_lists",
                              function, m->outputs[i].name);
        if (!offsets[i])
            return peri__fail(PERI_EINVAL, "%s: output '%s' is a list of each sample, and its offsets are missing",
                              function, m->outputs[i].name);
        offsets[i][0] = 0;
    }
    return PERI_OK;
}

static peri_status predict_batch(const char *function, peri_model_context *context, int64_t batch,
                                 const peri_model_values *inputs, float *const *outputs, int64_t *const *offsets)
{
    const peri_model *m = context->model;
    if (batch < 0 || batch > context->max_batch)
        return peri__fail(PERI_EINVAL, "%s: %lld samples, allowed with this context: 0..%lld", function,
                          (long long)batch, (long long)context->max_batch);
    PERI_TRY(peri__model_values(function, m, batch, context->max_ids, inputs, NULL));
    PERI_TRY(check_outputs(function, m, outputs, offsets));
    if (m->file.slot < 0) PERI_TRY(peri__model_unchanged(function, m)); /* nobody catches a read behind its end */
    for (int64_t first = 0, n; first < batch; first += n) {
        n = peri__model_block_of(context, first, batch, inputs);
        run_samples(context, first, n, inputs);
        for (int32_t i = 0; i < m->n_outputs; i++)
            if (outputs[i]) give_output(context, i, first, n, outputs[i], offsets ? offsets[i] : NULL);
    }
    return peri__model_unchanged(function, m);
}

peri_status peri_model_predict(peri_model_context *context, int64_t batch, const peri_model_values *inputs,
                               float *const *outputs)
{
    PERI_NEED(context);
    return predict_batch("peri_model_predict", context, batch, inputs, outputs, NULL);
}

peri_status peri_model_predict_lists(peri_model_context *context, int64_t batch, const peri_model_values *inputs,
                                     float *const *outputs, int64_t *const *offsets)
{
    static const char f[] = "peri_model_predict_lists";
    PERI_NEED(context);
    if (!offsets) return peri__fail(PERI_EINVAL, "%s: offsets is missing", f);
    return predict_batch(f, context, batch, inputs, outputs, offsets);
}
