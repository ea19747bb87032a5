/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_value.h: the row formats of kernels/tbe.h: their sizes, and one number of a row.
 */
#ifndef PERI_KERNELS_TBE_VALUE_H
#define PERI_KERNELS_TBE_VALUE_H

#include "../tbe.h"
#include "number.h"

#include <math.h>

/** Bits of a column. */
K_INLINE int tbe_bits(int32_t format)
{
    if (format == PERI_F32) return 32;
    if (format == PERI_F16 || format == PERI_BF16) return 16;
    return format == PERI_ROWS_INT4 ? 4 : format == PERI_ROWS_INT2 ? 2 : 8;
}

/** Bytes in which offsets and strides of a format count. */
K_INLINE int64_t tbe_unit(int32_t format) { return tbe_bits(format) > 8 ? tbe_bits(format) / 8 : 1; }

/** Whether rows begin with an f16 scale and an f16 bias. */
K_INLINE bool tbe_halves_first(int32_t format)
{
    return format == PERI_ROWS_INT8_HALF || format == PERI_ROWS_INT4 || format == PERI_ROWS_INT2;
}

/** Bytes of a row of @cols columns. */
K_INLINE int64_t tbe_row_bytes(int32_t format, int64_t cols)
{
    return (cols * tbe_bits(format) + 7) / 8 + (format == PERI_ROWS_INT8 ? 8 : tbe_halves_first(format) ? 4 : 0);
}

K_INLINE float tbe_fp8_to_f32(uint8_t code)
{
    float value = code & 0x78 ? k_float((uint32_t)(code & 0x7f) << 20) * 0x1p120f : (float)(code & 7) * 0x1p-9f;
    return code & 0x80 ? -value : value;
}

/** Column @d of the row at @row. */
K_INLINE float tbe_value(const void *row, int64_t cols, int64_t d, int32_t format)
{
    const uint8_t *bytes = (const uint8_t *)row;
    const uint16_t *half = (const uint16_t *)row;
    const int bits = tbe_bits(format);
    float pair[2];
    uint16_t halves[2];
    switch (format) {
    case PERI_F16: return k_f16_to_f32(half[d]);
    case PERI_BF16: return k_bf16_to_f32(half[d]);
    case PERI_ROWS_INT8: memcpy(pair, bytes + cols, 8); return fmaf((float)bytes[d], pair[0], pair[1]);
    case PERI_ROWS_INT8_HALF:
    case PERI_ROWS_INT4:
    case PERI_ROWS_INT2:
        memcpy(halves, bytes, 4);
        return fmaf((float)(bytes[4 + d * bits / 8] >> d * bits % 8 & ((1 << bits) - 1)), k_f16_to_f32(halves[0]),
                    k_f16_to_f32(halves[1]));
    case PERI_ROWS_FP8: return tbe_fp8_to_f32(bytes[d]);
    default: return ((const float *)row)[d];
    }
}

/** @x rounded to @dtype (PERI_F32, PERI_F16, PERI_BF16) as element @at of @out. */
K_INLINE void tbe_store(void *out, int64_t at, float x, int32_t dtype)
{
    if (dtype == PERI_F16) ((uint16_t *)out)[at] = k_f32_to_f16(x);
    else if (dtype == PERI_BF16) ((uint16_t *)out)[at] = k_f32_to_bf16(x);
    else ((float *)out)[at] = x;
}

#endif
