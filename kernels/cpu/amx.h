/* SPDX-License-Identifier: Apache-2.0
 *
 * amx.h: the processor's tiles (AMX): eight registers of 16 rows of 64 bytes, and products of two of them into a
 * third. Numbers of tiles are written out where these are used. Compilers' own functions do not say that they read
 * memory, so that what was stored just before could come too late.
 */
#ifndef PERI_KERNELS_CPU_AMX_H
#define PERI_KERNELS_CPU_AMX_H

#include <stdint.h>

enum { K_AMX_ROWS = 16, K_AMX_BYTES = 64 };

/** What tiles are shaped like: palette 1; rows and bytes of each. */
typedef struct k_amx_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} k_amx_shapes;

#if !defined(K_AMX_EMULATED)
/** Give tiles these shapes, and zeros. */
#define k_amx_begin(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(*(shapes)))
/** No tile holds anything any more: there is less to keep when another thread runs. */
#define k_amx_end() __asm__ volatile("tilerelease" : : : "memory")
#define k_amx_zero(t) __asm__ volatile("tilezero %%tmm" #t : :)
/** Rows of tile @t lie @stride bytes apart. */
#define k_amx_load(t, from, stride)                                                                                    \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define k_amx_store(t, to, stride)                                                                                     \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
/** Row r, number c of s (32 bits) += the sum of x[r][4 k + i] * w[k][4 c + i], all of them with signs. */
#define k_amx_codes(s, x, w) __asm__ volatile("tdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #s : :)
/** Row r, number c of s (f32) += the sum of x[r][2 k + i] * w[k][2 c + i], all of them bf16: dense.h says how it is
 *  rounded (panel_product). */
#define k_amx_halves(s, x, w) __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #s : :)
#endif

#endif
