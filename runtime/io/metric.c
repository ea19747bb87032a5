/* SPDX-License-Identifier: Apache-2.0
 *
 * metric.c: sums over samples and the areas that need them sorted.
 */
#include "internal.h"

#include <stdlib.h>

static const double eta = 1e-12; /* predictions are kept this far from 0 and 1 */

static peri_status check(const char *function, const peri_metric_samples *s)
{
    if (s->n < 0 || s->n > IO_MAX_IDS) return peri__fail(PERI_EINVAL, "%s: %lld samples", function, (long long)s->n);
    if (s->n > 0 && (!s->predictions || !s->labels)) return peri__fail(PERI_EINVAL, "%s: no predictions or no labels", function);
    for (int64_t i = 0; i < s->n; i++)
        if (isnan(s->predictions[i]) || isnan(s->labels[i]) || (s->weights && isnan(s->weights[i])))
            return peri__fail(PERI_EINVAL, "%s: sample %lld: prediction %g, label %g, weight %g: not a number", function, (long long)i,
                              s->predictions[i], s->labels[i], s->weights ? s->weights[i] : 1.0);
    return PERI_OK;
}

peri_status peri_metric_add(const peri_metric_samples *s, double threshold, peri_metric_sums *t)
{
    PERI_NEED(s);
    PERI_NEED(t);
    PERI_TRY(check("peri_metric_add", s));
    for (int64_t i = 0; i < s->n; i++) {
        double p = s->predictions[i], y = s->labels[i], w = s->weights ? s->weights[i] : 1;
        double kept = p < eta ? eta : p > 1 - eta ? 1 - eta : p;
        double positive = -y * log2(kept), entropy = positive - (1 - y) * log2(1 - kept);
        bool high = p >= threshold;
        t->n += 1;
        t->weight += w;
        t->label += w * y;
        t->prediction += w * p;
        t->plain_label += y;
        t->cross_entropy += w * entropy;
        t->positive_cross_entropy += w * positive;
        t->plain_cross_entropy += entropy;
        t->square_error += w * (p - y) * (p - y);
        t->absolute_error += w * fabs(p - y);
        t->ones_square_error += w * (1 - y) * (1 - y);
        t->correct += high == y ? w : 0;
        t->true_positive += high ? w * y : 0;
        t->false_positive += high ? w * (1 - y) : 0;
        t->false_negative += high ? 0 : w * y;
    }
    return PERI_OK;
}

/* -- areas ------------------------------------------------------------------------------------------------------------------------- */

typedef struct sample {
    double prediction, label, weight;
} sample;

static int by_prediction(const void *a, const void *b)
{
    const sample *x = a, *y = b;
    if (x->prediction != y->prediction) return x->prediction < y->prediction ? -1 : 1;
    return x->label < y->label ? -1 : x->label > y->label;
}

/** The samples by rising prediction, those of equal prediction by rising label. @out new, peri__free. */
static peri_status sorted(const char *function, const peri_metric_samples *s, sample **out)
{
    PERI_TRY(check(function, s));
    sample *list = peri__alloc(sizeof *list * (size_t)peri__max(s->n, 1));
    if (!list) return PERI_ENOMEM;
    for (int64_t i = 0; i < s->n; i++) list[i] = (sample){s->predictions[i], s->labels[i], s->weights ? s->weights[i] : 1};
    qsort(list, (size_t)s->n, sizeof *list, by_prediction);
    *out = list;
    return PERI_OK;
}

/** Weights of positives and negatives of the samples from *at on that share a prediction; *at moves behind them. */
static void group(const sample *list, int64_t n, int64_t *at, double *positive, double *negative)
{
    double p = list[*at].prediction;
    *positive = *negative = 0;
    for (; *at < n && list[*at].prediction == p; ++*at) {
        *positive += list[*at].weight * list[*at].label;
        *negative += list[*at].weight * (1 - list[*at].label);
    }
}

peri_status peri_metric_auc(const peri_metric_samples *s, double *out)
{
    PERI_NEED(s);
    PERI_NEED(out);
    sample *list;
    PERI_TRY(sorted("peri_metric_auc", s, &list));
    double below = 0, positives = 0, area = 0, p, n; /* below: weight of negatives with a lower prediction */
    for (int64_t i = 0; i < s->n;) {
        group(list, s->n, &i, &p, &n);
        area += p * (below + n / 2);
        below += n;
        positives += p;
    }
    peri__free(list);
    *out = positives * below == 0 ? 0.5 : area / (positives * below);
    return PERI_OK;
}

peri_status peri_metric_auprc(const peri_metric_samples *s, double *out)
{
    PERI_NEED(s);
    PERI_NEED(out);
    sample *list;
    PERI_TRY(sorted("peri_metric_auprc", s, &list));
    double above = 0, positives = 0, area = 0; /* above: weight of all samples with at least this prediction */
    for (int64_t i = s->n - 1; i >= 0;) {
        double gain = 0, p = list[i].prediction;
        for (; i >= 0 && list[i].prediction == p; i--) {
            gain += list[i].weight * list[i].label;
            above += list[i].weight;
        }
        positives += gain;
        if (above > 0) area += gain * positives / above;
    }
    peri__free(list);
    *out = positives > 0 ? area / positives : 0;
    return PERI_OK;
}

/** Merge sort of @x[n] with @scratch[n]; returns the pairs i < j with x[i] > x[j]. */
static int64_t inversions(double *x, int64_t n, double *scratch)
{
    int64_t count = 0;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t low = 0; low < n; low += 2 * width) {
            int64_t middle = peri__min(low + width, n), high = peri__min(low + 2 * width, n), i = low, j = middle, k = low;
            while (i < middle && j < high) {
                if (x[j] < x[i]) {
                    count += middle - i;
                    scratch[k++] = x[j++];
                } else scratch[k++] = x[i++];
            }
            while (i < middle) scratch[k++] = x[i++];
            while (j < high) scratch[k++] = x[j++];
        }
        memcpy(x, scratch, sizeof *x * (size_t)n);
    }
    return count;
}

peri_status peri_metric_rauc(const peri_metric_samples *s, double *out)
{
    PERI_NEED(s);
    PERI_NEED(out);
    sample *list;
    PERI_TRY(sorted("peri_metric_rauc", s, &list));
    double *labels = peri__alloc(sizeof *labels * 2 * (size_t)peri__max(s->n, 1));
    if (labels) {
        for (int64_t i = 0; i < s->n; i++) labels[i] = list[i].label;
        *out = 1 - (double)inversions(labels, s->n, labels + s->n) / ((double)s->n * (double)(s->n - 1) / 2);
    }
    peri__free(list);
    peri__free(labels);
    return labels ? PERI_OK : PERI_ENOMEM;
}

peri_status peri_metric_xauc(const peri_metric_samples *s, double *right, double *pairs)
{
    PERI_NEED(s);
    PERI_NEED(right);
    PERI_NEED(pairs);
    PERI_TRY(check("peri_metric_xauc", s));
    double good = 0, all = 0;
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t j = i + 1; j < s->n; j++) {
            double w = s->weights ? s->weights[i] * s->weights[j] : 1;
            double p = s->predictions[i] - s->predictions[j], y = s->labels[i] - s->labels[j];
            all += w;
            if ((p > 0 && y > 0) || (p < 0 && y < 0) || (p == 0 && y == 0)) good += w;
        }
    *right = good;
    *pairs = all;
    return PERI_OK;
}
