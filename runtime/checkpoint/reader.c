/* SPDX-License-Identifier: Apache-2.0
 *
 * reader.c: opening checkpoints, and reading rectangles of tensors from the pieces that they meet.
 *
 * What a rectangle and a piece share is read by blocks of whole rows (the first dimension; of rows that are longer than a block, by blocks
 * of the next dimension, and so on) into buffers, and copied from there to where the rectangle has it. Threads read the blocks that come
 * next meanwhile (io.h).
 */
#include "../tensor/internal.h"
#include "io.h"
#include "manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

struct peri_checkpoint {
    peri__manifest m;
    char *folder; /* its path, for errors */
    int dir;      /* The folder, open and locked, so that nobody removes it. Files are opened in it and not by the path, which may name the
                   * checkpoint that replaced this one. -1: a single safetensors file. */
    /* The files that were read last: [0] as usual, [1] past the page cache. Their numbers; -1: none. */
    peri__io_file *open[2];
    int32_t file[2];
    peri__io *io;       /* NULL until something is read that is larger than a block */
    char *ring, *block; /* memory of blocks, and its first page */
    char *buffer;       /* of the larger of PERI__IO_BLOCK and what a run of elements needed */
    int64_t buffer_bytes;
};

enum {
    READ_BLOCK = 2 << 20, /* bytes that are read at once */
    READ_AHEAD = 8,       /* blocks */
    READ_THREADS = 4,
    HASHED = 1 << 17, /* bytes that are hashed and then copied: they fit into a cache */
    FAR = 4096        /* bytes between two runs of elements, below which the disk reads them anyway */
};

const peri__manifest *peri__checkpoint_manifest(const peri_checkpoint *c) { return &c->m; }
int peri__checkpoint_folder(const peri_checkpoint *c) { return c->dir; }

/* -- opening --------------------------------------------------------------------------------------------------------------------------- */

void peri_checkpoint_release(peri_checkpoint *c)
{
    if (!c) return;
    peri__io_release(c->io);
    for (int k = 0; k < 2; k++) peri__io_file_free(c->open[k]);
    if (c->dir >= 0) close(c->dir);
    peri__manifest_fini(&c->m);
    peri__free(c->folder);
    peri__free(c->buffer);
    peri__free(c->ring);
    peri__free(c);
    peri__object_count(-1);
}

/** Let nobody remove the open folder. Whoever saves or removes has it locked for a moment, which is waited for, at most a second. On file
 *  systems without locks it may be removed, which reading tells. */
static void lock_shared(int dir)
{
    const struct timespec pause = {.tv_nsec = 5 * 1000 * 1000};
    for (int tries = 0; tries < 200 && flock(dir, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK; tries++) nanosleep(&pause, NULL);
}

/** Open and lock folder @path, and have its manifest in memory. The path may get another folder at any moment: then that one is opened. */
static peri_status load_manifest(peri_checkpoint *c, const char *path, const char *what, char **text, int64_t *bytes)
{
    for (;;) {
        if ((c->dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) {
            int why = errno;
            return peri__fail(why == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "%s: %s", what, strerror(why));
        }
        lock_shared(c->dir);
        peri_status status = peri__file_load(c->dir, path, PERI__MANIFEST, PERI__CHECKPOINT_MOST, text, bytes);
        if (status != PERI_ENOTFOUND) return status;
        struct stat opened, named;
        bool there = stat(path, &named) == 0;
        if (there && fstat(c->dir, &opened) == 0 && named.st_dev == opened.st_dev && named.st_ino == opened.st_ino)
            return peri__fail(PERI_EFORMAT, "%s: it has no " PERI__MANIFEST ": it is no checkpoint, or one that was not finished", what);
        if (!there) return peri__fail(PERI_ENOTFOUND, "%s: it was removed", what);
        close(c->dir);
    }
}

/** All files that the manifest lists are there, with the bytes that it says. */
static peri_status check_files(const peri_checkpoint *c, const char *what)
{
    for (int64_t f = 0; f < c->m.n_files; f++) {
        const char *name = peri__manifest_text(&c->m, c->m.files[f].name);
        struct stat s;
        if (fstatat(c->dir, name, &s, AT_SYMLINK_NOFOLLOW) != 0) {
            int why = errno;
            return peri__fail(why == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "%s: file '%.150s', which its manifest lists: %s", what, name,
                              strerror(why));
        }
        if (!S_ISREG(s.st_mode)) return peri__fail(PERI_EFORMAT, "%s: '%.150s' is no regular file", what, name);
        if (s.st_size != c->m.files[f].bytes)
            return peri__fail(PERI_EFORMAT, "%s: file '%.150s' has %lld bytes, %lld are wanted", what, name, (long long)s.st_size,
                              (long long)c->m.files[f].bytes);
    }
    return PERI_OK;
}

static peri_status open_folder(peri_checkpoint *c, const char *path, const char *what)
{
    char *text;
    int64_t bytes;
    if (!(c->folder = peri__strdup(path))) return PERI_ENOMEM;
    PERI_TRY(load_manifest(c, path, what, &text, &bytes));
    peri_status status = peri__manifest_parse(&c->m, text, bytes, false, what);
    peri__free(text);
    if (status >= 0) status = peri__manifest_settle(&c->m, what);
    return status < 0 ? status : check_files(c, what);
}

/** A safetensors file: 8 bytes, the header that they count, data. */
static peri_status open_file(peri_checkpoint *c, const char *path, const char *what)
{
    unsigned char count[8];
    struct stat s;
    uint64_t bytes = 0;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!(c->folder = peri__strdup(slash ? path : "."))) return PERI_ENOMEM;
    if (slash) c->folder[peri__max(slash - path, 1)] = 0; /* a file of the root folder keeps its '/' */
    /* It stays open as file 0: what has its name later is another file. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int why = errno;
    if (fd < 0) return peri__fail(why == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "%s: %s", what, strerror(why));
    PERI_TRY(peri__io_file_new(fd, path, &c->open[0]));
    if (fstat(fd, &s) != 0) return peri__fail(PERI_EIO, "%s: it cannot be read", what);
    if (!S_ISREG(s.st_mode)) return peri__fail(PERI_EFORMAT, "%s: it is neither a folder nor a regular file", what);
    const int64_t file_bytes = s.st_size;
    c->file[0] = 0;
    peri_status status = peri__file_get(fd, path, count, 8, 0);
    for (int i = 0; i < 8; i++) bytes |= (uint64_t)count[i] << 8 * i;
    if (status >= 0 && (bytes > (uint64_t)file_bytes - 8 || bytes > PERI__HEADER_MOST))
        status = peri__fail(PERI_EFORMAT, "%s: no safetensors file: its header would have %llu bytes, the file has %lld", what,
                            (unsigned long long)bytes, (long long)file_bytes);
    char *header = status < 0 ? NULL : peri__alloc((size_t)bytes + 1);
    if (status >= 0 && !header) status = PERI_ENOMEM;
    if (status >= 0) status = peri__file_get(fd, path, header, (int64_t)bytes, 8);
    if (status >= 0) status = peri__safetensors_parse(&c->m, name, file_bytes, header, (int64_t)bytes, what);
    if (status >= 0) status = peri__manifest_settle(&c->m, what);
    peri__free(header);
    return status;
}

peri_status peri_checkpoint_open(const char *path, peri_checkpoint **out)
{
    char what[PERI_MESSAGE_MAX];
    struct stat s;
    PERI_NEED(path);
    PERI_NEED(out);
    snprintf(what, sizeof what, "checkpoint '%.300s'", path);
    if (stat(path, &s) != 0) {
        int why = errno;
        return peri__fail(why == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "%s: %s", what, strerror(why));
    }
    peri_checkpoint *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    peri__object_count(1);
    c->file[0] = c->file[1] = c->dir = -1;
    peri_status status = S_ISDIR(s.st_mode) ? open_folder(c, path, what) : open_file(c, path, what);
    if (status < 0) peri_checkpoint_release(c);
    else *out = c;
    if (status != PERI_EINVAL && status != PERI_EMISMATCH) return status;
    snprintf(what, sizeof what, "%s", peri_error_message()); /* of what the file says: it is the file that is wrong, not the call */
    return peri__fail(PERI_EFORMAT, "%s", what);
}

bool peri__checkpoint_alone(const peri_checkpoint *c)
{
    return c->dir < 0 || flock(c->dir, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/* -- what is in it --------------------------------------------------------------------------------------------------------------------- */

int64_t peri_checkpoint_count(const peri_checkpoint *c) { return c ? c->m.n_entries : 0; }
const char *peri_checkpoint_digest(const peri_checkpoint *c) { return c ? c->m.digest : ""; }
const char *peri_checkpoint_parent(const peri_checkpoint *c) { return c ? c->m.parent : ""; }
const char *peri_checkpoint_values(const peri_checkpoint *c) { return c && c->m.values ? c->m.values : "{}"; }

static peri_status entry_at(const peri_checkpoint *c, const char *function, int64_t index, const peri__entry **out)
{
    if (!c) return peri__fail(PERI_EINVAL, "%s: checkpoint is missing", function);
    if (index < 0 || index >= c->m.n_entries)
        return peri__fail(PERI_EINVAL, "%s: tensor %lld, allowed: 0 to %lld", function, (long long)index, (long long)c->m.n_entries - 1);
    *out = &c->m.entries[index];
    return PERI_OK;
}

peri_status peri_checkpoint_tensor_at(const peri_checkpoint *c, int64_t index, peri_checkpoint_tensor *out)
{
    const peri__entry *e;
    PERI_NEED(out);
    PERI_TRY(entry_at(c, "peri_checkpoint_tensor_at", index, &e));
    *out = (peri_checkpoint_tensor){.name = peri__entry_name(&c->m, e), .dtype = e->dtype, .ndim = e->ndim, .pieces = e->n_pieces};
    memcpy(out->shape, peri__entry_shape(&c->m, e), (size_t)e->ndim * sizeof *out->shape);
    return PERI_OK;
}

int64_t peri_checkpoint_find(const peri_checkpoint *c, const char *name)
{
    int64_t low = 0, high = c && name ? c->m.n_entries : 0;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        int order = strcmp(peri__entry_name(&c->m, &c->m.entries[middle]), name);
        if (order == 0) return middle;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

static peri_status piece_at(const peri_checkpoint *c, const char *function, int64_t index, int64_t piece, const peri__entry **e,
                            const peri__piece **p)
{
    PERI_TRY(entry_at(c, function, index, e));
    if (piece < 0 || piece >= (*e)->n_pieces)
        return peri__fail(PERI_EINVAL, "%s: piece %lld of '%.200s', allowed: 0 to %lld", function, (long long)piece,
                          peri__entry_name(&c->m, *e), (long long)(*e)->n_pieces - 1);
    *p = &c->m.pieces[(*e)->first_piece + piece];
    return PERI_OK;
}

peri_status peri_checkpoint_piece(const peri_checkpoint *c, int64_t index, int64_t piece, peri_checkpoint_region *region,
                                  peri_checkpoint_place *place)
{
    const peri__entry *e;
    const peri__piece *p;
    PERI_TRY(piece_at(c, "peri_checkpoint_piece", index, piece, &e, &p));
    if (region) peri__piece_region(&c->m, e, p, region);
    if (place)
        *place = (peri_checkpoint_place){.file = peri__manifest_text(&c->m, c->m.files[p->file].name),
                                         .begin = p->begin,
                                         .bytes = p->bytes,
                                         .checksum = p->checksum,
                                         .checked = p->checked};
    return PERI_OK;
}

/* -- reading --------------------------------------------------------------------------------------------------------------------------- */

static peri_status path_of(const peri_checkpoint *c, int32_t file, char path[PATH_MAX])
{
    return peri__path_join(c->folder, peri__manifest_text(&c->m, c->m.files[file].name), path);
}

/** Have file @file open, as usual or past the page cache (@direct). It must be as long as the manifest says. A safetensors file by itself
 *  is open already. */
static peri_status have_file(peri_checkpoint *c, int32_t file, bool direct, peri__io_file **out)
{
    char path[PATH_MAX];
    struct stat s;
    if (c->dir < 0) direct = false;
    if (c->file[direct] != file) {
        peri__io_file_free(c->open[direct]);
        c->open[direct] = NULL;
        c->file[direct] = -1;
        PERI_TRY(path_of(c, file, path));
        int fd = openat(c->dir, peri__manifest_text(&c->m, c->m.files[file].name), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
        int why = errno;
        if (fd < 0)
            return peri__fail(why == ENOENT ? PERI_ENOTFOUND : PERI_EIO, "checkpoint: file '%.300s', which the manifest lists: %s", path,
                              strerror(why));
        PERI_TRY(peri__io_file_new(fd, path, &c->open[direct]));
        if (fstat(fd, &s) != 0 || s.st_size != c->m.files[file].bytes)
            return peri__fail(PERI_EFORMAT, "checkpoint: file '%.300s' has %lld bytes, %lld are wanted", path, (long long)s.st_size,
                              (long long)c->m.files[file].bytes);
        if (direct) peri__io_file_direct(c->open[direct]);
        c->file[direct] = file;
    }
    *out = c->open[direct];
    return PERI_OK;
}

/** Bools are 0 or 1. @at: where they lie in the piece. */
static peri_status check_bools(const peri_checkpoint *c, const peri__piece *p, const char *data, int64_t bytes, int64_t at)
{
    char path[PATH_MAX];
    for (int64_t i = 0; i < bytes; i++) {
        if ((unsigned char)data[i] <= 1) continue;
        PERI_TRY(path_of(c, p->file, path));
        return peri__fail(PERI_EFORMAT, "checkpoint: file '%.300s', byte %lld: a bool that is neither 0 nor 1", path,
                          (long long)(p->begin + at + i));
    }
    return PERI_OK;
}

/** Bytes [@at, @at + @bytes) of a piece. */
static peri_status get(peri_checkpoint *c, const peri__piece *p, int32_t dtype, void *out, int64_t bytes, int64_t at)
{
    peri__io_file *file;
    PERI_TRY(have_file(c, p->file, false, &file));
    PERI_TRY(peri__file_get(file->fd, file->path, out, bytes, p->begin + at));
    return dtype == PERI_BOOL ? check_bools(c, p, out, bytes, at) : PERI_OK;
}

static peri_status need_buffer(peri_checkpoint *c, int64_t bytes)
{
    if (c->buffer_bytes >= bytes) return PERI_OK;
    peri__free(c->buffer);
    c->buffer_bytes = 0;
    c->buffer = peri__alloc((size_t)bytes);
    if (!c->buffer) return PERI_ENOMEM;
    c->buffer_bytes = bytes;
    return PERI_OK;
}

static peri_status damaged(const peri_checkpoint *c, const peri__entry *e, const peri__piece *p)
{
    char path[PATH_MAX];
    PERI_TRY(path_of(c, p->file, path));
    return peri__fail(PERI_EFORMAT, "checkpoint: file '%.200s' is damaged: bytes %lld to %lld, of tensor '%.150s', have another checksum",
                      path, (long long)p->begin, (long long)(p->begin + p->bytes), peri__entry_name(&c->m, e));
}

/** What is done with a block of a piece: @data are the bytes from @at on. */
typedef peri_status block_fn(void *context, const char *data, int64_t bytes, int64_t at);

/** Bytes [@at, @at + @bytes) of a piece, in blocks of @step bytes (READ_BLOCK at most): the threads read those that come next while @f has
 *  one. @direct: past the page cache. */
static peri_status each_block(peri_checkpoint *c, const peri__piece *p, int64_t at, int64_t bytes, int64_t step, bool direct, block_fn *f,
                              void *context)
{
    const int64_t room = READ_BLOCK + 2 * PERI__IO_PAGE, n = peri__ceil_div(bytes, step);
    int64_t jobs[READ_AHEAD], given = 0;
    peri__io_file *file;
    if (!c->ring && !(c->block = peri__io_pages(READ_AHEAD * room, &c->ring))) return PERI_ENOMEM;
    if (!c->io) PERI_TRY(peri__io_new(READ_THREADS, &c->io));
    PERI_TRY(have_file(c, p->file, direct, &file));
    peri_status status = PERI_OK;
    for (int64_t k = 0; status >= 0 && k < n; k++) {
        for (; given < n && given < k + READ_AHEAD; given++) {
            const int64_t from = given * step;
            jobs[given % READ_AHEAD] =
                peri__io_read(c->io, file, c->block + given % READ_AHEAD * room, peri__min(step, bytes - from), p->begin + at + from);
        }
        status = peri__io_wait(c->io, jobs[k % READ_AHEAD]);
        const char *data = c->block + k % READ_AHEAD * room + (p->begin + at + k * step) % PERI__IO_PAGE;
        if (status >= 0) status = f(context, data, peri__min(step, bytes - k * step), at + k * step);
    }
    if (status < 0) peri__io_clear(c->io);
    return status;
}

static peri_status hash_block(void *context, const char *data, int64_t bytes, int64_t at)
{
    (void)at;
    XXH3_64bits_update(context, data, (size_t)bytes);
    return PERI_OK;
}

peri_status peri_checkpoint_verify(peri_checkpoint *c, int64_t index, int64_t piece)
{
    const peri__entry *e;
    const peri__piece *p;
    PERI_TRY(piece_at(c, "peri_checkpoint_verify", index, piece, &e, &p));
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_verify: no memory for a hash");
    XXH3_64bits_reset(hash);
    peri_status status = each_block(c, p, 0, p->bytes, READ_BLOCK, true, hash_block, hash);
    if (status >= 0 && p->checked && XXH3_64bits_digest(hash) != p->checksum) status = damaged(c, e, p);
    XXH3_freeState(hash);
    return status;
}

/** Copying a rectangle between two memories that hold larger ones. All in elements of the tensor, strides in bytes. */
typedef struct copying {
    int32_t ndim;
    int64_t size;                                            /* bytes of an element */
    int64_t low[PERI_MAX_DIMS], high[PERI_MAX_DIMS];         /* what is copied */
    int64_t from[PERI_MAX_DIMS], from_stride[PERI_MAX_DIMS]; /* where the source's memory begins */
    int64_t to[PERI_MAX_DIMS], to_stride[PERI_MAX_DIMS];     /* where the destination's begins */
} copying;

static void copy_from(const copying *k, int32_t d, const char *from, char *to)
{
    from += (k->low[d] - k->from[d]) * k->from_stride[d];
    to += (k->low[d] - k->to[d]) * k->to_stride[d];
    if (d == k->ndim - 1) {
        memcpy(to, from, (size_t)((k->high[d] - k->low[d]) * k->size));
        return;
    }
    for (int64_t i = k->low[d]; i < k->high[d]; i++, from += k->from_stride[d], to += k->to_stride[d]) copy_from(k, d + 1, from, to);
}

static void strides(int32_t ndim, const int64_t *size, int64_t bytes, int64_t *out)
{
    for (int32_t d = ndim - 1; d >= 0; d--) {
        out[d] = bytes;
        bytes *= size[d];
    }
}

/** Where what is read goes: host memory that is laid out as the rectangle is, or a view of a tensor with the rectangle's shape. */
typedef struct target {
    peri_checkpoint_region want;
    int32_t ndim, dtype; /* ndim: at least 1 */
    int64_t size;        /* bytes of an element */
    char *memory;        /* NULL: into the view */
    peri_tensor *view;
} target;

/** The elements of @k from @from on to the target. @pack: memory for as many. */
static peri_status deliver(const target *to, copying *k, const char *from, char *pack)
{
    int64_t sizes[PERI_MAX_DIMS];
    if (to->memory) {
        memcpy(k->to, to->want.offset, sizeof k->to);
        strides(to->ndim, to->want.size, to->size, k->to_stride);
        copy_from(k, 0, from, to->memory);
        return PERI_OK;
    }
    for (int32_t d = 0; d < to->ndim; d++) sizes[d] = k->high[d] - k->low[d];
    memcpy(k->to, k->low, sizeof k->to);
    strides(to->ndim, sizes, to->size, k->to_stride);
    copy_from(k, 0, from, pack);
    peri_tensor *part = to->view;
    peri_tensor_retain(part);
    peri_status status = PERI_OK;
    for (int32_t d = 0; status >= 0 && d < to->ndim; d++) {
        peri_tensor *inner;
        status = peri_tensor_slice(part, d, k->low[d] - to->want.offset[d], k->high[d] - to->want.offset[d], 1, &inner);
        if (status < 0) break;
        peri_tensor_release(part);
        part = inner;
    }
    if (status >= 0) status = peri_tensor_write(part, pack, peri__volume(to->ndim, sizes) * to->size);
    peri_tensor_release(part);
    return status;
}

/** What the rectangle and a piece share, row by row: the columns lie far apart in the file, so that only they are read. */
static peri_status read_runs(peri_checkpoint *c, const peri__piece *p, const peri_checkpoint_region *has, const target *to, copying *k)
{
    const int64_t first = k->low[0], past = k->high[0], run = (k->high[1] - k->low[1]) * to->size;
    PERI_TRY(need_buffer(c, 2 * run));
    for (int64_t row = first; row < past; row++) {
        PERI_TRY(get(c, p, to->dtype, c->buffer, run, ((row - has->offset[0]) * has->size[1] + k->low[1] - has->offset[1]) * to->size));
        k->low[0] = k->from[0] = row;
        k->high[0] = row + 1;
        k->from[1] = k->low[1];
        k->from_stride[0] = run;
        k->from_stride[1] = to->size;
        PERI_TRY(deliver(to, k, c->buffer, c->buffer + run));
    }
    return PERI_OK;
}

/** Reading what a rectangle and a piece share. */
typedef struct reading {
    peri_checkpoint *c;
    const peri__piece *piece;
    const target *to;
    copying k;                     /* of the block that is being copied: from[] is where its memory begins */
    int64_t offset[PERI_MAX_DIMS]; /* of the piece */
    XXH3_state_t *hash;            /* NULL: it is not compared with its checksum */
    int32_t dimension;             /* that blocks are cut in; of those before it one index at a time is read */
    bool straight;                 /* the target's memory has the bytes in the same order */
    bool direct;                   /* past the page cache */
} reading;

/** A block of the piece, to where it belongs: whole rows of dimension q->dimension or, if q->straight, any bytes. */
static peri_status accept(void *context, const char *data, int64_t bytes, int64_t at)
{
    reading *q = context;
    const target *to = q->to;
    const int32_t d = q->dimension;
    const int64_t row = q->k.from_stride[d];
    if (to->dtype == PERI_BOOL) PERI_TRY(check_bools(q->c, q->piece, data, bytes, at));
    if (q->straight) {
        char *out = to->memory + at + (q->offset[0] - to->want.offset[0]) * q->k.from_stride[0];
        for (int64_t b = 0; b < bytes; b += HASHED) {
            const size_t n = (size_t)peri__min(HASHED, bytes - b);
            if (q->hash) XXH3_64bits_update(q->hash, data + b, n);
            if (out != data) memcpy(out + b, data + b, n);
        }
        return PERI_OK;
    }
    if (q->hash) XXH3_64bits_update(q->hash, data, (size_t)bytes);
    q->k.low[d] = q->k.from[d] = q->offset[d] + (d ? at % q->k.from_stride[d - 1] : at) / row;
    q->k.high[d] = q->k.low[d] + bytes / row;
    return deliver(to, &q->k, data, q->c->buffer + HASHED);
}

/** The rows of dimension @d that both have; of the dimensions before it one index is chosen, whose bytes begin at @at in the piece. */
static peri_status read_rows(reading *q, int32_t d, int64_t at)
{
    const int64_t row = q->k.from_stride[d], low = q->k.low[d], high = q->k.high[d];
    const int64_t from = at + (low - q->offset[d]) * row, bytes = (high - low) * row;
    peri_status status = PERI_OK;
    q->dimension = d;
    if (row > READ_BLOCK && d + 1 < q->k.ndim && !q->straight) {
        for (int64_t r = low; status >= 0 && r < high; r++) {
            q->k.low[d] = q->k.from[d] = r;
            q->k.high[d] = r + 1;
            status = read_rows(q, d + 1, at + (r - q->offset[d]) * row);
        }
    } else if (bytes > HASHED) {
        status = each_block(q->c, q->piece, from, bytes, q->straight ? READ_BLOCK : READ_BLOCK / row * row, q->direct, accept, q);
    } else {
        char *into = q->straight ? q->to->memory + (low - q->to->want.offset[0]) * row : q->c->buffer;
        status = get(q->c, q->piece, q->to->dtype, into, bytes, from);
        if (status >= 0) status = accept(q, into, bytes, from);
    }
    q->k.low[d] = low;
    q->k.high[d] = high;
    return status;
}

/** What the rectangle and piece @p share. A piece that is read as a whole is compared with its checksum. */
static peri_status read_piece(peri_checkpoint *c, const peri__entry *e, const peri__piece *p, const target *to)
{
    peri_checkpoint_region has;
    reading q = {.c = c, .piece = p, .to = to, .k = {.ndim = to->ndim, .size = to->size}};
    copying *k = &q.k;
    bool whole = true, full_rows = true;
    peri__piece_region(&c->m, e, p, &has);
    if (e->ndim == 0) has.size[0] = 1;
    for (int32_t d = 0; d < k->ndim; d++) {
        k->low[d] = peri__max(has.offset[d], to->want.offset[d]);
        k->high[d] = peri__min(has.offset[d] + has.size[d], to->want.offset[d] + to->want.size[d]);
        if (k->low[d] >= k->high[d]) return PERI_OK;
        whole = whole && k->high[d] - k->low[d] == has.size[d];
        full_rows = full_rows && (d == 0 || (has.offset[d] == to->want.offset[d] && has.size[d] == to->want.size[d]));
        k->from[d] = q.offset[d] = has.offset[d];
    }
    strides(k->ndim, has.size, to->size, k->from_stride);
    const int64_t row = k->from_stride[0];
    if (k->ndim == 2 && row <= READ_BLOCK && row - (k->high[1] - k->low[1]) * to->size > FAR) return read_runs(c, p, &has, to, k);
    PERI_TRY(need_buffer(c, HASHED + READ_BLOCK));
    q.hash = whole && p->checked ? XXH3_createState() : NULL;
    if (whole && p->checked && !q.hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_read: no memory for a hash");
    if (q.hash) XXH3_64bits_reset(q.hash);
    q.straight = full_rows && to->memory;
    q.direct = full_rows; /* of other rows somebody else reads other columns soon: the page cache keeps them */
    peri_status status = read_rows(&q, 0, 0);
    if (status >= 0 && q.hash && XXH3_64bits_digest(q.hash) != p->checksum) status = damaged(c, e, p);
    XXH3_freeState(q.hash);
    return status;
}

/* -- pieces of different columns ------------------------------------------------------------------------------------------------------- */

/** Pieces [first, past) of one set of columns, and how many of the rectangle's columns are among them. */
typedef struct group {
    int64_t first, past, share;
} group;

/** The next group behind piece @first; false: there is none. */
static bool next_group(const peri__manifest *m, const peri__entry *e, const peri_checkpoint_region *want, int64_t first, group *out)
{
    const int64_t stop = e->first_piece + e->n_pieces, at = 2 * e->ndim;
    if (first >= stop) return false;
    const int64_t *n = m->numbers + m->pieces[first].numbers + at;
    *out = (group){.first = first, .past = first + 1, .share = n[1] ? n[1] : 1};
    while (out->past < stop && memcmp(m->numbers + m->pieces[out->past].numbers + at, n, 2 * sizeof *n) == 0) out->past++;
    if (n[1] && want->columns)
        out->share = peri__max(0, peri__min(n[0] + n[1], want->column + want->columns) - peri__max(n[0], want->column));
    return true;
}

static peri_status read_group(peri_checkpoint *c, const peri__entry *e, const group *g, const target *to)
{
    for (int64_t k = g->first; k < g->past; k++) PERI_TRY(read_piece(c, e, &c->m.pieces[k], to));
    return PERI_OK;
}

static void add_scaled(double *sum, const char *values, int64_t n, int32_t dtype, double scale)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += scale * (dtype == PERI_F32 ? (double)((const float *)values)[i] : ((const double *)values)[i]);
}

/** The mean of several groups, weighted by their shares, for rows [row, row + n) of the rectangle; numbers that are not f32 or f64 must be
 *  equal. @memory: n rows of the rectangle twice; @sum: as many doubles. */
static peri_status mean_rows(peri_checkpoint *c, const peri__entry *e, const target *to, int64_t row, int64_t n, char *memory, double *sum)
{
    target part = *to;
    group g;
    int64_t shares = 0, elements;
    part.memory = memory;
    part.want.offset[0] += row;
    part.want.size[0] = n;
    elements = peri__volume(part.ndim, part.want.size);
    char *first = memory + elements * to->size;
    const bool number = e->dtype == PERI_F32 || e->dtype == PERI_F64;
    memset(sum, 0, (size_t)elements * sizeof *sum);
    for (int64_t k = e->first_piece; next_group(&c->m, e, &to->want, k, &g); k = g.past) {
        if (!g.share) continue;
        PERI_TRY(read_group(c, e, &g, &part));
        if (number) add_scaled(sum, memory, elements, e->dtype, (double)g.share);
        else if (!shares) memcpy(first, memory, (size_t)(elements * to->size));
        else if (memcmp(first, memory, (size_t)(elements * to->size)) != 0)
            return peri__fail(PERI_EMISMATCH,
                              "peri_checkpoint_read: tensor '%.200s': pieces of different columns differ, and %s has no mean",
                              peri__entry_name(&c->m, e), peri_dtype_name(e->dtype));
        shares += g.share;
    }
    for (int64_t i = 0; number && i < elements; i++) {
        const double mean = sum[i] / (double)shares;
        if (e->dtype == PERI_F32) ((float *)memory)[i] = (float)mean;
        else ((double *)memory)[i] = mean;
    }
    if (to->memory) {
        memcpy(to->memory + row * (elements / n) * to->size, memory, (size_t)(elements * to->size));
        return PERI_OK;
    }
    peri_tensor *rows;
    PERI_TRY(peri_tensor_slice(to->view, 0, row, row + n, 1, &rows));
    peri_status status = peri_tensor_write(rows, memory, elements * to->size);
    peri_tensor_release(rows);
    return status;
}

static peri_status read_mean(peri_checkpoint *c, const peri__entry *e, const target *to)
{
    const int64_t rows = to->want.size[0], width = peri__volume(to->ndim, to->want.size) / rows;
    const int64_t step = peri__max(1, peri__min(rows, (PERI__IO_BLOCK / 16) / width));
    double *sum = peri__alloc((size_t)(step * width) * sizeof *sum);
    char *memory = peri__alloc((size_t)(2 * step * width * to->size));
    peri_status status = sum && memory ? PERI_OK : PERI_ENOMEM;
    for (int64_t row = 0; status >= 0 && row < rows; row += step)
        status = mean_rows(c, e, to, row, peri__min(step, rows - row), memory, sum);
    peri__free(sum);
    peri__free(memory);
    return status;
}

/** By the groups that share columns with the rectangle. */
static peri_status read_all(peri_checkpoint *c, const peri__entry *e, const target *to)
{
    group g, only = {0};
    int64_t groups = 0;
    for (int64_t k = e->first_piece; next_group(&c->m, e, &to->want, k, &g); k = g.past)
        if (g.share) groups++, only = g;
    if (groups == 1) return read_group(c, e, &only, to);
    if (groups > 1) return read_mean(c, e, to);
    return peri__fail(PERI_EMISMATCH, "peri_checkpoint_read: tensor '%.200s': no piece has columns %lld to %lld",
                      peri__entry_name(&c->m, e), (long long)to->want.column, (long long)(to->want.column + to->want.columns));
}

/** The view of @out that has the rectangle's shape. */
static peri_status view_of(const target *to, const peri_tensor_desc *d, peri_tensor *out, peri_tensor **view)
{
    if (d->contiguous) return peri_tensor_reshape(out, to->ndim, to->want.size, view);
    if (d->ndim == to->ndim && memcmp(d->shape, to->want.size, (size_t)to->ndim * sizeof *d->shape) == 0) {
        peri_tensor_retain(out);
        *view = out;
        return PERI_OK;
    }
    return peri__fail(PERI_EINVAL, "peri_checkpoint_read: out is neither contiguous nor of the rectangle's shape");
}

peri_status peri_checkpoint_read(peri_checkpoint *c, int64_t index, const peri_checkpoint_region *region, peri_tensor *out)
{
    const peri__entry *e;
    peri_tensor_desc d;
    int64_t elements;
    char what[PERI_MESSAGE_MAX];
    PERI_NEED(region);
    PERI_NEED(out);
    PERI_TRY(entry_at(c, "peri_checkpoint_read", index, &e));
    snprintf(what, sizeof what, "peri_checkpoint_read: tensor '%.200s'", peri__entry_name(&c->m, e));
    PERI_TRY(peri__region_check(what, e->ndim, peri__entry_shape(&c->m, e), region, &elements));
    peri_tensor_describe(out, &d);
    if (d.dtype != e->dtype || d.numel != elements)
        return peri__fail(PERI_EINVAL, "%s: out has %lld elements of %s, wanted: %lld of %s", what, (long long)d.numel,
                          peri_dtype_name(d.dtype), (long long)elements, peri_dtype_name(e->dtype));
    if (elements == 0) return PERI_OK;
    target to = {.want = *region, .ndim = e->ndim ? e->ndim : 1, .dtype = e->dtype, .size = peri_dtype_size(e->dtype)};
    if (e->ndim == 0) to.want.offset[0] = 0, to.want.size[0] = 1;
    if (d.contiguous && peri__immediate(d.device)) {
        to.memory = peri__data(out);
        peri__changed(out);
        return read_all(c, e, &to);
    }
    const bool recording = peri_grad_enable(false);
    peri_status status = view_of(&to, &d, out, &to.view);
    if (status >= 0) status = read_all(c, e, &to);
    if (to.view) peri_tensor_release(to.view);
    peri_grad_enable(recording);
    return status;
}
