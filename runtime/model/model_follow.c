/* SPDX-License-Identifier: Apache-2.0
 *
 * model_follow.c: a model that follows the checkpoints of a run. There are two of it, each a private mapping of the
 * same file: one answers, the other is brought to the next checkpoint meanwhile, and then they change places. So
 * nobody waits, and nobody sees half of a change. Only pages that differ from the file's take memory. What one of
 * them had to read whole the other copies from it, when there is nothing newer to do. One that has met a page that
 * could not be read is given up and mapped anew; if it is the one that answers, the other one takes its place, brought
 * to what is there.
 */
#include "../checkpoint/files.h"
#include "model_follow.h"

#include <stdio.h>

/** One of the two, and which checkpoint it has; "": none that is of use: it is as it was exported, of another chain, or
 *  a mixture. */
typedef struct half {
    peri_model *model;
    char digest[PERI_CHECKPOINT_DIGEST + 1], same_as[PERI_CHECKPOINT_DIGEST + 1];
} half;

struct peri_model_follower {
    peri_checkpoint_follower *run;
    half halves[2];
    int32_t now, flags; /* now: the half that answers; flags: how the file is opened */
    char *prefix, *path, digest[33]; /* digest: of the file */
    /* The checkpoint that could not be read when it was last tried; for how many looks it is left alone, and how many
     * of them are left. */
    char unread[PERI_CHECKPOINT_DIGEST + 1];
    int64_t looks, left;
};

enum { MOST_LOOKS = 64 }; /* for which a checkpoint that cannot be read is left alone */

/** Whether the half has met a page of the file that could not be read: there are zeros in its place. */
static bool lost(const half *h) { return peri__mapped_cut(&h->model->file); }

static peri_status fail_unreadable_model(const peri_model *m)
{
    return peri__fail(PERI_EIO, "peri_model_follower_poll: '%.200s' cannot be read, at byte %lld", m->path,
                      (long long)peri__mapped_missing(&m->file));
}

/** Give the half, whose model nobody else has, the file as it was exported. The page that was missing is read first:
 *  while it is, no checkpoint need be. */
static peri_status open_again(const peri_model_follower *f, half *h)
{
    peri_model *m;
    const int64_t missing = peri__mapped_missing(&h->model->file);
    PERI_TRY(peri__model_open(h->model->path, f->flags, true, &m));
    peri_status status = PERI_OK;
    if (strcmp(m->digest, f->digest) != 0)
        status = peri__fail(PERI_EIO,
                            "peri_model_follower_poll: '%.200s' could not be read, and is another file by now",
                            m->path);
    if (status >= 0 && missing >= 0) (void)*(const volatile char *)(m->file.data + missing);
    if (status >= 0 && peri__mapped_cut(&m->file)) status = fail_unreadable_model(m);
    peri_model_release(status >= 0 ? h->model : m);
    if (status >= 0) *h = (half){.model = m};
    return status;
}

peri_status peri_model_follower_new(const char *path, const char *folder, const char *name, int32_t flags,
                                    peri_model_follower **out)
{
    PERI_NEED(path);
    PERI_NEED(folder);
    PERI_NEED(out);
    if (flags & ~(PERI_MODEL_VERIFY | PERI_MODEL_GUARD))
        return peri__fail(PERI_EINVAL,
                          "peri_model_follower_new: flags %d, allowed: PERI_MODEL_VERIFY | PERI_MODEL_GUARD", flags);
    if (name && strlen(name) > 200)
        return peri__fail(PERI_EINVAL, "peri_model_follower_new: a name of more than 200 bytes");
    peri_model_follower *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    peri__object_count(1);
    char prefix[256];
    snprintf(prefix, sizeof prefix, "%s%s", name ? name : "model", name && !*name ? "" : "/");
    peri_status status = (f->prefix = peri__strdup(prefix)) ? PERI_OK : PERI_ENOMEM;
    for (int i = 0; status >= 0 && i < 2; i++)
        status = peri__model_open(path, flags & (i ? PERI_MODEL_GUARD : ~0), true, &f->halves[i].model);
    if (status >= 0 && strcmp(f->halves[0].model->digest, f->halves[1].model->digest) != 0)
        status = peri__fail(PERI_EIO, "peri_model_follower_new: '%.200s' was replaced while it was opened", path);
    if (status >= 0) status = peri__model_can_follow(f->halves[0].model);
    if (status >= 0) snprintf(f->digest, sizeof f->digest, "%s", f->halves[0].model->digest);
    f->flags = flags;
    if (status >= 0) status = peri_checkpoint_follower_new(folder, &f->run);
    if (status < 0) peri_model_follower_release(f);
    else *out = f;
    return status;
}

void peri_model_follower_release(peri_model_follower *f)
{
    if (!f || peri__border_refuses(__func__)) return;
    peri_checkpoint_follower_release(f->run);
    for (int i = 0; i < 2; i++) peri_model_release(f->halves[i].model);
    peri__free(f->prefix);
    peri__free(f->path);
    peri__free(f);
    peri__object_count(-1);
}

peri_model *peri_model_follower_model(const peri_model_follower *f) { return f ? f->halves[f->now].model : NULL; }
const char *peri_model_follower_path(const peri_model_follower *f) { return f ? f->path : NULL; }

/** The number of what a half has in the chain of @c, -1: it is not there. */
static int64_t level_of(const peri_checkpoint *c, const half *h)
{
    int64_t level = *h->digest ? peri_checkpoint_level_of(c, h->digest) : -1;
    return level < 0 && *h->same_as ? peri_checkpoint_level_of(c, h->same_as) : level;
}

/** The model of half @h has the checkpoint that the half names. */
static void note(half *h, int64_t step)
{
    snprintf(h->model->digest, sizeof h->model->digest, "%s", h->digest);
    h->model->step = step;
    h->model->followed = true;
}

/** Bring half @h to what @c has. @damaged: what is wrong with it does not pass. */
static peri_status bring_half(peri_model_follower *f, half *h, peri_checkpoint *c, bool *damaged)
{
    bool begun = false;
    const int64_t level = level_of(c, h);
    peri_status status = peri_checkpoint_verify_since(c, level);
    if (status >= 0) status = peri__model_update(h->model, c, level, f->prefix, &begun);
    if (status >= 0 && lost(h)) status = fail_unreadable_model(h->model);
    *damaged = status == PERI_EFORMAT || status == PERI_EMISMATCH || status == PERI_ERANGE;
    if (status < 0) {
        if (begun) *h->digest = *h->same_as = 0;
        return status;
    }
    int64_t number, step;
    if (!peri__saver_name(peri_checkpoint_level(c, 0), &number, &step)) step = -1;
    snprintf(h->digest, sizeof h->digest, "%s", peri_checkpoint_digest(c));
    snprintf(h->same_as, sizeof h->same_as, "%s", peri_checkpoint_same_as(c));
    note(h, step);
    half *other = h == f->halves ? &f->halves[1] : f->halves;
    if (level < 0) *other->digest = *other->same_as = 0;
    return PERI_OK;
}

/** Make the half that does not answer ready for the next checkpoint: no page of it is missing, and it has what the
 *  other one has, if it has nothing of use. */
static peri_status prepare_half(peri_model_follower *f, half *next, const half *now)
{
    if (lost(next)) PERI_TRY(open_again(f, next));
    if (*next->digest || *next->same_as || !*now->digest || lost(now)) return PERI_OK;
    peri__model_copy(next->model, now->model);
    if (lost(now) || lost(next)) return open_again(f, next); /* some of the copy is zeros */
    memcpy(next->digest, now->digest, sizeof next->digest);
    memcpy(next->same_as, now->same_as, sizeof next->same_as);
    note(next, now->model->step);
    return PERI_OK;
}

/** The halves change places; @out: the model that answers from now on. */
static peri_status swap_halves(peri_model_follower *f, peri_model **out)
{
    f->now = !f->now;
    *out = f->halves[f->now].model;
    peri_model_retain(*out);
    return PERI_OK;
}

/** A checkpoint could not be read: it is tried again at the next look, then after 2, 4, ... */
static void postpone_checkpoint(peri_model_follower *f, const char *digest)
{
    f->looks = strcmp(f->unread, digest) == 0 ? peri__min(2 * f->looks, MOST_LOOKS) : 1;
    f->left = f->looks;
    snprintf(f->unread, sizeof f->unread, "%s", digest);
}

peri_status peri_model_follower_poll(peri_model_follower *f, peri_model **out)
{
    PERI_NEED(f);
    PERI_NEED(out);
    peri_checkpoint *c;
    int64_t level;
    bool damaged;
    half *next = &f->halves[!f->now], *now = &f->halves[f->now];
    /* somebody still uses it */
    if (atomic_load_explicit(&next->model->refs, memory_order_acquire) != 1) return PERI_PENDING;
    PERI_TRY(prepare_half(f, next, now));
    if (lost(now)) PERI_TRY(peri_checkpoint_follower_forget(f->run)); /* what it had is to be had again */
    peri_status status = peri_checkpoint_follower_next(f->run, &c, &level);
    if (status == PERI_PENDING && lost(now) && !now->model->followed) {
        PERI_TRY(open_again(f, next)); /* it may be a mixture */
        return swap_halves(f, out);
    }
    if (status != PERI_OK) return status;
    if (strcmp(f->unread, peri_checkpoint_digest(c)) == 0 && --f->left > 0) return PERI_PENDING;
    char *path = peri__strdup(peri_checkpoint_level(c, 0));
    if (!path) return PERI_ENOMEM;
    status = bring_half(f, next, c, &damaged);
    if (status < 0) {
        char why[PERI_MESSAGE_MAX];
        snprintf(why, sizeof why, "%s", peri_error_message());
        peri__free(path);
        if (status == PERI_EIO && !lost(next)) postpone_checkpoint(f, peri_checkpoint_digest(c));
        if (damaged) peri_checkpoint_follower_refuse(f->run);
        return peri__fail(status, "%s", why);
    }
    (void)peri_checkpoint_follower_take(f->run); /* it was offered, so it is taken */
    *f->unread = 0;
    peri__free(f->path);
    f->path = path;
    return swap_halves(f, out);
}
