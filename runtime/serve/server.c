/* SPDX-License-Identifier: Apache-2.0
 *
 * server.c: see server.h: another state of the model, the end of the queue, beginning and end of all.
 */
#include "serve_internal.h"

#include <errno.h>
#include <stdio.h>
#include <time.h>

/* A batch that takes longer than expected leaves connections alone for up to two ticks: short ones, if there was a turn
 * within the last BUSY_TICKS of these. */
enum { TICK_MS = 20, BUSY_TICK_MS = 2, BUSY_TICKS = 10 };

/* -- models -------------------------------------------------------------------------------------------------------- */

/** With the lock: the counter of a name (NULL: of names that no model has); NULL: no memory. */
static peri__serve_counter *counter_of(peri__server *s, const char *name)
{
    for (peri__serve_counter *c = s->counters; c; c = c->next)
        if (name ? c->name && strcmp(c->name, name) == 0 : !c->name) return c;
    peri__serve_counter *c = peri__alloc_zero(sizeof *c);
    if (!c) return NULL;
    if (name && !(c->name = peri__strdup(name))) return peri__free(c), NULL;
    c->next = s->counters;
    return s->counters = c;
}

/** Close a model that no longer serves, once all workers have left it. Closing unmaps its file, which takes tens of
 *  milliseconds, and requests would wait for a thread of the server that did it. */
static void close_when_left(peri__serve_model *model)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    while (atomic_load_explicit(&model->refs, memory_order_acquire) > 1) nanosleep(&pause, NULL);
    peri__serve_model_release(model);
}

peri_status peri__server_swap(peri__server *s, peri__serve_model *model)
{
    const peri__serve_facts *facts = &model->facts;
    if (facts->n_outputs < 1 || facts->n_outputs > PERI__SERVE_MOST_OUTPUTS)
        return peri__fail(PERI_EINVAL, "perilune serve: a model of %d outputs, allowed: 1 to %d", facts->n_outputs,
                          PERI__SERVE_MOST_OUTPUTS);
    if (facts->n_inputs < 1) return peri__fail(PERI_EINVAL, "perilune serve: a model without features");
    peri__serve_counter **counters = peri__alloc_zero(sizeof *counters * ((size_t)facts->n_inputs + 1));
    if (!counters) return PERI_ENOMEM;
    pthread_mutex_lock(&s->lock);
    bool good = true;
    for (int32_t f = 0; f <= facts->n_inputs && good; f++)
        good = (counters[f] = counter_of(s, f < facts->n_inputs ? facts->inputs[f].name : NULL)) != NULL;
    if (!good) {
        pthread_mutex_unlock(&s->lock);
        peri__free(counters);
        return PERI_ENOMEM;
    }
    model->counters = counters;
    model->loaded_unix_ns = peri__serve_unix_ns();
    peri__serve_model *old = s->model;
    s->model = model;
    pthread_cond_broadcast(&s->more); /* no batch waits for requests that come now */
    pthread_mutex_unlock(&s->lock);
    peri__serve_renew(s);
    if (!old) return PERI_OK;
    atomic_fetch_add(&s->metrics.reloads, 1);
    close_when_left(old);
    return PERI_OK;
}

peri__serve_metrics *peri__server_metrics(peri__server *s) { return &s->metrics; }

/* -- the queue ----------------------------------------------------------------------------------------------------- */

static void enqueue_call(void *ctx, peri__http_call *call)
{
    peri__server *s = ctx;
    pthread_mutex_lock(&s->lock);
    /* Workers that are free take as many of the queue at once: these do not wait. So as many clients as workers and
     * queue have room for, each of whom asks again when he has been answered, are never refused. */
    const int64_t waiting = s->n_queue - (s->options.workers - s->busy);
    int end = s->stopping                        ? PERI__SERVE_STOPPING
              : !s->model                        ? PERI__SERVE_MEMORY
              : waiting >= s->options.most_queue ? PERI__SERVE_QUEUE_FULL
                                                 : PERI__SERVE_OK;
    bool model = s->model != NULL;
    if (end == PERI__SERVE_OK) {
        call->next = NULL;
        if (s->tail) s->tail->next = call;
        else s->head = call;
        s->tail = call;
        s->n_queue++;
        if (s->filling) pthread_cond_signal(&s->more);
    }
    pthread_mutex_unlock(&s->lock);
    if (end == PERI__SERVE_OK) return; /* who is in peri__http_turn sees to it next */
    peri__server_fail(s, call, end,
                      end == PERI__SERVE_STOPPING ? "the server is stopping"
                      : !model                    ? "there is no model yet"
                                                  : "the queue is full (perilune serve --queue)");
}

/** With the lock: take those out of the queue whose time is over, or (@all) all; those whose clients have left, too. */
static peri__http_call *take_out_of_queue(peri__server *s, bool all)
{
    peri__http_call *out = NULL, **at = &s->head, *last = NULL;
    int64_t now = peri_time_ns();
    while (*at) {
        peri__http_call *call = *at;
        if (all || now > call->deadline_ns || peri__http_left(call)) {
            *at = call->next;
            call->next = out;
            out = call;
            s->n_queue--;
        } else {
            last = call;
            at = &call->next;
        }
    }
    s->tail = last;
    return out;
}

static void refuse_all(peri__server *s, peri__http_call *list, bool stopping)
{
    for (peri__http_call *next; list; list = next) {
        next = list->next;
        if (peri__http_left(list)) peri__server_fail(s, list, PERI__SERVE_LEFT, "the client has closed its connection");
        else if (stopping) peri__server_fail(s, list, PERI__SERVE_STOPPING, "the server is stopping");
        else
            peri__server_fail(s, list, PERI__SERVE_LATE,
                              "its time was over while it waited (perilune serve --timeout)");
    }
}

/** Thread: requests that wait while all workers are busy; connections that wait because a batch takes longer than it
 *  was expected to. */
static void *run_clock(void *ctx)
{
    peri__server *s = ctx;
    uint64_t turns = 0;
    int64_t busy = 0;
    pthread_mutex_lock(&s->lock);
    while (!s->quit) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_nsec += (busy ? BUSY_TICK_MS : TICK_MS) * 1000000L;
        if (t.tv_nsec >= 1000000000L) t.tv_sec++, t.tv_nsec -= 1000000000L;
        pthread_cond_timedwait(&s->tick, &s->lock, &t);
        busy = s->turns != turns ? BUSY_TICKS : peri__max(0, busy - 1);
        if (!s->turning && s->turns == turns) pthread_cond_signal(&s->wake);
        turns = s->turns;
        peri__http_call *list = take_out_of_queue(s, false);
        if (!list) continue;
        pthread_mutex_unlock(&s->lock);
        refuse_all(s, list, false);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* -- beginning and end --------------------------------------------------------------------------------------------- */

static void count_event(void *ctx, int kind)
{
    peri__server *s = ctx;
    atomic_fetch_add_explicit(&s->metrics.http[kind], 1, memory_order_relaxed);
}

static void free_server(peri__server *s)
{
    pthread_mutex_lock(&s->lock);
    s->quit = s->stopping = true;
    pthread_cond_broadcast(&s->wake);
    pthread_cond_broadcast(&s->more);
    pthread_cond_broadcast(&s->tick);
    pthread_mutex_unlock(&s->lock);
    if (s->http) peri__http_wake(s->http);
    for (int32_t i = 0; i < s->n_threads; i++) pthread_join(s->threads[i], NULL);
    if (s->has_clock) pthread_join(s->clock, NULL);
    if (s->http) peri__http_close(s->http);
    peri__serve_drop_workers(s);
    peri__serve_model_release(s->model);
    for (peri__serve_counter *c = s->counters, *next; c; c = next) {
        next = c->next;
        peri__free(c->name);
        peri__free(c);
    }
    pthread_cond_destroy(&s->wake);
    pthread_cond_destroy(&s->more);
    pthread_cond_destroy(&s->tick);
    pthread_mutex_destroy(&s->lock);
    peri__free(s->threads);
    peri__free(s);
}

/** One thread more than workers: while all predict, it reads connections. */
static peri_status start_threads(peri__server *s)
{
    const int32_t most = s->options.workers + 1;
    s->threads = peri__alloc_zero(sizeof *s->threads * (size_t)most);
    if (!s->threads) return PERI_ENOMEM;
    int problem = 0;
    for (; s->n_threads < most && !problem; s->n_threads += !problem)
        problem = peri__thread_start(&s->threads[s->n_threads], peri__serve_thread, s);
    if (!problem) {
        problem = peri__thread_start(&s->clock, run_clock, s);
        s->has_clock = !problem;
    }
    if (problem) return peri__fail(PERI_EIO, "perilune serve: no thread: %s", strerror(problem));
    return PERI_OK;
}

peri_status peri__server_open(const peri__server_options *options, peri__serve_model *model, peri__server **out)
{
    peri__server *s = peri__alloc_zero(sizeof *s);
    if (!s) return PERI_ENOMEM;
    s->options = *options;
    s->started_unix_ns = peri__serve_unix_ns();
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &clock);
    pthread_cond_init(&s->more, &clock);
    pthread_cond_init(&s->tick, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&s->lock, NULL);
    peri_status status = peri__serve_make_workers(s);
    if (status >= 0) status = start_threads(s);
    peri__http_owner owner = {.ctx = s, .now = peri__serve_route, .later = enqueue_call, .event = count_event};
    if (status >= 0 && model) status = peri__server_swap(s, model);
    bool taken = s->model != NULL;
    peri__http *http = NULL;
    if (status >= 0) status = peri__http_open(&options->http, &owner, &http);
    if (status < 0) {
        if (taken) peri__serve_model_retain(model); /* the caller keeps its reference */
        free_server(s);
        return status;
    }
    pthread_mutex_lock(&s->lock);
    s->http = http;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    *out = s;
    return PERI_OK;
}

int32_t peri__server_port(const peri__server *server) { return peri__http_port(server->http); }

/** Requests that have not been answered; @idle: and connections that may bring one. */
static int64_t unfinished(peri__server *s, bool idle)
{
    pthread_mutex_lock(&s->lock);
    int64_t n = s->n_queue + s->busy;
    pthread_mutex_unlock(&s->lock);
    return n + peri__http_busy(s->http, idle);
}

void peri__server_stop(peri__server *s, int64_t grace_ns)
{
    int64_t until = peri_time_ns() + grace_ns;
    struct timespec pause = {.tv_nsec = 2000000};
    peri__http_quiesce(s->http);
    while (unfinished(s, true) > 0 && peri_time_ns() < until) nanosleep(&pause, NULL);
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    peri__http_call *list = take_out_of_queue(s, true);
    pthread_cond_broadcast(&s->more);
    pthread_mutex_unlock(&s->lock);
    refuse_all(s, list, true);
    /* what runs cannot be broken off; answers are sent */
    for (int i = 0; unfinished(s, false) > 0 && i < 500; i++) nanosleep(&pause, NULL);
    free_server(s);
}
