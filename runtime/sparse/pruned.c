/* SPDX-License-Identifier: Apache-2.0
 *
 * pruned.c: rows of a table left out, and the tables that lead from an id to its row among those that are left: arrays
 * and hash tables.
 */
#include "sparse_internal.h"
#include "../../kernels/lookup.h"

#include <stdio.h>

/* -- leaving rows out ---------------------------------------------------------------------------------------------- */

static peri_status check_rows(const char *f, const peri_tensor *weight, const peri_tensor *indicator,
                              const peri_prune_args *a)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "weight", weight, -1, 2));
    PERI_TRY(peri__check_tensor(f, "indicator", indicator, PERI_F32, 1));
    PERI_TRY(peri__check_same_device(f, indicator, weight));
    if (indicator->shape[0] != weight->shape[0])
        return peri__fail(PERI_EINVAL, "%s: indicator has %lld numbers for weights %s, wanted one for each row", f,
                          (long long)indicator->shape[0], peri__tensor_text(weight, text, sizeof text));
    if (a->compressed_indices_dtype != PERI_I32 && a->compressed_indices_dtype != PERI_I64)
        return peri__fail(PERI_EINVAL, "%s: compressed_indices_dtype %s, allowed: i32, i64", f,
                          peri_dtype_name(a->compressed_indices_dtype));
    if (a->compressed_indices_dtype == PERI_I32 && weight->shape[0] > INT32_MAX)
        return peri__fail(PERI_ERANGE, "%s: %lld rows do not fit in compressed indices of i32", f,
                          (long long)weight->shape[0]);
    if (a->min_num_rows < 0)
        return peri__fail(PERI_EINVAL, "%s: min_num_rows %lld, allowed: 0 and more", f, (long long)a->min_num_rows);
    if (!(a->min_save_ratio >= 0))
        return peri__fail(PERI_EINVAL, "%s: min_save_ratio %g, allowed: 0 and more", f, a->min_save_ratio);
    return PERI_OK;
}

peri_status peri_sparse_rowwise_prune(peri_tensor *weight, peri_tensor *indicator, const peri_prune_args *a,
                                      peri_tensor **rows, peri_tensor **mapping)
{
    static const char f[] = "peri_sparse_rowwise_prune";
    PERI_TRY(check_rows(f, weight, indicator, a));
    int64_t n = weight->shape[0], columns = weight->shape[1], one = 1;
    double numbers = (double)n * (double)columns;
    bool worth = (double)n + (double)a->min_num_rows * (double)columns < numbers * a->min_save_ratio;
    peri_device *device = peri__device(weight);
    peri_tensor *flat = NULL, *mask = NULL, *map = NULL, *src = NULL, *kept = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(device, a->compressed_indices_dtype, 1, worth ? &n : &one, &map), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(weight, &src), out);
    if (!worth) {
        PERI_TRY_GOTO(peri__tensor_zero(map), out);
        peri_tensor_retain(src);
        kept = src;
    } else {
        PERI_TRY_GOTO(peri_tensor_contiguous(indicator, &flat), out);
        PERI_TRY_GOTO(peri_tensor_new(device, PERI_BOOL, 1, &n, &mask), out);
        peri_k_prune_mark_args mark = {
            .indicator = peri__data(flat), .mask = peri__data(mask), .threshold = a->threshold, .magnitude = a->abs};
        PERI_TRY_GOTO(PERI_LAUNCH(device, prune_mark, &mark, n, PERI_INT_GRAIN), out);
        PERI_TRY_GOTO(peri__rows_masked(src, mask, &kept), out);
        peri_k_mask_args args = {
            .mask = peri__data(mask), .places = peri__data(map), .n = n, .places_dtype = map->dtype};
        PERI_TRY_GOTO(PERI_RUN(device, mask_places, &args), out);
    }
    *rows = kept;
    *mapping = map;
    kept = map = NULL;
out:;
    peri_tensor *all[] = {flat, mask, map, src, kept};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}

/* -- ids of pruned tables ------------------------------------------------------------------------------------------ */

/** Checked arguments of a lookup in tables that lie one after the other. */
typedef struct lookup {
    peri_tensor *ids, *offsets, *starts, *entries; /* contiguous */
    int64_t tables, step;                          /* bags a table */
} lookup;

static void lookup_fini(lookup *l)
{
    peri_tensor_release(l->ids);
    peri_tensor_release(l->offsets);
    peri_tensor_release(l->starts);
    peri_tensor_release(l->entries);
}

/** @what: the name of the entries; their offsets are "<what>_offsets". Released with fini, also after a failure. */
static peri_status lookup_init(lookup *l, const char *f, const char *what, peri_tensor *ids, peri_tensor *offsets,
                               peri_tensor *entries, peri_tensor *starts)
{
    char name[64];
    snprintf(name, sizeof name, "%s_offsets", what);
    PERI_TRY(peri__check_ints(f, "indices", ids, 1, NULL));
    PERI_TRY(peri__check_ints(f, "offsets", offsets, 1, ids));
    PERI_TRY(peri__check_ints(f, name, starts, 1, ids));
    l->tables = starts->shape[0] - 1;
    int64_t bags = offsets->shape[0] - 1;
    if (l->tables < 1)
        return peri__fail(PERI_EINVAL,
                          "%s: %lld %s, wanted one entry more than there are tables, of which there is one or "
                          "more",
                          f, (long long)starts->shape[0], name);
    if (bags < 0 || bags % l->tables)
        return peri__fail(PERI_EINVAL, "%s: %lld offsets for %lld tables, wanted a multiple of the tables and one more",
                          f, (long long)bags + 1, (long long)l->tables);
    l->step = bags / l->tables;
    if (l->step == 0) return peri__fail(PERI_EINVAL, "%s: 1 offset for %lld tables, wanted a bag a table or more", f,
                                        (long long)l->tables);
    PERI_TRY(peri_tensor_contiguous(ids, &l->ids));
    PERI_TRY(peri_tensor_contiguous(offsets, &l->offsets));
    PERI_TRY(peri_tensor_contiguous(starts, &l->starts));
    PERI_TRY(peri_tensor_contiguous(entries, &l->entries));
    PERI_TRY(peri__check_offsets(f, "offsets", "bag", l->offsets, ids->shape[0]));
    return peri__check_offsets(f, name, "table", l->starts, entries->shape[0]);
}

peri_status peri_sparse_pruned_array_lookup(peri_tensor *indices, peri_tensor *offsets, peri_tensor *index_remappings,
                                            peri_tensor *index_remappings_offsets, peri_tensor **out)
{
    static const char f[] = "peri_sparse_pruned_array_lookup";
    PERI_TRY(peri__check_ints(f, "index_remappings", index_remappings, 1, indices));
    if (index_remappings->dtype == PERI_I64 && indices->dtype == PERI_I32)
        return peri__fail(PERI_EINVAL,
                          "%s: index_remappings are i64 and indices i32, whose dtype the result has; allowed: i32", f);
    lookup l = {0};
    peri_status status =
        lookup_init(&l, f, "index_remappings", indices, offsets, index_remappings, index_remappings_offsets);
    peri__tables t = {.function = f,
                      .what = "indices",
                      .table = "table",
                      .ids = l.ids,
                      .offsets = l.offsets,
                      .starts = l.starts,
                      .remap = l.entries,
                      .tables = l.tables,
                      .step = l.step};
    if (status >= 0) status = peri__table_rows(&t, indices->dtype, out, NULL);
    lookup_fini(&l);
    return status;
}

/* -- hash tables --------------------------------------------------------------------------------------------------- */

static peri_status hash_init(lookup *l, const char *f, peri_tensor *indices, peri_tensor *offsets,
                             peri_tensor *hash_table, peri_tensor *hash_table_offsets)
{
    char text[128];
    PERI_TRY(peri__check_ints(f, "hash_table", hash_table, 2, NULL));
    PERI_TRY(peri__check_ints(f, "indices", indices, 1, hash_table));
    if (hash_table->shape[1] != 2)
        return peri__fail(PERI_EINVAL, "%s: hash_table is %s, wanted pairs", f,
                          peri__tensor_text(hash_table, text, sizeof text));
    if (hash_table->dtype != indices->dtype)
        return peri__fail(
            PERI_EINVAL,
            "%s: hash_table is %s and indices are %s: an id's place depends on its dtype, wanted equal ones", f,
            peri_dtype_name(hash_table->dtype), peri_dtype_name(indices->dtype));
    return lookup_init(l, f, "hash_table", indices, offsets, hash_table, hash_table_offsets);
}

static peri_k_hash_args hash_args(const lookup *l, const peri_tensor *rows, const peri_tensor *pairs)
{
    return (peri_k_hash_args){.ids = peri__data(l->ids),
                              .offsets = peri__data(l->offsets),
                              .slots = peri__data(l->starts),
                              .rows = peri__data(rows),
                              .pairs = peri__data(pairs),
                              .tables = l->tables,
                              .step = l->step,
                              .ids_dtype = l->ids->dtype,
                              .offsets_dtype = l->offsets->dtype,
                              .slots_dtype = l->starts->dtype,
                              .rows_dtype = rows->dtype};
}

peri_status peri_sparse_pruned_hashmap_lookup(peri_tensor *indices, peri_tensor *offsets, peri_tensor *hash_table,
                                              peri_tensor *hash_table_offsets, peri_tensor **out)
{
    static const char f[] = "peri_sparse_pruned_hashmap_lookup";
    lookup l = {0};
    peri_tensor *rows = NULL;
    peri_status status;
    PERI_TRY_GOTO(hash_init(&l, f, indices, offsets, hash_table, hash_table_offsets), out);
    PERI_TRY_GOTO(peri__tensor_like(l.ids, 1, l.ids->shape, &rows), out);
    peri_k_hash_args args = hash_args(&l, rows, l.entries);
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(l.ids), hash_find, &args, l.ids->shape[0], PERI_INT_GRAIN), out);
    *out = rows;
    rows = NULL;
out:
    lookup_fini(&l);
    peri_tensor_release(rows);
    return status;
}

/** The error about id number @i. */
static peri_status not_inserted(const char *f, const lookup *l, const peri_tensor *rows, int64_t i)
{
    int64_t id, row, bag, first, end;
    PERI_TRY(peri__int_at(l->ids, i, &id));
    PERI_TRY(peri__int_at(rows, i, &row));
    PERI_TRY(peri__bag_at(l->offsets, i, &bag));
    PERI_TRY(peri__int_at(l->starts, bag / l->step, &first));
    PERI_TRY(peri__int_at(l->starts, bag / l->step + 1, &end));
    if (id < 0)
        return peri__fail(PERI_ERANGE, "%s: indices[%lld] is %lld (table %lld), allowed: 0 and more", f, (long long)i,
                          (long long)id, (long long)(bag / l->step));
    if (row < -1)
        return peri__fail(PERI_ERANGE, "%s: dense_indices[%lld] is %lld (table %lld), allowed: -1 and more", f,
                          (long long)i, (long long)row, (long long)(bag / l->step));
    return peri__fail(PERI_ERANGE, "%s: table %lld is full: no slot among its %lld for indices[%lld], %lld", f,
                      (long long)(bag / l->step), (long long)(end - first), (long long)i, (long long)id);
}

peri_status peri_sparse_pruned_hashmap_insert(peri_tensor *indices, peri_tensor *dense_indices, peri_tensor *offsets,
                                              peri_tensor *hash_table, peri_tensor *hash_table_offsets,
                                              peri_tensor **out)
{
    static const char f[] = "peri_sparse_pruned_hashmap_insert";
    PERI_TRY(peri__check_ints(f, "indices", indices, 1, NULL));
    PERI_TRY(peri__check_ints(f, "dense_indices", dense_indices, 1, indices));
    if (dense_indices->shape[0] != indices->shape[0])
        return peri__fail(PERI_EINVAL, "%s: %lld dense_indices for %lld indices", f, (long long)dense_indices->shape[0],
                          (long long)indices->shape[0]);
    if (dense_indices->dtype == PERI_I64 && indices->dtype == PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: dense_indices are i64 and the hash table i32; allowed: i32", f);
    lookup l = {0};
    int64_t one = 1, first;
    peri_tensor *rows = NULL, *pairs = NULL, *bad = NULL;
    peri_status status;
    PERI_TRY_GOTO(hash_init(&l, f, indices, offsets, hash_table, hash_table_offsets), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(dense_indices, &rows), out);
    PERI_TRY_GOTO(peri__tensor_like(l.entries, 2, l.entries->shape, &pairs), out);
    PERI_TRY_GOTO(peri_tensor_copy(pairs, l.entries), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(l.ids), PERI_I64, 1, &one, &bad), out);
    peri_k_hash_args args = hash_args(&l, rows, pairs);
    args.bad = peri__data(bad);
    PERI_TRY_GOTO(PERI_RUN(peri__device(l.ids), hash_insert, &args), out);
    PERI_TRY_GOTO(peri__word_at(bad, 0, &first), out);
    if (first != INT64_MAX) PERI_TRY_GOTO(not_inserted(f, &l, rows, first), out);
    *out = pairs;
    pairs = NULL;
out:
    lookup_fini(&l);
    peri_tensor_release(rows);
    peri_tensor_release(pairs);
    peri_tensor_release(bad);
    return status;
}
