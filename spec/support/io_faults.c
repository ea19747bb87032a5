/* SPDX-License-Identifier: Apache-2.0
 *
 * io_faults.c: loaded before the C library, it lets a call on files fail, as a disk or a network does. Of the calls
 * below whose path begins with `under`, number `n` from io_faults_arm on fails with errno `how` (the first is 1; 0:
 * none does); if `how` is 0 it reads or writes half of the bytes, which is no failure; if it is -1 only calls
 * that change names count, and the shell command of io_faults_command is run before call `n`, which goes on.
 * io_faults_arm returns how many such calls there were since it was called last.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char under[PATH_MAX], command[2 * PATH_MAX];
static atomic_long seen, failing;
static int how;

long io_faults_arm(const char *path, long n, int error)
{
    const long before = atomic_exchange(&seen, 0);
    snprintf(under, sizeof under, "%s", path);
    how = error;
    atomic_store(&failing, n);
    return before;
}

void io_faults_command(const char *text) { snprintf(command, sizeof command, "%s", text); }

/** Whether it is the turn of a call on @path. */
static int is_turn(const char *path)
{
    return under[0] && strncmp(path, under, strlen(under)) == 0 &&
           atomic_fetch_add(&seen, 1) + 1 == atomic_load(&failing);
}

static const char *path_of(int fd, char path[PATH_MAX])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return path;
}

/** Before a call that gives or takes a name. */
static void changes(const char *path)
{
    if (how < 0 && is_turn(path) && system(command)) abort();
}

static int fails(const char *path)
{
    if (how < 0) return 0;
    if (!is_turn(path) || !how) return 0;
    errno = how;
    return 1;
}

static int fails_open(int fd)
{
    char path[PATH_MAX];
    return fails(path_of(fd, path));
}

static void changes_in(int fd)
{
    char path[PATH_MAX];
    changes(path_of(fd, path));
}

/** How many of @n bytes are read or written; -1: the call fails. */
static ssize_t some(int fd, size_t n)
{
    char path[PATH_MAX];
    if (how < 0 || !is_turn(path_of(fd, path))) return (ssize_t)n;
    errno = how;
    return how ? -1 : (ssize_t)(n >= 8192 ? n / 8192 * 4096 : n > 1 ? n / 2 : n); /* whole pages, past the cache */
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
CALL(int, open, (const char *path, int flags, mode_t mode), fails(path), -1, path, flags, mode)
CALL(int, openat, (int fd, const char *path, int flags, mode_t mode), fails_open(fd), -1, fd, path, flags, mode)
CALL(int, mkdir, (const char *path, mode_t mode), (changes(path), fails(path)), -1, path, mode)
CALL(int, rmdir, (const char *path), (changes(path), fails(path)), -1, path)
CALL(int, access, (const char *path, int mode), fails(path), -1, path, mode)
CALL(int, faccessat, (int fd, const char *path, int mode, int flags), fails_open(fd), -1, fd, path, mode, flags)
CALL(int, stat, (const char *path, struct stat *out), fails(path), -1, path, out)
CALL(int, lstat, (const char *path, struct stat *out), fails(path), -1, path, out)
CALL(int, fstat, (int fd, struct stat *out), fails_open(fd), -1, fd, out)
CALL(int, fstatat, (int fd, const char *path, struct stat *out, int flags), fails_open(fd), -1, fd, path, out, flags)
CALL(int, fsync, (int fd), fails_open(fd), -1, fd)
CALL(int, fallocate, (int fd, int mode, off_t at, off_t n), fails_open(fd), -1, fd, mode, at, n)
CALL(int, unlink, (const char *path), (changes(path), fails(path)), -1, path)
CALL(int, unlinkat, (int fd, const char *name, int flags), (changes_in(fd), fails_open(fd)), -1, fd, name, flags)
CALL(int, rename, (const char *from, const char *to), (changes(from), fails(from)), -1, from, to)
CALL(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), (changes(from), fails(from)),
     -1, a, from, b, to, flags)
CALL(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (ssize_t)(n = (size_t)some(fd, n)) < 0, -1, fd, to, n, at)
CALL(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (ssize_t)(n = (size_t)some(fd, n)) < 0, -1, fd,
     from, n, at)
