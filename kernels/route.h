/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/route.h: moving ids to the ranks that own their rows, and pooled rows back.
 * Words. A *feature* of the local input has `bags` consecutive bags (its batch). A *partition* is one feature cut by
 * one table's row boundaries into n_parts *strands*, each of which goes to one rank; a table that is not cut by rows
 * has one strand, and a table that every rank holds has none: its ids are only checked. All strands together lie in
 * wire order: by destination rank, then by the destination's own order. `slot` of a bag in wire order =
 * wire_bag[strand] + bag.
 */
#ifndef PERI_KERNELS_ROUTE_H
#define PERI_KERNELS_ROUTE_H

#include <perilune/base.h>

#include "work.h"
#include "spread.h"

/** One feature cut by one table's rows. */
typedef struct peri_k_partition {
    int64_t bag_start;   /* range index of its first bag: sum of `bags` of the partitions before */
    int64_t first_bag;   /* first bag in the input's offsets */
    int64_t bags;
    int64_t rows;        /* of the whole table; ids are legal in [0, rows), and -1 (no row: skipped). Raw ids: buckets
                            of the whole table */
    int64_t first_bound; /* in bounds: n_parts + 1 row (raw ids: bucket) boundaries, from 0 to rows */
    int64_t block;       /* rows of an even part, for the first guess; 0: search the boundaries */
    int64_t bucket_ids;  /* raw ids by PERI_K_SPREAD_RANGE: ids of a bucket */
    int32_t n_parts;
    int32_t first_strand; /* in wire_bag: its n_parts strands */
    int32_t check;        /* which report ids out of range go into: 0..PERI_ROUTE_REPORTS - 1; more: none */
    int32_t raw;         /* 0: ids are rows. Else they are raw, each belongs to the part that has its bucket by spread
                            raw - 1 (PERI_K_SPREAD_*), and travels as it is; all that have a bucket are legal, -1 too */
} peri_k_partition;

/** What of @id is compared with a partition's boundaries: < -1: the id is not legal; -1: it is skipped. */
K_INLINE int64_t peri_k_route_key(const peri_k_partition *p, int64_t id)
{
    if (!p->raw) return id;
    int64_t bucket = peri_k_bucket(id, p->raw - 1, p->rows, p->bucket_ids);
    return bucket < 0 ? -2 : bucket;
}

/** Which of @n partitions, in the order of their first bags, has range index @i. */
K_INLINE const peri_k_partition *peri_k_route_find(const peri_k_partition *p, int32_t n, int64_t i)
{
    int32_t low = 0, high = n - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (p[middle].bag_start <= i) low = middle;
        else high = middle - 1;
    }
    return p + low;
}

/** The ids of an input, and how they are cut: what each kernel is told that follows ids to their strands. */
typedef struct peri_k_routed {
    const void *ids;        /* i64 or i32, the input's values */
    const int64_t *offsets; /* the input's bags */
    const peri_k_partition *partitions;
    const int64_t *bounds;
    const int64_t *wire_bag; /* by strand */
    int64_t bags;            /* sum over partitions */
    int32_t n_partitions;
    bool ids_i32;
} peri_k_routed;

/** What a check found, in device memory, zeroed before. */
typedef struct peri_k_route_report {
    int64_t bad;     /* number of ids out of range */
    int64_t where;   /* 1 + range index of the first bag (in range order) that has one; 0: none */
    int64_t id;      /* the first such id in that bag */
    int64_t position; /* its position in the bag */
} peri_k_route_report;

/** lengths[wire_bag[strand] + bag] = number of ids of the bag in that strand's rows, for every partition and bag. Ids
 *  of -1 and ids out of range are in no strand. The latter are counted in reports[i * PERI_ROUTE_REPORTS + check], for
 *  each of the fixed blocks i of PERI_ROUTE_BLOCK range indices, so that the first offender does not depend on the
 *  split. range: blocks of bags over all partitions. */
enum { PERI_ROUTE_BLOCK = 4096, PERI_ROUTE_REPORTS = 3 };
typedef struct peri_k_route_count_args {
    peri_k_routed in;
    int32_t *lengths;
    peri_k_route_report *reports; /* PERI_ROUTE_REPORTS a block */
} peri_k_route_count_args;

/** totals[i] = positions[at[i]]: how many ids lie before each place of the wire. range: i. */
typedef struct peri_k_route_totals_args {
    int64_t *totals;
    const int64_t *positions, *at;
} peri_k_route_totals_args;

/** scale[wire_bag[strand] + bag] = 1 / max(number of ids of the bag in the input, 1), the factor of mean pooling, for
 *  every strand of every partition: an owner sees only those of its ids that are its own. range: bags over all
 *  partitions. */
typedef struct peri_k_route_mean_args {
    peri_k_routed in; /* without ids */
    float *scale;
} peri_k_route_mean_args;

/** For each bag of each partition and each id of it in order: place = cursor[slot]++; out[place] = id - first row of
 *  the strand (raw: id); out_weights[place] = weights[i]; places[place_first[partition] + i - first id of its first
 *  bag] = place, -1 for ids that are in no strand (a partition without strands has no places); origins[place] = i -
 *  first id of its first bag. `cursor` starts as the exclusive cumulative sum of `lengths`. range: bags over
 *  all partitions. */
typedef struct peri_k_route_pack_args {
    peri_k_routed in;
    const float *weights; /* NULL: none */
    int64_t *cursor;
    void *out; /* i64 or i32 */
    float *out_weights;
    int64_t *places;            /* NULL: not kept */
    const int64_t *place_first; /* by partition */
    int32_t *origins;           /* NULL: not wanted */
    bool out_i32;
} peri_k_route_pack_args;

/** The way back of one number an id: for each partition in order, each of its bags and each id of it in order that is
 *  in a strand: place = cursor[slot]++ as in route_pack; out[i] += factor * back[place] (f32, each rounded). range:
 *  bags of the *input*, so that the partitions of a feature add up in their order. */
typedef struct peri_k_route_return_args {
    peri_k_routed in;
    int64_t *cursor;   /* starts as that of route_pack */
    const float *back; /* in wire order */
    float *out;        /* as ids; starts as the caller likes */
    float factor;
} peri_k_route_return_args;

/** One block of output columns: the sum over pieces, in order, of the pooled rows that ranks made of it. */
typedef struct peri_k_output {
    int64_t column, cols;  /* columns of the output row */
    int64_t first_piece, n_pieces;
    int64_t inverse;       /* first entry in `inverse` (variable batch), -1: output row b is bag b */
    double divisor;        /* of the gradient (spread only) of pieces of this rank */
    double sent_divisor;   /* of pieces of other ranks */
} peri_k_output;

/** Where a piece lies: elements from the start of the received buffer, or of this rank's own. Row j is at offset + j *
 *  cols. */
typedef struct peri_k_piece {
    int64_t offset;
    int64_t own;
    int64_t first, n; /* of rows of ids: their places on the wire */
} peri_k_piece;

/** out[b][column + c] = sum over pieces of piece[bag(b)][c], for every output and row b. range: rows of the output. */
typedef struct peri_k_route_combine_args {
    float *out;
    int64_t stride; /* elements from one output row to the next */
    const float *received, *own;
    const peri_k_output *outputs;
    const peri_k_piece *pieces;
    const int64_t *inverse; /* NULL: none */
    int32_t n_outputs;
    bool past;   /* written past the caches where that can be */
} peri_k_route_combine_args;

/** The adjoint: piece[bag][c] = sum over rows b with bag(b) = bag, ascending, of grad[b][column + c] / divisor (f32),
 *  for every piece of every output; / sent_divisor for a piece that is not own. range: bags of pieces, up to the most
 *  that an output has (without `inverse`: rows of grad). */
typedef struct peri_k_route_spread_args {
    const float *grad;
    int64_t stride, rows; /* of grad */
    float *sent, *own;
    const peri_k_output *outputs;
    const peri_k_piece *pieces;
    const int64_t *bags; /* by output: number of bags of a piece */
    const int64_t *inverse;
    int32_t n_outputs;
    bool past;   /* as in route_combine */
} peri_k_route_spread_args;

/** A block of columns of the rows of one feature's ids, one row for each id, in their order. */
typedef struct peri_k_rows {
    int64_t row, ids;      /* first row of the values, and number of rows */
    int64_t column, cols;  /* columns of a row of the values */
    int64_t first_id;      /* of the feature, in the input's ids */
    int64_t place_first;   /* of the feature's partition in `places`; -1: a replica, whose row k is that of id k */
    int64_t first_piece;   /* one for each part of the partition, in order: the row of place x is at offset + x *
                              cols */
    double divisor, sent_divisor; /* as in peri_k_output */
    int32_t partition;
    int32_t all;           /* the partition has one part, and each id is in it: the places of ids that follow each other
                              do so too */
} peri_k_rows;

/** route_rows: values[row][column + c] = piece[place][c] for every id of every output, where `piece` is that of the
 *  part that has the id's row; zeros for an id that is in no strand (place -1). route_rows_back, its adjoint:
 *  piece[place][c] = values[row][column + c] / divisor (f32), / sent_divisor for a piece that is not own; ids that are
 *  in no strand have none. range: rows of the values. */
typedef struct peri_k_route_rows_args {
    peri_k_routed in;
    float *values;
    int64_t stride; /* elements from one row of the values to the next */
    float *received, *own;
    const int64_t *places; /* of route_pack */
    const int32_t *origins; /* of route_pack, or NULL: the way back from a place, in which the rows of a piece can be
                               taken as they lie */
    const peri_k_rows *outputs;
    const peri_k_piece *pieces;
    int32_t n_outputs;
    bool past; /* they do not fit the caches: may be written past them */
    bool placed; /* rows of own pieces, but of replicas, are where they belong: they are left out */
    bool direct; /* so are those of pieces that are not own (route_lines moves them) */
} peri_k_route_rows_args;

/** Rows that lie together at one end and apart at the other: values[at(i) * stride + c] = together[i * cols + c] with
 *  at(i) = index[i], i without index; its adjoint (back): together[i * cols + c] = values[at(i) * stride + c] / divisor
 *  (f32). range: i. */
typedef struct peri_k_route_lines_args {
    float *values, *together;
    int64_t stride, cols;
    const int32_t *index; /* NULL: none */
    double divisor;       /* back */
    bool back, past;      /* past: what is written may go past the caches */
} peri_k_route_lines_args;

/** A block of columns of the pooled rows of one feature in one table, made of the rows of its ids. */
typedef struct peri_k_pool {
    peri_k_rows rows;      /* of its ids; without `row` and the divisors. `column`: of the output row */
    int64_t first_bag, bags; /* of the feature, in `offsets` */
    int64_t inverse;       /* as in peri_k_output */
    int64_t from;          /* its first column in the table's rows */
    int64_t grad, grad_stride; /* route_pool_weights: where its columns of the gradient of the first bag are, and from
                                  bag to bag */
    int32_t mean;          /* pooled by the mean of the bag's ids, whichever they are; else the sum */
    int32_t last;          /* of the blocks of a table's row, which follow each other */
} peri_k_pool;

/** The lookup of kernels/tbe.h at the place where rows arrive one by one, bit for bit:
 *  route_pool: for every pool and row b of the output, with the ids i of bag(b) in order that have a row (as in
 *  route_rows):
 *      acc[c] = fma(weights[i], row(i)[c], acc[c]), from 0        values[b][column + c] = acc[c] * factor
 *  with weights[i] = 1 without weights; factor = 1 / number of ids of the bag if `mean` and it has any, else 1. range:
 *  rows of the output. route_pool_weights: grad_weights[i] += fl(sum16(grad of the bag * row(i)) * factor), where the
 *  row is that of the table, over its blocks, for each table in order. range: bags, up to the most that a pool has. */
typedef struct peri_k_route_pool_args {
    peri_k_route_rows_args rows; /* where rows are, and where they go; without its outputs */
    const peri_k_pool *pools;
    const int64_t *inverse; /* NULL: none */
    const float *weights;   /* NULL: none */
    const float *grad;      /* route_pool_weights */
    float *grad_weights;    /* route_pool_weights: by id of the input */
    int32_t n_pools;
} peri_k_route_pool_args;

/** Rows that lie together at both ends: dst[to .. to + n) = (own ? own : received)[from .. from + n). */
typedef struct peri_k_run {
    int64_t to, from, n, own;
} peri_k_run;

/** All runs; their rows of dst do not overlap. Each is the first of `lines`: line k is dst[to + k * step ..] = [from +
 *  k * from_step ..]. range: lines of all runs. */
typedef struct peri_k_route_place_args {
    void *dst;
    const void *received, *own;
    const peri_k_run *runs;
    int64_t width; /* bytes of a row */
    int64_t lines; /* of a run; 0 is 1 */
    int64_t step, from_step; /* rows from line to line at both ends; 0: the run's n, one after the other */
    bool past;     /* what is copied does not fit the caches with what else is in use: long runs are written past
                      them */
} peri_k_route_place_args;

PERI_KERNELS_ROUTE(PERI_K_ARGS_OF)

#endif
