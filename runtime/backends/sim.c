/* SPDX-License-Identifier: Apache-2.0
 *
 * sim.c: the transport of a world of N ranks in one process, for tests: usually N coroutines of one thread. A post
 * deposits; the operation runs when its last member has posted. What other transports can only time out on is reported
 * here at once: operations that differ between ranks, counts that do not fit together, members that have left.
 *
 * Everything is shared by the ranks and guarded by one lock.
 */
#include "../../kernels/convert.h"
#include "../../kernels/work.h"
#include "../plugin/fault.h"
#include "../plugin/coll.h"
#include "../plugin/device.h"

#include <pthread.h>
#include <string.h>

static const peri_plugin_host *host;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct sim_group sim_group;

typedef struct sim_world {
    struct sim_world *next;
    char job[64];
    int32_t size;
    sim_group *groups; /* all groups, the world's first one last */
    const peri_device_vtab *device_vtab; /* of a world for the memory of a device; NULL: host memory */
    void *device, *stream; /* where its operations are queued */
} sim_world;

/** An operation that at least one member has posted. */
typedef struct sim_op {
    struct sim_op *next;
    sim_group *group;
    uint64_t sequence;
    int32_t channel;
    int32_t posted, held;     /* members that posted; requests that point here */
    peri_status status;       /* PERI_PENDING, PERI_OK, or the failure */
    char message[PERI_MESSAGE_MAX];
    bool *has;                /* size: who posted */
    void *done;               /* device: reached when it has run; NULL until it is queued */
    peri_coll_op posts[];     /* size */
} sim_op;

struct sim_group {
    sim_group *next, *parent;
    sim_world *world;
    uint64_t tag;
    int32_t size, handles;    /* members; handles that are not released */
    int32_t *ranks;           /* size: ranks in the world */
    bool *joined, *left;      /* size */
    uint64_t *last;           /* size: highest number posted */
    uint64_t *last_on;        /* size x PERI_CHANNEL_COUNT: the same by channel */
    const peri_coll_numbers **numbers; /* size: what each member's numbers are taken for; NULL: not a member, or not any
                                          more */
    bool lossy;               /* a fault point has dropped an operation: others cannot tell whether a rank left one
                                 out */
    sim_op *ops;              /* with requests */
    peri_status failed;
    char message[PERI_MESSAGE_MAX];
    int32_t first_left;       /* of a world: the member that left first, plus 1; 0: all are here. What it said of its
                                 models: */
    uint64_t averaged, trained;
};

/** What one rank holds of a group. */
typedef struct sim_member {
    sim_group *group;
    int32_t rank;
} sim_member;

typedef struct sim_request {
    sim_op *op; /* NULL: dropped by a fault point */
    sim_group *group;
    peri_coll_op own;
    int32_t rank;
    bool stalled, joined;     /* joined: the poster's stream waits for op->done */
} sim_request;

static sim_world *worlds;

/* -- groups -------------------------------------------------------------------------------------------------------- */

static void group_free(sim_group *g)
{
    for (sim_group **p = &g->world->groups; *p; p = &(*p)->next)
        if (*p == g) {
            *p = g->next;
            break;
        }
    host->free(g->ranks);
    host->free(g->joined);
    host->free(g->last);
    host->free(g->last_on);
    host->free(g->numbers);
    host->free(g);
}

/** Free a world that nobody is in any more. */
static void world_trim(sim_world *w)
{
    if (w->groups) return;
    for (sim_world **p = &worlds; *p; p = &(*p)->next)
        if (*p == w) {
            *p = w->next;
            break;
        }
    if (w->stream) w->device_vtab->stream_delete(w->device, w->stream);
    host->free(w);
}

static sim_group *group_make(sim_world *w, sim_group *parent, const int32_t *ranks, int32_t n, uint64_t tag)
{
    sim_group *g = host->alloc_zero(sizeof *g);
    if (!g) return NULL;
    g->world = w;
    g->next = w->groups;
    w->groups = g;
    g->ranks = host->alloc_zero(sizeof *g->ranks * (size_t)n);
    g->joined = host->alloc_zero(2 * sizeof *g->joined * (size_t)n);
    g->last = host->alloc_zero(sizeof *g->last * (size_t)n);
    g->last_on = host->alloc_zero(sizeof *g->last_on * PERI_CHANNEL_COUNT * (size_t)n);
    g->numbers = host->alloc_zero(sizeof *g->numbers * (size_t)n);
    if (!g->ranks || !g->joined || !g->last || !g->last_on || !g->numbers) {
        group_free(g);
        return NULL;
    }
    g->left = g->joined + n;
    g->parent = parent;
    g->size = n;
    g->tag = tag;
    for (int32_t i = 0; i < n; i++) g->ranks[i] = parent ? parent->ranks[ranks[i]] : i;
    return g;
}

static peri_status join_group(sim_group *g, int32_t rank, void **out)
{
    sim_member *m = host->alloc_zero(sizeof *m);
    if (!m) {
        if (!g->handles) group_free(g);
        return PERI_ENOMEM;
    }
    *m = (sim_member){g, rank};
    g->joined[rank] = true;
    g->handles++;
    *out = m;
    return PERI_OK;
}

/** The failure of the group or of one that it was made from; NULL while all are sound. */
static const sim_group *broken(const sim_group *g)
{
    while (g && g->failed == PERI_OK) g = g->parent;
    return g;
}

static peri_status sim_probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status open_locked(peri_coll_open *boot, void **out)
{
    sim_world *w = worlds;
    while (w && (strcmp(w->job, boot->job) != 0 || w->device != boot->device || w->device_vtab != boot->device_vtab))
        w = w->next;
    if (w && w->size != boot->size)
        return PERI_HOST_FAIL(host, PERI_EMISMATCH, "sim: world '%s' has %d ranks, rank %d says %d", w->job, w->size,
                              boot->rank, boot->size);
    sim_group *root = NULL;
    if (w) {
        for (root = w->groups; root->parent;) root = root->next;
        if (root->joined[boot->rank])
            return PERI_HOST_FAIL(host, PERI_EINVAL, "sim: rank %d of world '%s' is taken", boot->rank, w->job);
    } else {
        w = host->alloc_zero(sizeof *w);
        if (!w) return PERI_ENOMEM;
        memcpy(w->job, boot->job, strlen(boot->job));
        w->size = boot->size;
        w->next = worlds;
        worlds = w;
        w->device_vtab = boot->device_vtab;
        w->device = boot->device;
        if (!w->device_vtab || w->device_vtab->stream_new(w->device, &w->stream) >= 0)
            root = group_make(w, NULL, NULL, boot->size, 0);
    }
    peri_status status = root ? join_group(root, boot->rank, out) : PERI_ENOMEM;
    world_trim(w);
    return status;
}

static peri_status sim_open(peri_coll_open *boot, void **out)
{
    if (!boot->job || !*boot->job || strlen(boot->job) >= sizeof worlds->job)
        return PERI_HOST_FAIL(host, PERI_EINVAL, "sim: a world needs a job name of 1..63 bytes (sim.run gives one)");
    if (boot->size < 1 || boot->size > 4096 || boot->rank < 0 || boot->rank >= boot->size)
        return PERI_HOST_FAIL(host, PERI_EINVAL, "sim: rank %d of %d, allowed: 0 <= rank < size <= 4096", boot->rank,
                              boot->size);
    pthread_mutex_lock(&lock);
    peri_status status = open_locked(boot, out);
    pthread_mutex_unlock(&lock);
    return status;
}

static peri_status subgroup_locked(sim_member *m, const int32_t *ranks, int32_t n, uint64_t tag, void **out)
{
    sim_group *parent = m->group, *g = parent->world->groups;
    const sim_group *bad = broken(parent);
    if (bad) return PERI_HOST_FAIL(host, PERI_EPEER, "%s", bad->message);
    while (g && g->tag != tag) g = g->next;
    if (!g) g = group_make(parent->world, parent, ranks, n, tag);
    if (!g) return PERI_ENOMEM;
    int32_t self = 0;
    while (ranks[self] != m->rank) self++;
    for (int32_t i = 0; i < n; i++)
        if (parent->left[ranks[i]]) g->left[i] = true;
    return join_group(g, self, out);
}

static peri_status sim_subgroup(void *group, const int32_t *ranks, int32_t n, uint64_t tag, void **out)
{
    pthread_mutex_lock(&lock);
    peri_status status = subgroup_locked(group, ranks, n, tag, out);
    pthread_mutex_unlock(&lock);
    return status;
}

/* -- running an operation ------------------------------------------------------------------------------------------ */

static void op_fail(sim_op *op, peri_status status, const char *message)
{
    if (op->status != PERI_PENDING) return;
    op->status = status;
    snprintf(op->message, sizeof op->message, "%s", message);
}

static void group_fail(sim_group *g, peri_status status, const char *message)
{
    if (g->failed != PERI_OK) return;
    g->failed = status;
    snprintf(g->message, sizeof g->message, "%s", message);
}

/** Counts of rank @a's part for rank @b, as each of them sees it, must be the same. */
static bool counts_agree(sim_op *op, int32_t a, int32_t b)
{
    const peri_coll_op *x = &op->posts[a], *y = &op->posts[b];
    char one[160], two[160], text[PERI_MESSAGE_MAX];
    if (x->kind != PERI_COLL_ALL_TO_ALL || x->send_counts[b] == y->recv_counts[a]) return true;
    peri_coll_op_text(x, op->group->size, one, sizeof one);
    peri_coll_op_text(y, op->group->size, two, sizeof two);
    snprintf(text, sizeof text,
             "rank %d sends %lld elements to rank %d, which expects %lld: rank %d posted %s, rank %d %s", a,
             (long long)x->send_counts[b], b, (long long)y->recv_counts[a], a, one, b, two);
    group_fail(op->group, PERI_EMISMATCH, text);
    op_fail(op, PERI_EMISMATCH, text);
    return false;
}

static int64_t sum_counts(const int64_t *counts, int32_t n)
{
    int64_t s = 0;
    for (int32_t i = 0; i < n; i++) s += counts[i];
    return s;
}

static peri_status copy_elements(const sim_op *op, void *dst, int64_t at, const void *src, int64_t from, int64_t count,
                        int64_t element)
{
    const sim_world *w = op->group->world;
    char *to = (char *)dst + at * element;
    const char *begin = (const char *)src + from * element;
    if (count <= 0) return PERI_OK;
    if (w->device_vtab) return w->device_vtab->copy(w->device, w->stream, to, begin, count * element, PERI_COPY_D2D);
    memmove(to, begin, (size_t)(count * element));
    return PERI_OK;
}

/** Sums on a device have another order than the ranks', as those of vendors' libraries: nobody must count on theirs. */
static peri_status reduce_on_device(const sim_world *w, const void **src, peri_k_reduce_args *args, int64_t count)
{
    const peri_device_vtab *d = w->device_vtab;
    int64_t bytes = (int64_t)sizeof *src * args->n;
    void *list;
    for (int32_t i = 0, k = args->n - 1; i < k; i++, k--) {
        const void *other = src[i];
        src[i] = src[k];
        src[k] = other;
    }
    peri_status status = d->alloc(w->device, w->stream, bytes, &list);
    if (status < 0) return status;
    args->src = list;
    status = d->copy(w->device, w->stream, list, src, bytes, PERI_COPY_H2D_WORDS);
    if (status >= 0) status = d->launch(w->device, w->stream, PERI_K_reduce, args, sizeof *args, count, 1 << 14);
    d->free(w->device, w->stream, list, bytes);
    return status;
}

/** dst = reduction over the ranks of send[at, at + count). */
static peri_status reduce(sim_op *op, void *dst, int64_t at, int64_t count)
{
    int32_t n = op->group->size;
    int64_t element = peri_coll_dtype_size(op->posts[0].dtype);
    const void **src = host->alloc(sizeof *src * (size_t)n);
    if (!src) return PERI_ENOMEM;
    for (int32_t i = 0; i < n; i++) src[i] = (const char *)op->posts[i].send + at * element;
    peri_k_reduce_args args = {
        .dst = dst, .src = src, .n = n, .dtype = op->posts[0].dtype, .reduce = op->posts[0].reduce};
    peri_status status = PERI_OK;
    if (count > 0 && op->group->world->device_vtab) status = reduce_on_device(op->group->world, src, &args, count);
    else if (count > 0) peri_kernels_get()->fn[PERI_K_reduce](&args, 0, count);
    host->free(src);
    return status;
}

static peri_status all_reduce(sim_op *op)
{
    int64_t count = op->posts[0].count, element = peri_coll_dtype_size(op->posts[0].dtype);
    const sim_world *w = op->group->world;
    void *result = NULL; /* apart: outputs may be the inputs of later ranks */
    peri_status status = PERI_OK;
    if (w->device_vtab) status = w->device_vtab->alloc(w->device, w->stream, count * element, &result);
    else if (!(result = host->alloc((size_t)(count * element + 1)))) status = PERI_ENOMEM;
    if (status < 0) return status;
    status = reduce(op, result, 0, count);
    for (int32_t i = 0; status >= 0 && i < op->group->size; i++)
        status = copy_elements(op, op->posts[i].recv, 0, result, 0, count, element);
    if (w->device_vtab) w->device_vtab->free(w->device, w->stream, result, count * element);
    else host->free(result);
    return status;
}

static peri_status mark_done(sim_op *op)
{
    const sim_world *w = op->group->world;
    peri_status status = w->device_vtab->event_new(w->device, &op->done);
    return status < 0 ? status : w->device_vtab->event_record(w->device, op->done, w->stream);
}

/** What the poster has queued comes before the operation. */
static peri_status wait_for_poster(const sim_world *w, const peri_coll_op *posted)
{
    void *ready;
    peri_status status = w->device_vtab->event_new(w->device, &ready);
    if (status < 0) return status;
    status = w->device_vtab->event_record(w->device, ready, posted->stream);
    if (status >= 0) status = w->device_vtab->stream_wait(w->device, w->stream, ready);
    w->device_vtab->event_delete(w->device, ready);
    return status;
}

static void run_operation(sim_op *op)
{
    int32_t n = op->group->size;
    int64_t element = peri_coll_dtype_size(op->posts[0].dtype);
    peri_status status = PERI_OK;
    for (int32_t a = 0; a < n; a++)
        for (int32_t b = 0; b < n; b++)
            if (!counts_agree(op, a, b)) return;
    const peri_coll_op *first = &op->posts[0];
    if (first->kind == PERI_COLL_ALL_REDUCE) status = all_reduce(op);
    for (int32_t i = 0; status >= 0 && i < n; i++) {
        const peri_coll_op *p = &op->posts[i];
        switch (p->kind) {
        case PERI_COLL_BROADCAST:
            if (i != p->root) status = copy_elements(op, p->recv, 0, op->posts[p->root].recv, 0, p->count, element);
            break;
        case PERI_COLL_ALL_GATHER:
            for (int32_t k = 0; k < n && status >= 0; k++)
                status = copy_elements(op, p->recv, sum_counts(p->recv_counts, k), op->posts[k].send, 0,
                                       p->recv_counts[k], element);
            break;
        case PERI_COLL_REDUCE_SCATTER:
            status = reduce(op, p->recv, sum_counts(p->send_counts, i), p->send_counts[i]);
            break;
        case PERI_COLL_ALL_TO_ALL:
            for (int32_t k = 0; k < n && status >= 0; k++)
                status = copy_elements(op, p->recv, sum_counts(p->recv_counts, k), op->posts[k].send,
                                       sum_counts(op->posts[k].send_counts, i), p->recv_counts[k], element);
            break;
        default: break;
        }
    }
    if (status >= 0 && op->group->world->device_vtab) status = mark_done(op);
    if (status < 0) op_fail(op, status, host->error_message());
    else op->status = PERI_OK;
}

/* -- posting and testing ------------------------------------------------------------------------------------------- */

/** Fail an operation that waits for a member who has left; one who gave up first has said why, and sim_test says it. */
static void check_left(sim_op *op)
{
    sim_group *g = op->group;
    char text[PERI_MESSAGE_MAX];
    if (broken(g)) return;
    for (int32_t i = 0; i < g->size && op->status == PERI_PENDING; i++) {
        if (!g->left[i] || op->has[i]) continue;
        snprintf(text, sizeof text, "rank %d has left after its operation %llu and will never post operation %llu", i,
                 (unsigned long long)g->last[i], (unsigned long long)op->sequence);
        op_fail(op, PERI_EPEER, text);
    }
}

static void op_release(sim_op *op)
{
    if (--op->held > 0) return;
    for (sim_op **p = &op->group->ops; *p; p = &(*p)->next)
        if (*p == op) {
            *p = op->next;
            break;
        }
    if (op->done) op->group->world->device_vtab->event_delete(op->group->world->device, op->done);
    host->free(op->has);
    host->free(op);
}

static sim_op *find_or_add_operation(sim_group *g, const peri_coll_op *posted)
{
    sim_op *op = g->ops;
    while (op && op->sequence != posted->sequence) op = op->next;
    if (op) return op;
    op = host->alloc_zero(sizeof *op + sizeof *op->posts * (size_t)g->size);
    if (!op) return NULL;
    op->has = host->alloc_zero(sizeof *op->has * (size_t)g->size);
    if (!op->has) {
        host->free(op);
        return NULL;
    }
    op->group = g;
    op->sequence = posted->sequence;
    op->channel = posted->channel;
    op->status = PERI_PENDING;
    op->next = g->ops;
    g->ops = op;
    return op;
}

static void deposit_post(sim_op *op, int32_t rank, const peri_coll_op *posted)
{
    sim_group *g = op->group;
    char one[160], two[160], text[PERI_MESSAGE_MAX];
    int32_t other = 0;
    while (other < g->size && !op->has[other]) other++;
    op->posts[rank] = *posted;
    op->has[rank] = true;
    op->posted++;
    if (other < g->size && op->posts[other].signature != posted->signature) {
        peri_coll_op_text(&op->posts[other], g->size, one, sizeof one);
        peri_coll_op_text(posted, g->size, two, sizeof two);
        snprintf(text, sizeof text, "the ranks disagree: rank %d posted %s, rank %d posted %s", other, one, rank, two);
        group_fail(g, PERI_EMISMATCH, text);
        op_fail(op, PERI_EMISMATCH, text);
    }
    check_left(op);
    if (op->status == PERI_PENDING && op->posted == g->size) run_operation(op);
}

/** Rank @rank goes past @op, which another rank has posted on that channel. */
static void left_out(sim_op *op, int32_t rank, uint64_t next)
{
    sim_group *g = op->group;
    int32_t other = 0;
    while (!op->has[other]) other++;
    char what[160], text[PERI_MESSAGE_MAX];
    peri_coll_op_text(&op->posts[other], g->size, what, sizeof what);
    snprintf(text, sizeof text,
             "the ranks disagree about the order on a channel: rank %d posted %s, rank %d left it out and posted "
             "operation %llu",
             other, what, rank, (unsigned long long)next);
    group_fail(g, PERI_EMISMATCH, text);
    op_fail(op, PERI_EMISMATCH, text);
}

/** The law of channels: every rank posts the same numbers of a channel, in ascending order. */
static void keep_order(sim_group *g, int32_t rank, const peri_coll_op *posted)
{
    uint64_t *last = &g->last_on[rank * PERI_CHANNEL_COUNT + posted->channel];
    char what[160], text[PERI_MESSAGE_MAX];
    if (posted->sequence < *last) {
        peri_coll_op_text(posted, g->size, what, sizeof what);
        snprintf(text, sizeof text, "sim: rank %d posted %s after operation %llu of that channel", rank, what,
                 (unsigned long long)*last);
        group_fail(g, PERI_EINTERNAL, text);
        return;
    }
    *last = posted->sequence;
    for (sim_op *op = g->ops; op && !g->lossy; op = op->next) {
        if (op->status != PERI_PENDING || op->channel != posted->channel) continue;
        for (int32_t i = 0; i < g->size && op->status == PERI_PENDING; i++) {
            uint64_t next = g->last_on[i * PERI_CHANNEL_COUNT + op->channel];
            if (!op->has[i] && next > op->sequence) left_out(op, i, next);
        }
    }
}

static peri_status post_locked(sim_member *m, const peri_coll_op *posted, sim_request *r)
{
    sim_group *g = m->group;
    *r = (sim_request){.group = g, .rank = m->rank, .own = *posted};
    const sim_group *bad = broken(g);
    if (bad) return PERI_HOST_FAIL(host, bad->failed, "%s", bad->message);
    if (host->fault(PERI_FAULT_coll_drop)) {
        g->lossy = true;
        return PERI_OK;
    }
    r->stalled = host->fault(PERI_FAULT_coll_stall);
    sim_op *op = find_or_add_operation(g, posted);
    if (!op) return PERI_ENOMEM;
    if (op->has[m->rank])
        return PERI_HOST_FAIL(host, PERI_EINTERNAL, "sim: rank %d posts operation %llu twice", m->rank,
                              (unsigned long long)posted->sequence);
    op->held++;
    r->op = op;
    if (posted->stream) {
        peri_status status = wait_for_poster(g->world, posted);
        if (status < 0) {
            op_release(op);
            return status;
        }
    }
    if (posted->sequence > g->last[m->rank]) g->last[m->rank] = posted->sequence;
    deposit_post(op, m->rank, posted);
    keep_order(g, m->rank, posted);
    return PERI_OK;
}

static peri_status sim_post(void *group, const peri_coll_op *op, void **request)
{
    sim_request *r = host->alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    pthread_mutex_lock(&lock);
    peri_status status = post_locked(group, op, r);
    pthread_mutex_unlock(&lock);
    if (status < 0) host->free(r);
    else *request = r;
    return status;
}

static peri_status sim_test(void *request)
{
    sim_request *r = request;
    pthread_mutex_lock(&lock);
    peri_status status = r->op && !r->stalled ? r->op->status : PERI_PENDING;
    const sim_group *bad = broken(r->group);
    const sim_world *w = r->group->world;
    if (status == PERI_OK && r->op && r->op->done && !r->joined)
        status = w->device_vtab->stream_wait(w->device, r->own.stream, r->op->done);
    r->joined = status == PERI_OK;
    if (status < 0 && r->op && r->op->status < 0) PERI_HOST_FAIL(host, status, "%s", r->op->message);
    else if (status == PERI_PENDING && bad) status = PERI_HOST_FAIL(host, bad->failed, "%s", bad->message);
    pthread_mutex_unlock(&lock);
    return status;
}

static void sim_blame(void *request, char *text, size_t len)
{
    sim_request *r = request;
    pthread_mutex_lock(&lock);
    sim_group *g = r->group;
    size_t used = 0;
    int32_t missing = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (r->op && r->op->has[i]) continue;
        if (missing++ < 4 && used < len)
            used += (size_t)snprintf(text + used, len - used, "%srank %d (its last operation: %llu)",
                                     missing > 1 ? ", " : "", i, (unsigned long long)g->last[i]);
    }
    if (missing > 4 && used < len) snprintf(text + used, len - used, " and %d more", missing - 4);
    if (!missing) snprintf(text, len, "its own completion");
    pthread_mutex_unlock(&lock);
}

/** Does somebody wait for an operation that a member took the number of otherwise? */
static void check_numbers(sim_group *g)
{
    char what[160], other[160], text[PERI_MESSAGE_MAX];
    for (sim_op *op = g->ops; op; op = op->next) {
        int32_t poster = 0;
        while (poster < g->size && !op->has[poster]) poster++;
        for (int32_t i = 0; poster < g->size && op->status == PERI_PENDING && i < g->size; i++) {
            if (op->has[i] ||
                !peri_coll_numbers_differ(g->numbers[i], i, op->sequence, op->channel, other, sizeof other))
                continue;
            peri_coll_op_text(&op->posts[poster], g->size, what, sizeof what);
            snprintf(text, sizeof text, "the ranks disagree: rank %d posted %s, %s", poster, what, other);
            group_fail(g, PERI_EMISMATCH, text);
            op_fail(op, PERI_EMISMATCH, text);
        }
    }
}

/** Asked when a deadline passes: in sim, when no rank can go on. */
static peri_status sim_check(void *group)
{
    sim_member *m = group;
    pthread_mutex_lock(&lock);
    if (!broken(m->group) && !m->group->lossy) check_numbers(m->group);
    const sim_group *bad = broken(m->group);
    peri_status status = bad ? PERI_HOST_FAIL(host, bad->failed, "%s", bad->message) : PERI_OK;
    pthread_mutex_unlock(&lock);
    return status;
}

static void sim_numbers(void *group, const peri_coll_numbers *numbers)
{
    sim_member *m = group;
    pthread_mutex_lock(&lock);
    m->group->numbers[m->rank] = numbers;
    pthread_mutex_unlock(&lock);
}

static peri_status sim_drop(void *request)
{
    sim_request *r = request;
    pthread_mutex_lock(&lock);
    /* The buffers of an operation that has not run must not be used any more: it will never run. */
    const sim_group *bad = broken(r->group);
    if (r->op) op_fail(r->op, bad ? bad->failed : PERI_EPEER, bad ? bad->message : "a member gave up waiting");
    if (r->op) op_release(r->op);
    pthread_mutex_unlock(&lock);
    host->free(r);
    return PERI_OK;
}

static void sim_abort(void *group, const char *message)
{
    sim_member *m = group;
    char text[PERI_MESSAGE_MAX];
    snprintf(text, sizeof text, "rank %d gave up: %s", m->rank, message);
    pthread_mutex_lock(&lock);
    group_fail(m->group, PERI_EPEER, text);
    pthread_mutex_unlock(&lock);
}

/** A member leaves the world: does it end with another model than the one that left first? */
static void compare_models(const sim_member *m)
{
    sim_group *g = m->group;
    const peri_coll_numbers *numbers = g->numbers[m->rank];
    if (g->parent || !numbers || g->failed != PERI_OK) return;
    if (g->first_left == 0) {
        g->first_left = m->rank + 1;
        g->averaged = numbers->averaged;
        g->trained = numbers->trained;
    }
    if (numbers->averaged == 0 || numbers->averaged != g->averaged || numbers->trained == g->trained) return;
    char text[PERI_MESSAGE_MAX];
    peri_coll_models_differ(g->first_left - 1, text, sizeof text);
    host->log(PERI_LOG_WARN, "rank %d: %s", m->rank, text);
}

static peri_status sim_close(void *group)
{
    sim_member *m = group;
    pthread_mutex_lock(&lock);
    compare_models(m);
    int32_t rank = m->group->ranks[m->rank];
    for (sim_group *g = m->group->world->groups; g; g = g->next) {
        const sim_group *up = g;
        while (up && up != m->group) up = up->parent;
        for (int32_t i = 0; up && i < g->size; i++)
            if (g->ranks[i] == rank) g->left[i] = true;
        for (sim_op *op = up ? g->ops : NULL; op; op = op->next) check_left(op);
    }
    pthread_mutex_unlock(&lock);
    return PERI_OK;
}

static void sim_release(void *group)
{
    sim_member *m = group;
    pthread_mutex_lock(&lock);
    m->group->numbers[m->rank] = NULL;
    if (--m->group->handles == 0) {
        sim_world *w = m->group->world;
        group_free(m->group);
        world_trim(w);
    }
    pthread_mutex_unlock(&lock);
    host->free(m);
}

static const peri_coll_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_COLL_ABI,
    .name = "sim",
    .takes = PERI_COLL_HOST | PERI_COLL_DEVICE | PERI_COLL_RANK_ORDER,
    .probe = sim_probe,
    .open = sim_open,
    .subgroup = sim_subgroup,
    .post = sim_post,
    .test = sim_test,
    .blame = sim_blame,
    .drop = sim_drop,
    .abort = sim_abort,
    .close = sim_close,
    .release = sim_release,
    .check = sim_check,
    .numbers = sim_numbers,
};

const peri_coll_vtab *peri__sim_entry(const peri_plugin_host *lent);
const peri_coll_vtab *peri__sim_entry(const peri_plugin_host *lent)
{
    if (!host) host = lent; /* who has the table reads it */
    return &vtab;
}
