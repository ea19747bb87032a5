/* SPDX-License-Identifier: Apache-2.0
 *
 * feed.c: parcels that threads make, taken one after the other.
 *
 * Parcels have numbers, from 0. A thread asks for the next number that no thread has (peri_feed_next), makes that
 * parcel, and puts it into the slot of its number. So a thread that is slow, or that the system has interrupted, makes
 * fewer parcels, and the others do not wait for it before the slots are full:
 *
 *     slots (ahead = 4)      | 5 | - | 7 | 8 |      taken: 0..4, next to be taken: 5
 *     threads                6: being made          the slow one
 *                            9: made                waits until 5 was taken, for 9 has the slot of 5
 *                            10: made               waits for the slot of 6
 *
 * The taker owns the feed. Threads that do not end in time when the feed is released are orphaned: they then own the
 * feed, and the last one that ends gives it back.
 */
#include "io_internal.h"

#include <pthread.h>
#include <time.h>

enum { MOST_AHEAD = 1 << 22, NONE = -1 };
static const int64_t patience_us = 5000000; /* of peri_feed_release */

/** A thread that makes parcels. */
typedef struct maker {
    peri_feed *feed;
    peri_feed_thread thread;
    pthread_t id;
    pthread_cond_t go_on; /* its slot is free, or what it makes is not wanted any more */
    int64_t number;       /* of the parcel that it makes; NONE */
    int64_t pass;         /* the last beginning that it has heard of */
    struct maker *next;
} maker;

struct peri_feed {
    pthread_mutex_t lock;
    pthread_cond_t arrived;  /* the parcel that is taken next is there, or will not come; or a thread is over */
    peri_feed_parcel *slots; /* [ahead] parcel n is in slot n % ahead; empty: bytes is NULL */
    peri_feed_parcel taken;  /* what the taker looks at; its objects are the taker's */
    int32_t ahead;
    int64_t first;           /* number of the parcel that is taken next */
    int64_t next;            /* the next number that no thread has */
    int64_t end;             /* there is no parcel from this number on */
    int64_t pass;            /* how often it was begun again */
    maker *makers;
    maker outside;           /* stands for threads that the feed has not begun */
    int32_t begun, running;  /* threads; those of them that are not over */
    int32_t result;          /* what the run of the thread that had the number `end` has returned */
    void *failed;            /* that thread's state, if result is not 0 */
    int32_t forks;           /* peri__forks of the process that has the threads */
    bool stopped, orphan;
};

/** A child of fork has none of the threads, and a thread may have held the lock. */
static peri_status check_process(const peri_feed *feed, const char *f)
{
    if (feed->forks == peri__forks()) return PERI_OK;
    return peri__fail(PERI_EUNSUPPORTED,
                      "%s: the feed is of the process that this one was forked from, as are its threads; make another",
                      f);
}

static _Thread_local maker *mine; /* of the thread that runs */

static maker *maker_of_thread(peri_feed *feed) { return mine && mine->feed == feed ? mine : &feed->outside; }

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

/** Give up what waits in the slots; the lock is held. */
static void drain(peri_feed *feed)
{
    for (int32_t i = 0; i < feed->ahead; i++)
        if (feed->slots[i].bytes) parcel_free(&feed->slots[i], true);
}

static void maker_init(maker *m, peri_feed *feed)
{
    *m = (maker){.feed = feed, .number = NONE, .pass = feed->pass};
    pthread_cond_init(&m->go_on, NULL);
}

/** Give back all that the feed has; no thread uses it. */
static void feed_free(peri_feed *feed)
{
    for (maker *m = feed->makers, *next; m; m = next) {
        next = m->next;
        if (m->thread.close) m->thread.close(m->thread.state);
        pthread_cond_destroy(&m->go_on);
        peri__free(m);
    }
    drain(feed);
    parcel_free(&feed->taken, false);
    pthread_cond_destroy(&feed->outside.go_on);
    pthread_cond_destroy(&feed->arrived);
    pthread_mutex_destroy(&feed->lock);
    peri__free(feed->slots);
    peri__object_count(-1);
    peri__free(feed);
}

peri_status peri_feed_new(int32_t ahead, peri_feed **out)
{
    PERI_NEED(out);
    if (ahead < 1 || ahead > MOST_AHEAD)
        return peri__fail(PERI_EINVAL, "peri_feed_new: %d parcels ahead, allowed: 1..%d", ahead, MOST_AHEAD);
    peri_feed *feed = peri__alloc_zero(sizeof *feed);
    peri_feed_parcel *slots = peri__alloc_zero(sizeof *slots * (size_t)ahead);
    if (!feed || !slots) {
        peri__free(feed);
        peri__free(slots);
        return PERI_ENOMEM;
    }
    feed->slots = slots;
    feed->ahead = ahead;
    feed->end = INT64_MAX;
    feed->forks = peri__forks();
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&feed->arrived, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&feed->lock, NULL);
    maker_init(&feed->outside, feed);
    peri__object_count(1);
    *out = feed;
    return PERI_OK;
}

/* -- the threads --------------------------------------------------------------------------------------------------- */

/** The number of the parcel that the thread makes, a new one if it has none; the lock is held. */
static int64_t number_of(maker *m)
{
    if (m->number == NONE) m->number = m->feed->next++;
    return m->number;
}

/** The thread has no parcel of its number, and no other thread has one that comes later; @result: of its run. The lock
 *  is held. */
static void end_here(maker *m, int32_t result)
{
    peri_feed *feed = m->feed;
    const int64_t number = number_of(m);
    if (number > feed->end) return;
    feed->end = number;
    feed->result = result;
    feed->failed = result ? m->thread.state : NULL;
    pthread_cond_signal(&feed->arrived);
}

/** What the other side wants of the thread: PERI_OK: its parcel; PERI_PENDING: that it begins again; PERI_ECLOSED:
 *  nothing more. The lock is held. */
static peri_status news(maker *m)
{
    const peri_feed *feed = m->feed;
    const bool again = m->pass != feed->pass;
    if (again) m->number = NONE; /* it is one of an earlier pass */
    m->pass = feed->pass;
    return feed->stopped ? PERI_ECLOSED : again ? PERI_PENDING : PERI_OK;
}

static peri_status name_closed_error(peri_status status, const char *function)
{
    return status == PERI_ECLOSED ? peri__fail(PERI_ECLOSED, "%s: nobody wants more", function) : status;
}

static void *maker_thread(void *arg)
{
    maker *m = mine = arg;
    peri_feed *feed = m->feed;
    peri__thread_alone(); /* the pool is for those who compute meanwhile */
    int32_t result = m->thread.run(m->thread.state, m->thread.n_args, 0, 0);
    pthread_mutex_lock(&feed->lock);
    (void)news(m);
    end_here(m, result);
    bool last = --feed->running == 0 && feed->orphan;
    pthread_cond_signal(&feed->arrived);
    pthread_mutex_unlock(&feed->lock);
    if (last) feed_free(feed);
    return NULL;
}

peri_status peri_feed_start(peri_feed *feed, const peri_feed_thread *thread)
{
    PERI_NEED(feed);
    PERI_NEED(thread);
    PERI_NEED(thread->run);
    maker *m = peri__alloc(sizeof *m);
    if (!m) return PERI_ENOMEM;
    maker_init(m, feed);
    m->thread = *thread;
    pthread_mutex_lock(&feed->lock);
    int problem = peri__thread_start(&m->id, maker_thread, m);
    if (problem == 0) {
        m->next = feed->makers;
        feed->makers = m;
        feed->begun++;
        feed->running++;
    }
    pthread_mutex_unlock(&feed->lock);
    if (problem == 0) return PERI_OK;
    pthread_cond_destroy(&m->go_on);
    peri__free(m);
    return peri__fail(PERI_EIO, "peri_feed_start: no thread could be started: %s", strerror(problem));
}

peri_status peri_feed_next(peri_feed *feed, int64_t *number)
{
    PERI_NEED(feed);
    PERI_NEED(number);
    maker *m = maker_of_thread(feed);
    pthread_mutex_lock(&feed->lock);
    peri_status status = news(m);
    if (status == PERI_OK) *number = number_of(m);
    pthread_mutex_unlock(&feed->lock);
    return name_closed_error(status, "peri_feed_next");
}

static peri_status check_parcel(const peri_feed_parcel *parcel)
{
    if (parcel->length < 0 || parcel->n_objects < 0 || (parcel->length > 0 && !parcel->bytes) ||
        (parcel->n_objects > 0 && !parcel->objects))
        return peri__fail(PERI_EINVAL, "peri_feed_put: %lld bytes and %d objects, with %s bytes and %s objects",
                          (long long)parcel->length, parcel->n_objects, parcel->bytes ? "some" : "no",
                          parcel->objects ? "some" : "no");
    for (int32_t i = 0; i < parcel->n_objects; i++)
        if (parcel->objects[i].kind < PERI_FEED_TENSOR || parcel->objects[i].kind > PERI_FEED_KT)
            return peri__fail(PERI_EINVAL, "peri_feed_put: object %d is of kind %d, allowed: 0..%d", i,
                              parcel->objects[i].kind, PERI_FEED_KT);
    return PERI_OK;
}

peri_status peri_feed_put(peri_feed *feed, const peri_feed_parcel *parcel)
{
    PERI_NEED(feed);
    PERI_NEED(parcel);
    PERI_TRY(check_parcel(parcel));
    peri_feed_parcel copy = {0};
    peri_status status = parcel_copy(parcel, &copy);
    if (status < 0) {
        for (int32_t i = 0; i < parcel->n_objects; i++) object_release(&parcel->objects[i]);
        return status;
    }
    maker *m = maker_of_thread(feed);
    pthread_mutex_lock(&feed->lock);
    while ((status = news(m)) == PERI_OK && number_of(m) >= feed->first + feed->ahead)
        pthread_cond_wait(&m->go_on, &feed->lock);
    if (status == PERI_OK) {
        feed->slots[m->number % feed->ahead] = copy;
        if (m->number == feed->first) pthread_cond_signal(&feed->arrived);
        m->number = NONE;
    }
    pthread_mutex_unlock(&feed->lock);
    if (status != PERI_OK) parcel_free(&copy, true);
    return name_closed_error(status, "peri_feed_put");
}

peri_status peri_feed_end(peri_feed *feed)
{
    PERI_NEED(feed);
    maker *m = maker_of_thread(feed);
    pthread_mutex_lock(&feed->lock);
    peri_status status = news(m); /* PERI_PENDING: what has come to its end is not what is wanted */
    if (status == PERI_OK) end_here(m, 0);
    while (status == PERI_OK && (status = news(m)) == PERI_OK) pthread_cond_wait(&m->go_on, &feed->lock);
    pthread_mutex_unlock(&feed->lock);
    return status == PERI_PENDING ? PERI_OK : name_closed_error(status, "peri_feed_end");
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

/** Let the threads know that what they make or wait for is not wanted any more; the lock is held. */
static void tell_all(peri_feed *feed)
{
    drain(feed);
    for (maker *m = feed->makers; m; m = m->next) pthread_cond_signal(&m->go_on);
    pthread_cond_broadcast(&feed->outside.go_on);
}

/** The parcel that was next has been taken: who has made the one that gets its slot can go on; the lock is held. */
static void free_slot(peri_feed *feed)
{
    const int64_t allowed = feed->first++ + feed->ahead;
    maker *m = feed->makers;
    while (m && (m->number != allowed || m->pass != feed->pass)) m = m->next;
    pthread_cond_signal(m ? &m->go_on : &feed->outside.go_on);
}

peri_status peri_feed_take(peri_feed *feed, int64_t wait_us, peri_feed_parcel *parcel)
{
    PERI_NEED(feed);
    PERI_NEED(parcel);
    PERI_TRY(check_process(feed, __func__));
    parcel_free(&feed->taken, false);
    struct timespec deadline = deadline_in(peri__max(wait_us, 0));
    peri_status status = PERI_PENDING;
    pthread_mutex_lock(&feed->lock);
    peri_feed_parcel *slot = &feed->slots[feed->first % feed->ahead];
    for (bool waits = wait_us > 0; status == PERI_PENDING;) {
        if (slot->bytes) status = PERI_OK;
        else if (feed->first >= feed->end || feed->running == 0) status = PERI_ECLOSED;
        else if (!waits) break;
        else waits = pthread_cond_timedwait(&feed->arrived, &feed->lock, &deadline) == 0;
    }
    if (status == PERI_OK) {
        feed->taken = *slot;
        *slot = (peri_feed_parcel){0};
        free_slot(feed);
    }
    pthread_mutex_unlock(&feed->lock);
    *parcel = feed->taken;
    return status == PERI_ECLOSED ? peri__fail(PERI_ECLOSED, "peri_feed_take: there are no more parcels") : status;
}

int32_t peri_feed_result(peri_feed *feed)
{
    if (!feed || peri__border_refuses(__func__)) return 0;
    pthread_mutex_lock(&feed->lock);
    int32_t result = feed->result;
    pthread_mutex_unlock(&feed->lock);
    return result;
}

void *peri_feed_failed(peri_feed *feed)
{
    if (!feed || peri__border_refuses(__func__)) return NULL;
    pthread_mutex_lock(&feed->lock);
    void *state = feed->failed;
    pthread_mutex_unlock(&feed->lock);
    return state;
}

peri_status peri_feed_restart(peri_feed *feed)
{
    PERI_NEED(feed);
    PERI_TRY(check_process(feed, __func__));
    pthread_mutex_lock(&feed->lock);
    bool over = feed->stopped || feed->running < feed->begun;
    if (!over) {
        feed->first = feed->next = 0;
        feed->end = INT64_MAX;
        feed->result = 0;
        feed->failed = NULL;
        feed->pass++;
        tell_all(feed);
    }
    pthread_mutex_unlock(&feed->lock);
    return over ? peri__fail(PERI_ECLOSED, "peri_feed_restart: a thread is over") : PERI_OK;
}

/** Ask the threads to end, and wait for that; true when none runs. With @orphan those that do not end are left
 *  alone. */
static bool stop(peri_feed *feed, int64_t wait_us, bool orphan)
{
    struct timespec deadline = deadline_in(peri__max(wait_us, 0));
    pthread_mutex_lock(&feed->lock);
    feed->stopped = true;
    tell_all(feed);
    while (feed->running > 0)
        if (pthread_cond_timedwait(&feed->arrived, &feed->lock, &deadline) != 0) break;
    bool ended = feed->running == 0;
    feed->orphan = orphan && !ended;
    for (const maker *m = feed->makers; m && feed->orphan; m = m->next) pthread_detach(m->id);
    pthread_mutex_unlock(&feed->lock);
    return ended;
}

peri_status peri_feed_stop(peri_feed *feed, int64_t wait_us)
{
    PERI_NEED(feed);
    PERI_TRY(check_process(feed, __func__));
    if (stop(feed, wait_us, false)) return PERI_OK;
    return peri__fail(PERI_ETIMEOUT, "peri_feed_stop: the thread has not ended after %.3g s", (double)wait_us * 1e-6);
}

void peri_feed_release(peri_feed *feed)
{
    if (!feed || peri__border_refuses(__func__)) return;
    if (feed->forks != peri__forks()) { /* its memory is left as the threads had it */
        peri__object_count(-1);
        return;
    }
    if (!stop(feed, patience_us, true)) return;
    for (const maker *m = feed->makers; m; m = m->next) pthread_join(m->id, NULL);
    feed_free(feed);
}
