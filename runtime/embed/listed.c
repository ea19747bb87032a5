/* SPDX-License-Identifier: Apache-2.0
 *
 * listed.c: the table batches that there are, so that the one whose memory a view is of can be found.
 */
#include "internal.h"

static struct {
    pthread_mutex_t lock;
    peri_tbe *first;
} listed = {.lock = PTHREAD_MUTEX_INITIALIZER};

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

/** The table batch, retained, in the memory of whose state number *@state the tensor lies; NULL: none. */
static peri_tbe *holding(const peri_tensor *t, int32_t *state)
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

/** The table whose part @t is: it has all its rows, where peri_tbe_state has them. -1: none. */
static int64_t table_of_view(const peri_tbe *tbe, int32_t state, const peri_tensor *t)
{
    for (int64_t i = 0; i < tbe->n_tables; i++) {
        peri_tensor *view;
        if (peri__state_view((peri_tbe *)(uintptr_t)tbe, i, state, &view) < 0) return -1;
        const bool same = view->ndim == t->ndim && view->offset == t->offset && view->shape[0] > 0 &&
                          memcmp(view->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0 &&
                          memcmp(view->stride, t->stride, (size_t)t->ndim * sizeof *t->stride) == 0;
        peri_tensor_release(view);
        if (same) return i;
    }
    return -1;
}

peri_tbe *peri__tbe_of_view(const peri_tensor *t, int64_t *table, int32_t *state)
{
    peri_tbe *tbe = holding(t, state);
    if (!tbe) return NULL;
    const int32_t geometry = tbe->state[*state].geometry;
    *table = geometry == PERI_STATE_FULL || geometry == PERI_STATE_ROW ? table_of_view(tbe, *state, t) : -1;
    if (*table >= 0) return tbe;
    peri_tbe_release(tbe);
    return NULL;
}

peri_status peri_tbe_of_view(const peri_tensor *t, peri_tbe **tbe, int64_t *table, const char **name)
{
    int32_t state;
    PERI_NEED(t);
    PERI_NEED(tbe);
    PERI_NEED(table);
    PERI_NEED(name);
    *tbe = peri__tbe_of_view(t, table, &state);
    if (*tbe) *name = (*tbe)->state[state].name;
    return PERI_OK;
}
