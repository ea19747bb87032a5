/* SPDX-License-Identifier: Apache-2.0
 *
 * reducer.c: data-parallel gradients: averaged over a group in buckets that travel while the backward pass goes on.
 *
 * Gradients become ready roughly from the last parameter to the first, so buckets are filled in that order, and bucket
 * k is posted when it is complete and k-1 was posted: the same order on every rank, whatever the order in which its
 * gradients became ready. The buckets travel on a group of their own, because other exchanges of the pass may be posted
 * before or after a bucket on different ranks.
 *
 * Nodes that make a parameter's gradient write it straight to its place in the bucket (peri__grad_new), where nothing
 * is there yet; other gradients are copied there. Afterwards the gradients are views of their buckets, so that one
 * launch divides all of a bucket. Where somebody still has such a gradient when the next pass begins to fill the
 * bucket, the bucket gets other memory.
 *
 * The tape ends each pass that reaches a parameter, or a node that the reducer watches, by waiting for the averages:
 * nobody has to call anything after it. A gradient that was already there (an average, if a pass before made it) is
 * averaged along: means of means of the same number of ranks are means.
 *
 * A parameter that no rank has a gradient of gets none: one that is frozen for a while, or which the loss did not
 * reach, stays as it is, as on one rank; with a gradient of zeros momentum and weight decay would move it. Behind the
 * gradients a bucket has a mark for each, above 0 where this rank has one, and the marks are added up with them. Only a
 * rank that lacks a gradient looks at the sums. A sum is the mark of the next pass, so that usually nothing has to be
 * written: it grows, to infinity at most, where a quotient would shrink to 0.
 *
 *     bucket of parameters b [2] and a [3]:   b0 b1 a0 a1 a2 | mark of b, mark of a
 *
 * Ranks whose optimizers do different things with the same averages would train different models from then on. So
 * optimizers write down what they do to each parameter (peri__trained), and the tag of a bucket's sum, on which ranks
 * must agree, is made of it: a rank that has set another rate, missed a step or loaded other states is told with the
 * next gradients. That costs no exchange of its own.
 *
 * What else changes weights (a script's own optimizer, a write on one rank) writes nothing down. So each pass also puts
 * the bits of one weight of each bucket into its tag, where the host can read them without waiting for a device. It is
 * another weight each time: what differs everywhere is told with the next gradients, what differs in one parameter
 * after as many passes as its bucket has parameters.
 *
 * No gradients follow the last step of a run. So ranks that leave the world in good order tell each other a hash of all
 * that they did to parameters that are averaged in it, and of these parameters' bits where the host can read them
 * (sum_over_reducers). A difference is a warning: nothing is trained with it any more.
 */
#include "comm_internal.h"
#include "../../kernels/convert.h"

#include <stddef.h>
#include <stdio.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { DEFAULT_BYTES = 25 << 20, LEAST_BYTES = 512 << 10, PARTS = 4, GRAIN = 1 << 15 };
enum { WEIGHT_FACT = PERI_COLL_FACTS - 2, LAST_FACT };

struct bucket;

/** One parameter. */
typedef struct entry {
    peri_reducer *reducer;
    peri_tensor *leaf, *view; /* retained; view: its place in the bucket, with its shape */
    peri__trained trained;    /* what optimizers have done to the leaf since the reducer was made */
    int64_t bucket;
    bool ready;               /* its gradient is in the bucket */
    bool given;               /* and this rank had one: else zeros are there */
    bool unmarked;            /* its mark is 0 */
    bool lent;                /* a node of the pass writes its gradient to `view`, and has not handed it on yet */
} entry;

typedef struct bucket {
    peri_tensor *flat, *marks; /* marks: the end of flat, which has one for each entry */
    peri_work *work;
    int64_t missing, count;   /* gradients that are not there yet, of how many */
    int64_t first;            /* of its entries, which follow each other */
} bucket;

struct peri_reducer {
    peri__ending ending;  /* has the references */
    peri_reducer *next;   /* another one of the world */
    peri_group *group;    /* own; NULL in a world of one */
    int64_t n, buckets, posted, done; /* done: buckets whose averages are the gradients */
    entry *entries;       /* in the order of the buckets: the last parameter first */
    bucket *bucket;
    uint64_t passes;      /* that have ended */
    bool many;            /* the group that it was made for has several ranks; then it watches even without
                             parameters */
    bool off, deferred, finishing;
    peri_status failed;   /* of a callback, which cannot return it */
    char failure[PERI_MESSAGE_MAX];
};

static peri_status remember_failure(peri_reducer *r, peri_status status)
{
    if (status < 0 && r->failed == PERI_OK) {
        r->failed = status;
        snprintf(r->failure, sizeof r->failure, "%s", peri_error_message());
    }
    return status;
}

/** Memory for the bucket's gradients, and a view of it for each. */
static peri_status make_room(peri_reducer *r, bucket *b)
{
    int64_t elements = b->count, at = 0;
    for (int64_t i = 0; i < b->count; i++) elements += peri__numel(r->entries[b->first + i].leaf);
    PERI__HELD peri_tensor *flat = NULL;
    peri_tensor *marks;
    PERI_TRY(peri__tensor_like(r->entries[b->first].leaf, 1, &elements, &flat));
    PERI_TRY(peri__tensor_view(flat, 1, &b->count, NULL, elements - b->count, &marks));
    peri_tensor_release(b->flat);
    peri_tensor_release(b->marks);
    b->flat = peri__hand_over(&flat);
    b->marks = marks;
    PERI_TRY(peri_tensor_fill(marks, 1));
    for (int64_t i = 0; i < b->count; i++) {
        entry *e = &r->entries[b->first + i];
        peri_tensor *view;
        PERI_TRY(peri__tensor_view(b->flat, e->leaf->ndim, e->leaf->shape, NULL, at, &view));
        peri_tensor_release(e->view);
        e->view = view;
        e->unmarked = false;
        if (e->leaf->ready_ctx == e) e->leaf->grad_place = view;
        at += peri__numel(e->leaf);
    }
    return PERI_OK;
}

/** Has anybody but the parameters a gradient of the bucket, from an earlier pass? */
static bool gradients_in_use(const peri_reducer *r, const bucket *b)
{
    bool others = atomic_load(&b->flat->storage->refs) > 2 + b->count; /* flat, marks and views */
    for (int64_t i = 0; i < b->count; i++) {
        const entry *e = &r->entries[b->first + i];
        others = others || atomic_load(&e->view->refs) > 1 + (e->lent || e->leaf->grad == e->view);
    }
    return others;
}

/** Put a parameter's gradient (zeros if it has none) into its bucket. */
static peri_status copy_into_bucket(entry *e)
{
    bucket *b = &e->reducer->bucket[e->bucket];
    if (b->missing == b->count && !e->ready && gradients_in_use(e->reducer, b)) PERI_TRY(make_room(e->reducer, b));
    if (!e->leaf->grad) PERI_TRY(peri__tensor_zero(e->view));
    else if (e->leaf->grad != e->view) PERI_TRY(peri_tensor_copy(e->view, e->leaf->grad));
    if (!e->ready) b->missing--;
    e->ready = true;
    e->given = e->leaf->grad != NULL;
    e->lent = false;
    return PERI_OK;
}

/** A node is about to make a parameter's gradient: it may write it to its place, unless the gradient is in the bucket
 *  already, or what lies there is still somebody's. */
static peri_status offer_bucket_place(void *ctx, peri_tensor *leaf, bool *free)
{
    entry *e = ctx;
    peri_reducer *r = e->reducer;
    bucket *b = &r->bucket[e->bucket];
    *free = false;
    if (r->off || r->failed != PERI_OK || r->finishing || e->ready || e->lent || leaf->grad || e->bucket < r->posted)
        return PERI_OK;
    if (gradients_in_use(r, b)) {
        if (b->missing < b->count) return PERI_OK; /* only an empty bucket gets other memory */
        for (int64_t i = 0; i < b->count; i++)
            if (r->entries[b->first + i].lent) return PERI_OK;
        PERI_TRY(make_room(r, b));
    }
    *free = e->lent = true;
    return PERI_OK;
}

/** Mark the entries of a complete bucket of which this rank has gradients, and no others. */
static peri_status mark_gradients(const peri_reducer *r, bucket *b)
{
    const int64_t one = 1, first = peri__numel(b->flat) - b->count;
    for (int64_t i = 0; i < b->count; i++) {
        entry *e = &r->entries[b->first + i];
        PERI__HELD peri_tensor *its = NULL;
        if (e->unmarked != e->given) continue;
        PERI_TRY(peri__tensor_view(b->flat, 1, &one, NULL, first + i, &its));
        PERI_TRY(peri_tensor_fill(its, e->given));
        e->unmarked = !e->given;
    }
    return PERI_OK;
}

/** The weight of a bucket that ranks compare in this pass. */
typedef struct sample {
    const peri_tensor *leaf; /* NULL: none, for the host cannot read it at once */
    int64_t parameter, element;
} sample;

static sample sample_to_compare(const peri_reducer *r, const bucket *b)
{
    const int64_t place = b->first + (int64_t)(r->passes % (uint64_t)b->count);
    const peri_tensor *t = r->entries[place].leaf;
    const int64_t n = peri__numel(t);
    if (n == 0 || !peri__immediate(peri__device(t))) return (sample){0};
    return (sample){t, r->n - 1 - place, (int64_t)(peri__hash_mix(r->passes, 0) % (uint64_t)n)};
}

/** The bits of a weight; @number: the number that they are, for messages (of 16 bits: they as a whole number). */
static uint64_t read_sample(const sample *s, double *number)
{
    const peri_tensor *t = s->leaf;
    int64_t at = 0, left = s->element;
    for (int32_t d = t->ndim - 1; d >= 0; left /= t->shape[d--]) at += left % t->shape[d] * t->stride[d];
    uint64_t bits = 0;
    const int64_t size = peri_dtype_size(t->dtype);
    const char *data = (const char *)peri__data(t) + at * size;
    float single;
    memcpy(&bits, data, (size_t)size);
    memcpy(&single, &bits, sizeof single);
    if (t->dtype == PERI_F64) memcpy(number, &bits, sizeof *number);
    else *number = t->dtype == PERI_F32 ? (double)single : (double)bits;
    return bits;
}

/** What ranks must agree on about a bucket: its number, what optimizers have done to its parameters, and a weight.
 *  @said: the same for messages, of the first parameter, with the history of all of them. */
static uint64_t bucket_tag(const peri_reducer *r, const bucket *b, peri_coll_facts *said)
{
    uint64_t tag = (uint64_t)r->posted;
    said->names = NULL;
    for (int64_t i = 0; i < b->count; i++) {
        const peri__trained *t = &r->entries[b->first + i].trained;
        if (!t->step.names) continue;
        tag = peri__hash_mix(tag, t->history);
        if (!said->names) *said = t->step;
    }
    const sample s = sample_to_compare(r, b);
    if (s.leaf) {
        if (!said->names) *said = (peri_coll_facts){.names = "this pass,,,,,,,weight,history"};
        tag = peri__hash_mix(tag, read_sample(&s, &said->number[WEIGHT_FACT]));
    }
    said->number[LAST_FACT] = (double)(tag & 0xffff);
    return tag;
}

/** Say what it means that ranks disagree about a bucket after steps of optimizers: nothing else of it may differ. The
 *  message so far has what each of two ranks did with the first parameter; where others were treated otherwise, what
 *  this rank did with them is added. */
static peri_status explain_mismatch(const peri_reducer *r, const bucket *b, peri_status status)
{
    char own[PERI_MESSAGE_MAX] = "", said[PERI_MESSAGE_MAX];
    size_t used = 0;
    const peri_coll_facts *first = NULL, *last = NULL;
    const size_t known = LAST_FACT * sizeof last->number[0]; /* without their histories */
    for (int64_t i = 0; i < b->count && status == PERI_EMISMATCH; i++) {
        const peri_coll_facts *step = &r->entries[b->first + i].trained.step;
        bool same = last && step->names == last->names && !memcmp(step->number, last->number, known);
        if (!step->names || same) continue;
        if (last && used < sizeof own)
            used += (size_t)snprintf(own + used, sizeof own - used, "%s parameter %lld", first == last ? "; here" : ";",
                                     (long long)(r->n - 1 - (b->first + i)));
        if (last) used = peri_coll_facts_text(step, own, used, sizeof own);
        first = first ? first : step;
        last = step;
    }
    const char *differ = strstr(peri_error_message(), "the ranks disagree: ");
    const sample s = sample_to_compare(r, b);
    char weight[PERI_MESSAGE_MAX] = "";
    if (status != PERI_EMISMATCH || !differ || !(last || s.leaf)) return status;
    snprintf(said, sizeof said, "%s", strchr(differ, ':') + 2);
    if (s.leaf)
        snprintf(weight, sizeof weight, "; weight: number %lld of parameter %lld, before that step",
                 (long long)s.element, (long long)s.parameter);
    return peri__fail(status, "%s of the ranks differ, which would train different models: %s%s%s%s",
                      last ? "optimizers or weights" : "weights", said, own,
                      last ? "; history: of steps, loaded states and weights" : "", weight);
}

/** Post the complete buckets whose turn it is. */
static peri_status post_complete(peri_reducer *r)
{
    for (; r->posted < r->buckets && r->bucket[r->posted].missing == 0; r->posted++) {
        bucket *b = &r->bucket[r->posted];
        peri_coll_facts said;
        uint64_t tag = bucket_tag(r, b, &said);
        PERI_TRY(mark_gradients(r, b));
        peri_status status = peri__coll_sum_gradients(r->group, b->flat, tag, said.names ? &said : NULL, &b->work);
        if (status < 0) return explain_mismatch(r, b, status); /* another rank has met it in an earlier bucket */
    }
    return PERI_OK;
}

static void on_ready(void *ctx, peri_tensor *leaf)
{
    entry *e = ctx;
    peri_reducer *r = e->reducer;
    if (r->off || r->failed != PERI_OK || !leaf->grad) return;
    if (r->finishing || (e->ready && e->bucket < r->posted)) {
        remember_failure(r, peri__fail(
                        PERI_EINVAL,
                        "peri_reducer: parameter %lld got a gradient while the average of another backward pass was on "
                        "its way, or after one that failed half way; run passes one after the other to their ends",
                        (long long)(r->n - 1 - (e - r->entries))));
        return;
    }
    if (remember_failure(r, copy_into_bucket(e)) >= 0) remember_failure(r, post_complete(r));
}

/* -- making -------------------------------------------------------------------------------------------------------- */

static peri_status check_params(peri_tensor *const *params, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        PERI_TRY(peri__check_float("peri_reducer_new", "a parameter", params[i]));
        if (params[i]->node)
            return peri__fail(PERI_EINVAL, "peri_reducer_new: parameter %lld is the result of an operation, not a leaf",
                              (long long)i);
        if (params[i]->ready)
            return peri__fail(PERI_EINVAL, "peri_reducer_new: parameter %lld already belongs to a reducer",
                              (long long)i);
        for (int64_t k = 0; k < i; k++)
            if (params[k] == params[i])
                return peri__fail(PERI_EINVAL, "peri_reducer_new: parameters %lld and %lld are the same", (long long)k,
                                  (long long)i);
    }
    return PERI_OK;
}

/** Bytes of a bucket, @wanted at most (0: the default): also small models are cut in parts, of which most travel under
 *  the pass. */
static int64_t bucket_limit(const peri_reducer *r, int64_t wanted)
{
    int64_t bytes = 0, limit = wanted ? wanted : DEFAULT_BYTES;
    for (int64_t i = 0; i < r->n; i++)
        bytes += peri__numel(r->entries[i].leaf) * peri_dtype_size(r->entries[i].leaf->dtype);
    return peri__min(limit, peri__max(bytes / PARTS, LEAST_BYTES));
}

/** Cut entries [begin, ...) into one bucket of about @limit bytes; returns its end. Vectors stay with the matrix behind
 *  them: it is mostly of the same layer, whose gradients are ready together, and a bucket sets out when its last one
 *  is. */
static int64_t cut_bucket(const peri_reducer *r, int64_t begin, int64_t limit)
{
    const peri_tensor *first = r->entries[begin].leaf;
    int64_t bytes = 0, i = begin, matrices = 0;
    for (; i < r->n; i++) {
        const peri_tensor *t = r->entries[i].leaf;
        const int64_t more = peri__numel(t) * peri_dtype_size(t->dtype);
        if (t->dtype != first->dtype || peri__device(t) != peri__device(first)) return i;
        if (i > begin && bytes + more > limit && (t->ndim < 2 || matrices || bytes > limit)) break;
        bytes += more;
        matrices += t->ndim > 1;
    }
    if (i == r->n || r->entries[i].leaf->ndim < 2) return i;
    while (r->entries[i - 1].leaf->ndim < 2 && matrices) i--;
    return i;
}

static peri_status make_bucket(peri_reducer *r, int64_t begin, int64_t end)
{
    bucket *b = &r->bucket[r->buckets];
    b->first = begin;
    b->missing = b->count = end - begin;
    PERI_TRY(make_room(r, b));
    for (int64_t i = begin; i < end; i++) r->entries[i].bucket = r->buckets;
    r->buckets++;
    return PERI_OK;
}

static peri_status make_group(peri_group *parent, peri_group **out)
{
    PERI__SCRATCH int32_t *ranks = peri__alloc(sizeof *ranks * (size_t)parent->size);
    if (!ranks) return PERI_ENOMEM;
    for (int32_t i = 0; i < parent->size; i++) ranks[i] = i;
    return peri_group_new(parent, ranks, parent->size, "reducer", out);
}

static peri_reducer *reducer_of_ending(peri__ending *ending)
{
    return (peri_reducer *)((char *)ending - offsetof(peri_reducer, ending));
}
static peri_status finish_ending(peri__ending *ending);

/** The others would wait for this rank's gradients, or average those of its next pass with theirs of this one; or wait
 *  for other exchanges of the pass, which are the parent's. */
static void reducer_missed(peri__ending *ending)
{
    peri_group *group = reducer_of_ending(ending)->group;
    for (const peri_group *g = group; g; g = g->parent)
        if (g->closed) return;
    if (!group) return;
    (void)peri__group_fail(group->parent, PERI_EABORTED);
    (void)peri__group_fail(group, PERI_EABORTED);
}

static void reducer_fini(peri__ending *ending)
{
    peri_reducer *r = reducer_of_ending(ending);
    peri_reducer_detach(r);
    peri_reducer **list = r->group ? &r->group->comm->reducers : NULL;
    while (list && *list && *list != r) list = &(*list)->next;
    if (list && *list) *list = r->next;
    for (int64_t i = 0; r->entries && i < r->n; i++) {
        peri_tensor_release(r->entries[i].leaf);
        peri_tensor_release(r->entries[i].view);
    }
    for (int64_t i = 0; r->bucket && i < r->buckets; i++) {
        peri_work_release(r->bucket[i].work);
    }
    for (int64_t i = 0; r->bucket && i < r->n; i++) { /* also of one that was not finished */
        peri_tensor_release(r->bucket[i].flat);
        peri_tensor_release(r->bucket[i].marks);
    }
    peri_group_release(r->group);
    peri__free(r->entries);
    peri__free(r->bucket);
    peri__object_count(-1);
    peri__free(r);
}

/* -- the end of a world -------------------------------------------------------------------------------------------- */

/** What has become of a reducer's parameters. */
static uint64_t trained_in(const peri_reducer *r)
{
    uint64_t hash = 0;
    for (int64_t i = 0; i < r->n; i++) {
        const peri_tensor *t = r->entries[i].leaf;
        hash = peri__hash_mix(hash, r->entries[i].trained.history);
        if (!peri__immediate(peri__device(t)) || !peri__contiguous(t)) continue;
        hash = peri__hash_mix(hash, XXH3_64bits(peri__data(t), (size_t)(peri__numel(t) * peri_dtype_size(t->dtype))));
    }
    return hash;
}

static void sum_over_reducers(const peri__comm *comm, peri_coll_numbers *numbers)
{
    /* sums: models are given up in no order, and what one rank still has another one may not */
    for (const peri_reducer *r = comm->reducers; r; r = r->next) {
        if (r->off || r->group->size < comm->size || r->group->failed != PERI_OK) continue;
        numbers->averaged += peri__hash_mix(r->group->tag, r->passes);
        numbers->trained += trained_in(r);
    }
}

peri_status peri_reducer_new(peri_group *group, peri_tensor *const *params, int32_t n, int64_t bucket_bytes,
                             peri_reducer **out)
{
    if (n > 0) PERI_NEED(params);
    PERI_NEED(out);
    PERI_TRY(peri__group_check("peri_reducer_new", group));
    if (n < 0 || bucket_bytes < 0)
        return peri__fail(PERI_EINVAL, "peri_reducer_new: %d parameters, buckets of %lld bytes, allowed: 0 and more", n,
                          (long long)bucket_bytes);
    PERI_TRY(check_params(params, n));
    peri_reducer *r = peri__alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    peri__refs_init(&r->ending.refs);
    r->ending.finish = finish_ending;
    r->ending.fini = reducer_fini;
    r->ending.missed = reducer_missed;
    peri__object_count(1);
    peri_status status = PERI_OK;
    r->many = group->size > 1;
    if (r->many && n > 0) {
        PERI_TRY_GOTO(make_group(group, &r->group), out);
        r->entries = peri__alloc_zero(sizeof *r->entries * (size_t)n);
        r->bucket = peri__alloc_zero(sizeof *r->bucket * (size_t)n);
        if (!r->entries || !r->bucket) {
            status = PERI_ENOMEM;
            goto out;
        }
        r->n = n;
        r->next = group->comm->reducers;
        group->comm->reducers = r;
        group->comm->sum_up = sum_over_reducers;
        for (int64_t i = 0; i < n; i++) {
            entry *e = &r->entries[i];
            e->reducer = r;
            e->leaf = params[n - 1 - i];
            peri_tensor_retain(e->leaf);
        }
        for (int64_t i = 0, end, limit = bucket_limit(r, bucket_bytes); i < n; i = end) {
            end = cut_bucket(r, i, limit);
            PERI_TRY_GOTO(make_bucket(r, i, end), out);
        }
        for (int64_t i = 0; i < n; i++) {
            r->entries[i].leaf->ready = on_ready;
            r->entries[i].leaf->offer = offer_bucket_place;
            r->entries[i].leaf->grad_place = r->entries[i].view;
            r->entries[i].leaf->ready_ctx = &r->entries[i];
            r->entries[i].leaf->trained = &r->entries[i].trained;
            r->entries[i].leaf->ending = &r->ending;
        }
    }
    *out = r;
out:
    if (status < 0) peri_reducer_release(r);
    return status;
}

/* -- finishing a pass ---------------------------------------------------------------------------------------------- */

/** Which entries of a bucket some rank has a gradient of: those that this rank lacks become `given` where another one
 *  has it. Waits for the device where this rank lacks one. */
static peri_status ask_others(peri_reducer *r, bucket *b)
{
    bool all = true;
    for (int64_t i = 0; i < b->count; i++) all = all && r->entries[b->first + i].given;
    if (all) return PERI_OK;
    static const char zero[8];
    const int64_t size = peri_dtype_size(b->marks->dtype);
    PERI__SCRATCH char *sums = peri__alloc((size_t)(b->count * size));
    if (!sums) return PERI_ENOMEM;
    PERI_TRY(peri_tensor_read(b->marks, sums, b->count * size));
    for (int64_t i = 0; i < b->count; i++) {
        entry *e = &r->entries[b->first + i];
        e->given = memcmp(sums + i * size, zero, (size_t)size) != 0;
        e->unmarked = !e->given;
    }
    return PERI_OK;
}

/** The gradients become their parts of the bucket, divided by the number of ranks. */
static peri_status write_gradients(peri_reducer *r, bucket *b)
{
    PERI_TRY(ask_others(r, b));
    peri_k_divide_args args = {
        .dst = peri__data(b->flat), .src = peri__data(b->flat), .dtype = b->flat->dtype, .divisor = r->group->size};
    PERI_TRY(PERI_LAUNCH(peri__device(b->flat), divide, &args, peri__numel(b->flat) - b->count, GRAIN));
    for (int64_t i = 0; i < b->count; i++) {
        entry *e = &r->entries[b->first + i];
        e->ready = false;
        if (!e->given || e->leaf->grad == e->view) continue;
        peri_tensor_retain(e->view);
        peri_tensor_release(e->leaf->grad);
        e->leaf->grad = e->view;
    }
    return PERI_OK;
}

/** No gradient is to come any more: post what is left. */
static peri_status post_rest(peri_reducer *r)
{
    if (r->failed == PERI_OK && !r->finishing) {
        r->finishing = true;
        for (int64_t i = 0; i < r->n; i++)
            if (!r->entries[i].ready && remember_failure(r, copy_into_bucket(&r->entries[i])) < 0) break;
        if (r->failed == PERI_OK) remember_failure(r, post_complete(r));
    }
    return r->failed == PERI_OK ? PERI_OK : peri__fail(r->failed, "%s", r->failure);
}

static peri_status finish_ending(peri__ending *ending)
{
    peri_reducer *r = reducer_of_ending(ending);
    if (!r->deferred) return peri_reducer_finish(r);
    return r->group && !r->off ? post_rest(r) : PERI_OK;
}

peri_status peri_reducer_finish(peri_reducer *r)
{
    PERI_NEED(r);
    if (!r->group || r->off) return PERI_OK;
    PERI_TRY(post_rest(r));
    for (; r->done < r->buckets; r->done++) {
        bucket *b = &r->bucket[r->done];
        peri_status status = peri_work_test(b->work);
        if (status != PERI_OK)
            return status == PERI_PENDING ? status : remember_failure(r, explain_mismatch(r, b, status));
        PERI_TRY(write_gradients(r, b));
    }
    for (int64_t i = 0; i < r->buckets; i++) {
        peri_work_release(r->bucket[i].work);
        r->bucket[i].work = NULL;
        r->bucket[i].missing = r->bucket[i].count;
    }
    r->posted = r->done = 0;
    r->passes++;
    r->finishing = false;
    return PERI_OK;
}

peri_status peri_reducer_watch(peri_reducer *r, peri_tensor *t)
{
    PERI_NEED(r, t);
    if (!r->many || !t->node || t->node->ending == &r->ending) return PERI_OK;
    if (t->node->ending)
        return peri__fail(PERI_EINVAL, "peri_reducer_watch: another reducer watches the tensor's operation");
    peri__refs_add(&r->ending.refs);
    t->node->ending = &r->ending;
    return PERI_OK;
}

peri_status peri_reducer_enabled_set(peri_reducer *reducer, bool on)
{
    PERI_NEED(reducer);
    reducer->off = !on;
    return PERI_OK;
}
peri_status peri_reducer_deferred_set(peri_reducer *reducer, bool on)
{
    PERI_NEED(reducer);
    reducer->deferred = on;
    return PERI_OK;
}

void peri_reducer_detach(peri_reducer *r)
{
    if (!r) return;
    r->off = true;
    for (int64_t i = 0; r->entries && i < r->n; i++) {
        entry *e = &r->entries[i];
        if (e->leaf->ready_ctx != e) continue;
        e->leaf->ready = NULL;
        e->leaf->offer = NULL;
        e->leaf->grad_place = NULL;
        e->leaf->ready_ctx = NULL;
        e->leaf->trained = NULL;
        e->leaf->ending = NULL;
    }
}

void peri_reducer_release(peri_reducer *r)
{
    if (r) peri__ending_release(&r->ending);
}
