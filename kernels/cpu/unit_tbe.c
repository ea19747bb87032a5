/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_tbe.c: the unit of table batches: see kernels/tbe.h. What runs once a call, or only when something is wrong, stays ref's.
 */
#include "unit.h"

#include "tbe_simd.h"
#include "tbe_values.h"

#include "../ref/tbe.c"
#include "../ref/tbe_update.c"
#include "../ref/tbe_shampoo.c"
#include "../ref/tbe_mark.c"

#include "tbe_round.c"
#include "tbe_forward.c"
#include "tbe_rows.c"
#include "tbe_sort.c"
#include "tbe_runs.c"
#include "tbe_batch.c"
#include "tbe_update.c"
#include "tbe_mark.c"

K_UNIT(_tbe,
       [PERI_K_tbe_forward] = cpu_tbe_forward, [PERI_K_tbe_weight_gradient] = cpu_tbe_weight_gradient, [PERI_K_tbe_keys] = cpu_tbe_keys,
       [PERI_K_tbe_sort] = cpu_tbe_sort, [PERI_K_radix_histogram] = cpu_radix_histogram, [PERI_K_radix_scan] = cpu_radix_scan,
       [PERI_K_radix_scatter] = cpu_radix_scatter, [PERI_K_tbe_update] = cpu_tbe_update, [PERI_K_tbe_dense_update] = cpu_tbe_dense_update,
       [PERI_K_tbe_ema] = cpu_tbe_ema, [PERI_K_tbe_mark] = cpu_tbe_mark);
