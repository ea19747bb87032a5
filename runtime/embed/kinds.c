/* SPDX-License-Identifier: Apache-2.0
 *
 * kinds.c: the table of optimizers: what each keeps and knows, and the names of states.
 */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

/* The public constants are the kernels'. */
_Static_assert((int)PERI_TBE_NONE == (int)PERI_K_OPTIM_NONE && (int)PERI_TBE_SGD == (int)PERI_K_OPTIM_SGD &&
                   (int)PERI_TBE_ADAGRAD == (int)PERI_K_OPTIM_ADAGRAD && (int)PERI_TBE_ADAM == (int)PERI_K_OPTIM_ADAM &&
                   (int)PERI_TBE_ROWWISE_ADAGRAD == (int)PERI_K_OPTIM_ROWWISE_ADAGRAD &&
                   (int)PERI_TBE_PARTIAL_ROWWISE_ADAM == (int)PERI_K_OPTIM_PARTIAL_ROWWISE_ADAM &&
                   (int)PERI_TBE_LAMB == (int)PERI_K_OPTIM_LAMB && (int)PERI_TBE_LARS_SGD == (int)PERI_K_OPTIM_LARS_SGD &&
                   (int)PERI_TBE_PARTIAL_ROWWISE_LAMB == (int)PERI_K_OPTIM_PARTIAL_ROWWISE_LAMB &&
                   (int)PERI_TBE_LION == (int)PERI_K_OPTIM_LION && (int)PERI_TBE_SHAMPOO == (int)PERI_K_OPTIM_SHAMPOO &&
                   (int)PERI_TBE_ROWWISE_RMSPROP_AR == (int)PERI_K_OPTIM_ROWWISE_RMSPROP_AR &&
                   (int)PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD == (int)PERI_K_OPTIM_EMAINPLACE_ROWWISE_ADAGRAD &&
                   (int)PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER == (int)PERI_K_OPTIM_ROWWISE_ADAGRAD_WITH_COUNTER,
               "optimizers");
_Static_assert((int)PERI_COUNTER_DECAY_L2 == (int)PERI_K_DECAY_L2 && (int)PERI_COUNTER_DECAY_DECOUPLE == (int)PERI_K_DECAY_DECOUPLE &&
                   (int)PERI_COUNTER_DECAY_ADAGRADW == (int)PERI_K_DECAY_ADAGRADW &&
                   (int)PERI_RATES_TAIL_ID_INCREASE == (int)PERI_K_RATES_TAIL_UP &&
                   (int)PERI_RATES_TAIL_ID_DECREASE == (int)PERI_K_RATES_TAIL_DOWN &&
                   (int)PERI_RATES_COUNTER_SGD == (int)PERI_K_RATES_COUNTER_SGD,
               "counters");
_Static_assert((int)PERI_DECAY_L2 == (int)PERI_K_DECAY_L2 && (int)PERI_DECAY_DECOUPLE == (int)PERI_K_DECAY_DECOUPLE, "decay modes");
_Static_assert((int)PERI_POOLING_MEAN == (int)PERI_K_POOLING_MEAN && (int)PERI_POOLING_NONE == (int)PERI_K_POOLING_NONE, "poolings");

static const peri__optimizer_kind kinds[PERI_K_OPTIM_COUNT] = {
    [PERI_TBE_NONE] = {.name = "none"},
    [PERI_TBE_SGD] = {.name = "sgd", .decay = true, .decay_mode = true},
    [PERI_TBE_ADAGRAD] = {.name = "adagrad", .full1 = true, .eps = true, .decay = true, .decay_mode = true},
    [PERI_TBE_ROWWISE_ADAGRAD] = {.name = "rowwise_adagrad", .row1 = true, .eps = true, .decay = true, .decay_mode = true},
    [PERI_TBE_ADAM] = {.name = "adam", .full1 = true, .full2 = true, .eps = true, .betas = true, .decay = true},
    [PERI_TBE_PARTIAL_ROWWISE_ADAM] =
        {.name = "partial_rowwise_adam", .full1 = true, .row2 = true, .eps = true, .betas = true, .decay = true},
    [PERI_TBE_LAMB] = {.name = "lamb", .full1 = true, .full2 = true, .eps = true, .betas = true, .decay = true},
    [PERI_TBE_PARTIAL_ROWWISE_LAMB] =
        {.name = "partial_rowwise_lamb", .full1 = true, .row2 = true, .eps = true, .betas = true, .decay = true},
    [PERI_TBE_LARS_SGD] = {.name = "lars_sgd", .full1 = true, .lars = true, .decay = true},
    [PERI_TBE_SHAMPOO] = {.name = "shampoo", .eps = true, .decay = true, .decay_mode = true},
    [PERI_TBE_LION] = {.name = "lion", .full1 = true, .betas = true, .decay = true},
    [PERI_TBE_ROWWISE_RMSPROP_AR] = {.name = "rowwise_rmsprop_ar", .row1 = true, .prev = true, .eps = true, .rmsprop = true},
    [PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD] =
        {.name = "emainplace_rowwise_adagrad", .row1 = true, .eps = true, .decay = true, .decay_mode = true, .average = true},
    [PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER] =
        {.name = "rowwise_adagrad_with_counter", .row1 = true, .counter = true, .prev = true, .eps = true, .decay = true,
         .decay_mode = true},
};

const peri__optimizer_kind *peri__optimizer_kind_of(int32_t kind) { return &kinds[kind]; }

const char *peri__number_text(double x, char out[32])
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, x);
        if (strtod(out, NULL) == x) break;
    }
    return out;
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

/* -- states ---------------------------------------------------------------------------------------------------------------------- */

double peri__tbe_copies(const peri_tbe_optimizer *o) { return 1.0 + kinds[o->kind].full1 + kinds[o->kind].full2; }

int32_t peri__tbe_parts(const peri_tbe *tbe, peri_k_cache_part part[PERI_CACHE_PARTS])
{
    const peri__optimizer_kind *k = &kinds[tbe->optimizer.kind];
    const struct {
        peri_tensor *flat;
        bool row;
    } all[] = {{tbe->weight, false}, {tbe->momentum1, k->row1}, {tbe->momentum2, k->row2}, {tbe->row_counter, true},
               {tbe->prev_iter, true}};
    int32_t n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].flat)
            part[n++] = (peri_k_cache_part){
                .base = peri__data(all[i].flat), .bytes = (int32_t)peri_dtype_size(all[i].flat->dtype), .row = all[i].row};
    return n;
}

int32_t peri__tbe_part_dtype(const peri_tbe *tbe, int32_t part)
{
    if (part == 0) return tbe->dtype;
    return strcmp(peri_tbe_state_name(tbe, part), "prev_iter") ? PERI_F32 : PERI_I64;
}

const char *peri_tbe_state_name(const peri_tbe *tbe, int32_t i)
{
    const char *names[] = {"weight", tbe->momentum1 ? "momentum1" : NULL, tbe->momentum2 ? "momentum2" : NULL,
                           tbe->row_counter ? "row_counter" : NULL, tbe->prev_iter ? "prev_iter" : NULL,
                           tbe->preconditioner ? "preconditioner" : NULL, tbe->max_counter ? "max_counter" : NULL};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        if (names[n] && i-- == 0) return names[n];
    return NULL;
}

int64_t peri__tbe_squares(const peri_tbe *tbe, int64_t table)
{
    int64_t n = 0;
    for (int64_t t = 0; t < table; t++) n += tbe->layout[t].cols * tbe->layout[t].cols;
    return n;
}
