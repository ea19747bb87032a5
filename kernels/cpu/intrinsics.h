/* SPDX-License-Identifier: Apache-2.0
 *
 * intrinsics.h: the intrinsics of AVX2 and AVX-512. <immintrin.h> declares those of all instruction sets, for which gcc
 * takes 0.2 s in each of 36 units. Its parts refuse to be included by themselves unless its guard is defined: gcc 12,
 * with which this was tried, gets the parts that kernels need; other compilers get the whole.
 */
#ifndef PERI_KERNELS_CPU_INTRINSICS_H
#define PERI_KERNELS_CPU_INTRINSICS_H

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ == 12 && !defined(_IMMINTRIN_H_INCLUDED)
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>
#if defined(__AVX512F__)
#include <avx512fintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vlbwintrin.h>
#include <avx512vldqintrin.h>
#endif
#else
#include <immintrin.h>
#endif

#endif
