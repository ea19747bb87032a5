/* SPDX-License-Identifier: Apache-2.0
 *
 * module_files.c: the row files of a module: all of them, of all table batches and ranks, are of one flush and cut as
 * the plan says.
 */
#include "../embed/tier/row_file.h"
#include "module.h"

#include <stdio.h>

static peri_status fail_flush(const peri_flush_info *a, const char *path, int64_t number, int64_t iteration)
{
    return peri__fail(PERI_EMISMATCH,
                      "row files '%.150s' (flush %lld, iteration %lld) and '%.150s' (flush %lld, iteration %lld%s): "
                      "they must be of the "
                      "same flush; restore all files of the module from one flush, or remove all",
                      a->path, (long long)a->number, (long long)a->iteration, path, (long long)number,
                      (long long)iteration, a->number == number ? " of another run" : "");
}

/** Files of a cached table in its directory, while they are visited. */
typedef struct visit {
    peri_sharded *ebc;
    int32_t table;
    peri_status status;
} visit;

static const peri_shard *shard_of_file(const visit *v, const peri__row_shard *file)
{
    const peri__route_table *t = &v->ebc->tables[v->table];
    for (int32_t i = 0; i < t->n_shards; i++) {
        const peri_shard *s = &t->shards[i];
        if (s->row_offset == file->row && s->rows == file->rows && s->col_offset == file->col && s->cols == file->cols)
            return s;
    }
    return NULL;
}

/** A file of a shard of another rank: it fits the plan, and this rank's files. What else may be wrong with it is its
 *  owner's to say. */
static bool check_other_ranks_file(void *ctx, const peri__row_shard *file)
{
    visit *v = ctx;
    peri_sharded *e = v->ebc;
    const peri_shard *shard = shard_of_file(v, file);
    peri__row_header h;
    if (!shard) {
        v->status = peri__fail(
            PERI_EMISMATCH,
            "row file '%.250s': table '%.80s' has no shard of rows %lld..%lld and columns %lld..%lld in this plan with "
            "%d ranks; go on with what wrote it, or name another directory (or remove it) to start from scratch",
            file->path, e->table_names[v->table], (long long)file->row, (long long)(file->row + file->rows),
            (long long)file->col, (long long)(file->col + file->cols), e->world_size);
        return false;
    }
    if (shard->rank == e->rank) return true;
    if (peri__row_file_peek(file->path, &h) < 0) {
        peri_error_clear();
        return true;
    }
    if (h.flush == 0 || (e->found.files && h.flush == e->found.number && h.stamp == e->found.stamp)) return true;
    if (e->found.files) {
        v->status = fail_flush(&e->found, file->path, h.flush, h.iteration);
        return false;
    }
    e->found_path = peri__strdup(file->path);
    if (!e->found_path) v->status = PERI_ENOMEM;
    e->found = (peri_flush_info){
        .number = h.flush, .stamp = h.stamp, .iteration = h.iteration, .files = 1, .path = e->found_path};
    return v->status >= 0;
}

peri_status peri__module_files_check(peri_sharded *e, const peri_sharded_config *c)
{
    e->found = (peri_flush_info){.path = ""};
    for (int32_t g = 0; g < e->n_sets; g++) {
        peri_flush_info info;
        PERI_TRY(peri_tbe_flush_info(e->sets[g].tbe, &info));
        if (!info.files) continue;
        if (e->found.files && (info.number != e->found.number || info.stamp != e->found.stamp))
            return fail_flush(&e->found, info.path, info.number, info.iteration);
        if (!e->found.files) e->found = info;
    }
    for (int32_t t = 0; t < c->n_tables; t++) {
        visit v = {.ebc = e, .table = t};
        if (!c->tables[t].cache || !c->tables[t].cache->directory) continue;
        PERI_TRY(peri__row_files_of(c->tables[t].cache->directory, c->tables[t].name, check_other_ranks_file, &v));
        PERI_TRY(v.status);
    }
    return PERI_OK;
}

peri_status peri_sharded_files_found(const peri_sharded *e, peri_flush_info *out)
{
    PERI_NEED(e, out);
    *out = e->found;
    return PERI_OK;
}

peri_status peri_sharded_flush_info(const peri_sharded *e, peri_flush_info *out)
{
    PERI_NEED(e, out);
    *out = (peri_flush_info){.path = ""};
    for (int32_t g = 0; g < e->n_sets; g++) {
        peri_flush_info info;
        PERI_TRY(peri_tbe_flush_info(e->sets[g].tbe, &info));
        if (!info.files) continue;
        bool changed =
            out->changed || info.changed || (out->files && (info.number != out->number || info.stamp != out->stamp));
        int64_t files = out->files + info.files;
        if (!out->files || info.number > out->number) *out = info;
        out->changed = changed;
        out->files = files;
    }
    return PERI_OK;
}

peri_status peri_sharded_flush_prepare(peri_sharded *e)
{
    PERI_NEED(e);
    PERI_TRY(peri__managed_flush(e));
    for (int32_t g = 0; g < e->n_sets; g++) PERI_TRY(peri_tbe_flush_prepare(e->sets[g].tbe));
    return PERI_OK;
}

peri_status peri_sharded_flush_commit(peri_sharded *e, int64_t number, uint64_t stamp)
{
    PERI_NEED(e);
    for (int32_t g = 0; g < e->n_sets; g++) PERI_TRY(peri_tbe_flush_commit(e->sets[g].tbe, number, stamp));
    return PERI_OK;
}
