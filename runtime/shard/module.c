/* SPDX-License-Identifier: Apache-2.0
 *
 * module.c: making a sharded module: plan entries become shards, shards become routes, this rank's shards become table
 * batches (tables.c).
 */
#include "module.h"

#include "../base/tune.h"
#include "../tensor/jagged_internal.h"

#include <math.h>
#include <stdlib.h>

/* -- checks -------------------------------------------------------------------------------------------------------- */

static peri_status check_dtypes(const char *f, const peri_sharded_table *table)
{
    if (table->compute_kernel == PERI_KERNEL_QUANT && peri__rows_are_bytes(table->dtype)) return PERI_OK;
    if (table->dtype && !peri__small_float(table->dtype))
        return peri__fail(PERI_EINVAL, "%s: table '%s': weights of dtype %s (%d), allowed: f32, f16, bf16", f,
                          table->name, peri_dtype_name(table->dtype), table->dtype);
    if (table->compute_kernel == PERI_KERNEL_DENSE && table->dtype != PERI_F32)
        return peri__fail(
            PERI_EUNSUPPORTED,
            "%s: table '%s': weights of dtype %s with the compute kernel dense, whose gradients and optimizer are f32; "
            "allowed: f32, or a fused compute kernel",
            f, table->name, peri_dtype_name(table->dtype));
    return PERI_OK;
}

/** The optimizer that is fused with the updates of a table; NULL: none is. */
static const peri_tbe_optimizer_config *fused_optimizer(const peri_sharded_config *c, const peri_sharded_table *table)
{
    return table->compute_kernel == PERI_KERNEL_FUSED ? &c->optimizers[table->optimizer] : NULL;
}

/** Whether the table's sharding type has some of the facts @facts (PERI_SHARDING_*). */
static bool has_facts(const peri_sharded_table *table, int32_t facts)
{
    return peri_sharding_type_facts(table->sharding_type) & facts;
}

/** Optimizers that look at more than the rows of a batch can be sharded only where all that they look at is on one
 *  rank. */
static peri_status check_whole_table_optimizer(const char *f, const peri_sharded_table *table,
                                               const peri_tbe_optimizer_config *o)
{
    if (peri__optimizer_keeps(o, PERI_STATE_SQUARE) &&
        has_facts(table, PERI_SHARDING_CUTS_ROWS | PERI_SHARDING_REPLICA))
        return peri__fail(
            PERI_EUNSUPPORTED,
            "%s: table '%s': shampoo needs all rows of its columns on one rank: allowed are table-wise and column-wise "
            "sharding (one preconditioner for each block of columns)",
            f, table->name);
    if (peri__optimizer_keeps(o, PERI_STATE_SCALAR) && has_facts(table, PERI_SHARDING_CUTS_ROWS))
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s': max_counter, which learning_rate_mode tail_id_lr_* and tail_id_threshold as "
                          "a ratio ask for, "
                          "needs all rows on one rank: allowed are table-wise, column-wise and data-parallel sharding",
                          f, table->name);
    if (o->kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD && has_facts(table, PERI_SHARDING_CUTS_COLUMNS))
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: table '%s': emainplace_rowwise_adagrad needs whole rows, whose right half follows the "
                          "left one: allowed are "
                          "table-wise, row-wise and data-parallel sharding",
                          f, table->name);
    return PERI_OK;
}

static peri_status check_type_and_kernel(const char *f, const peri_sharded_table *table)
{
    if (table->sharding_type < 0 || table->sharding_type >= PERI_SHARDING_TYPE_COUNT)
        return peri__fail(PERI_EINVAL, "%s: table '%s': %d is no sharding type", f, table->name, table->sharding_type);
    if (table->compute_kernel < PERI_KERNEL_FUSED || table->compute_kernel > PERI_KERNEL_QUANT)
        return peri__fail(PERI_EINVAL, "%s: table '%s': compute kernel %d, allowed: fused, dense, quant", f,
                          table->name, table->compute_kernel);
    return PERI_OK;
}

/** Whether a table can be sharded and kept like that; @o: its fused optimizer, NULL without one. */
static peri_status check_training(const char *f, const peri_sharded_table *table, const peri_tbe_optimizer_config *o)
{
    PERI_TRY(check_dtypes(f, table));
    if (o) PERI_TRY(peri__optimizer_kind_check(f, o->kind));
    if (o) PERI_TRY(check_whole_table_optimizer(f, table, o));
    if (table->mapped && (table->cache || table->compute_kernel == PERI_KERNEL_DENSE))
        return peri__fail(PERI_EINVAL, "%s: table '%s': only fused and quantized shards without a cache are mapped", f,
                          table->name);
    if (table->cache && (table->compute_kernel != PERI_KERNEL_FUSED || has_facts(table, PERI_SHARDING_REPLICA)))
        return peri__fail(PERI_EINVAL,
                          "%s: table '%s': a cache is for fused shards; replicas and dense tables stay in memory", f,
                          table->name);
    return PERI_OK;
}

/** A table's own structures as today's. */
static peri_status table_of_today(peri_sharded_table *t, const char *f, peri_cache_config *cache,
                              peri_sharded_collision *collision)
{
    if (t->cache) PERI_TRY(peri__struct_take(cache, sizeof *cache, t->cache, f, "peri_cache_config"));
    if (t->collision)
        PERI_TRY(peri__struct_take(collision, sizeof *collision, t->collision, f, "peri_sharded_collision"));
    t->cache = t->cache ? cache : NULL;
    t->collision = t->collision ? collision : NULL;
    return PERI_OK;
}

peri_status peri_sharded_table_check(const peri_sharded_table *table, const peri_tbe_optimizer_config *optimizer)
{
    PERI_TAKE(peri_sharded_table, table);
    PERI_TAKE(peri_tbe_optimizer_config, optimizer);
    PERI_NEED(table->name);
    peri_cache_config cache;
    peri_sharded_collision collision;
    PERI_TRY(table_of_today(&table_now, __func__, &cache, &collision));
    const peri_tbe_optimizer_config *fused = table->compute_kernel == PERI_KERNEL_FUSED ? optimizer : NULL;
    PERI_TRY(check_type_and_kernel("peri_sharded_new", table));
    PERI_TRY(check_training("peri_sharded_new", table, fused));
    peri_table_config whole = {
        .size = sizeof whole, .name = table->name, .rows = table->rows, .cols = table->cols, .init = PERI_INIT_NONE};
    peri_tbe_config config = {.size = sizeof config,
                              .dtype = table->dtype,
                              .n_tables = 1,
                              .tables = &whole,
                              .caches = table->cache,
                              .mapped = table->mapped};
    config.optimizer = fused ? fused : &peri__no_optimizer;
    return peri__tbe_check(&config);
}

static const peri__kind *const kinds[PERI_SHARDED_KIND_COUNT] = {
    [PERI_SHARDED_EBC] = &peri__pooled, [PERI_SHARDED_EC] = &peri__sequence};

/** What becomes of the rows of a table must be of the module's kind. */
static peri_status check_rows(const char *f, const peri_sharded_config *c, const peri_sharded_table *table)
{
    if (!kinds[c->kind]->by_id) {
        if (table->pooling == PERI_POOLING_SUM || table->pooling == PERI_POOLING_MEAN) return PERI_OK;
        return peri__fail(PERI_EINVAL, "%s: table '%s': pooling %d, allowed: sum, mean", f, table->name,
                          table->pooling);
    }
    if (table->pooling != PERI_POOLING_NONE)
        return peri__fail(PERI_EINVAL, "%s: table '%s': pooling %d, allowed: none", f, table->name, table->pooling);
    if (c->weighted) return peri__fail(PERI_EINVAL, "%s: rows of ids are not weighted; allowed: false", f);
    return PERI_OK;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/** No two tables have one name. There may be 100,000 of them, so their names are sorted. */
static peri_status check_names(const char *f, const peri_sharded_config *c)
{
    PERI__SCRATCH const char **names = peri__alloc(sizeof *names * (size_t)c->n_tables);
    if (!names) return PERI_ENOMEM;
    for (int32_t t = 0; t < c->n_tables; t++) {
        names[t] = c->tables[t].name;
        if (!names[t] || !*names[t]) return peri__fail(PERI_EINVAL, "%s: table %d has no name", f, t);
    }
    qsort(names, (size_t)c->n_tables, sizeof *names, by_text);
    for (int32_t t = 1; t < c->n_tables; t++)
        if (!strcmp(names[t - 1], names[t]))
            return peri__fail(PERI_EINVAL, "%s: two tables are called '%s'", f, names[t]);
    return PERI_OK;
}

static peri_status check_config(const peri_sharded_config *c)
{
    static const char *const f = "peri_sharded_new";
    if (c->gradient_division < 0 || c->gradient_division > PERI_DIVISION_OFF)
        return peri__fail(PERI_EINVAL, "%s: gradient_division %d, allowed: PERI_DIVISION_*", f, c->gradient_division);
    if (c->output_dtype && !peri__small_float(c->output_dtype))
        return peri__fail(PERI_EINVAL, "%s: output_dtype %s (%d), allowed: f32, f16, bf16", f,
                          peri_dtype_name(c->output_dtype), c->output_dtype);
    if (c->kind < 0 || c->kind >= PERI_SHARDED_KIND_COUNT)
        return peri__fail(PERI_EINVAL, "%s: kind %d, allowed: 0..%d (PERI_SHARDED_*)", f, c->kind,
                          PERI_SHARDED_KIND_COUNT - 1);
    if (!c->group || !c->device) return peri__fail(PERI_EINVAL, "%s: a group and a device are needed", f);
    if (c->places < 0 || (c->places > 1 && peri_group_size(c->group) > 1))
        return peri__fail(PERI_EINVAL, "%s: %d places on each of %d ranks, allowed: 1, or more on one rank", f,
                          c->places, peri_group_size(c->group));
    if (c->n_tables < 1 || c->n_features < 1)
        return peri__fail(PERI_EINVAL, "%s: %d tables and %d features, allowed: 1 or more", f, c->n_tables,
                          c->n_features);
    PERI_TRY(peri__list_check(f, "tables", c->tables, c->n_tables));
    PERI_TRY(peri__list_check(f, "features", c->features, c->n_features));
    PERI_TRY(peri__list_check(f, "optimizers", c->optimizers, c->n_optimizers));
    for (int32_t i = 0; i < c->n_features; i++)
        if (!c->features[i]) return peri__fail(PERI_EINVAL, "%s: feature %d has no name", f, i);
    PERI_TRY(check_names(f, c));
    for (int32_t t = 0; t < c->n_tables; t++) {
        const peri_sharded_table *table = &c->tables[t];
        if (table->n_features < 1 || !table->features)
            return peri__fail(PERI_EINVAL, "%s: table '%s' has no features", f, table->name);
        for (int32_t i = 0; i < table->n_features; i++)
            if (table->features[i] < 0 || table->features[i] >= c->n_features)
                return peri__fail(PERI_EINVAL, "%s: table '%s': feature number %d, allowed: 0..%d", f, table->name,
                                  table->features[i], c->n_features - 1);
        PERI_TRY(check_rows(f, c, table));
        PERI_TRY(check_type_and_kernel(f, table));
        if ((table->compute_kernel == PERI_KERNEL_QUANT) != (c->tables[0].compute_kernel == PERI_KERNEL_QUANT))
            return peri__fail(PERI_EINVAL,
                              "%s: of the tables '%s' and '%s' one has the compute kernel quant; allowed: all or none",
                              f, c->tables[0].name, table->name);
        if (table->bounds_check < PERI_BOUNDS_FATAL || table->bounds_check > PERI_BOUNDS_NONE)
            return peri__fail(PERI_EINVAL, "%s: table '%s': bounds_check %d, allowed: %d..%d", f, table->name,
                              table->bounds_check, PERI_BOUNDS_FATAL, PERI_BOUNDS_NONE);
        if (table->collision) PERI_TRY(peri__managed_check(f, c, table));
        if (table->compute_kernel == PERI_KERNEL_FUSED && (table->optimizer < 0 || table->optimizer >= c->n_optimizers))
            return peri__fail(PERI_EINVAL, "%s: table '%s': optimizer number %d, allowed: 0..%d", f, table->name,
                              table->optimizer, c->n_optimizers - 1);
        PERI_TRY(check_training(f, table, fused_optimizer(c, table)));
    }
    return PERI_OK;
}

/* -- names, shards, routes ----------------------------------------------------------------------------------------- */

/** Copy names into one block. */
static peri_status copy_names(peri_sharded *e, const peri_sharded_config *c)
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

/** What gradients of a table are divided by before ranks add them up. That of a copy or a replica is a mean over ranks
 *  in any case, as DistributedDataParallel makes it. A replica's is divided once it is added up here, but where it is
 *  clamped, which comes after; a dense one's by whoever reduces the dense part. */
static double gradient_divisor(const peri_sharded *e, const peri_sharded_config *c, const peri_sharded_table *table,
                               bool copied)
{
    const peri_tbe_optimizer_config *o = fused_optimizer(c, table);
    if (!has_facts(table, PERI_SHARDING_REPLICA)) return e->division;
    return copied || (o && o->max_gradient > 0) ? e->world_size : 1;
}

/** peri__route_table.halvings. */
static int32_t choose_halvings(const peri_sharded *e, const peri_sharded_config *c, const peri_sharded_table *table)
{
    int exponent;
    /* else it would round otherwise */
    if (e->division <= 1 || e->division > 1 << 20 || frexp(e->division, &exponent) != 0.5) return 0;
    /* gradients of weights, and codecs, take what is divided */
    if (e->weighted || e->exact || c->all_to_all.backward || c->reduce_scatter.backward) return 0;
    const peri_tbe_optimizer_config *o = fused_optimizer(c, table);
    if (has_facts(table, PERI_SHARDING_REPLICA) || !o || table->cache) return 0;
    return o->max_gradient > 0 ? 0 : exponent - 1;
}

/** Whether numbers are the same after either. */
static bool same_codec(const peri_codec *a, const peri_codec *b)
{
    peri_codec_config x = {.size = sizeof x}, y = {.size = sizeof y};
    if (!a || !b) return a == b;
    peri_codec_describe(a, &x);
    peri_codec_describe(b, &y);
    return x.format == y.format && x.rounding == y.rounding && x.exponent_bits == y.exponent_bits &&
           x.exponent_bias == y.exponent_bias && x.row_dim == y.row_dim && x.loss_scale == y.loss_scale &&
           x.seed == y.seed;
}

/** Give a hop the codecs of a kind of exchange. Numbers that stay where they are, and f32, need none. */
static void set_hop(peri__hop *hop, peri_group *group, bool sums, const peri_sharded_codecs *codecs)
{
    *hop = (peri__hop){.group = group, .sums = sums};
    for (int way = 0; way < 2; way++) {
        peri_codec *codec = way ? codecs->backward : codecs->forward;
        if (!codec || peri_codec_wire_dtype(codec) == PERI_F32 || group->size == 1) continue;
        peri_codec_retain(codec);
        hop->codec[way] = codec;
    }
}

/** The first lanes are for rows that are exchanged, those from PERI__SUMMED_LANE on for rows that are exchanged and
 *  added up; the first will do where their codecs are alike. Rows of the node lane are added up within the node, and
 *  what comes of it is exchanged, if there is another node. Returns the lane of row-wise tables. */
static int32_t choose_lanes(peri_sharded *e, const peri_sharded_config *c)
{
    for (int32_t lane = 0; lane < PERI__LANES; lane++) e->ways[lane].division = e->division;
    for (int32_t part = 0; part < PERI__PARTS; part++) {
        set_hop(&e->ways[part].hops[0], e->group, false, &c->all_to_all);
        set_hop(&e->ways[PERI__SUMMED_LANE + part].hops[0], e->group, false, &c->reduce_scatter);
    }
    set_hop(&e->ways[PERI__NODE_LANE].hops[0], e->node_group, true, &c->reduce_scatter);
    set_hop(&e->ways[PERI__NODE_LANE].hops[1], e->group, false, &c->all_to_all);
    /* or a rank would not learn what others do */
    set_hop(&e->ways[PERI__COPY_LANE].hops[0], e->group, false, &(peri_sharded_codecs){0});
    peri_codec *const *a = e->ways[0].hops[0].codec, *const *b = e->ways[PERI__SUMMED_LANE].hops[0].codec;
    return same_codec(a[0], b[0]) && same_codec(a[1], b[1]) ? 0 : PERI__SUMMED_LANE;
}

/** Whether what becomes of a number on a lane of this kind does not depend on what else is in its message. */
static bool message_divisible(const peri_sharded *e, int32_t lane)
{
    peri_codec_config config = {.size = sizeof config};
    for (int way = 0; way < 2; way++) {
        const peri_codec *codec = e->ways[lane].hops[0].codec[way];
        if (!codec) continue;
        peri_codec_describe(codec, &config);
        if (config.row_dim) return false;
    }
    return true;
}

/** Hand tables whose rows travel between machines out to the parts of their lanes, so that each rank has about as many
 *  columns of its own in each. On one machine rows need no time to speak of. Tables in files are in the first part:
 *  what is read for them counts for all. */
static peri_status choose_parts(peri_sharded *e, const peri_sharded_config *c)
{
    e->parts = 1;
    const bool can[2] = {message_divisible(e, 0), message_divisible(e, PERI__SUMMED_LANE)};
    if (e->nodes.n > 1) e->parts = (int32_t)peri__tune(PERI__TUNE_row_parts);
    if (e->parts == 1) return PERI_OK;
    PERI__SCRATCH int64_t *all = peri__alloc_zero(sizeof *all * 2 * (size_t)e->world_size);
    int64_t *before = all + e->world_size;
    if (!all) return PERI_ENOMEM;
    for (int counted = 0; counted < 2; counted++)
        for (int32_t t = 0; t < e->n_tables; t++) {
            peri__route_table *table = &e->tables[t];
            const peri_shard *first = NULL;
            if (table->data_parallel || table->lane >= PERI__NODE_LANE || !can[table->lane >= PERI__SUMMED_LANE] ||
                c->tables[t].cache)
                continue;
            for (int32_t s = table->n_shards; s-- > 0;)
                if (table->shards[s].rows > 0) first = &table->shards[s];
            if (!first) continue;
            if (counted)
                table->lane += (int32_t)(e->parts * (2 * before[first->rank] + first->cols * table->n_features) /
                                         (2 * all[first->rank]));
            for (int32_t s = 0; s < table->n_shards; s++)
                if (table->shards[s].rows > 0)
                    (counted ? before : all)[table->shards[s].rank] += table->shards[s].cols * table->n_features;
        }
    return PERI_OK;
}

/** The shards of a table, in its entry of e->tables. */
static peri_status cut_table(const peri_sharded *e, const peri_sharded_table *from, peri__route_table *to)
{
    const bool places = e->places > 1; /* they are cut over as ranks of one node are, and all belong to this rank */
    const peri_sharding sharding = {.size = sizeof sharding,
                                    .type = from->sharding_type,
                                    .world_size = places ? e->places : e->world_size,
                                    .nodes = places ? NULL : e->nodes.of,
                                    .n_ranks = from->n_ranks,
                                    .ranks = from->ranks,
                                    .sizes = from->sizes,
                                    .table = from->name,
                                    .rows = from->rows,
                                    .cols = from->cols,
                                    .segments = from->collision ? from->collision->segments : NULL,
                                    .buckets = from->collision ? from->collision->buckets : 0};
    PERI_TRY(peri_sharding_shards(&sharding, NULL, 0, &to->n_shards));
    to->shards = peri__alloc(sizeof *to->shards * (size_t)peri__max(1, to->n_shards));
    to->places = peri__alloc_zero(sizeof *to->places * (size_t)peri__max(1, to->n_shards));
    to->here = peri__alloc(sizeof *to->here * (size_t)(to->n_shards + 1));
    if (!to->shards || !to->places || !to->here) return PERI_ENOMEM;
    for (int32_t s = 0; s <= to->n_shards; s++) to->here[s] = (peri__set_table){.set = -1};
    PERI_TRY(peri_sharding_shards(&sharding, to->shards, to->n_shards, &to->n_shards));
    for (int32_t s = 0; s < to->n_shards && places; s++) {
        to->places[s] = to->shards[s].rank;
        to->shards[s].rank = e->rank;
    }
    return PERI_OK;
}

/** What routes need to know of raw ids. */
static void copy_collision(peri_sharded *e, const peri_sharded_collision *c, peri__route_table *to)
{
    if (!c) return;
    to->raw = c->spread + 1;
    to->buckets = c->buckets;
    to->bucket_ids = c->spread == PERI_SPREAD_RANGE ? peri__ceil_div(c->input_hash_size, c->buckets) : 1;
    to->segments = c->segments; /* for as long as the routes are made */
    e->router.wire_i32 = false;
}

/** The lane of a table's rows. Rows of ids are never added up, no exact module adds rows up before they are home, and
 *  where all ranks are of one node nothing is saved by it. */
static int32_t choose_lane(const peri_sharded *e, const peri_sharded_table *table, bool copied, int32_t summed)
{
    if (copied) return PERI__COPY_LANE;
    if (e->kind->by_id || !has_facts(table, PERI_SHARDING_CUTS_ROWS)) return 0;
    return has_facts(table, PERI_SHARDING_IN_NODE) && e->node_group != e->group && !e->exact ? PERI__NODE_LANE : summed;
}

/** Whether some columns have rows on several ranks. */
static bool rows_are_cut(const peri__route_table *table)
{
    for (int32_t s = 0; s < table->n_shards; s++)
        if (table->shards[s].rows > 0 && table->shards[s].rows < table->rows) return true;
    return false;
}

/** Whether sums of the table's gradients must not depend on the plan. */
static bool is_exact(const peri_sharded_config *c, const peri_sharded_table *table)
{
    const peri_tbe_optimizer_config *o = fused_optimizer(c, table);
    return o && o->exact;
}

/** The ways of rows that travel have hops, and their lanes are listed. */
static void open_ways(peri_sharded *e)
{
    for (int32_t t = 0; t < e->n_tables && e->world_size > 1; t++) {
        const peri__route_table *table = &e->tables[t];
        if (!table->data_parallel || table->copied) e->ways[table->lane].n = table->lane == PERI__NODE_LANE ? 2 : 1;
    }
    for (int32_t lane = 0; lane < PERI__LANES; lane++)
        if (e->ways[lane].n) e->lanes[e->n_lanes++] = lane;
}

static peri_status cut_tables(peri_sharded *e, const peri_sharded_config *c)
{
    int32_t n_features = 0, at = 0;
    for (int32_t t = 0; t < c->n_tables; t++) {
        n_features += c->tables[t].n_features;
        e->exact = e->exact || is_exact(c, &c->tables[t]);
    }
    e->tables = peri__alloc_zero(sizeof *e->tables * (size_t)c->n_tables);
    e->features = peri__alloc(sizeof *e->features * (size_t)n_features);
    if (!e->tables || !e->features) return PERI_ENOMEM;
    e->router.wire_i32 = true;
    int32_t summed = choose_lanes(e, c);
    for (int32_t t = 0; t < c->n_tables; t++) {
        const peri_sharded_table *from = &c->tables[t];
        peri__route_table *to = &e->tables[t];
        const bool replica = has_facts(from, PERI_SHARDING_REPLICA),
                   copied = replica && is_exact(c, from);
        *to = (peri__route_table){.rows = from->rows,
                                  .cols = from->cols,
                                  .n_features = from->n_features,
                                  .features = e->features + at,
                                  .data_parallel = replica,
                                  .copied = copied,
                                  .lane = choose_lane(e, from, copied, summed),
                                  .bounds_check = from->bounds_check,
                                  .mean = from->pooling == PERI_POOLING_MEAN,
                                  .divisor = gradient_divisor(e, c, from, copied),
                                  .halvings = choose_halvings(e, c, from)};
        copy_collision(e, from->collision, to);
        memcpy(e->features + at, from->features, sizeof *e->features * (size_t)from->n_features);
        at += from->n_features;
        to->sent_divisor = to->data_parallel ? to->divisor : peri__way_divides_first(&e->ways[to->lane]);
        if (to->halvings) to->divisor = to->sent_divisor = 1;
        PERI_TRY(cut_table(e, from, to));
        to->by_id = e->exact && !e->kind->by_id && rows_are_cut(to);
        e->two_rules = e->two_rules || to->by_id || (copied && e->world_size > 1);
        e->any_mean = e->any_mean || (to->mean && (!to->data_parallel || copied));
        e->router.wire_i32 = e->router.wire_i32 && (!copied || to->rows <= INT32_MAX);
        for (int32_t s = 0; s < to->n_shards; s++)
            e->router.wire_i32 = e->router.wire_i32 && to->shards[s].rows <= INT32_MAX;
    }
    PERI_TRY(choose_parts(e, c));
    open_ways(e);
    return PERI_OK;
}

/** What messages about inputs begin with. */
static peri_status name_router(peri_sharded *e, const char *name)
{
    static const char function[] = "peri_sharded_input_dist", of[] = ": module ''";
    size_t room = sizeof function + sizeof of + (name ? strlen(name) : 0);
    e->function = peri__alloc(room);
    if (!e->function) return PERI_ENOMEM;
    if (name && *name) snprintf(e->function, room, "%s: module '%s'", function, name);
    else snprintf(e->function, room, "%s", function);
    e->router.function = e->function;
    return PERI_OK;
}

static peri_status make_router(peri_sharded *e, const char *name)
{
    e->cols = e->kind->by_id ? 0 : e->routes->out_cols;
    for (int32_t t = 0; e->kind->by_id && t < e->n_tables; t++) e->cols = peri__max(e->cols, e->tables[t].cols);
    e->scratch = peri__alloc(sizeof *e->scratch * (size_t)peri__home_numbers(e->routes, true));
    if (!e->scratch) return PERI_ENOMEM;
    e->n_results = !e->kind->by_id;
    if (e->kind->by_id) e->result_feature = e->features;
    for (int32_t t = 0; t < e->n_tables && e->kind->by_id; t++) e->n_results += e->tables[t].n_features;
    e->router.group = e->group;
    e->router.device = e->device;
    e->router.routes = e->routes;
    e->router.table_names = e->table_names;
    e->router.feature_names = e->feature_names;
    PERI_TRY(name_router(e, name));
    return peri__router_init(&e->router);
}

/** The learning rates, and whom they are for. */
static peri_status copy_rates(peri_sharded *e, const peri_sharded_config *c)
{
    e->rates = peri__alloc(sizeof *e->rates * (size_t)peri__max(1, c->n_optimizers));
    if (!e->rates) return PERI_ENOMEM;
    for (int32_t o = 0; o < c->n_optimizers; o++)
        e->rates[o] = (peri__rate){.rate = c->optimizers[o].learning_rate, .table = -1};
    for (int32_t t = c->n_tables; t-- > 0;)
        if (c->tables[t].compute_kernel == PERI_KERNEL_FUSED) e->rates[c->tables[t].optimizer].table = t;
    return PERI_OK;
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

static peri_status sharded_new(const peri_sharded_config *c, peri_sharded **out)
{
    PERI_TRY(check_config(c));
    peri_sharded *e = peri__alloc_zero(sizeof *e);
    if (!e) return PERI_ENOMEM;
    peri__refs_init(&e->refs);
    e->kind = kinds[c->kind];
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
    e->returns_rows = c->returns_rows;
    e->frozen = c->tables[0].compute_kernel == PERI_KERNEL_QUANT;
    e->places = c->places > 1 ? c->places : 1;
    e->output_dtype = c->output_dtype;
    e->division = peri__gradient_divisor(c->group, c->gradient_division);
    peri_status status;
    PERI_TRY_GOTO(peri__nodes_of_group(&e->nodes, c->group), out);
    PERI_TRY_GOTO(peri__group_node(c->group, &e->node_group), out);
    PERI_TRY_GOTO(copy_names(e, c), out);
    PERI_TRY_GOTO(cut_tables(e, c), out);
    PERI_TRY_GOTO(peri__routes_new(&e->nodes, e->tables, e->n_tables, e->n_features, &e->routes), out);
    for (int32_t i = 0; i < e->routes->n_partitions; i++)
        e->cuts_rows = e->cuts_rows || e->routes->partitions[i].n_parts > 1;
    PERI_TRY_GOTO(make_router(e, c->name), out);
    PERI_TRY_GOTO(copy_rates(e, c), out);
    PERI_TRY_GOTO(peri__tables_new(e, c), out);
    PERI_TRY_GOTO(peri__managed_new(e, c), out);
    PERI_TRY_GOTO(peri__identity_new(e, c), out);
    for (int32_t t = 0; t < c->n_tables; t++) e->stored = e->stored || c->tables[t].cache;
    PERI_TRY_GOTO(peri__module_files_check(e, c), out);
    *out = e;
out:
    if (status < 0) peri_sharded_release(e);
    return status;
}

void peri_sharded_retain(peri_sharded *e) { if (e) peri__refs_add(&e->refs); }

void peri_sharded_release(peri_sharded *e)
{
    if (!e || !peri__refs_drop(&e->refs)) return;
    peri__managed_free(e);
    peri__tables_free(e);
    for (int32_t t = 0; e->tables && t < e->n_tables; t++) {
        peri__free(e->tables[t].shards);
        peri__free(e->tables[t].places);
        peri__free(e->tables[t].here);
    }
    for (int32_t lane = 0; lane < PERI__LANES; lane++) peri__way_fini(&e->ways[lane]);
    peri__batch_layouts_free(e);
    peri__router_fini(&e->router);
    peri__routes_free(e->routes);
    peri__nodes_fini(&e->nodes);
    void *parts[] = {e->found_path,
                     e->tables,
                     e->features,
                     e->scratch,
                     e->text,
                     e->identity_text,
                     e->rates,
                     e->function,
                     (void *)e->table_names,
                     (void *)e->feature_names};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) peri__free(parts[i]);
    peri_group_release(e->group);
    peri__object_count(-1);
    peri__free(e);
}

peri_status peri_sharded_new(const peri_sharded_config *given, peri_sharded **out)
{
    peri_sharded_config c;
    PERI__SCRATCH void *tables = NULL, *optimizers = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__struct_take(&c, sizeof c, given, __func__, "peri_sharded_config"));
    PERI_TRY(peri__structs_of_today(c.tables, c.n_tables, sizeof *c.tables, __func__, "peri_sharded_table", &tables));
    PERI_TRY(peri__structs_of_today(c.optimizers, c.n_optimizers, sizeof *c.optimizers, __func__,
                                "peri_tbe_optimizer_config", &optimizers));
    c.tables = tables;
    c.optimizers = optimizers;
    const size_t n = tables ? (size_t)c.n_tables : 0;
    PERI__SCRATCH peri_cache_config *caches = peri__alloc(sizeof *caches * (n + 1));
    PERI__SCRATCH peri_sharded_collision *collisions = peri__alloc(sizeof *collisions * (n + 1));
    if (!caches || !collisions) return PERI_ENOMEM;
    for (size_t i = 0; i < n; i++)
        PERI_TRY(table_of_today((peri_sharded_table *)tables + i, __func__, &caches[i], &collisions[i]));
    return sharded_new(&c, out);
}
