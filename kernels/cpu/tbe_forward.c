/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.c: lookups. A call walks its part of the list bag by bag, while a second walk, some rows ahead, asks for the rows that
 * come later, across bags, blocks and tables: with random ids a lookup is nothing but waiting for memory.
 */

/** Sixteens of a row that are added up at a time, where the width is not one of the common ones. */
enum { TBE_WIDE = TBE_PANEL < 8 ? TBE_PANEL : 8 };

/** How many rows the walk ahead keeps in flight. The caller says how many bytes: enough to cover the memory's latency, few enough to stay
 *  in the cache until they are used. */
enum { TBE_AHEAD_LEAST = 8, TBE_AHEAD_MOST = 128 };

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
    uint32_t at, mask; /* the next item's place in the ring, and that of the item a ring ahead; the ring's length, a power of two, less 1 */
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

TBE_INLINE tbe_source tbe_source_of(const peri_k_tbe_list *s, const void *weight, int32_t format, const peri_k_tbe_reach *reach)
{
    return (tbe_source){s, weight, s->ids, s->weights, format, s->ids_dtype == PERI_I32, *reach};
}

/** Block k from id i on, `left` items before the end of the call. */
static __attribute__((noinline)) void tbe_ahead_find(const tbe_source *source, int64_t k, int64_t i, int64_t left, tbe_ahead_block *to)
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
static __attribute__((noinline)) void tbe_ahead_find_next(const tbe_source *source, int64_t k, int64_t left, tbe_ahead_block *to)
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

/** Which of n neighbouring lines is read k-th. Processors that see neighbouring lines asked for one after the other fetch the lines behind
 *  them too, which with random rows are nobody's: 1.5 times the time of rows of 4 or 8 lines on a Zen 4. Out of order they do not. */
TBE_INLINE int tbe_scattered_line(const int k, const int n)
{
    static const int of8[8] = {2, 6, 5, 7, 3, 0, 4, 1}, of4[4] = {3, 1, 0, 2}, of3[3] = {2, 0, 1};
    return n == 3 ? of3[k] : n == 4 ? of4[k] : n % 8 == 0 ? k / 8 * 8 + of8[k % 8] : k;
}

/** Cache lines of a row that begins with one. */
#define TBE_LINES(format, cols) ((int)(tbe_row_bytes(format, cols) + TBE_LINE - 1) / TBE_LINE)

TBE_INLINE int64_t tbe_source_id(const tbe_source *source, int64_t i)
{
    return source->narrow ? ((const int32_t *)source->ids)[i] : ((const int64_t *)source->ids)[i];
}

/** Ask for one more row; returns it. NULL: it is no row, or the call has no more. @lines: what the caller expects it to touch, known at
 *  compile time. */
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
TBE_INLINE tbe_ahead tbe_ahead_start(const tbe_source *source, const char **ring, int64_t k, int64_t i, int64_t left, const int lines)
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

/** A call's part of the walk, and the block in which it is. */
typedef struct tbe_walk {
    const peri_k_tbe_forward_args *a;
    const peri_k_tbe_table *t;
    const char *base; /* row 0 */
    int64_t stride;   /* bytes */
    int64_t k;
    bool past_caches, past; /* outputs go past the caches: of the call where they can; of the block */
    tbe_count count;
    const char *ring[TBE_AHEAD_MOST]; /* the rows asked for, by item; NULL: no row, or beyond the end of the call */
} tbe_walk;

/** The row of id i, which the ring does not have; NULL: it is no row. */
static __attribute__((noinline)) const char *tbe_walk_row(tbe_walk *w, int64_t i)
{
    int64_t id = tbe_id(&w->a->list, i);
    if ((uint64_t)id < (uint64_t)w->t->rows) return w->base + id * w->stride;
    if (w->a->report) tbe_count_id(&w->a->list, w->k, i, id, &w->count);
    return NULL;
}

/** Which of a row's @nv sixteens is read k-th. */
TBE_INLINE int tbe_scattered(const int k, const int nv, const int32_t format)
{
    const int each = TBE_LINE / (2 * tbe_bits(format)); /* sixteens in a line */
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
    if (w->past && tail == 16) {
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

/** How a bag is read: the first pass over it counts bad ids; with the walk ahead or without; lines in order or scattered. */
enum { TBE_FIRST = 1, TBE_WALKS = 2, TBE_IN_ORDER = 4 };

/** Columns [c, c + 16 * (nv - 1) + tail) of ids [from, past), pooled, to element @at. @how: best known at compile time. */
TBE_INLINE void tbe_forward_panel(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past, float factor, int64_t at,
                                  const int32_t format, int64_t c, const int nv, const int64_t tail, const int lines, const int how)
{
    const uint64_t rows = (uint64_t)w->t->rows;
    const int64_t cols = w->t->cols;
    const bool scaled = format == PERI_ROWS_FP8 && !source->weights; /* fma(1, 2^8 r, acc) is fma(2^8, r, acc) */
    v16 acc[TBE_PANEL], x = v16_set(scaled ? TBE_FP8_SCALE : 1); /* fma(1, r, acc) is acc + r */
#pragma GCC unroll 16
    for (int v = 0; v < nv; v++) acc[v] = v16_zero();
    for (int64_t i = from; i < past; i++) {
        const char *row = NULL, **place = NULL;
        if (how & TBE_WALKS) {
            place = tbe_ahead_place(h, w->ring);
            row = *place;
        } else {
            int64_t id = tbe_source_id(source, i);
            if ((uint64_t)id < rows) row = w->base + id * w->stride;
        }
        if (how & TBE_FIRST && __builtin_expect(!row, 0)) row = tbe_walk_row(w, i);
        if (row) {
            if (source->weights) x = v16_set(source->weights[i]);
            tbe_codes codes = tbe_row_codes(row, cols, format);
#pragma GCC unroll 16
            for (int k = 0; k < nv; k++) {
                const int v = how & TBE_IN_ORDER ? k : tbe_scattered(k, nv, format);
                v16 y = tbe_row_values(&codes, c + 16 * v, v == nv - 1 ? tail : 16, format, scaled);
                acc[v] = v16_fma(x, y, acc[v]);
            }
        }
        if (how & TBE_WALKS) *place = tbe_ahead_step(h, source, lines); /* behind the reads: they would wait for the misses that it makes */
    }
    tbe_forward_store(w, at + c, acc, v16_set(factor), nv, tail);
}

/** One bag of 16 * nv columns, which are known at compile time, as @how is. */
TBE_INLINE void tbe_forward_common(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past, float factor,
                                   int64_t at, const int32_t format, const int nv, const int how)
{
    const int each = nv < TBE_PANEL ? nv : TBE_PANEL;
    tbe_forward_panel(w, h, source, from, past, factor, at, format, 0, each, 16, TBE_LINES(format, 16 * nv), how | TBE_FIRST);
    for (int v = each; v < nv; v += each)
        tbe_forward_panel(w, h, source, from, past, factor, at, format, 16 * v, each, 16, 0, how & TBE_IN_ORDER);
}

/** One bag of any width. */
TBE_INLINE void tbe_forward_any(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past, float factor, int64_t at,
                                const int32_t format)
{
    const int first = source->reach.ahead > 0 ? TBE_FIRST | TBE_WALKS : TBE_FIRST;
    int64_t c = 0;
    for (; c + 16 * TBE_WIDE < w->t->cols; c += 16 * TBE_WIDE)
        tbe_forward_panel(w, h, source, from, past, factor, at, format, c, TBE_WIDE, 16, 0, c == 0 ? first : 0);
    const int64_t left = w->t->cols - c, tail = (left - 1) % 16 + 1, panels = (left + 15) / 16;
#define TBE_LAST(n)                                                                                                                        \
    if ((n) <= TBE_WIDE && panels == (n))                                                                                                  \
    tbe_forward_panel(w, h, source, from, past, factor, at, format, c, n, tail, 0, c == 0 ? first : 0)
    TBE_LAST(1);
    else TBE_LAST(2);
    else TBE_LAST(3);
    else TBE_LAST(4);
    else TBE_LAST(5);
    else TBE_LAST(6);
    else TBE_LAST(7);
    else TBE_LAST(8);
#undef TBE_LAST
}

/** One bag whose width is known at compile time (nv > 0: 16 * nv columns), or any. */
TBE_INLINE void tbe_forward_bag(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past, float factor, int64_t at,
                                const int32_t format, const int nv)
{
    const bool walks = source->reach.ahead > 0, plain = tbe_bits(format) >= 16; /* the ways of rows of bytes are not worth their code */
    if (!nv || (!plain && !walks)) {
        tbe_forward_any(w, h, source, from, past, factor, at, format);
    } else if (!plain) {
        tbe_forward_common(w, h, source, from, past, factor, at, format, nv, TBE_WALKS);
    } else if (TBE_LINES(format, 16 * nv) > 2 && source->reach.in_order) {
        if (walks) tbe_forward_common(w, h, source, from, past, factor, at, format, nv, TBE_WALKS | TBE_IN_ORDER);
        else tbe_forward_common(w, h, source, from, past, factor, at, format, nv, TBE_IN_ORDER);
    } else {
        if (walks) tbe_forward_common(w, h, source, from, past, factor, at, format, nv, TBE_WALKS);
        else tbe_forward_common(w, h, source, from, past, factor, at, format, nv, 0);
    }
}

/** Bags [j, stop) of the walk's block; @rows: pooling NONE. */
TBE_INLINE void tbe_forward_bags(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t j, int64_t stop, const int32_t format,
                                 const int nv, bool rows)
{
    const peri_k_tbe_list *s = source->s;
    const peri_k_tbe_block *b = &s->blocks[w->k];
    const bool report = w->a->report;
    const int32_t *places = tbe_places(s, b);
    for (int64_t from = tbe_bag_start(s, w->k, j), past; j < stop; j++, from = past) {
        past = tbe_bag_start(s, w->k, j + 1);
        if (report) tbe_count_bag(s, w->k, j, &w->count);
        if (past < from) past = from;
        float factor = tbe_factor(s, w->t, b->first_bag + j, past - from);
        const int64_t step = rows ? 1 : past - from;
        int64_t i = from;
        for (int64_t n = rows ? past - from : 1; n > 0; n--, i += step) /* one place in the code for both: it is long */
            tbe_forward_bag(w, h, source, i, i + step, factor, b->out_offset + (rows ? i : places ? places[j] : j) * b->out_stride, format,
                            nv);
    }
}

/** Enter block k. */
TBE_INLINE void tbe_walk_enter(tbe_walk *w, int64_t k, const int32_t format)
{
    const peri_k_tbe_block *b = &w->a->list.blocks[k];
    w->k = k;
    w->t = &w->a->list.tables[b->table];
    w->base = (const char *)w->a->weight + w->t->offset * tbe_unit(format);
    w->stride = w->t->stride * tbe_unit(format);
    w->past = w->past_caches && w->t->cols % 16 == 0 && (b->out_offset | b->out_stride) % 16 == 0;
}

/** Results of bags [j, stop) of a block without items: most blocks are of that kind where rows lie on many ranks, each of which gets all
 *  bags. Its bags' offsets need no look. */
static __attribute__((noinline)) void tbe_forward_zeros(const peri_k_tbe_forward_args *a, int64_t k, int64_t j, int64_t stop)
{
    const peri_k_tbe_block *b = &a->list.blocks[k];
    const int64_t size = a->out_dtype == PERI_F32 ? 4 : 2, cols = a->list.tables[b->table].cols;
    const int32_t *places = tbe_places(&a->list, b);
    char *out = (char *)a->out + (b->out_offset + j * b->out_stride) * size;
    if (places)
        for (; j < stop; j++) memset((char *)a->out + (b->out_offset + places[j] * b->out_stride) * size, 0, (size_t)(cols * size));
    else if (b->out_stride == cols) memset(out, 0, (size_t)((stop - j) * cols * size));
    else
        for (; j < stop; j++, out += b->out_stride * size) memset(out, 0, (size_t)(cols * size));
}

/** Whether a block's bags are empty and nothing is to be counted: then its results are zeros (times a scale they might not be). */
TBE_INLINE bool tbe_forward_empty(const peri_k_tbe_forward_args *a, int64_t k)
{
    if (a->report || a->list.scale || tbe_items(&a->list, k) != 0) return false;
    return a->list.tables[a->list.blocks[k].table].pooling != PERI_POOLING_NONE;
}

/** A call's bags, from @at up to @stop. The common widths are known at compile time. */
TBE_INLINE void tbe_forward_walk(tbe_walk *w, tbe_place at, tbe_place stop, const int32_t format)
{
    const peri_k_tbe_list *s = &w->a->list;
    if (at.k >= s->n_blocks) return;
    const tbe_source source = tbe_source_of(s, w->a->weight, format, &w->a->reach);
    int64_t first = tbe_bag_start(s, at.k, at.j), last = s->spans[s->n_blocks].items;
    if (stop.k < s->n_blocks) last = s->spans[stop.k].items + tbe_bag_start(s, stop.k, stop.j) - s->spans[stop.k].first_id;
    tbe_ahead h = {.at = 0};
    if (source.reach.ahead > 0)
        h = tbe_ahead_start(&source, w->ring, at.k, first, last - (s->spans[at.k].items + first - s->spans[at.k].first_id),
                            TBE_LINES(format, 64));
    for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0) {
        int64_t past = at.k == stop.k ? stop.j : s->blocks[at.k].bags;
        if (tbe_forward_empty(w->a, at.k)) {
            tbe_forward_zeros(w->a, at.k, at.j, past);
            continue;
        }
        tbe_walk_enter(w, at.k, format);
        const bool rows = w->t->pooling == PERI_POOLING_NONE;
        const int64_t cols = w->t->cols;
        if (cols == 32) tbe_forward_bags(w, &h, &source, at.j, past, format, 2, rows);
        else if (cols == 64) tbe_forward_bags(w, &h, &source, at.j, past, format, 4, rows);
        else if (cols == 128) tbe_forward_bags(w, &h, &source, at.j, past, format, 8, rows);
        else if (cols == 256) tbe_forward_bags(w, &h, &source, at.j, past, format, 16, rows);
        else tbe_forward_bags(w, &h, &source, at.j, past, format, 0, rows);
    }
}

#define TBE_FORWARD_WALK(name, format)                                                                                                    \
    static __attribute__((noinline)) void tbe_forward_##name(tbe_walk *w, tbe_place at, tbe_place stop)                                    \
    {                                                                                                                                      \
        tbe_forward_walk(w, at, stop, format);                                                                                             \
    }
TBE_FORWARD_WALK(f32, PERI_F32)
TBE_FORWARD_WALK(f16, PERI_F16)
TBE_FORWARD_WALK(bf16, PERI_BF16)
TBE_FORWARD_WALK(int8, PERI_ROWS_INT8)
TBE_FORWARD_WALK(int8_half, PERI_ROWS_INT8_HALF)
TBE_FORWARD_WALK(fp8, PERI_ROWS_FP8)
TBE_FORWARD_WALK(int4, PERI_ROWS_INT4)
TBE_FORWARD_WALK(int2, PERI_ROWS_INT2)

static void cpu_tbe_forward(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_forward_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    tbe_place at = tbe_seek(s, begin, a->chunks), stop = tbe_seek(s, end, a->chunks);
    tbe_walk w = {.a = a};
    w.past_caches = a->out_dtype == PERI_F32 && (uintptr_t)a->out % TBE_LINE == 0 && a->reach.past > 0 &&
                    s->spans[s->n_blocks].cost * tbe_unit(a->weight_dtype) >= a->reach.past;
    switch (a->weight_dtype) {
    case PERI_F16: tbe_forward_f16(&w, at, stop); break;
    case PERI_BF16: tbe_forward_bf16(&w, at, stop); break;
    case PERI_ROWS_INT8: tbe_forward_int8(&w, at, stop); break;
    case PERI_ROWS_INT8_HALF: tbe_forward_int8_half(&w, at, stop); break;
    case PERI_ROWS_FP8: tbe_forward_fp8(&w, at, stop); break;
    case PERI_ROWS_INT4: tbe_forward_int4(&w, at, stop); break;
    case PERI_ROWS_INT2: tbe_forward_int2(&w, at, stop); break;
    default: tbe_forward_f32(&w, at, stop); break;
    }
    if (w.past_caches) _mm_sfence();
    if (a->report) tbe_count_merge(a->report, &w.count);
}
