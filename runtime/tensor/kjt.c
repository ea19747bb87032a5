/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt.c: KeyedJaggedTensor: making, checking, what the host knows of it. Operations are in kjt_ops.c.
 */
#include "jagged_internal.h"
#include "../../kernels/jagged.h"

#include <stdio.h>

/* -- the host's arrays --------------------------------------------------------------------------------------------- */

/** One block for all arrays of @keys keys; strides are filled in, sizes are not known yet. */
static peri_status host_arrays(peri_kjt *k, const int64_t *per_rank)
{
    int64_t n = k->keys->count, ranks = k->ranks;
    k->host = peri__alloc_zero(sizeof *k->host * (size_t)(4 * n + 2 + n * ranks));
    if (!k->host) return PERI_ENOMEM;
    k->stride_per_key = k->host;
    k->lengths_offset_per_key = k->stride_per_key + n;
    k->length_per_key = k->lengths_offset_per_key + n + 1;
    k->offset_per_key = k->length_per_key + n;
    if (per_rank) {
        k->stride_per_key_per_rank = k->offset_per_key + n + 1;
        memcpy(k->stride_per_key_per_rank, per_rank, sizeof *per_rank * (size_t)(n * ranks));
    }
    for (int64_t i = 0; i < n; i++) {
        if (!per_rank) k->stride_per_key[i] = k->stride;
        else
            for (int64_t r = 0; r < ranks; r++) k->stride_per_key[i] += per_rank[i * ranks + r];
        k->lengths_offset_per_key[i + 1] = k->lengths_offset_per_key[i] + k->stride_per_key[i];
    }
    return PERI_OK;
}

static void set_sizes(peri_kjt *k, const int64_t *length_per_key)
{
    int64_t n = k->keys->count;
    for (int64_t i = 0; i < n; i++) {
        k->length_per_key[i] = length_per_key[i];
        k->offset_per_key[i + 1] = k->offset_per_key[i] + length_per_key[i];
    }
    k->synced = true;
}

void peri_kjt_retain(peri_kjt *k) { if (k) peri__refs_add(&k->refs); }

void peri_kjt_release(peri_kjt *k)
{
    if (!k || !peri__refs_drop(&k->refs)) return;
    peri_keys_release(k->keys);
    peri_keys_release(k->inverse_keys);
    peri_tensor_release(k->values);
    peri_tensor_release(k->weights);
    peri_tensor_release(k->inverse);
    peri__bags_fini(&k->bags);
    peri__report_return(k->inverse_report);
    peri__free(k->host);
    peri__object_count(-1);
    peri__free(k);
}

static peri_kjt *empty_kjt(peri_keys *keys)
{
    peri_kjt *k = peri__alloc_zero(sizeof *k);
    if (!k) return NULL;
    peri__refs_init(&k->refs);
    k->keys = keys;
    peri_keys_retain(keys);
    peri__object_count(1);
    return k;
}

/* -- checks of structure ------------------------------------------------------------------------------------------- */

static const char *const new_name = "peri_kjt_new";

static peri_status check_keys(const peri_keys *keys)
{
    if (!keys) return peri__fail(PERI_EINVAL, "%s: keys are missing", new_name);
    if (keys->unique) return PERI_OK;
    for (int32_t i = 0; i < keys->count; i++)
        if (peri_keys_find(keys, keys->names[i]) != i)
            return peri__fail(PERI_EINVAL, "%s: key '%.200s' stands at positions %d and %d, each key may occur once",
                              new_name, keys->names[i], i, peri_keys_find(keys, keys->names[i]));
    return PERI_OK;
}

static peri_status check_values(const peri_tensor *values, const peri_tensor *weights)
{
    char text[128];
    if (!values) return peri__fail(PERI_EINVAL, "%s: values are missing", new_name);
    if (values->ndim < 1) return peri__fail(PERI_EINVAL, "%s: values are a scalar, wanted 1 dimension", new_name);
    if (!weights) return PERI_OK;
    if (weights->dtype != PERI_F32 && weights->dtype != PERI_F64 && weights->dtype != PERI_I32 &&
        weights->dtype != PERI_I64)
        return peri__fail(PERI_EINVAL, "%s: weights are %s, allowed: f32 (f64; i32 and i64 for positions)", new_name,
                          peri__tensor_text(weights, text, sizeof text));
    if (weights->ndim < 1 || weights->shape[0] != values->shape[0])
        return peri__fail(PERI_EINVAL, "%s: weights are %s for %lld values, wanted one per value", new_name,
                          peri__tensor_text(weights, text, sizeof text), (long long)values->shape[0]);
    return peri__check_same_device(new_name, weights, values);
}

/** Strides against the number of bags; sets the strides of *k. */
static peri_status fixed_stride(peri_kjt *k, const peri_kjt_config *a)
{
    long long n = k->keys->count, bags = k->bags.bags;
    if (n == 0) {
        if (bags != 0) return peri__fail(PERI_EINVAL, "%s: %lld lengths without any key", new_name, bags);
        if (k->bags.values != 0)
            return peri__fail(PERI_EINVAL, "%s: %lld values without any key", new_name, (long long)k->bags.values);
        k->stride = peri__max(a->stride, 0);
        return PERI_OK;
    }
    if (a->stride > 0 && (bags % n != 0 || bags / n != a->stride))
        return peri__fail(PERI_EINVAL, "%s: %lld lengths for %lld keys of stride %lld, wanted %.0f", new_name, bags, n,
                          (long long)a->stride, (double)n * (double)a->stride);
    if (bags % n != 0)
        return peri__fail(PERI_EINVAL,
                          "%s: %lld lengths do not divide by %lld keys; variable batches need stride_per_key_per_rank",
                          new_name, bags, n);
    k->stride = bags / n;
    return PERI_OK;
}

static peri_status variable_stride(peri_kjt *k, const peri_kjt_config *a)
{
    int64_t n = k->keys->count, bags = k->bags.bags, sum = 0, largest = 0;
    if (a->ranks < 1)
        return peri__fail(PERI_EINVAL, "%s: stride_per_key_per_rank with %d ranks, wanted at least 1", new_name,
                          a->ranks);
    for (int64_t i = 0; i < n; i++) {
        int64_t own = 0;
        for (int32_t r = 0; r < a->ranks; r++) {
            int64_t s = a->stride_per_key_per_rank[i * a->ranks + r];
            if (s < 0)
                return peri__fail(PERI_EINVAL, "%s: key '%.200s': stride %lld of rank %d, allowed: 0 or more", new_name,
                                  k->keys->names[i], (long long)s, r);
            if (s > bags - sum)
                return peri__fail(PERI_EINVAL,
                                  "%s: key '%.200s': stride_per_key_per_rank sums to more than the %lld lengths",
                                  new_name, k->keys->names[i], (long long)bags);
            own += s;
            sum += s;
        }
        largest = peri__max(largest, own);
    }
    if (sum != bags)
        return peri__fail(PERI_EINVAL, "%s: stride_per_key_per_rank sums to %lld, but there are %lld lengths", new_name,
                          (long long)sum, (long long)bags);
    if (n == 0 && k->bags.values != 0)
        return peri__fail(PERI_EINVAL, "%s: %lld values without any key", new_name, (long long)k->bags.values);
    k->ranks = a->ranks;
    k->stride = a->stride > 0 ? a->stride : a->inverse_indices ? a->inverse_indices->shape[1] : largest;
    return PERI_OK;
}

static peri_status check_inverse(const peri_kjt *k, const peri_kjt_config *a)
{
    char text[128];
    const peri_tensor *t = a->inverse_indices;
    const peri_keys *names = a->inverse_keys;
    if (!t && !names) return PERI_OK;
    if (!t || !names) return peri__fail(PERI_EINVAL, "%s: inverse indices need both keys and a tensor", new_name);
    if (!a->stride_per_key_per_rank)
        return peri__fail(PERI_EINVAL,
                          "%s: inverse indices belong to variable batches, and stride_per_key_per_rank is missing",
                          new_name);
    if ((t->dtype != PERI_I64 && t->dtype != PERI_I32) || t->ndim != 2 || t->shape[0] != names->count)
        return peri__fail(PERI_EINVAL, "%s: inverse indices are %s for %d keys, wanted i64 or i32 [%d, stride]",
                          new_name, peri__tensor_text(t, text, sizeof text), names->count, names->count);
    if (a->stride > 0 && t->shape[1] != a->stride)
        return peri__fail(PERI_EINVAL, "%s: inverse indices are %s for a stride of %lld", new_name,
                          peri__tensor_text(t, text, sizeof text), (long long)a->stride);
    if (!names->unique) return peri__fail(PERI_EINVAL, "%s: a key of the inverse indices repeats", new_name);
    for (int32_t i = 0; i < names->count; i++)
        if (peri_keys_find(k->keys, names->names[i]) < 0)
            return peri__fail(PERI_EINVAL, "%s: inverse indices of key '%.200s', which is not one of the keys",
                              new_name, names->names[i]);
    return peri__check_same_device(new_name, t, a->values);
}

/** Lengths of [keys, stride] as one row. */
static peri_status flat_lengths(const peri_kjt_config *a, peri_tensor **out)
{
    if (!a->lengths) return PERI_OK;
    if (a->lengths->ndim == 2 && !a->stride_per_key_per_rank) {
        if (a->lengths->shape[0] != a->keys->count)
            return peri__fail(PERI_EINVAL, "%s: lengths of %lld rows for %d keys", new_name,
                              (long long)a->lengths->shape[0], a->keys->count);
        return peri_tensor_reshape(a->lengths, 1, (const int64_t[]){-1}, out);
    }
    peri_tensor_retain(a->lengths);
    *out = a->lengths;
    return PERI_OK;
}

peri_status peri_kjt_new(const peri_kjt_config *a, peri_kjt **out)
{
    PERI_TAKE(peri_kjt_config, a);
    PERI_NEED(out);
    PERI_TRY(check_keys(a->keys));
    PERI_TRY(check_values(a->values, a->weights));
    if (a->stride < 0)
        return peri__fail(PERI_EINVAL, "%s: stride %lld, allowed: 0 (derived) or more", new_name, (long long)a->stride);
    if (!a->stride_per_key_per_rank && a->ranks != 0)
        return peri__fail(PERI_EINVAL, "%s: %d ranks without stride_per_key_per_rank", new_name, a->ranks);
    peri_tensor *lengths = NULL;
    peri_kjt *k = empty_kjt(a->keys);
    if (!k) return PERI_ENOMEM;
    peri_status status;
    PERI_TRY_GOTO(flat_lengths(a, &lengths), out);
    PERI_TRY_GOTO(peri__bags_init(new_name, &k->bags, lengths, a->offsets, a->values), out);
    PERI_TRY_GOTO(check_inverse(k, a), out);
    PERI_TRY_GOTO(a->stride_per_key_per_rank ? variable_stride(k, a) : fixed_stride(k, a), out);
    PERI_TRY_GOTO(host_arrays(k, a->stride_per_key_per_rank), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(a->values, &k->values), out);
    if (a->weights) PERI_TRY_GOTO(peri_tensor_contiguous(a->weights, &k->weights), out);
    if (a->inverse_indices) {
        PERI_TRY_GOTO(peri_tensor_contiguous(a->inverse_indices, &k->inverse), out);
        k->inverse_keys = a->inverse_keys;
        peri_keys_retain(k->inverse_keys);
    }
    if (peri_device_host_access(peri__device(k->values))) PERI_TRY_GOTO(peri_kjt_sync(k), out);
    *out = k;
out:
    if (lengths) peri_tensor_release(lengths);
    if (status < 0) peri_kjt_release(k);
    return status < 0 ? status : PERI_OK;
}

peri_status peri__kjt_adopt(const peri__kjt_parts *p, peri_kjt **out)
{
    peri_kjt *k = empty_kjt(p->keys);
    if (!k) return PERI_ENOMEM;
    k->stride = p->stride;
    k->ranks = p->ranks;
    peri_status status = host_arrays(k, p->stride_per_key_per_rank);
    if (status < 0) {
        peri_kjt_release(k);
        return status;
    }
    k->values = p->values;
    k->weights = p->weights;
    k->inverse = p->inverse;
    k->inverse_keys = p->inverse_keys;
    peri_tensor_retain(k->values);
    if (k->weights) peri_tensor_retain(k->weights);
    if (k->inverse) peri_tensor_retain(k->inverse);
    if (k->inverse_keys) peri_keys_retain(k->inverse_keys);
    peri__bags_adopt(&k->bags, p->lengths, p->offsets, k->lengths_offset_per_key[k->keys->count], k->values->shape[0]);
    k->bags.longest = p->longest;
    if (p->length_per_key) set_sizes(k, p->length_per_key);
    else k->bags.checked = p->trusted;
    *out = k;
    return PERI_OK;
}

int64_t peri__kjt_most_rows(const int64_t *rows, int64_t keys, int32_t ranks)
{
    int64_t most = 0;
    for (int64_t i = 0; i < keys; i++) most = peri__max(most, peri__sum(rows + i * ranks, ranks));
    return most;
}

/* -- looking ------------------------------------------------------------------------------------------------------- */

peri_status peri_kjt_describe(const peri_kjt *k, peri_kjt_info *out)
{
    PERI_NEED(k);
    const peri_tensor *t = k->bags.lengths ? k->bags.lengths : k->bags.offsets;
    const peri_kjt_info now = {.stride = k->stride,
                               .bags = k->bags.bags,
                               .values = k->bags.values,
                               .device = peri__device(k->values),
                               .keys = k->keys->count,
                               .ranks = k->ranks,
                               .values_dtype = k->values->dtype,
                               .lengths_dtype = t->dtype,
                               .weighted = k->weights != NULL,
                               .variable_stride = k->ranks > 0,
                               .has_inverse = k->inverse != NULL,
                               .has_lengths = k->bags.lengths != NULL,
                               .has_offsets = k->bags.offsets != NULL,
                               .synced = k->synced};
    return PERI_GIVE(peri_kjt_info, out, &now);
}

int64_t peri_kjt_version(const peri_kjt *k)
{
    if (!k) return 0;
    int64_t rest = peri_tensor_version(k->weights) + peri_tensor_version(k->inverse);
    return peri_tensor_version(k->values) + rest + peri__bags_version(&k->bags);
}

peri_keys *peri_kjt_keys(const peri_kjt *k) { return k ? k->keys : NULL; }
peri_keys *peri_kjt_inverse_keys(const peri_kjt *k) { return k ? k->inverse_keys : NULL; }
const int64_t *peri_kjt_stride_per_key(const peri_kjt *k) { return k ? k->stride_per_key : NULL; }
const int64_t *peri_kjt_lengths_offset_per_key(const peri_kjt *k) { return k ? k->lengths_offset_per_key : NULL; }
const int64_t *peri_kjt_stride_per_key_per_rank(const peri_kjt *k) { return k ? k->stride_per_key_per_rank : NULL; }

peri_status peri_kjt_values(peri_kjt *k, peri_tensor **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    return peri__share(k->values, out);
}
peri_status peri_kjt_weights(peri_kjt *k, peri_tensor **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    return peri__share(k->weights, out);
}
peri_status peri_kjt_inverse_indices(peri_kjt *k, peri_tensor **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    return peri__share(k->inverse, out);
}

/** Whether the host knows the sizes of what the bags are now. */
static bool is_synced(peri_kjt *k)
{
    if (peri__bags_changed(&k->bags)) k->synced = false;
    return k->synced;
}

/** Bags that the caller has changed since they were looked at are checked as new ones are: at once where the host
 *  can. */
static peri_status look(peri_kjt *k)
{
    if (is_synced(k) || k->bags.checked || !peri_device_host_access(peri__device(k->values))) return PERI_OK;
    return peri_kjt_sync(k);
}

peri_status peri_kjt_lengths(peri_kjt *k, peri_tensor **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    PERI_TRY(look(k));
    PERI_TRY(peri__bags_lengths(&k->bags));
    return peri__share(k->bags.lengths, out);
}

peri_status peri_kjt_offsets(peri_kjt *k, peri_tensor **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    PERI_TRY(look(k));
    if (!k->bags.offsets && !k->bags.checked) PERI_TRY(peri_kjt_sync_post(k)); /* the check makes them on its way */
    PERI_TRY(peri__bags_offsets(&k->bags));
    return peri__share(k->bags.offsets, out);
}

/** The key of a bag. */
static int32_t key_of(const peri_kjt *k, int64_t bag)
{
    int32_t low = 0, high = k->keys->count;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (k->lengths_offset_per_key[middle] <= bag) low = middle;
        else high = middle;
    }
    return low;
}

static void bag_text(const void *owner, int64_t bag, char *text, size_t len)
{
    const peri_kjt *k = owner;
    int32_t key = key_of(k, bag);
    snprintf(text, len, "key '%.150s', sample %lld", k->keys->names[key],
             (long long)(bag - k->lengths_offset_per_key[key]));
}

/* -- bringing sizes to the host ------------------------------------------------------------------------------------ */

peri_status peri_kjt_sync_post(peri_kjt *k)
{
    PERI_NEED(k);
    if (is_synced(k) || k->bags.report) return PERI_OK;
    peri_tensor *bounds = NULL;
    int64_t n = k->keys->count + 1;
    PERI_TRY(peri__inverse_post(k));
    if (k->ranks > 0) PERI_TRY(peri__upload_i64(peri__device(k->values), k->lengths_offset_per_key, n, &bounds));
    peri_status status = peri__bags_post(&k->bags, bounds, k->stride, n);
    peri_tensor_release(bounds);
    return status;
}

/** The report is here: judge it and take the sizes. */
static peri_status finish(peri_kjt *k)
{
    peri_status status = peri__bags_judge(&k->bags, "peri_kjt_sync", bag_text, k);
    if (status >= 0) status = peri__inverse_judge(k);
    const int64_t *at = k->bags.report->words + PERI_REPORT_HEADER;
    if (status >= 0) {
        int64_t n = k->keys->count;
        for (int64_t i = 0; i < n; i++) k->length_per_key[i] = at[i + 1] - at[i];
        memcpy(k->offset_per_key, at, sizeof *at * (size_t)(n + 1));
        k->synced = true;
    }
    peri__report_return(k->bags.report);
    peri__report_return(k->inverse_report);
    k->bags.report = k->inverse_report = NULL;
    return status;
}

peri_status peri_kjt_sync_test(peri_kjt *k)
{
    PERI_NEED(k);
    if (is_synced(k)) return PERI_OK;
    PERI_TRY(peri_kjt_sync_post(k));
    peri_status status = peri__report_test(k->bags.report);
    if (status == PERI_OK && k->inverse_report) status = peri__report_test(k->inverse_report);
    return status == PERI_OK ? finish(k) : status;
}

peri_status peri_kjt_sync(peri_kjt *k)
{
    PERI_NEED(k);
    if (is_synced(k)) return PERI_OK;
    PERI_TRY(peri_kjt_sync_post(k));
    PERI_TRY(peri__report_wait(k->bags.report));
    if (k->inverse_report) PERI_TRY(peri__report_wait(k->inverse_report));
    return finish(k);
}

void peri_kjt_unsync(peri_kjt *k)
{
    if (!k) return;
    k->synced = k->bags.checked = false;
    k->bags.longest = -1;
}

peri_status peri_kjt_length_per_key(peri_kjt *k, const int64_t **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    PERI_TRY(peri_kjt_sync(k));
    *out = k->length_per_key;
    return PERI_OK;
}

peri_status peri_kjt_offset_per_key(peri_kjt *k, const int64_t **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    PERI_TRY(peri_kjt_sync(k));
    *out = k->offset_per_key;
    return PERI_OK;
}

peri_status peri_kjt_longest(peri_kjt *k, int64_t *out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    if (k->bags.longest < 0) peri_kjt_unsync(k);
    PERI_TRY(peri_kjt_sync(k));
    *out = k->bags.longest;
    return PERI_OK;
}

peri_status peri_kjt_validate(peri_kjt *k)
{
    PERI_NEED(k);
    peri_kjt_unsync(k);
    return peri_kjt_sync(k);
}
