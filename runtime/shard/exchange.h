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
    uint64_t sequence;     /* first number of its exchanges */
    peri_tensor *values, *weights_in, *offsets_in, *inverse; /* the input as kernels take it */
    peri_tensor *wire_lengths, *cursor;
    struct peri__report *report; /* totals by rank, and what the check found */
    int64_t *header_send, *header_recv, *counts, *source_ids;
    /* Lengths, ids, weights, the bags' factors of mean pooling; NULL: none, or gone where they belong. */
    peri_tensor *send[PERI__PAYLOADS], *received[PERI__PAYLOADS];
    peri_work *works[PERI__PAYLOADS];
    peri_tensor *offsets;  /* of what was received */
} peri__input_dist;

extern const peri__work_vtab peri__input_dist_vtab;

/** offsets[n + 1] = complete cumulative sum of lengths[n] (i32 -> i64); @limit >= 0: lengths below 0 count as 0 and no offset exceeds it.
 *  */
peri_status peri__complete_sum(peri_device *device, peri_tensor *lengths, int64_t limit, peri_tensor *offsets);

#endif
