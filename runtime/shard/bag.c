/* SPDX-License-Identifier: Apache-2.0
 *
 * bag.c: making a sharded EmbeddingBagCollection: plan entries become shards, shards become routes, this rank's shards become table
 * batches. Tables of the same optimizer, dtype and pooling share one table batch, so that a step has one lookup and one update for each of
 * them.
 */
#include "bag.h"

#include "../tensor/jagged_internal.h"

#include <math.h>

/* -- checks ---------------------------------------------------------------------------------------------------------------------- */

static bool small_float(int32_t dtype) { return !dtype || dtype == PERI_F32 || dtype == PERI_F16 || dtype == PERI_BF16; }

static int32_t dtype_of(const peri_sharded_table *table) { return table->dtype ? table->dtype : PERI_F32; }

static peri_status check_dtypes(const char *f, const peri_sharded_table *table)
{
    if (!small_float(table->dtype))
        return peri__fail(PERI_EINVAL, "%s: table '%s': weights of dtype %s (%d), allowed: f32, f16, bf16", f, table->name,
                          peri_dtype_name(table->dtype), table->dtype);
    if (table->compute_kernel == PERI_KERNEL_DENSE && dtype_of(table) != PERI_F32)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s': weights of dtype %s with the compute kernel dense, whose gradients and optimizer are f32; "
                          "allowed: f32, or a fused compute kernel",
                          f, table->name, peri_dtype_name(table->dtype));
    return PERI_OK;
}

/** Optimizers that look at more than the rows of a batch can be sharded only where all that they look at is on one rank. */
static peri_status check_whole(const char *f, const peri_sharded_table *table, const peri_tbe_optimizer *o)
{
    bool rows_cut = table->sharding_type != PERI_TABLE_WISE && table->sharding_type != PERI_COLUMN_WISE;
    if (o->kind == PERI_TBE_SHAMPOO && rows_cut)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s': shampoo needs all rows of its columns on one rank: allowed are table-wise and column-wise "
                          "sharding (one preconditioner for each block of columns)",
                          f, table->name);
    if (peri__counter_wants_most(o) && rows_cut && table->sharding_type != PERI_DATA_PARALLEL)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s': max_counter, which learning_rate_mode tail_id_lr_* and tail_id_threshold as a ratio ask for, "
                          "needs all rows on one rank: allowed are table-wise, column-wise and data-parallel sharding",
                          f, table->name);
    if (o->kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD && table->sharding_type == PERI_COLUMN_WISE)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s': emainplace_rowwise_adagrad needs whole rows, whose right half follows the left one: allowed are "
                          "table-wise, row-wise and data-parallel sharding",
                          f, table->name);
    return PERI_OK;
}

static peri_status check_config(const peri_sharded_ebc_config *c)
{
    static const char *const f = "peri_sharded_ebc_new";
    if (c->gradient_division < 0 || c->gradient_division > PERI_DIVISION_OFF)
        return peri__fail(PERI_EINVAL, "%s: gradient_division %d, allowed: PERI_DIVISION_*", f, c->gradient_division);
    if (!small_float(c->output_dtype))
        return peri__fail(PERI_EINVAL, "%s: output_dtype %s (%d), allowed: f32, f16, bf16", f, peri_dtype_name(c->output_dtype),
                          c->output_dtype);
    if (!c->group || !c->device) return peri__fail(PERI_EINVAL, "%s: a group and a device are needed", f);
    if (c->n_tables < 1 || c->n_features < 1)
        return peri__fail(PERI_EINVAL, "%s: %d tables and %d features, allowed: 1 or more", f, c->n_tables, c->n_features);
    for (int32_t t = 0; t < c->n_tables; t++) {
        const peri_sharded_table *table = &c->tables[t];
        if (!table->name || !*table->name) return peri__fail(PERI_EINVAL, "%s: table %d has no name", f, t);
        for (int32_t i = 0; i < t; i++)
            if (!strcmp(c->tables[i].name, table->name)) return peri__fail(PERI_EINVAL, "%s: two tables are called '%s'", f, table->name);
        if (table->n_features < 1) return peri__fail(PERI_EINVAL, "%s: table '%s' has no features", f, table->name);
        for (int32_t i = 0; i < table->n_features; i++)
            if (table->features[i] < 0 || table->features[i] >= c->n_features)
                return peri__fail(PERI_EINVAL, "%s: table '%s': feature number %d, allowed: 0..%d", f, table->name, table->features[i],
                                  c->n_features - 1);
        if (table->pooling != PERI_POOLING_SUM && table->pooling != PERI_POOLING_MEAN)
            return peri__fail(PERI_EINVAL, "%s: table '%s': pooling %d, allowed: sum, mean", f, table->name, table->pooling);
        if (table->compute_kernel != PERI_KERNEL_DENSE && table->compute_kernel != PERI_KERNEL_FUSED)
            return peri__fail(PERI_EINVAL, "%s: table '%s': compute kernel %d, allowed: dense, fused", f, table->name,
                              table->compute_kernel);
        if (table->bounds_check < PERI_BOUNDS_FATAL || table->bounds_check > PERI_BOUNDS_NONE)
            return peri__fail(PERI_EINVAL, "%s: table '%s': bounds_check %d, allowed: %d..%d", f, table->name, table->bounds_check,
                              PERI_BOUNDS_FATAL, PERI_BOUNDS_NONE);
        PERI_TRY(check_dtypes(f, table));
        if (table->compute_kernel == PERI_KERNEL_FUSED && (table->optimizer < 0 || table->optimizer >= c->n_optimizers))
            return peri__fail(PERI_EINVAL, "%s: table '%s': optimizer number %d, allowed: 0..%d", f, table->name, table->optimizer,
                              c->n_optimizers - 1);
        if (table->compute_kernel == PERI_KERNEL_FUSED) PERI_TRY(check_whole(f, table, &c->optimizers[table->optimizer]));
        if (table->cache && (table->compute_kernel != PERI_KERNEL_FUSED || table->sharding_type == PERI_DATA_PARALLEL))
            return peri__fail(PERI_EINVAL, "%s: table '%s': a cache is for fused shards; replicas and dense tables stay in memory", f,
                              table->name);
    }
    return PERI_OK;
}

/* -- names, shards, routes --------------------------------------------------------------------------------------------------------- */

/** Copy names into one block. */
static peri_status copy_names(peri_sharded_ebc *e, const peri_sharded_ebc_config *c)
{
    size_t bytes = 0;
    for (int32_t i = 0; i < c->n_tables; i++) bytes += strlen(c->tables[i].name) + 1;
    for (int32_t i = 0; i < c->n_features; i++) bytes += strlen(c->features[i]) + 1;
    e->text = peri__alloc(bytes);
    e->table_names = peri__alloc(sizeof *e->table_names * (size_t)c->n_tables);
    e->feature_names = peri__alloc(sizeof *e->feature_names * (size_t)c->n_features);
    if (!e->text || !e->table_names || !e->feature_names) return PERI_ENOMEM;
    char *at = e->text;
    for (int32_t i = 0; i < c->n_tables + c->n_features; i++) {
        const char *name = i < c->n_tables ? c->tables[i].name : c->features[i - c->n_tables];
        *(i < c->n_tables ? &e->table_names[i] : &e->feature_names[i - c->n_tables]) = at;
        at = stpcpy(at, name) + 1;
    }
    return PERI_OK;
}

/** What gradients of a table are divided by before ranks add them up. The gradient of a replica is a mean over ranks in any case, as
 *  DistributedDataParallel makes it; a dense replica's is averaged by whoever reduces the dense part. */
static double gradient_divisor(const peri_sharded_ebc *e, const peri_sharded_table *table)
{
    if (table->sharding_type == PERI_DATA_PARALLEL) return table->compute_kernel == PERI_KERNEL_DENSE ? 1 : e->world_size;
    return e->division;
}

/** Whether numbers are the same after either. */
static bool same_codec(const peri_codec *a, const peri_codec *b)
{
    peri_codec_config x, y;
    if (!a || !b) return a == b;
    peri_codec_describe(a, &x);
    peri_codec_describe(b, &y);
    return x.format == y.format && x.rounding == y.rounding && x.exponent_bits == y.exponent_bits && x.exponent_bias == y.exponent_bias &&
           x.row_dim == y.row_dim && x.loss_scale == y.loss_scale && x.seed == y.seed;
}

/** Lane 0 is for rows that are exchanged, lane 1 for rows that are exchanged and added up; one lane will do where their codecs are alike.
 *  Returns the lane of row-wise tables. */
static int32_t choose_lanes(peri_sharded_ebc *e, const peri_sharded_ebc_config *c)
{
    const peri_sharded_codecs *given[PERI__LANES] = {&c->all_to_all, &c->reduce_scatter};
    for (int32_t lane = 0; lane < PERI__LANES; lane++)
        for (int way = 0; way < 2; way++) {
            peri_codec *codec = way ? given[lane]->backward : given[lane]->forward;
            if (!codec || peri_codec_wire_dtype(codec) == PERI_F32 || e->world_size == 1) continue;
            peri_codec_retain(codec);
            e->lanes[lane].codec[way] = codec;
        }
    return same_codec(e->lanes[0].codec[0], e->lanes[1].codec[0]) && same_codec(e->lanes[0].codec[1], e->lanes[1].codec[1]) ? 0 : 1;
}

static peri_status cut_tables(peri_sharded_ebc *e, const peri_sharded_ebc_config *c)
{
    int32_t n_features = 0, at = 0;
    for (int32_t t = 0; t < c->n_tables; t++) n_features += c->tables[t].n_features;
    e->tables = peri__alloc_zero(sizeof *e->tables * (size_t)c->n_tables);
    e->features = peri__alloc(sizeof *e->features * (size_t)n_features);
    e->feature_key = peri__alloc(sizeof *e->feature_key * (size_t)c->n_features);
    e->divisor = peri__alloc(sizeof *e->divisor * 2 * (size_t)c->n_tables);
    e->scratch = peri__alloc(sizeof *e->scratch * 3 * (size_t)c->n_features);
    if (!e->tables || !e->features || !e->feature_key || !e->divisor || !e->scratch) return PERI_ENOMEM;
    e->wire_i32 = true;
    int32_t summed = choose_lanes(e, c);
    for (int32_t t = 0; t < c->n_tables; t++) {
        const peri_sharded_table *from = &c->tables[t];
        peri__route_table *to = &e->tables[t];
        *to = (peri__route_table){.name = e->table_names[t], .rows = from->rows, .cols = from->cols, .n_features = from->n_features,
                                  .features = e->features + at, .data_parallel = from->sharding_type == PERI_DATA_PARALLEL,
                                  .lane = from->sharding_type == PERI_ROW_WISE ? summed : 0, .bounds_check = from->bounds_check};
        memcpy(e->features + at, from->features, sizeof *e->features * (size_t)from->n_features);
        at += from->n_features;
        if (!to->data_parallel) e->lanes[to->lane].used = true;
        e->divisor[t] = gradient_divisor(e, from);
        e->divisor[c->n_tables + t] = e->lanes[to->lane].codec[1] ? 1 : e->divisor[t];
        int32_t capacity = (int32_t)peri__max(from->n_ranks, e->world_size);
        to->shards = peri__alloc(sizeof *to->shards * (size_t)capacity);
        if (!to->shards) return PERI_ENOMEM;
        peri_sharding sharding = {.type = from->sharding_type, .world_size = e->world_size,
                                  .local_size = c->local_size ? c->local_size : e->world_size,
                                  .n_ranks = from->n_ranks, .ranks = from->ranks, .sizes = from->sizes, .table = from->name,
                                  .rows = from->rows, .cols = from->cols};
        PERI_TRY(peri_sharding_shards(&sharding, to->shards, capacity, &to->n_shards));
        e->any_mean = e->any_mean || (from->pooling == PERI_POOLING_MEAN && !to->data_parallel);
        for (int32_t s = 0; s < to->n_shards; s++) e->wire_i32 = e->wire_i32 && to->shards[s].rows <= INT32_MAX;
    }
    return PERI_OK;
}

/** The learning rates, and whom they are for. */
static peri_status take_rates(peri_sharded_ebc *e, const peri_sharded_ebc_config *c)
{
    e->rates = peri__alloc(sizeof *e->rates * (size_t)peri__max(1, c->n_optimizers));
    if (!e->rates) return PERI_ENOMEM;
    for (int32_t o = 0; o < c->n_optimizers; o++) e->rates[o] = (peri__rate){.rate = c->optimizers[o].learning_rate, .table = -1};
    for (int32_t t = c->n_tables; t-- > 0;)
        if (c->tables[t].compute_kernel == PERI_KERNEL_FUSED) e->rates[c->tables[t].optimizer].table = t;
    return PERI_OK;
}

/* -- table batches ---------------------------------------------------------------------------------------------------------------- */

/** The group of a table, found or appended; -1: no memory. */
static int32_t group_of(peri_sharded_ebc *e, const peri_sharded_table *table, bool replica)
{
    bool dense = table->compute_kernel == PERI_KERNEL_DENSE, cached = table->cache != NULL;
    bool mean = table->pooling == PERI_POOLING_MEAN && !replica;
    int32_t optimizer = dense ? -1 : table->optimizer, dtype = dtype_of(table);
    for (int32_t g = 0; g < e->n_groups; g++)
        if (e->groups[g].optimizer == optimizer && e->groups[g].dtype == dtype && e->groups[g].replica == replica &&
            e->groups[g].cached == cached && e->groups[g].mean == mean)
            return g;
    peri__group_of_tables *more = peri__realloc(e->groups, sizeof *more * (size_t)(e->n_groups + 1));
    if (!more) return -1;
    e->groups = more;
    e->groups[e->n_groups] = (peri__group_of_tables){.optimizer = optimizer, .dtype = dtype, .dense = dense, .replica = replica,
                                                    .cached = cached, .mean = mean};
    return e->n_groups++;
}

static peri_status group_add(peri__group_of_tables *g, int32_t table, int32_t shard)
{
    size_t n = (size_t)g->n_tables + 1;
    int32_t *tables = peri__realloc(g->slots_table, sizeof *tables * n);
    if (tables) g->slots_table = tables;
    int32_t *shards = tables ? peri__realloc(g->slots_shard, sizeof *shards * n) : NULL;
    if (!shards) return PERI_ENOMEM;
    g->slots_shard = shards;
    g->slots_table[g->n_tables] = table;
    g->slots_shard[g->n_tables++] = shard;
    return PERI_OK;
}

/** The shard that a group's table holds; a replica is one shard of everything. */
static peri_shard shard_of(const peri_sharded_ebc *e, const peri__group_of_tables *g, int32_t i)
{
    const peri__route_table *table = &e->tables[g->slots_table[i]];
    if (g->slots_shard[i] >= 0) return table->shards[g->slots_shard[i]];
    return (peri_shard){.rows = table->rows, .cols = table->cols, .rank = e->rank};
}

/** Make the table batch of one group. Shards pool sums, with the factors of whole bags where the table's pooling is the mean. */
static peri_status make_tbe(peri_sharded_ebc *e, const peri_sharded_ebc_config *c, peri__group_of_tables *g)
{
    peri_table_config *tables = peri__alloc_zero(sizeof *tables * (size_t)g->n_tables);
    peri_cache_params *caches = peri__alloc_zero(sizeof *caches * (size_t)g->n_tables);
    if (!tables || !caches) {
        peri__free(tables);
        peri__free(caches);
        return PERI_ENOMEM;
    }
    for (int32_t i = 0; i < g->n_tables; i++) {
        const peri_sharded_table *from = &c->tables[g->slots_table[i]];
        peri_shard shard = shard_of(e, g, i);
        tables[i] = (peri_table_config){.name = from->name, .rows = shard.rows, .cols = shard.cols, .row_offset = shard.row_offset,
                                        .col_offset = shard.col_offset, .total_rows = from->rows, .total_cols = from->cols,
                                        .pooling = g->replica ? from->pooling : PERI_POOLING_SUM, .init = from->init,
                                        .init_a = from->init_a, .init_b = from->init_b};
        if (g->cached) caches[i] = *from->cache;
    }
    peri_tbe_config config = {.device = c->device, .dtype = g->dtype, .bounds_check = PERI_BOUNDS_NONE, .n_tables = g->n_tables,
                              .tables = tables, .n_features = c->n_features, .features = c->features, .seed = c->seed,
                              .caches = g->cached ? caches : NULL};
    peri_status status = PERI_OK;
    if (g->dense) status = peri_tbe_optimizer_default(PERI_TBE_NONE, &config.optimizer);
    else config.optimizer = c->optimizers[g->optimizer];
    if (status >= 0) status = peri_tbe_new(&config, &g->tbe);
    peri__free(tables);
    peri__free(caches);
    PERI_TRY(status);
    if (!g->dense) return PERI_OK;
    g->leaves = peri__alloc_zero(sizeof *g->leaves * (size_t)g->n_tables);
    if (!g->leaves) return PERI_ENOMEM;
    for (int32_t i = 0; i < g->n_tables; i++) PERI_TRY(peri_tbe_leaf(g->tbe, i, &g->leaves[i]));
    return PERI_OK;
}

static peri_status make_groups(peri_sharded_ebc *e, const peri_sharded_ebc_config *c)
{
    for (int32_t t = 0; t < c->n_tables; t++) {
        bool replica = e->tables[t].data_parallel;
        int32_t g = replica ? group_of(e, &c->tables[t], true) : 0;
        if (g < 0) return PERI_ENOMEM;
        if (replica) PERI_TRY(group_add(&e->groups[g], t, -1));
        for (int32_t s = 0; s < e->tables[t].n_shards; s++) {
            if (e->tables[t].shards[s].rank != e->rank || e->tables[t].shards[s].rows == 0) continue;
            g = group_of(e, &c->tables[t], false);
            if (g < 0) return PERI_ENOMEM;
            PERI_TRY(group_add(&e->groups[g], t, s));
        }
    }
    for (int32_t g = 0; g < e->n_groups; g++) {
        PERI_TRY(make_tbe(e, c, &e->groups[g]));
        e->n_local += e->groups[g].n_tables;
    }
    e->local = peri__alloc_zero(sizeof *e->local * (size_t)peri__max(1, e->n_local));
    if (!e->local) return PERI_ENOMEM;
    int32_t n = 0;
    for (int32_t t = 0; t < c->n_tables; t++)
        for (int32_t s = -1; s < e->tables[t].n_shards; s++)
            for (int32_t g = 0; g < e->n_groups; g++)
                for (int32_t i = 0; i < e->groups[g].n_tables; i++) {
                    peri__group_of_tables *group = &e->groups[g];
                    if (group->slots_table[i] != t || group->slots_shard[i] != s) continue;
                    e->local[n++] = (peri_local_shard){.shard = shard_of(e, group, i), .tbe = group->tbe, .tbe_table = i, .table = t,
                                                       .dense = group->dense, .replica = group->replica};
                }
    return PERI_OK;
}

peri_status peri_sharded_ebc_new(const peri_sharded_ebc_config *c, peri_sharded_ebc **out)
{
    PERI_NEED(c);
    PERI_NEED(out);
    PERI_TRY(check_config(c));
    peri_sharded_ebc *e = peri__alloc_zero(sizeof *e);
    if (!e) return PERI_ENOMEM;
    peri__refs_init(&e->refs);
    peri__object_count(1);
    peri_group_retain(c->group);
    e->group = c->group;
    e->device = c->device;
    e->rank = peri_group_rank(c->group);
    e->world_size = peri_group_size(c->group);
    e->n_tables = c->n_tables;
    e->n_features = c->n_features;
    e->n_optimizers = c->n_optimizers;
    e->weighted = c->weighted;
    e->output_dtype = c->output_dtype ? c->output_dtype : PERI_F32;
    bool divide = c->gradient_division ? c->gradient_division == PERI_DIVISION_ON : peri_exchange_division(c->group);
    e->division = divide ? e->world_size : 1;
    peri_status status;
    PERI_TRY_GOTO(copy_names(e, c), out);
    PERI_TRY_GOTO(cut_tables(e, c), out);
    PERI_TRY_GOTO(peri__routes_new(e->world_size, e->tables, e->n_tables, e->n_features, &e->routes), out);
    PERI_TRY_GOTO(take_rates(e, c), out);
    PERI_TRY_GOTO(peri__identity_new(e, c), out);
    PERI_TRY_GOTO(make_groups(e, c), out);
    PERI_TRY_GOTO(peri__bag_files(e, c), out);
    *out = e;
out:
    if (status < 0) peri_sharded_ebc_release(e);
    return status;
}

void peri_sharded_ebc_retain(peri_sharded_ebc *e) { peri__refs_add(&e->refs); }

void peri_sharded_ebc_release(peri_sharded_ebc *e)
{
    if (!e || !peri__refs_drop(&e->refs)) return;
    for (int32_t g = 0; g < e->n_groups; g++) {
        for (int32_t i = 0; e->groups[g].leaves && i < e->groups[g].n_tables; i++) peri_tensor_release(e->groups[g].leaves[i]);
        peri__free(e->groups[g].leaves);
        peri_tbe_release(e->groups[g].tbe);
        peri__free(e->groups[g].slots_table);
        peri__free(e->groups[g].slots_shard);
    }
    for (int32_t t = 0; e->tables && t < e->n_tables; t++) peri__free(e->tables[t].shards);
    for (int32_t lane = 0; lane < PERI__LANES; lane++)
        for (int way = 0; way < 2; way++) peri_codec_release(e->lanes[lane].codec[way]);
    peri__routes_free(e->routes);
    peri__home_release(e->home);
    peri__bag_layout_release(e->layout);
    void *parts[] = {e->found_path, e->groups, e->tables, e->features, e->feature_key, e->scratch, e->divisor, e->local, e->text,
                     e->identity_text, e->rates,
                     (void *)e->table_names,
                     (void *)e->feature_names};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) peri__free(parts[i]);
    peri_group_release(e->group);
    peri__object_count(-1);
    peri__free(e);
}

/* -- looking --------------------------------------------------------------------------------------------------------------------- */

int64_t peri_sharded_ebc_columns(const peri_sharded_ebc *e) { return e->routes->out_cols; }
int32_t peri_sharded_ebc_local_shards(const peri_sharded_ebc *e) { return e->n_local; }

peri_status peri_sharded_ebc_local_shard(peri_sharded_ebc *e, int32_t i, peri_local_shard *out)
{
    PERI_NEED(e);
    PERI_NEED(out);
    if (i < 0 || i >= e->n_local)
        return peri__fail(PERI_ERANGE, "peri_sharded_ebc_local_shard: piece %d, allowed: 0..%d", i, e->n_local - 1);
    *out = e->local[i];
    return PERI_OK;
}

peri_status peri_sharded_ebc_learning_rate_set(peri_sharded_ebc *e, int32_t optimizer, double learning_rate)
{
    PERI_NEED(e);
    if (!(learning_rate >= 0) || !isfinite(learning_rate)) /* also where this rank has no table of it */
        return peri__fail(PERI_EINVAL, "peri_sharded_ebc_learning_rate_set: %g, allowed: finite numbers >= 0", learning_rate);
    if (optimizer < 0 || optimizer >= e->n_optimizers)
        return peri__fail(PERI_ERANGE, "peri_sharded_ebc_learning_rate_set: optimizer %d, allowed: 0..%d", optimizer, e->n_optimizers - 1);
    for (int32_t g = 0; g < e->n_groups; g++)
        if (e->groups[g].optimizer == optimizer) PERI_TRY(peri_tbe_learning_rate_set(e->groups[g].tbe, learning_rate));
    e->rates[optimizer].rate = learning_rate;
    return peri__identity_refresh(e);
}

peri_status peri_sharded_ebc_iteration_set(peri_sharded_ebc *e, int64_t iteration)
{
    PERI_NEED(e);
    for (int32_t g = 0; g < e->n_groups; g++)
        if (!e->groups[g].dense) PERI_TRY(peri_tbe_iteration_set(e->groups[g].tbe, iteration));
    return PERI_OK;
}

/* -- layouts of batches ------------------------------------------------------------------------------------------------------------- */

/** Where each feature stands among the input's keys. */
static peri_status find_features(peri_sharded_ebc *e, const peri_keys *keys)
{
    uint64_t hash = peri_keys_hash(keys) | 1;
    if (hash == e->keys_hash) return PERI_OK;
    e->keys_hash = 0;
    for (int32_t f = 0; f < e->n_features; f++) {
        e->feature_key[f] = peri_keys_find(keys, e->feature_names[f]);
        if (e->feature_key[f] < 0) {
            char known[300] = "";
            for (int32_t k = 0; k < peri_keys_count(keys) && strlen(known) < 200; k++) {
                if (k) strcat(known, ", ");
                strncat(known, peri_keys_name(keys, k), 60);
            }
            return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: feature '%s' is not among the keys of the input: %s%s",
                              e->feature_names[f], known, strlen(known) >= 200 ? ", ..." : "");
        }
    }
    e->keys_hash = hash;
    return PERI_OK;
}

peri_status peri__bag_home(peri_sharded_ebc *e, peri_kjt *kjt, peri__home **out)
{
    peri_kjt_desc desc;
    peri_kjt_describe(kjt, &desc);
    PERI_TRY(find_features(e, peri_kjt_keys(kjt)));
    if (desc.variable_stride && !desc.has_inverse)
        return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: an input with a variable batch per feature needs inverse indices");
    int64_t *first = e->scratch, *bags = first + e->n_features, *inverse = bags + e->n_features;
    const int64_t *start = peri_kjt_lengths_offset_per_key(kjt), *stride = peri_kjt_stride_per_key(kjt);
    for (int32_t f = 0; f < e->n_features; f++) {
        first[f] = start[e->feature_key[f]];
        bags[f] = stride[e->feature_key[f]];
        if (!desc.variable_stride) continue;
        int32_t row = peri_keys_find(peri_kjt_inverse_keys(kjt), e->feature_names[f]);
        if (row < 0)
            return peri__fail(PERI_EINVAL, "peri_sharded_ebc_input_dist: feature '%s' has no inverse indices", e->feature_names[f]);
        inverse[f] = row * desc.stride;
    }
    peri__home *h = e->home;
    size_t bytes = sizeof *first * (size_t)e->n_features;
    if (!h || desc.variable_stride || h->variable || h->rows != desc.stride || memcmp(h->feature_first, first, bytes) != 0 ||
        memcmp(h->feature_bags, bags, bytes) != 0) {
        PERI_TRY(peri__home_new(e->routes, e->rank, first, bags, desc.stride, desc.variable_stride ? inverse : NULL, e->divisor,
                                e->divisor + e->n_tables, e->device, &h));
        peri__home_release(e->home);
        e->home = h;
    }
    peri__refs_add(&h->refs);
    *out = h;
    return PERI_OK;
}

/** The blocks of one group: its replicas over the input, or its shards over what was received. */
static peri_status group_blocks(const peri_sharded_ebc *e, const peri__group_of_tables *g, const peri__home *home, const peri__owner *owner,
                                peri_tbe_blocks **out)
{
    const peri__routes *r = e->routes;
    int32_t most = g->replica ? r->n_replicas : owner->n_blocks, n = 0;
    peri_tbe_block *blocks = peri__alloc_zero(sizeof *blocks * (size_t)peri__max(1, most));
    if (!blocks) return PERI_ENOMEM;
    for (int32_t k = 0; k < most; k++) {
        const peri__replica *replica = g->replica ? &r->replicas[k] : NULL;
        const peri__block *b = g->replica ? NULL : &owner->blocks[k];
        int32_t table = replica ? replica->table : r->slots[b->slot].table, shard = replica ? -1 : r->slots[b->slot].shard, place = 0;
        while (place < g->n_tables && (g->slots_table[place] != table || g->slots_shard[place] != shard)) place++;
        if (place == g->n_tables) continue;
        if (replica)
            blocks[n++] = (peri_tbe_block){.first_bag = home->feature_first[replica->feature], .bags = home->feature_bags[replica->feature],
                                           .out_offset = home->replica_offset[k], .out_stride = replica->cols, .table = place,
                                           .feature = replica->feature};
        else
            blocks[n++] = (peri_tbe_block){.first_bag = b->first_bag, .bags = b->bags, .out_offset = b->out_offset,
                                           .out_stride = b->out_stride, .table = place, .feature = r->slots[b->slot].feature};
    }
    peri_status status = peri_tbe_blocks_new(g->tbe, blocks, n, out);
    peri__free(blocks);
    return status;
}

/** What the codecs make of this batch's rows. */
static peri_status make_contexts(const peri_sharded_ebc *e, peri__bag_layout *l)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++)
        for (int way = 0; way < 2; way++)
            for (int side = 0; side < PERI__SIDES && e->lanes[lane].codec[way]; side++) {
                const int64_t *splits = side == PERI__HOME_SIDE ? l->home->rank_out : l->owner->source_out;
                PERI_TRY(peri_codec_context_new(e->lanes[lane].codec[way], splits + lane * e->world_size, e->world_size,
                                                &l->contexts[lane][way][side]));
            }
    return PERI_OK;
}

peri_status peri__bag_layout_new(peri_sharded_ebc *e, peri__home *home, int64_t *counts, peri__bag_layout **out)
{
    int32_t streams = e->routes->rank_wire[e->rank + 1] - e->routes->rank_wire[e->rank];
    peri__bag_layout *l = e->layout;
    if (l && l->home == home && !memcmp(l->owner->counts, counts, sizeof *counts * (size_t)streams * (size_t)e->world_size)) {
        peri__refs_add(&l->refs);
        peri__free(counts);
        *out = l;
        return PERI_OK;
    }
    l = peri__alloc_zero(sizeof *l);
    if (!l) return PERI_ENOMEM;
    peri__refs_init(&l->refs);
    peri__refs_add(&home->refs);
    l->home = home;
    l->n_groups = e->n_groups;
    l->blocks = peri__alloc_zero(sizeof *l->blocks * (size_t)peri__max(1, e->n_groups));
    peri_status status = l->blocks ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) status = peri__owner_new(e->routes, e->rank, counts, home->own_out + home->replica_out, &l->owner);
    bool taken = status >= 0;
    if (status >= 0) status = make_contexts(e, l);
    for (int32_t g = 0; g < e->n_groups && status >= 0; g++) status = group_blocks(e, &e->groups[g], home, l->owner, &l->blocks[g]);
    if (status < 0) {
        if (taken) l->owner->counts = NULL; /* still the caller's */
        peri__bag_layout_release(l);
        return status;
    }
    peri__bag_layout_release(e->layout);
    peri__refs_add(&l->refs);
    e->layout = l;
    *out = l;
    return PERI_OK;
}

void peri__bag_layout_release(peri__bag_layout *l)
{
    if (!l || !peri__refs_drop(&l->refs)) return;
    for (int32_t g = 0; l->blocks && g < l->n_groups; g++) peri_tbe_blocks_release(l->blocks[g]);
    peri__free(l->blocks);
    for (int32_t i = 0; i < PERI__LANES * 2 * PERI__SIDES; i++) peri_codec_context_release((&l->contexts[0][0][0])[i]);
    peri__owner_free(l->owner);
    peri__home_release(l->home);
    peri__free(l);
}
