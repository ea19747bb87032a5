/* SPDX-License-Identifier: Apache-2.0
 *
 * test_bags.c: lookups in one matrix: every instruction set gives ref's bits, however ranges are split, on random and
 * on malformed bags; ref is held against what kernels/bags.h says, in other words.
 */
#include "jagged_cases.h"

#include <math.h>

static const int64_t widths[] = {1, 3, 8, 16, 17, 33, 64, 100, 129};
enum { WIDTHS = sizeof widths / sizeof *widths, ROWS = 40 };

/** Bags over ROWS rows with repeated and foreign ids; @wild: offsets that make no bags. */
static peri_k_bags random_bags(int64_t bags, int64_t cols, int32_t ids_dtype, int32_t offsets_dtype, bool wild)
{
    int64_t *offsets = complete(random_lengths(bags, 5), bags), n = offsets[bags];
    int64_t *ids = room(8 * n);
    for (int64_t i = 0; i < n; i++) ids[i] = draw(12) == 0 ? (int64_t)draw(3) * 50 - 51 : (int64_t)draw(ROWS);
    for (int k = 0; wild && k < 4; k++) offsets[draw((uint64_t)bags + 1)] = (int64_t)draw(1000) - 500;
    return (peri_k_bags){.ids = ints(ids, n, ids_dtype),
                         .offsets = ints(offsets, bags + 1, offsets_dtype),
                         .n_ids = n,
                         .rows = ROWS,
                         .cols = cols,
                         .ids_dtype = ids_dtype,
                         .offsets_dtype = offsets_dtype};
}

static int64_t int_of(const void *x, int64_t i, int32_t dtype)
{
    return dtype == PERI_I32 ? ((int32_t *)x)[i] : ((int64_t *)x)[i];
}
static int64_t id_of(const peri_k_bags *s, int64_t i) { return int_of(s->ids, i, s->ids_dtype); }

static float *random_rows(int64_t cols, bool odd)
{
    static const float strange[] = {NAN, INFINITY, -INFINITY, -0.0f, 0.0f, 1e-40f};
    float *x = random_floats(ROWS * cols);
    for (int64_t i = 0; i < ROWS * cols && odd; i++)
        if (draw(9) == 0) x[i] = strange[draw(6)];
    return x;
}

/** What is the largest, and where it stands first. */
static void check_max(const peri_k_bag_max_args *a, int64_t bags)
{
    const peri_k_bags *s = &a->bags;
    for (int64_t b = 0; b < bags; b++)
        for (int64_t d = 0; d < s->cols; d++) {
            int64_t from = int_of(s->offsets, b, s->offsets_dtype), past = int_of(s->offsets, b + 1, s->offsets_dtype),
                    n = 0;
            float out = a->out[b * s->cols + d];
            int32_t place = a->places[b * s->cols + d];
            for (int64_t i = from; i < past; i++) {
                if (id_of(s, i) < 0 || id_of(s, i) >= ROWS) continue;
                float x = a->x[id_of(s, i) * s->cols + d];
                n++;
                assert_true(place >= 0);
                if (i - from < place) assert_true(x == x && !(x >= out));
                else if (i - from == place) assert_memory_equal(&x, &out, sizeof x);
                else assert_true(out != out || x <= out);
            }
            if (n == 0) assert_true(place == -1 && out == 0);
        }
}

static void largest(void **unused)
{
    (void)unused;
    for (int w = 0; w < WIDTHS; w++)
        for (int variant = 0; variant < 16; variant++) {
            int64_t bags = variant % 4 == 3 ? 0 : 1 + (int64_t)draw(60), cols = widths[w];
            bool wild = variant & 8;
            peri_k_bag_max_args a = {.bags =
                                         random_bags(bags, cols, dtypes[variant & 1], dtypes[variant >> 1 & 1], wild),
                                     .x = random_rows(cols, variant & 4),
                                     .reach = {.ahead = (int64_t)draw(3) << 12, .near = draw(2) == 0}};
            a.out = room(4 * bags * cols);
            a.places = room(4 * bags * cols);
            output found[] = {OUTPUT(a.out, 4 * bags * cols), OUTPUT(a.places, 4 * bags * cols)};
            compare("largest", PERI_K_bag_max, &a, bags, found, 2);
            if (!wild) check_max(&a, bags);
            peri_k_bag_max_grad_args g = {.bags = a.bags,
                                          .grad = random_floats(bags * cols),
                                          .places = a.places,
                                          .n = bags,
                                          .dx = random_floats(ROWS * cols)};
            double *want = room(8 * ROWS * cols);
            for (int64_t i = 0; i < ROWS * cols; i++) want[i] = (double)g.dx[i];
            for (int64_t i = 0; i < bags * cols && !wild; i++) {
                if (g.places[i] < 0) continue;
                int64_t at = int_of(a.bags.offsets, i / cols, a.bags.offsets_dtype) + g.places[i];
                want[id_of(&a.bags, at) * cols + i % cols] += (double)g.grad[i];
            }
            int64_t blocks = (cols + PERI_K_BAG_COLUMNS - 1) / PERI_K_BAG_COLUMNS;
            compare("gradient", PERI_K_bag_max_grad, &g, blocks, (output[]){OUTPUT(g.dx, 4 * ROWS * cols)}, 1);
            for (int64_t i = 0; i < ROWS * cols && !wild; i++) assert_true(fabs(want[i] - (double)g.dx[i]) <= 1e-2);
            if (wild && bags) { /* places that lead nowhere */
                for (int k = 0; k < 9; k++) a.places[draw((uint64_t)(bags * cols))] = (int32_t)draw(2000) - 1000;
                g.dx = random_floats(ROWS * cols);
                compare("gradient of nothing", PERI_K_bag_max_grad, &g, blocks,
                        (output[]){OUTPUT(g.dx, 4 * ROWS * cols)}, 1);
            }
            drop_all(NULL);
        }
}

static void padding(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 24; variant++) {
        int64_t bags = variant % 3 == 0 ? 0 : 1 + (int64_t)draw(300), pad = (int64_t)draw(ROWS);
        bool wild = variant & 8;
        peri_k_bags s = random_bags(bags, 1, dtypes[variant & 1], dtypes[variant >> 1 & 1], wild);
        int64_t size = size_of(s.ids_dtype);
        peri_k_bag_pad_args p = {.ids = s.ids, .padding = pad, .dtype = s.ids_dtype};
        p.out = room(size * s.n_ids);
        compare("padding", PERI_K_bag_pad, &p, s.n_ids, (output[]){OUTPUT(p.out, size * s.n_ids)}, 1);
        for (int64_t i = 0; i < s.n_ids; i++)
            assert_true(int_of(p.out, i, p.dtype) == (id_of(&s, i) == pad ? -1 : id_of(&s, i)));
        peri_k_bag_scale_args c = {.bags = s, .padding = pad};
        c.scale = room(4 * bags);
        compare("scale", PERI_K_bag_scale, &c, bags, (output[]){OUTPUT(c.scale, 4 * bags)}, 1);
        for (int64_t b = 0; b < bags && !wild; b++) {
            int64_t n = 0;
            for (int64_t i = int_of(s.offsets, b, s.offsets_dtype); i < int_of(s.offsets, b + 1, s.offsets_dtype); i++)
                n += int_of(p.out, i, p.dtype) != -1 || id_of(&s, i) == -1;
            assert_true(fabs((double)c.scale[b] * (double)(n ? n : 1) - 1) < 1e-6);
        }
        drop_all(NULL);
    }
}

static void norms(void **unused)
{
    (void)unused;
    static const double types[] = {1, 2, 3, 0.5, INFINITY};
    for (int w = 0; w < WIDTHS; w++)
        for (int variant = 0; variant < 10; variant++) {
            int64_t cols = widths[w], ids[] = {-1, 3, 4, 9, ROWS - 1, ROWS, 1000};
            float *x = random_floats(ROWS * cols);
            for (int64_t d = 0; d < cols; d++) x[4 * cols + d] = 0, x[9 * cols + d] *= 1e-6f;
            peri_k_bag_renorm_args a = {.ids = ints(ids, 7, dtypes[variant & 1]),
                                        .rows = ROWS,
                                        .cols = cols,
                                        .max_norm = 2.5,
                                        .norm_type = types[variant / 2],
                                        .dtype = dtypes[variant & 1]};
            float *before = room(4 * ROWS * cols);
            memcpy(before, x, (size_t)(4 * ROWS * cols));
            a.x = x;
            compare("norms", PERI_K_bag_renorm, &a, 7, (output[]){OUTPUT(a.x, 4 * ROWS * cols)}, 1);
            for (int64_t r = 0; r < ROWS; r++) {
                double sum = 0, p = types[variant / 2];
                for (int64_t d = 0; d < cols; d++) {
                    double size = fabs((double)before[r * cols + d]);
                    sum = isinf(p) ? fmax(sum, size) : sum + pow(size, p);
                }
                double norm = isinf(p) ? sum : pow(sum, 1 / p);
                bool asked = r == 3 || r == 4 || r == 9 || r == ROWS - 1;
                double factor = asked && norm > 2.5 ? 2.5 / (norm + 1e-7) : 1;
                for (int64_t d = 0; d < cols; d++) {
                    double want = (double)before[r * cols + d] * factor;
                    assert_true(fabs((double)a.x[r * cols + d] - want) <= 1e-6 * fabs(want));
                }
            }
            drop_all(NULL);
        }
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(largest, drop_all),
        cmocka_unit_test_teardown(padding, drop_all),
        cmocka_unit_test_teardown(norms, drop_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
