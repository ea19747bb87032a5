/* SPDX-License-Identifier: Apache-2.0
 *
 * pinned.c: tensors in host memory that a device reads while its copies run, and the pool of such memory.
 *
 * Pinning costs far more than a batch's copy does, and on a GPU it may wait for running kernels. So blocks are never
 * given back to the system while they can be used again: their sizes are powers of two, and after its first batches a
 * loader asks for no new ones.
 */
#include "capture.h"
#include "pinned.h"

#include <pthread.h>

enum { HEAD = 64, LEAST = 4096 }; /* bytes; of the smallest block */

typedef struct block {
    struct block *next;
    peri_device *device; /* whose copies may read it while they are queued */
    void *event;         /* the backend's: recorded after each copy from this block */
    int64_t capacity;    /* bytes behind the head */
    bool copied;         /* a copy was queued, and has not been seen to be over */
} block;

_Static_assert(sizeof(block) <= HEAD, "the head of a pinned block");

/** Blocks without a tensor, those that were given back first in front: their copies are over first. */
static struct {
    pthread_mutex_t lock;
    block *first, **last;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .last = &pool.first};
PERI_FORK_LOCK(pool.lock, PERI__FORK_PINNED)

static void block_free(block *b)
{
    peri_device *device = b->device;
    if (b->event) device->vtab->event_delete(device->ctx, b->event);
    peri__host_free(device, b, HEAD + b->capacity);
}

/** Whether the block's memory may be written: no copy of it is on its way. */
static bool is_idle(block *b)
{
    if (b->copied && b->device->vtab->event_query(b->device->ctx, b->event) == PERI_OK) b->copied = false;
    return !b->copied;
}

/** Take the first block of that device and capacity out of the pool, if no copy reads it any more; else NULL. */
static block *take_spare(const peri_device *device, int64_t capacity)
{
    block *found = NULL;
    pthread_mutex_lock(&pool.lock);
    block **at = &pool.first;
    while (*at && ((*at)->device != device || (*at)->capacity != capacity)) at = &(*at)->next;
    if (*at && is_idle(*at)) {
        found = *at;
        *at = found->next;
        if (!found->next) pool.last = at;
    }
    pthread_mutex_unlock(&pool.lock);
    return found;
}

/** Give back to the system all blocks of the device that nobody uses. */
void peri__pinned_trim(const peri_device *device)
{
    pthread_mutex_lock(&pool.lock);
    for (block **at = &pool.first; *at;) {
        block *b = *at;
        if (b->device == device && is_idle(b)) {
            *at = b->next;
            block_free(b);
        } else at = &b->next;
    }
    pool.last = &pool.first;
    while (*pool.last) pool.last = &(*pool.last)->next;
    pthread_mutex_unlock(&pool.lock);
}

static peri_status block_new(peri_device *device, int64_t capacity, block **out)
{
    void *memory, *event;
    peri_status status = peri__host_alloc(device, HEAD + capacity, &memory);
    if (status == PERI_ENOMEM) {
        peri__pinned_trim(device);
        status = peri__host_alloc(device, HEAD + capacity, &memory);
    }
    if (status < 0) return status;
    status = device->vtab->event_new(device->ctx, &event);
    if (status < 0) {
        peri__host_free(device, memory, HEAD + capacity);
        return status;
    }
    *out = memory;
    **out = (block){.device = device, .event = event, .capacity = capacity};
    return PERI_OK;
}

/** What a storage in a block is given back with; which storages are in blocks is known by this function. */
static void block_give(void *data)
{
    block *b = (block *)((char *)data - HEAD);
    b->next = NULL;
    pthread_mutex_lock(&pool.lock);
    *pool.last = b;
    pool.last = &b->next;
    pthread_mutex_unlock(&pool.lock);
}

static block *pinned_block_of(const peri_tensor *t)
{
    return t->storage->give_back == block_give ? (block *)(t->storage->data - HEAD) : NULL;
}

/* -- tensors ------------------------------------------------------------------------------------------------------- */

bool peri_tensor_is_pinned(const peri_tensor *t) { return t && pinned_block_of(t) != NULL; }

peri_status peri_tensor_new_pinned(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                   peri_tensor **out)
{
    PERI_NEED(device);
    PERI_NEED(out);
    if (peri_device_host_access(device))
        return peri__fail(
            PERI_EINVAL,
            "peri_tensor_new_pinned: the memory of device %s is the host's own: nothing is copied to it, so "
            "there is nothing to pin; wanted: the device that batches are copied to",
            device->name);
    PERI_TRY(peri__cannot_capture(device, "memory of the host"));
    peri_device *cpu;
    peri_tensor *t, *view;
    PERI_TRY(peri_device_get("cpu", &cpu));
    int64_t bytes, capacity = LEAST;
    PERI_TRY(peri__shape_bytes("peri_tensor_new_pinned", dtype, ndim, shape, &bytes));
    while (capacity < bytes) capacity *= 2;
    block *b = take_spare(device, capacity);
    if (!b) PERI_TRY(block_new(device, capacity, &b));
    peri_status status =
        peri__tensor_lent(cpu, dtype, bytes / peri_dtype_size(dtype), (char *)b + HEAD, block_give, &t);
    if (status < 0) {
        block_give((char *)b + HEAD);
        return status;
    }
    status = peri__tensor_view(t, ndim, shape, NULL, 0, &view);
    peri_tensor_release(t);
    if (status >= 0) *out = view;
    return status;
}

peri_status peri_tensor_pin(const peri_tensor *t, peri_device *device, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    if (!peri_device_host_access(peri__device(t)))
        return peri__fail(
            PERI_EINVAL,
            "peri_tensor_pin: a tensor of device %s; only memory of the host is pinned: copy it to cpu first",
            peri__device(t)->name);
    peri_tensor *copy;
    PERI_TRY(peri_tensor_new_pinned(device, t->dtype, t->ndim, t->shape, &copy));
    peri_status status = peri_tensor_copy(copy, t);
    if (status < 0) peri_tensor_release(copy);
    else *out = copy;
    return status;
}

peri_status peri__pinned_copy(const peri_tensor *dst, const peri_tensor *src, bool *done)
{
    block *b = pinned_block_of(src);
    peri_device *device = peri__device(dst);
    *done = b && b->device == device;
    if (!*done) return PERI_OK;
    PERI_TRY(peri__cannot_capture(device, "a copy from the host"));
    const peri_device_vtab *v = device->vtab;
    void *stream = peri_stream_current(device)->ctx;
    /* One event stands for all copies of the block: it has to come after those on other streams too. */
    if (b->copied) PERI_TRY(v->stream_wait(device->ctx, stream, b->event));
    int64_t bytes = peri__numel(src) * peri_dtype_size(src->dtype);
    PERI_TRY(peri__copy(device, peri__data(dst), peri__data(src), bytes, PERI_COPY_H2D_PINNED));
    b->copied = true;
    return v->event_record(device->ctx, b->event, stream);
}
