/* SPDX-License-Identifier: Apache-2.0
 *
 * test_amx.c: products of codes and of bf16 by the processor's tiles, on a machine that has none: what the instructions
 * do is written out here. Bits are ref's, no byte behind an array is read (fence.c), and tiles are used as the
 * processor allows. That the instructions themselves are right is shown by test_product.c where there are any.
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
#define k_amx_halves(s, x, w) amx_halves(s, x, w)
#include "../../kernels/cpu/amx.h"

static struct {
    bool on;
    int rows[8];
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
        assert_true(t < 8 ? s->rows[t] > 0 && s->rows[t] <= K_AMX_ROWS : s->rows[t] == 0);
        if (t < 8) amx.rows[t] = s->rows[t];
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
    for (int r = 0; r < amx.rows[t]; r++)
        memcpy(amx_tile(t) + r * K_AMX_BYTES, (const char *)from + r * stride, K_AMX_BYTES);
}

static void amx_store(int t, void *to, int64_t stride)
{
    for (int r = 0; r < amx.rows[t]; r++) memcpy((char *)to + r * stride, amx_tile(t) + r * K_AMX_BYTES, K_AMX_BYTES);
}

/** A product of tiles may begin: those are three, and as many rows as there are. */
static void amx_multiplies(int s, int x, int w)
{
    if (s == x || s == w || x == w) fail_msg("a product of one tile twice");
    amx_wanted();
    assert_int_equal(amx.rows[s], amx.rows[x]);
    assert_int_equal(amx.rows[w], K_AMX_ROWS);
    amx.products++;
}

static void amx_codes(int s, int x, int w)
{
    amx_multiplies(s, x, w);
    for (int r = 0; r < amx.rows[s]; r++)
        for (int c = 0; c < K_AMX_BYTES / 4; c++) {
            int32_t sum;
            memcpy(&sum, amx.tile[s][r] + 4 * c, sizeof sum);
            for (int k = 0; k < K_AMX_BYTES; k++) sum += amx.tile[x][r][k] * amx.tile[w][k / 4][4 * c + k % 4];
            memcpy(amx.tile[s][r] + 4 * c, &sum, sizeof sum);
        }
}

static float amx_half(const int8_t *at) /* denormals are read as 0 */
{
    const uint32_t bits = (uint32_t)(uint8_t)at[1] << 24 | (uint32_t)(uint8_t)at[0] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return fabsf(value) < 0x1p-126f ? 0 : value;
}

/** Intel's manual: FMA with DAZ = FTZ = 1, to nearest even. What is tiny is seen where it is no denormal number. */
static float amx_fma(float x, float y, float z)
{
    const float sum = fmaf(x, y, z);
    return fabsf(sum) < 0x1p-100f && fabsf(fmaf(x * 0x1p70f, y, z * 0x1p70f)) < 0x1p-56f ? copysignf(0, sum) : sum;
}

static void amx_halves(int s, int x, int w)
{
    amx_multiplies(s, x, w);
    for (int r = 0; r < amx.rows[s]; r++)
        for (int c = 0; c < K_AMX_BYTES / 4; c++) {
            float sum, two[2] = {0, 0};
            memcpy(&sum, amx.tile[s][r] + 4 * c, sizeof sum);
            for (int k = 0; k < K_AMX_ROWS; k++)
                for (int i = 0; i < 2; i++)
                    two[i] = amx_fma(amx_half(amx.tile[x][r] + 4 * k + 2 * i), amx_half(amx.tile[w][k] + 4 * c + 2 * i),
                                     two[i]);
            sum = amx_fma(amx_fma(two[0], 1, two[1]), 1, sum);
            memcpy(amx.tile[s][r] + 4 * c, &sum, sizeof sum);
        }
}

#define peri_kernels_amx() true
#include "../../kernels/cpu/product.c"
#pragma GCC pop_options

static uint32_t seed;
static uint32_t draw(void) { return seed = seed * 1664525u + 1013904223u; }

/** Arrays of one case, which end where pages are closed. */
static void check_case(int64_t rows, int64_t cols, int64_t inner, int32_t dtype, int32_t act, bool biased)
{
    const int64_t panels = (cols + PERI_PANEL - 1) / PERI_PANEL, bytes = panels * peri_panel_bytes(16, inner, dtype);
    const int64_t steps = (inner * (dtype == PERI_BF16 ? 2 : 1) + K_AMX_BYTES - 1) / K_AMX_BYTES;
    float *x = malloc(sizeof *x * (size_t)(rows * inner)), *bias = malloc(sizeof *bias * (size_t)cols);
    float *y = malloc(sizeof *y * (size_t)(rows * cols)), *want = malloc(sizeof *want * (size_t)(rows * cols));
    char *w = malloc((size_t)bytes), *codes = malloc((size_t)(rows * peri_codes_bytes(inner, dtype)));
    assert_true(x && bias && y && want && w && codes);
    for (int64_t i = 0; i < rows * inner; i++) x[i] = (float)(int32_t)draw() / 2147483648.0f;
    for (int64_t i = 0; i < cols; i++) bias[i] = (float)(int32_t)draw() / 2147483648.0f;
    for (int64_t i = 0; i < bytes / 2 && dtype == PERI_BF16; i++) { /* from 2^-63 to 2, so that some products are 0 */
        const uint16_t half = (uint16_t)((draw() >> 16 & 0x807f) | ((draw() >> 16) % 64 + 64) << 7);
        memcpy(w + 2 * i, &half, sizeof half);
    }
    for (int64_t i = 0; i < rows * inner && dtype == PERI_BF16; i++)
        if (draw() >> 31) x[i] *= 0x1p-70f;
    for (int64_t p = 0; p < panels && dtype == PERI_I8; p++) {
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
                                   .dtype = dtype,
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
    assert_int_equal(amx.products, rows < 2 ? 0 : (rows + K_AMX_ROWS - 1) / K_AMX_ROWS * panels * steps);
    for (int64_t i = 0; i < rows * cols; i++)
        if (y[i] != want[i])
            fail_msg("dtype %d, %d x %d x %d, act %d: number %d is %.9g, wanted %.9g", dtype, (int)rows, (int)cols,
                     (int)inner, act, (int)i, (double)y[i], (double)want[i]);
    free(x), free(bias), free(y), free(want), free(w), free(codes);
}

static void tiles_give_refs_bits(void **state)
{
    (void)state;
    static const int64_t all_rows[] = {1, 2, 15, 16, 17, 32, 33, 47, 48, 70},
                         inner[] = {1, 3, 4, 63, 64, 65, 128, 201, 513, 1090};
    if (!peri_kernels_isa("avx512")) skip();
    for (size_t r = 0; r < sizeof all_rows / sizeof *all_rows; r++)
        for (size_t k = 0; k < sizeof inner / sizeof *inner; k++)
            for (int64_t cols = 1; cols < 70; cols += 1 + draw() % 23)
                check_case(all_rows[r], cols, inner[k], draw() >> 31 ? PERI_I8 : PERI_BF16,
                           cols % 2 ? PERI_UNARY_RELU : PERI_UNARY_IDENTITY, k % 2 == 0);
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
