/* SPDX-License-Identifier: Apache-2.0
 *
 * model/model_follow.h: models that change with the checkpoints of a run.
 */
#ifndef PERI_MODEL_MODEL_FOLLOW_H
#define PERI_MODEL_MODEL_FOLLOW_H

#include "model_internal.h"

#include <perilune/checkpoint.h>

/** PERI_OK if each section of the model that answers depend on names the tensor that it was made of. */
peri_status peri__model_can_follow(const peri_model *m);
/** Bring a model that is in memory of its own, and that nobody uses now, to what @c has: from what the checkpoint
 *  number @level of its chain has (peri_checkpoint_level); -1: from anything. @prefix: what stands before the sources'
 *  names in the checkpoint. PERI_EMISMATCH, with *@begun false: the checkpoint has not what the model needs, and
 *  nothing has changed. After another error, with *@begun, the model is a mixture. */
peri_status peri__model_update(peri_model *m, peri_checkpoint *c, int64_t level, const char *prefix, bool *begun);

/** Make a model that is in memory of its own, and that nobody uses now, what @from is, a model of the same file. */
void peri__model_copy(peri_model *m, const peri_model *from);

#endif
