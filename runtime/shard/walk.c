/* SPDX-License-Identifier: Apache-2.0
 *
 * walk.c: a batch walks through a sharded module: its router takes the ids to their owners, tables look up what arrived, its ways bring the
 * rows back to the ranks that asked; gradients take the same way in reverse. What is particular to a kind of module are its stages.
 *
 * The owner's buffer holds rows as [own lookups | replicas | rank 0's | rank 1's ...]: what belongs to this rank itself comes first and is
 * never sent; then what others get, lane after lane, in each rank after rank. The home side's buffer holds what other ranks return,
 * likewise by lane and rank. Gradients use two buffers of the same layouts, the other way round. Each lane has a way of its own.
 *
 * The two directions may carry different rows (peri__rule), in layouts of their own, with a lookup each. Else they share both.
 *
 * On the tape a batch is a trip (comm/transfer.h). When its gradient sets out it is spread to the rows and posted; when it has come back
 * the shards are updated. A pass does all else in between, while the gradient travels.
 */
#include "walk.h"

#include "../tensor/jagged_internal.h"

/** A batch between its lookup and the end of its backward pass; shared by the work and the two nodes. */
typedef struct batch {
    peri__trip trip;
    peri_sharded *ebc;
    peri__batch_layout *layouts[2]; /* by direction */
    peri_tbe_batch **looks[2];   /* by direction and set: its lookup */
    peri__given given;           /* retained */
    peri_tensor *home_weights;
    peri__weights_dist *weights_dist;                 /* NULL: the weights want no gradient */
    peri_tensor *looked_up, *received;                /* the rows of the results, if the weights' gradient is made of them here */
    /* Backward: */
    peri__journey gradient[PERI__LANES];
    peri_tensor *sent, *rows;    /* its buffers: on the home side, and the owner's */
    peri_tensor **replica_flat;  /* by set: gradients of fused replicas, being reduced */
    peri_work **replica_work;    /* by set */
} batch;

/** The work of peri_sharded_compute_and_output_dist. */
typedef struct output_dist {
    peri_work base;
    batch *batch;
    peri_tensor *buffer, *received;
    peri__input_dist *ids;       /* of the batch, while rows of its raw ids are asked for; retained */
    peri__journey rows[PERI__LANES];
    peri__node *leave;           /* until the output is handed out; NULL: not recorded */
    bool used;
} output_dist;

static const peri__work_vtab input_vtab, output_vtab;
static const peri__trip_vtab batch_vtab;
static const char *const input_name = "peri_sharded_input_dist";

static peri_status new_f32(peri_device *device, int64_t n, peri_tensor **out) { return peri_tensor_new(device, PERI_F32, 1, &n, out); }

/* -- ids to their owners ----------------------------------------------------------------------------------------------------------- */

/** What a module announces with every batch. */
enum { WORD_KIND, WORD_FILES, WORD_STAMP };
_Static_assert((int)WORD_STAMP < (int)PERI__ROUTING_WORDS, "words of a module");

/** Kind of the input: what must be alike on all ranks. */
enum { KIND_VARIABLE = 1, KIND_WEIGHTS_GRAD = 2, KIND_EVALUATION = 4 };

static peri_status check_words(void *dist, int32_t rank, const int64_t *words)
{
    const peri__input_dist *d = dist;
    const peri_sharded *e = d->ebc;
    const int64_t *own = d->routing.args.words;
    if ((words[WORD_KIND] ^ own[WORD_KIND]) & KIND_VARIABLE)
        return peri__fail(PERI_EMISMATCH, "%s: the input of rank %d is%s of variable batch, that of rank %d is%s", input_name, rank,
                          words[WORD_KIND] & KIND_VARIABLE ? "" : " not", e->rank, own[WORD_KIND] & KIND_VARIABLE ? "" : " not");
    if ((words[WORD_KIND] ^ own[WORD_KIND]) & KIND_EVALUATION)
        return peri__fail(PERI_EMISMATCH, "%s: rank %d is %s, rank %d %s; raw ids are learned by all ranks or by none", input_name, rank,
                          words[WORD_KIND] & KIND_EVALUATION ? "in evaluation" : "in training", e->rank,
                          own[WORD_KIND] & KIND_EVALUATION ? "in evaluation" : "in training");
    if (words[WORD_KIND] != own[WORD_KIND])
        return peri__fail(PERI_EMISMATCH, "%s: the per-sample weights of rank %d %s a gradient, those of rank %d %s", input_name, rank,
                          words[WORD_KIND] & KIND_WEIGHTS_GRAD ? "want" : "do not want", e->rank,
                          own[WORD_KIND] & KIND_WEIGHTS_GRAD ? "do" : "do not");
    if (words[WORD_FILES] && own[WORD_FILES] && words[WORD_STAMP] != own[WORD_STAMP])
        return peri__fail(PERI_EMISMATCH,
                          "%s: the row files of rank %d were of another flush, when they were opened, than those of rank %d (flush %lld, "
                          "iteration %lld); they must be of the same flush",
                          input_name, rank, e->rank, (long long)e->found.number, (long long)e->found.iteration);
    return PERI_OK;
}

static const char *identity_text(void *dist, int64_t *bytes)
{
    const peri_sharded *e = ((const peri__input_dist *)dist)->ebc;
    *bytes = e->identity_bytes;
    return e->identity_text;
}

static peri_status differ(void *dist, int32_t other, const char *texts, const int64_t *bytes)
{
    (void)other;
    return peri__identity_fail(input_name, ((const peri__input_dist *)dist)->ebc->world_size, texts, bytes);
}

/** Once it is known what others send. */
static peri_status lay_out(peri__input_dist *d)
{
    const peri__routing *r = &d->routing;
    peri_sharded *e = d->ebc;
    const bool by_id = e->kind->by_id;
    const int64_t *counts = by_id ? r->ids : r->counts;
    const peri__rule rule = {.by_id = by_id || peri__weights_at_home(d), .to_homes = e->two_rules};
    peri__home *home;
    if (!d->home) PERI_TRY(peri__batch_home(e, r, (peri__rule){.by_id = by_id}, &d->home));
    PERI_TRY(peri__batch_layout_new(e, d->home, counts, NULL, &d->layouts[PERI__TO_OWNERS]));
    if (rule.by_id == by_id && !rule.to_homes) {
        peri__refs_add(&d->layouts[PERI__TO_OWNERS]->refs);
        d->layouts[PERI__TO_HOMES] = d->layouts[PERI__TO_OWNERS];
        return PERI_OK;
    }
    PERI_TRY(peri__batch_home(e, r, rule, &home));
    peri_status status = peri__batch_layout_new(e, home, counts, by_id ? NULL : r->ids, &d->layouts[PERI__TO_HOMES]);
    peri__home_release(home);
    return status;
}

static peri_status input_step(peri_work *work)
{
    peri__input_dist *d = (peri__input_dist *)work;
    peri_status status = peri__routing_test(&d->routing), laid_out = PERI_OK;
    if (status >= 0 && d->routing.announced && !d->layouts[PERI__TO_HOMES]) laid_out = lay_out(d);
    if (laid_out < 0) status = laid_out;
    return status < 0 && d->ebc->world_size > 1 ? peri__group_fail(d->ebc->group, status) : status;
}

static void looks_free(peri_tbe_batch **looks, int32_t n)
{
    for (int32_t g = 0; looks && g < n; g++) peri_tbe_batch_release(looks[g]);
    peri__free(looks);
}

static void input_fini(peri_work *work)
{
    peri__input_dist *d = (peri__input_dist *)work;
    for (int32_t way = 0; way < 2; way++) {
        looks_free(d->looks[way], d->ebc->n_sets);
        peri__batch_layout_release(d->layouts[way]);
        peri_tensor_release(d->id_offsets[way]);
    }
    peri__arrival_free(d->arrival, d->ebc);
    peri__routing_fini(&d->routing);
    peri_tensor_release(d->inverse);
    peri__home_release(d->home);
    peri_sharded_release(d->ebc);
}

static const peri__work_vtab input_vtab = {.name = "input_dist", .step = input_step, .fini = input_fini};

static peri_status check_input(peri_sharded *e, peri_kjt *kjt)
{
    peri_kjt_desc desc;
    peri_kjt_describe(kjt, &desc);
    if (desc.device != e->device)
        return peri__fail(PERI_EINVAL, "%s: the input is on %s, the module on %s", input_name, peri_device_name(desc.device),
                          peri_device_name(e->device));
    if (desc.values_dtype != PERI_I64 && desc.values_dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: ids are %s, allowed: i64, i32", input_name, peri_dtype_name(desc.values_dtype));
    if (desc.weighted != e->weighted)
        return peri__fail(PERI_EINVAL, "%s: the input has %sweights, the module is %sweighted (is_weighted)", input_name,
                          desc.weighted ? "" : "no ", e->weighted ? "" : "not ");
    return PERI_OK;
}

/** Start the routing of @kjt, and lay out what comes back of it. */
static peri_status take_input(peri__input_dist *d, peri_kjt *kjt)
{
    peri_sharded *e = d->ebc;
    peri_tensor *weights = NULL, *inverse = NULL;
    PERI_TRY(peri_kjt_weights(kjt, &weights));
    bool want = weights && weights->requires_grad;
    peri_tensor_release(weights);
    if (want && e->frozen && peri__grad_enabled())
        return peri__fail(PERI_EINVAL, "%s: the input's weights want a gradient, which tables that are not trained do not give; look up "
                                       "without gradients (peri_grad_enable)", input_name);
    want = want && !e->frozen;
    peri__routing_args a = {.kjt = kjt, .ctx = d, .check = check_words, .by_bag = e->any_mean ? e->kind->by_bag : NULL,
                            .keep_lengths = want && !e->exact, .by_id = e->kind->by_id,
                            .keep_places = e->two_rules || (want && e->exact) || e->returns_rows,
                            .agreement = {.hash = peri__identity_hash(e), .bytes = e->identity_bytes, .ctx = d, .text = identity_text,
                                          .differ = differ}};
    PERI_TRY(peri__routing_start(&d->routing, &e->router, &a));
    if (!e->kind->by_id) PERI_TRY(peri__batch_home(e, &d->routing, (peri__rule){0}, &d->home));
    bool variable = d->home && d->home->variable;
    int64_t *words = d->routing.args.words;
    words[WORD_KIND] = (variable ? KIND_VARIABLE : 0) | (want ? KIND_WEIGHTS_GRAD : 0) |
                       (e->n_managed && !d->training ? KIND_EVALUATION : 0);
    words[WORD_FILES] = e->found.files;
    words[WORD_STAMP] = (int64_t)e->found.stamp;
    if (!variable) return PERI_OK;
    PERI_TRY(peri_kjt_inverse_indices(kjt, &inverse));
    peri_status status = peri_tensor_to(inverse, PERI_I64, NULL, &d->inverse);
    peri_tensor_release(inverse);
    return status;
}

static peri_status start(peri_sharded *e, peri_kjt *kjt, peri_work **out)
{
    peri_work *work;
    PERI_TRY(check_input(e, kjt));
    PERI_TRY(peri__work_new(sizeof(peri__input_dist), &input_vtab, e->group, e->device, &work));
    peri__input_dist *d = (peri__input_dist *)work;
    peri_sharded_retain(e);
    d->ebc = e;
    d->training = e->training;
    peri_status status = take_input(d, kjt);
    if (status < 0) peri__work_cancel(work, status);
    else status = peri_work_test(work);
    if (status < 0) peri_work_release(work);
    else *out = work;
    return status < 0 ? status : PERI_OK;
}

peri_status peri_sharded_input_dist(peri_sharded *e, peri_kjt *kjt, peri_work **out)
{
    PERI_NEED(e);
    PERI_NEED(kjt);
    PERI_NEED(out);
    PERI_TRY(peri__group_check(input_name, e->group));
    peri_status status = start(e, kjt, out);
    if (status < 0 && e->world_size > 1) peri__group_fail(e->group, status);
    return status;
}

/* -- a batch ----------------------------------------------------------------------------------------------------------------------- */

/** Offsets that make a bag of each id. */
static peri_status id_offsets(peri__input_dist *d, bool own, peri_tensor **out)
{
    const peri_tensor *ids = own ? d->routing.values : d->routing.received[PERI__IDS];
    if (!d->id_offsets[own]) PERI_TRY(peri__offsets_of_equal(d->ebc->device, peri__numel(ids), 1, &d->id_offsets[own]));
    *out = d->id_offsets[own];
    return PERI_OK;
}

/** d->looks[direction][g]: @g's lookup of what arrived, unless it is there; to owners it is the one whose gradients come back. */
static peri_status look_of(peri__input_dist *d, int32_t direction, int32_t g)
{
    const peri__table_set *set = &d->ebc->sets[g];
    const peri__routing *r = &d->routing;
    const peri__rule rule = d->layouts[direction]->home->rule;
    peri_tbe_input in = {.ids = set->replica ? r->values : r->received[PERI__IDS],
                         .offsets = set->replica ? r->own_offsets : r->offsets,
                         .weights = set->replica ? r->weights : r->received[PERI__WEIGHTS],
                         .scale = set->mean ? r->received[PERI__BY_BAG] : NULL, .blocks = d->layouts[direction]->blocks[g]};
    if (!d->looks[direction]) d->looks[direction] = peri__alloc_zero(sizeof *d->looks[direction] * (size_t)peri__max(1, d->ebc->n_sets));
    if (!d->looks[direction]) return PERI_ENOMEM;
    if (d->looks[direction][g]) return PERI_OK;
    if (direction == PERI__TO_OWNERS && d->layouts[PERI__TO_HOMES] == d->layouts[PERI__TO_OWNERS]) {
        PERI_TRY(look_of(d, PERI__TO_HOMES, g));
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

static void batch_fini(peri__trip *trip)
{
    batch *b = (batch *)trip;
    int32_t n_sets = b->ebc->n_sets;
    for (int32_t g = 0; g < n_sets; g++) {
        if (b->replica_flat) peri_tensor_release(b->replica_flat[g]);
        if (b->replica_work) peri_work_release(b->replica_work[g]);
    }
    peri__free(b->replica_flat);
    peri__free(b->replica_work);
    peri_tensor *tensors[] = {b->home_weights, b->given.inverse, b->given.ids, b->given.places, b->given.offsets, b->given.weights,
                              b->looked_up, b->received, b->sent, b->rows};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) peri_tensor_release(tensors[i]);
    peri__weights_dist_release(b->weights_dist);
    for (int32_t lane = 0; lane < PERI__LANES; lane++) peri__journey_fini(&b->gradient[lane]);
    for (int32_t way = 0; way < 2; way++) {
        looks_free(b->looks[way], n_sets);
        peri__batch_layout_release(b->layouts[way]);
    }
    peri_sharded_release(b->ebc);
    peri__free(b);
}

static peri_status batch_new(peri__input_dist *d, batch **out)
{
    batch *b = peri__alloc_zero(sizeof *b);
    if (!b) return PERI_ENOMEM;
    peri__trip_init(&b->trip, &batch_vtab, d->ebc->group);
    peri_sharded_retain(d->ebc);
    b->ebc = d->ebc;
    for (int32_t way = 0; way < 2; way++) {
        peri__refs_add(&d->layouts[way]->refs);
        b->layouts[way] = d->layouts[way];
    }
    b->home_weights = peri__keep(d->routing.weights);
    b->given.inverse = peri__keep(d->inverse);
    b->given.places = peri__keep(d->routing.places);
    if (d->ebc->kind->by_id || d->layouts[PERI__TO_HOMES] != d->layouts[PERI__TO_OWNERS]) {
        b->given.ids = peri__keep(d->routing.values);
        b->given.offsets = peri__keep(d->routing.offsets_in);
        b->given.weights = peri__keep(d->routing.weights);
    }
    peri_status status = PERI_OK;
    for (int32_t way = 0; way < 2 && status >= 0; way++) {
        for (int32_t g = 0; g < d->ebc->n_sets && status >= 0; g++) status = look_of(d, way, g);
        if (status < 0) break;
        b->looks[way] = d->looks[way];
        d->looks[way] = NULL;
    }
    if (status >= 0) status = peri__weights_dist_new(d, &b->weights_dist);
    if (status < 0) peri__trip_release(&b->trip);
    else *out = b;
    return status;
}

/* -- rows on their ways ------------------------------------------------------------------------------------------------------------ */

/** Elements of the owner's buffer before those of others. */
static int64_t own_of(const peri__batch_layout *l) { return l->home->own_out + l->home->replica_out; }

/** Rows of lane @lane in the owner's buffer, or (@home) in that of the home. */
static peri_status lane_of(const peri__batch_layout *l, peri_tensor *buffer, int32_t lane, bool home, peri_tensor **out)
{
    const int64_t *n = home ? l->home->lane_out : l->owner->lane_out;
    int64_t at = home ? 0 : own_of(l);
    for (int32_t before = 0; before < lane; before++) at += n[before];
    return peri__tensor_view(buffer, 1, &n[lane], NULL, buffer->offset + at, out);
}

/** Send the others' part of an owner's buffer to the homes, or a home's buffer to the owners. */
static peri_status rows_start(const batch *b, peri_tensor *owner, peri_tensor *home, int32_t direction, peri__journey *journeys)
{
    const peri__batch_layout *l = b->layouts[direction];
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        const peri__way *way = &b->ebc->ways[lane];
        peri_tensor *ends[2] = {NULL, NULL};
        if (!way->n) continue;
        peri_status status = lane_of(l, owner, lane, false, &ends[0]);
        if (status >= 0) status = lane_of(l, home, lane, true, &ends[1]);
        if (status >= 0)
            status = peri__journey_start(&journeys[lane], way, l->legs[lane], direction, ends[direction == PERI__TO_OWNERS],
                                         ends[direction != PERI__TO_OWNERS]);
        peri_tensor_release(ends[0]);
        peri_tensor_release(ends[1]);
        PERI_TRY(status);
    }
    return PERI_OK;
}

static peri_status rows_test(peri__journey *journeys)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++) {
        peri_status status = peri__journey_test(&journeys[lane]);
        if (status != PERI_OK) return status;
    }
    return PERI_OK;
}

/* -- backward: the gradient is back ------------------------------------------------------------------------------------------------ */

/** What a set's lookup makes of the gradient of its rows besides updates: NULL for the weights' part where they want none. */
static peri_status weights_part(const batch *b, int32_t g, peri_tensor **out)
{
    *out = NULL;
    bool here = b->weights_dist && !b->weights_dist->at_home;
    return here ? peri__weights_dist_part(b->weights_dist, b->ebc->sets[g].replica, out) : PERI_OK;
}

/** Hand it on. The gradients of replicas were divided by a number of their own (see gradient_divisor). */
static peri_status weights_part_done(const batch *b, int32_t g, peri_tensor *part)
{
    const peri__table_set *set = &b->ebc->sets[g];
    if (!part) return PERI_OK;
    return peri__weights_dist_add(b->weights_dist, set->replica, part, set->replica && !set->dense ? b->ebc->world_size : 1);
}

/** The dense gradient of a set's tables, and its part of the weights'. @flat new. */
static peri_status flat_gradient(const batch *b, int32_t g, peri_tensor *rows, peri_tensor **flat)
{
    peri_tensor *part, *result;
    PERI_TRY(weights_part(b, g, &part));
    peri_status status = peri_tbe_batch_gradient(b->looks[PERI__TO_OWNERS][g], rows, part, &result);
    if (status < 0) {
        peri_tensor_release(part);
        return status;
    }
    status = weights_part_done(b, g, part);
    if (status < 0) peri_tensor_release(result);
    else *flat = result;
    return status;
}

/** Update a set's shards; its part of the weights' gradient is made from the rows as they were. */
static peri_status update(const batch *b, int32_t g, peri_tensor *rows)
{
    peri_tensor *part;
    PERI_TRY(weights_part(b, g, &part));
    peri_status status = peri_tbe_batch_backward(b->looks[PERI__TO_OWNERS][g], rows, part);
    if (status >= 0) return weights_part_done(b, g, part);
    peri_tensor_release(part);
    return status;
}

/** Give the leaves of a dense set their gradients; @at counts the leaves of the node. */
static peri_status dense_gradients(const batch *b, int32_t g, peri_tensor *rows, peri_tensor **grad_in, int32_t *at)
{
    peri__table_set *set = &b->ebc->sets[g];
    peri_tensor *flat;
    PERI_TRY(flat_gradient(b, g, rows, &flat));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < set->n_tables && status >= 0; i++)
        status = peri_tbe_gradient_table(set->tbe, flat, i, &grad_in[(*at)++]);
    peri_tensor_release(flat);
    return status;
}

static peri_status replicas_test(batch *b)
{
    for (int32_t g = 0; g < b->ebc->n_sets && b->replica_work; g++) {
        peri_status status = b->replica_work[g] ? peri_work_test(b->replica_work[g]) : PERI_OK;
        if (status != PERI_OK) return status;
    }
    return PERI_OK;
}

/** Inputs: the leaves of the dense sets, and the token of weights_dist. */
static peri_status come_back(peri__trip *trip, const peri__node *leave, peri_tensor **grad_in)
{
    (void)leave;
    batch *b = (batch *)trip;
    peri_sharded *e = b->ebc;
    peri_status status = rows_test(b->gradient);
    if (status == PERI_OK) status = replicas_test(b);
    if (status != PERI_OK) return status;
    peri_tensor_release(b->sent);
    b->sent = NULL;
    int32_t at = 0;
    for (int32_t g = 0; g < e->n_sets; g++) {
        peri__table_set *set = &e->sets[g];
        if (set->dense) PERI_TRY(dense_gradients(b, g, b->rows, grad_in, &at));
        else if (set->replica) PERI_TRY(peri_tbe_gradient_apply(set->tbe, b->replica_flat[g]));
        else PERI_TRY(update(b, g, b->rows));
    }
    peri_tensor_release(b->rows);
    b->rows = NULL;
    return PERI_OK;
}

/* -- backward: the gradient sets out ----------------------------------------------------------------------------------------------- */

/** Gradients of fused replicas add up over the ranks before the rows are updated. */
static peri_status reduce_replicas(batch *b, peri_tensor *rows)
{
    peri_sharded *e = b->ebc;
    for (int32_t g = 0; g < e->n_sets; g++) {
        if (!e->sets[g].replica || e->sets[g].dense) continue;
        if (!b->replica_flat) b->replica_flat = peri__alloc_zero(sizeof *b->replica_flat * (size_t)e->n_sets);
        if (!b->replica_work) b->replica_work = peri__alloc_zero(sizeof *b->replica_work * (size_t)e->n_sets);
        if (!b->replica_flat || !b->replica_work) return PERI_ENOMEM;
        PERI_TRY(flat_gradient(b, g, rows, &b->replica_flat[g]));
        if (e->world_size > 1)
            PERI_TRY(peri__coll_sum_gradients(e->group, b->replica_flat[g], 0, &b->replica_work[g]));
    }
    return PERI_OK;
}

/** Result @i of a batch among its @rows: from *@at on, which moves on. */
static peri_status result_of(const batch *b, peri_tensor *rows, int32_t i, int64_t *at, peri_tensor **out)
{
    const peri_sharded *e = b->ebc;
    const peri__home *h = b->layouts[PERI__TO_OWNERS]->home;
    int64_t shape[2] = {e->result_feature ? h->feature_rows[e->result_feature[i]] : h->rows, e->cols};
    int64_t offset = rows->offset + *at * e->cols;
    *at += shape[0];
    return peri__tensor_view(rows, 2, shape, NULL, offset, out);
}

/** The gradient of all results in f32; none counts as zeros, for the other ranks' sake. @out new. */
static peri_status join_gradients(const batch *b, peri_tensor *const *grad, peri_tensor **out)
{
    const peri_sharded *e = b->ebc;
    int64_t at = 0, shape[2] = {b->layouts[PERI__TO_OWNERS]->home->rows, e->cols};
    if (e->n_results == 1 && grad[0]) {
        peri_tensor *flat;
        PERI_TRY(peri_tensor_contiguous(grad[0], &flat));
        peri_status status = peri_tensor_to(flat, PERI_F32, NULL, out);
        peri_tensor_release(flat);
        return status;
    }
    PERI_TRY(peri_tensor_new(e->device, PERI_F32, 2, shape, out));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < e->n_results && status >= 0; i++) {
        peri_tensor *part;
        status = result_of(b, *out, i, &at, &part);
        if (status < 0) break;
        status = grad[i] ? peri_tensor_copy(part, grad[i]) : peri_tensor_fill(part, 0);
        peri_tensor_release(part);
    }
    if (status < 0) peri_tensor_release(*out);
    return status;
}

/** Whether the gradients of the results can be read where they lie: to join them is to read and write all of them once more. */
static bool in_parts(const batch *b, peri_tensor *const *grad)
{
    const peri_sharded *e = b->ebc;
    bool can = e->kind->spread_parts && e->n_results > 1 && peri__immediate(e->device);
    for (int32_t i = 0; i < e->n_results && can; i++)
        can = grad[i] && grad[i]->dtype == PERI_F32 && peri__device(grad[i]) == e->device && peri__contiguous(grad[i]);
    return can;
}

/** The gradient of the rows from that of the results. *joined: NULL, or the latter as one tensor, new. */
static peri_status spread(const batch *b, peri_tensor *const *grad_out, peri_tensor **joined)
{
    const peri_sharded *e = b->ebc;
    const peri__home *h = b->layouts[PERI__TO_OWNERS]->home;
    *joined = NULL;
    if (in_parts(b, grad_out)) return e->kind->spread_parts(e, h, &b->given, grad_out, b->rows, b->sent);
    PERI_TRY(join_gradients(b, grad_out, joined));
    return e->kind->spread(e, h, &b->given, *joined, b->rows, b->sent);
}

/** The gradient of the ids' weights from the rows that came home. */
static peri_status make_weights(batch *b, peri_tensor *grad)
{
    if (!b->weights_dist || !b->weights_dist->at_home) return PERI_OK;
    return peri__pooled_weights(b->ebc, b->layouts[PERI__TO_HOMES]->home, &b->given, grad, b->looked_up, b->received,
                                &b->weights_dist->replicas);
}

/** @grad_out: gradients of the module's results. */
static peri_status set_out(peri__trip *trip, peri_tensor *const *grad_out)
{
    batch *b = (batch *)trip;
    peri_sharded *e = b->ebc;
    const peri__batch_layout *l = b->layouts[PERI__TO_OWNERS];
    const peri__home *h = l->home;
    peri_tensor *grad = NULL;
    peri_status status;
    PERI_TRY_GOTO(new_f32(e->device, own_of(l) + l->owner->sent_out, &b->rows), out);
    PERI_TRY_GOTO(new_f32(e->device, h->received_out, &b->sent), out);
    PERI_TRY_GOTO(spread(b, grad_out, &grad), out);
    PERI_TRY_GOTO(rows_start(b, b->rows, b->sent, PERI__TO_OWNERS, b->gradient), out);
    PERI_TRY_GOTO(make_weights(b, grad), out);
    status = reduce_replicas(b, b->rows);
out:
    peri_tensor_release(grad);
    return status;
}

static const peri__trip_vtab batch_vtab = {PERI__TRIP_NODES("sharded lookup", "sharded output_dist", PERI__UPDATES), .set_out = set_out,
                                           .come_back = come_back, .fini = batch_fini};

/* -- forward ------------------------------------------------------------------------------------------------------------------------- */

/** Record the lookup: a function of the dense sets' leaves, of tables that no tensor stands for, and of the ids' weights if they want it.
 */
static peri_status record_lookup(batch *b, peri__node **leave)
{
    peri_sharded *e = b->ebc;
    peri_tensor *token = NULL;
    int32_t n = 1;
    for (int32_t g = 0; g < e->n_sets; g++) n += e->sets[g].dense ? e->sets[g].n_tables : 0;
    peri_tensor **leaves = peri__alloc(sizeof *leaves * (size_t)n);
    if (!leaves) return PERI_ENOMEM;
    n = 0;
    for (int32_t g = 0; g < e->n_sets; g++)
        for (int32_t i = 0; e->sets[g].dense && i < e->sets[g].n_tables; i++) leaves[n++] = e->sets[g].leaves[i];
    peri_status status = b->weights_dist ? peri__weights_dist_record(b->weights_dist, b->home_weights, &token) : PERI_OK;
    leaves[n++] = token;
    if (status >= 0) status = peri__trip_leaves(&b->trip, leaves, n, leave);
    peri_tensor_release(token);
    peri__free(leaves);
    return status;
}

static peri_status output_step(peri_work *work)
{
    output_dist *o = (output_dist *)work;
    peri_status status = rows_test(o->rows);
    if (status == PERI_OK && o->ids) status = peri__arrival_test(o->ids->arrival);
    return status < 0 ? peri__group_fail(o->batch->ebc->group, status) : status;
}

static void output_fini(peri_work *work)
{
    output_dist *o = (output_dist *)work;
    for (int32_t lane = 0; lane < PERI__LANES; lane++) peri__journey_fini(&o->rows[lane]);
    peri_tensor_release(o->buffer);
    peri_tensor_release(o->received);
    if (o->ids) peri_work_release(&o->ids->base);
    peri__node_release(o->leave);
    if (o->batch) peri__trip_release(&o->batch->trip);
}

static const peri__work_vtab output_vtab = {.name = "output_dist", .step = output_step, .fini = output_fini};

/** Zeros where this rank has nothing to add to its node's sums. */
static peri_status clear_sums(const batch *b, peri_tensor *buffer)
{
    peri_tensor *lane;
    PERI_TRY(lane_of(b->layouts[PERI__TO_HOMES], buffer, PERI__NODE_LANE, false, &lane));
    peri_status status = peri__tensor_zero(lane);
    peri_tensor_release(lane);
    return status;
}

static peri_status look_up(output_dist *o)
{
    batch *b = o->batch;
    peri_sharded *e = b->ebc;
    const peri__batch_layout *l = b->layouts[PERI__TO_HOMES];
    PERI_TRY(new_f32(e->device, own_of(l) + l->owner->sent_out, &o->buffer));
    PERI_TRY(new_f32(e->device, l->home->received_out, &o->received));
    if (e->hollow) PERI_TRY(clear_sums(b, o->buffer));
    bool recording = peri__grad_enabled() && !e->frozen;
    for (int32_t g = 0; g < e->n_sets; g++) {
        if (recording) PERI_TRY(peri__tbe_ema(e->sets[g].tbe));
        PERI_TRY(peri_tbe_batch_forward(b->looks[PERI__TO_HOMES][g], o->buffer));
    }
    peri__parts_begin(e->group);
    peri_status status = rows_start(b, o->buffer, o->received, PERI__TO_HOMES, o->rows);
    peri__parts_end(e->group);
    PERI_TRY(status);
    return recording ? record_lookup(b, &o->leave) : PERI_OK;
}

/** @dist as what it must be: an input_dist of this module, complete and not yet looked up. */
static peri_status check_dist(const char *f, const peri_sharded *e, peri_work *dist, peri__input_dist **out)
{
    peri__input_dist *d = (peri__input_dist *)dist;
    if (dist->vtab != &input_vtab || d->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an input_dist of this module", f);
    if (dist->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the input_dist is not complete; wait for it", f);
    if (d->used) return peri__fail(PERI_EINVAL, "%s: this input_dist was already used", f);
    *out = d;
    return PERI_OK;
}

peri_status peri_sharded_prefetch(peri_sharded *e, peri_work *dist)
{
    PERI_NEED(e);
    PERI_NEED(dist);
    peri__input_dist *d;
    PERI_TRY(check_dist("peri_sharded_prefetch", e, dist, &d));
    bool any = false;
    for (int32_t g = 0; g < e->n_sets; g++) any = any || e->sets[g].cached;
    if (any) {
        peri_status status = peri__managed_arrive(d);
        if (status < 0 && e->world_size > 1) peri__group_fail(e->group, status);
        if (status != PERI_OK) return status;
    }
    for (int32_t g = 0; g < e->n_sets; g++) {
        if (!e->sets[g].cached) continue;
        PERI_TRY(look_of(d, PERI__TO_HOMES, g));
        PERI_TRY(peri_tbe_batch_prefetch(d->looks[PERI__TO_HOMES][g]));
    }
    return PERI_OK;
}

peri_status peri_sharded_compute_and_output_dist(peri_sharded *e, peri_work *dist, peri_work **out)
{
    PERI_NEED(e);
    PERI_NEED(dist);
    PERI_NEED(out);
    static const char *const f = "peri_sharded_compute_and_output_dist";
    peri__input_dist *d;
    PERI_TRY(check_dist(f, e, dist, &d));
    PERI_TRY(peri__group_check(f, e->group));
    peri_status status = peri__managed_arrive(d);
    if (status == PERI_OK && d->arrival) status = peri__managed_reset(d);
    if (status < 0 && e->world_size > 1) peri__group_fail(e->group, status);
    if (status != PERI_OK) return status;
    peri_work *work;
    PERI_TRY(peri__work_new(sizeof(output_dist), &output_vtab, e->group, e->device, &work));
    output_dist *o = (output_dist *)work;
    status = batch_new(d, &o->batch);
    if (status >= 0) status = look_up(o);
    if (status >= 0 && d->arrival) status = peri__managed_post(d);
    if (status >= 0 && d->arrival && e->returns_rows) {
        peri_work_retain(dist);
        o->ids = d;
    }
    if (status < 0) {
        peri__work_cancel(work, status);
        peri_work_release(work);
        return e->world_size > 1 ? peri__group_fail(e->group, status) : status;
    }
    d->used = true;
    *out = work;
    return PERI_OK;
}

/** The rows of a batch, of the module's output dtype. @out new. */
static peri_status make_rows(const output_dist *o, peri_tensor **out)
{
    const batch *b = o->batch;
    const peri_sharded *e = b->ebc;
    peri_tensor *rows;
    PERI_TRY(e->kind->combine(e, b->layouts[PERI__TO_HOMES]->home, &b->given, o->buffer, o->received, &rows));
    peri_status status = peri_tensor_to(rows, e->output_dtype, NULL, out);
    peri_tensor_release(rows);
    return status;
}

/** All results of a batch, recorded if the lookup is. @out: new references. */
static peri_status make_results(output_dist *o, peri_tensor **out)
{
    batch *b = o->batch;
    const int32_t n = b->ebc->n_results;
    peri_tensor *rows;
    int64_t at = 0;
    PERI_TRY(make_rows(o, &rows));
    peri_status status = PERI_OK;
    int32_t made = 0;
    for (; made < n && status >= 0; made += status >= 0) status = result_of(b, rows, made, &at, &out[made]);
    peri_tensor_release(rows);
    if (status >= 0 && o->leave) status = peri__trip_arrives(&b->trip, &o->leave, out, n);
    for (; status < 0 && made > 0; made--) peri_tensor_release(out[made - 1]);
    return status;
}

int32_t peri_sharded_results(const peri_sharded *e) { return e ? e->n_results : 0; }

peri_status peri_sharded_output(peri_sharded *e, peri_work *output, peri_tensor **out)
{
    PERI_NEED(e);
    PERI_NEED(output);
    PERI_NEED(out);
    static const char *const f = "peri_sharded_output";
    output_dist *o = (output_dist *)output;
    if (output->vtab != &output_vtab || o->batch->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an output_dist of this module", f);
    if (output->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the output_dist is not complete; wait for it", f);
    if (o->used) return peri__fail(PERI_EINVAL, "%s: this output was already taken", f);
    PERI_TRY(make_results(o, out));
    o->used = true;
    peri_tensor **kept[] = {&o->batch->looked_up, &o->batch->received}, **rows[] = {&o->buffer, &o->received};
    const peri__weights_dist *w = o->batch->weights_dist;
    for (int i = 0; i < 2; i++) {
        if (w && w->at_home) *kept[i] = *rows[i];
        else peri_tensor_release(*rows[i]);
        *rows[i] = NULL;
    }
    return PERI_OK;
}

peri_status peri_sharded_rows(peri_sharded *e, peri_work *output, peri_tensor **out)
{
    PERI_NEED(e);
    PERI_NEED(output);
    PERI_NEED(out);
    static const char *const f = "peri_sharded_rows";
    output_dist *o = (output_dist *)output;
    if (output->vtab != &output_vtab || o->batch->ebc != e)
        return peri__fail(PERI_EINVAL, "%s: this work is not an output_dist of this module", f);
    if (output->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the output_dist is not complete; wait for it", f);
    if (!o->ids)
        return peri__fail(PERI_EINVAL, "%s: %s", f,
                          e->returns_rows && e->n_managed ? "the rows were already taken" : "the module has no rows of raw ids to return");
    const peri__routing *r = &o->ids->routing;
    const peri__given given = {.ids = r->values, .places = r->places, .offsets = r->offsets_in};
    PERI_TRY(peri__managed_rows(e, o->ids->arrival, r->outbound, &given, r->place_first, out));
    peri_work_release(&o->ids->base);
    o->ids = NULL;
    return PERI_OK;
}
