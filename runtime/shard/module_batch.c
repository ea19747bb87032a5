/* SPDX-License-Identifier: Apache-2.0
 *
 * module_batch.c: a batch walks through a sharded module: its router takes the ids to their owners (input.c), tables
 * look up what arrived, its ways bring the rows back to the ranks that asked; gradients take the same way in reverse.
 * What is particular to a kind of module are its stages.
 *
 * The owner's buffer holds rows as [own lookups | replicas | rank 0's | rank 1's ...]: what belongs to this rank itself
 * comes first and is never sent; then what others get, lane after lane, in each rank after rank. The home side's buffer
 * holds what other ranks return, likewise by lane and rank. Gradients use two buffers of the same layouts, the other
 * way round. Each lane has a way of its own. Rows of the first part of the tables (routes.h) set out before the next
 * are looked up, and the tables of a part are updated as soon as its gradients are back.
 *
 * The two directions may carry different rows (peri__rule), in layouts of their own, with a lookup each. Else they
 * share both.
 *
 * On the tape a batch is a trip (comm/transfer.h). When its gradient sets out it is spread to the rows and posted; when
 * it has come back the shards are updated. A pass does all else in between, while the gradient travels.
 */
#include "rows.h"
#include "../../kernels/route.h"
#include "../../kernels/convert.h"

#include "../base/between.h"
#include "../comm/verdict.h"
#include "../tensor/jagged_internal.h"

/** A batch between its lookup and the end of its backward pass; shared by the work and the two nodes. */
typedef struct batch {
    peri__trip trip;
    peri__input_dist *input;                          /* retained */
    peri_sharded *ebc;                                /* the input's */
    peri__weights_dist *weights_dist;                 /* NULL: the weights want no gradient */
    peri__rows rows[2];          /* by direction; of the results: until these are taken, or the weights' gradient is
                                    made of them */
    peri__way_transfer *transfers[2];  /* by direction, and lane of the module: theirs */
    /* Backward: */
    peri_work *gradients;        /* their transfers, if some have two hops (see advance_hops); NULL: none */
    int32_t back;                /* parts whose gradient is back, and done with */
    struct replica {             /* by set, of fused replicas: */
        peri_tensor *flat;       /* their gradient, which is being added up over the ranks */
        peri_work *work;
    } * replicas;
} batch;

/** The work of peri_sharded_compute_and_output_dist. */
typedef struct output_dist {
    peri_work base;
    batch *batch;
    peri__verdict *verdict;      /* whether all ranks could look up; NULL: errors of this rank end the group */
    bool failed;                 /* this rank could not: it sends whatever is there */
    bool asks;                   /* for rows of the batch's raw ids, which nobody has taken yet */
    bool sent;                   /* all parts have set out: who moves works on between them does not take this one for
                                    complete */
    peri__node *leave;           /* until the output is handed out; NULL: not recorded */
    bool used;
} output_dist;

static const peri__work_vtab output_vtab;
static const peri__trip_vtab batch_vtab;

/* -- a batch ------------------------------------------------------------------------------------------------------- */

/** Offsets that make a bag of each id. */
static peri_status id_offsets(peri__input_dist *d, bool own, peri_tensor **out)
{
    const peri_tensor *ids = own ? d->routing.values : d->routing.received[PERI__IDS];
    if (!d->id_offsets[own]) PERI_TRY(peri__offsets_of_equal(d->ebc->device, peri__numel(ids), 1, &d->id_offsets[own]));
    *out = d->id_offsets[own];
    return PERI_OK;
}

/** d->looks[direction][g]: @g's lookup of what arrived, unless it is there; to owners it is the one whose gradients
 *  come back. */
static peri_status lookup_of_arrived(peri__input_dist *d, int32_t direction, int32_t g)
{
    const peri__table_set *set = &d->ebc->sets[g];
    const peri__routing *r = &d->routing;
    const peri__rule rule = d->layouts[direction]->home->rule;
    peri_tbe_input in = {.ids = set->replica ? r->values : r->received[PERI__IDS],
                         .offsets = set->replica ? r->own_offsets : r->offsets,
                         .weights = set->replica ? r->weights : r->received[PERI__WEIGHTS],
                         .scale = set->mean ? r->received[PERI__BY_BAG] : NULL,
                         .blocks = d->layouts[direction]->blocks[g]};
    if (!d->looks[direction])
        d->looks[direction] = peri__alloc_zero(sizeof *d->looks[direction] * (size_t)peri__max(1, d->ebc->n_sets));
    if (!d->looks[direction]) return PERI_ENOMEM;
    if (d->looks[direction][g]) return PERI_OK;
    if (direction == PERI__TO_OWNERS && d->layouts[PERI__TO_HOMES] == d->layouts[PERI__TO_OWNERS]) {
        PERI_TRY(lookup_of_arrived(d, PERI__TO_HOMES, g));
        peri_tbe_batch_retain(d->looks[PERI__TO_HOMES][g]);
        d->looks[PERI__TO_OWNERS][g] = d->looks[PERI__TO_HOMES][g];
        return PERI_OK;
    }
    if (!d->ebc->kind->by_id && (rule.by_id || (rule.to_homes && set->by_id))) { /* as they are: home pools them */
        in.weights = in.scale = NULL;
        PERI_TRY(id_offsets(d, set->replica, &in.offsets));
    }
    return peri_tbe_batch_new(set->tbe, &in, &d->looks[direction][g]);
}

/** Give up the rows of a direction. */
static void rows_drop(batch *b, int32_t direction)
{
    for (int32_t i = 0; i < b->ebc->n_lanes; i++) peri__way_transfer_fini(&b->transfers[direction][i]);
    peri__rows_fini(&b->rows[direction]);
}

static void batch_fini(peri__trip *trip)
{
    batch *b = (batch *)trip;
    peri_work_release(b->gradients);
    for (int32_t way = 0; way < 2; way++) rows_drop(b, way);
    for (int32_t g = 0; g < b->ebc->n_sets; g++) {
        peri_tensor_release(b->replicas[g].flat);
        peri_work_release(b->replicas[g].work);
    }
    peri__weights_dist_release(b->weights_dist);
    peri__input_drop_lookups(b->input);
    peri_work_release(&b->input->base);
    peri__free(b);
}

static peri_status batch_new(peri__input_dist *d, batch **out)
{
    const int32_t lanes = d->ebc->n_lanes;
    batch *b = peri__alloc_zero(sizeof *b + sizeof **b->transfers * 2 * (size_t)lanes +
                                sizeof *b->replicas * (size_t)d->ebc->n_sets);
    if (!b) return PERI_ENOMEM;
    b->replicas = (struct replica *)((peri__way_transfer *)(b + 1) + 2 * lanes);
    for (int32_t way = 0; way < 2; way++) b->transfers[way] = (peri__way_transfer *)(b + 1) + way * lanes;
    peri__trip_init(&b->trip, &batch_vtab, d->ebc->group);
    peri_work_retain(&d->base);
    b->input = d;
    b->ebc = d->ebc;
    peri_status status = PERI_OK;
    for (int32_t way = 0; way < 2; way++)
        for (int32_t g = 0; g < d->ebc->n_sets && status >= 0; g++) status = lookup_of_arrived(d, way, g);
    for (int32_t g = 0; g < d->ebc->n_sets && status >= 0; g++)
        peri__batch_share_spans(d->looks[PERI__TO_OWNERS][g], d->looks[PERI__TO_HOMES][g]);
    if (status >= 0) status = peri__weights_dist_new(d, &b->weights_dist);
    if (status < 0) peri__trip_release(&b->trip);
    else *out = b;
    return status;
}

/* -- rows on their ways -------------------------------------------------------------------------------------------- */

/** Rows of lane @lane in the owner's buffer, or (@home) in that of the home. */
static peri_status view_of_lane(const peri__rows *r, int32_t lane, bool home, peri_tensor **out)
{
    const peri__home *h = r->layout->home;
    const int64_t *n = home ? h->lane_out : r->layout->owner->lane_out;
    peri_tensor *buffer = home ? r->away : r->own;
    int64_t at = home ? 0 : h->own_out + h->replica_out;
    for (int32_t before = 0; before < lane; before++) at += n[before];
    return peri__tensor_view(buffer, 1, &n[lane], NULL, buffer->offset + at, out);
}

/** Send what belongs to others in a part of the owner's buffer to the homes, or of the home's to the owners. */
static peri_status rows_start(batch *b, int32_t part, int32_t direction)
{
    const peri__rows *r = &b->rows[direction];
    for (int32_t i = 0; i < b->ebc->n_lanes; i++) {
        const int32_t lane = b->ebc->lanes[i];
        const peri__transfer_direct *functions = peri__unbuffered_lane(r, lane);
        PERI__HELD peri_tensor *own = NULL, *away = NULL;
        if (peri__lane_part(lane) != part) continue;
        PERI_TRY(view_of_lane(r, lane, false, &own));
        if (!functions) PERI_TRY(view_of_lane(r, lane, true, &away));
        PERI_TRY(peri__way_transfer_start(&b->transfers[direction][i], &b->ebc->ways[lane], r->layout->legs[lane],
                                          direction, r->back ? away : own, r->back ? own : away, functions));
    }
    return PERI_OK;
}

/** Whether the rows of parts up to @part are there. All lanes are looked at: one of two hops sets out on the second one
 *  here, also while others are on their way. */
static peri_status rows_test(batch *b, int32_t part, int32_t direction)
{
    peri_status all = PERI_OK;
    for (int32_t i = 0; i < b->ebc->n_lanes; i++) {
        peri_status status = peri__way_transfer_test(&b->transfers[direction][i]);
        if (status < 0) return status;
        if (status != PERI_OK && peri__lane_part(b->ebc->lanes[i]) <= part) all = status;
    }
    return all;
}

/** The work of gradients on their way over two hops. A backward pass waits for the modules one by one. The operation
 *  that it waits for may stand behind the second hop of another module, whose turn to be waited for comes later:
 *  operations of a channel are posted in the order in which gradients set out. As a work, a transfer is moved on by
 *  whoever waits. */
typedef struct gradients {
    peri_work base;
    batch *batch; /* a reference; NULL: it has ended */
} gradients;

static void gradients_fini(peri_work *work)
{
    gradients *g = (gradients *)work;
    if (g->batch) peri__trip_release(&g->batch->trip);
    g->batch = NULL;
}

static peri_status gradients_step(peri_work *work)
{
    gradients *g = (gradients *)work;
    peri_group *group = g->batch->ebc->group;
    peri_status status = rows_test(g->batch, PERI__PARTS, PERI__TO_OWNERS);
    if (status == PERI_PENDING) return status;
    gradients_fini(work);
    return status < 0 ? peri__group_fail(group, status) : status;
}

static const peri__work_vtab gradients_vtab = {
    .name = "gradients of rows", .step = gradients_step, .fini = gradients_fini};

/** Let gradients that have set out hop on while the pass waits for something else. */
static peri_status advance_hops(batch *b)
{
    bool hops = false;
    for (int32_t i = 0; i < b->ebc->n_lanes; i++) hops = hops || b->ebc->ways[b->ebc->lanes[i]].n > 1;
    if (!hops) return PERI_OK;
    PERI_TRY(peri__work_new(sizeof(gradients), &gradients_vtab, b->ebc->group, b->ebc->device, &b->gradients));
    ((gradients *)b->gradients)->batch = b;
    peri__refs_add(&b->trip.refs);
    return PERI_OK;
}

/** As rows_test, of gradients. */
static peri_status gradients_test(batch *b, int32_t part)
{
    if (!b->gradients) return rows_test(b, part, PERI__TO_OWNERS);
    peri_status status = peri_work_test(b->gradients);
    if (status != PERI_PENDING || part + 1 == b->ebc->parts) return status;
    peri__parts_begin(b->ebc->group);
    status = rows_test(b, part, PERI__TO_OWNERS);
    peri__parts_end(b->ebc->group);
    return status;
}

/* -- backward: the gradient is back -------------------------------------------------------------------------------- */

/** Update a set's shards or, for @flat (new, also when this fails; else NULL), make the dense gradient of its tables. A
 *  part of the weights' gradient is made with it, from the rows as they were. */
static peri_status use_gradient(const batch *b, int32_t g, peri_tensor **flat)
{
    peri_tbe_batch *look = b->input->looks[PERI__TO_OWNERS][g];
    peri_tensor *rows = peri__rows_of(&b->rows[PERI__TO_OWNERS], g);
    PERI__HELD peri_tensor *part = NULL;
    PERI_TRY(peri__weights_dist_part(b->weights_dist, g, &part));
    PERI_TRY(flat ? peri_tbe_batch_gradient(look, rows, part, flat) : peri_tbe_batch_backward(look, rows, part));
    return part ? peri__weights_dist_add(b->weights_dist, g, part) : PERI_OK;
}

/** Give the leaves of a dense set their gradients: those of the node from @first on. */
static peri_status dense_gradients(const batch *b, int32_t g, peri_tensor **grad_in, int32_t first)
{
    peri__table_set *set = &b->ebc->sets[g];
    PERI__HELD peri_tensor *flat = NULL;
    PERI_TRY(use_gradient(b, g, &flat));
    for (int32_t i = 0; i < set->n_tables; i++)
        PERI_TRY(peri_tbe_gradient_table(set->tbe, flat, i, &grad_in[first + i]));
    return PERI_OK;
}

static peri_status replicas_test(batch *b)
{
    for (int32_t g = 0; g < b->ebc->n_sets; g++) {
        peri_status status = b->replicas[g].work ? peri_work_test(b->replicas[g].work) : PERI_OK;
        if (status != PERI_OK) return status;
    }
    return PERI_OK;
}

/** The gradient of a part is back. */
static peri_status use_part_gradient(const batch *b, int32_t part, peri_tensor **grad_in)
{
    const peri_sharded *e = b->ebc;
    int32_t leaves = 0;
    for (int32_t g = 0; g < e->n_sets; g++) {
        const peri__table_set *set = &e->sets[g];
        int32_t first = leaves;
        leaves += set->dense ? set->n_tables : 0;
        if (set->part != part) continue;
        if (set->dense) PERI_TRY(dense_gradients(b, g, grad_in, first));
        else if (!set->replica) PERI_TRY(use_gradient(b, g, NULL));
        else if (b->replicas[g].flat) PERI_TRY(peri_tbe_gradient_apply(set->tbe, b->replicas[g].flat));
    }
    return PERI_OK;
}

/** Inputs: the leaves of the dense sets, and the token of weights_dist. Part after part, while the next is still on its
 *  way. */
static peri_status finish_backward(peri__trip *trip, const peri__node *leave, peri_tensor **grad_in)
{
    (void)leave;
    batch *b = (batch *)trip;
    for (; b->back < b->ebc->parts; b->back++) {
        peri_status status = gradients_test(b, b->back);
        if (status == PERI_OK && b->back == 0) status = replicas_test(b);
        if (status != PERI_OK) return status;
        PERI_TRY(use_part_gradient(b, b->back, grad_in));
        if (b->back + 1 < b->ebc->parts) peri__between();
    }
    rows_drop(b, PERI__TO_OWNERS);
    return PERI_OK;
}

/* -- backward: the gradient sets out ------------------------------------------------------------------------------- */

/** The gradient of a set of replicas becomes the mean of those of all ranks, as DistributedDataParallel makes it. Those
 *  of some were divided before (see gradient_divisor). */
static peri_status reduce_set(const peri_sharded *e, const peri__table_set *set, peri_tensor *flat, peri_work **out)
{
    peri_k_divide_args args = {
        .dst = peri__data(flat), .src = peri__data(flat), .dtype = flat->dtype, .divisor = e->world_size};
    const bool divided = e->tables[set->module_table[0]].divisor != 1;
    if (!divided) PERI_TRY(PERI_LAUNCH(e->device, divide, &args, peri__numel(flat), PERI_ELEMENT_GRAIN));
    return peri__coll_sum_gradients(e->group, flat, 0, NULL, out);
}

/** Gradients of fused replicas add up over the ranks before the rows are updated. Of those that no optimizer trains
 *  only the ids' weights get theirs. */
static peri_status reduce_replicas(batch *b)
{
    peri_sharded *e = b->ebc;
    for (int32_t g = 0; g < e->n_sets; g++) {
        if (!e->sets[g].replica || e->sets[g].dense) continue;
        struct replica *x = &b->replicas[g];
        const bool trained = e->sets[g].tbe->optimizer.kind != PERI_TBE_NONE;
        PERI_TRY(use_gradient(b, g, trained ? &x->flat : NULL));
        if (trained && e->world_size > 1) PERI_TRY(reduce_set(e, &e->sets[g], x->flat, &x->work));
    }
    return PERI_OK;
}

/** Result @i of a batch among its @rows: from *@at on, which moves on. */
static peri_status view_of_result(const batch *b, peri_tensor *rows, int32_t i, int64_t *at, peri_tensor **out)
{
    const peri_sharded *e = b->ebc;
    const peri__home *h = b->input->layouts[PERI__TO_OWNERS]->home;
    int64_t shape[2] = {e->result_feature ? h->feature_rows[e->result_feature[i]] : h->rows, e->cols};
    int64_t offset = rows->offset + *at * e->cols;
    *at += shape[0];
    return peri__tensor_view(rows, 2, shape, NULL, offset, out);
}

/** The gradient of all results in f32; none counts as zeros, for the other ranks' sake. @out new. */
static peri_status join_gradients(const batch *b, peri_tensor *const *grad, peri_tensor **out)
{
    const peri_sharded *e = b->ebc;
    int64_t at = 0, shape[2] = {b->input->layouts[PERI__TO_OWNERS]->home->rows, e->cols};
    PERI__HELD peri_tensor *all = NULL;
    if (e->n_results == 1 && grad[0]) {
        PERI_TRY(peri_tensor_contiguous(grad[0], &all));
        return peri_tensor_to(all, PERI_F32, NULL, out);
    }
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 2, shape, &all));
    for (int32_t i = 0; i < e->n_results; i++) {
        PERI__HELD peri_tensor *part = NULL;
        PERI_TRY(view_of_result(b, all, i, &at, &part));
        PERI_TRY(grad[i] ? peri_tensor_copy(part, grad[i]) : peri_tensor_fill(part, 0));
    }
    *out = peri__hand_over(&all);
    return PERI_OK;
}

/** Whether the gradients of the results can be read where they lie: to join them is to read and write all of them once
 *  more. */
static bool gradients_usable_in_place(const batch *b, peri_tensor *const *grad)
{
    const peri_sharded *e = b->ebc;
    bool can = e->kind->by_id && e->n_results > 1 && peri__immediate(e->device);
    for (int32_t i = 0; i < e->n_results && can; i++)
        can = grad[i] && grad[i]->dtype == PERI_F32 && peri__device(grad[i]) == e->device && peri__contiguous(grad[i]);
    return can;
}

/** The same of one gradient of pooled rows that is a window of a wider matrix. The ids' weights and variable batches
 *  want it contiguous. */
static bool gradient_is_window(const batch *b, const peri_tensor *grad)
{
    const peri_sharded *e = b->ebc;
    return !e->kind->by_id && e->n_results == 1 && grad && peri__is_window(grad, e->device) && !b->weights_dist &&
           !b->input->layouts[PERI__TO_OWNERS]->home->variable;
}

/** Open the rows of the gradients @grad_out, and decide who takes what from there. */
static peri_status bind_gradients(batch *b, peri_tensor *const *grad_out)
{
    peri__rows *r = &b->rows[PERI__TO_OWNERS];
    PERI__HELD peri_tensor *joined = NULL;
    PERI_TRY(peri__rows_open(r, b->input, PERI__TO_OWNERS));
    r->apart = gradients_usable_in_place(b, grad_out);
    const bool there = r->apart || gradient_is_window(b, grad_out[0]);
    if (!there) PERI_TRY(join_gradients(b, grad_out, &joined));
    if (joined && b->input->repeats) PERI_TRY(peri__repeats_add_up(b->input->repeats, joined));
    return peri__rows_bind(r, there ? grad_out : &joined, r->apart ? b->ebc->n_results : 1);
}

/** @grad_out: gradients of the module's results. */
static peri_status start_backward(peri__trip *trip, peri_tensor *const *grad_out)
{
    batch *b = (batch *)trip;
    b->ebc->passes++;
    peri_status status = bind_gradients(b, grad_out);
    if (status >= 0) status = b->ebc->kind->spread(&b->rows[PERI__TO_OWNERS]);
    for (int32_t part = 0; part < b->ebc->parts && status >= 0; part++) status = rows_start(b, part, PERI__TO_OWNERS);
    if (status >= 0) status = advance_hops(b);
    if (status >= 0 && b->weights_dist && b->weights_dist->at_home) /* made of the rows that came home */
        status = peri__pooled_weights(&b->rows[PERI__TO_HOMES], b->rows[PERI__TO_OWNERS].ends[0],
                                      &b->weights_dist->replicas);
    if (status >= 0) status = reduce_replicas(b);
    peri__rows_drop_ends(&b->rows[PERI__TO_OWNERS]);
    return status;
}

static const peri__trip_vtab batch_vtab = {PERI__TRIP_NODES("sharded lookup", "sharded output_dist", PERI__UPDATES),
                                           .set_out = start_backward, .come_back = finish_backward, .fini = batch_fini};

/* -- forward ------------------------------------------------------------------------------------------------------- */

/** Record the lookup: a function of the dense sets' leaves, of tables that no tensor stands for, and of the ids'
 *  weights if they want it.
 */
static peri_status record_lookup(batch *b, peri__node **leave)
{
    peri_sharded *e = b->ebc;
    PERI__HELD peri_tensor *token = NULL;
    int32_t n = 1;
    for (int32_t g = 0; g < e->n_sets; g++) n += e->sets[g].dense ? e->sets[g].n_tables : 0;
    PERI__SCRATCH peri_tensor **leaves = peri__alloc(sizeof *leaves * (size_t)n);
    if (!leaves) return PERI_ENOMEM;
    n = 0;
    for (int32_t g = 0; g < e->n_sets; g++)
        for (int32_t i = 0; e->sets[g].dense && i < e->sets[g].n_tables; i++) leaves[n++] = e->sets[g].leaves[i];
    if (b->weights_dist) PERI_TRY(peri__weights_dist_record(b->weights_dist, &token));
    leaves[n++] = token;
    return peri__trip_leaves(&b->trip, leaves, n, leave);
}

static peri_status output_step(peri_work *work)
{
    output_dist *o = (output_dist *)work;
    peri_status status = o->sent ? PERI_OK : PERI_PENDING;
    if (status == PERI_OK) status = rows_test(o->batch, PERI__PARTS, PERI__TO_HOMES);
    if (status == PERI_OK && o->asks) status = peri__managed_batch_test(o->batch->input->arrival);
    if (status < 0) return peri__group_fail(o->batch->ebc->group, status);
    return status == PERI_OK && o->verdict ? peri__verdict_test(o->verdict) : status;
}

static void output_fini(peri_work *work)
{
    output_dist *o = (output_dist *)work;
    if (o->batch && !o->used) rows_drop(o->batch, PERI__TO_HOMES);
    peri__verdict_release(o->verdict);
    peri__node_release(o->leave);
    if (!o->batch) return;
    if (o->batch->input->used) peri__input_done(o->batch->input);
    peri__trip_release(&o->batch->trip);
}

static const peri__work_vtab output_vtab = {.name = "output_dist", .step = output_step, .fini = output_fini};

/** Zeros where this rank has nothing to add to its node's sums. */
static peri_status zero_sums(const batch *b)
{
    PERI__HELD peri_tensor *lane = NULL;
    PERI_TRY(view_of_lane(&b->rows[PERI__TO_HOMES], PERI__NODE_LANE, false, &lane));
    return peri__tensor_zero(lane);
}

/** This rank cannot look up: PERI_OK if the others will hear of it. */
static peri_status end_for_others(output_dist *o, peri_status status)
{
    if (!o->verdict) return status;
    peri__verdict_note(o->verdict, status);
    o->failed = true;
    return PERI_OK;
}

/** Look up a part of the tables. */
static peri_status rows_of_part(output_dist *o, int32_t part, bool recording)
{
    batch *b = o->batch;
    peri_sharded *e = b->ebc;
    for (int32_t g = 0; g < e->n_sets; g++) {
        if (e->sets[g].part != part) continue;
        if (recording) PERI_TRY(peri__tbe_ema(e->sets[g].tbe));
        PERI_TRY(
            peri_tbe_batch_forward(b->input->looks[PERI__TO_HOMES][g], peri__rows_of(&b->rows[PERI__TO_HOMES], g)));
    }
    return PERI_OK;
}

/** Look up a part of the tables, and send its rows to other ranks. */
static peri_status look_up_part(output_dist *o, int32_t part, bool recording)
{
    batch *b = o->batch;
    peri_sharded *e = b->ebc;
    peri_status status = o->failed ? PERI_OK : rows_of_part(o, part, recording);
    if (status < 0) PERI_TRY(end_for_others(o, status));
    peri__parts_begin(e->group);
    status = rows_start(b, part, PERI__TO_HOMES);
    peri__parts_end(e->group);
    return status;
}

/** Room for the results that are put together, and who writes what there. A row more is for bags that no sample has. */
static peri_status bind_results(batch *b)
{
    const peri_sharded *e = b->ebc;
    const peri__home *h = b->input->layouts[PERI__TO_HOMES]->home;
    if (h->variable && !e->kind->by_id && peri__immediate(e->device) &&
        (e->routes->n_replicas || (!e->exact && !e->two_rules)))
        PERI_TRY(peri__repeats_new(h, b->input->inverse, &b->input->repeats));
    const int64_t shape[] = {h->joined_rows + (b->input->repeats ? 1 : 0), e->cols};
    PERI__HELD peri_tensor *results = NULL;
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 2, shape, &results));
    return peri__rows_bind(&b->rows[PERI__TO_HOMES], &results, 1);
}

static peri_status look_up_parts(output_dist *o)
{
    batch *b = o->batch;
    peri_sharded *e = b->ebc;
    bool recording = peri_grad_enabled() && !e->frozen;
    PERI_TRY(peri__rows_open(&b->rows[PERI__TO_HOMES], b->input, PERI__TO_HOMES));
    if (e->hollow) PERI_TRY(zero_sums(b));
    peri_status status = bind_results(b);
    for (int32_t part = 0; part < e->parts && status >= 0; part++) {
        status = look_up_part(o, part, recording);
        if (status >= 0 && part + 1 < e->parts) peri__between();
    }
    peri__rows_unbind(&b->rows[PERI__TO_HOMES]);
    PERI_TRY(status);
    if (o->verdict) PERI_TRY(peri__verdict_post(o->verdict));
    o->sent = true;
    return recording ? record_lookup(b, &o->leave) : PERI_OK;
}

/** @output as what it must be: a complete output_dist of this module. */
static peri_status check_output(const char *f, const peri_sharded *e, peri_work *output, output_dist **out)
{
    output_dist *o = (output_dist *)output;
    if (output->vtab != &output_vtab || o->batch->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an output_dist of this module", f);
    if (output->status != PERI_OK)
        return peri__fail(PERI_EINVAL, "%s: the output_dist is not complete; wait for it", f);
    *out = o;
    return PERI_OK;
}

/** @dist as what it must be: an input_dist of this module, complete and not yet looked up. */
static peri_status check_dist(const char *f, const peri_sharded *e, peri_work *dist, peri__input_dist **out)
{
    peri__input_dist *d = (peri__input_dist *)dist;
    if (dist->vtab != &peri__input_vtab || d->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an input_dist of this module", f);
    if (dist->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the input_dist is not complete; wait for it", f);
    if (d->used) return peri__fail(PERI_EINVAL, "%s: this input_dist was already used", f);
    *out = d;
    return PERI_OK;
}

peri_status peri_sharded_prefetch(peri_sharded *e, peri_work *dist)
{
    PERI_NEED(e, dist);
    peri__input_dist *d;
    PERI_TRY(check_dist("peri_sharded_prefetch", e, dist, &d));
    if (e->stored) { /* also where this rank has none of the files: all ranks' maps are ahead, or none is */
        peri_status status = peri__managed_map_ids(d);
        if (status < 0 && e->world_size > 1) peri__group_fail(e->group, status);
        if (status != PERI_OK) return status;
    }
    for (int32_t g = 0; g < e->n_sets; g++) {
        if (!e->sets[g].cached) continue;
        PERI_TRY(lookup_of_arrived(d, PERI__TO_HOMES, g));
        peri_status status = peri_tbe_batch_prefetch(d->looks[PERI__TO_HOMES][g]);
        if (status >= 0 || e->world_size == 1) PERI_TRY(status);
        else peri_error_clear(); /* it is a hint: the lookup meets the same, and tells the other ranks */
    }
    return PERI_OK;
}

/** Bind both directions of a batch as a lookup and a backward pass with gradients of zero would, and describe them. */
static peri_status explain_batch(batch *b, peri__buffer *text)
{
    const peri_sharded *e = b->ebc;
    PERI_TRY(peri__rows_open(&b->rows[PERI__TO_HOMES], b->input, PERI__TO_HOMES));
    PERI_TRY(bind_results(b));
    peri__explain(text, &b->rows[PERI__TO_HOMES]);
    rows_drop(b, PERI__TO_HOMES);
    if (e->frozen) return PERI_OK;
    PERI__SCRATCH peri_tensor **none = peri__alloc_zero(sizeof *none * (size_t)e->n_results);
    if (!none) return PERI_ENOMEM;
    PERI_TRY(bind_gradients(b, none));
    peri__explain(text, &b->rows[PERI__TO_OWNERS]);
    return PERI_OK;
}

peri_status peri_sharded_explain(peri_sharded *e, peri_work *dist, char **out)
{
    PERI_NEED(e, dist, out);
    peri__input_dist *d;
    batch *b;
    peri__buffer text = {0};
    PERI_TRY(check_dist("peri_sharded_explain", e, dist, &d));
    PERI_TRY(batch_new(d, &b));
    peri_status status = explain_batch(b, &text);
    peri__trip_release(&b->trip);
    if (status >= 0) status = text.status;
    if (status < 0) peri__free(text.data);
    else *out = text.data;
    return status;
}

void peri_sharded_explain_release(char *text)
{
    if (text && !peri__border_refuses(__func__)) peri__free(text);
}

/** Whether a batch asks for its input again once it is looked up. */
static bool input_asked_again(const peri__input_dist *d)
{
    return d->ebc->kind->by_id || d->ebc->returns_rows || peri__weights_want_grad(d) ||
           d->layouts[PERI__TO_HOMES] != d->layouts[PERI__TO_OWNERS];
}

peri_status peri_sharded_compute_and_output_dist(peri_sharded *e, peri_work *dist, peri_work **out)
{
    PERI_NEED(e, dist, out);
    static const char *const f = "peri_sharded_compute_and_output_dist";
    peri__input_dist *d;
    PERI_TRY(check_dist(f, e, dist, &d));
    PERI_TRY(peri__group_check(f, e->group));
    peri_status status = peri__managed_map_ids(d);
    if (status < 0 && e->world_size > 1) peri__group_fail(e->group, status);
    if (status != PERI_OK) return status;
    peri_work *work;
    PERI_TRY(peri__work_new(sizeof(output_dist), &output_vtab, e->group, e->device, &work));
    output_dist *o = (output_dist *)work;
    if (e->stored && e->world_size > 1) status = peri__verdict_new(e->group, &o->verdict);
    if (status >= 0) status = batch_new(d, &o->batch);
    if (status >= 0 && d->arrival) {
        status = peri__managed_reset(d);
        if (status < 0) status = end_for_others(o, status);
    }
    if (status >= 0) status = look_up_parts(o);
    if (status >= 0 && d->arrival) status = peri__managed_post(d);
    if (status < 0) {
        peri__work_drop(work, status);
        return e->world_size > 1 ? peri__group_fail(e->group, status) : status;
    }
    d->used = true;
    o->asks = d->arrival && e->returns_rows;
    if (!input_asked_again(d)) peri__routing_drop_input(&d->routing);
    *out = work;
    return PERI_OK;
}

/** Result @i of a batch where it lies as it is to be: @whole. */
static peri_status whole_result(const output_dist *o, int32_t i, const peri_k_piece *whole, peri_tensor **out)
{
    const peri_sharded *e = o->batch->ebc;
    const peri__rows *r = &o->batch->rows[PERI__TO_HOMES];
    peri_tensor *from = whole->own ? r->own : r->away;
    int64_t shape[2] = {o->batch->input->layouts[PERI__TO_HOMES]->home->feature_rows[e->result_feature[i]], e->cols};
    return peri__tensor_view(from, 2, shape, NULL, from->offset + whole->offset, out);
}

/** All results of a batch, of the module's output dtype, not recorded. @out: new references; *@made of them. */
static peri_status collect_results(const output_dist *o, peri_tensor **out, int32_t *made)
{
    const batch *b = o->batch;
    const peri_sharded *e = b->ebc;
    const peri__home *h = b->input->layouts[PERI__TO_HOMES]->home;
    peri_tensor *rows = b->rows[PERI__TO_HOMES].ends[0];
    int64_t at = 0;
    PERI_TRY(e->kind->combine(&b->rows[PERI__TO_HOMES]));
    for (; *made < e->n_results; ++*made) {
        const int32_t i = *made;
        const peri_k_piece *whole = h->whole && h->whole[i].offset >= 0 ? &h->whole[i] : NULL;
        PERI__HELD peri_tensor *wide = NULL;
        PERI_TRY(whole ? whole_result(o, i, whole, &wide) : view_of_result(b, rows, i, &at, &wide));
        PERI_TRY(peri_tensor_to(wide, e->output_dtype, NULL, &out[i]));
    }
    return PERI_OK;
}

/** The same, recorded if the lookup is; or none. */
static peri_status make_results(output_dist *o, peri_tensor **out)
{
    int32_t made = 0;
    peri_status status = collect_results(o, out, &made);
    if (status >= 0 && o->leave) status = peri__trip_arrives(&o->batch->trip, &o->leave, out, made);
    for (; status < 0 && made > 0; made--) peri_tensor_release(out[made - 1]);
    return status;
}

int32_t peri_sharded_results(const peri_sharded *e) { return e ? e->n_results : 0; }

peri_status peri_sharded_output(peri_sharded *e, peri_work *output, peri_tensor **out)
{
    PERI_NEED(e, output, out);
    output_dist *o;
    PERI_TRY(check_output("peri_sharded_output", e, output, &o));
    if (o->used) return peri__fail(PERI_EINVAL, "peri_sharded_output: this output was already taken");
    PERI_TRY(make_results(o, out));
    o->used = true;
    peri__input_done(o->batch->input);
    const peri__weights_dist *w = o->batch->weights_dist;
    if (w && w->at_home) peri__rows_drop_ends(&o->batch->rows[PERI__TO_HOMES]);
    else rows_drop(o->batch, PERI__TO_HOMES);
    return PERI_OK;
}

peri_status peri_sharded_rows(peri_sharded *e, peri_work *output, peri_tensor **out)
{
    PERI_NEED(e, output, out);
    output_dist *o;
    PERI_TRY(check_output("peri_sharded_rows", e, output, &o));
    if (!o->asks)
        return peri__fail(PERI_EINVAL, "peri_sharded_rows: %s",
                          e->returns_rows && e->n_managed ? "the rows were already taken"
                                                          : "the module has no rows of raw ids to return");
    PERI_TRY(peri__managed_rows(o->batch->input, out));
    o->asks = false;
    return PERI_OK;
}
