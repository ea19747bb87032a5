/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tbe_whole.c: the kernels of optimizers that look at more than the rows of a batch, Shampoo, EMA in place and
 * counters: every instruction set gives ref's bits, however ranges are split and however many chunks there are; and the
 * bits are the right ones.
 */
#include "tests/harness/check.h"
#include "isas.h"
#include "tests/kernels/tbe_cases.h"


/** Ranges from the end, one by one, or all at once. */
static void run(const peri_kernels *k, int32_t kernel, const void *args, int64_t n, bool whole)
{
    if (whole) k->fn[kernel](args, 0, n);
    for (int64_t i = n; !whole && i > 0; i--) k->fn[kernel](args, i - 1, i);
}

static void *copy_of(const void *x, int64_t bytes) { return memcpy(tbe_room(bytes), x, (size_t)bytes); }

/** Tables one behind the other: rows[t] x cols[t]. */
static int64_t tables_of(peri_k_tbe_table *t, int64_t n, const int64_t *rows, const int64_t *cols, int64_t *total_rows)
{
    int64_t elements = 0;
    *total_rows = 0;
    for (int64_t i = 0; i < n; i++) {
        t[i] = (peri_k_tbe_table){.rows = rows[i],
                                  .cols = cols[i],
                                  .offset = elements,
                                  .stride = cols[i],
                                  .first_row = *total_rows,
                                  .random_stream = (uint64_t)i + 5};
        elements += rows[i] * cols[i] + 3;
        *total_rows += rows[i];
    }
    return elements;
}

/* -- EMA in place -------------------------------------------------------------------------------------------------- */

enum { TABLES = 5 };
static const int64_t average_rows[TABLES] = {7, 0, 40, 1, 300}, average_cols[TABLES] = {2, 8, 16, 200, 70};

static void *averaged(const peri_kernels *k, const void *start, int64_t bytes, int32_t dtype, int64_t chunks,
                      bool stochastic)
{
    peri_k_tbe_table tables[TABLES];
    int64_t rows;
    tables_of(tables, TABLES, average_rows, average_cols, &rows);
    void *weight = copy_of(start, bytes);
    int64_t stride = PERI_K_TBE_SCRATCH_ROWS * 208 + PERI_K_TBE_SCRATCH_MORE;
    float *scratch = tbe_room(4 * stride * chunks);
    peri_k_tbe_ema_args args = {.rows = {.tables = tables, .n_tables = TABLES, .total_rows = rows, .weight = weight,
                                             .weight_dtype = dtype},
                                    .optimizer = {.stochastic = stochastic, .seed = 3, .iteration = 20},
                                    .scratch = scratch, .scratch_stride = stride, .chunks = chunks, .coef = 0.25f};
    run(k, PERI_K_tbe_ema, &args, chunks, chunks % 2);
    free(scratch);
    return weight;
}

static void right_halves_follow_left_ones(void **state)
{
    (void)state;
    peri_k_tbe_table tables[TABLES];
    int64_t rows, n = tables_of(tables, TABLES, average_rows, average_cols, &rows);
    float *start = tbe_numbers(n, false, 8),
          *made = averaged(peri_kernels_isa("ref"), start, 4 * n, PERI_F32, 1, false);
    int64_t changed = 0;
    for (int t = 0; t < TABLES; t++)
        for (int64_t r = 0; r < tables[t].rows; r++)
            for (int64_t d = 0, half = tables[t].cols / 2; d < half; d++) {
                const float *from = start + tables[t].offset + r * tables[t].stride, *to = made + (from - start);
                assert_true(to[d] == from[d]);
                double want = 0.75 * (double)from[d + half] + 0.25 * (double)from[d];
                assert_true(fabs((double)to[d + half] - want) < 1e-6);
                changed += to[d + half] != from[d + half];
            }
    assert_true(changed > 10000);
    free(made);
    free(start);
}

static void averages_have_refs_bits(void **state)
{
    (void)state;
    peri_k_tbe_table tables[TABLES];
    int64_t rows, n = tables_of(tables, TABLES, average_rows, average_cols, &rows);
    float *start = tbe_numbers(n, false, 9);
    static const int32_t dtypes[] = {PERI_F32, PERI_F16, PERI_BF16};
    for (int v = 0; v < 5; v++) {
        int32_t dtype = dtypes[v % 3];
        int64_t bytes = n * (dtype == PERI_F32 ? 4 : 2);
        uint16_t *narrow = tbe_room(4 * n);
        memcpy(narrow, start, (size_t)(4 * n));
        peri_k_convert_args convert = {.dst = narrow,
                                       .src = start,
                                       .dst_dtype = dtype,
                                       .src_dtype = PERI_F32,
                                       .ndim = 1,
                                       .shape = {n},
                                       .dst_stride = {1},
                                       .src_stride = {1}};
        if (dtype != PERI_F32) peri_kernels_isa("ref")->fn[PERI_K_convert](&convert, 0, n);
        void *want = averaged(peri_kernels_isa("ref"), narrow, bytes, dtype, 1, v > 2);
        for (size_t i = 0; i < ISAS; i++)
            for (int64_t chunks = 1; kernels_of(isas[i]) && chunks < 60; chunks = chunks * 3 - 1 + (chunks == 1)) {
                void *got = averaged(kernels_of(isas[i]), narrow, bytes, dtype, chunks, v > 2);
                assert_memory_equal(want, got, (size_t)bytes);
                free(got);
            }
        free(want);
        free(narrow);
    }
    free(start);
}

/* -- counters ------------------------------------------------------------------------------------------------------ */

static void the_largest_counter_is_found(void **state)
{
    (void)state;
    enum { N = 4 };
    static const int64_t rows[N] = {5, 0, 3, 1}, cols[N] = {1, 1, 1, 1};
    static const float counters[9] = {1, 7, 3, 0, 2, 0, 0, 0, 4.5f}, want[N] = {8, 1, 1, 5.5f};
    peri_k_tbe_table tables[N];
    int64_t total;
    tables_of(tables, N, rows, cols, &total);
    for (size_t i = 0; i < ISAS; i++) {
        const peri_kernels *k = kernels_of(isas[i]);
        float most[N] = {0};
        if (!k) continue;
        run(k, PERI_K_tbe_most_counted,
            &(peri_k_tbe_most_counted_args){.tables = tables, .row_counter = counters, .max_counter = most}, N, i % 2);
        assert_memory_equal(want, most, sizeof want);
    }
}

/* -- rows in a bitmap ---------------------------------------------------------------------------------------------- */

enum { MARK_ROWS = 1024, MARK_ITEMS = 3000, MARK_WORDS = (MARK_ROWS + 63) / 64, PAYLOAD = 20 };

/** Every third row is named, by one to three items; behind row 300 and the last stand ids that are no rows. */
static int64_t mark_items(uint64_t *sorted, float *touched)
{
    int64_t n = 0;
    for (uint64_t row = 0; row < MARK_ROWS; row++) {
        touched[row] = row % 3 == 0 ? 0.5f : 0;
        for (uint64_t k = 0; row % 3 == 0 && k <= row % 7 % 3; k++)
            sorted[n++] = row << PAYLOAD | (row * 31 + k) % 1000;
        for (uint64_t k = 0; (row == 300 || row == MARK_ROWS - 1) && k < 5; k++)
            sorted[n++] = (uint64_t)MARK_ROWS << PAYLOAD | k;
    }
    return n;
}

/** Rows from @first on, by ranges of @part items, the last ranges first. @form: 0 sorted, 1 touched, 2 neither, of 500
 *  rows. Every second row of the second half has its bit already, and so have all of a few words. */
static void mark_rows(const peri_kernels *k, const uint64_t *sorted, int64_t n, const float *touched, int form,
                      int64_t first, int64_t part)
{
    uint64_t bits[MARK_WORDS] = {0};
    uint8_t listed[MARK_ROWS] = {0};
    int64_t fresh[MARK_ROWS], n_fresh = 0, count = 0;
    const int64_t range = form == 0 ? MARK_ITEMS : form == 1 ? MARK_ROWS : 500;
#define MARKED_BEFORE(row) (((row) >= 250 && (row) < 460) || ((row) >= 500 && (row) % 2 == 0))
    for (int64_t row = 0; row < MARK_ROWS; row++)
        if (MARKED_BEFORE(row)) bits[row / 64] |= (uint64_t)1 << row % 64;
    const peri_k_tbe_mark_args args = {.total_rows = MARK_ROWS,
                                       .bits = bits,
                                       .fresh = fresh,
                                       .n_fresh = &n_fresh,
                                       .sorted = form == 0 ? sorted : NULL,
                                       .touched = form == 1 ? touched : NULL,
                                       .n = &n,
                                       .payload_bits = PAYLOAD,
                                       .first = first};
    for (int64_t at = (range - 1) / part * part; at >= 0; at -= part)
        k->fn[PERI_K_tbe_mark](&args, at, at + part < range ? at + part : range);
    for (int64_t i = 0; i < n_fresh; i++) listed[fresh[i]]++;
    for (int64_t row = 0; row < MARK_ROWS; row++) {
        const bool named = row >= first && (form == 2 ? row < first + 500 : row % 3 == 0);
        assert_int_equal(bits[row / 64] >> row % 64 & 1, named || MARKED_BEFORE(row));
        assert_int_equal(listed[row], named && !MARKED_BEFORE(row));
        count += named && !MARKED_BEFORE(row);
    }
    assert_int_equal(count, n_fresh);
#undef MARKED_BEFORE
}

static void rows_are_marked_once(void **state)
{
    (void)state;
    static uint64_t sorted[MARK_ITEMS];
    static float touched[MARK_ROWS];
    const int64_t n = mark_items(sorted, touched);
    for (size_t i = 0; i < ISAS; i++)
        for (int form = 0; form < 3; form++)
            for (int64_t part = 1; kernels_of(isas[i]) && part < 5000; part = part * 7 + 1)
                for (int64_t first = 0; first <= MARK_ROWS; first += 128)
                    mark_rows(kernels_of(isas[i]), sorted, n, touched, form, first, part);
}

/* -- Shampoo ------------------------------------------------------------------------------------------------------- */

enum { SQUARED = 3 };

typedef struct preconditioned {
    float *gram, *weight;
} preconditioned;

static preconditioned precondition(const peri_kernels *k, const float *values, const float *start, int64_t chunks)
{
    static const int64_t rows[SQUARED] = {60, 4, 200}, cols[SQUARED] = {6, 17, 16},
                         first[SQUARED + 1] = {0, 30, 30, 100};
    peri_k_tbe_table tables[SQUARED];
    int64_t total, elements = tables_of(tables, SQUARED, rows, cols, &total);
    const int64_t stride = PERI_K_TBE_SCRATCH_ROWS * 32 + PERI_K_TBE_SCRATCH_MORE;
    int64_t run_rows[100], squares = 0, grams = 0;
    for (int64_t r = 0; r < 100; r++) run_rows[r] = r < 30 ? 2 * r : 2 * (r - 30) + 1;
    for (int t = 0; t < SQUARED; t++) squares += cols[t] * cols[t], grams += cols[t];
    preconditioned p = {.gram = tbe_room(4 * squares), .weight = copy_of(start, 4 * elements)};
    memset(p.gram, 0, (size_t)(4 * squares));
    float *root = tbe_room(4 * squares), *scratch = tbe_room(4 * chunks * stride);
    memset(root, 0, (size_t)(4 * squares));
    double *room = tbe_room(16 * squares);
    peri_k_tbe_shampoo args = {
        .tables = tables,
        .n_tables = SQUARED,
        .rows =
            {.tables = tables, .n_tables = SQUARED, .total_rows = total, .weight = p.weight, .weight_dtype = PERI_F32},
        .optimizer = {.kind = PERI_TBE_SHAMPOO, .lr = 0.1f, .weight_decay = 0.1f, .decay = PERI_DECAY_DECOUPLE},
        .values = values,
        .run_rows = run_rows,
        .first = first,
        .stride = 17,
        .gram = p.gram,
        .root = root,
        .room = room,
        .eps = 0.01,
        .scratch = scratch,
        .scratch_stride = stride,
        .chunks = chunks};
    for (int step = 0; step < 2; step++) {
        run(k, PERI_K_tbe_gram, &args, grams, chunks == 1);
        run(k, PERI_K_tbe_root, &args, SQUARED, chunks == 1);
        run(k, PERI_K_tbe_precondition, &args, chunks, chunks == 1);
    }
    free(root);
    free(scratch);
    free(room);
    return p;
}

static void shampoo_does_not_depend_on_the_split(void **state)
{
    (void)state;
    enum { ELEMENTS = 60 * 6 + 4 * 17 + 200 * 16 + 9, SQUARES = 36 + 17 * 17 + 256 };
    float *values = tbe_numbers(100 * 17, false, 1), *start = tbe_numbers(ELEMENTS, false, 2);
    preconditioned want = precondition(peri_kernels_isa("ref"), values, start, 1);
    assert_memory_not_equal(start, want.weight, 4 * 60 * 6);
    assert_memory_equal(start + 363, want.weight + 363, 4 * 4 * 17); /* the table that no id asked for */
    for (size_t i = 0; i < ISAS_CPU; i++)
        for (int64_t chunks = 1; kernels_of(isas[i]) && chunks < 40; chunks += 6) {
            preconditioned got = precondition(kernels_of(isas[i]), values, start, chunks);
            assert_memory_equal(want.gram, got.gram, 4 * SQUARES);
            assert_memory_equal(want.weight, got.weight, 4 * ELEMENTS);
            free(got.gram);
            free(got.weight);
        }
    free(want.gram);
    free(want.weight);
    free(values);
    free(start);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(right_halves_follow_left_ones),
    cmocka_unit_test(averages_have_refs_bits),
    cmocka_unit_test(the_largest_counter_is_found),
    cmocka_unit_test(rows_are_marked_once),
    cmocka_unit_test(shampoo_does_not_depend_on_the_split),
};
check_main(tests)
