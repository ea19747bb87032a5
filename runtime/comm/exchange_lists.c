/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_lists.c: all-to-all of what is no buffer in rank order: lists of tensors, and blocks of a tensor along a
 * dimension (TPU AllToAll).
 *
 * Both are a *plan*: two sides, each with a part for each rank, which is a tensor of a list or one of the equal pieces
 * that a tensor is cut into. Forward sends the parts of side 0 and receives those of side 1, backward the other way
 * round. Parts that lie one after the other in memory already, like the pieces of one tensor cut into chunks, travel
 * from where they are; others are packed and unpacked.
 */
#include "transfer.h"

#include <stdio.h>

/** One side of the exchange. */
typedef struct side {
    int32_t tensors, dim; /* dim: along which its one tensor is cut; -1: it has a list with one for each rank */
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
    peri_device *device;
    int32_t dtype, pieces;
    int32_t *piece;      /* by rank: which of the pieces of a tensor that is cut it has; -1: none */
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

/** A plan for @tensors[side] tensors a side, all in one block. @row: the @pieces ranks that have pieces of those that
 *  are cut, in their order; none: 0. */
static peri_status plan_new(peri_group *group, const peri_tensor *like, const int32_t *tensors, const int32_t *row,
                            int32_t pieces, uint64_t tag, plan **out)
{
    const size_t w = (size_t)group->size, n = (size_t)tensors[0] + (size_t)tensors[1];
    plan *p = peri__alloc_zero(sizeof *p + (2 * w + n * PERI_MAX_DIMS) * sizeof(int64_t) + (n + w) * sizeof(int32_t));
    if (!p) return PERI_ENOMEM;
    int64_t *at = (int64_t *)(p + 1);
    int32_t *small = (int32_t *)(at + 2 * w + n * PERI_MAX_DIMS);
    for (int s = 0; s < 2; s++) {
        p->sides[s] = (side){.tensors = tensors[s], .counts = at, .shapes = at + w, .ndims = small};
        at += w + (size_t)tensors[s] * PERI_MAX_DIMS;
        small += tensors[s];
    }
    p->pieces = pieces;
    p->piece = small;
    for (size_t r = 0; r < w; r++) p->piece[r] = -1;
    for (int32_t k = 0; k < pieces; k++) p->piece[row[k]] = k;
    peri__trip_init(&p->trip, &plan_vtab, group);
    p->device = peri__device(like);
    p->dtype = like->dtype;
    p->tag = tag;
    *out = p;
    return PERI_OK;
}

/** Side @s consists of @tensors: a list (@dim -1), or one that is cut along @dim. */
static void plan_side(plan *p, int s, int32_t dim, peri_tensor *const *tensors)
{
    side *x = &p->sides[s];
    x->dim = dim;
    for (int32_t i = 0; i < x->tensors; i++) {
        x->ndims[i] = tensors[i]->ndim;
        memcpy(x->shapes + (size_t)i * PERI_MAX_DIMS, tensors[i]->shape, sizeof *x->shapes * (size_t)x->ndims[i]);
    }
    for (int32_t r = 0; r < p->trip.group->size; r++) {
        if (dim < 0) x->counts[r] = peri__numel(tensors[r]);
        else if (p->piece[r] >= 0) x->counts[r] = peri__numel(tensors[0]) / p->pieces;
        x->total += x->counts[r];
    }
}

/* -- packing ------------------------------------------------------------------------------------------------------- */

/** A view of the part of @tensors, which may be NULL, that rank @r has; NULL: nothing, or no tensor. */
static peri_status part_of(const plan *p, const side *s, peri_tensor *const *tensors, int32_t r, peri_tensor **out)
{
    peri_tensor *t = tensors[s->dim < 0 ? r : 0];
    if (!t || s->counts[r] == 0) return PERI_OK;
    int64_t shape[PERI_MAX_DIMS], offset = t->offset;
    memcpy(shape, t->shape, sizeof shape);
    if (s->dim >= 0) {
        shape[s->dim] /= p->pieces;
        offset += p->piece[r] * shape[s->dim] * t->stride[s->dim];
    }
    return peri__tensor_view(t, t->ndim, shape, t->stride, offset, out);
}

/** If the parts of @tensors lie one after the other in memory already: a view of them all, else NULL. */
static peri_status in_place(const plan *p, const side *s, peri_tensor *const *tensors, peri_tensor **out)
{
    PERI__HELD peri_tensor *first = NULL;
    int64_t at = 0;
    for (int32_t r = 0; r < p->trip.group->size; at += s->counts[r++]) {
        PERI__HELD peri_tensor *part = NULL;
        if (!s->counts[r]) continue;
        PERI_TRY(part_of(p, s, tensors, r, &part));
        if (!part || !peri__contiguous(part)) return PERI_OK;
        if (first && (part->storage != first->storage || part->offset != first->offset + at)) return PERI_OK;
        if (!first) first = peri__give(&part);
    }
    return first ? peri__tensor_view(first, 1, &s->total, NULL, first->offset, out) : PERI_OK;
}

/** Copy between @flat and the parts of @tensors, @to_flat or back. Parts without a tensor count as zeros, or are left
 *  out. */
static peri_status move(const plan *p, const side *s, peri_tensor *const *tensors, peri_tensor *flat, bool to_flat)
{
    int64_t at = 0;
    for (int32_t r = 0; r < p->trip.group->size; at += s->counts[r++]) {
        PERI__HELD peri_tensor *part = NULL, *there = NULL;
        PERI_TRY(part_of(p, s, tensors, r, &part));
        if (!s->counts[r] || (!part && !to_flat)) continue;
        PERI_TRY(peri__tensor_view(flat, part ? part->ndim : 1, part ? part->shape : &s->counts[r], NULL,
                                   flat->offset + at, &there));
        PERI_TRY(!part     ? peri__tensor_zero(there)
                 : to_flat ? peri_tensor_copy(there, part)
                           : peri_tensor_copy(part, there));
    }
    return PERI_OK;
}

/** Send the tensors of side @from; @into (may be NULL) are tensors of the other side into which the transport may
 *  write. */
static peri_status send(plan *p, int from, peri_tensor *const *tensors, peri_tensor *const *into, passage *w)
{
    const side *out = &p->sides[from], *in = &p->sides[1 - from];
    PERI__HELD peri_tensor *sent = NULL, *to = NULL;
    PERI_TRY(in_place(p, out, tensors, &sent));
    if (!sent) {
        PERI_TRY(peri_tensor_new(p->device, p->dtype, 1, &out->total, &sent));
        PERI_TRY(move(p, out, tensors, sent, true));
    }
    if (into) PERI_TRY(in_place(p, in, into, &to));
    const bool overlap = to && to->storage == sent->storage && to->offset < sent->offset + out->total &&
                         sent->offset < to->offset + in->total;
    w->packed = !to || overlap;
    peri__transfer_args a = {.kind = PERI_COLL_ALL_TO_ALL,
                             .channel = p->trip.group->channel,
                             .tag = p->tag,
                             .out = out->counts,
                             .in = in->counts,
                             .to = w->packed ? NULL : to};
    return peri__transfer_post(p->trip.group, sent, &a, &w->transfer);
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
    peri_group *group = p->trip.group;
    int32_t n = p->sides[1].tensors;
    peri_status status =
        peri__work_new(sizeof(lists_work) + sizeof(peri_tensor *) * (size_t)n, &lists_vtab, group, p->device, &work);
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
    peri__parts_begin(group);
    status = send(p, 0, inputs, w->outputs, &w->forth);
    peri__parts_end(group);
    peri__grad_swap(before);
    if (status >= 0 && recorded && before) {
        status = record(p, inputs, outputs);
        if (status < 0) peri__group_fail(group, status); /* the others have recorded it */
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
    PERI_NEED(outputs, inputs, out);
    PERI_TRY(check_lists("peri_coll_all_to_all_list", group, outputs, inputs, recorded));
    plan *p;
    PERI_TRY(plan_new(group, inputs[0], (const int32_t[2]){group->size, group->size}, NULL, 0, tag, &p));
    plan_side(p, 0, -1, inputs);
    plan_side(p, 1, -1, outputs);
    for (int32_t i = 0; i < group->size; i++) peri__changed(outputs[i]);
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
    PERI_NEED(group, input, args, output, out);
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
    shape[concat] *= n;
    peri_tensor *result;
    plan *p;
    /* All ranks must agree on the shape and on who is where. */
    uint64_t tag = peri__hash_mix(args->tag, (uint64_t)split << 32 | (uint64_t)concat);
    for (int32_t d = 0; d < input->ndim; d++) tag = peri__hash_mix(tag, (uint64_t)input->shape[d]);
    for (int32_t i = 0; i < group->size; i++) tag = peri__hash_mix(tag, (uint64_t)args->group_assignment[i]);
    PERI_TRY(plan_new(group, input, (const int32_t[2]){1, 1}, row, n, tag, &p));
    peri_status status = peri_tensor_new(p->device, p->dtype, input->ndim, shape, &result);
    if (status < 0) {
        peri__trip_release(&p->trip);
        return status;
    }
    plan_side(p, 0, split, &input);
    plan_side(p, 1, concat, &result);
    status = start(p, &input, &result, input->dtype == PERI_F32 || input->dtype == PERI_F64, out);
    if (status < 0) peri_tensor_release(result);
    else *output = result;
    return status;
}
