/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/kernels.h: the kernel contract. One header per family lists its kernels: the argument struct, the pseudocode, what the
 * range counts, alignment and aliasing, and what happens on bad input.
 *
 * Rules for all kernels
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
#include "optim.h"
#include "quantize.h"
#include "sparse.h"
#include "route.h"
#include "tbe.h"
#include "cache.h"
#include "bags.h"

#define PERI_KERNELS(X) PERI_KERNELS_CONVERT(X) PERI_KERNELS_DENSE(X) PERI_KERNELS_OPTIM(X) PERI_KERNELS_JAGGED(X) PERI_KERNELS_TBE(X) \
    PERI_KERNELS_SPARSE(X) PERI_KERNELS_LOOKUP(X) PERI_KERNELS_QUANTIZE(X) \
    PERI_KERNELS_ROUTE(X) PERI_KERNELS_CODEC(X) PERI_KERNELS_CACHE(X) PERI_KERNELS_BAGS(X)

enum {
#define X(name) PERI_K_##name,
    PERI_KERNELS(X)
#undef X
        PERI_KERNEL_COUNT
};

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

/** Kernel names for messages and benches. */
extern const char *const peri_kernel_names[PERI_KERNEL_COUNT];

/** The kernels of the best instruction set of this processor, at most PERI_CPU_ISA=ref|avx2|avx512; no entry is NULL. */
const peri_kernels *peri_kernels_get(void);
/** What PERI_CPU_ISA asks for if that is the name of no instruction set; else NULL. */
const char *peri_kernels_unknown(void);
/** The table of one instruction set, completed from below; NULL if this processor or build lacks it. Tests and benches. */
const peri_kernels *peri_kernels_isa(const char *isa);

#endif
