/* SPDX-License-Identifier: Apache-2.0
 *
 * request.c: the three forms of a question (request.h) -> columns.
 *
 *     rows      {"instances": [{"age": 0.5, "clicked": [3, 7]}, ...]}
 *     columns   {"inputs": {"age": [0.5, ...], "clicked": [[3, 7], ...]}}
 *     v2        {"inputs": [{"name": "age", "shape": [2], "datatype": "FP32", "data": [0.5, 0.1]},
 *                           {"name": "clicked", "shape": [3], "datatype": "INT64", "data": [3, 7, 4]},
 *                           {"name": "clicked.lengths", "shape": [2], "datatype": "INT64", "data": [2, 1]}]}
 *
 * A v2 tensor may have its data behind the JSON, in binary: then its parameters say binary_data_size.
 */
#include "values.h"

#include <stdlib.h>

enum { KEY_ROOM = 256, MOST_SHAPE = 4 };

/* -- the batch ----------------------------------------------------------------------------------------------------- */

peri_status peri__serve_batch_init(peri__serve_batch *batch, const peri__serve_facts *facts)
{
    size_t n = (size_t)facts->n_inputs + 1;
    *batch = (peri__serve_batch){.facts = facts};
    batch->columns = peri__alloc_zero(n * sizeof *batch->columns);
    batch->problems = peri__alloc_zero(n * sizeof *batch->problems);
    batch->seen = peri__alloc_zero(n * sizeof *batch->seen);
    if (batch->columns && batch->problems && batch->seen) return PERI_OK;
    peri__serve_batch_fini(batch);
    return PERI_ENOMEM;
}

void peri__serve_batch_fini(peri__serve_batch *batch)
{
    for (int32_t f = 0; batch->columns && f < batch->facts->n_inputs; f++) {
        peri__free(batch->columns[f].numbers);
        peri__free(batch->columns[f].ids);
        peri__free(batch->columns[f].offsets);
    }
    peri__free(batch->columns);
    peri__free(batch->problems);
    peri__free(batch->seen);
    *batch = (peri__serve_batch){0};
}

/** Forget all samples from @samples on. */
static void cut_samples(peri__serve_batch *batch, int64_t samples)
{
    for (int32_t f = 0; f < batch->facts->n_inputs; f++) {
        peri__serve_column *c = &batch->columns[f];
        c->n_samples = samples;
        if (batch->facts->inputs[f].kind == PERI__SERVE_NUMBERS) c->n_values = samples * batch->facts->inputs[f].width;
        else c->n_values = samples ? c->offsets[samples] : 0;
    }
    batch->samples = samples;
}

void peri__serve_batch_clear(peri__serve_batch *batch)
{
    cut_samples(batch, 0);
    memset(batch->problems, 0, sizeof *batch->problems * ((size_t)batch->facts->n_inputs + 1));
}

static bool fail_request(peri__serve_reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool fail_request(peri__serve_reader *r, const char *format, ...)
{
    if (r->j->status < 0) return false;
    va_list args;
    va_start(args, format);
    r->j->status = peri__fail_va(PERI_EFORMAT, __FILE__, __LINE__, format, args);
    va_end(args);
    return false;
}

static void forget_seen(peri__serve_reader *r)
{
    memset(r->batch->seen, 0, sizeof(bool) * (size_t)r->batch->facts->n_inputs);
}

/* -- rows and columns ---------------------------------------------------------------------------------------------- */

static bool read_rows(peri__serve_reader *r)
{
    char key[KEY_ROOM];
    int32_t n = r->batch->facts->n_inputs;
    for (peri__json_enter(r->j, '['); peri__json_item(r->j);) {
        forget_seen(r);
        for (peri__json_enter(r->j, '{'); peri__json_key(r->j, key, sizeof key);) {
            int32_t f = peri__serve_find(r, key);
            if (f < 0 || !peri__serve_once(r, f) || !peri__serve_sample(r, f, -1)) return false;
        }
        for (int32_t f = 0; f < n; f++)
            if (!r->batch->seen[f] && !peri__serve_missing(r, f)) return false;
    }
    return r->j->status >= 0;
}

static bool read_columns(peri__serve_reader *r)
{
    char key[KEY_ROOM];
    forget_seen(r);
    for (peri__json_enter(r->j, '{'); peri__json_key(r->j, key, sizeof key);) {
        int32_t f = peri__serve_find(r, key);
        if (f < 0 || !peri__serve_once(r, f)) return false;
        if (peri__json_next(r->j) != '[') return peri__serve_refuse_kind(r, f, "a list, a value for each sample");
        for (peri__json_enter(r->j, '['); peri__json_item(r->j);)
            if (!peri__serve_sample(r, f, -1)) return false;
    }
    return r->j->status >= 0;
}

/** Members of sample @i's list of feature @f. */
static int64_t length_of(const peri__serve_reader *r, int32_t f, int64_t i)
{
    const int64_t *offsets = r->batch->columns[f].offsets;
    return offsets[i + 1] - offsets[i];
}

/** What feature @f has for sample @i fits the list of feature `of`. */
static bool settle_one(peri__serve_reader *r, int32_t f, int64_t i)
{
    const peri__serve_input *in = &r->batch->facts->inputs[f], *of = &r->batch->facts->inputs[in->of];
    const int64_t wanted = length_of(r, in->of, i), sample = i - r->batch->samples;
    if (in->counts) {
        const float x = r->batch->columns[f].numbers[i];
        if (x >= 0 && x <= (float)wanted && x == (float)(int64_t)x) return true;
        return peri__serve_blame(r, f, PERI__SERVE_RANGE,
                                 "feature '%s', sample %lld: %g, allowed: whole numbers 0 to %lld, the length of '%s'",
                                 in->name, (long long)sample, (double)x, (long long)wanted, of->name);
    }
    const int64_t n = length_of(r, f, i);
    if (n == wanted) return true;
    return peri__serve_blame(r, f, PERI__SERVE_KIND,
                             in->same
                                 ? "feature '%s', sample %lld: a list of %lld, wanted: %lld, as long as that of '%s'"
                                 : "feature '%s', sample %lld: %lld numbers, wanted: %lld, one for each of '%s'",
                             in->name, (long long)sample, (long long)n, (long long)wanted, of->name);
}

/** A weight for each id, lists that are as long as others, numbers that count their members; in the samples of this
 *  request. */
static bool settle_lists(peri__serve_reader *r)
{
    const peri__serve_facts *facts = r->batch->facts;
    for (int32_t f = 0; f < facts->n_inputs; f++) {
        const peri__serve_input *in = &facts->inputs[f];
        if (in->kind != PERI__SERVE_WEIGHTS && !in->same && !in->counts) continue;
        for (int64_t i = r->batch->samples; i < r->batch->columns[f].n_samples; i++)
            if (!settle_one(r, f, i)) return false;
    }
    return true;
}

/** All features have as many samples, and missing ones are seen to. */
static bool settle_features(peri__serve_reader *r)
{
    const peri__serve_facts *facts = r->batch->facts;
    int32_t first = -1;
    for (int32_t f = 0; f < facts->n_inputs && r->j->status >= 0; f++) {
        if (!r->batch->seen[f]) continue;
        if (first < 0) first = f;
        if (peri__serve_samples(r, f) != peri__serve_samples(r, first))
            return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s' has %lld samples, '%s' %lld",
                                     facts->inputs[f].name, (long long)peri__serve_samples(r, f),
                                     facts->inputs[first].name, (long long)peri__serve_samples(r, first));
    }
    for (int32_t f = 0; f < facts->n_inputs; f++)
        while (!r->batch->seen[f] && peri__serve_samples(r, f) < (first < 0 ? 1 : peri__serve_samples(r, first)))
            if (!peri__serve_missing(r, f)) return false;
    return r->j->status >= 0;
}

/* -- v2 ------------------------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    int32_t size; /* bytes of a binary element; 0: never binary here */
    bool ids, numbers, is_signed;
} datatypes[] = {{"INT64", 8, true, false, true},   {"UINT64", 8, true, false, false}, {"INT32", 4, true, false, true},
                 {"UINT32", 4, true, false, false}, {"BYTES", 0, true, false, false},  {"FP32", 4, false, true, true},
                 {"FP64", 8, false, true, true}};

/** A tensor of a request, before its data are read. */
typedef struct tensor {
    int64_t shape[MOST_SHAPE];
    int32_t ndim;
    int32_t type;     /* index of datatypes; -1: not said */
    const char *data; /* NULL: not there */
    int64_t bytes;
    bool binary, there;
} tensor;

typedef struct v2 {
    peri__serve_reader *r;
    peri__serve_question *out;
    tensor *tensors;    /* [2 * n_inputs]: of features, then of their lengths */
    const char *binary; /* what follows the JSON */
    int64_t left;
    bool all_binary;
} v2;

static bool read_bool(peri__json *j, bool *out)
{
    const char *at;
    int64_t bytes;
    if (!peri__json_skip(j, &at, &bytes)) return false;
    if (bytes == 4 && memcmp(at, "true", 4) == 0) return *out = true;
    if (bytes == 5 && memcmp(at, "false", 5) == 0) return *out = false, true;
    return peri__json_fail(j, "true or false is wanted");
}

/** How many of the best items a request wants. */
static bool read_best(peri__serve_reader *r, int64_t *k)
{
    const peri__serve_facts *facts = r->batch->facts;
    int64_t most = 0;
    for (int32_t i = 0; i < facts->n_outputs; i++)
        if (facts->outputs[i].best) most = peri__max(most, facts->outputs[i].width);
    if (*k) return peri__json_fail(r->j, "k is there twice");
    *k = peri__json_integer(r->j);
    if (r->j->status < 0 || (*k >= 1 && *k <= most)) return r->j->status >= 0;
    return fail_request(r, "k is %lld, allowed: 1 to %lld, as many items as the model finds", (long long)*k,
                        (long long)most);
}

/** Whether there are outputs of which a request may want fewer numbers. */
static bool finds_items(const peri__serve_facts *facts)
{
    for (int32_t i = 0; i < facts->n_outputs; i++)
        if (facts->outputs[i].best) return true;
    return false;
}

/** The parameters of a request: "binary_data_output" and, where the model finds items, "k"; others mean nothing. */
static bool read_wishes(peri__serve_reader *r, bool *binary, int64_t *k)
{
    char key[KEY_ROOM];
    bool seen = false;
    for (peri__json_enter(r->j, '{'); peri__json_key(r->j, key, sizeof key);) {
        const bool says = strcmp(key, "binary_data_output") == 0;
        if (says && seen) return peri__json_fail(r->j, "a parameter is there twice");
        seen |= says;
        if (says) read_bool(r->j, binary);
        else if (strcmp(key, "k") == 0 && finds_items(r->batch->facts)) read_best(r, k);
        else peri__json_skip(r->j, NULL, NULL);
    }
    return r->j->status >= 0;
}

/** An object of parameters: those that are known here, each once; others mean nothing. @size, @binary: may be NULL. */
static bool read_parameters(peri__json *j, int64_t *size, const char *name, bool *binary)
{
    char key[KEY_ROOM];
    bool seen = false;
    for (peri__json_enter(j, '{'); peri__json_key(j, key, sizeof key);) {
        bool sizes = size && strcmp(key, "binary_data_size") == 0, says = binary && strcmp(key, name) == 0;
        if ((sizes || says) && seen) return peri__json_fail(j, "a parameter is there twice");
        seen |= sizes || says;
        if (sizes) *size = peri__json_integer(j);
        else if (says) read_bool(j, binary);
        else peri__json_skip(j, NULL, NULL);
    }
    return j->status >= 0;
}

static bool read_shape(peri__json *j, tensor *t)
{
    t->ndim = 0;
    for (peri__json_enter(j, '['); peri__json_item(j);) {
        if (t->ndim == MOST_SHAPE) return peri__json_fail(j, "a shape has too many dimensions");
        int64_t n = peri__json_integer(j);
        if (n < -1 || n > INT32_MAX) return peri__json_fail(j, "a shape is out of range");
        t->shape[t->ndim++] = n;
    }
    return j->status >= 0;
}

static bool read_type(peri__json *j, tensor *t)
{
    char name[16];
    if (!peri__json_text(j, name, sizeof name)) return false;
    for (int32_t i = 0; i < (int32_t)(sizeof datatypes / sizeof *datatypes); i++)
        if (strcmp(datatypes[i].name, name) == 0) return t->type = i, true;
    return peri__json_fail(j, "datatype: allowed are FP32, FP64, INT64, UINT64, INT32, UINT32, BYTES");
}

/** Whose tensor it is: the feature's, or that of its lengths. */
static tensor *place_of_tensor(v2 *v, const char *name)
{
    const peri__serve_facts *facts = v->r->batch->facts;
    static const char suffix[] = ".lengths";
    size_t n = strlen(name), s = sizeof suffix - 1;
    for (int32_t f = 0; n > s && strcmp(name + n - s, suffix) == 0 && f < facts->n_inputs; f++) {
        const peri__serve_input *in = &facts->inputs[f];
        if (in->kind != PERI__SERVE_IDS || strncmp(in->name, name, n - s) != 0 || in->name[n - s]) continue;
        tensor *t = &v->tensors[facts->n_inputs + f];
        if (!t->there) return t;
        peri__serve_blame(v->r, f, PERI__SERVE_REPEATED, "'%.100s' is there twice", name);
        return NULL;
    }
    int32_t f = peri__serve_find(v->r, name);
    return f < 0 || !peri__serve_once(v->r, f) ? NULL : &v->tensors[f];
}

/** A tensor: what it says, and where its data are. */
static bool read_tensor(v2 *v)
{
    peri__json *j = v->r->j;
    char key[KEY_ROOM], name[KEY_ROOM] = "";
    enum { NAME = 1, SHAPE = 2, TYPE = 4, DATA = 8, PARAMETERS = 16 };
    tensor t = {.type = -1};
    int64_t size = -1;
    int seen = 0;
    for (peri__json_enter(j, '{'); peri__json_key(j, key, sizeof key);) {
        int which = strcmp(key, "name") == 0         ? NAME
                    : strcmp(key, "shape") == 0      ? SHAPE
                    : strcmp(key, "datatype") == 0   ? TYPE
                    : strcmp(key, "data") == 0       ? DATA
                    : strcmp(key, "parameters") == 0 ? PARAMETERS
                                                     : 0;
        if (!which)
            return fail_request(
                v->r, "inputs: '%.100s' is no key of a tensor; allowed: name, shape, datatype, data, parameters", key);
        if (seen & which) return fail_request(v->r, "inputs: '%s' is there twice in a tensor", key);
        seen |= which;
        if (which == NAME) peri__json_text(j, name, sizeof name);
        else if (which == SHAPE) read_shape(j, &t);
        else if (which == TYPE) read_type(j, &t);
        else if (which == DATA) {
            j->not_numbers = true;
            peri__json_skip(j, &t.data, &t.bytes);
            j->not_numbers = false;
        }
        else read_parameters(j, &size, NULL, NULL);
        if (j->status < 0) return false;
    }
    if (j->status < 0) return false;
    if ((seen & (NAME | SHAPE | TYPE)) != (NAME | SHAPE | TYPE))
        return fail_request(v->r, "inputs: a tensor has name, shape and datatype");
    if (!t.data == (size < 0))
        return fail_request(v->r, "inputs: tensor '%.100s' has data or binary_data_size, one of both", name);
    if (size >= 0) {
        if (size > v->left)
            return fail_request(v->r, "tensor '%.100s': %lld bytes, and %lld are left in the body", name,
                                (long long)size,
                        (long long)v->left);
        t.data = v->binary, t.bytes = size, t.binary = true;
        v->binary += size, v->left -= size;
    }
    tensor *to = place_of_tensor(v, name);
    if (!to) return false;
    t.there = true;
    *to = t;
    return true;
}

static bool read_output(v2 *v)
{
    peri__json *j = v->r->j;
    const peri__serve_facts *facts = v->r->batch->facts;
    char key[KEY_ROOM], name[KEY_ROOM] = "";
    bool binary = v->all_binary;
    for (peri__json_enter(j, '{'); peri__json_key(j, key, sizeof key);) {
        if (strcmp(key, "name") == 0) peri__json_text(j, name, sizeof name);
        else if (strcmp(key, "parameters") == 0) read_parameters(j, NULL, "binary_data", &binary);
        else return fail_request(v->r, "outputs: '%.100s' is no key of an output; allowed: name, parameters", key);
    }
    for (int32_t k = 0; k < facts->n_outputs && j->status >= 0; k++) {
        if (strcmp(facts->outputs[k].name, name) != 0) continue;
        if (v->out->wanted[k]) return fail_request(v->r, "output '%s' is there twice", name);
        v->out->wanted[k] = true;
        v->out->binary[k] = binary;
        return true;
    }
    return fail_request(v->r, "the model has no output '%.100s'", name);
}

static bool read_v2_keys(v2 *v)
{
    peri__json *j = v->r->j;
    enum { ID = 1, INPUTS = 2, OUTPUTS = 4, PARAMETERS = 8 };
    char key[KEY_ROOM];
    int seen = 0;
    const char *outputs = NULL;
    int64_t bytes = 0;
    for (peri__json_enter(j, '{'); peri__json_key(j, key, sizeof key);) {
        int which = strcmp(key, "id") == 0           ? ID
                    : strcmp(key, "inputs") == 0     ? INPUTS
                    : strcmp(key, "outputs") == 0    ? OUTPUTS
                    : strcmp(key, "parameters") == 0 ? PARAMETERS
                                                     : 0;
        if (!which) return fail_request(v->r,
                                        "'%.100s' is no key of a request; allowed: id, inputs, outputs, parameters",
                                            key);
        if (seen & which) return fail_request(v->r, "'%s' is there twice", key);
        seen |= which;
        if (which == ID) peri__json_text(j, v->out->id, sizeof v->out->id);
        else if (which == OUTPUTS) peri__json_skip(j, &outputs, &bytes); /* after parameters, wherever they stand */
        else if (which == PARAMETERS) read_wishes(v->r, &v->all_binary, &v->out->k);
        else {
            for (peri__json_enter(j, '['); peri__json_item(j);)
                if (!read_tensor(v)) return false;
        }
        if (j->status < 0) return false;
        if (which == ID && !peri__is_utf8(v->out->id)) return fail_request(v->r,
                                                                           "id is not UTF-8, and the answer has it");
    }
    if (j->status < 0 || peri__json_close(j) < 0) return false;
    if (!(seen & INPUTS)) return fail_request(v->r, "a request has inputs");
    if (v->left) return fail_request(v->r, "%lld bytes of the body belong to no tensor", (long long)v->left);
    for (int32_t k = 0; !outputs && k < v->r->batch->facts->n_outputs; k++)
        v->out->wanted[k] = true, v->out->binary[k] = v->all_binary;
    if (!outputs) return true;
    peri__json_open(j, outputs, bytes, "outputs of the request");
    for (peri__json_enter(j, '['); peri__json_item(j);)
        if (!read_output(v)) return false;
    return j->status >= 0;
}

/* -- data of v2 ---------------------------------------------------------------------------------------------------- */

/** Element @i of binary data, as an id or a number; whole ones may be numbers, too. */
static bool add_binary(peri__serve_reader *r, int32_t f, const tensor *t, int64_t i)
{
    int32_t size = datatypes[t->type].size;
    const char *at = t->data + i * size;
    const bool is_signed = datatypes[t->type].is_signed;
    if (datatypes[t->type].numbers) {
        float x;
        double d;
        if (size == 4) memcpy(&x, at, 4), d = x;
        else memcpy(&d, at, 8);
        return peri__serve_add_number(r, f, d);
    }
    int64_t x;
    if (size == 8) memcpy(&x, at, 8);
    else {
        int32_t n;
        memcpy(&n, at, 4);
        x = is_signed ? n : (int64_t)(uint32_t)n;
    }
    if (r->batch->facts->inputs[f].kind != PERI__SERVE_IDS) /* rounded once, to f32 */
        return peri__serve_add_number(r, f, (double)(is_signed ? (float)x : (float)(uint64_t)x));
    bool negative = is_signed && x < 0;
    return peri__serve_add_id(r, f, negative ? 0 - (uint64_t)x : (uint64_t)x, negative);
}

/** The text at @at, the next one of binary BYTES: four bytes say its length. */
static bool add_text(peri__serve_reader *r, int32_t f, const char **at, const char *end)
{
    uint32_t bytes = 0;
    const bool head = end - *at >= (int64_t)sizeof bytes;
    if (head) memcpy(&bytes, *at, sizeof bytes);
    if (!head || end - *at - (int64_t)sizeof bytes < bytes)
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s': its bytes end in the middle of a text",
                                 r->batch->facts->inputs[f].name);
    const char *text = *at + sizeof bytes;
    *at = text + bytes;
    return peri__serve_add_text(r, f, text, *at);
}

/** @samples samples of @each values (@lengths[i], if given), which stand one after the other. */
static bool read_flat(peri__serve_reader *r, int32_t f, const tensor *t, int64_t samples, int64_t each,
                      const int64_t *lengths)
{
    bool numbers = r->batch->facts->inputs[f].kind != PERI__SERVE_IDS;
    const char *name = r->batch->facts->inputs[f].name;
    int64_t total = lengths ? peri__sum(lengths, samples) : samples * each, at = 0;
    const bool texts = t->binary && !datatypes[t->type].size;
    const char *text = t->data;
    if (t->binary && !texts && t->bytes != total * datatypes[t->type].size)
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s': %lld bytes, wanted: %lld", name,
                                 (long long)t->bytes, (long long)(total * datatypes[t->type].size));
    if (!t->binary) peri__json_enter(r->j, '[');
    for (int64_t i = 0; i < samples; i++) {
        for (int64_t k = lengths ? lengths[i] : each; k > 0; k--, at++) {
            if (t->binary) {
                if (!(texts ? add_text(r, f, &text, t->data + t->bytes) : add_binary(r, f, t, at))) return false;
            } else if (!peri__json_item(r->j)) {
                return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s': %lld values, wanted: %lld", name,
                                         (long long)at, (long long)total);
            } else if (!(numbers ? peri__serve_number(r, f) : peri__serve_id(r, f))) return false;
        }
        if (!peri__serve_end(r, f)) return false;
    }
    if (texts ? text < t->data + t->bytes : !t->binary && peri__json_item(r->j))
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s': more values than the %lld that its shape says",
                                 name, (long long)total);
    return r->j->status >= 0;
}

/** The lengths of lists of ids. @out new (peri__free). */
static bool read_lengths(peri__serve_reader *r, int32_t f, const tensor *t, int64_t values, int64_t **out)
{
    int64_t n = t->ndim == 1 ? t->shape[0] : -1, sum = 0;
    int32_t size = datatypes[t->type].size;
    const peri__serve_input *in = &r->batch->facts->inputs[f];
    const char *name = in->kind == PERI__SERVE_WEIGHTS ? r->batch->facts->inputs[in->of].name : in->name;
    if (n < 0 || n > r->rules->most_samples || !size || !datatypes[t->type].ids)
        return peri__serve_blame(r, f, PERI__SERVE_KIND,
                                 "'%s.lengths': wanted: whole numbers of shape [samples], at most %lld", name,
                                 (long long)r->rules->most_samples);
    int64_t *lengths = *out = peri__alloc((size_t)(n + 1) * sizeof *lengths);
    if (!lengths) return r->j->status = PERI_ENOMEM, false;
    if (t->binary && t->bytes != n * size)
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "'%s.lengths': %lld bytes, wanted: %lld", name,
                                 (long long)t->bytes, (long long)(n * size));
    if (!t->binary) peri__json_open(r->j, t->data, t->bytes, name), peri__json_enter(r->j, '[');
    for (int64_t i = 0; i < n; i++) {
        int32_t four;
        if (!t->binary) lengths[i] = peri__json_item(r->j) ? peri__json_integer(r->j) : -1;
        else if (size == 8) memcpy(&lengths[i], t->data + i * 8, 8);
        else memcpy(&four, t->data + i * 4, 4), lengths[i] = four;
        if (r->j->status < 0) return false;
        if (lengths[i] < 0 || lengths[i] > values - sum)
            return peri__serve_blame(r, f, PERI__SERVE_KIND, "'%s.lengths' do not add up to the %lld values of '%s'",
                                     name, (long long)values, in->name);
        sum += lengths[i];
    }
    if (sum != values || (!t->binary && peri__json_item(r->j)))
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "'%s.lengths' do not add up to the %lld values of '%s'", name,
                                 (long long)values, in->name);
    return r->j->status >= 0;
}

/** Data that are lists in a list, a sample each. @each: -1: of any length. */
static bool read_nested(peri__serve_reader *r, int32_t f, int64_t samples, int64_t each)
{
    for (peri__json_enter(r->j, '['); peri__json_item(r->j);)
        if (!peri__serve_sample(r, f, each)) return false;
    if (r->j->status >= 0 && peri__serve_samples(r, f) != samples)
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s': %lld samples, and its shape says %lld",
                                 r->batch->facts->inputs[f].name, (long long)peri__serve_samples(r, f),
                                 (long long)samples);
    return r->j->status >= 0;
}

/** Whether the data are lists in a list. */
static bool data_is_nested(const tensor *t)
{
    if (t->binary) return false;
    for (int64_t i = 1; i < t->bytes; i++)
        if (!strchr(" \n\t\r", t->data[i])) return t->data[i] == '[';
    return false;
}

static bool read_data(v2 *v, int32_t f)
{
    peri__serve_reader *r = v->r;
    const peri__serve_input *in = &r->batch->facts->inputs[f];
    const tensor *t = &v->tensors[f],
                 *l = &v->tensors[r->batch->facts->n_inputs + (in->kind == PERI__SERVE_WEIGHTS ? in->of : f)];
    bool ids = in->kind == PERI__SERVE_IDS, ragged = in->kind != PERI__SERVE_NUMBERS, columns = t->ndim == 2;
    int64_t n = t->shape[0], each = columns ? t->shape[1] : 1;
    if (ids ? !datatypes[t->type].ids : !datatypes[t->type].size)
        return peri__serve_blame(r, f, PERI__SERVE_KIND, "feature '%s': datatype %s, wanted: %s", in->name,
                                 datatypes[t->type].name,
                                 ids ? "INT64, UINT64, INT32, UINT32 or BYTES" : "FP32, FP64 or whole numbers");
    bool fits = t->ndim >= 1 && t->ndim <= 2 && n >= 0 &&
                (!ragged    ? each == in->width
                 : l->there ? !columns
                            : each >= 0 || data_is_nested(t));
    if (!fits)
        return peri__serve_blame(r, f, PERI__SERVE_KIND,
                                 !ragged ? "feature '%s': wanted: shape [samples, %lld]"
                                         : "feature '%s': wanted: shape [ids] with '.lengths' beside, [samples, ids "
                                           "each] or, of lists in a list, "
                                           "[samples, -1]",
                                 in->name, (long long)in->width);
    if (!l->there && n > r->rules->most_samples)
        return fail_request(r, "more than %lld samples in a request (perilune serve --samples)",
                            (long long)r->rules->most_samples);
    int64_t *lengths = NULL;
    if (l->there && !read_lengths(r, f, l, n, &lengths)) return peri__free(lengths), false;
    if (!t->binary) peri__json_open(r->j, t->data, t->bytes, in->name);
    bool good = lengths     ? read_flat(r, f, t, l->shape[0], 0, lengths)
                : data_is_nested(t) ? read_nested(r, f, n, each)
                            : read_flat(r, f, t, n, each, NULL);
    peri__free(lengths);
    return good;
}

static bool read_v2(peri__serve_reader *r, peri__serve_question *out, const char *binary, int64_t left)
{
    int32_t n = r->batch->facts->n_inputs;
    v2 v = {.r = r,
            .out = out,
            .binary = binary,
            .left = left,
            .tensors = peri__alloc_zero(sizeof(tensor) * (size_t)(2 * n + 1))};
    if (!v.tensors) return r->j->status = PERI_ENOMEM, false;
    forget_seen(r);
    bool good = read_v2_keys(&v);
    for (int32_t f = 0; f < n && good; f++) {
        const peri__serve_input *in = &r->batch->facts->inputs[f], *of = &r->batch->facts->inputs[in->of];
        if (r->batch->seen[f] && in->kind == PERI__SERVE_WEIGHTS && !r->batch->seen[in->of] && !of->optional)
            good = peri__serve_blame(r, in->of, PERI__SERVE_MISSING, "feature '%s' is missing, and '%s' is there",
                                     of->name, in->name);
        else if (r->batch->seen[f]) good = read_data(&v, f);
        else if (v.tensors[n + f].there)
            good = peri__serve_blame(r, f, PERI__SERVE_MISSING, "feature '%s' is missing, and its lengths are there",
                                     r->batch->facts->inputs[f].name);
    }
    peri__free(v.tensors);
    return good && settle_features(r);
}

/* -- a request ----------------------------------------------------------------------------------------------------- */

/** {"instances": ...} or {"inputs": {...}}, and signature_name, which TensorFlow Serving has. */
static bool read_v1(peri__serve_reader *r, peri__serve_question *out)
{
    peri__json *j = r->j;
    char key[KEY_ROOM], signature[64];
    bool data = false, named = false;
    for (peri__json_enter(j, '{'); peri__json_key(j, key, sizeof key);) {
        bool rows = strcmp(key, "instances") == 0, columns = strcmp(key, "inputs") == 0,
             signs = strcmp(key, "signature_name") == 0;
        if (strcmp(key, "k") == 0 && finds_items(r->batch->facts)) {
            if (!read_best(r, &out->k)) return false;
            continue;
        }
        if (!rows && !columns && !signs)
            return fail_request(r, "'%.100s' is no key of a request; allowed: instances, inputs, signature_name", key);
        if (signs ? named : data)
            return fail_request(r, signs ? "signature_name is there twice" : "a request has instances or inputs, once");
        if (signs) {
            named = true;
            if (!peri__json_text(j, signature, sizeof signature)) return false;
            if (strcmp(signature, "serving_default") != 0)
                return fail_request(r, "signature_name '%s', allowed: serving_default", signature);
            continue;
        }
        data = true;
        out->form = rows ? PERI__SERVE_ROWS : PERI__SERVE_COLUMNS;
        if (!(rows ? read_rows(r) : read_columns(r) && settle_features(r))) return false;
    }
    if (j->status < 0 || peri__json_close(j) < 0) return false;
    return data || fail_request(r, "a request has instances or inputs");
}

peri_status peri__serve_read(peri__serve_batch *batch, const peri__serve_rules *rules, bool v2_form, const char *body,
                             int64_t bytes, int64_t json_bytes, peri__serve_question *out)
{
    peri__json j;
    peri__serve_reader r = {.j = &j, .batch = batch, .rules = rules};
    bool good;
    memset(out, 0, sizeof *out);
    out->first = batch->samples;
    if (json_bytes > bytes || (json_bytes >= 0 && !v2_form))
        return peri__fail(PERI_EFORMAT,
                          v2_form ? "Inference-Header-Content-Length: %lld, and the body has %lld bytes"
                                  : "Inference-Header-Content-Length: %lld: binary tensors are for /v2",
                          (long long)json_bytes, (long long)bytes);
    if (json_bytes < 0) json_bytes = bytes;
    peri__json_open(&j, body, json_bytes, "the request");
    if (v2_form) {
        out->form = PERI__SERVE_V2;
        good = read_v2(&r, out, body + json_bytes, bytes - json_bytes);
    } else {
        for (int32_t k = 0; k < batch->facts->n_outputs; k++) out->wanted[k] = true;
        good = read_v1(&r, out);
    }
    int64_t samples = batch->facts->n_inputs ? batch->columns[0].n_samples : 0;
    good = good && settle_lists(&r);
    if (!good) {
        cut_samples(batch, batch->samples);
        return j.status < 0 ? j.status : peri__fail(PERI_EFORMAT, "the request cannot be read");
    }
    out->samples = samples - batch->samples;
    batch->samples = samples;
    return PERI_OK;
}
