/* SPDX-License-Identifier: Apache-2.0
 *
 * arena.c: the memory of captures, and notes about what is captured: what devices and storages call while a thread
 * captures.
 */
#include "capture.h"

#include "../../kernels/work.h"

_Thread_local peri__capture *peri__capturing;
static _Thread_local peri__arena *dead_arenas; /* that went while this thread was capturing */

peri_status peri__cannot_capture(const peri_device *device, const char *what)
{
    if (!peri__device_is_captured(device)) return PERI_OK;
    return peri__fail(PERI_EUNSUPPORTED,
                      "peri_graph_begin: %s cannot be captured in a graph of %s; do it before or behind the captured "
                      "function",
                      what, device->name);
}

/* -- arenas -------------------------------------------------------------------------------------------------------- */

peri_status peri__arena_new(const peri_stream *work, peri__arena **out)
{
    peri__arena *a = peri__alloc_zero(sizeof *a);
    if (!a) return PERI_ENOMEM;
    a->device = work->device;
    a->work = work;
    a->queue = work->ctx;
    const peri_device_vtab *v = a->device->vtab;
    peri_status status = v->stream_new(a->device->ctx, &a->memory);
    if (status >= 0 && (status = v->event_new(a->device->ctx, &a->mark)) < 0)
        v->stream_delete(a->device->ctx, a->memory);
    if (status < 0) {
        peri__free(a);
        return status;
    }
    peri__refs_init(&a->refs);
    pthread_mutex_init(&a->lock, NULL);
    *out = a;
    return PERI_OK;
}

/** Memory goes when all launches have run. */
static void arena_delete(peri__arena *a)
{
    const peri_device_vtab *v = a->device->vtab;
    void *device = a->device->ctx;
    peri_status status = v->event_record(device, a->mark, a->queue);
    if (status >= 0) status = v->stream_wait(device, a->memory, a->mark);
    if (status < 0) (void)v->stream_sync(device, a->queue);
    for (peri__block *b = a->blocks, *next; b; b = next) {
        next = b->next;
        v->free(device, a->memory, b->data, b->bytes);
        peri__free(b);
    }
    pthread_mutex_destroy(&a->lock);
    v->event_delete(device, a->mark);
    v->stream_delete(device, a->memory);
    peri__free(a);
}

void peri__arena_release(peri__arena *a)
{
    if (!a || !peri__refs_drop(&a->refs)) return;
    if (!peri__device_is_captured(a->device)) arena_delete(a);
    else a->dead = dead_arenas, dead_arenas = a;
}

void peri__arenas_end(void)
{
    for (peri__arena *a = dead_arenas, *next; a; a = next) {
        next = a->dead;
        arena_delete(a);
    }
    dead_arenas = NULL;
}

/** A free block for @bytes of which at most half stays empty, or a new one. */
peri_status peri__arena_take(peri__arena *a, int64_t bytes, bool kept, peri__block **out)
{
    enum { UNIT = 512 };
    const int64_t room = (peri__max(bytes, 1) + UNIT - 1) / UNIT * UNIT;
    peri__block *best = NULL;
    pthread_mutex_lock(&a->lock);
    for (peri__block *b = a->blocks; b; b = b->next)
        if (!kept && !b->used && b->bytes >= room && b->bytes <= 2 * room && (!best || b->bytes < best->bytes))
            best = b;
    if (best) best->used = true;
    pthread_mutex_unlock(&a->lock);
    if (!best) {
        const peri_device_vtab *v = a->device->vtab;
        void *data = NULL;
        best = peri__alloc_zero(sizeof *best);
        if (!best) return PERI_ENOMEM;
        peri_status status = v->alloc(a->device->ctx, a->memory, room, &data);
        if (status < 0) {
            peri__free(best);
            return status;
        }
        *best = (peri__block){.arena = a, .data = data, .bytes = room, .used = true, .kept = kept};
        pthread_mutex_lock(&a->lock);
        best->next = a->blocks;
        a->blocks = best;
        pthread_mutex_unlock(&a->lock);
    }
    *out = best;
    return PERI_OK;
}

peri__block *peri__arena_find(const peri__arena *a, const char *p)
{
    for (peri__block *b = a->blocks; b; b = b->next)
        if (p >= b->data && p < b->data + b->bytes) return b;
    return NULL;
}

/* -- what is captured ---------------------------------------------------------------------------------------------- */

/** Why @work cannot be captured; NULL: it can. */
static const char *refusal(int32_t work)
{
    switch (work) {
#define X(name, args) case PERI_K_##name:
        PERI_KERNELS_OPTIM(X)
#undef X
#define X(name, args) case PERI_OP_##name:
        PERI_OPS_OPTIM(X)
#undef X
        return "an optimizer's step or the clipping of gradients (their numbers would be those of this step for ever)";
#define X(name, args) case PERI_K_##name:
        PERI_KERNELS_TBE(X)
        PERI_KERNELS_CACHE(X)
        PERI_KERNELS_COLLISION(X)
#undef X
#define X(name, args) case PERI_OP_##name:
        PERI_OPS_TBE(X)
#undef X
        return "a lookup in embedding tables, or their update";
    case PERI_K_random: return "the drawing of random numbers (the host counts their seeds)";
    default: return NULL;
    }
}

/** The external whose memory holds @p, or NULL. */
static peri__external *external_of(const peri__capture *r, const char *p)
{
    int64_t low = 0, high = r->n_externals; /* the last one that begins at @p or before it */
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (r->externals[middle].data <= p) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return NULL;
    peri__external *e = &r->externals[low - 1];
    return p < e->data + peri__max(e->storage->bytes, 1) ? e : NULL;
}

/** Whatever word looks like the address of a storage is one: at worst a storage is kept that need not be. */
void peri__capture_words(const void *words, size_t bytes)
{
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, (const char *)words + at, sizeof word);
        peri__external *e = external_of(peri__capturing, (const char *)word);
        if (e) e->reached = true;
    }
}

peri_status peri__capture_work(const peri_stream *stream, int32_t work, const void *args, size_t bytes)
{
    const peri__capture *r = peri__capturing;
    const char *why = work >= 0 ? refusal(work) : NULL;
    if (why) return peri__cannot_capture(r->device, why);
    if (stream != r->arena->work)
        return peri__cannot_capture(r->device, "work on another stream than the one that was current at its beginning");
    peri__capture_words(args, bytes);
    return PERI_OK;
}

void peri__block_release(peri__block *b)
{
    pthread_mutex_lock(&b->arena->lock);
    b->used = b->kept;
    pthread_mutex_unlock(&b->arena->lock);
}

/* -- changes ------------------------------------------------------------------------------------------------------- */

void peri__capture_changed(const peri_tensor *t)
{
    peri__capture *r = peri__capturing;
    if (!external_of(r, t->storage->data)) return; /* the arena's: as new each time */
    peri_tensor **more = peri__realloc(r->changed, sizeof *more * (size_t)(r->n_changed + 1));
    if (!more) {
        r->lacks_memory = true;
        return;
    }
    r->changed = more;
    more[r->n_changed] = (peri_tensor *)(uintptr_t)t;
    peri__refs_add(&more[r->n_changed++]->refs);
}
