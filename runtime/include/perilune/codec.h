/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/codec.h: f32 numbers in fewer bits, for their way between ranks. Formats: PERI_CODEC_* (perilune/base.h).
 *
 * A codec is a format with its parameters: immutable, counted, shared by any number of exchanges. A message is cut into
 * splits, one for each rank. Where a format shares a scale among rows, every split is cut into rows of its own; the
 * last row of a split may be short and travels padded, so splits of any size work, in both directions. A context is a
 * codec on one message: it knows the splits, and how many elements of the wire's dtype each of them takes. All
 * functions are local and queue on the current stream; nothing here is recorded on the tape.
 *
 * Threads: nothing changes a codec (peri_codec), so any number of threads may use it at once; a context
 * (peri_codec_context) is used by one thread at a time.
 */
#ifndef PERILUNE_CODEC_H
#define PERILUNE_CODEC_H

#include <perilune/tensor.h>

typedef struct peri_codec peri_codec;
typedef struct peri_codec_context peri_codec_context;

/** Zeros are the defaults. |x - decode(encode(x))| is at most, for finite x (a: the largest magnitude of the row, e:
 *  loss_scale):
 *
 *    NONE   0
 *    FP16   2^-11 |x| + 2^-25 / e     |x e| <= 65504; beyond, the result is +-65504 / e
 *    BF16   2^-8 |x| + 2^-133 / e     |x e| <= 3.3895e38
 *    FP8    2^-(m+1) |x| + 2^-(b+m)   |x| <= max; beyond, the result is +-max. m = 7 - exponent_bits,
 *           b = exponent_bias, max = 2^(2^exponent_bits - 2 - b) (2 - 2^-m): 0.9375 by default, which suits rows only
 *    FP8 in rows  2^-(m+1) |x| + 2^-(b+m) (a + 1e-20) / max
 *    INT8   range / 509 + 2^-22 a + min(range, 1e-8), range = largest - least of the row
 *    MX4    a / 4 + 2^-128
 *
 *  A row with a number that is not finite decodes to NaN throughout in FP8 rows, INT8 and MX4; FP16 and BF16 keep NaN
 *  and clamp infinities; FP8 without rows turns both into max. */
typedef struct peri_codec_config {
    int64_t size; /* sizeof(peri_codec_config) */
    int32_t format;        /* PERI_CODEC_* */
    int32_t rounding;      /* MX4: PERI_ROUND_* of the shared exponent; 0 is PERI_ROUND_NEAREST */
    int32_t exponent_bits; /* FP8: 2..5; 0: 4 */
    int32_t exponent_bias; /* FP8: 1..31; 0: 15 for 4 exponent bits, 31 for 5, 2^(exponent_bits - 1) - 1 for others */
    int64_t row_dim;       /* numbers of a row; FP8: 0 is no rows; INT8 and MX4 (even): 0 is 32 */
    double loss_scale;     /* FP16, BF16: numbers are multiplied by it on their way; 0 is 1 */
    uint64_t seed;         /* MX4 with PERI_ROUND_STOCHASTIC: the same seed rounds the same message alike */
} peri_codec_config;

/** Make one. @out new. */
PERI_API peri_status peri_codec_new(const peri_codec_config *config, peri_codec **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_codec_retain(peri_codec *codec);
PERI_API void peri_codec_release(peri_codec *codec);
/** What it was made from, defaults filled in. @out: its `size` is set. */
PERI_API peri_status peri_codec_describe(const peri_codec *codec, peri_codec_config *out);
/** Dtype of encoded messages: PERI_F32, F16, BF16 or U8. */
PERI_API int32_t peri_codec_wire_dtype(const peri_codec *codec);
/** Elements of that dtype that a split of @n >= 0 numbers takes; -1 if it would be 2^62 or more. */
PERI_API int64_t peri_codec_size(const peri_codec *codec, int64_t elements);

/** A context for messages of @splits[n] (host, copied, each >= 0) numbers. @out new. */
PERI_API peri_status peri_codec_context_new(peri_codec *codec, const int64_t *splits, int32_t n,
                                            peri_codec_context **out);
/** Add a reference; give one up (NULL is fine). */
PERI_API void peri_codec_context_retain(peri_codec_context *context);
PERI_API void peri_codec_context_release(peri_codec_context *context);
/** Elements of the wire's dtype for each split, n entries. Borrowed, live as long as the context. */
PERI_API const int64_t *peri_codec_context_wire_splits(const peri_codec_context *context);

/** The contiguous f32 tensor @x, as many elements as the splits sum to, encoded: a tensor of one dimension. @out
 *  new. */
PERI_API peri_status peri_codec_encode(peri_codec_context *context, peri_tensor *x, peri_tensor **out);
/** The way back: @wire holds the encoded splits, one after the other; any bytes will do. @out new: f32, one
 *  dimension. */
PERI_API peri_status peri_codec_decode(peri_codec_context *context, peri_tensor *wire, peri_tensor **out);

#endif
