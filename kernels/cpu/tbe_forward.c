/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.c: lookups. A call walks its part of the stream bag by bag, while a second walk, some rows ahead, asks for the rows that
 * come later, across bags, blocks and tables: with random ids a lookup is nothing but waiting for memory.
 */

/** Sixteens of a row that are added up at a time, where the width is not one of the common ones. */
enum { TBE_WIDE = TBE_PANEL < 8 ? TBE_PANEL : 8 };

/** How many bytes the walk ahead keeps in flight: enough to cover the memory's latency, few enough to stay in the cache until used. */
enum { TBE_IN_FLIGHT = 16 << 10, TBE_AHEAD_LEAST = 8, TBE_AHEAD_MOST = 64 };

/** The walk ahead. */
typedef struct tbe_ahead {
    const peri_k_tbe_stream *s;
    const char *weight;
    int32_t format;
    bool aligned;     /* rows begin at cache lines */
    int64_t left;     /* items up to the end of the call */
    int64_t k;        /* the block in which it is */
    int64_t i, end;   /* its next id, and the end of the block's ids */
    const char *base; /* row 0 of the block's table */
    int64_t stride;   /* bytes from row to row */
    int64_t bytes;    /* of a row that are read */
    uint64_t rows;
} tbe_ahead;

/** Enter block k at id i. */
static void tbe_ahead_enter(tbe_ahead *h, int64_t k, int64_t i)
{
    const peri_k_tbe_table *t = &h->s->tables[h->s->blocks[k].table];
    int64_t unit = tbe_unit(h->format);
    h->k = k;
    h->i = i;
    h->end = h->s->spans[k].first_id + tbe_items(h->s, k);
    h->base = h->weight + t->offset * unit;
    h->stride = t->stride * unit;
    h->bytes = tbe_row_bytes(h->format, t->cols);
    h->aligned = ((uintptr_t)h->base | (uintptr_t)h->stride) % TBE_LINE == 0;
    h->rows = (uint64_t)t->rows;
}

/** Go to the next block that has ids. */
static __attribute__((noinline)) void tbe_ahead_next(tbe_ahead *h)
{
    while (h->i >= h->end && h->k + 1 < h->s->n_blocks) tbe_ahead_enter(h, h->k + 1, h->s->spans[h->k + 1].first_id);
}

/** Ask for one more row. @bytes: what the caller expects it to have, known at compile time where it can be. */
TBE_INLINE void tbe_ahead_step(tbe_ahead *h, int64_t bytes)
{
    if (h->left <= 0) return;
    h->left--;
    if (h->i >= h->end) tbe_ahead_next(h);
    uint64_t id = (uint64_t)tbe_id(h->s, h->i++);
    if (id >= h->rows) return;
    const char *row = h->base + (int64_t)id * h->stride;
    if (h->bytes == bytes) tbe_prefetch(row, (bytes + TBE_LINE - 1) / TBE_LINE);
    else tbe_prefetch(row, (h->bytes + TBE_LINE - 1) / TBE_LINE);
    if (!h->aligned) tbe_prefetch(row + h->bytes - 1, 1); /* the line into which the row's end reaches */
}

/** Start @h at a place of the stream, `left` items before the end of the call. */
static void tbe_ahead_start(tbe_ahead *h, const peri_k_tbe_stream *s, const void *weight, int32_t format, int64_t k, int64_t i,
                            int64_t left)
{
    *h = (tbe_ahead){.s = s, .weight = weight, .format = format, .left = left};
    if (left <= 0) return;
    tbe_ahead_enter(h, k, i);
    int64_t distance = tbe_clamp(TBE_IN_FLIGHT / h->bytes, TBE_AHEAD_LEAST, TBE_AHEAD_MOST);
    for (int64_t n = 0; n < distance; n++) tbe_ahead_step(h, 0);
}

/** A call's part of the walk, and the block in which it is. */
typedef struct tbe_walk {
    const peri_k_tbe_forward_args *a;
    const peri_k_tbe_table *t;
    const char *base; /* row 0 */
    int64_t stride;   /* bytes */
    int64_t k;
    tbe_ahead ahead;
    tbe_count count;
} tbe_walk;

static __attribute__((noinline)) void tbe_walk_bad_id(tbe_walk *w, int64_t i, int64_t id)
{
    if (w->a->report) tbe_count_id(&w->a->stream, w->k, i, id, &w->count);
}

/** Which of a row's @nv sixteens is read k-th. Processors that see neighbouring lines asked for one after the other fetch the lines behind
 *  them too, which with random rows are nobody's: 1.5 times the time of rows of 4 or 8 lines on a Zen 4. Out of order they do not. */
TBE_INLINE int tbe_scattered(const int k, const int nv, const int32_t format)
{
    static const int of8[8] = {2, 6, 5, 7, 3, 0, 4, 1}, of4[4] = {3, 1, 0, 2};
    const int each = format == PERI_F32 ? 1 : format == PERI_F16 || format == PERI_BF16 ? 2 : 4; /* sixteens in a line */
    const int lines = nv / each, line = k / each;
    if (nv % each || (lines != 4 && lines % 8)) return k;
    return (lines == 4 ? of4[line] : line / 8 * 8 + of8[line % 8]) * each + k % each;
}

/** Results to element @at. */
TBE_INLINE void tbe_forward_store(const tbe_walk *w, int64_t at, const v16 *acc, const v16 factor, const int nv, const int64_t tail)
{
    if (w->a->out_dtype == PERI_F32) {
        float *out = (float *)w->a->out + at;
        for (int v = 0; v < nv - 1; v++) v16_store(out + 16 * v, v16_mul(acc[v], factor));
        if (tail == 16) v16_store(out + 16 * (nv - 1), v16_mul(acc[nv - 1], factor));
        else v16_store_part(out + 16 * (nv - 1), v16_mul(acc[nv - 1], factor), tail);
    } else {
        uint16_t *out = (uint16_t *)w->a->out + at;
        const bool half = w->a->out_dtype == PERI_F16;
        for (int v = 0; v < nv; v++) {
            v16 x = v16_mul(acc[v], factor);
            h16_store(out + 16 * v, half ? v16_to_f16(x) : v16_to_bf16(x), v == nv - 1 ? tail : 16);
        }
    }
}

/** Columns [c, c + 16 * (nv - 1) + tail) of ids [from, past), pooled, to element @at. @first: look ahead, and count bad ids. */
TBE_INLINE void tbe_forward_panel(tbe_walk *w, int64_t from, int64_t past, float factor, int64_t at, const int32_t format, int64_t c,
                                  const int nv, const int64_t tail, const int64_t bytes, const bool first)
{
    const peri_k_tbe_stream *s = &w->a->stream;
    const uint64_t rows = (uint64_t)w->t->rows;
    const int64_t cols = w->t->cols;
    v16 acc[TBE_PANEL], one = v16_set(1);
    for (int v = 0; v < nv; v++) acc[v] = v16_zero();
    for (int64_t i = from; i < past; i++) {
        if (first) tbe_ahead_step(&w->ahead, bytes);
        int64_t id = tbe_id(s, i);
        if ((uint64_t)id >= rows) {
            if (first) tbe_walk_bad_id(w, i, id);
            continue;
        }
        const char *row = w->base + id * w->stride;
        v16 x = s->weights ? v16_set(s->weights[i]) : one; /* fma(1, r, acc) is acc + r */
        tbe_codes codes = tbe_row_codes(row, cols, format);
#pragma GCC unroll 16
        for (int k = 0; k < nv; k++) {
            const int v = tbe_scattered(k, nv, format);
            acc[v] = v16_fma(x, tbe_row_values(&codes, c + 16 * v, v == nv - 1 ? tail : 16, format), acc[v]);
        }
    }
    tbe_forward_store(w, at + c, acc, v16_set(factor), nv, tail);
}

/** One bag whose width is known at compile time (nv > 0: 16 * nv columns), or any. */
TBE_INLINE void tbe_forward_bag(tbe_walk *w, int64_t from, int64_t past, float factor, int64_t at, const int32_t format, const int nv)
{
    if (nv) {
        tbe_forward_panel(w, from, past, factor, at, format, 0, nv, 16, tbe_row_bytes(format, 16 * nv), true);
        return;
    }
    const int64_t bytes = tbe_row_bytes(format, w->t->cols);
    int64_t c = 0;
    for (; c + 16 * TBE_WIDE < w->t->cols; c += 16 * TBE_WIDE)
        tbe_forward_panel(w, from, past, factor, at, format, c, TBE_WIDE, 16, bytes, c == 0);
    const int64_t left = w->t->cols - c, tail = (left - 1) % 16 + 1;
#define TBE_LAST(n) tbe_forward_panel(w, from, past, factor, at, format, c, (n) <= TBE_WIDE ? (n) : 1, tail, bytes, c == 0)
    switch ((left + 15) / 16) {
    case 1: TBE_LAST(1); break;
    case 2: TBE_LAST(2); break;
    case 3: TBE_LAST(3); break;
    case 4: TBE_LAST(4); break;
    case 5: TBE_LAST(5); break;
    case 6: TBE_LAST(6); break;
    case 7: TBE_LAST(7); break;
    default: TBE_LAST(8); break;
    }
#undef TBE_LAST
}

/** Bags [j, stop) of the walk's block; @rows: pooling NONE. */
TBE_INLINE void tbe_forward_bags(tbe_walk *w, int64_t j, int64_t stop, const int32_t format, const int nv, const bool rows)
{
    const peri_k_tbe_forward_args *a = w->a;
    const peri_k_tbe_stream *s = &a->stream;
    const peri_k_tbe_block *b = &s->blocks[w->k];
    for (int64_t from = tbe_bag_start(s, w->k, j), past; j < stop; j++, from = past) {
        past = tbe_bag_start(s, w->k, j + 1);
        if (a->report) tbe_count_bag(s, w->k, j, &w->count);
        if (past < from) past = from;
        float factor = tbe_factor(s, w->t, b->first_bag + j, past - from);
        if (rows)
            for (int64_t i = from; i < past; i++)
                tbe_forward_bag(w, i, i + 1, factor, b->out_offset + i * b->out_stride, format, nv);
        else tbe_forward_bag(w, from, past, factor, b->out_offset + j * b->out_stride, format, nv);
    }
}

/* Blocks of each format: the common widths are known at compile time. */
#define TBE_FORWARD_BLOCK(name, format)                                                                                                   \
    static __attribute__((noinline)) void tbe_forward_##name(tbe_walk *w, int64_t j, int64_t stop)                                        \
    {                                                                                                                                      \
        switch (w->t->pooling == PERI_K_POOLING_NONE ? 0 : w->t->cols) {                                                                   \
        case 0: tbe_forward_bags(w, j, stop, format, 0, true); break;                                                                      \
        case 32: tbe_forward_bags(w, j, stop, format, 2, false); break;                                                                    \
        case 64: tbe_forward_bags(w, j, stop, format, 4, false); break;                                                                    \
        case 128: tbe_forward_bags(w, j, stop, format, TBE_PANEL >= 8 ? 8 : 0, false); break;                                              \
        case 256: tbe_forward_bags(w, j, stop, format, TBE_PANEL >= 16 ? 16 : 0, false); break;                                            \
        default: tbe_forward_bags(w, j, stop, format, 0, false); break;                                                                    \
        }                                                                                                                                  \
    }
TBE_FORWARD_BLOCK(f32, PERI_F32)
TBE_FORWARD_BLOCK(f16, PERI_F16)
TBE_FORWARD_BLOCK(bf16, PERI_BF16)
TBE_FORWARD_BLOCK(int8, PERI_K_ROWS_INT8)
TBE_FORWARD_BLOCK(int8_half, PERI_K_ROWS_INT8_HALF)
TBE_FORWARD_BLOCK(fp8, PERI_K_ROWS_FP8)

/** Bags [j, stop) of block k. */
static void tbe_forward_block(tbe_walk *w, int64_t k, int64_t j, int64_t stop)
{
    const peri_k_tbe_forward_args *a = w->a;
    int64_t unit = tbe_unit(a->weight_dtype);
    w->k = k;
    w->t = &a->stream.tables[a->stream.blocks[k].table];
    w->base = (const char *)a->weight + w->t->offset * unit;
    w->stride = w->t->stride * unit;
    switch (a->weight_dtype) {
    case PERI_F16: tbe_forward_f16(w, j, stop); break;
    case PERI_BF16: tbe_forward_bf16(w, j, stop); break;
    case PERI_K_ROWS_INT8: tbe_forward_int8(w, j, stop); break;
    case PERI_K_ROWS_INT8_HALF: tbe_forward_int8_half(w, j, stop); break;
    case PERI_K_ROWS_FP8: tbe_forward_fp8(w, j, stop); break;
    default: tbe_forward_f32(w, j, stop); break;
    }
}

static void cpu_tbe_forward(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_forward_args *a = args;
    const peri_k_tbe_stream *s = &a->stream;
    tbe_place at = tbe_seek(s, begin, a->chunks), stop = tbe_seek(s, end, a->chunks);
    tbe_walk w = {.a = a};
    if (at.k < s->n_blocks) {
        int64_t first = tbe_bag_start(s, at.k, at.j), last = s->spans[s->n_blocks].items;
        if (stop.k < s->n_blocks) last = s->spans[stop.k].items + tbe_bag_start(s, stop.k, stop.j) - s->spans[stop.k].first_id;
        tbe_ahead_start(&w.ahead, s, a->weight, a->weight_dtype, at.k, first,
                        last - (s->spans[at.k].items + first - s->spans[at.k].first_id));
    }
    for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0)
        tbe_forward_block(&w, at.k, at.j, at.k == stop.k ? stop.j : s->blocks[at.k].bags);
    if (a->report) tbe_count_merge(a->report, &w.count);
}
