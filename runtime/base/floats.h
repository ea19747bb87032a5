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

/** What a thread had before; `theirs` false: the same as the library's. */
typedef struct peri__floats {
    bool theirs;
#if defined(__x86_64__)
    unsigned control; /* MXCSR: all arithmetic of float and double */
#elif defined(__aarch64__)
    uint64_t control; /* FPCR */
#else
    fenv_t env;
#endif
} peri__floats;

#if defined(__x86_64__)
enum { PERI__FLOATS_FLAGS = 0x3f, PERI__FLOATS_OWN = 0x1f80 }; /* what happened so far; all exceptions masked */

static inline peri__floats peri__floats_own(void)
{
    const unsigned control = __builtin_ia32_stmxcsr();
    const peri__floats before = {(control & ~(unsigned)PERI__FLOATS_FLAGS) != PERI__FLOATS_OWN, control};
    if (before.theirs) __builtin_ia32_ldmxcsr(PERI__FLOATS_OWN);
    return before;
}

static inline void peri__floats_back(const peri__floats *before)
{
    if (before->theirs) __builtin_ia32_ldmxcsr(before->control);
}
#elif defined(__aarch64__)
/** Write FPCR. In assembly, for clang has no builtin function for it. No access to memory moves across. */
static inline void peri__floats_set(uint64_t control) { __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory"); }

static inline peri__floats peri__floats_own(void)
{
    peri__floats before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before.control));
    before.theirs = before.control != 0;
    if (before.theirs) peri__floats_set(0);
    return before;
}

static inline void peri__floats_back(const peri__floats *before)
{
    if (before->theirs) peri__floats_set(before->control);
}
#else
static inline peri__floats peri__floats_own(void)
{
    peri__floats before = {.theirs = true};
    before.theirs = fegetenv(&before.env) == 0 && fesetenv(FE_DFL_ENV) == 0;
    return before;
}

static inline void peri__floats_back(const peri__floats *before)
{
    if (before->theirs) fesetenv(&before->env);
}
#endif

/** A declaration: until the end of this block the thread computes as the library does. */
#define PERI__OWN_FLOATS                                                                                               \
    __attribute__((cleanup(peri__floats_back), unused)) const peri__floats peri__before = peri__floats_own()

#endif
