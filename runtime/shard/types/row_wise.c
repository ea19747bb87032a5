/* SPDX-License-Identifier: Apache-2.0
 *
 * row_wise.c: contiguous blocks of rows. ranks: the ranks in order of their blocks, each once; default all. Blocks have
 * ceil(rows / n) rows while they last, then the rest, then none, as TorchRec cuts (calculate_shard_sizes_and_offsets); or the given sizes.
 * Ids are routed by the shards' boundaries, so any sizes that add up are right.
 */
#include "../internal.h"

static peri_status shards(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n)
{
    int32_t count = s->n_ranks ? s->n_ranks : s->world_size;
    int64_t block = peri__ceil_div(s->rows, count), at = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t rank = s->n_ranks ? s->ranks[i] : i;
        for (int32_t j = 0; j < i && s->n_ranks; j++)
            if (s->ranks[j] == rank)
                return peri__fail(PERI_EINVAL, "table '%s': row_wise names rank %d twice, allowed: each rank once", s->table, rank);
        int64_t rows = s->sizes ? s->sizes[i] : peri__min(block, s->rows - at);
        if (rows < 0 || rows > s->rows - at)
            return peri__fail(PERI_EINVAL,
                              "table '%s': row_wise shard %d of %lld rows starts at row %lld, allowed: sizes that add up to %lld", s->table,
                              i, (long long)rows, (long long)at, (long long)s->rows);
        PERI_TRY(peri__shard_add(s, out, capacity, n, (peri_shard){.row_offset = at, .rows = rows, .cols = s->cols, .rank = rank}));
        at += rows;
    }
    if (at != s->rows)
        return peri__fail(PERI_EINVAL, "table '%s': row_wise shards have %lld rows together, the table has %lld", s->table, (long long)at,
                          (long long)s->rows);
    return PERI_OK;
}

const peri__sharding_type peri__row_wise = {.name = "row_wise", .cuts_rows = true, .shards = shards};
