/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c: bounds checks of ids and offsets, and the sentences that they turn into.
 */
#include "internal.h"

#include <stdio.h>

peri_status peri__report_reset(peri_tensor *report)
{
    peri_k_tbe_report empty = {.first_item = INT64_MAX, .first_bag = INT64_MAX};
    return peri__copy(peri__device(report), peri__data(report), &empty, sizeof empty, PERI_COPY_H2D);
}

/** "table 't', feature 'f', sample 3" */
static void where_text(char *text, size_t len, const char *table, const char *feature, int64_t sample)
{
    if (feature) snprintf(text, len, "table '%.120s', feature '%.120s', sample %lld", table ? table : "?", feature, (long long)sample);
    else snprintf(text, len, "table '%.120s', sample %lld", table ? table : "?", (long long)sample);
}

peri_status peri__report_status(const char *function, int32_t mode, const char *table, const char *feature, const peri_k_tbe_report *r)
{
    char where[320], what[PERI_MESSAGE_MAX];
    if ((!r->bad_ids && !r->bad_bags) || mode == PERI_BOUNDS_IGNORE || mode == PERI_BOUNDS_NONE) return PERI_OK;
    where_text(where, sizeof where, table, feature, r->sample);
    if (r->bad_bags)
        return peri__fail(PERI_ERANGE, "%s: %s: offsets %lld and %lld make no bag of %lld ids (%lld such bags)", function, where,
                          (long long)r->begin, (long long)r->end, (long long)r->n_ids, (long long)r->bad_bags);
    if (r->rows > 0)
        snprintf(what, sizeof what, "%s: %s: id %lld at place %lld of the bag, allowed: 0..%lld, or -1 for none (%lld such ids)", function,
                 where, (long long)r->id, (long long)r->place, (long long)r->rows - 1, (long long)r->bad_ids);
    else
        snprintf(what, sizeof what, "%s: %s: id %lld at place %lld of the bag, allowed: -1 for none, the table has no rows (%lld such ids)",
                 function, where, (long long)r->id, (long long)r->place, (long long)r->bad_ids);
    if (mode == PERI_BOUNDS_FATAL) return peri__fail(PERI_ERANGE, "%s", what);
    peri__log(PERI_LOG_WARN, "%s", what);
    return PERI_OK;
}

peri_status peri__tbe_status(const peri_tbe *tbe, const char *function, const peri_k_tbe_report *r)
{
    if (!r->bad_ids && !r->bad_bags) return PERI_OK;
    const char *table = r->table >= 0 && r->table < tbe->n_tables ? tbe->tables[r->table].name : NULL;
    const char *feature = r->feature >= 0 && r->feature < tbe->n_features ? tbe->features[r->feature] : NULL;
    return peri__report_status(function, tbe->bounds_check, table, feature, r);
}

/* -- checks away from the tables ------------------------------------------------------------------------------------------------- */

struct peri__check {
    peri_device *device;
    int64_t n, bags, total_bags;
    char **tables, **features;
    peri_tensor *layout, *blocks, *spans; /* device copies; layout has one table for each block */
};

static peri_status upload(peri_device *device, const void *data, int64_t bytes, peri_tensor **out)
{
    peri_tensor *t;
    PERI_TRY(peri_tensor_new(device, PERI_U8, 1, &bytes, &t));
    peri_status status = data ? peri__copy(device, peri__data(t), data, bytes, PERI_COPY_H2D) : PERI_OK;
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

peri_status peri__check_new(peri_device *device, const peri__check_block *blocks, int64_t n, peri__check **out)
{
    peri_k_tbe_table *layout = peri__alloc_zero(sizeof *layout * (size_t)peri__max(n, 1));
    peri_k_tbe_block *list = peri__alloc_zero(sizeof *list * (size_t)peri__max(n, 1));
    peri__check *c = peri__alloc_zero(sizeof *c);
    peri_status status = PERI_ENOMEM;
    if (!layout || !list || !c) goto out;
    c->device = device;
    c->tables = peri__alloc_zero(sizeof *c->tables * (size_t)peri__max(n, 1));
    c->features = peri__alloc_zero(sizeof *c->features * (size_t)peri__max(n, 1));
    if (!c->tables || !c->features) goto out;
    c->n = n;
    for (int64_t i = 0; i < n; i++) {
        c->tables[i] = peri__strdup(blocks[i].table);
        c->features[i] = peri__strdup(blocks[i].feature);
        if (!c->tables[i] || !c->features[i]) goto out;
        layout[i].rows = blocks[i].rows;
        list[i] = (peri_k_tbe_block){.first_bag = blocks[i].first_bag, .bags = blocks[i].bags, .table = (int32_t)i, .feature = (int32_t)i};
        c->bags = peri__max(c->bags, blocks[i].first_bag + blocks[i].bags);
        c->total_bags += blocks[i].bags;
    }
    PERI_TRY_GOTO(upload(device, layout, (int64_t)sizeof *layout * n, &c->layout), out);
    PERI_TRY_GOTO(upload(device, list, (int64_t)sizeof *list * n, &c->blocks), out);
    PERI_TRY_GOTO(upload(device, NULL, (int64_t)sizeof(peri_k_tbe_span) * (n + 1), &c->spans), out);
    *out = c;
    c = NULL;
    status = PERI_OK;
out:
    peri__check_free(c);
    peri__free(layout);
    peri__free(list);
    return status;
}

void peri__check_free(peri__check *c)
{
    if (!c) return;
    for (int64_t i = 0; i < c->n; i++) {
        peri__free(c->tables[i]);
        peri__free(c->features[i]);
    }
    peri_tensor_release(c->layout);
    peri_tensor_release(c->blocks);
    peri_tensor_release(c->spans);
    peri__free(c->tables);
    peri__free(c->features);
    peri__free(c);
}

peri_status peri__check_launch(peri__check *c, peri_tensor *ids, peri_tensor *offsets, peri_tensor *report)
{
    int64_t bags = peri__numel(offsets) - 1, n_ids = peri__numel(ids);
    if (bags < c->bags)
        return peri__fail(PERI_EINVAL, "peri__check_launch: offsets of %lld bags, at least %lld are needed", (long long)bags,
                          (long long)c->bags);
    peri_k_tbe_stream stream = {.ids = peri__data(ids),
                                .offsets = peri__data(offsets),
                                .tables = peri__data(c->layout),
                                .blocks = peri__data(c->blocks),
                                .spans = peri__data(c->spans),
                                .n_ids = n_ids,
                                .n_bags = bags,
                                .n_tables = c->n,
                                .n_blocks = c->n,
                                .capacity = INT64_MAX >> 8,
                                .ids_dtype = ids->dtype,
                                .offsets_dtype = offsets->dtype};
    peri_k_tbe_prepare_args prepare = {.stream = stream};
    peri_k_tbe_report_args describe = {.stream = stream, .report = peri__data(report)};
    int64_t chunks = peri__max(1, peri__min(256, (n_ids + c->total_bags) / 8192));
    peri_k_tbe_check_args check = {.stream = stream, .report = peri__data(report), .chunks = chunks};
    PERI_TRY(peri__report_reset(report));
    PERI_TRY(PERI_LAUNCH(c->device, tbe_prepare, &prepare, 1, 1));
    PERI_TRY(PERI_LAUNCH(c->device, tbe_check, &check, chunks, 8));
    return PERI_LAUNCH(c->device, tbe_report, &describe, 1, 1);
}

peri_status peri__check_status(const peri__check *c, const char *function, int32_t mode, const peri_k_tbe_report *r)
{
    if (!r->bad_ids && !r->bad_bags) return PERI_OK;
    bool known = r->block >= 0 && r->block < c->n;
    return peri__report_status(function, mode, known ? c->tables[r->block] : NULL, known ? c->features[r->block] : NULL, r);
}
