/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_rows.c: the optimizers: one row each, by the formulas of kernels/tbe.h. Rows of f16 and bf16 tables are unpacked
 * into scratch, updated there and rounded back: the first-level cache hides it.
 */
#include "../ref/tbe_step.h"
#include "tbe_row.h"

/** What the update of one row works on: m1, m2: of the row; one number where the optimizer keeps one. u: scratch of a
 *  row. */
typedef struct tbe_spot {
    float *w, *m1, *m2, *counter, *u;
    int64_t *prev;
    float most; /* max_counter of the table */
    int64_t n;
} tbe_spot;

/** The gradient with decay L2 in it. */
TBE_INLINE v16 tbe_decayed(const peri_k_tbe_optimizer *o, const float *w, const float *g, int64_t n)
{
    v16 x = tbe_get(g, n);
    return o->decay == PERI_DECAY_L2 ? v16_fma(v16_set(o->weight_decay), tbe_get(w, n), x) : x;
}

TBE_INLINE void tbe_row_sgd(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g)
{
    v16 rate = v16_set(-o->lr), keep = v16_set(tbe_keep(o));
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 x = tbe_decayed(o, p->w + d, g + d, n - d);
        tbe_put(p->w + d, v16_fma(rate, x, v16_mul(keep, tbe_get(p->w + d, n - d))), n - d);
    }
}

TBE_INLINE void tbe_row_adagrad(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g)
{
    v16 rate = v16_set(o->lr), eps = v16_set(o->eps), keep = v16_set(tbe_keep(o));
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 x = tbe_decayed(o, p->w + d, g + d, n - d), sum = v16_fma(x, x, tbe_get(p->m1 + d, n - d));
        tbe_put(p->m1 + d, sum, n - d);
        v16 step = v16_div(v16_mul(rate, x), v16_add(v16_sqrt(sum), eps));
        tbe_put(p->w + d, v16_sub(v16_mul(keep, tbe_get(p->w + d, n - d)), step), n - d);
    }
}

TBE_INLINE void tbe_row_rowwise_adagrad(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g)
{
    v16 squares = v16_zero();
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 x = tbe_decayed(o, p->w + d, g + d, n - d);
        squares = v16_fma(x, x, squares);
    }
    *p->m1 += v16_sum(squares) / (float)p->n;
    float mult = o->lr / (sqrtf(*p->m1) + o->eps);
    v16 rate = v16_set(-mult), keep = v16_set(o->decay == PERI_DECAY_L2 ? 1 - mult * o->weight_decay : tbe_keep(o));
    for (int64_t d = 0, n = p->n; d < n; d += 16)
        tbe_put(p->w + d, v16_fma(rate, tbe_get(g + d, n - d), v16_mul(keep, tbe_get(p->w + d, n - d))), n - d);
}

/** Factors of the moments, and the row's second moment if it has one only. */
TBE_INLINE void tbe_row_count(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g, float *c1, float *c2,
                              const bool row)
{
    *c1 = o->correction1;
    *c2 = o->correction2;
    if (o->row_bias_correction) {
        uint64_t step = (uint64_t)(*p->counter += 1);
        *c1 = (float)(1 / (1 - tbe_power(o->exact_beta1, step)));
        *c2 = (float)(1 / (1 - tbe_power(o->exact_beta2, step)));
    }
    if (row) *p->m2 = fmaf(o->rest2, tbe_dot(g, g, p->n) / (float)p->n, o->beta2 * *p->m2);
}

/** Moments from column d on, and u of there. */
TBE_INLINE v16 tbe_row_moments(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g, int64_t d, float c1,
                               float c2, const bool row)
{
    int64_t n = p->n - d;
    v16 x = tbe_get(g + d, n), a = v16_fma(v16_set(o->rest1), x, v16_mul(v16_set(o->beta1), tbe_get(p->m1 + d, n))), b;
    if (row) {
        b = v16_set(*p->m2);
    } else {
        b = v16_fma(v16_mul(v16_set(o->rest2), x), x, v16_mul(v16_set(o->beta2), tbe_get(p->m2 + d, n)));
        tbe_put(p->m2 + d, b, n);
    }
    tbe_put(p->m1 + d, a, n);
    return v16_div(v16_mul(a, v16_set(c1)), v16_add(v16_sqrt(v16_mul(b, v16_set(c2))), v16_set(o->eps)));
}

TBE_INLINE void tbe_row_adam(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g, const bool row)
{
    float c1, c2;
    tbe_row_count(o, p, g, &c1, &c2, row);
    v16 rate = v16_set(o->lr), decay = v16_set(o->weight_decay);
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 y = tbe_get(p->w + d, n - d), step = tbe_row_moments(o, p, g, d, c1, c2, row);
        tbe_put(p->w + d, v16_sub(y, v16_mul(rate, v16_fma(decay, y, step))), n - d);
    }
}

TBE_INLINE void tbe_row_lamb(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g, const bool row)
{
    float c1, c2;
    tbe_row_count(o, p, g, &c1, &c2, row);
    v16 weights = v16_zero(), steps = v16_zero(), decay = v16_set(o->weight_decay);
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 y = tbe_get(p->w + d, n - d), r = v16_fma(decay, y, tbe_row_moments(o, p, g, d, c1, c2, row));
        weights = v16_fma(y, y, weights);
        if (n - d >= 16) {
            v16_store(p->u + d, r);
        } else { /* what lies beyond the row does not count */
            v16_store_part(p->u + d, r, n - d);
            r = v16_load_part(p->u + d, n - d);
        }
        steps = v16_fma(r, r, steps);
    }
    float size = sqrtf(v16_sum(weights)), step = sqrtf(v16_sum(steps));
    v16 rate = v16_set(-(size > 0 && step > 0 ? o->lr * (size / step) : o->lr));
    for (int64_t d = 0, n = p->n; d < n; d += 16)
        tbe_put(p->w + d, v16_fma(rate, tbe_get(p->u + d, n - d), tbe_get(p->w + d, n - d)), n - d);
}

TBE_INLINE void tbe_row_lars_sgd(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g)
{
    float size = tbe_norm(p->w, p->n), below = tbe_norm(g, p->n) + o->weight_decay * size;
    v16 rate = v16_set(size > 0 && below > 0 ? o->lr * (o->eta * size / below) : o->lr);
    v16 decay = v16_set(o->weight_decay), momentum = v16_set(o->momentum);
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 y = tbe_get(p->w + d, n - d), x = v16_fma(decay, y, tbe_get(g + d, n - d));
        v16 m = v16_fma(rate, x, v16_mul(momentum, tbe_get(p->m1 + d, n - d)));
        tbe_put(p->m1 + d, m, n - d);
        tbe_put(p->w + d, v16_sub(y, m), n - d);
    }
}

TBE_INLINE void tbe_row_lion(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g)
{
    v16 rate = v16_set(o->lr), decay = v16_set(o->weight_decay), keep1 = v16_set(o->beta1), rest1 = v16_set(o->rest1);
    v16 keep2 = v16_set(o->beta2), rest2 = v16_set(o->rest2);
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 y = tbe_get(p->w + d, n - d), x = tbe_get(g + d, n - d), m = tbe_get(p->m1 + d, n - d);
        v16 s = v16_sign(v16_fma(rest1, x, v16_mul(keep1, m)));
        tbe_put(p->w + d, v16_sub(y, v16_mul(rate, v16_fma(decay, y, s))), n - d);
        tbe_put(p->m1 + d, v16_fma(rest2, x, v16_mul(keep2, m)), n - d);
    }
}

/** rowwise rmsprop ar, rowwise adagrad with counter. */
static __attribute__((noinline)) void tbe_row_stepped(const peri_k_tbe_optimizer *o, const tbe_spot *p, const float *g)
{
    v16 squares = v16_zero();
    for (int64_t d = 0, n = p->n; d < n; d += 16) {
        v16 x = tbe_decayed(o, p->w + d, g + d, n - d);
        squares = v16_fma(x, x, squares);
    }
    tbe_row_numbers row = {.m = p->m1,
                           .counter = p->counter,
                           .prev = p->prev,
                           .most = p->most,
                           .squares = v16_sum(squares),
                           .weight_norm = o->counter.clip ? tbe_norm(p->w, p->n) : 0,
                           .n = p->n};
    tbe_step step = tbe_step_of(o, &row);
    v16 rate = v16_set(-step.rate), keep = v16_set(step.keep);
    for (int64_t d = 0, n = p->n; d < n; d += 16)
        tbe_put(p->w + d, v16_fma(rate, tbe_get(g + d, n - d), v16_mul(keep, tbe_get(p->w + d, n - d))), n - d);
}

/** Optimizers with a first moment for each element, with a second, and with one number for a row. */
TBE_INLINE bool tbe_has_full1(const int kind)
{
    return kind == PERI_TBE_ADAGRAD || (kind >= PERI_TBE_ADAM && kind <= PERI_TBE_LION);
}
TBE_INLINE bool tbe_has_full2(const int kind) { return kind == PERI_TBE_ADAM || kind == PERI_TBE_LAMB; }
TBE_INLINE bool tbe_has_row1(const int kind)
{
    return kind == PERI_TBE_ROWWISE_ADAGRAD || kind == PERI_TBE_ROWWISE_RMSPROP_AR;
}
TBE_INLINE bool tbe_has_row2(const int kind)
{
    return kind == PERI_TBE_PARTIAL_ROWWISE_ADAM || kind == PERI_TBE_PARTIAL_ROWWISE_LAMB;
}

/** Update row @row of table @t with summed gradient @g. @room: three rows and a constant. @kind is known at compile
 *  time; ROWWISE_RMSPROP_AR stands for all of tbe_row_stepped. */
TBE_INLINE void tbe_row(const peri_k_tbe_rows *rows, const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t,
                        int64_t row, const float *g, float *room, const int kind)
{
    int64_t n = t->cols, at = t->offset + row * t->stride, linear = t->first_row + row, wide = (n + 15) / 16 * 16;
    const int32_t dtype = rows->weight_dtype;
    uint16_t *narrow = (uint16_t *)rows->weight + at;
    tbe_spot p = {.w = dtype == PERI_F32 ? (float *)rows->weight + at : room, .u = room + wide, .n = n};
    if (tbe_has_full1(kind)) p.m1 = rows->momentum1 + at;
    if (tbe_has_row1(kind)) p.m1 = rows->momentum1 + linear;
    if (tbe_has_full2(kind)) p.m2 = rows->momentum2 + at;
    if (tbe_has_row2(kind)) p.m2 = rows->momentum2 + linear;
    p.counter = o->row_bias_correction ? rows->row_counter + linear : NULL;
    if (dtype == PERI_F16) tbe_row_widen(room, narrow, n, PERI_F16);
    if (dtype == PERI_BF16) tbe_row_widen(room, narrow, n, PERI_BF16);
    if (kind == PERI_TBE_ROWWISE_RMSPROP_AR) {
        p.prev = rows->prev_iter + linear;
        p.counter = rows->row_counter ? rows->row_counter + linear : NULL;
        p.most = rows->max_counter ? rows->max_counter[t - rows->tables] : 0;
    }
    switch (kind) {
    case PERI_TBE_SGD: tbe_row_sgd(o, &p, g); break;
    case PERI_TBE_ADAGRAD: tbe_row_adagrad(o, &p, g); break;
    case PERI_TBE_ROWWISE_ADAGRAD: tbe_row_rowwise_adagrad(o, &p, g); break;
    case PERI_TBE_ADAM: tbe_row_adam(o, &p, g, false); break;
    case PERI_TBE_PARTIAL_ROWWISE_ADAM: tbe_row_adam(o, &p, g, true); break;
    case PERI_TBE_LAMB: tbe_row_lamb(o, &p, g, false); break;
    case PERI_TBE_PARTIAL_ROWWISE_LAMB: tbe_row_lamb(o, &p, g, true); break;
    case PERI_TBE_LARS_SGD: tbe_row_lars_sgd(o, &p, g); break;
    case PERI_TBE_LION: tbe_row_lion(o, &p, g); break;
    case PERI_TBE_ROWWISE_RMSPROP_AR: tbe_row_stepped(o, &p, g); break;
    default: break;
    }
    if (o->max_norm > 0) tbe_row_limit(p.w, n, o->max_norm);
    if (dtype != PERI_F32)
        tbe_row_round(o, t, tbe_row_of_slot(rows, t, row), narrow, p.w, (uint16_t *)(room + 2 * wide), dtype);
}
