/* SPDX-License-Identifier: Apache-2.0
 *
 * window.c: a text in memory, in a file or in a pipe, of which a part is in memory. Files are read, not mapped: a mapped file that is cut
 * short, or whose disk fails, ends the process with SIGBUS.
 */
#include "window.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Larger ones leave the cache between being read and being used: 65536 are read at 5.6 GB/s, 262144 at 1.5. */
enum { CHUNK = 1 << 16 };

void peri__window_memory(peri_window *w, const char *text, int64_t size)
{
    *w = (peri_window){.text = text, .end = size, .size = size, .fd = -1};
}

peri_status peri__window_open(peri_window *w, const char *path)
{
    struct stat info;
    *w = (peri_window){.path = path, .text = "", .fd = open(path, O_RDONLY | O_CLOEXEC)};
    bool good = w->fd >= 0 && fstat(w->fd, &info) == 0;
    if (good && S_ISDIR(info.st_mode)) {
        errno = EISDIR;
        good = false;
    }
    if (!good) return peri__fail(PERI_EIO, "peri_criteo_open: %s: %s", path, strerror(errno));
    w->pipe = !S_ISREG(info.st_mode);
    w->size = w->pipe ? INT64_MAX : (int64_t)info.st_size;
    if (!w->pipe) posix_fadvise(w->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return PERI_OK;
}

void peri__window_close(peri_window *w)
{
    if (w->fd >= 0) close(w->fd);
    peri__free(w->buffer);
    w->buffer = NULL;
    w->fd = -1;
}

void peri__window_seek(peri_window *w, int64_t at)
{
    if (w->fd >= 0 && !w->pipe && (at < w->begin || at > w->end)) w->begin = w->end = at;
}

/** Room for CHUNK more bytes; those in front of @keep may go. */
static peri_status make_room(peri_window *w, int64_t keep)
{
    if (w->capacity - (w->end - w->begin) >= CHUNK) return PERI_OK;
    if (keep > w->begin) {
        memmove(w->buffer, w->buffer + (keep - w->begin), (size_t)(w->end - keep));
        w->begin = keep;
    }
    if (w->capacity - (w->end - w->begin) >= CHUNK) return PERI_OK;
    int64_t capacity = 2 * peri__max(w->capacity, (int64_t)CHUNK);
    char *buffer = peri__realloc(w->buffer, (size_t)capacity);
    if (!buffer) return PERI_ENOMEM;
    w->text = w->buffer = buffer;
    w->capacity = capacity;
    return PERI_OK;
}

/** read or pread, again if a signal came. */
static ssize_t read_at(const peri_window *w, char *to, int64_t n, int64_t at)
{
    ssize_t got;
    do got = w->pipe ? read(w->fd, to, (size_t)n) : pread(w->fd, to, (size_t)n, at);
    while (got < 0 && errno == EINTR);
    return got;
}

/** What read_at has returned, at offset @at, is an error. */
static peri_status failed(const peri_window *w, ssize_t n, int64_t at)
{
    if (n < 0) return peri__fail(PERI_EIO, "peri_criteo_next: %s: %s", w->path, strerror(errno));
    return peri__fail(PERI_EIO, "peri_criteo_next: %s was cut short while it was read: it had %lld bytes, now %lld or fewer", w->path,
                      (long long)w->size, (long long)at);
}

peri_status peri__window_read(const peri_window *w, char *to, int64_t n, int64_t at)
{
    if (w->fd < 0) memcpy(to, w->text + at, (size_t)n);
    for (int64_t done = 0; w->fd >= 0 && done < n;) {
        ssize_t got = read_at(w, to + done, n - done, at + done);
        if (got <= 0) return failed(w, got, at + done);
        done += got;
    }
    return PERI_OK;
}

peri_status peri__window_more(peri_window *w, int64_t keep, bool *more)
{
    *more = false;
    if (w->end >= w->size) return PERI_OK;
    PERI_TRY(make_room(w, keep));
    ssize_t n = read_at(w, w->buffer + (w->end - w->begin), peri__min(CHUNK, w->size - w->end), w->end);
    if (n < 0 || (n == 0 && !w->pipe)) return failed(w, n, w->end);
    if (n == 0) w->size = w->end;
    w->end += n;
    *more = n > 0;
    return PERI_OK;
}

int64_t peri__window_line_ends(const peri_window *w, int64_t end)
{
    int64_t count = 0;
    if (w->fd < 0) {
        for (int64_t i = 0; i < end; i++) count += w->text[i] == '\n';
        return count;
    }
    char block[1 << 14];
    for (int64_t at = 0; at < end;) {
        ssize_t n = read_at(w, block, peri__min((int64_t)sizeof block, end - at), at);
        if (n <= 0) break;
        for (ssize_t i = 0; i < n; i++) count += block[i] == '\n';
        at += n;
    }
    return count;
}
