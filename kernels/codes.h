/* SPDX-License-Identifier: Apache-2.0
 *
 * codes.h: rows of f32 as codes of 8 bits or as bf16, for products of such rows (panel_product, dense.h). All
 * instruction sets round them in the same way.
 */
#ifndef PERI_KERNELS_CODES_H
#define PERI_KERNELS_CODES_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <perilune/base.h>

/** Most numbers of a row that is multiplied as codes: their sums stay below 2^31. */
enum { PERI_CODES_MOST = 1 << 16 };

/** A row as codes, with zeros behind the last up to a multiple of PERI_CODES_LINE: x[k] is about scale * codes[k]. A
 *  row of bf16 lies in the same way, without scale and sum: codes are the bytes of its numbers. */
enum { PERI_CODES_LINE = 64 };
typedef struct peri_k_codes {
    float scale;
    int32_t sum;        /* of the codes */
    int32_t unused[14]; /* sums and codes begin with a line of the cache, if the row does */
    int32_t sums[32];   /* room for sums of products that are not at their end yet; of bf16: f32 */
    int8_t codes[];
} peri_k_codes;

/** Bytes of a row of @inner numbers that are multiplied with a matrix of @dtype: PERI_I8, or PERI_BF16, where there is
 *  room for f32, since some ways to multiply want the rounded numbers as such. */
static inline int64_t peri_codes_bytes(int64_t inner, int32_t dtype)
{
    const int64_t bytes = dtype == PERI_BF16 ? inner * 4 : inner;
    return (int64_t)sizeof(peri_k_codes) + (bytes + PERI_CODES_LINE - 1) / PERI_CODES_LINE * PERI_CODES_LINE;
}

/** The f32 with the bits @x as a bf16, in the upper half: to nearest, ties to even; below 2^-126 it is 0. */
static inline uint32_t peri_bf16_of(uint32_t x)
{
    const uint32_t most = x & 0x7fffffffu, nearest = x + 0x7fffu + (x >> 16 & 1);
    const uint32_t number = most > 0x7f800000u ? x | 0x400000u : nearest; /* NaN stays NaN */
    return most < 0x800000u ? 0 : number & 0xffff0000u;
}

/** Write @x[inner] as bf16, with zeros behind the last up to a multiple of PERI_CODES_LINE; @wide: as f32 that are
 *  bf16. */
static inline void peri_halves_of(peri_k_codes *to, const float *x, int64_t inner, bool wide)
{
    for (int64_t k = 0; k < inner && wide; k++) { /* each loop stores one type, or compilers take it number by number */
        uint32_t bits;
        memcpy(&bits, x + k, sizeof bits);
        bits = peri_bf16_of(bits);
        memcpy(to->codes + 4 * k, &bits, sizeof bits);
    }
    for (int64_t k = 0; k < inner && !wide; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, sizeof bits);
        const uint16_t half = (uint16_t)(peri_bf16_of(bits) >> 16);
        memcpy(to->codes + 2 * k, &half, sizeof half);
    }
    for (int64_t k = inner * (wide ? 4 : 2); k % PERI_CODES_LINE != 0; k++) to->codes[k] = 0;
}

/** Write @x[inner] as codes: the largest magnitude becomes 127, and all products are rounded once, to nearest, ties to
 *  even. A row that is not finite has the scale NaN and codes of 0. */
static inline void peri_codes_of(peri_k_codes *to, const float *x, int64_t inner)
{
    uint32_t most = 0;
    for (int64_t k = 0; k < inner; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float largest, times = 0;
    memcpy(&largest, &most, sizeof largest);
    const bool finite = most < 0x7f800000u;
    to->scale = finite ? largest / 127 : largest - largest; /* infinity - infinity is NaN */
    if (finite && to->scale > 0) times = 127 / largest;
    if (!(times <= 0x1p120f)) times = 0, to->scale = 0; /* of numbers so small nothing is left */
    int32_t sum = 0;
    for (int64_t k = 0; k < inner && finite; k++) {
        const float nearest = fmaf(x[k], times, 12582912.0f) - 12582912.0f; /* 1.5 * 2^23 leaves no fraction */
        to->codes[k] = (int8_t)(int32_t)nearest;
        sum += to->codes[k];
    }
    if (!finite) memset(to->codes, 0, (size_t)inner);
    for (int64_t k = inner; k % PERI_CODES_LINE != 0; k++) to->codes[k] = 0;
    to->sum = sum;
}

#endif
