/* SPDX-License-Identifier: Apache-2.0
 *
 * row_watch.h: who wants to know which rows of a table batch change. Whatever writes rows says so before it does, so a
 * watch can note them (the next increment of a checkpoint has them) or keep the bytes that they still have (a save that
 * copies while training goes on).
 *
 * What is told, and where from:
 *
 *     an update by a batch           SORTED   update.c, shampoo.c, on tables in memory: rows are known on the device
 *                                             only
 *                                    LIST     the same with tables behind a cache: the rows that the batch's ticket
 *                                             holds
 *     an update by a dense gradient  TOUCHED  peri_tbe_gradient_apply: replicas of data-parallel tables
 *     peri_tbe_write                 RANGE
 *     peri_tbe_rows_reset            LIST     rows that start again, such as those of evicted ids
 *     averages in place (EMA)        RANGE    all rows of all tables, of their weights only
 *     a view of weights or states    RANGE    the rows that the view has: peri_tensor_copy, fill and write, exchanges,
 *                                             dense optimizers and everything else that calls peri__changed
 *
 * What is told may be more than what changes, never less. States that have no rows (PERI_STATE_SQUARE,
 * PERI_STATE_SCALAR), counts of iterations and rates are not told: every update may change them. Nor is what somebody
 * writes through peri_tensor_data.
 *
 * Without a watch a table batch does nothing for all this but look at one pointer.
 */
#ifndef PERI_EMBED_ROW_WATCH_H
#define PERI_EMBED_ROW_WATCH_H

#include "embed_internal.h"

enum { PERI__ROWS_SORTED, PERI__ROWS_TOUCHED, PERI__ROWS_LIST, PERI__ROWS_RANGE };

/** Rows that are about to change. A linear row is a row's number counted over all tables of the batch: first + row,
 *  first the rows (config.rows) of the tables before; of tables in memory that is layout[table].first_row. */
typedef struct peri__row_change {
    int32_t form; /* PERI__ROWS_*: which of the members below say it */
    int32_t part; /* the state (index into tbe->state, 0 the weights) that changes; -1: weights and all states that have
                     rows */
    /* SORTED: as tbe_mark reads it, on the tables' device: the linear row of item i < n[0] is sorted[i] >>
     * payload_bits; ascending, a row may come several times, and tbe->total_rows is none. `capacity`: n[0] at most.
     * Work that is queued on the current stream from now on finds them. */
    const uint64_t *sorted;
    const int64_t *n;
    int64_t capacity;
    int32_t payload_bits;
    /* TOUCHED: on the device, by linear row: 0 where the row stays. */
    const float *touched;
    /* LIST: `count` rows of `table`, on the host, each once. RANGE: rows [first, first + count) of `table`. */
    int64_t table;
    const int64_t *rows;
    int64_t first, count;
} peri__row_change;

/** Somebody who is told; embedded in what he needs. */
typedef struct peri__row_watch {
    /* Called before rows change, within a call that is alone (peri__tbe_enter): no lookup and no update runs beside it,
     * what it queues on the current stream comes before the change, tbe->store->read may be called, and functions that
     * begin a call (peri_tbe_read) may not. An error stops the call whose change it is, before anything has changed;
     * writes through a view go on all the same. */
    peri_status (*before)(struct peri__row_watch *watch, peri_tbe *tbe, const peri__row_change *change);
    /* The table batch goes, and forgets the watch; its memory is still there. NULL: the watch does not want to know. */
    void (*gone)(struct peri__row_watch *watch, peri_tbe *tbe);
    struct peri__row_watch *next;
} peri__row_watch;

/** Tell @watch from now on. It stays where it is until peri__tbe_unwatch. Takes a call that is alone. */
peri_status peri__tbe_watch(peri_tbe *tbe, peri__row_watch *watch);
/** No more. The watch may be freed then. */
void peri__tbe_unwatch(peri_tbe *tbe, peri__row_watch *watch);

/** Within a call that is alone, before rows change: tell all watches. */
peri_status peri__tbe_tell_watches(peri_tbe *tbe, const peri__row_change *change);
static inline peri_status peri__tbe_tell(peri_tbe *tbe, const peri__row_change *change)
{
    return tbe->watches ? peri__tbe_tell_watches(tbe, change) : PERI_OK;
}
/** The same: @count rows of @table from @first on, in state @part (-1: all). */
static inline peri_status peri__tbe_tell_range(peri_tbe *tbe, int64_t table, int32_t part, int64_t first, int64_t count)
{
    return peri__tbe_tell(
        tbe,
        &(peri__row_change){.form = PERI__ROWS_RANGE, .part = part, .table = table, .first = first, .count = count});
}

/* -- bitmaps of rows ----------------------------------------------------------------------------------------------- */

/** A bit for each linear row: bit (row % 64) of word (row / 64). On the tables' device; of tables behind a cache, whose
 *  rows are more than the device's slots, on the host. */
typedef struct peri__row_bits {
    peri_tensor *words;            /* i64 */
    peri_tensor *fresh, *n_fresh;  /* i64: see peri__row_bits_mark; made when they are first asked for */
    int64_t rows;                  /* of all tables */
    int64_t passed;                /* The bits of all rows below this one count as set: updates do not look at them,
                                      since a large bitmap that is read at random costs much of what a small step
                                      costs. Whoever owns the bits sets it. */
} peri__row_bits;

/** Bits for the rows of @tbe, all 0. */
peri_status peri__row_bits_init(const peri_tbe *tbe, peri__row_bits *bits);
void peri__row_bits_fini(peri__row_bits *bits);
/** The linear row of row 0 of @table; @table n_tables: all rows. */
int64_t peri__first_row(const peri_tbe *tbe, int64_t table);
/** Set the bits of @change; queued on the current stream. @list: n_fresh becomes the number of rows whose bit was 0
 *  before, and fresh those rows (linear), in any order. Within peri__row_watch.before. */
peri_status peri__row_bits_mark(const peri_tbe *tbe, peri__row_bits *bits, const peri__row_change *change, bool list);

#endif
