/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/sparse.h: sparse operators: ids cut into buckets. Words and conventions are those of kernels/jagged.h.
 */
#ifndef PERI_KERNELS_SPARSE_H
#define PERI_KERNELS_SPARSE_H

#include <perilune/base.h>

#define PERI_KERNELS_SPARSE(X) X(bucketize_count) X(bucketize_place)

/* -- buckets --------------------------------------------------------------------------------------------------------------------- */

/** Words of a feature in the table of bucketize. */
enum {
    PERI_BUCKET_FIRST_BAG = 0, /* its bags: [first bag, the next feature's first bag) */
    PERI_BUCKET_BLOCK = 1,     /* ids per bucket; 0: all ids are dealt out in turn */
    PERI_BUCKET_BOUNDS = 2,    /* place of its buckets + 1 rising bounds in `bounds`; -1: none */
    PERI_BUCKET_KEEP = 3,      /* 1: ids are kept as they are */
    PERI_BUCKET_WORDS = 4
};

/** Where id u (unsigned) of feature f goes, P = buckets:
 *    bounds:            u < bounds[P]: bucket b with bounds[b] <= u < bounds[b + 1] (u < bounds[0]: bucket 0), new id u - bounds[b]
 *    block, no bounds:  u < block * P: bucket u / block, new id u % block
 *    otherwise:         bucket u % P, new id u / P
 *  with KEEP the new id is u. Ids of a bag keep their order within a bucket.
 *
 *  bucketize_count: lengths[b * bags + bag] = number of the bag's ids in bucket b. range: bags.
 *  bucketize_place: when starts[b * bags + bag] is the sum of all lengths before that one: the ids of a bag that go to bucket b lie from
 *  there on. For id i of a bag with place `at`: new_ids[at] = new id; new_weights[at] = weights[i]; positions[at] = i - first id of the
 *  bag; unbucketize[i] = at; mapping[i] = bucket. range: bags.
 *  A table entry more than there are features ends the last one's bags. The product block * P must be below 2^63. */
typedef struct peri_k_bucketize_args {
    const void *offsets; /* bags + 1 */
    const void *ids;
    const char *weights;      /* rows of `width` bytes, or NULL */
    const int64_t *features;  /* (n_features + 1) x PERI_BUCKET_WORDS */
    const int64_t *bounds;
    void *lengths;            /* buckets x bags */
    const int64_t *starts;    /* buckets x bags */
    void *new_ids;
    char *new_weights;
    void *positions;          /* dtype of the ids, or NULL */
    int64_t *unbucketize;     /* or NULL */
    int32_t *mapping;         /* or NULL */
    int64_t bags, buckets, n_features, width;
    int32_t offsets_dtype, ids_dtype, lengths_dtype;
} peri_k_bucketize_args;

#endif
