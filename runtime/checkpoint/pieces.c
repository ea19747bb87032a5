/* SPDX-License-Identifier: Apache-2.0
 *
 * pieces.c: what a rectangle and one piece share. See pieces.h.
 *
 * It is read by blocks of whole rows (the first dimension; of rows that are longer than a block, by blocks of the next
 * dimension, and so on) into buffers, and copied from there to where the rectangle has it. Threads read the blocks that
 * come next meanwhile (file_jobs.h).
 */
#include "pieces.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    READ_THREADS = 4,
    HASHED = 1 << 17, /* bytes that are hashed and then copied: they fit into a cache */
    FAR = 4096        /* bytes between two runs of elements, below which the disk reads them anyway */
};

/* -- reading ------------------------------------------------------------------------------------------------------- */

static peri_status file_path(const peri_checkpoint *c, int32_t file, char path[PATH_MAX])
{
    return peri__path_join(c->folder, peri__manifest_text(&c->m, c->m.files[file].name), path);
}

/** Have file @file open, as usual or past the page cache (@direct). It must be as long as the manifest says. A
 *  safetensors file by itself is open already. */
static peri_status have_file(peri_checkpoint *c, int32_t file, bool direct, peri__io_file **out)
{
    char path[PATH_MAX];
    struct stat s;
    if (c->dir < 0) direct = false;
    if (c->file[direct] != file) {
        peri__io_file_free(c->open[direct]);
        c->open[direct] = NULL;
        c->file[direct] = -1;
        PERI_TRY(file_path(c, file, path));
        int fd = openat(c->dir, peri__manifest_text(&c->m, c->m.files[file].name),
                        O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
        int why = errno;
        if (fd < 0)
            return peri__fail(peri__status_of_errno(why),
                              "checkpoint: file '%.300s', which the manifest lists: %s", path, strerror(why));
        PERI_TRY(peri__io_file_new(fd, path, &c->open[direct]));
        const bool known = fstat(fd, &s) == 0;
        c->open[direct]->device = known ? (uint64_t)s.st_dev : 0;
        c->open[direct]->inode = known ? (uint64_t)s.st_ino : 0;
        if (!known || s.st_size != c->m.files[file].bytes)
            return peri__fail(PERI_EFORMAT, "checkpoint: file '%.300s' has %lld bytes, %lld are wanted", path,
                              (long long)s.st_size, (long long)c->m.files[file].bytes);
        if (direct) peri__io_file_direct(c->open[direct]);
        c->file[direct] = file;
    }
    *out = c->open[direct];
    return PERI_OK;
}

/** Bools are 0 or 1. @at: where they lie in the piece. */
static peri_status check_bools(const peri_checkpoint *c, const peri__stored_piece *p, const char *data, int64_t bytes,
                               int64_t at)
{
    char path[PATH_MAX];
    for (int64_t i = 0; i < bytes; i++) {
        if ((unsigned char)data[i] <= 1) continue;
        PERI_TRY(file_path(c, p->file, path));
        return peri__fail(PERI_EFORMAT, "checkpoint: file '%.300s', byte %lld: a bool that is neither 0 nor 1", path,
                          (long long)(p->begin + at + i));
    }
    return PERI_OK;
}

/** Bytes [@at, @at + @bytes) of a piece. */
peri_status peri__piece_get(peri_checkpoint *c, const peri__stored_piece *p, int32_t dtype, void *out, int64_t bytes,
                            int64_t at)
{
    peri__io_file *file;
    PERI_TRY(have_file(c, p->file, false, &file));
    PERI_TRY(peri__file_get(file->fd, file->path, out, bytes, p->begin + at));
    return dtype == PERI_BOOL ? check_bools(c, p, out, bytes, at) : PERI_OK;
}

peri_status peri__need_buffer(peri_checkpoint *c, int64_t bytes)
{
    if (c->tools->buffer_bytes >= bytes) return PERI_OK;
    peri__free(c->tools->buffer);
    c->tools->buffer_bytes = 0;
    c->tools->buffer = peri__alloc((size_t)bytes);
    if (!c->tools->buffer) return PERI_ENOMEM;
    c->tools->buffer_bytes = bytes;
    return PERI_OK;
}

peri_status peri__damaged(const peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p)
{
    char path[PATH_MAX];
    PERI_TRY(file_path(c, p->file, path));
    return peri__fail(
        PERI_EFORMAT,
        "checkpoint: file '%.200s' is damaged: bytes %lld to %lld, of tensor '%.150s', have another checksum", path,
        (long long)p->begin, (long long)(p->begin + p->bytes), peri__entry_name(&c->m, e));
}

/** What is done with a block of a piece: @data are the bytes from @at on. */
typedef peri_status block_fn(void *context, const char *data, int64_t bytes, int64_t at);

/** Bytes [@at, @at + @bytes) of a piece, in blocks of @step bytes (PERI__READ_BLOCK at most): the threads read those
 *  that come next and give them to @then (NULL: to nobody), while @f has one. They pass by the page cache, but for
 *  those that other processes read, too (@together), where there is no better way to read them once. @keep: @f has the
 *  bytes then; else it may have anything in their place. */
static peri_status each_block(peri_checkpoint *c, const peri__stored_piece *p, bool together, bool keep, int64_t at,
                              int64_t bytes, int64_t step, peri__io_then *then, block_fn *f, void *context)
{
    peri__tools *tools = c->tools;
    const int64_t n = peri__ceil_div(bytes, step);
    int64_t jobs[PERI__READ_AHEAD], given = 0;
    peri__io_file *file;
    if (!tools->ring && !(tools->ring = peri__io_pages(PERI__READ_RING))) return PERI_ENOMEM;
    if (!tools->io || !peri__io_has_threads(tools->io)) PERI_TRY(peri__io_new(READ_THREADS, &tools->io));
    if (together && !tools->sought && tools->processes > 1) {
        tools->sought = true;
        PERI_TRY(peri__shared_open(tools->meeting, tools->processes, &tools->shared));
    }
    peri__shared *shared = together && c->dir >= 0 ? tools->shared : NULL;
    PERI_TRY(have_file(c, p->file, !together || shared, &file));
    peri_status status = PERI_OK;
    for (int64_t k = 0; status >= 0 && k < n; k++) {
        for (; given < n && given < k + PERI__READ_AHEAD; given++) {
            const int64_t from = given * step;
            jobs[given % PERI__READ_AHEAD] =
                peri__io_read_shared(tools->io, shared, keep, file,
                                     tools->ring + given % PERI__READ_AHEAD * PERI__IO_HUGE,
                                     peri__min(step, bytes - from), p->begin + at + from, then, context);
        }
        status = peri__io_wait(tools->io, jobs[k % PERI__READ_AHEAD]);
        const char *data =
            tools->ring + k % PERI__READ_AHEAD * PERI__IO_HUGE + (p->begin + at + k * step) % PERI__IO_PAGE;
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
    PERI__NOT_AT_BORDER;
    const peri__entry *e;
    const peri__stored_piece *p;
    PERI_TRY(peri__piece_at(c, "peri_checkpoint_verify", index, piece, &e, &p));
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_verify: no memory for a hash");
    XXH3_64bits_reset(hash);
    const bool list = peri__lists_rows(peri__entry_name(&c->m, e)) && e->dtype == PERI_I64;
    verifying v = {.hash = hash, .list = list, .ordered = true, .before = -1};
    peri_status status = PERI_OK;
    if (p->bytes > HASHED) {
        status = each_block(c, p, false, true, 0, p->bytes, PERI__READ_BLOCK, NULL, verify_block, &v);
    } else if ((status = peri__need_buffer(c, HASHED)) >= 0) { /* small ones are many, and next to each other */
        status = peri__piece_get(c, p, PERI_U8, c->tools->buffer, p->bytes, 0);
        if (status >= 0) status = verify_block(&v, c->tools->buffer, p->bytes, 0);
    }
    if (status >= 0 && p->checked && XXH3_64bits_digest(hash) != p->checksum) status = peri__damaged(c, e, p);
    if (status >= 0 && !v.ordered)
        status = peri__fail(PERI_EFORMAT, "checkpoint '%.200s': list of rows '%.150s' is in disorder", c->folder,
                            peri__entry_name(&c->m, e));
    XXH3_freeState(hash);
    return status;
}

static peri_status verify_header(peri_checkpoint *c, int32_t file, XXH3_state_t *hash)
{
    const peri__file *f = &c->m.files[file];
    const peri__stored_piece header = {.file = file, .bytes = f->header};
    verifying v = {.hash = hash, .ordered = true};
    char path[PATH_MAX];
    XXH3_64bits_reset(hash);
    PERI_TRY(each_block(c, &header, false, true, 0, f->header, PERI__READ_BLOCK, NULL, verify_block, &v));
    if (XXH3_64bits_digest(hash) == f->checksum) return PERI_OK;
    PERI_TRY(file_path(c, file, path));
    return peri__fail(PERI_EFORMAT,
                      "checkpoint: file '%.200s' is damaged: bytes 0 to %lld, its header, have another checksum", path,
                      (long long)f->header);
}

peri_status peri_checkpoint_verify_headers(peri_checkpoint *c)
{
    PERI_NEED(c);
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_verify_headers: no memory for a hash");
    peri_status status = PERI_OK;
    for (int64_t f = 0; f < c->m.n_files && status >= 0; f++)
        if (c->m.files[f].header) status = verify_header(c, (int32_t)f, hash);
    XXH3_freeState(hash);
    return status;
}

static void copy_dim(const peri__copying *k, int32_t d, const char *from, char *to)
{
    from += (k->low[d] - k->from[d]) * k->from_stride[d];
    to += (k->low[d] - k->to[d]) * k->to_stride[d];
    if (d == k->ndim - 1) {
        memcpy(to, from, (size_t)((k->high[d] - k->low[d]) * k->size));
        return;
    }
    for (int64_t i = k->low[d]; i < k->high[d]; i++, from += k->from_stride[d], to += k->to_stride[d])
        copy_dim(k, d + 1, from, to);
}

/** The elements of @k from @from on to one memory of rectangle @want. */
static void put(const peri__target *to, peri__copying *k, const char *from, const peri__region *want, char *memory)
{
    memcpy(k->to, want->offset, sizeof k->to);
    peri__strides(to->ndim, want->size, to->size, k->to_stride);
    copy_dim(k, 0, from, memory);
}

/** The same to all memories of a target. */
static void put_all(const peri__target *to, peri__copying *k, const char *from)
{
    if (!to->shares) {
        put(to, k, from, &to->want, to->memory);
        return;
    }
    for (int64_t i = 0; i < to->n_shares; i++) {
        const peri__region *want = &to->shares[i].want;
        peri__copying own = *k;
        bool some = true;
        for (int32_t d = 0; d < to->ndim; d++) {
            own.low[d] = peri__max(k->low[d], want->offset[d]);
            own.high[d] = peri__min(k->high[d], want->offset[d] + want->size[d]);
            some = some && own.low[d] < own.high[d];
        }
        if (some) put(to, &own, from, want, to->shares[i].memory);
    }
}

/** The elements of @k from @from on to the target. @pack: memory for as many. */
peri_status peri__deliver(const peri__target *to, peri__copying *k, const char *from, char *pack)
{
    int64_t sizes[PERI_MAX_DIMS];
    if (to->memory) {
        put_all(to, k, from);
        return PERI_OK;
    }
    for (int32_t d = 0; d < to->ndim; d++) sizes[d] = k->high[d] - k->low[d];
    memcpy(k->to, k->low, sizeof k->to);
    peri__strides(to->ndim, sizes, to->size, k->to_stride);
    copy_dim(k, 0, from, pack);
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

/** What the rectangle and a piece share, row by row: the columns lie far apart in the file, so that only they are
 *  read. */
static peri_status read_runs(peri_checkpoint *c, const peri__stored_piece *p, const peri__region *has,
                             const peri__target *to, peri__copying *k)
{
    const int64_t first = k->low[0], past = k->high[0], run = (k->high[1] - k->low[1]) * to->size;
    PERI_TRY(peri__need_buffer(c, 2 * run));
    char *buffer = c->tools->buffer;
    for (int64_t row = first; row < past; row++) {
        const int64_t at = (row - has->offset[0]) * has->size[1] + k->low[1] - has->offset[1];
        PERI_TRY(peri__piece_get(c, p, to->dtype, buffer, run, at * to->size));
        k->low[0] = k->from[0] = row;
        k->high[0] = row + 1;
        k->from[1] = k->low[1];
        k->from_stride[0] = run;
        k->from_stride[1] = to->size;
        PERI_TRY(peri__deliver(to, k, buffer, buffer + run));
    }
    return PERI_OK;
}

/** Reading what a rectangle and a piece share. */
typedef struct reading {
    peri_checkpoint *c;
    const peri__stored_piece *piece;
    const peri__target *to;
    peri__copying k;                     /* of the block that is being copied: from[] is where its memory begins */
    int64_t offset[PERI_MAX_DIMS]; /* of the piece */
    XXH3_state_t *hash;            /* NULL: it is not compared with its checksum */
    int32_t dimension;             /* that blocks are cut in; of those before it one index at a time is read */
    bool straight;                 /* the target's memory has the bytes in the same order */
    bool laid;                     /* the threads that read put blocks into the target's memory */
    bool together;                 /* other ranks will probably read these bytes, too (is_shared) */
} reading;

/** The block of @bytes from @at on, in the terms of q->k: whole rows of dimension q->dimension. */
static peri__copying block_at(const reading *q, int64_t bytes, int64_t at)
{
    const int32_t d = q->dimension;
    peri__copying k = q->k;
    k.low[d] = k.from[d] = q->offset[d] + (d ? at % k.from_stride[d - 1] : at) / k.from_stride[d];
    k.high[d] = k.low[d] + bytes / k.from_stride[d];
    return k;
}

/** Copy a block to where it belongs in the target's memory. The block is whole rows of dimension q->dimension or, if
 *  q->straight, any bytes; it begins at @at in the file. Several threads call this at once, for blocks of their own. */
static void lay(const void *context, const char *data, int64_t bytes, int64_t at)
{
    const reading *q = context;
    const peri__target *to = q->to;
    at -= q->piece->begin;
    if (q->straight) {
        char *out = to->memory + at + (q->offset[0] - to->want.offset[0]) * q->k.from_stride[0];
        if (out != data) memcpy(out, data, (size_t)bytes);
        return;
    }
    peri__copying k = block_at(q, bytes, at);
    put_all(to, &k, data);
}

/** Take a block that was read, in the thread that asked for it: add it to the checksum, refuse bytes that are no bools,
 *  and bring it to the target: by its function if the target is no memory, else by copying, unless a reading thread has
 *  done that already (q->laid). */
static peri_status accept(void *context, const char *data, int64_t bytes, int64_t at)
{
    reading *q = context;
    const peri__target *to = q->to;
    if (q->hash) XXH3_64bits_update(q->hash, data, (size_t)bytes);
    if (to->dtype == PERI_BOOL) PERI_TRY(check_bools(q->c, q->piece, data, bytes, at));
    if (!to->memory) {
        peri__copying k = block_at(q, bytes, at);
        return peri__deliver(to, &k, data, q->c->tools->buffer + HASHED);
    }
    if (!q->laid) lay(q, data, bytes, q->piece->begin + at);
    return PERI_OK;
}

/** The rows of dimension @d that both have; of the dimensions before it one index is chosen, whose bytes begin at @at
 *  in the piece. */
static peri_status read_rows(reading *q, int32_t d, int64_t at)
{
    const int64_t row = q->k.from_stride[d], low = q->k.low[d], high = q->k.high[d];
    const int64_t from = at + (low - q->offset[d]) * row, bytes = (high - low) * row;
    peri_status status = PERI_OK;
    q->dimension = d;
    if (row > PERI__READ_BLOCK && d + 1 < q->k.ndim && !q->straight) {
        for (int64_t r = low; status >= 0 && r < high; r++) {
            q->k.low[d] = q->k.from[d] = r;
            q->k.high[d] = r + 1;
            status = read_rows(q, d + 1, at + (r - q->offset[d]) * row);
        }
    } else if (bytes > HASHED) {
        q->laid = q->to->memory && q->to->dtype != PERI_BOOL;
        const int64_t step = q->straight ? PERI__READ_BLOCK : PERI__READ_BLOCK / row * row;
        status = each_block(q->c, q->piece, q->together, q->hash || !q->laid, from, bytes, step, q->laid ? lay : NULL,
                            accept, q);
        q->laid = false;
    } else {
        char *into = q->straight ? q->to->memory + (low - q->to->want.offset[0]) * row : q->c->tools->buffer;
        status = peri__piece_get(q->c, q->piece, q->to->dtype, into, bytes, from);
        if (status >= 0) status = accept(q, into, bytes, from);
    }
    q->k.low[d] = low;
    q->k.high[d] = high;
    return status;
}

/** Whether other ranks will probably read the bytes of @k, too: those that have the other columns of these rows. So
 *  that the disk gives them once to all ranks of a machine, each block is read by one of them, for all
 *  (peri_checkpoint_share), or through the page cache: who is behind finds it there and comes up with who is in
 *  front. */
static bool is_shared(const peri__region *has, const peri__target *to, const peri__copying *k)
{
    bool some_columns = to->want.columns != has->columns || to->want.column != has->column;
    for (int32_t d = 1; d < k->ndim; d++) some_columns = some_columns || k->high[d] - k->low[d] != has->size[d];
    return some_columns;
}

/** What the rectangle and piece @p share. A piece that is read as a whole is compared with its checksum. */
peri_status peri__read_piece(peri_checkpoint *c, const peri__entry *e, const peri__stored_piece *p,
                             const peri__target *to)
{
    peri__region has;
    reading q = {.c = c, .piece = p, .to = to, .k = {.ndim = to->ndim, .size = to->size}};
    peri__copying *k = &q.k;
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
    peri__strides(k->ndim, has.size, to->size, k->from_stride);
    const int64_t row = k->from_stride[0];
    if (k->ndim == 2 && row <= PERI__READ_BLOCK && row - (k->high[1] - k->low[1]) * to->size > FAR)
        return read_runs(c, p, &has, to, k);
    PERI_TRY(peri__need_buffer(c, HASHED + PERI__READ_BLOCK));
    q.hash = whole && p->checked ? XXH3_createState() : NULL;
    if (whole && p->checked && !q.hash) return peri__fail(PERI_ENOMEM, "peri_checkpoint_read: no memory for a hash");
    if (q.hash) XXH3_64bits_reset(q.hash);
    q.straight = full_rows && to->memory && !to->shares;
    q.together = is_shared(&has, to, k) || (to->want.alike && c->tools->processes > 1);
    peri_status status = read_rows(&q, 0, 0);
    if (status >= 0 && q.hash && XXH3_64bits_digest(q.hash) != p->checksum) status = peri__damaged(c, e, p);
    XXH3_freeState(q.hash);
    return status;
}
