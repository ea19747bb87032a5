/* SPDX-License-Identifier: Apache-2.0
 *
 * map_rows.c: what a map has learned, some rows at a time, in the order of rows: so maps of any size are saved and
 * loaded through a small buffer. A MCH map keeps ids, counts and iterations by row; its index of slots is made again
 * when all rows are there.
 */
#include "collision_internal.h"

#include <xxhash.h>

enum { ROWS = 16384 }; /* that are worked on at once */

/** Numbers of rows in the host's memory: room for ROWS. */
typedef struct block {
    int64_t *ids, *mapping, *counts, *last;
    int32_t *expiries;
    peri_k_hash_row *rows; /* hash */
} block;

static void block_fini(block *b)
{
    void *all[] = {b->ids, b->mapping, b->counts, b->last, b->expiries, b->rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri__free(all[i]);
}

static peri_status block_init(block *b, const peri_collision *c)
{
    const bool hash = peri__collision_hash(c);
    b->ids = peri__alloc(ROWS * sizeof *b->ids);
    if (c->counts) b->counts = peri__alloc(ROWS * sizeof *b->counts);
    if (c->last) b->last = peri__alloc(ROWS * sizeof *b->last);
    if (hash) b->expiries = peri__alloc(ROWS * sizeof *b->expiries);
    if (hash) b->rows = peri__alloc(ROWS * sizeof *b->rows);
    if (b->ids && (!c->counts || b->counts) && (!c->last || b->last) && (!hash || (b->expiries && b->rows)))
        return PERI_OK;
    block_fini(b);
    *b = (block){0};
    return PERI_ENOMEM;
}

/** Copy @n elements from number @first of @t on to or from host memory. */
static peri_status move(peri_tensor *t, int64_t first, int64_t n, int64_t bytes, void *to, const void *from)
{
    peri_tensor *part;
    PERI_TRY(peri_tensor_slice(t, 0, first, first + n, 1, &part));
    peri_status status = to ? peri_tensor_read(part, to, bytes) : peri_tensor_write(part, from, bytes);
    peri_tensor_release(part);
    return status;
}

/** Rows [row, row + n) of the map, n <= ROWS. */
static peri_status read_rows(peri_collision *c, int64_t row, int64_t n, block *b)
{
    if (!peri__collision_hash(c)) {
        PERI_TRY(move(c->ids, row, n, 8 * n, b->ids, NULL));
        if (c->counts) PERI_TRY(move(c->counts, row, n, 8 * n, b->counts, NULL));
        return c->last ? move(c->last, row, n, 8 * n, b->last, NULL) : PERI_OK;
    }
    PERI_TRY(move(c->hash_rows, 2 * row, 2 * n, 16 * n, b->rows, NULL));
    for (int64_t i = 0; i < n; i++) b->ids[i] = b->rows[i].id, b->expiries[i] = b->rows[i].expiry;
    return PERI_OK;
}

static peri_status check_range(const char *f, const peri_collision *c, int64_t row, int64_t n)
{
    if (row >= 0 && n >= 0 && row <= c->rows && n <= c->rows - row) return PERI_OK;
    return peri__fail(PERI_ERANGE, "%s: table '%s': rows [%lld, %lld), allowed: some of [0, %lld)", f, c->name,
                      (long long)row, (long long)(row + n), (long long)c->rows);
}

peri_status peri_collision_rows_read(peri_collision *c, const peri_collision_block *rows)
{
    PERI_NEED(c);
    PERI_TAKE(peri_collision_block, rows);
    const peri_collision_block a = *rows;
    PERI_TRY(check_range("peri_collision_rows_read", c, a.row, a.n));
    block b = {0};
    PERI_TRY(block_init(&b, c));
    peri_status status = PERI_OK;
    for (int64_t at = 0; status >= 0 && at < a.n; at += ROWS) {
        const int64_t n = peri__min(ROWS, a.n - at);
        status = read_rows(c, a.row + at, n, &b);
        if (status < 0) break;
        if (a.ids) memcpy(a.ids + at, b.ids, 8 * (size_t)n);
        if (a.counts && b.counts) memcpy(a.counts + at, b.counts, 8 * (size_t)n);
        if (a.last && b.last) memcpy(a.last + at, b.last, 8 * (size_t)n);
        if (a.expiries && b.expiries) memcpy(a.expiries + at, b.expiries, 4 * (size_t)n);
        for (int64_t i = 0; a.mapping && i < n; i++) a.mapping[at + i] = c->first_row + a.row + at + i;
    }
    block_fini(&b);
    return status;
}

/* -- what a map knows, as one number ------------------------------------------------------------------------------- */

/** Of row @row of the table. A sum over rows does not depend on how they are cut. */
static uint64_t mark_of_row(int64_t row, int64_t id, int64_t count, int64_t last, int32_t expiry)
{
    const int64_t record[] = {row, id, count, last, expiry};
    return XXH3_64bits(record, sizeof record);
}

uint64_t peri_collision_mark_sum(uint64_t sum, int64_t iteration)
{
    const uint64_t value = XXH3_64bits_withSeed(&sum, sizeof sum, (uint64_t)iteration);
    return value ? value : 1;
}

peri_status peri_collision_mark(peri_collision *c, uint64_t *out, int64_t *iteration)
{
    PERI_NEED(c);
    PERI_NEED(out);
    PERI_NEED(iteration);
    uint64_t sum = 0;
    block b = {0};
    PERI_TRY(block_init(&b, c));
    const bool timed = c->config.policy != PERI_FORGET_NONE;
    peri_status status = PERI_OK;
    for (int64_t row = 0; status >= 0 && row < c->rows; row += ROWS) {
        const int64_t n = peri__min(ROWS, c->rows - row);
        status = read_rows(c, row, n, &b);
        for (int64_t i = 0; status >= 0 && i < n; i++)
            sum += mark_of_row(c->first_row + row + i, b.ids[i], b.counts ? b.counts[i] : 0, b.last ? b.last[i] : 0,
                               b.expiries && timed ? b.expiries[i] : 0);
    }
    block_fini(&b);
    PERI_TRY(status);
    *out = peri_collision_mark_sum(sum, c->iteration);
    *iteration = c->iteration;
    return PERI_OK;
}

/* -- loading ------------------------------------------------------------------------------------------------------- */

static const char f_check[] = "peri_collision_rows_check", f_end[] = "peri_collision_rows_end";

/** What is wrong with the number @value of a row; @most: the greatest that is allowed. */
static peri_status bad_number(const peri_collision *c, int64_t row, int64_t id, const char *name, int64_t value,
                              int64_t least, int64_t most)
{
    return peri__fail(PERI_EINVAL, "%s: table '%s': id %lld, row %lld: %s is %lld, allowed: %lld to %lld", f_check,
                      c->name, (long long)id, (long long)row, name, (long long)value, (long long)least,
                      (long long)most);
}

static peri_status bad_row(const char *f, const peri_collision *c, int64_t row, int64_t id, const char *what)
{
    return peri__fail(PERI_EINVAL, "%s: table '%s': id %lld, row %lld: %s", f, c->name, (long long)id, (long long)row,
                      what);
}

/** How far row @at of a bucket of @usable rows is from the home of @id, round and round. */
static int64_t reach_of(int64_t id, int64_t at, int64_t usable)
{
    const int64_t home = peri_collision_home(id, usable);
    return at >= home ? at - home : at - home + usable;
}

/** Number @i of @a: a row of bucket @b, whose rows are [first, past) of the table. */
static peri_status check_row(const peri_collision *c, const peri_collision_block *a, int64_t i, int32_t b,
                             int64_t first, int64_t past)
{
    const int64_t row = c->first_row + a->row + i, id = a->ids[i];
    const bool hash = peri__collision_hash(c), last_row = row == past - 1,
               aside = !hash || c->config.on_miss == PERI_MISS_ROW;
    if (a->mapping && a->mapping[i] != row) return bad_row(f_check, c, row, id, "it is not in the order of rows");
    if (c->counts && (a->counts[i] < 0 || a->counts[i] > peri_k_most_count(last_row)))
        return bad_number(c, row, id, "_mch_counts", a->counts[i], 0, peri_k_most_count(last_row));
    if (c->last && (a->last[i] < 0 || a->last[i] > a->iteration))
        return bad_number(c, row, id, "_mch_last_access_iter", a->last[i], 0, a->iteration);
    if (a->expiries && a->expiries[i] < -1)
        return bad_number(c, row, id, "_hash_zch_metadata", a->expiries[i], -1, INT32_MAX);
    if (id == (hash ? -1 : INT64_MAX)) return PERI_OK;
    if (aside && last_row) return bad_row(f_check, c, row, id, "the bucket's last row is nobody's");
    if (peri_collision_bucket(id, c->config.spread, c->config.buckets, c->config.input_hash_size) != b)
        return bad_row(f_check, c, row, id, "it belongs to another bucket");
    if (hash && reach_of(id, row - first, past - first - aside) >= c->config.max_probe)
        return bad_row(f_check, c, row, id, "the row is further from the id's home than max_probe");
    return PERI_OK;
}

/** An error unless the numbers that the map has are given, of rows that it has. */
static peri_status check_given(const char *f, const peri_collision *c, const peri_collision_block *a)
{
    PERI_TRY(check_range(f, c, a->row, a->n));
    const bool timed = peri__collision_hash(c) && c->config.policy != PERI_FORGET_NONE;
    if (a->n == 0 || (a->ids && (!c->counts || a->counts) && (!c->last || a->last) && (!timed || a->expiries)))
        return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: table '%s': a state with rows is missing", f, c->name);
}

peri_status peri_collision_rows_check(const peri_collision *c, const peri_collision_block *rows, uint64_t *mark)
{
    PERI_NEED(c);
    PERI_NEED(mark);
    PERI_TAKE(peri_collision_block, rows);
    PERI_TRY(check_given(f_check, c, rows));
    const bool timed = c->config.policy != PERI_FORGET_NONE;
    int32_t b = c->config.first_bucket;
    for (int64_t i = 0; i < rows->n; i++) {
        const int64_t row = c->first_row + rows->row + i;
        while (c->segments[b + 1] <= row) b++;
        PERI_TRY(check_row(c, rows, i, b, c->segments[b], c->segments[b + 1]));
        *mark += mark_of_row(row, rows->ids[i], c->counts ? rows->counts[i] : 0, c->last ? rows->last[i] : 0,
                             rows->expiries && timed ? rows->expiries[i] : 0);
    }
    return PERI_OK;
}

/** The map knows nothing. @rows_stay: but in its memory rows have the ids and numbers that they had. */
static peri_status forget(peri_collision *c, bool rows_stay)
{
    peri_k_collision_state_args args = {.map = c->map, .rows_stay = rows_stay};
    PERI_TRY(PERI_LAUNCH(c->device, collision_reset, &args, c->config.n_buckets, 1));
    PERI_TRY(peri__collision_set(c, PERI_COLLISION_OCCUPIED, 0)); /* rows that were put did not count yet */
    peri__collision_unlearn(c);
    c->map.full = false;
    return peri__collision_report(c);
}

peri_status peri_collision_rows_begin(peri_collision *c)
{
    PERI_NEED(c);
    return forget(c, false);
}

peri_status peri_collision_rows_change(peri_collision *c)
{
    PERI_NEED(c);
    return forget(c, true);
}

/** Rows [row, row + n) of a hash map, n <= ROWS. */
static peri_status put_hash(peri_collision *c, int64_t row, int64_t n, const int64_t *ids, const int32_t *expiries,
                            block *b)
{
    for (int64_t i = 0; i < n; i++) b->rows[i] = (peri_k_hash_row){ids[i], expiries ? expiries[i] : -1, 0};
    return move(c->hash_rows, 2 * row, 2 * n, 16 * n, NULL, b->rows);
}

peri_status peri_collision_rows_put(peri_collision *c, const peri_collision_block *rows)
{
    PERI_NEED(c);
    PERI_TAKE(peri_collision_block, rows);
    PERI_TRY(check_given("peri_collision_rows_put", c, rows));
    const int64_t row = rows->row, n = rows->n;
    if (n == 0) return PERI_OK;
    if (!peri__collision_hash(c)) {
        PERI_TRY(move(c->ids, row, n, 8 * n, NULL, rows->ids));
        if (c->counts) PERI_TRY(move(c->counts, row, n, 8 * n, NULL, rows->counts));
        return c->last ? move(c->last, row, n, 8 * n, NULL, rows->last) : PERI_OK;
    }
    block b = {0};
    peri_status status = block_init(&b, c);
    for (int64_t at = 0; status >= 0 && at < n; at += ROWS)
        status = put_hash(c, row + at, peri__min(ROWS, n - at), rows->ids + at,
                          rows->expiries ? rows->expiries + at : NULL, &b);
    block_fini(&b);
    return status;
}

/** Look @ids [n] up; @out: their rows. */
static peri_status find(peri_collision *c, const peri_tensor *ids, int64_t n, peri_tensor *out)
{
    peri_k_collision_find_args args = {.map = c->map,
                                       .ids = peri__data(ids),
                                       .out = peri__data(out),
                                       .now = c->iteration,
                                       .window = c->window,
                                       .n = n,
                                       .parts = 1};
    args.map.on_miss = PERI_K_MISS_DROP;
    if (peri__collision_hash(c)) return PERI_LAUNCH(c->device, hash_map_find, &args, n, PERI_COLLISION_GRAIN);
    args.parts = peri__max(1, peri__min(peri_threads(), n / PERI_COLLISION_GRAIN));
    return PERI_LAUNCH(c->device, mch_find, &args, args.parts, 1);
}

/** Whether each id is found in its own row. *stray: row of the first that is not, -1: none; *occupied: rows with ids.
 *  Free rows are not looked up: what they have is no id of any bucket. */
static peri_status find_all(peri_collision *c, block *b, peri_tensor *ids, peri_tensor *rows, int64_t *stray,
                            int64_t *occupied)
{
    const int64_t none = peri__collision_hash(c) ? -1 : INT64_MAX;
    int64_t *found = peri__alloc(2 * ROWS * sizeof *found), *of = found + ROWS; /* of: the rows of the ids */
    peri_status status = found ? PERI_OK : PERI_ENOMEM;
    *stray = -1;
    *occupied = 0;
    for (int64_t row = 0; status >= 0 && row < c->rows; row += ROWS) {
        int64_t n = 0, rows_here = peri__min(ROWS, c->rows - row);
        status = read_rows(c, row, rows_here, b);
        for (int64_t i = 0; status >= 0 && i < rows_here; i++)
            if (b->ids[i] != none) b->ids[n] = b->ids[i], of[n++] = row + i;
        if (status < 0 || n == 0) continue;
        status = move(ids, 0, n, 8 * n, NULL, b->ids);
        if (status >= 0) status = find(c, ids, n, rows);
        if (status >= 0) status = move(rows, 0, n, 8 * n, found, NULL);
        *occupied += n;
        for (int64_t i = 0; status >= 0 && *stray < 0 && i < n; i++)
            if (found[i] != of[i]) *stray = of[i];
    }
    peri__free(found);
    return status;
}

/** An id that is not found in its row has another one too; in a hash map there may be free rows before it: looks must
 *  not end there. */
static peri_status check_unique(peri_collision *c, int64_t *occupied)
{
    const int64_t n = ROWS;
    int64_t stray = -1;
    block b = {0};
    peri_tensor *ids = NULL, *rows = NULL;
    peri_status status = block_init(&b, c);
    if (status >= 0) status = peri_tensor_new(c->device, PERI_I64, 1, &n, &ids);
    if (status >= 0) status = peri_tensor_new(c->device, PERI_I64, 1, &n, &rows);
    if (status >= 0) status = find_all(c, &b, ids, rows, &stray, occupied);
    if (status >= 0 && stray >= 0 && peri__collision_hash(c)) {
        c->map.full = true;
        status = find_all(c, &b, ids, rows, &stray, occupied);
    }
    if (status >= 0 && stray >= 0) {
        status = read_rows(c, stray, 1, &b);
        if (status >= 0) status = bad_row(f_end, c, c->first_row + stray, b.ids[0], "the id has two rows");
    }
    peri_tensor_release(ids);
    peri_tensor_release(rows);
    block_fini(&b);
    return status;
}

/** The rows are there: make what leads to them. */
static peri_status index_rows(peri_collision *c)
{
    int64_t before[PERI_COLLISION_WORDS], occupied = 0;
    peri_k_collision_state_args args = {
        .map = c->map, .sorted = c->map.ids, .counts = c->map.counts, .last = c->map.last};
    if (!peri__collision_hash(c)) PERI_TRY(PERI_LAUNCH(c->device, mch_load, &args, c->config.n_buckets, 1));
    PERI_TRY(peri__collision_report(c));
    PERI_TRY(peri__collision_seen(c, true));
    memcpy(before, c->words, sizeof before);
    PERI_TRY(check_unique(c, &occupied)); /* which counts what it looks up */
    for (int32_t word = PERI_COLLISION_IDS; word <= PERI_COLLISION_MISSED; word++)
        PERI_TRY(peri__collision_set(c, word, before[word]));
    return peri__collision_set(c, PERI_COLLISION_OCCUPIED, occupied);
}

peri_status peri_collision_rows_end(peri_collision *c, int64_t iteration)
{
    PERI_NEED(c);
    if (iteration < -1 || iteration > PERI_COLLISION_MOST_ITERATION)
        return peri__fail(PERI_EINVAL, "%s: table '%s': iteration %lld, allowed: -1 to %lld", f_end, c->name,
                          (long long)iteration, (long long)PERI_COLLISION_MOST_ITERATION);
    peri_status status = index_rows(c);
    if (status >= 0) status = peri__collision_loaded(c, iteration);
    else (void)peri_collision_rows_begin(c); /* it knows nothing rather than a part */
    return status;
}
