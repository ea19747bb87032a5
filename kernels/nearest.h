/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/nearest.h: exact search for the rows with the largest products with a query.
 */
#ifndef PERI_KERNELS_NEAREST_H
#define PERI_KERNELS_NEAREST_H

#include "work.h"
#include "quantize.h"

/** score(q, i) = sum over d of queries[q, d] * item i's number d, in f32, summed in any order that depends on dim
 *  alone: not on the other queries and items. On processors the sum begins with 0 and takes d in rising order, each
 *  product by one fma, so all instruction sets have the same bits. Rows of codes are what rows_restore makes of them. A
 *  score that is NaN counts as -infinity. scores[q], indices[q]: the k items with the largest scores, the largest
 *  first; of equal ones the one with the smaller number comes first. 1 <= k <= n_items, k <= PERI_NEAREST_MOST. */
typedef struct peri_op_nearest {
    const float *queries;    /* n_queries x dim */
    const void *items;       /* n_items rows that lie `stride` bytes apart */
    float *scores;           /* n_queries x k */
    int64_t *indices;        /* n_queries x k */
    peri_k_rows_args format; /* of rows of codes; bits = 0: rows are numbers of `dtype` (f32, f16, bf16) */
    int64_t n_queries, n_items, dim, k, stride;
    int32_t dtype;
} peri_op_nearest;

enum {
    PERI_NEAREST_MOST = 2048, /* of k */
    PERI_NEAREST_ITEMS = 64,  /* that a part looks at together */
    PERI_NEAREST_ROWS = 80    /* rows of f32 that it has room for: those, and sixteen more */
};

/** nearest_part: the best of the items [p * n_items / parts, (p + 1) * n_items / parts) for all queries; fewer than k
 *  are followed by -infinity and number -1. range: parts. nearest_merge: from these the results. range: queries. */
typedef struct peri_k_nearest_args {
    peri_op_nearest op;
    float *part_scores;    /* parts x n_queries x k */
    int64_t *part_indices; /* parts x n_queries x k */
    float *rows;           /* parts x PERI_NEAREST_ROWS x dim */
    int64_t parts;
} peri_k_nearest_args;

PERI_OPS_NEAREST(PERI_OP_ARGS_OF)

#endif
