/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_cases.h: the inputs on which the table-batched embedding kernels are tested and timed: one list for both.
 * Everything follows from the case and a seed.
 */
#ifndef PERI_TESTS_TBE_CASES_H
#define PERI_TESTS_TBE_CASES_H

#include "kernels/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TBE_CASE_TABLES = 32 };

/** How ids are drawn. */
enum { TBE_UNIFORM, TBE_POWER_LAW, TBE_ONE_ROW, TBE_SEQUENTIAL };

typedef struct tbe_case {
    const char *name;
    int32_t tables;
    int64_t rows[TBE_CASE_TABLES], cols[TBE_CASE_TABLES]; /* 0 repeats the entry before; rows: -1 is none */
    int64_t batch;       /* bags of each block */
    int64_t length;      /* mean ids of a bag; fixed_length: exactly */
    double alpha;        /* of the power law */
    int32_t ids;         /* TBE_UNIFORM, ... */
    int32_t features;    /* blocks; block f looks into table f % tables */
    bool fixed_length, weighted, scaled, mean, i32, unaligned, shared_bags, bad_ids, extreme;
    bool placed;         /* bags of all blocks but the first have places of their own, and sums are halved twice */
    bool bench;          /* timed by the bench under this name */
} tbe_case;

static const tbe_case tbe_cases[] = {
    {.name = "no bags", .tables = 1, .rows = {5}, .cols = {4}, .batch = 0, .length = 3},
    {.name = "empty bags", .tables = 2, .rows = {5, 5}, .cols = {4, 17}, .batch = 7, .length = 0},
    {.name = "empty bags, close together", .tables = 1, .rows = {5}, .cols = {4}, .batch = 7, .length = 0},
    {.name = "no rows", .tables = 2, .rows = {-1, 6}, .cols = {16, 16}, .batch = 5, .length = 3, .bad_ids = true},
    {.name = "one row", .tables = 1, .rows = {1}, .cols = {16}, .batch = 9, .length = 4},
    {.name = "one row, long", .tables = 1, .rows = {1}, .cols = {100}, .batch = 3, .length = 700},
    {.name = "dim 1", .tables = 1, .rows = {50}, .cols = {1}, .batch = 20, .length = 5},
    {.name = "dim 3", .tables = 1, .rows = {50}, .cols = {3}, .batch = 20, .length = 5, .weighted = true},
    {.name = "dim 17", .tables = 1, .rows = {50}, .cols = {17}, .batch = 20, .length = 5, .mean = true},
    {.name = "dim 100", .tables = 1, .rows = {50}, .cols = {100}, .batch = 20, .length = 5, .unaligned = true},
    {.name = "dim 1023", .tables = 1, .rows = {30}, .cols = {1023}, .batch = 20, .length = 5, .weighted = true},
    {.name = "dim 1100", .tables = 2, .rows = {20, 30}, .cols = {1100, 600}, .batch = 10, .length = 5, .mean = true},
    {.name = "dims 16 to 256",
     .tables = 9,
     .rows = {40},
     .cols = {16, 32, 48, 64, 96, 128, 192, 256, 512},
     .batch = 11,
     .length = 6},
    {.name = "dims, weighted",
     .tables = 9,
     .rows = {40},
     .cols = {16, 32, 48, 64, 96, 128, 192, 256, 512},
     .batch = 11,
     .length = 6,
     .weighted = true,
     .unaligned = true},
    {.name = "odd dims",
     .tables = 9,
     .rows = {40},
     .cols = {2, 5, 15, 31, 33, 63, 72, 127, 260},
     .batch = 11,
     .length = 6,
     .mean = true},
    {.name = "i32 ids and offsets",
     .tables = 3,
     .rows = {40, 50, 60},
     .cols = {8, 64, 128},
     .batch = 30,
     .length = 4,
     .i32 = true},
    {.name = "scaled bags",
     .tables = 2,
     .rows = {40, 50},
     .cols = {24, 64},
     .batch = 30,
     .length = 4,
     .scaled = true,
     .mean = true},
    {.name = "shared tables", .tables = 2, .rows = {20, 30}, .cols = {12, 64}, .batch = 15, .length = 8, .features = 7},
    {.name = "shared bags",
     .tables = 3,
     .rows = {20, 30, 40},
     .cols = {12, 64, 32},
     .batch = 15,
     .length = 8,
     .shared_bags = true,
     .weighted = true},
    {.name = "hot row", .tables = 1, .rows = {1000}, .cols = {48}, .batch = 200, .length = 30, .ids = TBE_ONE_ROW},
    {.name = "hot rows",
     .tables = 3,
     .rows = {5000},
     .cols = {32},
     .batch = 300,
     .length = 20,
     .ids = TBE_POWER_LAW,
     .alpha = 1.5},
    {.name = "distinct rows",
     .tables = 2,
     .rows = {5000},
     .cols = {16},
     .batch = 100,
     .length = 20,
     .ids = TBE_SEQUENTIAL},
    {.name = "bad ids",
     .tables = 3,
     .rows = {20, 30, 40},
     .cols = {16, 20, 128},
     .batch = 40,
     .length = 6,
     .bad_ids = true,
     .weighted = true},
    {.name = "placed",
     .tables = 3,
     .rows = {40, 50, 60},
     .cols = {32, 64, 24},
     .batch = 30,
     .length = 2,
     .features = 5,
     .placed = true},
    {.name = "placed, one id a bag",
     .tables = 2,
     .rows = {400, 500},
     .cols = {64, 128},
     .batch = 300,
     .length = 1,
     .fixed_length = true,
     .features = 4,
     .placed = true},
    {.name = "placed, narrow",
     .tables = 4,
     .rows = {300, 40, 300, 400},
     .cols = {8, 16, 12, 8},
     .batch = 300,
     .length = 1,
     .fixed_length = true,
     .features = 6,
     .placed = true},
    {.name = "placed, weighted",
     .tables = 2,
     .rows = {40, 50},
     .cols = {64, 17},
     .batch = 30,
     .length = 3,
     .features = 3,
     .mean = true,
     .weighted = true,
     .bad_ids = true,
     .placed = true},
    {.name = "extreme values",
     .tables = 3,
     .rows = {30, 30, 30},
     .cols = {16, 37, 64},
     .batch = 40,
     .length = 5,
     .extreme = true},
    {.name = "many tables", .tables = 32, .rows = {100}, .cols = {8}, .batch = 6, .length = 3},
    {.name = "many rows",
     .tables = 2,
     .rows = {600000, 1000},
     .cols = {2, 16},
     .batch = 500,
     .length = 12,
     .fixed_length = true},
    {.name = "default",
     .tables = 32,
     .rows = {100000},
     .cols = {128},
     .batch = 512,
     .length = 20,
     .fixed_length = true,
     .bench = true},
    {.name = "large",
     .tables = 4,
     .rows = {1000000},
     .cols = {128},
     .batch = 2048,
     .length = 20,
     .fixed_length = true,
     .bench = true},
    {.name = "wide",
     .tables = 2,
     .rows = {1000000},
     .cols = {256},
     .batch = 2048,
     .length = 20,
     .fixed_length = true,
     .bench = true},
    {.name = "narrow",
     .tables = 4,
     .rows = {2000000},
     .cols = {64},
     .batch = 2048,
     .length = 20,
     .fixed_length = true,
     .bench = true},
    {.name = "skewed",
     .tables = 4,
     .rows = {1000000},
     .cols = {128},
     .batch = 2048,
     .length = 20,
     .fixed_length = true,
     .ids = TBE_POWER_LAW,
     .alpha = 1.05,
     .bench = true},
    {.name = "serving16",
     .tables = 26,
     .rows = {100000},
     .cols = {64},
     .batch = 16,
     .length = 20,
     .fixed_length = true,
     .bench = true},
    {.name = "serving1",
     .tables = 26,
     .rows = {100000},
     .cols = {64},
     .batch = 1,
     .length = 20,
     .fixed_length = true,
     .bench = true},
};
enum { TBE_CASES = sizeof tbe_cases / sizeof *tbe_cases };

/** xorshift64*. */
static inline uint64_t tbe_draw(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

static inline double tbe_uniform(uint64_t *state) { return (double)(tbe_draw(state) >> 11) * 0x1p-53; }

/** The arrays of one case, in memory of their exact sizes so that sanitizers see every step too far. */
typedef struct tbe_data {
    const tbe_case *c;
    int64_t n_tables, n_blocks, n_bags, n_ids, items, total_rows, total_elements, out_elements, max_cols;
    peri_k_tbe_table *tables;
    peri_k_tbe_block *blocks;
    void *ids, *offsets;
    float *weights, *scale;
    int32_t *places;
} tbe_data;

/** Another way to reach rows at every call: nothing may depend on it. */
static inline peri_k_tbe_reach tbe_next_reach(void)
{
    static const int64_t ahead[] = {16 << 10, 0, 1, 64, 3000};
    static const int32_t kept[] = {0, 1 << 20, 2048, 1 << 14};
    static int64_t call;
    int64_t i = call++;
    return (peri_k_tbe_reach){
        .ahead = ahead[i % 5], .past = i % 3, .near = i % 7 < 3, .in_order = i % 2, .rows_near = i % 11 < 6,
        .kept = kept[i % 13 % 4]};
}

/** Floats of scratch for each chunk of tables of so many columns: what an update needs, and room for rows of the
 *  gradient that it may keep. */
static inline int64_t tbe_scratch_stride(int64_t cols)
{
    const int64_t wide = (cols + 15) / 16 * 16;
    return PERI_K_TBE_SCRATCH_ROWS * wide + PERI_K_TBE_SCRATCH_MORE + 16 * (wide + 8);
}

static inline void *tbe_room(int64_t bytes)
{
    if (bytes < 0 || bytes > (int64_t)1 << 40) abort();
    void *p = malloc((size_t)(bytes ? bytes : 1));
    if (!p) abort();
    return p;
}

static inline int64_t tbe_draw_id(const tbe_case *c, int64_t rows, int64_t i, uint64_t *seed)
{
    if (c->bad_ids && tbe_draw(seed) % 7 == 0) {
        static const int64_t bad[] = {-1, -2, INT32_MIN, INT32_MAX, -1};
        uint64_t pick = tbe_draw(seed) % 6;
        return pick < 5 ? bad[pick] : rows;
    }
    if (rows == 0) return -1;
    switch (c->ids) {
    case TBE_ONE_ROW: return rows / 2;
    case TBE_SEQUENTIAL: return i % rows;
    case TBE_POWER_LAW: {
        double low = 1 - c->alpha, x = pow(tbe_uniform(seed) * (pow((double)rows + 1, low) - 1) + 1, 1 / low) - 1;
        return (int64_t)x < rows - 1 ? (int64_t)x : rows - 1;
    }
    default: return (int64_t)(tbe_draw(seed) % (uint64_t)rows);
    }
}

static inline void tbe_data_tables(tbe_data *d)
{
    const tbe_case *c = d->c;
    d->n_tables = c->tables;
    d->tables = tbe_room((int64_t)sizeof *d->tables * c->tables);
    int64_t rows = 0, cols = 0;
    for (int32_t t = 0; t < c->tables; t++) {
        if (c->rows[t]) rows = c->rows[t] < 0 ? 0 : c->rows[t];
        if (c->cols[t]) cols = c->cols[t];
        d->tables[t] = (peri_k_tbe_table){.rows = rows, .cols = cols, .offset = d->total_elements, .stride = cols,
                                          .first_row = d->total_rows,
                                          .pooling = c->mean && t % 2 == 0 ? PERI_POOLING_MEAN : PERI_POOLING_SUM};
        d->total_elements += rows * cols + (c->unaligned ? 1 : 0);
        d->total_rows += rows;
        if (cols > d->max_cols) d->max_cols = cols;
    }
}

/** Make the arrays of a case. */
static inline tbe_data tbe_data_new(const tbe_case *c, uint64_t seed)
{
    tbe_data d = {.c = c};
    tbe_data_tables(&d);
    d.n_blocks = c->features ? c->features : c->tables;
    d.n_bags = c->shared_bags ? c->batch : c->batch * d.n_blocks;
    d.blocks = tbe_room((int64_t)sizeof *d.blocks * d.n_blocks);
    int64_t stride = c->unaligned ? 3 : 0, column = stride;
    for (int64_t f = 0; f < d.n_blocks; f++) stride += d.tables[f % c->tables].cols;
    for (int64_t f = 0; f < d.n_blocks; f++) {
        int32_t table = (int32_t)(f % c->tables);
        d.blocks[f] = (peri_k_tbe_block){.first_bag = c->shared_bags ? 0 : f * c->batch,
                                         .bags = c->batch,
                                         .out_offset = column,
                                         .out_stride = stride,
                                         .table = table,
                                         .feature = (int32_t)f};
        column += d.tables[table].cols;
    }
    d.out_elements = stride * c->batch;
    int64_t *offsets = tbe_room(8 * (d.n_bags + 1));
    offsets[0] = 0;
    for (int64_t b = 0; b < d.n_bags; b++) {
        int64_t n = c->fixed_length ? c->length
                    : c->length     ? (int64_t)(tbe_draw(&seed) % (uint64_t)(2 * c->length + 1))
                                    : 0;
        offsets[b + 1] = offsets[b] + n;
    }
    d.n_ids = offsets[d.n_bags];
    d.items = d.n_ids * (c->shared_bags ? d.n_blocks : 1);
    int64_t *ids = tbe_room(8 * d.n_ids);
    for (int64_t b = 0; b < d.n_bags; b++)
        for (int64_t i = offsets[b]; i < offsets[b + 1]; i++)
            ids[i] = tbe_draw_id(c, d.tables[c->shared_bags ? 0 : b / c->batch % c->tables].rows, i, &seed);
    d.ids = ids;
    d.offsets = offsets;
    if (c->i32) {
        int32_t *narrow_ids = tbe_room(4 * d.n_ids), *narrow_offsets = tbe_room(4 * (d.n_bags + 1));
        for (int64_t i = 0; i < d.n_ids; i++) narrow_ids[i] = (int32_t)ids[i];
        for (int64_t b = 0; b <= d.n_bags; b++) narrow_offsets[b] = (int32_t)offsets[b];
        free(ids);
        free(offsets);
        d.ids = narrow_ids;
        d.offsets = narrow_offsets;
    }
    if (c->weighted) d.weights = tbe_room(4 * d.n_ids);
    for (int64_t i = 0; c->weighted && i < d.n_ids; i++) d.weights[i] = (float)(tbe_uniform(&seed) * 2 - 1);
    if (c->placed) d.places = tbe_room(4 * (d.n_bags - c->batch));
    for (int64_t b = 0; c->placed && b < d.n_bags - c->batch; b++)
        d.places[b] = (int32_t)((b % c->batch * 7 + 3) % c->batch);
    if (c->scaled) d.scale = tbe_room(4 * d.n_bags);
    for (int64_t b = 0; c->scaled && b < d.n_bags; b++) d.scale[b] = (float)(tbe_uniform(&seed) * 2);
    return d;
}

static inline void tbe_data_free(tbe_data *d)
{
    free(d->tables);
    free(d->blocks);
    free(d->ids);
    free(d->offsets);
    free(d->weights);
    free(d->scale);
    free(d->places);
}

/** n numbers in [-1, 1), or with @extreme now and then one that breaks things. */
static inline float *tbe_numbers(int64_t n, bool extreme, uint64_t seed)
{
    static const float odd[] = {0.0f, -0.0f, 1e38f, -3e38f, 1e-40f, -1e-45f, INFINITY, -INFINITY, NAN};
    float *x = tbe_room(4 * n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)(tbe_uniform(&seed) * 2 - 1);
        if (extreme && tbe_draw(&seed) % 50 == 0) x[i] = odd[tbe_draw(&seed) % (sizeof odd / sizeof *odd)];
    }
    return x;
}

#endif
