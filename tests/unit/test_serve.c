/* SPDX-License-Identifier: Apache-2.0
 *
 * test_serve.c: the server over a function that is known, by sockets: answers, and what clients do that mean no good:
 * slow, endless, torn and ambiguous requests.
 *
 * takes: 3 s, mostly waits
 */
#include "tests/harness/check.h"

#include "serve_sockets.h"

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

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(answers),
    cmocka_unit_test(keeps_connections),
    cmocka_unit_test(refuses_what_is_ambiguous),
    cmocka_unit_test(limits_bodies),
    cmocka_unit_test(ends_slow_connections),
    cmocka_unit_test(ends_readers_that_do_not_read),
    cmocka_unit_test(survives_torn_requests),
};

check_main(tests)
