/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c: plans as data: the JSON that planners write (lua/perilune/plan/json.lua has an example), read without Lua and
 * put into the tables of a sharded module.
 */
#include "../base/buffer.h"
#include "../base/json.h"
#include "plan_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { NAME = 1000, MOST_BYTES = 256 << 20 }; /* bytes of a name with its 0, of a plan's text */

/** What a plan says of one table, or that it has a module. */
typedef struct entry {
    char *module, *table; /* of one block, which `module` begins */
    bool head;            /* of a module, whose tables come behind it in the sorted list; nothing else is said */
    int32_t type;
    const peri__kernel *kernel;
    peri_cache_config cache;
    int32_t *ranks, *hosts;
    int64_t *sizes;
    int64_t n_ranks, n_hosts, n_sizes;
    int32_t *host_ranks; /* ranks of `hosts` in the group of the last peri_plan_apply */
} entry;

struct peri_plan {
    peri__refs refs;
    entry *entries;
    int64_t n, room;
    char *name;
};

/** While a plan is read. `status`: of what is JSON, and yet no plan. */
typedef struct reader {
    peri__json j;
    peri_plan *plan;
    char module[NAME], table[NAME];
    peri_status status;
} reader;

/* -- entries ------------------------------------------------------------------------------------------------------- */

static void entry_fini(entry *e)
{
    void *const all[] = {e->module, e->ranks, e->hosts, e->sizes, e->host_ranks};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri__free(all[i]);
}

/** Stop reading: what follows is what an entry says that no plan may. */
static void __attribute__((format(printf, 2, 3))) refuse_entry(reader *r, const char *format, ...)
{
    if (r->j.status < 0 || r->status < 0) return;
    char wrong[PERI_MESSAGE_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(wrong, sizeof wrong, format, args);
    va_end(args);
    r->status = peri__fail(PERI_EINVAL, "plan '%.120s': module '%.80s', table '%.80s': %.200s", r->plan->name,
                           r->module, r->table, wrong);
    r->j.status = r->status;
}

static bool read_option(reader *r, const char *option, int32_t *out)
{
    char name[80];
    if (!peri__json_text(&r->j, name, sizeof name)) return false;
    if (peri_option_value(option, name, out) >= 0) return true;
    refuse_entry(r, "%s", peri_error_message());
    return false;
}

static void read_kernel(reader *r, entry *e)
{
    char name[80];
    if (!peri__json_text(&r->j, name, sizeof name)) return;
    const peri__kernel *kernel = peri__kernel_of(name);
    if (kernel) e->kernel = kernel;
    else
        refuse_entry(r, "compute_kernel is '%s', allowed: fused, dense, fused_uvm, fused_uvm_caching, quant, quant_uvm",
               name);
}

/** A list of whole numbers below @limit; @wide: of 64 bits, else of 32. */
static void *read_list(reader *r, const char *what, bool wide, int64_t *n)
{
    int64_t room = 0;
    void *list = NULL;
    *n = 0;
    for (peri__json_enter(&r->j, '['); peri__json_item(&r->j);) {
        const int64_t x = peri__json_integer(&r->j);
        if (x < 0 || (!wide && x > INT32_MAX))
            refuse_entry(r, "%s[%lld] is %lld, allowed: 0 and more%s", what, (long long)*n, (long long)x,
                   wide ? "" : ", below 2^31");
        const peri_status status = peri__grow(&list, &room, *n + 1, wide ? sizeof(int64_t) : sizeof(int32_t));
        if (status < 0) r->status = r->j.status = status;
        if (r->j.status < 0) break;
        if (wide) ((int64_t *)list)[(*n)++] = x;
        else ((int32_t *)list)[(*n)++] = (int32_t)x;
    }
    if (*n == 0) refuse_entry(r, "0 %s, allowed: 1 and more, or no list", what);
    return list;
}

static double read_number(reader *r, const char *what)
{
    const char *from = "";
    int64_t bytes = 0;
    double x = 0;
    if (peri__json_skip(&r->j, &from, &bytes) && !peri__number_of(from, bytes, &x))
        refuse_entry(r, "%s is no number", what);
    return x;
}

static void read_cache(reader *r, entry *e)
{
    char key[NAME];
    const char *from = "";
    int64_t bytes = 0;
    int32_t type = PERI_F32;
    for (peri__json_enter(&r->j, '{'); peri__json_key(&r->j, key, sizeof key);) {
        if (!strcmp(key, "algorithm")) read_option(r, "cache_algorithm", &e->cache.algorithm);
        else if (!strcmp(key, "load_factor")) {
            e->cache.load_factor = read_number(r, "load_factor");
            if (!(e->cache.load_factor > 0 && e->cache.load_factor <= 1))
                refuse_entry(r, "load_factor is out of range, allowed: above 0, to 1");
        } else if (!strcmp(key, "reserved_memory")) {
            e->cache.reserved_memory = peri__json_integer(&r->j);
            if (e->cache.reserved_memory < 0) refuse_entry(r, "reserved_memory is below 0");
        } else if (!strcmp(key, "ways")) {
            const int64_t ways = peri__json_integer(&r->j);
            if (ways < 0 || ways > PERI_CACHE_WAYS_MAX) refuse_entry(r, "ways is out of range, allowed: 0..256");
            e->cache.ways = ways == 0 ? PERI_CACHE_WAYS_NONE : (int32_t)ways;
        } else if (!strcmp(key, "precision")) { /* a note: cached rows are as the table's */
            if (read_option(r, "data_type", &type) && type >= PERI_ROWS_INT8)
                refuse_entry(r, "precision, allowed: FP32, FP16, BF16");
        } else if (!strcmp(key, "prefetch_pipeline")) { /* a note to planners */
            if (peri__json_skip(&r->j, &from, &bytes) && strncmp(from, "true", 4) != 0 &&
                strncmp(from, "false", 5) != 0)
                refuse_entry(r, "prefetch_pipeline, wanted: true or false");
        } else
            refuse_entry(r,
                   "cache_params have a key that is none of algorithm, load_factor, reserved_memory, ways, precision, "
                   "prefetch_pipeline");
    }
}

/** What the keys of an entry have to do with each other. */
static void check_entry(reader *r, const entry *e, bool typed, bool with_cache)
{
    char types[120];
    if (!typed) refuse_entry(r, "sharding_type is missing");
    if (with_cache && !e->kernel->cached)
        refuse_entry(r, "cache_params, allowed with compute_kernel fused_uvm_caching");
    if (e->hosts && e->ranks) refuse_entry(r, "hosts and ranks; give one of them");
    const int32_t facts = peri_sharding_type_facts(e->type), in_node = PERI_SHARDING_IN_NODE,
                  both = PERI_SHARDING_CUTS_ROWS | PERI_SHARDING_CUTS_COLUMNS;
    if (e->hosts && typed && !(facts & in_node))
        refuse_entry(r, "hosts, allowed with sharding_type %s",
               peri__sharding_types_text(in_node, in_node, types, sizeof types));
    if (e->n_hosts > 1 && (facts & both) != both)
        refuse_entry(r, "several hosts, allowed with sharding_type %s; else 1",
               peri__sharding_types_text(both, both, types, sizeof types));
    if (e->kernel->cached && (facts & PERI_SHARDING_REPLICA))
        refuse_entry(r, "replicas are in memory; allowed compute_kernel: dense, fused, fused_uvm");
    if (e->sizes && e->n_sizes != e->n_ranks)
        refuse_entry(r, "%lld sizes for %lld ranks; give one size for each rank", (long long)e->n_sizes,
               (long long)e->n_ranks);
}

/** Let the plan have @e, of the module and table that are read. */
static void add_entry(reader *r, entry e)
{
    peri_plan *p = r->plan;
    const size_t module = strlen(r->module) + 1, table = strlen(r->table) + 1;
    if (r->j.status >= 0) {
        e.module = peri__alloc(module + table);
        if (!e.module || peri__grow((void **)&p->entries, &p->room, p->n + 1, sizeof *p->entries) < 0)
            r->status = r->j.status = PERI_ENOMEM;
    }
    if (r->j.status < 0) {
        entry_fini(&e);
        return;
    }
    memcpy(e.module, r->module, module);
    e.table = memcpy(e.module + module, r->table, table);
    p->entries[p->n++] = e;
}

static void read_entry(reader *r)
{
    entry e = {.kernel = peri__kernel_of("fused"), .cache = {.size = sizeof e.cache}};
    char key[NAME];
    bool typed = false, with_cache = false;
    for (peri__json_enter(&r->j, '{'); peri__json_key(&r->j, key, sizeof key);) {
        if (!strcmp(key, "sharding_type")) typed = read_option(r, "sharding_type", &e.type);
        else if (!strcmp(key, "compute_kernel")) read_kernel(r, &e);
        else if (!strcmp(key, "ranks") && !e.ranks) e.ranks = read_list(r, key, false, &e.n_ranks);
        else if (!strcmp(key, "hosts") && !e.hosts) e.hosts = read_list(r, key, false, &e.n_hosts);
        else if (!strcmp(key, "sizes") && !e.sizes) e.sizes = read_list(r, key, true, &e.n_sizes);
        else if (!strcmp(key, "cache_params")) read_cache(r, &e), with_cache = true;
        else
            refuse_entry(r,
                   "no key '%.80s'; allowed, each once: sharding_type, compute_kernel, ranks, sizes, hosts, "
                   "cache_params",
                   key);
    }
    check_entry(r, &e, typed, with_cache);
    add_entry(r, e);
}

/* -- plans --------------------------------------------------------------------------------------------------------- */

void peri_plan_release(peri_plan *plan)
{
    if (!plan || !peri__refs_drop(&plan->refs)) return;
    for (int64_t i = 0; i < plan->n; i++) entry_fini(&plan->entries[i]);
    peri__free(plan->entries);
    peri__free(plan->name);
    peri__free(plan);
    peri__object_count(-1);
}

void peri_plan_retain(peri_plan *plan)
{
    if (plan) peri__refs_add(&plan->refs);
}

static int by_names(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    const int module = strcmp(x->module, y->module);
    return module ? module : x->head != y->head ? y->head - x->head : strcmp(x->table, y->table);
}

/** Sort the entries; an error if one comes twice. */
static peri_status sort_entries(peri_plan *p)
{
    if (p->n) qsort(p->entries, (size_t)p->n, sizeof *p->entries, by_names);
    for (int64_t i = 1; i < p->n; i++)
        if (by_names(&p->entries[i - 1], &p->entries[i]) == 0)
            return peri__fail(PERI_EINVAL, "plan '%.120s': module '%.80s'%s%.80s%s comes twice", p->name,
                              p->entries[i].module, p->entries[i].head ? "" : ", table '", p->entries[i].table,
                              p->entries[i].head ? "" : "'");
    return PERI_OK;
}

static void read_modules(reader *r)
{
    for (peri__json_enter(&r->j, '{'); peri__json_key(&r->j, r->module, sizeof r->module);) {
        r->table[0] = 0;
        add_entry(r, (entry){.head = true});
        for (peri__json_enter(&r->j, '{'); peri__json_key(&r->j, r->table, sizeof r->table);) read_entry(r);
    }
}

peri_status peri_plan_parse(const char *name, const char *text, int64_t bytes, peri_plan **out)
{
    PERI_NEED(name, text, out);
    char what[200], key[80];
    bool version = false, modules = false;
    snprintf(what, sizeof what, "plan '%.120s'", name);
    PERI__SCRATCH reader *r = peri__alloc_zero(sizeof *r);
    peri_plan *p = peri__alloc_zero(sizeof *p);
    if (!r || !p || !(p->name = peri__strdup(name))) {
        peri__free(p);
        return PERI_ENOMEM;
    }
    peri__refs_init(&p->refs);
    peri__object_count(1);
    r->plan = p;
    peri__json_open(&r->j, text, bytes, what);
    for (peri__json_enter(&r->j, '{'); peri__json_key(&r->j, key, sizeof key);) {
        if (!strcmp(key, "perilune_plan")) {
            version = true;
            if (peri__json_integer(&r->j) != 1)
                peri__json_fail(&r->j, "perilune_plan, the version of the format, is not 1");
        } else if (!strcmp(key, "modules") && !modules) modules = true, read_modules(r);
        else peri__json_fail(&r->j, "a key that is neither perilune_plan nor modules, or comes twice");
    }
    if (!version || !modules) peri__json_fail(&r->j, "perilune_plan or modules is missing: it is no plan");
    peri_status status = r->status < 0 ? r->status : peri__json_close(&r->j);
    if (status >= 0) status = sort_entries(p);
    if (status < 0) peri_plan_release(p);
    else *out = p;
    return status;
}

peri_status peri_plan_read(const char *path, peri_plan **out)
{
    PERI_NEED(path, out);
    FILE *file = fopen(path, "rbe");
    if (!file)
        return peri__fail(errno == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "plan '%.200s': %s", path, strerror(errno));
    PERI__SCRATCH char *text = NULL;
    int64_t bytes = 0, room = 0;
    peri_status status = PERI_OK;
    for (size_t n = 1; n > 0 && status >= 0; bytes += (int64_t)n) {
        status = bytes > MOST_BYTES
                     ? peri__fail(PERI_EFORMAT, "plan '%.200s': more than %d MiB", path, MOST_BYTES >> 20)
                     : peri__grow((void **)&text, &room, bytes + 65536, 1);
        n = status < 0 ? 0 : fread(text + bytes, 1, 65536, file);
    }
    if (status >= 0 && ferror(file)) status = peri__fail(PERI_EIO, "plan '%.200s': %s", path, strerror(errno));
    fclose(file);
    return status < 0 ? status : peri_plan_parse(path, text, bytes, out);
}

/* -- tables -------------------------------------------------------------------------------------------------------- */

static entry *find_entry(peri_plan *plan, const char *module, const char *table)
{
    const entry wanted = {.module = (char *)(uintptr_t)module, .table = (char *)(uintptr_t)table};
    return plan->n ? bsearch(&wanted, plan->entries, (size_t)plan->n, sizeof wanted, by_names) : NULL;
}

/** *ranks[*n]: all ranks of the entry's hosts, which count @nodes; to be freed, also when this fails. */
static peri_status ranks_of_hosts(const entry *e, const peri__nodes *nodes, int32_t **ranks, int32_t *n)
{
    const int32_t world = nodes->first[nodes->n];
    int32_t *list = *ranks = peri__alloc(sizeof *list * (size_t)peri__max(1, e->n_hosts * world));
    if (!list) return PERI_ENOMEM;
    *n = 0;
    for (int64_t h = 0; h < e->n_hosts; h++) {
        const int32_t host = e->hosts[h];
        if (host >= nodes->n)
            return peri__fail(PERI_EINVAL, "table '%.200s': there is no host %d among those of the group", e->table,
                              host);
        memcpy(list + *n, nodes->ranks + nodes->first[host], sizeof *list * (size_t)peri__node_size(nodes, host));
        *n += peri__node_size(nodes, host);
    }
    return PERI_OK;
}

/** An error unless @e can cut @t over the ranks of @group. *host_ranks, n: as ranks_of_hosts, where it names hosts. */
static peri_status check_table(const entry *e, const peri_sharded_table *t, const peri_group *group,
                               int32_t **host_ranks, int32_t *n)
{
    int32_t shards;
    peri__nodes nodes;
    PERI_TRY(peri__nodes_of_group(&nodes, group));
    peri_status status = e->hosts ? ranks_of_hosts(e, &nodes, host_ranks, n) : PERI_OK;
    const peri_sharding s = {.size = sizeof s,
                             .type = e->type,
                             .world_size = peri_group_size(group),
                             .nodes = nodes.of,
                             .table = e->table,
                             .rows = t->rows,
                             .cols = t->cols,
                             .ranks = e->hosts ? *host_ranks : e->ranks,
                             .n_ranks = e->hosts ? *n : (int32_t)e->n_ranks,
                             .sizes = e->sizes};
    if (status >= 0) status = peri_sharding_shards(&s, NULL, 0, &shards);
    peri__nodes_fini(&nodes);
    return status;
}

static peri_status fail_missing_entry(const peri_plan *plan, const char *module, const char *table)
{
    for (int64_t i = 0; i < plan->n; i++)
        if (!strcmp(plan->entries[i].module, module))
            return peri__fail(PERI_EINVAL, "plan '%.120s': module '%.100s' has no table '%.100s'", plan->name, module,
                              table);
    return peri__fail(PERI_EINVAL, "plan '%.120s' has no module '%.100s'; the first one is '%.100s'", plan->name,
                      module, plan->n ? plan->entries[0].module : "");
}

/** An error if the plan has a table of the module that is none of @tables. */
static peri_status check_tables_known(const peri_plan *plan, const char *module, const peri_sharded_table *tables,
                                      int32_t n)
{
    for (int64_t i = 0; i < plan->n; i++) {
        bool there = plan->entries[i].head || strcmp(plan->entries[i].module, module) != 0;
        for (int32_t t = 0; t < n && !there; t++)
            there = strcmp(((const peri_sharded_table *)peri__struct_at(tables, t))->name, plan->entries[i].table) == 0;
        if (!there)
            return peri__fail(PERI_EINVAL,
                              "plan '%.120s': module '%.100s' has a table '%.100s', which is not among those given",
                              plan->name, module, plan->entries[i].table);
    }
    return PERI_OK;
}

static void apply_entry(entry *e, peri_sharded_table *t, int32_t *host_ranks, int32_t n)
{
    peri__free(e->host_ranks);
    e->host_ranks = host_ranks;
    t->sharding_type = e->type;
    t->compute_kernel = e->kernel->kernel;
    t->mapped = e->kernel->mapped;
    t->cache = e->kernel->cached ? &e->cache : NULL;
    t->ranks = e->hosts ? host_ranks : e->ranks;
    t->n_ranks = e->hosts ? n : (int32_t)e->n_ranks;
    t->sizes = e->sizes;
}

peri_status peri_plan_apply(peri_plan *plan, const char *module, const peri_group *group, peri_sharded_table *tables,
                            int32_t n)
{
    PERI_NEED(plan, module, group, tables);
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_plan_apply: %d tables, allowed: 1 and more", n);
    int32_t **host_ranks = peri__alloc_zero(sizeof *host_ranks * (size_t)n),
            *counts = peri__alloc_zero(sizeof *counts * (size_t)n);
    peri_status status = host_ranks && counts ? PERI_OK : PERI_ENOMEM;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        peri_sharded_table t;
        status = peri__struct_take(&t, sizeof t, peri__struct_at(tables, i), __func__, "peri_sharded_table");
        if (status >= 0 && !t.name) status = peri__fail(PERI_EINVAL, "peri_plan_apply: tables[%d] has no name", i);
        if (status < 0) break;
        const entry *e = find_entry(plan, module, t.name);
        status = e ? check_table(e, &t, group, &host_ranks[i], &counts[i]) : fail_missing_entry(plan, module, t.name);
    }
    if (status >= 0) status = check_tables_known(plan, module, tables, n);
    for (int32_t i = 0; i < n && status >= 0; i++) {
        peri_sharded_table *t = (peri_sharded_table *)(uintptr_t)peri__struct_at(tables, i);
        apply_entry(find_entry(plan, module, t->name), t, host_ranks[i], counts[i]);
        host_ranks[i] = NULL;
    }
    for (int32_t i = 0; host_ranks && i < n; i++) peri__free(host_ranks[i]);
    peri__free(host_ranks);
    peri__free(counts);
    return status;
}
