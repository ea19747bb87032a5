/* SPDX-License-Identifier: Apache-2.0
 *
 * scale.h: scale and bias of a row of codes, from its least and largest number: kernels/quantize.h.
 */
#ifndef PERI_KERNELS_SCALE_H
#define PERI_KERNELS_SCALE_H

#include "../quantize.h"
#include "number.h"

/** What the codes of a row mean. inverse: what numbers are multiplied by before they are rounded. */
typedef struct k_scale {
    float scale, bias, inverse;
} k_scale;

K_INLINE k_scale k_scale_make(float scale, float bias, float inverse)
{
    k_scale s = {scale, bias, inverse};
    return s;
}

/** Scale and bias as they lie in a row; 1 and 0 where it has none. */
K_INLINE k_scale k_scale_load(const peri_k_rows_args *a, const uint8_t *row)
{
    k_scale s = {1, 0, 1};
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

/** Number @c of a row of codes. */
K_INLINE float k_row_number(const peri_k_rows_args *a, const uint8_t *row, const k_scale *s, int64_t c)
{
    const int64_t bit = c * a->bits;
    const uint8_t code = row[a->codes_at + bit / 8];
    if (a->exponent_bits) return k_fp8_to_f32(code, a->exponent_bits, a->exponent_bias) / s->scale;
    return fmaf((float)(code >> bit % 8 & ((1 << a->bits) - 1)), s->scale, s->bias);
}

/** That of a row with a number that is not finite. */
K_INLINE k_scale k_no_scale(void) { return k_scale_make(k_float(0x7fc00000u), k_float(0x7fc00000u), 0); }

K_INLINE int k_finite(float x) { return x - x == 0; }

/** From the least and the largest number of a row that has some, all finite; for fp8 @largest is the largest
 *  magnitude. */
K_INLINE k_scale k_scale_of(const peri_k_rows_args *a, float least, float largest)
{
    k_scale s = {0, 0, 0};
    least += 0.0f; /* -0 becomes 0 */
    largest += 0.0f;
    if (a->exponent_bits) {
        s.scale = s.inverse = k_fp8_largest(a->exponent_bits, a->exponent_bias) / (1e-20f + largest);
    } else if (!a->half) {
        float range = largest - least;
        s = k_scale_make(range / 255.0f, least, 255.0f / (range + 1e-8f));
        if (!k_finite(range)) return k_no_scale();
    } else {
        s.bias = k_f16_to_f32(k_f32_to_f16(least));
        s.scale = k_f16_to_f32(k_f32_to_f16((largest - s.bias) / (float)((1 << a->bits) - 1)));
        if (s.scale == 0 || !k_finite(1.0f / s.scale)) s.scale = 1;
        s.inverse = 1.0f / s.scale;
    }
    return k_finite(s.scale) && k_finite(s.bias) ? s : k_no_scale();
}

/** The same for any row; scale is NaN where a row is not quantized. @finite: all its numbers are. */
K_INLINE k_scale k_row_scale(const peri_k_rows_args *a, float least, float largest, int finite)
{
    if (a->scale_at < 0) return k_scale_make(1, 0, 1);
    if (!finite) return k_no_scale();
    return a->cols ? k_scale_of(a, least, largest) : k_scale_make(0, 0, 0);
}

#endif
