/* SPDX-License-Identifier: Apache-2.0
 *
 * own_way.h: a device that has operations of its own, written from what kernels/ says that comes out of them: one pass,
 * one chunk, a sort by insertion. Kernels are the host's. What PERI_TEST_LACKS names it has not. own_way:0 says nothing
 * of its memory but that it is its own.
 */
#ifndef PERI_TESTS_OWN_WAY_H
#define PERI_TESTS_OWN_WAY_H

#include "kernels/kernels.h"
#include "runtime/plugin/device.h"

#include <stdlib.h>
#include <string.h>

static const peri_plugin_host *host;
static char nothing;

/* -- memory, streams, events: as the cpu's ------------------------------------------------------------------------- */

static peri_status probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status open_device(int32_t *index, void **device, int32_t *caps)
{
    *device = &nothing;
    *caps = (*index < 0 ? PERI_DEVICE_HOST_ACCESS : 0) | PERI_DEVICE_IMMEDIATE;
    return *index <= 0 ? PERI_OK : PERI_ENOTFOUND;
}

static void close_device(void *device) { (void)device; }

static peri_status take(void *device, void *stream, int64_t bytes, void **out)
{
    (void)device, (void)stream;
    return posix_memalign(out, 64, (size_t)bytes + 1) ? PERI_ENOMEM : PERI_OK;
}

static void give(void *device, void *stream, void *p, int64_t bytes)
{
    (void)device, (void)stream, (void)bytes;
    free(p);
}

static peri_status make(void *device, void **out)
{
    (void)device;
    *out = &nothing;
    return PERI_OK;
}

static void drop(void *device, void *p) { (void)device, (void)p; }

static peri_status done(void *device, void *p)
{
    (void)device, (void)p;
    return PERI_OK;
}

static peri_status order(void *device, void *a, void *b)
{
    (void)device, (void)a, (void)b;
    return PERI_OK;
}

static peri_status copy(void *device, void *stream, void *dst, const void *src, int64_t bytes, int32_t kind)
{
    (void)device, (void)stream, (void)kind;
    memmove(dst, src, (size_t)bytes);
    return PERI_OK;
}

/* -- kernels and operations ---------------------------------------------------------------------------------------- */

static const char *const names[PERI_WORK_COUNT] = {
#define X(name, args) [PERI_K_##name] = #name,
    PERI_KERNELS(X)
#undef X
#define OP(name) [PERI_OP_##name] = #name
        OP(gemm),
    OP(norm_finish),
    OP(cumsum),
    OP(bags_report),
    OP(lists),
    OP(index_check),
    OP(unique),
    OP(table_rows),
    OP(slice_bounds),
    OP(weights_by_id),
    OP(mask_count),
    OP(mask_pick),
    OP(mask_spread),
    OP(tbe_prepare),
    OP(tbe_report),
    OP(tbe_forward),
    OP(tbe_sort),
    OP(tbe_update), /* and no others */
};

static bool has(void *device, int32_t work, const void *args)
{
    (void)device;
    const peri_op_gemm *product = work == PERI_OP_gemm ? args : NULL;
    if (product && (product->dtype != PERI_F64 || product->biased)) return false;
    const char *lacks = getenv("PERI_TEST_LACKS");
    return names[work] && (!lacks || strcmp(lacks, names[work]) != 0);
}

static peri_status launch(void *device, void *stream, int32_t kernel, const void *args, int64_t args_size, int64_t n,
                          int64_t grain)
{
    (void)device, (void)stream, (void)args_size, (void)grain;
    int32_t count;
    const peri_work_entry *list = peri_work_list(&count);
    host->kernel(list[kernel].name, list[kernel].args)(args, 0, n);
    return PERI_OK;
}

static int64_t load(const void *x, int32_t dtype, int64_t i)
{
    return dtype == PERI_I32 ? ((const int32_t *)x)[i] : ((const int64_t *)x)[i];
}

static void store(void *y, int32_t dtype, int64_t i, int64_t value)
{
    if (dtype == PERI_I32) ((int32_t *)y)[i] = (int32_t)value;
    else ((int64_t *)y)[i] = value;
}

static void cumsum(const peri_op_cumsum *a)
{
    int64_t width = a->cols + (a->mode == PERI_CUMSUM_COMPLETE);
    if (a->bad) *a->bad = INT64_MAX;
    for (int64_t r = 0; r < a->rows; r++) {
        uint64_t sum = 0;
        for (int64_t i = 0; i <= a->cols; i++) {
            int64_t shown = a->limit >= 0 && (int64_t)sum > a->limit ? a->limit : (int64_t)sum;
            if (a->y && a->mode == PERI_CUMSUM_INCLUSIVE && i > 0) store(a->y, a->y_dtype, r * width + i - 1, shown);
            if (a->y && a->mode != PERI_CUMSUM_INCLUSIVE && i < width) store(a->y, a->y_dtype, r * width + i, shown);
            if (i == a->cols) break;
            int64_t x = load(a->x, a->x_dtype, r * a->cols + i);
            bool bad = a->limit >= 0 && (x < 0 || x > a->limit);
            if (bad && a->bad && *a->bad == INT64_MAX) *a->bad = r * a->cols + i;
            sum += bad ? 0 : (uint64_t)x;
        }
        if (a->total) a->total[r] = (int64_t)sum;
    }
}

static void lists(const peri_op_lists *a)
{
    int64_t at = 0;
    for (int64_t number = 0; number < a->lists; number++) {
        a->offsets[number] = at;
        for (int64_t i = 0; i < a->n; i++)
            if (load(a->x, a->dtype, i) == number) a->list[at++] = i;
    }
    a->offsets[a->lists] = at;
}

static void index_check(const peri_op_index_check *a)
{
    int64_t first = INT64_MAX, extent[2] = {INT64_MAX, INT64_MIN};
    for (int64_t i = a->n - 1; i >= 0; i--) {
        int64_t x = load(a->x, a->dtype, i);
        bool outside = x < 0 || x >= a->limit;
        if (outside) first = i;
        if (a->safe && a->dtype == PERI_I32) ((int32_t *)a->safe)[i] = outside ? 0 : (int32_t)x;
        if (a->safe && a->dtype == PERI_I64) ((int64_t *)a->safe)[i] = outside ? 0 : x;
        extent[0] = x < extent[0] ? x : extent[0];
        extent[1] = x > extent[1] ? x : extent[1];
    }
    if (a->bad) *a->bad = first;
    if (a->extent) memcpy(a->extent, extent, sizeof extent);
}

/** Which of the rising `n` numbers @x is, or where it would be. */
static int64_t place_of(const peri_op_unique *a, int64_t n, int64_t x)
{
    int64_t at = 0;
    while (at < n && load(a->unique, a->dtype, at) < x) at++;
    return at;
}

static void unique(const peri_op_unique *a)
{
    int64_t n = 0;
    for (int64_t i = 0; i < a->n; i++) {
        int64_t x = load(a->x, a->dtype, i), at = place_of(a, n, x);
        if (at < n && load(a->unique, a->dtype, at) == x) continue;
        for (int64_t j = n++; j > at; j--) store(a->unique, a->dtype, j, load(a->unique, a->dtype, j - 1));
        store(a->unique, a->dtype, at, x);
    }
    for (int64_t u = 0; a->counts && u < n; u++) a->counts[u] = 0;
    for (int64_t i = 0; i < a->n; i++) {
        int64_t at = place_of(a, n, load(a->x, a->dtype, i));
        if (a->inverse) a->inverse[i] = at;
        if (a->counts) a->counts[at]++;
    }
    *a->total = n;
}

static void table_rows(const peri_k_table_rows_args *a)
{
    *a->bad = INT64_MAX;
    for (int64_t t = 0; t < a->tables; t++) {
        int64_t start = load(a->starts, a->starts_dtype, t), rows = load(a->starts, a->starts_dtype, t + 1) - start;
        for (int64_t bag = t * a->step; bag < (t + 1) * a->step; bag++)
            for (int64_t i = load(a->offsets, a->offsets_dtype, bag); i < load(a->offsets, a->offsets_dtype, bag + 1);
                 i++) {
                int64_t id = load(a->ids, a->ids_dtype, i), row = start + id;
                bool bare = a->remap && rows == 0, good = id >= 0 && (id < rows || bare);
                if (a->remap && good) row = bare ? id : load(a->remap, a->remap_dtype, row);
                if (!good && i < *a->bad) *a->bad = i;
                store(a->out, a->out_dtype, i, good ? row : -1);
                if (a->bag) a->bag[i] = bag;
            }
    }
}

static void slice_bounds(const peri_k_slice_bounds_args *a)
{
    *a->bad = INT64_MAX;
    for (int64_t b = a->bags - 1; b >= 0; b--) {
        int64_t first = load(a->offsets, a->offsets_dtype, b),
                members = load(a->offsets, a->offsets_dtype, b + 1) - first;
        int64_t start = load(a->start, a->start_dtype, b), left = members - start;
        bool bad = start < 0 || left < 0;
        if (bad) *a->bad = b;
        a->starts[b] = first + (bad ? 0 : start);
        store(a->lengths, a->lengths_dtype, b, bad ? 0 : left < a->length ? left : a->length);
    }
}

/** f32 only: f64 is the cpu's. */
static void weights_by_id(const peri_k_weights_by_id_args *a)
{
    float *out = a->out;
    memset(out, 0, 8 * (size_t)a->numbers);
    for (int64_t i = 0; i < a->n; i++) {
        int64_t u = load(a->ids, a->ids_dtype, i);
        out[2 * u] += ((const float *)a->weights)[i];
        out[2 * u + 1]++;
    }
}

/** What is asked for of the rows that the mask picks. */
static void masked(int32_t op, const peri_k_mask_args *a)
{
    int64_t at = 0;
    size_t width = (size_t)a->width;
    for (int64_t i = 0; i < a->n; i++) {
        char *row = a->all + i * a->width, *kept = a->kept + at * a->width;
        if (op == PERI_OP_mask_pick && a->mask[i]) memcpy(kept, row, width);
        if (op == PERI_OP_mask_spread && a->mask[i]) memcpy(row, kept, width);
        if (op == PERI_OP_mask_spread && !a->mask[i]) memset(row, 0, width);
        at += a->mask[i] != 0;
    }
    if (op == PERI_OP_mask_count) *a->total = at;
}

static void gemm(const peri_op_gemm *a)
{
    for (int64_t i = 0; i < a->batch * a->m * a->n; i++) {
        int64_t p = i / (a->m * a->n), r = i / a->n % a->m, q = i % a->n;
        const double *x = (const double *)a->a + p * a->stride_a, *y = (const double *)a->b + p * a->stride_b;
        double sum = 0, *z = (double *)a->c + p * a->stride_c + r * a->ldc + q;
        for (int64_t j = 0; j < a->k; j++)
            sum += x[a->trans_a ? j * a->lda + r : r * a->lda + j] * y[a->trans_b ? q * a->ldb + j : j * a->ldb + q];
        *z = a->alpha * sum + (a->beta == 0 ? 0 : a->beta * *z);
    }
}

/** The order p = 2 alone. */
static void norm_finish(const peri_k_norm_finish_args *a)
{
    double sum = 0;
    for (int64_t k = 0; k < a->count; k++) sum += a->partial[k];
    *a->out = a->root ? __builtin_sqrt(sum) : sum;
}

/** What is found is looked for one bag after the other; SOUND and offsets at even steps are not wanted here. */
static void bags_report(const peri_op_bags_report *a)
{
    int64_t sum = 0, *r = a->report;
    memset(r, 0, 8 * PERI_REPORT_HEADER);
    r[PERI_REPORT_BAD] = -1;
    for (int64_t b = 0; b < a->bags; b++) {
        bool by_lengths = a->look == PERI_BAGS_LENGTHS;
        int64_t begin = by_lengths ? sum : load(a->offsets, a->offsets_dtype, b);
        int64_t end =
            by_lengths ? sum + load(a->lengths, a->lengths_dtype, b) : load(a->offsets, a->offsets_dtype, b + 1);
        bool bad = begin < 0 || end < begin || end - begin > a->values || (!by_lengths && end > a->values);
        if (bad && r[PERI_REPORT_BAD] < 0) {
            r[PERI_REPORT_BAD] = b;
            r[PERI_REPORT_LENGTH] = end - begin;
            r[PERI_REPORT_BEGIN] = begin;
            r[PERI_REPORT_END] = end;
        }
        if (by_lengths && a->sums) a->sums[b] = sum;
        if (!bad && end - begin > r[PERI_REPORT_MOST]) r[PERI_REPORT_MOST] = end - begin;
        if (!bad || !by_lengths) sum = end;
    }
    if (a->look == PERI_BAGS_LENGTHS && a->sums) a->sums[a->bags] = sum;
    if (a->look == PERI_BAGS_OFFSETS) {
        r[PERI_REPORT_FIRST] = load(a->offsets, a->offsets_dtype, 0);
        sum = load(a->offsets, a->offsets_dtype, a->bags);
        bool sound = r[PERI_REPORT_BAD] < 0 && r[PERI_REPORT_FIRST] == 0 && sum == a->values;
        for (int64_t b = 0; a->sums && b <= a->bags; b++)
            a->sums[b] = sound ? load(a->offsets, a->offsets_dtype, b) : 0;
    }
    r[PERI_REPORT_TOTAL] = sum;
}

/** Two steps of the host and a sort by insertion. */
static void tbe_sort(const peri_op_tbe_sort *a)
{
    uint32_t counts[2];
    peri_k_tbe_keys_args keys = {.list = a->list,
                                 .keys = a->keys,
                                 .items = a->items,
                                 .counts = counts,
                                 .total_rows = a->total_rows,
                                 .chunks = 1,
                                 .payload_bits = a->payload_bits,
                                 .shift = a->payload_bits,
                                 .bits = 1};
    host->kernel("tbe_keys", PERI_WORK_ARGS(peri_k_tbe_keys_args))(&keys, 0, 1);
    for (int64_t i = 1; i < a->list.spans[a->list.n_blocks].items; i++) {
        uint64_t key = a->keys[i];
        int64_t at = i;
        for (; at > 0 && a->keys[at - 1] >> a->payload_bits > key >> a->payload_bits; at--)
            a->keys[at] = a->keys[at - 1];
        a->keys[at] = key;
    }
}

static int64_t update_stride(const peri_k_tbe_update_args *a)
{
    return PERI_K_TBE_SCRATCH_ROWS * ((a->rows.max_cols + 15) / 16 * 16) + PERI_K_TBE_SCRATCH_MORE;
}

static int64_t scratch(void *device, int32_t op, const void *args)
{
    (void)device;
    return op == PERI_OP_tbe_update ? update_stride(args) * 4 : 0;
}

static void one_chunk(int32_t op, const void *args, void *memory)
{
    if (op == PERI_OP_tbe_prepare) host->kernel("tbe_prepare", PERI_WORK_ARGS(peri_k_tbe_prepare_args))(args, 0, 1);
    if (op == PERI_OP_tbe_report) host->kernel("tbe_report", PERI_WORK_ARGS(peri_k_tbe_report_args))(args, 0, 1);
    if (op == PERI_OP_tbe_forward) {
        peri_k_tbe_forward_args a = *(const peri_k_tbe_forward_args *)args;
        a.chunks = 1;
        host->kernel("tbe_forward", PERI_WORK_ARGS(peri_k_tbe_forward_args))(&a, 0, 1);
    }
    if (op == PERI_OP_tbe_update) {
        peri_k_tbe_update_args a = *(const peri_k_tbe_update_args *)args;
        a.chunks = 1;
        a.scratch = memory;
        a.scratch_stride = update_stride(args);
        host->kernel("tbe_update", PERI_WORK_ARGS(peri_k_tbe_update_args))(&a, 0, 1);
    }
}

static peri_status run(void *device, void *stream, int32_t op, const void *args, int64_t args_size, void *memory,
                       int64_t bytes)
{
    (void)device, (void)stream, (void)args_size, (void)bytes;
    switch (op) {
    case PERI_OP_gemm: gemm(args); break;
    case PERI_OP_norm_finish: norm_finish(args); break;
    case PERI_OP_cumsum: cumsum(args); break;
    case PERI_OP_bags_report: bags_report(args); break;
    case PERI_OP_lists: lists(args); break;
    case PERI_OP_index_check: index_check(args); break;
    case PERI_OP_unique: unique(args); break;
    case PERI_OP_table_rows: table_rows(args); break;
    case PERI_OP_slice_bounds: slice_bounds(args); break;
    case PERI_OP_weights_by_id: weights_by_id(args); break;
    case PERI_OP_mask_count:
    case PERI_OP_mask_pick:
    case PERI_OP_mask_spread: masked(op, args); break;
    case PERI_OP_tbe_sort: tbe_sort(args); break;
    default: one_chunk(op, args, memory);
    }
    return PERI_OK;
}

static const peri_device_vtab device = {
    .size = sizeof device,
    .abi = PERI_DEVICE_ABI,
    .name = "own_way",
    .work = peri_work_list,
    .probe = probe,
    .open = open_device,
    .close = close_device,
    .alloc = take,
    .free = give,
    .stream_new = make,
    .stream_delete = drop,
    .stream_sync = done,
    .stream_wait = order,
    .event_new = make,
    .event_delete = drop,
    .event_record = order,
    .event_query = done,
    .event_sync = done,
    .copy = copy,
    .launch = launch,
    .has = has,
    .scratch = scratch,
    .run = run,
};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *lent)
{
    host = lent;
    return &device;
}

#endif
