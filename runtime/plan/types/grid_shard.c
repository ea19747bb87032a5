/* SPDX-License-Identifier: Apache-2.0
 *
 * grid_shard.c: blocks of columns, each of which lies on one node and is cut by rows over the node's ranks. ranks:
 * those of the first block in order of their rows, then those of the second, ...: a block ends where the node changes
 * or a rank of it comes again. Default: a block for each node, as even as they can be, in order of the nodes' first
 * ranks. Given blocks have even columns; sizes are rows.
 */
#include "../plan_internal.h"

/** The end of the block that begins at entry @at of the plan's ranks. */
static int32_t block_end(const peri_sharding *s, int32_t at)
{
    int32_t end = at + 1;
    for (; end < s->n_ranks && peri__node_number(s, s->ranks[end]) == peri__node_number(s, s->ranks[at]); end++)
        for (int32_t k = at; k < end; k++)
            if (s->ranks[k] == s->ranks[end]) return end;
    return end;
}

/** Blocks over the ranks that the plan names. */
static peri_status named_blocks(const peri_sharding *s, peri__cut *cut)
{
    int32_t count = 0;
    for (int32_t at = 0; at < s->n_ranks; at = block_end(s, at)) count++;
    PERI_TRY(peri__check_blocks(s, count, cut));
    int64_t cols = peri__block_cols(s, 0, count);
    peri_shard block = {.cols = cols};
    for (int32_t at = 0, end; at < s->n_ranks; at = end, block.col_offset += cols) {
        end = block_end(s, at);
        PERI_TRY(peri__cut_in_node(s, s->ranks + at, s->sizes ? s->sizes + at : NULL, end - at, block, cut));
    }
    return PERI_OK;
}

static peri_status grid_shards(const peri_sharding *s, peri__cut *cut)
{
    if (s->n_ranks) return named_blocks(s, cut);
    const peri__nodes *nodes = &cut->nodes;
    PERI_TRY(peri__check_blocks(s, nodes->n, cut));
    peri_shard block = {0};
    for (int32_t i = 0; i < nodes->n; i++, block.col_offset += block.cols) {
        block.cols = peri__block_cols(s, i, nodes->n);
        if (block.cols > 0)
            PERI_TRY(
                peri__cut_in_node(s, nodes->ranks + nodes->first[i], NULL, peri__node_size(nodes, i), block, cut));
    }
    return PERI_OK;
}

const peri__sharding_type peri__grid_shard = {
    .name = "grid_shard",
    .facts = PERI_SHARDING_CUTS_ROWS | PERI_SHARDING_CUTS_COLUMNS | PERI_SHARDING_IN_NODE,
    .shards = grid_shards};
