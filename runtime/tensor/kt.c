/* SPDX-License-Identifier: Apache-2.0
 *
 * kt.c: KeyedTensor.
 */
#include "jagged_internal.h"

void peri_kt_retain(peri_kt *kt) { if (kt) peri__refs_add(&kt->refs); }

void peri_kt_release(peri_kt *kt)
{
    if (!kt || !peri__refs_drop(&kt->refs)) return;
    peri_keys_release(kt->keys);
    peri_tensor_release(kt->values);
    peri__free(kt->length_per_key);
    peri__object_count(-1);
    peri__free(kt);
}

static peri_status check_kt(const peri_keys *keys, const int64_t *lengths, int32_t key_dim, const peri_tensor *values)
{
    char text[128];
    if (!keys) return peri__fail(PERI_EINVAL, "peri_kt_new: no keys");
    if (!keys->unique) return peri__fail(PERI_EINVAL, "peri_kt_new: a key repeats");
    if (key_dim != 0 && key_dim != 1) return peri__fail(PERI_EINVAL, "peri_kt_new: key_dim %d, allowed: 0, 1", key_dim);
    PERI_TRY(peri__check_tensor("peri_kt_new", "values", values, -1, 2));
    int64_t left = values->shape[key_dim];
    for (int32_t i = 0; i < keys->count; i++) {
        if (lengths[i] < 0 || lengths[i] > left)
            return peri__fail(PERI_EINVAL, "peri_kt_new: key '%.200s': %lld columns, %lld of %s are left for it",
                              keys->names[i], (long long)lengths[i], (long long)left,
                              peri__tensor_text(values, text, sizeof text));
        left -= lengths[i];
    }
    if (left)
        return peri__fail(PERI_EINVAL, "peri_kt_new: %s has %lld columns more than the keys",
                          peri__tensor_text(values, text, sizeof text), (long long)left);
    return PERI_OK;
}

peri_status peri_kt_new(peri_keys *keys, const int64_t *length_per_key, int32_t key_dim, peri_tensor *values,
                        peri_kt **out)
{
    PERI_NEED(length_per_key);
    PERI_TRY(check_kt(keys, length_per_key, key_dim, values));
    peri_kt *kt = peri__alloc_zero(sizeof *kt);
    int64_t n = keys->count, *host = peri__alloc(sizeof *host * (size_t)(2 * n + 1));
    if (!kt || !host) {
        peri__free(kt);
        peri__free(host);
        return PERI_ENOMEM;
    }
    peri__refs_init(&kt->refs);
    kt->keys = keys;
    kt->values = values;
    kt->key_dim = key_dim;
    kt->length_per_key = host;
    kt->offset_per_key = host + n;
    kt->offset_per_key[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        host[i] = length_per_key[i];
        kt->offset_per_key[i + 1] = kt->offset_per_key[i] + length_per_key[i];
    }
    peri_keys_retain(keys);
    peri_tensor_retain(values);
    peri__object_count(1);
    *out = kt;
    return PERI_OK;
}

/** A KeyedTensor whose columns are those of all @tensors, one behind the other: each tensor becomes a KeyedTensor of
 *  one key, and a regrouping copies all of them into one. */
static peri_status side_by_side(peri_keys *keys, peri_tensor *const *tensors, peri_tensor **out)
{
    int32_t n = keys->count;
    peri_kt **kts = peri__alloc_zero(sizeof *kts * (size_t)n);
    if (!kts) return PERI_ENOMEM;
    peri_regroup *plan = NULL;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        peri_keys *one;
        status = peri__keys_slice(keys, i, i + 1, &one);
        if (status < 0) break;
        status = peri_kt_new(one, &tensors[i]->shape[1], 1, tensors[i], &kts[i]);
        peri_keys_release(one);
    }
    if (status >= 0) status = peri_regroup_new(kts, n, &keys, 1, &plan);
    if (status >= 0) status = peri_regroup_run(plan, kts, n, out);
    peri_regroup_release(plan);
    for (int32_t i = 0; i < n; i++) peri_kt_release(kts[i]);
    peri__free(kts);
    return status;
}

peri_status peri_kt_from_tensors(peri_keys *keys, peri_tensor *const *tensors, int32_t key_dim, peri_kt **out)
{
    PERI_NEED(keys);
    PERI_NEED(out);
    PERI_NEED(tensors);
    int32_t n = keys->count;
    if (n < 1) return peri__fail(PERI_EINVAL, "peri_kt_from_tensors: no keys");
    if (!keys->unique) return peri__fail(PERI_EINVAL, "peri_kt_from_tensors: a key repeats");
    if (key_dim != 0 && key_dim != 1)
        return peri__fail(PERI_EINVAL, "peri_kt_from_tensors: key_dim %d, allowed: 0, 1", key_dim);
    int64_t *lengths = peri__alloc(sizeof *lengths * (size_t)n);
    if (!lengths) return PERI_ENOMEM;
    peri_tensor *values = NULL;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        status = peri__check_tensor("peri_kt_from_tensors", keys->names[i], tensors[i], -1, 2);
        if (status >= 0) lengths[i] = tensors[i]->shape[key_dim];
    }
    if (status >= 0)
        status = key_dim ? side_by_side(keys, tensors, &values)
                         : peri__rows_cat("peri_kt_from_tensors", tensors, n, &values);
    if (status >= 0) status = peri_kt_new(keys, lengths, key_dim, values, out);
    peri_tensor_release(values);
    peri__free(lengths);
    return status;
}

int64_t peri_kt_version(const peri_kt *kt) { return kt ? peri_tensor_version(kt->values) : 0; }

peri_keys *peri_kt_keys(const peri_kt *kt) { return kt ? kt->keys : NULL; }
int32_t peri_kt_key_dim(const peri_kt *kt) { return kt ? kt->key_dim : 0; }
const int64_t *peri_kt_length_per_key(const peri_kt *kt) { return kt ? kt->length_per_key : NULL; }
const int64_t *peri_kt_offset_per_key(const peri_kt *kt) { return kt ? kt->offset_per_key : NULL; }

peri_status peri_kt_values(peri_kt *kt, peri_tensor **out)
{
    PERI_NEED(kt);
    PERI_NEED(out);
    peri_tensor_retain(kt->values);
    *out = kt->values;
    return PERI_OK;
}

peri_status peri_kt_get(peri_kt *kt, int32_t key, peri_tensor **out)
{
    PERI_NEED(kt);
    PERI_NEED(out);
    if (key < 0 || key >= kt->keys->count)
        return peri__fail(PERI_ERANGE, "peri_kt_get: key number %d, allowed: 0..%d", key, kt->keys->count - 1);
    return peri_tensor_slice(kt->values, kt->key_dim, kt->offset_per_key[key], kt->offset_per_key[key + 1], 1, out);
}
