/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/collision.h: maps from ids to the rows of a table that learn ids and forget others (perilune/collision.h says
 * what they are for).
 *
 * A map has *buckets*, each a stretch of rows with ids of its own. Rows and buckets are counted from the map's first.
 * Two kinds:
 *   MCH    any id may have any row of its bucket but the last. An index leads from an id to its row: lines of 4 slots,
 *          one cache line each, of which each bucket has a stretch; an id is in its home line, or where that was full
 *          in the next line with room, round and round. The home line is high(rotate(mix(id), 32) * lines): see
 *          kernels/spread.h; buckets take the other half of the bits.
 *   hash   row = slot: an id is in its home row, murmur(id) mod the rows that may be had, or in one of the max_probe -
 *          1 rows after it, round and round in its bucket.
 * Ids that have no row go into a log, which is grouped by bucket and then learned by each bucket on its own, in an
 * order of ids. Entries of the log have no order, and sums are of integers: results depend on neither split nor
 * threads.
 */
#ifndef PERI_KERNELS_COLLISION_H
#define PERI_KERNELS_COLLISION_H

#include <perilune/base.h>

#include "inline.h"
#include "work.h"

/** What to do with an id that has no row of its own; as PERI_MISS_*, without the default. */
enum { PERI_K_MISS_ROW = 1, PERI_K_MISS_HASH = 2, PERI_K_MISS_DROP = 3, PERI_K_MISS_ERROR = 4 };
/** Which row is given up; as PERI_FORGET_*. */
enum {
    PERI_K_EVICT_NONE = 0,
    PERI_K_EVICT_LFU = 1,
    PERI_K_EVICT_LRU = 2,
    PERI_K_EVICT_DISTANCE_LFU = 3,
    PERI_K_EVICT_USER = 4,
    PERI_K_EVICT_TTL = 5,
    PERI_K_EVICT_PROBE_LRU = 6
};
/** Which new ids may ask for a row; as PERI_FILTER_*. */
enum { PERI_K_FILTER_NONE = 0, PERI_K_FILTER_DYNAMIC = 1, PERI_K_FILTER_AVERAGE = 2, PERI_K_FILTER_PROBABILISTIC = 3 };

/** Words of a map's head. Sums since the map was made, but for the last four. */
enum {
    PERI_COLLISION_IDS = 0,    /* looked up */
    PERI_COLLISION_HITS,       /* of these: had a row of their own, if need be since this very call */
    PERI_COLLISION_MISSED,     /* of these: had none */
    PERI_COLLISION_INSERTED,   /* ids that got a row */
    PERI_COLLISION_EVICTED,    /* of these: of another id's */
    PERI_COLLISION_COLLISIONS, /* hash: ids that wanted a row and found their home row another id's */
    PERI_COLLISION_OCCUPIED,   /* rows that have an id */
    PERI_COLLISION_CHANGED,    /* rows in the lists of changed ones */
    PERI_COLLISION_LOGGED,     /* entries of the log */
    PERI_COLLISION_BAD,        /* least place of a bad id; INT64_MAX: none */
    PERI_COLLISION_WORDS
};

/** A bucket of the map. */
typedef struct peri_k_collision_bucket {
    int64_t first_row, rows;
    int64_t usable;            /* rows that ids may have, from the first on */
    int64_t first_line, lines; /* MCH: of the index */
    uint64_t reciprocal;       /* (2^64 - 1) / max(usable, 1) */
} peri_k_collision_bucket;

enum { PERI_MCH_LINE = 4 }; /* slots of a line */
/** A slot of an index. */
typedef struct peri_k_mch_slot {
    int64_t id;      /* INT64_MAX while free */
    uint32_t row;    /* UINT32_MAX while free */
    uint32_t window; /* what was seen of it since the last eviction: see peri_k_window_count; 0: nothing */
} peri_k_mch_slot;

/** The count of a window of a map that is `counted`: its two low bytes together, so that each of two parts of a call
 *  can add to one of them without locking the line. A byte that held 255 holds 0 with the next one, and the log has an
 *  entry of 256. Above them, 16 bits: the iterations from the window's first to the last one that had the id, 0 in maps
 *  without `last`. A map that is not counted has 32 bits of these. */
K_INLINE int64_t peri_k_window_count(uint32_t window) { return (window & 255) + (window >> 8 & 255); }

/** Window @seen with @n < 256 more, in iteration number @when of it, as *next. Returns how many the log must have: 0;
 *  256; @n, and no next: the window has no room for @when. */
K_INLINE int32_t peri_k_window_next(uint32_t seen, int32_t n, bool counted, int64_t when, uint32_t *next)
{
    if (when > (counted ? UINT16_MAX : UINT32_MAX)) return n;
    const int bits = counted ? 16 : 0;
    const uint32_t last = seen >> bits, low = (seen & 255) + (uint32_t)n;
    *next = ((uint32_t)when > last ? (uint32_t)when : last) << bits;
    if (counted) *next |= (seen & 0xff00) | (low & 255);
    return counted && low > 255 ? 256 : 0;
}

/** A row of a hash map. */
typedef struct peri_k_hash_row {
    int64_t id;       /* -1 while free */
    int32_t expiry;   /* TTL, PROBE_LRU: it may be given up when this lies before now; -1 while free, and without these
                         policies */
    uint32_t touched; /* low 32 bits of the iteration that learned or met it last */
} peri_k_hash_row;

/** A map in its device's memory. */
typedef struct peri_k_collision_map {
    const peri_k_collision_bucket *bucket; /* n_buckets */
    int64_t *head;                         /* PERI_COLLISION_WORDS */
    peri_k_mch_slot *slots;                /* MCH: lines of slots, aligned to 64 bytes */
    int64_t *ids, *counts, *last;          /* MCH, by row: INT64_MAX while free; counts and last, or NULL where the
                                              policy has none */
    peri_k_hash_row *rows;                 /* hash */
    int64_t *changed, *n_changed;          /* rows that got another id, each once, in its bucket's stretch; how many, by
                                              bucket */
    uint8_t *is_changed;                   /* by row */
    int64_t buckets, block;                /* of the whole table, as peri_k_bucket takes them */
    int32_t spread, first_bucket, n_buckets; /* this map's buckets among the table's */
    int32_t on_miss, policy;
    int32_t max_probe;                     /* hash */
    bool counted;                          /* MCH: windows have counts */
    bool full;                             /* hash: a free row may lie between an id and its home: looks do not end
                                              there */
} peri_k_collision_map;

/** An id that waits to be learned. */
typedef struct peri_k_collision_entry {
    int64_t id;
    int64_t when;  /* MCH: the iteration; hash: the expiry that it would have */
    int64_t place; /* hash: of `out`; MCH: how often it was seen: 1, or 256 */
} peri_k_collision_entry;

/** Kernels over n ids, range: ids, but for mch_find: of `parts` parts of them, part p being [n p / parts, n (p + 1) /
 *    parts). collision_check: head[BAD] = min with first + i for each id whose bucket is not this map's.
 *    mch_find: out[i] = the row of ids[i] or what on_miss says; counted as hit or missed. With `out` NULL nothing is.
 *    Of the first `learn` ids,
 *      each with a row adds to its slot's window, or where the window cannot hold the iteration goes into the log, as
 *      do those without a row but INT64_MAX, which no row can have.
 *    hash_map_find: the same; of the first `learn` ids, those with a row become touched and their expiry at least
 *      `expiry` (with a policy); those without, but -1, go into the log and are not counted.
 *    hash_map_again: for the entries of the log: out[place] = the row of the id or what on_miss says, counted. range:
 *      blocks of PERI_COLLISION_BLOCK entries, up to as many as the log can have.
 *  on_miss ROW: the bucket's last row; HASH: murmur(id) mod max(usable, 1); DROP, ERROR: -1, and for ERROR head[BAD] =
 *  min with first + i. All ids are of this map's buckets, but for collision_check. */
enum { PERI_COLLISION_BLOCK = 4096 };
typedef struct peri_k_collision_find_args {
    peri_k_collision_map map;
    const int64_t *ids;
    int64_t *out;
    peri_k_collision_entry *log; /* room for all entries that may come */
    int64_t n, parts;            /* MCH */
    int64_t first;               /* place of the first of the ids among those of the call */
    int64_t learn;               /* 0: only look */
    int64_t now;                 /* the iteration */
    int64_t window;              /* MCH: the iteration before the window's first */
    int64_t expiry;              /* hash */
} peri_k_collision_find_args;

/** The iteration that a window gets. */
K_INLINE int64_t peri_k_window_when(const peri_k_collision_find_args *a)
{
    return a->map.last ? a->now - a->window : 0;
}

/** What a bucket learns from, and what it sorts: compared by its words in order. */
typedef struct peri_k_collision_record {
    uint64_t word[4];
} peri_k_collision_record;

/** The log grouped by bucket:
 *    collision_count: sizes[b] += entries of bucket b. range: blocks of the log, as in hash_map_again.
 *    collision_starts: starts = exclusive cumulative sum of sizes, one entry more; sizes[b] = starts[b]. range: 1.
 *    collision_group: each entry as records[sizes[b]++]: MCH (id, times, when, 0), hash (murmur(id), id, expiry, 0).
 *      range: as collision_count.
 *  Ids are written with the sign bit turned, so that they compare as numbers. `sizes` starts as 0. */
typedef struct peri_k_collision_group_args {
    peri_k_collision_map map;
    const peri_k_collision_entry *log;
    peri_k_collision_record *records;
    int64_t *sizes, *starts;
} peri_k_collision_group_args;

/** Learning, range: buckets.
 *    mch_coalesce: records of bucket b become (id, count, last, 0) of its ids that have no row and pass the filter, one
 *      an id, ascending; news[b] says how many. Rows whose id passes: counts += what window and log have, last = the
 *      latest. Windows are 0 again. The bucket's last row gets count INT64_MAX and last `now`.
 *      The filter sees the counts c of all n different ids of bucket and window: dynamic: c > filter_arg / n * sum
 *      (f32); average: c > sum / n (f32); probabilistic: 1 - (1 - filter_arg)^c (f32) > the 24 high bits of mix(mix(id
 *      ^ seed) + now) / 2^24.
 *    mch_evict: rows and news of bucket b compete: scores (f32, LFU: i64) are LFU: count; LRU: -(now - last + 1)^d;
 *      DISTANCE_LFU: count / (now - last + 1)^d; USER: row_scores, new_scores (f64, as records), free rows below all.
 *      Ordered by score descending, rows before news; rows by (id, row), so that free ones are last; news by count
 *      descending, then id. Of the first `usable` those that are news get the rows of those that are rows and not among
 *      them: the best of the news that of the best row. `scratch` has 3 records for each record.
 *    hash_map_insert: ids of bucket b by (murmur, id), each once, with the greatest expiry. Each takes the first row
 *    from its home on, within
 *      max_probe, that is free or, by the policy: TTL expired (expiry < now); PROBE_LRU: if none is free, the one with
 *      the least expiry, the first of equals. A row touched in this iteration is never given up. */
typedef struct peri_k_collision_learn_args {
    peri_k_collision_map map;
    peri_k_collision_record *records, *scratch;
    const int64_t *starts;
    int64_t *news;
    const double *row_scores, *new_scores;
    double decay, filter_arg;
    uint64_t seed;
    int64_t now;    /* iteration; hash with TTL: time */
    int64_t call;   /* hash: iteration */
    int64_t window; /* the iteration before the window's first */
    int32_t filter;
} peri_k_collision_learn_args;

/** out = the changed rows, ascending; the lists are empty again. range: buckets. */
typedef struct peri_k_collision_changed_args {
    peri_k_collision_map map;
    int64_t *out;
    const int64_t *n_before; /* a copy of n_changed */
} peri_k_collision_changed_args;

/** The first fault of a bucket's state: words of a report. VALUE: the number, where that is the fault. */
enum {
    PERI_COLLISION_FAULT = 0,
    PERI_COLLISION_FAULT_ID,
    PERI_COLLISION_FAULT_ROW,
    PERI_COLLISION_FAULT_VALUE,
    PERI_COLLISION_FAULT_WORDS
};
enum {
    PERI_COLLISION_SOUND = 0,
    PERI_COLLISION_ORDER,   /* MCH: ids descend */
    PERI_COLLISION_TWICE,   /* an id has two rows */
    PERI_COLLISION_STRAY,   /* an id of another bucket */
    PERI_COLLISION_ROW_OUT, /* MCH: a row of another bucket, or of two ids */
    PERI_COLLISION_LAST,    /* the last row of a bucket, which is nobody's, has an id */
    PERI_COLLISION_FAR,     /* hash: an id further from its home than max_probe */
    PERI_COLLISION_COUNT,   /* MCH: a count below 0 or above peri_k_most_count */
    PERI_COLLISION_SEEN,    /* MCH: a last iteration below 0 or after the state's */
    PERI_COLLISION_EXPIRY,  /* hash: an expiry below -1 */
    PERI_COLLISION_HOLE     /* hash, no fault: a free row lies before an id's */
};

/** State by the words of TorchRec: MCH: sorted[] (ids of each bucket ascending, INT64_MAX for free rows and the last
 *  one) and, for the same places, mapping[] (the row of the whole table, first_row being the map's first), counts[],
 *  last[]; hash: sorted[] (identities), expiries[].
 *    mch_sorted, hash_map_read: write them. mch_sorted: scratch has a record a row.
 *    mch_validate, hash_map_validate: report[b] = the first fault of bucket b.
 *    mch_load, hash_map_load: the map, which knows nothing, becomes that. mch_load with mapping NULL (state_row 0): the
 *      arrays are in the order of rows, and may be the map's own.
 *    collision_reset: the bucket knows nothing, its list of changed rows is empty, and they do not count in the head;
 *    it may be uninitialised (`blank`), or else what it had no longer counts there. With `rows_stay` the ids and
 *    numbers of its rows stay, but nothing leads to them.
 *  state_first: row of the map's first loaded bucket in the state. range: buckets, from `from` on: bucket from + i. */
typedef struct peri_k_collision_state_args {
    peri_k_collision_map map;
    int64_t *sorted, *mapping, *counts, *last;
    int32_t *expiries; /* or NULL */
    peri_k_collision_record *scratch;
    int64_t *report;
    int64_t first_row; /* of the map, in the table */
    int64_t state_row; /* row of the map that the state begins with */
    int64_t iteration; /* MCH: of the state */
    int32_t from;
    bool blank;
    bool rows_stay;    /* collision_reset */
} peri_k_collision_state_args;

/** MCH: the highest count of a row that a state may have: sums cannot overflow. The bucket's last row, nobody's, has
 *  INT64_MAX. */
K_INLINE int64_t peri_k_most_count(bool last_row) { return last_row ? INT64_MAX : INT64_MAX / 2; }

/** MCH: the fault of the numbers at @place of a state, with the number as *value. */
K_INLINE int64_t peri_k_mch_numbers(const peri_k_collision_state_args *a, int64_t place, bool last_row, int64_t *value)
{
    if (a->map.counts && (a->counts[place] < 0 || a->counts[place] > peri_k_most_count(last_row))) {
        *value = a->counts[place];
        return PERI_COLLISION_COUNT;
    }
    if (a->map.last && (a->last[place] < 0 || a->last[place] > a->iteration)) {
        *value = a->last[place];
        return PERI_COLLISION_SEEN;
    }
    return PERI_COLLISION_SOUND;
}

/** Hash: whether the expiry at @place of a state can be one. */
K_INLINE bool peri_k_hash_expiry(const peri_k_collision_state_args *a, int64_t place)
{
    return !a->expiries || a->expiries[place] >= -1;
}

PERI_KERNELS_COLLISION(PERI_K_ARGS_OF)

#endif
