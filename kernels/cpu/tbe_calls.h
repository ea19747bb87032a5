/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_calls.h: what units of table batches hand to each other. The same for all instruction sets.
 */
#ifndef PERI_KERNELS_TBE_CALLS_H
#define PERI_KERNELS_TBE_CALLS_H

#include "../ref/tbe_place.h"
#include "../tbe.h"

/* -- lookups: tbe_forward.h ---------------------------------------------------------------------------------------- */

/** How many rows the walk ahead keeps in flight. The caller says how many bytes: enough to cover the memory's latency,
 *  few enough to stay in the cache until they are used. */
enum { TBE_AHEAD_LEAST = 8, TBE_AHEAD_MOST = 128 };

/** A call's part of the walk, and the block in which it is. */
typedef struct tbe_walk {
    const peri_k_tbe_forward_args *a;
    const peri_k_tbe_table *t;
    const char *base; /* row 0 */
    int64_t stride;   /* bytes */
    int64_t k;
    bool past_caches, past; /* outputs go past the caches: of the call where they can; of the block */
    tbe_count count;
    const char *ring[TBE_AHEAD_MOST]; /* the rows asked for, by item; NULL: no row, or beyond the end of the call */
} tbe_walk;

/* -- updates: tbe_update.h ----------------------------------------------------------------------------------------- */

/** Copies of rows of the gradient that were read before, and where they are: a table with open addresses, at most a
 *  quarter full: then rows that lie as far from each other as in a matrix have places of their own. */
typedef struct tbe_kept {
    uint64_t *places; /* the element of the gradient where a row begins << TBE_COPY_BITS | its copy; UINT64_MAX: none */
    float *rows;      /* the copies */
    int64_t stride, cols, n, most; /* elements of a copy, and of a row; copies, and how many there may be */
    int64_t room;  /* floats from `rows` on, for all of it */
    int64_t first; /* item of the table at hand */
    const peri_k_tbe_table *table;
    int32_t shift; /* 64 - the bits of a place; 0: nothing is kept */
} tbe_kept;
/* TBE_KEPT_READ: times that a row is read where keeping it is worth it. */
enum { TBE_COPY_BITS = 16, TBE_KEPT_READ = 4 };

/** The part of an update that one call does. */
typedef struct tbe_updater {
    const peri_k_tbe_update_args *a;
    int64_t n; /* all sorted items */
    uint64_t payload_mask;
    int64_t ahead;      /* next item to ask for; n: nothing more is asked for */
    bool near;          /* into the first-level cache */
    uint64_t ahead_row; /* linear row of the last one */
    const peri_k_tbe_table *ahead_table;
    int64_t ahead_lines, ahead_weight_lines; /* of a row of f32, and of weights; the latter 0 with kind NONE */
    const float *full[2], *row[2];           /* states to ask for; NULL: none */
    const int64_t *prev;
    float *room;                             /* scratch */
    tbe_kept kept;
    int64_t runs, next_run;                  /* updated so far; place of the next one among run_values */
} tbe_updater;

/** Update the rows of table @t whose runs begin in [e, last); returns the first item of another table, or of none. */
typedef int64_t tbe_batches(tbe_updater *u, const peri_k_tbe_table *t, int64_t e, int64_t last);

#endif
