/* SPDX-License-Identifier: Apache-2.0
 *
 * optimizer.c: optimizers as the kernels see them, and what those with counters, and EMA in place, have beyond the
 * update of rows: their options, and passes over whole tables.
 */
#include "row_watch.h"
#include "../base/floats.h"

#include <math.h>

void peri__counter_default(peri_tbe_optimizer_config *o)
{
    if (o->kind != PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER) return;
    o->weight_decay_mode = PERI_DECAY_COUNTER;
    o->counter = (peri_tbe_counter){.halflife = -1,
                                    .learning_rate_mode = PERI_RATES_EQUAL,
                                    .adjustment_iter = -1,
                                    .adjustment_ub = 1,
                                    .max_counter_update_freq = 1000};
}

/* -- checks -------------------------------------------------------------------------------------------------------- */

static peri_status check_real(const char *what, double value)
{
    if (value >= 0 && isfinite(value)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_tbe_new: %s %g, allowed: finite numbers >= 0", what, value);
}

static peri_status check_whole(const char *what, int64_t value, int64_t least)
{
    if (value >= least) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_tbe_new: %s %lld, allowed: >= %lld", what, (long long)value, (long long)least);
}

static peri_status check_modes(const peri_tbe_optimizer_config *o, bool clip)
{
    const peri_tbe_counter *k = &o->counter;
    int32_t most = clip ? PERI_COUNTER_DECOUPLE : PERI_COUNTER_ADAGRADW;
    if (k->weight_decay_mode < PERI_COUNTER_NONE || k->weight_decay_mode > most)
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_new: counter_weight_decay_mode %d, allowed with %s: none (0), l2 (1), decouple (2)%s",
            k->weight_decay_mode, clip ? "cowclip" : "counter", clip ? "" : ", adagradw (3)");
    if (o->weight_decay != 0 && k->weight_decay_mode == PERI_COUNTER_NONE)
        return peri__fail(PERI_EINVAL,
                          "peri_tbe_new: weight_decay %g without a counter_weight_decay_mode, allowed: l2, decouple%s",
                          o->weight_decay, clip ? "" : ", adagradw");
    if (!clip && o->weight_decay != 0 && k->weight_decay_mode != PERI_COUNTER_ADAGRADW && k->halflife < 0)
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_new: counter_halflife %lld with weight_decay %g would make weights grow, allowed with "
            "counter_weight_decay_mode %s: >= 0",
            (long long)k->halflife, o->weight_decay, k->weight_decay_mode == PERI_COUNTER_L2 ? "l2" : "decouple");
    if (k->learning_rate_mode < PERI_RATES_EQUAL || k->learning_rate_mode > PERI_RATES_COUNTER_SGD)
        return peri__fail(PERI_EINVAL,
                          "peri_tbe_new: learning_rate_mode %d, allowed: 0 (equal), 1 (tail_id_lr_increase), 2 "
                          "(tail_id_lr_decrease), 3 (counter_sgd)",
                          k->learning_rate_mode);
    return PERI_OK;
}

peri_status peri__counter_check(const peri_tbe_optimizer_config *o)
{
    const peri_tbe_counter *k = &o->counter;
    if (o->kind != PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER) {
        if (o->weight_decay_mode == PERI_DECAY_COUNTER || o->weight_decay_mode == PERI_DECAY_COWCLIP)
            return peri__fail(PERI_EINVAL,
                              "peri_tbe_new: weight_decay_mode %s is of row-wise Adagrad only, this is optimizer %s",
                              o->weight_decay_mode == PERI_DECAY_COUNTER ? "counter" : "cowclip",
                              peri__optimizer_kind_of(o->kind)->name);
        if (k->halflife || k->weight_decay_mode || k->learning_rate_mode || k->adjustment_iter ||
            k->adjustment_ub != 0 || k->tail_id_threshold != 0 || k->tail_id_is_ratio || k->max_counter_update_freq ||
            k->weight_norm_coefficient != 0 || k->lower_bound != 0)
            return peri__fail(PERI_EINVAL, "peri_tbe_new: optimizer %s has no counters",
                              peri__optimizer_kind_of(o->kind)->name);
        return PERI_OK;
    }
    if (o->weight_decay_mode != PERI_DECAY_COUNTER && o->weight_decay_mode != PERI_DECAY_COWCLIP)
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_new: weight_decay_mode %d of optimizer rowwise_adagrad_with_counter, allowed: %d (counter), %d "
            "(cowclip)",
            o->weight_decay_mode, PERI_DECAY_COUNTER, PERI_DECAY_COWCLIP);
    PERI_TRY(check_modes(o, o->weight_decay_mode == PERI_DECAY_COWCLIP));
    PERI_TRY(check_whole("counter_halflife", k->halflife, -2));
    PERI_TRY(check_whole("adjustment_iter", k->adjustment_iter, -1));
    PERI_TRY(check_real("adjustment_ub", k->adjustment_ub));
    PERI_TRY(check_real("tail_id_threshold", k->tail_id_threshold));
    PERI_TRY(check_whole("max_counter_update_freq", k->max_counter_update_freq, 0));
    PERI_TRY(check_real("weight_norm_coefficient", k->weight_norm_coefficient));
    return check_real("lower_bound", k->lower_bound);
}

peri_status peri__ema_check(const peri_tbe_optimizer_config *o)
{
    if (o->kind != PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD) {
        if (!o->step_ema && !o->step_start && o->step_ema_coef == 0) return PERI_OK;
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_new: optimizer %s has no step_ema (given: %lld), step_start (%lld), step_ema_coef (%g)",
            peri__optimizer_kind_of(o->kind)->name, (long long)o->step_ema, (long long)o->step_start, o->step_ema_coef);
    }
    PERI_TRY(check_whole("step_ema", o->step_ema, 1));
    PERI_TRY(check_whole("step_start", o->step_start, 0));
    if (o->step_ema_coef >= 0 && o->step_ema_coef <= 1) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_tbe_new: step_ema_coef %g, allowed: 0 <= number <= 1", o->step_ema_coef);
}

/* -- for the kernels ----------------------------------------------------------------------------------------------- */

static peri_k_tbe_counter kernel_counter(const peri_tbe_optimizer_config *o)
{
    PERI__OWN_FLOATS;
    const peri_tbe_counter *k = &o->counter;
    bool clip = o->weight_decay_mode == PERI_DECAY_COWCLIP;
    return (peri_k_tbe_counter){.halflife = k->halflife,
                                .adjustment_iter = k->adjustment_iter,
                                .fading = k->halflife > 0 ? exp2(-1.0 / (double)k->halflife) : 1,
                                .adjustment_ub = (float)k->adjustment_ub,
                                .tail = (float)k->tail_id_threshold,
                                .weight_norm = (float)k->weight_norm_coefficient,
                                .lower_bound = (float)k->lower_bound,
                                .rates = clip ? PERI_RATES_EQUAL : k->learning_rate_mode,
                                .tail_ratio = k->tail_id_is_ratio,
                                .clip = clip};
}

peri_k_tbe_optimizer peri__tbe_kernel_optimizer(const peri_tbe *tbe, int64_t iteration)
{
    const peri_tbe_optimizer_config *o = &tbe->optimizer;
    const peri__optimizer_kind *k = peri__optimizer_kind_of(o->kind);
    PERI__OWN_FLOATS;
    double beta1 = k->rmsprop ? o->ema_beta : o->beta1;
    return (peri_k_tbe_optimizer){.kind = k->ema ? PERI_TBE_ROWWISE_ADAGRAD : o->kind,
                                  .decay = k->counter ? o->counter.weight_decay_mode : o->weight_decay_mode,
                                  .lr = (float)o->learning_rate,
                                  .eps = (float)o->eps,
                                  .weight_decay = (float)o->weight_decay,
                                  .beta1 = (float)beta1,
                                  .beta2 = (float)o->beta2,
                                  .rest1 = (float)(1 - beta1),
                                  .rest2 = (float)(1 - o->beta2),
                                  .correction1 = (float)(1 / (1 - pow(o->beta1, (double)iteration))),
                                  .correction2 = (float)(1 / (1 - pow(o->beta2, (double)iteration))),
                                  .exact_beta1 = o->beta1,
                                  .exact_beta2 = o->beta2,
                                  .eta = (float)o->eta,
                                  .momentum = (float)o->momentum,
                                  .max_norm = (float)o->max_norm,
                                  .max_gradient = (float)o->max_gradient,
                                  .row_bias_correction = o->row_bias_correction,
                                  .stochastic = !o->nearest,
                                  .exact = o->exact,
                                  .seed = tbe->seed,
                                  .iteration = (uint64_t)iteration,
                                  .ar_alpha = (float)o->ar_alpha,
                                  .min_shrinkage = (float)o->min_shrinkage,
                                  .counter = kernel_counter(o)};
}

/* -- whole tables -------------------------------------------------------------------------------------------------- */

peri_status peri__counter_refresh(peri_tbe *tbe, int64_t iteration)
{
    int64_t every = tbe->optimizer.counter.max_counter_update_freq;
    float *most = peri__state_data(tbe, PERI__STATE_MAX_COUNTER);
    if (!most || every == 0 || iteration % every != 0) return PERI_OK;
    peri_k_tbe_most_counted_args args = {.tables = peri__data(tbe->layout_tensor),
                                         .row_counter = peri__state_data(tbe, PERI__STATE_ROW_COUNTER),
                                         .max_counter = most};
    return PERI_LAUNCH(tbe->device, tbe_most_counted, &args, tbe->n_tables, 1);
}

/** Whether it is due before the next training step. */
static bool ema_due(const peri_tbe *tbe)
{
    const peri_tbe_optimizer_config *o = &tbe->optimizer;
    int64_t step = tbe->iteration + 1;
    return o->kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD && step >= o->step_start && step % o->step_ema == 0 &&
           tbe->ema_step != step;
}

peri_status peri__tbe_ema_alone(peri_tbe *tbe)
{
    if (!ema_due(tbe)) return PERI_OK;
    peri_k_tbe_ema_args args = {.rows = peri__tbe_kernel_tables(tbe),
                                    .optimizer = peri__tbe_kernel_optimizer(tbe, tbe->iteration + 1),
                                    .coef = (float)tbe->optimizer.step_ema_coef};
    args.optimizer.seed = ~args.optimizer.seed;
    for (int64_t t = 0; t < tbe->n_tables && tbe->watches; t++)
        PERI_TRY(peri__tbe_tell_range(tbe, t, 0, 0, tbe->layout[t].rows));
    PERI_TRY(PERI_RUN(tbe->device, tbe_ema, &args));
    tbe->ema_step = tbe->iteration + 1;
    return PERI_OK;
}

peri_status peri_tbe_settled(const peri_tbe *tbe)
{
    PERI_NEED(tbe);
    if (tbe->ema_step <= tbe->iteration) return PERI_OK;
    return peri__fail(
        PERI_EINVAL,
        "peri_tbe_settled: a lookup has made the averages in place of step %lld, and the tables count %lld updates, so "
        "that "
        "weights and iteration are of different moments; take the state before the step's forward pass, or after its "
        "backward pass (in a pipeline that looks up ahead: at its end)",
        (long long)tbe->ema_step, (long long)tbe->iteration);
}

peri_status peri__tbe_ema(peri_tbe *tbe)
{
    if (tbe->optimizer.kind != PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD) return PERI_OK;
    PERI_TRY(peri__tbe_enter(tbe, true));
    return peri__tbe_leave(tbe, true, peri__tbe_ema_alone(tbe));
}
