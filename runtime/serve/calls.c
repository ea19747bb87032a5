/* SPDX-License-Identifier: Apache-2.0
 *
 * serve/calls.c: what workers and paths need of the server: the model that serves, the next request of the queue, and
 * how a request is answered and counted.
 */
#include "../base/json.h"
#include "serve_internal.h"

#include <stdio.h>
#include <time.h>

int64_t peri__serve_unix_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* -- the model ----------------------------------------------------------------------------------------------------- */

void peri__serve_model_retain(peri__serve_model *model) { peri__refs_add(&model->refs); }

void peri__serve_model_release(peri__serve_model *model)
{
    if (!model || !peri__refs_drop(&model->refs)) return;
    peri__free(model->counters);
    model->kind->close(model);
}

peri__serve_model *peri__server_model(peri__server *s)
{
    pthread_mutex_lock(&s->lock);
    peri__serve_model *model = s->model;
    if (model) peri__serve_model_retain(model);
    pthread_mutex_unlock(&s->lock);
    return model;
}

bool peri__server_sound(peri__server *server)
{
    peri__serve_model *model = peri__server_model(server);
    const bool good = model && (!model->kind->sound || model->kind->sound(model));
    peri__serve_model_release(model);
    return good;
}

/* -- answers ------------------------------------------------------------------------------------------------------- */

/** Copy @text, with a '?' for each byte that is not part of UTF-8: all answers are JSON. */
static void copy_utf8(char *to, size_t room, const char *text)
{
    size_t n = 0;
    while (*text && n + 5 < room) {
        const int bytes = peri__utf8_bytes(text);
        if (bytes == 0) to[n++] = '?', text++;
        for (int i = 0; i < bytes; i++) to[n++] = *text++;
    }
    to[n] = 0;
}

void peri__server_note(peri__server *s, const char *note)
{
    pthread_mutex_lock(&s->lock);
    copy_utf8(s->note, sizeof s->note, note);
    pthread_mutex_unlock(&s->lock);
}

peri__http_reply peri__serve_error(int status, const char *why)
{
    static char sorry[] = "{\"error\":\"no memory\"}\n";
    char text[PERI_MESSAGE_MAX + 8];
    peri__buffer b = {0};
    copy_utf8(text, sizeof text, why);
    peri__buffer_append(&b, "{\"error\":", 9);
    peri__buffer_quote(&b, text);
    peri__buffer_append(&b, "}\n", 2);
    peri__http_reply r = {
        .status = status, .type = "application/json", .body = b.data, .bytes = b.bytes, .retry = status == 503};
    if (b.status >= 0) return r;
    peri__free(b.data);
    r.body = sorry, r.bytes = (int64_t)sizeof sorry - 1, r.keep = true;
    return r;
}

void peri__server_end(peri__server *s, peri__http_call *call, int end, const peri__http_reply *reply)
{
    atomic_fetch_add_explicit(&s->metrics.ends[end], 1, memory_order_relaxed);
    peri__serve_observe(&s->metrics.request_ns, PERI__SERVE_FIRST_NS,
                        (uint64_t)peri__max(0, peri_time_ns() - call->began_ns));
    peri__http_answer(call, reply);
}

void peri__server_fail(peri__server *s, peri__http_call *call, int end, const char *why)
{
    static const int statuses[PERI__SERVE_END_COUNT] = {200, 400, 413, 503, 503, 503, 504, 499, 500};
    peri__http_reply r = peri__serve_error(statuses[end], why);
    peri__server_end(s, call, end, &r);
}

/* -- the queue ----------------------------------------------------------------------------------------------------- */

peri__http_call *peri__server_pop(peri__server *s)
{
    peri__http_call *call = s->head;
    if (!call) return NULL;
    s->head = call->next;
    if (!s->head) s->tail = NULL;
    s->n_queue--;
    return call;
}
