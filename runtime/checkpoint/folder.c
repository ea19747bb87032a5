/* SPDX-License-Identifier: Apache-2.0
 *
 * folder.c: the folder in which a save collects its files, ".NAME.saving-0123456789abcdef" beside what it will be.
 * Whoever makes it holds a lock on it, so that others can tell a save that goes on from what a dead one has left.
 */
#include "files.h"
#include "manifest.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SAVING ".saving-"
enum { DIGITS = 16 };

struct peri_checkpoint_folder {
    char *path;
    int fd; /* the folder, open and locked, where the file system has locks */
    int32_t forks; /* peri__forks of the process that saves into it */
};

bool peri__is_saving(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n = strlen(name), tail = sizeof SAVING - 1 + DIGITS;
    return *name == '.' && n > tail && memcmp(name + n - tail, SAVING, sizeof SAVING - 1) == 0 &&
           strspn(name + n - DIGITS, "0123456789abcdef") == DIGITS;
}

/** Whether @end is the end of @name, and not all of it. */
static bool ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), more = strlen(end);
    return n > more && strcmp(name + n - more, end) == 0;
}

bool peri__is_saved(const char *name)
{
    return strcmp(name, PERI__MANIFEST) == 0 || strcmp(name, PERI__MANIFEST ".new") == 0 ||
           ends_with(name, ".safetensors") || ends_with(name, PERI__PART);
}

/** Remove a save's folder and its files; what it does not know stays, and the folder with it. */
static void remove_saving(const char *path)
{
    char file[PATH_MAX];
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        if (peri__is_saved(e->d_name) && snprintf(file, sizeof file, "%s/%s", path, e->d_name) < (int)sizeof file)
            unlink(file);
    if (d) closedir(d);
    rmdir(path);
}

peri_status peri__saving_name(const char *path, char *out)
{
    uint64_t number;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        return peri__fail(PERI_EIO, "checkpoint: no random number: %s", strerror(errno));
    if (snprintf(out, PATH_MAX, "%.*s.%s" SAVING "%016llx", (int)(name - path), path, name,
                 (unsigned long long)number) >= PATH_MAX)
        return peri__fail(PERI_EINVAL, "checkpoint: '%.200s' is too long a name", path);
    return PERI_OK;
}

/** Lock a folder; -1: somebody has it, or the file system has no such locks. */
static int lock_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    close(fd);
    return -1;
}

void peri__saving_remove(const char *path)
{
    int lock = lock_folder(path);
    if (lock < 0) return;
    remove_saving(path);
    close(lock);
}

void peri__parent_of(const char *path, char *out)
{
    const char *slash = strrchr(path, '/');
    if (!slash) snprintf(out, PATH_MAX, ".");
    else snprintf(out, PATH_MAX, "%.*s", (int)peri__max(slash - path, 1), path);
}

peri_status peri__names_lock(const char *path, int *lock)
{
    char parent[PATH_MAX];
    const int64_t deadline = peri__late_deadline();
    peri__parent_of(path, parent);
    *lock = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int why = errno;
    if (*lock < 0)
        return peri__fail(peri__status_of_errno(why), "checkpoint: folder '%.300s': %s", parent, strerror(why));
    while (flock(*lock, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
        if (peri__look_again(deadline, 5)) continue;
        close(*lock);
        return peri__fail(PERI_EPEER,
                          "checkpoint: '%.200s': another process has had folder '%.200s' locked for %.0f s: it is "
                          "saving or removing a checkpoint there, and is stopped or waits for the disk",
                          path, parent, PERI__LATE_SECONDS);
    }
    return PERI_OK;
}

/** Lock a save's folder that nobody needs any more; -1: somebody does. One with a manifest is a whole checkpoint that
 *  was replaced or removed, and whoever still reads it has it locked. One without may be a save that is not locked yet:
 *  it has a minute. One of a later time than now is of before a clock was set back. */
static int lock_left(const char *path)
{
    struct stat s;
    const int lock = lock_folder(path);
    if (lock < 0) return -1;
    const bool whole = faccessat(lock, PERI__MANIFEST, F_OK, 0) == 0;
    if (whole || (fstat(lock, &s) == 0 && llabs((long long)time(NULL) - s.st_mtime) > 60)) return lock;
    close(lock);
    return -1;
}

/** Remove what others have left in @parent: saves whose process is gone, and checkpoints that were replaced or removed
 *  while somebody read them. Not looked at while another process gives or takes a name, which may give the replaced one
 *  its name back. */
static void sweep(const char *parent)
{
    char path[PATH_MAX];
    DIR *d = opendir(parent);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!peri__is_saving(e->d_name) || snprintf(path, sizeof path, "%s/%s", parent, e->d_name) >= (int)sizeof path)
            continue;
        if (flock(dirfd(d), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) break;
        const int lock = lock_left(path);
        flock(dirfd(d), LOCK_UN); /* removing takes long */
        if (lock < 0) continue;
        remove_saving(path);
        close(lock);
    }
    if (d) closedir(d);
}

/** Whether a folder's list of checkpoints may have @name. Saves that go on have names with '.' in front, and each line
 *  of the list is a name. */
static bool is_listed(const char *name) { return *name != '.' && !strchr(name, '\n'); }

/** Under a name that is not listed nobody would find what a checkpoint is an increment of. */
peri_status peri__checkpoint_name(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (*name && is_listed(name) && strlen(name) <= 200 && strlen(path) <= PATH_MAX - 64) return PERI_OK;
    return peri__fail(PERI_EINVAL,
                      "checkpoint: '%.200s' is no name for a checkpoint: it ends with a name of 1 to 200 bytes, no "
                      "'.' in front, no line feed in it",
                      path);
}

peri_status peri_checkpoint_folder_new(const char *path, peri_checkpoint_folder **out)
{
    char parent[PATH_MAX], fresh[PATH_MAX];
    PERI_NEED(path);
    PERI_NEED(out);
    PERI_TRY(peri__checkpoint_name(path));
    peri__parent_of(path, parent);
    const int unmade = peri__make_folders(parent, true);
    sweep(parent);
    PERI_TRY(peri__saving_name(path, fresh));
    if (mkdir(fresh, 0777) != 0) {
        int why = errno == ENOENT && unmade ? unmade : errno;
        return peri__fail(PERI_EIO, "checkpoint: making folder '%.300s': %s", fresh, strerror(why));
    }
    peri_checkpoint_folder *f = peri__alloc_zero(sizeof *f);
    if (f) f->path = peri__strdup(fresh);
    if (!f || !f->path) {
        peri__free(f);
        rmdir(fresh);
        return PERI_ENOMEM;
    }
    peri__object_count(1);
    f->fd = peri__fd_of_ours(open(fresh, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    f->forks = peri__forks();
    /* file systems without locks: nobody else can tell that this save goes on */
    if (f->fd >= 0) flock(f->fd, LOCK_EX | LOCK_NB);
    *out = f;
    return PERI_OK;
}

const char *peri_checkpoint_folder_path(const peri_checkpoint_folder *f) { return f ? f->path : ""; }

void peri_checkpoint_folder_release(peri_checkpoint_folder *f)
{
    if (!f || peri__border_refuses(__func__)) return;
    /* Once it is published, its path may be that of the checkpoint which it has replaced and which somebody reads: that
     * one stays. And a child of fork leaves what its parent writes. */
    if (f->forks == peri__forks() && peri__same_folder(f->path, f->fd)) remove_saving(f->path);
    if (f->fd >= 0) close(f->fd);
    peri__free(f->path);
    peri__free(f);
    peri__object_count(-1);
}

peri_status peri_checkpoint_folder_await(const char *path)
{
    const int64_t deadline = peri__late_deadline();
    struct stat s;
    PERI_NEED(path);
    while (stat(path, &s) != 0 || !S_ISDIR(s.st_mode)) {
        int why = errno;
        if ((why == ENOENT || why == ESTALE) && peri__look_again(deadline, 50)) continue;
        return peri__fail(
            PERI_ENOTFOUND,
            "checkpoint: folder '%.300s', which rank 0 made, is not here (%s): all hosts must share the folder "
            "of checkpoints",
            path, strerror(why));
    }
    return PERI_OK;
}

/* -- one job at a time --------------------------------------------------------------------------------------------- */

struct peri_checkpoint_lock {
    int fd;
};

peri_status peri_checkpoint_lock_new(const char *folder, peri_checkpoint_lock **out)
{
    char path[PATH_MAX], who[200] = "";
    PERI_NEED(folder);
    PERI_NEED(out);
    PERI_TRY(peri__path_join(folder, ".lock", path));
    const int unmade = peri__make_folders(folder, true);
    int fd = peri__fd_of_ours(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    int why = errno == ENOENT && unmade ? unmade : errno;
    if (fd < 0)
        return peri__fail(PERI_EIO, "checkpoint: folder '%.300s' cannot be saved into: '.lock': %s", folder,
                          strerror(why));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
        ssize_t n = pread(fd, who, sizeof who - 1, 0);
        who[n > 0 ? n : 0] = 0;
        close(fd);
        return peri__fail(PERI_EPEER,
                          "checkpoint: folder '%.300s' is saved into already (%s); stop that, or take another folder",
                          folder, who);
    }
    char host[100] = "?";
    gethostname(host, sizeof host - 1);
    int n = snprintf(who, sizeof who, "process %lld on %s", (long long)getpid(), host);
    if (ftruncate(fd, 0) != 0 || peri__write_at(fd, who, n, 0) != n) why = errno; /* words for others only */
    peri_checkpoint_lock *lock = peri__alloc_zero(sizeof *lock);
    if (!lock) {
        close(fd);
        return PERI_ENOMEM;
    }
    peri__object_count(1);
    lock->fd = fd;
    *out = lock;
    return PERI_OK;
}

bool peri_checkpoint_lock_holds(const peri_checkpoint_lock *lock, const char *folder)
{
    char path[PATH_MAX];
    struct stat named, opened;
    return lock && folder && peri__path_join(folder, ".lock", path) == PERI_OK && lstat(path, &named) == 0 &&
           fstat(lock->fd, &opened) == 0 && named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

void peri_checkpoint_lock_release(peri_checkpoint_lock *lock)
{
    if (!lock || peri__border_refuses(__func__)) return;
    close(lock->fd);
    peri__free(lock);
    peri__object_count(-1);
}

/* -- names --------------------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/** Whether entry @name of @folder is a checkpoint. One whose manifest cannot be looked for now (a disk that fails, a
 *  network) may be one: left out, it would be passed over in silence, and what it is an increment of removed. */
static bool is_checkpoint(const char *folder, const char *name)
{
    char path[PATH_MAX];
    struct stat s;
    if (!is_listed(name) ||
        snprintf(path, sizeof path, "%s/%s/%s", folder, name, PERI__MANIFEST) >= (int)sizeof path)
        return false;
    return stat(path, &s) == 0 || (errno != ENOENT && errno != ENOTDIR && errno != EACCES && errno != ELOOP);
}

/** The next entry of a folder; NULL: there is none, or, if errno is not 0, it cannot be read. */
static struct dirent *next_entry(DIR *d)
{
    errno = 0;
    return readdir(d);
}

peri_status peri_checkpoint_names(const char *folder, char **out)
{
    char **names = NULL, *text = NULL;
    int64_t n = 0, room = 0, bytes = 1;
    PERI_NEED(folder);
    PERI_NEED(out);
    DIR *d = opendir(folder);
    int why = errno;
    if (!d)
        return peri__fail(peri__status_of_errno(why), "checkpoint: folder '%.300s': %s", folder,
                          strerror(why));
    peri_status status = PERI_OK;
    while (status >= 0) {
        const struct dirent *e = next_entry(d);
        if (!e && errno) status = peri__fail(PERI_EIO, "checkpoint: folder '%.300s': %s", folder, strerror(errno));
        if (!e) break;
        if (!is_checkpoint(folder, e->d_name)) continue;
        status = peri__grow((void **)&names, &room, n + 1, sizeof *names);
        if (status >= 0 && !(names[n] = peri__strdup(e->d_name))) status = PERI_ENOMEM;
        if (status >= 0) bytes += (int64_t)strlen(names[n++]) + 1;
    }
    closedir(d);
    if (status >= 0 && !(text = peri__alloc((size_t)bytes))) status = PERI_ENOMEM;
    if (n) qsort(names, (size_t)n, sizeof *names, compare_names);
    char *at = text;
    for (int64_t i = 0; i < n; i++) {
        if (text) at += sprintf(at, "%s\n", names[i]);
        peri__free(names[i]);
    }
    if (text) *at = 0;
    peri__free(names);
    if (status >= 0) *out = text;
    return status;
}

void peri_checkpoint_names_release(char *names)
{
    if (names && !peri__border_refuses(__func__)) peri__free(names);
}
