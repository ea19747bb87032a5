/* SPDX-License-Identifier: Apache-2.0
 *
 * guest.h: what the tests of the library as a guest in somebody else's process have in common: a table and a batch that
 * use all of it, children, counts of threads.
 */
#ifndef PERI_TESTS_GUEST_H
#define PERI_TESTS_GUEST_H

#include "tests/harness/check.h"

#include "runtime/base/base_internal.h"

#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <perilune/host.h>
#include <perilune/perilune.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

enum { ROWS = 20000, COLS = 8, BATCH = 4096, WORKERS = 4 };

/** A table whose rows are all 1, and a batch of one id a bag. */
typedef struct guest {
    peri_device *cpu;
    peri_tbe *tbe;
    peri_tbe_input in;
    peri_tensor *out, *grad;
} guest;

static peri_status guest_new(guest *g, bool in_file, int64_t batch)
{
    const int64_t ends = batch + 1, shape[2] = {batch, COLS};
    void *p;
    *g = (guest){0};
    PERI_TRY(peri_device_get("cpu", &g->cpu));
    const peri_table_config table = {
        .size = sizeof table, .name = "t", .rows = ROWS, .cols = COLS, .init = PERI_INIT_CONSTANT, .init_a = 1};
    const peri_cache_config cache = {.size = sizeof cache, .load_factor = 0.5};
    peri_tbe_optimizer_config sgd = {.size = sizeof sgd};
    PERI_TRY(peri_tbe_optimizer_default(PERI_TBE_SGD, &sgd));
    peri_tbe_config config = {
        .size = sizeof config, .device = g->cpu, .n_tables = 1, .tables = &table, .optimizer = &sgd};
    if (in_file) config.caches = &cache;
    PERI_TRY(peri_tbe_new(&config, &g->tbe));
    PERI_TRY(peri_tensor_new(g->cpu, PERI_I64, 1, &batch, &g->in.ids));
    PERI_TRY(peri_tensor_new(g->cpu, PERI_I64, 1, &ends, &g->in.offsets));
    PERI_TRY(peri_tensor_data(g->in.ids, &p));
    for (int64_t i = 0; i < batch; i++) ((int64_t *)p)[i] = i * 977 % ROWS;
    PERI_TRY(peri_tensor_data(g->in.offsets, &p));
    for (int64_t i = 0; i <= batch; i++) ((int64_t *)p)[i] = i;
    PERI_TRY(peri_tensor_new(g->cpu, PERI_F32, 2, shape, &g->out));
    PERI_TRY(peri_tensor_full(g->cpu, PERI_F32, 2, shape, 0.5, &g->grad));
    const peri_tbe_block block = {.bags = batch, .out_stride = COLS, .feature = -1};
    return peri_tbe_blocks_new(g->tbe, &block, 1, &g->in.blocks);
}

static void guest_free(guest *g)
{
    peri_tensor *own[] = {g->in.ids, g->in.offsets, g->out, g->grad};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) peri_tensor_release(own[i]);
    peri_tbe_blocks_release(g->in.blocks);
    peri_tbe_release(g->tbe);
}

/** The sum of a lookup; it is BATCH * COLS before the first update. Negative: an error. */
static double guest_use(guest *g)
{
    float out[BATCH * COLS];
    double sum = 0;
    if (peri_tbe_forward(g->tbe, &g->in, g->out) < 0 || peri_tensor_read(g->out, out, sizeof out) < 0) return -1;
    for (int i = 0; i < BATCH * COLS; i++) sum += (double)out[i];
    return sum;
}

/** A matrix product that all workers share; its sum. */
static double product(peri_device *cpu)
{
    enum { N = 600 };
    const int64_t shape[2] = {N, N};
    const int32_t both[2] = {0, 1};
    peri_tensor *a, *b, *sum;
    double x = -1;
    if (peri_tensor_full(cpu, PERI_F32, 2, shape, 1, &a) < 0) return -1;
    if (peri_op_matmul(a, a, &b) >= 0) {
        if (peri_op_sum(b, both, 2, false, &sum) >= 0) {
            (void)peri_tensor_item(sum, 0, &x);
            peri_tensor_release(sum);
        }
        peri_tensor_release(b);
    }
    peri_tensor_release(a);
    return x / N / N / N;
}

/** Run @body in a child, which has 20 s; its exit status, or 100 and more: the signal that ended it. */
static int in_child(int (*body)(void *ctx), void *ctx)
{
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(20);
        _exit(body(ctx));
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? 100 + WTERMSIG(status) : WEXITSTATUS(status);
}

/** From now on these calls of the system are refused with error @number. */
static bool refuse(const int *calls, int n, int number)
{
    struct sock_filter code[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    int at = 1;
    for (int i = 0; i < n; i++) {
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)number);
    }
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {(unsigned short)at, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/** Threads of this process, and how many of them are called @name (or NULL). */
static int threads_called(const char *name)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;
    for (struct dirent *e; tasks && (e = readdir(tasks));) {
        char name_file[300], text[64] = "";
        if (e->d_name[0] == '.') continue;
        snprintf(name_file, sizeof name_file, "/proc/self/task/%s/comm", e->d_name);
        FILE *f = fopen(name_file, "r");
        if (f && fgets(text, sizeof text, f)) text[strcspn(text, "\n")] = 0;
        if (f) fclose(f);
        n += !name || !strcmp(text, name);
    }
    closedir(tasks);
    return n;
}

/** Ids dealt to buckets, and rows of data written and counted: what has the largest frames. */
static peri_status deal_and_write(guest *g)
{
    static const int64_t size = ROWS / 4, rows[] = {50}, bags = BATCH;
    static const int32_t one = 1;
    const peri_bucket_args args = {.buckets = 4, .n_features = 1, .block_sizes = &size};
    const peri_synthetic_args data = {.size = sizeof data, .table_rows = rows, .bag_min = &one, .bag_max = &one,
                                      .dense_features = 1, .sparse_features = 1, .alpha = 1.05};
    char data_path[] = "/tmp/peri-stack-XXXXXX";
    const peri_criteo_config reads = {.size = sizeof reads, .path = data_path, .table_rows = rows, .dense_features = 1,
                                      .sparse_features = 1, .world = 1, .batch_rows = 2, .end = 1};
    peri_bucket_result dealt;
    peri_tensor *lengths;
    peri_criteo *reader;
    PERI_TRY(peri_tensor_full(g->cpu, PERI_I64, 1, &bags, 1, &lengths));
    peri_status status = peri_sparse_bucketize(&args, lengths, g->in.ids, NULL, NULL, &dealt);
    peri_tensor_release(lengths);
    if (status < 0) return status;
    peri_tensor_release(dealt.lengths);
    peri_tensor_release(dealt.ids);
    close(mkstemp(data_path));
    status = peri_synthetic_write(&data, 0, 20, data_path);
    if (status >= 0) status = peri_criteo_open(&reads, &reader);
    if (status >= 0) peri_criteo_release(reader);
    unlink(data_path);
    return status;
}

#endif
