/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/sparse.h: sparse operators: ids cut into buckets, permutations, sums of segments, unique ids. Words and
 * conventions are those of kernels/jagged.h; blocks are those of PERI_JAGGED_BLOCK elements.
 */
#ifndef PERI_KERNELS_SPARSE_H
#define PERI_KERNELS_SPARSE_H

#include <perilune/base.h>

#include "work.h"

/* -- buckets ------------------------------------------------------------------------------------------------------- */

/** Words of a feature in the table of bucketize. */
enum {
    PERI_BUCKET_FIRST_BAG = 0, /* its bags: [first bag, the next feature's first bag) */
    PERI_BUCKET_BLOCK = 1,     /* ids per bucket; 0: all ids are dealt out in turn */
    PERI_BUCKET_BOUNDS = 2,    /* place of its buckets + 1 rising bounds in `bounds`; -1: none */
    PERI_BUCKET_KEEP = 3,      /* 1: ids are kept as they are */
    PERI_BUCKET_MULTIPLIER = 4, /* peri_k_divisor_of(block), where it is not 0: kernels/divide.h */
    PERI_BUCKET_SHIFT = 5,
    PERI_BUCKET_WORDS = 6
};

/** Where id u (unsigned) of feature f goes, P = buckets:
 *    bounds:            u < bounds[P]: bucket b with bounds[b] <= u < bounds[b + 1] (u < bounds[0]: bucket 0), new id u
 *                       - bounds[b]
 *    block, no bounds:  u < block * P: bucket u / block, new id u % block
 *    otherwise:         bucket u % P, new id u / P
 *  with KEEP the new id is u. Ids of a bag keep their order within a bucket.
 *
 *  Operation bucketize: lengths[b * bags + bag] = number of the bag's ids in bucket b; starts (if not NULL) = the
 *  complete cumulative sum of all lengths. The ids of a bag that go to bucket b lie from the sum of all lengths before
 *  that one on. For id i of a bag with place `at`: new_ids[at] = new id; new_weights[at] = weights[i]; positions[at] =
 *  i - first id of the bag; unbucketize[i] = at; mapping[i] = bucket. Without new_ids: only lengths and starts. Steps:
 *  bucketize_count makes the lengths, bucketize_place all others from starts. range: bags. A table entry more than
 *  there are features ends the last one's bags. The product block * P must be below 2^63. Offsets do not fall and stay
 *  in [0, n]. If they do not cover all ids (of lengths that are about to be refused), results may be anything, and
 *  nothing else is written. */
typedef struct peri_k_bucketize_args {
    const void *offsets; /* bags + 1 */
    const void *ids;
    const char *weights;      /* rows of `width` bytes, or NULL */
    const int64_t *features;  /* (n_features + 1) x PERI_BUCKET_WORDS */
    const int64_t *bounds;
    void *lengths;            /* buckets x bags */
    int64_t *starts;          /* buckets x bags + 1; steps do not need the last one */
    void *new_ids;
    char *new_weights;
    void *positions;          /* dtype of the ids, or NULL */
    int64_t *unbucketize;     /* or NULL */
    int32_t *mapping;         /* or NULL */
    int64_t bags, buckets, n_features, width, n; /* n: ids of all bags */
    int32_t offsets_dtype, ids_dtype, lengths_dtype;
} peri_k_bucketize_args;

/** unbucketize of bucketize_place from what the ids became: for id i of a bag, unbucketize[i] = cursor[mapping[i] *
 *  bags + bag]++, cursor being `starts` before. A bucket outside [0, buckets) and a place outside [0, n) become -1.
 *  range: bags. */
typedef struct peri_k_bucketize_replay_args {
    const int64_t *offsets; /* bags + 1 */
    const void *mapping;
    int64_t *cursor; /* buckets x bags */
    void *unbucketize;
    int64_t bags, buckets, n;
    int32_t mapping_dtype, out_dtype;
} peri_k_bucketize_replay_args;

/* -- indices and permutations -------------------------------------------------------------------------------------- */

/** Operation: bad[0] = first i with x[i] outside [0, limit), else INT64_MAX; extent[0], extent[1] = the smallest and
 *  largest of all x (INT64_MAX, INT64_MIN if there are none); safe[n], of x's dtype: x, or where some of it is outside,
 *  numbers that are all inside (with bad, and limit > 0). Each may be NULL. */
typedef struct peri_op_index_check {
    const void *x;
    int64_t *bad, *extent;
    void *safe;
    int64_t n, limit;
    int32_t dtype;
} peri_op_index_check;

/** For each block of x[n]: bad[b] = first i with x[i] outside [0, limit), else INT64_MAX; extent[2 b], extent[2 b + 1]
 *  = its smallest and largest x (INT64_MAX, INT64_MIN if it is empty). Either may be NULL. range: blocks. */
typedef struct peri_k_index_check_args {
    const void *x;
    int64_t *bad, *extent;
    int64_t n, limit;
    int32_t dtype;
} peri_k_index_check_args;

/** As jagged_copy, but out[row] = the row of the source that would be copied there: in(p) + row - out(t). With in_step
 *  0 and no in_offsets that is the place within the segment. range: rows. */
typedef struct peri_k_jagged_places_args {
    void *out;
    const void *out_offsets, *in_offsets, *permute;
    int64_t segments, out_step, in_step;
    int32_t dtype, out_dtype, in_dtype, permute_dtype; /* dtype: of out */
} peri_k_jagged_places_args;

/** inverse[permute[i]] = i for every permute[i] in [0, n); of equal ones, any of the places. range: n. */
typedef struct peri_k_invert_permute_args {
    void *inverse;
    const void *permute;
    int64_t n;
    int32_t dtype; /* of both */
} peri_k_invert_permute_args;

/** out[s] = sum of values[offsets[s] * step .. offsets[s + 1] * step). Integers modulo 2^width. Floats in their own
 *  dtype: 16 partial sums (element i goes to number i % 16, in order, each starting from 0), added as ((p0 + p8) + (p4
 *  + p12)) + ...: in halves. range: segments.
 *  */
typedef struct peri_k_segment_sum_args {
    void *out;
    const void *values, *offsets;
    int64_t step;
    int32_t dtype, offsets_dtype; /* dtype: F32, F64, I32, I64 */
} peri_k_segment_sum_args;

/** The adjoint: out[i] = grad[s] for i in [offsets[s] * step, offsets[s + 1] * step), 0 for i that no segment has.
 *  range: segments; the first also writes what lies before it, the last what lies behind. */
typedef struct peri_k_segment_spread_args {
    void *out;
    const void *grad, *offsets;
    int64_t step, segments, n;
    int32_t dtype, offsets_dtype; /* dtype: F32, F64 */
} peri_k_segment_spread_args;

/* -- several levels of bags ---------------------------------------------------------------------------------------- */

enum { PERI_MAX_LEVELS = 5 };

/** A tree of bags: offsets[0] cuts the bags of level 0 into those of level 1, ..., the last one cuts the values. dense
 *  is [bags, max[0], ..., max[levels - 1]] rows of `width` bytes. levels_to_dense: each row is the value at these
 *  coordinates, padding where there is none. range: rows of dense. levels_from_dense: each value is the row at its
 *  coordinates, 0 where one of them reaches max. range: rows of values. */
typedef struct peri_k_levels_args {
    void *dense, *values;
    const void *offsets[PERI_MAX_LEVELS];
    int64_t bags[PERI_MAX_LEVELS], max[PERI_MAX_LEVELS]; /* bags: entries of offsets less one */
    int64_t width, element;
    uint64_t padding[2];
    int32_t levels, offsets_dtype;
} peri_k_levels_args;

/* -- sorting and unique ids ---------------------------------------------------------------------------------------- */

/** Operation: the different numbers of x: unique[0] < unique[1] < ..., total[0] of them, every x[i] =
 *  unique[inverse[i]], counts[u] of them the u-th. Nobody reads what is in unique and counts behind `total` entries. 0
 *  < n < 2^32. */
typedef struct peri_op_unique {
    const void *x;
    void *unique;              /* n, as x */
    int64_t *inverse, *counts; /* n each; NULL: nobody asks */
    int64_t *total;            /* 1 */
    int64_t n, least, most;    /* every x is in [least, most] */
    int32_t dtype;
} peri_op_unique;

/** Operation: the places at which each number of [0, lists) stands in x, whose numbers are all there: list = the
 *  places, those of smaller numbers first, those of one number ascending; offsets[l] = places of numbers < l,
 *  offsets[lists] = n. n < 2^32, and bits(n) + bits(lists) <= 64. */
typedef struct peri_op_lists {
    const void *x;
    int64_t *list, *offsets; /* n; lists + 1 */
    int64_t n, lists;
    int32_t dtype;
} peri_op_lists;

/** keys[i] = (((x[j] - base) >> shift) mod 2^bits) << place_bits | i, j = order ? order[i] : i, x taken as unsigned.
 *  range: n. */
typedef struct peri_k_sort_keys_args {
    const void *x;
    const int64_t *order;
    uint64_t *keys;
    int64_t base;
    int32_t dtype, shift, bits, place_bits;
} peri_k_sort_keys_args;

/** out[i] = order ? order[p] : p, p = keys[i] mod 2^place_bits. range: n. */
typedef struct peri_k_sort_order_args {
    const uint64_t *keys;
    const int64_t *order;
    int64_t *out;
    int32_t place_bits;
} peri_k_sort_order_args;

/** The lists of equal numbers in sorted keys, number(i) = keys[i] >> place_bits < lists: list[i] = place of keys[i];
 *  offsets[l] = first i with number(i) >= l, offsets[lists] = n. range: n + 1. */
typedef struct peri_k_sort_lists_args {
    const uint64_t *keys;
    int64_t *list, *offsets;
    int64_t n, lists;
    int32_t place_bits;
} peri_k_sort_lists_args;

/** x[order[0]], x[order[1]], ... rises. unique_count: sorted[i] = x[order[i]]; sums[b] = number of i in block b where
 *  that differs from the one before (i = 0 does). range: blocks. unique_write, sums being the exclusive cumulative sum:
 *  for the u-th such i: unique[u] = sorted[i], starts[u] = i (starts[total] = n); for all i up to the next:
 *  inverse[order[i]] = u. inverse and starts may be NULL. range: blocks.
 *  unique_counts: counts[u] = starts[u + 1] - starts[u]. range: unique ids. */
typedef struct peri_k_unique_args {
    const void *x;
    const int64_t *order;
    void *sorted; /* n */
    int64_t *sums;
    void *unique;
    int64_t *starts, *inverse, *counts;
    int64_t n;
    int32_t dtype;
} peri_k_unique_args;

/** Unique ids of a narrow range [base, base + size) by marking them, a bit each: W = ceil(size / 64) words, in blocks
 *  of 64. The n ids are cut into `parts`, part p being [p * n / parts, (p + 1) * n / parts), so that nobody shares a
 *  word.
 *  mark_set: marks[p * W + w] = the bits of the part's ids. range: parts.
 *  mark_count, for each block of 64 words: words[w] = all parts' marks together; sums[b] = bits of the block. range:
 *  blocks. In what follows sums is the exclusive cumulative sum.
 *  mark_write, for each block: ranks[w] = bits before word w; unique[rank] = base + place of each bit. range: blocks.
 *  mark_lookup: inverse[i] = bits before x[i]'s, if inverse; tallies[p * total + that] = how many of the part's ids it
 *  is, if tallies. range: parts.
 *  mark_tally: counts[u] = sum of all parts' tallies[p * total + u]. range: unique ids. */
typedef struct peri_k_mark_args {
    const void *x;
    uint64_t *marks; /* parts x W */
    uint64_t *words; /* W */
    int32_t *ranks;  /* W */
    int64_t *sums;   /* blocks + 1 */
    void *unique;
    int64_t *inverse, *counts;
    uint32_t *tallies; /* parts x total */
    int64_t n, base, size, parts;
    int64_t total; /* all bits */
    int32_t dtype;
} peri_k_mark_args;

PERI_KERNELS_SPARSE(PERI_K_ARGS_OF) PERI_OPS_SPARSE(PERI_OP_ARGS_OF)

#endif
