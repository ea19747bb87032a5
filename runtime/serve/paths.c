/* SPDX-License-Identifier: Apache-2.0
 *
 * paths.c: which path is what. Everything but predictions is answered here at once, in a turn at the connections: also
 * while all workers are busy.
 */
#include "serve_internal.h"

#include <inttypes.h>
#include <stdio.h>

static void print_word(peri__buffer *b, const char *text) { peri__buffer_append(b, text, (int64_t)strlen(text)); }

static bool send_reply(peri__server *s, peri__http_call *call, const peri__http_reply *r)
{
    atomic_fetch_add_explicit(&s->metrics.other, 1, memory_order_relaxed);
    peri__http_answer(call, r);
    return true;
}

static bool reply_error(peri__server *s, peri__http_call *call, int status, const char *why)
{
    peri__http_reply r = peri__serve_error(status, why);
    return send_reply(s, call, &r);
}

/** A reply with what a buffer has, which is taken. */
static bool reply_buffer(peri__server *s, peri__http_call *call, int status, const char *type, peri__buffer *b)
{
    if (b->status < 0) {
        peri__free(b->data);
        return reply_error(s, call, 500, "no memory");
    }
    peri__http_reply r = {.status = status, .type = type, .body = b->data, .bytes = b->bytes, .retry = status == 503};
    return send_reply(s, call, &r);
}

/** What follows @prefix in @path; NULL: @path does not begin so. */
static const char *rest_after_prefix(const char *path, const char *prefix)
{
    size_t n = strlen(prefix);
    return path && strncmp(path, prefix, n) == 0 ? path + n : NULL;
}

static bool path_is(const char *path, const char *text) { return path && strcmp(path, text) == 0; }

/* -- health and metrics -------------------------------------------------------------------------------------------- */

/** Seconds since the model's trainer wrote its state; if the model does not tell that time, since the server loaded
 *  it. */
static double age_seconds(const peri__serve_model *model)
{
    int64_t from = model->born_unix_ns ? model->born_unix_ns : model->loaded_unix_ns;
    return (double)(peri__serve_unix_ns() - from) * 1e-9;
}

typedef struct state {
    peri__serve_model *model; /* retained; NULL: none */
    int64_t queue;
    int32_t busy;
    bool stopping;
    char note[PERI_MESSAGE_MAX];
} state;

static state look_at_server(peri__server *s)
{
    state now;
    pthread_mutex_lock(&s->lock);
    now = (state){.model = s->model, .queue = s->n_queue, .busy = s->busy, .stopping = s->stopping};
    memcpy(now.note, s->note, sizeof now.note);
    if (now.model) peri__serve_model_retain(now.model);
    pthread_mutex_unlock(&s->lock);
    return now;
}

/** Alive: it answers. Ready: it has a model whose file is whole, and is not stopping. Fresh: the age. */
static bool reply_health(peri__server *s, peri__http_call *call, bool whole)
{
    state now = look_at_server(s);
    peri__buffer b = {0};
    const bool sound = peri__server_sound(s), ready = sound && !now.stopping;
    if (now.model && !sound && !now.note[0]) /* nobody who follows has looked since */
        snprintf(now.note, sizeof now.note, "the model's file was cut or written to, or cannot be read");
    print_word(&b, ready ? "{\"live\":true,\"ready\":true" : "{\"live\":true,\"ready\":false");
    if (whole && now.model) {
        print_word(&b, ",\"model\":");
        peri__buffer_quote(&b, now.model->facts.name);
        print_word(&b, ",\"version\":");
        peri__buffer_quote(&b, now.model->facts.version);
        peri__buffer_print(&b, ",\"age_seconds\":%.3f", age_seconds(now.model));
    }
    if (whole && now.note[0]) {
        print_word(&b, ",\"note\":");
        peri__buffer_quote(&b, now.note);
    }
    print_word(&b, "}\n");
    peri__serve_model_release(now.model);
    return reply_buffer(s, call, ready || whole ? 200 : 503, "application/json", &b);
}

static void print_features(peri__server *s, peri__buffer *b)
{
    print_word(b, "# HELP perilune_feature_values_total Values and lists that did not fit, by feature (empty: of names "
                  "that the model does not have).\n# TYPE perilune_feature_values_total counter\n");
    pthread_mutex_lock(&s->lock);
    for (peri__serve_counter *c = s->counters; c; c = c->next) {
        for (int k = 0; k < PERI__SERVE_PROBLEM_COUNT; k++) {
            uint64_t n = atomic_load_explicit(&c->counts[k], memory_order_relaxed);
            if (!n) continue;
            print_word(b, "perilune_feature_values_total{feature=");
            peri__serve_label(b, c->name ? c->name : "");
            peri__buffer_print(b, ",what=\"%s\"} %" PRIu64 "\n", peri__serve_problem_names[k], n);
        }
    }
    pthread_mutex_unlock(&s->lock);
}

static bool reply_metrics(peri__server *s, peri__http_call *call)
{
    state now = look_at_server(s);
    peri__buffer b = {0};
    peri__serve_gauge(&b, "perilune_ready", "gauge", "1: there is a model, and the server is not stopping.",
                      peri__server_sound(s) && !now.stopping);
    if (now.note[0]) {
        print_word(&b, "# HELP perilune_note What is amiss, as /health says it.\n# TYPE perilune_note gauge\n"
                 "perilune_note{note=");
        peri__serve_label(&b, now.note);
        print_word(&b, "} 1\n");
    }
    if (now.model) {
        print_word(&b, "# HELP perilune_model_info The model that serves.\n# TYPE perilune_model_info "
                 "gauge\nperilune_model_info{model=");
        peri__serve_label(&b, now.model->facts.name);
        print_word(&b, ",version=");
        peri__serve_label(&b, now.model->facts.version);
        print_word(&b, "} 1\n");
        peri__serve_gauge(&b, "perilune_model_bytes", "gauge",
                          "Of its file, which is mapped; a new file takes its own beside it until it serves.",
                          (double)now.model->bytes);
        peri__serve_gauge(&b, "perilune_model_age_seconds", "gauge", "Since the trainer wrote what is served.",
                          age_seconds(now.model));
        peri__serve_gauge(&b, "perilune_model_loaded_timestamp_seconds", "gauge", "When it was loaded.",
                          (double)now.model->loaded_unix_ns * 1e-9);
    }
    peri__serve_gauge(&b, "perilune_queue_requests", "gauge", "Requests that wait.", (double)now.queue);
    peri__serve_gauge(&b, "perilune_queue_limit", "gauge", "Requests that may wait.", (double)s->options.most_queue);
    peri__serve_gauge(&b, "perilune_workers", "gauge", "Threads that predict.", s->options.workers);
    peri__serve_gauge(&b, "perilune_workers_busy", "gauge", "Those of them that have requests.", now.busy);
    peri__serve_gauge(&b, "process_start_time_seconds", "gauge", "When the server started.",
                      (double)s->started_unix_ns * 1e-9);
    peri__serve_gauge(&b, "perilune_memory_bytes", "gauge", "Heap and tensors that are in use.",
                      (double)peri_mem_live());
    peri__serve_metrics_print(&s->metrics, &b);
    print_features(s, &b);
    peri__serve_model_release(now.model);
    return reply_buffer(s, call, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
}

/* -- models -------------------------------------------------------------------------------------------------------- */

static bool reply_description(peri__server *s, peri__http_call *call, const peri__serve_model *model)
{
    peri__buffer b = {0};
    b.status = peri__serve_describe(&model->facts, &b.data, &b.bytes);
    return reply_buffer(s, call, 200, "application/json", &b);
}

/** As TensorFlow Serving says it. */
static bool reply_status(peri__server *s, peri__http_call *call, const peri__serve_model *model)
{
    peri__buffer b = {0};
    print_word(&b, "{\"model_version_status\":[{\"version\":");
    peri__buffer_quote(&b, model->facts.version);
    print_word(&b, ",\"state\":\"AVAILABLE\",\"status\":{\"error_code\":\"OK\",\"error_message\":\"\"}}]}\n");
    return reply_buffer(s, call, 200, "application/json", &b);
}

/** What a path under /v1/models/ or /v2/models/ asks: in @rest, behind the name and the version, if it has one. NULL:
 *  another model. */
static const char *behind_model(const char *path, const peri__serve_facts *facts)
{
    const char *rest = rest_after_prefix(path, facts->name);
    if (!rest || !strchr("/:", *rest)) return NULL; /* strchr finds the end, too */
    const char *versions = rest_after_prefix(rest, "/versions/");
    if (!versions) return rest;
    rest = rest_after_prefix(versions, facts->version);
    return rest && strchr("/:", *rest) ? rest : NULL;
}

static bool reply_wrong_method(peri__server *s, peri__http_call *call, const char *allow)
{
    char why[64];
    snprintf(why, sizeof why, "the method is %.16s, allowed: %s", call->method, allow);
    peri__http_reply r = peri__serve_error(405, why);
    r.allow = allow;
    return send_reply(s, call, &r);
}

static bool is_get_or_head(const peri__http_call *call)
{
    return strcmp(call->method, "GET") == 0 || strcmp(call->method, "HEAD") == 0;
}

/** False: a prediction, which has to wait for its turn. */
static bool model_route(peri__server *s, peri__http_call *call, const peri__serve_model *model, const char *path,
                        bool v2)
{
    const char *rest = model ? behind_model(path, &model->facts) : NULL;
    if (!model) return reply_error(s, call, 503, "there is no model yet");
    if (!rest) {
        char why[512];
        snprintf(why, sizeof why, "no model or version '%.*s'; there is '%.100s', version '%.100s'",
                 (int)peri__min((int64_t)strcspn(path, ":"), 100), path, model->facts.name, model->facts.version);
        return reply_error(s, call, 404, why);
    }
    if (path_is(rest, v2 ? "/infer" : ":predict")) {
        if (strcmp(call->method, "POST") != 0) return reply_wrong_method(s, call, "POST");
        call->form = v2 ? PERI__SERVE_CALL_V2 : PERI__SERVE_CALL_V1;
        return false;
    }
    bool known = !*rest || path_is(rest, v2 ? "/ready" : "/metadata");
    if (!known) return reply_error(s, call, 404, "no such path: docs/serving.md has all");
    if (!is_get_or_head(call)) return reply_wrong_method(s, call, "GET, HEAD");
    if (v2 && *rest) return reply_health(s, call, false);
    return v2 || *rest ? reply_description(s, call, model) : reply_status(s, call, model);
}

static bool plain_route(peri__server *s, peri__http_call *call)
{
    static const char *const paths[] = {
        "/", "/metrics", "/health", "/health/live", "/v2/health/live", "/health/ready", "/v2/health/ready", "/v2"};
    int which = -1;
    for (int i = 0; i < (int)(sizeof paths / sizeof *paths); i++)
        if (strcmp(call->path, paths[i]) == 0) which = i;
    if (which < 0) return reply_error(s, call, 404, "no such path: docs/serving.md has all");
    if (!is_get_or_head(call)) return reply_wrong_method(s, call, "GET, HEAD");
    static char live[] = "{\"live\":true}\n";
    switch (which) {
    case 0:
        return send_reply(s, call,
                          &(peri__http_reply){.status = 200,
                                         .type = "text/html; charset=utf-8",
                                         .body = (char *)peri__serve_page,
                                         .bytes = (int64_t)peri__serve_page_bytes,
                                         .keep = true});
    case 1: return reply_metrics(s, call);
    case 2: return reply_health(s, call, true);
    case 3:
    case 4:
        return send_reply(
            s, call,
            &(peri__http_reply){
                .status = 200, .type = "application/json", .body = live, .bytes = sizeof live - 1, .keep = true});
    case 5:
    case 6: return reply_health(s, call, false);
    default: break;
    }
    peri__buffer b = {0};
    print_word(&b, "{\"name\":\"perilune\",\"version\":");
    peri__buffer_quote(&b, peri_version());
    print_word(&b, ",\"extensions\":[\"binary_tensor_data\"],\"models\":[");
    peri__serve_model *model = peri__server_model(s);
    if (model) peri__buffer_quote(&b, model->facts.name);
    print_word(&b, "]}\n");
    peri__serve_model_release(model);
    return reply_buffer(s, call, 200, "application/json", &b);
}

bool peri__serve_route(void *ctx, peri__http_call *call)
{
    peri__server *s = ctx;
    if (call->refusal) {
        peri__server_fail(s, call, call->refusal == 413 ? PERI__SERVE_TOO_LARGE : PERI__SERVE_MEMORY, call->why);
        return true;
    }
    const char *v1 = rest_after_prefix(call->path, "/v1/models/"), *v2 = rest_after_prefix(call->path, "/v2/models/");
    if (!v1 && !v2) return plain_route(s, call);
    peri__serve_model *model = peri__server_model(s);
    bool answered = model_route(s, call, model, v2 ? v2 : v1, v2 != NULL);
    peri__serve_model_release(model);
    return answered;
}
