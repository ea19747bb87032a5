/* SPDX-License-Identifier: Apache-2.0
 *
 * model.c: any bytes as a model file, or as the header of one whose checksums are right: refused with a sentence, or
 * every call that it leads to stays within its memory (address sanitizer), whatever the values are, and gives the same
 * bits alone and in a batch.
 *
 * inputs: 30000
 */
#include "choices.h"

#include "runtime/model/model_internal.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

enum { SECTION_BYTES = 4096, SAMPLES = 3, MOST_NUMBERS = 1 << 15, IDS = 4 };

/** How long the lists of samples are, and where they begin. */
static const int64_t lengths[SAMPLES] = {IDS, 1, 3}, begins[SAMPLES + 1] = {0, IDS, IDS + 1, IDS + 4};

static int file = -1;

static void put(const void *data, size_t n, int64_t at)
{
    require(pwrite(file, data, n, at) == (ssize_t)n, "the file cannot be written");
}

/** A file with @text as its header, over 4 KiB of numbers that sections may lie in. */
static void sealed(const char *text, int64_t length)
{
    char numbers[SECTION_BYTES];
    for (int i = 0; i < SECTION_BYTES; i += 4) memcpy(numbers + i, &(float){(float)(i % 64) / 64 - 0.5f}, 4);
    XXH128_hash_t digest = XXH3_128bits(text, (size_t)length);
    peri__model_preamble p = {.magic = PERI__MODEL_MAGIC,
                              .version = 1,
                              .header_offset = sizeof p + SECTION_BYTES,
                              .header_bytes = (uint64_t)length,
                              .file_bytes = sizeof p + SECTION_BYTES + (uint64_t)length,
                              .digest = {digest.low64, digest.high64}};
    p.checksum = XXH3_64bits(&p, offsetof(peri__model_preamble, checksum));
    put(&p, sizeof p, 0);
    put(numbers, sizeof numbers, sizeof p);
    put(text, (size_t)length, sizeof p + SECTION_BYTES);
}

/** Values for all inputs, of samples from @first on: the same for a sample wherever it stands. */
static void values_of(const peri_model *m, int64_t first, int64_t n, peri_model_values *v, float *numbers, int64_t *ids,
                      int64_t *offsets, float *weights)
{
    static const float one[SAMPLES] = {1, 1, 1};
    for (int64_t i = 0; i < n * IDS; i++) weights[i] = 0.5f;
    for (int64_t i = 0; i <= n; i++) offsets[i] = begins[first + i] - begins[first];
    for (int64_t i = 0; i < n * IDS; i++) ids[i] = (begins[first] + i) % 5;
    for (int32_t k = 0; k < m->n_inputs; k++) {
        v[k] = (peri_model_values){0};
        if (m->inputs[k].kind == PERI_MODEL_DENSE)
            v[k].dense = m->rules[k].counts >= 0 ? one : numbers + first * m->inputs[k].columns;
        else if (m->inputs[k].kind == PERI_MODEL_NUMBERS) v[k].offsets = offsets, v[k].weights = weights;
        else v[k].ids = ids, v[k].offsets = offsets, v[k].weights = m->inputs[k].weighted ? weights : NULL;
    }
}

static void predict(peri_model *m)
{
    static float numbers[MOST_NUMBERS * SAMPLES], all[MOST_NUMBERS * SAMPLES * IDS], one[MOST_NUMBERS * IDS];
    peri_model_values *v = calloc((size_t)m->n_inputs + 1, sizeof *v);
    float **outputs = calloc((size_t)m->n_outputs + 1, sizeof *outputs);
    int64_t ids[SAMPLES * IDS], offsets[SAMPLES + 1], parts[SAMPLES + 1], part[2];
    int64_t **ends = calloc((size_t)m->n_outputs + 1, sizeof *ends);
    float weights[SAMPLES * IDS];
    peri_model_context *c = NULL;
    for (int i = 0; i < MOST_NUMBERS * SAMPLES; i++) numbers[i] = (float)(i % 97) / 97 - 0.3f;
    require(v && outputs && ends, "no memory");
    require(peri_model_context_new(m, SAMPLES, IDS, &c) >= 0, "no context");
    outputs[0] = all, ends[0] = parts;
    values_of(m, 0, SAMPLES, v, numbers, ids, offsets, weights);
    const peri_status status = peri_model_predict_lists(c, SAMPLES, v, outputs, ends);
    require((status >= 0) == (peri_model_check(m, SAMPLES, v, NULL) >= 0), "check and predict disagree");
    for (int64_t b = 0; b < SAMPLES && status >= 0; b++) {
        const bool listed = peri__model_output_list(m, 0) >= 0;
        outputs[0] = one, ends[0] = part;
        values_of(m, b, 1, v, numbers, ids, offsets, weights);
        require(peri_model_predict_lists(c, 1, v, outputs, ends) >= 0, "a sample alone is refused");
        require(!listed || (part[1] == parts[b + 1] - parts[b] && part[1] <= lengths[b]), "a list of another length");
        for (int64_t k = 0; k < m->outputs[0].columns * (listed ? part[1] : 1); k++) {
            const float x = all[(listed ? parts[b] : b) * m->outputs[0].columns + k];
            require(memcmp(&x, &one[k], sizeof x) == 0 || (x != x && one[k] != one[k]),
                    "a sample alone has other bits");
        }
    }
    peri_model_context_release(c);
    free(v);
    free(outputs);
    free(ends);
}

/** Compute the formulas, of one sample, which is all that a follower does with them. */
static void evaluate(peri_model *m)
{
    static float numbers[MOST_NUMBERS], out[MOST_NUMBERS];
    peri_model_values *v = calloc((size_t)m->n_inputs + 1, sizeof *v);
    float **outputs = calloc((size_t)m->n_outputs + 1, sizeof *outputs);
    peri_model_context *c = NULL;
    require(v && outputs, "no memory");
    for (int i = 0; i < MOST_NUMBERS; i++) numbers[i] = (float)(i % 97) / 97 - 0.3f;
    for (int32_t k = 0; k < m->n_inputs; k++) v[k].dense = numbers;
    for (int32_t k = 0; k < m->n_outputs; k++) outputs[k] = out;
    require(peri_model_context_new(m, 1, 1, &c) >= 0, "no context of formulas");
    require(peri_model_predict(c, 1, v, outputs) >= 0, "formulas of a file that was opened are refused");
    peri_model_context_release(c);
    free(v);
    free(outputs);
}

/** Whether the model is small enough for the arrays above, and for the time that there is. */
static bool small(const peri_model *m)
{
    int64_t numbers = 0, work = 0;
    for (int32_t i = 0; i < m->n_values; i++) numbers += m->values[i].columns;
    for (int32_t i = 0; i < m->n_operations; i++) {
        const peri__model_operation *o = &m->operations[i];
        work += m->values[o->out].columns * (o->kind == PERI__MODEL_matmul ? o->sizes[3] : 1);
        for (int32_t k = 0; k < o->n_sizes; k++)
            if (o->sizes[k] > MOST_NUMBERS) return false;
    }
    return numbers <= MOST_NUMBERS && work <= 1 << 20;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    peri_model *m = NULL;
    if (size == 0) return 0;
    if (file < 0) file = memfd_create("model", 0);
    require(file >= 0 && ftruncate(file, 0) == 0, "no file");
    if (data[0] % 8 == 0) put(data + 1, size - 1, 0);
    else sealed((const char *)data + 1, (int64_t)size - 1);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (peri_model_open(path, data[0] % 2 ? PERI_MODEL_COPY : 0, &m) < 0) {
        require(strlen(peri_error_message()) > 10, "an error without a sentence");
        return 0;
    }
    if (small(m)) predict(m);
    if (m->formulas && small(m->formulas)) evaluate(m->formulas);
    peri_model_release(m);
    return 0;
}
