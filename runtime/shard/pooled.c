/* SPDX-License-Identifier: Apache-2.0
 *
 * pooled.c: the stages of a sharded EmbeddingBagCollection, whose owners return one pooled row for each bag.
 *
 * A bag of mean pooling may be cut between owners, of whom each sees some of its ids only. So its home sends the factor of its mean with
 * it, and owners pool sums of rows times that factor.
 *
 * In exact mode rows of bags that may be cut come home one by one (peri__rule.to_homes) and are pooled here, as an unsharded lookup would;
 * the gradient that goes back is that of the bag all the same. Where the ids' weights want a gradient all rows come so, and it is made here
 * too: a sum over columns and tables has one order only if one rank makes it.
 */
#include "module.h"

#include "../base/tune.h"

static peri_status mean_factors(const peri__routing *r, peri_tensor *out)
{
    const peri__router *o = r->router;
    const peri__outbound *h = r->outbound;
    peri_k_route_mean_args args = {.scale = peri__data(out), .offsets = peri__data(r->offsets_in),
                                   .partitions = peri__upload_at(&h->up, h->partitions), .wire_bag = peri__upload_at(&h->up, h->wire_bag),
                                   .n_partitions = o->routes->n_partitions};
    return PERI_LAUNCH(o->device, route_mean, &args, h->bags, 1 << 13);
}

/** Write element @i of an array of the layout. */
static void put(peri__home *h, int64_t array, int32_t i, const void *x, size_t size)
{
    memcpy(h->up.host + array + (int64_t)size * i, x, size);
}

/** Output @i of pooled rows, of the pieces [first, first + n). */
static void add_output(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a, int32_t i,
                       int32_t first, int32_t n)
{
    const peri__output *o = &r->outputs[i];
    peri_k_output k = {.column = o->column, .cols = o->cols, .first_piece = first, .n_pieces = n,
                       .inverse = a->inverse ? a->inverse[o->feature] : -1, .divisor = a->divisor[o->table],
                       .sent_divisor = a->sent_divisor[o->table]};
    put(h, h->output_bags, h->n_outputs, &h->feature_rows[o->feature], sizeof(int64_t));
    h->output_feature[h->n_outputs] = o->feature;
    put(h, h->outputs, h->n_outputs++, &k, sizeof k);
    for (int32_t p = first; p < first + n; p++) {
        peri_k_piece piece = peri__home_piece(r, h, rank, at, r->pieces[p]);
        put(h, h->pieces, p, &piece, sizeof piece);
    }
}

/** Output @i, whose rows are of ids; of a copy: piece @copy. With a variable batch the gradient of its bags gets a place of its own. */
static void add_pool(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a, int32_t i,
                     int32_t copy)
{
    const peri__output *o = &r->outputs[i];
    bool last = i + 1 == r->n_outputs || r->outputs[i + 1].table != o->table || r->outputs[i + 1].feature != o->feature;
    int64_t from = 0;
    for (int32_t b = i; b > 0 && r->outputs[b - 1].table == o->table && r->outputs[b - 1].feature == o->feature; b--)
        from += r->outputs[b - 1].cols;
    peri_k_pool k = {.rows = peri__home_rows(r, h, rank, at, o, copy), .first_bag = h->feature_first[o->feature],
                     .bags = h->feature_rows[o->feature], .inverse = a->inverse ? a->inverse[o->feature] : -1, .from = from,
                     .grad = o->column, .grad_stride = r->out_cols, .mean = a->mean[o->table], .last = last};
    k.rows.column = o->column;
    if (a->inverse) {
        peri_k_output bag = {.column = o->column, .cols = o->cols, .first_piece = h->n_pools, .n_pieces = 1, .inverse = k.inverse,
                             .divisor = 1, .sent_divisor = 1};
        peri_k_piece piece = {.own = true, .offset = h->bag_out};
        k.grad = h->bag_out;
        k.grad_stride = o->cols;
        put(h, h->bag_outputs, h->n_pools, &bag, sizeof bag);
        put(h, h->bag_pieces, h->n_pools, &piece, sizeof piece);
        put(h, h->bag_numbers, h->n_pools, &k.bags, sizeof k.bags);
        h->bag_out += o->cols * k.bags;
    }
    put(h, h->pools, h->n_pools++, &k, sizeof k);
}

/** Arrays for all outputs, and as many pools if there are any. */
static peri_status make_arrays(const peri__routes *r, peri__home *h, peri_device *device)
{
    int64_t pools = h->strand_ids ? r->n_outputs : 0, bags = h->variable ? pools : 0;
    h->outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_output) * r->n_outputs);
    h->pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * r->n_pieces);
    h->output_bags = peri__upload_add(&h->up, (int64_t)sizeof(int64_t) * r->n_outputs);
    h->pools = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_pool) * pools);
    h->bag_outputs = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_output) * bags);
    h->bag_pieces = peri__upload_add(&h->up, (int64_t)sizeof(peri_k_piece) * bags);
    h->bag_numbers = peri__upload_add(&h->up, (int64_t)sizeof(int64_t) * bags);
    return peri__upload_open(&h->up, device);
}

/** Output @i, of rows that are pooled here or elsewhere. */
static void add(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a, int32_t i,
                const peri__partition *p)
{
    const peri__output *o = &r->outputs[i];
    const bool own = h->rule.to_homes && p->copied; /* of copies, that of this rank */
    h->most_bags = peri__max(h->most_bags, h->feature_rows[o->feature]);
    if (peri__rows_by_id(h->rule, p)) add_pool(r, h, rank, at, a, i, own ? rank : -1);
    else add_output(r, h, rank, at, a, i, o->first_piece + (own ? rank : 0), own ? 1 : o->n_pieces);
}

static peri_status lay_out(const peri__routes *r, peri__home *h, int32_t rank, const int64_t *at, const peri__home_args *a)
{
    PERI_TRY(make_arrays(r, h, a->device));
    h->output_feature = peri__alloc(sizeof *h->output_feature * (size_t)peri__max(1, r->n_outputs));
    if (!h->output_feature) return PERI_ENOMEM;
    h->joined_rows = h->rows;
    for (int stays = 0; stays < 2; stays++) {
        for (int32_t i = 0; i < r->n_outputs; i++) {
            const peri__output *o = &r->outputs[i];
            const peri__piece *piece = &r->pieces[o->first_piece];
            const peri__partition *p = piece->rank < 0 ? &r->partitions[r->replicas[piece->lookup].partition]
                                                       : &r->partitions[r->strands[r->lookups[piece->lookup].strand].partition];
            const bool replica = piece->rank < 0 && !peri__rows_by_id(h->rule, p);
            if (replica != stays) continue;
            if (replica) h->replica_column[piece->lookup] = o->column;
            add(r, h, rank, at, a, i, p);
        }
        if (!stays) h->n_moved = h->n_outputs;
    }
    return PERI_OK;
}

/** What the kernels of pools want to know, but for what they are about. */
static peri_k_route_pool_args pool_args(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *own,
                                        peri_tensor *received)
{
    const peri__outbound *o = h->outbound;
    return (peri_k_route_pool_args){
        .rows = {.stride = e->cols, .received = peri__data(received), .own = peri__data(own), .ids = peri__data(given->ids),
                 .places = given->places ? peri__data(given->places) : NULL, .partitions = peri__upload_at(&o->up, o->partitions),
                 .bounds = peri__upload_at(&o->up, o->bounds), .pieces = peri__upload_at(&h->up, h->pieces),
                 .ids_i32 = given->ids->dtype == PERI_I32},
        .pools = peri__upload_at(&h->up, h->pools), .offsets = peri__data(given->offsets),
        .inverse = given->inverse ? peri__data(given->inverse) : NULL, .weights = given->weights ? peri__data(given->weights) : NULL,
        .n_pools = h->n_pools};
}

/** Whether @n numbers are written past the caches, which the ranks of a node share. */
static bool past_caches(const peri_sharded *e, int64_t n)
{
    const int64_t least = peri__tune(PERI__TUNE_lookup_past);
    return least > 0 && n * e->node_group->size * (int64_t)sizeof(float) >= least;
}

/** The outputs that are left, if @direct moves some rows; each with the number of its bags. */
typedef struct left_outputs {
    peri_k_output *outputs;
    int64_t *bags;
    int32_t n;
} left_outputs;

/** Of @n outputs, those whose rows are to be combined; or (@back), piece by piece, those to which gradients are to be spread: @placed: own
 *  pieces are read in place. */
static peri_status outputs_left(const peri__home *h, int32_t n, const peri__direct *direct, bool back, bool placed, left_outputs *left)
{
    const peri_k_output *all = peri__upload_at(&h->up, h->outputs);
    const peri_k_piece *pieces = peri__upload_at(&h->up, h->pieces);
    const int64_t *bags = peri__upload_at(&h->up, h->output_bags);
    int64_t most = n;
    for (int32_t o = 0; o < n && back; o++) most += all[o].n_pieces;
    left->outputs = peri__alloc((sizeof *left->outputs + sizeof *left->bags) * (size_t)peri__max(1, most));
    if (!left->outputs) return PERI_ENOMEM;
    left->bags = (int64_t *)(left->outputs + most);
    left->n = 0;
    for (int32_t o = 0; o < n; o++) {
        const int64_t first = all[o].first_piece, end = first + all[o].n_pieces, step = back ? 1 : peri__max(1, all[o].n_pieces);
        for (int64_t k = first; k < end; k += step) {
            if ((back || step == 1) && peri__direct_has(direct, &pieces[k])) continue;
            if (back && placed && pieces[k].own) continue;
            left->outputs[left->n] = all[o];
            left->outputs[left->n].first_piece = k;
            left->outputs[left->n].n_pieces = step;
            left->bags[left->n++] = bags[o];
        }
    }
    return PERI_OK;
}

/** Of the outputs whose rows are there, those of all samples but the first of each bag. */
static peri_status copy_repeats(const peri__home *h, peri__repeats *repeats, int there, const peri__direct *direct, peri_tensor *out)
{
    const peri_k_output *outputs = peri__upload_at(&h->up, h->outputs);
    const peri_k_piece *pieces = peri__upload_at(&h->up, h->pieces);
    bool *copied = peri__alloc(sizeof *copied * (size_t)peri__max(1, h->n_outputs));
    if (!copied) return PERI_ENOMEM;
    for (int32_t o = 0; o < h->n_outputs; o++) {
        const peri_k_piece *piece = &pieces[outputs[o].first_piece];
        if (o >= h->n_moved) copied[o] = there & PERI__REPLICAS_THERE;
        else copied[o] = outputs[o].n_pieces == 1 && (piece->own ? there & PERI__OWN_THERE : peri__direct_has(direct, piece));
    }
    peri__repeats_copy(repeats, copied, out);
    peri__free(copied);
    return PERI_OK;
}

static peri_status combine(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *own, peri_tensor *received,
                           int there, const peri__direct *direct, peri_tensor *out)
{
    peri_tensor *inverse = given->inverse;
    left_outputs left = {0};
    peri_k_route_combine_args args = {.out = peri__data(out), .stride = e->routes->out_cols, .received = peri__data(received),
                                      .own = peri__data(own), .outputs = peri__upload_at(&h->up, h->outputs),
                                      .pieces = peri__upload_at(&h->up, h->pieces), .inverse = inverse ? peri__data(inverse) : NULL,
                                      .n_outputs = there & PERI__REPLICAS_THERE ? h->n_moved : h->n_outputs,
                                      .placed = there & PERI__OWN_THERE,
                                      .past = past_caches(e, h->rows * e->routes->out_cols)};
    if (direct) {
        PERI_TRY(outputs_left(h, args.n_outputs, direct, false, false, &left));
        args.outputs = left.outputs;
        args.n_outputs = left.n;
    }
    peri_status status = args.n_outputs ? PERI_LAUNCH(e->device, route_combine, &args, h->rows, 64) : PERI_OK;
    peri__free(left.outputs);
    PERI_TRY(status);
    if (given->repeats) PERI_TRY(copy_repeats(h, given->repeats, there, direct, out));
    if (!h->n_pools) return PERI_OK;
    peri_k_route_pool_args pool = pool_args(e, h, given, own, received);
    pool.rows.values = peri__data(out);
    return PERI_LAUNCH(e->device, route_pool, &pool, h->rows, 16);
}

/** Bags that one thread takes at a time; with a variable batch each of them looks through all rows. */
static int64_t spread_grain(const peri__home *h)
{
    enum { LEAST = 64, MOST_PARTS = 16 };
    return h->variable ? peri__max(LEAST, peri__ceil_div(h->most_bags, MOST_PARTS)) : LEAST;
}

static peri_status spread(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                          peri_tensor *sent, int there, const peri__direct *direct)
{
    peri_tensor *inverse = given->inverse;
    left_outputs left = {0};
    peri_k_route_spread_args args = {.grad = peri__data(grad), .stride = e->routes->out_cols, .rows = h->rows, .sent = peri__data(sent),
                                     .own = peri__data(own), .outputs = peri__upload_at(&h->up, h->outputs),
                                     .pieces = peri__upload_at(&h->up, h->pieces), .bags = peri__upload_at(&h->up, h->output_bags),
                                     .inverse = inverse ? peri__data(inverse) : NULL,
                                     .n_outputs = there & PERI__REPLICAS_THERE ? h->n_moved : h->n_outputs,
                                     .placed = there & PERI__OWN_THERE, .past = past_caches(e, h->received_out)};
    if (direct) {
        PERI_TRY(outputs_left(h, args.n_outputs, direct, true, args.placed, &left));
        args.outputs = left.outputs;
        args.bags = left.bags;
        args.n_outputs = left.n;
    }
    peri_status status = args.n_outputs ? PERI_LAUNCH(e->device, route_spread, &args, h->most_bags, spread_grain(h)) : PERI_OK;
    peri__free(left.outputs);
    return status;
}

/** The gradients of the bags of a variable batch, where the pools expect them. @out new. */
static peri_status bag_gradients(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor **out)
{
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 1, &h->bag_out, out));
    peri_k_route_spread_args args = {.grad = peri__data(grad), .stride = e->routes->out_cols, .rows = h->rows, .own = peri__data(*out),
                                     .outputs = peri__upload_at(&h->up, h->bag_outputs),
                                     .pieces = peri__upload_at(&h->up, h->bag_pieces), .bags = peri__upload_at(&h->up, h->bag_numbers),
                                     .inverse = peri__data(given->inverse), .n_outputs = h->n_pools};
    peri_status status = PERI_LAUNCH(e->device, route_spread, &args, h->most_bags, spread_grain(h));
    if (status < 0) peri_tensor_release(*out);
    return status;
}

peri_status peri__pooled_weights(const peri_sharded *e, const peri__home *h, const peri__given *given, peri_tensor *grad, peri_tensor *own,
                                 peri_tensor *received, peri_tensor **out)
{
    peri_tensor *bags = NULL;
    int64_t n = peri__numel(given->ids);
    if (h->variable) PERI_TRY(bag_gradients(e, h, given, grad, &bags));
    peri_status status = peri_tensor_full(e->device, PERI_F32, 1, &n, 0, out);
    if (status >= 0) {
        peri_k_route_pool_args args = pool_args(e, h, given, own, received);
        args.grad = peri__data(bags ? bags : grad);
        args.grad_weights = peri__data(*out);
        status = PERI_LAUNCH(e->device, route_pool_weights, &args, h->most_bags, 64);
        if (status < 0) peri_tensor_release(*out);
    }
    peri_tensor_release(bags);
    return status;
}

const peri__kind peri__pooled = {.name = "EmbeddingBagCollection", .lay_out = lay_out, .by_bag = mean_factors, .combine = combine,
                                 .spread = spread};
