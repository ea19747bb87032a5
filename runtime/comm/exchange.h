/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/exchange.h (L3): numbers that travel with their gradients: what the operations of perilune/exchange.h are made
 * of.
 */
#ifndef PERI_COMM_EXCHANGE_H
#define PERI_COMM_EXCHANGE_H

#include "comm_internal.h"

#include <perilune/exchange.h>

/** Which numbers go where. out[i]: numbers to rank i, in[i]: numbers from rank i. */
enum {
    PERI_FLOW_ALL_TO_ALL = 0,
    PERI_FLOW_REDUCE_SCATTER = 1, /* in[i] = out[rank] for all i: the parts are summed */
    PERI_FLOW_ALL_GATHER = 2      /* out[i] = in[rank] for all i: everybody gets the same */
};

/** How the numbers that arrived become tensors. */
enum {
    PERI_LAYOUT_FLAT = 0,    /* one tensor of the given shape */
    PERI_LAYOUT_COLUMNS = 1, /* one tensor [rows, sum of dims]: what rank i sent is its block of dims[i] columns */
    PERI_LAYOUT_LIST = 2     /* W tensors [rows, dims[i]] */
};

typedef struct peri__flow_args {
    const char *function; /* of messages; static text */
    int32_t kind, layout;
    int64_t *out, *in;    /* W each; of peri__flow_counts, taken */
    int32_t ndim;         /* FLAT: shape of the result */
    const int64_t *shape;
    int64_t rows;         /* COLUMNS, LIST */
    const int64_t *dims;  /* COLUMNS, LIST: W, copied */
    uint64_t alike;       /* hash over what all ranks must agree on */
    int32_t division;     /* PERI_DIVISION_* where the options leave it open */
    const peri_exchange_args *options;
} peri__flow_args;

/** Post the exchange of @input (contiguous or not, of any shape: its numbers in row-major order). @out new. */
peri_status peri__flow_post(peri_group *group, peri_tensor *input, const peri__flow_args *args, peri_work **out);

/** Check @n numbers (>= 0, and small enough that sums of products of two stay below 2^62) and mix them into *@hash. */
peri_status peri__check_counts(const char *function, const char *what, const int64_t *list, int64_t n, uint64_t *hash);

/** Zeros for out and in, in the block that becomes the flow: post it, or free it. */
peri_status peri__flow_counts(const peri_group *group, int64_t **out, int64_t **in);
void peri__flow_counts_free(int64_t *out);

#endif
