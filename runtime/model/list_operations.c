/* SPDX-License-Identifier: Apache-2.0
 *
 * list_operations.c: operations on the members of lists, of which each sample has as many as it pleases.
 * docs/model_file.md says what each does.
 */
#include "../../kernels/sequence.h"
#include "run.h"

/** Which members each sample has: [samples + 1]; of the list that @v is of. */
static const int64_t *offsets_of(const run *r, const peri__model_value *v)
{
    return peri__model_list_of(r->c, v->list);
}
static const peri__model_value *result_value(const run *r) { return &r->c->model->values[r->o->out]; }

int64_t peri__model_block_of(const peri_model_context *c, int64_t first, int64_t batch, const peri_model_values *inputs)
{
    const peri_model *m = c->model;
    int64_t n = peri__min(c->block, batch - first);
    for (int32_t l = 0; l < m->n_lists; l++) {
        const int64_t *offsets = m->lists[l].n_inputs > 0 ? inputs[m->lists[l].first].offsets : NULL;
        while (n > 1 && offsets && offsets[first + n] - offsets[first] > PERI__MODEL_MEMBERS) n--;
    }
    return n;
}

void peri__run_members(const run *r)
{
    const lists all = peri__model_lists(r, r->o->bags);
    const int64_t begin = all.offsets[0], count = all.offsets[all.n] - begin;
    /* as one list, each row where its member is; maps have room for max_ids */
    for (int64_t at = 0, n; at < count; at += n) {
        const int64_t offsets[2] = {0, n = peri__min(count - at, r->c->max_ids)};
        const lists l = {.ids = all.ids + begin + at,
                         .offsets = offsets,
                         .n = 1,
                         .rows = all.rows,
                         .out = r->out + at * r->columns,
                         .out_stride = r->columns,
                         .pooling = PERI_POOLING_NONE};
        peri__model_look_up(r, r->o->bags, &l);
    }
}

void peri__run_spread(const run *r)
{
    const int64_t *offsets = offsets_of(r, result_value(r));
    const float *x = in(r, 0);
    for (int64_t b = 0; b < r->samples; b++, x += r->columns)
        for (int64_t i = offsets[b]; i < offsets[b + 1]; i++)
            memcpy(r->out + i * r->columns, x, sizeof *x * (size_t)r->columns);
}

/** A sum of members is that of a bag whose ids are the members' own numbers, in a table that their numbers are. */
void peri__run_pool(const run *r)
{
    const int64_t *offsets = offsets_of(r, value_in(r, 0)), n = offsets[r->samples];
    const peri__model_rows rows = {.format = PERI_F32, .stride = r->columns};
    int64_t *ids = (int64_t *)(void *)r->c->scratch;
    for (int64_t i = 0; i < n; i++) ids[i] = i;
    const lists l = {.ids = ids,
                     .offsets = offsets,
                     .n = r->samples,
                     .rows = n,
                     .out = r->out,
                     .out_stride = r->columns,
                     .pooling = r->o->code == 0 ? PERI_POOLING_SUM : PERI_POOLING_MEAN};
    peri__model_rows_of(r, &rows, in(r, 0), r->columns, &l);
}

/** The numbers of targets at value @i as the kernels take them, in @room; NULL: there are none. The caller's are whole
 *  numbers, as far as lists are long; a stranger's file may have computed anything. */
static const int64_t *targets_of(const run *r, int32_t i, int64_t *room)
{
    if (r->o->n_in <= i) return NULL;
    for (int64_t b = 0; b < r->samples; b++) {
        const float x = in(r, i)[b];
        room[b] = x > 0 ? (int64_t)(x < 0x1p40f ? x : 0x1p40f) : 0;
    }
    return room;
}

void peri__run_attention(const run *r)
{
    const int64_t *s = r->o->sizes;
    int64_t *room = (int64_t *)(void *)r->c->scratch;
    const peri_k_attention_args args = {.out = r->out,
                                        .lse = r->c->scratch + 2 * r->c->block,
                                        .q = in(r, 0),
                                        .k = in(r, 1),
                                        .v = in(r, 2),
                                        .offsets = offsets_of(r, result_value(r)),
                                        .targets = targets_of(r, 3, room),
                                        .rows = r->n,
                                        .sequences = r->samples,
                                        .heads = s[0],
                                        .dim = s[1],
                                        .v_dim = s[2],
                                        .q_stride = s[0] * s[1],
                                        .k_stride = s[0] * s[1],
                                        .v_stride = s[0] * s[2],
                                        .window = s[3],
                                        .contextual = r->o->n_sizes >= 7 ? s[6] : 0,
                                        .full = r->o->n_sizes >= 8 ? s[7] : 0,
                                        .alpha = r->o->numbers[0],
                                        .scale = r->o->numbers[1],
                                        .dtype = PERI_F32,
                                        .causal = s[4] != 0,
                                        .form = r->o->code == 0 ? PERI_ATTENTION_SOFTMAX : PERI_ATTENTION_SILU};
    CALL(r, attention, &args, s[0] * r->n);
}

static void as_numbers(const run *r, const int64_t *whole)
{
    for (int64_t i = 0; i < r->n; i++) r->out[i] = (float)whole[i];
}

void peri__run_places(const run *r)
{
    int64_t *whole = (int64_t *)(void *)r->c->scratch;
    const peri_k_sequence_positions_args args = {.out = whole,
                                                 .offsets = offsets_of(r, result_value(r)),
                                                 .targets = targets_of(r, 0, whole + r->c->members),
                                                 .sequences = r->samples,
                                                 .most = r->o->sizes[0]};
    CALL(r, sequence_positions, &args, r->n);
    as_numbers(r, whole);
}

void peri__run_times(const run *r)
{
    int64_t *whole = (int64_t *)(void *)r->c->scratch;
    const peri_model_values *v = &r->inputs[r->o->input];
    const peri_k_time_buckets_args args = {.out = whole,
                                           .times = v->ids + v->offsets[r->first],
                                           .offsets = offsets_of(r, result_value(r)),
                                           .sequences = r->samples,
                                           .most = r->o->sizes[0],
                                           .increment = r->o->numbers[0],
                                           .dtype = PERI_I64,
                                           .log = r->o->code == 1};
    CALL(r, time_buckets, &args, r->n);
    as_numbers(r, whole);
}

/** Rows of a constant, by numbers without their fractions, as whole numbers are made of f32; a number that no row has
 *  (a stranger's file) gives zeros. */
void peri__run_take(const run *r)
{
    const int64_t rows = r->o->sizes[0], columns = r->o->sizes[1], n = r->n * in_columns(r, 0);
    for (int64_t i = 0; i < n; i++) {
        const float x = in(r, 0)[i];
        float *to = r->out + i * columns;
        if (x > -1 && x < (float)rows && (int64_t)x < rows)
            memcpy(to, in(r, 1) + (int64_t)x * columns, sizeof *to * (size_t)columns);
        else memset(to, 0, sizeof *to * (size_t)columns);
    }
}

void peri__run_select(const run *r)
{
    const int64_t *from = offsets_of(r, value_in(r, 0));
    int64_t *to = peri__model_list_of(r->c, result_value(r)->list), n = 0;
    for (int64_t b = 0; b < r->samples; b++) {
        to[b] = n;
        for (int64_t i = from[b]; i < from[b + 1]; i++)
            if (in(r, 1)[i] != 0)
                memcpy(r->out + n++ * r->columns, in(r, 0) + i * r->columns, sizeof(float) * (size_t)r->columns);
    }
    to[r->samples] = n;
}

/** Where sample @b's members begin that slice keeps, among its @n. */
static int64_t start_of(const run *r, int64_t b, int64_t n)
{
    const int64_t most = r->o->sizes[0];
    if (r->o->code == 1) return n > most ? n - most : 0;
    if (r->o->n_in < 2) return 0;
    const float x = in(r, 1)[b * in_step(r, 1)];
    return x > 0 ? (int64_t)(x < (float)n ? x : (float)n) : 0;
}

void peri__run_slice(const run *r)
{
    const int64_t *from = offsets_of(r, value_in(r, 0)), columns = r->columns;
    int64_t *to = peri__model_list_of(r->c, result_value(r)->list), n = 0;
    for (int64_t b = 0; b < r->samples; b++) {
        const int64_t members = from[b + 1] - from[b], start = peri__min(start_of(r, b, members), members),
                      kept = peri__min(members - start, r->o->sizes[0]);
        to[b] = n;
        if (kept > 0)
            memcpy(r->out + n * columns, in(r, 0) + (from[b] + start) * columns,
                   sizeof(float) * (size_t)(kept * columns));
        n += kept;
    }
    to[r->samples] = n;
}
