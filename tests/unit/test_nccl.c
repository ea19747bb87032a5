/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nccl.c: the transport nccl by its table of functions, with one rank: every kind of operation, a group split off,
 * many operations that nobody waits for on the host, and an abort; and sizes of scratch by the device's table. By
 * default on the pretended GPU and NCCL (tests/cuda_host); where PERI_NCCL_TEST names a folder, on the
 * libperilune_cuda.so and libperilune_nccl.so in it, with the real libnccl.
 */
#include "tests/harness/check.h"
#include "kernels/kernels.h"
#include "kernels/sparse.h"
#include "runtime/base/base_internal.h"
#include "runtime/plugin/coll.h"
#include "runtime/plugin/device.h"
#include "runtime/plugin/plugin_internal.h"

#include <dlfcn.h>
#include <stdlib.h>

static const peri_device_vtab *gpu;
static const peri_coll_vtab *nccl, *self;
static void *device, *stream, *self_world, *world;
static uint64_t sequence;
static const char *missing; /* why nothing can be tested here */
static void (*meddle)(int); /* what the program around may do: choose another GPU. NULL: these are real ones */

static void *entry(const char *folder, const char *name, const char *symbol)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/libperilune_%s.so", folder, name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return NULL;
    return dlsym(library, symbol);
}

static int open_world(void **state)
{
    (void)state;
    const char *real = getenv("PERI_NCCL_TEST"), *build = getenv("PERI_BUILD");
    char folder[4096], reason[512];
    snprintf(folder, sizeof folder, "%s%s", real ? real : build ? build : "build", real ? "" : "/cuda_host");
    setenv("PERI_CUDA_HOST_GPUS", "2", 0);
    /* The sanitizers' dlopen does not look where the plugin says; it finds what is loaded. */
    if (!real && snprintf(reason, sizeof reason, "%.480s/libnccl.so.2", folder) > 0) dlopen(reason, RTLD_NOW);
    void *device_entry = entry(folder, real ? "cuda" : "cuda_host", PERI_DEVICE_ENTRY);
    void *coll_entry = entry(folder, "nccl", PERI_COLL_ENTRY);
    void *meddles = real ? NULL : entry(folder, "cuda_host", "peri_cuda_host_meddle");
    memcpy(&meddle, &meddles, sizeof meddle);
    peri_device_entry_fn device_of;
    peri_coll_entry_fn coll_of;
    memcpy(&device_of, &device_entry, sizeof device_of);
    memcpy(&coll_of, &coll_entry, sizeof coll_of);
    if (!device_entry || !coll_entry) {
        missing = "no C++ compiler or no headers of NCCL were found";
        return 0;
    }
    gpu = device_of(peri__plugin_host());
    nccl = coll_of(peri__plugin_host());
    int32_t index = -1, caps;
    if (gpu->probe(reason, sizeof reason) < 0 || nccl->probe(reason, sizeof reason) < 0) fail_msg("%s", reason);
    assert_ok(gpu->open(&index, &device, &caps));
    assert_ok(gpu->stream_new(device, &stream));
    assert_ok(peri__plugin_coll("self", &self));
    peri_coll_open boot = {.rank = 0, .size = 1, .timeout_ns = 10000000000};
    assert_ok(self->open(&boot, &self_world));
    boot.device_vtab = gpu;
    boot.device = device;
    boot.host_vtab = self;
    boot.host_group = self_world;
    assert_ok(nccl->open(&boot, &world));
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    if (!world) return 0;
    assert_ok(nccl->close(world));
    nccl->release(world);
    assert_ok(self->close(self_world));
    self->release(self_world);
    gpu->stream_delete(device, stream);
    return 0;
}

static void *post(void *group, peri_coll_op op)
{
    void *request;
    op.sequence = ++sequence;
    op.signature = sequence;
    op.stream = stream;
    assert_ok(nccl->post(group, &op, &request));
    return request;
}

/** Have the stream come after the operation. */
static void join(void *request)
{
    peri_status status;
    while ((status = nccl->join(request)) == PERI_PENDING) {}
    assert_ok(status);
}

/** See that it has run, and give it back. */
static void finish(void *request)
{
    peri_status status;
    while ((status = nccl->test(request)) == PERI_PENDING) {}
    assert_ok(status);
    while (nccl->drop(request) == PERI_PENDING) {}
}

enum { N = 48 };

/** With one rank every operation hands on what it is given: @numbers (of @bytes) in @a, the result in @b. */
static void one(void *group, peri_coll_op op, void *a, void *b, const void *numbers, size_t bytes)
{
    char got[N * 8];
    const int64_t counts[] = {N};
    const bool in_place = op.kind == PERI_COLL_BROADCAST;
    assert_ok(gpu->copy(device, stream, a, numbers, (int64_t)bytes, PERI_COPY_H2D));
    op.send = in_place ? NULL : a;
    op.recv = in_place ? a : b;
    op.count = N;
    op.send_counts = op.recv_counts = counts;
    void *request = post(group, op);
    join(request);
    /* queued: comes after the operation */
    assert_ok(gpu->copy(device, stream, got, op.recv, (int64_t)bytes, PERI_COPY_D2H));
    assert_ok(gpu->stream_sync(device, stream));
    assert_memory_equal(numbers, got, bytes);
    finish(request);
}

static void every_kind(void *group)
{
    static const int32_t kinds[] = {PERI_COLL_BROADCAST, PERI_COLL_ALL_REDUCE, PERI_COLL_ALL_GATHER,
                                    PERI_COLL_REDUCE_SCATTER, PERI_COLL_ALL_TO_ALL};
    float f32[N];
    double f64[N];
    int64_t i64[N];
    uint16_t f16[N]; /* summed by a kernel of ours */
    void *a, *b;
    for (int i = 0; i < N; i++)
        f32[i] = (float)i * 0.5f, f64[i] = i * 0.25, i64[i] = i - 7, f16[i] = (uint16_t)(0x3c00 + i);
    assert_ok(gpu->alloc(device, stream, sizeof f64, &a));
    assert_ok(gpu->alloc(device, stream, sizeof f64, &b));
    finish(post(group, (peri_coll_op){.kind = PERI_COLL_BARRIER}));
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int32_t channel = 0; channel < PERI_CHANNEL_COUNT; channel += 3) {
            one(group, (peri_coll_op){.kind = kinds[k], .dtype = PERI_F32, .channel = channel}, a, b, f32, sizeof f32);
            one(group, (peri_coll_op){.kind = kinds[k], .dtype = PERI_F64, .channel = channel}, a, b, f64, sizeof f64);
            one(group,
                (peri_coll_op){.kind = kinds[k], .dtype = PERI_I64, .channel = channel, .reduce = PERI_REDUCE_MAX}, a,
                b, i64, sizeof i64);
            one(group, (peri_coll_op){.kind = kinds[k], .dtype = PERI_F16, .channel = channel}, a, b, f16, sizeof f16);
        }
    gpu->free(device, stream, a, sizeof f64);
    gpu->free(device, stream, b, sizeof f64);
}

static void test_every_kind(void **state)
{
    (void)state;
    if (missing) skip();
    every_kind(world);
}

static void test_a_group_split_off(void **state)
{
    (void)state;
    if (missing) skip();
    void *group;
    const int32_t zero = 0;
    assert_ok(nccl->subgroup(world, &zero, 1, 77, &group));
    every_kind(group);
    assert_ok(nccl->close(group));
    nccl->release(group);
}

static void test_many_that_nobody_waits_for(void **state)
{
    (void)state;
    enum { MANY = 100 };
    if (missing) skip();
    void *requests[MANY], *a;
    const double numbers[N] = {1, 2, 3};
    assert_ok(gpu->alloc(device, stream, sizeof numbers, &a));
    assert_ok(gpu->copy(device, stream, a, numbers, sizeof numbers, PERI_COPY_H2D));
    for (int i = 0; i < MANY; i++) {
        requests[i] = post(world, (peri_coll_op){.kind = PERI_COLL_ALL_REDUCE,
                                                 .dtype = PERI_F64,
                                                 .channel = i % PERI_CHANNEL_COUNT,
                                                 .send = a,
                                                 .recv = a,
                                                 .count = N});
        join(requests[i]);
    }
    double got[N];
    assert_ok(gpu->copy(device, stream, got, a, sizeof got, PERI_COPY_D2H));
    assert_ok(gpu->stream_sync(device, stream));
    assert_memory_equal(numbers, got, sizeof got);
    for (int i = 0; i < MANY; i++) finish(requests[i]);
    gpu->free(device, stream, a, sizeof numbers);
}

static void test_an_abort(void **state)
{
    (void)state;
    if (missing) skip();
    void *group, *a, *request, *refused;
    const int32_t zero = 0;
    assert_ok(nccl->subgroup(world, &zero, 1, 78, &group));
    assert_ok(gpu->alloc(device, stream, 8 * N, &a));
    const peri_coll_op op = {.kind = PERI_COLL_ALL_REDUCE,
                             .dtype = PERI_F64,
                             .send = a,
                             .recv = a,
                             .count = N,
                             .stream = stream,
                             .sequence = 1};
    assert_ok(nccl->post(group, &op, &request));
    nccl->abort(group, "given up on purpose");
    peri_status status = nccl->test(request);
    if (status != PERI_OK) { /* else it had run before */
        assert_int_equal(PERI_EABORTED, status);
        assert_string_equal("given up on purpose", peri_error_message());
    }
    assert_int_equal(PERI_EABORTED, nccl->post(group, &op, &refused));
    while (nccl->drop(request) == PERI_PENDING) {}
    gpu->free(device, stream, a, 8 * N);
    nccl->release(group);
    every_kind(world); /* the world is as sound as before */
}

/** A size of scratch is the device's own, also where it is the first that a thread asks of it. */
static void test_sizes_of_scratch(void **state)
{
    (void)state;
    if (missing || !meddle) skip();
    const peri_op_unique args = {.n = 1000, .most = 1 << 20, .dtype = PERI_I64};
    int64_t bytes[2];
    for (int current = 0; current < 2; current++) {
        meddle(current);
        bytes[current] = gpu->scratch(device, PERI_OP_unique, &args);
    }
    assert_true(bytes[0] > 0);
    assert_int_equal(bytes[0], bytes[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_of_scratch),
        cmocka_unit_test(test_every_kind),
        cmocka_unit_test(test_a_group_split_off),
        cmocka_unit_test(test_many_that_nobody_waits_for),
        cmocka_unit_test(test_an_abort),
    };
    return cmocka_run_group_tests(tests, open_world, close_world);
}
