/* SPDX-License-Identifier: Apache-2.0
 *
 * serve_main.c: the program perilune-serve, which `perilune serve` becomes. Its words are name=value, checked and
 * made by lua/perilune/launch/serve.lua, which has the help; times are nanoseconds here, sizes bytes.
 */
#include "newer_model.h"
#include "server.h"

#include <errno.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MOST_HOSTS = 64, FILES_BESIDE = 256, /* open files beside connections */
       WATCH_NS = 1000000000, FOLLOW_NS = 100000000 };

typedef struct settings {
    peri__server_options server;
    peri__follow_source source;
    const char *hosts[MOST_HOSTS];
    int64_t grace_ns, watch_ns; /* watch 0: nothing is looked at again; -1: not said */
} settings;

/** A number of a word; what is out of range is refused, though serve.lua has looked. */
static bool parse_number(const char *text, int64_t least, int64_t most, int64_t *out)
{
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    if (end == text || *end || errno || n < least || n > most) return false;
    *out = n;
    return true;
}

static bool take_text(settings *s, const char *key, const char *value)
{
    if (strcmp(key, "model") == 0) s->source.path = value;
    else if (strcmp(key, "name") == 0) s->source.name = value;
    else if (strcmp(key, "follow") == 0) s->source.folder = value;
    else if (strcmp(key, "saved") == 0) s->source.saved = value;
    else if (strcmp(key, "listen") == 0) s->server.http.address = value;
    else if (strcmp(key, "host") == 0 && s->server.http.n_names < MOST_HOSTS)
        s->hosts[s->server.http.n_names++] = value;
    else return false;
    return true;
}

static bool take_number(settings *s, const char *key, const char *value)
{
    int64_t port = s->server.http.port, workers = s->server.workers, connections = s->server.http.most_connections;
    const struct {
        const char *key;
        int64_t *to, least, most;
    } known[] = {
        {"port", &port, 0, 65535},
        {"workers", &workers, 1, 256},
        {"connections", &connections, 1, 1000000},
        {"samples", &s->server.rules.most_samples, 1, 1 << 20},
        {"queue", &s->server.most_queue, 1, 1 << 20},
        {"batch", &s->server.most_batch, 1, 1 << 20},
        {"delay", &s->server.delay_ns, 0, INT64_C(10000000000)},
        {"timeout", &s->server.http.request_ns, 1000000, INT64_C(86400000000000)},
        {"idle", &s->server.http.idle_ns, 1000000, INT64_C(86400000000000)},
        {"grace", &s->grace_ns, 0, INT64_C(86400000000000)},
        {"watch", &s->watch_ns, 0, INT64_C(86400000000000)},
        {"body", &s->server.http.most_body, 1, INT64_C(1) << 40},
        {"memory", &s->server.http.most_bodies, 1, INT64_C(1) << 40},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(key, known[i].key) != 0) continue;
        if (!parse_number(value, known[i].least, known[i].most, known[i].to)) return false;
        s->server.http.port = (int32_t)port;
        s->server.workers = (int32_t)workers;
        s->server.http.most_connections = (int32_t)connections;
        return true;
    }
    return false;
}

static bool take_words(settings *s, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char key[32], *equals = strchr(argv[i], '=');
        size_t n = equals ? (size_t)(equals - argv[i]) : sizeof key;
        if (n < sizeof key) {
            memcpy(key, argv[i], n);
            key[n] = 0;
        }
        if (n >= sizeof key || !(take_text(s, key, equals + 1) || take_number(s, key, equals + 1))) {
            fprintf(stderr,
                    "perilune-serve: '%s' is no word of this program; perilune serve --help tells how it is started\n",
                    argv[i]);
            return false;
        }
    }
    if (!s->source.path) fprintf(stderr, "perilune-serve: start it as: perilune serve model.peri\n");
    return s->source.path != NULL;
}

/** As many open files as this process may have: one for each connection, without which accepting would fail again and
 *  again, and some for each checkpoint in the chain that is followed. */
static bool allow_files(int64_t connections)
{
    struct rlimit limit;
    rlim_t wanted = (rlim_t)connections + FILES_BESIDE;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return true;
    if (limit.rlim_max < wanted) {
        fprintf(stderr,
                "perilune: --connections %lld takes %lld open files, and this process may have %lld (ulimit -Hn)\n",
                (long long)connections, (long long)wanted, (long long)limit.rlim_max);
        return false;
    }
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

static int serve_until_signal(const settings *s, const sigset_t *set)
{
    peri__serve_model *model;
    peri__server *server;
    peri__follow *follow;
    const int64_t watch = s->watch_ns >= 0 ? s->watch_ns : s->source.folder ? FOLLOW_NS : WATCH_NS;
    int64_t bytes = 0;
    char name[256] = "", version[64] = ""; /* copies: the model may be replaced at any time */
    peri_status status = peri__follow_open(&s->source, &model, &follow);
    if (status >= 0)
        snprintf(name, sizeof name, "%s", model->facts.name),
            snprintf(version, sizeof version, "%s", model->facts.version), bytes = model->bytes;
    if (status >= 0) status = peri__server_open(&s->server, model, &server);
    if (status >= 0 && watch) status = peri__follow_start(follow, server, watch);
    if (status < 0) {
        fprintf(stderr, "perilune: %s\n", peri_error_message());
        return 1;
    }
    bool bracket = strchr(s->server.http.address, ':') != NULL;
    printf("perilune serve: model '%s', version %s, on http://%s%s%s:%d/ (%d workers, process %d)\n", name, version,
           bracket ? "[" : "", s->server.http.address, bracket ? "]" : "", peri__server_port(server), s->server.workers,
           (int)getpid());
    printf("perilune serve: the model's file has %lld bytes; %s\n", (long long)bytes,
           s->source.folder ? "what a trainer changes of it takes memory twice"
                            : "a new one takes as much memory beside it, until it serves");
    fflush(stdout);
    while (sigwaitinfo(set, NULL) < 0) {
    }
    printf("perilune serve: stopping; what has been asked is finished, for at most %.0f s (a second signal ends it at "
           "once)\n",
           (double)s->grace_ns * 1e-9);
    fflush(stdout);
    pthread_sigmask(SIG_UNBLOCK, set, NULL);
    peri__follow_stop(follow);
    peri__server_stop(server, s->grace_ns);
    return 0;
}

int main(int argc, char **argv)
{
    settings s = {.server = {.http = {.address = "127.0.0.1",
                                      .port = 8080,
                                      .most_body = 16 << 20,
                                      .most_bodies = 256 << 20,
                                      .most_connections = 1000,
                                      .idle_ns = INT64_C(60000000000),
                                      .request_ns = INT64_C(10000000000)},
                             .rules = {.most_samples = 4096},
                             .workers = 1,
                             .most_queue = 1000,
                             .most_batch = 256},
                  .grace_ns = INT64_C(30000000000),
                  .watch_ns = -1,
                  .source = {.saved = "model"}};
    setlocale(LC_ALL, "C"); /* a preloaded library may have chosen one in which numbers have commas */
    sigset_t set;
    peri__streams_hold();
    if (!take_words(&s, argc, argv) || !allow_files(s.server.http.most_connections)) return 2;
    s.server.http.names = s.hosts;
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* before there are threads, which must not take them */
    return serve_until_signal(&s, &set);
}
