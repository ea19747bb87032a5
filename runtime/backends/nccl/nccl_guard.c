/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl_guard.c: a thread that ends what runs on the device where the rank's own thread cannot.
 *
 * A call of the driver may wait for all that runs on the GPU: the first launch of a kernel, which loads it, a launch
 * when the queue of launches is full, memory that cuBLAS takes. If an exchange that runs there waits for a dead rank,
 * such a call never returns, and the thread that would find the dead rank is in it. So this thread looks, when
 * operations are queued and the rank's thread has not come by for PATIENCE_NS, whether one of the ranks is gone, and
 * after the timeout of the world also whether the operation has run. It then aborts the group's communicators, which
 * lets the driver go on; the rank's thread finds `guarded` and does the rest.
 *
 * The lock of the world is held by whichever of the two works with communicators.
 */
#include "nccl_internal.h"

#include <time.h>

#define PATIENCE_NS ((int64_t)1000000000)
#define LOOK_EVERY_NS 100000000

/** Why the group's queued operations will never run: a status and words for @text; PERI_OK: they may. */
static peri_status hopeless(const nccl_group *g, bool late, char *text, size_t len)
{
    const nccl_world *w = g->world;
    const nccl_request *first = NULL;
    for (int32_t c = 0; c < LANES && !first; c++) first = g->lanes[c].first;
    if (!first) return PERI_OK;
    for (int32_t i = 0; i < g->size; i++)
        if (i != g->rank && w->host->gone && w->host->gone(w->host_group, g->ranks[i], text, len)) return PERI_EPEER;
    if (!late || w->vtab->event_query(w->device, first->done) != PERI_PENDING) return PERI_OK;
    snprintf(text, len, "operation %llu is queued on the device without an end, and a call of the driver waits for it",
             (unsigned long long)first->op.sequence);
    return PERI_ETIMEOUT;
}

static void end_hopeless_groups(nccl_world *w)
{
    const int64_t away = peri__nccl_host->time_ns() - atomic_load(&w->seen_ns);
    if (atomic_load(&w->running) == 0 || away < PATIENCE_NS || pthread_mutex_trylock(&w->lock) != 0) return;
    for (nccl_group *g = w->groups; g; g = g->next) {
        if (peri__nccl_broken(g) || g->left || g->guarded) continue;
        peri_status status = hopeless(g, away > w->timeout_ns, g->guard_text, sizeof g->guard_text);
        if (status < 0) {
            g->guarded = status;
            peri__nccl_abort(g);
        }
    }
    pthread_mutex_unlock(&w->lock);
}

static void *guard_thread(void *ctx)
{
    nccl_world *w = ctx;
    pthread_mutex_lock(&w->guard_lock);
    while (!w->guard_ends) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += LOOK_EVERY_NS;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        pthread_cond_timedwait(&w->guard_wake, &w->guard_lock, &until);
        if (w->guard_ends) break;
        pthread_mutex_unlock(&w->guard_lock);
        end_hopeless_groups(w);
        pthread_mutex_lock(&w->guard_lock);
    }
    pthread_mutex_unlock(&w->guard_lock);
    return NULL;
}

peri_status peri__nccl_guard_init(nccl_world *w)
{
    pthread_mutexattr_t nests;
    pthread_mutexattr_init(&nests);
    pthread_mutexattr_settype(&nests, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&w->lock, &nests);
    pthread_mutexattr_destroy(&nests);
    pthread_mutex_init(&w->guard_lock, NULL);
    pthread_condattr_t steady; /* of a clock that nobody sets */
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&w->guard_wake, &steady);
    pthread_condattr_destroy(&steady);
    if (w->size == 1) return PERI_OK;
    if (peri__nccl_host->thread_start(&w->guard, guard_thread, w) != 0)
        return FAIL(PERI_ENOMEM, "nccl: no thread to watch the device");
    w->has_guard = true;
    return PERI_OK;
}

void peri__nccl_guard_fini(nccl_world *w)
{
    if (w->has_guard) {
        pthread_mutex_lock(&w->guard_lock);
        w->guard_ends = true;
        pthread_cond_signal(&w->guard_wake);
        pthread_mutex_unlock(&w->guard_lock);
        pthread_join(w->guard, NULL);
    }
    pthread_cond_destroy(&w->guard_wake);
    pthread_mutex_destroy(&w->guard_lock);
    pthread_mutex_destroy(&w->lock);
}
