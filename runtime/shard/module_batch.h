/* SPDX-License-Identifier: Apache-2.0
 *
 * module_batch.h: one batch on its way through a sharded module (input.c, module_batch.c), and the gradients of its
 * ids' weights (weights_dist.c).
 */
#ifndef PERI_SHARD_MODULE_BATCH_H
#define PERI_SHARD_MODULE_BATCH_H

#include "module.h"

typedef struct peri__arrival peri__arrival; /* what becomes of a batch's raw ids (managed.c) */
typedef struct peri__repeats peri__repeats; /* which samples of a variable batch share a bag (repeats.c) */

/** The work of peri_sharded_input_dist. From the lookup to the end of the backward pass the batch keeps it. */
typedef struct peri__input_dist {
    peri_work base;
    peri_sharded *ebc; /* retained, as is all below */
    peri__routing routing;
    peri__home *home;           /* of gradients to owners; where results are of ids: once the routing is announced */
    peri__batch_layout *layouts[2]; /* by direction, once the routing is announced; often the same one twice */
    peri_tensor *inverse;  /* i64; NULL: no variable batch */
    peri_tensor *id_offsets[2]; /* i64: of a bag for each id that was received, of the input; NULL: not asked for yet */
    peri_tbe_batch **looks[2]; /* by direction and set of tables: its lookup of this batch, once it is known; NULL: none
                                  yet, or done with */
    peri__repeats *repeats;    /* of a variable batch some of whose rows may be where the results lie; else NULL */
    peri__arrival *arrival; /* NULL: no raw ids, or not yet rows */
    bool training;         /* its raw ids are learned */
    bool in_flight;        /* they are, and nobody has its output yet */
    bool used;             /* a lookup has taken it */
} peri__input_dist;

extern const peri__work_vtab peri__input_vtab;

/** Give up what a lookup has made of it. */
void peri__input_drop_lookups(peri__input_dist *d);

/** Raw ids become rows, unless they are; PERI_PENDING: a map wants scores. */
peri_status peri__managed_map_ids(peri__input_dist *d);
/** Before its lookup: rows that got another id since the lookup before start again. */
peri_status peri__managed_reset(peri__input_dist *d);
/** Post the rows that go home, if somebody asks for them. */
peri_status peri__managed_post(peri__input_dist *d);
/** Whether they are home; and the input's values with them. */
peri_status peri__managed_batch_test(peri__arrival *arrival);
peri_status peri__managed_rows(const peri__input_dist *d, peri_tensor **out);
/** A batch is in flight no more, if it was. */
static inline void peri__input_done(peri__input_dist *d)
{
    d->ebc->in_flight -= d->in_flight;
    d->in_flight = false;
}
void peri__managed_batch_free(peri__arrival *arrival);

/** Whether the ids' weights want a gradient. */
static inline bool peri__weights_want_grad(const peri__input_dist *d)
{
    return d->routing.weights && d->routing.weights->requires_grad && !d->ebc->frozen;
}

/** Whether the gradient of the ids' weights is made at home, where it has the same bits under any plan. */
static inline bool peri__weights_at_home(const peri__input_dist *d)
{
    return peri__weights_want_grad(d) && d->ebc->exact;
}

/** Gradients of the ids' weights on their way home (weights_dist.c): made by owners and replicas in the backward pass
 *  of the lookup, and awaited in that of a node of its own, right before the lookup's. */
typedef struct peri__weights_dist {
    peri__refs refs;
    peri__input_dist *input; /* retained */
    peri_tensor *owner;     /* f32, by received id: gradients divided by the ranks where gradients are */
    peri_tensor *replicas;  /* f32, by id of the input: of this rank's replicas, not divided; at_home: all of it */
    bool at_home;           /* nothing travels */
    peri__transfer back;    /* f32, by sent id */
    bool posted;
} peri__weights_dist;

/** For one batch; NULL if its weights want no gradient. @out new. */
peri_status peri__weights_dist_new(peri__input_dist *d, peri__weights_dist **out);
void peri__weights_dist_release(peri__weights_dist *w);
/** Record it: *@token (new, without elements) stands for the received weights. */
peri_status peri__weights_dist_record(peri__weights_dist *w, peri_tensor **token);
/** Room for the part of the gradient that the lookup of set @g makes of its rows'; *out NULL: it makes none, since the
 *  weights want no gradient (@w NULL), or it is made at home. @out new. */
peri_status peri__weights_dist_part(const peri__weights_dist *w, int32_t g, peri_tensor **out);
/** Add that part. */
peri_status peri__weights_dist_add(peri__weights_dist *w, int32_t g, const peri_tensor *part);

#endif
