/* SPDX-License-Identifier: Apache-2.0
 *
 * http.c: what HTTP costs: a client of `perilune serve` that keeps its connections.
 *
 *   http PORT PATH BODY-FILE OUT.jsonl BARE-PORT
 *   http PORT PATH BODY-FILE OUT watch
 *                     asks a thousand times a second until SIGTERM; OUT: a line for each answer: the nanosecond of
 *                     CLOCK_MONOTONIC at which it came, the microseconds that it took, the model's version in it
 *
 *   low     one connection, one request after the other: microseconds of a request, and those beside what the server
 *           says that it waited and computed (the header Server-Timing); in turns with a bare server of the library
 *           beneath (http_bare.c), since that is what this machine and this client take by themselves
 *   peak    CONNECTIONS connections, each as fast as it can
 *   half    the same connections at half of the peak's rate, at times that do not wait for answers: a request counts
 *           from the moment at which it was due; then the bare server at the same rate
 *
 * Meanwhile IDLE more connections are open on which nobody asks, as clients have that keep theirs.
 *
 * peak and half take turns, ROUNDS times; what is said of them are medians of the rounds: one pause of the machine, of
 * 30 ms in 3 s, is more than one request in a hundred.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 8, IDLE = 900, LOW = 3000, TURN = 100, WARM = 300, MOST = 1 << 20, ROOM = 1 << 20, ROUNDS = 3,
       ROOM_OF_ANSWER = 1 << 16 };
static const double SECONDS = 3;

static char *request;
static size_t request_bytes;
static int port;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static int open_connection(void)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0) fail("http: connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

/** A header of an answer, or NULL. */
static char *header_of(char *answer, const char *name)
{
    for (char *line = strstr(answer, "\r\n"); line && line[2] != '\r'; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, strlen(name)) && line[2 + strlen(name)] == ':') return line + 3 + strlen(name);
    return NULL;
}

/** Whether @got bytes of an answer are all of it. */
static bool is_whole(char *answer, size_t got)
{
    const char *end = strstr(answer, "\r\n\r\n"), *length = end ? header_of(answer, "Content-Length") : NULL;
    if (!end) return false;
    if (!length || strncmp(answer, "HTTP/1.1 200", 12) != 0) {
        fprintf(stderr, "http: %.300s\n", answer);
        exit(1);
    }
    return got >= (size_t)(end + 4 - answer) + (size_t)strtoull(length, NULL, 10);
}

/** Ask once; returns the milliseconds that the server says it took. */
static double ask(int fd, char *room)
{
    size_t got = 0;
    for (size_t sent = 0; sent < request_bytes;) {
        ssize_t n = write(fd, request + sent, request_bytes - sent);
        if (n <= 0) fail("http: write");
        sent += (size_t)n;
    }
    do {
        ssize_t n = read(fd, room + got, ROOM - 1 - got);
        if (n <= 0) fail("http: read");
        room[got += (size_t)n] = 0;
    } while (!is_whole(room, got));
    double sum = 0;
    char *timing = header_of(room, "Server-Timing"), *stop = timing ? strstr(timing, "\r\n") : NULL;
    while (timing && (timing = strstr(timing, "dur=")) && timing < stop) sum += strtod(timing += 4, NULL);
    return sum;
}

/** Sleep, and spin no moment: threads that wait for their time on the server's cores would take them from it. */
static void sleep_until(double due)
{
    const struct timespec t = {.tv_sec = (time_t)due, .tv_nsec = (long)((due - (double)(time_t)due) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double part(double *x, int64_t n, double p)
{
    qsort(x, (size_t)n, sizeof *x, by_size);
    return x[(int64_t)((double)(n - 1) * p)] * 1e6;
}

typedef struct connection {
    int fd;
    bool asked;        /* its request has not been answered */
    double from, free; /* when its request began, and when the one before was answered */
    size_t got;
    char answer[ROOM_OF_ANSWER];
} connection;

/** @due: when the request should have begun. If the connection waited for an answer then, that counts; how late this
 *  thread is does not. */
static void begin_request(connection *c, double due)
{
    c->from = c->free > due ? due : now();
    if (write(c->fd, request, request_bytes) != (ssize_t)request_bytes) fail("http: write");
    c->asked = true, c->got = 0;
}

/** Read what is there; returns whether the answer is whole. */
static bool go_on(connection *c)
{
    ssize_t n = read(c->fd, c->answer + c->got, sizeof c->answer - 1 - c->got);
    if (n <= 0) fail("http: read");
    c->answer[c->got += (size_t)n] = 0;
    return is_whole(c->answer, c->got);
}

/** All connections for SECONDS at @rate requests a second (0: as fast as they can); returns how many a second were
 *  answered. One thread, which http.lua keeps away from the server's processors. */
static double load(double rate, double *took, int64_t *n)
{
    static connection all[CONNECTIONS];
    for (int i = 0; i < CONNECTIONS; i++) all[i].fd = open_connection(), all[i].asked = false, all[i].free = 0;
    const double begin = now();
    double due = begin, time = begin;
    *n = 0;
    for (int waiting = 0; time < begin + SECONDS || waiting; time = now()) {
        struct pollfd p[CONNECTIONS];
        for (int i = 0; i < CONNECTIONS; i++) {
            const bool more = time < begin + SECONDS && (rate == 0 || due <= time);
            if (!all[i].asked && more) {
                begin_request(&all[i], rate ? due : time);
                due += rate ? 1 / rate : 0;
                waiting++;
            }
            p[i] = (struct pollfd){.fd = all[i].asked ? all[i].fd : -1, .events = POLLIN};
        }
        const double left = rate && waiting < CONNECTIONS ? due - now() : 0.5;
        const struct timespec most = {.tv_nsec = left > 0 ? (long)(left * 1e9) : 0};
        if (ppoll(p, CONNECTIONS, &most, NULL) < 0) fail("http: poll");
        for (int i = 0; i < CONNECTIONS; i++) {
            if (!p[i].revents || !go_on(&all[i])) continue;
            all[i].asked = false, all[i].free = now(), waiting--;
            if (*n < MOST) took[(*n)++] = all[i].free - all[i].from;
        }
    }
    for (int i = 0; i < CONNECTIONS; i++) close(all[i].fd);
    return (double)*n / (time - begin);
}

static void read_request(const char *path, const char *file)
{
    FILE *f = fopen(file, "rb");
    if (!f || !(request = malloc(ROOM))) fail(file);
    static char body[ROOM / 2];
    const size_t bytes = fread(body, 1, sizeof body, f);
    fclose(f);
    request_bytes =
        (size_t)snprintf(request, ROOM, "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %zu\r\n\r\n%.*s", path,
                         bytes, (int)bytes, body);
}

static volatile sig_atomic_t stopped;

static void stop(int signal)
{
    (void)signal;
    stopped = 1;
}

/** Ask until SIGTERM, and write what came. */
static void watch(int fd, char *room, FILE *out)
{
    signal(SIGTERM, stop);
    for (double due = now(); !stopped; due += 1e-3) {
        sleep_until(due);
        const double from = now();
        ask(fd, room);
        const double till = now();
        const char *version = strstr(room, "\"model_version\":\"");
        if (!version) fail("http: an answer without a version");
        fprintf(out, "%.0f %.1f %.40s\n", till * 1e9, (till - from) * 1e6, version + strlen("\"model_version\":\""));
        if (due < till - 1e-3) due = till;
    }
}

static double middle(const double x[ROUNDS])
{
    double y[ROUNDS];
    memcpy(y, x, sizeof y);
    qsort(y, ROUNDS, sizeof *y, by_size);
    return y[ROUNDS / 2];
}

/** One connection to the server at @served and one to @bare, one request after the other: TURN of them in turns. */
static void measure_low(int served, int bare, char *room, double *took, FILE *out)
{
    static double beside[LOW], alone[LOW];
    port = bare;
    const int bare_fd = open_connection();
    port = served;
    const int fd = open_connection();
    for (int i = 0; i < IDLE; i++) open_connection();
    for (int i = -WARM; i < LOW; i += TURN) {
        for (int k = 0; k < TURN; k++) {
            const double from = now(), own = ask(fd, room) * 1e-3;
            if (i >= 0) took[i + k] = now() - from, beside[i + k] = took[i + k] - own;
        }
        for (int k = 0; k < TURN; k++) {
            const double from = now();
            ask(bare_fd, room);
            if (i >= 0) alone[i + k] = now() - from;
        }
    }
    close(fd), close(bare_fd);
    const double p50 = part(took, LOW, 0.5), p99 = part(took, LOW, 0.99), http = part(beside, LOW, 0.5),
                 least = part(alone, LOW, 0.5);
    printf("http, one connection: %.0f us a request (99th percentile %.0f), %.0f of them beside waiting and computing; "
           "a bare server, in turns: %.0f\n",
           p50, p99, http, least);
    fprintf(out,
            "{\"case\":\"http-low\",\"threads\":1,\"p50_us\":%.1f,\"p99_us\":%.1f,\"http_us\":%.1f,\"bare_us\":%.1f}\n",
            p50, p99, http, least);
}

typedef struct rounds {
    double rate[ROUNDS], p50[ROUNDS], p99[ROUNDS], times[ROUNDS];
} rounds;

/** Round @r of a load on the server at @to. */
static void measure_round(rounds *all, int r, int to, double rate, double *took)
{
    int64_t n;
    port = to;
    all->rate[r] = load(rate, took, &n);
    all->p50[r] = part(took, n, 0.5), all->p99[r] = part(took, n, 0.99);
    all->times[r] = all->p99[r] / all->p50[r];
}

static void print_rounds(const rounds *all, const char *what, const char *name, FILE *out)
{
    printf("http, %d connections, %s: %.0f a second, %.0f us, 99th percentile %.0f: %.1f times (rounds:", CONNECTIONS,
           what, middle(all->rate), middle(all->p50), middle(all->p99), middle(all->times));
    for (int r = 0; r < ROUNDS; r++) printf(" %.1f", all->times[r]);
    printf(")\n");
    fprintf(out,
            "{\"case\":\"%s\",\"threads\":%d,\"p50_us\":%.1f,\"p99_us\":%.1f,\"samples_per_s\":%.0f,\"times\":%.2f}\n",
            name, CONNECTIONS, middle(all->p50), middle(all->p99), middle(all->rate), middle(all->times));
}

int main(int argc, char **argv)
{
    const bool watched = argc == 6 && !strcmp(argv[5], "watch");
    if (argc != 6) return fprintf(stderr, "usage: http PORT PATH BODY-FILE OUT watch|BARE-PORT\n"), 2;
    static double took[MOST];
    static rounds peak, half, bare_half;
    char *room = malloc(ROOM);
    FILE *out = fopen(argv[4], "a");
    const int served = port = atoi(argv[1]), bare = atoi(argv[5]);
    read_request(argv[2], argv[3]);
    if (!out || !room) fail(argv[4]);
    prctl(PR_SET_TIMERSLACK, 1UL); /* nanoseconds; without it sleeps end up to 50 us late, which would count as the
                                      server's */
    if (watched) return watch(open_connection(), room, out), fclose(out) != 0;
    measure_low(served, bare, room, took, out);
    for (int r = 0; r < ROUNDS; r++) {
        measure_round(&peak, r, served, 0, took);
        measure_round(&half, r, served, peak.rate[r] / 2, took);
        measure_round(&bare_half, r, bare, peak.rate[r] / 2, took);
    }
    print_rounds(&peak, "as fast as they can", "http-peak", out);
    print_rounds(&half, "at half of that", "http-half", out);
    print_rounds(&bare_half, "as many to the bare server", "http-bare-half", out);
    return fclose(out) != 0;
}
