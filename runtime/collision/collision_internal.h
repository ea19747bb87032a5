/* SPDX-License-Identifier: Apache-2.0
 *
 * collision/collision_internal.h: the struct behind a map, and what its files share.
 */
#ifndef PERI_COLLISION_INTERNAL_H
#define PERI_COLLISION_INTERNAL_H

#include "../sparse/sparse_internal.h"
#include "../../kernels/collision.h"

#include "../../kernels/spread.h"

#include <perilune/collision.h>

enum {
    PERI_COLLISION_MOST_BUCKETS = 1024, /* TorchRec's state has room for so many */
    PERI_COLLISION_GRAIN = 4096         /* ids that are worth a thread */
};
#define PERI_COLLISION_MOST_ITERATION (INT64_C(1) << 53) /* that a state may have: up to here, f64 has every number */

struct peri_collision {
    peri__refs refs;
    peri_device *device;
    char *name;
    peri_collision_config config; /* without its pointers; defaults filled in */
    int64_t *segments;            /* buckets + 1, of the whole table */
    int64_t *ttl;                 /* n_ttl */
    bool *read_only;              /* n_features, or NULL */
    int64_t first_row, rows;      /* of this map, in the table */
    bool any_id;                  /* whatever the id, it is of a bucket of this map */
    peri_k_collision_map map;     /* addresses in the tensors below */
    peri_tensor *bucket, *head, *slots, *ids, *counts, *last, *hash_rows, *changed, *n_changed, *is_changed;
    int64_t iteration, window;    /* training calls; the iteration before the first of this window */
    int64_t time;                 /* of TTL and PROBE_LRU; -1: the iteration */
    bool may_have_changed;        /* rows since the last peri_collision_evicted */
    /* The log. MCH keeps it for a window. */
    peri_tensor *log;
    int64_t log_room, logged;     /* entries; an upper bound of those that are there */
    int64_t recorded;             /* ids of the window that went into windows and log */
    struct peri__lesson *lesson;  /* waits for scores, or NULL */
    /* What came back from the device. */
    peri__report *report;         /* on its way, or NULL */
    int64_t report_logged;        /* ids that may have been logged since it left; -1: the log was emptied since */
    int64_t words[PERI_COLLISION_WORDS]; /* the head, as last seen */
};

/** Ids of a bucket (RANGE). (map.c) */
int64_t peri__collision_block(int32_t buckets, int64_t input_hash_size);
/** Send the head on its way to the host; peri__collision_seen has it when it has come (@wait: waits). */
peri_status peri__collision_report(peri_collision *c);
peri_status peri__collision_seen(peri_collision *c, bool wait);
/** Set word @word of the head (queued). */
peri_status peri__collision_set(peri_collision *c, int32_t word, int64_t value);
/** All of bucket @from and the @n - 1 after it are forgotten (queued). @blank: their memory was never used. */
peri_status peri__collision_reset(peri_collision *c, int32_t from, int32_t n, bool blank);
/** What the log has is learned (queued), and that of MCH is empty. @most: entries that it may have. PERI_PENDING
 *  (policy USER): call again when there are scores, and until then. */
peri_status peri__collision_learn(peri_collision *c, int64_t most);
/** The map has another state, of iteration @iteration (-1: as it is): it begins a window (queued). */
peri_status peri__collision_loaded(peri_collision *c, int64_t iteration);
/** A lesson that waits for scores is forgotten. */
void peri__collision_unlearn(peri_collision *c);

static inline bool peri__collision_hash(const peri_collision *c) { return c->config.kind == PERI_COLLISION_HASH; }
/** The time of TTL and PROBE_LRU. */
static inline int64_t peri__collision_now(const peri_collision *c) { return c->time >= 0 ? c->time : c->iteration; }

#endif
