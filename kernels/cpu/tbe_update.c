/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.c: the backward pass over sorted items: sum each row's gradient, update the row. Two streams of random addresses have to be
 * asked for ahead of time: rows of the gradient (one for each item, mostly in the last-level cache), and rows of the tables with their
 * optimizer state (one for each run of equal rows, in memory).
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

/** The sum over items [e, past) of those columns, from column c on, into g. */
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
            bool part = tail && v == nv - 1;
            v16 x = from == e ? acc[v] : v16_add(part ? v16_load_part(g + 16 * v, tail) : v16_load(g + 16 * v), acc[v]);
            if (part) v16_store_part(g + 16 * v, x, tail);
            else v16_store(g + 16 * v, x);
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

/** That sum, in @room or, for a single item as it is, where it lies. */
TBE_INLINE const float *tbe_sum(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *room)
{
    if (past - e == 1 && !u->a->items && !(u->a->optimizer.max_gradient > 0)) {
        float scale;
        tbe_update_ahead(u);
        return tbe_gradient_row(u, e, &scale);
    }
    tbe_sum_items(u, e, past, cols, room);
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

#include "tbe_batch.c"

/** Update the rows of table @t whose runs begin in [e, last); returns the first item of another table, or of none. */
TBE_INLINE int64_t tbe_update_table(tbe_updater *u, const peri_k_tbe_table *t, int64_t e, int64_t last, const int kind)
{
    const peri_k_tbe_update_args *a = u->a;
    uint64_t linear;
    for (int64_t past; tbe_in_table(u, t, e, last, &linear); e = past, u->runs++) {
        past = tbe_run_end(u, e, linear);
        int64_t row = (int64_t)linear - t->first_row;
        const float *g = tbe_sum(u, e, past, t->cols, u->room);
        if (kind == PERI_TBE_NONE && a->run_values) {
            memcpy(a->run_values + u->next_run * a->run_stride, g, sizeof *g * (size_t)t->cols);
            a->run_rows[u->next_run++] = (int64_t)linear;
        } else if (kind == PERI_TBE_NONE) {
            memcpy(a->dense + t->offset + row * t->stride, g, sizeof *g * (size_t)t->cols);
            a->touched[linear] = 1;
        } else {
            tbe_row(&a->rows, &a->optimizer, t, row, g, u->room + (t->cols + 15) / 16 * 16, kind);
        }
    }
    return e;
}

TBE_INLINE void tbe_update_runs(const peri_k_tbe_update_args *a, int64_t begin, int64_t end, const int kind)
{
    tbe_updater u = {.a = a, .n = *a->n, .payload_mask = ((uint64_t)1 << a->payload_bits) - 1, .near = a->reach.near,
                     .ahead_row = UINT64_MAX};
    int64_t e = tbe_part(u.n, begin, a->chunks), last = tbe_part(u.n, end, a->chunks);
    if (e > 0) /* the run that lies across the begin belongs to an earlier chunk */
        while (e < last && a->sorted[e] >> a->payload_bits == a->sorted[e - 1] >> a->payload_bits) e++;
    if (e >= last) return;
    const peri_k_tbe_table *t = a->rows.tables;
    u.next_run = kind == PERI_TBE_NONE && a->run_values ? a->run_starts[begin] : 0;
    u.room = a->scratch + begin * a->scratch_stride;
    u.ahead = a->reach.ahead > 0 ? e : u.n;
    if (tbe_has_full1(kind)) u.full[0] = a->rows.momentum1;
    if (tbe_has_full2(kind)) u.full[1] = a->rows.momentum2;
    if (tbe_has_row1(kind)) u.row[0] = a->rows.momentum1;
    if (tbe_has_row2(kind)) u.row[1] = a->rows.momentum2;
    if (kind == PERI_TBE_ROWWISE_RMSPROP_AR) {
        u.row[1] = a->rows.row_counter;
        u.prev = a->rows.prev_iter;
    }
    tbe_update_enter(&u, t);
    for (int64_t i = 0; i < a->reach.ahead; i++) tbe_update_ahead(&u);
    while (e < last) {
        uint64_t linear = a->sorted[e] >> a->payload_bits;
        if (linear >= (uint64_t)a->rows.total_rows) {
            e++;
            tbe_update_ahead(&u);
            continue;
        }
        t = tbe_table_of(t, linear);
        tbe_batches *batches = kind == PERI_TBE_SGD || kind == PERI_TBE_ROWWISE_ADAGRAD ? tbe_batches_of(a, t) : NULL;
        e = batches ? batches(&u, t, e, last) : tbe_update_table(&u, t, e, last, kind);
    }
    __atomic_fetch_add(a->updated, u.runs, __ATOMIC_RELAXED);
}

/** Whose function updates the rows. */
static int32_t tbe_function_of(int32_t kind)
{
    return kind == PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER ? PERI_TBE_ROWWISE_RMSPROP_AR : kind;
}

/* One function each: every optimizer gets registers of its own. */
#define X(kind)                                                                                                                            \
    static __attribute__((noinline)) void tbe_update_##kind(const peri_k_tbe_update_args *a, int64_t begin, int64_t end)                   \
    {                                                                                                                                      \
        tbe_update_runs(a, begin, end, PERI_TBE_##kind);                                                                               \
    }
TBE_OPTIMIZERS(X) X(NONE)
#undef X

static void cpu_tbe_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_update_args *a = args;
    switch (tbe_function_of(a->optimizer.kind)) {
#define X(kind)                                                                                                                            \
    case PERI_TBE_##kind: tbe_update_##kind(a, begin, end); break;
        TBE_OPTIMIZERS(X) X(NONE)
#undef X
    default: break;
    }
}

TBE_INLINE void tbe_dense_rows(const peri_k_tbe_dense_update_args *a, int64_t begin, int64_t end, const int kind)
{
    const peri_k_tbe_table *t = a->rows.tables;
    int64_t last = tbe_part(a->rows.total_rows, end, a->chunks);
    float *room = a->scratch + begin * a->scratch_stride;
    for (int64_t linear = tbe_part(a->rows.total_rows, begin, a->chunks); linear < last; linear++) {
        if (a->touched[linear] == 0) continue;
        t = tbe_table_of(t, (uint64_t)linear);
        int64_t row = linear - t->first_row;
        tbe_row(&a->rows, &a->optimizer, t, row, a->dense + t->offset + row * t->stride, room, kind);
    }
}

static void cpu_tbe_dense_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_dense_update_args *a = args;
    switch (tbe_function_of(a->optimizer.kind)) {
#define X(kind)                                                                                                                            \
    case PERI_TBE_##kind: tbe_dense_rows(a, begin, end, PERI_TBE_##kind); break;
        TBE_OPTIMIZERS(X)
#undef X
    default: break;
    }
}

static void cpu_tbe_ema(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_ema_args *a = args;
    const peri_k_tbe_table *t = a->rows.tables;
    int64_t last = tbe_part(a->rows.total_rows, end, a->chunks);
    for (int64_t linear = tbe_part(a->rows.total_rows, begin, a->chunks); linear < last; linear++) {
        t = tbe_table_of(t, (uint64_t)linear);
        tbe_row_ema(a, t, linear - t->first_row, a->scratch + begin * a->scratch_stride);
    }
}

/** sum16 of grad[d] * weight row [d]. */
TBE_INLINE float tbe_weight_dot(const float *grad, const void *row, int64_t n, const int32_t dtype)
{
    v16 sum = v16_zero();
    for (int64_t d = 0; d < n; d += 16) sum = v16_fma(tbe_get(grad + d, n - d), tbe_get_weights(row, d, n - d, dtype), sum);
    return v16_sum(sum);
}

static void cpu_tbe_weight_gradient(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_weight_gradient_args *a = args;
    const peri_k_tbe_stream *s = &a->stream;
    int64_t from = tbe_part(s->n_ids, begin, a->chunks), to = tbe_part(s->n_ids, end, a->chunks);
    memset(a->grad_weights + from, 0, sizeof(float) * (size_t)(to - from));
    for (int64_t k = 0; k < s->n_blocks; k++) {
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        int64_t i = tbe_clamp(s->spans[k].first_id, from, to), stop = tbe_clamp(s->spans[k].first_id + tbe_items(s, k), from, to);
        if (i >= stop) continue;
        const char *ring[TBE_AHEAD_MOST];
        const tbe_source source = tbe_source_of(s, a->weight, a->weight_dtype, &a->reach);
        tbe_ahead h = tbe_ahead_start(&source, ring, k, i, stop - i, 0); /* the rows come from it: with nothing ahead, TBE_AHEAD_LEAST */
        for (int64_t j = tbe_bag_of(s, k, i); i < stop; j++) {
            int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1);
            float factor = tbe_factor(s, t, b->first_bag + j, past - first);
            if (j + 1 >= b->bags) past = stop;
            for (; i < past && i < stop; i++) {
                const char **place = tbe_ahead_place(&h, ring), *row = *place;
                *place = tbe_ahead_step(&h, &source, 0);
                if (!row) continue;
                const float *grad = a->grad + b->out_offset + tbe_out_row(t, j, i) * b->out_stride;
                float dot = a->weight_dtype == PERI_F32   ? tbe_weight_dot(grad, row, t->cols, PERI_F32)
                            : a->weight_dtype == PERI_F16 ? tbe_weight_dot(grad, row, t->cols, PERI_F16)
                                                          : tbe_weight_dot(grad, row, t->cols, PERI_BF16);
                a->grad_weights[i] += dot * factor;
            }
        }
    }
}
