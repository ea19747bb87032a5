/* SPDX-License-Identifier: Apache-2.0
 *
 * learn.c: what a map learns from its log.
 */
#include "collision_internal.h"

#include <math.h>

enum { RECORD_WORDS = sizeof(peri_k_collision_record) / 8 };

/** What learning takes on the device. */
typedef struct peri__lesson {
    peri_collision *c;
    int64_t most; /* entries of the log */
    peri_tensor *records, *scratch, *sizes, *starts, *news, *row_scores, *new_scores;
    peri_k_collision_learn_args args;
    /* Policy USER: what is to be scored, on the host: the `rows` first are rows, the others news. */
    int64_t n, rows;
    int64_t *counts, *last, *at; /* one block; at: where the score goes */
} lesson;

static void lesson_fini(lesson *l)
{
    peri_tensor *all[] = {l->records, l->scratch, l->sizes, l->starts, l->news, l->row_scores, l->new_scores};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    peri__free(l->counts);
}

static peri_status new_words(lesson *l, int64_t n, peri_tensor **out)
{
    return peri_tensor_new(l->c->device, PERI_I64, 1, &n, out);
}

/** The log by bucket. */
static peri_status group(lesson *l)
{
    peri_collision *c = l->c;
    int64_t most = l->most, buckets = c->config.n_buckets, blocks = peri__ceil_div(most, PERI_COLLISION_BLOCK);
    PERI_TRY(new_words(l, most * RECORD_WORDS, &l->records));
    PERI_TRY(new_words(l, buckets, &l->sizes));
    PERI_TRY(new_words(l, buckets + 1, &l->starts));
    PERI_TRY(new_words(l, buckets, &l->news));
    PERI_TRY(peri__tensor_zero(l->sizes));
    peri_k_collision_group_args args = {.map = c->map,
                                        .log = c->log ? peri__data(c->log) : NULL,
                                        .records = peri__data(l->records),
                                        .sizes = peri__data(l->sizes),
                                        .starts = peri__data(l->starts)};
    PERI_TRY(PERI_LAUNCH(c->device, collision_count, &args, blocks, 1));
    PERI_TRY(PERI_LAUNCH(c->device, collision_starts, &args, 1, 1));
    PERI_TRY(PERI_LAUNCH(c->device, collision_group, &args, blocks, 1));
    const peri_collision_config *a = &c->config;
    l->args = (peri_k_collision_learn_args){.map = c->map,
                                            .records = args.records,
                                            .starts = args.starts,
                                            .news = peri__data(l->news),
                                            .decay = a->decay_exponent,
                                            .filter_arg = a->filter_arg,
                                            .seed = a->seed,
                                            .now = peri__collision_hash(c) ? peri__collision_now(c) : c->iteration,
                                            .call = c->iteration,
                                            .window = c->window,
                                            .filter = a->filter};
    return PERI_OK;
}

/* -- scores by the caller ------------------------------------------------------------------------------------------ */

static void add_candidate(lesson *l, int64_t count, int64_t last, int64_t at)
{
    l->counts[l->n] = count;
    l->last[l->n] = last;
    l->at[l->n++] = at;
}

static peri_status read_words(peri_tensor *t, int64_t **out)
{
    int64_t bytes = peri__numel(t) * 8;
    *out = peri__alloc((size_t)peri__max(bytes, 1));
    return *out ? peri_tensor_read(t, *out, bytes) : PERI_ENOMEM;
}

/** Rows that have ids. */
static peri_status list_rows(lesson *l)
{
    peri_collision *c = l->c;
    int64_t *ids = NULL, *counts = NULL, *last = NULL;
    peri_status status = read_words(c->ids, &ids);
    if (status >= 0) status = read_words(c->counts, &counts);
    if (status >= 0) status = read_words(c->last, &last);
    for (int64_t row = 0; row < c->rows && status >= 0; row++)
        if (ids[row] != INT64_MAX) add_candidate(l, counts[row], last[row], row);
    l->rows = l->n;
    peri__free(ids);
    peri__free(counts);
    peri__free(last);
    return status;
}

static peri_status list_news(lesson *l)
{
    int64_t *records = NULL, *starts = NULL, *news = NULL;
    peri_status status = read_words(l->records, &records);
    if (status >= 0) status = read_words(l->starts, &starts);
    if (status >= 0) status = read_words(l->news, &news);
    for (int32_t b = 0; b < l->c->config.n_buckets && status >= 0; b++)
        for (int64_t i = starts[b]; i < starts[b] + news[b]; i++)
            add_candidate(l, records[i * RECORD_WORDS + 1], records[i * RECORD_WORDS + 2], i);
    peri__free(records);
    peri__free(starts);
    peri__free(news);
    return status;
}

/** What is to be scored. */
static peri_status list(lesson *l)
{
    int64_t room = l->c->rows + l->most;
    l->counts = peri__alloc((size_t)room * 24);
    if (!l->counts) return PERI_ENOMEM;
    l->last = l->counts + room;
    l->at = l->last + room;
    PERI_TRY(list_rows(l));
    return list_news(l);
}

peri_status peri_collision_candidates(peri_collision *c, peri_tensor **counts, peri_tensor **last)
{
    PERI_NEED(c);
    PERI_NEED(counts);
    PERI_NEED(last);
    *counts = *last = NULL;
    const lesson *l = c->lesson;
    if (!l || l->row_scores) return PERI_OK;
    peri_tensor *t;
    PERI_TRY(peri__upload_i64(c->device, l->counts, l->n, &t));
    peri_status status = peri__upload_i64(c->device, l->last, l->n, last);
    if (status < 0) peri_tensor_release(t);
    else *counts = t;
    return status;
}

/** Scores of entries [first, past) of what was listed, at their places in a new tensor of @room. */
static peri_status spread_scores(const lesson *l, const double *scores, int64_t first, int64_t past, int64_t room,
                                 peri_tensor **out)
{
    double *all = peri__alloc_zero((size_t)peri__max(room, 1) * 8);
    if (!all) return PERI_ENOMEM;
    for (int64_t i = first; i < past; i++) all[l->at[i]] = scores[i];
    peri_status status = peri_tensor_new(l->c->device, PERI_F64, 1, &room, out);
    if (status >= 0) status = peri_tensor_write(*out, all, room * 8);
    peri__free(all);
    return status;
}

static peri_status take_scores(lesson *l, const double *scores)
{
    static const char f[] = "peri_collision_scores";
    for (int64_t i = 0; i < l->n; i++)
        if (isnan(scores[i]))
            return peri__fail(
                PERI_EINVAL,
                "%s: table '%s': score %lld, of an id seen %lld times, last in iteration %lld, is no number", f,
                l->c->name, (long long)i, (long long)l->counts[i], (long long)l->last[i]);
    peri_tensor *rows = NULL, *news = NULL;
    peri_status status = spread_scores(l, scores, 0, l->rows, l->c->rows, &rows);
    if (status >= 0) status = spread_scores(l, scores, l->rows, l->n, l->most, &news);
    if (status >= 0) {
        l->row_scores = rows;
        l->new_scores = news;
        return status;
    }
    peri_tensor_release(rows);
    peri_tensor_release(news);
    return status;
}

peri_status peri_collision_scores(peri_collision *c, peri_tensor *scores)
{
    static const char f[] = "peri_collision_scores";
    PERI_NEED(c);
    lesson *l = c->lesson;
    if (!l || l->row_scores) return peri__fail(PERI_EINVAL, "%s: table '%s' wants no scores", f, c->name);
    PERI_TRY(peri__check_tensor(f, "scores", scores, PERI_F64, 1));
    if (scores->shape[0] != l->n)
        return peri__fail(PERI_EINVAL, "%s: table '%s': %lld scores for %lld candidates", f, c->name,
                          (long long)scores->shape[0], (long long)l->n);
    double *host = peri__alloc((size_t)peri__max(l->n, 1) * 8);
    peri_status status = host ? peri_tensor_read(scores, host, l->n * 8) : PERI_ENOMEM;
    if (status >= 0) status = take_scores(l, host);
    peri__free(host);
    return status;
}

/* -- learning ------------------------------------------------------------------------------------------------------ */

void peri__collision_unlearn(peri_collision *c)
{
    if (!c->lesson) return;
    lesson_fini(c->lesson);
    peri__free(c->lesson);
    c->lesson = NULL;
}

/** The lesson waits for scores. */
static peri_status put_off(lesson *l)
{
    PERI_TRY(list(l));
    lesson *kept = peri__alloc(sizeof *kept);
    if (!kept) return PERI_ENOMEM;
    *kept = *l;
    *l = (lesson){0};
    kept->c->lesson = kept;
    return PERI_PENDING;
}

static peri_status evict_and_insert(lesson *l)
{
    l->args.row_scores = l->row_scores ? peri__data(l->row_scores) : NULL;
    l->args.new_scores = l->new_scores ? peri__data(l->new_scores) : NULL;
    return PERI_LAUNCH(l->c->device, mch_evict, &l->args, l->c->config.n_buckets, 1);
}

static peri_status learn_mch(lesson *l)
{
    peri_collision *c = l->c;
    PERI_TRY(new_words(l, 3 * l->most * RECORD_WORDS, &l->scratch));
    l->args.scratch = peri__data(l->scratch);
    PERI_TRY(PERI_LAUNCH(c->device, mch_coalesce, &l->args, c->config.n_buckets, 1));
    PERI_TRY(peri__collision_set(c, PERI_COLLISION_LOGGED, 0));
    c->logged = 0;
    c->report_logged = -1;
    return c->config.policy == PERI_FORGET_USER ? put_off(l) : evict_and_insert(l);
}

peri_status peri__collision_learn(peri_collision *c, int64_t most)
{
    peri_status status;
    if (c->lesson) {
        if (!c->lesson->row_scores) return PERI_PENDING;
        status = evict_and_insert(c->lesson);
        peri__collision_unlearn(c);
        return status;
    }
    lesson l = {.c = c, .most = most};
    status = group(&l);
    if (status >= 0) {
        bool hash = peri__collision_hash(c);
        status = hash ? PERI_LAUNCH(c->device, hash_map_insert, &l.args, c->config.n_buckets, 1) : learn_mch(&l);
    }
    lesson_fini(&l);
    return status;
}
