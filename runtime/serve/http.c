/* SPDX-License-Identifier: Apache-2.0
 *
 * http.c: http.h over libmicrohttpd. What the library does not do is done here:
 *
 * - Its timeout means inactivity, which a client that sends a byte now and then never shows, and suspended
 *   connections have none. So its timeout is off, and a thread (watch_connections) looks at all connections ten times
 *   a second. It ends one by shutdown(2), which the library takes for the client's end. The first byte of a request
 *   on a connection that is kept is seen in the kernel's count of bytes (TCP_INFO). The kernel is asked only about
 *   connections of which an epoll of the thread's own says that something has come: thousands that are idle would
 *   make requests wait for milliseconds.
 * - It answers a request whose framing is ambiguous; such a request is refused here.
 * - It may overlook that a client has closed, if the client had sent something just before. The thread sees it, too.
 * - At its limit of connections it stops to accept. Here the connection that has been idle for longest is closed
 * instead.
 */
#include "http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    SPARE_CONNECTIONS = 64,
    MEMORY_OF_CONNECTION = 32 << 10, /* a request's line and headers; the library zeroes it for each request */
    TICK_MS = 100,
    CLOSE_WAIT = 8 /* of tcpi_state */,
    MUCH = 4,
    LAST_NS = 300000000, /* At the end a connection that has just been used may bring one more request, whose answer
                            says that it is the last. Its client may have sent it already. */
    MOST_HOST = 256 /* bytes of a target's host, with its end */
};

enum { IDLE, READING, WORKING, WRITING };

/** A connection. */
typedef struct peri__http_link {
    struct peri__http_link *next, *prev;
    peri__http *http;
    int fd;
    int state;
    int64_t since_ns;  /* when it got into its state */
    int64_t began_ns;  /* first byte of its request; 0: not seen */
    uint64_t received; /* bytes that the kernel had received when the last request was done */
    bool stirred;      /* bytes or the client's end have come; the kernel has not been asked since which */
    bool ending;       /* it has been shut down */
    bool zero;         /* the path of its request has a zero byte (%00), where a C text would end */
    int64_t prefix;    /* before_path of its request */
} peri__http_link;

struct peri__http {
    struct MHD_Daemon *daemon;
    peri__http_options options;
    peri__http_owner owner;
    char **names; /* copies of options.names */
    int32_t port;
    int arrivals;  /* an epoll, edge-triggered, of all connections: to which something has come since the last look */
    int epoll;     /* the library's: of the sockets */
    int alarm;     /* an eventfd: see peri__http_wake */
    atomic_bool resting; /* a thread waits in peri__http_turn, and wants to be woken when a call has been answered */
    _Atomic(peri__http_call *) answered; /* calls whose connections are suspended still, by call->next */
    int listening; /* the socket that listened, once it no longer does; else -1 */
    pthread_t watcher;
    bool watching;
    pthread_mutex_t lock; /* of the list, the links and the flags below */
    pthread_cond_t wake;  /* stop has been set */
    peri__http_link *links;
    int32_t n_links;
    bool stop, draining;
    atomic_llong bodies; /* bytes that bodies take */
    atomic_llong calls;  /* calls that have not been freed */
};

/* -- what the kernel knows of a socket ----------------------------------------------------------------------------- */

/** How many bytes a socket has received; @left (may be NULL): whether its peer has closed. */
static uint64_t bytes_received(int fd, bool *left)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    memset(&info, 0, sizeof info);
    bool known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0;
    if (left) *left = known && info.tcpi_state == CLOSE_WAIT;
    return info.tcpi_bytes_received;
}

bool peri__http_left(const peri__http_call *call)
{
    struct pollfd p = {.fd = call->link->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

/* -- connections --------------------------------------------------------------------------------------------------- */

static void count_event(peri__http *http, int kind) { http->owner.event(http->owner.ctx, kind); }

/** With the lock: make the library close a connection. @why: an event; -1: none, its client has left. */
static void end_link(peri__http_link *link, int why)
{
    if (link->ending) return;
    link->ending = true;
    shutdown(link->fd, SHUT_RDWR);
    if (why >= 0) count_event(link->http, why);
}

static void enter_state(peri__http_link *link, int state)
{
    const uint64_t bytes = state == IDLE ? bytes_received(link->fd, NULL) : 0;
    pthread_mutex_lock(&link->http->lock);
    link->state = state;
    link->since_ns = peri_time_ns();
    if (state == IDLE) link->began_ns = 0, link->received = bytes;
    pthread_mutex_unlock(&link->http->lock);
}

/** Library: a connection begins or ends. Its socket is open in both cases. */
static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    peri__http *http = cls;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        peri__http_link *link = peri__alloc_zero(sizeof *link);
        *context = link;
        if (!link) return; /* its requests are refused */
        *link = (peri__http_link){.http = http, .fd = info->connect_fd, .state = IDLE, .since_ns = peri_time_ns()};
        pthread_mutex_lock(&http->lock);
        /* EPOLLOUT, which nearly always holds: what has come counts, though the library may have read it by the time
         * that the epoll is asked, and epolls hand on nothing of which nothing holds any more. */
        struct epoll_event arrival = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = link};
        if (epoll_ctl(http->arrivals, EPOLL_CTL_ADD, link->fd, &arrival) != 0) { /* no memory */
            pthread_mutex_unlock(&http->lock);
            peri__free(link);
            *context = NULL;
            return;
        }
        link->next = http->links;
        if (http->links) http->links->prev = link;
        http->links = link;
        http->n_links++;
        pthread_mutex_unlock(&http->lock);
        count_event(http, PERI__HTTP_ACCEPTED);
        return;
    }
    peri__http_link *link = *context;
    if (!link) return;
    pthread_mutex_lock(&http->lock); /* nobody shuts a socket down that has been closed, and may be another one's by
                                        now */
    epoll_ctl(http->arrivals, EPOLL_CTL_DEL, link->fd, NULL);
    if (link->prev) link->prev->next = link->next;
    else http->links = link->next;
    if (link->next) link->next->prev = link->prev;
    http->n_links--;
    pthread_mutex_unlock(&http->lock);
    peri__free(link);
    count_event(http, PERI__HTTP_CLOSED);
}

/** Library: whether to accept. */
static enum MHD_Result on_accept(void *cls, const struct sockaddr *address, socklen_t bytes)
{
    peri__http *http = cls;
    (void)address, (void)bytes;
    enum MHD_Result accept = MHD_YES;
    pthread_mutex_lock(&http->lock);
    if (http->n_links >= http->options.most_connections) {
        peri__http_link *oldest = NULL;
        for (peri__http_link *l = http->links; l; l = l->next)
            if (l->state <= READING && !l->ending && (!oldest || l->since_ns < oldest->since_ns)) oldest = l;
        if (oldest) end_link(oldest, PERI__HTTP_EVICTED);
        if (!oldest || http->n_links >= http->options.most_connections + SPARE_CONNECTIONS / 2) accept = MHD_NO;
    }
    pthread_mutex_unlock(&http->lock);
    if (accept == MHD_NO) count_event(http, PERI__HTTP_FULL);
    return accept;
}

/** With the lock: note when a request began, and end the connection if its client has left or its time is over. */
static void watch_connection(peri__http_link *link, int64_t now)
{
    const peri__http_options *o = &link->http->options;
    if (link->ending || link->state == WORKING) return;
    if (link->state == WRITING) {
        if (now - link->since_ns > o->request_ns) end_link(link, PERI__HTTP_STUCK);
        return;
    }
    if (link->stirred) {
        bool left;
        if (bytes_received(link->fd, &left) != link->received && !link->began_ns) link->began_ns = now;
        if (left && now - link->since_ns > TICK_MS * 1000000L) return end_link(link, -1);
        link->stirred = left; /* looked at again, once the library has had its time to see the end */
    }
    if (link->began_ns) {
        if (now - link->began_ns > o->request_ns) end_link(link, PERI__HTTP_SLOW);
    } else if (now - link->since_ns > (link->http->draining ? peri__min(o->idle_ns, LAST_NS) : o->idle_ns))
        end_link(link, PERI__HTTP_IDLE);
}

/** With the lock, without which a link could go: mark the connections to which something has come. */
static void see_arrivals(peri__http *http)
{
    struct epoll_event arrivals[64];
    const int room = sizeof arrivals / sizeof *arrivals;
    for (int n = room; n == room;) {
        n = epoll_wait(http->arrivals, arrivals, room, 0);
        for (int i = 0; i < n; i++) ((peri__http_link *)arrivals[i].data.ptr)->stirred = true;
    }
}

static void *watch_connections(void *ctx)
{
    peri__http *http = ctx;
    pthread_mutex_lock(&http->lock);
    while (!http->stop) {
        struct timespec t;
        see_arrivals(http);
        int64_t now = peri_time_ns();
        for (peri__http_link *l = http->links; l; l = l->next) watch_connection(l, now);
        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_nsec += TICK_MS * 1000000L;
        if (t.tv_nsec >= 1000000000L) t.tv_sec++, t.tv_nsec -= 1000000000L;
        pthread_cond_timedwait(&http->wake, &http->lock, &t);
    }
    pthread_mutex_unlock(&http->lock);
    return NULL;
}

/* -- what a request may be ----------------------------------------------------------------------------------------- */

/** Headers that decide about framing and origin. */
typedef struct headers {
    int lengths, encodings, hosts, origins;
    const char *length, *encoding, *host, *origin, *type, *json_bytes, *content;
    bool odd; /* a name that is no word, or a value with a control character: others may read another header there */
} headers;

/** Whether it is a header's name: letters, digits and the marks that RFC 9110 allows. */
static bool is_word(const char *name)
{
    static const char marks[] = "!#$%&'*+-.^_`|~";
    for (; *name; name++) {
        const char c = *name;
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!letter && !strchr(marks, c)) return false;
    }
    return true;
}

static bool is_printable(const char *value)
{
    for (; *value; value++)
        if (((unsigned char)*value < ' ' && *value != '\t') || *value == 127) return false;
    return true;
}

/** Whether a name goes on behind @word: some libraries take a header whose value is on the next line so. */
static bool begins_with(const char *name, const char *word)
{
    return strncasecmp(name, word, strlen(word)) == 0 && name[strlen(word)];
}

static enum MHD_Result on_header(void *cls, enum MHD_ValueKind kind, const char *key, const char *value)
{
    headers *h = cls;
    (void)kind;
    if (!value) value = "";
    h->odd = h->odd || !is_word(key) || !is_printable(value) || begins_with(key, "Content-Length") ||
             begins_with(key, "Transfer-Encoding");
    if (strcasecmp(key, "Content-Length") == 0) h->lengths++, h->length = value;
    else if (strcasecmp(key, "Transfer-Encoding") == 0) h->encodings++, h->encoding = value;
    else if (strcasecmp(key, "Host") == 0) h->hosts++, h->host = value;
    else if (strcasecmp(key, "Origin") == 0) h->origins++, h->origin = value;
    else if (strcasecmp(key, "Content-Type") == 0) h->type = value;
    else if (strcasecmp(key, "Content-Encoding") == 0) h->content = value;
    else if (strcasecmp(key, "Inference-Header-Content-Length") == 0) h->json_bytes = value;
    return MHD_YES;
}

/** A whole number in decimal digits and nothing else, below 10^18; -1: it is none. */
static int64_t plain_number(const char *text)
{
    size_t n = strspn(text, "0123456789");
    return n > 0 && n <= 18 && !text[n] ? strtoll(text, NULL, 10) : -1;
}

/** Whether a Host (name, number or [number], with or without a port) is this machine's. A page of a stranger reaches
 *  this server through a name of his own that he lets point here, never through a number. */
static bool own_host(const peri__http *http, const char *host)
{
    char name[256];
    struct in6_addr number;
    size_t n = *host == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
    if (n == 0 || n >= sizeof name || n > strlen(host)) return false;
    if (host[n] && (host[n] != ':' || plain_number(host + n + 1) < 0)) return false;
    memcpy(name, host, n);
    name[n] = 0;
    if (*host == '[') {
        name[n - 1] = 0;
        return inet_pton(AF_INET6, name + 1, &number) == 1;
    }
    if (inet_pton(AF_INET, name, &number) == 1 || strcasecmp(name, "localhost") == 0) return true;
    for (int32_t i = 0; i < http->options.n_names; i++)
        if (strcasecmp(name, http->names[i]) == 0) return true;
    return false;
}

/** Whether a page that sends a request has come from here. */
static bool own_origin(const headers *h)
{
    const char *at = h->origin ? strstr(h->origin, "://") : NULL;
    return h->origins == 0 || (h->origins == 1 && at && h->host && strcasecmp(at + 3, h->host) == 0);
}

/** Why the framing or the origin of a request is refused, with its status; NULL: it is not. */
static const char *objection_to_headers(const peri__http *http, const headers *h, const char *version, int *status)
{
    *status = 415;
    if (h->content && strcasecmp(h->content, "identity") != 0) return "Content-Encoding: bodies are taken as they are";
    *status = 400;
    if (h->odd) return "a header has blanks in its name, control characters in its value, or several lines";
    if (h->lengths > 1) return "Content-Length is there more than once";
    if (h->encodings > 1) return "Transfer-Encoding is there more than once";
    if (h->lengths && h->encodings) return "Content-Length and Transfer-Encoding do not go together";
    if (h->lengths && plain_number(h->length) < 0) return "Content-Length is no whole number";
    if (h->encodings && strcasecmp(h->encoding, "chunked") != 0) return "Transfer-Encoding: allowed is chunked";
    if (h->encodings && strcmp(version, "HTTP/1.1") != 0) return "Transfer-Encoding is for HTTP/1.1";
    if (h->hosts > 1 || (h->hosts == 0 && strcmp(version, "HTTP/1.1") == 0)) return "one Host is wanted";
    if (h->json_bytes && plain_number(h->json_bytes) < 0) return "Inference-Header-Content-Length is no whole number";
    *status = 403;
    if (h->host && !own_host(http, h->host)) return "Host is not a name of this server (perilune serve --host)";
    if (!own_origin(h)) return "Origin is a page of another server";
    return NULL;
}

/* -- replies ------------------------------------------------------------------------------------------------------- */

static void free_body(void *p) { peri__free(p); }

static enum MHD_Result send_reply(struct MHD_Connection *connection, const peri__http_reply *r, bool last)
{
    struct MHD_Response *response =
        r->keep ? MHD_create_response_from_buffer((size_t)r->bytes, r->body, MHD_RESPMEM_PERSISTENT)
                : MHD_create_response_from_buffer_with_free_callback((size_t)r->bytes, r->body, free_body);
    if (!response) {
        if (!r->keep) peri__free(r->body);
        return MHD_NO;
    }
    if (r->type) MHD_add_response_header(response, "Content-Type", r->type);
    if (r->allow) MHD_add_response_header(response, "Allow", r->allow);
    if (r->retry) MHD_add_response_header(response, "Retry-After", "1");
    if (r->timing[0]) MHD_add_response_header(response, "Server-Timing", r->timing);
    if (r->json_bytes > 0) {
        char text[24];
        snprintf(text, sizeof text, "%lld", (long long)r->json_bytes);
        MHD_add_response_header(response, "Inference-Header-Content-Length", text);
    }
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Cache-Control", "no-store");
    if (last) MHD_add_response_header(response, "Connection", "close");
    enum MHD_Result result = MHD_queue_response(connection, (unsigned)r->status, response);
    MHD_destroy_response(response);
    return result;
}

/** A refusal before there is a call; the connection ends with it, since nobody knows where the next request begins. */
static enum MHD_Result refuse_call(struct MHD_Connection *connection, int status, const char *why)
{
    char text[256];
    int n = snprintf(text, sizeof text, "{\"error\":\"%s\"}\n", why);
    char *body = peri__alloc((size_t)n + 1);
    if (!body) return MHD_NO;
    memcpy(body, text, (size_t)n + 1);
    return send_reply(
        connection, &(peri__http_reply){.status = status, .type = "application/json", .body = body, .bytes = n}, true);
}

void peri__http_answer(peri__http_call *call, const peri__http_reply *reply)
{
    bool suspended = call->link->state == WORKING; /* set in peri__http_turn, before the call became others' */
    PERI_ASSERT(!call->answered);
    call->reply = *reply;
    call->answered = true;
    if (!suspended) return;
    peri__http *http = call->link->http;
    call->next = atomic_load(&http->answered);
    while (!atomic_compare_exchange_weak(&http->answered, &call->next, call)) continue;
    if (atomic_exchange(&http->resting, false)) peri__http_wake(http);
}

/* -- requests ------------------------------------------------------------------------------------------------------ */

static peri__http_link *link_of_connection(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

/** Bytes of "http://name:port" before the path of a request's target in absolute form (RFC 9112, 3.2.2); 0: the target
 *  has another form; -1: its host is empty, too long, or has an escape, which may stand for a slash. */
static int64_t bytes_before_path(const char *target)
{
    static const char scheme[] = "http://";
    const size_t n = sizeof scheme - 1;
    if (strncasecmp(target, scheme, n) != 0) return 0;
    const size_t host = strcspn(target + n, "/?#");
    return host == 0 || host >= MOST_HOST || memchr(target + n, '%', host) ? -1 : (int64_t)(n + host);
}

/** Library: the first line of a request has been read. */
static void *on_request_line(void *cls, const char *uri, struct MHD_Connection *connection)
{
    peri__http_link *link = link_of_connection(connection);
    if (!link) return NULL;
    peri__http *http = cls;
    pthread_mutex_lock(&http->lock);
    link->state = READING;
    link->since_ns = peri_time_ns();
    if (!link->began_ns) link->began_ns = link->since_ns;
    pthread_mutex_unlock(&http->lock);
    link->zero = strstr(uri, "%00") != NULL;
    link->prefix = bytes_before_path(uri);
    return NULL;
}

/** The headers are there: a call, or a refusal. */
static enum MHD_Result begin_call(peri__http *http, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, void **context)
{
    headers h = {0};
    int status;
    peri__http_link *link = link_of_connection(connection);
    char host[MOST_HOST];
    MHD_get_connection_values(connection, MHD_HEADER_KIND, on_header, &h);
    if (link && link->prefix > 0) { /* the target says the host, and Host is not looked at (RFC 9112, 3.2.2) */
        snprintf(host, sizeof host, "%.*s", (int)link->prefix - 7, path + 7); /* behind "http://" */
        h.host = host;
        path += link->prefix;
        if (!*path) path = "/";
    }
    const char *why = link ? objection_to_headers(http, &h, version, &status) : "no memory";
    if (link && link->zero) why = "the path has a zero byte (%00)", status = 400;
    if (link && link->prefix < 0) why = "the target's host is empty, too long, or has an escape", status = 400;
    if (why) return refuse_call(connection, link ? status : 503, why);
    int64_t length = h.lengths ? plain_number(h.length) : 0;
    const char *expect = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Expect");
    if (expect && strcasecmp(expect, "100-continue") != 0)
        return refuse_call(connection, 417, "Expect: allowed is 100-continue");
    /* What is not much too large is read first, and refused then: clients see the answer that look for it when they
     * have sent all. */
    if (length > http->options.most_body && (expect || length / MUCH > http->options.most_body))
        return refuse_call(connection, 413, "the body is too large (perilune serve --body)");
    peri__http_call *call = peri__alloc_zero(sizeof *call);
    if (!call) return refuse_call(connection, 503, "no memory");
    atomic_fetch_add(&http->calls, 1);
    *call = (peri__http_call){.method = method,
                              .path = path,
                              .type = h.type ? h.type : "",
                              .connection = connection,
                              .link = link,
                              .json_bytes = h.json_bytes ? plain_number(h.json_bytes) : -1,
                              .began_ns = link->began_ns,
                              .deadline_ns = link->began_ns + http->options.request_ns};
    if (length > http->options.most_body)
        call->refusal = 413, call->why = "the body is too large (perilune serve --body)";
    *context = call;
    return MHD_YES;
}

static void drop_body(peri__http *http, peri__http_call *call)
{
    atomic_fetch_sub(&http->bodies, call->room);
    peri__free(call->body);
    call->body = NULL;
    call->room = call->bytes = 0;
}

/** More of a body. What is refused is read to its end, and thrown away: a client that is still sending would not read
 *  the answer. */
static void append_body(peri__http *http, peri__http_call *call, const char *data, int64_t n)
{
    if (call->refusal) return;
    if (n > http->options.most_body - call->bytes) {
        call->refusal = 413, call->why = "the body is too large (perilune serve --body)";
        drop_body(http, call);
        return;
    }
    if (call->bytes + n + 1 > call->room) {
        int64_t room = peri__max(call->bytes + n + 1, peri__min(2 * call->room, http->options.most_body + 1));
        bool fits = atomic_fetch_add(&http->bodies, room - call->room) + room - call->room <= http->options.most_bodies;
        char *body = fits ? peri__realloc(call->body, (size_t)room) : NULL;
        if (!body) {
            atomic_fetch_sub(&http->bodies, room - call->room);
            call->refusal = 503,
            call->why = "requests take all the memory that there is for them (perilune serve --memory)";
            drop_body(http, call);
            return;
        }
        call->body = body;
        call->room = room;
    }
    memcpy(call->body + call->bytes, data, (size_t)n);
    call->bytes += n;
    call->body[call->bytes] = 0;
}

static enum MHD_Result finish_call(peri__http *http, peri__http_call *call)
{
    bool draining;
    pthread_mutex_lock(&http->lock);
    call->link->state = WRITING;
    call->link->since_ns = peri_time_ns();
    draining = http->draining;
    pthread_mutex_unlock(&http->lock);
    call->answered = false; /* the body is the library's now */
    return send_reply(call->connection, &call->reply, draining);
}

/** Library: headers, then parts of the body, then its end, and once more after it was suspended. */
static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *path, const char *method,
                                  const char *version, const char *data, size_t *bytes, void **context)
{
    peri__http *http = cls;
    peri__http_call *call = *context;
    if (!call) return begin_call(http, connection, path, method, version, context);
    if (*bytes > 0) {
        append_body(http, call, data, (int64_t)*bytes);
        *bytes = 0;
        return MHD_YES;
    }
    if (call->answered) return finish_call(http, call);
    call->whole_ns = peri_time_ns();
    if (!call->body) {
        static char none[1];
        call->body = none;
    }
    if (http->owner.now(http->owner.ctx, call)) return finish_call(http, call);
    MHD_suspend_connection(connection); /* before others know of the call, who may answer it at once */
    enter_state(call->link, WORKING);
    http->owner.later(http->owner.ctx, call);
    return MHD_YES;
}

/** Library: the answer was sent, or the connection broke. */
static void on_completed(void *cls, struct MHD_Connection *connection, void **context,
                         enum MHD_RequestTerminationCode code)
{
    peri__http *http = cls;
    peri__http_call *call = *context;
    (void)connection;
    if (!call) return;
    if (call->room) drop_body(http, call);
    /* the connection broke before its answer's turn */
    if (call->answered && !call->reply.keep) peri__free(call->reply.body);
    if (code == MHD_REQUEST_TERMINATED_COMPLETED_OK) enter_state(call->link, IDLE);
    peri__free(call);
    *context = NULL;
    atomic_fetch_sub(&http->calls, 1);
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */

/** A socket that listens; the port of an earlier server is bound again at once. */
static peri_status listen_on(const peri__http_options *o, int *out, int32_t *port)
{
    char service[16];
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *found = NULL;
    snprintf(service, sizeof service, "%d", o->port);
    /* What the kernel has accepted and the library has not: where that overflows, clients wait for seconds until their
     * kernel tries again. */
    const int backlog = o->most_connections > 1024 ? o->most_connections : 1024;
    int problem = getaddrinfo(o->address, service, &hints, &found), fd = -1, one = 1;
    if (problem) return peri__fail(PERI_EINVAL, "perilune serve: --listen %s: %s", o->address, gai_strerror(problem));
    fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_storage at;
    socklen_t bytes = sizeof at;
    bool good = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
                bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, backlog) == 0 &&
                getsockname(fd, (struct sockaddr *)&at, &bytes) == 0;
    int why = errno;
    freeaddrinfo(found);
    if (!good) {
        if (fd >= 0) close(fd);
        return peri__fail(PERI_EIO, "perilune serve: cannot listen on %s, port %d: %s", o->address, o->port,
                          strerror(why));
    }
    *out = fd;
    *port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                           : ((struct sockaddr_in *)&at)->sin_port);
    return PERI_OK;
}

static void ignore_log(void *cls, const char *format, va_list args) { (void)cls, (void)format, (void)args; }

static void free_http(peri__http *http)
{
    for (int32_t i = 0; http->names && i < http->options.n_names; i++) peri__free(http->names[i]);
    peri__free(http->names);
    if (http->arrivals >= 0) close(http->arrivals);
    if (http->alarm >= 0) close(http->alarm);
    pthread_cond_destroy(&http->wake);
    pthread_mutex_destroy(&http->lock);
    peri__free(http);
}

static peri_status start_daemon(peri__http *http, int fd)
{
    struct MHD_OptionItem items[] = {
        {MHD_OPTION_LISTEN_SOCKET, fd, NULL},
        {MHD_OPTION_CONNECTION_LIMIT, http->options.most_connections + SPARE_CONNECTIONS, NULL},
        {MHD_OPTION_CONNECTION_MEMORY_LIMIT, MEMORY_OF_CONNECTION, NULL},
        {MHD_OPTION_CONNECTION_TIMEOUT, 0, NULL},
        {MHD_OPTION_STRICT_FOR_CLIENT, 1, NULL},
        {MHD_OPTION_NOTIFY_COMPLETED, (intptr_t)on_completed, http},
        {MHD_OPTION_NOTIFY_CONNECTION, (intptr_t)on_connection, http},
        {MHD_OPTION_URI_LOG_CALLBACK, (intptr_t)on_request_line, http},
        {MHD_OPTION_END, 0, NULL},
    };
    unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    http->daemon = MHD_start_daemon(flags, 0, on_accept, http, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, ignore_log,
                                    NULL, MHD_OPTION_ARRAY, items, MHD_OPTION_END);
    if (!http->daemon)
        return peri__fail(PERI_EIO, "perilune serve: the HTTP library does not start: %s", strerror(errno));
    http->epoll = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    int problem = peri__thread_start(&http->watcher, watch_connections, http);
    if (problem) return peri__fail(PERI_EIO, "perilune serve: no thread: %s", strerror(problem));
    http->watching = true;
    return PERI_OK;
}

peri_status peri__http_open(const peri__http_options *options, const peri__http_owner *owner, peri__http **out)
{
    int fd = -1;
    int32_t port = 0;
    PERI_TRY(listen_on(options, &fd, &port));
    peri__http *http = peri__alloc_zero(sizeof *http);
    if (!http) {
        close(fd);
        return PERI_ENOMEM;
    }
    http->options = *options;
    http->owner = *owner;
    http->port = port;
    http->listening = -1;
    http->arrivals = epoll_create1(EPOLL_CLOEXEC);
    http->alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&http->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&http->lock, NULL);
    peri_status status = PERI_OK;
    if (http->arrivals < 0 || http->alarm < 0)
        status = peri__fail(PERI_EIO, "perilune serve: no epoll: %s", strerror(errno));
    http->names = peri__alloc_zero(sizeof *http->names * (size_t)(options->n_names + 1));
    if (status >= 0 && !http->names) status = PERI_ENOMEM;
    for (int32_t i = 0; status >= 0 && i < options->n_names; i++)
        if (!(http->names[i] = peri__strdup(options->names[i]))) status = PERI_ENOMEM;
    if (status >= 0) status = start_daemon(http, fd);
    if (status < 0) {
        if (http->daemon) MHD_stop_daemon(http->daemon); /* closes the socket */
        else close(fd);
        free_http(http);
        return status;
    }
    *out = http;
    return PERI_OK;
}

void peri__http_wake(peri__http *http) { (void)!write(http->alarm, &(uint64_t){1}, sizeof(uint64_t)); }

/** Wait until there is something to do. */
static void wait_for_work(peri__http *http)
{
    struct pollfd p[] = {{.fd = http->alarm, .events = POLLIN}, {.fd = http->epoll, .events = POLLIN}};
    uint64_t count;
    atomic_store(&http->resting, true);
    if (!atomic_load(&http->answered)) poll(p, 2, -1);
    atomic_store(&http->resting, false);
    if (p[0].revents) (void)!read(http->alarm, &count, sizeof count);
}

/** The library may be told only between its turns of what other threads have answered: it does not lock, since this
 *  server polls for it. */
static void resume_answered(peri__http *http)
{
    for (peri__http_call *call = atomic_exchange(&http->answered, NULL), *next; call; call = next) {
        next = call->next;
        MHD_resume_connection(call->connection);
    }
}

void peri__http_turn(peri__http *http, bool wait)
{
    MHD_UNSIGNED_LONG_LONG ms;
    const bool pending = MHD_get_timeout(http->daemon, &ms) == MHD_YES && ms == 0;
    if (wait && !pending) wait_for_work(http);
    resume_answered(http);
    /* It fails where epoll does, for want of memory in the kernel, and then at once, again and again. */
    if (MHD_run(http->daemon) == MHD_NO) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

int32_t peri__http_port(const peri__http *http) { return http->port; }

void peri__http_quiesce(peri__http *http)
{
    if (http->listening >= 0) return;
    http->listening = MHD_quiesce_daemon(http->daemon);
    /* closed later: a thread in peri__http_turn may still hold it */
    if (http->listening >= 0) shutdown(http->listening, SHUT_RDWR);
    /* only now: a client that is told to close may connect again at once, and must not get into the queue of a socket
     * that nobody will accept from */
    pthread_mutex_lock(&http->lock);
    http->draining = true;
    pthread_mutex_unlock(&http->lock);
}

int64_t peri__http_busy(peri__http *http, bool idle)
{
    int64_t busy = 0;
    pthread_mutex_lock(&http->lock);
    for (peri__http_link *l = http->links; l; l = l->next)
        busy += !l->ending && (idle || l->state != IDLE || l->began_ns);
    pthread_mutex_unlock(&http->lock);
    return busy;
}

void peri__http_close(peri__http *http)
{
    pthread_mutex_lock(&http->lock);
    http->stop = true;
    pthread_cond_signal(&http->wake);
    pthread_mutex_unlock(&http->lock);
    if (http->watching) pthread_join(http->watcher, NULL);
    peri__http_quiesce(http);
    resume_answered(http);
    MHD_stop_daemon(http->daemon);
    if (http->listening >= 0) close(http->listening);
    PERI_ASSERT(atomic_load(&http->calls) == 0);
    free_http(http);
}
