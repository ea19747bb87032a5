/* SPDX-License-Identifier: Apache-2.0
 *
 * base/tune_table.h (L0): tune.def as a table.
 */
#ifndef PERI_BASE_TUNE_TABLE_H
#define PERI_BASE_TUNE_TABLE_H

#include "tune.h"

/** What tune.def says of each choice. */
typedef struct peri__tune_row {
    const char *name, *usual, *text;
    int32_t group;
    const char *ways[PERI_TUNE_WAYS]; /* NULL behind the last */
} peri__tune_row;
extern const peri__tune_row peri__tune_table[PERI__TUNE_CHOICES];

/** The choice of this name; -1: none. */
int32_t peri__tune_find(const char *name);
/** The place of a way's word; -1: none. */
int32_t peri__tune_way(int32_t choice, const char *word);
/** Number of ways. */
int32_t peri__tune_ways(int32_t choice);

#endif
