/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_tbe_rows.c: updates row by row: a piece for each group of optimizers (TBE_KINDS in tbe_update.h).
 * pieces: rates moments norms
 */
#include "unit.h"

#include "../tbe.h"

#include "tbe_rows.c"
#include "tbe_update.c"
