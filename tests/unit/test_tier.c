/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tier.c: tables in files when memory runs out: every call fails as a whole, leaves nothing behind, and works when
 * it is made again.
 */
#include "tests/harness/check.h"

#include <perilune/perilune.h>

enum { ROWS = 40, COLS = 4, IDS = 6, BAGS = 2 };

static peri_tbe_config config_of(peri_device *device, const peri_table_config *table, const peri_cache_config *cache)
{
    peri_tbe_config c = {.size = sizeof c,
                         .device = device,
                         .dtype = PERI_F32,
                         .n_tables = 1,
                         .tables = table,
                         .seed = 3,
                         .caches = cache};
    static peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    c.optimizer = &optimizer;
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_ADAM, &optimizer));
    return c;
}

/** A batch: ids, offsets, and room for its rows and their gradient. */
typedef struct batch {
    peri_tbe_input input;
    peri_tbe_batch *batch;
    peri_tensor *out, *grad;
} batch;

static batch batch_new(peri_device *device, peri_tbe *tbe, int64_t first)
{
    static const int64_t offsets[BAGS + 1] = {0, 2, IDS};
    int64_t ids[IDS], shape[2] = {IDS, COLS}, bags[2] = {BAGS, COLS}, n = BAGS + 1;
    batch b = {.out = NULL};
    for (int i = 0; i < IDS; i++) ids[i] = (first + 7 * i) % ROWS;
    assert_ok(peri_tensor_new(device, PERI_I64, 1, shape, &b.input.ids));
    assert_ok(peri_tensor_write(b.input.ids, ids, sizeof ids));
    assert_ok(peri_tensor_new(device, PERI_I64, 1, &n, &b.input.offsets));
    assert_ok(peri_tensor_write(b.input.offsets, offsets, sizeof offsets));
    peri_tbe_block block = {.bags = BAGS, .out_stride = COLS, .feature = -1};
    assert_ok(peri_tbe_blocks_new(tbe, &block, 1, &b.input.blocks));
    assert_ok(peri_tbe_batch_new(tbe, &b.input, &b.batch));
    assert_ok(peri_tensor_full(device, PERI_F32, 2, bags, 0, &b.out));
    assert_ok(peri_tensor_full(device, PERI_F32, 2, bags, (double)first + 1, &b.grad));
    return b;
}

static void batch_release(batch *b)
{
    peri_tbe_batch_release(b->batch);
    peri_tensor_release(b->input.ids);
    peri_tensor_release(b->input.offsets);
    peri_tensor_release(b->out);
    peri_tensor_release(b->grad);
    peri_tbe_blocks_release(b->input.blocks);
}

static const char *const points[] = {"alloc", "device_alloc"};

static void is_made_as_a_whole(const char *name)
{
    peri_device *device;
    assert_ok(peri_device_get(name, &device));
    peri_table_config table = {.size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS};
    peri_cache_config cache = {.size = sizeof cache, .load_factor = 0.3, .ways = 4};
    peri_tbe_config c = config_of(device, &table, &cache);
    for (int p = 0; p < 2; p++) {
        assert_ok(peri_device_synchronize(device));
        int64_t objects = peri_mem_objects();
        for (int64_t k = 1;; k++) {
            peri_tbe *tbe = NULL;
            if (p == 1 && peri_fault_passed(points[p]) < 0) break;
            assert_ok(peri_fault_arm(points[p], k));
            peri_status status = peri_tbe_new(&c, &tbe);
            assert_ok(peri_fault_arm(points[p], 0));
            assert_true(status >= 0 || status == PERI_ENOMEM);
            assert_int_equal(status >= 0, tbe != NULL);
            peri_tbe_release(tbe);
            assert_int_equal(peri_mem_objects(), objects);
            if (status >= 0) break;
        }
    }
}

/** One call of a step. */
static peri_status call(peri_tbe *tbe, batch *b, batch *ahead, int which)
{
    switch (which) {
    case 0: return peri_tbe_batch_forward(b->batch, b->out);
    case 1: return peri_tbe_batch_prefetch(ahead->batch);
    case 2: return peri_tbe_batch_backward(b->batch, b->grad, NULL);
    default: return peri_tbe_flush(tbe);
    }
}

/** Make each call of some steps with every allocation failing in turn, until it works. */
static void steps_with_failures(peri_device *device, peri_tbe *tbe, const char *point)
{
    batch b = batch_new(device, tbe, 0);
    for (int step = 0; step < 6; step++) {
        batch ahead = batch_new(device, tbe, 5 * step + 5);
        for (int which = 0; which < 4; which++) {
            if (which == 3 && step % 3 != 2) continue;
            for (int64_t k = 1;; k++) {
                if (point) assert_ok(peri_fault_arm(point, k));
                peri_status status = call(tbe, &b, &ahead, which);
                if (point) assert_ok(peri_fault_arm(point, 0));
                if (status >= 0) break;
                assert_int_equal(status, PERI_ENOMEM);
            }
        }
        batch_release(&b);
        b = ahead;
    }
    batch_release(&b);
}

static void steps_survive_failures(const char *name)
{
    peri_device *device;
    assert_ok(peri_device_get(name, &device));
    peri_table_config table = {.size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS};
    peri_cache_config cache = {.size = sizeof cache, .load_factor = 0.35};
    float want[ROWS * COLS], got[ROWS * COLS];
    int64_t shape[2] = {ROWS, COLS};
    for (int p = -1; p < 2; p++) {
        peri_tbe_config c = config_of(device, &table, p < 0 ? NULL : &cache);
        peri_tbe *tbe;
        peri_tensor *rows;
        assert_ok(peri_tbe_new(&c, &tbe));
        steps_with_failures(device, tbe, p < 0 ? NULL : points[p]);
        assert_int_equal(peri_tbe_iteration(tbe), 6);
        assert_ok(peri_tensor_new(device, PERI_F32, 2, shape, &rows));
        assert_ok(peri_tbe_read(tbe, 0, "weight", 0, rows));
        assert_ok(peri_tensor_read(rows, p < 0 ? want : got, sizeof want));
        if (p >= 0) assert_memory_equal(want, got, sizeof want);
        peri_tensor_release(rows);
        peri_tbe_release(tbe);
    }
}

static void names_what_ways_are_allowed(void **state)
{
    (void)state;
    peri_device *device;
    assert_ok(peri_device_get("cpu", &device));
    peri_table_config table = {.size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS};
    peri_cache_config cache = {.size = sizeof cache, .load_factor = 0.3, .ways = PERI_CACHE_WAYS_MAX};
    peri_tbe_config c = config_of(device, &table, &cache);
    peri_tbe *tbe = NULL;
    assert_ok(peri_tbe_new(&c, &tbe));
    peri_tbe_release(tbe);
    tbe = NULL;
    cache.ways++;
    assert_fails(peri_tbe_new(&c, &tbe), PERI_EINVAL,
                 "table 't': ways 257, allowed: 1 to 256, 0 (the default), -1 (rows may use any slot)");
    cache.ways = -2;
    assert_fails(peri_tbe_new(&c, &tbe), PERI_EINVAL,
                 "table 't': ways -2, allowed: 1 to 256, 0 (the default), -1 (rows may use any slot)");
    assert_null(tbe);
}

static void made_on_cpu(void **state) { (void)state; is_made_as_a_whole("cpu"); }
static void made_on_opaque(void **state) { (void)state; is_made_as_a_whole("opaque"); }
static void steps_on_cpu(void **state) { (void)state; steps_survive_failures("cpu"); }
static void steps_on_opaque(void **state) { (void)state; steps_survive_failures("opaque"); }

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(names_what_ways_are_allowed),
    cmocka_unit_test(made_on_cpu),
    cmocka_unit_test(made_on_opaque),
    cmocka_unit_test(steps_on_cpu),
    cmocka_unit_test(steps_on_opaque),
};

check_main(tests)
