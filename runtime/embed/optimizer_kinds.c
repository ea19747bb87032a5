/* SPDX-License-Identifier: Apache-2.0
 *
 * optimizer_kinds.c: the table of optimizers: what each keeps and knows; the states that follow from it.
 */
#include "embed_internal.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    FULL = PERI_STATE_FULL + 1,
    ROW = PERI_STATE_ROW + 1,
    SQUARE = PERI_STATE_SQUARE + 1,
    SCALAR = PERI_STATE_SCALAR + 1
};
enum {
    M1 = PERI__STATE_MOMENTUM1,
    M2 = PERI__STATE_MOMENTUM2,
    COUNTER = PERI__STATE_ROW_COUNTER,
    PREV = PERI__STATE_PREV_ITER
};

static const peri__optimizer_kind kinds[PERI_TBE_OPTIMIZER_COUNT] = {
    [PERI_TBE_NONE] = {.name = "none"},
    [PERI_TBE_SGD] = {.name = "sgd", .decay = true, .decay_mode = true},
    [PERI_TBE_ADAGRAD] = {.name = "adagrad", .keeps = {[M1] = FULL}, .eps = 1e-8, .decay = true, .decay_mode = true},
    [PERI_TBE_ROWWISE_ADAGRAD] =
        {.name = "rowwise_adagrad", .keeps = {[M1] = ROW}, .eps = 1e-8, .decay = true, .decay_mode = true},
    [PERI_TBE_ADAM] =
        {.name = "adam", .keeps = {[M1] = FULL, [M2] = FULL}, .eps = 1e-8, .beta1 = 0.9, .beta2 = 0.999, .decay = true},
    [PERI_TBE_PARTIAL_ROWWISE_ADAM] = {.name = "partial_rowwise_adam",
                                       .keeps = {[M1] = FULL, [M2] = ROW},
                                       .eps = 1e-8,
                                       .beta1 = 0.9,
                                       .beta2 = 0.999,
                                       .decay = true},
    [PERI_TBE_LAMB] =
        {.name = "lamb", .keeps = {[M1] = FULL, [M2] = FULL}, .eps = 1e-8, .beta1 = 0.9, .beta2 = 0.999, .decay = true},
    [PERI_TBE_PARTIAL_ROWWISE_LAMB] = {.name = "partial_rowwise_lamb",
                                       .keeps = {[M1] = FULL, [M2] = ROW},
                                       .eps = 1e-8,
                                       .beta1 = 0.9,
                                       .beta2 = 0.999,
                                       .decay = true},
    [PERI_TBE_LARS_SGD] = {.name = "lars_sgd", .keeps = {[M1] = FULL}, .lars = true, .decay = true},
    [PERI_TBE_SHAMPOO] = {.name = "shampoo",
                          .keeps = {[PERI__STATE_PRECONDITIONER] = SQUARE},
                          .eps = 1e-4,
                          .decay = true,
                          .decay_mode = true},
    [PERI_TBE_LION] = {.name = "lion", .keeps = {[M1] = FULL}, .beta1 = 0.9, .beta2 = 0.99, .decay = true},
    [PERI_TBE_ROWWISE_RMSPROP_AR] = {.name = "rowwise_rmsprop_ar",
                                     .keeps = {[M1] = ROW, [PREV] = ROW},
                                     .eps = 1e-8,
                                     .rmsprop = true},
    [PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD] = {.name = "emainplace_rowwise_adagrad",
                                             .keeps = {[M1] = ROW},
                                             .eps = 1e-8,
                                             .decay = true,
                                             .decay_mode = true,
                                             .ema = true},
    [PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER] = {.name = "rowwise_adagrad_with_counter",
                                               .keeps = {[M1] = ROW, [COUNTER] = ROW, [PREV] = ROW},
                                               .counter = true,
                                               .eps = 1e-8,
                                               .decay = true,
                                               .decay_mode = true},
};

const peri__optimizer_kind *peri__optimizer_kind_of(int32_t kind) { return &kinds[kind]; }

peri_status peri__optimizer_kind_check(const char *function, int32_t kind)
{
    if (kind >= 0 && kind < PERI_TBE_OPTIMIZER_COUNT) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: optimizer kind %d, allowed: 0..%d (PERI_TBE_*)", function, kind,
                      PERI_TBE_OPTIMIZER_COUNT - 1);
}

const char *peri__start_text(int32_t init, double a, double b, char out[PERI__START_TEXT])
{
    char x[32], y[32];
    peri__number_text(a, x);
    peri__number_text(b, y);
    switch (init) {
    case PERI_INIT_UNIFORM: snprintf(out, PERI__START_TEXT, "uniform (%s to %s)", x, y); break;
    case PERI_INIT_NORMAL: snprintf(out, PERI__START_TEXT, "normal (mean %s, deviation %s)", x, y); break;
    case PERI_INIT_CONSTANT: snprintf(out, PERI__START_TEXT, "constant (%s)", x); break;
    case PERI_INIT_NONE: return "none";
    default: return "default (uniform, by the number of rows)";
    }
    return out;
}

/* -- states -------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int32_t dtype;
} known[PERI__STATES] = {
    [PERI__STATE_WEIGHT] = {"weight", 0},
    [PERI__STATE_MOMENTUM1] = {"momentum1", PERI_F32},
    [PERI__STATE_MOMENTUM2] = {"momentum2", PERI_F32},
    [PERI__STATE_ROW_COUNTER] = {"row_counter", PERI_F32},
    [PERI__STATE_PREV_ITER] = {"prev_iter", PERI_I64},
    [PERI__STATE_PRECONDITIONER] = {"preconditioner", PERI_F32},
    [PERI__STATE_MAX_COUNTER] = {"max_counter", PERI_F32},
};

bool peri__counter_wants_most(const peri_tbe_optimizer_config *o)
{
    if (o->kind != PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER || o->weight_decay_mode != PERI_DECAY_COUNTER) return false;
    int32_t mode = o->counter.learning_rate_mode;
    return mode == PERI_RATES_TAIL_ID_INCREASE || mode == PERI_RATES_TAIL_ID_DECREASE ||
           (mode == PERI_RATES_COUNTER_SGD && o->counter.tail_id_is_ratio);
}

int32_t peri__states_of(int32_t dtype, const peri_tbe_optimizer_config *o, peri__state out[PERI__STATES])
{
    int32_t n = 0;
    for (int32_t i = 0; i < PERI__STATES; i++) {
        int32_t keeps = i == PERI__STATE_WEIGHT ? FULL : kinds[o->kind].keeps[i];
        /* Two that depend on options: */
        if (i == PERI__STATE_ROW_COUNTER && o->row_bias_correction) keeps = ROW;
        if (i == PERI__STATE_MAX_COUNTER && peri__counter_wants_most(o)) keeps = SCALAR;
        if (!keeps) continue;
        out[n++] = (peri__state){.name = known[i].name, .which = i, .dtype = known[i].dtype, .geometry = keeps - 1};
    }
    out[0].dtype = peri__rows_are_bytes(dtype) ? PERI_U8 : dtype;
    return n;
}

bool peri__optimizer_keeps(const peri_tbe_optimizer_config *o, int32_t geometry)
{
    peri__state states[PERI__STATES];
    int32_t n = peri__states_of(PERI_F32, o, states);
    for (int32_t i = 1; i < n; i++)
        if (states[i].geometry == geometry) return true;
    return false;
}

int64_t peri__table_elements(int32_t dtype, int64_t rows, int64_t cols, int64_t alignment)
{
    int64_t elements;
    if (__builtin_mul_overflow(rows, peri__tbe_stride(dtype, cols), &elements) || elements > INT64_MAX >> 4) return -1;
    return peri__ceil_div(elements, alignment) * alignment;
}

int64_t peri__state_elements(int32_t geometry, int64_t rows, int64_t cols, int64_t elements)
{
    switch (geometry) {
    case PERI_STATE_FULL: return elements;
    case PERI_STATE_ROW: return rows;
    case PERI_STATE_SQUARE: return cols * cols;
    default: return 1;
    }
}

int64_t peri__state_offset(const peri_tbe *tbe, const peri__state *s, int64_t table)
{
    bool all = table == tbe->n_tables;
    int64_t squares = 0;
    switch (s->geometry) {
    case PERI_STATE_FULL: return all ? tbe->total_elements : tbe->layout[table].offset;
    case PERI_STATE_ROW: return all ? tbe->total_rows : tbe->layout[table].first_row;
    case PERI_STATE_SCALAR: return table;
    default:
        for (int64_t t = 0; t < table; t++) squares += peri__state_elements(s->geometry, 0, tbe->layout[t].cols, 0);
        return squares;
    }
}

void *peri__state_data(const peri_tbe *tbe, int32_t which)
{
    for (int32_t i = 0; i < tbe->n_states; i++)
        if (tbe->state[i].which == which) return peri__data(tbe->state[i].flat);
    return NULL;
}

peri_status peri__state_view(const peri_tbe *tbe, int64_t table, int32_t i, peri_tensor **out)
{
    const peri__state *s = &tbe->state[i];
    const peri_k_tbe_table *t = &tbe->layout[table];
    int64_t at = peri__state_offset(tbe, s, table), cols = peri__rows_are_bytes(tbe->dtype) ? t->stride : t->cols;
    switch (s->geometry) {
    case PERI_STATE_FULL:
        return peri__tensor_view(s->flat, 2, (int64_t[]){t->rows, cols}, (int64_t[]){t->stride, 1}, at, out);
    case PERI_STATE_ROW: return peri__tensor_view(s->flat, 1, &t->rows, NULL, at, out);
    case PERI_STATE_SQUARE: return peri__tensor_view(s->flat, 2, (int64_t[]){t->cols, t->cols}, NULL, at, out);
    default: return peri__tensor_view(s->flat, 1, (int64_t[]){1}, NULL, at, out);
    }
}

double peri__tbe_weight_sized_tensors(const peri_tbe_optimizer_config *o)
{
    peri__state states[PERI__STATES];
    int32_t n = peri__states_of(PERI_F32, o, states), full = 0;
    for (int32_t i = 0; i < n; i++) full += states[i].geometry == PERI_STATE_FULL;
    return full;
}

int32_t peri__tbe_record_parts(const peri_tbe *tbe, peri_k_cache_part part[PERI_CACHE_PARTS])
{
    int32_t n = 0;
    for (int32_t i = 0; i < tbe->n_states; i++) {
        const peri__state *s = &tbe->state[i];
        if (!peri__has_rows(s->geometry)) continue;
        part[n++] = (peri_k_cache_part){.base = peri__data(s->flat),
                                        .bytes = (int32_t)peri_dtype_size(s->dtype),
                                        .row = s->geometry == PERI_STATE_ROW};
    }
    return n;
}

const char *peri_tbe_state_name(const peri_tbe *tbe, int32_t i)
{
    return tbe && i >= 0 && i < tbe->n_states ? tbe->state[i].name : NULL;
}
