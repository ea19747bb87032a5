/* SPDX-License-Identifier: Apache-2.0
 *
 * test_product.c: panel_product of every instruction set: the bits of ref, whatever the sizes, strides, and the split
 * of its range, and whether the processor's tiles are there; and ref's are those of sums written out.
 */
#include "../../kernels/kernels.h"
#include "../harness/check.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

enum { MOST_ROWS = 50, MOST_COLS = 150, MOST_INNER = 301, PAD = 3 };

static float x[MOST_ROWS * (MOST_INNER + PAD)], w[MOST_COLS * MOST_INNER], bias[MOST_COLS];
static float panels[(MOST_COLS + PERI_PANEL) * MOST_INNER];
static uint16_t narrow[(MOST_COLS + PERI_PANEL) * MOST_INNER];
static char coded[(MOST_COLS + PERI_PANEL) * (MOST_INNER + 4)];
static int32_t room[MOST_ROWS * (4 * MOST_INNER + 64 + sizeof(peri_k_codes)) / 4]; /* rows as codes or bf16 */

static void fill(float *to, int64_t n, uint32_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        to[i] = (float)(int32_t)seed / 2147483648.0f;
    }
}

static void run(const peri_kernels *k, peri_k_panel_product_args *a, float *y, int64_t rows, int64_t split)
{
    for (int64_t i = 0; i < MOST_ROWS * (MOST_COLS + PAD); i++) y[i] = -7;
    a->y = y;
    for (int64_t r = 0; r < rows; r += split) k->fn[PERI_K_panel_product](a, r, r + split < rows ? r + split : rows);
}

static int8_t code_of(int64_t i) { return (int8_t)(w[i] * 127); }
/** Scales of columns: no powers of two, and one is 0. */
static float scale_of(int64_t c) { return (float)(c % 7) / 3; }

/** Panels of codes. */
static void fill_coded(int64_t cols, int64_t inner)
{
    for (int64_t c = 0; c < (cols + PERI_PANEL - 1) / PERI_PANEL * PERI_PANEL; c++) {
        char *panel = coded + c / PERI_PANEL * peri_panel_bytes(PERI_PANEL, inner, PERI_I8);
        const float scale = scale_of(c);
        for (int64_t k = 0; k < inner; k++)
            panel[k * PERI_PANEL + c % PERI_PANEL] = c < cols ? code_of(c * inner + k) : 0;
        memcpy(panel + inner * PERI_PANEL + c % PERI_PANEL * 4, &scale, sizeof scale);
    }
}

/** A weight as panels of @dtype have it: the upper half of an f32 is a bf16. */
static float weight_of(int64_t i, int32_t dtype)
{
    uint32_t bits;
    float value;
    memcpy(&bits, &w[i], sizeof bits);
    if (dtype == PERI_I8) return (float)code_of(i);
    if (dtype == PERI_BF16) bits &= 0xffff0000u;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static float most_of(const float *row, int64_t inner)
{
    float most = 0;
    for (int64_t k = 0; k < inner; k++)
        if (!(fabsf(row[k]) <= most)) most = fabsf(row[k]);
    return isfinite(most) ? most : NAN;
}

/** A row of x and a column, both as codes, multiplied by the definition. */
static int64_t sum_of_codes(const float *row, int64_t c, int64_t inner)
{
    const float most = most_of(row, inner);
    int64_t sum = 0;
    for (int64_t k = 0; k < inner && most > 0; k++)
        sum += lrint((double)row[k] * (127 / most)) * code_of(c * inner + k);
    return sum;
}

/** A bf16 as the tiles of AMX read it, in the upper half of an f32. */
static float flushed(float number) { return fabsf(number) < 0x1p-126f ? 0 : number; }

static float half_of(float number)
{
    uint32_t bits;
    float value = number;
    if (number != number || fabsf(number) < 0x1p-126f) return flushed(number);
    memcpy(&bits, &number, sizeof bits);
    if ((bits & 0xffffu) > 0x8000u || (bits & 0x1ffffu) == 0x18000u) bits += 0x10000u; /* ties to even */
    bits &= 0xffff0000u;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

/** p q + s in f32; 0, where that is below 2^-126 although it is rounded to 24 bits, as it is when all is times 2^70. */
static float add_product(float p, float q, float s)
{
    const float sum = fmaf(p, q, s);
    return fabsf(sum) < 0x1p-100f && fabsf(fmaf(p * 0x1p70f, q, s * 0x1p70f)) < 0x1p-56f ? 0 : sum;
}

/** A row of x and a column, both as bf16, multiplied by the definition. */
static float sum_of_halves(const float *row, int64_t c, int64_t inner)
{
    float s = 0;
    for (int64_t k = 0; k < inner; k += 32) {
        float even = 0, odd = 0;
        for (int64_t i = k; i < k + 32; i += 2) {
            if (i < inner) even = add_product(half_of(row[i]), flushed(weight_of(c * inner + i, PERI_BF16)), even);
            if (i + 1 < inner)
                odd = add_product(half_of(row[i + 1]), flushed(weight_of(c * inner + i + 1, PERI_BF16)), odd);
        }
        s = flushed(s + flushed(even + odd));
    }
    return s + 0.0f; /* -0 is +0 */
}

/** One case: all instruction sets, split in several ways, beside sums written out. What is behind a row stays as it
 *  was. */
static void check(int64_t rows, int64_t cols, int64_t inner, int32_t act, bool biased, int32_t dtype, bool codes)
{
    static const char *const isas[] = {"ref", "avx2", "avx512"};
    static float want[MOST_ROWS * (MOST_COLS + PAD)], y[MOST_ROWS * (MOST_COLS + PAD)];
    peri_k_panel_product_args a = {.x = x,
                                   .panels = panels,
                                   .bias = biased ? bias : NULL,
                                   .act = act,
                                   .inner = inner,
                                   .cols = cols,
                                   .x_stride = inner + PAD,
                                   .y_stride = cols + PAD};
    peri_panel_pack(panels, w, cols, inner, inner, 1);
    for (int64_t i = 0; i < peri_panel_size(cols, inner); i++) {
        uint32_t bits;
        memcpy(&bits, &panels[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
    }
    fill_coded(cols, inner);
    if (dtype == PERI_BF16) a.panels = narrow, a.dtype = dtype;
    if (dtype == PERI_I8) a.panels = coded, a.dtype = dtype;
    if (codes) a.codes = room;
    for (int64_t i = 0; i < MOST_ROWS * (MOST_COLS + PAD); i++) want[i] = -7;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            float s = 0;
            for (int64_t k = 0; k < inner; k++) s = fmaf(x[r * a.x_stride + k], weight_of(c * inner + k, dtype), s);
            if (codes && dtype == PERI_I8) s = (float)sum_of_codes(x + r * a.x_stride, c, inner);
            if (codes && dtype == PERI_BF16) s = sum_of_halves(x + r * a.x_stride, c, inner);
            if (dtype == PERI_I8) s *= scale_of(c);
            if (codes && dtype == PERI_I8) s *= most_of(x + r * a.x_stride, inner) / 127;
            if (biased) s += bias[c];
            want[r * a.y_stride + c] = act == PERI_UNARY_RELU && s < 0 ? 0 : s;
        }
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const peri_kernels *k = peri_kernels_isa(isas[i]);
        for (int64_t split = 1; k && split <= rows; split += split < 3 ? 1 : 4) {
            run(k, &a, y, rows, split);
            for (int64_t at = 0; at < MOST_ROWS * (MOST_COLS + PAD); at++) {
                const bool sign = act == PERI_UNARY_RELU || !signbit(y[at]) == !signbit(want[at]); /* of 0 */
                if ((y[at] != want[at] || !sign) && (y[at] == y[at] || want[at] == want[at]))
                    fail_msg("%s, dtype %d, %d x %d x %d, act %d, split %d: number %d is %.9g, wanted %.9g", isas[i],
                             (int)dtype, (int)rows, (int)cols, (int)inner, act, (int)split, (int)at, (double)y[at],
                             (double)want[at]);
            }
        }
    }
}

static void all_instruction_sets_have_the_bits_of_sums_in_order(void **state)
{
    (void)state;
    static const int64_t cols[] = {1, 15, 16, 17, 33, 64, 65, 130, 150}, inner[] = {1, 2, 13, 70};
    fill(x, (int64_t)(sizeof x / sizeof *x), 1);
    fill(w, (int64_t)(sizeof w / sizeof *w), 2);
    fill(bias, MOST_COLS, 3);
    memset(x + 2 * (13 + PAD), 0, 13 * sizeof *x);  /* a row of zeros, */
    memset(x + 2 * (70 + PAD), 0, 70 * sizeof *x);
    x[70 + PAD] = 1e30f, x[4 * (13 + PAD)] = 1e-40f; /* and such that most of it rounds to 0 */
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
        for (size_t k = 0; k < sizeof inner / sizeof *inner; k++)
            for (int64_t rows = 1; rows <= MOST_ROWS; rows += rows < 14 ? 1 : 12) {
                const int32_t act = rows % 2 ? PERI_UNARY_RELU : PERI_UNARY_IDENTITY;
                check(rows, cols[c], inner[k], act, rows % 3 != 0, PERI_I8, true);
                check(rows, cols[c], inner[k], act, rows % 3 != 0, PERI_BF16, true);
                if (rows > 14) continue; /* codes have tiles of more rows */
                check(rows, cols[c], inner[k], act, rows % 3 != 0, PERI_F32, false);
                check(rows, cols[c], inner[k], act, rows % 3 != 0, PERI_BF16, false);
                check(rows, cols[c], inner[k], act, rows % 3 != 0, PERI_I8, false);
            }
    for (int64_t rows = 1; rows < 14; rows++) /* so long that AVX2 widens the codes of a row in parts */
        check(rows, 17, MOST_INNER, PERI_UNARY_IDENTITY, true, PERI_I8, true);
}

/** Products of bf16 that are about as small as the least normal number, and weights that are smaller. */
static void tiny_numbers_of_bf16_are_zeros(void **state)
{
    (void)state;
    static const int64_t rows[] = {1, 2, 5, 18, 35}, cols[] = {1, 40, 130}, inner[] = {1, 31, 32, 33, 70};
    fill(x, (int64_t)(sizeof x / sizeof *x), 4);
    fill(w, (int64_t)(sizeof w / sizeof *w), 5);
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) x[i] *= i % 3 ? 0x1p-83f : -0x1p-85f;
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) w[i] *= i % 5 ? 0x1p-42f : 0x1p-127f;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
            for (size_t k = 0; k < sizeof inner / sizeof *inner; k++)
                check(rows[r], cols[c], inner[k], PERI_UNARY_IDENTITY, false, PERI_BF16, true);
}

#if defined(__linux__) && defined(SYS_arch_prctl)
/** From now on Linux refuses to give this process the processor's tiles. */
static bool refuse_tiles(void)
{
    struct sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                                 BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 1),
                                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}
#else
static bool refuse_tiles(void) { return false; }
#endif

/** A child that has no tiles runs all of this first: once a process has them, they cannot be taken away. */
int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_instruction_sets_have_the_bits_of_sums_in_order),
                                       cmocka_unit_test(tiny_numbers_of_bf16_are_zeros)};
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        if (!refuse_tiles()) return 0;
        return peri_kernels_amx() || cmocka_run_group_tests_name("without tiles", tests, NULL, NULL) != 0;
    }
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
