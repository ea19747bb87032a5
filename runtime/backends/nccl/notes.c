/* SPDX-License-Identifier: Apache-2.0
 *
 * notes.c: what ranks tell each other beside the data, over the host's transport (plugin/coll.h, note_send).
 *
 *   ID      the identity of a group's base communicator, from its first member
 *   ORDER   from the first member, passed on from one to FAN others: "I launch this next". A member launches in that
 *           order, and compares with what it has posted under that number: if that differs, both are wrong
 *   QUERY   when an operation takes long: "I have posted this", to all, with the counts of a pair
 *   ANSWER  what the asked rank is doing instead
 *   POISON  the group is broken, and why
 */
#include "nccl_internal.h"

#include <string.h>

enum { FAN = 8 /* members to which one passes an ORDER on: all of a machine of 8 GPUs hear it at first hand */ };

static int64_t now(void) { return peri__nccl_host->time_ns(); }

communicator *peri__nccl_lane(nccl_group *g, int32_t channel)
{
    enum { DENSE, ROWS, SMALL };
    static const int8_t lanes[] = {[PERI_CHANNEL_DENSE] = DENSE, [PERI_CHANNEL_IDS] = SMALL, [PERI_CHANNEL_ROWS] = ROWS,
                                   [PERI_CHANNEL_CONTROL] = SMALL, [PERI_CHANNEL_REPORTS] = SMALL};
    return &g->lanes[channel < PERI_CHANNEL_OWN ? lanes[channel] : channel % LANES];
}

const nccl_group *peri__nccl_broken(const nccl_group *g)
{
    while (g && g->failed == PERI_OK) g = g->parent;
    return g;
}

void peri__nccl_tell(nccl_group *g, int32_t to, note *n)
{
    n->group = g->tag;
    size_t words = n->kind == NOTE_ID ? sizeof n->text : strlen(n->text) + 1;
    if (to != g->rank && g->world->host->note_send)
        g->world->host->note_send(g->world->host_group, g->ranks[to], n, (int32_t)(offsetof(note, text) + words));
}

void peri__nccl_abort(nccl_group *g)
{
    for (int32_t c = 0; c <= LANES; c++) {
        communicator *x = c < LANES ? &g->lanes[c] : &g->base;
        if (x->comm) peri__nccl.CommAbort(x->comm);
        x->comm = NULL;
        x->state = COMM_NONE;
    }
}

void peri__nccl_group_fail(nccl_group *g, peri_status status, const char *message, bool tell)
{
    if (g->failed != PERI_OK) return;
    g->failed = status;
    snprintf(g->message, sizeof g->message, "%s", message);
    peri__nccl_abort(g);
    for (nccl_group *child = g->world->groups; child; child = child->next)
        if (child->parent == g) peri__nccl_group_fail(child, status, message, false);
    for (int32_t i = 0; tell && i < g->size; i++) {
        note n = {.kind = NOTE_POISON, .status = status};
        snprintf(n.text, sizeof n.text, "%.399s", message);
        peri__nccl_tell(g, i, &n);
    }
}

static void operation_text(const nccl_group *g, const peri_coll_op *op, char *text, size_t len)
{
    peri_coll_op_text(op, g->size, text, len);
}

/** Rank @i of the group for messages: with its number in the world where that differs. */
static void name_of(const nccl_group *g, int32_t i, char *text, size_t len)
{
    if (g->ranks[i] == i) snprintf(text, len, "rank %d", i);
    else snprintf(text, len, "rank %d (rank %d of the world)", i, g->ranks[i]);
}

void peri__nccl_lost(nccl_group *g, peri_status status, const char *message)
{
    char name[64], text[PERI_MESSAGE_MAX];
    name_of(g, g->rank, name, sizeof name);
    snprintf(text, sizeof text, "%s: %.400s", name, message);
    peri__nccl_group_fail(g, status, text, true);
}

static const peri_coll_op *recorded_operation(const nccl_group *g, uint64_t sequence)
{
    const peri_coll_op *op = g->history ? &g->history[sequence % HISTORY] : NULL;
    return op && op->sequence == sequence ? op : NULL;
}

static nccl_request *active_request(nccl_group *g, uint64_t sequence)
{
    for (int32_t c = -1; c < LANES; c++)
        for (nccl_request *r = c < 0 ? g->posted : g->lanes[c].first; r; r = r->next)
            if (r->op.sequence == sequence) return r;
    return NULL;
}

/** Member @from says that it has posted @n; @own is this rank's operation of that number. False: they differ, and the
 *  group has failed. */
static bool agree(nccl_group *g, int32_t from, const note *n, const peri_coll_op *own)
{
    char mine[160], other[48], text[PERI_MESSAGE_MAX];
    bool counts = n->kind != NOTE_QUERY || n->send < 0 || !own->recv_counts ||
                  (own->recv_counts[from] == n->send && own->send_counts[from] == n->recv);
    if (own->signature == n->signature && counts) return true;
    peri_coll_op shown = *own;
    if (!own->recv_counts) shown.send_counts = NULL; /* the block of an older operation */
    operation_text(g, &shown, mine, sizeof mine);
    name_of(g, from, other, sizeof other);
    snprintf(text, sizeof text, "the ranks disagree: %s posted %.160s, rank %d posted %.160s", other, n->text, g->rank,
             mine);
    peri__nccl_group_fail(g, PERI_EMISMATCH, text, true);
    return false;
}

/** Keep a note at the end of a list. Without memory for it the world could not go on as the ranks agreed: false. */
static bool keep(early ***last, int32_t from, const note *n)
{
    early *e = peri__nccl_host->alloc(sizeof *e);
    if (!e) return false;
    *e = (early){NULL, from, *n};
    **last = e;
    *last = &e->next;
    return true;
}

/** Tell the members that hear it from this one. */
static void pass_on(nccl_group *g, const note *n)
{
    for (int32_t i = g->rank * FAN + 1; i <= g->rank * FAN + FAN && i < g->size; i++) {
        note copy = *n;
        peri__nccl_tell(g, i, &copy);
    }
}

/** The first member launches @n next. */
static void ordered(nccl_group *g, int32_t world_rank, const note *n)
{
    const peri_coll_op *own = recorded_operation(g, n->sequence);
    pass_on(g, n);
    if (own && !agree(g, 0, n, own)) return;
    if (!keep(&g->last_order, world_rank, n)) peri__nccl_lost(g, PERI_ENOMEM, "no memory for a note of another rank");
}

static void answer_query(nccl_group *g, int32_t from, const note *n)
{
    note reply = {.kind = NOTE_ANSWER, .sequence = n->sequence, .status = 0};
    const nccl_group *bad = peri__nccl_broken(g);
    const peri_coll_op *own = recorded_operation(g, n->sequence);
    if (bad) {
        reply.kind = NOTE_POISON;
        reply.status = bad->failed;
        snprintf(reply.text, sizeof reply.text, "%.399s", bad->message);
    } else if (own) {
        if (!agree(g, from, n, own)) return;
        reply.status = 1;
        snprintf(reply.text, sizeof reply.text, "it has posted it and is %s",
                 active_request(g, n->sequence) ? "waiting too" : "done with it");
    } else {
        char what[160], text[PERI_MESSAGE_MAX];
        if (peri_coll_numbers_differ(g->numbers, g->rank, n->sequence, n->channel, what, sizeof what)) {
            snprintf(text, sizeof text, "the ranks disagree: rank %d posted %.160s, %s", from, n->text, what);
            peri__nccl_group_fail(g, PERI_EMISMATCH, text, true);
            return;
        }
        snprintf(reply.text, sizeof reply.text, "its last operation here: %llu", (unsigned long long)g->last);
    }
    peri__nccl_tell(g, from, &reply);
}

static void handle_note(nccl_group *g, int32_t world_rank, const note *n)
{
    int32_t from = 0;
    while (from < g->size && g->ranks[from] != world_rank) from++;
    if (from == g->size) return;
    switch (n->kind) {
    case NOTE_ID:
        memcpy(&g->id, n->text, sizeof g->id);
        g->has_id = true;
        break;
    case NOTE_ORDER: ordered(g, world_rank, n); break;
    case NOTE_QUERY: answer_query(g, from, n); break;
    case NOTE_ANSWER: {
        member *m = &g->members[from];
        m->answered_ns = now();
        m->about = n->sequence;
        m->posted = n->status != 0;
        snprintf(m->answer, sizeof m->answer, "%.159s", n->text);
        break;
    }
    case NOTE_POISON: peri__nccl_group_fail(g, n->status, n->text, false); break;
    default: break;
    }
}

void peri__nccl_hear(nccl_world *w)
{
    char data[PERI_COLL_NOTE];
    int32_t from, bytes;
    while (w->host->note_take && (bytes = w->host->note_take(w->host_group, &from, data)) > 0) {
        note n = {0};
        if (bytes <= (int32_t)offsetof(note, text) || bytes > (int32_t)sizeof n) continue;
        memcpy(&n, data, (size_t)bytes);
        if (n.kind != NOTE_ID) n.text[sizeof n.text - 1] = 0;
        nccl_group *g = w->groups;
        while (g && g->tag != n.group) g = g->next;
        if (g) handle_note(g, from, &n);
        else {
            early **last = &w->unknown;
            while (*last) last = &(*last)->next;
            (void)keep(&last, from, &n);
        }
    }
}

void peri__nccl_hear_early(nccl_group *g)
{
    for (early **p = &g->world->unknown; *p;) {
        early *e = *p;
        if (e->note.group != g->tag) {
            p = &e->next;
            continue;
        }
        *p = e->next;
        handle_note(g, e->from, &e->note);
        peri__nccl_host->free(e);
    }
}

/** Keep the operation, with the counts of an all_to_all: it may have ended here, and be waited for elsewhere because of
 *  them. */
static void remember(nccl_group *g, const peri_coll_op *op)
{
    peri_coll_op *h = &g->history[op->sequence % HISTORY];
    size_t bytes = sizeof *op->send_counts * (size_t)g->size;
    int64_t *counts = (int64_t *)h->send_counts;
    if (op->kind == PERI_COLL_ALL_TO_ALL && !counts) counts = peri__nccl_host->alloc(2 * bytes);
    bool kept = op->kind == PERI_COLL_ALL_TO_ALL && counts;
    if (kept) {
        memcpy(counts, op->send_counts, bytes);
        memcpy(counts + g->size, op->recv_counts, bytes);
    }
    *h = *op;
    h->facts = NULL;
    h->send_counts = counts;
    h->recv_counts = kept ? counts + g->size : NULL;
    h->recv_runs = NULL;
}

void peri__nccl_posted(nccl_group *g, const peri_coll_op *op)
{
    remember(g, op);
    if (op->sequence > g->last) g->last = op->sequence;
    if (g->rank == 0) {
        note n = {.kind = NOTE_ORDER,
                  .channel = op->channel,
                  .sequence = op->sequence,
                  .signature = op->signature,
                  .send = -1,
                  .recv = -1};
        operation_text(g, op, n.text, 160);
        pass_on(g, &n);
        return;
    }
    for (const early *e = g->order; e; e = e->next)
        if (e->note.sequence == op->sequence) {
            (void)agree(g, 0, &e->note, op);
            return;
        }
}

void peri__nccl_ordered(nccl_group *g)
{
    early *e = g->order;
    if (!e) return;
    g->order = e->next;
    if (!g->order) g->last_order = &g->order;
    peri__nccl_host->free(e);
}

void peri__nccl_ask(nccl_request *r)
{
    nccl_group *g = r->group;
    nccl_world *w = g->world;
    char text[PERI_MESSAGE_MAX], why[200], other[48], what[160];
    for (int32_t i = 0; i < g->size; i++) {
        if (i == g->rank) continue;
        if (w->host->gone && w->host->gone(w->host_group, g->ranks[i], why, sizeof why)) {
            name_of(g, i, other, sizeof other);
            if (g->ranks[i] == i) snprintf(text, sizeof text, "%s", why);
            else snprintf(text, sizeof text, "%s: %s", other, why);
            peri__nccl_group_fail(g, PERI_EPEER, text, true);
            return;
        }
        note n = {.kind = NOTE_QUERY,
                  .channel = r->op.channel,
                  .sequence = r->op.sequence,
                  .signature = r->op.signature,
                  .send = -1,
                  .recv = -1};
        if (r->op.kind == PERI_COLL_ALL_TO_ALL) n.send = r->op.send_counts[i], n.recv = r->op.recv_counts[i];
        operation_text(g, &r->op, what, sizeof what);
        snprintf(n.text, sizeof n.text, "%s", what);
        peri__nccl_tell(g, i, &n);
    }
}

/** What @r waits for, if that is another operation of this rank: the one that runs before it on its lane. Else @r. */
static const nccl_request *behind(const nccl_request *r)
{
    const communicator *lane = peri__nccl_lane(r->group, r->op.channel);
    return lane->first ? lane->first : r;
}

void peri__nccl_blame(void *request, char *text, size_t len)
{
    nccl_request *waiting = request;
    nccl_group *g = waiting->group;
    char other[48];
    size_t used = 0;
    int32_t shown = 0;
    text[0] = 0;
    peri__nccl_hear(g->world);
    const nccl_request *r = behind(waiting);
    if (r != waiting)
        used = (size_t)snprintf(text, len, "operation %llu, which comes before: ", (unsigned long long)r->op.sequence);
    for (int32_t i = 0; i < g->size; i++) {
        const member *m = &g->members[i];
        bool heard = m->answered_ns && m->about == r->op.sequence && now() - m->answered_ns < 4 * ASK_NS;
        if (i == g->rank || (heard && m->posted)) continue;
        if (shown++ >= 4 || used >= len) continue;
        name_of(g, i, other, sizeof other);
        used += (size_t)snprintf(text + used, len - used, "%s%s (%s)", shown > 1 ? ", " : "", other,
                                 heard ? m->answer : "no answer: it computes, is stopped, or cannot be reached");
    }
    if (shown > 4 && used < len) snprintf(text + used, len - used, " and %d more", shown - 4);
    if (shown || used >= len) return;
    if (r->state == REQUEST_WAITS && g->order)
        snprintf(text + used, len - used, "%.160s, which rank %d has posted before, and this rank has not",
                 g->order->note.text, g->ranks[0]);
    else snprintf(text + used, len - used, "its own completion: all ranks have posted it");
}
