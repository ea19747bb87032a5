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
        for (int64_t i = ref_int(a->offsets, bag, a->offsets_dtype); i < ref_int(a->offsets, bag + 1, a->offsets_dtype);
             i++) {
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
        int64_t first = ref_int(a->offsets, bag, a->offsets_dtype),
                last = ref_int(a->offsets, bag + 1, a->offsets_dtype);
        for (int64_t i = first; i < last; i++) {
            uint64_t id, other;
            int64_t bucket = ref_bucket(a, feature, ref_id(a->ids, i, a->ids_dtype), &id),
                    at = a->starts[bucket * a->bags + bag];
            for (int64_t j = first; j < i; j++)
                at += ref_bucket(a, feature, ref_id(a->ids, j, a->ids_dtype), &other) == bucket;
            ref_int_set(a->new_ids, at, a->ids_dtype, (int64_t)id);
            if (a->weights) memcpy(a->new_weights + at * a->width, a->weights + i * a->width, (size_t)a->width);
            if (a->positions) ref_int_set(a->positions, at, a->ids_dtype, i - first);
            if (a->unbucketize) a->unbucketize[i] = at;
            if (a->mapping) a->mapping[i] = (int32_t)bucket;
        }
    }
}

static void ref_bucketize_replay(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bucketize_replay_args *a = args;
    for (int64_t bag = begin; bag < end; bag++)
        for (int64_t i = a->offsets[bag]; i < a->offsets[bag + 1]; i++) {
            int64_t b = ref_int(a->mapping, i, a->mapping_dtype), at = -1;
            if (b >= 0 && b < a->buckets) at = a->cursor[b * a->bags + bag]++;
            ref_int_set(a->unbucketize, i, a->out_dtype, at >= 0 && at < a->n ? at : -1);
        }
}

/* -- indices and permutations -------------------------------------------------------------------------------------- */

static void ref_index_check(const void *args, int64_t begin, int64_t end)
{
    const peri_k_index_check_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t bad = INT64_MAX, min = INT64_MAX, max = INT64_MIN, first = b * PERI_JAGGED_BLOCK;
        for (int64_t i = ref_min(a->n, first + PERI_JAGGED_BLOCK) - 1; i >= first; i--) {
            int64_t x = ref_int(a->x, i, a->dtype);
            if (x < 0 || x >= a->limit) bad = i;
            if (x < min) min = x;
            if (x > max) max = x;
        }
        if (a->bad) a->bad[b] = bad;
        if (a->extent) a->extent[2 * b] = min;
        if (a->extent) a->extent[2 * b + 1] = max;
    }
}

static void ref_jagged_places(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_places_args *a = args;
    if (a->segments == 0) return;
    end = ref_min(end, ref_offset(a->out_offsets, a->out_dtype, a->out_step, a->segments));
    for (int64_t row = begin; row < end; row++) {
        int64_t t = ref_segment_of(a->out_offsets, a->out_dtype, a->out_step, a->segments, row);
        int64_t p = a->permute ? ref_int(a->permute, t, a->permute_dtype) : t,
                at = row - ref_offset(a->out_offsets, a->out_dtype, a->out_step, t);
        ref_int_set(a->out, row, a->dtype, ref_offset(a->in_offsets, a->in_dtype, a->in_step, p) + at);
    }
}

static void ref_invert_permute(const void *args, int64_t begin, int64_t end)
{
    const peri_k_invert_permute_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t p = ref_int(a->permute, i, a->dtype);
        if (p < 0 || p >= a->n) continue;
        if (a->dtype == PERI_I32) __atomic_store_n((int32_t *)a->inverse + p, (int32_t)i, __ATOMIC_RELAXED);
        else __atomic_store_n((int64_t *)a->inverse + p, i, __ATOMIC_RELAXED);
    }
}

static void ref_segment_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_segment_sum_args *a = args;
    for (int64_t s = begin; s < end; s++) {
        int64_t first = ref_int(a->offsets, s, a->offsets_dtype) * a->step,
                last = ref_int(a->offsets, s + 1, a->offsets_dtype) * a->step;
        if (a->dtype == PERI_I32 || a->dtype == PERI_I64) {
            int64_t sum = 0;
            for (int64_t i = first; i < last; i++) sum = ref_add(sum, ref_int(a->values, i, a->dtype));
            ref_int_set(a->out, s, a->dtype, sum);
            continue;
        }
        double wide[16] = {0};
        float part[16] = {0};
        for (int64_t i = first; i < last; i++) {
            if (a->dtype == PERI_F64) wide[(i - first) % 16] += ((const double *)a->values)[i];
            else part[(i - first) % 16] += ((const float *)a->values)[i];
        }
        for (int half = 8; half > 0; half /= 2)
            for (int k = 0; k < half; k++) {
                wide[k] += wide[k + half];
                part[k] += part[k + half];
            }
        if (a->dtype == PERI_F64) ((double *)a->out)[s] = wide[0];
        else ((float *)a->out)[s] = part[0];
    }
}

static void ref_segment_spread(const void *args, int64_t begin, int64_t end)
{
    const peri_k_segment_spread_args *a = args;
    int64_t width = a->dtype == PERI_F64 ? 8 : 4;
    char *out = a->out;
    const char *grad = a->grad;
    for (int64_t s = begin; s < end; s++) {
        int64_t first = ref_int(a->offsets, s, a->offsets_dtype) * a->step,
                last = ref_int(a->offsets, s + 1, a->offsets_dtype) * a->step;
        if (s == 0) memset(out, 0, (size_t)(first * width));
        for (int64_t i = first; i < last; i++) memcpy(out + i * width, grad + s * width, (size_t)width);
        if (s == a->segments - 1) memset(out + last * width, 0, (size_t)((a->n - last) * width));
    }
}

/* -- several levels of bags ---------------------------------------------------------------------------------------- */

static void ref_levels_to_dense(const void *args, int64_t begin, int64_t end)
{
    const peri_k_levels_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        int64_t at[PERI_MAX_LEVELS], bag = row;
        for (int32_t l = a->levels - 1; l >= 0; l--) {
            at[l] = bag % a->max[l];
            bag /= a->max[l];
        }
        bool there = true;
        for (int32_t l = 0; l < a->levels && there; l++) {
            int64_t first = ref_int(a->offsets[l], bag, a->offsets_dtype);
            there = at[l] < ref_int(a->offsets[l], bag + 1, a->offsets_dtype) - first;
            bag = first + at[l];
        }
        char *dst = (char *)a->dense + row * a->width;
        if (there) memcpy(dst, (const char *)a->values + bag * a->width, (size_t)a->width);
        else
            for (int64_t i = 0; i < a->width; i += a->element) memcpy(dst + i, a->padding, (size_t)a->element);
    }
}

static void ref_levels_from_dense(const void *args, int64_t begin, int64_t end)
{
    const peri_k_levels_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        int64_t bag = row, place = 0, scale = 1;
        bool there = true;
        for (int32_t l = a->levels - 1; l >= 0; l--) {
            int64_t up = ref_segment_of(a->offsets[l], a->offsets_dtype, 0, a->bags[l], bag);
            int64_t at = bag - ref_int(a->offsets[l], up, a->offsets_dtype);
            there = there && at < a->max[l];
            place += at * scale;
            scale *= a->max[l];
            bag = up;
        }
        char *dst = (char *)a->values + row * a->width;
        if (there) memcpy(dst, (const char *)a->dense + (bag * scale + place) * a->width, (size_t)a->width);
        else memset(dst, 0, (size_t)a->width);
    }
}

/* -- sorting and unique ids ---------------------------------------------------------------------------------------- */

static void ref_sort_keys(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sort_keys_args *a = args;
    uint64_t mask = a->bits >= 64 ? UINT64_MAX : ((uint64_t)1 << a->bits) - 1;
    for (int64_t i = begin; i < end; i++) {
        uint64_t x = (uint64_t)ref_int(a->x, a->order ? a->order[i] : i, a->dtype) - (uint64_t)a->base;
        a->keys[i] = ((x >> a->shift) & mask) << a->place_bits | (uint64_t)i;
    }
}

static void ref_sort_order(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sort_order_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t place = (int64_t)(a->keys[i] & (((uint64_t)1 << a->place_bits) - 1));
        a->out[i] = a->order ? a->order[place] : place;
    }
}

static void ref_sort_lists(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sort_lists_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t from = i > 0 ? (int64_t)(a->keys[i - 1] >> a->place_bits) + 1 : 0;
        int64_t to = i < a->n ? (int64_t)(a->keys[i] >> a->place_bits) : a->lists;
        for (int64_t l = from; l <= to; l++) a->offsets[l] = i;
        if (i < a->n) a->list[i] = (int64_t)(a->keys[i] & (((uint64_t)1 << a->place_bits) - 1));
    }
}

static void ref_unique_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unique_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        a->sums[b] = 0;
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK); i++) {
            int64_t x = ref_int(a->x, a->order[i], a->dtype);
            a->sums[b] += i == 0 || x != ref_int(a->x, a->order[i - 1], a->dtype);
            ref_int_set(a->sorted, i, a->dtype, x);
        }
    }
}

static void ref_unique_write(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unique_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t u = a->sums[b] - 1;
        for (int64_t i = b * PERI_JAGGED_BLOCK; i < ref_min(a->n, (b + 1) * PERI_JAGGED_BLOCK); i++) {
            int64_t x = ref_int(a->sorted, i, a->dtype);
            if (i == 0 || x != ref_int(a->sorted, i - 1, a->dtype)) {
                u++;
                ref_int_set(a->unique, u, a->dtype, x);
                if (a->starts) a->starts[u] = i;
            }
            if (a->inverse) a->inverse[a->order[i]] = u;
            if (a->starts && i == a->n - 1) a->starts[u + 1] = a->n;
        }
    }
}

static void ref_unique_counts(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unique_args *a = args;
    for (int64_t u = begin; u < end; u++) a->counts[u] = a->starts[u + 1] - a->starts[u];
}

/** Where part @p of the ids begins: p * n / parts. */
static inline int64_t ref_mark_part(const peri_k_mark_args *a, int64_t p)
{
    return a->n / a->parts * p + a->n % a->parts * p / a->parts;
}

static void ref_mark_set(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    int64_t words = (a->size + 63) / 64;
    for (int64_t p = begin; p < end; p++) {
        uint64_t *marks = a->marks + p * words;
        memset(marks, 0, sizeof *marks * (size_t)words);
        for (int64_t i = ref_mark_part(a, p); i < ref_mark_part(a, p + 1); i++) {
            int64_t at = ref_int(a->x, i, a->dtype) - a->base;
            marks[at / 64] |= (uint64_t)1 << (at % 64);
        }
    }
}

static void ref_mark_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    int64_t words = (a->size + 63) / 64;
    for (int64_t b = begin; b < end; b++) {
        a->sums[b] = 0;
        for (int64_t w = b * 64; w < ref_min(words, (b + 1) * 64); w++) {
            uint64_t word = 0;
            for (int64_t p = 0; p < a->parts; p++) word |= a->marks[p * words + w];
            a->words[w] = word;
            a->sums[b] += __builtin_popcountll(word);
        }
    }
}

static void ref_mark_write(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    int64_t words = (a->size + 63) / 64;
    for (int64_t b = begin; b < end; b++) {
        int64_t rank = a->sums[b];
        for (int64_t w = b * 64; w < ref_min(words, (b + 1) * 64); w++) {
            a->ranks[w] = (int32_t)rank;
            for (uint64_t rest = a->words[w]; rest; rest &= rest - 1)
                ref_int_set(a->unique, rank++, a->dtype, a->base + w * 64 + __builtin_ctzll(rest));
        }
    }
}

static void ref_mark_lookup(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    for (int64_t p = begin; p < end; p++) {
        uint32_t *tallies = a->tallies ? a->tallies + p * a->total : NULL;
        if (tallies) memset(tallies, 0, sizeof *tallies * (size_t)a->total);
        for (int64_t i = ref_mark_part(a, p); i < ref_mark_part(a, p + 1); i++) {
            int64_t at = ref_int(a->x, i, a->dtype) - a->base;
            int64_t u = a->ranks[at / 64] + __builtin_popcountll(a->words[at / 64] & (((uint64_t)1 << (at % 64)) - 1));
            if (a->inverse) a->inverse[i] = u;
            if (tallies) tallies[u]++;
        }
    }
}

static void ref_mark_tally(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mark_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        a->counts[u] = 0;
        for (int64_t p = 0; p < a->parts; p++) a->counts[u] += a->tallies[p * a->total + u];
    }
}
