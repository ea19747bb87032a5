/* SPDX-License-Identifier: Apache-2.0
 *
 * sparse.c (cpu): see kernels/sparse.h.
 */

/* -- buckets ------------------------------------------------------------------------------------------------------- */

#if defined(__AVX512F__)
enum { CPU_WIDE = 8 };
#else
enum { CPU_WIDE = 4 };
#endif
enum { CPU_CHUNK = 256, CPU_AHEAD = 512 }; /* ids whose buckets are found together; how far ahead the next ones are
                                              asked for */

typedef double cpu_dvec __attribute__((vector_size(CPU_WIDE * 8)));
typedef int64_t cpu_lvec __attribute__((vector_size(CPU_WIDE * 8)));
typedef uint64_t cpu_qvec __attribute__((vector_size(CPU_WIDE * 8)));

static inline cpu_dvec cpu_dset(double x) { return x - (cpu_dvec){0}; }
static inline cpu_qvec cpu_qset(uint64_t x) { return x - (cpu_qvec){0}; }

/** c - a * b, rounded once. */
static inline cpu_dvec cpu_fnma(cpu_dvec a, cpu_dvec b, cpu_dvec c)
{
#if defined(__AVX512F__)
    return (cpu_dvec)_mm512_fnmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    return (cpu_dvec)_mm256_fnmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#endif
}

/** Ids of a chunk and what becomes of them. */
typedef struct cpu_chunk {
    const uint64_t *u; /* the ids: in their tensor or in `staged` */
    uint64_t staged[CPU_CHUNK], id[CPU_CHUNK];
    int32_t bucket[CPU_CHUNK];
} cpu_chunk;

/** Whole numbers of [0, 2^31) as i32. */
static inline void cpu_store_i32(int32_t *p, cpu_dvec v)
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvttpd_epi32((__m512d)v));
#else
    _mm_storeu_si128((__m128i *)p, _mm256_cvttpd_epi32((__m256d)v));
#endif
}

/** c->id and c->bucket from quotients and remainders of c->u by @d: the bucket is the quotient, or with @turns the
 *  remainder. For u < 2^51, d <= 2^51. Whole numbers below 2^52 go to and from doubles by the bits of their sum with
 *  2^52. u * (1 / d) is off by less than 1/2 (by a relative 2^-52 of at most 2^50; exact for d = 1), so its nearest
 *  whole number is the quotient or one more; the remainder is exact (one fused operation on whole numbers below 2^53)
 *  and tells which. */
static inline __attribute__((always_inline)) void cpu_quotients(cpu_chunk *c, int64_t n, uint64_t d, bool turns)
{
    const cpu_dvec magic = cpu_dset(0x1p52), divisor = cpu_dset((double)d), inverse = cpu_dset(1.0 / (double)d),
                   one = cpu_dset(1.0);
    const cpu_qvec bits = (cpu_qvec)magic, low = cpu_qset(((uint64_t)1 << 52) - 1);
    for (int64_t i = 0; i < n; i += CPU_WIDE) {
        cpu_qvec v;
        memcpy(&v, c->u + i, sizeof v);
        cpu_dvec x = (cpu_dvec)((v & low) | bits) - magic, q = (x * inverse + magic) - magic,
                 r = cpu_fnma(q, divisor, x);
        cpu_lvec under = r < cpu_dset(0);
        q -= (cpu_dvec)((cpu_lvec)one & under);
        r += (cpu_dvec)((cpu_lvec)divisor & under);
        cpu_qvec id = (cpu_qvec)((turns ? q : r) + magic) & low;
        memcpy(c->id + i, &id, sizeof id);
        cpu_store_i32(c->bucket + i, turns ? r : q);
    }
}

/** The interval of bounds[0..p] that holds each u, for u < bounds[p]; id = u minus its start. */
static void cpu_intervals(cpu_chunk *c, int64_t n, const int64_t *bounds, int64_t p)
{
    for (int64_t i = 0; i < n; i += CPU_WIDE) {
        cpu_qvec u, start = cpu_qset(0);
        cpu_dvec bucket = cpu_dset(0);
        memcpy(&u, c->u + i, sizeof u);
        for (int64_t b = 1; b < p; b++) {
            cpu_qvec bound = cpu_qset((uint64_t)bounds[b]), reached = (cpu_qvec)(u >= bound);
            bucket += (cpu_dvec)((cpu_qvec)cpu_dset(1) & reached);
            start = (bound & reached) | (start & ~reached);
        }
        u -= start;
        cpu_store_i32(c->bucket + i, bucket);
        memcpy(c->id + i, &u, sizeof u);
    }
}

/** One id by the rules, whatever it is; bounds by halving. */
static void cpu_bucket_scalar(const peri_k_bucketize_args *a, const int64_t *feature, uint64_t u, int32_t *bucket,
                              uint64_t *id)
{
    const int64_t *bounds = feature[PERI_BUCKET_BOUNDS] >= 0 ? a->bounds + feature[PERI_BUCKET_BOUNDS] : NULL;
    if (!bounds || u >= (uint64_t)bounds[a->buckets]) {
        *bucket = (int32_t)ref_bucket(a, feature, u, id);
        return;
    }
    int64_t low = 0, high = a->buckets;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if ((uint64_t)bounds[middle] <= u) low = middle;
        else high = middle;
    }
    *bucket = (int32_t)low;
    *id = feature[PERI_BUCKET_KEEP] ? u : u - (uint64_t)bounds[low];
}

/** Buckets and new ids of the ids [i, i + n), n <= CPU_CHUNK, all of one feature. */
static void cpu_chunk_fill(cpu_chunk *c, const peri_k_bucketize_args *a, const int64_t *feature, int64_t i, int64_t n)
{
    const uint64_t exact = (uint64_t)1 << 51;
    uint64_t p = (uint64_t)a->buckets, block = (uint64_t)feature[PERI_BUCKET_BLOCK], limit = exact, most = 0;
    const int64_t *bounds = feature[PERI_BUCKET_BOUNDS] >= 0 ? a->bounds + feature[PERI_BUCKET_BOUNDS] : NULL;
    c->u = (const uint64_t *)a->ids + i;
    if (a->ids_dtype == PERI_I32 || n < CPU_CHUNK) {
        for (int64_t k = 0; k < n; k++) c->staged[k] = ref_id(a->ids, i + k, a->ids_dtype);
        for (int64_t k = n; k < CPU_CHUNK && k % CPU_WIDE; k++) c->staged[k] = 0; /* the last vector is whole */
        c->u = c->staged;
    }
    const char *ahead = (const char *)a->ids + (i + CPU_AHEAD) * (a->ids_dtype == PERI_I32 ? 4 : 8);
    for (int64_t k = 0; k < n; k += 8) __builtin_prefetch(ahead + k * (a->ids_dtype == PERI_I32 ? 4 : 8));
    for (int64_t k = 0; k < n; k++) most = c->u[k] > most ? c->u[k] : most;
    if (bounds && p <= 64) {
        limit = (uint64_t)bounds[p];
        cpu_intervals(c, n, bounds, a->buckets);
    } else if (!bounds && block && block * p <= exact) {
        limit = block * p;
        cpu_quotients(c, n, block, false);
    } else if (!bounds && !block && p <= exact) {
        cpu_quotients(c, n, p, true);
    } else {
        limit = 0;
    }
    if (feature[PERI_BUCKET_KEEP]) memcpy(c->id, c->u, sizeof *c->id * (size_t)n);
    if (most < limit) return;
    for (int64_t k = 0; k < n; k++)
        if (c->u[k] >= limit) cpu_bucket_scalar(a, feature, c->u[k], &c->bucket[k], &c->id[k]);
}

/* -- counting ------------------------------------------------------------------------------------------------------ */

/** Bags are counted in tiles, in a small array [buckets][tile]: the lengths of neighbouring buckets often lie a power
 *  of two apart in memory, in one set of the cache. No loop runs over the ids of a single bag, whose length no branch
 *  predictor knows. */
enum { CPU_TILE_SLOTS = 2048, CPU_TILE_BAGS = 128, CPU_TILE_BUCKETS = 256, CPU_SPREAD = 64, CPU_MASKS = 16 };
enum { CPU_MASK_BYTES = CPU_CHUNK / 8 };

typedef struct cpu_count_state {
    cpu_chunk chunk;
    uint8_t bag[CPU_CHUNK + CPU_SPREAD];              /* of each id of the chunk, counted from the tile's first */
    uint8_t masks[CPU_MASKS][CPU_MASK_BYTES + 8];     /* by bucket: one bit for each id of the chunk that goes there */
    int64_t slots[CPU_TILE_SLOTS];
} cpu_count_state;

/** state->bag for the ids [from, from + n), which belong to bags @bag and following; returns the bag that has the id
 *  after them. */
static inline int64_t cpu_spread_bags(cpu_count_state *s, const void *offsets, int32_t dtype, int64_t first,
                                      int64_t bag, int64_t from, int64_t n)
{
    for (;; bag++) {
        int64_t at = ref_int(offsets, bag, dtype) - from, last = ref_int(offsets, bag + 1, dtype) - from;
        if (at < 0) at = 0;
        int64_t end = ref_min(last, n);
        do {
            /* what is too much is overwritten by the bags that follow */
            memset(s->bag + at, (int)(bag - first), CPU_SPREAD);
            at += CPU_SPREAD;
        } while (at < end);
        if (last > n) return bag;
        if (last == n) return bag + 1;
    }
}

/** One bit per id of the chunk and bucket, for all buckets but the last. */
static void cpu_bucket_masks(cpu_count_state *s, int64_t n, int64_t buckets)
{
    for (int64_t b = 0; b + 1 < buckets; b++)
        for (int64_t k = 0; k < n; k += K_LANES) {
#if defined(__AVX512F__)
            uint16_t mask = _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(s->chunk.bucket + k), _mm512_set1_epi32((int)b));
            memcpy(s->masks[b] + k / 8, &mask, 2);
#else
            __m256i same = _mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i *)(s->chunk.bucket + k)),
                                              _mm256_set1_epi32((int)b));
            s->masks[b][k / 8] = (uint8_t)_mm256_movemask_ps((__m256)same);
#endif
        }
}

/** Bits set among [begin, end). */
static inline int64_t cpu_count_bits(const uint8_t *mask, int64_t begin, int64_t end)
{
    int64_t count = 0;
    uint64_t word;
    for (; end - begin > 56; begin += 56) {
        memcpy(&word, mask + begin / 8, 8);
        count += __builtin_popcountll((word >> (begin & 7)) & (((uint64_t)1 << 56) - 1));
    }
    memcpy(&word, mask + begin / 8, 8);
    return count + __builtin_popcountll((word >> (begin & 7)) & (((uint64_t)1 << (end - begin)) - 1));
}

/** Add the ids [from, from + n) to the slots of their bags by counting bits. */
static int64_t cpu_count_by_bits(cpu_count_state *s, const peri_k_bucketize_args *a, int32_t dtype, int64_t tile,
                                 int64_t first, int64_t bag, int64_t from, int64_t n)
{
    int64_t p = a->buckets;
    cpu_bucket_masks(s, n, p);
    for (;; bag++) {
        int64_t at = ref_int(a->offsets, bag, dtype) - from, last = ref_int(a->offsets, bag + 1, dtype) - from, sum = 0;
        if (at < 0) at = 0;
        int64_t end = ref_min(last, n), *slot = s->slots + bag - first;
        for (int64_t b = 0; b + 1 < p; b++, slot += tile) {
            int64_t count = cpu_count_bits(s->masks[b], at, end);
            *slot += count;
            sum += count;
        }
        *slot += end - at - sum;
        if (last > n) return bag;
        if (last == n) return bag + 1;
    }
}

/** Lengths of bags [begin, end) of one feature. */
static inline __attribute__((always_inline)) void cpu_count_run(const peri_k_bucketize_args *a, int32_t dtype,
                                                                const int64_t *feature, int64_t begin, int64_t end)
{
    cpu_count_state s;
    int64_t p = a->buckets, tile = ref_min(CPU_TILE_SLOTS / p, CPU_TILE_BAGS);
    for (int64_t first = begin; first < end; first += tile) {
        int64_t bags = ref_min(tile, end - first), bag = first;
        int64_t from = ref_int(a->offsets, first, dtype), stop = ref_int(a->offsets, first + bags, dtype);
        bool bits = p <= CPU_MASKS && stop - from >= 2 * (p - 1) * bags;
        memset(s.slots, 0, sizeof *s.slots * (size_t)(p * tile));
        for (; from < stop; from += CPU_CHUNK) {
            int64_t n = ref_min(CPU_CHUNK, stop - from);
            cpu_chunk_fill(&s.chunk, a, feature, from, n);
            if (bits) {
                bag = cpu_count_by_bits(&s, a, dtype, tile, first, bag, from, n);
                continue;
            }
            bag = cpu_spread_bags(&s, a->offsets, dtype, first, bag, from, n);
            for (int64_t k = 0; k < n; k++) s.slots[s.chunk.bucket[k] * tile + s.bag[k]]++;
        }
        for (int64_t b = 0; b < p; b++) {
            int64_t at = b * a->bags + first;
            const int64_t *counts = s.slots + b * tile;
            if (a->lengths_dtype == PERI_I32)
                for (int64_t k = 0; k < bags; k++) ((int32_t *)a->lengths)[at + k] = (int32_t)counts[k];
            else memcpy((int64_t *)a->lengths + at, counts, sizeof *counts * (size_t)bags);
        }
    }
}

/** The feature that has bag @bag, from feature number *f on; *last becomes the end of its bags within [bag, end). */
static const int64_t *cpu_feature(const peri_k_bucketize_args *a, int64_t bag, int64_t end, int64_t *f, int64_t *last)
{
    while (a->features[(*f + 1) * PERI_BUCKET_WORDS + PERI_BUCKET_FIRST_BAG] <= bag) ++*f;
    const int64_t *feature = a->features + *f * PERI_BUCKET_WORDS;
    *last = ref_min(end, feature[PERI_BUCKET_WORDS + PERI_BUCKET_FIRST_BAG]);
    return feature;
}

static void cpu_bucketize_count(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bucketize_args *a = args;
    if (a->buckets > CPU_TILE_BUCKETS) {
        ref_bucketize_count(args, begin, end);
        return;
    }
    for (int64_t f = 0, last; begin < end; begin = last) {
        const int64_t *feature = cpu_feature(a, begin, end, &f, &last);
        if (a->offsets_dtype == PERI_I32) cpu_count_run(a, PERI_I32, feature, begin, last);
        else cpu_count_run(a, PERI_I64, feature, begin, last);
    }
}

/* -- placing ------------------------------------------------------------------------------------------------------- */

/** The ids of one bucket lie in one piece for consecutive bags: placing a range of bags is cutting its ids into one
 *  stream per bucket, in order. Buckets are done CPU_STREAMS at a time. */
enum { CPU_STREAMS = 1024, CPU_VECTOR_STREAMS = 4 };

typedef struct cpu_place_state {
    cpu_chunk chunk;
    int64_t at[CPU_STREAMS]; /* next place of each stream */
} cpu_place_state;

#if defined(__AVX512F__)
/** A chunk into few streams, eight ids at a time: the ids of each bucket are pressed together and stored, and their
 *  places spread back. */
static inline __attribute__((always_inline)) void cpu_place_vector(cpu_place_state *s, const peri_k_bucketize_args *a,
                                                                   int64_t from, int64_t n, bool narrow, bool sequence,
                                                                   bool weighted)
{
    const __m512i iota = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t k = 0; k < n; k += 8) {
        __mmask8 live = (__mmask8)(n - k >= 8 ? 0xff : (1u << (n - k)) - 1u);
        __m512i id = _mm512_loadu_si512(s->chunk.id + k), places = iota;
        __m256i bucket = _mm256_loadu_si256((const __m256i *)(s->chunk.bucket + k)), weight = _mm256_setzero_si256();
        if (weighted) weight = _mm256_maskz_loadu_epi32(live, a->weights + (from + k) * 4);
        for (int64_t b = 0; b < a->buckets; b++) {
            __mmask8 here = _mm256_mask_cmpeq_epi32_mask(live, bucket, _mm256_set1_epi32((int)b));
            unsigned count = (unsigned)__builtin_popcount(here);
            __mmask8 front = (__mmask8)((1u << count) - 1u);
            int64_t at = s->at[b];
            __m512i pressed = _mm512_maskz_compress_epi64(here, id);
            if (narrow) _mm256_mask_storeu_epi32((int32_t *)a->new_ids + at, front, _mm512_cvtepi64_epi32(pressed));
            else _mm512_mask_storeu_epi64((int64_t *)a->new_ids + at, front, pressed);
            if (weighted)
                _mm256_mask_storeu_epi32(a->new_weights + at * 4, front, _mm256_maskz_compress_epi32(here, weight));
            if (sequence)
                places = _mm512_mask_expand_epi64(places, here, _mm512_add_epi64(iota, _mm512_set1_epi64(at)));
            s->at[b] = at + count;
        }
        if (sequence) _mm512_mask_storeu_epi64(a->unbucketize + from + k, live, places);
    }
}

static bool cpu_place_few(cpu_place_state *s, const peri_k_bucketize_args *a, int64_t from, int64_t n)
{
    if (a->buckets > CPU_VECTOR_STREAMS || a->positions || a->mapping || (a->weights && a->width != 4)) return false;
    switch ((a->ids_dtype == PERI_I32) + 2 * (a->unbucketize != NULL) + 4 * (a->weights != NULL)) {
    case 0: cpu_place_vector(s, a, from, n, false, false, false); break;
    case 1: cpu_place_vector(s, a, from, n, true, false, false); break;
    case 2: cpu_place_vector(s, a, from, n, false, true, false); break;
    case 3: cpu_place_vector(s, a, from, n, true, true, false); break;
    case 4: cpu_place_vector(s, a, from, n, false, false, true); break;
    case 5: cpu_place_vector(s, a, from, n, true, false, true); break;
    case 6: cpu_place_vector(s, a, from, n, false, true, true); break;
    default: cpu_place_vector(s, a, from, n, true, true, true); break;
    }
    return true;
}
#else
static bool cpu_place_few(cpu_place_state *s, const peri_k_bucketize_args *a, int64_t from, int64_t n)
{
    (void)s, (void)a, (void)from, (void)n;
    return false;
}
#endif

/** A chunk into the streams of buckets [low, low + CPU_STREAMS); *bag is the bag of its first id and becomes that of
 *  the id after it. */
static inline __attribute__((always_inline)) void cpu_place_chunk(cpu_place_state *s, const peri_k_bucketize_args *args,
                                                                  int64_t low, int64_t from, int64_t n, int64_t *bag,
                                                                  bool narrow, bool sequence, bool more)
{
    const peri_k_bucketize_args a = *args; /* a copy that stores into outputs cannot change */
    const uint64_t *ids = s->chunk.id;
    const int32_t *buckets = s->chunk.bucket;
    int64_t *next = s->at, streams = ref_min(a.buckets - low, CPU_STREAMS);
    bool all = streams == a.buckets;
    for (int64_t k = 0; k < n; k++) {
        int64_t bucket = buckets[k] - low, i = from + k;
        if (more && a.positions)
            while (ref_int(a.offsets, *bag + 1, a.offsets_dtype) <= i) ++*bag;
        if (!all && (uint64_t)bucket >= (uint64_t)streams) continue;
        int64_t at = next[bucket]++;
        if (narrow) ((uint32_t *)a.new_ids)[at] = (uint32_t)ids[k];
        else ((uint64_t *)a.new_ids)[at] = ids[k];
        if (sequence) a.unbucketize[i] = at;
        if (!more) continue;
        if (a.weights && a.width == 4) memcpy(a.new_weights + at * 4, a.weights + i * 4, 4);
        else if (a.weights) memcpy(a.new_weights + at * a.width, a.weights + i * a.width, (size_t)a.width);
        if (a.positions) ref_int_set(a.positions, at, a.ids_dtype, i - ref_int(a.offsets, *bag, a.offsets_dtype));
        if (a.mapping) a.mapping[i] = (int32_t)(bucket + low);
    }
}

static void cpu_place_many(cpu_place_state *s, const peri_k_bucketize_args *a, int64_t low, int64_t from, int64_t n,
                           int64_t *bag)
{
    bool more = a->weights || a->positions || a->mapping;
    switch ((a->ids_dtype == PERI_I32) + 2 * (a->unbucketize != NULL) + 4 * more) {
    case 0: cpu_place_chunk(s, a, low, from, n, bag, false, false, false); break;
    case 1: cpu_place_chunk(s, a, low, from, n, bag, true, false, false); break;
    case 2: cpu_place_chunk(s, a, low, from, n, bag, false, true, false); break;
    case 3: cpu_place_chunk(s, a, low, from, n, bag, true, true, false); break;
    case 4: cpu_place_chunk(s, a, low, from, n, bag, false, false, true); break;
    case 5: cpu_place_chunk(s, a, low, from, n, bag, true, false, true); break;
    case 6: cpu_place_chunk(s, a, low, from, n, bag, false, true, true); break;
    default: cpu_place_chunk(s, a, low, from, n, bag, true, true, true); break;
    }
}

static void cpu_bucketize_place(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bucketize_args *a = args;
    cpu_place_state s;
    for (int64_t low = 0; low < a->buckets; low += CPU_STREAMS) {
        if (begin < end)
            for (int64_t b = low; b < ref_min(a->buckets, low + CPU_STREAMS); b++)
                s.at[b - low] = a->starts[b * a->bags + begin];
        for (int64_t f = 0, first = begin, last; first < end; first = last) {
            const int64_t *feature = cpu_feature(a, first, end, &f, &last);
            int64_t stop = ref_int(a->offsets, last, a->offsets_dtype), bag = first;
            for (int64_t from = ref_int(a->offsets, first, a->offsets_dtype); from < stop; from += CPU_CHUNK) {
                int64_t n = ref_min(CPU_CHUNK, stop - from);
                cpu_chunk_fill(&s.chunk, a, feature, from, n);
                if (!cpu_place_few(&s, a, from, n)) cpu_place_many(&s, a, low, from, n, &bag);
            }
        }
    }
}

#define K_CPU_SPARSE                                                                                                   \
    [PERI_K_bucketize_count] = cpu_bucketize_count, [PERI_K_bucketize_place] = cpu_bucketize_place, K_CPU_INDICES
