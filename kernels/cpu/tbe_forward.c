/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.c: pooled lookups. A call walks its part of the stream bag by bag, while a second walk, some rows ahead, asks for the rows
 * that come later, across bags, blocks and tables: with random ids a lookup is nothing but waiting for memory.
 */

/** The walk ahead. */
typedef struct tbe_ahead {
    const peri_k_tbe_stream *s;
    const char *weight;
    int64_t element;  /* bytes of a weight */
    int64_t left;     /* items up to the end of the call */
    int64_t k;        /* the block in which it is */
    int64_t i, end;   /* its next id, and the end of the block's ids */
    const char *base; /* row 0 of the block's table */
    int64_t row_bytes, lines;
    uint64_t rows;
} tbe_ahead;

/** Enter block k at id i. */
static void tbe_ahead_enter(tbe_ahead *h, int64_t k, int64_t i)
{
    const peri_k_tbe_table *t = &h->s->tables[h->s->blocks[k].table];
    h->k = k;
    h->i = i;
    h->end = h->s->spans[k].first_id + tbe_items(h->s, k);
    h->base = h->weight + t->offset * h->element;
    h->row_bytes = t->stride * h->element;
    h->lines = (t->cols * h->element + TBE_LINE - 1) / TBE_LINE + (h->row_bytes % TBE_LINE != 0); /* rows may lie across lines */
    h->rows = (uint64_t)t->rows;
}

/** Go to the next block that has ids. */
static __attribute__((noinline)) void tbe_ahead_next(tbe_ahead *h)
{
    while (h->i >= h->end && h->k + 1 < h->s->n_blocks) tbe_ahead_enter(h, h->k + 1, h->s->spans[h->k + 1].first_id);
}

/** Ask for one more row. @lines: what the caller expects it to be, known at compile time where it can be. */
TBE_INLINE void tbe_ahead_step(tbe_ahead *h, int64_t lines)
{
    if (h->left <= 0) return;
    h->left--;
    if (h->i >= h->end) tbe_ahead_next(h);
    uint64_t id = (uint64_t)tbe_id(h->s, h->i++);
    if (id >= h->rows) return;
    const char *row = h->base + (int64_t)id * h->row_bytes;
    if (h->lines == lines) tbe_prefetch(row, lines);
    else tbe_prefetch(row, h->lines);
}

/** Rows ahead: enough bytes in flight to cover the memory's latency, and few enough to stay in the cache until they are used. */
static int64_t tbe_distance(int64_t row_bytes)
{
    enum { IN_FLIGHT = 12 << 10, LEAST = 8, MOST = 64 };
    return tbe_clamp(IN_FLIGHT / (row_bytes > 0 ? row_bytes : 1), LEAST, MOST);
}

/** Start @h at a place of the stream, `left` items before the end of the call. */
static void tbe_ahead_start(tbe_ahead *h, const peri_k_tbe_stream *s, const void *weight, int64_t element, int64_t k, int64_t i,
                            int64_t left)
{
    *h = (tbe_ahead){.s = s, .weight = weight, .element = element, .left = left};
    if (left <= 0) return;
    tbe_ahead_enter(h, k, i);
    int64_t distance = tbe_distance(h->row_bytes);
    for (int64_t n = 0; n < distance; n++) tbe_ahead_step(h, 0);
}

/** A call's part of the walk. */
typedef struct tbe_walk {
    const peri_k_tbe_forward_args *a;
    tbe_ahead ahead;
    tbe_count count;
} tbe_walk;

static __attribute__((noinline)) void tbe_walk_bad_id(tbe_walk *w, int64_t k, int64_t i, int64_t id)
{
    if (w->a->report) tbe_count_id(&w->a->stream, k, i, id, &w->count);
}

/** Columns [0, 16 * nv) of one bag, or, with tail > 0, of 16 * (nv - 1) + tail columns. Looks ahead and counts bad ids if `first`. */
TBE_INLINE void tbe_forward_panel(tbe_walk *w, int64_t k, const peri_k_tbe_table *t, const float *weight, int64_t from, int64_t past,
                                  float factor, float *out, const int nv, const int64_t tail, const bool weighted, const bool first)
{
    const peri_k_tbe_stream *s = &w->a->stream;
    v16 acc[TBE_PANEL];
    for (int v = 0; v < nv; v++) acc[v] = v16_zero();
    for (int64_t i = from; i < past; i++) {
        if (first) tbe_ahead_step(&w->ahead, nv);
        int64_t id = tbe_id(s, i);
        if ((uint64_t)id >= (uint64_t)t->rows) {
            if (first) tbe_walk_bad_id(w, k, i, id);
            continue;
        }
        const float *row = weight + id * t->stride;
        v16 x = weighted ? v16_set(s->weights[i]) : v16_zero();
        for (int v = 0; v < nv; v++) {
            v16 r = tail && v == nv - 1 ? v16_load_part(row + 16 * v, tail) : v16_load(row + 16 * v);
            acc[v] = weighted ? v16_fma(x, r, acc[v]) : v16_add(acc[v], r);
        }
    }
    v16 f = v16_set(factor);
    for (int v = 0; v < nv; v++) {
        if (tail && v == nv - 1) v16_store_part(out + 16 * v, v16_mul(acc[v], f), tail);
        else v16_store(out + 16 * v, v16_mul(acc[v], f));
    }
}

/** One bag of any width: panels of as many columns as fit into registers. */
TBE_INLINE void tbe_forward_wide(tbe_walk *w, int64_t k, const peri_k_tbe_table *t, const float *weight, int64_t from, int64_t past,
                                 float factor, float *out, const bool weighted)
{
    int64_t c = 0;
    for (; c + 16 * TBE_PANEL <= t->cols; c += 16 * TBE_PANEL) {
        if (c == 0) tbe_forward_panel(w, k, t, weight, from, past, factor, out, TBE_PANEL, 0, weighted, true);
        else tbe_forward_panel(w, k, t, weight + c, from, past, factor, out + c, TBE_PANEL, 0, weighted, false);
    }
#define TBE_STEP(nv)                                                                                                                       \
    if (TBE_PANEL > (nv) && c + 16 * (nv) <= t->cols) {                                                                                    \
        tbe_forward_panel(w, k, t, weight + c, from, past, factor, out + c, (nv), 0, weighted, c == 0);                                    \
        c += 16 * (nv);                                                                                                                    \
    }
    TBE_STEP(8)
    TBE_STEP(4) TBE_STEP(2) TBE_STEP(1)
#undef TBE_STEP
        if (c < t->cols) tbe_forward_panel(w, k, t, weight + c, from, past, factor, out + c, 1, t->cols - c, weighted, c == 0);
}

/** Bags [j, stop) of block k. nv: cols / 16 where that is whole and fits into registers, else 0. */
TBE_INLINE void tbe_forward_bags(tbe_walk *w, int64_t k, int64_t j, int64_t stop, const int nv, const bool weighted)
{
    const peri_k_tbe_forward_args *a = w->a;
    const peri_k_tbe_stream *s = &a->stream;
    const peri_k_tbe_block *b = &s->blocks[k];
    const peri_k_tbe_table *t = &s->tables[b->table];
    const float *weight = (const float *)a->weight + t->offset;
    for (int64_t from = tbe_bag_start(s, k, j), past; j < stop; j++, from = past) {
        past = tbe_bag_start(s, k, j + 1);
        if (a->report) tbe_count_bag(s, k, j, &w->count);
        if (past < from) past = from;
        float factor = tbe_factor(s, t, b->first_bag + j, past - from), *out = a->out + b->out_offset + j * b->out_stride;
        if (nv) tbe_forward_panel(w, k, t, weight, from, past, factor, out, nv, 0, weighted, true);
        else tbe_forward_wide(w, k, t, weight, from, past, factor, out, weighted);
    }
}

static void tbe_forward_block(tbe_walk *w, int64_t k, int64_t j, int64_t stop)
{
    const peri_k_tbe_stream *s = &w->a->stream;
    int64_t cols = s->tables[s->blocks[k].table].cols;
    if (s->weights) {
        switch (cols) {
        case 16: tbe_forward_bags(w, k, j, stop, 1, true); break;
        case 32: tbe_forward_bags(w, k, j, stop, 2, true); break;
        case 64: tbe_forward_bags(w, k, j, stop, 4, true); break;
        case 128: tbe_forward_bags(w, k, j, stop, TBE_PANEL >= 8 ? 8 : 0, true); break;
        default: tbe_forward_bags(w, k, j, stop, 0, true); break;
        }
    } else {
        switch (cols) {
        case 16: tbe_forward_bags(w, k, j, stop, 1, false); break;
        case 32: tbe_forward_bags(w, k, j, stop, 2, false); break;
        case 48: tbe_forward_bags(w, k, j, stop, 3, false); break;
        case 64: tbe_forward_bags(w, k, j, stop, 4, false); break;
        case 96: tbe_forward_bags(w, k, j, stop, TBE_PANEL >= 6 ? 6 : 0, false); break;
        case 128: tbe_forward_bags(w, k, j, stop, TBE_PANEL >= 8 ? 8 : 0, false); break;
        case 192: tbe_forward_bags(w, k, j, stop, TBE_PANEL >= 12 ? 12 : 0, false); break;
        case 256: tbe_forward_bags(w, k, j, stop, TBE_PANEL >= 16 ? 16 : 0, false); break;
        default: tbe_forward_bags(w, k, j, stop, 0, false); break;
        }
    }
}

static void cpu_tbe_forward(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_forward_args *a = args;
    const peri_k_tbe_stream *s = &a->stream;
    if (a->weight_dtype != PERI_F32) {
        ref_tbe_forward(args, begin, end);
        return;
    }
    tbe_place at = tbe_seek(s, begin, a->chunks), stop = tbe_seek(s, end, a->chunks);
    tbe_walk w = {.a = a};
    if (at.k < s->n_blocks) {
        int64_t first = tbe_bag_start(s, at.k, at.j), last = s->spans[s->n_blocks].items;
        if (stop.k < s->n_blocks) last = s->spans[stop.k].items + tbe_bag_start(s, stop.k, stop.j) - s->spans[stop.k].first_id;
        tbe_ahead_start(&w.ahead, s, a->weight, 4, at.k, first, last - (s->spans[at.k].items + first - s->spans[at.k].first_id));
    }
    for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0)
        tbe_forward_block(&w, at.k, at.j, at.k == stop.k ? stop.j : s->blocks[at.k].bags);
    if (a->report) tbe_count_merge(a->report, &w.count);
}
