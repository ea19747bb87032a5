/* SPDX-License-Identifier: Apache-2.0
 *
 * writer.c: one rank's files. Pieces are announced, then files are laid out and written from the first byte to the
 * last. The caller's thread copies the bytes into a ring of buffers, and hashes them while the processor's caches have
 * them; another thread writes the buffers (file_jobs.h).
 */
#include "../base/quiet.h"
#include "../tensor/tensor_internal.h"
#include "file_jobs.h"
#include "manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>
#include <xxhash.h>

#define FILE_BYTES ((int64_t)16 << 30)
enum {
    BUFFERS = 4,     /* of the ring, PERI__IO_BLOCK bytes each */
    RING = BUFFERS * PERI__IO_BLOCK,
    HASHED = 1 << 17 /* bytes that are copied and then hashed: they fit into a cache */
};

struct peri_checkpoint_writer {
    peri__manifest m; /* a piece of m for each file that the caller's piece is in */
    char *folder, *stem, *buffer;
    char part[1400]; /* see write_part; room for a stem whose bytes are all escaped */
    int64_t file_bytes;
    XXH3_state_t *hash;
    int64_t piece, done; /* that is being written, and how many of its bytes are */
    int32_t file;        /* that is open; -1: none yet */
    peri__io *io;
    peri__io_file *open;
    char *ring, *buffers[BUFFERS];
    int64_t jobs[BUFFERS]; /* that write each buffer; -1: none */
    int64_t last;          /* the job that finishes the file before */
    int32_t current;       /* the buffer that is being filled */
    int64_t filled, at;    /* its bytes, and where they go in the file */
    int32_t forks; /* peri__forks of the process that writes */
    bool started, finished;
    peri_status spent; /* after an error of the file system */
    char message[PERI_MESSAGE_MAX];
};

peri_status peri_checkpoint_writer_new(const char *folder, const char *stem, int64_t file_bytes,
                                       peri_checkpoint_writer **out)
{
    PERI_NEED(folder);
    PERI_NEED(stem);
    PERI_NEED(out);
    if (!*stem || strchr(stem, '/') || *stem == '.' || strlen(stem) > 200)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_writer_new: stem '%.100s', allowed: 1 to 200 bytes, no '/', no '.' in front",
                          stem);
    if (file_bytes < 0)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_writer_new: files of %lld bytes, allowed: 1 or more, 0 for %lld",
                          (long long)file_bytes, (long long)FILE_BYTES);
    peri_checkpoint_writer *w = peri__alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    peri__object_count(1);
    w->file = -1;
    w->forks = peri__forks();
    for (int b = 0; b < BUFFERS; b++) w->jobs[b] = -1;
    w->file_bytes = file_bytes ? file_bytes : FILE_BYTES;
    w->folder = peri__strdup(folder);
    w->stem = peri__strdup(stem);
    w->hash = XXH3_createState();
    if (!w->folder || !w->stem || !w->hash) {
        peri_status status =
            w->hash ? PERI_ENOMEM : peri__fail(PERI_ENOMEM, "peri_checkpoint_writer_new: no memory for a hash");
        peri_checkpoint_writer_release(w);
        return status;
    }
    *out = w;
    return PERI_OK;
}

/** What only writing needs: threads and buffers. */
static void free_ring(peri_checkpoint_writer *w)
{
    peri__io_release(w->io);
    w->io = NULL;
    peri__io_pages_free(w->ring, RING);
    w->ring = NULL;
    peri__free(w->buffer);
    w->buffer = NULL;
}

static peri_status file_path(const peri_checkpoint_writer *w, int32_t file, char path[PATH_MAX])
{
    return peri__path_join(w->folder, peri__manifest_text(&w->m, w->m.files[file].name), path);
}

void peri_checkpoint_writer_release(peri_checkpoint_writer *w)
{
    if (!w || peri__border_refuses(__func__)) return;
    peri__object_count(-1);
    if (w->forks != peri__forks()) return; /* the files are the parent's, and its threads' what they work with */
    free_ring(w);
    peri__io_file_free(w->open);
    for (int32_t f = 0; !w->finished && f <= w->file; f++) {
        char path[PATH_MAX];
        if (file_path(w, f, path) >= 0) unlink(path);
    }
    XXH3_freeState(w->hash);
    peri__manifest_fini(&w->m);
    peri__free(w->folder);
    peri__free(w->stem);
    peri__free(w);
}

/** Rows of a piece by which it is cut: as many as a file may have. */
static int64_t rows_at_once(const peri_checkpoint_writer *w, int32_t ndim, const peri__region *region, int64_t bytes)
{
    if (ndim == 0 || bytes <= w->file_bytes) return ndim ? region->size[0] : 1;
    return peri__max(1, w->file_bytes / (bytes / region->size[0]));
}

peri_status peri__writer_add(peri_checkpoint_writer *w, const peri_checkpoint_tensor *t, const peri__region *region)
{
    int64_t elements, bytes, all;
    if (w->started)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_writer_add: '%.200s': pieces are being written already",
                          t->name);
    if (!*t->name || strlen(t->name) > PERI__NAME_MOST)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_writer_add: a name of %zu bytes, allowed: 1 to %d",
                          strlen(t->name), PERI__NAME_MOST);
    if (t->ndim < 0 || t->ndim > PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_writer_add: '%.200s': %d dimensions, allowed: 0 to %d", t->name,
                          t->ndim, PERI_MAX_DIMS);
    if (t->dtype < 0 || t->dtype >= PERI_DTYPE_COUNT)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_writer_add: '%.200s': dtype %d, allowed: 0 to %d", t->name,
                          t->dtype, PERI_DTYPE_COUNT - 1);
    if (!peri__safetensors_dtype(t->dtype))
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_checkpoint_writer_add: '%.200s': dtype %s: safetensors files have none of that name",
                          t->name, peri_dtype_name(t->dtype));
    peri__region whole = {0};
    memcpy(whole.size, t->shape, (size_t)t->ndim * sizeof *t->shape);
    PERI_TRY(peri__region_check("peri_checkpoint_writer_add", t->ndim, t->shape, &whole, &all));
    if (all > INT64_MAX / 16)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_writer_add: '%.200s': it has too many elements", t->name);
    PERI_TRY(peri__region_check("peri_checkpoint_writer_add", t->ndim, t->shape, region, &elements));
    if (region->rows) elements = peri__listed_elements(elements, region->size[0], region->listed);
    bytes = elements * peri_dtype_size(t->dtype);
    PERI_TRY(peri__manifest_entry(&w->m, t->name, t->dtype, t->ndim, t->shape));
    /* it is not cut */
    if (region->rows) return peri__manifest_piece(&w->m, region, &(peri__stored_piece){.bytes = bytes});
    const int64_t step = rows_at_once(w, t->ndim, region, bytes), past = t->ndim ? region->size[0] : 1;
    for (int64_t row = 0; elements > 0 && row < past; row += step) { /* an empty piece is none */
        peri__region r = *region;
        int64_t rows = peri__min(step, past - row);
        if (t->ndim) r.offset[0] += row, r.size[0] = rows;
        PERI_TRY(peri__manifest_piece(&w->m, &r, &(peri__stored_piece){.bytes = bytes / past * rows}));
    }
    return PERI_OK;
}

peri_status peri_checkpoint_writer_add(peri_checkpoint_writer *w, const peri_checkpoint_tensor *tensor,
                                       const peri_checkpoint_region *region)
{
    peri__region r;
    PERI_NEED(w);
    PERI_NEED(region);
    PERI_TAKE(peri_checkpoint_tensor, tensor);
    PERI_NEED(tensor->name);
    PERI_TRY(peri__region_take(&r, region, __func__));
    return peri__writer_add(w, tensor, &r);
}

/* -- writing ------------------------------------------------------------------------------------------------------- */

/** Keep an error of the file system. */
static peri_status spend(peri_checkpoint_writer *w, peri_status status)
{
    if (status >= 0 || status == PERI_EINVAL) return status;
    w->spent = status;
    snprintf(w->message, sizeof w->message, "%s", peri_error_message());
    return status;
}

static peri_status check_usable(const peri_checkpoint_writer *w, const char *function)
{
    if (w->spent) return peri__fail(w->spent, "%s", w->message);
    if (w->forks != peri__forks())
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: the process that this one was forked from writes this, and has the threads for it",
                          function);
    return w->finished ? peri__fail(PERI_EINVAL, "%s: the writer is finished", function) : PERI_OK;
}

/** Bytes of a header for a piece of @e, at most: its name, in quotes, and numbers of 20 digits. */
static int64_t header_bytes(const peri_checkpoint_writer *w, const peri__entry *e)
{
    int64_t bytes = 160 + 80 * (int64_t)e->ndim;
    for (const char *c = peri__entry_name(&w->m, e); *c; c++)
        bytes += (unsigned char)*c < ' ' ? 6 : *c == '"' || *c == '\\' ? 2 : 1;
    return bytes;
}

/** Which file each piece is in: the next one when this one would be too large, or its header. */
static peri_status lay_out(peri_checkpoint_writer *w)
{
    int64_t bytes = 0, header = 0;
    int32_t file = -1;
    for (int64_t i = 0; i < w->m.n_entries || file < 0; i++) { /* without any piece one file is written all the same */
        const peri__entry *e = i < w->m.n_entries ? &w->m.entries[i] : NULL;
        for (int64_t k = 0; k < (e ? e->n_pieces : 1); k++) {
            peri__stored_piece *p = e ? &w->m.pieces[e->first_piece + k] : NULL;
            const int64_t more = e ? header_bytes(w, e) : 0;
            if (file < 0 || (bytes > 0 && (bytes > w->file_bytes - p->bytes || header > PERI__HEADER_MOST - more))) {
                char name[256];
                snprintf(name, sizeof name, file < 0 ? "%s.safetensors" : "%s-%d.safetensors", w->stem, file + 2);
                PERI_TRY(peri__manifest_file(&w->m, name, 0, &file));
                bytes = header = 0;
            }
            if (!p) break;
            p->file = file;
            bytes += p->bytes;
            header += more;
        }
        if (!e) break;
    }
    w->started = true;
    return PERI_OK;
}

/** The threads and the ring, before the first file. */
static peri_status have_ring(peri_checkpoint_writer *w)
{
    if (w->io) return PERI_OK;
    peri__io_pages_free(w->ring, RING);
    if (!(w->ring = peri__io_pages(RING))) return PERI_ENOMEM;
    for (int b = 0; b < BUFFERS; b++) w->buffers[b] = w->ring + b * (int64_t)PERI__IO_BLOCK;
    return peri__io_new(2, &w->io);
}

/** Give the current buffer to the threads; the next one is waited for when it is filled. */
static void hand_over(peri_checkpoint_writer *w)
{
    if (w->filled == 0) return;
    w->jobs[w->current] = peri__io_write(w->io, w->open, w->buffers[w->current], w->filled, w->at);
    w->at += w->filled;
    w->filled = 0;
    w->current = (w->current + 1) % BUFFERS;
}

/** Where the next bytes of the file go: the threads have written what was there. */
static peri_status place(peri_checkpoint_writer *w, char **to)
{
    if (w->filled == 0 && w->jobs[w->current] >= 0) PERI_TRY(peri__io_wait(w->io, w->jobs[w->current]));
    *to = w->buffers[w->current] + w->filled;
    return PERI_OK;
}

/** The next bytes of the file. @data may lie in their place already. @hash: they are hashed too. */
static peri_status append(peri_checkpoint_writer *w, const char *data, int64_t bytes, XXH3_state_t *hash)
{
    while (bytes > 0) {
        char *to;
        PERI_TRY(place(w, &to));
        const int64_t n = peri__min(peri__min(bytes, HASHED), PERI__IO_BLOCK - w->filled);
        if (to != data) memcpy(to, data, (size_t)n);
        if (hash) XXH3_64bits_update(hash, to, (size_t)n);
        w->filled += n;
        data += n;
        bytes -= n;
        if (w->filled == PERI__IO_BLOCK) hand_over(w);
    }
    return PERI_OK;
}

/** The threads write what is left of the file, sync it and close it. */
static void end_file(peri_checkpoint_writer *w)
{
    if (!w->open) return;
    hand_over(w);
    w->last = peri__io_finish(w->io, w->open);
    w->open = NULL;
}

static peri_status put_header(void *writer, const char *data, int64_t bytes)
{
    peri_checkpoint_writer *w = writer;
    return append(w, data, bytes, w->hash);
}

/** The next file, with its header. Its bytes are asked of the system at once: a disk that is too full is found here. */
static peri_status open_next(peri_checkpoint_writer *w)
{
    char path[PATH_MAX];
    int64_t bytes;
    int fd;
    PERI_TRY(have_ring(w));
    end_file(w);
    PERI_TRY(file_path(w, w->file + 1, path));
    PERI_TRY(peri__safetensors_lay_out(&w->m, w->file + 1, &bytes));
    peri_status status = peri__file_create(path, &fd);
    if (status >= 0) {
        w->file++;
        status = peri__io_file_new(fd, path, &w->open);
    }
    if (status >= 0) {
        PERI__QUIET;
        const int64_t all = w->m.files[w->file].bytes;
        if (fallocate(fd, 0, 0, all) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
            int why = errno;
            status = peri__fail(PERI_EIO, "checkpoint: '%.300s': %lld bytes: %s", path, (long long)all, strerror(why));
        } else {
            peri__io_file_direct(w->open);
            w->at = 0;
            XXH3_64bits_reset(w->hash);
            status = peri__safetensors_print(&w->m, w->file, bytes, put_header, w);
            w->m.files[w->file].header = bytes;
            w->m.files[w->file].checksum = XXH3_64bits_digest(w->hash);
        }
    }
    return status;
}

/** Open the file of the piece that comes next. */
static peri_status start_piece(peri_checkpoint_writer *w)
{
    if (!w->started) PERI_TRY(lay_out(w));
    while (w->file < (w->piece < w->m.n_pieces ? w->m.pieces[w->piece].file : (int32_t)w->m.n_files - 1))
        PERI_TRY(open_next(w));
    XXH3_64bits_reset(w->hash);
    return PERI_OK;
}

/** Pieces without bytes, those of which no row is listed, are done when it is their turn. */
static peri_status pass_empty(peri_checkpoint_writer *w)
{
    while (w->piece < w->m.n_pieces && w->m.pieces[w->piece].bytes == 0) {
        peri__stored_piece *p = &w->m.pieces[w->piece++];
        p->checksum = XXH3_64bits("", 0);
        p->checked = true;
        if (w->started && w->piece < w->m.n_pieces) PERI_TRY(start_piece(w));
    }
    return PERI_OK;
}

static peri_status put_bytes(peri_checkpoint_writer *w, const char *data, int64_t bytes)
{
    if (!w->started && bytes > 0) PERI_TRY(start_piece(w));
    while (bytes > 0) {
        peri__stored_piece *p = &w->m.pieces[w->piece];
        const int64_t n = peri__min(bytes, p->bytes - w->done);
        PERI_TRY(append(w, data, n, w->hash));
        data += n;
        bytes -= n;
        w->done += n;
        if (w->done < p->bytes) continue;
        p->checksum = XXH3_64bits_digest(w->hash);
        p->checked = true;
        w->piece++;
        w->done = 0;
        if (w->piece < w->m.n_pieces) PERI_TRY(start_piece(w));
    }
    return PERI_OK;
}

/** Bytes that are left of the pieces of one tensor, as announced together: those of the current entry. */
static int64_t bytes_left(const peri_checkpoint_writer *w, const peri__entry **entry)
{
    int64_t low = 0, high = w->m.n_entries; /* the entry of the current piece: the last one that begins at it or before,
                                               and has pieces */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (w->m.entries[middle].first_piece <= w->piece) low = middle;
        else high = middle;
    }
    const peri__entry *e = &w->m.entries[low];
    int64_t left = -w->done;
    for (int64_t k = w->piece; k < e->first_piece + e->n_pieces; k++) left += w->m.pieces[k].bytes;
    *entry = e;
    return left;
}

static peri_status check_piece_left(const peri_checkpoint_writer *w, const char *function, int32_t dtype, int64_t bytes)
{
    const peri__entry *e;
    if (w->piece == w->m.n_pieces)
        return peri__fail(PERI_EINVAL, "%s: all pieces that were announced are written", function);
    int64_t left = bytes_left(w, &e), size = peri_dtype_size(e->dtype);
    if (dtype >= 0 && dtype != e->dtype)
        return peri__fail(PERI_EINVAL, "%s: elements of %s, those of '%.200s' are %s", function, peri_dtype_name(dtype),
                          peri__entry_name(&w->m, e), peri_dtype_name(e->dtype));
    if (bytes % size)
        return peri__fail(PERI_EINVAL, "%s: %lld bytes, wanted: whole elements of '%.200s', of %lld bytes each",
                          function, (long long)bytes, peri__entry_name(&w->m, e), (long long)size);
    if (bytes <= left) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %lld elements, '%.200s' has %lld left", function, (long long)(bytes / size),
                      peri__entry_name(&w->m, e), (long long)(left / size));
}

peri_status peri_checkpoint_writer_put_bytes(peri_checkpoint_writer *w, const void *data, int64_t bytes)
{
    PERI_NEED(w);
    PERI_TRY(check_usable(w, "peri_checkpoint_writer_put_bytes"));
    if (bytes < 0)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_writer_put_bytes: %lld bytes, allowed: 0 or more",
                          (long long)bytes);
    if (bytes == 0) return PERI_OK;
    PERI_NEED(data);
    PERI_TRY(spend(w, pass_empty(w)));
    PERI_TRY(check_piece_left(w, "peri_checkpoint_writer_put_bytes", -1, bytes));
    return spend(w, put_bytes(w, data, bytes));
}

/** What is done with the bytes of some elements. */
typedef peri_status block_fn(void *context, const char *data, int64_t bytes);

/** Blocks of elements that are not one after the other in the host's memory: rows of the first dimension, through a
 *  buffer of PERI__IO_BLOCK bytes. */
static peri_status copied_blocks(peri_tensor *t, const peri_tensor_info *d, char *buffer, block_fn *f, void *context)
{
    const int64_t size = peri_dtype_size(d->dtype), rows = d->ndim ? d->shape[0] : 1, row = d->numel / rows * size;
    if (row > PERI__IO_BLOCK && d->ndim > 1) { /* rows that are too long for the buffer: each by itself */
        for (int64_t r = 0; r < rows; r++) {
            peri_tensor *one, *flat;
            peri_tensor_info inner = {.size = sizeof inner};
            PERI_TRY(peri_tensor_slice(t, 0, r, r + 1, 1, &one));
            peri_status status = peri_tensor_reshape(one, d->ndim - 1, d->shape + 1, &flat);
            peri_tensor_release(one);
            PERI_TRY(status);
            peri_tensor_describe(flat, &inner);
            status = copied_blocks(flat, &inner, buffer, f, context);
            peri_tensor_release(flat);
            PERI_TRY(status);
        }
        return PERI_OK;
    }
    const int64_t step = peri__max(1, PERI__IO_BLOCK / row);
    for (int64_t r = 0; r < rows; r += step) {
        const int64_t n = peri__min(step, rows - r);
        peri_tensor *part = t;
        if (d->ndim) PERI_TRY(peri_tensor_slice(t, 0, r, r + n, 1, &part));
        peri_status status = peri_tensor_read(part, buffer, n * row);
        if (d->ndim) peri_tensor_release(part);
        PERI_TRY(status);
        PERI_TRY(f(context, buffer, n * row));
    }
    return PERI_OK;
}

/** All elements in row-major order, in blocks. @buffer: made if it is needed, the caller's. */
static peri_status each_block(peri_tensor *t, const peri_tensor_info *d, char **buffer, block_fn *f, void *context)
{
    if (d->contiguous && peri__immediate(d->device))
        return f(context, peri__data(t), d->numel * peri_dtype_size(d->dtype));
    if (!*buffer && !(*buffer = peri__alloc(PERI__IO_BLOCK))) return PERI_ENOMEM;
    const bool recording = peri__grad_swap(false);
    peri_status status = copied_blocks(t, d, *buffer, f, context);
    peri__grad_swap(recording);
    return status;
}

static peri_status write_block(void *context, const char *data, int64_t bytes)
{
    return put_bytes(context, data, bytes);
}

peri_status peri_checkpoint_writer_put(peri_checkpoint_writer *w, const peri_tensor *elements)
{
    peri_tensor_info d = {.size = sizeof d};
    PERI_NEED(w);
    PERI_NEED(elements);
    PERI_TRY(check_usable(w, "peri_checkpoint_writer_put"));
    peri_tensor_describe(elements, &d);
    if (d.numel == 0) return PERI_OK;
    PERI_TRY(spend(w, pass_empty(w)));
    PERI_TRY(check_piece_left(w, "peri_checkpoint_writer_put", d.dtype, d.numel * peri_dtype_size(d.dtype)));
    return spend(w, each_block((peri_tensor *)elements, &d, &w->buffer, write_block, w));
}

/** The next rows of the current piece, of entry @e: those of the moment's part from @row on, as many as the buffer has
 *  room for (where it has none, one). They are read into the buffer, where their elements may lie there; @size: the
 *  sizes of the piece; how many of @rows are put is in size[0] then. */
static peri_status put_rows(peri_checkpoint_writer *w, peri_moment *moment, int64_t index, int64_t row, int64_t rows,
                            const peri__entry *e, int64_t *size)
{
    peri_device *cpu;
    peri_tensor *t;
    char *to;
    const int64_t element = peri_dtype_size(e->dtype), row_bytes = peri__volume(e->ndim - 1, size + 1) * element;
    if (!w->started) PERI_TRY(spend(w, start_piece(w)));
    PERI_TRY(spend(w, place(w, &to)));
    const int64_t room = peri__min(PERI__IO_BLOCK - w->filled, w->m.pieces[w->piece].bytes - w->done) / row_bytes;
    const bool here = room > 0 && (uintptr_t)to % (uintptr_t)element == 0;
    size[0] = peri__min(rows, peri__max(1, room));
    PERI_TRY(peri_device_get("cpu", &cpu));
    if (here) PERI_TRY(peri__tensor_host(cpu, e->dtype, e->ndim, size, to, NULL, NULL, &t));
    else PERI_TRY(peri_tensor_new(cpu, e->dtype, e->ndim, size, &t));
    peri_status status = peri_moment_read(moment, index, row, t);
    if (status >= 0) status = put_bytes(w, peri__data(t), size[0] * row_bytes);
    peri_tensor_release(t);
    return spend(w, status); /* rows before these may have been put */
}

peri_status peri_checkpoint_writer_put_moment(peri_checkpoint_writer *w, peri_moment *moment, int64_t index,
                                              int64_t row, int64_t rows)
{
    static const char function[] = "peri_checkpoint_writer_put_moment";
    const peri__entry *e;
    peri__region r;
    PERI_NEED(w, moment);
    PERI_TRY(check_usable(w, function));
    if (rows < 0) return peri__fail(PERI_EINVAL, "%s: %lld rows, allowed: 0 or more", function, (long long)rows);
    if (rows > 0) {
        PERI_TRY(spend(w, pass_empty(w)));
        PERI_TRY(check_piece_left(w, function, -1, 0));
        (void)bytes_left(w, &e);
        peri__piece_region(&w->m, e, &w->m.pieces[w->piece], &r);
        if (e->ndim == 0 || r.rows)
            return peri__fail(PERI_EINVAL, "%s: '%.200s' is no table whose rows are all written", function,
                              peri__entry_name(&w->m, e));
        PERI_TRY(check_piece_left(w, function, -1,
                                  rows * peri__volume(e->ndim - 1, r.size + 1) * peri_dtype_size(e->dtype)));
    }
    for (; rows > 0; row += r.size[0], rows -= r.size[0])
        PERI_TRY(put_rows(w, moment, index, row, rows, e, r.size));
    return peri_moment_pass(moment, index, row);
}

/** Hash the blocks that put_blocks brings. */
static peri_status hash_block(void *context, const char *data, int64_t bytes)
{
    XXH3_64bits_update(context, data, (size_t)bytes);
    return PERI_OK;
}

peri_status peri_checkpoint_checksum(const peri_tensor *elements, uint64_t *out)
{
    peri_tensor_info d = {.size = sizeof d};
    PERI_NEED(elements);
    PERI_NEED(out);
    peri_tensor_describe(elements, &d);
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_checksum: no memory for a hash");
    XXH3_64bits_reset(hash);
    char *buffer = NULL;
    peri_status status = d.numel ? each_block((peri_tensor *)elements, &d, &buffer, hash_block, hash) : PERI_OK;
    if (status >= 0) *out = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    peri__free(buffer);
    return status;
}

int64_t peri_checkpoint_writer_room(const peri_checkpoint_writer *w)
{
    if (!w || peri__border_refuses(__func__) || w->finished || w->spent) return 0;
    if (w->forks != peri__forks()) return 0;
    int64_t room = -w->filled;
    for (int b = 0; b < BUFFERS; b++) {
        const int64_t number = b == 0 && w->filled > 0 ? -1 : w->jobs[(w->current + b) % BUFFERS];
        if (number >= 0 && !peri__io_done(w->io, number)) break;
        room += PERI__IO_BLOCK;
    }
    return room;
}

/** All pieces are put: give what is left to the threads. */
static peri_status end_files(peri_checkpoint_writer *w, const char *function)
{
    PERI_TRY(check_usable(w, function));
    PERI_TRY(spend(w, pass_empty(w)));
    if (w->piece < w->m.n_pieces) {
        const peri__entry *e;
        int64_t left = bytes_left(w, &e);
        return peri__fail(PERI_EINVAL, "%s: %lld elements of '%.200s' are not written yet", function,
                          (long long)(left / peri_dtype_size(e->dtype)), peri__entry_name(&w->m, e));
    }
    if (!w->started) PERI_TRY(spend(w, start_piece(w)));
    end_file(w);
    return PERI_OK;
}

peri_status peri_checkpoint_writer_test(peri_checkpoint_writer *w)
{
    PERI_NEED(w);
    if (w->finished) return PERI_OK;
    PERI_TRY(end_files(w, "peri_checkpoint_writer_test"));
    return peri__io_done(w->io, w->last) ? PERI_OK : PERI_PENDING;
}

/** Write this rank's part of the manifest into a file beside the others, which publishing reads and removes: of 100,000
 *  tables it has 70 MB. w->part: a text that says its name and its bytes. */
static peri_status write_part(peri_checkpoint_writer *w)
{
    char name[256], path[PATH_MAX];
    peri__growing file = {.path = path};
    snprintf(name, sizeof name, "%s" PERI__PART, w->stem);
    PERI_TRY(peri__path_join(w->folder, name, path));
    PERI_TRY(peri__file_create(path, &file.fd));
    peri_status status = peri__manifest_print(&w->m, NULL, peri__growing_put, &file);
    if (close(file.fd) != 0 && status >= 0) {
        const int why = errno;
        status = peri__fail(PERI_EIO, "checkpoint: writing '%.300s': %s", path, strerror(why));
    }
    peri__buffer text = {0};
    peri__buffer_print(&text, "{\"part\":");
    peri__buffer_quote(&text, name);
    peri__buffer_print(&text, ",\"bytes\":%lld}", (long long)file.bytes);
    if (status >= 0) status = text.status;
    if (status >= 0) snprintf(w->part, sizeof w->part, "%s", text.data);
    else unlink(path);
    peri__free(text.data);
    return status;
}

peri_status peri_checkpoint_writer_finish(peri_checkpoint_writer *w)
{
    PERI_NEED(w);
    PERI_TRY(end_files(w, "peri_checkpoint_writer_finish"));
    PERI_TRY(spend(w, peri__io_wait(w->io, w->last)));
    free_ring(w);
    PERI_TRY(spend(w, write_part(w)));
    w->finished = true;
    peri__manifest_fini(&w->m);
    return PERI_OK;
}

peri_status peri_checkpoint_writer_part(peri_checkpoint_writer *w, const char **out)
{
    PERI_NEED(w);
    PERI_NEED(out);
    if (!w->finished)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_writer_part: the writer is not finished (peri_checkpoint_writer_finish)");
    *out = w->part;
    return PERI_OK;
}
