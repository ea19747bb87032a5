/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.h: one batch on its way through a sharded module: ids out (input_dist.c), pooled rows back, gradients out again (output_dist.c).
 */
#ifndef PERI_SHARD_EXCHANGE_H
#define PERI_SHARD_EXCHANGE_H

#include "bag.h"

/** What travels from homes to owners, one exchange each. */
enum { PERI__LENGTHS, PERI__IDS, PERI__WEIGHTS, PERI__SCALES, PERI__PAYLOADS };

/** The work of peri_sharded_ebc_input_dist. */
typedef struct peri__input_dist {
    peri_work base;
    peri_sharded_ebc *ebc; /* retained, as is all below */
    peri_kjt *kjt;
    peri__home *home;
    peri__bag_layout *layout; /* from HEADERS on */
    int32_t phase;
    bool used;             /* a lookup has taken it */
    bool first;            /* of its module: compares identities before the headers, whose sizes depend on the plan */
    uint64_t control, explain, payload; /* numbers of its exchanges: the headers', the explanation's, the first payload's */
    peri_tensor *values, *weights_in, *offsets_in, *inverse; /* the input as kernels take it */
    peri_tensor *wire_lengths, *cursor; /* after the exchange: what was sent, if the weights want gradients; NULL */
    struct peri__report *report; /* totals by rank, and what the check found */
    int64_t *header_send, *header_recv, *counts, *source_ids;
    int64_t *heads;        /* identities of the first batch: this rank's, then each rank's; HEAD_WORDS numbers each */
    int64_t *text_bytes;   /* world_size: how long the texts of the ranks are */
    char *texts;           /* this rank's, then all of them */
    /* Lengths, ids, weights, the bags' factors of mean pooling; NULL: none, or gone where they belong. */
    peri_tensor *send[PERI__PAYLOADS], *received[PERI__PAYLOADS];
    peri_work *works[PERI__PAYLOADS];
    peri_tensor *offsets;  /* of what was received */
    peri_tbe_batch **looks; /* by group of tables: its lookup of this batch, once it is known; NULL: none yet, or taken */
} peri__input_dist;

extern const peri__work_vtab peri__input_dist_vtab;

/** Whether the ids' weights want a gradient. */
static inline bool peri__weights_want_grad(const peri__input_dist *d) { return d->weights_in && d->weights_in->requires_grad; }

/** Gradients of the ids' weights on their way home (weights_dist.c): made by owners and replicas in the backward pass of the lookup, and
 *  awaited in that of a node of its own, right before the lookup's. */
typedef struct peri__weights_dist {
    peri__refs refs;
    peri_sharded_ebc *ebc;  /* retained, as is all below */
    peri__home *home;
    peri_tensor *ids, *offsets, *lengths; /* this rank's input; what it sent, bag by bag */
    int64_t *counts;        /* world_size: ids sent to each rank; then: received from each */
    peri_tensor *owner;     /* f32, by received id: gradients divided by the ranks where gradients are */
    peri_tensor *replicas;  /* f32, by id of the input: of this rank's replicas, not divided */
    peri_tensor *back;      /* f32, by sent id */
    peri_work *work;
    bool posted;
} peri__weights_dist;

/** For one batch; NULL if its weights want no gradient. @out new. */
peri_status peri__weights_dist_new(const peri__input_dist *d, peri__weights_dist **out);
void peri__weights_dist_release(peri__weights_dist *w);
/** Record it: *@token (new, without elements) stands for the received weights. */
peri_status peri__weights_dist_record(peri__weights_dist *w, peri_tensor *weights, peri_tensor **token);
/** Room for one part of the gradient: of an owner's lookup, or of replicas. @out new. */
peri_status peri__weights_dist_part(const peri__weights_dist *w, bool replica, peri_tensor **out);
/** Add that part, times @factor, and release it. */
peri_status peri__weights_dist_add(peri__weights_dist *w, bool replica, peri_tensor *part, double factor);

#endif
