/* SPDX-License-Identifier: Apache-2.0
 *
 * worker.c: the server's threads, and the workers with which they predict.
 *
 * A thread does one of three things: it has a turn at the connections (one thread at a time), it has a worker and
 * predicts, or it waits. Who reads a request predicts it, too, if a worker is free, and then goes back to the
 * connections: a request that comes alone is read, predicted and answered by one thread, which wakes no other. Another
 * thread takes over the connections if the batch is expected to take long, or (the clock in server.c sees to it) if it
 * does. There is one thread more than workers, so while all predict, one has the connections: health is answered, and
 * what the queue has no room for is refused.
 */
#include "serve_internal.h"

#include <stdio.h>
#include <time.h>

enum {
    MOST_CALLS = 256,
    PATIENCE_NS = 200000 /* connections may wait so long for a thread that predicts; waking another takes some 10 us */
};

typedef struct peri__serve_worker {
    struct peri__serve_worker *next; /* of those that are free */
    peri__server *s;
    peri__serve_model *model;       /* retained; NULL: none yet */
    const peri__serve_model *tried; /* the one that it went over to last, or for which there was no memory */
    void *context;            /* of the model */
    peri__serve_batch batch;
    float *outputs[PERI__SERVE_MOST_OUTPUTS];
    int64_t rooms[PERI__SERVE_MOST_OUTPUTS]; /* numbers that outputs have room for */
    int64_t *offsets[PERI__SERVE_MOST_OUTPUTS]; /* of those that are lists of samples */
    int64_t offset_rooms[PERI__SERVE_MOST_OUTPUTS];
    peri__http_call *calls[MOST_CALLS];      /* those of the batch */
    peri__serve_question questions[MOST_CALLS];
    int32_t n_calls;
    int64_t bytes;      /* of the requests that it took for its batch */
    int32_t unanswered; /* requests that it has taken and not answered; > 0: it is one of those that are busy */
} worker;

static void leave_model(worker *w)
{
    if (!w->model) return;
    if (w->context) w->model->kind->drop(w->model, w->context);
    w->context = NULL;
    peri__serve_batch_fini(&w->batch);
    peri__serve_model_release(w->model);
    w->model = NULL;
}

/** Go over to the model that serves now. The old one is let go first, so that its memory is free before the next one
 *  comes. */
static peri_status adopt(worker *w)
{
    leave_model(w);
    peri__serve_model *model = peri__server_model(w->s);
    if (!model) return peri__fail(PERI_ENOTFOUND, "there is no model yet");
    w->tried = w->model = model;
    peri_status status = peri__serve_batch_init(&w->batch, &model->facts);
    if (status >= 0)
        status = model->kind->context(model, w->s->options.most_batch + w->s->options.rules.most_samples, &w->context);
    if (status < 0) leave_model(w);
    return status;
}

/** With the lock, which is given up meanwhile: a worker becomes free, and does not keep a model that no longer serves.
 *  Where there is no memory for the new one, the worker tries again with its next request. */
static void put_back(peri__server *s, worker *w)
{
    while (w->tried != s->model) {
        if (!s->turning) pthread_cond_signal(&s->wake); /* it takes milliseconds */
        pthread_mutex_unlock(&s->lock);
        adopt(w);
        pthread_mutex_lock(&s->lock);
    }
    w->next = s->free_worker;
    s->free_worker = w;
}

/** With the lock: take a free worker that has not tried the model that serves; NULL: there is none. */
static worker *take_stale(peri__server *s)
{
    worker **at = &s->free_worker;
    while (*at && (*at)->tried == s->model) at = &(*at)->next;
    worker *w = *at;
    if (w) *at = w->next;
    return w;
}

void peri__serve_renew(peri__server *s)
{
    pthread_mutex_lock(&s->lock);
    for (worker *w; (w = take_stale(s));) {
        put_back(s, w);
        if (s->head) pthread_cond_signal(&s->wake);
    }
    pthread_mutex_unlock(&s->lock);
}

peri_status peri__serve_make_workers(peri__server *s)
{
    s->workers = peri__alloc_zero(sizeof *s->workers * (size_t)s->options.workers);
    if (!s->workers) return PERI_ENOMEM;
    s->ns_per_byte = PATIENCE_NS; /* not known yet */
    for (int32_t i = s->options.workers; i-- > 0;) {
        s->workers[i] = (worker){.s = s, .next = s->free_worker};
        s->free_worker = &s->workers[i];
    }
    return PERI_OK;
}

void peri__serve_drop_workers(peri__server *s)
{
    for (int32_t i = 0; s->workers && i < s->options.workers; i++) {
        worker *w = &s->workers[i];
        leave_model(w);
        for (int32_t k = 0; k < PERI__SERVE_MOST_OUTPUTS; k++) {
            peri__free(w->outputs[k]);
            peri__free(w->offsets[k]);
        }
    }
    peri__free(s->workers);
}

/** With the lock: take the next request; NULL: none waits. */
static peri__http_call *pop(worker *w)
{
    peri__http_call *call = peri__server_pop(w->s);
    if (call && w->unanswered++ == 0) w->s->busy++;
    return call;
}

/** A request is about to be answered. Whoever hears the last answer may ask again at once, and finds a worker that is
 *  free: he would be refused if the queue were full and this worker still counted as busy. */
static void before_answer(worker *w)
{
    if (--w->unanswered > 0) return;
    pthread_mutex_lock(&w->s->lock);
    w->s->busy--;
    pthread_mutex_unlock(&w->s->lock);
}

static void fail_call(worker *w, peri__http_call *call, int end, const char *why)
{
    before_answer(w);
    peri__server_fail(w->s, call, end, why);
}

static uint64_t waited_ns(const peri__http_call *call, int64_t now)
{
    return (uint64_t)peri__max(0, now - call->whole_ns);
}

/** Answer a request whose client has left, or whose time is over; returns whether it was one. */
static bool refuse_gone(worker *w, peri__http_call *call, int64_t now)
{
    if (peri__http_left(call)) fail_call(w, call, PERI__SERVE_LEFT, "the client has closed its connection");
    else if (now > call->deadline_ns)
        fail_call(w, call, PERI__SERVE_LATE, "its time was over (perilune serve --timeout)");
    else return false;
    return true;
}

/** Read a request into the batch, as number @i of those that the worker has. */
static peri_status read_call(worker *w, peri__http_call *call, int32_t i)
{
    return peri__serve_read(&w->batch, &w->s->options.rules, call->form == PERI__SERVE_CALL_V2, call->body, call->bytes,
                            call->json_bytes, &w->questions[i]);
}

/** Read a request into the batch, or answer it: it alone fails. */
static void take(worker *w, peri__http_call *call)
{
    peri__server *s = w->s;
    int64_t now = peri_time_ns();
    peri__serve_observe(&s->metrics.queue_ns, PERI__SERVE_FIRST_NS, waited_ns(call, now));
    w->bytes += call->bytes;
    if (refuse_gone(w, call, now)) return;
    peri_status status = read_call(w, call, w->n_calls);
    if (status < 0)
        return fail_call(w, call, status == PERI_EFORMAT ? PERI__SERVE_BAD : PERI__SERVE_FAILED, peri_error_message());
    w->calls[w->n_calls++] = call;
}

/** After the batch has waited for more requests: take those out of it whose clients have left meanwhile, or whose time
 *  is over. The others are read again, since a batch cannot lose samples from its middle. */
static void drop_gone(worker *w)
{
    const int64_t now = peri_time_ns();
    int32_t kept = 0;
    for (int32_t i = 0; i < w->n_calls; i++)
        if (!refuse_gone(w, w->calls[i], now)) w->calls[kept++] = w->calls[i];
    if (kept == w->n_calls) return;
    w->n_calls = 0;
    peri__serve_batch_clear(&w->batch);
    for (int32_t i = 0; i < kept; i++) {
        peri__http_call *call = w->calls[i];
        if (read_call(w, call, w->n_calls) >= 0) w->calls[w->n_calls++] = call;
        else fail_call(w, call, PERI__SERVE_FAILED, peri_error_message()); /* no memory */
    }
}

/** The next request for a batch that has begun; NULL: none came in time, or another model serves by now: the request's
 *  client may have had an answer of that one already, and gets none that is older. */
static peri__http_call *another(worker *w, int64_t until)
{
    peri__server *s = w->s;
    struct timespec t = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&s->lock);
    peri__http_call *call = NULL;
    while (s->model == w->model && !(call = pop(w)) && !s->stopping && s->options.delay_ns > 0 &&
           peri_time_ns() < until) {
        s->filling++;
        pthread_cond_timedwait(&s->more, &s->lock, &t);
        s->filling--;
    }
    pthread_mutex_unlock(&s->lock);
    return call;
}

static peri_status make_room(worker *w)
{
    const peri__serve_facts *facts = &w->model->facts;
    for (int32_t k = 0; k < facts->n_outputs; k++) {
        const peri__serve_output *o = &facts->outputs[k];
        const int64_t rows = o->listed ? peri__max(1, w->batch.columns[o->list].n_values) : w->batch.samples;
        PERI_TRY(peri__grow((void **)&w->outputs[k], &w->rooms[k], rows * o->width, sizeof(float)));
        if (!o->listed) continue;
        PERI_TRY(peri__grow((void **)&w->offsets[k], &w->offset_rooms[k], w->batch.samples + 1, sizeof(int64_t)));
    }
    return PERI_OK;
}

static void answer_call(worker *w, int32_t i, int64_t begin, int64_t end)
{
    peri__http_call *call = w->calls[i];
    peri__http_reply r = {.status = 200, .type = "application/json"};
    peri_status status =
        peri__serve_write(&w->model->facts, &w->questions[i], w->outputs, w->offsets, &r.body, &r.bytes, &r.json_bytes);
    if (status < 0) return fail_call(w, call, PERI__SERVE_FAILED, peri_error_message());
    if (r.json_bytes) r.type = "application/octet-stream";
    snprintf(r.timing, sizeof r.timing, "queue;dur=%.3f, compute;dur=%.3f, batch;desc=\"%lld\"",
             (double)waited_ns(call, begin) * 1e-6, (double)(end - begin) * 1e-6, (long long)w->batch.samples);
    before_answer(w);
    peri__server_end(w->s, call, PERI__SERVE_OK, &r);
}

static void count_problems(worker *w)
{
    for (int32_t f = 0; f <= w->model->facts.n_inputs; f++)
        for (int k = 0; k < PERI__SERVE_PROBLEM_COUNT; k++)
            if (w->batch.problems[f][k])
                atomic_fetch_add_explicit(&w->model->counters[f]->counts[k], w->batch.problems[f][k],
                                          memory_order_relaxed);
}

/** Count what the model itself refuses of a request's samples, by its feature. */
static void count_refusal(worker *w)
{
    const peri__serve_kind *does = w->model->kind;
    if (!does->refused) return;
    const int32_t f = does->refused(w->model, w->context, w->batch.samples, w->batch.columns);
    if (f >= 0) atomic_fetch_add_explicit(&w->model->counters[f]->counts[PERI__SERVE_RANGE], 1, memory_order_relaxed);
}

static void count_batch(worker *w, int64_t ns)
{
    peri__serve_metrics *m = &w->s->metrics;
    peri__serve_observe(&m->compute_ns, PERI__SERVE_FIRST_NS, (uint64_t)ns);
    peri__serve_observe(&m->batch_samples, PERI__SERVE_FIRST_SAMPLES, (uint64_t)w->batch.samples);
    atomic_fetch_add_explicit(&m->samples, (uint64_t)w->batch.samples, memory_order_relaxed);
    if (!w->model->kind->skipped) return;
    int64_t skipped = w->model->kind->skipped(w->model, w->context, w->batch.samples, w->batch.columns);
    atomic_fetch_add_explicit(&m->skipped, (uint64_t)skipped, memory_order_relaxed);
}

/** Predict the batch, and answer the requests from @first to before @last, which it has. False: the model refuses
 *  it. */
static bool predict(worker *w, int32_t first, int32_t last)
{
    char why[PERI_MESSAGE_MAX];
    peri_status status = make_room(w);
    int64_t begin = peri_time_ns();
    if (status >= 0)
        status =
            w->model->kind->predict(w->model, w->context, w->batch.samples, w->batch.columns, w->outputs, w->offsets);
    int64_t end = peri_time_ns();
    if (status >= 0) count_batch(w, end - begin);
    bool refused = status == PERI_EINVAL || status == PERI_ERANGE;
    if (refused && last - first > 1) return false;
    snprintf(why, sizeof why, "%s", status < 0 ? peri_error_message() : "");
    if (refused) count_refusal(w);
    for (int32_t i = first; i < last; i++) {
        if (status < 0) fail_call(w, w->calls[i], refused ? PERI__SERVE_BAD : PERI__SERVE_FAILED, why);
        else answer_call(w, i, begin, end);
    }
    return true;
}

/** The model has refused a batch, for what one of its requests or some say: each once more, alone. */
static void predict_each(worker *w)
{
    for (int32_t i = 0; i < w->n_calls; i++) {
        peri__http_call *call = w->calls[i];
        peri__serve_batch_clear(&w->batch);
        if (read_call(w, call, i) < 0) fail_call(w, call, PERI__SERVE_FAILED, peri_error_message()); /* no memory */
        else predict(w, i, i + 1);
    }
}

static void serve_batch(worker *w, peri__http_call *call)
{
    peri__server *s = w->s;
    int64_t until = peri__min(call->whole_ns + s->options.delay_ns, call->deadline_ns);
    w->n_calls = 0, w->bytes = 0;
    peri__serve_batch_clear(&w->batch);
    for (; call; call = w->n_calls < MOST_CALLS && w->batch.samples < s->options.most_batch ? another(w, until) : NULL)
        take(w, call);
    count_problems(w);
    if (s->options.delay_ns > 0) drop_gone(w);
    if (w->n_calls && !predict(w, 0, w->n_calls)) predict_each(w);
}

/* -- threads ------------------------------------------------------------------------------------------------------- */

/** With the lock: a thread that has taken @call is about to leave the connections to themselves. If that may take long,
 *  or there is more to do, another thread is woken. If not, none is, since that costs more than such a request: this
 *  thread read the request, and will send its answer. */
static void wake_another(peri__server *s, const worker *w, const peri__http_call *call)
{
    const bool request = s->head && s->free_worker;
    const bool slow = s->options.delay_ns > 0 || w->model != s->model ||
                      (double)call->bytes * s->ns_per_byte > PATIENCE_NS;
    if (request || (!s->turning && slow)) pthread_cond_signal(&s->wake);
}

/** With the lock, which is given up meanwhile: predict the first requests of the queue. */
static void work(peri__server *s)
{
    worker *w = s->free_worker;
    s->free_worker = w->next;
    peri__http_call *call = pop(w);
    wake_another(s, w, call);
    const bool stale = s->model != w->model;
    pthread_mutex_unlock(&s->lock);
    const int64_t begin = peri_time_ns();
    peri_status status = stale ? adopt(w) : PERI_OK;
    if (status < 0) fail_call(w, call, PERI__SERVE_MEMORY, peri_error_message());
    else serve_batch(w, call);
    const int64_t end = peri_time_ns();
    pthread_mutex_lock(&s->lock);
    if (status >= 0) s->ns_per_byte = (double)(end - begin) / (double)peri__max(1, w->bytes);
    put_back(s, w);
}

/** With the lock, which is given up meanwhile: read and write connections. @wait: wait for them if they have nothing.
 *  Returns whether there are several requests, and some of them new. */
static bool take_turn(peri__server *s, bool wait)
{
    const int64_t before = s->n_queue;
    s->turning = true;
    s->turns++;
    pthread_mutex_unlock(&s->lock);
    peri__http_turn(s->http, wait);
    pthread_mutex_lock(&s->lock);
    s->turning = false;
    return s->n_queue > 1 && s->n_queue > before;
}

void *peri__serve_thread(void *ctx)
{
    peri__server *s = ctx;
    peri__thread_alone();
    bool crowd = false; /* this thread's last turn brought requests, and several wait: more may have come meanwhile, and
                           a batch of all of them takes less than two */
    pthread_mutex_lock(&s->lock);
    while (!s->quit) {
        const bool request = s->head && s->free_worker;
        if (request && !crowd) work(s);
        else if (s->http && !s->turning) crowd = take_turn(s, !request);
        else pthread_cond_wait(&s->wake, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
