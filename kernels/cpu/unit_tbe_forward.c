/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_tbe_forward.c: lookups, a piece for each format of rows (TBE_FORMATS).
 * pieces: f32 f16 bf16 int8 int8_half fp8 int4 int2
 */
#include "unit.h"

#include "../tbe.h"

#include "tbe_forward.h"
#include "tbe_round.h"

#include "tbe_forward.c"
