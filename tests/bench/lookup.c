/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c: what a lookup costs a serving program over its bytes: 26 tables, one sample, an id each, by any number of
 * threads at once, beside memcpy of the same rows by the same threads. One line a number of threads: p50 and p99 of a
 * call and of the copies in microseconds, and allocations a call. Before, each thread has looked up a batch of its own
 * while those of the other threads were there, as perilune/embed.h tells programs that want no allocation later.
 *
 *   lookup OUT.jsonl THREADS ...
 */
#include <perilune/host.h>
#include <perilune/perilune.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TABLES = 26, COLS = 64, ROWS = 100000, SETS = 64, CALLS = 20000, MOST = 64 };

static atomic_int_least64_t allocations;
static peri_device *cpu;
static peri_tbe *tbe;
static const float *rows[TABLES];
static pthread_barrier_t together;

static void *count_alloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return malloc(size);
}

static void *count_resize(void *p, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return realloc(p, size);
}

static void check(peri_status status)
{
    if (status < 0) exit((fprintf(stderr, "lookup: %s\n", peri_error_message()), 1));
}

static int order(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static peri_tensor *tensor(int64_t n, const int64_t *data)
{
    peri_tensor *t;
    check(peri_tensor_new(cpu, PERI_I64, 1, &n, &t));
    check(peri_tensor_write(t, data, n * (int64_t)sizeof *data));
    return t;
}

/** One thread's calls, and then its copies, in order of their times. */
typedef struct worker {
    pthread_t thread;
    unsigned seed;
    int64_t calls[CALLS], copies[CALLS];
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    const int64_t shape[2] = {1, TABLES * COLS};
    static _Thread_local int64_t ids[SETS][TABLES];
    int64_t offsets[TABLES + 1];
    float copy[TABLES * COLS];
    peri_tbe_block block[TABLES];
    peri_tbe_input in[SETS] = {{0}};
    peri_tensor *out;
    peri_tbe_batch *warm;
    for (int t = 0; t < TABLES; t++)
        block[t] = (peri_tbe_block){
            .first_bag = t, .bags = 1, .out_offset = t * COLS, .out_stride = TABLES * COLS, .table = t, .feature = -1};
    for (int t = 0; t <= TABLES; t++) offsets[t] = t;
    check(peri_tensor_new(cpu, PERI_F32, 2, shape, &out));
    check(peri_tbe_blocks_new(tbe, block, TABLES, &in[0].blocks));
    for (int k = 0; k < SETS; k++) {
        for (int t = 0; t < TABLES; t++) ids[k][t] = rand_r(&w->seed) % ROWS;
        in[k] = (peri_tbe_input){
            .ids = tensor(TABLES, ids[k]), .offsets = tensor(TABLES + 1, offsets), .blocks = in[0].blocks};
    }
    check(peri_tbe_batch_new(tbe, &in[0], &warm));
    check(peri_tbe_batch_forward(warm, out));
    pthread_barrier_wait(&together);
    peri_tbe_batch_release(warm);
    for (int i = 0; i < SETS; i++) check(peri_tbe_forward(tbe, &in[i], out));
    pthread_barrier_wait(&together);
    for (int i = 0; i < CALLS; i++) {
        const int64_t began = peri_time_ns();
        check(peri_tbe_forward(tbe, &in[i % SETS], out));
        w->calls[i] = peri_time_ns() - began;
    }
    pthread_barrier_wait(&together);
    for (int i = 0; i < CALLS; i++) {
        const int64_t began = peri_time_ns();
        for (int t = 0; t < TABLES; t++)
            memcpy(copy + t * COLS, rows[t] + ids[i % SETS][t] * COLS, COLS * sizeof(float));
        __asm__ volatile("" ::"r"(copy) : "memory");
        w->copies[i] = peri_time_ns() - began;
    }
    qsort(w->calls, CALLS, sizeof *w->calls, order);
    qsort(w->copies, CALLS, sizeof *w->copies, order);
    for (int k = 0; k < SETS; k++) peri_tensor_release(in[k].ids), peri_tensor_release(in[k].offsets);
    peri_tbe_blocks_release(in[0].blocks);
    peri_tensor_release(out);
    return NULL;
}

static void measure(FILE *file, int threads)
{
    worker *list = calloc((size_t)threads, sizeof *list);
    double p50 = 0, p99 = 0, copies = 0;
    if (!list) exit(1);
    pthread_barrier_init(&together, NULL, (unsigned)threads + 1);
    for (int i = 0; i < threads; i++) {
        list[i].seed = (unsigned)i + 1;
        if (pthread_create(&list[i].thread, NULL, work, &list[i]) != 0) exit(1);
    }
    pthread_barrier_wait(&together); /* all have looked their batches up */
    pthread_barrier_wait(&together); /* and are warm */
    const int64_t before = atomic_load(&allocations);
    pthread_barrier_wait(&together);
    const double a_call = (double)(atomic_load(&allocations) - before) / CALLS / threads;
    for (int i = 0; i < threads; i++) {
        pthread_join(list[i].thread, NULL);
        p50 += (double)list[i].calls[CALLS / 2] / threads;
        p99 += (double)list[i].calls[CALLS / 100 * 99] / threads;
        copies += (double)list[i].copies[CALLS / 2] / threads;
    }
    printf("lookup of %d tables, one sample  threads %2d  p50 %6.2f us  p99 %6.2f us  copies p50 %6.2f us  allocations "
           "a call %g\n",
           TABLES, threads, p50 / 1e3, p99 / 1e3, copies / 1e3, a_call);
    fprintf(file,
            "{\"case\":\"lookup\",\"threads\":%d,\"p50_us\":%.3f,\"p99_us\":%.3f,\"copies_p50_us\":%.3f,"
            "\"allocations\":%g}\n",
            threads, p50 / 1e3, p99 / 1e3, copies / 1e3, a_call);
    pthread_barrier_destroy(&together);
    free(list);
}

int main(int argc, char **argv)
{
    peri_table_config table[TABLES] = {{0}};
    char name[TABLES][8];
    FILE *file = argc > 2 ? fopen(argv[1], "a") : NULL;
    if (!file) return fprintf(stderr, "usage: lookup OUT.jsonl THREADS ...\n"), 2;
    check(peri_host_allocator_set(count_alloc, count_resize, free));
    check(peri_threads_set(1)); /* the threads are the program's */
    check(peri_device_get("cpu", &cpu));
    for (int t = 0; t < TABLES; t++) {
        snprintf(name[t], sizeof name[t], "t%d", t);
        table[t] = (peri_table_config){.size = sizeof table[t], .name = name[t], .rows = ROWS, .cols = COLS};
    }
    check(peri_tbe_new(
        &(peri_tbe_config){.size = sizeof(peri_tbe_config), .device = cpu, .n_tables = TABLES, .tables = table}, &tbe));
    for (int t = 0; t < TABLES; t++) {
        peri_tensor *weight;
        void *data;
        check(peri_tbe_state(tbe, t, "weight", &weight));
        check(peri_tensor_data(weight, &data));
        rows[t] = data;
        peri_tensor_release(weight);
    }
    for (int i = 2; i < argc; i++) {
        const int threads = atoi(argv[i]);
        if (threads >= 1 && threads <= MOST) measure(file, threads);
    }
    return fclose(file);
}
