/* SPDX-License-Identifier: Apache-2.0
 *
 * io_faults.c: loaded before the C library, it lets a call on files fail with EIO, as a disk or a network does. Of the
 * calls below whose path begins with `under`, number `n` from io_faults_arm on fails (the first is 1; 0: none does).
 * io_faults_arm returns how many such calls there were since it was called last.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char under[PATH_MAX];
static atomic_long seen, failing;

long io_faults_arm(const char *path, long n)
{
    const long before = atomic_exchange(&seen, 0);
    snprintf(under, sizeof under, "%s", path);
    atomic_store(&failing, n);
    return before;
}

static int fails(const char *path)
{
    if (!under[0] || strncmp(path, under, strlen(under)) != 0) return 0;
    if (atomic_fetch_add(&seen, 1) + 1 != atomic_load(&failing)) return 0;
    errno = EIO;
    return 1;
}

static int fails_open(int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    return fails(path);
}

#define CALL(result, name, parameters, failed, bad, ...)                                                              \
    result name parameters                                                                                            \
    {                                                                                                                 \
        static __typeof__(result parameters) *next;                                                                   \
        if (!next) next = (__typeof__(result parameters) *)dlsym(RTLD_NEXT, #name);                                   \
        return failed ? bad : next(__VA_ARGS__);                                                                      \
    }
CALL(DIR *, opendir, (const char *path), fails(path), NULL, path)
CALL(struct dirent *, readdir, (DIR *d), fails_open(dirfd(d)), NULL, d)
CALL(int, mkdir, (const char *path, mode_t mode), fails(path), -1, path, mode)
CALL(int, rmdir, (const char *path), fails(path), -1, path)
CALL(int, stat, (const char *path, struct stat *out), fails(path), -1, path, out)
CALL(int, fsync, (int fd), fails_open(fd), -1, fd)
CALL(int, unlinkat, (int fd, const char *name, int flags), fails_open(fd), -1, fd, name, flags)
CALL(int, rename, (const char *from, const char *to), fails(from), -1, from, to)
CALL(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), fails(from), -1, a, from, b, to,
     flags)
