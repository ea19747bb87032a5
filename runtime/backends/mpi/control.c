/* SPDX-License-Identifier: Apache-2.0
 *
 * control.c: what ranks tell each other beside the data, over a communicator of its own.
 *
 *   QUERY   "I wait for you in operation s of group g, whose signature is ...": sent when nothing has come for a while.
 *           The receiver compares with what it posted under that number, or took it for; if it differs, both are wrong
 *           and everybody is told (POISON).
 *           Also "I make group g, and wait for you": what is compared is what the receiver waits in.
 *   ANSWER  what the asked rank is doing instead
 *   POISON  a group is broken, and why
 *   LEAVE   this rank leaves the world, what had failed there, and (group, signature) what became of the models that
 *           are averaged in it; nobody finalizes MPI before all have left
 *   OTHER   what the transport of a device has to say; kept until it asks
 *
 * Notes are small enough to be sent eagerly, so none waits for its receiver.
 */
#include "mpi_internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { NOTE_QUERY, NOTE_ANSWER, NOTE_POISON, NOTE_LEAVE, NOTE_OTHER };
enum { NOTE_TAG = 0 };
#define MAKING UINT64_MAX /* instead of an operation's number: the making of a group */

typedef struct note {
    int32_t kind, from; /* rank in the world */
    int32_t status, epoch; /* OTHER: status is the number of bytes */
    int32_t channel;       /* QUERY: of the operation */
    uint64_t instead_group, instead; /* ANSWER: the one operation in which its sender waits for the receiver, and does
                                        nothing else; or 0 */
    uint64_t group, sequence, signature;
    int64_t send, recv; /* QUERY about all_to_all: elements for and expected from the receiver of the note; else -1 */
    char text[PERI_MESSAGE_MAX];
} note;

typedef struct outgoing {
    struct outgoing *next;
    MPI_Request request;
    note note;
} outgoing;

/** A note of kind OTHER that nobody has taken. */
typedef struct kept {
    struct kept *next;
    int32_t from, bytes;
    char data[];
} kept;

static struct {
    note in;
    MPI_Request receiving;
    outgoing *out;
    kept *first, **last;
} control;

static void operation_text(const peri_coll_op *op, const mpi_group *g, char *text, size_t len)
{
    peri_coll_op_text(op, g->size, text, len);
}

/** Send a note to rank @to of the world. Never waits; out of memory it is not sent, and the others run into their
 *  deadlines. */
static void note_send(int32_t to, const note *n)
{
    outgoing *o = peri__mpi_host->alloc(sizeof *o);
    if (!o) return;
    o->note = *n;
    o->note.from = peri__mpi.rank;
    o->note.epoch = peri__mpi.epoch;
    int bytes = (int)(offsetof(note, text) + (n->kind == NOTE_OTHER ? (size_t)n->status : strlen(n->text)) + 1);
    if (peri__mpi_send(&o->note, bytes, to, NOTE_TAG, peri__mpi.control, &o->request) != MPI_SUCCESS) {
        peri__mpi_host->free(o);
        return;
    }
    o->next = control.out;
    control.out = o;
}

void peri__mpi_poison(const mpi_group *g, peri_status status, const char *message)
{
    note n = {.kind = NOTE_POISON, .status = status, .group = g->tag};
    snprintf(n.text, sizeof n.text, "%s", message);
    for (int32_t i = 0; i < g->size; i++)
        if (i != g->rank && peri__mpi.peers[g->ranks[i]].left < peri__mpi.epoch) note_send(g->ranks[i], &n);
}

static mpi_group *group_with_tag(uint64_t tag)
{
    mpi_group *g = peri__mpi.groups;
    while (g && (g->tag != tag)) g = g->next;
    return g;
}

/** What this rank is doing instead of operation @sequence of @g. */
static void describe_self(const mpi_group *g, char *text, size_t len)
{
    char what[128];
    size_t used = (size_t)snprintf(text, len, "its last operation here: %llu", (unsigned long long)g->last);
    if (peri__mpi.making && used < len)
        used += (size_t)snprintf(text + used, len - used, "; it makes a group of %d ranks", peri__mpi.making->size);
    for (const mpi_group *other = peri__mpi.groups; other && used < len; other = other->next) {
        if (!other->active) continue;
        operation_text(&other->active->op, other, what, sizeof what);
        snprintf(text + used, len - used, "; it waits in %s%s", what, other == g ? "" : " of another group");
        return;
    }
}

static const mpi_request *active_request(const mpi_group *g, uint64_t sequence)
{
    const mpi_request *r = g->active;
    while (r && r->op.sequence != sequence) r = r->next;
    return r;
}

/** The one operation that this rank has under way, if its thread waits and does nothing else: a protocol has one of its
 *  own. NULL: there are more, or none, or the thread may post something. */
static const mpi_request *only_wait(void)
{
    const mpi_request *only = NULL;
    for (const mpi_group *g = peri__mpi.groups; g; g = g->next) {
        if (!g->parent && (!g->numbers || g->numbers->blocked < 1 || g->numbers->blocked > 2)) return NULL;
        if (!g->active) continue;
        if (only || g->active->next) return NULL;
        only = g->active;
    }
    return only;
}

static void waited_for(const mpi_request *r, bool *members);

/** Tell a rank that waits for this one in what operation this rank waits for it. */
static void add_wait(note *reply, int32_t asker)
{
    const mpi_request *r = only_wait();
    bool members[64];
    if (!r || r->group->size > 64) return;
    waited_for(r, members);
    for (int32_t i = 0; i < r->group->size; i++) {
        if (r->group->ranks[i] != asker || !members[i]) continue;
        reply->instead_group = r->group->tag;
        reply->instead = r->op.sequence;
    }
}

static bool has_posted(const mpi_group *g, uint64_t sequence)
{
    return g->last >= sequence && g->history && g->history[sequence % HISTORY].sequence == sequence;
}

/** Rank n->from of the world has not posted the operation that it was asked for, n->sequence of n->group, and waits for
 *  this rank in another group. If this rank waits for nothing else and has not posted that, neither goes on: said after
 *  some such answers in a row. */
static void handle_crossed(const note *n)
{
    enum { SURE = 3 };
    peer *p = &peri__mpi.peers[n->from];
    const mpi_request *own = n->instead ? only_wait() : NULL;
    mpi_group *other = group_with_tag(n->instead_group);
    bool crossed =
        own && own->op.sequence == n->sequence && own->group->tag == n->group && n->instead_group != n->group && other;
    crossed = crossed && !has_posted(other, n->instead);
    p->crossed = crossed ? p->crossed + 1 : 0;
    if (p->crossed < SURE) return;
    char what[160], text[PERI_MESSAGE_MAX];
    mpi_group *g = own->group;
    int32_t from = 0;
    while (from < g->size && g->ranks[from] != n->from) from++;
    operation_text(&own->op, g, what, sizeof what);
    snprintf(text, sizeof text,
             "the ranks disagree: rank %d waits for rank %d in %.140s, and rank %d for it in another group (%.140s)",
             g->rank, from, what, from, n->text);
    peri__mpi_group_fail(g, PERI_EMISMATCH, text);
    peri__mpi_poison(g, PERI_EMISMATCH, text);
    peri__mpi_group_fail(other, PERI_EMISMATCH, text);
    peri__mpi_poison(other, PERI_EMISMATCH, text);
}

static bool has_rank(const mpi_group *g, int32_t rank)
{
    int32_t i = 0;
    while (i < g->size && g->ranks[i] != rank) i++;
    return i < g->size;
}

/** Rank n->from makes group n->signature out of @g and waits for this rank: what this rank waits in, if it does. */
static void handle_making(const note *n, const mpi_group *g)
{
    note reply = {.kind = NOTE_ANSWER, .group = n->group, .sequence = MAKING, .signature = n->signature};
    const mpi_group *making = peri__mpi.making;
    describe_self(g, reply.text, sizeof reply.text);
    add_wait(&reply, n->from);
    if (making && making->tag != n->signature && has_rank(making, n->from)) reply.instead = MAKING;
    note_send(n->from, &reply);
}

/** The answer. This rank has not gone on since it asked, for it needs rank n->from to; and that one waits for this rank
 *  elsewhere, where it would not be if it had come here. */
static void handle_unmade(const note *n)
{
    const mpi_group *making = peri__mpi.making;
    if (!making || making->tag != n->signature || !n->instead) return;
    char text[PERI_MESSAGE_MAX];
    mpi_group *failed[] = {making->parent, n->instead == MAKING ? NULL : group_with_tag(n->instead_group)};
    if (failed[1] && has_posted(failed[1], n->instead)) return;
    snprintf(text, sizeof text,
             "the ranks disagree: rank %d of the world makes a group of %d ranks, and rank %d, one of them, waits for "
             "it elsewhere (%.160s)",
             peri__mpi.rank, making->size, n->from, n->text);
    for (int i = 0; i < 2; i++) {
        if (!failed[i] || (i && failed[1] == failed[0])) continue;
        peri__mpi_group_fail(failed[i], PERI_EMISMATCH, text);
        peri__mpi_poison(failed[i], PERI_EMISMATCH, text);
    }
}

void peri__mpi_ask_to_make(const mpi_group *g, int32_t rank)
{
    note n = {.kind = NOTE_QUERY, .group = g->parent->tag, .sequence = MAKING, .signature = g->tag};
    note_send(rank, &n);
}

static void handle_query(const note *n)
{
    mpi_group *g = group_with_tag(n->group);
    note reply = {.kind = NOTE_ANSWER};
    if (!g || g->failed != PERI_OK) {
        if (g) peri__mpi_poison(g, g->failed, g->message); /* the asker has missed it */
        return;
    }
    if (n->sequence == MAKING) {
        handle_making(n, g);
        return;
    }
    int32_t asker = 0;
    while (asker < g->size && g->ranks[asker] != n->from) asker++;
    const peri_coll_op *mine = g->history ? &g->history[n->sequence % HISTORY] : NULL;
    char what[160], text[PERI_MESSAGE_MAX] = "";
    if (!mine || mine->sequence != n->sequence || asker == g->size) {
        describe_self(g, reply.text, sizeof reply.text);
        if (asker < g->size &&
            peri_coll_numbers_differ(g->numbers, g->rank, n->sequence, n->channel, what, sizeof what)) {
            snprintf(text, sizeof text, "the ranks disagree: rank %d posted %.140s, %.160s (%.120s)", asker, n->text,
                     what, reply.text);
            peri__mpi_group_fail(g, PERI_EMISMATCH, text);
            peri__mpi_poison(g, PERI_EMISMATCH, text);
            return;
        }
        reply.group = n->group;
        reply.sequence = n->sequence;
        add_wait(&reply, n->from);
        note_send(n->from, &reply);
        return;
    }
    const mpi_request *r = active_request(g, n->sequence);
    const peri_coll_op *op = r ? &r->op : mine;
    operation_text(op, g, what, sizeof what);
    if (mine->signature != n->signature)
        snprintf(text, sizeof text, "the ranks disagree: rank %d posted %.160s, rank %d posted %.160s", asker, n->text,
                 g->rank, what);
    else if (r && n->send >= 0 && (op->recv_counts[asker] != n->send || op->send_counts[asker] != n->recv))
        snprintf(text, sizeof text, "the ranks disagree: rank %d posted %.160s, rank %d posted %.160s", asker, n->text,
                 g->rank, what);
    if (text[0]) {
        peri__mpi_group_fail(g, PERI_EMISMATCH, text);
        peri__mpi_poison(g, PERI_EMISMATCH, text);
        return;
    }
    snprintf(reply.text, sizeof reply.text, "it has posted it and is %s", r ? "waiting too" : "done with it");
    note_send(n->from, &reply);
}

static void keep_note(const note *n)
{
    if (n->status < 1 || n->status > PERI_COLL_NOTE) return;
    kept *k = peri__mpi_host->alloc(sizeof *k + (size_t)n->status);
    if (!k) return; /* as when it cannot be sent */
    *k = (kept){.from = n->from, .bytes = n->status};
    memcpy(k->data, n->text, (size_t)n->status);
    if (!control.first) control.last = &control.first;
    *control.last = k;
    control.last = &k->next;
}

void peri__mpi_note_send(void *group, int32_t to, const void *data, int32_t bytes)
{
    (void)group;
    note n = {.kind = NOTE_OTHER, .status = bytes};
    if (peri__mpi.over || !peri__mpi.open || bytes < 1 || bytes > PERI_COLL_NOTE ||
        peri__mpi.peers[to].left >= peri__mpi.epoch)
        return;
    memcpy(n.text, data, (size_t)bytes);
    note_send(to, &n);
}

int32_t peri__mpi_note_take(void *group, int32_t *from, void *data)
{
    (void)group;
    if (!peri__mpi.over) peri__mpi_control_poll();
    kept *k = control.first;
    if (!k) return 0;
    int32_t bytes = k->bytes;
    *from = k->from;
    memcpy(data, k->data, (size_t)bytes);
    control.first = k->next;
    peri__mpi_host->free(k);
    return bytes;
}

/** Read the notes that ranks have sent before they went. Returns the group that has failed: @g, or one that it was made
 *  from; NULL: none, or no @g. */
static const mpi_group *hear_last(const mpi_group *g)
{
    const mpi_group *bad = NULL;
    /* a round moves some messages, and others may be in front of the note */
    for (int round = 0; round < 16 && !bad; round++) {
        peri__mpi_control_poll();
        bad = g ? peri__mpi_broken(g) : NULL;
    }
    return bad;
}

bool peri__mpi_rank_gone(void *group, int32_t rank, char *text, size_t len)
{
    (void)group;
    const peer *p = &peri__mpi.peers[rank];
    if (p->left < peri__mpi.epoch && !peri__mpi_gone(rank)) return false;
    if (p->left < peri__mpi.epoch) hear_last(NULL);
    if (p->left >= peri__mpi.epoch) snprintf(text, len, "rank %d has left the world%s", rank, p->answer);
    else snprintf(text, len, "rank %d (process %lld) is gone", rank, (long long)p->pid);
    return true;
}

void peri__mpi_elsewhere(void *group, const peri_coll_op *op)
{
    mpi_group *g = group;
    if (!g->history) g->history = peri__mpi_host->alloc_zero(sizeof *g->history * HISTORY);
    if (!g->history) return;
    peri__mpi_remember(g, op);
}

void peri__mpi_numbers(void *group, const peri_coll_numbers *numbers) { ((mpi_group *)group)->numbers = numbers; }

peri_status peri__mpi_check(void *group)
{
    if (!peri__mpi.over) peri__mpi_control_poll();
    const mpi_group *bad = peri__mpi_broken(group);
    return bad ? FAIL(bad->failed, "%s", bad->message) : PERI_OK;
}

static void handle_note(const note *n)
{
    if (n->epoch != peri__mpi.epoch || n->from < 0 || n->from >= peri__mpi.size) return; /* of a world that is over */
    peer *p = &peri__mpi.peers[n->from];
    if (n->kind == NOTE_QUERY) handle_query(n);
    if (n->kind == NOTE_LEAVE) {
        p->left = n->epoch;
        p->averaged = n->group;
        p->trained = n->signature;
        snprintf(p->answer, sizeof p->answer, "%s%s", n->text[0] ? ", after: " : "", n->text);
    }
    if (n->kind == NOTE_ANSWER) {
        p->answered_ns = peri__mpi_host->time_ns();
        snprintf(p->answer, sizeof p->answer, "%.*s", (int)sizeof p->answer - 1, n->text);
        if (n->sequence == MAKING) handle_unmade(n);
        else handle_crossed(n);
    }
    if (n->kind == NOTE_POISON) {
        mpi_group *g = group_with_tag(n->group);
        if (g) peri__mpi_group_fail(g, n->status, n->text);
    }
    if (n->kind == NOTE_OTHER) keep_note(n);
}

void peri__mpi_control_open(void)
{
    int code = MPI_Irecv(&control.in, (int)sizeof control.in, MPI_BYTE, MPI_ANY_SOURCE, NOTE_TAG, peri__mpi.control,
                         &control.receiving);
    if (code != MPI_SUCCESS) control.receiving = MPI_REQUEST_NULL;
}

void peri__mpi_control_close(void)
{
    for (kept *k; (k = control.first);) {
        control.first = k->next;
        peri__mpi_host->free(k);
    }
    if (control.receiving == MPI_REQUEST_NULL) return;
    MPI_Cancel(&control.receiving);
    MPI_Wait(&control.receiving, MPI_STATUS_IGNORE); /* returns at once: it is local after a cancel, everybody has
                                                        left */
}

void peri__mpi_control_poll(void)
{
    if (!peri__mpi.open) return;
    for (;;) {
        int flag = 0, count = 0;
        MPI_Status status;
        if (control.receiving == MPI_REQUEST_NULL ||
            peri__mpi_test_one(&control.receiving, &flag, &status) != MPI_SUCCESS || !flag)
            break;
        MPI_Get_count(&status, MPI_BYTE, &count);
        note n = control.in;
        peri__mpi_control_open();
        if (count <= (int)offsetof(note, text)) continue;
        n.text[sizeof n.text - 1] = 0;
        handle_note(&n);
    }
    for (outgoing **o = &control.out; *o;) {
        int flag = 0;
        outgoing *x = *o;
        if (peri__mpi_test_one(&x->request, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && !flag) {
            o = &x->next;
            continue;
        }
        *o = x->next;
        peri__mpi_host->free(x);
    }
}

/** Has a process of this machine ended? One whose parent has not collected it yet (a busy mpirun) still takes signals:
 *  /proc tells it. */
static bool ended(pid_t pid)
{
    char path[40], line[256] = "";
    if (kill(pid, 0) != 0) return errno == ESRCH;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    size_t n = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[n] = 0;
    const char *state = strrchr(line, ')'); /* "PID (NAME) STATE ...": the name may hold anything */
    return state && state[1] == ' ' && (state[2] == 'Z' || state[2] == 'X');
}

bool peri__mpi_gone(int32_t rank)
{
    const peer *p = &peri__mpi.peers[rank];
    return p->machine == peri__mpi.peers[peri__mpi.rank].machine && ended((pid_t)p->pid);
}

peri_status peri__mpi_last_words(const mpi_group *g)
{
    const mpi_group *bad = hear_last(g);
    return bad ? FAIL(bad->failed, "%s", bad->message) : PERI_OK;
}

/** Member @i of @g will not post what it has not posted; PERI_PENDING: it may. One that ended may have said before that
 *  it leaves, and why: the note is looked for again, since it may have come after the last look and before the end. */
static peri_status lost(const mpi_group *g, int32_t i)
{
    const peer *p = &peri__mpi.peers[g->ranks[i]];
    const bool gone = p->left < peri__mpi.epoch && peri__mpi_gone(g->ranks[i]);
    if (gone) TRY(peri__mpi_last_words(g));
    if (p->left >= peri__mpi.epoch && g->ranks[i] == i)
        return FAIL(PERI_EPEER, "rank %d has left the world and will never post it%s", i, p->answer);
    if (p->left >= peri__mpi.epoch)
        return FAIL(PERI_EPEER, "rank %d, which is rank %d of the world, has left it and will never post it%s", i,
                    g->ranks[i], p->answer);
    if (gone)
        return FAIL(PERI_EPEER, "rank %d (%sprocess %lld) is gone", i, peri__mpi_world_rank(g, i).text,
                    (long long)p->pid);
    return PERI_PENDING;
}

/** Mark the members that @r still waits for. */
static void waited_for(const mpi_request *r, bool *members)
{
    memset(members, 0, sizeof *members * (size_t)r->group->size);
    for (int32_t i = 0; i < r->n; i++) {
        int flag = 1;
        if (r->requests[i] == MPI_REQUEST_NULL) continue;
        MPI_Request_get_status(r->requests[i], &flag, MPI_STATUS_IGNORE);
        if (!flag) members[r->slots[i].peer] = true;
    }
    if (r->near) peri__mpi_near_waited_for(r, members);
}

peri_status peri__mpi_ask(mpi_request *r)
{
    mpi_group *g = r->group;
    bool fixed[64], *members = g->size <= 64 ? fixed : peri__mpi_host->alloc(sizeof *members * (size_t)g->size);
    if (!members) return PERI_PENDING;
    peri_status status = PERI_PENDING;
    note n = {.kind = NOTE_QUERY,
              .group = g->tag,
              .sequence = r->op.sequence,
              .signature = r->op.signature,
              .channel = r->op.channel,
              .send = -1,
              .recv = -1};
    operation_text(&r->op, g, n.text, 160);
    waited_for(r, members);
    for (int32_t i = 0; i < g->size && status == PERI_PENDING; i++) {
        if (!members[i] || (status = lost(g, i)) != PERI_PENDING) continue;
        if (r->op.kind == PERI_COLL_ALL_TO_ALL) n.send = r->op.send_counts[i], n.recv = r->op.recv_counts[i];
        note_send(g->ranks[i], &n);
    }
    if (members != fixed) peri__mpi_host->free(members);
    return status;
}

void peri__mpi_blame(void *request, char *text, size_t len)
{
    mpi_request *r = request;
    mpi_group *g = r->group;
    size_t used = 0;
    int32_t shown = 0;
    bool fixed[64], *members = g->size <= 64 ? fixed : peri__mpi_host->alloc(sizeof *members * (size_t)g->size);
    if (!members) return;
    peri__mpi_control_poll();
    waited_for(r, members);
    int64_t now = peri__mpi_host->time_ns();
    for (int32_t i = 0; i < g->size; i++) {
        if (!members[i] || shown++ >= 4 || used >= len) continue;
        const peer *p = &peri__mpi.peers[g->ranks[i]];
        bool heard = p->answered_ns && now - p->answered_ns < 4 * ASK_NS;
        bool near = p->machine == peri__mpi.peers[peri__mpi.rank].machine;
        char silent[sizeof p->host + 80];
        if (peri__mpi_gone(g->ranks[i]))
            snprintf(silent, sizeof silent, "process %lld, is gone", (long long)p->pid), heard = false;
        else
            snprintf(silent, sizeof silent, "no answer: it computes, or is stopped%s%s%s", near ? "" : ", or ",
                     near ? "" : p->host, near ? "" : " cannot be reached");
        used += (size_t)snprintf(text + used, len - used, "%srank %d (%s%s)", shown > 1 ? ", " : "", i,
                                 peri__mpi_world_rank(g, i).text, heard ? p->answer : silent);
    }
    if (shown > 4 && used < len) snprintf(text + used, len - used, " and %d more", shown - 4);
    if (!shown) snprintf(text, len, "its own completion");
    if (members != fixed) peri__mpi_host->free(members);
}

bool peri__mpi_all_left(int64_t timeout_ns)
{
    int64_t until = peri__mpi_host->time_ns() + timeout_ns;
    for (int64_t round = 0;; round++) {
        int32_t here = 0;
        peri__mpi_control_poll();
        for (int32_t i = 0; i < peri__mpi.size; i++) here += peri__mpi.peers[i].left < peri__mpi.epoch;
        if (!here || peri__mpi_host->time_ns() > until) return !here;
        peri__mpi_host->pause(round);
    }
}

/** All have left: does this rank end with another model than rank 0? */
static void compare_models(uint64_t averaged, uint64_t trained)
{
    const peer *first = &peri__mpi.peers[0];
    if (peri__mpi.rank == 0 || averaged == 0 || first->averaged != averaged || first->trained == trained) return;
    char text[PERI_MESSAGE_MAX];
    peri_coll_models_differ(0, text, sizeof text);
    peri__mpi_host->log(PERI_LOG_WARN, "%s", text);
}

bool peri__mpi_leave_world(int64_t timeout_ns)
{
    const mpi_group *world = peri__mpi.groups;
    while (world && world->parent) world = world->next;
    const peri_coll_numbers *numbers = world ? world->numbers : NULL;
    note n = {.kind = NOTE_LEAVE, .group = numbers ? numbers->averaged : 0,
              .signature = numbers ? numbers->trained : 0};
    snprintf(n.text, sizeof n.text, "%s", peri__mpi.why);
    peri__mpi.peers[peri__mpi.rank].left = peri__mpi.epoch;
    for (int32_t i = 0; i < peri__mpi.size; i++)
        if (i != peri__mpi.rank) note_send(i, &n);
    int64_t now = peri__mpi_host->time_ns(), until = now + timeout_ns, look = now + STALL_NS;
    for (int64_t round = 0;; round++) {
        int32_t here = 0, dead = 0;
        peri__mpi_control_poll();
        now = peri__mpi_host->time_ns();
        for (int32_t i = 0; i < peri__mpi.size; i++) {
            if (peri__mpi.peers[i].left >= peri__mpi.epoch) continue;
            here++;
            if (now >= look) dead += peri__mpi_gone(i);
        }
        if (!here && !control.out) {
            compare_models(n.group, n.signature);
            return true;
        }
        if (peri__mpi.broken || dead || now > until) break;
        if (now >= look) look = now + STALL_NS;
        peri__mpi_host->pause(round);
    }
    /* What was sent should still arrive: a moment for the notes under way. */
    int64_t grace = peri__mpi_host->time_ns() + 100000000;
    for (int64_t round = 0; control.out && peri__mpi_host->time_ns() < grace; round++) {
        peri__mpi_control_poll();
        peri__mpi_host->pause(round);
    }
    return false;
}
