/* SPDX-License-Identifier: Apache-2.0
 *
 * test_convert.c: kernels/convert.h between layouts, and its random numbers and dropout's, every set of kernels against
 * ref; division by multiplication (kernels/divide.h).
 */
#include "jagged_cases.h"

#include "kernels/divide.h"

/* -- division ------------------------------------------------------------------------------------------------------ */

static void divides(uint64_t d)
{
    const peri_k_divisor by = peri_k_divisor_of((int64_t)d);
    const uint64_t edges[] = {0,
                              1,
                              2,
                              UINT32_MAX - 1,
                              UINT32_MAX,
                              (uint64_t)UINT32_MAX + 1,
                              (uint64_t)INT64_MAX - 1,
                              INT64_MAX,
                              (uint64_t)INT64_MAX + 1,
                              UINT64_MAX - 1,
                              UINT64_MAX};
    for (int i = 0; i < 400; i++) {
        uint64_t n, rest, multiple = (UINT64_MAX / d) >> draw(64) << draw(2);
        if (i < (int)(sizeof edges / sizeof *edges)) n = edges[i];
        else if (i % 2) n = multiple * d - 1 + draw(3); /* where quotients change; wraps now and then */
        else n = draw(UINT64_MAX) >> draw(64);
        uint64_t q = peri_k_divide(n, &by, &rest);
        if (q != n / d || rest != n % d)
            fail_msg("%llu / %llu is %llu, rest %llu", (unsigned long long)n, (unsigned long long)d,
                     (unsigned long long)q, (unsigned long long)rest);
        n >>= 1;
        if (peri_k_quotient(n, &by) != n / d)
            fail_msg("%llu / %llu is %llu", (unsigned long long)n, (unsigned long long)d,
                     (unsigned long long)peri_k_quotient(n, &by));
    }
}

static void division(void **unused)
{
    (void)unused;
    for (uint64_t d = 1; d < 300; d++) divides(d);
    for (int bit = 8; bit < 63; bit++)
        for (uint64_t by = 0; by < 7; by++) divides(((uint64_t)1 << bit) - 3 + by);
    for (uint64_t by = 0; by < 7; by++) divides((uint64_t)INT64_MAX - by);
    for (int i = 0; i < 2000; i++) divides(1 + (draw(INT64_MAX) >> draw(63)));
}

/* -- layouts ------------------------------------------------------------------------------------------------------- */

static const int32_t all_dtypes[] = {PERI_F32, PERI_F64, PERI_F16, PERI_BF16, PERI_I64,
                                     PERI_I32, PERI_I16, PERI_I8,  PERI_U8,   PERI_BOOL};
static const int64_t sizes[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};

/** Strides of dimensions that lie in memory in a random order, or in theirs, with gaps now and then; the elements that
 *  they span. */
static int64_t lay(const int64_t *shape, int32_t ndim, bool ordered, bool gaps, int64_t *stride)
{
    int32_t order[PERI_MAX_DIMS];
    int64_t span = 1;
    for (int32_t d = 0; d < ndim; d++) order[d] = d;
    for (int32_t d = ndim - 1; d > 0 && !ordered; d--) {
        int32_t other = (int32_t)draw((uint64_t)d + 1), swap = order[d];
        order[d] = order[other];
        order[other] = swap;
    }
    for (int32_t k = ndim - 1; k >= 0; k--) {
        stride[order[k]] = span;
        span *= shape[order[k]];
        if (gaps && draw(3) == 0) span += (int64_t)draw(2) * 16 + (int64_t)draw(3);
    }
    return span;
}

/** n numbers of a dtype, none of them NaN. */
static void *elements(int64_t n, int32_t dtype)
{
    void *x = values_of(n, dtype == PERI_F32 || dtype == PERI_F64 ? dtype : PERI_I64);
    for (int64_t i = 0; i < n && (dtype == PERI_F16 || dtype == PERI_BF16); i++) ((uint16_t *)x)[i] &= 0xbfff;
    for (int64_t i = 0; i < n && dtype == PERI_BOOL; i++) ((uint8_t *)x)[i] &= 1;
    return x;
}

static void layouts(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 300; variant++) {
        size_t to = draw(10), from = variant % 3 ? to : draw(10);
        int32_t ndim = (int32_t)draw(5);
        peri_k_convert_args a = {.ndim = ndim, .dst_dtype = all_dtypes[to], .src_dtype = all_dtypes[from]};
        int64_t n = 1;
        for (int32_t d = 0; d < ndim; d++) {
            a.shape[d] = draw(4) == 0 ? 1 : draw(3) == 0 ? 16 : 1 + (int64_t)draw(7);
            n *= a.shape[d];
        }
        int64_t dst = lay(a.shape, ndim, variant & 1, variant & 2, a.dst_stride);
        int64_t src = lay(a.shape, ndim, variant & 4, variant & 8, a.src_stride);
        for (int32_t d = 0; d < ndim && variant % 7 == 0; d++)
            if (draw(2)) a.src_stride[d] = 0;
        int64_t offset = (int64_t)draw(3) * (int64_t)draw(2);
        a.src = (char *)elements(src + offset, all_dtypes[from]) + offset * sizes[from];
        a.dst = room(dst * sizes[to]);
        compare("convert", PERI_K_convert, &a, n, (output[]){OUTPUT(a.dst, dst * sizes[to])}, 1);
        drop_all(NULL);
    }
}

/* -- random numbers ------------------------------------------------------------------------------------------------ */

/** Blocks of a matrix, whose counters pass 2^32 now and then. */
static void random_numbers(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 240; variant++) {
        const int d = variant / 2 % 4;
        peri_k_random_args a = {.dtype = all_dtypes[d], .kind = variant % 2, .cols = 1 + (int64_t)draw(150)};
        a.total_cols = a.cols + (variant % 3 ? (int64_t)draw(40) : 0);
        a.col_offset = (int64_t)draw((uint64_t)(a.total_cols - a.cols + 1));
        a.row_offset = variant % 5 ? (int64_t)draw(1000) : ((INT64_C(1) << 34) - (int64_t)draw(500)) / a.total_cols;
        a.low = variant % 4 ? -1.5 : 0, a.high = variant % 4 ? 2.25 : 1;
        a.seed = draw(UINT64_MAX), a.random_stream = draw(UINT64_MAX) >> draw(64);
        const int64_t n = a.cols * (1 + (int64_t)draw(5));
        a.dst = room(n * sizes[d]);
        compare("random", PERI_K_random, &a, n, (output[]){OUTPUT(a.dst, n * sizes[d])}, 1);
        peri_k_dropout_args drop = {.dtype = PERI_F32, .threshold = (uint32_t)draw(UINT32_MAX), .scale = 1.25};
        drop.x = elements(n, PERI_F32), drop.y = room(4 * n);
        drop.seed = a.seed, drop.random_stream = a.random_stream;
        drop.offset = variant % 5 ? draw(1000) : (UINT64_C(1) << 34) - draw(300);
        compare("dropout", PERI_K_dropout, &drop, n, (output[]){OUTPUT(drop.y, 4 * n)}, 1);
        drop_all(NULL);
    }
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(division, drop_all),
        cmocka_unit_test_teardown(layouts, drop_all),
        cmocka_unit_test_teardown(random_numbers, drop_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
