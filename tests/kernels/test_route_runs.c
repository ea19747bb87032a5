/* SPDX-License-Identifier: Apache-2.0
 *
 * test_route_runs.c: the routing kernels that move rows which lie together at one end (route_place, route_lines), of
 * every instruction set against their definition: for any split of the range, and no byte beside.
 */
#include "../../kernels/kernels.h"
#include "isas.h"
#include "../harness/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;

static int64_t below(int64_t n) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (int64_t)((state * 0x2545f4914f6cdd1dull) >> 33) % n;
}

static void random_rows(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)(below(2001) - 1000) / 64;
}

/** Run a kernel over [0, n) in random pieces, in random order of two halves. */
static void run(peri_kernel_fn fn, const void *args, int64_t n)
{
    int64_t middle = n ? below(n + 1) : 0;
    fn(args, middle, n);
    fn(args, 0, middle);
}

/* -- runs of rows -------------------------------------------------------------------------------------------------- */

enum { MOST_RUNS = 80, PLACE_AREA = 5 << 19, PLACE_GUARD = 64 };

/** Rows of a run: none, one, odd, or with @width past the size from which copies go past the caches (64 KiB). */
static int64_t rows_of_run(int64_t width)
{
    int64_t large = (64 << 10) / width;
    int64_t sizes[] = {0, 1, 2 * below(50) + 1, below(300), large - 1, large, large + 1 + below(100), large + 31};
    return sizes[below(below(4) ? 4 : 8)];
}

/** Runs that cover [0, sum of n) of dst in random order; returns that sum. Sources begin anywhere. @much: of 20 to 40
 *  KiB each, which go past the caches where they are more than 1 MiB together. */
static int64_t make_runs(peri_k_run *runs, int64_t n, int64_t width, bool much)
{
    int64_t order[MOST_RUNS], to = 0;
    for (int64_t i = 0; i < n; i++) order[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t k = below(i + 1), kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t rows = much ? ((20 << 10) + below(20 << 10)) / width : rows_of_run(width);
        if ((to + rows) * width > PLACE_AREA) rows = 0;
        runs[order[i]] =
            (peri_k_run){.to = to, .from = below(PLACE_AREA / width - rows + 1), .n = rows, .own = below(2)};
        to += rows;
    }
    return to;
}

static void test_place(void **unused)
{
    (void)unused;
    static const int64_t widths[] = {1, 2, 4, 8, 12, 16, 48};
    static unsigned char source[2][PLACE_AREA + 32], want[PLACE_AREA + 2 * PLACE_GUARD],
        got[PLACE_AREA + 2 * PLACE_GUARD];
    peri_k_run runs[MOST_RUNS];
    int64_t large = 0, much = 0;
    state = 3;
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < sizeof source[k]; i++) source[k][i] = (unsigned char)below(256);
    for (int round = 0; round < 250; round++) {
        state = 31 + (uint64_t)round * 7907;
        int64_t width = widths[round % 7], n = round < 7 ? 0 : below(MOST_RUNS + 1);
        bool many = round % 10 == 9;
        if (many) n = MOST_RUNS;
        /* bytes off the alignment of the arrays */
        int64_t rows = make_runs(runs, n, width, many), shift = round % 3 ? below(32) : 0;
        const unsigned char *received = source[0] + below(32), *own = source[1] + below(32);
        memset(want, 0xa5, (size_t)(rows * width + 2 * PLACE_GUARD));
        for (int64_t i = 0; i < n; i++) {
            large += runs[i].n * width >= 64 << 10;
            much += i == 0 && rows * width >= 2 << 20;
            memcpy(want + shift + runs[i].to * width, (runs[i].own ? own : received) + runs[i].from * width,
                   (size_t)(runs[i].n * width));
        }
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            memset(got, 0xa5, (size_t)(rows * width + 2 * PLACE_GUARD));
            peri_k_route_place_args place = {
                .dst = got + shift, .received = received, .own = own, .runs = runs, .width = width, .past = round % 2};
            run(k->fn[PERI_K_route_place], &place, n);
            if (memcmp(want, got, (size_t)(rows * width + 2 * PLACE_GUARD)) != 0)
                fail_msg("place of %s is wrong in round %d: %lld rows of %lld bytes", isas[i], round, (long long)rows,
                         (long long)width);
        }
    }
    assert_true(large > 50);
    assert_true(much > 10);
}

/** Blocks of columns side by side, and back: every run stands for all rows; a range may begin and end within one. */
static void test_lines(void **unused)
{
    (void)unused;
    enum { BLOCKS = 4, MOST_ROWS = 70, WIDEST = 900, BYTES = MOST_ROWS * BLOCKS * WIDEST * 4 };
    static unsigned char source[BYTES], want[BYTES], got[BYTES], back[BYTES];
    peri_k_run runs[BLOCKS], back_runs[BLOCKS];
    for (int64_t i = 0; i < BYTES; i++) source[i] = (unsigned char)(i * 31 + i / 251);
    state = 5;
    for (int round = 0; round < 120; round++) {
        int64_t width = round % 2 ? 4 : 1, rows = 1 + below(MOST_ROWS), columns = 0, from = 0, dims[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) columns += dims[b] = below(8) ? 1 + below(round % 3 ? 40 : WIDEST) : 0;
        memset(want, 0xa5, BYTES);
        for (int64_t b = 0, column = 0; b < BLOCKS; column += dims[b++], from += rows * dims[b - 1]) {
            runs[b] = (peri_k_run){.to = column, .from = from, .n = dims[b]};
            back_runs[b] = (peri_k_run){.to = from, .from = column, .n = dims[b]};
            for (int64_t i = 0; i < rows; i++)
                memcpy(want + (i * columns + column) * width, source + (from + i * dims[b]) * width,
                       (size_t)(dims[b] * width));
        }
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            int64_t cut = below(BLOCKS * rows + 1);
            peri_k_route_place_args place = {.dst = got,
                                             .received = source,
                                             .runs = runs,
                                             .width = width,
                                             .lines = rows,
                                             .step = columns,
                                             .past = round % 5 == 4};
            memset(got, 0xa5, BYTES);
            k->fn[PERI_K_route_place](&place, cut, BLOCKS * rows);
            k->fn[PERI_K_route_place](&place, 0, cut);
            if (memcmp(want, got, BYTES) != 0)
                fail_msg("places of %s are wrong in round %d: %lld rows", isas[i], round, (long long)rows);
            place.dst = back;
            place.received = got;
            place.runs = back_runs;
            place.from_step = columns;
            place.step = 0;
            memset(back, 0, BYTES);
            k->fn[PERI_K_route_place](&place, 0, cut);
            k->fn[PERI_K_route_place](&place, cut, BLOCKS * rows);
            const size_t bytes = (size_t)(rows * columns * width);
            if (memcmp(source, back, bytes) != 0)
                fail_msg("the way back of %s is wrong in round %d: %lld rows", isas[i], round, (long long)rows);
            for (size_t j = bytes; j < BYTES; j++) assert_true(back[j] == 0);
        }
    }
}

/* -- rows together and apart --------------------------------------------------------------------------------------- */

/** Rows apart: with an index and without, in ranges, past the caches or not; and back. */
static void test_apart(void **unused)
{
    (void)unused;
    enum { LINES = 90, WIDEST = 150, GAP = 200, EXTENT = 4 * LINES * GAP };
    static _Alignas(64) float together[LINES * WIDEST], values[EXTENT], back[LINES * WIDEST];
    static const int64_t widths[] = {1, 7, 16, 32, 48, 64, 128, 0};
    state = 11;
    for (int round = 0; round < 160; round++) {
        const int64_t cols = widths[round % 8] ? widths[round % 8] : 1 + below(WIDEST),
                      stride = cols + (below(3) ? 16 * below(3) : 0);
        const int64_t n = below(LINES + 1), first = round % 4 == 3 ? below(16) : 0, cut = below(n + 1);
        int32_t index[LINES];
        for (int64_t i = 0; i < n; i++) index[i] = (int32_t)(2 * (n - 1 - i) + below(2)); /* each row once */
        const bool indexed = round % 3 != 0;
        const double divisor = round % 2 ? 4 : 3;
        random_rows(together, LINES * WIDEST);
        for (size_t k = 0; k < sizeof isas / sizeof *isas; k++) {
            const peri_kernels *kernels = kernels_of(isas[k]);
            if (!kernels || (k >= ISAS_CPU && round % 3)) continue;
            peri_k_route_lines_args a = {.values = values + first, .together = together, .stride = stride, .cols = cols,
                                         .index = indexed ? index : NULL, .divisor = divisor, .past = below(2)};
            for (int64_t j = 0; j < EXTENT; j++) values[j] = NAN;
            kernels->fn[PERI_K_route_lines](&a, cut, n);
            kernels->fn[PERI_K_route_lines](&a, 0, cut);
            memset(back, 0, sizeof back);
            a.together = back;
            a.back = true;
            kernels->fn[PERI_K_route_lines](&a, 0, cut);
            kernels->fn[PERI_K_route_lines](&a, cut, n);
            for (int64_t i = 0; i < n; i++)
                for (int64_t c = 0; c < cols; c++) {
                    float *at = values + first + (indexed ? index[i] : i) * stride + c;
                    if (*at != together[i * cols + c]) fail_msg("%s: round %d, row %d", isas[k], round, (int)i);
                    if (back[i * cols + c] != *at / (float)divisor)
                        fail_msg("%s: the way back of round %d", isas[k], round);
                    *at = NAN;
                }
            for (int64_t j = 0; j < EXTENT; j++) assert_true(isnan(values[j])); /* nothing else was written */
            for (int64_t j = n * cols; j < LINES * WIDEST; j++) assert_true(back[j] == 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_place),
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_apart),
    };
    return cmocka_run_group_tests_name("route kernels that move rows", tests, NULL, NULL);
}
