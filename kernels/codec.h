/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/codec.h: f32 numbers in fewer bits, for the wire. Formats: PERI_CODEC_* (perilune/base.h).
 *
 * Numbers are cut into segments (what goes to one rank), and segments into blocks of `block` numbers; the last block of
 * a segment may be short. A block has the same number of bytes on the wire whether it is short or not; what it lacks is
 * written as 0 and not read.
 */
#ifndef PERI_KERNELS_CODEC_H
#define PERI_KERNELS_CODEC_H

#include <perilune/base.h>

#include "work.h"

/** codec_encode: wire = encode(x); codec_decode: x = decode(wire), for the blocks of the range. range: blocks; elements
 *  where block is 1. The wire has no alignment where it consists of bytes.
 *
 *  FP16, BF16 (block 1): y = clamp(x * loss_scale, -max, max), max = 65504 and 3.3895314e38, NaN passes; rounded to
 *    nearest even. Back: y / loss_scale in f32.
 *
 *  FP8 (block 1): sign, e = exponent_bits, m = 7 - e bits of mantissa, bias b; no infinities, no NaN. a = min(|x|,
 *  max),
 *    max = 2^(2^e - 2 - b) * (2 - 2^-m), NaN becomes max; a is rounded to nearest even, below 2^(1 - b) to multiples of
 *  2^(1 - b - m). FP8 rows (FP8 with block > 1): `block` codes, 0 up to a multiple of 4, f32 scale, f32 0. scale = max
 *  / (1e-20 + largest |x|); the codes
 *    are those of x * scale. Back: code / scale. A block with a number that is not finite has scale NaN.
 *
 *  INT8 (any block): codes, f32 scale, f32 least; range = largest - least, scale = range / 255,
 *    code = rint((x - least) * (255 / (range + 1e-8))) in f32. Back: fma(code, scale, least). A block whose range is
 *    not finite has scale and least NaN.
 *
 *  MX4 (block even): block / 2 bytes, the earlier number in the lower nibble, then one byte E + 127. |code| stands for
 *    {0, .5, 1, 1.5, 2, 3, 4, 6}, bit 3 for the sign. u = largest |x| (2^-126 if 0); E = min(max(floor(log2(u')) - 2,
 *    -127), 125), u' = u rounded as PERI_ROUND_* says; code = |x| * 2^-E rounded half away from zero, at most 7. A
 *    block with a number that is not finite has the byte 255, which decodes to NaN. */
typedef struct peri_k_codec_args {
    void *wire;
    float *x;
    const int64_t *segments; /* n_segments + 1 pairs: first block, first element; NULL: one segment */
    int64_t n;               /* elements in all */
    int64_t n_segments;
    int64_t block;
    int32_t format, rounding;
    int32_t exponent_bits, exponent_bias; /* FP8 */
    float loss_scale;                     /* FP16, BF16; else 1 */
    uint64_t seed;                        /* PERI_ROUND_STOCHASTIC: word (seed, 0, block) of the generator */
} peri_k_codec_args;

PERI_KERNELS_CODEC(PERI_K_ARGS_OF)

#endif
