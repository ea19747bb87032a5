/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_list.c: the table batches that there are, so that the one whose memory a view is of can be found.
 */
#include "embed_internal.h"

static struct {
    pthread_mutex_t lock;
    peri_tbe *first;
} listed = {.lock = PTHREAD_MUTEX_INITIALIZER};
PERI_FORK_LOCK(listed.lock, PERI__FORK_LISTED)

void peri__tbe_list(peri_tbe *tbe)
{
    pthread_mutex_lock(&listed.lock);
    tbe->next_listed = listed.first;
    listed.first = tbe;
    pthread_mutex_unlock(&listed.lock);
}

void peri__tbe_unlist(peri_tbe *tbe)
{
    pthread_mutex_lock(&listed.lock);
    for (peri_tbe **t = &listed.first; *t; t = &(*t)->next_listed) {
        if (*t != tbe) continue;
        *t = tbe->next_listed;
        break;
    }
    pthread_mutex_unlock(&listed.lock);
}

peri_tbe *peri__tbe_holding(const peri_tensor *t, int32_t *state)
{
    peri_tbe *found = NULL;
    pthread_mutex_lock(&listed.lock);
    for (peri_tbe *tbe = listed.first; tbe && !found; tbe = tbe->next_listed)
        for (int32_t i = 0; i < tbe->n_states && tbe->store->whole && !found; i++)
            if (tbe->state[i].flat->storage == t->storage) found = tbe, *state = i;
    int refs = found ? atomic_load(&found->refs) : 0; /* 0: another thread is freeing it */
    while (refs > 0 && !atomic_compare_exchange_weak(&found->refs, &refs, refs + 1)) {
    }
    pthread_mutex_unlock(&listed.lock);
    return refs > 0 ? found : NULL;
}
