/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_tbe_batch.c: updates of many rows at once: a piece for each type of weights.
 * pieces: f32 f16 bf16
 */
#include "unit.h"

#include "../tbe.h"

#include "tbe_batch.c"
