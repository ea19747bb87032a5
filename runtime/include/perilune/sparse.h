/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/sparse.h: sparse operators on tensors: what FBGEMM calls its sparse ops.
 *
 * Lengths, offsets, ids, permutations and indices are i32 or i64. Offsets are complete: one more entry than bags, first 0. Lengths and
 * indices are checked wherever a wrong one would lead out of bounds; on devices that the host cannot access this, like sizes that
 * depend on data, costs a wait. Functions are local, do not communicate, return tensors that are *new*, borrow their arguments, and
 * leave outputs untouched on failure. Results do not depend on the number of threads.
 */
#ifndef PERILUNE_SPARSE_H
#define PERILUNE_SPARSE_H

#include <perilune/jagged.h>

/* -- buckets: ids dealt to the shards of a table ------------------------------------------------------------------------------------- */

/** How ids of each of some features are cut into @buckets. Host arrays, borrowed. Id u (as an unsigned number) of feature f goes
 *  - with bounds: to the interval of bounds[f] that holds it, as u minus the interval's start;
 *  - else with block = block_sizes[f] (times total_num_blocks[f] / buckets, if given), if u < block * buckets: to bucket u / block, as
 *    u % block;
 *  - all others (beyond the last bound or block; block 0: all) are dealt out in turn: to bucket u % buckets, as u / buckets. */
typedef struct peri_bucket_args {
    int32_t buckets;      /* >= 1 */
    int32_t n_features;
    const int64_t *block_sizes;        /* n_features, >= 0 */
    const int64_t *total_num_blocks;   /* n_features, multiples of buckets; or NULL */
    const int64_t *const *bounds;      /* n_features (NULL entries: none) of buckets + 1 rising numbers from 0; or NULL */
    const bool *keep_original_indices; /* n_features: ids stay as they are; or NULL: none */
    bool sequence;       /* make `unbucketize` */
    bool bucketize_pos;  /* make `positions` */
    bool bucket_mapping; /* make `mapping` */
} peri_bucket_args;

/** What comes out; NULL where not asked for. */
typedef struct peri_bucket_result {
    peri_tensor *lengths;     /* [buckets * bags]: all bags of bucket 0, then of bucket 1, ...; dtype of the given lengths */
    peri_tensor *offsets;     /* i64, one entry more */
    peri_tensor *ids;         /* new ids; those of a bag keep their order within a bucket */
    peri_tensor *weights;     /* the weights of those ids */
    peri_tensor *positions;   /* their places in their original bags, dtype of the ids */
    peri_tensor *unbucketize; /* i64, by original place: the new place of that id */
    peri_tensor *mapping;     /* i32, by original place: its bucket */
} peri_bucket_result;

/** @lengths [bags] i32 or i64, @ids [n] i64 or i32, @weights [n, ...] or NULL. Feature f has batch_sizes[f] bags (host, n_features), or
 *  all have equally many if it is NULL. */
PERI_API peri_status peri_sparse_bucketize(const peri_bucket_args *args, peri_tensor *lengths, peri_tensor *ids, peri_tensor *weights,
                                           const int64_t *batch_sizes, peri_bucket_result *out);

/** The same for the keys of a kjt: its keys bucket after bucket, so that every name stands @buckets times. Weights of the result: the
 *  kjt's, or with bucketize_pos the positions. @unbucketize (may be NULL if not args->sequence) as above. */
PERI_API peri_status peri_kjt_bucketize(peri_kjt *kjt, const peri_bucket_args *args, peri_kjt **out, peri_tensor **unbucketize);

#endif
