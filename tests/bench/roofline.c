/* SPDX-License-Identifier: Apache-2.0
 *
 * roofline.c: what the memory of this machine gives to embedding tables at best: whole rows gathered from random places
 * and added up in registers, or rewritten in place, with any prefetch. Nothing but the addresses of the rows is read
 * beside them. Loaded by tests/bench/embed.lua.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default")))

enum { NO_HINT, HINT_T0, HINT_T1, HINTS };
enum { IN_ORDER, SCATTERED, ORDERS };
#if defined(__AVX512F__)
/* WIDTH: bytes of a register; SUMS: how many add up */
enum { MOST_THREADS = 64, LINE = 64, MOST_LINES = 16, WIDTH = 64, SUMS = 16 };
#else
enum { MOST_THREADS = 64, LINE = 64, MOST_LINES = 16, WIDTH = 32, SUMS = 8 };
#endif

typedef uint32_t lanes __attribute__((vector_size(WIDTH), aligned(4)));

typedef struct job {
    char *base;
    const int64_t *at; /* bytes from base to each row */
    int64_t n, bytes;  /* rows, bytes of one: a multiple of 4 */
    int32_t distance, update;
    void (*fn)(const struct job *, int64_t begin, int64_t end);
} job;

static volatile uint32_t sink;

#define INLINE static inline __attribute__((always_inline))

/** Prefetches of one kind: the kind must be a constant, or compilers merge the kinds into one. */
INLINE void fetch(const char *row, int64_t bytes, const int hint)
{
    const char *p = (const char *)((uintptr_t)row & ~(uintptr_t)(LINE - 1));
    for (; p < row + bytes; p += LINE) {
        if (hint == HINT_T0) __builtin_prefetch(p, 0, 3);
        if (hint == HINT_T1) __builtin_prefetch(p, 0, 2);
    }
}

/** In which order the k-th of n lines is read. Processors that see three neighbouring lines in a row fetch the lines
 *  behind them too, which with random rows are nobody's: out of order they do not. */
INLINE int place(int k, const int n, const int order)
{
    static const int of8[8] = {2, 6, 5, 7, 3, 0, 4, 1}, of4[4] = {3, 1, 0, 2};
    if (order == IN_ORDER) return k;
    return n % 8 == 0 ? k / 8 * 8 + of8[k % 8] : n == 4 ? of4[k] : k;
}

/** Rows [begin, end) of a job whose rows have @lines whole lines (0: any number): running sums, as a pooled lookup
 *  keeps them. */
INLINE void walk(const job *j, int64_t begin, int64_t end, const int lines, const int order, const int hint,
                 const int update)
{
    enum { PARTS = LINE / WIDTH };
    lanes sum[SUMS] = {{0}};
    uint32_t rest = 0;
    for (int64_t i = begin; i < end; i++) {
        if (hint && i + j->distance < end) fetch(j->base + j->at[i + j->distance], j->bytes, hint);
        char *row = j->base + j->at[i];
        int64_t b = lines * LINE;
        _Pragma("GCC unroll 16") for (int k = 0; k < lines; k++) {
            int v = place(k, lines, order) * PARTS;
            _Pragma("GCC unroll 2") for (int x = v; x < v + PARTS; x++) {
                lanes *p = (lanes *)(row + x * WIDTH);
                if (update) *p ^= sum[x % SUMS];
                else sum[x % SUMS] += *p;
            }
        }
        for (; !lines && b + WIDTH <= j->bytes; b += WIDTH) {
            lanes *p = (lanes *)(row + b);
            if (update) *p ^= sum[0];
            else sum[0] += *p;
        }
        for (; b < j->bytes; b += 4) {
            uint32_t x;
            memcpy(&x, row + b, 4);
            if (update) x ^= rest, memcpy(row + b, &x, 4);
            else rest += x;
        }
        if (update) __asm__ volatile("" : "+m"(sum), "+r"(rest)); /* zeros, but the compiler does not know */
    }
    for (int v = 0; v < SUMS; v++) rest += sum[v][0] + sum[v][WIDTH / 4 - 1];
    sink = rest;
}

/* One function for each number of lines, order, hint and purpose. */
#define FLAVOUR(l, o, h, u)                                                                                            \
    static __attribute__((noinline)) void walk_##l##_##o##_##h##_##u(const job *j, int64_t begin, int64_t end)         \
    {                                                                                                                  \
        walk(j, begin, end, l, o, h, u);                                                                               \
    }
#define HINTED(X, l, o, u) X(l, o, 0, u) X(l, o, 1, u) X(l, o, 2, u)
#define ORDERED(X, l) HINTED(X, l, 0, 0) HINTED(X, l, 0, 1) HINTED(X, l, 1, 0) HINTED(X, l, 1, 1)
#define SIZES(X) ORDERED(X, 0) ORDERED(X, 1) ORDERED(X, 2) ORDERED(X, 3) ORDERED(X, 4) ORDERED(X, 8) ORDERED(X, 16)
SIZES(FLAVOUR)

static void (*const flavours[MOST_LINES + 1][ORDERS][HINTS][2])(const job *, int64_t, int64_t) = {
#define ENTRY(l, o, h, u) [l][o][h][u] = walk_##l##_##o##_##h##_##u,
    SIZES(ENTRY)
#undef ENTRY
};

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* -- threads: helpers sleep between measurements, spin within one -------------------------------------------------- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int32_t helpers, threads;
    int64_t round;
    const job *job;
    int64_t repeats;
    atomic_int ready, go, done;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void part(int32_t i)
{
    const job *j = pool.job;
    int64_t begin = j->n * i / pool.threads, end = j->n * (i + 1) / pool.threads;
    for (int64_t r = 0; r < pool.repeats; r++) j->fn(j, begin, end);
}

static void *helper(void *arg)
{
    int32_t index = (int32_t)(intptr_t)arg;
    for (int64_t seen = 0;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.round == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.round;
        pthread_mutex_unlock(&pool.lock);
        if (index >= pool.threads) continue;
        atomic_fetch_add(&pool.ready, 1);
        while (!atomic_load_explicit(&pool.go, memory_order_acquire)) {
        }
        part(index);
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
    }
    return NULL;
}

/** How to walk: see the enums above. */
typedef struct roof_way {
    int32_t threads, hint, distance, order, update;
} roof_way;

/** Nanoseconds of one of @repeats passes over @n rows of @bytes. */
API int64_t roof_run(void *base, const int64_t *at, int64_t n, int64_t bytes, const roof_way *way, int64_t repeats);
API int64_t roof_run(void *base, const int64_t *at, int64_t n, int64_t bytes, const roof_way *way, int64_t repeats)
{
    int32_t threads = way->threads;
    int64_t lines = bytes / LINE;
    if (threads < 1 || threads > MOST_THREADS || way->hint < 0 || way->hint >= HINTS || bytes % 4) abort();
    if (lines > MOST_LINES || !flavours[lines][0][0][0]) lines = 0;
    job j = {base, at, n, bytes, way->distance, way->update, flavours[lines][way->order][way->hint][way->update]};
    while (pool.helpers < threads - 1) {
        pthread_t t;
        if (pthread_create(&t, NULL, helper, (void *)(intptr_t)(pool.helpers + 1)) != 0) abort();
        pthread_detach(t);
        pool.helpers++;
    }
    atomic_store(&pool.ready, 0);
    atomic_store(&pool.go, 0);
    atomic_store(&pool.done, 0);
    pthread_mutex_lock(&pool.lock);
    pool.job = &j;
    pool.threads = threads;
    pool.repeats = repeats;
    pool.round++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    while (atomic_load(&pool.ready) < threads - 1) {
    }
    int64_t from = now();
    atomic_store_explicit(&pool.go, 1, memory_order_release);
    part(0);
    while (atomic_load_explicit(&pool.done, memory_order_acquire) < threads - 1) {
    }
    return (now() - from) / repeats;
}
