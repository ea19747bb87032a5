/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.c (cpu): see kernels/codec.h. The same arithmetic as ref, without branches, in loops that the compiler
 * vectorises: equal bits. Short blocks go through ref.
 */

/* -- 16 bits ------------------------------------------------------------------------------------------------------- */

static inline float cpu_codec_clamp(float x, float max)
{
    x = x > max ? max : x;
    return x < -max ? -max : x;
}

static void cpu_codec_encode16(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    const float *restrict x = a->x;
    uint16_t *restrict y = a->wire;
    float scale = a->loss_scale;
    if (a->format == PERI_CODEC_BF16) {
        for (int64_t i = begin; i < end; i++) {
            uint32_t u = k_bits(cpu_codec_clamp(x[i] * scale, k_float(0x7f7f0000u)));
            uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u;
            y[i] = (uint16_t)(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
        }
        return;
    }
    int64_t i = begin;
    for (; i + K_LANES <= end; i += K_LANES) {
        float part[K_LANES];
        for (int k = 0; k < K_LANES; k++) part[k] = cpu_codec_clamp(x[i + k] * scale, 65504.0f);
        k_store_f16(y + i, k_load(part));
    }
    for (; i < end; i++) y[i] = ref_codec_to16(x[i] * scale, PERI_CODEC_FP16);
}

static void cpu_codec_decode16(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    float *restrict x = a->x;
    const uint16_t *restrict y = a->wire;
    k_vec scale = k_set(a->loss_scale);
    bool half = a->format == PERI_CODEC_FP16, plain = a->loss_scale == 1;
    int64_t i = begin;
    for (; i + K_LANES <= end; i += K_LANES) {
        k_vec v = half ? k_load_f16(y + i) : k_load_bf16(y + i);
        k_store(x + i, plain ? v : v / scale);
    }
    for (; i < end; i++) x[i] = ref_codec_from16(y[i], a->format) / a->loss_scale;
}

/* -- 8-bit floats -------------------------------------------------------------------------------------------------- */

/** What the conversion of one number needs. */
typedef struct cpu_fp8 {
    float max, least, magic;      /* least: the smallest normal number */
    uint32_t drop, half, rebias;
    float step;                   /* decoding: 2^(127 - bias) in two factors */
} cpu_fp8;

static cpu_fp8 cpu_fp8_of(const peri_k_codec_args *a)
{
    int32_t m = 7 - a->exponent_bits, b = a->exponent_bias;
    uint32_t drop = (uint32_t)(REF_CODEC_MANTISSA - m);
    return (cpu_fp8){.max = ref_fp8_max(a),
                     .least = k_two_to(1 - b),
                     .magic = k_two_to(REF_CODEC_MANTISSA + 1 - b - m),
                     .drop = drop,
                     .half = (1u << (drop - 1)) - 1u,
                     .rebias = (uint32_t)(127 - b) << m,
                     .step = k_two_to(1 - b - m)};
}

static inline uint8_t cpu_fp8_encode(const cpu_fp8 *f, float x)
{
    uint32_t sign = k_bits(x) >> 24 & 0x80u;
    float magnitude = k_float(k_bits(x) & 0x7fffffffu);
    magnitude = magnitude < f->max ? magnitude : f->max;
    uint32_t u = k_bits(magnitude), normal = ((u + f->half + (u >> f->drop & 1u)) >> f->drop) - f->rebias;
    uint32_t small = k_bits(magnitude + f->magic);
    return (uint8_t)(sign | ((magnitude >= f->least ? normal : small) & 0x7fu));
}

/** All values of a format by code. */
static void cpu_fp8_table(const peri_k_codec_args *a, float *table)
{
    for (int code = 0; code < 256; code++) table[code] = ref_fp8_decode(a, (uint8_t)code);
}

static void cpu_fp8_encode_all(const cpu_fp8 *f, const float *restrict x, uint8_t *restrict wire, int64_t n,
                               float scale)
{
    cpu_fp8 g = *f;
    for (int64_t i = 0; i < n; i++) wire[i] = cpu_fp8_encode(&g, x[i] * scale);
}

/** Largest magnitude of x[n]; *finite: whether all numbers are finite. */
static inline float cpu_codec_most(const float *x, int64_t n, bool *finite)
{
    uint32_t most = 0; /* magnitudes order like their bits, and those that are not finite come last */
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = k_bits(x[i]) & 0x7fffffffu;
        most = u > most ? u : most;
    }
    *finite = most < 0x7f800000u;
    return k_float(most);
}

static void cpu_fp8_row_encode(const peri_k_codec_args *a, const cpu_fp8 *f, const float *x, int64_t n, uint8_t *wire)
{
    bool finite;
    float most = cpu_codec_most(x, n, &finite);
    if (!finite || n < a->block) {
        ref_fp8_row_encode(a, x, n, wire);
        return;
    }
    float tail[2] = {f->max / (1e-20f + most), 0};
    int64_t codes = ref_codec_bytes(a) - 8;
    cpu_fp8_encode_all(f, x, wire, n, tail[0]);
    for (int64_t i = n; i < codes; i++) wire[i] = 0;
    memcpy(wire + codes, tail, 8);
}

static void cpu_fp8_decode_all(const float *restrict table, float *restrict x, const uint8_t *restrict wire, int64_t n,
                               float scale)
{
    for (int64_t i = 0; i < n; i++) x[i] = table[wire[i]] / scale;
}

static void cpu_codec_encode_fp8(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    cpu_fp8 f = cpu_fp8_of(a);
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    if (a->block == 1) {
        cpu_fp8_encode_all(&f, a->x + begin, (uint8_t *)a->wire + begin, end - begin, 1);
        return;
    }
    for (int64_t b = begin; b < end; b++) {
        const float *x = a->x + ref_codec_place(a, b, &segment, &n);
        cpu_fp8_row_encode(a, &f, x, n, (uint8_t *)a->wire + b * bytes);
    }
}

static void cpu_codec_decode_fp8(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    float table[256];
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    cpu_fp8_table(a, table);
    if (a->block == 1) {
        cpu_fp8_decode_all(table, a->x + begin, (const uint8_t *)a->wire + begin, end - begin, 1);
        return;
    }
    for (int64_t b = begin; b < end; b++) {
        float scale, *x = a->x + ref_codec_place(a, b, &segment, &n);
        const uint8_t *wire = (const uint8_t *)a->wire + b * bytes;
        memcpy(&scale, wire + bytes - 8, 4);
        cpu_fp8_decode_all(table, x, wire, n, scale);
    }
}

/* -- 8-bit integers ------------------------------------------------------------------------------------------------ */

/** A whole block of @n numbers. */
static inline void cpu_int8_encode(const float *restrict x, int64_t n, uint8_t *restrict wire)
{
    float least = x[0], most = x[0];
    for (int64_t i = 0; i < n; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    float range = most - least, factor = 255.0f / (range + 1e-8f);
    float tail[2] = {range / 255.0f, least};
    for (int64_t i = 0; i < n; i++) wire[i] = (uint8_t)(int32_t)__builtin_rintf((x[i] - least) * factor);
    memcpy(wire + n, tail, 8);
}

static void cpu_codec_encode_int8(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    for (int64_t b = begin; b < end; b++) {
        const float *x = a->x + ref_codec_place(a, b, &segment, &n);
        uint8_t *wire = (uint8_t *)a->wire + b * bytes;
        bool finite;
        float most = cpu_codec_most(x, n, &finite);
        if (n < a->block || !(most < 0x1p126f)) ref_int8_encode(a, x, n, wire);
        else if (n == 32) cpu_int8_encode(x, 32, wire);
        else cpu_int8_encode(x, n, wire);
    }
}

static inline void cpu_int8_decode(float *restrict x, const uint8_t *restrict wire, int64_t n, float scale, float least)
{
    for (int64_t i = 0; i < n; i++) x[i] = __builtin_fmaf((float)wire[i], scale, least);
}

static void cpu_codec_decode_int8(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    for (int64_t b = begin; b < end; b++) {
        float tail[2], *x = a->x + ref_codec_place(a, b, &segment, &n);
        const uint8_t *wire = (const uint8_t *)a->wire + b * bytes;
        memcpy(tail, wire + a->block, 8);
        if (n == 32) cpu_int8_decode(x, wire, 32, tail[0], tail[1]);
        else cpu_int8_decode(x, wire, n, tail[0], tail[1]);
    }
}

/* -- 4-bit floats with a shared exponent --------------------------------------------------------------------------- */

enum { CPU_MX4_MOST = 64 }; /* blocks up to this size are coded at once */

/** Codes of @n numbers, n even. */
static inline void cpu_mx4_codes(const float *restrict x, int64_t n, float scale, uint8_t *restrict wire)
{
    uint32_t code[CPU_MX4_MOST];
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = k_bits(x[i]);
        float m = k_float(u & 0x7fffffffu) * scale;
        code[i] = (u >> 28 & 8u) + (m >= 0.25f) + (m >= 0.75f) + (m >= 1.25f) + (m >= 1.75f) + (m >= 2.5f) +
                  (m >= 3.5f) + (m >= 5.0f);
    }
    for (int64_t i = 0; i < n; i += 2) wire[i / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
}

static void cpu_codec_encode_mx4(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    for (int64_t b = begin; b < end; b++) {
        const float *x = a->x + ref_codec_place(a, b, &segment, &n);
        uint8_t *wire = (uint8_t *)a->wire + b * bytes;
        bool finite;
        float most = cpu_codec_most(x, n, &finite);
        if (n < a->block || !finite || n > CPU_MX4_MOST) {
            ref_mx4_encode(a, x, n, b, wire);
            continue;
        }
        int32_t e = ref_mx4_exponent(a, most, b);
        if (n == 32) cpu_mx4_codes(x, 32, k_two_to(-e), wire);
        else cpu_mx4_codes(x, n, k_two_to(-e), wire);
        wire[n / 2] = (uint8_t)(e + 127);
    }
}

static inline void cpu_mx4_values(float *restrict x, int64_t n, float scale, const uint8_t *restrict wire)
{
    for (int64_t i = 0; i < n; i += 2) {
        uint32_t low = wire[i / 2] & 15u, high = wire[i / 2] >> 4;
        x[i] = k_float(k_bits(ref_mx4_values[low & 7] * scale) | (low & 8u) << 28);
        x[i + 1] = k_float(k_bits(ref_mx4_values[high & 7] * scale) | (high & 8u) << 28);
    }
}

static void cpu_codec_decode_mx4(const peri_k_codec_args *a, int64_t begin, int64_t end)
{
    int64_t segment = 0, n, bytes = ref_codec_bytes(a);
    for (int64_t b = begin; b < end; b++) {
        float *x = a->x + ref_codec_place(a, b, &segment, &n);
        const uint8_t *wire = (const uint8_t *)a->wire + b * bytes;
        uint8_t shared = wire[a->block / 2];
        if (n < a->block || shared == 255) ref_mx4_decode(a, x, n, wire);
        else if (n == 32) cpu_mx4_values(x, 32, k_two_to(shared - 127), wire);
        else cpu_mx4_values(x, n, k_two_to(shared - 127), wire);
    }
}

/* -- the kernels --------------------------------------------------------------------------------------------------- */

static void cpu_codec_encode(const void *args, int64_t begin, int64_t end)
{
    const peri_k_codec_args *a = args;
    switch (a->format) {
    case PERI_CODEC_FP8: cpu_codec_encode_fp8(a, begin, end); break;
    case PERI_CODEC_INT8: cpu_codec_encode_int8(a, begin, end); break;
    case PERI_CODEC_MX4: cpu_codec_encode_mx4(a, begin, end); break;
    default: cpu_codec_encode16(a, begin, end);
    }
}

static void cpu_codec_decode(const void *args, int64_t begin, int64_t end)
{
    const peri_k_codec_args *a = args;
    switch (a->format) {
    case PERI_CODEC_FP8: cpu_codec_decode_fp8(a, begin, end); break;
    case PERI_CODEC_INT8: cpu_codec_decode_int8(a, begin, end); break;
    case PERI_CODEC_MX4: cpu_codec_decode_mx4(a, begin, end); break;
    default: cpu_codec_decode16(a, begin, end);
    }
}

#define K_CPU_CODEC [PERI_K_codec_encode] = cpu_codec_encode, [PERI_K_codec_decode] = cpu_codec_decode,
