/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/exchange.h (L3): tensors whose parts travel to other ranks, and whose gradients travel back. exchange.c does it;
 * exchange_pooled.c, exchange_sequence.c and exchange_lists.c say which part is whose.
 *
 * An exchange has two sides: its inputs and its results. On each side every rank has a part, which is a tensor of a
 * list or a piece of one tensor that is cut along a dimension. What travels is the parts in the order of ranks, each in
 * row-major order. peri_exchange_alltoall_pooled of two ranks, with batches of 2 and 1 rows and 3 and 4 columns, as
 * rank 0 sees it:
 *
 *      inputs     [3, 3], cut along dimension 0      rows 0..1 go to rank 0, row 2 goes to rank 1
 *      results    [2, 7], cut along dimension 1      columns 0..2 come from rank 0, columns 3..6 from rank 1
 */
#ifndef PERI_COMM_EXCHANGE_H
#define PERI_COMM_EXCHANGE_H

#include "transfer.h"

#include <perilune/exchange.h>

/** One side of an exchange. */
typedef struct peri__side {
    int32_t n;           /* tensors */
    int32_t dim;         /* along which the one tensor is cut; below 0: a list has a tensor for each rank */
    peri__shape *shapes; /* n */
    int64_t *from, *length; /* by rank, of a tensor that is cut: its piece is [from, from + length) of `dim` */
    int64_t cut;         /* of `dim`: what ranks have so far */
    int32_t last;        /* rank that got a piece, + 1 */
    bool in_order;       /* ranks got theirs in their order */
    /* Known once it is posted: */
    int64_t *counts;     /* elements by rank */
    int64_t total;       /* elements of all tensors */
    int64_t lines, row;  /* of a tensor that is cut: the product of the dimensions before and behind `dim` */
} peri__side;

/** What the work and the two nodes on the tape share. */
typedef struct peri__exchange {
    peri__trip trip;
    const char *function; /* of messages; static text */
    peri_device *device;
    int32_t kind, channel, dtype;
    peri_codec *codec[2]; /* forward, backward: retained, or NULL */
    double divisor;       /* of the gradients that come back */
    uint64_t tag;
    peri__side sides[2];  /* inputs, results */
    peri__transfer back;  /* of the gradient */
} peri__exchange;

enum { PERI__LIST = -1 };

typedef struct peri__exchange_call {
    const char *function;   /* of messages; static text */
    peri_group *group;
    const peri_tensor *input; /* one of them: all are of its dtype and device */
    int32_t kind;           /* PERI_COLL_ALL_TO_ALL, _REDUCE_SCATTER (every rank has all of the result) or _ALL_GATHER
                               (every rank has all of the input) */
    int32_t dims[2];        /* the sides' dimensions, or PERI__LIST */
    uint64_t alike;         /* hash over what all ranks must agree on */
    int32_t division;       /* PERI_DIVISION_* where the options leave it open */
    const peri_exchange_args *options;
    bool collective;        /* an operation of perilune/comm.h: on the group's own channel, and `alike` is the tag */
} peri__exchange_call;

/** @out new: post it, or release its trip. Say first which piece each rank has of sides that are cut, and what the
 *  results' shapes are. */
peri_status peri__exchange_new(const peri__exchange_call *call, peri__exchange **out);
/** Rank @rank has the next @length of a side's dimension. Ranks without a call have none. */
void peri__side_add_piece(peri__side *side, int32_t rank, int64_t length);
void peri__side_shape(peri__side *side, int32_t i, int32_t ndim, const int64_t *size);
/** Post the exchange (taken) of @inputs. @results: the caller's tensors, in which what comes is written; NULL:
 *  peri_exchange_result hands out new ones. @recorded: on the tape, if gradients are recorded and it has any. @out
 *  new. */
peri_status peri__exchange_post(peri__exchange *x, peri_tensor *const *inputs, peri_tensor *const *results,
                                bool recorded, peri_work **out);

/** Check @n numbers (>= 0, and small enough that sums of products of two stay below 2^62) and mix them into *@hash. */
peri_status peri__check_counts(const char *function, const char *what, const int64_t *list, int64_t n, uint64_t *hash);

#endif
