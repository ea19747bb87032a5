/* SPDX-License-Identifier: Apache-2.0
 *
 * head.c: what a map counts, on its way from the device; rows that changed.
 */
#include "collision_internal.h"

peri_status peri__collision_set(peri_collision *c, int32_t word, int64_t value)
{
    return peri__copy(c->device, c->map.head + word, &value, sizeof value, PERI_COPY_H2D);
}

peri_status peri__collision_report(peri_collision *c)
{
    peri__report *next;
    PERI_TRY(peri__report_take(c->device, PERI_COLLISION_WORDS, &next));
    peri_status status = peri__report_post(next, c->map.head, PERI_COLLISION_WORDS);
    if (status < 0) {
        peri__report_return(next);
        return status;
    }
    peri__report_return(c->report); /* one that has not come yet says less than this one */
    c->report = next;
    c->report_logged = 0;
    return PERI_OK;
}

peri_status peri__collision_seen(peri_collision *c, bool wait)
{
    if (!c->report) return PERI_OK;
    peri_status status = wait ? peri__report_wait(c->report) : peri__report_test(c->report);
    if (status != PERI_OK) return status;
    memcpy(c->words, c->report->words, sizeof c->words);
    if (c->report_logged >= 0) c->logged = c->words[PERI_COLLISION_LOGGED] + c->report_logged;
    peri__report_return(c->report);
    c->report = NULL;
    return PERI_OK;
}

peri_status peri_collision_statistics(peri_collision *c, peri_collision_stats *out)
{
    PERI_NEED(c);
    PERI_NEED(out);
    PERI_TRY(peri__collision_seen(c, false));
    const int64_t *w = c->words;
    const peri_collision_stats now = {.ids = w[PERI_COLLISION_IDS],
                                      .hits = w[PERI_COLLISION_HITS],
                                      .missed = w[PERI_COLLISION_MISSED],
                                      .inserted = w[PERI_COLLISION_INSERTED],
                                      .evicted = w[PERI_COLLISION_EVICTED],
                                      .collisions = w[PERI_COLLISION_COLLISIONS],
                                      .occupied = w[PERI_COLLISION_OCCUPIED],
                                      .rows = c->rows,
                                      .iterations = c->iteration};
    return PERI_GIVE(peri_collision_stats, out, &now);
}

peri_status peri_collision_evicted(peri_collision *c, peri_tensor **out)
{
    PERI_NEED(c);
    PERI_NEED(out);
    *out = NULL;
    if (!c->may_have_changed) return PERI_OK;
    PERI_TRY(peri__collision_seen(c, true));
    int64_t n = c->words[PERI_COLLISION_CHANGED], buckets = c->config.n_buckets;
    if (n > 0) {
        peri_tensor *rows, *before = NULL;
        PERI_TRY(peri_tensor_new(c->device, PERI_I64, 1, &n, &rows));
        peri_status status = peri_tensor_new(c->device, PERI_I64, 1, &buckets, &before);
        if (status >= 0) status = peri_tensor_copy(before, c->n_changed);
        if (status >= 0) {
            peri_k_collision_changed_args args = {
                .map = c->map, .out = peri__data(rows), .n_before = peri__data(before)};
            status = PERI_LAUNCH(c->device, collision_changed, &args, buckets, 1);
        }
        if (status >= 0) status = peri__collision_report(c);
        peri_tensor_release(before);
        if (status < 0) {
            peri_tensor_release(rows);
            return status;
        }
        *out = rows;
    }
    c->may_have_changed = false;
    return PERI_OK;
}
