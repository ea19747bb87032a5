/* SPDX-License-Identifier: Apache-2.0
 *
 * explain.h: the list of rows of a batch as text.
 */
#ifndef PERI_SHARD_EXPLAIN_H
#define PERI_SHARD_EXPLAIN_H

#include "rows.h"

/** A text that grows. Zeroed: empty. */
typedef struct peri__text {
    char *text; /* owned by whoever has the struct */
    int64_t n, room;
    bool failed; /* there was no memory */
} peri__text;

/** Add the list of one direction, which is bound (peri__rows_bind). */
void peri__explain(peri__text *text, const peri__rows *rows);

#endif
