/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tbe_forward.c: lookups in tables of every row format, to outputs of every type, pooled and not: every
 * instruction set gives ref's bits on every case, however ranges are split; ref is held against double precision and
 * decoders of its own.
 * deadline: 300 s
 * takes: 20 s
 */
#include "tests/harness/check.h"
#include "isas.h"
#include "tests/kernels/tbe_cases.h"

static const int32_t formats[] = {PERI_F32, PERI_F16, PERI_BF16, PERI_ROWS_INT8, PERI_ROWS_INT8_HALF, PERI_ROWS_FP8,
                                  PERI_ROWS_INT4, PERI_ROWS_INT2};
static const char *const format_names[] = {"f32", "f16", "bf16", "int8", "int8_half", "fp8", "int4", "int2"};
static const int32_t outs[] = {PERI_F32, PERI_F16, PERI_BF16};
enum { FORMATS = 8, OUTS = 3, FIRST_SEED = 20261122 };

static int64_t unit_of(int32_t format)
{
    return format == PERI_F32 ? 4 : format == PERI_F16 || format == PERI_BF16 ? 2 : 1;
}
static int64_t bytes_of(int32_t format, int64_t cols)
{
    switch (format) {
    case PERI_ROWS_INT8: return cols + 8;
    case PERI_ROWS_INT8_HALF: return cols + 4;
    case PERI_ROWS_INT4: return 4 + cols / 2 + cols % 2;
    case PERI_ROWS_INT2: return 4 + cols / 4 + (cols % 4 != 0);
    default: return cols * unit_of(format);
    }
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static double decode_f16(uint16_t h)
{
    int exponent = (h >> 10) & 31, mantissa = h & 1023;
    double x = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                              : ldexp(mantissa, -24);
    return h & 0x8000 ? -x : x;
}

static double decode_bf16(uint16_t h)
{
    int exponent = (h >> 7) & 255, mantissa = h & 127;
    double x = exponent == 255 ? (mantissa ? NAN : INFINITY)
               : exponent      ? ldexp(128 + mantissa, exponent - 134)
                               : ldexp(mantissa, -133);
    return h & 0x8000 ? -x : x;
}

static double decode_fp8(uint8_t c)
{
    int exponent = (c >> 3) & 15, mantissa = c & 7;
    double x = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return c & 0x80 ? -x : x;
}

/** Column d of a row, by the words of kernels/tbe.h. */
static double decode(const uint8_t *row, int64_t cols, int64_t d, int32_t format)
{
    float f;
    uint16_t h[2];
    float pair[2];
    switch (format) {
    case PERI_F16: memcpy(h, row + 2 * d, 2); return decode_f16(h[0]);
    case PERI_BF16: memcpy(h, row + 2 * d, 2); return decode_bf16(h[0]);
    case PERI_ROWS_INT8: memcpy(pair, row + cols, 8); return (double)row[d] * pair[0] + pair[1];
    case PERI_ROWS_INT8_HALF: memcpy(h, row, 4); return row[4 + d] * decode_f16(h[0]) + decode_f16(h[1]);
    case PERI_ROWS_INT4:
        memcpy(h, row, 4);
        return row[4 + d / 2] / (d % 2 ? 16 : 1) % 16 * decode_f16(h[0]) + decode_f16(h[1]);
    case PERI_ROWS_INT2:
        memcpy(h, row, 4);
        return row[4 + d / 4] / (int[]){1, 4, 16, 64}[d % 4] % 4 * decode_f16(h[0]) + decode_f16(h[1]);
    case PERI_ROWS_FP8: return decode_fp8(row[d]);
    default: memcpy(&f, row + 4 * d, 4); return (double)f;
    }
}

/** Random bytes of a row that is no nonsense, or with @extreme sometimes is. */
static void draw_row(uint8_t *row, int64_t cols, int32_t format, bool extreme, uint64_t *seed)
{
    for (int64_t b = 0; b < bytes_of(format, cols); b++) row[b] = (uint8_t)(tbe_draw(seed) >> 40);
    for (int64_t d = 0; d < cols && !extreme; d++) {
        if (format == PERI_F32) memcpy(row + 4 * d, &(float){(float)(tbe_uniform(seed) * 2 - 1)}, 4);
        /* 2^-3 and about, either sign */
        if (format == PERI_F16) row[2 * d + 1] = (uint8_t)((row[2 * d + 1] & 0x83) | 0x30);
        if (format == PERI_BF16) row[2 * d + 1] = (uint8_t)((row[2 * d + 1] & 0x80) | 0x3e);
    }
    float pair[2] = {(float)(tbe_uniform(seed) / 100), (float)(tbe_uniform(seed) * 2 - 1)};
    uint16_t half[2] = {0x1c00 | (uint16_t)(tbe_draw(seed) & 0x3ff), 0x3800 | (uint16_t)(tbe_draw(seed) & 0x83ff)};
    if (format == PERI_ROWS_INT8 && !extreme) memcpy(row + cols, pair, 8);
    if ((format == PERI_ROWS_INT8_HALF || format == PERI_ROWS_INT4 || format == PERI_ROWS_INT2) && !extreme)
        memcpy(row, half, 4);
}

/** The weights of a case in @format, and its tables laid out for it: rows that lie anywhere if the case is
 *  unaligned. */
static uint8_t *draw_weights(tbe_data *d, int32_t format, uint64_t seed)
{
    int64_t unit = unit_of(format), at = 0;
    for (int64_t t = 0; t < d->n_tables; t++) {
        peri_k_tbe_table *x = &d->tables[t];
        x->stride = bytes_of(format, x->cols) / unit + (d->c->unaligned ? 3 : 0);
        x->offset = at;
        at += x->rows * x->stride + (d->c->unaligned ? 1 : 0);
    }
    uint8_t *weight = tbe_room(at * unit);
    memset(weight, 0, (size_t)(at * unit));
    for (int64_t t = 0; t < d->n_tables; t++)
        for (int64_t r = 0; r < d->tables[t].rows; r++)
            draw_row(weight + (d->tables[t].offset + r * d->tables[t].stride) * unit, d->tables[t].cols, format,
                     d->c->extreme, &seed);
    return weight;
}

/* -- a case -------------------------------------------------------------------------------------------------------- */

typedef struct lookup {
    tbe_data d;
    peri_k_tbe_span *spans;
    peri_k_tbe_list s;
    uint8_t *weight;
    int64_t out_elements;
    int32_t format, out_dtype;
} lookup;

static lookup lookup_new(const tbe_case *c, int32_t format, int32_t out_dtype, bool none, uint64_t seed)
{
    lookup l = {.d = tbe_data_new(c, seed), .format = format, .out_dtype = out_dtype};
    l.weight = draw_weights(&l.d, format, seed + 1);
    l.spans = tbe_room((int64_t)sizeof *l.spans * (l.d.n_blocks + 1));
    l.out_elements = l.d.out_elements;
    if (none) { /* each block has a part of the output, and there a row for each id */
        for (int64_t t = 0; t < l.d.n_tables; t++) l.d.tables[t].pooling = PERI_POOLING_NONE;
        for (int64_t k = 0; k < l.d.n_blocks; k++) {
            l.d.blocks[k].out_stride = l.d.max_cols;
            l.d.blocks[k].out_offset = k * l.d.n_ids * l.d.max_cols;
        }
        l.out_elements = l.d.n_blocks * l.d.n_ids * l.d.max_cols;
    }
    l.s = (peri_k_tbe_list){.ids = l.d.ids,
                              .offsets = l.d.offsets,
                              .weights = l.d.weights,
                              .scale = l.d.scale,
                              .tables = l.d.tables,
                              .blocks = l.d.blocks,
                              .spans = l.spans,
                              .n_ids = l.d.n_ids,
                              .n_bags = l.d.n_bags,
                              .n_tables = l.d.n_tables,
                              .n_blocks = l.d.n_blocks,
                              .capacity = l.d.items,
                              .all_bags = l.d.n_blocks * c->batch,
                              .most_bags = c->batch,
                              .width = l.d.max_cols,
                              .ids_dtype = c->i32 ? PERI_I32 : PERI_I64,
                              .offsets_dtype = c->i32 ? PERI_I32 : PERI_I64};
    peri_kernels_isa("ref")->fn[PERI_K_tbe_prepare](&(peri_k_tbe_prepare_args){.list = l.s}, 0, 1);
    return l;
}

static void lookup_free(lookup *l)
{
    free(l->spans);
    free(l->weight);
    tbe_data_free(&l->d);
}

/** How a launch splits its range: whole, in single chunks from the last on, in two uneven parts. */
enum { WHOLE, BACKWARDS, UNEVEN, SPLITS };

static uint8_t *run(const lookup *l, const peri_kernels *k, int split, peri_k_tbe_report *report)
{
    int64_t bytes = l->out_elements * (l->out_dtype == PERI_F32 ? 4 : 2), chunks = split == WHOLE       ? 1
                                                                                   : split == BACKWARDS ? 11
                                                                                                        : 40;
    uint8_t *out = tbe_room(bytes);
    memset(out, 0x5a, (size_t)bytes);
    *report = (peri_k_tbe_report){.first_item = INT64_MAX, .first_bag = INT64_MAX};
    peri_k_tbe_forward_args a = {.list = l->s,
                                 .weight = l->weight,
                                 .weight_dtype = l->format,
                                 .out = out,
                                 .out_dtype = l->out_dtype,
                                 .report = report,
                                 .chunks = chunks,
                                 .reach = tbe_next_reach()};
    peri_kernel_fn fn = k->fn[PERI_K_tbe_forward];
    if (split == BACKWARDS) {
        for (int64_t c = chunks; c > 0; c--) fn(&a, c - 1, c);
    } else if (split == UNEVEN) {
        fn(&a, 27, chunks);
        fn(&a, 0, 27);
    } else {
        fn(&a, 0, chunks);
    }
    return out;
}

static double out_at(const uint8_t *out, int64_t i, int32_t dtype)
{
    if (dtype == PERI_F32) return (double)((const float *)out)[i];
    return dtype == PERI_F16 ? decode_f16(((const uint16_t *)out)[i]) : decode_bf16(((const uint16_t *)out)[i]);
}

static bool same_bits(const uint8_t *a, const uint8_t *b, int64_t i, int32_t dtype)
{
    size_t size = dtype == PERI_F32 ? 4 : 2;
    if (memcmp(a + i * (int64_t)size, b + i * (int64_t)size, size) == 0) return true;
    double x = out_at(a, i, dtype), y = out_at(b, i, dtype); /* decoded only here: most elements are equal */
    return x != x && y != y;
}

/** f(lookup) for every case, format, output type and pooling. */
static void each_lookup(void (*f)(const lookup *l, const char *what))
{
    char what[160];
    for (int i = 0; i < TBE_CASES; i++)
        for (int format = 0; format < FORMATS; format++)
            for (int out = 0; out < OUTS; out++)
                for (int none = 0; none < 2; none++) {
                    const tbe_case *c = &tbe_cases[i];
                    if (c->bench || c->rows[0] > 100000) continue;
                    lookup l = lookup_new(c, formats[format], outs[out], none, FIRST_SEED + (uint64_t)i);
                    snprintf(what, sizeof what, "%s, %s to %s%s", c->name, format_names[format], format_names[out],
                             none ? ", no pooling" : "");
                    f(&l, what);
                    lookup_free(&l);
                }
}

/* -- tests --------------------------------------------------------------------------------------------------------- */

static void compare_isas(const lookup *l, const char *what)
{
    peri_k_tbe_report wanted, found;
    uint8_t *want = run(l, peri_kernels_isa("ref"), WHOLE, &wanted);
    static uint64_t number;
    number++;
    for (int n = 0; n < ISAS; n++)
        for (int split = 0; split < (n < ISAS_CPU ? SPLITS : BACKWARDS) && kernels_of(isas[n]) && has_case(n, number);
             split++) {
            uint8_t *got = run(l, kernels_of(isas[n]), split, &found);
            bool equal = memcmp(want, got, (size_t)(l->out_elements * (l->out_dtype == PERI_F32 ? 4 : 2))) == 0;
            for (int64_t i = 0; i < l->out_elements && !equal; i++)
                if (!same_bits(want, got, i, l->out_dtype))
                    fail_msg("%s, %s: element %lld is %.9g, wanted %.9g", what, isas[n], (long long)i,
                             out_at(got, i, l->out_dtype), out_at(want, i, l->out_dtype));
            assert_memory_equal(&wanted, &found, sizeof wanted);
            free(got);
        }
    free(want);
}

static void every_instruction_set_gives_refs_bits(void **state)
{
    (void)state;
    print_message("seeds from %d\n", FIRST_SEED);
    each_lookup(compare_isas);
}

static int64_t id_of(const tbe_data *d, int64_t i)
{
    return d->c->i32 ? ((int32_t *)d->ids)[i] : ((int64_t *)d->ids)[i];
}
static int64_t offset_of(const tbe_data *d, int64_t b)
{
    return d->c->i32 ? ((int32_t *)d->offsets)[b] : ((int64_t *)d->offsets)[b];
}

/** A bag in double precision against what ref made of it at element @at. */
static void check_bag(const lookup *l, const char *what, const peri_k_tbe_table *t, int64_t from, int64_t past,
                      double factor, const uint8_t *out, int64_t at)
{
    double unit = l->out_dtype == PERI_F32 ? 0x1p-22 : l->out_dtype == PERI_F16 ? 0x1p-11 : 0x1p-8;
    for (int64_t c = 0; c < t->cols; c++) {
        double sum = 0, size = 0;
        for (int64_t i = from; i < past; i++) {
            int64_t id = id_of(&l->d, i);
            if (id < 0 || id >= t->rows) continue;
            double x = decode(l->weight + (t->offset + id * t->stride) * unit_of(l->format), t->cols, c, l->format);
            x *= l->d.weights ? (double)l->d.weights[i] : 1;
            sum += x;
            size += fabs(x);
        }
        double got = out_at(out, at + c, l->out_dtype),
               slack = unit * (1e-4 + fabs(factor) * size) + (double)(past - from) * 1e-7 * size;
        if (l->out_dtype == PERI_F16 && fabs(sum * factor) > 65000) continue; /* overflows */
        if (!(fabs(got - sum * factor) <= slack))
            fail_msg("%s: element %lld is %.9g, wanted %.9g", what, (long long)(at + c), got, sum * factor);
    }
}

static void compare_double(const lookup *l, const char *what)
{
    if (l->d.c->extreme) return;
    peri_k_tbe_report report;
    uint8_t *out = run(l, peri_kernels_isa("ref"), WHOLE, &report);
    for (int64_t k = 0; k < l->d.n_blocks; k++)
        for (int64_t j = 0; j < l->d.blocks[k].bags; j++) {
            const peri_k_tbe_block *b = &l->d.blocks[k];
            const peri_k_tbe_table *t = &l->d.tables[b->table];
            int64_t bag = b->first_bag + j, from = offset_of(&l->d, bag), past = offset_of(&l->d, bag + 1);
            double factor = (t->pooling == PERI_POOLING_MEAN && past > from ? 1.0 / (double)(past - from) : 1);
            if (l->d.scale) factor *= (double)l->d.scale[bag];
            if (t->pooling != PERI_POOLING_NONE)
                check_bag(l, what, t, from, past, factor, out, b->out_offset + j * b->out_stride);
            for (int64_t i = from; i < past && t->pooling == PERI_POOLING_NONE; i++)
                check_bag(l, what, t, i, i + 1, factor, out, b->out_offset + i * b->out_stride);
        }
    free(out);
}

static void ref_agrees_with_double_precision(void **state)
{
    (void)state;
    each_lookup(compare_double);
}

/** All 256 codes of FP8, on every instruction set, one by one. */
static void every_fp8_code_is_its_number(void **state)
{
    (void)state;
    uint8_t weight[256];
    int64_t ids[256], offsets[257];
    float out[256];
    for (int i = 0; i < 256; i++) weight[i] = (uint8_t)i, ids[i] = i, offsets[i] = i;
    offsets[256] = 256;
    peri_k_tbe_table table = {.rows = 256, .cols = 1, .stride = 1};
    peri_k_tbe_block block = {.bags = 256, .out_stride = 1};
    peri_k_tbe_span spans[2];
    peri_k_tbe_list s = {.ids = ids,
                         .offsets = offsets,
                         .tables = &table,
                         .blocks = &block,
                         .spans = spans,
                         .n_ids = 256,
                         .n_bags = 256,
                         .n_tables = 1,
                         .n_blocks = 1,
                         .capacity = 256,
                         .ids_dtype = PERI_I64,
                         .offsets_dtype = PERI_I64};
    for (int n = 0; n < ISAS; n++) {
        const peri_kernels *k = kernels_of(isas[n]);
        if (!k) continue;
        k->fn[PERI_K_tbe_prepare](&(peri_k_tbe_prepare_args){.list = s}, 0, 1);
        peri_k_tbe_forward_args a = {
            .list = s, .weight = weight, .weight_dtype = PERI_ROWS_FP8, .out = out, .out_dtype = PERI_F32, .chunks = 1};
        k->fn[PERI_K_tbe_forward](&a, 0, 1);
        for (int i = 0; i < 256; i++) assert_true((double)out[i] == decode_fp8((uint8_t)i));
    }
}

/** Outputs of calls that run through the caches take another way to memory: whole lines where blocks allow it, and no
 *  other bytes. */
static void large_calls_give_refs_bits(void **state)
{
    (void)state;
    static const tbe_case c = {
        .name = "large", .tables = 5, .rows = {30}, .cols = {64, 128, 32, 48, 20}, .batch = 26000, .length = 1};
    enum { STRIDE = 64 + 128 + 32 + 48 + 32 };
    lookup l = lookup_new(&c, PERI_F32, PERI_F32, false, FIRST_SEED);
    const peri_k_tbe_reach reach = {.ahead = 16 << 10, .past = l.spans[l.d.n_blocks].cost * 4};
    for (int64_t k = 0; k < l.d.n_blocks; k++) l.d.blocks[k].out_stride = STRIDE;
    const int64_t bytes = c.batch * STRIDE * 4;
    uint8_t *out[ISAS] = {NULL};
    for (int n = 0; n < ISAS; n++) {
        const peri_kernels *k = kernels_of(isas[n]);
        if (!k) continue;
        out[n] = aligned_alloc(64, (size_t)bytes);
        assert_non_null(out[n]);
        memset(out[n], 0x5a, (size_t)bytes);
        peri_k_tbe_forward_args a = {.list = l.s,
                                     .weight = l.weight,
                                     .weight_dtype = PERI_F32,
                                     .out = out[n],
                                     .out_dtype = PERI_F32,
                                     .chunks = 64,
                                     .reach = reach};
        k->fn[PERI_K_tbe_forward](&a, 0, 17);
        k->fn[PERI_K_tbe_forward](&a, 17, 64);
        assert_true(memcmp(out[0], out[n], (size_t)bytes) == 0);
    }
    for (int n = 0; n < ISAS; n++) free(out[n]);
    lookup_free(&l);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_instruction_set_gives_refs_bits),
    cmocka_unit_test(ref_agrees_with_double_precision),
    cmocka_unit_test(every_fp8_code_is_its_number),
    cmocka_unit_test(large_calls_give_refs_bits),
};
check_main(tests)
