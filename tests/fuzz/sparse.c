/* SPDX-License-Identifier: Apache-2.0
 *
 * sparse.c: any lengths, offsets, permutations, masks, ids, tables and bytes at the sparse operators: an error with a
 * message, or results of the promised shape whose numbers add up. The bytes are read as small choices; numbers are
 * mostly small, now and then extreme.
 */
#include <perilune/perilune.h>

#include "choices.h"

#include <stdlib.h>
#include <string.h>

/* -- choices ------------------------------------------------------------------------------------------------------- */

static int64_t extreme(void)
{
    static const int64_t values[] = {-1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_C(1) << 31, INT64_C(1) << 50,
                                     -7, 1000};
    return values[pick(9)];
}

enum { MOST = 24 };

static peri_device *device;

static peri_tensor *numbers(const int64_t *x, int64_t n, int32_t dtype)
{
    peri_tensor *wide = NULL, *t = NULL;
    require(peri_tensor_new(device, PERI_I64, 1, &n, &wide) == PERI_OK, "a tensor");
    require(peri_tensor_write(wide, x, 8 * n) == PERI_OK, "a write");
    require(peri_tensor_to(wide, dtype, NULL, &t) == PERI_OK, "a cast");
    peri_tensor_release(wide);
    return t;
}

static int32_t some_dtype(void) { return pick(30) == 29 ? PERI_F32 : pick(2) ? PERI_I32 : PERI_I64; }

/** @n numbers of [0, below), some spoilt. */
static peri_tensor *ints(int64_t n, int64_t below)
{
    int64_t x[MOST * MOST];
    bool spoil = pick(3) == 2;
    for (int64_t i = 0; i < n; i++) x[i] = spoil && pick(8) == 7 ? extreme() : pick(below);
    return numbers(x, n, some_dtype());
}

/** Complete offsets of @n bags, mostly of @total values. */
static peri_tensor *offsets(int64_t n, int64_t total)
{
    int64_t x[MOST + 1] = {0};
    for (int64_t i = 0; i < n; i++) x[i + 1] = i == n - 1 ? total : x[i] + pick(total - x[i] + 1);
    if (pick(3) == 2) x[pick(n + 1)] = pick(2) ? extreme() : pick(MOST);
    return numbers(x, n + 1, some_dtype());
}

/* -- what comes out ------------------------------------------------------------------------------------------------ */

/** A failure has a message; a success gave tensors that can be read. */
static void judge(peri_status status, peri_tensor **out, int count)
{
    if (status < 0) {
        require(peri_error_message()[0] != 0, "an error without a message");
        for (int i = 0; i < count; i++) require(!out[i], "an output of a failure");
        return;
    }
    for (int i = 0; i < count; i++) {
        peri_tensor_info d = {.size = sizeof d};
        if (!out[i]) continue;
        peri_tensor_describe(out[i], &d);
        int64_t size = d.numel * peri_dtype_size(d.dtype);
        void *host = malloc((size_t)size + 1);
        require(host && peri_tensor_read(out[i], host, size) == PERI_OK, "a result that cannot be read");
        free(host);
    }
}

static int64_t rows_of(const peri_tensor *t)
{
    peri_tensor_info d = {.size = sizeof d};
    peri_tensor_describe(t, &d);
    return d.ndim ? d.shape[0] : 1;
}

static void release(peri_tensor **t, int n)
{
    for (int i = 0; i < n; i++) peri_tensor_release(t[i]);
}

/* -- operators ----------------------------------------------------------------------------------------------------- */

static void permuting(void)
{
    int64_t parts = pick(MOST), n = pick(MOST), total = pick(MOST);
    peri_tensor *in[4] = {ints(n, parts), ints(parts, 3), ints(total, 99), pick(2) ? ints(total, 99) : NULL},
                *out[3] = {0};
    peri_permute_result r = {0};
    peri_status status = peri_sparse_permute(in[0], in[1], in[2], in[3], &r);
    out[0] = r.lengths, out[1] = r.values, out[2] = r.weights;
    judge(status, out, 3);
    if (status >= 0) require(rows_of(r.lengths) == n, "permuted lengths");
    release(out, 3);
    out[0] = out[1] = out[2] = NULL;
    judge(peri_sparse_invert_permute(in[0], &out[0]), out, 1);
    judge(peri_sparse_index_select(in[2], in[0], &out[1]), out + 1, 1);
    judge(peri_sparse_cumsum(in[1], (int32_t)pick(4), &out[2]), out + 2, 1);
    release(out, 3);
    release(in, 4);
}

/** The number of rows that a result is said to have: @total, or -1 (whatever the offsets end with) where that is
 *  nothing huge. */
static int64_t said(peri_tensor *offsets, int64_t total)
{
    char host[8 * (MOST + 2)];
    peri_tensor_info d = {.size = sizeof d};
    peri_tensor_describe(offsets, &d);
    require(peri_tensor_read(offsets, host, d.numel * peri_dtype_size(d.dtype)) == PERI_OK,
            "offsets that cannot be read");
    int64_t last = d.numel == 0          ? 0
                   : d.dtype == PERI_I32 ? ((int32_t *)(void *)host)[d.numel - 1]
                                         : ((int64_t *)(void *)host)[d.numel - 1];
    return pick(2) || last > 1 << 20 ? total : -1;
}

static void spreading(void)
{
    int64_t parts = pick(MOST), n = pick(MOST), total = pick(MOST), new_total = pick(MOST);
    peri_tensor *in[3] = {ints(n, parts), offsets(parts, total), offsets(n, new_total)}, *out[3] = {0};
    judge(peri_sparse_expand_permute(in[0], in[1], in[2], said(in[2], new_total), &out[0]), out, 1);
    judge(peri_sparse_offsets_range(in[1], pick(3) ? total : pick(9) - 2, &out[1]), out + 1, 1);
    int64_t lengths[MOST]; /* their sum is the size of the result: nothing huge */
    for (int64_t i = 0; i < n; i++) lengths[i] = pick(9) - (pick(9) == 8);
    peri_tensor *small = numbers(lengths, n, some_dtype());
    judge(peri_sparse_lengths_range(small, &out[2]), out + 2, 1);
    peri_tensor_release(small);
    release(out, 3);
    release(in, 3);
}

static void summing(void)
{
    int64_t n = pick(MOST), step = 1 + pick(3), total = pick(MOST / 2);
    peri_tensor *in[3] = {ints(total * step, 200), offsets(n, total), ints(total, 5)}, *out[2] = {0};
    judge(peri_sparse_segment_sum(in[0], in[1], pick(20) == 19 ? extreme() : step, &out[0]), out, 1);
    peri_tensor *cut = ints(n * 3, 2), *before = ints(n, 4);
    judge(peri_sparse_bucketize_replay(before, cut, in[2], &out[1]), out + 1, 1);
    peri_tensor_release(cut);
    peri_tensor_release(before);
    release(out, 2);
    release(in, 3);
}

static void padding(void)
{
    int64_t bags = pick(8), middle = pick(8), total = pick(MOST), max[2] = {pick(5), pick(5)},
            shape[3] = {bags, max[0], max[1]};
    int32_t levels = 1 + (int32_t)pick(2);
    peri_tensor *cuts[2] = {offsets(bags, levels == 2 ? middle : total), offsets(middle, total)},
                *values = ints(total, 99), *dense = NULL;
    peri_tensor *out[2] = {0};
    judge(peri_sparse_jagged_to_dense(values, cuts, max, levels, -1, &out[0]), out, 1);
    require(peri_tensor_full(device, PERI_F32, 1 + levels, shape, 1, &dense) == PERI_OK, "a dense tensor");
    judge(peri_sparse_dense_to_jagged(dense, cuts, levels, said(cuts[levels - 1], total), &out[1]), out + 1, 1);
    peri_tensor_release(values);
    peri_tensor_release(dense);
    release(cuts, 2);
    release(out, 2);
}

static void counting(void)
{
    int64_t n = pick(MOST * 4), sum = 0;
    peri_tensor *ids = ints(n, 200);
    peri_unique_result r = {0};
    peri_status status = peri_sparse_unique(ids, true, true, &r);
    peri_tensor *out[3] = {r.unique, r.inverse, r.counts};
    judge(status, out, 3);
    if (status >= 0) {
        int64_t counts[MOST * 4], inverse[MOST * 4], distinct = rows_of(r.unique);
        require(peri_tensor_read(r.counts, counts, 8 * distinct) == PERI_OK, "counts");
        require(peri_tensor_read(r.inverse, inverse, 8 * n) == PERI_OK, "inverse");
        for (int64_t i = 0; i < distinct; i++) sum += counts[i];
        require(sum == n, "counts that do not add up");
        for (int64_t i = 0; i < n; i++) require(inverse[i] >= 0 && inverse[i] < distinct, "an inverse out of range");
    }
    release(out, 3);
    peri_tensor_release(ids);
}

static peri_tensor *floats(int64_t n, int32_t dtype)
{
    peri_tensor *whole = ints(n, 9), *t = NULL;
    require(peri_tensor_to(whole, dtype, NULL, &t) == PERI_OK, "a cast");
    peri_tensor_release(whole);
    return t;
}

static void picking(void)
{
    int64_t bags = pick(MOST), total = pick(MOST), many = pick(9), shape[3], rows[3], columns[3], counts[3],
            elements = 0, chosen = 0;
    peri_tensor *values = floats(total, PERI_F32), *cuts = ints(bags, 3), *first = ints(bags, 2), *mask = NULL,
                *out[5] = {0};
    require(peri_tensor_to(values, PERI_BOOL, NULL, &mask) == PERI_OK, "a mask");
    judge(peri_sparse_masked_select(values, cuts, mask, &out[0], &out[1]), out, 2);
    judge(peri_sparse_slice(values, cuts, first, pick(9) == 8 ? extreme() : pick(5), &out[2], &out[3]), out + 2, 2);
    peri_batch_select_args a = {.n = pick(9) == 8 ? 0 : 1 + pick(3),
                                .num_indices = counts,
                                .rows = rows,
                                .columns = columns,
                                .permute_output_dim_0_1 = pick(2)};
    for (int64_t m = 0; m < 3; m++) {
        counts[m] = a.permute_output_dim_0_1 ? many : pick(6);
        rows[m] = 1 + pick(4);
        columns[m] = pick(4);
        if (m < a.n) elements += rows[m] * columns[m], chosen += counts[m];
    }
    if (pick(5) == 4) (pick(2) ? counts : pick(2) ? rows : columns)[pick(3)] = extreme();
    shape[0] = elements;
    peri_tensor *all = NULL, *ids = ints(chosen, 2);
    require(peri_tensor_full(device, PERI_F32, 1, shape, 1, &all) == PERI_OK, "matrices");
    judge(peri_sparse_batch_index_select(all, ids, &a, &out[4]), out + 4, 1);
    release((peri_tensor *[]){values, cuts, first, mask, all, ids}, 6);
    release(out, 5);
}

/** Numbers of hash tables: -1 and ids, so that a table may be full and hold anything. */
static peri_tensor *slots(int64_t n, int32_t dtype)
{
    int64_t x[2 * MOST], shape[2] = {n, 2};
    for (int64_t i = 0; i < 2 * n; i++) x[i] = pick(3) ? -1 : pick(99);
    peri_tensor *flat = numbers(x, 2 * n, dtype), *t = NULL;
    require(peri_tensor_reshape(flat, 2, shape, &t) == PERI_OK, "pairs");
    peri_tensor_release(flat);
    return t;
}

static void looking_up(void)
{
    int64_t tables = 1 + pick(3), bags = tables * (1 + pick(3)), total = pick(MOST), size = pick(MOST);
    peri_tensor *ids = ints(total, pick(2) ? 99 : 3), *rows = ints(total, 9), *bounds = offsets(bags, total);
    peri_tensor *ends = offsets(tables, size), *map = ints(size, 9), *out[4] = {0},
                *known = slots(size, pick(2) ? PERI_I32 : PERI_I64);
    judge(peri_sparse_pruned_array_lookup(ids, bounds, map, ends, &out[0]), out, 1);
    peri_status status = peri_sparse_pruned_hashmap_insert(ids, rows, bounds, known, ends, &out[1]);
    judge(status, out + 1, 1);
    judge(peri_sparse_pruned_hashmap_lookup(ids, bounds, status >= 0 ? out[1] : known, ends, &out[2]), out + 2, 1);
    int64_t shape[2] = {pick(3), size};
    peri_tensor *weight = NULL;
    require(peri_tensor_full(device, pick(2) ? PERI_F32 : PERI_F64, 2, shape, 1, &weight) == PERI_OK, "weights");
    judge(peri_sparse_batched_unary(weight, ends, bounds, ids, &out[3]), out + 3, 1);
    release((peri_tensor *[]){ids, rows, bounds, ends, map, known, weight}, 7);
    release(out, 4);
}

/** Floats of shape [rows, heads, size]. */
static peri_tensor *vectors(int64_t rows, int64_t heads, int64_t size)
{
    int64_t x[MOST * MOST], shape[3] = {rows, heads, size};
    peri_tensor *t = NULL;
    for (int64_t i = 0; i < rows * heads * size; i++) x[i] = pick(9) - 4;
    peri_tensor *flat = numbers(x, rows * heads * size, pick(20) == 19 ? PERI_I64 : pick(3) ? PERI_F32 : PERI_F64);
    require(peri_tensor_reshape(flat, 3, shape, &t) == PERI_OK, "a shape");
    peri_tensor_release(flat);
    return t;
}

/** Attention within sequences, forward and backward; places and times. */
static void attending(void)
{
    int64_t n = pick(6), rows = n ? pick(9) : 0, heads = 1 + pick(2), dim = 1 + pick(2);
    int32_t odd = (int32_t)pick(12);
    peri_tensor *in[] = {
        vectors(rows, heads, dim), vectors(rows + (odd == 11), heads, dim),   vectors(rows, heads, 1 + pick(3)),
        offsets(n, rows),          pick(2) ? ints(n + (odd == 10), 3) : NULL, ints(rows, 1000)};
    peri_tensor *out[4] = {NULL};
    for (int32_t i = 0; i < 3; i++)
        if (pick(3)) (void)peri_tensor_requires_grad_set(in[i], true);
    const peri_attention_args a = {.size = sizeof a,
                                   .q = in[0],
                                   .k = in[1],
                                   .v = in[2],
                                   .seq_offsets = in[3],
                                   .num_targets = in[4],
                                   .max_seq_len = pick(9) == 8 ? extreme() : pick(2) * MOST,
                                   .max_attn_len = pick(9) == 8 ? extreme() : pick(4),
                                   .alpha = 0.5,
                                   .scale = 0.1,
                                   .form = (int32_t)pick(5) / 2,
                                   .causal = pick(2),
                                   .contextual_seq_len = pick(9) == 8 ? extreme() : pick(3) / 2,
                                   .min_full_attn_seq_len = pick(9) == 8 ? extreme() : pick(4)};
    judge(peri_sparse_attention(&a, &out[0]), out, 1);
    peri_tensor_info d = {.size = sizeof d};
    if (out[0]) peri_tensor_describe(out[0], &d);
    if (d.requires_grad) require(peri_tensor_backward(out[0], out[0]) == PERI_OK, "no gradient");
    judge(peri_sparse_sequence_positions(in[3], in[4], rows - (pick(9) == 8), pick(9) == 8 ? extreme() : 1 + pick(5),
                                         &out[1]),
          out + 1, 1);
    judge(peri_sparse_sequence_numbers(in[3], rows, &out[2]), out + 2, 1);
    const peri_time_buckets_args t = {.size = sizeof t,
                                      .timestamps = in[5],
                                      .seq_offsets = in[3],
                                      .num_buckets = pick(9) == 8 ? extreme() : 1 + pick(9),
                                      .increment = pick(9) - 1.0,
                                      .log = pick(2)};
    judge(peri_sparse_time_buckets(&t, &out[3]), out + 3, 1);
    release(out, 4);
    release(in, 6);
}

static void calibrating(void)
{
    int64_t n = pick(MOST), values = pick(MOST), shape[2] = {n, pick(5)};
    peri_calibration_args a = {.num_bins = 1 + pick(6),
                               .positive_weight = pick(9) ? 0.5 : 0,
                               .lower_bound = (double)pick(2) / 4,
                               .upper_bound = 1,
                               .bin_ctr_in_use_after = pick(9),
                               .bin_ctr_weight_value = 0.5};
    if (pick(2)) {
        a.segment_lengths = ints(n, 3);
        a.segment_value = ints(values, 4);
        a.num_segments = pick(9) == 8 ? extreme() : pick(4);
    }
    int64_t bins = a.num_bins * (1 + (a.num_segments >= 0 && a.num_segments < 9 ? a.num_segments : 0)) + (pick(9) == 8);
    a.bin_num_examples = floats(bins, PERI_F64);
    a.bin_num_positives = floats(bins, PERI_F64);
    peri_tensor *logit = floats(n, PERI_F32), *out[5] = {0}, *to = ints(n, 5), *weight = NULL;
    judge(peri_sparse_calibrate(logit, &a, &out[0], &out[1]), out, 2);
    judge(peri_sparse_weights_and_counts(logit, to, pick(9) == 8 ? -1 : pick(9), &out[2]), out + 2, 1);
    peri_prune_args p = {.threshold = (double)pick(9), .compressed_indices_dtype = some_dtype(), .abs = pick(2),
                         .min_num_rows = pick(9) == 8 ? extreme() : 0, .min_save_ratio = (double)pick(4)};
    require(peri_tensor_full(device, PERI_F32, 2, shape, 1, &weight) == PERI_OK, "weights");
    judge(peri_sparse_rowwise_prune(weight, logit, &p, &out[3], &out[4]), out + 3, 2);
    release((peri_tensor *[]){logit, to, weight, a.segment_lengths, a.segment_value, a.bin_num_examples,
                              a.bin_num_positives},
            7);
    release(out, 5);
}

static void quantizing(void)
{
    peri_row_format f = {.codes = (int32_t)pick(5),
                         .scale_dtype = pick(3) ? (int32_t)pick(3) : -1,
                         .scale_first = pick(2),
                         .alignment = pick(3) ? 1 : (int32_t)pick(20),
                         .exponent_bits = (int32_t)pick(7),
                         .exponent_bias = (int32_t)pick(70)};
    int64_t shape[2] = {pick(5), pick(70)}, size = 0;
    peri_tensor *x = NULL, *out[2] = {0};
    require(peri_tensor_new(device, PERI_F32, 2, shape, &x) == PERI_OK, "a matrix");
    uint32_t words[5 * 70];

        for (int64_t i = 0; i < shape[0] * shape[1]; i++) {
        words[i] = (uint32_t)pick(256) << 24;
        words[i] |= (uint32_t)pick(256) << 16 | (uint32_t)pick(256);
    }
    require(peri_tensor_write(x, words, 4 * shape[0] * shape[1]) == PERI_OK, "a write");
    peri_status status = peri_quantize_rows(x, &f, NULL, &out[0]);
    judge(status, out, 1);
    if (status >= 0) {
        require(peri_quantize_row_bytes(&f, shape[1], &size) == PERI_OK, "bytes of a row");
        judge(peri_quantize_restore(out[0], &f, shape[1] + (pick(9) == 8), PERI_F32, &out[1]), out + 1, 1);
    }
    release(out, 2);
    peri_tensor_release(x);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const operators[])(void) = {permuting,  spreading, summing,    padding,     counting,
                                              quantizing, picking,   looking_up, calibrating, attending};
    bytes = data;
    left = size;
    int64_t live = peri_mem_objects();
    require(peri_device_get(pick(4) == 3 ? "opaque" : "cpu", &device) == PERI_OK, "a device");
    operators[pick(10)]();
    require(peri_mem_objects() == live, "objects that were not released");
    return 0;
}
