/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dense.c: the kernels of the dense part and of the optimizers: every instruction set against ref, at sizes around
 * the lanes, on unaligned arrays, with nothing written outside; equal bits however the range is split.
 * deadline: 120 s
 * takes: 12 s
 */
#include "tests/harness/check.h"
#include "isas.h"
#include "tests/kernels/dense_cases.h"
#include "tests/kernels/sequence_cases.h"
#include "tests/kernels/split.h"

static int64_t cases;

enum { GUARD = 64 }; /* bytes in front of each output, which must not change; behind it is a closed page
                        (tests/harness/fence.c) */

/** Where output i of a case begins in its memory. */
static char *output(const dense_case *c, int32_t i, char *memory)
{
    return dense_place(memory + GUARD, c->out[i].dtype);
}

static size_t output_bytes(const dense_case *c, int32_t i)
{
    return (size_t)(c->out[i].n * dense_size(c->out[i].dtype));
}

/** Run a case on one instruction set; @results[i] gets the memory of output i (to be freed). */
static void run_case(const dense_case *c, const peri_kernels *k, int split, char **results)
{
    _Alignas(16) char args[DENSE_ARGS];
    memcpy(args, c->args, sizeof args);
    for (int32_t i = 0; i < c->outs; i++) {
        const dense_out *o = &c->out[i];
        size_t bytes = GUARD + (dense_aligned ? 16 : (size_t)dense_size(o->dtype)) + output_bytes(c, i);
        results[i] = malloc(bytes);
        memset(results[i], 0xa5, bytes);
        char *data = output(c, i, results[i]);
        if (o->initial) memcpy(data, o->initial, output_bytes(c, i));
        memcpy(args + o->slot, &data, sizeof data);
    }
    run(k, c->kernel, args, c->range, split);
    for (int32_t i = 0; i < c->outs; i++)
        for (const char *p = results[i]; p < output(c, i, results[i]); p++)
            if (*(const unsigned char *)p != 0xa5)
                fail_msg("%s, %s: output %d: written in front of it", c->name, k->isa, i);
}

static double element_at(const dense_case *c, int32_t i, char *result, int64_t e)
{
    const char *data = output(c, i, result);
    uint16_t half;
    double x;
    float f;
    switch (c->out[i].dtype) {
    case PERI_F64: memcpy(&x, data + 8 * e, 8); return x;
    case PERI_F32: memcpy(&f, data + 4 * e, 4); return f;
    case PERI_F16: memcpy(&half, data + 2 * e, 2); return k_f16_to_f32(half);
    default: memcpy(&half, data + 2 * e, 2); return k_bf16_to_f32(half);
    }
}

static void compare(const dense_case *c, const char *isa, char *const *want, char *const *got)
{
    for (int32_t i = 0; i < c->outs; i++) {
        const double tolerance = c->tolerance + dense_unit(c->out[i].dtype);
        for (int64_t e = 0; e < c->out[i].n; e++) {
            double w = element_at(c, i, want[i], e), g = element_at(c, i, got[i], e), diff = fabs(w - g);
            if (!(w == g || (isnan(w) && isnan(g)) || diff <= tolerance * (1 + fabs(w))))
                fail_msg("%s, %s: output %d, element %lld is %.9g, wanted %.9g", c->name, isa, i, (long long)e, g, w);
        }
    }
}

static void check_case(dense_case *c, void *ctx)
{
    (void)ctx;
    char *want[DENSE_OUTS], *got[DENSE_OUTS], *again[DENSE_OUTS];
    cases++;
    run_case(c, peri_kernels_isa("ref"), WHOLE, want);
    for (int i = 0; i < ISAS; i++) {
        const peri_kernels *k = kernels_of(isas[i]);
        if (!k || !has_case(i, (uint64_t)cases)) continue;
        run_case(c, k, WHOLE, got);
        compare(c, isas[i], want, got);
        for (int split = 1; split < SPLITS; split++) {
            run_case(c, k, split, again);
            for (int32_t o = 0; o < c->outs; o++) {
                if (memcmp(output(c, o, got[o]), output(c, o, again[o]), output_bytes(c, o)) != 0)
                    fail_msg("%s, %s: output %d depends on how the range is split", c->name, isas[i], o);
                free(again[o]);
            }
        }
        for (int32_t o = 0; o < c->outs; o++) free(got[o]);
    }
    for (int32_t o = 0; o < c->outs; o++) free(want[o]);
}

static const int32_t dtypes[] = {PERI_F32, PERI_F64, PERI_F16, PERI_BF16}; /* the first two: of all kernels */
static const int64_t sizes[] = {0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 100};

/** The cases of f(size, dtype) on arrays one element behind a multiple of 16 bytes, and, of sizes of whole packs of
 *  f32, at multiples. */
#define DENSE_EVERYWHERE(dtype_count, call)                                            \
    for (int aligned_ = 0; aligned_ < 2; aligned_++)                                   \
        for (int d = 0; d < (dtype_count); d++)                                        \
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {                \
                if (aligned_ && (sizes[i] == 0 || sizes[i] % 4 != 0)) continue;        \
                dense_aligned = aligned_;                                              \
                call;                                                                  \
                dense_aligned = false;                                                 \
            }

static void elementwise_kernels(void **state)
{
    (void)state;
    DENSE_EVERYWHERE(4, dense_elementwise(sizes[i], dtypes[d], check_case, NULL));
}

static void broadcasts(void **state)
{
    (void)state;
    for (int64_t rows = 0; rows < 4; rows++)
        DENSE_EVERYWHERE(4, dense_binary(rows, sizes[i], dtypes[d], check_case, NULL));
}

static void formulas(void **state)
{
    (void)state;
    for (int64_t rows = 0; rows < 4; rows++) /* 3 x 100 elements: more than a block */
        DENSE_EVERYWHERE(2, dense_formula(rows, sizes[i], dtypes[d], check_case, NULL));
}

static void kernels_of_rows(void **state)
{
    (void)state;
    static const int64_t rows[] = {0, 1, 2, 5, PERI_SUM_ROWS, PERI_SUM_ROWS + 3, 3 * PERI_SUM_ROWS - 1};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        DENSE_EVERYWHERE(4, {
            const bool few = dense_aligned || d >= 2; /* what differs there is how packs are loaded, which two heights
                                                         show */
            if (!few || rows[r] == 2 || rows[r] == PERI_SUM_ROWS + 3)
                dense_rows(rows[r], sizes[i], dtypes[d], check_case, NULL);
        });
}

static void sums(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int64_t block = 4; block <= 128; block *= 32) {
                dense_sums(3, sizes[i], 1, block, dtypes[d], check_case, NULL);
                dense_sums(2, 7, sizes[i], block, dtypes[d], check_case, NULL);
                dense_sums(1, sizes[i], 5, block, dtypes[d], check_case, NULL);
            }
        dense_sums(2, 5, PERI_SUM_COLUMNS + 9, 2, dtypes[d], check_case, NULL);
        dense_sums(1, 10000, 1, 4096, dtypes[d], check_case, NULL);
    }
}

static void interactions(void **state)
{
    (void)state;
    static const int64_t dims[] = {1, 3, 8, 16, 17, 32, 64, 67, 100, 128};
    for (int d = 0; d < 2; d++)
        for (int64_t features = 0; features < 10; features++)
            for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
                dense_interaction(2, features, dims[i], dtypes[d], check_case, NULL);
    dense_interaction(3, 26, 64, PERI_F32, check_case, NULL);
    dense_interaction(0, 3, 8, PERI_F32, check_case, NULL);
}

static void optimizers(void **state)
{
    (void)state;
    for (int32_t options = 0; options < 16; options++) /* all sizes with some options, all options with some sizes */
        DENSE_EVERYWHERE(2, {
            if (options == 0 || ((int32_t)i + options) % 3 == 0)
                dense_optimizers(sizes[i], dtypes[d], options, check_case, NULL);
        });
    for (int maximize = 0; maximize < 2; maximize++)
        DENSE_EVERYWHERE(2, dense_rowwise(sizes[i], dtypes[d], maximize, check_case, NULL));
}

static void norms(void **state)
{
    (void)state;
    static const int64_t lengths[] = {0, 1, 13, PERI_NORM_BLOCK, PERI_NORM_BLOCK + 1, 3 * PERI_NORM_BLOCK - 5};
    for (int d = 0; d < 2; d++)
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
            for (int p = 1; p < 5; p++) dense_norms(lengths[i], dtypes[d], p == 4 ? INFINITY : p, check_case, NULL);
}

static double unit_of(float x) { return fabs((double)nextafterf(x, INFINITY) - (double)x); }

/** Every f32 of a coarse grid over all exponents: the vector functions agree with libm to a few units in the last
 *  place. */
static void functions_are_accurate_everywhere(void **state)
{
    (void)state;
    static const struct {
        int32_t op;
        double units; /* in the last place */
        double flushed; /* below: may be 0; of gelu, times x, what it multiplies by is subnormal */
    } functions[] = {{PERI_UNARY_EXP, 2, 0x1p-126},      {PERI_UNARY_LOG, 2, 0x1p-126},
                     {PERI_UNARY_SIGMOID, 3, 0x1p-126},  {PERI_UNARY_TANH, 3, 0x1p-126},
                     {PERI_UNARY_SOFTPLUS, 4, 0x1p-126}, {PERI_UNARY_LOGSIGMOID, 4, 0x1p-126},
                     {PERI_UNARY_GELU, 5, 0x1p-122},     {PERI_UNARY_LOG1P, 4, 0x1p-126},
                     {PERI_UNARY_EXPM1, 4, 0x1p-126},    {PERI_UNARY_RSQRT, 2, 0x1p-126},
                     {PERI_UNARY_SIN, 1, 0},             {PERI_UNARY_COS, 1, 0},
                     {PERI_UNARY_FLOOR, 0, 0},           {PERI_UNARY_CEIL, 0, 0},
                     {PERI_UNARY_ROUND, 0, 0},           {PERI_UNARY_TRUNC, 0, 0},
                     {PERI_UNARY_SIGN, 0, 0}};
    enum { N = 1 << 16 };
    float *x = malloc(N * sizeof *x), *want = malloc(N * sizeof *want), *got = malloc(N * sizeof *got);
    for (int i = 0; i < N; i++) {
        uint32_t bits = (uint32_t)i << 16 | 0x5a5a;
        memcpy(&x[i], &bits, 4);
    }
    for (int isa = 1; isa < ISAS; isa++) {
        const peri_kernels *k = kernels_of(isas[isa]);
        for (size_t f = 0; k && f < sizeof functions / sizeof *functions; f++) {
            peri_k_unary_args a = {.dst = want, .x = x, .dtype = PERI_F32, .op = functions[f].op};
            peri_kernels_isa("ref")->fn[PERI_K_unary](&a, 0, N);
            a.dst = got;
            k->fn[PERI_K_unary](&a, 0, N);
            for (int i = 0; i < N; i++) {
                if (isnan(want[i]) && isnan(got[i])) continue;
                double unit = unit_of(want[i]), flushed = functions[f].flushed;
                bool tiny = fabs((double)want[i]) < flushed && fabs((double)got[i]) <= 2 * flushed;
                if (want[i] != got[i] && !tiny && !(fabs((double)want[i] - got[i]) <= functions[f].units * unit))
                    fail_msg("function %d, %s: f(%.9g) = %.9g, wanted %.9g", functions[f].op, isas[isa], (double)x[i],
                             (double)got[i], (double)want[i]);
            }
        }
    }
    free(x);
    free(want);
    free(got);
}

/** The gradient of gelu, which two terms of different signs make up where x < 0: far from 0 it is as accurate as gelu;
 *  where they nearly cancel, to units of the terms. */
static void gelu_gradient_is_accurate(void **state)
{
    (void)state;
    enum { N = 28 * 256 };
    float *x = malloc(N * sizeof *x), *dy = malloc(N * sizeof *dy), *want = malloc(N * sizeof *want),
          *got = malloc(N * sizeof *got);
    for (int i = 0; i < N; i++) x[i] = -14 + (float)i / 256 + 0x1p-12f, dy[i] = 1;
    for (int isa = 1; isa < ISAS; isa++) {
        const peri_kernels *k = kernels_of(isas[isa]);
        peri_k_unary_grad_args a = {.dx = want, .dy = dy, .saved = x, .dtype = PERI_F32, .op = PERI_UNARY_GELU};
        peri_kernels_isa("ref")->fn[PERI_K_unary_grad](&a, 0, N);
        a.dx = got;
        if (k) k->fn[PERI_K_unary_grad](&a, 0, N);
        for (int i = 0; k && i < N; i++) {
            const double bound = x[i] < -2 ? 5 * unit_of(want[i]) + 0x1p-122 : 0x1p-22;
            if (!(fabs((double)want[i] - (double)got[i]) <= bound))
                fail_msg("%s: gelu'(%.9g) = %.9g, wanted %.9g", isas[isa], (double)x[i], (double)got[i],
                         (double)want[i]);
        }
    }
    free(x);
    free(dy);
    free(want);
    free(got);
}

/** Row-wise Adagrad and the kernels that only ref has are checked by hand. */
static void small_cases_by_hand(void **state)
{
    (void)state;
    const peri_kernels *k = peri_kernels_get();
    float w[] = {1, 2, 3, 4}, g[] = {1, 1, 2, 4}, sum[] = {3, 6};
    peri_k_optim_rowwise_adagrad_args r = {
        .list = {.n = 1, .part = {{.w = w, .g = g, .state = {sum}, .end = 2, .n = 4}}}, .dtype = PERI_F32, .lr = 1};
    k->fn[PERI_K_optim_rowwise_adagrad](&r, 0, 2);
    assert_true(sum[0] == 4 && sum[1] == 16 && w[0] == 0.5f && w[1] == 1.5f && w[2] == 2.5f && w[3] == 3);
    double partial[] = {9, 16}, total;
    peri_k_norm_finish_args n = {.out = &total, .partial = partial, .count = 2, .p = 2, .root = true};
    k->fn[PERI_K_norm_finish](&n, 0, 1);
    assert_true(total == 5);
    n.p = INFINITY;
    k->fn[PERI_K_norm_finish](&n, 0, 1);
    assert_true(total == 16);
    const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1};
    const uint64_t drawn[] = {9, 4, 2};
    float kept[8], again[8];
    peri_k_dropout_args d = {.y = kept, .x = ones, .dtype = PERI_F32, .threshold = 1u << 31, .seed = 9,
                             .random_stream = 4, .offset = 2, .scale = 2};
    k->fn[PERI_K_dropout](&d, 0, 8);
    d = (peri_k_dropout_args){
        .y = again, .x = ones, .dtype = PERI_F32, .threshold = 1u << 31, .scale = 2, .drawn = drawn};
    k->fn[PERI_K_dropout](&d, 0, 8);
    assert_memory_equal(kept, again, sizeof kept);
    float x[] = {1, 5, 5, 7, 2, NAN}, values[2], dx[6], dy[] = {10, 20};
    int64_t indices[2];
    peri_k_max_dim_args m = {.values = values, .indices = indices, .x = x, .dtype = PERI_F32, .n = 3, .inner = 2};
    k->fn[PERI_K_max_dim](&m, 0, 2);
    assert_true(values[0] == 5 && indices[0] == 1 && isnan(values[1]) && indices[1] == 2);
    peri_k_max_dim_grad_args mg = {.dx = dx, .dy = dy, .indices = indices, .dtype = PERI_F32, .n = 3, .inner = 2};
    k->fn[PERI_K_max_dim_grad](&mg, 0, 2);
    assert_true(dx[0] == 0 && dx[1] == 0 && dx[2] == 10 && dx[3] == 0 && dx[4] == 0 && dx[5] == 20);
    x[2] = 0; /* columns 1, 0, 2 and 5, 7, NaN */
    peri_k_product_dim_args p = {.y = values, .x = x, .dtype = PERI_F32, .n = 3, .inner = 2};
    k->fn[PERI_K_product_dim](&p, 0, 2);
    assert_true(values[0] == 0 && isnan(values[1]));
    peri_k_product_dim_grad_args pg = {.dx = dx, .dy = dy, .x = x, .dtype = PERI_F32, .n = 3, .inner = 2};
    k->fn[PERI_K_product_dim_grad](&pg, 0, 2);
    assert_true(dx[0] == 0 && dx[2] == 20 && dx[4] == 0 && isnan(dx[1]) && isnan(dx[3]) && dx[5] == 700);
}

static void attention(void **state)
{
    (void)state;
    static const int64_t few[] = {3, 0, 1, 7}, long_one[] = {0, 75}, lengths[] = {40, 1, 17};
    for (int d = 0; d < 2; d++) {
        sequence_cases(few, 4, 1, 1, dtypes[d], check_case, NULL);
        sequence_cases(few, 4, 19, 70, dtypes[d], check_case, NULL);
        sequence_cases(few, 0, 4, 4, dtypes[d], check_case, NULL);
    }
    sequence_cases(lengths, 3, 8, 16, PERI_F32, check_case, NULL);
    sequence_cases(long_one, 2, 70, 5, PERI_F32, check_case, NULL);
}

/** Whether query @i sees key @j, from the matrix of distances as HSTU's authors build it: `ids`, `max_ids`. */
static bool sees(const peri_k_attention_args *a, peri_k_sequence s, int64_t i, int64_t j)
{
    int64_t id[2] = {i, j}, max_id = s.n;
    if (a->contextual > 0) {
        for (int x = 0; x < 2; x++) id[x] = id[x] - a->contextual + 1 > 0 ? id[x] - a->contextual + 1 : 0;
        max_id += 1 - a->contextual;
    }
    max_id -= s.t;
    for (int x = 0; x < 2; x++) id[x] = id[x] < max_id ? id[x] : max_id;
    const int64_t d = a->causal || id[0] > id[1] ? id[0] - id[1] : id[1] - id[0];
    const bool near = d > 0 && (a->window == 0 || d <= a->window || (a->full > 0 && id[0] >= max_id - a->full));
    return i == j || near || (a->contextual > 0 && id[0] == 0 && id[1] < max_id);
}

/** The members of one sequence see each other as `sees` says, by the keys of each query and by the queries of each
 *  key. */
static void check_members(const peri_k_attention_args *a, peri_k_sequence s)
{
    bool keys[81] = {false}, queries[81] = {false};
    for (int64_t x = 0; x < s.n; x++) {
        peri_k_members k = peri_k_attention_keys(a, s, x), q = peri_k_attention_queries(a, s, x);
        for (int64_t c = 0; c < peri_k_member_count(k); c++) keys[x * 9 + peri_k_member(k, c)] = true;
        for (int64_t c = 0; c < peri_k_member_count(q); c++) queries[peri_k_member(q, c) * 9 + x] = true;
        assert_true(k.head <= k.from && q.head <= q.from && (q.tail == q.end || q.to <= q.tail));
    }
    for (int64_t i = 0; i < s.n; i++)
        for (int64_t j = 0; j < s.n; j++) {
            assert_int_equal(queries[i * 9 + j], keys[i * 9 + j]);
            if (s.n - s.t >= a->contextual) assert_int_equal(keys[i * 9 + j], sees(a, s, i, j));
        }
}

static void who_sees_whom(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 9; n++)
        for (int64_t t = 0; t <= n; t++)
            for (int64_t window = 0; window < 6; window++)
                for (int64_t contextual = 0; contextual < 5; contextual++)
                    for (int causal = 0; causal < 2; causal++)
                        for (int64_t full = 0; full < 6; full++)
                            check_members(&(peri_k_attention_args){.window = window, .contextual = contextual,
                                                                   .full = full, .causal = causal},
                                          (peri_k_sequence){0, n, t});
}

static int report(void **state)
{
    (void)state;
    print_message("%lld cases\n", (long long)cases);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(elementwise_kernels),
        cmocka_unit_test(broadcasts),
        cmocka_unit_test(formulas),
        cmocka_unit_test(kernels_of_rows),
        cmocka_unit_test(sums),
        cmocka_unit_test(interactions),
        cmocka_unit_test(optimizers),
        cmocka_unit_test(norms),
        cmocka_unit_test(functions_are_accurate_everywhere),
        cmocka_unit_test(gelu_gradient_is_accurate),
        cmocka_unit_test(small_cases_by_hand),
        cmocka_unit_test(attention),
        cmocka_unit_test(who_sees_whom),
    };
    return cmocka_run_group_tests(tests, NULL, report);
}
