/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c: numbers that travel with their gradients.
 *
 * An exchange is one flow and, on the tape, two nodes. The later one (`arrive`, recorded when the result is handed out) starts the exchange
 * of the gradient in its backward; the earlier one (`leave`, recorded when the exchange was posted) waits for it in its own. A transfer is
 * one direction: encoded, posted, decoded. Encoded numbers are not summed on their way: a reduce-scatter with a codec sends every part to
 * its rank, which decodes them all and sums in f32.
 */
#include "exchange.h"

enum {
    GRAIN = 1 << 15,
    PLACE_LEAST = 512, /* bytes of a row's block that the transport may put in its place: shorter ones are copied faster afterwards */
    PLACE_ROWS = 64,   /* but so few rows are placed, however short: a copy of its own costs more */
    PLACE_FEW = 64     /* runs for which the stack has room */
};

/** One direction of a flow on its way. */
typedef struct transfer {
    peri_work *work;              /* NULL: none, or complete */
    peri_tensor *received;        /* numbers, or their codes */
    peri_codec_context *decoding; /* NULL: not encoded */
    bool summed;                  /* the parts that arrive are to be added up */
    bool placed;                  /* what arrives is put where COLUMNS want it */
    bool shaped;                  /* what arrives has the shape of the result */
} transfer;

/** What the work and the two nodes share. */
typedef struct flow {
    peri__refs refs;
    const char *function;
    peri_group *group;    /* retained */
    peri_device *device;
    peri_codec *codec[2]; /* forward, backward: retained, or NULL */
    int32_t kind, layout, dtype;
    double divisor;
    uint64_t tag;
    int64_t *out, *in, *dims; /* W each; behind this struct */
    int64_t rows, columns;
    int32_t ndim, input_ndim;
    int64_t shape[PERI_MAX_DIMS], input_shape[PERI_MAX_DIMS];
    transfer back;        /* of the gradient */
} flow;

typedef struct exchange_work {
    peri_work base;
    flow *flow;
    transfer forth;
    peri__node *leave;     /* until its result is handed out; NULL: not recorded */
    peri_tensor **results; /* when complete: W or 1; behind this struct */
    peri_tensor *input;    /* of a group of one rank */
    bool used;
} exchange_work;

/* -- division ------------------------------------------------------------------------------------------------------------------------- */

static atomic_int process_division = PERI_DIVISION_ON;

peri_status peri_exchange_division_set(peri_group *group, int32_t division)
{
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

/* -- transfers ------------------------------------------------------------------------------------------------------------------------ */

static int64_t sum_of(const int64_t *numbers, int32_t n)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < n; i++) sum += numbers[i];
    return sum;
}

static void transfer_fini(transfer *t)
{
    peri_work_release(t->work);
    peri_tensor_release(t->received);
    peri_codec_context_release(t->decoding);
    *t = (transfer){0};
}

/** The kind of the way back. */
static int32_t reverse_of(int32_t kind)
{
    return kind == PERI_FLOW_REDUCE_SCATTER ? PERI_FLOW_ALL_GATHER : kind == PERI_FLOW_ALL_GATHER ? PERI_FLOW_REDUCE_SCATTER : kind;
}

/** Where the first row of every rank's block of columns belongs (W runs: in @few, of PLACE_FEW, or new; the other rows follow); NULL:
 *  nowhere that is worth it. */
static peri_k_run *column_runs(const flow *f, int64_t element, peri_k_run *few)
{
    int64_t n = f->group->size, least = f->columns, from = 0, column = 0;
    for (int64_t i = 0; i < n; i++) least = f->dims[i] > 0 && f->dims[i] < least ? f->dims[i] : least;
    if (least * element < PLACE_LEAST && f->rows > PLACE_ROWS) return NULL;
    if (!peri__stage_places(f->group->comm, f->device)) return NULL;
    peri_k_run *runs = n <= PLACE_FEW ? few : peri__alloc(sizeof *runs * (size_t)n);
    for (int64_t i = 0; i < n && runs; i++) {
        runs[i] = (peri_k_run){.to = column, .from = from, .n = f->dims[i]};
        from += f->rows * f->dims[i];
        column += f->dims[i];
    }
    return runs;
}

/** Post @src (contiguous): @out[i] elements for rank i, @in[i] from it. */
static peri_status post(const flow *f, int32_t kind, peri_tensor *src, const int64_t *out, const int64_t *in, transfer *t)
{
    static const int32_t kinds[] = {PERI_COLL_ALL_TO_ALL, PERI_COLL_REDUCE_SCATTER, PERI_COLL_ALL_GATHER};
    int32_t rank = f->group->rank;
    peri_status status;
    int64_t n = kind == PERI_FLOW_REDUCE_SCATTER ? out[rank] : sum_of(in, f->group->size), matrix[2] = {f->rows, f->columns};
    peri_k_run few[PLACE_FEW], *runs = t->placed ? column_runs(f, peri_dtype_size(src->dtype), few) : NULL;
    t->placed = runs != NULL;
    if (runs) status = peri_tensor_new(f->device, src->dtype, 2, matrix, &t->received);
    else if (t->shaped) status = peri_tensor_new(f->device, src->dtype, f->ndim, f->shape, &t->received);
    else status = peri_tensor_new(f->device, src->dtype, 1, &n, &t->received);
    peri_coll_op op = {.kind = kinds[kind], .dtype = src->dtype, .reduce = PERI_REDUCE_SUM, .tag = f->tag, .send_counts = out,
                       .recv_counts = kind == PERI_FLOW_REDUCE_SCATTER ? NULL : in};
    if (runs) {
        op.recv_runs = runs;
        op.n_recv_runs = f->group->size;
        op.recv_lines = f->rows;
        op.recv_step = f->columns;
    }
    if (status >= 0) status = peri__coll_post(f->group, &op, src, t->received, &t->work);
    if (runs != few) peri__free(runs);
    return status;
}

static peri_status post_encoded(const flow *f, int32_t kind, peri_codec *codec, peri_tensor *src, const int64_t *out, const int64_t *in,
                                transfer *t)
{
    peri_codec_context *encoding = NULL;
    peri_tensor *wire = NULL;
    peri_status status;
    int32_t w = f->group->size;
    bool gather = kind == PERI_FLOW_ALL_GATHER;
    PERI_TRY_GOTO(peri_codec_context_new(codec, out, gather ? 1 : w, &encoding), out);
    PERI_TRY_GOTO(peri_codec_context_new(codec, in, w, &t->decoding), out);
    PERI_TRY_GOTO(peri_codec_encode(encoding, src, &wire), out);
    t->summed = kind == PERI_FLOW_REDUCE_SCATTER;
    status = post(f, gather ? kind : PERI_FLOW_ALL_TO_ALL, wire, peri_codec_context_wire_splits(encoding),
                  peri_codec_context_wire_splits(t->decoding), t);
out:
    peri_codec_context_release(encoding);
    peri_tensor_release(wire);
    return status;
}

/** Start one direction (0: forth, 1: back) with the numbers of @src (contiguous). */
static peri_status transfer_start(const flow *f, int32_t direction, peri_tensor *src, transfer *t)
{
    int32_t kind = direction ? reverse_of(f->kind) : f->kind;
    const int64_t *out = direction ? f->in : f->out, *in = direction ? f->out : f->in;
    peri_codec *codec = f->codec[direction];
    t->placed = !codec && direction == 0 && f->layout == PERI_LAYOUT_COLUMNS;
    t->shaped = !codec && direction == 0 && f->layout == PERI_LAYOUT_FLAT;
    peri_status status = codec ? post_encoded(f, kind, codec, src, out, in, t) : post(f, kind, src, out, in, t);
    if (status < 0) transfer_fini(t);
    return status;
}

/** PERI_PENDING, or *@numbers (new): all that arrived, of one dimension. */
static peri_status transfer_finish(const flow *f, transfer *t, peri_tensor **numbers)
{
    if (t->work) {
        peri_status status = peri_work_test(t->work);
        if (status != PERI_OK) return status;
        peri_work_release(t->work);
        t->work = NULL;
    }
    if (!t->decoding) {
        *numbers = t->received;
        t->received = NULL;
        return PERI_OK;
    }
    peri_tensor *all = NULL, *view = NULL, *sum = NULL;
    peri_status status = peri_codec_decode(t->decoding, t->received, &all);
    if (status >= 0 && t->summed) {
        int64_t shape[2] = {f->group->size, peri__numel(all) / f->group->size};
        PERI_TRY_GOTO(peri__tensor_view(all, 2, shape, NULL, all->offset, &view), out);
        PERI_TRY_GOTO(peri__reduce(view, 1, 1, &sum), out);
        status = peri__tensor_view(sum, 1, &shape[1], NULL, sum->offset, numbers);
    } else if (status >= 0) {
        *numbers = all;
        all = NULL;
    }
out:
    peri_tensor_release(all);
    peri_tensor_release(view);
    peri_tensor_release(sum);
    transfer_fini(t);
    return status;
}

/* -- flows ---------------------------------------------------------------------------------------------------------------------------- */

static void flow_release(flow *f)
{
    if (!f || !peri__refs_drop(&f->refs)) return;
    transfer_fini(&f->back);
    for (int i = 0; i < 2; i++) peri_codec_release(f->codec[i]);
    peri_group_release(f->group);
    peri__free(f);
}

/** What both ends of a wire must agree on. */
static uint64_t format_hash(const peri_codec *codec)
{
    peri_codec_config c;
    uint64_t scale, h;
    peri_codec_describe(codec, &c);
    memcpy(&scale, &c.loss_scale, sizeof scale);
    h = peri__hash_mix((uint64_t)c.format + 1, (uint64_t)c.row_dim);
    h = peri__hash_mix(h, (uint64_t)c.exponent_bits << 32 | (uint64_t)c.exponent_bias);
    return peri__hash_mix(h, scale);
}

static peri_status check_codec(const peri__flow_args *a, const peri_tensor *input, peri_codec *codec, peri_codec **out)
{
    if (!codec || peri_codec_wire_dtype(codec) == PERI_F32) return PERI_OK;
    if (input->dtype != PERI_F32)
        return peri__fail(PERI_EINVAL, "%s: a codec for %s, allowed: f32", a->function, peri_dtype_name(input->dtype));
    peri_codec_retain(codec);
    *out = codec;
    return PERI_OK;
}

/** Hash of an operation's name, eight letters at a time. */
static uint64_t name_hash(const char *name)
{
    size_t n = strlen(name);
    uint64_t hash = n, letters;
    for (; n >= sizeof letters; n -= sizeof letters, name += sizeof letters) {
        memcpy(&letters, name, sizeof letters);
        hash = peri__hash_mix(hash, letters);
    }
    letters = 0;
    memcpy(&letters, name, n);
    return peri__hash_mix(hash, letters);
}

/** Everything of a flow but its counts, in front of which it lies. The caller still owns them on failure. */
static peri_status flow_new(peri_group *g, const peri_tensor *input, const peri__flow_args *a, flow **out)
{
    static const peri_exchange_options none = {0};
    const peri_exchange_options *o = a->options ? a->options : &none;
    bool floating = input->dtype == PERI_F32 || input->dtype == PERI_F64;
    if (a->kind != PERI_FLOW_ALL_TO_ALL && !floating)
        return peri__fail(PERI_EINVAL, "%s: the input is %s, allowed: f32, f64", a->function, peri_dtype_name(input->dtype));
    if (o->division < 0 || o->division > PERI_DIVISION_OFF)
        return peri__fail(PERI_EINVAL, "%s: division %d, allowed: PERI_DIVISION_*", a->function, o->division);
    flow *f = (flow *)a->out - 1;
    peri_status status = check_codec(a, input, o->forward, &f->codec[0]);
    if (status >= 0) status = check_codec(a, input, o->backward, &f->codec[1]);
    if (status < 0) {
        peri_codec_release(f->codec[0]);
        return status;
    }
    peri__refs_init(&f->refs);
    peri_group_retain(g);
    f->group = g;
    f->device = peri__device(input);
    f->function = a->function;
    f->kind = a->kind;
    f->layout = a->layout;
    f->dtype = input->dtype;
    int32_t division = o->division ? o->division : a->division;
    f->divisor = (division ? division == PERI_DIVISION_ON : peri_exchange_division(g)) ? g->size : 1;
    f->tag = peri__hash_mix(name_hash(a->function), a->alike);
    for (int i = 0; i < 2; i++) f->tag = peri__hash_mix(f->tag, f->codec[i] ? format_hash(f->codec[i]) : 0);
    f->tag = peri__hash_mix(f->tag, o->tag);
    f->input_ndim = input->ndim;
    memcpy(f->input_shape, input->shape, sizeof f->input_shape);
    f->ndim = a->ndim;
    if (a->layout == PERI_LAYOUT_FLAT) memcpy(f->shape, a->shape, sizeof *a->shape * (size_t)a->ndim);
    f->rows = a->rows;
    if (a->layout != PERI_LAYOUT_FLAT) {
        f->dims = a->in + g->size;
        memcpy(f->dims, a->dims, sizeof *f->dims * (size_t)g->size);
        f->columns = sum_of(f->dims, g->size);
    }
    if (a->layout == PERI_LAYOUT_COLUMNS && a->rows <= 1) { /* the blocks of one row arrive side by side */
        f->layout = PERI_LAYOUT_FLAT;
        f->ndim = 2;
        f->shape[0] = f->rows;
        f->shape[1] = f->columns;
    }
    f->out = a->out;
    f->in = a->in;
    *out = f;
    return PERI_OK;
}

peri_status peri__flow_counts(const peri_group *group, int64_t **out, int64_t **in)
{
    flow *f = peri__alloc_zero(sizeof *f + sizeof **out * 3 * (size_t)group->size);
    if (!f) return PERI_ENOMEM;
    *out = (int64_t *)(f + 1);
    *in = *out + group->size;
    return PERI_OK;
}

void peri__flow_counts_free(int64_t *out) { peri__free((flow *)out - 1); }

/* -- layouts --------------------------------------------------------------------------------------------------------------------------- */

static int32_t results_of(const flow *f) { return f->layout == PERI_LAYOUT_LIST ? f->group->size : 1; }

/** The block of what rank @i sent: @flat's view [rows, dims[i]]; *at moves on. */
static peri_status chunk(const flow *f, peri_tensor *flat, int32_t i, int64_t *at, peri_tensor **out)
{
    int64_t shape[2] = {f->rows, f->dims[i]};
    PERI_TRY(peri__tensor_view(flat, 2, shape, NULL, flat->offset + *at, out));
    *at += f->rows * f->dims[i];
    return PERI_OK;
}

/** Copy between the chunks of @flat and the column blocks of @matrix. */
static peri_status move_columns(const flow *f, peri_tensor *flat, peri_tensor *matrix, bool to_matrix)
{
    int64_t at = 0, column = 0;
    for (int32_t i = 0; i < f->group->size; i++) {
        int64_t shape[2] = {f->rows, f->dims[i]};
        peri_tensor *part = NULL, *block = NULL;
        peri_status status = chunk(f, flat, i, &at, &part);
        if (status >= 0)
            status = peri__tensor_view(matrix, 2, shape, matrix->stride, matrix->offset + column * matrix->stride[1], &block);
        if (status >= 0) status = to_matrix ? peri_tensor_copy(block, part) : peri_tensor_copy(part, block);
        peri_tensor_release(part);
        peri_tensor_release(block);
        PERI_TRY(status);
        column += f->dims[i];
    }
    return PERI_OK;
}

/** The results that the numbers of @flat make. */
static peri_status lay_out(const flow *f, peri_tensor *flat, peri_tensor **out)
{
    int64_t shape[2] = {f->rows, f->columns}, at = 0;
    if (f->layout == PERI_LAYOUT_FLAT) return peri__tensor_view(flat, f->ndim, f->shape, NULL, flat->offset, out);
    if (f->layout == PERI_LAYOUT_COLUMNS) {
        PERI_TRY(peri__tensor_like(flat, 2, shape, out));
        return move_columns(f, flat, *out, true);
    }
    for (int32_t i = 0; i < f->group->size; i++) PERI_TRY(chunk(f, flat, i, &at, &out[i]));
    return PERI_OK;
}

/** The numbers of the gradients of the results; NULL counts as zeros. */
static peri_status gather_gradient(const flow *f, peri_tensor *const *grad, peri_tensor **flat)
{
    int64_t n = f->kind == PERI_FLOW_REDUCE_SCATTER ? f->out[f->group->rank] : sum_of(f->in, f->group->size), at = 0;
    bool any = false;
    for (int32_t i = 0; i < results_of(f); i++) any = any || grad[i];
    if (!any) return peri_tensor_full(f->device, f->dtype, 1, &n, 0, flat);
    if (f->layout == PERI_LAYOUT_FLAT) return peri__contiguous_of(grad[0], flat);
    PERI_TRY(peri_tensor_new(f->device, f->dtype, 1, &n, flat));
    peri_status status = PERI_OK;
    if (f->layout == PERI_LAYOUT_COLUMNS) status = move_columns(f, *flat, grad[0], false);
    for (int32_t i = 0; i < results_of(f) && f->layout == PERI_LAYOUT_LIST && status >= 0; i++) {
        peri_tensor *part;
        status = chunk(f, *flat, i, &at, &part);
        if (status < 0) break;
        status = grad[i] ? peri_tensor_copy(part, grad[i]) : peri_tensor_fill(part, 0);
        peri_tensor_release(part);
    }
    if (status < 0) peri_tensor_release(*flat);
    return status;
}

/* -- backward -------------------------------------------------------------------------------------------------------------------------- */

static void node_fini(peri__node *node)
{
    flow_release(node->state);
    node->state = NULL;
}

/** The gradient sets out. */
static peri_status arrive_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    (void)grad_in; /* what reaches the input is waited for there */
    flow *f = node->state;
    peri_tensor *flat;
    PERI_TRY(peri__group_check(f->function, f->group));
    PERI_TRY(gather_gradient(f, grad_out, &flat));
    peri_status status = transfer_start(f, 1, flat, &f->back);
    peri_tensor_release(flat);
    return status;
}

/** The gradient arrives, and is divided. */
static peri_status leave_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    (void)grad_out;
    flow *f = node->state;
    peri_tensor *numbers;
    if (!f->back.work && !f->back.received) return PERI_OK; /* the result took no part in the loss, on any rank */
    peri_status status = transfer_finish(f, &f->back, &numbers);
    if (status != PERI_OK) return status;
    if (f->divisor != 1) {
        peri_k_divide_args args = {
            .dst = peri__data(numbers), .src = peri__data(numbers), .dtype = numbers->dtype, .divisor = f->divisor};
        status = PERI_LAUNCH(f->device, divide, &args, peri__numel(numbers), GRAIN);
    }
    if (status >= 0) status = peri__tensor_view(numbers, f->input_ndim, f->input_shape, NULL, numbers->offset, &grad_in[0]);
    peri_tensor_release(numbers);
    return status;
}

static const peri__node_vtab leave_vtab = {.name = "exchange", .collective = true, .backward = leave_backward, .fini = node_fini};
static const peri__node_vtab arrive_vtab = {
    .name = "exchange result", .collective = true, .backward = arrive_backward, .fini = node_fini};

/** The tape may run @node back once it has its share of the flow. */
static void own_flow(peri__node *node, flow *f)
{
    peri__refs_add(&f->refs);
    node->state = f;
}

/* -- forward --------------------------------------------------------------------------------------------------------------------------- */

static peri_status exchange_step(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    flow *f = w->flow;
    if (w->input) return PERI_OK;
    peri_tensor *flat;
    peri_status status = transfer_finish(f, &w->forth, &flat);
    if (status != PERI_OK) return status;
    if (w->forth.placed || w->forth.shaped) {
        w->results[0] = flat;
        return PERI_OK;
    }
    status = lay_out(f, flat, w->results);
    peri_tensor_release(flat);
    return status < 0 ? peri__group_fail(f->group, status) : status;
}

static void exchange_fini(peri_work *work)
{
    exchange_work *w = (exchange_work *)work;
    for (int32_t i = 0; i < results_of(w->flow); i++) peri_tensor_release(w->results[i]);
    transfer_fini(&w->forth);
    peri__node_release(w->leave);
    peri_tensor_release(w->input);
    flow_release(w->flow);
}

static const peri__work_vtab exchange_vtab = {.name = "exchange", .step = exchange_step, .fini = exchange_fini};

/** Whether what happens now is recorded. */
static bool recording(const flow *f)
{
    return peri__grad_enabled() && (f->dtype == PERI_F32 || f->dtype == PERI_F64);
}

/** Take and post @input; the work owns the flow already. */
static peri_status start(exchange_work *w, peri_tensor *input)
{
    flow *f = w->flow;
    if (f->group->size == 1) {
        peri_tensor_retain(input);
        w->input = input;
        return PERI_OK;
    }
    if (recording(f)) {
        PERI_TRY(peri__record(&leave_vtab, &input, 1, NULL, 1, &w->leave));
        own_flow(w->leave, f);
    }
    peri_tensor *flat;
    PERI_TRY(peri__contiguous_of(input, &flat));
    peri_status status = transfer_start(f, 0, flat, &w->forth);
    peri_tensor_release(flat);
    return status;
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
    status = peri__work_new(sizeof(exchange_work) + sizeof(peri_tensor *) * (size_t)results_of(f), &exchange_vtab, group, f->device, &work);
    if (status < 0) {
        flow_release(f);
        return status;
    }
    ((exchange_work *)work)->flow = f;
    ((exchange_work *)work)->results = (peri_tensor **)((exchange_work *)work + 1);
    peri__parts_begin(group);
    status = start((exchange_work *)work, input);
    peri__parts_end(group);
    if (status < 0) {
        peri__work_cancel(work, status);
        peri_work_release(work);
        return status;
    }
    *out = work;
    return PERI_OK;
}

int32_t peri_exchange_results(peri_work *exchange)
{
    return exchange->vtab == &exchange_vtab ? results_of(((exchange_work *)exchange)->flow) : 1;
}

peri_status peri_exchange_result(peri_work *exchange, peri_tensor **out)
{
    PERI_NEED(exchange);
    PERI_NEED(out);
    static const char name[] = "peri_exchange_result";
    exchange_work *w = (exchange_work *)exchange;
    if (exchange->vtab != &exchange_vtab) return peri__fail(PERI_EINVAL, "%s: this work is no exchange of embeddings", name);
    if (exchange->status != PERI_OK) return peri__fail(PERI_EINVAL, "%s: the exchange is not complete; wait for it", name);
    if (w->used) return peri__fail(PERI_EINVAL, "%s: this result was already taken", name);
    if (w->input) {
        out[0] = w->input;
        w->input = NULL;
        w->used = true;
        return PERI_OK;
    }
    if (w->leave) {
        peri__node *arrive;
        PERI_TRY(peri__record_after(&arrive_vtab, w->leave, w->results, results_of(w->flow), &arrive));
        own_flow(arrive, w->flow);
        w->leave = NULL;
    }
    w->used = true;
    for (int32_t i = 0; i < results_of(w->flow); i++) {
        out[i] = w->results[i];
        w->results[i] = NULL;
    }
    return PERI_OK;
}
