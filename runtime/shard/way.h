/* SPDX-License-Identifier: Apache-2.0
 *
 * way.h: rows from owners to homes and gradients from homes to owners, over a list of hops. A way knows batches, codecs
 * and numbers for ranks; what the numbers are is the module's.
 *
 * Towards homes the hops are taken in their order, towards owners in reverse. An exchange hands each rank of its group
 * its part. A sum adds up, for each rank of its group, the parts that all of them have for it; on the way back every
 * rank gets a copy of what belongs to a sum. So a table cut by rows within a node is a sum among the ranks of the node,
 * and then an exchange among those of equal number on all nodes.
 */
#ifndef PERI_SHARD_WAY_H
#define PERI_SHARD_WAY_H

#include "../comm/transfer.h"

enum { PERI__HOPS = 2 };

/** Directions, and the two sides that numbers come from. */
enum { PERI__TO_HOMES, PERI__TO_OWNERS };

typedef struct peri__hop {
    peri_group *group;    /* borrowed: the module lives longer */
    bool sums;            /* else an exchange */
    peri_codec *codec[2]; /* by direction: retained, or NULL */
} peri__hop;

typedef struct peri__way {
    int32_t n;         /* hops; 0: no rows take this way */
    peri__hop hops[PERI__HOPS];
    double division;   /* of gradients: before they set out or, where a codec has them on a hop, once they are here.
                          What is small is not made smaller before it is encoded */
} peri__way;

/** How many numbers one batch sends over a hop, and what the codecs make of that. */
typedef struct peri__leg {
    const int64_t *out, *in; /* size of the hop's group each: towards homes, numbers for each rank, and from it;
                                borrowed */
    peri_codec_context *contexts[2][2]; /* by direction: of what leaves, of what comes; NULL: no codec, or made for
                                           every batch */
} peri__leg;

void peri__way_fini(peri__way *way);
/** What is left for the sender of gradients to divide by. */
double peri__way_divides_first(const peri__way *way);
/** The contexts of a way of one hop for all batches of these numbers; peri__legs_fini frees what was made, also when
 *  this fails. */
peri_status peri__legs_init(const peri__way *way, peri__leg *legs);
void peri__legs_fini(peri__leg *legs);

/** Numbers on their way over all hops. Zeroed: none. */
typedef struct peri__way_transfer {
    const peri__way *way;    /* borrowed, as is @legs, while it is not over; NULL: over, or none */
    const peri__leg *legs;
    int32_t direction, hop;  /* the hop that it is on */
    uint64_t sequence[PERI__HOPS]; /* numbers of the operations; 0: the next one */
    peri_tensor *to;         /* where it ends; retained; NULL: a function takes it */
    const peri__transfer_direct *direct; /* of the home's end; borrowed while it is not over; NULL: none */
    peri__transfer transfer; /* over the hop */
} peri__way_transfer;

/** Send @from (contiguous f32); it arrives in @to. Takes the numbers of all its operations. @direct: of a way that can
 *  (peri__way_direct), in place of the home's end, which is NULL; or NULL. */
peri_status peri__way_transfer_start(peri__way_transfer *j, const peri__way *way, const peri__leg *legs,
                                     int32_t direction, peri_tensor *from, peri_tensor *to,
                                     const peri__transfer_direct *direct);
/** Whether the home's end of a way may be a function. */
bool peri__way_direct(const peri__way *way, int32_t direction);
/** PERI_OK when all is there, and ever after; else PERI_PENDING, or the error. */
peri_status peri__way_transfer_test(peri__way_transfer *j);
void peri__way_transfer_fini(peri__way_transfer *j);

#endif
