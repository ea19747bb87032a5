/* SPDX-License-Identifier: Apache-2.0
 *
 * output_dist.c: lookups of what arrived, pooled rows back to the ranks that asked, and the same way in reverse for gradients.
 *
 * The owner's buffer holds pooled rows as [own slots | replicas | rank 0's | rank 1's ...]: what belongs to this rank itself comes first
 * and is never sent; then what others get, lane after lane, in each rank after rank. The home side's buffer holds what other ranks return,
 * likewise by lane and rank. Gradients use two buffers of the same layouts, the other way round. The rows of a lane with a codec travel
 * encoded.
 *
 * On the tape a batch is two nodes. The later one, `output_dist`, starts the exchange of the gradient in its backward; the earlier one,
 * `lookup`, waits for it in its own and updates the shards. A pass does all else between them (tensor/backward.c), while the gradient
 * travels.
 */
#include "exchange.h"

/** Rows on their way, in one direction. */
typedef struct transit {
    peri_work *work[PERI__LANES];     /* NULL: none, or here */
    peri_tensor *coded[PERI__LANES];  /* what arrives encoded; NULL: numbers arrive where they belong */
} transit;

/** A batch between its lookup and the end of its backward pass; shared by the work and the two nodes. */
typedef struct batch {
    peri__refs refs;
    peri_sharded_ebc *ebc;
    peri__bag_layout *layout;
    peri_tbe_batch **looks;      /* by group: its lookup */
    peri_tensor *home_weights, *inverse;
    peri__weights_dist *weights_dist;                 /* NULL: the weights want no gradient */
    /* Backward: */
    transit gradient;            /* the exchange of the gradient */
    peri_tensor *sent;           /* its buffer on the home side */
    peri_tensor **replica_flat;  /* by group: gradients of fused replicas, being reduced */
    peri_work **replica_work;    /* by group */
} batch;

/** The work of peri_sharded_ebc_compute_and_output_dist. */
typedef struct output_dist {
    peri_work base;
    batch *batch;
    peri_tensor *buffer, *received;
    transit exchange;
    bool used, recorded;
} output_dist;

static const peri__work_vtab output_vtab;

static void transit_fini(transit *t)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        peri_work_release(t->work[lane]);
        peri_tensor_release(t->coded[lane]);
    }
    *t = (transit){0};
}

static void batch_release(batch *b)
{
    if (!b || !peri__refs_drop(&b->refs)) return;
    int32_t n_groups = b->layout ? b->layout->n_groups : 0;
    for (int32_t g = 0; g < n_groups; g++) {
        if (b->looks) peri_tbe_batch_release(b->looks[g]);
        if (b->replica_flat) peri_tensor_release(b->replica_flat[g]);
        if (b->replica_work) peri_work_release(b->replica_work[g]);
    }
    peri__free(b->looks);
    peri__free(b->replica_flat);
    peri__free(b->replica_work);
    peri_tensor *tensors[] = {b->home_weights, b->inverse, b->sent};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) peri_tensor_release(tensors[i]);
    peri__weights_dist_release(b->weights_dist);
    transit_fini(&b->gradient);
    peri__bag_layout_release(b->layout);
    peri_sharded_ebc_release(b->ebc);
    peri__free(b);
}

static peri_tensor *keep(peri_tensor *t)
{
    if (t) peri_tensor_retain(t);
    return t;
}

/** d->looks[g]: group @g's lookup of what arrived, unless it is there. */
static peri_status look_of(peri__input_dist *d, int32_t g)
{
    const peri__group_of_tables *group = &d->ebc->groups[g];
    peri_tbe_input in = {.ids = group->replica ? d->values : d->received[PERI__IDS], .offsets = group->replica ? d->offsets_in : d->offsets,
                         .weights = group->replica ? d->weights_in : d->received[PERI__WEIGHTS],
                         .scale = group->mean ? d->received[PERI__SCALES] : NULL, .blocks = d->layout->blocks[g]};
    if (!d->looks) d->looks = peri__alloc_zero(sizeof *d->looks * (size_t)d->layout->n_groups);
    if (!d->looks) return PERI_ENOMEM;
    return d->looks[g] ? PERI_OK : peri_tbe_batch_new(group->tbe, &in, &d->looks[g]);
}

static peri_status batch_new(peri__input_dist *d, batch **out)
{
    batch *b = peri__alloc_zero(sizeof *b);
    if (!b) return PERI_ENOMEM;
    peri__refs_init(&b->refs);
    peri_sharded_ebc_retain(d->ebc);
    b->ebc = d->ebc;
    peri__refs_add(&d->layout->refs);
    b->layout = d->layout;
    b->home_weights = keep(d->weights_in);
    b->inverse = keep(d->inverse);
    peri_status status = PERI_OK;
    for (int32_t g = 0; g < d->layout->n_groups && status >= 0; g++) status = look_of(d, g);
    if (status >= 0) {
        b->looks = d->looks;
        d->looks = NULL;
        status = peri__weights_dist_new(d, &b->weights_dist);
    }
    if (status < 0) batch_release(b);
    else *out = b;
    return status;
}

static int64_t own_of(const batch *b) { return b->layout->home->own_out + b->layout->home->replica_out; }

static peri_status new_f32(peri_device *device, int64_t n, peri_tensor **out) { return peri_tensor_new(device, PERI_F32, 1, &n, out); }

/** The part of lane @lane in the buffer of one side. */
static peri_status lane_of(const batch *b, peri_tensor *buffer, int32_t lane, int side, peri_tensor **out)
{
    const int64_t *n = side == PERI__OWNER_SIDE ? b->layout->owner->lane_out : b->layout->home->lane_out;
    int64_t at = side == PERI__OWNER_SIDE ? own_of(b) : 0;
    for (int32_t before = 0; before < lane; before++) at += n[before];
    return peri__tensor_view(buffer, 1, &n[lane], NULL, buffer->offset + at, out);
}

/** Send the rows @from of one lane; they arrive as @to, or encoded. */
static peri_status post_lane(const batch *b, int32_t lane, peri_tensor *from, peri_tensor *to, bool to_home, transit *t)
{
    const peri_sharded_ebc *e = b->ebc;
    int sender = to_home ? PERI__OWNER_SIDE : PERI__HOME_SIDE, receiver = to_home ? PERI__HOME_SIDE : PERI__OWNER_SIDE;
    peri_codec_context *const *contexts = b->layout->contexts[lane][to_home ? 0 : 1];
    const int64_t *splits[] = {[PERI__HOME_SIDE] = b->layout->home->rank_out + lane * e->world_size,
                               [PERI__OWNER_SIDE] = b->layout->owner->source_out + lane * e->world_size};
    peri_coll_op op = {.kind = PERI_COLL_ALL_TO_ALL, .channel = PERI_CHANNEL_ROWS, .dtype = PERI_F32,
                       .send_counts = splits[sender], .recv_counts = splits[receiver]};
    if (!contexts[sender]) return peri__coll_post(e->group, &op, from, to, &t->work[lane]);
    peri_tensor *wire;
    PERI_TRY(peri_codec_encode(contexts[sender], from, &wire));
    int64_t n = 0;
    op.dtype = wire->dtype;
    op.send_counts = peri_codec_context_wire_splits(contexts[sender]);
    op.recv_counts = peri_codec_context_wire_splits(contexts[receiver]);
    for (int32_t r = 0; r < e->world_size; r++) n += op.recv_counts[r];
    peri_status status = peri_tensor_new(e->device, op.dtype, 1, &n, &t->coded[lane]);
    if (status >= 0) status = peri__coll_post(e->group, &op, wire, t->coded[lane], &t->work[lane]);
    peri_tensor_release(wire);
    return status;
}

/** Send the others' part of an owner's buffer to the homes, or a home's buffer to the owners. */
static peri_status post_rows(const batch *b, peri_tensor *owner_buffer, peri_tensor *home_buffer, bool to_home, transit *t)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        if (!b->ebc->lanes[lane].used) continue;
        peri_tensor *owner = NULL, *home = NULL;
        peri_status status = lane_of(b, owner_buffer, lane, PERI__OWNER_SIDE, &owner);
        if (status >= 0) status = lane_of(b, home_buffer, lane, PERI__HOME_SIDE, &home);
        if (status >= 0) status = post_lane(b, lane, to_home ? owner : home, to_home ? home : owner, to_home, t);
        peri_tensor_release(owner);
        peri_tensor_release(home);
        PERI_TRY(status);
    }
    return PERI_OK;
}

/** Wait for one exchange, then forget it. */
static peri_status await(peri_work **work)
{
    if (!*work) return PERI_OK;
    peri_status status = peri_work_test(*work);
    if (status != PERI_OK) return status;
    peri_work_release(*work);
    *work = NULL;
    return PERI_OK;
}

/** Decode the rows of one lane to their place. Gradients are divided now, as they would have been before if they had travelled as they are;
 *  what is small is not made smaller before it is encoded. */
static peri_status decode_lane(const batch *b, int32_t lane, peri_tensor *buffer, bool to_home, transit *t)
{
    enum { GRAIN = 1 << 15 };
    int side = to_home ? PERI__HOME_SIDE : PERI__OWNER_SIDE;
    peri_tensor *rows;
    PERI_TRY(lane_of(b, buffer, lane, side, &rows));
    peri_status status = peri__codec_decode_to(b->layout->contexts[lane][to_home ? 0 : 1][side], t->coded[lane], rows);
    peri_k_divide_args args = {.dst = peri__data(rows), .src = peri__data(rows), .dtype = PERI_F32, .divisor = b->ebc->division};
    if (status >= 0 && !to_home && args.divisor != 1) status = PERI_LAUNCH(b->ebc->device, divide, &args, peri__numel(rows), GRAIN);
    peri_tensor_release(rows);
    peri_tensor_release(t->coded[lane]);
    t->coded[lane] = NULL;
    return status;
}

/** PERI_PENDING until all rows of @t are in @buffer, of a home (@to_home) or an owner. */
static peri_status rows_arrive(const batch *b, peri_tensor *buffer, bool to_home, transit *t)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        peri_status status = await(&t->work[lane]);
        if (status != PERI_OK) return status;
        if (t->coded[lane]) PERI_TRY(decode_lane(b, lane, buffer, to_home, t));
    }
    return PERI_OK;
}

/* -- backward: the lookup ------------------------------------------------------------------------------------------------------------ */

/** What a group's lookup makes of the gradient of its rows besides updates: NULL for the weights' part where they want none. */
static peri_status weights_part(const batch *b, int32_t g, peri_tensor **out)
{
    *out = NULL;
    return b->weights_dist ? peri__weights_dist_part(b->weights_dist, b->ebc->groups[g].replica, out) : PERI_OK;
}

/** Hand it on. The gradients of replicas were divided by a number of their own (see gradient_divisor). */
static peri_status weights_part_done(const batch *b, int32_t g, peri_tensor *part)
{
    const peri__group_of_tables *group = &b->ebc->groups[g];
    if (!part) return PERI_OK;
    return peri__weights_dist_add(b->weights_dist, group->replica, part, group->replica && !group->dense ? b->ebc->world_size : 1);
}

/** The dense gradient of a group's tables, and its part of the weights'. @flat new. */
static peri_status flat_gradient(const batch *b, int32_t g, peri_tensor *rows, peri_tensor **flat)
{
    peri_tensor *part, *result;
    PERI_TRY(weights_part(b, g, &part));
    peri_status status = peri_tbe_batch_gradient(b->looks[g], rows, part, &result);
    if (status < 0) {
        peri_tensor_release(part);
        return status;
    }
    status = weights_part_done(b, g, part);
    if (status < 0) peri_tensor_release(result);
    else *flat = result;
    return status;
}

/** Update a group's shards; its part of the weights' gradient is made from the rows as they were. */
static peri_status update(const batch *b, int32_t g, peri_tensor *rows)
{
    peri_tensor *part;
    PERI_TRY(weights_part(b, g, &part));
    peri_status status = peri_tbe_batch_backward(b->looks[g], rows, part);
    if (status >= 0) return weights_part_done(b, g, part);
    peri_tensor_release(part);
    return status;
}

/** Give the leaves of a dense group their gradients; @at counts the leaves of the node. */
static peri_status dense_gradients(const batch *b, int32_t g, peri_tensor *rows, peri_tensor **grad_in, int32_t *at)
{
    peri__group_of_tables *group = &b->ebc->groups[g];
    peri_tensor *flat;
    PERI_TRY(flat_gradient(b, g, rows, &flat));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < group->n_tables && status >= 0; i++)
        status = peri_tbe_gradient_table(group->tbe, flat, i, &grad_in[(*at)++]);
    peri_tensor_release(flat);
    return status;
}

/** grad_out[0]: gradient of the owner's buffer, on its way. Inputs: the leaves of the dense groups, and the token of weights_dist. */
static peri_status lookup_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    batch *b = node->state;
    peri_sharded_ebc *e = b->ebc;
    peri_status status;
    if (!grad_out[0]) return PERI_OK; /* the output took no part in the loss, on any rank */
    if ((status = rows_arrive(b, grad_out[0], false, &b->gradient)) != PERI_OK) return status;
    peri_tensor_release(b->sent);
    b->sent = NULL;
    for (int32_t g = 0; g < e->n_groups; g++)
        if (b->replica_work && (status = await(&b->replica_work[g])) != PERI_OK) return status;
    int32_t at = 0;
    for (int32_t g = 0; g < e->n_groups; g++) {
        peri__group_of_tables *group = &e->groups[g];
        if (group->dense) PERI_TRY(dense_gradients(b, g, grad_out[0], grad_in, &at));
        else if (group->replica) PERI_TRY(peri_tbe_gradient_apply(group->tbe, b->replica_flat[g]));
        else PERI_TRY(update(b, g, grad_out[0]));
    }
    return PERI_OK;
}

static void node_fini(peri__node *node)
{
    batch_release(node->state);
    node->state = NULL;
}

static const peri__node_vtab lookup_vtab = {
    .name = "sharded lookup", .acts = PERI__WAITS | PERI__UPDATES, .backward = lookup_backward, .fini = node_fini};

/* -- backward: the exchange ------------------------------------------------------------------------------------------------------------ */

/** Gradients of fused replicas add up over the ranks before the rows are updated. */
static peri_status reduce_replicas(batch *b, peri_tensor *rows)
{
    peri_sharded_ebc *e = b->ebc;
    for (int32_t g = 0; g < e->n_groups; g++) {
        if (!e->groups[g].replica || e->groups[g].dense) continue;
        if (!b->replica_flat) b->replica_flat = peri__alloc_zero(sizeof *b->replica_flat * (size_t)e->n_groups);
        if (!b->replica_work) b->replica_work = peri__alloc_zero(sizeof *b->replica_work * (size_t)e->n_groups);
        if (!b->replica_flat || !b->replica_work) return PERI_ENOMEM;
        PERI_TRY(flat_gradient(b, g, rows, &b->replica_flat[g]));
        if (e->world_size > 1)
            PERI_TRY(peri__coll_sum_gradients(e->group, b->replica_flat[g], 0, &b->replica_work[g]));
    }
    return PERI_OK;
}

/** Bags that one thread takes at a time; with a variable batch each of them looks through all rows. */
static int64_t spread_grain(const peri__home *h)
{
    enum { LEAST = 64, MOST_PARTS = 16 };
    return h->variable ? peri__max(LEAST, peri__ceil_div(h->most_bags, MOST_PARTS)) : LEAST;
}

static peri_status start_gradient(batch *b, peri_tensor *grad, peri_tensor **out)
{
    peri_sharded_ebc *e = b->ebc;
    const peri__home *h = b->layout->home;
    peri_tensor *flat = NULL, *rows = NULL, *narrow = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(grad, &narrow), out);
    PERI_TRY_GOTO(peri_tensor_to(narrow, PERI_F32, NULL, &flat), out);
    PERI_TRY_GOTO(new_f32(e->device, own_of(b) + b->layout->owner->sent_out, &rows), out);
    PERI_TRY_GOTO(new_f32(e->device, h->received_out, &b->sent), out);
    peri_k_route_spread_args args = {.grad = peri__data(flat), .stride = e->routes->out_cols, .rows = h->rows, .sent = peri__data(b->sent),
                                     .own = peri__data(rows), .outputs = peri__upload_at(&h->up, h->outputs),
                                     .pieces = peri__upload_at(&h->up, h->pieces), .bags = peri__upload_at(&h->up, h->output_bags),
                                     .inverse = b->inverse ? peri__data(b->inverse) : NULL, .n_outputs = e->routes->n_outputs};
    PERI_TRY_GOTO(PERI_LAUNCH(e->device, route_spread, &args, h->most_bags, spread_grain(h)), out);
    if (e->world_size > 1) PERI_TRY_GOTO(post_rows(b, rows, b->sent, false, &b->gradient), out);
    PERI_TRY_GOTO(reduce_replicas(b, rows), out);
    *out = rows;
out:
    peri_tensor_release(narrow);
    peri_tensor_release(flat);
    if (status < 0) peri_tensor_release(rows);
    return status;
}

/** grad_out[0]: gradient of the module's output [batch, columns]; none counts as zeros, for the other ranks' sake. */
static peri_status output_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    batch *b = node->state;
    peri_tensor *zeros = NULL;
    int64_t shape[2] = {b->layout->home->rows, b->ebc->routes->out_cols};
    if (!grad_out[0]) PERI_TRY(peri_tensor_full(b->ebc->device, PERI_F32, 2, shape, 0, &zeros));
    peri_status status = start_gradient(b, grad_out[0] ? grad_out[0] : zeros, &grad_in[0]);
    peri_tensor_release(zeros);
    return status;
}

static const peri__node_vtab output_node = {
    .name = "sharded output_dist", .acts = PERI__POSTS, .backward = output_backward, .fini = node_fini};

/* -- forward ------------------------------------------------------------------------------------------------------------------------- */

/** Record the lookup: @buffer becomes a function of the dense groups' leaves, of tables that no tensor stands for, and of the ids' weights
 *  if they want it. */
static peri_status record_lookup(batch *b, peri_tensor *buffer)
{
    peri_sharded_ebc *e = b->ebc;
    peri_tensor *token = NULL;
    int32_t n = 1;
    for (int32_t g = 0; g < e->n_groups; g++) n += e->groups[g].dense ? e->groups[g].n_tables : 0;
    peri_tensor **leaves = peri__alloc(sizeof *leaves * (size_t)n);
    if (!leaves) return PERI_ENOMEM;
    n = 0;
    for (int32_t g = 0; g < e->n_groups; g++)
        for (int32_t i = 0; e->groups[g].dense && i < e->groups[g].n_tables; i++) leaves[n++] = e->groups[g].leaves[i];
    peri_status status = b->weights_dist ? peri__weights_dist_record(b->weights_dist, b->home_weights, &token) : PERI_OK;
    leaves[n++] = token;
    peri__node *node;
    if (status >= 0) status = peri__record(&lookup_vtab, leaves, n, &buffer, 1, &node);
    peri_tensor_release(token);
    peri__free(leaves);
    PERI_TRY(status);
    peri__refs_add(&b->refs);
    node->state = b;
    return PERI_OK;
}

static peri_status output_step(peri_work *work)
{
    output_dist *o = (output_dist *)work;
    peri_status status = rows_arrive(o->batch, o->received, true, &o->exchange);
    return status < 0 ? peri__group_fail(o->batch->ebc->group, status) : status;
}

static void output_fini(peri_work *work)
{
    output_dist *o = (output_dist *)work;
    transit_fini(&o->exchange);
    peri_tensor_release(o->buffer);
    peri_tensor_release(o->received);
    batch_release(o->batch);
}

static const peri__work_vtab output_vtab = {.name = "output_dist", .step = output_step, .fini = output_fini};

static peri_status look_up(output_dist *o)
{
    batch *b = o->batch;
    peri_sharded_ebc *e = b->ebc;
    PERI_TRY(new_f32(e->device, own_of(b) + b->layout->owner->sent_out, &o->buffer));
    PERI_TRY(new_f32(e->device, b->layout->home->received_out, &o->received));
    bool recording = peri__grad_enabled();
    for (int32_t g = 0; g < e->n_groups; g++) {
        if (recording) PERI_TRY(peri__tbe_ema(e->groups[g].tbe));
        PERI_TRY(peri_tbe_batch_forward(b->looks[g], o->buffer));
    }
    if (e->world_size > 1) {
        peri__parts_begin(e->group);
        peri_status status = post_rows(b, o->buffer, o->received, true, &o->exchange);
        peri__parts_end(e->group);
        PERI_TRY(status);
    }
    o->recorded = recording;
    return recording ? record_lookup(b, o->buffer) : PERI_OK;
}

peri_status peri_sharded_ebc_prefetch(peri_sharded_ebc *e, peri_work *dist)
{
    PERI_NEED(e);
    PERI_NEED(dist);
    static const char *const f = "peri_sharded_ebc_prefetch";
    peri__input_dist *d = (peri__input_dist *)dist;
    if (dist->vtab != &peri__input_dist_vtab || d->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an input_dist of this module", f);
    if (dist->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the input_dist is not complete; wait for it", f);
    if (d->used) return peri__fail(PERI_EINVAL, "%s: this input_dist was already used", f);
    for (int32_t g = 0; g < e->n_groups; g++) {
        if (!e->groups[g].cached) continue;
        PERI_TRY(look_of(d, g));
        PERI_TRY(peri_tbe_batch_prefetch(d->looks[g]));
    }
    return PERI_OK;
}

peri_status peri_sharded_ebc_compute_and_output_dist(peri_sharded_ebc *e, peri_work *dist, peri_work **out)
{
    PERI_NEED(e);
    PERI_NEED(dist);
    PERI_NEED(out);
    static const char *const f = "peri_sharded_ebc_compute_and_output_dist";
    peri__input_dist *d = (peri__input_dist *)dist;
    if (dist->vtab != &peri__input_dist_vtab || d->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an input_dist of this module", f);
    if (dist->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the input_dist is not complete; wait for it", f);
    if (d->used) return peri__fail(PERI_EINVAL, "%s: this input_dist was already used", f);
    PERI_TRY(peri__group_check(f, e->group));
    peri_work *work;
    PERI_TRY(peri__work_new(sizeof(output_dist), &output_vtab, e->group, e->device, &work));
    output_dist *o = (output_dist *)work;
    peri_status status = batch_new(d, &o->batch);
    if (status >= 0) status = look_up(o);
    if (status < 0) {
        peri__work_cancel(work, status);
        peri_work_release(work);
        return e->world_size > 1 ? peri__group_fail(e->group, status) : status;
    }
    d->used = true;
    *out = work;
    return PERI_OK;
}

peri_status peri_sharded_ebc_output(peri_sharded_ebc *e, peri_work *output, peri_tensor **out)
{
    PERI_NEED(e);
    PERI_NEED(output);
    PERI_NEED(out);
    static const char *const f = "peri_sharded_ebc_output";
    output_dist *o = (output_dist *)output;
    if (output->vtab != &output_vtab || o->batch->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an output_dist of this module", f);
    if (output->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the output_dist is not complete; wait for it", f);
    if (o->used) return peri__fail(PERI_EINVAL, "%s: this output was already taken", f);
    batch *b = o->batch;
    const peri__home *h = b->layout->home;
    int64_t shape[2] = {h->rows, e->routes->out_cols};
    peri_tensor *values;
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 2, shape, &values));
    peri_k_route_combine_args args = {.out = peri__data(values), .stride = e->routes->out_cols, .received = peri__data(o->received),
                                      .own = peri__data(o->buffer), .outputs = peri__upload_at(&h->up, h->outputs),
                                      .pieces = peri__upload_at(&h->up, h->pieces), .inverse = b->inverse ? peri__data(b->inverse) : NULL,
                                      .n_outputs = e->routes->n_outputs};
    peri_status status = PERI_LAUNCH(e->device, route_combine, &args, h->rows, 64);
    if (status >= 0 && e->output_dtype != PERI_F32) {
        peri_tensor *narrow;
        status = peri_tensor_to(values, e->output_dtype, NULL, &narrow);
        if (status >= 0) {
            peri_tensor_release(values);
            values = narrow;
        }
    }
    if (status >= 0 && o->recorded) {
        peri__node *node;
        status = peri__record(&output_node, &o->buffer, 1, &values, 1, &node);
        if (status >= 0) {
            peri__refs_add(&b->refs);
            node->state = b;
        }
    }
    if (status < 0) {
        peri_tensor_release(values);
        return status;
    }
    o->used = true;
    peri_tensor_release(o->buffer);
    peri_tensor_release(o->received);
    o->buffer = o->received = NULL;
    *out = values;
    return PERI_OK;
}
