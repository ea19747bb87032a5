/* SPDX-License-Identifier: Apache-2.0
 *
 * fence.c: malloc for the programs of tests/kernels: every block ends where a closed page begins, so that a kernel that
 * touches a byte behind its arrays dies there and then. The address sanitizer does not see that of masked loads and
 * stores, nor of the compiler's own choice among instructions (a masked vextractf32x4 touches what is masked out).
 *
 * Programs whose kernels run on a GPU call fence_open: from then on blocks lie in chunks that the GPU is told of, side
 * by side. What follows a block is looked at when it is freed.
 */
#include "fence.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#pragma GCC visibility push(default)

enum { PAGE = 4096, MARK = 0x66656e63, OPEN_MARK = 0x6f70656e, FILL = 0xa7 };

typedef struct head {
    uint64_t mark;
    char *base;
    size_t mapped, bytes;
} head; /* in front of each block */

/* -- blocks in chunks ---------------------------------------------------------------------------------------------- */

enum { CLASSES = 48, CHUNK = 32 << 20 };
static fence_share *share;
static atomic_flag busy = ATOMIC_FLAG_INIT;
static char *spare[CLASSES]; /* blocks of 2^k bytes that were freed, each holding the address of the next one */
static char *chunk, *chunk_end;

_Noreturn static void die(const char *text)
{
    (void)!write(STDERR_FILENO, "tests/harness/fence.c: ", 23);
    (void)!write(STDERR_FILENO, text, strlen(text));
    abort();
}

static void *open_block(size_t bytes, size_t align)
{
    int k = 6;
    while ((size_t)1 << k < bytes + align + sizeof(head) + 8) k++;
    const size_t room = (size_t)1 << k, fresh = room > CHUNK ? room : CHUNK;
    char *made = NULL;
    while (atomic_flag_test_and_set(&busy)) {}
    char *base = spare[k];
    if (base) {
        memcpy(&spare[k], base, sizeof spare[k]);
    } else {
        if (room > CHUNK || (size_t)(chunk_end - chunk) < room) {
            made = mmap(NULL, fresh, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (made == MAP_FAILED) die("no memory for a chunk\n");
            if (room <= CHUNK) chunk = made, chunk_end = made + fresh;
        }
        base = room > CHUNK ? made : chunk;
        if (room <= CHUNK) chunk += room;
    }
    atomic_flag_clear(&busy);
    /* it may allocate, of this very chunk */
    if (made && !share(made, fresh)) die("the GPU does not take a chunk of memory\n");
    char *p = base + sizeof(head) + (-(uintptr_t)(base + sizeof(head)) & (align - 1));
    memcpy(p - sizeof(head), &(head){OPEN_MARK, base, room, bytes}, sizeof(head));
    memset(p, FILL, (size_t)(base + room - p));
    return p;
}

static void close_block(const char *p, const head *h)
{
    int k = __builtin_ctzll(h->mapped);
    for (const char *at = p + h->bytes; at < h->base + h->mapped; at++)
        if (*(const unsigned char *)at != FILL) die("something wrote past the end of a block\n");
    while (atomic_flag_test_and_set(&busy)) {}
    memcpy(h->base, &spare[k], sizeof spare[k]);
    spare[k] = h->base;
    atomic_flag_clear(&busy);
}

void fence_open(fence_share *with) { share = with; }

/* -- blocks at closed pages ---------------------------------------------------------------------------------------- */

/** Mappings of blocks that were freed wait here for the next ones: to map, to clear and to unmap pages took half of the
 *  time of some programs. By size: 2^k pages, or 3 * 2^k / 2; at most KEPT bytes of them. */
enum { SIZES = 64, KEPT = 256 << 20 };
typedef struct mapping {
    struct mapping *next;
} mapping; /* at its begin */
static mapping *kept[SIZES];
static size_t bytes_kept;

/** The class of a block of @bytes, and how many bytes its mapping has before the closed page. */
static int class_of(size_t bytes, size_t *room)
{
    int k = 0;
    for (size_t pages = 1;; pages *= 2, k += 2) {
        if (bytes <= pages * PAGE) return *room = pages * PAGE, k;
        if (pages > 1 && bytes <= pages / 2 * 3 * PAGE) return *room = pages / 2 * 3 * PAGE, k + 1;
    }
}

static char *mapping_of(int k, size_t room)
{
    while (atomic_flag_test_and_set(&busy)) {}
    mapping *found = kept[k];
    if (found) {
        kept[k] = found->next;
        bytes_kept -= room;
    }
    atomic_flag_clear(&busy);
    if (found) return (char *)found;
    char *base = mmap(NULL, room + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || mprotect(base, room, PROT_READ | PROT_WRITE) != 0)
        die("no more mappings (vm.max_map_count)\n");
    return base;
}

/** Keep the mapping at @base; false: enough are kept. */
static bool keep(char *base, size_t room)
{
    size_t same;
    const int k = class_of(room, &same);
    while (atomic_flag_test_and_set(&busy)) {}
    const bool has_room = room == same && bytes_kept + room <= KEPT;
    if (has_room) {
        mapping *m = (mapping *)(void *)base;
        m->next = kept[k];
        kept[k] = m;
        bytes_kept += room;
    }
    atomic_flag_clear(&busy);
    return has_room;
}

static void *fenced(size_t bytes, size_t align)
{
    if (bytes > (size_t)1 << 42 || align > PAGE) return errno = ENOMEM, NULL;
    if (share) return open_block(bytes, align);
    size_t room;
    const int k = class_of(bytes + align + sizeof(head), &room);
    char *base = mapping_of(k, room);
    char *p = base + room - bytes;
    p -= (uintptr_t)p & (align - 1);
    memcpy(p - sizeof(head), &(head){MARK, base, room + PAGE, bytes}, sizeof(head));
    memset(p, FILL, bytes);
    return p;
}

/** As aligned as C asks of a block of this size: what is no multiple of 16 bytes holds nothing that wants 16. */
static size_t natural(size_t bytes)
{
    size_t align = bytes & (~bytes + 1);
    return align == 0 || align > 16 ? 16 : align;
}

static head head_of(const void *p)
{
    head h;
    memcpy(&h, (const char *)p - sizeof h, sizeof h);
    if (h.mark != MARK && h.mark != OPEN_MARK) abort(); /* not of malloc, or written over */
    return h;
}

void *malloc(size_t bytes) { return fenced(bytes, natural(bytes)); }

void free(void *p)
{
    if (!p) return;
    const head h = head_of(p);
    if (h.mark == OPEN_MARK) close_block(p, &h);
    else if (!keep(h.base, h.mapped - PAGE)) munmap(h.base, h.mapped);
}

void *calloc(size_t n, size_t size)
{
    if (size && n > SIZE_MAX / size) return errno = ENOMEM, NULL;
    void *p = fenced(n * size, natural(n * size)); /* of malloc and memset gcc would make a call of calloc */
    return p ? memset(p, 0, n * size) : NULL;
}

void *realloc(void *old, size_t bytes)
{
    void *p = malloc(bytes);
    if (!p || !old) return p;
    const size_t had = head_of(old).bytes;
    memcpy(p, old, had < bytes ? had : bytes);
    free(old);
    return p;
}

void *aligned_alloc(size_t align, size_t bytes) { return fenced(bytes, align); }
void *memalign(size_t align, size_t bytes);
void *memalign(size_t align, size_t bytes) { return fenced(bytes, align); }
int posix_memalign(void **out, size_t align, size_t bytes)
{
    *out = fenced(bytes, align);
    return *out ? 0 : ENOMEM;
}
size_t malloc_usable_size(void *p);
size_t malloc_usable_size(void *p) { return p ? head_of(p).bytes : 0; }
