/* SPDX-License-Identifier: Apache-2.0
 *
 * marks.c: which rows of a table batch changed since they were asked for last: a watch (row_watch.h) that sets bits,
 * for increments of checkpoints.
 */
#include "row_watch.h"

#include <stdlib.h>

struct peri_row_marks {
    peri__row_watch watch;
    peri__refs refs;
    peri_tbe *tbe; /* borrowed, so that marks do not keep its memory; NULL: it is gone */
    peri__row_bits bits;
    atomic_bool all; /* bits could not be set: all rows count as changed */
};

/** A step does not fail because of this: rows that could not be marked are among those that count as changed. */
static peri_status mark_rows(peri__row_watch *watch, peri_tbe *tbe, const peri__row_change *change)
{
    peri_row_marks *m = (peri_row_marks *)watch;
    if (atomic_load(&m->all)) return PERI_OK;
    if (peri__row_bits_mark(tbe, &m->bits, change, false) < 0) atomic_store(&m->all, true);
    return PERI_OK;
}

static void table_batch_gone(peri__row_watch *watch, peri_tbe *tbe)
{
    peri_row_marks *m = (peri_row_marks *)watch;
    peri__tbe_free_later(tbe, &m->bits.words);
    m->tbe = NULL;
}

peri_status peri_row_marks_new(peri_tbe *tbe, peri_row_marks **out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    PERI_TRY(PERI_NEED_WORK("peri_row_marks_new", tbe->device, PERI_K_tbe_mark));
    peri_row_marks *m = peri__alloc_zero(sizeof *m);
    if (!m) return PERI_ENOMEM;
    m->watch.before = mark_rows;
    m->watch.gone = table_batch_gone;
    peri__refs_init(&m->refs);
    peri_status status = peri__row_bits_init(tbe, &m->bits);
    if (status >= 0) status = peri__tbe_watch(tbe, &m->watch);
    if (status < 0) {
        peri__row_bits_fini(&m->bits);
        peri__free(m);
        return status;
    }
    m->tbe = tbe;
    peri__object_count(1);
    *out = m;
    return PERI_OK;
}

void peri_row_marks_release(peri_row_marks *m)
{
    if (!m || !peri__refs_drop(&m->refs)) return;
    if (m->tbe) {
        peri__tbe_unwatch(m->tbe, &m->watch);
        peri__tbe_free_later(m->tbe, &m->bits.words);
    }
    peri__row_bits_fini(&m->bits);
    peri__object_count(-1);
    peri__free(m);
}

/** Within a call: the bits on the host, and zeros in their place. */
static peri_status read_and_clear(peri_row_marks *m, peri_tensor *to)
{
    if (atomic_exchange(&m->all, false)) PERI_TRY(peri_tensor_fill(to, -1)); /* all bits */
    else PERI_TRY(peri_tensor_copy(to, m->bits.words));
    return peri_tensor_fill(m->bits.words, 0);
}

peri_status peri_row_marks_take(peri_row_marks *m, peri_tensor **out)
{
    peri_device *cpu;
    peri_tensor *t;
    PERI_NEED(m);
    PERI_NEED(out);
    if (!m->tbe) return peri__fail(PERI_ENOTFOUND, "peri_row_marks_take: the table batch is gone");
    int64_t words = peri__numel(m->bits.words);
    PERI_TRY(peri_device_get("cpu", &cpu));
    PERI_TRY(peri_tensor_new(cpu, PERI_I64, 1, &words, &t));
    peri_status status = peri__tbe_enter(m->tbe, true);
    if (status >= 0) status = peri__tbe_leave(m->tbe, true, read_and_clear(m, t));
    if (status >= 0) status = peri__stream_dry(peri_stream_current(m->tbe->device));
    if (status < 0) {
        atomic_store(&m->all, true);
        peri_tensor_release(t);
        return status;
    }
    *out = t;
    return PERI_OK;
}

bool peri_row_marks_alive(const peri_row_marks *m) { return m && m->tbe; }

/** Words on the host. */
static peri_status check_words(const char *function, const peri_tensor *bits)
{
    char text[128];
    if (bits->dtype == PERI_I64 && bits->ndim == 1 && peri__contiguous(bits) && peri__immediate(peri__device(bits)))
        return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: bits are %s, wanted what peri_row_marks_take returns", function,
                      peri__tensor_text(bits, text, sizeof text));
}

peri_status peri_row_bits_join(peri_tensor *bits, const peri_tensor *more)
{
    PERI_NEED(bits);
    PERI_NEED(more);
    PERI_TRY(check_words("peri_row_bits_join", bits));
    PERI_TRY(check_words("peri_row_bits_join", more));
    if (peri__numel(bits) != peri__numel(more))
        return peri__fail(PERI_EINVAL, "peri_row_bits_join: %lld and %lld words", (long long)peri__numel(bits),
                          (long long)peri__numel(more));
    peri__changed(bits);
    uint64_t *to = peri__data(bits);
    const uint64_t *from = peri__data(more);
    for (int64_t i = 0; i < peri__numel(bits); i++) to[i] |= from[i];
    return PERI_OK;
}

peri_status peri_row_bits_list(const peri_tbe *tbe, int64_t table, const peri_tensor *bits, int64_t first_row,
                               peri_tensor **out)
{
    static const char f[] = "peri_row_bits_list";
    PERI_NEED(tbe);
    PERI_NEED(bits);
    PERI_NEED(out);
    PERI_TRY(check_words(f, bits));
    if (table < 0 || table >= tbe->n_tables)
        return peri__fail(PERI_ERANGE, "%s: table %lld, allowed: 0..%lld", f, (long long)table,
                          (long long)tbe->n_tables - 1);
    const int64_t first = peri__first_row(tbe, table), past = first + tbe->tables[table].config.rows;
    if (past > peri__numel(bits) * 64) return peri__fail(PERI_EINVAL, "%s: bits are of another table batch", f);
    const uint64_t *words = peri__data(bits);
    int64_t n = 0;
    for (int pass = 0; pass < 2; pass++) { /* count, then list */
        int64_t *rows = NULL, at = 0;
        if (pass) {
            PERI_TRY(peri_tensor_new(peri__device(bits), PERI_I64, 1, &n, out));
            rows = peri__data(*out);
        }
        for (int64_t row = first; row < past;) {
            uint64_t word = words[row / 64] >> row % 64;
            if (past - row < 64) word &= ((uint64_t)1 << (past - row)) - 1;
            if (!pass) at += __builtin_popcountll(word);
            else
                for (; word; word &= word - 1) rows[at++] = row + __builtin_ctzll(word) - first + first_row;
            row = (row / 64 + 1) * 64;
        }
        n = at;
    }
    return PERI_OK;
}

/* -- whose rows a tensor has --------------------------------------------------------------------------------------- */

/** The last table that begins where @t does or before: those in front of it at that place are empty. -1: there are no
 *  tables. */
static int64_t table_at(const peri_tbe *tbe, int32_t state, const peri_tensor *t)
{
    const peri__state *s = &tbe->state[state];
    int64_t low = 0, high = tbe->n_tables;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (s->flat->offset + peri__state_offset(tbe, s, middle) <= t->offset) low = middle;
        else high = middle;
    }
    return high == 0 ? -1 : low;
}

/** The table whose part @t is: it has all its rows, where peri_tbe_state has them. -1: none. */
static int64_t table_of_view(const peri_tbe *tbe, int32_t state, const peri_tensor *t)
{
    const int64_t low = table_at(tbe, state, t);
    peri_tensor *view;
    if (low < 0 || peri__state_view((peri_tbe *)(uintptr_t)tbe, low, state, &view) < 0) return -1;
    const bool same = view->ndim == t->ndim && view->offset == t->offset && view->shape[0] > 0 &&
                      memcmp(view->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0 &&
                      memcmp(view->stride, t->stride, (size_t)t->ndim * sizeof *t->stride) == 0;
    peri_tensor_release(view);
    return same ? low : -1;
}

peri_tbe *peri__tbe_of_view(const peri_tensor *t, int64_t *table, int32_t *state)
{
    peri_tbe *tbe = peri__tbe_holding(t, state);
    if (!tbe) return NULL;
    *table = peri__has_rows(tbe->state[*state].geometry) ? table_of_view(tbe, *state, t) : -1;
    if (*table >= 0) return tbe;
    peri_tbe_release(tbe);
    return NULL;
}

int32_t peri__tbe_coded_rows(const peri_tensor *t, int64_t *cols)
{
    int32_t state, coded = 0;
    peri_tbe *tbe = peri__tbe_holding(t, &state);
    const int64_t table = tbe && tbe->state[state].which == PERI__STATE_WEIGHT ? table_at(tbe, state, t) : -1;
    if (table >= 0 && peri__rows_are_bytes(tbe->dtype)) {
        coded = tbe->dtype;
        *cols = tbe->tables[table].config.cols;
    }
    peri_tbe_release(tbe);
    return coded;
}

peri_status peri__tbe_no_leaf(const peri_tensor *t)
{
    int32_t state;
    peri_tbe *tbe = peri__tbe_holding(t, &state);
    const int64_t table = tbe && tbe->optimizer.kind != PERI_TBE_NONE ? table_at(tbe, state, t) : -1;
    peri_status status = PERI_OK;
    if (table >= 0)
        status = peri__fail(PERI_EINVAL,
                            "peri_tensor_requires_grad_set: a view of '%s' of table '%s', which its fused optimizer "
                            "updates in the backward pass: it is no parameter, and has no gradient. Tables that are "
                            "not to learn are a collection of their own with the learning rate 0, or are looked up "
                            "within peri.no_grad",
                            tbe->state[state].name, tbe->tables[table].name);
    peri_tbe_release(tbe);
    return status;
}

peri_status peri_tbe_of_view(const peri_tensor *t, peri_tbe **tbe, int64_t *table, const char **name)
{
    int32_t state;
    PERI_NEED(t);
    PERI_NEED(tbe);
    PERI_NEED(table);
    PERI_NEED(name);
    *tbe = peri__tbe_of_view(t, table, &state);
    if (*tbe) *name = (*tbe)->state[state].name;
    return PERI_OK;
}

/* -- the rows themselves ------------------------------------------------------------------------------------------- */

/** Rows @list [n] of state @part into @some (@write: from it), by runs of rows that follow each other. Within a
 *  call. */
static peri_status move_runs(peri_tbe *tbe, int64_t table, int32_t part, const int64_t *list, int64_t n,
                             peri_tensor *rows, bool write)
{
    for (int64_t i = 0, past; i < n; i = past) {
        peri_tensor *some;
        for (past = i + 1; past < n && list[past] == list[past - 1] + 1;) past++;
        PERI_TRY(peri_tensor_slice(rows, 0, i, past, 1, &some));
        peri_status status = write ? tbe->store->write(tbe, table, part, list[i], some)
                                   : tbe->store->read(tbe, table, part, list[i], some);
        peri_tensor_release(some);
        PERI_TRY(status);
    }
    return PERI_OK;
}

/** The same in memory: one row after the other where the host reaches them. */
static peri_status move_here(peri_tbe *tbe, int64_t table, int32_t part, const int64_t *list, int64_t n,
                             peri_tensor *rows, bool write)
{
    peri_tensor *view;
    PERI_TRY(peri__state_view(tbe, table, part, &view));
    const int64_t size = peri_dtype_size(view->dtype), stride = view->stride[0] * size;
    const int64_t row = (view->ndim > 1 ? view->shape[1] : 1) * size;
    char *table_rows = peri__data(view), *others = peri__data(rows);
    for (int64_t i = 0; i < n; i++) {
        if (write) memcpy(table_rows + list[i] * stride, others + i * row, (size_t)row);
        else memcpy(others + i * row, table_rows + list[i] * stride, (size_t)row);
    }
    peri_tensor_release(view);
    return PERI_OK;
}

/** What @rows lists of state @name of @table: which part it is, and the shape of these rows. */
static peri_status check_rows(const char *f, const peri_tbe *tbe, int64_t table, const char *name,
                              const peri_tensor *rows, int32_t *part, int32_t *ndim, int64_t shape[2])
{
    PERI_TRY(check_words(f, rows));
    const int32_t geometry = peri_tbe_state_geometry(tbe, name);
    *ndim = peri_tbe_state_shape(tbe, table, name, shape);
    if (geometry < 0 || *ndim < 0) return geometry < 0 ? geometry : *ndim;
    if (!peri__has_rows(geometry)) return peri__fail(PERI_EINVAL, "%s: state '%.60s' has no rows", f, name);
    for (*part = 0; strcmp(tbe->state[*part].name, name) != 0;) ++*part;
    const int64_t n = peri__numel(rows), *list = peri__data(rows);
    for (int64_t i = 0; i < n; i++)
        if (list[i] < 0 || list[i] >= tbe->tables[table].config.rows)
            return peri__fail(PERI_ERANGE, "%s: table '%s': row %lld, allowed: 0..%lld", f, tbe->tables[table].name,
                              (long long)list[i], (long long)tbe->tables[table].config.rows - 1);
    shape[0] = n;
    if (peri__rows_are_bytes(tbe->dtype)) shape[1] = peri__tbe_stride(tbe->dtype, shape[1]);
    return PERI_OK;
}

peri_status peri_tbe_read_rows(peri_tbe *tbe, int64_t table, const char *name, const peri_tensor *rows,
                               peri_tensor **out)
{
    int64_t shape[2];
    int32_t part, ndim;
    peri_tensor *t = NULL;
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(rows);
    PERI_NEED(out);
    PERI_TRY(check_rows("peri_tbe_read_rows", tbe, table, name, rows, &part, &ndim, shape));
    const bool here = tbe->store->whole && peri__immediate(tbe->device);
    const int64_t *list = peri__data(rows);
    PERI_TRY(peri_tensor_new(tbe->device, tbe->state[part].dtype, ndim, shape, &t));
    peri_status status = peri__tbe_enter(tbe, true);
    if (status >= 0)
        status = peri__tbe_leave(tbe, true, (here ? move_here : move_runs)(tbe, table, part, list, shape[0], t, false));
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

/** Within a call: tell the watches, and write. */
static peri_status write_rows(peri_tbe *tbe, int64_t table, int32_t part, const peri_tensor *rows, peri_tensor *src)
{
    const int64_t *list = peri__data(rows), n = peri__numel(rows);
    const peri__row_change change = {.form = PERI__ROWS_LIST, .part = part, .table = table, .rows = list, .count = n};
    const bool here = tbe->store->whole && peri__immediate(tbe->device) && peri__immediate(peri__device(src)) &&
                      peri__contiguous(src);
    PERI_TRY(peri__tbe_tell(tbe, &change));
    tbe->writes += part == 0;
    return (here ? move_here : move_runs)(tbe, table, part, list, n, src, true);
}

peri_status peri_tbe_write_rows(peri_tbe *tbe, int64_t table, const char *name, const peri_tensor *rows,
                                const peri_tensor *src)
{
    static const char f[] = "peri_tbe_write_rows";
    int64_t shape[2];
    int32_t part, ndim;
    PERI_NEED(tbe);
    PERI_NEED(name);
    PERI_NEED(rows);
    PERI_NEED(src);
    PERI_TRY(check_rows(f, tbe, table, name, rows, &part, &ndim, shape));
    if (src->ndim != ndim || memcmp(src->shape, shape, (size_t)ndim * sizeof *shape) != 0 ||
        src->dtype != tbe->state[part].dtype)
        return peri__fail(
            PERI_EINVAL,
            "%s: src has another shape or dtype than %lld rows of state '%.60s' of table '%s', which is %s", f,
            (long long)shape[0], name, tbe->tables[table].name, peri_dtype_name(tbe->state[part].dtype));
    for (int64_t i = 1; i < shape[0]; i++)
        if (((const int64_t *)peri__data(rows))[i] <= ((const int64_t *)peri__data(rows))[i - 1])
            return peri__fail(PERI_EINVAL,
                              "%s: table '%s': row %lld of the list is not above the one before; allowed: ascending", f,
                              tbe->tables[table].name, (long long)i);
    PERI_TRY(peri__tbe_enter(tbe, true));
    return peri__tbe_leave(tbe, true, write_rows(tbe, table, part, rows, (peri_tensor *)(uintptr_t)src));
}
