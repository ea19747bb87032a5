/* SPDX-License-Identifier: Apache-2.0
 *
 * chain.c: chains of increments: who names whom as its parent. A parent is found by its digest among the checkpoints of
 * the same folder, whatever their names are. The numbers of increments fall by one from each to its parent, so no chain
 * has a circle.
 */
#include "../base/json.h"
#include "files.h"
#include "reader.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* -- who a checkpoint is ------------------------------------------------------------------------------------------- */

/** The keys before "values": of what a stranger wrote, what cannot be read is not there. @before: see
 *  peri__checkpoint_identify. */
static void read_head(const char *text, int64_t bytes, peri_checkpoint_info *out, char *before)
{
    peri__json j;
    char key[64];
    peri__json_open(&j, text, bytes, "");
    peri__json_enter(&j, '{');
    while (peri__json_key(&j, key, sizeof key) && strcmp(key, "values") != 0 && strcmp(key, "files") != 0) {
        if (strcmp(key, "parent") == 0 && !peri__json_null(&j)) peri__json_text(&j, out->parent, sizeof out->parent);
        else if (strcmp(key, "same_as") == 0) peri__json_text(&j, out->same_as, sizeof out->same_as);
        else if (strcmp(key, "same_as_parent") == 0) peri__json_text(&j, before, PERI_CHECKPOINT_DIGEST + 1);
        else if (strcmp(key, "increment") == 0) out->increment = peri__json_integer(&j);
        else if (strcmp(key, "parent") != 0) peri__json_skip(&j, NULL, NULL);
    }
    if (*out->parent && !peri__is_digest(out->parent)) *out->parent = 0;
    if (*out->same_as && !peri__is_digest(out->same_as)) *out->same_as = 0;
    if (!*out->same_as || !peri__is_digest(before)) *before = 0;
    if (*out->parent) snprintf(before, PERI_CHECKPOINT_DIGEST + 1, "%s", out->parent);
}

peri_status peri__checkpoint_identify(const char *path, peri_checkpoint_info *out,
                                      char before[PERI_CHECKPOINT_DIGEST + 1])
{
    enum { HEAD = 1024, END = PERI_CHECKPOINT_DIGEST + 3 }; /* the digits, a quote, a brace and a line feed */
    char file[PATH_MAX], head[HEAD + 1], end[END + 1] = "";
    struct stat s;
    *out = (peri_checkpoint_info){0};
    *before = 0;
    PERI_TRY(peri__path_join(path, PERI__MANIFEST, file));
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int why = errno;
    if (fd < 0)
        return peri__fail(peri__status_of_errno(why), "checkpoint '%.300s': %s", path,
                          strerror(why));
    int64_t n = 0, last = 0;
    why = fstat(fd, &s) == 0 ? 0 : errno;
    if (!why && S_ISREG(s.st_mode) && s.st_size > END) {
        /* Half of a head would make an increment a full checkpoint, and what it is an increment of could be removed. */
        const int64_t head_bytes = peri__min(HEAD, s.st_size);
        n = peri__read_at(fd, head, head_bytes, 0);
        if (n < head_bytes) why = errno;
        else if ((last = peri__read_at(fd, end, END, s.st_size - END)) < END) why = errno;
    }
    close(fd);
    if (why) return peri__fail(PERI_EIO, "checkpoint '%.300s': reading its manifest: %s", path, strerror(why));
    if (last == END) {
        head[n] = 0;
        memcpy(out->digest, end, PERI_CHECKPOINT_DIGEST);
    }
    if (!peri__is_digest(out->digest))
        return peri__fail(PERI_EFORMAT,
                          "checkpoint '%.300s': its manifest does not end with its checksum: it is cut short", path);
    const peri_checkpoint_info quiet = *out;
    read_head(head, n, out, before);
    memcpy(out->digest, quiet.digest, sizeof quiet.digest);
    return PERI_OK;
}

/** What the head and the end of the manifest in folder @path say. */
static peri_status identify(const char *path, peri_checkpoint_info *out)
{
    char before[PERI_CHECKPOINT_DIGEST + 1];
    return peri__checkpoint_identify(path, out, before);
}

peri_status peri_checkpoint_identify(const char *path, peri_checkpoint_info *out)
{
    PERI_NEED(path);
    PERI_NEED(out);
    peri_checkpoint_info now;
    PERI_TRY(identify(path, &now));
    return PERI_GIVE(peri_checkpoint_info, out, &now);
}

/* -- the checkpoints of a folder ----------------------------------------------------------------------------------- */

typedef struct sibling {
    char *path;
    peri_checkpoint_info is;
} sibling;

typedef struct siblings {
    sibling *list;
    int64_t n, room;
    char folder[PATH_MAX];
} siblings;

static void siblings_fini(siblings *s)
{
    for (int64_t i = 0; i < s->n; i++) peri__free(s->list[i].path);
    peri__free(s->list);
}

/** The folder in which @path lies. */
static void folder_of(const char *path, char folder[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    if (!slash) snprintf(folder, PATH_MAX, ".");
    else snprintf(folder, PATH_MAX, "%.*s", (int)peri__max(slash - path, 1), path);
}

/** All checkpoints that lie in the folder in which @path lies, in the order of their names. Damaged ones are left out;
 *  one that cannot be read now, which may be good, is an error if @all are wanted, or if this process lacks memory or
 *  descriptors for it. */
static peri_status siblings_of(const char *path, bool all, siblings *s)
{
    char *names;
    folder_of(path, s->folder);
    PERI_TRY(peri_checkpoint_names(s->folder, &names));
    peri_status status = PERI_OK;
    for (char *name = names, *end; status >= 0 && (end = strchr(name, '\n')); name = end + 1) {
        char full[PATH_MAX];
        peri_checkpoint_info is;
        *end = 0;
        if (peri__path_join(s->folder, name, full) < 0) continue;
        status = identify(full, &is);
        if (status == PERI_EFORMAT || status == PERI_ENOTFOUND || (status < 0 && status != PERI_ENOMEM && !all)) {
            status = PERI_OK;
            continue;
        }
        if (status < 0) {
            char why[512];
            snprintf(why, sizeof why, "%s", peri_error_message());
            if (all) status = peri__fail(status, "%s; it may be an increment of another one in the folder", why);
            break;
        }
        status = peri__grow((void **)&s->list, &s->room, s->n + 1, sizeof *s->list);
        if (status < 0) break;
        s->list[s->n] = (sibling){.path = peri__strdup(full), .is = is};
        if (!s->list[s->n].path) status = PERI_ENOMEM;
        else s->n++;
    }
    peri_checkpoint_names_release(names);
    return status;
}

/** Who is the checkpoint of @digest, or stands for it; a full one rather than an increment. NULL: nobody. */
static const sibling *find(const siblings *s, const char *digest)
{
    const sibling *found = NULL;
    for (int64_t i = 0; i < s->n; i++) {
        const peri_checkpoint_info *is = &s->list[i].is;
        if (strcmp(is->digest, digest) != 0 && strcmp(is->same_as, digest) != 0) continue;
        if (!*is->parent) return &s->list[i];
        if (!found) found = &s->list[i];
    }
    return found;
}

/** The path without slashes at its end. */
static peri_status trimmed(const char *path, char out[PATH_MAX])
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    if (n >= PATH_MAX) return peri__fail(PERI_EINVAL, "checkpoint: a path of %zu bytes", n);
    memcpy(out, path, n);
    out[n] = 0;
    return PERI_OK;
}

/** Whether both paths lead to one folder, by a link perhaps. */
static bool one_folder(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

peri_status peri__checkpoint_child(const char *given, char *child)
{
    char path[PATH_MAX];
    siblings s = {0};
    peri_checkpoint_info own;
    *child = 0;
    PERI_TRY(trimmed(given, path));
    peri_status status = identify(path, &own);
    if (status == PERI_EFORMAT) return PERI_OK; /* damaged: nobody can read an increment of it */
    if (status >= 0) status = siblings_of(path, true, &s);
    for (int64_t i = 0; status >= 0 && i < s.n && !*child; i++) {
        const char *parent = s.list[i].is.parent;
        bool of_this = *parent && (strcmp(parent, own.digest) == 0 || strcmp(parent, own.same_as) == 0), other = false;
        for (int64_t k = 0; of_this && k < s.n; k++) /* a copy of this one would do as well */
            other = other || ((strcmp(s.list[k].is.digest, parent) == 0 || strcmp(s.list[k].is.same_as, parent) == 0) &&
                              !one_folder(s.list[k].path, path));
        if (of_this && !other) snprintf(child, PATH_MAX, "%s", s.list[i].path);
    }
    siblings_fini(&s);
    return status;
}

peri_status peri__checkpoint_needs(const char *path, const char *digest)
{
    char folder[PATH_MAX], full[PATH_MAX], *names;
    bool found = false;
    folder_of(path, folder);
    PERI_TRY(peri_checkpoint_names(folder, &names));
    peri_status status = PERI_OK;
    /* From the last name to the first: of a chain of 1,000 increments the parent is most often the last one. */
    for (char *end = names + strlen(names), *name; status >= 0 && !found && end > names; end = name) {
        peri_checkpoint_info is;
        *--end = 0; /* the line feed behind the name */
        for (name = end; name > names && name[-1] != '\n';) name--;
        if (peri__path_join(folder, name, full) < 0) continue;
        if (identify(full, &is) >= 0) found = strcmp(is.digest, digest) == 0 || strcmp(is.same_as, digest) == 0;
        else if (peri_error_status() == PERI_ENOMEM) status = PERI_ENOMEM;
    }
    peri_checkpoint_names_release(names);
    if (status < 0 || found) return status;
    return peri__fail(PERI_ENOTFOUND,
                      "checkpoint: '%.200s' is not saved: what it is an increment of, checkpoint %s, is not in "
                      "folder '%.200s' any more: it was replaced or removed while this one was written",
                      path, digest, folder);
}

/* -- opening chains ------------------------------------------------------------------------------------------------ */

/** @parent is what @c is an increment of: the number before, and all tensors of which @c has some rows only, in the
 *  same form. */
static peri_status check_parent(const peri_checkpoint *c, const peri_checkpoint *parent)
{
    if (strcmp(parent->m.digest, c->m.parent) != 0 && strcmp(parent->m.same_as, c->m.parent) != 0)
        return peri__fail(PERI_EFORMAT,
                          "checkpoint '%.200s' is an increment of checkpoint %s; '%.200s' is checkpoint %s", c->folder,
                          c->m.parent, parent->folder, parent->m.digest);
    if (parent->m.increment != c->m.increment - 1)
        return peri__fail(
            PERI_EFORMAT,
            "checkpoint '%.200s' is increment %lld of its chain, and its parent '%.200s' increment %lld: out of order",
            c->folder, (long long)c->m.increment, parent->folder, (long long)parent->m.increment);
    for (int64_t i = 0; i < c->m.n_entries; i++) {
        const peri__entry *e = &c->m.entries[i], *p;
        bool some = false;
        for (int64_t k = e->first_piece; k < e->first_piece + e->n_pieces; k++) some = some || c->m.pieces[k].rows;
        if (!some) continue;
        p = peri__entry_named(&parent->m, peri__entry_name(&c->m, e));
        if (p && p->dtype == e->dtype && p->ndim == e->ndim &&
            memcmp(peri__entry_shape(&parent->m, p), peri__entry_shape(&c->m, e), (size_t)e->ndim * sizeof(int64_t)) ==
                0)
            continue;
        return peri__fail(
            PERI_EFORMAT, "checkpoint '%.200s' has some rows of tensor '%.150s', which its parent '%.200s' %s",
            c->folder, peri__entry_name(&c->m, e), parent->folder, p ? "has in another form" : "does not have");
    }
    return PERI_OK;
}

/** A chain has a descriptor open for each of its checkpoints. */
static void allow_descriptors(int64_t levels)
{
    struct rlimit r;
    const rlim_t want = (rlim_t)(levels + 512);
    if (levels < 256 || getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur >= want) return;
    r.rlim_cur = peri__min(want, r.rlim_max);
    (void)setrlimit(RLIMIT_NOFILE, &r); /* else opening fails in words */
}

/** @parent, opened for @c, which says everything but rows by itself. */
static void adopt(peri_checkpoint *c, peri_checkpoint *parent)
{
    parent->inner = true;
    parent->tools = c->tools;
    c->parent = parent;
}

/** Open what increment @c, at @given, is an increment of, and so on. Files that come late are waited for until
 *  @until. */
static peri_status open_parents(peri_checkpoint *c, const char *given, int64_t until)
{
    char path[PATH_MAX], what[PERI_MESSAGE_MAX];
    siblings s = {0};
    if (!*c->m.parent) return PERI_OK;
    PERI_TRY(trimmed(given, path));
    allow_descriptors(c->m.increment);
    peri_status status = siblings_of(path, false, &s);
    for (peri_checkpoint *last = c, *parent; status >= 0 && *last->m.parent; last = parent) {
        const sibling *found = find(&s, last->m.parent);
        if (!found) {
            status = peri__fail(PERI_ENOTFOUND,
                                "checkpoint '%.200s' is increment %lld of a chain, and what it is an increment of is "
                                "missing: checkpoint "
                                "%s (%s) is not in folder '%.200s'",
                                last->folder, (long long)last->m.increment, last->m.parent,
                                last->m.increment == 1 ? "the full one" : "the increment before it", s.folder);
            break;
        }
        snprintf(what, sizeof what, "checkpoint '%.200s': what it is an increment of, '%.200s'", given, found->path);
        status = peri__checkpoint_open_alone(found->path, what, until, &parent);
        if (status < 0) break;
        adopt(last, parent);
        peri__free(parent->m.values); /* those of 30,000 tables are 4 MB, and nobody asks for a parent's */
        parent->m.values = NULL;
        status = check_parent(last, parent);
        if (status >= 0 && last->inner) status = peri__manifest_fold(&last->m);
        if (status >= 0 && !*parent->m.parent) status = peri__manifest_fold(&parent->m);
    }
    siblings_fini(&s);
    return status;
}

/** Open @path and what it is an increment of. Files that come late are waited for until @until. */
static peri_status open_whole(const char *path, int64_t until, peri_checkpoint **out)
{
    peri_checkpoint *c;
    char what[PERI_MESSAGE_MAX];
    snprintf(what, sizeof what, "checkpoint '%.300s'", path);
    PERI_TRY(peri__checkpoint_open_alone(path, what, until, &c));
    peri_status status = open_parents(c, path, until);
    if (status < 0) peri_checkpoint_release(c);
    else *out = c;
    return status;
}

peri_status peri_checkpoint_open(const char *path, peri_checkpoint **out)
{
    PERI__NOT_AT_BORDER;
    PERI_NEED(path);
    PERI_NEED(out);
    return open_whole(path, 0, out);
}

peri_status peri_checkpoint_open_late(const char *path, double seconds, peri_checkpoint **out)
{
    PERI__NOT_AT_BORDER;
    PERI_NEED(path);
    PERI_NEED(out);
    if (!(seconds >= 0 && seconds <= 86400))
        return peri__fail(PERI_EINVAL, "peri_checkpoint_open_late: %g seconds, allowed: 0 to 86400", seconds);
    return open_whole(path, peri_time_ns() + (int64_t)(seconds * 1e9), out);
}

/** Checkpoint @i of a list, on top of the chain @below. */
static peri_status open_on(const char *const *paths, int32_t i, peri_checkpoint *below, peri_checkpoint **out)
{
    peri_checkpoint *c;
    PERI_TRY(peri_checkpoint_open_alone(paths[i], &c));
    peri_status status = PERI_OK;
    int32_t at = i - 1;
    for (const peri_checkpoint *b = below; b && status >= 0; b = b->parent, at--)
        if (strcmp(b->m.digest, c->m.digest) == 0)
            status = peri__fail(
                PERI_EINVAL,
                "peri_checkpoint_open_chain: '%.200s' is there twice: checkpoint %d of the list, '%.200s', is the same",
                paths[i], at + 1, paths[at]);
    if (status >= 0 && !below && *c->m.parent)
        status = peri__fail(PERI_EINVAL,
                            "peri_checkpoint_open_chain: the list begins with '%.200s', which is an increment of "
                            "checkpoint %s; that one "
                            "is missing in front of it",
                            paths[i], c->m.parent);
    if (status >= 0 && below && !*c->m.parent)
        status = peri__fail(PERI_EINVAL,
                            "peri_checkpoint_open_chain: '%.200s' is a full checkpoint: only the first of a list is",
                            paths[i]);
    if (status >= 0 && below && strcmp(c->m.parent, below->m.digest) != 0 && strcmp(c->m.parent, below->m.same_as) != 0)
        status = peri__fail(
            PERI_EINVAL,
            "peri_checkpoint_open_chain: '%.150s' (increment %lld) is an increment of checkpoint %s, and stands behind "
            "'%.150s' (increment %lld), which is %s: increments are missing, out of order, or of another run",
            paths[i], (long long)c->m.increment, c->m.parent, paths[i - 1], (long long)below->m.increment,
            below->m.digest);
    if (status >= 0 && below) status = check_parent(c, below);
    if (status >= 0 && below) status = peri__manifest_fold(&below->m);
    if (status < 0) {
        peri_checkpoint_release(c);
        return status;
    }
    if (below) adopt(c, below);
    *out = c;
    return PERI_OK;
}

peri_status peri_checkpoint_open_chain(const char *const *paths, int32_t n, peri_checkpoint **out)
{
    PERI_NEED(paths);
    PERI_NEED(out);
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_checkpoint_open_chain: %d paths, allowed: 1 or more", n);
    peri_checkpoint *c = NULL;
    allow_descriptors(n);
    for (int32_t i = 0; i < n; i++) {
        peri_checkpoint *next;
        if (!paths[i])
            return peri_checkpoint_release(c),
                   peri__fail(PERI_EINVAL, "peri_checkpoint_open_chain: path %d is missing", i);
        peri_status status = open_on(paths, i, c, &next);
        if (status < 0) {
            peri_checkpoint_release(c);
            return status;
        }
        c = next;
    }
    for (peri_checkpoint *p = c->parent; p; p = p->parent) p->tools = c->tools;
    *out = c;
    return PERI_OK;
}

int64_t peri_checkpoint_levels(const peri_checkpoint *c)
{
    int64_t n = 0;
    for (; c; c = c->parent) n++;
    return n;
}

int64_t peri_checkpoint_level_of(const peri_checkpoint *c, const char *digest)
{
    if (!digest || !*digest) return -1;
    for (int64_t level = 0; c; c = c->parent, level++)
        if (strcmp(c->m.digest, digest) == 0 || strcmp(c->m.same_as, digest) == 0) return level;
    return -1;
}

const char *peri_checkpoint_level(const peri_checkpoint *c, int64_t level)
{
    for (; c && level > 0; level--) c = c->parent;
    return c && level == 0 ? c->folder : NULL;
}
