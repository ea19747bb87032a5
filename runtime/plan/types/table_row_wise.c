/* SPDX-License-Identifier: Apache-2.0
 *
 * table_row_wise.c: blocks of rows over the ranks of one node. ranks: some of one node's, in order of their blocks,
 * each once; default all of the node of rank 0. Rows are cut as by row_wise. Every other rank of the node has a shard
 * of no rows: all take part in the sum.
 */
#include "../plan_internal.h"

peri_status peri__cut_in_node(const peri_sharding *s, const int32_t *ranks, const int64_t *sizes, int32_t count,
                              peri_shard block, peri__cut *cut)
{
    const peri__nodes *nodes = &cut->nodes;
    const int32_t node = nodes->of[ranks[0]];
    PERI_TRY(peri__check_one_node(s, ranks, count, cut));
    PERI_TRY(peri__cut_rows(s, ranks, sizes, count, block, cut));
    block.row_offset = s->rows;
    block.rows = 0;
    for (int32_t i = nodes->first[node]; i < nodes->first[node + 1]; i++) {
        bool named = false;
        for (int32_t k = 0; k < count; k++) named = named || ranks[k] == nodes->ranks[i];
        block.rank = nodes->ranks[i];
        if (!named) PERI_TRY(peri__shard_add(s, cut, block));
    }
    return PERI_OK;
}

static peri_status table_row_wise_shards(const peri_sharding *s, peri__cut *cut)
{
    const int32_t *ranks = s->n_ranks ? s->ranks : cut->nodes.ranks; /* those of the first node are in front */
    const int32_t count = s->n_ranks ? s->n_ranks : peri__node_size(&cut->nodes, 0);
    return peri__cut_in_node(s, ranks, s->sizes, count, (peri_shard){.cols = s->cols}, cut);
}

const peri__sharding_type peri__table_row_wise = {.name = "table_row_wise",
                                                  .facts = PERI_SHARDING_CUTS_ROWS | PERI_SHARDING_IN_NODE,
                                                  .shards = table_row_wise_shards};
