/* SPDX-License-Identifier: Apache-2.0
 *
 * bucketize.c: ids dealt to the shards of a table.
 */
#include "sparse_internal.h"
#include "../../kernels/sparse.h"

#include "../../kernels/divide.h"

#include <stdio.h>

/** Features and bounds as the kernel wants them, in one i64 tensor. */
typedef struct plan {
    int64_t bags, words;     /* bags of all features; words of the features' table */
    peri_tensor *table;
} plan;

static peri_status check_feature(const char *f, const peri_bucket_args *a, int32_t i, int64_t *block)
{
    *block = a->block_sizes[i];
    if (*block < 0)
        return peri__fail(PERI_EINVAL, "%s: feature %d: block size %lld, allowed: 0 or more", f, i, (long long)*block);
    if (a->total_num_blocks) {
        int64_t total = a->total_num_blocks[i], each = total / a->buckets;
        if (total < 0 || total % a->buckets || (each && *block > INT64_MAX / each))
            return peri__fail(PERI_EINVAL, "%s: feature %d: %lld blocks of %lld for %d buckets, wanted a multiple", f,
                              i, (long long)total, (long long)*block, a->buckets);
        *block *= each;
    }
    if (*block > INT64_MAX / a->buckets)
        return peri__fail(PERI_ERANGE, "%s: feature %d: blocks of %lld ids, allowed: less than 2^63 ids in %d buckets",
                          f, i, (long long)*block, a->buckets);
    const int64_t *bounds = a->bounds ? a->bounds[i] : NULL;
    for (int32_t b = 0; bounds && b <= a->buckets; b++)
        if (b ? bounds[b] < bounds[b - 1] : bounds[0] != 0)
            return peri__fail(PERI_EINVAL, "%s: feature %d: bound %d is %lld, wanted: 0 first, then not falling", f, i,
                              b, (long long)bounds[b]);
    return PERI_OK;
}

/** batch_sizes: bags of each feature. */
static peri_status plan_init(plan *p, const char *f, const peri_bucket_args *a, const int64_t *batch_sizes,
                             peri_device *device)
{
    int64_t n = a->n_features, with_bounds = 0, at = 0;
    for (int32_t i = 0; a->bounds && i < n; i++) with_bounds += a->bounds[i] != NULL;
    p->words = (n + 1) * PERI_BUCKET_WORDS;
    int64_t size = p->words + with_bounds * (a->buckets + 1);
    int64_t *host = peri__alloc_zero(sizeof *host * (size_t)size);
    if (!host) return PERI_ENOMEM;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        int64_t *w = host + i * PERI_BUCKET_WORDS;
        status = check_feature(f, a, i, &w[PERI_BUCKET_BLOCK]);
        w[PERI_BUCKET_FIRST_BAG] = p->bags;
        w[PERI_BUCKET_KEEP] = a->keep_original_indices && a->keep_original_indices[i];
        w[PERI_BUCKET_BOUNDS] = -1;
        if (status >= 0 && w[PERI_BUCKET_BLOCK] > 0) {
            peri_k_divisor block = peri_k_divisor_of(w[PERI_BUCKET_BLOCK]);
            w[PERI_BUCKET_MULTIPLIER] = (int64_t)block.multiplier;
            w[PERI_BUCKET_SHIFT] = block.shift;
        }
        if (a->bounds && a->bounds[i]) {
            memcpy(host + p->words + at, a->bounds[i], sizeof *host * (size_t)(a->buckets + 1));
            w[PERI_BUCKET_BOUNDS] = at;
            at += a->buckets + 1;
        }
        p->bags += batch_sizes[i];
    }
    host[n * PERI_BUCKET_WORDS + PERI_BUCKET_FIRST_BAG] = p->bags;
    if (status >= 0) status = peri__upload_i64(device, host, size, &p->table);
    peri__free(host);
    return status;
}

static peri_status rows_like(const peri_tensor *t, int64_t rows, int32_t dtype, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[0] = rows;
    return peri_tensor_new(peri__device(t), dtype, t->ndim, shape, out);
}

static void release_bucket_result(peri_bucket_result *r)
{
    peri_tensor **all[] = {&r->lengths, &r->ids, &r->weights, &r->positions, &r->unbucketize, &r->mapping};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        peri_tensor_release(*all[i]);
        *all[i] = NULL;
    }
}

/** All outputs, uninitialised. */
static peri_status allocate_bucket_result(peri_bucket_result *r, const peri_bucket_args *a, const peri__bags *b,
                                          int32_t lengths_dtype, const peri_tensor *ids, const peri_tensor *weights)
{
    int64_t n = b->values, slots = b->bags * a->buckets;
    peri_device *device = peri__device(ids);
    PERI_TRY(peri_tensor_new(device, lengths_dtype, 1, &slots, &r->lengths));
    PERI_TRY(rows_like(ids, n, ids->dtype, &r->ids));
    if (weights) PERI_TRY(rows_like(weights, n, weights->dtype, &r->weights));
    if (a->bucketize_pos) PERI_TRY(rows_like(ids, n, ids->dtype, &r->positions));
    if (a->sequence) PERI_TRY(rows_like(ids, n, PERI_I64, &r->unbucketize));
    if (a->bucket_mapping) PERI_TRY(rows_like(ids, n, PERI_I32, &r->mapping));
    return PERI_OK;
}

/** @b has its offsets: well formed, or made of lengths that are being checked, which are clamped and so lead nowhere
 *  else. @offsets: gets those of the result; NULL: nobody asks. */
static peri_status bucketize(const peri_bucket_args *a, const plan *p, const peri__bags *b, int32_t lengths_dtype,
                             const peri_tensor *ids, const peri_tensor *weights, peri_bucket_result *out,
                             peri_tensor **offsets)
{
    peri_bucket_result r = {0};
    peri_device *device = peri__device(ids);
    int64_t width = weights ? peri_dtype_size(weights->dtype) : 0;
    for (int32_t d = 1; weights && d < weights->ndim; d++) width *= weights->shape[d];
    int64_t ends = b->bags * a->buckets + 1;
    peri_status status = allocate_bucket_result(&r, a, b, lengths_dtype, ids, weights);
    if (status >= 0 && offsets) status = peri_tensor_new(device, PERI_I64, 1, &ends, offsets);
    if (status < 0) {
        release_bucket_result(&r);
        return status;
    }
    const int64_t *table = peri__data(p->table);
    peri_k_bucketize_args args = {.offsets = peri__data(b->offsets),
                                  .ids = peri__data(ids),
                                  .features = table,
                                  .bounds = table + p->words,
                                  .weights = width ? peri__data(weights) : NULL,
                                  .lengths = peri__data(r.lengths),
                                  .starts = offsets ? peri__data(*offsets) : NULL,
                                  .new_ids = peri__data(r.ids),
                                  .new_weights = width ? peri__data(r.weights) : NULL,
                                  .positions = r.positions ? peri__data(r.positions) : NULL,
                                  .unbucketize = r.unbucketize ? peri__data(r.unbucketize) : NULL,
                                  .mapping = r.mapping ? peri__data(r.mapping) : NULL,
                                  .bags = b->bags,
                                  .buckets = a->buckets,
                                  .n_features = a->n_features,
                                  .width = width,
                                  .n = b->values,
                                  .offsets_dtype = b->offsets->dtype,
                                  .ids_dtype = ids->dtype,
                                  .lengths_dtype = lengths_dtype};
    status = PERI_RUN(device, bucketize, &args);
    if (status < 0) release_bucket_result(&r);
    else *out = r;
    return status;
}

static peri_status check_args(const char *f, const peri_bucket_args *a, const peri_tensor *ids)
{
    char text[128];
    if (a->buckets < 1) return peri__fail(PERI_EINVAL, "%s: %d buckets, wanted at least 1", f, a->buckets);
    if (a->n_features < 0 || (a->n_features && !a->block_sizes))
        return peri__fail(PERI_EINVAL, "%s: no block sizes", f);
    PERI_TRY(peri__check_tensor(f, "ids", ids, -1, 1));
    if (ids->dtype != PERI_I64 && ids->dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "%s: ids are %s, allowed: i64, i32", f,
                          peri__tensor_text(ids, text, sizeof text));
    return PERI_OK;
}

static void bag_text(const void *owner, int64_t bag, char *text, size_t len)
{
    const int64_t *batch_sizes = owner;
    int32_t f = 0;
    for (; bag >= batch_sizes[f]; f++) bag -= batch_sizes[f];
    snprintf(text, len, "feature %d, sample %lld", f, (long long)bag);
}

/** Wait for the check of the bags, and judge it. */
static peri_status settle_bags(peri__bags *b, const char *f, const int64_t *batch_sizes)
{
    PERI_TRY(peri__report_wait(b->report));
    return peri__bags_judge(b, f, bag_text, batch_sizes);
}

/** Bags of each feature, as many entries as features: @given, or equal shares. */
static peri_status batch_sizes_of(const char *f, const peri_bucket_args *a, int64_t bags, const int64_t *given,
                                  int64_t **out)
{
    int64_t *sizes = peri__alloc(sizeof *sizes * (size_t)peri__max(a->n_features, 1)), sum = 0;
    if (!sizes) return PERI_ENOMEM;
    bool equal = a->n_features ? bags % a->n_features == 0 : bags == 0, wrong = !given && !equal;
    for (int32_t i = 0; i < a->n_features; i++) {
        sizes[i] = given ? given[i] : bags / a->n_features;
        wrong = wrong || sizes[i] < 0 || sizes[i] > bags - sum;
        sum += wrong ? 0 : sizes[i];
    }
    if (wrong || sum != bags) {
        peri__free(sizes);
        return peri__fail(PERI_EINVAL, "%s: %lld lengths for %d features%s", f, (long long)bags, a->n_features,
                          given ? ", and other batch sizes" : "");
    }
    *out = sizes;
    return PERI_OK;
}

peri_status peri_sparse_bucketize(const peri_bucket_args *a, peri_tensor *lengths, peri_tensor *ids,
                                  peri_tensor *weights, const int64_t *batch_sizes, peri_bucket_result *out)
{
    PERI_NEED(a);
    PERI_NEED(lengths);
    PERI_NEED(ids);
    PERI_NEED(out);
    static const char f[] = "peri_sparse_bucketize";
    PERI_TRY(check_args(f, a, ids));
    PERI_TRY(peri__check_tensor(f, "lengths", lengths, -1, 1));
    if (weights && (weights->ndim < 1 || weights->shape[0] != ids->shape[0]))
        return peri__fail(PERI_EINVAL, "%s: weights of other ids", f);
    if (weights) PERI_TRY(peri__check_same_device(f, weights, ids));
    peri__bags b = {0};
    plan p = {0};
    peri_tensor *flat = NULL, *flat_weights = NULL;
    int64_t *sizes = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__bags_init(f, &b, lengths, NULL, ids), out);
    PERI_TRY_GOTO(batch_sizes_of(f, a, b.bags, batch_sizes, &sizes), out);
    PERI_TRY_GOTO(plan_init(&p, f, a, sizes, peri__device(ids)), out);
    PERI_TRY_GOTO(peri__bags_post(&b, NULL, 0, 0), out);
    if (b.bags == 0) PERI_TRY_GOTO(settle_bags(&b, f, sizes), out); /* no place for a bag's lengths, whatever the ids */
    PERI_TRY_GOTO(peri_tensor_contiguous(ids, &flat), out);
    if (weights) PERI_TRY_GOTO(peri_tensor_contiguous(weights, &flat_weights), out);
    peri_bucket_result made;
    PERI_TRY_GOTO(bucketize(a, &p, &b, lengths->dtype, flat, flat_weights, &made, NULL), out);
    status = settle_bags(&b, f, sizes); /* the device has work meanwhile */
    if (status < 0) release_bucket_result(&made);
    else *out = made;
out:
    peri__bags_fini(&b);
    peri__free(sizes);
    peri_tensor_release(p.table);
    peri_tensor_release(flat);
    peri_tensor_release(flat_weights);
    return status;
}

/* -- kjt ----------------------------------------------------------------------------------------------------------- */

/** Each key @buckets times, bucket after bucket, and (vbe) its rows per rank likewise. */
static peri_status repeat_keys(const peri_kjt *k, int32_t buckets, peri_keys **keys, int64_t **per_rank)
{
    int64_t n = k->keys->count, row = n * k->ranks;
    if (n * buckets > INT32_MAX)
        return peri__fail(PERI_ERANGE, "peri_kjt_bucketize: %lld keys in %d buckets", (long long)n, buckets);
    int32_t *index = peri__alloc(sizeof *index * (size_t)peri__max(1, n * buckets));
    if (!index) return PERI_ENOMEM;
    for (int64_t i = 0; i < n * buckets; i++) index[i] = (int32_t)(i % n);
    peri_status status = peri__keys_select(k->keys, index, (int32_t)(n * buckets), keys);
    peri__free(index);
    PERI_TRY(status);
    if (!k->ranks) return PERI_OK;
    *per_rank = peri__alloc(sizeof **per_rank * (size_t)peri__max(1, row * buckets));
    if (!*per_rank) return PERI_ENOMEM;
    for (int32_t b = 0; b < buckets; b++)
        memcpy(*per_rank + b * row, k->stride_per_key_per_rank, sizeof **per_rank * (size_t)row);
    return PERI_OK;
}

peri_status peri_kjt_bucketize(peri_kjt *k, const peri_bucket_args *a, peri_kjt **out, peri_tensor **unbucketize)
{
    PERI_NEED(k);
    PERI_NEED(a);
    PERI_NEED(out);
    static const char f[] = "peri_kjt_bucketize";
    PERI_TRY(check_args(f, a, k->values));
    if (a->n_features != k->keys->count)
        return peri__fail(PERI_EINVAL, "%s: %d block sizes for %d keys", f, a->n_features, k->keys->count);
    if (a->sequence && !unbucketize)
        return peri__fail(PERI_EINVAL, "%s: nowhere to put the unbucketize permutation", f);
    PERI_TRY(peri_kjt_sync(k));
    PERI_TRY(peri__bags_offsets(&k->bags));
    plan p = {0};
    peri_bucket_result r = {0};
    peri__kjt_parts parts = {.stride = k->stride,
                             .ranks = k->ranks,
                             .inverse_keys = k->inverse_keys,
                             .inverse = k->inverse,
                             .longest = -1,
                             .trusted = true};
    int64_t *per_rank = NULL;
    const peri_tensor *lengths = k->bags.lengths ? k->bags.lengths : k->bags.offsets;
    peri_status status;
    PERI_TRY_GOTO(repeat_keys(k, a->buckets, &parts.keys, &per_rank), out);
    PERI_TRY_GOTO(plan_init(&p, f, a, k->stride_per_key, peri__kjt_device(k)), out);
    PERI_TRY_GOTO(bucketize(a, &p, &k->bags, lengths->dtype, k->values, a->bucketize_pos ? NULL : k->weights, &r,
                            &parts.offsets), out);
    parts.values = r.ids;
    parts.weights = a->bucketize_pos ? r.positions : r.weights;
    parts.lengths = r.lengths;
    parts.stride_per_key_per_rank = per_rank;
    peri_kjt *made;
    PERI_TRY_GOTO(peri__kjt_adopt(&parts, &made), out);
    if (peri_device_host_access(peri__kjt_device(made))) status = peri_kjt_sync(made);
    if (status < 0) {
        peri_kjt_release(made);
        goto out;
    }
    *out = made;
    if (unbucketize) {
        *unbucketize = r.unbucketize;
        r.unbucketize = NULL;
    }
out:
    release_bucket_result(&r);
    peri_tensor_release(parts.offsets);
    peri__free(per_rank);
    peri_keys_release(parts.keys);
    peri_tensor_release(p.table);
    return status;
}

/* -- afterwards ---------------------------------------------------------------------------------------------------- */

/** Every cursor has moved to the next one's start: the mapping has put as many ids there as the lengths say. */
static peri_status check_replayed(const char *f, const peri_tensor *cursor, const peri_tensor *starts)
{
    int64_t slots = starts->shape[0] - 1, bytes = slots * 8;
    int64_t *host = peri__alloc((size_t)peri__max(1, 2 * bytes + 8));
    if (!host) return PERI_ENOMEM;
    peri_tensor *head = NULL;
    int64_t one = 1;
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_view((peri_tensor *)cursor, 1, &slots, &one, 0, &head), out);
    PERI_TRY_GOTO(peri_tensor_read(head, host, bytes), out);
    PERI_TRY_GOTO(peri_tensor_read(starts, host + slots, bytes + 8), out);
    for (int64_t s = 0; s < slots && status >= 0; s++)
        if (host[s] != host[slots + s + 1])
            status =
                peri__fail(PERI_EINVAL, "%s: bucketized_lengths[%lld] is %lld, but bucket_mapping puts %lld ids there",
                           f, (long long)s, (long long)(host[slots + s + 1] - host[slots + s]),
                           (long long)(host[s] - host[slots + s]));
out:
    peri_tensor_release(head);
    peri__free(host);
    return status;
}

/** The number of buckets that lengths [bags] and bucketized lengths [buckets * bags] of @mapping's ids say. */
static peri_status check_replay(const char *f, const peri_tensor *lengths, const peri_tensor *cut,
                                const peri_tensor *mapping, int64_t *out)
{
    PERI_TRY(peri__check_ints(f, "bucket_mapping", mapping, 1, NULL));
    PERI_TRY(peri__check_ints(f, "lengths", lengths, 1, mapping));
    PERI_TRY(peri__check_ints(f, "bucketized_lengths", cut, 1, mapping));
    int64_t bags = lengths->shape[0], slots = cut->shape[0];
    *out = bags ? slots / bags : 0;
    if (bags ? slots % bags || slots == 0 : slots != 0)
        return peri__fail(PERI_EINVAL, "%s: %lld bucketized lengths for %lld lengths, wanted a multiple", f,
                          (long long)slots, (long long)bags);
    return PERI_OK;
}

peri_status peri_sparse_bucketize_replay(peri_tensor *lengths, peri_tensor *bucketized_lengths, peri_tensor *mapping,
                                         peri_tensor **out)
{
    PERI_NEED(lengths);
    PERI_NEED(bucketized_lengths);
    PERI_NEED(mapping);
    PERI_NEED(out);
    static const char f[] = "peri_sparse_bucketize_replay";
    int64_t buckets, n = mapping->shape[0], bags = lengths->shape[0];
    PERI_TRY(check_replay(f, lengths, bucketized_lengths, mapping, &buckets));
    peri_tensor *before = NULL, *after = NULL, *flat = NULL, *cursor = NULL, *result = NULL;
    peri__bags bags_before = {0}, bags_after = {0};
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(lengths, &before), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(bucketized_lengths, &after), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(mapping, &flat), out);
    const peri__indices indices = {"bucket_mapping", flat, buckets};
    PERI_TRY_GOTO(peri__indices_and_bags(f, &indices, "lengths", &bags_before, before, NULL, n, 0), out);
    PERI_TRY_GOTO(peri__bags_of(f, "bucketized_lengths", &bags_after, after, NULL, n, peri__max(bags, 1)), out);
    PERI_TRY_GOTO(peri__tensor_like(bags_after.offsets, 1, bags_after.offsets->shape, &cursor), out);
    PERI_TRY_GOTO(peri_tensor_copy(cursor, bags_after.offsets), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &n, &result), out);
    peri_k_bucketize_replay_args args = {.offsets = peri__data(bags_before.offsets),
                                         .mapping = peri__data(flat),
                                         .cursor = peri__data(cursor),
                                         .unbucketize = peri__data(result),
                                         .bags = bags,
                                         .buckets = buckets,
                                         .n = n,
                                         .mapping_dtype = flat->dtype,
                                         .out_dtype = flat->dtype};
    int64_t grain = bags * PERI_INT_GRAIN / peri__max(1, peri__max(n, bags)) + 1;
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), bucketize_replay, &args, bags, grain), out);
    PERI_TRY_GOTO(check_replayed(f, cursor, bags_after.offsets), out);
    *out = result;
    result = NULL;
out:
    peri__bags_fini(&bags_before);
    peri__bags_fini(&bags_after);
    peri_tensor *all[] = {before, after, flat, cursor, result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}
