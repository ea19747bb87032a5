/* SPDX-License-Identifier: Apache-2.0
 *
 * tables.c: the tables of this rank. Shards, and replicas, of the same optimizer, dtype and pooling share one table
 * batch, so that a step has one lookup and one update for each of them.
 */
#include "../base/buffer.h"
#include "module.h"

#include <math.h>

/* -- sets of tables ------------------------------------------------------------------------------------------------ */

/** The set for table @t of the configuration, of which a shard (@shard) or the whole is here, found or appended; -1: no
 *  memory. */
static int32_t find_or_add_set(peri_sharded *e, const peri_sharded_config *c, int32_t t, int32_t shard)
{
    const peri_sharded_table *table = &c->tables[t];
    const peri__route_table *cut = &e->tables[t];
    const bool replica = shard < 0 && !cut->copied;
    const peri__table_set x = {
        .optimizer = table->compute_kernel == PERI_KERNEL_FUSED ? table->optimizer : -1,
        .place = shard < 0 ? 0 : cut->places[shard],
        .part = shard < 0 ? 0 : peri__lane_part(cut->lane),
        .dtype = table->dtype,
        .dense = table->compute_kernel == PERI_KERNEL_DENSE,
        .replica = replica,
        .cached = table->cache != NULL,
        /* else there is nothing that would keep them apart */
        .mapped = table->mapped && !peri_device_host_access(e->device),
        .by_id = shard >= 0 && cut->by_id,
        .mean = table->pooling == PERI_POOLING_MEAN && !replica};
    for (int32_t g = 0; g < e->n_sets; g++) {
        const peri__table_set *y = &e->sets[g];
        if (y->optimizer == x.optimizer && y->dtype == x.dtype && y->replica == x.replica && y->cached == x.cached &&
            y->mapped == x.mapped && y->mean == x.mean && y->by_id == x.by_id && y->place == x.place &&
            y->part == x.part)
            return g;
    }
    if (peri__grow_one((void **)&e->sets, e->n_sets, sizeof *e->sets) < 0) return -1;
    e->sets[e->n_sets] = x;
    return e->n_sets++;
}

/** Shard @shard of a table is here, in one of the sets; -1: the whole table. */
static peri_status add_to_set(peri_sharded *e, const peri_sharded_config *c, int32_t table, int32_t shard)
{
    const int32_t set = find_or_add_set(e, c, table, shard);
    if (set < 0) return PERI_ENOMEM;
    peri__table_set *g = &e->sets[set];
    PERI_TRY(peri__grow_one((void **)&g->module_table, g->n_tables, sizeof *g->module_table));
    PERI_TRY(peri__grow_one((void **)&g->module_shard, g->n_tables, sizeof *g->module_shard));
    e->tables[table].here[1 + shard] = (peri__set_table){.set = set, .table = g->n_tables};
    g->module_table[g->n_tables] = table;
    g->module_shard[g->n_tables++] = shard;
    return PERI_OK;
}

/** The shard that a set's table holds; a replica, or a copy, is one shard of everything. */
static peri_shard shard_of_set_table(const peri_sharded *e, const peri__table_set *g, int32_t i)
{
    const peri__route_table *table = &e->tables[g->module_table[i]];
    if (g->module_shard[i] >= 0) return table->shards[g->module_shard[i]];
    return (peri_shard){.rows = table->rows, .cols = table->cols, .rank = e->rank};
}

/** Make the table batch of one set. Shards pool sums, with the factors of whole bags where the table's pooling is the
 *  mean. */
static peri_status make_tbe(peri_sharded *e, const peri_sharded_config *c, peri__table_set *g)
{
    PERI__SCRATCH peri_table_config *tables = peri__alloc_zero(sizeof *tables * (size_t)g->n_tables);
    PERI__SCRATCH peri_cache_config *caches = peri__alloc_zero(sizeof *caches * (size_t)g->n_tables);
    if (!tables || !caches) return PERI_ENOMEM;
    for (int32_t i = 0; i < g->n_tables; i++) {
        const peri_sharded_table *from = &c->tables[g->module_table[i]];
        peri_shard shard = shard_of_set_table(e, g, i);
        tables[i] = (peri_table_config){.size = sizeof(peri_table_config),
                                        .name = from->name,
                                        .rows = shard.rows,
                                        .cols = shard.cols,
                                        .row_offset = shard.row_offset,
                                        .col_offset = shard.col_offset,
                                        .total_rows = from->rows,
                                        .total_cols = from->cols,
                                        .pooling = g->replica && !e->kind->by_id ? from->pooling : PERI_POOLING_SUM,
                                        .init = from->init,
                                        .init_a = from->init_a,
                                        .init_b = from->init_b,
                                        .raw_ids = from->collision != NULL};
        if (g->cached) caches[i] = *from->cache;
    }
    peri_tbe_config config = {.size = sizeof config,
                              .device = c->device,
                              .dtype = g->dtype,
                              .bounds_check = PERI_BOUNDS_NONE,
                              .n_tables = g->n_tables,
                              .tables = tables,
                              .n_features = c->n_features,
                              .features = c->features,
                              .seed = c->seed,
                              .caches = g->cached ? caches : NULL,
                              .mapped = g->mapped};
    if (g->optimizer >= 0) config.optimizer = &c->optimizers[g->optimizer];
    PERI_TRY(peri_tbe_new(&config, &g->tbe));
    g->tbe->halvings = e->tables[g->module_table[0]].halvings; /* of all of them */
    if (!g->dense) return PERI_OK;
    g->leaves = peri__alloc_zero(sizeof *g->leaves * (size_t)g->n_tables);
    if (!g->leaves) return PERI_ENOMEM;
    for (int32_t i = 0; i < g->n_tables; i++) PERI_TRY(peri_tbe_leaf(g->tbe, i, &g->leaves[i]));
    return PERI_OK;
}

/* -- where is what ------------------------------------------------------------------------------------------------- */

/** The list of what is here, by table and shard. */
static peri_status list_local(peri_sharded *e)
{
    const peri__routes *r = e->routes;
    e->local = peri__alloc_zero(sizeof *e->local * (size_t)peri__max(1, e->n_local));
    if (!e->local) return PERI_ENOMEM;
    int32_t n = 0;
    for (int32_t t = 0; t < e->n_tables; t++)
        for (int32_t s = -1; s < e->tables[t].n_shards; s++) {
            const peri__set_table p = peri__set_table_of(e, t, s);
            if (p.set < 0) continue;
            const peri__table_set *g = &e->sets[p.set];
            e->local[n++] = (peri_local_shard){.shard = shard_of_set_table(e, g, p.table),
                                               .tbe = g->tbe,
                                               .tbe_table = p.table,
                                               .table = t,
                                               .place = g->place,
                                               .dense = g->dense,
                                               .replica = e->tables[t].data_parallel};
        }
    for (int32_t i = r->rank_lookup[e->rank]; i < r->rank_lookup[e->rank + 1]; i++)
        e->hollow = e->hollow || peri__set_table_of(e, r->lookups[i].table, r->lookups[i].shard).set < 0;
    return PERI_OK;
}

peri_status peri__tables_new(peri_sharded *e, const peri_sharded_config *c)
{
    for (int32_t t = 0; t < c->n_tables; t++) {
        const peri__route_table *table = &e->tables[t];
        if (table->data_parallel) PERI_TRY(add_to_set(e, c, t, -1));
        for (int32_t s = 0; s < table->n_shards; s++)
            if (table->shards[s].rank == e->rank && table->shards[s].rows > 0) PERI_TRY(add_to_set(e, c, t, s));
    }
    for (int32_t g = 0; g < e->n_sets; g++) {
        PERI_TRY(make_tbe(e, c, &e->sets[g]));
        e->n_local += e->sets[g].n_tables;
    }
    return list_local(e);
}

void peri__tables_free(peri_sharded *e)
{
    for (int32_t g = 0; g < e->n_sets; g++) {
        for (int32_t i = 0; e->sets[g].leaves && i < e->sets[g].n_tables; i++)
            peri_tensor_release(e->sets[g].leaves[i]);
        peri__free(e->sets[g].leaves);
        peri_tbe_release(e->sets[g].tbe);
        peri__free(e->sets[g].module_table);
        peri__free(e->sets[g].module_shard);
    }
    peri__free(e->sets);
    peri__free(e->local);
}

/* -- what users do with them --------------------------------------------------------------------------------------- */

int32_t peri_sharded_local_shards(const peri_sharded *e) { return e ? e->n_local : 0; }

peri_status peri_sharded_local_shard(peri_sharded *e, int32_t i, peri_local_shard *out)
{
    PERI_NEED(e, out);
    if (i < 0 || i >= e->n_local)
        return peri__fail(PERI_ERANGE, "peri_sharded_local_shard: piece %d, allowed: 0..%d", i, e->n_local - 1);
    *out = e->local[i];
    return PERI_OK;
}

peri_status peri_sharded_learning_rate_set(peri_sharded *e, int32_t optimizer, double learning_rate)
{
    PERI_NEED(e);
    if (!(learning_rate >= 0) || !isfinite((float)learning_rate)) /* also where this rank has no table of it */
        return peri__fail(PERI_EINVAL, "peri_sharded_learning_rate_set: %g, allowed: finite numbers >= 0",
                          learning_rate);
    if (optimizer < 0 || optimizer >= e->n_optimizers)
        return peri__fail(PERI_ERANGE, "peri_sharded_learning_rate_set: optimizer %d, allowed: 0..%d", optimizer,
                          e->n_optimizers - 1);
    for (int32_t g = 0; g < e->n_sets; g++)
        if (e->sets[g].optimizer == optimizer) PERI_TRY(peri_tbe_learning_rate_set(e->sets[g].tbe, learning_rate));
    e->rates[optimizer].rate = learning_rate;
    return peri__identity_refresh(e);
}

peri_status peri_sharded_time_set(peri_sharded *e, const char *table, int64_t now)
{
    PERI_NEED(e, table);
    int32_t i = 0;
    while (i < e->n_managed && strcmp(e->table_names[peri__managed_time(e, i).table], table) != 0) i++;
    if (i == e->n_managed)
        return peri__fail(PERI_EINVAL, "peri_sharded_time_set: '%s' is no table of raw ids of this module", table);
    if (now < -1 || now > INT32_MAX) /* also where this rank has no map of it */
        return peri__fail(PERI_EINVAL,
                          "peri_sharded_time_set: table '%s': %lld, allowed: 0 to %d, and -1 for the iteration", table,
                          (long long)now, INT32_MAX);
    PERI_TRY(peri__managed_time_set(e, i, now));
    return peri__identity_refresh(e);
}

int64_t peri_sharded_passes(const peri_sharded *e) { return e ? e->passes : 0; }

int64_t peri_sharded_changes(const peri_sharded *e)
{
    int64_t n = 0;
    for (int32_t g = 0; e && g < e->n_sets; g++) n += peri__tbe_change_count(e->sets[g].tbe);
    return n;
}

peri_status peri_sharded_iteration_set(peri_sharded *e, int64_t iteration)
{
    PERI_NEED(e);
    for (int32_t g = 0; g < e->n_sets; g++)
        if (!e->sets[g].dense) PERI_TRY(peri_tbe_iteration_set(e->sets[g].tbe, iteration));
    return PERI_OK;
}
