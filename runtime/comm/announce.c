/* SPDX-License-Identifier: Apache-2.0
 *
 * announce.c: see announce.h.
 */
#include "announce.h"

enum { WORDS, AHEAD, EXPLAIN, DONE };      /* phases */
enum { HEAD_HASH, HEAD_TEXT, HEAD_WORDS }; /* words in front of the caller's, and all that goes ahead */

struct peri__announce {
    peri__refs refs;       /* operations on their way hold one each: their buffers are here */
    peri_group *group;     /* retained */
    peri__agreement agreement;
    peri__announce_numbers numbers;
    uint64_t tag;
    int32_t phase, other;  /* other: the first rank that differs from this one; -1: none yet */
    int64_t in;            /* words from each rank, those in front included */
    int64_t *first;        /* group size + 1: where each rank's words begin in send; behind this struct, as are those below */
    int64_t *counts;       /* 2 x group size: words to and from each rank */
    int64_t *heads;        /* the words in front: this rank's, then each rank's */
    int64_t *send, *recv;
    int64_t *text_bytes;   /* group size: how long the texts of the ranks are */
    char *texts;           /* this rank's, then all of them */
    peri_work *work;
};

peri_status peri__announce_reserve(peri_group *group, bool ahead, bool texts, peri__announce_numbers *out)
{
    *out = (peri__announce_numbers){0};
    if (ahead) PERI_TRY(peri__group_reserve(group, PERI_CHANNEL_CONTROL, 1, &out->ahead));
    if (texts) PERI_TRY(peri__group_reserve(group, PERI_CHANNEL_REPORTS, 1, &out->texts));
    return peri__group_reserve(group, PERI_CHANNEL_CONTROL, 1, &out->words);
}

peri_status peri__announce_new(peri_group *group, const peri__agreement *agreement, const int64_t *out, int64_t in,
                               const peri__announce_numbers *numbers, peri__announce **result)
{
    int64_t w = group->size, send = 0;
    for (int64_t r = 0; r < w; r++) send += HEAD_WORDS + out[r];
    in += HEAD_WORDS;
    int64_t words = w + 1 + 2 * w + HEAD_WORDS * (w + 1) + send + w * in + w;
    peri__announce *a = peri__alloc_zero(sizeof *a + sizeof(int64_t) * (size_t)words);
    if (!a) return PERI_ENOMEM;
    peri__refs_init(&a->refs);
    peri_group_retain(group);
    a->group = group;
    a->agreement = *agreement;
    a->numbers = *numbers;
    a->phase = numbers->ahead ? AHEAD : WORDS;
    a->other = -1;
    a->in = in;
    a->first = (int64_t *)(a + 1);
    a->counts = a->first + w + 1;
    a->heads = a->counts + 2 * w;
    a->send = a->heads + HEAD_WORDS * (w + 1);
    a->recv = a->send + send;
    a->text_bytes = a->recv + w * in;
    a->heads[HEAD_HASH] = (int64_t)agreement->hash;
    a->heads[HEAD_TEXT] = agreement->bytes;
    for (int64_t r = 0; r < w; r++) {
        a->counts[r] = HEAD_WORDS + out[r];
        a->counts[w + r] = in;
        a->first[r + 1] = a->first[r] + a->counts[r];
        memcpy(a->send + a->first[r], a->heads, sizeof *a->heads * HEAD_WORDS);
    }
    *result = a;
    return PERI_OK;
}

void peri__announce_release(peri__announce *a)
{
    if (!a || !peri__refs_drop(&a->refs)) return;
    peri_work_release(a->work);
    peri_group_release(a->group);
    peri__free(a->texts);
    peri__free(a);
}

int64_t *peri__announce_to(const peri__announce *a, int32_t rank) { return a->send + a->first[rank] + HEAD_WORDS; }

const int64_t *peri__announce_from(const peri__announce *a, int32_t rank) { return a->recv + rank * a->in + HEAD_WORDS; }

static void release(void *a) { peri__announce_release(a); }

/** Post the operation of this phase, on buffers of @a. */
static peri_status post(peri__announce *a, peri_coll_op op)
{
    const peri__announce_numbers *n = &a->numbers;
    op.channel = a->phase == EXPLAIN ? PERI_CHANNEL_REPORTS : PERI_CHANNEL_CONTROL;
    op.sequence = a->phase == EXPLAIN ? n->texts : a->phase == AHEAD ? n->ahead : n->words;
    peri__refs_add(&a->refs);
    return peri__coll_post_host(a->group, &op, a, release, &a->work);
}

static peri_status post_words(peri__announce *a)
{
    return post(a, (peri_coll_op){.kind = PERI_COLL_ALL_TO_ALL, .dtype = PERI_I64, .tag = a->tag, .send = a->send, .recv = a->recv,
                                  .send_counts = a->counts, .recv_counts = a->counts + a->group->size});
}

static peri_status post_ahead(peri__announce *a)
{
    int64_t *counts = peri__alloc(sizeof *counts * (size_t)a->group->size);
    for (int32_t r = 0; r < a->group->size && counts; r++) counts[r] = HEAD_WORDS;
    if (!counts) return PERI_ENOMEM;
    peri_status status = post(a, (peri_coll_op){.kind = PERI_COLL_ALL_GATHER, .dtype = PERI_I64, .tag = a->tag, .send = a->heads,
                                                .recv = a->heads + HEAD_WORDS, .send_counts = counts, .recv_counts = counts});
    peri__free(counts);
    return status;
}

/** Ask all ranks for their texts; @heads: of rank 0, @stride words from one rank's to the next's. */
static peri_status post_texts(peri__announce *a, const int64_t *heads, int64_t stride)
{
    int64_t total = 0, now = 0;
    for (int32_t r = 0; r < a->group->size; r++) total += a->text_bytes[r] = peri__max(0, heads[r * stride + HEAD_TEXT]);
    const int64_t own = a->text_bytes[a->group->rank]; /* as announced */
    a->texts = peri__alloc_zero((size_t)(own + total));
    if (!a->texts) return PERI_ENOMEM;
    const char *text = a->agreement.text(a->agreement.ctx, &now);
    memcpy(a->texts, text, (size_t)peri__min(own, now));
    a->phase = EXPLAIN;
    return post(a, (peri_coll_op){.kind = PERI_COLL_ALL_GATHER, .dtype = PERI_U8, .tag = a->tag, .send = a->texts, .recv = a->texts + own,
                                  .send_counts = &own, .recv_counts = a->text_bytes});
}

/** PERI_OK if all ranks say the same of themselves, PERI_PENDING if they have to explain themselves. */
static peri_status compare(peri__announce *a, const int64_t *heads, int64_t stride)
{
    int32_t rank = a->group->rank;
    bool same = true;
    for (int32_t r = 0; r < a->group->size; r++) {
        same = same && heads[r * stride + HEAD_HASH] == heads[HEAD_HASH];
        if (a->other < 0 && heads[r * stride + HEAD_HASH] != heads[rank * stride + HEAD_HASH]) a->other = r;
    }
    if (same) return PERI_OK;
    if (!a->agreement.bytes) return a->agreement.differ(a->agreement.ctx, a->other, NULL, NULL);
    PERI_TRY(post_texts(a, heads, stride));
    return PERI_PENDING;
}

peri_status peri__announce_post(peri__announce *a, uint64_t tag)
{
    a->tag = tag;
    return a->phase == AHEAD ? post_ahead(a) : post_words(a);
}

/** The operation of this phase is complete. */
static peri_status go_on(peri__announce *a)
{
    switch (a->phase) {
    case AHEAD:
        PERI_TRY(compare(a, a->heads + HEAD_WORDS, HEAD_WORDS));
        if (a->phase == EXPLAIN) return PERI_PENDING;
        a->phase = WORDS;
        PERI_TRY(post_words(a));
        return PERI_PENDING;
    case WORDS:
        PERI_TRY(compare(a, a->recv, a->in));
        if (a->phase == EXPLAIN) return PERI_PENDING;
        if (a->numbers.texts) peri__group_skip(a->group, PERI_CHANNEL_REPORTS, a->numbers.texts);
        a->phase = DONE;
        return PERI_OK;
    default: return a->agreement.differ(a->agreement.ctx, a->other, a->texts + a->text_bytes[a->group->rank], a->text_bytes);
    }
}

peri_status peri__announce_test(peri__announce *a)
{
    while (a->phase != DONE) {
        peri_status status = peri_work_test(a->work);
        if (status != PERI_OK) return status;
        peri_work_release(a->work);
        a->work = NULL;
        status = go_on(a);
        if (status < 0) return status;
    }
    return PERI_OK;
}
