/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/announce.h (L3): what ranks tell each other before data: that they are about to do the same, and the sizes of
 * what is to come.
 *
 * Every rank writes some words for every other, one all_to_all carries them, with a hash over what all ranks must agree
 * on in front. Where hashes differ the ranks say in words what they are about to do, and every rank names the
 * difference. Where the number of words depends on what they agree on, the hashes can go ahead.
 *
 * Several who are about to exchange something announce it together: each is a part, with words and an agreement of its
 * own, and the words set out once all parts have theirs.
 */
#ifndef PERI_COMM_ANNOUNCE_H
#define PERI_COMM_ANNOUNCE_H

#include "comm_internal.h"

/** What all ranks must agree on. */
typedef struct peri__agreement {
    uint64_t hash;  /* over all of it, now */
    int64_t bytes;  /* of the same in words, now; 0: there are none */
    void *ctx;
    /* The words, which may have changed since; borrowed until the call returns. (bytes > 0) */
    const char *(*text)(void *ctx, int64_t *bytes);
    /* PERI_EMISMATCH in the caller's name: rank @other is the first that differs from this one (-1: only others do).
     * @texts: those of all ranks one after the other, @bytes[group size] long; NULL: there are none. */
    peri_status (*differ)(void *ctx, int32_t other, const char *texts, const int64_t *bytes);
} peri__agreement;

/** Numbers of an announcement's operations (peri__group_reserve): what goes ahead (0: nothing does) and the words are
 *  on PERI_CHANNEL_CONTROL, the texts (0: there are none) on PERI_CHANNEL_REPORTS, where they hold nothing up. */
typedef struct peri__announce_numbers {
    uint64_t ahead, words, texts;
} peri__announce_numbers;

/** Take them, when the protocol is made. @ahead: the hashes go first; @texts: the agreement will have words. The same
 *  on all ranks. */
peri_status peri__announce_reserve(peri_group *group, bool ahead, bool texts, peri__announce_numbers *out);

typedef struct peri__announce peri__announce;

/** One part of an announcement. */
typedef struct peri__announce_part {
    peri__agreement agreement; /* its ctx lives until the announcement is through, has failed, or its group has */
    const int64_t *out; /* group size: words for each rank; borrowed by peri__announce_new */
    int64_t in;         /* words from each rank, the same from all */
} peri__announce_part;

/** Of @n parts; all ranks have as many. @function: of messages, static; @tag: as in peri_coll_op. @result new, to be
 *  released. */
peri_status peri__announce_new(const char *function, peri_group *group, const peri__announce_part *parts, int32_t n,
                               const peri__announce_numbers *numbers, uint64_t tag, peri__announce **result);
/** Another reference. */
void peri__announce_retain(peri__announce *a);
void peri__announce_release(peri__announce *a);
/** The words of @part for @rank, to be written before its post. */
int64_t *peri__announce_to(const peri__announce *a, int32_t part, int32_t rank);
/** One part more has written its words; with the last one they set out. */
peri_status peri__announce_post(peri__announce *a);
/** PERI_OK: all ranks agree, and their words are here; PERI_PENDING; or the error, which is that of all parts. Waits
 *  for no part of this rank: where one was given up, its group has failed. */
peri_status peri__announce_test(peri__announce *a);
/** The words of @part from @rank. Nothing about them was checked. */
const int64_t *peri__announce_from(const peri__announce *a, int32_t part, int32_t rank);

#endif
