/* SPDX-License-Identifier: Apache-2.0
 *
 * next_checkpoint.c: which checkpoint of a folder comes next for a process that follows a run.
 *
 * Names that a Saver gives, save-NUMBER-step-STEP, are numbered in the order of saves, so the newest is that of the
 * largest number. In a folder without such names it is what nobody has an increment of, among what goes on from the one
 * that was taken.
 */
#include "../base/buffer.h"
#include "files.h"
#include "reader.h"

#include <limits.h>
#include <perilune/checkpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct candidate {
    char *path;
    int64_t number; /* of the save; -1: it has another name */
    peri_checkpoint_info is;
    char before[PERI_CHECKPOINT_DIGEST + 1]; /* what it goes on from: see peri__checkpoint_identify */
    bool parent;                             /* another one goes on from it */
} candidate;

/** The newest save whose manifest cannot be read. */
typedef struct unread {
    int64_t number; /* -1: there is none */
    peri_status status;
    char why[PERI_MESSAGE_MAX];
} unread;

/** A checkpoint that was refused. It is offered again after a while, and after twice as long each time it is refused
 *  again: what a file system of a network shows late, or wrong at first, becomes good by itself. */
typedef struct refusal {
    char digest[PERI_CHECKPOINT_DIGEST + 1];
    int64_t looks, until; /* for how many looks it is left out; the look at which it is offered again */
} refusal;
enum { FIRST_LOOKS = 8, MOST_LOOKS = 512 };

struct peri_checkpoint_follower {
    char *folder;
    peri_checkpoint_info taken; /* its digest is "" at first */
    int64_t number;             /* of the save that was taken; -1: none, or it has another name */
    char *path;                 /* of what was taken; NULL: nothing was */
    int64_t missed;             /* looks in a row that have found saves, none newer, and not the one that was
                                       taken */
    peri_checkpoint *offered;   /* what next gave last */
    char *offered_path;         /* its path, so that taking it needs no memory */
    int64_t offered_number;
    int64_t looks; /* how often the folder was looked at */
    refusal *refused;
    int64_t n_refused, refused_room;
};

peri_status peri_checkpoint_follower_new(const char *folder, peri_checkpoint_follower **out)
{
    PERI_NEED(folder);
    PERI_NEED(out);
    if (!*folder) return peri__fail(PERI_EINVAL, "peri_checkpoint_follower_new: the folder has no name");
    peri_checkpoint_follower *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    peri__object_count(1);
    f->number = -1;
    f->folder = peri__strdup(folder);
    if (!f->folder) {
        peri_checkpoint_follower_release(f);
        return PERI_ENOMEM;
    }
    *out = f;
    return PERI_OK;
}

/** Nothing is offered any more. */
static void withdraw(peri_checkpoint_follower *f)
{
    peri_checkpoint_release(f->offered);
    peri__free(f->offered_path);
    f->offered = NULL;
    f->offered_path = NULL;
}

void peri_checkpoint_follower_release(peri_checkpoint_follower *f)
{
    if (!f || peri__border_refuses(__func__)) return;
    withdraw(f);
    peri__free(f->folder);
    peri__free(f->refused);
    peri__free(f->path);
    peri__free(f);
    peri__object_count(-1);
}

/* -- the candidates ------------------------------------------------------------------------------------------------ */

static void candidates_fini(candidate *list, int64_t n)
{
    for (int64_t i = 0; i < n; i++) peri__free(list[i].path);
    peri__free(list);
}

/** All checkpoints of the folder whose manifests can be read, and the newest other one. Without memory or descriptors
 *  there is no answer. */
static peri_status candidates_of(const char *folder, candidate **list, int64_t *n, unread *other)
{
    char *names, path[PATH_MAX];
    int64_t room = 0;
    *list = NULL;
    *n = 0;
    other->number = -1;
    PERI_TRY(peri_checkpoint_names(folder, &names));
    peri_status status = PERI_OK;
    for (char *name = names, *end; status >= 0 && (end = strchr(name, '\n')); name = end + 1) {
        candidate c = {0};
        int64_t step;
        *end = 0;
        if (!peri__saver_name(name, &c.number, &step)) c.number = -1;
        status = peri__path_join(folder, name, path);
        if (status >= 0) status = peri__checkpoint_identify(path, &c.is, c.before);
        if (status < 0 && status != PERI_ENOMEM) {
            if (c.number > other->number) {
                *other = (unread){.number = c.number, .status = status};
                snprintf(other->why, sizeof other->why, "%s", peri_error_message());
            }
            status = PERI_OK;
            continue;
        }
        if (status >= 0) status = peri__grow((void **)list, &room, *n + 1, sizeof **list);
        if (status < 0) break;
        if (!(c.path = peri__strdup(path))) status = PERI_ENOMEM;
        else (*list)[(*n)++] = c;
    }
    peri_checkpoint_names_release(names);
    if (status < 0) candidates_fini(*list, *n);
    return status;
}

static bool same_digest(const char *a, const char *b) { return *a && strcmp(a, b) == 0; }
static bool has_content_of(const peri_checkpoint_info *is, const char *digest)
{
    return same_digest(is->digest, digest) || same_digest(is->same_as, digest);
}

/** Whether it is what was taken. */
static bool is_taken(const peri_checkpoint_follower *f, const peri_checkpoint_info *is)
{
    return has_content_of(is, f->taken.digest) || has_content_of(is, f->taken.same_as);
}

/** The refusal of a checkpoint; NULL: there was none. */
static refusal *refusal_of(const peri_checkpoint_follower *f, const char *digest)
{
    for (int64_t i = 0; i < f->n_refused; i++)
        if (strcmp(f->refused[i].digest, digest) == 0) return &f->refused[i];
    return NULL;
}

static bool is_refused(const peri_checkpoint_follower *f, const char *digest)
{
    const refusal *r = refusal_of(f, digest);
    return r && f->looks < r->until;
}

/** Whether candidate @i goes on from what was taken: what it goes on from itself does, or is it. That, and what was
 *  taken, may have become a full checkpoint meanwhile (compact), which goes by a digest of its own, too. */
static bool goes_on(const peri_checkpoint_follower *f, const candidate *list, int64_t n, int64_t i)
{
    for (int64_t steps = 0; steps <= n && *list[i].before; steps++) {
        int64_t k = 0;
        if (same_digest(list[i].before, f->taken.digest) || same_digest(list[i].before, f->taken.same_as)) return true;
        while (k < n && !has_content_of(&list[k].is, list[i].before)) k++;
        if (k == n) return false;
        if (is_taken(f, &list[k].is)) return true;
        i = k;
    }
    return false;
}

/** The newest first. */
static int by_number(const void *a, const void *b)
{
    const int64_t x = ((const candidate *)a)->number, y = ((const candidate *)b)->number;
    return x > y ? -1 : x < y;
}

/* -- the next one -------------------------------------------------------------------------------------------------- */

/** Open candidate @c and offer it. */
static peri_status offer(peri_checkpoint_follower *f, const candidate *c, peri_checkpoint **out, int64_t *level)
{
    withdraw(f);
    f->offered_path = peri__strdup(c->path);
    if (!f->offered_path) return PERI_ENOMEM;
    PERI_TRY(peri_checkpoint_open(c->path, &f->offered));
    f->offered_number = c->number;
    *level = peri_checkpoint_level_of(f->offered, f->taken.digest);
    if (*level < 0) *level = peri_checkpoint_level_of(f->offered, f->taken.same_as);
    *out = f->offered;
    return PERI_OK;
}

/** Whether what was taken is no longer at its path: nothing is, or another save that has its name. One that cannot be
 *  read is there. */
static bool is_gone(const peri_checkpoint_follower *f, const candidate *list, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (strcmp(list[i].path, f->path) == 0) return !is_taken(f, &list[i].is);
    return access(f->path, F_OK) != 0;
}

/** Whether the folder has no save that is newer than what was taken, nor that one: it has been given to another run, it
 *  was replaced, or somebody went back. At the second look, since lists of names over a network may be old. @numbered:
 *  newer is what has a larger number, else what goes on from it. */
static bool has_other_run(peri_checkpoint_follower *f, const candidate *list, int64_t n, bool numbered)
{
    bool here = n == 0 || (numbered && f->number < 0) || !f->path || !is_gone(f, list, n);
    for (int64_t i = 0; i < n && !here; i++)
        here = is_taken(f, &list[i].is) || (numbered ? list[i].number > f->number : goes_on(f, list, n, i));
    f->missed = here ? 0 : f->missed + 1;
    return f->missed > 1;
}

/** Among numbered names: the newest that can be opened and is newer than what was taken, or any if that is gone. One
 *  that this process has no memory or descriptors for may be good: no older one is offered then. */
static peri_status next_number(peri_checkpoint_follower *f, candidate *list, int64_t n, peri_checkpoint **out,
                               int64_t *level)
{
    peri_status failed = PERI_PENDING;
    char why[PERI_MESSAGE_MAX] = "";
    qsort(list, (size_t)n, sizeof *list, by_number);
    const int64_t after = has_other_run(f, list, n, true) ? -1 : f->number;
    for (int64_t i = 0; i < n && list[i].number > after; i++) {
        if (is_taken(f, &list[i].is)) break;
        if (is_refused(f, list[i].is.digest)) continue;
        peri_status status = offer(f, &list[i], out, level);
        if (status >= 0 || status == PERI_ENOMEM) return status;
        if (failed != PERI_PENDING) continue;
        failed = status;
        snprintf(why, sizeof why, "%s", peri_error_message());
    }
    return failed == PERI_PENDING ? failed : peri__fail(failed, "%s", why);
}

/** Among other names: the only end of a chain that goes on from what was taken, or of any if that is gone. If there is
 *  none, but another chain that is as long, nobody can know which is newer. */
static peri_status next_end(peri_checkpoint_follower *f, candidate *list, int64_t n, peri_checkpoint **out,
                            int64_t *level)
{
    const candidate *found = NULL, *unrelated = NULL;
    const bool any = !*f->taken.digest || has_other_run(f, list, n, false);
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < n; k++)
            list[i].parent = list[i].parent || has_content_of(&list[i].is, list[k].before);
    for (int64_t i = 0; i < n; i++) {
        const candidate *c = &list[i];
        if (c->parent || is_taken(f, &c->is) || is_refused(f, c->is.digest)) continue;
        if (!any && !goes_on(f, list, n, i)) {
            if (c->is.increment >= (unrelated ? unrelated->is.increment : f->taken.increment)) unrelated = c;
            continue;
        }
        if (found && !has_content_of(&c->is, found->is.digest) && !has_content_of(&found->is, c->is.digest))
            return peri__fail(PERI_EMISMATCH,
                              "peri_checkpoint_follower_next: folder '%.200s' has two that could be next, '%.150s' and "
                              "'%.150s'; allowed: "
                              "one chain, or names that say their order (save-NUMBER-step-STEP)",
                              f->folder, found->path, c->path);
        found = c;
    }
    if (!found && unrelated)
        return peri__fail(PERI_EMISMATCH,
                          "peri_checkpoint_follower_next: folder '%.200s' has '%.150s', which does not go on from "
                          "'%.150s', which was taken; allowed: one chain, or names that say their order "
                          "(save-NUMBER-step-STEP)",
                          f->folder, unrelated->path, f->path);
    return found ? offer(f, found, out, level) : PERI_PENDING;
}

peri_status peri_checkpoint_follower_next(peri_checkpoint_follower *f, peri_checkpoint **out, int64_t *level)
{
    candidate *list;
    int64_t n, numbered = 0;
    unread other;
    PERI_NEED(f);
    PERI_NEED(out);
    PERI_NEED(level);
    withdraw(f);
    f->looks++;
    peri_status status = candidates_of(f->folder, &list, &n, &other);
    if (status == PERI_ENOTFOUND) return PERI_PENDING; /* nothing was saved yet */
    if (status < 0) return status;
    for (int64_t i = 0; i < n; i++) numbered += list[i].number >= 0;
    status = (numbered ? next_number : next_end)(f, list, n, out, level);
    candidates_fini(list, n);
    if (status != PERI_PENDING || other.number <= f->number) return status;
    return peri__fail(other.status, "%s", other.why);
}

peri_status peri_checkpoint_follower_take(peri_checkpoint_follower *f)
{
    PERI_NEED(f);
    if (!f->offered)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_follower_take: nothing was offered; allowed: after _next has given one");
    peri_checkpoint_info now = {.increment = peri_checkpoint_increment(f->offered)};
    if (f->offered_path) { /* not taken before */
        peri__free(f->path);
        f->path = f->offered_path;
        f->offered_path = NULL;
    }
    snprintf(now.digest, sizeof now.digest, "%s", peri_checkpoint_digest(f->offered));
    snprintf(now.parent, sizeof now.parent, "%s", peri_checkpoint_parent(f->offered));
    snprintf(now.same_as, sizeof now.same_as, "%s", peri_checkpoint_same_as(f->offered));
    f->taken = now;
    f->number = f->offered_number;
    f->n_refused = 0;
    return PERI_OK;
}

peri_status peri_checkpoint_follower_refuse(peri_checkpoint_follower *f)
{
    PERI_NEED(f);
    if (!f->offered)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_follower_refuse: nothing was offered; allowed: after _next has given one");
    refusal *r = refusal_of(f, peri_checkpoint_digest(f->offered));
    if (!r) {
        PERI_TRY(peri__grow((void **)&f->refused, &f->refused_room, f->n_refused + 1, sizeof *f->refused));
        r = &f->refused[f->n_refused++];
        *r = (refusal){.looks = FIRST_LOOKS / 2};
        snprintf(r->digest, sizeof r->digest, "%s", peri_checkpoint_digest(f->offered));
    }
    r->looks = peri__min(2 * r->looks, MOST_LOOKS);
    r->until = f->looks + r->looks;
    withdraw(f);
    return PERI_OK;
}

peri_status peri_checkpoint_follower_forget(peri_checkpoint_follower *f)
{
    PERI_NEED(f);
    f->taken = (peri_checkpoint_info){0};
    f->number = -1;
    return PERI_OK;
}
