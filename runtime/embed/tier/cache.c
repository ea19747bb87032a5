/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c: see cache.h. All operations take constant time, but for aging: one sweep over the rows' bytes per 128
 * batches at most, and for a row whose set is pinned: it passes by the sets that are, each of which is looked through
 * once a batch.
 */
#include "cache.h"
#include "../../base/fault.h"

#include <sys/mman.h>

/** Zeroed memory that takes none before it is used; @dense: most of it will be. */
static void *pages_new(int64_t bytes, bool dense)
{
    void *p = peri__fault(PERI_FAULT_alloc) ? MAP_FAILED
                                            : mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) {
#ifdef MADV_HUGEPAGE
        if (dense) madvise(p, (size_t)bytes, MADV_HUGEPAGE); /* met at random: fewer pages to look up */
#endif
        return p;
    }
    peri__fail(PERI_ENOMEM, "peri__cache_new: no memory: %lld bytes", (long long)bytes);
    return NULL;
}

static void pages_free(void *p, int64_t bytes)
{
    if (p) munmap(p, (size_t)bytes);
}

/** At least one element, so that nothing is NULL. */
static int64_t rows_of(const peri__cache *c) { return peri__max(c->rows, 1); }
static int64_t slots_of(const peri__cache *c) { return peri__max(c->slots, 1); }

/** Sets of a cache; 0: none. */
static int64_t sets_of(int64_t rows, int64_t slots, int32_t ways)
{
    return slots == rows || ways == 0 ? 0 : (slots + ways - 1) / ways;
}

int64_t peri__cache_bytes(int64_t rows, int64_t slots, int32_t ways, int32_t algorithm)
{
    bool counts = algorithm == PERI__LFU && slots != rows;
    const peri__cache *c = NULL;
    return rows * ((int64_t)sizeof *c->place + counts) + slots * (int64_t)sizeof *c->slot +
           sets_of(rows, slots, ways) * (int64_t)sizeof *c->full;
}

peri_status peri__cache_new(int64_t rows, int64_t slots, int32_t ways, int32_t algorithm, peri__cache **out)
{
    PERI_ASSERT(slots <= rows && slots < (int64_t)PERI__WANTED && ways >= 0);
    peri__cache *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    c->rows = rows;
    c->slots = (int32_t)slots;
    c->algorithm = algorithm;
    c->whole = slots == rows;
    c->sets = (int32_t)sets_of(rows, slots, ways);
    c->listed = !c->whole && !c->sets;
    bool counts = algorithm == PERI__LFU && !c->whole;
    c->place = pages_new(rows_of(c) * (int64_t)sizeof *c->place, slots > rows / 16);
    c->uses = counts ? pages_new(rows_of(c), slots > rows / 16) : NULL;
    c->slot = pages_new(slots_of(c) * (int64_t)sizeof *c->slot, true);
    c->full = c->sets ? peri__alloc_zero(sizeof *c->full * (size_t)c->sets) : NULL;
    if (!c->place || (counts && !c->uses) || !c->slot || (c->sets && !c->full)) {
        peri__cache_free(c);
        return PERI_ENOMEM;
    }
    for (int64_t s = 0; s < slots; s++) {
        c->slot[s].row = -1;
        c->slot[s].next = !c->sets && s + 1 < slots ? (uint32_t)s + 2 : 0;
    }
    c->free_head = slots > 0 && !c->sets;
    c->n_free = (int32_t)slots;
    if (c->sets) {
        c->set_slots = c->slots / c->sets;
        c->more_sets = c->slots % c->sets;
    }
    *out = c;
    return PERI_OK;
}

void peri__cache_free(peri__cache *c)
{
    if (!c) return;
    pages_free(c->place, rows_of(c) * (int64_t)sizeof *c->place);
    pages_free(c->uses, rows_of(c));
    pages_free(c->slot, slots_of(c) * (int64_t)sizeof *c->slot);
    peri__free(c->full);
    peri__free(c);
}

/* -- lists of idle slots ------------------------------------------------------------------------------------------- */

static void append_to_bucket(peri__cache *c, uint32_t slot)
{
    uint32_t b = c->slot[slot].uses;
    c->slot[slot].next = 0;
    c->slot[slot].prev = c->tail[b];
    if (c->tail[b]) c->slot[c->tail[b] - 1].next = slot + 1;
    else c->head[b] = slot + 1;
    c->tail[b] = slot + 1;
    c->filled[b / 64] |= UINT64_C(1) << b % 64;
}

static void unlink_slot(peri__cache *c, uint32_t slot)
{
    uint32_t b = c->slot[slot].uses;
    uint32_t before = c->slot[slot].prev, after = c->slot[slot].next;
    if (before) c->slot[before - 1].next = after;
    else c->head[b] = after;
    if (after) c->slot[after - 1].prev = before;
    else c->tail[b] = before;
    if (!c->head[b]) c->filled[b / 64] &= ~(UINT64_C(1) << b % 64);
}

/** Halve all uses: bucket b takes over buckets 2b and 2b + 1, in this order. */
static void halve_uses(peri__cache *c)
{
    for (int64_t r = 0; r < c->rows; r++)
        if (c->uses[r]) c->uses[r] >>= 1; /* pages without uses stay untouched */
    for (int32_t s = 0; s < c->slots; s++) c->slot[s].uses >>= 1;
    for (uint32_t b = 0; b < PERI__CACHE_BUCKETS; b++) {
        uint32_t low = 2 * b < PERI__CACHE_BUCKETS ? 2 * b : 0, high = low + 1;
        bool any = 2 * b < PERI__CACHE_BUCKETS;
        uint32_t head = any ? c->head[low] : 0, tail = any ? c->tail[low] : 0;
        if (any && c->head[high]) {
            if (tail) {
                c->slot[tail - 1].next = c->head[high];
                c->slot[c->head[high] - 1].prev = tail;
            } else {
                head = c->head[high];
            }
            tail = c->tail[high];
        }
        c->head[b] = head;
        c->tail[b] = tail;
    }
    memset(c->filled, 0, sizeof c->filled);
    for (uint32_t b = 0; b < PERI__CACHE_BUCKETS; b++)
        if (c->head[b]) c->filled[b / 64] |= UINT64_C(1) << b % 64;
}

static void count_use(peri__cache *c, uint32_t slot)
{
    if (c->uses && ++c->slot[slot].uses == PERI__CACHE_BUCKETS - 1) c->aging = true;
}

/** A row comes to @slot, or leaves it, with its uses. */
static void set_row_of_slot(peri__cache *c, uint32_t slot, int64_t row)
{
    c->slot[slot].row = row;
    c->place[row] = slot + 1;
    if (c->uses) c->slot[slot].uses = c->uses[row];
}

static void take_row_out(peri__cache *c, uint32_t slot)
{
    int64_t row = c->slot[slot].row;
    c->place[row] = 0;
    if (c->uses) c->uses[row] = c->slot[slot].uses;
}

/* -- batches ------------------------------------------------------------------------------------------------------- */

void peri__cache_begin(peri__cache *c)
{
    if (c->aging) halve_uses(c);
    c->aging = false;
    if (++c->now != 0) return;
    for (int32_t s = 0; s < c->slots; s++) c->slot[s].stamp = 0;
    for (int32_t i = 0; i < c->sets; i++) c->full[i] = 0;
    c->now = 1;
}

bool peri__cache_pin(peri__cache *c, uint32_t slot)
{
    if (c->slot[slot].stamp == c->now) return false;
    c->slot[slot].stamp = c->now;
    if (c->slot[slot].pins++ == 0) {
        if (c->listed) unlink_slot(c, slot);
        c->n_idle--;
    }
    count_use(c, slot);
    return true;
}

static void free_slot(peri__cache *c, uint32_t slot)
{
    c->slot[slot].row = -1;
    c->slot[slot].flags = c->slot[slot].uses = 0;
    c->n_free++;
    if (c->sets) return;
    c->slot[slot].next = c->free_head;
    c->free_head = slot + 1;
}

/** The first of the longest idle among the least used of all slots. */
static uint32_t first_listed(const peri__cache *c)
{
    uint32_t word = 0;
    while (!c->filled[word]) word++;
    return c->head[word * 64 + (uint32_t)__builtin_ctzll(c->filled[word])] - 1;
}

/** The slot of set @i for one more row: a free one, else the one that is evicted; -1: all are pinned. */
static int64_t slot_of_set(const peri__cache *c, int32_t i)
{
    int64_t from = (int64_t)i * c->set_slots + peri__min(i, c->more_sets),
            end = from + c->set_slots + (i < c->more_sets), best = -1;
    uint64_t least = UINT64_MAX;
    for (int64_t s = from; s < end; s++) {
        const peri__slot *x = &c->slot[s];
        if (x->row < 0) return s;
        uint64_t rank = (uint64_t)x->uses << 32 | (UINT32_MAX - (c->now - x->stamp));
        if (x->pins || rank >= least) continue;
        least = rank;
        best = s;
    }
    return best;
}

bool peri__cache_take(peri__cache *c, int64_t row, uint32_t *slot, int64_t *victim, uint8_t *flags)
{
    int32_t home = c->sets ? (int32_t)((peri__hash_mix(0, (uint64_t)row) >> 32) * (uint64_t)c->sets >> 32) : 0,
            set = home;
    int64_t at = -1;
    while (c->sets && at < 0) {
        if (c->full[set] != c->now) at = slot_of_set(c, set);
        if (at >= 0) break;
        c->full[set] = c->now;
        set = set + 1 < c->sets ? set + 1 : 0;
        PERI_ASSERT(set != home);
    }
    if (at < 0) at = c->free_head ? (int64_t)c->free_head - 1 : (int64_t)first_listed(c);
    *slot = (uint32_t)at;
    *victim = c->slot[at].row;
    *flags = c->slot[at].flags;
    if (*victim >= 0) {
        if (c->listed) unlink_slot(c, *slot);
        take_row_out(c, *slot);
        c->n_idle--;
    } else {
        if (!c->sets) c->free_head = c->slot[at].next;
        c->n_free--;
    }
    set_row_of_slot(c, *slot, row);
    c->slot[at].pins = 1;
    c->slot[at].stamp = c->now;
    c->slot[at].flags = PERI__SLOT_FILLING;
    count_use(c, *slot);
    return set != home;
}

void peri__cache_untake(peri__cache *c, uint32_t slot, int64_t victim, uint8_t flags)
{
    take_row_out(c, slot);
    c->slot[slot].pins = 0;
    if (victim < 0) {
        free_slot(c, slot);
        return;
    }
    set_row_of_slot(c, slot, victim);
    c->slot[slot].flags = flags;
    c->n_idle++;
    if (c->listed) append_to_bucket(c, slot);
}

void peri__cache_unpin(peri__cache *c, uint32_t slot)
{
    PERI_ASSERT(c->slot[slot].pins > 0);
    if (--c->slot[slot].pins > 0) return;
    if (c->slot[slot].flags & PERI__SLOT_FILLING) {
        take_row_out(c, slot);
        free_slot(c, slot);
        return;
    }
    c->n_idle++;
    if (c->listed) append_to_bucket(c, slot);
}
