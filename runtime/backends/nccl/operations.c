/* SPDX-License-Identifier: Apache-2.0
 *
 * operations.c: communicators, and operations as calls of NCCL.
 *
 * NCCL matches by order within a communicator, and wants operations of several communicators launched in one order too:
 * else kernels of one may occupy the device that those of another wait for. So a group has few communicators (LANES),
 * and its members launch in the order of the first one, which tells them (notes.c). A lane is split from the group's
 * base, on which nothing else runs. Communicators do not block: a call that NCCL goes on with by itself is asked about
 * later.
 *
 * Sums that NCCL would round otherwise than the contract (16-bit floats), minima that would lose a NaN, and dtypes that
 * it does not have are exchanges of parts, summed here in rank order (kernel `reduce`), and gathered.
 */
#include "nccl_internal.h"
#include "../../../kernels/convert.h"
#include "../../../kernels/work.h"

#include <string.h>

/** What a call of NCCL on @comm has come to: PERI_OK, PERI_PENDING or the failure. */
static peri_status outcome(ncclComm_t comm, const char *what, ncclResult_t result)
{
    if (result == ncclInProgress) {
        ncclResult_t later = ncclSuccess;
        if (peri__nccl.CommGetAsyncError(comm, &later) != ncclSuccess) return peri__nccl_fail(what, ncclInternalError);
        result = later;
    }
    return result == ncclSuccess ? PERI_OK : result == ncclInProgress ? PERI_PENDING : peri__nccl_fail(what, result);
}

peri_status peri__nccl_well(const communicator *x) { return outcome(x->comm, "CommGetAsyncError", ncclInProgress); }

static ncclConfig_t nonblocking_config(void)
{
    ncclConfig_t c = NCCL_CONFIG_INITIALIZER;
    c.blocking = 0;
    return c;
}

/** Has a call about @b come to its end? */
static peri_status settled(communicator *b, const char *what)
{
    peri_status status = b->state == COMM_MADE ? outcome(b->comm, what, ncclInProgress) : PERI_OK;
    if (status == PERI_OK) b->state = COMM_READY;
    return status;
}

peri_status peri__nccl_base(nccl_group *g, bool wanted)
{
    communicator *b = &g->base;
    nccl_world *w = g->world;
    if (g->rank == 0 && wanted && !g->has_id) {
        ncclResult_t result = peri__nccl.GetUniqueId(&g->id);
        if (result != ncclSuccess) return peri__nccl_fail("GetUniqueId", result);
        note n = {.kind = NOTE_ID};
        _Static_assert(sizeof g->id <= sizeof n.text, "an identity fits into a note");
        memcpy(n.text, &g->id, sizeof g->id);
        for (int32_t i = 1; i < g->size; i++) peri__nccl_tell(g, i, &n);
        g->has_id = true;
    }
    if (!g->has_id) return PERI_PENDING;
    if (b->state == COMM_NONE) {
        ncclConfig_t c = nonblocking_config();
        if (w->vtab->trim) TRY(w->vtab->trim(w->device)); /* NCCL allocates for itself */
        TRY(w->vtab->stream_new(w->device, &b->stream)); /* also makes the device the current one of this thread, which
                                                            NCCL takes */
        b->state = COMM_MADE;
        ncclResult_t result = peri__nccl.CommInitRankConfig(&b->comm, g->size, g->id, g->rank, &c);
        if (result != ncclSuccess && result != ncclInProgress) return peri__nccl_fail("CommInitRankConfig", result);
    }
    return settled(b, "CommInitRankConfig");
}

peri_status peri__nccl_split(nccl_group *g, communicator *lane)
{
    nccl_world *w = g->world;
    peri_status status = peri__nccl_base(g, true);
    if (status != PERI_OK || lane->state == COMM_READY) return status;
    if (lane->state == COMM_NONE) {
        ncclConfig_t c = nonblocking_config();
        if (w->vtab->trim) TRY(w->vtab->trim(w->device));
        TRY(w->vtab->stream_new(w->device, &lane->stream));
        lane->state = COMM_MADE;
        ncclResult_t result = peri__nccl.CommSplit(g->base.comm, 0, g->rank, &lane->comm, &c);
        if (result != ncclSuccess && result != ncclInProgress) return peri__nccl_fail("CommSplit", result);
    }
    status = outcome(g->base.comm, "CommSplit", ncclInProgress);
    return status == PERI_OK ? settled(lane, "CommSplit") : status;
}

/* -- operations ---------------------------------------------------------------------------------------------------- */

/** NCCL's name of a dtype that it sums as the contract says; false: there is none. */
static bool native(const peri_coll_op *op, ncclDataType_t *type, ncclRedOp_t *reduce)
{
    static const ncclRedOp_t reduces[] = {
        [PERI_REDUCE_SUM] = ncclSum, [PERI_REDUCE_MIN] = ncclMin, [PERI_REDUCE_MAX] = ncclMax};
    *reduce = reduces[op->reduce];
    switch (op->dtype) {
    case PERI_F64: return *type = ncclFloat64, op->reduce == PERI_REDUCE_SUM; /* its minima may lose a NaN */
    case PERI_F32: return *type = ncclFloat32, op->reduce == PERI_REDUCE_SUM;
    case PERI_I64: return *type = ncclInt64, true;
    case PERI_I32: return *type = ncclInt32, true;
    case PERI_I8: return *type = ncclInt8, true;
    case PERI_U8: return *type = ncclUint8, true;
    default: return false;
    }
}

static bool counts_are_equal(const int64_t *counts, int32_t n)
{
    for (int32_t i = 1; i < n; i++)
        if (counts[i] != counts[0]) return false;
    return true;
}

/** Exchange parts: sent[i] bytes from @send, one part after the other (@same: the same part, to all), received[i] into
 *  @recv likewise. */
static ncclResult_t exchange(const nccl_request *r, ncclComm_t comm, void *stream, const char *send,
                             const int64_t *sent, bool same, char *recv, const int64_t *received, int64_t element)
{
    const nccl_group *g = r->group;
    ncclResult_t result = peri__nccl.GroupStart();
    for (int32_t i = 0; i < g->size && result == ncclSuccess; i++) {
        size_t out = (size_t)(sent[same ? 0 : i] * element), in = (size_t)(received[i] * element);
        if (out) result = peri__nccl.Send(send, out, ncclUint8, i, comm, stream);
        if (in && result == ncclSuccess) result = peri__nccl.Recv(recv, in, ncclUint8, i, comm, stream);
        if (!same) send += out;
        recv += in;
    }
    ncclResult_t end = peri__nccl.GroupEnd();
    return result == ncclSuccess ? end : result;
}

/** Elements of member i's part of an all_reduce that is made here. */
static int64_t part_begin(const peri_coll_op *op, int32_t size, int32_t i) { return op->count * i / size; }

/** The counts of parts: of an all_reduce equal ones, of a reduce_scatter its own. */
static void parts_of(const nccl_request *r, int64_t *counts)
{
    for (int32_t i = 0; i < r->group->size; i++)
        counts[i] = r->op.kind == PERI_COLL_ALL_REDUCE
                        ? part_begin(&r->op, r->group->size, i + 1) - part_begin(&r->op, r->group->size, i)
                        : r->op.send_counts[i];
}

/** Sum what has come of this rank's part, in rank order. */
static peri_status sum_up(nccl_request *r, void *stream, int64_t own)
{
    const nccl_group *g = r->group;
    const nccl_world *w = g->world;
    int64_t element = peri_coll_dtype_size(r->op.dtype), list_at = (r->scratch_bytes - 8 * g->size) / 8 * 8;
    void *dst = r->op.recv;
    if (r->op.kind == PERI_COLL_ALL_REDUCE) dst = (char *)dst + part_begin(&r->op, g->size, g->rank) * element;
    const void **from = peri__nccl_host->alloc(sizeof *from * (size_t)g->size);
    if (!from) return PERI_ENOMEM;
    for (int32_t i = 0; i < g->size; i++) from[i] = (char *)r->scratch + i * own * element;
    void *list = (char *)r->scratch + list_at;
    peri_status status = w->vtab->copy(w->device, stream, list, from, 8 * g->size, PERI_COPY_H2D_WORDS);
    peri__nccl_host->free(from);
    if (status < 0) return status;
    peri_k_reduce_args a = {.dst = dst, .src = list, .n = g->size, .dtype = r->op.dtype, .reduce = r->op.reduce};
    return own > 0 ? w->vtab->launch(w->device, stream, PERI_K_reduce, &a, sizeof a, own, 1 << 14) : PERI_OK;
}

/** Part @r->phase of a reduction that is made here; sets *@more to whether another one follows. */
static peri_status reduce_here(nccl_request *r, communicator *x, ncclResult_t *result, bool *more)
{
    const nccl_group *g = r->group;
    const nccl_world *w = g->world;
    int64_t element = peri_coll_dtype_size(r->op.dtype);
    int64_t *counts = peri__nccl_host->alloc(2 * sizeof *counts * (size_t)g->size), *mine = counts + g->size;
    if (!counts) return PERI_ENOMEM;
    parts_of(r, counts);
    int64_t own = counts[g->rank];
    for (int32_t i = 0; i < g->size; i++) mine[i] = own;
    peri_status status = PERI_OK;
    *more = r->phase == 0 && r->op.kind == PERI_COLL_ALL_REDUCE;
    if (r->phase == 0) {
        r->scratch_bytes = (own * g->size * element + 7) / 8 * 8 + 8 * g->size;
        status = w->vtab->alloc(w->device, x->stream, r->scratch_bytes, &r->scratch);
        if (status >= 0)
            *result = exchange(r, x->comm, x->stream, r->op.send, counts, false, r->scratch, mine, element);
        *more = true;
    } else if (r->phase == 1) {
        status = sum_up(r, x->stream, own);
        *more = r->op.kind == PERI_COLL_ALL_REDUCE;
    } else {
        *result = exchange(r, x->comm, x->stream, (char *)r->op.recv + part_begin(&r->op, g->size, g->rank) * element,
                           &own, true, r->op.recv, counts, element);
        *more = false;
    }
    peri__nccl_host->free(counts);
    return status;
}

/** The operation, or its part @r->phase, as calls of NCCL. */
static peri_status call(nccl_request *r, communicator *x, ncclResult_t *result, bool *more)
{
    const nccl_group *g = r->group;
    const nccl_world *w = g->world;
    const peri_coll_op *op = &r->op;
    int64_t element = peri_coll_dtype_size(op->dtype);
    ncclDataType_t type = ncclUint8;
    ncclRedOp_t reduce = ncclSum;
    *result = ncclSuccess;
    *more = false;
    switch (op->kind) {
    case PERI_COLL_BARRIER:
        r->scratch_bytes = 8;
        TRY(w->vtab->alloc(w->device, x->stream, r->scratch_bytes, &r->scratch));
        *result = peri__nccl.AllReduce(r->scratch, r->scratch, 1, ncclInt32, ncclMax, x->comm, x->stream);
        return PERI_OK;
    case PERI_COLL_BROADCAST:
        *result = peri__nccl.Broadcast(op->recv, op->recv, (size_t)(op->count * element), ncclUint8, op->root, x->comm,
                                       x->stream);
        return PERI_OK;
    case PERI_COLL_ALL_REDUCE:
        if (!native(op, &type, &reduce)) return reduce_here(r, x, result, more);
        *result = peri__nccl.AllReduce(op->send, op->recv, (size_t)op->count, type, reduce, x->comm, x->stream);
        return PERI_OK;
    case PERI_COLL_REDUCE_SCATTER:
        if (!native(op, &type, &reduce) || !counts_are_equal(op->send_counts, g->size))
            return reduce_here(r, x, result, more);
        *result =
            peri__nccl.ReduceScatter(op->send, op->recv, (size_t)op->send_counts[0], type, reduce, x->comm, x->stream);
        return PERI_OK;
    case PERI_COLL_ALL_GATHER:
        if (counts_are_equal(op->recv_counts, g->size))
            *result = peri__nccl.AllGather(op->send, op->recv, (size_t)(op->recv_counts[0] * element), ncclUint8,
                                           x->comm, x->stream);
        else
            *result =
                exchange(r, x->comm, x->stream, op->send, op->send_counts, true, op->recv, op->recv_counts, element);
        return PERI_OK;
    default:
        *result = exchange(r, x->comm, x->stream, op->send, op->send_counts, false, op->recv, op->recv_counts, element);
        return PERI_OK;
    }
}

peri_status peri__nccl_start(nccl_request *r)
{
    communicator *x = peri__nccl_lane(r->group, r->op.channel);
    const nccl_world *w = r->group->world;
    if (r->state == REQUEST_WAITS) {
        TRY(w->vtab->stream_wait(w->device, x->stream, r->ready));
        r->state = REQUEST_STARTS;
    }
    while (r->phase >= 0) {
        ncclResult_t result = ncclSuccess;
        bool more = false;
        peri_status status = peri__nccl_well(x); /* the part before */
        if (status != PERI_OK) return status;
        TRY(call(r, x, &result, &more));
        if (result != ncclSuccess && result != ncclInProgress) return peri__nccl_fail("GroupEnd", result);
        r->phase = more ? r->phase + 1 : -1;
    }
    peri_status status = peri__nccl_well(x);
    if (status != PERI_OK) return status;
    TRY(w->vtab->event_record(w->device, r->done, x->stream));
    r->state = REQUEST_RUNS;
    return PERI_OK;
}
