/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/verdict.h (L3): whether all ranks could do their parts of something. What one of them met, such as a full disk,
 * is an error on all, in its words; their group stays of use, so that they can put things right and try again.
 *
 * A rank that could not do its part still takes part in the exchanges that follow, with whatever is in its buffers, so
 * that nobody waits for it. The verdict, which travels beside them, keeps everybody from using what came.
 */
#ifndef PERI_COMM_VERDICT_H
#define PERI_COMM_VERDICT_H

#include "comm_internal.h"

typedef struct peri__verdict peri__verdict;

/** Made on all ranks in the same order among what they make of the group. */
peri_status peri__verdict_new(peri_group *group, peri__verdict **out);
/** This rank has met an error, which the calling thread has just recorded. The first one counts. */
void peri__verdict_note(peri__verdict *v, peri_status status);
/** This rank has done its part, or noted why not. Once. */
peri_status peri__verdict_post(peri__verdict *v);
/** PERI_OK: all ranks have done theirs; PERI_PENDING; or what the first of those met that have not, the same on all
 *  ranks. */
peri_status peri__verdict_test(peri__verdict *v);
/** NULL is fine. */
void peri__verdict_release(peri__verdict *v);

#endif
