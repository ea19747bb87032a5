/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/kernels.h: what devices compute. list.h has the names; one header per family says of each its argument
 * struct, the pseudocode, what the range counts, alignment and aliasing, and what happens on bad input. This header
 * includes them all, for those who know all kernels; others include work.h and the families whose arguments they fill
 * in. Three kinds:
 *
 *   kernel     does each item of a range on its own, whatever the order: any device runs it over [0, n). PERI_KERNELS,
 *              PERI_K_*
 *   operation  a whole (a sort, a cumulative sum, an update of tables): what comes out is laid down here, how a device
 *              gets there is its own affair, and so are its chunks, threads, digits and scratch. PERI_OPS, PERI_OP_*
 *   step       a kernel of which the device cpu composes its operations (runtime/backends/cpu_ops.c). The core launches
 *              none, and another device need not have any. PERI_STEPS, PERI_K_*. Members of arguments that are called a
 *              step's are 0 where the core fills in the arguments of an operation
 *
 * Rules for all kernels and steps
 * - `fn(args, begin, end)` does the part [begin, end) of the kernel's range, serially; ranges may run in any order and
 *   in parallel, and the results do not depend on how [0, n) is split.
 * - Raw pointers and numbers only; no allocation, no globals, no failure. A kernel that can meet bad input writes what
 *   it found into a report struct in its device's memory.
 * - Pointers are aligned to their element size unless said otherwise; outputs do not alias inputs unless said
 *   otherwise.
 * - kernels/ref is normative; kernels/cpu is compiled once per instruction set; an entry that an instruction set lacks
 *   is the next lower one's, down to ref.
 */
#ifndef PERI_KERNELS_H
#define PERI_KERNELS_H

#include "work.h"

#include "codec.h"
#include "codes.h"
#include "convert.h"
#include "dense.h"
#include "jagged.h"
#include "lookup.h"
#include "nearest.h"
#include "optim.h"
#include "quantize.h"
#include "sparse.h"
#include "route.h"
#include "tbe.h"
#include "cache.h"
#include "bags.h"
#include "collision.h"
#include "elements.h"
#include "sequence.h"
#include "layout.h"

/** A kernel, step or operation as whoever compiled this header knows it: its number is its place in the list. */
typedef struct peri_work_entry {
    const char *name; /* NULL: no work has this number */
    int64_t args;     /* PERI_WORK_ARGS of its argument struct */
} peri_work_entry;

/** All of them by number, and how many. A backend hands this list to the core, which finds its work there by name:
 *  lists may differ. */
static inline const peri_work_entry *peri_work_list(int32_t *count)
{
    static const peri_work_entry list[] = {
#define X(name, args) {#name, PERI_WORK_ARGS(args)},
        PERI_KERNELS(X) PERI_STEPS(X) {NULL, 0}, PERI_OPS(X)
#undef X
    };
    *count = (int32_t)(sizeof list / sizeof *list);
    return list;
}

#endif
