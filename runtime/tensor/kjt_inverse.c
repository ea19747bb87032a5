/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt_inverse.c: the inverse indices of a variable batch: those of some of its keys, and the check that each names a
 * bag of its key.
 */
#include "jagged_internal.h"
#include "../../kernels/lookup.h"

/* -- those of some keys -------------------------------------------------------------------------------------------- */

/** Rows @rows[kept] of the inverse indices, ascending: a view if they follow each other. */
static peri_status take_rows(peri_tensor *inverse, const int32_t *rows, int32_t kept, peri_tensor **out)
{
    int32_t first = kept > 0 ? rows[0] : 0;
    if (kept == 0 || rows[kept - 1] - first == kept - 1)
        return peri_tensor_slice(inverse, 0, first, first + kept, 1, out);
    int64_t parts = inverse->shape[0], *offsets = peri__alloc(sizeof *offsets * (size_t)(parts + 1));
    if (!offsets) return PERI_ENOMEM;
    for (int64_t i = 0; i <= parts; i++) offsets[i] = i;
    peri__rows_plan plan = {0};
    peri_status status = peri__rows_plan_init(&plan, peri__device(inverse), offsets, parts, rows, kept);
    if (status >= 0) status = peri__rows_permute(inverse, &plan, out);
    peri__rows_plan_fini(&plan);
    peri__free(offsets);
    return status;
}

peri_status peri__inverse_select(const peri_kjt *k, const int32_t *index, int32_t n, peri_keys **keys,
                                 peri_tensor **inverse)
{
    *keys = NULL;
    *inverse = NULL;
    if (!k->inverse) return PERI_OK;
    int32_t count = k->inverse_keys->count, kept = 0;
    int32_t *rows = peri__alloc(sizeof *rows * (size_t)peri__max(1, count));
    bool *asked = peri__alloc_zero(sizeof *asked * (size_t)peri__max(1, k->keys->count));
    peri_status status = rows && asked ? PERI_OK : PERI_ENOMEM;
    if (status >= 0) {
        for (int32_t i = 0; i < n; i++) asked[peri_keys_find(k->keys, k->keys->names[index[i]])] = true;
        for (int32_t i = 0; i < count; i++)
            if (asked[peri_keys_find(k->keys, k->inverse_keys->names[i])]) rows[kept++] = i;
        status = take_rows(k->inverse, rows, kept, inverse);
    }
    if (status >= 0) status = peri__keys_select(k->inverse_keys, rows, kept, keys);
    if (status < 0) {
        peri_tensor_release(*inverse);
        *inverse = NULL;
    }
    peri__free(rows);
    peri__free(asked);
    return status;
}

/* -- the check ----------------------------------------------------------------------------------------------------- */

/** Bags of the key of row @i of the inverse indices. */
static int64_t bags_of(const peri_kjt *k, int32_t i)
{
    return k->stride_per_key[peri_keys_find(k->keys, k->inverse_keys->names[i])];
}

/** The first inverse index, counted row after row, that names no bag; INT64_MAX: all do. For memory that the host
 *  reads. */
static int64_t first_bad(const peri_kjt *k)
{
    int64_t batch = k->inverse->shape[1];
    for (int32_t i = 0; i < k->inverse_keys->count; i++) {
        uint64_t bags = (uint64_t)bags_of(k, i);
        bool bad = false;
        if (k->inverse->dtype == PERI_I32) {
            const int32_t *at = (const int32_t *)peri__data(k->inverse) + i * batch;
            for (int64_t b = 0; b < batch; b++) bad |= (uint64_t)(int64_t)at[b] >= bags;
            for (int64_t b = 0; bad && b < batch; b++)
                if ((uint64_t)(int64_t)at[b] >= bags) return i * batch + b;
        } else {
            const int64_t *at = (const int64_t *)peri__data(k->inverse) + i * batch;
            for (int64_t b = 0; b < batch; b++) bad |= (uint64_t)at[b] >= bags;
            for (int64_t b = 0; bad && b < batch; b++)
                if ((uint64_t)at[b] >= bags) return i * batch + b;
        }
    }
    return INT64_MAX;
}

/** The error about inverse index number @bad. */
static peri_status complain(const peri_kjt *k, int64_t bad)
{
    static const char f[] = "peri_kjt_sync";
    int64_t batch = k->inverse->shape[1], one = 1, value = 0, bags = bags_of(k, (int32_t)(bad / batch));
    const char *name = k->inverse_keys->names[bad / batch];
    peri_tensor *at = NULL, *wide = NULL;
    PERI_TRY(peri__tensor_view(k->inverse, 1, &one, &one, k->inverse->offset + bad, &at));
    peri_status status = peri_tensor_to(at, PERI_I64, NULL, &wide);
    if (status >= 0) status = peri_tensor_read(wide, &value, sizeof value);
    peri_tensor_release(wide);
    peri_tensor_release(at);
    PERI_TRY(status);
    if (bags == 0)
        return peri__fail(PERI_ERANGE, "%s: key '%.150s', sample %lld: inverse index %lld, but the key has no bags", f,
                          name, (long long)(bad % batch), (long long)value);
    return peri__fail(PERI_ERANGE, "%s: key '%.150s', sample %lld: inverse index %lld, allowed: 0..%lld", f, name,
                      (long long)(bad % batch), (long long)value, (long long)bags - 1);
}

/** Queue the search for the first bad one: the inverse indices are ids of tables that have a row for each bag. @found:
 *  i64 [1]. */
static peri_status search(const peri_kjt *k, peri_tensor *found)
{
    int64_t rows = k->inverse_keys->count, batch = k->inverse->shape[1], n = rows * batch;
    int64_t *host = peri__alloc(sizeof *host * (size_t)(2 * (rows + 1)));
    if (!host) return PERI_ENOMEM;
    int64_t *starts = host, *offsets = host + rows + 1;
    starts[0] = 0;
    for (int32_t i = 0; i < rows; i++) starts[i + 1] = starts[i] + bags_of(k, i);
    for (int64_t i = 0; i <= rows; i++) offsets[i] = i * batch;
    peri_device *device = peri__kjt_device(k);
    peri_tensor *table = NULL, *out = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__upload_i64(device, host, 2 * (rows + 1), &table), out);
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &n, &out), out);
    const int64_t *at = peri__data(table);
    peri_k_table_rows_args args = {.ids = peri__data(k->inverse),
                                   .starts = at,
                                   .offsets = at + rows + 1,
                                   .out = peri__data(out),
                                   .bad = peri__data(found),
                                   .n = n,
                                   .tables = rows,
                                   .step = 1,
                                   .ids_dtype = k->inverse->dtype,
                                   .offsets_dtype = PERI_I64,
                                   .starts_dtype = PERI_I64,
                                   .out_dtype = PERI_I64};
    PERI_TRY_GOTO(PERI_RUN(device, table_rows, &args), out);
out:
    peri__free(host);
    peri_tensor_release(table);
    peri_tensor_release(out);
    return status;
}

peri_status peri__inverse_post(peri_kjt *k)
{
    if (!k->inverse || k->inverse_report || peri__numel(k->inverse) == 0 || peri__immediate(peri__kjt_device(k)))
        return PERI_OK;
    const int64_t one = 1;
    peri_device *device = peri__kjt_device(k);
    peri_tensor *found = NULL;
    peri__report *report = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &one, &found), out);
    PERI_TRY_GOTO(search(k, found), out);
    PERI_TRY_GOTO(peri__report_take(device, 1, &report), out);
    PERI_TRY_GOTO(peri__report_post(report, peri__data(found), 1), out);
    k->inverse_report = report;
    report = NULL;
out:
    peri__report_return(report);
    peri_tensor_release(found);
    return status;
}

peri_status peri__inverse_judge(peri_kjt *k)
{
    int64_t bad = INT64_MAX;
    if (k->inverse_report) bad = k->inverse_report->words[0];
    else if (k->inverse && peri__immediate(peri__kjt_device(k))) bad = first_bad(k);
    return bad == INT64_MAX ? PERI_OK : complain(k, bad);
}
