/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.h: the policy of row caches: which slot for which row, who is evicted, what is pinned. It knows neither files
 * nor devices, so that every tier (a file under memory, host memory under a GPU) can use it: rows and slots are
 * numbers. One cache serves one table.
 *
 * Slots are in sets: a row has a set by its number, and takes a slot of it. Where all of them are pinned it takes one
 * of the next set that has another, so that rows of one batch that fit into the cache always find room, whichever they
 * are. With 0 ways there are no sets: any row may use any slot.
 *
 * A slot is free, idle (holds a row that nobody needs now: it may be evicted) or pinned (a batch in flight needs it).
 * Batches are resolved one after the other: peri__cache_begin, then for each id peri__cache_find and either
 * peri__cache_pin or peri__cache_want; when all wanted rows have room (peri__cache_rows_that_fit), peri__cache_take for
 * each of them; else peri__cache_unwant. When the batch is over, each of its slots is unpinned once.
 *
 * Who is evicted. Without sets: the row that was idle longest (LRU); of the rows that were used least, the one that was
 * idle longest (LFU). These are lists of idle slots, in the order in which they became idle, so one thread pins and
 * unpins. In sets: the row whose last batch was longest ago, the first slot among equals (LRU); of the rows that were
 * used least, that one (LFU). This needs no lists: a slot is all that a pin touches, and many threads pin at once. LFU
 * counts the batches that use a row, also while it is not here; when one of these counts has reached 255, all are
 * halved before the next batch (listed rows that become equal keep their order).
 *
 * Cost per row of the table: 4 bytes (place), with LFU 1 more; untouched parts take no memory. Per slot: 32 bytes; per
 * set 4 more.
 */
#ifndef PERI_EMBED_CACHE_H
#define PERI_EMBED_CACHE_H

#include "../../base/base_internal.h"

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
    uint8_t uses;        /* LFU: of its row, while that is here */
    uint8_t reserved[6];
} peri__slot;

typedef struct peri__cache {
    int64_t rows;
    int32_t slots, algorithm;
    int32_t sets;    /* 0: none. Set i has slots i * set_slots + min(i, more_sets) and on: the first `more_sets` have
                        one more */
    int32_t set_slots, more_sets;
    bool whole;      /* as many slots as rows: nobody is ever evicted, so that nobody keeps who is idle, since when, how
                        often used */
    bool listed;     /* idle slots are in lists: neither whole nor in sets */
    bool aging;      /* LFU: a count has reached its end */
    uint32_t *place; /* by row: 0: not here; slot + 1; or PERI__WANTED | number */
    uint8_t *uses;   /* by row, LFU: batches that used it, aged; while it is here its slot has them. NULL with LRU */
    peri__slot *slot;
    uint32_t *full;  /* by set: the last batch that found all its slots pinned */
    uint32_t now;    /* the batch being resolved */
    uint32_t free_head; /* slot + 1; without sets */
    int32_t n_free, n_idle;
    /* Listed: idle slots by number of uses (LRU: all in bucket 0), each bucket from the longest idle to the latest;
     * slot + 1. */
    uint32_t head[PERI__CACHE_BUCKETS], tail[PERI__CACHE_BUCKETS];
    uint64_t filled[PERI__CACHE_BUCKETS / 64]; /* which buckets have slots */
} peri__cache;

#define PERI__WANTED UINT32_C(0x80000000)

/** @rows >= @slots >= 1 (or both 0). @ways: slots of a set, or one less where they do not come out even; 0: no sets.
 *  @out new. */
peri_status peri__cache_new(int64_t rows, int64_t slots, int32_t ways, int32_t algorithm, peri__cache **out);
void peri__cache_free(peri__cache *c);
/** Bytes of what such a cache keeps about its rows and slots. */
int64_t peri__cache_bytes(int64_t rows, int64_t slots, int32_t ways, int32_t algorithm);

/** Begin to resolve a batch. */
void peri__cache_begin(peri__cache *c);
/** Where @row is: 0 nowhere, slot + 1, or PERI__WANTED | number of a row that this batch already wants. */
static inline uint32_t peri__cache_find(const peri__cache *c, int64_t row) { return c->place[row]; }
/** This batch needs @slot: true the first time, when it was pinned. */
bool peri__cache_pin(peri__cache *c, uint32_t slot);
/** The same for a cache that is not listed; by many threads at once. One is added to *@woken if the slot was idle:
 *  c->n_idle is to be that much less when all have done. */
static inline bool peri__cache_pin_beside(peri__cache *c, uint32_t slot, int64_t *woken)
{
    peri__slot *s = &c->slot[slot];
    if (__atomic_load_n(&s->stamp, __ATOMIC_RELAXED) == c->now) return false;
    if (__atomic_exchange_n(&s->stamp, c->now, __ATOMIC_RELAXED) == c->now) return false;
    *woken += s->pins++ == 0;
    if (c->uses && ++s->uses == PERI__CACHE_BUCKETS - 1) __atomic_store_n(&c->aging, true, __ATOMIC_RELAXED);
    return true;
}
/** One batch less needs @slot, which is not PERI__SLOT_FILLING, of a cache that is not listed: true if it is idle now,
 *  which c->n_idle is to count. By many threads at once, of different slots. */
static inline bool peri__cache_unpin_beside(peri__cache *c, uint32_t slot) { return --c->slot[slot].pins == 0; }
/** Before peri__cache_pin and peri__cache_unpin of @slot: what they will touch comes near. Call it after the slot
 *  itself has come. */
static inline void peri__cache_prefetch_slot(const peri__cache *c, uint32_t slot)
{
    const peri__slot *s = &c->slot[slot];
    if (!c->listed || s->pins) return;
    if (s->next) __builtin_prefetch(&c->slot[s->next - 1], 1);
    if (s->prev) __builtin_prefetch(&c->slot[s->prev - 1], 1);
}
/** Remember that this batch wants @row, as its number @k < 2^31. */
static inline void peri__cache_want(peri__cache *c, int64_t row, uint32_t k) { c->place[row] = PERI__WANTED | k; }
/** Forget that. */
static inline void peri__cache_unwant(peri__cache *c, int64_t row) { c->place[row] = 0; }
/** How many rows peri__cache_take can place. */
static inline int64_t peri__cache_rows_that_fit(const peri__cache *c) { return (int64_t)c->n_free + c->n_idle; }
/** A slot for @row, pinned and PERI__SLOT_FILLING: a free one, else the one that is evicted. *@victim gets the row that
 *  leaves (-1: none) and *@flags what its slot was. There must be room. True if the slot is of another set, since all
 *  of its own were pinned. */
bool peri__cache_take(peri__cache *c, int64_t row, uint32_t *slot, int64_t *victim, uint8_t *flags);
/** Undo peri__cache_take, which gave @slot away: @victim and @flags are what it returned. The victim is as if used just
 *  now. */
void peri__cache_untake(peri__cache *c, uint32_t slot, int64_t victim, uint8_t flags);
/** One batch less needs @slot; idle after the last. */
void peri__cache_unpin(peri__cache *c, uint32_t slot);

#endif
