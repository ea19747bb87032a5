/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_open.c: making and closing tiers: how many rows fit into the device's memory, where the others are. See tier.h.
 */
#include "tier.h"

#include <math.h>

enum { DEVICE_WAYS = 64 }; /* of caches in a device's own memory: docs/benchmarks/gpu.md says why */

/* -- sizes --------------------------------------------------------------------------------------------------------- */

static peri_status check_params(const peri_tbe_config *c)
{
    static const char *const f = "peri_tbe_new";
    for (int64_t i = 0; i < c->n_tables; i++) {
        const peri_cache_config *p = &c->caches[i];
        const char *name = c->tables[i].name ? c->tables[i].name : "";
        if (!(p->load_factor > 0 && p->load_factor <= 1))
            return peri__fail(PERI_EINVAL, "%s: table '%s': load_factor %g, allowed: 0 < load_factor <= 1", f, name,
                              p->load_factor);
        if (p->algorithm != PERI_CACHE_LRU && p->algorithm != PERI_CACHE_LFU)
            return peri__fail(PERI_EINVAL, "%s: table '%s': cache algorithm %d, allowed: 0 (LRU), 1 (LFU)", f, name,
                              p->algorithm);
        if (p->ways < PERI_CACHE_WAYS_NONE || p->ways > PERI_CACHE_WAYS_MAX)
            return peri__fail(PERI_EINVAL,
                              "%s: table '%s': ways %d, allowed: 1 to %d, 0 (the default), %d (rows may use any slot)",
                              f, name, p->ways, PERI_CACHE_WAYS_MAX, PERI_CACHE_WAYS_NONE);
        if (p->reserved_memory < 0)
            return peri__fail(PERI_EINVAL, "%s: table '%s': reserved_memory %lld, allowed: 0 or more bytes", f, name,
                              (long long)p->reserved_memory);
        if (p->directory && !*p->directory)
            return peri__fail(PERI_EINVAL, "%s: table '%s': the directory has no name", f, name);
        if (strlen(name) >= PERI__ROW_NAME_MAX)
            return peri__fail(PERI_EINVAL, "%s: table '%.60s...' has a name of %zu bytes, allowed in files: %d", f,
                              name, strlen(name), PERI__ROW_NAME_MAX - 1);
    }
    return PERI_OK;
}

/** Of the memory that a device's tables are in: bytes that can be had. */
static peri_status memory_for_caches(peri_device *device, int64_t reserved, int64_t *available)
{
    if (peri_device_host_access(device)) *available = peri__available_memory();
    else PERI_TRY(peri_device_memory(device, available));
    /* for batches, and for rows on their way */
    if (*available > 0 && !peri_device_host_access(device)) *available -= *available / 8;
    if (*available < 0 && reserved > 0)
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_tbe_new: reserved_memory is %lld bytes, but device %s does not tell how much memory it "
                          "has left; allowed there: 0",
                          (long long)reserved, peri_device_name(device));
    if (*available < 0) *available = INT64_MAX;
    return PERI_OK;
}

/** Rows of the cache of table @i, as its load_factor says. */
static int64_t slots_of(const peri_tbe_config *c, int64_t i)
{
    int64_t rows = c->tables[i].rows;
    if (rows <= 0) return 0;
    /* Rounding up must not turn 0.2 * 50 into 11. */
    int64_t slots =
        peri__max(1, peri__min(rows, (int64_t)ceil((double)rows * c->caches[i].load_factor - 1e-9 * (double)rows)));
    return peri__min(slots, (int64_t)PERI__WANTED / 2);
}

static int32_t cache_ways(const peri_cache_config *p, bool apart)
{
    return p->ways > 0 ? p->ways : p->ways == 0 && apart ? DEVICE_WAYS : 0;
}

static int32_t cache_algorithm(const peri_cache_config *p)
{
    return p->algorithm == PERI_CACHE_LFU ? PERI__LFU : PERI__LRU;
}

peri_status peri__tier_bytes(const peri_tbe_config *c, int64_t i, bool apart, int64_t *slots, double *host,
                             double *files)
{
    const peri_table_config *t = &c->tables[i];
    PERI_TRY(check_params(c));
    *slots = slots_of(c, i);
    peri__state states[PERI__STATES];
    peri__row_header h = {.rows = t->rows, .cols = t->cols};
    int32_t n = peri__states_of(c->dtype, c->optimizer, states);
    for (int32_t k = 0; k < n; k++) {
        if (!peri__has_rows(states[k].geometry)) continue;
        int32_t bytes = (int32_t)peri_dtype_size(states[k].dtype);
        h.part_bytes[h.n_parts++] = states[k].geometry == PERI_STATE_ROW ? -bytes : bytes;
    }
    double records = (double)t->rows * (double)peri__row_record_bytes(&h);
    *(apart && !c->caches[i].directory ? host : files) += records;
    *host +=
        (double)peri__row_map_bytes(t->rows) +
        (double)peri__cache_bytes(t->rows, *slots, cache_ways(&c->caches[i], apart), cache_algorithm(&c->caches[i]));
    return PERI_OK;
}

peri_status peri__tier_slots(const peri_tbe_config *c, int64_t **out)
{
    PERI_TRY(check_params(c));
    int64_t *slots = peri__alloc_zero(sizeof *slots * (size_t)peri__max(1, c->n_tables));
    if (!slots) return PERI_ENOMEM;
    double wanted = 0;
    int64_t reserved = 0;
    for (int64_t i = 0; i < c->n_tables; i++) {
        const peri_table_config *t = &c->tables[i];
        slots[i] = slots_of(c, i);
        if (slots[i] == 0) continue;
        wanted += (double)slots[i] * (double)t->cols * (double)peri_dtype_size(c->dtype) *
                  peri__tbe_weight_sized_tensors(c->optimizer);
        reserved = peri__max(reserved, c->caches[i].reserved_memory);
    }
    int64_t available;
    peri_status status = memory_for_caches(c->device, reserved, &available);
    if (status < 0) {
        peri__free(slots);
        return status;
    }
    double share = wanted > 0 ? ((double)available - (double)reserved) / wanted : 1;
    *out = slots;
    if (share >= 1) return PERI_OK;
    if (!(share > 0)) {
        peri__free(slots);
        return peri__fail(
            PERI_ENOMEM,
            "peri_tbe_new: reserved_memory is %lld bytes, %lld are available: nothing is left for the caches",
            (long long)reserved, (long long)available);
    }
    for (int64_t i = 0; i < c->n_tables; i++)
        slots[i] = peri__min(slots[i], peri__max(1, (int64_t)((double)slots[i] * share)));
    peri__log(
        PERI_LOG_WARN,
        "caches of %.0f MB do not fit into %lld MB of free memory, %lld MB of it reserved: they get %.1f %% of that",
        wanted / 1e6, (long long)available / 1000000, (long long)reserved / 1000000, share * 100);
    return PERI_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static void row_file_header(const peri__tier *tier, const peri_tbe_config *c, int64_t i, peri__row_header *h)
{
    const peri_table_config *t = &tier->tbe->tables[i].config;
    *h = (peri__row_header){.rows = t->rows,
                            .cols = t->cols,
                            .row_offset = t->row_offset,
                            .col_offset = t->col_offset,
                            .total_rows = t->total_rows,
                            .total_cols = t->total_cols,
                            .seed = c->seed,
                            .init = t->init,
                            .init_a = t->init_a,
                            .init_b = t->init_b,
                            .dtype = c->dtype,
                            .optimizer = c->optimizer->kind,
                            .n_parts = tier->n_parts,
                            .raw_ids = t->raw_ids};
    for (int32_t p = 0; p < tier->n_parts; p++)
        h->part_bytes[p] = tier->part[p].row ? -tier->part[p].bytes : tier->part[p].bytes;
    strncpy(h->name, t->name, sizeof h->name - 1);
    h->record_bytes = peri__row_record_bytes(h);
}

/** @available: bytes of the host's memory that are left for rows; goes down. */
static peri_status open_table(peri__tier *tier, const peri_tbe_config *c, int64_t i, int64_t *available)
{
    peri__tier_table *t = &tier->tables[i];
    const peri_table_config *config = &tier->tbe->tables[i].config;
    peri__row_header want;
    row_file_header(tier, c, i, &want);
    if (c->caches[i].directory || tier->direct) {
        if (!tier->io) PERI_TRY(peri__row_io_new(&tier->io));
        PERI_TRY(peri__row_file_open(c->caches[i].directory, &want, &t->file));
    } else {
        PERI_TRY(peri__row_memory_new(&want, *available, &t->file));
        *available -= want.rows * want.record_bytes;
        tier->in_memory = true;
    }
    PERI_TRY(peri__cache_new(config->rows, tier->tbe->layout[i].rows, cache_ways(&c->caches[i], !tier->direct),
                             cache_algorithm(&c->caches[i]), &t->cache));
    t->payload = PERI_CACHE_RECORD_HEAD;
    for (int32_t p = 0; p < tier->n_parts; p++)
        t->payload += tier->part[p].bytes * (tier->part[p].row ? 1 : config->cols);
    return PERI_OK;
}

static void ticket_fini(peri__tier *tier, peri__ticket *t)
{
    peri__batch_recycle(t->inner);
    peri_tensor_release(t->mapped);
    peri_tbe_blocks_release(t->layer_blocks);
    peri__tbe_free_later(tier->tbe, &t->layer_offsets);
    peri__tbe_free_later(tier->tbe, &t->mapped_store);
    peri__free(t->pins);
    peri__free(t->wants);
    peri__records_fini(tier, &t->in);
    peri__records_fini(tier, &t->out);
}

static void tier_free(peri_tbe *tbe)
{
    peri__tier *tier = peri__tier_of(tbe);
    for (int i = 0; i < PERI__TICKETS; i++) ticket_fini(tier, &tier->ticket[i]);
    peri__records_fini(tier, &tier->spare);
    peri__row_io_free(tier->io);
    for (int64_t i = 0; i < tier->n_tables; i++) {
        peri__tier_table *t = &tier->tables[i];
        if (t->file && tier->open && tbe->forks == peri__forks()) peri__tier_warn_unflushed(tier, t->file);
        peri__cache_free(t->cache);
        peri__row_file_close(t->file);
    }
    peri__free(tier->tables);
    peri__free(tier->mapped_host);
    peri__free(tier->block_layer);
    peri_tbe_blocks_release(tier->layer_blocks);
    peri__free(tier);
}

/* -- the store ----------------------------------------------------------------------------------------------------- */

static int64_t count_bad_ids(const peri_tbe *tbe) { return peri__tier_of(tbe)->bad_ids; }
static const char *io_name(const peri_tbe *tbe)
{
    const peri__tier *tier = peri__tier_of(tbe);
    return tier->io ? peri__row_io_name(tier->io) : "memory";
}

static const peri__store cached = {.name = "a cache",
                                   .forward = peri__tier_forward,
                                   .backward = peri__tier_backward,
                                   .prefetch = peri__tier_prefetch,
                                   .drop = peri__tier_drop,
                                   .read = peri__tier_read,
                                   .write = peri__tier_write,
                                   .reset = peri__tier_reset,
                                   .flush_info = peri__tier_flush_info,
                                   .table_file = peri__tier_table_file,
                                   .ids_mark = peri__tier_ids_mark,
                                   .flush_prepare = peri__tier_flush_prepare,
                                   .flush_commit = peri__tier_flush_commit,
                                   .cache_statistics = peri__tier_statistics,
                                   .bad_ids = count_bad_ids,
                                   .io = io_name,
                                   .free = tier_free};

peri_status peri__tier_open(peri_tbe *tbe, const peri_tbe_config *c)
{
    peri__tier *tier = peri__alloc_zero(sizeof *tier);
    if (!tier) return PERI_ENOMEM;
    tbe->own = tier;
    tbe->store = &cached;
    tier->tbe = tbe;
    tier->seed = c->seed;
    tier->n_tables = c->n_tables;
    tier->direct = peri_device_host_access(tbe->device);
    tier->n_parts = peri__tbe_record_parts(tbe, tier->part);
    tier->tables = peri__alloc_zero(sizeof *tier->tables * (size_t)peri__max(1, c->n_tables));
    if (!tier->tables) {
        tier->n_tables = 0;
        return PERI_ENOMEM;
    }
    int64_t available = peri__available_memory();
    for (int64_t i = 0; i < c->n_tables; i++) PERI_TRY(open_table(tier, c, i, &available));
    PERI_TRY(peri__tier_adopt_flush(tier));
    tier->open = true;
    return PERI_OK;
}
