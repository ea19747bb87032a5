/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/exchange.h: exchanges of embeddings with gradients, and of KeyedJaggedTensors.
 *
 * All of them are collective over the group: every rank makes the same calls in the same order, with the same lists. A
 * call is local, does not block, and returns a work; when the work is complete, peri_exchange_result hands its tensors
 * out. W is the size of the group, r this rank. Inputs are borrowed by the call and retained by the work; they must
 * stay unchanged until it is complete. Arrays are host memory, copied.
 *
 * Gradients. While recording is on, an exchange of f32 or f64 is always recorded, whether its input requires grad or
 * not: a rank whose part is empty takes part in the backward pass of the others without doing anything for it. In the
 * backward pass the gradient of the output travels the reverse way from where the result was handed out, and is waited
 * for where the exchange was posted: what was recorded between the two is differentiated meanwhile. The gradient that
 * arrives at the input is divided by W, unless the division is off.
 *
 * A group of one rank exchanges nothing: the result is the input, without codec and without division.
 *
 * Threads: works and groups of one world are used by one thread at a time, as comm.h says.
 */
#ifndef PERILUNE_EXCHANGE_H
#define PERILUNE_EXCHANGE_H

#include <perilune/codec.h>
#include <perilune/comm.h>
#include <perilune/jagged.h>

/** Whether gradients that come back are divided by the size of the group. */
enum {
    PERI_DIVISION_DEFAULT = 0, /* of an exchange: as its group; of a group: as the process */
    PERI_DIVISION_ON = 1,
    PERI_DIVISION_OFF = 2
};

/** Set it for later exchanges of @group, or (NULL) the process's default, which is PERI_DIVISION_ON. Local. */
PERI_API peri_status peri_exchange_division_set(peri_group *group, int32_t division);
/** What holds for @group (NULL: the process's default). */
PERI_API bool peri_exchange_division(const peri_group *group);

/** What the exchanges of embeddings share; NULL stands for zeros. */
typedef struct peri_exchange_args {
    int64_t size; /* sizeof(peri_exchange_args) */
    peri_codec *forward, *backward; /* f32 numbers and their gradients on the wire; NULL: as they are. Retained */
    int32_t division;               /* PERI_DIVISION_* */
    uint64_t tag;                   /* a number on which the ranks must agree */
} peri_exchange_args;

/* -- pooled embeddings --------------------------------------------------------------------------------------------- */

/** @input [sum of batch_size_per_rank, dim_sum_per_rank[r]]: rows ordered by the rank whose batch they belong to.
 *  Result [batch_size_per_rank[r], sum of dim_sum_per_rank]: this rank's batch, columns by owner. @out new. */
PERI_API peri_status peri_exchange_alltoall_pooled(peri_group *group, peri_tensor *input,
                                                   const int64_t *batch_size_per_rank, const int64_t *dim_sum_per_rank,
                                                   const peri_exchange_args *args, peri_work **out);

typedef struct peri_variable_batch_args {
    const int32_t *features_per_rank; /* W */
    /* W rows of features_per_rank[r] numbers: rows of this rank's feature f that belong to rank i */
    const int64_t *batch_size_per_rank_per_feature;
    const int64_t *batch_size_per_feature_pre_a2a; /* by feature, features of all ranks in rank order: this rank's own
                                                      rows */
    const int64_t *emb_dim_per_rank_per_feature;   /* by feature, likewise: columns */
} peri_variable_batch_args;

/** @input, of one dimension: [rank][feature of this rank][row][column]. Result, likewise: [owner][feature of the
 * owner][row][column]. @out new. */
PERI_API peri_status peri_exchange_variable_batch_alltoall_pooled(peri_group *group, peri_tensor *input,
                                                                  const peri_variable_batch_args *args,
                                                                  const peri_exchange_args *exchange, peri_work **out);

/** Rows of @inputs[n] (n >= 1, each [rows, any columns]) are dealt over the ranks as evenly as possible, the first
 *  ranks get one more where they do not divide. Result: W tensors, tensor i [this rank's rows, dim_sum_per_rank[i]];
 *  dim_sum_per_rank[r] is the sum of the inputs' columns. The gradient is not divided unless @args turn the
 *  division on. @out new. */
PERI_API peri_status peri_exchange_alltoallv(peri_group *group, peri_tensor *const *inputs, int32_t n,
                                             const int64_t *dim_sum_per_rank, const peri_exchange_args *args,
                                             peri_work **out);

/** The sum over ranks of their @inputs[r] (W tensors; tensor i has the same shape on all ranks, and all have equal rows
 *  but for their number). With a codec the parts travel encoded and are summed in f32. @out new. */
PERI_API peri_status peri_exchange_reduce_scatter_pooled(peri_group *group, peri_tensor *const *inputs,
                                                         const peri_exchange_args *args, peri_work **out);
/** @input [W n, ...]: its parts of n rows summed over ranks. Result [n, ...]. @out new. */
PERI_API peri_status peri_exchange_reduce_scatter_base_pooled(peri_group *group, peri_tensor *input,
                                                              const peri_exchange_args *args, peri_work **out);
/** @input [sum of input_splits, ...]. Result [input_splits[r], ...]. @out new. */
PERI_API peri_status peri_exchange_reduce_scatter_v_pooled(peri_group *group, peri_tensor *input,
                                                           const int64_t *input_splits,
                                                           const peri_exchange_args *args, peri_work **out);
/** @input, of one dimension: [rank][feature][row][column] with batch_size_per_rank_per_feature[rank x n_features] rows
 *  and embedding_dims[n_features] columns. Result, of one dimension: [feature][row][column] of this rank. @out new. */
PERI_API peri_status peri_exchange_reduce_scatter_v_per_feature_pooled(
    peri_group *group, peri_tensor *input, int32_t n_features, const int64_t *batch_size_per_rank_per_feature,
    const int64_t *embedding_dims, const peri_exchange_args *args, peri_work **out);
/** @input [n, ...], of one shape on all ranks. Result [W n, ...]: the inputs by rank. Its gradient is the sum over
 *  ranks. @out new. */
PERI_API peri_status peri_exchange_all_gather_base_pooled(peri_group *group, peri_tensor *input,
                                                          const peri_exchange_args *args, peri_work **out);

/* -- sequence embeddings ------------------------------------------------------------------------------------------- */

typedef struct peri_sequence_args {
    peri_tensor *lengths; /* [bags]: of the kjt that was looked up (i32 or i64): by feature, then rank, then row;
                             borrowed */
    int32_t features;     /* of this rank */
    int32_t stagger;      /* of the ids' exchange; 0: 1 */
    const int64_t *batch_size_per_rank; /* W, by rank; NULL for a variable batch */
    const int64_t *stride_per_key_per_rank; /* variable batch: [features x W], ranks in the order of the kjt; else
                                               NULL */
    const int64_t *input_splits;  /* W: ids that this rank sent to each rank */
    const int64_t *output_splits; /* W: ids that it received from each rank */
} peri_sequence_args;

/** The way back of ids that were exchanged: @input [ids received, D], a row for each id in the order of the kjt. Result
 * [ids sent, D]: a row  for each id in the order in which this rank sent them. @out new. */
PERI_API peri_status peri_exchange_alltoall_sequence(peri_group *group, peri_tensor *input,
                                                     const peri_sequence_args *args,
                                                     const peri_exchange_args *exchange, peri_work **out);
/** Row i of the result is row permutation[i] of @rows [n, ...]; @permutation [n] (i64 or i32) has each of 0..n-1 once.
 *  With gradient. Waits for the permutation to be checked. @out new. */
PERI_API peri_status peri_exchange_unbucketize(peri_tensor *rows, peri_tensor *permutation, peri_tensor **out);

/* -- results ------------------------------------------------------------------------------------------------------- */

/** Number of tensors that the exchange results in: 1, or W for peri_exchange_alltoallv. */
PERI_API int32_t peri_exchange_results(peri_work *exchange);
/** The tensors of a complete exchange into @out[peri_exchange_results], on the tape if it was recorded; once. @out
 *  new. */
PERI_API peri_status peri_exchange_result(peri_work *exchange, peri_tensor **out);

/* -- KeyedJaggedTensors -------------------------------------------------------------------------------------------- */

typedef struct peri_kjt_exchange_args {
    peri_kjt *kjt;             /* retained; its tensors must stay unchanged until the exchange is complete */
    const int32_t *key_splits; /* W: the first key_splits[0] keys go to rank 0, the next key_splits[1] to rank 1, ... */
    peri_keys *keys;           /* the list of this rank's keys, if the caller has it, so that it need not be made; or
                                  NULL */
    int32_t stagger;           /* order of the rows of a key in the result, see peri_kjt_recat; 1, or 0: by rank */
} peri_kjt_exchange_args;

/** Exchange the @n kjts of @args in two phases: one message announces the sizes of all of them, the tensors of each
 *  follow by themselves. Keys, key splits, dtypes, weights and the kind of batch must be equal on all ranks; batches
 *  may differ. @splits: complete when the sizes are known. @out[i]: complete when kjt i is here. Not recorded: ids have
 *  no gradient. @splits, @out new. */
PERI_API peri_status peri_exchange_kjts(peri_group *group, const peri_kjt_exchange_args *args, int32_t n,
                                        peri_work **splits, peri_work **out);
/** The kjt of a complete exchange (one of peri_exchange_kjts' @out), once: this rank's keys, with the rows of all
 *  ranks. A group of one rank: the kjt that was given. @out new. */
PERI_API peri_status peri_exchange_kjt_result(peri_work *exchange, peri_kjt **out);
/** When the sizes are known: rows of each rank's batch, ids that this rank sends to each rank, ids that it gets from
 *  each; W entries. */
PERI_API peri_status peri_exchange_kjt_splits(peri_work *exchange, int64_t *stride_per_rank, int64_t *input_splits,
                                              int64_t *output_splits);

/* -- one process, several devices ---------------------------------------------------------------------------------- */

/** The first key_splits[0] keys of @kjt on devices[0], the next key_splits[1] on devices[1], ...; @devices NULL: all
 *  stay where they are. Local. @out: room for @n; new references. */
PERI_API peri_status peri_exchange_kjt_one_to_all(peri_kjt *kjt, const int32_t *key_splits, peri_device *const *devices,
                                                  int32_t n, peri_kjt **out);

/** What becomes of tensors of several devices on one: joined along a dimension, added up (equal shapes and dtypes),
 *  each for itself. */
enum { PERI_MERGE_CAT = 0, PERI_MERGE_SUM = 1, PERI_MERGE_EACH = 2, PERI_MERGE_COUNT = 3 };
/** @n tensors of any devices on @device (NULL: they stay), merged; @dim (from 0) is for PERI_MERGE_CAT. With gradient.
 *  Local. @out: room for 1, with PERI_MERGE_EACH for @n; new references. */
PERI_API peri_status peri_exchange_all_to_one(peri_tensor *const *parts, int32_t n, peri_device *device, int32_t merge,
                                              int32_t dim, peri_tensor **out);

#endif
