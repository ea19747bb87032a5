/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_ops.c: the operations of the device cpu, composed of steps (kernels/kernels.h), each over chunks that the worker
 * pool shares. What is known here and nowhere else: how much work is worth a chunk, how many passes a sort makes, what
 * memory that takes.
 *
 * Where the number of parts depends on the threads, the scratch has room for so many parts, and running reads their
 * number off its size: the threads may have changed since.
 */
#include "cpu_ops.h"

#include "../../kernels/kernels.h"

/** One operation that runs. */
typedef struct call {
    const peri_plugin_host *host;
    const void *args;
    char *scratch;
    int64_t bytes; /* of scratch */
} call;

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

typedef struct step_args {
    peri_kernel_fn fn;
    const void *args;
} step_args;

static void step_range(void *ctx, int64_t begin, int64_t end)
{
    const step_args *s = ctx;
    s->fn(s->args, begin, end);
}

/** Run step @kernel over [0, n), in ranges of at least @grain. */
static void step(const call *c, int32_t kernel, const void *args, int64_t n, int64_t grain)
{
    step_args s = {peri_kernels_get()->fn[kernel], args};
    if (n > 0) c->host->parallel_for(n, grain, step_range, &s);
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/** Bits that hold every number of [0, n). */
static int32_t bits_below(int64_t n)
{
    int32_t bits = 0;
    while (bits < 63 && ((int64_t)1 << bits) < n) bits++;
    return bits;
}

/* -- cumulative sums ----------------------------------------------------------------------------------------------- */

enum { BLOCK_GRAIN = 8, ROW_GRAIN = 64, INT_GRAIN = 1 << 15 }; /* blocks, rows, elements that are worth a thread */

static int64_t blocks_of(int64_t n) { return max(1, ceil_div(n, PERI_JAGGED_BLOCK)); }

static void sum_steps(const call *c, const peri_k_cumsum_args *a)
{
    step(c, PERI_K_cumsum_sums, a, a->rows * a->blocks, BLOCK_GRAIN);
    step(c, PERI_K_cumsum_scan, a, a->rows, ROW_GRAIN);
    if (a->y) step(c, PERI_K_cumsum_write, a, a->rows * a->blocks, BLOCK_GRAIN);
}

/** Counts by blocks become their exclusive cumulative sum, the sum of all in the last entry. */
static void scan(const call *c, int64_t *sums, int64_t blocks)
{
    step(c, PERI_K_cumsum_scan, &(peri_k_cumsum_args){.sums = sums, .rows = 1, .blocks = blocks, .limit = -1}, 1, 1);
}

/** The first of the blocks' findings. */
static int64_t first_of(const int64_t *bad, int64_t n)
{
    int64_t first = INT64_MAX;
    for (int64_t b = 0; b < n; b++) first = min(first, bad[b]);
    return first;
}

/** Sums by blocks, and what is bad by blocks. */
static int64_t cumsum_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_op_cumsum *a = args;
    return 8 * a->rows * (2 * blocks_of(a->cols) + 1);
}

static void run_cumsum(const call *c)
{
    const peri_op_cumsum *a = c->args;
    int64_t blocks = blocks_of(a->cols), *sums = (int64_t *)c->scratch,
            *bad = a->bad ? sums + a->rows * (blocks + 1) : NULL;
    peri_k_cumsum_args sum = {.x = a->x,
                              .y = a->y,
                              .sums = sums,
                              .bad = bad,
                              .rows = a->rows,
                              .cols = a->cols,
                              .blocks = blocks,
                              .limit = a->limit,
                              .x_dtype = a->x_dtype,
                              .y_dtype = a->y_dtype,
                              .mode = a->mode};
    sum_steps(c, &sum);
    if (bad) *a->bad = first_of(bad, a->rows * blocks);
    for (int64_t r = 0; r < a->rows && a->total; r++) {
        const int64_t *row = sums + r * (blocks + 1);
        a->total[r] = row[blocks];
        /* a block adds less than 2^62: passing 2^63 shows as negative */
        for (int64_t b = 0; b <= blocks && a->limit >= 0; b++)
            if (row[b] < 0) a->total[r] = INT64_MAX;
    }
}

/** Sums by blocks, what is bad and what is longest by blocks. */
static int64_t bags_report_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_op_bags_report *a = args;
    return a->look == PERI_BAGS_SOUND ? 0 : 8 * (3 * blocks_of(a->bags) + 1);
}

static void run_bags_report(const call *c)
{
    const peri_op_bags_report *a = c->args;
    int64_t blocks = a->look == PERI_BAGS_SOUND ? 0 : blocks_of(a->bags), *sums = (int64_t *)c->scratch;
    int64_t *bad = blocks ? sums + blocks + 1 : NULL, *most = blocks ? bad + blocks : NULL;
    bool summed = a->look == PERI_BAGS_LENGTHS;
    if (summed) {
        peri_k_cumsum_args sum = {.x = a->lengths,
                                  .y = a->sums,
                                  .sums = sums,
                                  .bad = bad,
                                  .most = most,
                                  .rows = 1,
                                  .cols = a->bags,
                                  .blocks = blocks,
                                  .limit = a->values,
                                  .x_dtype = a->lengths_dtype,
                                  .y_dtype = PERI_I64,
                                  .mode = PERI_CUMSUM_COMPLETE};
        sum_steps(c, &sum);
    } else if (blocks) {
        peri_k_jagged_check_args check = {.offsets = a->offsets,
                                          .lengths = a->lengths,
                                          .bad = bad,
                                          .most = most,
                                          .bags = a->bags,
                                          .limit = a->values,
                                          .offsets_dtype = a->offsets_dtype,
                                          .lengths_dtype = a->lengths_dtype};
        step(c, PERI_K_jagged_check, &check, blocks, BLOCK_GRAIN);
    }
    peri_k_jagged_report_args report = {.lengths = a->lengths,
                                        .offsets = a->offsets,
                                        .bad = bad,
                                        .most = most,
                                        .total = summed ? sums + blocks : NULL,
                                        .bounds = a->bounds,
                                        .report = a->report,
                                        .bags = a->bags,
                                        .blocks = blocks,
                                        .step = a->step,
                                        .n_bounds = a->n_bounds,
                                        .lengths_dtype = a->lengths_dtype,
                                        .offsets_dtype = a->offsets_dtype};
    step(c, PERI_K_jagged_report, &report, 1, 1);
    if (a->look != PERI_BAGS_OFFSETS || !a->sums) return;
    const int64_t *found = a->report;
    bool sound = found[PERI_REPORT_BAD] < 0 && !found[PERI_REPORT_FIRST] && found[PERI_REPORT_TOTAL] == a->values;
    peri_k_jagged_bounds_args copy = {.offsets = a->offsets, .out = a->sums, .step = 1,
                                      .offsets_dtype = a->offsets_dtype, .out_dtype = PERI_I64};
    if (sound) step(c, PERI_K_jagged_bounds, &copy, a->bags + 1, INT_GRAIN);
    else memset(a->sums, 0, 8 * (size_t)(a->bags + 1));
}

/* -- buckets ------------------------------------------------------------------------------------------------------- */

/** Sums of the lengths by blocks, and the lengths' sums where nobody asks for them. */
static int64_t bucketize_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_k_bucketize_args *a = args;
    int64_t slots = a->buckets * a->bags;
    return 8 * (blocks_of(slots) + 1 + (a->starts ? 0 : slots + 1));
}

static void run_bucketize(const call *c)
{
    peri_k_bucketize_args a = *(const peri_k_bucketize_args *)c->args;
    int64_t slots = a.buckets * a.bags, blocks = blocks_of(slots), *sums = (int64_t *)c->scratch;
    int64_t grain = a.bags * (1 << 14) / max(1, max(a.n, slots)) + 1; /* some 2^14 ids or slots */
    if (!a.starts) a.starts = sums + blocks + 1;
    peri_k_cumsum_args sum = {.x = a.lengths,
                              .y = a.starts,
                              .sums = sums,
                              .rows = 1,
                              .cols = slots,
                              .blocks = blocks,
                              .limit = -1,
                              .x_dtype = a.lengths_dtype,
                              .y_dtype = PERI_I64,
                              .mode = PERI_CUMSUM_COMPLETE};
    step(c, PERI_K_bucketize_count, &a, a.bags, grain);
    sum_steps(c, &sum);
    if (a.new_ids) step(c, PERI_K_bucketize_place, &a, a.bags, grain);
}

/* -- sorting ------------------------------------------------------------------------------------------------------- */

/* bits of a pass; bytes of a chunk's counters */
enum { DIGIT_BITS = 11, DIGIT_COUNTS = 4 << DIGIT_BITS, SORT_GRAIN = 1 << 14 };

static int64_t sort_chunks(const peri_plugin_host *host, int64_t n)
{
    return max(1, min(2 * host->threads(), ceil_div(n, SORT_GRAIN)));
}

/** Sort n keys by bits [low, high), stably. Returns where they are: @keys or @spare. The scratch from @counts on is of
 *  counters. */
static uint64_t *sort_words(const call *c, uint64_t *keys, uint64_t *spare, int64_t n, int32_t low, int32_t high,
                            char *counts)
{
    int32_t passes = (high - low + DIGIT_BITS - 1) / DIGIT_BITS, bits = passes ? (high - low + passes - 1) / passes : 0;
    int64_t chunks = (c->scratch + c->bytes - counts) / DIGIT_COUNTS;
    for (; low < high && n > 1; low += bits) {
        peri_k_radix_args pass = {.src = keys,
                                  .dst = spare,
                                  .counts = (uint32_t *)counts,
                                  .n = &n,
                                  .chunks = chunks,
                                  .shift = low,
                                  .bits = (int32_t)min(bits, high - low)};
        step(c, PERI_K_radix_histogram, &pass, chunks, 1);
        step(c, PERI_K_radix_scan, &pass, 1, 1);
        step(c, PERI_K_radix_scatter, &pass, chunks, 1);
        uint64_t *swap = keys;
        keys = spare;
        spare = swap;
    }
    return keys;
}

static int64_t lists_scratch(const peri_plugin_host *host, const void *args)
{
    const peri_op_lists *a = args;
    return 16 * a->n + sort_chunks(host, a->n) * DIGIT_COUNTS;
}

static void run_lists(const call *c)
{
    const peri_op_lists *a = c->args;
    uint64_t *keys = (uint64_t *)c->scratch, *spare = keys + a->n;
    int32_t place_bits = bits_below(a->n), bits = bits_below(a->lists);
    peri_k_sort_keys_args fill = {.x = a->x, .keys = keys, .dtype = a->dtype, .bits = bits, .place_bits = place_bits};
    step(c, PERI_K_sort_keys, &fill, a->n, INT_GRAIN);
    uint64_t *sorted = sort_words(c, keys, spare, a->n, place_bits, place_bits + bits, (char *)(spare + a->n));
    peri_k_sort_lists_args cut = {.keys = sorted, .list = a->list, .offsets = a->offsets, .n = a->n, .lists = a->lists,
                                  .place_bits = place_bits};
    step(c, PERI_K_sort_lists, &cut, a->n + 1, INT_GRAIN);
}

/* -- checks -------------------------------------------------------------------------------------------------------- */

static int64_t index_check_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_op_index_check *a = args;
    return 8 * 3 * blocks_of(a->n);
}

static void run_index_check(const call *c)
{
    const peri_op_index_check *a = c->args;
    int64_t blocks = blocks_of(a->n), *bad = (int64_t *)c->scratch, *extent = bad + blocks;
    peri_k_index_check_args check = {.x = a->x,
                                     .bad = a->bad ? bad : NULL,
                                     .extent = a->extent ? extent : NULL,
                                     .n = a->n,
                                     .limit = a->limit,
                                     .dtype = a->dtype};
    step(c, PERI_K_index_check, &check, blocks, BLOCK_GRAIN);
    if (a->bad) *a->bad = first_of(bad, blocks);
    if (a->safe && *a->bad == INT64_MAX) memcpy(a->safe, a->x, (size_t)(a->n * (a->dtype == PERI_I32 ? 4 : 8)));
    else if (a->safe) memset(a->safe, 0, (size_t)(a->n * (a->dtype == PERI_I32 ? 4 : 8)));
    if (!a->extent) return;
    a->extent[0] = INT64_MAX;
    a->extent[1] = INT64_MIN;
    for (int64_t b = 0; b < blocks; b++) {
        a->extent[0] = min(a->extent[0], extent[2 * b]);
        a->extent[1] = max(a->extent[1], extent[2 * b + 1]);
    }
}

/* -- unique ids ---------------------------------------------------------------------------------------------------- */

/** Marks are worth their scan up to so many places per id, and up to so many in all (their places are met at
 *  random). */
enum { MARKS_PER_ID = 32, MOST_MARKS = 1 << 28 };

static uint64_t id_range(const peri_op_unique *a) { return (uint64_t)a->most - (uint64_t)a->least; }
static bool by_marks(const peri_op_unique *a)
{
    return id_range(a) < (uint64_t)min(MOST_MARKS, a->n * MARKS_PER_ID + PERI_JAGGED_BLOCK);
}

/** What lies in the scratch of marking: words, sums by blocks, then marks, ranks and tallies, of which marks and
 *  tallies are for each of `parts` parts of the ids. */
typedef struct mark_plan {
    int64_t size, words, blocks;
    int64_t fixed, part; /* bytes; bytes of each part */
} mark_plan;

/** The scratch that it takes to find unique ids by a bit for each number from the least to the most. */
static mark_plan mark_plan_of(const peri_op_unique *a)
{
    mark_plan p = {.size = a->most - a->least + 1};
    p.words = ceil_div(p.size, 64);
    p.blocks = ceil_div(p.words, 64);
    p.fixed = 8 * p.words + 8 * (p.blocks + 1) + 4 * p.words;
    p.part = 8 * p.words + (a->counts ? 4 * min(a->n, p.size) : 0);
    return p;
}

static void mark_ids(const call *c)
{
    const peri_op_unique *a = c->args;
    mark_plan p = mark_plan_of(a);
    peri_k_mark_args m = {.x = a->x,
                          .unique = a->unique,
                          .inverse = a->inverse,
                          .counts = a->counts,
                          .n = a->n,
                          .base = a->least,
                          .size = p.size,
                          .parts = (c->bytes - p.fixed) / p.part,
                          .dtype = a->dtype};
    m.words = (uint64_t *)c->scratch;
    m.sums = (int64_t *)(m.words + p.words);
    m.marks = (uint64_t *)(m.sums + p.blocks + 1);
    m.ranks = (int32_t *)(m.marks + m.parts * p.words);
    m.tallies = a->counts ? (uint32_t *)(m.ranks + p.words) : NULL;
    step(c, PERI_K_mark_set, &m, m.parts, 1);
    step(c, PERI_K_mark_count, &m, p.blocks, BLOCK_GRAIN);
    scan(c, m.sums, p.blocks);
    *a->total = m.total = m.sums[p.blocks];
    step(c, PERI_K_mark_write, &m, p.blocks, BLOCK_GRAIN);
    if (a->inverse || a->counts) step(c, PERI_K_mark_lookup, &m, m.parts, 1);
    if (a->counts) step(c, PERI_K_mark_tally, &m, m.total, INT_GRAIN);
}

/** Keys hold a place and as many bits of x as fit beside it; x with more bits is sorted in rounds, from the low bits
 *  on. */
typedef struct order_plan {
    int32_t place_bits, bits, rounds;
} order_plan;

static order_plan order_plan_of(const peri_op_unique *a)
{
    int32_t wide = id_range(a) ? 64 - __builtin_clzll(id_range(a)) : 0;
    order_plan p = {.place_bits = bits_below(a->n)};
    p.rounds = (int32_t)max(1, ceil_div(wide, 64 - p.place_bits));
    p.bits = (int32_t)ceil_div(wide, p.rounds);
    return p;
}

/** @to = the places of the ids in ascending order. @other: another order, if there are rounds. */
static void order_ids(const call *c, const order_plan *p, uint64_t *keys, uint64_t *spare, int64_t *to, int64_t *other,
                      char *counts)
{
    const peri_op_unique *a = c->args;
    int64_t *order = NULL;
    for (int32_t round = 0; round < p->rounds; round++) {
        int64_t *next = (p->rounds - round) % 2 ? to : other; /* the last one goes where it is wanted */
        peri_k_sort_keys_args fill = {.x = a->x, .order = order, .keys = keys, .base = a->least, .dtype = a->dtype,
                                      .shift = round * p->bits, .bits = p->bits, .place_bits = p->place_bits};
        step(c, PERI_K_sort_keys, &fill, a->n, INT_GRAIN);
        uint64_t *sorted = sort_words(c, keys, spare, a->n, p->place_bits, p->place_bits + p->bits, counts);
        peri_k_sort_order_args read = {.keys = sorted, .order = order, .out = next, .place_bits = p->place_bits};
        step(c, PERI_K_sort_order, &read, a->n, INT_GRAIN);
        order = next;
    }
}

/** Two arrays of keys, where later the sorted ids and their starts lie; the order, another one if there are rounds;
 *  counters. */
static void sort_ids(const call *c)
{
    const peri_op_unique *a = c->args;
    order_plan p = order_plan_of(a);
    int64_t blocks = blocks_of(a->n);
    uint64_t *keys = (uint64_t *)c->scratch, *spare = keys + a->n + 1;
    int64_t *order = (int64_t *)(spare + a->n), *sums = order + a->n, *other = sums + blocks + 1;
    order_ids(c, &p, keys, spare, order, other, (char *)(other + (p.rounds > 1 ? a->n : 0)));
    peri_k_unique_args u = {.x = a->x,
                            .order = order,
                            .sorted = spare,
                            .sums = sums,
                            .unique = a->unique,
                            .inverse = a->inverse,
                            .counts = a->counts,
                            .starts = a->counts ? (int64_t *)keys : NULL,
                            .n = a->n,
                            .dtype = a->dtype};
    step(c, PERI_K_unique_count, &u, blocks, BLOCK_GRAIN);
    scan(c, sums, blocks);
    *a->total = sums[blocks];
    step(c, PERI_K_unique_write, &u, blocks, BLOCK_GRAIN);
    if (a->counts) step(c, PERI_K_unique_counts, &u, *a->total, INT_GRAIN);
}

static int64_t unique_scratch(const peri_plugin_host *host, const void *args)
{
    const peri_op_unique *a = args;
    if (by_marks(a)) {
        mark_plan p = mark_plan_of(a);
        return p.fixed + max(1, min(host->threads(), ceil_div(a->n, INT_GRAIN))) * p.part;
    }
    return 8 * (a->n * (order_plan_of(a).rounds > 1 ? 4 : 3) + 1 + blocks_of(a->n) + 1) +
           sort_chunks(host, a->n) * DIGIT_COUNTS;
}

static void run_unique(const call *c)
{
    if (by_marks(c->args)) mark_ids(c);
    else sort_ids(c);
}

/* -- rows and numbers by id ---------------------------------------------------------------------------------------- */

static int64_t table_rows_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    return 8 * blocks_of(((const peri_k_table_rows_args *)args)->n);
}

static void run_table_rows(const call *c)
{
    peri_k_table_rows_args a = *(const peri_k_table_rows_args *)c->args;
    int64_t *first = a.bad, blocks = blocks_of(a.n);
    a.bad = (int64_t *)c->scratch;
    step(c, PERI_K_table_rows, &a, blocks, BLOCK_GRAIN);
    *first = first_of(a.bad, blocks);
}

static int64_t slice_bounds_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    return 8 * blocks_of(((const peri_k_slice_bounds_args *)args)->bags);
}

static void run_slice_bounds(const call *c)
{
    peri_k_slice_bounds_args a = *(const peri_k_slice_bounds_args *)c->args;
    int64_t *first = a.bad, blocks = blocks_of(a.bags);
    a.bad = (int64_t *)c->scratch;
    step(c, PERI_K_slice_bounds, &a, blocks, BLOCK_GRAIN);
    *first = first_of(a.bad, blocks);
}

static int64_t hash_insert_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    return 8 * ((const peri_k_hash_args *)args)->tables;
}

static void run_hash_insert(const call *c)
{
    peri_k_hash_args a = *(const peri_k_hash_args *)c->args;
    int64_t *first = a.bad;
    a.bad = (int64_t *)c->scratch;
    step(c, PERI_K_hash_insert, &a, a.tables, 1);
    *first = first_of(a.bad, a.tables);
}

/** Each thread reads all ids: few of them are not worth a second one, and no others if they are only counted. */
static void run_weights_by_id(const call *c)
{
    const peri_k_weights_by_id_args *a = c->args;
    step(c, PERI_K_weights_by_id, a, a->numbers, a->n < INT_GRAIN || !a->weights ? max(1, a->numbers) : 1);
}

static int64_t mask_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    return 8 * (blocks_of(((const peri_k_mask_args *)args)->n) + 1);
}

/** Step @kernel over the blocks of rows, of which each knows how many have been picked before it. */
static void run_mask(const call *c, int32_t kernel, int64_t grain)
{
    peri_k_mask_args a = *(const peri_k_mask_args *)c->args;
    int64_t blocks = blocks_of(a.n);
    a.sums = (int64_t *)c->scratch;
    step(c, PERI_K_mask_sums, &a, blocks, BLOCK_GRAIN);
    scan(c, a.sums, blocks);
    if (kernel >= 0) step(c, kernel, &a, blocks, grain);
    else *a.total = a.sums[blocks];
}

/** Blocks of rows of so many bytes that are worth a thread. */
static int64_t mask_grain(const call *c) { return ((const peri_k_mask_args *)c->args)->width > 64 ? 1 : BLOCK_GRAIN; }

static void run_mask_count(const call *c) { run_mask(c, -1, 0); }
static void run_mask_pick(const call *c) { run_mask(c, PERI_K_mask_pick, mask_grain(c)); }
static void run_mask_spread(const call *c) { run_mask(c, PERI_K_mask_spread, mask_grain(c)); }
static void run_mask_places(const call *c) { run_mask(c, PERI_K_mask_places, BLOCK_GRAIN); }

static void run_norm_finish(const call *c) { step(c, PERI_K_norm_finish, c->args, 1, 1); }

/* -- table batches: passes over a stream --------------------------------------------------------------------------- */

enum { STREAM_GRAIN = 4 }; /* chunks that are worth a thread */

/** Chunks of so many f32 numbers of work. */
static int64_t list_chunks(int64_t work)
{
    enum { CHUNK_NUMBERS = 1 << 13, MOST = 1024 };
    return max(1, min(MOST, work / CHUNK_NUMBERS));
}

static void run_tbe_prepare(const call *c) { step(c, PERI_K_tbe_prepare, c->args, 1, 1); }
static void run_tbe_report(const call *c) { step(c, PERI_K_tbe_report, c->args, 1, 1); }

static void run_tbe_check(const call *c)
{
    peri_k_tbe_check_args a = *(const peri_k_tbe_check_args *)c->args;
    a.chunks = list_chunks(peri_k_tbe_work(&a.list));
    step(c, PERI_K_tbe_check, &a, a.chunks, STREAM_GRAIN);
}

static void run_tbe_forward(const call *c)
{
    peri_k_tbe_forward_args a = *(const peri_k_tbe_forward_args *)c->args;
    a.chunks = list_chunks(peri_k_tbe_work(&a.list));
    step(c, PERI_K_tbe_forward, &a, a.chunks, STREAM_GRAIN);
}

static void run_tbe_weight_gradient(const call *c)
{
    peri_k_tbe_weight_gradient_args a = *(const peri_k_tbe_weight_gradient_args *)c->args;
    a.chunks = list_chunks(peri_k_tbe_work(&a.list));
    step(c, PERI_K_tbe_weight_gradient, &a, a.chunks, STREAM_GRAIN);
}

/* -- table batches: the sort --------------------------------------------------------------------------------------- */

/** A sort by rows, of at most `most` keys, and where its scratch lies: other keys, other spans, counters of `threads`
 *  threads. */
typedef struct row_sort {
    int64_t most, threads;
    int64_t spans, counts, bytes; /* places in the scratch */
    bool apart;
} row_sort;

/** Bytes of counters for each thread: chunks of tables apart, or one chunk of all together. */
enum { TOGETHER_BITS = 12, THREAD_COUNTS = PERI_K_TBE_SORT_PER_THREAD << PERI_K_TBE_SORT_BITS << 2 };

static row_sort row_sort_of(const peri_op_tbe_sort *a, int64_t threads)
{
    const peri_k_tbe_list *s = &a->list;
    row_sort plan = {.most = s->capacity, .threads = threads, .spans = 8 * s->capacity};
    plan.counts = plan.spans + (s->ordered == s->blocks ? 0 : (int64_t)sizeof(peri_k_tbe_span) * (s->n_blocks + 1));
    plan.counts = (plan.counts + 63) & ~(int64_t)63;
    plan.bytes = plan.counts + threads * THREAD_COUNTS;
    /* Tables apart, unless one of them would keep the other threads waiting. */
    plan.apart = s->most_bags * threads <= 2 * s->all_bags;
    return plan;
}

static int64_t tbe_sort_scratch(const peri_plugin_host *host, const void *args)
{
    const peri_op_tbe_sort *a = args;
    int64_t chunks = a->list.capacity / (host->sort_keys() / PERI_K_TBE_SORT_PER_THREAD);
    return row_sort_of(a, max(1, min(host->threads(), chunks))).bytes;
}

/** Table by table, each in one thread's cache. */
static void sort_apart(const call *c, const row_sort *plan)
{
    const peri_op_tbe_sort *a = c->args;
    peri_k_tbe_sort_args sort = {.list = a->list,
                                 .keys = a->keys,
                                 .room = (uint64_t *)c->scratch,
                                 .items = a->items,
                                 .counts = (uint32_t *)(c->scratch + plan->counts),
                                 .total_rows = a->total_rows,
                                 .payload_bits = a->payload_bits};
    int64_t least = c->host->sort_keys() / PERI_K_TBE_SORT_PER_THREAD;
    sort.chunks = max(1, min(plan->threads * PERI_K_TBE_SORT_PER_THREAD, plan->most / least));
    if (a->list.ordered != a->list.blocks) {
        sort.list.blocks = a->list.ordered;
        sort.list.spans = (peri_k_tbe_span *)(c->scratch + plan->spans);
        step(c, PERI_K_tbe_prepare, &(peri_k_tbe_prepare_args){.list = sort.list}, 1, 1);
    }
    step(c, PERI_K_tbe_sort, &sort, sort.chunks, PERI_K_TBE_SORT_PER_THREAD);
}

/** Passes of a sort by @key_bits bits in @chunks chunks, and the bits of each. A pass costs about one unit for each key
 *  and one for each counter of each chunk. */
static int32_t passes_of(int32_t key_bits, int64_t keys, int64_t chunks, int32_t *bits)
{
    int64_t best = INT64_MAX;
    int32_t most = 0;
    for (int32_t passes = 1; passes <= key_bits; passes++) {
        int32_t each = (key_bits + passes - 1) / passes;
        int64_t cost = passes * (keys + ((int64_t)2 << each) * chunks);
        if (each > TOGETHER_BITS || cost >= best) continue;
        best = cost;
        *bits = each;
        most = (key_bits + each - 1) / each;
    }
    return most;
}

/** All tables at once, in passes that all threads share. */
static void sort_together(const call *c, const row_sort *plan)
{
    const peri_op_tbe_sort *a = c->args;
    const peri_k_tbe_list *s = &a->list;
    int64_t chunks = max(1, min(plan->threads, plan->most / c->host->sort_keys()));
    int32_t bits = 0, passes = passes_of(64 - a->payload_bits, plan->most, chunks, &bits);
    uint64_t *room = (uint64_t *)c->scratch;
    uint32_t *counts = (uint32_t *)(c->scratch + plan->counts);
    peri_k_radix_args pass = {.src = passes % 2 ? room : a->keys,
                              .dst = passes % 2 ? a->keys : room,
                              .counts = counts,
                              .n = &s->spans[s->n_blocks].items,
                              .chunks = chunks,
                              .shift = a->payload_bits,
                              .bits = bits};
    peri_k_tbe_keys_args keys = {.list = *s, .keys = passes % 2 ? room : a->keys, .items = a->items, .counts = counts,
                                 .total_rows = a->total_rows, .chunks = chunks, .payload_bits = a->payload_bits,
                                 .shift = a->payload_bits, .bits = bits};
    step(c, PERI_K_tbe_keys, &keys, chunks, 1);
    for (int32_t i = 0; i < passes; i++) {
        if (i > 0) step(c, PERI_K_radix_histogram, &pass, chunks, 1);
        step(c, PERI_K_radix_scan, &pass, 1, 1);
        step(c, PERI_K_radix_scatter, &pass, chunks, 1);
        const uint64_t *from = pass.dst;
        pass.dst = pass.dst == room ? a->keys : room;
        pass.src = from;
        pass.shift += bits;
    }
}

static void run_tbe_sort(const call *c)
{
    row_sort plan = row_sort_of(c->args, 0);
    plan = row_sort_of(c->args, (c->bytes - plan.counts) / THREAD_COUNTS);
    if (plan.apart) sort_apart(c, &plan);
    else sort_together(c, &plan);
}

/* -- table batches: updates ---------------------------------------------------------------------------------------- */

/** Floats that a chunk works on. */
static int64_t rows_stride(const peri_k_tbe_rows *rows)
{
    return PERI_K_TBE_SCRATCH_ROWS * ((rows->max_cols + 15) / 16 * 16) + PERI_K_TBE_SCRATCH_MORE;
}

/** Chunks of @rows rows of whole tables. */
static int64_t row_chunks(int64_t rows)
{
    enum { CHUNK_ROWS = 512, MOST = 1024 };
    return max(1, min(MOST, rows / CHUNK_ROWS));
}

/** Bytes that an update keeps the beginnings of runs in. */
static int64_t update_starts(const peri_k_tbe_update_args *a)
{
    return a->run_values ? (list_chunks(a->work) + 1) * 8 : 0;
}

/** Beside what each chunk works on, room for the rows of the gradient that each thread may keep, and for where they
 *  lie. */
static int64_t tbe_update_scratch(const peri_plugin_host *host, const void *args)
{
    const peri_k_tbe_update_args *a = args;
    const int64_t chunks = list_chunks(a->work), kept = 2 * (int64_t)a->reach.kept * host->threads();
    return max(chunks * rows_stride(&a->rows) * 4, kept + 64 * chunks) + update_starts(a);
}

static void run_tbe_update(const call *c)
{
    peri_k_tbe_update_args a = *(const peri_k_tbe_update_args *)c->args;
    a.chunks = list_chunks(a.work);
    a.scratch = (float *)c->scratch;
    a.scratch_stride = (c->bytes - update_starts(&a)) / a.chunks / 64 * 16;
    int64_t *starts = (int64_t *)(c->scratch + a.chunks * a.scratch_stride * 4);
    if (a.run_values) {
        peri_k_tbe_runs_args runs = {.sorted = a.sorted,
                                     .n = a.n,
                                     .starts = starts,
                                     .total_rows = a.rows.total_rows,
                                     .chunks = a.chunks,
                                     .payload_bits = a.payload_bits};
        step(c, PERI_K_tbe_runs, &runs, 1, 1);
        a.run_starts = starts;
        *a.runs = starts[a.chunks];
    }
    step(c, PERI_K_tbe_update, &a, a.chunks, STREAM_GRAIN);
}

static int64_t tbe_dense_update_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_k_tbe_dense_update_args *a = args;
    return row_chunks(a->rows.total_rows) * rows_stride(&a->rows) * 4;
}

static void run_tbe_dense_update(const call *c)
{
    peri_k_tbe_dense_update_args a = *(const peri_k_tbe_dense_update_args *)c->args;
    a.chunks = row_chunks(a.rows.total_rows);
    a.scratch = (float *)c->scratch;
    a.scratch_stride = rows_stride(&a.rows);
    step(c, PERI_K_tbe_dense_update, &a, a.chunks, 1);
}

static int64_t tbe_ema_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_k_tbe_ema_args *a = args;
    return row_chunks(a->rows.total_rows) * rows_stride(&a->rows) * 4;
}

static void run_tbe_ema(const call *c)
{
    peri_k_tbe_ema_args a = *(const peri_k_tbe_ema_args *)c->args;
    a.chunks = row_chunks(a.rows.total_rows);
    a.scratch = (float *)c->scratch;
    a.scratch_stride = rows_stride(&a.rows);
    step(c, PERI_K_tbe_ema, &a, a.chunks, 1);
}

/** Chunks of the rows that a batch touches. */
static int64_t shampoo_chunks(const peri_k_tbe_shampoo *a)
{
    enum { CHUNK_ROWS = 64, MOST = 256 };
    return max(1, min(MOST, a->most_rows / CHUNK_ROWS));
}

static int64_t tbe_shampoo_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_k_tbe_shampoo *a = args;
    return a->squares * (2 * 8 + 4) + shampoo_chunks(a) * rows_stride(&a->rows) * 4;
}

static void run_tbe_shampoo(const call *c)
{
    peri_k_tbe_shampoo a = *(const peri_k_tbe_shampoo *)c->args;
    a.room = (double *)c->scratch;
    a.root = (float *)(a.room + 2 * a.squares);
    a.scratch = a.root + a.squares;
    a.scratch_stride = rows_stride(&a.rows);
    a.chunks = shampoo_chunks(&a);
    step(c, PERI_K_tbe_gram, &a, a.all_cols, 8);
    step(c, PERI_K_tbe_root, &a, a.n_tables, 1);
    step(c, PERI_K_tbe_precondition, &a, a.chunks, 1);
}

/* -- sorts of lines ------------------------------------------------------------------------------------------------ */

static int64_t sort_lines_scratch(const peri_plugin_host *host, const void *args)
{
    (void)host;
    const peri_op_sort_lines *a = args;
    return 2 * (int64_t)sizeof(peri_k_sort_entry) * a->lines * a->n;
}

static void run_sort_lines(const call *c)
{
    const peri_op_sort_lines *a = c->args;
    peri_k_sort_line_args lines = {.sort = *a, .room = (peri_k_sort_entry *)c->scratch};
    step(c, PERI_K_sort_line, &lines, a->lines, max(1, (1 << 12) / max(1, a->n)));
}

/* -- the adjoint of take ------------------------------------------------------------------------------------------- */

static void run_take_add(const call *c)
{
    const peri_k_take_add_args *a = c->args;
    int64_t lines = 1;
    for (int32_t d = 0; d < a->ndim; d++) lines *= d == a->dim ? 1 : a->shape[d];
    step(c, PERI_K_take_add, a, lines, max(1, (1 << 14) / max(1, a->shape[a->dim])));
}

/* -- the largest products ------------------------------------------------------------------------------------------ */

enum { ITEM_GRAIN = 1024, NEAREST_PARTS = 2 /* of a thread */ };

static int64_t nearest_parts(const peri_plugin_host *host, const peri_op_nearest *a)
{
    return max(1, min(NEAREST_PARTS * host->threads(), a->n_items / ITEM_GRAIN));
}

/** Bytes of what a part has found, and of its rows as f32. */
static int64_t nearest_bytes(const peri_op_nearest *a)
{
    return a->n_queries * a->k * 12 + PERI_NEAREST_ROWS * a->dim * 4;
}

static int64_t nearest_scratch(const peri_plugin_host *host, const void *args)
{
    return nearest_parts(host, args) * nearest_bytes(args);
}

static void run_nearest(const call *c)
{
    peri_k_nearest_args a = {.op = *(const peri_op_nearest *)c->args};
    if (a.op.n_queries == 0) return;
    a.parts = c->bytes / nearest_bytes(&a.op);
    a.part_indices = (int64_t *)c->scratch;
    a.part_scores = (float *)(a.part_indices + a.parts * a.op.n_queries * a.op.k);
    a.rows = a.part_scores + a.parts * a.op.n_queries * a.op.k;
    step(c, PERI_K_nearest_part, &a, a.parts, 1);
    step(c, PERI_K_nearest_merge, &a, a.op.n_queries, 16);
}

/* -- the table ----------------------------------------------------------------------------------------------------- */

static const struct {
    void (*run)(const call *c);
    int64_t (*scratch)(const peri_plugin_host *host, const void *args); /* NULL: none */
} ops[PERI_WORK_COUNT - PERI_OP_FIRST] = {
#define OP(name) [PERI_OP_##name - PERI_OP_FIRST] = {run_##name, NULL}
#define OP_SCRATCH(name) [PERI_OP_##name - PERI_OP_FIRST] = {run_##name, name##_scratch}
#define OP_MASK(name) [PERI_OP_##name - PERI_OP_FIRST] = {run_##name, mask_scratch}
    OP(norm_finish),          OP_SCRATCH(cumsum),      OP_SCRATCH(bags_report),
    OP_SCRATCH(lists),        OP_SCRATCH(index_check), OP_SCRATCH(unique),
    OP_SCRATCH(bucketize),    OP_SCRATCH(sort_lines),  OP_SCRATCH(table_rows),
    OP_SCRATCH(slice_bounds), OP_SCRATCH(hash_insert), OP(weights_by_id),
    OP_MASK(mask_count),      OP_MASK(mask_pick),      OP_MASK(mask_spread),
    OP_MASK(mask_places),     OP(tbe_prepare),         OP(tbe_check),
    OP(tbe_report),           OP(tbe_forward),         OP(tbe_weight_gradient),
    OP_SCRATCH(tbe_sort),     OP_SCRATCH(tbe_update),  OP_SCRATCH(tbe_dense_update),
    OP_SCRATCH(tbe_ema),      OP_SCRATCH(tbe_shampoo), OP_SCRATCH(nearest),
    OP(take_add),
};

int64_t peri__cpu_op_scratch(const peri_plugin_host *host, int32_t op, const void *args)
{
    return ops[op - PERI_OP_FIRST].scratch ? ops[op - PERI_OP_FIRST].scratch(host, args) : 0;
}

void peri__cpu_op_run(const peri_plugin_host *host, int32_t op, const void *args, void *scratch, int64_t bytes)
{
    ops[op - PERI_OP_FIRST].run(&(call){host, args, scratch, bytes});
}
