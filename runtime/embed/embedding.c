/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding.c: lookups in one matrix: torch's embedding and embedding_bag. Sums and means are those of table batches,
 * padding ids being pruned ones; the largest elements of bags have kernels of their own (kernels/bags.h).
 */
#include "../sparse/sparse_internal.h"
#include "../tensor/report.h"
#include "embed_internal.h"
#include "reach.h"
#include "../../kernels/bags.h"

#include <math.h>

static const char F[] = "peri_embedding_bag", TABLE[] = "weight";

/** What is asked about a lookup beside its ids. */
typedef struct asked {
    peri__bags offsets;   /* about the offsets that were given, until they are judged */
    peri__ending *ending; /* where the lookup is recorded: what ends passes that reach the matrix (retained), or NULL */
} asked;

/** What a call works with; all references are its own. */
typedef struct call {
    peri_tensor *ids;     /* as given, [n] */
    peri_tensor *pruned;  /* the same, padding ids being -1 */
    peri_tensor *offsets; /* [bags + 1] */
    peri_tensor *weights, *scale; /* or NULL */
    peri_tensor *out, *places;
    peri_tbe *tbe; /* over the matrix */
    peri_tbe_blocks *blocks;
    asked asked;
    peri__unheard *unheard; /* of lookups in the matrix */
    int64_t n, bags, rows, cols;
} call;

static void asked_fini(asked *a)
{
    peri__bags_fini(&a->offsets);
    peri__ending_release(a->ending);
}

static void call_free(call *c)
{
    peri_tensor *own[] = {c->ids, c->pruned, c->offsets, c->weights, c->scale, c->out, c->places};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) peri_tensor_release(own[i]);
    asked_fini(&c->asked);
    peri_tbe_blocks_release(c->blocks);
    peri_tbe_release(c->tbe);
}

/* -- arguments ----------------------------------------------------------------------------------------------------- */

static peri_status check_bags(const peri_embedding_bag_args *a)
{
    char text[128];
    bool bags = a->mode != PERI_POOLING_NONE;
    if (bags && !a->offsets && a->ids->ndim != 2)
        return peri__fail(PERI_EINVAL, "%s: ids are %s; without offsets they have 2 dimensions, a bag in each row", F,
                          peri__tensor_text(a->ids, text, sizeof text));
    if (bags && a->offsets && a->ids->ndim != 1)
        return peri__fail(PERI_EINVAL, "%s: ids are %s; with offsets they have 1 dimension", F,
                          peri__tensor_text(a->ids, text, sizeof text));
    if (!bags && a->offsets) return peri__fail(PERI_EINVAL, "%s: offsets, but no pooling", F);
    if (a->include_last_offset && !a->offsets)
        return peri__fail(PERI_EINVAL, "%s: include_last_offset without offsets", F);
    if (!bags && a->ids->ndim == PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "%s: ids of %d dimensions, allowed: up to %d", F, a->ids->ndim,
                          PERI_MAX_DIMS - 1);
    if (a->offsets) PERI_TRY(peri__check_ints(F, "offsets", a->offsets, 1, a->weight));
    if (a->include_last_offset && peri__numel(a->offsets) < 1)
        return peri__fail(PERI_EINVAL, "%s: include_last_offset, but offsets are empty", F);
    return PERI_OK;
}

static peri_status check_weights(const peri_embedding_bag_args *a)
{
    char one[128], two[128];
    if (!a->weights) return PERI_OK;
    if (a->mode != PERI_POOLING_SUM)
        return peri__fail(PERI_EINVAL, "%s: weights of ids with mode %d, allowed: %d (sum)", F, a->mode,
                          PERI_POOLING_SUM);
    PERI_TRY(peri__check_tensor(F, "weights", a->weights, PERI_F32, a->ids->ndim));
    PERI_TRY(peri__check_same_device(F, a->weights, a->weight));
    for (int32_t d = 0; d < a->ids->ndim; d++)
        if (a->weights->shape[d] != a->ids->shape[d])
            return peri__fail(PERI_EINVAL, "%s: weights are %s, ids %s; allowed: one weight for each id", F,
                              peri__tensor_text(a->weights, one, sizeof one),
                              peri__tensor_text(a->ids, two, sizeof two));
    return PERI_OK;
}

static peri_status check_args(const peri_embedding_bag_args *a)
{
    char text[128];
    PERI_TRY(peri__check_tensor(F, "weight", a->weight, PERI_F32, 2));
    if (!peri__contiguous(a->weight) || a->weight->shape[1] < 1)
        return peri__fail(PERI_EINVAL, "%s: weight is %s, allowed: contiguous, at least one column", F,
                          peri__tensor_text(a->weight, text, sizeof text));
    if (a->mode < PERI_POOLING_SUM || a->mode > PERI_POOLING_MAX)
        return peri__fail(PERI_EINVAL, "%s: mode %d, allowed: 0..3", F, a->mode);
    PERI_TRY(peri__check_ints(F, "ids", a->ids, -1, a->weight));
    PERI_TRY(check_bags(a));
    PERI_TRY(check_weights(a));
    if (a->padded && (a->padding_idx < 0 || a->padding_idx >= a->weight->shape[0]))
        return peri__fail(PERI_ERANGE, "%s: padding_idx %lld, allowed: 0..%lld", F, (long long)a->padding_idx,
                          (long long)a->weight->shape[0] - 1);
    if (!a->padded && a->padding_idx > 0)
        return peri__fail(PERI_EINVAL, "%s: padding_idx %lld without `padded`", F, (long long)a->padding_idx);
    if (!(a->max_norm >= 0) || isinf(a->max_norm))
        return peri__fail(PERI_EINVAL, "%s: max_norm %g, allowed: finite numbers > 0, or 0 for none", F, a->max_norm);
    if (a->max_norm > 0 && !(a->norm_type > 0))
        return peri__fail(PERI_EINVAL, "%s: norm_type %g, allowed: > 0", F, a->norm_type);
    return PERI_OK;
}

/* -- bags ---------------------------------------------------------------------------------------------------------- */

/** A contiguous tensor of one dimension; recorded where @t is. */
static peri_status flat_of(peri_tensor *t, peri_tensor **out)
{
    int64_t n = peri__numel(t);
    return peri_tensor_reshape(t, 1, &n, out);
}

/** Offsets @t of @bags bags, and @n behind the last, which therefore ends with the ids. */
static peri_status complete_offsets(peri_tensor *t, int64_t bags, int64_t n, peri_tensor **out)
{
    peri_tensor *all, *begins = NULL;
    PERI_TRY(peri_tensor_full(peri__device(t), t->dtype, 1, (int64_t[]){bags + 1}, (double)n, &all));
    peri_status status = peri__tensor_view(all, 1, &bags, NULL, 0, &begins);
    if (status >= 0) status = peri_tensor_copy(begins, t);
    peri_tensor_release(begins);
    if (status < 0) peri_tensor_release(all);
    else *out = all;
    return status;
}

static peri_status make_offsets(const peri_embedding_bag_args *a, call *c)
{
    peri_device *device = peri__device(a->weight);
    if (a->mode == PERI_POOLING_NONE) return peri__offsets_of_equal(device, 1, c->n, &c->offsets);
    if (!a->offsets) return peri__offsets_of_equal(device, c->bags, a->ids->shape[1], &c->offsets);
    if (c->bags == 0 && c->n > 0)
        return peri__fail(PERI_EINVAL, "%s: %lld ids, but offsets of no bag that they could belong to", F,
                          (long long)c->n);
    if (a->offsets->dtype == PERI_I32 && c->n > INT32_MAX)
        return peri__fail(PERI_EINVAL, "%s: offsets are i32, but there are %lld ids", F, (long long)c->n);
    if (a->include_last_offset) PERI_TRY(peri__contiguous_of(a->offsets, &c->offsets));
    else PERI_TRY(complete_offsets(a->offsets, c->bags, c->n, &c->offsets));
    return peri__offsets_post(F, "offsets", c->offsets, c->n, &c->asked.offsets);
}

/** What was found about the offsets, and then @words about the ids: what is wrong with these may come of them. */
static peri_status judge_words(const char *function, const int64_t *words, peri__bags *offsets)
{
    peri_k_tbe_report report;
    if (offsets->report) PERI_TRY(peri__offsets_judge(F, "offsets", "bag", offsets));
    memcpy(&report, words, sizeof report);
    return peri__matrix_status(TABLE, function, &report);
}

static peri_status judge_lookup(const char *function, const int64_t *words, void *with)
{
    asked *a = with;
    peri_status status = judge_words(function, words, &a->offsets);
    if (status < 0 && a->ending && a->ending->missed) a->ending->missed(a->ending);
    return status;
}

static void asked_free(void *with)
{
    asked_fini(with);
    peri__free(with);
}

/** Have the report @found (taken) on a lookup, and what was asked about its offsets, judged later. */
static peri_status judge_later(call *c, peri__report *found)
{
    asked *with = peri__alloc(sizeof *with);
    if (!with) return PERI_ENOMEM;
    *with = c->asked;
    const peri__late_what what = {.of = c->unheard,
                                  .turn = atomic_load(&c->unheard->passes),
                                  .function = F,
                                  .judge = judge_lookup,
                                  .with = with,
                                  .fini = asked_free};
    peri_status status = peri__late_add(found, &what);
    if (status < 0) peri__free(with);
    else c->asked = (asked){0};
    return status;
}

/** Look up, or where @out is NULL only check the ids. Whether ids and offsets are good is known when it returns, or
 *  where a training loop may go on (and there is no @need), later. */
static peri_status look_up_or_check(call *c, peri_tbe_batch *batch, peri_tensor *out, bool need)
{
    peri__report *found;
    PERI_TRY(peri__memory_queue_lookup(F, batch, out, &found));
    const bool later = !need && !peri__immediate(batch->tbe->device) && peri__unheard_take(c->unheard);
    peri_status status = later ? judge_later(c, found) : peri__report_wait(found);
    if (later && status >= 0) return PERI_OK;
    if (status >= 0) status = judge_lookup(F, found->words, &c->asked);
    peri__report_return(found);
    return status;
}

static peri_k_bags kernel_bags(const call *c)
{
    return (peri_k_bags){.ids = peri__data(c->pruned),
                         .offsets = peri__data(c->offsets),
                         .n_ids = c->n,
                         .rows = c->rows,
                         .cols = c->cols,
                         .ids_dtype = c->pruned->dtype,
                         .offsets_dtype = c->offsets->dtype};
}

/** Bags that are worth a thread, @columns each. */
static int64_t bag_grain(const call *c, int64_t columns)
{
    return peri__max(1, PERI_INT_GRAIN / ((c->n / peri__max(c->bags, 1) + 1) * columns));
}

/** `pruned`, and with mode MEAN `scale`, which leaves padding ids out. */
static peri_status prune(const peri_embedding_bag_args *a, call *c)
{
    peri_device *device = peri__device(a->weight);
    if (!a->padded) {
        c->pruned = c->ids;
        peri_tensor_retain(c->ids);
        return PERI_OK;
    }
    PERI_TRY(peri__tensor_like(c->ids, 1, &c->n, &c->pruned));
    peri_k_bag_pad_args pad = {
        .ids = peri__data(c->ids), .out = peri__data(c->pruned), .padding = a->padding_idx, .dtype = c->ids->dtype};
    PERI_TRY(PERI_LAUNCH(device, bag_pad, &pad, c->n, PERI_INT_GRAIN));
    if (a->mode != PERI_POOLING_MEAN) return PERI_OK;
    PERI_TRY(peri_tensor_new(device, PERI_F32, 1, &c->bags, &c->scale));
    peri_k_bag_scale_args scale = {.bags = kernel_bags(c), .scale = peri__data(c->scale), .padding = a->padding_idx};
    scale.bags.ids = peri__data(c->ids);
    return PERI_LAUNCH(device, bag_scale, &scale, c->bags, bag_grain(c, 1));
}

/** The matrix as a table batch. */
static peri_status as_table(const peri_embedding_bag_args *a, call *c)
{
    int32_t pooling = a->mode == PERI_POOLING_NONE                ? PERI_POOLING_NONE
                      : a->mode == PERI_POOLING_MEAN && !c->scale ? PERI_POOLING_MEAN
                                                              : PERI_POOLING_SUM;
    peri_table_config table = {.size = sizeof table,
                               .name = TABLE,
                               .rows = c->rows,
                               .cols = c->cols,
                               .pooling = pooling,
                               .init = PERI_INIT_NONE};
    peri_tbe_config config = {.size = sizeof config,
                              .device = peri__device(a->weight),
                              .dtype = PERI_F32,
                              .n_tables = 1,
                              .tables = &table,
                              .optimizer = &peri__no_optimizer};
    peri_tbe_block block = {.bags = a->mode == PERI_POOLING_NONE ? 1 : c->bags, .out_stride = c->cols, .feature = -1};
    PERI_TRY(peri__tbe_borrowing(&config, a->weight, &c->tbe));
    return peri_tbe_blocks_new(c->tbe, &block, 1, &c->blocks);
}

static peri_status call_new(const peri_embedding_bag_args *a, call *c)
{
    int64_t shape[PERI_MAX_DIMS];
    int32_t ndim = a->mode == PERI_POOLING_NONE ? a->ids->ndim + 1 : 2;
    *c = (call){.n = peri__numel(a->ids), .rows = a->weight->shape[0], .cols = a->weight->shape[1]};
    c->unheard = &a->weight->storage->unheard;
    if (a->weight->ending && peri__recording(&a->weight, 1)) {
        c->asked.ending = a->weight->ending;
        peri__refs_add(&c->asked.ending->refs);
    }
    c->bags = a->mode == PERI_POOLING_NONE ? c->n
              : a->offsets             ? a->offsets->shape[0] - a->include_last_offset
                                       : a->ids->shape[0];
    memcpy(shape, a->ids->shape, sizeof shape);
    if (a->mode != PERI_POOLING_NONE) shape[0] = c->bags;
    shape[ndim - 1] = c->cols;
    PERI_TRY(flat_of(a->ids, &c->ids));
    if (a->weights) PERI_TRY(flat_of(a->weights, &c->weights));
    PERI_TRY(make_offsets(a, c));
    PERI_TRY(prune(a, c));
    PERI_TRY(as_table(a, c));
    return peri_tensor_new(peri__device(a->weight), PERI_F32, ndim, shape, &c->out);
}

/* -- rows that are too long ---------------------------------------------------------------------------------------- */

static peri_status renorm_rows(const peri_embedding_bag_args *a, const call *c)
{
    peri_unique_result distinct = {0};
    if (c->n == 0) return PERI_OK;
    PERI_TRY(peri_sparse_unique(c->ids, false, false, &distinct));
    peri_k_bag_renorm_args args = {.ids = peri__data(distinct.unique),
                                   .x = peri__data(a->weight),
                                   .rows = c->rows,
                                   .cols = c->cols,
                                   .max_norm = a->max_norm,
                                   .norm_type = a->norm_type,
                                   .dtype = distinct.unique->dtype};
    peri__changed(a->weight);
    peri_status status = PERI_LAUNCH(peri__device(a->weight), bag_renorm, &args, peri__numel(distinct.unique),
                                     peri__max(1, PERI_INT_GRAIN / c->cols));
    peri_tensor_release(distinct.unique);
    return status;
}

/* -- the largest elements ------------------------------------------------------------------------------------------ */

enum { SAVED_IDS, SAVED_OFFSETS, SAVED_PLACES };

static void max_fini(peri__node *node)
{
    peri_tbe_release(node->state);
    node->state = NULL;
}

static peri_status max_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *ids = node->saved[SAVED_IDS], *offsets = node->saved[SAVED_OFFSETS], *grad = NULL, *dx = NULL;
    const int64_t *table = node->shape[0].size;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &grad), out);
    PERI_TRY_GOTO(peri_tensor_full(peri__device(grad), PERI_F32, 2, table, 0, &dx), out);
    peri_k_bag_max_grad_args args = {.bags = {.ids = peri__data(ids),
                                              .offsets = peri__data(offsets),
                                              .n_ids = peri__numel(ids),
                                              .rows = table[0],
                                              .cols = table[1],
                                              .ids_dtype = ids->dtype,
                                              .offsets_dtype = offsets->dtype},
                                     .grad = peri__data(grad),
                                     .places = peri__data(node->saved[SAVED_PLACES]),
                                     .dx = peri__data(dx),
                                     .n = peri__numel(offsets) - 1};
    int64_t blocks = peri__ceil_div(table[1], PERI_K_BAG_COLUMNS);
    status = PERI_LAUNCH(peri__device(grad), bag_max_grad, &args, blocks,
                         peri__max(1, PERI_INT_GRAIN / (PERI_K_BAG_COLUMNS * peri__max(args.n, 1))));
out:
    peri_tensor_release(grad);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx, peri__borrowed_passed(node->state);
    return status;
}

static const peri__node_vtab max_vtab = {.name = "embedding_bag_max", .backward = max_backward, .fini = max_fini};

static peri_status look_up_largest(const peri_embedding_bag_args *a, call *c)
{
    peri__node *node;
    PERI_TRY(peri_tensor_new(peri__device(a->weight), PERI_I32, 2, c->out->shape, &c->places));
    peri_k_bag_max_args args = {
        .bags = kernel_bags(c), .x = peri__data(a->weight), .out = peri__data(c->out), .places = peri__data(c->places),
        .reach = peri__tbe_reach_lookup()};
    PERI_TRY(PERI_LAUNCH(peri__device(a->weight), bag_max, &args, c->bags, bag_grain(c, c->cols)));
    PERI_TRY(peri__attach(&max_vtab, &(peri_tensor *){a->weight}, 1, &c->out, 1, &node));
    if (!node) return PERI_OK;
    peri__node_save(node, SAVED_IDS, c->pruned);
    peri__node_save(node, SAVED_OFFSETS, c->offsets);
    peri__node_save(node, SAVED_PLACES, c->places);
    node->shape[0] = (peri__shape){.ndim = 2, .size = {c->rows, c->cols}};
    peri_tbe_retain(c->tbe);
    node->state = c->tbe;
    return PERI_OK;
}

/* -- the call ------------------------------------------------------------------------------------------------------ */

/** A batch of ids @ids. */
static peri_status batch_of_ids(const call *c, peri_tensor *ids, peri_tbe_batch **out)
{
    peri_tbe_input in = {
        .ids = ids, .offsets = c->offsets, .weights = c->weights, .scale = c->scale, .blocks = c->blocks};
    PERI_TRY(peri__tbe_input_check(F, c->tbe, &in));
    return peri_tbe_batch_new(c->tbe, &in, out);
}

/** @batch: its ids are the pruned ones. */
static peri_status look_up(const peri_embedding_bag_args *a, call *c, peri_tbe_batch *batch)
{
    /* Lookups of this step may still be queued; those that a backward pass has followed are waited for. */
    PERI_TRY(peri__late_of(c->unheard, atomic_load(&c->unheard->passes)));
    /* Rows are scaled down for good ids only. */
    if (a->max_norm > 0 || a->mode == PERI_POOLING_MAX) PERI_TRY(look_up_or_check(c, batch, NULL, a->max_norm > 0));
    if (a->max_norm > 0) PERI_TRY(renorm_rows(a, c));
    if (a->mode == PERI_POOLING_MAX) return look_up_largest(a, c);
    /* the padding row is a row as others; it only learns nothing */
    if (a->mode == PERI_POOLING_NONE && c->ids != c->pruned) {
        peri_tbe_batch *whole;
        PERI_TRY(batch_of_ids(c, c->ids, &whole));
        peri_status status = look_up_or_check(c, whole, c->out, false);
        peri_tbe_batch_release(whole);
        PERI_TRY(status);
    } else {
        PERI_TRY(look_up_or_check(c, batch, c->out, false));
    }
    return peri__borrowed_record(a->weight, batch, c->out);
}

peri_status peri_embedding_bag(const peri_embedding_bag_args *a, peri_tensor **out)
{
    PERI_TAKE(peri_embedding_bag_args, a);
    if (a_now.norm_type == 0) a_now.norm_type = 2;
    PERI_NEED(out);
    call c;
    PERI_TRY(check_args(a));
    peri_status status = call_new(a, &c);
    peri_tbe_batch *batch = NULL;
    if (status >= 0) status = batch_of_ids(&c, c.pruned, &batch);
    if (status >= 0) status = look_up(a, &c, batch);
    peri_tbe_batch_release(batch);
    if (status >= 0) {
        *out = c.out;
        c.out = NULL;
    }
    call_free(&c);
    return status;
}
