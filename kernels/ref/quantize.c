/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c (ref): see kernels/quantize.h.
 */

static inline float ref_number(const void *x, int64_t i, int32_t dtype)
{
    if (dtype == PERI_F32) return ((const float *)x)[i];
    uint16_t h = ((const uint16_t *)x)[i];
    return dtype == PERI_F16 ? k_f16_to_f32(h) : k_bf16_to_f32(h);
}

static inline void ref_number_set(void *x, int64_t i, int32_t dtype, float value)
{
    if (dtype == PERI_F32) ((float *)x)[i] = value;
    else ((uint16_t *)x)[i] = dtype == PERI_F16 ? k_f32_to_f16(value) : k_f32_to_bf16(value);
}

/** What the codes of a row mean. inverse: what numbers are multiplied by before they are rounded. */
typedef struct ref_scale {
    float scale, bias, inverse;
} ref_scale;

static const ref_scale ref_no_scale = {__builtin_nanf(""), __builtin_nanf(""), 0};

/** From the least and the largest number of a row; for fp8 @largest is the largest magnitude. */
static inline ref_scale ref_scale_of(const peri_k_rows_args *a, float least, float largest)
{
    ref_scale s = {0};
    least += 0.0f; /* -0 becomes 0 */
    largest += 0.0f;
    if (a->exponent_bits) {
        s.scale = s.inverse = k_fp8_largest(a->exponent_bits, a->exponent_bias) / (1e-20f + largest);
    } else if (!a->half) {
        float range = largest - least;
        s = (ref_scale){range / 255.0f, least, 255.0f / (range + 1e-8f)};
        if (!isfinite(range)) return ref_no_scale;
    } else {
        s.bias = k_f16_to_f32(k_f32_to_f16(least));
        s.scale = k_f16_to_f32(k_f32_to_f16((largest - s.bias) / (float)((1 << a->bits) - 1)));
        if (s.scale == 0 || !isfinite(1.0f / s.scale)) s.scale = 1;
        s.inverse = 1.0f / s.scale;
    }
    return isfinite(s.scale) && isfinite(s.bias) ? s : ref_no_scale;
}

static inline void ref_scale_store(const peri_k_rows_args *a, uint8_t *row, ref_scale s)
{
    if (a->scale_at < 0) return;
    if (a->half) {
        uint16_t pair[2] = {k_f32_to_f16(s.scale), k_f32_to_f16(s.bias)};
        memcpy(row + a->scale_at, pair, 4);
    } else {
        float pair[2] = {s.scale, s.bias};
        memcpy(row + a->scale_at, pair, 8);
    }
}

static inline ref_scale ref_scale_load(const peri_k_rows_args *a, const uint8_t *row)
{
    ref_scale s = {1, 0, 1};
    if (a->scale_at < 0) return s;
    if (a->half) {
        uint16_t pair[2];
        memcpy(pair, row + a->scale_at, 4);
        s.scale = k_f16_to_f32(pair[0]);
        s.bias = k_f16_to_f32(pair[1]);
    } else {
        memcpy(&s, row + a->scale_at, 8);
    }
    return s;
}

static void ref_rows_quantize(const void *args, int64_t begin, int64_t end)
{
    const peri_k_rows_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        uint8_t *row = (uint8_t *)a->bytes + r * a->stride;
        float least = INFINITY, largest = a->exponent_bits ? 0 : -INFINITY, rest = 0;
        for (int64_t c = 0; c < a->cols; c++) {
            float x = ref_number(a->x, r * a->cols + c, a->dtype), y = a->exponent_bits ? fabsf(x) : x;
            least = fminf(least, y);
            largest = fmaxf(largest, y);
            rest += x - x; /* 0, or NaN if x is not finite */
        }
        if (a->min_max) {
            least = a->min_max[2 * r];
            largest = a->min_max[2 * r + 1];
            rest += (least - least) + (largest - largest);
        }
        bool scaled = a->scale_at >= 0, good = !scaled || rest == 0;
        ref_scale s = !scaled ? (ref_scale){1, 0, 1} : !good ? ref_no_scale : a->cols ? ref_scale_of(a, least, largest) : (ref_scale){0};
        good = good && s.scale == s.scale;
        memset(row, 0, (size_t)a->stride);
        ref_scale_store(a, row, s);
        for (int64_t c = 0; c < a->cols && good; c++) {
            float x = ref_number(a->x, r * a->cols + c, a->dtype);
            int64_t bit = c * a->bits;
            uint8_t *code = row + a->codes_at + bit / 8;
            if (a->exponent_bits) *code = k_f32_to_fp8(scaled ? x * s.scale : x, a->exponent_bits, a->exponent_bias);
            else if (a->half) *code |= (uint8_t)((uint32_t)fminf(fmaxf(rintf((x - s.bias) * s.inverse), 0),
                                                                 (float)((1 << a->bits) - 1)) << bit % 8);
            else *code = (uint8_t)rintf((x - s.bias) * s.inverse);
        }
    }
}

static void ref_rows_restore(const void *args, int64_t begin, int64_t end)
{
    const peri_k_rows_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        const uint8_t *row = (const uint8_t *)a->bytes + r * a->stride;
        ref_scale s = ref_scale_load(a, row);
        for (int64_t c = 0; c < a->cols; c++) {
            int64_t bit = c * a->bits;
            uint8_t code = row[a->codes_at + bit / 8];
            float x;
            if (a->exponent_bits) x = k_fp8_to_f32(code, a->exponent_bits, a->exponent_bias) / s.scale; /* 1 if there is none */
            else x = fmaf((float)(code >> bit % 8 & ((1 << a->bits) - 1)), s.scale, s.bias);
            ref_number_set(a->x, r * a->cols + c, a->dtype, x);
        }
    }
}
