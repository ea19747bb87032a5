/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt_join.c: KeyedJaggedTensor: joining, moving between devices, copying in place, comparing.
 */
#include "jagged_internal.h"

/* -- joining ------------------------------------------------------------------------------------------------------- */

/** One of the tensors of a kjt or jt. */
typedef peri_tensor *(*pick_fn)(const void *container);

static peri_tensor *kjt_values(const void *k) { return ((const peri_kjt *)k)->values; }
static peri_tensor *kjt_weights(const void *k) { return ((const peri_kjt *)k)->weights; }
static peri_tensor *kjt_lengths(const void *k) { return ((const peri_kjt *)k)->bags.lengths; }
static peri_tensor *kjt_inverse(const void *k) { return ((const peri_kjt *)k)->inverse; }
static peri_tensor *jt_values(const void *j) { return ((const peri_jt *)j)->values; }
static peri_tensor *jt_weights(const void *j) { return ((const peri_jt *)j)->weights; }
static peri_tensor *jt_lengths(const void *j) { return ((const peri_jt *)j)->bags.lengths; }

/** Rows of the same tensor of all containers; NULL if they have none. Lengths and inverse indices of both widths become
 *  i64. */
static peri_status join(const char *function, const void *const *containers, int32_t n, pick_fn pick, bool widen,
                        peri_tensor **out)
{
    if (!pick(containers[0])) return PERI_OK;
    peri_tensor **t = peri__alloc_zero(sizeof *t * (size_t)n);
    if (!t) return PERI_ENOMEM;
    bool mixed = false;
    for (int32_t i = 0; i < n; i++) mixed = mixed || pick(containers[i])->dtype != pick(containers[0])->dtype;
    peri_status status = PERI_OK;
    int32_t dtype = widen && mixed ? PERI_I64 : -1;
    for (int32_t i = 0; i < n && status >= 0; i++) status = peri_tensor_to(pick(containers[i]), dtype, NULL, &t[i]);
    if (status >= 0) status = peri__rows_cat(function, t, n, out);
    for (int32_t i = 0; i < n; i++) peri_tensor_release(t[i]);
    peri__free(t);
    return status;
}

static const char *const concat_name = "peri_kjt_concat";

/** All kjts are of the kind of the first. */
static peri_status check_alike(peri_kjt *const *kjts, int32_t n)
{
    const peri_kjt *a = kjts[0];
    for (int32_t i = 0; i < n; i++) {
        const peri_kjt *b = kjts[i];
        if (!a->weights != !b->weights)
            return peri__fail(PERI_EINVAL, "%s: number %d is %s, number 0 is %s", concat_name, i,
                              b->weights ? "weighted" : "not weighted", a->weights ? "weighted" : "not weighted");
        if (a->ranks != b->ranks)
            return peri__fail(PERI_EINVAL,
                              "%s: number %d has %d ranks of stride_per_key_per_rank, number 0 has %d (0: fixed batch)",
                              concat_name, i, b->ranks, a->ranks);
        if (a->ranks == 0 && a->stride != b->stride)
            return peri__fail(PERI_EINVAL, "%s: number %d has stride %lld, number 0 has %lld", concat_name, i,
                              (long long)b->stride, (long long)a->stride);
        if (!a->inverse != !b->inverse)
            return peri__fail(PERI_EINVAL, "%s: number %d has %sinverse indices, number 0 has %s", concat_name, i,
                              b->inverse ? "" : "no ", a->inverse ? "some" : "none");
        if (a->inverse && a->inverse->shape[1] != b->inverse->shape[1])
            return peri__fail(PERI_EINVAL, "%s: number %d has inverse indices of batch %lld, number 0 of %lld",
                              concat_name, i, (long long)b->inverse->shape[1], (long long)a->inverse->shape[1]);
        PERI_TRY(peri__check_same_device(concat_name, a->values, b->values));
    }
    return PERI_OK;
}

/** The keys of all kjts (or of their inverse indices), each once. */
static peri_status join_keys(peri_kjt *const *kjts, int32_t n, bool inverse, peri_keys **out)
{
    int64_t count = 0;
    for (int32_t i = 0; i < n; i++) count += (inverse ? kjts[i]->inverse_keys : kjts[i]->keys)->count;
    const char **names = peri__alloc(sizeof *names * (size_t)peri__max(count, 1));
    if (!names) return PERI_ENOMEM;
    int32_t at = 0;
    for (int32_t i = 0; i < n; i++) {
        const peri_keys *k = inverse ? kjts[i]->inverse_keys : kjts[i]->keys;
        for (int32_t j = 0; j < k->count; j++) names[at++] = k->names[j];
    }
    peri_keys *keys;
    peri_status status = peri_keys_new(names, at, &keys);
    if (status >= 0 && !keys->unique) {
        for (int32_t i = 0; i < at && status >= 0; i++)
            if (peri_keys_find(keys, names[i]) != i)
                status = peri__fail(PERI_EINVAL, "%s: key '%.200s' occurs twice", concat_name, names[i]);
        peri_keys_release(keys);
    } else if (status >= 0) {
        *out = keys;
    }
    peri__free(names);
    return status;
}

/** Sizes of all keys: ids, then rows per rank. */
static int64_t *join_sizes(peri_kjt *const *kjts, int32_t n, int64_t count)
{
    int64_t ranks = kjts[0]->ranks, at = 0;
    int64_t *sizes = peri__alloc(sizeof *sizes * (size_t)peri__max(1, count * (ranks + 1)));
    for (int32_t i = 0; sizes && i < n; i++) {
        size_t own = (size_t)kjts[i]->keys->count;
        memcpy(sizes + at, kjts[i]->length_per_key, sizeof *sizes * own);
        if (ranks)
            memcpy(sizes + count + at * ranks, kjts[i]->stride_per_key_per_rank, sizeof *sizes * own * (size_t)ranks);
        at += (int64_t)own;
    }
    return sizes;
}

peri_status peri_kjt_concat(peri_kjt *const *kjts, int32_t n, peri_kjt **out)
{
    PERI_NEED(kjts);
    PERI_NEED(out);
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d kjts, wanted at least 1", concat_name, n);
    PERI_TRY(peri__check_list(concat_name, "the kjts", kjts, n));
    PERI_TRY(check_alike(kjts, n));
    int64_t stride = 0, longest = 0;
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri_kjt_sync(kjts[i]));
        PERI_TRY(peri__bags_lengths(&kjts[i]->bags));
        stride = peri__max(stride, kjts[i]->stride);
        longest = longest < 0 || kjts[i]->bags.longest < 0 ? -1 : peri__max(longest, kjts[i]->bags.longest);
    }
    const void *const *parts = (const void *const *)kjts;
    peri__kjt_parts p = {.ranks = kjts[0]->ranks, .stride = stride, .longest = longest};
    int64_t *sizes = NULL;
    peri_status status;
    PERI_TRY_GOTO(join_keys(kjts, n, false, &p.keys), out);
    if (kjts[0]->inverse) PERI_TRY_GOTO(join_keys(kjts, n, true, &p.inverse_keys), out);
    PERI_TRY_GOTO(join(concat_name, parts, n, kjt_values, false, &p.values), out);
    PERI_TRY_GOTO(join(concat_name, parts, n, kjt_weights, false, &p.weights), out);
    PERI_TRY_GOTO(join(concat_name, parts, n, kjt_lengths, true, &p.lengths), out);
    PERI_TRY_GOTO(join(concat_name, parts, n, kjt_inverse, true, &p.inverse), out);
    sizes = join_sizes(kjts, n, p.keys->count);
    PERI_TRY_GOTO(sizes ? PERI_OK : PERI_ENOMEM, out);
    p.length_per_key = sizes;
    p.stride_per_key_per_rank = p.ranks ? sizes + p.keys->count : NULL;
    status = peri__kjt_adopt(&p, out);
out:
    peri__free(sizes);
    peri_keys_release(p.keys);
    peri_keys_release(p.inverse_keys);
    peri_tensor_release(p.values);
    peri_tensor_release(p.weights);
    peri_tensor_release(p.lengths);
    peri_tensor_release(p.inverse);
    return status;
}

static const char *const from_jts_name = "peri_kjt_from_jts";

static peri_status check_jts(const peri_keys *keys, peri_jt *const *jts)
{
    for (int32_t i = 0; i < keys->count; i++) {
        if (!jts[0]->weights != !jts[i]->weights)
            return peri__fail(PERI_EINVAL, "%s: key '%.150s' is %s, key '%.150s' is %s", from_jts_name, keys->names[i],
                              jts[i]->weights ? "weighted" : "not weighted", keys->names[0],
                              jts[0]->weights ? "weighted" : "not weighted");
        peri_status status = peri__check_same_device(from_jts_name, jts[0]->values, jts[i]->values);
        if (status >= 0 && !jts[i]->bags.checked) status = peri_jt_validate(jts[i]);
        PERI_TRY(status);
        PERI_TRY(peri__bags_lengths(&jts[i]->bags));
    }
    return PERI_OK;
}

peri_status peri_kjt_from_jts(peri_keys *keys, peri_jt *const *jts, peri_kjt **out)
{
    PERI_NEED(keys);
    PERI_NEED(out);
    PERI_NEED(jts);
    int32_t n = keys->count;
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: no keys, wanted at least 1", from_jts_name);
    if (!keys->unique) return peri__fail(PERI_EINVAL, "%s: a key repeats", from_jts_name);
    PERI_TRY(peri__check_list(from_jts_name, "the jts", jts, n));
    PERI_TRY(check_jts(keys, jts));
    const void *const *parts = (const void *const *)jts;
    peri__kjt_parts p = {.keys = keys, .longest = -1};
    int64_t *sizes = peri__alloc(sizeof *sizes * 2 * (size_t)n);
    if (!sizes) return PERI_ENOMEM;
    bool equal = true;
    for (int32_t i = 0; i < n; i++) {
        sizes[i] = jts[i]->bags.values;
        sizes[n + i] = jts[i]->bags.bags;
        equal = equal && jts[i]->bags.bags == jts[0]->bags.bags;
        p.stride = peri__max(p.stride, jts[i]->bags.bags);
    }
    p.length_per_key = sizes;
    p.ranks = equal ? 0 : 1;
    p.stride_per_key_per_rank = equal ? NULL : sizes + n;
    peri_status status;
    PERI_TRY_GOTO(join(from_jts_name, parts, n, jt_values, false, &p.values), out);
    PERI_TRY_GOTO(join(from_jts_name, parts, n, jt_weights, false, &p.weights), out);
    PERI_TRY_GOTO(join(from_jts_name, parts, n, jt_lengths, true, &p.lengths), out);
    status = peri__kjt_adopt(&p, out);
out:
    peri__free(sizes);
    peri_tensor_release(p.values);
    peri_tensor_release(p.weights);
    peri_tensor_release(p.lengths);
    return status;
}

/* -- moving -------------------------------------------------------------------------------------------------------- */

/** The same container of tensors that @move has made. */
static peri_status moved(peri_kjt *k, peri_device *device, peri__move_fn move, peri_kjt **out)
{
    const peri__bags *b = &k->bags;
    peri__kjt_parts p = {.keys = k->keys,
                         .stride = k->stride,
                         .ranks = k->ranks,
                         .stride_per_key_per_rank = k->stride_per_key_per_rank,
                         .inverse_keys = k->inverse_keys,
                         .length_per_key = k->synced ? k->length_per_key : NULL,
                         .longest = b->longest};
    peri_status status;
    PERI_TRY_GOTO(move(k->values, -1, device, &p.values), out);
    if (k->weights) PERI_TRY_GOTO(move(k->weights, -1, device, &p.weights), out);
    if (b->lengths && (b->given_lengths || !b->given_offsets))
        PERI_TRY_GOTO(move(b->lengths, -1, device, &p.lengths), out);
    if (b->offsets && b->given_offsets) PERI_TRY_GOTO(move(b->offsets, -1, device, &p.offsets), out);
    if (k->inverse) PERI_TRY_GOTO(move(k->inverse, -1, device, &p.inverse), out);
    peri_kjt *made;
    PERI_TRY_GOTO(peri__kjt_adopt(&p, &made), out);
    if (!k->synced && peri_device_host_access(peri__device(p.values))) status = peri_kjt_sync(made);
    if (status < 0) peri_kjt_release(made);
    else *out = made;
out:
    peri_tensor_release(p.values);
    peri_tensor_release(p.weights);
    peri_tensor_release(p.lengths);
    peri_tensor_release(p.offsets);
    peri_tensor_release(p.inverse);
    return status;
}

static peri_status move_kjt(const char *function, peri_kjt *k, peri_device *device, peri__move_fn move, peri_kjt **out)
{
    if (!device) return peri__fail(PERI_EINVAL, "%s: no device", function);
    if (device == peri__kjt_device(k)) {
        peri_kjt_retain(k);
        *out = k;
        return PERI_OK;
    }
    return moved(k, device, move, out);
}

peri_status peri_kjt_to(peri_kjt *k, peri_device *device, peri_kjt **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    return move_kjt("peri_kjt_to", k, device, peri_tensor_to, out);
}

peri_status peri_kjt_upload(peri_kjt *k, peri_device *device, peri_kjt **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    return move_kjt("peri_kjt_upload", k, device, peri_tensor_upload, out);
}

peri_status peri_kjt_pin(peri_kjt *k, peri_device *device, peri_kjt **out)
{
    PERI_NEED(k);
    PERI_NEED(device);
    PERI_NEED(out);
    return moved(k, device, peri__move_pinned, out);
}

/** Whether @dst has room for exactly @src. */
static peri_status check_room(const peri_kjt *dst, const peri_kjt *src)
{
    const char *f = "peri_kjt_copy";
    if (!peri_keys_equal(dst->keys, src->keys)) return peri__fail(PERI_EINVAL, "%s: the keys differ", f);
    size_t size = sizeof(int64_t) * (size_t)(src->keys->count * (src->ranks ? src->ranks : 1));
    if (dst->ranks != src->ranks ||
        (src->ranks ? memcmp(dst->stride_per_key_per_rank, src->stride_per_key_per_rank, size) != 0 : 0) ||
        dst->stride != src->stride)
        return peri__fail(PERI_EINVAL, "%s: the strides differ (%lld and %lld rows, %d and %d ranks)", f,
                          (long long)dst->stride, (long long)src->stride, dst->ranks, src->ranks);
    if (dst->bags.values != src->bags.values)
        return peri__fail(PERI_EINVAL, "%s: %lld values into room for %lld", f, (long long)src->bags.values,
                          (long long)dst->bags.values);
    if (!dst->weights != !src->weights) return peri__fail(PERI_EINVAL, "%s: one is weighted, the other is not", f);
    if (!dst->inverse != !src->inverse)
        return peri__fail(PERI_EINVAL, "%s: one has inverse indices, the other has none", f);
    if (src->inverse && !peri_keys_equal(dst->inverse_keys, src->inverse_keys))
        return peri__fail(PERI_EINVAL, "%s: the keys of the inverse indices differ", f);
    return PERI_OK;
}

peri_status peri_kjt_copy(peri_kjt *dst, peri_kjt *src)
{
    PERI_NEED(dst);
    PERI_NEED(src);
    PERI_TRY(check_room(dst, src));
    if (dst == src) return PERI_OK;
    if (dst->bags.lengths) PERI_TRY(peri__bags_lengths(&src->bags));
    if (dst->bags.offsets) PERI_TRY(peri__bags_offsets(&src->bags));
    peri_kjt_unsync(dst); /* also when a copy below fails half-way */
    peri__report_return(dst->bags.report);
    peri__report_return(dst->inverse_report);
    dst->bags.report = dst->inverse_report = NULL;
    PERI_TRY(peri_tensor_copy(dst->values, src->values));
    if (dst->weights) PERI_TRY(peri_tensor_copy(dst->weights, src->weights));
    if (dst->inverse) PERI_TRY(peri_tensor_copy(dst->inverse, src->inverse));
    if (dst->bags.lengths) PERI_TRY(peri_tensor_copy(dst->bags.lengths, src->bags.lengths));
    if (dst->bags.offsets) PERI_TRY(peri_tensor_copy(dst->bags.offsets, src->bags.offsets));
    dst->bags.given_lengths = dst->bags.lengths != NULL;
    dst->bags.given_offsets = dst->bags.offsets != NULL && (!dst->bags.lengths || src->bags.given_offsets);
    if (dst->bags.version >= 0) dst->bags.version = peri__bags_version(&dst->bags);
    if (!src->synced) return peri_device_host_access(peri__kjt_device(dst)) ? peri_kjt_sync(dst) : PERI_OK;
    size_t n = (size_t)dst->keys->count;
    memcpy(dst->length_per_key, src->length_per_key, sizeof(int64_t) * n);
    memcpy(dst->offset_per_key, src->offset_per_key, sizeof(int64_t) * (n + 1));
    dst->bags.longest = src->bags.longest;
    dst->bags.checked = dst->synced = true;
    return PERI_OK;
}

peri_status peri_kjt_empty(peri_device *device, int32_t values_dtype, int32_t lengths_dtype, int32_t weights_dtype,
                           peri_kjt **out)
{
    PERI__NOT_AT_BORDER;
    int64_t none = 0;
    peri_kjt_config a = {.size = sizeof a};
    peri_status status;
    PERI_TRY_GOTO(peri_keys_new(NULL, 0, &a.keys), out);
    PERI_TRY_GOTO(peri_tensor_new(device, values_dtype, 1, &none, &a.values), out);
    PERI_TRY_GOTO(peri_tensor_new(device, lengths_dtype, 1, &none, &a.lengths), out);
    if (weights_dtype >= 0) PERI_TRY_GOTO(peri_tensor_new(device, weights_dtype, 1, &none, &a.weights), out);
    status = peri_kjt_new(&a, out);
out:
    peri_keys_release(a.keys);
    peri_tensor_release(a.values);
    peri_tensor_release(a.lengths);
    peri_tensor_release(a.weights);
    return status;
}

peri_status peri_kjt_empty_like(peri_kjt *k, peri_device *device, peri_kjt **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    if (!device) device = peri__kjt_device(k);
    PERI_TRY(peri__bags_lengths(&k->bags));
    peri__kjt_parts p = {.keys = k->keys,
                         .stride = k->stride,
                         .ranks = k->ranks,
                         .stride_per_key_per_rank = k->stride_per_key_per_rank,
                         .inverse_keys = k->inverse_keys,
                         .longest = -1};
    peri_status status;
    PERI_TRY_GOTO(peri__room(k->values, device, &p.values), out);
    PERI_TRY_GOTO(peri__room(k->weights, device, &p.weights), out);
    PERI_TRY_GOTO(peri__room(k->inverse, device, &p.inverse), out);
    if (p.inverse) PERI_TRY_GOTO(peri__tensor_zero(p.inverse), out);
    PERI_TRY_GOTO(peri__room(k->bags.lengths, device, &p.lengths), out);
    PERI_TRY_GOTO(peri__tensor_zero(p.lengths), out);
    status = peri__kjt_adopt(&p, out);
out:
    peri_tensor_release(p.values);
    peri_tensor_release(p.weights);
    peri_tensor_release(p.lengths);
    peri_tensor_release(p.inverse);
    return status;
}

/* -- comparing ----------------------------------------------------------------------------------------------------- */

peri_status peri_kjt_equal(peri_kjt *a, peri_kjt *b, bool *out)
{
    PERI_NEED(a);
    PERI_NEED(b);
    PERI_NEED(out);
    bool same = peri_keys_equal(a->keys, b->keys) && a->stride == b->stride && a->ranks == b->ranks &&
                !a->inverse == !b->inverse && a->bags.values == b->bags.values && a->bags.bags == b->bags.bags;
    if (same && a->ranks)
        same = !memcmp(a->stride_per_key_per_rank, b->stride_per_key_per_rank,
                       sizeof(int64_t) * (size_t)(a->keys->count * a->ranks));
    if (same && a->inverse) same = peri_keys_equal(a->inverse_keys, b->inverse_keys);
    if (same) {
        PERI_TRY(peri__bags_lengths(&a->bags));
        PERI_TRY(peri__bags_lengths(&b->bags));
        PERI_TRY(peri__tensors_equal(a->bags.lengths, b->bags.lengths, &same));
    }
    if (same) PERI_TRY(peri__tensors_equal(a->values, b->values, &same));
    if (same) PERI_TRY(peri__tensors_equal(a->weights, b->weights, &same));
    if (same) PERI_TRY(peri__tensors_equal(a->inverse, b->inverse, &same));
    *out = same;
    return PERI_OK;
}

int64_t peri_kjt_bytes(const peri_kjt *k)
{
    if (!k) return 0;
    return peri__tensor_bytes(k->values) + peri__tensor_bytes(k->weights) + peri__tensor_bytes(k->bags.lengths) +
           peri__tensor_bytes(k->bags.offsets) + peri__tensor_bytes(k->inverse);
}
