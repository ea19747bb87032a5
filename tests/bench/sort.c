/* SPDX-License-Identifier: Apache-2.0
 *
 * sort.c: the sort of a backward pass by itself: the kernel tbe_sort as runtime/embed/update.c launches it. Loaded by
 * tests/bench/embed.lua with roofline.c.
 */
#include "kernels/kernels.h"
#include "kernels/tbe.h"
#include "runtime/base/tune.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define API __attribute__((visibility("default")))

/** @features features, each with a bag of @length ids for each of @batch samples; @shared of them look into one
 *  table. */
typedef struct sort_shape {
    int64_t batch, features, shared, rows, cols, length, weighted;
} sort_shape;

typedef struct sort_state {
    peri_k_tbe_sort_args args;
    peri_kernel_fn kernel;
    peri_k_tbe_table *tables;
    peri_k_tbe_block *blocks;
    peri_k_tbe_span *spans;
    int64_t *offsets;
    float *weights;
} sort_state;

API void sort_close(sort_state *s);
API void sort_close(sort_state *s)
{
    if (!s) return;
    void *const parts[] = {s->tables,    s->blocks,    s->spans,      s->offsets,    s->weights,
                           s->args.keys, s->args.room, s->args.items, s->args.counts};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
    free(s);
}

/** Memory as the library's workspaces have it, of zeros: on huge pages where the system allows. */
static void *workspace(size_t bytes)
{
    const size_t page = (size_t)2 << 20;
    bytes = (bytes + page - 1) / page * page;
    void *p = aligned_alloc(page, bytes);
    if (!p) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return memset(p, 0, bytes);
}

static void describe(sort_state *s, const sort_shape *h)
{
    int64_t bag = 0;
    for (int64_t f = 0; f < h->features; f++) {
        int64_t t = f / h->shared;
        s->tables[t] =
            (peri_k_tbe_table){.rows = h->rows, .cols = h->cols, .stride = h->cols, .first_row = t * h->rows};
        s->blocks[f] = (peri_k_tbe_block){.first_bag = f * h->batch,
                                          .bags = h->batch,
                                          .out_offset = f * h->cols,
                                          .out_stride = h->features * h->cols,
                                          .table = (int32_t)t};
        s->spans[f].first_id = s->spans[f].items = f * h->batch * h->length;
    }
    s->spans[h->features].items = h->features * h->batch * h->length;
    for (; bag <= h->features * h->batch; bag++) s->offsets[bag] = bag * h->length;
}

/** NULL: no memory, or no such instruction set. */
API sort_state *sort_open(const char *isa, const sort_shape *h);
API sort_state *sort_open(const char *isa, const sort_shape *h)
{
    const peri_kernels *kernels = peri_kernels_isa(isa);
    sort_state *s = calloc(1, sizeof *s);
    if (!kernels || !s) {
        free(s);
        return NULL;
    }
    size_t bags = (size_t)(h->features * h->batch), n = bags * (size_t)h->length,
           tables = (size_t)(h->features / h->shared);
    int64_t least = peri__tune(PERI__TUNE_sort_ids) / PERI_K_TBE_SORT_PER_THREAD;
    int64_t chunks = peri__max(1, peri__min((int64_t)peri_threads() * PERI_K_TBE_SORT_PER_THREAD, (int64_t)n / least));
    s->kernel = kernels->fn[PERI_K_tbe_sort];
    s->tables = calloc(tables, sizeof *s->tables);
    s->blocks = calloc((size_t)h->features, sizeof *s->blocks);
    s->spans = calloc((size_t)h->features + 1, sizeof *s->spans);
    s->offsets = calloc(bags + 1, sizeof *s->offsets);
    s->weights = h->weighted ? calloc(n, sizeof *s->weights) : NULL;
    s->args = (peri_k_tbe_sort_args){
        .keys = workspace(8 * n),
        .room = workspace(8 * n),
        .items = h->weighted ? workspace(n * sizeof *s->args.items) : NULL,
        .counts = workspace(((size_t)chunks << PERI_K_TBE_SORT_BITS) * sizeof *s->args.counts),
        .total_rows = (int64_t)tables * h->rows,
        .chunks = chunks,
        .payload_bits = __builtin_clzll((uint64_t)((int64_t)tables * h->rows)),
        .list = {.offsets = s->offsets,
                   .weights = s->weights,
                   .tables = s->tables,
                   .blocks = s->blocks,
                   .spans = s->spans,
                   .n_ids = (int64_t)n,
                   .n_bags = (int64_t)bags,
                   .n_tables = (int64_t)tables,
                   .n_blocks = h->features,
                   .capacity = (int64_t)n,
                   .ids_dtype = PERI_I64,
                   .offsets_dtype = PERI_I64},
    };
    bool whole = s->tables && s->blocks && s->spans && s->offsets && s->args.keys && s->args.room && s->args.counts;
    if (!whole || (h->weighted && (!s->weights || !s->args.items))) {
        sort_close(s);
        return NULL;
    }
    describe(s, h);
    return s;
}

static void range(void *ctx, int64_t begin, int64_t end)
{
    sort_state *s = ctx;
    s->kernel(&s->args, begin, end);
}

static void nothing(void *ctx, int64_t begin, int64_t end) { (void)ctx, (void)begin, (void)end; }

/** Nanoseconds of one sort of the ids, by workers that are awake, as within a backward pass. */
API int64_t sort_run(sort_state *s, const int64_t *ids);
API int64_t sort_run(sort_state *s, const int64_t *ids)
{
    s->args.list.ids = ids;
    peri__parallel_for(peri_threads(), 1, nothing, NULL);
    int64_t from = peri_time_ns();
    peri__parallel_for(s->args.chunks, PERI_K_TBE_SORT_PER_THREAD, range, s);
    return peri_time_ns() - from;
}
