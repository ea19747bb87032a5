/* SPDX-License-Identifier: Apache-2.0
 *
 * test_route.c: the routing kernels of every instruction set against ref, on one list of random cases: equal bits, for
 * any split of the range.
 * deadline: 300 s
 */
#include "../../kernels/kernels.h"
#include "isas.h"
#include "../harness/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PARTITIONS = 6, MOST_PARTS = 9, MOST_BAGS = 60, GUARD = 16 };

/** One random routing problem. */
typedef struct problem {
    int64_t ids[20000];
    int32_t ids32[20000];
    float weights[20000];
    int64_t offsets[MOST_PARTITIONS * MOST_BAGS + 1];
    peri_k_partition partitions[MOST_PARTITIONS];
    int64_t bounds[MOST_PARTITIONS * (MOST_PARTS + 1)];
    int64_t wire_bag[MOST_PARTITIONS * MOST_PARTS];
    int64_t bags, wire_bags, n_ids;
    int32_t n_partitions, n_strands;
    bool bad;
} problem;

static uint64_t state;

static int64_t below(int64_t n) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (int64_t)((state * 0x2545f4914f6cdd1dull) >> 33) % n;
}

/** Rows cut into parts: even blocks (the last may be short), or anywhere. */
static void cut(problem *p, peri_k_partition *q, int32_t *n_bounds)
{
    q->rows = 1 + below(below(2) ? 20 : 2000);
    q->n_parts = (int32_t)below(MOST_PARTS);
    q->first_bound = *n_bounds;
    if (q->n_parts > q->rows) q->n_parts = (int32_t)q->rows;
    int64_t *b = p->bounds + *n_bounds;
    b[0] = 0;
    int64_t block = q->n_parts ? (q->rows + q->n_parts - 1) / q->n_parts : 0;
    bool even = below(2) && q->n_parts > 1 && block * (q->n_parts - 1) < q->rows;
    for (int32_t i = 1; i <= q->n_parts; i++) {
        b[i] = even ? i * block : b[i - 1] + 1 + below(q->rows - b[i - 1] - (q->n_parts - i));
        if (i == q->n_parts) b[i] = q->rows;
    }
    q->block = even ? block : 0;
    *n_bounds += q->n_parts + 1;
}

static bool raw; /* make partitions of raw ids too */

/** What of an id is compared with the boundaries; -2: it is not legal. An oracle of its own where the rule is
 *  simple. */
static int64_t key_of(const peri_k_partition *q, int64_t id)
{
    if (!q->raw) return id;
    if (q->raw - 1 == PERI_K_SPREAD_MODULO) return ((id % q->rows) + q->rows) % q->rows;
    if (q->raw - 1 == PERI_K_SPREAD_RANGE) return id < 0 || id / q->bucket_ids >= q->rows ? -2 : id / q->bucket_ids;
    return peri_k_bucket(id, PERI_K_SPREAD_HASH, q->rows, 0);
}

static int64_t raw_id(const peri_k_partition *q, bool bad)
{
    if (q->raw - 1 != PERI_K_SPREAD_RANGE)
        return below(4) ? below((int64_t)1 << 32) - ((int64_t)1 << 31) : below(5) - 2;
    return bad && !below(30) ? (below(2) ? -1 - below(9) : q->rows * q->bucket_ids + below(9))
                             : below(q->rows * q->bucket_ids);
}

static void make(problem *p, bool bad)
{
    memset(p, 0, sizeof *p);
    p->bad = bad;
    p->n_partitions = 1 + (int32_t)below(MOST_PARTITIONS);
    int32_t n_bounds = 0;
    int64_t bag = 0;
    for (int32_t i = 0; i < p->n_partitions; i++) {
        peri_k_partition *q = &p->partitions[i];
        cut(p, q, &n_bounds);
        q->bag_start = p->bags;
        q->first_bag = bag;
        q->bags = below(MOST_BAGS);
        q->first_strand = p->n_strands;
        q->check = (int32_t)below(PERI_ROUTE_REPORTS + 1);
        if (raw && !below(3)) q->raw = 1 + (int32_t)below(3), q->bucket_ids = 1 + below(50);
        int64_t pruned = below(3) ? 0 : 1, longest = below(2) ? 4 : 40;
        for (int64_t k = 0; k < q->bags; k++, bag++) {
            int64_t n = below(longest);
            p->offsets[bag] = p->n_ids;
            for (int64_t j = 0; j < n; j++) {
                int64_t id = pruned && !below(5) ? -1 : below(q->rows);
                if (bad && !below(30)) id = below(2) ? q->rows + below(5) : -2 - below(1000);
                if (q->raw) id = raw_id(q, bad);
                p->ids[p->n_ids] = id;
                p->ids32[p->n_ids] = (int32_t)id;
                p->weights[p->n_ids++] = (float)below(1000) / 7;
            }
        }
        p->offsets[bag] = p->n_ids;
        p->bags += q->bags;
        p->n_strands += q->n_parts;
    }
    for (int32_t s = 0; s < p->n_strands; s++) { /* strands lie on the wire in reverse, to be somewhere else */
        int32_t strand = p->n_strands - 1 - s;
        p->wire_bag[strand] = p->wire_bags;
        for (int32_t i = 0; i < p->n_partitions; i++)
            if (strand >= p->partitions[i].first_strand &&
                strand < p->partitions[i].first_strand + p->partitions[i].n_parts)
                p->wire_bags += p->partitions[i].bags;
    }
}

/** Run a kernel over [0, n) in random pieces, in random order of two halves. */
static void run(peri_kernel_fn fn, const void *args, int64_t n)
{
    int64_t middle = n ? below(n + 1) : 0;
    fn(args, middle, n);
    fn(args, 0, middle);
}

typedef struct result {
    int32_t lengths[MOST_PARTITIONS * MOST_BAGS * MOST_PARTS + GUARD];
    peri_k_route_report reports[PERI_ROUTE_REPORTS * 8];
    int64_t out[20000 + GUARD];
    float weights[20000 + GUARD];
    int64_t places[20000 + GUARD];
    int32_t origins[20000 + GUARD];
    int64_t cursor[MOST_PARTITIONS * MOST_BAGS * MOST_PARTS + 1];
} result;

static peri_k_routed routed(const problem *p, bool ids_i32)
{
    return (peri_k_routed){.ids = ids_i32 ? (const void *)p->ids32 : p->ids,
                           .offsets = p->offsets,
                           .partitions = p->partitions,
                           .bounds = p->bounds,
                           .wire_bag = p->wire_bag,
                           .bags = p->bags,
                           .n_partitions = p->n_partitions,
                           .ids_i32 = ids_i32};
}

static void route(const peri_kernels *k, const problem *p, bool ids_i32, bool out_i32, bool weighted, result *r)
{
    memset(r, 0, sizeof *r);
    peri_k_route_count_args count = {.in = routed(p, ids_i32), .lengths = r->lengths, .reports = r->reports};
    run(k->fn[PERI_K_route_count], &count, (p->bags + PERI_ROUTE_BLOCK - 1) / PERI_ROUTE_BLOCK);
    for (int64_t i = 0; i < p->wire_bags; i++) r->cursor[i + 1] = r->cursor[i] + r->lengths[i];
    int64_t place_first[MOST_PARTITIONS]; /* as the ids lie: each partition has bags of its own here */
    for (int32_t i = 0; i < p->n_partitions; i++) place_first[i] = p->offsets[p->partitions[i].first_bag];
    peri_k_route_pack_args pack = {.in = count.in,
                                   .weights = weighted ? p->weights : NULL,
                                   .cursor = r->cursor,
                                   .out = r->out,
                                   .out_weights = r->weights,
                                   .places = weighted ? NULL : r->places,
                                   .origins = weighted ? NULL : r->origins,
                                   .place_first = place_first,
                                   .out_i32 = out_i32};
    run(k->fn[PERI_K_route_pack], &pack, p->bags);
    memset(r->cursor, 0, sizeof r->cursor); /* scratch: what is left in it is nobody's business */
}

/** Every id that travels has a place of its own, where it lies less the first row of its part; the places of a strand
 *  ascend. */
static void check_places(const problem *p, const result *r)
{
    static bool taken[20000];
    memset(taken, 0, sizeof taken);
    for (int32_t i = 0; i < p->n_partitions; i++) {
        const peri_k_partition *q = &p->partitions[i];
        int64_t last[MOST_PARTS];
        for (int32_t k = 0; k < MOST_PARTS; k++) last[k] = -1;
        for (int64_t k = p->offsets[q->first_bag]; k < p->offsets[q->first_bag + q->bags] && q->n_parts > 0; k++) {
            int32_t part = 0;
            const int64_t *bounds = p->bounds + q->first_bound;
            const int64_t key = key_of(q, p->ids[k]);
            if (key < 0 || key >= q->rows) {
                assert_int_equal(r->places[k], -1);
                continue;
            }
            while (key >= bounds[part + 1]) part++;
            assert_true(r->places[k] > last[part] && !taken[r->places[k]]);
            assert_int_equal(r->out[r->places[k]], p->ids[k] - (q->raw ? 0 : bounds[part]));
            assert_int_equal(r->origins[r->places[k]], k - p->offsets[q->first_bag]);
            taken[last[part] = r->places[k]] = true;
        }
    }
}


static void test_ids(void **unused)
{
    (void)unused;
    raw = true;
    static problem p;
    static result want, got;
    for (int round = 0; round < 600; round++) {
        state = 77 + (uint64_t)round * 1000003;
        make(&p, round % 3 == 0);
        for (int form = 0; form < 8; form++) {
            route(peri_kernels_isa("ref"), &p, form & 1, form & 2, form & 4, &want);
            if (form < 2) check_places(&p, &want); /* out in i64, and places */
            for (size_t i = 1; i < sizeof isas / sizeof *isas; i++) {
                const peri_kernels *k = kernels_of(isas[i]);
                if (!k || (i >= ISAS_CPU && round % 15)) continue; /* pretended devices are slow */
                route(k, &p, form & 1, form & 2, form & 4, &got);
                if (memcmp(&want, &got, sizeof want) != 0)
                    fail_msg("%s differs from ref in round %d, form %d", isas[i], round, form);
            }
        }
    }
}

/** What ref itself must satisfy: every legal id arrives once, in order, in the strand that has its row. */
static void test_ref(void **unused)
{
    (void)unused;
    raw = true;
    static problem p;
    static result r;
    int64_t reported = 0;
    for (int round = 0; round < 200; round++) {
        state = 5 + (uint64_t)round * 7919;
        make(&p, round % 2 == 0);
        route(peri_kernels_isa("ref"), &p, false, false, true, &r);
        int64_t at = 0, bad[PERI_ROUTE_REPORTS + 1] = {0};
        for (int32_t s = p.n_strands - 1; s >= 0; s--) {
            const peri_k_partition *q = p.partitions;
            while (s < q->first_strand || s >= q->first_strand + q->n_parts) q++;
            const int64_t *bound = p.bounds + q->first_bound + (s - q->first_strand);
            for (int64_t b = 0; b < q->bags; b++) {
                int64_t n = 0;
                for (int64_t i = p.offsets[q->first_bag + b]; i < p.offsets[q->first_bag + b + 1]; i++) {
                    const int64_t key = key_of(q, p.ids[i]);
                    if (key < bound[0] || key >= bound[1]) continue;
                    assert_int_equal(r.out[at], p.ids[i] - (q->raw ? 0 : bound[0]));
                    assert_true(r.weights[at] == p.weights[i]);
                    at++, n++;
                }
                assert_int_equal(r.lengths[p.wire_bag[s] + b], n);
            }
        }
        for (int32_t k = 0; k < p.n_partitions; k++)
            for (int64_t i = p.offsets[p.partitions[k].first_bag];
                 i < p.offsets[p.partitions[k].first_bag + p.partitions[k].bags]; i++)
                bad[p.partitions[k].check] += key_of(&p.partitions[k], p.ids[i]) < -1 ||
                                              key_of(&p.partitions[k], p.ids[i]) >= p.partitions[k].rows;
        for (int k = 0; k < PERI_ROUTE_REPORTS; k++) {
            assert_int_equal(r.reports[k].bad, bad[k]);
            assert_true(p.bad || bad[k] == 0);
            reported += bad[k];
        }
    }
    assert_true(reported > 100);
}

/** The factors of means: every strand of a bag gets that of the whole bag, ids included that are in no strand. */
static void test_means(void **unused)
{
    (void)unused;
    raw = true;
    static problem p;
    static float scale[MOST_PARTITIONS * MOST_BAGS * MOST_PARTS + GUARD];
    for (int round = 0; round < 100; round++) {
        state = 13 + (uint64_t)round * 15485863;
        make(&p, round % 2 == 0);
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            for (size_t e = 0; e < sizeof scale / sizeof *scale; e++) scale[e] = -1;
            peri_k_route_mean_args mean = {.in = routed(&p, false), .scale = scale};
            run(k->fn[PERI_K_route_mean], &mean, p.bags);
            for (int32_t q = 0; q < p.n_partitions; q++)
                for (int64_t b = 0; b < p.partitions[q].bags; b++) {
                    int64_t first = p.partitions[q].first_bag + b, ids = p.offsets[first + 1] - p.offsets[first];
                    for (int32_t s = 0; s < p.partitions[q].n_parts; s++)
                        assert_true(scale[p.wire_bag[p.partitions[q].first_strand + s] + b] ==
                                    1.0f / (float)(ids > 1 ? ids : 1));
                }
            assert_true(scale[p.wire_bags] == -1);
        }
    }
}

/** What goes out with ids and what comes back are adjoint: <pack(w), y> = factor^-1 <w, return(y)>. Small whole
 *  numbers: sums are exact. */
static void test_return(void **unused)
{
    (void)unused;
    raw = true;
    static problem p;
    static result sent;
    static float y[20000], back[2][20000];
    static int64_t cursor[MOST_PARTITIONS * MOST_BAGS * MOST_PARTS + 1];
    double all = 0;
    for (int round = 0; round < 200; round++) {
        state = 17 + (uint64_t)round * 32452843;
        make(&p, round % 2 == 0);
        if (p.n_partitions > 1 && round % 3) { /* two partitions of one feature: both send its ids, both give back */
            p.bags += p.partitions[0].bags - p.partitions[p.n_partitions - 1].bags;
            p.partitions[p.n_partitions - 1].first_bag = p.partitions[0].first_bag;
            p.partitions[p.n_partitions - 1].bags = p.partitions[0].bags;
            p.wire_bags = 0;
            for (int32_t q = 0; q < p.n_partitions; q++)
                for (int32_t s = 0; s < p.partitions[q].n_parts; s++, p.wire_bags += p.partitions[q].bags)
                    p.wire_bag[p.partitions[q].first_strand + s] = p.wire_bags;
        }
        for (int64_t i = 0; i < p.n_ids; i++) p.weights[i] = (float)below(16);
        for (int64_t i = 0; i < 20000; i++) y[i] = (float)below(8);
        route(peri_kernels_isa("ref"), &p, false, false, true, &sent);
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            cursor[0] = 0;
            for (int64_t b = 0; b < p.wire_bags; b++) cursor[b + 1] = cursor[b] + sent.lengths[b];
            int64_t n = cursor[p.wire_bags];
            memset(back[i > 0], 0, sizeof *back);
            peri_k_route_return_args args = {
                .in = routed(&p, false), .cursor = cursor, .back = y, .out = back[i > 0], .factor = 2};
            int64_t last = 0;
            for (int32_t q = 0; q < p.n_partitions; q++)
                if (p.partitions[q].first_bag + p.partitions[q].bags > last)
                    last = p.partitions[q].first_bag + p.partitions[q].bags;
            run(k->fn[PERI_K_route_return], &args, last);
            double left = 0, right = 0;
            for (int64_t e = 0; e < n; e++) left += (double)sent.weights[e] * y[e];
            for (int64_t e = 0; e < p.n_ids; e++) right += (double)p.weights[e] * back[i > 0][e];
            assert_true(2 * left == right);
            if (i > 0) assert_memory_equal(back[0], back[1], sizeof *back);
            all += left;
        }
    }
    assert_true(all > 1000);
}

/* -- pooled rows --------------------------------------------------------------------------------------------------- */

enum { ROWS = 45, OUTPUTS = 5, COLS = 128, AREA = OUTPUTS * 3 * ROWS * COLS };

static void random_rows(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)(below(2001) - 1000) / 64;
}

static void test_rows(void **unused)
{
    (void)unused;
    static float received[AREA], own[AREA], grad[ROWS * OUTPUTS * COLS] __attribute__((aligned(64)));
    static float want[2][AREA] __attribute__((aligned(64))), got[2][AREA] __attribute__((aligned(64)));
    static float pooled[2][ROWS * OUTPUTS * COLS] __attribute__((aligned(64)));
    for (int round = 0; round < 300; round++) {
        state = 11 + (uint64_t)round * 104729;
        random_rows(received, AREA);
        random_rows(own, AREA);
        random_rows(grad, ROWS * OUTPUTS * COLS);
        peri_k_output outputs[OUTPUTS];
        peri_k_piece pieces[OUTPUTS * 3];
        int64_t bags[OUTPUTS], inverse[OUTPUTS * ROWS], column = 0, n_pieces = 0, place[2] = {0, 0};
        bool variable = round % 2, common = round % 3 == 0; /* widths that have loops of their own */
        for (int o = 0; o < OUTPUTS; o++) {
            bags[o] = variable ? 1 + below(ROWS) : ROWS;
            for (int b = 0; b < ROWS; b++) inverse[o * ROWS + b] = below(bags[o]);
            outputs[o] = (peri_k_output){.column = column,
                                         .cols = common ? 16 << below(4) : 1 + below(COLS),
                                         .first_piece = n_pieces,
                                         .n_pieces = 1 + below(3),
                                         .inverse = variable ? o * ROWS : -1,
                                         .divisor = (double)(1 + below(3)),
                                         .sent_divisor = (double)(1 + below(3))};
            column += outputs[o].cols;
            for (int64_t k = 0; k < outputs[o].n_pieces; k++) {
                int64_t to = below(2);
                pieces[n_pieces++] = (peri_k_piece){.offset = place[to], .own = to};
                place[to] += bags[o] * outputs[o].cols;
            }
        }
        peri_k_route_combine_args combine = {.stride = column,
                                             .received = received,
                                             .own = own,
                                             .outputs = outputs,
                                             .pieces = pieces,
                                             .inverse = inverse,
                                             .n_outputs = OUTPUTS,
                                             .past = round % 4 < 2};
        peri_k_route_spread_args spread = {.grad = grad,
                                           .stride = column,
                                           .rows = ROWS,
                                           .outputs = outputs,
                                           .pieces = pieces,
                                           .bags = bags,
                                           .inverse = inverse,
                                           .n_outputs = OUTPUTS,
                                           .past = round % 4 < 2};
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            float(*x)[AREA] = i ? got : want;
            combine.out = pooled[i > 0];
            memset(combine.out, 0, sizeof *pooled);
            run(k->fn[PERI_K_route_combine], &combine, ROWS);
            if (i && memcmp(pooled[0], pooled[1], sizeof *pooled) != 0)
                fail_msg("combine of %s differs from ref in round %d", isas[i], round);
            memset(x, 0, sizeof want);
            spread.sent = x[0];
            spread.own = x[1];
            run(k->fn[PERI_K_route_spread], &spread, ROWS);
            if (i && memcmp(want, got, sizeof want) != 0)
                fail_msg("spread of %s differs from ref in round %d", isas[i], round);
        }
    }
}

/** <combine(x), g> = <x, spread(g)> with divisor 1: spread is the adjoint of combine. Small whole numbers, so that sums
 *  are exact. */
static void test_adjoint(void **unused)
{
    (void)unused;
    const peri_kernels *k = peri_kernels_isa("ref");
    float x[2][64], g[24], out[24], back[2][64];
    for (int i = 0; i < 64; i++) x[0][i] = (float)(i % 7), x[1][i] = (float)(i % 5);
    for (int i = 0; i < 24; i++) g[i] = (float)(i % 9) - 4;
    int64_t inverse[] = {0, 1, 0, 1}, bags[] = {2, 2};
    peri_k_output outputs[] = {
        {.column = 0, .cols = 4, .first_piece = 0, .n_pieces = 2, .inverse = 0, .divisor = 1, .sent_divisor = 1},
        {.column = 4, .cols = 2, .first_piece = 2, .n_pieces = 1, .inverse = 0, .divisor = 1, .sent_divisor = 1}};
    peri_k_piece pieces[] = {{.offset = 0}, {.offset = 8, .own = 1}, {.offset = 8}};
    memset(back, 0, sizeof back);
    peri_k_route_combine_args combine = {.out = out,
                                         .stride = 6,
                                         .received = x[0],
                                         .own = x[1],
                                         .outputs = outputs,
                                         .pieces = pieces,
                                         .inverse = inverse,
                                         .n_outputs = 2};
    peri_k_route_spread_args spread = {.grad = g,
                                       .stride = 6,
                                       .rows = 4,
                                       .sent = back[0],
                                       .own = back[1],
                                       .outputs = outputs,
                                       .pieces = pieces,
                                       .bags = bags,
                                       .inverse = inverse,
                                       .n_outputs = 2};
    k->fn[PERI_K_route_combine](&combine, 0, 4);
    k->fn[PERI_K_route_spread](&spread, 0, 2);
    double left = 0, right = 0;
    for (int i = 0; i < 24; i++) left += (double)out[i] * g[i];
    for (int i = 0; i < 64; i++) right += (double)x[0][i] * back[0][i] + (double)x[1][i] * back[1][i];
    assert_true(left == right && left != 0);
}

/* -- rows of ids --------------------------------------------------------------------------------------------------- */

enum {
    ID_OUTPUTS = 2 * MOST_PARTITIONS,
    ID_COLS = 48,
    ID_ROWS = 6000,
    ID_AREA = ID_ROWS * (MOST_PARTITIONS + 1) * ID_COLS
};

/** Rows of ids of a random problem: two blocks of columns for each partition, one after the other in each of two
 *  buffers. Some have whole cache lines, which may be written past the caches. */
typedef struct sequences {
    peri_k_rows outputs[ID_OUTPUTS];
    peri_k_piece pieces[ID_OUTPUTS * MOST_PARTS];
    int32_t n;
    int64_t rows;
} sequences;

/** What is known of the places of each piece of output @x. */
static void tell_places(const problem *p, const peri_k_partition *q, const int64_t *places, peri_k_rows *x,
                        peri_k_piece *pieces)
{
    int64_t all = 0;
    for (int64_t k = x->first_id; k < x->first_id + x->ids; k++) {
        int32_t part = 0;
        if (places[k] < 0) continue;
        const int64_t key = key_of(q, p->ids[k]);
        while (key >= p->bounds[q->first_bound + part + 1]) part++;
        if (pieces[part].n++ == 0) pieces[part].first = places[k];
        all++;
    }
    x->all = q->n_parts == 1 && all == x->ids;
}

static void make_sequences(const problem *p, const int64_t *places, sequences *s)
{
    int64_t base = 0, piece = 0;
    memset(s, 0, sizeof *s);
    for (int32_t i = 0; i < p->n_partitions; i++) {
        const peri_k_partition *q = &p->partitions[i];
        int64_t first = p->offsets[q->first_bag], ids = p->offsets[q->first_bag + q->bags] - first;
        int64_t half = below(2) ? 32 : 1 + below(ID_COLS - 1);
        base = (base + 15) / 16 * 16;
        for (int block = 0; block < 2; block++) {
            int64_t cols = block ? ID_COLS - half : half;
            s->outputs[s->n++] = (peri_k_rows){.row = s->rows,
                                               .ids = ids,
                                               .column = block ? half : 0,
                                               .cols = cols,
                                               .first_id = first,
                                               .place_first = q->n_parts ? first : -1,
                                               .first_piece = piece,
                                               .divisor = 3,
                                               .sent_divisor = 4,
                                               .partition = i};
            for (int32_t k = 0; k < (q->n_parts ? q->n_parts : 1); k++)
                s->pieces[piece++] = (peri_k_piece){.offset = base, .own = q->n_parts ? below(2) : 1};
            if (q->n_parts) tell_places(p, q, places, &s->outputs[s->n - 1], &s->pieces[piece - q->n_parts]);
            base += cols * p->n_ids;
        }
        s->rows += ids;
    }
    assert_true(s->rows < ID_ROWS && base <= ID_AREA);
}

/** Where the definition has element @c of row @k of output @o: in buffer *@own; -1: nowhere. */
static int64_t element_of(const problem *p, const sequences *s, const int64_t *places, int32_t o, int64_t k, int64_t c,
                          int64_t *own)
{
    const peri_k_rows *x = &s->outputs[o];
    const peri_k_partition *q = &p->partitions[x->partition];
    int64_t id = p->ids[x->first_id + k], part = 0, place = q->n_parts ? places[x->first_id + k] : k;
    if (place < 0) return -1;
    for (int32_t i = 1; i < q->n_parts; i++) part += id >= p->bounds[q->first_bound + i];
    *own = s->pieces[x->first_piece + part].own;
    return s->pieces[x->first_piece + part].offset + place * x->cols + c;
}

static void test_sequences(void **unused)
{
    (void)unused;
    raw = false;
    static problem p;
    static result r;
    static sequences s;
    static _Alignas(64) float buffer[2][ID_AREA], back[2][ID_AREA], values[ID_ROWS * ID_COLS];
    state = 99;
    for (int round = 0; round < 40; round++) {
        do make(&p, false);
        while (p.n_ids > 600);
        route(peri_kernels_isa("ref"), &p, false, false, false, &r);
        make_sequences(&p, r.places, &s);
        random_rows(buffer[0], ID_AREA);
        random_rows(buffer[1], ID_AREA);
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k || (i >= ISAS_CPU && round % 3)) continue;
            bool i32 = below(2), placed = below(2), direct = below(2);
            peri_k_route_rows_args a = {.in = routed(&p, i32),
                                        .values = values,
                                        .stride = ID_COLS,
                                        .received = buffer[0],
                                        .own = buffer[1],
                                        .places = r.places,
                                        .outputs = s.outputs,
                                        .pieces = s.pieces,
                                        .n_outputs = s.n,
                                        .origins = below(2) ? r.origins : NULL,
                                        .past = below(2),
                                        .placed = placed,
                                        .direct = direct};
            for (int32_t o = 0; o < s.n; o++) s.outputs[o].divisor = round % 2 ? 3 : 2;
            for (int64_t j = 0; j < s.rows * ID_COLS; j++) values[j] = NAN;
            run(k->fn[PERI_K_route_rows], &a, s.rows);
            memset(back, 0, sizeof back);
            a.received = back[0];
            a.own = back[1];
            run(k->fn[PERI_K_route_rows_back], &a, s.rows);
            for (int32_t o = 0; o < s.n; o++)
                for (int64_t j = 0; j < s.outputs[o].ids * s.outputs[o].cols; j++) {
                    int64_t row = j / s.outputs[o].cols, c = j % s.outputs[o].cols, own = 0;
                    int64_t at = element_of(&p, &s, r.places, o, row, c, &own);
                    float got = values[(s.outputs[o].row + row) * ID_COLS + s.outputs[o].column + c];
                    /* left out on both ways */
                    if (at >= 0 && (own ? placed : direct) && s.outputs[o].place_first >= 0) {
                        if (!isnan(got))
                            fail_msg("%s: round %d, output %d, row %d is not left out", isas[i], round, o, (int)row);
                        continue;
                    }
                    if (got != (at < 0 ? 0 : buffer[own][at]))
                        fail_msg("%s: round %d, output %d, row %d", isas[i], round, o, (int)row);
                    const float divisor = own ? (float)s.outputs[o].divisor : 4;
                    if (at >= 0 && back[own][at] != got / divisor)
                        fail_msg("%s: the way back of round %d", isas[i], round);
                    if (at >= 0) back[own][at] = 0;
                }
            /* nothing else was written */
            for (int64_t j = 0; j < ID_AREA; j++) assert_true(back[0][j] == 0 && back[1][j] == 0);
        }
    }
}

/* -- pooling where rows arrive ------------------------------------------------------------------------------------- */

enum { POOL_ROWS = 50, POOL_GRAD = MOST_PARTITIONS * MOST_BAGS * ID_COLS };

/** The pools of random sequences: two blocks of columns a table, @inverse from each row of the output to a bag.
 *  Gradients lie bag by bag, table after table. Returns their number. */
static int32_t make_pools(const problem *p, const sequences *s, peri_k_pool *pools, int64_t *inverse)
{
    int32_t n = 0;
    int64_t base = 0;
    for (int32_t o = 0; o < s->n; o++) {
        const peri_k_partition *q = &p->partitions[s->outputs[o].partition];
        int64_t *to = inverse + s->outputs[o].partition * POOL_ROWS;
        if (q->bags == 0) continue;
        for (int64_t b = 0; b < POOL_ROWS && o % 2 == 0; b++) to[b] = below(q->bags);
        pools[n] = (peri_k_pool){.rows = s->outputs[o],
                                 .first_bag = q->first_bag,
                                 .bags = q->bags,
                                 .inverse = to - inverse,
                                 .from = s->outputs[o].column,
                                 .grad = base + s->outputs[o].column,
                                 .grad_stride = ID_COLS,
                                 .mean = s->outputs[o].partition % 2,
                                 .last = o % 2};
        pools[n++].rows.column += s->outputs[o].partition * ID_COLS;
        if (o % 2) base += q->bags * ID_COLS;
    }
    return n;
}

/** What an unsharded lookup makes of one table's @rows, by id of the partition: @pooled by bag, and the gradient of the
 *  weights. */
static void look_up(const problem *p, const peri_k_pool *pool, const float *rows, const int64_t *places,
                    const float *weights, const float *grad, float *pooled, float *grad_weights)
{
    static int64_t ids[20000];
    const peri_k_partition *q = &p->partitions[pool->rows.partition];
    const int64_t first = p->offsets[q->first_bag];
    for (int64_t k = 0; k < p->n_ids; k++) {
        bool here = k >= first && k < first + pool->rows.ids && p->ids[k] >= 0 && p->ids[k] < q->rows;
        ids[k] = here && (!q->n_parts || places[k] >= 0) ? k - first : -1;
    }
    peri_k_tbe_table table = {.rows = pool->rows.ids, .cols = ID_COLS, .stride = ID_COLS,
                              .pooling = pool->mean ? PERI_POOLING_MEAN : PERI_POOLING_SUM};
    peri_k_tbe_block block = {.first_bag = q->first_bag, .bags = q->bags, .out_stride = ID_COLS};
    peri_k_tbe_span spans[2];
    peri_k_tbe_list list = {.ids = ids,
                            .offsets = p->offsets,
                            .weights = weights,
                            .tables = &table,
                            .blocks = &block,
                            .ordered = &block,
                            .spans = spans,
                            .n_ids = p->n_ids,
                            .n_bags = q->first_bag + q->bags,
                            .n_tables = 1,
                            .n_blocks = 1,
                            .capacity = p->n_ids,
                            .ids_dtype = PERI_I64,
                            .offsets_dtype = PERI_I64};
    const peri_kernels *ref = peri_kernels_isa("ref");
    peri_k_tbe_prepare_args prepare = {.list = list};
    peri_k_tbe_forward_args forward = {
        .list = list, .weight = rows, .out = pooled, .chunks = 1, .weight_dtype = PERI_F32, .out_dtype = PERI_F32};
    peri_k_tbe_weight_gradient_args back = {.list = list, .weight = rows, .weight_dtype = PERI_F32, .grad = grad,
                                            .grad_weights = grad_weights, .chunks = 1};
    ref->fn[PERI_K_tbe_prepare](&prepare, 0, 1);
    ref->fn[PERI_K_tbe_forward](&forward, 0, 1);
    ref->fn[PERI_K_tbe_weight_gradient](&back, 0, 1);
}

/** Rows that arrive by id, pooled here, are what a lookup makes of the whole table: outputs and the gradient of the
 *  weights. */
static void test_pools(void **unused)
{
    (void)unused;
    raw = false;
    static problem p;
    static result r;
    static sequences s;
    static peri_k_pool pools[ID_OUTPUTS];
    static float buffer[2][ID_AREA], rows[ID_AREA], grad[POOL_GRAD], out[POOL_ROWS * MOST_PARTITIONS * ID_COLS];
    static float pooled[MOST_BAGS * ID_COLS], want[20000], got[20000];
    int64_t inverse[MOST_PARTITIONS * POOL_ROWS], compared = 0;
    for (int round = 0; round < 60; round++) {
        state = 19 + (uint64_t)round * 49979687;
        make(&p, round % 2);
        route(peri_kernels_isa("ref"), &p, false, false, false, &r);
        make_sequences(&p, r.places, &s);
        random_rows(buffer[0], ID_AREA);
        random_rows(buffer[1], ID_AREA);
        random_rows(grad, POOL_GRAD);
        const int32_t n = make_pools(&p, &s, pools, inverse);
        const float *weights = round % 3 ? p.weights : NULL;
        peri_k_route_rows_args from = {.in = routed(&p, false),
                                       .values = rows,
                                       .stride = ID_COLS,
                                       .received = buffer[0],
                                       .own = buffer[1],
                                       .places = r.places,
                                       .outputs = s.outputs,
                                       .pieces = s.pieces,
                                       .n_outputs = s.n};
        peri_kernels_isa("ref")->fn[PERI_K_route_rows](&from, 0, s.rows);
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k || (i >= ISAS_CPU && round % 5)) continue;
            from.values = out;
            from.stride = MOST_PARTITIONS * ID_COLS;
            peri_k_route_pool_args a = {.rows = from,
                                        .pools = pools,
                                        .inverse = inverse,
                                        .weights = weights,
                                        .grad = grad,
                                        .grad_weights = got,
                                        .n_pools = n};
            memset(got, 0, sizeof got);
            run(k->fn[PERI_K_route_pool], &a, POOL_ROWS);
            run(k->fn[PERI_K_route_pool_weights], &a, MOST_BAGS);
            for (int32_t o = 0; o < n; o += 2) {
                const peri_k_pool *pool = &pools[o];
                look_up(&p, pool, rows + pool->rows.row * ID_COLS, r.places, weights, grad + pool->grad, pooled, want);
                for (int64_t b = 0; b < POOL_ROWS; b++)
                    if (memcmp(out + b * from.stride + pool->rows.column, pooled + inverse[pool->inverse + b] * ID_COLS,
                               4 * ID_COLS) != 0)
                        fail_msg("%s: round %d, pool %d, row %d", isas[i], round, o, (int)b);
                const int64_t first = pool->rows.first_id;
                if (memcmp(got + first, want + first, sizeof(float) * (size_t)pool->rows.ids) != 0)
                    fail_msg("%s: round %d, the weights of pool %d", isas[i], round, o);
                compared += pool->rows.ids;
            }
        }
    }
    assert_true(compared > 10000);
}

/** Totals, against their definition. */
static void test_numbers(void **unused)
{
    (void)unused;
    enum { MOST = 70001 };
    static const int64_t sizes[] = {0, 1, 2, 7, 64, 1001, MOST};
    static int64_t positions[MOST + 1], at[MOST], totals[MOST + GUARD];
    state = 9;
    for (int64_t i = 0; i < MOST; i++) positions[i + 1] = positions[i] + (below(4) ? below(5) : below(3000));
    for (int64_t i = 0; i < MOST; i++) at[i] = below(MOST + 1);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t n = sizes[s], shift = n < MOST ? 1 : 0;
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            const peri_kernels *k = kernels_of(isas[i]);
            if (!k) continue;
            memset(totals, 0x5a, sizeof totals);
            peri_k_route_totals_args sum = {.totals = totals + shift, .positions = positions, .at = at};
            run(k->fn[PERI_K_route_totals], &sum, n);
            for (int64_t e = 0; e < n; e++) assert_int_equal(totals[shift + e], positions[at[e]]);
            int64_t untouched;
            memset(&untouched, 0x5a, sizeof untouched);
            assert_int_equal(totals[shift + n], untouched);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_ref),
        cmocka_unit_test(test_means),
        cmocka_unit_test(test_return),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_adjoint),
        cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_pools),
        cmocka_unit_test(test_numbers),
    };
    return cmocka_run_group_tests_name("route kernels", tests, NULL, NULL);
}
