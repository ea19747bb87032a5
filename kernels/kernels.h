/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/kernels.h: what devices compute. One header per family lists it, each entry with its argument struct: the pseudocode, what
 * the range counts, alignment and aliasing, and what happens on bad input. Three kinds:
 *
 *   kernel     does each item of a range on its own, whatever the order: any device runs it over [0, n). PERI_KERNELS, PERI_K_*
 *   operation  a whole (a sort, a cumulative sum, an update of tables): what comes out is laid down here, how a device gets there is its
 *              own affair, and so are its chunks, threads, digits and scratch. PERI_OPS, PERI_OP_*
 *   step       a kernel of which the device cpu composes its operations (runtime/backends/cpu_ops.c). The core launches none, and another
 *              device need not have any. PERI_STEPS, PERI_K_*. Members of arguments that are called a step's are 0 where the core fills in
 *              the arguments of an operation
 *
 * Rules for all kernels and steps
 * - `fn(args, begin, end)` does the part [begin, end) of the kernel's range, serially; ranges may run in any order and in parallel, and
 *   the results do not depend on how [0, n) is split.
 * - Raw pointers and numbers only; no allocation, no globals, no failure. A kernel that can meet bad input writes what it found into
 *   a report struct in its device's memory.
 * - Pointers are aligned to their element size unless said otherwise; outputs do not alias inputs unless said otherwise.
 * - kernels/ref is normative; kernels/cpu is compiled once per instruction set; an entry that an instruction set lacks is the next
 *   lower one's, down to ref.
 */
#ifndef PERI_KERNELS_H
#define PERI_KERNELS_H

#include <perilune/base.h>

#include "codec.h"
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

/** X(name, argument struct) for each kernel, step and operation. */
#define PERI_KERNELS(X) PERI_KERNELS_CONVERT(X) PERI_KERNELS_DENSE(X) PERI_KERNELS_OPTIM(X) PERI_KERNELS_JAGGED(X) PERI_KERNELS_TBE(X) \
    PERI_KERNELS_SPARSE(X) PERI_KERNELS_LOOKUP(X) PERI_KERNELS_QUANTIZE(X) \
    PERI_KERNELS_ROUTE(X) PERI_KERNELS_CODEC(X) PERI_KERNELS_CACHE(X) PERI_KERNELS_BAGS(X) PERI_KERNELS_COLLISION(X) \
    PERI_KERNELS_ELEMENTS(X)

#define PERI_STEPS(X) PERI_STEPS_DENSE(X) PERI_STEPS_OPTIM(X) PERI_STEPS_JAGGED(X) PERI_STEPS_SPARSE(X) PERI_STEPS_LOOKUP(X) \
    PERI_STEPS_TBE(X) PERI_STEPS_NEAREST(X) PERI_STEPS_ELEMENTS(X)
#define PERI_OPS(X) PERI_OPS_DENSE(X) PERI_OPS_OPTIM(X) PERI_OPS_JAGGED(X) PERI_OPS_SPARSE(X) PERI_OPS_LOOKUP(X) PERI_OPS_TBE(X) \
    PERI_OPS_NEAREST(X) PERI_OPS_ELEMENTS(X)

/** One space of numbers. */
enum {
#define X(name, args) PERI_K_##name,
    PERI_KERNELS(X) PERI_STEPS(X)
#undef X
        PERI_KERNEL_COUNT, /* steps are among them */
#define X(name, args) PERI_OP_##name,
    PERI_OPS(X)
#undef X
        PERI_WORK_COUNT
};
enum { PERI_OP_FIRST = PERI_KERNEL_COUNT + 1 };

/** The argument struct of what the core may launch, for the compiler to check. */
#define X(name, args) typedef args peri_k_args_of_##name;
PERI_KERNELS(X)
#undef X
#define X(name, args) typedef args peri_op_args_of_##name;
PERI_OPS(X)
#undef X

/** A kernel, step or operation as whoever compiled this header knows it: its number is its place in the list. */
typedef struct peri_work_entry {
    const char *name; /* NULL: no work has this number */
    int64_t args;     /* bytes of its argument struct */
} peri_work_entry;

/** All of them by number, and how many. A backend hands this list to the core, which finds its work there by name: lists may differ. */
static inline const peri_work_entry *peri_work_list(int32_t *count)
{
    static const peri_work_entry list[] = {
#define X(name, args) {#name, sizeof(args)},
        PERI_KERNELS(X) PERI_STEPS(X) {NULL, 0}, PERI_OPS(X)
#undef X
    };
    *count = (int32_t)(sizeof list / sizeof *list);
    return list;
}

/** One kernel over a part of its range. */
typedef void (*peri_kernel_fn)(const void *args, int64_t begin, int64_t end);

/** A table of kernels; a NULL entry falls back to the next lower instruction set. */
typedef struct peri_kernels {
    const char *isa; /* "ref", "avx2", "avx512" */
    peri_kernel_fn fn[PERI_KERNEL_COUNT];
} peri_kernels;

extern const peri_kernels peri_kernels_ref;
#if defined(__x86_64__)
extern const peri_kernels peri_kernels_avx2, peri_kernels_avx2_tbe; /* the units of kernels/cpu: no kernel is in both */
extern const peri_kernels peri_kernels_avx512, peri_kernels_avx512_tbe;
#endif

/** Names by number (PERI_K_*, PERI_OP_*), for messages and benches. */
extern const char *const peri_kernel_names[PERI_WORK_COUNT];

/** The kernels of the best instruction set of this processor, at most PERI_CPU_ISA=ref|avx2|avx512; no entry is NULL. */
const peri_kernels *peri_kernels_get(void);
/** What PERI_CPU_ISA asks for if that is the name of no instruction set; else NULL. */
const char *peri_kernels_unknown(void);
/** The table of one instruction set, completed from below; NULL if this processor or build lacks it. Tests and benches. */
const peri_kernels *peri_kernels_isa(const char *isa);

#endif
