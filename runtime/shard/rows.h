/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.h: one direction of a batch: rows to the results, or gradients of the results to the rows. Where each row lies
 * is a list, which is compiled with the layouts and kept (peri__line). Here it meets the tensors of a batch, and it is
 * decided who takes the rows of each space between a buffer and the results:
 *
 *      own lookups, replicas     the lookup writes them there, the update reads them there; else they go through the
 *                                owner's buffer
 *      a lane                    the transport does, if it can call functions (unbuffered.c); else they go through the
 *                                home's buffer
 *      what is left              one launch copies, adds up or divides it: the kind's combine and spread
 *
 * The same list serves all devices. Where the host does not work in the device's memory, a lookup has its rows in place
 * only if all of them are, in one tensor: then the blocks that say so are made once and kept.
 */
#ifndef PERI_SHARD_ROWS_H
#define PERI_SHARD_ROWS_H

#include "../base/buffer.h"
#include "module_batch.h"

enum { PERI__ALL_LANES = (1 << PERI__LANES) - 1 }; /* of the bits of spaces */

typedef struct peri__unbuffered peri__unbuffered; /* what the transport calls (unbuffered.c) */

/** Zeroed: none. */
struct peri__rows {
    const peri_sharded *e; /* borrowed, as are the next two */
    const peri__batch_layout *layout;
    const peri__input_dist *input;
    bool back;                       /* gradients */
    bool apart;                      /* a gradient for each result; else one end has the rows of all results, one behind
                                        the other */
    int32_t n_ends;
    uint32_t in_place;               /* bits of spaces: their rows that can be are where the results have them */
    peri_tensor *own, *away;         /* the buffers, of the owner and of the home; retained */
    peri_tensor **ends;              /* f32; retained, and the array is owned */
    int64_t stride;                  /* elements from row to row of an end: the columns of a result, or more where
                                        gradients are a window of a wider matrix */
    peri_tensor *sums;               /* of the gradients of bags that several samples have (repeats.c), borrowed; or
                                        NULL */
    peri_tensor *own_bags;           /* peri__repeats_own, or NULL */
    int64_t past;                    /* of a variable batch: one past the last row that a bag may have; 0: nobody knows
                                        which it has */
    peri_tensor **base;              /* by set, borrowed: what its lookup's places are counted from; NULL: its rows are
                                        in the buffer */
    peri__unbuffered *unbuffered;            /* or NULL */
};

/** Open a direction of a batch, with its buffers. */
peri_status peri__rows_open(peri__rows *r, const peri__input_dist *input, int32_t direction);
/** Decide who takes what to @ends, or from there: the results that are put together, one tensor; or gradients, of all
 *  results as one tensor or (r->apart) one for each. Lookups are told; see peri__rows_unbind. */
peri_status peri__rows_bind(peri__rows *r, peri_tensor *const *ends, int32_t n);
/** What set @g's lookup takes for the tensor of its rows. */
peri_tensor *peri__rows_of(const peri__rows *r, int32_t g);
/** Give up the ends, but where own rows are in place and an update is to come. Replicas have theirs in the buffer
 *  again. */
void peri__rows_drop_ends(peri__rows *r);
/** Lookups have their rows in the buffer again. */
void peri__rows_unbind(peri__rows *r);
/** Give up all; lookups have their rows in the buffer again. */
void peri__rows_fini(peri__rows *r);
/** The outputs that are left for the kind to move, as arrays for kernels. */
typedef struct peri__to_move {
    const void *outputs; /* n, as the kind has written them */
    const int64_t *bags; /* the number of bags of each, if the kind has written it */
    int32_t n;
} peri__to_move;

peri_status peri__rows_list_left(const peri__rows *r, peri__to_move *out);

/** Add the list of one direction, which is bound, as text. (explain.c) */
void peri__explain(peri__buffer *text, const peri__rows *r);

/** The gradient of the ids' weights, of results that were pooled here of @rows (all by id): f32 [ids]. @out new.
 *  (pooled_stages.c) */
peri_status peri__pooled_weights(const peri__rows *rows, peri_tensor *grad, peri_tensor **out);

/** Have the transport move what it can. */
peri_status peri__unbuffered_new(peri__rows *r);
/** NULL is fine. */
void peri__unbuffered_release(peri__unbuffered *unbuffered);
/** The functions of a lane; NULL: its rows go through the buffer. */
const peri__transfer_direct *peri__unbuffered_lane(const peri__rows *r, int32_t lane);

/** The address of a tensor, in elements of f32. */
static inline int64_t peri__rows_address(const peri_tensor *t)
{
    return (int64_t)((uintptr_t)peri__data(t) / sizeof(float));
}

/** Whether the rows of a line need no copy. */
static inline bool peri__rows_in_place(const peri__rows *r, const peri__line *x)
{
    return x->space >= 0 && r->in_place >> x->space & 1 && !x->pooled && (r->back || x->alone);
}

/** Where row 0 of a line is in the results: an address in elements. */
static inline int64_t peri__rows_end(const peri__rows *r, const peri__line *x)
{
    if (r->apart) return peri__rows_address(r->ends[x->result]) + x->column;
    return peri__rows_address(r->ends[0]) + (r->back ? x->row : x->to) * r->stride + x->column;
}

/* -- variable batches (repeats.c) ---------------------------------------------------------------------------------- */

/** Which samples of a variable batch have a bag that one before them has too. @h and @inverse live as long. *out
 *  new, NULL: there are more samples than are counted. */
peri_status peri__repeats_new(const peri__home *h, const peri_tensor *inverse, peri__repeats **out);
void peri__repeats_free(peri__repeats *repeats);
/** i32, borrowed, by bag of the input: its row is that of its first sample, or the one behind the last if it has none;
 *  after peri__repeats_add_up the row of its gradient: of the results', or of the sums. */
peri_tensor *peri__repeats_rows(const peri__repeats *repeats);
/** The same by bag that this rank receives from itself. @out new. */
peri_status peri__repeats_own(const peri__repeats *repeats, peri_tensor **out);
/** Copy rows that are in place from the first sample of each bag to the others. */
void peri__repeats_copy(peri__repeats *repeats, const peri__rows *rows);
/** Add the gradients of bags up that several samples have. Once. */
peri_status peri__repeats_add_up(peri__repeats *repeats, peri_tensor *grad);
/** Then: the sums, borrowed; NULL: they lie too far from @grad. *past: one past the last row that a bag may have. */
peri_tensor *peri__repeats_sums(const peri__repeats *repeats, int64_t *past);

#endif
