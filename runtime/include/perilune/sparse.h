/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/sparse.h: sparse operators on tensors: what FBGEMM calls its sparse ops.
 *
 * Lengths, offsets, ids, permutations and indices are i32 or i64. Offsets are complete: one more entry than bags, first
 * 0. Lengths and indices are checked wherever a wrong one would lead out of bounds; on devices that the host cannot
 * access this, like sizes that depend on data, costs a wait. Functions are local, do not communicate, return tensors
 * that are *new*, borrow their arguments, and leave outputs untouched on failure. Results do not depend on the number
 * of threads.
 *
 * Threads: any; operands as tensor.h says.
 */
#ifndef PERILUNE_SPARSE_H
#define PERILUNE_SPARSE_H

#include <perilune/jagged.h>

/* -- buckets: ids dealt to the shards of a table ------------------------------------------------------------------- */

/** How ids of each of some features are cut into @buckets. Host arrays, borrowed. Id u (as an unsigned number) of
 *  feature f goes
 *  - with bounds: to the interval of bounds[f] that holds it, as u minus the interval's start;
 *  - else with block = block_sizes[f] (times total_num_blocks[f] / buckets, if given), if u < block * buckets: to
 *    bucket u / block, as u % block;
 *  - all others (beyond the last bound or block; block 0: all) are dealt out in turn: to bucket u % buckets, as u /
 *    buckets. */
typedef struct peri_bucket_args {
    int32_t buckets;      /* >= 1 */
    int32_t n_features;
    const int64_t *block_sizes;        /* n_features, >= 0 */
    const int64_t *total_num_blocks;   /* n_features, multiples of buckets; or NULL */
    const int64_t *const *bounds;      /* n_features (NULL entries: none) of buckets + 1 rising numbers from 0; or
                                          NULL */
    const bool *keep_original_indices; /* n_features: ids stay as they are; or NULL: none */
    bool sequence;       /* make `unbucketize` */
    bool bucketize_pos;  /* make `positions` */
    bool bucket_mapping; /* make `mapping` */
} peri_bucket_args;

/** What comes out; NULL where not asked for. */
typedef struct peri_bucket_result {
    peri_tensor *lengths;     /* [buckets * bags]: all bags of bucket 0, then of bucket 1, ...; dtype of the given
                                 lengths */
    peri_tensor *ids;         /* new ids; those of a bag keep their order within a bucket */
    peri_tensor *weights;     /* the weights of those ids */
    peri_tensor *positions;   /* their places in their original bags, dtype of the ids */
    peri_tensor *unbucketize; /* i64, by original place: the new place of that id */
    peri_tensor *mapping;     /* i32, by original place: its bucket */
} peri_bucket_result;

/** @lengths [bags] i32 or i64, @ids [n] i64 or i32, @weights [n, ...] or NULL. Feature f has batch_sizes[f] bags (host,
 *  n_features), or all have equally many if it is NULL. */
PERI_API peri_status peri_sparse_bucketize(const peri_bucket_args *args, peri_tensor *lengths, peri_tensor *ids,
                                           peri_tensor *weights, const int64_t *batch_sizes, peri_bucket_result *out);

/** The same for the keys of a kjt: its keys bucket after bucket, so that every name stands @buckets times. Weights of
 *  the result: the kjt's, or with bucketize_pos the positions. @unbucketize (may be NULL if not args->sequence) as
 *  above. */
PERI_API peri_status peri_kjt_bucketize(peri_kjt *kjt, const peri_bucket_args *args, peri_kjt **out,
                                        peri_tensor **unbucketize);

/** The unbucketize permutation from what is known afterwards: @lengths [bags] before, @bucketized_lengths [buckets *
 *  bags], and each id's bucket @mapping [n]. @out [n] of mapping's dtype. A bucket out of range, or lengths that do not
 *  agree with it, are errors. */
PERI_API peri_status peri_sparse_bucketize_replay(peri_tensor *lengths, peri_tensor *bucketized_lengths,
                                                  peri_tensor *mapping, peri_tensor **out);

/* -- cumulative sums ----------------------------------------------------------------------------------------------- */

/** Cumulative sums of @x [n], or of every row of @x [rows, n]; @mode: PERI_CUMSUM_*. @out has x's dtype; a sum that
 *  does not fit is PERI_ERANGE. */
PERI_API peri_status peri_sparse_cumsum(peri_tensor *x, int32_t mode, peri_tensor **out);

/* -- permutations -------------------------------------------------------------------------------------------------- */

typedef struct peri_permute_result {
    peri_tensor *lengths; /* dtype of the given lengths */
    peri_tensor *values;
    peri_tensor *weights; /* NULL if there were none */
} peri_permute_result;

/** Segments in another order: with @lengths [T] a segment is a bag, with [T, B] a row of B bags; @values [n, ...] and
 *  @weights [n, ...] (or NULL) hold their rows one after the other. Segment i of the result is segment permute[i];
 *  @permute [T'], repeats and subsets are fine. With gradient: a row gets the sum of the gradients of its copies. */
PERI_API peri_status peri_sparse_permute(peri_tensor *permute, peri_tensor *lengths, peri_tensor *values,
                                         peri_tensor *weights, peri_permute_result *out);
/** Row i of the result is row indices[i] of @values [n, ...]; @indices [k], repeats are fine. With gradient. */
PERI_API peri_status peri_sparse_index_select(peri_tensor *values, peri_tensor *indices, peri_tensor **out);
/** out[permute[i]] = i; every number of 0..n-1 stands once in @permute [n]. */
PERI_API peri_status peri_sparse_invert_permute(peri_tensor *permute, peri_tensor **out);
/** A permutation of segments as one of elements: out[out_offsets[t] + i] = in_offsets[permute[t]] + i for each place i
 *  of the segment. Offsets are complete: @in_offsets [T + 1], @out_offsets [T' + 1], of equal segments. @size: the last
 *  of out_offsets, or -1. @out has permute's dtype. */
PERI_API peri_status peri_sparse_expand_permute(peri_tensor *permute, peri_tensor *in_offsets, peri_tensor *out_offsets,
                                                int64_t size, peri_tensor **out);
/** 0, 1, ... within each segment: segment i covers [offsets[i], offsets[i + 1]), the last one ends at @size. @offsets
 *  [T] begin with 0.
 *  @out [size] of the same dtype. */
PERI_API peri_status peri_sparse_offsets_range(peri_tensor *offsets, int64_t size, peri_tensor **out);
/** 0, 1, ..., lengths[i] - 1 for each i. */
PERI_API peri_status peri_sparse_lengths_range(peri_tensor *lengths, peri_tensor **out);
/** Column blocks of @pooled [rows, columns] (f32, f64, f16, bf16) in another order. @features blocks begin at the
 *  columns offsets[features + 1] (host, complete); block i of the result is block permute[i] (host, @n of them; repeats
 *  and subsets are fine). With gradient (f32, f64). */
PERI_API peri_status peri_sparse_permute_pooled(peri_tensor *pooled, const int64_t *offsets, int32_t features,
                                                const int64_t *permute, int32_t n, peri_tensor **out);

/* -- members and rows picked --------------------------------------------------------------------------------------- */

/** The @values [n, ...] of bags of @lengths for which @mask [n] (bool) is true, and the lengths that the bags then have
 *  (dtype of the given ones). With gradient: what is left out gets 0. */
PERI_API peri_status peri_sparse_masked_select(peri_tensor *values, peri_tensor *lengths, peri_tensor *mask,
                                               peri_tensor **out_values, peri_tensor **out_lengths);
/** The members start[b], start[b] + 1, ... of each bag b, at most @length of them, and how many there are. @start
 *  [bags]: 0..lengths[b]. With gradient: what is left out gets 0. */
PERI_API peri_status peri_sparse_slice(peri_tensor *values, peri_tensor *lengths, peri_tensor *start, int64_t length,
                                       peri_tensor **out_values, peri_tensor **out_lengths);

/** Matrices that lie one after the other. Host arrays of n, borrowed. */
typedef struct peri_batch_select_args {
    int32_t n;                  /* >= 1 */
    const int64_t *num_indices; /* rows to be selected of each */
    const int64_t *rows, *columns;
    bool permute_output_dim_0_1;
} peri_batch_select_args;

/** Rows of each of several matrices: @inputs [sum of rows * columns] holds the matrices, @indices those of the first
 *  matrix (num_indices[0] of them, 0..rows[0] - 1), then of the second, ... @out, of one dimension, holds their
 *  selected rows in the same order; with permute_output_dim_0_1, which wants equal numbers of indices, the first
 *  selected row of every matrix, then the second of every matrix, ... With gradient: a row gets the sum of the
 *  gradients of its copies. */
PERI_API peri_status peri_sparse_batch_index_select(peri_tensor *inputs, peri_tensor *indices,
                                                    const peri_batch_select_args *args, peri_tensor **out);

/* -- pruned tables ------------------------------------------------------------------------------------------------- */

/** What is pruned. */
typedef struct peri_prune_args {
    double threshold;
    int32_t compressed_indices_dtype; /* PERI_I32 or PERI_I64 */
    bool abs;              /* of the indicator counts its absolute value */
    int64_t min_num_rows;  /* >= 0 */
    double min_save_ratio; /* >= 0 */
} peri_prune_args;

/** The rows of @weight [n, columns], of any dtype, whose @indicator [n] f32 is more than the threshold (a NaN is not),
 *  and by id the row's place among them, -1 if it is left out (@mapping [n]). If n + min_num_rows * columns >=
 *  min_save_ratio * n * columns, a mapping is not worth its size: @rows is all of the weights (not a copy), @mapping
 *  one 0. */
PERI_API peri_status peri_sparse_rowwise_prune(peri_tensor *weight, peri_tensor *indicator, const peri_prune_args *args,
                                               peri_tensor **rows, peri_tensor **mapping);

/** Ids of T tables as rows of pruned tables: bags [t * B, (t + 1) * B) of @offsets [T * B + 1] have the ids of table t,
 *  whose mapping is index_remappings[offsets[t] .. offsets[t + 1]) of @index_remappings_offsets [T + 1]: an id outside
 *  of it is an error, -1 stays. A table with an empty mapping is not pruned: its ids stay. @index_remappings is i32, or
 *  as the ids. @out [n]: as @indices; -1: pruned. */
PERI_API peri_status peri_sparse_pruned_array_lookup(peri_tensor *indices, peri_tensor *offsets,
                                                     peri_tensor *index_remappings,
                                                     peri_tensor *index_remappings_offsets, peri_tensor **out);
/** The same with hash tables: slots [offsets[t], offsets[t + 1]) of @hash_table [slots, 2] (pairs of an id and its row,
 *  -1 and -1 in a free slot) are table t's. An id that is nowhere becomes -1, and so does a negative one. @hash_table
 *  has the ids' dtype, on which their places depend: fmix32 or fmix64 of MurmurHash3 modulo the slots, then slot after
 *  slot. */
PERI_API peri_status peri_sparse_pruned_hashmap_lookup(peri_tensor *indices, peri_tensor *offsets,
                                                       peri_tensor *hash_table, peri_tensor *hash_table_offsets,
                                                       peri_tensor **out);
/** @hash_table with more ids in it: each goes with its row of @dense_indices [n] (i32, or i64 as the ids) in the first
 *  slot that is free or has that id; those whose row is -1 do not go in, nor do ids of a table without slots. A full
 *  table is an error. @out: a new table. */
PERI_API peri_status peri_sparse_pruned_hashmap_insert(peri_tensor *indices, peri_tensor *dense_indices,
                                                       peri_tensor *offsets, peri_tensor *hash_table,
                                                       peri_tensor *hash_table_offsets, peri_tensor **out);

/* -- a number for each id ------------------------------------------------------------------------------------------ */

/** Tables of one column, one for each of N tasks: @weight [N, rows of all tables] f32 or f64, table t being the columns
 *  [offsets[t], offsets[t + 1]) of @table_offsets [T + 1]; @offsets [T * B + 1] has bag t * B + b for sample b. @out
 *  [N, B, T]: the sum over each bag. With gradient. */
PERI_API peri_status peri_sparse_batched_unary(peri_tensor *weight, peri_tensor *table_offsets, peri_tensor *offsets,
                                               peri_tensor *indices, peri_tensor **out);
/** For each u of [0, num_unique_indices): the sum of @weights [n] (f32, f64) over the i with reverse_indices[i] = u,
 *  and how many they are:
 *  @out [num_unique_indices, 2], of the weights' dtype (f32 counts are exact to 2^24). */
PERI_API peri_status peri_sparse_weights_and_counts(peri_tensor *weights, peri_tensor *reverse_indices,
                                                    int64_t num_unique_indices, peri_tensor **out);
/** How often each number 0, 1, ... is in @ids [n] (i32, i64; below 2^40): @out i64 [the largest + 1, or @least if that
 *  is more]. Waits. */
PERI_API peri_status peri_sparse_counts(peri_tensor *ids, int64_t least, peri_tensor **out);

/** Histograms of predictions and what became of them. Tensors are borrowed. */
typedef struct peri_calibration_args {
    peri_tensor *bin_num_examples, *bin_num_positives; /* f64 [(num_segments + 1) * num_bins] */
    int64_t num_bins;                 /* of one width, from lower_bound to upper_bound */
    double positive_weight;           /* > 0: of a positive example in the training that gave the logits */
    double lower_bound, upper_bound;
    int64_t bin_ctr_in_use_after;     /* examples of a bin that are too few to count */
    double bin_ctr_weight_value;      /* of the bin's share of positives in the result */
    peri_tensor *segment_lengths, *segment_value; /* by feature: 0 or 1 value of [0, num_segments) for each logit; or
                                                     NULL */
    int64_t num_segments;             /* 0 without segments */
} peri_calibration_args;

/** Calibration by histogram binning (Zadrozny and Elkan, 2001), per segment if there are any: @calibrated, of @logit's
 *  shape and dtype (f64, f32, f16, bf16), and @bin_ids (i64). Formula: kernels/lookup.h, calibrate. Logits of no value,
 *  of several, or of one that is no segment's number have the first bins; predictions beyond the bounds have the
 *  outermost ones. */
PERI_API peri_status peri_sparse_calibrate(peri_tensor *logit, const peri_calibration_args *args,
                                           peri_tensor **calibrated, peri_tensor **bin_ids);

/** What is hashed with each number, and under which seed. */
typedef struct peri_murmur_args {
    peri_tensor *y, *seed;         /* i64 of the input's shape, borrowed; NULL: the numbers, for all */
    int64_t y_number, seed_number;
} peri_murmur_args;

/** MurmurHash3 of pairs of 64-bit numbers (kernels/lookup.h): @input, i64 of any shape, and y. @out: i64 of that shape,
 *  all 64 bits of the hashes: half of them are negative. */
PERI_API peri_status peri_sparse_murmur_hash3(peri_tensor *input, const peri_murmur_args *args, peri_tensor **out);

/** Row r of @out [rows, ...] is the sum of those rows of @values [n, ...] (f32, f64, f16, bf16) whose number in @ids
 *  [n] is r, in their order; 0 where there is none. With gradient. Waits for the ids, to check them. */
PERI_API peri_status peri_sparse_sum_by_id(peri_tensor *values, peri_tensor *ids, int64_t rows, peri_tensor **out);

/* -- segments ------------------------------------------------------------------------------------------------------ */

/** out[s] = sum of values[offsets[s] * step .. offsets[s + 1] * step). @values [n] f32, f64, i32 or i64 (modulo
 *  2^width), n a multiple of
 *  @step; the last of @offsets is n / step. With gradient. */
PERI_API peri_status peri_sparse_segment_sum(peri_tensor *values, peri_tensor *offsets, int64_t step,
                                             peri_tensor **out);

/* -- jagged and dense ---------------------------------------------------------------------------------------------- */

/** @values [n, ...] under @levels (1..5) levels of bags: offsets[0] cuts the bags of level 0 into those of level 1,
 *  ..., the last one cuts the values. @out [bags, max[0], ..., max[levels - 1], ...]: each bag keeps its first
 *  max[level] members, what is not there is
 *  @padding. With gradient. */
PERI_API peri_status peri_sparse_jagged_to_dense(peri_tensor *values, peri_tensor *const *offsets, const int64_t *max,
                                                 int32_t levels, double padding, peri_tensor **out);
/** The way back: @dense [bags, a size for each level, ...]; members beyond a size are 0. @rows: number of values, or
 *  -1: as the last offset says. With gradient. */
PERI_API peri_status peri_sparse_dense_to_jagged(peri_tensor *dense, peri_tensor *const *offsets, int32_t levels,
                                                 int64_t rows, peri_tensor **out);

/* -- sequences ----------------------------------------------------------------------------------------------------- */

/** Attention within the sequences of a jagged tensor. Tensors are borrowed. */
typedef struct peri_attention_args {
    int64_t size; /* sizeof(peri_attention_args) */
    peri_tensor *q, *k, *v;   /* [n, heads, D], [n, heads, D], [n, heads, V]: f32, f64, f16 or bf16 */
    peri_tensor *seq_offsets; /* [sequences + 1] i32 or i64: sequence s has the rows seq_offsets[s] .. seq_offsets[s +
                                 1] */
    peri_tensor *num_targets; /* [sequences] i32 or i64: how many of its last members are targets; or NULL: none */
    int64_t max_seq_len;      /* a longer sequence is an error; 0: any length is fine */
    int64_t max_attn_len;     /* how far back a member looks; 0: everywhere */
    double alpha;             /* factor of the products of q and k; 0: 1 / sqrt(D) */
    double scale;             /* PERI_ATTENTION_SILU: factor of the weights; 0: 1 */
    int32_t form;             /* PERI_ATTENTION_* */
    bool causal;              /* members of the history do not see what is behind them */
    int64_t contextual_seq_len; /* how many of the first members of each sequence are contextual: they see the whole
                                   history, and stand, for max_attn_len, all at its first place */
    int64_t min_full_attn_seq_len; /* members that stand at most so many places before the end of the history, and
                                      targets, look everywhere in spite of max_attn_len; 0: none does */
} peri_attention_args;

/** Each member's sum of the values of those that it sees, weighted: with PERI_ATTENTION_SOFTMAX by softmax(alpha * q .
 *  k) over them, with PERI_ATTENTION_SILU by scale * silu(alpha * q . k). A member sees itself and its history; a
 *  target sees itself and the history, but no other target. Nothing is padded. @out [n, heads, V]. With gradient. */
PERI_API peri_status peri_sparse_attention(const peri_attention_args *args, peri_tensor **out);
/** For each of @rows members how far it is from the first target of its sequence (from the end, if there are none), at
 *  most
 *  @max_positions - 1; 0 for targets. @num_targets [sequences] or NULL. @out [rows] i64. */
PERI_API peri_status peri_sparse_sequence_positions(peri_tensor *seq_offsets, peri_tensor *num_targets, int64_t rows,
                                                    int64_t max_positions, peri_tensor **out);

/** For each of @rows members the number of its sequence. @out [rows] i64. */
PERI_API peri_status peri_sparse_sequence_numbers(peri_tensor *seq_offsets, int64_t rows, peri_tensor **out);

/** How times become numbers. Tensors are borrowed. */
typedef struct peri_time_buckets_args {
    int64_t size; /* sizeof(peri_time_buckets_args) */
    peri_tensor *timestamps;  /* [n] i64, i32, f64 or f32 */
    peri_tensor *seq_offsets; /* [sequences + 1] i32 or i64 */
    int64_t num_buckets;      /* >= 1 */
    double increment;         /* > 0 */
    bool log;                 /* logarithm instead of square root */
} peri_time_buckets_args;

/** For each member how long before the last one of its sequence it was, as a number of 0..num_buckets: the whole part
 *  of sqrt(d / increment) (or log), d the difference of their times, at least 1e-6. @out [n] i64. */
PERI_API peri_status peri_sparse_time_buckets(const peri_time_buckets_args *args, peri_tensor **out);

/* -- distinct ids -------------------------------------------------------------------------------------------------- */

typedef struct peri_unique_result {
    peri_tensor *unique;  /* each id once, ascending, dtype of the ids */
    peri_tensor *inverse; /* i64 [n]: unique[inverse[i]] = ids[i]; NULL if not asked for */
    peri_tensor *counts;  /* i64, one for each of unique; NULL if not asked for */
} peri_unique_result;

/** The distinct numbers among @ids [n], n < 2^32. */
PERI_API peri_status peri_sparse_unique(peri_tensor *ids, bool inverse, bool counts, peri_unique_result *out);

/* -- elements of tensors of any shape ------------------------------------------------------------------------------ */

/** The distinct elements of @x, of its dtype, in rising order; @inverse has x's shape. Any dtype that is not complex;
 *  each NaN is one of its own. Waits. */
PERI_API peri_status peri_sparse_unique_elements(peri_tensor *x, bool inverse, bool counts, peri_unique_result *out);
/** The elements of @x where @mask (bool), which broadcasts with it, is true: one dimension, in row-major order. Any
 *  dtype; with gradient. Waits. */
PERI_API peri_status peri_sparse_masked_elements(peri_tensor *x, peri_tensor *mask, peri_tensor **out);
/** The parts of @x where @mask (bool), whose shape is the first sizes of x, is true: x[mask], with one dimension in the
 *  place of the mask's. Any dtype; with gradient. Waits. */
PERI_API peri_status peri_sparse_masked_parts(peri_tensor *x, peri_tensor *mask, peri_tensor **out);
/** The places of elements of @x that are not 0, in row-major order: i64 [number of them, dimensions of x], coordinates
 *  from 0. Any dtype that is not complex. Waits. */
PERI_API peri_status peri_sparse_nonzero(peri_tensor *x, peri_tensor **out);
/** How many elements of @x fall into each of @bins (1..2^30) intervals of one width from @min to @max, the last one
 *  with its upper bound; others do not count, NaN neither. Both 0: the smallest and the largest element; equal bounds:
 *  1 less and 1 more. @out [bins] of the dtype of x, any that is not complex. Waits. */
PERI_API peri_status peri_sparse_histogram(peri_tensor *x, int64_t bins, double min, double max, peri_tensor **out);

#endif
