/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_sequence.c: the unit of attention: ref's, and what is faster here.
 */
#include "unit.h"

#include "../sequence.h"

#include "../ref/sequence.c"
#include "sequence.c"

K_UNIT(sequence, K_CPU_SEQUENCE);
