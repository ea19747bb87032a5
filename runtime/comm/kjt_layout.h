/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/kjt_layout.h (L3): what ranks announce of the KeyedJaggedTensors that they exchange, and the kjt that the
 * receiver makes of the parts. No function here communicates.
 */
#ifndef PERI_COMM_KJT_LAYOUT_H
#define PERI_COMM_KJT_LAYOUT_H

#include "../tensor/jagged_internal.h"
#include "../../kernels/route.h"

/** Words that one rank announces of a kjt to another. Two words follow for each key that the latter gets: its rows and
 *  its ids. */
enum {
    PERI_ANNOUNCE_STRIDE = 0, /* rows of the batch */
    PERI_ANNOUNCE_WORDS = 1
};

/** Parts of a message. */
enum { PERI_PART_LENGTHS = 0, PERI_PART_VALUES = 1, PERI_PART_WEIGHTS = 2, PERI_PARTS = 3 };

typedef struct peri__kjt_layout {
    int32_t ranks, rank, stagger;
    bool variable;
    peri_keys *keys;                /* of the result; retained */
    int64_t *stride;                /* ranks: rows of the batch */
    int64_t *rows, *ids;            /* ranks x keys */
    int64_t *rank_rows, *rank_ids;  /* ranks: sums */
    int64_t *per_key_rank;          /* keys x ranks, ranks in the result's order: rows */
    int32_t *recat;                 /* keys x ranks: received segment at each place */
    int64_t total_rows, total_ids;
} peri__kjt_layout;

/** Read the announcements of all ranks: @words [ranks][PERI_ANNOUNCE_WORDS + 2 keys]. PERI_EFORMAT names the rank. @out
 *  new. */
peri_status peri__kjt_layout_new(peri_keys *keys, int32_t ranks, int32_t rank, int32_t stagger, bool variable,
                                 const int64_t *words, peri__kjt_layout **out);
void peri__kjt_layout_release(peri__kjt_layout *layout);

/** Where what comes belongs: keys x ranks runs in the order in which it comes, by rank, then key; of lengths, or of
 *  @ids (and weights). @own_first >= 0: the own part does not come, and begins there in the tensor that it is sent
 *  from. */
void peri__kjt_layout_runs(const peri__kjt_layout *layout, bool ids, int64_t own_first, peri_k_run *runs);

/** Make the result of the parts. @received[part]: what came, by rank, then key (NULL weights: none). If @own_first[0]
 *  >= 0 the own part is not among them but in @own[part], from row own_first[0] (lengths) and own_first[1] (values,
 *  weights) on. Lengths that do not fit the announcements are PERI_EFORMAT where the host can see them at once;
 *  elsewhere the result's sync finds malformed ones.
 *  @placed: the parts in @received are the result's already (by peri__kjt_layout_runs). @out new. */
peri_status peri__kjt_layout_build(const peri__kjt_layout *layout, peri_tensor *const *received,
                                   peri_tensor *const *own, const int64_t own_first[2], bool placed, peri_kjt **out);

#endif
