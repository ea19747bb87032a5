/* SPDX-License-Identifier: Apache-2.0
 *
 * newer_model.c: see newer_model.h. It never gives up: whatever becomes of the file or of the checkpoints, the last
 * good model serves on (unless somebody writes into the file that it maps, which is seen), /health says what is
 * amiss, and the next good one is taken. It asks the file system again and again, since network file systems tell of
 * no changes.
 */
#include "newer_model.h"

#include "../checkpoint/files.h"
#include "../checkpoint/manifest.h"
#include "model_file.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <perilune/checkpoint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/** Which file it is, and in what state. */
typedef struct identity {
    dev_t device;
    ino_t inode;
    off_t bytes;
    struct timespec changed;
} identity;

/** For how many looks a file that is damaged is left alone: first, and at most. What a file system of a network shows
 *  wrong at first becomes good by itself. */
enum { FIRST_LOOKS = 8, MOST_LOOKS = 512 };
/** The same for one that cannot be read, which may pass at any time. */
enum { FIRST_UNREAD = 1, MOST_UNREAD = 8 };

/** Seconds for which a folder has got no new file before it is named as one that is no checkpoint: who copies one is
 *  still at it until then. */
enum { SETTLED_S = 10 };

/** What may be amiss. */
enum { FILE_NOTE, FOLDER_NOTE, RUN_NOTE, NOTES };

struct peri__follow {
    peri__follow_source source;
    peri__server *server;
    peri_model_follower *run; /* NULL: of no run */
    char name[256];           /* whatever a new file says */
    int64_t every_ns;
    identity served, refused; /* refused: of the last file that was damaged, or could not be read */
    int64_t looks, left;      /* for how many looks that one is left alone, and how many of them are left */
    char notes[NOTES][PERI_MESSAGE_MAX], said[PERI_MESSAGE_MAX]; /* "": nothing */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool running, stop;
};

static bool identify_file(const char *path, identity *out)
{
    struct stat st;
    memset(out, 0, sizeof *out);
    if (stat(path, &st) != 0) return false;
    out->device = st.st_dev, out->inode = st.st_ino, out->bytes = st.st_size, out->changed = st.st_mtim;
    return true;
}

static bool same_identity(const identity *a, const identity *b)
{
    return a->device == b->device && a->inode == b->inode && a->bytes == b->bytes &&
           a->changed.tv_sec == b->changed.tv_sec && a->changed.tv_nsec == b->changed.tv_nsec;
}

/* -- the model ----------------------------------------------------------------------------------------------------- */

/** The model of the file as it is now, or of the run's newest checkpoint; @run new, or NULL. */
static peri_status open_model(peri__follow *f, const char *name, bool verify, peri_model_follower **run,
                              peri__serve_model **out)
{
    const peri__follow_source *s = &f->source;
    peri_model *model;
    *run = NULL;
    if (!s->folder) return peri__serve_open_file(s->path, name, verify, out);
    PERI_TRY(peri_model_follower_new(s->path, s->folder, s->saved, PERI_MODEL_GUARD | (verify ? PERI_MODEL_VERIFY : 0),
                                     run));
    peri_status status = peri_model_follower_poll(*run, &model);
    if (status != PERI_OK) { /* what is amiss is said at the first look */
        model = peri_model_follower_model(*run);
        peri_model_retain(model);
    }
    const char *checkpoint = peri_model_follower_path(*run);
    status = peri__serve_take_file(model, s->path, name, checkpoint ? checkpoint : s->path, out);
    if (status < 0) peri_model_follower_release(*run), *run = NULL;
    return status;
}

/** Say once what is amiss; "": nothing is. */
static void report_note(peri__follow *f)
{
    const char *text = "";
    for (int i = 0; i < NOTES && !*text; i++) text = f->notes[i];
    if (strcmp(f->said, text) == 0) return;
    snprintf(f->said, sizeof f->said, "%s", text);
    peri__server_note(f->server, text);
    printf("perilune serve: %s\n", *text ? text : "everything is as it should be again");
    fflush(stdout);
}

static void note_failure(peri__follow *f, int which, const char *why)
{
    char text[PERI_MESSAGE_MAX];
    char because[PERI_MESSAGE_MAX];
    snprintf(because, sizeof because, "%s", why); /* asking the server may overwrite the error */
    const char *state = peri__server_sound(f->server)
                            ? "the last good model serves on"
                            : "the file of the last good model was cut or written to, or cannot be read; no answers "
                              "without it";
    snprintf(text, sizeof text, "%s: %.380s", state, because);
    if (strcmp(f->notes[which], text) != 0) atomic_fetch_add(&peri__server_metrics(f->server)->reload_failures, 1);
    memcpy(f->notes[which], text, sizeof text);
}

/** Give the server a model, which is taken over. */
static peri_status swap_model(peri__follow *f, peri__serve_model *model)
{
    char version[64];
    snprintf(version, sizeof version, "%s", model->facts.version);
    peri_status status = peri__server_swap(f->server, model);
    if (status < 0) peri__serve_model_release(model);
    else printf("perilune serve: version %s from now on\n", version), fflush(stdout);
    return status;
}

/** Another file has the model's name, or the one that is served has to be mapped anew: reading it failed, and that may
 *  have passed. */
static void take_file(peri__follow *f, const identity *now)
{
    peri__serve_model *model = NULL;
    peri_model_follower *run = NULL;
    peri_status status = open_model(f, f->name, true, &run, &model);
    if (status >= 0) status = swap_model(f, model);
    if (status >= 0) {
        peri_model_follower_release(f->run);
        f->run = run;
        f->served = *now;
        *f->notes[FILE_NOTE] = 0;
        return;
    }
    note_failure(f, FILE_NOTE, peri_error_message());
    peri_model_follower_release(run);
    const bool unread = status == PERI_EIO;
    if (status != PERI_EFORMAT && status != PERI_EUNSUPPORTED && !unread) return;
    f->looks = same_identity(now, &f->refused) ? peri__min(2 * f->looks, unread ? MOST_UNREAD : MOST_LOOKS)
               : unread                ? FIRST_UNREAD
                                       : FIRST_LOOKS;
    f->left = f->looks;
    f->refused = *now;
}

static void look_at_file(peri__follow *f)
{
    identity now;
    char text[PERI_MESSAGE_MAX];
    if (!identify_file(f->source.path, &now)) {
        snprintf(text, sizeof text, "'%.300s': %s", f->source.path, strerror(errno));
        note_failure(f, FILE_NOTE, text);
    } else if (same_identity(&now, &f->served) && peri__server_sound(f->server)) {
        *f->notes[FILE_NOTE] = 0;
    } else if (!same_identity(&now, &f->refused) || --f->left <= 0) {
        take_file(f, &now);
    }
}

/** Whether the checkpoint that is served is gone, and the folder has no other. */
static bool checkpoints_are_gone(const peri__follow *f)
{
    const char *path = peri_model_follower_path(f->run);
    char *names;
    if (!path || access(path, F_OK) == 0 || peri_checkpoint_names(f->source.folder, &names) < 0) return false;
    const bool none = !*names;
    peri_checkpoint_names_release(names);
    return none;
}

/** Whether subfolder @name of the run's folder is none of its checkpoints, for want of a manifest, and nobody is at
 *  work in it. */
static bool has_no_manifest(const peri__follow *f, const char *name)
{
    char path[PATH_MAX], manifest[PATH_MAX];
    struct stat st;
    if (*name == '.' || peri__path_join(f->source.folder, name, path) < 0 ||
        peri__path_join(path, PERI__MANIFEST, manifest) < 0)
        return false;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) && access(manifest, F_OK) != 0 && errno == ENOENT &&
           time(NULL) - st.st_mtim.tv_sec >= SETTLED_S;
}

/** What would be followed if it had a manifest: a save that is newer than the one that is served, or any folder if
 *  there is no checkpoint at all. The last one by name; its name in @found, "": there is none. */
static void find_unfinished(const peri__follow *f, char found[NAME_MAX + 1])
{
    const char *served = peri_model_follower_path(f->run);
    int64_t newest = -1, number, step;
    char *names;
    *found = 0;
    if (served && !peri__saver_name(served, &newest, &step)) return; /* other names say no order */
    if (peri_checkpoint_names(f->source.folder, &names) < 0) return;
    const bool any = !served && !*names;
    peri_checkpoint_names_release(names);
    DIR *d = opendir(f->source.folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        const bool newer = peri__saver_name(e->d_name, &number, &step) && number > newest;
        if ((newer || any) && strcmp(e->d_name, found) > 0 && has_no_manifest(f, e->d_name))
            snprintf(found, NAME_MAX + 1, "%s", e->d_name);
    }
    if (d) closedir(d);
}

/** Why a folder without anything new to follow has nothing, if what lies there tells; false: it tells nothing. */
static bool explain_idle_folder(const peri__follow *f, char *text, size_t room)
{
    char found[NAME_MAX + 1], manifest[PATH_MAX];
    find_unfinished(f, found);
    if (*found) {
        snprintf(text, room,
                 "'%.200s/%.100s' is no checkpoint: it has no " PERI__MANIFEST ", and no new file for %d s (a copy "
                 "that was broken off, or another folder)",
                 f->source.folder, found, SETTLED_S);
        return true;
    }
    if (peri_model_follower_path(f->run) || peri__path_join(f->source.folder, PERI__MANIFEST, manifest) < 0 ||
        access(manifest, F_OK) != 0)
        return false;
    snprintf(text, room, "'%.300s' is a checkpoint itself; --follow takes the folder that it is in", f->source.folder);
    return true;
}

static void look_at_run(peri__follow *f)
{
    identity folder;
    char text[PERI_MESSAGE_MAX];
    peri_model *model;
    peri__serve_model *served;
    if (!identify_file(f->source.folder, &folder) || access(f->source.folder, R_OK | X_OK) != 0) {
        snprintf(text, sizeof text, "'%.300s': %s", f->source.folder, strerror(errno));
        note_failure(f, FOLDER_NOTE, text);
        return;
    }
    peri_status status = peri_model_follower_poll(f->run, &model);
    if (status == PERI_PENDING && checkpoints_are_gone(f)) {
        snprintf(text, sizeof text, "'%.300s' has no checkpoint any more", f->source.folder);
        note_failure(f, FOLDER_NOTE, text);
        return;
    }
    if (status == PERI_PENDING && explain_idle_folder(f, text, sizeof text)) note_failure(f, FOLDER_NOTE, text);
    else *f->notes[FOLDER_NOTE] = 0;
    if (status == PERI_PENDING) return; /* what was amiss with a checkpoint is, until there is a good one */
    if (status >= 0)
        status = peri__serve_take_file(model, f->source.path, f->name, peri_model_follower_path(f->run), &served);
    if (status >= 0) status = swap_model(f, served);
    if (status >= 0) *f->notes[RUN_NOTE] = 0;
    else note_failure(f, RUN_NOTE, peri_error_message());
}

static void *follow_model(void *ctx)
{
    peri__follow *f = ctx;
    peri__thread_alone();
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        int64_t until = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + f->every_ns;
        t = (struct timespec){.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
        if (pthread_cond_timedwait(&f->wake, &f->lock, &t) != ETIMEDOUT) continue;
        pthread_mutex_unlock(&f->lock);
        look_at_file(f);
        if (f->run) look_at_run(f);
        report_note(f);
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

peri_status peri__follow_open(const peri__follow_source *source, peri__serve_model **model, peri__follow **out)
{
    peri__follow *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    f->source = *source;
    /* before it is opened: what replaces it meanwhile is seen at the first look */
    identify_file(source->path, &f->served);
    peri_status status = open_model(f, source->name, false, &f->run, model);
    if (status < 0) {
        peri__free(f);
        return status;
    }
    snprintf(f->name, sizeof f->name, "%s", (*model)->facts.name);
    *out = f;
    return PERI_OK;
}

peri_status peri__follow_start(peri__follow *f, peri__server *server, int64_t every_ns)
{
    f->server = server, f->every_ns = every_ns;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&f->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&f->lock, NULL);
    int problem = peri__thread_start(&f->thread, follow_model, f);
    if (problem) return peri__fail(PERI_EIO, "perilune serve: no thread: %s", strerror(problem));
    f->running = true;
    return PERI_OK;
}

void peri__follow_stop(peri__follow *f)
{
    if (!f) return;
    if (f->running) {
        pthread_mutex_lock(&f->lock);
        f->stop = true;
        pthread_cond_signal(&f->wake);
        pthread_mutex_unlock(&f->lock);
        pthread_join(f->thread, NULL);
        pthread_cond_destroy(&f->wake);
        pthread_mutex_destroy(&f->lock);
    }
    peri_model_follower_release(f->run);
    peri__free(f);
}
