/* SPDX-License-Identifier: Apache-2.0
 *
 * metrics.c: see metrics.h. The text form: https://prometheus.io/docs/instrumenting/exposition_formats
 */
#include "metrics.h"

#include <inttypes.h>

static void print_word(peri__buffer *b, const char *text) { peri__buffer_append(b, text, (int64_t)strlen(text)); }

static uint64_t load_counter(atomic_ullong *x) { return atomic_load_explicit(x, memory_order_relaxed); }

void peri__serve_observe(peri__serve_histogram *h, uint64_t first, uint64_t value)
{
    int k = 0;
    while (k < PERI__SERVE_BUCKETS - 1 && value > first << k) k++;
    atomic_fetch_add_explicit(&h->counts[k], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, value, memory_order_relaxed);
}

void peri__serve_label(peri__buffer *b, const char *text)
{
    print_word(b, "\"");
    for (const char *c = text; *c; c++) {
        if (*c == '\\') print_word(b, "\\\\");
        else if (*c == '"') print_word(b, "\\\"");
        else if (*c == '\n') print_word(b, "\\n");
        else peri__buffer_append(b, c, 1);
    }
    print_word(b, "\"");
}

static void print_metric_head(peri__buffer *b, const char *name, const char *kind, const char *help)
{
    peri__buffer_print(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

void peri__serve_gauge(peri__buffer *b, const char *name, const char *kind, const char *help, double value)
{
    print_metric_head(b, name, kind, help);
    peri__buffer_print(b, "%s %.15g\n", name, value);
}

/** @scale: what is added, in the metric's unit. */
static void print_histogram(peri__buffer *b, peri__serve_histogram *h, const char *name, const char *help,
                            uint64_t first,
                      double scale)
{
    uint64_t total = 0;
    print_metric_head(b, name, "histogram", help);
    for (int k = 0; k < PERI__SERVE_BUCKETS; k++) {
        total += load_counter(&h->counts[k]);
        if (k < PERI__SERVE_BUCKETS - 1)
            peri__buffer_print(b, "%s_bucket{le=\"%.9g\"} %" PRIu64 "\n", name, (double)(first << k) * scale, total);
        else peri__buffer_print(b, "%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", name, total);
    }
    peri__buffer_print(b, "%s_sum %.15g\n%s_count %" PRIu64 "\n", name, (double)load_counter(&h->sum) * scale, name,
                       total);
}

void peri__serve_metrics_print(peri__serve_metrics *m, peri__buffer *b)
{
    static const char *const ends[PERI__SERVE_END_COUNT] = {
        "ok", "bad_request", "too_large", "queue_full", "no_memory", "stopping", "late", "client_left", "failed"};
    static const char *const closed[PERI__HTTP_EVENT_COUNT] = {[PERI__HTTP_IDLE] = "idle",
                                                               [PERI__HTTP_SLOW] = "slow_request",
                                                               [PERI__HTTP_STUCK] = "answer_not_read",
                                                               [PERI__HTTP_EVICTED] = "room",
                                                               [PERI__HTTP_FULL] = "refused"};
    print_metric_head(b, "perilune_requests_total", "counter", "Requests for predictions, by how they ended.");
    for (int k = 0; k < PERI__SERVE_END_COUNT; k++)
        peri__buffer_print(b, "perilune_requests_total{end=\"%s\"} %" PRIu64 "\n", ends[k], load_counter(&m->ends[k]));
    peri__serve_gauge(b, "perilune_other_requests_total", "counter",
                      "Requests for health, metrics, descriptions, or what is not there.",
                          (double)load_counter(&m->other));
    print_metric_head(b, "perilune_connections_closed_total", "counter",
                      "Connections that the server closed or refused, by the reason.");
    for (int k = 0; k < PERI__HTTP_EVENT_COUNT; k++)
        if (closed[k])
            peri__buffer_print(b, "perilune_connections_closed_total{why=\"%s\"} %" PRIu64 "\n", closed[k],
                               load_counter(&m->http[k]));
    uint64_t gone = load_counter(&m->http[PERI__HTTP_CLOSED]), come = load_counter(&m->http[PERI__HTTP_ACCEPTED]);
    peri__serve_gauge(b, "perilune_connections", "gauge", "Connections that are open.", (double)(come - gone));
    peri__serve_gauge(b, "perilune_connections_total", "counter", "Connections that were accepted.", (double)come);
    print_histogram(b, &m->request_ns, "perilune_request_seconds", "From the first byte of a request to its answer.",
                    PERI__SERVE_FIRST_NS, 1e-9);
    print_histogram(b, &m->queue_ns, "perilune_queue_seconds", "From the last byte of a request to its turn.",
                    PERI__SERVE_FIRST_NS, 1e-9);
    print_histogram(b, &m->compute_ns, "perilune_compute_seconds", "What the model took for a batch.",
                    PERI__SERVE_FIRST_NS,
              1e-9);
    print_histogram(b, &m->batch_samples, "perilune_batch_samples", "Samples of a batch.", PERI__SERVE_FIRST_SAMPLES,
                    1);
    peri__serve_gauge(b, "perilune_samples_total", "counter", "Samples that were predicted.",
                      (double)load_counter(&m->samples));
    peri__serve_gauge(b, "perilune_skipped_ids_total", "counter",
                      "Raw ids that the model has no row for, and that count as zeros.",
                          (double)load_counter(&m->skipped));
    peri__serve_gauge(b, "perilune_reloads_total", "counter", "States of the model that were taken after the first.",
                      (double)load_counter(&m->reloads));
    peri__serve_gauge(b, "perilune_reload_failures_total", "counter", "States that could not be taken.",
                      (double)load_counter(&m->reload_failures));
}
