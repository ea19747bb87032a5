/* SPDX-License-Identifier: Apache-2.0
 *
 * serve.c: any bytes as the body of a request, in each form: refused with a sentence, and the batch is as it was; or
 * read, and then all features have the same samples, ids are in range, numbers are finite, and the answer to it is
 * JSON.
 *
 * inputs: 300000
 */
#include "choices.h"

#include "runtime/base/json.h"
#include "runtime/serve/request.h"

#include <math.h>
#include <string.h>

static const peri__serve_input inputs[] = {
    {.name = "a", .kind = PERI__SERVE_NUMBERS, .width = 1},
    {.name = "b", .kind = PERI__SERVE_NUMBERS, .width = 2},
    {.name = "c", .kind = PERI__SERVE_IDS, .rows = 100},
    {.name = "d", .kind = PERI__SERVE_IDS},
    {.name = "e", .kind = PERI__SERVE_IDS, .rows = 9, .skip = true, .optional = true},
    {.name = "e.weights", .kind = PERI__SERVE_WEIGHTS, .of = 4, .optional = true},
    {.name = "f", .kind = PERI__SERVE_NUMBERS, .width = 3, .optional = true, .any = true},
    {.name = "g", .kind = PERI__SERVE_IDS, .of = 4, .same = true, .optional = true},
    {.name = "h", .kind = PERI__SERVE_NUMBERS, .width = 1, .of = 4, .counts = true, .optional = true}};
static const peri__serve_output outputs[] = {{.name = "x", .width = 1}, {.name = "y", .width = 2, .best = true},
                                             {.name = "z", .width = 2, .listed = true, .list = 4}};
enum { N_INPUTS = 9 };
static const peri__serve_facts facts = {"m", "1", inputs, outputs, N_INPUTS, 3};

static void check_batch(const peri__serve_batch *b, int64_t samples)
{
    require(b->samples == samples, "samples of the batch");
    for (int f = 0; f < N_INPUTS; f++) {
        const peri__serve_column *c = &b->columns[f];
        require(c->n_samples == samples, "a feature has other samples");
        if (inputs[f].kind != PERI__SERVE_IDS)
            for (int64_t i = 0; i < c->n_values; i++)
                require(inputs[f].any || isfinite(c->numbers[i]), "a number that is none");
        if (inputs[f].kind == PERI__SERVE_NUMBERS) {
            require(c->n_values == samples * inputs[f].width, "a feature has other values");
            continue;
        }
        for (int64_t i = 0; i < samples; i++) require(c->offsets[i + 1] >= c->offsets[i], "lists out of order");
        require(c->offsets[0] == 0 && c->n_values == c->offsets[samples], "ids of no sample");
        for (int64_t i = 0; (f == 5 || f == 7) && i <= samples; i++)
            require(c->offsets[i] == b->columns[4].offsets[i], "weights of no id");
        for (int64_t i = 0; f == 2 && i < c->n_values; i++)
            require(c->ids[i] >= 0 && c->ids[i] < 100, "an id out of range");
    }
}

static void check_answer(const peri__serve_batch *b, const peri__serve_question *q)
{
    static float numbers[4096];
    float *const out[] = {numbers, numbers, numbers};
    char *text;
    int64_t length, json_bytes;
    peri__json j;
    int64_t *const offsets[] = {NULL, NULL, b->columns[4].offsets}; /* z: a row for each id of e */
    if (b->samples * 2 > 4096 || b->columns[4].n_values * 2 > 4096) return;
    for (int64_t i = 0; i < b->samples; i++)
        require(b->columns[8].numbers[i] <= (float)(b->columns[4].offsets[i + 1] - b->columns[4].offsets[i]),
                "a count of too many");
    memset(numbers, 0, sizeof numbers);
    memcpy(numbers, b->columns[0].numbers, (size_t)b->samples * 4);
    require(peri__serve_write(&facts, q, out, offsets, &text, &length, &json_bytes) >= 0, "no answer");
    peri__json_open(&j, text, json_bytes ? json_bytes : length, "answer");
    require(peri__json_skip(&j, NULL, NULL) && peri__json_close(&j) >= 0, "the answer is no JSON");
    peri__free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char first[] = "{\"instances\":[{\"a\":1,\"b\":[2,3],\"c\":[4,5],\"d\":6}]}";
    peri__serve_batch b;
    peri__serve_question q;
    if (size < 2) return 0;
    int64_t length = (int64_t)size - 2, json = data[0] & 2 ? length - data[1] : -1;
    peri__serve_rules rules = {.most_samples = 1000};
    char *body = peri__alloc((size_t)length + 1); /* as long as it is: what reads past its end is seen */
    require(body && peri__serve_batch_init(&b, &facts) >= 0, "no memory");
    memcpy(body, data + 2, (size_t)length);
    body[length] = 0;
    require(peri__serve_read(&b, &rules, false, first, sizeof first - 1, -1, &q) >= 0, "the first request is refused");
    peri_error_clear();
    if (json < -1) json = -1;
    bool good = peri__serve_read(&b, &rules, data[0] & 1, body, length, json, &q) >= 0;
    require(good || *peri_error_message(), "refused without a word");
    require(!good || (q.k >= 0 && q.k <= 2), "more of the best than there are");
    require(!good || (q.first == 1 && q.samples >= 0 && q.samples <= 1000), "samples of the question");
    check_batch(&b, good ? 1 + q.samples : 1);
    if (good) check_answer(&b, &q);
    peri__serve_batch_fini(&b);
    peri__free(body);
    return 0;
}
