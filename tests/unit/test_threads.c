/* SPDX-License-Identifier: Apache-2.0
 *
 * test_threads.c: the worker pool, threads of OpenBLAS, the clock, pauses, hashes.
 */
#include "tests/harness/check.h"

#include "runtime/base/base_internal.h"

#include <dlfcn.h>
#include <perilune/host.h>
#include <perilune/ops.h>
#include <pthread.h>
#include <sched.h>
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

/* -- the program's own threads ------------------------------------------------------------------------------------- */

typedef struct own_pool {
    int32_t calls, most, leaves_out; /* leaves_out: -1: nothing; else this part, and it calls another one twice */
    void (*part)(void *arg, int32_t i);
    void *arg;
} own_pool;

typedef struct own_job {
    own_pool *pool;
    int32_t i;
} own_job;

static void *own_thread(void *arg)
{
    own_job *job = arg;
    job->pool->part(job->pool->arg, job->i);
    return NULL;
}

static void run_own(void *ctx, int32_t parts, void (*part)(void *arg, int32_t i), void *arg)
{
    own_pool *p = ctx;
    pthread_t threads[16];
    own_job jobs[16];
    int32_t n = 0;
    p->calls++, p->part = part, p->arg = arg;
    if (parts > p->most) p->most = parts;
    for (int32_t i = 0; i < parts; i++) {
        if (i == p->leaves_out) continue;
        jobs[n] = (own_job){p, i};
        assert_int_equal(pthread_create(&threads[n], NULL, own_thread, &jobs[n]), 0);
        n++;
    }
    for (int32_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    if (p->leaves_out >= 0) part(arg, 0), part(arg, parts), part(arg, -1);
}

static void every_index_runs_once_on_the_programs_threads(void **state)
{
    (void)state;
    atomic_int seen[1000];
    for (int32_t leaves_out = -1; leaves_out < 3; leaves_out++) {
        own_pool p = {.leaves_out = leaves_out};
        assert_ok(peri_host_pool_set(5, run_own, &p));
        assert_int_equal(peri_threads(), 5);
        for (int i = 0; i < 1000; i++) atomic_init(&seen[i], 0);
        marks m = {.seen = seen};
        peri__parallel_for(1000, 10, mark_range, &m);
        for (int i = 0; i < 1000; i++) assert_int_equal(seen[i], 1);
        assert_true(p.calls == 1 && p.most == 5 && m.ranges == 5);
    }
    assert_fails(peri_host_pool_set(0, run_own, NULL), PERI_EINVAL, "0 threads, allowed: 1..256");
    assert_ok(peri_host_pool_set(0, NULL, NULL));
    assert_ok(peri_threads_set(3));
}

/* -- processors ---------------------------------------------------------------------------------------------------- */

static void note_processors(void *ctx, int64_t begin, int64_t end)
{
    int32_t *of = ctx;
    cpu_set_t set;
    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0); /* of the thread that asks */
    for (int64_t i = begin; i < end; i++) of[i] = CPU_COUNT(&set) == 1 && CPU_ISSET(0, &set);
}

static void workers_are_bound_and_the_caller_is_not(void **state)
{
    (void)state;
    int32_t of[3] = {0}, first = 0, far = 1000;
    cpu_set_t before, after;
    sched_getaffinity(0, sizeof before, &before);
    if (!CPU_ISSET(0, &before) || CPU_COUNT(&before) < 2) return skip(); /* processor 0 is another's, or all there is */
    assert_ok(peri_threads_set(3));
    assert_ok(peri_host_affinity_set(&first, 1));
    peri__parallel_for(3, 1, note_processors, of);
    assert_true(!of[0] && of[1] && of[2]);
    sched_getaffinity(0, sizeof after, &after);
    assert_true(CPU_EQUAL(&before, &after));
    assert_ok(peri_host_affinity_set(&far, 1)); /* there is no such processor: workers stay where they are */
    peri__parallel_for(3, 1, note_processors, of);
    assert_true(!of[1] && !of[2]);
    assert_ok(peri_host_affinity_set(NULL, 0));
    assert_fails(peri_host_affinity_set(&(int32_t){-1}, 1), PERI_EINVAL, "processor -1, allowed: 0..1023");
    assert_fails(peri_host_affinity_set(NULL, 2), PERI_EINVAL, "processors is missing");
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
    if (begin > 0 && sigismember(&blocked, SIGCHLD) && sigismember(&blocked, SIGINT))
        atomic_fetch_add((atomic_int *)ctx, 1);
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

/** Products that all workers share; NULL if they are right. */
static void *multiplies(void *cpu)
{
    enum { N = 600 };
    const int64_t shape[2] = {N, N};
    bool good = true;
    for (int i = 0; i < 20 && good; i++) {
        peri_tensor *a = NULL, *b = NULL;
        double x = 0;
        good = peri_tensor_full(cpu, PERI_F32, 2, shape, 1, &a) >= 0 && peri_op_matmul(a, a, &b) >= 0 &&
               peri_tensor_item(b, N * N - 1, &x) >= 0 && x == N;
        peri_tensor_release(a);
        peri_tensor_release(b);
    }
    return good ? NULL : cpu;
}

/** A program that uses OpenBLAS, too, has its own number of threads outside of our products. */
static void threads_of_openblas_stay(void **state)
{
    (void)state;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL), *wrong[2];
    if (!library) skip();
    int (*threads)(void);
    void (*threads_set)(int);
    *(void **)&threads = dlsym(library, "openblas_get_num_threads");
    *(void **)&threads_set = dlsym(library, "openblas_set_num_threads");
    peri_device *cpu;
    pthread_t thread[2];
    assert_ok(peri_device_get("cpu", &cpu));
    for (int n = 3; n > 0; n -= 2) {
        bool one = false;
        threads_set(n);
        for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, multiplies, cpu), 0);
        for (const int64_t end = peri_time_ns() + 10000000000; !one && peri_time_ns() < end;) one = threads() == 1;
        for (int i = 0; i < 2; i++) pthread_join(thread[i], &wrong[i]);
        assert_true(one && !wrong[0] && !wrong[1]);
        assert_int_equal(threads(), n);
    }
    dlclose(library);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_index_runs_once),
    cmocka_unit_test(every_index_runs_once_on_the_programs_threads),
    cmocka_unit_test(workers_are_bound_and_the_caller_is_not),
    cmocka_unit_test(nested_ranges_run_serially),
    cmocka_unit_test(several_threads_share_the_pool),
    cmocka_unit_test(workers_take_no_signals),
    cmocka_unit_test(threads_of_openblas_stay),
    cmocka_unit_test(the_number_of_threads_is_bounded),
    cmocka_unit_test(time_goes_forward_and_pauses_pass),
    cmocka_unit_test(hashes_are_what_they_were),
};

check_main(tests)
