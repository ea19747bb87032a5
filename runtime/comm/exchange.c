/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c: numbers that travel with their gradients: a flow is a trip (transfer.h) whose results have a layout.
 */
#include "exchange.h"
#include "../../kernels/route.h"

#include "../base/tune.h"
#include "../tensor/jagged_internal.h"
#include "transfer.h"

enum {
    PLACE_LEAST = 512, /* bytes of a row's block that the transport may put in its place: shorter ones are copied faster
                          afterwards */
    PLACE_ROWS = 64    /* but so few rows are placed, however short: a copy of its own costs more */
};

/** What the work and the two nodes share. */
typedef struct flow {
    peri__trip trip;
    const char *function;
    peri_device *device;
    peri_codec *codec[2]; /* forward, backward: retained, or NULL */
    int32_t kind, layout, dtype;
    double divisor;
    uint64_t tag;
    int64_t *out, *in, *dims; /* W each; behind this struct */
    peri_k_run *runs;     /* COLUMNS: W, where the first row of each rank's block belongs, and W, the way back; the
                             other rows follow. Behind them */
    int64_t rows, columns;
    int32_t ndim, input_ndim;
    int64_t shape[PERI_MAX_DIMS], input_shape[PERI_MAX_DIMS];
    peri__transfer back;  /* of the gradient */
} flow;

typedef struct exchange_work {
    peri_work base;
    flow *flow;
    peri__transfer forth;  /* none in a group of one rank */
    peri__node *leave;     /* until its result is handed out; NULL: not recorded */
    peri_tensor **results; /* W or 1; behind this struct. Before it is complete: the one in which numbers arrive as they
                              are to be, or NULL */
    bool used;
} exchange_work;

/* -- transfers ----------------------------------------------------------------------------------------------------- */

/** Whether the transport is to put blocks of columns in their places. */
static bool places_columns(const flow *f)
{
    int64_t least = f->columns;
    for (int64_t i = 0; i < f->trip.group->size; i++) least = f->dims[i] > 0 && f->dims[i] < least ? f->dims[i] : least;
    if (least * peri_dtype_size(f->dtype) < PLACE_LEAST && f->rows > PLACE_ROWS) return false;
    return peri__stage_places(f->trip.group->comm, f->device);
}

/** Where the result of a way forth that needs no decoding belongs, if it can arrive there: *to (new) and a->runs. */
static peri_status place(const flow *f, peri__transfer_args *a, peri_tensor **to)
{
    int64_t matrix[2] = {f->rows, f->columns};
    if (f->layout == PERI_LAYOUT_FLAT) return peri_tensor_new(f->device, f->dtype, f->ndim, f->shape, to);
    if (f->layout != PERI_LAYOUT_COLUMNS || !places_columns(f)) return PERI_OK;
    a->runs = f->runs;
    a->n_runs = f->trip.group->size;
    a->lines = f->rows;
    a->step = f->columns;
    return peri_tensor_new(f->device, f->dtype, 2, matrix, to);
}

/** What travels there, or (@back) back: the gradient, which is divided where it arrives. */
static peri__transfer_args args_of(const flow *f, bool back)
{
    static const int32_t kinds[2][3] = {{PERI_COLL_ALL_TO_ALL, PERI_COLL_REDUCE_SCATTER, PERI_COLL_ALL_GATHER},
                                        {PERI_COLL_ALL_TO_ALL, PERI_COLL_ALL_GATHER, PERI_COLL_REDUCE_SCATTER}};
    return (peri__transfer_args){.kind = kinds[back][f->kind],
                                 .channel = PERI_CHANNEL_ROWS,
                                 .tag = f->tag,
                                 .out = back ? f->in : f->out,
                                 .in = back ? f->out : f->in,
                                 .codec = f->codec[back],
                                 .divisor = back ? f->divisor : 1};
}

/* -- flows --------------------------------------------------------------------------------------------------------- */

static void flow_fini(peri__trip *trip)
{
    flow *f = (flow *)trip;
    peri__transfer_fini(&f->back);
    for (int i = 0; i < 2; i++) peri_codec_release(f->codec[i]);
    peri__free(f);
}

static const peri__trip_vtab flow_vtab;

static peri_status check_codec(const peri__flow_args *a, const peri_tensor *input, peri_codec *codec, peri_codec **out)
{
    if (!codec || peri_codec_wire_dtype(codec) == PERI_F32) return PERI_OK;
    if (input->dtype != PERI_F32)
        return peri__fail(PERI_EINVAL, "%s: a codec for %s, allowed: f32", a->function, peri_dtype_name(input->dtype));
    peri_codec_retain(codec);
    *out = codec;
    return PERI_OK;
}

/** Where the rows of @f's blocks of columns belong, and where they came from. */
static void list_runs(flow *f)
{
    int64_t from = 0, column = 0;
    for (int64_t i = 0; i < f->trip.group->size; i++) {
        f->runs[i] = (peri_k_run){.to = column, .from = from, .n = f->dims[i]};
        f->runs[f->trip.group->size + i] = (peri_k_run){.to = from, .from = column, .n = f->dims[i]};
        from += f->rows * f->dims[i];
        column += f->dims[i];
    }
}

/** Fill in all of a flow but its counts, a->out. peri__flow_counts has allocated both in one piece, the flow just in
 *  front of the counts; it is still the caller's on failure. */
static peri_status flow_new(peri_group *g, const peri_tensor *input, const peri__flow_args *a, flow **out)
{
    static const peri_exchange_args none = {.size = sizeof none};
    peri_exchange_args options;
    const peri_exchange_args *o = a->options ? &options : &none;
    if (a->options)
        PERI_TRY(peri__struct_take(&options, sizeof options, a->options, a->function, "peri_exchange_args"));
    bool floating = input->dtype == PERI_F32 || input->dtype == PERI_F64;
    if (a->kind != PERI_FLOW_ALL_TO_ALL && !floating)
        return peri__fail(PERI_EINVAL, "%s: the input is %s, allowed: f32, f64", a->function,
                          peri_dtype_name(input->dtype));
    if (o->division < 0 || o->division > PERI_DIVISION_OFF)
        return peri__fail(PERI_EINVAL, "%s: division %d, allowed: PERI_DIVISION_*", a->function, o->division);
    flow *f = (flow *)a->out - 1;
    peri_status status = check_codec(a, input, o->forward, &f->codec[0]);
    if (status >= 0) status = check_codec(a, input, o->backward, &f->codec[1]);
    if (status < 0) {
        peri_codec_release(f->codec[0]);
        return status;
    }
    peri__trip_init(&f->trip, &flow_vtab, g);
    f->device = peri__device(input);
    f->function = a->function;
    f->kind = a->kind;
    f->layout = a->layout;
    f->dtype = input->dtype;
    f->divisor = peri__gradient_divisor(g, o->division ? o->division : a->division);
    f->tag = peri__hash_mix(peri__hash_text(a->function), a->alike);
    for (int i = 0; i < 2; i++) f->tag = peri__hash_mix(f->tag, peri__codec_hash(f->codec[i]));
    f->tag = peri__hash_mix(f->tag, o->tag);
    f->input_ndim = input->ndim;
    memcpy(f->input_shape, input->shape, sizeof f->input_shape);
    f->ndim = a->ndim;
    if (a->layout == PERI_LAYOUT_FLAT) memcpy(f->shape, a->shape, sizeof *a->shape * (size_t)a->ndim);
    f->rows = a->rows;
    if (a->layout != PERI_LAYOUT_FLAT) {
        f->dims = a->in + g->size;
        memcpy(f->dims, a->dims, sizeof *f->dims * (size_t)g->size);
        f->columns = peri__sum(f->dims, g->size);
    }
    if (a->layout == PERI_LAYOUT_COLUMNS && a->rows <= 1) { /* the blocks of one row arrive side by side */
        f->layout = PERI_LAYOUT_FLAT;
        f->ndim = 2;
        f->shape[0] = f->rows;
        f->shape[1] = f->columns;
    }
    f->runs = (peri_k_run *)(a->in + 2 * g->size);
    if (f->layout == PERI_LAYOUT_COLUMNS) list_runs(f);
    f->out = a->out;
    f->in = a->in;
    *out = f;
    return PERI_OK;
}

peri_status peri__flow_counts(const peri_group *group, int64_t **out, int64_t **in)
{
    flow *f = peri__alloc_zero(sizeof *f + (sizeof **out * 3 + sizeof(peri_k_run) * 2) * (size_t)group->size);
    if (!f) return PERI_ENOMEM;
    *out = (int64_t *)(f + 1);
    *in = *out + group->size;
    return PERI_OK;
}

void peri__flow_counts_free(int64_t *out) { peri__free((flow *)out - 1); }

/* -- layouts ------------------------------------------------------------------------------------------------------- */

static int32_t results_of(const flow *f) { return f->layout == PERI_LAYOUT_LIST ? f->trip.group->size : 1; }

/** The block of what rank @i sent: @flat's view [rows, dims[i]]; *at moves on. */
static peri_status chunk(const flow *f, peri_tensor *flat, int32_t i, int64_t *at, peri_tensor **out)
{
    int64_t shape[2] = {f->rows, f->dims[i]};
    PERI_TRY(peri__tensor_view(flat, 2, shape, NULL, flat->offset + *at, out));
    *at += f->rows * f->dims[i];
    return PERI_OK;
}

/** Put the blocks of @from, one after the other, side by side into @to; or (@back) the other way round. Both
 *  contiguous. */
static peri_status move_columns(const flow *f, const peri_tensor *from, const peri_tensor *to, bool back)
{
    const int64_t n = f->trip.group->size, width = peri_dtype_size(f->dtype), past = peri__tune(PERI__TUNE_copy_past),
                  grain = PERI_ELEMENT_GRAIN / (f->columns / n + 1) + 1;
    PERI__HELD peri_tensor *runs = NULL;
    PERI_TRY(peri__upload_i64(f->device, (const int64_t *)(f->runs + (back ? n : 0)),
                              n * (int64_t)(sizeof *f->runs / sizeof(int64_t)), &runs));
    peri_k_route_place_args args = {.dst = peri__data(to),
                                    .received = peri__data(from),
                                    .runs = peri__data(runs),
                                    .width = width,
                                    .lines = f->rows,
                                    .step = back ? 0 : f->columns,
                                    .from_step = back ? f->columns : 0,
                                    .past = past > 0 && 2 * f->rows * f->columns * width >= past};
    return PERI_LAUNCH(f->device, route_place, &args, n * f->rows, grain);
}

/** Make the results of @flat, the numbers that have arrived: itself, a matrix of columns side by side, or a list of
 *  tensors, as the flow's layout says. */
static peri_status lay_out(const flow *f, peri_tensor *flat, peri_tensor **out)
{
    int64_t shape[2] = {f->rows, f->columns}, at = 0;
    if (f->layout == PERI_LAYOUT_FLAT) return peri__tensor_view(flat, f->ndim, f->shape, NULL, flat->offset, out);
    if (f->layout == PERI_LAYOUT_COLUMNS) {
        PERI_TRY(peri__tensor_like(flat, 2, shape, out));
        return move_columns(f, flat, *out, false);
    }
    for (int32_t i = 0; i < f->trip.group->size; i++) PERI_TRY(chunk(f, flat, i, &at, &out[i]));
    return PERI_OK;
}

/** Lay the gradients of the results out in one new tensor, *out, in the order in which they travel back: the adjoint
 *  of lay_out. A result without a gradient (NULL) has zeros there. */
static peri_status gather_gradient(const flow *f, peri_tensor *const *grad, peri_tensor **out)
{
    const peri_group *g = f->trip.group;
    int64_t n = f->kind == PERI_FLOW_REDUCE_SCATTER ? f->out[g->rank] : peri__sum(f->in, g->size), at = 0;
    bool any = false;
    PERI__HELD peri_tensor *flat = NULL, *matrix = NULL;
    for (int32_t i = 0; i < results_of(f); i++) any = any || grad[i];
    if (!any) return peri_tensor_full(f->device, f->dtype, 1, &n, 0, out);
    if (f->layout == PERI_LAYOUT_FLAT) return peri__contiguous_of(grad[0], out);
    PERI_TRY(peri_tensor_new(f->device, f->dtype, 1, &n, &flat));
    if (f->layout == PERI_LAYOUT_COLUMNS) {
        PERI_TRY(peri__contiguous_of(grad[0], &matrix));
        PERI_TRY(move_columns(f, matrix, flat, true));
    }
    for (int32_t i = 0; i < results_of(f) && f->layout == PERI_LAYOUT_LIST; i++) {
        PERI__HELD peri_tensor *part = NULL;
        PERI_TRY(chunk(f, flat, i, &at, &part));
        PERI_TRY(grad[i] ? peri_tensor_copy(part, grad[i]) : peri_tensor_fill(part, 0));
    }
    *out = peri__give(&flat);
    return PERI_OK;
}

/* -- backward ------------------------------------------------------------------------------------------------------ */

static peri_status set_out(peri__trip *trip, peri_tensor *const *grad_out)
{
    flow *f = (flow *)trip;
    PERI__HELD peri_tensor *flat = NULL;
    PERI_TRY(peri__group_check(f->function, f->trip.group));
    PERI_TRY(gather_gradient(f, grad_out, &flat));
    const peri__transfer_args a = args_of(f, true);
    return peri__transfer_post(f->trip.group, flat, &a, &f->back);
}

static peri_status come_back(peri__trip *trip, const peri__node *leave, peri_tensor **grad_in)
{
    (void)leave;
    flow *f = (flow *)trip;
    peri_status status = peri__transfer_test(&f->back);
    if (status != PERI_OK) return status;
    PERI__HELD peri_tensor *numbers = peri__transfer_take(&f->back);
    return peri__tensor_view(numbers, f->input_ndim, f->input_shape, NULL, numbers->offset, &grad_in[0]);
}

static const peri__trip_vtab flow_vtab = {
    PERI__TRIP_NODES("exchange", "exchange result", 0), .set_out = set_out, .come_back = come_back, .fini = flow_fini};

/* -- forward ------------------------------------------------------------------------------------------------------- */

static peri_status exchange_step(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    peri_status status = peri__transfer_test(&w->forth);
    if (status != PERI_OK) return status;
    PERI__HELD peri_tensor *flat = peri__transfer_take(&w->forth);
    if (w->results[0]) return PERI_OK;
    status = lay_out(w->flow, flat, w->results);
    return status < 0 ? peri__group_fail(work->group, status) : status;
}

static void exchange_fini(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    for (int32_t i = 0; i < results_of(w->flow); i++) peri_tensor_release(w->results[i]);
    peri__transfer_fini(&w->forth);
    peri__node_release(w->leave);
    peri__trip_release(&w->flow->trip);
}

static const peri__work_vtab exchange_vtab = {.name = "exchange", .step = exchange_step, .fini = exchange_fini};

/** Take and post @input; the work owns the flow already. */
static peri_status start(exchange_work *w, peri_tensor *input)
{
    flow *f = w->flow;
    if (f->trip.group->size == 1) {
        peri_tensor_retain(w->results[0] = input);
        return PERI_OK;
    }
    if (peri_grad_enabled() && (f->dtype == PERI_F32 || f->dtype == PERI_F64))
        PERI_TRY(peri__trip_leaves(&f->trip, &input, 1, &w->leave));
    PERI__HELD peri_tensor *flat = NULL;
    PERI_TRY(peri__contiguous_of(input, &flat));
    peri__transfer_args a = args_of(f, false);
    if (!a.codec) PERI_TRY(place(f, &a, &w->results[0]));
    a.to = w->results[0];
    return peri__transfer_post(f->trip.group, flat, &a, &w->forth);
}

peri_status peri__flow_post(peri_group *group, peri_tensor *input, const peri__flow_args *args, peri_work **out)
{
    flow *f = NULL;
    peri_work *work;
    peri_status status = peri__group_check(args->function, group);
    if (status >= 0) status = flow_new(group, input, args, &f);
    if (status < 0) {
        peri__flow_counts_free(args->out);
        return status;
    }
    status = peri__work_new(sizeof(exchange_work) + sizeof(peri_tensor *) * (size_t)results_of(f), &exchange_vtab,
                            group, f->device, &work);
    if (status < 0) {
        peri__trip_release(&f->trip);
        return status;
    }
    ((exchange_work *)work)->flow = f;
    ((exchange_work *)work)->results = (peri_tensor **)((exchange_work *)work + 1);
    peri__parts_begin(group);
    status = start((exchange_work *)work, input);
    peri__parts_end(group);
    return peri__work_hand_out(work, status, out);
}

int32_t peri_exchange_results(peri_work *exchange)
{
    if (!exchange) return 0;
    return exchange->vtab == &exchange_vtab ? results_of(((exchange_work *)exchange)->flow) : 1;
}

peri_status peri_exchange_result(peri_work *exchange, peri_tensor **out)
{
    PERI_NEED(exchange, out);
    static const char name[] = "peri_exchange_result";
    exchange_work *w = (exchange_work *)exchange;
    if (exchange->vtab != &exchange_vtab)
        return peri__fail(PERI_EINVAL, "%s: this work is no exchange of embeddings", name);
    if (exchange->status != PERI_OK)
        return peri__fail(PERI_EINVAL, "%s: the exchange is not complete; wait for it", name);
    if (w->used) return peri__fail(PERI_EINVAL, "%s: this result was already taken", name);
    if (w->leave) PERI_TRY(peri__trip_arrives(&w->flow->trip, &w->leave, w->results, results_of(w->flow)));
    w->used = true;
    for (int32_t i = 0; i < results_of(w->flow); i++) out[i] = peri__give(&w->results[i]);
    return PERI_OK;
}
