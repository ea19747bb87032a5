/* SPDX-License-Identifier: Apache-2.0
 *
 * test_operations.c: what devices owe the core. The plugin own_way has operations of its own, written from what kernels/ says of them: all
 * results must be the cpu's. What a device lacks is an error that names it, before anything has changed. And the scratch of an operation
 * fits it, whatever the threads do between its launch and its run.
 */
#include "tests/harness/check.h"

#include <libgen.h>
#include <perilune/embed.h>
#include <perilune/sparse.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const devices[] = {"cpu", "own_way", "opaque"};
enum { DEVICES = 3, MOST = 1 << 16 };

static int find_plugins(void **state)
{
    (void)state;
    char self[3900] = "", folder[4000];
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return -1;
    snprintf(folder, sizeof folder, "%s/plugins", dirname(self));
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
    for (int64_t i = 0; i < N; i++) x[i] = (int64_t)((draw(&seed) % 40) * step) - less;
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
    distinct(0x0612345678abcdefu, INT64_C(0x4000000000000000)); /* ids that take all 64 bits: sorted, in rounds on the cpu */
    distinct(350, 77);                                          /* of a narrow range: marked */
}

/* -- a table batch ----------------------------------------------------------------------------------------------------------------- */

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
    peri_table_config tables[TABLES] = {{.name = "a", .rows = ROWS, .cols = COLS, .init = PERI_INIT_CONSTANT, .init_a = 0.5},
                                        {.name = "b", .rows = ROWS, .cols = COLS, .init = PERI_INIT_CONSTANT, .init_a = -0.25}};
    peri_tbe_config config = {.device = device, .n_tables = TABLES, .tables = tables, .dtype = PERI_F32};
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD, &config.optimizer));
    assert_ok(peri_tbe_new(&config, &b.tbe));
    peri_tbe_block list[TABLES] = {{.first_bag = 0, .bags = BAGS, .out_stride = COLS, .table = 1, .feature = -1},
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
    assert_fails(peri_sparse_cumsum(x, PERI_CUMSUM_COMPLETE, &out), PERI_EUNSUPPORTED, "device own_way has no operation cumsum");
    setenv("PERI_TEST_LACKS", "fill", 1);
    assert_fails(peri_tensor_fill(x, 4), PERI_EUNSUPPORTED, "device own_way has no kernel fill");
    unsetenv("PERI_TEST_LACKS");
    assert_null(out);
    take(x, after, sizeof three);
    assert_memory_equal(after, three, sizeof three);
    rows_of(&b, after);
    assert_memory_equal(after, before, sizeof before);
    assert_ok(peri_tbe_backward(b.tbe, &b.in, b.grad, NULL));
    assert_int_equal(peri_tbe_iteration(b.tbe), 1);
    batch_free(&b);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(sums_are_sums_on_every_device),
    cmocka_unit_test(ids_are_told_apart_on_every_device),
    cmocka_unit_test(tables_are_updated_alike_on_every_device),
    cmocka_unit_test(threads_may_change_between_launch_and_run),
    cmocka_unit_test(what_a_device_lacks_is_named_before_anything_changes),
};

int main(void) { return cmocka_run_group_tests(tests, find_plugins, NULL); }
