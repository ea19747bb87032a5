/* SPDX-License-Identifier: Apache-2.0
 *
 * serve_sockets.h: a server over the function of serve_known.h, which a test can hold back, and clients by sockets.
 */
#ifndef PERI_TESTS_SERVE_SOCKETS_H
#define PERI_TESTS_SERVE_SOCKETS_H

#include "runtime/serve/server.h"
#include "serve_known.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* -- a server ------------------------------------------------------------------------------------------------------ */

typedef struct known {
    peri__serve_model model;
    float more; /* added to the score, to tell states apart */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool closed;            /* predictions wait */
    int32_t inside;         /* how many wait */
    int64_t calls, largest; /* predictions, and the most samples of one */
    atomic_int *closed_models;
} known;

static peri_status context(peri__serve_model *model, int64_t most, void **out)
{
    (void)most;
    return *out = model, PERI_OK;
}
static void drop(peri__serve_model *model, void *ctx) { (void)model, (void)ctx; }

static float score_of(const peri__serve_column *c, int64_t i)
{
    float sum = c[0].numbers[i] + 10 * c[1].numbers[2 * i] + 100 * c[1].numbers[2 * i + 1];
    for (int64_t n = c[2].offsets[i]; n < c[2].offsets[i + 1]; n++) sum += (float)c[2].ids[n];
    for (int64_t n = c[4].offsets[i]; n < c[4].offsets[i + 1]; n++)
        if (c[4].ids[n] >= 0 && c[4].ids[n] < 10) sum += (float)c[4].ids[n] * c[5].numbers[n];
    return sum;
}

static peri_status predict(peri__serve_model *model, void *ctx, int64_t samples, const peri__serve_column *c,
                           float *const *out, int64_t *const *offsets)
{
    known *k = (known *)model;
    (void)ctx, (void)offsets;
    pthread_mutex_lock(&k->lock);
    k->calls++;
    if (samples > k->largest) k->largest = samples;
    k->inside++;
    while (k->closed) pthread_cond_wait(&k->wake, &k->lock);
    k->inside--;
    pthread_mutex_unlock(&k->lock);
    for (int64_t i = 0; i < samples; i++) {
        uint64_t user = 0;
        for (int64_t n = c[3].offsets[i]; n < c[3].offsets[i + 1]; n++) {
            if (c[3].ids[n] == 666) return peri__fail(PERI_ERANGE, "sample %lld: user 666 has no row", (long long)i);
            user += (uint64_t)c[3].ids[n] % 1000;
        }
        out[0][i] = score_of(c, i) + k->more;
        out[1][2 * i] = (float)(c[2].offsets[i + 1] - c[2].offsets[i]);
        out[1][2 * i + 1] = (float)user;
    }
    return PERI_OK;
}

static int32_t refused(peri__serve_model *model, void *ctx, int64_t samples, const peri__serve_column *c)
{
    (void)model, (void)ctx;
    for (int64_t n = 0; n < c[3].offsets[samples]; n++)
        if (c[3].ids[n] == 666) return 3;
    return -1;
}

static void close_known(peri__serve_model *model)
{
    known *k = (known *)model;
    if (k->closed_models) atomic_fetch_add(k->closed_models, 1);
    free(k);
}

static const peri__serve_kind kind = {context, drop, predict, refused, NULL, close_known, NULL};

static known *new_known(float more)
{
    known *k = calloc(1, sizeof *k);
    k->model = (peri__serve_model){.kind = &kind,
                                   .facts = {.name = "known",
                                             .version = "7",
                                             .inputs = inputs,
                                             .outputs = outputs,
                                             .n_inputs = N_INPUTS,
                                             .n_outputs = 2}};
    peri__refs_init(&k->model.refs);
    k->more = more;
    pthread_mutex_init(&k->lock, NULL);
    pthread_cond_init(&k->wake, NULL);
    return k;
}

static void gate(known *k, bool closed)
{
    pthread_mutex_lock(&k->lock);
    k->closed = closed;
    pthread_cond_broadcast(&k->wake);
    pthread_mutex_unlock(&k->lock);
}

static void pause_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static void wait_inside(known *k, int n)
{
    for (int i = 0; i < 5000; i++) {
        pthread_mutex_lock(&k->lock);
        int inside = k->inside;
        pthread_mutex_unlock(&k->lock);
        if (inside >= n) return;
        pause_ms(1);
    }
    fail_msg("no prediction began");
}

/* -- over sockets -------------------------------------------------------------------------------------------------- */

static known *model;
static peri__server *server;
static int32_t port;
static int64_t live;    /* bytes, before the server */
static bool open_still; /* a test that failed has left its server */

static void begin(const peri__server_options *changes)
{
    static const char *const names[] = {"predict.example"};
    peri__server_options o = *changes;
    o.http.address = "127.0.0.1";
    o.http.port = open_still ? 0 : port; /* 0 at first; then the same again, at once */
    live = peri_mem_live();
    open_still = true;
    o.http.names = names, o.http.n_names = 1;
    if (!o.http.most_body) o.http.most_body = 10000;
    if (!o.http.most_bodies) o.http.most_bodies = 1 << 20;
    if (!o.http.most_connections) o.http.most_connections = 100;
    if (!o.http.idle_ns) o.http.idle_ns = 5000000000;
    if (!o.http.request_ns) o.http.request_ns = 5000000000;
    if (!o.workers) o.workers = 2;
    if (!o.most_queue) o.most_queue = 100;
    if (!o.most_batch) o.most_batch = 64;
    o.rules = strict;
    model = new_known(0);
    assert_ok(peri__server_open(&o, &model->model, &server));
    port = peri__server_port(server);
}

static void end(void)
{
    peri__server_stop(server, 2000000000);
    open_still = false;
    assert_int_equal(peri_mem_live(), live);
}

static int dial(void)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval most = {.tv_sec = 20};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0) return close(fd), -1;
    return fd;
}

static void say(int fd, const char *text) { (void)!send(fd, text, strlen(text), MSG_NOSIGNAL); }

/** Read one response (or what comes before the connection's end) into @to. */
static void hear(int fd, char *to, size_t room)
{
    size_t n = 0, want = 0;
    for (*to = 0; n + 1 < room && (!want || n < want);) {
        ssize_t got = recv(fd, to + n, want ? want - n : 1, 0);
        if (got <= 0) return;
        to[n += (size_t)got] = 0;
        char *head_end = want ? NULL : strstr(to, "\r\n\r\n"),
             *length = head_end ? strstr(to, "\r\nContent-Length: ") : NULL;
        if (head_end && !strncmp(to, "HTTP/1.1 100", 12)) n = 0;
        else if (head_end) want = n + (length ? strtoul(length + 18, NULL, 10) : 0);
        if (want == n) return;
    }
}

static char heard[1 << 16];

static const char *ask(const char *request)
{
    int fd = dial();
    assert_true(fd >= 0);
    say(fd, request);
    hear(fd, heard, sizeof heard);
    close(fd);
    return heard;
}

static const char *post_text(char *to, size_t room, const char *path, const char *body)
{
    snprintf(to, room, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n%s", path, strlen(body),
             body);
    return to;
}

static const char *post(const char *path, const char *body)
{
    char text[20000];
    return ask(post_text(text, sizeof text, path, body));
}

static const char *get(const char *path)
{
    char text[1000];
    snprintf(text, sizeof text, "GET %s HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", path);
    return ask(text);
}

static void has(const char *text, const char *part)
{
    if (!strstr(text, part)) fail_msg("\"%.2000s\" lacks \"%s\"", text, part);
}

static void status(const char *text, int code)
{
    char line[32];
    snprintf(line, sizeof line, "HTTP/1.1 %d ", code);
    if (strncmp(text, line, strlen(line)) != 0) fail_msg("\"%.1000s\", wanted: %s", text, line);
}

/** A number of /metrics. */
static double metric(const char *line)
{
    char key[200];
    snprintf(key, sizeof key, "\n%s ", line);
    const char *at = strstr(get("/metrics"), key);
    if (!at) fail_msg("/metrics lacks %s: %s", line, heard);
    return strtod(at + strlen(key), NULL);
}

/** Each connection is closed by the server in the time that is said, or not: milliseconds until it was. */
static int closed_after(int fd, int most)
{
    int64_t from = peri_time_ns();
    char c[256];
    while ((peri_time_ns() - from) / 1000000 < most) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 10) > 0 && recv(fd, c, sizeof c, MSG_DONTWAIT) <= 0) break;
    }
    return (int)((peri_time_ns() - from) / 1000000);
}

static void in_time(int ms, int least, int most)
{
    if (ms < least || ms > most) fail_msg("closed after %d ms, wanted: %d to %d", ms, least, most);
}

#define PREDICT "/v1/models/known:predict"
#define ONE ROW("")

#endif
