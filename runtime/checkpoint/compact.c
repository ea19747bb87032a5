/* SPDX-License-Identifier: Apache-2.0
 *
 * compact.c: a full checkpoint of a chain: every tensor is read through the chain in blocks, and written as a whole.
 */
#include "files.h"
#include "reader.h"

#include <sys/file.h>

/** The pieces of the last of the chain, without its lists. */
static peri_status announce(const peri_checkpoint *c, peri_checkpoint_writer *w)
{
    for (int64_t i = 0; i < c->m.n_entries; i++) {
        const peri__entry *e = &c->m.entries[i];
        peri_checkpoint_tensor t = {.size = sizeof t};
        PERI_TRY(peri_checkpoint_tensor_at(c, i, &t));
        if (peri__is_list(t.name)) continue;
        for (int64_t k = 0; k < e->n_pieces; k++) {
            peri__region region;
            peri__piece_region(&c->m, e, &c->m.pieces[e->first_piece + k], &region);
            region.rows = NULL;
            PERI_TRY(peri__writer_add(w, &t, &region));
        }
        if (e->n_pieces == 0) PERI_TRY(peri__writer_add(w, &t, &(peri__region){0}));
    }
    return PERI_OK;
}

/** Write rectangle @r of tensor @index in row-major order, cut along its first dimension of more than one index, and so
 *  on. @memory: PERI__IO_BLOCK bytes. */
static peri_status put(peri_checkpoint *c, int64_t index, const peri__region *r, peri_checkpoint_writer *w,
                       char *memory)
{
    const peri__entry *e = &c->m.entries[index];
    const int64_t bytes = peri__volume(e->ndim, r->size) * peri_dtype_size(e->dtype);
    int32_t d = 0;
    if (bytes == 0) return PERI_OK;
    if (bytes <= PERI__IO_BLOCK) {
        PERI_TRY(peri__checkpoint_read_host(c, index, r, memory));
        return peri_checkpoint_writer_put_bytes(w, memory, bytes);
    }
    while (r->size[d] == 1) d++;
    const int64_t step = peri__max(1, PERI__IO_BLOCK / (bytes / r->size[d]));
    for (int64_t i = 0; i < r->size[d]; i += step) {
        peri__region part = *r;
        part.offset[d] += i;
        part.size[d] = peri__min(step, r->size[d] - i);
        PERI_TRY(put(c, index, &part, w, memory));
    }
    return PERI_OK;
}

static peri_status write_all_pieces(peri_checkpoint *c, peri_checkpoint_writer *w, char *memory)
{
    for (int64_t i = 0; i < c->m.n_entries; i++) {
        const peri__entry *e = &c->m.entries[i];
        if (peri__is_list(peri__entry_name(&c->m, e))) continue;
        for (int64_t k = 0; k < e->n_pieces; k++) {
            peri__region region;
            peri__piece_region(&c->m, e, &c->m.pieces[e->first_piece + k], &region);
            region.rows = NULL;
            PERI_TRY(put(c, i, &region, w, memory));
        }
    }
    return peri_checkpoint_writer_finish(w);
}

/** Into folder @folder, which becomes @path. @only: as for peri__checkpoint_publish. */
static peri_status write(peri_checkpoint *c, const char *folder, const char *path, bool replace, const char *only,
                         char *digest)
{
    peri_checkpoint_writer *w;
    const peri_checkpoint_config config = {
        .size = sizeof config,
        .values = peri_checkpoint_values(c),
        .increment = c->m.increment,
        .same_as = c->m.digest};
    const char *part;
    char *memory = peri__alloc(PERI__IO_BLOCK);
    if (!memory) return PERI_ENOMEM;
    peri_status status = peri_checkpoint_writer_new(folder, "rank-0", 0, &w);
    if (status < 0) goto out;
    status = announce(c, w);
    if (status >= 0) status = write_all_pieces(c, w, memory);
    peri__free(memory);
    memory = NULL;
    if (status >= 0) status = peri_checkpoint_writer_part(w, &part);
    if (status >= 0) status = peri__checkpoint_publish(folder, path, part, &config, c->m.parent, replace, only, digest);
    peri_checkpoint_writer_release(w);
out:
    peri__free(memory);
    return status;
}

peri_status peri_checkpoint_compact(peri_checkpoint *c, const char *path, bool replace,
                                    char digest[PERI_CHECKPOINT_DIGEST + 1])
{
    peri_checkpoint_folder *folder;
    PERI_NEED(c);
    PERI_NEED(path);
    PERI_NEED(digest);
    if (!*c->m.parent)
        return peri__fail(PERI_EINVAL, "peri_checkpoint_compact: '%.300s' is no increment: it is whole by itself",
                          c->folder);
    if (!c->parent) return peri__fail(PERI_EINVAL, "peri_checkpoint_compact: '%.300s' was opened alone", c->folder);
    const peri_checkpoint_config config = {.size = sizeof config, .same_as = c->m.digest};
    /* Compacting takes long: what is saved at @path meanwhile is not what the caller wants replaced. */
    peri_checkpoint_info there = {.size = sizeof there};
    const bool known = strcmp(path, c->folder) != 0 && peri_checkpoint_identify(path, &there) >= 0;
    const char *only = strcmp(path, c->folder) == 0 ? c->m.digest : known ? there.digest : "";
    PERI_TRY(peri__checkpoint_may_publish(path, &config, replace, only));
    PERI_TRY(peri_checkpoint_verify_since(c, -1));
    PERI_TRY(peri_checkpoint_folder_new(path, &folder));
    peri_status status = write(c, peri_checkpoint_folder_path(folder), path, replace, only, digest);
    /* In its own place: what it was has another name now, is durable as the new one, and goes if nobody else reads
     * it. */
    if (status >= 0 && peri__same_folder(peri_checkpoint_folder_path(folder), c->dir)) {
        flock(c->dir, LOCK_UN);
        peri__saving_remove(peri_checkpoint_folder_path(folder));
    }
    peri_checkpoint_folder_release(folder);
    return status;
}
