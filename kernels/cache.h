/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/cache.h: rows of cached tables between their slots in a table batch and records, the form in which a file
 * keeps them.
 *
 * A record holds all that belongs to one row: 8 bytes for whoever stores it, then the parts in order. A part is the row
 * of a matrix laid out as the weights (the weights themselves, full optimizer states), or one element per row (row
 * states). Parts are packed.
 */
#ifndef PERI_KERNELS_CACHE_H
#define PERI_KERNELS_CACHE_H

#include "work.h"
#include "tbe.h"

enum { PERI_CACHE_PARTS = 6, PERI_CACHE_RECORD_HEAD = 8 };

/** Where a part of the slots lives. */
typedef struct peri_k_cache_part {
    char *base;    /* of the table batch's flat tensor */
    int32_t bytes; /* of an element */
    bool row;      /* one element for each linear row; else table.cols elements at table.offset + slot * table.stride */
} peri_k_cache_part;

/** One row on its way. */
typedef struct peri_k_cache_move {
    int64_t record;      /* bytes from the start of the records */
    int64_t row;         /* the caller's */
    int32_t table, slot; /* slot < tables[table].rows */
} peri_k_cache_move;

/** cache_fill:  slot <- record;  cache_spill: record <- slot (its first 8 bytes stay). Slots, and records, of one call
 *  are distinct. range: moves. */
typedef struct peri_k_cache_args {
    const peri_k_tbe_table *tables;
    const peri_k_cache_move *moves;
    char *records;
    peri_k_cache_part part[PERI_CACHE_PARTS];
    int64_t *slot_row; /* cache_fill: by linear row: gets move.row; NULL: nobody asks */
    int32_t n_parts, reserved;
} peri_k_cache_args;

PERI_KERNELS_CACHE(PERI_K_ARGS_OF)

#endif
