/* SPDX-License-Identifier: Apache-2.0
 *
 * bounds_check.c: bounds checks of ids and offsets, and the sentences that they turn into.
 */
#include "embed_internal.h"

#include <stdio.h>

peri_status peri__report_reset(peri_tensor *report)
{
    peri_k_tbe_report empty = {.first_item = INT64_MAX, .first_bag = INT64_MAX};
    return peri__copy(peri__device(report), peri__data(report), &empty, sizeof empty, PERI_COPY_H2D);
}

/** "table 't', feature 'f', sample 3" */
static void where_text(char *text, size_t len, const char *table, const char *feature, int64_t sample)
{
    if (feature)
        snprintf(text, len, "table '%.120s', feature '%.120s', sample %lld", table ? table : "?", feature,
                 (long long)sample);
    else snprintf(text, len, "table '%.120s', sample %lld", table ? table : "?", (long long)sample);
}

/** The words for inverse indices that name no row of a feature. */
static peri_status inverse_status(const char *function, const char *feature, const peri_k_tbe_report *r)
{
    char allowed[64] = "but the feature has no bags";
    if (r->rows > 0) snprintf(allowed, sizeof allowed, "allowed: 0..%lld, or -1 for zeros", (long long)r->rows - 1);
    return peri__fail(PERI_ERANGE, "%s: feature '%.120s', sample %lld: inverse index %lld, %s (%lld such indices)",
                      function, feature ? feature : "?", (long long)r->sample, (long long)r->id, allowed,
                      (long long)r->bad_ids);
}

/** The words for offsets that make no bag. */
static peri_status bags_status(const char *function, const char *where, const peri_k_tbe_report *r)
{
    return peri__fail(PERI_ERANGE, "%s: %s: offsets %lld and %lld make no bag of %lld ids (%lld such bags)", function,
                      where, (long long)r->begin, (long long)r->end, (long long)r->n_ids, (long long)r->bad_bags);
}

/** @table, @feature: names, or NULL. */
static peri_status bounds_status(const char *function, int32_t mode, const char *table, const char *feature,
                             const peri_k_tbe_report *r)
{
    char where[320], what[PERI_MESSAGE_MAX];
    if ((!r->bad_ids && !r->bad_bags) || mode == PERI_BOUNDS_IGNORE || mode == PERI_BOUNDS_NONE) return PERI_OK;
    where_text(where, sizeof where, table, feature, r->sample);
    if (r->bad_bags) return bags_status(function, where, r);
    if (r->rows > 0)
        snprintf(what, sizeof what,
                 "%s: %s: id %lld at place %lld of the bag, allowed: 0..%lld, or -1 for none (%lld such ids)", function,
                 where, (long long)r->id, (long long)r->place, (long long)r->rows - 1, (long long)r->bad_ids);
    else
        snprintf(
            what, sizeof what,
            "%s: %s: id %lld at place %lld of the bag, allowed: -1 for none, the table has no rows (%lld such ids)",
            function, where, (long long)r->id, (long long)r->place, (long long)r->bad_ids);
    if (mode == PERI_BOUNDS_FATAL) return peri__fail(PERI_ERANGE, "%s", what);
    peri__log(PERI_LOG_WARN, "%s", what);
    return PERI_OK;
}

/** Names of a report's table and feature; NULL where it says none. */
static const char *report_table(const peri_tbe *tbe, const peri_k_tbe_report *r)
{
    return r->table >= 0 && r->table < tbe->n_tables ? tbe->tables[r->table].name : NULL;
}
static const char *report_feature(const peri_tbe *tbe, const peri_k_tbe_report *r)
{
    return r->feature >= 0 && r->feature < tbe->n_features ? tbe->features[r->feature] : NULL;
}

peri_status peri__tbe_bags_status(const peri_tbe *tbe, const char *function, const peri_k_tbe_report *r)
{
    char where[320];
    where_text(where, sizeof where, report_table(tbe, r), report_feature(tbe, r), r->sample);
    return bags_status(function, where, r);
}

peri_status peri__matrix_status(const char *table, const char *function, const peri_k_tbe_report *r)
{
    return bounds_status(function, PERI_BOUNDS_FATAL, table, NULL, r);
}

peri_status peri__tbe_status(const peri_tbe *tbe, const char *function, const peri_k_tbe_report *r)
{
    if (!r->bad_ids && !r->bad_bags) return PERI_OK;
    const char *table = report_table(tbe, r), *feature = report_feature(tbe, r);
    if (tbe->of_inverse && !r->bad_bags) return inverse_status(function, table, r);
    return bounds_status(function, tbe->bounds_check, table, feature, r);
}
