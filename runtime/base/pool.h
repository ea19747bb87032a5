/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.h: on which threads and processors ranges are computed (threads.c), for perilune/host.h.
 */
#ifndef PERI_BASE_POOL_H
#define PERI_BASE_POOL_H

#include "base_internal.h"

/** Calls part(arg, i) once for each i of [0, parts), and returns when all calls have returned. */
typedef void (*peri__pool_run)(void *ctx, int32_t parts, void (*part)(void *arg, int32_t i), void *arg);

/** See peri_host_pool_set. */
peri_status peri__pool_set(int32_t threads, peri__pool_run run, void *ctx);
/** See peri_host_affinity_set. */
peri_status peri__affinity_set(const int32_t *processors, int32_t n);

#endif
