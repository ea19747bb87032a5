/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_store.c: the end of a row's update, which all optimizers share, and the moving average of rows.
 */
#include "tbe_row.h"

void tbe_row_limit(float *w, int64_t n, float most)
{
    float norm = tbe_norm(w, n);
    if (!(norm > most)) return;
    v16 factor = v16_set(most / norm);
    for (int64_t d = 0; d < n; d += 16) tbe_put(w + d, v16_mul(tbe_get(w + d, n - d), factor), n - d);
}

void tbe_row_round(const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t, int64_t row, uint16_t *narrow,
                   const float *w, uint16_t *room, int32_t dtype)
{
    int64_t n = t->cols, first = t->col_offset % 32, d = 0;
    if (!o->stochastic) {
        for (; d < n; d += 16) {
            v16 x = tbe_get(w + d, n - d);
            h16_store(narrow + d, dtype == PERI_F16 ? v16_to_f16(x) : v16_to_bf16(x), n - d);
        }
        return;
    }
    uint64_t key = tbe_row_key(o, t, row);
    uint32_t lane = (uint32_t)(t->col_offset / 32 * 16);
    for (int64_t c = 0; c < first + n; c += 32, lane += 16) {
        if (dtype == PERI_F16) tbe_random_group(key, lane, room + c, PERI_F16);
        else tbe_random_group(key, lane, room + c, PERI_BF16);
    }
    for (; d < n; d += 16) {
        v16 x = tbe_get(w + d, n - d);
        u16x bits = u16x_widen(room + first + d);
        h16_store(narrow + d, dtype == PERI_F16 ? v16_round(x, bits, PERI_F16) : v16_round(x, bits, PERI_BF16), n - d);
    }
}

/** Row @row of table @t: its right half follows the left. */
static void tbe_row_ema(const peri_k_tbe_ema_args *a, const peri_k_tbe_table *t, int64_t row, float *room)
{
    int64_t at = t->offset + row * t->stride, half = t->cols / 2;
    const int32_t dtype = a->rows.weight_dtype;
    uint16_t *narrow = (uint16_t *)a->rows.weight + at;
    float *w = dtype == PERI_F32 ? (float *)a->rows.weight + at : room;
    if (dtype == PERI_F16) tbe_row_widen(room, narrow, t->cols, PERI_F16);
    if (dtype == PERI_BF16) tbe_row_widen(room, narrow, t->cols, PERI_BF16);
    v16 coef = v16_set(a->coef);
    for (int64_t d = 0; d < half; d += 16) {
        v16 slow = tbe_get(w + half + d, half - d);
        tbe_put(w + half + d, v16_fma(coef, v16_sub(tbe_get(w + d, half - d), slow), slow), half - d);
    }
    if (dtype == PERI_F32) return;
    int64_t wide = (t->cols + 15) / 16 * 16;
    tbe_row_round(&a->optimizer, t, tbe_row_of_slot(&a->rows, t, row), narrow, w, (uint16_t *)(room + 2 * wide), dtype);
}

static void cpu_tbe_ema(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_ema_args *a = args;
    const peri_k_tbe_table *t = a->rows.tables;
    int64_t last = tbe_part(a->rows.total_rows, end, a->chunks);
    for (int64_t linear = tbe_part(a->rows.total_rows, begin, a->chunks); linear < last; linear++) {
        t = tbe_table_of(t, (uint64_t)linear);
        tbe_row_ema(a, t, linear - t->first_row, a->scratch + begin * a->scratch_stride);
    }
}
