/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.c: lookups. A call walks its part of the stream bag by bag, while a second walk, some rows ahead, asks for the rows that
 * come later, across bags, blocks and tables: with random ids a lookup is nothing but waiting for memory.
 */

/** Sixteens of a row that are added up at a time, where the width is not one of the common ones. */
enum { TBE_WIDE = TBE_PANEL < 8 ? TBE_PANEL : 8 };

/** How many bytes the walk ahead keeps in flight: enough to cover the memory's latency, few enough to stay in the cache until used. */
enum { TBE_IN_FLIGHT = 16 << 10, TBE_AHEAD_LEAST = 8, TBE_AHEAD_MOST = 64 };

/** Rows of a call whose caches they run through leave nothing of the output there: it goes past them, and its lines need not be read to be
 *  written. Bytes of rows. */
enum { TBE_STREAM_LEAST = 32 << 20 };

/** The walk ahead: where it is. Kept in registers: copied, never pointed to. */
typedef struct tbe_ahead {
    int64_t left;          /* items up to the end of the call */
    int64_t k;             /* the block in which it is */
    int64_t i, end;        /* its next id, and the end of the block's ids */
    const char *base;      /* row 0 of the block's table */
    int64_t stride, lines; /* bytes from row to row; cache lines that a row may touch */
    uint64_t rows;
    uint32_t at, distance; /* the next item's place in the ring; how far ahead this walk is */
} tbe_ahead;

/** What a walk ahead reads. */
typedef struct tbe_source {
    const peri_k_tbe_stream *s;
    const char *weight;
    const void *ids;
    const float *weights;
    int32_t format;
    bool narrow; /* ids are i32 */
} tbe_source;

TBE_INLINE tbe_source tbe_source_of(const peri_k_tbe_stream *s, const void *weight, int32_t format)
{
    return (tbe_source){s, weight, s->ids, s->weights, format, s->ids_dtype == PERI_I32};
}

/** Enter block k at id i. */
static tbe_ahead tbe_ahead_enter(const tbe_source source, tbe_ahead h, int64_t k, int64_t i)
{
    const peri_k_tbe_stream *s = source.s;
    const peri_k_tbe_table *t = &s->tables[s->blocks[k].table];
    int64_t unit = tbe_unit(source.format);
    h.k = k;
    h.i = i;
    h.end = s->spans[k].first_id + tbe_items(s, k);
    h.base = source.weight + t->offset * unit;
    h.stride = t->stride * unit;
    h.rows = (uint64_t)t->rows;
    uint64_t aligned = (uint64_t)(uintptr_t)h.base | (uint64_t)h.stride | TBE_LINE;
    int64_t before = TBE_LINE - (int64_t)(aligned & -aligned); /* most bytes of a line that lie before a row */
    h.lines = (before + tbe_row_bytes(source.format, t->cols) + TBE_LINE - 1) / TBE_LINE;
    return h;
}

/** Go to the next block that has ids. */
static __attribute__((noinline)) tbe_ahead tbe_ahead_next(const tbe_source source, tbe_ahead h)
{
    const peri_k_tbe_stream *s = source.s;
    while (h.i >= h.end && h.k + 1 < s->n_blocks) h = tbe_ahead_enter(source, h, h.k + 1, s->spans[h.k + 1].first_id);
    return h;
}

/** Which of n neighbouring lines is read k-th. Processors that see neighbouring lines asked for one after the other fetch the lines behind
 *  them too, which with random rows are nobody's: 1.5 times the time of rows of 4 or 8 lines on a Zen 4. Out of order they do not. */
TBE_INLINE int tbe_scattered_line(const int k, const int n)
{
    static const int of8[8] = {2, 6, 5, 7, 3, 0, 4, 1}, of4[4] = {3, 1, 0, 2};
    return n == 4 ? of4[k] : n % 8 == 0 ? k / 8 * 8 + of8[k % 8] : k;
}

TBE_INLINE int64_t tbe_source_id(const tbe_source *source, int64_t i)
{
    return source->narrow ? ((const int32_t *)source->ids)[i] : ((const int64_t *)source->ids)[i];
}

/** Ask for one more row, and put it (NULL: it is no row) into the ring. @lines: what the caller expects it to touch, known at compile
 *  time. */
TBE_INLINE void tbe_ahead_step(tbe_ahead *h, const tbe_source *source, const char **ring, const int lines)
{
    const char **place = &ring[(h->at++ + h->distance) % TBE_AHEAD_MOST];
    *place = NULL;
    if (h->left <= 0) return;
    h->left--;
    if (h->i >= h->end) *h = tbe_ahead_next(*source, *h);
    uint64_t id = (uint64_t)tbe_source_id(source, h->i++);
    if (id >= h->rows) return;
    const char *row = *place = h->base + (int64_t)id * h->stride;
    if (lines && h->lines == lines) {
#pragma GCC unroll 16
        for (int l = 0; l < lines; l++) tbe_prefetch(row + tbe_scattered_line(l, lines) * TBE_LINE, 1);
    } else {
        tbe_prefetch(row, h->lines);
    }
}

/** A walk ahead from a place of the stream, `left` items before the end of the call. */
static tbe_ahead tbe_ahead_start(const tbe_source source, const char **ring, int64_t k, int64_t i, int64_t left)
{
    tbe_ahead h = {.left = left};
    if (left <= 0) return h;
    h = tbe_ahead_enter(source, h, k, i);
    uint32_t distance = (uint32_t)tbe_clamp(TBE_IN_FLIGHT / (h.lines * TBE_LINE), TBE_AHEAD_LEAST, TBE_AHEAD_MOST);
    for (uint32_t n = 0; n < distance; n++) tbe_ahead_step(&h, &source, ring, 0);
    h.at = 0;
    h.distance = distance;
    return h;
}

/** A call's part of the walk, and the block in which it is. */
typedef struct tbe_walk {
    const peri_k_tbe_forward_args *a;
    const peri_k_tbe_table *t;
    const char *base; /* row 0 */
    int64_t stride;   /* bytes */
    int64_t k;
    bool past_caches, stream; /* outputs go past the caches: of the call where they can; of the block */
    tbe_count count;
    tbe_ahead ahead;
    const char *ring[TBE_AHEAD_MOST]; /* the rows asked for, by item; NULL: no row, or beyond the end of the call */
} tbe_walk;

/** The row of id i, which the ring does not have; NULL: it is no row. */
static __attribute__((noinline)) const char *tbe_walk_row(tbe_walk *w, int64_t i)
{
    int64_t id = tbe_id(&w->a->stream, i);
    if ((uint64_t)id < (uint64_t)w->t->rows) return w->base + id * w->stride;
    if (w->a->report) tbe_count_id(&w->a->stream, w->k, i, id, &w->count);
    return NULL;
}

/** Which of a row's @nv sixteens is read k-th. */
TBE_INLINE int tbe_scattered(const int k, const int nv, const int32_t format)
{
    const int each = format == PERI_F32 ? 1 : format == PERI_F16 || format == PERI_BF16 ? 2 : 4; /* sixteens in a line */
    return nv % each ? k : tbe_scattered_line(k / each, nv / each) * each + k % each;
}

/** @n results to element @at of an f16 or bf16 output. */
static __attribute__((noinline)) void tbe_forward_narrow(const tbe_walk *w, int64_t at, const float *x, int64_t n)
{
    uint16_t *out = (uint16_t *)w->a->out + at;
    for (int64_t d = 0; d < n; d += 16) {
        v16 y = n - d >= 16 ? v16_load(x + d) : v16_load_part(x + d, n - d);
        h16_store(out + d, w->a->out_dtype == PERI_F16 ? v16_to_f16(y) : v16_to_bf16(y), n - d);
    }
}

/** Results to element @at. */
TBE_INLINE void tbe_forward_store(const tbe_walk *w, int64_t at, const v16 *acc, const v16 factor, const int nv, const int64_t tail)
{
    float room[16 * TBE_PANEL], *out = w->a->out_dtype == PERI_F32 ? (float *)w->a->out + at : room;
    if (w->stream && tail == 16) {
#pragma GCC unroll 16
        for (int v = 0; v < nv; v++) v16_stream(out + 16 * v, v16_mul(acc[v], factor));
        return;
    }
#pragma GCC unroll 16
    for (int v = 0; v < nv - 1; v++) v16_store(out + 16 * v, v16_mul(acc[v], factor));
    if (tail == 16) v16_store(out + 16 * (nv - 1), v16_mul(acc[nv - 1], factor));
    else v16_store_part(out + 16 * (nv - 1), v16_mul(acc[nv - 1], factor), tail);
    if (out == room) tbe_forward_narrow(w, at, room, 16 * (nv - 1) + tail);
}

/** Columns [c, c + 16 * (nv - 1) + tail) of ids [from, past), pooled, to element @at. @first: look ahead, and count bad ids. */
TBE_INLINE void tbe_forward_panel(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past, float factor, int64_t at,
                                  const int32_t format, int64_t c, const int nv, const int64_t tail, const int lines, const bool first)
{
    const uint64_t rows = (uint64_t)w->t->rows;
    const int64_t cols = w->t->cols;
    const bool scaled = format == PERI_K_ROWS_FP8 && !source->weights; /* fma(1, 2^8 r, acc) is fma(2^8, r, acc) */
    v16 acc[TBE_PANEL], x = v16_set(scaled ? TBE_FP8_SCALE : 1); /* fma(1, r, acc) is acc + r */
#pragma GCC unroll 16
    for (int v = 0; v < nv; v++) acc[v] = v16_zero();
    for (int64_t i = from; i < past; i++) {
        const char *row = NULL;
        if (first) {
            row = w->ring[h->at % TBE_AHEAD_MOST];
            if (!row) row = tbe_walk_row(w, i);
        } else {
            int64_t id = tbe_source_id(source, i);
            if ((uint64_t)id < rows) row = w->base + id * w->stride;
        }
        if (row) {
            if (source->weights) x = v16_set(source->weights[i]);
            tbe_codes codes = tbe_row_codes(row, cols, format);
#pragma GCC unroll 16
            for (int k = 0; k < nv; k++) {
                const int v = tbe_scattered(k, nv, format);
                v16 y = tbe_row_values(&codes, c + 16 * v, v == nv - 1 ? tail : 16, format, scaled);
                acc[v] = v16_fma(x, y, acc[v]);
            }
        }
        if (first) tbe_ahead_step(h, source, w->ring, lines); /* behind the reads: they would wait for the misses that it makes */
    }
    tbe_forward_store(w, at + c, acc, v16_set(factor), nv, tail);
}

/** One bag whose width is known at compile time (nv > 0: 16 * nv columns), or any. */
TBE_INLINE void tbe_forward_bag(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past, float factor, int64_t at,
                                const int32_t format, const int nv)
{
    if (nv) {
        const int lines = (int)(tbe_row_bytes(format, 16 * nv) + TBE_LINE - 1) / TBE_LINE;
        tbe_forward_panel(w, h, source, from, past, factor, at, format, 0, nv, 16, lines, true);
        return;
    }
    int64_t c = 0;
    for (; c + 16 * TBE_WIDE < w->t->cols; c += 16 * TBE_WIDE)
        tbe_forward_panel(w, h, source, from, past, factor, at, format, c, TBE_WIDE, 16, 0, c == 0);
    const int64_t left = w->t->cols - c, tail = (left - 1) % 16 + 1;
#define TBE_LAST(n) tbe_forward_panel(w, h, source, from, past, factor, at, format, c, (n) <= TBE_WIDE ? (n) : 1, tail, 0, c == 0)
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
    const tbe_source source = tbe_source_of(s, a->weight, format);
    tbe_ahead h = w->ahead;
    for (int64_t from = tbe_bag_start(s, w->k, j), past; j < stop; j++, from = past) {
        past = tbe_bag_start(s, w->k, j + 1);
        if (a->report) tbe_count_bag(s, w->k, j, &w->count);
        if (past < from) past = from;
        float factor = tbe_factor(s, w->t, b->first_bag + j, past - from);
        if (rows)
            for (int64_t i = from; i < past; i++)
                tbe_forward_bag(w, &h, &source, i, i + 1, factor, b->out_offset + i * b->out_stride, format, nv);
        else tbe_forward_bag(w, &h, &source, from, past, factor, b->out_offset + j * b->out_stride, format, nv);
    }
    w->ahead = h;
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
    w->stream = w->past_caches && w->t->cols % 16 == 0 && (a->stream.blocks[k].out_offset | a->stream.blocks[k].out_stride) % 16 == 0;
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
    w.past_caches = a->out_dtype == PERI_F32 && (uintptr_t)a->out % TBE_LINE == 0 &&
                    s->spans[s->n_blocks].cost * tbe_unit(a->weight_dtype) >= TBE_STREAM_LEAST;
    if (at.k < s->n_blocks) {
        int64_t first = tbe_bag_start(s, at.k, at.j), last = s->spans[s->n_blocks].items;
        if (stop.k < s->n_blocks) last = s->spans[stop.k].items + tbe_bag_start(s, stop.k, stop.j) - s->spans[stop.k].first_id;
        w.ahead = tbe_ahead_start(tbe_source_of(s, a->weight, a->weight_dtype), w.ring, at.k, first,
                                  last - (s->spans[at.k].items + first - s->spans[at.k].first_id));
    }
    for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0)
        tbe_forward_block(&w, at.k, at.j, at.k == stop.k ? stop.j : s->blocks[at.k].bags);
    if (w.past_caches) _mm_sfence();
    if (a->report) tbe_count_merge(a->report, &w.count);
}
