/* SPDX-License-Identifier: Apache-2.0
 *
 * test_collision.c: maps from ids to rows beside models that keep everything in plain lists and follow TorchRec step by
 * step; the same results in any order of ids and in any number of parts; state out and in; what is refused.
 * deadline: 300 s
 */
#include "tests/harness/check.h"

#include <perilune/perilune.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 48, MOST = 64, HISTORY = 4096 };

static uint64_t state = 11;
static int64_t draw(int64_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)below);
}

static peri_device *device;

static peri_tensor *ints(const int64_t *x, int64_t n)
{
    peri_tensor *t;
    assert_ok(peri_tensor_new(device, PERI_I64, 1, &n, &t));
    assert_ok(peri_tensor_write(t, x, 8 * n));
    return t;
}

static int64_t read_all(peri_tensor *t, int64_t *x, int64_t most)
{
    peri_tensor_info d = {.size = sizeof d};
    peri_tensor_describe(t, &d);
    assert_true(d.numel <= most);
    assert_ok(peri_tensor_read(t, x, 8 * d.numel));
    return d.numel;
}

static void remap(peri_collision *c, const int64_t *ids, int64_t n, bool training, int64_t *rows)
{
    peri_tensor *in = ints(ids, n), *out;
    assert_int_equal(peri_collision_remap(c, &in, 1, training, &out), PERI_OK);
    assert_int_equal(read_all(out, rows, n), n);
    peri_tensor_release(in);
    peri_tensor_release(out);
}

static int64_t evicted(peri_collision *c, int64_t *rows)
{
    peri_tensor *t;
    assert_ok(peri_collision_evicted(c, &t));
    int64_t n = t ? read_all(t, rows, ROWS) : 0;
    assert_true(!t || n > 0);
    peri_tensor_release(t);
    return n;
}

/* -- MCH, as TorchRec does it -------------------------------------------------------------------------------------- */

typedef struct entry {
    int64_t id, count, last, row;
    double score;
} entry;

typedef struct model {
    const peri_collision_config *config;
    int64_t segments[ROWS + 1];
    entry row[ROWS];
    int64_t seen[HISTORY], when[HISTORY], n_seen, iteration, begun;
    bool changed[ROWS];
} model;

static void model_init(model *m, const peri_collision_config *a)
{
    memset(m, 0, sizeof *m);
    m->config = a;
    peri_collision_segments(a->rows, a->buckets, m->segments);
    for (int64_t r = 0; r < a->rows; r++)
        m->row[r] = (entry){.id = a->kind == PERI_COLLISION_HASH ? -1 : INT64_MAX, .row = r};
}

static int64_t bucket_of(const model *m, int64_t id)
{
    return peri_collision_bucket(id, m->config->spread, m->config->buckets, m->config->input_hash_size);
}

/** A stable sort. */
static void sort(entry *e, int64_t n, bool (*before)(const entry *, const entry *))
{
    for (int64_t i = 1; i < n; i++)
        for (int64_t j = i; j > 0 && before(&e[j], &e[j - 1]); j--) {
            entry t = e[j];
            e[j] = e[j - 1];
            e[j - 1] = t;
        }
}
static bool by_id(const entry *a, const entry *b) { return a->id < b->id; }
static bool by_count(const entry *a, const entry *b) { return a->count > b->count; }
static bool by_score(const entry *a, const entry *b) { return a->score > b->score; }

static double score(const model *m, const entry *e)
{
    float age = powf((float)(m->iteration - e->last + 1), (float)m->config->decay_exponent);
    if (m->config->policy == PERI_FORGET_LFU) return (double)e->count;
    return m->config->policy == PERI_FORGET_LRU ? -age : (float)e->count / age;
}

/** The ids of bucket @b that were seen, ascending, those that the filter lets through. */
static int64_t window(const model *m, int64_t b, entry *out)
{
    int64_t n = 0, kept = 0, sum = 0;
    for (int64_t i = 0; i < m->n_seen; i++) {
        if (bucket_of(m, m->seen[i]) != b) continue;
        int64_t k = 0;
        while (k < n && out[k].id != m->seen[i]) k++;
        if (k == n) out[n++] = (entry){.id = m->seen[i]};
        out[k].count++;
        out[k].last = m->when[i];
        sum++;
    }
    sort(out, n, by_id);
    for (int64_t k = 0; k < n; k++) {
        float count = (float)out[k].count;
        if (m->config->filter == PERI_FILTER_DYNAMIC &&
            !(count > (float)(m->config->filter_arg / (double)n) * (float)sum))
            continue;
        if (m->config->filter == PERI_FILTER_AVERAGE && !(count > (float)sum / (float)n)) continue;
        out[kept++] = out[k];
    }
    return kept;
}

static void model_evict(model *m, int64_t b)
{
    static entry seen[HISTORY], all[ROWS + HISTORY];
    int64_t first = m->segments[b], size = m->segments[b + 1] - first, n = window(m, b, seen), total = size;
    sort(seen, n, by_count);
    memcpy(all, m->row + first, (size_t)size * sizeof *all);
    sort(all, size - 1, by_id);
    for (int64_t k = 0; k < n; k++) {
        int64_t r = 0;
        while (r < size - 1 && all[r].id != seen[k].id) r++;
        if (r < size - 1) {
            all[r].count += seen[k].count;
            all[r].last = seen[k].last;
        } else {
            all[total++] = seen[k];
        }
    }
    for (int64_t i = 0; i < total; i++) {
        all[i].score = i == size - 1 ? INFINITY : score(m, &all[i]);
        if (i >= size) all[i].row = -1;
    }
    for (int64_t i = 0; i < size; i++) m->row[all[i].row] = all[i];
    sort(all, total, by_score);
    for (int64_t i = size, winner = 0; i < total; i++) { /* the k-th loser's row goes to the k-th winner */
        if (all[i].row < 0) continue;
        while (all[winner].row >= 0) winner++;
        assert_true(winner < size);
        int64_t row = all[i].row;
        m->row[row] = all[winner++];
        m->row[row].row = row;
        m->changed[row] = true;
    }
}

static void model_train(model *m, const int64_t *ids, int64_t n)
{
    m->iteration++;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == INT64_MAX) continue;
        m->seen[m->n_seen] = ids[i];
        m->when[m->n_seen++] = m->iteration;
    }
    if (m->iteration - m->begun < m->config->eviction_interval) return;
    for (int64_t b = 0; b < m->config->buckets; b++) model_evict(m, b);
    m->n_seen = 0;
    m->begun = m->iteration;
}

static int64_t model_row(const model *m, int64_t id)
{
    int64_t b = bucket_of(m, id);
    for (int64_t r = m->segments[b]; r < m->segments[b + 1] - 1; r++)
        if (m->row[r].id == id && id != INT64_MAX) return r;
    return m->config->on_miss == PERI_MISS_DROP ? -1 : m->segments[b + 1] - 1;
}

static int64_t random_id(int variant)
{
    static const int64_t edges[] = {INT64_MIN, INT64_MAX, -1, 0, INT64_MAX - 1, INT64_MIN + 1};
    if (draw(20) == 0) return edges[draw(6)];
    int64_t hot = draw(6) ? draw(30) : draw(400);
    return variant % 3 == 0 ? hot : variant % 3 == 1 ? hot * 64 : (int64_t)((uint64_t)hot * 0x9e3779b97f4a7c15u);
}

/** The rows that changed are those that the model changed. */
static void same_rows(const model *m, peri_collision *c)
{
    int64_t want[ROWS], got[ROWS], n = 0;
    for (int64_t r = 0; r < ROWS; r++)
        if (m->changed[r]) want[n++] = r;
    assert_int_equal(evicted(c, got), n);
    if (n) assert_memory_equal(got, want, (size_t)n * 8);
}

/** The state of a whole map goes into its parts. */
static void load_parts(peri_collision *whole, peri_collision **part, int parts)
{
    int32_t n = peri_collision_states(whole);
    const char *names[8];
    peri_tensor *states[8];
    for (int32_t i = 0; i < n; i++) {
        names[i] = peri_collision_state_name(whole, i);
        assert_ok(peri_collision_state(whole, i, &states[i]));
    }
    for (int p = 0; p < parts; p++) assert_ok(peri_collision_load(part[p], 0, 4, n, names, states));
    for (int32_t i = 0; i < n; i++) peri_tensor_release(states[i]);
}

static void mch(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 54; variant++) {
        peri_collision_config a = {.size = sizeof a,
                                   .name = "t",
                                   .rows = ROWS,
                                   .kind = PERI_COLLISION_MCH,
                                   .buckets = variant % 2 ? 4 : 1,
                                   .policy = PERI_FORGET_LFU + variant % 3,
                                   .decay_exponent = variant / 3 % 2 ? 1 : 2,
                                   .eviction_interval = 1 + variant / 6 % 3,
                                   .filter = variant / 18,
                                   .filter_arg = 0.9,
                                   .spread = variant % 4 == 1 ? PERI_SPREAD_MODULO : PERI_SPREAD_HASH,
                                   .on_miss = variant % 5 ? PERI_MISS_DEFAULT : PERI_MISS_DROP};
        static model m;
        model_init(&m, &a);
        peri_collision *c, *shuffled;
        assert_ok(peri_collision_new(device, &a, &c));
        assert_ok(peri_collision_new(device, &a, &shuffled));
        peri_threads_set(1 + variant % 3);
        for (int step = 0; step < 40; step++) {
            int64_t ids[MOST], turned[MOST], rows[MOST], other[MOST], n = draw(MOST + 1);
            for (int64_t i = 0; i < n; i++) turned[n - 1 - i] = ids[i] = random_id(variant);
            bool training = draw(5) > 0;
            memset(m.changed, 0, sizeof m.changed);
            if (training) model_train(&m, ids, n);
            remap(c, ids, n, training, rows);
            remap(shuffled, turned, n, training, other);
            for (int64_t i = 0; i < n; i++) {
                assert_int_equal(rows[i], model_row(&m, ids[i]));
                assert_int_equal(rows[i], other[n - 1 - i]);
            }
            same_rows(&m, c);
            same_rows(&m, shuffled);
            if (step == 20) { /* a map that is loaded begins a new window */
                peri_collision_release(c);
                assert_ok(peri_collision_new(device, &a, &c));
                int32_t states = peri_collision_states(shuffled);
                const char *names[8];
                peri_tensor *t[8];
                for (int32_t i = 0; i < states; i++) {
                    names[i] = peri_collision_state_name(shuffled, i);
                    assert_ok(peri_collision_state(shuffled, i, &t[i]));
                }
                assert_ok(peri_collision_load(c, 0, a.buckets, states, names, t));
                assert_ok(peri_collision_load(shuffled, 0, a.buckets, states, names, t));
                for (int32_t i = 0; i < states; i++) peri_tensor_release(t[i]);
                m.n_seen = 0;
                m.begun = m.iteration;
            }
        }
        peri_collision_stats s = {.size = sizeof s};
        assert_ok(peri_device_synchronize(device));
        assert_ok(peri_collision_statistics(shuffled, &s));
        assert_int_equal(s.ids, s.hits + s.missed);
        assert_int_equal(s.occupied, s.inserted - s.evicted);
        assert_int_equal(s.iterations, m.iteration);
        peri_collision_release(c);
        peri_collision_release(shuffled);
    }
    peri_threads_set(2);
}

/* -- hash maps: laws ----------------------------------------------------------------------------------------------- */

/** Parts of a map do what the whole does. */
static void parts(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 24; variant++) {
        int64_t ttl = 2 + variant % 4;
        peri_collision_config a = {.size = sizeof a,
                                   .name = "t",
                                   .rows = ROWS,
                                   .kind = variant % 4 != 0,
                                   .buckets = 4,
                                   .max_probe = variant % 2 ? 3 : 0,
                                   .on_miss = PERI_MISS_DROP,
                                   .ttl = &ttl,
                                   .n_ttl = variant % 4 == 1 || variant % 4 == 2};
        a.policy = (int[]){PERI_FORGET_LRU, PERI_FORGET_TTL, PERI_FORGET_PROBE_LRU, PERI_FORGET_NONE}[variant % 4];
        peri_collision *whole, *part[2];
        assert_ok(peri_collision_new(device, &a, &whole));
        for (int p = 0; p < 2; p++) {
            a.first_bucket = p;
            a.n_buckets = p ? 3 : 1;
            assert_ok(peri_collision_new(device, &a, &part[p]));
        }
        for (int step = 0; step < 30; step++) {
            int64_t ids[MOST], rows[MOST], n = draw(MOST + 1);
            for (int64_t i = 0; i < n; i++) ids[i] = random_id(variant);
            bool training = draw(5) > 0;
            if (step == 15) load_parts(whole, part, 2);
            remap(whole, ids, n, training, rows);
            int64_t changed[ROWS], n_changed = evicted(whole, changed), at = 0;
            for (int p = 0; p < 2; p++) {
                int64_t own[MOST], from[MOST], got[MOST], k = 0, first = peri_collision_first_row(part[p]);
                for (int64_t i = 0; i < n; i++) {
                    int64_t b = peri_collision_bucket(ids[i], PERI_SPREAD_HASH, 4, 0);
                    if ((b == 0) != (p == 0)) continue;
                    from[k] = i;
                    own[k++] = ids[i];
                }
                remap(part[p], own, k, training, got);
                for (int64_t i = 0; i < k; i++) assert_int_equal(got[i] < 0 ? -1 : got[i] + first, rows[from[i]]);
                int64_t more = evicted(part[p], got);
                for (int64_t i = 0; i < more; i++) assert_int_equal(got[i] + first, changed[at + i]);
                at += more;
            }
            assert_int_equal(at, n_changed);
        }
        for (int p = 0; p < 2; p++) peri_collision_release(part[p]);
        peri_collision_release(whole);
    }
}

/** What hash maps promise: one id a row, each in reach of its home, no row touched in an iteration given up in it,
 *  times to live kept. */
static void hash_maps(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 12; variant++) {
        int64_t ttl = 2 + variant % 3, rows_of = variant % 2 ? 24 : ROWS;
        peri_collision_config a = {.size = sizeof a,
                                   .name = "t",
                                   .rows = rows_of,
                                   .kind = PERI_COLLISION_HASH,
                                   .buckets = 1 + variant % 3,
                                   .max_probe = 4,
                                   .on_miss = PERI_MISS_DROP,
                                   .ttl = &ttl,
                                   .n_ttl = variant % 3 > 0,
                                   .policy =
                                       (int[]){PERI_FORGET_NONE, PERI_FORGET_TTL, PERI_FORGET_PROBE_LRU}[variant % 3]};
        peri_collision *c;
        assert_ok(peri_collision_new(device, &a, &c));
        int64_t owner[ROWS], seen[ROWS];
        for (int r = 0; r < ROWS; r++) owner[r] = -1;
        for (int64_t step = 1; step <= 60; step++) {
            int64_t ids[MOST], rows[MOST], again[MOST], changed[ROWS], n = 1 + draw(12);
            for (int64_t i = 0; i < n; i++) ids[i] = random_id(variant);
            remap(c, ids, n, true, rows);
            int64_t n_changed = evicted(c, changed);
            for (int64_t k = 0; k < n_changed; k++) {
                int64_t r = changed[k];
                if (owner[r] != -1) {
                    assert_int_not_equal(a.policy, PERI_FORGET_NONE);
                    if (a.policy == PERI_FORGET_TTL) assert_true(seen[r] + ttl < step);
                    else assert_true(seen[r] < step);
                }
                owner[r] = -1;
            }
            for (int64_t i = 0; i < n; i++) {
                if (rows[i] < 0) continue;
                assert_true(owner[rows[i]] == -1 || owner[rows[i]] == ids[i]);
                owner[rows[i]] = ids[i];
                seen[rows[i]] = step;
            }
            for (int r = 0; r < rows_of; r++)
                for (int k = 0; k < r; k++) assert_true(owner[r] == -1 || owner[r] != owner[k]);
            remap(c, ids, n, false, again);
            assert_memory_equal(rows, again, (size_t)n * 8);
        }
        peri_collision_release(c);
    }
}

/** Features that are only read, times to live by feature, a clock of the caller's, and what all of it counts. */
static void features(void **unused)
{
    (void)unused;
    const int64_t ttl[] = {1, 5, 1};
    const bool read_only[] = {false, false, true};
    peri_collision_config a = {.size = sizeof a,
                               .name = "t",
                               .rows = 64,
                               .kind = PERI_COLLISION_HASH,
                               .buckets = 1,
                               .on_miss = PERI_MISS_DROP,
                               .max_probe = 64,
                               .policy = PERI_FORGET_TTL,
                               .n_features = 3,
                               .ttl = ttl,
                               .n_ttl = 3,
                               .read_only = read_only};
    peri_collision *c;
    assert_ok(peri_collision_new(device, &a, &c));
    assert_ok(peri_collision_time_set(c, 100));
    int64_t fresh[] = {1, 2}, other[] = {2, 3}, looked[] = {1, 4}, got[2];
    peri_tensor *in[] = {ints(fresh, 2), ints(other, 2), ints(looked, 2)}, *out[3];
    assert_ok(peri_collision_remap(c, in, 3, true, out));
    assert_int_equal(read_all(out[2], got, 2), 2);
    assert_true(got[0] >= 0);
    assert_int_equal(got[1], -1);
    int32_t expiry[64];
    int64_t identity[64];
    peri_tensor *t;
    for (int32_t i = 0; i < peri_collision_states(c); i++) {
        assert_ok(peri_collision_state(c, i, &t));
        if (!strcmp(peri_collision_state_name(c, i), "_hash_zch_metadata"))
            assert_ok(peri_tensor_read(t, expiry, sizeof expiry));
        if (!strcmp(peri_collision_state_name(c, i), "_hash_zch_identities"))
            assert_ok(peri_tensor_read(t, identity, sizeof identity));
        peri_tensor_release(t);
    }
    for (int r = 0; r < 64; r++)
        assert_int_equal(expiry[r], identity[r] == 1 ? 101 : identity[r] == 2 || identity[r] == 3 ? 105 : -1);
    peri_collision_stats s = {.size = sizeof s};
    assert_ok(peri_device_synchronize(device));
    assert_ok(peri_collision_statistics(c, &s));
    assert_int_equal(s.ids, 6);
    assert_int_equal(s.hits, 5);
    assert_int_equal(s.missed, 1);
    assert_int_equal(s.inserted, 3);
    assert_int_equal(s.occupied, 3);
    for (int i = 0; i < 3; i++) {
        peri_tensor_release(in[i]);
        peri_tensor_release(out[i]);
    }
    peri_collision_release(c);
}

/* -- scores by the caller ------------------------------------------------------------------------------------------ */

/** LFU told by the caller is LFU. */
static void scores(void **unused)
{
    (void)unused;
    peri_collision_config a = {
        .size = sizeof a, .name = "t", .rows = ROWS, .buckets = 2, .policy = PERI_FORGET_LFU, .eviction_interval = 2};
    peri_collision *lfu, *user;
    assert_ok(peri_collision_new(device, &a, &lfu));
    a.policy = PERI_FORGET_USER;
    assert_ok(peri_collision_new(device, &a, &user));
    for (int step = 1; step <= 30; step++) {
        int64_t ids[MOST], want[MOST], got[MOST], n = 1 + draw(MOST);
        for (int64_t i = 0; i < n; i++) ids[i] = random_id(step);
        remap(lfu, ids, n, true, want);
        peri_tensor *in = ints(ids, n), *out, *counts, *last, *score;
        peri_status status = peri_collision_remap(user, &in, 1, true, &out);
        assert_int_equal(status, step % 2 ? PERI_OK : PERI_PENDING);
        assert_ok(peri_collision_candidates(user, &counts, &last));
        assert_int_equal(counts != NULL, status == PERI_PENDING);
        if (status == PERI_PENDING) {
            assert_int_equal(peri_collision_remap(user, &in, 1, true, &out), PERI_PENDING);
            assert_ok(peri_tensor_to(counts, PERI_F64, NULL, &score));
            assert_ok(peri_collision_scores(user, score));
            assert_fails(peri_collision_scores(user, score), PERI_EINVAL, "table 't' wants no scores");
            peri_tensor_release(score);
            peri_tensor_release(counts);
            peri_tensor_release(last);
            assert_int_equal(peri_collision_remap(user, &in, 1, true, &out), PERI_OK);
        }
        assert_int_equal(read_all(out, got, n), n);
        assert_memory_equal(got, want, (size_t)n * 8);
        peri_tensor_release(in);
        peri_tensor_release(out);
    }
    peri_collision_release(lfu);
    peri_collision_release(user);
}

/* -- what is refused ----------------------------------------------------------------------------------------------- */

static void refused(void **unused)
{
    (void)unused;
    peri_collision *c;
    peri_collision_config a = {.size = sizeof a, .name = "shop", .rows = 10, .policy = PERI_FORGET_LFU};
    a.buckets = 11;
    assert_fails(peri_collision_new(device, &a, &c), PERI_EINVAL, "table 'shop': buckets 11, allowed: 1 to 10");
    a.buckets = 2;
    a.segments = (int64_t[]){0, 10, 10};
    assert_fails(peri_collision_new(device, &a, &c), PERI_EINVAL,
                 "segments[1] is 10, wanted rising numbers from 0 to 10 rows");
    a.segments = NULL;
    a.policy = PERI_FORGET_TTL;
    assert_fails(peri_collision_new(device, &a, &c), PERI_EINVAL, "policy 5 for an MCH map");
    a.policy = PERI_FORGET_LFU;
    a.spread = PERI_SPREAD_RANGE;
    assert_fails(peri_collision_new(device, &a, &c), PERI_EINVAL, "input_hash_size 0");
    a.input_hash_size = 100;
    assert_ok(peri_collision_new(device, &a, &c));
    peri_tensor *in = ints((int64_t[]){5, 100, -1}, 3), *out;
    assert_fails(peri_collision_remap(c, &in, 1, true, &out), PERI_ERANGE,
                 "table 'shop': id 100 (feature 0, place 1) lies outside");
    peri_tensor_release(in);
    int64_t rows[2];
    remap(c, (int64_t[]){5, 7}, 2, true, rows);
    peri_collision_release(c);
    a.first_bucket = 1;
    a.n_buckets = 1;
    a.on_miss = PERI_MISS_ERROR;
    assert_ok(peri_collision_new(device, &a, &c));
    in = ints((int64_t[]){60, 5}, 2);
    assert_fails(peri_collision_remap(c, &in, 1, true, &out), PERI_ERANGE,
                 "id 5 (feature 0, place 1) belongs to a bucket");
    peri_tensor_release(in);
    in = ints((int64_t[]){60, 61}, 2);
    assert_fails(peri_collision_remap(c, &in, 1, false, &out), PERI_ERANGE,
                 "table 'shop': id 60 (feature 0, place 0) has no row");
    assert_ok(peri_collision_remap(c, &in, 1, true, &out));
    peri_tensor_release(out);
    peri_tensor_release(in);
    const char *names[] = {"_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts", "_output_segments_tensor",
                           "_current_iter_tensor"};
    int64_t segments[] = {0, 5, 10}, one = 1, sorted[] = {60, 61, INT64_MAX, INT64_MAX, INT64_MAX},
            map[] = {5, 6, 7, 8, 9};
    int64_t counts[5] = {1, 1, 0, 0, INT64_MAX};
    struct {
        int64_t *cell, value;
        const char *text;
        peri_status status;
    } faults[] = {
        {&sorted[1], 60, "id 60, row 6: it has two rows", PERI_EINVAL},
        {&sorted[1], 59, "ids are not ascending", PERI_EINVAL},
        {&sorted[0], 3, "id 3, row 5: it belongs to another bucket", PERI_EINVAL},
        {&map[2], 4, "row 4: the row is another", PERI_EINVAL},
        {&map[4], 8, "the row is another", PERI_EINVAL},
        {&segments[1], 4, "segments differ: _output_segments_tensor[1] is 4, wanted 5", PERI_EMISMATCH},
        {&counts[1], -1, "table 'shop', bucket 1: id 61, row 6: _mch_counts is -1, allowed: 0 to 4611686018427387903",
         PERI_EINVAL},
        {&counts[0], INT64_MAX, "id 60, row 5: _mch_counts is 9223372036854775807, allowed: 0 to 46116", PERI_EINVAL},
        {&counts[2], -7, "bucket 1: row 7, without an id: _mch_counts is -7", PERI_EINVAL},
        {&counts[4], -1, "row 9, without an id: _mch_counts is -1, allowed: 0 to 9223372036854775807", PERI_EINVAL},
        {&one, -1, "_current_iter_tensor is -1, allowed: 0 to 9007199254740992", PERI_EINVAL},
        {&one, INT64_C(1) << 60, "_current_iter_tensor is 1152921504606846976, allowed: 0 to", PERI_EINVAL},
        {&counts[1], INT64_MAX / 2, "", PERI_OK},
        {&one, INT64_C(1) << 53, "", PERI_OK},
        {NULL, 0, "", PERI_OK}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        int64_t kept = faults[i].cell ? *faults[i].cell : 0;
        if (faults[i].cell) *faults[i].cell = faults[i].value;
        peri_tensor *t[] = {ints(sorted, 5), ints(map, 5), ints(counts, 5), ints(segments, 3), ints(&one, 1)};
        if (faults[i].status < 0)
            assert_fails(peri_collision_load(c, 1, 1, 5, names, t), faults[i].status, faults[i].text);
        else assert_ok(peri_collision_load(c, 1, 1, 5, names, t));
        assert_fails(peri_collision_load(c, 0, 2, 5, names, t), PERI_EINVAL,
                     "is i64 [5], wanted i64 [10] for buckets [0, 2)");
        assert_fails(peri_collision_load(c, 1, 1, 4, names, t), PERI_EINVAL, "state _current_iter_tensor is missing");
        assert_fails(peri_collision_load(c, 1, 1, 5, NULL, t), PERI_EINVAL,
                     "peri_collision_load: the names are missing");
        assert_fails(peri_collision_load(c, 1, 1, 5, names, NULL), PERI_EINVAL,
                     "peri_collision_load: the states are missing");
        assert_fails(peri_collision_load(c, 1, 1, -1, names, t), PERI_EINVAL, "-1 states, allowed: 0 and more");
        assert_fails(peri_collision_load(c, 1, 1, 0, NULL, NULL), PERI_EINVAL, "state _mch_sorted_raw_ids is missing");
        assert_fails(peri_collision_load(c, 1, INT32_MAX, 5, names, t), PERI_EINVAL,
                     "buckets [1, 2147483648), allowed: some of [0, 2)");
        const char *twice[] = {names[0], names[1], names[2], names[3], names[4], names[4]};
        peri_tensor *six[] = {t[0], t[1], t[2], t[3], t[4], t[4]};
        assert_fails(peri_collision_load(c, 1, 1, 6, twice, six), PERI_EINVAL,
                     "state _current_iter_tensor is given twice");
        for (int k = 0; k < 5; k++) peri_tensor_release(t[k]);
        if (faults[i].cell) *faults[i].cell = kept;
    }
    remap(c, (int64_t[]){60, 61}, 2, false, rows);
    assert_int_equal(rows[0], 0);
    assert_int_equal(rows[1], 1);
    peri_collision_release(c);
}

/** The states of @c, by their names. */
static int32_t states_of(peri_collision *c, const char **names, peri_tensor **t)
{
    int32_t n = peri_collision_states(c);
    for (int32_t i = 0; i < n; i++) {
        names[i] = peri_collision_state_name(c, i);
        assert_ok(peri_collision_state(c, i, &t[i]));
    }
    return n;
}

/** @c gives @value at @place of state @name, then loads what it had: only the first fails, with @text, and changes
 *  nothing. */
static void refuses_number(peri_collision *c, const char *name, int64_t place, int64_t value, const char *text)
{
    const char *names[8], *names_after[8];
    peri_tensor *t[8], *after[8];
    int64_t kept[64], seen[64];
    int32_t n = states_of(c, names, t), at = 0;
    while (strcmp(names[at], name)) at++;
    peri_tensor_info d = {.size = sizeof d};
    peri_tensor_describe(t[at], &d);
    int64_t size = peri_dtype_size(d.dtype), bytes = d.numel * size;
    assert_true(bytes <= (int64_t)sizeof kept);
    assert_ok(peri_tensor_read(t[at], kept, bytes));
    memcpy(seen, kept, sizeof kept);
    memcpy((char *)seen + place * size, &value, (size_t)size);
    assert_ok(peri_tensor_write(t[at], seen, bytes));
    assert_fails(peri_collision_load(c, 0, 2, n, names, t), PERI_EINVAL, text);
    states_of(c, names_after, after);
    assert_ok(peri_tensor_read(after[at], seen, bytes));
    assert_memory_equal(seen, kept, (size_t)bytes);
    assert_ok(peri_tensor_write(t[at], kept, bytes));
    assert_ok(peri_collision_load(c, 0, 2, n, names, t));
    for (int32_t i = 0; i < n; i++) {
        peri_tensor_release(t[i]);
        peri_tensor_release(after[i]);
    }
}

/** Numbers that no map can have; what is missing; what a configuration may not say. */
static void impossible(void **unused)
{
    (void)unused;
    peri_collision *c;
    int64_t rows[3], ids[] = {0, 1, 2};
    peri_collision_config a = {.size = sizeof a,
                               .name = "shop",
                               .rows = 8,
                               .buckets = 2,
                               .spread = PERI_SPREAD_MODULO,
                               .policy = PERI_FORGET_DISTANCE_LFU};
    assert_ok(peri_collision_new(device, &a, &c));
    for (int i = 0; i < 3; i++) remap(c, ids, 3, true, rows);
    const char *last = "_mch_last_access_iter";
    refuses_number(c, last, 0, INT64_C(1) << 61,
                   "id 0, row 1: _mch_last_access_iter is 2305843009213693952, allowed: 0 to 3, the state's");
    refuses_number(c, last, 1, 4,
                   "bucket 0: id 2, row 2: _mch_last_access_iter is 4, allowed: 0 to 3, the state's iteration");
    refuses_number(c, last, 4, -1, "table 'shop', bucket 1: id 1, row 6: _mch_last_access_iter is -1, allowed: 0 to 3");
    refuses_number(c, last, 7, 4, "bucket 1: row 7, without an id: _mch_last_access_iter is 4");
    refuses_number(c, "_mch_counts", 4, -1,
                   "bucket 1: id 1, row 6: _mch_counts is -1, allowed: 0 to 4611686018427387903");
    assert_fails(peri_collision_remap(c, NULL, -1, true, NULL), PERI_EINVAL,
                 "table 'shop': n_features is -1, allowed: 0 and more");
    peri_tensor *out;
    assert_fails(peri_collision_remap(c, NULL, 1, true, &out), PERI_EINVAL, "ids");
    peri_collision_release(c);

    peri_collision_config h = {.size = sizeof h,
                               .name = "shop",
                               .rows = 8,
                               .kind = PERI_COLLISION_HASH,
                               .buckets = 2,
                               .spread = PERI_SPREAD_MODULO,
                               .policy = PERI_FORGET_TTL,
                               .n_ttl = 1,
                               .ttl = (int64_t[]){INT32_MAX}};
    assert_ok(peri_collision_new(device, &h, &c));
    refuses_number(c, "_hash_zch_metadata", 5, -5,
                   "bucket 1: row 5, without an id: _hash_zch_metadata is -5, allowed: -1 to 2147483647");
    assert_ok(peri_collision_time_set(c, INT32_MAX)); /* the last time there is */
    remap(c, ids, 3, true, rows);
    char text[128];
    snprintf(text, sizeof text, "table 'shop', bucket 0: id 2, row %d: _hash_zch_metadata is -2, allowed: -1 to",
             (int)rows[2]);
    refuses_number(c, "_hash_zch_metadata", rows[2], -2, text);
    refuses_number(c, "_current_iter_tensor", 0, INT64_C(1) << 60,
                   "_current_iter_tensor is 1152921504606846976, allowed: 0 to");
    peri_collision_release(c);

    for (int kind = PERI_COLLISION_MCH; kind <= PERI_COLLISION_HASH; kind++) {
        peri_collision_config b = {.size = sizeof b, .name = "shop", .rows = 8, .kind = kind, .n_ttl = 2,
                                   .policy = kind == PERI_COLLISION_MCH ? PERI_FORGET_LFU : PERI_FORGET_NONE};
        assert_fails(peri_collision_new(device, &b, &c), PERI_EINVAL, "table 'shop': ttl is missing");
        b.n_features = 2;
        assert_fails(peri_collision_new(device, &b, &c), PERI_EINVAL, "table 'shop': ttl is missing");
        b.n_ttl = -1;
        assert_fails(peri_collision_new(device, &b, &c), PERI_EINVAL, "-1 times to live for 2 features");
        b.n_ttl = 2;
        b.ttl = (int64_t[]){0, INT64_C(1) << 31};
        assert_fails(peri_collision_new(device, &b, &c), PERI_EINVAL, "ttl 2147483648, allowed: 0 to 2147483647");
        b.ttl = (int64_t[]){0, 1};
        assert_fails(peri_collision_new(device, &b, &c), PERI_EINVAL, "which policy");
    }
    a.filter = PERI_FILTER_DYNAMIC;
    a.filter_arg = INFINITY;
    assert_fails(peri_collision_new(device, &a, &c), PERI_EINVAL, "filter_arg inf, allowed: finite numbers from 0 on");
    a.filter_arg = NAN;
    assert_fails(peri_collision_new(device, &a, &c), PERI_EINVAL, "nan, allowed: finite numbers from 0 on");
}

/* -- ids into rows of another map ---------------------------------------------------------------------------------- */

enum { FIT_IDS = 60, FIT_ROWS = 50, FIT_WINDOW = 8 };

typedef struct fitted {
    int64_t id;
    double score;
} fitted;

static int better_first(const void *a, const void *b)
{
    const fitted *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/** The law: the best id comes first, and takes the first free row from its home on. */
static void fit_plainly(const peri_collision_fit *a, fitted *list, int64_t n, int64_t *rows)
{
    qsort(list, (size_t)n, sizeof *list, better_first);
    for (int64_t r = 0; r < FIT_ROWS; r++) rows[r] = -1;
    for (int64_t i = 0; i < n; i++) {
        const int64_t b = peri_collision_bucket(list[i].id, a->spread, a->buckets, a->input_hash_size);
        const int64_t base = a->segments[b], usable = a->segments[b + 1] - base - a->aside;
        for (int64_t k = 0; k < usable && k < a->max_probe; k++) {
            const int64_t row = base + (peri_collision_home(list[i].id, usable) + k) % usable;
            if (rows[row] != -1) continue;
            rows[row] = list[i].id;
            break;
        }
    }
}

/** Pick the window's ids in two halves and put them; what goes on behind it is added to @left. Returns how many. */
static int64_t fit_window(peri_collision_fit a, const fitted *list, int64_t n, const fitted *come, int64_t n_come,
                          fitted *left, int64_t *rows)
{
    int64_t ids[FIT_IDS], entry_ids[FIT_IDS], entry_scores[FIT_IDS], row_scores[FIT_ROWS], home[FIT_IDS];
    int64_t n_left = 0, at;
    int64_t *entries[2] = {entry_ids, entry_scores}, *window[2] = {rows, row_scores}, filled[4] = {0};
    int32_t place[FIT_IDS], bucket[FIT_IDS];
    a.arrays = 2, a.entries = entries, a.rows = window, a.filled = filled;
    for (int64_t r = 0; r < a.past - a.first; r++) rows[r] = -1;
    for (int64_t i = 0; i < n; i++) ids[i] = list[i].id;
    for (int64_t half = -1; half < 2; half++) { /* -1: those that come from the window before */
        const int64_t begin = half == 1 ? n / 2 : 0, some = half < 0 ? n_come : half ? n - n / 2 : n / 2;
        peri_collision_picked got = {.size = sizeof got, .n = n_come};
        if (half >= 0) assert_ok(peri_collision_fit_pick(&a, ids + begin, some, place, bucket, home, &got));
        for (int64_t k = 0; k < got.n; k++) {
            const fitted *x = half < 0 ? &come[k] : &list[begin + place[k]];
            entry_ids[k] = x->id;
            memcpy(&entry_scores[k], &x->score, sizeof x->score);
            if (half < 0) bucket[k] = (int32_t)a.low, home[k] = a.first;
        }
        for (at = 0;; at++) {
            assert_ok(peri_collision_fit_put(&a, at, got.n, bucket, home, &at));
            if (at == got.n) break;
            left[n_left].id = entry_ids[at];
            memcpy(&left[n_left++].score, &entry_scores[at], sizeof left->score);
        }
    }
    for (int64_t r = 0, b = a.low; r < a.past - a.first; r++) {
        while (a.first + r >= a.segments[b + 1]) b++;
        filled[b] -= rows[r] != -1;
    }
    for (int b = 0; b < 4; b++) assert_int_equal(filled[b], 0);
    return n_left;
}

/** Whole buckets in one window, and the rows of each bucket in several, have what the law says, in whatever order ids
 *  come. */
static void fits(void **unused)
{
    (void)unused;
    for (int round = 0; round < 400; round++) {
        const int64_t segments[] = {0, draw(5) + 1, 20 + draw(5), FIT_ROWS};
        peri_collision_fit a = {.size = sizeof a, .kind = PERI_COLLISION_HASH, .segments = segments, .buckets = 3,
                                .max_probe = (int32_t)(1 + draw(FIT_ROWS)), .high = 3, .past = FIT_ROWS,
                                .aside = draw(2) == 1};
        fitted list[FIT_IDS], sorted[FIT_IDS], come[2][FIT_IDS * 2];
        const int64_t n = draw(FIT_IDS) + 1;
        int64_t want[FIT_ROWS], got[FIT_ROWS];
        for (int64_t i = 0; i < n; i++) list[i] = (fitted){(i * 7919 + round) * 104729, (double)draw(6) - 2};
        memcpy(sorted, list, sizeof sorted);
        fit_plainly(&a, sorted, n, want);
        assert_int_equal(fit_window(a, list, n, NULL, 0, come[0], got), 0);
        assert_memory_equal(got, want, sizeof got);
        a.part = true;
        for (a.low = 0; a.low < 3; a.low++) {
            int64_t n_come = 0, before = -1;
            a.high = a.low + 1;
            while (before != n_come) { /* until what leaves the last window is what came into the first */
                before = n_come;
                for (a.first = segments[a.low]; a.first < segments[a.high]; a.first = a.past) {
                    a.past = a.first + FIT_WINDOW < segments[a.high] ? a.first + FIT_WINDOW : segments[a.high];
                    n_come = fit_window(a, list, n, come[0], n_come, come[1], got + a.first);
                    memcpy(come[0], come[1], sizeof come[0]);
                }
            }
        }
        assert_memory_equal(got, want, sizeof got);
    }
    peri_collision_fit a = {.size = sizeof a, .kind = PERI_COLLISION_HASH, .segments = (const int64_t[]){0, 4},
                            .buckets = 1, .high = 2};
    peri_collision_picked out = {.size = sizeof out};
    assert_fails(peri_collision_fit_pick(&a, NULL, 0, NULL, NULL, NULL, &out), PERI_EINVAL,
                 "buckets 0 to 2, allowed: within 0 to 1");
}

static void all_on(const char *name)
{
    assert_ok(peri_device_get(name, &device));
    void *unused = NULL;
    mch(&unused);
    parts(&unused);
    hash_maps(&unused);
    features(&unused);
    scores(&unused);
    refused(&unused);
    impossible(&unused);
    assert_ok(peri_device_synchronize(device));
}

static void on_cpu(void **unused)
{
    (void)unused;
    int64_t live = peri_mem_objects();
    all_on("cpu");
    assert_int_equal(peri_mem_objects(), live);
}
static void on_opaque(void **unused)
{
    (void)unused;
    all_on("opaque");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(on_cpu), cmocka_unit_test(on_opaque), cmocka_unit_test(fits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
