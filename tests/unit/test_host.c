/* SPDX-License-Identifier: Apache-2.0
 *
 * test_host.c: the library as a guest in somebody else's process: forks, sandboxes, small stacks, its beginning and its
 * end, its threads.
 */
#include "guest.h"

#include "runtime/base/buffer.h"
#include "runtime/plugin/coll.h"

#include <errno.h>
#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <perilune/host.h>
#include <perilune/perilune.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* -- fork ---------------------------------------------------------------------------------------------------------- */

static int child_uses_all(void *ctx)
{
    guest *g = ctx, own;
    if (guest_use(g) != BATCH * COLS) return 1;
    if (peri_tbe_backward(g->tbe, &g->in, g->grad, NULL) < 0) return 2;
    if (guest_use(g) >= BATCH * COLS) return 3; /* the rows went down */
    if (product(g->cpu) != 1) return 4;
    /* tables in files that are its own */
    if (guest_new(&own, true, BATCH) < 0 || guest_use(&own) != BATCH * COLS) return 5;
    guest_free(&own);
    guest_free(g);
    return threads_called("perilune") == WORKERS - 1 ? 0 : 6;
}

static void a_child_goes_on_with_what_is_in_memory(void **state)
{
    (void)state;
    guest g;
    assert_ok(peri_threads_set(WORKERS));
    assert_ok(guest_new(&g, false, BATCH));
    assert_true(guest_use(&g) == BATCH * COLS);
    assert_true(product(g.cpu) == 1);
    assert_int_equal(in_child(child_uses_all, &g), 0);
    assert_true(guest_use(&g) == BATCH * COLS); /* the child's update was its own */
    assert_ok(peri_tbe_backward(g.tbe, &g.in, g.grad, NULL));
    guest_free(&g);
}

static int child_is_told(void *ctx)
{
    guest *g = ctx;
    if (guest_use(g) >= 0 || peri_error_status() != PERI_EUNSUPPORTED) return 1;
    if (!strstr(peri_error_message(), "tables in a cache are of the process that this one was forked from")) return 2;
    if (peri_tbe_flush(g->tbe) != PERI_EUNSUPPORTED) return 3;
    guest_free(g); /* ends, although the threads are not there */
    return 0;
}

static int child_leaves(void *ctx)
{
    (void)ctx;
    exit(0); /* with all that is open */
}

static void a_child_is_told_what_it_cannot_use(void **state)
{
    (void)state;
    guest g;
    assert_ok(guest_new(&g, true, BATCH));
    assert_true(guest_use(&g) == BATCH * COLS);
    assert_int_equal(in_child(child_is_told, &g), 0);
    assert_int_equal(in_child(child_leaves, &g), 0);
    assert_true(guest_use(&g) == BATCH * COLS);
    guest_free(&g);
}

static peri_group *of_two[2];

static int child_asks_a_group(void *ctx)
{
    (void)ctx;
    peri_work *work = NULL;
    if (peri_coll_barrier(of_two[0], 0, &work) != PERI_EUNSUPPORTED) return 1;
    return strstr(peri_error_message(), "is of the process that this one was forked from") ? 0 : 2;
}

static void groups_stay_with_their_process(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = "host", .rank = i, .world_size = 2, .timeout_s = 20};
        assert_ok(peri_comm_open(&config, &of_two[i]));
    }
    assert_int_equal(in_child(child_asks_a_group, NULL), 0);
    peri_work *work[2];
    for (int i = 0; i < 2; i++) assert_ok(peri_coll_barrier(of_two[i], 0, &work[i]));
    for (int i = 0; i < 2; i++) assert_ok(peri_work_wait(work[i]));
    for (int i = 0; i < 2; i++) peri_work_release(work[i]);
    for (int i = 0; i < 2; i++) peri_group_release(of_two[i]);
}

static int child_takes(void *feed)
{
    peri_feed_parcel parcel;
    if (peri_feed_take(feed, 1000000, &parcel) != PERI_EUNSUPPORTED) return 1;
    peri_feed_release(feed); /* ends, although the threads are not there */
    return 0;
}

static void feeds_stay_with_their_process(void **state)
{
    (void)state;
    peri_feed *feed;
    assert_ok(peri_feed_new(1, &feed));
    assert_int_equal(in_child(child_takes, feed), 0);
    assert_ok(peri_feed_stop(feed, 0));
    peri_feed_release(feed);
}

static int child_writes(void *writer)
{
    int32_t section;
    if (peri_model_writer_begin(writer, &section) != PERI_EUNSUPPORTED) return 1;
    peri_model_writer_release(writer);
    return 0;
}

static int child_saves(void *writer)
{
    const float row[2] = {1, 2};
    if (peri_checkpoint_writer_put_bytes(writer, row, sizeof row) != PERI_EUNSUPPORTED) return 1;
    peri_checkpoint_writer_release(writer);
    return 0;
}

static int child_gives_up(void *folder)
{
    peri_checkpoint_folder_release(folder);
    return 0;
}

/** A child that is told to give up what its parent writes leaves the files where they are. */
static void files_stay_with_the_process_that_writes_them(void **state)
{
    (void)state;
    char folder[] = "/tmp/peri-forked-XXXXXX", path[200], command[64];
    assert_non_null(mkdtemp(folder));
    peri_model_writer *model;
    snprintf(path, sizeof path, "%s/model.peri", folder);
    assert_ok(peri_model_writer_new(path, &model));
    assert_int_equal(in_child(child_writes, model), 0);
    assert_int_equal(access(peri_model_writer_path(model), F_OK), 0);
    peri_model_writer_release(model);

    peri_checkpoint_folder *saving;
    peri_checkpoint_writer *writer;
    peri_checkpoint_tensor tensor = {.size = sizeof tensor, .name = "t", .dtype = PERI_F32, .ndim = 1, .shape = {4}};
    peri_checkpoint_region region = {.size = sizeof region, .extent = {4}};
    const float row[2] = {1, 2};
    snprintf(path, sizeof path, "%s/save", folder);
    assert_ok(peri_checkpoint_folder_new(path, &saving));
    assert_ok(peri_checkpoint_writer_new(peri_checkpoint_folder_path(saving), "rank-0", 0, &writer));
    assert_ok(peri_checkpoint_writer_add(writer, &tensor, &region));
    assert_ok(peri_checkpoint_writer_put_bytes(writer, row, sizeof row));
    assert_int_equal(in_child(child_saves, writer), 0);
    assert_int_equal(in_child(child_gives_up, saving), 0);
    assert_ok(peri_checkpoint_writer_put_bytes(writer, row, sizeof row));
    assert_ok(peri_checkpoint_writer_finish(writer));
    snprintf(path, sizeof path, "%s/rank-0.safetensors", peri_checkpoint_folder_path(saving));
    assert_int_equal(access(path, F_OK), 0);
    peri_checkpoint_writer_release(writer);
    peri_checkpoint_folder_release(saving);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

static atomic_bool enough;

static void *compute(void *ctx)
{
    while (!atomic_load(&enough)) assert_true(guest_use(ctx) == BATCH * COLS);
    return NULL;
}

static int child_computes(void *ctx)
{
    guest own;
    (void)ctx;
    if (guest_new(&own, false, BATCH) < 0 || guest_use(&own) != BATCH * COLS) return 1;
    return product(own.cpu) == 1 ? 0 : 2;
}

/** Whatever other threads do at that moment: a child's own objects work. */
static void children_come_while_others_compute(void **state)
{
    (void)state;
    guest g[3];
    pthread_t thread[3];
    assert_ok(peri_threads_set(WORKERS));
    atomic_store(&enough, false);
    for (int i = 0; i < 3; i++) {
        assert_ok(guest_new(&g[i], false, BATCH));
        assert_int_equal(pthread_create(&thread[i], NULL, compute, &g[i]), 0);
    }
    for (int i = 0; i < 20; i++) assert_int_equal(in_child(child_computes, NULL), 0);
    atomic_store(&enough, true);
    for (int i = 0; i < 3; i++) {
        pthread_join(thread[i], NULL);
        guest_free(&g[i]);
    }
}

/* -- the beginning and the end ------------------------------------------------------------------------------------- */

/** In a child, so that nothing is left of the tests before. */
static int begins_and_ends(void *ctx)
{
    (void)ctx;
    guest g;
    if (peri_host_shutdown() != PERI_EINVAL) return 1;
    for (int round = 0; round < 5; round++) {
        if (peri_host_init() < 0 || peri_host_init() < 0) return 2;
        if (peri_threads_set(WORKERS) < 0 || guest_new(&g, round % 2 == 1, BATCH) < 0) return 3;
        if (guest_use(&g) != BATCH * COLS || product(g.cpu) != 1) return 4;
        if (threads_called("perilune") < WORKERS - 1) return 5;
        if (peri_host_shutdown() < 0) return 6; /* the other one still uses it */
        if (peri_host_shutdown() != PERI_EINVAL || !strstr(peri_error_message(), "objects are not released yet"))
            return 7;
        if (guest_use(&g) != BATCH * COLS) return 8;
        guest_free(&g);
        if (peri_host_shutdown() < 0) return 9;
        if (peri_mem_objects() != 0 || threads_called("perilune") != 0) return 10;
        if (peri_mem_live() != 0) return 11;
    }
    return peri_host_shutdown() == PERI_EINVAL ? 0 : 12;
}

static void nothing_is_left_at_the_end_and_it_begins_again(void **state)
{
    (void)state;
    int64_t live = peri_mem_live();
    if (live > 0 || peri_mem_objects() > 0) { /* of the tests before: pools */
        assert_int_equal(peri_mem_objects(), 0);
        assert_ok(peri_host_init());
        assert_ok(peri_host_shutdown());
    }
    assert_int_equal(in_child(begins_and_ends, NULL), 0);
}

/* -- log lines and plugins ----------------------------------------------------------------------------------------- */

typedef struct heard {
    int32_t level, lines;
    char text[256];
} heard;

static void hear(void *ctx, int32_t level, const char *text)
{
    heard *h = ctx;
    h->level = level;
    h->lines++;
    snprintf(h->text, sizeof h->text, "%s", text);
}

static void log_lines_go_to_the_host(void **state)
{
    (void)state;
    heard h = {0};
    peri_host_log_set(hear, &h);
    peri__log(PERI_LOG_WARN, "row %d is %s", 7, "odd");
    peri__log(PERI_LOG_DEBUG, "not of this level");
    peri_host_log_set(NULL, NULL);
    assert_int_equal(h.lines, 1);
    assert_int_equal(h.level, PERI_LOG_WARN);
    assert_string_equal(h.text, "perilune warning: row 7 is odd");
}

static void plugins_come_from_folders_that_the_host_names(void **state)
{
    (void)state;
    char folder[4000] = "";
    peri_device *device = NULL;
    unsetenv("PERI_PLUGIN_PATH");
    assert_true(readlink("/proc/self/exe", folder, sizeof folder - 20) > 0);
    strcpy(strrchr(folder, '/'), "/plugins");
    assert_fails(peri_host_plugin_path_set("plugins"), PERI_EINVAL,
                 "the folder 'plugins', allowed: paths that begin with /");
    assert_fails(peri_host_plugin_path_set("/a:b"), PERI_EINVAL, "the folder 'b', allowed");
    assert_fails(peri_device_get("own_way", &device), PERI_ENOTFOUND, "no libperilune_own_way.so");
    assert_ok(peri_host_plugin_path_set(folder));
    assert_ok(peri_device_get("own_way", &device));
    assert_ok(peri_host_plugin_path_set(NULL));
}

/* -- processors ---------------------------------------------------------------------------------------------------- */

static void write_text(const char *folder, const char *name, const char *text)
{
    char path[600], *slash;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (slash = strchr(path + strlen(folder) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void threads_follow_the_quota_of_the_control_group(void **state)
{
    (void)state;
    char folder[] = "/tmp/perilune-groups-XXXXXX", member[200], command[300];
    assert_non_null(mkdtemp(folder));
    snprintf(member, sizeof member, "%s/member", folder);
    const peri__groups groups = {folder, member};
    assert_int_equal(peri__quota_of(&groups), 0); /* nobody says */
    write_text(folder, "member", "0::/a/b\n");
    assert_int_equal(peri__quota_of(&groups), 0);
    write_text(folder, "a/b/cpu.max", "max 100000\n");
    assert_int_equal(peri__quota_of(&groups), 0);
    write_text(folder, "a/cpu.max", "250000 100000\n");
    assert_int_equal(peri__quota_of(&groups), 3); /* of the group above, rounded up */
    write_text(folder, "a/b/cpu.max", "9000000000000000000 1000\n"); /* as good as none */
    assert_int_equal(peri__quota_of(&groups), 3);
    write_text(folder, "a/b/cpu.max", "150000 100000\n");
    assert_int_equal(peri__quota_of(&groups), 2);
    write_text(folder, "cpu.max", "10000 100000\n"); /* what a container sees of its own */
    assert_int_equal(peri__quota_of(&groups), 1);
    write_text(folder, "member", "0::/\n");
    assert_int_equal(peri__quota_of(&groups), 1);
    write_text(folder, "member", "7:memory:/x\n4:cpu,cpuacct:/x\n");
    write_text(folder, "cpu,cpuacct/x/cpu.cfs_quota_us", "-1\n");
    assert_int_equal(peri__quota_of(&groups), 0);
    write_text(folder, "cpu,cpuacct/cpu.cfs_quota_us", "400000\n");
    write_text(folder, "cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    assert_int_equal(peri__quota_of(&groups), 4);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

/** total and available bytes, in KiB; what the machine has is in folder/meminfo. */
static void assert_memory(const peri__groups *groups, int64_t total, int64_t available)
{
    int64_t left = -1;
    assert_int_equal(peri__memory_of(groups, groups->mount, &left), total << 10);
    assert_int_equal(left, available << 10);
}

static void memory_is_what_the_control_group_allows(void **state)
{
    (void)state;
    char folder[] = "/tmp/perilune-groups-XXXXXX", member[200], command[300];
    assert_non_null(mkdtemp(folder));
    snprintf(member, sizeof member, "%s/member", folder);
    const peri__groups groups = {folder, member};
    assert_true(peri__memory_of(&groups, folder, NULL) == INT64_MAX); /* nobody says */
    write_text(folder, "meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n");
    assert_memory(&groups, 1000, 600);
    write_text(folder, "member", "0::/job/step\n");
    write_text(folder, "job/step/memory.max", "max\n");
    assert_memory(&groups, 1000, 600);
    write_text(folder, "job/memory.max", "409600\n"); /* 400 KiB for the job, of which 250 are used, 50 by files */
    write_text(folder, "job/memory.current", "256000\n");
    write_text(folder, "job/memory.stat", "anon 204800\ninactive_file 51200\nactive_file 7\n");
    assert_memory(&groups, 400, 200);
    write_text(folder, "job/memory.current", "819200\n"); /* more than there may be */
    assert_memory(&groups, 400, 0);
    write_text(folder, "job/memory.max", "4096000\n"); /* more than the machine has */
    assert_memory(&groups, 1000, 600);
    write_text(folder, "member", "3:cpuset,memory:/docker/x\n2:cpu:/\n");
    write_text(folder, "cpuset,memory/memory.limit_in_bytes", "9223372036854771712\n"); /* no limit */
    assert_memory(&groups, 1000, 600);
    write_text(folder, "cpuset,memory/docker/memory.limit_in_bytes", "102400\n");
    write_text(folder, "cpuset,memory/docker/memory.usage_in_bytes", "61440\n");
    write_text(folder, "cpuset,memory/docker/memory.stat", "inactive_file 1\ntotal_inactive_file 20480\n");
    assert_memory(&groups, 100, 60);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

/* -- what is the caller's stays the caller's ----------------------------------------------------------------------- */

static void *on_a_small_stack(void *ctx)
{
    guest g;
    static float out[BATCH * COLS];
    *(int *)ctx = 1;
    if (guest_new(&g, false, BATCH) < 0) return NULL;
    *(int *)ctx = 2;
    if (peri_tbe_forward(g.tbe, &g.in, g.out) < 0 || peri_tensor_read(g.out, out, sizeof out) < 0 || out[0] != 1)
        return NULL;
    *(int *)ctx = 3;
    if (peri_tbe_backward(g.tbe, &g.in, g.grad, NULL) < 0 || product(g.cpu) != 1) return NULL;
    *(int *)ctx = 4;
    if (deal_and_write(&g) < 0) return NULL;
    *(int *)ctx = 5;
    void *p;
    if (peri_tensor_data(g.in.ids, &p) < 0) return NULL;
    ((int64_t *)p)[5] = ROWS; /* an error with words */
    if (peri_tbe_forward(g.tbe, &g.in, g.out) != PERI_ERANGE) return NULL;
    guest_free(&g);
    *(int *)ctx = 0;
    return NULL;
}

static void a_stack_of_64_kib_is_enough(void **state)
{
    (void)state;
    if (SANITIZED) skip(); /* sanitizers need more */
    pthread_attr_t attr;
    pthread_t thread;
    int where = -1;
    pthread_attr_init(&attr);
    assert_int_equal(pthread_attr_setstacksize(&attr, 64 << 10), 0);
    assert_int_equal(pthread_create(&thread, &attr, on_a_small_stack, &where), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attr);
    assert_int_equal(where, 0);
}

enum { ODD = 40 };

/** Numbers that depend on how a processor rounds and on what it does about denormals, and some that are invalid: [3,
 *  ODD, ODD]. */
static void odd_numbers(peri_device *cpu, float *out)
{
    const int64_t shape[2] = {ODD, ODD};
    const size_t bytes = sizeof(float) * ODD * ODD;
    peri_optim_config adam = {.size = sizeof adam};
    peri_tensor *x, *small, *roots, *twice, *product_of;
    peri_optim *optimizer;
    assert_ok(peri_tensor_normal(cpu, PERI_F32, 2, shape, 0, 1, 3, 4, &x));
    assert_ok(peri_op_matmul(x, x, &product_of));
    assert_ok(peri_tensor_read(product_of, out, (int64_t)bytes));
    assert_ok(peri_op_log(x, &roots)); /* NaN for half of them */
    assert_ok(peri_tensor_full(cpu, PERI_F32, 2, shape, 1e-40, &small));
    assert_ok(peri_op_muladd(x, small, small, &twice));
    assert_ok(peri_tensor_read(twice, out + ODD * ODD, (int64_t)bytes));
    assert_ok(peri_optim_default(PERI_OPTIM_ADAM, &adam));
    assert_ok(peri_tensor_requires_grad_set(x, true));
    assert_ok(peri_optim_new(&adam, &x, 1, &optimizer));
    for (int step = 0; step < 3; step++) {
        assert_ok(peri_tensor_grad_set(x, product_of));
        assert_ok(peri_optim_step(optimizer));
    }
    assert_ok(peri_tensor_read(x, out + 2 * ODD * ODD, (int64_t)bytes));
    peri_optim_release(optimizer);
    peri_tensor *all[] = {x, small, roots, twice, product_of};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
}

/** Numbers that are computed by the calling thread itself: before an operation begins, and where there is none.
 *  Returns how many of @out there are. */
static int odd_numbers_of_the_caller(peri_device *cpu, double *out)
{
    static const double p[7] = {0.1, 0.7, 0.3, 0.9, 0.2, 0.6, 1e-310}, y[7] = {0, 1, 0, 1, 1, 0, 0}, none[1] = {NAN};
    static const int64_t seven = 7, rows[2] = {50, 7};
    static const int32_t one[2] = {1, 1}, first = 0;
    static const char *const names[] = {"ne", "calibration", "rmse"};
    const peri_metric_samples samples = {.predictions = p, .labels = y, .n = 7}, bad = {.predictions = none,
                                                                                        .labels = y, .n = 1};
    const peri_synthetic_args data = {.size = sizeof data, .table_rows = rows, .bag_min = one, .bag_max = one,
                                      .dense_features = 3, .sparse_features = 2, .alpha = 1.05, .signal = 1,
                                      .bias = -1};
    const peri_logistic_config config = {.size = sizeof config, .table_rows = rows, .dense_features = 3,
                                         .sparse_features = 2, .learning_rate = 0.1};
    peri_metric_sums sums = {0};
    peri_batch *batch;
    peri_logistic *logistic;
    peri_tensor *x, *of[4];
    float chances[40];
    char text[32];
    int n = 0;
    assert_ok(peri_metric_add(&samples, 0.5, &sums));
    for (int i = 0; i < 3; i++) assert_ok(peri_metric_value(&sums, names[i], &out[n++]));
    assert_ok(peri_metric_auc(&samples, &out[n++]));
    assert_fails(peri_metric_add(&bad, 0.5, &sums), PERI_EINVAL, "not a number");
    assert_ok(peri_batch_new(3, 2, 40, 80, &batch));
    assert_ok(peri_synthetic_fill(&data, 0, 40, batch));
    assert_ok(peri_logistic_new(&config, &logistic));
    assert_ok(peri_logistic_train(logistic, batch, &out[n++]));
    assert_ok(peri_logistic_predict(logistic, batch, chances));
    for (int i = 0; i < 40; i++) out[n++] = (double)chances[i];
    for (int i = 0; i < 120; i++) out[n++] = (double)batch->dense[i];
    peri_logistic_release(logistic);
    char path[] = "/tmp/peri-numbers-XXXXXX";
    const peri_criteo_config reads = {.size = sizeof reads, .path = path, .table_rows = rows, .dense_features = 3,
                                      .sparse_features = 2, .world = 1, .batch_rows = 40, .end = 1,
                                      .dense = PERI_DENSE_LOG};
    peri_criteo *reader;
    close(mkstemp(path));
    assert_ok(peri_synthetic_write(&data, 0, 40, path));
    assert_ok(peri_criteo_open(&reads, &reader));
    assert_ok(peri_criteo_next(reader, batch));
    for (int i = 0; i < 120; i++) out[n++] = (double)batch->dense[i];
    peri_criteo_release(reader);
    unlink(path);
    peri_batch_release(batch);
    assert_ok(peri_tensor_full(cpu, PERI_F32, 1, &seven, 0.7, &x));
    assert_ok(peri_op_mean(x, &first, 1, false, &of[0]));
    assert_ok(peri_op_dropout(x, 0.3, 1, 2, 3, &of[1]));
    assert_ok(peri_op_clamp(x, 0.8000000001, 0.9, &of[2]));
    assert_ok(peri_op_mse(x, of[2], PERI_LOSS_MEAN, &of[3]));
    for (int i = 0; i < 4; i++) {
        const int64_t m = i == 0 || i == 3 ? 1 : 7;
        for (int64_t k = 0; k < m; k++) assert_ok(peri_tensor_item(of[i], k, &out[n++]));
        peri_tensor_release(of[i]);
    }
    assert_ok(peri_tensor_fill(x, 1e-42));
    assert_ok(peri_tensor_item(x, 0, &out[n++]));
    peri_tensor_release(x);
    assert_true(peri__number_of("0.1", 3, &out[n++]) && peri__number_of("-1e-310", 7, &out[n++]));
    memset(text, 0, sizeof text);
    memcpy(&out[n], peri__number_text(0.1, text), sizeof text);
    return n + (int)(sizeof text / sizeof *out);
}

static void rounding_and_masks_stay(void **state)
{
    (void)state;
    static float odd[2][3 * ODD * ODD];
    static double own[2][600];
    guest g;
    sigset_t before, after;
    struct sigaction old[32], now;
    assert_ok(guest_new(&g, false, BATCH));
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    for (int i = 1; i < 32; i++) sigaction(i, NULL, &old[i]);
    odd_numbers(g.cpu, odd[0]);
    const int n_own = odd_numbers_of_the_caller(g.cpu, own[0]);
    assert_true(n_own < 600);
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    /* denormals are zero, and are flushed; what is invalid traps */
    const unsigned control = (__builtin_ia32_stmxcsr() | 0x8040u) & ~0x80u;
    __builtin_ia32_ldmxcsr(control);
#endif
    const double sum = guest_use(&g), one = product(g.cpu);
    odd_numbers(g.cpu, odd[1]);
    odd_numbers_of_the_caller(g.cpu, own[1]);
    assert_fails(peri__fail(PERI_EINVAL, "given: %g", 0.9), PERI_EINVAL, "given: 0.9");
    assert_int_equal(strlen(peri_error_message()), strlen("given: 0.9"));
    assert_int_equal(fegetround(), FE_UPWARD);
#if defined(__x86_64__)
    assert_int_equal(__builtin_ia32_stmxcsr() & ~0x3fu, control & ~0x3fu);
    __builtin_ia32_ldmxcsr((control | 0x80u) & ~0x8040u);
#endif
    fesetround(FE_TONEAREST);
    assert_true(sum == BATCH * COLS && one == 1);
    assert_memory_equal(odd[0], odd[1], sizeof odd[0]); /* nothing depends on it */
    for (int i = 0; i < n_own; i++)
        if (memcmp(&own[0][i], &own[1][i], sizeof(double)) != 0)
            fail_msg("number %d of the caller's: %.17g, rounded up %.17g", i, own[0][i], own[1][i]);
    assert_true(odd[0][ODD * ODD] != 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int i = 1; i < 65; i++) assert_int_equal(sigismember(&before, i), sigismember(&after, i));
    for (int i = 1; i < 32; i++) {
        sigaction(i, NULL, &now);
        assert_true(now.sa_handler == old[i].sa_handler);
    }
    guest_free(&g);
}

static int logs_to_nobody(void *ctx)
{
    (void)ctx;
    int ends[2];
    sigset_t pending;
    signal(SIGPIPE, SIG_DFL);
    if (pipe(ends) != 0 || close(ends[0]) != 0 || dup2(ends[1], STDERR_FILENO) < 0) return 1;
    for (int i = 0; i < 3; i++) peri__log(PERI_LOG_ERROR, "nobody reads this");
    sigpending(&pending);
    return sigismember(&pending, SIGPIPE) ? 2 : 0;
}

static void a_broken_pipe_is_no_signal(void **state)
{
    (void)state;
    assert_int_equal(in_child(logs_to_nobody, NULL), 0);
}

/* -- files that are too long --------------------------------------------------------------------------------------- */

enum { LIMIT = 64 << 10, LONG = 1 << 20 };

static peri_status saves(const char *folder)
{
    const int64_t n = LONG;
    peri_device *cpu;
    peri_tensor *numbers;
    peri_checkpoint_state *state;
    peri_checkpoint_folder *new_one;
    peri_checkpoint_writer *writer;
    assert_ok(peri_device_get("cpu", &cpu));
    assert_ok(peri_tensor_new(cpu, PERI_U8, 1, &n, &numbers));
    assert_ok(peri_checkpoint_state_new(0, &state));
    assert_ok(peri_checkpoint_state_tensor(state, "model/w", numbers));
    assert_ok(peri_checkpoint_folder_new(folder, &new_one));
    assert_ok(peri_checkpoint_writer_new(peri_checkpoint_folder_path(new_one), "rank-0", 0, &writer));
    const peri_status status = peri_checkpoint_state_write(state, writer);
    peri_checkpoint_writer_release(writer);
    peri_checkpoint_folder_release(new_one);
    peri_checkpoint_state_release(state);
    peri_tensor_release(numbers);
    return status;
}

static peri_status exports(const char *path, const char *data)
{
    int32_t section;
    peri_model_writer *writer;
    assert_ok(peri_model_writer_new(path, &writer));
    assert_ok(peri_model_writer_begin(writer, &section));
    peri_status status = PERI_OK;
    for (int i = 0; i < 20 && status >= 0; i++) status = peri_model_writer_put(writer, data, LONG);
    peri_model_writer_release(writer);
    return status;
}

static peri_status has_a_row_file(const char *folder)
{
    static const char *const features[] = {"f"};
    const peri_table_config table = {.size = sizeof table, .name = "t", .rows = 10000, .cols = 16};
    const peri_cache_config cache = {.size = sizeof cache, .directory = folder};
    peri_tbe_optimizer_config sgd = {.size = sizeof sgd};
    peri_tbe_config config = {.size = sizeof config, .tables = &table, .n_tables = 1, .caches = &cache};
    peri_tbe *tbe;
    assert_ok(peri_device_get("cpu", &config.device));
    assert_ok(peri_tbe_optimizer_default(PERI_TBE_SGD, &sgd));
    config.optimizer = &sgd, config.features = features, config.n_features = 1;
    return peri_tbe_new(&config, &tbe);
}

static peri_status writes_columns(const char *folder)
{
    static float dense[LONG / 4], labels[LONG / 64];
    const peri_batch batch = {.dense_features = 16, .dense = dense, .labels = labels, .rows = LONG / 64};
    peri_columns_writer *writer;
    assert_ok(peri_columns_writer_new(folder, 16, 0, false, &writer));
    peri_status status = peri_columns_writer_add(writer, &batch);
    if (status >= 0) status = peri_columns_writer_finish(writer, "");
    peri_columns_writer_release(writer);
    return status;
}

/** Every kind of file, where RLIMIT_FSIZE is low and SIGXFSZ ends the process. */
static int files_that_are_too_long(void *folder)
{
    static char data[LONG], path[300];
    sigset_t mask, now, pending;
    if (chdir(folder) != 0 || signal(SIGXFSZ, SIG_DFL) == SIG_ERR) return 2;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){LIMIT, LIMIT}) != 0) return 3;
    assert_fails(peri_file_write("text", data, LONG, false), PERI_EIO, "File too large");
    assert_fails(saves("model"), PERI_EIO, "File too large");
    assert_fails(exports("model.peri", data), PERI_EIO, "File too large");
    assert_fails(writes_columns("columns"), PERI_EIO, "File too large");
    snprintf(path, sizeof path, "%s", (const char *)folder);
    assert_fails(has_a_row_file(path), PERI_EIO, "File too large");
    const int log = open("log", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (log < 0 || lseek(log, LIMIT, SEEK_SET) < 0 || dup2(log, STDERR_FILENO) < 0) return 4;
    peri__log(PERI_LOG_ERROR, "there is no room for this");
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    sigpending(&pending);
    if (sigismember(&pending, SIGXFSZ) || sigismember(&now, SIGXFSZ) != sigismember(&mask, SIGXFSZ)) return 5;
    pthread_kill(pthread_self(), SIGXFSZ); /* the program's own is as it was */
    return 6;
}

static void files_that_are_too_long_are_errors_and_no_signals(void **state)
{
    (void)state;
    char folder[] = "/tmp/peri_long_XXXXXX", command[100];
    assert_non_null(mkdtemp(folder));
    const int status = in_child(files_that_are_too_long, folder);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(status, 100 + SIGXFSZ);
}

/** What messages about ranks say of operations: without a digit, a comma and a digit. */
static void operations_have_a_point(void)
{
    const peri_coll_facts facts = {.names = "Adam,step,lr,eps,beta", .number = {12, 0.25, -1.5e-30, INFINITY}};
    const peri_coll_op op = {.kind = PERI_COLL_BARRIER, .sequence = 3, .facts = &facts};
    const peri_comm_config config = {.size = sizeof config, .transport = "self", .timeout_s = 20};
    peri_group *world;
    peri_work *work;
    char text[1000];
    peri_coll_op_text(&op, 1, text, sizeof text);
    assert_string_equal(text, "operation 3: barrier by Adam (step 12, lr 0.25, eps -1.5e-30, beta inf)");
    assert_ok(peri_comm_open(&config, &world));
    assert_ok(peri_coll_barrier(world, 0, &work));
    assert_ok(peri_work_wait(work));
    peri_work_release(work);
    peri_group_record(world, text, sizeof text);
    const char *after = strstr(text, "done after "), *posted = strstr(text, "posted ");
    assert_true(after && after[strcspn(after, ".,\xd9\xab")] == '.');
    assert_true(posted && posted[strcspn(posted, ".,\xd9\xab")] == '.');
    assert_ok(peri_group_close(world));
    peri_group_release(world);
}

/** Numbers in texts of the library's own have a point where those of the program's locale have something else. */
static void numbers_have_a_point_in_every_locale(void **state)
{
    (void)state;
    char folder[] = "/tmp/peri_locale_XXXXXX", command[300], text[32];
    double x = 0;
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++) { /* of one byte, and of two */
        const char *const name = i ? "ps_AF" : "de_DE";
        snprintf(command, sizeof command, "localedef -i %s -f UTF-8 %s/%s.UTF-8 >/dev/null 2>&1", name, folder, name);
        const bool made = system(command) == 0;
        snprintf(command, sizeof command, "%s.UTF-8", name);
        setenv("LOCPATH", folder, 1);
        if (made && setlocale(LC_ALL, command)) {
            snprintf(text, sizeof text, "%g", 0.5);
            assert_null(strchr(text, '.'));
        }
        assert_string_equal(peri__number_text(0.1, text), "0.1");
        assert_string_equal(peri__number_text(-1.5e-30, text), "-1.5e-30");
        assert_true(peri__number_of("0.25", 4, &x) && x == 0.25);
        assert_false(peri__number_of("0,25", 4, &x) || peri__number_of("{", 1, &x));
        assert_fails(peri__fail(PERI_EINVAL, "given: %g", 0.25), PERI_EINVAL, "given: 0.25");
        peri__buffer buffer = {0};
        peri__buffer_print(&buffer, "[%g]", 0.25);
        assert_string_equal(buffer.data, "[0.25]");
        peri__free(buffer.data);
        operations_have_a_point();
        setlocale(LC_ALL, "C");
    }
    unsetenv("LOCPATH");
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

/* -- a sandbox ----------------------------------------------------------------------------------------------------- */

static int sandboxed(void *ctx)
{
    static const int calls[] = {SYS_io_uring_setup, SYS_io_uring_enter,  SYS_io_uring_register, SYS_mbind,
                                SYS_set_mempolicy,  SYS_get_mempolicy,   SYS_sched_setaffinity, SYS_sched_getaffinity,
                                SYS_madvise,        SYS_process_vm_readv,
#if defined(SYS_arch_prctl)
                                SYS_arch_prctl
#endif
    };
    guest g;
    heard h = {0};
    if (!refuse(calls, (int)(sizeof calls / sizeof *calls), *(const int *)ctx)) return 77;
    peri_host_log_set(hear, &h);
    if (peri_threads_set(WORKERS) < 0 || guest_new(&g, true, BATCH) < 0) return 1;
    if (guest_use(&g) != BATCH * COLS || peri_tbe_backward(g.tbe, &g.in, g.grad, NULL) < 0) return 2;
    if (strcmp(peri_tbe_cache_io(g.tbe), "threads") != 0) return 3;
    if (product(g.cpu) != 1) return 4;
    guest_free(&g);
    return h.lines == 0 ? 0 : 5;
}

static void a_sandbox_means_a_slower_way(void **state)
{
    (void)state;
    if (SANITIZED) skip();
    for (int i = 0; i < 2; i++) {
        const int status = in_child(sandboxed, &(int){i ? ENOSYS : EPERM});
        if (status == 77) skip(); /* filters cannot be set here */
        assert_int_equal(status, 0);
    }
}

/** What keeps files open below the folder @ctx, in a process that has closed its stdin, stdout and stderr. */
static int without_streams(void *ctx)
{
    const char *folder = ctx, *part;
    char columns[64], path[64], digest[PERI_CHECKPOINT_DIGEST + 1];
    guest g[2];
    peri_columns_writer *writer;
    peri_checkpoint_folder *saving;
    peri_checkpoint_writer *pieces;
    peri_checkpoint *reading;
    snprintf(columns, sizeof columns, "%s/columns", folder);
    snprintf(path, sizeof path, "%s/checkpoint", folder);
    for (int fd = 0; fd <= STDERR_FILENO; fd++) close(fd);
    for (int i = 0; i < 2; i++)
        if (guest_new(&g[i], true, BATCH) < 0 || guest_use(&g[i]) != BATCH * COLS) return 1;
    if (peri_columns_writer_new(columns, 1, 1, false, &writer) < 0) return 2;
    if (peri_checkpoint_folder_new(path, &saving) < 0) return 3;
    const char *in = peri_checkpoint_folder_path(saving);
    if (peri_checkpoint_writer_new(in, "rank-0", 0, &pieces) < 0 || peri_checkpoint_writer_finish(pieces) < 0) return 4;
    if (peri_checkpoint_writer_part(pieces, &part) < 0) return 5;
    if (peri_checkpoint_publish(in, path, &part, 1, NULL, false, digest) < 0) return 6;
    if (peri_checkpoint_open(path, &reading) < 0) return 7;
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) >= 0) return 10 + fd;
    peri_checkpoint_release(reading);
    peri_checkpoint_writer_release(pieces);
    peri_checkpoint_folder_release(saving);
    peri_columns_writer_release(writer);
    for (int i = 0; i < 2; i++) guest_free(&g[i]);
    return 0;
}

static void the_standard_streams_stay_the_hosts(void **state)
{
    (void)state;
    if (SANITIZED) skip(); /* they want their stderr */
    char folder[] = "/tmp/peri-streams-XXXXXX", command[64];
    assert_non_null(mkdtemp(folder));
    const int status = in_child(without_streams, folder);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(status, 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(log_lines_go_to_the_host),
    cmocka_unit_test(plugins_come_from_folders_that_the_host_names),
    cmocka_unit_test(threads_follow_the_quota_of_the_control_group),
    cmocka_unit_test(memory_is_what_the_control_group_allows),
    cmocka_unit_test(a_child_goes_on_with_what_is_in_memory),
    cmocka_unit_test(a_child_is_told_what_it_cannot_use),
    cmocka_unit_test(groups_stay_with_their_process),
    cmocka_unit_test(feeds_stay_with_their_process),
    cmocka_unit_test(files_stay_with_the_process_that_writes_them),
    cmocka_unit_test(children_come_while_others_compute),
    cmocka_unit_test(a_stack_of_64_kib_is_enough),
    cmocka_unit_test(rounding_and_masks_stay),
    cmocka_unit_test(a_broken_pipe_is_no_signal),
    cmocka_unit_test(numbers_have_a_point_in_every_locale),
        cmocka_unit_test(files_that_are_too_long_are_errors_and_no_signals),
    cmocka_unit_test(a_sandbox_means_a_slower_way),
    cmocka_unit_test(the_standard_streams_stay_the_hosts),
    cmocka_unit_test(nothing_is_left_at_the_end_and_it_begins_again),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }
