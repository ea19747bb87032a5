/* SPDX-License-Identifier: Apache-2.0
 *
 * test_alloc.c: the accounted heap, a host's own allocator, fault points.
 */
#include "tests/harness/check.h"

#include "runtime/base/base_internal.h"

#include <perilune/host.h>

#include <errno.h>
#include <stdlib.h>

static int64_t host_blocks;

static void *host_alloc(size_t size)
{
    host_blocks++;
    return malloc(size);
}
static void *host_realloc(void *p, size_t size) { return realloc(p, size); }
static void host_free(void *p)
{
    host_blocks--;
    free(p);
}

/** Runs before the program's own allocator is set, which gets all blocks. Sizes around 256 KiB, up and down: the bytes
 *  stay, and are counted. */
static void blocks_of_pages_of_their_own_grow_and_shrink(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1000, 262143, 262144, 5000000, 262145, 100, 3 << 20};
    const int64_t before = peri_mem_live();
    unsigned char *p = NULL;
    int64_t had = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        p = peri__realloc_pages(p, (size_t)sizes[i]);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        assert_int_equal(peri_mem_live(), before + sizes[i]);
        for (int64_t k = 0; k < peri__min(had, sizes[i]); k++) assert_int_equal(p[k], k * 7 % 251);
        for (int64_t k = 0; k < sizes[i]; k++) p[k] = (unsigned char)(k * 7 % 251);
        had = sizes[i];
    }
    assert_ok(peri_fault_arm("alloc", 1));
    assert_null(peri__realloc_pages(p, 4 << 20));
    assert_int_equal(peri_error_status(), PERI_ENOMEM);
    assert_int_equal(p[had - 1], (had - 1) * 7 % 251);
    p = peri__realloc(p, 2 << 20);
    assert_int_equal(p[1 << 20], (1 << 20) * 7 % 251);
    peri__free(p);
    assert_int_equal(peri_mem_live(), before);
}

/** Runs before all that allocates for good: nothing is allocated yet. */
static void a_host_may_lend_its_allocator_before_first_use(void **state)
{
    (void)state;
    assert_fails(peri_host_allocator_set(host_alloc, NULL, host_free), PERI_EINVAL, "all three");
    assert_ok(peri_host_allocator_set(host_alloc, host_realloc, host_free));
    void *p = peri__alloc(100);
    assert_non_null(p);
    assert_int_equal(host_blocks, 1);
    assert_fails(peri_host_allocator_set(malloc, realloc, free), PERI_EINVAL, "1 blocks are already allocated");
    peri__free(p);
    assert_int_equal(host_blocks, 0);
    assert_ok(peri_host_allocator_set(malloc, realloc, free));
}

static void bytes_are_counted(void **state)
{
    (void)state;
    int64_t before = peri_mem_live();
    char *p = peri__alloc(1000);
    assert_int_equal(peri_mem_live(), before + 1000);
    assert_int_equal((uintptr_t)p % 16, 0);
    memset(p, 7, 1000);
    p = peri__realloc(p, 5000);
    assert_int_equal(p[999], 7);
    assert_int_equal(peri_mem_live(), before + 5000);
    assert_true(peri_mem_peak() >= before + 5000);
    p = peri__realloc(p, 10);
    assert_int_equal(p[9], 7);
    assert_int_equal(peri_mem_live(), before + 10);
    peri__free(p);
    assert_int_equal(peri_mem_live(), before);
    peri__free(NULL);
    char *zero = peri__alloc_zero(64);
    for (int i = 0; i < 64; i++) assert_int_equal(zero[i], 0);
    peri__free(zero);
    char *text = peri__strdup("moon");
    assert_string_equal(text, "moon");
    peri__free(text);
    assert_int_equal(peri_mem_live(), before);
}

static void debt_is_asked_once(void **state)
{
    (void)state;
    peri_mem_debt();
    int64_t before = peri_mem_live();
    peri__mem_count(500);
    peri__mem_count(-500);
    peri__mem_count(20);
    assert_int_equal(peri_mem_debt(), 520);
    assert_int_equal(peri_mem_debt(), 0);
    peri__mem_count(-20);
    assert_int_equal(peri_mem_live(), before);
}

enum { THREADS = 3, ROUNDS = 2000 };
typedef struct counting {
    int64_t bytes;
    void *block; /* stays when the thread has ended */
} counting;

static void *count_and_end(void *ctx)
{
    counting *c = ctx;
    for (int i = 0; i < ROUNDS; i++) {
        peri__free(peri__alloc((size_t)c->bytes));
        peri__mem_count(1);
        peri__object_count(1);
        peri__mem_count(-1);
        peri__object_count(-1);
    }
    c->block = peri__alloc((size_t)c->bytes);
    peri__object_count(1);
    return NULL;
}

/** Whoever counts, and whether it has ended: at rest the counts are what is there, and the peak is no less than what
 *  was there at once. */
static void counts_are_those_of_all_threads(void **state)
{
    (void)state;
    const int64_t live = peri_mem_live(), objects = peri_mem_objects();
    counting of[THREADS + 1];
    pthread_t threads[THREADS];
    int64_t bytes = 0;
    peri_mem_debt();
    for (int i = 0; i <= THREADS; i++) of[i].bytes = 1 << (20 + i), bytes += of[i].bytes;
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, count_and_end, &of[i]), 0);
    count_and_end(&of[THREADS]);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    assert_int_equal(peri_mem_live(), live + bytes);
    assert_int_equal(peri_mem_objects(), objects + THREADS + 1);
    assert_true(peri_mem_peak() >= live + bytes);
    assert_int_equal(peri_mem_debt(), (THREADS + 1) * ROUNDS);
    for (int i = 0; i <= THREADS; i++) peri__free(of[i].block);
    peri__object_count(-THREADS - 1);
    assert_int_equal(peri_mem_live(), live);
    assert_int_equal(peri_mem_objects(), objects);
}

static void no_memory_is_an_error_and_frees_nothing(void **state)
{
    (void)state;
    int64_t before = peri_mem_live();
    assert_null(peri__alloc(SIZE_MAX));
    assert_int_equal(peri_error_status(), PERI_ENOMEM);
    assert_null(peri__alloc_zero(SIZE_MAX - 8));
    char *p = peri__alloc(10);
    p[0] = 3;
    assert_null(peri__realloc(p, SIZE_MAX / 2 + 1));
    assert_int_equal(p[0], 3);
    assert_ok(peri_fault_arm("alloc", 1));
    assert_null(peri__realloc(p, 20));
    p = peri__realloc(p, 20);
    assert_non_null(p);
    assert_int_equal(p[0], 3);
    peri__free(p);
    assert_int_equal(peri_mem_live(), before);
}

static void freeing_keeps_errno_and_the_error_record(void **state)
{
    (void)state;
    void *p = peri__alloc(1 << 20);
    peri__fail(PERI_EIO, "kept");
    errno = ENOENT;
    peri__free(p);
    assert_int_equal(errno, ENOENT);
    assert_string_equal(peri_error_message(), "kept");
}

static void a_fault_point_fails_its_kth_passage_once(void **state)
{
    (void)state;
    for (int k = 1; k <= 4; k++) {
        assert_ok(peri_fault_arm("alloc", k));
        for (int i = 1; i <= 6; i++) {
            void *p = peri__alloc(8);
            assert_int_equal(p == NULL, i == k);
            peri__free(p);
        }
        assert_int_equal(peri_fault_passed("alloc"), 6);
    }
    assert_ok(peri_fault_arm("alloc", 0));
    void *p = peri__alloc(8);
    assert_non_null(p);
    peri__free(p);
}

static void fault_points_are_checked(void **state)
{
    (void)state;
    assert_fails(peri_fault_arm("allok", 1), PERI_ENOTFOUND, "no fault point 'allok'; known: alloc checkpoint_read");
    assert_fails(peri_fault_arm(NULL, 1), PERI_EINVAL, "name is missing");
    assert_fails(peri_fault_arm("alloc", -1), PERI_EINVAL, "k = -1");
    assert_int_equal(peri_fault_passed("nothing"), -1);
    assert_int_equal(peri_fault_passed(NULL), -1);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(blocks_of_pages_of_their_own_grow_and_shrink),
    cmocka_unit_test(a_host_may_lend_its_allocator_before_first_use),
    cmocka_unit_test(bytes_are_counted),
    cmocka_unit_test(debt_is_asked_once),
    cmocka_unit_test(counts_are_those_of_all_threads),
    cmocka_unit_test(no_memory_is_an_error_and_frees_nothing),
    cmocka_unit_test(freeing_keeps_errno_and_the_error_record),
    cmocka_unit_test(a_fault_point_fails_its_kth_passage_once),
    cmocka_unit_test(fault_points_are_checked),
};

check_main(tests)
