/* SPDX-License-Identifier: Apache-2.0
 *
 * header.c: reads the header of a model file. Keys that are not known are stepped over; what is missing keeps the value
 * that it has here.
 */
#include "../base/buffer.h"
#include "../base/json.h"
#include "model_internal.h"

#include <perilune/collision.h>

/** Entries of one list: a stranger's file shall not take all memory. */
enum { MOST_ENTRIES = 1 << 20 };

/** Make room for entry @n of a list of @size bytes each; the entry is zeroed. False after an error. */
static bool grow_list(peri__json *j, void *list, int32_t n, size_t size)
{
    void **p = list;
    if (n >= MOST_ENTRIES) return peri__json_fail(j, "a list of more than 1,048,576 entries");
    if ((j->status = peri__grow_one(p, n, size)) < 0) return false;
    memset((char *)*p + size * (size_t)n, 0, size);
    return true;
}

static int32_t read_int32(peri__json *j)
{
    int64_t x = peri__json_integer(j);
    if (x < INT32_MIN || x > INT32_MAX) peri__json_fail(j, "a number beyond 32 bits");
    return (int32_t)x;
}

static char *read_text(peri__json *j)
{
    char text[PERI__MODEL_TEXT];
    if (!peri__json_text(j, text, sizeof text)) return NULL;
    char *copy = peri__strdup(text);
    if (!copy) j->status = PERI_ENOMEM;
    return copy;
}

/** Replace a text that was there; a key may come twice in a stranger's file. */
static void set_text(peri__json *j, char **to)
{
    peri__free(*to);
    *to = read_text(j);
}

/** A number whose bits stand there as 16 hexadecimal digits. */
static double read_hex_number(peri__json *j)
{
    uint64_t bits = peri__json_hex(j);
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/** true or false, as 1 or 0. */
static bool read_flag(peri__json *j)
{
    int64_t x = peri__json_integer(j);
    if (x != 0 && x != 1) peri__json_fail(j, "0 or 1 is wanted");
    return x == 1;
}

/** The name of a tensor, which may be long. */
static void set_source(peri__json *j, char **to)
{
    char text[PERI__MODEL_SOURCE];
    peri__free(*to);
    *to = NULL;
    if (peri__json_text(j, text, sizeof text) && !(*to = peri__strdup(text))) j->status = PERI_ENOMEM;
}

#define KEY(text) (!strcmp(key, text))

static void read_section(peri__json *j, peri_model *m)
{
    char key[32];
    if (!grow_list(j, &m->sections, m->n_sections, sizeof *m->sections)) return;
    peri__model_section *s = &m->sections[m->n_sections++];
    s->formula = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("offset")) s->offset = peri__json_integer(j);
        else if (KEY("bytes")) s->bytes = peri__json_integer(j);
        else if (KEY("checksum")) s->checksum = peri__json_hex(j);
        else if (KEY("source")) set_source(j, &s->source);
        else if (KEY("first")) s->first = peri__json_integer(j);
        else if (KEY("of")) s->of = peri__json_integer(j);
        else if (KEY("turned")) s->turned = read_flag(j);
        else if (KEY("formula")) s->formula = read_int32(j);
        else peri__json_skip(j, NULL, NULL);
    }
}

static void read_table(peri__json *j, peri_model *m)
{
    char key[32];
    if (!grow_list(j, &m->rows, m->n_tables, sizeof *m->rows)) return;
    if (!grow_list(j, &m->tables, m->n_tables, sizeof *m->tables)) return;
    peri_model_table *t = &m->tables[m->n_tables];
    peri__model_rows *r = &m->rows[m->n_tables++];
    r->section = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("name")) set_text(j, (char **)(uintptr_t)&t->name);
        else if (KEY("dtype")) set_text(j, (char **)(uintptr_t)&t->dtype);
        else if (KEY("rows")) t->rows = peri__json_integer(j);
        else if (KEY("columns")) t->columns = peri__json_integer(j);
        else if (KEY("section")) r->section = read_int32(j);
        else peri__json_skip(j, NULL, NULL);
    }
}

/** One of two words, as 0 or 1. */
static int32_t read_either(peri__json *j, const char *zero, const char *one, const char *wrong)
{
    char text[16];
    if (!peri__json_text(j, text, sizeof text)) return 0;
    if (strcmp(text, zero) != 0 && strcmp(text, one) != 0) peri__json_fail(j, wrong);
    return !strcmp(text, one);
}

/** Which of @words[n] it is, which begin at number @first; -1: none. */
static int32_t read_one_of(peri__json *j, const char *const *words, int32_t n, int32_t first)
{
    char text[16];
    if (!peri__json_text(j, text, sizeof text)) return -1;
    for (int32_t i = 0; i < n; i++)
        if (!strcmp(text, words[i])) return first + i;
    return -1;
}

static void read_input(peri__json *j, peri_model *m)
{
    static const char *const kinds[] = {"dense", "ids", "whole", "numbers"};
    char key[32];
    if (!grow_list(j, &m->rules, m->n_inputs, sizeof *m->rules) ||
        !grow_list(j, &m->inputs, m->n_inputs, sizeof *m->inputs))
        return;
    peri__model_rule *rule = &m->rules[m->n_inputs];
    peri_model_input *i = &m->inputs[m->n_inputs++];
    *rule = (peri__model_rule){.like = -1, .counts = -1};
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("name")) set_text(j, (char **)(uintptr_t)&i->name);
        else if (KEY("kind")) i->kind = read_one_of(j, kinds, 4, PERI_MODEL_DENSE);
        else if (KEY("columns")) i->columns = peri__json_integer(j);
        else if (KEY("rows")) i->rows = peri__json_integer(j);
        else if (KEY("unknown"))
            i->unknown = read_either(j, "refuse", "skip", "what becomes of unknown ids is 'refuse' or 'skip'");
        else if (KEY("weighted")) i->weighted = read_flag(j);
        else if (KEY("optional")) i->optional = read_flag(j);
        else if (KEY("finite")) i->finite = read_flag(j);
        else if (KEY("missing")) i->missing = (float)read_hex_number(j);
        else if (KEY("length")) rule->length = peri__json_integer(j);
        else if (KEY("counts")) rule->counts = read_int32(j);
        else peri__json_skip(j, NULL, NULL);
    }
}

static void read_value(peri__json *j, peri_model *m)
{
    char key[32];
    if (!grow_list(j, &m->values, m->n_values, sizeof *m->values)) return;
    peri__model_value *v = &m->values[m->n_values++];
    v->input = v->section = v->made_by = v->last = v->list = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("columns")) v->columns = peri__json_integer(j);
        else if (KEY("input")) v->input = read_int32(j);
        else if (KEY("section")) v->section = read_int32(j);
        else if (KEY("list")) v->list = read_int32(j);
        else peri__json_skip(j, NULL, NULL);
    }
}

static void read_list(peri__json *j, peri_model *m)
{
    char key[32];
    if (!grow_list(j, &m->lists, m->n_lists, sizeof *m->lists)) return;
    peri__model_list *l = &m->lists[m->n_lists++];
    l->of = l->made_by = l->first = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("inputs")) {
            for (peri__json_enter(j, '['); peri__json_item(j) &&
                 grow_list(j, &l->inputs, l->n_inputs, sizeof *l->inputs);)
                l->inputs[l->n_inputs++] = read_int32(j);
        } else if (KEY("of")) {
            l->of = read_int32(j);
        } else {
            peri__json_skip(j, NULL, NULL);
        }
    }
}

static void read_bag(peri__json *j, peri__model_operation *o)
{
    char key[32];
    if (!grow_list(j, &o->bags, o->n_bags, sizeof *o->bags)) return;
    peri__model_bag *b = &o->bags[o->n_bags++];
    b->input = b->table = b->map = b->positions = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("input")) b->input = read_int32(j);
        else if (KEY("table")) b->table = read_int32(j);
        else if (KEY("map")) b->map = read_int32(j);
        else if (KEY("positions")) b->positions = read_int32(j);
        else if (KEY("pooling")) b->pooling = read_either(j, "sum", "mean", "pooling is 'sum' or 'mean'");
        else peri__json_skip(j, NULL, NULL);
    }
}

static void read_map(peri__json *j, peri_model *m)
{
    static const char *const spreads[] = {"hash", "modulo", "range"}, *const misses[] = {"row", "hash", "drop",
                                                                                         "error"};
    char key[32];
    if (!grow_list(j, &m->maps, m->n_maps, sizeof *m->maps)) return;
    peri__model_map *map = &m->maps[m->n_maps++];
    map->ids = map->index = map->spread = map->miss = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("ids")) {
            map->ids = read_int32(j);
        } else if (KEY("index")) {
            map->index = read_int32(j);
        } else if (KEY("free")) {
            map->free = (int64_t)peri__json_hex(j);
        } else if (KEY("segments")) {
            for (peri__json_enter(j, '[');
                 peri__json_item(j) && grow_list(j, &map->segments, map->n_segments, sizeof *map->segments);)
                map->segments[map->n_segments++] = peri__json_integer(j);
        } else if (KEY("spread")) {
            map->spread = read_one_of(j, spreads, 3, PERI_SPREAD_HASH);
        } else if (KEY("block")) {
            map->block = peri__json_integer(j);
        } else if (KEY("unknown")) {
            map->miss = read_one_of(j, misses, 4, PERI_MISS_ROW);
        } else if (KEY("aside")) {
            map->aside = read_flag(j);
        } else {
            peri__json_skip(j, NULL, NULL);
        }
    }
}

const char *const peri__model_operation_names[PERI__MODEL_OPERATION_COUNT] = {
#define X(name, least, most) #name,
    PERI__MODEL_OPERATIONS(X)
#undef X
};

static int32_t read_operation_kind(peri__json *j)
{
    char text[32];
    if (!peri__json_text(j, text, sizeof text)) return -1;
    for (int32_t k = 0; k < PERI__MODEL_OPERATION_COUNT; k++)
        if (!strcmp(text, peri__model_operation_names[k])) return k;
    if (j->status >= 0)
        j->status =
            peri__fail(PERI_EUNSUPPORTED, "%s: it has an operation '%s', which this version of Perilune does not know",
                       j->what, text);
    return -1;
}

/** What a matrix or its products are of; -1: unknown. */
static int32_t matrix_dtype(peri__json *j)
{
    static const char *const names[] = {"f32", "bf16", "int8"};
    static const int32_t dtypes[] = {PERI_F32, PERI_BF16, PERI_I8};
    const int32_t which = read_one_of(j, names, 3, 0);
    return which < 0 ? -1 : dtypes[which];
}

static void read_operation(peri__json *j, peri_model *m)
{
    char key[32];
    if (!grow_list(j, &m->operations, m->n_operations, sizeof *m->operations)) return;
    peri__model_operation *o = &m->operations[m->n_operations++];
    o->kind = o->out = o->weight = o->table = o->input = -1;
    o->products = PERI_F32;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("op")) {
            o->kind = read_operation_kind(j);
        } else if (KEY("out")) {
            o->out = read_int32(j);
        } else if (KEY("weight")) {
            o->weight = read_int32(j);
        } else if (KEY("table")) {
            o->table = read_int32(j);
        } else if (KEY("input")) {
            o->input = read_int32(j);
        } else if (KEY("weight_dtype")) {
            o->weight_dtype = matrix_dtype(j);
        } else if (KEY("products")) {
            o->products = matrix_dtype(j);
        } else if (KEY("function")) {
            peri__json_text(j, o->function, sizeof o->function);
        } else if (KEY("in")) {
            for (peri__json_enter(j, '['); peri__json_item(j) && grow_list(j, &o->in, o->n_in, sizeof *o->in);)
                o->in[o->n_in++] = read_int32(j);
        } else if (KEY("sizes")) {
            for (peri__json_enter(j, '['); peri__json_item(j) && grow_list(j, &o->sizes, o->n_sizes, sizeof *o->sizes);)
                o->sizes[o->n_sizes++] = peri__json_integer(j);
        } else if (KEY("numbers")) {
            for (peri__json_enter(j, '['); peri__json_item(j);) {
                double x = read_hex_number(j);
                if (o->n_numbers < PERI__MODEL_NUMBERS) o->numbers[o->n_numbers++] = x;
                else peri__json_fail(j, "too many numbers");
            }
        } else if (KEY("bags")) {
            for (peri__json_enter(j, '['); peri__json_item(j);) read_bag(j, o);
        } else {
            peri__json_skip(j, NULL, NULL);
        }
    }
}

static void read_output(peri__json *j, peri_model *m)
{
    char key[32];
    if (!grow_list(j, &m->output_values, m->n_outputs, sizeof *m->output_values)) return;
    if (!grow_list(j, &m->outputs, m->n_outputs, sizeof *m->outputs)) return;
    const int32_t n = m->n_outputs++;
    m->output_values[n] = -1;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("name")) set_text(j, (char **)(uintptr_t)&m->outputs[n].name);
        else if (KEY("value")) m->output_values[n] = read_int32(j);
        else peri__json_skip(j, NULL, NULL);
    }
}

/** A list, each entry by @one. */
static void read_each(peri__json *j, peri_model *m, void (*one)(peri__json *j, peri_model *m))
{
    for (peri__json_enter(j, '['); peri__json_item(j);) one(j, m);
}

static void read_formulas(peri__json *j, peri_model *m);

/** The value of one key of the header. */
static void read_part(peri__json *j, peri_model *m, const char *key)
{
    if (KEY("name")) set_text(j, &m->name);
    else if (KEY("producer")) set_text(j, &m->producer);
    else if (KEY("step")) m->step = peri__json_integer(j);
    else if (KEY("loose")) set_text(j, &m->loose);
    else if (KEY("sections")) read_each(j, m, read_section);
    else if (KEY("tables")) read_each(j, m, read_table);
    else if (KEY("inputs")) read_each(j, m, read_input);
    else if (KEY("maps")) read_each(j, m, read_map);
    else if (KEY("lists")) read_each(j, m, read_list);
    else if (KEY("values")) read_each(j, m, read_value);
    else if (KEY("operations")) read_each(j, m, read_operation);
    else if (KEY("outputs")) read_each(j, m, read_output);
    else if (KEY("formulas")) read_formulas(j, m);
    else peri__json_skip(j, NULL, NULL);
}

/** Inputs, values, operations and outputs of the model's formulas. */
static void read_formulas(peri__json *j, peri_model *m)
{
    char key[32];
    if (m->formulas) {
        peri__json_fail(j, "formulas twice");
        return;
    }
    if ((j->status = peri__model_new(m->path, &m->formulas)) < 0) return;
    peri__json_enter(j, '{');
    while (peri__json_key(j, key, sizeof key)) {
        if (KEY("inputs") || KEY("values") || KEY("operations") || KEY("outputs")) read_part(j, m->formulas, key);
        else peri__json_skip(j, NULL, NULL);
    }
}

peri_status peri__model_header(peri_model *m, const char *text, int64_t bytes, const char *what)
{
    peri__json j;
    char key[32];
    m->step = -1;
    peri__json_open(&j, text, bytes, what);
    peri__json_enter(&j, '{');
    while (peri__json_key(&j, key, sizeof key)) read_part(&j, m, key);
    return peri__json_close(&j);
}
