/* SPDX-License-Identifier: Apache-2.0
 *
 * reach.c: how kernels reach rows that lie in memory: the choices, and their measurement: the kernels themselves on a
 * table that is larger than the caches, with all threads.
 */
#include "reach.h"


/* Rows of 128 columns; bags and ids of a pass. The table has more rows than the caches hold, and sets of ids take
 * turns, so that a row is not asked for again before all others were: otherwise the rows of a few sets would be in the
 * caches, whatever the table has. */
enum { COLS = 128, BAGS = 512, LENGTH = 20, IDS = BAGS * LENGTH, ROW_BYTES = COLS * 4, OUT_BYTES = BAGS * ROW_BYTES };
/* Scratch of a chunk: what an update needs, and room for rows of the gradient. */
enum { SCRATCH = PERI_K_TBE_SCRATCH_ROWS * COLS + PERI_K_TBE_SCRATCH_MORE + (1 << 13) };
enum { LEAST_OUT_TURNS = 32, GRAD_STRIDE = 1024, SORT_KEYS = 1 << 14, PAYLOAD_BITS = 40, SORT_BITS = 9, CHUNKS = 128 };

peri_k_tbe_reach peri__tbe_reach_lookup(void)
{
    return (peri_k_tbe_reach){.ahead = peri__tune(PERI__TUNE_lookup_prefetch),
                              .near = peri__tune_near(PERI__TUNE_lookup_prefetch),
                              .in_order = peri__tune(PERI__TUNE_lookup_order) != 0,
                              .past = peri__tune(PERI__TUNE_lookup_past)};
}

/** A quarter of a processor's own cache: the rows of tables run through the rest. */
static int32_t kept_bytes(void)
{
    return (int32_t)(peri__min(peri__own_cache_bytes(), INT32_MAX) / 4);
}

peri_k_tbe_reach peri__tbe_reach_update(void)
{
    return (peri_k_tbe_reach){.ahead = peri__tune(PERI__TUNE_update_prefetch),
                              .near = peri__tune_near(PERI__TUNE_update_prefetch),
                              .rows_near = peri__tune(PERI__TUNE_update_near) != 0,
                              .kept = peri__tune(PERI__TUNE_update_kept) ? kept_bytes() : 0};
}

/* -- what all measurements work on --------------------------------------------------------------------------------- */

typedef struct bench {
    char *block; /* all memory, on huge pages */
    size_t bytes;
    float *weight, *momentum, *grad, *out, *scratch;
    int64_t *ids, *offsets;
    uint64_t *room;
    uint32_t *counts;
    peri_k_tbe_table table;
    peri_k_tbe_block list;
    peri_k_tbe_span spans[2];
    int64_t n, updated, turn;
    int64_t rows, sets, outs; /* rows of the table, a power of two; sets of ids; results, which take turns too */
    int32_t bits;             /* of a row's number */
    bool narrow; /* the table holds f16 now */
} bench;

static uint64_t mix(uint64_t x) { return peri__hash_mix(7, x); }

/** A number of @bits bits for each number of so many: another for each, in no order that hardware sees. */
static uint64_t scattered(uint64_t x, int32_t bits)
{
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (int32_t i = 0; i < 3; i++) {
        x ^= x >> bits / 2;
        x = x * 0x9e3779b97f4a7c15u & mask;
    }
    return x ^ x >> bits / 2;
}

/** The next @bytes of the block. */
static void *cut(bench *b, size_t bytes)
{
    void *p = b->block + b->bytes;
    b->bytes += (bytes + 4095) & ~(size_t)4095;
    return p;
}

static void lay_out(bench *b)
{
    int64_t cache = peri_cache_bytes();
    for (b->bits = 17; (int64_t)ROW_BYTES << b->bits < peri__tune_working_set(cache); b->bits++) {}
    b->rows = (int64_t)1 << b->bits;
    b->sets = b->rows / IDS;
    b->outs = peri__max(LEAST_OUT_TURNS, cache / OUT_BYTES + 1);
    b->bytes = 0;
    b->weight = cut(b, (size_t)b->rows * ROW_BYTES);
    b->momentum = cut(b, sizeof(float) * (size_t)b->rows);
    b->grad = cut(b, sizeof(float) * BAGS * GRAD_STRIDE);
    b->out = cut(b, (size_t)b->outs * OUT_BYTES);
    b->scratch = cut(b, sizeof(float) * CHUNKS * SCRATCH);
    b->ids = cut(b, sizeof(int64_t) * IDS * (size_t)b->sets);
    b->offsets = cut(b, sizeof(int64_t) * (BAGS + 1));
    b->room = cut(b, sizeof(uint64_t) * SORT_KEYS * 2);
    b->counts = cut(b, sizeof(uint32_t) * ((size_t)CHUNKS << SORT_BITS));
}

static void bench_close(void *state)
{
    bench *b = state;
    if (b) peri__tune_memory_free(b->block, b->bytes);
    peri__free(b);
}

static peri_status bench_open(void **state)
{
    bench *b = peri__alloc_zero(sizeof *b);
    if (!b) return PERI_ENOMEM;
    *state = b;
    lay_out(b);
    PERI_TRY(peri__tune_memory(b->bytes, &b->block));
    lay_out(b);
    for (int64_t i = 0; i < IDS * b->sets; i++) b->ids[i] = (int64_t)scattered((uint64_t)i, b->bits);
    for (int64_t i = 0; i <= BAGS; i++) b->offsets[i] = i * LENGTH;
    for (int64_t i = 0; i < BAGS * GRAD_STRIDE; i++) b->grad[i] = (float)(i % 17 - 8) / 64;
    b->table = (peri_k_tbe_table){.rows = b->rows, .cols = COLS, .stride = COLS};
    b->list = (peri_k_tbe_block){.bags = BAGS, .out_stride = COLS};
    return PERI_OK;
}

static peri_k_tbe_list list_of(bench *b)
{
    return (peri_k_tbe_list){.ids = b->ids + b->turn++ % b->sets * IDS,
                             .offsets = b->offsets,
                             .tables = &b->table,
                             .blocks = &b->list,
                             .spans = b->spans,
                             .n_ids = IDS,
                             .n_bags = BAGS,
                             .n_tables = 1,
                             .n_blocks = 1,
                             .capacity = IDS,
                             .ids_dtype = PERI_I64,
                             .offsets_dtype = PERI_I64};
}

/** One launch of a kernel, as the device cpu makes it. */
typedef struct launch {
    peri_kernel_fn fn;
    const void *args;
} launch;

static void launch_range(void *ctx, int64_t begin, int64_t end)
{
    const launch *l = ctx;
    l->fn(l->args, begin, end);
}

static void launch_kernel(int32_t kernel, const void *args, int64_t n, int64_t grain)
{
    peri__parallel_for(n, grain, launch_range, &(launch){peri_kernels_get()->fn[kernel], args});
}

/* -- lookups ------------------------------------------------------------------------------------------------------- */

static int64_t lookup_pass(void *state, int32_t choice)
{
    bench *b = state;
    peri_k_tbe_forward_args args = {.list = list_of(b),
                                    .weight = b->weight,
                                    .weight_dtype = PERI_F32,
                                    .out_dtype = PERI_F32,
                                    .out = b->out + b->turn % b->outs * BAGS * COLS,
                                    .chunks = CHUNKS,
                                    .reach = peri__tbe_reach_lookup()};
    if (choice == PERI__TUNE_lookup_past && args.reach.past) args.reach.past = 1;
    launch_kernel(PERI_K_tbe_prepare, &(peri_k_tbe_prepare_args){.list = args.list}, 1, 1);
    int64_t from = peri_time_ns();
    launch_kernel(PERI_K_tbe_forward, &args, CHUNKS, 4);
    return peri_time_ns() - from;
}

/* -- updates ------------------------------------------------------------------------------------------------------- */

/** Sorted keys of IDS distinct rows, another set each time: what comes from a batch in which few rows are there
 *  twice. */
static void sorted_keys(bench *b)
{
    uint64_t set = (uint64_t)(b->turn++ % b->sets), step = (uint64_t)(b->rows / IDS), *keys = b->room;
    for (uint64_t i = 0; i < IDS; i++) {
        uint64_t x = mix(set << 32 | i), row = i * step + (set * 0x9e3779b1 + mix(i)) % step;
        keys[i] = row << PAYLOAD_BITS | (x >> 32) % BAGS * GRAD_STRIDE;
    }
}

static int64_t update_pass(void *state, int32_t choice)
{
    bench *b = state;
    bool narrow = choice == PERI__TUNE_update_near;
    if (narrow && !b->narrow) peri__tune_zero((char *)b->weight, (size_t)b->rows * ROW_BYTES);
    b->narrow = b->narrow || narrow;
    b->n = IDS;
    sorted_keys(b);
    peri_k_tbe_update_args args = {.rows = {.tables = &b->table,
                                            .n_tables = 1,
                                            .total_rows = b->rows,
                                            .weight = b->weight,
                                            .weight_dtype = narrow ? PERI_F16 : PERI_F32,
                                            .momentum1 = b->momentum},
                                   .optimizer = {.kind = PERI_TBE_ROWWISE_ADAGRAD,
                                                 .lr = 0.01f,
                                                 .eps = 1e-8f,
                                                 .stochastic = true,
                                                 .iteration = (uint64_t)b->turn},
                                   .sorted = b->room,
                                   .n = &b->n,
                                   .grad = b->grad,
                                   .scratch = b->scratch,
                                   .scratch_stride = SCRATCH,
                                   .chunks = CHUNKS,
                                   .updated = &b->updated,
                                   .payload_bits = PAYLOAD_BITS,
                                   .reach = peri__tbe_reach_update()};
    int64_t from = peri_time_ns();
    launch_kernel(PERI_K_tbe_update, &args, CHUNKS, 4);
    return peri_time_ns() - from;
}

/* -- the sort ------------------------------------------------------------------------------------------------------ */

/** Two passes over keys of which 32k are too few for a second thread, 8k are enough for two and 2k for eight. */
static int64_t sort_pass(void *state, int32_t choice)
{
    bench *b = state;
    int64_t n = SORT_KEYS, chunks = peri__max(1, peri__min(peri__min(peri_threads(), CHUNKS), n / peri__tune(choice)));
    for (int64_t i = 0; i < n; i++) b->room[i] = mix((uint64_t)(i + b->turn)) << PAYLOAD_BITS;
    b->turn++;
    peri_k_radix_args pass = {.src = b->room,
                              .dst = b->room + n,
                              .counts = b->counts,
                              .n = &n,
                              .chunks = chunks,
                              .shift = PAYLOAD_BITS,
                              .bits = SORT_BITS};
    peri__tune_zero(b->block, 0); /* wakes the threads, which a backward pass finds awake */
    int64_t from = peri_time_ns();
    for (int32_t i = 0; i < 2; i++) {
        launch_kernel(PERI_K_radix_histogram, &pass, chunks, 1);
        launch_kernel(PERI_K_radix_scan, &pass, 1, 1);
        launch_kernel(PERI_K_radix_scatter, &pass, chunks, 1);
        pass.src = b->room + n;
        pass.dst = b->room;
        pass.shift += SORT_BITS;
    }
    return peri_time_ns() - from;
}

__attribute__((constructor)) static void offer(void)
{
    static const peri__tune_meter lookups = {bench_open, lookup_pass, bench_close},
                                  updates = {bench_open, update_pass, bench_close};
    static const peri__tune_meter sorts = {bench_open, sort_pass, bench_close};
    peri__tune_offer(PERI__TUNE_LOOKUP, &lookups);
    peri__tune_offer(PERI__TUNE_UPDATE, &updates);
    peri__tune_offer(PERI__TUNE_SORT, &sorts);
}
