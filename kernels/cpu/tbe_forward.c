/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.c: lookups in rows of one format: see tbe_forward.h.
 */

/** The format of the rows. It is a constant of the file and not an argument, so that the compiler drops the code for
 *  other formats before it inlines functions into each other, not after: a tenth of the time that a piece takes. */
#define TBE_FORMAT ((int32_t)K_CAT(TBE_FORMAT_, K_PIECE, ))

/** Sixteens of a row that are added up at a time, where the width is not one of the common ones. */
enum { TBE_WIDE = TBE_PANEL < 8 ? TBE_PANEL : 8 };

/** The row of id i, which the ring does not have; NULL: it is no row. */
static __attribute__((noinline)) const char *tbe_walk_row(tbe_walk *w, int64_t i)
{
    int64_t id = tbe_id(&w->a->list, i);
    if ((uint64_t)id < (uint64_t)w->t->rows) return w->base + id * w->stride;
    if (w->a->report) tbe_count_id(&w->a->list, w->k, i, id, &w->count);
    return NULL;
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
TBE_INLINE void tbe_forward_store(const tbe_walk *w, int64_t at, const v16 *acc, const v16 factor, const int nv,
                                  const int64_t tail)
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

/** How a bag is read: the first pass over it counts bad ids; with the walk ahead or without; lines in order or
 *  scattered. */
enum { TBE_FIRST = 1, TBE_WALKS = 2, TBE_IN_ORDER = 4 };

/** Columns [c, c + 16 * (nv - 1) + tail) of ids [from, past), pooled, to element @at. @how: best known at compile
 *  time. */
TBE_INLINE void tbe_forward_panel(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past,
                                  float factor, int64_t at, int64_t c, const int nv, const int64_t tail,
                                  const int lines, const int how)
{
    const uint64_t rows = (uint64_t)w->t->rows;
    const int64_t cols = w->t->cols;
    const bool scaled = TBE_FORMAT == PERI_ROWS_FP8 && !source->weights; /* fma(1, 2^8 r, acc) is fma(2^8, r, acc) */
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
            tbe_codes codes = tbe_row_codes(row, cols, TBE_FORMAT);
#pragma GCC unroll 16
            for (int k = 0; k < nv; k++) {
                const int v = how & TBE_IN_ORDER ? k : tbe_scattered(k, nv, TBE_FORMAT);
                v16 y = tbe_row_values(&codes, c + 16 * v, v == nv - 1 ? tail : 16, TBE_FORMAT, scaled);
                acc[v] = v16_fma(x, y, acc[v]);
            }
        }
        /* behind the reads: they would wait for the misses that it makes */
        if (how & TBE_WALKS) *place = tbe_ahead_step(h, source, lines);
    }
    tbe_forward_store(w, at + c, acc, v16_set(factor), nv, tail);
}

/** One bag of 16 * nv columns, which are known at compile time, as @how is. */
TBE_INLINE void tbe_forward_common(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past,
                                   float factor, int64_t at, const int nv, const int how)
{
    const int each = nv < TBE_PANEL ? nv : TBE_PANEL;
    tbe_forward_panel(w, h, source, from, past, factor, at, 0, each, 16, TBE_LINES(TBE_FORMAT, 16 * nv),
                      how | TBE_FIRST);
    for (int v = each; v < nv; v += each)
        tbe_forward_panel(w, h, source, from, past, factor, at, 16 * v, each, 16, 0, how & TBE_IN_ORDER);
}

/** Sixteens of @panels, one of 1..TBE_WIDE, from column @c on. @how: known at compile time. */
TBE_INLINE void tbe_forward_end(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past,
                                float factor, int64_t at, int64_t c, const int how)
{
    const int64_t left = w->t->cols - c, tail = (left - 1) % 16 + 1, panels = (left + 15) / 16;
#define TBE_LAST(n)                                                                                                    \
    if ((n) <= TBE_WIDE && panels == (n)) tbe_forward_panel(w, h, source, from, past, factor, at, c, n, tail, 0, how)
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

/** The columns of one bag behind the first 16 * TBE_WIDE: its ids have been counted, and its rows asked for. */
static __attribute__((noinline)) void tbe_forward_rest(tbe_walk *w, const tbe_source *source, int64_t from,
                                                       int64_t past, float factor, int64_t at)
{
    int64_t c = 16 * TBE_WIDE;
    for (; c + 16 * TBE_WIDE < w->t->cols; c += 16 * TBE_WIDE)
        tbe_forward_panel(w, NULL, source, from, past, factor, at, c, TBE_WIDE, 16, 0, 0);
    tbe_forward_end(w, NULL, source, from, past, factor, at, c, 0);
}

/** One bag of any width. @first: how its first columns are read. */
TBE_INLINE void tbe_forward_any(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past,
                                float factor, int64_t at, const int first)
{
    if (w->t->cols <= 16 * TBE_WIDE) {
        tbe_forward_end(w, h, source, from, past, factor, at, 0, first);
    } else {
        tbe_forward_panel(w, h, source, from, past, factor, at, 0, TBE_WIDE, 16, 0, first);
        tbe_forward_rest(w, source, from, past, factor, at);
    }
}

/** What a function knows of its bags when it is compiled, in the place of a number of sixteens: that the walk ahead
 *  goes with it; that it is without one. */
enum { TBE_NV_WALKS = 0, TBE_NV_STAYS = -1 };

/** One bag of 16 * nv columns, or of TBE_NV_*. Rows of bytes have the walk ahead here unless nv is TBE_NV_STAYS. */
TBE_INLINE void tbe_forward_bag(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t from, int64_t past,
                                float factor, int64_t at, const int nv)
{
    const bool bytes = tbe_bits(TBE_FORMAT) < 16, walks = bytes || source->reach.ahead > 0;
    if (nv == TBE_NV_STAYS) {
        tbe_forward_any(w, h, source, from, past, factor, at, TBE_FIRST);
    } else if (nv == TBE_NV_WALKS) {
        tbe_forward_any(w, h, source, from, past, factor, at, TBE_FIRST | TBE_WALKS);
    } else if (bytes) {
        tbe_forward_common(w, h, source, from, past, factor, at, nv, TBE_WALKS);
    } else if (TBE_LINES(TBE_FORMAT, 16 * nv) > 2 && source->reach.in_order) {
        if (walks) tbe_forward_common(w, h, source, from, past, factor, at, nv, TBE_WALKS | TBE_IN_ORDER);
        else tbe_forward_common(w, h, source, from, past, factor, at, nv, TBE_IN_ORDER);
    } else {
        if (walks) tbe_forward_common(w, h, source, from, past, factor, at, nv, TBE_WALKS);
        else tbe_forward_common(w, h, source, from, past, factor, at, nv, 0);
    }
}

/** Bags [j, stop) of the walk's block; @rows: pooling NONE. */
TBE_INLINE void tbe_forward_bags(tbe_walk *w, tbe_ahead *h, const tbe_source *source, int64_t j, int64_t stop,
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
            tbe_forward_bag(w, h, source, i, i + step, factor,
                            b->out_offset + (rows     ? i
                                             : places ? places[j]
                                                      : j) *
                                                b->out_stride,
                            nv);
    }
}

/** Enter block k. */
TBE_INLINE void tbe_walk_enter(tbe_walk *w, int64_t k)
{
    const peri_k_tbe_block *b = &w->a->list.blocks[k];
    w->k = k;
    w->t = &w->a->list.tables[b->table];
    w->base = (const char *)w->a->weight + w->t->offset * tbe_unit(TBE_FORMAT);
    w->stride = w->t->stride * tbe_unit(TBE_FORMAT);
    w->past = w->past_caches && w->t->cols % 16 == 0 && (b->out_offset | b->out_stride) % 16 == 0;
}

/** Results of bags [j, stop) of a block without items: most blocks are of that kind where rows lie on many ranks, each
 *  of which gets all bags. Its bags' offsets need no look. */
static __attribute__((noinline)) void tbe_forward_zeros(const peri_k_tbe_forward_args *a, int64_t k, int64_t j,
                                                        int64_t stop)
{
    const peri_k_tbe_block *b = &a->list.blocks[k];
    const int64_t size = a->out_dtype == PERI_F32 ? 4 : 2, cols = a->list.tables[b->table].cols;
    const int32_t *places = tbe_places(&a->list, b);
    char *out = (char *)a->out + (b->out_offset + j * b->out_stride) * size;
    if (places)
        for (; j < stop; j++)
            memset((char *)a->out + (b->out_offset + places[j] * b->out_stride) * size, 0, (size_t)(cols * size));
    else if (b->out_stride == cols) memset(out, 0, (size_t)((stop - j) * cols * size));
    else
        for (; j < stop; j++, out += b->out_stride * size) memset(out, 0, (size_t)(cols * size));
}

/** Whether a block's bags are empty and nothing is to be counted: then its results are zeros (times a scale they might
 *  not be). */
TBE_INLINE bool tbe_forward_empty(const peri_k_tbe_forward_args *a, int64_t k)
{
    if (a->report || a->list.scale || tbe_items(&a->list, k) != 0) return false;
    return a->list.tables[a->list.blocks[k].table].pooling != PERI_POOLING_NONE;
}

/** Whether tbe_forward_blocks of @nv is the one for tables of @cols columns. Rows of bytes without the walk ahead have
 *  one for all widths. */
TBE_INLINE bool tbe_forward_takes(int64_t cols, const int nv)
{
    if (nv > 0) return cols == 16 * nv;
    if (nv == TBE_NV_STAYS && tbe_bits(TBE_FORMAT) < 16) return true;
#define TBE_OTHER(_, width) &&cols != (width)
    return true PERI_TBE_WIDTHS(TBE_OTHER, );
#undef TBE_OTHER
}

/** A call's bags from @at on, up to @stop or to the first block that has ids and is for another function; returns where
 *  that is. */
TBE_INLINE tbe_place tbe_forward_blocks(tbe_walk *w, tbe_ahead *ahead, tbe_place at, tbe_place stop, const int nv)
{
    const peri_k_tbe_list *s = &w->a->list;
    const tbe_source source = tbe_source_of(s, w->a->weight, TBE_FORMAT, &w->a->reach);
    tbe_ahead h = *ahead;
    for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0) {
        int64_t past = at.k == stop.k ? stop.j : s->blocks[at.k].bags;
        if (tbe_forward_empty(w->a, at.k)) {
            tbe_forward_zeros(w->a, at.k, at.j, past);
            continue;
        }
        tbe_walk_enter(w, at.k);
        if (!tbe_forward_takes(w->t->cols, nv)) break;
        tbe_forward_bags(w, &h, &source, at.j, past, nv, w->t->pooling == PERI_POOLING_NONE);
    }
    *ahead = h;
    return at;
}

/** A function for each common width and two for all others. gcc takes half as long to compile them as to compile one
 *  that has everything in it; because they go from block to block themselves, a block costs no call. Their names have
 *  the piece in them, for sources that are compiled as one file (`make amalgamation`). */
#define TBE_NAME(name) K_SHARED(K_CAT(tbe_forward_, K_PIECE, _##name))
#define TBE_FUNCTION(name, nv)                                                                                         \
    static __attribute__((noinline)) tbe_place TBE_NAME(name)(tbe_walk *w, tbe_ahead *h, tbe_place at, tbe_place stop) \
    {                                                                                                                  \
        return tbe_forward_blocks(w, h, at, stop, nv);                                                                 \
    }
#define TBE_FUNCTION_OF(_, width) TBE_FUNCTION(width, (width) / 16)
PERI_TBE_WIDTHS(TBE_FUNCTION_OF, )
TBE_FUNCTION(walks, TBE_NV_WALKS)
TBE_FUNCTION(stays, TBE_NV_STAYS)
#undef TBE_FUNCTION_OF
#undef TBE_FUNCTION

/** A call's bags, from @at up to @stop. The common widths are known at compile time. */
void K_SHARED(K_CAT(tbe_forward_, K_PIECE, ))(tbe_walk *w, tbe_place at, tbe_place stop)
{
    const peri_k_tbe_list *s = &w->a->list;
    if (at.k >= s->n_blocks) return;
    const tbe_source source = tbe_source_of(s, w->a->weight, TBE_FORMAT, &w->a->reach);
    int64_t first = tbe_bag_start(s, at.k, at.j), last = s->spans[s->n_blocks].items;
    if (stop.k < s->n_blocks)
        last = s->spans[stop.k].items + tbe_bag_start(s, stop.k, stop.j) - s->spans[stop.k].first_id;
    tbe_ahead h = {.at = 0};
    if (source.reach.ahead > 0)
        h = tbe_ahead_start(&source, w->ring, at.k, first,
                            last - (s->spans[at.k].items + first - s->spans[at.k].first_id), TBE_LINES(TBE_FORMAT, 64));
    const bool stays = source.reach.ahead <= 0;
    while (at.k < stop.k || (at.k == stop.k && at.j < stop.j)) {
        int64_t cols = s->tables[s->blocks[at.k].table].cols;
        switch (stays && tbe_bits(TBE_FORMAT) < 16 ? 0 : cols) {
#define TBE_CASE(_, width) \
    case width: at = TBE_NAME(width)(w, &h, at, stop); break;
            PERI_TBE_WIDTHS(TBE_CASE, )
#undef TBE_CASE
        default: at = stays ? TBE_NAME(stays)(w, &h, at, stop) : TBE_NAME(walks)(w, &h, at, stop);
        }
    }
}
