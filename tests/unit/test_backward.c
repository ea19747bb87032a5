/* SPDX-License-Identifier: Apache-2.0
 *
 * test_backward.c: the order of backward passes: exchanges are posted early, and in one order on all ranks, and waited
 * for late; no bit changes.
 */
#include "tests/harness/check.h"

#include "runtime/tensor/tensor_internal.h"

#include <stdlib.h>

/* -- nodes that write down when they run: y = the sum of factor * input over the inputs ---------------------------- */

enum { MOST = 24 };

static struct {
    int64_t order[MOST], pending; /* the names of the nodes that ran; how often waiting nodes are told to wait once
                                     more */
    int n;
} seen;

static peri_status mix_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    if (node->vtab->acts & PERI__WAITS && seen.pending-- > 0) return PERI_PENDING;
    seen.order[seen.n++] = node->kept[0];
    if (!grad_out[0]) return PERI_OK;
    double g;
    PERI_TRY(peri_tensor_item(grad_out[0], 0, &g));
    for (int32_t i = 0; i < node->n_in; i++)
        if (peri__needs(node, i))
            PERI_TRY(peri_tensor_full(peri__device(grad_out[0]), PERI_F64, 1, (int64_t[]){1}, g * node->number[i],
                                      &grad_in[i]));
    return PERI_OK;
}

#define ACTS(flags) {.name = "mix", .acts = (flags), .backward = mix_backward}
static const peri__node_vtab vtabs[8] = {ACTS(0), ACTS(1), ACTS(2), ACTS(3), ACTS(4), ACTS(5), ACTS(6), ACTS(7)};

static peri_tensor *scalar(double value)
{
    peri_device *d = NULL;
    peri_tensor *t = NULL;
    assert_ok(peri_device_get("cpu", &d));
    assert_ok(peri_tensor_full(d, PERI_F64, 1, (int64_t[]){1}, value, &t));
    return t;
}

static peri_tensor *leaf(void)
{
    peri_tensor *t = scalar(1);
    assert_ok(peri_tensor_requires_grad_set(t, true));
    return t;
}

/** Record a node; its name is its number in the order of recording. */
static peri_tensor *mix(int32_t acts, int64_t name, int32_t n, peri_tensor *const *in, const double *factors)
{
    peri_tensor *y = scalar(0);
    peri__node *node;
    assert_ok(peri__record(&vtabs[acts], in, n, &y, 1, &node));
    node->kept[0] = name;
    for (int32_t i = 0; i < n; i++) node->number[i] = factors[i];
    return y;
}

static peri_tensor *one(int32_t acts, int64_t name, peri_tensor *in, double factor)
{
    return mix(acts, name, 1, &in, &factor);
}

static double grad(peri_tensor *t)
{
    peri_tensor *g = NULL;
    double x = 0;
    assert_ok(peri_tensor_grad(t, &g));
    assert_non_null(g);
    assert_ok(peri_tensor_item(g, 0, &x));
    peri_tensor_release(g);
    return x;
}

static void expect_order(const char *wanted)
{
    char got[2 * MOST] = "";
    for (int i = 0; i < seen.n; i++)
        snprintf(got + strlen(got), sizeof got - strlen(got), "%c", (char)('0' + seen.order[i]));
    assert_string_equal(got, wanted);
}

static int reset(void **state)
{
    (void)state;
    memset(&seen, 0, sizeof seen);
    return 0;
}

static void release_all(peri_tensor **list, int n)
{
    for (int i = 0; i < n; i++) peri_tensor_release(list[i]);
}

/* -- the order ----------------------------------------------------------------------------------------------------- */

/** A dense part (d) and an exchange (w waits, p posts) that meet; whichever comes first in the forward pass. */
static void exchanges_overlap_whatever_came_first(void **state)
{
    for (int order = 0; order < 3; order++) {
        reset(state);
        peri_tensor *t[8] = {leaf(), leaf()};
        /* the dense part first, as one writes it: the lookup would be waited for before it is differentiated */
        if (order == 0) {
            t[2] = one(0, 1, t[0], 2);
            t[3] = one(0, 2, t[2], 2);
            t[4] = one(PERI__WAITS | PERI__UPDATES, 3, t[1], 2);
            t[5] = one(PERI__POSTS, 4, t[4], 2);
        } else if (order == 1) { /* the lookup first */
            t[4] = one(PERI__WAITS | PERI__UPDATES, 1, t[1], 2);
            t[2] = one(0, 2, t[0], 2);
            t[3] = one(0, 3, t[2], 2);
            t[5] = one(PERI__POSTS, 4, t[4], 2);
        } else { /* the lookup, its result, then the dense part: which would be differentiated before anything is
                    posted */
            t[4] = one(PERI__WAITS | PERI__UPDATES, 1, t[1], 2);
            t[5] = one(PERI__POSTS, 2, t[4], 2);
            t[2] = one(0, 3, t[0], 2);
            t[3] = one(0, 4, t[2], 2);
        }
        t[6] = mix(0, 5, 2, (peri_tensor *[]){t[3], t[5]}, (double[]){1, 1});
        peri_backward *pass = NULL;
        assert_ok(peri_backward_new(&t[6], NULL, 1, &pass));
        seen.pending = 1;
        assert_int_equal(peri_backward_step(pass), PERI_PENDING);
        /* all but what waits, and the post before the dense part */
        expect_order(order == 0 ? "5421" : order == 1 ? "5432" : "5243");
        assert_true(grad(t[0]) == 4);
        assert_int_equal(peri_backward_step(pass), PERI_OK);
        expect_order(order == 0 ? "54213" : order == 1 ? "54321" : "52431");
        assert_true(grad(t[1]) == 4);
        peri_backward_release(pass);
        release_all(t, 7);
    }
}

/** What leads to a post goes before what leads to none. */
static void the_way_to_a_post_goes_first(void **state)
{
    reset(state);
    peri_tensor *t[8] = {leaf(), leaf()};
    t[2] = one(PERI__WAITS, 1, t[1], 1);
    t[3] = one(PERI__POSTS, 2, t[2], 1);
    t[4] = one(0, 3, t[3], 1); /* the way */
    t[5] = one(0, 4, t[0], 1); /* dense */
    t[6] = mix(0, 5, 2, (peri_tensor *[]){t[4], t[5]}, (double[]){1, 1});
    assert_ok(peri_tensor_backward(t[6], NULL));
    expect_order("53241");
    release_all(t, 7);
}

/** Two exchanges whose results reach the loss by ways of different lengths: ranks with different ways post in one
 *  order. */
static void posts_have_one_order_on_all_ranks(void **state)
{
    for (int rank = 0; rank < 2; rank++) {
        reset(state);
        peri_tensor *t[9] = {leaf(), leaf()};
        t[2] = one(PERI__WAITS, 1, t[0], 1);
        t[3] = one(PERI__WAITS, 2, t[1], 1);
        t[4] = one(PERI__POSTS, 3, t[2], 1);
        t[5] = one(PERI__POSTS, 4, t[3], 1);
        t[6] = one(0, 5, t[5 - rank], 1);
        t[7] = one(0, 6, t[6], 1);
        t[8] = mix(0, 7, 2, (peri_tensor *[]){t[7], t[4 + rank]}, (double[]){1, 1});
        assert_ok(peri_tensor_backward(t[8], NULL));
        expect_order(rank == 0 ? "7654321" : "7465321"); /* 4, then 3 */
        release_all(t, 9);
    }
}

/** 1e16 - 1e16 + 1 is 1; in another order it is 0. The share of what waits comes last, and is added in its place. */
static void no_bit_changes(void **state)
{
    reset(state);
    peri_tensor *t[6] = {leaf()};
    t[1] = one(0, 1, t[0], 1);
    t[2] = one(PERI__WAITS, 2, t[0], 1e16);
    t[3] = one(PERI__POSTS, 3, t[2], 1);
    t[4] = one(0, 4, t[0], -1e16);
    t[5] = mix(0, 5, 3, (peri_tensor *[]){t[1], t[3], t[4]}, (double[]){1, 1, 1});
    seen.pending = 2;
    assert_ok(peri_tensor_backward(t[5], NULL));
    expect_order("53412");
    assert_true(grad(t[0]) == 1);
    release_all(t, 6);
}

static uint64_t draw(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return *s >> 33;
}

/** A graph drawn from @seed: node k (from 1) has one or two inputs among the leaf and the nodes before it, and the last
 *  takes all that nobody took. @uses[k]: bits of its inputs; @acts[k]: with @acting, else 0. The gradient of the
 *  leaf. */
static double run_random(uint64_t seed, bool acting, int n, uint32_t *uses, int32_t *acts)
{
    static const double factors[] = {1, 1e16, -1e16, 3, 0.1};
    peri_tensor *t[MOST] = {leaf()};
    bool used[MOST] = {false};
    uint64_t s = seed;
    for (int k = 1; k <= n; k++) {
        peri_tensor *in[MOST];
        double factor[MOST];
        int32_t m = 0, act = (int32_t)(draw(&s) % 8) & (draw(&s) % 2 ? 7 : 0), wanted = 1 + (int32_t)(draw(&s) % 2);
        uses[k] = 0;
        for (int i = 0; i < k; i++) {
            if (k == n ? used[i] || i == 0 : true) continue;
            in[m] = t[i];
            factor[m++] = 1;
            uses[k] |= 1u << i;
        }
        for (int i = 0; k < n && i < wanted; i++) {
            int from = (int)(draw(&s) % (uint64_t)k);
            in[m] = t[from];
            factor[m++] = factors[draw(&s) % 5];
            uses[k] |= 1u << from;
            used[from] = true;
        }
        acts[k] = k == n ? 0 : act;
        t[k] = mix(acting ? acts[k] : 0, k, m, in, factor);
    }
    reset(NULL);
    seen.pending = acting ? 2 : 0;
    assert_ok(peri_tensor_backward(t[n], NULL));
    double g = grad(t[0]);
    release_all(t, n + 1);
    return g;
}

static void laws_hold_for_any_graph(void **state)
{
    (void)state;
    int moved = 0;
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        int n = 3 + (int)(seed % 6); /* the last node has at most 8 inputs */
        uint32_t uses[MOST];
        int32_t acts[MOST];
        double wanted = run_random(seed, false, n, uses, acts);
        /* without exchanges: recording reversed */
        for (int k = 0; k < seen.n; k++) assert_int_equal(seen.order[k], n - k);
        double got = run_random(seed, true, n, uses, acts);
        assert_memory_equal(&got, &wanted, sizeof got);
        assert_int_equal(seen.n, n);
        int64_t at[MOST] = {0}, post = MOST, update = MOST;
        for (int k = 0; k < n; k++) {
            int64_t name = seen.order[k];
            moved += name != n - k;
            at[name] = k;
            if (acts[name] & PERI__POSTS) {
                assert_true(name < post);
                post = name;
            }
            if (acts[name] & PERI__UPDATES) {
                assert_true(name < update);
                update = name;
            }
        }
        for (int user = 1; user <= n; user++)
            for (int i = 1; i < user; i++)
                if (uses[user] >> i & 1) assert_true(at[user] < at[i]);
    }
    assert_true(moved > 3000); /* the graphs are not all trivial */
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test_setup(exchanges_overlap_whatever_came_first, reset),
    cmocka_unit_test_setup(the_way_to_a_post_goes_first, reset),
    cmocka_unit_test_setup(posts_have_one_order_on_all_ranks, reset),
    cmocka_unit_test_setup(no_bit_changes, reset),
    cmocka_unit_test_setup(laws_hold_for_any_graph, reset),
};

check_main(tests)
