/* SPDX-License-Identifier: Apache-2.0
 *
 * publish.c: the parts of all ranks become one manifest, and the folder gets its name: until then there is no
 * checkpoint.
 */
#include "../base/json.h"
#include "files.h"
#include "reader.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/** What text @part says: its file in @folder, in @path of PATH_MAX bytes. It is there. */
static peri_status find_part(const char *folder, const char *part, const char *what, char *path)
{
    char key[32], name[256] = "";
    int64_t bytes = -1;
    peri__json j;
    peri__json_open(&j, part, (int64_t)strlen(part), what);
    peri__json_enter(&j, '{');
    while (peri__json_key(&j, key, sizeof key)) {
        if (strcmp(key, "part") == 0) peri__json_text(&j, name, sizeof name);
        else if (strcmp(key, "bytes") == 0) bytes = peri__json_integer(&j);
        else peri__json_skip(&j, NULL, NULL);
    }
    PERI_TRY(peri__json_close(&j));
    if (strchr(name, '/') || !peri__is_saved(name) || bytes < 0)
        return peri__fail(PERI_EFORMAT, "%s: it is no text of peri_checkpoint_writer_part", what);
    PERI_TRY(peri__file_await(folder, name, bytes));
    return peri__path_join(folder, name, path);
}

/** The manifest of all ranks. */
static peri_status join(const char *folder, const char *const *parts, int32_t n, peri__manifest *m)
{
    char what[PERI_MESSAGE_MAX], path[PATH_MAX];
    for (int32_t r = 0; r < n; r++) {
        if (!parts[r]) return peri__fail(PERI_EINVAL, "peri_checkpoint_publish: part %d is missing", r);
        snprintf(what, sizeof what, "peri_checkpoint_publish: part %d", r);
        PERI_TRY(find_part(folder, parts[r], what, path));
        PERI_TRY(peri__manifest_read_file(m, AT_FDCWD, path, path, true, what));
    }
    snprintf(what, sizeof what, "checkpoint in '%.300s'", folder);
    PERI_TRY(peri__manifest_settle(m, what));
    for (int64_t f = 0; f < m->n_files; f++)
        PERI_TRY(peri__file_await(folder, peri__manifest_text(m, m->files[f].name), m->files[f].bytes));
    return PERI_OK;
}

/** Remove the files of the parts. */
static peri_status remove_parts(const char *folder, const char *const *parts, int32_t n)
{
    char path[PATH_MAX];
    for (int32_t r = 0; r < n; r++) {
        PERI_TRY(find_part(folder, parts[r], "peri_checkpoint_publish", path));
        if (unlink(path) == 0) continue;
        const int why = errno;
        return peri__fail(PERI_EIO, "checkpoint: removing '%.300s': %s", path, strerror(why));
    }
    return PERI_OK;
}

/** Write the manifest into the folder, under its name only when it is on the disk; the files of the parts go. */
static peri_status write_manifest(const char *folder, peri__manifest *m, const peri_checkpoint_config *config,
                                  const char *const *parts, int32_t n)
{
    char fresh[PATH_MAX], path[PATH_MAX];
    peri__growing file = {.path = fresh};
    PERI_TRY(peri__path_join(folder, PERI__MANIFEST ".new", fresh));
    PERI_TRY(peri__path_join(folder, PERI__MANIFEST, path));
    PERI_TRY(peri__file_create(fresh, &file.fd));
    peri_status status = peri__manifest_print(m, config, peri__growing_put, &file);
    peri_status end = peri__file_finish(file.fd, fresh);
    if (status >= 0) status = end;
    if (status >= 0 && rename(fresh, path) != 0) {
        int why = errno;
        status = peri__fail(PERI_EIO, "checkpoint: renaming '%.300s': %s", fresh, strerror(why));
    }
    if (status < 0) return unlink(fresh), status;
    PERI_TRY(remove_parts(folder, parts, n));
    return peri__folder_sync(folder);
}

/** Whether file @name of a checkpoint's folder is the checkpoint's. @m: NULL: its manifest is damaged. */
static bool is_its_own(const peri__manifest *m, const char *name)
{
    bool own = name[0] == '.' && (!name[1] || !strcmp(name, "..")); /* the folder itself, and the one that it is in */
    own = own || !strcmp(name, PERI__MANIFEST) || !strcmp(name, PERI__MANIFEST ".new");
    for (int64_t f = 0; m && !own && f < m->n_files; f++) own = !strcmp(name, peri__manifest_text(m, m->files[f].name));
    return own || (!m && peri__is_saved(name));
}

/** What else lies in the folder of a checkpoint that is to be replaced, row files of a table perhaps, would go with
 *  it. */
static peri_status only_its_own(const char *path)
{
    peri_checkpoint *c = NULL;
    DIR *d = opendir(path);
    int why = errno;
    if (!d) return peri__fail(PERI_EIO, "checkpoint: folder '%.300s': %s", path, strerror(why));
    const peri__manifest *m = peri_checkpoint_open_alone(path, &c) < 0 ? NULL : peri__checkpoint_manifest(c);
    peri_status status = PERI_OK;
    for (struct dirent *e; status >= 0 && (e = readdir(d));)
        if (!is_its_own(m, e->d_name))
            status = peri__fail(PERI_EINVAL,
                                "checkpoint: '%.200s' is not replaced: '%.200s' in it is no file of the checkpoint; "
                                "move it away, or take another name",
                                path, e->d_name);
    closedir(d);
    peri_checkpoint_release(c);
    return status;
}

/** Whether a checkpoint may get the path @path; one that is there must be one, since it is removed. @only: as for
 *  peri__checkpoint_publish. */
static peri_status replaceable(const char *path, bool replace, const peri_checkpoint_config *config, const char *only)
{
    char manifest[PATH_MAX], child[PATH_MAX];
    peri_checkpoint_info old = {.size = sizeof old};
    struct stat s;
    PERI_TRY(peri__checkpoint_name(path));
    if (lstat(path, &s) != 0) return PERI_OK;
    if (!replace)
        return peri__fail(PERI_EINVAL,
                          "checkpoint: '%.300s' is there already; remove it, take another name, or replace it (replace "
                          "= true; perilune checkpoint compact: --replace)",
                          path);
    if (S_ISLNK(s.st_mode))
        return peri__fail(
            PERI_EINVAL, "checkpoint: '%.300s' is a link, which is not replaced; give the path that it leads to", path);
    PERI_TRY(peri__path_join(path, PERI__MANIFEST, manifest));
    if (S_ISDIR(s.st_mode) && lstat(manifest, &s) == 0) {
        PERI_TRY(peri__checkpoint_child(path, child));
        const bool known = (config->same_as || config->parent || only) && peri_checkpoint_identify(path, &old) >= 0;
        if (only && strcmp(old.digest, only) != 0)
            return peri__fail(PERI_EINVAL,
                              "checkpoint: '%.300s' is not replaced: another checkpoint has been saved there since "
                              "this one was read; take another name",
                              path);
        if (known && config->parent &&
            (strcmp(old.digest, config->parent) == 0 || strcmp(old.same_as, config->parent) == 0))
            return peri__fail(
                PERI_EINVAL,
                "checkpoint: '%.300s' is not replaced: what is saved is an increment of it; take another name, and "
                "'perilune checkpoint compact' makes one of both, or save a full checkpoint",
                path);
        if (!*child || (known && config->same_as && strcmp(old.digest, config->same_as) == 0))
            return only_its_own(path);
        return peri__fail(PERI_EINVAL,
                          "checkpoint: '%.200s' is not replaced: '%.200s' is an increment of it; take another name",
                          path, child);
    }
    return peri__fail(
        PERI_EINVAL,
        "checkpoint: '%.300s' is there and is no checkpoint, so it is not replaced; remove it, or take another name",
        path);
}

peri_status peri_checkpoint_may_publish(const char *path, const peri_checkpoint_config *config, bool replace)
{
    static const peri_checkpoint_config nothing = {.size = sizeof nothing};
    PERI_NEED(path);
    if (!config) config = &nothing;
    PERI_TAKE(peri_checkpoint_config, config);
    return replaceable(path, replace, config, NULL);
}

peri_status peri__checkpoint_may_publish(const char *path, const peri_checkpoint_config *config, bool replace,
                                         const char *only)
{
    return replaceable(path, replace, config, only);
}

/** Whether a file lies in folder @path that is not the checkpoint's. */
static bool has_strange_files(const peri__manifest *m, const char *path)
{
    bool strange = false;
    DIR *d = opendir(path);
    for (struct dirent *e; d && !strange && (e = readdir(d));) strange = !is_its_own(m, e->d_name);
    if (d) closedir(d);
    return strange;
}

/** Remove what is in folder @path, which is open as @fd: the manifest first, so that what is half removed is no
 *  checkpoint. @file: what could not be removed. */
static peri_status remove_files(const peri__manifest *m, const char *path, int fd, char file[PATH_MAX])
{
    PERI_TRY(peri__path_join(path, PERI__MANIFEST, file));
    if (unlinkat(fd, PERI__MANIFEST, 0) != 0) return PERI_EIO;
    for (int64_t f = 0; f < m->n_files; f++) {
        const char *name = peri__manifest_text(m, m->files[f].name);
        PERI_TRY(peri__path_join(path, name, file));
        if (unlinkat(fd, name, 0) != 0 && errno != ENOENT) return PERI_EIO;
    }
    snprintf(file, PATH_MAX, "%s", path);
    return rmdir(path) == 0 ? PERI_OK : PERI_EIO;
}

/** Give checkpoint @c, open alone, whose path is @path, a name in @away that later saves sweep: nobody sees half of it
 *  while it is removed, also if this process is killed in the middle. An error if it is to stay. */
static peri_status take_away(const peri_checkpoint *c, const char *path, char away[PATH_MAX])
{
    char child[PATH_MAX];
    if (!peri__same_folder(path, peri__checkpoint_folder(c)))
        return peri__fail(PERI_EINVAL,
                          "checkpoint: '%.300s' is no folder but a file, or a link to a folder, so it is not removed",
                          path);
    if (!peri__checkpoint_alone(c))
        return peri__fail(PERI_EPEER, "checkpoint: '%.300s' is open elsewhere, so it is not removed", path);
    PERI_TRY(peri__checkpoint_child(path, child));
    if (*child)
        return peri__fail(PERI_EPEER, "checkpoint: '%.200s' is not removed: '%.200s' is an increment of it", path,
                          child);
    if (peri__is_saving(path)) snprintf(away, PATH_MAX, "%s", path);
    else PERI_TRY(peri__saving_name(path, away));
    if (peri__is_saving(path) || rename(path, away) == 0) return PERI_OK;
    const int why = errno;
    return peri__fail(PERI_EIO, "checkpoint: removing '%.300s': %s", path, strerror(why));
}

peri_status peri_checkpoint_remove(const char *given)
{
    char path[PATH_MAX], away[PATH_MAX], file[PATH_MAX];
    peri_checkpoint *c;
    int lock;
    PERI_NEED(given);
    size_t n = strlen(given);
    while (n > 1 && given[n - 1] == '/') n--;
    if (n >= sizeof path) return peri__fail(PERI_EINVAL, "peri_checkpoint_remove: a path of %zu bytes", n);
    snprintf(path, sizeof path, "%.*s", (int)n, given);
    PERI_TRY(peri__names_lock(path, &lock));
    peri_status status = peri_checkpoint_open_alone(path, &c);
    if (status < 0) return close(lock), status;
    const int fd = peri__checkpoint_folder(c);
    status = take_away(c, path, away);
    close(lock);
    if (status >= 0 && (status = remove_files(peri__checkpoint_manifest(c), away, fd, file)) == PERI_EIO) {
        int why = errno;
        const bool whole = faccessat(fd, PERI__MANIFEST, F_OK, 0) == 0;
        const bool strange =
            (why == ENOTEMPTY || why == EEXIST) && has_strange_files(peri__checkpoint_manifest(c), away);
        /* Whole as it was, it gets its name again, and so does a folder with files that it does not know. Else the next
         * save removes what is left. */
        if ((strange || whole) && !peri__is_saving(path)) rename(away, path);
        status =
            peri__fail(PERI_EIO, "checkpoint: removing '%.300s': %s%s", strcmp(file, away) ? file : path, strerror(why),
                       strange ? ": it has files that are not of the checkpoint" : "");
    }
    peri_checkpoint_release(c);
    return status;
}

static bool lacks_renameat2(int why) { return why == EINVAL || why == ENOSYS || why == EPERM || why == EACCES; }

/** Give @folder the name @path. @replaces: whether a checkpoint of that name was there, which is now at @folder. */
static peri_status take_name(const char *folder, const char *path, bool replace, const peri_checkpoint_config *config,
                             const char *only, bool *replaces)
{
    *replaces = false;
    if (config->parent) PERI_TRY(peri__checkpoint_needs(path, config->parent));
    if (renameat2(AT_FDCWD, folder, AT_FDCWD, path, RENAME_NOREPLACE) == 0) return PERI_OK;
    int why = errno;
    const bool there = access(path, F_OK) == 0;
    /* A file system or a sandbox without it: rename never replaces a folder that has files. */
    if (lacks_renameat2(why) && !there) {
        if (rename(folder, path) == 0) return PERI_OK;
        why = errno;
    }
    if (why != EEXIST && why != ENOTEMPTY && !there)
        return peri__fail(PERI_EIO, "checkpoint: renaming '%.200s' to '%.200s': %s", folder, path, strerror(why));
    PERI_TRY(replaceable(path, replace, config, only));
    *replaces = true;
    if (renameat2(AT_FDCWD, folder, AT_FDCWD, path, RENAME_EXCHANGE) == 0) return PERI_OK;
    why = errno;
    return peri__fail(PERI_EIO, "checkpoint: exchanging '%.200s' for '%.200s': %s%s", path, folder, strerror(why),
                      lacks_renameat2(why) ? "; this file system cannot replace a checkpoint: save under another name "
                                             "(perilune checkpoint compact: -o PATH)"
                                           : "");
}

/** Give @folder its name, and sync that. Where it cannot be synced, the save has failed, and all is as it was. */
static peri_status take_synced_name(const char *folder, const char *path, bool replace,
                                    const peri_checkpoint_config *config, const char *only, bool *replaces)
{
    char parent[PATH_MAX];
    PERI_TRY(take_name(folder, path, replace, config, only, replaces));
    peri__parent_of(path, parent);
    peri_status status = peri__folder_sync(parent);
    if (status >= 0) return PERI_OK;
    char text[PERI_MESSAGE_MAX];
    const int undone = *replaces ? renameat2(AT_FDCWD, folder, AT_FDCWD, path, RENAME_EXCHANGE) : rename(path, folder);
    const int why = errno;
    snprintf(text, sizeof text, "%s", peri_error_message());
    return undone == 0 ? status
                       : peri__fail(status,
                                    "%s; and '%.300s' has its new name, which could not be taken back (%s): it is "
                                    "whole, but a power failure may undo it",
                                    text, path, strerror(why));
}

/** Give @folder its name. An old checkpoint of that name is whole until the new name is on the disk, and removed
 *  afterwards. */
static peri_status give_name(const char *folder, const char *path, bool replace, const peri_checkpoint_config *config,
                             const char *only)
{
    bool replaces;
    int lock;
    PERI_TRY(peri__names_lock(path, &lock));
    peri_status status = take_synced_name(folder, path, replace, config, only, &replaces);
    close(lock);
    if (status < 0) return status;
    /* The new one is there: what is left of the old one is no error. If somebody reads it, a later save sweeps it. */
    if (replaces && peri_checkpoint_remove(folder) < 0 && peri_error_status() != PERI_EPEER)
        peri__log(PERI_LOG_WARN, "checkpoint: '%s' was replaced; the old one stays as '%s': %s", path, folder,
                  peri_error_message());
    return PERI_OK;
}

/** PERI_EINVAL unless @text is one JSON value. */
static peri_status check_values(const char *text)
{
    peri__json j;
    peri__json_open(&j, text, (int64_t)strlen(text), "peri_checkpoint_publish: values");
    peri__json_skip(&j, NULL, NULL);
    return peri__json_close(&j) < 0 ? PERI_EINVAL : PERI_OK;
}

static peri_status check_digest(const char *what, const char *text)
{
    if (!text || (strlen(text) == PERI_CHECKPOINT_DIGEST && strspn(text, "0123456789abcdef") == PERI_CHECKPOINT_DIGEST))
        return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_checkpoint_publish: %s '%.40s' is no digest (%d hexadecimal digits)", what,
                      text, PERI_CHECKPOINT_DIGEST);
}

/** Whole tensors only, where there is no parent that has the rest. */
static peri_status check_rows(const peri__manifest *m, const peri_checkpoint_config *config)
{
    for (int64_t k = 0; k < m->n_pieces && !config->parent; k++)
        if (m->pieces[k].rows)
            return peri__fail(PERI_EINVAL, "peri_checkpoint_publish: some rows of a tensor, and no parent");
    return PERI_OK;
}

static const peri_checkpoint_config nothing = {.size = sizeof nothing};

/** peri_checkpoint_publish. @same_as_parent, @only: as for peri__checkpoint_publish. */
static peri_status publish(const char *folder, const char *path, const char *const *parts, int32_t n,
                           const peri_checkpoint_config *config, const char *same_as_parent, bool replace,
                           const char *only, char digest[PERI_CHECKPOINT_DIGEST + 1])
{
    peri__manifest m = {0};
    snprintf(m.same_as_parent, sizeof m.same_as_parent, "%s", same_as_parent);
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_checkpoint_publish: %d parts, allowed: 1 or more", n);
    if (config->values) PERI_TRY(check_values(config->values));
    PERI_TRY(check_digest("parent", config->parent));
    PERI_TRY(check_digest("same_as", config->same_as));
    if (config->increment < (config->parent != NULL) || (config->parent && config->same_as))
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_publish: increment %lld, with%s a parent and with%s same_as; allowed: 1 or "
                          "more with a parent "
                          "and without same_as, 0 or more without a parent",
                          (long long)config->increment, config->parent ? "" : "out", config->same_as ? "" : "out");
    peri_status status = replaceable(path, replace, config, only);
    if (status >= 0) status = join(folder, parts, n, &m);
    if (status >= 0) status = check_rows(&m, config);
    if (status >= 0) status = write_manifest(folder, &m, config, parts, n);
    char own[PERI_CHECKPOINT_DIGEST + 1];
    memcpy(own, m.digest, sizeof own);
    peri__manifest_fini(&m); /* before the manifest of a checkpoint that is replaced is read */
    if (status >= 0) status = give_name(folder, path, replace, config, only);
    if (status >= 0) memcpy(digest, own, sizeof own);
    return status;
}

peri_status peri_checkpoint_publish(const char *folder, const char *path, const char *const *parts, int32_t n,
                                    const peri_checkpoint_config *config, bool replace,
                                    char digest[PERI_CHECKPOINT_DIGEST + 1])
{
    PERI_NEED(folder);
    PERI_NEED(path);
    PERI_NEED(parts);
    PERI_NEED(digest);
    if (!config) config = &nothing;
    PERI_TAKE(peri_checkpoint_config, config);
    return publish(folder, path, parts, n, config, "", replace, NULL, digest);
}

peri_status peri__checkpoint_publish(const char *folder, const char *path, const char *part,
                                     const peri_checkpoint_config *config, const char *same_as_parent, bool replace,
                                     const char *only, char digest[PERI_CHECKPOINT_DIGEST + 1])
{
    return publish(folder, path, &part, 1, config, same_as_parent, replace, only, digest);
}

/* -- by a thread of its own ---------------------------------------------------------------------------------------- */

struct peri_checkpoint_publishing {
    pthread_t thread;
    char *folder, *path, **parts, *values, *parent, *same_as;
    int32_t n;
    peri_checkpoint_config config;
    int32_t forks; /* peri__forks of the process that has the thread */
    bool replace, started;
    atomic_bool done;
    peri_status status;
    char digest[PERI_CHECKPOINT_DIGEST + 1], message[PERI_MESSAGE_MAX];
};

static void *publish_beside(void *context)
{
    peri_checkpoint_publishing *p = context;
    p->status = publish(p->folder, p->path, (const char *const *)p->parts, p->n, &p->config, "", p->replace, NULL,
                        p->digest);
    if (p->status < 0) snprintf(p->message, sizeof p->message, "%s", peri_error_message());
    atomic_store(&p->done, true);
    return NULL;
}

/** A copy of @text, which may be NULL, in @out; whether there was memory. */
static bool copied(const char *text, char **out) { return !text || (*out = peri__strdup(text)) != NULL; }

peri_status peri_checkpoint_publishing_new(const char *folder, const char *path, const char *const *parts, int32_t n,
                                           const peri_checkpoint_config *config, bool replace,
                                           peri_checkpoint_publishing **out)
{
    PERI_NEED(folder);
    PERI_NEED(path);
    PERI_NEED(parts);
    PERI_NEED(out);
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_checkpoint_publishing_new: %d parts, allowed: 1 or more", n);
    if (!config) config = &nothing;
    PERI_TAKE(peri_checkpoint_config, config);
    peri_checkpoint_publishing *p = peri__alloc_zero(sizeof *p);
    if (!p) return PERI_ENOMEM;
    peri__object_count(1);
    p->forks = peri__forks();
    p->config = *config;
    p->replace = replace;
    p->parts = peri__alloc_zero((size_t)n * sizeof *p->parts);
    bool whole = p->parts && copied(folder, &p->folder) && copied(path, &p->path) &&
                 copied(p->config.values, &p->values) && copied(p->config.parent, &p->parent) &&
                 copied(p->config.same_as, &p->same_as);
    for (; whole && p->n < n; p->n++) whole = copied(parts[p->n], &p->parts[p->n]);
    p->config.values = p->values;
    p->config.parent = p->parent;
    p->config.same_as = p->same_as;
    const int why = whole ? peri__thread_start(&p->thread, publish_beside, p) : 0;
    p->started = whole && !why;
    if (!p->started) {
        peri_checkpoint_publishing_release(p);
        return whole ? peri__fail(PERI_EIO, "checkpoint: no thread for publishing: %s", strerror(why)) : PERI_ENOMEM;
    }
    *out = p;
    return PERI_OK;
}

peri_status peri_checkpoint_publishing_test(peri_checkpoint_publishing *p, char digest[PERI_CHECKPOINT_DIGEST + 1])
{
    PERI_NEED(p);
    PERI_NEED(digest);
    if (p->forks != peri__forks())
        return peri__fail(PERI_EUNSUPPORTED,
                          "peri_checkpoint_publishing_test: the process that this one was forked from publishes");
    if (!atomic_load(&p->done)) return PERI_PENDING;
    if (p->status < 0) return peri__fail(p->status, "%s", p->message);
    memcpy(digest, p->digest, sizeof p->digest);
    return PERI_OK;
}

void peri_checkpoint_publishing_release(peri_checkpoint_publishing *p)
{
    if (!p || peri__border_refuses(__func__)) return;
    peri__object_count(-1);
    if (p->forks != peri__forks()) return; /* a child of fork: the parent's thread has it */
    if (p->started) pthread_join(p->thread, NULL);
    for (int32_t i = 0; i < p->n; i++) peri__free(p->parts[i]);
    char *const texts[] = {p->folder, p->path, p->values, p->parent, p->same_as};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) peri__free(texts[i]);
    peri__free(p->parts);
    peri__free(p);
}
