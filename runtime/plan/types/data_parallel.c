/* SPDX-License-Identifier: Apache-2.0
 *
 * data_parallel.c: every rank holds the whole table; nothing is routed, gradients are reduced. With exact sums ids and
 * gradients of all ranks go to all ranks instead (peri__route_table.copied). ranks: none, or all of them.
 */
#include "../plan_internal.h"

static peri_status data_parallel_shards(const peri_sharding *s, peri__cut *cut)
{
    (void)cut;
    if (s->sizes) return peri__fail(PERI_EINVAL, "table '%s': data_parallel takes no shard sizes", s->table);
    bool all = s->n_ranks == 0 || s->n_ranks == s->world_size;
    for (int32_t i = 0; i < s->n_ranks && all; i++) all = s->ranks[i] == i;
    if (!all)
        return peri__fail(PERI_EINVAL,
                          "table '%s': data_parallel lives on all %d ranks; the plan names %d (leave them out)",
                          s->table, s->world_size, s->n_ranks);
    return PERI_OK;
}

const peri__sharding_type peri__data_parallel = {
    .name = "data_parallel", .facts = PERI_SHARDING_REPLICA, .shards = data_parallel_shards};
