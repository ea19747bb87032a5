/* SPDX-License-Identifier: Apache-2.0
 *
 * feed.c: parcels from a thread of their own.
 *
 * The taker owns the feed. A thread that does not end in time when the feed is released is orphaned: it then owns the
 * feed, and gives it back when it ends.
 */
#include "io_internal.h"

#include <pthread.h>
#include <time.h>

enum { MOST_AHEAD = 4096 };
static const int64_t patience_us = 5000000; /* of peri_feed_release */

struct peri_feed {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* of anything below */
    peri_feed_parcel *ring; /* [ahead] */
    peri_feed_parcel taken; /* what the taker looks at; its objects are the taker's */
    int32_t ahead, first, count;
    void *state; /* of the thread */
    int32_t n_args;
    peri_feed_run_f run;
    peri_feed_close_f close;
    pthread_t thread;
    int32_t result;
    bool started, over, stopped, orphan;
    bool ended, again; /* the thread has no more, and waits; the taker wants it to begin again, and the thread has not
                          heard of it */
};

static void object_release(const peri_feed_object *o)
{
    switch (o->kind) {
    case PERI_FEED_TENSOR: peri_tensor_release(o->ptr); break;
    case PERI_FEED_KJT: peri_kjt_release(o->ptr); break;
    case PERI_FEED_JT: peri_jt_release(o->ptr); break;
    default: peri_kt_release(o->ptr); break;
    }
}

static void parcel_free(peri_feed_parcel *p, bool objects)
{
    for (int32_t i = 0; objects && i < p->n_objects; i++) object_release(&p->objects[i]);
    peri__free((void *)p->bytes);
    peri__free((void *)p->objects);
    *p = (peri_feed_parcel){0};
}

static peri_status parcel_copy(const peri_feed_parcel *from, peri_feed_parcel *to)
{
    size_t list = sizeof *from->objects * (size_t)from->n_objects;
    char *bytes = peri__alloc((size_t)from->length + 1);
    peri_feed_object *objects = peri__alloc(list + 1);
    if (!bytes || !objects) {
        peri__free(bytes);
        peri__free(objects);
        return PERI_ENOMEM;
    }
    if (from->length > 0) memcpy(bytes, from->bytes, (size_t)from->length);
    if (list > 0) memcpy(objects, from->objects, list);
    *to =
        (peri_feed_parcel){.bytes = bytes, .length = from->length, .objects = objects, .n_objects = from->n_objects};
    return PERI_OK;
}

/** Give up what waits in the queue; the lock is held. */
static void drain(peri_feed *feed)
{
    for (; feed->count > 0; feed->count--, feed->first = (feed->first + 1) % feed->ahead)
        parcel_free(&feed->ring[feed->first], true);
}

/** Give back all that the feed has; no thread uses it. */
static void feed_free(peri_feed *feed)
{
    if (feed->started && feed->close) feed->close(feed->state);
    drain(feed);
    parcel_free(&feed->taken, false);
    pthread_cond_destroy(&feed->changed);
    pthread_mutex_destroy(&feed->lock);
    peri__free(feed->ring);
    peri__object_count(-1);
    peri__free(feed);
}

peri_status peri_feed_new(int32_t ahead, peri_feed **out)
{
    PERI_NEED(out);
    if (ahead < 1 || ahead > MOST_AHEAD)
        return peri__fail(PERI_EINVAL, "peri_feed_new: %d parcels ahead, allowed: 1..%d", ahead, MOST_AHEAD);
    peri_feed *feed = peri__alloc_zero(sizeof *feed);
    peri_feed_parcel *ring = peri__alloc_zero(sizeof *ring * (size_t)ahead);
    if (!feed || !ring) {
        peri__free(feed);
        peri__free(ring);
        return PERI_ENOMEM;
    }
    feed->ring = ring;
    feed->ahead = ahead;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&feed->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&feed->lock, NULL);
    peri__object_count(1);
    *out = feed;
    return PERI_OK;
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

static void *body(void *arg)
{
    peri_feed *feed = arg;
    peri__thread_alone(); /* the pool is for those who compute meanwhile */
    int32_t result = feed->run(feed->state, feed->n_args, 0, 0);
    pthread_mutex_lock(&feed->lock);
    feed->result = result;
    feed->over = true;
    bool orphan = feed->orphan;
    pthread_cond_broadcast(&feed->changed);
    pthread_mutex_unlock(&feed->lock);
    if (orphan) feed_free(feed);
    return NULL;
}

peri_status peri_feed_start(peri_feed *feed, const peri_feed_thread *thread)
{
    PERI_NEED(feed);
    PERI_NEED(thread);
    PERI_NEED(thread->run);
    if (feed->started) return peri__fail(PERI_EINVAL, "peri_feed_start: its thread was begun already");
    feed->state = thread->state;
    feed->n_args = thread->n_args;
    feed->run = thread->run;
    feed->close = thread->close;
    int problem = peri__thread_start(&feed->thread, body, feed);
    if (problem != 0) return peri__fail(PERI_EIO, "peri_feed_start: no thread could be started: %s", strerror(problem));
    feed->started = true;
    return PERI_OK;
}

peri_status peri_feed_put(peri_feed *feed, const peri_feed_parcel *parcel)
{
    PERI_NEED(feed);
    PERI_NEED(parcel);
    if (parcel->length < 0 || parcel->n_objects < 0 || (parcel->length > 0 && !parcel->bytes) ||
        (parcel->n_objects > 0 && !parcel->objects))
        return peri__fail(PERI_EINVAL, "peri_feed_put: %lld bytes and %d objects, with %s bytes and %s objects",
                          (long long)parcel->length, parcel->n_objects, parcel->bytes ? "some" : "no",
                          parcel->objects ? "some" : "no");
    for (int32_t i = 0; i < parcel->n_objects; i++)
        if (parcel->objects[i].kind < PERI_FEED_TENSOR || parcel->objects[i].kind > PERI_FEED_KT)
            return peri__fail(PERI_EINVAL, "peri_feed_put: object %d is of kind %d, allowed: 0..%d", i,
                              parcel->objects[i].kind, PERI_FEED_KT);
    peri_feed_parcel copy = {0};
    peri_status status = parcel_copy(parcel, &copy);
    if (status < 0) {
        for (int32_t i = 0; i < parcel->n_objects; i++) object_release(&parcel->objects[i]);
        return status;
    }
    pthread_mutex_lock(&feed->lock);
    while (feed->count == feed->ahead && !feed->stopped && !feed->again) pthread_cond_wait(&feed->changed, &feed->lock);
    bool stopped = feed->stopped, wanted = !stopped && !feed->again;
    feed->again = false;
    if (wanted) {
        feed->ring[(feed->first + feed->count) % feed->ahead] = copy;
        feed->count++;
        pthread_cond_broadcast(&feed->changed);
    }
    pthread_mutex_unlock(&feed->lock);
    if (wanted) return PERI_OK;
    parcel_free(&copy, true);
    return stopped ? peri__fail(PERI_ECLOSED, "peri_feed_put: nobody wants more") : PERI_PENDING;
}

peri_status peri_feed_end(peri_feed *feed)
{
    PERI_NEED(feed);
    pthread_mutex_lock(&feed->lock);
    feed->ended = !feed->again; /* else what has come to its end is not what is wanted */
    pthread_cond_broadcast(&feed->changed);
    while (!feed->again && !feed->stopped) pthread_cond_wait(&feed->changed, &feed->lock);
    bool stopped = feed->stopped;
    feed->again = false;
    pthread_mutex_unlock(&feed->lock);
    return stopped ? peri__fail(PERI_ECLOSED, "peri_feed_end: nobody wants more") : PERI_OK;
}

/* -- the taker ----------------------------------------------------------------------------------------------------- */

static struct timespec deadline_in(int64_t us)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += us / 1000000;
    t.tv_nsec += us % 1000000 * 1000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

peri_status peri_feed_take(peri_feed *feed, int64_t wait_us, peri_feed_parcel *parcel)
{
    PERI_NEED(feed);
    PERI_NEED(parcel);
    parcel_free(&feed->taken, false);
    struct timespec deadline = deadline_in(peri__max(wait_us, 0));
    pthread_mutex_lock(&feed->lock);
    while (feed->count == 0 && feed->started && !feed->over && !feed->ended && wait_us > 0)
        if (pthread_cond_timedwait(&feed->changed, &feed->lock, &deadline) != 0) break;
    peri_status status = feed->count > 0                                ? PERI_OK
                         : feed->started && !feed->over && !feed->ended ? PERI_PENDING
                                                                        : PERI_ECLOSED;
    if (status == PERI_OK) {
        feed->taken = feed->ring[feed->first];
        feed->ring[feed->first] = (peri_feed_parcel){0};
        feed->first = (feed->first + 1) % feed->ahead;
        feed->count--;
        pthread_cond_broadcast(&feed->changed);
    }
    pthread_mutex_unlock(&feed->lock);
    *parcel = feed->taken;
    return status == PERI_ECLOSED ? peri__fail(PERI_ECLOSED, "peri_feed_take: there are no more parcels") : status;
}

int32_t peri_feed_result(peri_feed *feed)
{
    if (!feed || peri__border_refuses(__func__)) return 0;
    pthread_mutex_lock(&feed->lock);
    int32_t result = feed->over ? feed->result : 0;
    pthread_mutex_unlock(&feed->lock);
    return result;
}

peri_status peri_feed_restart(peri_feed *feed)
{
    PERI_NEED(feed);
    pthread_mutex_lock(&feed->lock);
    bool over = feed->over || feed->stopped;
    if (!over) {
        drain(feed);
        feed->ended = false;
        feed->again = true;
        pthread_cond_broadcast(&feed->changed);
    }
    pthread_mutex_unlock(&feed->lock);
    return over ? peri__fail(PERI_ECLOSED, "peri_feed_restart: the thread is over") : PERI_OK;
}

/** Ask the thread to end, and wait for that; true when none runs. With @orphan it is left alone if it does not end. */
static bool stop(peri_feed *feed, int64_t wait_us, bool orphan)
{
    struct timespec deadline = deadline_in(peri__max(wait_us, 0));
    pthread_mutex_lock(&feed->lock);
    feed->stopped = true;
    drain(feed);
    pthread_cond_broadcast(&feed->changed);
    while (feed->started && !feed->over)
        if (pthread_cond_timedwait(&feed->changed, &feed->lock, &deadline) != 0) break;
    bool ended = !feed->started || feed->over;
    feed->orphan = orphan && !ended;
    pthread_mutex_unlock(&feed->lock);
    return ended;
}

peri_status peri_feed_stop(peri_feed *feed, int64_t wait_us)
{
    PERI_NEED(feed);
    if (stop(feed, wait_us, false)) return PERI_OK;
    return peri__fail(PERI_ETIMEOUT, "peri_feed_stop: the thread has not ended after %.3g s", (double)wait_us * 1e-6);
}

void peri_feed_release(peri_feed *feed)
{
    if (!feed || peri__border_refuses(__func__)) return;
    pthread_t thread = feed->thread;
    bool started = feed->started;
    if (stop(feed, patience_us, true)) {
        if (started) pthread_join(thread, NULL);
        feed_free(feed);
    } else {
        pthread_detach(thread);
    }
}
