/* SPDX-License-Identifier: Apache-2.0
 *
 * test_collision.c: looking ids up in maps: every instruction set gives ref's rows, windows, times and log (whose entries have no order),
 * however ranges are split.
 * deadline: 300 s
 */
#include "jagged_cases.h"

#include "kernels/spread.h"

enum { BUCKETS = 3, ROWS = 120, LINES = 64, IDS = 700 };

/** A map and what its kernels need. */
typedef struct world {
    peri_k_collision_map map;
    peri_k_collision_bucket bucket[BUCKETS];
    int64_t head[PERI_COLLISION_WORDS], ids[ROWS], counts[ROWS], last[ROWS], changed[ROWS], n_changed[BUCKETS];
    uint8_t is_changed[ROWS];
    peri_k_hash_row rows[ROWS];
    peri_k_mch_slot slots[LINES * PERI_MCH_LINE];
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
    m->counts = w->counts;
    m->last = w->last;
}

static void make(world *w, int variant)
{
    bool hash = variant & 1;
    static const int64_t starts[] = {0, 1, 41, ROWS};
    memset(w, 0, sizeof *w);
    point(w, hash);
    peri_k_collision_map *m = &w->map;
    m->buckets = variant % 5 ? BUCKETS : 2 * BUCKETS;
    m->first_bucket = variant % 5 ? 0 : 2;
    m->n_buckets = BUCKETS;
    m->block = 100;
    m->spread = variant / 2 % 3;
    m->on_miss = 1 + variant / 6 % 4;
    m->policy = hash ? (int[]){PERI_K_EVICT_NONE, PERI_K_EVICT_TTL, PERI_K_EVICT_PROBE_LRU}[variant / 2 % 3] : 1 + variant / 2 % 3;
    m->max_probe = variant % 3 ? 5 : 100;
    m->count_bits = (int[]){32, 0, 16, 2}[variant / 2 % 4];
    bool aside = !hash || m->on_miss == PERI_K_MISS_ROW;
    for (int b = 0, line = 0; b < BUCKETS; b++) {
        int64_t rows = starts[b + 1] - starts[b], lines = variant % 7 ? (rows + 1) / 2 : (rows + 3) / 4;
        int64_t usable = rows - aside;
        w->bucket[b] = (peri_k_collision_bucket){starts[b], rows, usable, line, lines, UINT64_MAX / (uint64_t)(usable ? usable : 1)};
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

/** What is in the log is learned, by ref. */
static void learn(world *w, int64_t now)
{
    peri_k_collision_record *records = room(4 * IDS * (int64_t)sizeof *records);
    int64_t sizes[BUCKETS] = {0}, starts[BUCKETS + 1], news[BUCKETS], blocks = 1;
    peri_k_collision_group_args group = {.map = w->map, .log = w->log, .records = records, .sizes = sizes, .starts = starts};
    peri_kernels_ref.fn[PERI_K_collision_count](&group, 0, blocks);
    peri_kernels_ref.fn[PERI_K_collision_starts](&group, 0, 1);
    peri_kernels_ref.fn[PERI_K_collision_group](&group, 0, blocks);
    peri_k_collision_learn_args a = {.map = w->map, .records = records, .scratch = records + IDS, .starts = starts, .news = news,
                                     .decay = 1, .now = now, .call = now, .window = now - 1};
    if (w->map.rows) peri_kernels_ref.fn[PERI_K_hash_map_insert](&a, 0, BUCKETS);
    else {
        peri_kernels_ref.fn[PERI_K_mch_coalesce](&a, 0, BUCKETS);
        peri_kernels_ref.fn[PERI_K_mch_evict](&a, 0, BUCKETS);
    }
    w->head[PERI_COLLISION_LOGGED] = 0;
}

static int by_words(const void *a, const void *b) { return memcmp(a, b, sizeof(peri_k_collision_entry)); }

/** @w after @ids were looked up by @k. */
static void look(world *w, const peri_kernels *k, const int64_t *ids, int64_t n, int64_t learn_n, int64_t now, int split)
{
    point(w, w->map.rows != NULL);
    peri_k_collision_find_args a = {.map = w->map, .ids = ids, .out = w->out, .log = w->log, .first = 1000, .learn = learn_n, .now = now,
                                    .window = now - 1 - now % 5, .expiry = now + 2};
    run(k, w->map.rows ? PERI_K_hash_map_find : PERI_K_mch_find, &a, n, split);
    qsort(w->log, (size_t)w->head[PERI_COLLISION_LOGGED], sizeof *w->log, by_words);
    memset(&w->map, 0, offsetof(peri_k_collision_map, buckets)); /* addresses differ */
}

static void find(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 240; variant++) {
        world *w = room(sizeof *w), *want = room(sizeof *w), *got = room(sizeof *w);
        bool hash = variant & 1;
        make(w, variant);
        int64_t ids[IDS];
        for (int64_t now = 1; now <= 4; now++) {
            int64_t n = (int64_t)draw(IDS + 1), some = draw(3) ? n : (int64_t)draw((uint64_t)n + 1);
            draw_ids(w, ids, n);
            memcpy(want, w, sizeof *w);
            point(want, hash);
            look(want, &peri_kernels_ref, ids, n, some, now, 0);
            for (int i = 0; i < ISAS; i++) {
                const peri_kernels *k = peri_kernels_isa(isas[i]);
                for (int split = 0; k && split < SPLITS; split++) {
                    memcpy(got, w, sizeof *w);
                    point(got, hash);
                    look(got, k, ids, n, some, now, split);
                    if (memcmp(got, want, sizeof *w))
                        fail_msg("variant %d, iteration %d on %s, split %d", variant, (int)now, isas[i], split);
                }
            }
            point(w, hash);
            peri_k_collision_find_args a = {.map = w->map, .ids = ids, .out = w->out, .log = w->log, .learn = n, .now = now,
                                            .window = now - 1, .expiry = now + 2};
            peri_kernels_ref.fn[hash ? PERI_K_hash_map_find : PERI_K_mch_find](&a, 0, n);
            learn(w, now);
            w->head[PERI_COLLISION_BAD] = INT64_MAX;
        }
        drop_all(NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(find, drop_all)};
    seed(NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
