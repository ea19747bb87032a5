/* SPDX-License-Identifier: Apache-2.0
 *
 * server.h: the server: requests wait in a queue, workers take several at a time, ask the model about all their samples
 * at once, and answer each.
 *
 *     connections (http.c) --whole request--> queue --> worker: read, predict, write --answer--> connections
 *                          --health, metrics, page: answered at once
 *
 * One thread can do all of this (worker.c), and does where a request comes alone.
 */
#ifndef PERI_SERVE_SERVER_H
#define PERI_SERVE_SERVER_H

#include "http.h"
#include "metrics.h"
#include "request.h"

typedef struct peri__server peri__server;

typedef struct peri__server_options {
    peri__http_options http;
    peri__serve_rules rules;
    int32_t workers;    /* threads that predict at one time */
    int64_t most_queue; /* requests that wait; another one is refused */
    int64_t most_batch; /* a batch with so many samples takes no further request */
    int64_t delay_ns;   /* how long the first request of a batch may wait for others; 0: only those that wait already
                           are taken */
} peri__server_options;

/** Begin to answer. @model: one reference is taken; NULL: it comes later (peri__server_swap), and until then the server
 *  is alive and not ready. @out new, for peri__server_stop. */
peri_status peri__server_open(const peri__server_options *options, peri__serve_model *model, peri__server **out);
int32_t peri__server_port(const peri__server *server);
/** Answer with another state of the model from the next batch on; @model: one reference is taken. Returns once all
 *  batches that had begun with the old one have ended, and it is closed. Any thread but those of the server. On failure
 *  the old one serves on, and the caller keeps the reference. */
peri_status peri__server_swap(peri__server *server, peri__serve_model *model);
/** What /health says about following: a sentence, "" if all is well. Any thread. */
void peri__server_note(peri__server *server, const char *note);
/** Whether there is a model that can answer. Any thread. */
bool peri__server_sound(peri__server *server);
/** The counters, for who follows. */
peri__serve_metrics *peri__server_metrics(peri__server *server);
/** Accept nothing more, finish what has been asked, for at most @grace_ns (what waits then is refused), and free
 *  everything. */
void peri__server_stop(peri__server *server, int64_t grace_ns);

/** A model's reference counts. The last release closes it. */
void peri__serve_model_retain(peri__serve_model *model);
void peri__serve_model_release(peri__serve_model *model);

#endif
