/* SPDX-License-Identifier: Apache-2.0
 *
 * columns_write.c: batches as npy files. Rows are appended; the header, which says how many there are, is written again
 * at the end.
 */
#include "../base/quiet.h"
#include "io_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER = 128, DENSE = 0, LABELS = 1, LENGTHS = 2, OFFSETS = 3, IDS = 4, TEXT = 5, FILES = 6 };

typedef struct file {
    char *path;
    FILE *stream;
    const char *descr;
    int64_t columns; /* -1: one dimension */
    int64_t rows;
} file;

struct peri_columns_writer {
    char *folder, *part; /* its name at last, and until then */
    file files[FILES];
    int32_t dense_features, sparse_features;
    bool wide, failed;
    int64_t ids; /* written */
    int64_t *cursor;
    void *row;   /* room for what one sample has of a file */
    int64_t cursor_room, row_room;
};

static peri_status write_error(const char *path)
{
    return peri__fail(PERI_EIO, "peri_columns_writer: %s: %s", path, strerror(errno));
}

/** @out: new, the three strings behind each other. */
static peri_status join(const char *a, const char *b, const char *c, char **out)
{
    size_t room = strlen(a) + strlen(b) + strlen(c) + 1;
    *out = peri__alloc(room);
    if (!*out) return PERI_ENOMEM;
    snprintf(*out, room, "%s%s%s", a, b, c);
    return PERI_OK;
}

/** Make the folder under its first name. */
static peri_status make_folder(peri_columns_writer *w, const char *folder)
{
    struct stat info;
    PERI_TRY(join(folder, "", "", &w->folder));
    PERI_TRY(join(folder, ".part", "", &w->part));
    if (stat(folder, &info) == 0) {
        errno = EEXIST;
        return write_error(folder);
    }
    if (mkdir(w->part, 0777) != 0 && errno != EEXIST) return write_error(w->part);
    if (!peri__file_planted(w->part)) return PERI_OK;
    return peri__fail(PERI_EIO,
                      "peri_columns_writer: '%s' is another user's, in a folder in which everybody may make files: "
                      "nothing is written into it",
                      w->part);
}

FILE *peri__stream_new(const char *path)
{
    if (peri__file_planted(path)) { /* as kernels say it that look after this themselves (fs.protected_symlinks) */
        errno = EACCES;
        return NULL;
    }
    int fd = peri__fd_of_ours(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    FILE *stream = fd < 0 ? NULL : fdopen(fd, "wb");
    if (fd >= 0 && !stream) close(fd);
    return stream;
}

static peri_status append_bytes(file *f, const void *data, int64_t bytes)
{
    return bytes == 0 || fwrite(data, (size_t)bytes, 1, f->stream) == 1 ? PERI_OK : write_error(f->path);
}

/** The header of a file of f->rows rows, at its beginning. */
static peri_status write_header(file *f)
{
    char text[HEADER + 1], shape[64];
    if (f->columns >= 0) snprintf(shape, sizeof shape, "(%lld, %lld)", (long long)f->rows, (long long)f->columns);
    else snprintf(shape, sizeof shape, "(%lld,)", (long long)f->rows);
    snprintf(text + 10, sizeof text - 10, "%-117s\n", "");
    memcpy(text, "\x93NUMPY\x01\x00\x76\x00", 10);
    int n = snprintf(text + 10, sizeof text - 10, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", f->descr,
                     shape);
    text[10 + n] = ' '; /* where the text ended */
    if (fseek(f->stream, 0, SEEK_SET) != 0) return write_error(f->path);
    return append_bytes(f, text, HEADER);
}

peri_status peri_columns_writer_new(const char *folder, int32_t dense_features, int32_t sparse_features, bool wide,
                                    peri_columns_writer **out)
{
    static const char *const names[FILES] = {"dense.npy",   "labels.npy", "lengths.npy",
                                             "offsets.npy", "ids.npy",    "samples.txt"};
    const char *descr[FILES] = {"<f4", "<f4", "<i2", "<i8", wide ? "<i8" : "<i4", NULL};
    const int64_t columns[FILES] = {dense_features, -1, sparse_features, -1, -1, -1}, zero = 0;
    PERI_NEED(folder);
    PERI_NEED(out);
    if (dense_features < 0 || dense_features > IO_MAX_FEATURES || sparse_features < 0 ||
        sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "peri_columns_writer_new: %d dense and %d sparse features, allowed: 0..%d",
                          dense_features, sparse_features, IO_MAX_FEATURES);
    peri_columns_writer *w = peri__alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    peri__object_count(1);
    w->dense_features = dense_features;
    w->sparse_features = sparse_features;
    w->wide = wide;
    peri_status status = make_folder(w, folder);
    for (int i = 0; i < FILES && status >= 0; i++) {
        file *f = &w->files[i];
        f->descr = descr[i];
        f->columns = columns[i];
        status = join(w->part, "/", names[i], &f->path);
        if (status < 0) break;
        f->stream = peri__stream_new(f->path);
        status = !f->stream ? write_error(f->path) : f->descr ? write_header(f) : PERI_OK;
    }
    if (status >= 0) status = append_bytes(&w->files[OFFSETS], &zero, sizeof zero);
    w->files[OFFSETS].rows = 1;
    if (status < 0) peri_columns_writer_release(w);
    else *out = w;
    return status;
}

/** Room for @rows cursors, and for @bytes of a sample. */
static peri_status make_room(peri_columns_writer *w, int64_t rows, int64_t bytes)
{
    if (rows > w->cursor_room) {
        int64_t *more = peri__realloc(w->cursor, sizeof *more * (size_t)rows);
        if (!more) return PERI_ENOMEM;
        w->cursor = more;
        w->cursor_room = rows;
    }
    if (bytes > w->row_room) {
        void *more = peri__realloc(w->row, (size_t)(2 * bytes));
        if (!more) return PERI_ENOMEM;
        w->row = more;
        w->row_room = 2 * bytes;
    }
    return PERI_OK;
}

/** Append the lengths of sample @row, whose ids are counted in @n. */
static peri_status append_lengths(peri_columns_writer *w, const peri_batch *b, int64_t row, int64_t *n)
{
    int16_t *lengths = w->row;
    *n = 0;
    for (int32_t f = 0; f < w->sparse_features; f++) {
        int32_t length = b->lengths[f * b->rows + row];
        if (length < 0 || length > INT16_MAX)
            return peri__fail(
                PERI_ERANGE,
                "peri_columns_writer_add: sample %lld of the batch has %d ids of sparse feature %d, allowed: "
                "0..%d",
                (long long)row, length, f, INT16_MAX);
        lengths[f] = (int16_t)length;
        *n += length;
    }
    return append_bytes(&w->files[LENGTHS], lengths, w->sparse_features * (int64_t)sizeof *lengths);
}

/** Append the @n ids of sample @row; cursor[feature]: where its ids are in the batch. */
static peri_status append_ids(peri_columns_writer *w, const peri_batch *b, int64_t row, int64_t n)
{
    int64_t at = 0;
    for (int32_t f = 0; f < w->sparse_features; f++) {
        for (int32_t k = 0; k < b->lengths[f * b->rows + row]; k++, at++) {
            int64_t id = b->values[w->cursor[f]++];
            if (!w->wide && (id < 0 || id > INT32_MAX))
                return peri__fail(PERI_ERANGE,
                                  "peri_columns_writer_add: sample %lld of the batch has the id %lld, allowed: "
                                  "0..2^31-1 where ids are not wide",
                                  (long long)row, (long long)id);
            if (w->wide) ((int64_t *)w->row)[at] = id;
            else ((int32_t *)w->row)[at] = (int32_t)id;
        }
    }
    w->ids += n;
    w->files[IDS].rows += n;
    PERI_TRY(append_bytes(&w->files[IDS], w->row, n * (w->wide ? 8 : 4)));
    return append_bytes(&w->files[OFFSETS], &w->ids, sizeof w->ids);
}

static peri_status append_batch(peri_columns_writer *w, const peri_batch *b)
{
    int64_t at = 0, n;
    PERI_TRY(
        make_room(w, peri__max(w->sparse_features, 1), peri__max(w->sparse_features, 1) * (int64_t)sizeof(int16_t)));
    for (int32_t f = 0; f < w->sparse_features; f++) {
        w->cursor[f] = at;
        for (int64_t row = 0; row < b->rows; row++) at += b->lengths[f * b->rows + row];
    }
    if (at != b->ids)
        return peri__fail(PERI_EINVAL, "peri_columns_writer_add: a batch of %lld ids, whose lengths sum to %lld",
                          (long long)b->ids, (long long)at);
    PERI_TRY(append_bytes(&w->files[DENSE], b->dense, b->rows * w->dense_features * (int64_t)sizeof(float)));
    PERI_TRY(append_bytes(&w->files[LABELS], b->labels, b->rows * (int64_t)sizeof(float)));
    for (int64_t row = 0; row < b->rows; row++) {
        PERI_TRY(append_lengths(w, b, row, &n));
        PERI_TRY(make_room(w, 0, n * 8));
        PERI_TRY(append_ids(w, b, row, n));
    }
    for (int i = DENSE; i <= OFFSETS; i++) w->files[i].rows += b->rows;
    return PERI_OK;
}

peri_status peri_columns_writer_add(peri_columns_writer *w, const peri_batch *b)
{
    PERI_NEED(w);
    PERI_NEED(b);
    PERI_TRY(peri__batch_check("peri_columns_writer_add", b, w->dense_features, w->sparse_features));
    PERI__QUIET;
    if (w->failed)
        return peri__fail(PERI_ECLOSED,
                          "peri_columns_writer_add: an earlier batch could not be written, or all are written");
    peri_status status = append_batch(w, b);
    w->failed = status < 0;
    return status;
}

peri_status peri_columns_writer_finish(peri_columns_writer *w, const char *text)
{
    PERI_NEED(w);
    PERI_NEED(text);
    PERI__QUIET;
    if (w->failed)
        return peri__fail(PERI_ECLOSED, "peri_columns_writer_finish: a batch could not be written, or all are written");
    w->failed = true;
    for (int i = 0; i < FILES; i++) {
        file *f = &w->files[i];
        PERI_TRY(f->descr ? write_header(f) : append_bytes(f, text, (int64_t)strlen(text)));
        if (fflush(f->stream) != 0 || fsync(fileno(f->stream)) != 0) return write_error(f->path);
    }
    return rename(w->part, w->folder) == 0 ? PERI_OK : write_error(w->folder);
}

void peri_columns_writer_release(peri_columns_writer *w)
{
    if (!w || peri__border_refuses(__func__)) return;
    PERI__QUIET;
    for (int i = 0; i < FILES; i++) {
        if (w->files[i].stream) fclose(w->files[i].stream);
        peri__free(w->files[i].path);
    }
    peri__free(w->folder);
    peri__free(w->part);
    peri__free(w->cursor);
    peri__free(w->row);
    peri__object_count(-1);
    peri__free(w);
}
