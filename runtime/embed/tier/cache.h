/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.h: the policy of row caches: which slot for which row, who is evicted, what is pinned. It knows neither files nor devices, so that
 * every tier (a file under memory, host memory under a GPU) can use it: rows and slots are numbers. One cache serves one table.
 *
 * Any row may use any slot. A slot is free, idle (holds a row that nobody needs now: it may be evicted) or pinned (a batch in flight needs
 * it). Batches are resolved one after the other: peri__cache_begin, then for each id peri__cache_find and either peri__cache_pin or
 * peri__cache_want; when all wanted rows have room (peri__cache_room), peri__cache_take for each of them; else peri__cache_unwant. When the
 * batch is over, each of its slots is unpinned once.
 *
 * Cost per row of the table: 4 bytes (place), with LFU 1 more; untouched parts take no memory. Per slot: 32 bytes.
 */
#ifndef PERI_EMBED_CACHE_H
#define PERI_EMBED_CACHE_H

#include "../../base/internal.h"

enum { PERI__LRU = 0, PERI__LFU = 1 };

/** What is known of a slot. */
enum {
    PERI__SLOT_DIRTY = 1,    /* newer than what lies below */
    PERI__SLOT_FILLING = 2,  /* taken, but its row has not arrived; dropped if it is unpinned like this */
    PERI__SLOT_FETCHED = 4   /* brought by a prefetch and not used yet */
};

enum { PERI__CACHE_BUCKETS = 256 };

/** One slot; two of them share a line of the processor's cache. */
typedef struct peri__slot {
    int64_t row;         /* -1: free */
    uint32_t next, prev; /* neighbours + 1 in its bucket or in the free list; 0: none */
    uint32_t pins;       /* batches that need it */
    uint32_t stamp;      /* the last batch that pinned it */
    uint8_t flags;       /* PERI__SLOT_* */
    uint8_t reserved[7];
} peri__slot;

typedef struct peri__cache {
    int64_t rows;
    int32_t slots, algorithm;
    uint32_t *place; /* by row: 0: not here; slot + 1; or PERI__WANTED | number */
    uint8_t *uses;   /* by row, LFU: batches that used it, aged; NULL with LRU */
    peri__slot *slot;
    uint32_t now;    /* the batch being resolved */
    uint32_t free_head; /* slot + 1 */
    int32_t n_free, n_idle;
    bool whole; /* as many slots as rows: nobody is ever evicted, so that nobody keeps who is idle, since when, how often used */
    /* Idle slots by number of uses (LRU: all in bucket 0), each bucket from the longest idle to the latest; slot + 1. */
    uint32_t head[PERI__CACHE_BUCKETS], tail[PERI__CACHE_BUCKETS];
    uint64_t filled[PERI__CACHE_BUCKETS / 64]; /* which buckets have slots */
} peri__cache;

#define PERI__WANTED UINT32_C(0x80000000)

/** @rows >= @slots >= 1 (or both 0). @out new. */
peri_status peri__cache_new(int64_t rows, int64_t slots, int32_t algorithm, peri__cache **out);
void peri__cache_free(peri__cache *c);

/** Begin to resolve a batch. */
void peri__cache_begin(peri__cache *c);
/** Where @row is: 0 nowhere, slot + 1, or PERI__WANTED | number of a row that this batch already wants. */
static inline uint32_t peri__cache_find(const peri__cache *c, int64_t row) { return c->place[row]; }
/** This batch needs @slot: true the first time, when it was pinned. */
bool peri__cache_pin(peri__cache *c, uint32_t slot);
/** The same for a `whole` cache; by many threads at once. */
static inline bool peri__cache_pin_whole(peri__cache *c, uint32_t slot)
{
    if (__atomic_load_n(&c->slot[slot].stamp, __ATOMIC_RELAXED) == c->now) return false;
    if (__atomic_exchange_n(&c->slot[slot].stamp, c->now, __ATOMIC_RELAXED) == c->now) return false;
    c->slot[slot].pins++;
    return true;
}
/** Before peri__cache_pin and peri__cache_unpin of @slot: what they will touch comes near. Call it after the slot itself has come. */
static inline void peri__cache_near(const peri__cache *c, uint32_t slot)
{
    const peri__slot *s = &c->slot[slot];
    if (c->whole || s->pins) return;
    if (s->next) __builtin_prefetch(&c->slot[s->next - 1], 1);
    if (s->prev) __builtin_prefetch(&c->slot[s->prev - 1], 1);
}
/** Remember that this batch wants @row, as its number @k < 2^31. */
static inline void peri__cache_want(peri__cache *c, int64_t row, uint32_t k) { c->place[row] = PERI__WANTED | k; }
/** Forget that. */
static inline void peri__cache_unwant(peri__cache *c, int64_t row) { c->place[row] = 0; }
/** How many rows peri__cache_take can place. */
static inline int64_t peri__cache_room(const peri__cache *c) { return (int64_t)c->n_free + c->n_idle; }
/** A slot for @row, pinned and PERI__SLOT_FILLING: a free one, else the one that is evicted: LRU: the longest idle; LFU: the least used,
 *  among equals the longest idle since the last aging. *@victim gets the row that leaves (-1: none) and *@flags what its slot was. There
 *  must be room. */
uint32_t peri__cache_take(peri__cache *c, int64_t row, int64_t *victim, uint8_t *flags);
/** Undo peri__cache_take, which gave @slot to @row: @victim and @flags are what it returned. The victim is as if used just now. */
void peri__cache_untake(peri__cache *c, int64_t row, uint32_t slot, int64_t victim, uint8_t flags);
/** One batch less needs @slot; idle after the last. */
void peri__cache_unpin(peri__cache *c, uint32_t slot);

#endif
