/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_step.h: what one step of the optimizers with counters does to a row, w = fma(-rate, g, keep * w): the numbers, by
 * the formulas of kernels/tbe.h, once a row and in f64. ref and cpu share them, so that no instruction set has an
 * exponential of its own.
 */
#ifndef PERI_KERNELS_REF_TBE_STEP_H
#define PERI_KERNELS_REF_TBE_STEP_H

#include "tbe_list.h"

#include <math.h>

/** A row's states, and what its update has computed of it. */
typedef struct tbe_row_numbers {
    float *m, *counter;
    int64_t *prev;
    float most;        /* max_counter of the table */
    float squares;     /* sum16(x * x) */
    float weight_norm; /* norm(w), with counter.clip only */
    int64_t n;
} tbe_row_numbers;

typedef struct tbe_step {
    float rate, keep;
} tbe_step;

K_INLINE tbe_step tbe_step_make(float rate, float keep)
{
    tbe_step step = {rate, keep};
    return step;
}

/** Steps since the row was touched. */
K_INLINE int64_t tbe_gap(const peri_k_tbe_optimizer *o, int64_t *prev)
{
    int64_t t = (int64_t)o->iteration, gap = *prev == 0 || *prev >= t ? 1 : t - *prev;
    *prev = t;
    return gap;
}

K_INLINE tbe_step tbe_step_rmsprop_ar(const peri_k_tbe_optimizer *o, const tbe_row_numbers *row)
{
    double gap = (double)tbe_gap(o, row->prev), shrink = (double)o->lr * (double)o->ar_alpha * gap,
           least = o->min_shrinkage;
    *row->m = fmaf(o->rest1, row->squares / (float)row->n, o->beta1 * *row->m);
    double keep = shrink < 1 ? 1 - shrink : 0, rate = (double)o->lr / (sqrt((double)*row->m) + (double)o->eps);
    return tbe_step_make((float)rate, (float)(keep < least ? least : keep));
}

/** The rate of a row with counter @c, COUNTER. @mult: that of rowwise adagrad. */
K_INLINE double tbe_rate_counted(const peri_k_tbe_optimizer *o, double c, double most, double mult)
{
    const peri_k_tbe_counter *k = &o->counter;
    double tail = k->tail_ratio ? floor((double)k->tail * most) : (double)k->tail, up = (double)k->adjustment_ub,
           factor;
    if (k->rates == PERI_RATES_EQUAL || !(c > tail)) return mult;
    switch (k->rates) {
    case PERI_RATES_TAIL_ID_INCREASE:
        factor = pow(most / (c + 1), up);
        return mult * (factor < 1 ? 1 : factor > 10 ? 10 : factor);
    case PERI_RATES_TAIL_ID_DECREASE:
        factor = pow((c + 1) / most, up);
        return mult * (factor < 0.1 ? 0.1 : factor > 1 ? 1 : factor);
    default: return (double)o->lr / (sqrt(up * c) + (double)o->eps);
    }
}

K_INLINE tbe_step tbe_step_counted(const peri_k_tbe_optimizer *o, double c, double most, double root, int64_t gap)
{
    const peri_k_tbe_counter *k = &o->counter;
    int64_t t = (int64_t)o->iteration, h = k->halflife;
    double lr = o->lr, wd = o->weight_decay, mult = lr / root, rate, keep = 1;
    if (k->adjustment_iter > 0 && t <= k->adjustment_iter) return tbe_step_make((float)mult, 1);
    rate = tbe_rate_counted(o, c, most, mult);
    if (o->decay == PERI_DECAY_L2) keep = 1 - (double)h / c * wd * mult;
    if (o->decay == PERI_DECAY_DECOUPLE) keep = 1 - (double)h / c * wd * lr;
    if (o->decay == PERI_COUNTER_ADAGRADW) {
        int64_t missed = gap < t - k->adjustment_iter ? gap : t - k->adjustment_iter;
        if (h == -1) rate = mult * sqrt(c);
        if (h == -2) rate = (lr * c < (double)k->adjustment_ub ? lr * c : (double)k->adjustment_ub) / root;
        double lazy = tbe_power(1 - wd * lr, (uint64_t)(missed - 1));
        rate *= lazy;
        keep = (1 - wd * lr) * lazy;
    }
    return tbe_step_make((float)rate, (float)keep);
}

K_INLINE tbe_step tbe_step_clipped(const peri_k_tbe_optimizer *o, double c, const tbe_row_numbers *row, double root)
{
    const peri_k_tbe_counter *k = &o->counter;
    double lr = o->lr, wd = o->weight_decay, rate = lr / root, keep = 1, size = sqrt((double)row->squares);
    double weights = (double)k->weight_norm * (double)row->weight_norm, least = k->lower_bound;
    double bound = c * (weights < least ? least : weights);
    if (bound < size) rate *= bound / size;
    if (o->decay == PERI_DECAY_L2) keep = 1 - wd * rate;
    if (o->decay == PERI_DECAY_DECOUPLE) keep = 1 - wd * lr;
    return tbe_step_make((float)rate, (float)keep);
}

/** The step of a row; its states become those after it. */
K_INLINE tbe_step tbe_step_of(const peri_k_tbe_optimizer *o, const tbe_row_numbers *row)
{
    if (o->kind == PERI_TBE_ROWWISE_RMSPROP_AR) return tbe_step_rmsprop_ar(o, row);
    const peri_k_tbe_counter *k = &o->counter;
    int64_t gap = tbe_gap(o, row->prev), h = k->halflife;
    float before = *row->counter;
    float c = h > 0 ? (float)(1 + tbe_power(k->fading, (uint64_t)gap) * (double)before) : h == 0 ? 1.0f : before + 1;
    *row->counter = c;
    *row->m += row->squares / (float)row->n;
    double root = sqrt((double)*row->m) + (double)o->eps;
    return k->clip ? tbe_step_clipped(o, c, row, root) : tbe_step_counted(o, c, row->most, root, gap);
}

#endif
