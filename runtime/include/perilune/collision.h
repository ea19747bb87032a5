/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/collision.h: managed collision: raw 64-bit ids to the rows of one table, by a map that learns ids and
 * forgets others.
 *
 * A map is cut into *buckets*: stretches of rows, each a map of its own. Which bucket an id belongs to depends on the
 * id and the table's number of buckets only, so that buckets may lie on any rank, and rows do not depend on the number
 * of ranks. One call of peri_collision_remap is one iteration; results depend neither on the order of its ids nor on
 * the number of threads.
 *
 * Functions are local, do not communicate, and borrow their arguments. A map lives on one device.
 *
 * Threads: a map (peri_collision) is used by one thread at a time; two maps may be used by two threads at once.
 */
#ifndef PERILUNE_COLLISION_H
#define PERILUNE_COLLISION_H

#include <perilune/tensor.h>

/** A map; counted. */
typedef struct peri_collision peri_collision;

/** Kinds of maps.
 *    MCH   TorchRec's MCHManagedCollisionModule: ids are counted, and every eviction_interval iterations those with the
 *          best scores have the rows of their bucket. The last row of a bucket is nobody's. INT64_MAX, its mark of a
 *          free row, cannot be learned.
 *    HASH  TorchRec's HashZchManagedCollisionModule: a new id gets a row at once, among the max_probe rows from its
 *          home on. -1, its mark of a free row, cannot be learned. Home: MurmurHash3 (x64, 128 bits, both halves xored)
 *          of the id and 8 bytes of 0, mod the bucket's rows. Ids that are new in one iteration are put in the order of
 *          that hash, then of the id. */
enum { PERI_COLLISION_MCH = 0, PERI_COLLISION_HASH = 1 };

/** The bucket of an id. fmix64 is the finalizer of MurmurHash3.
 *    HASH    high 64 bits of fmix64(id) * buckets: even, whatever the pattern of ids. The default
 *    MODULO  id mod buckets, never negative
 *    RANGE   id / ceil(input_hash_size / buckets), for ids in [0, input_hash_size) only
 *  The last two are TorchRec's: its checkpoints need them. */
enum { PERI_SPREAD_HASH = 0, PERI_SPREAD_MODULO = 1, PERI_SPREAD_RANGE = 2 };

/** Which ids are forgotten, and so which rows are given up. Scores of MCH: see mch_evict in kernels/collision.h.
 *    NONE           HASH: none
 *    LFU            MCH: the least counted
 *    LRU            MCH: those not seen for longest
 *    DISTANCE_LFU   MCH: count / age^decay_exponent
 *    USER           MCH: the caller says, see peri_collision_scores
 *    TTL            HASH: those whose time is over, the first on the way from the id's home
 *    PROBE_LRU      HASH: if no row is free, that whose time is over first, if only in future; none seen in this
 *                   iteration */
enum {
    PERI_FORGET_NONE = 0,
    PERI_FORGET_LFU = 1,
    PERI_FORGET_LRU = 2,
    PERI_FORGET_DISTANCE_LFU = 3,
    PERI_FORGET_USER = 4,
    PERI_FORGET_TTL = 5,
    PERI_FORGET_PROBE_LRU = 6
};

/** MCH: which of the ids of a window (the iterations between two evictions) count at all, by how often they were seen
 *  in their bucket:
 *    DYNAMIC        more often than filter_arg times the mean (TorchRec's default: 10)
 *    AVERAGE        more often than the mean
 *    PROBABILISTIC  with probability 1 - (1 - filter_arg)^count (TorchRec's default: 0.01), drawn from seed, id and
 *                   iteration */
enum { PERI_FILTER_NONE = 0, PERI_FILTER_DYNAMIC = 1, PERI_FILTER_AVERAGE = 2, PERI_FILTER_PROBABILISTIC = 3 };

/** What an id without a row of its own is mapped to: one not learned yet, or for which there was no room. All are
 *  counted as missed.
 *    DEFAULT  ROW for MCH, HASH for HASH
 *    ROW      the bucket's last row, which is nobody's own (HASH: set aside then)
 *    HASH     its home row, which may be somebody else's
 *    DROP     -1: none; lookups skip it
 *    ERROR    PERI_ERANGE, naming table and id. What was learned in the call stays */
enum { PERI_MISS_DEFAULT = 0, PERI_MISS_ROW = 1, PERI_MISS_HASH = 2, PERI_MISS_DROP = 3, PERI_MISS_ERROR = 4 };

/** What a map is. All that is 0 is the default. */
typedef struct peri_collision_config {
    int64_t size; /* sizeof(peri_collision_config) */
    const char *name;         /* of the table, for errors; copied */
    int64_t rows;             /* of the whole table, 1 to 2^32 - 2 */
    int32_t kind;             /* PERI_COLLISION_* */
    int32_t buckets;          /* of the whole table, up to 1024 and to its rows; 0: peri_collision_buckets(rows) */
    const int64_t *segments;  /* buckets + 1 rising row numbers from 0 to rows, copied; NULL: peri_collision_segments */
    int32_t spread;           /* PERI_SPREAD_* */
    int64_t input_hash_size;  /* RANGE: >= 1 */
    int32_t first_bucket;     /* this map has [first_bucket, first_bucket + n_buckets); both 0: all */
    int32_t n_buckets;
    int32_t on_miss;          /* PERI_MISS_* */
    int32_t policy;           /* PERI_FORGET_* of the kind; MCH needs one */
    double decay_exponent;    /* LRU, DISTANCE_LFU: > 0; 0: 1 */
    int64_t eviction_interval; /* MCH: iterations, up to 2^31 - 1; 0: 1 */
    int32_t filter;           /* MCH: PERI_FILTER_* */
    double filter_arg;        /* DYNAMIC, PROBABILISTIC: finite, >= 0 */
    uint64_t seed;            /* of PROBABILISTIC */
    int64_t history_capacity; /* MCH: ids of a window that count, the first ones in their order, as in TorchRec; 0:
                                 all */
    int32_t max_probe;        /* HASH: rows that an id may be in; 0: 128 */
    int32_t n_features;       /* of the table; 0: any number, with one time to live and none read-only */
    const int64_t *ttl;       /* TTL, PROBE_LRU: time to live by feature, >= 0, copied */
    int32_t n_ttl;            /* entries of `ttl`: n_features, or 1 for all; 0 (PROBE_LRU only): 0 */
    const bool *read_only;    /* n_features, copied: ids of these are looked up, never learned; NULL: none */
} peri_collision_config;

/** The default number of buckets: the largest power of two that is at most min(64, rows / 64), at least 1. Never
 *  fails. */
PERI_API int32_t peri_collision_buckets(int64_t rows);
/** Even segments: @out[b] = b * rows / buckets, rounded down, for b from 0 to @buckets. Never fails. */
PERI_API void peri_collision_segments(int64_t rows, int32_t buckets, int64_t *out);
/** The bucket of @id among @buckets (>= 1) by PERI_SPREAD_*, -1 if RANGE does not allow it. Never fails. */
PERI_API int64_t peri_collision_bucket(int64_t id, int32_t spread, int32_t buckets, int64_t input_hash_size);
/** HASH: the row of a bucket from which on @id looks for one, of the @rows that ids of the bucket may have; -1 if
 *  there are none. Never fails. */
PERI_API int64_t peri_collision_home(int64_t id, int64_t rows);

/** A map that knows no id. @config borrowed, @out new. */
PERI_API peri_status peri_collision_new(peri_device *device, const peri_collision_config *config, peri_collision **out);
/** Bytes that a map of @config keeps on its device from the start, by the sizes that peri_collision_new goes by; what
 *  windows log of ids comes later, and is not among them. Planners ask it. @out borrowed. */
PERI_API peri_status peri_collision_bytes_of(const peri_collision_config *config, int64_t *out);
/** Add a reference. */
PERI_API void peri_collision_retain(peri_collision *c);
/** Give up a reference; NULL is fine. */
PERI_API void peri_collision_release(peri_collision *c);
/** Rows of this map, and the row of the table that is its first: borrowed numbers. Never fail. */
PERI_API int64_t peri_collision_rows(const peri_collision *c);
PERI_API int64_t peri_collision_first_row(const peri_collision *c);

/** Rows of @ids[f] (i64 or i32, any shape, on the map's device; one tensor a feature of the table, in their order):
 *  @out[f] new, i64, of the same shape, counted from this map's first row; -1 as on_miss says.
 *  @training: an iteration: ids are counted and learned, and others forgotten, before they are looked up. All features
 *  of a table in one call. Ids of buckets that are not this map's, and those out of RANGE, are PERI_ERANGE, and nothing
 *  is learned; only maps that could meet such ids wait for the device, as do evictions of MCH, and on_miss ERROR.
 *  PERI_PENDING: policy USER, see below. */
PERI_API peri_status peri_collision_remap(peri_collision *c, peri_tensor *const *ids, int32_t n_features, bool training,
                                          peri_tensor **out);
/** Policy USER. When an eviction is due, peri_collision_remap returns PERI_PENDING and waits for the scores of all ids
 *  that want a row: the caller gets what is known of them, gives a score to each, and calls peri_collision_remap again
 *  with the same arguments. candidates: @counts and @last, i64 [n], new: how often each id was seen since it has its
 *  row (those without: in this window), and the iteration that had it last; NULL while no scores are wanted. Waits.
 *  scores: @scores f64 [n], in the same order, higher is better; no NaN. Waits. */
PERI_API peri_status peri_collision_candidates(peri_collision *c, peri_tensor **counts, peri_tensor **last);
PERI_API peri_status peri_collision_scores(peri_collision *c, peri_tensor *scores);
/** What a map knows at this moment: @sum, a hash (never 0) of its whole state, which another map of the same buckets
 *  has when it knows the same, and its @iteration. Row files keep it with the rows (peri_tbe_ids_mark_set). Waits. */
PERI_API peri_status peri_collision_mark(peri_collision *c, uint64_t *sum, int64_t *iteration);
/** From now on TTL and PROBE_LRU take the time from the caller, in any unit (TorchRec: hours), 0 to 2^31 - 1; at first,
 *  and again with
 *  @now = -1, it is the number of the iteration. */
PERI_API peri_status peri_collision_time_set(peri_collision *c, int64_t now);
/** Rows (i64, counted from this map's first, ascending, each once) that got an id, another's or their first, since the
 *  last call, into a new @out; NULL: none. Whoever has the rows starts them again before looking them up. Waits, if
 *  anything was learned. */
PERI_API peri_status peri_collision_evicted(peri_collision *c, peri_tensor **out);

/** Numbers of a map since it was made. ids = hits + missed. */
typedef struct peri_collision_stats {
    int64_t size; /* sizeof(peri_collision_stats) */
    int64_t ids;        /* looked up, in training and evaluation */
    int64_t hits;       /* of these: those with a row of their own, if need be since the same call */
    int64_t missed;     /* of these: those without */
    int64_t inserted;   /* ids that got a row */
    int64_t evicted;    /* of these: one that was another id's */
    int64_t collisions; /* HASH: ids that asked for a row and found their home row another's */
    int64_t occupied;   /* rows that have an id now */
    int64_t rows;       /* of this map */
    int64_t iterations; /* training calls, those before a load included */
} peri_collision_stats;
/** The numbers as the last call that the device has finished left them; does not wait. */
PERI_API peri_status peri_collision_statistics(peri_collision *c, peri_collision_stats *out);

/** State by name, as TorchRec's buffers. MCH: _mch_sorted_raw_ids, _mch_remapped_ids_mapping, _mch_counts and
 *  _mch_last_access_iter (where the policy has them), _output_segments_tensor, _current_iter_tensor. HASH:
 *  _hash_zch_identities [rows, 1], _hash_zch_metadata [rows, 1] i32 (with a policy), _hash_zch_bucket [1, 1],
 *  _output_segments_tensor, _current_iter_tensor. i64 unless said otherwise; those with rows have this map's rows
 *  ([rows] if not said otherwise), in which rows have the numbers of the whole table. The others are of the whole
 *  table. What was seen since the last eviction is none of these (see peri_collision_window): a map that is loaded
 *  begins a new window. Number of states: never fails. */
PERI_API int32_t peri_collision_states(const peri_collision *c);
/** Name of state @i, NULL if there is none. Borrowed. */
PERI_API const char *peri_collision_state_name(const peri_collision *c, int32_t i);
/** State @i: @out new. */
PERI_API peri_status peri_collision_state(peri_collision *c, int32_t i, peri_tensor **out);
/** Load the state of buckets [@first_bucket, + @n_buckets) of the table: those that this map has; others are passed
 *  over. @names,
 *  @tensors [n]: the states by name, with the rows of just those buckets. Required are those that have rows and, for
 *  MCH, _output_segments_tensor and _current_iter_tensor. They are checked before anything changes: a missing, unknown
 *  or misshapen state, segments or buckets that differ, an id of another bucket, two rows for one id, a number that no
 *  map can have (_mch_counts: 0 to 2^62 - 1, and INT64_MAX in a bucket's last row; _mch_last_access_iter: 0 to the
 *  state's _current_iter_tensor; _hash_zch_metadata: -1 to 2^31 - 1; _current_iter_tensor: 0 to 2^53): PERI_EINVAL or
 *  PERI_EMISMATCH. Evicted rows of loaded buckets that were not fetched are forgotten. Waits. */
PERI_API peri_status peri_collision_load(peri_collision *c, int32_t first_bucket, int32_t n_buckets, int32_t n,
                                         const char *const *names, peri_tensor *const *tensors);
/** Some rows of a map in the order of rows, in host memory: [@n] each. As peri_collision_state, but where that has the
 *  ids of MCH in ascending order, here number i is of row @row + i. A map of any size is saved and loaded through a
 *  small buffer:
 *
 *     saving:   for each block: peri_collision_rows_read
 *     loading:  peri_collision_words_check; for each block: peri_collision_rows_check; and when all of it is sound
 *               peri_collision_rows_begin; for each block: peri_collision_rows_put; peri_collision_rows_end */
typedef struct peri_collision_block {
    int64_t size;       /* sizeof(peri_collision_block) */
    int64_t row, n;     /* the first, counted from the map's first row; and how many */
    int64_t iteration;  /* of the state, for peri_collision_rows_check: `last` is at most that */
    int64_t *ids;       /* MCH: INT64_MAX while free; HASH: -1 */
    int64_t *mapping;   /* MCH: numbers of the rows in the table; NULL: not wanted, not known */
    int64_t *counts;    /* MCH, where the policy has them */
    int64_t *last;      /* MCH, where the policy has them */
    int32_t *expiries;  /* HASH, with a policy: _hash_zch_metadata */
} peri_collision_block;
/** Fill in those of @rows's arrays that are not NULL. Waits. PERI_ERANGE: rows that the map does not have. */
PERI_API peri_status peri_collision_rows_read(peri_collision *c, const peri_collision_block *rows);
/** Check the states that have no rows, as peri_collision_load does; changes nothing. @iteration: that of the state; -1:
 *  it says none. */
PERI_API peri_status peri_collision_words_check(peri_collision *c, int32_t n, const char *const *names,
                                                peri_tensor *const *tensors, int64_t *iteration);
/** Check rows that are to be loaded, each by itself, as peri_collision_load does; changes nothing. PERI_EINVAL also
 *  where @rows->mapping says that they are in another order. Adds to @mark, which begins as 0; with all rows it is what
 *  peri_collision_mark_sum takes. */
PERI_API peri_status peri_collision_rows_check(const peri_collision *c, const peri_collision_block *rows,
                                               uint64_t *mark);
/** What peri_collision_mark gives for a map that has these rows and this iteration. Never fails. */
PERI_API uint64_t peri_collision_mark_sum(uint64_t sum, int64_t iteration);
/** Forget all that the map knows, before peri_collision_rows_put of all its rows. Until peri_collision_rows_end ids are
 *  not looked up. */
PERI_API peri_status peri_collision_rows_begin(peri_collision *c);
/** Begin as peri_collision_rows_begin does, but peri_collision_rows_read still finds in each row what it had, until it
 *  is put. So numbers that a state lacks can be those that the map has. */
PERI_API peri_status peri_collision_rows_change(peri_collision *c);
/** Put rows that peri_collision_rows_check found sound where they belong. @rows->mapping is not looked at. Waits. */
PERI_API peri_status peri_collision_rows_put(peri_collision *c, const peri_collision_block *rows);
/** The map knows what was put, and begins a window. @iteration: of peri_collision_words_check. PERI_EINVAL: an id has
 *  two rows; then, as after any other error, the map knows nothing. Waits. */
PERI_API peri_status peri_collision_rows_end(peri_collision *c, int64_t iteration);
/** MCH: what a map has seen since the last eviction: @start, the iteration before the first of the window, and @out,
 *  new, i64 [ids, 3]: each id, in ascending order, how often it was seen (1 where the policy has no counts), and the
 *  iteration that had it last. Waits. */
PERI_API peri_status peri_collision_window(peri_collision *c, int64_t *start, peri_tensor **out);
/** Go on with such a window (of any map of the table; ids of other buckets are passed over) after peri_collision_load.
 *  @start: less than eviction_interval iterations ago. Of what was seen since, nothing else is known. Waits. */
PERI_API peri_status peri_collision_window_set(peri_collision *c, int64_t start, const peri_tensor *entries);

/* -- into another size --------------------------------------------------------------------------------------------- */

/** Some rows of a map into which ids of another one are put: a window of it. Ids that were read are *entries*, arrays
 *  by place; a row has what its id brought along in arrays of the same order. */
typedef struct peri_collision_fit {
    int64_t size;             /* sizeof(peri_collision_fit) */
    int32_t kind, spread;     /* PERI_COLLISION_*, PERI_SPREAD_* of the map */
    int64_t input_hash_size;  /* RANGE */
    const int64_t *segments;  /* [buckets + 1] its rows where its buckets begin */
    int32_t buckets;
    int32_t max_probe;        /* HASH: rows that an id may be in */
    int64_t low, high;        /* buckets [low, high) are wanted */
    int64_t first, past;      /* HASH: rows [first, past) are those of the window */
    bool aside;               /* HASH: a bucket's last row is nobody's own */
    bool part;                /* HASH: the window has some rows of one bucket, so that ids may go on behind it; else it
                                 has whole buckets */
    int64_t arrays;           /* HASH: how many there are: ids, scores (f64: the greatest is kept), and others */
    int64_t *const *entries;  /* HASH: [arrays] of entries */
    int64_t *const *rows;     /* HASH: [arrays] of the window's rows; id -1: free */
    int64_t *filled;          /* HASH: [buckets] rows of each that have an id: counted up */
} peri_collision_fit;

/** What peri_collision_fit_pick has found. */
typedef struct peri_collision_picked {
    int64_t size;             /* sizeof(peri_collision_picked) */
    int64_t n;                /* ids that were picked */
    int64_t ids;              /* ids among all that were given */
    int64_t lowest, highest;  /* of all ids the buckets that come first and last; none: INT64_MAX and -1 */
} peri_collision_picked;

/** Of @ids [@length], those of rows of a stored map (free rows: INT64_MAX for MCH, -1 for HASH), those that belong to
 *  the window: to its buckets, and for HASH with their home row within it. @place, @bucket and (HASH, else NULL) @home:
 *  room for @length; of those that were picked the place among @ids, the bucket, and the home row. */
PERI_API peri_status peri_collision_fit_pick(const peri_collision_fit *fit, const int64_t *ids, int64_t length,
                                             int32_t *place, int32_t *bucket, int64_t *home,
                                             peri_collision_picked *out);
/** HASH: put entries [@from, @past) into the window, the k-th of bucket @bucket[k] from row @row[k] on, its home or a
 *  row behind it. Each takes the first row that is free or has a worse id, which goes on from there, as if all came in
 *  the order of their scores, of equal ones the smaller id first; one that finds none within max_probe rows is dropped.
 *  @out: @past, or the entry whose numbers are by now those of an id that goes on behind the window: the caller takes
 *  them away and calls again from the next one on. */
PERI_API peri_status peri_collision_fit_put(const peri_collision_fit *fit, int64_t from, int64_t past,
                                            const int32_t *bucket, const int64_t *row, int64_t *out);

#endif
