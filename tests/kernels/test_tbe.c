/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tbe.c: the table-batched embedding kernels: every instruction set gives ref's bits on every case, however ranges
 * are split; ref itself is held against plain double-precision loops, and its gradients against the forward pass.
 * deadline: 300 s
 * takes: 25 s
 */
#include "tests/harness/check.h"
#include "isas.h"
#include "tests/kernels/split.h"
#include "tests/kernels/tbe_cases.h"
#include "tests/kernels/tbe_weights.h"

#include <sys/mman.h>


/** PERI_TEST_SEED repeats a run. */
static uint64_t seed_of_run(void)
{
    static uint64_t seed;
    const char *text = getenv("PERI_TEST_SEED");
    if (!seed) {
        seed = text && atoll(text) > 0 ? (uint64_t)atoll(text) : 20261121;
        print_message("seed %llu\n", (unsigned long long)seed);
    }
    return seed;
}

/** Equal bits; one NaN is as good as another. */
static bool same(const float *a, const float *b, int64_t n, int64_t *at)
{
    if (memcmp(a, b, (size_t)(4 * n)) == 0) return true;
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], 4) != 0 && !(a[i] != a[i] && b[i] != b[i])) {
            *at = i;
            return false;
        }
    return true;
}

static void assert_same(const char *c, const char *isa, const char *what, const float *want, const float *got,
                        int64_t n)
{
    int64_t at = 0;
    if (!same(want, got, n, &at))
        fail_msg("%s, %s, %s: element %lld is %.9g, wanted %.9g", c, isa, what, (long long)at, (double)got[at],
                 (double)want[at]);
}

/** Equal bits of f16 or bf16. */
static void assert_same_narrow(const char *c, const char *isa, const char *what, const uint16_t *want,
                               const uint16_t *got, int64_t n, int32_t dtype)
{
    if (memcmp(want, got, (size_t)(2 * n)) == 0) return;
    for (int64_t i = 0; i < n; i++) {
        float x = weight_at(want, i, dtype), y = weight_at(got, i, dtype);
        if (want[i] != got[i] && !(x != x && y != y))
            fail_msg("%s, %s, %s: element %lld is %.9g, wanted %.9g", c, isa, what, (long long)i, (double)y, (double)x);
    }
}

static float *zeros(int64_t n)
{
    float *x = tbe_room(4 * n);
    memset(x, 0, (size_t)(4 * n));
    return x;
}

/* -- one case on one instruction set ------------------------------------------------------------------------------- */

static peri_k_tbe_list list_of(const tbe_data *d, peri_k_tbe_span *spans)
{
    peri_k_tbe_list s = {.ids = d->ids,
                           .offsets = d->offsets,
                           .weights = d->weights,
                           .scale = d->scale,
                           .places = d->places,
                           .first_placed = d->c->batch,
                           .n_placed = d->c->placed ? d->n_bags - d->c->batch : 0,
                           .tables = d->tables,
                           .blocks = d->blocks,
                           .spans = spans,
                           .n_ids = d->n_ids,
                           .n_bags = d->n_bags,
                           .n_tables = d->n_tables,
                           .n_blocks = d->n_blocks,
                           .capacity = d->items,
                           .all_bags = d->n_blocks * d->c->batch,
                           .most_bags = (d->n_blocks + d->n_tables - 1) / d->n_tables * d->c->batch,
                           .width = d->max_cols,
                           .ids_dtype = d->c->i32 ? PERI_I32 : PERI_I64,
                           .offsets_dtype = d->c->i32 ? PERI_I32 : PERI_I64};
    peri_kernels_isa("ref")->fn[PERI_K_tbe_prepare](&(peri_k_tbe_prepare_args){.list = s}, 0, 1);
    return s;
}

/** Optimizers with their options: every optimizer, every option and every dtype at least once. */
typedef struct variant {
    const char *name;
    int32_t kind, dtype, decay;
    bool row_bias_correction, nearest, exact;
    float max_gradient, max_norm;
    peri_k_tbe_counter counter;
} variant;

static const variant variants[] = {
    {.name = "none", .kind = PERI_TBE_NONE, .dtype = PERI_F32}, /* first: its dense gradient serves the others */
    {.name = "sgd", .kind = PERI_TBE_SGD, .dtype = PERI_F32},
    {.name = "sgd, l2",
     .kind = PERI_TBE_SGD,
     .dtype = PERI_F32,
     .decay = PERI_DECAY_L2,
     .exact = true,
     .max_gradient = 0.4f},
    {.name = "sgd, bf16, decouple",
     .kind = PERI_TBE_SGD,
     .dtype = PERI_BF16,
     .decay = PERI_DECAY_DECOUPLE,
     .max_norm = 2},
    {.name = "sgd, f16", .kind = PERI_TBE_SGD, .dtype = PERI_F16},
    {.name = "sgd, f16, nearest", .kind = PERI_TBE_SGD, .dtype = PERI_F16, .nearest = true},
    {.name = "sgd, bf16, nearest", .kind = PERI_TBE_SGD, .dtype = PERI_BF16, .nearest = true},
    {.name = "adagrad", .kind = PERI_TBE_ADAGRAD, .dtype = PERI_F32, .max_gradient = 0.5f},
    {.name = "adagrad, l2", .kind = PERI_TBE_ADAGRAD, .dtype = PERI_BF16, .decay = PERI_DECAY_L2},
    {.name = "adagrad, decouple", .kind = PERI_TBE_ADAGRAD, .dtype = PERI_F32, .decay = PERI_DECAY_DECOUPLE},
    {.name = "rowwise_adagrad", .kind = PERI_TBE_ROWWISE_ADAGRAD, .dtype = PERI_F32, .max_norm = 2},
    {.name = "rowwise_adagrad, l2", .kind = PERI_TBE_ROWWISE_ADAGRAD, .dtype = PERI_F32, .decay = PERI_DECAY_L2},
    {.name = "rowwise_adagrad, f16, decouple",
     .kind = PERI_TBE_ROWWISE_ADAGRAD,
     .dtype = PERI_F16,
     .decay = PERI_DECAY_DECOUPLE,
     .exact = true},
    {.name = "adam", .kind = PERI_TBE_ADAM, .dtype = PERI_F32},
    {.name = "adam, row counts", .kind = PERI_TBE_ADAM, .dtype = PERI_BF16, .row_bias_correction = true},
    {.name = "partial_rowwise_adam",
     .kind = PERI_TBE_PARTIAL_ROWWISE_ADAM,
     .dtype = PERI_F32,
     .row_bias_correction = true},
    {.name = "lamb", .kind = PERI_TBE_LAMB, .dtype = PERI_F32},
    {.name = "lamb, bf16", .kind = PERI_TBE_LAMB, .dtype = PERI_BF16},
    {.name = "partial_rowwise_lamb", .kind = PERI_TBE_PARTIAL_ROWWISE_LAMB, .dtype = PERI_F32},
    {.name = "lars_sgd", .kind = PERI_TBE_LARS_SGD, .dtype = PERI_F32},
    {.name = "lion", .kind = PERI_TBE_LION, .dtype = PERI_F32},
    {.name = "lion, f16", .kind = PERI_TBE_LION, .dtype = PERI_F16},
    {.name = "rmsprop_ar", .kind = PERI_TBE_ROWWISE_RMSPROP_AR, .dtype = PERI_F32, .max_norm = 2, .exact = true},
    {.name = "rmsprop_ar, f16", .kind = PERI_TBE_ROWWISE_RMSPROP_AR, .dtype = PERI_F16, .max_gradient = 0.5f},
    {.name = "counter, l2, up",
     .kind = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER,
     .dtype = PERI_F32,
     .decay = PERI_DECAY_L2,
     .counter = {.halflife = 7,
                 .fading = 0.9057236642639067,
                 .rates = PERI_RATES_TAIL_ID_INCREASE,
                 .adjustment_ub = 0.7f,
                 .tail = 1}},
    {.name = "counter, decouple, down",
     .kind = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER,
     .dtype = PERI_BF16,
     .decay = PERI_DECAY_DECOUPLE,
     .counter = {.rates = PERI_RATES_TAIL_ID_DECREASE, .adjustment_ub = 1.3f, .tail = 0.5f, .tail_ratio = true}},
    {.name = "counter, adagradw",
     .kind = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER,
     .dtype = PERI_F32,
     .decay = PERI_COUNTER_ADAGRADW,
     .max_norm = 2,
     .counter = {.halflife = -1, .adjustment_iter = 17, .rates = PERI_RATES_EQUAL, .adjustment_ub = 1}},
    {.name = "counter, adagradw, -2",
     .kind = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER,
     .dtype = PERI_F16,
     .decay = PERI_COUNTER_ADAGRADW,
     .nearest = true,
     .counter = {.halflife = -2, .rates = PERI_RATES_COUNTER_SGD, .adjustment_ub = 0.2f}},
    {.name = "cowclip, l2",
     .kind = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER,
     .dtype = PERI_F32,
     .decay = PERI_DECAY_L2,
     .counter = {.halflife = -1, .rates = PERI_RATES_EQUAL, .clip = true, .weight_norm = 0.1f, .lower_bound = 0.05f}},
    {.name = "cowclip, decouple",
     .kind = PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER,
     .dtype = PERI_BF16,
     .decay = PERI_DECAY_DECOUPLE,
     .counter =
         {.halflife = 3, .fading = 0.7937005259840998, .rates = PERI_RATES_EQUAL, .clip = true, .weight_norm = 0.2f}},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

_Static_assert(VARIANTS <= 32, "sets of variants have 32 bits");

/** Sets of variants, a bit each: all; the gradient alone, without an optimizer; it, plain SGD and every sixth one from
 *  @first on. */
static const uint32_t all_variants = ~0u, gradient_alone = 1;
static uint32_t some_variants(int first) { return 3u | 0x41041041u << first % 6; }

/** What a whole pass over a case computes. */
typedef struct results {
    float *out, *grad_weights;
    float *narrow_out[2], *narrow_grad_weights[2]; /* with f16 and bf16 tables */
    uint64_t *sorted;
    peri_k_tbe_report report;
    void *weight[VARIANTS]; /* of variants[].dtype */
    float *momentum1[VARIANTS], *momentum2[VARIANTS], *counter[VARIANTS];
    int64_t *prev[VARIANTS];
    float *dense, *touched;
    int64_t updated[VARIANTS];
} results;

static void results_free(results *r)
{
    free(r->out);
    free(r->grad_weights);
    for (int i = 0; i < 2; i++) free(r->narrow_out[i]), free(r->narrow_grad_weights[i]);
    free(r->sorted);
    free(r->dense);
    free(r->touched);
    for (int o = 0; o < VARIANTS; o++) {
        free(r->weight[o]);
        free(r->momentum1[o]);
        free(r->momentum2[o]);
        free(r->counter[o]);
        free(r->prev[o]);
    }
}

static peri_k_tbe_optimizer optimizer_of(const variant *v)
{
    double b1 = 0.85, b2 = 0.97;
    return (peri_k_tbe_optimizer){.kind = v->kind,
                                  .lr = 0.05f,
                                  .eps = 1e-3f,
                                  .beta1 = (float)b1,
                                  .beta2 = (float)b2,
                                  .rest1 = (float)(1 - b1),
                                  .rest2 = (float)(1 - b2),
                                  .exact_beta1 = b1,
                                  .exact_beta2 = b2,
                                  .weight_decay = 0.02f,
                                  .correction1 = (float)(1 / (1 - pow(b1, 3))),
                                  .correction2 = (float)(1 / (1 - pow(b2, 3))),
                                  .eta = 0.3f,
                                  .momentum = 0.9f,
                                  .decay = v->decay,
                                  .row_bias_correction = v->row_bias_correction,
                                  .max_gradient = v->max_gradient,
                                  .max_norm = v->max_norm,
                                  .stochastic = !v->nearest,
                                  .exact = v->exact,
                                  .seed = 77,
                                  .iteration = 40,
                                  .ar_alpha = 0.3f,
                                  .min_shrinkage = 0.2f,
                                  .counter = v->counter};
}

static const uint64_t *sort(const tbe_data *d, const peri_kernels *k, const peri_k_tbe_list *s, int split,
                            uint64_t *room[2], peri_k_tbe_item *items, int64_t chunks, int32_t bits,
                            int32_t *payload_bits)
{
    int32_t key_bits = 1;
    while (d->total_rows >> key_bits) key_bits++;
    *payload_bits = 64 - key_bits;
    uint32_t *counts = tbe_room((int64_t)sizeof *counts * (chunks << bits));
    peri_k_tbe_keys_args keys = {.list = *s,
                                 .keys = room[0],
                                 .items = items,
                                 .counts = counts,
                                 .total_rows = d->total_rows,
                                 .chunks = chunks,
                                 .payload_bits = *payload_bits,
                                 .shift = *payload_bits,
                                 .bits = bits};
    run(k, PERI_K_tbe_keys, &keys, chunks, split);
    peri_k_radix_args pass = {.src = room[0],
                              .dst = room[1],
                              .counts = counts,
                              .n = &s->spans[s->n_blocks].items,
                              .chunks = chunks,
                              .shift = *payload_bits,
                              .bits = bits};
    for (int at = 0; at < key_bits; at += bits, pass.shift += bits) {
        if (at > 0) run(k, PERI_K_radix_histogram, &pass, chunks, split);
        run(k, PERI_K_radix_scan, &pass, 1, split);
        run(k, PERI_K_radix_scatter, &pass, chunks, split);
        uint64_t *from = pass.dst;
        pass.dst = (uint64_t *)(uintptr_t)pass.src;
        pass.src = from;
    }
    free(counts);
    return pass.src;
}

/** Sort and update by tbe_sort, with the blocks in the order of their tables, as SGD; the weights afterwards. */
static float *apart(const tbe_data *d, const peri_kernels *k, int split, int64_t chunks, const float *weight,
                    const float *grad)
{
    tbe_data e = *d;
    int64_t n = 0, updated = 0,
            stride = tbe_scratch_stride(d->max_cols);
    e.blocks = tbe_room((int64_t)sizeof *e.blocks * d->n_blocks);
    for (int32_t t = 0; t < d->n_tables; t++)
        for (int64_t b = 0; b < d->n_blocks; b++)
            if (d->blocks[b].table == t) e.blocks[n++] = d->blocks[b];
    peri_k_tbe_span *spans = tbe_room((int64_t)sizeof *spans * (d->n_blocks + 1));
    bool factors = d->weights || d->scale || d->c->mean;
    int32_t key_bits = 1;
    while (d->total_rows >> key_bits) key_bits++;
    peri_k_tbe_sort_args sort = {.list = list_of(&e, spans),
                                 .keys = tbe_room(8 * d->items),
                                 .room = tbe_room(8 * d->items),
                                 .items = factors ? tbe_room((int64_t)sizeof *sort.items * d->items) : NULL,
                                 .counts = tbe_room((chunks * 4) << PERI_K_TBE_SORT_BITS),
                                 .total_rows = d->total_rows,
                                 .chunks = chunks,
                                 .payload_bits = 64 - key_bits};
    run(k, PERI_K_tbe_sort, &sort, chunks, split);
    for (int64_t i = 1; i < spans[d->n_blocks].items; i++) { /* in order, but for invalid ids */
        uint64_t before = sort.keys[i - 1] >> sort.payload_bits, here = sort.keys[i] >> sort.payload_bits;
        assert_true(before <= here || before == (uint64_t)d->total_rows);
    }
    float *result = weights_of(weight, d->total_elements, PERI_F32), *scratch = tbe_room(4 * chunks * stride);
    peri_k_tbe_update_args args = {.rows = {.tables = d->tables,
                                            .n_tables = d->n_tables,
                                            .total_rows = d->total_rows,
                                            .weight = result,
                                            .weight_dtype = PERI_F32,
                                            .max_cols = d->max_cols},
                                   .optimizer = optimizer_of(&variants[1]),
                                   .sorted = sort.keys,
                                   .n = &spans[d->n_blocks].items,
                                   .items = sort.items,
                                   .grad = grad,
                                   .scratch = scratch,
                                   .scratch_stride = stride,
                                   .capacity = d->items,
                                   .chunks = chunks,
                                   .updated = &updated,
                                   .payload_bits = sort.payload_bits,
                                   .halvings = d->c->placed ? 2 : 0,
                                   .reach = tbe_next_reach()};
    run(k, PERI_K_tbe_update, &args, chunks, split);
    free(scratch);
    free(sort.keys);
    free(sort.room);
    free(sort.items);
    free(sort.counts);
    free(spans);
    free(e.blocks);
    return result;
}

/** @set: the variants that update tables; the others' results are NULL. */
static results compute(const tbe_data *d, const peri_kernels *k, int split, int64_t chunks, const float *weight,
                       const float *grad, uint32_t set)
{
    results r = {.report = {.first_item = INT64_MAX, .first_bag = INT64_MAX}};
    case_weights all = case_weights_new(weight, d->total_elements);
    peri_k_tbe_span *spans = tbe_room((int64_t)sizeof *spans * (d->n_blocks + 1));
    peri_k_tbe_list s = list_of(d, spans);
    bool factors = d->weights || d->scale || d->c->mean;
    r.out = zeros(d->out_elements);
    run(k, PERI_K_tbe_forward,
        &(peri_k_tbe_forward_args){.list = s,
                                   .weight = weight,
                                   .weight_dtype = PERI_F32,
                                   .out_dtype = PERI_F32,
                                   .out = r.out,
                                   .report = &r.report,
                                   .chunks = chunks,
                                   .reach = tbe_next_reach()},
        chunks, split);
    run(k, PERI_K_tbe_report, &(peri_k_tbe_report_args){.list = s, .report = &r.report}, 1, WHOLE);
    r.grad_weights = tbe_room(4 * d->n_ids);
    peri_k_tbe_weight_gradient_args gradient = {.list = s,
                                                .weight = weight,
                                                .weight_dtype = PERI_F32,
                                                .grad = grad,
                                                .grad_weights = r.grad_weights,
                                                .chunks = chunks,
                                                .reach = tbe_next_reach()};
    run(k, PERI_K_tbe_weight_gradient, &gradient, chunks, split);
    for (int i = 0; i < 2; i++) {
        int32_t dtype = i ? PERI_BF16 : PERI_F16;
        const void *narrow = all.of[place_of(dtype)];
        r.narrow_out[i] = zeros(d->out_elements);
        r.narrow_grad_weights[i] = tbe_room(4 * d->n_ids);
        peri_k_tbe_forward_args forward = {.list = s,
                                           .weight = narrow,
                                           .weight_dtype = dtype,
                                           .out = r.narrow_out[i],
                                           .out_dtype = PERI_F32,
                                           .chunks = chunks,
                                           .reach = tbe_next_reach()};
        run(k, PERI_K_tbe_forward, &forward, chunks, split);
        gradient.weight = narrow;
        gradient.weight_dtype = dtype;
        gradient.grad_weights = r.narrow_grad_weights[i];
        run(k, PERI_K_tbe_weight_gradient, &gradient, chunks, split);
    }
    uint64_t *room[2] = {tbe_room(8 * d->items), tbe_room(8 * d->items)};
    peri_k_tbe_item *items = factors ? tbe_room((int64_t)sizeof *items * d->items) : NULL;
    int32_t payload_bits;
    const uint64_t *sorted = sort(d, k, &s, split, room, items, chunks, split == UNEVEN ? 5 : 8, &payload_bits);
    r.sorted = tbe_room(8 * d->items);
    memcpy(r.sorted, sorted, (size_t)(8 * d->items));
    int64_t stride = tbe_scratch_stride(d->max_cols);
    float *scratch = tbe_room(4 * chunks * stride);
    r.dense = zeros(d->total_elements);
    r.touched = zeros(d->total_rows);
    float most[TBE_CASE_TABLES];
    for (int i = 0; i < TBE_CASE_TABLES; i++) most[i] = (float)(1 + i % 5);
    for (int o = 0; o < VARIANTS; o++) {
        const variant *v = &variants[o];
        if (!(set >> o & 1)) continue;
        r.weight[o] = copy_of(&all, v->dtype);
        r.momentum1[o] = zeros(d->total_elements > d->total_rows ? d->total_elements : d->total_rows);
        r.momentum2[o] = zeros(d->total_elements);
        r.counter[o] = tbe_room(4 * d->total_rows);
        r.prev[o] = tbe_room(8 * d->total_rows);
        for (int64_t row = 0; row < d->total_rows; row++) {
            r.counter[o][row] = (float)(row % 7);
            r.prev[o][row] = row % 45; /* 0: never; above the iteration: it was set back */
        }
        peri_k_tbe_rows rows = {.tables = d->tables,
                                .n_tables = d->n_tables,
                                .total_rows = d->total_rows,
                                .max_cols = d->max_cols,
                                .weight = r.weight[o],
                                .weight_dtype = v->dtype,
                                .momentum1 = r.momentum1[o],
                                .momentum2 = r.momentum2[o],
                                .row_counter = r.counter[o],
                                .prev_iter = r.prev[o],
                                .max_counter = most};
        peri_k_tbe_update_args args = {.rows = rows,
                                       .optimizer = optimizer_of(v),
                                       .sorted = r.sorted,
                                       .n = &spans[d->n_blocks].items,
                                       .items = items,
                                       .grad = grad,
                                       .dense = r.dense,
                                       .touched = r.touched,
                                       .scratch = scratch,
                                       .scratch_stride = stride,
                                       .capacity = d->items,
                                       .chunks = chunks,
                                       .updated = &r.updated[o],
                                       .payload_bits = payload_bits,
                                       .halvings = d->c->placed ? 2 : 0,
                                       .reach = tbe_next_reach()};
        run(k, PERI_K_tbe_update, &args, chunks, split);
        if (v->kind == PERI_TBE_NONE) continue;
        if (o == 1) {
            bool sane = r.report.bad_bags == 0; /* nonsense has an order of its own */
            float *again = apart(d, k, split, chunks, weight, grad);
            if (sane) assert_same(d->c->name, k->isa, "table by table", r.weight[o], again, d->total_elements);
            free(again);
        }
        peri_k_tbe_dense_update_args again = {.rows = rows,
                                              .optimizer = optimizer_of(v),
                                              .dense = r.dense,
                                              .touched = r.touched,
                                              .scratch = scratch,
                                              .scratch_stride = stride,
                                              .chunks = chunks};
        run(k, PERI_K_tbe_dense_update, &again, chunks, split);
    }
    case_weights_free(&all);
    free(scratch);
    free(items);
    free(room[0]);
    free(room[1]);
    free(spans);
    return r;
}

static void compare(const tbe_data *d, const char *isa, const results *want, const results *got)
{
    const char *c = d->c->name;
    char what[64];
    assert_same(c, isa, "forward", want->out, got->out, d->out_elements);
    assert_same(c, isa, "gradient of weights", want->grad_weights, got->grad_weights, d->n_ids);
    for (int i = 0; i < 2; i++) {
        assert_same(c, isa, i ? "forward of bf16" : "forward of f16", want->narrow_out[i], got->narrow_out[i],
                    d->out_elements);
        assert_same(c, isa, i ? "gradient of weights, bf16" : "gradient of weights, f16", want->narrow_grad_weights[i],
                    got->narrow_grad_weights[i], d->n_ids);
    }
    assert_same(c, isa, "dense gradient", want->dense, got->dense, d->total_elements);
    assert_same(c, isa, "touched rows", want->touched, got->touched, d->total_rows);
    assert_memory_equal(want->sorted, got->sorted, (size_t)(8 * d->items));
    assert_memory_equal(&want->report, &got->report, sizeof want->report);
    for (int o = 0; o < VARIANTS; o++) {
        if (!got->weight[o]) continue;
        assert_int_equal(want->updated[o], got->updated[o]);
        snprintf(what, sizeof what, "weights after %s", variants[o].name);
        if (variants[o].dtype == PERI_F32)
            assert_same(c, isa, what, want->weight[o], got->weight[o], d->total_elements);
        else assert_same_narrow(c, isa, what, want->weight[o], got->weight[o], d->total_elements, variants[o].dtype);
        snprintf(what, sizeof what, "momentum1 of %s", variants[o].name);
        assert_same(c, isa, what, want->momentum1[o], got->momentum1[o], d->total_elements);
        snprintf(what, sizeof what, "momentum2 of %s", variants[o].name);
        assert_same(c, isa, what, want->momentum2[o], got->momentum2[o], d->total_elements);
        snprintf(what, sizeof what, "row counters of %s", variants[o].name);
        assert_same(c, isa, what, want->counter[o], got->counter[o], d->total_rows);
        assert_memory_equal(want->prev[o], got->prev[o], (size_t)(8 * d->total_rows));
    }
}

static void every_instruction_set_gives_refs_bits(void **state)
{
    (void)state;
    for (int i = 0; i < TBE_CASES; i++) {
        const tbe_case *c = &tbe_cases[i];
        if (c->bench) continue;
        tbe_data d = tbe_data_new(c, seed_of_run() + (uint64_t)i);
        float *weight = tbe_numbers(d.total_elements, c->extreme, seed_of_run() + 100),
              *grad = tbe_numbers(d.out_elements, c->extreme, seed_of_run() + 200);
        const bool many_rows = d.total_rows > 100000;
        const uint32_t set = many_rows ? some_variants(i) : all_variants;
        results want = compute(&d, peri_kernels_isa("ref"), WHOLE, 1, weight, grad, set);
        for (int n = 0; n < ISAS; n++) {
            const peri_kernels *k = kernels_of(isas[n]);
            uint32_t on_it = set;
            for (int o = 2; o < VARIANTS; o++) on_it &= has_case(n, (uint64_t)(i * VARIANTS + o)) ? ~0u : ~(1u << o);
            if (!k) print_message("%s: not on this processor\n", isas[n]);
            if (!k || (n >= ISAS_CPU && many_rows)) continue; /* a pretended GPU takes long over so many rows */
            for (int split = n ? WHOLE : BACKWARDS; split < (n < ISAS_CPU ? SPLITS : BACKWARDS); split++) {
                results got = compute(&d, k, split,
                                      split == WHOLE       ? 1
                                      : split == BACKWARDS ? 13
                                                           : 64,
                                      weight, grad, on_it);
                compare(&d, isas[n], &want, &got);
                results_free(&got);
            }
        }
        results_free(&want);
        free(weight);
        free(grad);
        tbe_data_free(&d);
    }
}

/* -- ref against plain loops in double precision ------------------------------------------------------------------- */

static int64_t id_of(const tbe_data *d, int64_t i)
{
    return d->c->i32 ? ((int32_t *)d->ids)[i] : ((int64_t *)d->ids)[i];
}
static int64_t offset_of(const tbe_data *d, int64_t b)
{
    return d->c->i32 ? ((int32_t *)d->offsets)[b] : ((int64_t *)d->offsets)[b];
}

/** f(block, bag in block, place in ids, table, row, factor of the item without its weight) for every valid item. */
typedef void (*item_fn)(const tbe_data *d, void *ctx, const peri_k_tbe_block *b, int64_t j, int64_t i,
                        const peri_k_tbe_table *t, int64_t row, double factor);

static void each_item(const tbe_data *d, item_fn f, void *ctx)
{
    for (int64_t k = 0; k < d->n_blocks; k++)
        for (int64_t j = 0; j < d->blocks[k].bags; j++) {
            const peri_k_tbe_block *b = &d->blocks[k];
            const peri_k_tbe_table *t = &d->tables[b->table];
            int64_t bag = b->first_bag + j, from = offset_of(d, bag), past = offset_of(d, bag + 1);
            double factor =
                (t->pooling == PERI_POOLING_MEAN ? 1.0 / (double)(past - from) : 1) * (d->scale ? d->scale[bag] : 1);
            for (int64_t i = from; i < past; i++)
                if (id_of(d, i) >= 0 && id_of(d, i) < t->rows) f(d, ctx, b, j, i, t, id_of(d, i), factor);
        }
}

typedef struct sums {
    const float *weight, *grad;
    double *out, *dense, *grad_weights, *size; /* size: sums of magnitudes, for tolerances */
} sums;

static void add_item(const tbe_data *d, void *ctx, const peri_k_tbe_block *b, int64_t j, int64_t i,
                     const peri_k_tbe_table *t, int64_t row, double factor)
{
    sums *s = ctx;
    double w = d->weights ? d->weights[i] : 1, part = d->c->placed ? 0.25 : 1;
    const bool placed = d->places && b->first_bag >= d->c->batch;
    for (int64_t c = 0; c < t->cols; c++) {
        int64_t place = placed ? d->places[b->first_bag + j - d->c->batch] : j;
        int64_t out = b->out_offset + place * b->out_stride + c, at = t->offset + row * t->stride + c;
        s->out[out] += w * factor * s->weight[at];
        s->dense[at] += w * factor * s->grad[out] * part;
        s->size[at] += fabs(w * factor * s->grad[out] * part);
        s->grad_weights[i] += factor * s->grad[out] * s->weight[at];
    }
}

static double *double_zeros(int64_t n)
{
    double *x = tbe_room(8 * n);
    for (int64_t i = 0; i < n; i++) x[i] = 0;
    return x;
}

static void assert_close(const char *c, const char *what, const double *want, const float *got, int64_t n,
                         double tolerance)
{
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(want[i] - got[i]) <= tolerance * (1 + fabs(want[i]))))
            fail_msg("%s, %s: element %lld is %.9g, wanted %.9g", c, what, (long long)i, (double)got[i], want[i]);
}

static void ref_agrees_with_plain_loops(void **state)
{
    (void)state;
    for (int i = 0; i < TBE_CASES; i++) {
        const tbe_case *c = &tbe_cases[i];
        if (c->bench || c->extreme) continue;
        tbe_data d = tbe_data_new(c, seed_of_run() + (uint64_t)i);
        float *weight = tbe_numbers(d.total_elements, false, 5), *grad = tbe_numbers(d.out_elements, false, 6);
        results r = compute(&d, peri_kernels_isa("ref"), WHOLE, 1, weight, grad, gradient_alone);
        sums s = {.weight = weight,
                  .grad = grad,
                  .out = double_zeros(d.out_elements),
                  .dense = double_zeros(d.total_elements),
                  .grad_weights = double_zeros(d.n_ids),
                  .size = double_zeros(d.total_elements)};
        each_item(&d, add_item, &s);
        assert_close(c->name, "forward", s.out, r.out, d.out_elements, 1e-5 * sqrt((double)c->length + 1));
        assert_close(c->name, "gradient of weights", s.grad_weights, r.grad_weights, d.n_ids,
                     1e-5 * sqrt((double)d.max_cols));
        for (int64_t e = 0; e < d.total_elements; e++)
            if (!(fabs(s.dense[e] - r.dense[e]) <= 1e-6 + 4e-6 * s.size[e]))
                fail_msg("%s, dense gradient: element %lld is %.9g, wanted %.9g", c->name, (long long)e,
                         (double)r.dense[e], s.dense[e]);
        /* Both gradients against the forward pass, which is linear in the tables and in the weights: <grad, out> =
         * <dense, tables>. */
        double through_out = 0, through_tables = 0, magnitude = 1e-3;
        for (int64_t e = 0; e < d.out_elements; e++)
            through_out += (double)grad[e] * r.out[e], magnitude += fabs((double)grad[e] * r.out[e]);
        for (int64_t e = 0; e < d.total_elements; e++) through_tables += (double)r.dense[e] * weight[e];
        assert_true(fabs(through_out - through_tables * (c->placed ? 4 : 1)) <= 1e-5 * magnitude);
        free(s.out);
        free(s.dense);
        free(s.grad_weights);
        free(s.size);
        results_free(&r);
        free(weight);
        free(grad);
        tbe_data_free(&d);
    }
}

/* -- sorting, reports, bad offsets --------------------------------------------------------------------------------- */

static void the_sort_is_stable(void **state)
{
    (void)state;
    for (int i = 0; i < TBE_CASES; i++) {
        const tbe_case *c = &tbe_cases[i];
        if (c->bench || !c->weighted) continue; /* payloads are places in the stream */
        tbe_data d = tbe_data_new(c, seed_of_run() + (uint64_t)i);
        float *weight = zeros(d.total_elements), *grad = zeros(d.out_elements);
        results r = compute(&d, peri_kernels_get(), UNEVEN, 9, weight, grad, gradient_alone);
        for (int64_t p = 1; p < d.items; p++) assert_true(r.sorted[p - 1] < r.sorted[p]); /* by row, then by place */
        results_free(&r);
        free(weight);
        free(grad);
        tbe_data_free(&d);
    }
}

static void reports_name_the_first_offence(void **state)
{
    (void)state;
    int64_t ids[] = {0, 4, 5, -1, -2, 3, 7}, offsets[] = {0, 2, 3, 3, 7};
    peri_k_tbe_table tables[] = {{.rows = 5, .cols = 1, .stride = 1},
                                 {.rows = 4, .cols = 1, .stride = 1, .offset = 5, .first_row = 5}};
    peri_k_tbe_block blocks[] = {
        {.first_bag = 2, .bags = 2, .table = 1, .feature = 8, .out_stride = 1},
        {.first_bag = 0, .bags = 2, .table = 0, .feature = 9, .out_offset = 2, .out_stride = 1}};
    peri_k_tbe_span spans[3];
    for (size_t n = 0; n < ISAS; n++) {
        const peri_kernels *k = kernels_of(isas[n]);
        if (!k) continue;
        peri_k_tbe_list s = {.ids = ids,
                               .offsets = offsets,
                               .tables = tables,
                               .blocks = blocks,
                               .spans = spans,
                               .n_ids = 7,
                               .n_bags = 4,
                               .n_tables = 2,
                               .n_blocks = 2,
                               .capacity = 7,
                               .ids_dtype = PERI_I64,
                               .offsets_dtype = PERI_I64};
        k->fn[PERI_K_tbe_prepare](&(peri_k_tbe_prepare_args){.list = s}, 0, 1);
        int64_t counters[2] = {10, 20};
        peri_k_tbe_report r = {.first_item = INT64_MAX, .first_bag = INT64_MAX};
        run(k, PERI_K_tbe_check, &(peri_k_tbe_check_args){.list = s, .report = &r, .chunks = 5}, 5, BACKWARDS);
        run(k, PERI_K_tbe_report, &(peri_k_tbe_report_args){.list = s, .report = &r, .counters = counters}, 1, WHOLE);
        assert_int_equal(3, r.bad_ids); /* -2 and 7 in block 0, 5 in block 1 */
        assert_int_equal(0, r.bad_bags);
        assert_int_equal(1, r.first_item);
        assert_int_equal(0, r.block);
        assert_int_equal(1, r.table);
        assert_int_equal(8, r.feature);
        assert_int_equal(1, r.sample);
        assert_int_equal(1, r.place);
        assert_int_equal(-2, r.id);
        assert_int_equal(4, r.rows);
        assert_int_equal(13, counters[0]);
        assert_int_equal(20, counters[1]);
    }
}

/** Whatever offsets and ids hold, kernels stay inside their memory (the sanitizers watch) and bad bags are found. */
static void nonsense_is_survived_and_reported(void **state)
{
    (void)state;
    uint64_t seed = seed_of_run();
    races_matter(false);
    for (int round = 0; round < 300; round++) {
        const tbe_case c = {.name = "nonsense",
                            .tables = 3,
                            .rows = {7, 30, 1},
                            .cols = {4, 33, 16},
                            .batch = 9,
                            .length = 4,
                            .weighted = round % 2,
                            .mean = round % 3 == 0,
                            .bad_ids = true};
        tbe_data d = tbe_data_new(&c, seed + (uint64_t)round);
        int64_t *offsets = d.offsets, hits = 1 + (int64_t)(tbe_draw(&seed) % 4);
        bool bad = false;
        for (int64_t h = 0; h < hits; h++) {
            static const int64_t odd[] = {-1, INT64_MIN, INT64_MAX, 1000, 0, 3};
            offsets[tbe_draw(&seed) % (uint64_t)(d.n_bags + 1)] = odd[tbe_draw(&seed) % 6];
        }
        for (int64_t b = 0; b < d.n_bags; b++)
            bad = bad || offsets[b] < 0 || offsets[b + 1] < offsets[b] || offsets[b + 1] > d.n_ids;
        float *weight = tbe_numbers(d.total_elements, false, 1), *grad = tbe_numbers(d.out_elements, false, 2);
        for (size_t n = 0; n < ISAS; n++) {
            const peri_kernels *k = kernels_of(isas[n]);
            if (!k || (n >= ISAS_CPU && round % 25 != 0)) continue;
            results r = compute(&d, k, round % SPLITS, 1 + round % 20, weight, grad, some_variants(round / SPLITS));
            assert_int_equal(bad, r.report.bad_bags > 0);
            results_free(&r);
        }
        free(weight);
        free(grad);
        tbe_data_free(&d);
    }
    races_matter(true);
}

/** A row of NaN reaches the bags that ask for it and nothing else. */
static void nan_rows_stay_where_they_are(void **state)
{
    (void)state;
    const tbe_case c = {.name = "nan", .tables = 1, .rows = {50}, .cols = {40}, .batch = 60, .length = 3};
    tbe_data d = tbe_data_new(&c, seed_of_run());
    float *weight = tbe_numbers(d.total_elements, false, 1), *grad = tbe_numbers(d.out_elements, false, 2);
    for (int64_t e = 0; e < 40; e++) weight[7 * 40 + e] = NAN;
    results r = compute(&d, peri_kernels_get(), WHOLE, 4, weight, grad, all_variants);
    int64_t *ids = d.ids, *offsets = d.offsets, asked = 0;
    for (int64_t b = 0; b < d.n_bags; b++) {
        bool has = false;
        for (int64_t i = offsets[b]; i < offsets[b + 1]; i++) has = has || ids[i] == 7;
        for (int64_t e = 0; e < 40; e++) assert_int_equal(has, r.out[b * 40 + e] != r.out[b * 40 + e]);
        asked += has;
    }
    assert_true(asked > 0 && asked < d.n_bags);
    for (int o = 1; o < VARIANTS; o++)
        for (int64_t e = 0; e < d.total_elements; e++) {
            float x = weight_at(r.weight[o], e, variants[o].dtype);
            assert_int_equal(e / 40 == 7, x != x);
        }
    results_free(&r);
    free(weight);
    free(grad);
    tbe_data_free(&d);
}

/** A table of more than 2^31 elements, of whose memory only the rows asked for are ever there. */
static void tables_may_have_more_than_two_to_the_31_elements(void **state)
{
    (void)state;
    enum { COLS = 128, IDS = 5 };
    const int64_t rows = 20000000, bytes = rows * COLS * 4;
    float *weight =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (weight == MAP_FAILED) {
        print_message("no address space for %lld bytes\n", (long long)bytes);
        skip();
    }
    int64_t ids[IDS] = {rows - 1, 16777216, 3, rows - 1, 16777215}, offsets[] = {0, 2, IDS};
    peri_k_tbe_table table = {.rows = rows, .cols = COLS, .stride = COLS};
    peri_k_tbe_block block = {.bags = 2, .out_stride = COLS};
    tbe_case c = {.name = "large"};
    tbe_data d = {.c = &c,
                  .n_tables = 1,
                  .n_blocks = 1,
                  .n_bags = 2,
                  .n_ids = IDS,
                  .items = IDS,
                  .total_rows = rows,
                  .max_cols = COLS,
                  .tables = &table,
                  .blocks = &block,
                  .ids = ids,
                  .offsets = offsets};
    peri_k_tbe_span spans[2];
    float *grad = tbe_numbers(2 * COLS, false, 3), *out = zeros(2 * COLS);
    static float scratch[PERI_K_TBE_SCRATCH_ROWS * COLS + PERI_K_TBE_SCRATCH_MORE];
    static uint32_t counts[1 << PERI_K_TBE_SORT_BITS];
    for (size_t n = 0; n < ISAS; n++) {
        const peri_kernels *k = kernels_of(isas[n]);
        if (!k || (!strcmp(isas[n], "cuda_host") && !reaches_mappings)) continue;
        for (int i = 0; i < IDS; i++)
            for (int64_t e = 0; e < COLS; e++) weight[ids[i] * COLS + e] = (float)(ids[i] % 1000);
        uint64_t keys[IDS], room[IDS];
        int64_t updated = 0;
        peri_k_tbe_sort_args sort = {.list = list_of(&d, spans),
                                     .keys = keys,
                                     .room = room,
                                     .counts = counts,
                                     .total_rows = rows,
                                     .chunks = 1,
                                     .payload_bits = 32};
        run(k, PERI_K_tbe_forward,
            &(peri_k_tbe_forward_args){.list = sort.list, .weight = weight, .weight_dtype = PERI_F32, .out = out,
                                       .out_dtype = PERI_F32, .chunks = 1, .reach = tbe_next_reach()}, 1, WHOLE);
        run(k, PERI_K_tbe_sort, &sort, 1, WHOLE);
        peri_k_tbe_update_args args = {.rows = {.tables = &table, .n_tables = 1, .total_rows = rows, .weight = weight,
                                                .weight_dtype = PERI_F32, .max_cols = COLS},
                                       .optimizer = {.kind = PERI_TBE_SGD, .lr = 1},
                                       .sorted = keys,
                                       .n = &spans[1].items,
                                       .grad = grad,
                                       .capacity = IDS,
                                       .scratch = scratch,
                                       .scratch_stride = sizeof scratch / sizeof *scratch,
                                       .chunks = 1,
                                       .updated = &updated,
                                       .payload_bits = 32,
                                       .reach = tbe_next_reach()};
        run(k, PERI_K_tbe_update, &args, 1, WHOLE);
        assert_int_equal(4, updated);
        for (int64_t e = 0; e < COLS; e++) {
            assert_true(out[e] == (float)(999 + 216) && out[COLS + e] == (float)(3 + 999 + 215));
            assert_true(weight[(rows - 1) * COLS + e] == 999 - (grad[e] + grad[COLS + e]));
            assert_true(weight[16777216ll * COLS + e] == 216 - grad[e]);
            assert_true(weight[16777215ll * COLS + e] == 215 - grad[COLS + e]);
            assert_true(weight[3 * COLS + e] == 3 - grad[COLS + e]);
        }
    }
    munmap(weight, (size_t)bytes);
    free(grad);
    free(out);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_instruction_set_gives_refs_bits),
    cmocka_unit_test(ref_agrees_with_plain_loops),
    cmocka_unit_test(the_sort_is_stable),
    cmocka_unit_test(reports_name_the_first_offence),
    cmocka_unit_test(nonsense_is_survived_and_reported),
    cmocka_unit_test(nan_rows_stay_where_they_are),
    cmocka_unit_test(tables_may_have_more_than_two_to_the_31_elements),
};
check_main(tests)
