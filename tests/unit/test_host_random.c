/* SPDX-License-Identifier: Apache-2.0
 *
 * test_host_random.c: a program that makes, uses and releases objects of all kinds in random order on several threads,
 * while requests for memory are refused, forks in between, and ends the library and begins it again. Every error is
 * PERI_ENOMEM, and nothing is left at the end.
 */
#include "guest.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 4, PLACES = 12, STEPS = 400, ROUNDS = 3, N = 8 };

/* -- memory that is short ------------------------------------------------------------------------------------------ */

static atomic_int_least64_t asked, every; /* requests so far; each so-many-th is refused; 0: none */

static bool refused(void)
{
    const int64_t n = atomic_load(&every), k = atomic_fetch_add(&asked, 1) + 1;
    return n > 0 && k % n == 0;
}
static void *short_alloc(size_t size) { return refused() ? NULL : malloc(size); }
static void *short_resize(void *p, size_t size) { return refused() ? NULL : realloc(p, size); }
static void *short_take(size_t bytes, size_t alignment)
{
    return refused() ? NULL : aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
static void short_give(void *p, size_t bytes)
{
    (void)bytes;
    free(p);
}

/* -- objects ------------------------------------------------------------------------------------------------------- */

/** An object with what it is made of. What could not be made is NULL. */
typedef struct thing {
    int kind; /* -1: none */
    peri_tensor *a, *b, *c;
    peri_keys *keys;
    peri_kjt *kjt;
    peri_tbe *tbe;
    peri_tbe_blocks *blocks;
    peri_optim *optim;
    peri_codec *codec;
    peri_codec_context *coded;
    peri_collision *map;
    peri_batch *batch;
    peri_logistic *logistic;
    peri_group *group;
    peri_stream *stream;
    peri_event *event;
    peri_moment *moment;
} thing;

static void drop(thing *t)
{
    peri_tensor_release(t->a), peri_tensor_release(t->b), peri_tensor_release(t->c);
    peri_kjt_release(t->kjt), peri_keys_release(t->keys);
    peri_moment_release(t->moment);
    peri_tbe_blocks_release(t->blocks), peri_tbe_release(t->tbe);
    peri_optim_release(t->optim);
    peri_codec_context_release(t->coded), peri_codec_release(t->codec);
    peri_collision_release(t->map);
    peri_logistic_release(t->logistic), peri_batch_release(t->batch);
    peri_event_release(t->event), peri_stream_release(t->stream);
    peri_group_release(t->group);
    *t = (thing){.kind = -1};
}

static const int64_t square[2] = {N, N}, many = N, ends = N + 1, rows[2] = {50, 7};

static peri_status make_product(thing *t, peri_device *cpu)
{
    PERI_TRY(peri_tensor_full(cpu, PERI_F32, 2, square, 0.5, &t->a));
    PERI_TRY(peri_tensor_requires_grad_set(t->a, true));
    return peri_op_matmul(t->a, t->a, &t->b);
}

static peri_status use_product(thing *t, peri_device *cpu)
{
    (void)cpu;
    peri_tensor *sum = NULL;
    double x = 0;
    const int32_t both[2] = {0, 1};
    PERI_TRY(peri_op_sum(t->b, both, 2, false, &sum));
    peri_status status = peri_tensor_item(sum, 0, &x);
    if (status >= 0 && x != N * N * N * 0.25) status = PERI_EINTERNAL;
    if (status >= 0) status = peri_tensor_backward(sum, NULL);
    peri_tensor_release(sum);
    peri_tensor_release(t->b); /* its graph is used up */
    t->b = NULL;
    PERI_TRY(status);
    return peri_op_matmul(t->a, t->a, &t->b);
}

static peri_status make_kjt(thing *t, peri_device *cpu)
{
    static const char *const names[2] = {"a", "b"};
    PERI_TRY(peri_tensor_full(cpu, PERI_I64, 1, &many, 1, &t->a)); /* N bags of one id */
    PERI_TRY(peri_keys_new(names, 2, &t->keys));
    const peri_kjt_config config = {.size = sizeof config, .keys = t->keys, .values = t->a, .lengths = t->a};
    return peri_kjt_new(&config, &t->kjt);
}

static peri_status use_kjt(thing *t, peri_device *cpu)
{
    (void)cpu;
    peri_kjt *turned;
    PERI_TRY(peri_kjt_permute(t->kjt, (const int32_t[]){1, 0}, 2, &turned));
    peri_kjt_release(t->kjt);
    t->kjt = turned;
    return PERI_OK;
}

static peri_status make_tbe(thing *t, peri_device *cpu)
{
    const peri_table_config table = {.size = sizeof table, .name = "t", .rows = 50, .cols = N};
    const peri_tbe_block block = {.bags = N, .out_stride = N, .feature = -1};
    peri_tbe_optimizer_config adam = {.size = sizeof adam};
    PERI_TRY(peri_tbe_optimizer_default(PERI_TBE_ADAM, &adam));
    peri_tbe_config config = {
        .size = sizeof config, .device = cpu, .n_tables = 1, .tables = &table, .optimizer = &adam};
    PERI_TRY(peri_tbe_new(&config, &t->tbe));
    PERI_TRY(peri_tbe_blocks_new(t->tbe, &block, 1, &t->blocks));
    PERI_TRY(peri_tensor_full(cpu, PERI_I64, 1, &many, 3, &t->a));
    PERI_TRY(peri_tensor_arange(cpu, PERI_I64, 0, 1, ends, &t->b));
    return peri_tensor_full(cpu, PERI_F32, 2, square, 0, &t->c);
}

static peri_status use_tbe(thing *t, peri_device *cpu)
{
    (void)cpu;
    const peri_tbe_input in = {.ids = t->a, .offsets = t->b, .blocks = t->blocks};
    int64_t at;
    PERI_TRY(peri_tbe_forward(t->tbe, &in, t->c));
    if (!t->moment) {
        PERI_TRY(peri_moment_new(&t->moment));
        PERI_TRY(peri_moment_add_table(t->moment, t->tbe, 0, "momentum1", PERI_F32, &at));
    }
    return peri_tbe_backward(t->tbe, &in, t->c, NULL);
}

static peri_status make_optim(thing *t, peri_device *cpu)
{
    peri_optim_config adam = {.size = sizeof adam};
    PERI_TRY(peri_optim_default(PERI_OPTIM_ADAM, &adam));
    PERI_TRY(peri_tensor_full(cpu, PERI_F32, 2, square, 0.5, &t->a));
    PERI_TRY(peri_tensor_full(cpu, PERI_F32, 2, square, 0.5, &t->b));
    PERI_TRY(peri_tensor_requires_grad_set(t->a, true));
    return peri_optim_new(&adam, &t->a, 1, &t->optim);
}

static peri_status use_optim(thing *t, peri_device *cpu)
{
    (void)cpu;
    PERI_TRY(peri_tensor_grad_set(t->a, t->b));
    return peri_optim_step(t->optim);
}

static peri_status make_codec(thing *t, peri_device *cpu)
{
    const peri_codec_config config = {.size = sizeof config, .format = PERI_CODEC_INT8, .row_dim = N};
    const int64_t splits[1] = {N * N};
    (void)cpu;
    PERI_TRY(peri_codec_new(&config, &t->codec));
    return peri_codec_context_new(t->codec, splits, 1, &t->coded);
}

static peri_status make_map(thing *t, peri_device *cpu)
{
    const peri_collision_config config = {
        .size = sizeof config, .name = "t", .rows = 50, .policy = PERI_FORGET_LFU, .n_features = 1};
    return peri_collision_new(cpu, &config, &t->map);
}

static peri_status make_data(thing *t, peri_device *cpu)
{
    const peri_logistic_config config = {.size = sizeof config, .table_rows = rows, .dense_features = 3,
                                         .sparse_features = 2, .learning_rate = 0.1};
    (void)cpu;
    PERI_TRY(peri_batch_new(3, 2, 1, 1, &t->batch));
    return peri_logistic_new(&config, &t->logistic);
}

static peri_status use_data(thing *t, peri_device *cpu)
{
    static const int32_t one[2] = {1, 1};
    const peri_synthetic_args data = {.size = sizeof data, .table_rows = rows, .bag_min = one, .bag_max = one,
                                      .dense_features = 3, .sparse_features = 2, .alpha = 1.05};
    double loss;
    (void)cpu;
    PERI_TRY(peri_synthetic_fill(&data, 0, 40, t->batch));
    return peri_logistic_train(t->logistic, t->batch, &loss);
}

static peri_status make_group(thing *t, peri_device *cpu)
{
    const peri_comm_config config = {.size = sizeof config, .transport = "self", .world_size = 1};
    PERI_TRY(peri_comm_open(&config, &t->group));
    return peri_tensor_full(cpu, PERI_F32, 1, &many, 1, &t->a);
}

static peri_status use_group(thing *t, peri_device *cpu)
{
    peri_work *work = NULL;
    (void)cpu;
    PERI_TRY(peri_coll_barrier(t->group, 0, &work));
    const peri_status status = peri_work_wait(work);
    peri_work_release(work);
    return status;
}

static peri_status make_event(thing *t, peri_device *cpu)
{
    PERI_TRY(peri_stream_new(cpu, &t->stream));
    return peri_event_new(cpu, &t->event);
}

static peri_status use_event(thing *t, peri_device *cpu)
{
    (void)cpu;
    PERI_TRY(peri_event_record(t->event, t->stream));
    return peri_event_synchronize(t->event);
}

static const struct {
    const char *name;
    peri_status (*make)(thing *t, peri_device *cpu), (*use)(thing *t, peri_device *cpu);
} kinds[] = {{"product", make_product, use_product}, {"kjt", make_kjt, use_kjt},
             {"table batch", make_tbe, use_tbe},     {"optimizer", make_optim, use_optim},
             {"codec", make_codec, NULL},            {"map", make_map, NULL},
             {"data", make_data, use_data},          {"group", make_group, use_group},
             {"event", make_event, use_event}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* -- the program --------------------------------------------------------------------------------------------------- */

static atomic_int wrong;
static int first_kind; /* 1: without products */

/** Whether a status is one that a program with little memory may see. */
static bool allowed(const char *what, int kind, peri_status status)
{
    if (status >= 0 || (status == PERI_ENOMEM && atomic_load(&every) > 0)) return true;
    fprintf(stderr, "%s of a %s: %s: %s\n", what, kinds[kind].name, peri_status_name(status), peri_error_message());
    atomic_fetch_add(&wrong, 1);
    return false;
}

static void *live(void *seed_of)
{
    thing things[PLACES];
    uint64_t seed = *(uint64_t *)seed_of;
    peri_device *cpu;
    while (peri_device_get("cpu", &cpu) < 0) {} /* memory may be short */
    for (int i = 0; i < PLACES; i++) things[i] = (thing){.kind = -1};
    for (int step = 0; step < STEPS; step++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const uint64_t draw = seed >> 33;
        thing *t = &things[draw % PLACES];
        if (t->kind < 0) {
            t->kind = first_kind + (int)(draw / PLACES % (uint64_t)(KINDS - first_kind));
            const peri_status status = kinds[t->kind].make(t, cpu);
            allowed("making", t->kind, status);
            if (status < 0) drop(t);
        } else if (draw / PLACES % 4 == 0 || !kinds[t->kind].use) {
            drop(t);
        } else {
            const peri_status status = kinds[t->kind].use(t, cpu);
            allowed("use", t->kind, status);
            if (status < 0) drop(t);
        }
    }
    for (int i = 0; i < PLACES; i++) drop(&things[i]);
    return NULL;
}

static int child_lives(void *ctx)
{
    (void)live(ctx);
    return atomic_load(&wrong) ? 1 : 0;
}

/** Without products: OpenBLAS has locks of its own, which another thread may hold at the moment of the fork. */
static int child_lives_meanwhile(void *ctx)
{
    first_kind = 1;
    return child_lives(ctx);
}

static int lives(void *ctx)
{
    static const int refusals[ROUNDS] = {0, 41, 7};
    const uint64_t base = *(uint64_t *)ctx;
    if (peri_host_allocator_set(short_alloc, short_resize, free) < 0) return 1;
    if (peri_host_storage_set(short_take, short_give) < 0) return 2;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t thread[THREADS];
        uint64_t seeds[THREADS + 1];
        if (peri_host_init() < 0) return 3;
        atomic_store(&every, refusals[round]);
        for (int i = 0; i <= THREADS; i++) seeds[i] = base + (uint64_t)(round * 100 + i) * 7919;
        for (int i = 0; i < THREADS; i++)
            if (pthread_create(&thread[i], NULL, live, &seeds[i]) != 0) return 4;
        for (int i = 0; i < 3 && !SANITIZED; i++) /* while the others are in the middle of something */
            if (in_child(child_lives_meanwhile, &seeds[THREADS]) != 0) return 5;
        for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
        atomic_store(&every, 0);
        if (in_child(child_lives, &seeds[THREADS]) != 0) return 6;
        if (atomic_load(&wrong)) return 7;
        if (peri_host_shutdown() < 0) return fprintf(stderr, "%s\n", peri_error_message()), 8;
        if (peri_mem_objects() != 0 || peri_mem_live() != 0)
            return fprintf(stderr, "%lld objects, %lld bytes are left\n", (long long)peri_mem_objects(),
                           (long long)peri_mem_live()),
                   9;
    }
    return 0;
}

static void nothing_is_left_of_a_random_program(void **state)
{
    (void)state;
    const char *text = getenv("PERI_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    assert_int_equal(in_child(lives, &seed), 0);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_is_left_of_a_random_program)};
check_main(tests)
