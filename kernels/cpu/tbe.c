/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.c (cpu): see kernels/tbe.h. What runs once a call, or only when something is wrong, stays ref's.
 */
#include "../ref/tbe.c"
#include "tbe_simd.h"
#include "tbe_values.h"

#include "tbe_round.c"
#include "tbe_forward.c"
#include "tbe_rows.c"
#include "tbe_sort.c"
#include "tbe_update.c"

#define K_CPU_TBE                                                                                                                     \
    [PERI_K_tbe_forward] = cpu_tbe_forward, [PERI_K_tbe_weight_gradient] = cpu_tbe_weight_gradient, [PERI_K_tbe_keys] = cpu_tbe_keys, \
    [PERI_K_tbe_sort] = cpu_tbe_sort, \
    [PERI_K_radix_histogram] = cpu_radix_histogram, [PERI_K_radix_scan] = cpu_radix_scan, [PERI_K_radix_scatter] = cpu_radix_scatter, \
    [PERI_K_tbe_update] = cpu_tbe_update, [PERI_K_tbe_dense_update] = cpu_tbe_dense_update, \
    [PERI_K_tbe_ema] = cpu_tbe_ema,
