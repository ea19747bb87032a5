/* SPDX-License-Identifier: Apache-2.0
 *
 * work.c: operations in flight. A world lists its unfinished works and holds a reference to each, so that a dropped
 * handle stops nothing; whoever tests one pending work moves all of them on, because another rank may be waiting for
 * the next phase of one that nobody here is looking at. What asks or moves all of them in the name of a group stands
 * here too: groups know nothing of works.
 */
#include "comm_internal.h"
#include "../base/floats.h"

enum { TESTS = 2000 }; /* that a wait makes before it pauses between them */

static void list_add(peri__comm *comm, peri_work *work)
{
    work->listed = true;
    work->inner = comm->within > 0;
    comm->outer += !work->inner;
    work->previous = comm->last;
    if (comm->last) comm->last->next = work;
    else comm->first = work;
    comm->last = work;
}

/** Take @work out of the list and give up the list's reference: the caller holds another one. */
static void list_remove(peri__comm *comm, peri_work *work)
{
    if (!work->listed) return;
    work->listed = false;
    comm->outer -= !work->inner;
    if (comm->cursor == work) comm->cursor = work->next;
    if (work->previous) work->previous->next = work->next;
    else comm->first = work->next;
    if (work->next) work->next->previous = work->previous;
    else comm->last = work->previous;
    work->previous = work->next = NULL;
    peri_work_release(work);
}

static peri_status make_work(size_t size, const peri__work_vtab *vtab, peri_group *group, peri_device *device,
                        peri_status status, peri_work **out)
{
    peri_work *work = peri__alloc_zero(size);
    if (!work) return PERI_ENOMEM;
    peri__refs_init(&work->refs);
    work->vtab = vtab;
    work->status = status;
    work->group = group;
    peri_group_retain(group);
    if (device && !(device->caps & PERI_DEVICE_IMMEDIATE)) {
        work->device = device;
        work->stream = peri_stream_current(device);
        peri__refs_add(&work->stream->refs);
    }
    peri__object_count(1);
    *out = work;
    return PERI_OK;
}

peri_status peri__work_new(size_t size, const peri__work_vtab *vtab, peri_group *group, peri_device *device,
                           peri_work **out)
{
    peri_work *work;
    PERI_TRY(make_work(size, vtab, group, device, PERI_PENDING, &work));
    peri__refs_add(&work->refs);
    list_add(group->comm, work);
    group->comm->pending++;
    *out = work;
    return PERI_OK;
}

peri_status peri__work_done(peri_group *group, peri_device *device, peri_work **out)
{
    static const peri__work_vtab done = {.name = "done"};
    return make_work(sizeof(peri_work), &done, group, device, PERI_OK, out);
}

/** Remember how a work ended. */
static void end_work(peri_work *work, peri_status status)
{
    peri__comm *comm = work->group->comm;
    work->status = status;
    if (status < 0) work->message = peri__strdup(peri_error_message());
    comm->pending--;
    comm->events++;
    if (!work->vtab->settle || work->vtab->settle(work) != PERI_PENDING) list_remove(comm, work);
}

peri_status peri__work_drop(peri_work *work, peri_status status)
{
    if (work->status == PERI_PENDING) end_work(work, status);
    peri_work_release(work);
    return status;
}

peri_status peri__work_hand_out(peri_work *work, peri_status status, peri_work **out)
{
    if (status < 0) return peri__work_drop(work, status);
    *out = work;
    return PERI_OK;
}

/** Step a pending work, or let an ended one settle. The caller holds a reference. */
static void step_work(peri_work *work)
{
    if (work->stepping) return;
    if (work->status != PERI_PENDING) {
        if (work->listed && work->vtab->settle(work) != PERI_PENDING) list_remove(work->group->comm, work);
        return;
    }
    peri_stream *before = NULL;
    bool elsewhere = work->device && peri_stream_current(work->device) != work->stream;
    if (elsewhere) {
        before = peri_stream_current(work->device);
        peri__refs_add(&before->refs);
        peri_stream_current_set(work->device, work->stream);
    }
    peri__watch *watch = &work->group->comm->watch;
    const int64_t seen = watch->seen;
    const bool within = watch->within;
    watch->seen = 0;
    watch->within = within || work == watch->awaited;
    work->stepping = true;
    peri__parts_begin(work->group);
    PERI__OWN_FLOATS;
    peri_status status = work->vtab->step(work);
    peri__parts_end(work->group);
    work->stepping = false;
    if (status != PERI_PENDING && !work->ended_by) work->ended_by = watch->seen;
    watch->seen = seen;
    watch->within = within;
    if (elsewhere) {
        peri_stream_current_set(work->device, before);
        peri_stream_release(before);
    }
    if (status != PERI_PENDING) end_work(work, status);
}

/** Step every work in flight of @comm (a peri__comm) once; nothing while that already happens. */
static void comm_progress(void *ctx)
{
    peri__comm *comm = ctx;
    if (comm->stepping) return;
    comm->stepping = true;
    comm->cursor = comm->first;
    while (comm->cursor) {
        peri_work *work = comm->cursor;
        comm->cursor = work->next;
        peri_work_retain(work);
        step_work(work);
        peri_work_release(work);
    }
    comm->stepping = false;
}

/* -- operations that are queued on a device ------------------------------------------------------------------------ */

/** Also where one has failed and nobody was told: whoever waits for the device is. */
static bool queued_in_world(void *ctx)
{
    const peri__comm *comm = ctx;
    return comm->on_device > 0 || comm->lost != PERI_OK;
}

static bool queued_since(void *ctx, int64_t since_ns)
{
    peri__comm *comm = ctx;
    const peri_coll_vtab *v = comm->device_vtab;
    if (comm->on_device == 0) return false;
    if (comm->stepping && peri_time_ns() - since_ns > comm->timeout_ns)
        v->abort(comm->device_world,
                 "operations that are queued on the device had no end within the timeout of the world");
    return !v->check || v->check(comm->device_world) == PERI_PENDING;
}

static peri_status world_lost(void *ctx) { return peri__comm_lost_status(ctx); }

const peri__between_vtab peri__comm_between = {
    .progress = comm_progress, .queued = queued_in_world, .still_queued = queued_since, .lost = world_lost};

/** Order the results of a complete work before later work on the caller's current stream. */
static peri_status join_results(peri_work *work)
{
    if (!work->device || peri_stream_current(work->device) == work->stream) return PERI_OK;
    if (!work->joined) {
        PERI_TRY(peri_event_new(work->device, &work->joined));
        PERI_TRY(peri_event_record(work->joined, work->stream));
    }
    return peri_stream_wait(peri_stream_current(work->device), work->joined);
}

peri_status peri_work_test(peri_work *work)
{
    PERI_NEED(work);
    if (work->status == PERI_PENDING) {
        peri__comm *comm = work->group->comm;
        peri_work_retain(work);
        step_work(work);
        /* A test moves the other operations of this rank on too, if there are any. Within the step of another work
         * (comm->within > 0) it does not: whoever tested that one from outside does so when its step returns. */
        if (work->status == PERI_PENDING && comm->within == 0 && comm->outer > !work->inner) comm_progress(comm);
        peri_work_release(work);
    }
    if (work->status == PERI_OK) peri__watch_seen(work->group->comm, work);
    if (work->status >= 0) return work->status == PERI_OK ? join_results(work) : PERI_PENDING;
    if (work->group->comm->within == 0) peri__comm_told(work->group);
    return peri__fail(work->status, "%s", work->message ? work->message : peri_status_text(work->status));
}

peri_status peri_work_wait(peri_work *work)
{
    PERI_NEED(work);
    peri_status status;
    peri__comm *comm = work->group->comm;
    /* A test is a pause in itself at first: it looks at the wires, and yields where ranks share processors. */
    for (int64_t round = 0; (status = peri_work_test(work)) == PERI_PENDING; round++) {
        peri__watch_waits(comm, work);
        if (comm->shown) comm->shown->blocked = comm->pending;
        if (round >= TESTS) peri_pause(round - TESTS);
    }
    if (comm->shown) comm->shown->blocked = 0;
    return status;
}

void peri_work_retain(peri_work *work) { if (work) peri__refs_add(&work->refs); }

void peri_work_release(peri_work *work)
{
    if (!work || !peri__refs_drop(&work->refs)) return;
    if (work->vtab->fini) work->vtab->fini(work);
    peri_event_release(work->joined);
    peri_stream_release(work->stream);
    peri_group_release(work->group);
    peri__free(work->message);
    peri__object_count(-1);
    peri__free(work);
}

/* -- what is in flight in a world or group ------------------------------------------------------------------------- */

int64_t peri_group_pending(const peri_group *group) { return group ? group->comm->pending : 0; }

void peri_group_expire(peri_group *group)
{
    if (!group) return;
    for (peri_work *w = group->comm->first; w; w = w->next) w->expired = true;
}

int64_t peri_group_progress(peri_group *group)
{
    if (!group) return 0;
    if (!peri__at_border()) comm_progress(group->comm);
    return group->comm->events;
}

/** Unfinished works of the group and of groups made from it. */
static int64_t pending_in_group(const peri_group *group)
{
    int64_t n = 0;
    for (const peri_work *w = group->comm->first; w; w = w->next) {
        const peri_group *g = w->group;
        while (g && g != group) g = g->parent;
        n += g && w->status == PERI_PENDING;
    }
    return n;
}

/** Whether an operation of a device, in the group or in a group made from it, has promised its results to its poster
 *  (its status is PERI_OK) and has not run yet. */
static bool promised_in_group(const peri_group *group)
{
    for (const peri_work *w = group->comm->first; w; w = w->next) {
        const peri_group *g = w->group;
        while (g && g != group) g = g->parent;
        if (g && w->status == PERI_OK) return true;
    }
    return false;
}

peri_status peri_group_close(peri_group *group)
{
    PERI_NEED(group);
    peri__comm *comm = group->comm;
    for (peri_group *g = group; g; g = g->parent)
        if (g->closed) {
            group->closed = true;
            return PERI_OK;
        }
    comm_progress(comm);
    if (group->node) PERI_TRY(peri_group_close(group->node));
    int64_t pending = pending_in_group(group);
    if (pending > 0 && peri__group_check("peri_group_close", group) == PERI_OK)
        return peri__fail(
            PERI_EINVAL,
            "peri_group_close: %lld operations of this rank in group '%s' are in flight; wait for them first",
            (long long)pending, group->name);
    for (int64_t round = 0; promised_in_group(group); round++) { /* each of them runs, or fails by its deadline */
        peri_pause(round);
        comm_progress(comm);
    }
    peri_status lost = peri__comm_lost_status(comm);
    if (!group->parent && comm->sum_up) comm->sum_up(comm, &group->numbers);
    group->closed = true;
    peri_status status = group->device_ctx ? comm->device_vtab->close(group->device_ctx) : PERI_OK;
    peri_status closed = comm->vtab->close(group->ctx);
    if (status >= 0) status = closed;
    if (lost < 0) status = lost;
    if (!group->parent) {
        comm_progress(comm); /* what was in flight ends here */
        for (int i = 0; i < PERI_COMM_DEVICES; i++) peri__stage_sweep(&comm->stages[i], true);
    }
    return status;
}
