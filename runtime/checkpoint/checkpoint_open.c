/* SPDX-License-Identifier: Apache-2.0
 *
 * checkpoint_open.c: opening checkpoints, and what their manifests say.
 */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

const peri__manifest *peri__checkpoint_manifest(const peri_checkpoint *c) { return &c->m; }
int peri__checkpoint_folder(const peri_checkpoint *c) { return c->dir; }

/* -- opening ------------------------------------------------------------------------------------------------------- */

void peri_checkpoint_release(peri_checkpoint *c)
{
    peri_checkpoint *parent;
    if (peri__border_refuses(__func__)) return;
    for (; c; c = parent) {
        parent = c->parent;
        peri__io_release(c->own.io);
        peri__shared_close(c->own.shared);
        for (int k = 0; k < 2; k++) peri__io_file_free(c->open[k]);
        if (c->dir >= 0) close(c->dir);
        peri__manifest_fini(&c->m);
        peri__formats_free(&c->formats);
        peri__free(c->folder);
        peri__free(c->own.buffer);
        peri__io_pages_free(c->own.ring, PERI__READ_RING);
        peri__free(c);
        peri__object_count(-1);
    }
}

/** Let nobody remove the open folder. Whoever saves or removes has it locked for a moment, which is waited for, at most
 *  a second. On file systems without locks it may be removed, which reading tells. */
static void lock_shared(int dir)
{
    const int64_t deadline = peri_time_ns() + 1000 * 1000 * 1000;
    while (flock(dir, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK && peri__look_again(deadline, 5)) {}
}

/** The manifest of a checkpoint, open. */
typedef struct manifest_file {
    int fd;
    const char *path;
} manifest_file;

static peri_status get_text(void *context, char *out, int64_t bytes, int64_t at)
{
    const manifest_file *f = context;
    return peri__file_get(f->fd, f->path, out, bytes, at);
}

peri_status peri__manifest_read_file(peri__manifest *m, int dir, const char *name, const char *path, bool part,
                                     const char *what)
{
    int64_t bytes;
    manifest_file f = {.path = path};
    PERI_TRY(peri__file_open(dir, name, path, PERI__CHECKPOINT_MOST, &f.fd, &bytes));
    peri_status status = peri__manifest_read(m, get_text, &f, bytes, part, what);
    close(f.fd);
    return status;
}

/** Read the manifest of the open folder @dir, whose path is @folder. */
static peri_status read_manifest(peri__manifest *m, int dir, const char *folder, const char *what)
{
    char path[PATH_MAX];
    PERI_TRY(peri__path_join(folder, PERI__MANIFEST, path));
    PERI_TRY(peri__manifest_read_file(m, dir, PERI__MANIFEST, path, false, what));
    return peri__manifest_settle(m, what);
}

/** Open and lock folder @path, and read its manifest. The path may get another folder at any moment: then that one is
 *  opened. */
static peri_status load_manifest(peri_checkpoint *c, const char *path, const char *what)
{
    for (;;) {
        if ((c->dir = peri__fd_of_ours(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC))) < 0) {
            int why = errno;
            return peri__fail(peri__status_of_errno(why), "%s: %s", what, strerror(why));
        }
        lock_shared(c->dir);
        peri_status status = read_manifest(&c->m, c->dir, path, what);
        if (status != PERI_ENOTFOUND) return status;
        struct stat opened, named;
        bool there = stat(path, &named) == 0;
        if (there && fstat(c->dir, &opened) == 0 && named.st_dev == opened.st_dev && named.st_ino == opened.st_ino)
            return peri__fail(PERI_EFORMAT,
                              "%s: it has no " PERI__MANIFEST
                              ": it is no checkpoint, or one that was not finished; of a "
                              "folder of checkpoints name one (perilune checkpoint ls)",
                              what);
        if (!there) return peri__fail(PERI_ENOTFOUND, "%s: it was removed", what);
        close(c->dir);
    }
}

/** File @name, which the manifest lists, is there with @bytes bytes. @late: the error may be gone a moment later, since
 *  the file is missing or is shorter, as it may be on a network file system. */
static peri_status check_file(const peri_checkpoint *c, const char *what, const char *name, int64_t bytes, bool *late)
{
    struct stat s;
    const int why = fstatat(c->dir, name, &s, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
    *late = why ? why == ENOENT || why == ESTALE : S_ISREG(s.st_mode) && s.st_size < bytes;
    if (why)
        return peri__fail(peri__status_of_errno(why), "%s: file '%.150s', which its manifest lists: %s", what, name,
                          strerror(why));
    if (!S_ISREG(s.st_mode)) return peri__fail(PERI_EFORMAT, "%s: '%.150s' is no regular file", what, name);
    if (s.st_size != bytes)
        return peri__fail(PERI_EFORMAT, "%s: file '%.150s' has %lld bytes, %lld are wanted", what, name,
                          (long long)s.st_size, (long long)bytes);
    return PERI_OK;
}

/** All files that the manifest lists are there, with the bytes that it says. Files that are late are waited for until
 *  @until (peri_time_ns), unless the folder is removed. */
static peri_status check_files(const peri_checkpoint *c, const char *what, int64_t until)
{
    bool told = false, late;
    for (int64_t f = 0; f < c->m.n_files; f++) {
        const char *name = peri__manifest_text(&c->m, c->m.files[f].name);
        peri_status status;
        while ((status = check_file(c, what, name, c->m.files[f].bytes, &late)) < 0) {
            const int64_t left = until - peri_time_ns();
            if (!late || left <= 0 || !peri__same_folder(c->folder, c->dir)) return status;
            if (!told)
                peri__log(PERI_LOG_WARN, "%s; it may come late, and is waited for, %.1f s at most",
                          peri_error_message(), (double)left / 1e9);
            told = true;
            peri__look_again(until, 50);
        }
    }
    return PERI_OK;
}

static peri_status open_folder(peri_checkpoint *c, const char *path, const char *what, int64_t until)
{
    if (!(c->folder = peri__strdup(path))) return PERI_ENOMEM;
    PERI_TRY(load_manifest(c, path, what));
    return check_files(c, what, until);
}

/** A safetensors file: 8 bytes, the header that they count, data. */
static peri_status open_file(peri_checkpoint *c, const char *path, const char *what)
{
    unsigned char count[8];
    struct stat s;
    uint64_t bytes = 0;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!(c->folder = peri__strdup(slash ? path : "."))) return PERI_ENOMEM;
    if (slash) c->folder[peri__max(slash - path, 1)] = 0; /* a file of the root folder keeps its '/' */
    /* It stays open as file 0: what has its name later is another file. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int why = errno;
    if (fd < 0) return peri__fail(peri__status_of_errno(why), "%s: %s", what, strerror(why));
    PERI_TRY(peri__io_file_new(fd, path, &c->open[0]));
    if (fstat(fd, &s) != 0) return peri__fail(PERI_EIO, "%s: it cannot be read", what);
    if (!S_ISREG(s.st_mode)) return peri__fail(PERI_EFORMAT, "%s: it is neither a folder nor a regular file", what);
    const int64_t file_bytes = s.st_size;
    c->file[0] = 0;
    peri_status status = peri__file_get(fd, path, count, 8, 0);
    for (int i = 0; i < 8; i++) bytes |= (uint64_t)count[i] << 8 * i;
    if (status >= 0 && !memcmp(count, "PERIMODL", 8))
        status = peri__fail(PERI_EFORMAT, "%s: a model file, wanted a checkpoint: it has no optimizer's states", what);
    if (status >= 0 && (bytes > (uint64_t)file_bytes - 8 || bytes > PERI__HEADER_MOST))
        status =
            peri__fail(PERI_EFORMAT, "%s: no safetensors file: its header would have %llu bytes, the file has %lld",
                       what, (unsigned long long)bytes, (long long)file_bytes);
    char *header = status < 0 ? NULL : peri__alloc((size_t)bytes + 1);
    if (status >= 0 && !header) status = PERI_ENOMEM;
    if (status >= 0) status = peri__file_get(fd, path, header, (int64_t)bytes, 8);
    if (status >= 0) status = peri__safetensors_parse(&c->m, name, file_bytes, header, (int64_t)bytes, what);
    if (status >= 0) status = peri__manifest_settle(&c->m, what);
    peri__free(header);
    return status;
}

/** What the errors of a damaged file are: the file is wrong, not the call. */
static peri_status as_format(peri_status status)
{
    char text[PERI_MESSAGE_MAX];
    if (status != PERI_EINVAL && status != PERI_EMISMATCH) return status;
    snprintf(text, sizeof text, "%s", peri_error_message());
    return peri__fail(PERI_EFORMAT, "%s", text);
}

peri_status peri__checkpoint_open_alone(const char *path, const char *what, int64_t until, peri_checkpoint **out)
{
    struct stat s;
    if (stat(path, &s) != 0) {
        int why = errno;
        return peri__fail(peri__status_of_errno(why), "%s: %s", what, strerror(why));
    }
    peri_checkpoint *c = peri__alloc_zero(sizeof *c);
    if (!c) return PERI_ENOMEM;
    peri__object_count(1);
    c->file[0] = c->file[1] = c->dir = -1;
    c->tools = &c->own;
    peri_status status = S_ISDIR(s.st_mode) ? open_folder(c, path, what, until) : open_file(c, path, what);
    if (status < 0) peri_checkpoint_release(c);
    else *out = c;
    return as_format(status);
}

peri_status peri_checkpoint_open_alone(const char *path, peri_checkpoint **out)
{
    char what[PERI_MESSAGE_MAX];
    PERI_NEED(path);
    PERI_NEED(out);
    snprintf(what, sizeof what, "checkpoint '%.300s'", path);
    return peri__checkpoint_open_alone(path, what, 0, out);
}

peri_status peri__checkpoint_unfold(peri_checkpoint *c, const char *name)
{
    char path[PATH_MAX], what[PERI_MESSAGE_MAX];
    if (peri__entry_named(&c->m, name)) return PERI_OK;
    PERI_TRY(peri__path_join(c->folder, PERI__MANIFEST, path));
    snprintf(what, sizeof what, "checkpoint '%.300s'", c->folder);
    manifest_file f = {.path = path, .fd = openat(c->dir, PERI__MANIFEST, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)};
    const int why = errno;
    if (f.fd < 0) return peri__fail(peri__status_of_errno(why), "%s: reading its manifest: %s", what, strerror(why));
    peri_status status = peri__manifest_unfold(&c->m, name, get_text, &f, what);
    close(f.fd);
    return as_format(status);
}

peri_status peri__checkpoint_unfold_all(peri_checkpoint *c)
{
    char what[PERI_MESSAGE_MAX];
    peri__manifest all = {0};
    snprintf(what, sizeof what, "checkpoint '%.300s'", c->folder);
    peri_status status = as_format(read_manifest(&all, c->dir, c->folder, what));
    if (status >= 0 && strcmp(all.digest, c->m.digest) != 0)
        status = peri__fail(PERI_EFORMAT, "%s: its manifest was replaced while it was open", what);
    if (status < 0) {
        peri__manifest_fini(&all);
        return status;
    }
    peri__manifest_fini(&c->m);
    c->m = all;
    return PERI_OK;
}

bool peri__checkpoint_alone(const peri_checkpoint *c)
{
    return c->dir < 0 || flock(c->dir, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

peri_status peri_checkpoint_share(peri_checkpoint *c, const char *name, int64_t processes)
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-";
    PERI_NEED(c);
    PERI_NEED(name);
    const size_t n = strlen(name);
    if (n < 1 || n > 64 || strspn(name, letters) != n)
        return peri__fail(PERI_EINVAL,
                          "peri_checkpoint_share: name '%.80s', allowed: 1 to 64 letters, digits and '-'", name);
    if (processes < 2)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_share: %lld processes, allowed: 2 or more",
                          (long long)processes);
    peri__shared_close(c->tools->shared);
    c->tools->shared = NULL;
    c->tools->sought = false;
    c->tools->processes = processes;
    memcpy(c->tools->meeting, name, n + 1);
    return PERI_OK;
}

/* -- what is in it ------------------------------------------------------------------------------------------------- */

int64_t peri_checkpoint_count(const peri_checkpoint *c) { return c ? c->m.n_entries : 0; }
const char *peri_checkpoint_digest(const peri_checkpoint *c) { return c ? c->m.digest : ""; }
const char *peri_checkpoint_parent(const peri_checkpoint *c) { return c ? c->m.parent : ""; }
const char *peri_checkpoint_same_as(const peri_checkpoint *c) { return c ? c->m.same_as : ""; }
int64_t peri_checkpoint_increment(const peri_checkpoint *c) { return c ? c->m.increment : 0; }
const char *peri_checkpoint_values(const peri_checkpoint *c) { return c && c->m.values ? c->m.values : "{}"; }

peri_status peri__entry_at(const peri_checkpoint *c, const char *function, int64_t index, const peri__entry **out)
{
    if (!c) return peri__fail(PERI_EINVAL, "%s: checkpoint is missing", function);
    if (index < 0 || index >= c->m.n_entries)
        return peri__fail(PERI_EINVAL, "%s: tensor %lld, allowed: 0 to %lld", function, (long long)index,
                          (long long)c->m.n_entries - 1);
    *out = &c->m.entries[index];
    return PERI_OK;
}

peri_status peri_checkpoint_tensor_at(const peri_checkpoint *c, int64_t index, peri_checkpoint_tensor *out)
{
    const peri__entry *e;
    PERI_NEED(out);
    PERI_TRY(peri__entry_at(c, "peri_checkpoint_tensor_at", index, &e));
    peri_checkpoint_tensor now = {
        .name = peri__entry_name(&c->m, e), .dtype = e->dtype, .ndim = e->ndim, .pieces = e->n_pieces};
    memcpy(now.shape, peri__entry_shape(&c->m, e), (size_t)e->ndim * sizeof *now.shape);
    return PERI_GIVE(peri_checkpoint_tensor, out, &now);
}

int64_t peri_checkpoint_find(const peri_checkpoint *c, const char *name)
{
    int64_t low = 0, high = c && name ? c->m.n_entries : 0;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        int order = strcmp(peri__entry_name(&c->m, &c->m.entries[middle]), name);
        if (order == 0) return middle;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

peri_status peri__piece_at(const peri_checkpoint *c, const char *function, int64_t index, int64_t piece,
                           const peri__entry **e, const peri__stored_piece **p)
{
    PERI_TRY(peri__entry_at(c, function, index, e));
    if (piece < 0 || piece >= (*e)->n_pieces)
        return peri__fail(PERI_EINVAL, "%s: piece %lld of '%.200s', allowed: 0 to %lld", function, (long long)piece,
                          peri__entry_name(&c->m, *e), (long long)(*e)->n_pieces - 1);
    *p = &c->m.pieces[(*e)->first_piece + piece];
    return PERI_OK;
}

peri_status peri_checkpoint_piece(const peri_checkpoint *c, int64_t index, int64_t piece,
                                  peri_checkpoint_region *region, peri_checkpoint_place *place)
{
    PERI__NOT_AT_BORDER;
    const peri__entry *e;
    const peri__stored_piece *p;
    PERI_TRY(peri__piece_at(c, "peri_checkpoint_piece", index, piece, &e, &p));
    if (region) {
        peri__region r;
        peri__piece_region(&c->m, e, p, &r);
        peri_checkpoint_region now = {.column = r.column, .columns = r.columns, .rows = r.rows, .listed = r.listed};
        memcpy(now.offset, r.offset, sizeof now.offset);
        memcpy(now.extent, r.size, sizeof now.extent);
        PERI_TRY(PERI_GIVE(peri_checkpoint_region, region, &now));
    }
    if (!place) return PERI_OK;
    const peri_checkpoint_place now = {.file = peri__manifest_text(&c->m, c->m.files[p->file].name),
                                       .begin = p->begin,
                                       .bytes = p->bytes,
                                       .checksum = p->checksum,
                                       .checked = p->checked};
    return PERI_GIVE(peri_checkpoint_place, place, &now);
}
