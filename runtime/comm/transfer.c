/* SPDX-License-Identifier: Apache-2.0
 *
 * transfer.c: see transfer.h.
 */
#include "transfer.h"
#include "../../kernels/convert.h"

#include <perilune/exchange.h>

enum { GRAIN = 1 << 15 };

/* -- division ------------------------------------------------------------------------------------------------------ */

static atomic_int process_division = PERI_DIVISION_ON;

peri_status peri_exchange_division_set(peri_group *group, int32_t division)
{
    PERI__NOT_AT_BORDER;
    if (division < 0 || division > PERI_DIVISION_OFF || (!group && division == PERI_DIVISION_DEFAULT))
        return peri__fail(PERI_EINVAL, "peri_exchange_division_set: %d, allowed: PERI_DIVISION_ON, _OFF%s", division,
                          group ? ", _DEFAULT" : "");
    if (group) group->division = division;
    else atomic_store(&process_division, division);
    return PERI_OK;
}

bool peri_exchange_division(const peri_group *group)
{
    int32_t division = group ? group->division : PERI_DIVISION_DEFAULT;
    return (division ? division : atomic_load(&process_division)) == PERI_DIVISION_ON;
}

double peri__gradient_divisor(const peri_group *group, int32_t division)
{
    return (division ? division == PERI_DIVISION_ON : peri_exchange_division(group)) ? group->size : 1;
}

static peri_status divide_numbers(peri__transfer *t)
{
    if (t->divisor == 1) return PERI_OK;
    peri_k_divide_args args = {.dst = peri__data(t->numbers), .src = peri__data(t->numbers), .dtype = t->numbers->dtype,
                               .divisor = t->divisor};
    t->divisor = 1;
    return PERI_LAUNCH(peri__device(t->numbers), divide, &args, peri__numel(t->numbers), GRAIN);
}

/* -- codes --------------------------------------------------------------------------------------------------------- */

uint64_t peri__codec_hash(const peri_codec *codec)
{
    peri_codec_config c = {.size = sizeof c};
    uint64_t scale, h;
    if (!codec) return 0;
    peri_codec_describe(codec, &c);
    memcpy(&scale, &c.loss_scale, sizeof scale);
    h = peri__hash_mix((uint64_t)c.format + 1, (uint64_t)c.row_dim);
    h = peri__hash_mix(h, (uint64_t)c.exponent_bits << 32 | (uint64_t)c.exponent_bias);
    return peri__hash_mix(h, scale);
}

/** The codec's contexts of both ends: the caller's, or new ones. An all_gather encodes its one part once. */
static peri_status contexts_of(const peri_group *group, const peri__transfer_args *a, peri_codec_context **encoding,
                               peri_codec_context **decoding)
{
    if (a->contexts) {
        *encoding = a->contexts[0];
        *decoding = a->contexts[1];
        peri_codec_context_retain(*encoding);
        peri_codec_context_retain(*decoding);
        return PERI_OK;
    }
    PERI_TRY(peri_codec_context_new(a->codec, a->out, a->kind == PERI_COLL_ALL_GATHER ? 1 : group->size, encoding));
    return peri_codec_context_new(a->codec, a->in, group->size, decoding);
}

/** What all kinds of ends have in common. */
static peri_coll_op transfer_op(const peri__transfer_args *a, int32_t kind, int32_t dtype)
{
    return (peri_coll_op){.kind = kind,
                          .dtype = dtype,
                          .reduce = PERI_REDUCE_SUM,
                          .channel = a->channel,
                          .sequence = a->sequence,
                          .tag = a->tag,
                          .send_counts = a->out,
                          .recv_counts = a->in};
}

static peri_status post_codes(peri_group *group, peri_tensor *src, const peri__transfer_args *a,
                              peri_codec_context *encoding, peri__transfer *t)
{
    PERI__HELD peri_tensor *wire = NULL;
    bool summed = a->kind == PERI_COLL_REDUCE_SCATTER;
    PERI_TRY(peri_codec_encode(encoding, src, &wire));
    t->parts = summed ? group->size : 1;
    peri_coll_op op = transfer_op(a, summed ? PERI_COLL_ALL_TO_ALL : a->kind, wire->dtype);
    op.send_counts = peri_codec_context_wire_splits(encoding);
    op.recv_counts = peri_codec_context_wire_splits(t->decoding);
    int64_t n = peri__sum(op.recv_counts, group->size);
    PERI_TRY(peri_tensor_new(peri__device(src), wire->dtype, 1, &n, &t->wire));
    return peri__coll_post(group, &op, wire, t->wire, &t->work);
}

static peri_status post_encoded(peri_group *group, peri_tensor *src, const peri__transfer_args *a, peri__transfer *t)
{
    peri_codec_context *encoding = NULL;
    peri_status status = contexts_of(group, a, &encoding, &t->decoding);
    if (status >= 0) status = post_codes(group, src, a, encoding, t);
    peri_codec_context_release(encoding);
    return status;
}

/** What arrived, as numbers. */
static peri_status decode_arrived(peri__transfer *t)
{
    PERI__HELD peri_tensor *wire = peri__hand_over(&t->wire), *all = NULL, *view = NULL, *sum = NULL, *flat = NULL;
    if (t->parts == 1 && t->numbers) return peri__codec_decode_to(t->decoding, wire, t->numbers);
    if (t->parts == 1) return peri_codec_decode(t->decoding, wire, &t->numbers);
    PERI_TRY(peri_codec_decode(t->decoding, wire, &all));
    int64_t shape[2] = {t->parts, peri__numel(all) / t->parts};
    PERI_TRY(peri__tensor_view(all, 2, shape, NULL, all->offset, &view));
    PERI_TRY(peri__reduce(view, 1, 1, &sum));
    PERI_TRY(peri__tensor_view(sum, 1, &shape[1], NULL, sum->offset, &flat));
    if (t->numbers) return peri_tensor_copy(t->numbers, flat);
    t->numbers = peri__hand_over(&flat);
    return PERI_OK;
}

/* -- transfers ----------------------------------------------------------------------------------------------------- */

static peri_status post_plain(peri_group *group, peri_tensor *src, const peri__transfer_args *a, peri__transfer *t)
{
    bool summed = a->kind == PERI_COLL_REDUCE_SCATTER;
    int64_t n = summed ? a->out[group->rank] : peri__sum(a->in, group->size);
    if (!t->numbers) PERI_TRY(peri_tensor_new(peri__device(src), src->dtype, 1, &n, &t->numbers));
    peri_coll_op op = transfer_op(a, a->kind, src->dtype);
    if (summed) op.recv_counts = NULL;
    op.recv_runs = a->runs;
    op.n_recv_runs = a->n_runs;
    op.recv_lines = a->lines;
    op.recv_step = a->step;
    return peri__coll_post(group, &op, src, t->numbers, &t->work);
}

/** What an operation needs one end of which is a function. */
typedef struct ends {
    void (*release)(void *ctx); /* of the function's context */
    void *ctx;
    peri_tensor *other;
} ends;

static void ends_release(void *ctx)
{
    ends *e = ctx;
    e->release(e->ctx);
    peri_tensor_release(e->other);
    peri__free(e);
}

/** One end is a function. */
static peri_status post_direct(peri_group *group, peri_tensor *src, const peri__transfer_args *a, peri__transfer *t)
{
    const peri__transfer_direct *d = a->direct;
    ends *e = peri__alloc(sizeof *e);
    if (!e) return PERI_ENOMEM;
    *e = (ends){d->release, d->ctx, d->fill ? t->numbers : src};
    peri_tensor_retain(e->other);
    peri_coll_op op = transfer_op(a, a->kind, PERI_F32);
    op.send = d->fill ? NULL : peri__data(src);
    op.recv = d->take ? NULL : peri__data(t->numbers);
    op.fill = d->fill;
    op.take = d->take;
    op.ctx = d->ctx;
    d->retain(d->ctx);
    return peri__coll_post_host(group, &op, e, ends_release, &t->work);
}

peri_status peri__transfer_post(peri_group *group, peri_tensor *src, const peri__transfer_args *a, peri__transfer *t)
{
    *t = (peri__transfer){.numbers = a->to, .divisor = a->divisor != 0 ? a->divisor : 1, .parts = 1};
    if (a->to) peri_tensor_retain(a->to);
    peri_status status = a->direct  ? post_direct(group, src, a, t)
                         : a->codec ? post_encoded(group, src, a, t)
                                    : post_plain(group, src, a, t);
    if (status < 0) peri__transfer_fini(t);
    return status;
}

peri_status peri__transfer_test(peri__transfer *t)
{
    if (t->work) {
        peri_status status = peri_work_test(t->work);
        if (status != PERI_OK) return status;
        peri_work_release(t->work);
        t->work = NULL;
    }
    if (t->wire) PERI_TRY(decode_arrived(t));
    return t->numbers ? divide_numbers(t) : PERI_OK;
}

peri_tensor *peri__transfer_numbers(peri__transfer *t)
{
    peri_tensor *numbers = peri__hand_over(&t->numbers);
    peri__transfer_fini(t);
    return numbers;
}

void peri__transfer_fini(peri__transfer *t)
{
    peri_work_release(t->work);
    peri_tensor_release(t->numbers);
    peri_tensor_release(t->wire);
    peri_codec_context_release(t->decoding);
    *t = (peri__transfer){0};
}

/* -- trips --------------------------------------------------------------------------------------------------------- */

void peri__trip_init(peri__trip *trip, const peri__trip_vtab *vtab, peri_group *group)
{
    peri__refs_init(&trip->refs);
    trip->vtab = vtab;
    trip->group = group;
    peri_group_retain(group);
}

void peri__trip_release(peri__trip *trip)
{
    if (!trip || !peri__refs_drop(&trip->refs)) return;
    peri_group *group = trip->group;
    trip->vtab->fini(trip);
    peri_group_release(group);
}

/** A node may be run back once it has its share of the trip. */
static void hold_trip(peri__trip *trip, peri__node *node)
{
    peri__refs_add(&trip->refs);
    node->state = trip;
}

peri_status peri__trip_leaves(peri__trip *trip, peri_tensor *const *inputs, int32_t n, peri__node **leave)
{
    PERI_TRY(peri__record(&trip->vtab->leave, inputs, n, NULL, 1, leave));
    hold_trip(trip, *leave);
    return PERI_OK;
}

peri_status peri__trip_arrives(peri__trip *trip, peri__node **leave, peri_tensor *const *outputs, int32_t n)
{
    peri__node *arrive;
    PERI_TRY(peri__record_after(&trip->vtab->arrive, *leave, outputs, n, &arrive));
    *leave = NULL;
    hold_trip(trip, arrive);
    return PERI_OK;
}

peri_status peri__trip_arrive_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    (void)grad_in; /* what reaches the inputs is waited for there */
    peri__trip *trip = node->state;
    peri_status status = trip->vtab->set_out(trip, grad_out);
    trip->out = status >= 0;
    return status < 0 && trip->group->size > 1 ? peri__group_fail(trip->group, status) : status;
}

peri_status peri__trip_leave_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    (void)grad_out;
    peri__trip *trip = node->state;
    return trip->out ? trip->vtab->come_back(trip, node, grad_in) : PERI_OK;
}

void peri__trip_node_fini(peri__node *node)
{
    peri__trip *trip = node->state;
    node->state = NULL;
    peri__trip_release(trip);
}
