/* SPDX-License-Identifier: Apache-2.0
 *
 * types.c: the table of sharding types, and what all of them check. Each type is a file of its own.
 */
#include "../internal.h"

static const peri__sharding_type *const types[PERI_SHARDING_TYPE_COUNT] = {
    [PERI_DATA_PARALLEL] = &peri__data_parallel,
    [PERI_TABLE_WISE] = &peri__table_wise,
    [PERI_ROW_WISE] = &peri__row_wise,
    [PERI_COLUMN_WISE] = &peri__column_wise,
};

const peri__sharding_type *peri__sharding_type_of(int32_t type) { return types[type]; }

const char *peri_sharding_type_name(int32_t type)
{
    return type >= 0 && type < PERI_SHARDING_TYPE_COUNT ? types[type]->name : "?";
}

peri_status peri__shard_add(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n, peri_shard shard)
{
    if (*n == capacity)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s' has more than %d shards", s->table, capacity);
    shard.index = *n;
    out[(*n)++] = shard;
    return PERI_OK;
}

peri_status peri_sharding_shards(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n)
{
    PERI_NEED(s);
    PERI_NEED(out);
    const char *table = s->table ? s->table : "?";
    if (s->type < 0 || s->type >= PERI_SHARDING_TYPE_COUNT)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s': %d is no sharding type", table, s->type);
    if (s->rows < 1 || s->cols < 1)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s' has %lld rows and %lld columns, allowed: 1 or more", table,
                          (long long)s->rows, (long long)s->cols);
    if (s->world_size < 1 || s->local_size < 1)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s': a world of %d ranks, %d on a node", table, s->world_size,
                          s->local_size);
    for (int32_t i = 0; i < s->n_ranks; i++)
        if (s->ranks[i] < 0 || s->ranks[i] >= s->world_size)
            return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s' (%s): rank %d does not exist, allowed: 0..%d", table,
                              types[s->type]->name, s->ranks[i], s->world_size - 1);
    int32_t count = 0;
    PERI_TRY(types[s->type]->shards(s, out, capacity, &count));
    *n = count;
    return PERI_OK;
}
