/* SPDX-License-Identifier: Apache-2.0
 *
 * follow.c: see follow.h. It never gives up: whatever becomes of the file, the last good one serves on (it is mapped, so its name may go),
 * /health says what is amiss, and the next good file is taken. It asks for the file's status again and again, since network file systems
 * tell of no changes.
 */
#include "follow.h"

#include "model_file.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>

/** Which file it is, and in what state. */
typedef struct identity {
    dev_t device;
    ino_t inode;
    off_t bytes;
    struct timespec changed;
} identity;

struct peri__follow {
    peri__server *server;
    const char *path, *name;
    int64_t every_ns;
    identity served, refused; /* refused: of the last file that could not be taken */
    char said[PERI_MESSAGE_MAX];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop;
};

static bool look(const char *path, identity *out)
{
    struct stat st;
    memset(out, 0, sizeof *out);
    if (stat(path, &st) != 0) return false;
    out->device = st.st_dev, out->inode = st.st_ino, out->bytes = st.st_size, out->changed = st.st_mtim;
    return true;
}

static bool alike(const identity *a, const identity *b)
{
    return a->device == b->device && a->inode == b->inode && a->bytes == b->bytes && a->changed.tv_sec == b->changed.tv_sec &&
           a->changed.tv_nsec == b->changed.tv_nsec;
}

/** Say once what is amiss; "": nothing is. */
static void say(peri__follow *f, const char *text)
{
    if (strcmp(f->said, text) == 0) return;
    snprintf(f->said, sizeof f->said, "%s", text);
    peri__server_note(f->server, text);
    printf("perilune serve: %s\n", *text ? text : "the model file is as it should be again");
    fflush(stdout);
}

static void take(peri__follow *f, const identity *now)
{
    peri__serve_model *model = NULL;
    peri_status status = peri__serve_open_file(f->path, f->name, true, &model);
    char version[64] = "";
    if (status >= 0) snprintf(version, sizeof version, "%s", model->facts.version);
    if (status >= 0) status = peri__server_swap(f->server, model);
    if (status >= 0) {
        f->served = *now;
        say(f, "");
        printf("perilune serve: version %s from now on\n", version);
        fflush(stdout);
        return;
    }
    char text[PERI_MESSAGE_MAX];
    snprintf(text, sizeof text, "the last good model serves on: %.400s", peri_error_message());
    peri__serve_model_release(model);
    atomic_fetch_add(&peri__server_metrics(f->server)->reload_failures, 1);
    if (status == PERI_EFORMAT || status == PERI_EUNSUPPORTED) f->refused = *now; /* it will not get better by itself */
    say(f, text);
}

static void tick(peri__follow *f)
{
    identity now;
    if (!look(f->path, &now)) {
        char text[PERI_MESSAGE_MAX];
        snprintf(text, sizeof text, "the last good model serves on: '%.300s': %s", f->path, strerror(errno));
        say(f, text);
    } else if (alike(&now, &f->served)) say(f, "");
    else if (!alike(&now, &f->refused)) take(f, &now);
}

static void *follow(void *ctx)
{
    peri__follow *f = ctx;
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        int64_t until = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + f->every_ns;
        t = (struct timespec){.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
        if (pthread_cond_timedwait(&f->wake, &f->lock, &t) != ETIMEDOUT) continue;
        pthread_mutex_unlock(&f->lock);
        tick(f);
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

peri_status peri__follow_start(peri__server *server, const char *path, const char *name, int64_t every_ns, peri__follow **out)
{
    peri__follow *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    f->server = server, f->path = path, f->name = name, f->every_ns = every_ns;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&f->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&f->lock, NULL);
    look(path, &f->served); /* a file that was replaced since it was opened is seen at its next change */
    int problem = peri__thread_start(&f->thread, follow, f);
    if (problem) {
        peri__free(f);
        return peri__fail(PERI_EIO, "perilune serve: no thread: %s", strerror(problem));
    }
    *out = f;
    return PERI_OK;
}

void peri__follow_stop(peri__follow *f)
{
    if (!f) return;
    pthread_mutex_lock(&f->lock);
    f->stop = true;
    pthread_cond_signal(&f->wake);
    pthread_mutex_unlock(&f->lock);
    pthread_join(f->thread, NULL);
    pthread_cond_destroy(&f->wake);
    pthread_mutex_destroy(&f->lock);
    peri__free(f);
}
