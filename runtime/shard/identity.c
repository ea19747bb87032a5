/* SPDX-License-Identifier: Apache-2.0
 *
 * identity.c: what all ranks must agree on, as lines of text: "subject <tab> property <tab> value". Its hash travels
 * with every batch; where hashes differ the texts travel too, and say what differs. Lines stand in an order that
 * follows from the configuration alone.
 */
#include "../base/buffer.h"
#include "module.h"

#include <stddef.h>

static const char *name_at(const char *const *names, size_t n, int64_t i)
{
    return i >= 0 && i < (int64_t)n ? names[i] : "?";
}

#define PICK(i, ...)                                                                                                   \
    name_at((const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *), (i))

/* -- what it says -------------------------------------------------------------------------------------------------- */

/** The numbers of an optimizer, but for its learning rate, which may change. */
static const struct {
    const char *name;
    size_t offset;
    char type; /* d double, i int32, l int64, b bool */
} fields[] = {
#define FIELD(type, name) {#name, offsetof(peri_tbe_optimizer_config, name), type}
    FIELD('d', eps),
    FIELD('d', beta1),
    FIELD('d', beta2),
    FIELD('d', weight_decay),
    FIELD('i', weight_decay_mode),
    FIELD('d', eta),
    FIELD('d', momentum),
    FIELD('d', ema_beta),
    FIELD('d', ar_alpha),
    FIELD('d', min_shrinkage),
    FIELD('d', step_ema_coef),
    FIELD('l', step_ema),
    FIELD('l', step_start),
    FIELD('d', max_norm),
    FIELD('d', max_gradient),
    FIELD('b', row_bias_correction),
    FIELD('b', nearest),
    FIELD('b', exact),
    FIELD('l', counter.halflife),
    FIELD('i', counter.weight_decay_mode),
    FIELD('i', counter.learning_rate_mode),
    FIELD('l', counter.adjustment_iter),
    FIELD('d', counter.adjustment_ub),
    FIELD('d', counter.tail_id_threshold),
    FIELD('b', counter.tail_id_is_ratio),
    FIELD('l', counter.max_counter_update_freq),
    FIELD('d', counter.weight_norm_coefficient),
    FIELD('d', counter.lower_bound),
#undef FIELD
};

static void add_optimizer(peri__buffer *t, const char *table, const peri_tbe_optimizer_config *o)
{
    char out[32];
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const char *at = (const char *)o + fields[i].offset;
        double value;
        switch (fields[i].type) {
        case 'd': value = *(const double *)(const void *)at; break;
        case 'i': value = *(const int32_t *)(const void *)at; break;
        case 'l': value = (double)*(const int64_t *)(const void *)at; break;
        default: value = *(const bool *)(const void *)at; break;
        }
        peri__buffer_print(t, "optimizer of table '%s'\t%s\t%s\n", table, fields[i].name,
                           peri__number_text(value, out));
    }
}

/** As the arguments of QuantizedCommCodec say it, those that its format has. */
static void add_codec(peri__buffer *t, const char *rows, int way, const peri_codec *codec)
{
    char out[32];
    peri_codec_config c = {.size = sizeof c};
    if (codec) peri_codec_describe(codec, &c);
    peri__buffer_print(t, "rows of %s shards\t%s codec\t%s", rows, way ? "backward" : "forward",
                       peri__option_text("codec", c.format));
    if (c.format == PERI_CODEC_FP8)
        peri__buffer_print(t, " of %d exponent bits, exponent_bias %d", c.exponent_bits, c.exponent_bias);
    if (c.row_dim) peri__buffer_print(t, ", row_dim %lld", (long long)c.row_dim);
    if (c.format == PERI_CODEC_MX4)
        peri__buffer_print(t, ", rounding_mode %s", PICK(c.rounding, "NEAREST", "FLOOR", "EVEN", "STOCHASTIC", "CEIL"));
    if (c.format == PERI_CODEC_FP16 || c.format == PERI_CODEC_BF16)
        peri__buffer_print(t, ", loss_scale %s", peri__number_text(c.loss_scale, out));
    if (c.seed) peri__buffer_print(t, ", seed %llu", (unsigned long long)c.seed);
    peri__buffer_print(t, "\n");
}

static void add_shards(peri__buffer *t, const char *name, const peri__route_table *table)
{
    peri__buffer_print(t, "table '%s'\tnumber of shards\t%d\n", name, table->n_shards);
    for (int32_t s = 0; s < table->n_shards; s++) {
        const peri_shard *shard = &table->shards[s];
        long long row = shard->row_offset, column = shard->col_offset;
        peri__buffer_print(t, "table '%s'\tshard %d\ton rank %d, rows %lld..%lld, columns %lld..%lld\n", name, s,
                           shard->rank, row, row + shard->rows - 1, column, column + shard->cols - 1);
    }
}

static void add_collision(peri__buffer *t, const char *name, const peri_sharded_collision *x)
{
    peri__buffer_print(t, "table '%s'\tmanaged collision\t%s\n", name,
                       x ? PICK(x->spread, "buckets by hash", "buckets by modulo", "buckets by range") : "none");
    for (int32_t b = 0; x && b <= x->buckets; b++)
        peri__buffer_print(t, "table '%s'\tbucket %d\tfrom row %lld\n", name, b, (long long)x->segments[b]);
    if (x && x->spread == PERI_SPREAD_RANGE)
        peri__buffer_print(t, "table '%s'\tinput_hash_size\t%lld\n", name, (long long)x->input_hash_size);
    for (const char *line = x ? x->agreed : NULL; line && *line;) {
        int n = (int)strcspn(line, "\n");
        peri__buffer_print(t, "table '%s'\t%.*s\n", name, n, line);
        line += n + (line[n] == '\n');
    }
}

static void add_table(peri__buffer *t, const peri_sharded_config *c, int32_t i, const peri__route_table *cut)
{
    const peri_sharded_table *table = &c->tables[i];
    const char *name = table->name;
    char a[32], start[PERI__START_TEXT];
    bool fused = table->compute_kernel == PERI_KERNEL_FUSED;
    peri__buffer_print(t, "table %d\tname\t%s\n", i + 1, name);
    peri__buffer_print(t, "table '%s'\tnum_embeddings\t%lld\n", name, (long long)table->rows);
    peri__buffer_print(t, "table '%s'\tembedding_dim\t%lld\n", name, (long long)table->cols);
    peri__buffer_print(t, "table '%s'\tpooling\t%s\n", name, peri__option_text("pooling", table->pooling));
    peri__buffer_print(t, "table '%s'\tdata_type\t%s\n", name,
                       peri__rows_are_bytes(table->dtype) ? peri_row_format_name(table->dtype)
                                                     : peri_dtype_name(table->dtype));
    peri__buffer_print(t, "table '%s'\tsharding_type\t%s\n", name, peri_sharding_type_name(table->sharding_type));
    peri__buffer_print(t, "table '%s'\tcompute_kernel\t%s\n", name, peri__kernel_name(table));
    peri__buffer_print(t, "table '%s'\tfeature_names\t", name);
    for (int32_t f = 0; f < table->n_features; f++)
        peri__buffer_print(t, "%s%s", f ? ", " : "", c->features[table->features[f]]);
    peri__buffer_print(t, "\ntable '%s'\tstart values\t%s\n", name,
                       peri__start_text(table->init, table->init_a, table->init_b, start));
    peri__buffer_print(t, "table '%s'\tbounds_check_mode\t%s\n", name,
                       peri__option_text("bounds_check", table->bounds_check));
    if (table->cache) /* the rest of its parameters may be what suits each machine: results do not depend on them */
        peri__buffer_print(t, "table '%s'\tload_factor\t%s\n", name, peri__number_text(table->cache->load_factor, a));
    if (fused)
        peri__buffer_print(t, "table '%s'\toptimizer\t%s (number %d)\n", name,
                           peri__optimizer_kind_of(c->optimizers[table->optimizer].kind)->name, table->optimizer);
    add_collision(t, name, table->collision);
    add_shards(t, name, cut);
}

/** Append what may change, and keep the text. */
static peri_status finish(peri_sharded *e, peri__buffer *t)
{
    char rate[32];
    for (int32_t o = 0; o < e->n_optimizers; o++)
        if (e->rates[o].table >= 0)
            peri__buffer_print(t, "optimizer of table '%s'\tlearning_rate\t%s\n", e->table_names[e->rates[o].table],
                               peri__number_text(e->rates[o].rate, rate));
    for (int32_t i = 0; i < e->n_managed; i++) {
        const peri__time time = peri__managed_time(e, i);
        const char *table = e->table_names[time.table];
        const int64_t now = time.now;
        if (now < 0)
            peri__buffer_print(t, "managed collision of table '%s'\ttime (set_time)\tthe number of steps\n", table);
        else peri__buffer_print(t, "managed collision of table '%s'\ttime (set_time)\t%lld\n", table, (long long)now);
    }
    e->identity_text = t->data;
    e->identity_bytes = t->bytes;
    return t->status;
}

peri_status peri__identity_new(peri_sharded *e, const peri_sharded_config *c)
{
    /* the node lane has the codecs of both */
    static const char *const lanes[] = {"table-wise and column-wise", "row-wise"};
    peri__buffer t = {0};
    peri__buffer_print(&t, "the module\tseed\t%llu\n", (unsigned long long)c->seed);
    peri__buffer_print(&t, "the module\tis_weighted\t%s\n", c->weighted ? "true" : "false");
    peri__buffer_print(&t, "the module\tuse_index_dedup\t%s\n", c->index_dedup ? "true" : "false");
    peri__buffer_print(&t, "the module\toutput_dtype\t%s\n", peri_dtype_name(e->output_dtype));
    peri__buffer_print(&t, "the module\tgradient_division\t%s\n", e->division > 1 ? "true" : "false");
    peri__buffer_print(&t, "the module\tnumber of tables\t%d\n", c->n_tables);
    peri__buffer_print(&t, "the exchange\trow_parts (PERI_TUNE)\t%d\n", e->parts);
    for (int32_t lane = 0; lane < 2; lane++)
        for (int way = 0; way < 2; way++)
            add_codec(&t, lanes[lane], way, e->ways[lane * PERI__SUMMED_LANE].hops[0].codec[way]);
    for (int32_t i = 0; i < c->n_tables; i++) add_table(&t, c, i, &e->tables[i]);
    for (int32_t o = 0; o < c->n_optimizers; o++)
        if (e->rates[o].table >= 0) add_optimizer(&t, c->tables[e->rates[o].table].name, &c->optimizers[o]);
    /* last: of modules that are alike but for it, ranks came to others */
    peri__buffer_print(&t, "the module\tname\t'%s'\n", c->name ? c->name : "");
    e->identity = t.status < 0 ? 0 : peri__hash_text(t.data);
    e->identity_fixed = t.bytes;
    return finish(e, &t);
}

peri_status peri__identity_refresh(peri_sharded *e)
{
    peri__buffer t = {.data = e->identity_text, .bytes = e->identity_fixed, .room = e->identity_bytes + 1};
    return finish(e, &t);
}

const char *peri_sharded_identity(const peri_sharded *e)
{
    return e && e->identity_text ? e->identity_text : "";
}

uint64_t peri__identity_hash(const peri_sharded *e)
{
    uint64_t h = e->identity;
    for (int32_t o = 0; o < e->n_optimizers; o++) {
        uint64_t rate;
        memcpy(&rate, &e->rates[o].rate, sizeof rate);
        if (e->rates[o].table >= 0) h = peri__hash_mix(h, rate);
    }
    for (int32_t i = 0; i < e->n_managed; i++) h = peri__hash_mix(h, (uint64_t)peri__managed_time(e, i).now);
    return h;
}

/* -- what differs -------------------------------------------------------------------------------------------------- */

/** Cut the line at @at (of a text that ends at @end) into its three parts, each of at most @most bytes. */
static void parts_of(const char *at, const char *end, size_t most, char *subject, char *property, char *value)
{
    char *part[3] = {subject, property, value};
    for (int i = 0; i < 3; i++) {
        size_t n = 0;
        for (; at < end && *at != '\n' && *at != '\t'; at++)
            if (n + 1 < most) part[i][n++] = *at;
        part[i][n] = 0;
        if (at < end && *at == '\t') at++;
    }
}

peri_status peri__identity_fail(const char *function, int32_t world, const char *texts, const int64_t *bytes)
{
    enum { MOST = 100 };
    char subject[2][MOST], property[2][MOST], value[2][MOST];
    const char *zero = texts, *zero_end = texts + bytes[0], *other = zero_end;
    for (int32_t r = 1; r < world; other += bytes[r++]) {
        if (bytes[r] == bytes[0] && !memcmp(zero, other, (size_t)bytes[0])) continue;
        const char *a = zero, *b = other, *line_a = a, *line_b = b, *end = other + bytes[r];
        for (; a < zero_end && b < end && *a == *b; a++, b++)
            if (*a == '\n') line_a = a + 1, line_b = b + 1;
        parts_of(line_a, zero_end, MOST, subject[0], property[0], value[0]);
        parts_of(line_b, end, MOST, subject[1], property[1], value[1]);
        if (!strcmp(subject[0], subject[1]) && !strcmp(property[0], property[1]))
            return peri__fail(
                PERI_EMISMATCH,
                "%s: rank %d runs another module or plan than rank 0: rank %d has %s %s where rank 0 has %s (%s)",
                function, r, r, property[1], value[1], value[0], subject[0]);
        return peri__fail(PERI_EMISMATCH,
                          "%s: rank %d runs another module or plan than rank 0: rank %d has %s of %s, rank 0 %s of %s",
                          function, r, r, property[1], subject[1], property[0], subject[0]);
    }
    return peri__fail(PERI_EINTERNAL, "%s: ranks differ, and say the same of themselves", function);
}
