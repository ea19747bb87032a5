/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.c: the unit of all families but table batches, which are half of the work of compiling: see cpu_tbe.c.
 */
#include "unit.h"

#include "convert.c"
#include "codec.c"
#include "dense.c"
#include "jagged.c"
#include "optim.c"
#include "quantize.c"
#include "sparse.c"
#include "lookup.c"
#include "indices.c"
#include "route.c"
#include "bags.c"

K_UNIT(, K_CPU_CONVERT K_CPU_DENSE K_CPU_JAGGED K_CPU_OPTIM K_CPU_SPARSE K_CPU_LOOKUP K_CPU_QUANTIZE K_CPU_ROUTE K_CPU_CODEC K_CPU_BAGS);
