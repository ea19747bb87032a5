/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.c: any ids, offsets, weights, scales and block lists at table batches of every row format, optimizer, pooling and
 * bounds check, forward and backward. What comes out is held against a model in double precision; whatever went in is
 * there unchanged afterwards; rows that nobody asked for keep their bits; errors name the table, feature, sample and
 * id. Now and then the same tables lie in files too, and must give the same bits and the same messages. The bytes are
 * read as small choices; numbers are mostly small, now and then extreme.
 *
 * inputs: 40000
 */
#include <perilune/perilune.h>

#include "choices.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void fine(peri_status status, const char *what) { require(status == PERI_OK, what); }

/* -- choices ------------------------------------------------------------------------------------------------------- */

static int64_t extreme(void)
{
    static const int64_t values[] = {-1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_C(1) << 31, INT64_C(1) << 50,
                                     -7, 1000};
    return values[pick(9)];
}

static float number(bool wild)
{
    static const float values[] = {NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e-45f, -0.0f, 1e-38f};
    return wild && pick(6) == 5 ? values[pick(8)] : (float)(pick(33) - 16) / 8;
}

/** @x, unless a table of @dtype cannot hold it: then 1. */
static float held(float x, int32_t dtype)
{
    float most = dtype == PERI_F16 ? 65504 : dtype == PERI_BF16 ? 0x1.fep127f : INFINITY;
    if (dtype >= PERI_ROWS_INT8) return fabsf(x) <= 100 ? x : 1;
    return isfinite(x) && fabsf(x) > most ? 1 : x;
}

/* -- a case -------------------------------------------------------------------------------------------------------- */

enum { TABLES = 3, BLOCKS = 6, IDS = 80, BAGS = 40, ROWS = 24, COLS = 100, ROOM = 1 << 15 };

static peri_device *device;

typedef struct scene {
    peri_tbe_config config;
    peri_tbe_optimizer_config optimizer; /* the configuration's */
    peri_table_config table[TABLES];
    peri_tbe_block block[BLOCKS];
    int64_t n_blocks, n_ids, n_bags;
    int64_t id[IDS], offset[BAGS + 1];
    float weight[IDS], scale[BAGS], row[TABLES][ROWS * COLS];
    bool weighted, scaled, wild, hostile; /* wild: numbers that are none; hostile: blocks whose outputs may overlap */
    peri_tbe_input in;
    /* What is wrong, in the order of the blocks. */
    int64_t bad_ids, bad_bags, items;
    bool outside; /* offsets run backwards where no block looks: an answer is right, or an error */
    bool cut;     /* because of them blocks ask for more items than ids: more bags are bad */
    int64_t first[4]; /* table, feature, sample, id (or begin of the bag) of the first bad bag, or else id */
} scene;

static peri_tensor *tensor_of(const void *x, int32_t dtype, int64_t n)
{
    peri_tensor *whole = NULL, *t = NULL;
    int64_t lead = pick(3), all = n + lead; /* not always where the allocator begins */
    fine(peri_tensor_new(device, dtype, 1, &all, &whole), "a tensor");
    fine(peri_tensor_slice(whole, 0, lead, all, 1, &t), "a view");
    fine(peri_tensor_write(t, x, n * peri_dtype_size(dtype)), "a write");
    peri_tensor_release(whole);
    return t;
}

/** i64, or i32 where all of them fit and the choice falls so. */
static peri_tensor *integers(const int64_t *x, int64_t n)
{
    int32_t narrow[IDS + BAGS];
    bool fits = true;
    for (int64_t i = 0; i < n; i++) {
        fits = fits && x[i] >= INT32_MIN && x[i] <= INT32_MAX;
        narrow[i] = (int32_t)x[i];
    }
    return fits && pick(2) ? tensor_of(narrow, PERI_I32, n) : tensor_of(x, PERI_I64, n);
}

static bool trains_in_files(const peri_tbe_optimizer_config *o)
{
    if (o->kind == PERI_TBE_NONE || o->kind == PERI_TBE_SHAMPOO || o->kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD)
        return false;
    int32_t rates = o->counter.learning_rate_mode; /* those of the tail look at all rows */
    return o->kind != PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER || o->weight_decay_mode == PERI_DECAY_COWCLIP ||
           (rates != PERI_RATES_TAIL_ID_INCREASE && rates != PERI_RATES_TAIL_ID_DECREASE);
}

static void choose_tables(scene *s)
{
    static const char *const names[] = {"t0", "t1", "t2"}, *const features[] = {"f0", "f1", "f2", "f3"};
    static const int64_t cols[] = {1, 2, 3, 4, 8, 12, 15, 16, 17, 32, 33, 64, 99, 100};
    static const int32_t dtypes[] = {PERI_F32,      PERI_F32,       PERI_F16,
                                     PERI_BF16,     PERI_ROWS_INT8, PERI_ROWS_INT8_HALF,
                                     PERI_ROWS_FP8, PERI_ROWS_INT4, PERI_ROWS_INT2};
    peri_tbe_config *c = &s->config;
    *c = (peri_tbe_config){.size = sizeof(peri_tbe_config),
                           .device = device,
                           .dtype = dtypes[pick(9)],
                           .bounds_check = (int32_t)pick(4),
                           .n_tables = 1 + pick(TABLES),
                           .tables = s->table,
                           .n_features = 4,
                           .features = features,
                           .seed = 7};
    bool rows_of_bytes = c->dtype >= PERI_ROWS_INT8;
    s->optimizer = (peri_tbe_optimizer_config){.size = sizeof s->optimizer};
    c->optimizer = &s->optimizer;
    fine(peri_tbe_optimizer_default(rows_of_bytes ? PERI_TBE_NONE : (int32_t)pick(14), &s->optimizer), "an optimizer");
    if (s->optimizer.kind == PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER) {
        if (pick(4) == 3) s->optimizer.weight_decay_mode = PERI_DECAY_COWCLIP;
        s->optimizer.counter.halflife = pick(5) - 2;
        s->optimizer.counter.learning_rate_mode = (int32_t)pick(4);
        s->optimizer.counter.max_counter_update_freq = pick(3);
    }
    s->optimizer.exact = !rows_of_bytes && s->optimizer.kind != PERI_TBE_SHAMPOO && pick(4) == 3;
    for (int64_t t = 0; t < c->n_tables; t++) {
        s->table[t] = (peri_table_config){.size = sizeof(peri_table_config),
                                          .name = names[t],
                                          .rows = pick(ROWS + 1),
                                          .cols = cols[pick(14)],
                                          .pooling = (int32_t)pick(3),
                                          .init = PERI_INIT_NONE};
        if (s->optimizer.kind == PERI_TBE_SHAMPOO) s->table[t].cols = 1 + pick(8);
        if (s->optimizer.kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD) s->table[t].cols += s->table[t].cols % 2;
    }
}

static void choose_ids(scene *s)
{
    bool spoil_ids = pick(2), spoil_offsets = pick(4) == 3;
    s->n_ids = pick(IDS + 1), s->n_bags = pick(BAGS + 1);
    s->weighted = pick(2), s->scaled = pick(4) == 3;
    for (int64_t i = 0; i < s->n_ids; i++) {
        int64_t id = pick(s->table[0].rows + 1);
        if (s->table[0].rows && id == s->table[0].rows) id = 0; /* a hot row */
        s->id[i] = spoil_ids && pick(12) == 11 ? extreme() : id;
        s->weight[i] = number(s->wild);
    }
    s->offset[0] = pick(4) == 3 ? pick(s->n_ids + 1) : 0;
    for (int64_t b = 0; b < s->n_bags; b++) {
        int64_t rest = s->n_ids - s->offset[b];
        s->offset[b + 1] = b == s->n_bags - 1 && pick(4) ? s->n_ids : s->offset[b] + pick(rest < 8 ? rest + 1 : 8);
        s->scale[b] = number(s->wild);
    }
    if (spoil_offsets) s->offset[pick(s->n_bags + 1)] = pick(2) ? extreme() : pick(IDS);
    s->in.ids = integers(s->id, s->n_ids);
    s->in.offsets = integers(s->offset, s->n_bags + 1);
    if (s->weighted) s->in.weights = tensor_of(s->weight, PERI_F32, s->n_ids);
    if (s->scaled) s->in.scale = tensor_of(s->scale, PERI_F32, s->n_bags);
}

/** Blocks of any number of bags each, whose outputs lie one behind the other; then, perhaps, one of them is spoilt. */
static void choose_blocks(scene *s)
{
    int64_t at = 0, bag = 0;
    s->n_blocks = pick(BLOCKS + 1);
    for (int64_t k = 0; k < s->n_blocks; k++) {
        int32_t t = (int32_t)pick(s->config.n_tables);
        int64_t rest = s->n_bags - bag, n = pick(rest + 1), stride = s->table[t].cols + (pick(4) == 3 ? pick(9) : 0);
        if (pick(5) == 4) bag = pick(s->n_bags + 1), n = pick(s->n_bags - bag + 1); /* shared, or left out, or back */
        s->block[k] = (peri_tbe_block){.first_bag = bag, .bags = n, .out_offset = at, .out_stride = stride, .table = t,
                                       .feature = (int32_t)pick(5) - 1};
        at += stride * (s->table[t].pooling == PERI_POOLING_NONE ? s->n_ids : n) + (pick(8) == 7);
        bag += n;
    }
    if (s->n_blocks == 0 || pick(6) < 5) return;
    peri_tbe_block *b = &s->block[pick(s->n_blocks)];
    int64_t value = pick(3) ? extreme() : pick(60);
    s->hostile = true;
    switch (pick(6)) {
    case 0: b->first_bag = value; break;
    case 1: b->bags = value; break;
    case 2: b->out_offset = value; break;
    case 3: b->out_stride = value; break;
    case 4: b->table = (int32_t)value; break;
    default: b->feature = (int32_t)value; break;
    }
}

/* -- the model ----------------------------------------------------------------------------------------------------- */

static bool good_bag(const scene *s, int64_t b)
{
    return 0 <= s->offset[b] && s->offset[b] <= s->offset[b + 1] && s->offset[b + 1] <= s->n_ids;
}

static bool good_id(const scene *s, int64_t t, int64_t i) { return s->id[i] >= 0 && s->id[i] < s->table[t].rows; }

static void note(scene *s, int64_t k, int64_t j, int64_t number)
{
    const int64_t found[4] = {s->block[k].table, s->block[k].feature, j, number};
    memcpy(s->first, found, sizeof found);
}

static int64_t inside(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

static bool judge_cut(const scene *s)
{
    int64_t asked = 0, most = 0;
    for (int64_t b = 0; b < s->n_bags; b++) {
        int64_t sharing = 0;
        for (int64_t k = 0; k < s->n_blocks; k++)
            sharing += b >= s->block[k].first_bag && b - s->block[k].first_bag < s->block[k].bags;
        most = sharing > most ? sharing : most;
    }
    for (int64_t k = 0; k < s->n_blocks; k++) {
        int64_t first = inside(s->offset[s->block[k].first_bag], 0, s->n_ids);
        asked += inside(s->offset[s->block[k].first_bag + s->block[k].bags], first, s->n_ids) - first;
    }
    return asked > most * s->n_ids;
}

static void judge_input(scene *s)
{
    s->cut = judge_cut(s);
    for (int64_t b = 0; b < s->n_bags; b++) s->outside = s->outside || !good_bag(s, b);
    for (int64_t k = 0; k < s->n_blocks; k++)
        for (int64_t j = 0; j < s->block[k].bags; j++)
            if (!good_bag(s, s->block[k].first_bag + j) && s->bad_bags++ == 0)
                note(s, k, j, s->offset[s->block[k].first_bag + j]);
    s->outside = s->outside && !s->bad_bags;
    for (int64_t k = 0; k < s->n_blocks && !s->bad_bags; k++)
        for (int64_t j = 0; j < s->block[k].bags; j++)
            for (int64_t b = s->block[k].first_bag + j, i = s->offset[b]; i < s->offset[b + 1]; i++, s->items++)
                if (!good_id(s, s->block[k].table, i) && s->id[i] != -1 && s->bad_ids++ == 0) note(s, k, j, s->id[i]);
}

static double factor_of(const scene *s, int64_t k, int64_t b)
{
    int64_t n = s->offset[b + 1] - s->offset[b];
    double factor = s->scaled ? s->scale[b] : 1;
    return s->table[s->block[k].table].pooling == PERI_POOLING_MEAN && n ? factor / (double)n : factor;
}

/** One call for each item of a stream whose bags are good: id i of block k, with its factor and the place of its row in
 *  the output. */
typedef void visit(const scene *s, int64_t k, int64_t i, double factor, int64_t at, void *ctx);

static void for_items(const scene *s, visit *f, void *ctx)
{
    for (int64_t k = 0; k < s->n_blocks; k++)
        for (int64_t j = 0; j < s->block[k].bags; j++) {
            int64_t b = s->block[k].first_bag + j;
            bool none = s->table[s->block[k].table].pooling == PERI_POOLING_NONE;
            for (int64_t i = s->offset[b]; i < s->offset[b + 1]; i++)
                f(s, k, i, factor_of(s, k, b), s->block[k].out_offset + (none ? i : j) * s->block[k].out_stride, ctx);
        }
}

/** A value, and how much its terms weigh together: rounding is relative to that. */
typedef struct expected {
    double value, weight;
    bool written;
} expected;

static void add(expected *e, double x)
{
    e->value += x;
    e->weight += fabs(x);
}

static void add_output(const scene *s, int64_t k, int64_t i, double factor, int64_t at, void *ctx)
{
    expected *out = ctx;
    int64_t t = s->block[k].table;
    for (int64_t d = 0; d < s->table[t].cols; d++) {
        out[at + d].written = true;
        if (good_id(s, t, i))
            add(&out[at + d], s->row[t][s->id[i] * s->table[t].cols + d] * factor * (s->weighted ? s->weight[i] : 1));
    }
}

typedef struct gradients {
    const float *grad;
    expected row[TABLES][ROWS * COLS], weight[IDS];
    bool touched[TABLES][ROWS];
} gradients;

static void add_gradient(const scene *s, int64_t k, int64_t i, double factor, int64_t at, void *ctx)
{
    gradients *g = ctx;
    int64_t t = s->block[k].table, cols = s->table[t].cols;
    if (!good_id(s, t, i)) return;
    g->touched[t][s->id[i]] = true;
    for (int64_t d = 0; d < cols; d++) {
        add(&g->row[t][s->id[i] * cols + d], g->grad[at + d] * factor * (s->weighted ? s->weight[i] : 1));
        add(&g->weight[i], g->grad[at + d] * factor * s->row[t][s->id[i] * cols + d]);
    }
}

static bool near(float got, const expected *e, int32_t dtype)
{
    double unit = dtype == PERI_BF16 ? 1e-2 : dtype == PERI_F16 ? 2e-3 : 1e-5;
    return fabs(got - e->value) <= unit * e->weight + (dtype == PERI_F32 ? 0 : 1e-6);
}

/* -- what is held against it --------------------------------------------------------------------------------------- */

static void same_bytes(peri_tensor *t, const void *want, int64_t size, const char *what)
{
    static char got[4 * ROOM];
    if (!t) return;
    require(size <= (int64_t)sizeof got && peri_tensor_read(t, got, size) == PERI_OK, "a tensor that cannot be read");
    require(memcmp(got, want, (size_t)size) == 0, what);
}

/** Copies of the input's tensors. */
typedef struct copies {
    char bytes[4][8 * (IDS + BAGS)];
    int64_t size[4];
} copies;

static void copy_input(const scene *s, copies *c, bool compare)
{
    peri_tensor *t[4] = {s->in.ids, s->in.offsets, s->in.weights, s->in.scale};
    for (int i = 0; i < 4; i++) {
        peri_tensor_info d = {.size = sizeof d};
        if (!t[i]) continue;
        peri_tensor_describe(t[i], &d);
        if (compare) same_bytes(t[i], c->bytes[i], c->size[i], "an input that was rewritten");
        c->size[i] = d.numel * peri_dtype_size(d.dtype);
        fine(peri_tensor_read(t[i], c->bytes[i], c->size[i]), "a read");
    }
}

/** The status of a lookup, and what its message says. */
static void judge_status(const scene *s, peri_status status)
{
    int32_t mode = s->config.bounds_check;
    if (s->outside && mode <= PERI_BOUNDS_WARNING && status == PERI_ERANGE) return;
    bool fails = (s->bad_bags && mode <= PERI_BOUNDS_WARNING) || (s->bad_ids && mode == PERI_BOUNDS_FATAL);
    require(status == (fails ? PERI_ERANGE : PERI_OK), "the status of a lookup");
    if (!fails || s->cut) return;
    char text[96];
    const char *message = peri_error_message();
    if (s->first[1] >= 0)
        snprintf(text, sizeof text, "table 't%d', feature 'f%d', sample %lld: ", (int)s->first[0], (int)s->first[1],
                 (long long)s->first[2]);
    else
        snprintf(text, sizeof text, "table 't%d', sample %lld: ", (int)s->first[0], (long long)s->first[2]);
    require(strstr(message, text) != NULL, "a message without the place");
    snprintf(text, sizeof text, s->bad_bags ? "offsets %lld and " : "id %lld at place ", (long long)s->first[3]);
    require(strstr(message, text) != NULL, "a message without the number");
    snprintf(text, sizeof text, s->bad_bags ? "(%lld such bags)" : "(%lld such ids)",
             (long long)(s->bad_bags ? s->bad_bags : s->bad_ids));
    require(strstr(message, text) != NULL, "a message without the count");
}

static void judge_output(const scene *s, peri_tensor *out, const expected *want, int64_t n)
{
    peri_tensor *wide = NULL;
    peri_tensor_info d = {.size = sizeof d};
    static float got[ROOM];
    peri_tensor_describe(out, &d);
    fine(peri_tensor_to(out, PERI_F32, NULL, &wide), "a cast");
    fine(peri_tensor_read(wide, got, 4 * n), "a read");
    peri_tensor_release(wide);
    for (int64_t i = 0; i < n; i++) {
        if (!want[i].written) require(got[i] == 77, "an element outside all blocks was written");
        else if (!s->wild) require(near(got[i], &want[i], d.dtype), "an output that is not the sum of its rows");
    }
}

static void judge_rows(const scene *s, peri_tbe *tbe, const gradients *g, const char *what)
{
    static float now[ROWS * COLS];
    bool known = !s->wild && !s->bad_bags && !s->hostile && !s->outside;
    bool sgd = g && known && s->optimizer.kind == PERI_TBE_SGD && s->config.dtype == PERI_F32;
    for (int64_t t = 0; t < s->config.n_tables; t++) {
        int64_t shape[2] = {s->table[t].rows, s->table[t].cols};
        peri_tensor *rows = NULL;
        fine(peri_tensor_new(device, PERI_F32, 2, shape, &rows), "a tensor");
        fine(peri_tbe_read(tbe, t, "weight", 0, rows), "rows");
        fine(peri_tensor_read(rows, now, 4 * shape[0] * shape[1]), "a read");
        peri_tensor_release(rows);
        for (int64_t r = 0; r < shape[0]; r++) {
            const float *before = &s->row[t][r * shape[1]], *after = &now[r * shape[1]];
            if (!g || !g->touched[t][r]) require(memcmp(before, after, 4 * (size_t)shape[1]) == 0, what);
            for (int64_t d = 0; sgd && g->touched[t][r] && d < shape[1]; d++) {
                const expected *e = &g->row[t][r * shape[1] + d];
                double want = before[d] - s->optimizer.learning_rate * e->value;
                require(fabs(after[d] - want) <= 1e-6 * fabs(want) + 1e-6 * e->weight,
                        "a row that SGD did not update by its gradient");
            }
        }
    }
}

/** Write rows and read them back as they are stored. */
static void fill_tables(scene *s, peri_tbe *tbe)
{
    for (int64_t t = 0; t < s->config.n_tables; t++) {
        int64_t shape[2] = {s->table[t].rows, s->table[t].cols};
        peri_tensor *rows = NULL;
        int64_t phase = pick(64);
        for (int64_t i = 0; i < shape[0] * shape[1]; i++)
            s->row[t][i] = s->wild && i % 11 == phase % 11 ? held(number(true), s->config.dtype)
                                                           : (float)((i * 37 + phase) % 61 - 30) / 16;
        fine(peri_tensor_new(device, PERI_F32, 2, shape, &rows), "a tensor");
        fine(peri_tensor_write(rows, s->row[t], 4 * shape[0] * shape[1]), "a write");
        fine(peri_tbe_write(tbe, t, "weight", 0, rows), "rows");
        fine(peri_tbe_read(tbe, t, "weight", 0, rows), "rows");
        fine(peri_tensor_read(rows, s->row[t], 4 * shape[0] * shape[1]), "a read");
        peri_tensor_release(rows);
    }
}

/* -- forward and backward ------------------------------------------------------------------------------------------ */

/** Elements of an output: the model's of good blocks; what a spoilt block would write, if it is nothing huge; -1. */
static int64_t extent_of(const scene *s)
{
    int64_t extent = 0;
    for (int64_t k = 0; k < s->n_blocks; k++) {
        const peri_tbe_block *b = &s->block[k];
        bool none = s->table[b->table].pooling == PERI_POOLING_NONE;
        int64_t rows = b->bags == 0 ? 0 : none ? s->n_ids : b->bags, end;
        if (rows == 0) continue;
        if (__builtin_mul_overflow(rows - 1, b->out_stride, &end)) return -1;
        if (__builtin_add_overflow(end, b->out_offset + s->table[b->table].cols, &end) || end > ROOM) return -1;
        extent = end > extent ? end : extent;
    }
    return extent;
}

static peri_status look_up(const scene *s, peri_tbe *tbe, int64_t n, int32_t dtype, peri_tensor **out)
{
    fine(peri_tensor_full(device, dtype, 1, &n, 77, out), "an output");
    bool grad = peri_grad_enabled();
    peri_grad_enabled_set(true); /* tables in files keep the rows for the backward pass */
    peri_status status = peri_tbe_forward(tbe, &s->in, *out);
    peri_grad_enabled_set(grad);
    return status;
}

static void judge_forward(const scene *s, peri_tbe *tbe, int64_t extent)
{
    static const int32_t dtypes[] = {PERI_F32, PERI_F16, PERI_BF16};
    static expected want[ROOM];
    int32_t dtype = dtypes[pick(3)];
    peri_tensor *out = NULL;
    if (extent > 0 && pick(8) == 7) {
        require(look_up(s, tbe, extent - 1, dtype, &out) == PERI_EINVAL, "an output that is too small");
        peri_tensor_release(out);
    }
    peri_tbe_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    fine(peri_tbe_statistics(tbe, &before), "statistics");
    peri_status status = look_up(s, tbe, extent, dtype, &out);
    if (!s->hostile) {
        judge_status(s, status);
        fine(peri_tbe_statistics(tbe, &after), "statistics");
        bool counted = s->config.bounds_check != PERI_BOUNDS_NONE;
        bool known = !s->bad_bags && !s->outside;
        if (!s->outside && !s->cut)
            require(after.bad_bags - before.bad_bags == (counted ? s->bad_bags : 0), "the count of bad bags");
        if (known) require(after.bad_ids - before.bad_ids == (counted ? s->bad_ids : 0), "the count of bad ids");
        if (known) require(after.ids - before.ids == s->items, "the count of ids");
    }
    if (!s->hostile && !s->bad_bags && status == PERI_OK &&
        (!s->outside || s->config.bounds_check <= PERI_BOUNDS_WARNING)) {
        memset(want, 0, sizeof *want * (size_t)extent);
        for (int64_t k = 0; k < s->n_blocks; k++)
            for (int64_t j = 0; j < s->block[k].bags; j++)
                for (int64_t d = 0, t = s->block[k].table;
                     s->table[t].pooling != PERI_POOLING_NONE && d < s->table[t].cols; d++)
                    want[s->block[k].out_offset + j * s->block[k].out_stride + d].written = true;
        for_items(s, add_output, want);
        judge_output(s, out, want, extent);
    }
    peri_tensor_release(out);
}

static void judge_sparse(const scene *s, const peri_tbe_sparse *sparse, const gradients *g)
{
    int64_t first[TABLES + 1], most = 0, n = 0;
    static int64_t rows[TABLES * ROWS + IDS * BLOCKS];
    static float values[(TABLES * ROWS + IDS * BLOCKS) * COLS];
    peri_tensor_info d = {.size = sizeof d}, v = {.size = sizeof v};
    peri_tensor_describe(sparse->rows, &d);
    peri_tensor_describe(sparse->values, &v);
    fine(peri_tensor_read(sparse->first, first, 8 * (s->config.n_tables + 1)), "a read");
    fine(peri_tensor_read(sparse->rows, rows, 8 * d.numel), "a read");
    fine(peri_tensor_read(sparse->values, values, 4 * v.numel), "a read");
    most = v.shape[1];
    for (int64_t t = 0; t < s->config.n_tables; t++) {
        require(first[t] == n, "where a table's rows begin");
        for (int64_t r = 0; r < s->table[t].rows; r++) {
            if (!g->touched[t][r]) continue;
            require(n < first[t + 1] && rows[n] == r, "a row that is not among the gradient's");
            for (int64_t x = 0; !s->wild && x < s->table[t].cols; x++)
                require(near(values[n * most + x], &g->row[t][r * s->table[t].cols + x], PERI_F32),
                        "a gradient that is not the sum");
            n++;
        }
    }
    require(first[s->config.n_tables] == n, "rows of a gradient that nobody looked up");
}

/** The gradient of an output, and what the model makes of it; @g->touched of bad streams: rows that some id names. */
static peri_tensor *gradient_of(const scene *s, int64_t extent, gradients *g)
{
    static float grad[ROOM];
    for (int64_t i = 0; i < extent; i++) grad[i] = (float)((i * 29 + 5) % 31 - 15) / 8;
    if (s->wild && extent) grad[pick(extent)] = number(true);
    memset(g, 0, sizeof *g);
    g->grad = grad;
    if (!s->bad_bags && !s->hostile && !s->outside) {
        for_items(s, add_gradient, g);
    } else {
        for (int64_t t = 0; t < s->config.n_tables; t++)
            for (int64_t i = 0; i < s->n_ids; i++)
                if (good_id(s, t, i)) g->touched[t][s->id[i]] = true;
    }
    return tensor_of(grad, PERI_F32, extent);
}

static void judge_backward(scene *s, peri_tbe *tbe, int64_t extent)
{
    static gradients g;
    float got[IDS];
    peri_tensor *grad = gradient_of(s, extent, &g), *weights = NULL;
    peri_tbe_sparse sparse = {0};
    bool bytes_of_rows = s->config.dtype >= PERI_ROWS_INT8, good = !s->bad_bags && !s->hostile && !s->outside,
         keep = false;
    if (pick(2)) weights = tensor_of(got, PERI_F32, (memset(got, 0, sizeof got), s->n_ids));
    peri_status status = peri_tbe_gradient_sparse(tbe, &s->in, grad, NULL, &sparse);
    require(status == (bytes_of_rows ? PERI_EUNSUPPORTED : PERI_OK), "the status of a sparse gradient");
    if (status == PERI_OK && good) judge_sparse(s, &sparse, &g);
    judge_rows(s, tbe, NULL, "a row that changed before the update");
    if (s->optimizer.kind != PERI_TBE_NONE && pick(4) == 3) {
        keep = true;
        fine(peri_tbe_accumulate_set(tbe, true), "accumulation");
    }
    int64_t iteration = peri_tbe_iteration(tbe);
    status = peri_tbe_backward(tbe, &s->in, grad, weights);
    require(status == (bytes_of_rows ? PERI_EUNSUPPORTED : PERI_OK), "the status of an update");
    if (keep) {
        judge_rows(s, tbe, NULL, "a row that changed while updates are kept");
        fine(peri_tbe_accumulated_apply(tbe), "an update of what was kept");
    }
    require(peri_tbe_iteration(tbe) - iteration == (s->optimizer.kind != PERI_TBE_NONE), "the iteration");
    judge_rows(s, tbe, &g, "a row that nobody looked up has changed");
    if (weights && status == PERI_OK && good && !s->wild) {
        fine(peri_tensor_read(weights, got, 4 * s->n_ids), "a read");
        for (int64_t i = 0; i < s->n_ids; i++)
            require(near(got[i], &g.weight[i], PERI_F32), "the gradient of a weight");
    }
    same_bytes(grad, g.grad, 4 * extent, "a gradient that was rewritten");
    peri_tensor_release(sparse.rows);
    peri_tensor_release(sparse.values);
    peri_tensor_release(sparse.first);
    peri_tensor_release(weights);
    peri_tensor_release(grad);
}

/* -- tables in files ----------------------------------------------------------------------------------------------- */

/** Two steps on tables in files and two on the same in memory: the same answers. */
static void judge_files(scene *s, int64_t extent)
{
    static gradients g;
    peri_cache_config cache[TABLES];
    peri_tbe *tbe[2] = {NULL, NULL};
    peri_tensor *grad = gradient_of(s, extent, &g);
    for (int64_t t = 0; t < s->config.n_tables; t++) {
        cache[t] = (peri_cache_config){.size = sizeof(peri_cache_config),
                                       .load_factor = pick(2) ? 1 : 0.5,
                                       .algorithm = (int32_t)pick(2),
                                       .ways = (int32_t)pick(6) - 1};
        s->table[t].init = PERI_INIT_DEFAULT;
    }
    for (int i = 0; i < 2; i++) {
        s->config.caches = i ? cache : NULL;
        fine(peri_tbe_new(&s->config, &tbe[i]), "a table batch");
    }
    for (int step = 0; step < 2; step++) {
        peri_tensor *out[2] = {NULL, NULL};
        peri_status status[2], update[2] = {0, 0};
        char message[1024] = "";
        for (int i = 0; i < 2; i++) {
            peri_tbe_batch *ahead = NULL; /* rows of a batch that does not come */
            if (i && pick(2) && peri_tbe_batch_new(tbe[1], &s->in, &ahead) >= 0) (void)peri_tbe_batch_prefetch(ahead);
            peri_tbe_batch_release(ahead);
            status[i] = look_up(s, tbe[i], extent, PERI_F32, &out[i]);
            if (status[i] < 0 && i == 0) snprintf(message, sizeof message, "%s", peri_error_message());
            if (status[i] < 0 && i == 1 && !s->bad_bags && !s->outside && status[1] != PERI_ENOMEM)
                require(strcmp(message, peri_error_message()) == 0, "tables in files say something else");
        }
        /* Bad bags are an error of tables in files in every mode, and so is a cache that is too small. */
        bool apart = s->bad_bags || s->outside || status[1] == PERI_ENOMEM;
        if (!apart) require(status[0] == status[1], "tables in files end otherwise");
        if (!apart && status[0] == PERI_OK) {
            static float x[2][ROOM];
            for (int i = 0; i < 2; i++) {
                fine(peri_tensor_read(out[i], x[i], 4 * extent), "a read");
                update[i] = peri_tbe_backward(tbe[i], &s->in, grad, NULL);
            }
            require(memcmp(x[0], x[1], 4 * (size_t)extent) == 0, "tables in files give other bits");
            require(update[0] == update[1], "updates of tables in files end otherwise");
        }
        peri_tensor_release(out[0]);
        peri_tensor_release(out[1]);
    }
    (void)peri_tbe_flush(tbe[1]);
    peri_tbe_release(tbe[0]);
    peri_tbe_release(tbe[1]);
    peri_tensor_release(grad);
}

/* -- one input ----------------------------------------------------------------------------------------------------- */

static void play(scene *s)
{
    static copies kept;
    peri_tbe *tbe = NULL;
    s->wild = pick(5) == 4;
    choose_tables(s);
    choose_ids(s);
    choose_blocks(s);
    fine(peri_tbe_new(&s->config, &tbe), "a table batch");
    fill_tables(s, tbe);
    peri_status status = peri_tbe_blocks_new(tbe, s->block, s->n_blocks, &s->in.blocks);
    require(status == PERI_OK || (s->hostile && peri_error_message()[0]), "blocks that are good were refused");
    if (status == PERI_OK) {
        bool short_offsets = false;
        for (int64_t k = 0; k < s->n_blocks; k++)
            short_offsets = short_offsets || s->block[k].first_bag + s->block[k].bags > s->n_bags;
        int64_t extent = short_offsets ? -1 : extent_of(s);
        if (!short_offsets) judge_input(s);
        copy_input(s, &kept, false);
        if (extent < 0) {
            peri_tensor *out = NULL;
            require(look_up(s, tbe, ROOM, PERI_F32, &out) == PERI_EINVAL,
                    "blocks of bags, or into an output, that are not there");
            peri_tensor_release(out);
        } else {
            judge_forward(s, tbe, extent);
            judge_backward(s, tbe, extent);
            if (trains_in_files(&s->optimizer) && !s->hostile && !s->wild && pick(8) == 7) judge_files(s, extent);
        }
        copy_input(s, &kept, true);
    }
    peri_tbe_blocks_release(s->in.blocks);
    peri_tbe_release(tbe);
    peri_tensor *in[4] = {s->in.ids, s->in.offsets, s->in.weights, s->in.scale};
    for (int i = 0; i < 4; i++) peri_tensor_release(in[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static scene s;
    bytes = data;
    left = size;
    memset(&s, 0, sizeof s);
    peri_log_level_set(PERI_LOG_ERROR); /* a table in a file that is not flushed, bad ids in the mode WARNING */
    int64_t live = peri_mem_objects();
    require(peri_device_get(pick(6) == 5 ? "opaque" : "cpu", &device) == PERI_OK, "a device");
    play(&s);
    fine(peri_device_synchronize(device), "a device");
    require(peri_mem_objects() == live, "objects that were not released");
    return 0;
}
