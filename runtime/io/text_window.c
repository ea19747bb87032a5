/* SPDX-License-Identifier: Apache-2.0
 *
 * text_window.c: a text of which a part is in memory. Files are read, not mapped: a mapped file that is cut short, or
 * whose disk fails, ends the process with SIGBUS.
 */
#include "text_window.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(PERI_HAVE_ZLIB)
#include <zlib.h>
#endif

/* Larger ones leave the cache between being read and being used: 65536 are read at 5.6 GB/s, 262144 at 1.5. */
enum { CHUNK = 1 << 16, MAX_HEADER = 1 << 20 };

const char *peri__file_kind(const char *p, int64_t n)
{
    static const struct {
        const char *magic;
        int64_t size;
        const char *kind;
    } kinds[] = {{"\x1f\x8b", 2, "a gzip file"},          {"PK\x03\x04", 4, "a zip archive, such as npz"},
                 {"PK\x05\x06", 4, "an empty zip archive"}, {"\x93NUMPY", 6, "an npy file"},
                 {"PAR1", 4, "a Parquet file"},           {"\x28\xb5\x2f\xfd", 4, "a zstd file"},
                 {"BZh", 3, "a bzip2 file"},              {"\xfd" "7zXZ", 5, "an xz file"},
                 {"\x89HDF", 4, "an HDF5 file"},          {"\x7f" "ELF", 4, "a program"},
                 {"\xff\xfe", 2, "a text in UTF-16"},     {"\xfe\xff", 2, "a text in UTF-16"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (n >= kinds[i].size && memcmp(p, kinds[i].magic, (size_t)kinds[i].size) == 0) return kinds[i].kind;
    if (n > 0 && memchr(p, 0, (size_t)n)) return "a binary file (it has zero bytes)";
    return NULL;
}

/* -- a file -------------------------------------------------------------------------------------------------------- */

/** An open file: a descriptor, and zlib's reader around it if it is packed. */
typedef struct opened {
    int fd;
    void *packed;
} opened;

static void close_file(opened *o)
{
#if defined(PERI_HAVE_ZLIB)
    if (o->packed) gzclose_r(o->packed); /* and the descriptor */
    else
#endif
    if (o->fd >= 0) close(o->fd);
    *o = (opened){.fd = -1};
}

static peri_status system_error(const peri_window *w, const char *path)
{
    return peri__fail(PERI_EIO, "%s: %s: %s", w->name, path, strerror(errno));
}

/** Begin to read a file at its first byte, which is packed or not. */
static peri_status open_file(const peri_window *w, const peri_window_file *f, opened *o)
{
    *o = (opened){.fd = open(f->path, O_RDONLY | O_CLOEXEC)};
    if (o->fd < 0) return system_error(w, f->path);
    if (!w->pipe) posix_fadvise(o->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
#if defined(PERI_HAVE_ZLIB)
    if (f->packed && !(o->packed = gzdopen(o->fd, "rb"))) {
        close_file(o);
        return PERI_ENOMEM;
    }
    if (o->packed) gzbuffer(o->packed, CHUNK);
#endif
    return PERI_OK;
}

/** What reading returned, @got, is an error of the system, or (0) the end of a file that was to have more. */
static peri_status failed(const peri_window *w, const peri_window_file *f, int64_t got, int64_t at)
{
    if (got < 0) return system_error(w, f->path);
    return peri__fail(PERI_EIO, "%s: %s was cut short while it was read: it had %lld bytes, now %lld or fewer", w->name,
                      f->path, (long long)(f->skip + f->bytes), (long long)at);
}

#if defined(PERI_HAVE_ZLIB)
/** Bytes of a packed file, 0 at its end. */
static peri_status read_packed(const peri_window *w, const peri_window_file *f, const opened *o, char *to, int64_t n,
                               int64_t *got)
{
    int code = Z_OK;
    *got = gzread(o->packed, to, (unsigned)n);
    const char *why = *got < n ? gzerror(o->packed, &code) : NULL;
    if (code == Z_ERRNO) return system_error(w, f->path);
    if (code == Z_MEM_ERROR) return PERI_ENOMEM;
    const char *own = why ? strstr(why, ">: ") : NULL; /* behind the name that zlib gives the file */
    if (code != Z_OK && code != Z_STREAM_END)
        return peri__fail(PERI_EFORMAT, "%s: %s: near byte %lld of the packed file: %s", w->name, f->path,
                          (long long)gzoffset(o->packed),
                          code == Z_BUF_ERROR ? "the gzip file is cut short"
                          : own               ? own + 3
                                              : why);
    return PERI_OK;
}
#endif

/** The next bytes of a file that is read in order, 0 at its end. */
static peri_status read_next(const peri_window *w, const peri_window_file *f, const opened *o, char *to, int64_t n,
                             int64_t *got)
{
#if defined(PERI_HAVE_ZLIB)
    if (o->packed) return read_packed(w, f, o, to, n, got);
#endif
    do *got = read(o->fd, to, (size_t)n);
    while (*got < 0 && errno == EINTR);
    return *got < 0 ? failed(w, f, *got, 0) : PERI_OK;
}

/** Leave the next @n bytes of a file that is read in order out; there are as many. */
static peri_status leave_out(const peri_window *w, const peri_window_file *f, const opened *o, int64_t n)
{
    char text[1 << 12];
    while (n > 0) {
        int64_t got;
        PERI_TRY(read_next(w, f, o, text, peri__min(n, (int64_t)sizeof text), &got));
        if (got == 0) return failed(w, f, 0, 0);
        n -= got;
    }
    return PERI_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static peri_status no_text(const peri_window *w, const peri_window_file *f, const char *kind)
{
    return peri__fail(PERI_EFORMAT, "%s: %s is %s, allowed: a text of lines, packed by gzip or not", w->name, f->path,
                      kind);
}

/** How many bytes of the beginning of a file, @n of which are at @text, are left out; the first file's header is
 *  kept. */
static peri_status measure_skip(peri_window *w, peri_window_file *f, const char *text, int64_t n, bool header)
{
    f->skip = n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    if (!header) return PERI_OK;
    const char *line = text + f->skip, *end = memchr(line, '\n', (size_t)(n - f->skip));
    if (!end && n == MAX_HEADER)
        return peri__fail(PERI_EFORMAT, "%s: %s:1: a header line of more than %d bytes; is this a file of lines?",
                          w->name, f->path, MAX_HEADER);
    int64_t length = (end ? end : text + n) - line;
    f->skip += length + (end != NULL);
    if (length > 0 && line[length - 1] == '\r') length--;
    if (!w->header) {
        w->header = peri__alloc((size_t)length + 1);
        if (!w->header) return PERI_ENOMEM;
        memcpy(w->header, line, (size_t)length);
        w->header[length] = 0;
    } else if (strlen(w->header) != (size_t)length || memcmp(w->header, line, (size_t)length) != 0) {
        return peri__fail(PERI_EFORMAT,
                          "%s: %s:1: its header is not that of %s: the columns of all files must be the same", w->name,
                          f->path, w->files[0].path);
    }
    return PERI_OK;
}

/** Read a file's beginning, unpacked, up to @room bytes. */
static peri_status read_beginning(const peri_window *w, const peri_window_file *f, char *text, int64_t room, int64_t *n)
{
    opened o;
    int64_t got = 1;
    *n = 0;
    PERI_TRY(open_file(w, f, &o));
    peri_status status = PERI_OK;
    for (; got > 0 && *n < room && status >= 0; *n += got) {
        status = read_next(w, f, &o, text + *n, room - *n, &got);
        if (status < 0) got = 0;
    }
    close_file(&o);
    return status;
}

/** Whether the last byte of a regular file of @size bytes ends a line. */
static peri_status ends_line(const peri_window *w, const peri_window_file *f, int64_t size, bool *ends)
{
    opened o;
    char last = 0;
    PERI_TRY(open_file(w, f, &o));
    const bool read = peri__read_at(o.fd, &last, 1, size - 1) == 1;
    peri_status status = read || !errno ? PERI_OK : system_error(w, f->path);
    close_file(&o);
    *ends = last == '\n';
    return status;
}

/** Look at the beginning of a regular file of @size bytes. @text: room for MAX_HEADER bytes. */
static peri_status look_at(peri_window *w, peri_window_file *f, int64_t size, bool header, char *text)
{
    int64_t n, room = header ? MAX_HEADER : 1 << 12;
    f->packed = false;
    if (size == 0) return peri__fail(PERI_EFORMAT, "%s: %s is empty: it has no line", w->name, f->path);
    PERI_TRY(read_beginning(w, f, text, peri__min(room, 1 << 12), &n));
    f->packed = n >= 2 && memcmp(text, "\x1f\x8b", 2) == 0;
#if !defined(PERI_HAVE_ZLIB)
    if (f->packed)
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: %s is packed by gzip, and this build has no zlib: install zlib1g-dev, then: make probe "
                          "all; "
                          "or unpack it: gunzip",
                          w->name, f->path);
#endif
    if (f->packed || header) PERI_TRY(read_beginning(w, f, text, room, &n));
    if (n == 0) return peri__fail(PERI_EFORMAT, "%s: %s is empty: it has no line", w->name, f->path);
    const char *kind = peri__file_kind(text, n);
    if (kind) return no_text(w, f, kind);
    PERI_TRY(measure_skip(w, f, text, n, header));
    if (f->skip < n || n == room) return PERI_OK;
    return peri__fail(PERI_EFORMAT, "%s: %s %s", w->name, f->path,
                      header ? "has a header and no line behind it: there are no samples"
                             : "is empty: it has no line");
}

/** Look at file @i of all; the offset at which the next one begins goes to @at. */
static peri_status prepare(peri_window *w, int32_t i, bool header, char *text, int64_t *at)
{
    peri_window_file *f = &w->files[i];
    struct stat info;
    bool ends = true;
    if (stat(f->path, &info) != 0) return system_error(w, f->path);
    errno = EISDIR;
    if (S_ISDIR(info.st_mode)) return system_error(w, f->path);
    f->skip = f->bytes = 0;
    f->packed = f->added = false;
    f->at = *at;
    if (!S_ISREG(info.st_mode)) {
        w->pipe = w->in_order = true;
        if (w->n_files > 1 || header)
            return peri__fail(PERI_EINVAL,
                              "%s: %s is a pipe (no regular file), which is read alone and without a header line",
                              w->name, f->path);
        return PERI_OK;
    }
    PERI_TRY(look_at(w, f, info.st_size, header, text));
    w->in_order = w->in_order || f->packed;
    f->bytes = (int64_t)info.st_size - f->skip;
    if (!f->packed && i < w->n_files - 1 && f->bytes > 0) PERI_TRY(ends_line(w, f, info.st_size, &ends));
    f->added = i < w->n_files - 1 && (f->packed || !ends);
    *at += f->bytes + (f->added && !f->packed);
    return PERI_OK;
}

void peri__window_memory(peri_window *w, peri_window_file *file, const char *text, int64_t size)
{
    file->skip = size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    file->at = 0;
    file->bytes = size - file->skip;
    *w = (peri_window){.name = w->name,
                       .text = text + file->skip,
                       .end = file->bytes,
                       .size = file->bytes,
                       .fd = -1,
                       .current = -1,
                       .memory = true,
                       .files = file,
                       .n_files = 1};
}

/** Begin to read file @i, or none (-1). */
static peri_status enter(peri_window *w, int32_t i)
{
    opened o = {w->fd, w->packed};
    if (i == w->current) return PERI_OK;
    close_file(&o);
    peri_status status = PERI_OK;
    if (i >= 0) status = open_file(w, &w->files[i], &o);
    if (status >= 0 && i >= 0 && w->in_order) status = leave_out(w, &w->files[i], &o, w->files[i].skip);
    if (status < 0) close_file(&o);
    w->fd = o.fd;
    w->packed = o.packed;
    w->current = status < 0 ? -1 : i;
    return status;
}

peri_status peri__window_open(peri_window *w, peri_window_file *files, int32_t n_files, bool header)
{
    int64_t at = 0;
    *w = (peri_window){.name = w->name, .text = "", .fd = -1, .current = -1, .files = files, .n_files = n_files};
    char *text = peri__alloc(MAX_HEADER);
    if (!text) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n_files && status >= 0; i++) status = prepare(w, i, header, text, &at);
    peri__free(text);
    if (status < 0) return status;
    w->size = w->in_order ? INT64_MAX : at;
    return w->pipe ? enter(w, 0) : PERI_OK;
}

void peri__window_close(peri_window *w)
{
    opened o = {w->fd, w->packed};
    close_file(&o);
    peri__free(w->buffer);
    peri__free(w->header);
    w->buffer = w->header = NULL;
    w->packed = NULL;
    w->fd = w->current = -1;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

void peri__window_seek(peri_window *w, int64_t at)
{
    if (w->memory || w->pipe || (at >= w->begin && at <= w->end)) return;
    w->begin = w->end = at;
    if (w->in_order) (void)enter(w, -1); /* at 0: it begins again */
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

/** Index of the file in which offset @at lies. */
static int32_t file_at(const peri_window *w, int64_t at)
{
    int32_t last = !w->in_order || w->pipe ? w->n_files - 1 : w->current < 0 ? 0 : w->current, first = 0;
    while (first < last) {
        int32_t middle = first + (last - first + 1) / 2;
        if (w->files[middle].at <= at) first = middle;
        else last = middle - 1;
    }
    return first;
}

/** Up to @n bytes from offset @at on, of one file. */
static peri_status read_at(peri_window *w, char *to, int64_t n, int64_t at, int64_t *got)
{
    int32_t i = file_at(w, at);
    const peri_window_file *f = &w->files[i];
    int64_t within = at - f->at;
    if (within == f->bytes) {
        *to = '\n';
        *got = 1;
        return PERI_OK;
    }
    PERI_TRY(enter(w, i));
    do *got = pread(w->fd, to, (size_t)peri__min(n, f->bytes - within), f->skip + within);
    while (*got < 0 && errno == EINTR);
    return *got > 0 ? PERI_OK : failed(w, f, *got, f->skip + within);
}

/** Up to @n bytes more of a text that is read in order, 0 at its end. */
static peri_status read_in_order(peri_window *w, char *to, int64_t n, int64_t *got)
{
    bool in_line = w->end > w->begin && w->text[w->end - w->begin - 1] != '\n';
    for (;;) {
        if (w->current < 0) {
            w->files[0].at = 0;
            PERI_TRY(enter(w, 0));
        }
        opened o = {w->fd, w->packed};
        PERI_TRY(read_next(w, &w->files[w->current], &o, to, n, got));
        if (*got > 0 || w->current == w->n_files - 1) return PERI_OK;
        if (in_line) break;
        w->files[w->current + 1].at = w->end;
        PERI_TRY(enter(w, w->current + 1));
    }
    *to = '\n'; /* the next call finds the end of the file again, and goes on */
    *got = 1;
    return PERI_OK;
}

peri_status peri__window_read(peri_window *w, char *to, int64_t n, int64_t at)
{
    if (w->memory) memcpy(to, w->text + at, (size_t)n);
    for (int64_t done = 0, got; !w->memory && done < n; done += got)
        PERI_TRY(read_at(w, to + done, n - done, at + done, &got));
    return PERI_OK;
}

peri_status peri__window_more(peri_window *w, int64_t keep, bool *more)
{
    int64_t n;
    *more = false;
    if (w->end >= w->size) return PERI_OK;
    PERI_TRY(make_room(w, keep));
    char *to = w->buffer + (w->end - w->begin);
    PERI_TRY(w->in_order ? read_in_order(w, to, CHUNK, &n)
                         : read_at(w, to, peri__min(CHUNK, w->size - w->end), w->end, &n));
    if (n == 0) w->size = w->end;
    w->end += n;
    *more = n > 0;
    return PERI_OK;
}

/* -- of whole files ------------------------------------------------------------------------------------------------ */

const peri_window_file *peri__window_file(const peri_window *w, int64_t at) { return &w->files[file_at(w, at)]; }

/** Line ends in the first @bytes of a file; fewer, where it cannot be read any more. */
static int64_t line_ends(const peri_window *w, const peri_window_file *f, int64_t bytes)
{
    char text[1 << 14];
    int64_t count = 0, got;
    opened o;
    if (open_file(w, f, &o) < 0) return 0;
    for (int64_t at = 0; at < bytes; at += got) {
        if (read_next(w, f, &o, text, peri__min((int64_t)sizeof text, bytes - at), &got) < 0 || got == 0) break;
        for (int64_t i = 0; i < got; i++) count += text[i] == '\n';
    }
    close_file(&o);
    return count;
}

int64_t peri__window_line(const peri_window *w, int64_t at)
{
    const peri_window_file *f = peri__window_file(w, at);
    int64_t count = 0;
    if (!w->memory) return 1 + line_ends(w, f, f->skip + at - f->at);
    for (int64_t i = 0; i < at; i++) count += w->text[i] == '\n';
    return 1 + count;
}

peri_status peri__window_count(const peri_window *w, int64_t *lines)
{
    peri_window own = {.name = w->name,
                       .text = "",
                       .fd = -1,
                       .current = -1,
                       .n_files = w->n_files,
                       .in_order = true,
                       .size = INT64_MAX};
    bool more = true, in_line = false;
    own.files = peri__alloc(sizeof *own.files * (size_t)w->n_files);
    if (!own.files) return PERI_ENOMEM;
    memcpy(own.files, w->files, sizeof *own.files * (size_t)w->n_files);
    *lines = 0;
    peri_status status = PERI_OK;
    for (int64_t at = 0; more && status >= 0; at = own.end) {
        status = peri__window_more(&own, peri__max(at - 1, 0), &more); /* the last byte stays: whether a line is open */
        for (int64_t i = at; i < own.end; i++) *lines += *peri__window_at(&own, i) == '\n';
        if (own.end > at) in_line = *peri__window_at(&own, own.end - 1) != '\n';
    }
    *lines += in_line;
    peri__window_close(&own);
    peri__free(own.files);
    return status;
}
