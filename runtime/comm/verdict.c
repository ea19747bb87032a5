/* SPDX-License-Identifier: Apache-2.0
 *
 * verdict.c: see verdict.h. A verdict is an announcement: ranks that have done their parts agree. Where they do not,
 * each says what it met.
 */
#include "verdict.h"
#include "announce.h"

enum { TEXT = 1000 };

/** What a rank says. */
typedef struct words {
    int32_t status; /* PERI_OK: it has done its part */
    char text[TEXT];
} words;

struct peri__verdict {
    peri_group *group;        /* retained */
    peri__announce_numbers numbers;
    peri__announce *announce; /* NULL: not posted yet */
    words words;              /* this rank's */
};

peri_status peri__verdict_new(peri_group *group, peri__verdict **out)
{
    peri__verdict *v = peri__alloc_zero(sizeof *v);
    if (!v) return PERI_ENOMEM;
    peri_group_retain(group);
    v->group = group;
    peri_status status = peri__announce_reserve(group, false, true, &v->numbers);
    if (status < 0) peri__verdict_release(v);
    else *out = v;
    return status;
}

void peri__verdict_release(peri__verdict *v)
{
    if (!v) return;
    peri__announce_release(v->announce);
    peri_group_release(v->group);
    peri__free(v);
}

void peri__verdict_note(peri__verdict *v, peri_status status)
{
    if (v->words.status < 0) return;
    v->words.status = status;
    snprintf(v->words.text, sizeof v->words.text, "rank %d: %s", v->group->rank, peri_error_message());
}

static const char *failure_words(void *verdict, int64_t *bytes)
{
    peri__verdict *v = verdict;
    *bytes = (int64_t)sizeof v->words;
    return (const char *)&v->words;
}

/** The error is that of the first rank that met one. */
static peri_status explain_difference(void *verdict, int32_t other, const char *texts, const int64_t *bytes)
{
    (void)other;
    const peri__verdict *v = verdict;
    words w = {0};
    for (int32_t r = 0; r < v->group->size && w.status >= 0; texts += bytes[r++])
        memcpy(&w, texts, (size_t)peri__min(bytes[r], (int64_t)sizeof w));
    w.text[TEXT - 1] = 0;
    return peri__fail(w.status < 0 ? w.status : PERI_EINTERNAL, "%s", w.text);
}

peri_status peri__verdict_post(peri__verdict *v)
{
    PERI__SCRATCH int64_t *none = peri__alloc_zero(sizeof *none * (size_t)v->group->size);
    if (!none) return PERI_ENOMEM;
    const peri__announce_part part = {.agreement = {.hash = v->words.status < 0 ? (uint64_t)v->group->rank + 1 : 0,
                                                    .bytes = (int64_t)sizeof v->words,
                                                    .ctx = v,
                                                    .text = failure_words,
                                                    .differ = explain_difference},
                                      .out = none};
    PERI_TRY(peri__announce_new("peri_coll", v->group, &part, 1, &v->numbers, 0, &v->announce));
    return peri__announce_post(v->announce);
}

peri_status peri__verdict_test(peri__verdict *v) { return peri__announce_test(v->announce); }
