/* SPDX-License-Identifier: Apache-2.0
 *
 * storage.c: the memory of tensors.
 */
#include "capture.h"
#include "report.h"

#include "../base/between.h"

/** Storages of devices that can record graphs. */
static struct {
    pthread_mutex_t lock;
    peri__storage *first;
} living = {.lock = PTHREAD_MUTEX_INITIALIZER};
PERI_FORK_LOCK(living.lock, PERI__FORK_STORAGES)

static void list_storage(peri__storage *s)
{
    if (!s->device->vtab->capture_begin) return;
    pthread_mutex_lock(&living.lock);
    s->next = living.first;
    if (s->next) s->next->before = s;
    living.first = s;
    pthread_mutex_unlock(&living.lock);
}

static void unlist_storage(peri__storage *s)
{
    if (!s->device->vtab->capture_begin) return;
    pthread_mutex_lock(&living.lock);
    if (s->next) s->next->before = s->before;
    *(s->before ? &s->before->next : &living.first) = s->next;
    pthread_mutex_unlock(&living.lock);
}

uint64_t peri__storage_serial(peri__storage *s)
{
    static atomic_uint_least64_t last;
    uint64_t none = 0;
    if (atomic_load_explicit(&s->serial, memory_order_relaxed) == 0)
        atomic_compare_exchange_strong(&s->serial, &none, atomic_fetch_add(&last, 1) + 1);
    return atomic_load_explicit(&s->serial, memory_order_relaxed);
}

bool peri__storage_hold(peri__storage *s) { return peri__refs_try(&s->refs); }

peri_status peri__storages_hold(const peri_device *device, peri__storage ***list, int64_t *n)
{
    int64_t most = 0;
    *n = 0;
    pthread_mutex_lock(&living.lock);
    for (const peri__storage *s = living.first; s; s = s->next) most += s->device == device;
    *list = peri__alloc(sizeof **list * (size_t)peri__max(most, 1));
    for (peri__storage *s = living.first; s && *list; s = s->next)
        if (s->device == device && peri__storage_hold(s)) (*list)[(*n)++] = s;
    pthread_mutex_unlock(&living.lock);
    return *list ? PERI_OK : PERI_ENOMEM;
}

/** A storage without data. */
static peri__storage *storage_shell(peri_device *device, int64_t bytes)
{
    peri__storage *s = peri__alloc_zero(sizeof *s);
    if (!s) return NULL;
    peri__refs_init(&s->refs);
    s->device = device;
    s->home = peri_stream_current(device);
    s->bytes = bytes;
    atomic_init(&s->version, 0);
    return s;
}

static void storage_own(peri__storage *s, void *data)
{
    s->data = data;
    peri_stream_retain(s->home);
    peri__mem_count(s->bytes);
    list_storage(s);
}

static void block_back(void *ctx, void *data)
{
    (void)data;
    peri__block *b = ctx;
    peri__block_release(b);
    peri__arena_release(b->arena);
}

peri_status peri__storage_in(peri__block *b, int64_t bytes, peri__storage **out)
{
    peri_status status = peri__storage_lent(b->arena->device, bytes, b->data, NULL, out);
    if (status < 0) {
        peri__block_release(b);
        return status;
    }
    peri__refs_add(&b->arena->refs);
    (*out)->release = block_back;
    (*out)->ctx = b;
    return PERI_OK;
}

/** Memory for a tensor that is captured. */
static peri_status storage_captured(peri_device *device, int64_t bytes, peri__storage **out)
{
    peri__block *b;
    PERI_TRY(peri__said(device, "alloc", peri__arena_take(peri__capturing->arena, bytes, false, &b)));
    return peri__storage_in(b, bytes, out);
}

peri_status peri__storage_new(peri_device *device, int64_t bytes, bool mapped, peri__storage **out)
{
    const peri_device_vtab *v = device->vtab;
    mapped = mapped && !peri_device_host_access(device);
    PERI_ASSERT(!mapped || v->mapped_alloc);
    if (mapped) PERI_TRY(peri__cannot_capture(device, "memory of the host for a tensor"));
    else if (peri__device_is_captured(device)) return storage_captured(device, bytes, out);
    peri__storage *s = storage_shell(device, bytes);
    if (!s) return PERI_ENOMEM;
    s->mapped = mapped;
    void *data;
    peri_status status = mapped ? peri__between_idle() : PERI_OK;
    if (status >= 0)
        status = mapped ? peri__said(device, "mapped_alloc", v->mapped_alloc(device->ctx, s->home->ctx, bytes, &data))
                        : peri__said(device, "alloc", v->alloc(device->ctx, s->home->ctx, bytes, &data));
    if (status < 0) {
        peri__free(s);
        return status;
    }
    storage_own(s, data);
    *out = s;
    return PERI_OK;
}

peri_status peri__storage_lent(peri_device *device, int64_t bytes, void *data, void (*give_back)(void *data),
                               peri__storage **out)
{
    peri__storage *s = storage_shell(device, bytes);
    if (!s) return PERI_ENOMEM;
    s->give_back = give_back;
    storage_own(s, data);
    *out = s;
    return PERI_OK;
}

peri__note *peri__note_take(peri__storage *s)
{
    peri__note *note = atomic_exchange(&s->note, NULL);
    if (!note || note->version == atomic_load_explicit(&s->version, memory_order_relaxed)) return note;
    note->fini(note);
    return NULL;
}

void peri__note_put(peri__storage *s, peri__note *note)
{
    peri__note *none = NULL;
    if (atomic_load(&s->exposed) || !atomic_compare_exchange_strong(&s->note, &none, note)) note->fini(note);
}

/** Memory is freed in the order of its home, the stream on which it was taken. Whoever drops the last reference may
 *  have queued work on it elsewhere: a backward pass frees what other streams have saved. So the home comes after what
 *  is queued here. (Where not even that can be queued any more, this stream runs dry first.) */
static void free_after_use(const peri_stream *home)
{
    peri_device *device = home->device;
    const peri_stream *now = peri_stream_current(device);
    if (now == home) return;
    const peri_device_vtab *v = device->vtab;
    peri_status status = v->event_record(device->ctx, now->freeing, now->ctx);
    if (status >= 0) status = v->stream_wait(device->ctx, home->ctx, now->freeing);
    if (status < 0) v->stream_sync(device->ctx, now->ctx);
}

void peri__storage_release(peri__storage *s)
{
    if (!s || !peri__refs_drop(&s->refs)) return;
    unlist_storage(s);
    peri__report_return(s->ahead);
    if (atomic_load_explicit(&s->unheard.passes, memory_order_relaxed) > 0) peri__late_drop(&s->unheard);
    peri__note *note = atomic_load(&s->note);
    if (note) note->fini(note);
    free_after_use(s->home);
    const peri_device_vtab *v = s->device->vtab;
    if (s->mapped) (void)peri__between_idle();
    if (s->give_back) s->give_back(s->data);
    else if (s->release) PERI__AT_BORDER("peri_host_tensor", s->release(s->ctx, s->data));
    else (s->mapped ? v->mapped_free : v->free)(s->device->ctx, s->home->ctx, s->data, s->bytes);
    peri__mem_count(-s->bytes);
    peri_stream_release(s->home);
    peri__free(s);
}
