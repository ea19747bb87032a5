/* SPDX-License-Identifier: Apache-2.0
 *
 * test_amx.c: products of codes by the processor's tiles, on a machine that has none: what the instructions do is
 * written out here. Bits are ref's, no byte behind an array is read (fence.c), and tiles are used as the processor
 * allows. That the instructions themselves are right is shown by test_product.c where there are any.
 */
#include "../../kernels/kernels.h"
#include "../harness/check.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && !defined(__clang__) /* clang has no such pragma */
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")
#define K_ISA emulated
#include "../../kernels/cpu/unit.h"

#include "../../kernels/cpu/vmath.h"

#define K_AMX_EMULATED
#define k_amx_begin(shapes) amx_begin(shapes)
#define k_amx_end() (amx_wanted(), amx.on = false)
#define k_amx_zero(t) memset(amx_tile(t), 0, sizeof amx.tile[t])
#define k_amx_load(t, from, stride) amx_load(t, from, stride)
#define k_amx_store(t, to, stride) amx_store(t, to, stride)
#define k_amx_codes(s, x, w) amx_codes(s, x, w)
#include "../../kernels/cpu/amx.h"

static struct {
    bool on;
    int64_t products;
    int8_t tile[8][K_AMX_ROWS][K_AMX_BYTES];
} amx;

static void amx_wanted(void)
{
    if (!amx.on) fail_msg("a tile is used before ldtilecfg or after tilerelease");
}

static void amx_begin(const k_amx_shapes *s)
{
    static const uint8_t zeros[14];
    assert_int_equal(s->palette, 1);
    assert_int_equal(s->start_row, 0);
    assert_memory_equal(s->reserved, zeros, sizeof s->reserved);
    assert_int_equal(sizeof *s, 64);
    for (int t = 0; t < 16; t++) { /* those that palette 1 lacks have to be 0 */
        assert_int_equal(s->bytes[t], t < 8 ? K_AMX_BYTES : 0);
        assert_int_equal(s->rows[t], t < 8 ? K_AMX_ROWS : 0);
    }
    amx.on = true;
    memset(amx.tile, 0, sizeof amx.tile);
}

static int8_t *amx_tile(int t)
{
    amx_wanted();
    return amx.tile[t][0];
}

static void amx_load(int t, const void *from, int64_t stride)
{
    for (int r = 0; r < K_AMX_ROWS; r++)
        memcpy(amx_tile(t) + r * K_AMX_BYTES, (const char *)from + r * stride, K_AMX_BYTES);
}

static void amx_store(int t, void *to, int64_t stride)
{
    for (int r = 0; r < K_AMX_ROWS; r++) memcpy((char *)to + r * stride, amx_tile(t) + r * K_AMX_BYTES, K_AMX_BYTES);
}

static void amx_codes(int s, int x, int w)
{
    if (s == x || s == w || x == w) fail_msg("tdpbssd of one tile twice");
    amx_wanted();
    amx.products++;
    for (int r = 0; r < K_AMX_ROWS; r++)
        for (int c = 0; c < K_AMX_BYTES / 4; c++) {
            int32_t sum;
            memcpy(&sum, amx.tile[s][r] + 4 * c, sizeof sum);
            for (int k = 0; k < K_AMX_BYTES; k++) sum += amx.tile[x][r][k] * amx.tile[w][k / 4][4 * c + k % 4];
            memcpy(amx.tile[s][r] + 4 * c, &sum, sizeof sum);
        }
}

#define peri_kernels_amx() true
#include "../../kernels/cpu/product.c"
#pragma GCC pop_options

static uint32_t seed;
static uint32_t draw(void) { return seed = seed * 1664525u + 1013904223u; }

/** Arrays of one case, which end where pages are closed. */
static void check_case(int64_t rows, int64_t cols, int64_t inner, int32_t act, bool biased)
{
    const int64_t panels = (cols + PERI_PANEL - 1) / PERI_PANEL, bytes = panels * peri_panel_bytes(16, inner, PERI_I8);
    float *x = malloc(sizeof *x * (size_t)(rows * inner)), *bias = malloc(sizeof *bias * (size_t)cols);
    float *y = malloc(sizeof *y * (size_t)(rows * cols)), *want = malloc(sizeof *want * (size_t)(rows * cols));
    char *w = malloc((size_t)bytes), *codes = malloc((size_t)(rows * peri_codes_bytes(inner)));
    assert_true(x && bias && y && want && w && codes);
    for (int64_t i = 0; i < rows * inner; i++) x[i] = (float)(int32_t)draw() / 2147483648.0f;
    for (int64_t i = 0; i < cols; i++) bias[i] = (float)(int32_t)draw() / 2147483648.0f;
    for (int64_t p = 0; p < panels; p++) {
        char *panel = w + p * peri_panel_bytes(16, inner, PERI_I8);
        for (int64_t i = 0; i < 16 * inner; i++) panel[i] = (char)(draw() >> 24);
        for (int c = 0; c < 16; c++) {
            const float scale = (float)(draw() >> 8) / 16777216.0f;
            memcpy(panel + 16 * inner + 4 * c, &scale, sizeof scale);
        }
    }
    peri_k_panel_product_args a = {.x = x,
                                   .panels = w,
                                   .codes = codes,
                                   .bias = biased ? bias : NULL,
                                   .act = act,
                                   .dtype = PERI_I8,
                                   .inner = inner,
                                   .cols = cols,
                                   .x_stride = inner,
                                   .y_stride = cols};
    a.y = want;
    peri_kernels_isa("ref")->fn[PERI_K_panel_product](&a, 0, rows);
    a.y = y;
    amx.products = 0;
    cpu_panel_product(&a, 0, rows);
    assert_false(amx.on);
    assert_int_equal(amx.products, rows / K_AMX_ROWS * panels * ((inner + K_AMX_BYTES - 1) / K_AMX_BYTES));
    for (int64_t i = 0; i < rows * cols; i++)
        if (y[i] != want[i])
            fail_msg("%d x %d x %d, act %d: number %d is %.9g, wanted %.9g", (int)rows, (int)cols, (int)inner, act,
                     (int)i, (double)y[i], (double)want[i]);
    free(x), free(bias), free(y), free(want), free(w), free(codes);
}

static void tiles_give_refs_bits(void **state)
{
    (void)state;
    static const int64_t all_rows[] = {15, 16, 17, 32, 47, 48, 70},
                         inner[] = {1, 3, 4, 63, 64, 65, 128, 201, 513, 1090};
    if (!peri_kernels_isa("avx512")) skip();
    for (size_t r = 0; r < sizeof all_rows / sizeof *all_rows; r++)
        for (size_t k = 0; k < sizeof inner / sizeof *inner; k++)
            for (int64_t cols = 1; cols < 70; cols += 1 + draw() % 23)
                check_case(all_rows[r], cols, inner[k], cols % 2 ? PERI_UNARY_RELU : PERI_UNARY_IDENTITY, k % 2 == 0);
}
#else
static void tiles_give_refs_bits(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiles_give_refs_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
