/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/bags.h: what lookups in one matrix need beside kernels/tbe.h: torch's padding ids, largest elements of bags,
 * and rows that are scaled down when they are looked up. A bag is ids[offsets[b] .. offsets[b + 1]); every read of an
 * offset is clamped to what makes a bag of n_ids ids, and ids outside 0..rows-1 count as none, so that no kernel leaves
 * its memory.
 */
#ifndef PERI_KERNELS_BAGS_H
#define PERI_KERNELS_BAGS_H

#include "work.h"
#include "tbe.h"

/** out[i] = ids[i] == padding ? -1 : ids[i]. range: ids. */
typedef struct peri_k_bag_pad_args {
    const void *ids;
    void *out;
    int64_t padding;
    int32_t dtype; /* of both: PERI_I64, PERI_I32 */
} peri_k_bag_pad_args;

/** Bags of rows of one matrix. Pointers are device memory. */
typedef struct peri_k_bags {
    const void *ids;     /* n_ids of ids_dtype (PERI_I64, PERI_I32) */
    const void *offsets; /* bags + 1 of offsets_dtype (PERI_I64, PERI_I32) */
    int64_t n_ids, rows, cols;
    int32_t ids_dtype, offsets_dtype;
} peri_k_bags;

/** scale[b] = 1 / number of the bag's ids that are not `padding`, 1 if there is none. range: bags. */
typedef struct peri_k_bag_scale_args {
    peri_k_bags bags;
    float *scale;
    int64_t padding;
} peri_k_bag_scale_args;

/** out[b][d] = the largest x[id][d] over the ids of the bag, NaN if there is one, 0 if the bag has no ids; places[b][d]
 *  = the place in the bag of the first id that has it, -1 if there are none. Bags have fewer than 2^31 ids.
 *  range: bags. */
typedef struct peri_k_bag_max_args {
    peri_k_bags bags;
    const float *x; /* rows x cols */
    float *out;
    int32_t *places;
    peri_k_tbe_reach reach; /* as of tbe_forward */
} peri_k_bag_max_args;

enum { PERI_K_BAG_COLUMNS = 16 };

/** dx[id][d] += grad[b][d] for every bag b, in order, and column d of the range, where id is the one at places[b][d],
 *  if any. range: blocks of PERI_K_BAG_COLUMNS columns. */
typedef struct peri_k_bag_max_grad_args {
    peri_k_bags bags;
    const float *grad;
    const int32_t *places;
    float *dx;
    int64_t n; /* bags */
} peri_k_bag_max_grad_args;

/** For each of ids, each of which stands there once: x[id][d] *= max_norm / (norm + 1e-7) where the norm of x[id] is
 *  above max_norm; in f64, rounded once (torch's embedding_renorm). norm = (sum of |x[id][d]|^norm_type)^(1 /
 *  norm_type), in the order of d; norm_type infinite: the largest |x[id][d]|. range: ids. */
typedef struct peri_k_bag_renorm_args {
    const void *ids;
    float *x; /* rows x cols */
    int64_t rows, cols;
    double max_norm, norm_type;
    int32_t dtype;
} peri_k_bag_renorm_args;

PERI_KERNELS_BAGS(PERI_K_ARGS_OF)

#endif
