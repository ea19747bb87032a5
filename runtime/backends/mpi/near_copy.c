/* SPDX-License-Identifier: Apache-2.0
 *
 * near_copy.c: the copies and sums that a rank makes of its jobs and of those that concern it (near.c), piece by piece.
 */
#include "mpi_internal.h"
#include "../../../kernels/route.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum {
    PIECE_LEAST = 32 << 10, /* bytes of a claim: half of what is left, between this and near_job.most */
    PATIENCE = 16,          /* times that a rank of a crowded machine lets others run before it does their copies */
    LONG_RUN = 64 << 10,    /* bytes of runs that are read where they belong all the same: ids of KJTAllToAll took 1.3
                               times as long */
    JOINED = 2 << 20,       /* bytes of what is filled together at once */
    SUM_ROOM = 512 << 10    /* of the other ranks' pieces of a claim that is summed: they should stay in the cache */
};

static bool near_complete(const near_job *j)
{
    return atomic_load_explicit(&j->cell->done, memory_order_acquire) >= j->base + j->bytes;
}

/** Claim a piece of the job: its bytes, and where it begins in the job. 0: nothing is left. */
static uint64_t near_claim(const near_job *j, uint64_t *at)
{
    uint64_t end = j->base + j->bytes, next = atomic_load_explicit(&j->cell->next, memory_order_relaxed);
    while (!(next & CLOSED) && next < end) {
        uint64_t left = end - next, n = j->own ? left : left / 2 & ~(uint64_t)63;
        if (n < PIECE_LEAST) n = PIECE_LEAST;
        if (n > j->most) n = j->most;
        if (n + PIECE_REST > left) n = left;
        if (!atomic_compare_exchange_weak(&j->cell->next, &next, next + n)) continue;
        *at = next - j->base;
        return n;
    }
    return 0;
}

/** Begin to copy from or to another process; *@bytes: what was copied. */
static peri_status near_move(const mpi_request *r, int32_t other, bool read, const struct iovec *here, size_t n_here,
                             const struct iovec *there, size_t n_there, uint64_t *bytes)
{
    const peer *p = &peri__mpi.peers[r->group->ranks[other]];
    pid_t pid = (pid_t)p->pid;
    ssize_t n = read ? process_vm_readv(pid, here, n_here, there, n_there, 0)
                     : process_vm_writev(pid, here, n_here, there, n_there, 0);
    *bytes = n > 0 ? (uint64_t)n : 0;
    if (n > 0) return PERI_OK;
    int problem = errno;
    world_rank place = peri__mpi_world_rank(r->group, other);
    if (n < 0 && problem == ESRCH)
        return FAIL(PERI_EPEER, "rank %d (%sprocess %lld) is gone", other, place.text, (long long)p->pid);
    return FAIL(PERI_EPEER, "copying %s rank %d (%sprocess %lld): %s", read ? "from" : "to", other, place.text,
                (long long)p->pid, n == 0 ? "nothing was copied" : strerror(problem));
}

/** Bytes of another rank's memory, if this process has mapped them; else NULL. */
static char *near_mapped(const mpi_request *r, int32_t other, uint64_t there, uint64_t bytes)
{
    return peri__mpi_heap_at(r->group->ranks[other], there, bytes);
}

/** @past: what is written goes past the caches, where that is this process's choice. */
static peri_status near_copy(const mpi_request *r, int32_t other, bool read, void *here, uint64_t there, uint64_t bytes,
                             bool past)
{
    uint64_t n = 0;
    char *mapped = near_mapped(r, other, there, bytes);
    if (mapped) {
        peri__mpi_put(read ? here : mapped, read ? mapped : here, (int64_t)bytes, past);
        return PERI_OK;
    }
    for (uint64_t at = 0; at < bytes; at += n) {
        struct iovec a = {(char *)here + at, bytes - at}, b = {(void *)(uintptr_t)(there + at), bytes - at};
        TRY(near_move(r, other, read, &a, 1, &b, 1, &n));
    }
    return PERI_OK;
}

/** This process's buffer of PERI_HOST_COPY_BLOCK_MOST bytes for copies from block to block, on a huge page. The first
 *  call makes it, later calls return the same. NULL: there is no memory for it. */
static char *near_bounce(void)
{
    enum { HUGE = 2 << 20 };
    if (peri__mpi.bounce) return peri__mpi.bounce;
    void *block = mmap(NULL, 2 * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return NULL;
    peri__mpi.bounce = (char *)(((uintptr_t)block + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    madvise(peri__mpi.bounce, HUGE, MADV_HUGEPAGE);
    return peri__mpi.bounce;
}

/** Cut bytes [*next, end) of what comes into the pieces that lie together where they belong, @most of them at most.
 *  Returns how many; *next is where they end. */
static size_t near_cut(const places *p, uint64_t width, uint64_t placed, uint64_t *next, uint64_t end,
                       struct iovec *pieces, size_t most)
{
    size_t count = 0;
    uint64_t at = *next;
    for (int64_t i = peri__mpi_first_run(p, (int64_t)(at / width)); i < p->n && count < most && at < end; i++) {
        uint64_t line = (uint64_t)p->runs[i].n * width, from = at - (uint64_t)p->runs[i].from * width;
        if (line == 0) continue;
        uint64_t k = from / line, skip = from % line,
                 place = placed + ((uint64_t)p->runs[i].to + k * (uint64_t)p->step) * width + skip;
        for (; k < (uint64_t)p->lines && count < most && at < end; k++, skip = 0) {
            uint64_t some = line - skip < end - at ? line - skip : end - at;
            pieces[count++] = (struct iovec){(void *)(uintptr_t)place, some};
            at += some;
            place += (uint64_t)p->step * width - skip;
        }
    }
    *next = at;
    return count;
}

/** Copy @bytes of rank @from's data, from byte @first of what @to gets from everybody on, to the places that @p gives
 *  them. @placed: address in @to's process from which the runs count; @joined: where the bytes lie in @from's. One of
 *  the two ranks is this one. What is written past the caches is read into a block that stays in them first: a system
 *  call writes through them, and row by row. What is mapped needs neither. */
static peri_status near_place(const mpi_request *r, int32_t from, int32_t to, const places *p, uint64_t placed,
                              uint64_t first, uint64_t joined, uint64_t bytes)
{
    enum { MOST = 512 };
    struct iovec pieces[MOST];
    bool read = to == r->group->rank;
    uint64_t width = (uint64_t)peri_coll_dtype_size(r->op.dtype), n = 0;
    const peri_k_run *last = &p->runs[p->n - 1];
    int64_t lines = p->n * p->lines,
            mean = (last->from + last->n * p->lines - p->runs[0].from) / lines * (int64_t)width;
    /* as of PERI_HOST_COPY_ROWS */
    int64_t way = !read ? 0 : lines == 1 ? (r->past ? 2 : 0) : mean < LONG_RUN ? r->rows : 0;
    const char *mapped = read ? near_mapped(r, from, joined, bytes) : NULL;
    char *bounce = way && !mapped ? near_bounce() : NULL;
    uint64_t block = (uint64_t)peri__mpi_host->copy_choice(PERI_HOST_COPY_BLOCK);
    for (uint64_t at = 0; at < bytes; at += n) {
        uint64_t stop = bounce && bytes - at > block ? at + block : bytes, next = first + at;
        size_t count = near_cut(p, width, placed, &next, first + stop, pieces, MOST);
        uint64_t some = next - first - at;
        if (some == 0) return FAIL(PERI_EFORMAT, "rank %d has no place for what comes from rank %d", to, from);
        struct iovec whole = {(void *)(uintptr_t)(joined + at), some};
        if (bounce || mapped) {
            peri_k_run runs[MOST];
            n = some;
            if (bounce) TRY(near_copy(r, from, true, bounce, joined + at, some, false));
            for (size_t i = 0, x = 0; i < count; x += pieces[i++].iov_len)
                runs[i] = (peri_k_run){.to = (int64_t)((uintptr_t)pieces[i].iov_base - placed),
                                       .from = (int64_t)x,
                                       .n = (int64_t)pieces[i].iov_len};
            peri_k_route_place_args args = {.dst = (void *)(uintptr_t)placed,
                                            .received = mapped ? mapped + at : bounce,
                                            .runs = runs,
                                            .width = 1,
                                            .past = way == 2};
            peri__mpi_place_range(&args, 0, (int64_t)count);
        } else {
            TRY(read ? near_move(r, from, true, pieces, count, &whole, 1, &n)
                     : near_move(r, to, false, &whole, 1, pieces, count, &n));
        }
    }
    return PERI_OK;
}

/** The runs of rank @to, which is being helped. It keeps them until its operation is complete. */
static peri_status near_fetch(mpi_request *r, int32_t to, const peri_k_run **runs)
{
    peri_k_run **kept = &r->near->fetched[to];
    const descriptor *d = &r->near->theirs[to];
    if (!*kept) {
        size_t bytes = sizeof **kept * (size_t)d->places.n;
        peri_k_run *copy = peri__mpi_host->alloc(bytes);
        if (!copy) return PERI_ENOMEM;
        peri_status status = near_copy(r, to, true, copy, (uint64_t)(uintptr_t)d->places.runs, bytes, false);
        if (status < 0) {
            peri__mpi_host->free(copy);
            return status;
        }
        *kept = copy;
    }
    *runs = *kept;
    return PERI_OK;
}

/** Sum bytes [at, at + n) of the part of @j over all ranks, and put the sum where it belongs. */
static peri_status near_sum(mpi_request *r, const near_job *j, uint64_t at, uint64_t n)
{
    const mpi_group *g = r->group;
    const descriptor *theirs = r->near->theirs;
    bool everybody = r->op.kind == PERI_COLL_ALL_REDUCE;
    uint64_t from = j->at + at, to = everybody ? from : at;
    int64_t stride = peri__mpi_near_sum_piece(g->size) + PIECE_REST;
    const void *src[NEAR_RANKS];
    for (int32_t i = 0; i < g->size; i++) {
        char *room = r->scratch + (i < g->rank ? i : i - 1) * stride;
        const char *mapped =
            i == g->rank ? (const char *)r->op.send + from : near_mapped(r, i, theirs[i].send + from, n);
        src[i] = mapped ? mapped : room;
        if (!mapped) TRY(near_copy(r, i, true, room, theirs[i].send + from, n, false));
    }
    char *there = everybody || j->to == g->rank ? NULL : near_mapped(r, j->to, theirs[j->to].recv + to, n);
    char *sum = everybody || j->to == g->rank ? (char *)r->op.recv + to
                : there                       ? there
                                              : r->scratch + (g->size - 1) * stride;
    peri__mpi_sum_of(r, sum, src, (int64_t)n / peri_coll_dtype_size(r->op.dtype));
    for (int32_t i = 0; i < g->size; i++)
        if (i != g->rank && !there && (everybody || i == j->to))
            TRY(near_copy(r, i, false, sum, theirs[i].recv + to, n, false));
    return PERI_OK;
}

/** Bytes [at, at + n) of a job with a function of this rank's: on the other rank's memory, or through a block that
 *  stays in the caches. */
static peri_status near_direct(const mpi_request *r, const near_job *j, uint64_t at, uint64_t n)
{
    const uint64_t width = (uint64_t)peri_coll_dtype_size(r->op.dtype),
                   most = (uint64_t)peri__mpi_host->copy_choice(PERI_HOST_COPY_BLOCK);
    const bool read = j->to == r->group->rank;
    const uint64_t there = read ? r->near->theirs[j->from].send : r->near->theirs[j->to].recv;
    const int64_t first = peri__mpi_first_of(&r->op, read ? j->from : j->to);
    char *mapped = near_mapped(r, read ? j->from : j->to, there + at, n), *block = mapped ? NULL : near_bounce();
    if (mapped) {
        const int64_t from = first + (int64_t)(at / width), count = (int64_t)(n / width);
        if (read) r->op.take(r->op.ctx, from, count, mapped);
        else r->op.fill(r->op.ctx, &(peri_coll_stretch){from, count, mapped}, 1, true);
        return PERI_OK;
    }
    if (!block) return FAIL(PERI_ENOMEM, "no room for a block of %llu bytes", (unsigned long long)most);
    for (uint64_t some; n > 0; at += some, n -= some) {
        some = n < most ? n : most;
        const int64_t from = first + (int64_t)(at / width), count = (int64_t)(some / width);
        if (!read) r->op.fill(r->op.ctx, &(peri_coll_stretch){from, count, block}, 1, false);
        TRY(near_copy(r, read ? j->from : j->to, read, block, there + at, some, false));
        if (read) r->op.take(r->op.ctx, from, count, block);
    }
    return PERI_OK;
}

static peri_status near_piece(mpi_request *r, const near_job *j, uint64_t at, uint64_t n)
{
    const struct near_state *s = r->near;
    if (j->from == j->to) return near_sum(r, j, at, n);
    if (j->alone) return near_direct(r, j, at, n);
    bool read = j->to == r->group->rank;
    const descriptor *to = read ? &s->mine[j->from] : &s->theirs[j->to],
                     *from = read ? &s->theirs[j->from] : &s->mine[j->to];
    if (to->places.n > 0) {
        places p = to->places;
        if (!read) TRY(near_fetch(r, j->to, &p.runs));
        uint64_t first = (uint64_t)p.runs[0].from * (uint64_t)peri_coll_dtype_size(r->op.dtype);
        return near_place(r, j->from, j->to, &p, to->recv, first + at, from->send + at, n);
    }
    if (read && r->past) {
        peri_k_run whole = {.n = (int64_t)j->bytes / peri_coll_dtype_size(r->op.dtype)};
        return near_place(r, j->from, j->to, &(places){&whole, 1, 1, 0}, to->recv, at, from->send + at, n);
    }
    if (read) return near_copy(r, j->from, true, (char *)(uintptr_t)to->recv + at, from->send + at, n, r->past);
    return near_copy(r, j->to, false, (char *)(uintptr_t)from->send + at, to->recv + at, n, r->past);
}

void peri__mpi_near_together(mpi_request *r)
{
    struct near_state *s = r->near;
    uint64_t bytes = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < s->n && r->op.fill; i++) {
        near_job *j = &s->jobs[i];
        j->joined = j->alone && near_mapped(r, j->to, s->theirs[j->to].recv, j->bytes);
        n += j->joined;
        bytes += j->joined ? j->bytes : 0;
    }
    for (int32_t i = 0; i < s->n; i++) {
        near_job *j = &s->jobs[i];
        j->joined = j->joined && n > 1;
        j->own = j->own || j->joined;
        /* so that all end at about the same time */
        if (j->joined) j->most = (j->bytes / (1 + bytes / JOINED) + 64) & ~(uint64_t)63;
    }
}

/** Fill a part of each joined job. False: nothing was left. */
static bool near_fill_joined(const mpi_request *r)
{
    struct near_state *s = r->near;
    const uint64_t width = (uint64_t)peri_coll_dtype_size(r->op.dtype);
    peri_coll_stretch parts[NEAR_RANKS];
    near_job *of[NEAR_RANKS];
    uint64_t bytes[NEAR_RANKS];
    int32_t count = 0;
    for (int32_t i = 0; i < s->n; i++) {
        near_job *j = &s->jobs[i];
        uint64_t at = 0, n = j->joined ? near_claim(j, &at) : 0;
        if (!n) continue;
        of[count] = j;
        bytes[count] = n;
        parts[count++] =
            (peri_coll_stretch){peri__mpi_first_of(&r->op, j->to) + (int64_t)(at / width), (int64_t)(n / width),
                                near_mapped(r, j->to, s->theirs[j->to].recv + at, n)};
    }
    if (count) r->op.fill(r->op.ctx, parts, count, true);
    for (int32_t i = 0; i < count; i++) atomic_fetch_add_explicit(&of[i]->cell->done, bytes[i], memory_order_release);
    return count > 0;
}

peri_status peri__mpi_near_step(mpi_request *r, bool *idle)
{
    struct near_state *s = r->near;
    *idle = !near_fill_joined(r);
    for (; s->cursor < s->n && *idle; s->cursor++) {
        const near_job *j = &s->jobs[s->cursor];
        if (j->others || j->joined) continue;
        if (peri__mpi.crowded && !j->alone && j->to != r->group->rank && s->waited < PATIENCE) break;
        uint64_t at = 0, n = near_claim(j, &at);
        if (!n) continue;
        *idle = false;
        peri_status status = near_piece(r, &s->jobs[s->cursor], at, n);
        if (status < 0) peri__mpi_near_close(r->group); /* before the piece counts as done */
        atomic_fetch_add_explicit(&s->jobs[s->cursor].cell->done, n, memory_order_release);
        if (status < 0) return status;
        break;
    }
    s->waited += *idle;
    for (int32_t i = 0; i < s->n; i++)
        if (!near_complete(&s->jobs[i])) return PERI_PENDING;
    if (atomic_load(&r->group->shared->failed)) return PERI_PENDING; /* the reason is on its way */
    return PERI_OK;
}

void peri__mpi_near_waited_for(const mpi_request *r, bool *members)
{
    const struct near_state *s = r->near;
    for (int32_t i = 0; i < s->n; i++) {
        const near_job *j = &s->jobs[i];
        if (near_complete(j)) continue;
        for (int32_t k = 0; k < r->group->size; k++)
            if (k != r->group->rank && (j->from == j->to || k == j->from || k == j->to)) members[k] = true;
    }
}

int64_t peri__mpi_near_sum_piece(int32_t size)
{
    int64_t piece = SUM_ROOM / (size - 1);
    return piece < PIECE_LEAST ? PIECE_LEAST : piece & ~(int64_t)63;
}
