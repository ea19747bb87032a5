/* SPDX-License-Identifier: Apache-2.0
 *
 * message_codec.c: codecs of messages: formats and their parameters, and messages cut into splits.
 */
#include "../base/floats.h"
#include "../tensor/jagged_internal.h"
#include "comm_internal.h"
#include "../../kernels/codec.h"

#include <math.h>

struct peri_codec {
    peri__refs refs;
    peri_codec_config config; /* defaults filled in */
};

struct peri_codec_context {
    peri__refs refs;
    peri_codec *codec; /* retained */
    int32_t n;
    bool ragged;       /* a row of a split is short, and another split follows */
    int64_t numbers, blocks, wire; /* in all */
    int64_t *segments; /* n + 1 pairs: first block, first number; then n sizes on the wire */
    int64_t *wire_splits;
    peri_tensor *table; /* the segments on the device of the first message, when they are needed */
};

enum { GRAIN = 1 << 15 };

/* -- codecs -------------------------------------------------------------------------------------------------------- */

static int32_t default_bias(int32_t exponent_bits)
{
    return exponent_bits == 4 ? 15 : exponent_bits == 5 ? 31 : (1 << (exponent_bits - 1)) - 1;
}

static peri_status check_config(peri_codec_config *c)
{
    static const char f[] = "peri_codec_new";
    bool scaled = c->format == PERI_CODEC_FP16 || c->format == PERI_CODEC_BF16;
    bool rows = c->format == PERI_CODEC_FP8 || c->format == PERI_CODEC_INT8 || c->format == PERI_CODEC_MX4;
    if (c->format < 0 || c->format >= PERI_CODEC_COUNT)
        return peri__fail(PERI_EINVAL, "%s: format %d, allowed: 0..%d", f, c->format, PERI_CODEC_COUNT - 1);
    if (c->loss_scale == 0) c->loss_scale = 1;
    if (!(c->loss_scale > 0) || !isfinite((float)c->loss_scale) || (float)c->loss_scale == 0)
        return peri__fail(PERI_EINVAL, "%s: loss_scale %g, allowed: positive f32 numbers", f, c->loss_scale);
    if (c->loss_scale != 1 && !scaled)
        return peri__fail(PERI_EINVAL, "%s: loss_scale %g, but only FP16 and BF16 have one", f, c->loss_scale);
    if (c->row_dim < 0 || c->row_dim > 1 << 20 || (c->row_dim && !rows))
        return peri__fail(PERI_EINVAL, "%s: row_dim %lld, allowed: 0..2^20 in FP8, INT8 and MX4, else 0", f,
                          (long long)c->row_dim);
    if (c->row_dim == 0 && c->format != PERI_CODEC_FP8 && rows) c->row_dim = 32;
    if (c->format == PERI_CODEC_MX4 && c->row_dim % 2)
        return peri__fail(PERI_EINVAL, "%s: row_dim %lld, allowed: even numbers in MX4", f, (long long)c->row_dim);
    if (c->rounding < 0 || c->rounding >= PERI_ROUND_COUNT)
        return peri__fail(PERI_EINVAL, "%s: rounding %d, allowed: 0..%d", f, c->rounding, PERI_ROUND_COUNT - 1);
    if (c->format != PERI_CODEC_FP8) return PERI_OK;
    if (c->exponent_bits == 0) c->exponent_bits = 4;
    if (c->exponent_bits < 2 || c->exponent_bits > 5)
        return peri__fail(PERI_EINVAL, "%s: %d exponent bits, allowed: 2..5", f, c->exponent_bits);
    if (c->exponent_bias == 0) c->exponent_bias = default_bias(c->exponent_bits);
    if (c->exponent_bias < 1 || c->exponent_bias > 31)
        return peri__fail(PERI_EINVAL, "%s: exponent bias %d, allowed: 1..31", f, c->exponent_bias);
    return PERI_OK;
}

peri_status peri_codec_new(const peri_codec_config *config, peri_codec **out)
{
    PERI_NEED(out);
    PERI_TAKE(peri_codec_config, config);
    peri_codec_config checked = *config;
    PERI_TRY(check_config(&checked));
    peri_codec *codec = peri__alloc_zero(sizeof *codec);
    if (!codec) return PERI_ENOMEM;
    peri__refs_init(&codec->refs);
    codec->config = checked;
    peri__object_count(1);
    *out = codec;
    return PERI_OK;
}

void peri_codec_retain(peri_codec *codec) { if (codec) peri__refs_add(&codec->refs); }

void peri_codec_release(peri_codec *codec)
{
    if (!codec || !peri__refs_drop(&codec->refs)) return;
    peri__object_count(-1);
    peri__free(codec);
}

peri_status peri_codec_describe(const peri_codec *codec, peri_codec_config *out)
{
    PERI_NEED(codec);
    return PERI_GIVE(peri_codec_config, out, &codec->config);
}

int32_t peri_codec_wire_dtype(const peri_codec *codec)
{
    if (!codec) return 0;
    static const int32_t dtypes[PERI_CODEC_COUNT] = {PERI_F32, PERI_F16, PERI_BF16, PERI_U8, PERI_U8, PERI_U8};
    return dtypes[codec->config.format];
}

/** Numbers that share a block of the wire. */
static int64_t numbers_per_block(const peri_codec *c) { return c->config.row_dim ? c->config.row_dim : 1; }

/** Elements of the wire's dtype in a block. */
static int64_t wire_elements_per_block(const peri_codec *c)
{
    int64_t row = c->config.row_dim;
    switch (c->config.format) {
    case PERI_CODEC_FP8: return row ? ((row + 3) & ~(int64_t)3) + 8 : 1;
    case PERI_CODEC_INT8: return row + 8;
    case PERI_CODEC_MX4: return row / 2 + 1;
    default: return 1;
    }
}

int64_t peri_codec_size(const peri_codec *codec, int64_t elements)
{
    if (!codec) return 0;
    int64_t limit = (int64_t)1 << 62,
            blocks = elements / numbers_per_block(codec) + (elements % numbers_per_block(codec) != 0);
    return elements < 0 || blocks > (limit - 1) / wire_elements_per_block(codec)
               ? -1
               : blocks * wire_elements_per_block(codec);
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

peri_status peri_codec_context_new(peri_codec *codec, const int64_t *splits, int32_t n, peri_codec_context **out)
{
    PERI_NEED(codec, out);
    if (n > 0) PERI_NEED(splits);
    static const char f[] = "peri_codec_context_new";
    if (n < 0) return peri__fail(PERI_EINVAL, "%s: %d splits", f, n);
    peri_codec_context *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    c->segments = peri__alloc(sizeof *c->segments * (size_t)(3 * (int64_t)n + 2));
    if (!c->segments) {
        peri__free(c);
        return PERI_ENOMEM;
    }
    c->wire_splits = c->segments + 2 * (int64_t)n + 2;
    int64_t block = numbers_per_block(codec), most = (int64_t)1 << 60;
    bool open = false; /* the last row so far is short */
    for (int32_t i = 0; i < n; i++) {
        int64_t size = peri_codec_size(codec, splits[i]);
        if (size < 0 || splits[i] > most - c->numbers || size > most - c->wire) {
            peri__free(c->segments);
            peri__free(c);
            return peri__fail(PERI_EINVAL, "%s: split %d is %lld, allowed: 0 and more, and less than 2^60 in all", f, i,
                              (long long)splits[i]);
        }
        c->segments[2 * i] = c->blocks;
        c->segments[2 * i + 1] = c->numbers;
        c->wire_splits[i] = size;
        c->ragged = c->ragged || (open && splits[i]);
        open = open || splits[i] % block;
        c->blocks += size / wire_elements_per_block(codec);
        c->numbers += splits[i];
        c->wire += size;
    }
    c->segments[2 * n] = c->blocks;
    c->segments[2 * n + 1] = c->numbers;
    peri__refs_init(&c->refs);
    c->n = n;
    peri_codec_retain(codec);
    c->codec = codec;
    peri__object_count(1);
    *out = c;
    return PERI_OK;
}

void peri_codec_context_retain(peri_codec_context *context) { if (context) peri__refs_add(&context->refs); }

void peri_codec_context_release(peri_codec_context *context)
{
    if (!context || !peri__refs_drop(&context->refs)) return;
    peri_tensor_release(context->table);
    peri_codec_release(context->codec);
    peri__free(context->segments);
    peri__object_count(-1);
    peri__free(context);
}

const int64_t *peri_codec_context_wire_splits(const peri_codec_context *context)
{
    return context ? context->wire_splits : NULL;
}

/* -- messages ------------------------------------------------------------------------------------------------------ */

static peri_status check_message(const char *f, const peri_tensor *t, int32_t dtype, int64_t wanted)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "the message", t, dtype, -1));
    if (!peri__contiguous(t))
        return peri__fail(PERI_EINVAL, "%s: %s is not contiguous", f, peri__tensor_text(t, text, sizeof text));
    if (peri__numel(t) != wanted)
        return peri__fail(PERI_EINVAL, "%s: %s has %lld elements, the splits take %lld", f,
                          peri__tensor_text(t, text, sizeof text), (long long)peri__numel(t), (long long)wanted);
    return PERI_OK;
}

/** What the kernels need, but for the two buffers. */
static peri_status fill_args(peri_codec_context *c, peri_device *device, peri_k_codec_args *a)
{
    const peri_codec_config *g = &c->codec->config;
    PERI__OWN_FLOATS;
    if (c->ragged && (!c->table || peri__device(c->table) != device)) {
        peri_tensor *table;
        PERI_TRY(peri__upload_i64(device, c->segments, 2 * (int64_t)c->n + 2, &table));
        peri_tensor_release(c->table);
        c->table = table;
    }
    *a = (peri_k_codec_args){.segments = c->ragged ? peri__data(c->table) : NULL,
                             .n = c->numbers,
                             .n_segments = c->n,
                             .block = numbers_per_block(c->codec),
                             .format = g->format,
                             .rounding = g->rounding,
                             .exponent_bits = g->exponent_bits,
                             .exponent_bias = g->exponent_bias,
                             .loss_scale = (float)g->loss_scale,
                             .seed = g->seed};
    return PERI_OK;
}

static int64_t blocks_per_grain(const peri_codec_context *c)
{
    return peri__max(1, GRAIN / numbers_per_block(c->codec));
}

/** Between @x (f32) and @wire, one way or the other. */
static peri_status code_message(peri_codec_context *c, const char *f, peri_tensor *x, peri_tensor *wire, bool encode)
{
    peri_k_codec_args args;
    peri_device *device = peri__device(x);
    PERI_TRY(check_message(f, x, PERI_F32, c->numbers));
    PERI_TRY(check_message(f, wire, peri_codec_wire_dtype(c->codec), c->wire));
    if (c->codec->config.format == PERI_CODEC_NONE)
        return peri__copy(device, peri__data(encode ? wire : x), peri__data(encode ? x : wire), 4 * c->numbers,
                          PERI_COPY_D2D);
    PERI_TRY(fill_args(c, device, &args));
    args.wire = peri__data(wire);
    args.x = peri__data(x);
    if (encode) return PERI_LAUNCH(device, codec_encode, &args, c->blocks, blocks_per_grain(c));
    return PERI_LAUNCH(device, codec_decode, &args, c->blocks, blocks_per_grain(c));
}

peri_status peri__codec_decode_to(peri_codec_context *context, peri_tensor *wire, peri_tensor *x)
{
    return code_message(context, "peri_codec_decode", x, wire, false);
}

peri_status peri_codec_encode(peri_codec_context *context, peri_tensor *x, peri_tensor **out)
{
    PERI_NEED(context, x, out);
    PERI__HELD peri_tensor *wire = NULL;
    PERI_TRY(check_message("peri_codec_encode", x, PERI_F32, context->numbers));
    PERI_TRY(peri_tensor_new(peri__device(x), peri_codec_wire_dtype(context->codec), 1, &context->wire, &wire));
    PERI_TRY(code_message(context, "peri_codec_encode", x, wire, true));
    *out = peri__hand_over(&wire);
    return PERI_OK;
}

peri_status peri_codec_decode(peri_codec_context *context, peri_tensor *wire, peri_tensor **out)
{
    PERI_NEED(context, wire, out);
    PERI__HELD peri_tensor *x = NULL;
    PERI_TRY(check_message("peri_codec_decode", wire, peri_codec_wire_dtype(context->codec), context->wire));
    PERI_TRY(peri_tensor_new(peri__device(wire), PERI_F32, 1, &context->numbers, &x));
    PERI_TRY(code_message(context, "peri_codec_decode", x, wire, false));
    *out = peri__hand_over(&x);
    return PERI_OK;
}
