/* SPDX-License-Identifier: Apache-2.0
 *
 * test_stress.c: eight threads on one table: lookups of batches of all sizes, some with ids that are not there, beside
 * updates. An update adds 1 to every number of the table, so all numbers of a lookup stand for the same count of
 * updates, which never falls. `make stress` runs it longer, under the thread sanitizer (PERI_STRESS: seconds).
 */
#include "tests/harness/check.h"

#include <perilune/perilune.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { THREADS = 8, UPDATERS = 2, ROWS = 64, COLS = 4, BAGS = 40, LENGTH = 5 };

static peri_device *cpu;
static peri_tbe *tbe;
static int64_t until;

static peri_tensor *tensor(int32_t dtype, int64_t n, const void *data)
{
    peri_tensor *t = NULL;
    if (peri_tensor_new(cpu, dtype, 1, &n, &t) < 0 || peri_tensor_write(t, data, n * peri_dtype_size(dtype)) < 0)
        return NULL;
    return t;
}

/** Bags with ids of their own, [@bags]; the number of the bad one, or -1. */
typedef struct query {
    int64_t ids[BAGS * LENGTH], offsets[BAGS + 1], bags, bad;
} query;

static void make_query(query *q, uint64_t *random)
{
    int64_t n = 0;
    q->bags = 1 + (int64_t)(*random >> 33) % BAGS;
    for (int64_t b = 0; b <= q->bags; b++) {
        q->offsets[b] = n;
        for (int64_t i = 0; b < q->bags && i < LENGTH; i++) {
            *random = *random * 6364136223846793005u + 1442695040888963407u;
            if ((*random >> 33) % 3) q->ids[n++] = (int64_t)(*random >> 40) % ROWS;
        }
    }
    q->bad = n > 0 && (*random >> 33) % 7 == 0 ? ROWS + (int64_t)(*random >> 50) : -1;
    if (q->bad >= 0) q->ids[n - 1] = q->bad;
}

/** One lookup: 0, or what was wrong. @count: updates that were seen so far. */
static int look(const query *q, int64_t *count)
{
    const peri_tbe_block block = {.bags = q->bags, .out_stride = COLS, .feature = -1};
    const int64_t shape[2] = {q->bags, COLS};
    float out[BAGS][COLS];
    peri_tbe_input in = {.ids = tensor(PERI_I64, q->offsets[q->bags], q->ids),
                         .offsets = tensor(PERI_I64, q->bags + 1, q->offsets)};
    peri_tensor *rows = NULL;
    int wrong = 0;
    if (!in.ids || !in.offsets || peri_tbe_blocks_new(tbe, &block, 1, &in.blocks) < 0) return 1;
    if (peri_tensor_new(cpu, PERI_F32, 2, shape, &rows) < 0) return 2;
    const peri_status status = peri_tbe_forward(tbe, &in, rows);
    char said[32];
    snprintf(said, sizeof said, "id %lld ", (long long)q->bad);
    /* this thread's own error */
    if (q->bad >= 0) wrong = status == PERI_ERANGE && strstr(peri_error_message(), said) ? 0 : 3;
    else if (status < 0 || peri_tensor_read(rows, out, sizeof(float) * (size_t)(q->bags * COLS)) < 0) wrong = 4;
    int64_t seen = -1;
    for (int64_t b = 0; b < q->bags && q->bad < 0 && !wrong; b++)
        for (int c = 0; c < COLS && !wrong; c++) {
            const int64_t n = q->offsets[b + 1] - q->offsets[b], sum = (int64_t)out[b][c];
            if (n == 0) wrong = sum == 0 ? 0 : 5;
            else if (sum % n != 0 || (seen >= 0 && sum / n != seen)) wrong = 6; /* part of an update */
            else seen = sum / n;
        }
    if (seen >= 0 && seen < *count) wrong = 7; /* an update that was there is gone */
    if (seen >= 0) *count = seen;
    peri_tensor_release(rows);
    peri_tensor_release(in.ids);
    peri_tensor_release(in.offsets);
    peri_tbe_blocks_release(in.blocks);
    return wrong;
}

static void *look_up(void *number)
{
    uint64_t random = (uint64_t)(uintptr_t)number * 977 + 1;
    int64_t count = 0;
    query q;
    for (int64_t calls = 0; calls < 100 || peri_time_ns() < until; calls++) {
        make_query(&q, &random);
        const int wrong = look(&q, &count);
        if (wrong) return (void *)(intptr_t)wrong;
    }
    return NULL;
}

static atomic_int_least64_t updates;

static void *update(void *unused)
{
    (void)unused;
    const peri_tbe_block block = {.bags = ROWS, .out_stride = COLS, .feature = -1};
    const int64_t shape[2] = {ROWS, COLS};
    int64_t ids[ROWS], offsets[ROWS + 1];
    peri_tensor *grad = NULL;
    for (int64_t i = 0; i <= ROWS; i++) offsets[i] = i;
    for (int64_t i = 0; i < ROWS; i++) ids[i] = ROWS - 1 - i;
    peri_tbe_input in = {.ids = tensor(PERI_I64, ROWS, ids), .offsets = tensor(PERI_I64, ROWS + 1, offsets)};
    if (!in.ids || peri_tbe_blocks_new(tbe, &block, 1, &in.blocks) < 0) return (void *)8;
    if (peri_tensor_full(cpu, PERI_F32, 2, shape, -1, &grad) < 0) return (void *)9;
    for (int64_t calls = 0; calls < 50 || peri_time_ns() < until; calls++) {
        if (peri_tbe_backward(tbe, &in, grad, NULL) < 0) return (void *)10;
        atomic_fetch_add(&updates, 1);
        peri_pause(3);
    }
    peri_tensor_release(grad);
    peri_tensor_release(in.ids);
    peri_tensor_release(in.offsets);
    peri_tbe_blocks_release(in.blocks);
    return NULL;
}

static void lookups_beside_updates(void **state)
{
    (void)state;
    const char *seconds = getenv("PERI_STRESS");
    const peri_table_config table = {
        .size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS, .init = PERI_INIT_CONSTANT};
    peri_tbe_optimizer_config sgd = {.size = sizeof sgd};
    pthread_t threads[THREADS];
    until = peri_time_ns() + (int64_t)(1e9 * (seconds ? atof(seconds) : 0));
    assert_ok(peri_device_get("cpu", &cpu));
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_SGD, &sgd));
    sgd.learning_rate = 1;
    const peri_tbe_config config = {
        .size = sizeof config, .device = cpu, .n_tables = 1, .tables = &table, .optimizer = &sgd};
    assert_ok(peri_tbe_new(&config, &tbe));
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, i < UPDATERS ? update : look_up, (void *)(uintptr_t)i), 0);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        assert_int_equal((intptr_t)wrong, 0);
    }
    peri_tensor *rows = NULL;
    double last = 0;
    assert_ok(peri_tbe_state(tbe, 0, "weight", &rows));
    assert_ok(peri_tensor_item(rows, ROWS * COLS - 1, &last));
    assert_true(last == (double)atomic_load(&updates));
    peri_tensor_release(rows);
    peri_tbe_release(tbe);
    assert_int_equal(peri_mem_objects(), 0);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(lookups_beside_updates)};

check_main(tests)
