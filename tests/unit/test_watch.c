/* SPDX-License-Identifier: Apache-2.0
 *
 * test_watch.c: who watches a table batch is told every row before it changes: a watch that keeps the old bytes of rows
 * when it hears of them first has, together with the rows that it did not hear of, the tables as they were when it
 * began.
 */
#include "runtime/embed/row_watch.h"
#include "tests/harness/check.h"

#include <stdlib.h>

enum { TABLES = 2, BAGS = 3, IDS = 12, MOST_STATES = 4, ALL_ROWS = 130 };
static const int64_t table_rows[TABLES] = {70, 60}, table_cols[TABLES] = {4, 6};

/** The rows of all states of all tables, each in memory of its own, by linear row. */
typedef struct image {
    unsigned char bytes[MOST_STATES][ALL_ROWS][64];
} image;

typedef struct keeper {
    peri__row_watch watch;
    peri__row_bits bits;
    image kept;
    int64_t told, rows; /* calls; rows that were kept */
} keeper;

static bool has_rows(const peri_tbe *tbe, int32_t s)
{
    return tbe->state[s].geometry == PERI_STATE_FULL || tbe->state[s].geometry == PERI_STATE_ROW;
}

/** Read linear row @row of every state into @to. @within: in a call. */
static void read_row(peri_tbe *tbe, int64_t row, bool within, image *to)
{
    const int64_t table = row >= table_rows[0], local = row - (table ? table_rows[0] : 0);
    for (int32_t s = 0; s < tbe->n_states; s++) {
        if (!has_rows(tbe, s)) continue;
        peri_tensor *t;
        const int64_t shape[2] = {1, table_cols[table]};
        const int32_t ndim = tbe->state[s].geometry == PERI_STATE_FULL ? 2 : 1;
        assert_ok(peri_tensor_new(tbe->device, tbe->state[s].dtype, ndim, shape, &t));
        if (within) assert_ok(tbe->store->read(tbe, table, s, local, t));
        else assert_ok(peri_tbe_read(tbe, table, tbe->state[s].name, local, t));
        assert_ok(peri_tensor_read(t, to->bytes[s][row], peri__numel(t) * peri_dtype_size(t->dtype)));
        peri_tensor_release(t);
    }
}

static peri_status keep(peri__row_watch *watch, peri_tbe *tbe, const peri__row_change *change)
{
    keeper *k = (keeper *)watch;
    int64_t n, fresh[ALL_ROWS];
    assert_ok(peri__row_bits_mark(tbe, &k->bits, change, true));
    assert_ok(peri_tensor_read(k->bits.n_fresh, &n, sizeof n));
    assert_true(n >= 0 && n <= ALL_ROWS);
    int64_t all = peri__numel(k->bits.fresh), *list = malloc(sizeof *list * (size_t)all);
    assert_ok(peri_tensor_read(k->bits.fresh, list, all * (int64_t)sizeof *list));
    memcpy(fresh, list, sizeof *list * (size_t)n);
    free(list);
    for (int64_t i = 0; i < n; i++) read_row(tbe, fresh[i], true, &k->kept);
    k->told++;
    k->rows += n;
    return PERI_OK;
}

static peri_tbe *make(peri_device *device, int32_t kind, const peri_cache_config *caches)
{
    peri_table_config tables[TABLES];
    for (int t = 0; t < TABLES; t++)
        tables[t] = (peri_table_config){.size = sizeof(peri_table_config),
                                        .name = t ? "b" : "a",
                                        .rows = table_rows[t],
                                        .cols = table_cols[t],
                                        .total_rows = table_rows[t]};
    peri_tbe_config c = {.size = sizeof c,
                         .device = device,
                         .n_tables = TABLES,
                         .tables = tables,
                         .dtype = PERI_F32,
                         .seed = 5,
                         .caches = caches};
    peri_tbe_optimizer_config optimizer = {.size = sizeof optimizer};
    c.optimizer = &optimizer;
    assert_ok(peri_tbe_optimizer_default(kind, &optimizer));
    optimizer.learning_rate = 0.5;
    if (kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD) optimizer.step_ema = 3, optimizer.step_ema_coef = 0.5;
    peri_tbe *tbe;
    assert_ok(peri_tbe_new(&c, &tbe));
    return tbe;
}

static peri_tensor *tensor(peri_device *device, int32_t dtype, int64_t n, const void *data)
{
    peri_tensor *t;
    assert_ok(peri_tensor_new(device, dtype, 1, &n, &t));
    assert_ok(peri_tensor_write(t, data, n * peri_dtype_size(dtype)));
    return t;
}

/** A lookup and its update; as a dense gradient that is applied, if @dense. */
static void step(peri_device *device, peri_tbe *tbe, int64_t salt, bool dense)
{
    int64_t ids[TABLES * IDS], offsets[TABLES * BAGS + 1], extent = BAGS * (table_cols[0] + table_cols[1]);
    for (int64_t i = 0; i < TABLES * IDS; i++) ids[i] = (i * i + 7 * salt) % table_rows[i / IDS];
    for (int64_t b = 0; b <= TABLES * BAGS; b++) offsets[b] = b * IDS / BAGS;
    peri_tbe_block blocks[TABLES] = {{.bags = BAGS, .out_stride = table_cols[0], .feature = -1},
                                     {.first_bag = BAGS,
                                      .bags = BAGS,
                                      .out_offset = BAGS * table_cols[0],
                                      .out_stride = table_cols[1],
                                      .table = 1,
                                      .feature = -1}};
    peri_tbe_input in = {.ids = tensor(device, PERI_I64, TABLES * IDS, ids),
                         .offsets = tensor(device, PERI_I64, TABLES * BAGS + 1, offsets)};
    peri_tensor *out, *grad, *gradient;
    assert_ok(peri_tbe_blocks_new(tbe, blocks, TABLES, &in.blocks));
    assert_ok(peri_tensor_full(device, PERI_F32, 1, &extent, 0, &out));
    assert_ok(peri_tensor_full(device, PERI_F32, 1, &extent, 0.25 + (double)salt, &grad));
    assert_ok(peri_tbe_forward(tbe, &in, out));
    if (dense) {
        assert_ok(peri_tbe_gradient(tbe, &in, grad, NULL, &gradient));
        assert_ok(peri_tbe_gradient_apply(tbe, gradient));
        peri_tensor_release(gradient);
    } else {
        assert_ok(peri_tbe_backward(tbe, &in, grad, NULL));
    }
    peri_tensor_release(in.ids);
    peri_tensor_release(in.offsets);
    peri_tbe_blocks_release(in.blocks);
    peri_tensor_release(out);
    peri_tensor_release(grad);
}

/** Rows that somebody writes, by peri_tbe_write and through a view. */
static void writes(peri_device *device, peri_tbe *tbe)
{
    peri_tensor *rows, *view, *part;
    const int64_t shape[2] = {3, table_cols[1]};
    assert_ok(peri_tensor_full(device, PERI_F32, 2, shape, 9, &rows));
    assert_ok(peri_tbe_write(tbe, 1, "weight", 20, rows));
    if (tbe->store->whole) {
        assert_ok(peri_tbe_state(tbe, 1, "weight", &view));
        assert_ok(peri_tensor_slice(view, 0, 57, 60, 1, &part));
        assert_ok(peri_tensor_copy(part, rows));
        peri_tensor_release(part);
        peri_tensor_release(view);
    }
    peri_tensor_release(rows);
}

static void resets(peri_device *device, peri_tbe *tbe)
{
    static const int64_t some[3] = {69, 2, 33};
    peri_tensor *rows = tensor(device, PERI_I64, 3, some);
    assert_ok(peri_tbe_rows_reset(tbe, 0, rows));
    peri_tensor_release(rows);
}

static void changes(peri_device *device, peri_tbe *tbe, int32_t kind)
{
    for (int64_t i = 0; i < 4; i++) step(device, tbe, i, false);
    writes(device, tbe);
    resets(device, tbe);
    if (kind != PERI_TBE_SHAMPOO && tbe->store->whole) step(device, tbe, 9, true);
}

static void keeps_what_was(peri_device *device, int32_t kind, const peri_cache_config *caches)
{
    static image before, after;
    static keeper k;
    peri_tbe *tbe = make(device, kind, caches);
    memset(&before, 0, sizeof before);
    memset(&after, 0, sizeof after);
    changes(device, tbe, kind); /* nobody watches */
    for (int64_t row = 0; row < ALL_ROWS; row++) read_row(tbe, row, false, &before);
    k = (keeper){.watch = {.before = keep}};
    assert_ok(peri__row_bits_init(tbe, &k.bits));
    assert_ok(peri__tbe_watch(tbe, &k.watch));
    changes(device, tbe, kind);
    for (int64_t row = 0; row < ALL_ROWS; row++) read_row(tbe, row, false, &after);
    int64_t words[(ALL_ROWS + 63) / 64], changed = 0, marked = 0;
    assert_ok(peri_tensor_read(k.bits.words, words, sizeof words));
    for (int64_t row = 0; row < ALL_ROWS; row++) {
        const bool told = (uint64_t)words[row / 64] >> row % 64 & 1;
        marked += told;
        for (int32_t s = 0; s < tbe->n_states; s++) {
            if (!has_rows(tbe, s)) continue;
            const unsigned char *then = before.bytes[s][row];
            changed += s == 0 && memcmp(then, after.bytes[s][row], 64) != 0;
            assert_memory_equal(told ? k.kept.bytes[s][row] : after.bytes[s][row], then, 64);
        }
    }
    assert_int_equal(marked, k.rows);
    assert_true(changed > 30 && marked >= changed);
    if (kind != PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD) assert_true(marked < 110); /* of 130: not just all */
    peri__tbe_unwatch(tbe, &k.watch);
    const int64_t told = k.told;
    changes(device, tbe, kind);
    assert_int_equal(told, k.told);
    assert_ok(peri__tbe_watch(tbe, &k.watch)); /* and whoever still watches when it goes is left alone */
    peri_tbe_release(tbe);
    peri__row_bits_fini(&k.bits);
}

static void rows_are_told_before_they_change(void **state)
{
    (void)state;
    static const char *const devices[] = {"cpu", "opaque"};
    static const int32_t kinds[] = {PERI_TBE_SGD, PERI_TBE_ROWWISE_ADAGRAD, PERI_TBE_ADAM, PERI_TBE_SHAMPOO,
                                    PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD};
    const peri_cache_config caches[TABLES] = {{.size = sizeof *caches, .load_factor = 0.4, .ways = 4},
                                              {.size = sizeof *caches, .load_factor = 0.4, .ways = 4}};
    for (int d = 0; d < 2; d++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            peri_device *device;
            assert_ok(peri_device_get(devices[d], &device));
            keeps_what_was(device, kinds[k], NULL);
            if (k < 3) keeps_what_was(device, kinds[k], caches);
        }
}

/** peri__row_watch.before that fails. */
static peri_status refuse(peri__row_watch *watch, peri_tbe *tbe, const peri__row_change *change)
{
    (void)watch, (void)tbe, (void)change;
    return peri__fail(PERI_ENOMEM, "no room to keep rows");
}

static void what_a_watch_refuses_changes_nothing(void **state)
{
    (void)state;
    static image before, after;
    peri_device *device;
    assert_ok(peri_device_get("cpu", &device));
    peri_tbe *tbe = make(device, PERI_TBE_ADAM, NULL);
    step(device, tbe, 1, false);
    for (int64_t row = 0; row < ALL_ROWS; row++) read_row(tbe, row, false, &before);
    peri__row_watch watch = {.before = refuse};
    const int64_t some = 5, iteration = peri_tbe_iteration(tbe);
    peri_tensor *rows = tensor(device, PERI_I64, 1, &some);
    assert_ok(peri__tbe_watch(tbe, &watch));
    assert_int_equal(peri_tbe_rows_reset(tbe, 0, rows), PERI_ENOMEM);
    assert_int_equal(peri_tbe_iteration(tbe), iteration);
    peri__tbe_unwatch(tbe, &watch);
    for (int64_t row = 0; row < ALL_ROWS; row++) read_row(tbe, row, false, &after);
    assert_memory_equal(&before, &after, sizeof before);
    peri_tensor_release(rows);
    peri_tbe_release(tbe);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(rows_are_told_before_they_change),
    cmocka_unit_test(what_a_watch_refuses_changes_nothing),
};
check_main(tests)
