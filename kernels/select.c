/* SPDX-License-Identifier: Apache-2.0
 *
 * select.c: which instruction set's kernels run here.
 */
#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/** Which instruction sets were compiled: those that the Makefile names (its ISA), PERI_ISA_avx2 and PERI_ISA_avx512, or
 *  all up to
 *  PERI_ISA_MOST: a program of two files has less (runtime/gen/amalgamation.lua). */
#if defined(PERI_ISA_MOST) && defined(__x86_64__)
#if PERI_ISA_MOST >= 1
#define PERI_ISA_avx2
#endif
#if PERI_ISA_MOST >= 2
#define PERI_ISA_avx512
#endif
#endif

const char *const peri_kernel_names[PERI_WORK_COUNT] = {
#define X(name, args) [PERI_K_##name] = #name,
    PERI_KERNELS(X) PERI_STEPS(X)
#undef X
#define X(name, args) [PERI_OP_##name] = #name,
        PERI_OPS(X)
#undef X
};

/** Instruction sets from the lowest to the highest, each completed from the one before. */
enum { ISA_COUNT = 3 };
static peri_kernels tables[ISA_COUNT];
static const char *const isa_names[ISA_COUNT] = {"ref", "avx2", "avx512"};

/** X(name) for the units of kernels/cpu that have a table; no kernel is in two of them. */
#define UNITS(X) X(dense) X(product) X(sparse) X(route) X(tbe) X(sequence)

#if defined(PERI_ISA_avx2)
#define X(unit) extern const peri_kernels peri_kernels_avx2_##unit;
UNITS(X)
#undef X
static bool avx2_runs(void)
{
    unsigned a, b, c, d; /* clang 14 does not know "f16c" */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif
#if defined(PERI_ISA_avx512)
#define X(unit) extern const peri_kernels peri_kernels_avx512_##unit;
UNITS(X)
#undef X
static bool avx512_runs(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/** The units of an instruction set that is compiled in and runs here; none: NULL. */
static const peri_kernels *const *units(int isa)
{
    static const peri_kernels *const ref[] = {&peri_kernels_ref, NULL};
    if (isa == 0) return ref;
#if defined(PERI_ISA_avx2)
#define X(unit) &peri_kernels_avx2_##unit,
    static const peri_kernels *const avx2[] = {UNITS(X) NULL};
#undef X
    if (isa == 1 && avx2_runs()) return avx2;
#endif
#if defined(PERI_ISA_avx512)
#define X(unit) &peri_kernels_avx512_##unit,
    static const peri_kernels *const avx512[] = {UNITS(X) NULL};
#undef X
    if (isa == 2 && avx512_runs()) return avx512;
#endif
    return NULL;
}

static const peri_kernels *chosen;

/** Runs before main (and at dlopen), so that readers need no lock. */
__attribute__((constructor)) static void choose(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    const char *wanted = secure_getenv("PERI_CPU_ISA");
    const peri_kernels *below = NULL;
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        const peri_kernels *const *own = units(isa);
        if (!own) continue;
        if (below) tables[isa] = *below;
        below = &tables[isa];
        tables[isa].isa = isa_names[isa];
        for (; *own; own++)
            for (int k = 0; k < PERI_KERNEL_COUNT; k++)
                if ((*own)->fn[k]) tables[isa].fn[k] = (*own)->fn[k];
        if (!chosen || !wanted || strcmp(chosen->isa, wanted) != 0) chosen = &tables[isa];
    }
}

const peri_kernels *peri_kernels_get(void) { return chosen; }

const char *peri_kernels_unknown(void)
{
    const char *wanted = secure_getenv("PERI_CPU_ISA");
    for (int i = 0; wanted && i < ISA_COUNT; i++)
        if (!strcmp(wanted, isa_names[i])) return NULL;
    return wanted && *wanted ? wanted : NULL;
}

const peri_kernels *peri_kernels_isa(const char *isa)
{
    for (int i = 0; i < ISA_COUNT; i++)
        if (!strcmp(isa_names[i], isa)) return tables[i].isa ? &tables[i] : NULL;
    return NULL;
}

#if defined(__x86_64__) && defined(__linux__)
static bool amx_runs(void)
{
    enum { BF16 = 1 << 22, TILE = 1 << 24, INT8 = 1 << 25, ALL = BF16 | TILE | INT8 };
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL) return false;
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}
#else
static bool amx_runs(void) { return false; }
#endif

bool peri_kernels_amx(void)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int known = UNKNOWN; /* threads that ask at the same time hear the same */
    if (atomic_load(&known) == UNKNOWN) atomic_store(&known, amx_runs() ? YES : NO);
    return atomic_load(&known) == YES;
}
