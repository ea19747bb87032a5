/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_product.c: the unit of products with matrices in panels, of rows of codes, and of search among rows, which uses
 * both. Each family is ref's, and then what is faster here.
 */
#include "unit.h"

#include "../codec.h"
#include "../dense.h"
#include "../nearest.h"
#include "../quantize.h"

#include "convert.h"
#include "vmath.h"

#include "product.c"
#include "../ref/quantize.c"
#include "quantize.c"
#include "../ref/nearest.c"
#include "nearest.c"

K_UNIT(product, K_CPU_PRODUCT K_CPU_QUANTIZE K_CPU_NEAREST);
