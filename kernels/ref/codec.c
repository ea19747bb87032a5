/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.c (ref): see kernels/codec.h.
 */

enum { REF_CODEC_MANTISSA = 23 };

/** Bytes of one block of a byte format. */
static int64_t ref_codec_bytes(const peri_k_codec_args *a)
{
    if (a->format == PERI_CODEC_MX4) return a->block / 2 + 1;
    if (a->format == PERI_CODEC_INT8) return a->block + 8;
    return a->block == 1 ? 1 : ((a->block + 3) & ~(int64_t)3) + 8;
}

/** Where block b begins, and how many numbers it has. @s: a guess of its segment, updated. */
static int64_t ref_codec_place(const peri_k_codec_args *a, int64_t b, int64_t *s, int64_t *count)
{
    int64_t first_block = 0, first = 0, end = a->n;
    if (a->segments) {
        while (a->segments[2 * *s + 2] <= b) ++*s;
        while (a->segments[2 * *s] > b) --*s;
        first_block = a->segments[2 * *s];
        first = a->segments[2 * *s + 1];
        end = a->segments[2 * *s + 3];
    }
    first += (b - first_block) * a->block;
    *count = end - first < a->block ? end - first : a->block;
    return first;
}

/* -- 16 bits ------------------------------------------------------------------------------------------------------- */

static uint16_t ref_codec_to16(float x, int32_t format)
{
    float max = format == PERI_CODEC_FP16 ? 65504.0f : k_float(0x7f7f0000u);
    if (x > max) x = max;
    if (x < -max) x = -max;
    return format == PERI_CODEC_FP16 ? k_f32_to_f16(x) : k_f32_to_bf16(x);
}

static float ref_codec_from16(uint16_t y, int32_t format)
{
    return format == PERI_CODEC_FP16 ? k_f16_to_f32(y) : k_bf16_to_f32(y);
}

/* -- 8-bit floats -------------------------------------------------------------------------------------------------- */

static float ref_fp8_max(const peri_k_codec_args *a) { return k_fp8_largest(a->exponent_bits, a->exponent_bias); }

static uint8_t ref_fp8_encode(const peri_k_codec_args *a, float x)
{
    return k_f32_to_fp8(x, a->exponent_bits, a->exponent_bias);
}

static float ref_fp8_decode(const peri_k_codec_args *a, uint8_t code)
{
    return k_fp8_to_f32(code, a->exponent_bits, a->exponent_bias);
}

static void ref_fp8_row_encode(const peri_k_codec_args *a, const float *x, int64_t n, uint8_t *wire)
{
    float most = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        sum += x[i] - x[i]; /* NaN when a number is not finite */
    }
    float tail[2] = {ref_fp8_max(a) / (1e-20f + most) + sum, 0};
    int64_t codes = ref_codec_bytes(a) - 8;
    for (int64_t i = 0; i < codes; i++) wire[i] = i < n && sum == 0 ? ref_fp8_encode(a, x[i] * tail[0]) : 0;
    memcpy(wire + codes, tail, 8);
}

static void ref_fp8_row_decode(const peri_k_codec_args *a, float *x, int64_t n, const uint8_t *wire)
{
    float scale;
    memcpy(&scale, wire + ref_codec_bytes(a) - 8, 4);
    for (int64_t i = 0; i < n; i++) x[i] = ref_fp8_decode(a, wire[i]) / scale;
}

/* -- 8-bit integers ------------------------------------------------------------------------------------------------ */

static void ref_int8_encode(const peri_k_codec_args *a, const float *x, int64_t n, uint8_t *wire)
{
    float least = n ? x[0] : 0, most = least, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
        sum += x[i] - x[i];
    }
    float range = most - least, factor = 255.0f / (range + 1e-8f);
    sum += range - range;
    float tail[2] = {range / 255.0f + sum, least + sum};
    for (int64_t i = 0; i < a->block; i++) wire[i] = i < n && sum == 0 ? (uint8_t)rintf((x[i] - least) * factor) : 0;
    memcpy(wire + a->block, tail, 8);
}

static void ref_int8_decode(const peri_k_codec_args *a, float *x, int64_t n, const uint8_t *wire)
{
    float tail[2];
    memcpy(tail, wire + a->block, 8);
    for (int64_t i = 0; i < n; i++) x[i] = fmaf((float)wire[i], tail[0], tail[1]);
}

/* -- 4-bit floats with a shared exponent --------------------------------------------------------------------------- */

static const float ref_mx4_values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
/* from here on the next value is nearer */
static const float ref_mx4_limits[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};

/** Shared exponent of a block whose largest magnitude is @most (finite). */
static int32_t ref_mx4_exponent(const peri_k_codec_args *a, float most, int64_t block)
{
    uint32_t u = k_bits(most > 0 ? most : 0x1p-126f);
    switch (a->rounding) {
    /* mantissa beyond the square root of 2 */
    case PERI_ROUND_NEAREST: u += (u & 0x7fffffu) > 0x3504f3u ? 0x800000u : 0; break;
    case PERI_ROUND_EVEN: u += 0x200000u; break; /* from 1.75 on */
    case PERI_ROUND_CEIL: u += (u & 0x7fffffu) ? 0x800000u : 0; break;
    case PERI_ROUND_STOCHASTIC: u += ref_random_word(a->seed, 0, (uint64_t)block) & 0x3fffffu; break;
    default: break;
    }
    int32_t e = (int32_t)(u >> 23) - 127 - 2;
    return e < -127 ? -127 : e > 125 ? 125 : e;
}

static void ref_mx4_encode(const peri_k_codec_args *a, const float *x, int64_t n, int64_t block, uint8_t *wire)
{
    float most = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        sum += x[i] - x[i];
    }
    memset(wire, 0, (size_t)(a->block / 2));
    wire[a->block / 2] = 255;
    if (sum != 0) return;
    int32_t e = ref_mx4_exponent(a, most, block);
    float scale = k_two_to(-e);
    for (int64_t i = 0; i < n; i++) {
        float magnitude = fabsf(x[i]) * scale;
        uint32_t code = k_bits(x[i]) >> 28 & 8u;
        for (int k = 0; k < 7; k++) code += magnitude >= ref_mx4_limits[k];
        wire[i / 2] |= (uint8_t)(code << (i & 1 ? 4 : 0));
    }
    wire[a->block / 2] = (uint8_t)(e + 127);
}

static void ref_mx4_decode(const peri_k_codec_args *a, float *x, int64_t n, const uint8_t *wire)
{
    uint8_t shared = wire[a->block / 2];
    float scale = shared == 255 ? NAN : k_two_to(shared - 127);
    for (int64_t i = 0; i < n; i++) {
        uint8_t code = wire[i / 2] >> (i & 1 ? 4 : 0) & 15;
        float magnitude = ref_mx4_values[code & 7] * scale;
        x[i] = code & 8 ? -magnitude : magnitude;
    }
}

/* -- the kernels --------------------------------------------------------------------------------------------------- */

static void ref_codec_encode(const void *args, int64_t begin, int64_t end)
{
    const peri_k_codec_args *a = args;
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    for (int64_t b = begin; b < end; b++) {
        if (a->format == PERI_CODEC_FP16 || a->format == PERI_CODEC_BF16) {
            ((uint16_t *)a->wire)[b] = ref_codec_to16(a->x[b] * a->loss_scale, a->format);
            continue;
        }
        uint8_t *wire = (uint8_t *)a->wire + b * bytes;
        const float *x = a->x + ref_codec_place(a, b, &segment, &n);
        if (a->format == PERI_CODEC_INT8) ref_int8_encode(a, x, n, wire);
        else if (a->format == PERI_CODEC_MX4) ref_mx4_encode(a, x, n, b, wire);
        else if (a->block == 1) *wire = ref_fp8_encode(a, *x);
        else ref_fp8_row_encode(a, x, n, wire);
    }
}

static void ref_codec_decode(const void *args, int64_t begin, int64_t end)
{
    const peri_k_codec_args *a = args;
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    for (int64_t b = begin; b < end; b++) {
        if (a->format == PERI_CODEC_FP16 || a->format == PERI_CODEC_BF16) {
            a->x[b] = ref_codec_from16(((const uint16_t *)a->wire)[b], a->format) / a->loss_scale;
            continue;
        }
        const uint8_t *wire = (const uint8_t *)a->wire + b * bytes;
        float *x = a->x + ref_codec_place(a, b, &segment, &n);
        if (a->format == PERI_CODEC_INT8) ref_int8_decode(a, x, n, wire);
        else if (a->format == PERI_CODEC_MX4) ref_mx4_decode(a, x, n, wire);
        else if (a->block == 1) *x = ref_fp8_decode(a, *wire);
        else ref_fp8_row_decode(a, x, n, wire);
    }
}
