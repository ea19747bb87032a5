/* SPDX-License-Identifier: Apache-2.0
 *
 * test_device.c: the device contract, on "cpu" and on "opaque": order within streams, events between them, copies,
 * launches, matrix products, memory that the host cannot touch.
 */
#include "tests/harness/check.h"
#include "kernels/convert.h"
#include "kernels/dense.h"

#include "runtime/tensor/tensor_internal.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const names[] = {"cpu", "opaque"};
enum { DEVICES = 2, N = 1000 };

/** What stands behind the name opaque: itself, kernels/cuda on the host, or a GPU, which shows no mistakes of order or
 *  of freed memory. */
static const char *opaque_is(void)
{
    const char *other = getenv("PERI_OPAQUE_DEVICE");
    return other ? other : "opaque";
}
static bool shows_mistakes(void) { return strncmp(opaque_is(), "cuda", 4) != 0 || !strcmp(opaque_is(), "cuda_host"); }

static peri_device *device_of(const char *name)
{
    peri_device *d = NULL;
    assert_ok(peri_device_get(name, &d));
    return d;
}

static peri_tensor *numbers(peri_device *d, int64_t n, double value)
{
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_full(d, PERI_F64, 1, &n, value, &t));
    return t;
}

static double first(peri_tensor *t)
{
    double x;
    assert_ok(peri_tensor_item(t, 0, &x));
    return x;
}

/** y += alpha * x on the current stream. */
static void add(peri_tensor *y, peri_tensor *x, double alpha)
{
    peri_k_axpy_args args = {.y = peri__data(y), .x = peri__data(x), .dtype = PERI_F64, .alpha = alpha};
    assert_ok(PERI_LAUNCH(peri__device(y), axpy, &args, peri__numel(y), 64));
}

enum { THREADS = 3, ROUNDS = 200 };

/** Pins numbers and sends them to the device, on a stream of this thread's own, and looks at them later; true: all were
 *  right. */
static void *pin_and_send(void *arg)
{
    peri_device *d = device_of("opaque"), *cpu = device_of("cpu");
    peri_stream *stream = NULL;
    peri_tensor *sent[8] = {0};
    bool right = peri_stream_new(d, &stream) >= 0 && peri_stream_current_set(d, stream) >= 0;
    for (int64_t i = 0; i < ROUNDS && right; i++) {
        int64_t n = 1000 + 100 * (i % 3);
        double value = (double)(intptr_t)arg * 1000 + (double)i;
        peri_tensor *t = NULL, *pinned = NULL, **place = &sent[i % 8];
        right = peri_tensor_full(cpu, PERI_F64, 1, &n, value, &t) >= 0 && peri_tensor_pin(t, d, &pinned) >= 0;
        double before = value - 8, got = before;
        if (right && *place) right = peri_tensor_item(*place, 999, &got) >= 0 && got == before;
        peri_tensor_release(*place);
        *place = NULL;
        right = right && peri_tensor_is_pinned(pinned) && peri_tensor_upload(pinned, -1, d, place) >= 0;
        peri_tensor_release(t);
        peri_tensor_release(pinned); /* the copy may still be on its way */
    }
    for (int i = 0; i < 8; i++) peri_tensor_release(sent[i]);
    if (peri_stream_current_set(d, NULL) < 0) right = false;
    peri_stream_release(stream);
    return right ? arg : NULL;
}

static void pinned_memory_is_used_again_when_its_copies_have_run(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    int64_t objects = peri_mem_objects();
    for (intptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, pin_and_send, (void *)(i + 1)), 0);
    for (intptr_t i = 0; i < THREADS; i++) {
        void *right = NULL;
        pthread_join(threads[i], &right);
        assert_ptr_equal(right, (void *)(i + 1));
    }
    assert_int_equal(peri_mem_objects(), objects);
    peri_tensor *t = NULL;
    assert_fails(peri_tensor_new_pinned(device_of("cpu"), PERI_F32, 1, &(int64_t){3}, &t), PERI_EINVAL,
                 "nothing to pin");
    assert_fails(peri_tensor_new_pinned(device_of("opaque"), 99, 1, &(int64_t){3}, &t), PERI_EINVAL, "99 is no dtype");
    assert_fails(peri_tensor_new_pinned(device_of("opaque"), PERI_F32, 1, &(int64_t){-3}, &t), PERI_EINVAL,
                 "is negative");
    assert_ok(peri_tensor_new_pinned(device_of("opaque"), PERI_F32, 1, &(int64_t){0}, &t));
    peri_tensor_release(t);
}

static void devices_have_names(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(names[i]);
        assert_string_equal(peri_device_name(d), names[i]);
        assert_ptr_equal(device_of(names[i]), d);
        assert_int_equal(peri_device_host_access(d), i == 0);
        assert_true(peri_device_probe(names[i], NULL, 0));
    }
    assert_ptr_equal(device_of("cpu:0"), device_of("cpu")); /* there is only one */
    if (!strcmp(opaque_is(), "opaque")) assert_ptr_equal(device_of("opaque:0"), device_of("opaque"));
    peri_device *none = NULL;
    assert_fails(peri_device_get("gpu", &none), PERI_ENOTFOUND, "gpu");
    assert_fails(peri_device_get("", &none), PERI_ENOTFOUND, "is no device");
    assert_fails(peri_device_get("cpu:x", &none), PERI_ENOTFOUND, "'x' is no device number");
    assert_fails(peri_device_get("cpu:", &none), PERI_ENOTFOUND, "is no device number");
    assert_fails(peri_device_get("cpu:-1", &none), PERI_ENOTFOUND, "is no device number");
    assert_fails(peri_device_get("cpu:00", &none), PERI_ENOTFOUND, "'00' is no device number");
    assert_fails(peri_device_get("cpu:+0", &none), PERI_ENOTFOUND, "'+0' is no device number");
    assert_fails(peri_device_get("cpu: 0", &none), PERI_ENOTFOUND, "' 0' is no device number");
    assert_fails(peri_device_get("cpu:99999999999999999999", &none), PERI_ENOTFOUND, "is no device number");
    assert_fails(peri_device_get("cpu:7", &none), PERI_ENOTFOUND, "only device 0");
    if (!strcmp(opaque_is(), "opaque"))
        assert_fails(peri_device_get("opaque:1", &none), PERI_ENOTFOUND, "only device 0");
    assert_fails(peri_device_get("a-name-that-is-much-longer-than-any-device", &none), PERI_ENOTFOUND, "is no device");
    assert_fails(peri_device_get(NULL, &none), PERI_EINVAL, "no name");
    assert_null(none);
}

static void a_stream_runs_in_order(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(names[i]);
        peri_tensor *x = numbers(d, N, 1), *y = numbers(d, N, 0);
        for (int k = 1; k <= 20; k++) {
            assert_ok(peri_tensor_copy(x, y));  /* x = y */
            assert_ok(peri_tensor_fill(y, k));  /* y = k */
            add(y, x, 2);                       /* y = k + 2x */
        }
        double want = 0;
        for (int k = 1; k <= 20; k++) want = k + 2 * want;
        assert_true(first(y) == want);
        peri_tensor_release(x);
        peri_tensor_release(y);
    }
}

/** One producer and one consumer on two streams; @joined says whether an event orders them. Returns what the consumer
 *  saw. */
static double two_streams(peri_device *d, bool joined)
{
    peri_stream *a, *b;
    peri_event *made;
    assert_ok(peri_stream_new(d, &a));
    assert_ok(peri_stream_new(d, &b));
    assert_ok(peri_event_new(d, &made));
    peri_tensor *x = numbers(d, N, 0), *y = numbers(d, N, 0);
    assert_ok(peri_device_synchronize(d));
    assert_ok(peri_stream_current_set(d, a));
    assert_ok(peri_tensor_fill(x, 7));
    assert_ok(peri_event_record(made, a));
    assert_ok(peri_stream_current_set(d, b));
    if (joined) assert_ok(peri_stream_wait(b, made));
    add(y, x, 1);
    assert_ok(peri_stream_synchronize(b));
    double seen = first(y);
    assert_ok(peri_stream_synchronize(a));
    assert_ok(peri_stream_current_set(d, NULL));
    peri_tensor_release(x);
    peri_tensor_release(y);
    peri_event_release(made);
    peri_stream_release(a);
    peri_stream_release(b);
    return seen;
}

static void events_order_streams(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++)
        for (uint64_t seed = 1; seed <= 20; seed++) {
            assert_ok(peri_device_seed(device_of(names[i]), seed));
            assert_true(two_streams(device_of(names[i]), true) == 7);
        }
}

static void a_forgotten_event_shows_on_opaque(void **state)
{
    (void)state;
    if (!shows_mistakes()) skip();
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        assert_ok(peri_device_seed(device_of("opaque"), seed));
        wrong += two_streams(device_of("opaque"), false) != 7;
    }
    assert_true(wrong > 5);
    assert_ok(peri_device_seed(device_of("opaque"), 1));
}

static void the_order_follows_the_seed(void **state)
{
    (void)state;
    if (!shows_mistakes()) skip();
    for (uint64_t seed = 1; seed <= 10; seed++) {
        double seen[2];
        for (int twice = 0; twice < 2; twice++) {
            assert_ok(peri_device_seed(device_of("opaque"), seed));
            seen[twice] = two_streams(device_of("opaque"), false);
        }
        assert_true(seen[0] == seen[1]);
    }
}

static void work_is_late_on_opaque_and_polling_gets_there(void **state)
{
    (void)state;
    if (!shows_mistakes()) skip();
    peri_device *d = device_of("opaque");
    peri_event *e;
    assert_ok(peri_event_new(d, &e));
    assert_int_equal(peri_event_query(e), PERI_OK); /* never recorded */
    assert_ok(peri_event_synchronize(e));
    assert_ok(peri_stream_wait(peri_stream_current(d), e));
    assert_ok(peri_device_synchronize(d));
    peri_tensor *x = numbers(d, N, 0);
    for (int k = 0; k < 5; k++) assert_ok(peri_tensor_fill(x, k));
    assert_ok(peri_event_record(e, peri_stream_current(d)));
    int pending = 0;
    while (peri_event_query(e) == PERI_PENDING) assert_true(++pending < 1000);
    assert_true(pending > 0);
    assert_int_equal(peri_event_query(e), PERI_OK);
    peri_tensor_release(x);
    peri_event_release(e);
}

static void synchronize_waits_for_every_stream(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(names[i]);
        peri_stream *side;
        peri_event *end;
        assert_ok(peri_stream_new(d, &side));
        assert_ok(peri_event_new(d, &end));
        peri_tensor *x = numbers(d, N, 0);
        assert_ok(peri_device_synchronize(d));
        assert_ok(peri_stream_current_set(d, side));
        for (int k = 1; k <= 5; k++) assert_ok(peri_tensor_fill(x, k)); /* more than one query could run */
        assert_ok(peri_event_record(end, side));
        assert_ok(peri_stream_current_set(d, NULL));
        assert_ok(peri_device_synchronize(d));
        assert_int_equal(peri_event_query(end), PERI_OK);
        peri_stream_release(side); /* with the event still pointing at it */
        assert_int_equal(peri_event_query(end), PERI_OK);
        assert_true(first(x) == 5);
        peri_tensor_release(x);
        peri_event_release(end);
    }
}

static void host_memory_is_consumed_by_a_copy_to_the_device(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        double data[8], back[8];
        int64_t n = 8;
        peri_tensor *t = NULL;
        assert_ok(peri_tensor_new(device_of(names[i]), PERI_F64, 1, &n, &t));
        for (int k = 0; k < 8; k++) data[k] = k;
        assert_ok(peri_tensor_write(t, data, sizeof data));
        memset(data, 0xff, sizeof data);
        assert_ok(peri_tensor_read(t, back, sizeof back));
        for (int k = 0; k < 8; k++) assert_true(back[k] == k);
        peri_tensor_release(t);
    }
}

static void devices_do_not_mix(void **state)
{
    (void)state;
    peri_event *e;
    peri_stream *s;
    assert_ok(peri_event_new(device_of("cpu"), &e));
    assert_ok(peri_stream_new(device_of("opaque"), &s));
    assert_fails(peri_stream_wait(s, e), PERI_EINVAL, "a stream of opaque and an event of cpu");
    assert_fails(peri_event_record(e, s), PERI_EINVAL, "an event of cpu");
    assert_fails(peri_stream_current_set(device_of("cpu"), s), PERI_EINVAL, "a stream of opaque on device cpu");
    peri_event_release(e);
    peri_stream_release(s);
}

/** What a child process that reads or writes element 0 from the host dies of; 0 when it lives. */
static int touch(peri_tensor *t, bool writing)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL); /* cmocka catches it */
        volatile char *p = peri__data(t);
        if (writing) *p = 1;
        else (void)*p;
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

static void the_host_dies_when_it_touches_opaque_memory(void **state)
{
    (void)state;
    if (!shows_mistakes()) skip();
    peri_tensor *open = numbers(device_of("cpu"), N, 1), *shut = numbers(device_of("opaque"), N, 1);
    assert_true(first(shut) == 1); /* its pages exist and were used */
    assert_int_equal(touch(open, false), 0);
    assert_int_equal(touch(open, true), 0);
    assert_int_not_equal(touch(shut, false), 0);
    assert_int_not_equal(touch(shut, true), 0);
    peri_tensor_release(open);
    peri_tensor_release(shut);
}

static void freed_memory_on_opaque_loses_its_contents(void **state)
{
    (void)state;
    if (strcmp(opaque_is(), "opaque") != 0) skip(); /* others may take other pages */
    peri_device *d = device_of("opaque");
    peri_tensor *x = numbers(d, 512, 5);
    void *at = peri__data(x);
    assert_true(first(x) == 5);
    peri_tensor_release(x);
    assert_ok(peri_device_synchronize(d));
    int64_t n = 512;
    peri_tensor *y = NULL;
    assert_ok(peri_tensor_new(d, PERI_F64, 1, &n, &y));
    assert_ptr_equal(peri__data(y), at); /* the same pages again */
    assert_true(first(y) != 5);
    peri_tensor_release(y);
}

/** Argument structs have padding, and compilers leave there what the stack held: halves of addresses, say. */
static void padding_of_arguments_does_not_matter(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_tensor *t = numbers(device_of(names[i]), 4, 0), *x = numbers(device_of(names[i]), 4, 1);
        uintptr_t stale[] = {(uintptr_t)peri__data(t), (uintptr_t)peri__data(x), (uintptr_t)&state,
                             (uintptr_t)&device_of,    (uintptr_t)&printf,       (uintptr_t)t};
        for (size_t k = 0; k < sizeof stale / sizeof *stale; k++)
            for (int more = -2; more <= 2; more++) {
                peri_k_fill_args fill;
                peri_k_axpy_args args;
                uint32_t half = (uint32_t)(stale[k] >> 32) + (uint32_t)more;
                for (size_t at = 0; at + 4 <= sizeof fill; at += 4) memcpy((char *)&fill + at, &half, 4);
                for (size_t at = 0; at + 4 <= sizeof args; at += 4) memcpy((char *)&args + at, &half, 4);
                fill.dst = peri__data(t), fill.dtype = PERI_F64, fill.value = 5, fill.ivalue = 5;
                assert_ok(PERI_LAUNCH(peri__device(t), fill, &fill, 4, 1));
                args.y = peri__data(t), args.x = peri__data(x), args.dtype = PERI_F64, args.alpha = 2;
                assert_ok(PERI_LAUNCH(peri__device(t), axpy, &args, 4, 1));
                assert_true(first(t) == 7);
            }
        peri_tensor_release(t);
        peri_tensor_release(x);
    }
}

static void products_match_the_definition(void **state)
{
    (void)state;
    static const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 2}, {300, 7, 9}, {4, 6, 0}, {0, 3, 2}};
    for (int i = 0; i < DEVICES; i++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int trans = 0; trans < 4; trans++) {
                peri_device *d = device_of(names[i]);
                int64_t m = sizes[s][0], n = sizes[s][1], k = sizes[s][2], batch = 2;
                bool ta = trans & 1, tb = trans & 2;
                int64_t na = batch * m * k, nb = batch * k * n, nc = batch * m * n;
                peri_tensor *a = NULL, *b = NULL, *c = NULL;
                assert_ok(peri_tensor_uniform(d, PERI_F64, 1, &na, -1, 1, 1, 0, &a));
                assert_ok(peri_tensor_uniform(d, PERI_F64, 1, &nb, -1, 1, 2, 0, &b));
                assert_ok(peri_tensor_full(d, PERI_F64, 1, &nc, 10, &c));
                peri_op_gemm g = {.dtype = PERI_F64,
                                  .c_dtype = PERI_F64,
                                  .trans_a = ta,
                                  .trans_b = tb,
                                  .m = m,
                                  .n = n,
                                  .k = k,
                                  .batch = batch,
                                  .alpha = 2,
                                  .beta = 0.5,
                                  .a = peri__data(a),
                                  .b = peri__data(b),
                                  .c = peri__data(c),
                                  .lda = peri__max(ta ? m : k, 1),
                                  .ldb = peri__max(tb ? k : n, 1),
                                  .ldc = peri__max(n, 1),
                                  .stride_a = m * k,
                                  .stride_b = k * n,
                                  .stride_c = m * n};
                assert_ok(PERI_RUN(d, gemm, &g));
                double *x = calloc((size_t)(na + nb + nc + 1), sizeof *x), *y = x + na, *z = y + nb;
                assert_ok(peri_tensor_read(a, x, na * 8));
                assert_ok(peri_tensor_read(b, y, nb * 8));
                assert_ok(peri_tensor_read(c, z, nc * 8));
                for (int64_t at = 0; at < nc; at++) {
                    int64_t p = at / (m * n), r = at / n % m, q = at % n;
                    double want = 5;
                    for (int64_t j = 0; j < k; j++)
                        want += 2 * x[p * m * k + (ta ? j * m + r : r * k + j)] *
                                y[p * k * n + (tb ? q * k + j : j * n + q)];
                    assert_true(z[at] - want < 1e-12 && want - z[at] < 1e-12);
                }
                free(x);
                peri_tensor_release(a);
                peri_tensor_release(b);
                peri_tensor_release(c);
            }
}

/** What a device's product may add to its result: a bias; and factors of 16 bits. */
static void product_with(peri_device *d, bool biased, int32_t dtype)
{
    enum { M = 5, N_ = 3, K = 7 };
    const int64_t sizes[] = {M * K, K * N_, N_, M * N_};
    peri_tensor *wide[3], *a, *b, *c;
    float x[M * K], y[K * N_], w[N_], z[M * N_];
    for (int t = 0; t < 3; t++)
        assert_ok(peri_tensor_uniform(d, PERI_F32, 1, &sizes[t], -1, 1, 1, (uint64_t)t, &wide[t]));
    assert_ok(peri_tensor_to(wide[0], dtype, NULL, &a));
    assert_ok(peri_tensor_to(wide[1], dtype, NULL, &b));
    assert_ok(peri_tensor_full(d, PERI_F32, 1, &sizes[3], NAN, &c)); /* not read */
    peri_op_gemm g = {.dtype = dtype,
                      .c_dtype = PERI_F32,
                      .biased = biased,
                      .m = M,
                      .n = N_,
                      .k = K,
                      .batch = 1,
                      .alpha = 1,
                      .a = peri__data(a),
                      .b = peri__data(b),
                      .bias = peri__data(wide[2]),
                      .c = peri__data(c),
                      .lda = K,
                      .ldb = N_,
                      .ldc = N_,
                      .stride_c = M * N_};
    const bool has = d->vtab->has(d->ctx, PERI_OP_gemm, &g);
    assert_true(has || biased || dtype != PERI_F32); /* plain products of f32 every device has */
    if (has) {
        assert_ok(PERI_RUN(d, gemm, &g));
        assert_ok(peri_tensor_copy(wide[0], a)); /* as they were multiplied */
        assert_ok(peri_tensor_copy(wide[1], b));
        assert_ok(peri_tensor_read(wide[0], x, sizeof x));
        assert_ok(peri_tensor_read(wide[1], y, sizeof y));
        assert_ok(peri_tensor_read(wide[2], w, sizeof w));
        assert_ok(peri_tensor_read(c, z, sizeof z));
    }
    for (int at = 0; at < M * N_ && has; at++) {
        double want = biased ? w[at % N_] : 0;
        for (int j = 0; j < K; j++) want += (double)x[at / N_ * K + j] * y[j * N_ + at % N_];
        assert_true(fabs(z[at] - want) < 1e-5);
    }
    peri_tensor *all[] = {a, b, c, wide[0], wide[1], wide[2]};
    for (size_t t = 0; t < sizeof all / sizeof *all; t++) peri_tensor_release(all[t]);
}

static void products_with_more_match_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++)
        for (int biased = 0; biased < 2; biased++) {
            product_with(device_of(names[i]), biased, PERI_F32);
            product_with(device_of(names[i]), biased, PERI_BF16);
            product_with(device_of(names[i]), biased, PERI_F16);
        }
}

static void products_of_other_dtypes_are_refused(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(names[i]);
        peri_op_gemm g = {.dtype = PERI_I32, .m = 1, .n = 1, .k = 1, .batch = 1};
        assert_fails(PERI_RUN(d, gemm, &g), PERI_EUNSUPPORTED, "has no operation gemm for these arguments");
    }
}

static void nothing_is_left_when_memory_runs_out(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(names[i]);
        assert_ok(peri_device_synchronize(d));
        int64_t objects = peri_mem_objects(), live = peri_mem_live();
        for (int k = 1;; k++) {
            peri_stream *s = NULL;
            peri_event *e = NULL;
            assert_ok(peri_fault_arm("alloc", k));
            peri_status made = peri_stream_new(d, &s);
            if (made >= 0) made = peri_event_new(d, &e);
            if (made >= 0) made = peri_event_record(e, s);
            if (made >= 0) made = peri_stream_wait(s, e);
            bool untouched = peri_fault_passed("alloc") < k;
            assert_ok(peri_fault_arm("alloc", 0));
            if (made < 0) assert_int_equal(made, PERI_ENOMEM);
            if (s) assert_ok(peri_stream_synchronize(s));
            peri_event_release(e);
            peri_stream_release(s);
            assert_int_equal(peri_mem_objects(), objects);
            assert_int_equal(peri_mem_live(), live);
            if (untouched) break;
        }
    }
}

#if !defined(__SANITIZE_ADDRESS__) /* there every block is one of the heap's */
/** A tensor of so many MiB whose pages are there; where its memory is. */
static peri_tensor *block_of(peri_device *d, int64_t mib, void **at)
{
    int64_t n = mib << 20;
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_full(d, PERI_U8, 1, &n, 1, &t));
    assert_ok(peri_tensor_data(t, at));
    return t;
}

static int64_t resident_mib(void)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*d %ld", &pages), 1);
    fclose(f);
    return pages * sysconf(_SC_PAGESIZE) >> 20;
}

static void large_memory_of_a_step_is_kept_and_that_of_a_phase_is_not(void **state)
{
    (void)state;
    enum { BLOCKS = 5 };
    static const int64_t mib[BLOCKS] = {80, 96, 112, 128, 160}; /* each is of a size class of its own */
    peri_device *d = device_of("cpu");
    peri_tensor *t[BLOCKS];
    void *first_at[BLOCKS], *at;
    const int64_t before = resident_mib();
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < BLOCKS; i++) {
            t[i] = block_of(d, mib[i], step ? &at : &first_at[i]);
            if (step) assert_ptr_equal(at, first_at[i]);
        }
        for (int i = 0; i < BLOCKS; i++) peri_tensor_release(t[i]);
    }
    assert_true(resident_mib() - before >= 80 + 96 + 112 + 128 + 160);
    peri_tensor *tables[20]; /* that stay for a while: other memory than the steps' */
    for (int i = 0; i < 20; i++) {
        int64_t n = 192 << 20;
        assert_ok(peri_tensor_new(d, PERI_U8, 1, &n, &tables[i]));
    }
    assert_true(resident_mib() - before < 80);
    for (int i = 0; i < 20; i++) peri_tensor_release(tables[i]);
}
#endif

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(pinned_memory_is_used_again_when_its_copies_have_run),
    cmocka_unit_test(devices_have_names),
    cmocka_unit_test(a_stream_runs_in_order),
    cmocka_unit_test(events_order_streams),
    cmocka_unit_test(a_forgotten_event_shows_on_opaque),
    cmocka_unit_test(the_order_follows_the_seed),
    cmocka_unit_test(work_is_late_on_opaque_and_polling_gets_there),
    cmocka_unit_test(synchronize_waits_for_every_stream),
    cmocka_unit_test(host_memory_is_consumed_by_a_copy_to_the_device),
    cmocka_unit_test(devices_do_not_mix),
    cmocka_unit_test(the_host_dies_when_it_touches_opaque_memory),
    cmocka_unit_test(freed_memory_on_opaque_loses_its_contents),
    cmocka_unit_test(padding_of_arguments_does_not_matter),
    cmocka_unit_test(products_match_the_definition),
    cmocka_unit_test(products_with_more_match_the_definition),
    cmocka_unit_test(products_of_other_dtypes_are_refused),
    cmocka_unit_test(nothing_is_left_when_memory_runs_out),
#if !defined(__SANITIZE_ADDRESS__)
    cmocka_unit_test(large_memory_of_a_step_is_kept_and_that_of_a_phase_is_not),
#endif
};

check_main(tests)
