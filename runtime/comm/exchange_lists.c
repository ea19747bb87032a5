/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_lists.c: all-to-all of what is no buffer in rank order: lists of tensors, and blocks of a tensor along a
 * dimension (TPU AllToAll).
 *
 * Both are a *plan*: two sides, each a list of blocks by rank; a block is a tensor of a list, or a slice of one.
 * Forward sends the blocks of side 0 and receives those of side 1, backward the other way round. Blocks that lie one
 * after the other in memory already, like the pieces of one tensor cut into chunks, travel from where they are; others
 * are packed and unpacked.
 */
#include "transfer.h"

#include <stdio.h>

/** Part of a tensor: all of it (dim < 0), or [start, start + length) along a dimension. */
typedef struct block {
    int32_t tensor, dim;
    int64_t start, length;
} block;

/** One side of the exchange; rank i's part is blocks[i], if counts[i] is not 0. */
typedef struct side {
    int32_t tensors;
    block *blocks;    /* one for each rank */
    int64_t *counts;  /* elements by rank */
    int64_t *shapes;  /* PERI_MAX_DIMS for each tensor */
    int32_t *ndims;
    int64_t total;
} side;

/** One direction on its way. */
typedef struct passage {
    peri__transfer transfer;
    bool packed; /* what arrives is to be unpacked; else it arrives in place */
} passage;

typedef struct plan {
    peri__trip trip;
    peri_group *group;   /* the trip's */
    peri_device *device;
    int32_t dtype;
    uint64_t tag;
    side sides[2];
    passage back; /* of the gradient */
} plan;

static const peri__trip_vtab plan_vtab;

static void plan_fini(peri__trip *trip)
{
    peri__transfer_fini(&((plan *)trip)->back.transfer);
    peri__free(trip);
}

/** A plan for @tensors[side] tensors a side: everything in one block. */
static peri_status plan_new(peri_group *group, const peri_tensor *like, const int32_t *tensors, uint64_t tag,
                            plan **out)
{
    size_t w = (size_t)group->size, bytes = sizeof(plan);
    for (int s = 0; s < 2; s++)
        bytes += w * (sizeof(block) + sizeof(int64_t)) +
                 (size_t)tensors[s] * (PERI_MAX_DIMS * sizeof(int64_t) + sizeof(int32_t));
    plan *p = peri__alloc_zero(bytes);
    if (!p) return PERI_ENOMEM;
    int64_t *at = (int64_t *)(p + 1);
    for (int s = 0; s < 2; s++) {
        side *x = &p->sides[s];
        x->tensors = tensors[s];
        x->blocks = (block *)at;
        at = (int64_t *)(x->blocks + w);
        x->counts = at;
        x->shapes = at + w;
        at = x->shapes + (size_t)tensors[s] * PERI_MAX_DIMS;
    }
    int32_t *small = (int32_t *)at;
    for (int s = 0; s < 2; s++) p->sides[s].ndims = small, small += tensors[s];
    peri__trip_init(&p->trip, &plan_vtab, group);
    p->group = group;
    p->device = peri__device(like);
    p->dtype = like->dtype;
    p->tag = tag;
    *out = p;
    return PERI_OK;
}

static void plan_shape(side *s, int32_t i, int32_t ndim, const int64_t *shape)
{
    s->ndims[i] = ndim;
    memcpy(s->shapes + (size_t)i * PERI_MAX_DIMS, shape, sizeof *shape * (size_t)ndim);
}

/** Rank @rank's part of a side. */
static void plan_block(side *s, int32_t rank, block b)
{
    const int64_t *shape = s->shapes + (size_t)b.tensor * PERI_MAX_DIMS;
    int64_t n = 1;
    for (int32_t d = 0; d < s->ndims[b.tensor]; d++) n *= d == b.dim ? b.length : shape[d];
    s->blocks[rank] = b;
    s->counts[rank] = n;
    s->total += n;
}

/* -- packing ------------------------------------------------------------------------------------------------------- */

/** The block's elements in its tensor @t. */
static peri_status block_view(const block *b, peri_tensor *t, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    if (b->dim >= 0) shape[b->dim] = b->length;
    int64_t start = b->dim >= 0 ? b->start * t->stride[b->dim] : 0;
    return peri__tensor_view(t, t->ndim, shape, t->stride, t->offset + start, out);
}

/** The place of rank @i's part in @flat, with the block's shape. */
static peri_status flat_view(const side *s, int32_t i, peri_tensor *flat, int64_t at, peri_tensor **out)
{
    const block *b = &s->blocks[i];
    int64_t shape[PERI_MAX_DIMS] = {0};
    int32_t ndim = s->ndims[b->tensor];
    memcpy(shape, s->shapes + (size_t)b->tensor * PERI_MAX_DIMS, sizeof *shape * (size_t)ndim);
    if (b->dim >= 0) shape[b->dim] = b->length;
    return peri__tensor_view(flat, ndim, shape, NULL, flat->offset + at, out);
}

/** Does the block, which is not empty, lie in one piece in @t? Where: *@begin. */
static bool block_joined(const block *b, const peri_tensor *t, int64_t *begin)
{
    int64_t expected = 1;
    *begin = t->offset + (b->dim >= 0 ? b->start * t->stride[b->dim] : 0);
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        int64_t n = d == b->dim ? b->length : t->shape[d];
        if (n != 1 && t->stride[d] != expected) return false;
        expected *= n;
    }
    return true;
}

/** If the parts lie one after the other in memory already: a view of them all, else NULL. */
static peri_status in_place(const plan *p, const side *s, peri_tensor *const *tensors, peri_tensor **out)
{
    peri_tensor *first = NULL;
    int64_t at = 0, begin = 0, here;
    for (int32_t i = 0; i < p->group->size; i++) {
        if (!s->counts[i]) continue;
        peri_tensor *t = tensors[s->blocks[i].tensor];
        if (!t || !block_joined(&s->blocks[i], t, &here)) return PERI_OK;
        if (first && (t->storage != first->storage || here != begin + at)) return PERI_OK;
        if (!first) begin = here;
        first = t;
        at += s->counts[i];
    }
    return first ? peri__tensor_view(first, 1, &s->total, NULL, begin, out) : PERI_OK;
}

/** Copy between the parts of @flat and the tensors, @to_flat or back. Tensors that are NULL count as zeros, or are left
 *  out. */
static peri_status move(const plan *p, const side *s, peri_tensor *const *tensors, peri_tensor *flat, bool to_flat)
{
    int64_t at = 0;
    for (int32_t i = 0; i < p->group->size; at += s->counts[i++]) {
        peri_tensor *t = tensors[s->blocks[i].tensor], *here = NULL, *there = NULL;
        if (!s->counts[i] || (!t && !to_flat)) continue;
        peri_status status = flat_view(s, i, flat, at, &there);
        if (status >= 0 && !t) status = peri__tensor_zero(there);
        else if (status >= 0) status = block_view(&s->blocks[i], t, &here);
        if (status >= 0 && here) status = to_flat ? peri_tensor_copy(there, here) : peri_tensor_copy(here, there);
        peri_tensor_release(here);
        peri_tensor_release(there);
        PERI_TRY(status);
    }
    return PERI_OK;
}

/** Send the tensors of side @from; @into (may be NULL) are tensors of the other side into which the transport may
 *  write. */
static peri_status send(plan *p, int from, peri_tensor *const *tensors, peri_tensor *const *into, passage *w)
{
    const side *out = &p->sides[from], *in = &p->sides[1 - from];
    peri_tensor *sent = NULL, *to = NULL;
    peri_status status;
    PERI_TRY_GOTO(in_place(p, out, tensors, &sent), out);
    if (!sent) {
        PERI_TRY_GOTO(peri_tensor_new(p->device, p->dtype, 1, &out->total, &sent), out);
        PERI_TRY_GOTO(move(p, out, tensors, sent, true), out);
    }
    if (into) PERI_TRY_GOTO(in_place(p, in, into, &to), out);
    if (to && to->storage == sent->storage && to->offset < sent->offset + out->total &&
        sent->offset < to->offset + in->total) {
        peri_tensor_release(to); /* they overlap */
        to = NULL;
    }
    w->packed = !to;
    peri__transfer_args a = {.kind = PERI_COLL_ALL_TO_ALL,
                             .channel = p->group->channel,
                             .tag = p->tag,
                             .out = out->counts,
                             .in = in->counts,
                             .to = to};
    status = peri__transfer_post(p->group, sent, &a, &w->transfer);
out:
    peri_tensor_release(sent);
    peri_tensor_release(to);
    return status;
}

/** PERI_PENDING, or what came is in @tensors of side @to. */
static peri_status receive(plan *p, int to, peri_tensor *const *tensors, passage *w)
{
    peri_status status = peri__transfer_test(&w->transfer);
    if (status != PERI_OK) return status;
    if (w->packed) status = move(p, &p->sides[to], tensors, w->transfer.numbers, false);
    peri__transfer_fini(&w->transfer);
    return status;
}

/* -- the tape ------------------------------------------------------------------------------------------------------ */

static peri_status set_out(peri__trip *trip, peri_tensor *const *grad_out)
{
    plan *p = (plan *)trip;
    return send(p, 1, grad_out, NULL, &p->back);
}

static peri_status come_back(peri__trip *trip, const peri__node *leave, peri_tensor **grad_in)
{
    plan *p = (plan *)trip;
    const side *in = &p->sides[0];
    peri_status status = peri__transfer_test(&p->back.transfer);
    if (status != PERI_OK) return status;
    for (int32_t i = 0; i < in->tensors; i++)
        if (peri__needs(leave, i))
            PERI_TRY(peri_tensor_new(p->device, p->dtype, in->ndims[i], in->shapes + (size_t)i * PERI_MAX_DIMS,
                                     &grad_in[i]));
    return receive(p, 0, grad_in, &p->back);
}

static const peri__trip_vtab plan_vtab = {PERI__TRIP_NODES("all_to_all of lists", "result of all_to_all of lists", 0),
                                          .set_out = set_out, .come_back = come_back, .fini = plan_fini};

static peri_status record(plan *p, peri_tensor *const *inputs, peri_tensor *const *outputs)
{
    peri__node *leave;
    PERI_TRY(peri__trip_leaves(&p->trip, inputs, p->sides[0].tensors, &leave));
    peri_status status = peri__trip_arrives(&p->trip, &leave, outputs, p->sides[1].tensors);
    peri__node_release(leave);
    return status;
}

/* -- works --------------------------------------------------------------------------------------------------------- */

typedef struct lists_work {
    peri_work base;
    plan *plan;
    passage forth;
    peri_tensor **outputs; /* retained; behind this struct */
} lists_work;

static peri_status lists_step(peri_work *work)
{
    lists_work *w = (lists_work *)work;
    return receive(w->plan, 1, w->outputs, &w->forth);
}

static void lists_fini(peri_work *work)
{
    lists_work *w = (lists_work *)work;
    peri__transfer_fini(&w->forth.transfer);
    for (int32_t i = 0; i < w->plan->sides[1].tensors; i++) peri_tensor_release(w->outputs[i]);
    peri__trip_release(&w->plan->trip);
}

static const peri__work_vtab lists_vtab = {.name = "all_to_all of lists", .step = lists_step, .fini = lists_fini};

/** Post the plan (taken) and record it if wanted. */
static peri_status start(plan *p, peri_tensor *const *inputs, peri_tensor *const *outputs, bool recorded,
                         peri_work **out)
{
    peri_work *work;
    int32_t n = p->sides[1].tensors;
    peri_status status =
        peri__work_new(sizeof(lists_work) + sizeof(peri_tensor *) * (size_t)n, &lists_vtab, p->group, p->device, &work);
    if (status < 0) {
        peri__trip_release(&p->trip);
        return status;
    }
    lists_work *w = (lists_work *)work;
    w->plan = p;
    w->outputs = (peri_tensor **)(w + 1);
    for (int32_t i = 0; i < n; i++) {
        peri_tensor_retain(outputs[i]);
        w->outputs[i] = outputs[i];
    }
    bool before = peri__grad_swap(false);
    peri__parts_begin(p->group);
    status = send(p, 0, inputs, w->outputs, &w->forth);
    peri__parts_end(p->group);
    peri__grad_swap(before);
    if (status >= 0 && recorded && before) {
        status = record(p, inputs, outputs);
        if (status < 0) peri__group_fail(p->group, status); /* the others have recorded it */
    }
    return peri__work_hand_out(work, status, out);
}

/* -- lists --------------------------------------------------------------------------------------------------------- */

static peri_status check_lists(const char *f, peri_group *group, peri_tensor *const *outputs,
                               peri_tensor *const *inputs, bool recorded)
{
    char a[128], what[48];
    PERI_TRY(peri__group_check(f, group));
    PERI_TRY(peri__check_tensor(f, "input 0", inputs[0], -1, -1));
    for (int32_t i = 0; i < 2 * group->size; i++) {
        bool output = i >= group->size;
        const peri_tensor *t = output ? outputs[i - group->size] : inputs[i];
        bool on_tape = output && recorded && t && t->requires_grad;
        if (t && t->dtype == inputs[0]->dtype && peri__device(t) == peri__device(inputs[0]) && !on_tape) continue;
        snprintf(what, sizeof what, "%s %d", output ? "output" : "input", output ? i - group->size : i);
        PERI_TRY(peri__check_tensor(f, what, t, inputs[0]->dtype, -1));
        PERI_TRY(peri__check_same_device(f, inputs[0], t));
        if (on_tape)
            return peri__fail(PERI_EINVAL,
                              "%s: %s (%s) is on the tape already; a recorded exchange makes it a result of its own", f,
                              what, peri__tensor_text(t, a, sizeof a));
    }
    int32_t r = group->rank;
    if (peri__numel(inputs[r]) != peri__numel(outputs[r]))
        return peri__fail(PERI_EINVAL, "%s: rank %d has %lld elements for itself and expects %lld", f, r,
                          (long long)peri__numel(inputs[r]), (long long)peri__numel(outputs[r]));
    return PERI_OK;
}

peri_status peri_coll_all_to_all_list(peri_group *group, peri_tensor *const *outputs, peri_tensor *const *inputs,
                                      bool recorded, uint64_t tag, peri_work **out)
{
    PERI_NEED(outputs);
    PERI_NEED(inputs);
    PERI_NEED(out);
    PERI_TRY(check_lists("peri_coll_all_to_all_list", group, outputs, inputs, recorded));
    plan *p;
    PERI_TRY(plan_new(group, inputs[0], (const int32_t[2]){group->size, group->size}, tag, &p));
    for (int32_t i = 0; i < group->size; i++) {
        plan_shape(&p->sides[0], i, inputs[i]->ndim, inputs[i]->shape);
        plan_shape(&p->sides[1], i, outputs[i]->ndim, outputs[i]->shape);
        peri__changed(outputs[i]);
        plan_block(&p->sides[0], i, (block){.tensor = i, .dim = -1});
        plan_block(&p->sides[1], i, (block){.tensor = i, .dim = -1});
    }
    bool real = inputs[0]->dtype == PERI_F32 || inputs[0]->dtype == PERI_F64;
    return start(p, inputs, outputs, recorded && real, out);
}

/* -- blocks along a dimension -------------------------------------------------------------------------------------- */

/** Check that the assignment is a partition of the group, and find this rank's row. */
static peri_status find_row(const char *f, const peri_group *group, const peri_tpu_all_to_all_args *args,
                            const int32_t **row)
{
    const int32_t *a = args->group_assignment;
    if (args->groups < 1 || args->replicas < 1 || (int64_t)args->groups * args->replicas != group->size)
        return peri__fail(PERI_EINVAL,
                          "%s: a group_assignment of %d x %d for the %d ranks of group '%s', allowed: each rank once",
                          f, args->groups, args->replicas, group->size, group->name);
    for (int32_t i = 0; i < group->size; i++) {
        if (a[i] < 0 || a[i] >= group->size)
            return peri__fail(PERI_EINVAL, "%s: rank %d in group_assignment, allowed: 0..%d", f, a[i], group->size - 1);
        for (int32_t k = 0; k < i; k++)
            if (a[k] == a[i])
                return peri__fail(PERI_EINVAL, "%s: rank %d twice in group_assignment, allowed: each rank once", f,
                                  a[i]);
        if (a[i] == group->rank) *row = a + i / args->replicas * args->replicas;
    }
    return PERI_OK;
}

peri_status peri_coll_tpu_all_to_all(peri_group *group, peri_tensor *input, const peri_tpu_all_to_all_args *args,
                                     peri_tensor **output, peri_work **out)
{
    PERI_NEED(group);
    PERI_NEED(input);
    PERI_NEED(args);
    PERI_NEED(output);
    PERI_NEED(out);
    static const char f[] = "peri_coll_tpu_all_to_all";
    char text[128];
    peri__words words;
    int32_t n = args->split_count, split, concat;
    const int32_t *row = NULL;
    PERI_TRY(peri__group_check(f, group));
    PERI_TRY(peri__check_tensor(f, "the input", input, -1, -1));
    PERI_TRY(find_row(f, group, args, &row));
    if (n != args->replicas)
        return peri__fail(PERI_EINVAL, "%s: split_count is %d, allowed: the %d ranks of a row of group_assignment", f,
                          n, args->replicas);
    PERI_TRY(peri__dim(f, input, args->split_dimension, &split));
    PERI_TRY(peri__dim(f, input, args->concat_dimension, &concat));
    if (input->shape[split] % n != 0)
        return peri__fail(PERI_EINVAL, "%s: %s of the input %s does not divide by split_count %d", f,
                          peri__dim_text(split, &words), peri__tensor_text(input, text, sizeof text), n);
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, input->shape, sizeof shape);
    shape[split] /= n;
    int64_t piece = shape[split], part = shape[concat];
    shape[concat] *= n;
    peri_tensor *result;
    plan *p;
    /* All ranks must agree on the shape and on who is where. */
    uint64_t tag = peri__hash_mix(args->tag, (uint64_t)split << 32 | (uint64_t)concat);
    for (int32_t d = 0; d < input->ndim; d++) tag = peri__hash_mix(tag, (uint64_t)input->shape[d]);
    for (int32_t i = 0; i < group->size; i++) tag = peri__hash_mix(tag, (uint64_t)args->group_assignment[i]);
    PERI_TRY(plan_new(group, input, (const int32_t[2]){1, 1}, tag, &p));
    peri_status status = peri_tensor_new(p->device, p->dtype, input->ndim, shape, &result);
    if (status < 0) {
        peri__trip_release(&p->trip);
        return status;
    }
    plan_shape(&p->sides[0], 0, input->ndim, input->shape);
    plan_shape(&p->sides[1], 0, input->ndim, shape);
    for (int32_t k = 0; k < n; k++) {
        plan_block(&p->sides[0], row[k], (block){.dim = split, .start = k * piece, .length = piece});
        plan_block(&p->sides[1], row[k], (block){.dim = concat, .start = k * part, .length = part});
    }
    status = start(p, &input, &result, input->dtype == PERI_F32 || input->dtype == PERI_F64, out);
    if (status < 0) peri_tensor_release(result);
    else *output = result;
    return status;
}
