/* SPDX-License-Identifier: Apache-2.0
 *
 * answer.c: outputs of a batch -> the answer to one of its questions; and what the server says of its model.
 */
#include "request.h"

#include "../base/buffer.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/** Whole numbers up to it are printed without an exponent, as readers of the numbers of items want them. */
enum { MOST_WHOLE = 1 << 24 };

/** Print @x as peri__serve_print does, without reading texts back, if it lies between 1e-4 and 1e5 as most answers do;
 *  returns 0 otherwise. x * 10^places is exact in a double there: 24 bits by the 28 of 5^12. A text is read as @x if it
 *  is nearer to it than half of the distance to the next float; none lies in the middle, since that would take more
 *  decimal places than 9 digits have. (Below a power of two floats are half as far apart. Of the 13 that are not whole
 *  no text lies where that matters: test_serve_read.c tries them all.) */
static int print_middle(char *to, float x)
{
    static const double tens[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12};
    const double size = fabsf(x);
    int exponent, first = 4, places = 0; /* the first digit stands for 10^first */
    if (!(size >= 1e-4 && size < 1e5)) return 0;
    while (size * 1e4 < tens[first + 4]) first--;
    frexp(size, &exponent);
    const double half = ldexp(1, exponent - 25);
    double whole = 0;
    for (int digits = 6; digits <= 9; digits++) {
        places = digits - 1 - first;
        const double exact = size * tens[places];
        whole = rint(exact);
        if (fabs(whole - exact) < half * tens[places]) break;
    }
    char back[32]; /* the text from its end */
    int64_t n = (int64_t)whole;
    int length = 0;
    for (; places > 1 && n % 10 == 0; places--) n /= 10;
    for (; places > 0; places--, n /= 10) back[length++] = (char)('0' + n % 10);
    back[length++] = '.';
    for (; n || back[length - 1] == '.'; n /= 10) back[length++] = (char)('0' + n % 10);
    if (x < 0) back[length++] = '-';
    for (int i = 0; i < length; i++) to[i] = back[length - 1 - i];
    to[length] = 0;
    return length;
}

int peri__serve_print(char *to, float x)
{
    if (x == 0 && signbit(x)) return snprintf(to, 32, "-0.0"); /* some readers take -0 for the whole number 0 */
    if (fabsf(x) <= MOST_WHOLE && x == (float)(int32_t)x) return snprintf(to, 32, "%d", (int)x);
    int n = print_middle(to, x);
    if (n) return n;
    /* texts of 6 digits survive, but for the smallest numbers */
    for (int digits = fabsf(x) < FLT_MIN ? 1 : 6; digits <= 9; digits++) {
        n = snprintf(to, 32, "%.*g", digits, (double)x);
        if (strtof(to, NULL) == x) break;
    }
    return n;
}

static void print_number(peri__buffer *b, float x)
{
    char text[32];
    peri__buffer_append(b, text, peri__serve_print(text, x));
}

static void print_word(peri__buffer *b, const char *text) { peri__buffer_append(b, text, (int64_t)strlen(text)); }

/** The first @n numbers of a sample of @width: one alone, or a list. */
static void print_sample(peri__buffer *b, const float *numbers, int64_t n, int64_t width)
{
    if (width != 1) print_word(b, "[");
    for (int64_t i = 0; i < n; i++) {
        if (i) print_word(b, ",");
        print_number(b, numbers[i]);
    }
    if (width != 1) print_word(b, "]");
}

/** An answer while it is written. */
typedef struct writer {
    peri__buffer *b;
    const peri__serve_facts *facts;
    const peri__serve_question *q;
    float *const *outputs;
    int64_t *const *offsets;
} writer;

/** Where sample @i's numbers of output @k begin, counted in widths. */
static int64_t place_of_sample(const writer *w, int32_t k, int64_t i)
{
    return w->facts->outputs[k].listed ? w->offsets[k][i] : i;
}
static int64_t sample_begin(const writer *w, int32_t k) { return place_of_sample(w, k, w->q->first); }
static int64_t sample_end(const writer *w, int32_t k) { return place_of_sample(w, k, w->q->first + w->q->samples); }

/** How many of output @k's numbers the question wants. */
static int64_t numbers_shown(const writer *w, int32_t k)
{
    const peri__serve_output *o = &w->facts->outputs[k];
    return o->best && w->q->k > 0 ? peri__min(w->q->k, o->width) : o->width;
}

/** What output @k has for sample @i: its numbers, or a list of those of each of its members. */
static void print_output(const writer *w, int32_t k, int64_t i)
{
    const int64_t width = w->facts->outputs[k].width;
    if (!w->facts->outputs[k].listed) return print_sample(w->b, w->outputs[k] + i * width, numbers_shown(w, k), width);
    print_word(w->b, "[");
    for (int64_t n = w->offsets[k][i]; n < w->offsets[k][i + 1]; n++) {
        if (n > w->offsets[k][i]) print_word(w->b, ",");
        print_sample(w->b, w->outputs[k] + n * width, width, width);
    }
    print_word(w->b, "]");
}

static peri_status check_finite(const writer *w)
{
    for (int32_t k = 0; k < w->facts->n_outputs; k++) {
        const int64_t width = w->facts->outputs[k].width;
        int64_t sample = w->q->first;
        for (int64_t i = sample_begin(w, k) * width; w->q->wanted[k] && i < sample_end(w, k) * width; i++) {
            while (i >= place_of_sample(w, k, sample + 1) * width) sample++;
            if (!isfinite(w->outputs[k][i]))
                return peri__fail(PERI_EINVAL, "output '%s' of sample %lld is %f", w->facts->outputs[k].name,
                                  (long long)(sample - w->q->first), (double)w->outputs[k][i]);
        }
    }
    return PERI_OK;
}

/** {"predictions": [...]} of rows: a number or list each, or an object if there are several outputs. */
static void write_rows(const writer *w)
{
    peri__buffer *b = w->b;
    const peri__serve_facts *facts = w->facts;
    print_word(b, "{\"predictions\":[");
    for (int64_t i = w->q->first; i < w->q->first + w->q->samples; i++) {
        if (i > w->q->first) print_word(b, ",");
        if (facts->n_outputs != 1) print_word(b, "{");
        for (int32_t k = 0; k < facts->n_outputs; k++) {
            if (facts->n_outputs != 1) {
                if (k) print_word(b, ",");
                peri__buffer_quote(b, facts->outputs[k].name);
                print_word(b, ":");
            }
            print_output(w, k, i);
        }
        if (facts->n_outputs != 1) print_word(b, "}");
    }
    print_word(b, "]}\n");
}

static void write_column(const writer *w, int32_t k)
{
    print_word(w->b, "[");
    for (int64_t i = w->q->first; i < w->q->first + w->q->samples; i++) {
        if (i > w->q->first) print_word(w->b, ",");
        print_output(w, k, i);
    }
    print_word(w->b, "]");
}

static void write_columns(const writer *w)
{
    peri__buffer *b = w->b;
    const peri__serve_facts *facts = w->facts;
    print_word(b, facts->n_outputs == 1 ? "{\"outputs\":" : "{\"outputs\":{");
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        if (facts->n_outputs != 1) {
            if (k) print_word(b, ",");
            peri__buffer_quote(b, facts->outputs[k].name);
            print_word(b, ":");
        }
        write_column(w, k);
    }
    print_word(b, facts->n_outputs == 1 ? "}\n" : "}}\n");
}

/** A tensor's head: its name with @more behind, and shape [rows] or [rows, width]. */
static void write_head(const writer *w, int32_t k, const char *more, int64_t rows, bool flat, const char *datatype)
{
    char name[256];
    snprintf(name, sizeof name, "%s%s", w->facts->outputs[k].name, more);
    print_word(w->b, "{\"name\":");
    peri__buffer_quote(w->b, name);
    peri__buffer_print(w->b, flat ? ",\"shape\":[%" PRId64 "]" : ",\"shape\":[%" PRId64 ",%" PRId64 "]", rows,
                       numbers_shown(w, k));
    peri__buffer_print(w->b, ",\"datatype\":\"%s\"", datatype);
}

static void write_tensor(const writer *w, int32_t k)
{
    const int64_t width = w->facts->outputs[k].width, n = numbers_shown(w, k), rows =
        sample_end(w, k) - sample_begin(w, k);
    write_head(w, k, "", rows, width == 1, "FP32");
    if (w->q->binary[k]) {
        peri__buffer_print(w->b, ",\"parameters\":{\"binary_data_size\":%" PRId64 "}}",
                           rows * n * (int64_t)sizeof(float));
        return;
    }
    print_word(w->b, ",\"data\":[");
    for (int64_t i = 0; i < rows * n; i++) {
        if (i > 0) print_word(w->b, ",");
        print_number(w->b, w->outputs[k][(sample_begin(w, k) + i / n) * width + i % n]);
    }
    print_word(w->b, "]}");
}

/** How many of a listed output's rows each sample has. */
static void write_lengths(const writer *w, int32_t k)
{
    print_word(w->b, ",");
    write_head(w, k, ".lengths", w->q->samples, true, "INT64");
    print_word(w->b, ",\"data\":[");
    for (int64_t i = w->q->first; i < w->q->first + w->q->samples; i++)
        peri__buffer_print(w->b, i > w->q->first ? ",%" PRId64 : "%" PRId64, w->offsets[k][i + 1] - w->offsets[k][i]);
    print_word(w->b, "]}");
}

/** Returns the bytes of JSON if binary tensors follow, else 0. */
static int64_t write_v2(const writer *w)
{
    peri__buffer *b = w->b;
    const peri__serve_facts *facts = w->facts;
    bool any = false, first = true;
    print_word(b, "{\"model_name\":");
    peri__buffer_quote(b, facts->name);
    print_word(b, ",\"model_version\":");
    peri__buffer_quote(b, facts->version);
    if (*w->q->id) {
        print_word(b, ",\"id\":");
        peri__buffer_quote(b, w->q->id);
    }
    print_word(b, ",\"outputs\":[");
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        if (!w->q->wanted[k]) continue;
        if (!first) print_word(b, ",");
        first = false;
        any |= w->q->binary[k];
        write_tensor(w, k);
        if (facts->outputs[k].listed) write_lengths(w, k);
    }
    print_word(b, any ? "]}" : "]}\n");
    int64_t json = any ? b->bytes : 0;
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        /* rows at once */
        const int64_t width = facts->outputs[k].width, n = numbers_shown(w, k), each = n == width
            ? sample_end(w, k) - sample_begin(w, k) : 1;
        for (int64_t i = sample_begin(w, k); w->q->wanted[k] && w->q->binary[k] && i < sample_end(w, k); i += each)
            peri__buffer_append(b, (const char *)(w->outputs[k] + i * width), each * n * (int64_t)sizeof(float));
    }
    return json;
}

peri_status peri__serve_write(const peri__serve_facts *facts, const peri__serve_question *question,
                              float *const *outputs, int64_t *const *offsets, char **out, int64_t *bytes,
                              int64_t *json_bytes)
{
    peri__buffer b = {0};
    const writer w = {&b, facts, question, outputs, offsets};
    int64_t json = 0;
    PERI_TRY(check_finite(&w));
    if (question->form == PERI__SERVE_ROWS) write_rows(&w);
    else if (question->form == PERI__SERVE_COLUMNS) write_columns(&w);
    else json = write_v2(&w);
    if (b.status < 0) {
        peri__free(b.data);
        return b.status;
    }
    *out = b.data;
    *bytes = b.bytes;
    *json_bytes = json;
    return PERI_OK;
}

static void describe_input(peri__buffer *b, const peri__serve_facts *facts, const peri__serve_input *in)
{
    static const char *const kinds[] = {"numbers", "ids", "weights"};
    const bool ids = in->kind == PERI__SERVE_IDS;
    print_word(b, "{\"name\":");
    peri__buffer_quote(b, in->name);
    peri__buffer_print(b, ",\"datatype\":\"%s\"", ids ? (in->whole ? "INT64" : "UINT64") : "FP32");
    if (in->kind != PERI__SERVE_NUMBERS) print_word(b, ",\"shape\":[-1,-1]");
    else if (in->width == 1) print_word(b, ",\"shape\":[-1]");
    else peri__buffer_print(b, ",\"shape\":[-1,%" PRId64 "]", in->width);
    peri__buffer_print(b, ",\"parameters\":{\"kind\":\"%s\"", in->whole ? "whole" : kinds[in->kind]);
    if (in->whole) print_word(b, ",\"least\":\"-9223372036854775808\",\"most\":\"9223372036854775807\"");
    else if (ids) /* rows 0: all ids up to 2^64 - 1 */
        peri__buffer_print(b, ",\"least\":\"0\",\"most\":\"%" PRIu64 "\"", in->rows - 1);
    if (ids && in->length > 0) peri__buffer_print(b, ",\"length\":%" PRId64, in->length);
    if (in->same || in->counts || in->kind == PERI__SERVE_WEIGHTS) {
        print_word(b, in->counts ? ",\"counts\":" : ",\"like\":");
        peri__buffer_quote(b, facts->inputs[in->of].name);
    }
    print_word(b, in->optional ? ",\"optional\":true" : ",\"optional\":false");
    if (ids && !in->whole) print_word(b, in->skip ? ",\"unknown\":\"skip\"" : ",\"unknown\":\"refuse\"");
    print_word(b, "}}");
}

peri_status peri__serve_describe(const peri__serve_facts *facts, char **out, int64_t *bytes)
{
    peri__buffer b = {0};
    print_word(&b, "{\"name\":");
    peri__buffer_quote(&b, facts->name);
    print_word(&b, ",\"versions\":[");
    peri__buffer_quote(&b, facts->version);
    print_word(&b, "],\"platform\":\"perilune\",\"inputs\":[");
    for (int32_t f = 0; f < facts->n_inputs; f++) {
        if (f) print_word(&b, ",");
        describe_input(&b, facts, &facts->inputs[f]);
    }
    print_word(&b, "],\"outputs\":[");
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        print_word(&b, k ? ",{\"name\":" : "{\"name\":");
        peri__buffer_quote(&b, facts->outputs[k].name);
        print_word(&b, facts->outputs[k].listed ? ",\"datatype\":\"FP32\",\"shape\":[-1,-1"
                                          : ",\"datatype\":\"FP32\",\"shape\":[-1");
        if (facts->outputs[k].width != 1) peri__buffer_print(&b, ",%" PRId64, facts->outputs[k].width);
        print_word(&b, "]}");
    }
    print_word(&b, "]}\n");
    if (b.status < 0) {
        peri__free(b.data);
        return b.status;
    }
    *out = b.data;
    *bytes = b.bytes;
    return PERI_OK;
}
