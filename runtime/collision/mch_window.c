/* SPDX-License-Identifier: Apache-2.0
 *
 * mch_window.c: what MCH has seen since the last eviction, as numbers that can be kept.
 */
#include "collision_internal.h"

#include <stdlib.h>

enum { CHUNK = 1 << 20 }; /* words that are read at once */

/** An id, how often it was seen in the window, and the iteration that had it last. */
typedef struct seen {
    int64_t id, times, when;
} seen;

typedef struct window {
    seen *list;
    int64_t n, room;
} window;

static int by_id(const void *x, const void *y)
{
    const seen *a = x, *b = y;
    return a->id < b->id ? -1 : a->id > b->id;
}

static peri_status add_seen(window *w, seen s)
{
    if (w->n == w->room) {
        int64_t room = peri__max(1024, 2 * w->room);
        seen *more = peri__realloc(w->list, (size_t)room * sizeof *more);
        if (!more) return PERI_ENOMEM;
        w->list = more;
        w->room = room;
    }
    w->list[w->n++] = s;
    return PERI_OK;
}

/** Call f for words [0, @n) of @t, a tensor of i64, a chunk of whole groups of @each at a time. */
typedef peri_status adder(const peri_collision *c, window *w, const int64_t *words, int64_t n);
static peri_status each_chunk(peri_tensor *t, int64_t n, int64_t each, adder *f, const peri_collision *c, window *w)
{
    const int64_t step = CHUNK / each * each;
    int64_t *words = peri__alloc((size_t)peri__max(1, peri__min(step, n)) * 8);
    peri_status status = words ? PERI_OK : PERI_ENOMEM;
    for (int64_t at = 0; at < n && status >= 0; at += step) {
        peri_tensor *part;
        int64_t count = peri__min(step, n - at);
        status = peri_tensor_slice(t, 0, at, at + count, 1, &part);
        if (status < 0) break;
        status = peri_tensor_read(part, words, count * 8);
        peri_tensor_release(part);
        if (status >= 0) status = f(c, w, words, count);
    }
    peri__free(words);
    return status;
}

static peri_status add_log(const peri_collision *c, window *w, const int64_t *words, int64_t n)
{
    (void)c;
    const peri_k_collision_entry *e = (const peri_k_collision_entry *)words;
    for (int64_t i = 0; i < n / 3; i++) PERI_TRY(add_seen(w, (seen){e[i].id, e[i].place, e[i].when}));
    return PERI_OK;
}

static peri_status add_slots(const peri_collision *c, window *w, const int64_t *words, int64_t n)
{
    const peri_k_mch_slot *slot = (const peri_k_mch_slot *)words;
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t seen_of = slot[i].window;
        if (slot[i].row == UINT32_MAX || !seen_of) continue;
        int64_t times = c->map.counted ? peri_k_window_count(seen_of) : 1,
                when = c->window + (seen_of >> (c->map.counted ? 16 : 0));
        PERI_TRY(add_seen(w, (seen){slot[i].id, times, when}));
    }
    return PERI_OK;
}

/** Each id once, in order. */
static void coalesce(window *w)
{
    int64_t n = 0;
    if (w->n > 0) qsort(w->list, (size_t)w->n, sizeof *w->list, by_id);
    for (int64_t i = 0; i < w->n; i++) {
        if (n == 0 || w->list[n - 1].id != w->list[i].id) w->list[n++] = w->list[i];
        else {
            w->list[n - 1].times += w->list[i].times;
            w->list[n - 1].when = peri__max(w->list[n - 1].when, w->list[i].when);
        }
    }
    w->n = n;
}

static peri_status need_mch(const char *f, const peri_collision *c)
{
    if (peri__collision_hash(c))
        return peri__fail(PERI_EINVAL, "%s: table '%s' has a hash map, which has no windows", f, c->name);
    if (c->lesson) return peri__fail(PERI_EINVAL, "%s: table '%s' waits for scores", f, c->name);
    return PERI_OK;
}

peri_status peri_collision_window(peri_collision *c, int64_t *start, peri_tensor **out)
{
    PERI_NEED(c);
    PERI_NEED(start);
    PERI_NEED(out);
    PERI_TRY(need_mch("peri_collision_window", c));
    PERI_TRY(peri__collision_report(c));
    PERI_TRY(peri__collision_seen(c, true));
    window w = {0};
    peri_status status = c->log ? each_chunk(c->log, c->words[PERI_COLLISION_LOGGED] * 3, 3, add_log, c, &w) : PERI_OK;
    if (status >= 0) status = each_chunk(c->slots, peri__numel(c->slots), 2, add_slots, c, &w);
    if (status >= 0) {
        coalesce(&w);
        const int64_t shape[] = {w.n, 3};
        *start = c->window;
        status = peri_tensor_new(c->device, PERI_I64, 2, shape, out);
        if (status >= 0 && w.n > 0) status = peri_tensor_write(*out, w.list, w.n * (int64_t)sizeof *w.list);
    }
    peri__free(w.list);
    return status;
}

peri_status peri_collision_window_set(peri_collision *c, int64_t start, const peri_tensor *entries)
{
    static const char f[] = "peri_collision_window_set";
    PERI_NEED(c);
    PERI_NEED(entries);
    PERI_TRY(need_mch(f, c));
    if (entries->dtype != PERI_I64 || entries->ndim != 2 || entries->shape[1] != 3)
        return peri__fail(PERI_EINVAL, "%s: table '%s': entries are wanted as i64 [n, 3]", f, c->name);
    if (start < 0 || start > c->iteration || c->iteration - start >= c->config.eviction_interval)
        return peri__fail(PERI_EINVAL, "%s: table '%s': start is %lld, allowed: the last %lld iterations before %lld",
                          f, c->name, (long long)start, (long long)c->config.eviction_interval - 1,
                          (long long)c->iteration);
    int64_t n = entries->shape[0], own = 0, recorded = 0, last = c->config.first_bucket + c->config.n_buckets;
    seen *list = peri__alloc((size_t)peri__max(1, n) * sizeof *list);
    peri_status status =
        list ? n > 0 ? peri_tensor_read(entries, list, n * (int64_t)sizeof *list) : PERI_OK : PERI_ENOMEM;
    for (int64_t i = 0; i < n && status >= 0; i++) {
        int64_t b = peri_collision_bucket(list[i].id, c->config.spread, c->config.buckets, c->config.input_hash_size);
        if (list[i].times < 1 || list[i].when < start || list[i].when > c->iteration)
            status = peri__fail(
                PERI_EINVAL,
                "%s: table '%s': id %lld was seen %lld times, last in iteration %lld, allowed: once or more, "
                "%lld to %lld",
                f, c->name, (long long)list[i].id, (long long)list[i].times, (long long)list[i].when, (long long)start,
                (long long)c->iteration);
        if (b < c->config.first_bucket || b >= last) continue;
        recorded += list[i].times;
        list[own++] = list[i];
    }
    for (int64_t i = 0; i < own; i++) { /* entries of the log have them in another order */
        peri_k_collision_entry e = {list[i].id, list[i].when, list[i].times};
        memcpy(&list[i], &e, sizeof e);
    }
    int64_t room = peri__max(1 << 14, 2 * own), words = room * 3;
    peri_tensor *log = NULL, *head = NULL;
    if (status >= 0) status = peri_tensor_new(c->device, PERI_I64, 1, &words, &log);
    if (status >= 0 && own > 0) status = peri_tensor_slice(log, 0, 0, own * 3, 1, &head);
    if (status >= 0 && own > 0) status = peri_tensor_write(head, list, own * (int64_t)sizeof *list);
    if (status >= 0) status = peri__collision_set(c, PERI_COLLISION_LOGGED, own);
    peri_tensor_release(head);
    peri__free(list);
    if (status < 0) {
        peri_tensor_release(log);
        return status;
    }
    peri_tensor_release(c->log);
    c->log = log;
    c->log_room = room;
    c->logged = own;
    c->report_logged = -1;
    c->window = start;
    c->recorded = recorded;
    return PERI_OK;
}
