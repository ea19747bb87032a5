/* SPDX-License-Identifier: Apache-2.0
 *
 * near_heap.c: memory that the other ranks of this machine can map, for buffers of exchanges. What comes from there or
 * goes there is read and written by loads and stores, once, where it belongs (near_copy.c); a system call would copy it
 * in between.
 *
 * The heap of a rank is one file without a name, as long as the machine has memory, most of which no page was ever made
 * for. Others open it by its process when they first meet an address in it. Blocks have the sizes of the cpu device's
 * classes, and go back to the list of their class. Free blocks keep their pages, for fresh ones cost more than most
 * copies, up to a part of the machine's memory together; where the machine has little left when a heap grows, they give
 * them up.
 *
 * A heap asks for huge pages when it grows, for ranks read each other's rows in any order. Linux gives them on demand
 * (since 6.1) also where files in memory get none by themselves, as is its default.
 */
#include "mpi_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, n) ((void)(at), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(at, n) ((void)(at), (void)(n))
#endif

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

enum {
    HEAD = 64,       /* bytes before a block's data */
    LEAST = 16 << 10, /* bytes of the smallest block: less goes in messages */
    STEPS = 4,       /* classes per doubling */
    CLASSES = 30 * STEPS,
    KEPT_PART = 8,   /* free blocks keep at most this part of the machine's memory; */
    SPARE_PART = 16, /* none, when less than this part is free */
    HUGE_PAGE = 2 << 20
};

/** A block's head. */
typedef struct block {
    struct block *next; /* of the free ones */
    int64_t bytes;      /* with the head */
    int32_t class;
    bool empty;         /* it has no pages beyond the first */
} block;

static struct {
    pthread_mutex_t lock;
    int fd;
    char *base;
    int64_t bytes, used, kept; /* of the file; up to the last block; in free blocks with pages */
    int64_t asked;             /* for huge pages, up to here */
    block *free[CLASSES];
} heap = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

/** The class of a block of @bytes, and its bytes: LEAST * 2^k * {1, 1.25, 1.5, 1.75}. */
static int32_t class_of(int64_t bytes, int64_t *rounded)
{
    int64_t base = LEAST;
    for (int32_t c = 0; c < CLASSES; c += STEPS, base *= 2)
        for (int32_t s = 0; s < STEPS; s++) {
            *rounded = base + base / STEPS * s;
            if (bytes <= *rounded) return c + s;
        }
    return CLASSES;
}

static int64_t memory_bytes(void) { return (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE); }

/** A heap of @bytes in this process, where huge pages may lie; NULL: it has no room for it. */
static char *map_heap(int fd, int64_t bytes)
{
    const size_t n = (size_t)bytes, room = n + HUGE_PAGE;
    char *start = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    const size_t before = (size_t)(-(uintptr_t)start & (HUGE_PAGE - 1));
    char *base = mmap(start + before, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
    if (before) munmap(start, before);
    munmap(start + before + n, room - before - n);
    if (base == MAP_FAILED) return NULL; /* nothing is left there, or somebody else's */
    madvise(base, n, MADV_DONTDUMP);
    madvise(base, n, MADV_HUGEPAGE);
    return base;
}

int peri__mpi_memory_file(const char *name, int64_t bytes)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur != RLIM_INFINITY && (int64_t)files.rlim_cur < bytes) {
        errno = EFBIG; /* making it longer would be a signal */
        return -1;
    }
    int fd = peri__mpi_host->own_file(memfd_create(name, MFD_CLOEXEC));
    if (fd < 0 || ftruncate(fd, bytes) == 0) return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

int peri__mpi_open_of(const peer *p, int fd)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/%lld/fd/%d", (long long)p->pid, fd);
    return peri__mpi_host->own_file(open(name, O_RDWR | O_CLOEXEC));
}

/** Whether a page that was promised is there when it is needed. Where the kernel counts what processes may use
 *  (vm.overcommit_memory = 2), a file's page is counted when it is first touched, and one that is too many is a bus
 *  error. */
static bool pages_come(void)
{
    char mode = '0';
    int fd = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return true;
    if (read(fd, &mode, 1) != 1) mode = '0';
    close(fd);
    return mode != '2';
}

void peri__mpi_heap_open(void)
{
    int64_t bytes = memory_bytes() & ~(int64_t)(HUGE_PAGE - 1);
    if (heap.fd >= 0 || !pages_come()) return;
    int fd = peri__mpi_memory_file("perilune", bytes);
    if (fd < 0) return;
    char *base = map_heap(fd, bytes);
    if (!base) {
        close(fd);
        return;
    }
    heap.fd = fd;
    heap.base = base;
    heap.bytes = bytes;
}

heap_place peri__mpi_heap_own(void)
{
    return (heap_place){(uint64_t)(uintptr_t)heap.base, (uint64_t)heap.bytes, heap.fd};
}

/** Give up the pages that are a free block's alone, but for that of its head. Pages may be larger than blocks. */
static void drop_pages(block *b)
{
    const int64_t page = sysconf(_SC_PAGESIZE), at = (char *)b - heap.base;
    const off_t first = (at + HEAD + page - 1) / page * page, end = (at + b->bytes) / page * page;
    const int how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    b->empty = b->empty || (first < end && fallocate(heap.fd, how, first, end - first) == 0);
}

/** Huge pages for the file from @from to @to, as far as nobody has asked for them yet. */
static void ask(int64_t from, int64_t to)
{
    const int64_t unit = HUGE_PAGE, end = (to + unit - 1) / unit * unit;
    const int64_t first = heap.asked > from / unit * unit ? heap.asked : from / unit * unit;
    if (first >= end) return;
    for (int64_t at = first; at < end; at += HUGE_PAGE) heap.base[at] = 0; /* where there is no page, it refuses */
    madvise(heap.base + first, (size_t)(end - first), MADV_COLLAPSE);      /* refused all the same: small pages it is */
    heap.asked = end;
}

/** A block beyond the last one, of which @bytes are wanted now; NULL: the file ends. */
static block *grow(int64_t rounded, int64_t bytes)
{
    const int64_t spare = (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (heap.bytes - heap.used < rounded) return NULL;
    for (int32_t c = 0; c < CLASSES && spare < rounded + memory_bytes() / SPARE_PART; c++)
        for (block *b = heap.free[c]; b; b = b->next) {
            if (b->empty) continue;
            drop_pages(b);
            if (b->empty) heap.kept -= b->bytes;
        }
    heap.used += rounded;
    ask(heap.used - rounded, heap.used - rounded + bytes);
    return (block *)(void *)(heap.base + heap.used - rounded);
}

void *peri__mpi_heap_lend(int64_t bytes)
{
    int64_t rounded;
    const int32_t class = bytes < LEAST ? CLASSES : class_of(bytes + HEAD, &rounded);
    if (heap.fd < 0 || !peri__mpi.near || class == CLASSES) return NULL;
    pthread_mutex_lock(&heap.lock);
    block *b = heap.free[class];
    if (b) {
        ASAN_UNPOISON_MEMORY_REGION(b, rounded);
        heap.free[class] = b->next;
        if (!b->empty) heap.kept -= rounded;
    } else {
        b = grow(rounded, bytes + HEAD);
    }
    if (b) *b = (block){.bytes = rounded, .class = class};
    pthread_mutex_unlock(&heap.lock);
    if (!b) return NULL;
    ASAN_POISON_MEMORY_REGION((char *)b + HEAD + bytes, (size_t)(rounded - HEAD - bytes));
    return (char *)b + HEAD;
}

void peri__mpi_heap_return(void *data)
{
    block *b = (block *)(void *)((char *)data - HEAD);
    pthread_mutex_lock(&heap.lock);
    if (heap.kept + b->bytes > memory_bytes() / KEPT_PART) drop_pages(b);
    if (!b->empty) heap.kept += b->bytes;
    b->next = heap.free[b->class];
    heap.free[b->class] = b;
    ASAN_POISON_MEMORY_REGION((char *)b + sizeof *b, (size_t)b->bytes - sizeof *b);
    pthread_mutex_unlock(&heap.lock);
}

/** Map the heap of a process of this machine. NULL: this rank may not. */
static char *map_of(const peer *p)
{
    int fd = peri__mpi_open_of(p, p->heap.fd);
    if (fd < 0) return NULL;
    char *base = map_heap(fd, (int64_t)p->heap.bytes);
    close(fd);
    return base;
}

char *peri__mpi_heap_at(int32_t rank, uint64_t address, uint64_t bytes)
{
    peer *p = &peri__mpi.peers[rank];
    const heap_place *h = &p->heap;
    if (address < h->base || address - h->base >= h->bytes || bytes > h->bytes - (address - h->base)) return NULL;
    if (!p->mapped && !p->unreachable) {
        p->mapped = map_of(p);
        p->unreachable = !p->mapped;
    }
    return p->mapped ? p->mapped + (address - h->base) : NULL;
}

void peri__mpi_heap_forget(peer *peers, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (peers[i].mapped) munmap(peers[i].mapped, peers[i].heap.bytes);
}
