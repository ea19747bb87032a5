/* SPDX-License-Identifier: Apache-2.0
 *
 * host.c: the runtime inside a larger program.
 */
#include <perilune/host.h>

#include "../base/pool.h"
#include "../plugin/plugin_internal.h"
#include "../tensor/tensor_internal.h"

peri_status peri_host_allocator_set(void *(*alloc)(size_t size), void *(*resize)(void *p, size_t size),
                                    void (*release)(void *p))
{
    PERI__NOT_AT_BORDER;
    return peri__allocator_set(alloc, resize, release);
}

peri_status peri_host_log_set(void (*log)(void *ctx, int32_t level, const char *text), void *ctx)
{
    PERI__NOT_AT_BORDER;
    peri__log_set(log, ctx);
    return PERI_OK;
}

peri_status peri_host_pool_set(int32_t threads,
                               void (*run)(void *ctx, int32_t parts, void (*part)(void *arg, int32_t i), void *arg),
                               void *ctx)
{
    PERI__NOT_AT_BORDER;
    return peri__pool_set(threads, run, ctx);
}

peri_status peri_host_affinity_set(const int32_t *processors, int32_t n)
{
    PERI__NOT_AT_BORDER;
    if (n > 0) PERI_NEED(processors);
    return peri__affinity_set(processors, n);
}

peri_status peri_host_plugin_path_set(const char *path)
{
    PERI__NOT_AT_BORDER;
    return peri__plugin_path_set(path);
}

/* of the backend cpu */
bool peri__cpu_storage_set(void *(*take)(size_t bytes, size_t alignment), void (*give)(void *p, size_t bytes));

/* The program's own functions, and the calls of them. */
static struct {
    void *(*take)(size_t bytes, size_t alignment);
    void (*give)(void *p, size_t bytes);
} storage;

static void *storage_take(size_t bytes, size_t alignment)
{
    void *p = NULL;
    PERI__AT_BORDER("peri_host_storage_set", p = storage.take(bytes, alignment));
    return p;
}

static void storage_give(void *p, size_t bytes) { PERI__AT_BORDER("peri_host_storage_set", storage.give(p, bytes)); }

peri_status peri_host_storage_set(void *(*take)(size_t bytes, size_t alignment), void (*give)(void *p, size_t bytes))
{
    PERI__NOT_AT_BORDER;
    if (!take != !give) return peri__fail(PERI_EINVAL, "peri_host_storage_set: both functions are needed, or none");
    if (peri__cpu_storage_set(take ? storage_take : NULL, give ? storage_give : NULL)) {
        storage.take = take;
        storage.give = give;
        return PERI_OK;
    }
    return peri__fail(
        PERI_EINVAL,
        "peri_host_storage_set: tensors, or free memory of theirs, are there already; allowed: before the first "
        "tensor, or after peri_host_shutdown");
}

peri_status peri_host_tensor(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape, void *data,
                             void (*release)(void *ctx, void *data), void *ctx, peri_tensor **out)
{
    PERI_NEED(out);
    return peri__tensor_host(device, dtype, ndim, shape, data, release, ctx, out);
}

/* -- the beginning and the end ------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
PERI_FORK_LOCK(lock, PERI__FORK_HOST)
static int64_t users;

peri_status peri_host_init(void)
{
    PERI__NOT_AT_BORDER;
    pthread_mutex_lock(&lock);
    users++;
    pthread_mutex_unlock(&lock);
    return PERI_OK;
}

/** For the last user. */
static peri_status end(void)
{
    if (peri_mem_objects() > 0)
        return peri__fail(PERI_EINVAL, "peri_host_shutdown: %lld objects are not released yet",
                          (long long)peri_mem_objects());
    PERI_TRY(peri__threads_end());
    peri__devices_close();
    return peri__plugin_path_set(NULL);
}

peri_status peri_host_shutdown(void)
{
    PERI__NOT_AT_BORDER;
    pthread_mutex_lock(&lock);
    peri_status status =
        users > 0 ? PERI_OK : peri__fail(PERI_EINVAL, "peri_host_shutdown: peri_host_init was not called as often");
    if (users == 1) status = end();
    if (status >= 0) users--;
    pthread_mutex_unlock(&lock);
    return status;
}
