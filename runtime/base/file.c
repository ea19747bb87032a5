/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c: files that are there whole or not at all.
 */
#include "base_internal.h"
#include "quiet.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

int peri__make_folders(const char *path, bool itself)
{
    char part[PATH_MAX];
    int why = 0;
    snprintf(part, sizeof part, "%s", path);
    for (char *c = part + 1;; c++) {
        const char at = *c;
        if (at && at != '/') continue;
        *c = 0;
        if ((at || itself) && mkdir(part, 0777) != 0 && errno != EEXIST) why = errno;
        if (!(*c = at)) return why;
    }
}

int peri__fd_of_ours(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO) return fd;
    int other = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), why = errno;
    close(fd);
    errno = why;
    return other;
}

void peri__streams_hold(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

enum { ONE_CALL = 1 << 30 }; /* the most bytes that are read or written by one call: Linux takes up to 2 GiB */

int64_t peri__read_at(int fd, void *to, int64_t bytes, int64_t at)
{
    int64_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)to + done, (size_t)peri__min(bytes - done, ONE_CALL), (off_t)(at + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = 0;
        if (n <= 0) break;
        done += n;
    }
    return done;
}

int64_t peri__write_at(int fd, const void *from, int64_t bytes, int64_t at)
{
    PERI__QUIET;
    int64_t done = 0;
    while (done < bytes) {
        const size_t left = (size_t)peri__min(bytes - done, ONE_CALL);
        ssize_t n = pwrite(fd, (const char *)from + done, left, (off_t)(at + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) break;
        done += n;
    }
    return done;
}

/** All bytes into an open file, which it closes. */
static bool put(int fd, const char *data, size_t size)
{
    PERI__QUIET;
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

/** A new file beside @path, whose path is in @fresh, with the rights of the file that is there (@mode, or 0); of
 *  another user's file those of others to write are left out, and no file becomes a program that runs as this user.
 *  Where others may make files too (/tmp), nobody has put one under its name, which cannot be guessed. Its descriptor;
 *  -1: errno says why, and there is none. */
static int make_beside(const char *path, mode_t mode, char fresh[PATH_MAX])
{
    uint64_t mark;
    if (getrandom(&mark, sizeof mark, 0) != sizeof mark) return -1;
    if (snprintf(fresh, PATH_MAX, "%s.%016llx", path, (unsigned long long)mark) >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = peri__fd_of_ours(open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (fd < 0 || !mode || fchmod(fd, mode) == 0) return fd;
    int why = errno;
    close(fd);
    unlink(fresh);
    errno = why;
    return -1;
}

/** Beside @path, then under its name. No @data: only whether it can be made. */
static bool replace(const char *path, const void *data, size_t size, mode_t mode)
{
    char fresh[PATH_MAX];
    int fd = make_beside(path, mode, fresh);
    if (fd < 0) return false;
    bool ok = put(fd, data, size);
    if (ok && data && rename(fresh, path) == 0) return true;
    int why = errno;
    unlink(fresh);
    errno = why;
    return ok && !data;
}

/** A pipe, a terminal, a device; not a file that has come to its place meanwhile. */
static int open_special(const char *path)
{
    struct stat info;
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || (fstat(fd, &info) == 0 && !S_ISREG(info.st_mode))) return fd;
    close(fd);
    errno = EAGAIN;
    return -1;
}

/** The folder that @path lies in; @length: bytes of @path before its name. */
static void folder_of(const char *path, char folder[PATH_MAX], size_t *length)
{
    const char *slash = strrchr(path, '/');
    *length = slash ? (size_t)(slash - path) + 1 : 0;
    snprintf(folder, PATH_MAX, "%.*s", slash ? (int)*length : 1, slash ? path : ".");
}

/** Is @link another user's link, in a folder in which everybody may make files? It is not followed: that user would
 *  choose what is written. Kernels do the same, if they are told to (fs.protected_symlinks). */
static bool planted(const struct stat *link, const char *folder)
{
    struct stat f;
    bool shared = stat(folder, &f) == 0 && (f.st_mode & S_ISVTX) && (f.st_mode & S_IWOTH);
    return shared && link->st_uid != geteuid() && link->st_uid != f.st_uid;
}

bool peri__file_planted(const char *path)
{
    char folder[PATH_MAX];
    struct stat info;
    size_t length;
    folder_of(path, folder, &length);
    return lstat(path, &info) == 0 && planted(&info, folder);
}

/** What writing to @path changes: it, or what it is a link to; the link stays. NULL, or why not. */
static const char *follow(const char *path, char target[PATH_MAX])
{
    char folder[PATH_MAX], to[PATH_MAX];
    struct stat info;
    if (snprintf(target, PATH_MAX, "%s", path) >= PATH_MAX) return strerror(ENAMETOOLONG);
    for (int hops = 0; hops < 40; hops++) {
        size_t length;
        if (lstat(target, &info) != 0 || !S_ISLNK(info.st_mode)) return NULL;
        folder_of(target, folder, &length);
        if (planted(&info, folder))
            return "a link of another user's, in a folder in which everybody may make files: it is not followed";
        ssize_t n = readlink(target, to, sizeof to - 1);
        if (n < 0) return strerror(errno);
        to[n] = 0;
        if (to[0] == '/') length = 0;
        if (length + (size_t)n >= PATH_MAX) return strerror(ENAMETOOLONG);
        memcpy(target + length, to, (size_t)n + 1);
    }
    return strerror(ELOOP);
}

/** The rights of a file that the one in its place keeps. */
static mode_t kept_rights(const struct stat *there) { return there->st_uid == geteuid() ? 0777 : 0755; }

/** Where what is written to @path goes. */
typedef struct place {
    char target[PATH_MAX];
    mode_t mode;  /* rights of the file that is there; 0: there is none */
    bool special; /* a pipe, a terminal, a device */
} place;

/** Find it; what cannot be written to is refused with the system's words, after the name @function. */
static peri_status find_place(const char *path, const char *function, place *out)
{
    struct stat there;
    if (!*path) return peri__fail(PERI_EINVAL, "%s: the name of the file is empty", function);
    const char *refused = follow(path, out->target);
    const bool known = !refused && stat(path, &there) == 0;
    out->special = known && !S_ISREG(there.st_mode);
    out->mode = known ? there.st_mode & kept_rights(&there) : 0;
    if (known && S_ISDIR(there.st_mode)) refused = strerror(EISDIR);
    else if (known && !out->special && access(out->target, W_OK) != 0) refused = strerror(errno);
    return refused ? peri__fail(PERI_EIO, "%s: %s: %s", function, path, refused) : PERI_OK;
}

peri_status peri_file_write(const char *path, const void *data, int64_t size, bool folders)
{
    place at;
    PERI_NEED(path);
    if (size < 0) return peri__fail(PERI_EINVAL, "peri_file_write: %lld bytes, allowed: 0 or more", (long long)size);
    if (!data) size = 0;
    if (folders && *path) peri__make_folders(path, false);
    PERI_TRY(find_place(path, __func__, &at));
    const bool ok = at.special ? !data || put(open_special(path), data, (size_t)size)
                               : replace(at.target, data, (size_t)size, at.mode);
    return ok ? PERI_OK : peri__fail(PERI_EIO, "peri_file_write: %s: %s", path, strerror(errno));
}

peri_status peri_file_begin(const char *path, char fresh[PERI_PATH_MOST])
{
    place at;
    PERI_NEED(path);
    PERI_NEED(fresh);
    PERI_TRY(find_place(path, __func__, &at));
    if (at.special) return snprintf(fresh, PERI_PATH_MOST, "%s", path), PERI_OK;
    int fd = make_beside(at.target, at.mode, fresh);
    if (fd < 0) return peri__fail(PERI_EIO, "peri_file_begin: %s: %s", path, strerror(errno));
    close(fd);
    return PERI_OK;
}

peri_status peri_file_end(const char *path, const char *fresh)
{
    place at;
    PERI_NEED(path);
    PERI_NEED(fresh);
    peri_status status = find_place(path, __func__, &at);
    if (strcmp(path, fresh) == 0) return status;
    int fd = status < 0 ? -1 : open(fresh, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (status >= 0 && (fd < 0 || fsync(fd) != 0 || rename(fresh, at.target) != 0))
        status = peri__fail(PERI_EIO, "peri_file_end: %s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    if (status < 0) unlink(fresh);
    return status;
}
