/* SPDX-License-Identifier: Apache-2.0
 *
 * test_elements.c: kernels/elements.h: every set of kernels against ref on tensors of every layout and dtype, and ref
 * against what its comments say, element by element.
 */
#include "jagged_cases.h"

#include "kernels/order.h"
#include "kernels/ref/value.h"

#include <math.h>

static const int32_t real_dtypes[] = {PERI_F64, PERI_F32, PERI_F16, PERI_BF16, PERI_I64,
                                      PERI_I32, PERI_I16, PERI_I8,  PERI_U8,   PERI_BOOL};
static const int64_t widths[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1};

/** A shape of few elements, and strides over it: contiguous, reversed in memory, or with repeats. Returns the elements
 *  that are spanned. */
static int64_t lay(const int64_t *shape, int32_t ndim, uint64_t kind, int64_t *stride)
{
    int64_t span = 1;
    for (int32_t k = 0; k < ndim; k++) {
        const int32_t d = kind == 1 ? k : ndim - 1 - k;
        stride[d] = kind == 2 && draw(2) ? 0 : span;
        if (stride[d]) span *= shape[d];
    }
    return span;
}

static int64_t any_shape(int64_t *shape, int32_t ndim)
{
    int64_t n = 1;
    for (int32_t d = 0; d < ndim; d++) n *= shape[d] = draw(6) == 0 ? 1 : 1 + (int64_t)draw(d == ndim - 1 ? 40 : 5);
    return n;
}

/** Elements of few different values, so that many are equal, some of them NaN, infinite or -0. */
static void *elements(int64_t n, int32_t dtype)
{
    int32_t d = 0;
    while (real_dtypes[d] != dtype) d++;
    char *p = room(n * widths[d]);
    for (int64_t i = 0; i < n; i++) {
        const int64_t x = (int64_t)draw(9) - 4;
        const double special[] = {NAN, INFINITY, -INFINITY, -0.0}, y = draw(6) == 0 ? special[draw(4)] : (double)x / 2;
        switch (dtype) {
        case PERI_F64: ((double *)p)[i] = y; break;
        case PERI_F32: ((float *)p)[i] = (float)y; break;
        case PERI_F16: ((uint16_t *)p)[i] = k_f32_to_f16((float)y); break;
        case PERI_BF16: ((uint16_t *)p)[i] = k_f32_to_bf16((float)y); break;
        case PERI_I64: ((int64_t *)p)[i] = draw(5) ? x : x + INT64_MAX - 4; break;
        case PERI_I32: ((int32_t *)p)[i] = (int32_t)x; break;
        case PERI_I16: ((int16_t *)p)[i] = (int16_t)x; break;
        case PERI_I8: ((int8_t *)p)[i] = (int8_t)x; break;
        case PERI_U8: ((uint8_t *)p)[i] = (uint8_t)(x + 4); break;
        default: ((uint8_t *)p)[i] = x > 0; break;
        }
    }
    return p;
}

static void comparisons(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 240; variant++) {
        const int32_t ndim = (int32_t)draw(4), which = variant % 10;
        peri_k_compare_args a = {
            .dtype = real_dtypes[which], .op = variant % PERI_COMPARE_COUNT, .ndim = ndim, .value = 0.5, .integer = 1};
        const int64_t n = any_shape(a.shape, ndim);
        a.a = elements(lay(a.shape, ndim, draw(3), a.a_stride), a.dtype);
        if (variant % 4) a.b = elements(lay(a.shape, ndim, draw(3), a.b_stride), a.dtype);
        a.dst = room(n);
        compare("compare", PERI_K_compare, &a, n, (output[]){OUTPUT(a.dst, n)}, 1);
        drop_all(NULL);
    }
}

static void whole_numbers(void **unused)
{
    (void)unused;
    static const int32_t integer_dtypes[] = {PERI_I64, PERI_I32, PERI_I16, PERI_I8, PERI_U8, PERI_BOOL};
    static const int64_t sizes[] = {8, 4, 2, 1, 1, 1};
    for (int variant = 0; variant < 252; variant++) {
        const int32_t ndim = (int32_t)draw(4), which = variant % 6;
        peri_k_binary_args a = {.dtype = integer_dtypes[which], .op = variant / 6 % PERI_INTEGER_COUNT, .ndim = ndim};
        const int64_t n = any_shape(a.shape, ndim);
        a.a = elements(lay(a.shape, ndim, draw(3), a.a_stride), a.dtype);
        a.b = elements(lay(a.shape, ndim, draw(3), a.b_stride), a.dtype);
        a.dst = room(n * sizes[which]);
        compare("integer", PERI_K_integer, &a, n, (output[]){OUTPUT(a.dst, n * sizes[which])}, 1);
        drop_all(NULL);
    }
}

/** Division against the law that defines it: x = floor * y + remainder, and the remainder lies between 0 and y. */
static void whole_division(void **unused)
{
    (void)unused;
    static const int64_t some[] = {INT64_MIN, INT64_MIN + 1, -7, -2, -1, 0, 1, 2, 7, INT64_MAX};
    for (int i = 0; i < 10; i++)
        for (int j = 0; j < 10; j++) {
            const int64_t x = some[i], y = some[j], q = peri_integer(PERI_INTEGER_FLOOR, x, y),
                          r = peri_integer(PERI_INTEGER_REMAINDER, x, y), c = peri_integer(PERI_INTEGER_FMOD, x, y);
            if (y == 0) {
                assert_true(q == 0 && r == 0 && c == 0);
                continue;
            }
            assert_true(c == r || (uint64_t)c == (uint64_t)r - (uint64_t)y); /* has x's sign */
            assert_true(c == 0 || (c < 0) == (x < 0));
            assert_true((uint64_t)q * (uint64_t)y + (uint64_t)r == (uint64_t)x);
            assert_true(y > 0 ? r >= 0 && r < y : r <= 0 && r > y);
        }
}

/** Powers against repeated products, which wrap around as they do. */
static void integer_powers(void **unused)
{
    (void)unused;
    for (int64_t x = -5; x <= 5; x++) {
        uint64_t power = 1;
        for (int64_t y = 0; y < 70; y++, power *= (uint64_t)x)
            assert_true((uint64_t)peri_integer(PERI_INTEGER_POW, x, y) == power);
        for (int64_t y = -4; y < 0; y++) {
            const int64_t inverse = x == 1 ? 1 : x == -1 ? (y % 2 ? -1 : 1) : 0;
            assert_int_equal(peri_integer(PERI_INTEGER_POW, x, y), inverse);
        }
    }
}

/** Products of integers against sums written down. */
static void integer_products(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 60; variant++) {
        const int64_t rows = 1 + (int64_t)draw(5), cols = 1 + (int64_t)draw(5), n = (int64_t)draw(6), batch = 3;
        const bool turned = variant & 1, shared = variant & 2;
        peri_k_integer_product_args a = {.dtype = PERI_I64,
                                         .ndim = 1,
                                         .rows = rows,
                                         .cols = cols,
                                         .k = n,
                                         .a_row = turned ? 1 : n,
                                         .a_col = turned ? rows : 1,
                                         .b_row = cols,
                                         .b_col = 1,
                                         .shape = {batch},
                                         .a_stride = {rows * n},
                                         .b_stride = {shared ? 0 : n * cols}};
        const int64_t *x = a.a = numbers(batch * rows * n + 1, 1000, -500), *y = a.b = numbers(batch * n * cols + 1,
                                                                                               1000, -500);
        int64_t *dst = a.dst = room(8 * batch * rows * cols);
        compare("integer product", PERI_K_integer_product, &a, batch * rows,
                (output[]){OUTPUT(a.dst, 8 * batch * rows * cols)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_integer_product](&a, 0, batch * rows);
        for (int64_t o = 0; o < batch * rows * cols; o++) {
            const int64_t c = o % cols, r = o / cols % rows, m = o / cols / rows;
            int64_t sum = 0;
            for (int64_t k = 0; k < n; k++)
                sum += x[m * a.a_stride[0] + r * a.a_row + k * a.a_col] * y[m * a.b_stride[0] + k * cols + c];
            assert_int_equal(dst[o], sum);
        }
        drop_all(NULL);
    }
}

static void choices(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 120; variant++) {
        const int32_t ndim = (int32_t)draw(4), width = 1 << variant % 5;
        peri_k_where_args a = {.width = width, .ndim = ndim};
        const int64_t n = any_shape(a.shape, ndim);
        a.condition = elements(lay(a.shape, ndim, draw(3), a.condition_stride), PERI_BOOL);
        if (variant % 7) a.a = random_bytes(width * lay(a.shape, ndim, draw(3), a.a_stride));
        if (variant % 11) a.b = random_bytes(width * lay(a.shape, ndim, draw(3), a.b_stride));
        a.dst = room(n * width);
        compare("where", PERI_K_where, &a, n, (output[]){OUTPUT(a.dst, n * width)}, 1);
        drop_all(NULL);
    }
}

static void picks(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 120; variant++) {
        const int32_t ndim = 1 + (int32_t)draw(3), width = 1 << variant % 5, dim = (int32_t)draw((uint64_t)ndim);
        peri_k_take_args a = {.width = width, .ndim = ndim, .dim = dim};
        int64_t n = any_shape(a.shape, ndim), from[PERI_MAX_DIMS];
        if (variant % 5 == 4) { /* long lines: a GPU sorts them */
            n = n / a.shape[dim] * 600;
            a.shape[dim] = 600;
        }
        memcpy(from, a.shape, sizeof from);
        from[dim] = 1 + (int64_t)draw(9);
        a.src = random_bytes(width * lay(from, ndim, draw(2), a.src_stride));
        a.index = numbers(lay(a.shape, ndim, draw(3), a.index_stride), (uint64_t)from[dim], 0);
        a.dst = room(n * width);
        compare("take", PERI_K_take, &a, n, (output[]){OUTPUT(a.dst, n * width)}, 1);
        peri_k_take_add_args add = {
            .dtype = variant % 2 ? PERI_F64 : PERI_F32, .ndim = ndim, .dim = dim, .size = from[dim], .index = a.index};
        memcpy(add.shape, a.shape, sizeof add.shape);
        memcpy(add.index_stride, a.index_stride, sizeof add.index_stride);
        const int64_t size = variant % 2 ? 8 : 4, span = lay(from, ndim, draw(2), add.dst_stride);
        int64_t many = lay(a.shape, ndim, draw(3), add.src_stride);
        float *few = random_floats(2 * many);
        for (int64_t i = 0; i < many && size == 8; i++) ((double *)few)[i] = (double)i / 7;
        add.src = few;
        add.dst = room(span * size);
        memset(add.dst, 0, (size_t)(span * size));
        void *dst = add.dst;
        compare("take_add", PERI_K_take_add, &add, n / a.shape[dim], (output[]){OUTPUT(add.dst, span * size)}, 1);
        add.dst = dst, add.put = true;
        compare("put", PERI_K_take_add, &add, n / a.shape[dim], (output[]){OUTPUT(add.dst, span * size)}, 1);
        if (size == 8) { /* numbers that fit both */
            add.dst = dst, add.put = draw(2), add.dtype = PERI_I64;
            compare("whole", PERI_K_take_add, &add, n / a.shape[dim], (output[]){OUTPUT(add.dst, span * size)}, 1);
        }
        drop_all(NULL);
    }
}

static void running_sums(void **unused)
{
    (void)unused;
    static const int64_t lengths[] = {1, 2, 31, 32, 33, 70}, inners[] = {1, 3, 9};
    for (int variant = 0; variant < 108; variant++) {
        const int64_t n = lengths[variant % 6], inner = inners[variant / 6 % 3], outer = 1 + (int64_t)draw(4),
                      all = outer * n * inner;
        const int32_t dtype = variant / 18 % 3 == 0 ? PERI_F32 : variant / 18 % 3 == 1 ? PERI_F64 : PERI_I64;
        const int64_t size = dtype == PERI_F32 ? 4 : 8;
        peri_k_running_sum_args a = {.dtype = dtype, .backwards = variant >= 54, .n = n, .inner = inner};
        void *x = numbers(all, 1000, -500);
        for (int64_t i = 0; i < all && dtype != PERI_I64; i++) { /* whole numbers: sums are exact in any order */
            const int64_t v = ((int64_t *)x)[i];
            if (dtype == PERI_F64) ((double *)x)[i] = (double)v;
            else ((float *)x)[i] = (float)i;
        }
        a.x = x;
        a.y = room(all * size);
        compare("running sum", PERI_K_running_sum, &a, outer * inner, (output[]){OUTPUT(a.y, all * size)}, 1);
        drop_all(NULL);
    }
}

/** Running products and their gradients against sums of products written down; some factors are 0. */
static void running_products(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 60; variant++) {
        const int64_t n = 1 + (int64_t)draw(6), inner = 1 + (int64_t)draw(3), outer = 1 + (int64_t)draw(3),
                      all = outer * n * inner;
        double *x = room(8 * all), *dy = room(8 * all);
        for (int64_t i = 0; i < all; i++) x[i] = (double)draw(5) - 2, dy[i] = (double)draw(7) - 3;
        peri_k_product_dim_args a = {.x = x, .y = room(8 * all), .dtype = PERI_F64, .n = n, .inner = inner};
        double *y = a.y;
        compare("running product", PERI_K_running_product, &a, outer * inner, (output[]){OUTPUT(a.y, 8 * all)}, 1);
        a.y = y;
        peri_kernels_ref.fn[PERI_K_running_product](&a, 0, outer * inner);
        peri_k_product_dim_grad_args g = {
            .x = x, .dy = dy, .dx = room(8 * all), .dtype = PERI_F64, .n = n, .inner = inner};
        double *dx = g.dx;
        compare("its gradient", PERI_K_running_product_grad, &g, outer * inner, (output[]){OUTPUT(g.dx, 8 * all)}, 1);
        g.dx = dx;
        peri_kernels_ref.fn[PERI_K_running_product_grad](&g, 0, outer * inner);
        for (int64_t u = 0; u < all; u++) {
            const int64_t r = u / inner % n, base = u - r * inner;
            double product = 1, sum = 0;
            for (int64_t q = 0; q <= r; q++) product *= x[base + q * inner];
            for (int64_t q = r; q < n; q++) {
                double rest = dy[base + q * inner];
                for (int64_t p = 0; p <= q; p++) rest *= p == r ? 1 : x[base + p * inner];
                sum += rest;
            }
            assert_true(y[u] == product && dx[u] == sum);
        }
        int64_t *whole = numbers(all, 9, -4);
        peri_k_product_dim_args w = {.x = whole, .y = room(8 * all), .dtype = PERI_I64, .n = n, .inner = inner};
        compare("of integers", PERI_K_running_product, &w, outer * inner, (output[]){OUTPUT(w.y, 8 * all)}, 1);
        drop_all(NULL);
    }
}

/** Places among sorted elements against counts of smaller ones, of every dtype. */
static void searches(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 120; variant++) {
        const int32_t which = variant % 10, dtype = real_dtypes[which];
        const int64_t lines = 1 + (int64_t)draw(3), n = (int64_t)draw(20), each = 1 + (int64_t)draw(9);
        peri_k_search_args a = {.dtype = dtype, .right = variant & 1, .one = draw(2), .n = n, .per_line = each};
        const int64_t sets = a.one ? 1 : lines;
        peri_k_sort_line_args s = {.sort = {.dtype = dtype, .lines = sets, .n = n, .k = n}};
        s.sort.x = elements(sets * n, dtype);
        s.sort.values = room(sets * n * widths[which]);
        s.sort.indices = room(8 * sets * n);
        s.room = room((int64_t)sizeof(peri_k_sort_entry) * 2 * sets * n);
        peri_kernels_ref.fn[PERI_K_sort_line](&s, 0, sets);
        a.sorted = s.sort.values;
        a.x = elements(lines * each, dtype);
        int64_t *dst = a.dst = room(8 * lines * each);
        compare("search", PERI_K_search, &a, lines * each, (output[]){OUTPUT(a.dst, 8 * lines * each)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_search](&a, 0, lines * each);
        for (int64_t i = 0; i < lines * each; i++) {
            const uint64_t key = k_sort_key(a.x, i, dtype, false);
            int64_t before = 0;
            for (int64_t r = 0; r < n; r++) {
                const uint64_t other = k_sort_key(a.sorted, (a.one ? 0 : i / each) * n + r, dtype, false);
                before += other < key || (a.right && other == key);
            }
            assert_int_equal(dst[i], before);
        }
        drop_all(NULL);
    }
}

static void rows_of_numbers(void **unused)
{
    (void)unused;
    static const int32_t some[] = {PERI_F32, PERI_F64, PERI_I64, PERI_I32};
    for (int i = 0; i < 4; i++) {
        const int64_t n = 100, size = some[i] == PERI_F32 || some[i] == PERI_I32 ? 4 : 8;
        peri_k_iota_args a = {.dtype = some[i], .start = 0.3, .step = -0.1, .integer_start = 7, .integer_step = -3};
        a.dst = room(n * size);
        compare("iota", PERI_K_iota, &a, n, (output[]){OUTPUT(a.dst, n * size)}, 1);
        drop_all(NULL);
    }
}

/** What `sort_lines` promises, checked of the step that the device cpu makes it of: keys that do not fall, places in
 *  order where they are equal, each once, the k of them from rank `first` on; or the first NaN. */
static void sorts(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 200; variant++) {
        const int32_t which = variant % 10;
        const int64_t lines = 1 + (int64_t)draw(3), n = 1 + (int64_t)draw(variant % 3 ? 20 : 900);
        const int64_t k = draw(3) ? (int64_t)draw(draw(2) ? 2 : (uint64_t)n + 1) : n;
        peri_k_sort_line_args a = {.sort = {.dtype = real_dtypes[which], .descending = variant & 1, .lines = lines,
                                            .nan_first = draw(4) == 0, .n = n, .k = k}};
        a.sort.first = (int64_t)draw((uint64_t)(n - k + 1));
        a.sort.x = elements(lines * n, a.sort.dtype);
        a.sort.values = room(lines * k * widths[which]);
        a.sort.indices = room(8 * lines * k);
        a.room = room((int64_t)sizeof(peri_k_sort_entry) * 2 * lines * n);
        peri_kernels_ref.fn[PERI_K_sort_line](&a, 0, lines);
        for (int64_t l = 0; l < lines; l++) {
            const int64_t *at = a.sort.indices + l * k;
            int64_t nan = a.sort.nan_first ? 0 : n;
            while (nan < n && !k_is_nan(a.sort.x, l * n + nan, a.sort.dtype)) nan++;
            for (int64_t r = 0; r < k; r++) {
                const uint64_t key = k_sort_key(a.sort.x, l * n + at[r], a.sort.dtype, a.sort.descending);
                assert_memory_equal((char *)a.sort.values + (l * k + r) * widths[which],
                                    (const char *)a.sort.x + (l * n + at[r]) * widths[which], widths[which]);
                if (nan < n) {
                    assert_int_equal(at[r], nan);
                    continue;
                }
                int64_t before = 0; /* elements that come before this one */
                for (int64_t i = 0; i < n; i++) {
                    const uint64_t other = k_sort_key(a.sort.x, l * n + i, a.sort.dtype, a.sort.descending);
                    before += other < key || (other == key && i < at[r]);
                }
                assert_int_equal(before, a.sort.first + r);
            }
        }
        drop_all(NULL);
    }
}

/** The most frequent elements of sorted lines against counts of each. */
static void modes(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 120; variant++) {
        const int32_t which = variant % 10, dtype = real_dtypes[which];
        const int64_t lines = 1 + (int64_t)draw(4), n = 1 + (int64_t)draw(12);
        peri_k_sort_line_args s = {.sort = {.dtype = dtype, .lines = lines, .n = n, .k = n}};
        s.sort.x = elements(lines * n, dtype);
        s.sort.values = room(lines * n * widths[which]);
        s.sort.indices = room(8 * lines * n);
        s.room = room((int64_t)sizeof(peri_k_sort_entry) * 2 * lines * n);
        peri_kernels_ref.fn[PERI_K_sort_line](&s, 0, lines);
        peri_k_mode_args a = {.values = room(lines * widths[which]), .indices = room(8 * lines),
                              .sorted = s.sort.values, .places = s.sort.indices, .dtype = dtype, .n = n};
        void *values = a.values;
        int64_t *indices = a.indices;
        compare("mode", PERI_K_mode_line, &a, lines,
                (output[]){OUTPUT(a.values, lines * widths[which]), OUTPUT(a.indices, 8 * lines)}, 2);
        a.values = values, a.indices = indices;
        peri_kernels_ref.fn[PERI_K_mode_line](&a, 0, lines);
        for (int64_t l = 0; l < lines; l++) {
            int64_t most = 0, at = 0;
            for (int64_t i = 0; i < n; i++) {
                const uint64_t key = k_sort_key(s.sort.x, l * n + i, dtype, false);
                const bool alone = k_is_nan(s.sort.x, l * n + i, dtype);
                int64_t many = 0, last = i;
                for (int64_t j = 0; j < n; j++)
                    if (alone ? j == i : k_sort_key(s.sort.x, l * n + j, dtype, false) == key) many++, last = j;
                if (many < most || (many == most && key >= k_sort_key(s.sort.x, l * n + at, dtype, false))) continue;
                most = many, at = last;
            }
            assert_int_equal(indices[l], at);
            assert_memory_equal((char *)values + l * widths[which],
                                (const char *)s.sort.x + (l * n + at) * widths[which], widths[which]);
        }
        drop_all(NULL);
    }
}

/** Numbers of bins and coordinates against the intervals and the places that they stand for; the width of a bin is a
 *  power of 2, so that its bounds are exact. */
static void bins_and_places(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 60; variant++) {
        const int32_t which = variant % 10, bins = 1 << draw(4);
        const int64_t n = 1 + (int64_t)draw(40);
        peri_k_bin_args a = {.dtype = real_dtypes[which], .bins = bins, .least = -4, .most = 4};
        a.x = elements(n, a.dtype);
        int32_t *dst = a.dst = room(4 * n);
        compare("bin number", PERI_K_bin_number, &a, n, (output[]){OUTPUT(a.dst, 4 * n)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_bin_number](&a, 0, n);
        for (int64_t i = 0; i < n; i++) {
            const ref_value v = ref_load(a.x, i, a.dtype);
            const double x = ref_to_f64(v), width = 8.0 / bins;
            int32_t want = bins;
            for (int32_t b = 0; b < bins; b++)
                if (x >= -4 + b * width && (x < -4 + (b + 1) * width || (b == bins - 1 && x == 4))) want = b;
            assert_int_equal(dst[i], want);
        }
        peri_k_unravel_args u = {.ndim = 1 + (int32_t)draw(4)};
        const int64_t all = any_shape(u.shape, u.ndim);
        u.flat = numbers(n, (uint64_t)all, 0);
        int64_t *to = u.dst = room(8 * n * u.ndim);
        compare("unravel", PERI_K_unravel, &u, n, (output[]){OUTPUT(u.dst, 8 * n * u.ndim)}, 1);
        u.dst = to;
        peri_kernels_ref.fn[PERI_K_unravel](&u, 0, n);
        for (int64_t i = 0; i < n; i++) {
            int64_t flat = 0;
            for (int32_t d = 0; d < u.ndim; d++) {
                assert_true(to[i * u.ndim + d] >= 0 && to[i * u.ndim + d] < u.shape[d]);
                flat = flat * u.shape[d] + to[i * u.ndim + d];
            }
            assert_int_equal(flat, u.flat[i]);
        }
        drop_all(NULL);
    }
}

static void batches_of_items(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 40; variant++) {
        const int64_t n = 1 + (int64_t)draw(9), size = variant & 1 ? 8 : 4;
        peri_k_in_batch_logits_args a = {.dtype = size == 8 ? PERI_F64 : PERI_F32, .n = n, .scale = 0.5, .fill = -99};
        double *x = room(8 * n * n), *q = room(8 * n); /* whole numbers: exact in any order */
        for (int64_t i = 0; i < n * n; i++) {
            const double number = (double)draw(100);
            if (size == 8) x[i] = number;
            else ((float *)x)[i] = (float)number;
        }
        for (int64_t i = 0; i < n; i++) {
            if (size == 8) q[i] = (double)i;
            else ((float *)q)[i] = (float)i;
        }
        a.x = x;
        a.log_q = variant & 2 ? q : NULL;
        a.ids = variant & 4 ? numbers(n, 3, 0) : NULL;
        double *dst = a.dst = room(size * n * n);
        compare("in_batch_logits", PERI_K_in_batch_logits, &a, n, (output[]){OUTPUT(a.dst, size * n * n)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_in_batch_logits](&a, 0, n);
        for (int64_t i = 0; i < n * n; i++) {
            const bool same = a.ids && i / n != i % n && a.ids[i / n] == a.ids[i % n];
            const double number = size == 8 ? x[i] : (double)((float *)x)[i];
            const double want = same ? -99 : number / 2 - (a.log_q ? (double)(i % n) : 0);
            assert_true((size == 8 ? dst[i] : (double)((float *)dst)[i]) == want);
        }
        drop_all(NULL);
    }
}

/** Sums of blocks against sums of 64 bits that are written down; all kinds of integers and bool. */
static void integer_sums(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 120; variant++) {
        const int64_t n = (int64_t)draw(40), inner = variant & 1 ? 1 : 1 + (int64_t)draw(9),
                      outer = 1 + (int64_t)draw(3), block = 1 + (int64_t)draw(12),
                      blocks = n > 0 ? (n + block - 1) / block : 1, all = outer * blocks * inner;
        peri_k_integer_sum_args a = {.dtype = real_dtypes[4 + variant % 6], .n = n, .block = block, .blocks = blocks,
                                     .inner = inner};
        a.x = elements(outer * n * inner + 1, a.dtype);
        int64_t *dst = a.dst = room(8 * all);
        compare("integer sum", PERI_K_integer_sum, &a, all, (output[]){OUTPUT(a.dst, 8 * all)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_integer_sum](&a, 0, all);
        for (int64_t u = 0; u < all; u++) {
            const int64_t o = u / inner / blocks, k = u / inner % blocks;
            uint64_t sum = 0;
            for (int64_t r = k * block; r < n && r < (k + 1) * block; r++)
                sum += (uint64_t)ref_load(a.x, (o * n + r) * inner + u % inner, a.dtype).i;
            assert_int_equal(dst[u], (int64_t)sum);
        }
        drop_all(NULL);
    }
}

static void triangles(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 100; variant++) {
        const int32_t which = variant % 10;
        const int64_t rows = 1 + (int64_t)draw(7), cols = 1 + (int64_t)draw(7), many = 1 + (int64_t)draw(3),
                      width = widths[which], bytes = many * rows * cols * width;
        peri_k_triangle_args a = {.width = (int32_t)width, .upper = variant / 10 & 1, .rows = rows, .cols = cols,
                                  .k = (int64_t)draw(17) - 8};
        if (variant > 90) a.k = variant & 1 ? INT64_C(1) << 62 : -(INT64_C(1) << 62);
        for (int i = 0; i < 16; i++) a.fill[i] = (uint8_t)(i + 1);
        a.x = elements(many * rows * cols, real_dtypes[which]);
        char *dst = a.dst = room(bytes);
        compare("triangle", PERI_K_triangle, &a, many * rows, (output[]){OUTPUT(a.dst, bytes)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_triangle](&a, 0, many * rows);
        for (int64_t i = 0; i < many * rows * cols; i++) {
            const int64_t apart = i % cols - i / cols % rows;
            const bool inside = a.upper ? apart >= a.k : apart <= a.k;
            assert_memory_equal(dst + i * width, inside ? (const char *)a.x + i * width : (const char *)a.fill, width);
        }
        drop_all(NULL);
    }
}

static void members(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 100; variant++) {
        const int32_t dtype = real_dtypes[variant % 10];
        const int64_t n = 1 + (int64_t)draw(12), many = 1 + (int64_t)draw(40), width = widths[variant % 10];
        peri_k_sort_line_args s = {.sort = {.x = elements(n, dtype), .values = room(n * width), .indices = room(8 * n),
                                            .dtype = dtype, .lines = 1, .n = n, .k = n},
                                   .room = room((int64_t)sizeof(peri_k_sort_entry) * 2 * n)};
        peri_kernels_ref.fn[PERI_K_sort_line](&s, 0, 1);
        peri_k_member_args a = {.sorted = s.sort.values, .x = elements(many, dtype), .dtype = dtype,
                                .n = variant > 90 ? 0 : n};
        uint8_t *dst = a.dst = room(many);
        compare("member", PERI_K_member, &a, many, (output[]){OUTPUT(a.dst, many)}, 1);
        a.dst = dst;
        peri_kernels_ref.fn[PERI_K_member](&a, 0, many);
        for (int64_t i = 0; i < many; i++) {
            bool there = false;
            for (int64_t j = 0; j < a.n; j++) {
                const ref_value x = ref_load(a.x, i, dtype), y = ref_load(s.sort.x, j, dtype);
                there = there || (x.integer ? x.i == y.i : ref_to_f64(x) == ref_to_f64(y));
            }
            assert_int_equal(dst[i], there);
        }
        drop_all(NULL);
    }
}

/** Rows of small whole numbers, whose sums are exact, against the formula; the gradient against differences. */
static void cosines(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 40; variant++) {
        const int64_t rows = 1 + (int64_t)draw(5), cols = (int64_t)draw(40), all = rows * cols;
        const double added = variant & 1 ? 0.25 : 0, eps = variant & 2 ? 1e-8 : 3;
        double *x = room(8 * all + 8), *z = room(8 * all + 8), *dy = room(8 * rows);
        for (int64_t i = 0; i < all; i++) x[i] = (double)draw(9) - 4, z[i] = (double)draw(9) - 4;
        for (int64_t r = 0; r < rows; r++) dy[r] = (double)draw(5) - 2;
        peri_k_cosine_args a = {.a = x, .b = z, .y = room(8 * rows), .sizes = room(32 * rows), .dtype = PERI_F64,
                                .eps = eps, .added = added, .cols = cols};
        double *y = a.y, *sizes = a.sizes;
        compare("cosine", PERI_K_cosine, &a, rows,
                (output[]){OUTPUT(a.y, 8 * rows), OUTPUT(a.sizes, 32 * rows)}, 2);
        a.y = y, a.sizes = sizes;
        peri_kernels_ref.fn[PERI_K_cosine](&a, 0, rows);
        peri_k_cosine_grad_args g = {.da = room(8 * all + 8), .db = room(8 * all + 8), .dy = dy, .y = y, .a = x, .b = z,
                                     .sizes = sizes, .dtype = PERI_F64, .cols = cols};
        double *da = g.da, *db = g.db;
        peri_kernels_ref.fn[PERI_K_cosine_grad](&g, 0, rows);
        for (int64_t r = 0; r < rows; r++) {
            double ab = 0, aa = 0, bb = 0;
            for (int64_t c = r * cols; c < (r + 1) * cols; c++) ab += x[c] * z[c], aa += x[c] * x[c], bb += z[c] * z[c];
            const double sa = sqrt(aa + added), sb = sqrt(bb + added);
            const double na = added > 0 ? sa : fmax(sa, eps), nb = added > 0 ? sb : fmax(sb, eps);
            assert_true(fabs(y[r] - ab / (na * nb)) < 1e-14);
            for (int64_t c = r * cols; c < (r + 1) * cols; c++) {
                const double wa = aa + added > 0 ? x[c] / (na * sa) : 0, wb = bb + added > 0 ? z[c] / (nb * sb) : 0;
                assert_true(fabs(da[c] - dy[r] * (z[c] / (na * nb) - y[r] * wa)) < 1e-13);
                assert_true(fabs(db[c] - dy[r] * (x[c] / (na * nb) - y[r] * wb)) < 1e-13);
            }
        }
        drop_all(NULL);
    }
}

/** The order of keys is that of numbers, NaN last, -0 beside 0. */
static void keys(void **unused)
{
    (void)unused;
    const double rising[] = {-INFINITY, -3e38, -1, -1e-42, 0, 1e-42, 0.5, 1, 3e38, INFINITY, NAN};
    for (int i = 0; i < 10; i++) {
        float low = (float)rising[i], high = (float)rising[i + 1];
        assert_true(k_sort_key(&rising[i], 0, PERI_F64, false) < k_sort_key(&rising[i + 1], 0, PERI_F64, false));
        assert_true(k_sort_key(&rising[i], 0, PERI_F64, true) > k_sort_key(&rising[i + 1], 0, PERI_F64, true));
        assert_true(k_sort_key(&low, 0, PERI_F32, false) < k_sort_key(&high, 0, PERI_F32, false));
    }
    const double zeros[] = {0.0, -0.0};
    assert_true(k_sort_key(zeros, 0, PERI_F64, false) == k_sort_key(zeros, 1, PERI_F64, false));
    const int64_t wide[] = {INT64_MIN, -1, 0, 1, INT64_MAX};
    for (int i = 0; i < 4; i++)
        assert_true(k_sort_key(wide, i, PERI_I64, false) < k_sort_key(wide, i + 1, PERI_I64, false));
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(comparisons, drop_all),
        cmocka_unit_test_teardown(choices, drop_all),
        cmocka_unit_test_teardown(whole_numbers, drop_all),
        cmocka_unit_test_teardown(whole_division, drop_all),
        cmocka_unit_test(integer_powers),
        cmocka_unit_test_teardown(integer_products, drop_all),
        cmocka_unit_test_teardown(picks, drop_all),
        cmocka_unit_test_teardown(running_sums, drop_all),
        cmocka_unit_test_teardown(running_products, drop_all),
        cmocka_unit_test_teardown(searches, drop_all),
        cmocka_unit_test_teardown(rows_of_numbers, drop_all),
        cmocka_unit_test_teardown(sorts, drop_all),
        cmocka_unit_test_teardown(keys, drop_all),
        cmocka_unit_test_teardown(modes, drop_all),
        cmocka_unit_test_teardown(bins_and_places, drop_all),
        cmocka_unit_test_teardown(batches_of_items, drop_all),
        cmocka_unit_test_teardown(integer_sums, drop_all),
        cmocka_unit_test_teardown(triangles, drop_all),
        cmocka_unit_test_teardown(members, drop_all),
        cmocka_unit_test_teardown(cosines, drop_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
