/* SPDX-License-Identifier: Apache-2.0
 *
 * product_amx.h: part of product.c: rows as codes times panels, by the processor's tiles. Sums of codes are exact, so
 * the bits are those of every other way.
 */
#ifndef PERI_KERNELS_CPU_PRODUCT_AMX_H
#define PERI_KERNELS_CPU_PRODUCT_AMX_H

#include "amx.h"

/** Rows and panels of what is kept in tiles: the sums in tiles 0 to 3, rows in 4 and 5, panels in 6 and 7. */
enum { K_AMX_MOST_ROWS = 2 * K_AMX_ROWS, K_AMX_PANELS = 2 };

/** Steps of 64 codes of two panels as tiles want them, the four of a column together: the first rows turn them, for all
 *  rows, and they stay in the first level of the caches meanwhile. */
typedef struct k_amx_turned {
    int8_t tiles[4][K_AMX_PANELS][K_AMX_ROWS][K_AMX_BYTES];
} k_amx_turned;
enum { K_AMX_STEPS = sizeof(k_amx_turned) / (K_AMX_PANELS * K_AMX_ROWS * K_AMX_BYTES) };

/** What is turned: codes [k, k + 64 @steps) of each column of panels that lie @bytes apart, from @w on. What is wanted
 *  after it begins at @next: it is asked for, since it comes from far away. */
typedef struct k_amx_block {
    const char *w, *next;
    int64_t bytes, k, steps;
} k_amx_block;

/** Step @i of @n panels; zeros behind the last of @inner. */
static inline __attribute__((always_inline)) void k_amx_turn(k_amx_turned *turned, const k_amx_block *b, int64_t i,
                                                             int64_t inner, const int n)
{
    const int64_t left = inner - b->k - i * K_AMX_BYTES;
    for (int v = 0; v < n; v++) {
        const int64_t at = v * b->bytes + i * sizeof turned->tiles[i][v];
        const char *w = b->w + b->k * PERI_PANEL + at;
        for (int g = 0; g < K_AMX_ROWS; g++) _mm_prefetch(b->next + at + g * K_AMX_BYTES, _MM_HINT_T1);
        if (left >= K_AMX_BYTES) {
#pragma GCC unroll 16
            for (int g = 0; g < K_AMX_ROWS; g++)
                _mm512_store_si512(turned->tiles[i][v][g], k_codes_turned(w + g * K_AMX_BYTES, 64));
        } else {
            for (int g = 0; g < K_AMX_ROWS; g++) {
                const int64_t of = left - 4 * g, bytes = of >= 4 ? 64 : of > 0 ? of * PERI_PANEL : 0;
                _mm512_store_si512(turned->tiles[i][v][g], k_codes_turned(w + (bytes ? g : 0) * K_AMX_BYTES, bytes));
            }
        }
    }
}

/** Rows [row, row + rows) times a block of @n panels; sums of what came before lie in `sums` of each row. The rows that
 *  are @first turn it. @rows (16 or 32), @first and @n are constants where this is called. */
static inline __attribute__((always_inline)) void k_amx_product(const peri_k_panel_product_args *a,
                                                                k_amx_turned *turned, const k_amx_block *b, int64_t row,
                                                                const int rows, const bool first, const int n)
{
    const int64_t stride = peri_codes_bytes(a->inner);
    peri_k_codes *x = k_codes_row(a, row);
    const int8_t *codes = x->codes + b->k, *more = codes + K_AMX_ROWS * stride;
    char *sums = (char *)x->sums, *more_sums = sums + K_AMX_ROWS * stride;
    const bool both = rows > K_AMX_ROWS;
    if (b->k == 0) {
        k_amx_zero(0);
        if (n > 1) k_amx_zero(1);
        if (both) k_amx_zero(2);
        if (both && n > 1) k_amx_zero(3);
    } else {
        k_amx_load(0, sums, stride);
        if (n > 1) k_amx_load(1, sums + K_AMX_BYTES, stride);
        if (both) k_amx_load(2, more_sums, stride);
        if (both && n > 1) k_amx_load(3, more_sums + K_AMX_BYTES, stride);
    }
    if (first) k_amx_turn(turned, b, 0, a->inner, n);
    for (int64_t i = 0; i < b->steps; i++) {
        if (first && i + 1 < b->steps) k_amx_turn(turned, b, i + 1, a->inner, n);
        k_amx_load(6, turned->tiles[i][0], K_AMX_BYTES);
        k_amx_load(4, codes + i * K_AMX_BYTES, stride);
        k_amx_codes(0, 4, 6);
        if (n > 1) {
            k_amx_load(7, turned->tiles[i][1], K_AMX_BYTES);
            k_amx_codes(1, 4, 7);
        }
        if (both) {
            k_amx_load(5, more + i * K_AMX_BYTES, stride);
            k_amx_codes(2, 5, 6);
            if (n > 1) k_amx_codes(3, 5, 7);
        }
    }
    k_amx_store(0, sums, stride);
    if (n > 1) k_amx_store(1, sums + K_AMX_BYTES, stride);
    if (both) k_amx_store(2, more_sums, stride);
    if (both && n > 1) k_amx_store(3, more_sums + K_AMX_BYTES, stride);
}

/** Rows whose sums are at their end. */
static inline __attribute__((always_inline)) void k_amx_done(const peri_k_panel_product_args *a, int64_t begin,
                                                             int64_t end, int64_t panel, const int n)
{
    enum { GROUP = 4 };
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, PERI_I8);
    const char *w = (const char *)a->panels + panel * step;
    for (int64_t row = begin; row < end; row += GROUP) {
        k_vec y[GROUP][K_AMX_PANELS];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++)
#pragma GCC unroll 2
            for (int v = 0; v < n; v++) {
                const __m512i sum = _mm512_loadu_si512(k_codes_row(a, row + i)->sums + v * PERI_PANEL);
                y[i][v] = k_codes_sum(a, row + i, 0, w + v * step, (k_vec)_mm512_cvtepi32_ps(sum));
            }
        k_panel_tile_done(a, &y[0][0], K_AMX_PANELS, row, GROUP, panel * PERI_PANEL, n);
    }
}

/** All rows, of which there are a multiple of 16, times panels [panel, panel + n). */
static inline __attribute__((always_inline)) void k_amx_rows(const peri_k_panel_product_args *a, k_amx_turned *turned,
                                                             int64_t begin, int64_t end, int64_t panel, const int n)
{
    enum { MOST = K_AMX_STEPS * K_AMX_BYTES };
    k_amx_block b = {.bytes = peri_panel_bytes(PERI_PANEL, a->inner, PERI_I8)};
    b.w = (const char *)a->panels + panel * b.bytes;
    for (; b.k < a->inner; b.k += MOST) {
        const bool last = b.k + MOST >= a->inner;
        b.steps = last ? (a->inner - b.k + K_AMX_BYTES - 1) / K_AMX_BYTES : K_AMX_STEPS;
        b.next = last ? b.w + n * b.bytes : b.w + (b.k + MOST) * PERI_PANEL;
        if (end - begin < K_AMX_MOST_ROWS) {
            k_amx_product(a, turned, &b, begin, K_AMX_ROWS, true, n);
            continue;
        }
        k_amx_product(a, turned, &b, begin, K_AMX_MOST_ROWS, true, n);
        int64_t row = begin + K_AMX_MOST_ROWS;
        for (; row + K_AMX_MOST_ROWS <= end; row += K_AMX_MOST_ROWS)
            k_amx_product(a, turned, &b, row, K_AMX_MOST_ROWS, false, n);
        if (row < end) k_amx_product(a, turned, &b, row, K_AMX_ROWS, false, n);
    }
    k_amx_done(a, begin, end, panel, n);
}

/** Whole tiles of rows [begin, end), which are codes already; returns where they end. */
static int64_t k_codes_amx(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    static const k_amx_shapes shapes = K_AMX_SHAPES;
    const int64_t panels = (a->cols + PERI_PANEL - 1) / PERI_PANEL, past = end - (end - begin) % K_AMX_ROWS;
    k_amx_turned turned __attribute__((aligned(64)));
    if (past == begin) return begin;
    k_amx_begin(&shapes);
    int64_t panel = 0;
    for (; panel + K_AMX_PANELS <= panels; panel += K_AMX_PANELS)
        k_amx_rows(a, &turned, begin, past, panel, K_AMX_PANELS);
    for (; panel < panels; panel++) k_amx_rows(a, &turned, begin, past, panel, 1);
    k_amx_end();
    return past;
}

#endif
