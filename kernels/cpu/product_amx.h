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

typedef struct k_amx_room {
    int8_t panels[K_AMX_PANELS][K_AMX_ROWS][K_AMX_BYTES] __attribute__((aligned(64)));
    int8_t rows[K_AMX_MOST_ROWS][K_AMX_BYTES] __attribute__((aligned(64)));
    int32_t sums[K_AMX_MOST_ROWS][K_AMX_PANELS][PERI_PANEL] __attribute__((aligned(64)));
} k_amx_room;

/** Codes [k, k + 64) of each column of @n panels, from @w on, as tiles want them: the four of a column together. Zeros
 *  behind the last. */
static inline void k_amx_turn(k_amx_room *room, const char *w, int64_t step, int64_t k, int64_t inner, int n)
{
    for (int v = 0; v < n; v++)
        for (int i = 0; i < K_AMX_ROWS; i++) {
            const int64_t left = inner - k - 4 * i, bytes = left >= 4 ? 64 : left > 0 ? left * PERI_PANEL : 0;
            _mm512_store_si512(room->panels[v][i], k_codes_turned(w + v * step + (k + 4 * i) * PERI_PANEL, bytes));
        }
}

/** Rows [row, row + rows) times panels [panel, panel + n). @rows (16 or 32) and @n are constants where this is
 *  called. */
static inline __attribute__((always_inline)) void k_amx_product(const peri_k_panel_product_args *a, k_amx_room *room,
                                                                int64_t row, const int rows, int64_t panel, const int n)
{
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, PERI_I8), stride = peri_codes_bytes(a->inner);
    const char *w = (const char *)a->panels + panel * step;
    const int8_t *codes = k_codes_row(a, row)->codes;
    const bool both = rows > K_AMX_ROWS;
    k_amx_zero(0);
    if (n > 1) k_amx_zero(1);
    if (both) k_amx_zero(2);
    if (both && n > 1) k_amx_zero(3);
    for (int64_t k = 0; k < a->inner; k += K_AMX_BYTES) {
        const int8_t *x = codes + k;
        int64_t x_stride = stride;
        if (k + K_AMX_BYTES > a->inner) { /* what lies behind a row is not read */
            memset(room->rows, 0, sizeof room->rows);
            for (int r = 0; r < rows; r++) memcpy(room->rows[r], x + r * stride, (size_t)(a->inner - k));
            x = room->rows[0];
            x_stride = K_AMX_BYTES;
        }
        k_amx_turn(room, w, step, k, a->inner, n);
        k_amx_load(6, room->panels[0], K_AMX_BYTES);
        k_amx_load(4, x, x_stride);
        k_amx_codes(0, 4, 6);
        if (n > 1) {
            k_amx_load(7, room->panels[1], K_AMX_BYTES);
            k_amx_codes(1, 4, 7);
        }
        if (both) {
            k_amx_load(5, x + K_AMX_ROWS * x_stride, x_stride);
            k_amx_codes(2, 5, 6);
            if (n > 1) k_amx_codes(3, 5, 7);
        }
    }
    k_amx_store(0, room->sums[0][0], sizeof room->sums[0]);
    if (n > 1) k_amx_store(1, room->sums[0][1], sizeof room->sums[0]);
    if (both) k_amx_store(2, room->sums[K_AMX_ROWS][0], sizeof room->sums[0]);
    if (both && n > 1) k_amx_store(3, room->sums[K_AMX_ROWS][1], sizeof room->sums[0]);
    enum { GROUP = 4 };
    for (int r = 0; r < rows; r += GROUP) {
        k_vec y[GROUP][K_AMX_PANELS];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++)
#pragma GCC unroll 2
            for (int v = 0; v < n; v++) {
                const __m512i sum = _mm512_load_si512(room->sums[r + i][v]);
                y[i][v] = k_codes_sum(a, row + r + i, 0, w + v * step, (k_vec)_mm512_cvtepi32_ps(sum));
            }
        k_panel_tile_done(a, &y[0][0], K_AMX_PANELS, row + r, GROUP, panel * PERI_PANEL, n);
    }
}

/** All rows, of which there are a multiple of 16, times panels [panel, panel + n). */
static inline __attribute__((always_inline)) void k_amx_rows(const peri_k_panel_product_args *a, k_amx_room *room,
                                                             int64_t begin, int64_t end, int64_t panel, const int n)
{
    int64_t row = begin;
    for (; row + K_AMX_MOST_ROWS <= end; row += K_AMX_MOST_ROWS) k_amx_product(a, room, row, K_AMX_MOST_ROWS, panel, n);
    if (row < end) k_amx_product(a, room, row, K_AMX_ROWS, panel, n);
}

/** Whole tiles of rows [begin, end), which are codes already; returns where they end. */
static int64_t k_codes_amx(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    static const k_amx_shapes shapes = K_AMX_SHAPES;
    const int64_t panels = (a->cols + PERI_PANEL - 1) / PERI_PANEL, past = end - (end - begin) % K_AMX_ROWS;
    k_amx_room room;
    if (past == begin) return begin;
    k_amx_begin(&shapes);
    int64_t panel = 0;
    for (; panel + K_AMX_PANELS <= panels; panel += K_AMX_PANELS)
        k_amx_rows(a, &room, begin, past, panel, K_AMX_PANELS);
    for (; panel < panels; panel++) k_amx_rows(a, &room, begin, past, panel, 1);
    k_amx_end();
    return past;
}

#endif
