/* SPDX-License-Identifier: Apache-2.0
 *
 * test_serve.c: the server over a function that is known, by sockets: answers, and what clients do that mean no good,
 * or no longer wait: slow, endless, torn and ambiguous requests, overload, deadlines, the end.
 *
 * takes: 5 s, mostly waits
 */
#include "tests/harness/check.h"

#include "runtime/serve/server.h"
#include "serve_known.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
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

static void close_known(peri__serve_model *model)
{
    known *k = (known *)model;
    if (k->closed_models) atomic_fetch_add(k->closed_models, 1);
    free(k);
}

static const peri__serve_kind kind = {context, drop, predict, NULL, close_known, NULL};

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

#define PREDICT "/v1/models/known:predict"
#define ONE ROW("")

static void answers(void **state)
{
    (void)state;
    begin(&(peri__server_options){0});
    status(post(PREDICT, ONE), 200);
    has(heard, "\r\n\r\n{\"predictions\":[{\"score\":330,\"echo\":[2,6]}]}\n");
    has(heard, "Server-Timing: queue;dur=");
    status(post(PREDICT, ROW(",\"shown\":[1,3,77],\"shown.weights\":[0.5,2,9]")), 200);
    has(heard, "{\"score\":336.5,");
    status(post("/v1/models/known/versions/7:predict",
                "{\"inputs\":{\"age\":[1,0.1],\"point\":[[0,0],[0,0]],\"clicked\":[[],3],\"user\":[1,1]}}"),
           200);
    has(heard, "{\"outputs\":{\"score\":[1,3.1],\"echo\":[[0,1],[1,1]]}}");
    status(post("/v2/models/known/infer", V2("," T("clicked", "[1,2]", "INT64", "[4,5]"))), 200);
    has(heard, "{\"model_name\":\"known\",\"model_version\":\"7\",\"outputs\":[{\"name\":\"score\",\"shape\":[1],"
               "\"datatype\":\"FP32\","
               "\"data\":[330]},"
               "{\"name\":\"echo\",\"shape\":[1,2],\"datatype\":\"FP32\",\"data\":[2,6]}]}");
    status(post(PREDICT, "{\"instances\":[{\"age\":1}]}"), 400);
    has(heard, "{\"error\":\"sample 0: feature 'point' is missing\"}");
    status(post("/v1/models/other:predict", ONE), 404);
    status(post("/v1/models/known/versions/8:predict", ONE), 404);
    status(post("/v1/models/known:explain", ONE), 404);
    status(get(PREDICT), 405);
    has(heard, "Allow: POST");
    status(post("/metrics", ""), 405);
    status(get("/nothing"), 404);
    status(get("/v1/models/known"), 200);
    has(heard, "\"state\":\"AVAILABLE\"");
    status(get("/v2/models/known"), 200);
    has(heard, "{\"name\":\"clicked\",\"datatype\":\"UINT64\",\"shape\":[-1,-1],\"parameters\":{\"kind\":\"ids\","
               "\"least\":\"0\",\"most\":"
               "\"999\",\"optional\":false");
    has(heard, "\"most\":\"18446744073709551615\"");
    status(get("/v2"), 200);
    status(get("/"), 200);
    status(get("/health/live"), 200);
    status(get("/v2/health/ready"), 200);
    status(get("/health"), 200);
    has(heard, "\"ready\":true,\"model\":\"known\",\"version\":\"7\",\"age_seconds\":");
    assert_true(metric("perilune_requests_total{end=\"ok\"}") == 4);
    assert_true(metric("perilune_requests_total{end=\"bad_request\"}") == 1);
    assert_true(metric("perilune_feature_values_total{feature=\"point\",what=\"missing\"}") == 1);
    assert_true(metric("perilune_feature_values_total{feature=\"clicked\",what=\"empty\"}") == 1);
    assert_true(metric("perilune_request_seconds_count") == 5);
    end();
}

/** Binary outputs, two requests on one connection, and a body that comes in pieces. */
static void keeps_connections(void **state)
{
    char text[4000];
    (void)state;
    begin(&(peri__server_options){0});
    int fd = dial();
    for (int i = 0; i < 3; i++) {
        say(fd, post_text(text, sizeof text, PREDICT, ONE));
        hear(fd, heard, sizeof heard);
        status(heard, 200);
    }
    say(fd, post_text(text, sizeof text, PREDICT, ONE)), say(fd, text); /* two at once */
    for (int i = 0; i < 2; i++) hear(fd, heard, sizeof heard), status(heard, 200);
    say(fd, "POST " PREDICT " HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (const char *c = ONE; *c; c++) {
        snprintf(text, sizeof text, "1\r\n%c\r\n", *c);
        say(fd, text);
    }
    say(fd, "0\r\n\r\n");
    hear(fd, heard, sizeof heard);
    status(heard, 200);
    say(fd, "POST " PREDICT " HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    assert_true(recv(fd, text, 25, MSG_WAITALL) == 25 && !memcmp(text, "HTTP/1.1 100 Continue\r\n\r\n", 25));
    say(fd, "{\"a\"}");
    hear(fd, heard, sizeof heard);
    status(heard, 400);
    close(fd);
    status(post("/v2/models/known/infer",
                "{\"parameters\":{\"binary_data_output\":true}," /* as KServe's clients ask */
                "\"inputs\":[" T("age", "[1]", "FP32", "[1]") "," T("point", "[1,2]", "FP32", "[2,3]") "," T(
                    "user", "[1]", "UINT64", "[6]") "," T("clicked", "[1]", "INT64", "[4]") "]}"),
           200);
    char *json = strstr(heard, "\r\n\r\n") + 4, *length = strstr(heard, "Inference-Header-Content-Length: ");
    assert_non_null(length);
    float numbers[3];
    memcpy(numbers, json + strtol(length + 33, NULL, 10), sizeof numbers);
    assert_true(numbers[0] == 325 && numbers[1] == 1 && numbers[2] == 6);
    end();
}

static void refuses_what_is_ambiguous(void **state)
{
    static const struct {
        const char *headers;
        int status;
    } cases[] = {
        {"Host: localhost\r\nContent-Length: 5\r\nContent-Length: 5\r\n", 400},
        {"Host: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400},
        {"Host: localhost\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400},
        {"Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n", 400},
        {"Host: localhost\r\nTransfer-Encoding: identity\r\n", 400},
        {"Host: localhost\r\nContent-Length : 5\r\n", 400}, /* what is the body to one is a request to another */
        {"Host: localhost\r\nTransfer-Encoding\t: chunked\r\n", 400},
        {"Host: localhost\r\nContent-Length:\r\n 5\r\n", 400},
        {"Host: localhost\r\nTransfer-Encoding: chun\r\n ked\r\n", 400},
        {"Host: localhost\r\nX: a\r\n Content-Length: 5\r\n", 400},
        {"Host: localhost\r\nX: a\rContent-Length: 5\r\n", 400},
        {"Host: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n", 415},
        {"Host: localhost\r\nContent-Length: +5\r\n", 400},
        {"Host: localhost\r\nContent-Length: 5, 5\r\n", 400},
        {"Host: localhost\r\nContent-Length: -1\r\n", 400},
        {"Host: localhost\r\nContent-Length: 99999999999999999999999\r\n", 400},
        {"Content-Length: 5\r\n", 400},
        {"Host: localhost\r\nHost: localhost\r\nContent-Length: 5\r\n", 400},
        {"Host: evil.example\r\nContent-Length: 5\r\n", 403},
        {"Host: localhost.evil.example:80\r\nContent-Length: 5\r\n", 403},
        {"Host: 127.0.0.1.evil.example\r\nContent-Length: 5\r\n", 403},
        {"Host: [::1]x\r\nContent-Length: 5\r\n", 403},
        {"Host: localhost:80\r\nOrigin: http://evil.example\r\nContent-Length: 5\r\n", 403},
        {"Host: localhost\r\nOrigin: null\r\nContent-Length: 5\r\n", 403},
        {"Host: localhost\r\nExpect: 200-ok\r\nContent-Length: 5\r\n", 417},
        {"Host: localhost\r\nExpect: 100-continue\r\nContent-Length: 50000\r\n", 413},
        {"Host: localhost\r\nContent-Length: 999999999999\r\n", 413},
    };
    static const char *const good[] = {"localhost:80",     "LOCALHOST", "127.0.0.1",
                                       "192.168.1.7:8080", "[::1]:80",  "predict.example:99"};
    char text[1000];
    (void)state;
    begin(&(peri__server_options){0});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(text, sizeof text, "POST " PREDICT " HTTP/1.1\r\n%s\r\n{\"a\"}", cases[i].headers);
        if (strncmp(ask(text), "HTTP/1.1 4", 10) != 0 && *heard) fail_msg("%s: %s", cases[i].headers, heard);
        /* some of 400 the library refuses by itself, by closing */
        if (cases[i].status != 400) status(heard, cases[i].status);
        else if (*heard && !strstr(heard, "Connection: close")) fail_msg("%s: goes on", cases[i].headers);
    }
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        snprintf(text, sizeof text, "GET /health/live HTTP/1.1\r\nHost: %s\r\nOrigin: http://%s\r\n\r\n", good[i],
                 good[i]);
        status(ask(text), 200);
    }
    status(ask("GET /health/live%00/or?not HTTP/1.1\r\nHost: localhost\r\n\r\n"), 400);
    assert_int_equal(model->calls, 0);
    end();
}

static void limits_bodies(void **state)
{
    static char body[30000], text[40000];
    (void)state;
    begin(&(peri__server_options){.http.most_bodies = 15000});
    memset(body, ' ', sizeof body - 1);
    memcpy(body, ONE, strlen(ONE));
    body[10000] = 0;
    status(post(PREDICT, body), 200); /* as large as may be */
    body[10000] = ' ';
    status(ask(post_text(text, sizeof text, PREDICT, body)), 413);
    int one = dial(), two = dial(); /* one holds most of the memory that there is for all */
    snprintf(text, sizeof text, "POST " PREDICT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n%.9998s",
             body);
    say(one, text);
    pause_ms(100);
    say(two, text);
    say(two, " ");
    hear(two, heard, sizeof heard);
    status(heard, 503);
    has(heard, "Retry-After: 1");
    say(one, " ");
    hear(one, heard, sizeof heard);
    status(heard, 200);
    status(post(PREDICT, ONE), 200);
    close(one), close(two);
    assert_true(metric("perilune_requests_total{end=\"too_large\"}") == 1);
    assert_true(metric("perilune_requests_total{end=\"no_memory\"}") == 1);
    end();
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

/** One byte each 20 ms, until the server has had enough; milliseconds. */
static int drip(int fd, const char *text, int most)
{
    int64_t from = peri_time_ns();
    for (; *text && (peri_time_ns() - from) / 1000000 < most; text++) {
        char c;
        if (send(fd, text, 1, MSG_NOSIGNAL) != 1 || (recv(fd, &c, 1, MSG_DONTWAIT) == 0)) break;
        pause_ms(20);
    }
    return (int)((peri_time_ns() - from) / 1000000);
}

static void in_time(int ms, int least, int most)
{
    if (ms < least || ms > most) fail_msg("closed after %d ms, wanted: %d to %d", ms, least, most);
}

static void ends_slow_connections(void **state)
{
    static char text[4000];
    (void)state;
    begin(&(peri__server_options){.http = {.idle_ns = 600000000, .request_ns = 300000000}});
    in_time(closed_after(dial(), 3000), 550, 1500); /* says nothing */
    memset(text, 'a', sizeof text - 1);
    memcpy(text, "GET /", 5);
    in_time(drip(dial(), text, 3000), 250, 1000); /* a first line without an end: counted from its first byte */
    memcpy(text, "GET / HTTP/1.1\r\nHost: localhost\r\nX: ", 36);
    in_time(drip(dial(), text, 3000), 250, 1000); /* headers without an end */
    int fd = dial();
    say(fd, "GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n");
    hear(fd, heard, sizeof heard);
    status(heard, 200);
    in_time(drip(fd, text, 3000), 250, 1000); /* the same on a connection that was kept */
    fd = dial();
    say(fd, "POST " PREDICT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n");
    in_time(drip(fd, text + 36, 3000), 200, 1000); /* a body that takes for ever */
    fd = dial();
    say(fd, "POST " PREDICT " HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    int64_t from = peri_time_ns(); /* a body without an end, as fast as it goes */
    snprintf(text, sizeof text, "7d0\r\n%02000d\r\n", 1);
    while (peri_time_ns() - from < 3000000000 && send(fd, text, 2007, MSG_NOSIGNAL) > 0) {
    }
    in_time((int)((peri_time_ns() - from) / 1000000), 200, 1000);
    status(post(PREDICT, ONE), 200);
    assert_true(metric("perilune_connections_closed_total{why=\"slow_request\"}") >= 5);
    assert_true(metric("perilune_connections_closed_total{why=\"idle\"}") >= 1);
    end();
}

/** Answers that nobody reads: more of them than all buffers between have room for. */
static void ends_readers_that_do_not_read(void **state)
{
    static const char request[] = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    int small = 1024;
    (void)state;
    begin(&(peri__server_options){.http.request_ns = 300000000});
    int fd = dial();
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    for (int i = 0; i < 1000; i++) (void)!send(fd, request, sizeof request - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    for (int i = 0; i < 1000 && metric("perilune_connections") > 1; i++) pause_ms(5);
    assert_true(metric("perilune_connections") == 1);
    assert_true(metric("perilune_connections_closed_total{why=\"answer_not_read\"}") == 1);
    close(fd);
    end();
}

static void survives_torn_requests(void **state)
{
    char text[4000];
    (void)state;
    begin(&(peri__server_options){0});
    post_text(text, sizeof text, PREDICT, ONE);
    size_t n = strlen(text);
    for (size_t cut = 1; cut < n; cut += 3) {
        struct linger hard = {.l_onoff = 1};
        int fd = dial();
        (void)!send(fd, text, cut, MSG_NOSIGNAL);
        if (cut % 2) setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard); /* a reset */
        close(fd);
    }
    for (int i = 0; i < 20; i++) { /* whole ones of which nobody hears the answer */
        int fd = dial();
        say(fd, text);
        close(fd);
    }
    status(post(PREDICT, ONE), 200);
    for (int i = 0; i < 2000 && metric("perilune_connections") > 1; i++) pause_ms(1);
    assert_true(metric("perilune_connections") == 1);
    end();
}

static void refuses_when_full(void **state)
{
    int fd[6];
    char text[2000];
    (void)state;
    begin(&(peri__server_options){.workers = 1, .most_queue = 3, .most_batch = 1, .http.request_ns = 600000000});
    gate(model, true);
    post_text(text, sizeof text, PREDICT, ONE);
    say(fd[0] = dial(), text);
    wait_inside(model, 1);
    for (int i = 1; i < 4; i++) say(fd[i] = dial(), text);
    /* /metrics answers while all workers are busy */
    for (int i = 0; i < 1000 && metric("perilune_queue_requests") < 3; i++) pause_ms(1);
    int64_t from = peri_time_ns();
    status(post(PREDICT, ONE), 503);
    assert_true(peri_time_ns() - from < 200000000);
    has(heard, "the queue is full");
    status(get("/health/ready"), 200);
    close(fd[1]); /* this one leaves, and makes room */
    for (int i = 0; i < 1000 && metric("perilune_queue_requests") > 2; i++) pause_ms(1);
    assert_true(metric("perilune_requests_total{end=\"client_left\"}") == 1);
    for (int i = 2; i < 4; i++) { /* these wait until their time is over */
        hear(fd[i], heard, sizeof heard);
        status(heard, 504);
    }
    gate(model, false);
    hear(fd[0], heard, sizeof heard); /* what had begun is answered */
    status(heard, 200);
    assert_int_equal(model->calls, 1); /* nothing was computed for the others */
    assert_true(metric("perilune_requests_total{end=\"queue_full\"}") == 1);
    assert_true(metric("perilune_requests_total{end=\"late\"}") == 2);
    close(fd[0]), close(fd[2]), close(fd[3]);
    end();
}

static void makes_room_for_connections(void **state)
{
    int fd[8];
    (void)state;
    begin(&(peri__server_options){.http.most_connections = 4});
    for (int i = 0; i < 8; i++) fd[i] = dial(), pause_ms(20);
    status(get("/health/live"), 200); /* connections that say nothing keep nobody out */
    assert_true(metric("perilune_connections_closed_total{why=\"room\"}") >= 4);
    assert_true(metric("perilune_connections") <= 5);
    for (int i = 0; i < 8; i++) close(fd[i]);
    end();
}

static int files_open(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    while (folder && readdir(folder)) n++;
    closedir(folder);
    return n;
}

/** 2,000 connections that say nothing, and 400 that ask at once while all workers are busy: what the queue has no room
 *  for is refused at once, the rest is answered, all of them may ask again, and nothing is left. */
static void serves_thousands_of_connections(void **state)
{
    enum { IDLE = 2000, ACTIVE = 400, QUEUE = 100, WORKERS = 2 };
    static int fd[IDLE + ACTIVE];
    struct rlimit most, was;
    char text[2000];
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &was), 0);
    most = (struct rlimit){.rlim_cur = was.rlim_max, .rlim_max = was.rlim_max};
    if (was.rlim_max < 2 * (IDLE + ACTIVE) + 100 || setrlimit(RLIMIT_NOFILE, &most) != 0) skip();
    begin(&(peri__server_options){.workers = WORKERS, .most_queue = QUEUE, .most_batch = 1,
                                  .http.most_connections = 2 * (IDLE + ACTIVE), .http.idle_ns = 60000000000,
                                  .http.request_ns = 60000000000});
    status(get("/health/live"), 200);
    const int files = files_open();
    for (int i = 0; i < IDLE + ACTIVE; i++) assert_true((fd[i] = dial()) >= 0);
    gate(model, true);
    post_text(text, sizeof text, PREDICT, ONE);
    for (int i = IDLE; i < IDLE + WORKERS; i++) say(fd[i], text);
    wait_inside(model, WORKERS);
    const int64_t from = peri_time_ns();
    for (int i = IDLE + WORKERS; i < IDLE + ACTIVE; i++) say(fd[i], text);
    int answered = 0;
    bool refused[ACTIVE] = {0};
    while (answered < ACTIVE - WORKERS - QUEUE) { /* the gate is shut, so all of these are refusals */
        struct pollfd p[ACTIVE];
        for (int i = 0; i < ACTIVE; i++) p[i] = (struct pollfd){.fd = refused[i] ? -1 : fd[IDLE + i], .events = POLLIN};
        assert_true(poll(p, ACTIVE, 10000) > 0);
        for (int i = 0; i < ACTIVE; i++) {
            if (p[i].fd < 0 || !p[i].revents) continue;
            hear(fd[IDLE + i], heard, sizeof heard);
            status(heard, 503);
            refused[i] = true;
            answered++;
        }
    }
    assert_true(peri_time_ns() - from < 5000000000);
    status(get("/health/live"), 200);
    status(get("/health/ready"), 200);
    assert_true(metric("perilune_connections") == IDLE + ACTIVE + 1);
    assert_true(metric("perilune_queue_requests") == QUEUE);
    gate(model, false);
    for (int i = 0; i < ACTIVE; i++) {
        if (!refused[i]) hear(fd[IDLE + i], heard, sizeof heard), status(heard, 200);
        say(fd[IDLE + i], text);
        hear(fd[IDLE + i], heard, sizeof heard);
        status(heard, 200);
    }
    assert_true(metric("perilune_requests_total{end=\"ok\"}") == QUEUE + WORKERS + ACTIVE);
    for (int i = 0; i < IDLE + ACTIVE; i++) close(fd[i]);
    for (int i = 0; i < 5000 && metric("perilune_connections") > 1; i++) pause_ms(1);
    assert_true(files_open() <= files + 1);
    end();
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &was), 0);
}

/** Requests of several clients, each with a number of its own, some of them bad: everyone gets his own answer. */
typedef struct client {
    int number, good, bad;
} client;

static void *run_client(void *ctx)
{
    client *c = ctx;
    char body[300], text[600], want[64], *answer = malloc(4096);
    int fd = dial();
    for (int i = 0; i < 100; i++) {
        int age = c->number * 1000 + i;
        bool bad = i % 5 == 4, own = i % 10 == 4; /* refused by the model itself */
        snprintf(body, sizeof body, "{\"instances\":[{\"age\":%d,\"point\":[0,0],\"clicked\":[%d],\"user\":[%s]}]}",
                 age, bad && !own ? 5000 : i % 7, own ? "666" : "");
        say(fd, post_text(text, sizeof text, PREDICT, body));
        hear(fd, answer, 4096);
        snprintf(want, sizeof want, "{\"score\":%d,\"echo\":[1,0]}", age + i % 7);
        if (bad)
            c->bad += !strncmp(answer, "HTTP/1.1 400", 12) &&
                      strstr(answer, own ? "sample 0: user 666" : "id 5000, allowed: 0 to 999");
        else c->good += !strncmp(answer, "HTTP/1.1 200", 12) && strstr(answer, want);
    }
    close(fd);
    free(answer);
    return NULL;
}

static void batches(void **state)
{
    enum { N = 12 };
    pthread_t threads[N];
    client clients[N] = {{0}};
    (void)state;
    begin(&(peri__server_options){.workers = 2, .delay_ns = 2000000, .most_batch = 8});
    for (int i = 0; i < N; i++) clients[i].number = i, pthread_create(&threads[i], NULL, run_client, &clients[i]);
    for (int i = 0; i < N; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < N; i++) {
        assert_int_equal(clients[i].good, 80);
        assert_int_equal(clients[i].bad, 20);
    }
    assert_true(model->largest > 1 && model->largest <= 8);
    end();
}

/** Asks until it is told to stop: each answer is of one state that there was, whole, and none is older than the one
 *  before. */
typedef struct follower {
    atomic_bool *stop;
    int answers, wrong;
} follower;

static void *run_follower(void *ctx)
{
    follower *c = ctx;
    char text[600], *answer = malloc(4096);
    int fd = dial(), last = 0;
    post_text(text, sizeof text, PREDICT,
              "{\"instances\":[{\"age\":1,\"point\":[0,0],\"clicked\":1,\"user\":1},{\"age\":2,\"point\":[0,0],"
              "\"clicked\":1,\"user\":1}]}");
    for (; !atomic_load(c->stop); c->answers++) {
        int first = -1, second = -1;
        say(fd, text);
        hear(fd, answer, 4096);
        const char *at = strstr(answer, "{\"predictions\":[");
        if (at) sscanf(at, "{\"predictions\":[{\"score\":%d,\"echo\":[1,1]},{\"score\":%d,", &first, &second);
        c->wrong += first % 1000 != 2 || second != first + 1 || first / 1000 < last;
        last = first / 1000;
    }
    close(fd);
    free(answer);
    return NULL;
}

/** Another state, 100 times, under load. */
static void swaps(void **state)
{
    enum { N = 4, STATES = 100 };
    atomic_int closed = 0;
    atomic_bool stop = false;
    pthread_t threads[N];
    follower followers[N] = {{0}};
    (void)state;
    begin(&(peri__server_options){.workers = 2});
    model->closed_models = &closed;
    known *late = new_known(5000); /* for which there is no memory: the old one serves on */
    assert_ok(peri_fault_arm("alloc", 1));
    assert_int_equal(peri__server_swap(server, &late->model), PERI_ENOMEM);
    assert_ok(peri_fault_arm("alloc", 0));
    peri__serve_model_release(&late->model);
    has(post(PREDICT, ONE), "{\"score\":330,");
    for (int i = 0; i < N; i++)
        followers[i].stop = &stop, pthread_create(&threads[i], NULL, run_follower, &followers[i]);
    for (int i = 1; i <= STATES; i++) {
        known *next = new_known((float)i * 1000);
        next->closed_models = &closed;
        assert_ok(peri__server_swap(server, &next->model));
        char want[64];
        snprintf(want, sizeof want, "{\"score\":%d,", 330 + i * 1000);
        has(post(PREDICT, ONE), want); /* the next answer knows it */
    }
    atomic_store(&stop, true);
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(followers[i].wrong, 0);
        assert_true(followers[i].answers > 0);
    }
    for (int i = 0; i < 2000 && atomic_load(&closed) < STATES; i++) pause_ms(1);
    assert_int_equal(atomic_load(&closed), STATES); /* those that served before are gone */
    assert_true(metric("perilune_reloads_total") == STATES);
    end();
    assert_int_equal(atomic_load(&closed), STATES + 1);
}

static int64_t stop_ns; /* grace */

static void *stop_server(void *ctx)
{
    (void)ctx;
    peri__server_stop(server, stop_ns);
    return NULL;
}

static void stops_after_what_runs(void **state)
{
    pthread_t stopper;
    char text[2000];
    (void)state;
    begin(&(peri__server_options){.workers = 1, .most_batch = 1});
    gate(model, true);
    int idle = dial(), running = dial(), waiting = dial();
    post_text(text, sizeof text, PREDICT, ONE);
    say(running, text);
    wait_inside(model, 1);
    say(waiting, text);
    for (int i = 0; i < 1000 && metric("perilune_queue_requests") < 1; i++) pause_ms(1);
    stop_ns = 5000000000;
    pthread_create(&stopper, NULL, stop_server, NULL);
    in_time(closed_after(idle, 3000), 0, 1000);
    for (int i = 0, fd; i < 1000 && (fd = dial()) >= 0; i++) close(fd), pause_ms(1);
    assert_int_equal(dial(), -1); /* nobody listens any more */
    gate(model, false);
    hear(running, heard, sizeof heard);
    status(heard, 200);
    has(heard, "Connection: close");
    hear(waiting, heard, sizeof heard);
    status(heard, 200);
    pthread_join(stopper, NULL);
    open_still = false;
    assert_int_equal(peri_mem_live(), live);
    close(idle), close(running), close(waiting);
}

static void refuses_what_waits_at_the_end(void **state)
{
    pthread_t stopper;
    char text[2000];
    (void)state;
    begin(&(peri__server_options){.workers = 1, .most_batch = 1});
    gate(model, true);
    int running = dial(), waiting = dial();
    post_text(text, sizeof text, PREDICT, ONE);
    say(running, text);
    wait_inside(model, 1);
    say(waiting, text);
    for (int i = 0; i < 1000 && metric("perilune_queue_requests") < 1; i++) pause_ms(1);
    stop_ns = 300000000;
    pthread_create(&stopper, NULL, stop_server, NULL);
    hear(waiting, heard, sizeof heard);
    status(heard, 503);
    has(heard, "stopping");
    gate(model, false);
    hear(running, heard, sizeof heard);
    status(heard, 200);
    pthread_join(stopper, NULL);
    open_still = false;
    close(running), close(waiting);
}

static void is_alive_without_a_model(void **state)
{
    (void)state;
    peri__server_options o = {.http = {.address = "localhost",
                                       .most_body = 1000,
                                       .most_bodies = 1000,
                                       .most_connections = 10,
                                       .idle_ns = 5000000000,
                                       .request_ns = 5000000000},
                              .workers = 1,
                              .most_queue = 1,
                              .most_batch = 1};
    assert_ok(peri__server_open(&o, NULL, &server));
    int32_t before = port;
    port = peri__server_port(server);
    status(get("/health/live"), 200);
    status(get("/health/ready"), 503);
    status(post(PREDICT, ONE), 503);
    peri__server_note(server, "waiting for \"a\"");
    has(get("/health"), "\"note\":\"waiting for \\\"a\\\"\"");
    o.http.address = "127.0.0.1", o.http.port = port;
    peri__server *second;
    assert_fails(peri__server_open(&o, NULL, &second), PERI_EIO, "cannot listen");
    o.http.address = "nowhere.invalid";
    assert_fails(peri__server_open(&o, NULL, &second), PERI_EINVAL, "--listen nowhere.invalid");
    model = new_known(0);
    assert_ok(peri__server_swap(server, &model->model));
    status(get("/health/ready"), 200);
    peri__server_stop(server, 1000000000);
    port = before;
}

int main(void)
{
    const struct CMUnitTest tests[] = {

        cmocka_unit_test(answers),
        cmocka_unit_test(keeps_connections),
        cmocka_unit_test(refuses_what_is_ambiguous),
        cmocka_unit_test(limits_bodies),
        cmocka_unit_test(ends_slow_connections),
        cmocka_unit_test(ends_readers_that_do_not_read),
        cmocka_unit_test(survives_torn_requests),
        cmocka_unit_test(refuses_when_full),
        cmocka_unit_test(makes_room_for_connections),
    cmocka_unit_test(serves_thousands_of_connections),
        cmocka_unit_test(batches),
        cmocka_unit_test(swaps),
        cmocka_unit_test(stops_after_what_runs),
        cmocka_unit_test(refuses_what_waits_at_the_end),
        cmocka_unit_test(is_alive_without_a_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
