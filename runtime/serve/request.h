/* SPDX-License-Identifier: Apache-2.0
 *
 * request.h: the forms in which questions come and answers go: rows and columns as TensorFlow Serving has them, and the
 * Open Inference Protocol (KServe v2) in JSON and with binary tensors. All of them end in the same columns, by the same
 * rules (docs/serving.md).
 */
#ifndef PERI_SERVE_REQUEST_H
#define PERI_SERVE_REQUEST_H

#include "model.h"

/** What can be wrong with a feature; counted for each. */
enum {
    PERI__SERVE_MISSING,  /* it is not there */
    PERI__SERVE_EXTRA,    /* the model has none of that name */
    PERI__SERVE_REPEATED, /* it is there twice */
    PERI__SERVE_KIND,     /* a value of another kind, or of another shape */
    PERI__SERVE_RANGE,    /* an id without a row, or a number too large for f32 */
    PERI__SERVE_NAN,      /* NaN or infinity */
    PERI__SERVE_EMPTY,    /* a list without ids, which is no error */
    PERI__SERVE_PROBLEM_COUNT
};
extern const char *const peri__serve_problem_names[PERI__SERVE_PROBLEM_COUNT];

/** Limits of one request. */
typedef struct peri__serve_rules {
    int64_t most_samples;
} peri__serve_rules;

enum { PERI__SERVE_ROWS, PERI__SERVE_COLUMNS, PERI__SERVE_V2 };

/** A batch that grows request by request, and how many problems its requests had. */
typedef struct peri__serve_batch {
    const peri__serve_facts *facts;
    peri__serve_column *columns; /* [n_inputs] */
    int64_t samples;
    uint64_t (*problems)[PERI__SERVE_PROBLEM_COUNT]; /* [n_inputs + 1]; the last: of names that the model does not
                                                        have */
    bool *seen;                                      /* [n_inputs] scratch */
} peri__serve_batch;

enum { PERI__SERVE_ID_ROOM = 128, PERI__SERVE_MOST_OUTPUTS = 64 };

/** What a request wants, beside its samples. */
typedef struct peri__serve_question {
    int32_t form;                          /* PERI__SERVE_ROWS, ... */
    int64_t first, samples;                /* its samples in the batch */
    int64_t k;                             /* how many of the best items it wants; 0: as many as the model finds */
    char id[PERI__SERVE_ID_ROOM];          /* V2: "" if it has none */
    bool wanted[PERI__SERVE_MOST_OUTPUTS]; /* which outputs */
    bool binary[PERI__SERVE_MOST_OUTPUTS]; /* which of them as binary tensors */
} peri__serve_question;

peri_status peri__serve_batch_init(peri__serve_batch *batch, const peri__serve_facts *facts);
void peri__serve_batch_fini(peri__serve_batch *batch);
void peri__serve_batch_clear(peri__serve_batch *batch);

/** Read a body of @bytes and append its samples. v2: the Open Inference Protocol; else rows or columns. @json_bytes:
 *  how many are JSON, the rest being binary tensors; -1: all. After an error (PERI_EFORMAT: the request is to blame,
 *  with a sentence in the error record) the batch is as it was. */
peri_status peri__serve_read(peri__serve_batch *batch, const peri__serve_rules *rules, bool v2, const char *body,
                             int64_t bytes, int64_t json_bytes, peri__serve_question *out);

/** The answer to a question. @outputs[k]: all numbers of the batch; @offsets[k]: of outputs that are `listed`, where
 *  samples begin.
 *  @out new (peri__free); @json_bytes: how many of @bytes are JSON if
 *  binary tensors follow, else 0. PERI_EINVAL: an output is NaN. */
peri_status peri__serve_write(const peri__serve_facts *facts, const peri__serve_question *question,
                              float *const *outputs, int64_t *const *offsets, char **out, int64_t *bytes,
                              int64_t *json_bytes);

/** The decimal text of the fewest digits that is read as @x again, whole numbers up to 2^24 without an exponent;
 *  returns its length, below 32. */
int peri__serve_print(char *to, float x);

/** What GET /v2/models/NAME says: names, kinds, ranges. @out new (peri__free). */
peri_status peri__serve_describe(const peri__serve_facts *facts, char **out, int64_t *bytes);

#endif
