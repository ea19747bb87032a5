/* SPDX-License-Identifier: Apache-2.0
 *
 * unit.h: what opens every unit of vectorised kernels. A unit (unit*.c) is compiled once per instruction set with -DK_ISA=avx2 or avx512
 * and the matching -m flags. It includes all the .c files that it is made of, each after those that it uses, and nobody else includes any;
 * they are static but for its table. A kernel that no unit defines is NULL in all of them: select.c completes the table from the next
 * lower set.
 */
#ifndef PERI_KERNELS_CPU_UNIT_H
#define PERI_KERNELS_CPU_UNIT_H

#include "../kernels.h"

#include <math.h>
#include <string.h>

#include "../ref/number.h"
#include "../spread.h"
#include "simd.h"

#define K_CAT_(a, b, c) a##b##c
#define K_CAT(a, b, c) K_CAT_(a, b, c)
#define K_TEXT_(a) #a
#define K_TEXT(a) K_TEXT_(a)

/** The table of a unit: peri_kernels_<isa><part>. */
#define K_UNIT(part, ...) const peri_kernels K_CAT(peri_kernels_, K_ISA, part) = {.isa = K_TEXT(K_ISA), .fn = {__VA_ARGS__}}

#endif
