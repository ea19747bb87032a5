/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_dense.c: the unit of dense kernels, of optimizers of dense parameters, and of conversions, those for the wire
 * (codec.h) among them. Each family is ref's, and then what is faster here.
 */
#include "unit.h"

#include "../codec.h"
#include "../convert.h"
#include "../dense.h"
#include "../optim.h"

#include "../ref/convert.c"
#include "convert.c"
#include "../ref/codec.c"
#include "codec.c"
#include "../ref/dense.c"
#include "dense.c"
#include "interaction.c"
#include "../ref/formula.c"
#include "formula.c"
#include "../ref/optim.c"
#include "optim.c"

K_UNIT(dense, K_CPU_CONVERT K_CPU_CODEC K_CPU_DENSE K_CPU_FORMULA, K_CPU_OPTIM);
