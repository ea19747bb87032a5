/* SPDX-License-Identifier: Apache-2.0
 *
 * sparse.c (ref): see kernels/sparse.h.
 */

/** Id @i as an unsigned number of its own width. */
static inline uint64_t ref_id(const void *ids, int64_t i, int32_t dtype)
{
    return dtype == PERI_I32 ? ((const uint32_t *)ids)[i] : ((const uint64_t *)ids)[i];
}

/** Bucket of id @u; *id gets the new id. */
static int64_t ref_bucket(const peri_k_bucketize_args *a, const int64_t *feature, uint64_t u, uint64_t *id)
{
    uint64_t p = (uint64_t)a->buckets, block = (uint64_t)feature[PERI_BUCKET_BLOCK], bucket;
    const int64_t *bounds = feature[PERI_BUCKET_BOUNDS] >= 0 ? a->bounds + feature[PERI_BUCKET_BOUNDS] : NULL;
    if (bounds && u < (uint64_t)bounds[p]) {
        bucket = 0;
        while (bucket + 1 < p && u >= (uint64_t)bounds[bucket + 1]) bucket++;
        *id = u - (uint64_t)bounds[bucket];
    } else if (!bounds && u < block * p) {
        bucket = u / block;
        *id = u % block;
    } else {
        bucket = u % p;
        *id = u / p;
    }
    if (feature[PERI_BUCKET_KEEP]) *id = u;
    return (int64_t)bucket;
}

/** The feature of a bag: the last one that begins at it or before. */
static const int64_t *ref_feature(const peri_k_bucketize_args *a, int64_t bag)
{
    int64_t f = a->n_features - 1;
    while (f > 0 && a->features[f * PERI_BUCKET_WORDS + PERI_BUCKET_FIRST_BAG] > bag) f--;
    return a->features + f * PERI_BUCKET_WORDS;
}

static void ref_bucketize_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bucketize_args *a = args;
    for (int64_t bag = begin; bag < end; bag++) {
        for (int64_t b = 0; b < a->buckets; b++) ref_int_set(a->lengths, b * a->bags + bag, a->lengths_dtype, 0);
        const int64_t *feature = ref_feature(a, bag);
        for (int64_t i = ref_int(a->offsets, bag, a->offsets_dtype); i < ref_int(a->offsets, bag + 1, a->offsets_dtype); i++) {
            uint64_t id;
            int64_t at = ref_bucket(a, feature, ref_id(a->ids, i, a->ids_dtype), &id) * a->bags + bag;
            ref_int_set(a->lengths, at, a->lengths_dtype, ref_int(a->lengths, at, a->lengths_dtype) + 1);
        }
    }
}

static void ref_bucketize_place(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bucketize_args *a = args;
    for (int64_t bag = begin; bag < end; bag++) {
        const int64_t *feature = ref_feature(a, bag);
        int64_t first = ref_int(a->offsets, bag, a->offsets_dtype), last = ref_int(a->offsets, bag + 1, a->offsets_dtype);
        for (int64_t i = first; i < last; i++) {
            uint64_t id, other;
            int64_t bucket = ref_bucket(a, feature, ref_id(a->ids, i, a->ids_dtype), &id), at = a->starts[bucket * a->bags + bag];
            for (int64_t j = first; j < i; j++) at += ref_bucket(a, feature, ref_id(a->ids, j, a->ids_dtype), &other) == bucket;
            ref_int_set(a->new_ids, at, a->ids_dtype, (int64_t)id);
            if (a->weights) memcpy(a->new_weights + at * a->width, a->weights + i * a->width, (size_t)a->width);
            if (a->positions) ref_int_set(a->positions, at, a->ids_dtype, i - first);
            if (a->unbucketize) a->unbucketize[i] = at;
            if (a->mapping) a->mapping[i] = (int32_t)bucket;
        }
    }
}
