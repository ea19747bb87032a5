/* SPDX-License-Identifier: Apache-2.0
 *
 * codes.h: rows of f32 as codes of 8 bits, for products of codes (panel_product, dense.h). All instruction sets make
 * the same codes.
 */
#ifndef PERI_KERNELS_CODES_H
#define PERI_KERNELS_CODES_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/** Most numbers of a row that is multiplied as codes: their sums stay below 2^31. */
enum { PERI_CODES_MOST = 1 << 16 };

/** A row as codes, with zeros behind the last up to a multiple of PERI_CODES_LINE: x[k] is about scale * codes[k]. */
enum { PERI_CODES_LINE = 64 };
typedef struct peri_k_codes {
    float scale;
    int32_t sum;        /* of the codes */
    int32_t unused[14]; /* sums and codes begin with a line of the cache, if the row does */
    int32_t sums[32];   /* room for sums of products that are not at their end yet */
    int8_t codes[];
} peri_k_codes;

/** Bytes of a row of @inner numbers as codes. */
static inline int64_t peri_codes_bytes(int64_t inner)
{
    return (int64_t)sizeof(peri_k_codes) + (inner + PERI_CODES_LINE - 1) / PERI_CODES_LINE * PERI_CODES_LINE;
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
