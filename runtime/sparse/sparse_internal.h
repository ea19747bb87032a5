/* SPDX-License-Identifier: Apache-2.0
 *
 * sparse/sparse_internal.h (L2): what the sparse operators share: checks that read back what they found, cumulative
 * sums, sorting. Nothing here is recorded on the tape.
 */
#ifndef PERI_SPARSE_INTERNAL_H
#define PERI_SPARSE_INTERNAL_H

#include "../tensor/jagged_internal.h"

#include <perilune/quantize.h>
#include <perilune/sparse.h>

#include "../../kernels/quantize.h"

enum { PERI_INT_GRAIN = 1 << 15 }; /* elements that are worth a thread */

/** i32 or i64 of @ndim dimensions (-1: any), on the device of @like (NULL: any). */
peri_status peri__check_ints(const char *function, const char *what, const peri_tensor *t, int32_t ndim,
                             const peri_tensor *like);
/** Every element of contiguous @t is in [0, limit); the error names the first that is not. Waits. */
peri_status peri__check_indices(const char *function, const char *what, const peri_tensor *t, int64_t limit);
/** The smallest and the largest element of contiguous @t, which has some. Waits. */
peri_status peri__extent(const peri_tensor *t, int64_t *least, int64_t *most);

/** *b = the bags that lengths or offsets (one of them NULL; contiguous, 1 dimension) cut out of @rows rows; its offsets
 *  are made. Checked, which waits: errors name @what, and a bag as "bag 3" or, with @columns > 0, as "row 0, column 3";
 *  with -1
 *  @what is what a bag is called, as in "table 3". */
peri_status peri__bags_of(const char *function, const char *what, peri__bags *b, peri_tensor *lengths,
                          peri_tensor *offsets, int64_t rows, int64_t columns);

/** Indices as peri__check_indices takes them. */
typedef struct peri__indices {
    const char *what;
    const peri_tensor *t;
    int64_t limit;
} peri__indices;

/* Checks in two halves, so that work which depends on what they check is queued between them, and the device has it to
 * do while the host waits for the verdict. Until the second half that work finds numbers that lead it nowhere else: the
 * given ones if they are right. Where the host works in the device's memory, the first half is all of it. */

/** What bags are called in errors: as in peri__bags_of. */
typedef struct peri__bag_names {
    const char *what;
    int64_t columns;
} peri__bag_names;

/** peri__bags_of: b->offsets are there for what is queued next. On failure @b is given up. */
peri_status peri__bags_queue(const char *function, const peri__bag_names *names, peri__bags *b, peri_tensor *lengths,
                             peri_tensor *offsets, int64_t rows);
peri_status peri__bags_settle(const char *function, const peri__bag_names *names, peri__bags *b);
/** peri__check_indices: *safe (a new reference) is for what is queued next. The second half gives the report back and
 *  sets it to NULL. */
peri_status peri__indices_queue(const char *function, const peri__indices *indices, peri_tensor **safe,
                                peri__report **report);
peri_status peri__indices_settle(const char *function, const peri__indices *indices, peri__report **report);
/** peri__total_offsets. The second half gives the report back and sets it to NULL. */
peri_status peri__total_queue(const peri_tensor *lengths, peri_tensor **out, peri__report **report);
peri_status peri__total_settle(const char *function, peri__report **report, int64_t *total);

/** peri__check_indices and then peri__bags_of, with one wait for both. */
peri_status peri__indices_and_bags(const char *function, const peri__indices *indices, const char *what, peri__bags *b,
                                   peri_tensor *lengths, peri_tensor *offsets, int64_t rows, int64_t columns);

/** Begin to check that contiguous @offsets, called @what, are complete and cut @rows things into parts; later, judge
 *  what was found about them, which waits for the device and gives @b up. Each part is called @part in errors. */
peri_status peri__offsets_post(const char *function, const char *what, peri_tensor *offsets, int64_t rows,
                               peri__bags *b);
peri_status peri__offsets_judge(const char *function, const char *what, const char *part, peri__bags *b);
/** Both at once. */
peri_status peri__check_offsets(const char *function, const char *what, const char *part, peri_tensor *offsets,
                                int64_t rows);

/** A peri__bag_text_fn whose owner is the name of the lengths or offsets. */
void peri__bag_name(const void *owner, int64_t bag, char *text, size_t len);

/** The complete cumulative sum, as i64 [n + 1], of well-formed lengths [n]; *total: the last entry. PERI_ERANGE from
 *  2^50 on. Waits. */
peri_status peri__total_offsets(const char *function, const peri_tensor *lengths, peri_tensor **out, int64_t *total);

/** Everything of the arguments of rows_quantize but data: the layout of rows of @cols numbers. Checked. */
peri_status peri__rows_layout(const char *function, const peri_row_format *format, int64_t cols, peri_k_rows_args *out);

/** Release the tensors of @r; the struct is the caller's. */
void peri__unique_release(peri_unique_result *r);

/** The places at which each number of [0, lists) stands in @x [n] (contiguous, all numbers in range): @list [n], its
 *  parts in
 *  @offsets [lists + 1]. */
peri_status peri__lists_of(const peri_tensor *x, int64_t lists, peri_tensor **list, peri_tensor **offsets);

/** Segments of rows in their order: segment t, of out_offsets[t + 1] - out_offsets[t] rows, begins at row starts[t] of
 *  contiguous @src. Both i64, contiguous and within bounds; @rows: the last of @out_offsets. With gradient; no row is
 *  picked twice. */
peri_status peri__rows_pick(peri_tensor *src, peri_tensor *out_offsets, peri_tensor *starts, int64_t rows,
                            peri_tensor **out);

/** The rows of contiguous @src where @mask [n] (bool, contiguous) is true. With gradient. Waits. */
peri_status peri__rows_masked(peri_tensor *src, peri_tensor *mask, peri_tensor **rows);

/** Ids of tables that lie one after the other: see table_rows. Tensors are contiguous; offsets and starts well
 *  formed. */
typedef struct peri__tables {
    const char *function, *what, *table; /* for errors: the ids' name; what a table is called */
    peri_tensor *ids, *offsets, *starts, *remap; /* remap: or NULL */
    int64_t tables, step;                /* bags a table; 0: one, whose number is not worth a word */
} peri__tables;

/** The row of every id, of @dtype (new); with @bag also each id's bag, i64 (new). An id that its table does not have is
 *  an error. Waits. */
peri_status peri__table_rows(const peri__tables *t, int32_t dtype, peri_tensor **rows, peri_tensor **bag);
/** Element @i of a contiguous i64 tensor, quickly. Waits. */
peri_status peri__word_at(const peri_tensor *t, int64_t i, int64_t *out);
/** Element @i of a contiguous i32 or i64 tensor. Waits. */
peri_status peri__int_at(const peri_tensor *t, int64_t i, int64_t *out);
/** The bag that has place @i. Waits: for errors. */
peri_status peri__bag_at(const peri_tensor *offsets, int64_t i, int64_t *bag);

/** Bits that hold every number of [0, n). */
static inline int32_t peri__bits(int64_t n)
{
    int32_t bits = 0;
    while (bits < 63 && ((int64_t)1 << bits) < n) bits++;
    return bits;
}

/** A contiguous i32 or i64 tensor as one dimension: a view. */
peri_status peri__flat(peri_tensor *t, peri_tensor **out);
#endif
