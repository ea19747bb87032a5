/* SPDX-License-Identifier: Apache-2.0
 *
 * find.c: the bare lookup that tests/bench/collision.lua compares maps with: a hash table of pairs (id, row), half of
 * it free, linear probing, about one cache line an id, asked for ahead of time. Nothing is counted, and nothing
 * learned.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define API __attribute__((visibility("default")))

typedef struct pair {
    int64_t id, row;
} pair;

typedef struct table {
    pair *pairs;
    uint64_t slots;
} table;

static uint64_t home(const table *t, int64_t id)
{
    uint64_t h = (uint64_t)id;
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
    return (uint64_t)(((unsigned __int128)(h ^ h >> 33) * t->slots) >> 64);
}

/** A table of ids[n]; rows are their places. NULL: no memory. */
API table *find_open(const int64_t *ids, int64_t n)
{
    table *t = malloc(sizeof *t);
    if (!t) return NULL;
    t->slots = 2 * (uint64_t)n;
    size_t bytes = (t->slots * sizeof(pair) + (1 << 21)) >> 21 << 21;
    t->pairs = aligned_alloc(1 << 21, bytes);
    if (!t->pairs) {
        free(t);
        return NULL;
    }
    madvise(t->pairs, bytes, MADV_HUGEPAGE);
    for (uint64_t s = 0; s < t->slots; s++) t->pairs[s] = (pair){0, -1};
    for (int64_t i = 0; i < n; i++) {
        uint64_t s = home(t, ids[i]);
        while (t->pairs[s].row >= 0) s = s + 1 < t->slots ? s + 1 : 0;
        t->pairs[s] = (pair){ids[i], i};
    }
    return t;
}

API void find_close(table *t)
{
    if (t) free(t->pairs);
    free(t);
}

typedef struct part {
    const table *t;
    const int64_t *ids;
    int64_t *rows, begin, end, ahead;
} part;

static void *find_part(void *arg)
{
    enum { RING = 64 };
    const part *p = arg;
    uint64_t at[RING];
    for (int64_t i = p->begin; i < p->end && i < p->begin + p->ahead; i++) {
        at[i % RING] = home(p->t, p->ids[i]);
        __builtin_prefetch(&p->t->pairs[at[i % RING]]);
    }
    for (int64_t i = p->begin; i < p->end; i++) {
        uint64_t s = p->ahead ? at[i % RING] : home(p->t, p->ids[i]);
        int64_t next = i + p->ahead;
        if (p->ahead && next < p->end) {
            at[next % RING] = home(p->t, p->ids[next]);
            __builtin_prefetch(&p->t->pairs[at[next % RING]]);
        }
        while (p->t->pairs[s].id != p->ids[i] && p->t->pairs[s].row >= 0) s = s + 1 < p->t->slots ? s + 1 : 0;
        p->rows[i] = p->t->pairs[s].row;
    }
    return NULL;
}

/** Nanoseconds of looking up ids[n], @ahead (to 64, or 0) of them asked for, by @threads (to 64). */
API int64_t find_run(const table *t, const int64_t *ids, int64_t n, int64_t *rows, int32_t threads, int32_t ahead)
{
    struct timespec from, to;
    pthread_t thread[64];
    part parts[64];
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int32_t k = 0; k < threads; k++) {
        parts[k] = (part){t, ids, rows, n * k / threads, n * (k + 1) / threads, ahead};
        if (k > 0 && pthread_create(&thread[k], NULL, find_part, &parts[k])) abort();
    }
    find_part(&parts[0]);
    for (int32_t k = 1; k < threads; k++) pthread_join(thread[k], NULL);
    clock_gettime(CLOCK_MONOTONIC, &to);
    return (to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
}
