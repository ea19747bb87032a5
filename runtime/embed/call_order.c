/* SPDX-License-Identifier: Apache-2.0
 *
 * call_order.c: the order of calls on a table batch, among threads and among streams, and memory that calls reuse.
 */
#include "embed_internal.h"
#include "../tensor/capture.h"

peri_status peri__calls_init(peri_tbe *tbe)
{
    pthread_rwlockattr_t fair; /* lookups that follow each other without a pause must not keep updates out */
    pthread_rwlockattr_init(&fair);
    pthread_rwlockattr_setkind_np(&fair, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&tbe->lock, &fair);
    pthread_rwlockattr_destroy(&fair);
    pthread_mutex_init(&tbe->small, NULL);
    PERI_TRY(peri_event_new(tbe->device, &tbe->changed));
    PERI_TRY(peri_event_new(tbe->device, &tbe->looked));
    return peri_event_new(tbe->device, &tbe->counted);
}

/** This thread, as tbe->holder names it. */
static uintptr_t this_thread(void)
{
    static _Thread_local char here;
    return (uintptr_t)&here;
}

bool peri__tbe_in_call_alone(const peri_tbe *tbe)
{
    return atomic_load_explicit(&tbe->holder, memory_order_relaxed) == this_thread();
}

peri_status peri__tbe_enter(peri_tbe *tbe, bool alone)
{
    if (!tbe->store->whole && tbe->forks != peri__forks()) /* rows come by threads that this process has not */
        return peri__fail(PERI_EUNSUPPORTED,
                          "tables in %s are of the process that this one was forked from; only that one may use them",
                          tbe->store->name);
    PERI_TRY(peri__cannot_capture(tbe->device, "a lookup in embedding tables, or their update,"));
    if (alone) pthread_rwlock_wrlock(&tbe->lock);
    else pthread_rwlock_rdlock(&tbe->lock);
    peri_status status = peri__tbe_wait_event(tbe, tbe->changed);
    if (alone && status >= 0) status = peri__tbe_wait_event(tbe, tbe->looked);
    if (alone && status >= 0) status = peri__tbe_wait_event(tbe, tbe->counted);
    if (status < 0) pthread_rwlock_unlock(&tbe->lock);
    else if (alone) atomic_store_explicit(&tbe->holder, this_thread(), memory_order_relaxed);
    return status;
}

peri_status peri__tbe_leave(peri_tbe *tbe, bool alone, peri_status status)
{
    peri_status left = PERI_OK;
    if (alone) {
        atomic_store_explicit(&tbe->holder, 0, memory_order_relaxed);
        left = peri__tbe_record_event(tbe, tbe->changed);
    } else if (peri__tbe_is_queued(tbe)) {
        pthread_mutex_lock(&tbe->small);
        left = peri__tbe_wait_event(tbe, tbe->looked); /* so that it follows the other lookups as well */
        if (left >= 0) left = peri__tbe_record_event(tbe, tbe->looked);
        pthread_mutex_unlock(&tbe->small);
    }
    pthread_rwlock_unlock(&tbe->lock);
    return status < 0 ? status : left < 0 ? left : status;
}

peri_status peri__tbe_queue_counting(peri_tbe *tbe, int32_t op, const void *args, size_t size)
{
    pthread_mutex_lock(&tbe->small);
    peri_status status = peri__tbe_wait_event(tbe, tbe->counted);
    if (status >= 0) status = peri__launch_op(tbe->device, op, args, size);
    if (status >= 0) status = peri__tbe_record_event(tbe, tbe->counted);
    pthread_mutex_unlock(&tbe->small);
    return status;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

void peri__free_after(peri_tensor **tensor, peri_event *last)
{
    if (!*tensor) return;
    /* Memory is freed in the order of the stream that was current when it was made, which may not be the one that used
     * it last. */
    peri_device *device = peri__device(*tensor);
    if (last && !peri__device_is_captured(device)) /* what could not be captured has used nothing */
        (void)device->vtab->stream_wait(device->ctx, (*tensor)->storage->home->ctx, last->ctx);
    peri_tensor_release(*tensor);
    *tensor = NULL;
}

void peri__tbe_free_later(peri_tbe *tbe, peri_tensor **tensor)
{
    if (!*tensor) return;
    peri_stream *now = peri_stream_current(tbe->device);
    if (tbe->changed && tbe->looked) { /* what this call has queued so far is among its uses */
        (void)peri_stream_wait(now, tbe->changed);
        (void)peri_stream_wait(now, tbe->looked);
        (void)peri_event_record(tbe->changed, now);
    }
    peri__free_after(tensor, tbe->changed);
}

peri_status peri__reserve(peri_device *device, peri_tensor **tensor, peri_event *last, int32_t dtype, int64_t count,
                          void **out)
{
    peri_tensor *t = *tensor;
    if (!t || peri__numel(t) < count || t->dtype != dtype) {
        int64_t more = t ? peri__max(count, peri__numel(t) + peri__numel(t) / 4) : count;
        peri_tensor *fresh;
        PERI_TRY(peri_tensor_new(device, dtype, 1, &more, &fresh));
        peri__free_after(tensor, last);
        *tensor = fresh;
    }
    *out = peri__data(*tensor);
    return PERI_OK;
}

peri_status peri__tbe_workspace(peri_tbe *tbe, int32_t which, int32_t dtype, int64_t count, void **out)
{
    peri_tensor *t = tbe->workspace[which];
    /* What this call has queued so far may use it. */
    if (t && (peri__numel(t) < count || t->dtype != dtype))
        PERI_TRY(peri_event_record(tbe->changed, peri_stream_current(tbe->device)));
    return peri__reserve(tbe->device, &tbe->workspace[which], tbe->changed, dtype, count, out);
}
