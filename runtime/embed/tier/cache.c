/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c: see cache.h. All operations take constant time, but for aging: when a row's uses would pass 255, all are halved, which costs one
 * sweep over the rows' bytes per 128 batches at most.
 */
#include "cache.h"

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

peri_status peri__cache_new(int64_t rows, int64_t slots, int32_t algorithm, peri__cache **out)
{
    PERI_ASSERT(slots <= rows && slots < (int64_t)PERI__WANTED);
    peri__cache *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    c->rows = rows;
    c->slots = (int32_t)slots;
    c->algorithm = algorithm;
    c->whole = slots == rows;
    c->place = pages_new(rows_of(c) * (int64_t)sizeof *c->place, slots > rows / 16);
    c->uses = algorithm == PERI__LFU ? pages_new(rows_of(c), slots > rows / 16) : NULL;
    c->slot = pages_new(slots_of(c) * (int64_t)sizeof *c->slot, true);
    if (!c->place || (algorithm == PERI__LFU && !c->uses) || !c->slot) {
        peri__cache_free(c);
        return PERI_ENOMEM;
    }
    for (int64_t s = 0; s < slots; s++) {
        c->slot[s].row = -1;
        c->slot[s].next = s + 1 < slots ? (uint32_t)s + 2 : 0;
    }
    c->free_head = slots > 0;
    c->n_free = (int32_t)slots;
    *out = c;
    return PERI_OK;
}

void peri__cache_free(peri__cache *c)
{
    if (!c) return;
    pages_free(c->place, rows_of(c) * (int64_t)sizeof *c->place);
    pages_free(c->uses, rows_of(c));
    pages_free(c->slot, slots_of(c) * (int64_t)sizeof *c->slot);
    peri__free(c);
}

/* -- idle slots ------------------------------------------------------------------------------------------------------------------ */

static uint32_t bucket_of(const peri__cache *c, uint32_t slot) { return c->uses ? c->uses[c->slot[slot].row] : 0; }

static void append(peri__cache *c, uint32_t b, uint32_t slot)
{
    c->slot[slot].next = 0;
    c->slot[slot].prev = c->tail[b];
    if (c->tail[b]) c->slot[c->tail[b] - 1].next = slot + 1;
    else c->head[b] = slot + 1;
    c->tail[b] = slot + 1;
    c->filled[b / 64] |= UINT64_C(1) << b % 64;
    c->n_idle++;
}

static void unlink_slot(peri__cache *c, uint32_t b, uint32_t slot)
{
    uint32_t before = c->slot[slot].prev, after = c->slot[slot].next;
    if (before) c->slot[before - 1].next = after;
    else c->head[b] = after;
    if (after) c->slot[after - 1].prev = before;
    else c->tail[b] = before;
    if (!c->head[b]) c->filled[b / 64] &= ~(UINT64_C(1) << b % 64);
    c->n_idle--;
}

/** Halve all uses: bucket b takes over buckets 2b and 2b + 1, in this order. */
static void age(peri__cache *c)
{
    for (int64_t r = 0; r < c->rows; r++)
        if (c->uses[r]) c->uses[r] >>= 1; /* pages without uses stay untouched */
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

static void use(peri__cache *c, int64_t row)
{
    if (!c->uses || c->whole) return;
    if (c->uses[row] == PERI__CACHE_BUCKETS - 1) age(c);
    c->uses[row]++;
}

/* -- batches --------------------------------------------------------------------------------------------------------------------- */

void peri__cache_begin(peri__cache *c)
{
    if (++c->now != 0) return;
    for (int32_t s = 0; s < c->slots; s++) c->slot[s].stamp = 0;
    c->now = 1;
}

bool peri__cache_pin(peri__cache *c, uint32_t slot)
{
    if (c->slot[slot].stamp == c->now) return false;
    c->slot[slot].stamp = c->now;
    if (c->slot[slot].pins++ == 0 && !c->whole) unlink_slot(c, bucket_of(c, slot), slot);
    use(c, c->slot[slot].row);
    return true;
}

static void free_slot(peri__cache *c, uint32_t slot)
{
    c->slot[slot].row = -1;
    c->slot[slot].flags = 0;
    c->slot[slot].next = c->free_head;
    c->free_head = slot + 1;
    c->n_free++;
}

uint32_t peri__cache_take(peri__cache *c, int64_t row, int64_t *victim, uint8_t *flags)
{
    uint32_t slot;
    *victim = -1;
    *flags = 0;
    if (c->free_head) {
        slot = c->free_head - 1;
        c->free_head = c->slot[slot].next;
        c->n_free--;
    } else {
        uint32_t word = 0;
        while (!c->filled[word]) word++;
        uint32_t b = word * 64 + (uint32_t)__builtin_ctzll(c->filled[word]);
        slot = c->head[b] - 1;
        unlink_slot(c, b, slot);
        *victim = c->slot[slot].row;
        *flags = c->slot[slot].flags;
        c->place[c->slot[slot].row] = 0;
    }
    c->slot[slot].row = row;
    c->place[row] = slot + 1;
    c->slot[slot].pins = 1;
    c->slot[slot].stamp = c->now;
    c->slot[slot].flags = PERI__SLOT_FILLING;
    use(c, row);
    return slot;
}

void peri__cache_untake(peri__cache *c, int64_t row, uint32_t slot, int64_t victim, uint8_t flags)
{
    c->place[row] = 0;
    c->slot[slot].pins = 0;
    if (victim < 0) {
        free_slot(c, slot);
        return;
    }
    c->slot[slot].row = victim;
    c->place[victim] = slot + 1;
    c->slot[slot].flags = flags;
    append(c, bucket_of(c, slot), slot);
}

void peri__cache_unpin(peri__cache *c, uint32_t slot)
{
    PERI_ASSERT(c->slot[slot].pins > 0);
    if (--c->slot[slot].pins > 0) return;
    if (c->slot[slot].flags & PERI__SLOT_FILLING) {
        c->place[c->slot[slot].row] = 0;
        free_slot(c, slot);
    } else if (!c->whole) {
        append(c, bucket_of(c, slot), slot);
    }
}
