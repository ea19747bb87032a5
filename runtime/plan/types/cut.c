/* SPDX-License-Identifier: Apache-2.0
 *
 * cut.c: what sharding types do alike while they cut a table.
 */
#include "../plan_internal.h"

peri_status peri__shard_add(const peri_sharding *s, peri__cut *cut, peri_shard shard)
{
    shard.index = cut->n++;
    if (!cut->out) return PERI_OK;
    if (shard.index >= cut->capacity)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s' has more than %d shards", s->table,
                          cut->capacity);
    cut->out[shard.index] = shard;
    return PERI_OK;
}

peri_status peri__check_one_node(const peri_sharding *s, const int32_t *ranks, int32_t count, const peri__cut *cut)
{
    for (int32_t i = 1; i < count; i++)
        if (peri__node_number(s, ranks[i]) != peri__node_number(s, ranks[0]))
            return peri__fail(
                PERI_EINVAL,
                "table '%s': %s names rank %d of node %d and rank %d of node %d, allowed: ranks of one node", s->table,
                cut->type->name, ranks[0], peri__node_number(s, ranks[0]), ranks[i],
                peri__node_number(s, ranks[i]));
    return PERI_OK;
}
