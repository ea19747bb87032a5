/* SPDX-License-Identifier: Apache-2.0
 *
 * fence.c: malloc for the programs of tests/kernels: every block ends where a closed page begins, so that a kernel that touches a byte
 * behind its arrays dies there and then. The address sanitizer does not see that of masked loads and stores, nor of the compiler's own
 * choice among instructions (a masked vextractf32x4 touches what is masked out).
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#pragma GCC visibility push(default)

enum { PAGE = 4096, MARK = 0x66656e63 };

typedef struct head {
    uint64_t mark;
    char *base;
    size_t mapped, bytes;
} head; /* in front of each block */

static void *fenced(size_t bytes, size_t align)
{
    if (bytes > SIZE_MAX / 2 || align > PAGE) return errno = ENOMEM, NULL;
    const size_t room = (bytes + align + sizeof(head) + PAGE - 1) / PAGE * PAGE;
    char *base = mmap(NULL, room + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || mprotect(base, room, PROT_READ | PROT_WRITE) != 0) {
        static const char text[] = "tests/harness/fence.c: no more mappings (vm.max_map_count)\n";
        (void)!write(STDERR_FILENO, text, sizeof text - 1);
        abort();
    }
    char *p = base + room - bytes;
    p -= (uintptr_t)p & (align - 1);
    memcpy(p - sizeof(head), &(head){MARK, base, room + PAGE, bytes}, sizeof(head));
    memset(p, 0xa7, bytes);
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
    if (h.mark != MARK) abort(); /* not of malloc, or written over */
    return h;
}

void *malloc(size_t bytes) { return fenced(bytes, natural(bytes)); }

void free(void *p)
{
    if (!p) return;
    const head h = head_of(p);
    munmap(h.base, h.mapped);
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
