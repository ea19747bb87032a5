/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/moment.h: rows of tables as they were at a moment, although updates go on: what a checkpoint copies while
 * training continues.
 *
 * A moment holds *parts*: a table's weights, or a state of its optimizer. While it lives, rows that are about to change
 * are copied first, each once, so it needs as much memory as changes meanwhile, and reading a part gives what was there
 * when it was added.
 *
 *     peri_moment_new(&m);
 *     peri_moment_add(m, weight, &i);          a view that peri_tbe_state has made
 *     ... updates ...
 *     peri_moment_read(m, i, row, block);      rows as they were
 *     peri_moment_pass(m, i, row + n);         nobody reads those rows of it again
 *     peri_moment_release(m);
 *
 * Functions are local. What is written through peri_tensor_data is not seen. If memory runs out while rows are copied,
 * training goes on and reading fails.
 *
 * Threads: a moment (peri_moment) is used by one thread at a time; others may update its tables meanwhile.
 */
#ifndef PERILUNE_MOMENT_H
#define PERILUNE_MOMENT_H

#include <perilune/embed.h>

typedef struct peri_moment peri_moment;

/** A moment without parts. @out new. */
PERI_API peri_status peri_moment_new(peri_moment **out);
/** Free it; NULL is fine. */
PERI_API void peri_moment_release(peri_moment *moment);
/** Add the part that @t is a view of (peri_tbe_state), as it is now. @index: its number, or -1: @t is no view of all
 *  rows of a table, and nothing was added. */
PERI_API peri_status peri_moment_add(peri_moment *moment, const peri_tensor *t, int64_t *index);
/** Add weights ("weight") or state @name of table @table, as they are now; rows are read as @dtype. For tables in
 *  files, of which there are no views. @index: its number. */
PERI_API peri_status peri_moment_add_table(peri_moment *moment, peri_tbe *tbe, int64_t table, const char *name,
                                           int32_t dtype, int64_t *index);
/** Rows from @row on of part @index as they were, into @out: contiguous, in the host's memory, of the part's dtype and
 *  columns. Waits. */
PERI_API peri_status peri_moment_read(peri_moment *moment, int64_t index, int64_t row, peri_tensor *out);
/** The rows of part @index below @row are not read again: no memory is needed for them any more. */
PERI_API peri_status peri_moment_pass(peri_moment *moment, int64_t index, int64_t row);
/** The numbers of all @n parts, in the order in which reading them keeps the fewest copies and costs updates least: a
 *  row is given up when all parts of its table have passed it, so these follow each other, the smallest rows first. */
PERI_API peri_status peri_moment_order(const peri_moment *moment, int32_t n, int64_t *order);
/** Bytes of copies that it has now. */
PERI_API int64_t peri_moment_bytes(const peri_moment *moment);

#endif
