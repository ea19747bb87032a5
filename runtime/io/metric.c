/* SPDX-License-Identifier: Apache-2.0
 *
 * metric.c: sums over samples and the areas that need them sorted.
 */
#include "../base/floats.h"
#include "io_internal.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

static const double eta = 1e-12; /* predictions are kept this far from 0 and 1 */

static bool is_probability(double x) { return x >= 0 && x <= 1; }

/** Not a number has a sign that nobody wants to read. */
static double plain(double x) { return isnan(x) ? (double)NAN : x; }

/** What is wrong with the prediction @p for @needs; NULL: nothing. */
static const char *wrong_prediction(double p, int32_t needs)
{
    if (isnan(p)) return "not a number";
    if ((needs & PERI_METRIC_PROBABILITIES) && !is_probability(p))
        return "allowed: probabilities, 0..1 (of a logit x it is 1 / (1 + exp(-x)))";
    if ((needs & PERI_METRIC_RATES) && !(p >= 0 && !isinf(p)))
        return "allowed: finite numbers, 0 or more (of a logit x it is 1 / (1 + exp(-x)))";
    if ((needs & PERI_METRIC_FINITE) && isinf(p)) return "allowed: finite numbers";
    return NULL;
}

/** What is wrong with the label @y; NULL: nothing. */
static const char *wrong_label(double y, int32_t needs)
{
    if (isnan(y)) return "not a number";
    if ((needs & PERI_METRIC_LABELS_OF_CLASSES) && !is_probability(y))
        return "allowed: 0..1 (1: positive, 0: negative)";
    if ((needs & PERI_METRIC_LABELS_NOT_NEGATIVE) && !(y >= 0 && !isinf(y)))
        return "allowed: finite numbers, 0 or more";
    return isinf(y) ? "allowed: finite numbers" : NULL;
}

static peri_status check_samples(const char *function, const peri_metric_samples *s, int32_t needs)
{
    if (s->n < 0 || s->n > IO_MAX_IDS) return peri__fail(PERI_EINVAL, "%s: %lld samples", function, (long long)s->n);
    if (s->n > 0 && (!s->predictions || !s->labels))
        return peri__fail(PERI_EINVAL, "%s: no predictions or no labels", function);
    for (int64_t i = 0; i < s->n; i++) {
        const char *why = wrong_prediction(s->predictions[i], needs);
        if (why)
            return peri__fail(PERI_EINVAL, "%s: sample %lld: prediction %g, %s", function, (long long)i,
                              plain(s->predictions[i]), why);
        why = wrong_label(s->labels[i], needs);
        if (why) return peri__fail(PERI_EINVAL, "%s: sample %lld: label %g, %s", function, (long long)i,
                                   plain(s->labels[i]), why);
        if (s->weights && !(s->weights[i] >= 0 && !isinf(s->weights[i])))
            return peri__fail(PERI_EINVAL, "%s: sample %lld: weight %g, allowed: finite numbers, 0 or more", function,
                              (long long)i, plain(s->weights[i]));
    }
    return PERI_OK;
}

peri_status peri_metric_check(const peri_metric_samples *s, int32_t needs, const char *name)
{
    PERI__OWN_FLOATS;
    PERI_NEED(s);
    PERI_NEED(name);
    int32_t all = PERI_METRIC_FINITE | PERI_METRIC_PROBABILITIES | PERI_METRIC_RATES | PERI_METRIC_LABELS_OF_CLASSES |
                  PERI_METRIC_LABELS_NOT_NEGATIVE;
    if (needs & ~all)
        return peri__fail(PERI_EINVAL, "peri_metric_check: needs %d, allowed: flags PERI_METRIC_*", needs);
    return check_samples(name, s, needs);
}

peri_status peri_metric_add(const peri_metric_samples *s, double threshold, peri_metric_sums *t)
{
    PERI__OWN_FLOATS;
    PERI_NEED(s);
    PERI_NEED(t);
    if (isnan(threshold))
        return peri__fail(PERI_EINVAL, "peri_metric_add: threshold %g, allowed: numbers", plain(threshold));
    PERI_TRY(check_samples("peri_metric_add", s, PERI_METRIC_FINITE));
    for (int64_t i = 0; i < s->n; i++) {
        double p = s->predictions[i], y = s->labels[i], w = s->weights ? s->weights[i] : 1;
        double kept = p < eta ? eta : p > 1 - eta ? 1 - eta : p;
        double positive = is_probability(p) && is_probability(y) ? -y * log2(kept) : (double)NAN,
               entropy = positive - (1 - y) * log2(1 - kept);
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
        t->correct += w * (high ? y : 1 - y);
        t->true_positive += high ? w * y : 0;
        t->false_positive += high ? w * (1 - y) : 0;
        t->false_negative += high ? 0 : w * y;
    }
    return PERI_OK;
}

peri_status peri_metric_merge(const peri_metric_sums *part, peri_metric_sums *sums)
{
    PERI__OWN_FLOATS;
    enum { NUMBERS = sizeof *sums / sizeof(double) }; /* all members are */
    double a[NUMBERS], b[NUMBERS];
    PERI_NEED(part);
    PERI_NEED(sums);
    memcpy(a, part, sizeof a);
    memcpy(b, sums, sizeof b);
    for (int i = 0; i < NUMBERS; i++) b[i] += a[i];
    memcpy(sums, b, sizeof b);
    return PERI_OK;
}

/* -- functions of sums --------------------------------------------------------------------------------------------- */

static double ratio_or_zero(double a, double b) { return b == 0 ? 0 : a / b; }

/** Entropy of the base rate, times the samples: what normalizes an entropy. NaN without samples. */
static double base_entropy(double positive, double negative, double total)
{
    const double rate = fmin(fmax(positive / fmax(total, eta), eta), 1 - eta);
    return -positive * log2(rate) - negative * log2(1 - rate);
}

static double normalizer(const peri_metric_sums *s) { return base_entropy(s->label, s->weight - s->label, s->weight); }
static double ne(const peri_metric_sums *s) { return s->cross_entropy / normalizer(s); }
static double logloss(const peri_metric_sums *s) { return s->cross_entropy / fmax(s->weight, eta); }
static double ne_positive(const peri_metric_sums *s) { return s->positive_cross_entropy / normalizer(s); }
static double unweighted_ne(const peri_metric_sums *s)
{
    return s->plain_cross_entropy / base_entropy(s->plain_label, s->n - s->plain_label, s->n);
}
static double cali_free_ne(const peri_metric_sums *s)
{
    const double rate = s->prediction / s->weight;
    return ne(s) / (-s->label * log2(rate) - (s->weight - s->label) * log2(1 - rate));
}
static double calibration(const peri_metric_sums *s) { return s->label <= 0 ? 0 : s->prediction / s->label; }
static double label_average(const peri_metric_sums *s) { return ratio_or_zero(s->label, s->weight); }
static double prediction_average(const peri_metric_sums *s) { return ratio_or_zero(s->prediction, s->weight); }
static double weighted_avg(const peri_metric_sums *s) { return s->prediction / s->weight; }
static double num_positive_samples(const peri_metric_sums *s) { return s->label; }
static double sum_weights(const peri_metric_sums *s) { return s->weight; }
static double weighted_sum_predictions(const peri_metric_sums *s) { return s->prediction; }
static double mse(const peri_metric_sums *s) { return ratio_or_zero(s->square_error, s->weight); }
static double rmse(const peri_metric_sums *s) { return sqrt(mse(s)); }
/** 1 less the square error over that of the labels' mean. Labels less 1 have the same distances from their mean. 1 if
 *  all labels are equal, as TorchRec has it. */
static double r_squared(const peri_metric_sums *s)
{
    const double below_one = s->weight - s->label;
    const double labels_error = s->ones_square_error - ratio_or_zero(below_one * below_one, s->weight);
    return labels_error == 0 ? 1 : 1 - s->square_error / labels_error;
}
static double nmse(const peri_metric_sums *s) { return ratio_or_zero(s->square_error, s->ones_square_error); }
static double nrmse(const peri_metric_sums *s) { return sqrt(nmse(s)); }
static double mae(const peri_metric_sums *s) { return ratio_or_zero(s->absolute_error, s->weight); }
static double accuracy(const peri_metric_sums *s) { return ratio_or_zero(s->correct, s->weight); }
static double precision(const peri_metric_sums *s)
{
    return ratio_or_zero(s->true_positive, s->true_positive + s->false_positive);
}
static double recall(const peri_metric_sums *s)
{
    return ratio_or_zero(s->true_positive, s->true_positive + s->false_negative);
}

enum {
    FINITE = PERI_METRIC_FINITE, CLASSES = PERI_METRIC_LABELS_OF_CLASSES, ENTROPY = PERI_METRIC_PROBABILITIES | CLASSES,
    CALIBRATION = PERI_METRIC_RATES | PERI_METRIC_LABELS_NOT_NEGATIVE
};
static const struct metric {
    const char *name;
    double (*value)(const peri_metric_sums *s);
    int32_t needs;
} metrics[] = {{"ne", ne, ENTROPY},
               {"logloss", logloss, ENTROPY},
               {"ne_positive", ne_positive, ENTROPY},
               {"unweighted_ne", unweighted_ne, ENTROPY},
               {"cali_free_ne", cali_free_ne, ENTROPY},
               {"calibration", calibration, CALIBRATION},
               {"ctr", label_average, FINITE | CLASSES},
               {"label_average", label_average, FINITE},
               {"prediction_average", prediction_average, FINITE},
               {"weighted_avg", weighted_avg, FINITE},
               {"num_positive_samples", num_positive_samples, FINITE},
               {"sum_weights", sum_weights, FINITE},
               {"weighted_sum_predictions", weighted_sum_predictions, FINITE},
               {"mse", mse, FINITE},
               {"rmse", rmse, FINITE},
               {"r_squared", r_squared, FINITE},
               {"nmse", nmse, FINITE},
               {"nrmse", nrmse, FINITE},
               {"mae", mae, FINITE},
               {"accuracy", accuracy, ENTROPY},
               {"precision", precision, ENTROPY},
               {"recall", recall, ENTROPY}};
enum { METRICS = sizeof metrics / sizeof *metrics };

/** PERI_EINVAL lists the names. */
static peri_status metric_of(const char *function, const char *name, const struct metric **out)
{
    char all[512];
    int n = 0;
    for (int32_t i = 0; i < METRICS; i++) {
        if (strcmp(metrics[i].name, name) == 0) {
            *out = &metrics[i];
            return PERI_OK;
        }
        n += snprintf(all + n, sizeof all - (size_t)n, "%s%s", i ? ", " : "", metrics[i].name);
    }
    return peri__fail(PERI_EINVAL, "%s: metric '%.100s', allowed: %s", function, name, all);
}

const char *peri_metric_name(int32_t i) { return i >= 0 && i < METRICS ? metrics[i].name : NULL; }

int32_t peri_metric_needs(const char *name)
{
    const struct metric *m;
    PERI_NEED(name);
    PERI_TRY(metric_of("peri_metric_needs", name, &m));
    return m->needs;
}

peri_status peri_metric_value(const peri_metric_sums *sums, const char *name, double *out)
{
    PERI__OWN_FLOATS;
    const struct metric *m;
    PERI_NEED(sums);
    PERI_NEED(name);
    PERI_NEED(out);
    PERI_TRY(metric_of("peri_metric_value", name, &m));
    *out = m->value(sums);
    return PERI_OK;
}

/* -- areas --------------------------------------------------------------------------------------------------------- */

typedef struct sample {
    double prediction, label, weight;
} sample;

static int by_prediction(const void *a, const void *b)
{
    const sample *x = a, *y = b;
    if (x->prediction != y->prediction) return x->prediction < y->prediction ? -1 : 1;
    return x->label < y->label ? -1 : x->label > y->label;
}

/** Weights times 2^-this are at most 1, and the largest is 1/2 or more: products of two neither overflow nor vanish.
 *  0 without weights. */
static int exponent_of(const peri_metric_samples *s)
{
    double most = 0;
    int exponent = 0;
    for (int64_t i = 0; i < s->n && s->weights; i++) most = fmax(most, s->weights[i]);
    frexp(most, &exponent);
    return exponent;
}

/** The samples by rising prediction, those of equal prediction by rising label. Areas do not depend on the weights'
 *  scale, so a power of two makes the largest 1/2 to 1. @out new, peri__free. */
static peri_status sorted(const char *function, const peri_metric_samples *s, int32_t needs, sample **out)
{
    PERI_TRY(check_samples(function, s, needs));
    sample *list = peri__alloc(sizeof *list * (size_t)peri__max(s->n, 1));
    if (!list) return PERI_ENOMEM;
    int exponent = exponent_of(s);
    for (int64_t i = 0; i < s->n; i++)
        list[i] = (sample){s->predictions[i], s->labels[i], s->weights ? ldexp(s->weights[i], -exponent) : 1};
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
    PERI__OWN_FLOATS;
    PERI_NEED(s);
    PERI_NEED(out);
    sample *list;
    PERI_TRY(sorted("peri_metric_auc", s, PERI_METRIC_LABELS_OF_CLASSES, &list));
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
    PERI__OWN_FLOATS;
    PERI_NEED(s);
    PERI_NEED(out);
    sample *list;
    PERI_TRY(sorted("peri_metric_auprc", s, PERI_METRIC_LABELS_OF_CLASSES, &list));
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

/** A label and its weight; in a sorted run of them, also the weight of all before it in the run. */
typedef struct weighted {
    double label, weight, before;
} weighted;

/** Set `before` of x[low..high). Returns the weight of all. */
static double weigh(weighted *x, int64_t low, int64_t high)
{
    double sum = 0;
    for (int64_t i = low; i < high; i++) {
        x[i].before = sum;
        sum += x[i].weight;
    }
    return sum;
}

/** Merge sort of @x[n] by label, with @scratch[n]; returns the sum of w_i * w_j over the pairs i < j with label i >
 *  label j. */
static double inversions(weighted *x, int64_t n, weighted *scratch)
{
    double sum = 0;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t low = 0; low < n; low += 2 * width) {
            int64_t middle = peri__min(low + width, n), high = peri__min(low + 2 * width, n), i = low, j = middle,
                    k = low;
            double first = weigh(x, low, middle);
            while (i < middle && j < high) {
                if (x[j].label < x[i].label) {
                    sum += x[j].weight * (first - x[i].before);
                    scratch[k++] = x[j++];
                } else scratch[k++] = x[i++];
            }
            while (i < middle) scratch[k++] = x[i++];
            while (j < high) scratch[k++] = x[j++];
        }
        memcpy(x, scratch, sizeof *x * (size_t)n);
    }
    return sum;
}

/** The sum of w_i * w_j over all pairs i < j. */
static double all_pairs(const weighted *x, int64_t n)
{
    double sum = 0, before = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i].weight * before;
        before += x[i].weight;
    }
    return sum;
}

peri_status peri_metric_rauc(const peri_metric_samples *s, double *out)
{
    PERI__OWN_FLOATS;
    PERI_NEED(s);
    PERI_NEED(out);
    sample *list;
    PERI_TRY(sorted("peri_metric_rauc", s, 0, &list));
    weighted *x = peri__alloc(sizeof *x * 2 * (size_t)peri__max(s->n, 1));
    if (x) {
        for (int64_t i = 0; i < s->n; i++) x[i] = (weighted){.label = list[i].label, .weight = list[i].weight};
        double pairs = all_pairs(x, s->n);
        *out = pairs > 0 ? 1 - inversions(x, s->n, x + s->n) / pairs : (double)NAN;
    }
    peri__free(list);
    peri__free(x);
    return x ? PERI_OK : PERI_ENOMEM;
}

peri_status peri_metric_xauc(const peri_metric_samples *s, double *right, double *pairs)
{
    PERI__OWN_FLOATS;
    PERI_NEED(s);
    PERI_NEED(right);
    PERI_NEED(pairs);
    PERI_TRY(check_samples("peri_metric_xauc", s, PERI_METRIC_FINITE));
    double good = 0, all = 0;
    int exponent = exponent_of(s); /* products are taken of weights up to 1, as in areas */
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t j = i + 1; j < s->n; j++) {
            double w = s->weights ? ldexp(s->weights[i], -exponent) * ldexp(s->weights[j], -exponent) : 1;
            double p = s->predictions[i] - s->predictions[j], y = s->labels[i] - s->labels[j];
            all += w;
            if ((p > 0 && y > 0) || (p < 0 && y < 0) || (p == 0 && y == 0)) good += w;
        }
    *right = ldexp(good, 2 * exponent);
    *pairs = ldexp(all, 2 * exponent);
    if (isinf(*pairs) || (all > 0 && *pairs < DBL_MIN))
        return peri__fail(PERI_ERANGE,
                          "peri_metric_xauc: the products of two weights, of which the largest is below %g, sum up to "
                          "what a double does not hold; allowed: weights around 1, their scale changes nothing",
                          ldexp(1, exponent));
    return PERI_OK;
}
