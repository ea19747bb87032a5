/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tensor.c: tensors from C: references, views, bad arguments, and what is left when memory runs out.
 */
#include "tests/harness/check.h"

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

static peri_tensor *counting(peri_device *d, int64_t rows, int64_t cols)
{
    double data[64];
    peri_tensor *t = NULL;
    for (int k = 0; k < 64; k++) data[k] = k;
    assert_ok(peri_tensor_new(d, PERI_F64, 2, (int64_t[]){rows, cols}, &t));
    assert_ok(peri_tensor_write(t, data, rows * cols * 8));
    return t;
}

static void the_last_reference_frees(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(i);
        assert_ok(peri_device_synchronize(d));
        int64_t objects = peri_mem_objects(), live = peri_mem_live();
        peri_tensor *t = counting(d, 4, 8), *view = NULL;
        assert_true(peri_mem_live() >= live + 4 * 8 * 8);
        peri_tensor_retain(t);
        peri_tensor_release(t);
        assert_ok(peri_tensor_slice(t, 0, 1, 3, 1, &view));
        peri_tensor_release(t); /* the view keeps the storage */
        double x;
        assert_ok(peri_tensor_item(view, 0, &x));
        assert_true(x == 8);
        peri_tensor_release(view);
        peri_tensor_release(NULL);
        assert_ok(peri_device_synchronize(d));
        assert_int_equal(peri_mem_objects(), objects);
        assert_true(peri_mem_live() <= live + (i == 0 ? 0 : 64)); /* opaque notes the free range */
    }
}

static void a_tensor_describes_itself(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_tensor *t = counting(device_of(i), 2, 3), *turned = NULL;
        peri_tensor_info desc = {.size = sizeof desc};
        assert_ok(peri_tensor_transpose(t, 0, -1, &turned));
        peri_tensor_describe(turned, &desc);
        assert_int_equal(desc.dtype, PERI_F64);
        assert_int_equal(desc.ndim, 2);
        assert_int_equal(desc.shape[0], 3);
        assert_int_equal(desc.shape[1], 2);
        assert_int_equal(desc.stride[0], 1);
        assert_int_equal(desc.stride[1], 3);
        assert_int_equal(desc.numel, 6);
        assert_ptr_equal(desc.device, device_of(i));
        assert_false(desc.contiguous);
        assert_false(desc.requires_grad);
        assert_true(desc.leaf);
        peri_tensor_release(t);
        peri_tensor_release(turned);
    }
}

static void making_checks_its_arguments(void **state)
{
    (void)state;
    peri_tensor *const untouched = (peri_tensor *)8, *t = untouched;
    const int64_t huge[] = {INT64_MAX / 4, 8}, negative[] = {3, -1}, nine[9] = {1};
    for (int i = 0; i < DEVICES; i++) {
        peri_device *d = device_of(i);
        assert_fails(peri_tensor_new(d, PERI_F32, 2, huge, (peri_tensor **)&t), PERI_EINVAL,
                     "more than 2^62 bytes from the 1st dimension on");
        assert_fails(peri_tensor_new(d, PERI_F32, 2, negative, (peri_tensor **)&t), PERI_EINVAL,
                     "the size -1 of the 2nd dimension is negative");
        assert_fails(peri_tensor_new(d, PERI_F32, 9, nine, (peri_tensor **)&t), PERI_EINVAL,
                     "9 dimensions, allowed: 0..8");
        assert_fails(peri_tensor_new(d, PERI_F32, -1, nine, (peri_tensor **)&t), PERI_EINVAL, "-1 dimensions");
        assert_fails(peri_tensor_new(d, 99, 1, nine, (peri_tensor **)&t), PERI_EINVAL, "99 is no dtype");
        assert_fails(peri_tensor_uniform(d, PERI_I32, 1, nine, 0, 1, 1, 0, (peri_tensor **)&t), PERI_EINVAL,
                     "i32, allowed: f32, f64");
        int64_t too_much = (int64_t)1 << 55;
        assert_fails(peri_tensor_new(d, PERI_U8, 1, &too_much, (peri_tensor **)&t), PERI_ENOMEM,
                     "no memory for 36028797018963968 bytes");
    }
    assert_fails(peri_tensor_new(NULL, PERI_F32, 1, nine, (peri_tensor **)&t), PERI_EINVAL, "no device");
    assert_ptr_equal(t, untouched);
}

static void empty_tensors_are_tensors(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_tensor *t = NULL, *flat = NULL;
        assert_ok(peri_tensor_new(device_of(i), PERI_F32, 3, (int64_t[]){4, 0, INT32_MAX}, &t));
        assert_ok(peri_tensor_write(t, NULL, 0));
        assert_ok(peri_tensor_read(t, NULL, 0));
        assert_ok(peri_tensor_fill(t, 1));
        assert_ok(peri_tensor_reshape(t, 1, (int64_t[]){0}, &flat));
        double x;
        assert_fails(peri_tensor_item(t, 0, &x), PERI_ERANGE, "element 0 of f32 [4, 0, 2147483647]");
        peri_tensor_release(t);
        peri_tensor_release(flat);
    }
}

static void views_check_their_arguments(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        peri_tensor *t = counting(device_of(i), 2, 3), *out = NULL;
        assert_fails(peri_tensor_slice(t, 2, 0, 1, 1, &out), PERI_EINVAL,
                     "the 3rd dimension of f64 [2, 3], which has 2");
        assert_fails(peri_tensor_slice(t, 1, -1, 1, 1, &out), PERI_ERANGE, "[-1, 1)");
        assert_fails(peri_tensor_slice(t, 1, 2, 1, 1, &out), PERI_ERANGE, "[2, 1)");
        assert_fails(peri_tensor_slice(t, 1, 0, 4, 1, &out), PERI_ERANGE, "stop <= 3");
        assert_fails(peri_tensor_slice(t, 1, 0, 3, 0, &out), PERI_ERANGE, "step >= 1");
        assert_fails(peri_tensor_transpose(t, 0, 2, &out), PERI_EINVAL, "the 3rd dimension of f64 [2, 3], which has 2");
        assert_fails(peri_tensor_transpose(t, -3, 0, &out), PERI_EINVAL,
                     "the 3rd dimension from the end of f64 [2, 3], which has 2");
        assert_fails(peri_tensor_reshape(t, 1, (int64_t[]){7}, &out), PERI_EINVAL, "6 elements, the new shape 7");
        assert_fails(peri_tensor_reshape(t, 2, (int64_t[]){-1, -1}, &out), PERI_EINVAL, "size -1 of the 2nd dimension");
        assert_fails(peri_tensor_reshape(t, 2, (int64_t[]){-1, 4}, &out), PERI_EINVAL, "6 elements");
        assert_fails(peri_tensor_reshape(t, 9, (int64_t[9]){1}, &out), PERI_EINVAL, "9 dimensions");
        /* 2 * 5 * 7378697629483820647 is 6 in 64 bits. */
        assert_fails(peri_tensor_reshape(t, 3, (int64_t[]){2, 5, 7378697629483820647}, &out), PERI_EINVAL,
                     "more than 2^63 elements");
        assert_null(out);
        double data[6];
        assert_fails(peri_tensor_read(t, data, 40), PERI_EINVAL, "40 bytes given for f64 [2, 3], which has 48");
        assert_fails(peri_tensor_write(t, data, 49), PERI_EINVAL, "49 bytes given");
        assert_fails(peri_tensor_item(t, -1, data), PERI_ERANGE, "element -1");
        peri_tensor_release(t);
    }
}

static void host_pointers_are_given_where_the_host_may_look(void **state)
{
    (void)state;
    peri_tensor *open = counting(device_of(0), 2, 3), *shut = counting(device_of(1), 2, 3), *turned = NULL;
    void *p = NULL;
    assert_ok(peri_tensor_data(open, &p));
    assert_true(((double *)p)[5] == 5);
    assert_fails(peri_tensor_data(shut, &p), PERI_EUNSUPPORTED, "memory of device opaque");
    assert_ok(peri_tensor_transpose(open, 0, 1, &turned));
    assert_fails(peri_tensor_data(turned, &p), PERI_EUNSUPPORTED, "is not contiguous");
    peri_tensor_release(open);
    peri_tensor_release(shut);
    peri_tensor_release(turned);
}

static void copies_cross_devices_layouts_and_dtypes(void **state)
{
    (void)state;
    for (int from = 0; from < DEVICES; from++)
        for (int to = 0; to < DEVICES; to++) {
            peri_tensor *src = counting(device_of(from), 3, 4), *turned = NULL, *dst = NULL, *wide = NULL;
            float got[24];
            assert_ok(peri_tensor_transpose(src, 0, 1, &turned));
            assert_ok(peri_tensor_full(device_of(to), PERI_F32, 3, (int64_t[]){2, 4, 3}, -1, &wide));
            assert_ok(peri_tensor_copy(wide, turned)); /* repeats in front, casts, crosses */
            assert_ok(peri_tensor_read(wide, got, sizeof got));
            for (int k = 0; k < 24; k++) assert_true(got[k] == (float)(k % 3 * 4 + k / 3 % 4));
            assert_ok(peri_tensor_slice(wide, 1, 0, 2, 1, &dst));
            assert_fails(peri_tensor_copy(dst, turned), PERI_EINVAL, "does not expand to size 2 in the 2nd dimension");
            peri_tensor_release(src);
            peri_tensor_release(turned);
            peri_tensor_release(dst);
            peri_tensor_release(wide);
        }
}

/* -- memory that runs out ------------------------------------------------------------------------------------------ */

/** A thing to do with a tensor of f64 [4, 6]; makes *out (or leaves it). */
typedef peri_status (*deed)(peri_device *d, peri_tensor *t, peri_tensor **out);

static peri_status make(peri_device *d, peri_tensor *t, peri_tensor **out)
{
    (void)t;
    return peri_tensor_full(d, PERI_F16, 2, (int64_t[]){3, 3}, 2, out);
}
static peri_status normal(peri_device *d, peri_tensor *t, peri_tensor **out)
{
    (void)t;
    return peri_tensor_normal(d, PERI_F32, 1, (int64_t[]){9}, 0, 1, 1, 1, out);
}
static peri_status turn_and_flatten(peri_device *d, peri_tensor *t, peri_tensor **out)
{
    (void)d;
    peri_tensor *turned;
    PERI_TRY(peri_tensor_transpose(t, 0, 1, &turned));
    peri_status status = peri_tensor_reshape(turned, 1, (int64_t[]){-1}, out);
    peri_tensor_release(turned);
    return status;
}
static peri_status cut_and_write(peri_device *d, peri_tensor *t, peri_tensor **out)
{
    (void)d;
    double data[8] = {0};
    peri_tensor *part;
    PERI_TRY(peri_tensor_slice(t, 1, 0, 2, 1, &part));
    peri_status status = peri_tensor_write(part, data, sizeof data);
    if (status >= 0) status = peri_tensor_fill(part, 4);
    if (status >= 0) status = peri_tensor_read(part, data, sizeof data);
    if (status < 0) peri_tensor_release(part);
    else *out = part;
    return status;
}
static peri_status move(peri_device *d, peri_tensor *t, peri_tensor **out)
{
    (void)d;
    peri_device *other = NULL;
    PERI_TRY(peri_device_get(peri_device_host_access(d) ? "opaque" : "cpu", &other));
    return peri_tensor_to(t, PERI_I32, other, out);
}
static peri_status train(peri_device *d, peri_tensor *t, peri_tensor **out)
{
    (void)d;
    peri_tensor *leaf, *a = NULL, *b = NULL, *up = NULL;
    peri_status status = PERI_OK;
    PERI_TRY(peri_tensor_detach(t, &leaf));
    PERI_TRY_GOTO(peri_tensor_requires_grad_set(leaf, true), out);
    PERI_TRY_GOTO(peri_tensor_slice(leaf, 0, 1, 3, 1, &a), out);
    PERI_TRY_GOTO(peri_tensor_reshape(a, 1, (int64_t[]){12}, &b), out);
    PERI_TRY_GOTO(peri_tensor_full(peri__device(t), PERI_F64, 1, (int64_t[]){12}, 1, &up), out);
    PERI_TRY_GOTO(peri_tensor_backward(b, up), out);
    status = peri_tensor_grad(leaf, out);
out:
    peri_tensor_release(leaf);
    peri_tensor_release(a);
    peri_tensor_release(b);
    peri_tensor_release(up);
    return status;
}

static void survive(const char *point, int i, deed f)
{
    peri_device *d = device_of(i);
    peri_tensor *t = counting(d, 4, 6);
    assert_ok(peri_device_synchronize(device_of(0)));
    assert_ok(peri_device_synchronize(device_of(1)));
    int64_t objects = peri_mem_objects(), live = peri_mem_live();
    bool failed = false;
    for (int k = 1;; k++) {
        peri_tensor *out = NULL;
        assert_ok(peri_fault_arm(point, k));
        peri_status status = f(d, t, &out);
        bool untouched = peri_fault_passed(point) < k;
        assert_ok(peri_fault_arm(point, 0));
        if (status < 0) {
            failed = true;
            assert_int_equal(status, PERI_ENOMEM);
            assert_null(out);
            assert_true(strstr(peri_error_message(), "no memory for") != NULL);
        }
        peri_tensor_release(out);
        assert_ok(peri_device_synchronize(device_of(0)));
        assert_ok(peri_device_synchronize(device_of(1)));
        assert_int_equal(peri_mem_objects(), objects);
        if (i == 0 || status >= 0) assert_true(peri_mem_live() <= live + 4096);
        if (untouched) break;
        assert_true(k < 1000);
    }
    assert_true(failed);
    peri_tensor_release(t);
}

static void constructors_survive_without_memory(void **state)
{
    (void)state;
    static const deed deeds[] = {make, normal, turn_and_flatten, cut_and_write, move, train};
    for (int i = 0; i < DEVICES; i++)
        for (size_t f = 0; f < sizeof deeds / sizeof *deeds; f++) {
            survive("alloc", i, deeds[f]);
            survive("device_alloc", i, deeds[f]);
        }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(the_last_reference_frees),
    cmocka_unit_test(a_tensor_describes_itself),
    cmocka_unit_test(making_checks_its_arguments),
    cmocka_unit_test(empty_tensors_are_tensors),
    cmocka_unit_test(views_check_their_arguments),
    cmocka_unit_test(host_pointers_are_given_where_the_host_may_look),
    cmocka_unit_test(copies_cross_devices_layouts_and_dtypes),
    cmocka_unit_test(constructors_survive_without_memory),
};

check_main(tests)
