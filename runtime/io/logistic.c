/* SPDX-License-Identifier: Apache-2.0
 *
 * logistic.c: the baseline: logistic regression over ids and dense features, one sample at a time, Adagrad.
 */
#include "../base/floats.h"
#include "io_internal.h"

/** A weight and its sum of squared gradients, side by side: they are always used together. */
typedef struct weight {
    float w, s;
} weight;

struct peri_logistic {
    int32_t dense_features, sparse_features;
    double learning_rate, l2;
    int64_t *table_rows; /* [sparse_features] */
    int64_t *table_at;   /* [sparse_features] place of each table in `weights` */
    weight *weights;     /* tables, then the dense features, then the constant */
    int64_t dense_at;
    int64_t *cursor; /* [sparse_features] place in the batch's values */
};

peri_status peri_logistic_new(const peri_logistic_config *o, peri_logistic **out)
{
    PERI_TAKE(peri_logistic_config, o);
    PERI_NEED(out);
    const char *function = "peri_logistic_new";
    if (o->dense_features < 0 || o->dense_features > IO_MAX_FEATURES || o->sparse_features < 0 ||
        o->sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "%s: %d dense and %d sparse features, allowed: 0..%d", function,
                          o->dense_features, o->sparse_features, IO_MAX_FEATURES);
    if (!(o->learning_rate > 0 && isfinite(o->learning_rate)) || !(o->l2 >= 0 && isfinite(o->l2)))
        return peri__fail(PERI_EINVAL, "%s: learning rate %g (allowed: above 0), l2 %g (allowed: 0 or more)", function,
                          o->learning_rate, o->l2);
    PERI_TRY(peri__list_check(function, "table_rows", o->table_rows, o->sparse_features));
    int64_t n = 0;
    for (int32_t f = 0; f < o->sparse_features; f++) {
        if (o->table_rows[f] < 1 || o->table_rows[f] > IO_MAX_ROWS)
            return peri__fail(PERI_EINVAL, "%s: feature %d has a table of %lld rows, allowed: 1..2^31", function, f,
                              (long long)o->table_rows[f]);
        n += o->table_rows[f];
    }
    peri_logistic *m = peri__alloc_zero(sizeof *m);
    if (!m) return PERI_ENOMEM;
    peri__object_count(1);
    m->dense_features = o->dense_features;
    m->sparse_features = o->sparse_features;
    m->learning_rate = o->learning_rate;
    m->l2 = o->l2;
    m->dense_at = n;
    size_t features = (size_t)peri__max(o->sparse_features, 1);
    m->table_rows = peri__alloc(sizeof *m->table_rows * features);
    m->table_at = peri__alloc(sizeof *m->table_at * features);
    m->cursor = peri__alloc(sizeof *m->cursor * features);
    m->weights = peri__alloc_zero(sizeof *m->weights * (size_t)(n + o->dense_features + 1));
    if (!m->table_rows || !m->table_at || !m->cursor || !m->weights) {
        peri_logistic_release(m);
        return PERI_ENOMEM;
    }
    for (int32_t f = 0, at = 0; f < o->sparse_features; f++) {
        m->table_rows[f] = o->table_rows[f];
        m->table_at[f] = f ? m->table_at[f - 1] + m->table_rows[f - 1] : at;
    }
    *out = m;
    return PERI_OK;
}

void peri_logistic_release(peri_logistic *m)
{
    if (!m || peri__border_refuses(__func__)) return;
    peri__free(m->table_rows);
    peri__free(m->table_at);
    peri__free(m->cursor);
    peri__free(m->weights);
    peri__object_count(-1);
    peri__free(m);
}

/** Set the cursors to the start of each feature's ids; refuse batches with other features or with ids outside their
 *  tables. */
static peri_status start(const char *function, peri_logistic *m, const peri_batch *b)
{
    PERI_TRY(peri__batch_check(function, b, m->dense_features, m->sparse_features));
    int64_t at = 0;
    for (int32_t f = 0; f < m->sparse_features; f++) {
        m->cursor[f] = at;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t length = b->lengths[f * b->rows + i];
            if (length < 0 || at + length > b->ids)
                return peri__fail(PERI_EINVAL, "%s: feature %d, sample %lld: a bag of %lld ids at id %lld of %lld",
                                  function, f, (long long)i, (long long)length, (long long)at, (long long)b->ids);
            for (int64_t end = at + length; at < end; at++)
                if (b->values[at] < 0 || b->values[at] >= m->table_rows[f])
                    return peri__fail(PERI_ERANGE, "%s: feature %d, sample %lld: id %lld, allowed: 0..%lld", function,
                                      f, (long long)i, (long long)b->values[at], (long long)m->table_rows[f] - 1);
        }
    }
    return PERI_OK;
}

static double logit_of_row(const peri_logistic *m, const peri_batch *b, int64_t row)
{
    const float *x = b->dense + row * m->dense_features;
    const weight *dense = m->weights + m->dense_at;
    double z = dense[m->dense_features].w;
    for (int32_t d = 0; d < m->dense_features; d++) z += (double)dense[d].w * x[d];
    for (int32_t f = 0; f < m->sparse_features; f++) {
        const int64_t *ids = b->values + m->cursor[f];
        const weight *table = m->weights + m->table_at[f];
        for (int32_t k = 0; k < b->lengths[f * b->rows + row]; k++) z += table[ids[k]].w;
    }
    return z;
}

static void advance_cursors(peri_logistic *m, const peri_batch *b, int64_t row)
{
    for (int32_t f = 0; f < m->sparse_features; f++) m->cursor[f] += b->lengths[f * b->rows + row];
}

static inline void adagrad_update(const peri_logistic *m, weight *w, double gradient)
{
    float g = (float)(gradient + m->l2 * w->w);
    w->s += g * g;
    w->w -= (float)m->learning_rate * g / sqrtf(w->s + 1e-8f);
}

static void learn_row(peri_logistic *m, const peri_batch *b, int64_t row, double error)
{
    const float *x = b->dense + row * m->dense_features;
    weight *dense = m->weights + m->dense_at;
    adagrad_update(m, &dense[m->dense_features], error);
    for (int32_t d = 0; d < m->dense_features; d++) adagrad_update(m, &dense[d], error * x[d]);
    for (int32_t f = 0; f < m->sparse_features; f++) {
        const int64_t *ids = b->values + m->cursor[f];
        weight *table = m->weights + m->table_at[f];
        for (int32_t k = 0; k < b->lengths[f * b->rows + row]; k++) adagrad_update(m, &table[ids[k]], error);
    }
}

peri_status peri_logistic_train(peri_logistic *m, const peri_batch *b, double *loss)
{
    PERI__OWN_FLOATS;
    PERI_NEED(m);
    PERI_NEED(b);
    PERI_NEED(loss);
    PERI_TRY(start("peri_logistic_train", m, b));
    double sum = 0;
    for (int64_t row = 0; row < b->rows; row++) {
        double z = logit_of_row(m, b, row), y = b->labels[row];
        sum += log1p(exp(-fabs(z))) + (z > 0 ? z : 0) - y * z;
        learn_row(m, b, row, 1 / (1 + exp(-z)) - y);
        advance_cursors(m, b, row);
    }
    *loss = b->rows ? sum / (double)b->rows : 0;
    return PERI_OK;
}

peri_status peri_logistic_predict(peri_logistic *m, const peri_batch *b, float *out)
{
    PERI__OWN_FLOATS;
    PERI_NEED(m);
    PERI_NEED(b);
    PERI_NEED(out);
    PERI_TRY(start("peri_logistic_predict", m, b));
    for (int64_t row = 0; row < b->rows; row++) {
        out[row] = (float)(1 / (1 + exp(-logit_of_row(m, b, row))));
        advance_cursors(m, b, row);
    }
    return PERI_OK;
}
