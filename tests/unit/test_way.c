/* SPDX-License-Identifier: Apache-2.0
 *
 * test_way.c: rows over two hops (a sum within each node, an exchange across nodes) against one exchange of all parts,
 * there and back, with and without codecs. Small whole numbers, so that every order of a sum has the same bits.
 */
#include "tests/harness/check.h"

#include "runtime/shard/way.h"

#include <stdlib.h>

enum { RANKS = 4, PER_NODE = 2, NODES = RANKS / PER_NODE };

static peri_device *cpu(void)
{
    peri_device *d = NULL;
    assert_ok(peri_device_get("cpu", &d));
    return d;
}

static peri_group *world[RANKS], *node[RANKS], *across[RANKS];
static int worlds;

/** Groups as a module of 4 ranks on 2 nodes has them: node {0, 1} {2, 3}, across {0, 2} {1, 3}. */
static void open_groups(void)
{
    char job[32];
    snprintf(job, sizeof job, "way %d", ++worlds);
    for (int32_t i = 0; i < RANKS; i++) {
        peri_comm_config config = {
            .size = sizeof config, .transport = "sim", .job = job, .rank = i, .world_size = RANKS, .timeout_s = 20};
        assert_ok(peri_comm_open(&config, &world[i]));
    }
    for (int32_t i = 0; i < RANKS; i++) {
        int32_t n = i / PER_NODE, l = i % PER_NODE, mates[] = {n * PER_NODE, n * PER_NODE + 1},
                peers[] = {l, l + PER_NODE};
        assert_ok(peri_group_new(world[i], mates, PER_NODE, "node", &node[i]));
        assert_ok(peri_group_new(world[i], peers, NODES, "across", &across[i]));
    }
}

static void close_groups(void)
{
    for (int32_t i = 0; i < RANKS; i++) peri_group_release(node[i]), peri_group_release(across[i]);
    for (int32_t i = 0; i < RANKS; i++) {
        peri_group_close(world[i]);
        peri_group_release(world[i]);
    }
}

/** Numbers for home @h: different for each, none for one, so that places and empty parts matter. */
static int64_t numbers_for(int32_t h) { return h == 2 ? 0 : 5 + 3 * h; }

/** The k-th number that @rank has for home @h. */
static double row_of(int32_t rank, int32_t h, int64_t k) { return (double)((rank * 31 + h * 7 + k * 3) % 19 - 9); }
/** The k-th number of the gradient at home @h of what node @n sent. */
static double gradient_of(int32_t h, int32_t n, int64_t k) { return (double)((h * 13 + n * 5 + k * 11) % 17 - 8); }

static peri_tensor *new_f32(int64_t n)
{
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_full(cpu(), PERI_F32, 1, &n, -77, &t));
    return t;
}

static float *data(peri_tensor *t) { return peri__data(t); }

static void run(peri__way_transfer *j)
{
    for (int round = 0; round < 100000; round++) {
        int32_t pending = 0;
        for (int32_t i = 0; i < RANKS; i++) {
            peri_status status = peri__way_transfer_test(&j[i]);
            assert_ok(status);
            pending += status == PERI_PENDING;
        }
        if (!pending) return;
    }
    fail_msg("the numbers do not come");
}

/** The numbers of rank @i over both hops: for the node sums by place in the node, then across by node. */
typedef struct problem {
    peri__way way;
    peri__leg legs[PERI__HOPS];
    int64_t out[PERI__HOPS][PER_NODE], in[PERI__HOPS][PER_NODE], leaves, comes;
} problem;

static void problem_new(int32_t i, peri_codec *codec, double division, problem *p)
{
    int32_t l = i % PER_NODE;
    *p = (problem){.way = {.n = 2, .division = division}, .comes = NODES * numbers_for(i)};
    p->way.hops[0] = (peri__hop){.group = node[i], .sums = true};
    p->way.hops[1] = (peri__hop){.group = across[i]};
    for (int32_t h = 0; h < RANKS; h++) p->leaves += numbers_for(h);
    for (int32_t to = 0; to < PER_NODE; to++)
        for (int32_t n = 0; n < NODES; n++) p->out[0][to] += numbers_for(n * PER_NODE + to);
    for (int32_t from = 0; from < PER_NODE; from++) p->in[0][from] = p->out[0][l];
    for (int32_t n = 0; n < NODES; n++) {
        p->out[1][n] = numbers_for(n * PER_NODE + l);
        p->in[1][n] = numbers_for(i);
    }
    for (int32_t h = 0; h < PERI__HOPS; h++) {
        p->legs[h] = (peri__leg){.out = p->out[h], .in = p->in[h]};
        for (int d = 0; d < 2 && codec; d++) {
            peri_codec_retain(codec);
            p->way.hops[h].codec[d] = codec;
        }
    }
    assert_ok(peri__legs_init(&p->way, p->legs));
}

static void problem_free(problem *p)
{
    peri__legs_fini(p->legs);
    peri__way_fini(&p->way);
}

/** Position of home @h's part in an owner's buffer: by place in the node, then by node. */
static int64_t part_of(int32_t h)
{
    int64_t at = 0;
    for (int32_t l = 0; l < PER_NODE; l++)
        for (int32_t n = 0; n < NODES; n++) {
            if (n * PER_NODE + l == h) return at;
            at += numbers_for(n * PER_NODE + l);
        }
    return at;
}

/** What one exchange over the world brings home @h from each rank, added up at home by node: the result of one hop. */
static void one_hop(peri_tensor *const *from, peri_tensor *(*home)[NODES])
{
    peri_tensor *ordered[RANKS], *got[RANKS];
    peri__way_transfer j[RANKS];
    peri__way way[RANKS];
    peri__leg legs[RANKS][PERI__HOPS];
    int64_t out[RANKS], in[RANKS][RANKS], all = 0;
    for (int32_t h = 0; h < RANKS; h++) all += out[h] = numbers_for(h);
    for (int32_t i = 0; i < RANKS; i++) {
        ordered[i] = new_f32(all);
        got[i] = new_f32(RANKS * numbers_for(i));
        int64_t at = 0;
        for (int32_t h = 0; h < RANKS; at += out[h++])
            memcpy(data(ordered[i]) + at, data(from[i]) + part_of(h), sizeof(float) * (size_t)out[h]);
        for (int32_t r = 0; r < RANKS; r++) in[i][r] = numbers_for(i);
        way[i] = (peri__way){.n = 1, .hops = {{.group = world[i]}}, .division = 1};
        memset(legs[i], 0, sizeof legs[i]);
        legs[i][0] = (peri__leg){.out = out, .in = in[i]};
        assert_ok(peri__way_transfer_start(&j[i], &way[i], legs[i], PERI__TO_HOMES, ordered[i], got[i], NULL));
    }
    run(j);
    for (int32_t i = 0; i < RANKS; i++) {
        for (int32_t n = 0; n < NODES; n++) {
            home[i][n] = new_f32(numbers_for(i));
            const float *first = data(got[i]) + n * PER_NODE * numbers_for(i), *second = first + numbers_for(i);
            for (int64_t k = 0; k < numbers_for(i); k++) data(home[i][n])[k] = first[k] + second[k];
        }
        peri_tensor_release(ordered[i]);
        peri_tensor_release(got[i]);
    }
}

static void both(peri_codec *codec, double division)
{
    peri_tensor *owner[RANKS], *home[RANKS], *want[RANKS][NODES];
    problem p[RANKS];
    peri__way_transfer j[RANKS];
    open_groups();
    for (int32_t i = 0; i < RANKS; i++) {
        problem_new(i, codec, division, &p[i]);
        owner[i] = new_f32(p[i].leaves);
        home[i] = new_f32(p[i].comes);
        for (int32_t h = 0; h < RANKS; h++)
            for (int64_t k = 0; k < numbers_for(h); k++) data(owner[i])[part_of(h) + k] = (float)row_of(i, h, k);
    }
    one_hop(owner, want);
    for (int32_t i = 0; i < RANKS; i++)
        assert_ok(peri__way_transfer_start(&j[i], &p[i].way, p[i].legs, PERI__TO_HOMES, owner[i], home[i], NULL));
    run(j);
    for (int32_t i = 0; i < RANKS; i++)
        for (int32_t n = 0; n < NODES; n++) {
            for (int64_t k = 0; k < numbers_for(i); k++)
                assert_true(data(want[i][n])[k] == row_of(n * PER_NODE, i, k) + row_of(n * PER_NODE + 1, i, k));
            assert_memory_equal(data(home[i]) + n * numbers_for(i), data(want[i][n]),
                                sizeof(float) * (size_t)numbers_for(i));
            peri_tensor_release(want[i][n]);
        }
    /* And back: every rank of a node gets the gradient of the node's part. */
    for (int32_t i = 0; i < RANKS; i++) {
        for (int32_t n = 0; n < NODES; n++)
            for (int64_t k = 0; k < numbers_for(i); k++)
                data(home[i])[n * numbers_for(i) + k] =
                    (float)(gradient_of(i, n, k) / (codec ? 1 : peri__way_divides_first(&p[i].way)));
        assert_true(peri__way_divides_first(&p[i].way) == (codec ? 1 : division));
        assert_ok(peri_tensor_fill(owner[i], -77));
        assert_ok(peri__way_transfer_start(&j[i], &p[i].way, p[i].legs, PERI__TO_OWNERS, home[i], owner[i], NULL));
    }
    run(j);
    for (int32_t i = 0; i < RANKS; i++) {
        for (int32_t h = 0; h < RANKS; h++)
            for (int64_t k = 0; k < numbers_for(h); k++)
                assert_true(data(owner[i])[part_of(h) + k] == gradient_of(h, i / PER_NODE, k) / division);
        peri_tensor_release(owner[i]);
        peri_tensor_release(home[i]);
        problem_free(&p[i]);
    }
    close_groups();
}

static void test_plain(void **state)
{
    (void)state;
    int64_t before = peri_mem_objects();
    both(NULL, 1);
    both(NULL, RANKS);
    assert_int_equal(peri_mem_objects(), before);
}

/** Whole numbers this small are whole in f16 too. */
static void test_codec(void **state)
{
    (void)state;
    int64_t before = peri_mem_objects();
    peri_codec *codec = NULL;
    peri_codec_config config = {.size = sizeof config, .format = PERI_CODEC_FP16};
    assert_ok(peri_codec_new(&config, &codec));
    both(codec, RANKS);
    peri_codec_release(codec);
    assert_int_equal(peri_mem_objects(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_plain), cmocka_unit_test(test_codec)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
