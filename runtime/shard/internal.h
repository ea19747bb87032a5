/* SPDX-License-Identifier: Apache-2.0
 *
 * shard/internal.h (L5): sharding types, routes, the executor.
 */
#ifndef PERI_SHARD_INTERNAL_H
#define PERI_SHARD_INTERNAL_H

#include "../comm/internal.h"
#include "../embed/internal.h"

#include <perilune/shard.h>

/** A sharding type: a pure function from a plan entry to shards. One file each. */
typedef struct peri__sharding_type {
    const char *name; /* TorchRec's: "table_wise" */
    /* Fill @out (room for @capacity) with the shards of the table in order of offsets, and *@n. Ranks were checked to be in range. */
    peri_status (*shards)(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n);
} peri__sharding_type;

extern const peri__sharding_type peri__data_parallel, peri__table_wise, peri__row_wise, peri__column_wise;

/** Append one shard; PERI_EINVAL when there is no room. */
peri_status peri__shard_add(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n, peri_shard shard);

#endif
