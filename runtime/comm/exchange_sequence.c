/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_sequence.c: rows of single ids on their way back to the ranks that asked for them.
 *
 * The ids of a kjt that was exchanged are ordered by key and then rank. Their rows are put back into the order by rank
 * and then key in which the ids came, travel, and arrive in the order in which the ids were sent.
 */
#include "exchange.h"
#include "../../kernels/jagged.h"

#include "../tensor/jagged_internal.h"

/* -- from the order of keys to that of ranks ----------------------------------------------------------------------- */

/** What the permutation and its gradient share. */
typedef struct order {
    peri__recat recat;
    peri_tensor *in, *result;
} order;

static void order_release(order *o)
{
    if (!o) return;
    peri__recat_fini(&o->recat);
    peri_tensor_release(o->in);
    peri_tensor_release(o->result);
    peri__free(o);
}

static void order_end(order **held) { order_release(*held); }

static void order_fini(peri__node *node)
{
    order_release(node->state);
    node->state = NULL;
}

static peri_status order_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    order *o = node->state;
    PERI__HELD peri_tensor *flat = NULL, *grad = NULL;
    PERI_TRY(peri__contiguous_of(grad_out[0], &flat));
    PERI_TRY(peri__tensor_like(flat, flat->ndim, flat->shape, &grad));
    PERI_TRY(peri__recat_move(&o->recat, flat, grad, o->in, o->result, false));
    grad_in[0] = peri__hand_over(&grad);
    return PERI_OK;
}

static const peri__node_vtab order_vtab = {.name = "sequence order", .backward = order_backward, .fini = order_fini};

/** stride_per_key_per_rank, whose ranks stand in the order of the kjt, as [ranks x keys]; to be freed, also when this
 *  fails. */
static peri_status strides_by_rank(const peri_sequence_args *s, int32_t ranks, int64_t **out)
{
    int64_t n = (int64_t)s->features * ranks;
    PERI__SCRATCH int32_t *recat = peri__alloc(sizeof *recat * (size_t)peri__max(n, 1));
    int64_t *strides = *out = peri__alloc(sizeof *strides * (size_t)peri__max(n, 1));
    if (!recat || !strides) return PERI_ENOMEM;
    PERI_TRY(peri_kjt_recat(s->features, ranks, s->stagger, recat));
    for (int64_t t = 0; t < n; t++) strides[recat[t]] = s->stride_per_key_per_rank[t];
    return PERI_OK;
}

/** On failure @o is still to be released. */
static peri_status order_init(order *o, const char *f, const peri_group *g, peri_tensor *input,
                              const peri_sequence_args *s)
{
    PERI__SCRATCH int64_t *strides = NULL;
    peri__bags b = {0};
    if (s->stride_per_key_per_rank) PERI_TRY(strides_by_rank(s, g->size, &strides));
    PERI_TRY(peri__recat_init(&o->recat, peri__device(input), s->features, g->size, s->stagger, s->batch_size_per_rank,
                              strides));
    const int64_t bags = o->recat.bags[o->recat.segments];
    if (s->lengths->shape[0] != bags)
        return peri__fail(PERI_EINVAL, "%s: %lld lengths, the batch sizes of %d features take %lld", f,
                          (long long)s->lengths->shape[0], s->features, (long long)bags);
    if (o->recat.in_order) return PERI_OK;
    /* Offsets of lengths that nobody has checked are clamped to the rows of the input. */
    peri_status status = peri__bags_init(f, &b, s->lengths, NULL, input);
    if (status >= 0) status = peri__bags_offsets(&b);
    if (status >= 0) status = peri__recat_offsets(&o->recat, b.offsets, &o->in, &o->result);
    peri__bags_fini(&b);
    return status;
}

/** @input in the order of ranks, recorded. */
static peri_status reorder_by_rank(const char *f, const peri_group *g, peri_tensor *input, const peri_sequence_args *s,
                           peri_tensor **out)
{
    __attribute__((cleanup(order_end))) order *o = peri__alloc_zero(sizeof *o);
    PERI__HELD peri_tensor *flat = NULL, *moved = NULL;
    peri__node *node = NULL;
    if (!o) return PERI_ENOMEM;
    PERI_TRY(order_init(o, f, g, input, s));
    if (o->recat.in_order) {
        peri_tensor_retain(input);
        *out = input;
        return PERI_OK;
    }
    PERI_TRY(peri__contiguous_of(input, &flat));
    /* Rows that the lengths do not speak of travel as zeros. */
    PERI_TRY(peri_tensor_full(peri__device(flat), flat->dtype, flat->ndim, flat->shape, 0, &moved));
    PERI_TRY(peri__recat_move(&o->recat, flat, moved, o->in, o->result, true));
    PERI_TRY(peri__attach(&order_vtab, &input, 1, &moved, 1, &node));
    if (node) {
        node->state = o;
        o = NULL;
    }
    *out = peri__hand_over(&moved);
    return PERI_OK;
}

/* -- the exchange -------------------------------------------------------------------------------------------------- */

static peri_status check_sequence(const char *f, const peri_group *g, const peri_tensor *input,
                                  const peri_sequence_args *s, int64_t *rows)
{
    char text[128];
    uint64_t unused = 0;
    int64_t received, n = s->batch_size_per_rank ? g->size : (int64_t)s->features * g->size;
    const int64_t *strides = s->batch_size_per_rank ? s->batch_size_per_rank : s->stride_per_key_per_rank;
    if (s->features < 0 || peri__stagger(s->stagger) < 1 || g->size % peri__stagger(s->stagger))
        return peri__fail(PERI_EINVAL,
                          "%s: %d features, stagger %d for %d ranks; wanted: 0 or more, and a divisor of the ranks", f,
                          s->features, s->stagger, g->size);
    if (!s->batch_size_per_rank == !s->stride_per_key_per_rank)
        return peri__fail(PERI_EINVAL, "%s: either batch_size_per_rank or stride_per_key_per_rank is wanted", f);
    PERI_TRY(peri__check_counts(f, s->batch_size_per_rank ? "batch_size_per_rank" : "stride_per_key_per_rank", strides,
                                n, &unused));
    PERI_TRY(peri__check_counts(f, "input_splits", s->input_splits, g->size, &unused));
    PERI_TRY(peri__check_counts(f, "output_splits", s->output_splits, g->size, &unused));
    *rows = peri__sum(s->input_splits, g->size);
    received = peri__sum(s->output_splits, g->size);
    PERI_TRY(peri__check_tensor(f, "lengths", s->lengths, -1, 1));
    PERI_TRY(peri__check_same_device(f, input, s->lengths));
    if (input->shape[0] != received)
        return peri__fail(PERI_EINVAL, "%s: the input is %s, the output_splits sum to %lld ids", f,
                          peri__tensor_text(input, text, sizeof text), (long long)received);
    return PERI_OK;
}

peri_status peri_exchange_alltoall_sequence(peri_group *g, peri_tensor *input, const peri_sequence_args *s,
                                            const peri_exchange_args *options, peri_work **out)
{
    PERI_NEED(s);
    static const char f[] = "peri_exchange_alltoall_sequence";
    peri__exchange *x;
    peri__exchange_call c = {
        .function = f, .group = g, .input = input, .kind = PERI_COLL_ALL_TO_ALL, .options = options};
    int64_t shape[2];
    PERI_TRY(peri__group_check(f, g));
    PERI_TRY(peri__check_tensor(f, "the input", input, -1, 2));
    PERI_TRY(check_sequence(f, g, input, s, &shape[0]));
    shape[1] = input->shape[1];
    c.alike = (uint64_t)shape[1];
    PERI__HELD peri_tensor *ordered = NULL;
    PERI_TRY(reorder_by_rank(f, g, input, s, &ordered));
    PERI_TRY(peri__exchange_new(&c, &x));
    peri__side_shape(&x->sides[1], 0, 2, shape);
    for (int32_t i = 0; i < g->size; i++) {
        peri__side_add_piece(&x->sides[0], i, s->output_splits[i]);
        peri__side_add_piece(&x->sides[1], i, s->input_splits[i]);
    }
    return peri__exchange_post(x, &ordered, NULL, true, out);
}

/* -- from the order of buckets to that of ids ---------------------------------------------------------------------- */

/** dst[i] = src[index[i]], row by row; @index i64 on the device. */
static peri_status gather_rows(const peri_tensor *src, const int64_t *index, peri_tensor **out)
{
    PERI__HELD peri_tensor *picked = NULL;
    PERI_TRY(peri__tensor_like(src, src->ndim, src->shape, &picked));
    const int64_t width = peri__row_bytes(src);
    peri_k_jagged_copy_args args = {.dst = peri__data(picked), .src = peri__data(src), .permute = index, .width = width,
                                    .segments = src->shape[0], .out_step = 1, .in_step = 1, .permute_dtype = PERI_I64};
    PERI_TRY(PERI_LAUNCH(peri__device(src), jagged_copy, &args, width ? src->shape[0] : 0, peri__row_grain(width)));
    *out = peri__hand_over(&picked);
    return PERI_OK;
}

/** saved[0]: the permutation and its inverse. */
static peri_status unbucketize_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    PERI__HELD peri_tensor *flat = NULL;
    PERI_TRY(peri__contiguous_of(grad_out[0], &flat));
    return gather_rows(flat, (const int64_t *)peri__data(node->saved[0]) + flat->shape[0], &grad_in[0]);
}

static const peri__node_vtab unbucketize_vtab = {.name = "unbucketize", .backward = unbucketize_backward};

/** Both directions of the permutation on the device. */
static peri_status upload_both_directions(const char *f, peri_tensor *permutation, int64_t n, peri_tensor **table)
{
    PERI__HELD peri_tensor *wide = NULL;
    PERI__SCRATCH int64_t *both = peri__alloc(sizeof *both * (size_t)(2 * n + 1));
    if (!both) return PERI_ENOMEM;
    PERI_TRY(peri_tensor_to(permutation, PERI_I64, NULL, &wide));
    PERI_TRY(peri_tensor_read(wide, both, 8 * n));
    for (int64_t i = 0; i < n; i++) both[n + i] = -1;
    for (int64_t i = 0; i < n; i++) {
        if (both[i] < 0 || both[i] >= n || both[n + both[i]] >= 0)
            return peri__fail(PERI_EINVAL, "%s: permutation[%lld] is %lld, allowed: each of 0..%lld once", f,
                              (long long)i, (long long)both[i], (long long)n - 1);
        both[n + both[i]] = i;
    }
    return peri__upload_i64(peri__device(permutation), both, 2 * n, table);
}

peri_status peri_exchange_unbucketize(peri_tensor *rows, peri_tensor *permutation, peri_tensor **out)
{
    static const char f[] = "peri_exchange_unbucketize";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "rows", rows, -1, -1));
    PERI_TRY(peri__check_tensor(f, "the permutation", permutation, -1, 1));
    PERI_TRY(peri__check_same_device(f, rows, permutation));
    if (permutation->dtype != PERI_I64 && permutation->dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: the permutation is %s, allowed: i64, i32", f,
                          peri_dtype_name(permutation->dtype));
    if (rows->ndim < 1 || rows->shape[0] != permutation->shape[0])
        return peri__fail(PERI_EINVAL, "%s: a permutation of %lld for rows of %s", f, (long long)permutation->shape[0],
                          peri__tensor_text(rows, text, sizeof text));
    PERI__HELD peri_tensor *table = NULL, *flat = NULL, *result = NULL;
    peri__node *node = NULL;
    PERI_TRY(upload_both_directions(f, permutation, rows->shape[0], &table));
    PERI_TRY(peri__contiguous_of(rows, &flat));
    PERI_TRY(gather_rows(flat, peri__data(table), &result));
    PERI_TRY(peri__attach(&unbucketize_vtab, &rows, 1, &result, 1, &node));
    if (node) peri__node_save(node, 0, table);
    *out = peri__hand_over(&result);
    return PERI_OK;
}
