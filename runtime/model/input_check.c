/* SPDX-License-Identifier: Apache-2.0
 *
 * input_check.c: whether a model takes what a caller gives it.
 */
#include "model_internal.h"

#include <perilune/collision.h>

/** What is being checked. */
typedef struct checker {
    const char *function;
    const peri_model *m;
    const peri_model_input *input;
    const peri__model_rule *rule;    /* of the input */
    const peri_model_values *values; /* of all inputs */
    int64_t batch, max_ids;
} checker;

/** The first of @n numbers that is NaN or infinite; n: none is. */
static int64_t first_not_finite(const float *x, int64_t n)
{
    uint32_t any = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        any |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    if (!any) return n;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        if ((bits & 0x7f800000u) == 0x7f800000u) return i;
    }
    return n;
}

/** How many of @n ids have no row. */
static int64_t count_unknown(const int64_t *ids, int64_t n, int64_t rows)
{
    int64_t unknown = 0;
    for (int64_t i = 0; i < n; i++) unknown += (uint64_t)ids[i] >= (uint64_t)rows;
    return unknown;
}

/** Members of sample @b's list of input @i, whose values may be missing. */
static int64_t length_of(const checker *c, int32_t i, int64_t b)
{
    const int64_t *offsets = c->values[i].offsets;
    return offsets ? offsets[b + 1] - offsets[b] : 0;
}

/** Numbers that count members of a list. */
static peri_status check_counts(const checker *c, const peri_model_values *v)
{
    for (int64_t b = 0; b < c->batch; b++) {
        const int64_t most = length_of(c, c->rule->counts, b);
        if (!(v->dense[b] >= 0 && v->dense[b] <= (float)most && v->dense[b] == (float)(int64_t)v->dense[b]))
            return peri__fail(
                PERI_ERANGE,
                "%s: input '%s', sample %lld is %g, allowed: whole numbers 0..%lld, the length of its list '%s'",
                c->function, c->input->name, (long long)b, (double)v->dense[b], (long long)most,
                c->m->inputs[c->rule->counts].name);
    }
    return PERI_OK;
}

static peri_status check_dense(const checker *c, const peri_model_values *v)
{
    const int64_t columns = c->input->columns;
    if (v->ids || v->offsets || v->weights)
        return peri__fail(PERI_EINVAL, "%s: input '%s' is dense, %lld numbers a sample, but ids were given",
                          c->function, c->input->name, (long long)columns);
    if (!v->dense) return PERI_OK; /* optional */
    if (!c->input->finite) return PERI_OK;
    const int64_t i = first_not_finite(v->dense, c->batch * columns);
    if (i == c->batch * columns) return PERI_OK;
    return peri__fail(PERI_ERANGE, "%s: input '%s', sample %lld, number %lld is %s, allowed: finite numbers",
                      c->function, c->input->name, (long long)(i / columns), (long long)(i % columns),
                      v->dense[i] != v->dense[i] ? "NaN" : "infinite");
}

/** Ids and weights of one sample's list, when all of the batch are known to have a fault. */
static peri_status check_list(const checker *c, const peri_model_values *v, int64_t b)
{
    const bool numbers = c->input->kind == PERI_MODEL_NUMBERS;
    for (int64_t i = v->offsets[b]; i < v->offsets[b + 1]; i++) {
        if (!numbers && !c->input->mapped && c->input->unknown == PERI_MODEL_ID_REFUSE &&
            (uint64_t)v->ids[i] >= (uint64_t)c->input->rows)
            return peri__fail(PERI_ERANGE, "%s: input '%s', sample %lld: id %lld, allowed: 0..%lld", c->function,
                              c->input->name, (long long)b, (long long)v->ids[i], (long long)c->input->rows - 1);
        if (numbers && c->input->finite && first_not_finite(v->weights + i, 1) == 0)
            return peri__fail(PERI_ERANGE, "%s: input '%s', sample %lld, number %lld is %s, allowed: finite numbers",
                              c->function, c->input->name, (long long)b, (long long)(i - v->offsets[b]),
                              v->weights[i] != v->weights[i] ? "NaN" : "infinite");
        if (v->weights && c->input->finite && first_not_finite(v->weights + i, 1) == 0)
            return peri__fail(PERI_ERANGE,
                              "%s: input '%s', sample %lld: the weight of id %lld is %s, allowed: finite numbers",
                              c->function, c->input->name, (long long)b, (long long)v->ids[i],
                              v->weights[i] != v->weights[i] ? "NaN" : "infinite");
    }
    return PERI_OK;
}

/** The first raw id of the batch that @map refuses. */
static peri_status check_raw_list(const checker *c, const peri_model_values *v, const peri__model_map *map)
{
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t i = v->offsets[b]; i < v->offsets[b + 1]; i++) {
            const bool outside = !peri__model_map_allows(map, v->ids[i]);
            if (outside || (map->miss == PERI_MISS_ERROR && peri__model_map_find(c->m, map, &v->ids[i], 1, NULL) > 0))
                return peri__fail(PERI_ERANGE, "%s: input '%s', sample %lld: id %llu (as a signed number %lld) %s",
                                  c->function, c->input->name, (long long)b, (unsigned long long)v->ids[i],
                                  (long long)v->ids[i],
                                  outside ? "is outside of the range that the model's map was made for"
                                          : "has no row in the model's map, allowed: ids that it has learned");
        }
    return PERI_OK;
}

/** Raw ids. @unknown (or NULL): += those without a row of their own. */
static peri_status check_raw(const checker *c, const peri_model_values *v, int64_t *unknown)
{
    const int64_t n = v->offsets[c->batch];
    for (int32_t k = 0; k < c->m->n_mapped; k++) {
        if (&c->m->inputs[c->m->mapped[k].input] != c->input) continue;
        const peri__model_map *map = &c->m->maps[c->m->mapped[k].map];
        int64_t missed = unknown || map->miss == PERI_MISS_ERROR ? peri__model_map_find(c->m, map, v->ids, n, NULL) : 0;
        if (unknown) *unknown += missed;
        if ((map->miss == PERI_MISS_ERROR && missed > 0) || map->spread == PERI_SPREAD_RANGE)
            PERI_TRY(check_raw_list(c, v, map));
    }
    return PERI_OK;
}

static peri_status check_offsets(const checker *c, const peri_model_values *v)
{
    const int64_t longest = c->m->longest[c->input - c->m->inputs],
                  most = longest ? peri__min(longest, c->max_ids) : c->max_ids;
    if (v->offsets[0] != 0)
        return peri__fail(PERI_EINVAL, "%s: input '%s': its offsets begin with %lld, wanted: 0", c->function,
                          c->input->name, (long long)v->offsets[0]);
    for (int64_t b = 0; b < c->batch; b++) {
        const int64_t from = v->offsets[b], to = v->offsets[b + 1];
        if (to < from)
            return peri__fail(PERI_EINVAL, "%s: input '%s': the list of sample %lld begins at %lld and ends at %lld",
                              c->function, c->input->name, (long long)b, (long long)from, (long long)to);
        if (to - from > most)
            return peri__fail(PERI_ERANGE, "%s: input '%s', sample %lld: a list of %lld ids, allowed: up to %lld",
                              c->function, c->input->name, (long long)b, (long long)(to - from), (long long)most);
    }
    return PERI_OK;
}

/** Lists that are as long as those of another input, or have one length. */
static peri_status check_lengths(const checker *c, const peri_model_values *v)
{
    const peri_model_input *in = c->input;
    for (int64_t b = 0; b < c->batch && (c->rule->like >= 0 || c->rule->length > 0); b++) {
        const int64_t n = v->offsets ? v->offsets[b + 1] - v->offsets[b] : 0;
        const int64_t wanted = c->rule->like >= 0 ? length_of(c, c->rule->like, b) : c->rule->length;
        if (n == wanted) continue;
        return peri__fail(PERI_ERANGE, "%s: input '%s', sample %lld: a list of %lld, allowed: %lld%s%s%s", c->function,
                          in->name, (long long)b, (long long)n, (long long)wanted,
                          c->rule->like >= 0 ? ", the length of its list '" : "",
                          c->rule->like >= 0 ? c->m->inputs[c->rule->like].name : "", c->rule->like >= 0 ? "'" : "");
    }
    return PERI_OK;
}

static peri_status check_ids(const checker *c, const peri_model_values *v, int64_t *skipped)
{
    if (v->dense)
        return peri__fail(PERI_EINVAL, "%s: input '%s' is of ids, but dense numbers were given", c->function,
                          c->input->name);
    if (!v->offsets) {
        if (!v->ids && !v->weights) return PERI_OK; /* optional */
        return peri__fail(PERI_EINVAL, "%s: input '%s' has ids, but no offsets", c->function, c->input->name);
    }
    PERI_TRY(check_offsets(c, v));
    const int64_t n = v->offsets[c->batch];
    const bool numbers = c->input->kind == PERI_MODEL_NUMBERS;
    if (numbers && v->ids)
        return peri__fail(PERI_EINVAL, "%s: input '%s' is of numbers, but ids were given", c->function, c->input->name);
    if (n > 0 && !(numbers ? (const void *)v->weights : v->ids))
        return peri__fail(PERI_EINVAL, "%s: input '%s' has offsets, but no %s", c->function, c->input->name,
                          numbers ? "numbers" : "ids");
    if (n > 0 && !numbers && !v->weights != !c->input->weighted)
        return peri__fail(PERI_EINVAL, "%s: input '%s' %s", c->function, c->input->name,
                          c->input->weighted ? "wants a weight for each id, but there are none"
                                             : "has no weights, but some were given");
    if (c->input->kind == PERI_MODEL_WHOLE) return PERI_OK;
    int64_t unknown = 0;
    if (c->input->mapped) PERI_TRY(check_raw(c, v, skipped ? &unknown : NULL));
    else if (!numbers) unknown = count_unknown(v->ids, n, c->input->rows);
    const bool refused = !c->input->mapped && unknown > 0 && c->input->unknown == PERI_MODEL_ID_REFUSE;
    if (refused || (v->weights && c->input->finite && first_not_finite(v->weights, n) < n))
        for (int64_t b = 0; b < c->batch; b++) PERI_TRY(check_list(c, v, b));
    if (skipped) *skipped += unknown;
    return PERI_OK;
}

/** peri__model_values; after an error about an input, @input of @c is that one. */
static peri_status check_values(checker *c, int64_t *skipped)
{
    const char *function = c->function;
    const peri_model *m = c->m;
    const peri_model_values *inputs = c->values;
    const int64_t batch = c->batch;
    if (batch < 0) return peri__fail(PERI_EINVAL, "%s: %lld samples, allowed: 0 and more", function, (long long)batch);
    if (!inputs && m->n_inputs > 0) return peri__fail(PERI_EINVAL, "%s: inputs is missing", function);
    for (int32_t i = 0; i < m->n_inputs && batch > 0; i++) {
        const peri_model_values *v = &inputs[i];
        c->input = &m->inputs[i];
        if (v->spare[0] || v->spare[1])
            return peri__fail(PERI_EUNSUPPORTED,
                              "%s: the values of input '%s' say something that this library (" PERI_VERSION_TEXT
                              ") does not know",
                              function, m->inputs[i].name);
        if (!v->dense && !v->ids && !v->offsets && !v->weights && !c->input->optional)
            return peri__fail(PERI_EINVAL, "%s: input '%s' is missing", function, c->input->name);
        if (c->input->kind == PERI_MODEL_DENSE) PERI_TRY(check_dense(c, v));
        else PERI_TRY(check_ids(c, v, skipped));
    }
    for (int32_t i = 0; i < m->n_inputs && batch > 0; i++) { /* all lists are sound by now */
        c->input = &m->inputs[i];
        c->rule = &m->rules[i];
        if (c->input->kind != PERI_MODEL_DENSE) PERI_TRY(check_lengths(c, &inputs[i]));
        else if (c->rule->counts >= 0 && inputs[i].dense) PERI_TRY(check_counts(c, &inputs[i]));
    }
    return PERI_OK;
}

peri_status peri__model_values(const char *function, const peri_model *m, int64_t batch, int64_t max_ids,
                               const peri_model_values *inputs, int64_t *skipped)
{
    return check_values(
        &(checker){.function = function, .m = m, .values = inputs, .batch = batch, .max_ids = max_ids}, skipped);
}

int32_t peri__model_refused_input(const peri_model *m, int64_t batch, const peri_model_values *inputs)
{
    checker c = {.function = "peri_model_check", .m = m, .values = inputs, .batch = batch, .max_ids = INT64_MAX};
    return check_values(&c, NULL) < 0 && c.input ? (int32_t)(c.input - m->inputs) : -1;
}

peri_status peri_model_check(const peri_model *model, int64_t batch, const peri_model_values *inputs, int64_t *skipped)
{
    int64_t found = 0;
    PERI_NEED(model);
    PERI_TRY(peri__model_values("peri_model_check", model, batch, INT64_MAX, inputs, &found));
    if (skipped) *skipped += found;
    return PERI_OK;
}
