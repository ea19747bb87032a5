/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl.c: the transport of GPUs: the second transport of a world (plugin/coll.h), for the memory of the device cuda.
 *
 * An operation runs on the stream of its communicator, after what the poster's stream held at the post. Whoever waits
 * for it has his stream wait (`join`) as soon as NCCL has the operation, and goes on. Until it has run, the ranks watch
 * each other by notes over the host's transport: the first member of a group tells the others what it launches, and
 * what takes longer than 50 ms is asked about. So a mismatch, a dead rank and a late one are named as on other
 * transports, though NCCL itself would wait for ever: a group that fails has its communicators aborted, which ends what
 * runs on the device.
 */
#include "nccl_internal.h"

#include <string.h>

const peri_plugin_host *peri__nccl_host;

/* -- worlds and groups --------------------------------------------------------------------------------------------- */

static peri_status nccl_probe(char *reason, size_t len)
{
    return peri__nccl_load(reason, len) ? PERI_OK : PERI_EUNSUPPORTED;
}

/** Take the lock of a world: its thread has come by. */
static void enter(nccl_world *w)
{
    pthread_mutex_lock(&w->lock);
    atomic_store(&w->seen_ns, peri__nccl_host->time_ns());
}

static void free_early(early *list)
{
    while (list) {
        early *next = list->next;
        peri__nccl_host->free(list);
        list = next;
    }
}

static void group_free(nccl_group *g)
{
    nccl_world *w = g->world;
    for (nccl_group **p = &w->groups; *p; p = &(*p)->next)
        if (*p == g) {
            *p = g->next;
            break;
        }
    for (nccl_group *child = w->groups; child; child = child->next)
        if (child->parent == g) child->parent = NULL;
    for (int32_t c = 0; c < LANES; c++)
        if (g->lanes[c].stream) w->vtab->stream_delete(w->device, g->lanes[c].stream);
    if (g->base.stream) w->vtab->stream_delete(w->device, g->base.stream);
    free_early(g->order);
    peri__nccl_host->free(g->ranks);
    for (int32_t i = 0; g->history && i < HISTORY; i++) peri__nccl_host->free((void *)g->history[i].send_counts);
    peri__nccl_host->free(g->history);
    peri__nccl_host->free(g->members);
    peri__nccl_host->free(g);
    if (--w->handles > 0) return;
    peri__nccl_guard_fini(w);
    while (w->n_spare > 0) w->vtab->event_delete(w->device, w->spare[--w->n_spare]);
    free_early(w->unknown);
    peri__nccl_host->free(w);
}

static peri_status group_make(nccl_world *w, nccl_group *parent, const int32_t *ranks, int32_t n, uint64_t tag,
                              void **out)
{
    nccl_group *g = peri__nccl_host->alloc_zero(sizeof *g);
    if (!g) return PERI_ENOMEM;
    g->world = w;
    g->next = w->groups;
    w->groups = g;
    w->handles++;
    g->ranks = peri__nccl_host->alloc(sizeof *g->ranks * (size_t)n);
    g->history = peri__nccl_host->alloc_zero(sizeof *g->history * HISTORY);
    g->members = peri__nccl_host->alloc_zero(sizeof *g->members * (size_t)n);
    if (!g->ranks || !g->history || !g->members) {
        w->handles += parent == NULL; /* the caller still has the world */
        group_free(g);
        w->handles -= parent == NULL;
        return PERI_ENOMEM;
    }
    g->parent = parent;
    g->tag = tag;
    g->size = n;
    for (int32_t i = 0; i < n; i++) {
        g->ranks[i] = parent ? parent->ranks[ranks[i]] : i;
        if (g->ranks[i] == w->rank) g->rank = i;
    }
    g->last_posted = &g->posted;
    g->last_order = &g->order;
    for (int32_t c = 0; c < LANES; c++) g->lanes[c].last = &g->lanes[c].first;
    peri__nccl_hear_early(g);
    *out = g;
    return PERI_OK;
}

static peri_status nccl_open(peri_coll_open *boot, void **out)
{
    char reason[256];
    if (!peri__nccl_load(reason, sizeof reason)) return FAIL(PERI_EUNSUPPORTED, "nccl: %s", reason);
    if (!boot->device_vtab || strncmp(boot->device_vtab->name, "cuda", 4) != 0)
        return FAIL(PERI_EUNSUPPORTED, "nccl: device '%s', this transport is for the device cuda",
                    boot->device_vtab ? boot->device_vtab->name : "cpu");
    if (boot->size > 1 && !boot->host_vtab->note_send)
        return FAIL(PERI_EUNSUPPORTED,
                    "nccl: beside transport '%s', allowed: mpi (it carries the notes by which ranks watch each other)",
                    boot->host_vtab->name);
    nccl_world *w = peri__nccl_host->alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    *w = (nccl_world){.vtab = boot->device_vtab,
                      .device = boot->device,
                      .host = boot->host_vtab,
                      .host_group = boot->host_group,
                      .rank = boot->rank,
                      .size = boot->size,
                      .timeout_ns = boot->timeout_ns};
    peri_status status = group_make(w, NULL, NULL, boot->size, 0, out);
    if (status < 0) {
        peri__nccl_host->free(w);
        return status;
    }
    status = peri__nccl_guard_init(w);
    if (status < 0) group_free(*out);
    return status;
}

static peri_status nccl_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub)
{
    nccl_group *parent = group;
    const nccl_group *bad = peri__nccl_broken(parent);
    if (bad) return FAIL(bad->failed, "%s", bad->message);
    return group_make(parent->world, parent, ranks, n, tag, sub);
}

/* -- requests ------------------------------------------------------------------------------------------------------ */

/** Take @r out of a list that it may be in. */
static void unlink_from(nccl_request **first, nccl_request ***last, const nccl_request *r)
{
    for (nccl_request **p = first; *p; p = &(*p)->next)
        if (*p == r) {
            *p = r->next;
            break;
        }
    *last = first;
    while (**last) *last = &(**last)->next;
}

static void append_request(nccl_request ***last, nccl_request *r)
{
    r->next = NULL;
    **last = r;
    *last = &r->next;
}

static peri_status end_request(nccl_request *r, peri_status status)
{
    if (r->state == REQUEST_ENDED) return r->status;
    nccl_group *g = r->group;
    communicator *lane = peri__nccl_lane(g, r->op.channel);
    if (r->state == REQUEST_RUNS) {
        unlink_from(&lane->first, &lane->last, r);
        g->world->running--;
    } else {
        unlink_from(&g->posted, &g->last_posted, r);
    }
    r->state = REQUEST_ENDED;
    r->status = status;
    if (status < 0) {
        const char *message = peri__nccl_host->error_message();
        r->message = peri__nccl_host->alloc(strlen(message) + 1);
        if (r->message) memcpy(r->message, message, strlen(message) + 1);
    }
    return status;
}

/** A failure of NCCL is one of the group. */
static void give_up(nccl_group *g, peri_status status)
{
    char text[PERI_MESSAGE_MAX];
    snprintf(text, sizeof text, "%.400s", peri__nccl_host->error_message());
    peri__nccl_lost(g, status, text);
}

/** The request that this rank launches next; NULL: it is not posted yet, or not known. */
static nccl_request *its_turn(const nccl_group *g)
{
    nccl_request *r = g->posted;
    if (g->rank == 0 || (r && r->state == REQUEST_STARTS)) return r;
    while (r && g->order && r->op.sequence != g->order->note.sequence) r = r->next;
    return g->order ? r : NULL;
}

/** Launch what is posted, as far as the order of the first member goes. */
static peri_status launch(nccl_group *g)
{
    peri_status status;
    for (nccl_request *r; (r = its_turn(g));) {
        communicator *lane = peri__nccl_lane(g, r->op.channel);
        status = peri__nccl_split(g, lane);
        if (status == PERI_OK) status = peri__nccl_start(r);
        if (status != PERI_OK) return status;
        unlink_from(&g->posted, &g->last_posted, r);
        append_request(&lane->last, r);
        g->world->running++;
        peri__nccl_ordered(g);
    }
    status = peri__nccl_base(g, g->posted != NULL); /* the others need this rank to make theirs */
    return status == PERI_PENDING ? PERI_OK : status;
}

/** See which operations have run. */
static peri_status look(nccl_group *g)
{
    const nccl_world *w = g->world;
    for (int32_t c = 0; c < LANES; c++) {
        communicator *lane = &g->lanes[c];
        while (lane->first) {
            peri_status status = w->vtab->event_query(w->device, lane->first->done);
            /* After an error that NCCL learns of meanwhile it runs for ever, or has ended without its result. */
            peri_status well = lane->comm ? peri__nccl_well(lane) : PERI_OK;
            if (status < 0 || well < 0) return status < 0 ? status : well;
            if (status == PERI_PENDING) break;
            (void)end_request(lane->first, PERI_OK);
        }
    }
    return PERI_OK;
}

/** Move the world's operations on. @looks: ask the device what has run, however short it is since that was asked. */
static void progress(nccl_world *w, bool looks)
{
    peri__nccl_hear(w);
    int64_t now = w->moved_ns = peri__nccl_host->time_ns();
    looks = looks || now - w->looked_ns >= LOOK_NS;
    if (looks) w->looked_ns = now;
    for (nccl_group *g = w->groups; g; g = g->next) {
        if (g->guarded) peri__nccl_group_fail(g, g->guarded, g->guard_text, true); /* nothing, if it has failed */
        if (peri__nccl_broken(g) || g->left) continue;
        peri_status status = launch(g);
        if (status >= 0 && looks) status = look(g);
        if (status < 0) give_up(g, status);
    }
}

/** An event that no request uses. */
static peri_status event_take(nccl_world *w, void **event)
{
    if (w->n_spare == 0) return w->vtab->event_new(w->device, event);
    *event = w->spare[--w->n_spare];
    return PERI_OK;
}

static void event_give(nccl_world *w, void *event)
{
    if (event && w->n_spare < SPARE) w->spare[w->n_spare++] = event;
    else if (event) w->vtab->event_delete(w->device, event);
}

static peri_status nccl_post(void *group, const peri_coll_op *op, void **request)
{
    nccl_group *g = group;
    nccl_world *w = g->world;
    const nccl_group *bad = peri__nccl_broken(g);
    if (bad) return FAIL(bad->failed, "%s", bad->message);
    nccl_request *r = peri__nccl_host->alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    r->group = g;
    r->op = *op;
    peri_status status = event_take(w, &r->ready);
    if (status >= 0) status = event_take(w, &r->done);
    if (status >= 0) status = w->vtab->event_record(w->device, r->ready, op->stream);
    if (status < 0) {
        event_give(w, r->ready);
        event_give(w, r->done);
        peri__nccl_host->free(r);
        return status;
    }
    r->began_ns = peri__nccl_host->time_ns();
    append_request(&g->last_posted, r);
    peri__nccl_posted(g, &r->op);
    progress(w, false);
    *request = r;
    return PERI_OK;
}

/** Ask the others about an operation that takes long, unless it only waits for one before it. */
static void watch(nccl_request *r)
{
    nccl_group *g = r->group;
    const nccl_request *first = peri__nccl_lane(g, r->op.channel)->first;
    if (first && first != r) return;
    int64_t now = peri__nccl_host->time_ns();
    if (now - r->began_ns <= STALL_NS || now - r->asked_ns <= ASK_NS) return;
    r->asked_ns = now;
    peri__nccl_ask(r);
}

/** Move on, and notice a failure of the group. */
static void see_to(nccl_request *r)
{
    nccl_group *g = r->group;
    if (r->state == REQUEST_ENDED) return;
    progress(g->world, false);
    if (r->state != REQUEST_ENDED && !peri__nccl_broken(g)) watch(r);
    const nccl_group *bad = peri__nccl_broken(g);
    if (r->state != REQUEST_ENDED && bad) (void)end_request(r, FAIL(bad->failed, "%s", bad->message));
}

static peri_status fail_as_request(const nccl_request *r)
{
    return FAIL(r->status, "%s", r->message ? r->message : "");
}

static peri_status nccl_test(void *request)
{
    nccl_request *r = request;
    nccl_world *w = r->group->world;
    /* Those that run are asked about one after the other: one look serves them all. */
    const bool seen = r->state == REQUEST_RUNS && peri__nccl_host->time_ns() - w->moved_ns < LOOK_NS;
    if (!seen || peri__nccl_broken(r->group)) see_to(r);
    if (r->state != REQUEST_ENDED) return PERI_PENDING;
    return r->status >= 0 ? PERI_OK : fail_as_request(r);
}

static peri_status nccl_join(void *request)
{
    nccl_request *r = request;
    nccl_world *w = r->group->world;
    see_to(r);
    if (r->state == REQUEST_ENDED) return r->status >= 0 ? PERI_OK : fail_as_request(r);
    if (r->state != REQUEST_RUNS || w->running > AHEAD) return PERI_PENDING;
    if (!r->joined) TRY(w->vtab->stream_wait(w->device, r->op.stream, r->done));
    r->joined = true;
    return PERI_OK;
}

static peri_status nccl_drop(void *request)
{
    nccl_request *r = request;
    nccl_group *g = r->group;
    nccl_world *w = g->world;
    void *stream = peri__nccl_lane(g, r->op.channel)->stream;
    bool started = r->scratch || r->phase != 0 || r->state == REQUEST_RUNS;
    if (r->state != REQUEST_ENDED) (void)end_request(r, FAIL(PERI_EABORTED, "given up"));
    if (r->status < 0 && started) {
        /* NCCL may still use the buffers until its streams have seen the end. */
        if (stream && w->vtab->event_record(w->device, r->done, stream) >= 0 &&
            w->vtab->event_query(w->device, r->done) == PERI_PENDING)
            return PERI_PENDING;
    }
    if (r->scratch) w->vtab->free(w->device, stream, r->scratch, r->scratch_bytes);
    event_give(w, r->ready);
    event_give(w, r->done);
    peri__nccl_host->free(r->message);
    peri__nccl_host->free(r);
    return PERI_OK;
}

/** PERI_PENDING: the group is sound, and operations of sound groups run on the device. */
static peri_status nccl_check(void *group)
{
    nccl_group *g = group;
    bool runs = false;
    progress(g->world, true);
    for (nccl_group *any = g->world->groups; any; any = any->next)
        for (int32_t c = 0; c < LANES && !peri__nccl_broken(any); c++) {
            if (!any->lanes[c].first) continue;
            runs = true;
            watch(any->lanes[c].first);
        }
    const nccl_group *bad = peri__nccl_broken(g);
    if (bad) return FAIL(bad->failed, "%s", bad->message);
    return runs ? PERI_PENDING : PERI_OK;
}

static void nccl_abort(void *group, const char *message)
{
    peri__nccl_group_fail(group, PERI_EABORTED, message, true);
}

/** Communicators are destroyed by all members at about the same time; what still runs has ended, or the group has
 *  failed. */
static peri_status nccl_close(void *group)
{
    nccl_group *g = group;
    if (g->left || g->failed != PERI_OK) return PERI_OK;
    g->left = true;
    for (int32_t c = 0; c < LANES; c++)
        if (g->lanes[c].comm) {
            if (g->lanes[c].first) peri__nccl.CommAbort(g->lanes[c].comm);
            else peri__nccl.CommDestroy(g->lanes[c].comm);
            g->lanes[c].comm = NULL;
        }
    if (g->base.comm) peri__nccl.CommDestroy(g->base.comm);
    g->base.comm = NULL;
    return PERI_OK;
}

static void nccl_release(void *group)
{
    nccl_group *g = group;
    nccl_world *w = g->world;
    enter(w);
    (void)nccl_close(g);
    const bool last = w->handles == 1;
    if (!last) group_free(g);
    pthread_mutex_unlock(&w->lock);
    if (last) group_free(g); /* ends the guard, which may be waiting for the lock */
}

/* -- the functions of the contract, each under the lock of its world ----------------------------------------------- */

#define UNDER_LOCK(name, group_of, call, ...) \
    static peri_status name(__VA_ARGS__) \
    { \
        nccl_world *w = ((const nccl_group *)(group_of))->world; \
        enter(w); \
        peri_status status = call; \
        pthread_mutex_unlock(&w->lock); \
        return status; \
    }
#define OF_REQUEST(request) (((const nccl_request *)(request))->group)

UNDER_LOCK(locked_subgroup, group, nccl_subgroup(group, ranks, n, tag, sub), void *group, const int32_t *ranks,
           int32_t n, uint64_t tag, void **sub)
UNDER_LOCK(locked_post, group, nccl_post(group, op, request), void *group, const peri_coll_op *op, void **request)
UNDER_LOCK(locked_test, OF_REQUEST(request), nccl_test(request), void *request)
UNDER_LOCK(locked_join, OF_REQUEST(request), nccl_join(request), void *request)
UNDER_LOCK(locked_drop, OF_REQUEST(request), nccl_drop(request), void *request)
UNDER_LOCK(locked_check, group, nccl_check(group), void *group)
UNDER_LOCK(locked_close, group, nccl_close(group), void *group)

static void locked_abort(void *group, const char *message)
{
    nccl_world *w = ((const nccl_group *)group)->world;
    enter(w);
    nccl_abort(group, message);
    pthread_mutex_unlock(&w->lock);
}

static void locked_blame(void *request, char *text, size_t len)
{
    nccl_world *w = OF_REQUEST(request)->world;
    enter(w);
    peri__nccl_blame(request, text, len);
    pthread_mutex_unlock(&w->lock);
}

static void nccl_numbers(void *group, const peri_coll_numbers *numbers) { ((nccl_group *)group)->numbers = numbers; }

static const peri_coll_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_COLL_ABI,
    .name = "nccl",
    .takes = PERI_COLL_DEVICE,
    .probe = nccl_probe,
    .open = nccl_open,
    .subgroup = locked_subgroup,
    .post = locked_post,
    .test = locked_test,
    .blame = locked_blame,
    .drop = locked_drop,
    .abort = locked_abort,
    .close = locked_close,
    .release = nccl_release,
    .check = locked_check,
    .join = locked_join,
    .numbers = nccl_numbers,
};

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent);
const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent)
{
    return peri_plugin_host_take(&peri__nccl_host, lent) && peri_plugin_host_has_all(lent) ? &vtab : NULL;
}
