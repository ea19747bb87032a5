/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_messages.h: part of mpi.c: the messages of a request, and sums in rank order.
 */

/* -- messages of a request ----------------------------------------------------------------------------------------------------------- */

static int tag_of(const mpi_request *r)
{
    uint64_t hash = r->op.signature ^ (r->op.signature >> 32);
    uint64_t sequence = r->op.sequence & ((1u << SEQUENCE_BITS) - 1);
    return (int)((sequence << mpi.hash_bits) | (hash & ((1u << mpi.hash_bits) - 1)));
}

static peri_status grow(mpi_request *r)
{
    int32_t room = r->room ? r->room * 2 : 2 * r->group->size + 2;
    char *block = host->alloc((sizeof(MPI_Request) + sizeof(MPI_Status) + sizeof(slot)) * (size_t)room);
    if (!block) return PERI_ENOMEM;
    MPI_Status *statuses = (MPI_Status *)block;
    MPI_Request *requests = (MPI_Request *)(statuses + room);
    slot *slots = (slot *)(requests + room);
    if (r->n) {
        memcpy(requests, r->requests, sizeof *requests * (size_t)r->n);
        memcpy(slots, r->slots, sizeof *slots * (size_t)r->n);
    }
    host->free(r->statuses);
    r->statuses = statuses;
    r->requests = requests;
    r->slots = slots;
    r->room = room;
    return PERI_OK;
}

/** Start one message of any size, in pieces that MPI can count. */
static peri_status message(mpi_request *r, bool receive, int other, const void *data, int64_t bytes)
{
    const mpi_group *g = r->group;
    char *p = (char *)(uintptr_t)data;
    int64_t piece = g->shared && mpi.piece > EAGER ? EAGER : mpi.piece;
    do {
        if (r->n == r->room) {
            peri_status status = grow(r);
            if (status < 0) return status;
        }
        int64_t now = bytes < piece ? bytes : piece;
        MPI_Request *request = &r->requests[r->n];
        int code = receive ? MPI_Irecv(p, (int)now, MPI_BYTE, other, tag_of(r), g->comm, request)
                           : MPI_Isend(p, (int)now, MPI_BYTE, other, tag_of(r), g->comm, request);
        if (code != MPI_SUCCESS) return mpi_fail(receive ? "MPI_Irecv" : "MPI_Isend", code);
        r->slots[r->n++] = (slot){other, (int)now, receive, false};
        p += now;
        bytes -= now;
    } while (bytes > 0);
    return PERI_OK;
}

/** Places and sizes of the parts of a buffer, in bytes. */
typedef struct layout {
    int64_t *at, *bytes;
    int64_t fixed[64];
} layout;

static peri_status layout_init(layout *l, int32_t size)
{
    l->at = size <= 32 ? l->fixed : host->alloc(sizeof(int64_t) * 2 * (size_t)size);
    l->bytes = l->at + size;
    return l->at ? PERI_OK : PERI_ENOMEM;
}

static void layout_fini(layout *l)
{
    if (l->at != l->fixed) host->free(l->at);
}

/** Consecutive parts of counts[i] elements; returns the bytes of all. */
static int64_t layout_parts(layout *l, const int64_t *counts, int32_t size, int64_t element)
{
    int64_t at = 0;
    for (int32_t i = 0; i < size; i++) {
        l->at[i] = at;
        l->bytes[i] = counts[i] * element;
        at += l->bytes[i];
    }
    return at;
}

static void layout_same(layout *l, int32_t size, int64_t at, int64_t bytes)
{
    for (int32_t i = 0; i < size; i++) l->at[i] = at, l->bytes[i] = bytes;
}

/* -- places ---------------------------------------------------------------------------------------------------------------------- */

/** Where what comes belongs, as in peri_coll_op; lines of at least one. */
typedef struct places {
    const peri_k_run *runs;
    int64_t n, lines, step;
} places;

/** The first run that reaches beyond element @x of what comes; p->n: none. */
static int64_t first_run(const places *p, int64_t x)
{
    int64_t low = 0, high = p->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->runs[middle].from + p->runs[middle].n * p->lines > x) high = middle;
        else low = middle + 1;
    }
    return low;
}

/** The places of what comes from rank @from. */
static places places_of(const peri_coll_op *op, int32_t from)
{
    places all = {op->recv_runs, op->n_recv_runs, op->recv_lines > 0 ? op->recv_lines : 1, op->recv_step}, p = all;
    int64_t begin = 0;
    for (int32_t i = 0; i < from; i++) begin += op->recv_counts[i];
    int64_t first = first_run(&all, begin);
    p.runs += first;
    p.n = op->recv_counts[from] ? first_run(&all, begin + op->recv_counts[from] - 1) + 1 - first : 0;
    return p;
}

static void place_range(void *ctx, int64_t begin, int64_t end) { host->kernels()->fn[PERI_K_route_place](ctx, begin, end); }

/** Copy the part of rank @from, which lies in one piece at @src, to where it belongs. */
static void place_part(const mpi_request *r, int32_t from, const void *src)
{
    places p = places_of(&r->op, from);
    if (p.n == 0) return;
    int64_t width = size_of(r->op.dtype);
    peri_k_route_place_args args = {.dst = r->op.recv, .received = (const void *)((uintptr_t)src - (uintptr_t)(p.runs[0].from * width)),
                                    .runs = p.runs, .lines = p.lines, .step = p.step, .width = width,
                                    .past = p.n * p.lines == 1 ? r->past : r->rows == 2};
    host->parallel_for(p.n * p.lines, 1, place_range, &args);
}

/** Copy what lies in one piece at both ends, unless it is in its place already. */
static void place_own(const mpi_request *r, void *dst, const void *src, int64_t bytes)
{
    if (dst == src || bytes <= 0) return;
    peri_k_run whole = {.n = bytes};
    peri_k_route_place_args args = {.dst = dst, .received = src, .runs = &whole, .width = 1, .past = r->past};
    place_range(&args, 0, 1);
}

/* -- sums ------------------------------------------------------------------------------------------------------------------------ */

static void reduce_range(void *ctx, int64_t begin, int64_t end) { host->kernels()->fn[PERI_K_reduce](ctx, begin, end); }

/** dst = sum over the ranks, in their order, of own (this rank's) and the others' vectors in @scratch, `stride` bytes apart. */
static peri_status sum_up(mpi_request *r, void *dst, const void *own, const char *scratch, int64_t count, int64_t stride)
{
    const mpi_group *g = r->group;
    const void *fixed[64], **src = fixed;
    if (count <= 0) return PERI_OK;
    if (g->size > 64) {
        src = host->alloc(sizeof *src * (size_t)g->size);
        if (!src) return PERI_ENOMEM;
    }
    for (int32_t i = 0; i < g->size; i++) src[i] = i == g->rank ? own : scratch + (i < g->rank ? i : i - 1) * stride;
    peri_k_reduce_args args = {.dst = dst, .src = src, .n = g->size, .dtype = r->op.dtype, .reduce = r->op.reduce};
    host->parallel_for(count, 1 << 16, reduce_range, &args);
    if (src != fixed) host->free(src);
    return PERI_OK;
}

/** Room for @bytes, from the group's spare block if that is large enough. */
static peri_status take_scratch(mpi_request *r, int64_t bytes)
{
    mpi_group *g = r->group;
    if (g->scratch && g->scratch_bytes >= bytes) {
        r->scratch = g->scratch;
        r->scratch_bytes = g->scratch_bytes;
        g->scratch = NULL;
        return PERI_OK;
    }
    r->scratch = host->alloc((size_t)(bytes ? bytes : 1));
    r->scratch_bytes = bytes;
    return r->scratch ? PERI_OK : PERI_ENOMEM;
}

static void give_scratch(mpi_request *r)
{
    mpi_group *g = r->group;
    if (!r->scratch) return;
    if (!g->scratch || g->scratch_bytes < r->scratch_bytes) {
        host->free(g->scratch);
        g->scratch = r->scratch;
        g->scratch_bytes = r->scratch_bytes;
    } else {
        host->free(r->scratch);
    }
    r->scratch = NULL;
}
