/* SPDX-License-Identifier: Apache-2.0
 *
 * header_check.c: whether a header makes sense. Everything that the other files index, multiply or read through is
 * checked here and in operation_check.c, once, so that they need not: a model that passes leads no call out of its
 * memory, whoever wrote it. Only the contents of sections are not looked at; they are numbers, of which all are
 * allowed.
 */
#include "../base/buffer.h"
#include "../embed/embed_internal.h"
#include "header_check.h"

#include <perilune/collision.h>
#include <stdio.h>

enum { MOST_NAMED = 1 << 14 }; /* inputs, and outputs */

/* -- sections, tables, inputs -------------------------------------------------------------------------------------- */

static peri_status check_section(const checker *c, const peri__model_section *s)
{
    WANT(s->offset >= (int64_t)sizeof(peri__model_preamble) && s->offset % PERI__MODEL_ALIGN == 0,
         "its offset is no multiple of 64 behind the preamble");
    WANT(s->bytes >= 0 && s->offset <= c->m->file.bytes && s->bytes <= c->m->file.bytes - s->offset,
         "it ends behind the end of the file");
    WANT(s->first >= 0 && s->of >= 0 && (s->first == 0 || s->first < s->of),
         "its first element is none of those of its source");
    const int32_t formulas = c->m->formulas ? c->m->formulas->n_outputs : 0;
    WANT(s->formula >= -1 && s->formula < formulas && (s->formula < 0 || !s->source),
         "its formula does not exist, or it has a source, too");
    return PERI_OK;
}

/** The format of rows of a name as files have it: "f32", ..., "int8_half"; -1: there is none. */
static int32_t format_named(const char *dtype)
{
    static const int32_t numbers[] = {PERI_F32, PERI_F16, PERI_BF16};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(dtype, peri_dtype_name(numbers[i]))) return numbers[i];
    const char *name;
    for (int32_t format = PERI_ROWS_INT8; (name = peri_row_format_name(format)); format++) {
        size_t i = 0; /* names of files are those of tables in small letters */
        while (name[i] && dtype[i] == (name[i] >= 'A' && name[i] <= 'Z' ? name[i] - 'A' + 'a' : name[i])) i++;
        if (!name[i] && !dtype[i]) return format;
    }
    return -1;
}

/** The format of rows that a dtype's name means (-1: none); how many elements (of codes: bytes) a row has, and how many
 *  bytes. */
static int32_t row_format_of(const char *dtype, int64_t columns, int64_t *stride, int64_t *row_bytes)
{
    const int32_t format = format_named(dtype);
    if (format < 0) return -1;
    *stride = peri__tbe_stride(format, columns);
    *row_bytes = *stride * (peri__rows_are_bytes(format) ? 1 : peri_dtype_size(format));
    return format;
}

static peri_status check_table(const checker *c, peri_model_table *t, peri__model_rows *r)
{
    const peri_model *m = c->m;
    WANT(t->name && t->dtype, "it has no name, or no dtype");
    WANT(t->columns >= 1 && t->columns <= PERI__COLUMNS_MOST && t->rows >= 0 && t->rows <= PERI__ROWS_MOST,
         "its sizes are not allowed");
    r->format = row_format_of(t->dtype, t->columns, &r->stride, &r->row_bytes);
    if (r->format < 0)
        return peri__fail(PERI_EUNSUPPORTED, "%s: table '%s': dtype '%s', allowed: f32, f16, bf16, int8, int4, fp8",
                          c->what, t->name, t->dtype);
    WANT(r->section >= 0 && r->section < m->n_sections, "its section does not exist");
    WANT(t->rows <= INT64_MAX / r->row_bytes && m->sections[r->section].bytes == t->rows * r->row_bytes,
         "its section is not as long as its rows");
    t->bytes = m->sections[r->section].bytes;
    return PERI_OK;
}

static peri_status check_map(const checker *c, peri__model_map *map)
{
    const peri_model *m = c->m;
    WANT(map->spread >= 0, "its spread is unknown, allowed: hash, modulo, range");
    WANT(map->miss >= 0, "what becomes of unknown ids is not known, allowed: row, hash, drop, error");
    WANT(map->n_segments >= 2 && map->segments[0] == 0, "its segments do not begin with 0");
    for (int32_t i = 1; i < map->n_segments; i++)
        WANT(map->segments[i] > map->segments[i - 1] && map->segments[i] < UINT32_MAX,
             "its segments do not rise, or exceed 2^32 - 2 rows");
    WANT(map->spread != PERI_SPREAD_RANGE || map->block >= 1, "its block is not allowed");
    map->rows = map->segments[map->n_segments - 1];
    map->slots = peri__model_map_slots(map->rows);
    WANT(map->ids >= 0 && map->ids < m->n_sections && m->sections[map->ids].bytes == map->rows * 8,
         "its ids are not as long as its rows");
    WANT(map->index >= 0 && map->index < m->n_sections && m->sections[map->index].bytes == map->slots * 4,
         "its index is not as long as its rows say");
    return PERI_OK;
}

static peri_status check_input(const checker *c, const peri_model_input *i)
{
    WANT(i->name && *i->name, "it has no name");
    for (const peri_model_input *other = c->m->inputs; other < i; other++)
        WANT(strcmp(other->name, i->name) != 0, "its name is another's, too");
    const int32_t n = c->m->n_inputs;
    const peri__model_rule *rule = &c->m->rules[c->n];
    WANT(i->kind >= 0, "its kind is unknown, allowed: dense, ids, whole, numbers");
    WANT(rule->length >= 0 && rule->length <= PERI__COLUMNS_MOST, "its length is not allowed");
    WANT(rule->counts >= -1 && rule->counts < n &&
             (rule->counts < 0 || c->m->inputs[rule->counts].kind != PERI_MODEL_DENSE),
         "the input whose lists it counts does not exist, or has none");
    if (i->kind == PERI_MODEL_DENSE) {
        WANT(i->columns >= 1 && i->columns <= PERI__COLUMNS_MOST, "its columns are not allowed");
        WANT(i->rows == 0 && !i->weighted && rule->length == 0, "rows, weights and lengths are of lists");
        WANT(rule->counts < 0 || i->columns == 1, "it counts members of lists, and has several columns");
    } else {
        WANT(i->columns == 0 && i->rows >= 0 && i->rows <= PERI__ROWS_MOST, "its rows are not allowed");
        WANT(rule->counts < 0, "a list counts no members");
        WANT(i->kind == PERI_MODEL_IDS || (i->rows == 0 && !i->weighted), "rows and weights are of ids");
    }
    return PERI_OK;
}

/** Inputs whose lists are equally long, or the members of another list that comes before it. */
static peri_status check_list(const checker *c, peri__model_list *l)
{
    peri_model *m = c->m;
    if (l->n_inputs == 0) {
        WANT(l->of >= 0 && l->of < c->n, "it has no inputs, and is of no list before it");
        l->first = m->lists[l->of].first;
        return PERI_OK;
    }
    WANT(l->of < 0, "it has inputs, and is of another list");
    WANT(l->inputs[0] < 0 || l->inputs[0] >= m->n_inputs || m->inputs[l->inputs[0]].kind != PERI_MODEL_NUMBERS,
         "its first input is of numbers, which are those of the members of another one's lists");
    for (int32_t i = 0; i < l->n_inputs; i++) {
        WANT(l->inputs[i] >= 0 && l->inputs[i] < m->n_inputs, "an input of it does not exist");
        peri__model_rule *rule = &m->rules[l->inputs[i]];
        WANT(m->inputs[l->inputs[i]].kind != PERI_MODEL_DENSE, "an input of it has no lists");
        WANT(rule->like < 0, "an input of it is there twice, or in another list, too");
        rule->like = l->inputs[0]; /* the first one's own number says that it is in a list, until all lists are known */
    }
    l->first = l->inputs[0];
    return PERI_OK;
}

/** An input of numbers has those of the members of some list. */
static peri_status check_numbers(const checker *c, const peri_model_input *i)
{
    WANT(i->kind != PERI_MODEL_NUMBERS || c->m->rules[c->n].like >= 0, "it has numbers of the members of no list");
    return PERI_OK;
}

static peri_status check_value(const checker *c, const peri__model_value *v)
{
    const peri_model *m = c->m;
    WANT(v->columns >= 1 && v->columns <= PERI__COLUMNS_MOST, "its columns are not allowed");
    WANT(v->input < 0 || v->section < 0, "it is an input and a section");
    WANT(v->list >= -1 && v->list < m->n_lists && (v->list < 0 || v->section < 0),
         "its list does not exist, or it is a section");
    if (v->input >= 0 && v->list >= 0) {
        WANT(has_input(&m->lists[v->list], v->input), "its input is not one of its list");
        WANT(m->inputs[v->input].kind == PERI_MODEL_NUMBERS || m->inputs[v->input].weighted,
             "its input has neither numbers nor weights");
        WANT(v->columns == 1, "it has several columns");
    } else if (v->input >= 0) {
        WANT(v->input < m->n_inputs && m->inputs[v->input].kind == PERI_MODEL_DENSE,
             "its input does not exist, or is not dense");
        WANT(m->inputs[v->input].columns == v->columns, "it has other columns than its input");
    }
    if (v->section >= 0)
        WANT(v->section < m->n_sections && m->sections[v->section].bytes == v->columns * 4,
             "its section does not exist, or is not as long");
    return PERI_OK;
}

static peri_status check_output(const checker *c, peri_model_output *o, int32_t value)
{
    peri_model *m = c->m;
    WANT(o->name && *o->name, "it has no name");
    for (const peri_model_output *other = m->outputs; other < o; other++)
        WANT(strcmp(other->name, o->name) != 0, "its name is another's, too");
    WANT(value >= 0 && value < m->n_values && m->values[value].made_by >= 0,
         "its value does not exist, or is no operation's result");
    o->columns = m->values[value].columns;
    m->values[value].last = m->n_operations;
    return PERI_OK;
}

/** Texts are never NULL from here on. */
static peri_status check_texts(peri_model *m)
{
    if (!m->name) m->name = peri__strdup("");
    if (!m->producer) m->producer = peri__strdup("");
    return m->name && m->producer ? PERI_OK : PERI_ENOMEM;
}

#define EACH(word, count, call)                                                                                        \
    for (c.kind = word, c.n = 0; c.n < count; c.n++) PERI_TRY(call)

/** All but sections. @alone: as in a checker. */
static peri_status check_parts(peri_model *m, const char *what, bool alone)
{
    checker c = {.m = m, .what = what, .alone = alone};
    PERI_TRY(check_texts(m));
    if (m->n_outputs == 0) return peri__fail(PERI_EFORMAT, "%s: it has no outputs", what);
    if (m->n_inputs > MOST_NAMED || m->n_outputs > MOST_NAMED)
        return peri__fail(PERI_EFORMAT, "%s: %d inputs and %d outputs, allowed: up to %d of each", what, m->n_inputs,
                          m->n_outputs, MOST_NAMED);
    if (!(m->longest = peri__alloc_zero(sizeof *m->longest * ((size_t)m->n_inputs + 1)))) return PERI_ENOMEM;
    EACH("table", m->n_tables, check_table(&c, &m->tables[c.n], &m->rows[c.n]));
    EACH("map", m->n_maps, check_map(&c, &m->maps[c.n]));
    EACH("input", m->n_inputs, check_input(&c, &m->inputs[c.n]));
    EACH("list", m->n_lists, check_list(&c, &m->lists[c.n]));
    for (int32_t i = 0; i < m->n_lists; i++)
        if (m->lists[i].n_inputs > 0) m->rules[m->lists[i].first].like = -1;
    EACH("input", m->n_inputs, check_numbers(&c, &m->inputs[c.n]));
    EACH("value", m->n_values, check_value(&c, &m->values[c.n]));
    EACH("operation", m->n_operations, peri__check_operation(&c, &m->operations[c.n]));
    EACH("operation", m->n_operations, peri__check_raw(&c, &m->operations[c.n]));
    EACH("output", m->n_outputs, check_output(&c, &m->outputs[c.n], m->output_values[c.n]));
    for (int32_t t = 0; t < m->n_tables; t++) m->table_bytes += m->tables[t].bytes;
    return PERI_OK;
}

/** The formulas, as a model, which is asked about one sample. */
static peri_status check_formulas(peri_model *m, const char *what)
{
    peri_model *f = m->formulas;
    char text[320];
    if (!f) return PERI_OK;
    f->file = m->file;
    f->sections = m->sections;
    f->n_sections = m->n_sections;
    snprintf(text, sizeof text, "%s: formulas", what);
    PERI_TRY(check_parts(f, text, true));
    for (int32_t i = 0; i < f->n_inputs; i++)
        if (f->inputs[i].kind != PERI_MODEL_DENSE)
            return peri__fail(PERI_EFORMAT, "%s: input %d is not dense", text, i);
    return PERI_OK;
}

peri_status peri__model_check(peri_model *m, const char *what)
{
    checker c = {.m = m, .what = what};
    EACH("section", m->n_sections, check_section(&c, &m->sections[c.n]));
    PERI_TRY(check_parts(m, what, false));
    return check_formulas(m, what);
}
