/* SPDX-License-Identifier: Apache-2.0
 *
 * metrics.h: what the server counts, and its text for Prometheus. Counters are atomic; any thread adds to them.
 */
#ifndef PERI_SERVE_METRICS_H
#define PERI_SERVE_METRICS_H

#include "../base/buffer.h"
#include "http.h"
#include "request.h"

/** A histogram whose k-th bucket ends at first * 2^k; the last one has no end. */
enum { PERI__SERVE_BUCKETS = 24 };
typedef struct peri__serve_histogram {
    atomic_ullong counts[PERI__SERVE_BUCKETS];
    atomic_ullong sum; /* in the unit of what is added */
} peri__serve_histogram;

/** How a request for a prediction ended. */
enum {
    PERI__SERVE_OK,
    PERI__SERVE_BAD,        /* 400 */
    PERI__SERVE_TOO_LARGE,  /* 413 */
    PERI__SERVE_QUEUE_FULL, /* 503 */
    PERI__SERVE_MEMORY,     /* 503: bodies */
    PERI__SERVE_STOPPING,   /* 503 */
    PERI__SERVE_LATE,       /* 504: its time was over before it was begun */
    PERI__SERVE_LEFT,       /* its client had gone, nothing was computed */
    PERI__SERVE_FAILED,     /* 500 */
    PERI__SERVE_END_COUNT
};

typedef struct peri__serve_metrics {
    atomic_ullong ends[PERI__SERVE_END_COUNT];
    atomic_ullong http[PERI__HTTP_EVENT_COUNT];
    atomic_ullong other; /* requests that ask for no prediction */
    peri__serve_histogram request_ns, queue_ns, compute_ns, batch_samples;
    atomic_ullong samples;
    atomic_ullong skipped; /* ids that maps have no row for */
    atomic_ullong reloads, reload_failures;
} peri__serve_metrics;

void peri__serve_observe(peri__serve_histogram *h, uint64_t first, uint64_t value);

/** Bounds of the first buckets: 8 us, one sample. */
enum { PERI__SERVE_FIRST_NS = 8000, PERI__SERVE_FIRST_SAMPLES = 1 };

void peri__serve_metrics_print(peri__serve_metrics *m, peri__buffer *b);
/** One line of a metric with labels that are quoted here: name{label="value"} number. */
void peri__serve_gauge(peri__buffer *b, const char *name, const char *kind, const char *help, double value);
/** Append @text as the value of a label, with its quotes. */
void peri__serve_label(peri__buffer *b, const char *text);

#endif
