/* SPDX-License-Identifier: Apache-2.0
 *
 * explain.h: the list of rows of a batch as text.
 */
#ifndef PERI_SHARD_EXPLAIN_H
#define PERI_SHARD_EXPLAIN_H

#include "../base/buffer.h"
#include "rows.h"

/** Add the list of one direction, which is bound (peri__rows_bind). */
void peri__explain(peri__buffer *text, const peri__rows *rows);

#endif
