/* SPDX-License-Identifier: Apache-2.0
 *
 * test_counter.c: options of optimizers with counters and averages that the Lua modules do not let through.
 */
#include "tests/harness/check.h"

#include <perilune/embed.h>

static peri_tbe_optimizer_config defaults(int32_t kind)
{
    peri_tbe_optimizer_config o = {.size = sizeof o};
    assert_ok(peri_tbe_optimizer_default(kind, &o));
    return o;
}

static peri_status make(const peri_tbe_optimizer_config *o)
{
    peri_device *device;
    assert_ok(peri_device_get("cpu", &device));
    peri_table_config table = {.size = sizeof table, .name = "a", .rows = 3, .cols = 2};
    peri_tbe_config config = {
        .size = sizeof config, .device = device, .n_tables = 1, .tables = &table, .dtype = PERI_F32, .optimizer = o};
    peri_tbe *tbe = NULL;
    peri_status status = peri_tbe_new(&config, &tbe);
    peri_tbe_release(tbe);
    return status;
}

static void defaults_are_accepted(void **state)
{
    (void)state;
    for (int32_t kind = PERI_TBE_NONE; kind <= PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER; kind++) {
        peri_tbe_optimizer_config o = defaults(kind);
        assert_ok(make(&o));
    }
    peri_tbe_optimizer_config o = {.size = sizeof o};
    assert_fails(peri_tbe_optimizer_default(PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER + 1, &o), PERI_EINVAL,
                 "kind 14, allowed: 0..13");
    o = defaults(PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER);
    o.weight_decay_mode = PERI_DECAY_COWCLIP;
    assert_ok(make(&o));
}

/** Set one field of the defaults: making a table batch fails with this text. */
#define refused(of, field, value, text)                                                                                \
    do {                                                                                                               \
        peri_tbe_optimizer_config o_ = defaults(of);                                                                   \
        o_.field = (value);                                                                                            \
        assert_fails(make(&o_), PERI_EINVAL, text);                                                                    \
    } while (0)

static void counters_are_checked(void **state)
{
    (void)state;
    enum { COUNTER = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER };
    refused(COUNTER, kind, COUNTER + 1, "optimizer kind 14, allowed: 0..13");
    refused(COUNTER, weight_decay_mode, 5, "weight_decay_mode 5, allowed: 0..4");
    refused(COUNTER, weight_decay_mode, PERI_DECAY_NONE,
            "weight_decay_mode 0 of optimizer rowwise_adagrad_with_counter");
    refused(COUNTER, counter.halflife, -3, "counter_halflife -3, allowed: >= -2");
    refused(COUNTER, counter.adjustment_iter, -2, "adjustment_iter -2, allowed: >= -1");
    refused(COUNTER, counter.adjustment_ub, 1.0 / 0.0, "adjustment_ub inf, allowed");
    refused(COUNTER, counter.max_counter_update_freq, -1, "max_counter_update_freq -1, allowed: >= 0");
    refused(COUNTER, counter.weight_decay_mode, 4, "counter_weight_decay_mode 4, allowed with counter: none (0)");
    refused(COUNTER, counter.weight_decay_mode, -1, "counter_weight_decay_mode -1, allowed");
    refused(COUNTER, counter.learning_rate_mode, 4, "learning_rate_mode 4, allowed: 0 (equal)");
    refused(COUNTER, counter.learning_rate_mode, -1, "learning_rate_mode -1, allowed");
    refused(COUNTER, counter.weight_norm_coefficient, -0.5, "weight_norm_coefficient -0.5, allowed");
    refused(COUNTER, row_bias_correction, true, "rowwise_adagrad_with_counter has no row_bias_correction");
    refused(PERI_TBE_ADAM, counter.halflife, 1, "optimizer adam has no counters");
    refused(PERI_TBE_ROWWISE_ADAGRAD, counter.lower_bound, 0.5, "optimizer rowwise_adagrad has no counters");
}

static void averages_are_checked(void **state)
{
    (void)state;
    enum { AVERAGE = PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD };
    refused(AVERAGE, step_ema, 0, "step_ema 0, allowed: >= 1");
    refused(AVERAGE, step_start, -1, "step_start -1, allowed: >= 0");
    refused(AVERAGE, step_ema_coef, -0.1, "step_ema_coef -0.1, allowed: 0 <= number <= 1");
    refused(PERI_TBE_SGD, step_ema, 3, "optimizer sgd has no step_ema (given: 3)");
    refused(PERI_TBE_SGD, min_shrinkage, 0.5, "optimizer sgd has no min_shrinkage (given: 0.5)");
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(defaults_are_accepted),
    cmocka_unit_test(counters_are_checked),
    cmocka_unit_test(averages_are_checked),
};
check_main(tests)
