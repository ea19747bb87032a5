/* SPDX-License-Identifier: Apache-2.0
 *
 * test_codec.c: the codec kernels: every instruction set against ref, bit for bit and for any split of the range; their
 * error bounds; no byte outside the blocks is written, nothing outside the numbers is read.
 *
 *   test_codec bench    prints GB/s of f32 by format and instruction set
 */
#include "../../kernels/kernels.h"
#include "isas.h"
#include "../harness/check.h"

#include <math.h>
#include <perilune/perilune.h>
#include <stdlib.h>

enum { MOST = 1 << 14, GUARD = 64, SEGMENTS = 5 };

typedef struct format {
    const char *name;
    int32_t format, block, exponent_bits, exponent_bias, rounding;
    float loss_scale;
} format;

static const format formats[] = {{"fp16", PERI_CODEC_FP16, 1, 0, 0, 0, 1},
                                 {"fp16 scaled", PERI_CODEC_FP16, 1, 0, 0, 0, 8},
                                 {"bf16", PERI_CODEC_BF16, 1, 0, 0, 0, 1},
                                 {"bf16 scaled", PERI_CODEC_BF16, 1, 0, 0, 0, 0.37f},
                                 {"fp8 143", PERI_CODEC_FP8, 1, 4, 15, 0, 1},
                                 {"fp8 152", PERI_CODEC_FP8, 1, 5, 31, 0, 1},
                                 {"fp8 134", PERI_CODEC_FP8, 1, 3, 3, 0, 1},
                                 {"fp8 143 rows of 64", PERI_CODEC_FP8, 64, 4, 15, 0, 1},
                                 {"fp8 152 rows of 13", PERI_CODEC_FP8, 13, 5, 31, 0, 1},
                                 {"int8", PERI_CODEC_INT8, 32, 0, 0, 0, 1},
                                 {"int8 rows of 19", PERI_CODEC_INT8, 19, 0, 0, 0, 1},
                                 {"mx4", PERI_CODEC_MX4, 32, 0, 0, PERI_ROUND_EVEN, 1},
                                 {"mx4 nearest", PERI_CODEC_MX4, 16, 0, 0, PERI_ROUND_NEAREST, 1},
                                 {"mx4 floor", PERI_CODEC_MX4, 32, 0, 0, PERI_ROUND_FLOOR, 1},
                                 {"mx4 ceil", PERI_CODEC_MX4, 128, 0, 0, PERI_ROUND_CEIL, 1},
                                 {"mx4 stochastic", PERI_CODEC_MX4, 32, 0, 0, PERI_ROUND_STOCHASTIC, 1}};
enum { FORMATS = sizeof formats / sizeof *formats };

static uint64_t state = 88172645463325252ull;

static uint64_t draw(void) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull;
}

static int64_t below(int64_t n) { return (int64_t)(draw() >> 33) % n; }

static float number(int kind)
{
    float u = (float)(draw() >> 40) * 0x1p-23f - 1;
    if (kind == 0) return u * 4;
    if (kind == 1) return u * powf(10, (float)below(30) - 15);
    if (kind == 2) return below(3) ? 0 : u * 1e-39f;
    static const float odd[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 3.4e38f, -3.4e38f, 1e-45f, 65504, 65520, 1, -1};
    return below(4) ? u * 100 : odd[below(12)];
}

static int64_t bytes_of(const format *f)
{
    switch (f->format) {
    case PERI_CODEC_FP8: return f->block == 1 ? 1 : (f->block + 3) / 4 * 4 + 8;
    case PERI_CODEC_INT8: return f->block + 8;
    case PERI_CODEC_MX4: return f->block / 2 + 1;
    default: return 2;
    }
}

/** Numbers, their segments, and both directions of one format. */
typedef struct problem {
    float *x, *back, *back_ref;
    uint8_t *wire, *wire_ref;
    int64_t segments[2 * SEGMENTS + 2], blocks;
    peri_k_codec_args args;
} problem;

static void *guarded(int64_t bytes, int fill)
{
    void *p = malloc((size_t)(GUARD + bytes));
    assert_non_null(p);
    memset(p, fill, (size_t)(GUARD + bytes));
    return (char *)p + GUARD;
}

/** Nothing was written in front of @p; behind it is a closed page (tests/harness/fence.c). */
static void check_guard(const void *p, int fill)
{
    const unsigned char *c = p;
    for (int i = 0; i < GUARD; i++) assert_int_equal(c[-1 - i], fill);
}

static void make(problem *p, const format *f, int kind)
{
    int64_t n = 0, blocks = 0;
    for (int s = 0; s < SEGMENTS; s++) {
        p->segments[2 * s] = blocks;
        p->segments[2 * s + 1] = n;
        int64_t count = below(3) ? below(300) : f->block * below(4);
        n += count;
        blocks += (count + f->block - 1) / f->block;
    }
    p->segments[2 * SEGMENTS] = blocks;
    p->segments[2 * SEGMENTS + 1] = n;
    p->blocks = blocks;
    p->x = malloc(sizeof(float) * (size_t)(n ? n : 1)); /* of this very size: reading behind it is seen by the address
                                                           sanitizer */
    p->back = guarded(n * 4, 0x5a);
    p->back_ref = guarded(n * 4, 0x5a);
    p->wire = guarded(blocks * bytes_of(f), 0x5a);
    p->wire_ref = guarded(blocks * bytes_of(f), 0x5a);
    for (int64_t i = 0; i < n; i++) p->x[i] = number(kind);
    p->args = (peri_k_codec_args){.segments = p->segments,
                                  .n = n,
                                  .n_segments = SEGMENTS,
                                  .block = f->block,
                                  .format = f->format,
                                  .rounding = f->rounding,
                                  .exponent_bits = f->exponent_bits,
                                  .exponent_bias = f->exponent_bias,
                                  .loss_scale = f->loss_scale,
                                  .seed = 17};
    if (f->block == 1 && below(2)) p->args.segments = NULL;
}

static void drop(problem *p)
{
    free(p->x);
    void *blocks[] = {p->back, p->back_ref, p->wire, p->wire_ref};
    for (int i = 0; i < 4; i++) free((char *)blocks[i] - GUARD);
}

/** fn over [0, n) in random pieces, in random order of two halves. */
static void run(peri_kernel_fn fn, const void *args, int64_t n)
{
    int64_t middle = n ? below(n + 1) : 0, cut = middle ? below(middle + 1) : 0;
    fn(args, middle, n);
    fn(args, 0, cut);
    fn(args, cut, middle);
}

/** Equal bits, or both NaN. */
static bool same(const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], 4) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
            print_message("element %lld: %.9g and %.9g\n", (long long)i, (double)a[i], (double)b[i]);
            return false;
        }
    return true;
}

/** Both directions by @isa and by ref. */
static void compare(const char *isa, const format *f, int kind)
{
    const peri_kernels *k = kernels_of(isa), *ref = peri_kernels_isa("ref");
    problem p;
    make(&p, f, kind);
    peri_k_codec_args a = p.args;
    a.x = p.x, a.wire = p.wire_ref;
    ref->fn[PERI_K_codec_encode](&a, 0, p.blocks);
    a.wire = p.wire;
    run(k->fn[PERI_K_codec_encode], &a, p.blocks);
    int64_t bytes = p.blocks * bytes_of(f);
    check_guard(p.wire, 0x5a);
    if (f->format == PERI_CODEC_FP8 && f->block > 1)
        ; /* NaN scales may differ in their bits: compared after decoding */
    else if (f->format != PERI_CODEC_INT8 || kind < 3)
        for (int64_t i = 0; i < bytes; i++)
            if (p.wire[i] != p.wire_ref[i] && !(f->format <= PERI_CODEC_BF16 && kind == 3))
                fail_msg("%s, %s, kind %d: byte %lld of %lld is %02x, ref %02x", isa, f->name, kind, (long long)i,
                         (long long)bytes, p.wire[i], p.wire_ref[i]);
    a.x = p.back, a.wire = p.wire_ref;
    run(k->fn[PERI_K_codec_decode], &a, p.blocks);
    a.x = p.back_ref;
    ref->fn[PERI_K_codec_decode](&a, 0, p.blocks);
    check_guard(p.back, 0x5a);
    if (!same(p.back, p.back_ref, p.args.n)) fail_msg("%s, %s, kind %d: decoded otherwise", isa, f->name, kind);
    a.x = p.back, a.wire = p.wire;
    ref->fn[PERI_K_codec_decode](&a, 0, p.blocks);
    if (!same(p.back, p.back_ref, p.args.n)) fail_msg("%s, %s, kind %d: encoded otherwise", isa, f->name, kind);
    drop(&p);
}

static void equals_ref(void **unused)
{
    (void)unused;
    for (int i = 0; i < ISAS; i++) {
        if (!kernels_of(isas[i])) continue;
        for (int f = 0; f < FORMATS; f++)
            for (int round = 0; round < 60; round++) compare(isas[i], &formats[f], round % 4);
    }
}

/** Decoding any bytes ends, and stays inside its memory. */
static void decodes_anything(void **unused)
{
    (void)unused;
    const peri_kernels *ref = peri_kernels_isa("ref");
    for (int f = 0; f < FORMATS * ISAS; f++)
        for (int round = 0; round < 10; round++) {
            const format *form = &formats[f / ISAS];
            const peri_kernels *k = kernels_of(isas[f % ISAS]);
            if (!k) continue;
            problem p;
            make(&p, form, 0);
            for (int64_t i = 0; i < p.blocks * bytes_of(form); i++)
                p.wire[i] = (uint8_t)(below(5) ? draw() >> 50 : 255);
            p.args.wire = p.wire;
            p.args.x = p.back;
            run(k->fn[PERI_K_codec_decode], &p.args, p.blocks);
            p.args.x = p.back_ref;
            ref->fn[PERI_K_codec_decode](&p.args, 0, p.blocks);
            check_guard(p.back, 0x5a);
            if (!same(p.back, p.back_ref, p.args.n)) fail_msg("%s, %s: decoded otherwise", isas[f % ISAS], form->name);
            drop(&p);
        }
}

/* -- speed --------------------------------------------------------------------------------------------------------- */

static void bench(void)
{
    enum { N = 1 << 20 };
    float *x = malloc(4 * N);
    uint8_t *wire = malloc(4 * N);
    for (int64_t i = 0; i < N; i++) x[i] = number(0);
    for (int f = 0; f < FORMATS; f++)
        for (int i = 0; i < ISAS_CPU; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            const format *m = &formats[f];
            peri_k_codec_args a = {.wire = wire,
                                   .x = x,
                                   .n = N,
                                   .block = m->block,
                                   .format = m->format,
                                   .rounding = m->rounding,
                                   .exponent_bits = m->exponent_bits,
                                   .exponent_bias = m->exponent_bias,
                                   .loss_scale = m->loss_scale};
            double best[2] = {1e9, 1e9};
            for (int round = 0; round < 10; round++)
                for (int way = 0; way < 2; way++) {
                    int64_t start = peri_time_ns();
                    k->fn[way ? PERI_K_codec_decode : PERI_K_codec_encode](&a, 0, N / m->block);
                    double seconds = (double)(peri_time_ns() - start) * 1e-9;
                    best[way] = seconds < best[way] ? seconds : best[way];
                }
            printf("%-20s %-7s encode %6.2f GB/s  decode %6.2f GB/s\n", m->name, isas[i], 4e-9 * N / best[0],
                   4e-9 * N / best[1]);
        }
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(equals_ref), cmocka_unit_test(decodes_anything)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
