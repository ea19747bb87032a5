/* SPDX-License-Identifier: Apache-2.0
 *
 * model_file.c: see model_file.h.
 */
#include "model_file.h"

#include "../base/json.h"
#include "../model/model_internal.h"

#include <stdio.h>
#include <sys/stat.h>

enum { MOST_NAME = 128 };

/** Weights of an input are a feature of their own here: `from` and `weights` say which columns an input of the model
 *  takes. */
typedef struct input_map {
    int32_t column, weights; /* weights -1: none */
} input_map;

typedef struct file_model {
    peri__serve_model model;
    peri_model *file;
    int32_t n;                 /* inputs of the file */
    input_map *map;            /* [n] */
    peri__serve_input *inputs; /* [facts.n_inputs] */
    char **names;              /* [n] names of weights; NULL: of an input without */
    peri__serve_output *outputs;
    char name[MOST_NAME], version[40];
} file_model;

typedef struct file_context {
    peri_model_context *context;
    peri_model_values *values; /* [n] */
} file_context;

static void close_file(peri__serve_model *model)
{
    file_model *m = (file_model *)model;
    for (int32_t i = 0; m->names && i < m->n; i++) peri__free(m->names[i]);
    peri__free(m->names);
    peri__free(m->map);
    peri__free(m->inputs);
    peri__free(m->outputs);
    peri_model_release(m->file);
    peri__free(m);
}

static void drop_context(peri__serve_model *model, void *context)
{
    file_context *c = context;
    (void)model;
    peri_model_context_release(c->context);
    peri__free(c->values);
    peri__free(c);
}

static peri_status new_context(peri__serve_model *model, int64_t most, void **out)
{
    file_model *m = (file_model *)model;
    file_context *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    c->values = peri__alloc_zero(sizeof *c->values * (size_t)m->n);
    peri_status status =
        c->values ? peri_model_context_new(m->file, most, PERI__SERVE_MOST_IDS, &c->context) : PERI_ENOMEM;
    if (status < 0) return drop_context(model, c), status;
    *out = c;
    return PERI_OK;
}

static const peri_model_values *model_values(file_model *m, file_context *c, const peri__serve_column *columns)
{
    for (int32_t i = 0; i < m->n; i++) {
        const peri__serve_column *column = &columns[m->map[i].column];
        c->values[i] = (peri_model_values){.dense = column->numbers, .ids = column->ids, .offsets = column->offsets};
        if (m->map[i].weights >= 0) c->values[i].weights = columns[m->map[i].weights].numbers;
        const int32_t as = m->inputs[m->map[i].column].kind;
        if (as == PERI__SERVE_WEIGHTS) c->values[i].weights = column->numbers; /* numbers of members */
        if (as != PERI__SERVE_NUMBERS) c->values[i].dense = NULL;
    }
    return c->values;
}

static peri_status predict_samples(peri__serve_model *model, void *context, int64_t samples,
                                   const peri__serve_column *columns,
                           float *const *outputs, int64_t *const *offsets)
{
    file_context *c = context;
    return peri_model_predict_lists(c->context, samples, model_values((file_model *)model, c, columns), outputs,
                                    offsets);
}

static int32_t refused_column(peri__serve_model *model, void *context, int64_t samples,
                              const peri__serve_column *columns)
{
    file_model *m = (file_model *)model;
    const int32_t i = peri__model_refused_input(m->file, samples, model_values(m, context, columns));
    return i < 0 ? -1 : m->map[i].column;
}

static int64_t skipped_ids(peri__serve_model *model, void *context, int64_t samples, const peri__serve_column *columns)
{
    int64_t n = 0;
    file_model *m = (file_model *)model;
    return peri_model_check(m->file, samples, model_values(m, context, columns), &n) < 0 ? 0 : n;
}

static bool file_unchanged(peri__serve_model *model) { return peri_model_changed(((file_model *)model)->file) >= 0; }

static const peri__serve_kind kind =
    {new_context, drop_context, predict_samples, refused_column, NULL, close_file, file_unchanged};
static const peri__serve_kind mapped_kind =
    {new_context, drop_context, predict_samples, refused_column, skipped_ids, close_file, file_unchanged};

/** The inputs of the file as features: those with weights are two. */
static peri_status take_inputs(file_model *m)
{
    const peri_model_input *from = peri_model_inputs(m->file, &m->n);
    m->map = peri__alloc_zero(sizeof *m->map * (size_t)m->n + 1);
    m->names = peri__alloc_zero(sizeof *m->names * (size_t)m->n + 1);
    m->inputs = peri__alloc_zero(sizeof *m->inputs * (size_t)(2 * m->n) + 1);
    if (!m->map || !m->names || !m->inputs) return PERI_ENOMEM;
    int32_t f = 0;
    for (int32_t i = 0; i < m->n; i++) {
        const bool ids = from[i].kind == PERI_MODEL_IDS || from[i].kind == PERI_MODEL_WHOLE;
        m->map[i] = (input_map){f, from[i].weighted ? f + 1 : -1};
        m->inputs[f++] = (peri__serve_input){.name = from[i].name,
                                             .kind = ids ? PERI__SERVE_IDS
                                                     : from[i].kind == PERI_MODEL_NUMBERS ? PERI__SERVE_WEIGHTS
                                                                                          : PERI__SERVE_NUMBERS,
                                             .width = from[i].columns,
                                             .rows = ids && !from[i].mapped ? (uint64_t)from[i].rows : 0,
                                             .whole = from[i].kind == PERI_MODEL_WHOLE,
                                             .skip = from[i].unknown == PERI_MODEL_ID_SKIP,
                                             .optional = from[i].optional,
                                             .missing = from[i].missing,
                                             .any = !from[i].finite};
        if (ids && from[i].mapped && from[i].unknown == PERI_MODEL_ID_SKIP) m->model.kind = &mapped_kind;
        if (!from[i].weighted) continue;
        size_t room = strlen(from[i].name) + sizeof ".weights";
        if (!(m->names[i] = peri__alloc(room))) return PERI_ENOMEM;
        snprintf(m->names[i], room, "%s.weights", from[i].name);
        m->inputs[f] = (peri__serve_input){.name = m->names[i],
                                           .kind = PERI__SERVE_WEIGHTS,
                                           .of = f - 1,
                                           .one = true,
                                           .optional = from[i].optional,
                                           .any = !from[i].finite};
        f++;
    }
    for (int32_t i = 0; i < m->n; i++) { /* what an input says of another one, as features */
        peri__serve_input *in = &m->inputs[m->map[i].column];
        peri_model_input_rules rules = {.size = sizeof rules};
        PERI_TRY(peri_model_input_describe(m->file, i, &rules));
        const int64_t of = rules.like >= 0 ? rules.like : rules.counts;
        in->length = rules.length;
        if (of < 0) continue;
        if (in->kind != PERI__SERVE_WEIGHTS) *(rules.like >= 0 ? &in->same : &in->counts) = true;
        in->of = m->map[of].column;
    }
    m->model.facts.inputs = m->inputs;
    m->model.facts.n_inputs = f;
    return PERI_OK;
}

static peri_status take_outputs(file_model *m)
{
    int32_t n;
    const peri_model_output *from = peri_model_outputs(m->file, &n);
    m->outputs = peri__alloc_zero(sizeof *m->outputs * (size_t)n + 1);
    if (!m->outputs) return PERI_ENOMEM;
    for (int32_t k = 0; k < n; k++) {
        const int64_t list = peri_model_output_list(m->file, k);
        m->outputs[k] = (peri__serve_output){.name = from[k].name, .width = from[k].columns, .listed = list >= 0,
                                             .best = peri_model_output_best(m->file, k),
                                             .list = list >= 0 ? m->map[list].column : 0};
    }
    m->model.facts.outputs = m->outputs;
    m->model.facts.n_outputs = n;
    return PERI_OK;
}

/** What requests call the model, and its version: the step of the training, or else the begin of its digest. */
static void take_name(file_model *m, const char *path, const char *name, const char *written)
{
    peri_model_info info = {.size = sizeof info};
    struct stat st;
    (void)peri_model_describe(m->file, &info); /* both are there */
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    size_t n = strlen(file), end = n > 5 && strcmp(file + n - 5, ".peri") == 0 ? n - 5 : n;
    if (name || *info.name) snprintf(m->name, sizeof m->name, "%s", name ? name : info.name);
    else snprintf(m->name, sizeof m->name, "%.*s", (int)peri__min((int64_t)end, MOST_NAME - 1), file);
    if (info.step >= 0) snprintf(m->version, sizeof m->version, "%lld", (long long)info.step);
    else snprintf(m->version, sizeof m->version, "%.12s", info.digest);
    m->model.bytes = info.bytes;
    m->model.facts.name = m->name;
    m->model.facts.version = m->version;
    if (stat(written, &st) == 0) m->model.born_unix_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
}

/** All names are UTF-8, since answers in JSON have them; no feature has the name of another one's weights. */
static peri_status check_names(const file_model *m)
{
    const peri__serve_facts *facts = &m->model.facts;
    const char *odd = peri__is_utf8(facts->name) ? NULL : facts->name;
    for (int32_t i = 0; i < facts->n_inputs && !odd; i++)
        if (!peri__is_utf8(facts->inputs[i].name)) odd = facts->inputs[i].name;
    for (int32_t i = 0; i < facts->n_outputs && !odd; i++)
        if (!peri__is_utf8(facts->outputs[i].name)) odd = facts->outputs[i].name;
    if (odd)
        return peri__fail(PERI_EUNSUPPORTED,
                          "perilune serve: the name '%.100s' is not UTF-8 (--name: another name for the model)", odd);
    for (int32_t i = 0; i < m->n; i++)
        for (int32_t k = 0; k < m->n && m->names[i]; k++)
            if (strcmp(m->names[i], m->inputs[m->map[k].column].name) == 0)
                return peri__fail(PERI_EUNSUPPORTED,
                                  "perilune serve: an input is called '%.100s', as the weights of another one are",
                                  m->names[i]);
    return PERI_OK;
}

peri_status peri__serve_open_file(const char *path, const char *name, bool verify, peri__serve_model **out)
{
    peri_model *file;
    PERI_TRY(peri_model_open(path, PERI_MODEL_GUARD | (verify ? PERI_MODEL_VERIFY : 0), &file));
    return peri__serve_take_file(file, path, name, path, out);
}

peri_status peri__serve_take_file(peri_model *file, const char *path, const char *name, const char *written,
                                  peri__serve_model **out)
{
    file_model *m = peri__alloc_zero(sizeof *m);
    if (!m) {
        peri_model_release(file);
        return PERI_ENOMEM;
    }
    m->file = file;
    m->model.kind = &kind;
    peri__refs_init(&m->model.refs);
    peri_status status = take_inputs(m);
    if (status >= 0) status = take_outputs(m);
    if (status < 0) {
        close_file(&m->model);
        return status;
    }
    take_name(m, path, name, written);
    status = check_names(m);
    if (status < 0) return close_file(&m->model), status;
    *out = &m->model;
    return PERI_OK;
}
