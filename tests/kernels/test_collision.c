/* SPDX-License-Identifier: Apache-2.0
 *
 * test_collision.c: maps from ids to rows: every table of kernels gives ref's rows, windows, times and log (whose
 * entries have no order), however ranges are split, learns what ref learns, and reads, judges and writes state as ref
 * does.
 * deadline: 300 s
 * takes: 15 s
 */
#include "jagged_cases.h"

#include <pthread.h>

#include "kernels/spread.h"

enum { BUCKETS = 3, ROWS = 120, LINES = 64, IDS = 700 };

/** A map and what its kernels need. */
typedef struct world {
    peri_k_collision_map map;
    peri_k_collision_bucket bucket[BUCKETS];
    int64_t head[PERI_COLLISION_WORDS], ids[ROWS], counts[ROWS], last[ROWS], changed[ROWS], n_changed[BUCKETS];
    uint8_t is_changed[ROWS];
    peri_k_hash_row rows[ROWS];
    _Alignas(64) peri_k_mch_slot slots[LINES * PERI_MCH_LINE];
    peri_k_collision_entry log[IDS];
    int64_t out[IDS];
} world;

/** The addresses of @w's own arrays. */
static void point(world *w, bool hash)
{
    peri_k_collision_map *m = &w->map;
    m->bucket = w->bucket;
    m->head = w->head;
    m->changed = w->changed;
    m->n_changed = w->n_changed;
    m->is_changed = w->is_changed;
    m->rows = hash ? w->rows : NULL;
    m->slots = w->slots;
    m->ids = w->ids;
    m->counts = m->policy == PERI_K_EVICT_LRU ? NULL : w->counts;
    m->last = m->policy == PERI_K_EVICT_LFU ? NULL : w->last;
}

static void make(world *w, int variant)
{
    bool hash = variant & 1;
    static const int64_t starts[] = {0, 1, 41, ROWS};
    memset(w, 0, sizeof *w);
    peri_k_collision_map *m = &w->map;
    m->buckets = variant % 5 ? BUCKETS : 2 * BUCKETS;
    m->first_bucket = variant % 5 ? 0 : 2;
    m->n_buckets = BUCKETS;
    m->block = 100;
    m->spread = variant / 2 % 3;
    m->on_miss = 1 + variant / 6 % 4;
    m->policy = hash ? (int[]){PERI_K_EVICT_NONE, PERI_K_EVICT_TTL, PERI_K_EVICT_PROBE_LRU}[variant / 2 % 3]
                     : 1 + variant / 2 % 3;
    m->max_probe = variant % 3 ? 5 : 100;
    m->counted = m->policy != PERI_K_EVICT_LRU || variant % 4 == 0;
    point(w, hash);
    bool aside = !hash || m->on_miss == PERI_K_MISS_ROW;
    for (int b = 0, line = 0; b < BUCKETS; b++) {
        int64_t rows = starts[b + 1] - starts[b], lines = variant % 7 ? (rows + 1) / 2 : (rows + 3) / 4;
        int64_t usable = rows - aside;
        w->bucket[b] = (peri_k_collision_bucket){starts[b], rows,  usable,
                                                 line,      lines, UINT64_MAX / (uint64_t)(usable ? usable : 1)};
        line += (int)lines;
    }
    w->head[PERI_COLLISION_BAD] = INT64_MAX;
    peri_k_collision_state_args reset = {.map = *m, .blank = true};
    peri_kernels_ref.fn[PERI_K_collision_reset](&reset, 0, BUCKETS);
}

/** Ids of the map's own buckets. */
static void draw_ids(const world *w, int64_t *ids, int64_t n)
{
    static const int64_t edges[] = {INT64_MIN, INT64_MAX, -1, 0};
    for (int64_t i = 0, bucket; i < n; i++)
        do {
            ids[i] = draw(30) == 0 ? edges[draw(4)] : (int64_t)draw(draw(3) ? 80 : 600);
            bucket = peri_k_bucket(ids[i], w->map.spread, w->map.buckets, w->map.block);
        } while (bucket < w->map.first_bucket || bucket >= w->map.first_bucket + BUCKETS);
}

/** What is in the log is learned, by @k. */
static void learn(world *w, const peri_kernels *k, int64_t now, int variant)
{
    peri_k_collision_record *records = room(4 * IDS * (int64_t)sizeof *records);
    int64_t sizes[BUCKETS] = {0}, starts[BUCKETS + 1], news[BUCKETS], blocks = 1;
    peri_k_collision_group_args group = {
        .map = w->map, .log = w->log, .records = records, .sizes = sizes, .starts = starts};
    k->fn[PERI_K_collision_count](&group, 0, blocks);
    k->fn[PERI_K_collision_starts](&group, 0, 1);
    k->fn[PERI_K_collision_group](&group, 0, blocks);
    peri_k_collision_learn_args a = {.map = w->map,
                                     .records = records,
                                     .scratch = records + IDS,
                                     .starts = starts,
                                     .news = news,
                                     .decay = (double[]){1, 3, 0.7}[variant % 3],
                                     .now = now,
                                     .call = now,
                                     .window = now - 1,
                                     .filter = variant / 4 % 4,
                                     .filter_arg = 0.4,
                                     .seed = 5};
    if (w->map.rows) k->fn[PERI_K_hash_map_insert](&a, 0, BUCKETS);
    else {
        k->fn[PERI_K_mch_coalesce](&a, 0, BUCKETS);
        k->fn[PERI_K_mch_evict](&a, 0, BUCKETS);
    }
    w->head[PERI_COLLISION_LOGGED] = 0;
}

static int by_number(const void *a, const void *b)
{
    int64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? -1 : x > y;
}

/** What two worlds know is the same: where ids lie in an index, and the order in which rows changed, is nobody's
 *  business. */
static bool same_knowledge(world *a, world *b, const int64_t *ids, int64_t n)
{
    for (int32_t k = 0; k < BUCKETS; k++) {
        const int64_t first = a->bucket[k].first_row;
        if (a->n_changed[k] != b->n_changed[k]) return false;
        qsort(a->changed + first, (size_t)a->n_changed[k], sizeof *a->changed, by_number);
        qsort(b->changed + first, (size_t)b->n_changed[k], sizeof *b->changed, by_number);
        if (memcmp(a->changed + first, b->changed + first, sizeof *a->changed * (size_t)a->n_changed[k])) return false;
    }
    world *both[] = {a, b};
    int64_t out[2][IDS], head[PERI_COLLISION_WORDS];
    for (int i = 0; i < 2; i++) {
        memcpy(head, both[i]->head, sizeof head);
        peri_k_collision_find_args look = {.map = both[i]->map, .ids = ids, .out = out[i], .n = n, .parts = 1};
        const bool hash = both[i]->map.rows != NULL;
        peri_kernels_ref.fn[hash ? PERI_K_hash_map_find : PERI_K_mch_find](&look, 0, hash ? n : 1);
        memcpy(both[i]->head, head, sizeof head);
    }
    return !memcmp(out[0], out[1], sizeof **out * (size_t)n) && !memcmp(a->head, b->head, sizeof a->head) &&
           !memcmp(a->ids, b->ids, sizeof a->ids) && !memcmp(a->counts, b->counts, sizeof a->counts) &&
           !memcmp(a->last, b->last, sizeof a->last) && !memcmp(a->rows, b->rows, sizeof a->rows) &&
           !memcmp(a->is_changed, b->is_changed, sizeof a->is_changed);
}

static int by_words(const void *a, const void *b) { return memcmp(a, b, sizeof(peri_k_collision_entry)); }

/** Windows have their whole counts, in one way: parts have bytes of their own, and what no longer fits a byte is in the
 *  log. */
static void total_windows(world *w)
{
    if (w->map.rows || !w->map.counted) return;
    for (size_t s = 0; s < sizeof w->slots / sizeof *w->slots; s++) {
        peri_k_mch_slot *slot = &w->slots[s];
        int64_t total = peri_k_window_count(slot->window), n = 0;
        for (int64_t e = 0; slot->row != UINT32_MAX && e < w->head[PERI_COLLISION_LOGGED]; e++)
            if (w->log[e].id == slot->id && w->log[e].place == 256) total += 256;
            else w->log[n++] = w->log[e];
        if (slot->row == UINT32_MAX) continue;
        w->head[PERI_COLLISION_LOGGED] = n;
        slot->window = (slot->window & 0xffff0000) | (uint32_t)total;
    }
    memset(w->log + w->head[PERI_COLLISION_LOGGED], 0, (size_t)(IDS - w->head[PERI_COLLISION_LOGGED]) * sizeof *w->log);
}

/** Windows as many calls leave them: bytes that are nearly full, in one or in both. */
static void age_windows(world *w)
{
    if (w->map.rows || !w->map.counted) return;
    for (size_t s = 0; s < sizeof w->slots / sizeof *w->slots; s++)
        if (w->slots[s].row != UINT32_MAX && draw(2)) {
            const uint32_t when = w->map.last ? 1 + (uint32_t)draw(2) : 0, high = 255 - (uint32_t)draw(12);
            w->slots[s].window = when << 16 | high << 8 | (255 - (uint32_t)draw(12));
        }
}

/** @w after @ids were looked up by @k. */
static void look(world *w, const peri_kernels *k, const int64_t *ids, int64_t n, int64_t learn_n, int64_t now,
                 int64_t parts, int split)
{
    point(w, w->map.rows != NULL);
    peri_k_collision_find_args a = {.map = w->map,
                                    .ids = ids,
                                    .out = w->out,
                                    .log = w->log,
                                    .first = 1000,
                                    .learn = learn_n,
                                    .now = now,
                                    .window = now - 1 - now % 5,
                                    .expiry = now + 2,
                                    .n = n,
                                    .parts = parts};
    if (w->map.rows) run(k, PERI_K_hash_map_find, &a, n, split);
    else run(k, PERI_K_mch_find, &a, parts, split);
    total_windows(w);
    qsort(w->log, (size_t)w->head[PERI_COLLISION_LOGGED], sizeof *w->log, by_words);
    memset(&w->map, 0, offsetof(peri_k_collision_map, buckets)); /* addresses differ */
}

/** A world where its slots have lines of their own. */
static world *room_world(void)
{
    const uintptr_t line = _Alignof(world);
    return (world *)(((uintptr_t)room(sizeof(world) + line) + line - 1) / line * line);
}

static void find(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 120; variant++) {
        world *w = room_world(), *want = room_world(), *got = room_world();
        bool hash = variant & 1;
        make(w, variant);
        int64_t ids[IDS];
        for (int64_t now = 1; now <= 4; now++) {
            int64_t n = (int64_t)draw(IDS + 1), some = draw(3) ? n : (int64_t)draw((uint64_t)n + 1);
            draw_ids(w, ids, n);
            age_windows(w);
            memcpy(want, w, sizeof *w);
            point(want, hash);
            look(want, &peri_kernels_ref, ids, n, some, now, 1, 0);
            for (int i = 0; i < ISAS; i++) {
                const peri_kernels *k = kernels_of(isas[i]);
                for (int split = 0; k && split < SPLITS; split++) {
                    if (i >= ISAS_CPU && split == BACKWARDS) continue; /* pretended devices are slow */
                    memcpy(got, w, sizeof *w);
                    point(got, hash);
                    const int64_t parts = 1 + (int64_t)draw(4);
                    look(got, k, ids, n, some, now, parts, split);
                    if (memcmp(got, want, sizeof *w))
                        fail_msg("variant %d, iteration %d on %s, %d parts, split %d", variant, (int)now, isas[i],
                                 (int)parts, split);
                }
            }
            point(w, hash);
            peri_k_collision_find_args a = {.map = w->map,
                                            .ids = ids,
                                            .out = w->out,
                                            .log = w->log,
                                            .learn = n,
                                            .now = now,
                                            .window = now - 1,
                                            .expiry = now + 2,
                                            .n = n,
                                            .parts = 1};
            peri_kernels_ref.fn[hash ? PERI_K_hash_map_find : PERI_K_mch_find](&a, 0, hash ? n : 1);
            memcpy(want, w, sizeof *w);
            point(want, hash);
            learn(want, &peri_kernels_ref, now, variant);
            for (int i = 1; i < ISAS; i++) {
                const peri_kernels *k = kernels_of(isas[i]);
                if (!k) continue;
                memcpy(got, w, sizeof *w);
                point(got, hash);
                learn(got, k, now, variant);
                if (!same_knowledge(got, want, ids, n))
                    fail_msg("variant %d, iteration %d: %s learns otherwise", variant, (int)now, isas[i]);
            }
            learn(w, &peri_kernels_ref, now, variant);
            w->head[PERI_COLLISION_BAD] = INT64_MAX;
        }
        drop_all(NULL);
    }
}

/* -- several threads ----------------------------------------------------------------------------------------------- */

enum { MANY = 200000, KNOWN = 6 };

typedef struct part_call {
    const peri_kernels *kernels;
    const peri_k_collision_find_args *args;
    int64_t part;
} part_call;

static void *find_part(void *arg)
{
    const part_call *p = arg;
    p->kernels->fn[PERI_K_mch_find](p->args, p->part, p->part + 1);
    return NULL;
}

/** Parts that run at the same time on the same few ids: nothing that was seen is lost, in windows and log together, nor
 *  counted twice. */
static void together(void **unused)
{
    (void)unused;
    int64_t *ids = room(8 * MANY), *out = room(8 * MANY);
    peri_k_collision_entry *log = room(MANY * (int64_t)sizeof *log);
    for (int round = 0; round < 3 * 3 * 4; round++) {
        const peri_kernels *k = kernels_of(isas[round / 3 % 3]);
        const int64_t parts = 1 + round / 9;
        if (!k) continue;
        world *w = room_world();
        make(w, 0);
        int64_t known[KNOWN], times[KNOWN] = {0}, logged[KNOWN] = {0};
        for (int i = 0; i < KNOWN; i++) {
            draw_ids(w, &known[i], 1);
            if (known[i] != INT64_MAX)
                w->log[w->head[PERI_COLLISION_LOGGED]++] = (peri_k_collision_entry){known[i], 1, 1};
        }
        learn(w, &peri_kernels_ref, 1, 3);
        w->map.counted = round % 3 != 0;
        w->map.last = round % 3 == 1 ? NULL : w->last;
        for (int64_t i = 0; i < MANY; i++) ids[i] = known[draw(KNOWN)];
        memset(w->head, 0, sizeof w->head);
        const peri_k_collision_find_args a = {.map = w->map,
                                              .ids = ids,
                                              .out = out,
                                              .log = log,
                                              .learn = MANY,
                                              .now = 9,
                                              .window = 2,
                                              .n = MANY,
                                              .parts = parts};
        part_call call[4];
        pthread_t thread[4];
        for (int64_t p = 0; p < parts; p++) {
            call[p] = (part_call){k, &a, p};
            assert_int_equal(pthread_create(&thread[p], NULL, find_part, &call[p]), 0);
        }
        for (int64_t p = 0; p < parts; p++) pthread_join(thread[p], NULL);
        int64_t hits = 0;
        for (int64_t i = 0; i < MANY; i++)
            for (int j = 0; j < KNOWN; j++)
                if (known[j] == ids[i]) {
                    times[j]++;
                    break;
                }
        for (int64_t e = 0; e < w->head[PERI_COLLISION_LOGGED]; e++)
            for (int j = 0; j < KNOWN; j++)
                if (known[j] == log[e].id) {
                    logged[j] += log[e].place;
                    break;
                }
        for (int j = 0; j < KNOWN; j++) {
            const peri_k_mch_slot *slot = NULL;
            for (size_t s = 0; s < sizeof w->slots / sizeof *w->slots; s++)
                if (w->slots[s].row != UINT32_MAX && w->slots[s].id == known[j]) slot = &w->slots[s];
            if (slot) hits += times[j];
            if (!times[j]) continue; /* the same id drawn before */
            if (!slot) assert_int_equal(logged[j], known[j] == INT64_MAX ? 0 : times[j]);
            else if (w->map.counted) assert_int_equal(peri_k_window_count(slot->window) + logged[j], times[j]);
            else assert_int_equal(logged[j], 0);
            if (slot) assert_int_equal(slot->window >> (w->map.counted ? 16 : 0), w->map.last ? 7 : 0);
        }
        assert_int_equal(w->head[PERI_COLLISION_HITS], hits);
        assert_int_equal(w->head[PERI_COLLISION_MISSED], MANY - hits);
        assert_true(hits > 0);
    }
    drop_all(NULL);
}

/* -- state --------------------------------------------------------------------------------------------------------- */

enum { STATE = 2600 }; /* rows of one bucket: more than a block sorts at once */

/** A map of one bucket. */
static peri_k_collision_map large_map(bool hash, peri_k_collision_bucket *bucket)
{
    const int64_t lines = STATE / 2;
    *bucket = (peri_k_collision_bucket){0, STATE, STATE - 1, 0, hash ? 0 : lines, UINT64_MAX / (STATE - 1)};
    peri_k_collision_map m = {.bucket = bucket,
                              .head = room(8 * PERI_COLLISION_WORDS),
                              .changed = room(8 * STATE),
                              .n_changed = room(8),
                              .is_changed = room(STATE),
                              .ids = room(8 * STATE),
                              .counts = room(8 * STATE),
                              .last = room(8 * STATE),
                              .buckets = 1,
                              .block = INT64_MAX,
                              .n_buckets = 1,
                              .on_miss = PERI_K_MISS_DROP,
                              .policy = PERI_K_EVICT_LFU,
                              .max_probe = STATE,
                              .counted = true};
    if (hash) m.rows = room(sizeof *m.rows * STATE);
    else m.slots = (void *)(((uintptr_t)room(64 + (int64_t)sizeof *m.slots * lines * PERI_MCH_LINE) + 63) / 64 * 64);
    memset(m.head, 0, 8 * PERI_COLLISION_WORDS);
    peri_k_collision_state_args reset = {.map = m, .blank = true};
    peri_kernels_ref.fn[PERI_K_collision_reset](&reset, 0, 1);
    return m;
}

/** A state that is right: ids, ascending (hash: where a map put them), and for each a row, its count and iteration. */
static peri_k_collision_state_args right_state(bool hash)
{
    peri_k_collision_state_args a = {.sorted = room(8 * STATE),
                                     .mapping = room(8 * STATE),
                                     .counts = room(8 * STATE),
                                     .last = room(8 * STATE),
                                     .expiries = room(4 * STATE),
                                     .scratch = room(STATE * (int64_t)sizeof *a.scratch),
                                     .first_row = 7,
                                     .iteration = 1000};
    const int64_t have = STATE - 1 - (int64_t)draw(STATE);
    for (int64_t i = 0, id = -5000; i < STATE; i++) {
        a.sorted[i] = hash ? -1 : i < have ? (id += 1 + (int64_t)draw(9)) : INT64_MAX;
        a.mapping[i] = a.first_row + i;
        a.counts[i] = (int64_t)draw(1000);
        a.last[i] = (int64_t)draw(1000);
        a.expiries[i] = (int32_t)draw(1000);
    }
    for (int64_t i = STATE - 2; i > 0 && !hash; i--) { /* the last row stays last */
        const int64_t k = (int64_t)draw((uint64_t)i + 1), moved = a.mapping[i];
        a.mapping[i] = a.mapping[k];
        a.mapping[k] = moved;
    }
    for (int64_t i = 0; i < have && hash; i++) {
        const uint64_t usable = STATE - 1;
        int64_t at = (int64_t)peri_k_rest(peri_k_murmur((uint64_t)i, 0, 0), usable, UINT64_MAX / usable);
        while (a.sorted[at] != -1) at = at + 1 < STATE - 1 ? at + 1 : 0;
        a.sorted[at] = i;
    }
    return a;
}

/** Written, read and judged by every table as by ref; faults, wherever they are put. */
static void states(void **unused)
{
    (void)unused;
    for (int round = 0; round < 24; round++) {
        const bool hash = round & 1;
        peri_k_collision_state_args right = right_state(hash);
        int64_t want_report[PERI_COLLISION_FAULT_WORDS], report[PERI_COLLISION_FAULT_WORDS];
        for (int i = 0; i < ISAS; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            peri_k_collision_bucket bucket;
            peri_k_collision_state_args a = right, out = right_state(hash);
            a.map = out.map = large_map(hash, &bucket);
            a.report = report;
            k->fn[hash ? PERI_K_hash_map_validate : PERI_K_mch_validate](&a, 0, 1);
            assert_int_equal(report[PERI_COLLISION_FAULT], PERI_COLLISION_SOUND);
            k->fn[hash ? PERI_K_hash_map_load : PERI_K_mch_load](&a, 0, 1);
            k->fn[hash ? PERI_K_hash_map_read : PERI_K_mch_sorted](&out, 0, 1);
            assert_memory_equal(out.sorted, right.sorted, 8 * STATE);
            if (hash) assert_memory_equal(out.expiries, right.expiries, 4 * STATE);
            int64_t have = 0;
            for (int64_t r = 0; r < STATE; r++) have += right.sorted[r] != (hash ? -1 : INT64_MAX);
            assert_int_equal(a.map.head[PERI_COLLISION_OCCUPIED], have);
            for (int64_t r = 0; r < STATE && !hash && right.sorted[r] != INT64_MAX; r++) {
                assert_int_equal(out.mapping[r], right.mapping[r]);
                assert_int_equal(out.counts[r], right.counts[r]);
                assert_int_equal(out.last[r], right.last[r]);
            }
            a.blank = false;
            a.rows_stay = true;
            k->fn[PERI_K_collision_reset](&a, 0, 1);
            assert_int_equal(a.map.head[PERI_COLLISION_OCCUPIED], 0);
            k->fn[hash ? PERI_K_hash_map_read : PERI_K_mch_sorted](&out, 0, 1);
            assert_memory_equal(out.sorted, right.sorted, 8 * STATE);
            a.map.head[PERI_COLLISION_OCCUPIED] = have;
            a.rows_stay = false;
            k->fn[PERI_K_collision_reset](&a, 0, 1);
            assert_int_equal(a.map.head[PERI_COLLISION_OCCUPIED], 0);
        }
        for (int fault = 0; fault < 6; fault++) { /* one more each time */
            const int64_t at = (int64_t)draw(STATE), from = (int64_t)draw(STATE);
            if (fault % 2 || hash) right.sorted[at] = right.sorted[from];
            else right.mapping[at] = right.mapping[from] + (draw(3) ? 0 : STATE);
            for (int i = 0; i < ISAS; i++) {
                const peri_kernels *k = kernels_of(isas[i]);
                peri_k_collision_bucket bucket;
                peri_k_collision_state_args a = right;
                if (!k) continue;
                a.map = large_map(hash, &bucket);
                a.report = i ? report : want_report;
                k->fn[hash ? PERI_K_hash_map_validate : PERI_K_mch_validate](&a, 0, 1);
                if (i && memcmp(report, want_report, sizeof report))
                    fail_msg("round %d, fault %d: %s says otherwise", round, fault, isas[i]);
            }
        }
        drop_all(NULL);
    }
}

/** The rows that changed, in order, whether few or many: the lists are empty then. */
static void changed(void **unused)
{
    (void)unused;
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < ISAS; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            peri_k_collision_bucket bucket;
            peri_k_collision_map m = large_map(false, &bucket);
            int64_t n = (int64_t)draw(round % 2 ? 40 : STATE), rows[STATE], before, *out = room(8 * STATE);
            for (int64_t r = 0; r < STATE; r++) rows[r] = r;
            for (int64_t r = 0; r < n; r++) { /* n different rows, in any order */
                const int64_t other = r + (int64_t)draw((uint64_t)(STATE - r)), moved = rows[r];
                rows[r] = rows[other];
                rows[other] = moved;
                m.changed[r] = rows[r];
                m.is_changed[rows[r]] = 1;
            }
            *m.n_changed = before = m.head[PERI_COLLISION_CHANGED] = n;
            peri_k_collision_changed_args a = {.map = m, .out = out, .n_before = &before};
            k->fn[PERI_K_collision_changed](&a, 0, 1);
            qsort(rows, (size_t)n, sizeof *rows, by_number);
            assert_memory_equal(out, rows, 8 * (size_t)n);
            assert_int_equal(*m.n_changed + m.head[PERI_COLLISION_CHANGED], 0);
            for (int64_t r = 0; r < STATE; r++) assert_int_equal(m.is_changed[r], 0);
            drop_all(NULL);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(find, drop_all), cmocka_unit_test_teardown(together, drop_all),
        cmocka_unit_test_teardown(states, drop_all), cmocka_unit_test_teardown(changed, drop_all)};
    seed(NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
