/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/work.h: kernels, steps and operations by number. The headers of families (kernels/tbe.h, ...), which describe
 * the arguments of a launch, include it; a changed list compiles anew who includes those, and nobody else.
 */
#ifndef PERI_KERNELS_WORK_H
#define PERI_KERNELS_WORK_H

#include <perilune/base.h>

#include "list.h"

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

/** One kernel over a part of its range. */
typedef void (*peri_kernel_fn)(const void *args, int64_t begin, int64_t end);

/** A table of kernels; a NULL entry falls back to the next lower instruction set. */
typedef struct peri_kernels {
    const char *isa; /* "ref", "avx2", "avx512" */
    peri_kernel_fn fn[PERI_KERNEL_COUNT];
} peri_kernels;

extern const peri_kernels peri_kernels_ref;

/** Names by number (PERI_K_*, PERI_OP_*), for messages and benches. */
extern const char *const peri_kernel_names[PERI_WORK_COUNT];

/** The kernels of the best instruction set of this processor, at most PERI_CPU_ISA=ref|avx2|avx512; no entry is
 *  NULL. */
const peri_kernels *peri_kernels_get(void);
/** What PERI_CPU_ISA asks for if that is the name of no instruction set; else NULL. */
const char *peri_kernels_unknown(void);
/** The table of one instruction set, completed from below; NULL if this processor or build lacks it. Tests and
 *  benches. */
const peri_kernels *peri_kernels_isa(const char *isa);
/** May this process use the processor's tiles (AMX) for products of codes and of bf16? Where the processor has them,
 *  the first call asks the system, which from then on refuses stacks for signals (sigaltstack) that are too small for
 *  them, as it refuses the tiles where a thread has such a stack already. Any thread. */
bool peri_kernels_amx(void);

#endif
