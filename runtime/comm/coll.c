/* SPDX-License-Identifier: Apache-2.0
 *
 * coll.c: collective operations on tensors: checks, signatures, staging of device memory, deadlines.
 *
 * A transport that takes host memory only gets device tensors through host buffers: copy out on the comm stream (which
 * waits for the stream of the post), post when the copy has run, copy in on the comm stream, and the stream of the post
 * waits for that copy.
 */
#include "../base/floats.h"
#include "comm_internal.h"
#include "../../kernels/route.h"

#include <stdio.h>
#include <time.h>

enum { COPY_OUT, TURN, POSTED }; /* phases of a coll_work; TURN: earlier ones of its channel are not posted yet */

typedef struct coll_work {
    peri_work base;
    peri_coll_op op; /* counts and runs point into this struct */
    int32_t phase;
    const peri_coll_vtab *vtab; /* of the transport that carries it */
    void *request;   /* the transport's; NULL when there is none */
    peri_tensor *send, *recv; /* retained; NULL for host operations */
    peri_coll_facts facts;    /* the operation's, if it has some */
    void *keep;
    void (*keep_release)(void *keep);
    peri__stage *stage;      /* NULL: direct */
    peri__pinned *out, *in;  /* host buffers of send and recv */
    int64_t out_bytes, in_bytes;
    uint32_t polls; /* tests that found it pending with the transport */
    bool queued;    /* an operation of a device: the work has ended, and its request has not */
    int64_t posted_ns; /* when the transport got it; 0: not yet, or nobody watches */
    int64_t polled_ns, waited_ns; /* last unsuccessful test; how long tests have been waiting */
    int64_t counts[]; /* of both directions, then the runs */
} coll_work;

/** Bytes that the operation takes from this rank's buffers and puts into them. */
static void bytes_of_rank(const peri_coll_op *op, int32_t rank, int32_t size, int64_t *send, int64_t *recv)
{
    int64_t sent = 0, received = 0, e = peri_dtype_size(op->dtype);
    switch (op->kind) {
    case PERI_COLL_BROADCAST: *(op->root == rank ? &sent : &received) = op->count; break;
    case PERI_COLL_ALL_REDUCE: sent = received = op->count; break;
    case PERI_COLL_ALL_GATHER:
        sent = op->send_counts[0];
        for (int32_t i = 0; i < size; i++) received += op->recv_counts[i];
        break;
    case PERI_COLL_REDUCE_SCATTER:
        for (int32_t i = 0; i < size; i++) sent += op->send_counts[i];
        received = op->send_counts[rank];
        break;
    case PERI_COLL_ALL_TO_ALL:
        for (int32_t i = 0; i < size; i++) sent += op->send_counts[i], received += op->recv_counts[i];
        break;
    default: break;
    }
    *send = sent * e;
    *recv = received * e;
}

/** Hash over what all ranks must agree on. */
static uint64_t signature_of(const peri_coll_op *op, int32_t size)
{
    uint64_t h = peri__hash_mix((uint64_t)op->kind, (uint64_t)op->dtype);
    h = peri__hash_mix(h, (uint64_t)op->count);
    h = peri__hash_mix(h, (uint64_t)op->channel);
    h = peri__hash_mix(h, op->tag);
    if (op->kind == PERI_COLL_BROADCAST) h = peri__hash_mix(h, (uint64_t)op->root);
    if (op->kind == PERI_COLL_ALL_REDUCE || op->kind == PERI_COLL_REDUCE_SCATTER)
        h = peri__hash_mix(h, (uint64_t)op->reduce);
    const int64_t *same = op->kind == PERI_COLL_ALL_GATHER       ? op->recv_counts
                          : op->kind == PERI_COLL_REDUCE_SCATTER ? op->send_counts
                                                                 : NULL;
    for (int32_t i = 0; same && i < size; i++) h = peri__hash_mix(h, (uint64_t)same[i]);
    return h;
}

/* -- the recorder -------------------------------------------------------------------------------------------------- */

static void record_post(coll_work *w)
{
    const peri_coll_op *op = &w->op;
    peri__coll_record *r = &w->base.group->records[op->sequence % PERI_RECORD_MOST];
    int64_t e = peri__max(peri_dtype_size(op->dtype), 1);
    *r = (peri__coll_record){.op = {.kind = op->kind, /* without pointers, which end before the record does */
                                    .dtype = op->dtype,
                                    .reduce = op->reduce,
                                    .root = op->root,
                                    .channel = op->channel,
                                    .sequence = op->sequence,
                                    .tag = op->tag,
                                    .count = op->count},
                             .posted_ns = peri_time_ns(),
                             .status = PERI_PENDING,
                             .send_sum = w->out_bytes / e,
                             .recv_sum = w->in_bytes / e};
}

static void record_end(coll_work *w, peri_status status)
{
    peri__coll_record *r = &w->base.group->records[w->op.sequence % PERI_RECORD_MOST];
    if (r->op.sequence != w->op.sequence) return; /* 256 newer ones have passed it */
    r->done_ns = peri_time_ns();
    r->status = status;
}

/** What led to a timeout, on stderr: the last operations and the oldest of those that have no end; on level info all of
 *  the recorder. */
static void print_record(peri_group *g)
{
    enum { LAST = 8, UNFINISHED = 8 };
    char line[PERI_RECORD_LINE], some[128] = "";
    bool shown[PERI_RECORD_MOST], all = peri__log_shows(PERI_LOG_INFO);
    int64_t now = peri_time_ns();
    uint64_t first = peri__record_first(g), n = g->sequence - first + 1;
    int32_t lines = 0, unfinished = 0;
    for (uint64_t i = 0; i < n; i++) {
        bool ended = peri__record_line(g, first + i, now, line, sizeof line);
        shown[i] = all || i + LAST >= n || (!ended && unfinished++ < UNFINISHED);
        lines += shown[i];
    }
    if ((uint64_t)lines < n)
        snprintf(some, sizeof some, " %d of %d (PERI_LOG=info prints all, group:record() has them)", lines, (int)n);
    peri__log(PERI_LOG_WARN, "the last operations of rank %d in group '%s':%s", g->rank, g->name, some);
    for (uint64_t i = 0; i < n; i++) {
        if (!shown[i]) continue;
        peri__record_line(g, first + i, now, line, sizeof line);
        peri__log(PERI_LOG_WARN, "  %s", line);
    }
}

/* -- stepping ------------------------------------------------------------------------------------------------------ */

/** Fail in words: which operation of which group on which rank. The error record holds the cause. */
static peri_status fail_in_words(coll_work *w, peri_status status)
{
    peri_group *g = w->base.group;
    char what[128];
    peri_coll_op_text(&w->op, g->size, what, sizeof what);
    if (w->op.sequence) record_end(w, status);
    peri__fail(status, "rank %d of %d in group '%s', %s: %s", g->rank, g->size, g->name, what, peri_error_message());
    return peri__group_fail(g, status);
}

/** Hand the operation to the transport if it is its turn. */
static peri_status post_in_turn(coll_work *w)
{
    peri_group *g = w->base.group;
    w->phase = TURN;
    peri_status status = peri__group_check("peri_coll", g);
    if (status < 0) return fail_in_words(w, status);
    if (peri__group_next(g, w->op.channel) != w->op.sequence) return PERI_OK;
    if (w->stage) {
        w->op.send = w->out ? w->out->data : NULL;
        w->op.recv = w->op.kind == PERI_COLL_BROADCAST && w->out ? w->out->data : w->in->data;
    }
    if (w->op.stream && g->comm->vtab->elsewhere) g->comm->vtab->elsewhere(g->ctx, &w->op);
    PERI__OWN_FLOATS; /* a transport may add up where it has all numbers */
    status = w->vtab->post(w->op.stream ? g->device_ctx : g->ctx, &w->op, &w->request);
    if (status < 0) return fail_in_words(w, status);
    peri__group_posted(g, w->op.channel, w->op.sequence);
    w->phase = POSTED;
    g->comm->on_device += w->op.stream != NULL;
    if (g->comm->watch.on) w->posted_ns = peri_time_ns();
    g->comm->events++;
    return PERI_OK;
}

/** Later work on the tensor's home, the end of its memory included, comes after @event. */
static peri_status join_home(coll_work *w, const peri_tensor *t, peri_event *event)
{
    peri_status status = peri_stream_wait(t->storage->home, event);
    /* nothing else orders the copy before the end of its memory */
    if (status < 0) peri__stream_dry(w->stage->stream);
    return status;
}

/** After an operation of the device transport: the memory of its tensors ends after it. */
static peri_status join_homes(coll_work *w)
{
    const peri_tensor *tensors[] = {w->send, w->recv};
    peri_event *event = NULL;
    peri_status status = PERI_OK;
    for (int i = 0; i < 2 && status >= 0; i++) {
        peri_stream *home = tensors[i] ? tensors[i]->storage->home : w->base.stream;
        if (home == w->base.stream) continue;
        if (!event) {
            PERI_TRY(peri_event_new(w->base.device, &event));
            status = peri_event_record(event, w->base.stream);
        }
        if (status >= 0) status = peri_stream_wait(home, event);
    }
    peri_event_release(event);
    return status;
}

/** The transport has the result in the host buffer: queue its copy to the device. */
static peri_status copy_in(coll_work *w)
{
    peri_device *device = w->stage->device;
    if (w->in_bytes > 0) {
        void *data = peri__data(w->recv);
        PERI_TRY(device->vtab->copy(device->ctx, w->stage->stream->ctx, data, w->in->data, w->in_bytes,
                                    PERI_COPY_H2D_PINNED));
        PERI_TRY(peri_event_record(w->in->event, w->stage->stream));
        PERI_TRY(join_home(w, w->recv, w->in->event));
        if (w->recv->storage->home != w->base.stream) PERI_TRY(peri_stream_wait(w->base.stream, w->in->event));
    }
    peri__stage_buffer_put(w->stage, w->in, w->in_bytes > 0);
    w->in = NULL;
    return PERI_OK;
}

/** The time for deadlines, in nanoseconds. It is read at each test, so it is the coarse clock: that moves in steps of a
 *  few milliseconds, and reading it takes an eighth of the time of the exact one. */
static int64_t coarse_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static peri_status check_deadline(coll_work *w)
{
    peri_group *g = w->base.group;
    int64_t now = coarse_ns(), gap = now - w->polled_ns;
    /* Time in which nobody tested is not waiting; it counts for an eighth of the deadline at most. */
    if (w->polled_ns) w->waited_ns += peri__min(gap, g->timeout_ns / 8 + 1);
    w->polled_ns = now;
    if (w->waited_ns < g->timeout_ns && !w->base.expired) return PERI_PENDING;
    /* somebody may have said why by now */
    peri_status known = g->comm->vtab->check ? g->comm->vtab->check(g->ctx) : PERI_OK;
    if (known < 0) return fail_in_words(w, known);
    char whom[256] = "";
    if (w->phase == POSTED) w->vtab->blame(w->request, whom, sizeof whom);
    else
        snprintf(whom, sizeof whom, "operation %llu of this rank, which its channel posts before",
                 (unsigned long long)peri__group_next(g, w->op.channel));
    print_record(g);
    if (w->base.expired)
        return fail_in_words(w, peri__fail(PERI_ETIMEOUT, "nothing can happen any more: waiting for %s", whom));
    return fail_in_words(w,
                peri__fail(PERI_ETIMEOUT, "no end after %.3g s: waiting for %s", (double)g->timeout_ns * 1e-9, whom));
}

/** What the world's other transport knows of the group, now and then: PERI_OK, or why it has failed. */
static peri_status check_other(coll_work *w)
{
    const peri_group *g = w->base.group;
    const peri_coll_vtab *other = w->op.stream ? g->comm->vtab : g->comm->device_vtab;
    void *ctx = w->op.stream ? g->ctx : g->device_ctx;
    if (!ctx || !other->check || (++w->polls & 63) != 0) return PERI_OK;
    peri_status status = other->check(ctx);
    return status < 0 ? status : PERI_OK;
}

static peri_status coll_step(peri_work *base)
{
    coll_work *w = (coll_work *)base;
    peri__comm *comm = base->group->comm;
    if (w->phase == COPY_OUT) {
        peri_status status = peri__group_check("peri_coll", base->group);
        if (status >= 0 && w->out) status = peri_event_query(w->out->event);
        if (status < 0) return fail_in_words(w, status);
        comm->events++; /* a device that has not finished yet will: polling it is a step forward */
        if (status == PERI_PENDING) return PERI_PENDING;
        w->phase = TURN;
    }
    if (w->phase == TURN) {
        PERI_TRY(post_in_turn(w));
        if (w->phase == TURN) return check_deadline(w);
    }
    /* Who only moves all works on does not wait for this one: its stream need not either, before the operation has
     * run. */
    const bool waits = w->op.stream && w->vtab->join && !comm->stepping;
    peri_status status = waits ? w->vtab->join(w->request) : w->vtab->test(w->request);
    if (status == PERI_PENDING) {
        peri_status other = check_other(w);
        return other < 0 ? fail_in_words(w, other) : check_deadline(w);
    }
    if (status >= 0 && w->stage) status = copy_in(w);
    if (status >= 0 && w->op.stream) status = join_homes(w);
    if (status < 0) return fail_in_words(w, status);
    w->queued = waits;
    if (!w->queued) record_end(w, PERI_OK);
    w->base.ended_by = peri__watch_ended(base->group, w->op.sequence, w->op.channel, w->out_bytes, w->posted_ns);
    return PERI_OK;
}

/** PERI_PENDING while an operation of a device, whose results the poster has been promised, has not run. Its failure is
 *  one of the group, and an error of whoever next waits for the device. */
static peri_status watch_queued(coll_work *w)
{
    peri_group *g = w->base.group;
    bool sound = true;
    for (const peri_group *up = g; up; up = up->parent) sound = sound && up->failed == PERI_OK;
    peri_status status = w->vtab->test(w->request);
    if (status == PERI_OK) {
        record_end(w, PERI_OK);
        return PERI_OK;
    }
    const bool pending = status == PERI_PENDING;
    if (!sound) { /* its failure was told */
        if (!pending) record_end(w, status);
        return pending ? PERI_PENDING : PERI_OK;
    }
    if (pending) {
        status = check_other(w);
        status = status < 0 ? fail_in_words(w, status)
                            : check_deadline(w); /* after a failure the transport gives the operation up */
    } else {
        fail_in_words(w, status);
    }
    if (status < 0) peri__comm_note_lost(g, status);
    return pending ? PERI_PENDING : PERI_OK;
}

static peri_status coll_settle(peri_work *base)
{
    coll_work *w = (coll_work *)base;
    if (base->status == PERI_OK && w->op.stream) { /* the end of their memory is queued after the operation */
        peri_tensor_release(w->send);
        peri_tensor_release(w->recv);
        w->send = w->recv = NULL;
    }
    if (w->queued && watch_queued(w) == PERI_PENDING) return PERI_PENDING;
    w->queued = false;
    if (w->request && w->vtab->drop(w->request) == PERI_PENDING) return PERI_PENDING;
    base->group->comm->on_device -= w->request && w->op.stream;
    w->request = NULL;
    if (w->stage) {
        /* Copies of a failed work may still be running. */
        if (base->status < 0 && w->out) join_home(w, w->send ? w->send : w->recv, w->out->event);
        peri__stage_buffer_put(w->stage, w->out, base->status < 0);
        peri__stage_buffer_put(w->stage, w->in, base->status < 0);
    }
    w->out = w->in = NULL;
    peri_tensor_release(w->send);
    peri_tensor_release(w->recv);
    w->send = w->recv = NULL;
    if (w->keep_release) w->keep_release(w->keep);
    w->keep_release = NULL;
    return PERI_OK;
}

static const peri__work_vtab coll_vtab = {.name = "coll", .step = coll_step, .settle = coll_settle};

/* -- making -------------------------------------------------------------------------------------------------------- */

/** Queue the copies of @send to host memory and get room for @recv. */
static peri_status copy_out(coll_work *w)
{
    peri__stage *stage;
    peri_device *device = w->base.device;
    PERI_TRY(peri__stage_of_device(w->base.group->comm, device, &stage));
    w->stage = stage;
    PERI_TRY(peri__stage_buffer_get(stage, peri__max(w->in_bytes, 1), &w->in));
    /* Also when nothing is copied out: the copy in must come after what the post's stream still does with the
     * output. */
    PERI_TRY(peri_event_record(w->in->event, w->base.stream));
    PERI_TRY(peri_stream_wait(stage->stream, w->in->event));
    if (w->out_bytes == 0) return PERI_OK;
    PERI_TRY(peri__stage_buffer_get(stage, w->out_bytes, &w->out));
    /* The work keeps the tensor until this copy has run, so its home need not wait. */
    const peri_tensor *from = w->send ? w->send : w->recv;
    PERI_TRY(device->vtab->copy(device->ctx, stage->stream->ctx, w->out->data, peri__data(from), w->out_bytes,
                                PERI_COPY_D2H));
    return peri_event_record(w->out->event, stage->stream);
}

/** Make the work of @op: copies counts, takes a number, retains tensors. */
static peri_status coll_new(peri_group *g, const peri_coll_op *op, peri_tensor *send, peri_tensor *recv,
                            coll_work **out)
{
    int32_t n = g->size;
    if (!g->records) {
        g->records = peri__alloc_zero(sizeof *g->records * PERI_RECORD_MOST);
        if (!g->records) return PERI_ENOMEM;
    }
    peri_tensor *any = recv ? recv : send;
    peri_work *base;
    size_t size = sizeof(coll_work) + sizeof(int64_t) * 2 * (size_t)n +
                  sizeof(peri_k_run) * (size_t)(op->recv_runs ? op->n_recv_runs : 0);
    PERI_TRY(peri__work_new(size, &coll_vtab, g, any ? peri__device(any) : NULL, &base));
    coll_work *w = (coll_work *)base;
    w->op = *op;
    if (op->facts) {
        w->facts = *op->facts;
        w->op.facts = &w->facts;
    }
    if (op->recv_runs) {
        peri_k_run *runs = (peri_k_run *)(w->counts + 2 * n);
        memcpy(runs, op->recv_runs, sizeof *runs * (size_t)op->n_recv_runs);
        w->op.recv_runs = runs;
    }
    if (op->send_counts) {
        memcpy(w->counts, op->send_counts, sizeof(int64_t) * (size_t)(op->kind == PERI_COLL_ALL_GATHER ? 1 : n));
        w->op.send_counts = w->counts;
    }
    if (op->recv_counts) {
        memcpy(w->counts + n, op->recv_counts, sizeof(int64_t) * (size_t)n);
        w->op.recv_counts = w->counts + n;
    }
    w->vtab = g->comm->vtab;
    bytes_of_rank(&w->op, g->rank, n, &w->out_bytes, &w->in_bytes);
    if (!w->op.sequence) {
        peri_status status = peri__group_reserve(g, op->channel, 1, &w->op.sequence);
        if (status < 0) return peri__work_drop(base, status);
    }
    if (!g->unsigned_ops) w->op.signature = signature_of(&w->op, n);
    if (send) peri_tensor_retain(send);
    if (recv) peri_tensor_retain(recv);
    w->send = send;
    w->recv = recv;
    record_post(w);
    *out = w;
    return PERI_OK;
}

peri_status peri__coll_post_host(peri_group *group, const peri_coll_op *op, void *keep,
                                 void (*keep_release)(void *keep), peri_work **out)
{
    coll_work *w = NULL;
    peri_status status = peri__group_check("peri_coll", group);
    if (status >= 0) status = coll_new(group, op, NULL, NULL, &w);
    if (status < 0) {
        if (group && op->sequence) peri__group_fail(group, status);
        if (keep_release) keep_release(keep);
        return status;
    }
    w->keep = keep;
    w->keep_release = keep_release;
    return peri__work_hand_out(&w->base, post_in_turn(w), out);
}

/** A group of one: copy on the device. */
static peri_status copy_alone(peri_group *g, const peri_coll_op *op, peri_tensor *send, peri_tensor *recv,
                              peri_work **out)
{
    uint64_t sequence = op->sequence;
    if (!sequence) PERI_TRY(peri__group_reserve(g, op->channel, 1, &sequence));
    peri__group_posted(g, op->channel, sequence);
    if (send && recv && peri__data(send) != peri__data(recv))
        PERI_TRY(peri__copy(peri__device(recv), peri__data(recv), peri__data(send),
                            peri__numel(recv) * peri_dtype_size(recv->dtype), PERI_COPY_D2D));
    return peri__work_done(g, recv ? peri__device(recv) : NULL, out);
}

peri_status peri__coll_post(peri_group *group, const peri_coll_op *op, peri_tensor *send, peri_tensor *recv,
                            peri_work **out)
{
    PERI_TRY(peri__group_check("peri_coll", group));
    peri_tensor *any = recv ? recv : send;
    bool direct = !any || peri__stage_not_needed(group->comm, peri__device(any));
    if (!direct && group->size == 1) return copy_alone(group, op, send, recv, out);
    coll_work *w;
    peri_status status = coll_new(group, op, send, recv, &w);
    if (status < 0) {
        if (op->sequence) peri__group_fail(group, status);
        return status;
    }
    bool by_device = !direct && peri__by_device(group, peri__device(any));
    if (by_device) {
        w->vtab = group->comm->device_vtab;
        w->op.stream = w->base.stream->ctx;
    }
    if (direct || by_device) {
        w->op.send = send ? peri__data(send) : NULL;
        w->op.recv = recv ? peri__data(recv) : NULL;
        if (op->kind == PERI_COLL_ALL_REDUCE && !send) w->op.send = w->op.recv;
        return peri__work_hand_out(&w->base, post_in_turn(w), out);
    }
    status = copy_out(w);
    if (status < 0) status = fail_in_words(w, status);
    return peri__work_hand_out(&w->base, status, out);
}
