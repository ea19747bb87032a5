/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c (ref): see kernels/quantize.h.
 */
#include "scale.h"

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

static inline void ref_scale_store(const peri_k_rows_args *a, uint8_t *row, k_scale s)
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
        k_scale s = k_row_scale(a, least, largest, rest == 0);
        bool scaled = a->scale_at >= 0, good = s.scale == s.scale;
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
        k_scale s = k_scale_load(a, row);
        for (int64_t c = 0; c < a->cols; c++)
            ref_number_set(a->x, r * a->cols + c, a->dtype, k_row_number(a, row, &s, c));
    }
}
