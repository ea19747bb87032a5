/* SPDX-License-Identifier: Apache-2.0
 *
 * shard/internal.h (L5): sharding types, routes, the executor.
 */
#ifndef PERI_SHARD_INTERNAL_H
#define PERI_SHARD_INTERNAL_H

#include "../comm/internal.h"
#include "../embed/internal.h"

#include <perilune/shard.h>

/** A sharding type: a pure function from a plan entry to shards, and what others ask of it. One file each, in types/. */
typedef struct peri__sharding_type {
    const char *name;  /* TorchRec's: "table_wise" */
    bool cuts_rows;    /* rows of one column may lie on several ranks: the pooled rows of their parts are added up at home */
    bool cuts_columns; /* a row may lie on several ranks */
    bool replica;      /* every rank has the whole table: no ids travel, and gradients are reduced */
    /* Fill @out (room for @capacity) with the shards of the table in order of offsets, and *@n. Ranks were checked to be in range. */
    peri_status (*shards)(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n);
} peri__sharding_type;

/** The type of a number that was checked. */
const peri__sharding_type *peri__sharding_type_of(int32_t type);

extern const peri__sharding_type peri__data_parallel, peri__table_wise, peri__row_wise, peri__column_wise;

/** Append one shard; PERI_EINVAL when there is no room. */
peri_status peri__shard_add(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n, peri_shard shard);

#endif
