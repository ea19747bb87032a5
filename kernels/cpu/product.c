/* SPDX-License-Identifier: Apache-2.0
 *
 * product.c (cpu): products whose sums have one order. A tile of y, some rows by some panels, is kept in registers
 * while k runs: a vector of each panel is loaded once and multiplied by one number of each row. Few rows take many
 * panels at a time, since an fma has to wait for the one before it in its own sum.
 */
#include "../codes.h"

enum { K_PANEL_VECTORS = PERI_PANEL / K_LANES, K_TILE_MOST_ROWS = 6 };
/** Panels of a tile of K_TILE_MOST_ROWS rows, and of one row: as many as there are registers for. */
enum { K_PANELS = K_LANES == 16 ? 4 : 1, K_PANELS_OF_ONE = K_LANES == 16 ? 8 : 4 };
/** The same where rows are bf16, too, and have two sums for each column. */
enum { K_HALVES_ROWS = K_LANES == 16 ? 6 : 3, K_HALVES_PANELS = K_LANES == 16 ? 2 : 1 };
enum { K_HALVES_PANELS_OF_ONE = K_LANES == 16 ? 8 : 2 };
enum { K_HALVES_MOST_VECTORS = K_HALVES_PANELS_OF_ONE * K_PANEL_VECTORS };
/** Vectors of sums of a tile. */
enum { K_TILE_MOST_SUMS = K_TILE_MOST_ROWS * 8 * K_PANEL_VECTORS };

/** f(s + bias) of the columns from @c on, stored at @y. */
static inline void k_panel_end(const peri_k_panel_product_args *a, float *y, int64_t c, k_vec s)
{
    const int64_t left = a->cols - c;
    const bool part = left < K_LANES;
    if (left <= 0) return;
    if (a->bias) s += part ? k_load_part(a->bias + c, left) : k_load(a->bias + c);
    switch (a->act) {
    case PERI_UNARY_RELU: s = k_max(k_set(0), s); break;
    case PERI_UNARY_SIGMOID: s = k_sigmoid(s); break;
    case PERI_UNARY_TANH: s = k_tanh(s); break;
    default: break;
    }
    if (part) k_store_part(y + c, s, left);
    else k_store(y + c, s);
}

/** The same of a tile, whose columns begin with @c: @sums holds @vectors of each row. One function for all tiles:
 *  inlined into each of them it was more than half of the unit's code. */
static __attribute__((noinline)) void k_panel_tile_end(const peri_k_panel_product_args *a, const k_vec *sums,
                                                       int64_t row, int rows, int64_t c, int vectors)
{
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            k_panel_end(a, a->y + (row + r) * a->y_stride, c + v * K_LANES, sums[r * vectors + v]);
}

/** Ends a tile that is in registers: @vectors sums of each of @rows rows, which lie @stride vectors apart in @s. @rows,
 *  @vectors and @stride are constants where this is called. Whole columns with no activation or with ReLU end in
 *  place. */
static inline __attribute__((always_inline)) void k_panel_tile_done(const peri_k_panel_product_args *a, const k_vec *s,
                                                                    int stride, int64_t row, int rows, int64_t c,
                                                                    int vectors)
{
    if (a->cols - c >= vectors * K_LANES && a->act != PERI_UNARY_SIGMOID && a->act != PERI_UNARY_TANH) {
        const k_vec least = k_set(a->act == PERI_UNARY_RELU ? 0 : -INFINITY), nothing = k_set(-0.0f);
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            const k_vec bias = a->bias ? k_load(a->bias + c + v * K_LANES) : nothing; /* s + -0 is s */
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                k_store(a->y + (row + r) * a->y_stride + c + v * K_LANES, k_max(least, s[r * stride + v] + bias));
        }
        return;
    }
    k_vec sums[K_TILE_MOST_SUMS]; /* apart: s is never in memory */
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) sums[r * vectors + v] = s[r * stride + v];
    k_panel_tile_end(a, sums, row, rows, c, vectors);
}

/** As k_load_bf16. One permutation puts the halves above zeros, where widening and a shift are two instructions for the
 *  unit that has the most to do here: one row times panels takes three quarters of the time on Zen 4. */
static inline __attribute__((always_inline)) k_vec k_panel_load_bf16(const uint16_t *p)
{
#ifdef __AVX512BW__
    const __m512i place = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                           3, 0, 2, 0, 1, 0, 0, 0);
    const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return (k_vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, place, halves);
#else
    return k_load_bf16(p);
#endif
}

/** A vector of a panel. */
static inline __attribute__((always_inline)) k_vec k_panel_load(const char *panel, int64_t at, const int32_t dtype)
{
    if (dtype == PERI_I8) return k_load_i8((const int8_t *)panel + at);
    return dtype == PERI_F32 ? k_load((const float *)(const void *)panel + at)
                             : k_panel_load_bf16((const uint16_t *)(const void *)panel + at);
}

static inline peri_k_codes *k_codes_row(const peri_k_panel_product_args *a, int64_t row)
{
    return (peri_k_codes *)((char *)a->codes + row * peri_codes_bytes(a->inner, a->dtype));
}

/** In place of a dtype: panels of bf16, and rows of bf16, too, which lie in `codes` as f32. */
enum { K_HALVES = -1 };

/** Bits of MXCSR: numbers below 2^-126 are 0, as what is computed and as what is read. */
enum { K_FLUSH = 0x8040 };

/** k_panel_tile_end amid functions that run with K_FLUSH; itself it does not. */
static __attribute__((noinline)) void k_halves_end(const peri_k_panel_product_args *a, const k_vec *sums, int64_t row,
                                                   int rows, int64_t c, int vectors)
{
    const unsigned flush = _mm_getcsr();
    _mm_setcsr(flush & ~(unsigned)K_FLUSH);
    k_panel_tile_end(a, sums, row, rows, c, vectors);
    _mm_setcsr(flush);
}

/** k_panel_tile of K_HALVES: the order of additions is that of the tiles of AMX (dense.h). */
static inline __attribute__((always_inline)) void k_halves_tile(const peri_k_panel_product_args *a, int64_t row,
                                                                int rows, int64_t panel, int n)
{
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, PERI_BF16);
    const int64_t stride = peri_codes_bytes(a->inner, PERI_BF16) / (int64_t)sizeof(float);
    const char *w = (const char *)a->panels + panel * step;
    const float *x = (const float *)(const void *)k_codes_row(a, row)->codes;
    const int vectors = n * K_PANEL_VECTORS;
    k_vec sums[K_TILE_MOST_SUMS];
    for (int i = 0; i < rows * vectors; i++) sums[i] = k_set(0);
    for (int64_t k = 0; k < a->inner; k += PERI_HALVES_STEP) {
        const int64_t end = k + PERI_HALVES_STEP < a->inner ? k + PERI_HALVES_STEP : a->inner;
        k_vec s[K_HALVES_ROWS][K_HALVES_MOST_VECTORS][2];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) s[r][v][0] = s[r][v][1] = k_set(0);
        for (int64_t i = k; i < end; i += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                if (i + odd == end) break;
                k_vec column[K_HALVES_MOST_VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    column[v] = k_panel_load(w + v / K_PANEL_VECTORS * step,
                                             (i + odd) * PERI_PANEL + v % K_PANEL_VECTORS * K_LANES, PERI_BF16);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const k_vec number = k_set(x[r * stride + i + odd]);
#pragma GCC unroll 8
                    for (int v = 0; v < vectors; v++) s[r][v][odd] = k_fma(number, column[v], s[r][v][odd]);
                }
            }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[r * vectors + v] += s[r][v][0] + s[r][v][1];
    }
    for (int i = 0; i < rows * vectors; i++) sums[i] += k_set(0); /* -0 becomes +0 */
    k_halves_end(a, sums, row, rows, panel * PERI_PANEL, vectors);
}

/** Rows [row, row + rows) times panels [panel, panel + n). @rows, @n and @dtype are constants where this is called. */
static inline __attribute__((always_inline)) void k_panel_tile(const peri_k_panel_product_args *a, int64_t row,
                                                               int rows, int64_t panel, int n, const int32_t dtype)
{
    if (dtype == K_HALVES) {
        k_halves_tile(a, row, rows, panel, n);
        return;
    }
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, dtype);
    const char *w = (const char *)a->panels + panel * step;
    const float *x = a->x + row * a->x_stride;
    k_vec s[K_TILE_MOST_ROWS][8 * K_PANEL_VECTORS];
    const int vectors = n * K_PANEL_VECTORS;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) s[r][v] = k_set(0);
    for (int64_t k = 0; k < a->inner; k++) {
        k_vec column[8 * K_PANEL_VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++)
            column[v] =
                k_panel_load(w + v / K_PANEL_VECTORS * step, k * PERI_PANEL + v % K_PANEL_VECTORS * K_LANES, dtype);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const k_vec number = k_set(x[r * a->x_stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < vectors; v++) s[r][v] = k_fma(number, column[v], s[r][v]);
        }
    }
    if (dtype == PERI_I8) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            const char *scales = w + v / K_PANEL_VECTORS * step + PERI_PANEL * a->inner;
            const k_vec scale = k_load((const float *)(const void *)scales + v % K_PANEL_VECTORS * K_LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) s[r][v] *= scale;
        }
    }
    k_panel_tile_done(a, &s[0][0], 8 * K_PANEL_VECTORS, row, rows, panel * PERI_PANEL, vectors);
}

/** All rows times panels [panel, panel + n), @most rows at a time. */
static inline __attribute__((always_inline)) void k_panel_rows(const peri_k_panel_product_args *a, int64_t begin,
                                                               int64_t end, int most, int64_t panel, int n,
                                                               const int32_t dtype)
{
    int64_t row = begin;
    for (; row + most <= end; row += most) k_panel_tile(a, row, most, panel, n, dtype);
    switch ((end - row) % most) {
    case 1: k_panel_tile(a, row, 1, panel, n, dtype); break;
    case 2: k_panel_tile(a, row, 2, panel, n, dtype); break;
    case 3: k_panel_tile(a, row, 3, panel, n, dtype); break;
    case 4: k_panel_tile(a, row, 4, panel, n, dtype); break;
    case 5: k_panel_tile(a, row, 5, panel, n, dtype); break;
    default: break;
    }
}

static inline __attribute__((always_inline)) void k_panel_product(const peri_k_panel_product_args *a, int64_t begin,
                                                                  int64_t end, const int32_t dtype)
{
    const int64_t panels = (a->cols + PERI_PANEL - 1) / PERI_PANEL;
    const int most = dtype == K_HALVES ? K_HALVES_ROWS : K_TILE_MOST_ROWS;
    const int n = dtype == K_HALVES ? K_HALVES_PANELS : K_PANELS;
    const int of_one = dtype == K_HALVES ? K_HALVES_PANELS_OF_ONE : K_PANELS_OF_ONE;
    int64_t panel = 0;
    if (end - begin == 1)
        for (; panel + of_one <= panels; panel += of_one) k_panel_tile(a, begin, 1, panel, of_one, dtype);
    for (; panel + n <= panels; panel += n) k_panel_rows(a, begin, end, most, panel, n, dtype);
    for (; panel < panels; panel++) k_panel_rows(a, begin, end, most, panel, 1, dtype);
}

/* -- rows as codes ------------------------------------------------------------------------------------------------- */

/** What a sum of codes stands for: times the scales of its columns, from @c on of panel @w, and of its row. */
static inline k_vec k_codes_sum(const peri_k_panel_product_args *a, int64_t row, int64_t c, const char *w, k_vec sum)
{
    const char *scales = w + PERI_PANEL * a->inner;
    const k_vec scale = k_load((const float *)(const void *)scales + c);
    return sum * scale * k_set(k_codes_row(a, row)->scale);
}

#if defined(__AVX512F__)
/** A row times a panel, on processors without a product of codes. */
static void k_codes_plain(const peri_k_panel_product_args *a, int64_t row, int64_t panel)
{
    const char *w = (const char *)a->panels + panel * peri_panel_bytes(PERI_PANEL, a->inner, PERI_I8);
    const int8_t *x = k_codes_row(a, row)->codes;
    int32_t sums[PERI_PANEL] = {0};
    float numbers[PERI_PANEL];
    for (int64_t k = 0; k < a->inner; k++)
        for (int c = 0; c < PERI_PANEL; c++) sums[c] += x[k] * ((const int8_t *)w)[k * PERI_PANEL + c];
    for (int c = 0; c < PERI_PANEL; c++) numbers[c] = (float)sums[c];
    for (int v = 0; v < PERI_PANEL; v += K_LANES)
        k_panel_end(a, a->y + row * a->y_stride, panel * PERI_PANEL + v,
                    k_codes_sum(a, row, v, w, k_load(numbers + v)));
}

/** Four rows of a panel of codes, @bytes of them (64, or fewer at its end, and zeros), turned so that the four codes of
 *  a column lie together; or two rows of a panel of bf16. */
static inline __attribute__((always_inline)) __m512i k_codes_turned(const char *w, int64_t bytes, const int32_t dtype)
{
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i inside = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i rows = bytes >= 64 ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi8((1ull << bytes) - 1, w);
    if (dtype == PERI_BF16) return _mm512_permutexvar_epi16(pairs, rows);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, rows), inside);
}

#include "product_amx.h"

#define K_VNNI __attribute__((target("avx512vnni")))

/** A tile of rows as codes: as many rows and panels as there are registers for, and turning panels costs little. */
enum { K_CODES_ROWS = 12, K_CODES_PANELS = 2 };

/** Add four numbers of each of @rows rows times @n panels, from @w on, of which @bytes are there. 128 is added to each
 *  code of a panel: the instruction wants one factor without a sign. */
K_VNNI static inline __attribute__((always_inline)) void k_codes_step(__m512i s[K_CODES_ROWS][K_CODES_PANELS],
                                                                      const char *w, int64_t step, int64_t bytes,
                                                                      const char *codes, int64_t stride, int rows,
                                                                      int n)
{
    __m512i column[K_CODES_PANELS];
#pragma GCC unroll 4
    for (int v = 0; v < n; v++)
        column[v] = _mm512_xor_si512(k_codes_turned(w + v * step, bytes, PERI_I8), _mm512_set1_epi8(-128));
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, codes + r * stride, sizeof four);
        const __m512i number = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) /* gcc 12 copies the sums of its intrinsic from register to register */
            __asm__("vpdpbusd %2, %1, %0" : "+v"(s[r][v]) : "v"(column[v]), "v"(number));
    }
}

/** Rows [row, row + rows) times panels [panel, panel + n): sums of (w + 128) x, which begin with -128 times the sum of
 *  x. @rows and @n are constants where this is called. */
K_VNNI static inline __attribute__((always_inline)) void k_codes_tile(const peri_k_panel_product_args *a, int64_t row,
                                                                      int rows, int64_t panel, int n)
{
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, PERI_I8), stride = peri_codes_bytes(a->inner, PERI_I8);
    const char *w = (const char *)a->panels + panel * step, *codes = (const char *)k_codes_row(a, row)->codes;
    __m512i s[K_CODES_ROWS][K_CODES_PANELS];
    k_vec y[K_CODES_ROWS][K_CODES_PANELS];
    int64_t k = 0;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) s[r][v] = _mm512_set1_epi32(-128 * k_codes_row(a, row + r)->sum);
    for (; k + 4 <= a->inner; k += 4) k_codes_step(s, w + k * PERI_PANEL, step, 64, codes + k, stride, rows, n);
    if (k < a->inner)
        k_codes_step(s, w + k * PERI_PANEL, step, (a->inner - k) * PERI_PANEL, codes + k, stride, rows, n);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++)
            y[r][v] = k_codes_sum(a, row + r, 0, w + v * step, (k_vec)_mm512_cvtepi32_ps(s[r][v]));
    k_panel_tile_done(a, &y[0][0], K_CODES_PANELS, row, rows, panel * PERI_PANEL, n);
}

/** All rows times panels [panel, panel + n). */
K_VNNI static inline __attribute__((always_inline)) void k_codes_rows(const peri_k_panel_product_args *a, int64_t begin,
                                                                      int64_t end, int64_t panel, int n)
{
    int64_t row = begin;
    for (; row + K_CODES_ROWS <= end; row += K_CODES_ROWS) k_codes_tile(a, row, K_CODES_ROWS, panel, n);
    for (; row + 4 <= end; row += 4) k_codes_tile(a, row, 4, panel, n);
    for (; row < end; row++) k_codes_tile(a, row, 1, panel, n);
}

K_VNNI static void k_codes_vnni(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    const int64_t panels = (a->cols + PERI_PANEL - 1) / PERI_PANEL;
    int64_t panel = 0;
    for (; panel + K_CODES_PANELS <= panels; panel += K_CODES_PANELS)
        k_codes_rows(a, begin, end, panel, K_CODES_PANELS);
    for (; panel < panels; panel++) k_codes_rows(a, begin, end, panel, 1);
}
#else
/** Rows of a tile of codes, and how many numbers of each are widened to 16 bits at a time. */
enum { K_CODES_ROWS = 6, K_CODES_STEP = 256 };

/** Rows [row, row + rows) times a panel. Two rows of the panel are turned so that the two codes of a column lie
 *  together. An instruction multiplies them by two codes of a row of x, all of them in 16 bits, and adds both products
 *  in 32. Behind the last code of an odd row of x is a zero, and behind that of a panel are its scales. @rows is a
 *  constant where this is called. */
static inline __attribute__((always_inline)) void k_codes_tile(const peri_k_panel_product_args *a, int64_t row,
                                                               int rows, int64_t panel)
{
    const char *w = (const char *)a->panels + panel * peri_panel_bytes(PERI_PANEL, a->inner, PERI_I8);
    _Alignas(32) int16_t x[K_CODES_ROWS][K_CODES_STEP];
    __m256i s[K_CODES_ROWS][K_PANEL_VECTORS];
    k_vec y[K_CODES_ROWS][K_PANEL_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < a->inner; k += K_CODES_STEP) {
        const int64_t n = k + K_CODES_STEP < a->inner ? K_CODES_STEP : a->inner - k;
        for (int r = 0; r < rows; r++) {
            const int8_t *codes = k_codes_row(a, row + r)->codes + k;
            for (int64_t i = 0; i < n; i += 16) /* there are zeros up to a multiple of it */
                _mm256_store_si256((__m256i *)(void *)&x[r][i],
                                   _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(codes + i))));
        }
        for (int64_t i = 0; i < n; i += 2) {
            const __m128i *two = (const __m128i *)(const void *)(w + (k + i) * PERI_PANEL);
            const __m128i first = _mm_loadu_si128(two), second = _mm_loadu_si128(two + 1);
            const __m256i low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
            const __m256i high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, &x[r][i], sizeof pair);
                const __m256i number = _mm256_set1_epi32(pair);
                s[r][0] = _mm256_add_epi32(s[r][0], _mm256_madd_epi16(low, number));
                s[r][1] = _mm256_add_epi32(s[r][1], _mm256_madd_epi16(high, number));
                /* gcc 12 multiplies for all rows before it adds, and has no registers for so many products */
                __asm__ volatile("" : "+x"(s[r][0]), "+x"(s[r][1]));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < K_PANEL_VECTORS; v++)
            y[r][v] = k_codes_sum(a, row + r, v * K_LANES, w, (k_vec)_mm256_cvtepi32_ps(s[r][v]));
    k_panel_tile_done(a, &y[0][0], K_PANEL_VECTORS, row, rows, panel * PERI_PANEL, K_PANEL_VECTORS);
}

static void k_codes_avx2(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    for (int64_t panel = 0; panel < (a->cols + PERI_PANEL - 1) / PERI_PANEL; panel++) {
        int64_t row = begin;
        for (; row + K_CODES_ROWS <= end; row += K_CODES_ROWS) k_codes_tile(a, row, K_CODES_ROWS, panel);
        for (; row + 3 <= end; row += 3) k_codes_tile(a, row, 3, panel);
        for (; row < end; row++) k_codes_tile(a, row, 1, panel);
    }
}
#endif

static void k_code_product(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) peri_codes_of(k_codes_row(a, row), a->x + row * a->x_stride, a->inner);
#if defined(__AVX512F__)
    if (end - begin >= K_AMX_LEAST && peri_kernels_amx()) {
        k_amx_all(a, begin, end, PERI_I8);
        return;
    }
    if (__builtin_cpu_supports("avx512vnni")) {
        k_codes_vnni(a, begin, end);
        return;
    }
    for (int64_t panel = 0; panel < (a->cols + PERI_PANEL - 1) / PERI_PANEL; panel++)
        for (int64_t row = begin; row < end; row++) k_codes_plain(a, row, panel);
#else
    k_codes_avx2(a, begin, end);
#endif
}

static __attribute__((noinline)) void k_halves_product(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    k_panel_product(a, begin, end, K_HALVES);
}

static void k_half_product(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    bool tiles = false;
#if defined(__AVX512F__)
    tiles = end - begin >= K_AMX_LEAST && peri_kernels_amx();
#endif
    for (int64_t row = begin; row < end; row++)
        peri_halves_of(k_codes_row(a, row), a->x + row * a->x_stride, a->inner, !tiles);
#if defined(__AVX512F__)
    if (tiles) {
        k_amx_all(a, begin, end, PERI_BF16);
        return;
    }
#endif
    const unsigned before = _mm_getcsr(); /* a function of its own: no compiler moves arithmetic across calls */
    _mm_setcsr(before | K_FLUSH);
    k_halves_product(a, begin, end);
    _mm_setcsr(before);
}

static void cpu_panel_product(const void *args, int64_t begin, int64_t end)
{
    const peri_k_panel_product_args *a = args;
    if (a->codes) {
        if (a->dtype == PERI_BF16) k_half_product(a, begin, end);
        else k_code_product(a, begin, end);
        return;
    }
    if (a->dtype == PERI_BF16) k_panel_product(a, begin, end, PERI_BF16);
    else if (a->dtype == PERI_I8) k_panel_product(a, begin, end, PERI_I8);
    else k_panel_product(a, begin, end, PERI_F32);
}

#define K_CPU_PRODUCT [PERI_K_panel_product] = cpu_panel_product,
