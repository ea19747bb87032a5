/* SPDX-License-Identifier: Apache-2.0
 *
 * own_way.c: a device that has operations of its own, written from what kernels/ says that comes out of them: one pass, one chunk, a sort
 * by insertion. Kernels are the host's. What PERI_TEST_LACKS names it has not.
 */
#include "kernels/kernels.h"
#include "runtime/plugin/device.h"

#include <stdlib.h>
#include <string.h>

static const peri_plugin_host *host;
static char nothing;

/* -- memory, streams, events: as the cpu's ------------------------------------------------------------------------------------------- */

static peri_status probe(char *reason, size_t len)
{
    (void)reason, (void)len;
    return PERI_OK;
}

static peri_status open_device(int32_t index, void **device, int32_t *caps)
{
    *device = &nothing;
    *caps = PERI_DEVICE_HOST_ACCESS | PERI_DEVICE_IMMEDIATE;
    return index == 0 ? PERI_OK : PERI_ENOTFOUND;
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

static peri_status gemm(void *device, void *stream, const peri_gemm *args)
{
    (void)device, (void)stream, (void)args;
    return PERI_EUNSUPPORTED;
}

/* -- kernels and operations ---------------------------------------------------------------------------------------------------------- */

static const char *const names[PERI_WORK_COUNT] = {
#define X(name, args) [PERI_K_##name] = #name,
    PERI_KERNELS(X)
#undef X
#define OP(name) [PERI_OP_##name] = #name
    OP(cumsum), OP(scan), OP(sort), OP(lists), OP(index_check), OP(mark), OP(mark_find), OP(tbe_prepare), OP(tbe_report),
    OP(tbe_forward), OP(tbe_sort), OP(tbe_update), /* and no others */
};

static bool has(void *device, int32_t work, const void *args)
{
    (void)device, (void)args;
    const char *lacks = getenv("PERI_TEST_LACKS");
    return names[work] && (!lacks || strcmp(lacks, names[work]) != 0);
}

static peri_status launch(void *device, void *stream, int32_t kernel, const void *args, int64_t args_size, int64_t n, int64_t grain)
{
    (void)device, (void)stream, (void)args_size, (void)grain;
    host->kernels()->fn[kernel](args, 0, n);
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

static void scan(const peri_op_scan *a)
{
    int64_t sum = 0;
    for (int64_t i = 0; i <= a->n; i++) {
        int64_t x = i < a->n ? a->sums[i] : 0;
        a->sums[i] = sum;
        sum += x;
    }
}

static void sort(const peri_op_sort *a)
{
    for (int64_t i = 0; i < a->n; i++) {
        int64_t at = i;
        for (; at > 0 && load(a->x, a->dtype, a->order[at - 1]) > load(a->x, a->dtype, i); at--) a->order[at] = a->order[at - 1];
        a->order[at] = i;
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
        if (x < 0 || x >= a->limit) first = i;
        extent[0] = x < extent[0] ? x : extent[0];
        extent[1] = x > extent[1] ? x : extent[1];
    }
    if (a->bad) *a->bad = first;
    if (a->extent) memcpy(a->extent, extent, sizeof extent);
}

static void mark(const peri_k_mark_args *a)
{
    int64_t words = (a->size + 63) / 64, blocks = (words + 63) / 64, sum = 0;
    memset(a->words, 0, 8 * (size_t)words);
    for (int64_t i = 0; i < a->n; i++) {
        uint64_t at = (uint64_t)load(a->x, a->dtype, i) - (uint64_t)a->base;
        a->words[at / 64] |= (uint64_t)1 << at % 64;
    }
    for (int64_t w = 0; w < words; w++) {
        if (w % 64 == 0) a->sums[w / 64] = sum;
        sum += __builtin_popcountll(a->words[w]);
    }
    a->sums[blocks] = sum;
}

static void mark_find(const peri_k_mark_args *a)
{
    for (int64_t u = 0; a->counts && u < a->total; u++) a->counts[u] = 0;
    for (int64_t i = 0; i < a->n; i++) {
        uint64_t at = (uint64_t)load(a->x, a->dtype, i) - (uint64_t)a->base, below = ((uint64_t)1 << at % 64) - 1;
        int64_t u = a->ranks[at / 64] + __builtin_popcountll(a->words[at / 64] & below);
        if (a->inverse) a->inverse[i] = u;
        if (a->counts) a->counts[u]++;
    }
}

/** Two steps of the host and a sort by insertion. */
static void tbe_sort(const peri_op_tbe_sort *a)
{
    uint32_t counts[2];
    peri_k_tbe_keys_args keys = {.stream = a->stream, .keys = a->keys, .items = a->items, .counts = counts, .total_rows = a->total_rows,
                                 .chunks = 1, .payload_bits = a->payload_bits, .shift = a->payload_bits, .bits = 1};
    host->kernels()->fn[PERI_K_tbe_keys](&keys, 0, 1);
    for (int64_t i = 1; i < a->stream.spans[a->stream.n_blocks].items; i++) {
        uint64_t key = a->keys[i];
        int64_t at = i;
        for (; at > 0 && a->keys[at - 1] >> a->payload_bits > key >> a->payload_bits; at--) a->keys[at] = a->keys[at - 1];
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
    const peri_kernel_fn *fn = host->kernels()->fn;
    if (op == PERI_OP_tbe_prepare) fn[PERI_K_tbe_prepare](args, 0, 1);
    if (op == PERI_OP_tbe_report) fn[PERI_K_tbe_report](args, 0, 1);
    if (op == PERI_OP_tbe_forward) {
        peri_k_tbe_forward_args a = *(const peri_k_tbe_forward_args *)args;
        a.chunks = 1;
        fn[PERI_K_tbe_forward](&a, 0, 1);
    }
    if (op == PERI_OP_tbe_update) {
        peri_k_tbe_update_args a = *(const peri_k_tbe_update_args *)args;
        a.chunks = 1;
        a.scratch = memory;
        a.scratch_stride = update_stride(args);
        fn[PERI_K_tbe_update](&a, 0, 1);
    }
}

static peri_status run(void *device, void *stream, int32_t op, const void *args, int64_t args_size, void *memory, int64_t bytes)
{
    (void)device, (void)stream, (void)args_size, (void)bytes;
    if (op == PERI_OP_cumsum) cumsum(args);
    else if (op == PERI_OP_scan) scan(args);
    else if (op == PERI_OP_sort) sort(args);
    else if (op == PERI_OP_lists) lists(args);
    else if (op == PERI_OP_index_check) index_check(args);
    else if (op == PERI_OP_mark) mark(args);
    else if (op == PERI_OP_mark_find) mark_find(args);
    else if (op == PERI_OP_tbe_sort) tbe_sort(args);
    else one_chunk(op, args, memory);
    return PERI_OK;
}

static const peri_device_vtab device = {
    .size = sizeof device, .abi = PERI_DEVICE_ABI, .name = "own_way", .kernels = peri_kernels_hash, .probe = probe, .open = open_device,
    .close = close_device, .alloc = take, .free = give, .stream_new = make, .stream_delete = drop, .stream_sync = done,
    .stream_wait = order, .event_new = make, .event_delete = drop, .event_record = order, .event_query = done, .event_sync = done,
    .copy = copy, .launch = launch, .has = has, .scratch = scratch, .run = run, .gemm = gemm,
};

__attribute__((visibility("default"))) const peri_device_vtab *peri_device_entry_v1(const peri_plugin_host *lent)
{
    host = lent;
    return &device;
}
