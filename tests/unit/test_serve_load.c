/* SPDX-License-Identifier: Apache-2.0
 *
 * test_serve_load.c: the server over a function that is known, by sockets: overload, thousands of connections, batches
 * of requests of many clients, another model in the middle of them, the end.
 *
 * takes: 4 s, mostly waits
 */
#include "tests/harness/check.h"

#include "serve_sockets.h"

#include <dirent.h>
#include <sys/resource.h>

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

/** The thread that reads a request predicts it, too, when it expects to be quick. If it is not, another thread takes
 *  over the connections: health is answered, and a second worker predicts. */
static void reads_on_when_a_batch_takes_longer_than_expected(void **state)
{
    char text[2000];
    (void)state;
    begin(&(peri__server_options){.workers = 2, .most_batch = 1});
    post_text(text, sizeof text, PREDICT, ONE);
    int fd = dial();
    for (int i = 0; i < 20; i++) {
        say(fd, text);
        hear(fd, heard, sizeof heard);
        status(heard, 200);
    }
    gate(model, true);
    say(fd, text);
    wait_inside(model, 1);
    const int64_t from = peri_time_ns();
    status(get("/health/live"), 200);
    int second = dial();
    say(second, text);
    wait_inside(model, 2);
    assert_true(peri_time_ns() - from < 500000000);
    gate(model, false);
    hear(fd, heard, sizeof heard);
    status(heard, 200);
    hear(second, heard, sizeof heard);
    status(heard, 200);
    close(fd), close(second);
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
    /* each refusal once, whether the server or the model refused, alone or in a batch */
    static const char of_server[] = "perilune_feature_values_total{feature=\"clicked\",what=\"range\"}";
    for (int i = 0; i < 1000 && metric(of_server) < 10 * N; i++) pause_ms(1); /* counted when its batch ends */
    assert_true(metric(of_server) == 10 * N);
    assert_true(metric("perilune_feature_values_total{feature=\"user\",what=\"range\"}") == 10 * N);
    end();
}

/** Asks until it is told to stop: each answer is of one state that there was, whole, and none is older than the one
 *  before. */
typedef struct follower {
    atomic_bool *stop;
    atomic_int answers;
    int wrong;
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
        assert_int_equal(atomic_load(&closed), i); /* by this thread: no request waits for it */
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
    assert_true(metric("perilune_reloads_total") == STATES);
    end();
    assert_int_equal(atomic_load(&closed), STATES + 1);
}

/** A batch that waits for more requests (--delay) waits no longer when there is another state: it may take no request
 *  that comes after that, since its client may have had an answer of the new one. */
static void a_new_state_waits_for_no_batch_to_fill(void **state)
{
    char text[2000];
    (void)state;
    begin(&(peri__server_options){.workers = 2, .delay_ns = 800000000});
    post_text(text, sizeof text, PREDICT, ONE);
    int first = dial(), second = dial();
    say(first, text);
    for (int i = 0; i < 1000 && metric("perilune_workers_busy") < 1; i++) pause_ms(1);
    known *next = new_known(1000);
    const int64_t from = peri_time_ns();
    assert_ok(peri__server_swap(server, &next->model)); /* returns when that batch has been answered */
    assert_true(peri_time_ns() - from < 400000000);
    hear(first, heard, sizeof heard);
    has(heard, "{\"score\":330,");
    say(second, text);
    hear(second, heard, sizeof heard);
    has(heard, "{\"score\":1330,");
    close(first), close(second);
    end();
}

/** Nothing is computed for a client that leaves, nor for a request whose time is over, while its batch waits for more
 *  requests (--delay). */
static void drops_from_a_batch_who_does_not_wait(void **state)
{
    char text[2000];
    int fd[3];
    (void)state;
    begin(&(peri__server_options){.workers = 1, .delay_ns = 300000000});
    post_text(text, sizeof text, PREDICT, ONE);
    for (int i = 0; i < 3; i++) say(fd[i] = dial(), text);
    for (int i = 0; i < 1000 && metric("perilune_queue_seconds_count") < 3; i++) pause_ms(1);
    close(fd[0]), close(fd[2]);
    hear(fd[1], heard, sizeof heard);
    has(heard, "{\"score\":330,");
    assert_int_equal(model->calls, 1);
    assert_int_equal(model->largest, 1);
    assert_true(metric("perilune_requests_total{end=\"client_left\"}") == 2);
    close(fd[1]);
    end();
    begin(&(peri__server_options){.workers = 1, .delay_ns = 2000000000, .http.request_ns = 100000000});
    const int64_t from = peri_time_ns();
    status(post(PREDICT, ONE), 504);
    assert_true(peri_time_ns() - from < 1000000000);
    assert_int_equal(model->calls, 0);
    end();
}

static void *run_in_turns(void *ctx)
{
    enum { TURNS = 500 };
    follower *c = ctx;
    char text[600], *answer = malloc(4096);
    int fd = dial();
    for (; c->answers < TURNS; c->answers++) {
        const bool bad = c->answers % 3 == 2;
        say(fd, post_text(text, sizeof text, PREDICT, bad ? "{" : ONE));
        hear(fd, answer, 4096);
        c->wrong += strncmp(answer, bad ? "HTTP/1.1 400" : "HTTP/1.1 200", 12) != 0;
    }
    close(fd);
    free(answer);
    return NULL;
}

/** As many clients as workers and queue have room for, each of whom asks again when he has been answered, are never
 *  refused. */
static void refuses_no_client_that_has_room(void **state)
{
    enum { WORKERS = 2, QUEUE = 1, N = WORKERS + QUEUE };
    pthread_t threads[N];
    follower clients[N] = {{0}};
    (void)state;
    for (int batch = 1; batch <= 2; batch++) {
        begin(&(peri__server_options){.workers = WORKERS, .most_queue = QUEUE, .most_batch = batch});
        for (int i = 0; i < N; i++) pthread_create(&threads[i], NULL, run_in_turns, &clients[i]);
        for (int i = 0; i < N; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(clients[i].wrong, 0);
            clients[i] = (follower){0};
        }
        end();
    }
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

/** Asks again and again on a connection that it keeps, until an answer says that it is the last. */
static void *run_keeper(void *ctx)
{
    follower *c = ctx;
    char text[600], *answer = malloc(4096);
    post_text(text, sizeof text, PREDICT, ONE);
    for (int fd = -1; fd >= 0 || (fd = dial()) >= 0;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 0)) { /* closed, since this thread was slow */
            close(fd), fd = -1;
            continue;
        }
        say(fd, text);
        hear(fd, answer, 4096);
        const bool good = !strncmp(answer, "HTTP/1.1 200", 12);
        c->answers += good;
        c->wrong += !good;
        if (!good || strstr(answer, "Connection: close")) close(fd), fd = -1;
        pause_ms(c->answers % 3);
    }
    free(answer);
    return NULL;
}

/** No request is lost that a client sends while the server stops, as long as its connection is open. */
static void loses_nothing_at_the_end(void **state)
{
    enum { N = 6, STOPS = 5 };
    (void)state;
    for (int k = 0; k < STOPS; k++) {
        pthread_t threads[N];
        follower keepers[N] = {{0}};
        begin(&(peri__server_options){.workers = 2});
        for (int i = 0; i < N; i++) pthread_create(&threads[i], NULL, run_keeper, &keepers[i]);
        for (int i = 0; i < N; i++) /* on a machine that has much to do, a thread may begin late */
            for (int ms = 0; ms < 10000 && atomic_load(&keepers[i].answers) == 0; ms++) pause_ms(1);
        pause_ms(50);
        stop_ns = 20000000000;
        stop_server(NULL);
        open_still = false;
        for (int i = 0; i < N; i++) {
            pthread_join(threads[i], NULL);
            assert_true(keepers[i].answers > 0);
            assert_int_equal(keepers[i].wrong, 0);
        }
    }
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

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(refuses_when_full),
    cmocka_unit_test(a_new_state_waits_for_no_batch_to_fill),
    cmocka_unit_test(drops_from_a_batch_who_does_not_wait),
    cmocka_unit_test(reads_on_when_a_batch_takes_longer_than_expected),
    cmocka_unit_test(makes_room_for_connections),
    cmocka_unit_test(serves_thousands_of_connections),
    cmocka_unit_test(batches),
    cmocka_unit_test(swaps),
    cmocka_unit_test(refuses_no_client_that_has_room),
    cmocka_unit_test(stops_after_what_runs),
    cmocka_unit_test(loses_nothing_at_the_end),
    cmocka_unit_test(refuses_what_waits_at_the_end),
    cmocka_unit_test(is_alive_without_a_model),
};

check_main(tests)
