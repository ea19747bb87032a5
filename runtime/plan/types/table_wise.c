/* SPDX-License-Identifier: Apache-2.0
 *
 * table_wise.c: the whole table on one rank. ranks = { that rank }; default rank 0.
 */
#include "../plan_internal.h"

static peri_status table_wise_shards(const peri_sharding *s, peri__cut *cut)
{
    if (s->n_ranks > 1)
        return peri__fail(PERI_EINVAL, "table '%s': table_wise lives on one rank, the plan names %d", s->table,
                          s->n_ranks);
    if (s->sizes) return peri__fail(PERI_EINVAL, "table '%s': table_wise takes no shard sizes", s->table);
    int32_t rank = s->n_ranks ? s->ranks[0] : 0;
    return peri__shard_add(s, cut, (peri_shard){.rows = s->rows, .cols = s->cols, .rank = rank});
}

const peri__sharding_type peri__table_wise = {.name = "table_wise", .shards = table_wise_shards};
