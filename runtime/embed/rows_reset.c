/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_reset.c: rows that start again, as records of what a row is before its first update (kernels/cache.h).
 */
#include "row_watch.h"
#include "../../kernels/convert.h"
#include "../base/floats.h"

#include <math.h>
#include <stdlib.h>

peri_k_random_args peri__tbe_start_values(const peri_tbe *tbe, int64_t table, int64_t row, uint64_t seed,
                                          void *weights)
{
    const peri_table_config *t = &tbe->tables[table].config;
    PERI__OWN_FLOATS;
    peri_k_random_args args = {.dst = weights,
                               .dtype = tbe->dtype,
                               .kind = t->init == PERI_INIT_NORMAL ? PERI_RANDOM_NORMAL : PERI_RANDOM_UNIFORM,
                               .cols = t->cols,
                               .row_offset = t->row_offset + row,
                               .col_offset = t->col_offset,
                               .total_cols = t->total_cols,
                               .low = t->init_a,
                               .high = t->init_b,
                               .seed = seed,
                               .random_stream = peri__hash_text(t->name)};
    if (t->init == PERI_INIT_DEFAULT) {
        args.high = sqrt(1.0 / (double)t->total_rows);
        args.low = -args.high;
    }
    return args;
}

void peri__tbe_start_row(const peri_tbe *tbe, int64_t table, int64_t row, uint64_t seed, void *weights)
{
    const peri_table_config *t = &tbe->tables[table].config;
    const peri_k_random_args args = peri__tbe_start_values(tbe, table, row, seed, weights);
    const peri_kernels *kernels = peri_kernels_get();
    PERI__OWN_FLOATS;
    if (t->init == PERI_INIT_NONE) return;
    if (t->init == PERI_INIT_CONSTANT) {
        peri_k_fill_args fill = {.dst = args.dst, .dtype = args.dtype, .value = t->init_a};
        kernels->fn[PERI_K_fill](&fill, 0, t->cols);
        return;
    }
    kernels->fn[PERI_K_random](&args, 0, t->cols);
}

/* -- tables in memory ---------------------------------------------------------------------------------------------- */

enum { CHUNK_BYTES = 4 << 20, GRAIN = 64 };

typedef struct records {
    const peri_tbe *tbe;
    int64_t table, bytes; /* of a record */
    const int64_t *rows;
    char *host;
    peri_k_cache_move *moves;
} records;

static void start_range(void *ctx, int64_t begin, int64_t end)
{
    const records *r = ctx;
    for (int64_t i = begin; i < end; i++) {
        char *record = r->host + i * r->bytes;
        r->moves[i] = (peri_k_cache_move){.record = i * r->bytes, .row = r->rows[i], .table = (int32_t)r->table,
                                          .slot = (int32_t)r->rows[i]};
        memset(record, 0, (size_t)r->bytes);
        peri__tbe_start_row(r->tbe, r->table, r->rows[i], r->tbe->seed, record + PERI_CACHE_RECORD_HEAD);
    }
}

/** Rows as records of @bytes, and the moves behind them, to the device and into the table. */
static peri_status start_rows(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n, int64_t bytes)
{
    peri_k_cache_args args = {.tables = peri__data(tbe->layout_tensor)};
    int64_t all = n * (bytes + (int64_t)sizeof *args.moves);
    peri_tensor *device;
    PERI_TRY(peri_tensor_new(tbe->device, PERI_U8, 1, &all, &device));
    char *host = peri__alloc((size_t)all);
    peri_status status = host ? PERI_OK : PERI_ENOMEM;
    if (status < 0) goto out;
    records r = {.tbe = tbe,
                 .table = table,
                 .bytes = bytes,
                 .rows = rows,
                 .host = host,
                 .moves = (peri_k_cache_move *)(host + n * bytes)};
    peri__parallel_for(n, GRAIN, start_range, &r);
    PERI_TRY_GOTO(peri__copy(tbe->device, peri__data(device), host, all, PERI_COPY_H2D), out);
    args.records = peri__data(device);
    args.moves = (const peri_k_cache_move *)(args.records + n * bytes);
    args.n_parts = peri__tbe_record_parts(tbe, args.part);
    status = PERI_LAUNCH(tbe->device, cache_fill, &args, n, GRAIN);
out:
    peri__free(host);
    peri_tensor_release(device);
    return status;
}

peri_status peri__memory_reset(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n)
{
    peri_k_cache_part part[PERI_CACHE_PARTS];
    int32_t parts = peri__tbe_record_parts(tbe, part);
    int64_t bytes = PERI_CACHE_RECORD_HEAD;
    for (int32_t p = 0; p < parts; p++) bytes += part[p].bytes * (part[p].row ? 1 : tbe->layout[table].cols);
    bytes = (bytes + 7) / 8 * 8;
    for (int64_t i = 0, some; i < n; i += some) {
        some = peri__min(n - i, peri__max(1, CHUNK_BYTES / bytes));
        PERI_TRY(start_rows(tbe, table, rows + i, some, bytes));
    }
    return PERI_OK;
}

/* -- any tables ---------------------------------------------------------------------------------------------------- */

static int compare_rows(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/** The numbers of @rows on the host, ascending, each once; *n of them. */
static peri_status rows_of(const peri_tbe *tbe, int64_t table, peri_tensor *rows, int64_t *out, int64_t *n)
{
    int64_t all = peri__numel(rows), most = tbe->tables[table].config.rows;
    PERI_TRY(peri_tensor_read(rows, out, all * (int64_t)sizeof *out));
    qsort(out, (size_t)all, sizeof *out, compare_rows);
    *n = 0;
    for (int64_t i = 0; i < all; i++) {
        if (out[i] < 0 || out[i] >= most)
            return peri__fail(PERI_ERANGE, "peri_tbe_rows_reset: table '%s': row %lld, allowed: 0..%lld",
                              tbe->tables[table].name, (long long)out[i], (long long)most - 1);
        if (*n == 0 || out[*n - 1] != out[i]) out[(*n)++] = out[i];
    }
    return PERI_OK;
}

/** Within a call. */
static peri_status reset(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n)
{
    const peri__row_change change = {.form = PERI__ROWS_LIST, .part = -1, .table = table, .rows = rows, .count = n};
    PERI_TRY(peri__tbe_tell(tbe, &change));
    tbe->writes++;
    return tbe->store->reset(tbe, table, rows, n);
}

peri_status peri_tbe_rows_reset(peri_tbe *tbe, int64_t table, peri_tensor *rows)
{
    static const char *const f = "peri_tbe_rows_reset";
    char text[128];
    PERI_NEED(tbe);
    PERI_NEED(rows);
    if (table < 0 || table >= tbe->n_tables)
        return peri__fail(PERI_ERANGE, "%s: table %lld, allowed: 0..%lld", f, (long long)table,
                          (long long)tbe->n_tables - 1);
    if (rows->dtype != PERI_I64 || rows->ndim != 1)
        return peri__fail(PERI_EINVAL, "%s: table '%s': rows are %s, allowed: i64 of one dimension", f,
                          tbe->tables[table].name, peri__tensor_text(rows, text, sizeof text));
    if (peri__rows_are_bytes(tbe->dtype))
        return peri__fail(PERI_EUNSUPPORTED, "%s: table '%s' has rows of bytes, which have no start values", f,
                          tbe->tables[table].name);
    int64_t n = peri__numel(rows), *list;
    if (n == 0) return PERI_OK;
    list = peri__alloc(sizeof *list * (size_t)n);
    if (!list) return PERI_ENOMEM;
    peri_status status = rows_of(tbe, table, rows, list, &n);
    if (status >= 0) status = peri__tbe_enter(tbe, true);
    if (status >= 0) status = peri__tbe_leave(tbe, true, reset(tbe, table, list, n));
    peri__free(list);
    return status;
}
