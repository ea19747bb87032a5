/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.c: attention within the sequences of jagged tensors, with gradient; places and times of their members.
 */
#include "sparse_internal.h"
#include "../../kernels/sequence.h"

#include <math.h>
#include <stdio.h>

/* -- sequences ----------------------------------------------------------------------------------------------------- */

/** Checked sequences: offsets [sequences + 1], and behind them the numbers of targets [sequences], if there are any, in
 *  one tensor. */
typedef struct marks {
    peri_tensor *t; /* contiguous i64; nobody writes to it */
    int64_t sequences;
    bool targets;
} marks;

static const int64_t *offsets_of(const marks *m) { return peri__data(m->t); }
static const int64_t *targets_of(const marks *m) { return m->targets ? offsets_of(m) + m->sequences + 1 : NULL; }

/** Every sequence has at least as many members as targets, and unless it is empty @contextual more. Waits. */
static peri_status check_members(const char *f, const marks *m, int64_t contextual)
{
    int64_t n = m->sequences, bytes = peri__numel(m->t) * 8, *host = peri__alloc((size_t)bytes);
    if (!host) return PERI_ENOMEM;
    peri_status status = peri_tensor_read(m->t, host, bytes);
    for (int64_t s = 0; s < n && status >= 0; s++) {
        const int64_t length = host[s + 1] - host[s], targets = m->targets ? host[n + 1 + s] : 0;
        if (targets < 0 || targets > length)
            status =
                peri__fail(PERI_ERANGE, "%s: num_targets[%lld] is %lld, allowed: 0..%lld, the members of the sequence",
                           f, (long long)s, (long long)targets, (long long)length);
        else if (length > 0 && length - targets < contextual)
            status = peri__fail(PERI_ERANGE,
                                "%s: sequence %lld has %lld members before its targets, wanted: none at all, or "
                                "contextual_seq_len (%lld) and more",
                                f, (long long)s, (long long)(length - targets), (long long)contextual);
    }
    peri__free(host);
    return status;
}

/** *m->t[at ..] = @from, i32 or i64. */
static peri_status put_marks(const marks *m, int64_t at, peri_tensor *from)
{
    const int64_t n = from->shape[0], one = 1;
    peri_tensor *view;
    PERI_TRY(peri__tensor_view(m->t, 1, &n, &one, m->t->offset + at, &view));
    peri_status status = peri_tensor_copy(view, from);
    peri_tensor_release(view);
    return status;
}

/** Where the numbers of a tensor lie, and how often they had been changed; all 0: no tensor. */
typedef struct place {
    uint64_t serial, version;
    int64_t offset, n, stride;
    int32_t dtype;
} place;

static place tensor_place(const peri_tensor *t)
{
    if (!t) return (place){0};
    return (place){peri__storage_serial(t->storage), peri__version(t), t->offset, t->shape[0], t->stride[0], t->dtype};
}

static bool same_place(const place *a, const place *b)
{
    return a->serial == b->serial && a->version == b->version && a->offset == b->offset && a->n == b->n &&
           a->stride == b->stride && a->dtype == b->dtype;
}

/** Sequences that have been checked, kept with the storage of their offsets: the layers of a model ask about the same
 *  ones, and a check waits for the device. */
typedef struct known {
    peri__note note;
    place offsets, targets;
    int64_t rows, contextual, longest; /* contextual: no sequence that has members has fewer before its targets */
    peri_tensor *t; /* as in marks */
} known;

static void known_fini(peri__note *note)
{
    known *k = (known *)(void *)note;
    peri_tensor_release(k->t);
    peri__free(k);
}

/** Whether @k answers for these, on the current stream, in whose order k->t was made. */
static bool known_answers(const known *k, const peri_tensor *offsets, const peri_tensor *targets, int64_t rows,
                          int64_t contextual)
{
    const place o = tensor_place(offsets), t = tensor_place(targets);
    return same_place(&k->offsets, &o) && (!targets || same_place(&k->targets, &t)) && k->rows == rows &&
           k->contextual >= contextual && k->t->storage->home == peri_stream_current(peri__device(offsets));
}

/** Check the sequences that @offsets cut out of k->rows rows, and make k->t. Waits. */
static peri_status look_at_sequences(const char *f, known *k, peri_tensor *offsets, peri_tensor *targets)
{
    peri_tensor *flat;
    peri__bags bags = {0};
    PERI_TRY(peri_tensor_contiguous(offsets, &flat));
    peri_status status = peri__bags_of(f, "seq_offsets", &bags, NULL, flat, k->rows, 0);
    peri_tensor_release(flat);
    if (status < 0) return status;
    k->longest = bags.longest;
    int64_t size = bags.bags + 1 + (targets ? bags.bags : 0);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(offsets), PERI_I64, 1, &size, &k->t), out);
    const marks m = {k->t, bags.bags, targets};
    PERI_TRY_GOTO(put_marks(&m, 0, bags.offsets), out);
    if (targets) PERI_TRY_GOTO(put_marks(&m, bags.bags + 1, targets), out);
    if (targets || k->contextual > 0) PERI_TRY_GOTO(check_members(f, &m, k->contextual), out);
out:
    peri__bags_fini(&bags);
    return status;
}

/** *m = the sequences that @offsets cut out of @rows rows; none is longer than @most (0: any length), none that has
 *  members shorter than @contextual. Waits, unless it has been found out before. */
static peri_status marks_init(const char *f, marks *m, peri_tensor *offsets, peri_tensor *targets, int64_t rows,
                              int64_t most, int64_t contextual)
{
    peri__storage *s = offsets->storage;
    known *k = (known *)(void *)peri__note_take(s);
    if (k && !known_answers(k, offsets, targets, rows, contextual)) {
        known_fini(&k->note);
        k = NULL;
    }
    peri_status status = PERI_OK;
    if (!k) {
        k = peri__alloc_zero(sizeof *k);
        if (!k) return PERI_ENOMEM;
        k->note = (peri__note){peri__version(offsets), known_fini};
        k->offsets = tensor_place(offsets);
        k->targets = tensor_place(targets);
        k->rows = rows;
        k->contextual = contextual;
        status = look_at_sequences(f, k, offsets, targets);
    }
    if (status >= 0 && most > 0 && k->longest > most)
        status = peri__fail(PERI_ERANGE, "%s: a sequence of %lld members, allowed: max_seq_len, %lld", f,
                            (long long)k->longest, (long long)most);
    if (status < 0) {
        known_fini(&k->note);
        return status;
    }
    *m = (marks){k->t, offsets->shape[0] - 1, targets};
    peri_tensor_retain(k->t);
    if (targets && atomic_load(&targets->storage->exposed)) known_fini(&k->note);
    else peri__note_put(s, &k->note);
    return PERI_OK;
}

/** i32 or i64 offsets of @like's device, and a number for each sequence or NULL. */
static peri_status check_marks(const char *f, const peri_tensor *offsets, const peri_tensor *targets,
                               const peri_tensor *like)
{
    PERI_TRY(peri__check_ints(f, "seq_offsets", offsets, 1, like));
    if (offsets->shape[0] < 1)
        return peri__fail(PERI_EINVAL, "%s: seq_offsets are empty; they have one entry more than there are sequences",
                          f);
    if (!targets) return PERI_OK;
    PERI_TRY(peri__check_ints(f, "num_targets", targets, 1, like));
    if (targets->shape[0] != offsets->shape[0] - 1)
        return peri__fail(PERI_EINVAL, "%s: %lld num_targets for %lld sequences, wanted one for each", f,
                          (long long)targets->shape[0], (long long)offsets->shape[0] - 1);
    return PERI_OK;
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

static const char name[] = "peri_sparse_attention";

/** @t as the kernels take it: rows may lie apart, what is within a row not. */
static peri_status rows_in_place(peri_tensor *t, peri_tensor **out)
{
    bool packed = t->stride[2] == 1 || t->shape[2] == 1;
    if (!packed || (t->shape[1] > 1 && t->stride[1] != t->shape[2])) return peri__contiguous_of(t, out);
    return peri__detached(t, out);
}

static int64_t row_stride(const peri_tensor *t) { return t->shape[0] > 1 ? t->stride[0] : t->shape[1] * t->shape[2]; }

/** Rows of one head that are worth a thread, if each sees half of a sequence of average length. */
static int64_t rows_per_thread(const peri_k_attention_args *a)
{
    int64_t each = peri__max(1, a->rows / peri__max(1, a->sequences) * (a->dim + a->v_dim));
    return peri__max(32, 2 * PERI_ELEMENT_GRAIN / each);
}

enum { Q, K, V, OUT, LSE, MARKS };

enum { KEPT_SEQUENCES, KEPT_TARGETS, KEPT_WINDOW, KEPT_CONTEXTUAL, KEPT_FULL, KEPT_FORM, KEPT_CAUSAL };

/** What both directions have in common. @saved: q, k and v as the kernels take them, out, lse (or NULL), marks. */
static peri_k_attention_args attention_arguments(peri_tensor *const *saved, const int64_t *kept, const double *number)
{
    const peri_tensor *q = saved[Q], *v = saved[V];
    marks m = {saved[MARKS], kept[KEPT_SEQUENCES], kept[KEPT_TARGETS]};
    return (peri_k_attention_args){.out = peri__data(saved[OUT]),
                                   .lse = saved[LSE] ? peri__data(saved[LSE]) : NULL,
                                   .q = peri__data(q),
                                   .k = peri__data(saved[K]),
                                   .v = peri__data(v),
                                   .offsets = offsets_of(&m),
                                   .targets = targets_of(&m),
                                   .rows = q->shape[0],
                                   .sequences = m.sequences,
                                   .heads = q->shape[1],
                                   .dim = q->shape[2],
                                   .v_dim = v->shape[2],
                                   .q_stride = row_stride(q),
                                   .k_stride = row_stride(saved[K]),
                                   .v_stride = row_stride(v),
                                   .window = kept[KEPT_WINDOW],
                                   .contextual = kept[KEPT_CONTEXTUAL],
                                   .full = kept[KEPT_FULL],
                                   .alpha = number[0],
                                   .scale = number[1],
                                   .dtype = q->dtype,
                                   .form = (int32_t)kept[KEPT_FORM],
                                   .causal = kept[KEPT_CAUSAL]};
}

/** saved, kept: see attention_arguments. number: alpha, scale. */
static peri_status attention_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_k_attention_args a = attention_arguments(node->saved, node->kept, node->number);
    peri_tensor *g = NULL, *delta = NULL, *grad[3] = {NULL};
    int64_t items = a.heads * a.rows;
    peri_device *device = peri__device(node->saved[Q]);
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &g), out);
    if (a.lse) PERI_TRY_GOTO(peri__tensor_like(node->saved[LSE], 1, &items, &delta), out);
    for (int32_t i = Q; i <= V; i++)
        if (peri__needs(node, i))
            PERI_TRY_GOTO(peri__tensor_like(node->saved[i], 3, node->saved[i]->shape, &grad[i]), out);
    a.dout = peri__data(g);
    a.delta = delta ? peri__data(delta) : NULL;
    a.dq = grad[Q] ? peri__data(grad[Q]) : NULL;
    a.dk = grad[K] ? peri__data(grad[K]) : NULL;
    a.dv = grad[V] ? peri__data(grad[V]) : NULL;
    if (a.dq || a.delta) PERI_TRY_GOTO(PERI_LAUNCH(device, attention_grad_q, &a, items, rows_per_thread(&a)), out);
    if (a.dk || a.dv) PERI_TRY_GOTO(PERI_LAUNCH(device, attention_grad_kv, &a, items, rows_per_thread(&a)), out);
    for (int32_t i = Q; i <= V; i++) {
        grad_in[i] = grad[i];
        grad[i] = NULL;
    }
out:
    peri_tensor_release(g);
    peri_tensor_release(delta);
    for (int32_t i = Q; i <= V; i++) peri_tensor_release(grad[i]);
    return status;
}

static const peri__node_vtab attention_vtab = {.name = "attention", .backward = attention_backward};

/** q, k and v: floats of one dtype [rows, heads, dim]; v's last size is its own. */
static peri_status check_operands(peri_tensor *const *in)
{
    static const char *const names[] = {"q", "k", "v"};
    char text[300];
    for (int32_t i = Q; i <= V; i++) {
        PERI_TRY(peri__check_float(name, names[i], in[i]));
        if (in[i]->ndim != 3 || in[i]->shape[1] < 1 || in[i]->shape[2] < 1)
            return peri__fail(PERI_EINVAL, "%s: %s is %s, wanted [rows, heads, size]", name, names[i],
                              peri__tensor_text(in[i], text, sizeof text));
        PERI_TRY(peri__check_same_device(name, in[i], in[Q]));
        if (in[i]->dtype != in[Q]->dtype ||
            memcmp(in[i]->shape, in[Q]->shape, sizeof *in[i]->shape * (i == V ? 2 : 3)) != 0)
            return peri__fail(PERI_EINVAL, "%s: q and %s are %s; wanted: one dtype, equal rows and heads%s", name,
                              names[i], peri__pair_text(in[Q], in[i], text, sizeof text),
                              i == V ? "" : ", and equal sizes");
    }
    return PERI_OK;
}

static peri_status compute_attention(peri_tensor *const *in, const peri_attention_args *args, peri_tensor **out)
{
    bool softmax = args->form == PERI_ATTENTION_SOFTMAX;
    peri_tensor *saved[PERI_NODE_SAVED] = {NULL};
    peri__node *node;
    marks m;
    PERI_TRY(check_operands(in));
    const double number[] = {args->alpha != 0 ? args->alpha : 1 / sqrt((double)in[Q]->shape[2]),
                             args->scale != 0 ? args->scale : 1};
    const int64_t shape[3] = {in[V]->shape[0], in[V]->shape[1], in[V]->shape[2]}, items = shape[0] * shape[1];
    PERI_TRY(check_marks(name, args->seq_offsets, args->num_targets, in[Q]));
    PERI_TRY(marks_init(name, &m, args->seq_offsets, args->num_targets, shape[0], args->max_seq_len,
                        args->contextual_seq_len));
    const int64_t kept[] = {[KEPT_SEQUENCES] = m.sequences,
                            [KEPT_TARGETS] = m.targets,
                            [KEPT_WINDOW] = args->max_attn_len,
                            [KEPT_CONTEXTUAL] = args->contextual_seq_len,
                            [KEPT_FULL] = args->min_full_attn_seq_len,
                            [KEPT_FORM] = args->form,
                            [KEPT_CAUSAL] = args->causal};
    peri_status status;
    saved[MARKS] = m.t;
    for (int32_t i = Q; i <= V; i++) PERI_TRY_GOTO(rows_in_place(in[i], &saved[i]), out);
    PERI_TRY_GOTO(peri__tensor_like(in[V], 3, shape, &saved[OUT]), out);
    if (softmax) PERI_TRY_GOTO(peri__tensor_like(in[V], 1, &items, &saved[LSE]), out);
    peri_k_attention_args a = attention_arguments(saved, kept, number);
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(in[Q]), attention, &a, items, rows_per_thread(&a)), out);
    PERI_TRY_GOTO(peri__attach(&attention_vtab, in, 3, &saved[OUT], 1, &node), out);
    if (node) {
        for (int32_t i = 0; i < PERI_NODE_SAVED; i++)
            if (saved[i] && i != OUT) peri__node_save(node, i, saved[i]);
        memcpy(node->kept, kept, sizeof kept);
        memcpy(node->number, number, sizeof number);
        PERI_TRY_GOTO(peri__node_save_output(node, OUT, saved[OUT]), out);
    }
    *out = saved[OUT];
    saved[OUT] = NULL;
out:
    for (int32_t i = 0; i < PERI_NODE_SAVED; i++) peri_tensor_release(saved[i]);
    return status;
}

peri_status peri_sparse_attention(const peri_attention_args *args, peri_tensor **out)
{
    PERI_TAKE(peri_attention_args, args);
    PERI_NEED(out);
    if (args->form != PERI_ATTENTION_SOFTMAX && args->form != PERI_ATTENTION_SILU)
        return peri__fail(PERI_EINVAL, "%s: form %d, allowed: 0..1", name, args->form);
    if (args->max_attn_len < 0 || args->max_seq_len < 0 || args->contextual_seq_len < 0)
        return peri__fail(PERI_EINVAL,
                          "%s: max_attn_len %lld, max_seq_len %lld, contextual_seq_len %lld, allowed: 0 and more", name,
                          (long long)args->max_attn_len, (long long)args->max_seq_len,
                          (long long)args->contextual_seq_len);
    if (args->min_full_attn_seq_len < 0)
        return peri__fail(PERI_EINVAL, "%s: min_full_attn_seq_len %lld, allowed: 0 and more", name,
                          (long long)args->min_full_attn_seq_len);
    peri__operands o;
    peri_tensor *in[3] = {args->q, args->k, args->v};
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, in, 3));
    return peri__narrow(&o, compute_attention(o.in, args, &o.out), out);
}

/* -- places and times ---------------------------------------------------------------------------------------------- */

static peri_status numbers_new(const peri_tensor *like, int64_t rows, peri_tensor **out)
{
    return peri_tensor_new(peri__device(like), PERI_I64, 1, &rows, out);
}

/** The kernel's `out` for @rows members; *args has the rest, but for the marks. */
static peri_status members_places(const char *f, peri_tensor *offsets, peri_tensor *targets, int64_t rows,
                                  peri_k_sequence_positions_args *args, peri_tensor **out)
{
    PERI_NEED(out);
    PERI_TRY(check_marks(f, offsets, targets, offsets));
    if (rows < 0) return peri__fail(PERI_EINVAL, "%s: %lld rows, allowed: 0 and more", f, (long long)rows);
    marks m;
    PERI_TRY(marks_init(f, &m, offsets, targets, rows, 0, 0));
    peri_tensor *y = NULL;
    peri_status status;
    PERI_TRY_GOTO(numbers_new(m.t, rows, &y), out);
    args->out = peri__data(y);
    args->offsets = offsets_of(&m);
    args->targets = targets_of(&m);
    args->sequences = m.sequences;
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(y), sequence_positions, args, rows, PERI_INT_GRAIN), out);
    *out = y;
    y = NULL;
out:
    peri_tensor_release(m.t);
    peri_tensor_release(y);
    return status;
}

peri_status peri_sparse_sequence_positions(peri_tensor *seq_offsets, peri_tensor *num_targets, int64_t rows,
                                           int64_t max_positions, peri_tensor **out)
{
    PERI__NOT_AT_BORDER;
    static const char f[] = "peri_sparse_sequence_positions";
    if (max_positions < 1)
        return peri__fail(PERI_EINVAL, "%s: max_positions %lld, allowed: 1 and more", f, (long long)max_positions);
    return members_places(f, seq_offsets, num_targets, rows, &(peri_k_sequence_positions_args){.most = max_positions},
                          out);
}

peri_status peri_sparse_sequence_numbers(peri_tensor *seq_offsets, int64_t rows, peri_tensor **out)
{
    peri_k_sequence_positions_args args = {.most = 1, .number = true};
    return members_places("peri_sparse_sequence_numbers", seq_offsets, NULL, rows, &args, out);
}

static peri_status check_times(const char *f, const peri_time_buckets_args *args)
{
    const peri_tensor *t = args->timestamps;
    PERI_TRY(peri__check_tensor(f, "timestamps", t, -1, 1));
    if (t->dtype != PERI_I64 && t->dtype != PERI_I32 && t->dtype != PERI_F64 && t->dtype != PERI_F32)
        return peri__fail(PERI_EINVAL, "%s: timestamps are %s, allowed: i64, i32, f64, f32", f,
                          peri_dtype_name(t->dtype));
    if (args->num_buckets < 1)
        return peri__fail(PERI_EINVAL, "%s: num_buckets %lld, allowed: 1 and more", f, (long long)args->num_buckets);
    if (!(args->increment > 0) || args->increment > 0x1p1000)
        return peri__fail(PERI_EINVAL, "%s: increment %g, allowed: finite numbers > 0", f, args->increment);
    return check_marks(f, args->seq_offsets, NULL, t);
}

peri_status peri_sparse_time_buckets(const peri_time_buckets_args *args, peri_tensor **out)
{
    static const char f[] = "peri_sparse_time_buckets";
    PERI_TAKE(peri_time_buckets_args, args);
    PERI_NEED(out);
    PERI_TRY(check_times(f, args));
    const int64_t rows = args->timestamps->shape[0];
    marks m;
    PERI_TRY(marks_init(f, &m, args->seq_offsets, NULL, rows, 0, 0));
    peri_tensor *y = NULL, *flat = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(args->timestamps, &flat), out);
    PERI_TRY_GOTO(numbers_new(m.t, rows, &y), out);
    peri_k_time_buckets_args a = {.out = peri__data(y),
                                  .times = peri__data(flat),
                                  .offsets = offsets_of(&m),
                                  .sequences = m.sequences,
                                  .most = args->num_buckets,
                                  .increment = args->increment,
                                  .dtype = flat->dtype,
                                  .log = args->log};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(y), time_buckets, &a, rows, PERI_INT_GRAIN / 8), out);
    *out = y;
    y = NULL;
out:
    peri_tensor_release(m.t);
    peri_tensor_release(flat);
    peri_tensor_release(y);
    return status;
}
