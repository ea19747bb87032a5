/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_runs.c: sorted items in runs of equal rows, whose gradients are summed. Two streams of random addresses have to be asked for ahead of
 * time: rows of the gradient (one for each item, mostly in the last-level cache), and rows of the tables with their optimizer state (one
 * for each run of equal rows, in memory).
 */

enum { TBE_GROUP = 256 };

typedef struct tbe_updater {
    const peri_k_tbe_update_args *a;
    int64_t n; /* all sorted items */
    uint64_t payload_mask;
    int64_t ahead;      /* next item to ask for; n: nothing more is asked for */
    bool near;          /* into the first-level cache */
    uint64_t ahead_row; /* linear row of the last one */
    const peri_k_tbe_table *ahead_table;
    int64_t ahead_lines, ahead_weight_lines; /* of a row of f32, and of weights; the latter 0 with kind NONE */
    const float *full[2], *row[2];           /* states to ask for; NULL: none */
    const int64_t *prev;
    float *room;                             /* scratch */
    int64_t runs, next_run;                  /* updated so far; place of the next one among run_values */
} tbe_updater;

/** What sums are multiplied by. */
static inline float tbe_part_of_sums(const peri_k_tbe_update_args *a)
{
    const uint32_t bits = (uint32_t)(127 - a->halvings) << 23;
    float part;
    memcpy(&part, &bits, sizeof part);
    return part;
}

static inline const peri_k_tbe_table *tbe_table_of(const peri_k_tbe_table *t, uint64_t linear)
{
    while (linear >= (uint64_t)(t->first_row + t->rows)) t++;
    return t;
}

/** Where item e's gradient row begins. */
static inline const float *tbe_gradient_row(const tbe_updater *u, int64_t e, float *scale)
{
    uint64_t payload = u->a->sorted[e] & u->payload_mask;
    if (!u->a->items) return u->a->grad + payload;
    *scale = u->a->items[payload].scale;
    return u->a->grad + u->a->items[payload].grad;
}

/** Look ahead into table @t from now on. */
static void tbe_update_enter(tbe_updater *u, const peri_k_tbe_table *t)
{
    int64_t element = tbe_weight_bytes(u->a->rows.weight_dtype);
    u->ahead_table = t;
    u->ahead_lines = (t->cols * 4 + TBE_LINE - 1) / TBE_LINE + (t->stride % (TBE_LINE / 4) != 0);
    u->ahead_weight_lines = 0;
    if (u->a->optimizer.kind == PERI_TBE_NONE) return;
    u->ahead_weight_lines = (t->cols * element + TBE_LINE - 1) / TBE_LINE + (t->stride * element % TBE_LINE != 0);
}

TBE_INLINE void tbe_update_ahead(tbe_updater *u)
{
    enum { ITEMS_AHEAD = 16 };
    const peri_k_tbe_update_args *a = u->a;
    if (u->ahead >= u->n) return;
    float scale;
    if (a->items && u->ahead + ITEMS_AHEAD < u->n)
        _mm_prefetch((const char *)&a->items[a->sorted[u->ahead + ITEMS_AHEAD] & u->payload_mask], _MM_HINT_T0);
    uint64_t linear = a->sorted[u->ahead] >> a->payload_bits;
    const float *g = tbe_gradient_row(u, u->ahead++, &scale);
    if (linear != u->ahead_row) {
        if (linear >= (uint64_t)a->rows.total_rows) return;
        u->ahead_row = linear;
        if (linear >= (uint64_t)(u->ahead_table->first_row + u->ahead_table->rows))
            tbe_update_enter(u, tbe_table_of(u->ahead_table, linear));
        const peri_k_tbe_table *t = u->ahead_table;
        int64_t at = t->offset + ((int64_t)linear - t->first_row) * t->stride, lines = u->ahead_lines;
        tbe_prefetch((const char *)a->rows.weight + at * tbe_weight_bytes(a->rows.weight_dtype), u->ahead_weight_lines, u->near);
        for (int i = 0; i < 2; i++) {
            if (u->full[i]) tbe_prefetch((const char *)(u->full[i] + at), lines, u->near);
            if (u->row[i]) tbe_prefetch((const char *)(u->row[i] + linear), 1, u->near);
        }
        if (u->prev) tbe_prefetch((const char *)(u->prev + linear), 1, u->near);
    }
    tbe_prefetch((const char *)g, u->ahead_lines, u->near);
}

/** Add columns [0, 16 * nv) (with tail > 0: 16 * (nv - 1) + tail) of an item's gradient row to acc, or begin with them. */
TBE_INLINE void tbe_sum_item(const peri_k_tbe_update_args *a, const float *row, float scale, v16 *acc, const int nv, const int64_t tail,
                             const bool begin)
{
    float most = a->optimizer.max_gradient;
    v16 factor = v16_set(scale), limit = v16_set(most);
    for (int v = 0; v < nv; v++) {
        v16 x = tail && v == nv - 1 ? v16_load_part(row + 16 * v, tail) : v16_load(row + 16 * v);
        if (most > 0) x = v16_clamp(x, limit);
        if (begin) acc[v] = a->items ? v16_mul(factor, x) : x;
        else acc[v] = a->items ? v16_fma(factor, x, acc[v]) : v16_add(acc[v], x);
    }
}

/** The sum over items [e, past) of those columns, from column c on, into g, which has room for whole sixteens: a load of what a masked
 *  store wrote waits until that is in the cache, and all that follows with it. */
TBE_INLINE void tbe_sum_panel(tbe_updater *u, int64_t e, int64_t past, int64_t c, float *g, const int nv, const int64_t tail)
{
    float scale = 1;
    v16 acc[TBE_PANEL];
    g += c;
    for (int64_t from = e; from < past; from += TBE_GROUP) {
        int64_t stop = past - from > TBE_GROUP ? from + TBE_GROUP : past;
        if (c == 0) tbe_update_ahead(u);
        const float *row = tbe_gradient_row(u, from, &scale) + c;
        tbe_sum_item(u->a, row, scale, acc, nv, tail, true);
        for (int64_t i = from + 1; i < stop; i++) {
            if (c == 0) tbe_update_ahead(u);
            row = tbe_gradient_row(u, i, &scale) + c;
            tbe_sum_item(u->a, row, scale, acc, nv, tail, false);
        }
        for (int v = 0; v < nv; v++) {
            v16 x = from == e ? acc[v] : v16_add(v16_load(g + 16 * v), acc[v]);
            v16_store(g + 16 * v, x);
        }
    }
}

/** The exact sum of kernels/tbe.h; @room: four rows of f32, which hold two of f64. */
static void tbe_exact(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *g, float *room)
{
    double *largest = (double *)room, *sum = largest + (cols + 15) / 16 * 16;
    float scale = 1, most = u->a->optimizer.max_gradient > 0 ? u->a->optimizer.max_gradient : INFINITY;
    memset(largest, 0, sizeof *largest * (size_t)cols);
    memset(sum, 0, sizeof *sum * (size_t)cols);
    for (int64_t i = e; i < past; i++) {
        tbe_update_ahead(u);
        const float *row = tbe_gradient_row(u, i, &scale);
        for (int64_t d = 0; d < cols; d++) {
            double x = row[d] < -most ? -most : row[d] > most ? most : row[d], t = fabs(x * scale);
            largest[d] = t > largest[d] ? t : largest[d];
        }
    }
    for (int64_t d = 0; d < cols; d++) largest[d] = tbe_exact_big(largest[d], past - e);
    for (int64_t i = e; i < past; i++) {
        const float *row = tbe_gradient_row(u, i, &scale);
        for (int64_t d = 0; d < cols; d++) {
            double x = row[d] < -most ? -most : row[d] > most ? most : row[d];
            sum[d] += (x * scale + largest[d]) - largest[d];
        }
    }
    for (int64_t d = 0; d < cols; d++) g[d] = (float)sum[d];
}

/** The sum over items [e, past) of all columns into @room. */
static __attribute__((noinline)) void tbe_sum_items(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *room)
{
    if (u->a->optimizer.exact) {
        tbe_exact(u, e, past, cols, room, room + (cols + 15) / 16 * 16);
        return;
    }
    int64_t c = 0;
    enum { WIDE = TBE_PANEL > 8 ? 8 : TBE_PANEL };
    for (; c + 16 * WIDE <= cols; c += 16 * WIDE) tbe_sum_panel(u, e, past, c, room, WIDE, 0);
#define TBE_STEP(nv)                                                                                                                       \
    if (WIDE > (nv) && c + 16 * (nv) <= cols) {                                                                                            \
        tbe_sum_panel(u, e, past, c, room, (nv), 0);                                                                                    \
        c += 16 * (nv);                                                                                                                    \
    }
    TBE_STEP(4)
    TBE_STEP(2) TBE_STEP(1)
#undef TBE_STEP
        if (c < cols) tbe_sum_panel(u, e, past, c, room, 1, cols - c);
}

/** That sum, in @room (whole sixteens) or, for a single item as it is, where it lies. */
TBE_INLINE const float *tbe_sum(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *room)
{
    if (past - e == 1 && !u->a->items && !(u->a->optimizer.max_gradient > 0) && u->a->halvings == 0) {
        float scale;
        tbe_update_ahead(u);
        return tbe_gradient_row(u, e, &scale);
    }
    tbe_sum_items(u, e, past, cols, room);
    if (u->a->halvings) {
        const v16 part = v16_set(tbe_part_of_sums(u->a));
        for (int64_t d = 0; d < cols; d += 16) v16_store(room + d, v16_mul(v16_load(room + d), part));
    }
    return room;
}

/** First item behind the run of equal rows that begins at @e. */
TBE_INLINE int64_t tbe_run_end(const tbe_updater *u, int64_t e, uint64_t linear)
{
    for (e++; e < u->n && u->a->sorted[e] >> u->a->payload_bits == linear; e++) {
    }
    return e;
}

/** Does item @e begin a run of table @t? */
TBE_INLINE bool tbe_in_table(const tbe_updater *u, const peri_k_tbe_table *t, int64_t e, int64_t last, uint64_t *linear)
{
    if (e >= last) return false;
    *linear = u->a->sorted[e] >> u->a->payload_bits;
    return *linear - (uint64_t)t->first_row < (uint64_t)t->rows;
}
