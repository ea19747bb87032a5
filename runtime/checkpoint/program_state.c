/* SPDX-License-Identifier: Apache-2.0
 *
 * program_state.c: what a C program has, by the names that it has in checkpoints: tensors, and the tables of sharded
 * modules with the states of their optimizers. Names and values are those of peri.checkpoint in Lua
 * (docs/checkpoint_format.md, What programs save).
 */
#include "../base/buffer.h"
#include "../base/json.h"
#include "../embed/embed_internal.h"
#include "../shard/module.h"
#include "files.h"
#include "manifest.h"
#include "reader.h"

#include <stdio.h>
#include <stdlib.h>

/** A tensor, or a part of one, that this rank has. */
typedef struct entry {
    char *name;
    int32_t dtype, ndim;
    int64_t shape[PERI_MAX_DIMS]; /* of the whole */
    peri__region region;          /* that is here */
    bool writes;                  /* this rank writes it: of what several have alike one does */
    peri_tensor *tensor;          /* that has it; NULL: it is what follows */
    peri_tbe *tbe;                /* rows of a table behind a cache; or NULL */
    int64_t table;
    const char *state;
    bool block;                   /* a number for each pair of the columns of a block: region has these rows of the
                                     matrix of all columns */
    peri_sharded *counts;         /* else: how often the tables of this module were updated */
    int64_t updates;              /* what was read of that; -1: nothing yet */
    int32_t coded;                /* rows of a quantized table: how they are stored, PERI_ROWS_*; else 0 */
    int64_t cols;                 /* then: numbers in a row */
} entry;

/** The tables of a module. */
typedef struct tables {
    char *part, *path;
    peri_sharded *of;
    int32_t *optimizer;     /* by table: which one of the module's trains it; -1: none that is fused */
    int32_t *coded;         /* by table: how its rows are stored, PERI_ROWS_*; 0: as numbers */
    const char **kinds;     /* by optimizer: its name */
} tables;

/** The weights of a table, also of one that other ranks have. Blocks of columns of a quantized one are tensors of their
 *  own, since parts of rows of bytes do not add up to whole ones. */
typedef struct parameter {
    int64_t of;           /* which of `tables` */
    int32_t table, block; /* block: 0 but for quantized tables */
    int64_t cols;         /* of the block */
} parameter;

struct peri_checkpoint_state {
    int32_t rank;
    entry *entries;
    tables *tables;
    parameter *parameters;
    int64_t n, room, n_tables, tables_room, n_parameters, parameters_room;
    peri__names by_name;       /* entries */
    peri__names by_parameter;  /* tensor_name of a weight -> its number in `parameters` */
    peri__buffer values;
};

peri_status peri_checkpoint_state_new(int32_t rank, peri_checkpoint_state **out)
{
    PERI_NEED(out);
    if (rank < 0) return peri__fail(PERI_EINVAL, "peri_checkpoint_state_new: rank %d, allowed: 0 or more", rank);
    peri_checkpoint_state *s = peri__alloc_zero(sizeof *s);
    if (!s) return PERI_ENOMEM;
    peri__object_count(1);
    s->rank = rank;
    *out = s;
    return PERI_OK;
}

void peri_checkpoint_state_release(peri_checkpoint_state *s)
{
    if (!s || peri__border_refuses(__func__)) return;
    for (int64_t i = 0; i < s->n; i++) {
        peri__free(s->entries[i].name);
        peri_tensor_release(s->entries[i].tensor);
    }
    for (int64_t i = 0; i < s->n_tables; i++) {
        peri__free(s->tables[i].part);
        peri__free(s->tables[i].path);
        peri__free(s->tables[i].optimizer);
        peri__free(s->tables[i].coded);
        peri__free(s->tables[i].kinds);
        peri_sharded_release(s->tables[i].of);
    }
    peri__free(s->entries);
    peri__free(s->tables);
    peri__free(s->parameters);
    peri__names_free(&s->by_name);
    peri__names_free(&s->by_parameter);
    peri__free(s->values.data);
    peri__free(s);
    peri__object_count(-1);
}

/* -- what there is ------------------------------------------------------------------------------------------------- */

/** The next entry of that name: its number, -1 if there are no more. *at: -1 before the first. */
static int64_t next_of(const peri_checkpoint_state *s, const char *name, int64_t *at)
{
    int64_t i;
    while ((i = peri__names_next(&s->by_name, name, at)) >= 0 && strcmp(s->entries[i].name, name) != 0) continue;
    return i;
}

/** Append an entry; takes e->tensor, also after an error. */
static peri_status append(peri_checkpoint_state *s, const char *function, const char *name, const entry *e)
{
    peri_status status = PERI_OK;
    if (!*name || strlen(name) > PERI__NAME_MOST)
        status = peri__fail(PERI_EINVAL, "%s: a name of %zu bytes, allowed: 1 to %d", function, strlen(name),
                            PERI__NAME_MOST);
    for (int64_t at = -1, i; status >= 0 && (i = next_of(s, name, &at)) >= 0;)
        if (!(e->tbe || e->counts || s->entries[i].region.columns || s->entries[i].tbe) &&
            memcmp(&s->entries[i].region, &e->region, sizeof e->region) == 0)
            status = peri__fail(PERI_EINVAL, "%s: '%.200s' is there already", function, name);
    if (status >= 0) status = peri__grow((void **)&s->entries, &s->room, s->n + 1, sizeof *s->entries);
    if (status >= 0) {
        s->entries[s->n] = *e;
        if (!(s->entries[s->n].name = peri__strdup(name))) status = PERI_ENOMEM;
        else if ((status = peri__names_add(&s->by_name, name, s->n)) >= 0) s->n++;
        else peri__free(s->entries[s->n].name);
    }
    if (status < 0) peri_tensor_release(e->tensor);
    return status;
}

peri_status peri_checkpoint_state_tensor(peri_checkpoint_state *s, const char *name, peri_tensor *tensor)
{
    peri_tensor_info d = {.size = sizeof d};
    PERI_NEED(s);
    PERI_NEED(name);
    PERI_NEED(tensor);
    PERI_TRY(peri_tensor_describe(tensor, &d));
    entry e = {.dtype = d.dtype, .ndim = d.ndim, .writes = s->rank == 0, .tensor = tensor};
    memcpy(e.shape, d.shape, sizeof e.shape);
    memcpy(e.region.size, d.shape, sizeof e.region.size);
    e.coded = peri__tbe_coded_rows(tensor, &e.cols);
    peri_tensor_retain(tensor);
    return append(s, "peri_checkpoint_state_tensor", name, &e);
}

/** The shard of a table that stands for all in what they have alike: the first that has rows. */
static bool is_first(const peri__route_table *t, const peri_shard *shard)
{
    for (int32_t i = 0; i < t->n_shards; i++)
        if (t->shards[i].rows > 0 && t->shards[i].cols > 0) return t->shards[i].index == shard->index;
    return false;
}

/** "ebc.embedding_bags.users.weight", in @out of PERI__NAME_MOST + 1 bytes. */
static peri_status parameter_name(const tables *t, int32_t table, char *out)
{
    const int n = snprintf(out, PERI__NAME_MOST + 1, "%s%s%s.%s.weight", t->path, *t->path ? "." : "",
                           t->of->kind == &peri__sequence ? "embeddings" : "embedding_bags", t->of->table_names[table]);
    return n <= PERI__NAME_MOST ? PERI_OK
                                : peri__fail(PERI_EINVAL, "peri_checkpoint_state_tables: a name of %d bytes", n);
}

/** Append a key as a component of a tensor's name, as lua/perilune/checkpoint/parts.lua does: '/', '%' and a '#' in
 *  front become "%2F", "%25" and "%23". @out: PERI__NAME_MOST + 1 bytes, what was there is kept. Returns false if there
 *  is no room. */
static bool append_component(char *out, const char *key)
{
    size_t n = strlen(out);
    for (const char *c = key; *c; c++) {
        const bool special = *c == '/' || *c == '%' || (*c == '#' && c == key);
        if (n + (special ? 3 : 1) > PERI__NAME_MOST) return false;
        n += (size_t)snprintf(out + n, 4, special ? "%%%02X" : "%c", *c);
    }
    return true;
}

/** "PART/PARAMETER" (@state NULL; of block K > 0 "PART/PARAMETER.K"), or "PART.tables/state/PARAMETER/TABLE.STATE", in
 *  @out of PERI__NAME_MOST + 1 bytes. */
static peri_status tensor_name(const tables *t, int32_t table, int32_t block, const char *state, char *out)
{
    char key[PERI__NAME_MOST + 16];
    int n = snprintf(out, PERI__NAME_MOST + 1, "%s%s", t->part, state ? ".tables/state/" : "/");
    PERI_TRY(parameter_name(t, table, key));
    if (block > 0) snprintf(key + strlen(key), 16, ".%d", block);
    bool fits = n <= PERI__NAME_MOST && append_component(out, key);
    if (state && fits) {
        n = snprintf(key, sizeof key, "%s.%s", t->of->table_names[table], state);
        fits = n <= PERI__NAME_MOST && strlen(out) < PERI__NAME_MOST && strcat(out, "/") && append_component(out, key);
    }
    return fits ? PERI_OK
                : peri__fail(PERI_EINVAL, "peri_checkpoint_state_tables: table '%.200s': a name of more than %d bytes",
                             t->of->table_names[table], PERI__NAME_MOST);
}

/** State @state of a piece of a table. @block: of a quantized one, as in parameter. */
static peri_status add_state(peri_checkpoint_state *s, const tables *t, const peri_local_shard *l, int32_t block,
                             const char *state)
{
    const peri__route_table *table = &t->of->tables[l->table];
    const int32_t geometry = peri_tbe_state_geometry(l->tbe, state);
    char name[PERI__NAME_MOST + 1];
    entry e = {.ndim = geometry == PERI_STATE_FULL || geometry == PERI_STATE_SQUARE ? 2 : 1,
               .table = l->tbe_table,
               .state = state};
    peri__region *r = &e.region;
    const bool weight = strcmp(state, "weight") == 0, cut = l->shard.cols != table->cols;
    if (geometry < 0) return geometry;
    PERI_TRY(tensor_name(t, l->table, block, weight ? NULL : state, name));
    const peri_shard *p = &l->shard;
    e.writes = l->replica ? s->rank == 0 : geometry == PERI_STATE_SCALAR ? is_first(table, p) : true;
    if (geometry == PERI_STATE_FULL)
        *r = (peri__region){.offset = {p->row_offset, p->col_offset}, .size = {p->rows, p->cols}};
    else if (geometry == PERI_STATE_ROW) *r = (peri__region){.offset = {p->row_offset}, .size = {p->rows}};
    else if (geometry == PERI_STATE_SQUARE)
        *r = (peri__region){.offset = {p->col_offset}, .size = {p->cols, table->cols}};
    else *r = (peri__region){.size = {1, p->cols}};
    e.block = geometry == PERI_STATE_SQUARE && cut;
    if (geometry == PERI_STATE_ROW && cut) r->column = p->col_offset, r->columns = p->cols;
    e.shape[0] = geometry == PERI_STATE_FULL || geometry == PERI_STATE_ROW ? table->rows
                 : geometry == PERI_STATE_SQUARE                           ? table->cols
                                                                           : 1;
    e.shape[1] = table->cols;
    if (t->coded[l->table]) {
        e.coded = t->coded[l->table];
        e.cols = p->cols;
        e.shape[1] = r->size[1] = peri__tbe_stride(e.coded, p->cols);
        r->offset[1] = 0;
        if (t->of->places > 1) e.shape[0] = p->rows, r->offset[0] = 0; /* each piece is a tensor, as in Lua */
    }
    for (int32_t d = e.ndim; d < PERI_MAX_DIMS; d++) r->size[d] = 0;
    peri_status status = peri_tbe_state(l->tbe, l->tbe_table, state, &e.tensor);
    if (status == PERI_EUNSUPPORTED) e.tbe = l->tbe; /* behind a cache */
    else if (status < 0) return status;
    for (int32_t i = 0; i < l->tbe->n_states; i++)
        if (strcmp(l->tbe->state[i].name, state) == 0) e.dtype = l->tbe->state[i].dtype;
    return append(s, "peri_checkpoint_state_tables", name, &e);
}

/** The number of updates of a table: i64 [1]. */
static peri_status add_count(peri_checkpoint_state *s, const tables *t, const peri_local_shard *l)
{
    char name[PERI__NAME_MOST + 1];
    const peri__route_table *table = &t->of->tables[l->table];
    PERI_TRY(tensor_name(t, l->table, 0, "step", name));
    const entry e = {.dtype = PERI_I64,
                     .ndim = 1,
                     .shape = {1},
                     .region = {.size = {1}},
                     .tbe = l->tbe,
                     .counts = t->of,
                     .updates = -1,
                     .writes = l->replica ? s->rank == 0 : is_first(table, &l->shard)};
    return append(s, "peri_checkpoint_state_tables", name, &e);
}

/** Who trains which table, and how its rows are stored, as the module's configuration says. */
static peri_status note_tables(tables *t, const peri_sharded_config *config)
{
    t->optimizer = peri__alloc(sizeof *t->optimizer * (size_t)peri__max(1, config->n_tables));
    t->coded = peri__alloc(sizeof *t->coded * (size_t)peri__max(1, config->n_tables));
    t->kinds = peri__alloc(sizeof *t->kinds * (size_t)peri__max(1, config->n_optimizers));
    if (!t->optimizer || !t->coded || !t->kinds) return PERI_ENOMEM;
    for (int32_t i = 0; i < config->n_tables; i++) {
        const peri_sharded_table *given = peri__struct_at(config->tables, i);
        PERI_TAKE(peri_sharded_table, given);
        t->optimizer[i] = given->compute_kernel == PERI_KERNEL_FUSED ? given->optimizer : -1;
        t->coded[i] = peri__rows_are_bytes(given->dtype) ? given->dtype : 0;
    }
    for (int32_t o = 0; o < config->n_optimizers; o++) {
        const peri_tbe_optimizer_config *given = peri__struct_at(config->optimizers, o);
        PERI_TAKE(peri_tbe_optimizer_config, given);
        t->kinds[o] = peri__optimizer_kind_of(given->kind)->name;
    }
    return PERI_OK;
}

/** Whether shard @k of a table has numbers, and is the first in its columns. */
static bool begins_block(const peri__route_table *table, int32_t k)
{
    const peri_shard *p = &table->shards[k];
    for (int32_t i = 0; i < k; i++)
        if (table->shards[i].rows > 0 && table->shards[i].col_offset == p->col_offset) return false;
    return p->rows > 0 && p->cols > 0;
}

/** The number of the block of columns that begins at @first, among those of all ranks. */
static int32_t block_at(const peri__route_table *table, int64_t first)
{
    int32_t n = 0;
    for (int32_t i = 0; i < table->n_shards; i++) n += table->shards[i].col_offset < first && begins_block(table, i);
    return n;
}

/** A parameter of the module that was added last. */
static peri_status note_parameter(peri_checkpoint_state *s, int32_t table, int32_t block, int64_t cols)
{
    char name[PERI__NAME_MOST + 1];
    const parameter p = {.of = s->n_tables - 1, .table = table, .block = block, .cols = cols};
    PERI_TRY(peri__grow((void **)&s->parameters, &s->parameters_room, s->n_parameters + 1, sizeof p));
    PERI_TRY(tensor_name(&s->tables[p.of], table, block, NULL, name));
    PERI_TRY(peri__names_add(&s->by_parameter, name, s->n_parameters));
    s->parameters[s->n_parameters++] = p;
    return PERI_OK;
}

/** The parameters of the module that was added last; of its tables over places those that are entries. */
static peri_status note_parameters(peri_checkpoint_state *s, const tables *t)
{
    for (int32_t i = 0; i < t->of->n_tables; i++) {
        const peri__route_table *table = &t->of->tables[i];
        if (!t->coded[i]) PERI_TRY(note_parameter(s, i, 0, table->cols));
        for (int32_t k = 0; t->coded[i] && t->of->places == 1 && k < table->n_shards; k++) {
            const peri_shard *p = &table->shards[k];
            if (begins_block(table, k)) PERI_TRY(note_parameter(s, i, block_at(table, p->col_offset), p->cols));
        }
    }
    return PERI_OK;
}

static peri_status check_lists(const char *f, const peri_sharded_config *config)
{
    PERI_TRY(peri__list_check(f, "tables", config->tables, config->n_tables));
    PERI_TRY(peri__list_check(f, "optimizers", config->optimizers, config->n_optimizers));
    for (int32_t i = 0; i < config->n_tables; i++) {
        peri_sharded_table table;
        PERI_TRY(peri__struct_take(&table, sizeof table, peri__struct_at(config->tables, i), f, "peri_sharded_table"));
        if (table.compute_kernel == PERI_KERNEL_FUSED &&
            (table.optimizer < 0 || table.optimizer >= config->n_optimizers))
            return peri__fail(PERI_EINVAL, "%s: table %d: optimizer number %d, allowed: 0..%d", f, i, table.optimizer,
                              config->n_optimizers - 1);
    }
    for (int32_t o = 0; o < config->n_optimizers; o++) {
        peri_tbe_optimizer_config optimizer;
        PERI_TRY(peri__struct_take(&optimizer, sizeof optimizer, peri__struct_at(config->optimizers, o), f,
                                   "peri_tbe_optimizer_config"));
        PERI_TRY(peri__optimizer_kind_check(f, optimizer.kind));
    }
    return PERI_OK;
}

peri_status peri_checkpoint_state_tables(peri_checkpoint_state *s, const char *part, const char *path, peri_sharded *of,
                                         const peri_sharded_config *config)
{
    peri_local_shard l;
    PERI_NEED(s);
    PERI_NEED(part);
    PERI_NEED(path);
    PERI_NEED(of);
    PERI_TAKE(peri_sharded_config, config);
    if (config->n_tables != of->n_tables || config->n_optimizers != of->n_optimizers)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_state_tables: config has %d tables and %d optimizers, the module %d and %d; "
                          "allowed: the configuration that it was made of",
                          config->n_tables, config->n_optimizers, of->n_tables, of->n_optimizers);
    if (of->n_managed)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_checkpoint_state_tables: tables of raw ids, such as '%s', are saved from Lua, with "
                          "their maps",
                          of->table_names[0]);
    PERI_TRY(check_lists(__func__, config));
    PERI_TRY(peri__grow((void **)&s->tables, &s->tables_room, s->n_tables + 1, sizeof *s->tables));
    tables *t = &s->tables[s->n_tables];
    *t = (tables){.part = peri__strdup(part), .path = peri__strdup(path), .of = of};
    peri_sharded_retain(of);
    s->n_tables++;
    if (!t->part || !t->path) return PERI_ENOMEM;
    PERI_TRY(note_tables(t, config));
    PERI_TRY(note_parameters(s, t));
    for (int32_t i = 0, last = -1, place = 0; i < peri_sharded_local_shards(of); i++, last = l.table) {
        PERI_TRY(peri_sharded_local_shard(of, i, &l));
        place = l.table == last ? place + 1 : 0;
        if (l.shard.rows == 0 || l.shard.cols == 0) continue;
        const int32_t block = !t->coded[l.table] ? 0
                              : of->places > 1   ? place
                                                 : block_at(&of->tables[l.table], l.shard.col_offset);
        for (int32_t k = 0; peri_tbe_state_name(l.tbe, k); k++)
            PERI_TRY(add_state(s, t, &l, block, peri_tbe_state_name(l.tbe, k)));
        if (t->optimizer[l.table] >= 0) PERI_TRY(add_count(s, t, &l));
    }
    return PERI_OK;
}

/** Whether @name is that of a table's weight or of a state of its optimizer (tensor_name). */
static bool of_table(const peri_checkpoint_state *s, const char *name)
{
    static const char states[] = ".tables/state/";
    char weight[PERI__NAME_MOST + 1], other[PERI__NAME_MOST + 1];
    const char *state = strstr(name, states), *end = strrchr(name, '/');
    if (strlen(name) > PERI__NAME_MOST) return false;
    if (state && end - state >= (ptrdiff_t)strlen(states)) /* PART, "/", PARAMETER of it */
        snprintf(weight, sizeof weight, "%.*s/%.*s", (int)(state - name), name,
                 (int)(end - state - (ptrdiff_t)strlen(states)), state + strlen(states));
    else snprintf(weight, sizeof weight, "%s", name);
    for (int64_t at = -1, k; (k = peri__names_next(&s->by_parameter, weight, &at)) >= 0;) {
        const parameter *p = &s->parameters[k];
        if (tensor_name(&s->tables[p->of], p->table, p->block, NULL, other) >= 0 && strcmp(other, weight) == 0)
            return true;
    }
    return false;
}

/* -- values -------------------------------------------------------------------------------------------------------- */

/** The group of the tables that optimizer @o trains: {"params":[...],"optimizer":"adam","lr":0.1}. */
static void print_group(peri__buffer *b, const tables *t, int32_t o, bool *first)
{
    char name[PERI__NAME_MOST + 1], number[32];
    bool some = false;
    for (int32_t i = 0; i < t->of->n_tables; i++) {
        if (t->optimizer[i] != o || parameter_name(t, i, name) < 0) continue;
        peri__buffer_print(b, "%s%s", some || *first ? "" : ",", some ? "," : "{\"params\":[");
        peri__buffer_quote(b, name);
        some = true;
    }
    if (!some) return;
    *first = false;
    peri__buffer_print(b, "],\"optimizer\":\"%s\",\"lr\":%s}", t->kinds[o],
                       peri__number_text(t->of->rates[o].rate, number));
}

/** Whether a fused optimizer trains some table: else there is no part "PART.tables". */
static bool is_trained(const tables *t)
{
    bool some = false;
    for (int32_t i = 0; i < t->of->n_tables; i++) some = some || t->optimizer[i] >= 0;
    return some;
}

/** "PART.tables": the groups and parameters of the tables of a part. */
static void print_tables(peri__buffer *b, const tables *t)
{
    char name[PERI__NAME_MOST + 1];
    bool first = true;
    peri__buffer_print(b, ",\"");
    peri__buffer_append(b, t->part, (int64_t)strlen(t->part));
    peri__buffer_print(b, ".tables\":{\"param_groups\":[");
    for (int32_t o = 0; o < t->of->n_optimizers; o++) print_group(b, t, o, &first);
    peri__buffer_print(b, "],\"state\":{");
    first = true;
    for (int32_t i = 0; i < t->of->n_tables; i++) {
        if (t->optimizer[i] < 0 || parameter_name(t, i, name) < 0) continue;
        peri__buffer_print(b, "%s", first ? "" : ",");
        peri__buffer_quote(b, name);
        peri__buffer_print(b, ":{}");
        first = false;
    }
    peri__buffer_print(b, "}}");
}

/** The part of number @i among the modules with tables, and then among all entries; *n: its bytes. */
static const char *part_at(const peri_checkpoint_state *s, int64_t i, size_t *n)
{
    const char *name = i < s->n_tables ? s->tables[i].part : s->entries[i - s->n_tables].name;
    *n = strcspn(name, "/.");
    return name;
}

/** Whether part_at(@i) was there before; else it is noted in @seen. */
static peri_status part_seen(const peri_checkpoint_state *s, int64_t i, peri__names *seen, bool *before)
{
    char text[PERI__NAME_MOST + 1];
    size_t n, other;
    const char *part = part_at(s, i, &n);
    snprintf(text, sizeof text, "%.*s", (int)n, part);
    *before = false;
    for (int64_t at = -1, k; !*before && (k = peri__names_next(seen, text, &at)) >= 0;)
        *before = strncmp(part_at(s, k, &other), part, n) == 0 && other == n;
    return *before ? PERI_OK : peri__names_add(seen, text, i);
}

/** Write the parts of @s, each once, as members of an object: "model":{},"ema":{}. @modules: only those that have
 *  modules with tables. */
static void print_parts(peri__buffer *b, const peri_checkpoint_state *s, bool modules)
{
    peri__names seen = {0};
    for (int64_t i = 0; i < s->n_tables + (modules ? 0 : s->n); i++) {
        size_t n;
        const char *part = part_at(s, i, &n);
        const bool first = seen.n == 0;
        bool before;
        peri_status status = part_seen(s, i, &seen, &before);
        if (status < 0) b->status = status;
        if (status < 0 || before) continue;
        peri__buffer_print(b, "%s\"", first ? "" : ",");
        peri__buffer_append(b, part, (int64_t)n);
        peri__buffer_print(b, "\":{}");
    }
    peri__names_free(&seen);
}

/** "TENSOR":"INT8 x 4". */
static void print_format(peri__buffer *b, const char *name, int32_t coded, int64_t cols, bool *some)
{
    char text[PERI__FORMAT_ROOM];
    if (!coded) return;
    peri__buffer_print(b, "%s", *some ? "," : ",\"rows\":{");
    peri__buffer_quote(b, name);
    peri__buffer_print(b, ":\"%s\"", peri__format_text(coded, cols, text));
    *some = true;
}

/** How rows of bytes of all ranks are stored. */
static void print_formats(peri__buffer *b, const peri_checkpoint_state *s)
{
    char name[PERI__NAME_MOST + 1];
    bool some = false;
    for (int64_t i = 0; i < s->n_parameters; i++) {
        const parameter *p = &s->parameters[i];
        const tables *t = &s->tables[p->of];
        if (tensor_name(t, p->table, p->block, NULL, name) >= 0)
            print_format(b, name, t->coded[p->table], p->cols, &some);
    }
    for (int64_t i = 0; i < s->n; i++) {
        const entry *e = &s->entries[i];
        if (e->coded && !of_table(s, e->name)) print_format(b, e->name, e->coded, e->cols, &some);
    }
    if (some) peri__buffer_print(b, "}");
}

peri_status peri_checkpoint_state_values(peri_checkpoint_state *s, const char *user, const char **out)
{
    PERI_NEED(s);
    PERI_NEED(out);
    peri__buffer *b = &s->values;
    b->bytes = 0;
    b->status = PERI_OK;
    peri__buffer_print(b, "{\"parts\":{");
    print_parts(b, s, false);
    for (int64_t i = 0; i < s->n_tables; i++)
        if (is_trained(&s->tables[i])) print_tables(b, &s->tables[i]);
    peri__buffer_print(b, "},\"extra\":{");
    print_parts(b, s, true);
    peri__buffer_print(b, "}");
    print_formats(b, s);
    if (user) {
        peri__buffer_print(b, ",\"values\":");
        peri__buffer_append(b, user, (int64_t)strlen(user));
    }
    peri__buffer_print(b, "}");
    *out = b->data;
    return b->status;
}

/* -- writing ------------------------------------------------------------------------------------------------------- */

/** Rows of a table behind a cache, block by block: to a writer, or (@c) from tensor @index of a checkpoint. */
static peri_status move_rows(const entry *e, peri_checkpoint_writer *w, peri_checkpoint *c, int64_t index)
{
    const int64_t row_bytes = peri__max(1, (e->ndim > 1 ? e->region.size[1] : 1) * peri_dtype_size(e->dtype));
    const int64_t step = peri__max(1, PERI__IO_BLOCK / row_bytes);
    for (int64_t row = 0; row < e->region.size[0]; row += step) {
        peri_checkpoint_region r = {.size = sizeof r, .column = e->region.column, .columns = e->region.columns};
        peri_tensor *block;
        peri_device *cpu;
        memcpy(r.offset, e->region.offset, sizeof r.offset);
        memcpy(r.extent, e->region.size, sizeof r.extent);
        r.offset[0] += row;
        r.extent[0] = peri__min(step, e->region.size[0] - row);
        PERI_TRY(peri_device_get("cpu", &cpu));
        PERI_TRY(peri_tensor_new(cpu, e->dtype, e->ndim, r.extent, &block));
        peri_status status =
            w ? peri_tbe_read(e->tbe, e->table, e->state, row, block) : peri_checkpoint_read(c, index, &r, block);
        if (status >= 0)
            status = w ? peri_checkpoint_writer_put(w, block) : peri_tbe_write(e->tbe, e->table, e->state, row, block);
        peri_tensor_release(block);
        PERI_TRY(status);
    }
    return PERI_OK;
}

/** The rows of a matrix that a block on its diagonal is in: zeros beside it. */
static peri_status put_block(const entry *e, peri_checkpoint_writer *w)
{
    const int64_t first = e->region.offset[0], past = first + e->region.size[0];
    peri_device *cpu;
    peri_tensor *rows, *part = NULL;
    PERI_TRY(peri_device_get("cpu", &cpu));
    PERI_TRY(peri_tensor_full(cpu, e->dtype, 2, e->region.size, 0, &rows));
    peri_status status = peri_tensor_slice(rows, 1, first, past, 1, &part);
    if (status >= 0) status = peri_tensor_copy(part, e->tensor);
    if (status >= 0) status = peri_checkpoint_writer_put(w, rows);
    peri_tensor_release(part);
    peri_tensor_release(rows);
    return status;
}

peri_status peri_checkpoint_state_write(peri_checkpoint_state *s, peri_checkpoint_writer *w)
{
    PERI_NEED(s);
    PERI_NEED(w);
    for (int64_t i = 0; i < s->n; i++) {
        const entry *e = &s->entries[i];
        peri_checkpoint_tensor t = {.size = sizeof t, .name = e->name, .dtype = e->dtype, .ndim = e->ndim};
        memcpy(t.shape, e->shape, sizeof t.shape);
        if (e->writes) PERI_TRY(peri__writer_add(w, &t, &e->region));
    }
    for (int64_t i = 0; i < s->n; i++) {
        const entry *e = &s->entries[i];
        const int64_t updates = e->counts ? peri_tbe_iteration(e->tbe) : 0;
        if (!e->writes) continue;
        if (e->counts) PERI_TRY(peri_checkpoint_writer_put_bytes(w, &updates, sizeof updates));
        else if (e->tbe) PERI_TRY(move_rows(e, w, NULL, 0));
        else if (e->block) PERI_TRY(put_block(e, w));
        else PERI_TRY(peri_checkpoint_writer_put(w, e->tensor));
    }
    return peri_checkpoint_writer_finish(w);
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

/** Append a line to a list of what does not fit. */
static void add_complaint(peri__buffer *b, const char *name, const char *what)
{
    if (b->bytes > 400) return; /* an error's message ends somewhere */
    peri__buffer_print(b, "%s'", b->bytes ? "; " : "");
    peri__buffer_append(b, name, (int64_t)strlen(name));
    peri__buffer_print(b, "' %s", what);
}

/** Whether a tensor of the checkpoint is of a part that is here, and no other rank can have it. */
static bool left_over(const peri_checkpoint_state *s, const char *name)
{
    int64_t at = -1;
    return next_of(s, name, &at) < 0 && !of_table(s, name);
}

/** Whether the rows of a quantized table are stored as the checkpoint says. Bytes of which it says nothing may be
 *  any. */
static peri_status check_format(const entry *e, peri_checkpoint *c, peri__buffer *b)
{
    const char *there;
    char here[PERI__FORMAT_ROOM], what[400];
    if (!e->coded) return PERI_OK;
    PERI_TRY(peri__format_of(&c->formats, peri_checkpoint_values(c), e->name, &there));
    if (!there || strcmp(peri__format_text(e->coded, e->cols, here), there) == 0) return PERI_OK;
    snprintf(what, sizeof what, "has rows of %s here, and rows of %.250s in the checkpoint", here, there);
    add_complaint(b, e->name, what);
    return PERI_OK;
}

static peri_status check_all_entries(const peri_checkpoint_state *s, peri_checkpoint *c)
{
    peri__buffer b = {0};
    peri_status status = PERI_OK;
    for (int64_t i = 0; i < s->n; i++) {
        const entry *e = &s->entries[i];
        peri_checkpoint_tensor t = {.size = sizeof t};
        const int64_t index = peri_checkpoint_find(c, e->name);
        if (index < 0) add_complaint(&b, e->name, "is not in it");
        else if (peri_checkpoint_tensor_at(c, index, &t) < 0 || t.dtype != e->dtype)
            add_complaint(&b, e->name, "has another dtype");
        else if (t.ndim != e->ndim || memcmp(t.shape, e->shape, (size_t)e->ndim * sizeof *e->shape) != 0)
            add_complaint(&b, e->name, "has another shape");
    }
    for (int64_t i = 0; i < peri_checkpoint_count(c); i++) {
        peri_checkpoint_tensor t = {.size = sizeof t};
        if (peri_checkpoint_tensor_at(c, i, &t) < 0 || peri__is_list(t.name)) continue;
        if (left_over(s, t.name)) add_complaint(&b, t.name, "has no place here");
    }
    for (int64_t i = 0; status >= 0 && i < s->n; i++) status = check_format(&s->entries[i], c, &b);
    if (status >= 0) status = b.status;
    if (status >= 0 && b.bytes) status = peri__fail(PERI_EMISMATCH, "peri_checkpoint_state_read: %s", b.data);
    peri__free(b.data);
    return status;
}

static peri_status read_entry(entry *e, peri_checkpoint *c)
{
    const int64_t index = peri_checkpoint_find(c, e->name);
    peri_checkpoint_region r = {.size = sizeof r, .column = e->region.column, .columns = e->region.columns};
    memcpy(r.offset, e->region.offset, sizeof r.offset);
    memcpy(r.extent, e->region.size, sizeof r.extent);
    if (e->block) r.offset[1] = r.offset[0], r.extent[1] = r.extent[0];
    if (e->counts) return peri_checkpoint_read_since(c, -1, index, &r, &e->updates);
    if (e->tbe) return move_rows(e, NULL, c, index);
    return peri_checkpoint_read(c, index, &r, e->tensor);
}

/** One of param_groups: its rate is that of the optimizers of the tables that it names. @rates: by optimizer; -1:
 *  nothing was said. */
static void read_group(peri__json *j, const tables *t, double *rates)
{
    char key[64], param[PERI__NAME_MOST + 1], name[PERI__NAME_MOST + 1];
    const char *params = NULL, *rate = NULL;
    int64_t params_bytes = 0, rate_bytes = 0;
    double lr;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (strcmp(key, "params") == 0) peri__json_skip(j, &params, &params_bytes);
        else if (strcmp(key, "lr") == 0) peri__json_skip(j, &rate, &rate_bytes);
        else peri__json_skip(j, NULL, NULL);
    }
    if (!params || !rate || !peri__number_of(rate, rate_bytes, &lr)) return;
    peri__json list;
    peri__json_open(&list, params, params_bytes, "params");
    for (peri__json_enter(&list, '['); peri__json_item(&list);) {
        if (!peri__json_text(&list, param, sizeof param)) return;
        for (int32_t i = 0; i < t->of->n_tables; i++)
            if (t->optimizer[i] >= 0 && parameter_name(t, i, name) >= 0 && strcmp(name, param) == 0)
                rates[t->optimizer[i]] = lr;
    }
}

/** "parts": "PART.tables": "param_groups". */
static void read_rates(const char *values, const tables *t, double *rates)
{
    peri__json j;
    char key[128], wanted[128];
    snprintf(wanted, sizeof wanted, "%.100s.tables", t->part);
    peri__json_open(&j, values, (int64_t)strlen(values), "values");
    peri__json_enter(&j, '{');
    while (peri__json_key(&j, key, sizeof key) && strcmp(key, "parts") != 0) peri__json_skip(&j, NULL, NULL);
    if (strcmp(key, "parts") != 0 || !peri__json_enter(&j, '{')) return;
    while (peri__json_key(&j, key, sizeof key) && strcmp(key, wanted) != 0) peri__json_skip(&j, NULL, NULL);
    if (strcmp(key, wanted) != 0 || !peri__json_enter(&j, '{')) return;
    while (peri__json_key(&j, key, sizeof key) && strcmp(key, "param_groups") != 0) peri__json_skip(&j, NULL, NULL);
    if (strcmp(key, "param_groups") != 0) return;
    for (peri__json_enter(&j, '['); peri__json_item(&j);) read_group(&j, t, rates);
}

/** Learning rates and counts of updates of a module's tables. */
static peri_status settle(const peri_checkpoint_state *s, const tables *t, const char *values)
{
    const int32_t n = t->of->n_optimizers;
    double *rates = peri__alloc(sizeof *rates * (size_t)peri__max(1, n));
    peri_status status = rates ? PERI_OK : PERI_ENOMEM;
    for (int32_t o = 0; rates && o < n; o++) rates[o] = -1;
    if (rates) read_rates(values, t, rates);
    for (int32_t o = 0; status >= 0 && o < n; o++)
        if (rates[o] >= 0) status = peri_sharded_learning_rate_set(t->of, o, rates[o]);
    peri__free(rates);
    for (int64_t i = 0; status >= 0 && i < s->n; i++)
        if (s->entries[i].counts == t->of && s->entries[i].updates >= 0)
            return peri_sharded_iteration_set(t->of, s->entries[i].updates);
    return status;
}

peri_status peri_checkpoint_state_read(peri_checkpoint_state *s, peri_checkpoint *c)
{
    PERI_NEED(s);
    PERI_NEED(c);
    PERI_TRY(check_all_entries(s, c));
    for (int64_t i = 0; i < s->n; i++) PERI_TRY(read_entry(&s->entries[i], c));
    for (int64_t i = 0; i < s->n_tables; i++) PERI_TRY(settle(s, &s->tables[i], peri_checkpoint_values(c)));
    return PERI_OK;
}
