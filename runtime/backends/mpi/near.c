/* SPDX-License-Identifier: Apache-2.0
 *
 * near.c: ranks of one machine copy large data straight from memory to memory (process_vm_readv, process_vm_writev),
 * and whichever of the ranks concerned has time does it: a rank that computes neither sends nor receives, its waiting
 * peers do both. Here operations begin: what ranks tell each other, and the jobs that follow from it. near_copy.c does
 * the jobs, near_memory.c holds the cells.
 *
 * For an operation every rank sends the others a descriptor: where its data is and where data may be put. Its copies
 * are *jobs*; a job's progress is a cell in memory that the group shares. A rank that knows both ends of a job claims a
 * piece of it (cell.next), copies it, and counts it as done (cell.done). The job is complete for everybody when done
 * reaches its end, also for a rank that did nothing.
 *
 * Cells are used again for later jobs, but never go back to zero: they count bytes upwards for ever. A job is the range
 * of the count from what it was when its cell was taken (base) to base + bytes, so a rank that looks at the cell late,
 * when a later job counts on, finds the count beyond that range: its own job is complete. A rank that gives up closes
 * all cells of the group: nobody can claim any more, and its buffers are free when all claims are done (near_quiet).
 */
#include "mpi_internal.h"
#include "../../../kernels/route.h"

enum {
    PIECE_MOST = 512 << 10, /* bytes of a claim that others might make too */
    PIECE_OWN = 1 << 20     /* of one that others make only if this rank has no time: a system call costs as much as 16
                               KiB */
};

#define NOTE_MARK 0x6e656172u /* in each descriptor */

static peri_status near_prepare(mpi_request *r)
{
    size_t n = (size_t)r->group->size;
    size_t each = 2 * sizeof(near_job) + 2 * sizeof(descriptor) + sizeof(peri_k_run *) + sizeof(uint32_t);
    struct near_state *s = peri__mpi_host->alloc_zero(sizeof *s + n * each);
    if (!s) return PERI_ENOMEM;
    s->jobs = (near_job *)(s + 1);
    s->mine = (descriptor *)(s->jobs + 2 * n);
    s->theirs = s->mine + n;
    s->fetched = (peri_k_run **)(s->theirs + n);
    s->held = (uint32_t *)(s->fetched + n);
    for (size_t i = 0; i < n; i++) s->mine[i] = (descriptor){.cell = -1, .mark = NOTE_MARK};
    r->near = s;
    return PERI_OK;
}

/** Take a free cell of this rank's for @to. False: all are in use, try again when some operation has ended. */
static bool near_take(mpi_request *r, int32_t to, descriptor *d)
{
    mpi_group *g = r->group;
    uint32_t free = ~g->used[to];
    if (!free) return false;
    int32_t k = __builtin_ctz(free);
    g->used[to] |= 1u << k;
    r->near->held[to] |= 1u << k;
    d->cell = k;
    d->base = atomic_load(&peri__mpi_near_cell_at(g, g->rank, to, k)->done);
    return true;
}

void peri__mpi_near_give(mpi_request *r)
{
    mpi_group *g = r->group;
    if (!r->near) return;
    for (int32_t i = 0; i < g->size; i++) {
        g->used[i] &= ~r->near->held[i];
        peri__mpi_host->free(r->near->fetched[i]);
    }
    peri__mpi_host->free(r->near);
    r->near = NULL;
}

/** Send or receive a descriptor. */
static peri_status near_note(mpi_request *r, bool receive, int32_t other)
{
    TRY(peri__mpi_message(r, receive, other, receive ? &r->near->theirs[other] : &r->near->mine[other],
                          sizeof(descriptor)));
    r->slots[r->n - 1].note = true;
    return PERI_OK;
}

/** Exchange descriptors with rank @other of the group. */
static peri_status near_tell(mpi_request *r, int32_t other)
{
    TRY(near_note(r, true, other));
    return near_note(r, false, other);
}

static void near_add(mpi_request *r, int32_t from, int32_t to, const descriptor *d, uint64_t bytes, uint64_t at)
{
    struct near_state *s = r->near;
    s->jobs[s->n++] = (near_job){.cell = peri__mpi_near_cell_at(r->group, from, to, d->cell),
                                 .base = d->base,
                                 .bytes = bytes,
                                 .from = from,
                                 .to = to,
                                 .at = at,
                                 .most = from == to ? (uint64_t)peri__mpi_near_sum_piece(r->group->size) : PIECE_MOST};
}

/** Both descriptors of a pair must agree on sizes. */
static peri_status near_agree(const mpi_request *r, int32_t other)
{
    const descriptor *mine = &r->near->mine[other], *theirs = &r->near->theirs[other];
    int32_t rank = r->group->rank;
    long long element = peri_coll_dtype_size(r->op.dtype);
    if (theirs->mark != NOTE_MARK)
        return FAIL(PERI_EMISMATCH, "rank %d sent data where rank %d expects another size", other, rank);
    if (theirs->send_bytes != mine->recv_bytes)
        return FAIL(PERI_EMISMATCH, "rank %d sends %lld elements to rank %d, which expects %lld", other,
                              (long long)theirs->send_bytes / element, rank, (long long)mine->recv_bytes / element);
    if (theirs->recv_bytes != mine->send_bytes)
        return FAIL(PERI_EMISMATCH, "rank %d sends %lld elements to rank %d, which expects %lld", rank,
                              (long long)mine->send_bytes / element, other, (long long)theirs->recv_bytes / element);
    if (mine->direct && theirs->direct && mine->direct != theirs->direct)
        return FAIL(PERI_EMISMATCH,
                    "of ranks %d and %d one has a function for what it sends, the other for what it receives", rank,
                    other);
    return PERI_OK;
}

void peri__mpi_past_caches(mpi_request *r, int64_t bytes)
{
    int64_t all = bytes > INT64_MAX / r->group->size ? INT64_MAX : bytes * r->group->size;
    if (!r->group->shared || all < PERI_HOST_COPY_LARGE) return;
    int64_t least = peri__mpi_host->copy_choice(PERI_HOST_COPY_PAST);
    r->past = least > 0 && all >= least;
    r->rows = r->op.recv_runs ? peri__mpi_host->copy_choice(PERI_HOST_COPY_ROWS) : 0;
}

/** No cell is free: start again when some operation has ended. */
static peri_status near_defer(mpi_request *r)
{
    peri__mpi_near_give(r);
    r->deferred = true;
    return PERI_PENDING;
}

peri_status peri__mpi_near_exchange(mpi_request *r, char *recv, const int64_t *recv_at, const int64_t *recv_bytes,
                                    const char *send, const int64_t *send_at, const int64_t *send_bytes)
{
    int32_t rank = r->group->rank, size = r->group->size;
    TRY(near_prepare(r));
    for (int32_t k = 1; k < size; k++) {
        int32_t to = (rank + k) % size;
        descriptor *d = &r->near->mine[to];
        d->send = (uint64_t)(uintptr_t)send + (uint64_t)send_at[to];
        d->recv = (uint64_t)(uintptr_t)recv + (uint64_t)recv_at[to];
        d->send_bytes = (uint64_t)send_bytes[to];
        d->recv_bytes = (uint64_t)recv_bytes[to];
        d->direct = r->op.fill ? DIRECT_FILL : r->op.take ? DIRECT_TAKE : 0;
        if (r->op.recv_runs) {
            d->recv = (uint64_t)(uintptr_t)r->op.recv;
            d->places = peri__mpi_places_of(&r->op, to);
        }
        if (near_large(send_bytes[to]) && !near_take(r, to, d)) return near_defer(r);
    }
    for (int32_t k = 1; k < size; k++) {
        int32_t from = (rank - k + size) % size;
        bool in = near_large(recv_bytes[from]), out = near_large(send_bytes[from]);
        if (!in) TRY(peri__mpi_message(r, true, from, recv + recv_at[from], recv_bytes[from]));
        if (in || out) TRY(near_note(r, true, from));
    }
    for (int32_t k = 1; k < size; k++) {
        int32_t to = (rank + k) % size;
        bool in = near_large(recv_bytes[to]), out = near_large(send_bytes[to]);
        if (!out) TRY(peri__mpi_message(r, false, to, send + send_at[to], send_bytes[to]));
        if (in || out) TRY(near_note(r, false, to));
    }
    return PERI_OK;
}

/** The job that copies from @from to @to, one of which is this rank: it claims large pieces if the copy is its
 *  business, which it is of the receiver or of the sender wherever both have about as much to copy, and the other one
 *  helps. */
static void near_pair(mpi_request *r, int32_t from, int32_t to, bool by_sender)
{
    struct near_state *s = r->near;
    bool in = to == r->group->rank;
    int32_t other = in ? from : to;
    uint64_t came = s->mine[other].recv_bytes, sent = s->mine[other].send_bytes, bytes = in ? came : sent;
    if (!near_large((int64_t)bytes)) return;
    near_add(r, from, to, in ? &s->theirs[other] : &s->mine[other], bytes, 0);
    s->jobs[s->n - 1].alone = in ? r->op.take != NULL : r->op.fill != NULL;
    s->jobs[s->n - 1].others = s->theirs[other].direct == (in ? DIRECT_FILL : DIRECT_TAKE);
    by_sender = (by_sender || r->op.fill) && !r->op.take;
    bool both = by_sender ? came > sent / 2 : sent > came / 2;
    if (in == by_sender || !(peri__mpi.crowded || both)) return;
    s->jobs[s->n - 1].own = true;
    s->jobs[s->n - 1].most = PIECE_OWN;
}

peri_status peri__mpi_near_pairs(mpi_request *r)
{
    struct near_state *s = r->near;
    int32_t rank = r->group->rank, size = r->group->size;
    /* those receive */
    bool by_sender = peri__mpi_host->copy_choice(PERI_HOST_COPY_BY) == 1 && !peri__mpi.crowded && !r->past && !r->rows;
    for (int32_t k = 1; k < size; k++) {
        int32_t other = (rank + k) % size;
        if (near_large((int64_t)s->mine[other].recv_bytes) || near_large((int64_t)s->mine[other].send_bytes))
            TRY(near_agree(r, other));
    }
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t k = 1; k < size; k++) {
            if ((pass == 0) == by_sender) near_pair(r, rank, (rank + k) % size, by_sender);
            else near_pair(r, (rank - k + size) % size, rank, by_sender);
        }
    peri__mpi_near_together(r);
    return PERI_PENDING;
}

peri_status peri__mpi_near_broadcast(mpi_request *r, uint64_t bytes)
{
    const mpi_group *g = r->group;
    int32_t root = r->op.root;
    peri__mpi_past_caches(r, (int64_t)bytes);
    TRY(near_prepare(r));
    for (int32_t i = 0; i < g->size; i++) {
        descriptor *d = &r->near->mine[i];
        if (i == g->rank || (g->rank != root && i != root)) continue;
        d->send = d->recv = (uint64_t)(uintptr_t)r->op.recv;
        *(g->rank == root ? &d->send_bytes : &d->recv_bytes) = bytes;
        if (g->rank == root && !near_take(r, i, d)) return near_defer(r);
    }
    if (g->rank != root) TRY(near_tell(r, root));
    for (int32_t i = 0; g->rank == root && i < g->size; i++)
        if (i != root) TRY(near_tell(r, i));
    return PERI_PENDING;
}

peri_status peri__mpi_near_reduce(mpi_request *r, uint64_t bytes)
{
    int32_t rank = r->group->rank, size = r->group->size;
    TRY(near_prepare(r));
    descriptor *own = &r->near->mine[rank];
    own->send = (uint64_t)(uintptr_t)r->op.send;
    own->recv = (uint64_t)(uintptr_t)r->op.recv;
    own->send_bytes = own->recv_bytes = bytes;
    if (!near_take(r, rank, own)) return near_defer(r);
    TRY(peri__mpi_take_scratch(r, (int64_t)size * (peri__mpi_near_sum_piece(size) + PIECE_REST)));
    for (int32_t k = 1; k < size; k++) r->near->mine[(rank + k) % size] = *own;
    for (int32_t k = 1; k < size; k++) TRY(near_tell(r, (rank + k) % size));
    return PERI_PENDING;
}

peri_status peri__mpi_near_parts(mpi_request *r, const int64_t *begin, const int64_t *end)
{
    struct near_state *s = r->near;
    int32_t rank = r->group->rank, size = r->group->size;
    int64_t element = peri_coll_dtype_size(r->op.dtype);
    for (int32_t k = 0; k < size; k++) {
        int32_t i = (rank + k) % size;
        if (i != rank) TRY(near_agree(r, i));
        if (end[i] == begin[i]) continue;
        const descriptor *d = i == rank ? &s->mine[i] : &s->theirs[i];
        near_add(r, i, i, d, (uint64_t)((end[i] - begin[i]) * element), (uint64_t)(begin[i] * element));
        s->jobs[s->n - 1].own = i == rank;
    }
    return PERI_PENDING;
}
