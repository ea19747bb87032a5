/* SPDX-License-Identifier: Apache-2.0
 *
 * serve/serve_internal.h: what the files of the server itself share: its state (server.c), its workers (worker.c) and
 * its paths (paths.c).
 */
#ifndef PERI_SERVE_INTERNAL_H
#define PERI_SERVE_INTERNAL_H

#include "server.h"

/** Problems of the features of one name, whatever model had it. */
typedef struct peri__serve_counter {
    struct peri__serve_counter *next;
    char *name; /* NULL: of all names that no model has */
    atomic_ullong counts[PERI__SERVE_PROBLEM_COUNT];
} peri__serve_counter;

struct peri__server {
    peri__server_options options;
    peri__http *http;
    peri__serve_metrics metrics;
    int64_t started_unix_ns;
    pthread_t *threads; /* [options.workers] */
    int32_t n_threads;
    pthread_t clock; /* answers requests whose time is over while they wait */
    bool has_clock;
    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t wake;  /* for workers: a request, another model, the end */
    pthread_cond_t tick;  /* for the clock: the end */
    peri__serve_model *model;
    peri__serve_counter *counters; /* all there are */
    peri__http_call *head, *tail;  /* the queue */
    int64_t n_queue;
    int32_t busy;    /* workers that have requests which they have not answered */
    int32_t n_ready; /* workers that have begun */
    bool stopping;   /* no new requests */
    bool quit;       /* workers end */
    char note[PERI_MESSAGE_MAX];
};

/** Forms of a prediction, in call->form. */
enum { PERI__SERVE_CALL_V1, PERI__SERVE_CALL_V2 };

/** The model that serves, retained; NULL: there is none. */
peri__serve_model *peri__server_model(peri__server *s);
/** Answer a call of a prediction, and count how it ended. */
void peri__server_end(peri__server *s, peri__http_call *call, int end, const peri__http_reply *reply);
/** The same with a sentence; the status follows from @end. */
void peri__server_fail(peri__server *s, peri__http_call *call, int end, const char *why);
/** A reply {"error": why}. */
peri__http_reply peri__serve_error(int status, const char *why);

/** The thread of a worker; @ctx: the server. */
void *peri__serve_worker(void *ctx);
/** With the lock: take the first request of the queue; NULL: it is empty. */
peri__http_call *peri__server_pop(peri__server *s);

/** peri__http_owner.now. */
bool peri__serve_route(void *ctx, peri__http_call *call);

/** The page at /, of page.html. */
extern const char peri__serve_page[];
extern const size_t peri__serve_page_bytes;

int64_t peri__serve_unix_ns(void);

#endif
