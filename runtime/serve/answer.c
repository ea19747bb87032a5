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

int peri__serve_print(char *to, float x)
{
    int n = 0;
    for (int digits = fabsf(x) < FLT_MIN ? 1 : 6; digits <= 9; digits++) { /* texts of 6 digits survive, but for the smallest numbers */
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

static void word(peri__buffer *b, const char *text) { peri__buffer_append(b, text, (int64_t)strlen(text)); }

/** The numbers of one sample: one alone, or a list. */
static void print_sample(peri__buffer *b, const float *numbers, int64_t width)
{
    if (width != 1) word(b, "[");
    for (int64_t i = 0; i < width; i++) {
        if (i) word(b, ",");
        print_number(b, numbers[i]);
    }
    if (width != 1) word(b, "]");
}

static peri_status check(const peri__serve_facts *facts, const peri__serve_question *q, float *const *outputs)
{
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        int64_t width = facts->outputs[k].width;
        for (int64_t i = q->first * width; q->wanted[k] && i < (q->first + q->samples) * width; i++)
            if (!isfinite(outputs[k][i]))
                return peri__fail(PERI_EINVAL, "output '%s' of sample %lld is %f", facts->outputs[k].name,
                                  (long long)(i / width - q->first), (double)outputs[k][i]);
    }
    return PERI_OK;
}

/** {"predictions": [...]} of rows: a number or list each, or an object if there are several outputs. */
static void write_rows(peri__buffer *b, const peri__serve_facts *facts, const peri__serve_question *q, float *const *outputs)
{
    word(b, "{\"predictions\":[");
    for (int64_t i = q->first; i < q->first + q->samples; i++) {
        if (i > q->first) word(b, ",");
        if (facts->n_outputs != 1) word(b, "{");
        for (int32_t k = 0; k < facts->n_outputs; k++) {
            if (facts->n_outputs != 1) {
                if (k) word(b, ",");
                peri__buffer_quote(b, facts->outputs[k].name);
                word(b, ":");
            }
            print_sample(b, outputs[k] + i * facts->outputs[k].width, facts->outputs[k].width);
        }
        if (facts->n_outputs != 1) word(b, "}");
    }
    word(b, "]}\n");
}

static void write_column(peri__buffer *b, const peri__serve_question *q, const float *numbers, int64_t width)
{
    word(b, "[");
    for (int64_t i = q->first; i < q->first + q->samples; i++) {
        if (i > q->first) word(b, ",");
        print_sample(b, numbers + i * width, width);
    }
    word(b, "]");
}

static void write_columns(peri__buffer *b, const peri__serve_facts *facts, const peri__serve_question *q, float *const *outputs)
{
    word(b, facts->n_outputs == 1 ? "{\"outputs\":" : "{\"outputs\":{");
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        if (facts->n_outputs != 1) {
            if (k) word(b, ",");
            peri__buffer_quote(b, facts->outputs[k].name);
            word(b, ":");
        }
        write_column(b, q, outputs[k], facts->outputs[k].width);
    }
    word(b, facts->n_outputs == 1 ? "}\n" : "}}\n");
}

static void write_tensor(peri__buffer *b, const peri__serve_output *o, const peri__serve_question *q, const float *numbers, bool binary)
{
    word(b, "{\"name\":");
    peri__buffer_quote(b, o->name);
    peri__buffer_print(b, o->width == 1 ? ",\"shape\":[%" PRId64 "]" : ",\"shape\":[%" PRId64 ",%" PRId64 "]", q->samples, o->width);
    word(b, ",\"datatype\":\"FP32\"");
    if (binary) {
        peri__buffer_print(b, ",\"parameters\":{\"binary_data_size\":%" PRId64 "}}", q->samples * o->width * 4);
        return;
    }
    word(b, ",\"data\":[");
    for (int64_t i = q->first * o->width; i < (q->first + q->samples) * o->width; i++) {
        if (i > q->first * o->width) word(b, ",");
        print_number(b, numbers[i]);
    }
    word(b, "]}");
}

/** Returns the bytes of JSON if binary tensors follow, else 0. */
static int64_t write_v2(peri__buffer *b, const peri__serve_facts *facts, const peri__serve_question *q, float *const *outputs)
{
    bool any = false, first = true;
    word(b, "{\"model_name\":");
    peri__buffer_quote(b, facts->name);
    word(b, ",\"model_version\":");
    peri__buffer_quote(b, facts->version);
    if (*q->id) {
        word(b, ",\"id\":");
        peri__buffer_quote(b, q->id);
    }
    word(b, ",\"outputs\":[");
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        if (!q->wanted[k]) continue;
        if (!first) word(b, ",");
        first = false;
        any |= q->binary[k];
        write_tensor(b, &facts->outputs[k], q, outputs[k], q->binary[k]);
    }
    word(b, any ? "]}" : "]}\n");
    int64_t json = any ? b->bytes : 0;
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        int64_t width = facts->outputs[k].width;
        if (q->wanted[k] && q->binary[k])
            peri__buffer_append(b, (const char *)(outputs[k] + q->first * width), q->samples * width * (int64_t)sizeof(float));
    }
    return json;
}

peri_status peri__serve_write(const peri__serve_facts *facts, const peri__serve_question *question, float *const *outputs, char **out,
                              int64_t *bytes, int64_t *json_bytes)
{
    peri__buffer b = {0};
    int64_t json = 0;
    PERI_TRY(check(facts, question, outputs));
    if (question->form == PERI__SERVE_ROWS) write_rows(&b, facts, question, outputs);
    else if (question->form == PERI__SERVE_COLUMNS) write_columns(&b, facts, question, outputs);
    else json = write_v2(&b, facts, question, outputs);
    if (b.status < 0) {
        peri__free(b.data);
        return b.status;
    }
    *out = b.data;
    *bytes = b.bytes;
    *json_bytes = json;
    return PERI_OK;
}

static void describe_input(peri__buffer *b, const peri__serve_input *in)
{
    static const char *const kinds[] = {"numbers", "ids", "weights"};
    bool ids = in->kind == PERI__SERVE_IDS;
    word(b, "{\"name\":");
    peri__buffer_quote(b, in->name);
    peri__buffer_print(b, ",\"datatype\":\"%s\"", ids ? "UINT64" : "FP32");
    if (in->kind != PERI__SERVE_NUMBERS) word(b, ",\"shape\":[-1,-1]");
    else if (in->width == 1) word(b, ",\"shape\":[-1]");
    else peri__buffer_print(b, ",\"shape\":[-1,%" PRId64 "]", in->width);
    peri__buffer_print(b, ",\"parameters\":{\"kind\":\"%s\"", kinds[in->kind]);
    if (ids) peri__buffer_print(b, ",\"least\":\"0\",\"most\":\"%" PRIu64 "\"", in->rows - 1); /* rows 0: 2^64 - 1 */
    word(b, in->optional ? ",\"optional\":true" : ",\"optional\":false");
    if (ids) word(b, in->skip ? ",\"unknown\":\"skip\"" : ",\"unknown\":\"refuse\"");
    word(b, "}}");
}

peri_status peri__serve_describe(const peri__serve_facts *facts, char **out, int64_t *bytes)
{
    peri__buffer b = {0};
    word(&b, "{\"name\":");
    peri__buffer_quote(&b, facts->name);
    word(&b, ",\"versions\":[");
    peri__buffer_quote(&b, facts->version);
    word(&b, "],\"platform\":\"perilune\",\"inputs\":[");
    for (int32_t f = 0; f < facts->n_inputs; f++) {
        if (f) word(&b, ",");
        describe_input(&b, &facts->inputs[f]);
    }
    word(&b, "],\"outputs\":[");
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        word(&b, k ? ",{\"name\":" : "{\"name\":");
        peri__buffer_quote(&b, facts->outputs[k].name);
        if (facts->outputs[k].width == 1) word(&b, ",\"datatype\":\"FP32\",\"shape\":[-1]}");
        else peri__buffer_print(&b, ",\"datatype\":\"FP32\",\"shape\":[-1,%" PRId64 "]}", facts->outputs[k].width);
    }
    word(&b, "]}\n");
    if (b.status < 0) {
        peri__free(b.data);
        return b.status;
    }
    *out = b.data;
    *bytes = b.bytes;
    return PERI_OK;
}
