/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tape.c: the gradient tape from C: order, sums over several uses, exchanges that are pending, long chains,
 * misuse.
 */
#include "tests/harness/check.h"
#include "kernels/dense.h"

#include "runtime/tensor/tensor_internal.h"

#include <stdlib.h>

static const char *const names[] = {"cpu", "opaque"};
enum { DEVICES = 2 };

static peri_device *device_of(int i)
{
    peri_device *d = NULL;
    assert_ok(peri_device_get(names[i], &d));
    return d;
}

static peri_tensor *full(peri_device *d, int64_t n, double value)
{
    peri_tensor *t = NULL;
    assert_ok(peri_tensor_full(d, PERI_F64, 1, &n, value, &t));
    return t;
}

static peri_tensor *leaf(peri_device *d, int64_t n)
{
    peri_tensor *t = full(d, n, 1);
    assert_ok(peri_tensor_requires_grad_set(t, true));
    return t;
}

static double grad(peri_tensor *leaf_tensor, int64_t at)
{
    peri_tensor *g = NULL;
    double x = 0;
    assert_ok(peri_tensor_grad(leaf_tensor, &g));
    assert_non_null(g);
    assert_ok(peri_tensor_item(g, at, &x));
    peri_tensor_release(g);
    return x;
}

/* -- an operation of the test's own: y = 3 x, whose backward is pending as often as it is told to be --------------- */

static struct {
    int pending, calls, finished;
    char order[64];
} log_;

static peri_status triple_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    log_.calls++;
    if (log_.pending-- > 0) return PERI_PENDING;
    size_t used = strlen(log_.order);
    snprintf(log_.order + used, sizeof log_.order - used, "%d", (int)node->kept[0]);
    if (node->kept[0] == 9) return peri__fail(PERI_EPEER, "triple: node 9 fails");
    if (!grad_out[0] || !peri__needs(node, 0)) return PERI_OK;
    peri_tensor *g = NULL;
    PERI_TRY(peri_tensor_full(peri__device(grad_out[0]), PERI_F64, grad_out[0]->ndim, grad_out[0]->shape, 0, &g));
    peri_k_axpy_args args = {.y = peri__data(g), .x = peri__data(grad_out[0]), .dtype = PERI_F64, .alpha = 3};
    peri_status status = PERI_LAUNCH(peri__device(g), axpy, &args, peri__numel(g), 64);
    if (status < 0) peri_tensor_release(g);
    else grad_in[0] = g;
    return status;
}

static void triple_fini(peri__node *node)
{
    (void)node;
    log_.finished++;
}

static const peri__node_vtab triple_vtab = {.name = "triple", .backward = triple_backward, .fini = triple_fini};
static const peri__node_vtab collective_vtab = {
    .name = "triple", .acts = PERI__POSTS | PERI__WAITS, .backward = triple_backward, .fini = triple_fini};

static peri_tensor *triple_as(const peri__node_vtab *vtab, peri_tensor *x, int name)
{
    peri_tensor *y = full(peri__device(x), x->shape[0], 0);
    peri_k_axpy_args args = {.y = peri__data(y), .x = peri__data(x), .dtype = PERI_F64, .alpha = 3};
    assert_ok(PERI_LAUNCH(peri__device(x), axpy, &args, peri__numel(x), 64));
    if (peri__recording(&x, 1)) {
        peri__node *node;
        assert_ok(peri__record(vtab, &x, 1, &y, 1, &node));
        node->kept[0] = name;
        peri__node_save(node, 0, x);
    }
    return y;
}

static peri_tensor *triple(peri_tensor *x, int name) { return triple_as(&triple_vtab, x, name); }

static int reset(void **state)
{
    (void)state;
    memset(&log_, 0, sizeof log_);
    return 0;
}

/* -- tests --------------------------------------------------------------------------------------------------------- */

static void gradients_flow_and_accumulate(void **state)
{
    for (int i = 0; i < DEVICES; i++) {
        reset(state);
        peri_device *d = device_of(i);
        assert_ok(peri_device_synchronize(d));
        int64_t objects = peri_mem_objects();
        peri_tensor *x = leaf(d, 1), *y = triple(x, 1), *z = triple(y, 2);
        assert_ok(peri_tensor_backward(z, NULL));
        assert_true(grad(x, 0) == 9);
        assert_string_equal(log_.order, "21");
        assert_int_equal(log_.finished, 2); /* a used graph lets go of what it kept */
        peri_tensor *again = triple(x, 3);
        assert_ok(peri_tensor_backward(again, NULL));
        assert_true(grad(x, 0) == 12);
        assert_ok(peri_tensor_grad_set(x, NULL));
        peri_tensor *g = full(d, 1, 0);
        peri_tensor *none = g;
        assert_ok(peri_tensor_grad(x, &none));
        assert_null(none);
        peri_tensor_release(g);
        peri_tensor_release(x);
        peri_tensor_release(y);
        peri_tensor_release(z);
        peri_tensor_release(again);
        assert_int_equal(peri_mem_objects(), objects);
    }
}

static void uses_of_one_tensor_add_up(void **state)
{
    for (int i = 0; i < DEVICES; i++) {
        reset(state);
        peri_device *d = device_of(i);
        peri_tensor *x = leaf(d, 4), *y = triple(x, 1), *left = NULL, *right = NULL, *both = NULL, *up = full(d, 8, 1);
        /* both = triple of the two halves of y, seen as views; a node with two inputs of the same leaf */
        assert_ok(peri_tensor_slice(y, 0, 0, 4, 1, &left));
        assert_ok(peri_tensor_slice(y, 0, 0, 2, 1, &right));
        both = full(d, 4, 0);
        peri__node *node;
        assert_ok(peri__record(&triple_vtab, (peri_tensor *[]){left, right}, 2, &both, 1, &node));
        node->kept[0] = 2;
        peri_tensor *short_up = NULL;
        assert_ok(peri_tensor_slice(up, 0, 0, 4, 1, &short_up));
        assert_ok(peri_tensor_backward(both, short_up));
        assert_true(grad(x, 0) == 9);
        assert_true(grad(x, 3) == 9);
        assert_string_equal(log_.order, "21");
        peri_tensor_release(x);
        peri_tensor_release(y);
        peri_tensor_release(left);
        peri_tensor_release(right);
        peri_tensor_release(both);
        peri_tensor_release(up);
        peri_tensor_release(short_up);
    }
}

static void the_order_is_that_of_recording_reversed(void **state)
{
    reset(state);
    peri_device *d = device_of(0);
    peri_tensor *x = leaf(d, 1), *a = triple(x, 1), *b = triple(x, 2), *c = triple(a, 3), *e = triple(b, 4);
    peri_tensor *sum = full(d, 1, 0);
    peri__node *node;
    assert_ok(peri__record(&triple_vtab, (peri_tensor *[]){e, c}, 2, &sum, 1, &node));
    node->kept[0] = 5;
    assert_ok(peri_tensor_backward(sum, NULL));
    /* The node hands a gradient to its first input only; a collective one would run all the same. */
    assert_string_equal(log_.order, "542");
    assert_true(grad(x, 0) == 27);
    peri_tensor *all[] = {x, a, b, c, e, sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
}

static void collective_nodes_run_without_a_gradient(void **state)
{
    reset(state);
    peri_device *d = device_of(0);
    peri_tensor *x = leaf(d, 1), *a = triple_as(&collective_vtab, x, 1), *b = triple_as(&collective_vtab, x, 2),
                *sum = full(d, 1, 0);
    peri__node *node;
    assert_ok(peri__record(&triple_vtab, (peri_tensor *[]){b, a}, 2, &sum, 1, &node));
    node->kept[0] = 3;
    assert_ok(peri_tensor_backward(sum, NULL));
    assert_string_equal(log_.order, "321");
    peri_tensor *all[] = {x, a, b, sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
}

static void a_pending_node_is_asked_again(void **state)
{
    for (int i = 0; i < DEVICES; i++) {
        reset(state);
        peri_tensor *x = leaf(device_of(i), 2), *y = triple(x, 1), *z = triple(y, 2), *up = full(device_of(i), 2, 1);
        peri_backward *pass = NULL;
        assert_ok(peri_backward_new(&z, &up, 1, &pass));
        log_.pending = 3;
        for (int k = 0; k < 3; k++) assert_int_equal(peri_backward_step(pass), PERI_PENDING);
        assert_int_equal(peri_backward_step(pass), PERI_OK);
        assert_int_equal(peri_backward_step(pass), PERI_OK);
        assert_int_equal(log_.calls, 3 + 2);
        assert_true(grad(x, 1) == 9);
        peri_backward_release(pass);
        peri_tensor_release(x);
        peri_tensor_release(y);
        peri_tensor_release(z);
        peri_tensor_release(up);
    }
}

static void a_failing_node_ends_the_pass_and_leaks_nothing(void **state)
{
    for (int i = 0; i < DEVICES; i++) {
        reset(state);
        peri_device *d = device_of(i);
        int64_t objects = peri_mem_objects();
        peri_tensor *x = leaf(d, 1), *y = triple(x, 1), *bad = triple(y, 9), *z = triple(bad, 3);
        assert_fails(peri_tensor_backward(z, NULL), PERI_EPEER, "node 9 fails");
        peri_tensor *g = NULL;
        assert_ok(peri_tensor_grad(x, &g));
        assert_null(g);
        assert_fails(peri_tensor_backward(z, NULL), PERI_EINVAL, "already used by a backward pass");
        /* Given up in the middle. */
        peri_tensor *w = triple(x, 4);
        peri_backward *pass = NULL;
        assert_ok(peri_backward_new(&w, NULL, 1, &pass));
        log_.pending = 1;
        assert_int_equal(peri_backward_step(pass), PERI_PENDING);
        peri_backward_release(pass);
        peri_backward_release(NULL);
        peri_tensor *all[] = {x, y, bad, z, w};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) peri_tensor_release(all[k]);
        assert_int_equal(peri_mem_objects(), objects);
    }
}

static void long_chains_are_released_without_deep_recursion(void **state)
{
    reset(state);
    enum { LENGTH = 200000 };
    int64_t objects = peri_mem_objects();
    peri_tensor *x = leaf(device_of(0), 1), *y = x;
    peri_tensor_retain(y);
    for (int k = 0; k < LENGTH; k++) {
        peri_tensor *next = NULL;
        assert_ok(peri_tensor_reshape(y, k % 2, (int64_t[]){1}, &next));
        peri_tensor_release(y);
        y = next;
    }
    peri_tensor_release(y); /* never used: dropping the end drops the tape */
    peri_tensor_release(x);
    assert_int_equal(peri_mem_objects(), objects);
}

static void recording_can_be_off(void **state)
{
    reset(state);
    peri_tensor *x = leaf(device_of(0), 1);
    assert_true(peri_grad_enabled());
    assert_ok(peri_grad_enabled_set(false));
    peri_tensor *y = triple(x, 1);
    assert_false(peri_grad_enabled());
    assert_ok(peri_grad_enabled_set(true));
    assert_fails(peri_tensor_backward(y, NULL), PERI_EINVAL, "does not require grad");
    peri_tensor *off = NULL;
    assert_ok(peri_tensor_detach(x, &off));
    assert_fails(peri_tensor_backward(off, NULL), PERI_EINVAL, "does not require grad");
    peri_tensor_release(x);
    peri_tensor_release(y);
    peri_tensor_release(off);
}

static void misuse_is_named(void **state)
{
    reset(state);
    peri_device *d = device_of(0);
    int64_t n = 3;
    peri_tensor *x = leaf(d, 3), *y = triple(x, 1), *wrong = full(d, 2, 1), *whole = NULL,
                *other = full(device_of(1), 3, 1);
    assert_fails(peri_tensor_backward(y, NULL), PERI_EINVAL, "f64 [3] has more than one element");
    assert_fails(peri_tensor_backward(y, wrong), PERI_EINVAL, "the gradient is f64 [2], the root f64 [3]");
    assert_fails(peri_tensor_requires_grad_set(y, true), PERI_EINVAL, "not a leaf");
    assert_ok(peri_tensor_new(d, PERI_I64, 1, &n, &whole));
    assert_fails(peri_tensor_requires_grad_set(whole, true), PERI_EINVAL, "i64, allowed: f32, f64");
    assert_fails(peri_tensor_grad_set(x, wrong), PERI_EINVAL, "the gradient is f64 [2], the leaf f64 [3]");
    assert_fails(peri_tensor_grad_set(x, other), PERI_EINVAL, "different devices");
    peri_tensor *all[] = {x, y, wrong, whole, other};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
}

static void count_ready(void *ctx, peri_tensor *t)
{
    assert_non_null(t->grad);
    ++*(int *)ctx;
}

static void leaves_are_ready_once_their_gradient_is_complete(void **state)
{
    reset(state);
    int ready = 0;
    peri_tensor *x = leaf(device_of(0), 1), *a = triple(x, 1), *b = triple(x, 2), *sum = full(device_of(0), 1, 0);
    x->ready = count_ready;
    x->ready_ctx = &ready;
    peri__node *node;
    assert_ok(peri__record(&triple_vtab, (peri_tensor *[]){b, a}, 2, &sum, 1, &node));
    node->kept[0] = 3;
    assert_ok(peri_tensor_backward(sum, NULL));
    assert_int_equal(ready, 1);
    peri_tensor *c = triple(x, 4);
    ready = 0;
    assert_ok(peri_tensor_backward(c, NULL));
    assert_int_equal(ready, 1);
    /* A leaf that is a root too: once, behind what the other root gives it. */
    peri_tensor *other = triple(x, 5), *both[] = {x, other}, *up[] = {sum, sum};
    peri_backward *pass = NULL;
    ready = 0;
    assert_ok(peri_backward_new(both, up, 2, &pass));
    assert_int_equal(ready, 0);
    assert_int_equal(peri_backward_step(pass), PERI_OK);
    assert_int_equal(ready, 1);
    peri_backward_release(pass);
    assert_ok(peri_tensor_backward(x, sum)); /* alone */
    assert_int_equal(ready, 2);
    peri_tensor *all[] = {x, a, b, sum, c, other};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test_setup(gradients_flow_and_accumulate, reset),
    cmocka_unit_test_setup(uses_of_one_tensor_add_up, reset),
    cmocka_unit_test_setup(the_order_is_that_of_recording_reversed, reset),
    cmocka_unit_test_setup(collective_nodes_run_without_a_gradient, reset),
    cmocka_unit_test_setup(a_pending_node_is_asked_again, reset),
    cmocka_unit_test_setup(a_failing_node_ends_the_pass_and_leaks_nothing, reset),
    cmocka_unit_test_setup(long_chains_are_released_without_deep_recursion, reset),
    cmocka_unit_test_setup(recording_can_be_off, reset),
    cmocka_unit_test_setup(misuse_is_named, reset),
    cmocka_unit_test_setup(leaves_are_ready_once_their_gradient_is_complete, reset),
};

check_main(tests)
