/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fence.c: what the other programs here stand on: malloc's blocks end where nothing may be touched, and a GPU is
 * told of all memory that cases can hand to a kernel.
 */
#include "tests/harness/check.h"
#include "tests/kernels/isas.h"

#include <signal.h>
#include <sys/wait.h>

enum { RANGES = 64 };
static struct { const char *from, *to; } ranges[RANGES];
static int n_ranges;

static bool record(void *p, size_t bytes)
{
    if (n_ranges == RANGES) return false;
    ranges[n_ranges].from = p;
    ranges[n_ranges++].to = (char *)p + bytes;
    return true;
}

static bool recorded(const volatile void *p, size_t bytes)
{
    for (int i = 0; i < n_ranges; i++)
        if ((const volatile char *)p >= ranges[i].from && (const volatile char *)p + bytes <= ranges[i].to) return true;
    return false;
}

/** The signal that @body ends a process of its own with. */
static int signal_of(void (*body)(void))
{
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL); /* cmocka catches them */
        signal(SIGABRT, SIG_DFL);
        (void)!freopen("/dev/null", "w", stderr);
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

__attribute__((noinline)) static void touch(size_t bytes, size_t at)
{
    volatile char *p = malloc(bytes);
    p[at] = 1;
    free((void *)p);
}
static void within(void) { touch(40, 39); }
static void behind(void) { touch(40, 40); }
static void within_open(void) { fence_open(record), touch(40, 39); }
static void behind_open(void) { fence_open(record), touch(40, 40); }
static bool refuse(void *p, size_t bytes) { return (void)p, (void)bytes, false; }
static void refused(void) { fence_open(refuse), touch(40 << 20, 39); } /* more than chunks that are there have */

static void blocks_end_where_nothing_may_be_touched(void **unused)
{
    (void)unused;
    if (!fence_open || !reaches_mappings) skip(); /* the sanitizer brings its malloc; a GPU has been told of all */
    assert_int_equal(0, signal_of(within));
    assert_int_equal(SIGSEGV, signal_of(behind));
    assert_int_equal(0, signal_of(within_open));
    assert_int_equal(SIGABRT, signal_of(behind_open));
    assert_int_equal(SIGABRT, signal_of(refused));
}

static const int64_t constants[] = {3, 5, 8};
static int64_t numbers[] = {3, 5, 8};
static char zeros[1 << 16];

static void a_gpu_is_told_of_what_cases_have(void **unused)
{
    (void)unused;
    int64_t local[300];
    char *large, *small[200];
    if (!fence_open) skip();
    if (!reaches_mappings) skip(); /* it has been told, and must not be twice */
    char *old = malloc(10);
    share_all(record);
    assert_true(recorded(constants, sizeof constants));
    assert_true(recorded(numbers, sizeof numbers));
    assert_true(recorded(zeros, sizeof zeros));
    assert_true(recorded(local, sizeof local));
    assert_false(recorded(old, 10));
    assert_false(recorded((const void *)(uintptr_t)a_gpu_is_told_of_what_cases_have, 1));
    for (size_t i = 0; i < 200; i++) {
        small[i] = malloc(3 * i);
        memset(small[i], 7, 3 * i);
        assert_true(recorded(small[i], 3 * i));
        if (i % 3) free(small[i]);
    }
    for (size_t align = 16; align <= 256; align *= 2) {
        char *p = aligned_alloc(align, 1000);
        assert_int_equal(0, (uintptr_t)p % align);
        assert_true(recorded(p, 1000));
        memset(p, 1, 1000);
        free(p);
    }
    large = calloc(100, 1 << 20);
    assert_true(recorded(large, 100 << 20) && large[(100 << 20) - 1] == 0);
    free(large);
    int before = n_ranges;
    for (int i = 0; i < 100; i++) free(malloc(50 << 20)); /* what was freed comes again */
    assert_true(n_ranges <= before + 1);
    for (size_t i = 0; i < 200; i += 3) free(small[i]);
    free(old); /* of the time before */
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(blocks_end_where_nothing_may_be_touched),
    cmocka_unit_test(a_gpu_is_told_of_what_cases_have),
};
check_main(tests)
