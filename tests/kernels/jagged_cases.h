/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged_cases.h: what the tests of jagged, sparse and quantized kernels share: random bags, buffers exactly as large
 * as they must be (so that the address sanitizer sees overruns), and the comparison of every instruction set and split
 * with ref.
 */
#ifndef PERI_TESTS_JAGGED_CASES_H
#define PERI_TESTS_JAGGED_CASES_H

#include "tests/harness/check.h"
#include "tests/kernels/isas.h"
#include "tests/kernels/split.h"

#include "kernels/kernels.h"

#include <stdlib.h>



static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t below) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du % below;
}

static void seed(void **unused)
{
    (void)unused;
    const char *text = getenv("PERI_TEST_SEED");
    state = (text && atoll(text) > 0 ? (uint64_t)atoll(text) : 20261121u) * 2 + 1;
    print_message("seed %llu\n", (unsigned long long)(state / 2));
}

/* -- buffers ------------------------------------------------------------------------------------------------------- */

static void *kept[4096];
static int kept_count;

/** @bytes that live until the end of the test, filled with a pattern. */
static void *room(int64_t bytes)
{
    char *p = malloc((size_t)(bytes ? bytes : 1));
    assert_non_null(p);
    assert_true(kept_count < 4096);
    memset(p, 0x5a, (size_t)bytes);
    kept[kept_count++] = p;
    return p;
}

static int drop_all(void **unused)
{
    (void)unused;
    while (kept_count > 0) free(kept[--kept_count]);
    return 0;
}

static int64_t size_of(int32_t dtype) { return dtype == PERI_I32 ? 4 : 8; }

/** Numbers as an i32 or i64 array. */
static void *ints(const int64_t *x, int64_t n, int32_t dtype)
{
    void *p = room(n * size_of(dtype));
    for (int64_t i = 0; i < n; i++) {
        if (dtype == PERI_I32) ((int32_t *)p)[i] = (int32_t)x[i];
        else ((int64_t *)p)[i] = x[i];
    }
    return p;
}

/** One output of a kernel: what ref wrote, and the buffer that is compared with it. */
typedef struct output {
    void **field;
    void *buffer, *want;
    int64_t bytes;
    int32_t dtype; /* of its numbers, some of which may be NaN: a GPU makes NaNs of other bits */
    bool exponential; /* they come of an exponential, whose last bit is the GPU's own on a card, and nowhere else */
} output;

static bool is_nan(const void *x, int64_t i, int32_t dtype)
{
    if (dtype == PERI_F64) return ((const double *)x)[i] != ((const double *)x)[i];
    if (dtype == PERI_F32) return ((const float *)x)[i] != ((const float *)x)[i];
    const int bits = ((const uint16_t *)x)[i] & 0x7fff;
    return bits > (dtype == PERI_F16 ? 0x7c00 : 0x7f80);
}

/** Whether element @i of both is the same, or a neighbour. */
static bool are_near(const void *x, const void *y, int64_t i, int32_t dtype)
{
    const int64_t size = dtype == PERI_F64 ? 8 : dtype == PERI_F32 ? 4 : 2;
    uint64_t a = 0, b = 0;
    memcpy(&a, (const char *)x + i * size, (size_t)size);
    memcpy(&b, (const char *)y + i * size, (size_t)size);
    return a > b ? a - b <= 1 : b - a <= 1;
}

/** The first byte in which they differ; on kernels/cuda all NaNs are the same. */
static int64_t differs(const output *o, const void *got, const char *isa)
{
    const int64_t size = o->dtype == PERI_F64 ? 8 : o->dtype == PERI_F32 ? 4 : 2;
    const bool numbers = !strcmp(isa, "cuda_host") && (o->dtype == PERI_F64 || o->dtype == PERI_F32 ||
                                                       o->dtype == PERI_F16 || o->dtype == PERI_BF16);
    for (int64_t at = 0; at < o->bytes; at++) {
        if (((const char *)got)[at] == ((const char *)o->want)[at]) continue;
        const bool near = o->exponential && !reaches_mappings && are_near(got, o->want, at / size, o->dtype);
        if (!numbers || (!near && (!is_nan(got, at / size, o->dtype) || !is_nan(o->want, at / size, o->dtype))))
            return at;
        at = at / size * size + size - 1;
    }
    return o->bytes;
}

/** Run @kernel with ref over the whole range, then with every set and split, and compare all outputs. The fields of
 *  @args that @outputs points at hold buffers with their starting content. */
static void compare(const char *what, int32_t kernel, void *args, int64_t n, output *outputs, int count)
{
    for (int o = 0; o < count; o++) {
        outputs[o].buffer = *outputs[o].field;
        void *start = room(outputs[o].bytes), *want = room(outputs[o].bytes);
        memcpy(start, outputs[o].buffer, (size_t)outputs[o].bytes);
        memcpy(want, outputs[o].buffer, (size_t)outputs[o].bytes);
        *outputs[o].field = outputs[o].want = want;
        outputs[o].buffer = start; /* the content to begin with */
    }
    peri_kernels_ref.fn[kernel](args, 0, n);
    for (int i = 0; i < ISAS; i++) {
        const peri_kernels *k = kernels_of(isas[i]);
        for (int split = 0; k && split < SPLITS; split++) {
            if (split == BACKWARDS && n > 3000) continue;
            for (int o = 0; o < count; o++) {
                void *got = malloc((size_t)(outputs[o].bytes ? outputs[o].bytes : 1));
                assert_non_null(got);
                memcpy(got, outputs[o].buffer, (size_t)outputs[o].bytes);
                *outputs[o].field = got;
            }
            run(k, kernel, args, n, split);
            for (int o = 0; o < count; o++) {
                int64_t at = differs(&outputs[o], *outputs[o].field, isas[i]);
                if (at < outputs[o].bytes)
                    fail_msg("%s: %s on %s, split %d: output %d differs at byte %lld: %d, wanted %d", what,
                             peri_kernel_names[kernel], isas[i], split, o, (long long)at,
                             ((uint8_t *)*outputs[o].field)[at], ((uint8_t *)outputs[o].want)[at]);
                free(*outputs[o].field);
            }
        }
    }
    for (int o = 0; o < count; o++) *outputs[o].field = outputs[o].want;
}

#define OUTPUT(f, size) \
    { (void **)&(f), NULL, NULL, (size), -1, false }
#define NUMBERS(f, size, dtype) \
    { (void **)&(f), NULL, NULL, (size), (dtype), false }
#define EXPONENTIALS(f, size, dtype) \
    { (void **)&(f), NULL, NULL, (size), (dtype), true }

/* -- cases --------------------------------------------------------------------------------------------------------- */

/** Bags: mostly short, sometimes empty, now and then long. */
static int64_t *random_lengths(int64_t n, int64_t mean)
{
    int64_t *x = room(8 * n);
    for (int64_t i = 0; i < n; i++) {
        uint64_t most = (uint64_t)mean * (draw(50) == 0 ? 20 : 2);
        x[i] = draw(5) == 0 ? 0 : (int64_t)draw(most + 1);
    }
    return x;
}

static int64_t *complete(const int64_t *lengths, int64_t n)
{
    int64_t *x = room(8 * (n + 1));
    x[0] = 0;
    for (int64_t i = 0; i < n; i++) x[i + 1] = x[i] + lengths[i];
    return x;
}

static char *random_bytes(int64_t n)
{
    char *p = room(n);
    for (int64_t i = 0; i < n; i++) p[i] = (char)draw(256);
    return p;
}

static const int32_t dtypes[] = {PERI_I32, PERI_I64};

static float *random_floats(int64_t n)
{
    float *x = room(4 * n);
    for (int64_t i = 0; i < n; i++) x[i] = draw(9) == 0 ? -0.0f : (float)draw(2000) / 7 - 100;
    return x;
}

/** n numbers of [base, base + below). */
static int64_t *numbers(int64_t n, uint64_t below, int64_t base)
{
    int64_t *x = room(8 * n);
    for (int64_t i = 0; i < n; i++) x[i] = base + (int64_t)draw(below);
    return x;
}

static int64_t blocks_of(int64_t n) { return n > 0 ? (n + PERI_JAGGED_BLOCK - 1) / PERI_JAGGED_BLOCK : 1; }

/** n numbers of a dtype, some of them -0 and large. */
static void *values_of(int64_t n, int32_t dtype)
{
    int64_t size = dtype == PERI_F64 || dtype == PERI_I64 ? 8 : 4;
    char *p = room(n * size);
    for (int64_t i = 0; i < n; i++) {
        double wide = draw(9) == 0 ? -0.0 : ((double)draw(2000) - 1000) / 7;
        float narrow = (float)wide;
        int64_t big = (int64_t)draw(UINT64_MAX);
        int32_t small = (int32_t)big;
        memcpy(p + i * size,
               dtype == PERI_F64   ? (void *)&wide
               : dtype == PERI_F32 ? (void *)&narrow
               : dtype == PERI_I64 ? (void *)&big
                                   : &small,
               (size_t)size);
    }
    return p;
}

#endif
