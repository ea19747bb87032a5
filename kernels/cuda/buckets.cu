/* SPDX-License-Identifier: Apache-2.0
 *
 * buckets.cu: bucketize of kernels/sparse.h. Ids of one bucket keep their order, whichever bags they are in, so that
 * cutting bags into buckets is a stable partition of all ids by bucket. Parts of PART ids, a warp each, know nothing of
 * bags: a long bag and many short ones are the same work.
 *
 *   find_edges      the bags of each tile of parts; clears the lengths of bags that lie in several tiles, which add to
 *                   them
 *   count_tiles     lengths, and how many ids of each part go to each bucket: sums[bucket][part]
 *   (CUB)           sums become those of what lies before: where the ids of each part begin in each bucket
 *   place_parts     every id to its place. A warp sorts its part in shared memory first, so that ids of one bucket are
 *                   stored side by side
 */
#include "cub.cuh"
#include "cuda.h"
#include "cumsum.cuh"
#include "rows.cuh"

#include "../sparse.h"
#include "../divide.h"

namespace {

/** Ids of a part; of a tile, whose parts are a block's; ids that a lane asks for at once. */
enum { PART = 512, TILE = PART * PERI_WARPS, MANY = 8 };
/** More buckets than MOST_BUCKETS are counted, and have their cursors, where the lengths and sums are: parts are longer
 *  then. */
enum { MOST_BUCKETS = 512, LONG_PART = 16 * PART };
/** Counters of bags in shared memory, and how long a bag a lane counts alone. */
enum { COUNTERS = 8192, SHORT = 64 };

struct cut {
    peri_k_bucketize_args a;
    peri_k_divisor buckets;
    int64_t *sums; /* buckets x parts, and one more */
    int64_t *edges; /* [tiles + 1] 2 x the first bag that begins in the tile or behind it, + 1 if the bag before it has
                       ids in the tile; the last: 2 x bags. For at most MOST_BUCKETS */
    int64_t parts, tiles;
    int32_t bags; /* that a block counts at a time */
    bool more;    /* other things than ids go along */
    __device__ __forceinline__ int64_t offset(int64_t bag) const { return peri_index(a.offsets, bag, a.offsets_dtype); }
    /** The first bag that has ids in a tile. */
    __device__ __forceinline__ int64_t begin_of(int64_t tile) const { return (edges[tile] >> 1) - (edges[tile] & 1); }
    template <class T> __device__ __forceinline__ uint64_t id(int64_t i) const { return ((const T *)a.ids)[i]; }
    __device__ __forceinline__ void add_length(int64_t bucket, int64_t bag, int64_t n) const
    {
        const int64_t at = bucket * a.bags + bag;
        if (a.lengths_dtype == PERI_I32) atomicAdd((int32_t *)a.lengths + at, (int32_t)n);
        else peri_atomic_add((int64_t *)a.lengths + at, n);
    }
};

/** The feature of id number @i: the last one whose ids begin there or before. */
__device__ const int64_t *feature_of(const cut &c, int64_t i)
{
    int64_t low = 0, high = c.a.n_features;
    while (high - low > 1) {
        const int64_t middle = (low + high) >> 1;
        if (c.offset(c.a.features[middle * PERI_BUCKET_WORDS + PERI_BUCKET_FIRST_BAG]) <= i) low = middle;
        else high = middle;
    }
    return c.a.features + low * PERI_BUCKET_WORDS;
}

/** The same by a warp. 32 features are looked at at once. */
__device__ __forceinline__ const int64_t *feature_by_warp(const cut &c, int64_t i)
{
    int64_t found = 0;
    PERI_ROLLED
    for (int64_t low = 1; low < c.a.n_features; low += 32) {
        const int64_t f = low + peri_lane();
        const bool before =
            f < c.a.n_features && c.offset(c.a.features[f * PERI_BUCKET_WORDS + PERI_BUCKET_FIRST_BAG]) <= i;
        const unsigned those = __ballot_sync(0xffffffffu, before);
        found += __popc(those);
        if (those != 0xffffffffu) break;
    }
    return c.a.features + found * PERI_BUCKET_WORDS;
}

/** The first bag that begins at id @i or behind it, by a warp; @bags if none does. 32 places cut what is left into 33
 *  pieces. */
__device__ __forceinline__ int64_t bag_by_warp(const cut &c, int64_t i)
{
    int64_t low = -1, high = c.a.bags; /* offset(low) < i <= offset(high) */
    while (high - low > 1) {
        const int64_t step = (high - low - 1) / 32 + 1, at = low + step * (peri_lane() + 1);
        const unsigned before = __ballot_sync(0xffffffffu, at < high && c.offset(at < high ? at : low + 1) < i);
        const int n = __popc(before);
        if (low + step * (n + 1) < high) high = low + step * (n + 1);
        low += step * n;
    }
    return high;
}

struct place {
    uint64_t id; /* new */
    int32_t bucket;
};

/** Where id @u, number @i, goes, whatever its feature; @feature NULL: that is looked for. */
__device__ place place_of(const cut &c, uint64_t u, int64_t i, const int64_t *feature)
{
    place to;
    uint64_t bucket;
    if (!feature) feature = feature_of(c, i);
    const peri_k_divisor buckets = c.buckets;
    const int64_t *bounds = feature[PERI_BUCKET_BOUNDS] >= 0 ? c.a.bounds + feature[PERI_BUCKET_BOUNDS] : NULL;
    const peri_k_divisor block = {(uint64_t)feature[PERI_BUCKET_BLOCK], (uint64_t)feature[PERI_BUCKET_MULTIPLIER],
                                  (int32_t)feature[PERI_BUCKET_SHIFT]};
    if (bounds && u < (uint64_t)bounds[buckets.by]) { /* the last one that begins at u or before; bounds may repeat */
        int32_t low = 0, high = (int32_t)buckets.by;
        while (high - low > 1) {
            const int32_t middle = (low + high) >> 1;
            if ((uint64_t)bounds[middle] <= u) low = middle;
            else high = middle;
        }
        bucket = (uint64_t)low;
        to.id = u - (uint64_t)bounds[low];
    } else if (!bounds && u < block.by * buckets.by) {
        bucket = peri_k_quotient(u, &block);
        to.id = u - bucket * block.by;
    } else {
        to.id = peri_k_divide(u, &buckets, &bucket);
    }
    if (feature[PERI_BUCKET_KEEP]) to.id = u;
    to.bucket = (int32_t)bucket;
    return to;
}

/** What the ids [first, stop) have in common: their feature, where it is one and cuts by blocks. Made by a warp. */
struct common {
    const int64_t *feature; /* NULL: several features */
    peri_k_divisor block;
    uint64_t limit, scale; /* ids below `limit` are cut by blocks; new id: u - bucket * scale */
    __device__ common(const cut &c, int64_t first, int64_t stop)
        : feature(feature_by_warp(c, first)), block{0, 0, 0}, limit(0), scale(0)
    {
        const int64_t *next = feature + PERI_BUCKET_WORDS;
        const bool last = next >= c.a.features + c.a.n_features * PERI_BUCKET_WORDS;
        if (!last && c.offset(next[PERI_BUCKET_FIRST_BAG]) < stop) feature = NULL;
        else if (feature[PERI_BUCKET_BOUNDS] < 0) {
            block = {(uint64_t)feature[PERI_BUCKET_BLOCK], (uint64_t)feature[PERI_BUCKET_MULTIPLIER],
                     (int32_t)feature[PERI_BUCKET_SHIFT]};
            limit = block.by * c.buckets.by;
            scale = feature[PERI_BUCKET_KEEP] ? 0 : block.by;
        }
    }
    /** Where id @u < limit goes; WIDE: it may be 2^32 or more. */
    template <bool WIDE> __device__ __forceinline__ place place_for(uint64_t u) const
    {
        if (!WIDE) {
            const uint32_t bucket = peri_k_quotient_32((uint32_t)u, &block);
            return {(uint32_t)u - bucket * (uint32_t)scale, (int32_t)bucket};
        }
        const uint64_t bucket = peri_k_quotient_63(u, &block);
        return {u - (uint32_t)bucket * scale, (int32_t)bucket};
    }
    /** What a warp's next N * 32 ids are: 0: some are beyond the limit, or not there; 1: all are below 2^32; 2: not
     *  all. */
    template <int N> __device__ __forceinline__ int kind(const uint64_t (&u)[N], bool all_there) const
    {
        uint64_t most = 0;
        PERI_UNROLL
        for (int k = 0; k < N; k++) most = u[k] > most ? u[k] : most;
        if (!all_there || !__all_sync(0xffffffffu, most < limit)) return 0;
        return __all_sync(0xffffffffu, most >> 32 == 0) ? 1 : 2;
    }
};

/** Edge number @tile, by a warp. */
struct find_edges {
    cut c;
    __device__ void operator()(int64_t tile, int lane, unsigned) const
    {
        const int64_t first = tile * TILE, bag = tile < c.tiles ? bag_by_warp(c, first) : c.a.bags;
        const bool before = tile < c.tiles && bag > 0 && c.offset(bag) > first;
        if (lane == 0) c.edges[tile] = 2 * bag + before;
        if (!before || c.offset(bag - 1) / TILE != tile - 1) return; /* no such bag; or another edge's */
        for (int64_t b = lane; b < c.a.buckets; b += 32)
            peri_set_index(c.a.lengths, b * c.a.bags + bag - 1, c.a.lengths_dtype, 0);
    }
};

/** Clears the lengths of empty bags; by all warps of the grid. Bags 32 * chunk to 32 * chunk + 31 are a warp's. Where
 *  few of them are empty, the warp clears these one after the other, a lane a bucket; else a lane has a bag, so that
 *  neighbours store side by side. */
__device__ __forceinline__ void clear_empty(const cut &c)
{
    enum { FEW_BAGS = 4 };
    for (int64_t chunk = peri_grid_thread() / 32; chunk * 32 < c.a.bags; chunk += peri_grid_threads() / 32) {
        const int64_t bag = chunk * 32 + peri_lane();
        const bool mine = bag < c.a.bags && c.offset(bag) >= c.offset(bag + 1);
        unsigned those = __ballot_sync(0xffffffffu, mine);
        const bool few = __popc(those) <= FEW_BAGS;
        for (int64_t b = 0; mine && !few && b < c.a.buckets; b++)
            peri_set_index(c.a.lengths, b * c.a.bags + bag, c.a.lengths_dtype, 0);
        for (; few && those; those &= those - 1)
            for (int64_t b = peri_lane(); b < c.a.buckets; b += 32)
                peri_set_index(c.a.lengths, b * c.a.bags + chunk * 32 + __ffs((int)those) - 1, c.a.lengths_dtype, 0);
    }
}

/** Every length, for more than MOST_BUCKETS. */
struct clear_lengths {
    cut c;
    __device__ void operator()(int64_t i) const { peri_set_index(c.a.lengths, i, c.a.lengths_dtype, 0); }
};

struct clear_sums {
    int64_t *sums;
    __device__ void operator()(int64_t i) const { sums[i] = 0; }
};

/** The lanes whose bucket is this lane's, for buckets below 2^BITS; 0: any. @bucket -1: none; ALL: there is no such
 *  lane. */
template <int BITS, bool ALL = false> __device__ __forceinline__ unsigned same_bucket(int32_t bucket)
{
    if (BITS == 0) return __match_any_sync(0xffffffffu, bucket);
    unsigned same = ALL ? 0xffffffffu : __ballot_sync(0xffffffffu, bucket >= 0);
    PERI_UNROLL
    for (int bit = 0; bit < BITS; bit++) {
        const bool set = bucket >> bit & 1;
        const unsigned those = __ballot_sync(0xffffffffu, set);
        same &= set ? those : ~those;
    }
    return same;
}

__device__ __forceinline__ void note_bucket(int32_t bucket, int i, uint16_t *codes, uint32_t *histogram)
{
    codes[i] = (uint16_t)bucket;
    atomicAdd(&histogram[bucket], 1u);
}

/** The buckets of a part's @n ids into @codes; @histogram counts them. T: ids as unsigned numbers. */
template <class T>
__device__ __forceinline__ void find_buckets(const cut &c, int64_t first, int n, uint16_t *codes, uint32_t *histogram)
{
    const common part(c, first, first + n);
    for (int from = 0; from < n; from += 32 * MANY) {
        uint64_t u[MANY];
        PERI_UNROLL
        for (int k = 0; k < MANY; k++) {
            u[k] = 0;
            if (from + k * 32 + peri_lane() < n) u[k] = c.id<T>(first + from + k * 32 + peri_lane());
        }
        const int kind = part.kind(u, from + 32 * MANY <= n);
        if (kind == 1) {
            PERI_UNROLL
            for (int k = 0; k < MANY; k++)
                note_bucket(part.place_for<false>(u[k]).bucket, from + k * 32 + peri_lane(), codes, histogram);
            continue;
        }
        if (kind == 2) {
            PERI_UNROLL
            for (int k = 0; k < MANY; k++)
                note_bucket(part.place_for<true>(u[k]).bucket, from + k * 32 + peri_lane(), codes, histogram);
            continue;
        }
        PERI_ROLLED
        for (int i = from + peri_lane(); i < n && i < from + 32 * MANY; i += 32)
            note_bucket(place_of(c, c.id<T>(first + i), first + i, part.feature).bucket, i, codes, histogram);
    }
}

/** Adds the ids [from, to) of a tile to @column, a bag's counters; by a warp. */
template <int BITS>
__device__ __forceinline__ void count_by_warp(const uint16_t *codes, int from, int to, uint16_t *column, int pitch)
{
    PERI_ROLLED
    for (int i = from + peri_lane(); i - peri_lane() < to; i += 32) {
        const int32_t bucket = i < to ? codes[i] : -1;
        const unsigned same = same_bucket<BITS>(bucket);
        if (bucket >= 0 && 31 - __clz((int)same) == peri_lane()) column[bucket * pitch] += (uint16_t)__popc(same);
        __syncwarp();
    }
}

/** Counts a bag's ids [from, to) of the tile in a column of @counters, which is the lane's own; those of its warp's
 *  lanes lie side by side. The warp counts long bags together, one after the other: parts that lie in the bag as a
 *  whole have been counted, in @histograms. */
template <int BITS>
__device__ __forceinline__ void count_bag(const uint16_t *codes, const uint32_t *histograms, int from, int to,
                                          uint16_t *counters, int buckets, int pitch)
{
    for (int b = 0; b < buckets && from < to; b++) counters[b * pitch] = 0;
    for (int i = from; i < to && to - from <= SHORT; i++) counters[codes[i] * pitch]++;
    for (unsigned those = __ballot_sync(0xffffffffu, to - from > SHORT); those; those &= those - 1) {
        const int lane = __ffs((int)those) - 1, begin = __shfl_sync(0xffffffffu, from, lane),
                  end = __shfl_sync(0xffffffffu, to, lane);
        const int part = (begin + PART - 1) / PART, past = end / PART; /* whole parts */
        uint16_t *column = counters - peri_lane() + lane;
        __syncwarp();
        if (part < past) {
            count_by_warp<BITS>(codes, begin, part * PART, column, pitch);
            count_by_warp<BITS>(codes, past * PART, end, column, pitch);
            PERI_ROLLED
            for (int b = peri_lane(); b < buckets; b += 32)
                PERI_ROLLED
                for (int k = part; k < past; k++) column[b * pitch] += (uint16_t)histograms[k * buckets + b];
        } else {
            count_by_warp<BITS>(codes, begin, end, column, pitch);
        }
        __syncwarp();
    }
}

/** The lengths of bags [begin, end), which have a part in the tile whose @n ids begin with number @first. A lane has a
 *  bag. */
template <class L, int BITS>
__device__ __forceinline__ void write_lengths(const cut &c, const uint16_t *codes, const uint32_t *histograms,
                                              int64_t first, int n, uint16_t *counters, int64_t begin, int64_t end)
{
    const int p = (int)c.a.buckets;
    uint16_t *column = counters + threadIdx.x;
    for (int64_t from_bag = begin; from_bag < end; from_bag += c.bags) {
        const int64_t bag = from_bag + threadIdx.x;
        const bool mine = (int)threadIdx.x < c.bags && bag < end;
        const int64_t starts = mine ? c.offset(bag) - first : 0, ends = mine ? c.offset(bag + 1) - first : 0;
        const int from = starts < 0 ? 0 : (int)starts, to = ends > n ? n : (int)ends;
        count_bag<BITS>(codes, histograms, from, to, column, p, c.bags);
        if (from >= to) continue; /* the others have come out of the votes */
        L *length = (L *)c.a.lengths + bag;
        const bool whole = starts >= 0 && ends <= n;
        for (int b = 0; b < p; b++, length += c.a.bags) {
            const L count = column[b * c.bags];
            if (whole) *length = count;
            else if (count > 0) c.add_length(b, bag, count);
        }
    }
}

/** The offset of this lane's first bag of [begin, end) on its way to the second-level cache, while ids are counted. */
__device__ __forceinline__ void fetch_offset(const cut &c, int64_t begin, int64_t end)
{
#if !defined(PERI_CUDA_HOST)
    const int64_t bag = begin + threadIdx.x, bytes = c.a.offsets_dtype == PERI_I32 ? 4 : 8;
    if ((int)threadIdx.x < c.bags && bag < end)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *)c.a.offsets + bag * bytes));
#else
    (void)c, (void)begin, (void)end;
#endif
}

template <class T, int BITS>
__global__ void __launch_bounds__(PERI_BLOCK, 4) count_tiles(const PERI_GRID_CONSTANT cut c)
{
    PERI_SHARED(uint16_t, codes, TILE);
    PERI_SHARED_DYNAMIC(uint32_t, histograms); /* warps x buckets; then counters of 16 bits: buckets x bags */
    const int p = (int)c.a.buckets, warp = (int)(threadIdx.x / 32);
    uint16_t *counters = (uint16_t *)(histograms + p * PERI_WARPS);
    for (int64_t tile = blockIdx.x; tile < c.tiles; tile += gridDim.x) {
        const int64_t first = tile * TILE, left = c.a.n - first, left_here = left - warp * PART;
        const int n = left < TILE ? (int)left : (int)TILE;
        fetch_offset(c, c.begin_of(tile), c.edges[tile + 1] >> 1);
        for (int b = peri_lane(); b < p; b += 32) histograms[warp * p + b] = 0;
        __syncwarp();
        if (left_here > 0)
            find_buckets<T>(c, first + warp * PART, left_here < PART ? (int)left_here : (int)PART, codes + warp * PART,
                            histograms + warp * p);
        __syncthreads();
        const int64_t begin = c.begin_of(tile), end = c.edges[tile + 1] >> 1; /* anew: registers are few */
        PERI_ROLLED
        for (int i = (int)threadIdx.x; i < p * PERI_WARPS; i += PERI_BLOCK) {
            const int64_t part = tile * PERI_WARPS + i % PERI_WARPS;
            if (part < c.parts)
                c.sums[i / PERI_WARPS * c.parts + part] = histograms[i % PERI_WARPS * p + i / PERI_WARPS];
        }
        if (c.a.lengths_dtype == PERI_I32)
            write_lengths<int32_t, BITS>(c, codes, histograms, first, n, counters, begin, end);
        else write_lengths<int64_t, BITS>(c, codes, histograms, first, n, counters, begin, end);
        __syncthreads(); /* the next tile's */
    }
    clear_empty(c);
}

/** The same for more than MOST_BUCKETS. */
template <class T> struct count_one {
    cut c;
    __device__ void operator()(int64_t i) const
    {
        const int32_t bucket = place_of(c, c.id<T>(i), i, NULL).bucket;
        c.add_length(bucket, peri_segment_of(c.a.offsets, c.a.offsets_dtype, 0, c.a.bags, i), 1);
        peri_atomic_add(&c.sums[bucket * c.parts + i / LONG_PART], 1);
    }
};

/** What goes along with id number @i to place @at. */
__device__ __forceinline__ void place_more(const cut &c, int64_t i, int64_t at, int32_t bucket)
{
    for (int64_t w = 0; w < (c.a.weights ? c.a.width : 0); w++)
        c.a.new_weights[at * c.a.width + w] = c.a.weights[i * c.a.width + w];
    if (c.a.positions) {
        const int64_t bag = peri_segment_of(c.a.offsets, c.a.offsets_dtype, 0, c.a.bags, i);
        peri_set_index(c.a.positions, at, c.a.ids_dtype, i - c.offset(bag));
    }
    if (c.a.unbucketize) c.a.unbucketize[i] = at;
    if (c.a.mapping) c.a.mapping[i] = bucket;
}

/** A cursor moves on for the ids of 32 lanes, in their order: the place of this lane's. All lanes call it. @bucket -1:
 *  none; ALL: there is no such lane. */
template <int BITS, bool ALL, class T> __device__ __forceinline__ T next_place(T *cursors, int64_t step, int32_t bucket)
{
    const unsigned same = same_bucket<BITS, ALL>(bucket);
    const T begin = ALL || bucket >= 0 ? cursors[bucket * step] : 0;
    __syncwarp();
    if ((ALL || bucket >= 0) && 31 - __clz((int)same) == peri_lane()) cursors[bucket * step] = begin + (T)__popc(same);
    __syncwarp();
    return begin + (T)__popc(same & ((1u << peri_lane()) - 1));
}

/** A part's ids in shared memory, by buckets. */
struct sorted_part {
    int64_t *delta; /* by bucket: place in the result less place here */
    uint64_t *ids;
    int32_t *cursors; /* by bucket */
    uint16_t *codes;  /* by place here: the bucket */
    uint16_t *places; /* by place in the part: place here; NULL: nobody asks */
    __device__ sorted_part(char *room, int64_t buckets, bool more)
        : delta((int64_t *)room), ids((uint64_t *)(delta + buckets)), cursors((int32_t *)(ids + PART)),
          codes((uint16_t *)(cursors + buckets)), places(more ? codes + PART : NULL)
    {
    }
    static int64_t bytes(int64_t buckets, bool more) { return (12 * buckets + (more ? 12 : 10) * PART + 15) / 16 * 16; }
    /** Id number @i of the part, a lane each in their order. All lanes call it. */
    template <int BITS, bool ALL> __device__ __forceinline__ void put(const place &to, int i) const
    {
        const int at = next_place<BITS, ALL>(cursors, 1, to.bucket);
        if (!ALL && to.bucket < 0) return;
        ids[at] = to.id;
        codes[at] = (uint16_t)to.bucket;
        if (places) places[i] = (uint16_t)at;
    }
    /** Where each bucket's ids of part @part begin, here and in the result. */
    __device__ __forceinline__ void begin(const cut &c, int64_t part) const
    {
        const int p = (int)c.a.buckets, lane = peri_lane();
        int before = 0;
        for (int low = 0; low < p; low += 32) {
            const int b = low + lane;
            const int64_t begins = b < p ? c.sums[b * c.parts + part] : 0,
                          ends = b < p ? c.sums[b * c.parts + part + 1] : 0;
            int sum = (int)(ends - begins);
            PERI_UNROLL
            for (int by = 1; by < 32; by *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, (unsigned)by);
                if (lane >= by) sum += other;
            }
            const int at = before + sum - (int)(ends - begins);
            if (b < p) cursors[b] = at, delta[b] = begins - at;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
        __syncwarp();
    }
    /** The part's @n ids, of which the first is number @first, and what goes along, to the result. */
    template <class T> __device__ __forceinline__ void store(const cut &c, int64_t first, int n) const
    {
        T *to = (T *)c.a.new_ids;
        if (n == PART) {
            PERI_UNROLL
            for (int k = 0; k < PART / 32; k++) {
                const int i = k * 32 + peri_lane();
                (to + delta[codes[i]])[i] = (T)ids[i];
            }
        } else {
            PERI_ROLLED
            for (int i = peri_lane(); i < n; i += 32) (to + delta[codes[i]])[i] = (T)ids[i];
        }
        PERI_ROLLED
        for (int i = peri_lane(); i < n && c.more; i += 32) {
            const int at = places[i], bucket = codes[at];
            place_more(c, first + i, delta[bucket] + at, bucket);
        }
    }
};

template <class T, int BITS>
__global__ void __launch_bounds__(PERI_BLOCK, 4) place_parts(const PERI_GRID_CONSTANT cut c, int bytes)
{
    PERI_SHARED_DYNAMIC(char, all);
    const int p = (int)c.a.buckets, lane = peri_lane();
    const sorted_part sorted(all + threadIdx.x / 32 * bytes, p, c.more);
    for (int64_t part = peri_grid_thread() / 32; part < c.parts; part += peri_grid_threads() / 32) {
        const int64_t first = part * PART;
        const int n = c.a.n - first < PART ? (int)(c.a.n - first) : (int)PART;
        const common of_part(c, first, first + n);
        sorted.begin(c, part);
        for (int from = 0; from < n; from += 32 * MANY) {
            uint64_t u[MANY];
            PERI_UNROLL
            for (int k = 0; k < MANY; k++) {
                u[k] = 0;
                if (from + k * 32 + lane < n) u[k] = c.id<T>(first + from + k * 32 + lane);
            }
            const int kind = of_part.kind(u, from + 32 * MANY <= n);
            if (kind == 1) {
                PERI_UNROLL
                for (int k = 0; k < MANY; k++)
                    sorted.put<BITS, true>(of_part.place_for<false>(u[k]), from + k * 32 + lane);
                continue;
            }
            if (kind == 2) {
                PERI_UNROLL
                for (int k = 0; k < MANY; k++)
                    sorted.put<BITS, true>(of_part.place_for<true>(u[k]), from + k * 32 + lane);
                continue;
            }
            PERI_ROLLED
            for (int i = from + lane; i - lane < n && i < from + 32 * MANY; i += 32) {
                place to = {0, -1};
                if (i < n) to = place_of(c, c.id<T>(first + i), first + i, of_part.feature);
                sorted.put<BITS, false>(to, i);
            }
        }
        __syncwarp();
        sorted.store<T>(c, first, n);
        __syncwarp(); /* the next part's */
    }
}

/** The same for more than MOST_BUCKETS. */
template <class T> __global__ void __launch_bounds__(PERI_BLOCK) place_long_parts(const PERI_GRID_CONSTANT cut c)
{
    for (int64_t part = peri_grid_thread() / 32; part < c.parts; part += peri_grid_threads() / 32) {
        const int64_t first = part * LONG_PART, last = c.a.n - first < LONG_PART ? c.a.n : first + LONG_PART;
        for (int64_t from = first; from < last; from += 32) {
            const int64_t i = from + peri_lane();
            place to = {0, -1};
            if (i < last) to = place_of(c, c.id<T>(i), i, NULL);
            const int64_t at = next_place<0, false>(c.sums + part, c.parts, to.bucket);
            if (i >= last) continue;
            ((T *)c.a.new_ids)[at] = (T)to.id;
            if (c.more) place_more(c, i, at, to.bucket);
        }
    }
}

int64_t tiles_of_parts(int64_t parts) { return (parts + PERI_WARPS - 1) / PERI_WARPS; }
int64_t parts_of_ids(const peri_k_bucketize_args *a)
{
    const int64_t part = a->buckets > MOST_BUCKETS ? (int)LONG_PART : (int)PART;
    return a->n > part ? (a->n + part - 1) / part : 1;
}

size_t sum_bytes(int64_t n)
{
    size_t bytes = 0;
    const int64_t *x = NULL;
    (void)peri_exclusive_sum(NULL, bytes, x, (int64_t *)NULL, n, 0);
    return bytes;
}

template <class T> cudaError_t count(const cut &k, const peri_cuda_call *c)
{
    const int64_t p = k.a.buckets;
    PERI_CUDA_TRY(each(p > MOST_BUCKETS ? 0 : p * k.parts, p * k.parts + 1, c, clear_sums{k.sums}));
    if (p > MOST_BUCKETS) {
        PERI_CUDA_TRY(each(0, p * k.a.bags, c, clear_lengths{k}));
        return each(0, k.a.n, c, count_one<T>{k});
    }
    PERI_CUDA_TRY(each_warp(0, k.tiles + 1, c, find_edges{k}));
    return peri_cuda_launch(p <= 8    ? count_tiles<T, 3>
                            : p <= 64 ? count_tiles<T, 6>
                                      : count_tiles<T, 0>,
                            peri_cuda_grid(k.tiles, 1, c), PERI_BLOCK, (size_t)(4 * p * PERI_WARPS + 2 * p * k.bags), c,
                            k);
}

template <class T> cudaError_t place_all(const cut &k, const peri_cuda_call *c)
{
    const int64_t p = k.a.buckets, bytes = sorted_part::bytes(p, k.more), most = 49152 / bytes;
    const int64_t warps = most < PERI_WARPS ? most : (int)PERI_WARPS;
    if (p > MOST_BUCKETS)
        return peri_cuda_launch(place_long_parts<T>, peri_cuda_grid(k.parts, PERI_WARPS, c), PERI_BLOCK, 0, c, k);
    return peri_cuda_launch(p <= 8    ? place_parts<T, 3>
                            : p <= 64 ? place_parts<T, 6>
                                      : place_parts<T, 0>,
                            peri_cuda_grid(k.parts, warps, c), (unsigned)warps * 32, (size_t)(warps * bytes), c, k,
                            (int)bytes);
}

template <class T> cudaError_t bucketize(const cut &k, const peri_cuda_call *c)
{
    const peri_k_bucketize_args *a = &k.a;
    const int64_t slots = a->buckets * a->bags, sums = a->buckets * k.parts + 1;
    char *rest = (char *)k.edges + peri_part(8 * (k.tiles + 1));
    size_t bytes = (size_t)(c->scratch + c->bytes - rest);
    PERI_CUDA_TRY(count<T>(k, c));
    if (a->starts)
        PERI_CUDA_TRY(peri_cumsum({a->lengths, a->starts, (int64_t *)rest, NULL, NULL, NULL, 1, slots,
                                   peri_cumsum_blocks(slots), -1, a->lengths_dtype, PERI_I64, PERI_CUMSUM_COMPLETE},
                                  c));
    if (!a->new_ids || a->n == 0) return cudaSuccess;
    PERI_CUDA_TRY(peri_exclusive_sum(rest, bytes, (const int64_t *)k.sums, k.sums, sums, c->stream));
    return place_all<T>(k, c);
}

} // namespace

/** Sums and edges; then CUB's scratch, or that of the cumulative sum of the lengths. */
PERI_CUDA_SCRATCH(bucketize)
{
    const int64_t parts = parts_of_ids(a), n = a->buckets * parts + 1, cub = (int64_t)sum_bytes(n);
    const int64_t lengths = a->starts ? peri_cumsum_scratch(1, a->buckets * a->bags) : 0;
    return peri_part(8 * n) + peri_part(8 * (tiles_of_parts(parts) + 1)) + peri_part(cub > lengths ? cub : lengths);
}

PERI_CUDA_OP(bucketize)
{
    const int64_t fit = COUNTERS / a->buckets;
    const bool more = a->weights || a->positions || a->unbucketize || a->mapping;
    const int32_t bags = fit < PERI_BLOCK ? (int32_t)fit : (int32_t)PERI_BLOCK;
    const int64_t parts = parts_of_ids(a);
    int64_t *sums = (int64_t *)c->scratch, *edges = (int64_t *)(c->scratch + peri_part(8 * (a->buckets * parts + 1)));
    const cut k = {*a, peri_k_divisor_of(a->buckets), sums, edges, parts, tiles_of_parts(parts), bags, more};
    return a->ids_dtype == PERI_I32 ? bucketize<uint32_t>(k, c) : bucketize<uint64_t>(k, c);
}
