/* SPDX-License-Identifier: Apache-2.0
 *
 * test_operations.c: what devices owe the core. The plugin own_way has operations of its own, written from what
 * kernels/ says of them: all results must be the cpu's. What a device lacks is an error that names it, before anything
 * has changed. And the scratch of an operation fits it, whatever the threads do between its launch and its run.
 */
#include "tests/harness/check.h"

#include <libgen.h>
#include <perilune/embed.h>
#include <perilune/ops.h>
#include <perilune/optim.h>
#include <perilune/sparse.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const devices[] = {"cpu", "own_way", "opaque"};
enum { DEVICES = 3, MOST = 1 << 16 };

static int find_plugins(void **state)
{
    (void)state;
    char self[3900] = "", folder[8000];
    const char *others = getenv("PERI_PLUGIN_PATH");
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return -1;
    snprintf(folder, sizeof folder, "%s/plugins%s%s", dirname(self), others ? ":" : "", others ? others : "");
    return setenv("PERI_PLUGIN_PATH", folder, 1);
}

static peri_device *device_of(const char *name)
{
    peri_device *device = NULL;
    assert_ok(peri_device_get(name, &device));
    return device;
}

static peri_tensor *i64(peri_device *device, const int64_t *x, int64_t n)
{
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_new(device, PERI_I64, 1, &n, &t));
    assert_ok(peri_tensor_write(t, x, 8 * n));
    return t;
}

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/** Read and release. */
static void take(peri_tensor *t, void *out, int64_t bytes)
{
    assert_ok(peri_tensor_read(t, out, bytes));
    peri_tensor_release(t);
}

static void sums_are_sums_on_every_device(void **state)
{
    (void)state;
    enum { N = 9000 }; /* more than two blocks of the cpu's */
    static int64_t x[N], y[N + 1];
    uint64_t seed = 3;
    for (int64_t i = 0; i < N; i++) x[i] = (int64_t)(draw(&seed) % 7) - 2;
    for (int d = 0; d < DEVICES; d++)
        for (int32_t mode = PERI_CUMSUM_COMPLETE; mode <= PERI_CUMSUM_INCLUSIVE; mode++) {
            peri_tensor *in = i64(device_of(devices[d]), x, N), *out = NULL;
            assert_ok(peri_sparse_cumsum(in, mode, &out));
            take(out, y, 8 * (N + (mode == PERI_CUMSUM_COMPLETE)));
            peri_tensor_release(in);
            int64_t sum = 0;
            for (int64_t i = 0; i < N; i++) {
                if (mode != PERI_CUMSUM_INCLUSIVE) assert_int_equal(y[i], sum);
                sum += x[i];
                if (mode == PERI_CUMSUM_INCLUSIVE) assert_int_equal(y[i], sum);
            }
            if (mode == PERI_CUMSUM_COMPLETE) assert_int_equal(y[N], sum);
        }
}

/** The ids x[i] = i-th draw of 0..39 * step - less are told apart and counted alike on every device. */
static void distinct(uint64_t step, int64_t less)
{
    enum { N = 500 };
    int64_t x[N], unique[N], inverse[N], counts[N];
    uint64_t seed = 5;
    for (int64_t i = 0; i < N; i++) x[i] = (int64_t)(draw(&seed) % 40 * step - (uint64_t)less);
    for (int d = 0; d < DEVICES; d++) {
        peri_tensor *in = i64(device_of(devices[d]), x, N);
        peri_unique_result r;
        assert_ok(peri_sparse_unique(in, true, true, &r));
        int64_t n = 0, all = 0;
        while (n < N && all < N) { /* as many as the counts say */
            double count;
            assert_ok(peri_tensor_item(r.counts, n++, &count));
            all += (int64_t)count;
        }
        take(r.unique, unique, 8 * n);
        take(r.inverse, inverse, 8 * N);
        take(r.counts, counts, 8 * n);
        peri_tensor_release(in);
        for (int64_t i = 1; i < n; i++) assert_true(unique[i - 1] < unique[i]);
        for (int64_t i = 0; i < N; i++) {
            assert_int_equal(unique[inverse[i]], x[i]);
            counts[inverse[i]]--;
        }
        for (int64_t i = 0; i < n; i++) assert_int_equal(counts[i], 0);
    }
}

static void ids_are_told_apart_on_every_device(void **state)
{
    (void)state;
    /* ids that take all 64 bits: sorted, in rounds on the cpu */
    distinct(0x0612345678abcdefu, INT64_C(0x4000000000000000));
    distinct(350, 77);                                          /* of a narrow range: marked on the cpu */
}

/* -- rows and numbers by id ---------------------------------------------------------------------------------------- */

enum { MANY = 9000 }; /* more than two blocks of the cpu's */

/** @rows x @cols of f32. */
static peri_tensor *f32(peri_device *device, const float *x, int64_t rows, int64_t cols)
{
    int64_t shape[2] = {rows, cols};
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_new(device, PERI_F32, 2, shape, &t));
    assert_ok(peri_tensor_write(t, x, 4 * rows * cols));
    return t;
}

/** One id in three is kept; the gradient of a kept row k is k + 1. */
static void rows_are_picked_and_spread_on_every_device(void **state)
{
    (void)state;
    enum { COLUMNS = 3 };
    static float x[MANY * COLUMNS], y[MANY * COLUMNS], g[MANY * COLUMNS];
    static uint8_t mask[MANY];
    uint64_t seed = 17;
    int64_t n = MANY, kept = 0, lengths[1] = {MANY}, left;
    for (int64_t i = 0; i < n * COLUMNS; i++) x[i] = (float)i;
    for (int64_t i = 0; i < n; i++) kept += mask[i] = draw(&seed) % 3 == 0;
    for (int d = 0; d < DEVICES; d++) {
        peri_device *device = device_of(devices[d]);
        peri_tensor *values = f32(device, x, n, COLUMNS), *chosen = NULL, *bags = i64(device, lengths, 1), *out = NULL,
                    *counts = NULL;
        peri_tensor *grad = NULL;
        assert_ok(peri_tensor_new(device, PERI_BOOL, 1, &n, &chosen));
        assert_ok(peri_tensor_write(chosen, mask, n));
        assert_ok(peri_tensor_requires_grad_set(values, true));
        assert_ok(peri_sparse_masked_select(values, bags, chosen, &out, &counts));
        take(counts, &left, 8);
        assert_int_equal(left, kept);
        for (int64_t k = 0; k < kept * COLUMNS; k++) g[k] = (float)(k / COLUMNS + 1);
        grad = f32(device, g, kept, COLUMNS);
        assert_ok(peri_tensor_backward(out, grad));
        peri_tensor_release(grad);
        assert_ok(peri_tensor_grad(values, &grad));
        take(out, y, 4 * kept * COLUMNS);
        take(grad, g, 4 * n * COLUMNS);
        for (int64_t i = 0, k = 0; i < n; k += mask[i++])
            for (int c = 0; c < COLUMNS; c++) {
                if (mask[i]) assert_true(y[k * COLUMNS + c] == x[i * COLUMNS + c]);
                assert_true(g[i * COLUMNS + c] == (mask[i] ? (float)(k + 1) : 0));
            }
        peri_tensor_release(values);
        peri_tensor_release(chosen);
        peri_tensor_release(bags);
    }
}

/** Bags of 3 from their second member on; the two starts that no bag has are found, the first of them first. */
static void slices_begin_where_they_should_on_every_device(void **state)
{
    (void)state;
    static int64_t lengths[MANY], start[MANY], left[MANY];
    static float x[3 * MANY], y[3 * MANY];
    for (int64_t i = 0; i < 3 * MANY; i++) x[i] = (float)i;
    for (int d = 0; d < DEVICES; d++) {
        peri_device *device = device_of(devices[d]);
        for (int64_t b = 0; b < MANY; b++) lengths[b] = 3, start[b] = 1;
        peri_tensor *values = f32(device, x, 3 * MANY, 1), *bags = i64(device, lengths, MANY),
                    *at = i64(device, start, MANY);
        peri_tensor *out = NULL, *counts = NULL;
        assert_ok(peri_sparse_slice(values, bags, at, 9, &out, &counts));
        take(counts, left, 8 * MANY);
        take(out, y, 4 * 2 * MANY);
        for (int64_t b = 0; b < MANY; b++)
            assert_true(left[b] == 2 && y[2 * b] == x[3 * b + 1] && y[2 * b + 1] == x[3 * b + 2]);
        start[8500] = -1;
        start[5000] = 4;
        assert_ok(peri_tensor_write(at, start, 8 * MANY));
        assert_fails(peri_sparse_slice(values, bags, at, 9, &out, &counts), PERI_ERANGE,
                     "start[5000] is 4, allowed in a bag of 3: 0..3");
        peri_tensor_release(values);
        peri_tensor_release(bags);
        peri_tensor_release(at);
    }
}

/** Two tables of 5 and 7 numbers, a bag of half the ids each. */
static void ids_find_their_rows_on_every_device(void **state)
{
    (void)state;
    static int64_t ids[MANY];
    int64_t starts[3] = {0, 5, 12}, offsets[3] = {0, MANY / 2, MANY}, shape[2] = {1, 12};
    float weight[12], sums[2], want[2] = {0};
    uint64_t seed = 23;
    for (int i = 0; i < 12; i++) weight[i] = (float)(i + 1);
    for (int64_t i = 0; i < MANY; i++) {
        ids[i] = (int64_t)(draw(&seed) % (i < MANY / 2 ? 5 : 7));
        want[i >= MANY / 2] += weight[ids[i] + (i < MANY / 2 ? 0 : 5)]; /* small whole numbers: exact in any order */
    }
    for (int d = 0; d < DEVICES; d++) {
        peri_device *device = device_of(devices[d]);
        peri_tensor *w = f32(device, weight, shape[0], shape[1]), *firsts = i64(device, starts, 3),
                    *cuts = i64(device, offsets, 3);
        peri_tensor *in = i64(device, ids, MANY), *out = NULL;
        assert_ok(peri_sparse_batched_unary(w, firsts, cuts, in, &out));
        take(out, sums, sizeof sums);
        assert_true(sums[0] == want[0] && sums[1] == want[1]);
        int64_t saved[2] = {ids[8000], ids[4200]};
        ids[8000] = -1;
        ids[4200] = 5; /* the second table would have it */
        assert_ok(peri_tensor_write(in, ids, sizeof ids));
        assert_fails(peri_sparse_batched_unary(w, firsts, cuts, in, &out), PERI_ERANGE,
                     "indices[4200] is 5 (table 0, sample 0)");
        ids[8000] = saved[0];
        ids[4200] = saved[1];
        peri_tensor *all[] = {w, firsts, cuts, in};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    }
}

static void weights_are_summed_by_id_on_every_device(void **state)
{
    (void)state;
    enum { IDS = 40000, NUMBERS = 11 }; /* enough ids for a second thread of the cpu */
    static int64_t ids[IDS];
    static float weights[IDS];
    float want[2 * NUMBERS] = {0}, sums[2 * NUMBERS];
    uint64_t seed = 29;
    int64_t n = IDS;
    for (int64_t i = 0; i < n; i++) {
        ids[i] = (int64_t)(draw(&seed) % NUMBERS);
        weights[i] = (float)(draw(&seed) % 1000) / 7;
        want[2 * ids[i]] += weights[i];
        want[2 * ids[i] + 1]++;
    }
    for (int d = 0; d < DEVICES; d++) {
        peri_device *device = device_of(devices[d]);
        peri_tensor *w = NULL, *in = i64(device, ids, n), *out = NULL;
        assert_ok(peri_tensor_new(device, PERI_F32, 1, &n, &w));
        assert_ok(peri_tensor_write(w, weights, 4 * n));
        assert_ok(peri_sparse_weights_and_counts(w, in, NUMBERS, &out));
        take(out, sums, sizeof sums);
        assert_memory_equal(sums, want, sizeof want);
        peri_tensor_release(w);
        peri_tensor_release(in);
    }
}

/* -- products and norms -------------------------------------------------------------------------------------------- */

/** Whole numbers, so that the order of additions does not matter. */
static void products_and_norms_are_those_of_the_definition_on_every_device(void **state)
{
    (void)state;
    enum { M = 3, K = 4, N = 2 };
    int64_t left[2] = {M, K}, right[2] = {K, N};
    double x[M * K], y[K * N], z[M * N], norm, square = 0;
    for (int i = 0; i < M * K; i++) x[i] = i - 5, square += x[i] * x[i];
    for (int i = 0; i < K * N; i++) y[i] = 3 * i - 7;
    for (int d = 0; d < DEVICES; d++) {
        peri_device *device = device_of(devices[d]);
        peri_tensor *a = NULL, *b = NULL, *c = NULL, *grad = NULL, *norms = NULL;
        assert_ok(peri_tensor_new(device, PERI_F64, 2, left, &a));
        assert_ok(peri_tensor_write(a, x, sizeof x));
        assert_ok(peri_tensor_new(device, PERI_F64, 2, left, &grad));
        assert_ok(peri_tensor_write(grad, x, sizeof x));
        assert_ok(peri_tensor_new(device, PERI_F64, 2, right, &b));
        assert_ok(peri_tensor_write(b, y, sizeof y));
        assert_ok(peri_op_matmul(a, b, &c));
        take(c, z, sizeof z);
        for (int i = 0; i < M * N; i++) {
            double want = 0;
            for (int j = 0; j < K; j++) want += x[i / N * K + j] * y[j * N + i % N];
            assert_true(z[i] == want);
        }
        assert_ok(peri_tensor_requires_grad_set(a, true));
        assert_ok(peri_tensor_grad_set(a, grad));
        assert_ok(peri_grad_norm_power(&a, 1, 2, &c));
        assert_ok(peri_grad_norm_finish(c, 2, &norms));
        peri_tensor_release(c);
        take(norms, &norm, sizeof norm);
        assert_true(norm == __builtin_sqrt(square));
        peri_tensor_release(grad);
        peri_tensor_release(a);
        peri_tensor_release(b);
    }
}

/* -- a table batch ------------------------------------------------------------------------------------------------- */

enum { ROWS = 300, COLS = 5, BAGS = 64, TABLES = 2 };

typedef struct batch {
    peri_tbe *tbe;
    peri_tbe_blocks *blocks;
    peri_tensor *ids, *offsets, *weights, *out, *grad;
    peri_tbe_input in;
} batch;

/** @n ids for each of two tables, whose blocks stand in the wrong order; ids -1 and weights among them. */
static batch batch_new(const char *name, int64_t n)
{
    static int64_t ids[2 * MOST], offsets[2 * BAGS + 1];
    static float weights[2 * MOST], grad[TABLES * BAGS * COLS];
    batch b = {0};
    peri_device *device = device_of(name);
    peri_table_config tables[TABLES] = {{.size = sizeof *tables, .name = "a", .rows = ROWS, .cols = COLS,
                                         .init = PERI_INIT_CONSTANT, .init_a = 0.5},
                                        {.size = sizeof *tables, .name = "b", .rows = ROWS, .cols = COLS,
                                         .init = PERI_INIT_CONSTANT, .init_a = -0.25}};
    peri_tbe_config config = {
        .size = sizeof config, .device = device, .n_tables = TABLES, .tables = tables, .dtype = PERI_F32};
    peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    config.optimizer = &optimizer;
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &optimizer));
    assert_ok(peri_tbe_new(&config, &b.tbe));
    peri_tbe_block list[TABLES] = {
        {.first_bag = 0, .bags = BAGS, .out_stride = COLS, .table = 1, .feature = -1},
        {.first_bag = BAGS, .bags = BAGS, .out_offset = BAGS * COLS, .out_stride = COLS, .feature = -1}};
    assert_ok(peri_tbe_blocks_new(b.tbe, list, TABLES, &b.blocks));
    uint64_t seed = 11;
    for (int64_t i = 0; i < 2 * n; i++) {
        ids[i] = (int64_t)(draw(&seed) % (ROWS + 1)) - 1;
        weights[i] = (float)(draw(&seed) % 1000) / 512;
    }
    for (int64_t i = 0; i <= 2 * BAGS; i++) offsets[i] = i * 2 * n / (2 * BAGS);
    for (int64_t i = 0; i < TABLES * BAGS * COLS; i++) grad[i] = (float)(draw(&seed) % 1000) / 256 - 1;
    int64_t all = 2 * n, out = TABLES * BAGS * COLS;
    b.ids = i64(device, ids, all);
    b.offsets = i64(device, offsets, 2 * BAGS + 1);
    assert_ok(peri_tensor_new(device, PERI_F32, 1, &all, &b.weights));
    assert_ok(peri_tensor_write(b.weights, weights, 4 * all));
    assert_ok(peri_tensor_full(device, PERI_F32, 1, &out, 0, &b.out));
    assert_ok(peri_tensor_new(device, PERI_F32, 1, &out, &b.grad));
    assert_ok(peri_tensor_write(b.grad, grad, 4 * out));
    b.in = (peri_tbe_input){.ids = b.ids, .offsets = b.offsets, .weights = b.weights, .blocks = b.blocks};
    return b;
}

static void batch_free(batch *b)
{
    peri_tensor *all[] = {b->ids, b->offsets, b->weights, b->out, b->grad};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    peri_tbe_blocks_release(b->blocks);
    peri_tbe_release(b->tbe);
}

/** All rows of both tables. */
static void rows_of(batch *b, float *out)
{
    for (int64_t t = 0; t < TABLES; t++) {
        peri_tensor *weight = NULL, *whole = NULL;
        assert_ok(peri_tbe_state(b->tbe, t, "weight", &weight));
        assert_ok(peri_tensor_contiguous(weight, &whole));
        assert_ok(peri_tensor_read(whole, out + t * ROWS * COLS, 4 * ROWS * COLS));
        peri_tensor_release(whole);
        peri_tensor_release(weight);
    }
}

static void tables_are_updated_alike_on_every_device(void **state)
{
    (void)state;
    static float rows[DEVICES][TABLES * ROWS * COLS], out[DEVICES][TABLES * BAGS * COLS];
    for (int d = 0; d < DEVICES; d++) {
        batch b = batch_new(devices[d], 900);
        rows_of(&b, rows[d]);
        assert_true(rows[d][0] == 0.5f && rows[d][ROWS * COLS] == -0.25f);
        for (int step = 0; step < 2; step++) {
            assert_ok(peri_tbe_forward(b.tbe, &b.in, b.out));
            assert_ok(peri_tbe_backward(b.tbe, &b.in, b.grad, NULL));
        }
        assert_ok(peri_tensor_read(b.out, out[d], sizeof out[d]));
        rows_of(&b, rows[d]);
        batch_free(&b);
        assert_memory_equal(out[d], out[0], sizeof out[0]);
        assert_memory_equal(rows[d], rows[0], sizeof rows[0]);
    }
    assert_true(rows[0][0] != 0.5f);
}

static void threads_may_change_between_launch_and_run(void **state)
{
    (void)state;
    static float rows[3][TABLES * ROWS * COLS];
    static const int32_t threads[3][2] = {{1, 1}, {4, 1}, {1, 4}};
    int32_t before = peri_threads();
    for (int i = 0; i < 3; i++) {
        batch b = batch_new("opaque", 20000); /* enough for four threads */
        assert_ok(peri_threads_set(threads[i][0]));
        assert_ok(peri_tbe_backward(b.tbe, &b.in, b.grad, NULL)); /* queued */
        assert_ok(peri_threads_set(threads[i][1]));
        rows_of(&b, rows[i]);
        batch_free(&b);
        assert_memory_equal(rows[i], rows[0], sizeof rows[0]);
    }
    assert_ok(peri_threads_set(before));
}

static void what_a_device_lacks_is_named_before_anything_changes(void **state)
{
    (void)state;
    static float before[TABLES * ROWS * COLS], after[TABLES * ROWS * COLS];
    static const char *const needed[] = {"tbe_prepare", "tbe_sort", "tbe_update"};
    batch b = batch_new("own_way", 100);
    rows_of(&b, before);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        char text[128];
        snprintf(text, sizeof text, "peri_tbe_backward: device own_way has no operation %s", needed[i]);
        setenv("PERI_TEST_LACKS", needed[i], 1);
        assert_fails(peri_tbe_backward(b.tbe, &b.in, b.grad, NULL), PERI_EUNSUPPORTED, text);
        assert_int_equal(peri_tbe_iteration(b.tbe), 0);
    }
    int64_t three[3] = {1, 2, 3};
    peri_tensor *x = i64(device_of("own_way"), three, 3), *out = NULL;
    setenv("PERI_TEST_LACKS", "cumsum", 1);
    assert_fails(peri_sparse_cumsum(x, PERI_CUMSUM_COMPLETE, &out), PERI_EUNSUPPORTED,
                 "device own_way has no operation cumsum");
    setenv("PERI_TEST_LACKS", "fill", 1);
    assert_fails(peri_tensor_fill(x, 4), PERI_EUNSUPPORTED, "device own_way has no kernel fill");
    unsetenv("PERI_TEST_LACKS");
    assert_null(out);
    float ones[6] = {1, 1, 1, 1, 1, 1}; /* its products are f64 */
    peri_tensor *left = f32(device_of("own_way"), ones, 2, 3), *right = f32(device_of("own_way"), ones, 3, 2);
    assert_fails(peri_op_matmul(left, right, &out), PERI_EUNSUPPORTED,
                 "device own_way has no product of f32 matrices of 2 x 3 and 3 x 2");
    peri_tensor_release(left);
    peri_tensor_release(right);
    take(x, after, sizeof three);
    assert_memory_equal(after, three, sizeof three);
    rows_of(&b, after);
    assert_memory_equal(after, before, sizeof before);
    assert_ok(peri_tbe_backward(b.tbe, &b.in, b.grad, NULL));
    assert_int_equal(peri_tbe_iteration(b.tbe), 1);
    batch_free(&b);
}

static void what_memory_a_device_lacks_is_named(void **state)
{
    (void)state;
    peri_tbe *tbe = NULL;
    peri_table_config table = {.size = sizeof table, .name = "t", .rows = 10, .cols = 4};
    peri_cache_config cache = {.size = sizeof cache, .load_factor = 0.5, .reserved_memory = 7};
    peri_tbe_config c = {.size = sizeof c,
                         .device = device_of("own_way:0"),
                         .dtype = PERI_F32,
                         .n_tables = 1,
                         .tables = &table,
                         .mapped = true};
    peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    c.optimizer = &optimizer;
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_SGD, &optimizer));
    assert_fails(peri_tbe_new(&c, &tbe), PERI_EUNSUPPORTED,
                 "table 't' is to be in the host's memory (fused_uvm), which the kernels of device own_way:0 do not "
                 "reach; allowed "
                 "compute_kernels there: fused, fused_uvm_caching");
    c.mapped = false;
    c.caches = &cache;
    assert_fails(
        peri_tbe_new(&c, &tbe), PERI_EUNSUPPORTED,
        "reserved_memory is 7 bytes, but device own_way:0 does not tell how much memory it has left; allowed there: 0");
    assert_null(tbe);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(sums_are_sums_on_every_device),
    cmocka_unit_test(ids_are_told_apart_on_every_device),
    cmocka_unit_test(rows_are_picked_and_spread_on_every_device),
    cmocka_unit_test(slices_begin_where_they_should_on_every_device),
    cmocka_unit_test(ids_find_their_rows_on_every_device),
    cmocka_unit_test(weights_are_summed_by_id_on_every_device),
    cmocka_unit_test(products_and_norms_are_those_of_the_definition_on_every_device),
    cmocka_unit_test(tables_are_updated_alike_on_every_device),
    cmocka_unit_test(threads_may_change_between_launch_and_run),
    cmocka_unit_test(what_a_device_lacks_is_named_before_anything_changes),
    cmocka_unit_test(what_memory_a_device_lacks_is_named),
};

int main(void) { return cmocka_run_group_tests(tests, find_plugins, NULL); }
