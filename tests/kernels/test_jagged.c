/* SPDX-License-Identifier: Apache-2.0
 *
 * test_jagged.c: the jagged and sparse kernels: every instruction set gives ref's bits, however ranges are split, on
 * random and on malformed input. Buffers are exactly as large as they must be, so that the address sanitizer sees
 * overruns.
 * deadline: 300 s
 * takes: 13 s
 */
#include "jagged_cases.h"

#include "kernels/divide.h"

static const int64_t counts[] = {0, 1, 7, 100, 4095, 4096, 4097, 20000};

static void cumulative_sums(void **unused)
{
    (void)unused;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int variant = 0; variant < 2 * 2 * 3 * 3; variant++) {
            int64_t rows = 1 + (int64_t)draw(3), cols = counts[c], n = rows * cols;
            int64_t blocks = (cols + PERI_JAGGED_BLOCK - 1) / PERI_JAGGED_BLOCK;
            /* unchecked, checked and good, checked and malformed */
            int32_t mode = variant / 4 % 3, check = variant / 12;
            if (blocks < 1) blocks = 1;
            int64_t *x = random_lengths(n, 6), most = 0;
            for (int64_t r = 0; r < rows; r++) {
                int64_t sum = 0;
                for (int64_t i = 0; i < cols; i++) sum += x[r * cols + i];
                most = sum > most ? sum : most;
            }
            for (int k = 0; check == 2 && n && k < 4; k++)
                x[draw((uint64_t)n)] = draw(2) ? -(int64_t)draw(9) : (int64_t)draw(2) * INT32_MAX;
            peri_k_cumsum_args a = {.x = ints(x, n, dtypes[variant & 1]),
                                    .rows = rows,
                                    .cols = cols,
                                    .blocks = blocks,
                                    .mode = mode,
                                    .limit = check ? most - (int64_t)draw(2) * (most > 9 ? 9 : 0) : -1,
                                    .x_dtype = dtypes[variant & 1],
                                    .y_dtype = dtypes[variant >> 1 & 1]};
            int64_t y_bytes = rows * (cols + (mode == PERI_CUMSUM_COMPLETE)) * size_of(a.y_dtype);
            a.y = room(y_bytes);
            a.sums = room(8 * rows * (blocks + 1));
            a.bad = room(8 * rows * blocks);
            a.most = room(8 * rows * blocks);
            output found[] = {OUTPUT(a.sums, 8 * rows * (blocks + 1)), OUTPUT(a.bad, 8 * rows * blocks),
                              OUTPUT(a.most, 8 * rows * blocks)};
            compare("cumsum", PERI_K_cumsum_sums, &a, rows * blocks, found, 3);
            compare("cumsum", PERI_K_cumsum_scan, &a, rows, (output[]){OUTPUT(a.sums, 8 * rows * (blocks + 1))}, 1);
            compare("cumsum", PERI_K_cumsum_write, &a, rows * blocks, (output[]){OUTPUT(a.y, y_bytes)}, 1);
            if (a.limit >= 0 && mode == PERI_CUMSUM_COMPLETE) /* the promise to those who read by these offsets */
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t i = 0; i < cols; i++) {
                        int64_t at = r * (cols + 1) + i;
                        int64_t from = a.y_dtype == PERI_I32 ? ((int32_t *)a.y)[at] : ((int64_t *)a.y)[at];
                        int64_t to = a.y_dtype == PERI_I32 ? ((int32_t *)a.y)[at + 1] : ((int64_t *)a.y)[at + 1];
                        assert_true(0 <= from && from <= to && to <= a.limit);
                    }
            drop_all(NULL);
        }
}

static void checks(void **unused)
{
    (void)unused;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int variant = 0; variant < 2 * 3 * 2; variant++) {
            int64_t n = counts[c], blocks = n / PERI_JAGGED_BLOCK + 1, *lengths = random_lengths(n, 5),
                    *offsets = complete(lengths, n);
            int64_t limit = offsets[n];
            for (int k = 0; variant >= 6 && n && k < 3; k++) {
                if (draw(2)) offsets[draw((uint64_t)n)] += draw(2) ? 1000000 : -(int64_t)draw(100) - 1;
                else lengths[draw((uint64_t)n)] += 1;
            }
            int32_t with = variant / 2 % 3;
            peri_k_jagged_check_args a = {.offsets = ints(offsets, n + 1, dtypes[variant & 1]),
                                          .bags = n,
                                          .limit = limit,
                                          .lengths = with == 2 ? NULL : ints(lengths, n, dtypes[with]),
                                          .offsets_dtype = dtypes[variant & 1],
                                          .lengths_dtype = with == 2 ? 0 : dtypes[with]};
            a.bad = room(8 * blocks);
            a.most = room(8 * blocks);
            output found[] = {OUTPUT(a.bad, 8 * blocks), OUTPUT(a.most, 8 * blocks)};
            compare("check", PERI_K_jagged_check, &a, (n + PERI_JAGGED_BLOCK - 1) / PERI_JAGGED_BLOCK, found, 2);
            for (int o = 0; o < 2; o++) {
                peri_k_jagged_lengths_args l = {
                    .offsets = a.offsets, .offsets_dtype = a.offsets_dtype, .out_dtype = dtypes[o]};
                l.out = room(n * size_of(l.out_dtype));
                compare("lengths", PERI_K_jagged_lengths, &l, n, (output[]){OUTPUT(l.out, n * size_of(l.out_dtype))},
                        1);
            }
            drop_all(NULL);
        }
}

static const int64_t widths[] = {1, 2, 4, 8, 12, 64, 100, 1000};

static void copies(void **unused)
{
    (void)unused;
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (int variant = 0; variant < 24; variant++) {
            int64_t width = widths[w], n = variant % 4 == 3 ? 0 : 1 + (int64_t)draw(400), mean = variant & 1 ? 3 : 40;
            if (width > 100) mean = 2;
            int64_t *lengths = random_lengths(n, mean), *in = complete(lengths, n),
                    segments = n ? (int64_t)draw(2 * (uint64_t)n) : 0;
            int64_t *permute = room(8 * segments), *taken = room(8 * segments);
            for (int64_t t = 0; t < segments; t++) {
                permute[t] = (int64_t)draw((uint64_t)n);
                taken[t] = lengths[permute[t]];
            }
            int64_t *out = complete(taken, segments), rows = out[segments], extra = (int64_t)draw(3);
            int32_t p = dtypes[variant / 2 & 1], o = dtypes[variant / 4 & 1], i = dtypes[variant / 8 & 1];
            peri_k_jagged_copy_args a = {.src = random_bytes(in[n] * width),
                                         .out_offsets = ints(out, segments + 1, o),
                                         .in_offsets = ints(in, n + 1, i),
                                         .permute = ints(permute, segments, p),
                                         .width = width,
                                         .segments = segments,
                                         .out_dtype = o,
                                         .in_dtype = i,
                                         .permute_dtype = p};
            a.dst = room((rows + extra) * width);
            compare("copy", PERI_K_jagged_copy, &a, rows + extra, (output[]){OUTPUT(a.dst, (rows + extra) * width)}, 1);
            /* starts instead of a permutation */
            int64_t *starts = room(8 * segments);
            for (int64_t t = 0; t < segments; t++) starts[t] = in[permute[t]];
            a.in_offsets = starts, a.in_dtype = PERI_I64, a.permute = NULL;
            compare("copy of starts", PERI_K_jagged_copy, &a, rows, (output[]){OUTPUT(a.dst, (rows + extra) * width)},
                    1);
            /* segments of equal size */
            int64_t step = 1 + (int64_t)draw(9);
            peri_k_jagged_copy_args e = {.src = random_bytes(n * step * width),
                                         .permute = ints(permute, segments, p),
                                         .width = width,
                                         .segments = segments,
                                         .out_step = step,
                                         .in_step = step,
                                         .permute_dtype = p};
            e.dst = room(segments * step * width);
            compare("copy of steps", PERI_K_jagged_copy, &e, segments * step,
                    (output[]){OUTPUT(e.dst, segments * step * width)}, 1);
            drop_all(NULL);
        }
}

static void sums(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 40; variant++) {
        int64_t parts = 1 + (int64_t)draw(30), columns = 1 + (int64_t)draw(5), *lengths = random_lengths(parts, 6);
        int64_t *in = complete(lengths, parts), *uses = room(8 * parts), n = 0;
        for (int64_t p = 0; p < parts; p++) n += uses[p] = variant % 4 == 0 ? (int64_t)draw(60) : (int64_t)draw(4);
        int64_t *first = complete(uses, parts), *list = room(8 * n), *taken = room(8 * n);
        for (int64_t i = 0; i < n; i++) list[i] = i;
        for (int64_t i = n - 1; i > 0; i--) { /* segments of the source in any order */
            int64_t j = (int64_t)draw((uint64_t)i + 1), swap = list[i];
            list[i] = list[j], list[j] = swap;
        }
        for (int64_t p = 0; p < parts; p++)
            for (int64_t j = first[p]; j < first[p + 1]; j++) taken[list[j]] = lengths[p];
        int64_t *out = complete(taken, n);
        bool wide = variant % 5 == 4;
        float *src = random_floats(out[n] * columns * 2);
        peri_k_jagged_sum_args a = {.src = src,
                                    .in_offsets = in,
                                    .out_offsets = out,
                                    .list_offsets = first,
                                    .list = list,
                                    .columns = columns,
                                    .segments = parts,
                                    .dtype = wide ? PERI_F64 : PERI_F32};
        if (wide) {
            double *numbers = room(8 * out[n] * columns);
            for (int64_t i = 0; i < out[n] * columns; i++) numbers[i] = (double)src[i];
            a.src = numbers;
        }
        int64_t bytes = in[parts] * columns * (wide ? 8 : 4);
        a.dst = room(bytes);
        compare("sum", PERI_K_jagged_sum, &a, in[parts], (output[]){OUTPUT(a.dst, bytes)}, 1);
        drop_all(NULL);
    }
}

static void padding(void **unused)
{
    (void)unused;
    static const int64_t elements[] = {1, 2, 4, 8, 16};
    for (int variant = 0; variant < 60; variant++) {
        int64_t bags = (int64_t)draw(50), *offsets = complete(random_lengths(bags, 4), bags),
                element = elements[variant % 5];
        int64_t width = element * (variant % 3 == 0 ? 1 : 1 + (int64_t)draw(20)), max = (int64_t)draw(12);
        int32_t dtype = dtypes[variant & 1];
        peri_k_jagged_padded_args a = {.values = random_bytes(offsets[bags] * width),
                                       .offsets = ints(offsets, bags + 1, dtype),
                                       .max = max,
                                       .width = width,
                                       .element = element,
                                       .padding = {draw(UINT64_MAX), draw(UINT64_MAX)},
                                       .offsets_dtype = dtype};
        a.padded = room(bags * max * width);
        compare("to padded", PERI_K_jagged_to_padded, &a, bags, (output[]){OUTPUT(a.padded, bags * max * width)}, 1);
        compare("from padded", PERI_K_jagged_from_padded, &a, bags, (output[]){OUTPUT(a.values, offsets[bags] * width)},
                1);
        drop_all(NULL);
    }
}

static void columns(void **unused)
{
    (void)unused;
    static const int32_t floats[] = {PERI_F32, PERI_F64, PERI_F16, PERI_BF16};
    for (int variant = 0; variant < 40; variant++) {
        int32_t dtype = floats[variant % 4];
        int64_t size = dtype == PERI_F64 ? 8 : dtype == PERI_F32 ? 4 : 2, rows = (int64_t)draw(30);
        int64_t blocks = 1 + (int64_t)draw(8), total = 0;
        int64_t *items = room(8 * blocks * PERI_ITEM_WORDS), *sources = room(8 * blocks * 5 * PERI_SOURCE_WORDS),
                used = 0;
        int64_t *at = room(8 * blocks);
        for (int64_t i = 0; i < blocks; i++) {
            int64_t *item = items + i * PERI_ITEM_WORDS;
            item[PERI_ITEM_COLUMNS] = (int64_t)draw(70);
            item[PERI_ITEM_FIRST] = used;
            item[PERI_ITEM_SOURCES] = (int64_t)draw(5);
            at[i] = total;
            total += item[PERI_ITEM_COLUMNS];
            for (int64_t s = 0; s < item[PERI_ITEM_SOURCES]; s++, used++) {
                int64_t stride = item[PERI_ITEM_COLUMNS] + (int64_t)draw(5);
                char *src = room(rows * stride * size);
                for (int64_t e = 0; e < rows * stride; e++) {
                    float x = (float)draw(1000) / 8 - 50;
                    double wide = (double)x;
                    uint16_t half = (uint16_t)(0x3000 + draw(0x1000)), *h = (uint16_t *)src;
                    if (size == 8) memcpy(src + 8 * e, &wide, 8);
                    else if (size == 4) memcpy(src + 4 * e, &x, 4);
                    else h[e] = half;
                }
                sources[used * PERI_SOURCE_WORDS + PERI_SOURCE_ADDRESS] = (int64_t)(intptr_t)src;
                sources[used * PERI_SOURCE_WORDS + PERI_SOURCE_STRIDE] = stride;
            }
        }
        /* The table holds addresses of the output, so every run gets its own buffer at the same place. */
        char *dst = room(rows * total * size), *want = room(rows * total * size);
        for (int64_t i = 0; i < blocks; i++) {
            items[i * PERI_ITEM_WORDS + PERI_ITEM_DST] = (int64_t)(intptr_t)(dst + at[i] * size);
            items[i * PERI_ITEM_WORDS + PERI_ITEM_STRIDE] = total;
        }
        peri_k_columns_sum_args a = {.items = items, .sources = sources, .n_items = blocks, .dtype = dtype};
        peri_kernels_ref.fn[PERI_K_columns_sum](&a, 0, rows);
        memcpy(want, dst, (size_t)(rows * total * size));
        for (int i = 0; i < ISAS; i++)
            for (int split = 0; kernels_of(isas[i]) && split < SPLITS; split++) {
                memset(dst, 0x33, (size_t)(rows * total * size));
                run(kernels_of(isas[i]), PERI_K_columns_sum, &a, rows, split);
                if (memcmp(dst, want, (size_t)(rows * total * size)) != 0)
                    fail_msg("columns of dtype %d on %s, split %d", dtype, isas[i], split);
            }
        drop_all(NULL);
    }
}

static void reports(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 40; variant++) {
        int64_t bags = (int64_t)draw(20), *lengths = random_lengths(bags, 3), *offsets = complete(lengths, bags);
        int64_t blocks = 1 + (int64_t)draw(5), n_bounds = 1 + (int64_t)draw(4), *bounds = room(8 * n_bounds);
        int64_t *bad = room(8 * blocks), *most = room(8 * blocks);
        for (int64_t b = 0; b < blocks; b++) {
            bad[b] = draw(3) || !bags ? INT64_MAX : (int64_t)draw((uint64_t)bags);
            most[b] = (int64_t)draw(9);
        }
        for (int64_t i = 0; i < n_bounds; i++) bounds[i] = (int64_t)draw((uint64_t)bags + 1);
        int32_t d = dtypes[variant & 1], l = dtypes[variant >> 1 & 1];
        peri_k_jagged_report_args a = {.lengths = variant % 3 ? ints(lengths, bags, l) : NULL,
                                       .offsets = ints(offsets, bags + 1, d),
                                       .bad = bad,
                                       .most = most,
                                       .total = variant % 5 ? &bad[0] : NULL,
                                       .bounds = variant % 7 ? bounds : NULL,
                                       .bags = bags,
                                       .blocks = blocks,
                                       .step = bags / n_bounds,
                                       .n_bounds = n_bounds,
                                       .lengths_dtype = l,
                                       .offsets_dtype = d};
        a.report = room(8 * (PERI_REPORT_HEADER + n_bounds));
        compare("report", PERI_K_jagged_report, &a, 1,
                (output[]){OUTPUT(a.report, 8 * (PERI_REPORT_HEADER + n_bounds))}, 1);
        peri_k_jagged_bounds_args g = {.offsets = a.offsets,
                                       .bounds = a.bounds,
                                       .step = a.step,
                                       .offsets_dtype = d,
                                       .out_dtype = l,
                                       .rebase = variant % 2};
        g.out = room(n_bounds * size_of(l));
        compare("bounds", PERI_K_jagged_bounds, &g, n_bounds, (output[]){OUTPUT(g.out, n_bounds * size_of(l))}, 1);
        drop_all(NULL);
    }
}

/* -- buckets ------------------------------------------------------------------------------------------------------- */

/** Ids of one feature: below, at and beyond what its buckets hold; huge ones now and then. */
static uint64_t random_id(uint64_t end, bool wide)
{
    uint64_t all = wide ? UINT64_MAX : UINT32_MAX;
    switch (draw(20)) {
    case 0: return draw(all);
    case 1: return all - draw(5);
    case 2: return wide ? ((uint64_t)1 << 51) - 2 + draw(4) : all;
    case 3: return (end + draw(5)) & all;
    case 4: return (end - 1 - draw(5)) & all;
    default: return end && end <= all ? draw(end) : draw(all);
    }
}

static void buckets(void **unused)
{
    (void)unused;
    static const int64_t many[] = {1, 2, 3, 8, 64, 65, 200, 1025};
    for (int variant = 0; variant < 96; variant++) {
        int64_t p = many[variant % 8], features = 1 + (int64_t)draw(4), batch = (int64_t)draw(variant % 3 ? 30 : 3),
                bags = 0;
        int64_t *table = room(8 * (features + 1) * PERI_BUCKET_WORDS), *bounds = room(8 * features * (p + 1)), *lengths;
        uint64_t *end = room(8 * features);
        for (int64_t f = 0; f <= features; f++) {
            int64_t *w = table + f * PERI_BUCKET_WORDS;
            memset(w, 0, 8 * PERI_BUCKET_WORDS);
            w[PERI_BUCKET_FIRST_BAG] = bags;
            if (f == features) break;
            bags += variant & 1 ? (int64_t)draw(2 * (uint64_t)batch + 1) : batch;
            w[PERI_BUCKET_BOUNDS] = -1;
            w[PERI_BUCKET_KEEP] = draw(4) == 0;
            int kind = (int)draw(5);
            uint64_t below = kind == 0 ? 1 : kind == 1 ? 10 : kind == 2 ? (uint64_t)1 << 53 : 1 << 24;
            w[PERI_BUCKET_BLOCK] = (int64_t)draw(below);
            peri_k_divisor block = peri_k_divisor_of(w[PERI_BUCKET_BLOCK] > 0 ? w[PERI_BUCKET_BLOCK] : 1);
            w[PERI_BUCKET_MULTIPLIER] = (int64_t)block.multiplier;
            w[PERI_BUCKET_SHIFT] = block.shift;
            end[f] = (uint64_t)w[PERI_BUCKET_BLOCK] * (uint64_t)p;
            if (kind != 4) continue;
            w[PERI_BUCKET_BOUNDS] = f * (p + 1);
            bounds[f * (p + 1)] = 0;
            for (int64_t b = 0; b < p; b++) bounds[f * (p + 1) + b + 1] = bounds[f * (p + 1) + b] + (int64_t)draw(40);
            end[f] = (uint64_t)bounds[f * (p + 1) + p];
        }
        lengths = random_lengths(bags, variant % 5 == 0 ? 60 : 3);
        /* bags of several tiles of a GPU, short ones beside them */
        for (int64_t i = 0; i < bags && variant % 12 > 9 && p < 66; i++)
            if (draw((uint64_t)bags) < 3) lengths[i] = (int64_t)draw(5000);
        int64_t *offsets = complete(lengths, bags), n = offsets[bags], slots = bags * p, *ids = room(8 * n);
        bool wide = variant & 2;
        int32_t dtype = wide ? PERI_I64 : PERI_I32, o = dtypes[variant >> 2 & 1], l = dtypes[variant >> 3 & 1];
        for (int64_t f = 0; f < features; f++)
            for (int64_t i = offsets[table[f * PERI_BUCKET_WORDS]]; i < offsets[table[(f + 1) * PERI_BUCKET_WORDS]];
                 i++)
                ids[i] = (int64_t)random_id(end[f], wide);
        int64_t width = variant % 3 == 0 ? 0 : variant % 3 == 1 ? 4 : 12;
        peri_k_bucketize_args a = {.offsets = ints(offsets, bags + 1, o),
                                   .ids = ints(ids, n, dtype),
                                   .features = table,
                                   .bounds = bounds,
                                   .weights = width ? random_bytes(n * width) : NULL,
                                   .bags = bags,
                                   .buckets = p,
                                   .n_features = features,
                                   .width = width,
                                   .n = n,
                                   .offsets_dtype = o,
                                   .ids_dtype = dtype,
                                   .lengths_dtype = l};
        a.lengths = room(slots * size_of(l));
        compare("bucketize", PERI_K_bucketize_count, &a, bags, (output[]){OUTPUT(a.lengths, slots * size_of(l))}, 1);
        int64_t *starts = room(8 * (slots + 1)), sum = 0;
        for (int64_t s = 0; s < slots; s++) {
            starts[s] = sum;
            sum += l == PERI_I32 ? ((int32_t *)a.lengths)[s] : ((int64_t *)a.lengths)[s];
        }
        assert_int_equal(sum, n);
        a.starts = starts;
        a.new_ids = room(n * size_of(dtype));
        a.new_weights = room(n * width);
        a.positions = variant % 4 == 1 ? room(n * size_of(dtype)) : NULL;
        a.unbucketize = variant % 4 != 2 ? room(8 * n) : NULL;
        a.mapping = variant % 4 == 3 ? room(4 * n) : NULL;
        output outputs[] = {OUTPUT(a.new_ids, n * size_of(dtype)), OUTPUT(a.new_weights, n * width),
                            OUTPUT(a.positions, n * size_of(dtype)), OUTPUT(a.unbucketize, 8 * n),
                            OUTPUT(a.mapping, 4 * n)};
        int count = 0;
        for (int i = 0; i < 5; i++)
            if (*outputs[i].field) outputs[count++] = outputs[i];
        compare("bucketize", PERI_K_bucketize_place, &a, bags, outputs, count);
        drop_all(NULL);
    }
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(cumulative_sums, drop_all), cmocka_unit_test_teardown(checks, drop_all),
        cmocka_unit_test_teardown(copies, drop_all),          cmocka_unit_test_teardown(sums, drop_all),
        cmocka_unit_test_teardown(padding, drop_all),         cmocka_unit_test_teardown(columns, drop_all),
        cmocka_unit_test_teardown(reports, drop_all),         cmocka_unit_test_teardown(buckets, drop_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
