/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h: cmocka for tests/unit and tests/kernels, and assertions on statuses.
 */
#ifndef PERI_TESTS_CHECK_H
#define PERI_TESTS_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <perilune/base.h>

/** @expr is no error; otherwise print what the error record says. */
#define assert_ok(expr)                                                                                                \
    do {                                                                                                               \
        peri_status check_ = (expr);                                                                                   \
        if (check_ < 0) fail_msg("%s: %s: %s", #expr, peri_status_name(check_), peri_error_message());                 \
    } while (0)

/** @expr fails with @status and a message that contains @text. */
#define assert_fails(expr, status, text)                                                                               \
    do {                                                                                                               \
        peri_status check_ = (expr);                                                                                   \
        if (check_ != (status))                                                                                        \
            fail_msg("%s: %s, wanted %s", #expr, peri_status_name(check_), peri_status_name(status));                  \
        if (!strstr(peri_error_message(), (text)))                                                                     \
            fail_msg("%s: \"%s\" lacks \"%s\"", #expr, peri_error_message(), (text));                                  \
    } while (0)

/** Run all tests of a `const struct CMUnitTest tests[]`. */
#define check_main(tests)                                                                                              \
    int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }

#endif
