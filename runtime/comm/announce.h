/* SPDX-License-Identifier: Apache-2.0
 *
 * comm/announce.h (L3): what ranks tell each other before data: that they are about to do the same, and the sizes of what is to come.
 *
 * Every rank writes some words for every other, one all_to_all carries them, with a hash over what all ranks must agree on in front. Where
 * hashes differ the ranks say in words what they are about to do, and every rank names the difference. Where the number of words depends
 * on what they agree on, the hashes can go ahead.
 */
#ifndef PERI_COMM_ANNOUNCE_H
#define PERI_COMM_ANNOUNCE_H

#include "internal.h"

/** What all ranks must agree on. */
typedef struct peri__agreement {
    uint64_t hash;  /* over all of it, now */
    int64_t bytes;  /* of the same in words, now; 0: there are none */
    void *ctx;
    /* The words, which may have changed since; borrowed until the call returns. (bytes > 0) */
    const char *(*text)(void *ctx, int64_t *bytes);
    /* PERI_EMISMATCH in the caller's name: rank @other is the first that differs from this one (-1: only others do). @texts: those of all
     * ranks one after the other, @bytes[group size] long; NULL: there are none. */
    peri_status (*differ)(void *ctx, int32_t other, const char *texts, const int64_t *bytes);
} peri__agreement;

/** Numbers of an announcement's operations (peri__group_reserve): what goes ahead (0: nothing does) and the words are on
 *  PERI_CHANNEL_CONTROL, the texts (0: there are none) on PERI_CHANNEL_REPORTS, where they hold nothing up. */
typedef struct peri__announce_numbers {
    uint64_t ahead, words, texts;
} peri__announce_numbers;

/** Take them, when the protocol is made. @ahead: the hashes go first; @texts: the agreement will have words. The same on all ranks. */
peri_status peri__announce_reserve(peri_group *group, bool ahead, bool texts, peri__announce_numbers *out);

typedef struct peri__announce peri__announce;

/** @out[group size]: words for each rank; @in: words from each rank, the same from all. The agreement's ctx is used by the tests only.
 *  @result new, to be released. */
peri_status peri__announce_new(peri_group *group, const peri__agreement *agreement, const int64_t *out, int64_t in,
                               const peri__announce_numbers *numbers, peri__announce **result);
void peri__announce_release(peri__announce *a);
/** The words for @rank, to be written before the post. */
int64_t *peri__announce_to(const peri__announce *a, int32_t rank);
/** @tag: as in peri_coll_op. */
peri_status peri__announce_post(peri__announce *a, uint64_t tag);
/** PERI_OK: all ranks agree, and their words are here; PERI_PENDING; or the error. */
peri_status peri__announce_test(peri__announce *a);
/** The words from @rank. Nothing about them was checked. */
const int64_t *peri__announce_from(const peri__announce *a, int32_t rank);

#endif
