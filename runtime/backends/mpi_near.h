/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_near.h: part of mpi.c: ranks of one machine copy large data straight from memory to memory (process_vm_readv, process_vm_writev), and
 * whichever of the ranks concerned has time does it: a rank that computes neither sends nor receives, its waiting peers do both.
 *
 * For an operation every rank sends the others a descriptor: where its data is and where data may be put. Its copies are *jobs*; a job's
 * progress is a cell in memory that the group shares. A rank that knows both ends of a job claims a piece of it (cell.next), copies it,
 * and counts it as done (cell.done). The job is complete for everybody when done reaches its end, also for a rank that did nothing.
 *
 * Cells are used again for later jobs, but never go back to zero: they count bytes upwards for ever, so a rank that looks late at a cell in
 * new use sees its own job complete. A rank that gives up closes all cells of the group: nobody can claim any more, and its buffers are
 * free when all claims are done (near_quiet).
 */

enum {
    NEAR_RANKS = 64,          /* largest group that has cells */
    NEAR_CELLS = 32,          /* per ordered pair of ranks */
    PIECE_LEAST = 32 << 10,   /* bytes of a claim that others might make too: half of what is left, within these bounds */
    PIECE_MOST = 512 << 10,
    PIECE_OWN = 1 << 20,      /* of a claim that others make only if this rank has no time: a system call costs as much as 16 KiB */
    PATIENCE = 16,            /* times that a rank of a crowded machine lets others run before it does their copies */
    LONG_RUN = 64 << 10,      /* bytes of runs that are read where they belong all the same: ids of KJTAllToAll took 1.3 times as long */
    SUM_ROOM = 512 << 10,     /* of the other ranks' pieces of a claim that is summed: they should stay in the cache */
    PIECE_REST = 16 << 10     /* the last claim takes so much more rather than leave it */
};

#define CLOSED ((uint64_t)1 << 63)
#define NOTE_MARK 0x6e656172u /* in each descriptor */

typedef struct near_cell {
    _Alignas(64) atomic_uint_least64_t next; /* bytes claimed since ever; CLOSED: no more */
    atomic_uint_least64_t done;              /* of these, bytes copied */
} near_cell;

/** Memory shared by a group: a header, then a cell for each (from, to, k). Reductions use the cells of (owner, owner). */
typedef struct near_shared {
    _Alignas(64) atomic_int failed; /* a copy failed or a rank gave up: complete jobs prove nothing */
    near_cell cells[];
} near_shared;

/** What a rank tells another about an operation. */
typedef struct descriptor {
    uint64_t send, recv;             /* addresses in its process */
    uint64_t send_bytes, recv_bytes; /* to and from the receiver of this note */
    places places;                   /* of its data, recv being where runs count from; runs: an address in its process; n = 0: none */
    uint64_t base;                   /* of the cell that it chose for its job */
    int32_t cell;                    /* -1: it has no job */
    uint32_t mark;
} descriptor;

/** A copy, or a sum, that several ranks may work on. */
typedef struct near_job {
    near_cell *cell;
    uint64_t base, bytes;
    int32_t from, to; /* ranks of the group; sums: both the owner of the part */
    uint64_t at;      /* sums: first byte of the part in the vectors */
    uint64_t most;    /* bytes of a claim, but for PIECE_REST */
    bool own;         /* this rank should do it: it receives, and sends about as much, which its peer does */
} near_job;

struct near_state {
    near_job *jobs;
    int32_t n, cursor;       /* jobs; the first that may have something to claim */
    int32_t waited;          /* steps that found nothing to do */
    uint32_t *held;          /* own cells in use, by peer: bits */
    descriptor *mine, *theirs;
    peri_k_run **fetched;    /* by peer: its runs, read when this rank first helps it */
};

/** Bytes of each vector that are summed at once. */
static int64_t near_sum_piece(int32_t size)
{
    int64_t piece = SUM_ROOM / (size - 1);
    return piece < PIECE_LEAST ? PIECE_LEAST : piece & ~(int64_t)63;
}

static size_t near_bytes(int32_t size) { return sizeof(near_shared) + sizeof(near_cell) * (size_t)size * (size_t)size * NEAR_CELLS; }

static near_cell *near_cell_at(const mpi_group *g, int32_t from, int32_t to, int32_t k)
{
    return &g->shared->cells[((int64_t)from * g->size + to) * NEAR_CELLS + k];
}

/** Nobody may claim anything of @g and of the groups made from it any more. */
static void near_close(const mpi_group *g)
{
    for (const mpi_group *x = mpi.groups; x; x = x->next) {
        const mpi_group *up = x;
        while (up && up != g) up = up->parent;
        if (!up || !x->shared || atomic_load(&x->shared->failed)) continue;
        atomic_store(&x->shared->failed, 1);
        for (int64_t i = 0, n = (int64_t)x->size * x->size * NEAR_CELLS; i < n; i++) atomic_fetch_or(&x->shared->cells[i].next, CLOSED);
    }
}

/** After near_close: true when no copy of the group is under way. */
static bool near_quiet(const mpi_group *g)
{
    for (int64_t i = 0, n = (int64_t)g->size * g->size * NEAR_CELLS; i < n; i++) {
        uint64_t done = atomic_load(&g->shared->cells[i].done), next = atomic_load(&g->shared->cells[i].next);
        if (!(next & CLOSED)) return false; /* who failed first is closing them right now */
        if ((next & ~CLOSED) != done) return false;
    }
    return true;
}

/* -- the shared memory ----------------------------------------------------------------------------------------------------------- */

/** Can this process reach the memory of the others, both ways? @ranks of the world on this node. */
static bool near_reach(const int32_t *ranks, const int64_t *words, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const peer *p = &mpi.peers[ranks[i]];
        int64_t copy = 0;
        struct iovec here = {&copy, sizeof copy}, there = {(void *)(uintptr_t)words[i], sizeof copy};
        if (p->machine != mpi.peers[mpi.rank].machine) return false;
        if (process_vm_readv((pid_t)p->pid, &here, 1, &there, 1, 0) != sizeof copy || copy != p->pid) return false;
        if (process_vm_writev((pid_t)p->pid, &here, 1, &there, 1, 0) != sizeof copy) return false;
    }
    return true;
}

/** Map what the first rank of the group made. Collective over @comm, like all of near_join. */
static void *near_map(MPI_Comm comm, int32_t rank, int32_t size, uint64_t tag)
{
    char name[64] = "";
    int fd = -1, ok, all = 0;
    if (rank == 0) {
        snprintf(name, sizeof name, "/perilune-%lld-%llx", (long long)getpid(), (unsigned long long)tag);
        fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
        if (fd >= 0 && ftruncate(fd, (off_t)near_bytes(size)) != 0) close(fd), fd = -1;
    }
    if (MPI_Bcast(name, sizeof name, MPI_BYTE, 0, comm) != MPI_SUCCESS) return NULL;
    if (rank != 0) fd = shm_open(name, O_RDWR, 0600);
    void *block = fd < 0 ? MAP_FAILED : mmap(NULL, near_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    ok = block != MAP_FAILED;
    int code = MPI_Allreduce(&ok, &all, 1, MPI_INT, MPI_MIN, comm);
    if (rank == 0) shm_unlink(name);
    if (code == MPI_SUCCESS && all) return block;
    if (ok) munmap(block, near_bytes(size));
    return NULL;
}

/** Give a new group its cells if all its ranks can reach each other. Blocks; collective over the members. Without cells, everything goes
 *  by messages. */
static void near_join(mpi_group *g)
{
    static int64_t word; /* what the others read and write */
    if (!g->parent) { /* a message and a job look different to the receiver */
        mpi.near_least = host->copy_choice(PERI_HOST_COPY_NEAR);
        MPI_Bcast(&mpi.near_least, 1, MPI_INT64_T, 0, g->comm);
    }
    if (g->size < 2 || g->size > NEAR_RANKS) return;
    const char *off = getenv("PERI_MPI_NEAR");
    int64_t own = (int64_t)(uintptr_t)&word, words[NEAR_RANKS];
    word = getpid();
    int ok = MPI_Allgather(&own, 1, MPI_INT64_T, words, 1, MPI_INT64_T, g->comm) == MPI_SUCCESS, all = 0;
    ok = ok && !(off && strcmp(off, "0") == 0) && near_reach(g->ranks, words, g->size);
    if (MPI_Allreduce(&ok, &all, 1, MPI_INT, MPI_MIN, g->comm) != MPI_SUCCESS || !all) return;
    g->used = host->alloc_zero(sizeof *g->used * (size_t)g->size);
    if (g->used) g->shared = near_map(g->comm, g->rank, g->size, g->tag ^ (uint64_t)mpi.epoch << 32);
}

static void near_leave(mpi_group *g)
{
    if (g->shared) munmap(g->shared, near_bytes(g->size));
    g->shared = NULL;
    host->free(g->used);
}

/* -- setting up ------------------------------------------------------------------------------------------------------------------ */

static peri_status near_prepare(mpi_request *r)
{
    size_t n = (size_t)r->group->size;
    struct near_state *s = host->alloc_zero(sizeof *s + n * (2 * sizeof(near_job) + 2 * sizeof(descriptor) + sizeof(peri_k_run *) +
                                                             sizeof(uint32_t)));
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
    d->base = atomic_load(&near_cell_at(g, g->rank, to, k)->done);
    return true;
}

static void near_give(mpi_request *r)
{
    mpi_group *g = r->group;
    if (!r->near) return;
    for (int32_t i = 0; i < g->size; i++) {
        g->used[i] &= ~r->near->held[i];
        host->free(r->near->fetched[i]);
    }
    host->free(r->near);
    r->near = NULL;
}

/** Send or receive a descriptor. */
static peri_status near_note(mpi_request *r, bool receive, int32_t other)
{
    TRY(message(r, receive, other, receive ? &r->near->theirs[other] : &r->near->mine[other], sizeof(descriptor)));
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
    s->jobs[s->n++] = (near_job){
        .cell = near_cell_at(r->group, from, to, d->cell), .base = d->base, .bytes = bytes, .from = from, .to = to, .at = at,
        .most = from == to ? (uint64_t)near_sum_piece(r->group->size) : PIECE_MOST};
}

/** Both descriptors of a pair must agree on sizes. */
static peri_status near_agree(const mpi_request *r, int32_t other)
{
    const descriptor *mine = &r->near->mine[other], *theirs = &r->near->theirs[other];
    int32_t rank = r->group->rank;
    long long element = size_of(r->op.dtype);
    if (theirs->mark != NOTE_MARK)
        return PERI_HOST_FAIL(host, PERI_EMISMATCH, "rank %d sent data where rank %d expects another size", other, rank);
    if (theirs->send_bytes != mine->recv_bytes)
        return PERI_HOST_FAIL(host, PERI_EMISMATCH, "rank %d sends %lld elements to rank %d, which expects %lld", other,
                              (long long)theirs->send_bytes / element, rank, (long long)mine->recv_bytes / element);
    if (theirs->recv_bytes != mine->send_bytes)
        return PERI_HOST_FAIL(host, PERI_EMISMATCH, "rank %d sends %lld elements to rank %d, which expects %lld", rank,
                              (long long)mine->send_bytes / element, other, (long long)theirs->recv_bytes / element);
    return PERI_OK;
}

/* -- working ------------------------------------------------------------------------------------------------------------------------ */

static bool near_complete(const near_job *j) { return atomic_load_explicit(&j->cell->done, memory_order_acquire) >= j->base + j->bytes; }

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
    const peer *p = &mpi.peers[r->group->ranks[other]];
    pid_t pid = (pid_t)p->pid;
    ssize_t n = read ? process_vm_readv(pid, here, n_here, there, n_there, 0) : process_vm_writev(pid, here, n_here, there, n_there, 0);
    if (n <= 0 && errno == ESRCH) return PERI_HOST_FAIL(host, PERI_EPEER, "rank %d (process %lld) is gone", other, (long long)p->pid);
    if (n <= 0)
        return PERI_HOST_FAIL(host, PERI_EPEER, "copying %s rank %d (process %lld): %s", read ? "from" : "to", other, (long long)p->pid,
                              n == 0 ? "nothing was copied" : strerror(errno));
    *bytes = (uint64_t)n;
    return PERI_OK;
}

static peri_status near_copy(const mpi_request *r, int32_t other, bool read, void *here, uint64_t there, uint64_t bytes)
{
    uint64_t n = 0;
    for (uint64_t at = 0; at < bytes; at += n) {
        struct iovec a = {(char *)here + at, bytes - at}, b = {(void *)(uintptr_t)(there + at), bytes - at};
        TRY(near_move(r, other, read, &a, 1, &b, 1, &n));
    }
    return PERI_OK;
}

/** Room for PERI_HOST_COPY_BLOCK_MOST bytes, on a huge page; NULL: none to be had. */
static char *near_bounce(void)
{
    enum { HUGE = 2 << 20 };
    if (mpi.bounce) return mpi.bounce;
    void *block = mmap(NULL, 2 * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return NULL;
    mpi.bounce = (char *)(((uintptr_t)block + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    madvise(mpi.bounce, HUGE, MADV_HUGEPAGE);
    return mpi.bounce;
}

/** Cut bytes [*next, end) of what comes into the pieces that lie together where they belong, @most of them at most. Returns how many; *next
 *  is where they end. */
static size_t near_cut(const places *p, uint64_t width, uint64_t placed, uint64_t *next, uint64_t end, struct iovec *pieces, size_t most)
{
    size_t count = 0;
    uint64_t at = *next;
    for (int64_t i = first_run(p, (int64_t)(at / width)); i < p->n && count < most && at < end; i++) {
        uint64_t line = (uint64_t)p->runs[i].n * width, from = at - (uint64_t)p->runs[i].from * width;
        if (line == 0) continue;
        uint64_t k = from / line, skip = from % line, place = placed + ((uint64_t)p->runs[i].to + k * (uint64_t)p->step) * width + skip;
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

/** Copy @bytes of rank @from's data, from byte @first of what @to gets from everybody on, to the places that @p gives them. @placed:
 *  address in @to's process from which the runs count; @joined: where the bytes lie in @from's. One of the two ranks is this one.
 *  What is written past the caches is read into a block that stays in them first: a system call writes through them, and row by row. */
static peri_status near_place(const mpi_request *r, int32_t from, int32_t to, const places *p, uint64_t placed, uint64_t first,
                              uint64_t joined, uint64_t bytes)
{
    enum { MOST = 512 };
    struct iovec pieces[MOST];
    bool read = to == r->group->rank;
    uint64_t width = (uint64_t)size_of(r->op.dtype), n = 0;
    const peri_k_run *last = &p->runs[p->n - 1];
    int64_t lines = p->n * p->lines, mean = (last->from + last->n * p->lines - p->runs[0].from) / lines * (int64_t)width;
    int64_t way = !read ? 0 : lines == 1 ? (r->past ? 2 : 0) : mean < LONG_RUN ? r->rows : 0; /* as of PERI_HOST_COPY_ROWS */
    char *bounce = way ? near_bounce() : NULL;
    uint64_t block = (uint64_t)host->copy_choice(PERI_HOST_COPY_BLOCK);
    for (uint64_t at = 0; at < bytes; at += n) {
        uint64_t stop = bounce && bytes - at > block ? at + block : bytes, next = first + at;
        size_t count = near_cut(p, width, placed, &next, first + stop, pieces, MOST);
        uint64_t some = next - first - at;
        if (some == 0) return PERI_HOST_FAIL(host, PERI_EFORMAT, "rank %d has no place for what comes from rank %d", to, from);
        struct iovec whole = {(void *)(uintptr_t)(joined + at), some};
        if (bounce) {
            peri_k_run runs[MOST];
            TRY(near_copy(r, from, true, bounce, joined + at, n = some));
            for (size_t i = 0, x = 0; i < count; x += pieces[i++].iov_len)
                runs[i] = (peri_k_run){
                    .to = (int64_t)((uintptr_t)pieces[i].iov_base - placed), .from = (int64_t)x, .n = (int64_t)pieces[i].iov_len};
            peri_k_route_place_args args = {
                .dst = (void *)(uintptr_t)placed, .received = bounce, .runs = runs, .width = 1, .past = way == 2};
            place_range(&args, 0, (int64_t)count);
        } else {
            TRY(read ? near_move(r, from, true, pieces, count, &whole, 1, &n) : near_move(r, to, false, &whole, 1, pieces, count, &n));
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
        peri_k_run *copy = host->alloc(bytes);
        if (!copy) return PERI_ENOMEM;
        peri_status status = near_copy(r, to, true, copy, (uint64_t)(uintptr_t)d->places.runs, bytes);
        if (status < 0) {
            host->free(copy);
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
    int64_t stride = near_sum_piece(g->size) + PIECE_REST;
    for (int32_t i = 0; i < g->size; i++)
        if (i != g->rank) TRY(near_copy(r, i, true, r->scratch + (i < g->rank ? i : i - 1) * stride, theirs[i].send + from, n));
    char *sum = everybody || j->to == g->rank ? (char *)r->op.recv + to : r->scratch + (g->size - 1) * stride;
    TRY(sum_up(r, sum, (const char *)r->op.send + from, r->scratch, (int64_t)n / size_of(r->op.dtype), stride));
    for (int32_t i = 0; i < g->size; i++)
        if (i != g->rank && (everybody || i == j->to)) TRY(near_copy(r, i, false, sum, theirs[i].recv + to, n));
    return PERI_OK;
}

static peri_status near_piece(mpi_request *r, const near_job *j, uint64_t at, uint64_t n)
{
    const struct near_state *s = r->near;
    if (j->from == j->to) return near_sum(r, j, at, n);
    bool read = j->to == r->group->rank;
    const descriptor *to = read ? &s->mine[j->from] : &s->theirs[j->to], *from = read ? &s->theirs[j->from] : &s->mine[j->to];
    if (to->places.n > 0) {
        places p = to->places;
        if (!read) TRY(near_fetch(r, j->to, &p.runs));
        uint64_t first = (uint64_t)p.runs[0].from * (uint64_t)size_of(r->op.dtype);
        return near_place(r, j->from, j->to, &p, to->recv, first + at, from->send + at, n);
    }
    if (read && r->past) {
        peri_k_run whole = {.n = (int64_t)j->bytes / size_of(r->op.dtype)};
        return near_place(r, j->from, j->to, &(places){&whole, 1, 1, 0}, to->recv, at, from->send + at, n);
    }
    if (read) return near_copy(r, j->from, true, (char *)(uintptr_t)to->recv + at, from->send + at, n);
    return near_copy(r, j->to, false, (char *)(uintptr_t)from->send + at, to->recv + at, n);
}

/** Copy a piece of what is left. PERI_OK: the operation is complete; *@idle: there is nothing left to claim. */
static peri_status near_step(mpi_request *r, bool *idle)
{
    struct near_state *s = r->near;
    *idle = true;
    for (; s->cursor < s->n; s->cursor++) {
        if (mpi.crowded && s->jobs[s->cursor].to != r->group->rank && s->waited < PATIENCE) break;
        uint64_t at = 0, n = near_claim(&s->jobs[s->cursor], &at);
        if (!n) continue;
        *idle = false;
        peri_status status = near_piece(r, &s->jobs[s->cursor], at, n);
        if (status < 0) near_close(r->group); /* before the piece counts as done */
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

/** The ranks on which unfinished jobs depend. */
static void near_waited_for(const mpi_request *r, bool *members)
{
    const struct near_state *s = r->near;
    for (int32_t i = 0; i < s->n; i++) {
        const near_job *j = &s->jobs[i];
        if (near_complete(j)) continue;
        for (int32_t k = 0; k < r->group->size; k++)
            if (k != r->group->rank && (j->from == j->to || k == j->from || k == j->to)) members[k] = true;
    }
}

/* -- starting ------------------------------------------------------------------------------------------------------------------------ */

static bool near_large(int64_t bytes) { return bytes > mpi.near_least; }

/** Every rank receives and sends about @bytes together, which may only run through the caches of the machine: choose how. */
static void past_caches(mpi_request *r, int64_t bytes)
{
    int64_t all = bytes > INT64_MAX / r->group->size ? INT64_MAX : bytes * r->group->size;
    if (!r->group->shared || all < PERI_HOST_COPY_LARGE) return;
    int64_t least = host->copy_choice(PERI_HOST_COPY_PAST);
    r->past = least > 0 && all >= least;
    r->rows = r->op.recv_runs ? host->copy_choice(PERI_HOST_COPY_ROWS) : 0;
}

/** No cell is free: start again when some operation has ended. */
static peri_status near_defer(mpi_request *r)
{
    near_give(r);
    r->deferred = true;
    return PERI_PENDING;
}

/** Start an exchange with everybody: small data themselves, a descriptor where either direction is large. */
static peri_status near_exchange(mpi_request *r, char *recv, const int64_t *recv_at, const int64_t *recv_bytes, const char *send,
                                 const int64_t *send_at, const int64_t *send_bytes)
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
        if (r->op.recv_runs) {
            d->recv = (uint64_t)(uintptr_t)r->op.recv;
            d->places = places_of(&r->op, to);
        }
        if (near_large(send_bytes[to]) && !near_take(r, to, d)) return near_defer(r);
    }
    for (int32_t k = 1; k < size; k++) {
        int32_t from = (rank - k + size) % size;
        bool in = near_large(recv_bytes[from]), out = near_large(send_bytes[from]);
        if (!in) TRY(message(r, true, from, recv + recv_at[from], recv_bytes[from]));
        if (in || out) TRY(near_note(r, true, from));
    }
    for (int32_t k = 1; k < size; k++) {
        int32_t to = (rank + k) % size;
        bool in = near_large(recv_bytes[to]), out = near_large(send_bytes[to]);
        if (!out) TRY(message(r, false, to, send + send_at[to], send_bytes[to]));
        if (in || out) TRY(near_note(r, false, to));
    }
    return PERI_OK;
}

/** The job that copies from @from to @to, one of which is this rank: it claims large pieces if the copy is its business, which it is of the
 *  receiver or of the sender wherever both have about as much to copy, and the other one helps. */
static void near_pair(mpi_request *r, int32_t from, int32_t to, bool by_sender)
{
    struct near_state *s = r->near;
    bool in = to == r->group->rank;
    int32_t other = in ? from : to;
    uint64_t came = s->mine[other].recv_bytes, sent = s->mine[other].send_bytes, bytes = in ? came : sent;
    if (!near_large((int64_t)bytes)) return;
    near_add(r, from, to, in ? &s->theirs[other] : &s->mine[other], bytes, 0);
    bool both = by_sender ? came > sent / 2 : sent > came / 2;
    if (in == by_sender || !(mpi.crowded || both)) return;
    s->jobs[s->n - 1].own = true;
    s->jobs[s->n - 1].most = PIECE_OWN;
}

/** The descriptors of pairs are here: make the jobs, this rank's own first, each rank beginning with another one. */
static peri_status near_pairs(mpi_request *r)
{
    struct near_state *s = r->near;
    int32_t rank = r->group->rank, size = r->group->size;
    bool by_sender = host->copy_choice(PERI_HOST_COPY_BY) == 1 && !mpi.crowded && !r->past && !r->rows; /* those receive */
    for (int32_t k = 1; k < size; k++) {
        int32_t other = (rank + k) % size;
        if (near_large((int64_t)s->mine[other].recv_bytes) || near_large((int64_t)s->mine[other].send_bytes)) TRY(near_agree(r, other));
    }
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t k = 1; k < size; k++) {
            if ((pass == 0) == by_sender) near_pair(r, rank, (rank + k) % size, by_sender);
            else near_pair(r, (rank - k + size) % size, rank, by_sender);
        }
    return PERI_PENDING;
}

/** From the root to everybody: a pair each. */
static peri_status near_broadcast(mpi_request *r, uint64_t bytes)
{
    const mpi_group *g = r->group;
    int32_t root = r->op.root;
    past_caches(r, (int64_t)bytes);
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

/** A reduction: everybody learns where all vectors are, and may sum any part. */
static peri_status near_reduce(mpi_request *r, uint64_t bytes)
{
    int32_t rank = r->group->rank, size = r->group->size;
    TRY(near_prepare(r));
    descriptor *own = &r->near->mine[rank];
    own->send = (uint64_t)(uintptr_t)r->op.send;
    own->recv = (uint64_t)(uintptr_t)r->op.recv;
    own->send_bytes = own->recv_bytes = bytes;
    if (!near_take(r, rank, own)) return near_defer(r);
    TRY(take_scratch(r, (int64_t)size * (near_sum_piece(size) + PIECE_REST)));
    for (int32_t k = 1; k < size; k++) r->near->mine[(rank + k) % size] = *own;
    for (int32_t k = 1; k < size; k++) TRY(near_tell(r, (rank + k) % size));
    return PERI_PENDING;
}

/** The descriptors of a reduction are here; part i is [begin[i], end[i]) elements. */
static peri_status near_parts(mpi_request *r, const int64_t *begin, const int64_t *end)
{
    struct near_state *s = r->near;
    int32_t rank = r->group->rank, size = r->group->size;
    int64_t element = size_of(r->op.dtype);
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
