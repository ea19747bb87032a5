/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.h: what the parts of an update share. Sorted items come in runs of equal rows, whose gradients are summed.
 * Two streams of random addresses have to be asked for ahead of time: rows of the gradient (one for each item, mostly
 * in the last-level cache), and rows of the tables with their optimizer state (one for each run of equal rows, in
 * memory).
 */
#ifndef PERI_KERNELS_TBE_UPDATE_H
#define PERI_KERNELS_TBE_UPDATE_H

#include "../ref/tbe_list.h"
#include "tbe_calls.h"
#include "tbe_simd.h"

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

/** Where item e's gradient row begins, in elements of the gradient. */
TBE_INLINE uint64_t tbe_gradient_at(const tbe_updater *u, int64_t e, float *scale)
{
    uint64_t payload = u->a->sorted[e] & u->payload_mask;
    if (!u->a->items) return payload;
    *scale = u->a->items[payload].scale;
    return (uint64_t)u->a->items[payload].grad;
}

/** Keep rows of table @t, whose items begin at @e, from now on, if there are enough of them. */
#define tbe_kept_enter K_SHARED(tbe_kept_enter)
K_HIDDEN void tbe_kept_enter(tbe_updater *u, const peri_k_tbe_table *t, int64_t e);
/** Keep the row at @at, which would be in @place, if there is room; returns where to read it. */
#define tbe_kept_add K_SHARED(tbe_kept_add)
K_HIDDEN __attribute__((cold)) const float *tbe_kept_add(tbe_updater *u, uint64_t at, uint64_t place);

/** The place of the row at @at, or where it would come. */
TBE_INLINE uint64_t tbe_kept_place(const tbe_kept *k, uint64_t at)
{
    uint64_t place = at * 0x9e3779b97f4a7c15u >> k->shift;
    while (k->places[place] >> TBE_COPY_BITS != at && k->places[place] != UINT64_MAX)
        place = (place + 1) & (UINT64_MAX >> k->shift);
    return place;
}

/** Item e's gradient row. */
TBE_INLINE const float *tbe_gradient_row(tbe_updater *u, int64_t e, float *scale)
{
    const uint64_t at = tbe_gradient_at(u, e, scale);
    if (__builtin_expect(!u->kept.shift, 1)) return u->a->grad + at;
    const uint64_t place = tbe_kept_place(&u->kept, at), copy = u->kept.places[place];
    if (copy == UINT64_MAX) return tbe_kept_add(u, at, place);
    return u->kept.rows + (int64_t)(copy & ((1u << TBE_COPY_BITS) - 1)) * u->kept.stride;
}

/** Ask for item e's gradient row, of @lines cache lines, unless it is kept, or so many of its table have been read that
 *  it will be. */
TBE_INLINE void tbe_gradient_ahead(const tbe_updater *u, int64_t e, const int64_t lines)
{
    const tbe_kept *k = &u->kept;
    if (k->shift && k->table == u->ahead_table && e - k->first >= TBE_KEPT_READ * k->n) return;
    const uint64_t at = tbe_gradient_at(u, e, &(float){0});
    if (k->shift && k->places[tbe_kept_place(k, at)] != UINT64_MAX) return;
    tbe_prefetch((const char *)(u->a->grad + at), lines, u->near);
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

/** Ask for an item that the walk ahead comes to later. */
TBE_INLINE void tbe_items_ahead(const tbe_updater *u)
{
    enum { ITEMS_AHEAD = 16 };
    const peri_k_tbe_update_args *a = u->a;
    if (a->items && u->ahead + ITEMS_AHEAD < u->n)
        _mm_prefetch((const char *)&a->items[a->sorted[u->ahead + ITEMS_AHEAD] & u->payload_mask], _MM_HINT_T0);
}

TBE_INLINE void tbe_update_ahead(tbe_updater *u)
{
    const peri_k_tbe_update_args *a = u->a;
    if (u->ahead >= u->n) return;
    tbe_items_ahead(u);
    const int64_t e = u->ahead++;
    uint64_t linear = a->sorted[e] >> a->payload_bits;
    if (linear != u->ahead_row) {
        if (linear >= (uint64_t)a->rows.total_rows) return;
        u->ahead_row = linear;
        if (linear >= (uint64_t)(u->ahead_table->first_row + u->ahead_table->rows))
            tbe_update_enter(u, tbe_table_of(u->ahead_table, linear));
        const peri_k_tbe_table *t = u->ahead_table;
        int64_t at = t->offset + ((int64_t)linear - t->first_row) * t->stride, lines = u->ahead_lines;
        tbe_prefetch((const char *)a->rows.weight + at * tbe_weight_bytes(a->rows.weight_dtype), u->ahead_weight_lines,
                     u->near);
        for (int i = 0; i < 2; i++) {
            if (u->full[i]) tbe_prefetch((const char *)(u->full[i] + at), lines, u->near);
            if (u->row[i]) tbe_prefetch((const char *)(u->row[i] + linear), 1, u->near);
        }
        if (u->prev) tbe_prefetch((const char *)(u->prev + linear), 1, u->near);
    }
    tbe_gradient_ahead(u, e, u->ahead_lines);
}

/** The same where it is called rarely: the code is long. */
static __attribute__((noinline)) void tbe_update_ahead_rarely(tbe_updater *u) { tbe_update_ahead(u); }

/** The sum over items [e, past) of all columns into @room. */
#define tbe_sum_items K_SHARED(tbe_sum_items)
K_HIDDEN void tbe_sum_items(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *room);

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

/** The optimizers: X(kind). ROWWISE_RMSPROP_AR stands for all of tbe_row_stepped. SUMS(NONE): no optimizer, sums go
 *  where the caller wants them. */
#define TBE_KINDS(X, SUMS)                                                                                             \
    SUMS(NONE)                                                                                                         \
    X(SGD)                                                                                                             \
    X(ADAGRAD)                                                                                                         \
    X(ROWWISE_ADAGRAD)                                                                                                 \
    X(ADAM) X(PARTIAL_ROWWISE_ADAM) X(LARS_SGD) X(LION) X(LAMB) X(PARTIAL_ROWWISE_LAMB) X(ROWWISE_RMSPROP_AR)

/** Chunks [begin, end) of an update, and of a dense one. */
#define TBE_SUMS(kind)                                                                                                 \
    K_HIDDEN void K_SHARED(tbe_update_##kind)(const peri_k_tbe_update_args *a, int64_t begin, int64_t end);
#define X(kind)                                                                                                        \
    TBE_SUMS(kind)                                                                                                     \
    K_HIDDEN void K_SHARED(tbe_dense_##kind)(const peri_k_tbe_dense_update_args *a, int64_t begin, int64_t end);
TBE_KINDS(X, TBE_SUMS)
#undef X
#undef TBE_SUMS

/** What updates table @t in batches; NULL: its rows are to be taken one by one. */
#define tbe_batches_of K_SHARED(tbe_batches_of)
K_HIDDEN tbe_batches *tbe_batches_of(const peri_k_tbe_update_args *a, const peri_k_tbe_table *t);

/** The same of weights of one type, by the pieces of unit_tbe_batch.c; NULL: these have no such optimizer or width. */
#define X(dtype) K_HIDDEN tbe_batches *K_SHARED(tbe_batches_##dtype)(int32_t kind, int64_t cols);
X(f32) X(f16) X(bf16)
#undef X

#endif
