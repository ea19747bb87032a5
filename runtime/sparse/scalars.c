/* SPDX-License-Identifier: Apache-2.0
 *
 * scalars.c: a number for each id: tables of one column with gradient, sums of weights, calibration by histogram,
 * hashes.
 */
#include "sparse_internal.h"
#include "../../kernels/lookup.h"
#include "../base/floats.h"

#include <math.h>

/* -- tables of one column ------------------------------------------------------------------------------------------ */

/** saved: rows and bags of ids. integer: tasks, rows of all tables, tables, samples. */
enum { SAVED_ROWS, SAVED_BAGS };
enum { KEPT_TASKS, KEPT_WIDTH, KEPT_TABLES, KEPT_BATCH };

static peri_status unary_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int64_t *kept = node->kept;
    int64_t shape[2] = {kept[KEPT_TASKS], kept[KEPT_WIDTH]};
    peri_tensor *flat = NULL, *grad = NULL, *list = NULL, *first = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(grad_out[0], &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 2, shape, &grad), out);
    PERI_TRY_GOTO(peri__lists_of(node->saved[SAVED_ROWS], kept[KEPT_WIDTH], &list, &first), out);
    peri_k_unary_sum_args args = {.weight = peri__data(grad),
                                  .out = peri__data(flat),
                                  .bag = peri__data(node->saved[SAVED_BAGS]),
                                  .list = peri__data(list),
                                  .list_offsets = peri__data(first),
                                  .tasks = kept[KEPT_TASKS],
                                  .width = kept[KEPT_WIDTH],
                                  .tables = kept[KEPT_TABLES],
                                  .batch = kept[KEPT_BATCH],
                                  .dtype = flat->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), unary_sum_back, &args, args.width,
                              PERI_INT_GRAIN / peri__max(1, args.tasks) + 1),
                  out);
    grad_in[0] = grad;
    grad = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    peri_tensor_release(list);
    peri_tensor_release(first);
    return status;
}

static const peri__node_vtab unary_vtab = {.name = "batched_unary_embeddings", .backward = unary_backward};

static peri_status check_unary(const char *f, const peri_tensor *weight, const peri_tensor *starts,
                               const peri_tensor *offsets, const peri_tensor *indices)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "weight", weight, -1, 2));
    if (weight->dtype != PERI_F32 && weight->dtype != PERI_F64)
        return peri__fail(PERI_EINVAL, "%s: weight is %s, allowed: f32, f64", f,
                          peri__tensor_text(weight, text, sizeof text));
    PERI_TRY(peri__check_ints(f, "table_offsets", starts, 1, weight));
    PERI_TRY(peri__check_ints(f, "offsets", offsets, 1, weight));
    PERI_TRY(peri__check_ints(f, "indices", indices, 1, weight));
    int64_t tables = starts->shape[0] - 1, bags = offsets->shape[0] - 1;
    if (tables < 1)
        return peri__fail(
            PERI_EINVAL,
            "%s: %lld table_offsets, wanted one entry more than there are tables, of which there is one or "
            "more",
            f, (long long)starts->shape[0]);
    if (bags < 0 || bags % tables)
        return peri__fail(PERI_EINVAL, "%s: %lld offsets for %lld tables, wanted a multiple of the tables and one more",
                          f, (long long)bags + 1, (long long)tables);
    return PERI_OK;
}

peri_status peri_sparse_batched_unary(peri_tensor *weight, peri_tensor *table_offsets, peri_tensor *offsets,
                                      peri_tensor *indices, peri_tensor **out)
{
    static const char f[] = "peri_sparse_batched_unary";
    PERI_TRY(check_unary(f, weight, table_offsets, offsets, indices));
    int64_t tables = table_offsets->shape[0] - 1, bags = offsets->shape[0] - 1, batch = bags / tables;
    int64_t shape[3] = {weight->shape[0], batch, tables};
    peri_tensor *src = NULL, *ids = NULL, *cuts = NULL, *firsts = NULL, *rows = NULL, *bag = NULL, *sums = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(weight, &src), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(indices, &ids), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(offsets, &cuts), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(table_offsets, &firsts), out);
    PERI_TRY_GOTO(peri__check_offsets(f, "offsets", "bag", cuts, ids->shape[0]), out);
    PERI_TRY_GOTO(peri__check_offsets(f, "table_offsets", "table", firsts, src->shape[1]), out);
    peri__tables t = {.function = f,
                      .what = "indices",
                      .table = "table",
                      .ids = ids,
                      .offsets = cuts,
                      .starts = firsts,
                      .tables = tables,
                      .step = batch};
    bool recorded = peri__differentiable(src);
    PERI_TRY_GOTO(peri__table_rows(&t, PERI_I64, &rows, recorded ? &bag : NULL), out);
    PERI_TRY_GOTO(peri__tensor_like(src, 3, shape, &sums), out);
    peri_k_unary_sum_args args = {.weight = peri__data(src),
                                  .out = peri__data(sums),
                                  .offsets = peri__data(cuts),
                                  .rows = peri__data(rows),
                                  .tasks = shape[0],
                                  .width = src->shape[1],
                                  .tables = tables,
                                  .batch = batch,
                                  .dtype = src->dtype,
                                  .offsets_dtype = cuts->dtype};
    int64_t per_bag = peri__max(1, shape[0]) * (1 + ids->shape[0] / peri__max(bags, 1));
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(src), unary_sum, &args, bags, PERI_INT_GRAIN / per_bag + 1), out);
    if (recorded) {
        PERI_TRY_GOTO(peri__record(&unary_vtab, &src, 1, &sums, 1, &node), out);
        peri__node_save(node, SAVED_ROWS, rows);
        peri__node_save(node, SAVED_BAGS, bag);
        node->kept[KEPT_TASKS] = shape[0];
        node->kept[KEPT_WIDTH] = src->shape[1];
        node->kept[KEPT_TABLES] = tables;
        node->kept[KEPT_BATCH] = batch;
    }
    *out = sums;
    sums = NULL;
out:;
    peri_tensor *all[] = {src, ids, cuts, firsts, rows, bag, sums};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}

/* -- sums of weights ----------------------------------------------------------------------------------------------- */

peri_status peri_sparse_weights_and_counts(peri_tensor *weights, peri_tensor *reverse_indices,
                                           int64_t num_unique_indices, peri_tensor **out)
{
    static const char f[] = "peri_sparse_weights_and_counts";
    PERI_TRY(peri__check_tensor(f, "weights", weights, -1, 1));
    PERI_TRY(peri__check_ints(f, "reverse_indices", reverse_indices, 1, weights));
    if (weights->dtype != PERI_F32 && weights->dtype != PERI_F64)
        return peri__fail(PERI_EINVAL, "%s: weights are %s, allowed: f32, f64", f, peri_dtype_name(weights->dtype));
    if (weights->shape[0] != reverse_indices->shape[0])
        return peri__fail(PERI_EINVAL, "%s: %lld reverse_indices for %lld weights", f,
                          (long long)reverse_indices->shape[0], (long long)weights->shape[0]);
    if (num_unique_indices < 0 || num_unique_indices >= (int64_t)1 << 40)
        return peri__fail(PERI_ERANGE, "%s: num_unique_indices %lld, allowed: 0..2^40", f,
                          (long long)num_unique_indices);
    int64_t shape[2] = {num_unique_indices, 2};
    peri_tensor *flat = NULL, *to = NULL, *sums = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(weights, &flat), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(reverse_indices, &to), out);
    PERI_TRY_GOTO(peri__check_indices(f, "reverse_indices", to, num_unique_indices), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 2, shape, &sums), out);
    peri_k_weights_by_id_args args = {.weights = peri__data(flat),
                                      .ids = peri__data(to),
                                      .out = peri__data(sums),
                                      .n = flat->shape[0],
                                      .numbers = num_unique_indices,
                                      .dtype = flat->dtype,
                                      .ids_dtype = to->dtype};
    PERI_TRY_GOTO(PERI_RUN(peri__device(flat), weights_by_id, &args), out);
    *out = sums;
    sums = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(to);
    peri_tensor_release(sums);
    return status;
}

enum { COUNT_BITS = 40 };

peri_status peri_sparse_counts(peri_tensor *ids, int64_t least, peri_tensor **out)
{
    static const char f[] = "peri_sparse_counts";
    const int64_t limit = (int64_t)1 << COUNT_BITS;
    int64_t low = 0, high = -1;
    peri_tensor *flat, *counts = NULL;
    peri_status status;
    PERI_NEED(out);
    PERI_TRY(peri__check_ints(f, "ids", ids, 1, ids));
    if (least < 0 || least > limit)
        return peri__fail(PERI_ERANGE, "%s: at least %lld counters, allowed: 0..2^%d", f, (long long)least, COUNT_BITS);
    PERI_TRY(peri_tensor_contiguous(ids, &flat));
    if (flat->shape[0] > 0) PERI_TRY_GOTO(peri__extent(flat, &low, &high), out);
    if (low < 0 || high >= limit) {
        status = peri__fail(PERI_ERANGE, "%s: the number %lld, allowed: 0 and more, below 2^%d", f,
                            (long long)(low < 0 ? low : high), COUNT_BITS);
        goto out;
    }
    const int64_t n = peri__max(least, high + 1);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(flat), PERI_I64, 1, &n, &counts), out);
    peri_k_weights_by_id_args args = {.ids = peri__data(flat), .out = peri__data(counts), .n = flat->shape[0],
                                      .numbers = n, .dtype = PERI_I64, .ids_dtype = flat->dtype};
    if (n > 0) PERI_TRY_GOTO(PERI_RUN(peri__device(flat), weights_by_id, &args), out);
    *out = counts;
    counts = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(counts);
    return status;
}

/* -- calibration --------------------------------------------------------------------------------------------------- */

static peri_status check_bins(const char *f, const peri_tensor *logit, const peri_calibration_args *a)
{
    char text[128];
    int64_t all;
    int32_t d = logit->dtype;
    if (d != PERI_F32 && d != PERI_F64 && d != PERI_F16 && d != PERI_BF16)
        return peri__fail(PERI_EINVAL, "%s: logit is %s, allowed: f32, f64, f16, bf16", f, peri_dtype_name(d));
    PERI_TRY(peri__check_tensor(f, "bin_num_examples", a->bin_num_examples, PERI_F64, 1));
    PERI_TRY(peri__check_tensor(f, "bin_num_positives", a->bin_num_positives, PERI_F64, 1));
    PERI_TRY(peri__check_same_device(f, a->bin_num_examples, logit));
    PERI_TRY(peri__check_same_device(f, a->bin_num_positives, logit));
    if (a->num_bins < 1)
        return peri__fail(PERI_EINVAL, "%s: %lld bins, allowed: 1 and more", f, (long long)a->num_bins);
    if (a->segment_lengths ? a->num_segments < 0 : a->num_segments != 0)
        return peri__fail(PERI_EINVAL, "%s: num_segments %lld, allowed: 0%s", f, (long long)a->num_segments,
                          a->segment_lengths ? " and more" : ", without segments");
    if (__builtin_add_overflow(a->num_segments, 1, &all) || __builtin_mul_overflow(all, a->num_bins, &all) ||
        a->bin_num_examples->shape[0] != all)
        return peri__fail(PERI_EINVAL,
                          "%s: bin_num_examples are %s for %lld bins and %lld segments, wanted bins * (segments + 1)",
                          f, peri__tensor_text(a->bin_num_examples, text, sizeof text), (long long)a->num_bins,
                          (long long)a->num_segments);
    if (a->bin_num_positives->shape[0] != all)
        return peri__fail(PERI_EINVAL, "%s: bin_num_positives are %s, wanted %lld as bin_num_examples", f,
                          peri__tensor_text(a->bin_num_positives, text, sizeof text), (long long)all);
    if (!(a->positive_weight > 0) || !isfinite(a->positive_weight))
        return peri__fail(PERI_EINVAL, "%s: positive_weight %g, allowed: finite, more than 0", f, a->positive_weight);
    if (!(a->lower_bound < a->upper_bound) || !isfinite(a->upper_bound - a->lower_bound))
        return peri__fail(PERI_EINVAL, "%s: bounds %g and %g, wanted: finite, the lower one below the upper one", f,
                          a->lower_bound, a->upper_bound);
    return PERI_OK;
}

static peri_status check_segments(const char *f, const peri_tensor *logit, const peri_calibration_args *a)
{
    PERI_TRY(peri__check_ints(f, "segment_lengths", a->segment_lengths, 1, logit));
    PERI_TRY(peri__check_ints(f, "segment_value", a->segment_value, 1, logit));
    if (a->segment_lengths->shape[0] != peri__numel(logit))
        return peri__fail(PERI_EINVAL, "%s: %lld segment_lengths for %lld logits", f,
                          (long long)a->segment_lengths->shape[0], (long long)peri__numel(logit));
    return PERI_OK;
}

peri_status peri_sparse_calibrate(peri_tensor *logit, const peri_calibration_args *a, peri_tensor **calibrated,
                                  peri_tensor **bin_ids)
{
    PERI_NEED(logit);
    PERI_NEED(a);
    PERI_NEED(calibrated);
    PERI_NEED(bin_ids);
    static const char f[] = "peri_sparse_calibrate";
    PERI__OWN_FLOATS;
    PERI_TRY(check_bins(f, logit, a));
    if (a->segment_lengths) PERI_TRY(check_segments(f, logit, a));
    int64_t n = peri__numel(logit);
    peri__bags bags = {0};
    peri_tensor *flat = NULL, *examples = NULL, *positives = NULL, *lengths = NULL, *values = NULL, *result = NULL,
                *bins = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(logit, &flat), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(a->bin_num_examples, &examples), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(a->bin_num_positives, &positives), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, flat->ndim, flat->shape, &result), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(flat), PERI_I64, flat->ndim, flat->shape, &bins), out);
    peri_k_calibrate_args args = {.logit = peri__data(flat),
                                  .out = peri__data(result),
                                  .bin = peri__data(bins),
                                  .examples = peri__data(examples),
                                  .positives = peri__data(positives),
                                  .shift = log(a->positive_weight),
                                  .lower = a->lower_bound,
                                  .upper = a->upper_bound,
                                  .weight = a->bin_ctr_weight_value,
                                  .bins = a->num_bins,
                                  .segments = a->num_segments,
                                  .in_use_after = a->bin_ctr_in_use_after,
                                  .dtype = flat->dtype};
    if (a->segment_lengths) {
        PERI_TRY_GOTO(peri_tensor_contiguous(a->segment_lengths, &lengths), out);
        PERI_TRY_GOTO(peri_tensor_contiguous(a->segment_value, &values), out);
        PERI_TRY_GOTO(peri__bags_of(f, "segment_lengths", &bags, lengths, NULL, values->shape[0], 0), out);
        args.segment_ends = peri__data(bags.offsets);
        args.ends_dtype = bags.offsets->dtype;
        args.segment_values = peri__data(values);
        args.values_dtype = values->dtype;
    }
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), calibrate, &args, n, PERI_INT_GRAIN / 16), out);
    *calibrated = result;
    *bin_ids = bins;
    result = bins = NULL;
out:
    peri__bags_fini(&bags);
    peri_tensor *all[] = {flat, examples, positives, lengths, values, result, bins};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}

/* -- hashes -------------------------------------------------------------------------------------------------------- */

static peri_status check_numbers(const char *f, const char *what, const peri_tensor *t, const peri_tensor *input)
{
    char text[128], other[128];
    PERI_TRY(peri__check_tensor(f, what, t, PERI_I64, input->ndim));
    PERI_TRY(peri__check_same_device(f, t, input));
    bool same = true;
    for (int32_t d = 0; d < t->ndim; d++) same = same && t->shape[d] == input->shape[d];
    if (same) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is %s for an input %s, wanted one for each", f, what,
                      peri__tensor_text(t, text, sizeof text), peri__tensor_text(input, other, sizeof other));
}

peri_status peri_sparse_murmur_hash3(peri_tensor *input, const peri_murmur_args *a, peri_tensor **out)
{
    PERI_NEED(out);
    PERI_NEED(a);
    static const char f[] = "peri_sparse_murmur_hash3";
    PERI_TRY(peri__check_tensor(f, "input", input, PERI_I64, -1));
    if (a->y) PERI_TRY(check_numbers(f, "y", a->y, input));
    if (a->seed) PERI_TRY(check_numbers(f, "seed", a->seed, input));
    peri_tensor *x = NULL, *ys = NULL, *seeds = NULL, *hashes = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(input, &x), out);
    if (a->y) PERI_TRY_GOTO(peri_tensor_contiguous(a->y, &ys), out);
    if (a->seed) PERI_TRY_GOTO(peri_tensor_contiguous(a->seed, &seeds), out);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &hashes), out);
    peri_k_murmur_hash3_args args = {.x = peri__data(x),
                                     .y = ys ? peri__data(ys) : NULL,
                                     .seed = seeds ? peri__data(seeds) : NULL,
                                     .out = peri__data(hashes),
                                     .y_number = a->y_number,
                                     .seed_number = a->seed_number};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), murmur_hash3, &args, peri__numel(x), PERI_INT_GRAIN), out);
    *out = hashes;
    hashes = NULL;
out:
    peri_tensor_release(x);
    peri_tensor_release(ys);
    peri_tensor_release(seeds);
    peri_tensor_release(hashes);
    return status;
}
