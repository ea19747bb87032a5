/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_sparse.c: the unit of jagged and sparse kernels. Each family is ref's, and then what is faster here.
 */
#include "unit.h"

#include "../bags.h"
#include "../jagged.h"
#include "../lookup.h"
#include "../sparse.h"

#include "../ref/jagged.c"
#include "jagged.c"
#include "../ref/sparse.c"
#include "sparse.c"
#include "../ref/lookup.c"
#include "lookup.c"
#include "indices.c"
#include "../ref/bags.c"
#include "bags.c"

K_UNIT(sparse, K_CPU_JAGGED K_CPU_SPARSE K_CPU_LOOKUP K_CPU_BAGS);
