/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sparse.c: kernels over permutations, segments, levels of bags, distinct ids and quantized rows: every
 *  instruction set gives ref's bits,
 * however ranges are split.
 * deadline: 300 s
 */
#include "jagged_cases.h"

#include <math.h>

static const int64_t sizes[] = {0, 1, 3, 7, 64, 100, 4095, 4096, 4097, 9000};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void checks(void **unused)
{
    (void)unused;
    for (int s = 0; s < SIZES; s++)
        for (int variant = 0; variant < 8; variant++) {
            int64_t n = sizes[s], limit = variant & 1 ? 50 : 0, blocks = blocks_of(n), *x = numbers(n, 50, 0);
            int32_t dtype = dtypes[variant >> 1 & 1];
            if (variant & 4 && n) x[draw((uint64_t)n)] = dtype == PERI_I32 ? INT32_MIN : INT64_MIN;
            if (variant & 4 && n) x[draw((uint64_t)n)] = dtype == PERI_I32 ? INT32_MAX : INT64_MAX;
            peri_k_index_check_args a = {.x = ints(x, n, dtype), .n = n, .limit = limit, .dtype = dtype};
            a.bad = room(8 * blocks);
            compare("check", PERI_K_index_check, &a, blocks, (output[]){OUTPUT(a.bad, 8 * blocks)}, 1);
            a.extent = room(16 * blocks);
            compare("check", PERI_K_index_check, &a, blocks,
                    (output[]){OUTPUT(a.bad, 8 * blocks), OUTPUT(a.extent, 16 * blocks)}, 2);
            a.bad = NULL;
            compare("extent", PERI_K_index_check, &a, blocks, (output[]){OUTPUT(a.extent, 16 * blocks)}, 1);
            drop_all(NULL);
        }
}

static void permutations(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 48; variant++) {
        int64_t n = 1 + (int64_t)draw(variant % 3 ? 40 : 3000), segments = variant % 5 ? (int64_t)draw(60) : 0;
        int64_t *lengths = random_lengths(n, variant % 4 ? 5 : 40), *in = complete(lengths, n),
                *order = numbers(segments, (uint64_t)n, 0);
        int64_t *taken = room(8 * segments);
        for (int64_t t = 0; t < segments; t++) taken[t] = lengths[order[t]];
        int64_t *out = complete(taken, segments), rows = out[segments], extra = (int64_t)draw(3);
        int32_t p = dtypes[variant & 1], o = dtypes[variant >> 1 & 1], i = dtypes[variant >> 2 & 1],
                d = dtypes[variant >> 3 & 1];
        peri_k_jagged_places_args a = {.out_offsets = ints(out, segments + 1, o),
                                       .in_offsets = ints(in, n + 1, i),
                                       .permute = ints(order, segments, p),
                                       .segments = segments,
                                       .dtype = d,
                                       .out_dtype = o,
                                       .in_dtype = i,
                                       .permute_dtype = p};
        a.out = room((rows + extra) * size_of(d));
        compare("places", PERI_K_jagged_places, &a, rows + extra,
                (output[]){OUTPUT(a.out, (rows + extra) * size_of(d))}, 1);
        a.in_offsets = a.permute = NULL;
        compare("places within", PERI_K_jagged_places, &a, rows, (output[]){OUTPUT(a.out, (rows + extra) * size_of(d))},
                1);

        int64_t *shuffled = room(8 * n);
        for (int64_t k = 0; k < n; k++) shuffled[k] = k;
        for (int64_t k = n - 1; k > 0; k--) {
            int64_t j = (int64_t)draw((uint64_t)k + 1), swap = shuffled[k];
            shuffled[k] = shuffled[j], shuffled[j] = swap;
        }
        if (variant % 6 == 5) shuffled[draw((uint64_t)n)] = variant % 12 == 5 ? -1 : n; /* is left out */
        peri_k_invert_permute_args v = {.permute = ints(shuffled, n, p), .n = n, .dtype = p};
        v.inverse = room(n * size_of(p));
        compare("inverse", PERI_K_invert_permute, &v, n, (output[]){OUTPUT(v.inverse, n * size_of(p))}, 1);

        int64_t buckets = 1 + (int64_t)draw(5), total = in[n], *mapping = numbers(total, (uint64_t)buckets + 1, 0),
            *counts = room(8 * n * buckets);
        memset(counts, 0, (size_t)(8 * n * buckets));
        for (int64_t b = 0; b < n; b++)
            for (int64_t k = in[b]; k < in[b + 1]; k++)
                if (mapping[k] < buckets) counts[mapping[k] * n + b]++;
        peri_k_bucketize_replay_args r = {.offsets = in,
                                          .mapping = ints(mapping, total, p),
                                          .cursor = complete(counts, n * buckets),
                                          .bags = n,
                                          .buckets = buckets,
                                          .n = total,
                                          .mapping_dtype = p,
                                          .out_dtype = d};
        r.unbucketize = room(total * size_of(d));
        output found[] = {OUTPUT(r.cursor, 8 * (n * buckets + 1)), OUTPUT(r.unbucketize, total * size_of(d))};
        compare("replay", PERI_K_bucketize_replay, &r, n, found, 2);
        drop_all(NULL);
    }
}

static void segments(void **unused)
{
    (void)unused;
    static const int32_t kinds[] = {PERI_F32, PERI_F64, PERI_I32, PERI_I64};
    for (int variant = 0; variant < 64; variant++) {
        int64_t n = (int64_t)draw(50), step = 1 + (int64_t)draw(3),
                *ends = complete(random_lengths(n, variant % 3 ? 6 : 60), n);
        int32_t dtype = kinds[variant % 4], o = dtypes[variant >> 2 & 1];
        int64_t size = dtype == PERI_F64 || dtype == PERI_I64 ? 8 : 4, total = ends[n] * step;
        peri_k_segment_sum_args a = {.values = values_of(total, dtype),
                                     .offsets = ints(ends, n + 1, o),
                                     .step = step,
                                     .dtype = dtype,
                                     .offsets_dtype = o};
        a.out = room(n * size);
        compare("segments", PERI_K_segment_sum, &a, n, (output[]){OUTPUT(a.out, n * size)}, 1);
        if (dtype > PERI_F64 || n == 0) {
            drop_all(NULL);
            continue;
        }
        int64_t first = (int64_t)draw(3), behind = (int64_t)draw(3), all = total + (first + behind) * step;
        for (int64_t s = 0; s <= n; s++) ends[s] += first; /* elements that no segment has */
        peri_k_segment_spread_args g = {.grad = values_of(n, dtype),
                                        .offsets = ints(ends, n + 1, o),
                                        .step = step,
                                        .segments = n,
                                        .n = all,
                                        .dtype = dtype,
                                        .offsets_dtype = o};
        g.out = room(all * size);
        compare("spread", PERI_K_segment_spread, &g, n, (output[]){OUTPUT(g.out, all * size)}, 1);
        drop_all(NULL);
    }
}

static void levels(void **unused)
{
    (void)unused;
    static const int64_t elements[] = {1, 2, 4, 8, 16};
    for (int variant = 0; variant < 120; variant++) {
        peri_k_levels_args a = {.levels = 1 + variant % 4,
                                .element = elements[variant % 5],
                                .offsets_dtype = dtypes[variant & 1],
                                .padding = {draw(UINT64_MAX), draw(UINT64_MAX)}};
        int64_t rows = (int64_t)draw(7), dense;
        a.width = a.element * (1 + (int64_t)draw(variant % 3 ? 4 : 30));
        dense = rows;
        for (int32_t l = 0; l < a.levels; l++) {
            int64_t *ends = complete(random_lengths(rows, 2), rows);
            a.bags[l] = rows;
            a.offsets[l] = ints(ends, rows + 1, a.offsets_dtype);
            a.max[l] = (int64_t)draw(5);
            rows = ends[rows];
            dense *= a.max[l];
        }
        a.values = random_bytes(rows * a.width);
        a.dense = room(dense * a.width);
        compare("to dense", PERI_K_levels_to_dense, &a, dense, (output[]){OUTPUT(a.dense, dense * a.width)}, 1);
        compare("from dense", PERI_K_levels_from_dense, &a, rows, (output[]){OUTPUT(a.values, rows * a.width)}, 1);
        drop_all(NULL);
    }
}

static int by_key(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void sorting(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 40; variant++) {
        int64_t n = sizes[variant % SIZES], lists = 1 + (int64_t)draw(variant % 3 ? 20 : 5000),
                *x = numbers(n, (uint64_t)lists, 0);
        int32_t dtype = dtypes[variant & 1], place_bits = 14, bits = 13;
        peri_k_sort_keys_args k = {.x = ints(x, n, dtype), .dtype = dtype, .bits = bits, .place_bits = place_bits,
                                   .base = variant % 4 == 3 ? -7 : 0};
        k.keys = room(8 * n);
        compare("keys", PERI_K_sort_keys, &k, n, (output[]){OUTPUT(k.keys, 8 * n)}, 1);
        int64_t *order = room(8 * n);
        for (int64_t i = 0; i < n; i++) order[i] = n - 1 - i;
        k.order = order;
        k.shift = 3;
        compare("keys in order", PERI_K_sort_keys, &k, n, (output[]){OUTPUT(k.keys, 8 * n)}, 1);
        k.order = NULL;
        k.shift = 0;
        k.base = 0;
        peri_kernels_ref.fn[PERI_K_sort_keys](&k, 0, n);
        qsort(k.keys, (size_t)n, 8, by_key);
        peri_k_sort_order_args o = {.keys = k.keys, .order = variant & 2 ? order : NULL, .place_bits = place_bits};
        o.out = room(8 * n);
        compare("order", PERI_K_sort_order, &o, n, (output[]){OUTPUT(o.out, 8 * n)}, 1);
        peri_k_sort_lists_args l = {.keys = k.keys, .n = n, .lists = lists, .place_bits = place_bits};
        l.list = room(8 * n);
        l.offsets = room(8 * (lists + 1));
        output parts[] = {OUTPUT(l.list, 8 * n), OUTPUT(l.offsets, 8 * (lists + 1))};
        compare("lists", PERI_K_sort_lists, &l, n + 1, parts, 2);
        drop_all(NULL);
    }
}

static void distinct_by_order(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 40; variant++) {
        int64_t n = sizes[1 + variant % (SIZES - 1)], blocks = blocks_of(n),
                *x = numbers(n, variant % 3 ? 9 : 5000, -3);
        int32_t dtype = dtypes[variant & 1];
        uint64_t *keys = room(8 * n);
        int64_t *order = room(8 * n), total = 0;
        for (int64_t i = 0; i < n; i++) keys[i] = (uint64_t)(x[i] + 3) << 14 | (uint64_t)i;
        qsort(keys, (size_t)n, 8, by_key);
        for (int64_t i = 0; i < n; i++) order[i] = (int64_t)(keys[i] & 16383);
        peri_k_unique_args a = {.x = ints(x, n, dtype), .order = order, .n = n, .dtype = dtype};
        a.sums = room(8 * blocks);
        a.sorted = room(n * size_of(dtype));
        output gathered[] = {OUTPUT(a.sorted, n * size_of(dtype)), OUTPUT(a.sums, 8 * blocks)};
        compare("count", PERI_K_unique_count, &a, blocks, gathered, 2);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t own = a.sums[b];
            a.sums[b] = total;
            total += own;
        }
        a.unique = room(total * size_of(dtype));
        a.starts = variant & 2 ? room(8 * (total + 1)) : NULL;
        a.inverse = variant & 4 ? room(8 * n) : NULL;
        output outs[] = {OUTPUT(a.unique, total * size_of(dtype)), OUTPUT(a.starts, 8 * (total + 1)),
                         OUTPUT(a.inverse, 8 * n)};
        if (!a.starts) outs[1] = outs[2];
        compare("write", PERI_K_unique_write, &a, blocks, outs, 1 + (a.starts != NULL) + (a.inverse != NULL));
        if (a.starts) {
            a.counts = room(8 * total);
            compare("counts", PERI_K_unique_counts, &a, total, (output[]){OUTPUT(a.counts, 8 * total)}, 1);
        }
        drop_all(NULL);
    }
}

static void distinct_by_marks(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 48; variant++) {
        int64_t n = sizes[1 + variant % (SIZES - 1)], base = (int64_t)draw(99) - 50,
                size = 1 + (int64_t)draw(variant % 3 ? 300 : 20000);
        int64_t *x = numbers(n, (uint64_t)size, base), words = (size + 63) / 64, blocks = (words + 63) / 64, total = 0;
        int32_t dtype = dtypes[variant & 1];
        peri_k_mark_args a = {
            .x = ints(x, n, dtype), .n = n, .base = base, .size = size, .dtype = dtype, .parts = 1 + (int64_t)draw(4)};
        a.marks = room(8 * words * a.parts);
        compare("marks", PERI_K_mark_set, &a, a.parts, (output[]){OUTPUT(a.marks, 8 * words * a.parts)}, 1);
        a.words = room(8 * words);
        a.sums = room(8 * blocks);
        output counted[] = {OUTPUT(a.words, 8 * words), OUTPUT(a.sums, 8 * blocks)};
        compare("count", PERI_K_mark_count, &a, blocks, counted, 2);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t own = a.sums[b];
            a.sums[b] = total;
            total += own;
        }
        a.total = total;
        a.ranks = room(4 * words);
        a.unique = room(total * size_of(dtype));
        output written[] = {OUTPUT(a.ranks, 4 * words), OUTPUT(a.unique, total * size_of(dtype))};
        compare("write", PERI_K_mark_write, &a, blocks, written, 2);
        a.inverse = variant & 2 ? room(8 * n) : NULL;
        a.tallies = variant & 4 || !a.inverse ? room(4 * total * a.parts) : NULL;
        output found[] = {OUTPUT(a.inverse, 8 * n), OUTPUT(a.tallies, 4 * total * a.parts)};
        if (!a.inverse) found[0] = found[1];
        compare("lookup", PERI_K_mark_lookup, &a, a.parts, found, (a.inverse != NULL) + (a.tallies != NULL));
        if (a.tallies) {
            a.counts = room(8 * total);
            compare("tally", PERI_K_mark_tally, &a, total, (output[]){OUTPUT(a.counts, 8 * total)}, 1);
        }
        drop_all(NULL);
    }
}

/* -- quantized rows ------------------------------------------------------------------------------------------------ */

static uint16_t half_of(float x, int32_t dtype)
{
    uint16_t h;
    peri_k_convert_args c = {.dst = &h, .src = &x, .dst_dtype = dtype, .src_dtype = PERI_F32, .ndim = 0};
    peri_kernels_ref.fn[PERI_K_convert](&c, 0, 1);
    return h;
}

/** Rows of every kind: ordinary, constant, tiny, huge, with -0, NaN, infinities and subnormal numbers. */
static void *rows_of_numbers(int64_t rows, int64_t cols, int32_t dtype)
{
    static const float odd[] = {0.0f, -0.0f, 1e-40f, -3e-42f, 65504.0f, 1e30f, -3e38f, 1e-7f, 240.0f, 0.9375f};
    int64_t size = dtype == PERI_F32 ? 4 : 2;
    char *p = room(rows * cols * size);
    for (int64_t r = 0; r < rows; r++) {
        uint64_t kind = draw(12);
        float constant = ((float)draw(1000) - 500) / 77, scale = kind == 3 ? 1e-9f : kind == 4 ? 1e12f : 1;
        uint64_t bad = kind == 5 && cols ? draw((uint64_t)cols) : UINT64_MAX;
        for (int64_t c = 0; c < cols; c++) {
            float x = ((float)draw(20000) - 10000) / 3000 * scale;
            if (kind == 1) x = constant;
            if (kind == 2) x = odd[draw(sizeof odd / sizeof *odd)];
            if (kind == 6) x = draw(2) ? 0.0f : -0.0f;
            if ((uint64_t)c == bad) x = draw(2) ? NAN : draw(2) ? INFINITY : -INFINITY;
            uint16_t h = dtype == PERI_F32 ? 0 : half_of(x, dtype);
            memcpy(p + (r * cols + c) * size, dtype == PERI_F32 ? (void *)&x : (void *)&h, (size_t)size);
        }
    }
    return p;
}

static void quantized(void **unused)
{
    (void)unused;
    static const int64_t widths[] = {0, 1, 2, 3, 4, 15, 16, 17, 31, 33, 100, 255, 256, 257, 600, 1023};
    static const int32_t floats[] = {PERI_F32, PERI_F16, PERI_BF16};
    for (int variant = 0; variant < 16 * 24; variant++) {
        int64_t cols = widths[variant % 16], rows = (int64_t)draw(9);
        int kind = variant / 16 % 8; /* int8 f32, int8, int4, int2 f16, fp8 three times, fp8 with scale */
        bool fp8 = kind >= 4, scaled = !fp8 || kind == 7;
        peri_k_rows_args a = {.cols = cols,
                              .dtype = floats[variant / 128],
                              .bits = kind == 2   ? 4
                                      : kind == 3 ? 2
                                                  : 8,
                              .exponent_bits = fp8 ? 2 + (int32_t)draw(4) : 0,
                              .exponent_bias = fp8 ? (int32_t)draw(40) : 0,
                              .half = kind >= 1 && kind <= 3};
        int64_t codes = (cols * a.bits + 7) / 8, scales = scaled ? (a.half ? 4 : 8) : 0,
                size = a.dtype == PERI_F32 ? 4 : 2;
        if (kind == 7) codes = (codes + 3) & ~(int64_t)3;
        bool front = draw(2);
        a.stride = codes + scales + (int64_t)draw(3);
        a.codes_at = front ? scales : 0;
        a.scale_at = !scaled ? -1 : front ? 0 : codes;
        a.x = rows_of_numbers(rows, cols, a.dtype);
        float *limits = room(8 * rows);
        for (int64_t r = 0; r < rows; r++) {
            limits[2 * r] = -(float)draw(30) / 10;
            limits[2 * r + 1] = draw(9) ? (float)draw(40) / 10 : NAN;
        }
        if (a.half && variant % 5 == 0) a.min_max = limits;
        a.bytes = room(rows * a.stride);
        compare("quantize", PERI_K_rows_quantize, &a, rows, (output[]){OUTPUT(a.bytes, rows * a.stride)}, 1);
        a.x = room(rows * cols * size);
        compare("restore", PERI_K_rows_restore, &a, rows, (output[]){NUMBERS(a.x, rows * cols * size, a.dtype)}, 1);
        a.bytes = random_bytes(rows * a.stride); /* any bytes */
        for (int64_t r = 0; r < rows && scaled; r++) { /* but for scales: which NaN comes of several is not said */
            float pair[2] = {(float)draw(100) / 9, (float)draw(100) / 9};
            uint16_t halves[2] = {half_of(pair[0], PERI_F16), half_of(pair[1], PERI_F16)};
            memcpy((char *)a.bytes + r * a.stride + a.scale_at, a.half ? (void *)halves : (void *)pair, a.half ? 4 : 8);
        }
        compare("restore", PERI_K_rows_restore, &a, rows, (output[]){NUMBERS(a.x, rows * cols * size, a.dtype)}, 1);
        drop_all(NULL);
    }
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(checks, drop_all),            cmocka_unit_test_teardown(permutations, drop_all),
        cmocka_unit_test_teardown(segments, drop_all),          cmocka_unit_test_teardown(levels, drop_all),
        cmocka_unit_test_teardown(sorting, drop_all),           cmocka_unit_test_teardown(distinct_by_order, drop_all),
        cmocka_unit_test_teardown(distinct_by_marks, drop_all), cmocka_unit_test_teardown(quantized, drop_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
