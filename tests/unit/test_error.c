/* SPDX-License-Identifier: Apache-2.0
 *
 * test_error.c: statuses, the error record of each thread, dtype names.
 */
#include "tests/harness/check.h"

#include "runtime/base/base_internal.h"

#include <errno.h>
#include <pthread.h>

static void every_status_has_a_name_and_a_text(void **state)
{
    (void)state;
    for (int32_t s = PERI_EINTERNAL; s <= PERI_PENDING; s++) {
        assert_string_not_equal(peri_status_name(s), "unknown");
        assert_string_not_equal(peri_status_text(s), "unknown status");
    }
    assert_string_equal(peri_status_name(PERI_EMISMATCH), "EMISMATCH");
    assert_string_equal(peri_status_name(PERI_EINTERNAL - 1), "unknown");
    assert_string_equal(peri_status_text(77), "unknown status");
}

static void a_failure_is_recorded_and_cleared(void **state)
{
    (void)state;
    assert_int_equal(peri__fail(PERI_ERANGE, "noun_verb: id %d, allowed: 0..%d", 12, 9), PERI_ERANGE);
    assert_int_equal(peri_error_status(), PERI_ERANGE);
    assert_string_equal(peri_error_message(), "noun_verb: id 12, allowed: 0..9");
    assert_non_null(strstr(peri_error_where(), "test_error.c:"));
    peri_error_clear();
    assert_int_equal(peri_error_status(), PERI_OK);
    assert_string_equal(peri_error_message(), "");
    assert_string_equal(peri_error_where(), "");
}

static void failing_keeps_errno(void **state)
{
    (void)state;
    errno = EBUSY;
    peri__fail(PERI_EIO, "file: %s", "gone");
    assert_int_equal(errno, EBUSY);
}

static void the_old_message_may_be_part_of_the_new_one(void **state)
{
    (void)state;
    peri__fail(PERI_EIO, "inner");
    peri__fail(PERI_EABORTED, "outer: %s", peri_error_message());
    assert_string_equal(peri_error_message(), "outer: inner");
}

static void long_messages_keep_their_begin_and_their_cause(void **state)
{
    (void)state;
    enum { LENGTHS = 6 };
    static const int lengths[LENGTHS] = {PERI_MESSAGE_MAX - 1, PERI_MESSAGE_MAX,         PERI_MESSAGE_MAX + 1,
                                         2 * PERI_MESSAGE_MAX, 4 * PERI_MESSAGE_MAX - 1, 9 * PERI_MESSAGE_MAX};
    char text[9 * PERI_MESSAGE_MAX + 1];
    for (int i = 0; i < LENGTHS; i++) {
        memset(text, 'x', sizeof text);
        memcpy(text, "outer", 5);
        memcpy(text + lengths[i] - 5, "inner", 6);
        peri__fail(PERI_EINVAL, "%s", text);
        const char *got = peri_error_message();
        assert_int_equal(strlen(got), PERI_MESSAGE_MAX - 1);
        assert_memory_equal(got, "outerx", 6);
        if (i > 0) assert_non_null(strstr(got, "x ... x"));
        /* of more it is not looked for */
        if (lengths[i] < 4 * PERI_MESSAGE_MAX) assert_string_equal(got + PERI_MESSAGE_MAX - 7, "xinner");
    }
    for (int depth = 0; depth < 40; depth++) { /* a chain of causes */
        if (depth == 0) peri__fail(PERI_EPEER, "rank 3 is gone");
        else
            peri__fail(PERI_EABORTED, "rank %d in group 'sharding group', operation %d: %s", depth, depth,
                       peri_error_message());
    }
    assert_memory_equal(peri_error_message(), "rank 39 in group", 16);
    assert_string_equal(peri_error_message() + PERI_MESSAGE_MAX - 1 - 14, "rank 3 is gone");
}

static void *fail_elsewhere(void *out)
{
    *(bool *)out = peri_error_status() == PERI_OK && peri_error_message()[0] == 0;
    peri__fail(PERI_EPEER, "another thread's");
    return NULL;
}

static void each_thread_has_its_own_record(void **state)
{
    (void)state;
    bool empty = false;
    pthread_t thread;
    peri__fail(PERI_EINVAL, "mine");
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, &empty), 0);
    pthread_join(thread, NULL);
    assert_true(empty);
    assert_string_equal(peri_error_message(), "mine");
}

static peri_status tried(peri_status s, int *reached)
{
    PERI_TRY(s);
    ++*reached;
    return PERI_OK;
}

static void try_passes_pending_and_returns_errors(void **state)
{
    (void)state;
    int reached = 0;
    assert_int_equal(tried(PERI_OK, &reached), PERI_OK);
    assert_int_equal(tried(PERI_PENDING, &reached), PERI_OK);
    assert_int_equal(tried(PERI_EIO, &reached), PERI_EIO);
    assert_int_equal(reached, 2);
}

static void dtypes_have_sizes_and_names(void **state)
{
    (void)state;
    static const int sizes[PERI_DTYPE_COUNT] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16};
    for (int32_t d = 0; d < PERI_DTYPE_COUNT; d++) {
        assert_int_equal(peri_dtype_size(d), sizes[d]);
        assert_int_equal(peri_dtype_parse(peri_dtype_name(d)), d);
    }
    assert_int_equal(peri_dtype_parse("float32"), PERI_F32);
    assert_int_equal(peri_dtype_parse("complex64"), PERI_C64);
    assert_int_equal(peri_dtype_size(-1), 0);
    assert_int_equal(peri_dtype_size(PERI_DTYPE_COUNT), 0);
    assert_string_equal(peri_dtype_name(99), "?");
    assert_fails(peri_dtype_parse("f33"), PERI_EINVAL, "'f33' is no dtype");
    assert_fails(peri_dtype_parse(NULL), PERI_EINVAL, "(null)");
}

static void versions_agree(void **state)
{
    (void)state;
    assert_int_equal(peri_abi_version(), PERI_ABI_VERSION);
    assert_string_equal(peri_version(), PERI_VERSION_TEXT);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_status_has_a_name_and_a_text),
    cmocka_unit_test(a_failure_is_recorded_and_cleared),
    cmocka_unit_test(failing_keeps_errno),
    cmocka_unit_test(the_old_message_may_be_part_of_the_new_one),
    cmocka_unit_test(long_messages_keep_their_begin_and_their_cause),
    cmocka_unit_test(each_thread_has_its_own_record),
    cmocka_unit_test(try_passes_pending_and_returns_errors),
    cmocka_unit_test(dtypes_have_sizes_and_names),
    cmocka_unit_test(versions_agree),
};

check_main(tests)
