/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.c: the device of the host's processors. Everything runs at once, in the calling thread and the worker pool, so
 * streams and events are empty. Matrix products are oneDNN's or OpenBLAS's. Memory is cached by size class: a training
 * step asks for the same sizes every time, and fresh pages cost more than most kernels.
 */
#include "../../kernels/kernels.h"
#include "../plugin/fault.h"
#include "../plugin/device.h"
#include "cpu_ops.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const peri_plugin_host *host;

/* -- memory -------------------------------------------------------------------------------------------------------- */

enum {
    SMALLEST = 6,              /* classes start at 2^6 bytes */
    STEPS = 4,                 /* classes per doubling */
    CLASSES = (34 - SMALLEST) * STEPS,
    HUGE = 1 << 21,
    SLAB_MOST = 1 << 15,       /* blocks up to this size are cut from slabs of SLAB bytes */
    SLAB = 1 << 20,
    LARGE = 64 << 20,          /* blocks above this size and up to LARGEST are kept too, for new ones cost their zeros
                                  (half of a step of long sequences), but not for ever: see trim */
    LARGEST = 1 << 30,
    KEPT_PART = 8,             /* all of them together: this part of the memory that the process may have; */
    FREE_PART = 4,             /* with those from HUGE on: this part */
    OLD = 16,
    HUGE_SLAB = 4 * HUGE       /* larger ones below HUGE: from these, so that they lie on huge pages too (copies between
                                  processes look up each page: 1 MiB on small ones took 1.5 times as long) */
};

/** Memory of which blocks are cut. It begins with a slab_head. */
typedef struct slab {
    char *at, *end;
} slab;

typedef struct slab_head {
    struct slab_head *next;
    int64_t bytes;
} slab_head;
enum { SLAB_HEAD = 64 }; /* blocks lie on whole cache lines */

/** A free block, threaded through its own memory. */
typedef struct block {
    struct block *next;
    int64_t missed; /* of a large one: cache.missed when it was freed */
} block;

static struct {
    pthread_mutex_t lock;
    block *free[CLASSES];
    int64_t large;  /* bytes of free blocks above LARGE; */
    int64_t mapped; /* of HUGE and more, these included: each is a mapping of its own, and can be given back */
    int64_t missed; /* large blocks that were asked for and not there */
    slab small, medium;
    slab_head *slabs;
    int64_t in_use; /* blocks that are not free, of the cache's classes */
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

/** Bytes of class @c. */
static int64_t bytes_of(int c)
{
    int64_t base = (int64_t)1 << (SMALLEST + c / STEPS);
    return (base + base / STEPS * (c % STEPS) + 63) & ~(int64_t)63;
}

/** Class of a size and the class's bytes: 2^k * {1, 1.25, 1.5, 1.75}. CLASSES: too large to cache. */
static int class_of(int64_t bytes, int64_t *rounded)
{
    int64_t base = 1 << SMALLEST;
    for (int c = 0; c < CLASSES; c += STEPS, base *= 2)
        for (int s = 0; s < STEPS; s++)
            if (bytes <= base + base / STEPS * s) {
                *rounded = bytes_of(c + s);
                return c + s;
            }
    *rounded = (bytes + HUGE - 1) & ~(int64_t)(HUGE - 1);
    return CLASSES;
}

/** Where memory comes from if the program has said so; NULL: from the system. */
static void *(*take)(size_t bytes, size_t alignment);
static void (*give)(void *p, size_t bytes);
static atomic_int_least64_t held; /* bytes that were taken and not given back */

/** peri_host_storage_set. False: something is held. */
bool peri__cpu_storage_set(void *(*take_from)(size_t bytes, size_t alignment), void (*give_to)(void *p, size_t bytes));
bool peri__cpu_storage_set(void *(*take_from)(size_t bytes, size_t alignment), void (*give_to)(void *p, size_t bytes))
{
    if (atomic_load(&held) > 0) return false;
    take = take_from;
    give = give_to;
    return true;
}

static void unmap_pages(void *p, int64_t bytes)
{
    if (give) give(p, (size_t)bytes);
    else munmap(p, (size_t)bytes);
    atomic_fetch_sub(&held, bytes);
}

static void *map_pages(int64_t bytes)
{
    int64_t extra = bytes >= HUGE ? HUGE : 0;
    if (take) return take((size_t)bytes, extra ? HUGE : 4096);
    char *p = mmap(NULL, (size_t)(bytes + extra), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (extra) { /* whole huge pages: gathers from tables are 1.1 to 1.6 times faster on them */
        char *aligned = (char *)(((uintptr_t)p + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
        if (aligned > p) munmap(p, (size_t)(aligned - p));
        if (p + extra > aligned) munmap(aligned + bytes, (size_t)(p + extra - aligned));
        madvise(aligned, (size_t)bytes, MADV_HUGEPAGE);
        p = aligned;
    }
    return p;
}

static void *map_counted(int64_t bytes)
{
    void *p = map_pages(bytes);
    if (p) atomic_fetch_add(&held, bytes);
    return p;
}

/** The address sanitizer sees overruns of blocks that come from the heap one by one. */
#if defined(__SANITIZE_ADDRESS__)
enum { PLAIN_HEAP = 1 };
#else
enum { PLAIN_HEAP = 0 };
#endif

static void give_block(int c, void *p)
{
    block *b = p;
    b->next = cache.free[c];
    if (bytes_of(c) > LARGE) b->missed = cache.missed;
    cache.free[c] = b;
}

/** Cut a block from @s, which grows by slabs of @bytes, or of this one block where there is no memory for more. What is
 *  left of the slab before becomes blocks of its own. */
static void *cut(slab *s, int64_t bytes, int64_t rounded)
{
    if (s->end - s->at < rounded) {
        char *more = map_counted(bytes);
        if (!more) more = map_counted(bytes = (SLAB_HEAD + rounded + 4095) & ~(int64_t)4095);
        if (!more) return NULL;
        for (int c = CLASSES - 1; c >= 0 && s->at; c--)
            for (; s->end - s->at >= bytes_of(c); s->at += bytes_of(c)) give_block(c, s->at);
        slab_head *head = (slab_head *)(void *)more;
        *head = (slab_head){cache.slabs, bytes};
        cache.slabs = head;
        *s = (slab){more + SLAB_HEAD, more + bytes};
    }
    s->at += rounded;
    return s->at - rounded;
}

/** A block of class @c from the cache, or from a slab if it is not large; NULL: neither has one. */
static void *from_cache(int c, int64_t rounded)
{
    void *p = cache.free[c];
    if (p) {
        cache.free[c] = cache.free[c]->next;
        if (rounded > LARGE) cache.large -= rounded;
        if (rounded >= HUGE) cache.mapped -= rounded;
    } else if (rounded < HUGE) {
        p = rounded <= SLAB_MOST ? cut(&cache.small, SLAB, rounded) : cut(&cache.medium, HUGE_SLAB, rounded);
    }
    return p;
}

/** Give large free blocks back that nobody has used while @misses others had to be made: those of a phase that is over.
 *  Steps that use the same sizes over and over miss nothing, and keep all of theirs. 0: all, and those from HUGE on. */
static void trim(int64_t misses)
{
    for (int c = CLASSES - 1; bytes_of(c) > (misses > 0 ? LARGE : HUGE - 1); c--)
        for (block **at = &cache.free[c], *b = *at; b; b = *at) {
            if (misses > 0 && cache.missed - b->missed < misses) {
                at = &b->next;
                continue;
            }
            *at = b->next;
            if (bytes_of(c) > LARGE) cache.large -= bytes_of(c);
            cache.mapped -= bytes_of(c);
            unmap_pages(b, bytes_of(c));
        }
}

/** Give back to the system what no block needs: free blocks of whole huge pages, and, if there is no other block, all
 *  slabs. */
static void give_back(void)
{
    trim(0);
    if (cache.in_use > 0) return;
    for (slab_head *head = cache.slabs, *next; head; head = next) {
        next = head->next;
        unmap_pages(head, head->bytes);
    }
    memset(cache.free, 0, sizeof cache.free);
    cache.slabs = NULL;
    cache.small = cache.medium = (slab){NULL, NULL};
}

/** Bytes of the @part-th part of the memory that the process may have. */
static int64_t part_of_memory(int64_t part)
{
    static atomic_int_least64_t all;
    if (atomic_load(&all) == 0) atomic_store(&all, peri_host_memory(NULL));
    return atomic_load(&all) / part;
}

/** Whether the machine, or the control group, which other processes use too, has little memory beside @bytes more. */
static bool scarce(int64_t bytes)
{
    int64_t available;
    (void)peri_host_memory(&available);
    return available < bytes + part_of_memory(KEPT_PART);
}

/** Memory that the cache did not have. */
static void *new_block(int64_t rounded)
{
    if (rounded < HUGE) return NULL; /* its slab could not grow */
    pthread_mutex_lock(&cache.lock);
    const bool some = cache.mapped > 0; /* free blocks of other sizes, which could be given back */
    pthread_mutex_unlock(&cache.lock);
    const int64_t misses = some && scarce(rounded) ? 0 : OLD;
    pthread_mutex_lock(&cache.lock);
    if (rounded > LARGE) cache.missed++;
    if (some) trim(misses);
    pthread_mutex_unlock(&cache.lock);
    void *p = map_counted(rounded);
    if (p) return p;
    pthread_mutex_lock(&cache.lock);
    trim(0);
    pthread_mutex_unlock(&cache.lock);
    return map_counted(rounded);
}

static void count_back(void)
{
    pthread_mutex_lock(&cache.lock);
    cache.in_use--;
    pthread_mutex_unlock(&cache.lock);
}

static peri_status cpu_alloc(void *device, void *stream, int64_t bytes, void **out)
{
    (void)device, (void)stream;
    int64_t rounded;
    int c = class_of(bytes, &rounded);
    void *p = NULL;
    if (!host->fault(PERI_FAULT_device_alloc)) {
        if (PLAIN_HEAP) {
            if (posix_memalign(&p, 64, (size_t)(bytes ? bytes : 1)) != 0) p = NULL;
        } else {
            pthread_mutex_lock(&cache.lock);
            if (c < CLASSES) p = from_cache(c, rounded);
            if (c < CLASSES) cache.in_use++;
            pthread_mutex_unlock(&cache.lock);
            if (!p) p = new_block(rounded);
            if (!p && c < CLASSES) count_back();
        }
    }
    if (!p) return PERI_HOST_FAIL(host, PERI_ENOMEM, "cpu: no memory for %lld bytes", (long long)bytes);
    *out = p;
    return PERI_OK;
}

static void cpu_free(void *device, void *stream, void *p, int64_t bytes)
{
    (void)device, (void)stream;
    int64_t rounded;
    int c = class_of(bytes, &rounded);
    if (PLAIN_HEAP) {
        free(p);
        return;
    }
    pthread_mutex_lock(&cache.lock);
    if (c < CLASSES) cache.in_use--;
    const bool large = rounded > LARGE, mapped = rounded >= HUGE;
    const bool kept = c < CLASSES && rounded <= LARGEST &&
                      (!large || cache.large + rounded <= part_of_memory(KEPT_PART)) &&
                      (!mapped || cache.mapped + rounded <= part_of_memory(FREE_PART));
    if (kept) give_block(c, p);
    if (kept && large) cache.large += rounded;
    if (kept && mapped) cache.mapped += rounded;
    pthread_mutex_unlock(&cache.lock);
    if (!kept) unmap_pages(p, rounded);
}

/* -- streams and events: nothing is ever queued -------------------------------------------------------------------- */

static char nothing;

static peri_status cpu_probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status cpu_open(int32_t *index, void **device, int32_t *caps)
{
    if (*index > 0) return PERI_HOST_FAIL(host, PERI_ENOTFOUND, "cpu: device %d, there is only device 0", *index);
    *index = -1;
    *device = &nothing;
    *caps = PERI_DEVICE_HOST_ACCESS | PERI_DEVICE_IMMEDIATE;
    return PERI_OK;
}

static peri_status cpu_trim(void *device)
{
    (void)device;
    pthread_mutex_lock(&cache.lock);
    give_back();
    pthread_mutex_unlock(&cache.lock);
    return PERI_OK;
}

static void cpu_close(void *device) { (void)cpu_trim(device); }

static peri_status cpu_new(void *device, void **out)
{
    (void)device;
    *out = &nothing;
    return PERI_OK;
}

static void cpu_delete(void *device, void *p) { (void)device, (void)p; }

static peri_status cpu_done(void *device, void *p)
{
    (void)device, (void)p;
    return PERI_OK;
}

static peri_status cpu_wait(void *device, void *a, void *b)
{
    (void)device, (void)a, (void)b;
    return PERI_OK;
}

/* -- work ---------------------------------------------------------------------------------------------------------- */

typedef struct copy_args {
    char *dst;
    const char *src;
} copy_args;

static void copy_range(void *ctx, int64_t begin, int64_t end)
{
    copy_args *c = ctx;
    memmove(c->dst + begin, c->src + begin, (size_t)(end - begin));
}

static peri_status cpu_copy(void *device, void *stream, void *dst, const void *src, int64_t bytes, int32_t kind)
{
    (void)device, (void)stream, (void)kind;
    copy_args c = {dst, src};
    host->parallel_for(bytes, 1 << 19, copy_range, &c);
    return PERI_OK;
}

typedef struct launch_args {
    peri_kernel_fn fn;
    const void *args;
} launch_args;

static void launch_range(void *ctx, int64_t begin, int64_t end)
{
    launch_args *l = ctx;
    l->fn(l->args, begin, end);
}

static peri_status cpu_launch(void *device, void *stream, int32_t kernel, const void *args, int64_t args_size,
                              int64_t n, int64_t grain)
{
    (void)device, (void)stream, (void)args_size;
    launch_args l = {peri_kernels_get()->fn[kernel], args};
    host->parallel_for(n, grain, launch_range, &l);
    return PERI_OK;
}

static bool cpu_has(void *device, int32_t work, const void *args)
{
    (void)device;
    return work >= 0 && work < PERI_WORK_COUNT && (work != PERI_OP_gemm || !args || peri__cpu_has_gemm(args));
}

static int64_t cpu_scratch(void *device, int32_t op, const void *args)
{
    (void)device;
    return peri__cpu_op_scratch(host, op, args);
}

static peri_status cpu_run(void *device, void *stream, int32_t op, const void *args, int64_t args_size, void *scratch,
                           int64_t bytes)
{
    (void)device, (void)stream, (void)args_size;
    if (op == PERI_OP_gemm) return peri__cpu_gemm(args);
    peri__cpu_op_run(host, op, args, scratch, bytes);
    return PERI_OK;
}

static const peri_device_vtab vtab = {
    .size = sizeof vtab,
    .abi = PERI_DEVICE_ABI,
    .name = "cpu",
    .work = peri_work_list,
    .probe = cpu_probe,
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .stream_new = cpu_new,
    .stream_delete = cpu_delete,
    .stream_sync = cpu_done,
    .stream_wait = cpu_wait,
    .event_new = cpu_new,
    .event_delete = cpu_delete,
    .event_record = cpu_wait,
    .event_query = cpu_done,
    .event_sync = cpu_done,
    .copy = cpu_copy,
    .launch = cpu_launch,
    .has = cpu_has,
    .scratch = cpu_scratch,
    .run = cpu_run,
    .trim = cpu_trim,
};

const peri_device_vtab *peri__cpu_entry(const peri_plugin_host *lent);
const peri_device_vtab *peri__cpu_entry(const peri_plugin_host *lent)
{
    if (host) return &vtab; /* who has the table reads it */
    host = lent;
    peri__cpu_gemm_init(lent);
    lent->fork_lock(&cache.lock);
    return &vtab;
}
