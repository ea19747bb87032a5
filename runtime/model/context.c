/* SPDX-License-Identifier: Apache-2.0
 *
 * context.c: the memory of one thread's calls, in one piece, planned before the first:
 *
 *     results of operations | scratch | zeros for missing lists | rows of raw ids, weights of places | lists | numbers
 *     for missing inputs
 *
 * A result lives from the operation that makes it to the last one that reads it. It takes the lowest place at which
 * nothing else lives meanwhile.
 */
#include "../../kernels/codes.h"
#include "../../kernels/dense.h"
#include "model_internal.h"

#include <stdlib.h>

/** A result that lives. */
typedef struct living {
    int64_t begin, end; /* bytes */
    int32_t last;       /* the last operation that reads it */
} living;

#define MOST_BYTES ((int64_t)1 << 46) /* that results may take */
enum { MOST_MEMBERS = 1 << 26 };

static int64_t align_bytes(int64_t bytes) { return peri__ceil_div(bytes, PERI__MODEL_ALIGN) * PERI__MODEL_ALIGN; }

/** Samples, or members of a list, that a value has room for. */
static int64_t value_units(const peri_model_context *c, const peri__model_value *v)
{
    return v->list < 0 ? c->block : c->members;
}

/** Put @bytes into the lowest gap among @live[n], which are in the order of their places; returns where it goes in that
 *  order. */
static int32_t place_result(const living *live, int32_t n, int64_t bytes, int64_t *begin)
{
    *begin = 0;
    int32_t i = 0;
    for (; i < n && live[i].begin - *begin < bytes; i++) *begin = live[i].end;
    return i;
}

/** Where each result lies (@at, from the start of the memory; -1: it is none), and how many bytes all of them take. */
static peri_status plan_results(const peri_model_context *c, int64_t *at, int64_t *bytes)
{
    const peri_model *m = c->model;
    living *live = peri__alloc(sizeof *live * (size_t)(m->n_operations + 1));
    int32_t n = 0;
    if (!live) return PERI_ENOMEM;
    *bytes = 0;
    for (int32_t v = 0; v < m->n_values; v++) at[v] = -1;
    for (int32_t i = 0; i < m->n_operations; i++) {
        int32_t kept = 0;
        for (int32_t k = 0; k < n; k++) /* what nobody reads any more goes */
            if (live[k].last >= i) live[kept++] = live[k];
        n = kept;
        const peri__model_value *v = &m->values[m->operations[i].out];
        living new = {.last = (int32_t)peri__max(v->last, i)};
        const int64_t size = align_bytes(v->columns * value_units(c, v) * 4);
        const int32_t where = place_result(live, n, size, &new.begin);
        new.end = new.begin + size;
        memmove(live + where + 1, live + where, sizeof *live * (size_t)(n - where));
        live[where] = new;
        n++;
        at[m->operations[i].out] = new.begin;
        *bytes = peri__max(*bytes, new.end);
        if (new.end > MOST_BYTES) { /* of a stranger's file: no sum of these overflows */
            peri__free(live);
            return peri__fail(PERI_ENOMEM, "peri_model_context_new: results of more than %lld bytes",
                              (long long)MOST_BYTES);
        }
    }
    peri__free(live);
    return PERI_OK;
}

/** f32 numbers that the hungriest operation needs beside its values. */
static int64_t scratch_numbers(const peri_model_context *c)
{
    const peri_model *m = c->model;
    int64_t most = 0;
    for (int32_t i = 0; i < m->n_operations; i++) {
        const peri__model_operation *o = &m->operations[i];
        int64_t n = 0;
        if (o->kind == PERI__MODEL_layer_norm) n = 2 * o->sizes[0] * value_units(c, &m->values[o->out]);
        if (o->kind == PERI__MODEL_attention) n = o->sizes[0] * c->members + 2 * c->block;
        if (o->kind == PERI__MODEL_pool || o->kind == PERI__MODEL_places || o->kind == PERI__MODEL_times)
            n = 2 * (c->members + c->block);
        if (o->kind == PERI__MODEL_matmul) n = peri_panel_size(o->sizes[2], o->sizes[3]) + o->sizes[1] * o->sizes[3];
        if (o->kind == PERI__MODEL_linear && o->products != PERI_F32)
            n = value_units(c, &m->values[o->out]) * (m->values[o->out].columns / o->sizes[1]) *
                (peri_codes_bytes(o->sizes[0], o->products) / 4);
        if (o->kind == PERI__MODEL_top) n = peri__model_top_scratch(m, o);
        if (o->kind == PERI__MODEL_order) n = peri__model_order_scratch(o, m->values[o->out].columns);
        if (o->kind == PERI__MODEL_extreme) n = peri__model_extreme_scratch(m->values[o->out].columns);
        if (o->kind == PERI__MODEL_cosine)
            n = peri__model_cosine_scratch(value_units(c, &m->values[o->out]) * m->values[o->out].columns);
        most = peri__max(most, n);
    }
    return most;
}

static peri_status allocate_context(peri_model_context *c)
{
    const peri_model *m = c->model;
    int64_t *at = peri__alloc(sizeof *at * (size_t)(m->n_values + 1)), results = 0;
    if (!at) return PERI_ENOMEM;
    peri_status status = plan_results(c, at, &results);
    const int64_t scratch = align_bytes(scratch_numbers(c) * 4), zeros = align_bytes((c->block + 1) * 8);
    const int64_t ids = peri__min(c->max_ids, INT64_MAX / 64),
                  rows = m->makes ? zeros + align_bytes(ids * 8) + align_bytes(ids * 4) : 0;
    const int64_t lists = align_bytes((c->block + 1) * 8 * m->n_lists);
    int64_t bytes = results + scratch + zeros + rows + lists;
    for (int32_t v = 0; v < m->n_values; v++) {
        const peri__model_value *value = &m->values[v];
        if (value->input < 0 || value->list >= 0 || !m->inputs[value->input].optional) continue;
        at[v] = bytes;
        bytes += align_bytes(value->columns * c->block * 4);
    }
    if (status >= 0) {
        c->memory = aligned_alloc(PERI__MODEL_ALIGN, (size_t)bytes);
        if (!c->memory)
            status = peri__fail(PERI_ENOMEM, "peri_model_context_new: no memory for %lld bytes", (long long)bytes);
    }
    if (status >= 0) {
        peri__mem_count(bytes);
        c->bytes = bytes;
        c->scratch = (float *)(c->memory + results);
        c->offsets = (int64_t *)(c->memory + results + scratch);
        if (rows > 0) c->moved = c->offsets + zeros / 8, c->rows = c->moved + zeros / 8;
        if (rows > 0) c->weights = (float *)(c->rows + align_bytes(ids * 8) / 8);
        c->lists = (int64_t *)(c->memory + results + scratch + zeros + rows);
        memset(c->offsets, 0, (size_t)zeros);
        for (int32_t v = 0; v < m->n_values; v++) c->values[v] = at[v] < 0 ? NULL : (float *)(c->memory + at[v]);
    }
    peri__free(at);
    return status;
}

/** What does not change from call to call: constants, and the numbers of missing inputs. */
static void fill_constants(peri_model_context *c)
{
    const peri_model *m = c->model;
    for (int32_t i = 0; i < m->n_values; i++) {
        const peri__model_value *v = &m->values[i];
        c->at[i] = v->section >= 0 ? peri__model_data(m, v->section) : c->values[i];
        for (int64_t k = 0; v->input >= 0 && c->values[i] && k < v->columns * c->block; k++)
            c->values[i][k] = m->inputs[v->input].missing;
    }
}

/** Members of the longest list that calls with up to @max_ids ids can have. */
static int64_t longest_list(const peri_model *m, int64_t max_ids)
{
    int64_t most = 0;
    for (int32_t l = 0; l < m->n_lists; l++) {
        const int64_t longest = m->longest[m->lists[l].first];
        most = peri__max(most, longest ? peri__min(longest, max_ids) : max_ids);
    }
    return most;
}

peri_status peri_model_context_new(peri_model *model, int64_t max_batch, int64_t max_ids, peri_model_context **out)
{
    PERI_NEED(model);
    PERI_NEED(out);
    if (max_batch < 1 || max_batch > INT32_MAX)
        return peri__fail(PERI_EINVAL, "peri_model_context_new: batches of up to %lld samples, allowed: 1..%d",
                          (long long)max_batch, INT32_MAX);
    if (max_ids < 0)
        return peri__fail(PERI_EINVAL,
                          "peri_model_context_new: lists of up to %lld ids, allowed: 1 and more, or 0 for %d",
                          (long long)max_ids, PERI__MODEL_IDS_MOST);
    if (max_ids > MOST_MEMBERS && model->n_lists > 0)
        return peri__fail(PERI_EINVAL,
                          "peri_model_context_new: lists of up to %lld ids, allowed with this model: up to %d",
                          (long long)max_ids, MOST_MEMBERS);
    peri_model_context *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    peri__object_count(1);
    peri_model_retain(c->model = model);
    c->max_batch = max_batch;
    c->max_ids = max_ids ? max_ids : PERI__MODEL_IDS_MOST;
    c->block = peri__min(max_batch, PERI__MODEL_BLOCK);
    c->members = peri__min(peri__max(longest_list(model, c->max_ids), PERI__MODEL_MEMBERS), MOST_MEMBERS);
    c->values = peri__alloc_zero(sizeof *c->values * (size_t)(model->n_values + 1));
    c->at = peri__alloc_zero(sizeof *c->at * (size_t)(model->n_values + 1));
    peri_status status = c->values && c->at ? allocate_context(c) : PERI_ENOMEM;
    if (status < 0) {
        peri_model_context_release(c);
        return status;
    }
    fill_constants(c);
    *out = c;
    return PERI_OK;
}

void peri_model_context_release(peri_model_context *context)
{
    if (!context || peri__border_refuses(__func__)) return;
    if (context->memory) peri__mem_count(-context->bytes);
    free(context->memory);
    peri__free(context->values);
    peri__free(context->at);
    peri_model_release(context->model);
    peri__free(context);
    peri__object_count(-1);
}

int64_t peri_model_context_bytes(const peri_model_context *context) { return context ? context->bytes : 0; }
