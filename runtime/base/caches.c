/* SPDX-License-Identifier: Apache-2.0
 *
 * caches.c: the caches of this process's processors, as Linux tells them, and memory that is larger, to measure on.
 */
#include "tune.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_PROCESSORS = 4096, MOST_CACHES = 512, LEVELS = 8, USUAL = 32 << 20 };
static const int64_t LARGEST_CACHE = (int64_t)1 << 40;

/** The first line of a file under the folder of processor @cpu's cache number @index. */
static bool line_of(const char *root, int32_t cpu, int32_t index, const char *name, char *text, int len)
{
    char path[512];
    snprintf(path, sizeof path, "%s/cpu%d/cache/index%d/%s", root, cpu, index, name);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    bool found = fgets(text, len, f) != NULL;
    fclose(f);
    return found;
}

/** Bytes of "32768K". */
static int64_t bytes_of(const char *text)
{
    char *unit;
    int64_t n = strtoll(text, &unit, 10);
    return *unit == 'K' ? n << 10 : *unit == 'M' ? n << 20 : *unit == 'G' ? n << 30 : n;
}

/** The cache of the last level that processor @cpu has: its bytes (0: nobody says), and a hash of the processors that
 *  share it. */
static int64_t last_of(const char *root, int32_t cpu, uint64_t *shared)
{
    char text[1024];
    int64_t bytes = 0, deepest = 0;
    for (int32_t index = 0; index < LEVELS; index++) {
        if (!line_of(root, cpu, index, "level", text, sizeof text)) continue;
        int64_t level = strtoll(text, NULL, 10);
        if (level < deepest || !line_of(root, cpu, index, "size", text, sizeof text)) continue;
        deepest = level;
        bytes = bytes_of(text);
        *shared = (uint64_t)cpu << 32; /* nobody says who shares it: it is this processor's */
        if (!line_of(root, cpu, index, "shared_cpu_list", text, sizeof text)) continue;
        *shared = 0;
        for (const char *c = text; *c; c++) *shared = *shared * 1099511628211u + (unsigned char)*c + 1;
    }
    return bytes;
}

int64_t peri__cache_bytes_of(const char *root, const bool *used, int32_t n)
{
    uint64_t known[MOST_CACHES], shared = 0;
    int32_t caches = 0;
    int64_t sum = 0;
    for (int32_t cpu = 0; cpu < n && caches < MOST_CACHES; cpu++) {
        int64_t bytes = used[cpu] ? last_of(root, cpu, &shared) : 0;
        bool counted = bytes <= 0;
        for (int32_t i = 0; i < caches && !counted; i++) counted = known[i] == shared;
        if (counted) continue;
        known[caches++] = shared;
        sum += bytes;
    }
    return sum > 0 ? sum : USUAL;
}

/** What PERI_CACHE_BYTES says; 0: it is not set, or empty; -1: it is no number of bytes. */
static int64_t bytes_asked(const char **text)
{
    char *end;
    *text = secure_getenv("PERI_CACHE_BYTES");
    if (!*text || !**text) return 0;
    long long n = strtoll(*text, &end, 10);
    return *end || n < 1 || n > LARGEST_CACHE ? -1 : n;
}

peri_status peri__caches_check(void)
{
    const char *text;
    if (bytes_asked(&text) >= 0) return PERI_OK;
    return peri__fail(PERI_EINVAL, "PERI_CACHE_BYTES is '%.40s', allowed: whole numbers 1..%lld", text,
                      (long long)LARGEST_CACHE);
}

int64_t peri_cache_bytes(void)
{
    static _Atomic int64_t found;
    int64_t bytes = atomic_load_explicit(&found, memory_order_relaxed);
    if (bytes > 0) return bytes;
    const char *text;
    bytes = bytes_asked(&text); /* what is no number fails where devices are opened */
    if (bytes > 0) {
        atomic_store_explicit(&found, bytes, memory_order_relaxed);
        return bytes;
    }
    bool used[MOST_PROCESSORS] = {false};
    cpu_set_t *set = CPU_ALLOC(MOST_PROCESSORS);
    size_t size = CPU_ALLOC_SIZE(MOST_PROCESSORS);
    bool asked = set && sched_getaffinity(0, size, set) == 0;
    for (int32_t i = 0; i < MOST_PROCESSORS; i++) used[i] = asked ? CPU_ISSET_S((size_t)i, size, set) != 0 : i == 0;
    CPU_FREE(set);
    bytes = peri__cache_bytes_of("/sys/devices/system/cpu", used, MOST_PROCESSORS);
    atomic_store_explicit(&found, bytes, memory_order_relaxed);
    return bytes;
}

int64_t peri__own_cache_bytes(void)
{
#ifdef _SC_LEVEL2_CACHE_SIZE
    static _Atomic int64_t found = -1; /* every update asks */
    int64_t bytes = atomic_load_explicit(&found, memory_order_relaxed);
    if (bytes >= 0) return bytes;
    bytes = peri__max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0);
    atomic_store_explicit(&found, bytes, memory_order_relaxed);
    return bytes;
#else
    return 0;
#endif
}

typedef struct fill {
    char *at;
    size_t bytes;
} fill;

/** peri_range_fn: 64ths [begin, end) of a block. */
static void zero_range(void *ctx, int64_t begin, int64_t end)
{
    const fill *f = ctx;
    memset(f->at + f->bytes * (size_t)begin / 64, 0, f->bytes * (size_t)end / 64 - f->bytes * (size_t)begin / 64);
}

void peri__tune_zero(char *at, size_t bytes) { peri__parallel_for(64, 1, zero_range, &(fill){at, bytes}); }

peri_status peri__tune_memory(size_t bytes, char **out)
{
    if (peri__available_memory() / 2 < (int64_t)bytes)
        return peri__fail(PERI_ENOMEM, "%zu MiB, which is more than the caches hold, are half of what is free or more",
                          bytes >> 20);
    void *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return peri__fail(PERI_ENOMEM, "no memory for %zu bytes", bytes);
    madvise(block, bytes, MADV_HUGEPAGE);
    peri__tune_zero(block, bytes);
    *out = block;
    return PERI_OK;
}

void peri__tune_memory_free(char *memory, size_t bytes)
{
    if (memory) munmap(memory, bytes);
}
