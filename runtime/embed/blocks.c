/* SPDX-License-Identifier: Apache-2.0
 *
 * blocks.c: block lists and inputs.
 */
#include "embed_internal.h"

#include <stdlib.h>

_Static_assert(sizeof(peri_tbe_block) == sizeof(peri_k_tbe_block) &&
                   offsetof(peri_tbe_block, table) == offsetof(peri_k_tbe_block, table) &&
                   offsetof(peri_tbe_block, out_stride) == offsetof(peri_k_tbe_block, out_stride),
               "a public block is a kernel's block");

/* -- block lists --------------------------------------------------------------------------------------------------- */

/** A begin (+1) or end (-1) of a block's bags. */
typedef struct edge {
    int64_t bag, delta;
} edge;

static int by_bag(const void *a, const void *b)
{
    const edge *x = a, *y = b;
    if (x->bag != y->bag) return x->bag < y->bag ? -1 : 1;
    return x->delta < y->delta ? -1 : x->delta > y->delta; /* ends before begins */
}

/** b->multiplicity, the most blocks that share one bag, where blocks come in the order of their bags, each either the
 *  bags of the block before or later ones: as blocks mostly do. False: they do not. */
static bool count_in_order(peri_tbe_blocks *b)
{
    int64_t begin = 0, end = 0, sharing = 0;
    for (int64_t k = 0; k < b->n; k++) {
        const peri_k_tbe_block *x = &b->block[k];
        if (x->bags == 0) continue;
        bool again = sharing && x->first_bag == begin && x->first_bag + x->bags == end;
        if (!again && x->first_bag < end) return false;
        begin = x->first_bag;
        end = begin + x->bags;
        sharing = again ? sharing + 1 : 1;
        b->multiplicity = peri__max(b->multiplicity, sharing);
    }
    return true;
}

static peri_status count_sharing(peri_tbe_blocks *b)
{
    if (count_in_order(b)) return PERI_OK;
    edge *edges = peri__alloc(sizeof *edges * (size_t)peri__max(2 * b->n, 1));
    if (!edges) return PERI_ENOMEM;
    int64_t n = 0, open = 0;
    for (int64_t k = 0; k < b->n; k++) {
        if (b->block[k].bags == 0) continue;
        edges[n++] = (edge){b->block[k].first_bag, 1};
        edges[n++] = (edge){b->block[k].first_bag + b->block[k].bags, -1};
    }
    qsort(edges, (size_t)n, sizeof *edges, by_bag);
    for (int64_t i = 0; i < n; i++) {
        open += edges[i].delta;
        b->multiplicity = peri__max(b->multiplicity, open);
    }
    peri__free(edges);
    return PERI_OK;
}

/** `ordered` and `largest`. */
static peri_status count_by_table(peri_tbe_blocks *b)
{
    int64_t *bags = peri__alloc_zero(sizeof *bags * (size_t)b->n_tables); /* that look into each table */
    if (!bags) return PERI_ENOMEM;
    b->ordered = true;
    for (int64_t k = 0; k < b->n; k++) {
        bags[b->block[k].table] += b->block[k].bags;
        b->ordered = b->ordered && (k == 0 || b->block[k].table >= b->block[k - 1].table);
    }
    for (int64_t t = 0; t < b->n_tables; t++) b->largest = peri__max(b->largest, bags[t]);
    peri__free(bags);
    return PERI_OK;
}

/** The device's copy, if it is another. */
static peri_status upload_list(peri_device *device, peri_tbe_blocks *b)
{
    if (b->block != peri__data(b->copy))
        PERI_TRY(peri__copy(device, peri__data(b->copy), b->block, (int64_t)sizeof *b->block * b->n, PERI_COPY_H2D));
    return peri_event_record(b->copied, peri_stream_current(device));
}

/* -- in the order of their tables ---------------------------------------------------------------------------------- */

/** @out: the blocks of @b, sorted by table, otherwise as they stand. */
static peri_status sort_by_table(const peri_tbe_blocks *b, peri_k_tbe_block *out)
{
    /* where the next block of each table goes */
    int64_t *next = peri__alloc_zero(sizeof *next * (size_t)(b->n_tables + 1));
    if (!next) return PERI_ENOMEM;
    for (int64_t k = 0; k < b->n; k++) next[b->block[k].table + 1]++;
    for (int64_t t = 0; t < b->n_tables; t++) next[t + 1] += next[t];
    for (int64_t k = 0; k < b->n; k++) out[next[b->block[k].table]++] = b->block[k];
    peri__free(next);
    return PERI_OK;
}

/** Fill in the second half of the device's copy. */
static peri_status add_sorted(peri_device *device, peri_tbe_blocks *b)
{
    peri_k_tbe_block *there = (peri_k_tbe_block *)peri__data(b->copy) + b->n, *here = there;
    const int64_t bytes = (int64_t)sizeof *here * b->n;
    if (!peri__immediate(device) && !(here = peri__alloc((size_t)bytes))) return PERI_ENOMEM;
    peri_status status = peri_event_new(device, &b->sorted);
    if (status >= 0) status = sort_by_table(b, here);
    if (status >= 0 && here != there) status = peri__copy(device, there, here, bytes, PERI_COPY_H2D);
    if (status >= 0) status = peri_event_record(b->sorted, peri_stream_current(device));
    if (here != there) peri__free(here);
    if (status >= 0) return status;
    peri_event_release(b->sorted);
    b->sorted = NULL;
    return status;
}

peri_status peri__tbe_blocks_sorted(const peri_tbe *tbe, peri_tbe_blocks *b, const peri_k_tbe_block **out)
{
    *out = peri__data(b->copy);
    if (b->ordered) return PERI_OK;
    *out += b->n;
    pthread_mutex_lock(&b->sorting);
    peri_status status = b->sorted ? PERI_OK : add_sorted(tbe->device, b);
    if (status >= 0) status = peri__tbe_wait_event(tbe, b->sorted);
    pthread_mutex_unlock(&b->sorting);
    return status;
}

/* -- making them --------------------------------------------------------------------------------------------------- */

static peri_status check_block(const peri_tbe *tbe, const peri_k_tbe_block *b, int64_t k)
{
    if (b->table < 0 || b->table >= tbe->n_tables)
        return peri__fail(PERI_ERANGE, "peri_tbe_blocks_new: block %lld: table %d, allowed: 0..%lld", (long long)k,
                          b->table, (long long)tbe->n_tables - 1);
    if (b->feature < -1 || (b->feature >= tbe->n_features && tbe->n_features > 0))
        return peri__fail(PERI_ERANGE, "peri_tbe_blocks_new: block %lld: feature %d, allowed: -1..%lld", (long long)k,
                          b->feature, (long long)tbe->n_features - 1);
    int64_t most = INT64_MAX >> 8, cols = tbe->layout[b->table].cols, extent;
    if (b->first_bag < 0 || b->bags < 0 || b->first_bag > most || b->bags > most)
        return peri__fail(PERI_EINVAL, "peri_tbe_blocks_new: block %lld: %lld bags from bag %lld on, allowed: 0..%lld",
                          (long long)k, (long long)b->bags, (long long)b->first_bag, (long long)most);
    if (b->out_offset < 0 || b->out_offset > most)
        return peri__fail(PERI_EINVAL, "peri_tbe_blocks_new: block %lld: out_offset %lld, allowed: 0..%lld",
                          (long long)k, (long long)b->out_offset, (long long)most);
    bool none = tbe->layout[b->table].pooling == PERI_POOLING_NONE;
    if ((b->bags > 1 || none) && b->out_stride < cols)
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_blocks_new: block %lld: out_stride %lld makes rows of table '%s' overlap, allowed: >= %lld",
            (long long)k, (long long)b->out_stride, tbe->tables[b->table].name, (long long)cols);
    if (b->out_stride > most ||
        (b->bags > 1 && (__builtin_mul_overflow(b->bags - 1, b->out_stride, &extent) || extent > most)))
        return peri__fail(PERI_EINVAL, "peri_tbe_blocks_new: block %lld: out_stride %lld", (long long)k,
                          (long long)b->out_stride);
    return PERI_OK;
}

/** The device's copy: where the host works in its memory, a list is no more than a list of the host's. */
static peri_status new_device_copy(peri_device *device, int64_t bytes, peri_tensor **out)
{
    if (!peri__immediate(device)) return peri_tensor_new(device, PERI_U8, 1, &bytes, out);
    void *data = peri__alloc((size_t)peri__max(bytes, 1));
    if (!data) return PERI_ENOMEM;
    peri_status status = peri__tensor_lent(device, PERI_U8, bytes, data, peri__free, out);
    if (status < 0) peri__free(data);
    return status;
}

peri_status peri__tbe_blocks_alloc(const peri_tbe *tbe, int64_t n, peri_tbe_blocks **out)
{
    static atomic_uint_least64_t serial;
    if (n < 0 || n > INT32_MAX) return peri__fail(PERI_EINVAL, "peri_tbe_blocks_new: %lld blocks", (long long)n);
    peri_tbe_blocks *b = peri__alloc_zero(sizeof *b);
    if (!b) return PERI_ENOMEM;
    peri__object_count(1);
    peri__refs_init(&b->refs);
    pthread_mutex_init(&b->sorting, NULL);
    b->serial = atomic_fetch_add(&serial, 1) + 1;
    b->n = n;
    b->n_tables = tbe->n_tables;
    int64_t bytes = (int64_t)sizeof *b->block * 2 * n;
    peri_status status = new_device_copy(tbe->device, bytes, &b->copy);
    if (status >= 0) status = peri_event_new(tbe->device, &b->copied);
    if (status >= 0) {
        b->block = peri__immediate(tbe->device) ? peri__data(b->copy) : peri__alloc((size_t)(bytes / 2));
        if (!b->block && n) status = PERI_ENOMEM;
    }
    if (status < 0) peri_tbe_blocks_release(b);
    else *out = b;
    return status;
}

peri_status peri__tbe_blocks_check(const peri_tbe *tbe, const peri_tbe_blocks *b)
{
    for (int64_t k = 0; k < b->n; k++) PERI_TRY(check_block(tbe, &b->block[k], k));
    return PERI_OK;
}

peri_status peri__tbe_blocks_finish(const peri_tbe *tbe, peri_tbe_blocks *b)
{
    int64_t columns = 0;
    b->row_cols = b->n ? b->block[0].out_stride : 0;
    for (int64_t k = 0; k < b->n; k++) {
        const peri_k_tbe_block *x = &b->block[k];
        const peri_k_tbe_table *t = &tbe->layout[x->table];
        bool side_by_side = x->out_offset == 0 && x->out_stride == b->row_cols && t->cols <= b->row_cols;
        b->narrow = b->narrow || t->cols < b->row_cols;
        if (t->pooling != PERI_POOLING_NONE || !side_by_side) b->row_cols = 0;
        b->bags = peri__max(b->bags, x->first_bag + x->bags);
        if (x->bags == 0) continue;
        b->total_bags += x->bags;
        columns += x->bags * t->cols;
        b->none = b->none || t->pooling == PERI_POOLING_NONE;
        if (t->pooling == PERI_POOLING_NONE) continue;
        b->out_extent = peri__max(b->out_extent, x->out_offset + (x->bags - 1) * x->out_stride + t->cols);
        b->covered += x->bags * t->cols;
        b->mean = b->mean || t->pooling == PERI_POOLING_MEAN;
    }
    b->width = b->total_bags ? peri__ceil_div(columns, b->total_bags) : 1;
    PERI_TRY(count_sharing(b));
    PERI_TRY(count_by_table(b));
    return upload_list(tbe->device, b);
}

peri_status peri__tbe_blocks_moved(const peri_tbe *tbe, const peri_tbe_blocks *from, const peri__spot *spots,
                                   peri_tbe_blocks **out)
{
    peri_tbe_blocks *b;
    PERI_TRY(peri__tbe_blocks_alloc(tbe, from->n, &b));
    for (int64_t k = 0; k < b->n; k++) {
        b->block[k] = from->block[k];
        b->block[k].out_offset = spots[k].offset;
        b->block[k].out_stride = spots[k].stride;
        b->out_extent = peri__max(b->out_extent, spots[k].past);
    }
    b->bags = from->bags;
    b->total_bags = from->total_bags;
    b->covered = from->covered;
    b->multiplicity = from->multiplicity;
    b->width = from->width;
    b->largest = from->largest;
    b->mean = from->mean;
    b->none = from->none;
    b->ordered = from->ordered;
    peri_status status = upload_list(tbe->device, b);
    if (status < 0) peri_tbe_blocks_release(b);
    else *out = b;
    return status;
}

/** Where the rows of @x, in a matrix of @cols columns, lie in one whose rows are @stride apart; false: nowhere, they
 *  are in no such matrix. */
static bool widened_block(const peri_k_tbe_block *x, int64_t table_cols, int64_t cols, int64_t stride, peri__spot *spot)
{
    const int64_t column = x->out_offset % cols, row = x->out_offset / cols;
    const int64_t step = x->bags > 1 ? x->out_stride / cols : 1; /* rows from one bag to the next */
    *spot = (peri__spot){.offset = row * stride + column, .stride = step * stride};
    if (x->bags) spot->past = spot->offset + (x->bags - 1) * spot->stride + table_cols;
    return column + table_cols <= cols && (x->bags <= 1 || x->out_stride % cols == 0);
}

/** Put the widened list first among @from's; where there is none, nothing. */
static peri_status add_widened_list(const peri_tbe *tbe, peri_tbe_blocks *from, int64_t cols, int64_t stride)
{
    peri_tbe_blocks *wide;
    peri__spot *spots = peri__alloc(sizeof *spots * (size_t)peri__max(from->n, 1));
    if (!spots) return PERI_ENOMEM;
    bool can = true;
    for (int64_t k = 0; k < from->n && can; k++)
        can = widened_block(&from->block[k], tbe->layout[from->block[k].table].cols, cols, stride, &spots[k]);
    peri_status status = can ? peri__tbe_blocks_moved(tbe, from, spots, &wide) : PERI_OK;
    peri__free(spots);
    if (status < 0 || !can) return status;
    wide->wide_cols = cols;
    wide->wide_stride = stride;
    wide->wide = from->wide;
    from->wide = wide;
    return PERI_OK;
}

static peri_tbe_blocks *find_widened_list(const peri_tbe_blocks *from, int64_t cols, int64_t stride)
{
    peri_tbe_blocks *wide = from->wide;
    while (wide && (wide->wide_cols != cols || wide->wide_stride != stride)) wide = wide->wide;
    return wide;
}

peri_status peri__tbe_blocks_widened(const peri_tbe *tbe, peri_tbe_blocks *from, int64_t cols, int64_t stride,
                                     peri_tbe_blocks **out)
{
    peri_status status = PERI_OK;
    *out = NULL;
    if (from->none) return PERI_OK;
    pthread_mutex_lock(&from->sorting);
    *out = find_widened_list(from, cols, stride);
    if (!*out) {
        status = add_widened_list(tbe, from, cols, stride);
        *out = find_widened_list(from, cols, stride);
    }
    peri_tbe_blocks_retain(*out);
    pthread_mutex_unlock(&from->sorting);
    return status;
}

/** @check: refuse what makes no sense. */
static peri_status blocks_new(const peri_tbe *tbe, const peri_tbe_block *blocks, int64_t n, bool check,
                              peri_tbe_blocks **out)
{
    peri_tbe_blocks *b;
    PERI_TRY(peri__tbe_blocks_alloc(tbe, n, &b));
    if (n) memcpy(b->block, blocks, sizeof *b->block * (size_t)n);
    peri_status status = check ? peri__tbe_blocks_check(tbe, b) : PERI_OK;
    if (status >= 0) status = peri__tbe_blocks_finish(tbe, b);
    if (status < 0) peri_tbe_blocks_release(b);
    else *out = b;
    return status;
}

peri_status peri_tbe_blocks_new(const peri_tbe *tbe, const peri_tbe_block *blocks, int32_t n, peri_tbe_blocks **out)
{
    PERI_NEED(tbe);
    PERI_NEED(out);
    if (n && !blocks) return peri__fail(PERI_EINVAL, "peri_tbe_blocks_new: %d blocks, and no list of them", n);
    return blocks_new(tbe, blocks, n, true, out);
}

peri_status peri__tbe_blocks_new(const peri_tbe *tbe, const peri_tbe_block *blocks, int64_t n, peri_tbe_blocks **out)
{
    return blocks_new(tbe, blocks, n, false, out);
}

void peri_tbe_blocks_retain(peri_tbe_blocks *blocks) { if (blocks) peri__refs_add(&blocks->refs); }

void peri_tbe_blocks_release(peri_tbe_blocks *blocks)
{
    if (!blocks || !peri__refs_drop(&blocks->refs)) return;
    if (!blocks->copy || blocks->block != peri__data(blocks->copy)) peri__free(blocks->block);
    peri_tensor_release(blocks->copy);
    peri_event_release(blocks->copied);
    peri_event_release(blocks->sorted);
    peri_tbe_blocks_release(blocks->wide);
    pthread_mutex_destroy(&blocks->sorting);
    peri__object_count(-1);
    peri__free(blocks);
}

/* -- inputs -------------------------------------------------------------------------------------------------------- */

static peri_status check_array(const char *function, const char *what, const peri_tbe *tbe, const peri_tensor *t,
                               bool integer)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, what, t, -1, 1));
    if (integer ? t->dtype != PERI_I64 && t->dtype != PERI_I32 : t->dtype != PERI_F32)
        return peri__fail(PERI_EINVAL, "%s: %s is %s, allowed: %s", function, what,
                          peri__tensor_text(t, text, sizeof text), integer ? "i64, i32" : "f32");
    if (peri__device(t) != tbe->device)
        return peri__fail(PERI_EINVAL, "%s: %s is on device %s, the tables on %s", function, what,
                          peri__device(t)->name, tbe->device->name);
    if (!peri__contiguous(t)) return peri__fail(PERI_EINVAL, "%s: %s is not contiguous", function, what);
    return PERI_OK;
}

peri_status peri__tbe_input_check(const char *function, const peri_tbe *tbe, const peri_tbe_input *in)
{
    if (!in->blocks) return peri__fail(PERI_EINVAL, "%s: no blocks", function);
    PERI_TRY(check_array(function, "ids", tbe, in->ids, true));
    PERI_TRY(check_array(function, "offsets", tbe, in->offsets, true));
    int64_t n = peri__numel(in->ids), bags = peri__numel(in->offsets) - 1;
    if (in->blocks->n_tables != tbe->n_tables)
        return peri__fail(PERI_EINVAL, "%s: a block list made for %lld tables, this table batch has %lld", function,
                          (long long)in->blocks->n_tables, (long long)tbe->n_tables);
    if (peri__device(in->blocks->copy) != tbe->device)
        return peri__fail(PERI_EINVAL, "%s: a block list made for tables on device %s, these are on %s", function,
                          peri__device(in->blocks->copy)->name, tbe->device->name);
    if (bags < in->blocks->bags)
        return peri__fail(PERI_EINVAL, "%s: offsets of %lld bags, the blocks need %lld", function, (long long)bags,
                          (long long)in->blocks->bags);
    if (in->weights) {
        PERI_TRY(check_array(function, "weights", tbe, in->weights, false));
        if (peri__numel(in->weights) != n)
            return peri__fail(PERI_EINVAL, "%s: %lld weights for %lld ids", function,
                              (long long)peri__numel(in->weights), (long long)n);
    }
    if (in->scale) {
        PERI_TRY(check_array(function, "scale", tbe, in->scale, false));
        if (peri__numel(in->scale) != bags)
            return peri__fail(PERI_EINVAL, "%s: %lld scales for %lld bags", function, (long long)peri__numel(in->scale),
                              (long long)bags);
    }
    return PERI_OK;
}

int64_t peri__tbe_extent(const peri_tbe *tbe, const peri_tbe_input *in)
{
    const peri_tbe_blocks *b = in->blocks;
    int64_t extent = b->out_extent, n = peri__numel(in->ids);
    for (int64_t k = 0; k < b->n && b->none && n; k++) {
        const peri_k_tbe_block *x = &b->block[k];
        const peri_k_tbe_table *t = &tbe->layout[x->table];
        int64_t end;
        if (x->bags == 0 || t->pooling != PERI_POOLING_NONE) continue;
        if (__builtin_mul_overflow(n - 1, x->out_stride, &end) ||
            __builtin_add_overflow(end, x->out_offset + t->cols, &end))
            return INT64_MAX;
        extent = peri__max(extent, end);
    }
    return extent;
}
