/* SPDX-License-Identifier: Apache-2.0
 *
 * embed/reach.h (L4): how kernels reach the rows of tables, as perilune/tune.h chooses.
 */
#ifndef PERI_EMBED_REACH_H
#define PERI_EMBED_REACH_H

#include "../base/tune.h"
#include "embed_internal.h"

/** Of lookups, and of updates. */
peri_k_tbe_reach peri__tbe_reach_lookup(void);
peri_k_tbe_reach peri__tbe_reach_update(void);

#endif
