/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_tbe_rows.c: updates row by row.
 */
#include "unit.h"

#include "../tbe.h"

#include "tbe_rows.c"
#include "tbe_update.c"
