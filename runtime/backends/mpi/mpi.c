/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi.c: the transport of launched ranks, over Open MPI.
 *
 * Every operation is made of nonblocking point-to-point messages here: so that nothing ever blocks, that sums are made
 * in rank order, and that ranks which disagree find out. A message's tag carries the operation's number and signature,
 * so messages of different operations never meet; a rank that sees no message for a while asks the ranks it waits for
 * (control.c) what they are doing.
 *
 *   barrier          rounds k = 0, 1, ...: to rank + 2^k, from rank - 2^k
 *   broadcast        binomial tree, whose last rank answers the root
 *   all_gather, all_to_all   direct: every rank to every rank
 *   reduce_scatter   direct exchange of the parts, segment by segment, summed in rank order
 *   all_reduce       small, or between two machines: everybody gets everything and sums; large: reduce_scatter, then
 *                    all_gather of the sums
 *
 * Between ranks of one machine only small data travel in messages; near.c copies the rest.
 *
 * All ranks of a pair exchange a message even where the count is zero: a disagreement about counts is then seen by the
 * receiver.
 */
#include "mpi_internal.h"
#include "../../../kernels/convert.h"
#include "../../../kernels/layout.h"
#include "../../../kernels/route.h"
#include "../../plugin/fault.h"

#include <sched.h>
#include <string.h>

static void unlist_request(mpi_request *r)
{
    if (r->previous) r->previous->next = r->next;
    else if (r->group->active == r) r->group->active = r->next;
    if (r->next) r->next->previous = r->previous;
    r->next = r->previous = NULL;
}

/** Remember how the request ended. The first failure of a group is told to all its members. */
static peri_status end(mpi_request *r, peri_status status)
{
    mpi_group *g = r->group;
    char what[128], text[PERI_MESSAGE_MAX];
    r->status = status;
    unlist_request(r);
    if (status >= 0) {
        peri__mpi_near_give(r);
        return status;
    }
    const char *message = peri__mpi_host->error_message();
    r->message = peri__mpi_host->alloc(strlen(message) + 1);
    if (r->message) memcpy(r->message, message, strlen(message) + 1);
    if (!peri__mpi_broken(g)) {
        peri_coll_op_text(&r->op, g->size, what, sizeof what);
        snprintf(text, sizeof text, "rank %d, %s: %.300s", g->rank, what, message);
        peri__mpi_group_fail(g, status, text);
        peri__mpi_poison(g, status, text);
    }
    return status;
}

/** After the messages of a phase: was anything else than expected received? */
static peri_status check_messages(const mpi_request *r, int code)
{
    for (int32_t i = 0; i < r->n; i++) {
        int count = 0, error = code == MPI_ERR_IN_STATUS ? r->statuses[i].MPI_ERROR : MPI_SUCCESS, class = MPI_SUCCESS;
        if (error == MPI_ERR_PENDING) continue;
        if (error != MPI_SUCCESS) MPI_Error_class(error, &class);
        if (error != MPI_SUCCESS && class != MPI_ERR_TRUNCATE)
            return peri__mpi_fail(r->slots[i].receive ? "a receive" : "a send", error);
        if (!r->slots[i].receive) continue;
        MPI_Get_count(&r->statuses[i], MPI_BYTE, &count);
        const slot *s = &r->slots[i];
        if (class == MPI_SUCCESS && count == s->bytes) continue;
        if (s->note)
            return FAIL(PERI_EMISMATCH, "rank %d sent %s%d bytes, rank %d expects %llu", s->peer,
                        class == MPI_SUCCESS ? "" : "more than ", class == MPI_SUCCESS ? count : s->bytes,
                        r->group->rank, (unsigned long long)r->near->mine[s->peer].recv_bytes);
        if (class == MPI_SUCCESS && count != (int)sizeof(descriptor))
            return FAIL(PERI_EMISMATCH, "rank %d sent %d bytes, rank %d expects %d", s->peer, count, r->group->rank,
                                  s->bytes);
        return FAIL(PERI_EMISMATCH, "rank %d sent %s the %d bytes that rank %d expects", s->peer,
                    class == MPI_SUCCESS && count < s->bytes ? "less than" : "more than", s->bytes, r->group->rank);
    }
    return code == MPI_SUCCESS || code == MPI_ERR_IN_STATUS ? PERI_OK : peri__mpi_fail("MPI_Testall", code);
}

/** Nothing has come: look at the notes now and then, and ask when it takes long. */
static peri_status waiting(mpi_request *r)
{
    int64_t now = peri__mpi_host->time_ns();
    if ((++r->polls & 31) && now - r->looked_ns < LOOK_NS) return PERI_PENDING;
    r->looked_ns = now;
    peri__mpi_control_poll();
    const mpi_group *bad = peri__mpi_broken(r->group);
    if (bad) return end(r, FAIL(bad->failed, "%s", bad->message));
    if (!r->quiet_ns) r->quiet_ns = now;
    if (now - r->quiet_ns < STALL_NS || now - r->asked_ns < ASK_NS || r->dropped || r->stalled) return PERI_PENDING;
    r->asked_ns = now;
    peri_status status = peri__mpi_ask(r);
    return status < 0 ? end(r, status) : status;
}

static peri_status mpi_test(void *request)
{
    mpi_request *r = request;
    if (r->status == PERI_PENDING && peri__mpi.over) return end(r, FAIL(PERI_EABORTED, "%s", r->group->message));
    if (r->status != PERI_PENDING)
        return r->status >= 0 ? r->status : FAIL(r->status, "%s", r->message ? r->message : "");
    if (r->dropped || r->stalled) return waiting(r);
    if (has_copies_left(r)) {
        bool idle;
        peri_status status = peri__mpi_near_step(r, &idle);
        if (status == PERI_EPEER) {
            peri_status said = peri__mpi_last_words(r->group);
            if (said < 0) return end(r, said);
        }
        if (status != PERI_PENDING) return end(r, status);
        /* as MPI_Testall does then: whom this rank waits for may need this processor */
        if (idle && peri__mpi.crowded) sched_yield();
        if (idle) return waiting(r);
        r->quiet_ns = 0;
        return PERI_PENDING;
    }
    if (r->deferred) {
        r->deferred = false;
        peri_status status = peri__mpi_advance(r);
        return r->deferred ? waiting(r) : status == PERI_PENDING ? status : end(r, status);
    }
    int flag = 0;
    int code = peri__mpi_test_all(r->n, r->requests, &flag, r->statuses);
    if (code == MPI_SUCCESS && !flag) return waiting(r);
    peri_status status = check_messages(r, code);
    r->quiet_ns = 0;
    if (status >= 0) status = peri__mpi_advance(r);
    return status == PERI_PENDING ? status : end(r, status);
}

/** A new request of @g; NULL: no memory. */
static mpi_request *take_request(mpi_group *g)
{
    mpi_request *r = g->spare;
    if (r) *r = (mpi_request){.room = r->room, .requests = r->requests, .slots = r->slots, .statuses = r->statuses};
    else r = peri__mpi_host->alloc_zero(sizeof *r);
    g->spare = NULL;
    if (r) r->group = g;
    return r;
}

static void give_request(mpi_request *r)
{
    mpi_group *g = r->group;
    if (g->spare) peri__mpi_free_request(r);
    else g->spare = r;
}

static peri_status mpi_post(void *group, const peri_coll_op *op, void **request)
{
    mpi_group *g = group;
    const mpi_group *bad = peri__mpi_broken(g);
    if (bad) return FAIL(bad->failed, "%s", bad->message);
    if (!g->history) {
        g->history = peri__mpi_host->alloc_zero(sizeof *g->history * HISTORY);
        if (!g->history) return PERI_ENOMEM;
    }
    mpi_request *r = take_request(g);
    if (!r) return PERI_ENOMEM;
    r->op = *op;
    r->status = PERI_PENDING;
    r->dropped = peri__mpi_host->fault(PERI_FAULT_coll_drop);
    r->stalled = peri__mpi_host->fault(PERI_FAULT_coll_stall);
    if (!r->dropped) peri__mpi_remember(g, op);
    r->next = g->active;
    if (g->active) g->active->previous = r;
    g->active = r;
    peri_status status = r->dropped ? PERI_PENDING : peri__mpi_advance(r);
    if (status != PERI_PENDING) end(r, status);
    *request = r; /* also after a failure: messages may be under way, and test reports it */
    return PERI_OK;
}

/** After a failure: does nobody use the request's buffers any more? Pieces under way end at once, unless their process
 *  was killed. */
static bool near_over(mpi_request *r)
{
    const mpi_group *g = r->group;
    int64_t now = peri__mpi_host->time_ns();
    peri__mpi_near_close(g);
    if (peri__mpi_near_quiet(g)) return true;
    if (!r->given_up_ns) r->given_up_ns = now;
    bool dead = false;
    for (int32_t i = 0; i < g->size && now - r->given_up_ns > 4 * STALL_NS; i++)
        dead = dead || peri__mpi_gone(g->ranks[i]);
    return dead;
}

static peri_status mpi_drop(void *request)
{
    mpi_request *r = request;
    int32_t left = 0;
    for (int32_t i = 0; i < r->n && !peri__mpi.over; i++) {
        int flag = 0;
        if (r->requests[i] == MPI_REQUEST_NULL) continue;
        if (!r->cancelled && r->slots[i].receive) MPI_Cancel(&r->requests[i]);
        if (peri__mpi_test_one(&r->requests[i], &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && !flag) left++;
    }
    r->cancelled = true;
    if (r->status == PERI_PENDING) {
        unlist_request(r);
        r->status = PERI_EABORTED;
    }
    if (r->near && !near_over(r)) left++;
    if (left) return PERI_PENDING;
    peri__mpi_give_scratch(r);
    peri__mpi_near_give(r);
    peri__mpi_host->free(r->message);
    give_request(r);
    return PERI_OK;
}

static void mpi_abort(void *group, const char *message)
{
    mpi_group *g = group;
    char text[PERI_MESSAGE_MAX];
    if (g->failed != PERI_OK || peri__mpi.over) return; /* who broke it has told the others */
    snprintf(text, sizeof text, "rank %d gave up: %s", g->rank, message);
    peri__mpi_group_fail(g, PERI_EPEER, text);
    peri__mpi_poison(g, PERI_EPEER, text);
    peri__mpi_control_poll();
}

static peri_status mpi_probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static const peri_coll_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_COLL_ABI,
    .name = "mpi",
    .takes = PERI_COLL_HOST | PERI_COLL_PLACES | PERI_COLL_DIRECT | PERI_COLL_RANK_ORDER,
    .probe = mpi_probe,
    .launched = peri__mpi_launched,
    .open = peri__mpi_open,
    .node = peri__mpi_node,
    .subgroup = peri__mpi_subgroup,
    .post = mpi_post,
    .test = mpi_test,
    .blame = peri__mpi_blame,
    .drop = mpi_drop,
    .abort = mpi_abort,
    .close = peri__mpi_close,
    .release = peri__mpi_release,
    .note_send = peri__mpi_note_send,
    .note_take = peri__mpi_note_take,
    .gone = peri__mpi_rank_gone,
    .elsewhere = peri__mpi_elsewhere,
    .check = peri__mpi_check,
    .lend = peri__mpi_heap_lend,
    .give_back = peri__mpi_heap_return,
    .numbers = peri__mpi_numbers,
};

__attribute__((visibility("default"))) const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent);
const peri_coll_vtab *peri_coll_entry_v1(const peri_plugin_host *lent)
{
    if (!peri_plugin_host_take(&peri__mpi_host, lent)) return NULL;
    peri__mpi_reduce = lent->kernel("reduce", PERI_WORK_ARGS(peri_k_reduce_args));
    peri__mpi_place = lent->kernel("route_place", PERI_WORK_ARGS(peri_k_route_place_args));
    return peri_plugin_host_has_all(lent) && peri__mpi_reduce && peri__mpi_place ? &vtab : NULL;
}
