/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl.c: the transport of GPUs: the second transport of a world (plugin/coll.h), for the memory of the device cuda.
 *
 * An operation runs on its channel's own stream, after what the poster's stream held at the post; it has ended when it has run, and what
 * the poster queues then comes after it. Until then the ranks watch each other by notes over the host's transport: each post is told to
 * the next rank, and what takes longer than 50 ms is asked about. So a mismatch, a dead rank and a late one are named as on other
 * transports, though NCCL itself would wait for ever: a group that fails has its communicators aborted, which ends what runs on the
 * device.
 */
#include "internal.h"

#include <string.h>

const peri_plugin_host *peri__nccl_host;

/* -- worlds and groups -------------------------------------------------------------------------------------------------------------- */

static peri_status nccl_probe(char *reason, size_t len) { return peri__nccl_load(reason, len) ? PERI_OK : PERI_EUNSUPPORTED; }

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
    for (int32_t c = 0; c < PERI_CHANNEL_COUNT; c++)
        if (g->channels[c].stream) w->vtab->stream_delete(w->device, g->channels[c].stream);
    if (g->base.stream) w->vtab->stream_delete(w->device, g->base.stream);
    free_early(g->early);
    peri__nccl_host->free(g->ranks);
    for (int32_t i = 0; g->history && i < HISTORY; i++) peri__nccl_host->free((void *)g->history[i].send_counts);
    peri__nccl_host->free(g->history);
    peri__nccl_host->free(g->members);
    peri__nccl_host->free(g);
    if (--w->handles > 0) return;
    free_early(w->unknown);
    peri__nccl_host->free(w);
}

static peri_status group_make(nccl_world *w, nccl_group *parent, const int32_t *ranks, int32_t n, uint64_t tag, void **out)
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
    for (int32_t c = 0; c < PERI_CHANNEL_COUNT; c++) g->channels[c].last = &g->channels[c].first;
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
        return FAIL(PERI_EUNSUPPORTED, "nccl: beside transport '%s', allowed: mpi (it carries the notes by which ranks watch each other)",
                    boot->host_vtab->name);
    nccl_world *w = peri__nccl_host->alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    *w = (nccl_world){.vtab = boot->device_vtab,
                      .device = boot->device,
                      .host = boot->host_vtab,
                      .host_group = boot->host_group,
                      .rank = boot->rank,
                      .size = boot->size};
    peri_status status = group_make(w, NULL, NULL, boot->size, 0, out);
    if (status < 0) peri__nccl_host->free(w);
    return status;
}

static peri_status nccl_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **sub)
{
    nccl_group *parent = group;
    const nccl_group *bad = peri__nccl_broken(parent);
    if (bad) return FAIL(bad->failed, "%s", bad->message);
    return group_make(parent->world, parent, ranks, n, tag, sub);
}

/* -- requests ----------------------------------------------------------------------------------------------------------------------- */

static peri_status end(nccl_request *r, peri_status status)
{
    if (r->state == REQUEST_ENDED) return r->status;
    r->state = REQUEST_ENDED;
    r->status = status;
    if (status < 0) {
        const char *message = peri__nccl_host->error_message();
        r->message = peri__nccl_host->alloc(strlen(message) + 1);
        if (r->message) memcpy(r->message, message, strlen(message) + 1);
    }
    communicator *x = &r->group->channels[r->op.channel];
    for (nccl_request **p = &x->first; *p; p = &(*p)->next)
        if (*p == r) {
            *p = r->next;
            break;
        }
    x->last = &x->first;
    while (*x->last) x->last = &(*x->last)->next;
    return status;
}

/** A failure of NCCL is one of the group. */
static peri_status give_up(nccl_request *r, peri_status status)
{
    char text[PERI_MESSAGE_MAX];
    snprintf(text, sizeof text, "%.400s", peri__nccl_host->error_message());
    peri__nccl_lost(r->group, status, text);
    return end(r, FAIL(status, "%s", text));
}

/** Move the channel's operations on, in their order. */
static void advance(nccl_group *g, int32_t channel)
{
    const nccl_world *w = g->world;
    communicator *x = &g->channels[channel];
    for (nccl_request *r = x->first, *next; r; r = next) {
        next = r->next;
        if (r->state < REQUEST_RUNS) {
            if (x->state != COMM_READY) return;
            peri_status status = peri__nccl_start(r);
            if (status < 0) (void)give_up(r, status);
            if (status != PERI_OK) return;
        }
        peri_status status = w->vtab->event_query(w->device, r->done);
        if (status == PERI_PENDING) { /* for ever, after an error that NCCL learns of while the operation runs */
            peri_status well = peri__nccl_well(x);
            if (well < 0) status = well;
        }
        if (status == PERI_OK) status = w->vtab->stream_wait(w->device, r->op.stream, r->done);
        if (status == PERI_OK) (void)end(r, PERI_OK);
        else if (status < 0) {
            (void)give_up(r, status);
            return; /* the communicators are gone */
        }
    }
}

/** All of the world. */
static void progress(nccl_world *w)
{
    peri__nccl_hear(w);
    for (nccl_group *g = w->groups; g; g = g->next) {
        if (peri__nccl_broken(g) || g->left) continue;
        peri_status status = peri__nccl_communicators(g);
        if (status < 0) {
            char text[PERI_MESSAGE_MAX];
            snprintf(text, sizeof text, "%.400s", peri__nccl_host->error_message());
            peri__nccl_lost(g, status, text);
        }
        for (int32_t c = 0; c < PERI_CHANNEL_COUNT; c++)
            if (g->channels[c].first) advance(g, c);
    }
}

static peri_status nccl_post(void *group, const peri_coll_op *op, void **request)
{
    nccl_group *g = group;
    const nccl_world *w = g->world;
    const nccl_group *bad = peri__nccl_broken(g);
    if (bad) return FAIL(bad->failed, "%s", bad->message);
    nccl_request *r = peri__nccl_host->alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    r->group = g;
    r->op = *op;
    peri_status status = w->vtab->event_new(w->device, &r->ready);
    if (status >= 0) status = w->vtab->event_new(w->device, &r->done);
    if (status >= 0) status = w->vtab->event_record(w->device, r->ready, op->stream);
    if (status < 0) {
        if (r->ready) w->vtab->event_delete(w->device, r->ready);
        if (r->done) w->vtab->event_delete(w->device, r->done);
        peri__nccl_host->free(r);
        return status;
    }
    r->began_ns = peri__nccl_host->time_ns();
    *g->channels[op->channel].last = r;
    g->channels[op->channel].last = &r->next;
    peri__nccl_posted(g, &r->op);
    progress(g->world);
    *request = r;
    return PERI_OK;
}

static peri_status nccl_test(void *request)
{
    nccl_request *r = request;
    nccl_group *g = r->group;
    if (r->state != REQUEST_ENDED) progress(g->world);
    const nccl_group *bad = peri__nccl_broken(g);
    if (r->state != REQUEST_ENDED && bad) (void)end(r, FAIL(bad->failed, "%s", bad->message));
    int64_t now = r->state == REQUEST_ENDED ? 0 : peri__nccl_host->time_ns();
    if (now && now - r->began_ns > STALL_NS && now - r->asked_ns > ASK_NS) {
        r->asked_ns = now;
        peri__nccl_ask(r);
        if (g->failed != PERI_OK) (void)end(r, FAIL(g->failed, "%s", g->message));
    }
    if (r->state != REQUEST_ENDED) return PERI_PENDING;
    return r->status >= 0 ? PERI_OK : FAIL(r->status, "%s", r->message ? r->message : "");
}

static peri_status nccl_drop(void *request)
{
    nccl_request *r = request;
    nccl_group *g = r->group;
    const nccl_world *w = g->world;
    bool started = r->scratch || r->phase != 0 || r->state == REQUEST_RUNS;
    if (r->state != REQUEST_ENDED) (void)end(r, FAIL(PERI_EABORTED, "given up"));
    if (r->status < 0 && started) {
        /* NCCL may still use the buffers until its streams have seen the end. */
        void *stream = g->channels[r->op.channel].stream;
        if (stream && w->vtab->event_record(w->device, r->done, stream) >= 0 && w->vtab->event_query(w->device, r->done) == PERI_PENDING)
            return PERI_PENDING;
    }
    if (r->scratch) w->vtab->free(w->device, g->channels[r->op.channel].stream, r->scratch, r->scratch_bytes);
    w->vtab->event_delete(w->device, r->ready);
    w->vtab->event_delete(w->device, r->done);
    peri__nccl_host->free(r->message);
    peri__nccl_host->free(r);
    return PERI_OK;
}

static void nccl_abort(void *group, const char *message)
{
    peri__nccl_group_fail(group, PERI_EABORTED, message, true);
}

/** Communicators are destroyed by all members at about the same time; what still runs has ended, or the group has failed. */
static peri_status nccl_close(void *group)
{
    nccl_group *g = group;
    if (g->left || g->failed != PERI_OK) return PERI_OK;
    g->left = true;
    for (int32_t c = 0; c < PERI_CHANNEL_COUNT; c++)
        if (g->channels[c].comm) {
            if (g->channels[c].first) peri__nccl.CommAbort(g->channels[c].comm);
            else peri__nccl.CommDestroy(g->channels[c].comm);
            g->channels[c].comm = NULL;
        }
    if (g->base.comm) peri__nccl.CommDestroy(g->base.comm);
    g->base.comm = NULL;
    return PERI_OK;
}

static void nccl_release(void *group)
{
    nccl_group *g = group;
    (void)nccl_close(g);
    group_free(g);
}

static const peri_coll_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_COLL_ABI,
    .name = "nccl",
    .kernels = peri_kernels_hash,
    .takes = PERI_COLL_DEVICE,
    .probe = nccl_probe,
    .open = nccl_open,
    .subgroup = nccl_subgroup,
    .post = nccl_post,
    .test = nccl_test,
    .blame = peri__nccl_blame,
    .drop = nccl_drop,
    .abort = nccl_abort,
    .close = nccl_close,
    .release = nccl_release,
};

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent);
const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent)
{
    peri__nccl_host = lent;
    return &vtab;
}
