/* SPDX-License-Identifier: Apache-2.0
 *
 * unit.c: the unit of all families but table batches, which are half of the work of compiling: see unit_tbe.c. Each family is ref's, and
 * then what is faster here.
 */
#include "unit.h"

#include "../ref/convert.c"
#include "convert.c"
#include "../ref/codec.c"
#include "codec.c"
#include "../ref/dense.c"
#include "dense.c"
#include "product.c"
#include "interaction.c"
#include "../ref/jagged.c"
#include "jagged.c"
#include "../ref/optim.c"
#include "optim.c"
#include "../ref/quantize.c"
#include "quantize.c"
#include "../ref/nearest.c"
#include "nearest.c"
#include "../ref/sparse.c"
#include "sparse.c"
#include "../ref/lookup.c"
#include "lookup.c"
#include "indices.c"
#include "../ref/route.c"
#include "route.c"
#include "../ref/bags.c"
#include "bags.c"
#include "../ref/collision.c"
#include "collision.c"

K_UNIT(, K_CPU_CONVERT K_CPU_DENSE K_CPU_JAGGED K_CPU_OPTIM K_CPU_SPARSE K_CPU_LOOKUP K_CPU_QUANTIZE K_CPU_ROUTE K_CPU_CODEC K_CPU_BAGS
           K_CPU_COLLISION K_CPU_NEAREST);
