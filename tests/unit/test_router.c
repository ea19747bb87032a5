/* SPDX-License-Identifier: Apache-2.0
 *
 * test_router.c: random batches through the routers of three ranks. Each id's place, which its home kept, is read where
 * its owner received it: in the part of that rank, of its strand and of its bag, and it is the row of a shard that
 * holds it, as tables tell and not routes.
 */
#include "tests/harness/check.h"

#include "runtime/shard/router.h"

#include <perilune/jagged.h>

#include <stdlib.h>

enum { RANKS = 3, FEATURES = 4, TABLES = 4, MOST_ROWS = 6, MOST_IDS = 4096, ROUNDS = 60 };

static uint64_t state = 5;
static int64_t below(int64_t n) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (int64_t)((state * 0x2545f4914f6cdd1dull) >> 33) % n;
}

/* Tables: rows in three uneven parts, one of them empty in the third; the whole table on a rank; two blocks of columns;
 * replicas. */
static peri_shard rows_cut[] = {{.rows = 5, .cols = 8, .rank = 2}, {.row_offset = 5, .rows = 20, .cols = 8, .rank = 0},
                                {.row_offset = 25, .rows = 1, .cols = 8, .rank = 1}};
static peri_shard whole[] = {{.rows = 30, .cols = 4, .rank = 1}};
static peri_shard columns[] = {{.rows = 12, .cols = 4, .rank = 0}, {.rows = 12, .col_offset = 4, .cols = 4, .rank = 2}};
static const int32_t features[] = {0, 1, 1, 2, 3, 0};
static const peri__route_table tables[TABLES] = {
    {.rows = 26, .cols = 8, .n_features = 2, .features = features, .n_shards = 3, .shards = rows_cut},
    {.rows = 30, .cols = 4, .n_features = 1, .features = features + 2, .n_shards = 1, .shards = whole},
    {.rows = 12, .cols = 8, .n_features = 2, .features = features + 3, .n_shards = 2, .shards = columns},
    {.rows = 9, .cols = 4, .n_features = 1, .features = features + 5, .data_parallel = true}};
static const char *const table_names[] = {"r", "w", "c", "d"}, *const feature_names[] = {"a", "b", "c", "d"};

/** One rank. */
typedef struct rank {
    peri_group *group;
    peri__router router;
    peri__routing routing;
    peri_kjt *kjt;
    int64_t ids[MOST_IDS], lengths[FEATURES * MOST_ROWS], rows, n;
} rank;

static peri_tensor *numbers(const int64_t *x, int64_t n)
{
    peri_device *device = NULL;
    peri_tensor *t = NULL;
    assert_ok(peri_device_get("cpu", &device));
    assert_ok(peri_tensor_new(device, PERI_I64, 1, &n, &t));
    if (n) assert_ok(peri_tensor_write(t, x, 8 * n));
    return t;
}

/** A batch of @r: ids of every feature, some of them -1. */
static void make_batch(rank *r)
{
    static const int64_t rows[FEATURES] = {9, 26, 12, 12}; /* the least of the feature's tables */
    r->rows = below(MOST_ROWS);
    r->n = 0;
    for (int32_t f = 0; f < FEATURES; f++)
        for (int64_t b = 0; b < r->rows; b++) {
            int64_t n = r->lengths[f * r->rows + b] = below(5);
            for (int64_t k = 0; k < n; k++) r->ids[r->n++] = below(8) ? below(rows[f]) : -1;
        }
    peri_keys *keys = NULL;
    assert_ok(peri_keys_new(feature_names, FEATURES, &keys));
    peri_kjt_config args = {.size = sizeof args,
                          .keys = keys,
                          .values = numbers(r->ids, r->n),
                          .lengths = numbers(r->lengths, FEATURES * r->rows)};
    assert_ok(peri_kjt_new(&args, &r->kjt));
    peri_tensor_release(args.values);
    peri_tensor_release(args.lengths);
    peri_keys_release(keys);
}

static peri_status check(void *ctx, int32_t from, const int64_t *words)
{
    (void)ctx;
    return words[0] == 40 + from ? PERI_OK
                                 : peri__fail(PERI_EMISMATCH, "rank %d announced %lld", from, (long long)words[0]);
}

static void run(rank *ranks)
{
    for (int round = 0; round < 100000; round++) {
        int32_t pending = 0;
        for (int32_t i = 0; i < RANKS; i++) {
            peri_status status = peri__routing_test(&ranks[i].routing);
            assert_ok(status);
            pending += status == PERI_PENDING;
        }
        if (!pending) return;
    }
    fail_msg("the batches do not arrive");
}

static int64_t read_id(const peri_tensor *t, int64_t i)
{
    return t->dtype == PERI_I32 ? ((const int32_t *)peri__data(t))[i] : ((const int64_t *)peri__data(t))[i];
}

/** The first row of the shard of table @t that holds row @id and lies on rank @owner; -1: there is none. */
static int64_t first_row(const peri__route_table *t, int64_t id, int32_t owner)
{
    for (int32_t s = 0; s < t->n_shards; s++)
        if (t->shards[s].rank == owner && id >= t->shards[s].row_offset &&
            id < t->shards[s].row_offset + t->shards[s].rows)
            return t->shards[s].row_offset;
    return -1;
}

/** Read @id, which @home sent to @place as sample @bag of partition @p, where it arrived. */
static void check_place(rank *ranks, int32_t home, const peri__partition *p, int64_t bag, int64_t id, int64_t place)
{
    const peri__routing *r = &ranks[home].routing;
    const peri__routes *routes = r->router->routes;
    int32_t owner = 0;
    while (place >= r->rank_ids[owner + 1]) owner++;
    const peri__routing *o = &ranks[owner].routing;
    int64_t first = first_row(&tables[p->table], id, owner), strands = peri__strands_of(routes, owner),
            at = place - r->rank_ids[owner];
    assert_true(first >= 0);
    int64_t strand = 0, bags = 0; /* of those that the owner has from this home */
    for (int64_t before = 0; at >= before + o->ids[home * strands + strand]; strand++) {
        before += o->ids[home * strands + strand];
        bags += o->counts[home * strands + strand];
    }
    assert_int_equal(routes->strands[routes->wire[routes->rank_wire[owner] + strand]].partition,
                     p - routes->partitions);
    for (int32_t s = 0; s < home; s++) {
        at += o->source_ids[s];
        bags += o->source_bags[s];
    }
    const int64_t *offsets = peri__data(o->offsets);
    assert_true(offsets[bags + bag] <= at && at < offsets[bags + bag + 1]);
    assert_int_equal(read_id(o->received[PERI__IDS], at) + first, id);
}

/** Every id of every routed partition of @home. Returns how many travel. */
static int64_t check_rank(rank *ranks, int32_t home)
{
    const rank *me = &ranks[home];
    const peri__routing *r = &me->routing;
    const peri__routes *routes = r->router->routes;
    const int64_t *places = peri__data(r->places);
    static bool taken[MOST_IDS];
    int64_t travel = 0;
    memset(taken, 0, sizeof taken);
    for (int32_t i = 0; i < routes->n_partitions; i++) {
        const peri__partition *p = &routes->partitions[i];
        int64_t at = 0, k = 0;
        for (int64_t b = 0; b < p->feature * me->rows; b++) at += me->lengths[b];
        for (int64_t b = 0; b < me->rows && p->n_parts; b++)
            for (int64_t n = 0; n < me->lengths[p->feature * me->rows + b]; n++, at++, k++) {
                int64_t place = places[r->place_first[i] + k];
                if (me->ids[at] < 0) {
                    assert_int_equal(place, -1);
                    continue;
                }
                assert_true(place >= 0 && place < r->rank_ids[RANKS] && !taken[place]);
                taken[place] = true;
                travel++;
                check_place(ranks, home, p, b, me->ids[at], place);
            }
        assert_int_equal(r->place_first[i + 1] - r->place_first[i], k);
    }
    assert_int_equal(travel, r->rank_ids[RANKS]);
    return travel;
}

static void test_places(void **unused)
{
    (void)unused;
    static rank ranks[RANKS];
    int64_t before = peri_mem_objects(), travelled = 0;
    peri__routes *routes = NULL;
    peri__nodes nodes;
    peri_device *device = NULL;
    assert_ok(peri_device_get("cpu", &device));
    assert_ok(peri__nodes_init(&nodes, NULL, RANKS));
    assert_ok(peri__routes_new(&nodes, tables, TABLES, FEATURES, &routes));
    for (int32_t i = 0; i < RANKS; i++) {
        peri_comm_config config = {.size = sizeof config,
                                   .transport = "sim",
                                   .job = "router",
                                   .rank = i,
                                   .world_size = RANKS,
                                   .timeout_s = 20};
        assert_ok(peri_comm_open(&config, &ranks[i].group));
        ranks[i].router = (peri__router){.group = ranks[i].group,
                                         .device = device,
                                         .routes = routes,
                                         .function = "test",
                                         .table_names = table_names,
                                         .feature_names = feature_names,
                                         .wire_i32 = true};
        assert_ok(peri__router_init(&ranks[i].router));
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int32_t i = 0; i < RANKS; i++) {
            make_batch(&ranks[i]);
            peri__routing_args args = {.kjt = ranks[i].kjt, .agreement = {.hash = 9}, .words = {40 + i}, .check = check,
                                       .keep_places = true};
            assert_ok(peri__routing_start(&ranks[i].routing, &ranks[i].router, &args));
            peri__routing *routing = &ranks[i].routing;
            assert_ok(peri__routings_set_out(&routing, 1));
        }
        run(ranks);
        for (int32_t i = 0; i < RANKS; i++) travelled += check_rank(ranks, i);
        for (int32_t i = 0; i < RANKS; i++) {
            peri__routing_fini(&ranks[i].routing);
            peri_kjt_release(ranks[i].kjt);
        }
    }
    assert_true(travelled > 100 * RANKS);
    for (int32_t i = 0; i < RANKS; i++) peri__router_fini(&ranks[i].router);
    for (int32_t i = 0; i < RANKS; i++) {
        peri_group_close(ranks[i].group);
        peri_group_release(ranks[i].group);
    }
    peri__routes_free(routes);
    peri__nodes_fini(&nodes);
    assert_int_equal(peri_mem_objects(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_places)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
