/* SPDX-License-Identifier: Apache-2.0
 *
 * report.c: reports, which bring small arrays from a device to the host, and the number of a backward pass's root as
 * one of them.
 */
#include "capture.h"
#include "report.h"

#include <pthread.h>

/** Reports that nobody has, those that were given back first in front: their copies are over first. */
static struct {
    pthread_mutex_t lock;
    peri__report *first, **last;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .last = &pool.first};
PERI_FORK_LOCK(pool.lock, PERI__FORK_REPORTS)

void peri__report_return(peri__report *r)
{
    if (!r) return;
    pthread_mutex_lock(&pool.lock);
    r->next = NULL;
    *pool.last = r;
    pool.last = &r->next;
    pthread_mutex_unlock(&pool.lock);
}

enum { LEAST = 64, TOGETHER = 16 }; /* words of the smallest; of these so many are made at once, since a GPU may stop
                                       for pinned memory */

/** Events and memory for the @n reports of @list. */
static peri_status equip(peri__report *list, int32_t n, peri_device *device, int64_t capacity)
{
    void *memory;
    peri_status status = peri__host_alloc(device, n * capacity * 8, &memory);
    for (int32_t i = 0; i < n && status >= 0; i++) {
        list[i] = (peri__report){.device = device, .words = (int64_t *)memory + i * capacity, .capacity = capacity};
        if (peri__immediate(device)) continue;
        status = device->vtab->event_new(device->ctx, &list[i].event);
        if (status >= 0) continue;
        while (i-- > 0) device->vtab->event_delete(device->ctx, list[i].event);
        peri__host_free(device, memory, n * capacity * 8);
        return status;
    }
    return status;
}

/** New reports: one in *out, others in the pool. */
static peri_status make(peri_device *device, int64_t words, peri__report **out)
{
    int64_t capacity = LEAST;
    while (capacity < words) capacity *= 2;
    const int32_t n = capacity == LEAST ? TOGETHER : 1;
    peri__report *list = peri__alloc_zero(sizeof *list * (size_t)n);
    if (!list) return PERI_ENOMEM;
    peri_status status = equip(list, n, device, capacity);
    if (status < 0) {
        peri__free(list);
        return status;
    }
    list[0].made = n;
    for (int32_t i = 1; i < n; i++) peri__report_return(&list[i]);
    *out = &list[0];
    return PERI_OK;
}

peri_status peri__report_take(peri_device *device, int64_t words, peri__report **out)
{
    peri__report *found = NULL;
    pthread_mutex_lock(&pool.lock);
    for (peri__report **at = &pool.first; *at && !found; at = &(*at)->next) {
        peri__report *r = *at;
        if (r->device != device || r->capacity < words) continue;
        if (r->posted && peri__report_test(r) != PERI_OK) continue; /* given back while its copy was queued */
        found = r;
        *at = r->next;
        if (!r->next) pool.last = at;
        break;
    }
    pthread_mutex_unlock(&pool.lock);
    if (!found) return make(device, words, out);
    found->posted = false;
    *out = found;
    return PERI_OK;
}

static peri_status post_copy(peri__report *r, const void *src, int64_t bytes)
{
    PERI_TRY(peri__copy(r->device, r->words, src, bytes, PERI_COPY_D2H));
    r->posted = true;
    r->src = src;
    r->bytes = bytes;
    if (!r->event) return PERI_OK;
    return r->device->vtab->event_record(r->device->ctx, r->event, peri_stream_current(r->device)->ctx);
}

peri_status peri__report_post(peri__report *r, const int64_t *src, int64_t words)
{
    return post_copy(r, src, words * 8);
}

peri_status peri__report_test(peri__report *r)
{
    if (!r->posted || !r->event) return PERI_OK;
    return r->device->vtab->event_query(r->device->ctx, r->event);
}

peri_status peri__report_wait(peri__report *r)
{
    const peri_status status = peri__report_test(r);
    return status == PERI_PENDING ? peri__event_wait(r->device, r->event) : status;
}

void peri__reports_drop(const peri_device *device)
{
    peri__report *dropped = NULL;
    pthread_mutex_lock(&pool.lock);
    for (peri__report **at = &pool.first; *at;) {
        peri__report *r = *at;
        if (r->device != device) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        if (r->event) device->vtab->event_delete(device->ctx, r->event);
        if (!r->made) continue; /* in the array of one that has */
        r->next = dropped;
        dropped = r;
    }
    pool.last = &pool.first;
    while (*pool.last) pool.last = &(*pool.last)->next;
    pthread_mutex_unlock(&pool.lock);
    while (dropped) {
        peri__report *r = dropped;
        dropped = r->next;
        peri__host_free(r->device, r->words, r->made * r->capacity * 8);
        peri__free(r);
    }
}

/* -- the root of a backward pass ----------------------------------------------------------------------------------- */

peri_status peri__item_ahead(peri_tensor *root)
{
    peri__storage *s = root->storage;
    if (peri__immediate(s->device) || peri__numel(root) != 1 || s->home != peri_stream_current(s->device))
        return PERI_OK;
    if (s->ahead || peri__device_is_captured(s->device))
        return PERI_OK; /* of an earlier pass; not a part of a recording */
    peri__report *r;
    PERI_TRY(peri__report_take(s->device, 2, &r));
    r->version = atomic_load_explicit(&s->version, memory_order_relaxed);
    peri_status status = post_copy(r, peri__data(root), peri_dtype_size(root->dtype));
    if (status < 0) peri__report_return(r);
    else s->ahead = r;
    return status;
}

peri_status peri__item_ahead_read(const peri_tensor *t, const void *src, int64_t bytes, void *dst, bool *found)
{
    peri__storage *s = t->storage;
    const peri__report *r = s->ahead;
    *found = r && r->src == src && r->bytes == bytes &&
             r->version == atomic_load_explicit(&s->version, memory_order_relaxed);
    if (!*found) return PERI_OK;
    PERI_TRY(peri__event_wait(r->device, r->event)); /* also where it has been reached: tells of ranks that were lost */
    memcpy(dst, r->words, (size_t)bytes);
    return PERI_OK;
}
