/* SPDX-License-Identifier: Apache-2.0
 *
 * serve/serve_internal.h: what the files of the server itself share: its state (server.c, calls.c), its workers
 * (worker.c) and its paths (paths.c).
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

/** What it takes to predict: room for a batch, and the model's context. A thread has it while it predicts. */
typedef struct peri__serve_worker peri__serve_worker;

struct peri__server {
    peri__server_options options;
    peri__http *http;
    peri__serve_metrics metrics;
    int64_t started_unix_ns;
    pthread_t *threads; /* [options.workers + 1] */
    int32_t n_threads;
    peri__serve_worker *workers; /* [options.workers] */
    pthread_t clock;             /* see run_clock */
    bool has_clock;
    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t wake;  /* for threads that have nothing to do: there may be something */
    pthread_cond_t more;  /* for threads that fill a batch: a request */
    pthread_cond_t tick;  /* for the clock: the end */
    int32_t filling;      /* threads that wait for `more` */
    bool turning;         /* a thread is in peri__http_turn */
    uint64_t turns;       /* how often one has been */
    peri__serve_worker *free_worker; /* those that no thread has; the one that was used last comes first */
    double ns_per_byte;              /* what a batch took, by the bytes of its requests: the last one */
    peri__serve_model *model;
    peri__serve_counter *counters; /* all there are */
    peri__http_call *head, *tail;  /* the queue */
    int64_t n_queue;
    int32_t busy;    /* workers that have requests which they have not answered */
    bool stopping;   /* no new requests */
    bool quit;       /* threads end */
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

/** Make the server's workers, all free and without a model; peri__serve_drop_workers frees what there is of them. */
peri_status peri__serve_make_workers(peri__server *s);
void peri__serve_drop_workers(peri__server *s);
/** Let all free workers go over to the model that serves now. */
void peri__serve_renew(peri__server *s);
/** A thread of the server; @ctx: the server. */
void *peri__serve_thread(void *ctx);
/** With the lock: take the first request of the queue; NULL: it is empty. */
peri__http_call *peri__server_pop(peri__server *s);

/** peri__http_owner.now. */
bool peri__serve_route(void *ctx, peri__http_call *call);

/** The page at /, of page.html. */
extern const char peri__serve_page[];
extern const size_t peri__serve_page_bytes;

int64_t peri__serve_unix_ns(void);

#endif
