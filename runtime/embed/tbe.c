/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.c: making table batches, their weights and states.
 */
#include "embed_internal.h"
#include "reach.h"
#include "../tensor/report.h"
#include "../../kernels/convert.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

enum { GRAIN = 1 << 14 };

/* -- checks -------------------------------------------------------------------------------------------------------- */

const char *peri_tbe_optimizer_name(int32_t kind)
{
    return kind >= 0 && kind < PERI_TBE_OPTIMIZER_COUNT ? peri__optimizer_kind_of(kind)->name : NULL;
}

peri_status peri_tbe_optimizer_default(int32_t kind, peri_tbe_optimizer_config *out)
{
    PERI_NEED(out);
    PERI_TRY(peri__optimizer_kind_check("peri_tbe_optimizer_default", kind));
    const peri__optimizer_kind *k = peri__optimizer_kind_of(kind);
    peri_tbe_optimizer_config now = {.kind = kind,
                                .learning_rate = kind == PERI_TBE_NONE ? 0 : 0.01,
                                .eps = k->eps,
                                .beta1 = k->beta1,
                                .beta2 = k->beta2,
                                .eta = k->lars ? 0.001 : 0,
                                .momentum = k->lars ? 0.9 : 0,
                                .ema_beta = k->rmsprop ? 0.99 : 0,
                                .min_shrinkage = k->rmsprop ? 0.1 : 0,
                                .step_ema = k->ema ? 10 : 0,
                                .step_ema_coef = k->ema ? 0.6 : 0};
    peri__counter_default(&now);
    return PERI_GIVE(peri_tbe_optimizer_config, out, &now);
}

static peri_status check_number(const char *what, double value, bool known, double low, double high,
                                const char *allowed, const char *kind)
{
    if (!known && value != 0)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: optimizer %s has no %s (given: %g)", kind, what, value);
    const float held = (float)value; /* in which kernels get it: one that becomes 0 would mean something else */
    if (!(held >= low && held < high) || (value != 0 && held == 0))
        return peri__fail(PERI_EINVAL, "peri_tbe_new: %s %g, allowed: %s", what, value, allowed);
    return PERI_OK;
}

static peri_status check_optimizer(const peri_tbe_optimizer_config *o)
{
    PERI_TRY(peri__optimizer_kind_check("peri_tbe_new", o->kind));
    const peri__optimizer_kind *k = peri__optimizer_kind_of(o->kind);
    const char *any = "finite numbers >= 0, also as f32", *fraction = "0 <= number < 1";
    PERI_TRY(check_number("learning_rate", o->learning_rate, o->kind != PERI_TBE_NONE, 0, INFINITY, any, k->name));
    PERI_TRY(check_number("eps", o->eps, k->eps > 0, 0, INFINITY, any, k->name));
    PERI_TRY(check_number("beta1", o->beta1, k->beta1 > 0, 0, 1, fraction, k->name));
    PERI_TRY(check_number("beta2", o->beta2, k->beta2 > 0, 0, 1, fraction, k->name));
    PERI_TRY(check_number("weight_decay", o->weight_decay, k->decay, 0, INFINITY, any, k->name));
    PERI_TRY(check_number("eta", o->eta, k->lars, 0, INFINITY, any, k->name));
    PERI_TRY(check_number("momentum", o->momentum, k->lars, 0, 1, fraction, k->name));
    PERI_TRY(check_number("ema_beta", o->ema_beta, k->rmsprop, 0, 1, fraction, k->name));
    PERI_TRY(check_number("ar_alpha", o->ar_alpha, k->rmsprop, 0, INFINITY, any, k->name));
    PERI_TRY(
        check_number("min_shrinkage", o->min_shrinkage, k->rmsprop, 0, nextafter(1, 2), "0 <= number <= 1", k->name));
    PERI_TRY(check_number("max_norm", o->max_norm, o->kind != PERI_TBE_NONE, 0, INFINITY, any, k->name));
    PERI_TRY(check_number("max_gradient", o->max_gradient, true, 0, INFINITY, any, k->name));
    if (o->weight_decay_mode < PERI_DECAY_NONE || o->weight_decay_mode > PERI_DECAY_COWCLIP)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: weight_decay_mode %d, allowed: 0..%d", o->weight_decay_mode,
                          PERI_DECAY_COWCLIP);
    PERI_TRY(peri__counter_check(o));
    PERI_TRY(peri__ema_check(o));
    if (o->weight_decay_mode != PERI_DECAY_NONE && !k->decay_mode)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: optimizer %s has no weight_decay_mode", k->name);
    if (k->decay_mode && o->weight_decay != 0 && o->weight_decay_mode == PERI_DECAY_NONE)
        return peri__fail(PERI_EINVAL,
                          "peri_tbe_new: weight_decay %g without a weight_decay_mode, allowed: l2, decouple",
                          o->weight_decay);
    if (o->kind == PERI_TBE_SHAMPOO && (!(o->eps > 0) || o->weight_decay_mode == PERI_DECAY_L2))
        return peri__fail(
            PERI_EINVAL, "peri_tbe_new: optimizer shampoo wants eps > 0 (given: %g) and decouples weight decay, if any",
            o->eps);
    if (k->eps > 0 && o->eps == 0 && (k->beta2 > 0 ? o->beta2 : o->learning_rate) == 0)
        return peri__fail(PERI_EINVAL,
                          "peri_tbe_new: optimizer %s has 0 for eps and %s, so that a gradient of 0 would be divided "
                          "by 0; peri_tbe_optimizer_default fills in numbers",
                          k->name, k->beta2 > 0 ? "beta2" : "learning_rate");
    if (o->row_bias_correction && !(k->beta1 > 0 && k->eps > 0))
        return peri__fail(PERI_EINVAL, "peri_tbe_new: optimizer %s has no row_bias_correction", k->name);
    return PERI_OK;
}

/** Whether @n rows or columns (@what) from @offset on lie in a table of @total; 0: that ends with them. */
static peri_status check_part(const char *name, const char *what, int64_t offset, int64_t n, int64_t total)
{
    const int64_t most = total ? total : INT64_MAX;
    if (offset >= 0 && n <= most && offset <= most - n) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s': %lld %s from %lld on of %lld", name, (long long)n, what,
                      (long long)offset, (long long)most);
}

static peri_status check_table(const peri_table_config *t, int64_t i)
{
    const char *name = t->name ? t->name : "";
    if (!name[0]) return peri__fail(PERI_EINVAL, "peri_tbe_new: table %lld has no name", (long long)i);
    if (t->rows < 0 || t->rows > INT64_MAX >> 20)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s' has %lld rows, allowed: 0..2^43", name,
                          (long long)t->rows);
    if (t->cols < 1 || t->cols > 1 << 20)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s' has %lld columns, allowed: 1..2^20", name,
                          (long long)t->cols);
    PERI_TRY(check_part(name, "rows", t->row_offset, t->rows, t->total_rows));
    PERI_TRY(check_part(name, "columns", t->col_offset, t->cols, t->total_cols));
    if (t->pooling < PERI_POOLING_SUM || t->pooling > PERI_POOLING_NONE)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s': pooling %d, allowed: 0 (sum), 1 (mean), 2 (none)",
                          name, t->pooling);
    if (t->init < PERI_INIT_DEFAULT || t->init > PERI_INIT_NONE)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s': init %d, allowed: 0..%d", name, t->init,
                          PERI_INIT_NONE);
    if (!isfinite(t->init_a) || !isfinite(t->init_b) || (t->init == PERI_INIT_UNIFORM && t->init_b < t->init_a) ||
        (t->init == PERI_INIT_NORMAL && t->init_b < 0))
        return peri__fail(
            PERI_EINVAL,
            "peri_tbe_new: table '%s': init parameters %g, %g, allowed: finite numbers, with uniform low <= "
            "high, with normal a deviation >= 0",
            name, t->init_a, t->init_b);
    return PERI_OK;
}

static peri_status check_dtypes(const peri_tbe_config *c)
{
    if (!peri__small_float(c->dtype) && !peri__rows_are_bytes(c->dtype))
        return peri__fail(PERI_EINVAL, "peri_tbe_new: weights of dtype %s (%d), allowed: f32, f16, bf16, rows of bytes",
                          peri_dtype_name(c->dtype), c->dtype);
    if (c->output_dtype && !peri__small_float(c->output_dtype))
        return peri__fail(PERI_EINVAL, "peri_tbe_new: output_dtype %s, allowed: f32, f16, bf16",
                          peri_dtype_name(c->output_dtype));
    if (!peri__rows_are_bytes(c->dtype)) return PERI_OK;
    if (c->optimizer->kind != PERI_TBE_NONE)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: optimizer kind %d for rows of bytes, allowed: %d (none)",
                          c->optimizer->kind, PERI_TBE_NONE);
    for (int64_t i = 0; i < c->n_tables; i++)
        if (c->tables[i].init != PERI_INIT_NONE)
            return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s': init %d for rows of bytes, allowed: %d (none)",
                              c->tables[i].name, c->tables[i].init, PERI_INIT_NONE);
    return PERI_OK;
}

/** What tables behind a cache cannot do. */
static peri_status check_cached(const peri_tbe_config *c)
{
    static const char *const f = "peri_tbe_new: cached tables";
    if (peri__optimizer_keeps(c->optimizer, PERI_STATE_SQUARE))
        return peri__fail(PERI_EUNSUPPORTED, "%s cannot train with shampoo, which needs a batch's rows at once", f);
    if (c->optimizer->kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD)
        return peri__fail(
            PERI_EUNSUPPORTED,
            "%s cannot train with emainplace_rowwise_adagrad, which changes all rows every step_ema steps", f);
    if (peri__optimizer_keeps(c->optimizer, PERI_STATE_SCALAR))
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s have no max_counter, which looks at all rows: no learning_rate_mode tail_id_lr_increase "
                          "or _decrease, and no "
                          "tail_id_threshold that is a ratio",
                          f);
    if (peri__rows_are_bytes(c->dtype))
        return peri__fail(PERI_EUNSUPPORTED, "%s hold f32, f16 or bf16; rows of bytes stay in memory", f);
    if (c->optimizer->kind == PERI_TBE_NONE)
        return peri__fail(PERI_EINVAL, "%s need a fused optimizer: dense gradients would be as large as they are", f);
    return PERI_OK;
}

peri_status peri__tbe_check(const peri_tbe_config *c)
{
    if (c->bounds_check < PERI_BOUNDS_FATAL || c->bounds_check > PERI_BOUNDS_NONE)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: bounds_check %d, allowed: 0..3", c->bounds_check);
    PERI_TRY(peri__list_check("peri_tbe_new", "tables", c->tables, c->n_tables));
    PERI_TRY(peri__list_check("peri_tbe_new", "features", c->features, c->n_features));
    for (int64_t i = 0; i < c->n_features; i++)
        if (!c->features[i]) return peri__fail(PERI_EINVAL, "peri_tbe_new: feature %lld has no name", (long long)i);
    for (int64_t i = 0; i < c->n_tables; i++) {
        PERI_TRY(check_table(&c->tables[i], i));
        if (c->optimizer->kind == PERI_TBE_EMAINPLACE_ROWWISE_ADAGRAD && c->tables[i].cols % 2 != 0)
            return peri__fail(
                PERI_EINVAL,
                "peri_tbe_new: table '%s' has %lld columns; emainplace_rowwise_adagrad wants an even number of them",
                c->tables[i].name, (long long)c->tables[i].cols);
    }
    PERI_TRY(check_dtypes(c));
    PERI_TRY(check_optimizer(c->optimizer));
    return c->caches ? check_cached(c) : PERI_OK;
}

static peri_status check_config(const peri_tbe_config *c)
{
    if (!c->device) return peri__fail(PERI_EINVAL, "peri_tbe_new: no device");
    return peri__tbe_check(c);
}

/* -- making -------------------------------------------------------------------------------------------------------- */

/** Copy names and sizes, and place the tables one behind the other, each at a multiple of @alignment elements. Tables
 *  in files: @slots instead of rows. */
static peri_status lay_out(peri_tbe *tbe, const peri_tbe_config *c, const int64_t *slots, int64_t alignment)
{
    tbe->tables = peri__alloc_zero(sizeof *tbe->tables * (size_t)peri__max(c->n_tables, 1));
    tbe->layout = peri__alloc_zero(sizeof *tbe->layout * (size_t)peri__max(c->n_tables, 1));
    tbe->features = peri__alloc_zero(sizeof *tbe->features * (size_t)peri__max(c->n_features, 1));
    if (!tbe->tables || !tbe->layout || !tbe->features) return PERI_ENOMEM;
    tbe->n_features = c->n_features;
    for (int64_t i = 0; i < c->n_features; i++)
        if (!(tbe->features[i] = peri__strdup(c->features[i]))) return PERI_ENOMEM;
    tbe->n_tables = c->n_tables;
    for (int64_t i = 0; i < c->n_tables; i++) {
        peri__tbe_table *t = &tbe->tables[i];
        t->config = c->tables[i];
        t->name = peri__strdup(c->tables[i].name);
        if (!t->name) return PERI_ENOMEM;
        t->config.name = t->name;
        if (!t->config.total_rows) t->config.total_rows = t->config.row_offset + t->config.rows;
        if (!t->config.total_cols) t->config.total_cols = t->config.col_offset + t->config.cols;
        int64_t rows = slots ? slots[i] : t->config.rows, cols = t->config.cols;
        int64_t elements = peri__table_elements(c->dtype, rows, cols, alignment);
        if (elements < 0 || elements > (INT64_MAX >> 4) - tbe->total_elements)
            return peri__fail(PERI_EINVAL, "peri_tbe_new: table '%s' of %lld x %lld makes the batch too large", t->name,
                              (long long)rows, (long long)cols);
        tbe->layout[i] = (peri_k_tbe_table){.rows = rows,
                                            .cols = cols,
                                            .offset = tbe->total_elements,
                                            .stride = peri__tbe_stride(c->dtype, cols),
                                            .first_row = tbe->total_rows,
                                            .pooling = t->config.pooling,
                                            .row_offset = t->config.row_offset,
                                            .col_offset = t->config.col_offset,
                                            .random_stream = peri__hash_text(t->name)};
        tbe->total_elements += elements;
        tbe->total_rows += rows;
        tbe->max_cols = peri__max(tbe->max_cols, cols);
    }
    return PERI_OK;
}

static peri_status flat_tensor(peri_tbe *tbe, int32_t dtype, int64_t n, bool zero, peri_tensor **out)
{
    if (zero) return peri_tensor_full(tbe->device, dtype, 1, &n, 0, out);
    return peri_tensor_new(tbe->device, dtype, 1, &n, out);
}

/** Start values of one table's weights: see PERI_INIT_*. */
static peri_status initialise(peri_tbe *tbe, int64_t i, uint64_t seed)
{
    const peri_table_config *t = &tbe->tables[i].config;
    char *weights = (char *)peri__data(tbe->weight) + tbe->layout[i].offset * peri_dtype_size(tbe->dtype);
    const peri_k_random_args args = peri__tbe_start_values(tbe, i, 0, seed, weights);
    if (t->init == PERI_INIT_NONE || t->rows == 0) return PERI_OK;
    if (t->init == PERI_INIT_CONSTANT) {
        peri_k_fill_args fill = {.dst = args.dst, .dtype = tbe->dtype, .value = t->init_a};
        return PERI_LAUNCH(tbe->device, fill, &fill, t->rows * t->cols, GRAIN);
    }
    return PERI_LAUNCH(tbe->device, random, &args, t->rows * t->cols, 4096);
}

/** A table batch that knows its tables and has no weights yet. */
static peri_status shell_new(const peri_tbe_config *c, const int64_t *slots, int64_t alignment, peri_tbe **out)
{
    peri_tbe *tbe = peri__alloc_zero(sizeof *tbe);
    if (!tbe) return PERI_ENOMEM;
    peri__object_count(1);
    peri__refs_init(&tbe->refs);
    tbe->forks = peri__forks();
    tbe->device = c->device;
    tbe->dtype = c->dtype;
    tbe->bounds_check = c->bounds_check;
    tbe->output_dtype = c->output_dtype;
    tbe->optimizer = *c->optimizer;
    tbe->seed = c->seed;
    peri_status status;
    PERI_TRY_GOTO(peri__calls_init(tbe), out); /* the locks first: releasing destroys them */
    PERI_TRY_GOTO(lay_out(tbe, c, slots, alignment), out);
    PERI_TRY_GOTO(flat_tensor(tbe, PERI_I64, PERI__TBE_COUNTERS, true, &tbe->counters), out);
    PERI_TRY_GOTO(flat_tensor(tbe, PERI_U8, (int64_t)sizeof *tbe->layout * tbe->n_tables, false, &tbe->layout_tensor),
                  out);
    PERI_TRY_GOTO(peri__copy(tbe->device, peri__data(tbe->layout_tensor), tbe->layout,
                             (int64_t)sizeof *tbe->layout * tbe->n_tables, PERI_COPY_H2D),
                  out);
out:
    if (status < 0) peri_tbe_release(tbe);
    else *out = tbe;
    return status;
}

static peri_status check_mapped(const peri_tbe_config *c)
{
    if (c->caches) return peri__fail(PERI_EINVAL, "peri_tbe_new: tables are mapped, or behind a cache, not both");
    if (peri__reaches_host(c->device)) return PERI_OK;
    return peri__fail(PERI_EUNSUPPORTED,
                      "peri_tbe_new: table '%s' is to be in the host's memory (fused_uvm), which the kernels of device "
                      "%s do not reach; "
                      "allowed compute_kernels there: fused, fused_uvm_caching",
                      c->n_tables ? c->tables[0].name : "", peri_device_name(c->device));
}

bool peri__tbe_slot_rows(const peri_tbe_config *c)
{
    return c->caches && c->dtype != PERI_F32 && !c->optimizer->nearest;
}

/** Weights, not initialised, but rows of bytes (zeros), and states as before the first step. @mapped: those that have
 *  rows are in the host's memory. @given: the weights, or NULL. */
static peri_status new_states(peri_tbe *tbe, bool mapped, peri_tensor *given)
{
    peri__state states[PERI__STATES];
    int32_t n = peri__states_of(tbe->dtype, &tbe->optimizer, states);
    for (int32_t i = 0; i < n; i++) {
        peri__state *s = &states[i];
        int64_t elements = peri__state_offset(tbe, s, tbe->n_tables);
        bool bare = i == 0 && !peri__rows_are_bytes(tbe->dtype);
        bool rows = peri__has_rows(s->geometry);
        if (i == 0 && given) PERI_TRY(peri_tensor_reshape(given, 1, &elements, &s->flat)); /* a view */
        else PERI_TRY(peri__tensor_placed(tbe->device, s->dtype, 1, &elements, mapped && rows, &s->flat));
        if (tbe->optimizer.kind != PERI_TBE_NONE)
            atomic_store_explicit(&s->flat->storage->leaf, peri__tbe_no_leaf, memory_order_release);
        tbe->state[tbe->n_states++] = *s;
        if (!bare && !(i == 0 && given))
            PERI_TRY(peri_tensor_fill(s->flat, s->which == PERI__STATE_MAX_COUNTER ? 1 : 0));
    }
    tbe->weight = tbe->state[0].flat;
    return PERI_OK;
}

/** The caller's weights fit the tables, whose layout is known. */
static peri_status check_weights(const peri_tbe *tbe, const peri_tbe_config *c)
{
    const peri_tensor *w = c->weights;
    peri__state states[PERI__STATES];
    peri__states_of(tbe->dtype, &tbe->optimizer, states);
    const int64_t wanted = peri__state_offset(tbe, &states[0], tbe->n_tables);
    char text[128];
    if (c->caches || c->mapped)
        return peri__fail(PERI_EINVAL, "peri_tbe_new: weights are the caller's, or behind a cache or mapped, not both");
    if (w->dtype == states[0].dtype && peri__numel(w) == wanted && peri__contiguous(w) && peri__device(w) == c->device)
        return PERI_OK;
    return peri__fail(
        PERI_EINVAL,
        "peri_tbe_new: weights is %s%s on %s, wanted %s [%lld] on %s: each table begins at a multiple of %d "
        "elements",
        peri__tensor_text(w, text, sizeof text), peri__contiguous(w) ? "" : " with gaps", peri__device(w)->name,
        peri_dtype_name(states[0].dtype), (long long)wanted, c->device->name, PERI__TABLE_ALIGNMENT);
}

static peri_status tbe_new(const peri_tbe_config *c, peri_tbe **out)
{
    peri_tbe *tbe;
    int64_t *slots = NULL;
    PERI_TRY(check_config(c));
    if (c->mapped) PERI_TRY(check_mapped(c));
    if (c->caches) PERI_TRY(peri__tier_slots(c, &slots));
    peri_status status = shell_new(c, slots, PERI__TABLE_ALIGNMENT, &tbe);
    peri__free(slots);
    PERI_TRY(status);
    if (c->weights) PERI_TRY_GOTO(check_weights(tbe, c), out);
    PERI_TRY_GOTO(peri__tbe_out_of_memory(tbe, c, new_states(tbe, c->mapped, c->weights)), out);
    for (int64_t i = 0; i < tbe->n_tables && !c->caches && !c->weights; i++)
        PERI_TRY_GOTO(initialise(tbe, i, c->seed), out);
    if (peri__tbe_slot_rows(c)) PERI_TRY_GOTO(flat_tensor(tbe, PERI_I64, tbe->total_rows, true, &tbe->slot_row), out);
    tbe->store = &peri__memory;
    if (c->caches) PERI_TRY_GOTO(peri__tier_open(tbe, c), out);
    status = peri_event_record(tbe->changed, peri_stream_current(tbe->device));
out:
    if (status >= 0) peri__tbe_list(tbe);
    if (status < 0) peri_tbe_release(tbe);
    else *out = tbe;
    return status;
}

const peri_tbe_optimizer_config peri__no_optimizer = {.size = sizeof peri__no_optimizer, .kind = PERI_TBE_NONE};

/** An array of @n structures of today's @size bytes, from the caller's; NULL: there is none. */
static peri_status take_array(const void *given, int64_t n, size_t size, const char *function, const char *type,
                              void **out)
{
    *out = NULL;
    if (!given || n <= 0 || n > INT32_MAX) return PERI_OK; /* what is wrong with n is said later */
    if (!(*out = peri__alloc((size_t)n * size))) return PERI_ENOMEM;
    for (int64_t i = 0; i < n; i++)
        PERI_TRY(peri__struct_take((char *)*out + (size_t)i * size, size, peri__struct_at(given, i), function, type));
    return PERI_OK;
}

peri_status peri__structs_of_today(const void *given, int64_t n, size_t size, const char *function, const char *type,
                               void **out)
{
    peri_status status = take_array(given, n, size, function, type, out);
    if (status < 0) {
        peri__free(*out);
        *out = NULL;
    }
    return status;
}

peri_status peri__tbe_config_of_today(const peri_tbe_config *given, const char *f, peri_tbe_config *c)
{
    void *tables = NULL, *caches = NULL, *optimizer = NULL;
    PERI_TRY(peri__struct_take(c, sizeof *c, given, f, "peri_tbe_config"));
    peri_status status;
    PERI_TRY_GOTO(peri__structs_of_today(c->tables, c->n_tables, sizeof *c->tables, f, "peri_table_config", &tables),
                  out);
    PERI_TRY_GOTO(peri__structs_of_today(c->caches, c->n_tables, sizeof *c->caches, f, "peri_cache_config", &caches),
                  out);
    PERI_TRY_GOTO(
        peri__structs_of_today(c->optimizer, 1, sizeof *c->optimizer, f, "peri_tbe_optimizer_config", &optimizer), out);
out:
    if (status < 0) {
        peri__free(tables);
        peri__free(caches);
        return status;
    }
    c->tables = tables;
    if (caches) c->caches = caches; /* else none, or of no table */
    for (int64_t i = 0; caches && i < c->n_tables; i++)
        /* TorchRec's default */
        if (((peri_cache_config *)caches)[i].load_factor == 0) ((peri_cache_config *)caches)[i].load_factor = 0.2;
    c->optimizer = optimizer ? optimizer : &peri__no_optimizer;
    return PERI_OK;
}

void peri__tbe_config_free(peri_tbe_config *c)
{
    peri__free((void *)c->tables);
    if (c->n_tables > 0) peri__free((void *)c->caches);
    if (c->optimizer != &peri__no_optimizer) peri__free((void *)c->optimizer);
}

peri_status peri_tbe_new(const peri_tbe_config *given, peri_tbe **out)
{
    peri_tbe_config c;
    PERI_NEED(out);
    PERI_TRY(peri__tbe_config_of_today(given, "peri_tbe_new", &c));
    peri_status status = tbe_new(&c, out);
    peri__tbe_config_free(&c);
    return status;
}

peri_status peri__tbe_borrowing(const peri_tbe_config *c, peri_tensor *flat, peri_tbe **out)
{
    peri_tbe *tbe;
    PERI_TRY(check_config(c));
    PERI_TRY(shell_new(c, NULL, 1, &tbe));
    PERI_ASSERT(peri__numel(flat) >= tbe->total_elements && peri__contiguous(flat));
    tbe->store = &peri__memory;
    tbe->n_states = peri__states_of(tbe->dtype, &tbe->optimizer, tbe->state);
    tbe->weight = tbe->state[0].flat = flat;
    peri_tensor_retain(flat);
    peri_status status = peri_event_record(tbe->changed, peri_stream_current(tbe->device));
    if (status < 0) peri_tbe_release(tbe);
    else *out = tbe;
    return status;
}

void peri_tbe_retain(peri_tbe *tbe) { if (tbe) peri__refs_add(&tbe->refs); }

void peri_tbe_release(peri_tbe *tbe)
{
    if (!tbe || !peri__refs_drop(&tbe->refs)) return;
    peri__tbe_unlist(tbe);
    peri__tbe_unwatch_all(tbe);
    peri__late_drop(&tbe->unheard);
    if (tbe->store && tbe->store->free) tbe->store->free(tbe);
    peri_tensor **own[] = {&tbe->layout_tensor, &tbe->counters, &tbe->slot_row};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) peri__tbe_free_later(tbe, own[i]);
    for (int32_t i = 0; i < tbe->n_states; i++) peri__tbe_free_later(tbe, &tbe->state[i].flat);
    peri__tbe_accumulated_free(tbe);
    for (int i = 0; i < PERI__TBE_WORKSPACES; i++) peri__tbe_free_later(tbe, &tbe->workspace[i]);
    for (int64_t i = 0; i < tbe->n_tables; i++) {
        peri_tensor_release(tbe->tables[i].leaf);
        peri__free(tbe->tables[i].name);
    }
    for (int64_t i = 0; i < tbe->n_features; i++) peri__free(tbe->features[i]);
    peri__free(tbe->tables);
    peri__free(tbe->layout);
    peri__free(tbe->features);
    peri__calls_fini(tbe);
    peri__object_count(-1);
    peri__free(tbe);
}
