/* SPDX-License-Identifier: Apache-2.0
 *
 * run.h: one operation while it runs: what predict.c, list_operations.c and table_lookup.c share.
 */
#ifndef PERI_MODEL_RUN_H
#define PERI_MODEL_RUN_H

#include "../../kernels/work.h"
#include "model_internal.h"

/** One operation, and the samples that it is for. */
typedef struct peri__model_run_of {
    peri_model_context *c;
    const peri_kernels *kernels;
    const peri__model_operation *o;
    const peri_model_values *inputs;
    float *out;
    int64_t first, samples; /* of the call */
    int64_t n;              /* samples, or members of the list that `out` is of */
    int64_t columns;        /* of `out` */
} run;

#define CALL(r, name, args, range) ((r)->kernels->fn[PERI_K_##name]((args), 0, (range)))

static inline const float *in(const run *r, int32_t i) { return r->c->at[r->o->in[i]]; }
static inline const peri__model_value *value_in(const run *r, int32_t i) { return &r->c->model->values[r->o->in[i]]; }
static inline int64_t in_columns(const run *r, int32_t i) { return value_in(r, i)->columns; }
/** Numbers from one sample or member of input @i to the next: constants are the same for all. */
static inline int64_t in_step(const run *r, int32_t i) { return value_in(r, i)->section >= 0 ? 0 : in_columns(r, i); }

/** Some samples' lists of the ids of one bag. */
typedef struct lists {
    const int64_t *ids, *offsets; /* offsets: n + 1, of places in `ids` and `weights` */
    const float *weights;
    int64_t n, rows; /* samples; ids below `rows` have a row, others count as zeros */
    float *out;      /* of the first sample, or (PERI_POOLING_NONE) of the first id */
    int64_t out_stride;
    int32_t pooling;
} lists;

/* table_lookup.c */

/** The lists of a bag's input. */
lists peri__model_lists(const run *r, const peri__model_bag *bag);
/** Ask memory for the first rows of a bag's lists, up to @most bytes; returns how many these are. Of raw ids, whose
 *  rows are not known yet, none. */
int64_t peri__model_ask_for(const run *r, const peri__model_bag *bag, int64_t most);
/** The rows of lists, added up or not; with a map, or weights of places, as the bag says. */
void peri__model_look_up(const run *r, const peri__model_bag *bag, const lists *all);
/** Rows that lie at @data, as @table says, of @l. */
void peri__model_rows_of(const run *r, const peri__model_rows *rows, const void *data, int64_t columns, const lists *l);

/** Operations of members of lists (list_operations.c). */
#define X(name, least, most) void peri__run_##name(const run *r);
PERI__MODEL_OF_MEMBERS(X)
#undef X

#endif
