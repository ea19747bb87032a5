/* SPDX-License-Identifier: Apache-2.0
 *
 * records.c: records between files, or the host's memory, and slots (stages), flushes, and access to ranges of rows.
 * See tier.h.
 */
#include "tier.h"

#include <errno.h>
#include <stdlib.h>

enum { MOST_REQUEST = 1 << 20, CHUNK_BYTES = 4 << 20, GRAIN = 64 };
enum { AHEAD = 16, PIN_GRAIN = 2048 }; /* pins ahead whose slots are fetched in advance; pins worth a thread */

/* -- stages -------------------------------------------------------------------------------------------------------- */

static peri_status grow_buffer(peri__tier *tier, peri_tensor **t, int64_t bytes)
{
    peri_tensor *fresh;
    PERI_TRY(peri_tensor_new(tier->tbe->device, PERI_U8, 1, &bytes, &fresh));
    peri__tbe_free_later(tier->tbe, t);
    *t = fresh;
    return PERI_OK;
}

peri_status peri__records_reserve(peri__tier *tier, peri__records *s, int64_t n, int64_t bytes)
{
    PERI_ASSERT(!s->job.queued && !s->job.failed);
    if (s->sent) PERI_TRY(peri_event_synchronize(s->sent));
    if (n > s->moves_capacity) {
        int64_t more = peri__max(n, s->moves_capacity + s->moves_capacity / 2);
        s->moves_capacity = 0;
        peri__free(s->moves);
        peri__free(s->requests);
        s->moves = peri__alloc(sizeof *s->moves * (size_t)more);
        s->requests = peri__alloc(sizeof *s->requests * (size_t)more);
        if (!s->moves || !s->requests) return PERI_ENOMEM;
        PERI_TRY(grow_buffer(tier, &s->moves_device, more * (int64_t)sizeof *s->moves));
        s->moves_capacity = more;
    }
    if (bytes > s->capacity) {
        int64_t more = peri__max(bytes, s->capacity + s->capacity / 2);
        s->capacity = 0;
        if (!tier->direct) {
            void *host = NULL;
            peri__host_free(tier->tbe->device, s->host, s->host_bytes);
            s->host = NULL;
            PERI_TRY(peri__host_alloc(tier->tbe->device, more, &host));
            s->host = host;
            s->host_bytes = more;
        }
        PERI_TRY(grow_buffer(tier, &s->device, more));
        if (tier->direct) s->host = peri__data(s->device);
        s->capacity = more;
    }
    s->n = 0;
    return PERI_OK;
}

void peri__records_fini(peri__tier *tier, peri__records *s)
{
    peri__row_io_wait(tier->io, &s->job);
    if (s->sent) (void)peri_event_synchronize(s->sent); /* a device that is lost uses nothing any more */
    peri__tbe_free_later(tier->tbe, &s->device);
    peri__tbe_free_later(tier->tbe, &s->moves_device);
    if (!tier->direct) peri__host_free(tier->tbe->device, s->host, s->host_bytes);
    peri_event_release(s->sent);
    peri__free(s->moves);
    peri__free(s->requests);
}

static int64_t record_bytes(const peri__tier *tier, int32_t table)
{
    return tier->tables[table].file->header.record_bytes;
}

static int by_row(const void *a, const void *b)
{
    const peri_k_cache_move *x = a, *y = b;
    if (x->table != y->table) return x->table < y->table ? -1 : 1;
    return x->row < y->row ? -1 : x->row > y->row;
}

/** Order the stage's moves by table and row, and give each its record. Its n, and the moves' tables and slots are set;
 *  it is reserved. */
static void records_order(peri__tier *tier, peri__records *s)
{
    bool ordered = true;
    for (int64_t i = 1; i < s->n && ordered; i++) ordered = by_row(&s->moves[i - 1], &s->moves[i]) <= 0;
    if (!ordered) qsort(s->moves, (size_t)s->n, sizeof *s->moves, by_row);
    s->bytes = 0;
    for (int64_t i = 0; i < s->n; i++) {
        s->moves[i].record = s->bytes;
        s->bytes += record_bytes(tier, s->moves[i].table);
    }
    PERI_ASSERT(s->bytes <= s->capacity);
}

/** Append the record of move @i to the job, in one request with the one before where they lie side by side. */
static void request(peri__tier *tier, peri__records *s, int64_t i, bool write)
{
    const peri_k_cache_move *m = &s->moves[i];
    const peri__row_file *f = tier->tables[m->table].file;
    peri__row_request *last = s->job.n ? &s->requests[s->job.n - 1] : NULL;
    if (f->memory) return;
    int64_t offset = peri__row_offset(f, m->row), bytes = f->header.record_bytes;
    char *data = s->host + m->record;
    bool beside = last && last->fd == f->fd && last->offset + last->bytes == offset && last->data + last->bytes == data;
    if (beside && last->bytes < MOST_REQUEST) {
        last->bytes += bytes;
        return;
    }
    s->requests[s->job.n++] =
        (peri__row_request){.data = data, .bytes = bytes, .offset = offset, .fd = f->fd, .write = write};
}

/** Run a kernel over the moves; the records are in s->device. */
static peri_status launch_over_moves(peri__tier *tier, peri__records *s, bool fill)
{
    peri_tbe *tbe = tier->tbe;
    peri_k_cache_args args = {.tables = peri__data(tbe->layout_tensor), .moves = peri__data(s->moves_device),
                              .records = peri__data(s->device), .n_parts = tier->n_parts,
                              .slot_row = tbe->slot_row ? peri__data(tbe->slot_row) : NULL};
    memcpy(args.part, tier->part, sizeof args.part);
    PERI_TRY(peri__copy(tbe->device, peri__data(s->moves_device), s->moves, s->n * (int64_t)sizeof *s->moves,
                        PERI_COPY_H2D));
    if (fill) return PERI_LAUNCH(tbe->device, cache_fill, &args, s->n, GRAIN);
    return PERI_LAUNCH(tbe->device, cache_spill, &args, s->n, GRAIN);
}

/* -- out: from slots to the file ----------------------------------------------------------------------------------- */

typedef struct all_records {
    const peri__tier *tier;
    peri__records *stage;
    atomic_int_least64_t damaged; /* a damaged move + 1 */
} all_records;

static void seal_range(void *ctx, int64_t begin, int64_t end)
{
    all_records *r = ctx;
    for (int64_t i = begin; i < end; i++) {
        const peri_k_cache_move *m = &r->stage->moves[i];
        char *record = r->stage->host + m->record;
        if (r->tier->tables[m->table].file->memory) continue;
        int64_t bytes = record_bytes(r->tier, m->table), used = r->tier->tables[m->table].payload;
        memset(record + used, 0, (size_t)(bytes - used)); /* the padding is part of the checksum */
        peri__row_record_seal(r->tier->tables[m->table].file, m->row, record);
    }
}

peri_status peri__records_spill(peri__tier *tier, peri__records *s)
{
    peri_device *device = tier->tbe->device;
    s->job.n = 0;
    if (s->n == 0) return PERI_OK;
    records_order(tier, s);
    PERI_TRY(launch_over_moves(tier, s, false));
    if (!tier->direct) PERI_TRY(peri__copy(device, s->host, peri__data(s->device), s->bytes, PERI_COPY_D2H));
    PERI_TRY(peri__stream_dry(peri_stream_current(device)));
    all_records all = {.tier = tier, .stage = s};
    peri__parallel_for(s->n, GRAIN, seal_range, &all);
    for (int64_t i = 0; i < s->n; i++) {
        const peri_k_cache_move *m = &s->moves[i];
        peri__tier_table *t = &tier->tables[m->table];
        t->stats.rows_written++;
        t->stats.bytes_written += t->file->header.record_bytes;
        peri__row_note_written(t->file, m->row);
        request(tier, s, i, true);
    }
    peri__row_memory_move(tier, s, true);
    return PERI_OK;
}

void peri__records_write(peri__tier *tier, peri__records *s)
{
    s->job.requests = s->requests;
    peri__row_io_submit(tier->io, &s->job);
}

static const char *path_of_fd(const peri__tier *tier, int fd)
{
    for (int64_t t = 0; t < tier->n_tables; t++)
        if (tier->tables[t].file->fd == fd) return tier->tables[t].file->path;
    return "?";
}

static peri_status fail_request(const peri__tier *tier, const peri__row_request *r)
{
    if (r->error == ENODATA)
        return peri__fail(PERI_EFORMAT, "row file '%.300s': it ends before byte %lld: it was cut off while in use",
                          path_of_fd(tier, r->fd), (long long)(r->offset + r->bytes));
    return peri__fail(r->error == ENOMEM ? PERI_ENOMEM : PERI_EIO, "row file '%.300s': %s %lld bytes at byte %lld: %s",
                      path_of_fd(tier, r->fd), r->write ? "writing" : "reading", (long long)r->bytes,
                      (long long)r->offset, strerror(r->error));
}

peri_status peri__records_written(peri__tier *tier, peri__records *s)
{
    if (!s->job.queued && !s->job.failed) return PERI_OK;
    bool tried = !s->job.queued; /* it failed before: once more now */
    for (;;) {
        if (peri__row_io_wait(tier->io, &s->job) == 0) return PERI_OK;
        int64_t n = 0;
        for (int64_t i = 0; i < s->job.n; i++)
            if (s->requests[i].error) s->requests[n++] = s->requests[i];
        s->job.n = s->job.failed = n;
        if (!tried) return fail_request(tier, &s->requests[0]);
        tried = false;
        for (int64_t i = 0; i < n; i++) s->requests[i].error = 0;
        peri__row_io_submit(tier->io, &s->job);
    }
}

/* -- in: from the file to slots ------------------------------------------------------------------------------------ */

void peri__records_read(peri__tier *tier, peri__records *s)
{
    s->job.n = 0;
    s->job.failed = 0;
    records_order(tier, s);
    for (int64_t i = 0; i < s->n; i++) {
        const peri_k_cache_move *m = &s->moves[i];
        peri__tier_table *t = &tier->tables[m->table];
        if (t->file->fresh && !peri__row_written(t->file, m->row)) continue; /* no need to read a hole */
        t->stats.rows_read++;
        t->stats.bytes_read += t->file->header.record_bytes;
        request(tier, s, i, false);
    }
    peri__row_memory_move(tier, s, false);
    s->job.requests = s->requests;
    peri__row_io_submit(tier->io, &s->job);
}

/** The record of a row that was never written: start values, zero states. */
static void start_record(const peri__tier *tier, const peri_k_cache_move *m, char *record)
{
    memset(record, 0, (size_t)record_bytes(tier, m->table));
    peri__tbe_start_row(tier->tbe, m->table, m->row, tier->seed, record + PERI_CACHE_RECORD_HEAD);
}

static void check_range(void *ctx, int64_t begin, int64_t end)
{
    all_records *r = ctx;
    for (int64_t i = begin; i < end; i++) {
        const peri_k_cache_move *m = &r->stage->moves[i];
        char *record = r->stage->host + m->record;
        peri__tier_table *t = &r->tier->tables[m->table];
        bool written = peri__row_written(t->file, m->row);
        bool sound = written ? t->file->memory || peri__row_record_is_whole(t->file, m->row, record)
                             : t->file->fresh || peri__row_record_is_hole(t->file, record);
        if (!sound) {
            int_least64_t none = 0;
            atomic_compare_exchange_strong(&r->damaged, &none, i + 1);
        } else if (!written) {
            start_record(r->tier, m, record);
            if (r->stage != &r->tier->spare) __atomic_fetch_add(&t->stats.initialised, 1, __ATOMIC_RELAXED);
        }
    }
}

/** Wait until the stage's records are read, check them, and begin the rows that the files do not have. */
static peri_status wait_for_records(peri__tier *tier, peri__records *s)
{
    int64_t failed = peri__row_io_wait(tier->io, &s->job);
    s->job.failed = 0; /* reads are not tried again: whoever needs the rows asks again */
    for (int64_t i = 0; failed && i < s->job.n; i++)
        if (s->requests[i].error) return fail_request(tier, &s->requests[i]);
    all_records all = {.tier = tier, .stage = s};
    peri__parallel_for(s->n, GRAIN, check_range, &all);
    if (all.damaged) {
        const peri_k_cache_move *m = &s->moves[all.damaged - 1];
        return peri__fail(PERI_EFORMAT, "row file '%.250s': row %lld of table '%.80s' is damaged (wrong checksum)",
                          tier->tables[m->table].file->path,
                          (long long)(tier->tbe->tables[m->table].config.row_offset + m->row),
                          tier->tbe->tables[m->table].name);
    }
    return PERI_OK;
}

/** Queue the copies of the stage's records into the slots of their rows. */
static peri_status records_fill(peri__tier *tier, peri__records *s)
{
    if (s->n == 0) return PERI_OK;
    peri_device *device = tier->tbe->device;
    if (!tier->direct) {
        if (!s->sent) PERI_TRY(peri_event_new(device, &s->sent));
        PERI_TRY(peri__copy(device, peri__data(s->device), s->host, s->bytes, PERI_COPY_H2D_PINNED));
        PERI_TRY(peri_event_record(s->sent, peri_stream_current(device)));
    }
    return launch_over_moves(tier, s, true);
}

/* -- all tickets --------------------------------------------------------------------------------------------------- */

peri_status peri__tier_wait_writes(peri__tier *tier)
{
    for (int i = 0; i < PERI__TICKETS; i++) PERI_TRY(peri__records_written(tier, &tier->ticket[i].out));
    return peri__records_written(tier, &tier->spare);
}

peri_status peri__ticket_fill(peri__tier *tier, peri__ticket *t)
{
    if (t->filled) return PERI_OK;
    peri_status status = wait_for_records(tier, &t->in);
    if (status >= 0) status = records_fill(tier, &t->in);
    if (status < 0) {
        peri__ticket_forget(tier, t); /* what was not read is not read again: its batch asks anew */
        return status;
    }
    for (int64_t i = 0; i < t->in.n; i++)
        *peri__tier_flags(tier, t->in.moves[i].table, t->in.moves[i].slot) &= (uint8_t)~PERI__SLOT_FILLING;
    t->filled = true;
    return PERI_OK;
}

/** One batch less needs the slots of pins [begin, end). @beside: other threads do the same with other pins, and no
 *  cache is listed. */
static inline void unpin_range(const peri__tier *tier, const peri__ticket *t, int64_t begin, int64_t end, bool beside)
{
    uint8_t news = t->updated ? PERI__SLOT_DIRTY : 0;
    int32_t idle = 0;
    for (int64_t i = begin; i < end; i++) {
        const peri__tier_pin *p = &t->pins[i], *ahead = &t->pins[peri__min(i + AHEAD, end - 1)];
        peri__cache *c = tier->tables[p->table].cache;
        __builtin_prefetch(&tier->tables[ahead->table].cache->slot[ahead->slot], 1);
        c->slot[p->slot].flags |= news;
        if (!beside) {
            peri__cache_unpin(c, (uint32_t)p->slot);
            continue;
        }
        idle += peri__cache_unpin_beside(c, (uint32_t)p->slot);
        if (i + 1 < end && p[1].table == p->table) continue;
        __atomic_fetch_add(&c->n_idle, idle, __ATOMIC_RELAXED);
        idle = 0;
    }
}

typedef struct unpinning {
    const peri__tier *tier;
    const peri__ticket *ticket;
} unpinning;

static void unpin_beside(void *ctx, int64_t begin, int64_t end)
{
    const unpinning *u = ctx;
    unpin_range(u->tier, u->ticket, begin, end, true);
}

void peri__ticket_forget(peri__tier *tier, peri__ticket *t)
{
    if (t->state == PERI__TICKET_FREE) return;
    bool beside = t->filled && !t->depends; /* no slot is dropped, none joins a list, so each is its own */
    for (int64_t i = 0; i < tier->n_tables; i++) beside = beside && !tier->tables[i].cache->listed;
    peri__row_io_wait(tier->io, &t->in.job);
    if (beside) peri__parallel_for(t->n_pins, PIN_GRAIN, unpin_beside, &(unpinning){tier, t});
    else unpin_range(tier, t, 0, t->n_pins, false);
    for (int64_t i = 0; i < t->n_wants; i++) {
        const peri__tier_want *w = &t->wants[i];
        if (w->slot < 0) continue;
        if (t->updated) *peri__tier_flags(tier, w->table, w->slot) |= PERI__SLOT_DIRTY;
        peri__cache_unpin(tier->tables[w->table].cache, (uint32_t)w->slot);
    }
    t->n_pins = t->n_wants = 0;
    t->in.n = t->in.job.failed = 0;
    if (t->owner && t->owner->ticket == t) t->owner->ticket = NULL;
    peri__batch_recycle(t->inner);
    peri_tensor_release(t->mapped);
    peri_tbe_blocks_release(t->layer_blocks);
    peri__tbe_free_later(tier->tbe, &t->layer_offsets);
    t->mapped = NULL;
    t->owner = t->inner = NULL;
    t->layer_blocks = NULL;
    t->state = PERI__TICKET_FREE;
}

peri_status peri__tier_fill_slots(peri__tier *tier)
{
    for (int i = 0; i < PERI__TICKETS; i++) {
        peri__ticket *t = &tier->ticket[i];
        if (t->state != PERI__TICKET_FREE) PERI_TRY(peri__ticket_fill(tier, t));
    }
    return PERI_OK;
}

/* -- flushing ------------------------------------------------------------------------------------------------------ */

peri_status peri__tier_write_back(peri__tier *tier, int32_t table, int64_t row, int64_t end)
{
    peri__tier_table *t = &tier->tables[table];
    peri__cache *c = t->cache;
    peri__records *s = &tier->spare;
    int64_t most = peri__max(1, CHUNK_BYTES / t->file->header.record_bytes);
    bool few = end - row < c->slots;
    for (int64_t at = few ? row : 0, stop = few ? end : c->slots; at < stop;) {
        PERI_TRY(peri__records_reserve(tier, s, most, most * t->file->header.record_bytes));
        for (; at < stop && s->n < most; at++) {
            uint32_t place = few ? peri__cache_find(c, at) : (uint32_t)at + 1;
            if (!place || !(c->slot[place - 1].flags & PERI__SLOT_DIRTY)) continue;
            int64_t holds = c->slot[place - 1].row;
            if (holds < row || holds >= end) continue;
            s->moves[s->n++] = (peri_k_cache_move){.row = holds, .table = table, .slot = (int32_t)place - 1};
        }
        if (s->n == 0) continue;
        PERI_TRY(peri__row_file_mark_unclean(t->file));
        PERI_TRY(peri__records_spill(tier, s));
        peri__records_write(tier, s);
        PERI_TRY(peri__records_written(tier, s));
        for (int64_t i = 0; i < s->n; i++) c->slot[s->moves[i].slot].flags &= (uint8_t)~PERI__SLOT_DIRTY;
    }
    return PERI_OK;
}

/* -- ranges of rows ------------------------------------------------------------------------------------------------ */

/** Where part @part begins in a record of @table, its bytes in all, and its elements. */
static void find_part(const peri__tier *tier, int64_t table, int32_t part, int64_t *at, int64_t *bytes,
                      int64_t *elements)
{
    *at = PERI_CACHE_RECORD_HEAD;
    for (int32_t p = 0;; p++) {
        *elements = tier->part[p].row ? 1 : tier->tbe->layout[table].cols;
        *bytes = *elements * tier->part[p].bytes;
        if (p == part) return;
        *at += *bytes;
    }
}

/** Bring the records of rows [row, row + n) of @table into the spare stage, as they are now. */
static peri_status load_range(peri__tier *tier, int32_t table, int64_t row, int64_t n)
{
    peri__records *s = &tier->spare;
    peri__tier_table *t = &tier->tables[table];
    PERI_TRY(peri__tier_write_back(tier, table, row, row + n));
    PERI_TRY(peri__records_reserve(tier, s, n, n * t->file->header.record_bytes));
    for (int64_t i = 0; i < n; i++) s->moves[s->n++] = (peri_k_cache_move){.row = row + i, .table = table};
    peri__records_read(tier, s);
    return wait_for_records(tier, s);
}

static peri_status check_rows(const char *function, peri__tier *tier, int64_t table, int32_t part, int64_t row,
                              const peri_tensor *t)
{
    char text[128];
    const peri_table_config *config = &tier->tbe->tables[table].config;
    if (!t) return peri__fail(PERI_EINVAL, "%s: no tensor", function);
    int32_t ndim = tier->part[part].row ? 1 : 2;
    if (t->ndim != ndim || (ndim == 2 && t->shape[1] != config->cols))
        return peri__fail(PERI_EINVAL,
                          "%s: %s for rows of '%s' of table '%s', which has %d dimensions and %lld columns", function,
                          peri__tensor_text(t, text, sizeof text), peri_tbe_state_name(tier->tbe, part), config->name,
                          ndim, (long long)(ndim == 2 ? config->cols : 1));
    if (row < 0 || row > config->rows - t->shape[0])
        return peri__fail(PERI_ERANGE, "%s: rows %lld .. %lld of table '%s', allowed: 0..%lld", function,
                          (long long)row, (long long)(row + t->shape[0]), config->name, (long long)config->rows);
    PERI_TRY(peri__tier_fill_slots(tier));
    return peri__tier_wait_writes(tier);
}

/** Rows [row, row + n) of a tensor of rows: a view. */
static peri_status some_rows(const peri_tensor *t, int64_t row, int64_t n, peri_tensor **out)
{
    int64_t shape[2] = {n, t->ndim == 2 ? t->shape[1] : 1};
    return peri__tensor_view((peri_tensor *)(uintptr_t)t, t->ndim, shape, t->stride, t->offset + row * t->stride[0],
                             out);
}

/** Parts of the records in the spare stage, packed into @packed or taken from it. */
static void copy_parts(peri__tier *tier, int64_t table, int32_t part, char *packed, bool store)
{
    int64_t at, bytes, elements;
    find_part(tier, table, part, &at, &bytes, &elements);
    for (int64_t i = 0; i < tier->spare.n; i++) {
        char *record = tier->spare.host + tier->spare.moves[i].record + at;
        memcpy(store ? record : packed + i * bytes, store ? packed + i * bytes : record, (size_t)bytes);
    }
}

/** One chunk of a read or write; @other is the caller's tensor. */
static peri_status move_rows(peri__tier *tier, int64_t table, int32_t part, int64_t row, int64_t n, peri_tensor *other,
                             bool store)
{
    int64_t at, bytes, elements, shape[2];
    find_part(tier, table, part, &at, &bytes, &elements);
    peri_tensor *packed = NULL;
    char *host = peri__alloc((size_t)(n * bytes));
    if (!host) return PERI_ENOMEM;
    peri_status status;
    shape[0] = n, shape[1] = elements;
    int32_t dtype = tier->tbe->state[part].dtype;
    PERI_TRY_GOTO(peri_tensor_new(tier->tbe->device, dtype, other->ndim, shape, &packed), out);
    if (store) {
        PERI_TRY_GOTO(peri_tensor_copy(packed, other), out);
        PERI_TRY_GOTO(peri_tensor_read(packed, host, n * bytes), out);
    }
    PERI_TRY_GOTO(load_range(tier, (int32_t)table, row, n), out);
    copy_parts(tier, table, part, host, store);
    if (!store) {
        PERI_TRY_GOTO(peri_tensor_write(packed, host, n * bytes), out);
        status = peri_tensor_copy(other, packed);
    }
out:
    peri_tensor_release(packed);
    peri__free(host);
    return status;
}

/** Write the records of the spare stage, and renew the slots of the rows that have one. */
static peri_status store_range(peri__tier *tier, int64_t table)
{
    peri__records *s = &tier->spare;
    peri__tier_table *t = &tier->tables[table];
    all_records all = {.tier = tier, .stage = s};
    PERI_TRY(peri__row_file_mark_unclean(t->file));
    tier->dirty = true;
    tier->prepared = false;
    peri__parallel_for(s->n, GRAIN, seal_range, &all);
    s->job.n = 0;
    for (int64_t i = 0; i < s->n; i++) {
        peri__row_note_written(t->file, s->moves[i].row);
        request(tier, s, i, true);
    }
    peri__row_memory_move(tier, s, true);
    t->stats.rows_written += s->n;
    t->stats.bytes_written += s->bytes;
    peri__records_write(tier, s);
    PERI_TRY(peri__records_written(tier, s));
    int64_t n = 0;
    for (int64_t i = 0; i < s->n; i++) {
        uint32_t place = peri__cache_find(t->cache, s->moves[i].row);
        if (!place) continue;
        s->moves[n] = s->moves[i];
        s->moves[n++].slot = (int32_t)place - 1;
    }
    s->n = n;
    return records_fill(tier, s);
}

/** How many records of a table CHUNK_BYTES hold. */
static int64_t records_per_chunk(const peri__tier *tier, int64_t table)
{
    return peri__max(1, CHUNK_BYTES / record_bytes(tier, (int32_t)table));
}

/** Rows from @row on between a table's weights or state and @t, as many as one chunk holds at a time. */
static peri_status move_chunks(const char *function, peri_tbe *tbe, int64_t table, int32_t part, int64_t row,
                               const peri_tensor *t, bool write)
{
    peri__tier *tier = peri__tier_of(tbe);
    PERI_TRY(check_rows(function, tier, table, part, row, t));
    for (int64_t i = 0, n; i < t->shape[0]; i += n) {
        n = peri__min(t->shape[0] - i, records_per_chunk(tier, table));
        peri_tensor *rows;
        PERI_TRY(some_rows(t, i, n, &rows));
        peri_status status = move_rows(tier, table, part, row + i, n, rows, write);
        if (status >= 0 && write) status = store_range(tier, table);
        peri_tensor_release(rows);
        PERI_TRY(status);
    }
    return PERI_OK;
}

peri_status peri__tier_read(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst)
{
    return move_chunks("peri_tbe_read", tbe, table, part, row, dst, false);
}

peri_status peri__tier_write(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src)
{
    return move_chunks("peri_tbe_write", tbe, table, part, row, src, true);
}

/* -- rows that start again ----------------------------------------------------------------------------------------- */

typedef struct starting {
    const peri__tier *tier;
    peri__records *stage;
} starting;

static void start_records(void *ctx, int64_t begin, int64_t end)
{
    const starting *x = ctx;
    for (int64_t i = begin; i < end; i++)
        start_record(x->tier, &x->stage->moves[i], x->stage->host + x->stage->moves[i].record);
}

/** Rows that have a slot start again there, and are newer than the file; the others in the file. */
static peri_status reset_rows(peri__tier *tier, int64_t table, const int64_t *rows, int64_t n)
{
    peri__records *s = &tier->spare;
    peri__cache *cache = tier->tables[table].cache;
    for (int pass = 0; pass < 2; pass++) {
        PERI_TRY(peri__records_reserve(tier, s, n, n * record_bytes(tier, (int32_t)table)));
        for (int64_t i = 0; i < n; i++) {
            uint32_t place = peri__cache_find(cache, rows[i]);
            if ((place != 0) != (pass == 1)) continue;
            s->moves[s->n++] = (peri_k_cache_move){.row = rows[i], .table = (int32_t)table, .slot = (int32_t)place - 1};
        }
        if (s->n == 0) continue;
        records_order(tier, s);
        peri__parallel_for(s->n, GRAIN, start_records, &(starting){tier, s});
        if (pass == 0) {
            PERI_TRY(store_range(tier, table));
            continue;
        }
        PERI_TRY(records_fill(tier, s));
        for (int64_t i = 0; i < s->n; i++) cache->slot[s->moves[i].slot].flags |= PERI__SLOT_DIRTY;
    }
    return PERI_OK;
}

peri_status peri__tier_reset(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n)
{
    peri__tier *tier = peri__tier_of(tbe);
    PERI_TRY(peri__tier_fill_slots(tier)); /* what a prefetch brings would come over the new rows */
    PERI_TRY(peri__tier_wait_writes(tier));
    tier->dirty = true;
    tier->prepared = false;
    for (int64_t i = 0, some; i < n; i += some) {
        some = peri__min(n - i, records_per_chunk(tier, table));
        PERI_TRY(reset_rows(tier, table, rows + i, some));
    }
    return PERI_OK;
}

/* -- counts -------------------------------------------------------------------------------------------------------- */

void peri__tier_statistics(const peri_tbe *tbe, int64_t table, peri_tbe_cache_stats *out)
{
    const peri__tier *tier = peri__tier_of(tbe);
    enum { COUNTS = sizeof(peri_tbe_cache_stats) / sizeof(int64_t) };
    int64_t sum[COUNTS] = {0};
    for (int64_t t = 0; t < tier->n_tables; t++) {
        if (table >= 0 && t != table) continue;
        const peri__cache *c = tier->tables[t].cache;
        peri_tbe_cache_stats s = tier->tables[t].stats;
        s.slots = c->slots;
        s.resident = c->slots - c->n_free;
        s.wait_ns = t == 0 && tier->io ? peri__row_io_waited(tier->io) : 0;
        int64_t counts[COUNTS];
        memcpy(counts, &s, sizeof s);
        for (int i = 0; i < COUNTS; i++) sum[i] += counts[i];
    }
    memcpy(out, sum, sizeof sum);
}
