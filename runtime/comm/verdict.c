/* SPDX-License-Identifier: Apache-2.0
 *
 * verdict.c: see verdict.h. One number from each rank says whether somebody failed, and who; only then that rank sends
 * its words.
 */
#include "verdict.h"

enum { TEXT = 1000 };

/** What the rank that failed says. */
typedef struct words {
    int32_t status;
    char text[TEXT];
} words;

struct peri__verdict {
    peri__refs refs;           /* operations on their way hold one each: their buffers are here */
    peri_group *group;         /* retained */
    uint64_t number, text;     /* of the two operations */
    int64_t failed;            /* this rank's part, then the largest of all: group size - rank of who failed, 0:
                                  nobody */
    bool explains, done;       /* the words are on their way; nothing is left to wait for */
    words words;
    peri_work *work;
};

peri_status peri__verdict_new(peri_group *group, peri__verdict **out)
{
    peri__verdict *v = peri__alloc_zero(sizeof *v);
    if (!v) return PERI_ENOMEM;
    peri__refs_init(&v->refs);
    peri_group_retain(group);
    v->group = group;
    peri_status status = peri__group_reserve(group, PERI_CHANNEL_CONTROL, 1, &v->number);
    if (status >= 0) status = peri__group_reserve(group, PERI_CHANNEL_REPORTS, 1, &v->text);
    if (status < 0) peri__verdict_release(v);
    else *out = v;
    return status;
}

void peri__verdict_release(peri__verdict *v)
{
    if (!v || !peri__refs_drop(&v->refs)) return;
    peri_work_release(v->work);
    peri_group_release(v->group);
    peri__free(v);
}

void peri__verdict_note(peri__verdict *v, peri_status status)
{
    if (v->failed) return;
    v->failed = v->group->size - v->group->rank;
    v->words.status = status;
    snprintf(v->words.text, sizeof v->words.text, "rank %d: %s", v->group->rank, peri_error_message());
}

static void release(void *v) { peri__verdict_release(v); }

static peri_status post(peri__verdict *v, peri_coll_op op)
{
    peri__refs_add(&v->refs);
    return peri__coll_post_host(v->group, &op, v, release, &v->work);
}

peri_status peri__verdict_post(peri__verdict *v)
{
    return post(v, (peri_coll_op){.kind = PERI_COLL_ALL_REDUCE,
                                  .dtype = PERI_I64,
                                  .reduce = PERI_REDUCE_MAX,
                                  .count = 1,
                                  .recv = &v->failed,
                                  .send = &v->failed,
                                  .channel = PERI_CHANNEL_CONTROL,
                                  .sequence = v->number});
}

peri_status peri__verdict_test(peri__verdict *v)
{
    while (!v->done) {
        peri_status status = peri_work_test(v->work);
        if (status != PERI_OK) return status;
        peri_work_release(v->work);
        v->work = NULL;
        v->done = v->explains || !v->failed;
        if (v->done && !v->explains) peri__group_skip(v->group, PERI_CHANNEL_REPORTS, v->text);
        if (v->done) continue;
        v->explains = true;
        PERI_TRY(post(v, (peri_coll_op){.kind = PERI_COLL_BROADCAST,
                                        .dtype = PERI_U8,
                                        .count = (int64_t)sizeof v->words,
                                        .send = &v->words,
                                        .recv = &v->words,
                                        .root = v->group->size - (int32_t)v->failed,
                                        .channel = PERI_CHANNEL_REPORTS,
                                        .sequence = v->text}));
    }
    if (!v->failed) return PERI_OK;
    v->words.text[TEXT - 1] = 0;
    return peri__fail(v->words.status, "%s", v->words.text);
}
