/* SPDX-License-Identifier: Apache-2.0
 *
 * names.c: numbers that are found by a name (names.h).
 */
#include "names.h"

static void put_in_slot(peri__names_slot *slots, int64_t n_slots, peri__names_slot x)
{
    int64_t at = (int64_t)(x.hash & (uint64_t)(n_slots - 1));
    while (slots[at].number >= 0) at = (at + 1) & (n_slots - 1);
    slots[at] = x;
}

/** Twice as many slots. */
static peri_status widen(peri__names *index)
{
    const int64_t n = peri__max(64, 2 * index->n_slots);
    peri__names_slot *slots = peri__alloc(sizeof *slots * (size_t)n);
    if (!slots) return PERI_ENOMEM;
    for (int64_t i = 0; i < n; i++) slots[i].number = -1;
    for (int64_t i = 0; i < index->n_slots; i++)
        if (index->slots[i].number >= 0) put_in_slot(slots, n, index->slots[i]);
    peri__free(index->slots);
    index->slots = slots;
    index->n_slots = n;
    return PERI_OK;
}

peri_status peri__names_add(peri__names *index, const char *name, int64_t number)
{
    if (2 * (index->n + 1) > index->n_slots) PERI_TRY(widen(index));
    put_in_slot(index->slots, index->n_slots, (peri__names_slot){peri__hash_text(name), number});
    index->n++;
    return PERI_OK;
}

int64_t peri__names_next(const peri__names *index, const char *name, int64_t *at)
{
    if (!index->n) return -1;
    const uint64_t hash = peri__hash_text(name);
    const int64_t mask = index->n_slots - 1;
    for (*at = *at < 0 ? (int64_t)(hash & (uint64_t)mask) : (*at + 1) & mask; index->slots[*at].number >= 0;
         *at = (*at + 1) & mask)
        if (index->slots[*at].hash == hash) return index->slots[*at].number;
    return -1;
}

void peri__names_free(peri__names *index)
{
    peri__free(index->slots);
    *index = (peri__names){0};
}
