/* SPDX-License-Identifier: Apache-2.0
 *
 * announce.c: see announce.h.
 */
#include "announce.h"

enum { WAITING, WORDS, AHEAD, EXPLAIN, DONE }; /* phases; WAITING: for parts of this rank */
enum { HEAD_HASH, HEAD_TEXT, HEAD_WORDS };     /* words in front of a part's own, and all of it that goes ahead */

/** One part: where its words lie. */
typedef struct part {
    peri__agreement agreement;
    int64_t out, in; /* words of the parts before it, to each rank (at[out + rank]), and from each */
} part;

struct peri__announce {
    peri__refs refs;       /* operations on their way hold one each: their buffers are here */
    peri_group *group;     /* retained */
    const char *function;  /* of messages */
    peri__announce_numbers numbers;
    uint64_t tag;
    int32_t n, ready;      /* parts; and those that have written their words */
    int32_t phase, other;  /* other: the first rank that differs from this one; -1: none yet */
    int32_t differs;       /* the part that does */
    peri_status status;    /* of the last test: an error stays */
    char *failure;         /* its message */
    int64_t in;            /* words from each rank, those in front included */
    part *parts;           /* n; behind this struct, as are those below */
    int64_t *at;           /* n x group size: where the words of each part for each rank begin in send */
    int64_t *counts;       /* 2 x group size: words to and from each rank */
    int64_t *heads;        /* the words in front, part after part: this rank's, then each rank's */
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

/** Words to all ranks, and those from each: *@in. */
static int64_t words_of(const peri__announce_part *parts, int32_t n, int64_t w, int64_t *in)
{
    int64_t send = 0;
    *in = 0;
    for (int32_t p = 0; p < n; p++) {
        *in += HEAD_WORDS + parts[p].in;
        for (int64_t r = 0; r < w; r++) send += HEAD_WORDS + parts[p].out[r];
    }
    return send;
}

/** Where everything lies; the words in front are written. */
static void lay_out(peri__announce *a, const peri__announce_part *parts)
{
    const int64_t w = a->group->size;
    int64_t in = 0, at = 0;
    for (int32_t p = 0; p < a->n; p++) {
        a->parts[p] = (part){.agreement = parts[p].agreement, .out = p * w, .in = in};
        a->heads[p * HEAD_WORDS + HEAD_HASH] = (int64_t)parts[p].agreement.hash;
        a->heads[p * HEAD_WORDS + HEAD_TEXT] = parts[p].agreement.bytes;
        in += HEAD_WORDS + parts[p].in;
    }
    for (int64_t r = 0; r < w; r++) {
        int64_t first = at;
        for (int32_t p = 0; p < a->n; p++) {
            a->at[p * w + r] = at;
            memcpy(a->send + at, a->heads + (int64_t)p * HEAD_WORDS, sizeof *a->heads * HEAD_WORDS);
            at += HEAD_WORDS + parts[p].out[r];
        }
        a->counts[r] = at - first;
        a->counts[w + r] = in;
    }
}

peri_status peri__announce_new(const char *function, peri_group *group, const peri__announce_part *parts, int32_t n,
                               const peri__announce_numbers *numbers, uint64_t tag, peri__announce **result)
{
    int64_t w = group->size, in, send = words_of(parts, n, w, &in);
    int64_t words = n * w + 2 * w + (int64_t)n * HEAD_WORDS * (w + 1) + send + w * in + w;
    peri__announce *a = peri__alloc_zero(sizeof *a + sizeof(part) * (size_t)n + sizeof(int64_t) * (size_t)words);
    if (!a) return PERI_ENOMEM;
    peri__refs_init(&a->refs);
    peri_group_retain(group);
    a->group = group;
    a->function = function;
    a->numbers = *numbers;
    a->tag = tag;
    a->n = n;
    a->other = -1;
    a->in = in;
    a->parts = (part *)(a + 1);
    a->at = (int64_t *)(a->parts + n);
    a->counts = a->at + n * w;
    a->heads = a->counts + 2 * w;
    a->send = a->heads + (int64_t)n * HEAD_WORDS * (w + 1);
    a->recv = a->send + send;
    a->text_bytes = a->recv + w * in;
    lay_out(a, parts);
    *result = a;
    return PERI_OK;
}

void peri__announce_retain(peri__announce *a) { peri__refs_add(&a->refs); }

void peri__announce_release(peri__announce *a)
{
    if (!a || !peri__refs_drop(&a->refs)) return;
    peri_work_release(a->work);
    peri_group_release(a->group);
    peri__free(a->texts);
    peri__free(a->failure);
    peri__free(a);
}

int64_t *peri__announce_to(const peri__announce *a, int32_t part_, int32_t rank)
{
    return a->send + a->at[a->parts[part_].out + rank] + HEAD_WORDS;
}

const int64_t *peri__announce_from(const peri__announce *a, int32_t part_, int32_t rank)
{
    return a->recv + rank * a->in + a->parts[part_].in + HEAD_WORDS;
}

static void release_announce(void *a) { peri__announce_release(a); }

/** Post the operation of this phase, on buffers of @a. */
static peri_status post_phase(peri__announce *a, peri_coll_op op)
{
    const peri__announce_numbers *n = &a->numbers;
    op.channel = a->phase == EXPLAIN ? PERI_CHANNEL_REPORTS : PERI_CHANNEL_CONTROL;
    op.sequence = a->phase == EXPLAIN ? n->texts : a->phase == AHEAD ? n->ahead : n->words;
    op.tag = a->tag;
    peri__refs_add(&a->refs);
    return peri__coll_post_host(a->group, &op, a, release_announce, &a->work);
}

static peri_status post_words(peri__announce *a)
{
    a->phase = WORDS;
    return post_phase(a, (peri_coll_op){.kind = PERI_COLL_ALL_TO_ALL,
                                        .dtype = PERI_I64,
                                        .send = a->send,
                                        .recv = a->recv,
                                        .send_counts = a->counts,
                                        .recv_counts = a->counts + a->group->size});
}

static peri_status post_ahead(peri__announce *a)
{
    PERI__SCRATCH int64_t *counts = peri__alloc(sizeof *counts * (size_t)a->group->size);
    for (int32_t r = 0; r < a->group->size && counts; r++) counts[r] = (int64_t)a->n * HEAD_WORDS;
    if (!counts) return PERI_ENOMEM;
    a->phase = AHEAD;
    return post_phase(a, (peri_coll_op){.kind = PERI_COLL_ALL_GATHER,
                                  .dtype = PERI_I64,
                                  .send = a->heads,
                                  .recv = a->heads + a->n * HEAD_WORDS,
                                  .send_counts = counts,
                                  .recv_counts = counts});
}

/** The words in front of @part from rank @r, as the operation of this phase brought them. */
static const int64_t *head_of(const peri__announce *a, int32_t part_, int32_t r)
{
    if (a->phase == AHEAD) return a->heads + ((int64_t)(r + 1) * a->n + part_) * HEAD_WORDS;
    return a->recv + r * a->in + a->parts[part_].in;
}

/** Ask all ranks for their texts of the part that differs. */
static peri_status post_texts(peri__announce *a)
{
    const peri__agreement *agreement = &a->parts[a->differs].agreement;
    int64_t total = 0, now = 0;
    for (int32_t r = 0; r < a->group->size; r++)
        total += a->text_bytes[r] = peri__max(0, head_of(a, a->differs, r)[HEAD_TEXT]);
    const int64_t own = a->text_bytes[a->group->rank]; /* as announced */
    a->texts = peri__alloc_zero((size_t)(own + total));
    if (!a->texts) return PERI_ENOMEM;
    const char *text = agreement->text(agreement->ctx, &now);
    memcpy(a->texts, text, (size_t)peri__min(own, now));
    a->phase = EXPLAIN;
    return post_phase(a, (peri_coll_op){.kind = PERI_COLL_ALL_GATHER,
                                  .dtype = PERI_U8,
                                  .send = a->texts,
                                  .recv = a->texts + own,
                                  .send_counts = &own,
                                  .recv_counts = a->text_bytes});
}

/** PERI_OK if all ranks say the same of a part, PERI_PENDING if they have to explain themselves. */
static peri_status compare_part(peri__announce *a, int32_t part_)
{
    const peri__agreement *agreement = &a->parts[part_].agreement;
    const int64_t own = head_of(a, part_, a->group->rank)[HEAD_HASH], first = head_of(a, part_, 0)[HEAD_HASH];
    bool same = true;
    for (int32_t r = 0; r < a->group->size; r++) {
        const int64_t hash = head_of(a, part_, r)[HEAD_HASH];
        same = same && hash == first;
        if (a->other < 0 && hash != own) a->other = r;
    }
    if (same) return PERI_OK;
    a->differs = part_; /* the same one on all ranks, since they compare the same */
    if (!agreement->bytes) return agreement->differ(agreement->ctx, a->other, NULL, NULL);
    PERI_TRY(post_texts(a));
    return PERI_PENDING;
}

static peri_status compare_parts(peri__announce *a)
{
    for (int32_t p = 0; p < a->n; p++) {
        peri_status status = compare_part(a, p);
        if (status != PERI_OK) return status;
    }
    return PERI_OK;
}

/** The announcement's error, for all of its parts, whichever of them met it; PERI_OK: there is none. */
static peri_status announced_failure(const peri__announce *a)
{
    return a->status < 0 ? peri__fail(a->status, "%s", a->failure ? a->failure : a->function) : PERI_OK;
}

static peri_status keep_failure(peri__announce *a, peri_status status)
{
    a->status = status;
    if (status < 0) a->failure = peri__strdup(peri_error_message());
    return status;
}

peri_status peri__announce_post(peri__announce *a)
{
    PERI_TRY(announced_failure(a));
    if (++a->ready < a->n) return PERI_OK;
    return keep_failure(a, a->numbers.ahead ? post_ahead(a) : post_words(a));
}

/** The operation of this phase is complete. */
static peri_status enter_next_phase(peri__announce *a)
{
    peri_status status;
    switch (a->phase) {
    case AHEAD:
        if ((status = compare_parts(a)) != PERI_OK) return status;
        PERI_TRY(post_words(a));
        return PERI_PENDING;
    case WORDS:
        if ((status = compare_parts(a)) != PERI_OK) return status;
        if (a->numbers.texts) peri__group_skip(a->group, PERI_CHANNEL_REPORTS, a->numbers.texts);
        a->phase = DONE;
        return PERI_OK;
    default: {
        const peri__agreement *agreement = &a->parts[a->differs].agreement;
        return agreement->differ(agreement->ctx, a->other, a->texts + a->text_bytes[a->group->rank], a->text_bytes);
    }
    }
}

static peri_status advance_phases(peri__announce *a)
{
    while (a->phase != DONE) {
        peri_status status = a->phase == WAITING ? PERI_PENDING : peri_work_test(a->work);
        if (status < 0) return status;
        /* are all parts still there? */
        if (status == PERI_OK || a->phase == WAITING) PERI_TRY(peri__group_check(a->function, a->group));
        if (status != PERI_OK) return status;
        peri_work_release(a->work);
        a->work = NULL;
        status = enter_next_phase(a);
        if (status < 0) return status;
    }
    return PERI_OK;
}

peri_status peri__announce_test(peri__announce *a)
{
    PERI_TRY(announced_failure(a));
    return keep_failure(a, advance_phases(a));
}
