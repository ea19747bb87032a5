/* SPDX-License-Identifier: Apache-2.0
 *
 * messages.c: the messages of a request, and sums in rank order.
 */
#include "mpi_internal.h"
#include "../../../kernels/convert.h"
#include "../../../kernels/route.h"

#include <string.h>

enum {
    EAGER = 4000,             /* bytes of a message that Open MPI sends at once between processes of a machine, */
    FAR_EAGER = 65000,        /* and over TCP: longer ones wait for an answer, and then take 1.6 times as long as the
                                 wire needs; */
    FAR_LONG = 16 << 20,      /* those longer than this do wait, so that what nobody takes yet does not fill memory, */
    FAR_PIECE = 512 << 10     /* in pieces that follow each other at the speed of the wire */
};

/* -- messages of a request ----------------------------------------------------------------------------------------- */

static int message_tag(const mpi_request *r)
{
    uint64_t hash = r->op.signature ^ (r->op.signature >> 32);
    uint64_t sequence = r->op.sequence & ((1u << SEQUENCE_BITS) - 1);
    return (int)((sequence << peri__mpi.hash_bits) | (hash & ((1u << peri__mpi.hash_bits) - 1)));
}

static peri_status grow_request(mpi_request *r)
{
    int32_t room = r->room ? r->room * 2 : 2 * r->group->size + 2;
    char *block = peri__mpi_host->alloc((sizeof(MPI_Request) + sizeof(MPI_Status) + sizeof(slot)) * (size_t)room);
    if (!block) return PERI_ENOMEM;
    MPI_Status *statuses = (MPI_Status *)block;
    MPI_Request *requests = (MPI_Request *)(statuses + room);
    slot *slots = (slot *)(requests + room);
    if (r->n) {
        memcpy(requests, r->requests, sizeof *requests * (size_t)r->n);
        memcpy(slots, r->slots, sizeof *slots * (size_t)r->n);
    }
    peri__mpi_host->free(r->statuses);
    r->statuses = statuses;
    r->requests = requests;
    r->slots = slots;
    r->room = room;
    return PERI_OK;
}

void peri__mpi_free_request(mpi_request *r)
{
    if (r) peri__mpi_host->free(r->statuses);
    peri__mpi_host->free(r);
}

/** Bytes of the pieces of a message between this rank and @other of the group; both ends find the same. */
static int64_t piece_of(const mpi_group *g, int other, int64_t bytes)
{
    int64_t piece = peri__mpi.piece;
    const peer *peers = peri__mpi.peers;
    if (g->shared) piece = EAGER;
    else if (peers && peers[g->ranks[other]].node != peers[peri__mpi.rank].node)
        piece = bytes > FAR_LONG ? FAR_PIECE : FAR_EAGER;
    return piece < peri__mpi.piece ? piece : peri__mpi.piece;
}

peri_status peri__mpi_message(mpi_request *r, bool receive, int other, const void *data, int64_t bytes)
{
    const mpi_group *g = r->group;
    char *p = (char *)(uintptr_t)data;
    int64_t piece = piece_of(g, other, bytes);
    do {
        if (r->n == r->room) {
            peri_status status = grow_request(r);
            if (status < 0) return status;
        }
        int64_t now = bytes < piece ? bytes : piece;
        MPI_Request *request = &r->requests[r->n];
        int code = receive ? MPI_Irecv(p, (int)now, MPI_BYTE, other, message_tag(r), g->comm, request)
                           : peri__mpi_send(p, (int)now, other, message_tag(r), g->comm, request);
        if (code != MPI_SUCCESS) return peri__mpi_fail(receive ? "MPI_Irecv" : "MPI_Isend", code);
        r->slots[r->n++] = (slot){other, (int)now, receive, false};
        p += now;
        bytes -= now;
    } while (bytes > 0);
    return PERI_OK;
}

peri_status peri__mpi_layout_init(layout *l, int32_t size)
{
    l->at = size <= 32 ? l->fixed : peri__mpi_host->alloc(sizeof(int64_t) * 2 * (size_t)size);
    l->bytes = l->at + size;
    return l->at ? PERI_OK : PERI_ENOMEM;
}

void peri__mpi_layout_fini(layout *l)
{
    if (l->at != l->fixed) peri__mpi_host->free(l->at);
}

int64_t peri__mpi_layout_parts(layout *l, const int64_t *counts, int32_t size, int64_t element)
{
    int64_t at = 0;
    for (int32_t i = 0; i < size; i++) {
        l->at[i] = at;
        l->bytes[i] = counts[i] * element;
        at += l->bytes[i];
    }
    return at;
}

void peri__mpi_layout_same(layout *l, int32_t size, int64_t at, int64_t bytes)
{
    for (int32_t i = 0; i < size; i++) l->at[i] = at, l->bytes[i] = bytes;
}

/* -- places -------------------------------------------------------------------------------------------------------- */

int64_t peri__mpi_first_run(const places *p, int64_t x)
{
    int64_t low = 0, high = p->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->runs[middle].from + p->runs[middle].n * p->lines > x) high = middle;
        else low = middle + 1;
    }
    return low;
}

int64_t peri__mpi_first_of(const peri_coll_op *op, int32_t other)
{
    const int64_t *counts = op->take ? op->recv_counts : op->kind == PERI_COLL_ALL_GATHER ? NULL : op->send_counts;
    int64_t first = 0;
    for (int32_t i = 0; counts && i < other; i++) first += counts[i];
    return first;
}

places peri__mpi_places_of(const peri_coll_op *op, int32_t from)
{
    places all = {op->recv_runs, op->n_recv_runs, op->recv_lines > 0 ? op->recv_lines : 1, op->recv_step}, p = all;
    int64_t begin = 0;
    for (int32_t i = 0; i < from; i++) begin += op->recv_counts[i];
    int64_t first = peri__mpi_first_run(&all, begin);
    p.runs += first;
    p.n = op->recv_counts[from] ? peri__mpi_first_run(&all, begin + op->recv_counts[from] - 1) + 1 - first : 0;
    return p;
}

void peri__mpi_place_range(void *ctx, int64_t begin, int64_t end) { peri__mpi_place(ctx, begin, end); }

void peri__mpi_place_part(const mpi_request *r, int32_t from, const void *src)
{
    places p = peri__mpi_places_of(&r->op, from);
    if (p.n == 0) return;
    int64_t width = peri_coll_dtype_size(r->op.dtype);
    peri_k_route_place_args args = {.dst = r->op.recv,
                                    .received = (const void *)((uintptr_t)src - (uintptr_t)(p.runs[0].from * width)),
                                    .runs = p.runs,
                                    .lines = p.lines,
                                    .step = p.step,
                                    .width = width,
                                    .past = p.n * p.lines == 1 ? r->past : r->rows == 2};
    peri__mpi_host->parallel_for(p.n * p.lines, 1, peri__mpi_place_range, &args);
}

void peri__mpi_put(void *dst, const void *src, int64_t bytes, bool past)
{
    peri_k_run whole = {.n = bytes};
    peri_k_route_place_args args = {.dst = dst, .received = src, .runs = &whole, .width = 1, .past = past};
    peri__mpi_place_range(&args, 0, 1);
}

void peri__mpi_place_own(const mpi_request *r, void *dst, const void *src, int64_t bytes)
{
    if (dst != src && bytes > 0) peri__mpi_put(dst, src, bytes, r->past);
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */

static void reduce_range(void *ctx, int64_t begin, int64_t end) { peri__mpi_reduce(ctx, begin, end); }

void peri__mpi_sum_of(const mpi_request *r, void *dst, const void *const *src, int64_t count)
{
    peri_k_reduce_args args = {
        .dst = dst, .src = src, .n = r->group->size, .dtype = r->op.dtype, .reduce = r->op.reduce};
    if (count > 0) peri__mpi_host->parallel_for(count, 1 << 16, reduce_range, &args);
}

peri_status peri__mpi_sum_up(mpi_request *r, void *dst, const void *own, const char *scratch, int64_t count,
                             int64_t stride)
{
    const mpi_group *g = r->group;
    const void *fixed[64], **src = fixed;
    if (count <= 0) return PERI_OK;
    if (g->size > 64) {
        src = peri__mpi_host->alloc(sizeof *src * (size_t)g->size);
        if (!src) return PERI_ENOMEM;
    }
    for (int32_t i = 0; i < g->size; i++) src[i] = i == g->rank ? own : scratch + (i < g->rank ? i : i - 1) * stride;
    peri__mpi_sum_of(r, dst, src, count);
    if (src != fixed) peri__mpi_host->free(src);
    return PERI_OK;
}

peri_status peri__mpi_take_scratch(mpi_request *r, int64_t bytes)
{
    mpi_group *g = r->group;
    peri__mpi_give_scratch(r); /* of an operation that begins again */
    if (g->scratch && g->scratch_bytes >= bytes) {
        r->scratch = g->scratch;
        r->scratch_bytes = g->scratch_bytes;
        g->scratch = NULL;
        return PERI_OK;
    }
    r->scratch = peri__mpi_host->alloc((size_t)(bytes ? bytes : 1));
    r->scratch_bytes = bytes;
    return r->scratch ? PERI_OK : PERI_ENOMEM;
}

void peri__mpi_give_scratch(mpi_request *r)
{
    mpi_group *g = r->group;
    if (!r->scratch) return;
    if (!g->scratch || g->scratch_bytes < r->scratch_bytes) {
        peri__mpi_host->free(g->scratch);
        g->scratch = r->scratch;
        g->scratch_bytes = r->scratch_bytes;
    } else {
        peri__mpi_host->free(r->scratch);
    }
    r->scratch = NULL;
}
