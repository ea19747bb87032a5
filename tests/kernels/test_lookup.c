/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lookup.c: kernels over tables found by id, pruned tables, hashes and calibration: every instruction set gives
 * ref's bits, however ranges are split.
 * deadline: 300 s
 */
#include "jagged_cases.h"

#include <math.h>

static int64_t element_of(int32_t dtype)
{
    return dtype == PERI_F64 || dtype == PERI_I64 ? 8 : dtype == PERI_F16 ? 2 : 4;
}

/** Ids of @tables tables of the sizes that @starts cuts, `step` bags each; now and then one is bad. */
static int64_t *ids_of(const int64_t *offsets, const int64_t *starts, int64_t tables, int64_t step, bool spoil)
{
    int64_t n = offsets[tables * step], *ids = room(8 * n);
    for (int64_t t = 0; t < tables; t++)
        for (int64_t i = offsets[t * step]; i < offsets[(t + 1) * step]; i++) {
            int64_t size = starts[t + 1] - starts[t];
            ids[i] = size ? (int64_t)draw((uint64_t)size) : 3;
            if (spoil && draw(40) == 0) ids[i] = draw(2) ? -1 - (int64_t)draw(3) : size + (int64_t)draw(3);
        }
    return ids;
}

static void tables(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 96; variant++) {
        int64_t count = 1 + (int64_t)draw(5), step = 1 + (int64_t)draw(4), bags = count * step;
        int64_t *offsets = complete(random_lengths(bags, variant % 8 ? 6 : 2000), bags), n = offsets[bags];
        int64_t *starts = complete(random_lengths(count, 9), count), blocks = blocks_of(n);
        int32_t d = dtypes[variant & 1], o = dtypes[variant >> 1 & 1], s = dtypes[variant >> 2 & 1],
                r = dtypes[variant >> 3 & 1];
        peri_k_table_rows_args a = {.ids = ints(ids_of(offsets, starts, count, step, variant % 3 == 0), n, d),
                                    .offsets = ints(offsets, bags + 1, o),
                                    .starts = ints(starts, count + 1, s),
                                    .n = n,
                                    .tables = count,
                                    .step = step,
                                    .ids_dtype = d,
                                    .offsets_dtype = o,
                                    .starts_dtype = s,
                                    .out_dtype = r};
        if (variant & 16) {
            a.remap = ints(numbers(starts[count], 90, -1), starts[count], d);
            a.remap_dtype = d;
        }
        a.out = room(n * size_of(r));
        a.bag = variant & 32 ? room(8 * n) : NULL;
        a.bad = room(8 * blocks);
        output outs[] = {OUTPUT(a.out, n * size_of(r)), OUTPUT(a.bad, 8 * blocks), OUTPUT(a.bag, 8 * n)};
        compare("rows of tables", PERI_K_table_rows, &a, blocks, outs, a.bag ? 3 : 2);
        drop_all(NULL);
    }
}

/** The lists of equal numbers among x[n], as sort_lists makes them. */
static void lists_of(const int64_t *x, int64_t n, int64_t lists, int64_t **list, int64_t **offsets)
{
    *list = room(8 * n);
    *offsets = room(8 * (lists + 1));
    int64_t at = 0;
    for (int64_t l = 0; l < lists; l++) {
        (*offsets)[l] = at;
        for (int64_t i = 0; i < n; i++)
            if (x[i] == l) (*list)[at++] = i;
    }
    (*offsets)[lists] = at;
}

static void batches(void **unused)
{
    (void)unused;
    static const int64_t elements[] = {4, 8, 2, 1, 16};
    for (int variant = 0; variant < 60; variant++) {
        int64_t count = 1 + (int64_t)draw(5), shared = (int64_t)draw(9);
        bool side = variant & 1;
        peri_k_batch_select_args a = {.matrices = count, .element = elements[variant / 2 % 5]};
        int64_t *w = room(8 * (count + 1) * PERI_SELECT_WORDS), *chosen = room(8 * 64);
        memset(w, 0, sizeof *w * PERI_SELECT_WORDS);
        a.table = w;
        for (int64_t m = 0; m < count; m++, w += PERI_SELECT_WORDS) {
            int64_t rows = 1 + (int64_t)draw(6), columns = (int64_t)draw(variant % 3 ? 5 : 40),
                    k = side ? shared : (int64_t)draw(9);
            for (int64_t i = 0; i < k; i++)
                chosen[w[PERI_SELECT_PLACE] + i] = w[PERI_SELECT_ROW] + (int64_t)draw((uint64_t)rows);
            w[PERI_SELECT_COLUMNS] = columns;
            w[PERI_SELECT_WORDS + PERI_SELECT_PLACE] = w[PERI_SELECT_PLACE] + k;
            w[PERI_SELECT_WORDS + PERI_SELECT_ROW] = w[PERI_SELECT_ROW] + rows;
            w[PERI_SELECT_WORDS + PERI_SELECT_FROM] = w[PERI_SELECT_FROM] + rows * columns;
            w[PERI_SELECT_WORDS + PERI_SELECT_TO] = w[PERI_SELECT_TO] + (side ? columns : k * columns);
        }
        int64_t n = w[PERI_SELECT_PLACE], rows = w[PERI_SELECT_ROW], from = w[PERI_SELECT_FROM];
        int64_t to = w[PERI_SELECT_TO] * (side ? shared : 1);
        a.pitch = side ? w[PERI_SELECT_TO] : 0;
        a.rows = chosen;
        a.matrix = random_bytes(from * a.element);
        a.result = room(to * a.element);
        compare("rows of matrices", PERI_K_batch_select, &a, n, (output[]){OUTPUT(a.result, to * a.element)}, 1);
        if (a.element == 4 || a.element == 8) {
            int64_t *list, *offsets;
            lists_of(chosen, n, rows, &list, &offsets);
            a.list = list;
            a.list_offsets = offsets;
            a.result = values_of(to, a.element == 8 ? PERI_F64 : PERI_F32);
            a.matrix = room(from * a.element);
            compare("their gradients", PERI_K_batch_select_sum, &a, rows,
                    (output[]){OUTPUT(a.matrix, from * a.element)}, 1);
        }
        drop_all(NULL);
    }
}

static void sums(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 48; variant++) {
        int64_t count = 1 + (int64_t)draw(4), batch = (int64_t)draw(variant % 4 ? 6 : 60), bags = count * batch,
                tasks = (int64_t)draw(4);
        int64_t *offsets = complete(random_lengths(bags, 4), bags), n = offsets[bags], width = 1 + (int64_t)draw(20);
        int64_t *rows = numbers(n, (uint64_t)width, 0), *bag = room(8 * n), *list, *first;
        int32_t d = variant & 1 ? PERI_F64 : PERI_F32, o = dtypes[variant >> 1 & 1];
        for (int64_t b = 0; b < bags; b++)
            for (int64_t i = offsets[b]; i < offsets[b + 1]; i++) bag[i] = b;
        lists_of(rows, n, width, &list, &first);
        peri_k_unary_sum_args a = {.weight = values_of(tasks * width, d),
                                   .offsets = ints(offsets, bags + 1, o),
                                   .rows = rows,
                                   .bag = bag,
                                   .list = list,
                                   .list_offsets = first,
                                   .tasks = tasks,
                                   .width = width,
                                   .tables = count,
                                   .batch = batch,
                                   .dtype = d,
                                   .offsets_dtype = o};
        a.out = room(tasks * bags * element_of(d));
        compare("sums", PERI_K_unary_sum, &a, bags, (output[]){OUTPUT(a.out, tasks * bags * element_of(d))}, 1);
        a.out = values_of(tasks * bags, d);
        a.weight = room(tasks * width * element_of(d));
        compare("their gradients", PERI_K_unary_sum_back, &a, width,
                (output[]){OUTPUT(a.weight, tasks * width * element_of(d))}, 1);
        peri_k_weights_by_id_args l = {
            .weights = values_of(n, d), .ids = ints(rows, n, o), .n = n, .dtype = d, .ids_dtype = o};
        l.out = room(2 * width * element_of(d));
        compare("weights", PERI_K_weights_by_id, &l, width, (output[]){OUTPUT(l.out, 2 * width * element_of(d))}, 1);
        l.weights = NULL, l.numbers = width;
        l.out = room(width * 8);
        compare("counts", PERI_K_weights_by_id, &l, width, (output[]){OUTPUT(l.out, width * 8)}, 1);
        drop_all(NULL);
    }
}

static void slices(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 32; variant++) {
        int64_t n = variant % 4 ? (int64_t)draw(40) : 9000, *lengths = random_lengths(n, 5),
                *offsets = complete(lengths, n);
        int64_t *start = room(8 * n);
        for (int64_t b = 0; b < n; b++) {
            start[b] = (int64_t)draw((uint64_t)lengths[b] + 1);
            if (variant % 3 == 0 && draw(50) == 0) start[b] = draw(2) ? -1 : lengths[b] + 1;
        }
        int32_t o = dtypes[variant & 1], s = dtypes[variant >> 1 & 1], l = dtypes[variant >> 2 & 1];
        peri_k_slice_bounds_args a = {.offsets = ints(offsets, n + 1, o),
                                      .start = ints(start, n, s),
                                      .bags = n,
                                      .length = (int64_t)draw(7),
                                      .offsets_dtype = o,
                                      .start_dtype = s,
                                      .lengths_dtype = l};
        a.starts = room(8 * n);
        a.lengths = room(n * size_of(l));
        a.bad = room(8 * blocks_of(n));
        output outs[] = {OUTPUT(a.starts, 8 * n), OUTPUT(a.lengths, n * size_of(l)), OUTPUT(a.bad, 8 * blocks_of(n))};
        compare("slices", PERI_K_slice_bounds, &a, blocks_of(n), outs, 3);
        drop_all(NULL);
    }
}

static void masks(void **unused)
{
    (void)unused;
    static const int64_t sizes[] = {0, 1, 17, 64, 4095, 4096, 4097, 9000}, widths[] = {4, 8, 1, 2, 3, 16, 40, 100, 0};
    for (int variant = 0; variant < 8 * 9; variant++) {
        int64_t n = sizes[variant % 8], bags = 1 + n / 7, *offsets = room(8 * (bags + 1)), blocks = blocks_of(n),
                total = 0;
        float *indicator = values_of(n, PERI_F32);
        for (int64_t i = 0; i < n; i++)
            if (draw(9) == 0) indicator[i] = draw(2) ? NAN : -INFINITY;
        peri_k_prune_mark_args p = {
            .indicator = indicator, .threshold = variant % 5 ? 20 : 0, .magnitude = variant & 2};
        p.mask = room(n);
        compare("marks", PERI_K_prune_mark, &p, n, (output[]){OUTPUT(p.mask, n)}, 1);
        for (int64_t b = 0; b <= bags; b++) offsets[b] = b < bags ? n * b / bags : n;
        int32_t o = dtypes[variant & 1], l = dtypes[variant >> 1 & 1];
        peri_k_mask_args a = {.mask = p.mask,
                              .offsets = ints(offsets, bags + 1, o),
                              .n = n,
                              .width = widths[variant % 9],
                              .offsets_dtype = o,
                              .lengths_dtype = l,
                              .places_dtype = l};
        a.sums = room(8 * blocks);
        compare("sums", PERI_K_mask_sums, &a, blocks, (output[]){OUTPUT(a.sums, 8 * blocks)}, 1);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t own = a.sums[b];
            a.sums[b] = total;
            total += own;
        }
        a.all = random_bytes(n * a.width);
        a.kept = room(total * a.width);
        compare("pick", PERI_K_mask_pick, &a, blocks, (output[]){OUTPUT(a.kept, total * a.width)}, 1);
        a.all = room(n * a.width);
        compare("spread", PERI_K_mask_spread, &a, blocks, (output[]){OUTPUT(a.all, n * a.width)}, 1);
        a.places = room(n * size_of(l));
        compare("places", PERI_K_mask_places, &a, blocks, (output[]){OUTPUT(a.places, n * size_of(l))}, 1);
        a.lengths = room(bags * size_of(l));
        compare("lengths", PERI_K_mask_lengths, &a, bags, (output[]){OUTPUT(a.lengths, bags * size_of(l))}, 1);
        drop_all(NULL);
    }
}

static void hash_tables(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 64; variant++) {
        int64_t count = 1 + (int64_t)draw(4), step = 1 + (int64_t)draw(3), bags = count * step;
        int64_t *offsets = complete(random_lengths(bags, variant % 8 ? 5 : 300), bags), n = offsets[bags],
                *sizes = room(8 * count);
        for (int64_t t = 0; t < count; t++) {
            int64_t own = offsets[(t + 1) * step] - offsets[t * step];
            /* some are too small */
            sizes[t] = draw(6) == 0 ? 0 : own + (variant % 4 ? (int64_t)draw((uint64_t)own + 2) : -own / 3);
        }
        int64_t *slots = complete(sizes, count), *ids = numbers(n, variant % 3 ? 1u << 30 : 20, 0),
                *rows = numbers(n, 100, -1);
        if (variant % 5 == 0 && n) ids[draw((uint64_t)n)] = -1;
        if (variant % 7 == 0 && n) rows[draw((uint64_t)n)] = -2;
        int32_t d = dtypes[variant & 1], o = dtypes[variant >> 1 & 1], s = dtypes[variant >> 2 & 1],
                r = dtypes[variant >> 3 & 1];
        peri_k_hash_args a = {.ids = ints(ids, n, d),
                              .offsets = ints(offsets, bags + 1, o),
                              .slots = ints(slots, count + 1, s),
                              .rows = ints(rows, n, r),
                              .tables = count,
                              .step = step,
                              .ids_dtype = d,
                              .offsets_dtype = o,
                              .slots_dtype = s,
                              .rows_dtype = r};
        int64_t bytes = 2 * slots[count] * size_of(d);
        a.pairs = room(bytes);
        memset(a.pairs, 0xff, (size_t)bytes);
        a.bad = room(8 * count);
        compare("insert", PERI_K_hash_insert, &a, count, (output[]){OUTPUT(a.pairs, bytes), OUTPUT(a.bad, 8 * count)},
                2);
        for (int64_t i = 0; i < n; i++)
            if (draw(4) == 0) ids[i] = (int64_t)draw(1u << 30) - (draw(9) == 0 ? 1 << 30 : 0);
        a.ids = ints(ids, n, d);
        a.rows = room(n * size_of(r));
        compare("find", PERI_K_hash_find, &a, n, (output[]){OUTPUT(a.rows, n * size_of(r))}, 1);
        drop_all(NULL);
    }
}

static void hashes(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 16; variant++) {
        int64_t n = variant < 8 ? (int64_t)draw(40) : 3000;
        peri_k_murmur_hash3_args a = {
            .x = numbers(n, UINT64_MAX, 0), .y_number = -3, .seed_number = (int64_t)draw(UINT64_MAX)};
        if (variant & 1) a.y = numbers(n, UINT64_MAX, 0);
        if (variant & 2) a.seed = numbers(n, UINT64_MAX, 0);
        a.out = room(8 * n);
        compare("hash", PERI_K_murmur_hash3, &a, n, (output[]){OUTPUT(a.out, 8 * n)}, 1);
        drop_all(NULL);
    }
}

static void calibration(void **unused)
{
    (void)unused;
    static const int32_t kinds[] = {PERI_F32, PERI_F64, PERI_F16};
    for (int variant = 0; variant < 24; variant++) {
        int64_t n = (int64_t)draw(60), segments = variant & 1 ? (int64_t)draw(5) : 0, bins = 1 + (int64_t)draw(12);
        int64_t all = bins * (segments + 1);
        int32_t d = kinds[variant % 3], o = dtypes[variant >> 2 & 1], v = dtypes[variant >> 3 & 1];
        int64_t *ends = complete(random_lengths(n, 2), n);
        double *examples = room(8 * all), *positives = room(8 * all), *logits = room(8 * n);
        for (int64_t b = 0; b < all; b++) {
            examples[b] = (double)draw(200);
            positives[b] = (double)draw(200) / 4;
        }
        for (int64_t i = 0; i < n; i++)
            logits[i] = draw(8) ? ((double)draw(2000) - 1000) / 99 : draw(2) ? NAN : draw(2) ? 1e4 : -1e4;
        peri_k_calibrate_args a = {.examples = examples,
                                   .positives = positives,
                                   .shift = -0.5,
                                   .lower = variant & 4 ? 0.25 : 0,
                                   .upper = variant & 4 ? 0.5 : 1,
                                   .weight = 0.75,
                                   .bins = bins,
                                   .segments = segments,
                                   .in_use_after = 30,
                                   .dtype = d,
                                   .ends_dtype = o,
                                   .values_dtype = v};
        void *given = room(n * element_of(d));
        peri_k_convert_args cast = {.dst = given,
                                    .src = logits,
                                    .dst_dtype = d,
                                    .src_dtype = PERI_F64,
                                    .ndim = 1,
                                    .shape = {n},
                                    .dst_stride = {1},
                                    .src_stride = {1}};
        peri_kernels_ref.fn[PERI_K_convert](&cast, 0, n);
        a.logit = given;
        if (variant & 1) {
            a.segment_ends = ints(ends, n + 1, o);
            a.segment_values = ints(numbers(ends[n], 8, -2), ends[n], v);
        }
        a.out = room(n * element_of(d));
        a.bin = room(8 * n);
        compare("calibration", PERI_K_calibrate, &a, n,
                (output[]){EXPONENTIALS(a.out, n * element_of(d), d), OUTPUT(a.bin, 8 * n)}, 2);
        drop_all(NULL);
    }
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(tables, drop_all),      cmocka_unit_test_teardown(batches, drop_all),
        cmocka_unit_test_teardown(sums, drop_all),        cmocka_unit_test_teardown(slices, drop_all),
        cmocka_unit_test_teardown(masks, drop_all),       cmocka_unit_test_teardown(hash_tables, drop_all),
        cmocka_unit_test_teardown(hashes, drop_all),      cmocka_unit_test_teardown(calibration, drop_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
