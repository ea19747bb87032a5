/* SPDX-License-Identifier: Apache-2.0
 *
 * lost_pages.c: loaded before the C library, it makes pages of mapped files named *.peri unreadable, as a disk or a
 * network does: who touches one gets SIGBUS. `lost_page` is the page of files that are mapped from now on (-1: none);
 * the file that the variable LOST_PAGE names says it for programs that have no Lua in them. lose_now(page, i) takes a
 * page of the mapping number i of those that there are; page_bytes() says how large pages are.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST = 64 };
static char *mapped[MOST];
long lost_page = -1;

/** 4 KiB, or (ARM) 64. */
long page_bytes(void) { return sysconf(_SC_PAGESIZE); }

/** Lose page number @page of the file that is mapped at @data. */
static void lose(char *data, long page)
{
    static int empty = -1; /* a file of no bytes: a page of it is behind its end */
    const long bytes = page_bytes();
    if (empty < 0) empty = memfd_create("empty", 0);
    syscall(SYS_mmap, data + bytes * page, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, empty, 0);
}

void lose_now(long page, int which)
{
    for (int i = 0; i < MOST; i++)
        if (mapped[i] && which-- == 0) lose(mapped[i], page);
}

static long wanted(void)
{
    const char *path = getenv("LOST_PAGE");
    long page = -1;
    if (!path) return lost_page;
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%ld", &page) != 1) page = -1;
    if (f) fclose(f);
    return page;
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    char link[64], path[4096];
    char *data = (char *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
    if (data == MAP_FAILED || fd < 0) return data;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof path);
    if (n < 5 || memcmp(path + n - 5, ".peri", 5) != 0) return data;
    int i = 0;
    while (i < MOST - 1 && mapped[i]) i++;
    mapped[i] = data;
    const long page = wanted();
    if (page >= 0) lose(data, page);
    return data;
}

int munmap(void *at, size_t bytes)
{
    for (int i = 0; i < MOST; i++)
        if (mapped[i] == at) mapped[i] = NULL;
    return (int)syscall(SYS_munmap, at, bytes);
}
