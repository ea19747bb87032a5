/* SPDX-License-Identifier: Apache-2.0
 *
 * unit.h: what opens every unit of vectorised kernels. A unit (unit_*.c) is compiled once per instruction set with
 * -DK_ISA=avx2 or avx512 and the matching -m flags. It includes all the .c files that it is made of, each after those
 * that it uses, and nobody else includes any. A unit that takes long to compile names pieces in its head ("pieces: f32
 * f16"): it is compiled once for each, with -DK_PIECE=f32.
 *
 * All functions are static but those that another unit of the same instruction set calls, whose names K_SHARED makes.
 * Kernels are found in the table of the unit that ends with K_UNIT; select.c knows these units. A kernel that no unit
 * defines is NULL in all of them: select.c completes the table from the next lower set.
 */
#ifndef PERI_KERNELS_CPU_UNIT_H
#define PERI_KERNELS_CPU_UNIT_H

#include "../work.h"

#include <math.h>
#include <string.h>

#include "../ref/number.h"
#include "../spread.h"
#include "simd.h"

#define K_CAT_(a, b, c) a##b##c
#define K_CAT(a, b, c) K_CAT_(a, b, c)
#define K_TEXT_(a) #a
#define K_TEXT(a) K_TEXT_(a)

/** The table of a unit: peri_kernels_<isa>_<part>. */
#define K_UNIT(part, ...)                                                                                              \
    const peri_kernels K_CAT(peri_kernels_, K_ISA, _##part) = {.isa = K_TEXT(K_ISA), .fn = {__VA_ARGS__}}

/** The name of a function that several units share: peri__<isa>_<name>. Each instruction set has its own. */
#define K_SHARED_(name) K_CAT(peri__, K_ISA, _##name)
#define K_SHARED(name) K_SHARED_(name)
/** Before its declaration: calls need no detour by which another library could put its own function in place. */
#define K_HIDDEN __attribute__((visibility("hidden")))

#endif
