/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_weights.h: the weights of a case (tbe_cases.h) as f32, f16 and bf16.
 */
#ifndef PERI_TESTS_TBE_WEIGHTS_H
#define PERI_TESTS_TBE_WEIGHTS_H

#include "tests/kernels/tbe_cases.h"

/** n weights of @dtype; f32 bits, or the upper half of them, which makes any bf16 and odd but valid f16. */
static inline void *weights_of(const float *x, int64_t n, int32_t dtype)
{
    uint16_t *y = tbe_room((dtype == PERI_F32 ? 4 : 2) * n);
    if (dtype == PERI_F32) return memcpy(y, x, (size_t)(4 * n));
    peri_k_convert_args args = {.dst = y,
                                .src = x,
                                .dst_dtype = dtype,
                                .src_dtype = PERI_F32,
                                .ndim = 1,
                                .shape = {n},
                                .dst_stride = {1},
                                .src_stride = {1}};
    peri_kernels_isa("ref")->fn[PERI_K_convert](&args, 0, n);
    return y;
}

/** Weights in every dtype: converted once for all variants. */
typedef struct case_weights {
    int64_t n;
    void *of[3];
} case_weights;

static inline int place_of(int32_t dtype) { return dtype == PERI_F32 ? 0 : dtype == PERI_F16 ? 1 : 2; }

static inline case_weights case_weights_new(const float *x, int64_t n)
{
    return (case_weights){n, {weights_of(x, n, PERI_F32), weights_of(x, n, PERI_F16), weights_of(x, n, PERI_BF16)}};
}

static inline void case_weights_free(case_weights *w)
{
    for (int i = 0; i < 3; i++) free(w->of[i]);
}

/** A copy of them. */
static inline void *copy_of(const case_weights *w, int32_t dtype)
{
    const size_t bytes = (dtype == PERI_F32 ? 4 : 2) * (size_t)w->n;
    return memcpy(tbe_room((int64_t)bytes), w->of[place_of(dtype)], bytes);
}

/** Weight @i, whatever the dtype. */
static inline float weight_at(const void *x, int64_t i, int32_t dtype)
{
    float y;
    peri_k_convert_args args = {.dst = &y,
                                .src = (const char *)x + i * (dtype == PERI_F32 ? 4 : 2),
                                .dst_dtype = PERI_F32,
                                .src_dtype = dtype,
                                .ndim = 1,
                                .shape = {1},
                                .dst_stride = {1},
                                .src_stride = {1}};
    peri_kernels_isa("ref")->fn[PERI_K_convert](&args, 0, 1);
    return y;
}

#endif
