/* SPDX-License-Identifier: Apache-2.0
 *
 * model_update.c: a model in memory of its own, brought to what a checkpoint has: each section of the file names the
 * tensor that it was made of. Of tables only the rows that increments have are read, everything else whole. Pages
 * whose bytes stay the same are not written, so they stay the file's, shared with other processes.
 */
#include "../../kernels/kernels.h"
#include "../base/buffer.h"
#include "../embed/embed_internal.h"
#include "model_follow.h"

#include <perilune/quantize.h>
#include <stdio.h>

enum {
    BLOCK_BYTES = 4 << 20, /* of rows that are read at a time */
    PAGE_BYTES = 4096      /* that are compared before they are written */
};

/* -- what a section is --------------------------------------------------------------------------------------------- */

enum { NOTHING, ROWS, VALUES, PANELS, IDS, INDEX };

/** Rows [first, past) of a table. */
typedef struct interval {
    int64_t first, past;
} interval;

/** What a section is, and of which tensor. */
typedef struct target {
    int32_t kind, table;   /* ROWS: which; IDS: which map */
    int32_t dtype;         /* PANELS */
    int64_t rows, columns; /* of the tensor; VALUES: 1, their number */
    int64_t index;         /* of the tensor in the checkpoint */
    peri_checkpoint_tensor tensor;
    const char *from; /* path of the checkpoint, for messages */
    char *to;
    interval *read; /* ROWS: rows that were read as the newest checkpoint has them */
    int64_t n_read;
} target;

/** A section has one use: false if it has two. */
static bool set_use(target *t, target use)
{
    if (t->kind == NOTHING) *t = use;
    return t->kind == use.kind && t->rows == use.rows && t->columns == use.columns && t->dtype == use.dtype;
}

/** Whether a formula tells section @i, with as many numbers. */
static bool has_formula(const peri_model *m, int32_t i, const target *t)
{
    const int32_t formula = m->sections[i].formula;
    return formula >= 0 && t->kind != IDS && t->rows <= INT64_MAX / t->columns &&
           m->formulas->outputs[formula].columns == t->rows * t->columns;
}

/** What the model's sections are; @list: n_sections. */
static peri_status note_uses(const peri_model *m, target *list)
{
    bool one = true;
    if (m->loose)
        return peri__fail(PERI_EUNSUPPORTED,
                          "model file '%.200s' cannot follow: %s uses a constant that is neither of the model's "
                          "state nor computed of it as a file can; allowed: what is in the state (register_buffer)",
                          m->path, m->loose);
    for (int32_t i = 0; i < m->n_tables; i++)
        one = set_use(&list[m->rows[i].section],
                      (target){ROWS, .table = i, .rows = m->tables[i].rows, .columns = m->tables[i].columns}) && one;
    for (int32_t i = 0; i < m->n_maps; i++) {
        one = set_use(&list[m->maps[i].ids], (target){IDS, .table = i, .rows = m->maps[i].rows, .columns = 1}) && one;
        /* follows the ids */
        one = set_use(&list[m->maps[i].index], (target){INDEX, .rows = m->maps[i].slots, .columns = 1}) && one;
    }
    for (int32_t i = 0; i < m->n_values; i++)
        if (m->values[i].section >= 0)
            one = set_use(&list[m->values[i].section], (target){VALUES, .rows = 1, .columns = m->values[i].columns}) &&
                  one;
    for (int32_t i = 0; i < m->n_operations; i++) {
        const peri__model_operation *o = &m->operations[i];
        if (o->kind == PERI__MODEL_linear)
            one = set_use(&list[o->weight],
                          (target){PANELS, .dtype = o->weight_dtype, .rows = o->sizes[1], .columns = o->sizes[0]}) &&
                  one;
    }
    if (!one)
        return peri__fail(PERI_EUNSUPPORTED, "model file '%.200s' cannot follow: a section has two uses", m->path);
    for (int32_t i = 0; i < m->n_sections; i++) {
        list[i].to = (char *)(uintptr_t)peri__model_data(m, i);
        /* stays, or follows ids */
        if (list[i].kind == INDEX || (m->sections[i].source && !*m->sections[i].source)) list[i].kind = NOTHING;
        if (list[i].kind == NOTHING || m->sections[i].source || has_formula(m, i, &list[i])) continue;
        return peri__fail(PERI_EUNSUPPORTED,
                          "model file '%.200s' cannot follow: section %d comes from no parameter of the model by "
                          "itself; allowed: files that were exported by this version, of models whose constants are "
                          "parameters or buffers, or computed of them; the report of the export names the line",
                          m->path, i);
    }
    return PERI_OK;
}

static void free_targets(const peri_model *m, target *list)
{
    for (int32_t i = 0; i < m->n_sections; i++) peri__free(list[i].read);
    peri__free(list);
}

peri_status peri__model_can_follow(const peri_model *m)
{
    target *list = peri__alloc_zero(sizeof *list * (size_t)m->n_sections + 1);
    if (!list) return PERI_ENOMEM;
    peri_status status = note_uses(m, list);
    free_targets(m, list);
    return status;
}

/** The tensor that a section is made of, in the checkpoint: found, and of the right shape. */
static peri_status find_tensor(const peri_checkpoint *c, const char *prefix, const peri__model_section *s, target *t)
{
    char name[PERI__MODEL_SOURCE + 256];
    snprintf(name, sizeof name, "%s%s", prefix, s->source);
    t->index = peri_checkpoint_find(c, name);
    if (t->index < 0)
        return peri__fail(PERI_EMISMATCH, "checkpoint '%.200s' has no tensor '%.200s'", peri_checkpoint_level(c, 0),
                          name);
    t->tensor.size = sizeof t->tensor;
    PERI_TRY(peri_checkpoint_tensor_at(c, t->index, &t->tensor));
    const peri_checkpoint_tensor *x = &t->tensor;
    int64_t numel = 1, rows = s->turned ? t->columns : t->rows, columns = s->turned ? t->rows : t->columns;
    for (int32_t d = 0; d < x->ndim; d++)
        numel = x->shape[d] > 0 && numel <= INT64_MAX / x->shape[d] ? numel * x->shape[d] : 0;
    bool fits = t->kind == VALUES ? numel == t->columns : x->ndim == 2 && x->shape[0] == rows && x->shape[1] == columns;
    bool typed = x->dtype == PERI_F32 || x->dtype == PERI_F16 || x->dtype == PERI_BF16 ||
                 (t->kind == VALUES && (x->dtype == PERI_I32 || x->dtype == PERI_I64 || x->dtype == PERI_BOOL));
    if (t->kind == IDS) fits = x->ndim >= 1 && x->shape[0] == rows && numel == rows, typed = x->dtype == PERI_I64;
    if (s->of > 0)
        fits = (t->kind == VALUES || t->kind == PANELS) && numel == s->of && rows * columns <= s->of - s->first;
    if (!fits || !typed)
        return peri__fail(
            PERI_EMISMATCH,
            "checkpoint '%.200s': tensor '%.200s' is %s of %lld elements, the model file wants %lld x %lld of %s%s",
            peri_checkpoint_level(c, 0), name, peri_dtype_name(x->dtype), (long long)numel, (long long)rows,
            (long long)columns, t->kind == IDS ? "i64" : "f32, f16 or bf16", s->of > 0 ? ", a part of it" : "");
    return PERI_OK;
}

/* -- numbers ------------------------------------------------------------------------------------------------------- */

/** The rectangle of rows [row, row + n), or the whole tensor (@n < 0). */
static peri_checkpoint_region region_of_rows(const peri_checkpoint_tensor *x, int64_t row, int64_t n)
{
    peri_checkpoint_region r = {.size = sizeof r};
    for (int32_t d = 0; d < x->ndim; d++) r.extent[d] = x->shape[d];
    if (n >= 0) r.offset[0] = row, r.extent[0] = n;
    return r;
}

/** Read a rectangle; @out new. */
static peri_status read_region(peri_checkpoint *c, int64_t index, const peri_checkpoint_tensor *x,
                               const peri_checkpoint_region *region, peri_tensor **out)
{
    peri_device *cpu;
    PERI_TRY(peri_device_get("cpu", &cpu));
    PERI_TRY(peri_tensor_new(cpu, x->dtype, x->ndim, region->extent, out));
    peri_status status = peri_checkpoint_read(c, index, region, *out);
    if (status < 0) peri_tensor_release(*out), *out = NULL;
    return status;
}

/** Elements of a row. */
static int64_t region_width(const peri_checkpoint_region *r, int32_t ndim)
{
    int64_t n = 1;
    for (int32_t d = 1; d < ndim; d++) n *= r->extent[d];
    return n;
}

/** Write what differs. */
static void write_changed(char *to, const void *from, int64_t bytes)
{
    if (memcmp(to, from, (size_t)bytes) != 0) memcpy(to, from, (size_t)bytes);
}

/** Numbers of rows [row, row + n) of a table or a map, or of @list[n], are given up, and laid into it. */
static peri_status lay_rows(const peri_model *m, const target *t, int64_t row, const int64_t *list, int64_t n,
                            peri_tensor *numbers)
{
    const bool ids = t->kind == IDS;
    const int64_t bytes = ids ? 8 : m->rows[t->table].row_bytes;
    peri_tensor *rows = numbers;
    void *data;
    peri_status status = PERI_OK;
    if (!ids) {
        char who[256];
        snprintf(who, sizeof who, "checkpoint '%.200s'", t->from);
        const peri__rows_place place = {.who = who, .table = m->tables[t->table].name,
                                        .dtype = m->rows[t->table].format, .row = row, .list = list};
        status = peri__encode_rows(&place, numbers, &rows);
        peri_tensor_release(numbers);
        PERI_TRY(status);
    }
    status = peri_tensor_data(rows, &data);
    for (int64_t i = 0; status >= 0 && i < n; i++) {
        const int64_t at = list ? list[i] : row + i;
        if (at < 0 || at >= t->rows)
            status = peri__fail(PERI_EFORMAT, "row %lld of a table of %lld", (long long)at, (long long)t->rows);
        else if (ids) peri__model_map_set(m, &m->maps[t->table], at, ((const int64_t *)data)[i]);
        else write_changed(t->to + at * bytes, (char *)data + i * bytes, bytes);
    }
    peri_tensor_release(rows);
    return status;
}

/* -- sections ------------------------------------------------------------------------------------------------------ */

/** Elements [first, first + n) of a tensor of whole numbers are those that f32 holds. */
static peri_status whole_held(const target *t, peri_tensor *x, int64_t first, int64_t n)
{
    void *data;
    PERI_TRY(peri_tensor_data(x, &data));
    for (int64_t i = first; i < first + n; i++) {
        const int64_t value = x->dtype == PERI_I64 ? ((int64_t *)data)[i] : ((int32_t *)data)[i];
        if (value < -PERI__MODEL_WHOLE || value > PERI__MODEL_WHOLE)
            return peri__fail(PERI_ERANGE,
                              "checkpoint '%.200s': tensor '%.200s': its number %lld is %lld, which the model file "
                              "does not hold; allowed: -2^24..2^24",
                              t->from, t->tensor.name, (long long)i, (long long)value);
    }
    return PERI_OK;
}

/** All elements of a tensor of the checkpoint as f32, of which @n from @first on are used; @out new. */
static peri_status read_numbers(peri_checkpoint *c, const target *t, int64_t first, int64_t n, peri_tensor **out,
                                const float **numbers)
{
    peri_checkpoint_region all = region_of_rows(&t->tensor, 0, -1);
    peri_tensor *x;
    void *data;
    PERI_TRY(read_region(c, t->index, &t->tensor, &all, &x));
    peri_status status = PERI_OK;
    if (x->dtype == PERI_I64 || x->dtype == PERI_I32) status = whole_held(t, x, first, n);
    if (status >= 0) status = peri_tensor_to(x, PERI_F32, NULL, out);
    peri_tensor_release(x);
    if (status >= 0) status = peri_tensor_data(*out, &data);
    if (status >= 0) *numbers = data;
    return status;
}

/** Constants and matrices. */
static peri_status lay_dense(const target *t, const peri__model_section *s, const float *numbers)
{
    if (t->kind == VALUES) {
        write_changed(t->to, numbers, t->columns * 4);
        return PERI_OK;
    }
    char who[PERI_MESSAGE_MAX];
    const int64_t column_step = s->turned ? 1 : t->columns, inner_step = s->turned ? t->rows : 1;
    if (s->source) snprintf(who, sizeof who, "checkpoint '%.200s': tensor '%.100s'", t->from, s->source);
    else snprintf(who, sizeof who, "checkpoint '%.200s': a matrix that is computed of it", t->from);
    PERI_TRY(peri__model_matrix_held(who, numbers, t->rows, t->columns, column_step, inner_step, t->dtype));
    float *panels = peri__alloc(sizeof *panels * (size_t)peri_panel_size(t->rows, t->columns));
    void *bytes = peri__alloc((size_t)peri_panel_bytes(t->rows, t->columns, t->dtype));
    if (panels && bytes) {
        peri_panel_pack(panels, numbers, t->rows, t->columns, column_step, inner_step);
        write_changed(t->to, bytes, peri__model_panels_as(panels, t->rows, t->columns, t->dtype, bytes));
    }
    const peri_status status = panels && bytes ? PERI_OK : PERI_ENOMEM;
    peri__free(panels);
    peri__free(bytes);
    return status;
}

static peri_status take_dense(peri_checkpoint *c, const target *t, const peri__model_section *s)
{
    peri_tensor *wide = NULL;
    const float *numbers;
    peri_status status = read_numbers(c, t, s->first, t->rows * t->columns, &wide, &numbers);
    if (status >= 0) status = lay_dense(t, s, numbers + s->first);
    peri_tensor_release(wide);
    return status;
}

/* -- formulas ------------------------------------------------------------------------------------------------------ */

/** Numbers that a formula has computed become section @s. */
static peri_status lay_computed(const peri_model *m, const target *t, const peri__model_section *s,
                                const float *numbers)
{
    if (t->kind != ROWS) return lay_dense(t, s, numbers);
    peri_device *cpu;
    peri_tensor *rows;
    const int64_t shape[2] = {t->rows, t->columns};
    PERI_TRY(peri_device_get("cpu", &cpu));
    PERI_TRY(peri_tensor_new(cpu, PERI_F32, 2, shape, &rows));
    peri_status status = peri_tensor_write(rows, numbers, t->rows * t->columns * 4);
    if (status >= 0) return lay_rows(m, t, 0, NULL, t->rows, rows);
    peri_tensor_release(rows);
    return status;
}

/** What an evaluation of the formulas needs. */
typedef struct evaluation {
    peri_model_context *context;
    peri_tensor **tensors;     /* n_inputs */
    peri_model_values *values; /* n_inputs */
    float **outputs;           /* n_outputs */
} evaluation;

static void free_evaluation(const peri_model *f, evaluation *e)
{
    for (int32_t i = 0; e->tensors && i < f->n_inputs; i++) peri_tensor_release(e->tensors[i]);
    for (int32_t i = 0; e->outputs && i < f->n_outputs; i++) peri__free(e->outputs[i]);
    peri_model_context_release(e->context);
    peri__free(e->tensors);
    peri__free(e->values);
    peri__free(e->outputs);
}

/** Compute all formulas of what the checkpoint has; @given: of their inputs. */
static peri_status evaluate_formulas(peri_model *f, peri_checkpoint *c, const target *given, evaluation *e)
{
    *e = (evaluation){.tensors = peri__alloc_zero(sizeof *e->tensors * (size_t)f->n_inputs + 1),
                      .values = peri__alloc_zero(sizeof *e->values * (size_t)f->n_inputs + 1),
                      .outputs = peri__alloc_zero(sizeof *e->outputs * (size_t)f->n_outputs + 1)};
    if (!e->tensors || !e->values || !e->outputs) return PERI_ENOMEM;
    PERI_TRY(peri_model_context_new(f, 1, 1, &e->context));
    for (int32_t i = 0; i < f->n_inputs; i++)
        PERI_TRY(read_numbers(c, &given[i], 0, given[i].columns, &e->tensors[i], &e->values[i].dense));
    for (int32_t i = 0; i < f->n_outputs; i++)
        if (!(e->outputs[i] = peri__alloc(sizeof(float) * (size_t)f->outputs[i].columns))) return PERI_ENOMEM;
    return peri_model_predict(e->context, 1, e->values, e->outputs);
}

/** Sections that formulas tell. */
static peri_status take_formulas(const peri_model *m, peri_checkpoint *c, const target *given, const target *list)
{
    evaluation e;
    if (!m->formulas) return PERI_OK;
    peri_status status = evaluate_formulas(m->formulas, c, given, &e);
    for (int32_t i = 0; status >= 0 && i < m->n_sections; i++) {
        const peri__model_section *s = &m->sections[i];
        if (s->formula >= 0 && list[i].kind != NOTHING)
            status = lay_computed(m, &list[i], s, e.outputs[s->formula]);
    }
    free_evaluation(m->formulas, &e);
    return status;
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static int64_t rows_per_block(const target *t) { return peri__max(1, BLOCK_BYTES / (4 * t->columns)); }

/** Rows [row, past) of a table, as @c has them. */
static peri_status take_rows(const peri_model *m, peri_checkpoint *c, const target *t, int64_t row, int64_t past)
{
    for (int64_t n; row < past; row += n) {
        peri_tensor *numbers;
        n = peri__min(rows_per_block(t), past - row);
        peri_checkpoint_region r = region_of_rows(&t->tensor, row, n);
        PERI_TRY(read_region(c, t->index, &t->tensor, &r, &numbers));
        PERI_TRY(lay_rows(m, t, row, NULL, n, numbers));
    }
    return PERI_OK;
}

/** Whether rows [first, past) have been read. */
static bool rows_were_read(const target *t, int64_t first, int64_t past)
{
    for (int64_t i = 0; i < t->n_read; i++)
        if (t->read[i].first <= first && past <= t->read[i].past) return true;
    return false;
}

/** Rows that an increment has all of are read as the newest checkpoint has them, once, however many increments have
 *  them all. */
static peri_status take_whole(const peri_model *m, peri_checkpoint *c, target *t, int64_t first, int64_t past)
{
    PERI_TRY(peri__grow_one((void **)&t->read, t->n_read, sizeof *t->read));
    PERI_TRY(take_rows(m, c, t, first, past));
    t->read[t->n_read++] = (interval){first, past};
    return PERI_OK;
}

/** Rows @list[n], as @c has them. */
static peri_status take_newest(const peri_model *m, peri_checkpoint *c, const target *t, const int64_t *list, int64_t n)
{
    for (int64_t i = 0, k; i < n; i = k) {
        for (k = i + 1; k < n && list[k] == list[k - 1] + 1; k++) {
        }
        if (list[i] < 0 || list[k - 1] >= t->rows)
            return peri__fail(PERI_EFORMAT, "rows beyond a table of %lld", (long long)t->rows);
        PERI_TRY(take_rows(m, c, t, list[i], list[k - 1] + 1));
    }
    return PERI_OK;
}

/** Rows [from, from + n) of the list of a piece of increment @level; as @c has them where the piece has some of their
 *  columns only, or numbers that the file cannot hold: a later increment may have better ones. */
static peri_status take_listed(const peri_model *m, peri_checkpoint *c, peri_checkpoint *level, const target *t,
                               int64_t index, int64_t piece, const peri_checkpoint_region *r, int64_t from, int64_t n)
{
    peri_device *cpu;
    peri_tensor *numbers = NULL;
    const int64_t width = region_width(r, t->tensor.ndim), shape[2] = {n, width},
                  element = peri_dtype_size(t->tensor.dtype);
    int64_t *rows = peri__alloc(sizeof *rows * (size_t)n);
    char *values = peri__alloc((size_t)(n * width * element));
    peri_status status =
        rows && values ? peri_checkpoint_piece_rows(level, index, piece, from, n, rows, values) : PERI_ENOMEM;
    if (width == t->columns) {
        if (status >= 0) status = peri_device_get("cpu", &cpu);
        if (status >= 0) status = peri_tensor_new(cpu, t->tensor.dtype, 2, shape, &numbers);
        if (status >= 0) status = peri_tensor_write(numbers, values, n * width * element);
        if (status >= 0) status = lay_rows(m, t, 0, rows, n, numbers);
        else peri_tensor_release(numbers);
    }
    if (width == t->columns ? status == PERI_ERANGE : status >= 0) status = take_newest(m, c, t, rows, n);
    peri__free(rows);
    peri__free(values);
    return status;
}

/** What one increment of the chain has of a table. */
static peri_status take_level(const peri_model *m, peri_checkpoint *c, peri_checkpoint *level, target *t)
{
    peri_checkpoint_tensor x = {.size = sizeof x};
    const int64_t index = peri_checkpoint_find(level, t->tensor.name);
    if (index < 0)
        return peri__fail(PERI_EMISMATCH, "checkpoint '%.200s' has no tensor '%.200s'", peri_checkpoint_level(level, 0),
                          t->tensor.name);
    PERI_TRY(peri_checkpoint_tensor_at(level, index, &x));
    if (x.ndim != t->tensor.ndim || x.dtype != t->tensor.dtype ||
        memcmp(x.shape, t->tensor.shape, sizeof *x.shape * (size_t)x.ndim) != 0)
        return peri__fail(PERI_EMISMATCH,
                          "checkpoint '%.200s': tensor '%.200s' is not what the next one of the chain has",
                          peri_checkpoint_level(level, 0), x.name);
    for (int64_t piece = 0; piece < x.pieces; piece++) {
        peri_checkpoint_region r = {.size = sizeof r};
        peri_checkpoint_place place = {.size = sizeof place};
        PERI_TRY(peri_checkpoint_piece(level, index, piece, &r, &place));
        if (r.offset[0] < 0 || r.extent[0] < 0 || r.offset[0] > t->rows - r.extent[0] ||
            region_width(&r, x.ndim) > t->columns)
            return peri__fail(PERI_EFORMAT, "checkpoint '%.200s': a piece of '%.200s' lies outside of it",
                              peri_checkpoint_level(level, 0), x.name);
        if (rows_were_read(t, r.offset[0], r.offset[0] + r.extent[0])) continue;
        if (!r.rows) PERI_TRY(take_whole(m, c, t, r.offset[0], r.offset[0] + r.extent[0]));
        for (int64_t from = 0, n; r.rows && from < r.listed; from += n) {
            n = peri__min(rows_per_block(t), r.listed - from);
            PERI_TRY(take_listed(m, c, level, t, index, piece, &r, from, n));
        }
    }
    return PERI_OK;
}

/** Checkpoint number @k of the chain, by itself. @out new. */
static peri_status open_level(const peri_checkpoint *c, int64_t k, peri_checkpoint **out)
{
    PERI_TRY(peri_checkpoint_open_alone(peri_checkpoint_level(c, k), out));
    if (peri_checkpoint_level_of(c, peri_checkpoint_digest(*out)) == k) return PERI_OK;
    peri_checkpoint_release(*out);
    *out = NULL;
    return peri__fail(PERI_EIO, "checkpoint '%.200s' was replaced while it was read", peri_checkpoint_level(c, k));
}

/** Whether section @i has rows, or raw ids, of a tensor of the checkpoint. */
static bool has_rows(const peri_model *m, const target *list, int32_t i)
{
    return (list[i].kind == ROWS || list[i].kind == IDS) && m->sections[i].formula < 0;
}

static peri_status take_sections(const peri_model *m, peri_checkpoint *c, int64_t level, target *list,
                                 const target *given)
{
    for (int32_t i = 0; i < m->n_sections; i++) {
        if (has_rows(m, list, i) && level < 0) PERI_TRY(take_rows(m, c, &list[i], 0, list[i].rows));
        if ((list[i].kind == VALUES || list[i].kind == PANELS) && m->sections[i].formula < 0)
            PERI_TRY(take_dense(c, &list[i], &m->sections[i]));
    }
    PERI_TRY(take_formulas(m, c, given, list));
    for (int64_t k = level - 1; k >= 0; k--) {
        peri_checkpoint *one;
        PERI_TRY(open_level(c, k, &one));
        peri_status status = PERI_OK;
        for (int32_t i = 0; status >= 0 && i < m->n_sections; i++)
            if (has_rows(m, list, i)) status = take_level(m, c, one, &list[i]);
        peri_checkpoint_release(one);
        PERI_TRY(status);
    }
    return PERI_OK;
}

void peri__model_copy(peri_model *m, const peri_model *from)
{
    for (int64_t at = 0; at < m->file.bytes; at += PAGE_BYTES)
        write_changed((char *)(uintptr_t)m->file.data + at, from->file.data + at,
                      peri__min(PAGE_BYTES, m->file.bytes - at));
}

/** All tensors that sections (@list) and formulas (@given) are made of. */
static peri_status find_tensors(const peri_model *m, const peri_checkpoint *c, const char *prefix, target *list,
                                target *given)
{
    for (int32_t i = 0; i < m->n_sections; i++) {
        list[i].from = peri_checkpoint_level(c, 0);
        if (list[i].kind != NOTHING && m->sections[i].formula < 0)
            PERI_TRY(find_tensor(c, prefix, &m->sections[i], &list[i]));
    }
    for (int32_t i = 0; m->formulas && i < m->formulas->n_inputs; i++) {
        const peri_model_input *input = &m->formulas->inputs[i];
        const peri__model_section as = {.source = (char *)(uintptr_t)input->name, .formula = -1};
        given[i] = (target){.kind = VALUES, .rows = 1, .columns = input->columns, .from = peri_checkpoint_level(c, 0)};
        PERI_TRY(find_tensor(c, prefix, &as, &given[i]));
    }
    return PERI_OK;
}

peri_status peri__model_update(peri_model *m, peri_checkpoint *c, int64_t level, const char *prefix, bool *begun)
{
    *begun = false;
    target *list = peri__alloc_zero(sizeof *list * (size_t)m->n_sections + 1);
    target *given = peri__alloc_zero(sizeof *given * (size_t)(m->formulas ? m->formulas->n_inputs : 0) + 1);
    peri_status status = list && given ? note_uses(m, list) : PERI_ENOMEM;
    if (status >= 0) status = find_tensors(m, c, prefix, list, given);
    if (status >= 0) {
        *begun = true;
        status = level == 0 ? PERI_OK : take_sections(m, c, level, list, given);
    }
    if (list) free_targets(m, list);
    peri__free(given);
    return status;
}
