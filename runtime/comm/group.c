/* SPDX-License-Identifier: Apache-2.0
 *
 * group.c: groups from explicit rank lists, health, the recorder. Worlds are joined in world.c.
 */
#include "comm_internal.h"

#include <stdio.h>

/** How often this rank made a group of one (member list, name) from one parent: part of the group's tag, so that the
 *  k-th group of a list meets the k-th of the other members. */
struct peri__birth {
    struct peri__birth *next;
    uint64_t key;
    uint64_t count;
};

/* -- making -------------------------------------------------------------------------------------------------------- */

void peri__comm_release(peri__comm *comm)
{
    if (!comm || !peri__refs_drop(&comm->refs)) return;
    peri__between_drop(comm);
    for (int i = 0; i < PERI_COMM_DEVICES; i++) peri__stage_fini(&comm->stages[i]);
    peri__watch_fini(&comm->watch);
    peri__free(comm->lost_message);
    peri__free(comm->node);
    peri__free(comm);
}

peri_status peri__group_make(peri__comm *comm, peri_group *parent, const int32_t *ranks, int32_t n, const char *name,
                             peri_group **out)
{
    peri_group *g = peri__alloc_zero(sizeof *g);
    int32_t *copy = peri__alloc(sizeof *copy * (size_t)n);
    if (!g || !copy) {
        peri__free(g);
        peri__free(copy);
        return PERI_ENOMEM;
    }
    peri__refs_init(&g->refs);
    g->rank = -1;
    g->size = n;
    g->ranks = copy;
    for (int32_t i = 0; i < n; i++) {
        copy[i] = parent ? parent->ranks[ranks[i]] : i;
        if (copy[i] == comm->rank) g->rank = i;
    }
    for (int32_t i = 0; i < n; i++) {
        if (comm->node[copy[i]] != comm->node[comm->rank]) continue;
        if (i < g->rank) g->local_rank++;
        g->local_size++;
    }
    snprintf(g->name, sizeof g->name, "%s", name);
    g->timeout_ns = parent ? parent->timeout_ns : 0;
    g->comm = comm;
    peri__refs_add(&comm->refs);
    if (parent) peri_group_retain(parent);
    g->parent = parent;
    peri__object_count(1);
    *out = g;
    return PERI_OK;
}

/* -- groups -------------------------------------------------------------------------------------------------------- */

static peri_status check_ranks(peri_group *parent, const int32_t *ranks, int32_t n, const char *name)
{
    if (n < 1 || n > parent->size)
        return peri__fail(PERI_EINVAL, "peri_group_new: %d ranks for group '%.40s', allowed: 1..%d", n, name,
                          parent->size);
    for (int32_t i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= parent->size)
            return peri__fail(PERI_EINVAL, "peri_group_new: rank %d for group '%.40s', allowed: 0..%d", ranks[i], name,
                              parent->size - 1);
        for (int32_t k = 0; k < i; k++)
            if (ranks[k] == ranks[i])
                return peri__fail(PERI_EINVAL, "peri_group_new: rank %d twice for group '%.40s'", ranks[i], name);
    }
    return PERI_OK;
}

/** Tag of the next group of this list and name. */
static peri_status next_tag(peri_group *parent, const int32_t *ranks, int32_t n, const char *name, uint64_t *tag)
{
    uint64_t key = peri__hash_mix(peri__hash_text(name), (uint64_t)n);
    for (int32_t i = 0; i < n; i++) key = peri__hash_mix(key, (uint64_t)ranks[i]);
    struct peri__birth *b = parent->births;
    while (b && b->key != key) b = b->next;
    if (!b) {
        b = peri__alloc_zero(sizeof *b);
        if (!b) return PERI_ENOMEM;
        b->key = key;
        b->next = parent->births;
        parent->births = b;
    }
    *tag = peri__hash_mix(peri__hash_mix(parent->tag, key), ++b->count);
    return PERI_OK;
}

peri_status peri_group_new(peri_group *parent, const int32_t *ranks, int32_t n, const char *name, peri_group **out)
{
    PERI_NEED(ranks, out);
    if (!name || !*name) return peri__fail(PERI_EINVAL, "peri_group_new: a group needs a name");
    PERI_TRY(peri__group_check("peri_group_new", parent));
    PERI_TRY(check_ranks(parent, ranks, n, name));
    bool member = false;
    for (int32_t i = 0; i < n; i++) member = member || ranks[i] == parent->rank;
    if (!member) {
        *out = NULL;
        return PERI_OK;
    }
    peri_group *g;
    uint64_t tag;
    PERI_TRY(next_tag(parent, ranks, n, name, &tag));
    PERI_TRY(peri__group_make(parent->comm, parent, ranks, n, name, &g));
    g->tag = tag;
    peri_status status = parent->comm->vtab->subgroup(parent->ctx, ranks, n, tag, &g->ctx);
    if (status >= 0 && parent->device_ctx)
        status = parent->comm->device_vtab->subgroup(parent->device_ctx, ranks, n, tag, &g->device_ctx);
    if (status < 0) {
        peri_group_release(g);
        return status;
    }
    peri__group_show_numbers(g);
    *out = g;
    return PERI_OK;
}

peri_status peri_group_intra_node(peri_group *parent, peri_group **out)
{
    PERI_NEED(parent, out);
    const peri__comm *comm = parent->comm;
    char name[PERI_GROUP_NAME];
    const int32_t node = comm->node[comm->rank];
    int32_t n = 0;
    PERI__SCRATCH int32_t *ranks = peri__alloc(sizeof *ranks * (size_t)parent->size);
    if (!ranks) return PERI_ENOMEM;
    for (int32_t i = 0; i < parent->size; i++)
        if (comm->node[parent->ranks[i]] == node) ranks[n++] = i;
    snprintf(name, sizeof name, "%.24s/node %d", parent->name, node);
    return peri_group_new(parent, ranks, n, name, out);
}

peri_status peri__group_node(peri_group *group, peri_group **out)
{
    if (group->local_size == group->size) {
        *out = group;
        return PERI_OK;
    }
    if (!group->node) {
        PERI_TRY(peri_group_intra_node(group, &group->node));
        peri__refs_drop(&group->refs); /* that reference would keep both alive */
    }
    *out = group->node;
    return PERI_OK;
}

peri_status peri_group_cross_node(peri_group *parent, peri_group **out)
{
    PERI_NEED(parent, out);
    PERI_TRY(peri__group_check("peri_group_cross_node", parent));
    const peri__comm *comm = parent->comm;
    char name[PERI_GROUP_NAME];
    int32_t n = 0;
    PERI__SCRATCH int32_t *ranks = peri__alloc(sizeof *ranks * (size_t)parent->size);
    if (!ranks) return PERI_ENOMEM;
    for (int32_t i = 0; i < parent->size; i++) {
        int32_t node = comm->node[parent->ranks[i]], place = 0, count = 0;
        for (int32_t k = 0; k < parent->size; k++) {
            if (comm->node[parent->ranks[k]] != node) continue;
            place += k < i;
            count++;
        }
        if (count != parent->local_size)
            return peri__fail(PERI_EINVAL,
                              "peri_group_cross_node: node %d holds %d ranks of group '%s' and node %d holds %d, "
                              "allowed: equal numbers",
                              comm->node[comm->rank], parent->local_size, parent->name, node, count);
        if (place == parent->local_rank) ranks[n++] = i;
    }
    snprintf(name, sizeof name, "%.24s/cross %d", parent->name, parent->local_rank);
    return peri_group_new(parent, ranks, n, name, out);
}

void peri_group_retain(peri_group *group) { if (group) peri__refs_add(&group->refs); }

void peri_group_release(peri_group *group)
{
    while (group && peri__refs_drop(&group->refs)) {
        peri_group *parent = group->parent, *node = group->node;
        if (node) { /* what is in flight there may outlive this group and looks at it: `node` retains it from now on */
            group->node = NULL;
            peri__refs_init(&group->refs);
            group = node;
            continue;
        }
        if (group->comm->shown == &group->numbers) group->comm->shown = NULL;
        if (group->ctx) group->comm->vtab->release(group->ctx);
        if (group->device_ctx) group->comm->device_vtab->release(group->device_ctx);
        while (group->births) {
            struct peri__birth *b = group->births;
            group->births = b->next;
            peri__free(b);
        }
        peri__comm_release(group->comm);
        peri__free(group->ranks);
        peri__free(group->records);
        for (int32_t i = 0; i < PERI_CHANNEL_COUNT; i++) peri__free(group->channels[i].taken);
        peri__free(group->failure);
        peri__object_count(-1);
        peri__free(group);
        group = parent;
    }
}

/* -- asking -------------------------------------------------------------------------------------------------------- */

int32_t peri_group_rank(const peri_group *group) { return group ? group->rank : -1; }
int32_t peri_group_size(const peri_group *group) { return group ? group->size : 0; }
int32_t peri_group_local_rank(const peri_group *group) { return group ? group->local_rank : -1; }
int32_t peri_group_local_size(const peri_group *group) { return group ? group->local_size : 0; }
int32_t peri_group_global_rank(const peri_group *group, int32_t rank)
{
    return group && rank >= 0 && rank < group->size ? group->ranks[rank] : -1;
}
const char *peri_group_name(const peri_group *group) { return group ? group->name : NULL; }
const char *peri_group_transport(const peri_group *group) { return group ? group->comm->vtab->name : NULL; }
const char *peri_group_transport_of(const peri_group *group, const peri_device *device)
{
    if (!group) return NULL;
    return (peri__by_device(group, device) ? group->comm->device_vtab : group->comm->vtab)->name;
}
const char *peri_group_transports(const peri_group *group) { return group ? group->comm->transports : NULL; }
bool peri_group_rank_order(const peri_group *group, const peri_device *device)
{
    if (!group) return false;
    if (peri__by_device(group, device)) return group->comm->device_vtab->takes & PERI_COLL_DEVICE_RANK_ORDER;
    return group->comm->vtab->takes & PERI_COLL_RANK_ORDER;
}
double peri_group_timeout(const peri_group *group) { return group ? (double)group->timeout_ns * 1e-9 : 0; }

int32_t peri_group_node(const peri_group *group, int32_t rank)
{
    if (!group) return -1;
    int32_t global = peri_group_global_rank(group, rank);
    return global < 0 ? -1 : group->comm->node[global];
}

peri_status peri_group_fingerprints_set(peri_group *group, bool on)
{
    PERI_NEED(group);
    group->unsigned_ops = !on;
    return PERI_OK;
}


int32_t peri_group_channel(const peri_group *group) { return group ? group->channel : 0; }
const char *peri_channel_name(int32_t channel)
{
    return channel < 0 || channel >= PERI_CHANNEL_COUNT ? NULL : peri_coll_channel_name(channel);
}

peri_status peri_group_channel_set(peri_group *group, int32_t channel)
{
    PERI_NEED(group);
    if (channel < 0 || channel >= PERI_CHANNEL_COUNT)
        return peri__fail(PERI_EINVAL, "peri_group_channel_set: channel %d, allowed: 0..%d", channel,
                          PERI_CHANNEL_COUNT - 1);
    group->channel = channel;
    return PERI_OK;
}

peri_status peri_group_timeout_set(peri_group *group, double seconds)
{
    PERI_NEED(group);
    if (!(seconds > 0 && seconds <= 1e9))
        return peri__fail(PERI_EINVAL, "peri_group_timeout_set: %g s, allowed: above 0 to 1e9", seconds);
    group->timeout_ns = (int64_t)(seconds * 1e9);
    return PERI_OK;
}

/* -- health -------------------------------------------------------------------------------------------------------- */

void peri__comm_note_lost(peri_group *group, peri_status status)
{
    peri__comm *comm = group->comm;
    if (comm->lost != PERI_OK) return;
    comm->lost = status;
    comm->lost_tag = group->tag;
    comm->lost_message = peri__strdup(peri_error_message());
}

static void forget_lost(peri__comm *comm)
{
    comm->lost = PERI_OK;
    peri__free(comm->lost_message);
    comm->lost_message = NULL;
}

peri_status peri__comm_lost_status(peri__comm *comm)
{
    peri_status status = comm->lost;
    if (status == PERI_OK) return PERI_OK;
    peri__fail(status, "%s", comm->lost_message ? comm->lost_message : peri_status_text(status));
    forget_lost(comm);
    return status;
}

void peri__comm_told(const peri_group *group)
{
    peri__comm *comm = group->comm;
    const peri_group *g = group;
    while (g && g->failed == PERI_OK) g = g->parent;
    if (comm->lost == PERI_OK || comm->stepping || !g) return;
    const bool of_node = g->node && g->node->tag == comm->lost_tag; /* a group and its node's fail together */
    const bool by_node = g->parent && g->parent->node == g && g->parent->tag == comm->lost_tag;
    if (g->tag == comm->lost_tag || of_node || by_node) forget_lost(comm);
}

peri_status peri__group_check(const char *function, peri_group *group)
{
    if (peri__border_refuses(function)) return PERI_EINVAL;
    if (!group) return peri__fail(PERI_EINVAL, "%s: no group (is this rank a member?)", function);
    if (group->comm->size > 1 && group->comm->forks != peri__forks())
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: group '%s' is of the process that this one was forked from; only that one may use it",
                          function, group->name);
    for (const peri_group *g = group; g; g = g->parent) {
        if (g->failed != PERI_OK) {
            peri__comm_told(g);
            return peri__fail(PERI_EABORTED, "%s: group '%s' was given up: %s", function, g->name,
                              g->failure ? g->failure : "");
        }
        if (g->closed) return peri__fail(PERI_ECLOSED, "%s: group '%s' was closed", function, g->name);
    }
    return PERI_OK;
}

peri_status peri_group_healthy(peri_group *group)
{
    PERI__NOT_AT_BORDER;
    static const char F[] = "peri_group_healthy";
    PERI_TRY(peri__group_check(F, group));
    /* another rank may have given it up, where nothing of this one waits to hear of it */
    peri_status known = group->comm->vtab->check ? group->comm->vtab->check(group->ctx) : PERI_OK;
    if (known == PERI_OK) return PERI_OK;
    (void)peri__group_fail(group, known);
    return peri__group_check(F, group);
}

peri_status peri__group_fail(peri_group *group, peri_status status)
{
    if (group->failed == PERI_OK) {
        group->failed = status;
        group->failure = peri__strdup(peri_error_message());
        const char *why = group->failure ? group->failure : peri_status_text(status);
        if (!group->closed) group->comm->vtab->abort(group->ctx, why);
        if (!group->closed && group->device_ctx) group->comm->device_vtab->abort(group->device_ctx, why);
        if (group->node) peri__group_fail(group->node, status);
        else if (group->parent && group->parent->node == group) peri__group_fail(group->parent, status);
    }
    return status;
}

void peri_group_abort(peri_group *group, const char *message)
{
    if (!group || peri__border_refuses(__func__)) return;
    peri__group_fail(group, peri__fail(PERI_EABORTED, "%s", message && *message ? message : "aborted"));
}

peri_status peri__group_reserve(peri_group *group, int32_t channel, int32_t n, uint64_t *first)
{
    peri__channel *c = &group->channels[channel];
    if (c->n + n > c->room) {
        int32_t room = 2 * c->room + n + 8;
        uint64_t *taken = peri__realloc(c->taken, sizeof *taken * (size_t)room);
        if (!taken) return PERI_ENOMEM;
        c->taken = taken;
        c->room = room;
    }
    *first = group->sequence + 1;
    for (int32_t i = 0; i < n; i++) {
        c->taken[c->n++] = ++group->sequence;
        group->numbers.what[group->sequence % PERI_COLL_NUMBERS] = (uint8_t)channel;
    }
    group->numbers.last = group->sequence;
    return PERI_OK;
}

void peri__group_show_numbers(peri_group *group)
{
    if (!group->parent) group->comm->shown = &group->numbers;
    const peri_coll_vtab *host = group->comm->vtab, *device = group->device_ctx ? group->comm->device_vtab : NULL;
    if (host->numbers) host->numbers(group->ctx, &group->numbers);
    if (device && device->numbers) device->numbers(group->device_ctx, &group->numbers);
}

/** Take a number out of its channel's queue. */
static void drop_number(peri__channel *c, uint64_t sequence)
{
    int32_t at = 0;
    while (at < c->n && c->taken[at] != sequence) at++;
    if (at == c->n) return;
    c->n--;
    memmove(c->taken + at, c->taken + at + 1, sizeof *c->taken * (size_t)(c->n - at));
}

void peri__group_posted(peri_group *group, int32_t channel, uint64_t sequence)
{
    drop_number(&group->channels[channel], sequence);
}

void peri__group_skip(peri_group *group, int32_t channel, uint64_t sequence)
{
    drop_number(&group->channels[channel], sequence);
    if (group->sequence - sequence < PERI_COLL_NUMBERS)
        group->numbers.what[sequence % PERI_COLL_NUMBERS] |= PERI_COLL_SPARE;
    if (group->records)
        group->records[sequence % PERI_RECORD_MOST] =
            (peri__coll_record){.op = {.kind = PERI_COLL_KIND_COUNT, .sequence = sequence}};
}

/* -- the recorder -------------------------------------------------------------------------------------------------- */

uint64_t peri__record_first(const peri_group *group)
{
    return group->sequence > PERI_RECORD_MOST ? group->sequence - PERI_RECORD_MOST + 1 : 1;
}

bool peri__record_line(const peri_group *group, uint64_t sequence, int64_t now_ns, char *text, size_t len)
{
    const peri__coll_record *r = &group->records[sequence % PERI_RECORD_MOST];
    char what[160], sums[64] = "", end[64] = "pending";
    /* In whole microseconds and milliseconds: printf writes fractions with the point of the program's locale. */
    const int64_t took = (r->done_ns - r->posted_ns) / 1000, ago = (now_ns - r->posted_ns) / 1000000;
    bool here = r->op.sequence == sequence; /* else: reserved, not posted yet */
    if (!here || r->op.kind == PERI_COLL_KIND_COUNT) {
        const int32_t channel = group->numbers.what[sequence % PERI_COLL_NUMBERS] & (PERI_COLL_SPARE - 1);
        snprintf(text, len, "operation %llu: not %s, on channel %s", (unsigned long long)sequence,
                 here ? "needed" : "posted yet", peri_coll_channel_name(channel));
        return here;
    }
    peri_coll_op_text(&r->op, group->size, what, sizeof what);
    if (r->send_sum || r->recv_sum)
        snprintf(sums, sizeof sums, ", %lld out, %lld in", (long long)r->send_sum, (long long)r->recv_sum);
    if (r->done_ns)
        snprintf(end, sizeof end, "%s after %lld.%06lld s", r->status == PERI_OK ? "done" : peri_status_name(r->status),
                 (long long)(took / 1000000), (long long)(took % 1000000));
    snprintf(text, len, "%s%s, posted %lld.%03lld s ago, %s", what, sums, (long long)(ago / 1000),
             (long long)(ago % 1000), end);
    return r->done_ns != 0;
}

void peri_group_record(const peri_group *group, char *text, int64_t size)
{
    if (size <= 0 || !text) return;
    int64_t used = 0;
    text[0] = 0;
    if (!group || !group->records) return;
    int64_t now = peri_time_ns();
    for (uint64_t s = peri__record_first(group); s <= group->sequence && used + 1 < size; s++) {
        char line[PERI_RECORD_LINE];
        peri__record_line(group, s, now, line, sizeof line);
        used += snprintf(text + used, (size_t)(size - used), "%s\n", line);
    }
}
