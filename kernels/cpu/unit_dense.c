/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_dense.c: the unit of dense kernels, optimizers of dense parameters, conversions, rows of
 * codes and search. Each family is ref's, and then what is faster here.
 */
#include "unit.h"

#include "../codec.h"
#include "../convert.h"
#include "../dense.h"
#include "../nearest.h"
#include "../optim.h"
#include "../quantize.h"

#include "../ref/convert.c"
#include "convert.c"
#include "../ref/codec.c"
#include "codec.c"
#include "../ref/dense.c"
#include "dense.c"
#include "product.c"
#include "interaction.c"
#include "../ref/optim.c"
#include "optim.c"
#include "../ref/quantize.c"
#include "quantize.c"
#include "../ref/nearest.c"
#include "nearest.c"

K_UNIT(dense, K_CPU_CONVERT K_CPU_CODEC K_CPU_DENSE K_CPU_OPTIM K_CPU_QUANTIZE K_CPU_NEAREST);
