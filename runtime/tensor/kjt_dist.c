/* SPDX-License-Identifier: Apache-2.0
 *
 * kjt_dist.c: KeyedJaggedTensor: the parts that an exchange sends, and the kjt that the receiver makes of them.
 */
#include "jagged_internal.h"
#include "../../kernels/jagged.h"

int32_t peri_kjt_dist_labels(const peri_kjt *k, int32_t *labels)
{
    if (!k || !labels) return 0;
    int32_t n = 0;
    labels[n++] = PERI_KJT_LENGTHS;
    labels[n++] = PERI_KJT_VALUES;
    if (k->ranks) labels[n++] = PERI_KJT_STRIDES;
    if (k->weights) labels[n++] = PERI_KJT_WEIGHTS;
    return n;
}

peri_status peri_kjt_dist_splits(peri_kjt *k, const int32_t *key_splits, int32_t n, int64_t *out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    if (n > 0) PERI_NEED(key_splits);
    int64_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        if (key_splits[i] < 0)
            return peri__fail(PERI_EINVAL, "peri_kjt_dist_splits: %d keys for rank %d", key_splits[i], i);
        sum += key_splits[i];
    }
    if (n < 1 || sum != k->keys->count)
        return peri__fail(PERI_EINVAL, "peri_kjt_dist_splits: the splits sum to %lld, but there are %d keys",
                          (long long)sum, k->keys->count);
    PERI_TRY(peri_kjt_sync(k));
    int32_t labels[PERI_KJT_LABELS], count = peri_kjt_dist_labels(k, labels);
    for (int32_t l = 0; l < count; l++) {
        int32_t key = 0;
        for (int32_t r = 0; r < n; r++) {
            int32_t end = key + key_splits[r];
            switch (labels[l]) {
            case PERI_KJT_LENGTHS:
                out[l * n + r] = k->lengths_offset_per_key[end] - k->lengths_offset_per_key[key];
                break;
            case PERI_KJT_STRIDES: out[l * n + r] = key_splits[r]; break;
            default: out[l * n + r] = k->offset_per_key[end] - k->offset_per_key[key]; break;
            }
            key = end;
        }
    }
    return PERI_OK;
}

peri_status peri_kjt_dist_tensors(peri_kjt *k, peri_tensor **out)
{
    PERI_NEED(k);
    PERI_NEED(out);
    int32_t labels[PERI_KJT_LABELS], count = peri_kjt_dist_labels(k, labels);
    peri_tensor *strides = NULL;
    PERI_TRY(peri__bags_lengths(&k->bags));
    if (k->ranks) PERI_TRY(peri__upload_i64(peri__kjt_device(k), k->stride_per_key, k->keys->count, &strides));
    for (int32_t l = 0; l < count; l++) {
        out[l] = labels[l] == PERI_KJT_LENGTHS  ? k->bags.lengths
                 : labels[l] == PERI_KJT_VALUES ? k->values
                                                : k->weights;
        if (labels[l] == PERI_KJT_STRIDES) out[l] = strides;
        else peri_tensor_retain(out[l]);
    }
    return PERI_OK;
}

/** The place-th rank of the rows of a key. */
static int32_t rank_at(int32_t ranks, int32_t stagger, int32_t place)
{
    return place / stagger + ranks / stagger * (place % stagger);
}

peri_status peri_kjt_recat(int32_t keys, int32_t ranks, int32_t stagger, int32_t *out)
{
    PERI_NEED(out);
    stagger = peri__stagger(stagger);
    if (keys < 0 || ranks < 1 || stagger < 1 || ranks % stagger)
        return peri__fail(PERI_EINVAL, "peri_kjt_recat: %d keys, %d ranks, stagger %d; wanted: stagger divides ranks",
                          keys, ranks, stagger);
    if ((int64_t)keys * ranks > INT32_MAX)
        return peri__fail(PERI_ERANGE, "peri_kjt_recat: %d keys of %d ranks, allowed: less than 2^31 segments", keys,
                          ranks);
    for (int32_t i = 0; i < keys; i++)
        for (int32_t j = 0; j < ranks; j++) out[i * ranks + j] = i + rank_at(ranks, stagger, j) * keys;
    return PERI_OK;
}

/* -- rebuilding ---------------------------------------------------------------------------------------------------- */

void peri__recat_fini(peri__recat *b)
{
    peri__free(b->recat);
    peri__free(b->bags);
    peri_tensor_release(b->table);
    *b = (peri__recat){0};
}

static int64_t stride_of_key(const peri_kjt_dist_args *a, int64_t rank, int64_t key)
{
    return a->strides ? a->strides[rank * a->keys->count + key] : a->stride_per_rank[rank];
}

static peri_status check_args(const peri_kjt_dist_args *a)
{
    static const char f[] = "peri_kjt_dist_init";
    if (!a->keys) return peri__fail(PERI_EINVAL, "%s: no keys", f);
    if (!a->strides == !a->stride_per_rank)
        return peri__fail(PERI_EINVAL, "%s: either strides or stride_per_rank is wanted", f);
    PERI_TRY(peri__check_tensor(f, "lengths", a->lengths, -1, 1));
    PERI_TRY(peri__check_tensor(f, "values", a->values, -1, -1));
    if (a->values->ndim < 1) return peri__fail(PERI_EINVAL, "%s: values are a scalar", f);
    if (a->lengths->dtype != PERI_I32 && a->lengths->dtype != PERI_I64)
        return peri__fail(PERI_EINVAL, "%s: lengths are %s, allowed: i32, i64", f, peri_dtype_name(a->lengths->dtype));
    PERI_TRY(peri__check_same_device(f, a->lengths, a->values));
    if (a->weights && (a->weights->ndim < 1 || a->weights->shape[0] != a->values->shape[0]))
        return peri__fail(PERI_EINVAL, "%s: %lld weights for %lld values", f,
                          (long long)(a->weights->ndim ? a->weights->shape[0] : 1), (long long)a->values->shape[0]);
    int64_t left = a->lengths->shape[0], most = (int64_t)1 << 50, batch = 0;
    for (int32_t r = 0; r < a->ranks && a->stride_per_rank; r++) { /* without keys they are nowhere else to be seen */
        if (a->stride_per_rank[r] < 0 || a->stride_per_rank[r] > most - batch)
            return peri__fail(PERI_EINVAL, "%s: rank %d has a batch of %lld, allowed: 0 or more, less than 2^50 in all",
                              f, r, (long long)a->stride_per_rank[r]);
        batch += a->stride_per_rank[r];
    }
    for (int64_t r = 0; r < a->ranks; r++)
        for (int64_t k = 0; k < a->keys->count; k++) {
            int64_t rows = stride_of_key(a, r, k);
            if (rows < 0 || rows > left)
                return peri__fail(PERI_EINVAL,
                                  "%s: rank %lld sent %lld rows of key '%.200s', %lld lengths are left for it", f,
                                  (long long)r, (long long)rows, a->keys->names[k], (long long)left);
            left -= rows;
        }
    if (left) return peri__fail(PERI_EINVAL, "%s: %lld lengths more than the strides say", f, (long long)left);
    return PERI_OK;
}

peri_status peri__recat_init(peri__recat *b, peri_device *device, int32_t keys, int32_t ranks, int32_t stagger,
                             const int64_t *stride_per_rank, const int64_t *strides)
{
    int64_t n = (int64_t)keys * ranks;
    *b = (peri__recat){.segments = n, .in_order = true};
    b->recat = peri__alloc(sizeof *b->recat * (size_t)peri__max(n, 1));
    b->bags = peri__alloc(sizeof *b->bags * (size_t)(2 * n + 1 + 3 * n + 1));
    if (!b->recat || !b->bags) return PERI_ENOMEM;
    PERI_TRY(peri_kjt_recat(keys, ranks, stagger, b->recat));
    b->per_key_rank = b->bags + n + 1;
    int64_t *recat = b->per_key_rank + n, *inverse = recat + n, *first = inverse + n;
    b->bags[0] = first[0] = 0;
    for (int64_t s = 0; s < n; s++) b->bags[s + 1] = b->bags[s] + (strides ? strides[s] : stride_per_rank[s / keys]);
    for (int64_t t = 0; t < n; t++) {
        int64_t s = b->recat[t];
        b->per_key_rank[t] = b->bags[s + 1] - b->bags[s];
        recat[t] = s;
        inverse[s] = t;
        first[t + 1] = first[t] + b->per_key_rank[t];
        b->in_order = b->in_order && s == t;
    }
    return b->in_order ? PERI_OK : peri__upload_i64(device, recat, 3 * n + 1, &b->table);
}

/** i64 [n] scratch on the device of @like. */
static peri_status scratch(const peri_tensor *like, int64_t n, peri_tensor **out)
{
    return peri_tensor_new(peri__device(like), PERI_I64, 1, &n, out);
}

peri_status peri__recat_offsets(const peri__recat *b, const peri_tensor *offsets, peri_tensor **in,
                                peri_tensor **result)
{
    int64_t n = b->segments;
    const int64_t *table = peri__data(b->table);
    peri_device *device = peri__device(offsets);
    peri_tensor *lengths = NULL;
    peri_status status;
    PERI_TRY_GOTO(scratch(offsets, n + 1, result), out);
    PERI_TRY_GOTO(scratch(offsets, n + 1, in), out);
    PERI_TRY_GOTO(scratch(offsets, n, &lengths), out);
    peri_k_jagged_bounds_args bounds = {.offsets = peri__data(offsets),
                                        .bounds = table + 2 * n,
                                        .out = peri__data(*result),
                                        .offsets_dtype = offsets->dtype,
                                        .out_dtype = PERI_I64};
    PERI_TRY_GOTO(PERI_LAUNCH(device, jagged_bounds, &bounds, n + 1, 1 << 14), out);
    peri_k_jagged_lengths_args own = {.offsets = peri__data(*result), .permute = table + n, .out = peri__data(lengths),
                                      .offsets_dtype = PERI_I64, .permute_dtype = PERI_I64, .out_dtype = PERI_I64};
    PERI_TRY_GOTO(PERI_LAUNCH(device, jagged_lengths, &own, n, 1 << 14), out);
    PERI_TRY_GOTO(peri__complete_sum(lengths, -1, *in), out);
out:
    peri_tensor_release(lengths);
    return status;
}

/** Copy rows of @src into @dst by segments: @permute and both offsets are on the device. */
static peri_status move(const peri__recat *b, const peri_tensor *src, peri_tensor *dst, const int64_t *from,
                        const int64_t *to, const int64_t *permute)
{
    const int64_t width = peri__row_bytes(src);
    if (width == 0) return PERI_OK;
    peri_k_jagged_copy_args args = {.dst = peri__data(dst),
                                    .src = peri__data(src),
                                    .out_offsets = to,
                                    .in_offsets = from,
                                    .permute = permute,
                                    .width = width,
                                    .segments = b->segments,
                                    .out_dtype = PERI_I64,
                                    .in_dtype = PERI_I64,
                                    .permute_dtype = PERI_I64};
    return PERI_LAUNCH(peri__device(src), jagged_copy, &args, dst->shape[0], peri__row_grain(width));
}

peri_status peri__recat_move(const peri__recat *b, const peri_tensor *src, peri_tensor *dst, const peri_tensor *in,
                             const peri_tensor *result, bool back)
{
    const int64_t *recat = peri__data(b->table), *from = peri__data(back ? result : in),
                  *to = peri__data(back ? in : result);
    return move(b, src, dst, from, to, back ? recat + b->segments : recat);
}

/** lengths in the result's order. */
static peri_status move_lengths(const peri__recat *b, const peri_tensor *lengths, peri_tensor **out)
{
    peri_tensor *from = NULL;
    PERI_TRY(peri__tensor_like(lengths, 1, lengths->shape, out));
    PERI_TRY(peri__upload_i64(peri__device(lengths), b->bags, b->segments + 1, &from));
    const int64_t *recat = peri__data(b->table);
    peri_status status = move(b, lengths, *out, peri__data(from), recat + 2 * b->segments, recat);
    peri_tensor_release(from);
    return status;
}

peri_status peri_kjt_dist_init(const peri_kjt_dist_args *a, peri_kjt **out)
{
    PERI_NEED(a);
    PERI_NEED(out);
    PERI_TRY(check_args(a));
    peri__recat b = {0};
    peri_tensor *in = NULL, *result = NULL, *lengths = NULL, *values = NULL, *weights = NULL;
    peri__kjt_parts p = {.keys = a->keys, .ranks = a->strides ? a->ranks : 0, .longest = -1};
    peri_kjt *k = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(a->lengths, &lengths), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(a->values, &values), out);
    if (a->weights) PERI_TRY_GOTO(peri_tensor_contiguous(a->weights, &weights), out);
    PERI_TRY_GOTO(peri__recat_init(&b, peri__device(values), a->keys->count, a->ranks, a->stagger, a->stride_per_rank,
                                   a->strides),
                  out);
    p.stride_per_key_per_rank = a->strides ? b.per_key_rank : NULL;
    p.stride = a->strides ? peri__kjt_most_rows(b.per_key_rank, a->keys->count, a->ranks)
                          : peri__sum(a->stride_per_rank, a->ranks);
    p.lengths = lengths;
    p.values = values;
    p.weights = weights;
    if (!b.in_order) {
        p.lengths = p.values = p.weights = NULL;
        PERI_TRY_GOTO(move_lengths(&b, lengths, &p.lengths), out);
        PERI_TRY_GOTO(peri__tensor_like(values, values->ndim, values->shape, &p.values), out);
        if (weights) PERI_TRY_GOTO(peri__tensor_like(weights, weights->ndim, weights->shape, &p.weights), out);
    }
    PERI_TRY_GOTO(peri__kjt_adopt(&p, &k), out);
    PERI_TRY_GOTO(peri_kjt_sync_post(k), out); /* makes the offsets, clamped to the values */
    if (!b.in_order) {
        PERI_TRY_GOTO(peri__recat_offsets(&b, k->bags.offsets, &in, &result), out);
        PERI_TRY_GOTO(peri__recat_move(&b, values, p.values, in, result, false), out);
        if (weights) PERI_TRY_GOTO(peri__recat_move(&b, weights, p.weights, in, result, false), out);
    }
    if (peri_device_host_access(peri__kjt_device(k))) PERI_TRY_GOTO(peri_kjt_sync(k), out);
    *out = k;
    k = NULL;
out:
    peri_kjt_release(k);
    if (!b.in_order) {
        peri_tensor_release(p.lengths);
        peri_tensor_release(p.values);
        peri_tensor_release(p.weights);
    }
    peri__recat_fini(&b);
    peri_tensor_release(in);
    peri_tensor_release(result);
    peri_tensor_release(lengths);
    peri_tensor_release(values);
    peri_tensor_release(weights);
    return status < 0 ? status : PERI_OK;
}
