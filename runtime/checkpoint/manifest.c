/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest.c: manifests in memory: making them, and whether the pieces of tensors fit together. See manifest.h.
 */
#include "manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

void peri__manifest_fini(peri__manifest *m)
{
    peri__free(m->text);
    peri__free(m->numbers);
    peri__free(m->files);
    peri__free(m->entries);
    peri__free(m->pieces);
    peri__free(m->places);
    peri__free(m->values);
    *m = (peri__manifest){0};
}

#define GROW(m, what, n)                                                                                               \
    peri__grow_pages((void **)&(m)->what, &(m)->what##_room, (m)->n_##what + (n), sizeof *(m)->what)

static peri_status add_text(peri__manifest *m, const char *text, int64_t *at)
{
    int64_t n = (int64_t)strlen(text) + 1;
    PERI_TRY(GROW(m, text, n));
    memcpy(m->text + m->n_text, text, (size_t)n);
    *at = m->n_text;
    m->n_text += n;
    return PERI_OK;
}

/** Put the numbers of a shape or a region; @at: where they are. Tables next to each other are often alike: then these
 *  are the numbers at @before (-1: none), else they are appended. */
static peri_status put_numbers(peri__manifest *m, const int64_t *list, int64_t n, int64_t before, int64_t *at)
{
    *at = before;
    if (before >= 0 && before + n <= m->n_numbers &&
        memcmp(m->numbers + before, list, (size_t)n * sizeof *list) == 0)
        return PERI_OK;
    PERI_TRY(GROW(m, numbers, peri__max(n, 1))); /* an array in any case: scalars compare shapes of no number */
    if (n) memcpy(m->numbers + m->n_numbers, list, (size_t)n * sizeof *list);
    *at = m->n_numbers;
    m->n_numbers += n;
    return PERI_OK;
}

peri_status peri__manifest_file(peri__manifest *m, const char *name, int64_t bytes, int32_t *index)
{
    peri__file f = {.bytes = bytes};
    PERI_TRY(GROW(m, files, 1));
    PERI_TRY(add_text(m, name, &f.name));
    *index = (int32_t)m->n_files;
    m->files[m->n_files++] = f;
    return PERI_OK;
}

peri_status peri__manifest_entry(peri__manifest *m, const char *name, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    peri__entry e = {.first_piece = m->n_pieces, .dtype = dtype, .ndim = ndim};
    const int64_t before = m->n_entries ? m->entries[m->n_entries - 1].shape : -1;
    PERI_TRY(GROW(m, entries, 1));
    PERI_TRY(put_numbers(m, shape, ndim, before, &e.shape));
    PERI_TRY(add_text(m, name, &e.name));
    m->entries[m->n_entries++] = e;
    return PERI_OK;
}

peri_status peri__manifest_piece(peri__manifest *m, const peri__region *region, const peri__stored_piece *place)
{
    peri__entry *e = &m->entries[m->n_entries - 1];
    peri__stored_piece p = *place;
    const int64_t before = m->n_pieces ? m->pieces[m->n_pieces - 1].numbers : -1, ndim = e->ndim;
    int64_t numbers[2 * PERI_MAX_DIMS + 2] = {0};
    memcpy(numbers, region->offset, (size_t)ndim * sizeof *numbers);
    memcpy(numbers + ndim, region->size, (size_t)ndim * sizeof *numbers);
    numbers[2 * ndim] = region->column;
    numbers[2 * ndim + 1] = region->columns;
    p.listed = region->rows ? region->listed : 0;
    if (region->rows) PERI_TRY(add_text(m, region->rows, &p.rows));
    if (region->rows) p.rows++;
    PERI_TRY(GROW(m, pieces, 1));
    PERI_TRY(put_numbers(m, numbers, 2 * ndim + 2, before, &p.numbers));
    m->pieces[m->n_pieces++] = p;
    e->n_pieces++;
    return PERI_OK;
}

void peri__piece_region(const peri__manifest *m, const peri__entry *e, const peri__stored_piece *p, peri__region *out)
{
    const int64_t *n = m->numbers + p->numbers;
    *out = (peri__region){.column = n[2 * e->ndim], .columns = n[2 * e->ndim + 1], .listed = p->listed};
    if (p->rows) out->rows = peri__manifest_text(m, p->rows - 1);
    memcpy(out->offset, n, (size_t)e->ndim * sizeof *n);
    memcpy(out->size, n + e->ndim, (size_t)e->ndim * sizeof *n);
}

/* -- regions ------------------------------------------------------------------------------------------------------- */

peri_status peri__region_take(peri__region *out, const peri_checkpoint_region *region, const char *function)
{
    peri_checkpoint_region now;
    PERI_TRY(peri__struct_take(&now, sizeof now, region, function, "peri_checkpoint_region"));
    *out = (peri__region){.column = now.column, .columns = now.columns, .rows = now.rows, .listed = now.listed,
                          .alike = now.alike};
    memcpy(out->offset, now.offset, sizeof now.offset);
    memcpy(out->size, now.extent, sizeof now.extent);
    return PERI_OK;
}

const char *peri__region_text(int32_t ndim, const peri__region *region, char *out, size_t room)
{
    size_t at = 0;
    at += (size_t)snprintf(out, room, "[");
    for (int32_t d = 0; d < ndim && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%lld:%lld", d ? "," : "", (long long)region->offset[d],
                               (long long)(region->offset[d] + region->size[d]));
    if (region->rows && at < room)
        at += (size_t)snprintf(out + at, room - at, ";%lld rows of %s", (long long)region->listed, region->rows);
    if (region->columns && at < room)
        at += (size_t)snprintf(out + at, room - at, ";columns %lld:%lld", (long long)region->column,
                               (long long)(region->column + region->columns));
    if (at < room) snprintf(out + at, room - at, "]");
    return out;
}

peri_status peri__region_check(const char *what, int32_t ndim, const int64_t *shape, const peri__region *region,
                               int64_t *elements)
{
    *elements = 1;
    for (int32_t d = 0; d < ndim; d++) {
        int64_t offset = region->offset[d], size = region->size[d];
        if (offset < 0 || size < 0 || offset > shape[d] || size > shape[d] - offset)
            return peri__fail(PERI_EINVAL, "%s: dimension %d: %lld elements from %lld on, allowed: within 0 to %lld",
                              what, d, (long long)size, (long long)offset, (long long)shape[d]);
        if (__builtin_mul_overflow(*elements, size, elements))
            return peri__fail(PERI_EINVAL, "%s: it has too many elements", what);
    }
    if (region->rows && strlen(region->rows) > 100)
        return peri__fail(PERI_EINVAL, "%s: the name of the list of rows has %zu bytes, allowed: up to 100", what,
                          strlen(region->rows));
    if (region->rows && (ndim < 1 || region->listed < 0 || region->listed > region->size[0]))
        return peri__fail(PERI_EINVAL, "%s: %lld rows are listed, allowed: 0 to %lld", what, (long long)region->listed,
                          (long long)(ndim < 1 ? 0 : region->size[0]));
    if (region->column < 0 || region->columns < 0 || region->column > INT64_MAX - region->columns ||
        (!region->columns && region->column))
        return peri__fail(PERI_EINVAL, "%s: columns %lld from %lld on, allowed: none, or 1 or more from 0 or later on",
                          what, (long long)region->columns, (long long)region->column);
    return PERI_OK;
}

/* -- do pieces fit together? --------------------------------------------------------------------------------------- */

/** What the order of pieces and entries asks for: qsort has no argument of its own, and several threads may sort. */
static int by_name(const void *a, const void *b, void *manifest)
{
    const peri__manifest *m = manifest;
    int order = strcmp(peri__entry_name(m, a), peri__entry_name(m, b));
    if (order) return order;
    const peri__entry *x = a, *y = b;
    return x->first_piece < y->first_piece ? -1 : x->first_piece > y->first_piece;
}

typedef struct piece_order {
    const peri__manifest *m;
    int32_t ndim;
} piece_order;

/** By columns, then by offset. */
static int by_place(const void *a, const void *b, void *context)
{
    const piece_order *o = context;
    const int64_t *x = o->m->numbers + ((const peri__stored_piece *)a)->numbers;
    const int64_t *y = o->m->numbers + ((const peri__stored_piece *)b)->numbers;
    for (int32_t d = 2 * o->ndim; d < 2 * o->ndim + 2; d++)
        if (x[d] != y[d]) return x[d] < y[d] ? -1 : 1;
    for (int32_t d = 0; d < o->ndim; d++)
        if (x[d] != y[d]) return x[d] < y[d] ? -1 : 1;
    return 0;
}

static bool same_columns(int32_t ndim, const int64_t *x, const int64_t *y)
{
    return x[2 * ndim] == y[2 * ndim] && x[2 * ndim + 1] == y[2 * ndim + 1];
}

/* Whether rectangles are a whole one, each element once, without comparing them with each other: draw a random number
 * h_d(x) for each place x of each dimension d. In a field, the product over d of h_d(end) - h_d(begin) is a measure:
 * rectangles that are the whole, each element once, have the sum of the whole; of others the sum differs, but for one
 * time in 2^58 (it is a polynomial of degree ndim in the random numbers: Schwartz and Zippel). The numbers are drawn
 * anew in each process, so nobody can prepare a file for them. */

#define FIELD (((uint64_t)1 << 61) - 1) /* a prime */

static uint64_t multiply_in_field(uint64_t x, uint64_t y)
{
    const unsigned __int128 product = (unsigned __int128)x * y;
    return ((uint64_t)(product & FIELD) + (uint64_t)(product >> 61)) % FIELD; /* 2^61 is 1 in the field */
}

static uint64_t random_of_coordinate(uint64_t seed, int32_t d, int64_t x)
{
    return peri__hash_mix(seed + (uint64_t)d, (uint64_t)x) % FIELD;
}

static uint64_t random_measure(uint64_t seed, int32_t ndim, const int64_t *offset, const int64_t *size)
{
    uint64_t m = 1;
    for (int32_t d = 0; d < ndim; d++) {
        const int64_t begin = offset ? offset[d] : 0;
        m = multiply_in_field(
            m, (random_of_coordinate(seed, d, begin + size[d]) + FIELD - random_of_coordinate(seed, d, begin)) % FIELD);
    }
    return m;
}

static uint64_t drawn_seed(void)
{
    static atomic_uint_least64_t drawn;
    uint64_t seed = atomic_load_explicit(&drawn, memory_order_relaxed), fresh;
    if (seed) return seed;
    if (getrandom(&fresh, sizeof fresh, 0) != sizeof fresh) fresh = (uint64_t)peri_time_ns();
    fresh |= 1;
    return atomic_compare_exchange_strong(&drawn, &seed, fresh) ? fresh : seed;
}

/** The pieces [first, past) of one set of columns: all elements of the tensor, each once. */
static peri_status whole(const peri__manifest *m, const peri__entry *e, int64_t first, int64_t past, const char *what)
{
    const uint64_t seed = drawn_seed();
    const int64_t *shape = peri__entry_shape(m, e), all = peri__volume(e->ndim, shape);
    int64_t found = 0;
    uint64_t sum = 0;
    bool twice = false;
    for (int64_t i = first; i < past && !twice; i++) {
        const int64_t *x = m->numbers + m->pieces[i].numbers;
        twice = __builtin_add_overflow(found, peri__volume(e->ndim, x + e->ndim), &found) || found > all;
        sum = (sum + random_measure(seed, e->ndim, x, x + e->ndim)) % FIELD;
    }
    if (twice || (found == all && all > 0 && sum != random_measure(seed, e->ndim, NULL, shape)))
        return peri__fail(PERI_EMISMATCH, "%s: tensor '%s': two of its pieces have the same elements", what,
                          peri__entry_name(m, e));
    if (found == all) return PERI_OK;
    return peri__fail(PERI_EMISMATCH, "%s: tensor '%s': its pieces have %lld of its %lld elements", what,
                      peri__entry_name(m, e), (long long)found, (long long)all);
}

static peri_status settle_entry(peri__manifest *m, const peri__entry *e, const char *what)
{
    piece_order order = {m, e->ndim};
    const int64_t stop = e->first_piece + e->n_pieces;
    if (e->n_pieces > 1) qsort_r(m->pieces + e->first_piece, (size_t)e->n_pieces, sizeof *m->pieces, by_place, &order);
    if (e->n_pieces == 0) return whole(m, e, 0, 0, what);
    int64_t column = 0; /* end of the columns of the pieces so far */
    for (int64_t i = e->first_piece, past; i < stop; i = past) {
        const int64_t *x = m->numbers + m->pieces[i].numbers;
        for (past = i + 1; past < stop && same_columns(e->ndim, x, m->numbers + m->pieces[past].numbers);) past++;
        if (i > e->first_piece && x[2 * e->ndim] < column)
            return peri__fail(PERI_EMISMATCH, "%s: tensor '%s': some of its pieces share columns, others do not", what,
                              peri__entry_name(m, e));
        if (x[2 * e->ndim + 1] == 0 && past < stop)
            return peri__fail(PERI_EMISMATCH, "%s: tensor '%s': some of its pieces say their columns, others do not",
                              what, peri__entry_name(m, e));
        column = x[2 * e->ndim] + x[2 * e->ndim + 1];
        PERI_TRY(whole(m, e, i, past, what));
    }
    return PERI_OK;
}

/** Entries are sorted by name, and no two have the same. */
static bool all_differ(const peri__manifest *m)
{
    for (int64_t i = 1; i < m->n_entries; i++)
        if (strcmp(peri__entry_name(m, &m->entries[i - 1]), peri__entry_name(m, &m->entries[i])) >= 0) return false;
    return true;
}

/** Entries are sorted: make one of those of the same name, and their pieces neighbours. */
static peri_status join(peri__manifest *m, const char *what)
{
    peri__stored_piece *pieces = peri__realloc_pages(NULL, (size_t)peri__max(m->n_pieces, 1) * sizeof *pieces);
    int64_t n = 0, used = 0;
    if (!pieces) return PERI_ENOMEM;
    for (int64_t i = 0; i < m->n_entries; i++) {
        const peri__entry e = m->entries[i];
        peri__entry *last = n ? &m->entries[n - 1] : NULL;
        bool again = last && strcmp(peri__entry_name(m, last), peri__entry_name(m, &e)) == 0;
        if (again &&
            (last->dtype != e.dtype || last->ndim != e.ndim ||
             memcmp(peri__entry_shape(m, last), peri__entry_shape(m, &e), (size_t)e.ndim * sizeof *m->numbers) != 0)) {
            peri__free(pieces);
            return peri__fail(PERI_EMISMATCH, "%s: tensor '%s' has two dtypes or shapes", what,
                              peri__entry_name(m, &e));
        }
        if (e.n_pieces) memcpy(pieces + used, m->pieces + e.first_piece, (size_t)e.n_pieces * sizeof *pieces);
        if (again) {
            last->n_pieces += e.n_pieces;
        } else {
            m->entries[n] = e;
            m->entries[n++].first_piece = used;
        }
        used += e.n_pieces;
    }
    peri__free(m->pieces);
    m->pieces = pieces;
    m->pieces_room = peri__max(m->n_pieces, 1);
    m->n_entries = n;
    return PERI_OK;
}

const peri__entry *peri__entry_named(const peri__manifest *m, const char *name)
{
    int64_t low = 0, high = m->n_entries;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        int order = strcmp(peri__entry_name(m, &m->entries[middle]), name);
        if (order == 0) return &m->entries[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

const peri__entry *peri__rows_entry(const peri__manifest *m, const peri__stored_piece *p)
{
    return peri__entry_named(m, peri__manifest_text(m, p->rows - 1));
}

/** The lists of rows that pieces name are there, and as long as they say. Which rows they list is looked at when they
 *  are read. */
static peri_status check_lists(const peri__manifest *m, const peri__entry *e, const char *what)
{
    for (int64_t k = e->first_piece; k < e->first_piece + e->n_pieces; k++) {
        const peri__stored_piece *p = &m->pieces[k];
        if (!p->rows) continue;
        const char *name = peri__manifest_text(m, p->rows - 1);
        const peri__entry *list = peri__rows_entry(m, p);
        if (!list || !peri__lists_rows(name))
            return peri__fail(PERI_EMISMATCH, "%s: tensor '%s': its list of rows, '%.100s', is no tensor that is there",
                              what, peri__entry_name(m, e), name);
        if (list->dtype != PERI_I64 || list->ndim != 1 || *peri__entry_shape(m, list) != p->listed ||
            list->n_pieces > 1)
            return peri__fail(PERI_EMISMATCH,
                              "%s: tensor '%s': its list of rows, '%.100s', has another form than %lld numbers of I64",
                              what, peri__entry_name(m, e), name, (long long)p->listed);
    }
    return PERI_OK;
}

peri_status peri__manifest_settle(peri__manifest *m, const char *what)
{
    if (!all_differ(m)) { /* as they do in a manifest that was settled before it was printed */
        qsort_r(m->entries, (size_t)m->n_entries, sizeof *m->entries, by_name, m);
        if (!all_differ(m)) PERI_TRY(join(m, what));
    }
    for (int64_t i = 0; i < m->n_entries; i++) PERI_TRY(settle_entry(m, &m->entries[i], what));
    for (int64_t i = 0; i < m->n_entries; i++) PERI_TRY(check_lists(m, &m->entries[i], what));
    return PERI_OK;
}
