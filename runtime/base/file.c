/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c: files that are there whole or not at all.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/** The folders above @path. */
static void make_folders(const char *path)
{
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s", path);
    for (char *c = part + 1; *c; c++) {
        if (*c != '/') continue;
        *c = 0;
        mkdir(part, 0777); /* one that is there already is fine; another failure shows when the file is made */
        *c = '/';
    }
}

/** All bytes into an open file, which it closes. */
static bool put(int fd, const char *data, size_t size)
{
    bool ok = fd >= 0;
    while (ok && size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        ok = n > 0;
        if (ok) data += n, size -= (size_t)n;
    }
    int why = errno;
    bool closed = fd < 0 || close(fd) == 0;
    if (!ok) errno = why;
    return ok && closed;
}

/** Beside @path, then under its name, with the rights of the file that was there (@mode, or 0). No @data: only whether it can be made. */
static bool replace(const char *path, const void *data, size_t size, mode_t mode)
{
    char fresh[PATH_MAX];
    if (snprintf(fresh, sizeof fresh, "%s.%lld", path, (long long)getpid()) >= (int)sizeof fresh) {
        errno = ENAMETOOLONG;
        return false;
    }
    int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return false;
    bool ok = (!mode || fchmod(fd, mode) == 0) && put(fd, data, size);
    if (ok && data && rename(fresh, path) == 0) return true;
    int why = errno;
    unlink(fresh);
    errno = why;
    return ok && !data;
}

peri_status peri_file_write(const char *path, const void *data, int64_t size, bool folders)
{
    char target[PATH_MAX];
    struct stat there;
    PERI_NEED(path);
    if (size < 0) return peri__fail(PERI_EINVAL, "peri_file_write: %lld bytes, allowed: 0 or more", (long long)size);
    if (!*path) return peri__fail(PERI_EINVAL, "peri_file_write: the name of the file is empty");
    if (folders) make_folders(path);
    if (!realpath(path, target)) snprintf(target, sizeof target, "%s", path); /* a link stays; what it points at is written */
    bool known = stat(target, &there) == 0, ok;
    if (known && S_ISDIR(there.st_mode)) ok = false, errno = EISDIR;
    else if (known && !S_ISREG(there.st_mode)) ok = !data || put(open(target, O_WRONLY | O_CLOEXEC), data, (size_t)size);
    else if (known && access(target, W_OK) != 0) ok = false;
    else ok = replace(target, data, (size_t)size, known ? there.st_mode & 07777 : 0);
    return ok ? PERI_OK : peri__fail(PERI_EIO, "peri_file_write: %s: %s", path, strerror(errno));
}
