/* SPDX-License-Identifier: Apache-2.0
 *
 * row_wise.c: contiguous blocks of rows. ranks: the ranks in order of their blocks, each once; default all. Blocks have
 * ceil(rows / n) rows while they last, then the rest, then none, as TorchRec cuts (calculate_shard_sizes_and_offsets);
 * or the given sizes. Ids are routed by the shards' boundaries, so any sizes that add up are right.
 */
#include "../plan_internal.h"

/** PERI_EINVAL unless a bucket begins at row @at, or it is the end. */
static peri_status check_begin(const peri_sharding *s, int32_t i, int64_t at, const peri__cut *cut)
{
    int32_t b = 0;
    for (; s->segments && b < s->buckets; b++)
        if (s->segments[b] >= at) break;
    if (!s->segments || s->segments[b] == at) return PERI_OK;
    return peri__fail(PERI_EINVAL,
                      "table '%s': %s shard %d begins at row %lld; a table of raw ids is cut between buckets only: of "
                      "its %d buckets one "
                      "begins at row %lld, the next at row %lld",
                      s->table, cut->type->name, i, (long long)at, s->buckets,
                      (long long)s->segments[b - 1], (long long)s->segments[b]);
}

/** Rows of even shard @i of @count, which begins at row @at. */
static int64_t even_rows(const peri_sharding *s, int32_t i, int32_t count, int64_t at)
{
    if (!s->segments) return peri__min(peri__ceil_div(s->rows, count), s->rows - at);
    return s->segments[peri__min((i + 1) * peri__ceil_div(s->buckets, count), s->buckets)] - at;
}

peri_status peri__cut_rows(const peri_sharding *s, const int32_t *ranks, const int64_t *sizes, int32_t count,
                           peri_shard block, peri__cut *cut)
{
    const char *type = cut->type->name;
    int64_t at = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t rank = ranks ? ranks[i] : i;
        for (int32_t j = 0; j < i && ranks; j++)
            if (ranks[j] == rank)
                return peri__fail(PERI_EINVAL, "table '%s': %s names rank %d twice, allowed: each rank once", s->table,
                                  type, rank);
        int64_t rows = sizes ? sizes[i] : even_rows(s, i, count, at);
        if (rows < 0 || rows > s->rows - at)
            return peri__fail(
                PERI_EINVAL,
                "table '%s': %s shard %d of %lld rows starts at row %lld, allowed: sizes that add up to %lld", s->table,
                type, i, (long long)rows, (long long)at, (long long)s->rows);
        PERI_TRY(check_begin(s, i, at, cut));
        block.row_offset = at;
        block.rows = rows;
        block.rank = rank;
        PERI_TRY(peri__shard_add(s, cut, block));
        at += rows;
    }
    if (at != s->rows)
        return peri__fail(PERI_EINVAL, "table '%s': %s shards have %lld rows together, the table has %lld",
                          s->table, type, (long long)at, (long long)s->rows);
    return PERI_OK;
}

static peri_status row_wise_shards(const peri_sharding *s, peri__cut *cut)
{
    return peri__cut_rows(s, s->n_ranks ? s->ranks : NULL, s->sizes, s->n_ranks ? s->n_ranks : s->world_size,
                          (peri_shard){.cols = s->cols}, cut);
}

const peri__sharding_type peri__row_wise = {
    .name = "row_wise", .facts = PERI_SHARDING_CUTS_ROWS, .shards = row_wise_shards};
