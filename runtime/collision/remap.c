/* SPDX-License-Identifier: Apache-2.0
 *
 * remap.c: ids to rows: an iteration of a map.
 */
#include "collision_internal.h"

static const char f[] = "peri_collision_remap";

/** One call. */
typedef struct call {
    peri_collision *c;
    peri_tensor **ids;  /* i64, contiguous, by feature */
    int64_t *first;     /* places of their first ids, and the number of all */
    int32_t n;
    peri_tensor *rows;  /* of all ids */
} call;

static peri_status call_init(call *k, peri_collision *c, peri_tensor *const *ids, int32_t n)
{
    *k = (call){.c = c, .n = n};
    k->ids = peri__alloc_zero(((size_t)n + 1) * sizeof *k->ids);
    k->first = peri__alloc_zero(((size_t)n + 1) * sizeof *k->first);
    if (!k->ids || !k->first) return PERI_ENOMEM;
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri__check_ints(f, "ids", ids[i], -1, c->head));
        peri_tensor *flat;
        PERI_TRY(peri_tensor_contiguous(ids[i], &flat));
        peri_status status = peri_tensor_to(flat, PERI_I64, NULL, &k->ids[i]);
        peri_tensor_release(flat);
        PERI_TRY(status);
        k->first[i + 1] = k->first[i] + peri__numel(k->ids[i]);
    }
    return peri_tensor_new(c->device, PERI_I64, 1, &k->first[n], &k->rows);
}

static void call_fini(call *k)
{
    for (int32_t i = 0; i < k->n && k->ids; i++) peri_tensor_release(k->ids[i]);
    peri_tensor_release(k->rows);
    peri__free(k->ids);
    peri__free(k->first);
}

/** Fails with PERI_ERANGE: "id 7 (feature 0, place 3) @what". @place counts the ids of all features of the call; the
 *  message counts those of the feature. */
static peri_status bad_id(const call *k, int64_t place, const char *what)
{
    int32_t i = 0;
    int64_t id;
    while (place >= k->first[i + 1]) i++;
    PERI_TRY(peri__word_at(k->ids[i], place - k->first[i], &id));
    return peri__fail(PERI_ERANGE, "%s: table '%s': id %lld (feature %d, place %lld) %s", f, k->c->name, (long long)id,
                      i, (long long)(place - k->first[i]), what);
}

static peri_k_collision_find_args find_args(const call *k, int32_t feature)
{
    const peri_collision *c = k->c;
    const peri_collision_config *a = &c->config;
    int64_t ttl = a->n_ttl == 0 ? 0 : c->ttl[a->n_ttl == 1 ? 0 : feature];
    return (peri_k_collision_find_args){.map = c->map,
                                        .ids = peri__data(k->ids[feature]),
                                        .out = (int64_t *)peri__data(k->rows) + k->first[feature],
                                        .log = c->log ? peri__data(c->log) : NULL,
                                        .first = k->first[feature],
                                        .now = c->iteration,
                                        .window = c->window,
                                        .expiry = peri__min(peri__collision_now(c) + ttl, INT32_MAX)};
}

static int64_t id_count(const call *k, int32_t feature) { return k->first[feature + 1] - k->first[feature]; }

/** An id of a bucket that is not this map's is an error. Waits. */
static peri_status check_ids(const call *k)
{
    peri_collision *c = k->c;
    for (int32_t i = 0; i < k->n; i++) {
        peri_k_collision_find_args args = find_args(k, i);
        PERI_TRY(PERI_LAUNCH(c->device, collision_check, &args, id_count(k, i), PERI_COLLISION_GRAIN));
    }
    PERI_TRY(peri__collision_report(c));
    PERI_TRY(peri__collision_seen(c, true));
    int64_t bad = c->words[PERI_COLLISION_BAD];
    if (bad == INT64_MAX) return PERI_OK;
    PERI_TRY(peri__collision_set(c, PERI_COLLISION_BAD, INT64_MAX));
    bool whole = c->config.n_buckets == c->config.buckets;
    return bad_id(k, bad, whole ? "lies outside [0, input_hash_size)" : "belongs to a bucket that is not this map's");
}

static bool feature_learns(const call *k, int32_t feature) { return !k->c->read_only || !k->c->read_only[feature]; }

/** Look up @feature. The first @learn ids are learned; with @rows false that is all. */
static peri_status find_rows(const call *k, int32_t feature, int64_t learn, bool rows)
{
    peri_collision *c = k->c;
    peri_k_collision_find_args args = find_args(k, feature);
    args.learn = learn;
    if (peri__collision_hash(c))
        return PERI_LAUNCH(c->device, hash_map_find, &args, id_count(k, feature), PERI_COLLISION_GRAIN);
    if (!rows) args.out = NULL;
    args.n = id_count(k, feature);
    args.parts = peri__max(1, peri__min(peri_threads(), args.n / PERI_COLLISION_GRAIN));
    return PERI_LAUNCH(c->device, mch_find, &args, args.n ? args.parts : 0, 1);
}

/** Room in the log for @more entries beside those that may be there. What was learned before stays. */
static peri_status reserve(peri_collision *c, int64_t more)
{
    enum { LEAST = 1 << 14, WORDS = sizeof(peri_k_collision_entry) / 8 };
    if (c->logged + more > c->log_room) PERI_TRY(peri__collision_seen(c, c->log_room > LEAST));
    if (c->logged + more <= c->log_room) return PERI_OK;
    int64_t room = peri__max(LEAST, peri__max(2 * c->log_room, c->logged + more)), words = room * WORDS;
    peri_tensor *log;
    PERI_TRY(peri_tensor_new(c->device, PERI_I64, 1, &words, &log));
    peri_status status = PERI_OK;
    if (c->log)
        status = peri__copy(c->device, peri__data(log), peri__data(c->log), c->logged * WORDS * 8, PERI_COPY_D2D);
    if (status < 0) {
        peri_tensor_release(log);
        return status;
    }
    peri_tensor_release(c->log);
    c->log = log;
    c->log_room = room;
    return PERI_OK;
}

/** @more entries may have come into the log. */
static void may_log(peri_collision *c, int64_t more)
{
    c->logged += more;
    if (c->report_logged >= 0) c->report_logged += more;
}

static peri_status find_rows_of_all(const call *k)
{
    for (int32_t i = 0; i < k->n; i++) PERI_TRY(find_rows(k, i, 0, true));
    return PERI_OK;
}

/** Seen since the last eviction. */
static peri_status note(const call *k, bool due)
{
    peri_collision *c = k->c;
    for (int32_t i = 0; i < k->n; i++) {
        int64_t free = c->config.history_capacity ? c->config.history_capacity - c->recorded : INT64_MAX;
        int64_t learn = feature_learns(k, i) ? peri__min(id_count(k, i), free) : 0;
        PERI_TRY(find_rows(k, i, learn, !due));
        c->recorded += learn;
        may_log(c, learn);
    }
    return PERI_OK;
}

static peri_status train_mch(const call *k)
{
    peri_collision *c = k->c;
    bool due = c->iteration - c->window == c->config.eviction_interval;
    if (!c->lesson) {
        PERI_TRY(note(k, due));
        if (!due) return PERI_OK;
        PERI_TRY(peri__collision_report(c));
        PERI_TRY(peri__collision_seen(c, true));
    }
    peri_status status = peri__collision_learn(c, c->logged);
    if (status == PERI_PENDING) return status;
    c->window = c->iteration; /* whatever happened: what was in the log is no more */
    c->recorded = 0;
    PERI_TRY(status);
    return find_rows_of_all(k);
}

static peri_status train_hash(const call *k)
{
    peri_collision *c = k->c;
    int64_t most = 0;
    for (int32_t i = 0; i < k->n; i++) {
        if (!feature_learns(k, i)) continue;
        PERI_TRY(find_rows(k, i, id_count(k, i), true));
        most += id_count(k, i);
    }
    if (most > 0) {
        peri_k_collision_find_args again = find_args(k, 0);
        again.out = peri__data(k->rows);
        PERI_TRY(peri__collision_learn(c, most));
        PERI_TRY(PERI_LAUNCH(c->device, hash_map_again, &again, peri__ceil_div(most, PERI_COLLISION_BLOCK), 1));
        PERI_TRY(peri__collision_set(c, PERI_COLLISION_LOGGED, 0));
    }
    for (int32_t i = 0; i < k->n; i++) /* after the others: a row that they gave up is not found any more */
        if (!feature_learns(k, i)) PERI_TRY(find_rows(k, i, 0, true));
    return PERI_OK;
}

static peri_status find_and_learn(const call *k)
{
    peri_collision *c = k->c;
    if (c->lesson) return train_mch(k);
    if (peri__collision_hash(c) && c->time < 0 && c->iteration >= INT32_MAX && c->config.policy != PERI_FORGET_NONE)
        return peri__fail(PERI_ERANGE, "%s: table '%s': iteration %lld, of which TTL and PROBE_LRU count to %d", f,
                          c->name, (long long)c->iteration + 1, INT32_MAX);
    PERI_TRY(reserve(c, k->first[k->n]));
    c->iteration++;
    return peri__collision_hash(c) ? train_hash(k) : train_mch(k);
}

/** What on_miss ERROR found, if it found anything. Waits. */
static peri_status check_misses(const call *k)
{
    peri_collision *c = k->c;
    if (c->config.on_miss != PERI_MISS_ERROR) return PERI_OK;
    PERI_TRY(peri__collision_seen(c, true));
    int64_t bad = c->words[PERI_COLLISION_BAD];
    if (bad == INT64_MAX) return PERI_OK;
    PERI_TRY(peri__collision_set(c, PERI_COLLISION_BAD, INT64_MAX));
    return bad_id(k, bad, "has no row");
}

/** The rows of each feature, in the shape of its ids. */
static peri_status give(const call *k, peri_tensor *const *ids, peri_tensor **out)
{
    for (int32_t i = 0; i < k->n; i++) {
        int64_t stride[PERI_MAX_DIMS], step = 1;
        for (int32_t d = ids[i]->ndim - 1; d >= 0; d--) {
            stride[d] = step;
            step *= ids[i]->shape[d];
        }
        peri_status status = peri__tensor_view(k->rows, ids[i]->ndim, ids[i]->shape, stride, k->first[i], &out[i]);
        for (; status < 0 && i > 0; i--) peri_tensor_release(out[i - 1]);
        PERI_TRY(status);
    }
    return PERI_OK;
}

peri_status peri_collision_remap(peri_collision *c, peri_tensor *const *ids, int32_t n, bool training,
                                 peri_tensor **out)
{
    PERI_NEED(c);
    if (n < 0) return peri__fail(PERI_EINVAL, "%s: table '%s': n_features is %d, allowed: 0 and more", f, c->name, n);
    if (c->config.n_features > 0 && n != c->config.n_features)
        return peri__fail(PERI_EINVAL, "%s: table '%s': ids of %d features, wanted %d", f, c->name, n,
                          c->config.n_features);
    if (n > 0) PERI_NEED(ids);
    PERI_TRY(peri__check_list(f, "the ids", ids, n));
    if (n > 0) PERI_NEED(out);
    if (c->lesson && !training)
        return peri__fail(PERI_EINVAL, "%s: table '%s' waits for scores of the training call before", f, c->name);
    call k;
    peri_status status = call_init(&k, c, ids, n);
    if (status >= 0 && !c->any_id) status = check_ids(&k);
    if (status >= 0) status = training ? find_and_learn(&k) : find_rows_of_all(&k);
    c->may_have_changed = c->may_have_changed || training;
    if (status == PERI_OK) status = peri__collision_report(c);
    if (status == PERI_OK) status = check_misses(&k);
    if (status == PERI_OK) status = give(&k, ids, out);
    call_fini(&k);
    return status;
}
