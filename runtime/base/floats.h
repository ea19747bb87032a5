/* SPDX-License-Identifier: Apache-2.0
 *
 * base/floats.h (L0): how the processor rounds while the library computes. A host may round up, flush denormal numbers,
 * or have exceptions of floating point trap, on any of its threads. Results shall not depend on that, nor on which
 * thread computes a part of an operation, so whatever computes begins with PERI__OWN_FLOATS: to nearest, denormals as
 * they are, no traps. The thread has its own settings back at the end of the block.
 */
#ifndef PERI_BASE_FLOATS_H
#define PERI_BASE_FLOATS_H

#include <fenv.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__aarch64__)
/** What a thread had before; `theirs` false: the same as the library's. */
typedef struct peri__floats {
    bool theirs;
    uint64_t control; /* FPCR: all arithmetic, and how the C library rounds the numbers of texts */
} peri__floats;

/** Write FPCR. In assembly, for clang has no builtin function for it. No access to memory moves across. */
static inline void peri__floats_set(uint64_t control) { __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory"); }

static inline void peri__floats_own(peri__floats *before)
{
    __asm__ volatile("mrs %0, fpcr" : "=r"(before->control));
    before->theirs = before->control != 0;
    if (before->theirs) peri__floats_set(0);
}

static inline void peri__floats_back(const peri__floats *before)
{
    if (before->theirs) peri__floats_set(before->control);
}
#else
/** What a thread had before; `theirs` false: the same as the library's. On x86-64 `env` has MXCSR, by which float and
 *  double are computed, and the settings of the x87, by which the C library rounds the numbers of texts. */
typedef struct peri__floats {
    bool theirs;
    fenv_t env;
} peri__floats;

#if defined(__x86_64__)
/** Bits of MXCSR: what happened so far; all exceptions masked. Then the x87's word, as processes begin with it. */
enum { PERI__FLOATS_FLAGS = 0x3f, PERI__FLOATS_OWN = 0x1f80, PERI__FLOATS_X87 = 0x37f };

static inline bool peri__floats_theirs(void)
{
    uint16_t x87;
    __asm__ volatile("fnstcw %0" : "=m"(x87));
    return (__builtin_ia32_stmxcsr() & ~(unsigned)PERI__FLOATS_FLAGS) != PERI__FLOATS_OWN || x87 != PERI__FLOATS_X87;
}
#else
static inline bool peri__floats_theirs(void) { return true; }
#endif

static inline void peri__floats_own(peri__floats *before)
{
    before->theirs = peri__floats_theirs() && fegetenv(&before->env) == 0 && fesetenv(FE_DFL_ENV) == 0;
#if defined(__x86_64__)
    if (before->theirs) __builtin_ia32_ldmxcsr(PERI__FLOATS_OWN); /* C libraries differ about denormals */
#endif
}

static inline void peri__floats_back(const peri__floats *before)
{
    if (before->theirs) fesetenv(&before->env);
}
#endif

/** A declaration: until the end of this block the thread computes as the library does. */
#define PERI__OWN_FLOATS                                                                                               \
    __attribute__((cleanup(peri__floats_back))) peri__floats peri__before;                                             \
    peri__floats_own(&peri__before)

#endif
