/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c: see exchange.h. An exchange is a trip (transfer.h): its results are put together of what arrived, and the
 * gradients of results are laid out the same way, to travel back.
 */
#include "exchange.h"
#include "../../kernels/route.h"

#include "../base/tune.h"
#include "../tensor/jagged_internal.h"

enum {
    PLACE_LEAST =
        512, /* bytes of a piece's line that the transport may put in its place: shorter ones are copied
                          faster afterwards */
    PLACE_LINES = 64 /* but so few lines are placed, however short: a copy of its own costs more */
};

typedef struct exchange_work {
    peri_work base;
    peri__exchange *exchange;
    peri__transfer forth;  /* none in a group of one rank that has its input for its result */
    peri__node *leave;     /* until its results are handed out; NULL: not recorded */
    peri_tensor **results; /* of the side; behind this struct. NULL: not made yet */
    bool given;            /* they are the caller's */
    bool there;            /* what comes arrives in them */
    bool used;
} exchange_work;

/* -- sides --------------------------------------------------------------------------------------------------------- */

void peri__side_add_piece(peri__side *s, int32_t rank, int64_t length)
{
    s->from[rank] = s->cut;
    s->length[rank] = length;
    s->cut += length;
    s->in_order = s->in_order && rank >= s->last;
    s->last = rank + 1;
}

void peri__side_shape(peri__side *s, int32_t i, int32_t ndim, const int64_t *size)
{
    s->shapes[i].ndim = ndim;
    memcpy(s->shapes[i].size, size, sizeof *size * (size_t)ndim);
}

static int64_t size_product(const int64_t *size, int32_t from, int32_t past)
{
    int64_t n = 1;
    for (int32_t d = from; d < past; d++) n *= size[d];
    return n;
}

/** Everything is said: count. */
static void count_side(peri__side *s, int32_t ranks)
{
    const peri__shape *first = &s->shapes[0];
    for (int32_t i = 0; i < s->n; i++) s->total += size_product(s->shapes[i].size, 0, s->shapes[i].ndim);
    if (s->dim >= 0)
        s->lines = size_product(first->size, 0, s->dim), s->row = size_product(first->size, s->dim + 1, first->ndim);
    for (int32_t r = 0; r < ranks; r++)
        s->counts[r] =
            s->dim < 0 ? size_product(s->shapes[r].size, 0, s->shapes[r].ndim) : s->lines * s->length[r] * s->row;
}

/** Whether the tensor's elements are in the order in which they travel. */
static bool as_it_travels(const peri__side *s) { return s->dim >= 0 && s->lines <= 1 && s->in_order; }

/** Elements from line to line of a tensor that is cut. */
static int64_t elements_per_line(const peri__side *s) { return s->shapes[0].size[s->dim] * s->row; }

/** The first line of each rank's piece, which goes from the tensor to where it is as it travels (@sent), or from
 *  there. */
static void list_runs(const peri__exchange *x, const peri__side *s, bool sent, peri_k_run *runs)
{
    int64_t at = 0;
    for (int32_t r = 0; r < x->trip.group->size; at += s->counts[r++]) {
        const int64_t here = s->from[r] * s->row;
        runs[r] = (peri_k_run){.to = sent ? at : here, .from = sent ? here : at, .n = s->length[r] * s->row};
    }
}

/** Copy the pieces of @tensor to @flat, where they travel (@sent), or from there. Both are contiguous. */
static peri_status move_pieces(const peri__exchange *x, const peri__side *s, peri_tensor *tensor, peri_tensor *flat,
                               bool sent)
{
    const int64_t n = x->trip.group->size, width = peri_dtype_size(x->dtype), past = peri__tune(PERI__TUNE_copy_past),
                  step = elements_per_line(s);
    PERI__HELD peri_tensor *runs = NULL;
    PERI__SCRATCH peri_k_run *list = peri__alloc(sizeof *list * (size_t)n);
    if (!list) return PERI_ENOMEM;
    list_runs(x, s, sent, list);
    PERI_TRY(peri__upload_i64(x->device, (const int64_t *)list, n * (int64_t)(sizeof *list / sizeof(int64_t)), &runs));
    peri_k_route_place_args args = {.dst = peri__data(sent ? flat : tensor),
                                    .received = peri__data(sent ? tensor : flat),
                                    .runs = peri__data(runs),
                                    .width = width,
                                    .lines = s->lines,
                                    .step = sent ? 0 : step,
                                    .from_step = sent ? step : 0,
                                    .past = past > 0 && 2 * s->total * width >= past};
    return PERI_LAUNCH(x->device, route_place, &args, n * s->lines, PERI_ELEMENT_GRAIN / (step / n + 1) + 1);
}

/** A view of what begins at *@at in @flat, of shape @shape; *at moves on. */
static peri_status part_view(const peri__shape *shape, peri_tensor *flat, int64_t *at, peri_tensor **out)
{
    PERI_TRY(peri__tensor_view(flat, shape->ndim, shape->size, NULL, flat->offset + *at, out));
    *at += size_product(shape->size, 0, shape->ndim);
    return PERI_OK;
}

/** If the tensors of a list lie one behind the other in memory already: a view of them all, else NULL. */
static peri_status view_if_adjacent(const peri__side *s, peri_tensor *const *list, peri_tensor **out)
{
    peri_tensor *first = NULL;
    int64_t at = 0;
    for (int32_t r = 0; r < s->n; at += s->counts[r++]) {
        peri_tensor *t = list[r];
        if (!s->counts[r]) continue;
        if (!t || !peri__contiguous(t)) return PERI_OK;
        if (!first) first = t;
        if (t->storage != first->storage || t->offset != first->offset + at) return PERI_OK;
    }
    return first ? peri__tensor_view(first, 1, &s->total, NULL, first->offset, out) : PERI_OK;
}

/** The tensors of a side as they travel: themselves, if they lie so. NULL among them counts as zeros. @out: a new
 *  reference. */
static peri_status lay_out(const peri__exchange *x, const peri__side *s, peri_tensor *const *tensors, peri_tensor **out)
{
    bool any = false;
    int64_t at = 0;
    PERI__HELD peri_tensor *flat = NULL, *whole = NULL;
    for (int32_t i = 0; i < s->n; i++) any = any || tensors[i];
    if (!any) return peri_tensor_full(x->device, x->dtype, 1, &s->total, 0, out);
    if (as_it_travels(s)) return peri__contiguous_of(tensors[0], out);
    if (s->dim < 0) PERI_TRY(view_if_adjacent(s, tensors, &flat));
    if (flat) {
        *out = peri__hand_over(&flat);
        return PERI_OK;
    }
    PERI_TRY(peri_tensor_new(x->device, x->dtype, 1, &s->total, &flat));
    if (s->dim >= 0) {
        PERI_TRY(peri__contiguous_of(tensors[0], &whole));
        PERI_TRY(move_pieces(x, s, whole, flat, true));
    }
    for (int32_t i = 0; i < s->n && s->dim < 0; i++) {
        PERI__HELD peri_tensor *part = NULL;
        PERI_TRY(part_view(&s->shapes[i], flat, &at, &part));
        if (s->counts[i]) PERI_TRY(tensors[i] ? peri_tensor_copy(part, tensors[i]) : peri__tensor_zero(part));
    }
    *out = peri__hand_over(&flat);
    return PERI_OK;
}

/** Its adjoint: what arrived, @flat, into the tensors of a side. Those that are NULL are made: views of @flat, if they
 *  lie so. */
static peri_status scatter_arrived(const peri__exchange *x, const peri__side *s, peri_tensor *flat,
                                   peri_tensor **tensors)
{
    const peri__shape *shape = &s->shapes[0];
    int64_t at = 0;
    if (s->dim >= 0 && !as_it_travels(s)) {
        if (!tensors[0]) PERI_TRY(peri_tensor_new(x->device, x->dtype, shape->ndim, shape->size, &tensors[0]));
        return move_pieces(x, s, tensors[0], flat, false);
    }
    for (int32_t i = 0; i < s->n; i++) {
        PERI__HELD peri_tensor *part = NULL, *to = NULL;
        PERI_TRY(part_view(&s->shapes[i], flat, &at, &part));
        if (!tensors[i]) {
            tensors[i] = peri__hand_over(&part);
        } else { /* a view of the caller's tensor, which may be on the tape by now, is not */
            peri_tensor *t = tensors[i];
            PERI_TRY(peri__tensor_view(t, t->ndim, t->shape, t->stride, t->offset, &to));
            PERI_TRY(peri__tensor_arrive(to, part));
        }
    }
    return PERI_OK;
}

/* -- exchanges ----------------------------------------------------------------------------------------------------- */

static void exchange_free(peri__trip *trip)
{
    peri__exchange *x = (peri__exchange *)trip;
    peri__transfer_fini(&x->back);
    for (int i = 0; i < 2; i++) peri_codec_release(x->codec[i]);
    peri__free(x);
}

static const peri__trip_vtab exchange_trip;

static peri_status check_codec(const peri__exchange_call *c, peri_codec *codec)
{
    if (!codec || peri_codec_wire_dtype(codec) == PERI_F32 || c->input->dtype == PERI_F32) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: a codec for %s, allowed: f32", c->function, peri_dtype_name(c->input->dtype));
}

static peri_status check_call(const peri__exchange_call *c, const peri_exchange_args *o)
{
    const bool floating = c->input->dtype == PERI_F32 || c->input->dtype == PERI_F64;
    PERI_TRY(peri__group_check(c->function, c->group));
    if (c->kind != PERI_COLL_ALL_TO_ALL && !floating)
        return peri__fail(PERI_EINVAL, "%s: the input is %s, allowed: f32, f64", c->function,
                          peri_dtype_name(c->input->dtype));
    if (o->division < 0 || o->division > PERI_DIVISION_OFF)
        return peri__fail(PERI_EINVAL, "%s: division %d, allowed: PERI_DIVISION_*", c->function, o->division);
    PERI_TRY(check_codec(c, o->forward));
    return check_codec(c, o->backward);
}

/** Room for the sides of an exchange, in one block with it. */
static peri__exchange *exchange_alloc(const peri__exchange_call *c)
{
    const size_t w = (size_t)c->group->size;
    const size_t n[2] = {c->dims[0] < 0 ? w : 1, c->dims[1] < 0 ? w : 1};
    peri__exchange *x =
        peri__alloc_zero(sizeof *x + 6 * w * sizeof(int64_t) + (n[0] + n[1]) * sizeof *x->sides->shapes);
    if (!x) return NULL;
    peri__shape *shapes = (peri__shape *)(x + 1);
    int64_t *numbers = (int64_t *)(shapes + n[0] + n[1]);
    for (int i = 0; i < 2; i++, numbers += 3 * w)
        x->sides[i] = (peri__side){.n = (int32_t)n[i],
                                   .dim = c->dims[i],
                                   .shapes = shapes + (i ? n[0] : 0),
                                   .from = numbers,
                                   .length = numbers + w,
                                   .counts = numbers + 2 * w,
                                   .in_order = true};
    return x;
}

peri_status peri__exchange_new(const peri__exchange_call *c, peri__exchange **out)
{
    peri_exchange_args o = {.size = sizeof o};
    if (c->options) PERI_TRY(peri__struct_take(&o, sizeof o, c->options, c->function, "peri_exchange_args"));
    PERI_TRY(check_call(c, &o));
    peri__exchange *x = exchange_alloc(c);
    if (!x) return PERI_ENOMEM;
    peri__trip_init(&x->trip, &exchange_trip, c->group);
    x->device = peri__device(c->input);
    x->function = c->function;
    x->kind = c->kind;
    x->channel = c->collective ? c->group->channel : PERI_CHANNEL_ROWS;
    x->dtype = c->input->dtype;
    x->divisor = peri__gradient_divisor(c->group, o.division ? o.division : c->division);
    x->tag = c->collective ? c->alike : peri__hash_mix(peri__hash_text(c->function), c->alike);
    for (int i = 0; i < 2 && !c->collective; i++) {
        peri_codec *codec = i ? o.backward : o.forward;
        if (codec && peri_codec_wire_dtype(codec) != PERI_F32) peri_codec_retain(x->codec[i] = codec);
        x->tag = peri__hash_mix(x->tag, peri__codec_hash(x->codec[i]));
    }
    if (!c->collective) x->tag = peri__hash_mix(x->tag, o.tag);
    *out = x;
    return PERI_OK;
}

/** What travels there, or (@back) back: the gradient, which is divided where it arrives. */
static peri__transfer_args transfer_args_of(const peri__exchange *x, bool back)
{
    static const int32_t adjoint[] = {[PERI_COLL_ALL_TO_ALL] = PERI_COLL_ALL_TO_ALL,
                                      [PERI_COLL_REDUCE_SCATTER] = PERI_COLL_ALL_GATHER,
                                      [PERI_COLL_ALL_GATHER] = PERI_COLL_REDUCE_SCATTER};
    return (peri__transfer_args){.kind = back ? adjoint[x->kind] : x->kind,
                                 .channel = x->channel,
                                 .tag = x->tag,
                                 .out = x->sides[back].counts,
                                 .in = x->sides[!back].counts,
                                 .codec = x->codec[back],
                                 .divisor = back ? x->divisor : 1};
}

/* -- backward ------------------------------------------------------------------------------------------------------ */

static peri_status send_gradients(peri__trip *trip, peri_tensor *const *grad_out)
{
    peri__exchange *x = (peri__exchange *)trip;
    PERI__HELD peri_tensor *flat = NULL;
    PERI_TRY(peri__group_check(x->function, x->trip.group));
    PERI_TRY(lay_out(x, &x->sides[1], grad_out, &flat));
    const peri__transfer_args a = transfer_args_of(x, true);
    return peri__transfer_post(x->trip.group, flat, &a, &x->back);
}

static peri_status receive_gradients(peri__trip *trip, const peri__node *leave, peri_tensor **grad_in)
{
    (void)leave;
    peri__exchange *x = (peri__exchange *)trip;
    peri_status status = peri__transfer_test(&x->back);
    if (status != PERI_OK) return status;
    PERI__HELD peri_tensor *flat = peri__transfer_numbers(&x->back);
    return scatter_arrived(x, &x->sides[0], flat, grad_in);
}

static const peri__trip_vtab exchange_trip = {
    PERI__TRIP_NODES("exchange", "exchange result", 0), .set_out = send_gradients, .come_back = receive_gradients,
    .fini = exchange_free};

/* -- forward ------------------------------------------------------------------------------------------------------- */

/** Whether the transport is to put pieces of a tensor in their places. */
static bool transport_can_place(const peri__exchange *x, const peri__side *s)
{
    int64_t least = elements_per_line(s);
    for (int32_t r = 0; r < x->trip.group->size; r++)
        if (s->length[r] > 0) least = peri__min(least, s->length[r] * s->row);
    if (least * peri_dtype_size(x->dtype) < PLACE_LEAST && s->lines > PLACE_LINES) return false;
    return peri__stage_can_place(x->trip.group->comm, x->device);
}

/** Have what needs no decoding arrive in the results, if it can: w->there, and the transfer's `to` (new). @runs: room
 *  for those of the ranks. @sent: what travels to the others. */
static peri_status place_arrivals(exchange_work *w, const peri_tensor *sent, peri_k_run *runs, peri__transfer_args *a)
{
    const peri__exchange *x = w->exchange;
    const peri__side *s = &x->sides[1];
    const peri__shape *shape = &s->shapes[0];
    PERI__HELD peri_tensor *to = NULL;
    if (s->dim < 0) {
        if (w->given) PERI_TRY(view_if_adjacent(s, w->results, &to));
        if (to && to->storage == sent->storage && to->offset < sent->offset + x->sides[0].total &&
            sent->offset < to->offset + s->total)
            return PERI_OK; /* they overlap */
        a->to = peri__hand_over(&to);
    } else if (as_it_travels(s) || transport_can_place(x, s)) {
        if (!w->given) PERI_TRY(peri_tensor_new(x->device, x->dtype, shape->ndim, shape->size, &w->results[0]));
        peri_tensor_retain(a->to = w->results[0]);
        if (!as_it_travels(s)) {
            list_runs(x, s, false, runs);
            a->runs = runs;
            a->n_runs = x->trip.group->size;
            a->lines = s->lines;
            a->step = elements_per_line(s);
        }
    }
    w->there = a->to;
    return PERI_OK;
}

static peri_status send_inputs(exchange_work *w, peri_tensor *const *inputs)
{
    peri__exchange *x = w->exchange;
    peri__transfer_args a = transfer_args_of(x, false);
    PERI__HELD peri_tensor *flat = NULL;
    PERI__SCRATCH peri_k_run *runs = peri__alloc(sizeof *runs * (size_t)x->trip.group->size);
    if (!runs) return PERI_ENOMEM;
    PERI_TRY(lay_out(x, &x->sides[0], inputs, &flat));
    if (!a.codec) PERI_TRY(place_arrivals(w, flat, runs, &a));
    peri_status status = peri__transfer_post(x->trip.group, flat, &a, &w->forth);
    peri_tensor_release(a.to);
    return status;
}

static peri_status start_exchange(exchange_work *w, peri_tensor *const *inputs, bool recorded)
{
    peri__exchange *x = w->exchange;
    if (x->trip.group->size == 1 && !w->given) {
        peri_tensor_retain(w->results[0] = inputs[0]);
        return PERI_OK;
    }
    const bool floating = x->dtype == PERI_F32 || x->dtype == PERI_F64;
    if (recorded && floating && peri_grad_enabled())
        PERI_TRY(peri__trip_leaves(&x->trip, inputs, x->sides[0].n, &w->leave));
    const bool before = peri__grad_swap(false);
    peri_status status = send_inputs(w, inputs);
    peri__grad_swap(before);
    if (status < 0 || !w->leave || !w->given) return status;
    status = peri__trip_arrives(&x->trip, &w->leave, w->results, x->sides[1].n);
    return status < 0 ? peri__group_fail(x->trip.group, status) : status; /* the others have recorded it */
}

static peri_status exchange_step(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    peri_status status = peri__transfer_test(&w->forth);
    if (status != PERI_OK) return status;
    PERI__HELD peri_tensor *flat = peri__transfer_numbers(&w->forth);
    if (w->there || !flat) return PERI_OK;
    status = scatter_arrived(w->exchange, &w->exchange->sides[1], flat, w->results);
    return status < 0 ? peri__group_fail(work->group, status) : status;
}

static void exchange_fini(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    for (int32_t i = 0; i < w->exchange->sides[1].n; i++) peri_tensor_release(w->results[i]);
    peri__transfer_fini(&w->forth);
    peri__node_release(w->leave);
    peri__trip_release(&w->exchange->trip);
}

static const peri__work_vtab exchange_vtab = {.name = "exchange", .step = exchange_step, .fini = exchange_fini};

peri_status peri__exchange_post(peri__exchange *x, peri_tensor *const *inputs, peri_tensor *const *results,
                                bool recorded, peri_work **out)
{
    peri_work *work;
    peri_group *group = x->trip.group;
    const int32_t n = x->sides[1].n;
    for (int32_t i = 0; i < x->sides[0].n; i++) x->sides[0].shapes[i] = peri__shape_of(inputs[i]);
    for (int i = 0; i < 2; i++) count_side(&x->sides[i], group->size);
    peri_status status = peri__work_new(sizeof(exchange_work) + sizeof(peri_tensor *) * (size_t)n, &exchange_vtab,
                                        group, x->device, &work);
    if (status < 0) {
        peri__trip_release(&x->trip);
        return status;
    }
    exchange_work *w = (exchange_work *)work;
    w->exchange = x;
    w->results = (peri_tensor **)(w + 1);
    w->given = results;
    for (int32_t i = 0; i < n && results; i++) peri_tensor_retain(w->results[i] = results[i]);
    peri__parts_begin(group);
    status = start_exchange(w, inputs, recorded);
    peri__parts_end(group);
    return peri__work_hand_out(work, status, out);
}

/** @work as an exchange whose results are to be handed out; NULL: it is none. */
static exchange_work *exchange_of_work(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    return work->vtab == &exchange_vtab && !w->given ? w : NULL;
}

int32_t peri_exchange_results(peri_work *exchange)
{
    if (!exchange) return 0;
    const exchange_work *w = exchange_of_work(exchange);
    return w ? w->exchange->sides[1].n : 1;
}

peri_status peri_exchange_result(peri_work *exchange, peri_tensor **out)
{
    PERI_NEED(exchange, out);
    static const char name[] = "peri_exchange_result";
    exchange_work *w = exchange_of_work(exchange);
    if (!w) return peri__fail(PERI_EINVAL, "%s: this work is no exchange of embeddings", name);
    if (exchange->status != PERI_OK)
        return peri__fail(PERI_EINVAL, "%s: the exchange is not complete; wait for it", name);
    if (w->used) return peri__fail(PERI_EINVAL, "%s: this result was already taken", name);
    const int32_t n = w->exchange->sides[1].n;
    if (w->leave) PERI_TRY(peri__trip_arrives(&w->exchange->trip, &w->leave, w->results, n));
    w->used = true;
    for (int32_t i = 0; i < n; i++) out[i] = peri__hand_over(&w->results[i]);
    return PERI_OK;
}
