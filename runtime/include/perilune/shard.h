/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/shard.h: sharding types as geometry, and sharded embedding modules.
 */
#ifndef PERILUNE_SHARD_H
#define PERILUNE_SHARD_H

#include <perilune/comm.h>
#include <perilune/embed.h>

/** Sharding types (TorchRec's ShardingType); names: peri_sharding_type_name. */
enum {
    PERI_DATA_PARALLEL = 0, /* every rank has the whole table and the gradients are reduced */
    PERI_TABLE_WISE = 1,    /* the whole table on one rank */
    PERI_ROW_WISE = 2,      /* contiguous blocks of rows over ranks */
    PERI_COLUMN_WISE = 3,   /* blocks of columns over ranks */
    PERI_SHARDING_TYPE_COUNT = 4
};

/** One piece of a table: rows [row_offset, row_offset + rows) of columns [col_offset, col_offset + cols) on a rank. */
typedef struct peri_shard {
    int64_t row_offset, rows, col_offset, cols;
    int32_t rank;
    int32_t index; /* its place among the shards of the table */
} peri_shard;

/** How one table is cut: what a plan says of it. */
typedef struct peri_sharding {
    int32_t type;                   /* PERI_TABLE_WISE, ... */
    int32_t world_size, local_size; /* ranks in all, ranks of a node */
    int32_t n_ranks;                /* 0: the type's default */
    const int32_t *ranks;           /* int32[n_ranks]: see the type's file in runtime/shard */
    const int64_t *sizes;           /* int64[n_ranks] rows (row-wise) or columns (column-wise) of each shard; NULL: even */
    const char *table;              /* name, for messages */
    int64_t rows, cols;             /* of the whole table */
} peri_sharding;

/** "table_wise", ...; "?" for an unknown type. Static text, borrowed. */
PERI_API const char *peri_sharding_type_name(int32_t type);
/** The shards of a table, in order of their offsets; none for data-parallel. @out has room for @capacity; *@n gets their number.
 *  PERI_EINVAL names the table and says what is allowed. Local. */
PERI_API peri_status peri_sharding_shards(const peri_sharding *sharding, peri_shard *out, int32_t capacity, int32_t *n);

#endif
