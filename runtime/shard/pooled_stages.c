/* SPDX-License-Identifier: Apache-2.0
 *
 * pooled_stages.c: the stages of a sharded EmbeddingBagCollection, whose owners return one pooled row for each bag.
 *
 * A bag of mean pooling may be cut between owners, of whom each sees some of its ids only. So its home sends the factor
 * of its mean with it, and owners pool sums of rows times that factor.
 *
 * In exact mode rows of bags that may be cut come home one by one (peri__rule.to_homes) and are pooled here, as an
 * unsharded lookup would; the gradient that goes back is that of the bag all the same. Where the ids' weights want a
 * gradient all rows come so, and it is made here too: a sum over columns and tables has one order only if one rank
 * makes it.
 */
#include "rows.h"
#include "../../kernels/route.h"

#include "../base/tune.h"

static peri_status mean_factors(const peri__routing *r, peri_tensor *out)
{
    peri_k_route_mean_args args = {.in = peri__routing_ids(r), .scale = peri__data(out)};
    return PERI_LAUNCH(r->router->device, route_mean, &args, args.in.bags, 1 << 13);
}

/** Write element @i of an array of the layout. */
static void write_element(peri__home *h, int64_t array, int32_t i, const void *x, size_t size)
{
    memcpy(h->up.host + array + (int64_t)size * i, x, size);
}

/** As peri_k_output.inverse. */
static int64_t inverse_at(const peri__home *h, const peri__output *o)
{
    return h->variable ? h->feature_inverse[o->feature] : -1;
}

/** Output @i of pooled rows, of the pieces [first, first + n). */
static void add_output(peri__home *h, int32_t i, int32_t first, int32_t n)
{
    const peri_sharded *e = h->e;
    const peri__output *o = &e->routes->outputs[i];
    const peri_k_output k = {.column = o->column,
                             .cols = o->cols,
                             .first_piece = first,
                             .n_pieces = n,
                             .inverse = inverse_at(h, o),
                             .divisor = e->tables[o->table].divisor,
                             .sent_divisor = e->tables[o->table].sent_divisor};
    write_element(h, h->output_bags, h->n_outputs, &h->feature_rows[o->feature], sizeof(int64_t));
    h->output_feature[h->n_outputs] = o->feature;
    write_element(h, h->outputs, h->n_outputs++, &k, sizeof k);
}

/** Output @i, whose rows are of ids; of a copy: piece @copy. With a variable batch the gradient of its bags gets a
 *  place of its own. */
static void add_pool(peri__home *h, int32_t i, int32_t copy)
{
    const peri__routes *r = h->e->routes;
    const peri__output *o = &r->outputs[i];
    bool last = i + 1 == r->n_outputs || r->outputs[i + 1].table != o->table || r->outputs[i + 1].feature != o->feature;
    int64_t from = 0;
    for (int32_t b = i; b > 0 && r->outputs[b - 1].table == o->table && r->outputs[b - 1].feature == o->feature; b--)
        from += r->outputs[b - 1].cols;
    peri_k_pool k = {.rows = peri__home_rows(h, o, copy),
                     .first_bag = h->feature_first[o->feature],
                     .bags = h->feature_rows[o->feature],
                     .inverse = inverse_at(h, o),
                     .from = from,
                     .grad = o->column,
                     .grad_stride = r->out_cols,
                     .mean = h->e->tables[o->table].mean,
                     .last = last};
    k.rows.column = o->column;
    if (h->variable) {
        peri_k_output bag = {.column = o->column,
                             .cols = o->cols,
                             .first_piece = h->n_pools,
                             .n_pieces = 1,
                             .inverse = k.inverse,
                             .divisor = 1,
                             .sent_divisor = 1};
        peri_k_piece piece = {.own = true, .offset = h->bag_out};
        k.grad = h->bag_out;
        k.grad_stride = o->cols;
        write_element(h, h->bag_outputs, h->n_pools, &bag, sizeof bag);
        write_element(h, h->bag_pieces, h->n_pools, &piece, sizeof piece);
        write_element(h, h->bag_numbers, h->n_pools, &k.bags, sizeof k.bags);
        h->bag_out += o->cols * k.bags;
    }
    write_element(h, h->pools, h->n_pools++, &k, sizeof k);
}

/** Arrays for all outputs, and as many pools if there are any. */
static peri_status make_arrays(peri__home *h)
{
    const peri__routes *r = h->e->routes;
    int64_t pools = h->counted ? r->n_outputs : 0, bags = h->variable ? pools : 0;
    h->outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_output) * r->n_outputs);
    h->pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    h->output_bags = peri__upload_add(&h->up, (int64_t)sizeof(int64_t) * r->n_outputs);
    h->pools = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_pool) * pools);
    h->bag_outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_output) * bags);
    h->bag_pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * bags);
    h->bag_numbers = peri__upload_add(&h->up, (int64_t)sizeof(int64_t) * bags);
    return peri__upload_open(&h->up, h->e->device);
}

static peri_status lay_out_pooled_home(peri__home *h)
{
    const peri__routes *r = h->e->routes;
    PERI_TRY(make_arrays(h));
    h->output_feature = peri__alloc(sizeof *h->output_feature * (size_t)peri__max(1, r->n_outputs));
    if (!h->output_feature) return PERI_ENOMEM;
    h->joined_rows = h->rows;
    for (int32_t i = 0; i < r->n_outputs; i++) {
        const peri__output *o = &r->outputs[i];
        const peri__partition *p = peri__piece_partition(r, o->first_piece);
        const bool own = h->rule.to_homes && p->copied; /* of copies, that of this rank */
        h->most_bags = peri__max(h->most_bags, h->feature_rows[o->feature]);
        if (peri__rows_by_id(h->rule, p)) add_pool(h, i, own ? h->e->rank : -1);
        else add_output(h, i, o->first_piece + (own ? h->e->rank : 0), own ? 1 : o->n_pieces);
    }
    return PERI_OK;
}

/** What the kernels of pools want to know, but for what they are about. @rows: whose buffers have the rows of ids. */
static peri_k_route_pool_args pool_args(const peri__rows *rows)
{
    const peri__home *h = rows->layout->home;
    const peri__input_dist *d = rows->input;
    const peri__routing *r = &d->routing;
    return (peri_k_route_pool_args){.rows = {.in = peri__routing_ids(r),
                                             .stride = rows->e->cols,
                                             .received = peri__data(rows->away),
                                             .own = peri__data(rows->own),
                                             .places = r->places ? peri__data(r->places) : NULL,
                                             .pieces = peri__upload_at(&h->up, h->pieces)},
                                    .pools = peri__upload_at(&h->up, h->pools),
                                    .inverse = d->inverse ? peri__data(d->inverse) : NULL,
                                    .weights = r->weights ? peri__data(r->weights) : NULL,
                                    .n_pools = h->n_pools};
}

/** Whether @n numbers are written past the caches, which the ranks of a node share. */
static bool past_caches(const peri_sharded *e, int64_t n)
{
    const int64_t least = peri__tune(PERI__TUNE_lookup_past);
    return least > 0 && n * e->node_group->size * (int64_t)sizeof(float) >= least;
}

/** Add output @o, of @bags bags, or those of its pieces whose gradients go through the buffer. */
static void add_left(const peri__rows *rows, const peri_k_output *o, int64_t bags, peri__left *left)
{
    const int64_t step = rows->back ? 1 : o->n_pieces;
    for (int64_t p = o->first_piece; p < o->first_piece + o->n_pieces; p += step) {
        const peri__line line = peri__home_line(rows->layout->home, (int32_t)p);
        if (peri__rows_in_place(rows, &line)) continue;
        peri_k_output *to = (peri_k_output *)(left->up.host + left->outputs) + left->n;
        *to = *o;
        to->first_piece = p;
        to->n_pieces = step;
        ((int64_t *)(left->up.host + left->bags))[left->n++] = bags;
    }
}

static peri_status list_outputs_left(const peri__rows *rows, peri__left *left)
{
    const peri__home *h = rows->layout->home;
    const int64_t most = rows->back ? rows->e->routes->n_pieces : h->n_outputs;
    left->outputs = peri__upload_add(&left->up, (int64_t)sizeof(peri_k_output) * most);
    left->bags = peri__upload_add(&left->up, (int64_t)sizeof(int64_t) * most);
    PERI_TRY(peri__upload_open(&left->up, rows->e->device));
    for (int32_t o = 0; o < h->n_outputs; o++)
        add_left(rows, (const peri_k_output *)(h->up.host + h->outputs) + o, h->feature_rows[h->output_feature[o]],
                 left);
    return peri__upload_send(&left->up);
}

static peri_status combine_pooled_rows(const peri__rows *rows)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    const peri__input_dist *d = rows->input;
    float *out = peri__data(rows->ends[0]);
    peri__to_move left;
    PERI_TRY(peri__rows_list_left(rows, &left));
    peri_k_route_combine_args args = {.out = out,
                                      .stride = e->cols,
                                      .received = peri__data(rows->away),
                                      .own = peri__data(rows->own),
                                      .outputs = left.outputs,
                                      .pieces = peri__upload_at(&h->up, h->pieces),
                                      .n_outputs = left.n,
                                      .inverse = d->inverse ? peri__data(d->inverse) : NULL,
                                      .past = past_caches(e, h->rows * e->cols)};
    if (left.n) PERI_TRY(PERI_LAUNCH(e->device, route_combine, &args, h->rows, 64));
    if (d->repeats) peri__repeats_copy(d->repeats, rows);
    if (!h->n_pools) return PERI_OK;
    peri_k_route_pool_args pool = pool_args(rows);
    pool.rows.values = out;
    return PERI_LAUNCH(e->device, route_pool, &pool, h->rows, 16);
}

/** Bags that one thread takes at a time; with a variable batch each of them looks through all rows. */
static int64_t spread_grain(const peri__home *h)
{
    enum { LEAST = 64, MOST_PARTS = 16 };
    return h->variable ? peri__max(LEAST, peri__ceil_div(h->most_bags, MOST_PARTS)) : LEAST;
}

static peri_status spread_pooled_gradients(const peri__rows *rows)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    const peri_tensor *inverse = rows->input->inverse;
    peri__to_move left;
    PERI_TRY(peri__rows_list_left(rows, &left));
    peri_k_route_spread_args args = {.grad = peri__data(rows->ends[0]),
                                     .stride = rows->stride,
                                     .rows = h->rows,
                                     .sent = peri__data(rows->away),
                                     .own = peri__data(rows->own),
                                     .outputs = left.outputs,
                                     .pieces = peri__upload_at(&h->up, h->pieces),
                                     .n_outputs = left.n,
                                     .bags = left.bags,
                                     .inverse = inverse ? peri__data(inverse) : NULL,
                                     .past = past_caches(e, h->received_out)};
    return left.n ? PERI_LAUNCH(e->device, route_spread, &args, h->most_bags, spread_grain(h)) : PERI_OK;
}

/** The gradients of the bags of a variable batch, where the pools expect them. @out new. */
static peri_status bag_gradients(const peri__rows *rows, peri_tensor *grad, peri_tensor **out)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    PERI__HELD peri_tensor *bags = NULL;
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 1, &h->bag_out, &bags));
    peri_k_route_spread_args args = {.grad = peri__data(grad),
                                     .stride = e->cols,
                                     .rows = h->rows,
                                     .own = peri__data(bags),
                                     .outputs = peri__upload_at(&h->up, h->bag_outputs),
                                     .pieces = peri__upload_at(&h->up, h->bag_pieces),
                                     .bags = peri__upload_at(&h->up, h->bag_numbers),
                                     .inverse = peri__data(rows->input->inverse),
                                     .n_outputs = h->n_pools};
    PERI_TRY(PERI_LAUNCH(e->device, route_spread, &args, h->most_bags, spread_grain(h)));
    *out = peri__hand_over(&bags);
    return PERI_OK;
}

peri_status peri__pooled_weights(const peri__rows *rows, peri_tensor *grad, peri_tensor **out)
{
    const peri_sharded *e = rows->e;
    const peri__home *h = rows->layout->home;
    PERI__HELD peri_tensor *bags = NULL, *weights = NULL;
    int64_t n = peri__numel(rows->input->routing.values);
    if (h->variable) PERI_TRY(bag_gradients(rows, grad, &bags));
    PERI_TRY(peri_tensor_full(e->device, PERI_F32, 1, &n, 0, &weights));
    peri_k_route_pool_args args = pool_args(rows);
    args.grad = peri__data(bags ? bags : grad);
    args.grad_weights = peri__data(weights);
    PERI_TRY(PERI_LAUNCH(e->device, route_pool_weights, &args, h->most_bags, 64));
    *out = peri__hand_over(&weights);
    return PERI_OK;
}

const peri__kind peri__pooled = {.name = "EmbeddingBagCollection",
                                 .lay_out = lay_out_pooled_home,
                                 .list = list_outputs_left,
                                 .by_bag = mean_factors,
                                 .combine = combine_pooled_rows,
                                 .spread = spread_pooled_gradients};
