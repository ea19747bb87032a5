/* SPDX-License-Identifier: Apache-2.0
 *
 * table_column_wise.c: blocks of columns over the ranks of one node. ranks: one of the node's per block in column
 * order, a rank may hold several; default all ranks of the node of rank 0. Columns are cut as by column_wise.
 */
#include "../plan_internal.h"

static peri_status table_column_wise_shards(const peri_sharding *s, peri__cut *cut)
{
    PERI_TRY(peri__check_one_node(s, s->ranks, s->n_ranks, cut));
    if (s->n_ranks) return peri__cut_columns(s, s->ranks, s->n_ranks, cut);
    return peri__cut_columns(s, cut->nodes.ranks, peri__node_size(&cut->nodes, 0), cut);
}

const peri__sharding_type peri__table_column_wise = {.name = "table_column_wise",
                                                     .facts = PERI_SHARDING_CUTS_COLUMNS | PERI_SHARDING_IN_NODE,
                                                     .shards = table_column_wise_shards};
