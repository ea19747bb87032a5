/* SPDX-License-Identifier: Apache-2.0
 *
 * names.h: numbers that are found by a name. The texts stay with the caller, who compares them: several numbers may
 * have the same name (parts of one tensor), and two names may have the same hash.
 *
 *     for (int64_t at = -1, i; (i = peri__names_next(&index, name, &at)) >= 0;)
 *         if (strcmp(entries[i].name, name) == 0) ... entry i has this name ...
 */
#ifndef PERI_CHECKPOINT_NAMES_H
#define PERI_CHECKPOINT_NAMES_H

#include "../base/base_internal.h"

typedef struct peri__names_slot {
    uint64_t hash;
    int64_t number; /* -1: the slot is free */
} peri__names_slot;

/** Begins as zeros. */
typedef struct peri__names {
    peri__names_slot *slots; /* [n_slots], a power of 2: a number is in the first free slot from its hash on */
    int64_t n, n_slots;
} peri__names;

/** Add @number (0 or more) under @name. */
peri_status peri__names_add(peri__names *index, const char *name, int64_t number);
/** The next number under a name of @name's hash; -1: there are no more. *@at: -1 before the first. */
int64_t peri__names_next(const peri__names *index, const char *name, int64_t *at);
/** Free what it has. */
void peri__names_free(peri__names *index);

#endif
