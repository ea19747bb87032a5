/* SPDX-License-Identifier: Apache-2.0
 *
 * moment.c: see perilune/moment.h. A watch (row_watch.h) copies rows before they change, of all parts of their table
 * together:
 *
 *     watched     a table batch that has parts: a bit for each row (copied already, or not wanted any more), and its
 *                 buckets
 *     bucket      BUCKET_ROWS rows that follow each other: the copies of those that were copied, in any order
 *     copy        one after the other, the bytes of the row in each part of its table
 *
 * Memory of copies is given back by table, when all parts of it were passed. It comes from the host's device, which
 * keeps it: pages that are new cost several times what the copies in them cost.
 */
#include "row_watch.h"

#include <perilune/moment.h>
#include <perilune/sparse.h>

#include <stdlib.h>

enum { BUCKET_ROWS = 4096, GRAIN = 256 };

/** Weights or a state of a table. */
typedef struct part {
    struct watched *of;
    int64_t table, rows, cols; /* cols 0: it has one number for a row, without a dimension */
    int32_t state;             /* index into tbe->state */
    int32_t dtype;
    int64_t row_bytes;
    int64_t offset; /* in a copy */
    int64_t passed; /* rows */
    int64_t next;   /* another part of its table; -1: none */
} part;

typedef struct copy {
    int64_t row; /* linear */
    char *bytes;
} copy;

typedef struct bucket {
    copy *copies;
    int64_t n, room;
} bucket;

/** Memory of copies of rows of one table. */
typedef struct arena {
    struct arena *next;
    peri_tensor *memory; /* u8 */
} arena;

typedef struct watched {
    peri__row_watch watch;
    struct watched *next;
    peri_moment *moment;
    peri_tbe *tbe; /* retained */
    peri__row_bits bits;
    bucket *buckets;
    int64_t n_buckets;
    arena **arenas;      /* of each table */
    int64_t *copy_bytes; /* of each table: of a row in all its parts; 0: it has none */
    int64_t *last_part;  /* of each table: the part that was added last; -1: none */
    int64_t number;      /* of table batches, in the order in which parts came */
    int64_t n_passed;    /* tables, from the first one on, of which all parts were passed whole */
} watched;

struct peri_moment {
    watched *watched;
    part *parts;
    int64_t n_parts, room;
    atomic_int_least64_t bytes; /* of copies */
    atomic_int failed;          /* status of the first copy that could not be made */
};

/* -- copying before rows change ------------------------------------------------------------------------------------ */

/** The table of a linear row. */
static int64_t table_of(const peri_tbe *tbe, int64_t row)
{
    int64_t low = 0, high = tbe->n_tables;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (peri__first_row(tbe, middle) <= row) low = middle;
        else high = middle;
    }
    return low;
}

static peri_status bucket_add(watched *w, int64_t row, char *bytes)
{
    bucket *b = &w->buckets[row / BUCKET_ROWS];
    if (b->n == b->room) {
        const int64_t room = peri__max(16, 2 * b->room);
        copy *more = peri__realloc(b->copies, (size_t)room * sizeof *more);
        if (!more) return PERI_ENOMEM;
        b->copies = more;
        b->room = room;
    }
    b->copies[b->n++] = (copy){row, bytes};
    return PERI_OK;
}

/** Rows of one table, and where their copies go. */
typedef struct batch {
    watched *w;
    int64_t table, first, n; /* first: its linear row 0 */
    const int64_t *rows;     /* linear */
    char *to;
} batch;

/** Tables in memory that the host reaches: copy rows [begin, end) of the batch. They lie anywhere in a large table, so
 *  rows are asked for ahead of time. */
static void copy_here(void *ctx, int64_t begin, int64_t end)
{
    enum { AHEAD = 8, LINE = 64 }; /* rows; bytes of a cache line */
    const batch *b = ctx;
    const peri_tbe *tbe = b->w->tbe;
    const int64_t bytes = b->w->copy_bytes[b->table];
    for (int64_t k = b->w->last_part[b->table]; k >= 0; k = b->w->moment->parts[k].next) {
        const part *p = &b->w->moment->parts[k];
        const peri__state *s = &tbe->state[p->state];
        const int64_t size = peri_dtype_size(s->dtype), stride = p->cols ? tbe->layout[p->table].stride : 1;
        const char *from = (const char *)peri__data(s->flat) + peri__state_offset(tbe, s, p->table) * size;
        for (int64_t i = begin; i < end; i++) {
            const char *ahead = from + (b->rows[peri__min(i + AHEAD, end - 1)] - b->first) * stride * size;
            for (int64_t at = 0; at < p->row_bytes; at += LINE) __builtin_prefetch(ahead + at);
            memcpy(b->to + i * bytes + p->offset, from + (b->rows[i] - b->first) * stride * size, (size_t)p->row_bytes);
        }
    }
}

/** Tables in memory of a device: all rows of a part are gathered there, and fetched together. */
static peri_status copy_from_device(const batch *b, const part *p)
{
    peri_tbe *tbe = b->w->tbe;
    const peri__state *s = &tbe->state[p->state];
    const int64_t size = peri_dtype_size(s->dtype), stride = p->cols ? tbe->layout[p->table].stride : 1,
                  bytes = b->w->copy_bytes[p->table];
    const int64_t shape[2] = {p->rows, stride}, strides[2] = {stride, 1};
    peri_tensor *view = NULL, *ids = NULL, *rows = NULL;
    int64_t *local = peri__alloc((size_t)b->n * sizeof *local);
    char *fetched = peri__alloc((size_t)(b->n * stride * size));
    peri_status status = local && fetched ? PERI_OK : PERI_ENOMEM;
    if (status >= 0)
        PERI_TRY_GOTO(peri__tensor_view(s->flat, 2, shape, strides,
                                        s->flat->offset + peri__state_offset(tbe, s, p->table), &view),
                      out);
    for (int64_t i = 0; local && i < b->n; i++) local[i] = b->rows[i] - b->first;
    if (status >= 0) PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_I64, 1, &b->n, &ids), out);
    if (status >= 0) PERI_TRY_GOTO(peri_tensor_write(ids, local, b->n * (int64_t)sizeof *local), out);
    if (status >= 0) PERI_TRY_GOTO(peri_sparse_index_select(view, ids, &rows), out);
    if (status >= 0) PERI_TRY_GOTO(peri_tensor_read(rows, fetched, b->n * stride * size), out);
    for (int64_t i = 0; status >= 0 && i < b->n; i++)
        memcpy(b->to + i * bytes + p->offset, fetched + i * stride * size, (size_t)p->row_bytes);
out:
    peri_tensor_release(view);
    peri_tensor_release(ids);
    peri_tensor_release(rows);
    peri__free(local);
    peri__free(fetched);
    return status;
}

/** Rows of a part, by the store: those of tables in files. */
static peri_status copy_from_store(const batch *b, const part *p)
{
    peri_tbe *tbe = b->w->tbe;
    peri_device *cpu;
    peri_tensor *row;
    const int64_t shape[2] = {1, p->cols}, bytes = b->w->copy_bytes[p->table];
    PERI_TRY(peri_device_get("cpu", &cpu));
    PERI_TRY(peri_tensor_new(cpu, p->dtype, p->cols ? 2 : 1, shape, &row));
    peri_status status = PERI_OK;
    for (int64_t i = 0; status >= 0 && i < b->n; i++) {
        status = tbe->store->read(tbe, p->table, p->state, b->rows[i] - b->first, row);
        if (status >= 0) status = peri_tensor_read(row, b->to + i * bytes + p->offset, p->row_bytes);
    }
    peri_tensor_release(row);
    return status;
}

static peri_status copy_batch(batch *b)
{
    peri_moment *m = b->w->moment;
    const bool whole = b->w->tbe->store->whole;
    if (whole && peri__immediate(b->w->tbe->device)) {
        peri__parallel_for(b->n, GRAIN, copy_here, b);
        return PERI_OK;
    }
    for (int64_t k = b->w->last_part[b->table]; k >= 0; k = m->parts[k].next)
        PERI_TRY(whole ? copy_from_device(b, &m->parts[k]) : copy_from_store(b, &m->parts[k]));
    return PERI_OK;
}

/** Memory for copies of @n rows of @table. */
static peri_status arena_new(watched *w, int64_t table, int64_t n, char **out)
{
    peri_device *cpu;
    const int64_t bytes = n * w->copy_bytes[table];
    PERI_TRY(peri_device_get("cpu", &cpu));
    arena *a = peri__alloc(sizeof *a);
    if (!a) return PERI_ENOMEM;
    peri_status status = peri_tensor_new(cpu, PERI_U8, 1, &bytes, &a->memory);
    if (status < 0) {
        peri__free(a);
        return status;
    }
    a->next = w->arenas[table];
    w->arenas[table] = a;
    atomic_fetch_add(&w->moment->bytes, bytes);
    *out = peri__data(a->memory);
    return PERI_OK;
}

/** Copy rows (linear, each once, none of them copied yet): by table. */
static peri_status copy_rows(watched *w, const int64_t *rows, int64_t n)
{
    int64_t *sorted = peri__alloc((size_t)n * sizeof *sorted),
            *starts = peri__alloc_zero((size_t)(w->tbe->n_tables + 1) * sizeof *starts);
    peri_status status = sorted && starts ? PERI_OK : PERI_ENOMEM;
    for (int64_t i = 0; status >= 0 && i < n; i++) starts[table_of(w->tbe, rows[i]) + 1]++;
    for (int64_t t = 0; status >= 0 && t < w->tbe->n_tables; t++) starts[t + 1] += starts[t];
    for (int64_t i = n - 1; status >= 0 && i >= 0; i--) sorted[--starts[table_of(w->tbe, rows[i]) + 1]] = rows[i];
    for (int64_t t = 0; status >= 0 && t < w->tbe->n_tables; t++) { /* starts[t + 1] is now where table t begins */
        const int64_t begin = starts[t + 1], count = (t + 1 < w->tbe->n_tables ? starts[t + 2] : n) - begin;
        if (count == 0 || w->copy_bytes[t] == 0) continue;
        batch b = {.w = w, .table = t, .first = peri__first_row(w->tbe, t), .n = count, .rows = sorted + begin};
        status = arena_new(w, t, count, &b.to);
        if (status >= 0) status = copy_batch(&b);
        for (int64_t i = 0; status >= 0 && i < count; i++)
            status = bucket_add(w, sorted[begin + i], b.to + i * w->copy_bytes[t]);
    }
    peri__free(sorted);
    peri__free(starts);
    return status;
}

/** The rows that the bitmap calls fresh, on the host. */
static peri_status fresh_rows(watched *w, int64_t **rows, int64_t *n)
{
    PERI_TRY(peri_tensor_read(w->bits.n_fresh, n, sizeof *n));
    if (*n == 0) return PERI_OK;
    if (!(*rows = peri__alloc((size_t)*n * sizeof **rows))) return PERI_ENOMEM;
    peri_tensor *first;
    PERI_TRY(peri__tensor_view(w->bits.fresh, 1, n, (int64_t[]){1}, w->bits.fresh->offset, &first));
    peri_status status = peri_tensor_read(first, *rows, *n * (int64_t)sizeof **rows);
    peri_tensor_release(first);
    return status;
}

/** peri__row_watch: training goes on whatever fails here; reading tells it. */
static peri_status copy_before_change(peri__row_watch *watch, peri_tbe *tbe, const peri__row_change *change)
{
    watched *w = (watched *)watch;
    int64_t *rows = NULL, n = 0;
    if (atomic_load(&w->moment->failed) < 0 || w->bits.passed == w->bits.rows) return PERI_OK;
    const bool recording = peri__grad_swap(false);
    peri_status status = peri__row_bits_mark(tbe, &w->bits, change, true);
    if (status >= 0) status = fresh_rows(w, &rows, &n);
    if (status >= 0 && n > 0) status = copy_rows(w, rows, n);
    peri__free(rows);
    peri__grad_swap(recording);
    if (status < 0) atomic_store(&w->moment->failed, status);
    return PERI_OK;
}

/* -- moments ------------------------------------------------------------------------------------------------------- */

peri_status peri_moment_new(peri_moment **out)
{
    PERI_NEED(out);
    peri_moment *m = peri__alloc_zero(sizeof *m);
    if (!m) return PERI_ENOMEM;
    peri__object_count(1);
    *out = m;
    return PERI_OK;
}

static void free_arenas(watched *w, int64_t table)
{
    while (w->arenas[table]) {
        arena *a = w->arenas[table];
        w->arenas[table] = a->next;
        atomic_fetch_sub(&w->moment->bytes, peri__numel(a->memory));
        peri_tensor_release(a->memory);
        peri__free(a);
    }
}

static void watched_free(watched *w)
{
    for (int64_t t = 0; w->arenas && t < w->tbe->n_tables; t++) free_arenas(w, t);
    for (int64_t i = 0; w->buckets && i < w->n_buckets; i++) peri__free(w->buckets[i].copies);
    peri__row_bits_fini(&w->bits);
    peri__free(w->buckets);
    peri__free(w->arenas);
    peri__free(w->copy_bytes);
    peri__free(w->last_part);
    peri_tbe_release(w->tbe);
    peri__free(w);
}

void peri_moment_release(peri_moment *m)
{
    if (!m || peri__border_refuses(__func__)) return;
    while (m->watched) {
        watched *w = m->watched;
        m->watched = w->next;
        peri__tbe_unwatch(w->tbe, &w->watch);
        watched_free(w);
    }
    peri__free(m->parts);
    peri__free(m);
    peri__object_count(-1);
}

/** Have @tbe watched; it is retained. */
static peri_status watch_table_batch(peri_moment *m, peri_tbe *tbe, watched **out)
{
    for (*out = m->watched; *out; *out = (*out)->next)
        if ((*out)->tbe == tbe) return PERI_OK;
    watched *w = peri__alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    peri_tbe_retain(tbe);
    w->tbe = tbe;
    w->moment = m;
    w->watch.before = copy_before_change;
    const size_t tables = (size_t)peri__max(tbe->n_tables, 1);
    peri_status status = peri__row_bits_init(tbe, &w->bits);
    w->n_buckets = w->bits.rows / BUCKET_ROWS + 1;
    w->buckets = peri__alloc_zero((size_t)w->n_buckets * sizeof *w->buckets);
    w->arenas = peri__alloc_zero(tables * sizeof *w->arenas);
    w->copy_bytes = peri__alloc_zero(tables * sizeof *w->copy_bytes);
    w->last_part = peri__alloc(tables * sizeof *w->last_part);
    for (size_t t = 0; w->last_part && t < tables; t++) w->last_part[t] = -1;
    if (status >= 0 && !(w->buckets && w->arenas && w->copy_bytes && w->last_part)) status = PERI_ENOMEM;
    if (status >= 0) status = peri__tbe_watch(tbe, &w->watch);
    if (status < 0) {
        watched_free(w);
        return status;
    }
    w->number = m->watched ? m->watched->number + 1 : 0;
    w->next = m->watched;
    m->watched = w;
    *out = w;
    return PERI_OK;
}

/** The rows of @table that all its parts have passed; 0: it has none. */
static int64_t passed_by_all(const peri_moment *m, const watched *w, int64_t table)
{
    int64_t rows = w->last_part[table] < 0 ? 0 : INT64_MAX;
    for (int64_t k = w->last_part[table]; k >= 0; k = m->parts[k].next) rows = peri__min(rows, m->parts[k].passed);
    return rows;
}

/** Parts come before the first change: copies have the bytes of all parts of their table. */
static peri_status add_part(peri_moment *m, peri_tbe *tbe, int64_t table, int32_t state, int32_t dtype, int64_t *index)
{
    watched *w;
    const peri__state *s = &tbe->state[state];
    if (m->n_parts == m->room) {
        const int64_t room = peri__max(16, 2 * m->room);
        part *more = peri__realloc(m->parts, (size_t)room * sizeof *more);
        if (!more) return PERI_ENOMEM;
        m->parts = more;
        m->room = room;
    }
    PERI_TRY(watch_table_batch(m, tbe, &w));
    if (w->arenas[table] || passed_by_all(m, w, table) > 0)
        return peri__fail(PERI_EINVAL, "peri_moment_add: table '%s' has %s since its first part was added",
                          tbe->tables[table].name, w->arenas[table] ? "changed" : "been passed");
    part p = {.of = w, .table = table, .state = state, .dtype = dtype, .rows = tbe->tables[table].config.rows};
    const bool raw = peri__rows_are_bytes(tbe->dtype) && state == 0 && dtype == PERI_U8;
    p.cols = s->geometry == PERI_STATE_ROW ? 0 : raw ? tbe->layout[table].stride : tbe->layout[table].cols;
    p.row_bytes = peri__max(p.cols, 1) * peri_dtype_size(dtype);
    p.offset = w->copy_bytes[table];
    w->copy_bytes[table] += peri__ceil_div(p.row_bytes, 8) * 8;
    p.next = w->last_part[table];
    *index = w->last_part[table] = m->n_parts;
    m->parts[m->n_parts++] = p;
    return PERI_OK;
}

peri_status peri_moment_add(peri_moment *m, const peri_tensor *t, int64_t *index)
{
    PERI_NEED(m);
    PERI_NEED(t);
    PERI_NEED(index);
    int32_t state;
    int64_t table;
    *index = -1;
    peri_tbe *tbe = peri__tbe_of_view(t, &table, &state);
    peri_status status = tbe ? add_part(m, tbe, table, state, t->dtype, index) : PERI_OK;
    peri_tbe_release(tbe);
    return status;
}

peri_status peri_moment_add_table(peri_moment *m, peri_tbe *tbe, int64_t table, const char *name, int32_t dtype,
                                  int64_t *index)
{
    PERI_NEED(m);
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(index);
    int64_t shape[2];
    PERI_TRY(peri_tbe_state_shape(tbe, table, name, shape)); /* it names what is wrong with the table or the name */
    int32_t state = 0;
    while (strcmp(tbe->state[state].name, name) != 0) state++;
    if (!peri__has_rows(tbe->state[state].geometry))
        return peri__fail(PERI_EINVAL, "peri_moment_add_table: '%s' of table '%s' has no rows", name,
                          tbe->tables[table].name);
    return add_part(m, tbe, table, state, dtype, index);
}

static peri_status moment_part(const char *function, const peri_moment *m, int64_t index, part **out)
{
    if (index < 0 || index >= m->n_parts)
        return peri__fail(PERI_EINVAL, "%s: part %lld, allowed: 0 to %lld", function, (long long)index,
                          (long long)m->n_parts - 1);
    *out = &m->parts[index];
    return PERI_OK;
}

/** Within a call: rows as they are now, and over them what was copied. */
static peri_status read_rows(const part *p, int64_t row, peri_tensor *out)
{
    watched *w = p->of;
    peri_tbe *tbe = w->tbe;
    peri_tensor *there = NULL;
    const int64_t n = out->shape[0];
    if (tbe->store->whole && !peri__immediate(tbe->device)) {
        PERI_TRY(peri_tensor_new(tbe->device, out->dtype, out->ndim, out->shape, &there));
        peri_status status = tbe->store->read(tbe, p->table, p->state, row, there);
        if (status >= 0) status = peri_tensor_read(there, peri__data(out), n * p->row_bytes);
        peri_tensor_release(there);
        PERI_TRY(status);
    } else {
        PERI_TRY(tbe->store->read(tbe, p->table, p->state, row, out));
    }
    const int64_t first = peri__first_row(tbe, p->table), low = first + row, high = low + n;
    char *to = peri__data(out);
    for (int64_t k = low / BUCKET_ROWS; k <= (high - 1) / BUCKET_ROWS; k++)
        for (int64_t i = 0; i < w->buckets[k].n; i++) {
            const copy *c = &w->buckets[k].copies[i];
            if (c->row >= low && c->row < high)
                memcpy(to + (c->row - low) * p->row_bytes, c->bytes + p->offset, (size_t)p->row_bytes);
        }
    return PERI_OK;
}

peri_status peri_moment_read(peri_moment *m, int64_t index, int64_t row, peri_tensor *out)
{
    part *p = NULL;
    PERI_NEED(m);
    PERI_NEED(out);
    PERI_TRY(moment_part("peri_moment_read", m, index, &p));
    const char *table = p->of->tbe->tables[p->table].name;
    peri_tensor_info d = {.size = sizeof d};
    peri_tensor_describe(out, &d);
    if (!d.contiguous || !peri__immediate(d.device) || d.dtype != p->dtype || d.ndim != (p->cols ? 2 : 1) ||
        (p->cols && d.shape[1] != p->cols))
        return peri__fail(
            PERI_EINVAL,
            "peri_moment_read: rows of table '%s' go into a contiguous tensor of the host, of %s, with %lld columns",
            table, peri_dtype_name(p->dtype), (long long)p->cols);
    if (row < p->passed || row > p->rows - d.shape[0])
        return peri__fail(PERI_ERANGE, "peri_moment_read: rows %lld .. %lld of table '%s', allowed: %lld .. %lld",
                          (long long)row, (long long)(row + d.shape[0]), table, (long long)p->passed,
                          (long long)p->rows);
    if (d.shape[0] == 0) return PERI_OK;
    PERI_TRY(peri__tbe_enter(p->of->tbe, true));
    peri_status status = read_rows(p, row, out);
    peri__changed(out);
    PERI_TRY(peri__tbe_leave(p->of->tbe, true, status));
    const int failed = atomic_load(&m->failed);
    if (failed < 0)
        return peri__fail(failed, "peri_moment_read: rows that changed could not be kept as they were (%s)",
                          peri_status_name(failed));
    return PERI_OK;
}

/** How far all rows of the table batch were passed, from the first one on: updates do not look at those any more. */
static void pass_table_batch(const peri_moment *m, watched *w)
{
    int64_t rows = 0;
    for (; w->n_passed < w->tbe->n_tables; w->n_passed++) {
        rows = passed_by_all(m, w, w->n_passed);
        if (rows < w->tbe->tables[w->n_passed].config.rows) break;
        rows = 0;
    }
    w->bits.passed = peri__first_row(w->tbe, w->n_passed) + rows;
}

/** Within a call. */
static peri_status pass_rows(peri_moment *m, part *p, int64_t row)
{
    watched *w = p->of;
    const int64_t past = passed_by_all(m, w, p->table);
    p->passed = row;
    const int64_t now = passed_by_all(m, w, p->table);
    if (now > past) {
        const peri__row_change c = {
            .form = PERI__ROWS_RANGE, .part = -1, .table = p->table, .first = past, .count = now - past};
        PERI_TRY(peri__row_bits_mark(w->tbe, &w->bits, &c, false));
        pass_table_batch(m, w);
    }
    if (now < p->rows) return PERI_OK;
    const int64_t first = peri__first_row(w->tbe, p->table), high = first + p->rows;
    /* a bucket may have rows of two tables */
    for (int64_t k = first / BUCKET_ROWS; k <= (high - 1) / BUCKET_ROWS; k++) {
        bucket *b = &w->buckets[k];
        int64_t n = 0;
        for (int64_t i = 0; i < b->n; i++)
            if (b->copies[i].row < first || b->copies[i].row >= high) b->copies[n++] = b->copies[i];
        b->n = n;
    }
    free_arenas(w, p->table);
    return PERI_OK;
}

peri_status peri_moment_pass(peri_moment *m, int64_t index, int64_t row)
{
    part *p = NULL;
    PERI_NEED(m);
    PERI_TRY(moment_part("peri_moment_pass", m, index, &p));
    if (row < p->passed || row > p->rows)
        return peri__fail(PERI_ERANGE, "peri_moment_pass: row %lld, allowed: %lld to %lld", (long long)row,
                          (long long)p->passed, (long long)p->rows);
    if (row == p->passed) return PERI_OK;
    PERI_TRY(peri__tbe_enter(p->of->tbe, true));
    return peri__tbe_leave(p->of->tbe, true, pass_rows(m, p, row));
}

/** qsort: parts of a table follow each other, the one with the smallest rows first. */
static int by_table(const void *a, const void *b)
{
    const part *x = *(part *const *)a, *y = *(part *const *)b;
    int64_t d = x->of->number - y->of->number;
    if (d == 0) d = x->table - y->table;
    if (d == 0) d = x->row_bytes - y->row_bytes;
    if (d == 0) d = x - y;
    return d < 0 ? -1 : d > 0;
}

peri_status peri_moment_order(const peri_moment *m, int32_t n, int64_t *order)
{
    PERI_NEED(m);
    PERI_NEED(order);
    if (n != m->n_parts)
        return peri__fail(PERI_EINVAL, "peri_moment_order: %d parts, wanted: all %lld", n,
                          (long long)m->n_parts);
    const part **sorted = peri__alloc((size_t)peri__max(n, 1) * sizeof *sorted);
    if (!sorted) return PERI_ENOMEM;
    for (int64_t i = 0; i < n; i++) sorted[i] = &m->parts[i];
    qsort(sorted, (size_t)n, sizeof *sorted, by_table);
    for (int64_t i = 0; i < n; i++) order[i] = sorted[i] - m->parts;
    peri__free(sorted);
    return PERI_OK;
}

int64_t peri_moment_bytes(const peri_moment *m) { return m ? atomic_load(&((peri_moment *)(uintptr_t)m)->bytes) : 0; }
