/* SPDX-License-Identifier: Apache-2.0
 *
 * row_wise.c: contiguous blocks of rows. ranks: the ranks in order of their blocks, each once; default all. Blocks have
 * ceil(rows / n) rows while they last, then the rest, then none, as TorchRec cuts (calculate_shard_sizes_and_offsets); or the given sizes.
 * Ids are routed by the shards' boundaries, so any sizes that add up are right.
 */
#include "../internal.h"

peri_status peri__cut_rows(const peri_sharding *s, const int32_t *ranks, const int64_t *sizes, int32_t count, peri_shard block,
                           peri__cut *cut)
{
    const char *type = peri_sharding_type_name(s->type);
    int64_t even = peri__ceil_div(s->rows, count), at = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t rank = ranks ? ranks[i] : i;
        for (int32_t j = 0; j < i && ranks; j++)
            if (ranks[j] == rank)
                return peri__fail(PERI_EINVAL, "table '%s': %s names rank %d twice, allowed: each rank once", s->table, type, rank);
        int64_t rows = sizes ? sizes[i] : peri__min(even, s->rows - at);
        if (rows < 0 || rows > s->rows - at)
            return peri__fail(PERI_EINVAL, "table '%s': %s shard %d of %lld rows starts at row %lld, allowed: sizes that add up to %lld",
                              s->table, type, i, (long long)rows, (long long)at, (long long)s->rows);
        block.row_offset = at;
        block.rows = rows;
        block.rank = rank;
        PERI_TRY(peri__shard_add(s, cut, block));
        at += rows;
    }
    if (at != s->rows)
        return peri__fail(PERI_EINVAL, "table '%s': %s shards have %lld rows together, the table has %lld", s->table, type, (long long)at,
                          (long long)s->rows);
    return PERI_OK;
}

static peri_status shards(const peri_sharding *s, peri__cut *cut)
{
    return peri__cut_rows(s, s->n_ranks ? s->ranks : NULL, s->sizes, s->n_ranks ? s->n_ranks : s->world_size,
                          (peri_shard){.cols = s->cols}, cut);
}

const peri__sharding_type peri__row_wise = {.name = "row_wise", .cuts_rows = true, .shards = shards};
