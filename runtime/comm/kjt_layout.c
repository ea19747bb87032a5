/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt_layout.c: see kjt_layout.h. Announcements come from elsewhere: nothing is believed before it was checked.
 */
#include "kjt_layout.h"
#include "../../kernels/route.h"

#include "../base/tune.h"

enum { MOST_BITS = 48 }; /* counts below 2^48 can be added up and multiplied by the size of an element */

void peri__kjt_layout_release(peri__kjt_layout *layout)
{
    if (!layout) return;
    peri_keys_release(layout->keys);
    peri__free(layout->stride);
    peri__free(layout->recat);
    peri__free(layout);
}

static peri_status read_rank(peri__kjt_layout *l, int32_t r, const int64_t *words)
{
    static const char f[] = "peri_exchange_kjts";
    int64_t most = (int64_t)1 << MOST_BITS, n = l->keys->count;
    l->stride[r] = words[PERI_ANNOUNCE_STRIDE];
    if (l->stride[r] < 0 || l->stride[r] > most)
        return peri__fail(PERI_EFORMAT, "%s: rank %d announced a batch of %lld rows", f, r, (long long)l->stride[r]);
    for (int64_t k = 0; k < n; k++) {
        int64_t rows = words[PERI_ANNOUNCE_WORDS + 2 * k], ids = words[PERI_ANNOUNCE_WORDS + 2 * k + 1];
        bool legal = rows >= 0 && ids >= 0 && rows <= most - l->total_rows && ids <= most - l->total_ids &&
                     (rows > 0 || ids == 0);
        if (!legal || (!l->variable && rows != l->stride[r]))
            return peri__fail(PERI_EFORMAT,
                              "%s: rank %d announced %lld rows with %lld ids of key '%.200s' in a batch of %lld", f, r,
                              (long long)rows, (long long)ids, l->keys->names[k], (long long)l->stride[r]);
        l->rows[r * n + k] = rows;
        l->ids[r * n + k] = ids;
        l->rank_rows[r] += rows;
        l->rank_ids[r] += ids;
        l->total_rows += rows;
        l->total_ids += ids;
    }
    return PERI_OK;
}

peri_status peri__kjt_layout_new(peri_keys *keys, int32_t ranks, int32_t rank, int32_t stagger, bool variable,
                                 const int64_t *words, peri__kjt_layout **out)
{
    peri__kjt_layout *l = peri__alloc_zero(sizeof *l);
    if (!l) return PERI_ENOMEM;
    int64_t n = keys->count, all = n * ranks;
    *l = (peri__kjt_layout){.ranks = ranks, .rank = rank, .stagger = stagger, .variable = variable, .keys = keys};
    peri_keys_retain(keys);
    peri_status status = PERI_ENOMEM;
    l->stride = peri__alloc_zero(sizeof *l->stride * (size_t)(3 * (int64_t)ranks + 3 * all));
    l->recat = peri__alloc(sizeof *l->recat * (size_t)peri__max(all, 1));
    if (!l->stride || !l->recat) goto out;
    l->rank_rows = l->stride + ranks;
    l->rank_ids = l->rank_rows + ranks;
    l->rows = l->rank_ids + ranks;
    l->ids = l->rows + all;
    l->per_key_rank = l->ids + all;
    PERI_TRY_GOTO(peri_kjt_recat(keys->count, ranks, stagger, l->recat), out);
    int64_t batch = 0;
    for (int32_t r = 0; r < ranks; r++) {
        PERI_TRY_GOTO(read_rank(l, r, words + r * (PERI_ANNOUNCE_WORDS + 2 * n)), out);
        batch += l->stride[r];
        if (batch > (int64_t)1 << MOST_BITS) {
            status = peri__fail(PERI_EFORMAT, "peri_exchange_kjts: the ranks announced a batch of %lld rows",
                                (long long)batch);
            goto out;
        }
    }
    for (int64_t t = 0; t < all; t++) l->per_key_rank[t] = l->rows[l->recat[t]];
    *out = l;
out:
    if (status < 0) peri__kjt_layout_release(l);
    return status;
}

void peri__kjt_layout_runs(const peri__kjt_layout *l, bool ids, int64_t own_first, peri_k_run *runs)
{
    const int64_t n = l->keys->count, all = n * l->ranks, *counts = ids ? l->ids : l->rows;
    int64_t to = 0, from = 0;
    for (int64_t t = 0; t < all; t++) {
        runs[l->recat[t]].to = to;
        to += counts[l->recat[t]];
    }
    for (int64_t s = 0; s < all; s++) {
        const bool own = own_first >= 0 && s / n == l->rank;
        int64_t *at = own ? &own_first : &from;
        runs[s] = (peri_k_run){.to = runs[s].to, .from = *at, .n = counts[s], .own = own};
        *at += counts[s];
    }
}

/* -- building ------------------------------------------------------------------------------------------------------ */

/** Runs of lengths and, behind them, of ids, on the device. */
static peri_status upload_runs(const peri__kjt_layout *l, peri_device *device, const int64_t own_first[2],
                               peri_tensor **out)
{
    const int64_t all = (int64_t)l->keys->count * l->ranks;
    PERI__SCRATCH peri_k_run *runs = peri__alloc(sizeof *runs * (size_t)(2 * all + 1));
    if (!runs) return PERI_ENOMEM;
    for (int part = 0; part < 2; part++) peri__kjt_layout_runs(l, part, own_first[part], runs + part * all);
    return peri__upload_i64(device, (const int64_t *)runs, 2 * all * (int64_t)(sizeof *runs / sizeof(int64_t)), out);
}

static peri_status place_received(const peri__kjt_layout *l, const peri_tensor *received, const peri_tensor *own,
                         const peri_tensor *runs, bool ids, peri_tensor **out)
{
    int64_t all = (int64_t)l->keys->count * l->ranks,
            bytes = (ids ? l->total_ids : l->total_rows) * peri_dtype_size(received->dtype);
    int64_t past = peri__tune(PERI__TUNE_copy_past);
    PERI_TRY(peri_tensor_new(peri__device(received), received->dtype, 1, ids ? &l->total_ids : &l->total_rows, out));
    peri_k_route_place_args args = {.dst = peri__data(*out),
                                    .received = peri__data(received),
                                    .own = own ? peri__data(own) : NULL,
                                    .runs = (const peri_k_run *)peri__data(runs) + (ids ? all : 0),
                                    .width = peri_dtype_size(received->dtype),
                                    .past = past > 0 && 2 * bytes >= past}; /* as much is read as is written */
    return PERI_LAUNCH(peri__device(received), route_place, &args, all, 1);
}

/** The lengths add up to what was announced for each key. */
static peri_status compare_lengths(const peri__kjt_layout *l, peri_kjt *k)
{
    int64_t n = l->keys->count;
    for (int64_t i = 0; i < n; i++) {
        int64_t ids = 0;
        for (int32_t r = 0; r < l->ranks; r++) ids += l->ids[r * n + i];
        if (k->length_per_key[i] != ids)
            return peri__fail(
                PERI_EFORMAT,
                "peri_exchange_kjts: the ranks announced %lld ids of key '%.200s', its lengths sum to %lld",
                (long long)ids, l->keys->names[i], (long long)k->length_per_key[i]);
    }
    return PERI_OK;
}

peri_status peri__kjt_layout_build(const peri__kjt_layout *l, peri_tensor *const *received, peri_tensor *const *own,
                                   const int64_t own_first[2], bool placed, peri_kjt **out)
{
    peri__kjt_parts p = {.keys = l->keys, .ranks = l->variable ? l->ranks : 0, .longest = -1};
    PERI__HELD peri_tensor *runs = NULL, *lengths = NULL, *values = NULL, *weights = NULL;
    peri_tensor **const parts[PERI_PARTS] = {&lengths, &values, &weights};
    peri_kjt *k = NULL;
    if (!placed) PERI_TRY(upload_runs(l, peri__device(received[PERI_PART_LENGTHS]), own_first, &runs));
    for (int i = 0; i < PERI_PARTS; i++) {
        if (!received[i]) continue;
        if (placed) peri_tensor_retain(*parts[i] = received[i]);
        else PERI_TRY(place_received(l, received[i], own[i], runs, i != PERI_PART_LENGTHS, parts[i]));
    }
    p.lengths = lengths;
    p.values = values;
    p.weights = weights;
    p.stride_per_key_per_rank = l->variable ? l->per_key_rank : NULL;
    p.stride = l->variable ? peri__kjt_most_rows(l->per_key_rank, l->keys->count, l->ranks)
                           : peri__sum(l->stride, l->ranks);
    PERI_TRY(peri__kjt_adopt(&p, &k));
    const bool seen = peri_device_host_access(peri__kjt_device(k));
    peri_status status = peri_kjt_sync_post(k);
    if (status >= 0 && seen) status = peri_kjt_sync(k);
    if (status >= 0 && seen) status = compare_lengths(l, k);
    if (status < 0) peri_kjt_release(k);
    else *out = k;
    return status < 0 ? status : PERI_OK;
}
