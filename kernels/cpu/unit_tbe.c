/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_tbe.c: the unit of table batches (kernels/tbe.h) but for lookups (unit_tbe_forward.c) and optimizers
 * (unit_tbe_rows.c, unit_tbe_batch.c), which take long to compile. What runs once a call, or only when something is
 * wrong, stays ref's.
 */
#include "unit.h"

#include "../tbe.h"

#include "tbe_choose.c"
#include "tbe_gradient.c"
#include "tbe_sort.c"
#include "tbe_runs.c"
#include "tbe_store.c"
#include "tbe_mark.c"

K_UNIT(
    tbe, [PERI_K_tbe_forward] = cpu_tbe_forward, [PERI_K_tbe_weight_gradient] = cpu_tbe_weight_gradient,
    [PERI_K_tbe_keys] = cpu_tbe_keys, [PERI_K_tbe_sort] = cpu_tbe_sort, [PERI_K_radix_histogram] = cpu_radix_histogram,
    [PERI_K_radix_scan] = cpu_radix_scan, [PERI_K_radix_scatter] = cpu_radix_scatter,
    [PERI_K_tbe_update] = cpu_tbe_update, [PERI_K_tbe_dense_update] = cpu_tbe_dense_update,
    [PERI_K_tbe_ema] = cpu_tbe_ema, [PERI_K_tbe_mark] = cpu_tbe_mark);
