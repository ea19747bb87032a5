/* SPDX-License-Identifier: Apache-2.0
 *
 * reader.c: reading rectangles of tensors from the pieces that they meet.
 *
 * What a rectangle and a piece share is read by blocks of whole rows (the first dimension; of rows that are longer than a block, by blocks
 * of the next dimension, and so on) into buffers, and copied from there to where the rectangle has it. Threads read the blocks that come
 * next meanwhile (io.h). A piece of an increment that has some rows only is laid over what the parent has.
 */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    READ_BLOCK = PERI__IO_HUGE - 2 * PERI__IO_PAGE, /* bytes that are read at once */
    READ_THREADS = 4,
    HASHED = 1 << 17, /* bytes that are hashed and then copied: they fit into a cache */
    FAR = 4096        /* bytes between two runs of elements, below which the disk reads them anyway */
};

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
static peri_status check_bools(const peri_checkpoint *c, const peri__stored_piece *p, const char *data, int64_t bytes, int64_t at)
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
static peri_status get(peri_checkpoint *c, const peri__stored_piece *p, int32_t dtype, void *out, int64_t bytes, int64_t at)
{
    peri__io_file *file;
    PERI_TRY(have_file(c, p->file, false, &file));
    PERI_TRY(peri__file_get(file->fd, file->path, out, bytes, p->begin + at));
    return dtype == PERI_BOOL ? check_bools(c, p, out, bytes, at) : PERI_OK;
}

static peri_status need_buffer(peri_checkpoint *c, int64_t bytes)
{
    if (c->tools->buffer_bytes >= bytes) return PERI_OK;
    peri__free(c->tools->buffer);
    c->tools->buffer_bytes = 0;
    c->tools->buffer = peri__alloc((size_t)bytes);
    if (!c->tools->buffer) return PERI_ENOMEM;
    c->tools->buffer_bytes = bytes;
    return PERI_OK;
}

static peri_status damaged(const peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p)
{
    char path[PATH_MAX];
    PERI_TRY(path_of(c, p->file, path));
    return peri__fail(PERI_EFORMAT, "checkpoint: file '%.200s' is damaged: bytes %lld to %lld, of tensor '%.150s', have another checksum",
                      path, (long long)p->begin, (long long)(p->begin + p->bytes), peri__entry_name(&c->m, e));
}

/** What is done with a block of a piece: @data are the bytes from @at on. */
typedef peri_status block_fn(void *context, const char *data, int64_t bytes, int64_t at);

/** Bytes [@at, @at + @bytes) of a piece, in blocks of @step bytes (READ_BLOCK at most): the threads read those that come next, past the
 *  page cache, and give them to @then (NULL: to nobody), while @f has one. */
static peri_status each_block(peri_checkpoint *c, const peri__stored_piece *p, int64_t at, int64_t bytes, int64_t step, peri__io_then *then,
                              block_fn *f, void *context)
{
    peri__tools *tools = c->tools;
    const int64_t n = peri__ceil_div(bytes, step);
    int64_t jobs[PERI__READ_AHEAD], given = 0;
    peri__io_file *file;
    if (!tools->ring && !(tools->ring = peri__io_pages(PERI__READ_RING))) return PERI_ENOMEM;
    if (!tools->io) PERI_TRY(peri__io_new(READ_THREADS, &tools->io));
    PERI_TRY(have_file(c, p->file, true, &file));
    peri_status status = PERI_OK;
    for (int64_t k = 0; status >= 0 && k < n; k++) {
        for (; given < n && given < k + PERI__READ_AHEAD; given++) {
            const int64_t from = given * step;
            jobs[given % PERI__READ_AHEAD] =
                peri__io_read(tools->io, file, tools->ring + given % PERI__READ_AHEAD * PERI__IO_HUGE, peri__min(step, bytes - from),
                              p->begin + at + from, then, context);
        }
        status = peri__io_wait(tools->io, jobs[k % PERI__READ_AHEAD]);
        const char *data = tools->ring + k % PERI__READ_AHEAD * PERI__IO_HUGE + (p->begin + at + k * step) % PERI__IO_PAGE;
        if (status >= 0) status = f(context, data, peri__min(step, bytes - k * step), at + k * step);
    }
    if (status < 0) peri__io_clear(tools->io);
    return status;
}

/** What is verified: bytes by their checksum, and lists of rows by their order too. */
typedef struct verifying {
    XXH3_state_t *hash;
    bool list, ordered;
    int64_t before;
} verifying;

static peri_status verify_block(void *context, const char *data, int64_t bytes, int64_t at)
{
    verifying *v = context;
    (void)at;
    XXH3_64bits_update(v->hash, data, (size_t)bytes);
    for (int64_t i = 0, row; v->list && i + 8 <= bytes; i += 8, v->before = row) {
        memcpy(&row, data + i, 8);
        v->ordered = v->ordered && row > v->before;
    }
    return PERI_OK;
}

peri_status peri_checkpoint_verify(peri_checkpoint *c, int64_t index, int64_t piece)
{
    const peri__entry *e;
    const peri__stored_piece *p;
    PERI_TRY(peri__piece_at(c, "peri_checkpoint_verify", index, piece, &e, &p));
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_verify: no memory for a hash");
    XXH3_64bits_reset(hash);
    const bool list = peri__lists_rows(peri__entry_name(&c->m, e)) && e->dtype == PERI_I64;
    verifying v = {.hash = hash, .list = list, .ordered = true, .before = -1};
    peri_status status = PERI_OK;
    if (p->bytes > HASHED) status = each_block(c, p, 0, p->bytes, READ_BLOCK, NULL, verify_block, &v);
    else if ((status = need_buffer(c, HASHED)) >= 0) { /* small ones are many, and next to each other */
        status = get(c, p, PERI_U8, c->tools->buffer, p->bytes, 0);
        if (status >= 0) status = verify_block(&v, c->tools->buffer, p->bytes, 0);
    }
    if (status >= 0 && p->checked && XXH3_64bits_digest(hash) != p->checksum) status = damaged(c, e, p);
    if (status >= 0 && !v.ordered)
        status = peri__fail(PERI_EFORMAT, "checkpoint '%.200s': list of rows '%.150s' is in disorder", c->folder,
                            peri__entry_name(&c->m, e));
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
    peri__region want;
    int32_t ndim, dtype; /* ndim: at least 1 */
    int64_t size;        /* bytes of an element */
    char *memory;        /* NULL: into the view */
    peri_tensor *view;
    int64_t levels;      /* so many checkpoints of the chain are read; `memory` has what those below them have */
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
static peri_status read_runs(peri_checkpoint *c, const peri__stored_piece *p, const peri__region *has, const target *to, copying *k)
{
    const int64_t first = k->low[0], past = k->high[0], run = (k->high[1] - k->low[1]) * to->size;
    PERI_TRY(need_buffer(c, 2 * run));
    char *buffer = c->tools->buffer;
    for (int64_t row = first; row < past; row++) {
        PERI_TRY(get(c, p, to->dtype, buffer, run, ((row - has->offset[0]) * has->size[1] + k->low[1] - has->offset[1]) * to->size));
        k->low[0] = k->from[0] = row;
        k->high[0] = row + 1;
        k->from[1] = k->low[1];
        k->from_stride[0] = run;
        k->from_stride[1] = to->size;
        PERI_TRY(deliver(to, k, buffer, buffer + run));
    }
    return PERI_OK;
}

/** Reading what a rectangle and a piece share. */
typedef struct reading {
    peri_checkpoint *c;
    const peri__stored_piece *piece;
    const target *to;
    copying k;                     /* of the block that is being copied: from[] is where its memory begins */
    int64_t offset[PERI_MAX_DIMS]; /* of the piece */
    XXH3_state_t *hash;            /* NULL: it is not compared with its checksum */
    int32_t dimension;             /* that blocks are cut in; of those before it one index at a time is read */
    bool straight;                 /* the target's memory has the bytes in the same order */
    bool laid;                     /* the threads that read put blocks into the target's memory */
} reading;

/** The block of @bytes from @at on, in the terms of q->k: whole rows of dimension q->dimension. */
static copying block_at(const reading *q, int64_t bytes, int64_t at)
{
    const int32_t d = q->dimension;
    copying k = q->k;
    k.low[d] = k.from[d] = q->offset[d] + (d ? at % k.from_stride[d - 1] : at) / k.from_stride[d];
    k.high[d] = k.low[d] + bytes / k.from_stride[d];
    return k;
}

/** A block to where it belongs in the target's memory: whole rows of dimension q->dimension or, if q->straight, any bytes. @at: in the
 *  file. Several threads have blocks of their own. */
static void lay(const void *context, const char *data, int64_t bytes, int64_t at)
{
    const reading *q = context;
    const target *to = q->to;
    at -= q->piece->begin;
    if (q->straight) {
        char *out = to->memory + at + (q->offset[0] - to->want.offset[0]) * q->k.from_stride[0];
        if (out != data) memcpy(out, data, (size_t)bytes);
        return;
    }
    copying k = block_at(q, bytes, at);
    memcpy(k.to, to->want.offset, sizeof k.to);
    strides(to->ndim, to->want.size, to->size, k.to_stride);
    copy_from(&k, 0, data, to->memory);
}

/** What the owner does with a block: bools are checked before anything has them, and targets that are no memory get it. */
static peri_status accept(void *context, const char *data, int64_t bytes, int64_t at)
{
    reading *q = context;
    const target *to = q->to;
    if (q->hash) XXH3_64bits_update(q->hash, data, (size_t)bytes);
    if (to->dtype == PERI_BOOL) PERI_TRY(check_bools(q->c, q->piece, data, bytes, at));
    if (!to->memory) {
        copying k = block_at(q, bytes, at);
        return deliver(to, &k, data, q->c->tools->buffer + HASHED);
    }
    if (!q->laid) lay(q, data, bytes, q->piece->begin + at);
    return PERI_OK;
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
        q->laid = q->to->memory && q->to->dtype != PERI_BOOL;
        const int64_t step = q->straight ? READ_BLOCK : READ_BLOCK / row * row;
        status = each_block(q->c, q->piece, from, bytes, step, q->laid ? lay : NULL, accept, q);
        q->laid = false;
    } else {
        char *into = q->straight ? q->to->memory + (low - q->to->want.offset[0]) * row : q->c->tools->buffer;
        status = get(q->c, q->piece, q->to->dtype, into, bytes, from);
        if (status >= 0) status = accept(q, into, bytes, from);
    }
    q->k.low[d] = low;
    q->k.high[d] = high;
    return status;
}

/** What the rectangle and piece @p share. A piece that is read as a whole is compared with its checksum. */
static peri_status read_piece(peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p, const target *to)
{
    peri__region has;
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
    peri_status status = read_rows(&q, 0, 0);
    if (status >= 0 && q.hash && XXH3_64bits_digest(q.hash) != p->checksum) status = damaged(c, e, p);
    XXH3_freeState(q.hash);
    return status;
}

/* -- some rows ------------------------------------------------------------------------------------------------------------------------- */

/** Files of a parent are closed when they were read: chains may be long. */
static void close_files(peri_checkpoint *c)
{
    for (int k = 0; k < 2; k++) {
        peri__io_file_free(c->open[k]);
        c->open[k] = NULL;
        c->file[k] = -1;
    }
}

/** A piece of some rows. */
typedef struct listed {
    peri_checkpoint *c;
    const peri__entry *e;
    const peri__stored_piece *piece, *list; /* list: the piece that has their numbers */
    peri__region has;
    int64_t row, before; /* bytes of a row; the number before those that are read next, -1: unknown or none */
} listed;

/** Numbers [from, from + n) of the list: ascending, and rows of the piece. */
static peri_status list_numbers(listed *l, int64_t from, int64_t n, int64_t *out)
{
    PERI_TRY(get(l->c, l->list, PERI_I64, out, n * 8, from * 8));
    for (int64_t i = 0; i < n; i++) {
        const bool within = out[i] >= l->has.offset[0] && out[i] - l->has.offset[0] < l->has.size[0];
        if (within && out[i] > l->before) {
            l->before = out[i];
            continue;
        }
        return peri__fail(PERI_EFORMAT, "checkpoint '%.150s': the rows that it has of tensor '%.150s' %s: number %lld is %lld, allowed: "
                          "ascending, %lld to %lld", l->c->folder, peri__entry_name(&l->c->m, l->e),
                          within ? "are in disorder" : "are not those of its piece", (long long)(from + i), (long long)out[i],
                          (long long)l->has.offset[0], (long long)(l->has.offset[0] + l->has.size[0] - 1));
    }
    return PERI_OK;
}

/** The first number of the list that is @row or more. */
static peri_status list_find(listed *l, int64_t row, int64_t *out)
{
    int64_t low = 0, high = l->piece->listed;
    while (low < high) {
        int64_t middle = low + (high - low) / 2, number;
        l->before = -1;
        PERI_TRY(list_numbers(l, middle, 1, &number));
        if (number < row) low = middle + 1;
        else high = middle;
    }
    l->before = -1;
    *out = low;
    return PERI_OK;
}

/** What the rectangle and the listed rows of piece @p share, over what is there. A piece that is read as a whole is compared with its
 *  checksum, and so is its list. */
static peri_status lay_over(peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p, const target *to)
{
    enum { NUMBERS = 1024 };
    int64_t at, numbers[NUMBERS], n;
    listed l = {.c = c, .e = e, .piece = p};
    copying k = {.ndim = to->ndim, .size = to->size};
    bool whole = true;
    if (p->listed == 0) return PERI_OK;
    l.list = &c->m.pieces[peri__rows_entry(&c->m, p)->first_piece];
    peri__piece_region(&c->m, e, p, &l.has);
    for (int32_t d = 0; d < k.ndim; d++) {
        k.low[d] = peri__max(l.has.offset[d], to->want.offset[d]);
        k.high[d] = peri__min(l.has.offset[d] + l.has.size[d], to->want.offset[d] + to->want.size[d]);
        if (k.low[d] >= k.high[d]) return PERI_OK;
        whole = whole && k.high[d] - k.low[d] == l.has.size[d];
        k.from[d] = l.has.offset[d];
    }
    strides(k.ndim, l.has.size, to->size, k.from_stride);
    l.row = k.from_stride[0];
    const int64_t first = k.low[0], past = k.high[0], step = peri__max(1, peri__min(NUMBERS, READ_BLOCK / l.row));
    PERI_TRY(list_find(&l, first, &at));
    PERI_TRY(need_buffer(c, step * l.row));
    XXH3_state_t *hash = whole && p->checked ? XXH3_createState() : NULL, *list_hash = hash ? XXH3_createState() : NULL;
    peri_status status = whole && p->checked && !list_hash ? PERI_ENOMEM : PERI_OK;
    if (list_hash) XXH3_64bits_reset(hash), XXH3_64bits_reset(list_hash);
    for (bool more = true; status >= 0 && more && at < p->listed; at += n) {
        n = peri__min(step, p->listed - at);
        status = list_numbers(&l, at, n, numbers);
        while (status >= 0 && n > 0 && numbers[n - 1] >= past) n--, more = false;
        if (status >= 0 && n > 0) status = get(c, p, to->dtype, c->tools->buffer, n * l.row, at * l.row);
        if (status < 0 || n == 0) break;
        if (list_hash) {
            XXH3_64bits_update(list_hash, numbers, (size_t)n * 8);
            XXH3_64bits_update(hash, c->tools->buffer, (size_t)(n * l.row));
        }
        for (int64_t i = 0; status >= 0 && i < n; i++) {
            k.low[0] = k.from[0] = numbers[i];
            k.high[0] = numbers[i] + 1;
            status = deliver(to, &k, c->tools->buffer + i * l.row, NULL);
        }
    }
    if (status >= 0 && list_hash && XXH3_64bits_digest(list_hash) != l.list->checksum)
        status = damaged(c, peri__rows_entry(&c->m, p), l.list);
    if (status >= 0 && hash && XXH3_64bits_digest(hash) != p->checksum) status = damaged(c, e, p);
    XXH3_freeState(hash);
    XXH3_freeState(list_hash);
    return status;
}

/* -- pieces of different columns ------------------------------------------------------------------------------------------------------- */

/** Pieces [first, past) of one set of columns, and how many of the rectangle's columns are among them. */
typedef struct group {
    int64_t first, past, share;
} group;

/** The next group behind piece @first; false: there is none. */
static bool next_group(const peri__manifest *m, const peri__entry *e, const peri__region *want, int64_t first, group *out)
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

/** The group of @parent's pieces of a tensor that has the columns of piece @like of @c; pieces that lie over others lie over the same. */
static peri_status same_group(const peri_checkpoint *c, const peri__entry *e, int64_t like, const peri__entry **entry, group *out)
{
    const peri_checkpoint *parent = c->parent;
    const char *name = peri__entry_name(&c->m, e);
    const int64_t *columns = c->m.numbers + c->m.pieces[like].numbers + 2 * e->ndim;
    const peri__region any = {0};
    if (!parent)
        return peri__fail(PERI_EINVAL, "checkpoint '%.200s' is an increment and was opened alone: it has only some rows of tensor '%.150s'",
                          c->folder, name);
    *entry = peri__entry_named(&parent->m, name); /* there, and of the same form: check_parent in chain.c */
    for (int64_t k = (*entry)->first_piece; next_group(&parent->m, *entry, &any, k, out); k = out->past)
        if (memcmp(parent->m.numbers + parent->m.pieces[k].numbers + 2 * e->ndim, columns, 2 * sizeof *columns) == 0) return PERI_OK;
    return peri__fail(PERI_EFORMAT,
                      "checkpoint '%.150s': tensor '%.150s' has some rows of columns %lld to %lld; its parent '%.150s' is cut otherwise",
                      c->folder, name, (long long)columns[0], (long long)(columns[0] + columns[1]), parent->folder);
}

/** Some rows of the pieces: first what the parent has, then these. */
static peri_status read_group(peri_checkpoint *c, const peri__entry *e, const group *g, const target *to)
{
    peri_status status = PERI_OK;
    bool some = false;
    for (int64_t k = g->first; k < g->past && !some; k++) {
        const peri__entry *entry = NULL;
        group under;
        if (!c->m.pieces[k].rows) continue;
        some = true;
        if (to->levels == 1) continue;
        target below = *to;
        below.levels--;
        PERI_TRY(same_group(c, e, k, &entry, &under));
        PERI_TRY(read_group(c->parent, entry, &under, &below));
    }
    for (int64_t k = g->first; status >= 0 && k < g->past; k++) {
        const peri__stored_piece *p = &c->m.pieces[k];
        status = p->rows ? lay_over(c, e, p, to) : read_piece(c, e, p, to);
    }
    if (c->inner) close_files(c);
    return status;
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

/** Whether a group of pieces has some rows only. */
static bool has_lists(const peri_checkpoint *c, const group *g)
{
    for (int64_t k = g->first; k < g->past; k++)
        if (c->m.pieces[k].rows) return true;
    return false;
}

/** A group whose rows come from several checkpoints, into a view of a tensor that the host cannot write to: by blocks of rows. */
static peri_status read_blocks(peri_checkpoint *c, const peri__entry *e, const group *g, const target *to)
{
    const int64_t rows = to->want.size[0], row = peri__volume(to->ndim, to->want.size) / rows * to->size;
    const int64_t step = peri__max(1, peri__min(rows, PERI__IO_BLOCK / row));
    char *memory = peri__alloc((size_t)(step * row));
    peri_status status = memory ? PERI_OK : PERI_ENOMEM;
    for (int64_t r = 0; status >= 0 && r < rows; r += step) {
        target part = *to;
        peri_tensor *into;
        part.memory = memory;
        part.want.offset[0] += r;
        part.want.size[0] = peri__min(step, rows - r);
        status = read_group(c, e, g, &part);
        if (status >= 0) status = peri_tensor_slice(to->view, 0, r, r + part.want.size[0], 1, &into);
        if (status < 0) break;
        status = peri_tensor_write(into, memory, part.want.size[0] * row);
        peri_tensor_release(into);
    }
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
    if (groups == 1) return !to->memory && has_lists(c, &only) ? read_blocks(c, e, &only, to) : read_group(c, e, &only, to);
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

/** Rectangle @region of a tensor, all of it. */
static target target_of(const peri__entry *e, const peri__region *region)
{
    target to = {.want = *region, .ndim = e->ndim ? e->ndim : 1, .dtype = e->dtype, .size = peri_dtype_size(e->dtype), .levels = INT64_MAX};
    if (e->ndim == 0) to.want.offset[0] = 0, to.want.size[0] = 1;
    return to;
}

peri_status peri_checkpoint_read(peri_checkpoint *c, int64_t index, const peri_checkpoint_region *region, peri_tensor *out)
{
    peri__region r;
    const peri__entry *e;
    peri_tensor_desc d = {.size = sizeof d};
    int64_t elements;
    char what[PERI_MESSAGE_MAX];
    PERI_NEED(region);
    PERI_NEED(out);
    PERI_TRY(peri__entry_at(c, "peri_checkpoint_read", index, &e));
    snprintf(what, sizeof what, "peri_checkpoint_read: tensor '%.200s'", peri__entry_name(&c->m, e));
    PERI_TRY(peri__region_take(&r, region, __func__));
    PERI_TRY(peri__region_check(what, e->ndim, peri__entry_shape(&c->m, e), &r, &elements));
    peri_tensor_describe(out, &d);
    if (d.dtype != e->dtype || d.numel != elements)
        return peri__fail(PERI_EINVAL, "%s: out has %lld elements of %s, wanted: %lld of %s", what, (long long)d.numel,
                          peri_dtype_name(d.dtype), (long long)elements, peri_dtype_name(e->dtype));
    if (elements == 0) return PERI_OK;
    target to = target_of(e, &r);
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

peri_status peri__checkpoint_read_host(peri_checkpoint *c, int64_t index, const peri__region *region, void *out)
{
    const peri__entry *e = &c->m.entries[index];
    target to = target_of(e, region);
    to.memory = out;
    return read_all(c, e, &to);
}

/* -- what increments have ------------------------------------------------------------------------------------------------------------- */

peri_status peri_checkpoint_read_since(peri_checkpoint *c, int64_t level, int64_t index, const peri_checkpoint_region *region, void *out)
{
    peri__region r;
    const peri__entry *e;
    int64_t elements, groups = 0;
    char what[PERI_MESSAGE_MAX];
    group g;
    PERI_NEED(region);
    PERI_NEED(out);
    PERI_TRY(peri__entry_at(c, "peri_checkpoint_read_since", index, &e));
    if (level < -1 || level >= peri_checkpoint_levels(c))
        return peri__fail(PERI_EINVAL, "peri_checkpoint_read_since: level %lld, allowed: -1 to %lld", (long long)level,
                          (long long)peri_checkpoint_levels(c) - 1);
    snprintf(what, sizeof what, "peri_checkpoint_read_since: tensor '%.200s'", peri__entry_name(&c->m, e));
    PERI_TRY(peri__region_take(&r, region, __func__));
    PERI_TRY(peri__region_check(what, e->ndim, peri__entry_shape(&c->m, e), &r, &elements));
    if (elements == 0 || level == 0) return PERI_OK;
    target to = target_of(e, &r);
    to.memory = out;
    for (int64_t k = e->first_piece; next_group(&c->m, e, &to.want, k, &g); k = g.past) groups += g.share > 0;
    if (level > 0 && groups == 1) to.levels = level; /* else numbers of several pieces make one, and all of them are read */
    return read_all(c, e, &to);
}

peri_status peri_checkpoint_piece_rows(peri_checkpoint *c, int64_t index, int64_t piece, int64_t from, int64_t n, int64_t *rows,
                                       void *values)
{
    static const char f[] = "peri_checkpoint_piece_rows";
    const peri__entry *e;
    const peri__stored_piece *p;
    PERI_NEED(rows);
    PERI_NEED(values);
    PERI_TRY(peri__piece_at(c, f, index, piece, &e, &p));
    if (!p->rows)
        return peri__fail(PERI_EINVAL, "%s: piece %lld of tensor '%.200s' has all its rows; allowed: one with a list", f, (long long)piece,
                          peri__entry_name(&c->m, e));
    if (from < 0 || n < 0 || n > p->listed || from > p->listed - n)
        return peri__fail(PERI_EINVAL, "%s: %lld rows from number %lld on, allowed: within the %lld that piece %lld of tensor '%.150s' has",
                          f, (long long)n, (long long)from, (long long)p->listed, (long long)piece, peri__entry_name(&c->m, e));
    if (n == 0) return PERI_OK;
    listed l = {.c = c, .e = e, .piece = p, .before = -1};
    l.list = &c->m.pieces[peri__rows_entry(&c->m, p)->first_piece];
    peri__piece_region(&c->m, e, p, &l.has);
    l.row = p->bytes / p->listed;
    PERI_TRY(list_numbers(&l, from, n, rows));
    return get(c, p, e->dtype, values, n * l.row, from * l.row);
}

peri_status peri_checkpoint_verify_since(peri_checkpoint *c, int64_t level)
{
    PERI_NEED(c);
    for (; c && level != 0; c = c->parent, level--)
        for (int64_t i = 0; i < c->m.n_entries; i++)
            for (int64_t k = 0; k < c->m.entries[i].n_pieces; k++) PERI_TRY(peri_checkpoint_verify(c, i, k));
    return PERI_OK;
}
