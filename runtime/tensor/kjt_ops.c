/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt_ops.c: KeyedJaggedTensor: permuting, cutting, joining, moving. All results are made from checked parts, so
 * nothing is read back.
 */
#include "jagged_internal.h"

/** What *k looks like, to be changed into the parts of a result. */
static peri__kjt_parts parts_of(const peri_kjt *k)
{
    return (peri__kjt_parts){.keys = k->keys,
                             .values = k->values,
                             .weights = k->weights,
                             .lengths = k->bags.lengths,
                             .offsets = k->bags.offsets,
                             .stride = k->stride,
                             .ranks = k->ranks,
                             .stride_per_key_per_rank = k->stride_per_key_per_rank,
                             .inverse_keys = k->inverse_keys,
                             .inverse = k->inverse,
                             .length_per_key = k->synced ? k->length_per_key : NULL,
                             .longest = k->bags.longest};
}

/* -- permute ------------------------------------------------------------------------------------------------------- */

/** Host arrays of the permuted keys: rows per rank, then ids per key. */
static int64_t *permuted_sizes(const peri_kjt *k, const int32_t *index, int32_t n)
{
    int64_t *sizes = peri__alloc(sizeof *sizes * (size_t)peri__max(1, (int64_t)n * (k->ranks + 1)));
    if (!sizes) return NULL;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t r = 0; r < k->ranks; r++)
            sizes[i * k->ranks + r] = k->stride_per_key_per_rank[(int64_t)index[i] * k->ranks + r];
        sizes[(int64_t)n * k->ranks + i] = k->length_per_key[index[i]];
    }
    return sizes;
}

peri_status peri_kjt_permute(peri_kjt *k, const int32_t *indices, int32_t n, peri_kjt **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    if (n > 0) PERI_NEED(indices);
    if (n < 0) return peri__fail(PERI_EINVAL, "peri_kjt_permute: %d indices", n);
    for (int32_t i = 0; i < n; i++)
        if (indices[i] < 0 || indices[i] >= k->keys->count)
            return peri__fail(PERI_ERANGE, "peri_kjt_permute: index %d at position %d, allowed: 0..%d", indices[i], i,
                              k->keys->count - 1);
    PERI_TRY(peri_kjt_sync(k));
    PERI_TRY(peri__bags_lengths(&k->bags));
    peri__rows_plan ids = {0}, bags = {0};
    peri__kjt_parts p = parts_of(k);
    peri_device *device = peri__kjt_device(k);
    peri_tensor *values = NULL, *weights = NULL, *lengths = NULL, *inverse = NULL;
    peri_keys *keys = NULL, *inverse_keys = NULL;
    int64_t *sizes = permuted_sizes(k, indices, n);
    if (!sizes) return PERI_ENOMEM;
    peri_status status;
    PERI_TRY_GOTO(peri__keys_select(k->keys, indices, n, &keys), out);
    PERI_TRY_GOTO(peri__rows_plan_init(&ids, device, k->offset_per_key, k->keys->count, indices, n), out);
    PERI_TRY_GOTO(peri__rows_plan_init(&bags, device, k->lengths_offset_per_key, k->keys->count, indices, n), out);
    PERI_TRY_GOTO(peri__rows_permute(k->bags.lengths, &bags, &lengths), out);
    PERI_TRY_GOTO(peri__rows_permute(k->values, &ids, &values), out);
    if (k->weights) PERI_TRY_GOTO(peri__rows_permute(k->weights, &ids, &weights), out);
    PERI_TRY_GOTO(peri__inverse_select(k, indices, n, &inverse_keys, &inverse), out);
    p.keys = keys;
    p.values = values;
    p.weights = weights;
    p.lengths = lengths;
    p.offsets = NULL;
    p.inverse_keys = inverse_keys;
    p.inverse = inverse;
    p.stride_per_key_per_rank = k->ranks ? sizes : NULL;
    p.length_per_key = sizes + (int64_t)n * k->ranks;
    p.longest = -1;
    status = peri__kjt_adopt(&p, out);
out:
    peri__free(sizes);
    peri__rows_plan_fini(&ids);
    peri__rows_plan_fini(&bags);
    peri_keys_release(keys);
    peri_tensor_release(values);
    peri_tensor_release(weights);
    peri_tensor_release(lengths);
    peri_keys_release(inverse_keys);
    peri_tensor_release(inverse);
    return status;
}

/* -- cutting ------------------------------------------------------------------------------------------------------- */

/** The inverse indices of keys [begin, end), as peri__inverse_select. */
static peri_status slice_inverse(const peri_kjt *k, int32_t begin, int32_t end, peri_keys **keys, peri_tensor **inverse)
{
    if (!k->inverse) return PERI_OK;
    int32_t *index = peri__alloc(sizeof *index * (size_t)peri__max(1, end - begin));
    if (!index) return PERI_ENOMEM;
    for (int32_t i = begin; i < end; i++) index[i - begin] = i;
    peri_status status = peri__inverse_select(k, index, end - begin, keys, inverse);
    peri__free(index);
    return status;
}

/** Keys [begin, end) as a kjt of views. */
static peri_status slice_keys(peri_kjt *k, int32_t begin, int32_t end, peri_kjt **out)
{
    peri__kjt_parts p = parts_of(k);
    if (begin == 0 && end == k->keys->count) return peri__kjt_adopt(&p, out);
    peri_tensor *values = NULL, *weights = NULL, *lengths = NULL, *inverse = NULL;
    peri_keys *keys = NULL, *inverse_keys = NULL;
    int64_t first = k->offset_per_key[begin], last = k->offset_per_key[end];
    peri_status status;
    PERI_TRY_GOTO(peri__keys_slice(k->keys, begin, end, &keys), out);
    PERI_TRY_GOTO(peri_tensor_slice(k->values, 0, first, last, 1, &values), out);
    if (k->weights) PERI_TRY_GOTO(peri_tensor_slice(k->weights, 0, first, last, 1, &weights), out);
    const int64_t *bags = k->lengths_offset_per_key;
    PERI_TRY_GOTO(peri_tensor_slice(k->bags.lengths, 0, bags[begin], bags[end], 1, &lengths), out);
    PERI_TRY_GOTO(slice_inverse(k, begin, end, &inverse_keys, &inverse), out);
    p.keys = keys;
    p.values = values;
    p.weights = weights;
    p.lengths = lengths;
    p.offsets = NULL;
    p.inverse_keys = inverse_keys;
    p.inverse = inverse;
    if (k->ranks) p.stride_per_key_per_rank += (int64_t)begin * k->ranks;
    p.length_per_key += begin;
    p.longest = -1;
    status = peri__kjt_adopt(&p, out);
out:
    peri_keys_release(keys);
    peri_tensor_release(values);
    peri_tensor_release(weights);
    peri_tensor_release(lengths);
    peri_keys_release(inverse_keys);
    peri_tensor_release(inverse);
    return status;
}

peri_status peri_kjt_split(peri_kjt *k, const int32_t *segments, int32_t n, peri_kjt **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    if (n > 0) PERI_NEED(segments);
    int64_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        if (segments[i] < 0) return peri__fail(PERI_EINVAL, "peri_kjt_split: segment %d has %d keys", i, segments[i]);
        sum += segments[i];
    }
    if (n < 0 || sum != k->keys->count)
        return peri__fail(PERI_EINVAL, "peri_kjt_split: the segments sum to %lld, but there are %d keys",
                          (long long)sum, k->keys->count);
    PERI_TRY(peri_kjt_sync(k));
    PERI_TRY(peri__bags_lengths(&k->bags));
    peri_kjt **made = peri__alloc_zero(sizeof *made * (size_t)peri__max(n, 1));
    if (!made) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    int32_t begin = 0;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        status = slice_keys(k, begin, begin + segments[i], &made[i]);
        begin += segments[i];
    }
    for (int32_t i = 0; i < n; i++) {
        if (status >= 0) out[i] = made[i];
        else peri_kjt_release(made[i]);
    }
    peri__free(made);
    return status;
}

peri_status peri_kjt_get(peri_kjt *k, int32_t key, peri_jt **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    if (key < 0 || key >= k->keys->count)
        return peri__fail(PERI_ERANGE, "peri_kjt_get: key number %d, allowed: 0..%d", key, k->keys->count - 1);
    PERI_TRY(peri_kjt_sync(k));
    PERI_TRY(peri__bags_lengths(&k->bags));
    int64_t first = k->offset_per_key[key], last = k->offset_per_key[key + 1];
    peri_tensor *values = NULL, *weights = NULL, *lengths = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_slice(k->values, 0, first, last, 1, &values), out);
    if (k->weights) PERI_TRY_GOTO(peri_tensor_slice(k->weights, 0, first, last, 1, &weights), out);
    const int64_t *bags = k->lengths_offset_per_key;
    PERI_TRY_GOTO(peri_tensor_slice(k->bags.lengths, 0, bags[key], bags[key + 1], 1, &lengths), out);
    status = peri__jt_adopt(values, weights, lengths, NULL, out);
out:
    peri_tensor_release(values);
    peri_tensor_release(weights);
    peri_tensor_release(lengths);
    return status;
}

static peri_status check_rows(const peri_kjt *k, const peri_tensor *rows)
{
    char text[128];
    if (rows->ndim < 1 || rows->shape[0] != k->values->shape[0])
        return peri__fail(PERI_EINVAL, "peri_kjt_cut: rows are %s for %lld ids, wanted one row per id",
                          peri__tensor_text(rows, text, sizeof text), (long long)k->values->shape[0]);
    return peri__check_same_device("peri_kjt_cut", rows, k->values);
}

/** JaggedTensor @key of the parts of all keys. @indices NULL: without weights. */
static peri_status cut_key(const peri_kjt *k, int32_t key, peri_tensor *values, peri_tensor *indices, peri_jt **out)
{
    const int64_t *bags = k->lengths_offset_per_key;
    peri_tensor *lengths, *own = NULL;
    PERI_TRY(peri_tensor_slice(k->bags.lengths, 0, bags[key], bags[key + 1], 1, &lengths));
    peri_status status = PERI_OK;
    if (indices) status = peri_tensor_slice(indices, 0, k->offset_per_key[key], k->offset_per_key[key + 1], 1, &own);
    if (status >= 0) status = peri__jt_adopt(values, own, lengths, NULL, out);
    peri_tensor_release(own);
    peri_tensor_release(lengths);
    return status;
}

peri_status peri__kjt_cut(const peri_kjt *k, peri_tensor *const *values, bool indices, peri_jt **out)
{
    int32_t n = k->keys->count;
    peri_jt **made = peri__alloc_zero(sizeof *made * (size_t)peri__max(n, 1));
    if (!made) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++)
        status = cut_key(k, i, values[i], indices ? k->values : NULL, &made[i]);
    for (int32_t i = 0; i < n; i++) {
        if (status >= 0) out[i] = made[i];
        else peri_jt_release(made[i]);
    }
    peri__free(made);
    return status;
}

peri_status peri_kjt_cut(peri_kjt *k, peri_tensor *rows, bool indices, peri_jt **out)
{
    PERI_NEED(k);
    PERI_NEED(rows);
    PERI_NEED(out);
    PERI_TRY(check_rows(k, rows));
    PERI_TRY(peri_kjt_sync(k));
    PERI_TRY(peri__bags_lengths(&k->bags));
    int32_t n = k->keys->count;
    peri_tensor *flat, **parts = peri__alloc(sizeof *parts * (size_t)peri__max(n, 1));
    peri_status status = parts ? peri_tensor_contiguous(rows, &flat) : PERI_ENOMEM;
    if (status >= 0) {
        status = peri__rows_split(flat, k->offset_per_key, n, parts);
        peri_tensor_release(flat);
    }
    if (status >= 0) {
        status = peri__kjt_cut(k, parts, indices, out);
        for (int32_t i = 0; i < n; i++) peri_tensor_release(parts[i]);
    }
    peri__free(parts);
    return status;
}
