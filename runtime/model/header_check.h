/* SPDX-License-Identifier: Apache-2.0
 *
 * header_check.h: what header_check.c and operation_check.c share while they look at a header.
 */
#ifndef PERI_MODEL_HEADER_CHECK_H
#define PERI_MODEL_HEADER_CHECK_H

#include "model_internal.h"

/** Numbers of one sample in one array, and rows of a table. */
#define PERI__COLUMNS_MOST ((int64_t)1 << 26)
#define PERI__ROWS_MOST ((int64_t)1 << 48)

/** What is being checked, for messages. */
typedef struct checker {
    peri_model *m;
    const char *what;
    const char *kind; /* "operation" */
    int64_t n;        /* its number */
    bool alone;       /* it is only asked about one sample at a time: constants are as good as numbers of a sample */
} checker;

static inline peri_status bad(const checker *c, const char *wrong)
{
    return peri__fail(PERI_EFORMAT, "%s: %s %lld: %s", c->what, c->kind, (long long)c->n, wrong);
}

#define WANT(condition, wrong)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) return bad(c, wrong);                                                                        \
    } while (0)

/** The product of @n sizes of 1 and more, all of them; -1: one is not, or it exceeds PERI__COLUMNS_MOST. */
static inline int64_t product_of(const int64_t *sizes, int32_t n)
{
    int64_t product = 1;
    for (int32_t i = 0; i < n; i++) {
        if (sizes[i] < 1 || sizes[i] > PERI__COLUMNS_MOST || product > PERI__COLUMNS_MOST / sizes[i]) return -1;
        product *= sizes[i];
    }
    return product;
}

static inline bool has_input(const peri__model_list *l, int32_t input)
{
    for (int32_t i = 0; l && i < l->n_inputs; i++)
        if (l->inputs[i] == input) return true;
    return false;
}

/* operation_check.c */

/** Operation number c->n: every index and every size of it. Notes in the model what made its result, and what was read
 *  last by it. */
peri_status peri__check_operation(const checker *c, peri__model_operation *o);
/** Of an input whose ids are raw, no bag takes them as rows. For all operations, once each has been checked. */
peri_status peri__check_raw(const checker *c, const peri__model_operation *o);

#endif
