/* SPDX-License-Identifier: Apache-2.0
 *
 * test_comm.c: groups and works from C: ranks of sim worlds in one thread and in several, protocols of several phases,
 * deadlines, memory that runs out, streams.
 */
#include "tests/harness/check.h"

#include "runtime/comm/comm_internal.h"

#include <perilune/ops.h>

#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>

enum { MOST = 8 };

static peri_device *device_of(const char *name)
{
    peri_device *d = NULL;
    assert_ok(peri_device_get(name, &d));
    return d;
}

static int worlds;

/** All ranks of a new sim world of @n, in this thread. */
static void open_world(int32_t n, peri_group **group)
{
    char job[32];
    snprintf(job, sizeof job, "test %d", ++worlds);
    for (int32_t i = 0; i < n; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = job, .rank = i, .world_size = n, .timeout_s = 20};
        assert_ok(peri_comm_open(&config, &group[i]));
    }
}

static void close_world(int32_t n, peri_group **group)
{
    for (int32_t i = 0; i < n; i++) {
        peri_group_close(group[i]);
        peri_group_release(group[i]);
    }
}

static peri_tensor *filled(peri_device *d, int64_t n, double value)
{
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_full(d, PERI_F32, 1, &n, value, &t));
    return t;
}

static double item(peri_tensor *t, int64_t i)
{
    double x;
    assert_ok(peri_tensor_item(t, i, &x));
    return x;
}

/** Test all works in turn until they are done. */
static void run(peri_work **work, int32_t n)
{
    for (int round = 0; round < 100000; round++) {
        int32_t pending = 0;
        for (int32_t i = 0; i < n; i++) {
            peri_status status = peri_work_test(work[i]);
            assert_ok(status);
            pending += status == PERI_PENDING;
        }
        if (!pending) return;
    }
    fail_msg("the works do not end");
}

static void release(peri_work **work, int32_t n)
{
    for (int32_t i = 0; i < n; i++) peri_work_release(work[i]);
}

/* -- operations ---------------------------------------------------------------------------------------------------- */

static void sums_in_one_thread(void **state)
{
    (void)state;
    int64_t before = peri_mem_objects();
    peri_group *group[MOST];
    peri_work *work[MOST];
    peri_tensor *t[MOST];
    for (int32_t n = 1; n <= MOST; n++)
        for (int k = 0; k < 2; k++) {
            peri_device *d = device_of(k ? "opaque" : "cpu");
            open_world(n, group);
            for (int32_t i = 0; i < n; i++) {
                t[i] = filled(d, 1000, i + 1);
                assert_ok(peri_coll_all_reduce(group[i], t[i], PERI_REDUCE_SUM, 0, &work[i]));
            }
            run(work, n);
            for (int32_t i = 0; i < n; i++) {
                assert_true(item(t[i], 999) == n * (n + 1) / 2);
                peri_tensor_release(t[i]);
            }
            release(work, n);
            close_world(n, group);
        }
    assert_int_equal(peri_mem_objects(), before);
}

/** A third of 1, three times, is 1 to nearest, and more where the thread that adds them up rounds up. */
static void sums_are_rounded_to_nearest(void **state)
{
    (void)state;
    peri_group *group[3];
    peri_work *work[3];
    peri_tensor *t[3];
    open_world(3, group);
    fesetround(FE_UPWARD);
    for (int32_t i = 0; i < 3; i++) {
        t[i] = filled(device_of("cpu"), 100, 0x1.555556p-2);
        assert_ok(peri_coll_all_reduce(group[i], t[i], PERI_REDUCE_SUM, 0, &work[i]));
    }
    run(work, 3);
    assert_int_equal(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
    for (int32_t i = 0; i < 3; i++) {
        assert_true(item(t[i], 99) == 1);
        peri_tensor_release(t[i]);
    }
    release(work, 3);
    close_world(3, group);
}

typedef struct rank {
    peri_group *group;
    const char *device;
    double result;
} rank;

static void *rank_main(void *arg)
{
    rank *r = arg;
    int32_t me = peri_group_rank(r->group), n = peri_group_size(r->group);
    peri_device *d = NULL;
    if (peri_device_get(r->device, &d) < 0) return NULL;
    for (int step = 0; step < 20; step++) {
        peri_work *work;
        int64_t count = 100 + step;
        peri_tensor *t;
        if (peri_tensor_full(d, PERI_F32, 1, &count, me, &t) < 0) return NULL;
        if (peri_coll_all_reduce(r->group, t, PERI_REDUCE_SUM, 0, &work) < 0 || peri_work_wait(work) < 0) return NULL;
        double x = -1;
        if (peri_tensor_item(t, count - 1, &x) < 0 || x != n * (n - 1) / 2) return NULL;
        r->result += x;
        peri_work_release(work);
        peri_tensor_release(t);
    }
    return r;
}

static void sums_in_several_threads(void **state)
{
    (void)state;
    peri_group *group[MOST];
    pthread_t thread[MOST];
    rank ranks[MOST];
    for (int k = 0; k < 2; k++) {
        open_world(5, group);
        for (int32_t i = 0; i < 5; i++) {
            ranks[i] = (rank){.group = group[i], .device = k ? "opaque" : "cpu"};
            assert_int_equal(pthread_create(&thread[i], NULL, rank_main, &ranks[i]), 0);
        }
        for (int32_t i = 0; i < 5; i++) {
            void *result = NULL;
            pthread_join(thread[i], &result);
            assert_non_null(result);
            assert_true(ranks[i].result == 20 * 10);
        }
        close_world(5, group);
    }
}

/* -- protocols of several phases ----------------------------------------------------------------------------------- */

/** Exchange one number with every rank, then as many numbers as the first exchange said. */
typedef struct protocol {
    peri_work base;
    uint64_t number[2]; /* of the operations: sizes on one channel, data on another */
    peri_work *inner;
    int32_t phase;
    int64_t sent[MOST], received[MOST], ones[MOST];
    int64_t out[MOST * MOST], in[MOST * MOST], total;
    int32_t *ended; /* counts finis */
} protocol;

static void let_go(void *keep) { peri_work_release(keep); }

static peri_status exchange(protocol *p, const void *send, void *recv, const int64_t *send_counts,
                            const int64_t *recv_counts)
{
    peri_coll_op op = {.kind = PERI_COLL_ALL_TO_ALL,
                       .dtype = PERI_I64,
                       .send = send,
                       .recv = recv,
                       .send_counts = send_counts,
                       .recv_counts = recv_counts,
                       .channel = p->phase ? PERI_CHANNEL_IDS : PERI_CHANNEL_CONTROL,
                       .sequence = p->number[p->phase]};
    peri_work_retain(&p->base); /* its memory holds the buffers */
    return peri__coll_post_host(p->base.group, &op, p, let_go, &p->inner);
}

static peri_status protocol_step(peri_work *work)
{
    protocol *p = (protocol *)work;
    peri_status status = peri_work_test(p->inner);
    if (status != PERI_OK) return status;
    peri_work_release(p->inner);
    p->inner = NULL;
    if (p->phase == 1) {
        for (int32_t i = 0; i < MOST * MOST; i++) p->total += p->in[i];
        return PERI_OK;
    }
    p->phase = 1;
    PERI_TRY(exchange(p, p->out, p->in, p->sent, p->received));
    return PERI_PENDING;
}

static void protocol_fini(peri_work *work)
{
    protocol *p = (protocol *)work;
    peri_work_release(p->inner);
    if (p->ended) ++*p->ended;
}

static const peri__work_vtab protocol_vtab = {.name = "protocol", .step = protocol_step, .fini = protocol_fini};

static peri_status protocol_new(peri_group *g, int32_t *ended, peri_work **out)
{
    peri_work *work;
    PERI_TRY(peri__work_new(sizeof(protocol), &protocol_vtab, g, NULL, &work));
    protocol *p = (protocol *)work;
    p->ended = ended;
    peri_status status = peri__group_reserve(g, PERI_CHANNEL_CONTROL, 1, &p->number[0]);
    if (status >= 0) status = peri__group_reserve(g, PERI_CHANNEL_IDS, 1, &p->number[1]);
    /* to rank i: rank + i + 1 numbers */
    for (int32_t i = 0; i < g->size; i++) p->sent[i] = g->rank + i + 1, p->ones[i] = 1;
    for (int32_t i = 0; i < MOST * MOST; i++) p->out[i] = g->rank + 1;
    if (status >= 0) status = exchange(p, p->sent, p->received, p->ones, p->ones);
    return peri__work_hand_out(work, status, out);
}

static int64_t expected_total(int32_t n, int32_t me)
{
    int64_t total = 0;
    for (int32_t i = 0; i < n; i++) total += (i + me + 1) * (i + 1);
    return total;
}

/** Ranks reach the second phase at different times, with other operations posted before it on some and after it on
 *  others. */
static void phases_overlap(void **state)
{
    (void)state;
    enum { N = 3, K = 4 };
    peri_group *group[N];
    peri_work *work[K][N], *barrier[K][N];
    int32_t ended = 0;
    open_world(N, group);
    for (int32_t i = 0; i < N; i++)
        for (int k = 0; k < K; k++) {
            assert_ok(protocol_new(group[i], &ended, &work[k][i]));
            assert_ok(peri_coll_barrier(group[i], 0, &barrier[k][i]));
            for (int again = 0; again < i * 3; again++) peri_group_progress(group[i]);
        }
    /* Waiting for the last only: the others must move all the same, and on rank 1 nobody looks at the protocols at
     * all. */
    run(barrier[K - 1], N);
    for (int round = 0; round < 10; round++)
        for (int32_t i = 0; i < N; i++) peri_group_progress(group[i]);
    for (int k = 0; k < K; k++)
        for (int32_t i = 0; i < N; i++) {
            assert_int_equal(work[k][i]->status, PERI_OK);
            assert_int_equal(((protocol *)work[k][i])->total, expected_total(N, i));
        }
    for (int32_t i = 0; i < N; i++) assert_int_equal(peri_group_pending(group[i]), 0);
    for (int k = 0; k < K; k++) release(work[k], N), release(barrier[k], N);
    assert_int_equal(ended, K * N);
    close_world(N, group);
}

static void dropped_protocols_go_on(void **state)
{
    (void)state;
    peri_group *group[2];
    peri_work *work[2];
    int32_t ended = 0;
    open_world(2, group);
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(protocol_new(group[i], &ended, &work[i]));
        peri_work_release(work[i]);
    }
    assert_int_equal(ended, 0);
    for (int round = 0; round < 10; round++)
        for (int32_t i = 0; i < 2; i++) peri_group_progress(group[i]);
    assert_int_equal(ended, 2);
    close_world(2, group);
}

/* -- what goes wrong ----------------------------------------------------------------------------------------------- */

static void a_deadline_passes(void **state)
{
    (void)state;
    peri_log_level_set(PERI_LOG_ERROR);
    peri_group *group[2];
    peri_work *work;
    open_world(2, group);
    assert_ok(peri_group_timeout_set(group[0], 0.05));
    peri_tensor *t = filled(device_of("cpu"), 3, 1);
    assert_ok(peri_coll_all_reduce(group[0], t, PERI_REDUCE_SUM, 0, &work));
    int64_t start = peri_time_ns();
    assert_fails(peri_work_wait(work), PERI_ETIMEOUT,
                 "no end after 0.05 s: waiting for rank 1 (its last operation: 0)");
    assert_true(peri_time_ns() - start < (int64_t)5e9);
    assert_fails(peri_work_wait(work), PERI_ETIMEOUT, "no end after 0.05 s");
    assert_fails(peri_coll_barrier(group[0], 0, &work), PERI_EABORTED, "no end after 0.05 s");
    assert_fails(peri_group_healthy(group[0]), PERI_EABORTED, "group 'world' was given up");
    peri_work_release(work);
    assert_fails(peri_coll_all_reduce(group[1], t, PERI_REDUCE_SUM, 0, &work), PERI_EPEER, "rank 0 gave up");
    assert_fails(peri_coll_all_reduce(group[1], t, PERI_REDUCE_SUM, 0, &work), PERI_EABORTED, "rank 0 gave up");
    peri_tensor_release(t);
    close_world(2, group);
    peri_log_level_set(PERI_LOG_WARN);
}

/** The message of a failed call survives releases (style E5). */
static void releasing_keeps_the_message(void **state)
{
    (void)state;
    peri_group *group[1];
    peri_work *work;
    open_world(1, group);
    assert_ok(peri_coll_barrier(group[0], 0, &work));
    run(&work, 1);
    assert_true(peri_coll_barrier(NULL, 0, &work) == PERI_EINVAL);
    char before[PERI_MESSAGE_MAX];
    snprintf(before, sizeof before, "%s", peri_error_message());
    peri_work_release(work);
    peri_group_release(group[0]);
    peri_work_release(NULL);
    peri_group_release(NULL);
    peri_reducer_release(NULL);
    assert_string_equal(peri_error_message(), before);
}

/** One whole life of a world of two ranks, on @d; the first failure. */
static peri_status life(peri_device *d)
{
    char job[32];
    snprintf(job, sizeof job, "life %d", ++worlds);
    peri_group *group[2] = {NULL, NULL}, *pair[2] = {NULL, NULL};
    peri_work *work[2] = {NULL, NULL}, *two[2] = {NULL, NULL};
    peri_tensor *t[2] = {NULL, NULL};
    peri_reducer *reducer[2] = {NULL, NULL};
    peri_status status = PERI_OK;
    int64_t count = 10;
    int32_t ranks[2] = {1, 0};
    for (int32_t i = 0; i < 2; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = job, .rank = i, .world_size = 2, .timeout_s = 20};
        PERI_TRY_GOTO(peri_comm_open(&config, &group[i]), out);
        PERI_TRY_GOTO(peri_tensor_full(d, PERI_F32, 1, &count, 1, &t[i]), out);
        PERI_TRY_GOTO(peri_group_new(group[i], ranks, 2, "pair", &pair[i]), out);
        PERI_TRY_GOTO(peri_reducer_new(group[i], &t[i], 1, 0, &reducer[i]), out);
        PERI_TRY_GOTO(peri_coll_all_reduce(pair[i], t[i], PERI_REDUCE_SUM, 0, &work[i]), out);
        PERI_TRY_GOTO(protocol_new(group[i], NULL, &two[i]), out);
    }
    for (int32_t pending = 1; pending;) {
        pending = 0;
        for (int32_t i = 0; i < 2; i++) {
            PERI_TRY_GOTO(peri_work_test(work[i]), out);
            pending += status == PERI_PENDING;
            PERI_TRY_GOTO(peri_work_test(two[i]), out);
            pending += status == PERI_PENDING;
            PERI_TRY_GOTO(peri_reducer_finish(reducer[i]), out);
            pending += status == PERI_PENDING;
        }
    }
    status = PERI_OK;
out:
    for (int32_t i = 0; i < 2; i++) {
        if (status < 0 && group[i]) peri_group_abort(group[i], "out of memory");
        if (group[i]) peri_group_progress(group[i]);
        peri_reducer_release(reducer[i]);
        peri_work_release(work[i]);
        peri_work_release(two[i]);
        peri_tensor_release(t[i]);
        peri_group_release(pair[i]);
        if (group[i]) peri_group_progress(group[i]);
    }
    close_world(group[1] ? 2 : group[0] ? 1 : 0, group);
    return status;
}

/** Run the backward passes of two ranks in turns. */
static peri_status backward_both(peri_backward **pass)
{
    for (int32_t pending = 1; pending;) {
        pending = 0;
        for (int32_t i = 0; i < 2; i++) {
            peri_status status = peri_backward_step(pass[i]);
            if (status < 0) return status;
            pending += status == PERI_PENDING;
        }
    }
    return PERI_OK;
}

/** Lists and blocks between two ranks, forward and backward. */
static peri_status lists_life(peri_device *d)
{
    static const int32_t row[] = {1, 0};
    peri_group *group[2] = {0};
    peri_tensor *in[4] = {0}, *got[4] = {0}, *result[2] = {0};
    peri_work *work[4] = {0};
    peri_backward *pass[2] = {0};
    peri_status status;
    char job[32];
    int64_t square[] = {4, 4};
    peri_tpu_all_to_all_args blocks = {
        .group_assignment = row, .groups = 1, .replicas = 2, .split_dimension = 1, .split_count = 2};
    snprintf(job, sizeof job, "lists %d", ++worlds);
    for (int32_t i = 0; i < 2; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = job, .rank = i, .world_size = 2, .timeout_s = 20};
        PERI_TRY_GOTO(peri_comm_open(&config, &group[i]), out);
        for (int32_t k = 0; k < 2; k++) {
            PERI_TRY_GOTO(peri_tensor_full(d, PERI_F32, 2, square, 1 + i, &in[2 * i + k]), out);
            PERI_TRY_GOTO(peri_tensor_new(d, PERI_F32, 2, square, &got[2 * i + k]), out);
            PERI_TRY_GOTO(peri_tensor_requires_grad_set(in[2 * i + k], true), out);
        }
        PERI_TRY_GOTO(peri_coll_all_to_all_list(group[i], &got[2 * i], &in[2 * i], true, 0, &work[2 * i]), out);
        PERI_TRY_GOTO(peri_coll_tpu_all_to_all(group[i], got[2 * i + 1], &blocks, &result[i], &work[2 * i + 1]), out);
    }
    for (int32_t pending = 1; pending;) {
        pending = 0;
        for (int32_t i = 0; i < 4; i++) {
            PERI_TRY_GOTO(peri_work_test(work[i]), out);
            pending += status == PERI_PENDING;
        }
    }
    for (int32_t i = 0; i < 2; i++) PERI_TRY_GOTO(peri_backward_new(&result[i], &result[i], 1, &pass[i]), out);
    PERI_TRY_GOTO(backward_both(pass), out);
    status = PERI_OK;
out:
    for (int32_t i = 0; i < 2; i++) {
        if (status < 0 && group[i]) peri_group_abort(group[i], "out of memory");
        if (group[i]) peri_group_progress(group[i]);
    }
    for (int32_t i = 0; i < 2; i++) peri_backward_release(pass[i]), peri_tensor_release(result[i]);
    for (int32_t i = 0; i < 4; i++) peri_work_release(work[i]), peri_tensor_release(in[i]), peri_tensor_release(got[i]);
    for (int32_t i = 0; i < 2; i++)
        if (group[i]) peri_group_progress(group[i]);
    close_world(group[1] ? 2 : group[0] ? 1 : 0, group);
    return status;
}

/** Averages at the end of backward passes between two ranks; that of rank 1 reaches what the reducer watches, and no
 *  parameter. */
static peri_status reducer_life(peri_device *d)
{
    peri_group *group[2] = {0};
    peri_tensor *leaf[2] = {0}, *other = NULL, *result[2] = {0}, *grad = NULL;
    peri_reducer *reducer[2] = {0};
    peri_backward *pass[2] = {0};
    peri_status status;
    char job[32];
    int64_t count = 10;
    double average[2] = {0, 0};
    snprintf(job, sizeof job, "reducers %d", ++worlds);
    PERI_TRY_GOTO(peri_tensor_full(d, PERI_F32, 1, &count, 1, &other), out);
    PERI_TRY_GOTO(peri_tensor_requires_grad_set(other, true), out);
    for (int32_t i = 0; i < 2; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = job, .rank = i, .world_size = 2, .timeout_s = 20};
        PERI_TRY_GOTO(peri_comm_open(&config, &group[i]), out);
        PERI_TRY_GOTO(peri_tensor_full(d, PERI_F32, 1, &count, 1, &leaf[i]), out);
        PERI_TRY_GOTO(peri_tensor_requires_grad_set(leaf[i], true), out);
        PERI_TRY_GOTO(peri_reducer_new(group[i], &leaf[i], 1, 0, &reducer[i]), out);
        PERI_TRY_GOTO(peri_op_affine(i ? other : leaf[i], 3, 0, &result[i]), out);
        PERI_TRY_GOTO(peri_reducer_watch(reducer[i], result[i]), out);
        PERI_TRY_GOTO(peri_backward_new(&result[i], &other, 1, &pass[i]), out);
    }
    PERI_TRY_GOTO(backward_both(pass), out);
    for (int32_t i = 0; i < 2; i++) {
        PERI_TRY_GOTO(peri_tensor_grad(leaf[i], &grad), out);
        assert_non_null(grad);
        PERI_TRY_GOTO(peri_tensor_item(grad, 0, &average[i]), out);
        peri_tensor_release(grad);
        grad = NULL;
        assert_true(average[i] == 1.5);
    }
out:
    for (int32_t i = 0; i < 2; i++) {
        if (status < 0 && group[i]) peri_group_abort(group[i], "out of memory");
        if (group[i]) peri_group_progress(group[i]);
    }
    peri_tensor_release(grad);
    for (int32_t i = 0; i < 2; i++) {
        peri_backward_release(pass[i]), peri_tensor_release(result[i]), peri_reducer_release(reducer[i]),
            peri_tensor_release(leaf[i]);
        if (group[i]) peri_group_progress(group[i]);
    }
    peri_tensor_release(other);
    close_world(group[1] ? 2 : group[0] ? 1 : 0, group);
    return status;
}

static void runs_out(peri_status (*life_of)(peri_device *d))
{
    peri_log_level_set(PERI_LOG_ERROR);
    for (int which = 0; which < 2; which++) {
        peri_device *d = device_of(which ? "opaque" : "cpu");
        assert_ok(life_of(d));
        assert_ok(peri_device_synchronize(d));
        int64_t before = peri_mem_objects(), k = 1;
        for (;; k++) {
            assert_ok(peri_fault_arm("alloc", k));
            peri_status status = life_of(d);
            assert_ok(peri_fault_arm("alloc", 0));
            assert_ok(peri_device_synchronize(d));
            assert_int_equal(peri_mem_objects(), before);
            if (status >= 0) break;
            if (status != PERI_ENOMEM && status != PERI_EPEER && status != PERI_EABORTED)
                fail_msg("allocation %lld: %s: %s", (long long)k, peri_status_name(status), peri_error_message());
            assert_true(k < 1000);
        }
        assert_true(k > 30);
    }
    peri_log_level_set(PERI_LOG_WARN);
}

static void memory_runs_out(void **state)
{
    (void)state;
    runs_out(life);
}

static void memory_runs_out_in_lists(void **state)
{
    (void)state;
    runs_out(lists_life);
}

static void memory_runs_out_in_reducers(void **state)
{
    (void)state;
    runs_out(reducer_life);
}

/* -- streams ------------------------------------------------------------------------------------------------------- */

/** Inputs made on one stream, posted on a second, waited for on a third; the output's home is a fourth. */
static void streams_are_joined(void **state)
{
    (void)state;
    peri_device *d = device_of("opaque");
    for (uint64_t seed = 1; seed <= 20; seed++) {
        peri_group *group[2];
        peri_work *work[2];
        peri_tensor *in[2], *out[2], *copy[2];
        peri_stream *make, *post, *use, *home;
        peri_event *made, *cleared, *used;
        assert_ok(peri_device_seed(d, seed));
        open_world(2, group);
        assert_ok(peri_stream_new(d, &make));
        assert_ok(peri_stream_new(d, &post));
        assert_ok(peri_stream_new(d, &use));
        assert_ok(peri_stream_new(d, &home));
        assert_ok(peri_event_new(d, &made));
        assert_ok(peri_event_new(d, &cleared));
        assert_ok(peri_event_new(d, &used));
        assert_ok(peri_stream_current_set(d, make));
        for (int32_t i = 0; i < 2; i++) in[i] = filled(d, 500, i + 1);
        assert_ok(peri_event_record(made, make));
        assert_ok(peri_stream_current_set(d, home));
        for (int32_t i = 0; i < 2; i++) out[i] = filled(d, 1000, 99);
        assert_ok(peri_event_record(cleared, home));
        assert_ok(peri_stream_current_set(d, post));
        assert_ok(peri_stream_wait(post, made));
        assert_ok(peri_stream_wait(post, cleared));
        for (int32_t i = 0; i < 2; i++) {
            assert_ok(peri_coll_all_gather(group[i], out[i], in[i], 0, &work[i]));
            peri_tensor_release(in[i]);
        }
        assert_ok(peri_stream_current_set(d, use));
        run(work, 2);
        for (int32_t i = 0; i < 2; i++) {
            assert_ok(peri_tensor_to(out[i], PERI_F64, NULL, &copy[i]));
            assert_ok(peri_event_record(used, use)); /* work of another stream is joined to the home before the last
                                                        release */
            assert_ok(peri_stream_wait(home, used));
            peri_tensor_release(out[i]);
            assert_true(item(copy[i], 0) == 1 && item(copy[i], 499) == 1 && item(copy[i], 500) == 2 &&
                        item(copy[i], 999) == 2);
            peri_tensor_release(copy[i]);
        }
        release(work, 2);
        assert_ok(peri_stream_current_set(d, NULL));
        close_world(2, group);
        peri_event_release(made);
        peri_event_release(cleared);
        peri_event_release(used);
        peri_stream_release(make);
        peri_stream_release(post);
        peri_stream_release(use);
        peri_stream_release(home);
        assert_ok(peri_device_synchronize(d));
    }
}

/* -- asking -------------------------------------------------------------------------------------------------------- */

static void groups_answer(void **state)
{
    (void)state;
    peri_group *group[4], *sub = NULL;
    char job[] = "answers", reason[64];
    for (int32_t i = 0; i < 4; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = job, .rank = i, .world_size = 4, .local_size = 2};
        assert_ok(peri_comm_open(&config, &group[i]));
    }
    peri_comm_config taken = {.size = sizeof taken, .transport = "sim", .job = job, .rank = 1, .world_size = 4},
                     other = {.size = sizeof other, .transport = "sim", .job = job, .rank = 1, .world_size = 5};
    assert_fails(peri_comm_open(&taken, &sub), PERI_EINVAL, "rank 1 of world 'answers' is taken");
    assert_fails(peri_comm_open(&other, &sub), PERI_EMISMATCH, "has 4 ranks, rank 1 says 5");
    assert_null(sub);
    assert_string_equal(peri_group_name(group[2]), "world");
    assert_string_equal(peri_group_transport(group[2]), "sim");
    assert_int_equal(peri_group_local_rank(group[3]), 1);
    assert_int_equal(peri_group_node(group[0], 3), 1);
    assert_int_equal(peri_group_node(group[0], 4), -1);
    assert_int_equal(peri_group_global_rank(group[0], -1), -1);
    int32_t list[] = {3, 1};
    assert_ok(peri_group_new(group[1], list, 2, "odd", &sub));
    assert_int_equal(peri_group_rank(sub), 1);
    assert_int_equal(peri_group_global_rank(sub, 0), 3);
    assert_true(peri_group_timeout(sub) > 0);
    peri_group_release(sub);
    assert_fails(peri_group_new(group[1], list, 2, "", &sub), PERI_EINVAL, "needs a name");
    assert_fails(peri_group_timeout_set(group[1], 0), PERI_EINVAL, "0 s, allowed");
    assert_true(peri_comm_probe("sim", NULL, 0));
    assert_false(peri_comm_probe("carrier pigeon", reason, sizeof reason));
    assert_non_null(strstr(reason, "no such transport"));
    peri_work *work;
    assert_fails(peri_coll_barrier(NULL, 0, &work), PERI_EINVAL, "no group (is this rank a member?)");
    close_world(4, group);
}

/* -- channels ------------------------------------------------------------------------------------------------------ */

/** A sum of one number, which lives until the work is complete. */
static void post_sum(peri_group *g, int32_t channel, uint64_t sequence, int64_t *number, peri_work **out)
{
    peri_coll_op op = {.kind = PERI_COLL_ALL_REDUCE,
                       .dtype = PERI_I64,
                       .count = 1,
                       .channel = channel,
                       .sequence = sequence,
                       .send = number,
                       .recv = number};
    assert_ok(peri__coll_post_host(g, &op, NULL, NULL, out));
}

/** What is ready before its turn waits for it; other channels pass. */
static void a_channel_keeps_its_order(void **state)
{
    (void)state;
    peri_group *group[2];
    peri_work *first[2], *second[2], *other[2];
    uint64_t number[2];
    int64_t x[2] = {1, 2}, y[2] = {10, 20};
    char text[4096];
    open_world(2, group);
    for (int i = 0; i < 2; i++) {
        assert_ok(peri__group_reserve(group[i], PERI_CHANNEL_IDS, 3, &number[i]));
        post_sum(group[i], PERI_CHANNEL_IDS, number[i] + 2, &y[i], &second[i]);
        assert_ok(peri_coll_barrier(group[i], 0, &other[i]));
    }
    run(other, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(peri_work_test(second[i]), PERI_PENDING);
        peri__group_skip(group[i], PERI_CHANNEL_IDS, number[i] + 1);
        assert_int_equal(peri_work_test(second[i]), PERI_PENDING);
        post_sum(group[i], PERI_CHANNEL_IDS, number[i], &x[i], &first[i]);
    }
    run(first, 2);
    run(second, 2);
    assert_int_equal(x[0], 3);
    assert_int_equal(y[1], 30);
    peri_group_record(group[0], text, sizeof text);
    assert_non_null(strstr(text, "operation 3: all_reduce sum i64 [1] on channel ids"));
    release(first, 2), release(second, 2), release(other, 2);
    close_world(2, group);
}

/** An operation whose turn never comes ends by its deadline and says what it waited for. */
static void a_turn_that_never_comes(void **state)
{
    (void)state;
    peri_group *group[2];
    peri_work *work;
    uint64_t number;
    int64_t x = 1;
    open_world(2, group);
    assert_ok(peri__group_reserve(group[0], PERI_CHANNEL_ROWS, 2, &number));
    post_sum(group[0], PERI_CHANNEL_ROWS, number + 1, &x, &work);
    assert_int_equal(peri_work_test(work), PERI_PENDING);
    peri_group_expire(group[0]);
    assert_int_equal(peri_work_test(work), PERI_ETIMEOUT);
    assert_non_null(
        strstr(peri_error_message(), "waiting for operation 1 of this rank, which its channel posts before"));
    peri_work_release(work);
    close_world(2, group);
}

/** sim is strict where a library that matches by order would hang or mix messages up. */
static void sim_refuses_another_order(void **state)
{
    (void)state;
    for (int later = 0; later < 2; later++) { /* which rank posts first */
        peri_group *group[2];
        peri_work *work[3];
        uint64_t number[2];
        int64_t x[3] = {1, 2, 3};
        open_world(2, group);
        for (int i = 0; i < 2; i++) assert_ok(peri__group_reserve(group[i], PERI_CHANNEL_ROWS, 2, &number[i]));
        peri__group_skip(group[1], PERI_CHANNEL_ROWS, number[1]);
        if (later) post_sum(group[1], PERI_CHANNEL_ROWS, number[1] + 1, &x[0], &work[0]);
        post_sum(group[0], PERI_CHANNEL_ROWS, number[0], &x[1], &work[1]);
        if (!later) post_sum(group[1], PERI_CHANNEL_ROWS, number[1] + 1, &x[0], &work[0]);
        assert_int_equal(peri_work_test(work[1]), PERI_EMISMATCH);
        assert_non_null(strstr(peri_error_message(), "rank 1 left it out and posted operation 2"));
        assert_true(peri_work_test(work[0]) < 0);
        release(work, 2);
        close_world(2, group);
    }
}

/** Whoever gives a world up may release it before its works end: those on the group of a node look at the world still,
 *  in the core and in the transport. */
static void works_of_a_node_keep_the_world(void **state)
{
    (void)state;
    const int64_t before = peri_mem_objects();
    peri_device *cpu = device_of("cpu");
    for (int closed = 0; closed < 2; closed++) {
        peri_group *group[4], *node[4];
        for (int32_t i = 0; i < 4; i++) {
            const peri_comm_config config = {.size = sizeof config, .transport = "sim", .rank = i, .world_size = 4,
                                             .job = closed ? "node closed" : "node left", .timeout_s = 20,
                                             .local_size = 2};
            assert_ok(peri_comm_open(&config, &group[i]));
        }
        for (int32_t i = 0; i < 4; i++) assert_ok(peri__group_node(group[i], &node[i]));
        peri_tensor *t = filled(cpu, 10, 1);
        peri_work *work;
        assert_ok(peri_coll_all_reduce(node[0], t, PERI_REDUCE_SUM, 0, &work)); /* rank 1 never does */
        for (int32_t i = 0; i < 4; i++) {
            if (closed) peri_group_abort(group[i], "given up");
            if (closed) (void)peri_group_close(group[i]);
            peri_group_release(group[i]);
        }
        for (int k = 0; k < 3; k++) (void)peri_work_test(work);
        if (closed) assert_true(peri_work_test(work) < 0);
        peri_tensor_release(t);
        if (!closed) work->expired = true;
        assert_true(peri_work_test(work) < 0);
        peri_work_release(work);
    }
    assert_int_equal(peri_mem_objects(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_in_one_thread),
        cmocka_unit_test(sums_in_several_threads),
        cmocka_unit_test(sums_are_rounded_to_nearest),
        cmocka_unit_test(phases_overlap),
        cmocka_unit_test(dropped_protocols_go_on),
        cmocka_unit_test(a_deadline_passes),
        cmocka_unit_test(releasing_keeps_the_message),
        cmocka_unit_test(works_of_a_node_keep_the_world),
        cmocka_unit_test(memory_runs_out),
        cmocka_unit_test(memory_runs_out_in_lists),
        cmocka_unit_test(memory_runs_out_in_reducers),
        cmocka_unit_test(streams_are_joined),
        cmocka_unit_test(groups_answer),
        cmocka_unit_test(a_channel_keeps_its_order),
        cmocka_unit_test(a_turn_that_never_comes),
        cmocka_unit_test(sim_refuses_another_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
