/* SPDX-License-Identifier: Apache-2.0
 *
 * serve.c: a C program that answers with a model file, without Lua.
 *
 *   cc serve.c $(pkg-config --cflags --libs perilune) -o serve && ./serve model.peri dense_features=0.5,1,2 user=7
 *   items=3,7:0.5
 *
 * One sample a call. Each argument is an input by its name: numbers of a dense input, or ids, with a weight behind a
 * colon where the model wants weights; "items=" is an empty list. The program prints the outputs; of one that is a list
 * of the sample, all members in a row. Without inputs it prints what the model takes.
 */
#include <errno.h>
#include <perilune/model.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4096 }; /* numbers or ids of an input */

static int fail(const char *what)
{
    fprintf(stderr, "serve: %s\n", what);
    return 1;
}

static void *zeros(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size);
    if (!memory) exit(fail("no memory"));
    return memory;
}

static void list(const peri_model *model)
{
    int32_t inputs, outputs;
    const peri_model_input *in = peri_model_inputs(model, &inputs);
    const peri_model_output *out = peri_model_outputs(model, &outputs);
    for (int32_t i = 0; i < inputs; i++) {
        if (in[i].kind == PERI_MODEL_DENSE) printf("input %s: %lld numbers\n", in[i].name, (long long)in[i].columns);
        else if (in[i].kind != PERI_MODEL_IDS || in[i].mapped)
            printf("input %s: a list of %s\n", in[i].name,
                   in[i].kind == PERI_MODEL_NUMBERS ? "numbers"
                   : in[i].kind == PERI_MODEL_WHOLE ? "whole numbers"
                                                    : "ids");
        else
            printf("input %s: ids 0..%lld%s\n", in[i].name, (long long)in[i].rows - 1,
                   in[i].weighted ? ", with weights" : "");
    }
    for (int32_t i = 0; i < outputs; i++) printf("output %s: %lld numbers\n", out[i].name, (long long)out[i].columns);
}

/* The numbers of a dense input. Exactly as many as it has. */
static int read_dense(const peri_model_input *in, const char *text, peri_model_values *v)
{
    float *numbers = (float *)zeros((size_t)in->columns, sizeof *numbers);
    int64_t n = 0;
    char *end;
    v->dense = numbers;
    for (;; text = end + 1) {
        float x = strtof(text, &end);
        if (end == text || (*end && *end != ',') || n == in->columns) break;
        numbers[n++] = x;
        if (!*end) return n == in->columns ? 0 : fail("a dense input has too few numbers");
    }
    return fail("a dense input has too many numbers, or something that is none");
}

/* Ids: "3,7" or, with weights, "3:0.5,7:1"; "" is an empty list. All 64-bit ids are exact, also those from 2^63 on. */
static int read_list(const peri_model_input *in, const char *text, peri_model_values *v)
{
    int64_t *ids = (int64_t *)zeros(MOST, sizeof *ids), *offsets = (int64_t *)zeros(2, sizeof *offsets);
    float *weights = (float *)zeros(MOST, sizeof *weights);
    const int numbers = in->kind == PERI_MODEL_NUMBERS; /* they take the place of weights, and there are no ids */
    char *end;
    v->ids = numbers ? NULL : ids;
    v->offsets = offsets;
    v->weights = numbers || in->weighted ? weights : NULL;
    while (*text) {
        const int64_t n = offsets[1]++;
        if (n == MOST) return fail("a list is too long");
        errno = 0;
        weights[n] = numbers ? strtof(text, &end) : 1;
        if (!numbers) ids[n] = *text == '-' ? strtoll(text, &end, 10) : (int64_t)strtoull(text, &end, 10);
        if (end == text || errno) return fail("an id or a number is none, or too large");
        if (*end == ':' && in->weighted) {
            char *from = end + 1;
            weights[n] = strtof(from, &end);
        }
        if (*end && *end != ',') return fail("ids and numbers are separated by commas");
        text = *end ? end + 1 : end;
    }
    return 0;
}

int main(int argc, char **argv)
{
    peri_model *model;
    peri_model_context *context;
    int32_t inputs, outputs;
    if (argc < 2) return fprintf(stderr, "usage: serve MODEL [INPUT=VALUES ...]\n"), 2;
    if (peri_model_open(argv[1], 0, &model) < 0) return fail(peri_error_message());
    if (argc == 2) return list(model), peri_model_release(model), 0;
    const peri_model_input *in = peri_model_inputs(model, &inputs);
    const peri_model_output *out = peri_model_outputs(model, &outputs);
    peri_model_values *values = (peri_model_values *)zeros((size_t)inputs, sizeof *values);
    float **answers = (float **)zeros((size_t)outputs, sizeof *answers);
    for (int a = 2; a < argc; a++) {
        const char *equals = strchr(argv[a], '=');
        int64_t i = 0;
        while (equals && i < inputs &&
               (strncmp(in[i].name, argv[a], (size_t)(equals - argv[a])) != 0 || in[i].name[equals - argv[a]]))
            i++;
        if (!equals || i == inputs) return fprintf(stderr, "serve: '%s' is no input of the model\n", argv[a]), 2;
        if (values[i].dense || values[i].offsets) return fail("an input is there twice"), 2;
        int failed = in[i].kind == PERI_MODEL_DENSE ? read_dense(&in[i], equals + 1, &values[i])
                                                    : read_list(&in[i], equals + 1, &values[i]);
        if (failed) return 2;
    }
    int64_t **offsets = (int64_t **)zeros((size_t)outputs, sizeof *offsets);
    for (int32_t i = 0; i < outputs; i++) {
        const int list_of_sample = peri_model_output_list(model, i) >= 0;
        answers[i] = (float *)zeros((size_t)out[i].columns * (list_of_sample ? MOST : 1), sizeof **answers);
        if (list_of_sample) offsets[i] = (int64_t *)zeros(2, sizeof **offsets);
    }
    if (peri_model_context_new(model, 1, 0, &context) < 0) return fail(peri_error_message());
    if (peri_model_predict_lists(context, 1, values, answers, offsets) < 0) return fail(peri_error_message());
    for (int32_t i = 0; i < outputs; i++) {
        printf("%s:", out[i].name);
        const int64_t n = out[i].columns * (offsets[i] ? offsets[i][1] : 1);
        for (int64_t c = 0; c < n; c++) printf(" %.9g", (double)answers[i][c]);
        printf("\n");
    }
    peri_model_context_release(context);
    peri_model_release(model);
    return 0; /* the process ends: what is left goes with it */
}
