/* SPDX-License-Identifier: Apache-2.0
 *
 * files.c: see files.h.
 */
#include "files.h"
#include "../base/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

peri_status peri__path_join(const char *folder, const char *name, char *out)
{
    if (snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX) return PERI_OK;
    return peri__fail(PERI_EINVAL, "checkpoint: the name of a file in '%.200s' would be longer than %d bytes", folder,
                      PATH_MAX - 1);
}

peri_status peri__status_of_errno(int why)
{
    if (why == ENOMEM || why == EMFILE || why == ENFILE) return PERI_ENOMEM;
    return why == ENOENT || why == ENOTDIR ? PERI_ENOTFOUND : PERI_EIO;
}

static peri_status fail_errno(const char *verb, const char *path)
{
    int why = errno;
    return peri__fail(peri__status_of_errno(why), "checkpoint: %s '%.300s': %s", verb, path,
                      strerror(why));
}

peri_status peri__file_create(const char *path, int *fd)
{
    *fd = peri__fd_of_ours(open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    return *fd < 0 ? fail_errno("making", path) : PERI_OK;
}

peri_status peri__file_put(int fd, const char *path, const void *data, int64_t bytes, int64_t at)
{
    const int64_t done = peri__fault(PERI_FAULT_checkpoint_write) ? (errno = ENOSPC, 0)
                                                                  : peri__write_at(fd, data, bytes, at);
    const int why = errno;
    return done == bytes ? PERI_OK
                         : peri__fail(PERI_EIO, "checkpoint: writing '%.300s' at byte %lld: %s", path,
                                      (long long)(at + done), strerror(why));
}

peri_status peri__growing_put(void *file, const char *data, int64_t bytes)
{
    peri__growing *f = file;
    PERI_TRY(peri__file_put(f->fd, f->path, data, bytes, f->bytes));
    f->bytes += bytes;
    return PERI_OK;
}

peri_status peri__file_get(int fd, const char *path, void *out, int64_t bytes, int64_t at)
{
    const int64_t done = peri__fault(PERI_FAULT_checkpoint_read) ? (errno = EIO, 0) : peri__read_at(fd, out, bytes, at);
    const int why = errno;
    if (done == bytes) return PERI_OK;
    if (why)
        return peri__fail(peri__status_of_errno(why), "checkpoint: reading '%.300s' at byte %lld: %s", path,
                          (long long)(at + done), strerror(why));
    return peri__fail(PERI_EFORMAT, "checkpoint: file '%.300s' ends at byte %lld, wanted are %lld more", path,
                      (long long)(at + done), (long long)(bytes - done));
}

peri_status peri__file_finish(int fd, const char *path)
{
    if (peri__fault(PERI_FAULT_checkpoint_sync)) {
        close(fd);
        errno = EIO;
        return fail_errno("syncing", path);
    }
    int why = fsync(fd) == 0 ? 0 : errno;
    if (close(fd) != 0 && !why) why = errno;
    errno = why;
    return why ? fail_errno("syncing", path) : PERI_OK;
}

peri_status peri__folder_sync(const char *path)
{
    static atomic_bool told;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail_errno("opening folder", path);
    int why = peri__fault(PERI_FAULT_checkpoint_unsynced) ? EINVAL
              : peri__fault(PERI_FAULT_checkpoint_sync)   ? EIO
              : fsync(fd) == 0                            ? 0
                                                          : errno;
    close(fd);
    if (why == EINVAL || why == ENOTSUP || why == EOPNOTSUPP || why == ENOSYS) {
        if (!atomic_exchange(&told, true))
            peri__log(PERI_LOG_WARN,
                      "checkpoint: folder '%s' cannot be synced on this file system (%s): a checkpoint is whole once "
                      "it has its "
                      "name, but a power failure soon after may take the name away",
                      path, strerror(why));
        return PERI_OK;
    }
    errno = why;
    return why ? fail_errno("syncing folder", path) : PERI_OK;
}

int64_t peri__late_deadline(void) { return peri_time_ns() + (int64_t)(PERI__LATE_SECONDS * 1e9); }

bool peri__look_again(int64_t deadline, int milliseconds)
{
    const struct timespec pause = {.tv_nsec = milliseconds * 1000000L};
    if (peri_time_ns() >= deadline) return false;
    nanosleep(&pause, NULL);
    return true;
}

peri_status peri__file_await(const char *folder, const char *name, int64_t bytes)
{
    char path[PATH_MAX];
    struct stat s;
    bool there;
    const int64_t deadline = peri__late_deadline();
    PERI_TRY(peri__path_join(folder, name, path));
    do {
        struct stat of_folder;
        there = stat(path, &s) == 0;
        if (there && s.st_size == bytes) return PERI_OK;
        if (!there && errno == ENOENT && stat(folder, &of_folder) != 0 && errno == ENOENT)
            return peri__fail(PERI_ENOTFOUND,
                              "checkpoint: folder '%.300s' of this save was removed while it was written: nothing is "
                              "saved",
                              folder);
        if (!there && errno != ENOENT && errno != ESTALE) return fail_errno("looking for", path);
    } while (peri__look_again(deadline, 50));
    if (!there)
        return peri__fail(
            PERI_ENOTFOUND,
            "checkpoint: file '%.300s' is not there after %.0f s: the folder must be the same on all hosts", path,
            PERI__LATE_SECONDS);
    return peri__fail(PERI_EFORMAT, "checkpoint: file '%.300s' has %lld bytes, wanted: %lld", path,
                      (long long)s.st_size, (long long)bytes);
}

bool peri__same_folder(const char *path, int fd)
{
    struct stat named, opened;
    return fd >= 0 && lstat(path, &named) == 0 && fstat(fd, &opened) == 0 && S_ISDIR(named.st_mode) &&
           named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

peri_status peri__file_open(int folder, const char *name, const char *path, int64_t most, int *fd, int64_t *bytes)
{
    struct stat s;
    *fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (*fd < 0) return fail_errno("opening", path);
    peri_status status = PERI_OK;
    if (fstat(*fd, &s) != 0) status = fail_errno("opening", path);
    else if (!S_ISREG(s.st_mode)) status = peri__fail(PERI_EFORMAT, "checkpoint: '%.300s' is no regular file", path);
    else if (s.st_size > most)
        status = peri__fail(PERI_EFORMAT, "checkpoint: '%.300s' has %lld bytes, allowed: %lld", path,
                            (long long)s.st_size, (long long)most);
    if (status < 0) close(*fd);
    else *bytes = s.st_size;
    return status;
}

bool peri__saver_name(const char *path, int64_t *number, int64_t *step)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    long long n, s;
    int end = -1;
    if (sscanf(name, "save-%18lld-step-%18lld%n", &n, &s, &end) != 2 || end < 0 || name[end] || n < 0) return false;
    *number = n;
    *step = s;
    return true;
}
