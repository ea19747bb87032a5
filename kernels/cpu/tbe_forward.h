/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.h: what the parts of a lookup share. A call walks its part of the list bag by bag, while a second walk,
 * some rows ahead, asks for the rows that come later, across bags, blocks and tables: with random ids a lookup is
 * nothing but waiting for memory.
 */
#ifndef PERI_KERNELS_TBE_FORWARD_H
#define PERI_KERNELS_TBE_FORWARD_H

#include "../ref/tbe_list.h"
#include "tbe_calls.h"
#include "tbe_values.h"

/** Where the ids of a block lead. */
typedef struct tbe_ahead_block {
    int64_t k;
    int64_t i, end;        /* the next id, and the end of the block's ids or of the call's */
    const char *base;      /* row 0 of the block's table */
    int64_t stride, lines; /* bytes from row to row; cache lines that a row may touch */
    uint64_t rows;
    int64_t left; /* items of the call in blocks behind this one */
} tbe_ahead_block;

/** The walk ahead. Kept in registers: nobody points to it. */
typedef struct tbe_ahead {
    tbe_ahead_block in;
    uint32_t at, mask; /* the next item's place in the ring, and that of the item a ring ahead; the ring's length, a
                          power of two, less 1 */
} tbe_ahead;

/** What a walk ahead reads. */
typedef struct tbe_source {
    const peri_k_tbe_list *s;
    const char *weight;
    const void *ids;
    const float *weights;
    int32_t format;
    bool narrow; /* ids are i32 */
    peri_k_tbe_reach reach;
} tbe_source;

TBE_INLINE tbe_source tbe_source_of(const peri_k_tbe_list *s, const void *weight, int32_t format,
                                    const peri_k_tbe_reach *reach)
{
    return (tbe_source){s, weight, s->ids, s->weights, format, s->ids_dtype == PERI_I32, *reach};
}

/** Block k from id i on, `left` items before the end of the call. */
static __attribute__((noinline)) void tbe_ahead_find(const tbe_source *source, int64_t k, int64_t i, int64_t left,
                                                     tbe_ahead_block *to)
{
    const peri_k_tbe_list *s = source->s;
    int64_t items = s->spans[k].first_id + tbe_items(s, k) - i;
    const peri_k_tbe_table *t = &s->tables[s->blocks[k].table];
    int64_t unit = tbe_unit(source->format);
    to->k = k;
    to->i = i;
    to->end = i + (items < left ? items : left);
    to->left = left - (to->end - i);
    to->base = source->weight + t->offset * unit;
    to->stride = t->stride * unit;
    to->rows = (uint64_t)t->rows;
    uint64_t aligned = (uint64_t)(uintptr_t)to->base | (uint64_t)to->stride | TBE_LINE;
    int64_t before = TBE_LINE - (int64_t)(aligned & -aligned); /* most bytes of a line that lie before a row */
    to->lines = (before + tbe_row_bytes(source->format, t->cols) + TBE_LINE - 1) / TBE_LINE;
}

/** The same, field by field: a copy of the whole would wait until the fields are written. */
TBE_INLINE tbe_ahead_block tbe_ahead_enter(const tbe_source *source, int64_t k, int64_t i, int64_t left)
{
    tbe_ahead_block b;
    tbe_ahead_find(source, k, i, left, &b);
    return (tbe_ahead_block){b.k, b.i, b.end, b.base, b.stride, b.lines, b.rows, b.left};
}

/** The next block behind block k that has ids. */
static __attribute__((noinline)) void tbe_ahead_find_next(const tbe_source *source, int64_t k, int64_t left,
                                                          tbe_ahead_block *to)
{
    const peri_k_tbe_list *s = source->s;
    while (k + 2 < s->n_blocks && tbe_items(s, k + 1) == 0) k++;
    tbe_ahead_find(source, k + 1, s->spans[k + 1].first_id, left, to);
}

TBE_INLINE tbe_ahead_block tbe_ahead_next(const tbe_source *source, int64_t k, int64_t left)
{
    tbe_ahead_block b;
    tbe_ahead_find_next(source, k, left, &b);
    return (tbe_ahead_block){b.k, b.i, b.end, b.base, b.stride, b.lines, b.rows, b.left};
}

/** Cache lines of a row that begins with one. */
#define TBE_LINES(format, cols) ((int)(tbe_row_bytes(format, cols) + TBE_LINE - 1) / TBE_LINE)

TBE_INLINE int64_t tbe_source_id(const tbe_source *source, int64_t i)
{
    return source->narrow ? ((const int32_t *)source->ids)[i] : ((const int64_t *)source->ids)[i];
}

/** Ask for one more row; returns it. NULL: it is no row, or the call has no more. @lines: what the caller expects it to
 *  touch, known at compile time. */
TBE_INLINE const char *tbe_ahead_step(tbe_ahead *h, const tbe_source *source, const int lines)
{
    if (__builtin_expect(h->in.i >= h->in.end, 0)) {
        if (h->in.left <= 0) return NULL;
        h->in = tbe_ahead_next(source, h->in.k, h->in.left);
    }
    uint64_t id = (uint64_t)tbe_source_id(source, h->in.i++);
    if (id >= h->in.rows) return NULL;
    const char *row = h->in.base + (int64_t)id * h->in.stride;
    if (__builtin_expect(lines && h->in.lines == lines, 1)) {
        if (source->reach.near) {
#pragma GCC unroll 16
            for (int l = 0; l < lines; l++) tbe_prefetch_line(row + tbe_scattered_line(l, lines) * TBE_LINE, true);
        } else {
#pragma GCC unroll 16
            for (int l = 0; l < lines; l++) tbe_prefetch_line(row + tbe_scattered_line(l, lines) * TBE_LINE, false);
        }
    } else {
        tbe_prefetch(row, h->in.lines, source->reach.near);
    }
    return row;
}

/** The next item's place in the ring; what is there once it was read is the item's a ring ahead. */
TBE_INLINE const char **tbe_ahead_place(tbe_ahead *h, const char **ring) { return &ring[h->at++ & h->mask]; }

/** A walk ahead from a place of the list, `left` items before the end of the call. */
TBE_INLINE tbe_ahead tbe_ahead_start(const tbe_source *source, const char **ring, int64_t k, int64_t i, int64_t left,
                                     const int lines)
{
    tbe_ahead h = {.at = 0};
    if (left <= 0) return h;
    h.in = tbe_ahead_enter(source, k, i, left);
    uint32_t length = TBE_AHEAD_MOST;
    while (length > TBE_AHEAD_LEAST && length * h.in.lines * TBE_LINE > source->reach.ahead) length /= 2;
    for (uint32_t n = 0; n < length; n++) ring[n] = tbe_ahead_step(&h, source, lines);
    h.mask = length - 1;
    return h;
}

/** X(name) for every format of rows: unit_tbe_forward.c is compiled once for each, as its piece of that name. */
#define TBE_FORMATS(X) X(f32) X(f16) X(bf16) X(int8) X(int8_half) X(fp8) X(int4) X(int2)
enum {
    TBE_FORMAT_f32 = PERI_F32,
    TBE_FORMAT_f16 = PERI_F16,
    TBE_FORMAT_bf16 = PERI_BF16,
    TBE_FORMAT_int8 = PERI_ROWS_INT8,
    TBE_FORMAT_int8_half = PERI_ROWS_INT8_HALF,
    TBE_FORMAT_fp8 = PERI_ROWS_FP8,
    TBE_FORMAT_int4 = PERI_ROWS_INT4,
    TBE_FORMAT_int2 = PERI_ROWS_INT2,
};

/** A call's bags, from @at up to @stop, of rows of one format. */
#define X(name) K_HIDDEN void K_SHARED(tbe_forward_##name)(tbe_walk *w, tbe_place at, tbe_place stop);
TBE_FORMATS(X)
#undef X

#endif
