/* SPDX-License-Identifier: Apache-2.0
 *
 * types.c: the table of sharding types, and what is checked before any of them cuts. Each type is a file of its own.
 */
#include "../plan_internal.h"

#include <stdio.h>

static const peri__sharding_type *const types[PERI_SHARDING_TYPE_COUNT] = {
    [PERI_DATA_PARALLEL] = &peri__data_parallel,
    [PERI_TABLE_WISE] = &peri__table_wise,
    [PERI_ROW_WISE] = &peri__row_wise,
    [PERI_COLUMN_WISE] = &peri__column_wise,
    [PERI_TABLE_ROW_WISE] = &peri__table_row_wise,
    [PERI_TABLE_COLUMN_WISE] = &peri__table_column_wise,
    [PERI_GRID_SHARD] = &peri__grid_shard,
};

const char *peri_sharding_type_name(int32_t type)
{
    return type >= 0 && type < PERI_SHARDING_TYPE_COUNT ? types[type]->name : "?";
}

int32_t peri_sharding_type_facts(int32_t type)
{
    return type >= 0 && type < PERI_SHARDING_TYPE_COUNT ? types[type]->facts : -1;
}

const char *peri__sharding_types_text(int32_t asked, int32_t facts, char *text, size_t len)
{
    size_t used = 0;
    text[0] = 0;
    for (int32_t type = 0; type < PERI_SHARDING_TYPE_COUNT && used < len; type++)
        if ((peri_sharding_type_facts(type) & asked) == facts)
            used += (size_t)snprintf(text + used, len - used, "%s%s", used ? ", " : "", types[type]->name);
    return text;
}

peri_status peri_sharding_shards(const peri_sharding *s, peri_shard *out, int32_t capacity, int32_t *n)
{
    PERI_TAKE(peri_sharding, s);
    PERI_NEED(n);
    const char *table = s->table ? s->table : "?";
    if (s->type < 0 || s->type >= PERI_SHARDING_TYPE_COUNT)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s': %d is no sharding type", table, s->type);
    if (s->rows < 1 || s->cols < 1)
        return peri__fail(PERI_EINVAL,
                          "peri_sharding_shards: table '%s' has %lld rows and %lld columns, allowed: 1 or more", table,
                          (long long)s->rows, (long long)s->cols);
    if (s->world_size < 1)
        return peri__fail(PERI_EINVAL, "peri_sharding_shards: table '%s': a world of %d ranks", table, s->world_size);
    PERI_TRY(peri__list_check("peri_sharding_shards", "ranks", s->ranks, s->n_ranks));
    for (int32_t i = 0; i < s->n_ranks; i++)
        if (s->ranks[i] < 0 || s->ranks[i] >= s->world_size)
            return peri__fail(PERI_EINVAL,
                              "peri_sharding_shards: table '%s' (%s): rank %d does not exist, allowed: 0..%d", table,
                              types[s->type]->name, s->ranks[i], s->world_size - 1);
    const peri__sharding_type *type = types[s->type];
    peri__cut cut = {.type = type, .out = out, .capacity = capacity};
    peri_status status =
        type->facts & PERI_SHARDING_IN_NODE ? peri__nodes_init(&cut.nodes, s->nodes, s->world_size) : PERI_OK;
    if (status >= 0) status = type->shards(s, &cut);
    peri__nodes_fini(&cut.nodes);
    PERI_TRY(status);
    *n = cut.n;
    return PERI_OK;
}
