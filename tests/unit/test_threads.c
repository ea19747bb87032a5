/* SPDX-License-Identifier: Apache-2.0
 *
 * test_threads.c: the worker pool, the clock, pauses, hashes.
 */
#include "tests/harness/check.h"

#include "runtime/base/internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

typedef struct marks {
    atomic_int *seen;
    atomic_int ranges;
    int64_t smallest;
} marks;

static void mark_range(void *ctx, int64_t begin, int64_t end)
{
    marks *m = ctx;
    atomic_fetch_add(&m->ranges, 1);
    for (int64_t i = begin; i < end; i++) atomic_fetch_add(&m->seen[i], 1);
}

static void every_index_runs_once(void **state)
{
    (void)state;
    static const int64_t sizes[] = {0, 1, 2, 7, 64, 1000, 4097}, grains[] = {0, 1, 3, 100, 5000};
    atomic_int seen[4097];
    for (int threads = 1; threads <= 5; threads++) {
        assert_ok(peri_threads_set(threads));
        assert_int_equal(peri_threads(), threads);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (size_t g = 0; g < sizeof grains / sizeof *grains; g++) {
                int64_t n = sizes[s];
                for (int64_t i = 0; i < n; i++) atomic_init(&seen[i], 0);
                marks m = {.seen = seen};
                peri__parallel_for(n, grains[g], mark_range, &m);
                for (int64_t i = 0; i < n; i++) assert_int_equal(seen[i], 1);
                int64_t most = peri__max(1, peri__min(threads, n / peri__max(grains[g], 1)));
                assert_true(m.ranges <= most);
                assert_int_equal(m.ranges == 0, n == 0);
            }
    }
}

static void nest(void *ctx, int64_t begin, int64_t end)
{
    (void)begin, (void)end;
    marks *m = ctx;
    peri__parallel_for(100, 1, mark_range, m);
}

static void nested_ranges_run_serially(void **state)
{
    (void)state;
    atomic_int seen[100];
    for (int i = 0; i < 100; i++) atomic_init(&seen[i], 0);
    marks m = {.seen = seen};
    assert_ok(peri_threads_set(3));
    peri__parallel_for(3, 1, nest, &m);
    for (int i = 0; i < 100; i++) assert_int_equal(seen[i], 3);
    assert_int_equal(m.ranges, 3);
}

static void *use_the_pool(void *out)
{
    enum { N = 500, ROUNDS = 200 };
    atomic_int seen[N];
    for (int i = 0; i < N; i++) atomic_init(&seen[i], 0);
    for (int round = 0; round < ROUNDS; round++) {
        marks m = {.seen = seen};
        peri__parallel_for(N, 10, mark_range, &m);
    }
    bool right = true;
    for (int i = 0; i < N; i++) right = right && seen[i] == ROUNDS;
    *(bool *)out = right;
    return NULL;
}

static void several_threads_share_the_pool(void **state)
{
    (void)state;
    pthread_t threads[4];
    bool right[4] = {false};
    assert_ok(peri_threads_set(3));
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, use_the_pool, &right[i]), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_true(right[i]);
    }
}

/** A signal of the program's, such as that of its child's end, must not go to a worker, which would drop it. */
static void note_signals(void *ctx, int64_t begin, int64_t end)
{
    (void)end;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (begin > 0 && sigismember(&blocked, SIGCHLD) && sigismember(&blocked, SIGINT)) atomic_fetch_add((atomic_int *)ctx, 1);
}

static void workers_take_no_signals(void **state)
{
    (void)state;
    atomic_int deaf = 0;
    assert_int_equal(peri_threads_set(3), PERI_OK);
    peri__parallel_for(3, 1, note_signals, &deaf);
    assert_int_equal(atomic_load(&deaf), 2);
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    assert_false(sigismember(&blocked, SIGCHLD));
}

static void the_number_of_threads_is_bounded(void **state)
{
    (void)state;
    assert_ok(peri_threads_set(2));
    assert_fails(peri_threads_set(0), PERI_EINVAL, "0 threads, allowed: 1..256");
    assert_fails(peri_threads_set(257), PERI_EINVAL, "257 threads");
    assert_int_equal(peri_threads(), 2);
}

static void time_goes_forward_and_pauses_pass(void **state)
{
    (void)state;
    int64_t last = peri_time_ns();
    static const int64_t rounds[] = {0, 63, 64, 1999, 2000, 2100, 1000000};
    for (size_t i = 0; i < sizeof rounds / sizeof *rounds; i++) {
        peri_pause(rounds[i]);
        int64_t now = peri_time_ns();
        assert_true(now >= last);
        assert_true(now - last < 1000000000);
        last = now;
    }
}

/** Keys of the generator and key lists on the wire hang on these values: they may never change. */
static void hashes_are_what_they_were(void **state)
{
    (void)state;
    assert_true(peri__hash_mix(0, 0) == 0xe220a8397b1dcdafu); /* the first output of splitmix64 from 0 */
    assert_true(peri__hash_mix(1, 2) == peri__hash_mix(3, 0));
    assert_true(peri__hash_text("") == 0);
    assert_true(peri__hash_text("a") == peri__hash_mix(1, 'a'));
    assert_true(peri__hash_text("ab") != peri__hash_text("ba"));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_index_runs_once),
    cmocka_unit_test(nested_ranges_run_serially),
    cmocka_unit_test(several_threads_share_the_pool),
    cmocka_unit_test(workers_take_no_signals),
    cmocka_unit_test(the_number_of_threads_is_bounded),
    cmocka_unit_test(time_goes_forward_and_pauses_pass),
    cmocka_unit_test(hashes_are_what_they_were),
};

check_main(tests)
