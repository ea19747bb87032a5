/* SPDX-License-Identifier: Apache-2.0
 *
 * table_row_wise.c: blocks of rows over the ranks of one node. ranks: some of one node's, in order of their blocks,
 * each once; default all of the node of rank 0. Rows are cut as by row_wise. Every other rank of the node has a shard
 * of no rows: all take part in the sum.
 */
#include "../shard_internal.h"

peri_status peri__cut_in_node(const peri_sharding *s, const int32_t *ranks, const int64_t *sizes, int32_t count,
                              int32_t first, peri_shard block, peri__cut *cut)
{
    int32_t *mates = peri__alloc(sizeof *mates * (size_t)s->world_size);
    if (!mates) return PERI_ENOMEM;
    int32_t n = peri__node_ranks(s, count ? ranks[0] : first, mates);
    peri_status status = peri__check_one_node(s, ranks, count);
    if (status >= 0) status = peri__cut_rows(s, count ? ranks : mates, sizes, count ? count : n, block, cut);
    for (int32_t i = 0; i < n && count && status >= 0; i++) {
        bool named = false;
        for (int32_t k = 0; k < count; k++) named = named || ranks[k] == mates[i];
        block.row_offset = s->rows;
        block.rows = 0;
        block.rank = mates[i];
        if (!named) status = peri__shard_add(s, cut, block);
    }
    peri__free(mates);
    return status;
}

static peri_status shards(const peri_sharding *s, peri__cut *cut)
{
    return peri__cut_in_node(s, s->ranks, s->sizes, s->n_ranks, 0, (peri_shard){.cols = s->cols}, cut);
}

const peri__sharding_type peri__table_row_wise = {
    .name = "table_row_wise", .cuts_rows = true, .in_node = true, .shards = shards};
