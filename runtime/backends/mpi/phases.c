/* SPDX-License-Identifier: Apache-2.0
 *
 * phases.c: each operation as phases: messages, or descriptors and then copies (near.c).
 */
#include "mpi_internal.h"

enum {
    SMALL_REDUCE = 32 << 10, /* bytes of all vectors together up to which all_reduce sends everything to everybody; */
    PAIR_REDUCE = 16 << 20,  /* bytes of one up to which two ranks do: as many as in parts, in one phase instead of
                                two */
    SEGMENT = 256 << 10      /* bytes of a part that are received before they are summed */
};

/** Receives first, so that messages find their buffers; then sends, each rank beginning with another one. */
static peri_status exchange(mpi_request *r, char *recv, const int64_t *recv_at, const int64_t *recv_bytes,
                            const char *send, const int64_t *send_at, const int64_t *send_bytes)
{
    int32_t rank = r->group->rank, size = r->group->size;
    bool large = false;
    for (int32_t i = 0; i < size; i++)
        large = large || (i != rank && (near_large(recv_bytes[i]) || near_large(send_bytes[i])));
    if (large && r->group->shared)
        return peri__mpi_near_exchange(r, recv, recv_at, recv_bytes, send, send_at, send_bytes);
    for (int32_t k = 1; k < size; k++) {
        int32_t from = (rank - k + size) % size;
        TRY(peri__mpi_message(r, true, from, recv + recv_at[from], recv_bytes[from]));
    }
    for (int32_t k = 1; k < size; k++) {
        int32_t to = (rank + k) % size;
        TRY(peri__mpi_message(r, false, to, send + send_at[to], send_bytes[to]));
    }
    return PERI_OK;
}

/** First element of part @i of a vector that all_reduce cuts: parts are whole cache lines. */
static int64_t cut(int64_t count, int32_t size, int32_t i)
{
    int64_t at = (count + 63) / 64 * i / size * 64;
    return at < count ? at : count;
}

/* A phase function is called first at the post and then whenever the messages of the phase before are complete. It
 * starts the next messages and returns PERI_PENDING, or PERI_OK when the operation is complete. r->phase counts the
 * calls. */

static peri_status barrier_phase(mpi_request *r)
{
    int32_t size = r->group->size, rank = r->group->rank;
    int64_t distance = (int64_t)1 << r->phase;
    if (distance >= size) return PERI_OK;
    TRY(peri__mpi_message(r, true, (int)((rank - distance + size) % size), r, 0));
    TRY(peri__mpi_message(r, false, (int)((rank + distance) % size), r, 0));
    return PERI_PENDING;
}

/** The last place of the tree tells the root that it has the data: without it a root would wait for nobody, and ranks
 *  that each take themselves for the root would all go on, with data of their own. */
static peri_status broadcast_phase(mpi_request *r)
{
    const peri_coll_op *op = &r->op;
    /* the root has place 0 and no data to receive */
    int32_t size = r->group->size, place = (r->group->rank - op->root + size) % size;
    int32_t step = place == 0 ? r->phase + 1 : r->phase;
    int64_t bytes = op->count * peri_coll_dtype_size(op->dtype);
    if (r->group->shared && near_large(bytes))
        return r->phase == 0 ? peri__mpi_near_broadcast(r, (uint64_t)bytes) : peri__mpi_near_pairs(r);
    int32_t low = 1; /* the lowest bit of place: the parent is place - low, children are place + lower bits */
    while (low < size && !(place & low)) low <<= 1;
    if (step == 0) {
        TRY(peri__mpi_message(r, true, (place - low + op->root) % size, op->recv, bytes));
        return PERI_PENDING;
    }
    if (step > 1 || size == 1) return PERI_OK;
    if (place == 0) TRY(peri__mpi_message(r, true, (size - 1 + op->root) % size, r, 0));
    for (int32_t child = low >> 1; child > 0; child >>= 1)
        if (place + child < size) TRY(peri__mpi_message(r, false, (place + child + op->root) % size, op->recv, bytes));
    if (place == size - 1) TRY(peri__mpi_message(r, false, op->root, r, 0));
    return r->n ? PERI_PENDING : PERI_OK;
}

static peri_status all_gather_phase(mpi_request *r)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size, rank = r->group->rank;
    layout in, out;
    if (r->phase > 0) return r->near ? peri__mpi_near_pairs(r) : PERI_OK;
    TRY(peri__mpi_layout_init(&in, size));
    peri_status status = peri__mpi_layout_init(&out, size);
    if (status >= 0) {
        int64_t all = peri__mpi_layout_parts(&in, op->recv_counts, size, peri_coll_dtype_size(op->dtype));
        peri__mpi_layout_same(&out, size, 0, in.bytes[rank]);
        char *own = (char *)op->recv + in.at[rank];
        peri__mpi_past_caches(r, all + in.bytes[rank]);
        if (op->fill) { /* once, where it is wanted here; all others get it from there */
            if (in.bytes[rank] > 0) op->fill(op->ctx, &(peri_coll_stretch){0, op->send_counts[0], own}, 1, false);
            r->op.send = own;
            r->op.fill = NULL;
        }
        status = exchange(r, op->recv, in.at, in.bytes, op->send, out.at, out.bytes);
        peri__mpi_place_own(r, own, op->send, in.bytes[rank]);
        peri__mpi_layout_fini(&out);
    }
    peri__mpi_layout_fini(&in);
    return status < 0 ? status : PERI_PENDING;
}

/** Parts that have no buffer in which they lie as they travel (to be placed, taken or filled), but go in messages, wait
 *  in scratch; where, one after the other? Returns their bytes. */
static int64_t set_aside(const mpi_request *r, layout *parts)
{
    int64_t all = 0;
    for (int32_t i = 0; i < r->group->size; i++) {
        bool message = i != r->group->rank && !(r->group->shared && near_large(parts->bytes[i]));
        parts->at[i] = message ? all : -1;
        if (message) all += parts->bytes[i];
    }
    return all;
}

static bool received_in_pieces(const peri_coll_op *op) { return op->recv_runs || op->take; }

/** The part of rank @from is at @src: to where it belongs. */
static void accept_part(const mpi_request *r, int32_t from, const void *src)
{
    const peri_coll_op *op = &r->op;
    if (!op->take) peri__mpi_place_part(r, from, src);
    else if (op->recv_counts[from] > 0) op->take(op->ctx, peri__mpi_first_of(op, from), op->recv_counts[from], src);
}

/** The messages are here: place them. */
static peri_status accept_messages(mpi_request *r)
{
    layout in;
    TRY(peri__mpi_layout_init(&in, r->group->size));
    peri__mpi_layout_parts(&in, r->op.recv_counts, r->group->size, peri_coll_dtype_size(r->op.dtype));
    set_aside(r, &in);
    for (int32_t i = 0; i < r->group->size; i++)
        if (in.at[i] >= 0) accept_part(r, i, r->scratch + in.at[i]);
    peri__mpi_layout_fini(&in);
    return PERI_OK;
}

/** Fill what goes in messages, and what stays here: that into @own. */
static void fill_parts(const mpi_request *r, const layout *out, void *own)
{
    const peri_coll_op *op = &r->op;
    for (int32_t i = 0; i < r->group->size; i++) {
        const bool here = i == r->group->rank;
        if (op->send_counts[i] == 0 || !(here || out->at[i] >= 0)) continue;
        const peri_coll_stretch part = {peri__mpi_first_of(op, i), op->send_counts[i],
                                        here ? own : r->scratch + out->at[i]};
        op->fill(op->ctx, &part, 1, false);
    }
}

/** All parts set out, @in and @out being where they lie; those that have no such place are found one. */
static peri_status set_out(mpi_request *r, layout *in, layout *out)
{
    const peri_coll_op *op = &r->op;
    const int32_t rank = r->group->rank;
    char *own_in = (char *)((uintptr_t)op->recv + (uint64_t)in->at[rank]);
    const char *own_out = (const char *)((uintptr_t)op->send + (uint64_t)out->at[rank]);
    if (op->fill) {
        TRY(peri__mpi_take_scratch(r, set_aside(r, out)));
        fill_parts(r, out, own_in);
    } else if (received_in_pieces(op)) {
        TRY(peri__mpi_take_scratch(r, set_aside(r, in)));
    }
    TRY(exchange(r, received_in_pieces(op) ? r->scratch : op->recv, in->at, in->bytes, op->fill ? r->scratch : op->send,
                 out->at, out->bytes));
    if (received_in_pieces(op)) accept_part(r, rank, own_out);
    else if (!op->fill) peri__mpi_place_own(r, own_in, own_out, in->bytes[rank]);
    return PERI_OK;
}

static peri_status all_to_all_phase(mpi_request *r)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size, rank = r->group->rank;
    layout in, out;
    if (r->phase > 0) {
        if (received_in_pieces(op)) TRY(accept_messages(r));
        return r->near ? peri__mpi_near_pairs(r) : PERI_OK;
    }
    if (op->send_counts[rank] != op->recv_counts[rank])
        return FAIL(PERI_EMISMATCH, "rank %d sends %lld elements to itself and expects %lld", rank,
                              (long long)op->send_counts[rank], (long long)op->recv_counts[rank]);
    TRY(peri__mpi_layout_init(&in, size));
    peri_status status = peri__mpi_layout_init(&out, size);
    if (status >= 0) {
        int64_t received = peri__mpi_layout_parts(&in, op->recv_counts, size, peri_coll_dtype_size(op->dtype));
        int64_t sent = peri__mpi_layout_parts(&out, op->send_counts, size, peri_coll_dtype_size(op->dtype));
        peri__mpi_past_caches(r, received + sent);
        status = set_out(r, &in, &out);
        peri__mpi_layout_fini(&out);
    }
    peri__mpi_layout_fini(&in);
    return status < 0 ? status : PERI_PENDING;
}

/** Start the messages of segment @s: elements [s * step, (s + 1) * step) of every part. */
static peri_status start_segment(mpi_request *r, const int64_t *begin, const int64_t *end, int64_t s, int64_t step,
                                 int64_t stride)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size, rank = r->group->rank;
    int64_t element = peri_coll_dtype_size(op->dtype), at = s * step, own = end[rank] - begin[rank] - at;
    char *into = r->scratch + (s & 1) * (size - 1) * stride;
    if (own > step) own = step;
    for (int32_t k = 1; k < size; k++) {
        int32_t from = (rank - k + size) % size;
        char *part = into + (from < rank ? from : from - 1) * stride;
        if (own > 0 || s == 0) TRY(peri__mpi_message(r, true, from, part, own > 0 ? own * element : 0));
    }
    for (int32_t k = 1; k < size; k++) {
        int32_t to = (rank + k) % size;
        int64_t n = end[to] - begin[to] - at;
        if (n > step) n = step;
        const char *part = (const char *)op->send + (begin[to] + at) * element;
        if (n > 0 || s == 0) TRY(peri__mpi_message(r, false, to, part, n > 0 ? n * element : 0));
    }
    return PERI_OK;
}

/** Reduce-scatter of the parts [begin[i], end[i]) of op->send; this rank's sum goes to @dst. Call p starts segment p
 *  and sums segment p - 1. */
static peri_status scatter(mpi_request *r, const int64_t *begin, const int64_t *end, void *dst)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size, rank = r->group->rank;
    int64_t element = peri_coll_dtype_size(op->dtype), step = SEGMENT / element, own = end[rank] - begin[rank],
            most = 0, p = r->phase;
    for (int32_t i = 0; i < size; i++) most = end[i] - begin[i] > most ? end[i] - begin[i] : most;
    int64_t stride = (own < step ? own : step) * element;
    if (p == 0) TRY(peri__mpi_take_scratch(r, (own > step ? 2 : 1) * (size - 1) * stride));
    bool more = p == 0 || p * step < most;
    if (more) TRY(start_segment(r, begin, end, p, step, stride));
    if (p > 0) {
        int64_t at = (p - 1) * step, n = own - at < step ? own - at : step;
        TRY(peri__mpi_sum_up(r, (char *)dst + at * element, (const char *)op->send + (begin[rank] + at) * element,
                   r->scratch + ((p - 1) & 1) * (size - 1) * stride, n, stride));
    }
    return more ? PERI_PENDING : PERI_OK;
}

static peri_status reduce_scatter_phase(mpi_request *r)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size;
    layout parts = {0};
    TRY(peri__mpi_layout_init(&parts, size));
    peri__mpi_layout_parts(&parts, op->send_counts, size, 1);
    int64_t most = 0, element = peri_coll_dtype_size(op->dtype);
    for (int32_t i = 0; i < size; i++) {
        most = parts.bytes[i] > most ? parts.bytes[i] : most;
        parts.bytes[i] += parts.at[i]; /* here: the ends */
    }
    peri_status status;
    if (!r->group->shared || !near_large(most * element)) status = scatter(r, parts.at, parts.bytes, op->recv);
    else if (r->phase == 0) status = peri__mpi_near_reduce(r, (uint64_t)(parts.bytes[size - 1] * element));
    else status = peri__mpi_near_parts(r, parts.at, parts.bytes);
    peri__mpi_layout_fini(&parts);
    return status;
}

/** all_reduce of a small vector, or of two ranks on two machines: everybody sends it to everybody. */
static peri_status small_reduce_phase(mpi_request *r)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size, rank = r->group->rank;
    int64_t bytes = op->count * peri_coll_dtype_size(op->dtype);
    if (r->phase > 0) return peri__mpi_sum_up(r, op->recv, op->send, r->scratch, op->count, bytes);
    TRY(peri__mpi_take_scratch(r, (size - 1) * bytes));
    for (int32_t k = 1; k < size; k++) {
        int32_t from = (rank - k + size) % size;
        TRY(peri__mpi_message(r, true, from, r->scratch + (from < rank ? from : from - 1) * bytes, bytes));
    }
    for (int32_t k = 1; k < size; k++) TRY(peri__mpi_message(r, false, (rank + k) % size, op->send, bytes));
    return PERI_PENDING;
}

static peri_status all_reduce_phase(mpi_request *r)
{
    const peri_coll_op *op = &r->op;
    int32_t size = r->group->size, rank = r->group->rank;
    int64_t element = peri_coll_dtype_size(op->dtype);
    if (op->count * element * size <= SMALL_REDUCE) return small_reduce_phase(r);
    if (size == 2 && !r->group->shared && op->count * element <= PAIR_REDUCE) return small_reduce_phase(r);
    if (r->stage == 2) return PERI_OK;
    if (r->group->shared && r->phase == 0) return peri__mpi_near_reduce(r, (uint64_t)(op->count * element));
    layout parts = {0};
    TRY(peri__mpi_layout_init(&parts, size));
    for (int32_t i = 0; i < size; i++)
        parts.at[i] = cut(op->count, size, i), parts.bytes[i] = cut(op->count, size, i + 1);
    peri_status status = PERI_OK;
    if (r->near) status = peri__mpi_near_parts(r, parts.at, parts.bytes);
    else if (r->stage == 0) status = scatter(r, parts.at, parts.bytes, (char *)op->recv + parts.at[rank] * element);
    if (status == PERI_OK) { /* every rank has the sum of its part */
        r->stage = 2;
        layout out;
        status = peri__mpi_layout_init(&out, size);
        if (status >= 0) {
            peri__mpi_layout_same(&out, size, parts.at[rank] * element, (parts.bytes[rank] - parts.at[rank]) * element);
            for (int32_t i = 0; i < size; i++)
                parts.bytes[i] = (parts.bytes[i] - parts.at[i]) * element, parts.at[i] *= element;
            status = exchange(r, op->recv, parts.at, parts.bytes, op->recv, out.at, out.bytes);
            peri__mpi_layout_fini(&out);
        }
        if (status >= 0) status = PERI_PENDING;
    }
    peri__mpi_layout_fini(&parts);
    return status;
}

peri_status peri__mpi_advance(mpi_request *r)
{
    static peri_status (*const phases[PERI_COLL_KIND_COUNT])(mpi_request *) = {
        [PERI_COLL_BARRIER] = barrier_phase,       [PERI_COLL_BROADCAST] = broadcast_phase,
        [PERI_COLL_ALL_REDUCE] = all_reduce_phase, [PERI_COLL_ALL_GATHER] = all_gather_phase,
        [PERI_COLL_REDUCE_SCATTER] = reduce_scatter_phase, [PERI_COLL_ALL_TO_ALL] = all_to_all_phase};
    peri_status status;
    do {
        r->n = 0;
        status = phases[r->op.kind](r);
        if (r->deferred) return PERI_PENDING;
        r->phase++;
    } while (status == PERI_PENDING && r->n == 0 && !has_copies_left(r));
    return status;
}
