/* SPDX-License-Identifier: Apache-2.0
 *
 * columns.c: samples in arrays of memory (of mapped files, usually), in their own order or shuffled by blocks, and
 * files of such arrays.
 *
 * Shuffling. 10 samples in blocks of 3 are blocks A B C and a short one, D. The blocks get a random order, say C D A B,
 * and two that follow each other (`blocks`) make a group, whose samples get a random order of their own. So what is
 * read together lies in few places, and the sample at any place of the order is known without those before it:
 *
 *     place in the order   0 1 2 3 | 4 5 6 7 8 9
 *     group                  C D   |     A B
 *     sample               7 9 6 8 | 4 0 2 5 1 3
 */
#include "../base/floats.h"
#include "features.h"

typedef struct part {
    peri_columns_part p; /* its name and ids are copies */
    int64_t first;       /* number of its first sample among all */
} part;

struct peri_columns {
    int32_t dense_features, sparse_features, dense;
    peri__id_rule *rules; /* [sparse_features] */
    int64_t padding;
    bool padded;
    part *parts;
    int32_t n_parts;
    int64_t rows;
    /* The order, of shuffled samples. */
    int64_t block_rows, blocks, n_blocks;
    int64_t short_at;  /* the place of the short block among the shuffled ones; n_blocks: there is none */
    int64_t short_rows;
    int64_t *order;    /* [n_blocks] number of the block at each place */
    uint64_t seed, key; /* key: of the pass */
    int64_t ordered;   /* rows for which the order was made; -1: none */
    int64_t epoch;
    /* Room for a batch. */
    int64_t *ids, *cursor;
    int32_t *lengths;
    int64_t id_room, row_room;
};

static const int64_t sizes[] = PERI_DTYPE_SIZES;

/* -- elements ------------------------------------------------------------------------------------------------------ */

/** Element @i as a whole number. */
static inline int64_t whole_at(const peri_rows *r, int64_t i)
{
    const char *p = (const char *)r->data + i * sizes[r->dtype];
    union {
        int64_t i64;
        int32_t i32;
        int16_t i16;
    } x;
    switch (r->dtype) {
    case PERI_I64: memcpy(&x.i64, p, 8); return x.i64;
    case PERI_I32: memcpy(&x.i32, p, 4); return x.i32;
    case PERI_I16: memcpy(&x.i16, p, 2); return x.i16;
    case PERI_I8: return *(const int8_t *)p;
    default: return *(const uint8_t *)p; /* U8, BOOL */
    }
}

static bool is_whole(int32_t dtype)
{
    return dtype == PERI_I64 || dtype == PERI_I32 || dtype == PERI_I16 || dtype == PERI_I8 || dtype == PERI_U8 ||
           dtype == PERI_BOOL;
}

static inline double dense_number_at(const peri_rows *r, int64_t i)
{
    float f;
    double d;
    if (r->dtype == PERI_F32) {
        memcpy(&f, (const char *)r->data + i * 4, 4);
        return f;
    }
    if (r->dtype != PERI_F64) return (double)whole_at(r, i);
    memcpy(&d, (const char *)r->data + i * 8, 8);
    return d;
}

/* -- the order ----------------------------------------------------------------------------------------------------- */

/** The place of @i in a random order of n numbers: a cipher of an even number of bits that has n numbers or more, again
 *  until it is one of the n. Four rounds, each of half the bits. */
static int64_t permute(int64_t i, int64_t n, uint64_t key)
{
    int half = 1;
    while (((int64_t)1 << (2 * half)) < n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t next = left ^ (peri__hash_mix(peri__hash_mix(key, round), right) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/** Place of the first sample of the block at place @k. */
static int64_t block_start(const peri_columns *c, int64_t k)
{
    return k * c->block_rows - (k > c->short_at ? c->block_rows - c->short_rows : 0);
}

/** Place of the block that has the sample at place @i. */
static int64_t block_of(const peri_columns *c, int64_t i)
{
    int64_t behind = c->short_at * c->block_rows; /* where the short block begins */
    if (i < behind) return i / c->block_rows;
    if (i < behind + c->short_rows) return c->short_at;
    return (i + c->block_rows - c->short_rows) / c->block_rows;
}

/** The sample at place @i. */
static int64_t sample_at(const peri_columns *c, int64_t i)
{
    if (c->block_rows == 0) return i;
    int64_t group = block_of(c, i) / c->blocks, first = block_start(c, group * c->blocks);
    int64_t end = block_start(c, peri__min((group + 1) * c->blocks, c->n_blocks));
    int64_t at = first + permute(i - first, end - first, peri__hash_mix(c->key, (uint64_t)group));
    int64_t block = block_of(c, at);
    return c->order[block] * c->block_rows + at - block_start(c, block);
}

/** Shuffle the blocks for pass c->epoch. */
static peri_status make_order(peri_columns *c)
{
    if (c->block_rows == 0 || c->ordered == c->rows) return PERI_OK;
    int64_t full = c->rows / c->block_rows;
    c->short_rows = c->rows % c->block_rows;
    c->n_blocks = full + (c->short_rows > 0);
    int64_t *order = peri__realloc(c->order, sizeof *order * (size_t)peri__max(c->n_blocks, (int64_t)1));
    if (!order) return PERI_ENOMEM;
    c->order = order;
    c->key = peri__hash_mix(peri__hash_mix(c->seed, 0), (uint64_t)c->epoch);
    for (int64_t i = 0; i < c->n_blocks; i++) {
        int64_t j =
            (int64_t)((__extension__(unsigned __int128) peri__hash_mix(~c->key, (uint64_t)i) * (uint64_t)(i + 1)) >>
                      64);
        order[i] = order[j];
        order[j] = i;
    }
    c->short_at = c->n_blocks;
    for (int64_t i = 0; i < c->n_blocks && c->short_rows; i++)
        if (order[i] == full) c->short_at = i;
    if (!c->short_rows) c->short_rows = c->block_rows;
    c->ordered = c->rows;
    return PERI_OK;
}

peri_status peri_columns_epoch(peri_columns *c, int64_t epoch)
{
    PERI_NEED(c);
    if (epoch != c->epoch) c->ordered = -1;
    c->epoch = epoch;
    return PERI_OK;
}

/* -- filling ------------------------------------------------------------------------------------------------------- */

/** The number of a row of the part, as messages say it. */
static long long row_of(const part *p, int64_t row) { return (long long)(p->p.first_row + row); }

static peri_status bad_id(const peri_columns *c, const part *p, int64_t row, int32_t feature, int64_t id)
{
    return peri__fail(
        PERI_ERANGE,
        "peri_columns: %s: row %lld: sparse feature %d has the id %lld, allowed: 0..%llu, below the rows of "
        "its table",
        p->p.ids_names ? p->p.ids_names[feature] : p->p.name, row_of(p, row), feature, (long long)id,
        (unsigned long long)c->rules[feature].modulus - 1);
}

/** Put id @x of the row into ids[*n], unless it is padding. */
static inline peri_status put_id(const peri_columns *c, const part *p, int64_t row, int32_t f, int64_t x, int64_t *ids,
                                 int64_t *n)
{
    const peri__id_rule *rule = &c->rules[f];
    if (c->padded && x == c->padding) return PERI_OK;
    if (!rule->modulus) {
        ids[(*n)++] = x;
        return PERI_OK;
    }
    int64_t id = x < 0 && rule->mode == PERI_IDS_EXACT ? -1 : peri__id_place(rule, (uint64_t)x);
    if (x < 0 && rule->mode == PERI_IDS_MOD) { /* as Python's % */
        int64_t m = (int64_t)rule->modulus, rest = x % m;
        id = rest < 0 ? rest + m : rest;
    }
    if (id < 0) return bad_id(c, p, row, f, x);
    ids[(*n)++] = id;
    return PERI_OK;
}

static peri_status make_room_for_batch(peri_columns *c, int64_t rows, int64_t ids)
{
    if (ids > c->id_room) {
        int64_t room = peri__max(ids, 2 * c->id_room);
        int64_t *more = peri__realloc(c->ids, sizeof *more * (size_t)room);
        if (!more) return PERI_ENOMEM;
        c->ids = more;
        c->id_room = room;
    }
    if (rows > c->row_room) {
        int32_t *lengths =
            peri__realloc(c->lengths, sizeof *lengths * (size_t)(rows * peri__max(c->sparse_features, 1)));
        if (!lengths) return PERI_ENOMEM;
        c->lengths = lengths;
        int64_t *cursor = peri__realloc(c->cursor, sizeof *cursor * (size_t)rows);
        if (!cursor) return PERI_ENOMEM;
        c->cursor = cursor;
        c->row_room = rows;
    }
    return PERI_OK;
}

/** Ids of a row that has so many of each feature. */
static peri_status fixed_ids(peri_columns *c, const part *p, int64_t row, int32_t *lengths, int64_t *n)
{
    for (int32_t f = 0; f < c->sparse_features; f++) {
        const peri_rows *r = &p->p.ids[f];
        int64_t from = *n;
        PERI_TRY(make_room_for_batch(c, 0, *n + r->count));
        for (int32_t k = 0; k < r->count; k++)
            PERI_TRY(put_id(c, p, row, f, whole_at(r, row * r->stride + k), c->ids, n));
        lengths[f] = (int32_t)(*n - from);
    }
    return PERI_OK;
}

/** Ids of a row that has its own number of each feature. */
static peri_status ragged_ids(peri_columns *c, const part *p, int64_t row, int32_t *lengths, int64_t *n)
{
    int64_t at, end;
    memcpy(&at, (const char *)p->p.offsets + 8 * row, 8);
    memcpy(&end, (const char *)p->p.offsets + 8 * row + 8, 8);
    if (at < 0 || end < at || end > p->p.total)
        return peri__fail(PERI_EFORMAT,
                          "peri_columns: %s: row %lld: its ids are %lld..%lld of %lld: the offsets are damaged",
                          p->p.name, row_of(p, row), (long long)at, (long long)end, (long long)p->p.total);
    PERI_TRY(make_room_for_batch(c, 0, *n + (end - at)));
    for (int32_t f = 0; f < c->sparse_features; f++) {
        int64_t from = *n, length = whole_at(&p->p.lengths, row * p->p.lengths.stride + f);
        if (length < 0 || length > end - at)
            return peri__fail(
                PERI_EFORMAT,
                "peri_columns: %s: row %lld: sparse feature %d has %lld of %lld ids: the lengths are damaged",
                p->p.name, row_of(p, row), f, (long long)length, (long long)(end - at));
        for (int64_t k = 0; k < length; k++, at++)
            PERI_TRY(put_id(c, p, row, f, whole_at(&p->p.values, at), c->ids, n));
        lengths[f] = (int32_t)(*n - from);
    }
    return PERI_OK;
}

/** The label and the dense features of a row. */
static peri_status numbers(const peri_columns *c, const part *p, int64_t row, peri_batch *b, int64_t to)
{
    const double label = p->p.labels.data ? dense_number_at(&p->p.labels, row * p->p.labels.stride) : 0;
    b->labels[to] = (float)label;
    if (!isfinite(b->labels[to]))
        return peri__fail(PERI_EFORMAT, "peri_columns: %s: row %lld: its label is %g, allowed: finite numbers of f32",
                          p->p.labels_name ? p->p.labels_name : p->p.name, row_of(p, row), label);
    for (int32_t d = 0; d < c->dense_features; d++) {
        const double given = dense_number_at(&p->p.dense, row * p->p.dense.stride + d);
        const float x = peri__dense_of(c->dense, given);
        b->dense[to * c->dense_features + d] = x;
        if (isfinite(given) && isfinite(x)) continue; /* of the logarithms NaN would be 0 */
        return peri__fail(PERI_EFORMAT,
                          "peri_columns: %s: row %lld: dense feature %d is %g, allowed: finite numbers of f32",
                          p->p.name, row_of(p, row), d, given);
    }
    return PERI_OK;
}

/** The part that has sample @i; *near: one that had the last. */
static const part *part_of(const peri_columns *c, int64_t i, int32_t *near)
{
    int32_t k = *near;
    while (i < c->parts[k].first) k--;
    while (i >= c->parts[k].first + c->parts[k].p.rows) k++;
    *near = k;
    return &c->parts[k];
}

peri_status peri_columns_fill(peri_columns *c, int64_t first, int64_t rows, peri_batch *b)
{
    int64_t n = 0;
    int32_t near = 0;
    PERI_NEED(c);
    PERI_NEED(b);
    PERI_TRY(peri__batch_check("peri_columns_fill", b, c->dense_features, c->sparse_features));
    if (first < 0 || rows < 0 || rows > IO_MAX_ROWS || first > c->rows - rows)
        return peri__fail(PERI_ERANGE, "peri_columns_fill: %lld samples from %lld on, allowed: of %lld",
                          (long long)rows, (long long)first, (long long)c->rows);
    PERI_TRY(make_order(c));
    PERI_TRY(peri__batch_reserve_rows(b, rows));
    PERI__OWN_FLOATS;
    PERI_TRY(make_room_for_batch(c, rows, 0));
    for (int64_t k = 0; k < rows; k++) {
        int64_t i = sample_at(c, first + k);
        const part *p = part_of(c, i, &near);
        int32_t *lengths = c->lengths + k * c->sparse_features;
        PERI_TRY(numbers(c, p, i - p->first, b, k));
        PERI_TRY(p->p.offsets ? ragged_ids(c, p, i - p->first, lengths, &n)
                              : fixed_ids(c, p, i - p->first, lengths, &n));
    }
    PERI_TRY(peri_batch_reserve(b, n));
    b->rows = rows;
    peri__batch_set_ids(b, c->ids, c->lengths, c->cursor);
    return PERI_OK;
}

/* -- parts --------------------------------------------------------------------------------------------------------- */

static peri_status check_rows(const char *name, const char *what, const peri_rows *r, int32_t count, bool whole)
{
    bool good = r->data && r->stride >= 0 && r->dtype >= 0 && r->dtype < PERI_DTYPE_COUNT &&
                (is_whole(r->dtype) || (!whole && (r->dtype == PERI_F32 || r->dtype == PERI_F64)));
    if (!good)
        return peri__fail(PERI_EINVAL, "peri_columns_add: %s: %s are missing, or no %s", name, what,
                          whole ? "whole numbers" : "f32, f64 or whole numbers");
    if (count >= 0 && r->count != count)
        return peri__fail(PERI_EINVAL, "peri_columns_add: %s: %s: %d in a row, wanted %d", name, what, r->count, count);
    return PERI_OK;
}

static peri_status check_part(const peri_columns *c, const peri_columns_part *p)
{
    if (!p->name || p->rows < 0)
        return peri__fail(PERI_EINVAL, "peri_columns_add: a part without a name, or of %lld rows", (long long)p->rows);
    if (c->dense_features) PERI_TRY(check_rows(p->name, "dense features", &p->dense, c->dense_features, false));
    if (p->labels.data) PERI_TRY(check_rows(p->name, "labels", &p->labels, 1, false));
    if (p->offsets) {
        PERI_TRY(check_rows(p->name, "lengths", &p->lengths, c->sparse_features, true));
        return p->total ? check_rows(p->name, "ids", &p->values, -1, true) : PERI_OK;
    }
    if (c->sparse_features && !p->ids) return peri__fail(PERI_EINVAL, "peri_columns_add: %s: no ids", p->name);
    for (int32_t f = 0; f < c->sparse_features; f++) PERI_TRY(check_rows(p->name, "ids", &p->ids[f], -1, true));
    return PERI_OK;
}

peri_status peri_columns_add(peri_columns *c, const peri_columns_part *given)
{
    PERI_TAKE(peri_columns_part, given);
    PERI_NEED(c);
    PERI_TRY(check_part(c, given));
    part *parts = peri__realloc(c->parts, sizeof *parts * (size_t)(c->n_parts + 1)), *p;
    if (!parts) return PERI_ENOMEM;
    c->parts = parts;
    p = &parts[c->n_parts];
    *p = (part){.p = *given, .first = c->rows};
    peri_rows *ids = peri__alloc(sizeof *ids * (size_t)peri__max(c->sparse_features, 1));
    p->p.name = peri__strdup(given->name);
    p->p.ids = ids;
    if (!p->p.name || !ids) {
        peri__free((void *)p->p.name);
        peri__free(ids);
        return PERI_ENOMEM;
    }
    if (!given->offsets && c->sparse_features) memcpy(ids, given->ids, sizeof *ids * (size_t)c->sparse_features);
    c->n_parts++;
    c->rows += given->rows;
    return PERI_OK;
}

int64_t peri_columns_rows(const peri_columns *c) { return c ? c->rows : 0; }

peri_status peri_columns_new(const peri_columns_config *o, peri_columns **out)
{
    const char *f = "peri_columns_new";
    PERI_TAKE(peri_columns_config, o);
    PERI_NEED(out);
    if (o->dense_features < 0 || o->dense_features > IO_MAX_FEATURES || o->sparse_features < 0 ||
        o->sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "%s: %d dense and %d sparse features, allowed: 0..%d", f, o->dense_features,
                          o->sparse_features, IO_MAX_FEATURES);
    if (o->dense < PERI_DENSE_RAW || o->dense > PERI_DENSE_SIGNED_LOG)
        return peri__fail(PERI_EINVAL, "%s: dense = %d, allowed: PERI_DENSE_RAW, PERI_DENSE_LOG, PERI_DENSE_SIGNED_LOG",
                          f, o->dense);
    PERI_TRY(peri__ids_check(f, o->ids, PERI_IDS_EXACT, PERI_MISSING_EMPTY, o->table_rows, o->sparse_features));
    if (o->block_rows < 0 || o->block_rows > IO_MAX_ROWS ||
        (o->block_rows && (o->blocks < 1 || o->blocks > IO_MAX_ROWS)))
        return peri__fail(PERI_EINVAL, "%s: blocks of %lld rows, %lld together, allowed: 0..2^31, 1..2^31", f,
                          (long long)o->block_rows, (long long)o->blocks);
    peri_columns *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    peri__object_count(1);
    c->dense_features = o->dense_features;
    c->sparse_features = o->sparse_features;
    c->dense = o->dense;
    c->padding = o->padding;
    c->padded = o->padded;
    c->block_rows = o->block_rows;
    c->blocks = o->blocks;
    c->seed = o->seed;
    c->ordered = -1;
    c->rules = peri__alloc(sizeof *c->rules * (size_t)peri__max(o->sparse_features, 1));
    if (!c->rules) {
        peri_columns_release(c);
        return PERI_ENOMEM;
    }
    for (int32_t i = 0; i < o->sparse_features; i++)
        c->rules[i] = peri__id_rule_of(o->ids, PERI_MISSING_EMPTY, o->table_rows[i]);
    *out = c;
    return PERI_OK;
}

void peri_columns_release(peri_columns *c)
{
    if (!c || peri__border_refuses(__func__)) return;
    for (int32_t i = 0; i < c->n_parts; i++) {
        peri__free((void *)c->parts[i].p.name);
        peri__free((void *)c->parts[i].p.ids);
    }
    peri__free(c->parts);
    peri__free(c->rules);
    peri__free(c->order);
    peri__free(c->ids);
    peri__free(c->cursor);
    peri__free(c->lengths);
    peri__object_count(-1);
    peri__free(c);
}
