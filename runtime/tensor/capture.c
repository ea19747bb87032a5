/* SPDX-License-Identifier: Apache-2.0
 *
 * capture.c: capturing what a thread queues on a device, and the memory of captures.
 */
#include "capture.h"

#include "../base/between.h"

#include <perilune/precision.h>
#include <stdlib.h>

/* -- results ------------------------------------------------------------------------------------------------------- */

static void result_back(void *ctx, void *data)
{
    (void)data;
    peri__block *b = ctx;
    peri__arena *a = b->arena;
    pthread_mutex_lock(&a->lock);
    b->lent = NULL;
    pthread_mutex_unlock(&a->lock);
    peri__arena_release(a);
}

/** The storage of a block's result with a reference more; NULL: it is gone. One that another thread has just released
 *  is waited for. */
static peri__storage *still_lent(peri__block *b)
{
    for (int64_t round = 0;; round++) {
        pthread_mutex_lock(&b->arena->lock);
        peri__storage *s = b->lent;
        const bool held = s && peri__storage_hold(s);
        pthread_mutex_unlock(&b->arena->lock);
        if (held || !s) return s;
        peri_pause(round);
    }
}

/** @s gets memory of its own, with what it holds. */
static peri_status move_out(peri__block *b, peri__storage *s)
{
    const peri_device_vtab *v = s->device->vtab;
    void *data;
    PERI_TRY(peri__said(s->device, "alloc", v->alloc(s->device->ctx, s->home->ctx, s->bytes, &data)));
    peri_status status = peri__copy(s->device, data, s->data, s->bytes, PERI_COPY_D2D);
    if (status < 0) {
        v->free(s->device->ctx, s->home->ctx, data, s->bytes);
        return status;
    }
    s->data = data;
    s->release = NULL;
    s->ctx = NULL;
    result_back(b, NULL);
    return PERI_OK;
}

peri_status peri__arena_move_out(peri__arena *a)
{
    peri_status status = PERI_OK;
    for (peri__block *b = a->blocks; b && status >= 0; b = b->next) {
        peri__storage *s = b->lent ? still_lent(b) : NULL;
        if (!s) continue;
        status = move_out(b, s);
        peri__storage_release(s);
    }
    return status;
}

peri_status peri__arena_lend(peri__block *b, const peri_tensor *like, peri_tensor **out)
{
    peri__storage *s = still_lent(b); /* another result of this call in the same memory */
    if (!s) {
        PERI_TRY(peri__storage_lent(b->arena->device, b->bytes, b->data, NULL, &s));
        peri__refs_add(&b->arena->refs);
        s->release = result_back;
        s->ctx = b;
        b->lent = s;
    }
    return peri__tensor_in(s, like, out);
}

/* -- memory of what is captured ------------------------------------------------------------------------------------ */

peri_status peri__arena_tensor(peri__arena *a, const peri_tensor *like, peri_tensor **out)
{
    const int64_t bytes = peri__numel(like) * peri_dtype_size(like->dtype);
    peri_tensor flat = *like; /* contiguous, of the same shape */
    flat.offset = 0;
    int64_t step = 1;
    for (int32_t d = like->ndim - 1; d >= 0; step *= peri__max(like->shape[d], 1), d--) flat.stride[d] = step;
    peri__block *b;
    peri__storage *s;
    PERI_TRY(peri__said(a->device, "alloc", peri__arena_take(a, bytes, true, &b)));
    PERI_TRY(peri__storage_in(b, bytes, &s));
    return peri__tensor_in(s, &flat, out);
}

peri_status peri__capture_constant(const int64_t *words, int64_t n, peri_tensor **out)
{
    peri__capture *r = peri__capturing;
    peri__constant *c = peri__alloc(sizeof *c + sizeof *words * (size_t)n);
    if (!c) return PERI_ENOMEM;
    peri_tensor like = {.dtype = PERI_I64, .ndim = 1, .shape = {n}};
    peri_status status = peri__arena_tensor(r->arena, &like, out);
    if (status < 0) {
        peri__free(c);
        return status;
    }
    peri__capture_words(words, sizeof *words * (size_t)n);
    memcpy(c->words, words, sizeof *words * (size_t)n);
    c->n = n;
    c->block = (*out)->storage->ctx;
    c->next = r->constants;
    r->constants = c;
    return PERI_OK;
}

peri_status peri__capture_draw(uint64_t seed, uint64_t stream, uint64_t offset, const uint64_t **out)
{
    peri__capture *r = peri__capturing;
    if (r->draws.n == PERI__DRAWS_MOST)
        return peri__fail(PERI_EUNSUPPORTED, "peri_graph_begin: dropout is captured more than %d times in one graph",
                          PERI__DRAWS_MOST);
    if (!r->draws.table) {
        peri_tensor like = {.dtype = PERI_I64, .ndim = 2, .shape = {PERI__DRAWS_MOST, 3}};
        PERI_TRY(peri__arena_tensor(r->arena, &like, &r->draws.table));
    }
    uint64_t *words = r->draws.words[r->draws.n];
    words[0] = seed, words[1] = stream, words[2] = offset;
    *out = (const uint64_t *)peri__data(r->draws.table) + 3 * r->draws.n++;
    return PERI_OK;
}

/* -- beginning and end --------------------------------------------------------------------------------------------- */

static int by_address(const void *a, const void *b)
{
    const char *x = ((const peri__external *)a)->data, *y = ((const peri__external *)b)->data;
    return x < y ? -1 : x > y;
}

/** Hold all storages of the device, so that none goes while its address may be captured. */
static peri_status hold_externals(peri__capture *r)
{
    peri__storage **list = NULL;
    PERI_TRY(peri__storages_hold(r->device, &list, &r->n_externals));
    r->externals = peri__alloc_zero(sizeof *r->externals * (size_t)peri__max(r->n_externals, 1));
    for (int64_t i = 0; i < r->n_externals; i++) {
        if (r->externals) r->externals[i] = (peri__external){.storage = list[i], .data = list[i]->data};
        else peri__storage_release(list[i]);
    }
    peri__free(list);
    if (!r->externals) return r->n_externals = 0, PERI_ENOMEM;
    qsort(r->externals, (size_t)r->n_externals, sizeof *r->externals, by_address);
    return PERI_OK;
}

/** Let go of those that captured work does not reach, or of @all. */
static void drop_externals(peri__capture *r, bool all)
{
    int64_t n = 0;
    for (int64_t i = 0; i < r->n_externals; i++) {
        if (r->externals[i].reached && !all) r->externals[n++] = r->externals[i];
        else peri__storage_release(r->externals[i].storage);
    }
    r->n_externals = n;
}

/** Casts of weights that were made before, outside, are not found in here, nor those of here outside. */
static peri_status enter_region(peri__capture *r)
{
    const int32_t dtype = peri__autocast(r->device);
    if (dtype < 0) return PERI_OK;
    PERI_TRY(peri_autocast_new(r->device->name, dtype, true, &r->region));
    return peri_autocast_enter(r->region);
}

static peri_status leave_region(peri__capture *r)
{
    if (!r->region) return PERI_OK;
    peri_status status = peri_autocast_exit(r->region);
    if (status >= 0) peri_autocast_release(r->region);
    r->region = NULL;
    return status;
}

peri_status peri__capture_begin(peri__capture *r, peri__arena *arena)
{
    *r = (peri__capture){.device = arena->device, .arena = arena};
    peri__refs_add(&arena->refs);
    const peri_device_vtab *v = r->device->vtab;
    peri_status status = hold_externals(r);
    if (status >= 0) status = enter_region(r);
    if (status >= 0)
        status = peri__said(r->device, "capture_begin", v->capture_begin(r->device->ctx, arena->queue));
    if (status < 0) {
        (void)leave_region(r);
        peri__capture_fini(r);
        return status;
    }
    peri__between_hold(true);
    peri__capturing = r;
    return PERI_OK;
}

peri_status peri__capture_end(peri__capture *r, bool keep)
{
    const peri_device_vtab *v = r->device->vtab;
    peri_status region = leave_region(r);
    peri__error kept;
    if (!keep) peri__error_keep(&kept);
    peri_status status = peri__said(r->device, "capture_end", v->capture_end(r->device->ctx, r->arena->queue,
                                                                             keep ? &r->graph : NULL));
    if (!keep) peri__error_restore(&kept);
    peri__capturing = NULL;
    peri__between_hold(false);
    peri__arenas_end();
    drop_externals(r, !keep || status < 0);
    if (keep && status >= 0 && region < 0) return region;
    if (keep && status >= 0 && r->lacks_memory) return peri__fail(PERI_ENOMEM, "peri_graph_end: no memory");
    return status;
}

bool peri__capture_fits(const peri__capture *r)
{
    for (int64_t i = 0; i < r->n_externals; i++)
        if (r->externals[i].storage->data != r->externals[i].data) return false;
    return true;
}

peri_status peri__capture_ready(peri__capture *r)
{
    const peri_device_vtab *v = r->device->vtab;
    peri__arena *a = r->arena;
    if (r->ready) return PERI_OK;
    PERI_TRY(v->event_record(r->device->ctx, a->mark, a->memory));
    PERI_TRY(v->stream_wait(r->device->ctx, a->queue, a->mark));
    for (const peri__constant *c = r->constants; c; c = c->next)
        PERI_TRY(peri__copy(r->device, c->block->data, c->words, c->n * 8, PERI_COPY_H2D_WORDS));
    r->ready = true;
    return PERI_OK;
}

peri_status peri__capture_launch(peri__capture *r)
{
    if (r->draws.n > 0 && !r->draws.sent)
        PERI_TRY(peri__copy(r->device, peri__data(r->draws.table), r->draws.words,
                            (int64_t)sizeof *r->draws.words * r->draws.n, PERI_COPY_H2D));
    r->draws.sent = true;
    for (int64_t i = 0; i < r->n_changed; i++) peri__changed(r->changed[i]);
    return peri__said(r->device, "graph_launch",
                      r->device->vtab->graph_launch(r->device->ctx, r->graph, r->arena->queue));
}

void peri__capture_fini(peri__capture *r)
{
    if (!r->device) return;
    if (r->graph) r->device->vtab->graph_delete(r->device->ctx, r->graph);
    drop_externals(r, true);
    peri__free(r->externals);
    for (int64_t i = 0; i < r->n_changed; i++) peri_tensor_release(r->changed[i]);
    peri__free(r->changed);
    peri_tensor_release(r->draws.table);
    for (peri__constant *c = r->constants, *next; c; c = next) {
        next = c->next;
        peri__free(c);
    }
    peri__arena_release(r->arena);
    *r = (peri__capture){0};
}
