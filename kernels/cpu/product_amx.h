/* SPDX-License-Identifier: Apache-2.0
 *
 * product_amx.h: part of product.c: rows as codes or as bf16 times panels of the same dtype, by the processor's tiles.
 * All lengths here are bytes of a row: a step of tiles takes 64 of them, which are 64 codes or 32 bf16, and as many
 * rows of a panel, which are 16 times as many bytes. Sums of codes are exact, and those of bf16 are defined as the
 * tiles compute them, so the bits are those of every other way.
 */
#ifndef PERI_KERNELS_CPU_PRODUCT_AMX_H
#define PERI_KERNELS_CPU_PRODUCT_AMX_H

#include "amx.h"

/** Rows and panels of what is kept in tiles: the sums in tiles 0 to 3, rows in 4 and 5, panels in 6 and 7; and the
 *  fewest rows that tiles are used for. */
enum { K_AMX_MOST_ROWS = 2 * K_AMX_ROWS, K_AMX_PANELS = 2, K_AMX_LEAST = 2 };
/** Rows whose results are computed at a time. */
enum { K_AMX_GROUP = 4 };

/** Steps of two panels as tiles want them, four codes or two bf16 of a column together: the first rows turn them, for
 *  all rows, and they stay in the first level of the caches meanwhile. */
typedef struct k_amx_turned {
    int8_t tiles[4][K_AMX_PANELS][K_AMX_ROWS][K_AMX_BYTES];
} k_amx_turned;
enum { K_AMX_STEPS = sizeof(k_amx_turned) / (K_AMX_PANELS * K_AMX_ROWS * K_AMX_BYTES) };

/** What is turned: bytes [k, k + 64 @steps) of the @length of each column of panels that lie @bytes apart, from @w on.
 *  What is wanted after it begins at @next: it is asked for, since it comes from far away. */
typedef struct k_amx_block {
    const char *w, *next;
    int64_t bytes, length, k, steps;
} k_amx_block;

/** Step @i of @n panels; zeros behind the last byte of a column. */
static inline __attribute__((always_inline)) void k_amx_turn(k_amx_turned *turned, const k_amx_block *b, int64_t i,
                                                             const int n, const int32_t dtype)
{
    const int64_t left = b->length - b->k - i * K_AMX_BYTES;
    for (int v = 0; v < n; v++) {
        const int64_t at = v * b->bytes + i * sizeof turned->tiles[i][v];
        const char *w = b->w + b->k * PERI_PANEL + at;
        for (int g = 0; g < K_AMX_ROWS; g++) _mm_prefetch(b->next + at + g * K_AMX_BYTES, _MM_HINT_T1);
        if (left >= K_AMX_BYTES) {
#pragma GCC unroll 16
            for (int g = 0; g < K_AMX_ROWS; g++)
                _mm512_store_si512(turned->tiles[i][v][g], k_codes_turned(w + g * K_AMX_BYTES, 64, dtype));
        } else {
            for (int g = 0; g < K_AMX_ROWS; g++) {
                const int64_t of = left - 4 * g, bytes = of >= 4 ? 64 : of > 0 ? of * PERI_PANEL : 0;
                _mm512_store_si512(turned->tiles[i][v][g],
                                   k_codes_turned(w + (bytes ? g : 0) * K_AMX_BYTES, bytes, dtype));
            }
        }
    }
}

/** s += x * w, of tiles with these numbers. */
#define k_amx_add(dtype, s, x, w)                                                                                      \
    do {                                                                                                               \
        if (dtype == PERI_BF16) k_amx_halves(s, x, w);                                                                 \
        else k_amx_codes(s, x, w);                                                                                     \
    } while (0)

/** A tile of rows from @row on, and with @both one from @other on, times a block of @n panels; sums of what came
 *  before lie in `sums` of each row. The rows that are @first turn it. @both, @first, @n and @dtype are constants where
 *  this is called. */
static inline __attribute__((always_inline)) void k_amx_product(const peri_k_panel_product_args *a,
                                                                k_amx_turned *turned, const k_amx_block *b, int64_t row,
                                                                int64_t other, const bool both, const bool first,
                                                                const int n, const int32_t dtype)
{
    const int64_t stride = peri_codes_bytes(a->inner, dtype);
    peri_k_codes *x = k_codes_row(a, row), *y = k_codes_row(a, other);
    const int8_t *codes = x->codes + b->k, *more = y->codes + b->k;
    if (b->k == 0) {
        k_amx_zero(0);
        if (n > 1) k_amx_zero(1);
        if (both) k_amx_zero(2);
        if (both && n > 1) k_amx_zero(3);
    } else {
        k_amx_load(0, x->sums, stride);
        if (n > 1) k_amx_load(1, x->sums + PERI_PANEL, stride);
        if (both) k_amx_load(2, y->sums, stride);
        if (both && n > 1) k_amx_load(3, y->sums + PERI_PANEL, stride);
    }
    if (first) k_amx_turn(turned, b, 0, n, dtype);
    for (int64_t i = 0; i < b->steps; i++) {
        if (first && i + 1 < b->steps) k_amx_turn(turned, b, i + 1, n, dtype);
        k_amx_load(6, turned->tiles[i][0], K_AMX_BYTES);
        k_amx_load(4, codes + i * K_AMX_BYTES, stride);
        k_amx_add(dtype, 0, 4, 6);
        if (n > 1) {
            k_amx_load(7, turned->tiles[i][1], K_AMX_BYTES);
            k_amx_add(dtype, 1, 4, 7);
        }
        if (both) {
            k_amx_load(5, more + i * K_AMX_BYTES, stride);
            k_amx_add(dtype, 2, 5, 6);
            if (n > 1) k_amx_add(dtype, 3, 5, 7);
        }
    }
    k_amx_store(0, x->sums, stride);
    if (n > 1) k_amx_store(1, x->sums + PERI_PANEL, stride);
    if (both) k_amx_store(2, y->sums, stride);
    if (both && n > 1) k_amx_store(3, y->sums + PERI_PANEL, stride);
}

/** Rows [row, row + rows), whose sums are at their end. @rows, @n and @dtype are constants where this is called. */
static inline __attribute__((always_inline)) void k_amx_done(const peri_k_panel_product_args *a, int64_t row,
                                                             const int rows, int64_t panel, const int n,
                                                             const int32_t dtype)
{
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, dtype);
    const char *w = (const char *)a->panels + panel * step;
    k_vec y[K_AMX_GROUP][K_AMX_PANELS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < n; v++) {
            const __m512i sum = _mm512_loadu_si512(k_codes_row(a, row + i)->sums + v * PERI_PANEL);
            y[i][v] = dtype == PERI_BF16 ? (k_vec)sum + k_set(0) /* -0 becomes +0 */
                                         : k_codes_sum(a, row + i, 0, w + v * step, (k_vec)_mm512_cvtepi32_ps(sum));
        }
    k_panel_tile_done(a, &y[0][0], K_AMX_PANELS, row, rows, panel * PERI_PANEL, n);
}

/** Rows [begin, end) times a block of @n panels, two tiles of rows at a time. Where the last rows are no whole tile, it
 *  begins earlier: both of the last two tiles then compute what they share, from the same sums. They are multiplied
 *  together, so what one of them stores is not read by the other. */
static inline __attribute__((always_inline)) void k_amx_block_rows(const peri_k_panel_product_args *a,
                                                                   k_amx_turned *turned, const k_amx_block *b,
                                                                   int64_t begin, int64_t end, const int n,
                                                                   const int32_t dtype)
{
    for (int64_t row = begin; row < end;) {
        const int64_t left = end - row;
        const bool both = left > K_AMX_ROWS && (left <= K_AMX_MOST_ROWS || left >= K_AMX_MOST_ROWS + K_AMX_ROWS);
        const int64_t other = left < K_AMX_MOST_ROWS ? end - K_AMX_ROWS : row + K_AMX_ROWS;
        if (both && row == begin) k_amx_product(a, turned, b, row, other, true, true, n, dtype);
        else if (both) k_amx_product(a, turned, b, row, other, true, false, n, dtype);
        else if (row == begin) k_amx_product(a, turned, b, row, row, false, true, n, dtype);
        else k_amx_product(a, turned, b, row, row, false, false, n, dtype);
        row += both ? K_AMX_MOST_ROWS : K_AMX_ROWS;
    }
}

/** All rows times panels [panel, panel + n). */
static inline __attribute__((always_inline)) void k_amx_rows(const peri_k_panel_product_args *a, k_amx_turned *turned,
                                                             int64_t begin, int64_t end, int64_t panel, const int n,
                                                             const int32_t dtype)
{
    enum { MOST = K_AMX_STEPS * K_AMX_BYTES };
    k_amx_block b = {.bytes = peri_panel_bytes(PERI_PANEL, a->inner, dtype)};
    b.length = a->inner * (dtype == PERI_BF16 ? 2 : 1);
    b.w = (const char *)a->panels + panel * b.bytes;
    for (; b.k < b.length; b.k += MOST) {
        const bool last = b.k + MOST >= b.length;
        b.steps = last ? (b.length - b.k + K_AMX_BYTES - 1) / K_AMX_BYTES : K_AMX_STEPS;
        b.next = last ? b.w + n * b.bytes : b.w + (b.k + MOST) * PERI_PANEL;
        k_amx_block_rows(a, turned, &b, begin, end, n, dtype);
    }
    int64_t row = begin;
    for (; row + K_AMX_GROUP <= end; row += K_AMX_GROUP) k_amx_done(a, row, K_AMX_GROUP, panel, n, dtype);
    for (; row < end; row++) k_amx_done(a, row, 1, panel, n, dtype);
}

/** Rows [begin, end), which lie in `codes` already. Fewer than 16 are tiles of fewer rows. */
static inline __attribute__((always_inline)) void k_amx_all(const peri_k_panel_product_args *a, int64_t begin,
                                                            int64_t end, const int32_t dtype)
{
    const int64_t panels = (a->cols + PERI_PANEL - 1) / PERI_PANEL;
    const uint8_t rows = end - begin < K_AMX_ROWS ? (uint8_t)(end - begin) : K_AMX_ROWS;
    const k_amx_shapes shapes = {.palette = 1,
                                 .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                 .rows = {rows, rows, rows, rows, rows, rows, K_AMX_ROWS, K_AMX_ROWS}};
    k_amx_turned turned __attribute__((aligned(64)));
    k_amx_begin(&shapes);
    int64_t panel = 0;
    for (; panel + K_AMX_PANELS <= panels; panel += K_AMX_PANELS)
        k_amx_rows(a, &turned, begin, end, panel, K_AMX_PANELS, dtype);
    for (; panel < panels; panel++) k_amx_rows(a, &turned, begin, end, panel, 1, dtype);
    k_amx_end();
}

#endif
