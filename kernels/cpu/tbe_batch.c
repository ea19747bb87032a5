/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_batch.c: SGD and row-wise Adagrad on rows of the common widths. Row-wise Adagrad waits: between a row's gradient
 * and its weights stand a sum of squares, a square root and a division, more cycles than a processor looks ahead. So
 * rows are updated in batches: the rates of all of them first, sixteen in one vector, then the rows.
 */
#include "tbe_row.h"
#include "tbe_update.h"
#include "tbe_values.h"

enum { TBE_BATCH = 16 };

/** Vectors of a row of @cols columns, a constant: 8, or whole sixteens. */
TBE_INLINE int tbe_vectors(const int cols) { return (cols + 15) / 16; }
TBE_INLINE v16 tbe_batch_load(const float *p, const int cols) { return cols == 8 ? v16_load8(p) : v16_load(p); }
TBE_INLINE void tbe_batch_store(float *p, v16 x, const int cols)
{
    if (cols == 8) v16_store8(p, x);
    else v16_store(p, x);
}
/** Lines that a row of @bytes touches, which begins where a line does, or within one and ends there. */
TBE_INLINE int tbe_batch_lines(const int bytes) { return (bytes + TBE_LINE - 1) / TBE_LINE; }

typedef struct tbe_batch {
    int32_t n;
    bool plain[TBE_BATCH];     /* one item, its gradient where it lies: the walk ahead has a step to catch up */
    const float *g[TBE_BATCH]; /* gradients, to be multiplied by scale */
    float scale[TBE_BATCH];
    int64_t row[TBE_BATCH];    /* of the table */
    float rate[TBE_BATCH];     /* what multiplies them */
} tbe_batch;

static __attribute__((noinline)) void tbe_batch_sum(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *g)
{
    tbe_sum_items(u, e, past, cols, g);
}

/** tbe_update_ahead, short for rows as wide as these: the lines to ask for are constants. Rows of other tables go the
 *  long way. */
TBE_INLINE void tbe_batch_ahead(tbe_updater *u, const int kind, const int32_t dtype, const int cols)
{
    const peri_k_tbe_update_args *a = u->a;
    if (u->ahead >= u->n) return;
    uint64_t key = a->sorted[u->ahead], linear = key >> a->payload_bits;
    tbe_items_ahead(u);
    const peri_k_tbe_table *t = u->ahead_table;
    uint64_t row = linear - (uint64_t)t->first_row;
    if (row >= (uint64_t)t->rows || t->cols != cols) {
        tbe_update_ahead_rarely(u);
        return;
    }
    const int64_t e = u->ahead++;
    if (linear != u->ahead_row) {
        const int bytes = dtype == PERI_F32 ? 4 : 2;
        u->ahead_row = linear;
        tbe_prefetch((const char *)a->rows.weight + (t->offset + (int64_t)row * t->stride) * bytes,
                     tbe_batch_lines(cols * bytes), u->near);
        if (kind == PERI_TBE_ROWWISE_ADAGRAD) tbe_prefetch((const char *)(a->rows.momentum1 + linear), 1, u->near);
    }
    tbe_gradient_ahead(u, e, tbe_batch_lines(cols * 4));
}

/** Vector @v of row @i's gradient. */
TBE_INLINE v16 tbe_batch_gradient(const tbe_batch *b, int32_t i, int v, const int cols)
{
    return v16_mul(v16_set(b->scale[i]), tbe_batch_load(b->g[i] + 16 * v, cols));
}

/** m += sum16(g * g) / n and rate = -lr / (sqrt(m) + eps) for all rows, of which @part is multiplied with g: a power of
 *  two, so it does not matter when. @momentum: of the table's first row. */
TBE_INLINE void tbe_batch_rates(const peri_k_tbe_optimizer *o, tbe_batch *b, float *momentum, float part,
                                const int cols)
{
    float m[TBE_BATCH] = {0}, squares[TBE_BATCH] = {0};
    for (int32_t i = 0; i < b->n; i++) {
        v16 sum = v16_zero();
#pragma GCC unroll 16
        for (int v = 0; v < tbe_vectors(cols); v++) {
            v16 x = tbe_batch_gradient(b, i, v, cols);
            sum = v16_fma(x, x, sum);
        }
        squares[i] = v16_sum(sum);
        m[i] = momentum[b->row[i]];
    }
    v16 sum = v16_add(v16_load(m), v16_div(v16_mul(v16_load(squares), v16_set(part * part)), v16_set((float)cols)));
    v16_store(m, sum);
    v16_store(b->rate, v16_mul(v16_div(v16_set(-o->lr), v16_add(v16_sqrt(sum), v16_set(o->eps))), v16_set(part)));
    for (int32_t i = 0; i < b->n; i++) momentum[b->row[i]] = m[i];
}

/** w = fma(rate, g, keep * w) of row @i, which is of f32. */
TBE_INLINE void tbe_batch_row(float *w, const tbe_batch *b, int32_t i, v16 rate, v16 keep, const int cols)
{
#pragma GCC unroll 16
    for (int k = 0; k < tbe_vectors(cols); k++) {
        const int v = tbe_scattered(k, tbe_vectors(cols), PERI_F32);
        const v16 x = v16_mul(keep, tbe_batch_load(w + 16 * v, cols));
        tbe_batch_store(w + 16 * v, v16_fma(rate, tbe_batch_gradient(b, i, v, cols), x), cols);
    }
}

/** The same of f16 or bf16, in f32; returns sums of their squares, which say whether all are finite and not huge. */
TBE_INLINE v16 tbe_batch_row_values(const uint16_t *w, const tbe_batch *b, int32_t i, v16 rate, v16 keep, v16 *x,
                                    const int nv, const int32_t dtype)
{
    v16 squares = v16_zero();
#pragma GCC unroll 16
    for (int k = 0; k < nv; k++) {
        const int v = tbe_scattered(k, nv, dtype);
        x[v] = v16_fma(rate, tbe_batch_gradient(b, i, v, 16 * nv),
                       v16_mul(keep, tbe_get_weights(w, 16 * v, 16, dtype)));
        squares = v16_fma(x[v], x[v], squares);
    }
    return squares;
}

TBE_INLINE void tbe_batch_row_nearest(uint16_t *w, const v16 *x, const int nv, const int32_t dtype)
{
#pragma GCC unroll 16
    for (int k = 0; k < nv; k++) {
        const int v = tbe_scattered(k, nv, dtype);
        *(h16x_unaligned *)(w + 16 * v) = dtype == PERI_F16 ? v16_to_f16(x[v]) : v16_to_bf16(x[v]);
    }
}

/** Round it stochastically. @lane: of the table's first column. */
TBE_INLINE void tbe_batch_row_round(uint16_t *w, const v16 *x, uint64_t key, uint32_t lane, const int nv,
                                    const int32_t dtype)
{
#pragma GCC unroll 8
    for (int k = 0; k < nv; k += 2) {
        const int v = tbe_scattered(k, nv, dtype);
        u16x bits = tbe_random_words(key, lane + (uint32_t)v * 8);
        u16x first = tbe_random_first(bits, dtype), other = tbe_random_other(bits, dtype);
        if (dtype == PERI_F16) {
            *(h16x_unaligned *)(w + 16 * v) = v16_round_f16(x[v], first);
            *(h16x_unaligned *)(w + 16 * v + 16) = v16_round_f16(x[v + 1], other);
        } else {
            v16_store_round_bf16(w + 16 * v, x[v], first, x[v + 1], other);
        }
    }
}

/** Any row of f16 or bf16. Computes it again: nobody points to the values that are in registers. */
static __attribute__((noinline)) void tbe_batch_row_odd(const peri_k_tbe_update_args *a, const peri_k_tbe_table *t,
                                                        const tbe_batch *b, int32_t i, float rate, float keep)
{
    enum { MOST_COLS = 256 };
    const int32_t dtype = a->rows.weight_dtype;
    uint16_t *w = (uint16_t *)a->rows.weight + t->offset + b->row[i] * t->stride, room[MOST_COLS + 32];
    float wide[MOST_COLS];
    for (int v = 0; v < t->cols / 16; v++) {
        v16 x = dtype == PERI_F16 ? v16_load_f16(w + 16 * v) : v16_load_bf16(w + 16 * v);
        v16 g = tbe_batch_gradient(b, i, v, (int)t->cols);
        v16_store(wide + 16 * v, v16_fma(v16_set(rate), g, v16_mul(v16_set(keep), x)));
    }
    tbe_row_round(&a->optimizer, t, tbe_row_of_slot(&a->rows, t, b->row[i]), w, wide, room, dtype);
}

/** Ask for a row of the batch into the first-level cache, where the processor does not look far ahead: rounding is
 *  long. */
TBE_INLINE void tbe_batch_near(const void *row, const int lines)
{
#pragma GCC unroll 16
    for (int l = 0; l < lines; l++) _mm_prefetch((const char *)row + l * TBE_LINE, _MM_HINT_T0);
}

/** Update the batch's rows, and empty it. */
TBE_INLINE void tbe_batch_update(tbe_updater *u, const peri_k_tbe_table *t, tbe_batch *b, const int kind,
                                 const int32_t dtype, const int cols)
{
    const int nv = tbe_vectors(cols);
    const peri_k_tbe_rows *rows = &u->a->rows;
    const peri_k_tbe_optimizer *o = &u->a->optimizer;
    const float part = tbe_part_of_sums(u->a);
    if (kind == PERI_TBE_ROWWISE_ADAGRAD) tbe_batch_rates(o, b, rows->momentum1 + t->first_row, part, cols);
    const uint64_t table_key = dtype == PERI_F32 ? 0 : tbe_table_key(o, t);
    const float keep = tbe_keep(o);
    for (int32_t i = 0; i < b->n; i++) {
        const float rate = kind == PERI_TBE_SGD ? -o->lr * part : b->rate[i];
        if (dtype == PERI_F32) {
            tbe_batch_row((float *)rows->weight + t->offset + b->row[i] * t->stride, b, i, v16_set(rate),
                          v16_set(keep), cols);
        } else {
            uint16_t *first = (uint16_t *)rows->weight + t->offset, *w = first + b->row[i] * t->stride;
            const int32_t next = i + 1 < b->n ? i + 1 : i;
            if (u->a->reach.rows_near) {
                tbe_batch_near(first + b->row[next] * t->stride, (nv + 1) / 2);
                tbe_batch_near(b->g[next], nv);
            }
            v16 x[16];
            v16 squares = tbe_batch_row_values(w, b, i, v16_set(rate), v16_set(keep), x, nv, dtype);
            if (!o->stochastic) {
                tbe_batch_row_nearest(w, x, nv, dtype);
            } else if (u16x_beyond(u16x_of(squares), TBE_MOST_F32)) {
                tbe_batch_row_odd(u->a, t, b, i, rate, keep);
            } else {
                uint64_t key = tbe_mix64(table_key + (uint64_t)(t->row_offset + tbe_row_of_slot(rows, t, b->row[i])));
                tbe_batch_row_round(w, x, key, (uint32_t)t->col_offset / 2, nv, dtype);
            }
        }
        if (b->plain[i]) tbe_batch_ahead(u, kind, dtype, cols);
    }
    b->n = 0;
}

/** A tbe_batches. */
TBE_INLINE int64_t tbe_update_batches(tbe_updater *u, const peri_k_tbe_table *t, int64_t e, int64_t last,
                                      const int kind, const int32_t dtype, const int cols)
{
    enum { MOST_COLS = 256 };
    float sums[TBE_BATCH][MOST_COLS] __attribute__((aligned(64)));
    tbe_batch b = {0};
    uint64_t linear;
    const bool in_place = !(u->a->optimizer.max_gradient > 0) && !(u->a->items && u->a->optimizer.exact);
    for (int64_t past; tbe_in_table(u, t, e, last, &linear); e = past, u->runs++) {
        past = tbe_run_end(u, e, linear);
        int32_t i = b.n++;
        b.row[i] = (int64_t)linear - t->first_row;
        b.g[i] = sums[i];
        b.scale[i] = 1;
        b.plain[i] = past - e == 1 && in_place;
        if (b.plain[i]) b.g[i] = tbe_gradient_row(u, e, &b.scale[i]);
        else tbe_batch_sum(u, e, past, cols, sums[i]);
        if (b.n == TBE_BATCH) tbe_batch_update(u, t, &b, kind, dtype, cols);
    }
    tbe_batch_update(u, t, &b, kind, dtype, cols);
    return e;
}

#define TBE_BATCHES(name, kind, dtype, cols)                                                                           \
    static __attribute__((noinline))                                                                                   \
    int64_t tbe_batches_##name##_##cols(tbe_updater *u, const peri_k_tbe_table *t, int64_t e, int64_t last)            \
    {                                                                                                                  \
        return tbe_update_batches(u, t, e, last, kind, dtype, cols);                                                   \
    }
#define TBE_BOTH(X, MORE, name, dtype)                                                                                 \
    MORE(X, sgd_##name, PERI_TBE_SGD, dtype) MORE(X, adagrad_##name, PERI_TBE_ROWWISE_ADAGRAD, dtype)
/* Narrow rows of f32 only: stochastic bits belong to 32 columns at once. */
#define TBE_NARROW(X, name, kind, dtype) X(name, kind, dtype, 8) X(name, kind, dtype, 16)
#define TBE_ALL_f32(X) TBE_BOTH(X, TBE_NARROW, f32, PERI_F32) TBE_BOTH(X, PERI_TBE_WIDTHS, f32, PERI_F32)
#define TBE_ALL_f16(X) TBE_BOTH(X, PERI_TBE_WIDTHS, f16, PERI_F16)
#define TBE_ALL_bf16(X) TBE_BOTH(X, PERI_TBE_WIDTHS, bf16, PERI_BF16)
K_CAT(TBE_ALL_, K_PIECE, )(TBE_BATCHES)

tbe_batches *K_SHARED(K_CAT(tbe_batches_, K_PIECE, ))(int32_t kind, int64_t cols)
{
#define TBE_CHOICE(name, k, dtype, width)                                                                              \
    if (kind == (k) && cols == (width)) return tbe_batches_##name##_##width;
    K_CAT(TBE_ALL_, K_PIECE, )(TBE_CHOICE)
#undef TBE_CHOICE
    return NULL;
}
