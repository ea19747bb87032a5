/* SPDX-License-Identifier: Apache-2.0
 *
 * alloc.c: the one door to the heap, live-byte accounting, fault points.
 */
#include "base_internal.h"
#include "fault.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static void *(*heap_alloc)(size_t) = malloc;
static void *(*heap_realloc)(void *, size_t) = realloc;
static void (*heap_free)(void *) = free;

/* The program's own functions, and the calls of them. */
static struct {
    void *(*alloc)(size_t);
    void *(*resize)(void *, size_t);
    void (*release)(void *);
} own;

static void *own_alloc(size_t size)
{
    void *p = NULL;
    PERI__AT_BORDER("peri_host_allocator_set", p = own.alloc(size));
    return p;
}

static void *own_resize(void *old, size_t size)
{
    void *p = NULL;
    PERI__AT_BORDER("peri_host_allocator_set", p = own.resize(old, size));
    return p;
}

static void own_release(void *p) { PERI__AT_BORDER("peri_host_allocator_set", own.release(p)); }

/** What travels in front of each block, so that accounting works under any allocator; 16 bytes keep the alignment. */
typedef struct front {
    size_t size;  /* of the block */
    size_t pages; /* bytes that were mapped for it; 0: it lies in the heap */
} front;
enum { HEADER = sizeof(front), PAGES_LEAST = 1 << 18 };
_Static_assert(HEADER == 16, "blocks are aligned to 16 bytes");

static inline front *header_of_block(void *block) { return (front *)((char *)block - HEADER); }

/** A count of the whole process is the sum of two. A locked addition costs as much as ten plain ones, and a small
 *  tensor takes some twenty of them; so the first thread that counts has a part of its own, which it writes with plain
 *  loads and stores. All other threads share the second part, and lock. */
typedef struct count {
    atomic_int_least64_t first, others;
} count;

enum { LIVE, OBJECTS, BLOCKS, TAKEN, COUNTS }; /* TAKEN: what peri_mem_debt is about, of all time */
static count counts[COUNTS];
static atomic_int_least64_t peak, asked; /* asked: of TAKEN, when peri_mem_debt was called last */

/** Whether the calling thread is the first one that counted. */
static inline bool is_first(void)
{
    enum { UNKNOWN, FIRST, OTHER };
    static atomic_bool known;
    static _Thread_local int8_t which;
    if (which == UNKNOWN) which = atomic_exchange(&known, true) ? OTHER : FIRST;
    return which == FIRST;
}

static int64_t count_total(count *c)
{
    return atomic_load_explicit(&c->first, memory_order_relaxed) +
        atomic_load_explicit(&c->others, memory_order_relaxed);
}

/** Add @n, and return the sum as this thread sees it. */
static inline int64_t add(count *c, int64_t n)
{
    if (!is_first())
        return atomic_fetch_add_explicit(&c->others, n, memory_order_relaxed) + n +
            atomic_load_explicit(&c->first, memory_order_relaxed);
    const int64_t now = atomic_load_explicit(&c->first, memory_order_relaxed) + n;
    atomic_store_explicit(&c->first, now, memory_order_relaxed);
    return now + atomic_load_explicit(&c->others, memory_order_relaxed);
}

/** Count bytes. Two threads that add at once may not see what the other has added; so the peak is looked at before
 *  bytes go, too. */
static inline void count_bytes(int64_t bytes)
{
    const int64_t now = add(&counts[LIVE], bytes), most = bytes < 0 ? now - bytes : now;
    int64_t high = atomic_load_explicit(&peak, memory_order_relaxed);
    while (most > high &&
           !atomic_compare_exchange_weak_explicit(&peak, &high, most, memory_order_relaxed, memory_order_relaxed)) {
    }
}

peri_status peri__allocator_set(void *(*alloc)(size_t), void *(*resize)(void *, size_t), void (*release)(void *))
{
    if (!alloc || !resize || !release)
        return peri__fail(PERI_EINVAL, "peri_host_allocator_set: all three functions are needed");
    const int64_t blocks = count_total(&counts[BLOCKS]);
    if (blocks > 0)
        return peri__fail(PERI_EINVAL,
                          "peri_host_allocator_set: %lld blocks are already allocated; call it before anything else",
                          (long long)blocks);
    own.alloc = alloc;
    own.resize = resize;
    own.release = release;
    heap_alloc = own_alloc;
    heap_realloc = own_resize;
    heap_free = own_release;
    return PERI_OK;
}

/** No memory for @size bytes in @func, perhaps because a function of the program's calls the library. */
static void *no_memory(const char *func, size_t size)
{
    if (!peri__border_refuses(func)) peri__fail(PERI_ENOMEM, "%s: no memory for %zu bytes", func, size);
    return NULL;
}

static bool allocation_refused(size_t size)
{
    return peri__fault(PERI_FAULT_alloc) || size > SIZE_MAX / 2 || peri__at_border();
}

/** A block of @size bytes that begins at @f, which is new; @pages: bytes that were mapped for it. */
static void *new_block(front *f, size_t size, size_t pages)
{
    *f = (front){size, pages};
    (void)add(&counts[BLOCKS], 1);
    count_bytes((int64_t)size);
    return (char *)f + HEADER;
}

void *peri__alloc(size_t size)
{
    front *f = allocation_refused(size) ? NULL : heap_alloc(size + HEADER);
    return f ? new_block(f, size, 0) : no_memory("peri__alloc", size);
}

void *peri__alloc_zero(size_t size)
{
    void *p = peri__alloc(size);
    return p ? memset(p, 0, size) : NULL;
}

/** Bytes of pages for a block of @size bytes. */
static size_t pages_for(size_t size) { return (size + HEADER + 4095) & ~(size_t)4095; }

static front *mmap_result(void *p) { return p == MAP_FAILED ? NULL : p; }

void *peri__realloc(void *old, size_t size)
{
    if (!old) return peri__alloc(size);
    const front before = *header_of_block(old);
    const size_t pages = before.pages ? pages_for(size) : 0;
    front *f = NULL;
    if (!allocation_refused(size))
        f = pages ? mmap_result(mremap(header_of_block(old), before.pages, pages, MREMAP_MAYMOVE))
                  : heap_realloc(header_of_block(old), size + HEADER);
    if (!f) return no_memory("peri__realloc", size);
    *f = (front){size, pages};
    count_bytes((int64_t)size - (int64_t)before.size);
    return (char *)f + HEADER;
}

void *peri__realloc_pages(void *old, size_t size)
{
    if (size < PAGES_LEAST || own.alloc || (old && header_of_block(old)->pages)) return peri__realloc(old, size);
    const size_t pages = pages_for(size);
    front *f = allocation_refused(size)
                   ? NULL
                   : mmap_result(mmap(NULL, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (!f) return no_memory("peri__realloc_pages", size);
    char *p = new_block(f, size, pages);
    if (old) memcpy(p, old, peri__min(size, header_of_block(old)->size));
    peri__free(old);
    return p;
}

void peri__free(void *p)
{
    if (!p) return;
    int saved = errno;
    front *f = header_of_block(p);
    (void)add(&counts[BLOCKS], -1);
    count_bytes(-(int64_t)f->size);
    if (f->pages) munmap(f, f->pages);
    else heap_free(f);
    errno = saved;
}

char *peri__strdup(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = peri__alloc(n);
    return copy ? memcpy(copy, text, n) : NULL;
}

void peri__mem_count(int64_t bytes)
{
    count_bytes(bytes);
    if (bytes > 0) (void)add(&counts[TAKEN], bytes);
}

void peri__object_count(int64_t delta) { (void)add(&counts[OBJECTS], delta); }

int64_t peri_mem_live(void) { return count_total(&counts[LIVE]); }
int64_t peri_mem_peak(void)
{
    const int64_t high = atomic_load_explicit(&peak, memory_order_relaxed), now = peri_mem_live();
    return peri__max(high, now);
}
int64_t peri_mem_objects(void) { return count_total(&counts[OBJECTS]); }

int64_t peri_mem_debt(void)
{
    int64_t before = atomic_load(&asked), now;
    do now = count_total(&counts[TAKEN]);
    while (!atomic_compare_exchange_weak(&asked, &before, now));
    return now - before;
}

/* -- fault points -------------------------------------------------------------------------------------------------- */

static struct {
    const char *name;
    atomic_int_least64_t left, passed;
} faults[PERI_FAULT_COUNT] = {
#define FAULT(id, text) [PERI_FAULT_##id] = {.name = #id},
#include "fault.def"
#undef FAULT
};

/** Set once any point was ever armed: the common path is one relaxed load. */
static atomic_bool faults_used;

bool peri__fault(int32_t point)
{
    if (!atomic_load_explicit(&faults_used, memory_order_relaxed)) return false;
    atomic_fetch_add(&faults[point].passed, 1);
    return atomic_load(&faults[point].left) > 0 && atomic_fetch_sub(&faults[point].left, 1) == 1;
}

peri_status peri_fault_arm(const char *name, int64_t k)
{
    PERI_NEED(name);
    for (int i = 0; i < PERI_FAULT_COUNT; i++) {
        if (strcmp(name, faults[i].name) != 0) continue;
        if (k < 0)
            return peri__fail(PERI_EINVAL, "peri_fault_arm: k = %lld, allowed: 0 (disarm) or more", (long long)k);
        atomic_store(&faults[i].passed, 0);
        atomic_store(&faults[i].left, k);
        atomic_store(&faults_used, true);
        return PERI_OK;
    }
    char known[256] = "";
    for (int i = 0; i < PERI_FAULT_COUNT; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, " %s", faults[i].name);
    }
    return peri__fail(PERI_ENOTFOUND, "peri_fault_arm: no fault point '%s'; known:%s", name, known);
}

int64_t peri_fault_passed(const char *name)
{
    for (int i = 0; i < PERI_FAULT_COUNT; i++)
        if (name && !strcmp(name, faults[i].name)) return atomic_load(&faults[i].passed);
    return -1;
}
