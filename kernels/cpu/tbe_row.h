/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_row.h: what everything that updates rows does with the numbers of one.
 */
#ifndef PERI_KERNELS_TBE_ROW_H
#define PERI_KERNELS_TBE_ROW_H

#include "tbe_round.h"
#include "tbe_simd.h"

/** Up to sixteen elements. */
TBE_INLINE v16 tbe_get(const float *p, int64_t n) { return n >= 16 ? v16_load(p) : v16_load_part(p, n); }
TBE_INLINE void tbe_put(float *p, v16 x, int64_t n)
{
    if (n >= 16) v16_store(p, x);
    else v16_store_part(p, x, n);
}

/** sum16 of x[d] * y[d]. */
TBE_INLINE float tbe_dot(const float *x, const float *y, int64_t n)
{
    v16 sum = v16_zero();
    for (int64_t d = 0; d < n; d += 16) sum = v16_fma(tbe_get(x + d, n - d), tbe_get(y + d, n - d), sum);
    return v16_sum(sum);
}

TBE_INLINE float tbe_norm(const float *x, int64_t n) { return sqrtf(tbe_dot(x, x, n)); }

TBE_INLINE float tbe_keep(const peri_k_tbe_optimizer *o)
{
    return o->decay == PERI_DECAY_DECOUPLE ? 1 - o->lr * o->weight_decay : 1;
}

/** f16 or bf16 weights as f32. */
TBE_INLINE void tbe_row_widen(float *w, const uint16_t *narrow, int64_t n, const int32_t dtype)
{
    for (int64_t d = 0; d < n; d += 16) tbe_put(w + d, tbe_get_weights(narrow, d, n - d, dtype), n - d);
}

/** Shorten a row of @n weights whose norm is more than @most. */
#define tbe_row_limit K_SHARED(tbe_row_limit)
K_HIDDEN void tbe_row_limit(float *w, int64_t n, float most);

/** Store n f32 as f16 or bf16 weights. @room: random bits of the row's columns, whole groups of 32. */
#define tbe_row_round K_SHARED(tbe_row_round)
K_HIDDEN void tbe_row_round(const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t, int64_t row, uint16_t *narrow,
                            const float *w, uint16_t *room, int32_t dtype);

#endif
