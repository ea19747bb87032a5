/* SPDX-License-Identifier: Apache-2.0
 *
 * http.h: requests and replies over HTTP/1.1, as the rest of the server sees them. http.c, the only file that knows the
 * library beneath (libmicrohttpd), can be replaced behind this.
 *
 * Connections are read and written in peri__http_turn, by any thread of the owner's, but one at a time. A request
 * reaches the owner when it is whole: as a call, which is answered once.
 *
 *     a connection:   idle --first byte--> reading --whole--> working --answered--> writing --sent--> idle
 *     closed after    idle_ns              request_ns from    (the owner's          request_ns
 *                                          the first byte     deadline)
 */
#ifndef PERI_SERVE_HTTP_H
#define PERI_SERVE_HTTP_H

#include "../base/base_internal.h"

typedef struct peri__http peri__http;

/** What is sent back. */
typedef struct peri__http_reply {
    int status;       /* 200, 404, ... */
    const char *type; /* Content-Type, static */
    char *body;       /* of peri__alloc, taken; or static, with @keep */
    int64_t bytes;
    bool keep;          /* do not free the body */
    int64_t json_bytes; /* Inference-Header-Content-Length: bytes of JSON in front of binary tensors; 0: not sent */
    const char *allow;  /* methods, with status 405; NULL: not sent */
    bool retry;         /* Retry-After: 1 */
    char timing[96];    /* Server-Timing; "": not sent */
} peri__http_reply;

/** One request. Valid until it has been answered. */
typedef struct peri__http_call {
    const char *method, *path, *type; /* path: without its query, escapes resolved; type: Content-Type, "" if there was
                                         none */
    char *body;                       /* [bytes + 1], the last one 0 */
    int64_t bytes;
    int64_t json_bytes;           /* Inference-Header-Content-Length; -1: there was none */
    int64_t began_ns, whole_ns;   /* peri_time_ns of the first byte and of the last */
    int64_t deadline_ns;          /* began_ns + request_ns */
    struct peri__http_call *next; /* for the owner's lists, until it is answered */
    int32_t form;                 /* for the owner */
    /* of http.c: */
    void *connection; /* the library's handle */
    struct peri__http_link *link;
    int64_t room; /* bytes that the body may take before it has to grow */
    int refusal;  /* the status with which the request is refused once its body has been read; 0: none */
    const char *why;
    bool answered;
    peri__http_reply reply;
} peri__http_call;

/** What happened to connections, and is no call: counted by the owner. */
enum {
    PERI__HTTP_ACCEPTED,
    PERI__HTTP_CLOSED,
    PERI__HTTP_IDLE,    /* closed: it was idle for too long */
    PERI__HTTP_SLOW,    /* closed: its request was not whole in time */
    PERI__HTTP_STUCK,   /* closed: it did not read its answer */
    PERI__HTTP_EVICTED, /* closed to make room: it had been idle for longest */
    PERI__HTTP_FULL,    /* not accepted: all connections have requests */
    PERI__HTTP_EVENT_COUNT
};

typedef struct peri__http_owner {
    void *ctx;
    /** A whole request, or one that is refused (call->refusal). Answer it with peri__http_answer and return true; or
     *  return false, and then `later` gets it. Must not block. In peri__http_turn. */
    bool (*now)(void *ctx, peri__http_call *call);
    /** Take the request: any thread answers it, once, sooner or later. Must not block. In peri__http_turn. */
    void (*later)(void *ctx, peri__http_call *call);
    /** One of PERI__HTTP_*. Any thread, must not block. */
    void (*event)(void *ctx, int kind);
} peri__http_owner;

typedef struct peri__http_options {
    const char *address;      /* to listen on: a name or number, "127.0.0.1" */
    int32_t port;             /* 0: any that is free */
    const char *const *names; /* [n_names] names by which requests may call this machine (Host), beside localhost and
                                 all numbers */
    int32_t n_names;
    int64_t most_body;   /* bytes of one body */
    int64_t most_bodies; /* bytes of all bodies at one time */
    int32_t most_connections;
    int64_t idle_ns, request_ns;
} peri__http_options;

/** Listen; whoever connects is answered in peri__http_turn. @out new, for peri__http_close. @owner and its ctx are
 *  borrowed until then. */
peri_status peri__http_open(const peri__http_options *options, const peri__http_owner *owner, peri__http **out);
/** Read what connections have, and write what they take. @wait: first wait until there is something, a call has been
 *  answered, or peri__http_wake. Any thread, one at a time. */
void peri__http_turn(peri__http *http, bool wait);
/** Let the thread that is in peri__http_turn, or else the next one, return from there at once. Any thread. */
void peri__http_wake(peri__http *http);
/** The port it listens on. */
int32_t peri__http_port(const peri__http *http);
/** Accept no more connections, and close each after its next answer, or once it has been idle for some tenths of a
 *  second. */
void peri__http_quiesce(peri__http *http);
/** Connections with a call or a half-read request; @idle: those without, too. */
int64_t peri__http_busy(peri__http *http, bool idle);
/** Close all connections and free everything; all calls must have been answered, and no thread be in
 *  peri__http_turn. */
void peri__http_close(peri__http *http);

/** Answer a call; @reply is copied, its body taken. Any thread; the call is gone for the caller. */
void peri__http_answer(peri__http_call *call, const peri__http_reply *reply);
/** Whether the client has closed its connection. Any thread, of a call that is not answered. */
bool peri__http_left(const peri__http_call *call);

#endif
