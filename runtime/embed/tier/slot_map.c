/* SPDX-License-Identifier: Apache-2.0
 *
 * slot_map.c: from the ids of a batch to slots: which rows are in memory, which ones are wanted. See tier.h.
 */
#include "tier.h"

/* Ids ahead whose places, slots and neighbours of slots are fetched in advance; ids worth a thread; most parts of a
 * block's ids. */
enum { AHEAD = 16, NEAR = 8, GRAIN = 2048, PARTS = 64 };
enum { NOWHERE = INT32_MIN };

/* -- batches on the host ------------------------------------------------------------------------------------------- */

void peri__tier_batch_fini(peri__tier_batch *b)
{
    peri__free(b->own_ids);
    peri__free(b->own_offsets);
}

peri_status peri__tier_batch_init(const peri__tier *tier, const peri_tbe_input *in, peri__tier_batch *b)
{
    bool narrow = in->offsets->dtype == PERI_I32;
    *b = (peri__tier_batch){
        .n_ids = peri__numel(in->ids), .bags = peri__numel(in->offsets) - 1, .ids_i32 = in->ids->dtype == PERI_I32};
    int64_t bytes = b->n_ids * (b->ids_i32 ? 4 : 8);
    /* After this no queued work uses the tickets' memory either. */
    PERI_TRY(peri__stream_dry(peri_stream_current(tier->tbe->device)));
    if (tier->direct) {
        b->ids = peri__data(in->ids);
    } else {
        b->ids = b->own_ids = peri__alloc((size_t)peri__max(bytes, 1));
        if (!b->ids) return PERI_ENOMEM;
        PERI_TRY(peri_tensor_read(in->ids, b->own_ids, bytes));
    }
    if (tier->direct && !narrow) {
        b->offsets = peri__data(in->offsets);
        return PERI_OK;
    }
    b->offsets = b->own_offsets = peri__alloc(sizeof *b->offsets * (size_t)(b->bags + 1));
    if (!b->offsets) return PERI_ENOMEM;
    PERI_TRY(peri_tensor_read(in->offsets, b->own_offsets, (b->bags + 1) * (narrow ? 4 : 8)));
    for (int64_t i = b->bags; narrow && i >= 0; i--) { /* widen in place, from the end */
        int32_t x;
        memcpy(&x, (char *)b->own_offsets + 4 * i, 4);
        b->own_offsets[i] = x;
    }
    return PERI_OK;
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

static inline int64_t id_at(const void *ids, bool narrow, int64_t i)
{
    return narrow ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
}

/** Room for @more pins and wants. */
static peri_status reserve(peri__ticket *t, int64_t more_pins, int64_t more_wants)
{
    if (t->n_pins + more_pins > t->pins_capacity) {
        int64_t n = peri__max(t->n_pins + more_pins, t->pins_capacity * 2);
        void *p = peri__realloc(t->pins, sizeof *t->pins * (size_t)n);
        if (!p) return PERI_ENOMEM;
        t->pins = p;
        t->pins_capacity = n;
    }
    if (t->n_wants + more_wants > t->wants_capacity) {
        int64_t n = peri__max(t->n_wants + more_wants, t->wants_capacity * 2);
        void *p = peri__realloc(t->wants, sizeof *t->wants * (size_t)n);
        if (!p) return PERI_ENOMEM;
        t->wants = p;
        t->wants_capacity = n;
    }
    return PERI_OK;
}

/** The ids of a block on their way to slots. First all threads look up where each row is: mapped[i] becomes 0
 *  (nowhere), slot + 1, PERI__WANTED | number, or -1 for an id that is no row. In a cache that is not listed they pin
 *  its slots too: mapped[i] is the slot then, and NOWHERE for a row that has none. Then one thread, in the order of the
 *  ids, does what is left, so that who will be evicted does not depend on the number of threads. */
typedef struct mapping {
    peri__ticket *ticket;
    peri__tier_table *table;
    int32_t number; /* of the table */
    bool narrow;    /* ids are i32 */
    const void *ids;
    int32_t *mapped;
    int64_t first, n, parts;
    struct {
        int64_t bad, pins, absent, woken;
        bool depends, fetched;
    } part[PARTS];
} mapping;

static int64_t part_begin(const mapping *m, int64_t p) { return m->n / m->parts * p + m->n % m->parts * p / m->parts; }

static void note_pin(const peri__cache *c, uint32_t slot, bool *depends, bool *fetched)
{
    *depends = *depends || (c->slot[slot].flags & PERI__SLOT_FILLING);
    *fetched = *fetched || (c->slot[slot].flags & PERI__SLOT_FETCHED);
}

static inline __attribute__((always_inline)) void find_slots_of_part(mapping *m, int64_t p, const bool narrow,
                                                                     const bool listed)
{
    peri__cache *c = m->table->cache;
    uint64_t rows = (uint64_t)c->rows;
    int64_t from = part_begin(m, p), begin = m->first + from, end = m->first + part_begin(m, p + 1);
    int64_t bad = 0, pins = 0, absent = 0, woken = 0;
    peri__tier_pin *pin = m->ticket->pins + m->ticket->n_pins + from;
    for (int64_t i = begin; i < end; i++) {
        if (i + AHEAD < end) {
            uint64_t ahead = (uint64_t)id_at(m->ids, narrow, i + AHEAD);
            if (ahead < rows) __builtin_prefetch(&c->place[ahead]);
            uint64_t close = (uint64_t)id_at(m->ids, narrow, i + NEAR);
            uint32_t place = !listed && close < rows ? c->place[close] : 0;
            if (place && !(place & PERI__WANTED)) __builtin_prefetch(&c->slot[place - 1], 1);
        }
        int64_t id = id_at(m->ids, narrow, i);
        if ((uint64_t)id >= rows) {
            bad += id != -1;
            m->mapped[i] = -1;
            continue;
        }
        uint32_t place = peri__cache_find(c, id);
        bool here = place && !(place & PERI__WANTED);
        m->mapped[i] = (int32_t)place;
        if (listed) continue;
        m->mapped[i] = here ? (int32_t)place - 1 : NOWHERE;
        absent += !here;
        if (!here || !peri__cache_pin_beside(c, place - 1, &woken)) continue;
        note_pin(c, place - 1, &m->part[p].depends, &m->part[p].fetched);
        pin[pins++] = (peri__tier_pin){m->number, (int32_t)place - 1};
    }
    m->part[p].bad = bad, m->part[p].pins = pins, m->part[p].absent = absent, m->part[p].woken = woken;
}

static void find_slots(void *ctx, int64_t begin, int64_t end)
{
    mapping *m = ctx;
    bool listed = m->table->cache->listed;
    for (int64_t p = begin; p < end; p++) {
        if (m->narrow) listed ? find_slots_of_part(m, p, true, true) : find_slots_of_part(m, p, true, false);
        else listed ? find_slots_of_part(m, p, false, true) : find_slots_of_part(m, p, false, false);
    }
}

/** Id i has no slot: it becomes -2 - number of a wanted row. */
static void want_row(const mapping *m, int64_t i)
{
    peri__ticket *t = m->ticket;
    peri__cache *c = m->table->cache;
    int64_t id = id_at(m->ids, m->narrow, i);
    uint32_t place = peri__cache_find(c, id);
    if (!place) {
        peri__cache_want(c, id, place = PERI__WANTED | (uint32_t)t->n_wants);
        t->wants[t->n_wants++] = (peri__tier_want){.row = id, .table = m->number, .slot = -1};
        m->table->need++;
    }
    m->mapped[i] = -2 - (int32_t)(place & ~PERI__WANTED);
}

/** The rest of the mapping, in one thread, after find_slots, for a cache that is not listed: move the pins of all parts
 *  together, count the slots that are idle no more, and note the rows that no slot has as wanted. */
static void finish_beside(const mapping *m)
{
    peri__ticket *t = m->ticket;
    int64_t base = t->n_pins;
    for (int64_t p = 0; p < m->parts; p++) {
        int64_t n = m->part[p].pins;
        if (n) memmove(t->pins + t->n_pins, t->pins + base + part_begin(m, p), sizeof *t->pins * (size_t)n);
        t->n_pins += n;
        m->table->cache->n_idle -= (int32_t)m->part[p].woken;
        for (int64_t i = m->first + part_begin(m, p), end = m->first + part_begin(m, p + 1);
             m->part[p].absent && i < end; i++)
            if (m->mapped[i] == NOWHERE) want_row(m, i);
    }
}

static void pin_in_order(const mapping *m)
{
    peri__ticket *t = m->ticket;
    peri__cache *c = m->table->cache;
    const int32_t *mapped = m->mapped;
    for (int64_t i = m->first, last = m->first + m->n; i < last; i++) {
        if (i + AHEAD < last) {
            if (mapped[i + AHEAD] > 0) __builtin_prefetch(&c->slot[mapped[i + AHEAD] - 1], 1);
            if (mapped[i + NEAR] > 0) peri__cache_prefetch_slot(c, (uint32_t)mapped[i + NEAR] - 1);
        }
        int32_t place = mapped[i];
        if (place == -1) continue;
        if (place <= 0) {
            want_row(m, i);
            continue;
        }
        m->mapped[i] = place - 1;
        if (!peri__cache_pin(c, (uint32_t)place - 1)) continue;
        note_pin(c, (uint32_t)place - 1, &t->depends, &t->fetched);
        t->pins[t->n_pins++] = (peri__tier_pin){m->number, place - 1};
    }
}

/** Ids [first, past) of a block of table @number: slots, or -2 - number of a wanted row, or -1. */
static peri_status map_ids(peri__tier *tier, peri__ticket *t, const peri__tier_batch *b, int32_t number, int64_t first,
                           int64_t past, int32_t *mapped)
{
    peri__tier_table *table = &tier->tables[number];
    mapping m = {.ticket = t,
                 .table = table,
                 .number = number,
                 .narrow = b->ids_i32,
                 .ids = b->ids,
                 .mapped = mapped,
                 .first = first,
                 .n = past - first,
                 .parts = peri__max(1, peri__min(PARTS, (past - first) / GRAIN))};
    bool listed = table->cache->listed;
    PERI_TRY(reserve(t, listed ? peri__min(m.n, table->cache->slots) : m.n, peri__min(m.n, table->cache->rows)));
    peri__parallel_for(m.parts, 1, find_slots, &m);
    for (int64_t p = 0; p < m.parts; p++) {
        t->bad_ids += m.part[p].bad;
        t->depends = t->depends || m.part[p].depends;
        t->fetched = t->fetched || m.part[p].fetched;
    }
    if (listed) pin_in_order(&m);
    else finish_beside(&m);
    return PERI_OK;
}

/** Offsets must not run backwards between blocks either: blocks that share no bags must share no ids, whose place holds
 *  one slot. */
static peri_status check_between(const char *function, const peri_tbe_blocks *blocks, const peri__tier_batch *b)
{
    int64_t first = INT64_MAX, past = 0;
    for (int64_t k = 0; k < blocks->n; k++) {
        if (blocks->block[k].bags == 0) continue;
        first = peri__min(first, blocks->block[k].first_bag);
        past = peri__max(past, blocks->block[k].first_bag + blocks->block[k].bags);
    }
    for (int64_t i = first; i < past; i++)
        if (b->offsets[i] > b->offsets[i + 1])
            return peri__fail(PERI_ERANGE, "%s: bag %lld: offsets %lld and %lld make no bag of %lld ids", function,
                              (long long)i, (long long)b->offsets[i], (long long)b->offsets[i + 1],
                              (long long)b->n_ids);
    return PERI_OK;
}

static peri_status map_block(const char *function, peri__tier *tier, peri__ticket *t, const peri__tier_batch *b,
                             int64_t k, int32_t *mapped)
{
    const peri_k_tbe_block *x = &t->owner->in.blocks->block[k];
    if (x->bags == 0) return PERI_OK;
    const int64_t *o = b->offsets + x->first_bag;
    peri_k_tbe_report bad = {.table = x->table, .feature = x->feature, .n_ids = b->n_ids};
    for (int64_t j = 0; j < x->bags; j++)
        if ((o[j] < 0 || o[j] > o[j + 1] || o[j + 1] > b->n_ids) && bad.bad_bags++ == 0)
            bad.sample = j, bad.begin = o[j], bad.end = o[j + 1];
    if (bad.bad_bags) return peri__tbe_bags_status(tier->tbe, function, &bad);
    return map_ids(tier, t, b, x->table, o[0], o[x->bags], mapped);
}

/** Ids that are in no block have no slot; @layer's copy of the ids. */
static void clear_outside(const peri_tbe_blocks *blocks, const peri__tier_batch *b, int64_t layers, int32_t *mapped)
{
    /* Blocks that follow each other without gaps cover everything, which is the rule. */
    int64_t at = 0;
    for (int64_t k = 0; k < blocks->n && layers == 1; k++) {
        const peri_k_tbe_block *x = &blocks->block[k];
        if (x->bags && b->offsets[x->first_bag] == at) at = b->offsets[x->first_bag + x->bags];
    }
    if (b->n_ids == 0 || (layers == 1 && at == b->n_ids)) return;
    memset(mapped, 0xff, sizeof *mapped * (size_t)(layers * b->n_ids));
}

peri_status peri__tier_map(const char *function, peri__tier *tier, peri__ticket *t, const peri__tier_batch *b,
                           int32_t *mapped)
{
    clear_outside(t->owner->in.blocks, b, t->layers, mapped);
    for (int64_t k = 0; k < t->owner->in.blocks->n; k++)
        PERI_TRY(map_block(function, tier, t, b, k, mapped + tier->block_layer[k] * b->n_ids));
    return check_between(function, t->owner->in.blocks, b);
}
