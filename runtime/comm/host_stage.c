/* SPDX-License-Identifier: Apache-2.0
 *
 * host_stage.c: host buffers through which device tensors travel when the transport takes host memory only, and the
 * stream of those copies.
 */
#include "comm_internal.h"

#include <stdatomic.h>

enum { SMALLEST = 4096, KEEP = 256 << 20 }; /* bytes of the smallest buffer; bytes of unused buffers that a stage
                                               keeps */

bool peri__stage_not_needed(const peri__comm *comm, const peri_device *device)
{
    return (comm->vtab->takes & PERI_COLL_HOST) && peri__immediate(device);
}

bool peri__stage_can_place(const peri__comm *comm, const peri_device *device)
{
    return (comm->vtab->takes & PERI_COLL_PLACES) && peri__stage_not_needed(comm, device);
}

bool peri__stage_can_call(const peri__comm *comm, const peri_device *device)
{
    return (comm->vtab->takes & PERI_COLL_DIRECT) && peri__stage_not_needed(comm, device);
}

peri_status peri__stage_tensor(const peri__comm *comm, peri_device *device, int64_t n, peri_tensor **out)
{
    const peri_coll_vtab *v = comm->vtab;
    void *data = v->lend && peri__stage_not_needed(comm, device) ? v->lend(n * (int64_t)sizeof(float)) : NULL;
    if (!data) return peri_tensor_new(device, PERI_F32, 1, &n, out);
    peri_status status = peri__tensor_lent(device, PERI_F32, n, data, v->give_back, out);
    if (status < 0) v->give_back(data);
    return status;
}

peri_status peri__stage_of_device(peri__comm *comm, peri_device *device, peri__stage **out)
{
    for (int i = 0; i < PERI_COMM_DEVICES; i++) {
        peri__stage *s = &comm->stages[i];
        if (!s->device) {
            PERI_TRY(peri_stream_new(device, &s->stream));
            s->device = device;
        }
        if (s->device != device) continue;
        *out = s;
        return PERI_OK;
    }
    return peri__fail(PERI_EUNSUPPORTED, "peri_coll: tensors of more than %d devices in one world", PERI_COMM_DEVICES);
}

static void buffer_free(peri__pinned *b)
{
    peri_event_release(b->event);
    peri__host_free(b->device, b->data, b->bytes);
    peri__free(b);
}

/** Buffers of worlds that were dropped while a copy still used them; whoever drops a world next looks whether it
 *  ended. */
static _Atomic(peri__pinned *) abandoned;

static void abandon_buffer(peri__pinned *b)
{
    b->next = atomic_load(&abandoned);
    while (!atomic_compare_exchange_weak(&abandoned, &b->next, b)) continue;
}

static void sweep_abandoned(void)
{
    peri__pinned *b = atomic_exchange(&abandoned, NULL), *next;
    for (; b; b = next) {
        next = b->next;
        if (peri_event_query(b->event) == PERI_OK) buffer_free(b);
        else abandon_buffer(b);
    }
}

peri_status peri__stage_buffer_get(peri__stage *stage, int64_t bytes, peri__pinned **out)
{
    int64_t wanted = SMALLEST;
    while (wanted < bytes) wanted *= 2;
    peri__stage_sweep(stage, false);
    for (peri__pinned **p = &stage->free; *p; p = &(*p)->next) {
        peri__pinned *b = *p;
        if (b->bytes != wanted) continue;
        *p = b->next;
        stage->free_bytes -= b->bytes;
        *out = b;
        return PERI_OK;
    }
    peri__pinned *b = peri__alloc_zero(sizeof *b);
    if (!b) return PERI_ENOMEM;
    b->bytes = wanted;
    b->device = stage->device;
    void *data = NULL;
    peri_status status = peri_event_new(stage->device, &b->event);
    if (status >= 0) status = peri__host_alloc(stage->device, wanted, &data);
    b->data = data;
    if (status < 0) {
        buffer_free(b);
        return status;
    }
    *out = b;
    return PERI_OK;
}

void peri__stage_buffer_put(peri__stage *stage, peri__pinned *b, bool retire)
{
    if (!b) return;
    if (retire) {
        b->next = stage->retiring;
        stage->retiring = b;
    } else if (stage->free_bytes + b->bytes > KEEP) {
        buffer_free(b);
    } else {
        b->next = stage->free;
        stage->free = b;
        stage->free_bytes += b->bytes;
    }
}

void peri__stage_sweep(peri__stage *stage, bool block)
{
    for (peri__pinned **p = &stage->retiring; *p;) {
        peri__pinned *b = *p;
        peri_status status = block ? peri_event_synchronize(b->event) : peri_event_query(b->event);
        if (status != PERI_OK) {
            p = &b->next;
            continue;
        }
        *p = b->next;
        peri__stage_buffer_put(stage, b, false);
    }
}

void peri__stage_fini(peri__stage *stage)
{
    if (!stage->device) return;
    peri__stage_sweep(stage, false);
    sweep_abandoned();
    while (stage->free) {
        peri__pinned *b = stage->free;
        stage->free = b->next;
        buffer_free(b);
    }
    /* a world that was dropped without close: a copy may still read these, and a finalizer must not wait */
    while (stage->retiring) {
        peri__pinned *b = stage->retiring;
        stage->retiring = b->next;
        abandon_buffer(b);
    }
    peri_stream_release(stage->stream);
    *stage = (peri__stage){0};
}
