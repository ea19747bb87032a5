/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/lookup.h: numbers and rows found by id: tables laid one after the other, pruned tables, hashes, calibration
 * by histogram. Words and conventions are those of kernels/jagged.h; blocks are those of PERI_JAGGED_BLOCK elements.
 */
#ifndef PERI_KERNELS_LOOKUP_H
#define PERI_KERNELS_LOOKUP_H

#include <perilune/base.h>

#include "work.h"

/* -- ids of several tables ----------------------------------------------------------------------------------------- */

/** Operation and step: n ids in bags, `step` bags a table; table t, of tables that lie one after the other, begins at
 *  starts[t] and ends at starts[t + 1]. out[i] = starts[t] + ids[i], or with `remap` remap[starts[t] + ids[i]], a table
 *  of no rows leaving ids as they are; bag[i] = the id's bag, if bag. bad[0] = first i whose id is negative (remap: but
 *  -1) or not in its table, else INT64_MAX; its out is -1. The step, for each block of ids: bad[b] = the first one of
 *  the block. range: blocks. */
typedef struct peri_k_table_rows_args {
    const void *ids, *offsets, *starts, *remap; /* offsets: tables * step + 1, well formed */
    void *out;
    int64_t *bag, *bad;
    int64_t n, tables, step;
    int32_t ids_dtype, offsets_dtype, starts_dtype, remap_dtype, out_dtype;
} peri_k_table_rows_args;

/* -- rows of several matrices -------------------------------------------------------------------------------------- */

/** Words of a matrix in the table of batch_select. */
enum {
    PERI_SELECT_PLACE = 0, /* its first index among all indices */
    PERI_SELECT_ROW = 1,   /* its first row among the rows of all matrices */
    PERI_SELECT_FROM = 2,  /* its first element among all elements */
    PERI_SELECT_TO = 3,    /* the first element of its first index's row in the result */
    PERI_SELECT_COLUMNS = 4,
    PERI_SELECT_WORDS = 5
};

/** Rows of `matrices` matrices that lie one after the other. Index k belongs to the last matrix m with PLACE <= k and
 *  selects rows[k], counted over all matrices: the element that it begins at is FROM + (rows[k] - ROW) * COLUMNS. In
 *  the result it begins at
 *  TO + (k - PLACE) * (pitch ? pitch : COLUMNS).
 *  batch_select: copies the rows. range: indices.
 *  batch_select_sum, the adjoint: each row r of all matrices = sum of the result's rows k in list[list_offsets[r] ..
 *  list_offsets[r + 1]), in this order, starting from the first; 0 if there are none. f32 or f64. range: rows.
 *  The table has one entry more than there are matrices: the ends. */
typedef struct peri_k_batch_select_args {
    char *matrix, *result; /* elements of `element` bytes */
    const int64_t *table;  /* (matrices + 1) x PERI_SELECT_WORDS */
    const int64_t *rows, *list, *list_offsets;
    int64_t matrices, pitch, element;
} peri_k_batch_select_args;

/* -- numbers by id ------------------------------------------------------------------------------------------------- */

/** tasks x width numbers, of which bag t * batch + b sums those at rows[offsets[bag] .. offsets[bag + 1]):
 *    unary_sum: out[(task * batch + b) * tables + t] = sum of weight[task * width + rows[i]], in order from 0. range:
 *    bags. unary_sum_back: weight[task * width + r] = sum over j of list[list_offsets[r] .. list_offsets[r + 1]), in
 *    order from 0, of out[(task * batch + b) * tables + t], bag[list[j]] = t * batch + b. range: width. */
typedef struct peri_k_unary_sum_args {
    void *weight, *out; /* f32 or f64 */
    const void *offsets;
    const int64_t *rows, *bag, *list, *list_offsets;
    int64_t tasks, width, tables, batch;
    int32_t dtype, offsets_dtype;
} peri_k_unary_sum_args;

/** Operation and step: for u in [0, numbers): out[2 u] = sum of the weights[i] with ids[i] = u, in order from 0; out[2
 *  u + 1] = how many. All ids are such u. The step reads them all for each part of its range: numbers. Without weights
 *  only how many are wanted: out[u]. */
typedef struct peri_k_weights_by_id_args {
    const void *weights, *ids; /* weights: f32 or f64, or NULL */
    void *out;                 /* of the same dtype; without weights i64 */
    int64_t n, numbers;
    int32_t dtype, ids_dtype;
} peri_k_weights_by_id_args;

/* -- rows picked --------------------------------------------------------------------------------------------------- */

/** The rows i of `all` (n rows of `width` bytes) with mask[i] != 0, one after the other in `kept`. Operations:
 *    mask_count: total[0] = how many they are.
 *    mask_pick: copies them to kept.
 *    mask_spread, the adjoint: all[i] = its row of kept, 0 for the others.
 *    mask_places: places[i] = the row's number in kept, -1 for the others.
 *  Steps, over blocks: mask_sums: sums[b] = how many they are in block b. When sums has become the exclusive cumulative
 *  sum, mask_pick, mask_spread and mask_places do the rows of each block, its first one in kept being number sums[b].
 *  range: blocks.
 *  Kernel mask_lengths: lengths[b] = number of them in bag b. range: bags. */
typedef struct peri_k_mask_args {
    const uint8_t *mask;
    int64_t *total;
    int64_t *sums; /* the steps': blocks */
    char *all, *kept;
    const void *offsets; /* bags + 1 */
    void *lengths, *places;
    int64_t n, width;
    int32_t offsets_dtype, lengths_dtype, places_dtype;
} peri_k_mask_args;

/** Operation and step: the places [start[b], start[b] + length) of each bag: starts[b] = offsets[b] + start[b];
 *  lengths[b] = min(length, members from start[b] on). bad[0] = first bag whose start is negative or beyond its
 *  members, else INT64_MAX; such a bag's length is 0. The step, for each block of bags: bad[block] = the first one of
 *  the block. range: blocks. */
typedef struct peri_k_slice_bounds_args {
    const void *offsets, *start;
    int64_t *starts, *bad;
    void *lengths;
    int64_t bags, length;
    int32_t offsets_dtype, start_dtype, lengths_dtype;
} peri_k_slice_bounds_args;

/* -- pruned tables ------------------------------------------------------------------------------------------------- */

/** mask[i] = 1 if indicator[i] (magnitude: its absolute value) exceeds the threshold, else 0; a NaN does not. range:
 *  n. */
typedef struct peri_k_prune_mark_args {
    const float *indicator;
    uint8_t *mask;
    double threshold;
    bool magnitude;
} peri_k_prune_mark_args;

/** Hash tables by open addressing: table t has the slots [slots[t], slots[t + 1]), each a pair of an id and its row, -1
 *  and -1 while free. With C slots, an id is looked for at fmix(id) mod C and the slots after it, round and round,
 *  until it, a free slot or every slot was seen. fmix: MurmurHash3's last steps, of 32 bits for i32 and of 64 bits for
 *  i64.
 *
 *  Operation and step hash_insert: the ids of each table in order: put in the first slot that is free or has that id; a
 *  row of -1 leaves its id out. A table of no slots takes nothing. At an id that is negative, whose row is below -1 or
 *  for which there is no slot, its table's insertion ends: bad[0] = the first such place of all tables, else INT64_MAX.
 *  The step: bad[t] = that of table t. range: tables. Kernel hash_find: rows[i] = the row of ids[i], -1 if it is
 *  nowhere or negative; a table of no slots leaves ids as they are. range: n. */
typedef struct peri_k_hash_args {
    const void *ids, *offsets, *slots; /* offsets: tables * step + 1 */
    void *rows;                        /* insert: read */
    void *pairs;                       /* dtype of the ids */
    int64_t *bad;
    int64_t tables, step;
    int32_t ids_dtype, offsets_dtype, slots_dtype, rows_dtype;
} peri_k_hash_args;

/* -- hashes and calibration ---------------------------------------------------------------------------------------- */

/** out[i] = both halves xored of MurmurHash3 (x64, 128 bits) of the 16 bytes x[i], y ? y[i] : y_number (little endian)
 *  under the 64-bit seed seed ? seed[i] : seed_number. The function is Austin Appleby's, in the public domain. range:
 *  n. */
typedef struct peri_k_murmur_hash3_args {
    const int64_t *x, *y, *seed; /* y, seed: or NULL */
    int64_t *out;
    int64_t y_number, seed_number;
} peri_k_murmur_hash3_args;

/** p = sigmoid(logit + shift) and the bin that holds it, [lower, upper] being cut into `bins` of one width:
 *    bin = min(max(ceil((p - lower) / width) - 1, 0), bins - 1)
 *  with segment_ends also + bins * s, s = value + 1 of the logit's segment [segment_ends[i], segment_ends[i + 1]) of
 *  one value in [0, segments), else 0. out = fma(weight, positives[bin] / examples[bin], (1 - weight) * p) if
 *  examples[bin] > in_use_after, else p. A NaN has no bin: -1, and stays NaN. Arithmetic is f64. range: n. */
typedef struct peri_k_calibrate_args {
    const void *logit; /* f64, f32, f16, bf16 */
    void *out;
    int64_t *bin;
    const double *examples, *positives;
    const void *segment_ends, *segment_values; /* or NULL */
    double shift, lower, upper, weight;
    int64_t bins, segments, in_use_after;
    int32_t dtype, ends_dtype, values_dtype;
} peri_k_calibrate_args;

PERI_KERNELS_LOOKUP(PERI_K_ARGS_OF) PERI_OPS_LOOKUP(PERI_OP_ARGS_OF)

#endif
