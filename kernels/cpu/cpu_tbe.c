/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_tbe.c: the unit of table batches.
 */
#include "unit.h"

#include "tbe.c"

K_UNIT(_tbe, K_CPU_TBE);
