/* SPDX-License-Identifier: Apache-2.0
 *
 * values.h: reading the values of features into columns: numbers and ids, one by one or as lists, and the rules for
 * what does not fit.
 */
#ifndef PERI_SERVE_VALUES_H
#define PERI_SERVE_VALUES_H

#include "../base/json.h"
#include "request.h"

/** One request while it is read. The JSON reader keeps the first error of either kind. */
typedef struct peri__serve_reader {
    peri__json *j;
    peri__serve_batch *batch;
    const peri__serve_rules *rules;
    int32_t guess; /* the feature that probably comes next: clients send them in one order */
} peri__serve_reader;

/** Fail, and count @problem of feature @f (n_inputs: of none). Always false. */
bool peri__serve_blame(peri__serve_reader *r, int32_t f, int problem, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/** The number of a feature; -1, and an error: there is none of that name. */
int32_t peri__serve_find(peri__serve_reader *r, const char *name);
/** The feature is there, or an error: it was before. */
bool peri__serve_once(peri__serve_reader *r, int32_t f);

/** Fail: the next JSON value, which the message shows, is not the @wanted that feature @f takes. Always false. */
bool peri__serve_refuse_kind(peri__serve_reader *r, int32_t f, const char *wanted);

/** The next value as one number or id of feature @f. */
bool peri__serve_number(peri__serve_reader *r, int32_t f);
bool peri__serve_id(peri__serve_reader *r, int32_t f);
/** The values of feature @f that were read since its last sample are one sample. */
bool peri__serve_end(peri__serve_reader *r, int32_t f);
/** The next value as a whole sample of feature @f: a list, or a value alone. @length: wanted ids; -1: any. */
bool peri__serve_sample(peri__serve_reader *r, int32_t f, int64_t length);
/** A sample without the feature. */
bool peri__serve_missing(peri__serve_reader *r, int32_t f);

/** Numbers and ids that are not JSON. */
bool peri__serve_add_number(peri__serve_reader *r, int32_t f, double x);
bool peri__serve_add_id(peri__serve_reader *r, int32_t f, uint64_t id, bool negative);
/** An id whose digits are those from @at to before @to. */
bool peri__serve_add_text(peri__serve_reader *r, int32_t f, const char *at, const char *to);

/** Samples of feature @f that this request has so far. */
int64_t peri__serve_samples(const peri__serve_reader *r, int32_t f);

#endif
