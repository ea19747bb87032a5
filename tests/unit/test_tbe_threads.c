/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tbe_threads.c: one table batch, many threads: lookups beside each other have the bits that they have alone, an
 * update is seen as a whole or not at all, nothing is counted twice or lost, and a batch is in one thread's call at a
 * time. And what batches share: sorting ahead, lookups of several batches before their updates.
 */
#include "tests/harness/check.h"

#include <perilune/embed.h>

#include <pthread.h>
#include <stdatomic.h>

enum {
    THREADS = 4,
    CALLS = 2000,
    ROWS = 500,
    COLS = 8,
    TABLES = 2,
    BAGS = 16,
    MOST = TABLES * BAGS * 10,
    OUT = TABLES * BAGS * COLS
};

/** What one thread works with. */
typedef struct worker {
    peri_tbe *tbe;
    peri_tbe_input input;
    peri_tensor *out, *grad;
    peri_tbe_batch *batch; /* NULL: calls with the input */
    const float *want;     /* what every lookup must give; NULL: an update changes it meanwhile */
    const float *whole[2]; /* then: before and after the update */
    atomic_int *failed;
    atomic_bool *stop;
    int64_t calls, refused;
} worker;

static peri_tbe *make(const char *name, int32_t kind, const peri_cache_config *caches)
{
    peri_table_config tables[TABLES] = {{.size = sizeof *tables, .name = "a", .rows = ROWS, .cols = COLS},
                                        {.size = sizeof *tables, .name = "b", .rows = ROWS, .cols = COLS}};
    peri_tbe_config c = {
        .size = sizeof c, .n_tables = TABLES, .tables = tables, .dtype = PERI_F32, .seed = 5, .caches = caches};
    peri_tbe *tbe;
    assert_ok(peri_device_get(name, &c.device));
    peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    c.optimizer = &optimizer;
    assert_ok(peri_tbe_optimizer_default(kind, &optimizer));
    optimizer.learning_rate = 0.5;
    assert_ok(peri_tbe_new(&c, &tbe));
    return tbe;
}

static peri_tensor *tensor(peri_device *device, int32_t dtype, int64_t n, const void *data)
{
    peri_tensor *t;
    assert_ok(peri_tensor_new(device, dtype, 1, &n, &t));
    assert_ok(peri_tensor_write(t, data, n * peri_dtype_size(dtype)));
    return t;
}

/** A worker with ids and offsets of its own, and blocks in the order of their tables or not. */
static worker worker_new(peri_tbe *tbe, const char *name, int64_t salt, bool ordered)
{
    peri_device *device;
    int64_t ids[MOST], offsets[TABLES * BAGS + 1] = {0}, n = OUT;
    assert_ok(peri_device_get(name, &device));
    for (int64_t i = 0; i < MOST; i++) ids[i] = (i * i * 7 + salt * 131 + i * salt) % ROWS;
    for (int64_t i = 0; i < TABLES * BAGS; i++) offsets[i + 1] = offsets[i] + i * (2 * salt + 3) % 11;
    worker w = {.tbe = tbe};
    w.input.ids = tensor(device, PERI_I64, offsets[TABLES * BAGS], ids);
    w.input.offsets = tensor(device, PERI_I64, TABLES * BAGS + 1, offsets);
    peri_tbe_block blocks[TABLES];
    for (int32_t t = 0; t < TABLES; t++)
        blocks[t] = (peri_tbe_block){.first_bag = t * BAGS,
                                     .bags = BAGS,
                                     .out_offset = t * BAGS * COLS,
                                     .out_stride = COLS,
                                     .table = ordered ? t : TABLES - 1 - t,
                                     .feature = -1};
    assert_ok(peri_tbe_blocks_new(tbe, blocks, TABLES, &w.input.blocks));
    assert_ok(peri_tensor_full(device, PERI_F32, 1, &n, 0, &w.out));
    assert_ok(peri_tensor_full(device, PERI_F32, 1, &n, 0.25 + (double)salt / 8, &w.grad));
    return w;
}

static void worker_free(worker *w)
{
    peri_tbe_batch_release(w->batch);
    peri_tensor_release(w->input.ids);
    peri_tensor_release(w->input.offsets);
    peri_tbe_blocks_release(w->input.blocks);
    peri_tensor_release(w->out);
    peri_tensor_release(w->grad);
}

static bool same(const float *got, const float *want) { return !memcmp(got, want, sizeof(float) * OUT); }

/** Lookups; asserts would leave the thread by longjmp, so it counts. */
static void *look(void *arg)
{
    worker *w = arg;
    float got[OUT];
    for (int64_t i = 0; i < w->calls && !(w->stop && atomic_load(w->stop)); i++) {
        peri_status status =
            w->batch ? peri_tbe_batch_forward(w->batch, w->out) : peri_tbe_forward(w->tbe, &w->input, w->out);
        if (status == PERI_EINVAL) {
            w->refused++;
            continue;
        }
        if (status >= 0) status = peri_tensor_read(w->out, got, sizeof got);
        bool right = w->want ? same(got, w->want) : same(got, w->whole[0]) || same(got, w->whole[1]);
        if (status < 0 || !right) atomic_fetch_add(w->failed, 1);
    }
    return NULL;
}

static void run(worker *w, int n, void *(*fn)(void *))
{
    pthread_t threads[THREADS + 1];
    for (int i = 0; i < n; i++) assert_int_equal(pthread_create(&threads[i], NULL, fn, &w[i]), 0);
    for (int i = 0; i < n; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
}

/** Threads look up in one table batch; every row has the bits that it has alone. */
static void lookups(const char *name, bool batches, const peri_cache_config *caches, int64_t calls)
{
    peri_tbe *tbe = make(name, PERI_TBE_ADAGRAD, caches);
    worker w[THREADS];
    float want[THREADS][OUT];
    atomic_int failed = 0;
    int64_t ids = 0;
    for (int i = 0; i < THREADS; i++) {
        w[i] = worker_new(tbe, name, i, i % 2 == 0);
        peri_tensor_info info = {.size = sizeof info};
        peri_tensor_describe(w[i].input.ids, &info);
        ids += info.numel;
        assert_ok(peri_tbe_forward(tbe, &w[i].input, w[i].out));
        assert_ok(peri_tensor_read(w[i].out, want[i], sizeof want[i]));
        if (batches) assert_ok(peri_tbe_batch_new(tbe, &w[i].input, &w[i].batch));
        w[i].want = want[i];
        w[i].failed = &failed;
        w[i].calls = calls;
    }
    assert_false(same(want[0], want[1]));
    run(w, THREADS, look);
    assert_int_equal(atomic_load(&failed), 0);
    peri_tbe_stats stats = {.size = sizeof stats};
    assert_ok(peri_tbe_statistics(tbe, &stats));
    assert_int_equal(stats.lookups, THREADS * (calls + 1));
    assert_int_equal(stats.ids, (calls + 1) * ids);
    assert_int_equal(stats.bags, THREADS * (calls + 1) * TABLES * BAGS);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(w[i].refused, 0);
        worker_free(&w[i]);
    }
    peri_tbe_release(tbe);
}

static void with_inputs(void **state) { (void)state; lookups("cpu", false, NULL, CALLS); }
static void with_batches(void **state) { (void)state; lookups("cpu", true, NULL, CALLS); }
static void in_files(void **state)
{
    (void)state;
    peri_cache_config caches[TABLES] = {{.size = sizeof *caches, .load_factor = 0.9},
                                          {.size = sizeof *caches, .load_factor = 0.9, .ways = 8}};
    bool before = peri_grad_enabled();
    peri_grad_enabled_set(false);
    lookups("cpu", false, caches, CALLS / 10);
    lookups("cpu", true, caches, CALLS / 10);
    peri_grad_enabled_set(before);
}

static void *update(void *arg)
{
    worker *w = arg;
    if (peri_tbe_backward(w->tbe, &w->input, w->grad, NULL) < 0) atomic_fetch_add(w->failed, 1);
    return NULL;
}

static void updates_are_whole(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        float want[2][OUT];
        atomic_int failed = 0;
        atomic_bool stop = false;
        for (int side = 1; side >= 0; side--) { /* first what an update gives, then the threads */
            peri_tbe *tbe = make("cpu", PERI_TBE_ROWWISE_ADAGRAD, NULL);
            worker w[THREADS];
            for (int i = 0; i < THREADS; i++) {
                w[i] = worker_new(tbe, "cpu", 3, true);
                w[i].failed = &failed;
                w[i].stop = &stop;
                w[i].whole[0] = want[0];
                w[i].whole[1] = want[1];
                w[i].calls = 1000000;
            }
            assert_ok(peri_tbe_forward(tbe, &w[0].input, w[0].out));
            assert_ok(peri_tensor_read(w[0].out, want[0], sizeof want[0]));
            pthread_t threads[THREADS];
            for (int i = 1; i < THREADS && side == 0; i++)
                assert_int_equal(pthread_create(&threads[i], NULL, look, &w[i]), 0);
            update(&w[0]);
            atomic_store(&stop, true);
            for (int i = 1; i < THREADS && side == 0; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
            atomic_store(&stop, false);
            if (side == 1) {
                assert_ok(peri_tbe_forward(tbe, &w[0].input, w[0].out));
                assert_ok(peri_tensor_read(w[0].out, want[1], sizeof want[1]));
                assert_false(same(want[0], want[1]));
            }
            for (int i = 0; i < THREADS; i++) worker_free(&w[i]);
            peri_tbe_release(tbe);
        }
        assert_int_equal(atomic_load(&failed), 0);
    }
}

/** Updates of several threads: each is done as a whole; SGD with numbers that add without rounding does not ask for
 *  their order. */
static void *updates(void *arg)
{
    worker *w = arg;
    for (int64_t i = 0; i < w->calls; i++) update(w);
    return NULL;
}

static void updates_add_up(void **state)
{
    (void)state;
    float got[2][OUT];
    atomic_int failed = 0;
    for (int side = 0; side < 2; side++) {
        peri_tbe *tbe = make("cpu", PERI_TBE_SGD, NULL);
        int64_t shape[2] = {ROWS, COLS};
        peri_tensor *ones;
        peri_device *device;
        assert_ok(peri_device_get("cpu", &device));
        assert_ok(peri_tensor_full(device, PERI_F32, 2, shape, 1, &ones));
        for (int t = 0; t < TABLES; t++) assert_ok(peri_tbe_write(tbe, t, "weight", 0, ones));
        worker w[THREADS];
        for (int i = 0; i < THREADS; i++) {
            w[i] = worker_new(tbe, "cpu", i, i % 2 == 0);
            w[i].failed = &failed;
            w[i].calls = 20;
        }
        if (side == 0) run(w, THREADS, updates);
        for (int i = 0; i < THREADS && side == 1; i++) updates(&w[i]);
        assert_int_equal(peri_tbe_iteration(tbe), THREADS * 20);
        assert_ok(peri_tbe_forward(tbe, &w[2].input, w[2].out));
        assert_ok(peri_tensor_read(w[2].out, got[side], sizeof got[side]));
        for (int i = 0; i < THREADS; i++) worker_free(&w[i]);
        peri_tensor_release(ones);
        peri_tbe_release(tbe);
    }
    assert_int_equal(atomic_load(&failed), 0);
    assert_true(same(got[0], got[1]));
}

/** Two threads with the same batch: one of them may be refused, none gets wrong rows. */
static void one_batch_is_of_one_thread(void **state)
{
    (void)state;
    peri_tbe *tbe = make("cpu", PERI_TBE_SGD, NULL);
    worker first = worker_new(tbe, "cpu", 1, true), w[THREADS];
    float want[OUT];
    atomic_int failed = 0;
    assert_ok(peri_tbe_batch_new(tbe, &first.input, &first.batch));
    assert_ok(peri_tbe_batch_forward(first.batch, first.out));
    assert_ok(peri_tensor_read(first.out, want, sizeof want));
    for (int i = 0; i < THREADS; i++) {
        w[i] = worker_new(tbe, "cpu", 1, true);
        w[i].batch = first.batch;
        peri_tbe_batch_retain(first.batch);
        w[i].want = want;
        w[i].failed = &failed;
        w[i].calls = CALLS;
    }
    run(w, THREADS, look);
    assert_int_equal(atomic_load(&failed), 0);
    for (int i = 0; i < THREADS; i++) worker_free(&w[i]);
    worker_free(&first);
    peri_tbe_release(tbe);
}

/** What the lookups of many callers at once have needed is there for as many the next time, in batches and without. */
static void as_many_callers_as_before_allocate_nothing(void **state)
{
    (void)state;
    enum { AT_ONCE = 40 };
    peri_tbe *tbe = make("cpu", PERI_TBE_SGD, NULL);
    worker w = worker_new(tbe, "cpu", 1, true);
    for (int round = 0; round < 3; round++) {
        peri_tbe_batch *batch[AT_ONCE];
        assert_ok(peri_fault_arm("alloc", 1 << 30)); /* counts, and never fails */
        for (int i = 0; i < AT_ONCE; i++) {
            assert_ok(peri_tbe_batch_new(tbe, &w.input, &batch[i]));
            assert_ok(peri_tbe_batch_forward(batch[i], w.out));
        }
        assert_ok(peri_tbe_forward(tbe, &w.input, w.out));
        for (int i = 0; i < AT_ONCE; i++) peri_tbe_batch_release(batch[i]);
        assert_true((peri_fault_passed("alloc") == 0) == (round > 0));
    }
    assert_ok(peri_fault_arm("alloc", 0));
    worker_free(&w);
    peri_tbe_release(tbe);
}

/* -- what batches share -------------------------------------------------------------------------------------------- */

/** Two batches are looked up before either is updated, sorted on a stream of their own, or not: the same rows. */
static void steps(const char *name, bool ahead, float got[OUT])
{
    peri_tbe *tbe = make(name, PERI_TBE_ADAM, NULL);
    peri_device *device;
    peri_stream *side;
    worker w[2];
    assert_ok(peri_device_get(name, &device));
    assert_ok(peri_stream_new(device, &side));
    for (int i = 0; i < 2; i++) w[i] = worker_new(tbe, name, i, i == 1);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 2; i++) {
            assert_ok(peri_tbe_batch_new(tbe, &w[i].input, &w[i].batch));
            if (ahead) {
                assert_ok(peri_stream_current_set(device, side));
                assert_ok(peri_tbe_batch_sort(w[i].batch));
                assert_ok(peri_stream_current_set(device, NULL));
            }
        }
        for (int i = 0; i < 2; i++)
            assert_ok(ahead ? peri_tbe_batch_forward(w[i].batch, w[i].out)
                            : peri_tbe_forward(tbe, &w[i].input, w[i].out));
        for (int i = 0; i < 2; i++) {
            assert_ok(ahead ? peri_tbe_batch_backward(w[i].batch, w[i].grad, NULL)
                            : peri_tbe_backward(tbe, &w[i].input, w[i].grad, NULL));
            peri_tbe_batch_release(w[i].batch);
            w[i].batch = NULL;
        }
    }
    assert_ok(peri_tbe_forward(tbe, &w[0].input, w[0].out));
    assert_ok(peri_tensor_read(w[0].out, got, sizeof(float) * OUT));
    for (int i = 0; i < 2; i++) worker_free(&w[i]);
    peri_tbe_release(tbe);
    peri_stream_release(side);
}

static void sorts_ahead(void **state)
{
    (void)state;
    float want[OUT], got[OUT];
    steps("cpu", false, want);
    steps("cpu", true, got);
    assert_true(same(want, got));
    for (uint64_t seed = 1; seed <= 5; seed++) { /* streams run in another order each time */
        peri_device *device;
        assert_ok(peri_device_get("opaque", &device));
        assert_ok(peri_device_seed(device, seed));
        steps("opaque", true, got);
        assert_true(same(want, got));
    }
}

static void blocks_stay_on_their_device(void **state)
{
    (void)state;
    peri_tbe *cpu = make("cpu", PERI_TBE_SGD, NULL), *opaque = make("opaque", PERI_TBE_SGD, NULL);
    worker here = worker_new(cpu, "cpu", 1, true), there = worker_new(opaque, "opaque", 1, true);
    peri_tbe_input mixed = there.input;
    mixed.blocks = here.input.blocks;
    assert_fails(peri_tbe_forward(opaque, &mixed, there.out), PERI_EINVAL,
                 "a block list made for tables on device cpu, these are on opaque");
    worker_free(&here);
    worker_free(&there);
    peri_tbe_release(cpu);
    peri_tbe_release(opaque);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(with_inputs),
    cmocka_unit_test(with_batches),
    cmocka_unit_test(in_files),
    cmocka_unit_test(updates_are_whole),
    cmocka_unit_test(updates_add_up),
    cmocka_unit_test(one_batch_is_of_one_thread),
    cmocka_unit_test(as_many_callers_as_before_allocate_nothing),
    cmocka_unit_test(sorts_ahead),
    cmocka_unit_test(blocks_stay_on_their_device),
};

check_main(tests)
