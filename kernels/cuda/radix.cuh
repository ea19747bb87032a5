/* SPDX-License-Identifier: Apache-2.0
 *
 * radix.cuh: a stable sort of 64-bit keys by some of their bits, for callers that make the keys themselves and count
 * their digits on the way. CUB's sort reads all keys once more to count, sums up in a launch of its own, and clears its
 * memory in pieces; for the few hundred thousand keys of a batch these launches take longer than the sort.
 *
 * From the lowest digit to the highest, one launch a digit. A thread block takes a tile of keys, ranks them in shared
 * memory, and has to know how many keys with each digit lie in the tiles before: it adds up what they have published,
 * from the nearest back to the first that published a sum of its own (Merrill and Garland's decoupled look-back;
 * Adinets and Merrill's Onesweep). Tiles are taken in the order of a counter, so that a block only waits for blocks
 * that run.
 */
#ifndef PERI_KERNELS_CUDA_RADIX_CUH
#define PERI_KERNELS_CUDA_RADIX_CUH

#include "scan.cuh"

/** PERI_RADIX: digits, and threads of a block. */
enum { PERI_RADIX_BITS = 8, PERI_RADIX = 1 << PERI_RADIX_BITS, PERI_RADIX_PASSES = 8 };
enum { PERI_RADIX_ITEMS = 12, PERI_RADIX_TILE = PERI_RADIX * PERI_RADIX_ITEMS };
static_assert((int)PERI_RADIX == (int)PERI_BLOCK, "a thread a digit");

/** A sort of @n keys by bits [low, low + bits), and where it keeps what, in bytes from the beginning of its scratch. */
struct peri_radix {
    int64_t n, tiles;
    int low, bits, passes, width; /* width: bits of a digit; the last one may have fewer */
    char *scratch;
    int64_t published, next, cleared, keys[2], bytes; /* the first `cleared` bytes start as 0 */

    /** [passes][PERI_RADIX]: keys with each digit. The caller counts. */
    __host__ __device__ unsigned long long *counts_of(int pass) const
    {
        return (unsigned long long *)scratch + pass * PERI_RADIX;
    }
    /** [PERI_RADIX] of a tile: see peri_radix_state. */
    __device__ unsigned long long *published_of(int pass, int64_t tile) const
    {
        return (unsigned long long *)(scratch + published) + (pass * tiles + tile) * PERI_RADIX;
    }
    __device__ unsigned *next_of(int pass) const { return (unsigned *)(scratch + next) + pass; }
    /** 0: where the caller puts the keys; 1: room for as many. */
    __host__ __device__ uint64_t *keys_of(int which) const { return (uint64_t *)(scratch + keys[which]); }

    __device__ __forceinline__ unsigned digit(uint64_t key, int pass) const
    {
        const int from = pass * width, left = bits - from;
        return (unsigned)(key >> (low + from)) & ((1u << (left < width ? left : width)) - 1);
    }
};

/** scratch: to be set by the caller. */
static inline peri_radix peri_radix_of(int64_t n, int low, int bits)
{
    peri_radix r = {};
    r.n = n;
    r.tiles = (n + PERI_RADIX_TILE - 1) / PERI_RADIX_TILE;
    r.low = low;
    r.bits = bits;
    r.passes = (bits + PERI_RADIX_BITS - 1) / PERI_RADIX_BITS;
    r.width = (bits + r.passes - 1) / r.passes;
    r.published = peri_part(8 * r.passes * PERI_RADIX);
    r.next = r.published + peri_part(8 * r.passes * r.tiles * PERI_RADIX);
    r.cleared = r.keys[0] = r.next + peri_part(4 * r.passes);
    r.keys[1] = r.keys[0] + peri_part(8 * n);
    r.bytes = r.keys[1] + peri_part(8 * n);
    return r;
}

/** What a tile has published for a digit: its own keys, or those of it and of all tiles before. 0: nothing yet. */
enum { PERI_RADIX_OWN = 1, PERI_RADIX_ALL = 2 };
static __device__ __forceinline__ unsigned long long peri_radix_state(unsigned what, uint64_t keys)
{
    return (unsigned long long)keys << 2 | what;
}

static __device__ __forceinline__ void peri_radix_publish(unsigned long long *p, unsigned long long state)
{
#if defined(PERI_CUDA_HOST)
    atomicExch(p, state);
#else
    *(volatile unsigned long long *)p = state;
#endif
}
static __device__ __forceinline__ unsigned long long peri_radix_published(unsigned long long *p)
{
#if defined(PERI_CUDA_HOST)
    return atomicAdd(p, 0ull);
#else
    return *(volatile unsigned long long *)p;
#endif
}

/** Rank a warp's keys: place[i] = of the keys before key i, those with the same digit. counts: of each digit, all of
 *  them in the end. lanes: of each digit, the lanes whose key has it; 0 before and after. Both are the warp's own, in
 *  shared memory. */
template <int ITEMS>
static __device__ __forceinline__ void peri_radix_rank(const peri_radix &r, int pass, const uint64_t (&keys)[ITEMS],
                                                       int left, unsigned *counts, unsigned *lanes,
                                                       unsigned (&place)[ITEMS])
{
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        if (32 * i >= left) continue; /* the whole warp */
        const unsigned digit = r.digit(keys[i], pass);
        atomicOr(&lanes[digit], 1u << peri_lane());
        __syncwarp();
        const unsigned same = lanes[digit], below = same & ((1u << peri_lane()) - 1), before = counts[digit];
        place[i] = before + __popc(below);
        __syncwarp();
        if (below == 0) counts[digit] = before + __popc(same), lanes[digit] = 0;
        __syncwarp();
    }
}

/** How many keys of all tiles before @tile have the digit whose word of @tile is at @published. */
static __device__ __forceinline__ uint64_t peri_radix_before(unsigned long long *published, int64_t tile)
{
    enum { AHEAD = 8 }; /* words in flight */
    uint64_t before = 0;
    bool known = tile == 0;
    for (int64_t back = 1; !known;) {
        unsigned long long states[AHEAD];
        PERI_UNROLL
        for (int b = 0; b < AHEAD; b++)
            states[b] = back + b <= tile ? peri_radix_published(published - (back + b) * PERI_RADIX) : 0;
        PERI_UNROLL
        for (int b = 0; b < AHEAD; b++) {
            if (known || states[b] == 0) break; /* not yet there: ask again from here on */
            before += states[b] >> 2;
            known = (states[b] & PERI_RADIX_ALL) != 0;
            back++;
        }
    }
    return before;
}

/** One pass: the keys of @from by digit @pass into @to. Each warp of a block has a part of its tile, 32 keys at a
 *  time. */
static __global__ void __launch_bounds__(PERI_RADIX, 3)
    peri_radix_pass(peri_radix r, int pass, const uint64_t *from, uint64_t *to)
{
    enum { ITEMS = PERI_RADIX_ITEMS };
    PERI_SHARED(unsigned, tile_of, 1);
    PERI_SHARED(unsigned, ranks, PERI_WARPS * PERI_RADIX); /* [warp][digit]: keys of the warp that have it; then of the
                                                              warps before */
    PERI_SHARED(unsigned, lanes, PERI_WARPS * PERI_RADIX);
    PERI_SHARED(unsigned, starts, PERI_RADIX);    /* of a digit in the sorted tile */
    PERI_SHARED(int64_t, moves, PERI_RADIX);      /* from there to its place in `to` */
    PERI_SHARED(uint64_t, room, PERI_RADIX_TILE); /* the sorted tile */
    const int thread = (int)threadIdx.x, warp = thread / 32, first_of_warp = warp * 32 * ITEMS;
    if (thread == 0) *tile_of = atomicAdd(r.next_of(pass), 1u);
    for (int w = 0; w < PERI_WARPS; w++) ranks[w * PERI_RADIX + thread] = lanes[w * PERI_RADIX + thread] = 0;
    __syncthreads();
    const int64_t tile = *tile_of, begin = tile * PERI_RADIX_TILE, left = r.n - begin;
    const int in_tile = left < PERI_RADIX_TILE ? (int)left : (int)PERI_RADIX_TILE;
    uint64_t keys[ITEMS];
    unsigned place[ITEMS];
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        const int at = first_of_warp + i * 32 + peri_lane();
        /* has the last digit, and is behind all others that have it */
        keys[i] = at < in_tile ? from[begin + at] : ~(uint64_t)0;
    }
    unsigned *const mine = ranks + warp * PERI_RADIX;
    peri_radix_rank(r, pass, keys, in_tile - first_of_warp, mine, lanes + warp * PERI_RADIX, place);
    __syncthreads();
    unsigned own = 0; /* of this thread's digit */
    PERI_UNROLL
    for (int w = 0; w < PERI_WARPS; w++) {
        const unsigned n = ranks[w * PERI_RADIX + thread];
        ranks[w * PERI_RADIX + thread] = own;
        own += n;
    }
    unsigned long long *const published = r.published_of(pass, tile) + thread;
    peri_radix_publish(published, peri_radix_state(tile == 0 ? PERI_RADIX_ALL : PERI_RADIX_OWN, own));
    int64_t all;
    const int64_t start = peri_block_scan(own, &all) - own, count = (int64_t)r.counts_of(pass)[thread];
    const int64_t first = peri_block_scan(count, &all) - count;
    starts[thread] = (unsigned)start;
    __syncthreads();
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        if (first_of_warp + i * 32 >= in_tile) continue;
        const unsigned digit = r.digit(keys[i], pass), at = starts[digit] + mine[digit] + place[i];
        if (at < (unsigned)in_tile) room[at] = keys[i];
    }
    const uint64_t before = peri_radix_before(published, tile);
    if (tile > 0) peri_radix_publish(published, peri_radix_state(PERI_RADIX_ALL, before + own));
    moves[thread] = first + (int64_t)before - start;
    __syncthreads();
    for (int at = thread; at < in_tile; at += PERI_RADIX) to[moves[r.digit(room[at], pass)] + at] = room[at];
}

/** Sort the keys into @sorted. */
static inline cudaError_t peri_radix_sort(const peri_radix &r, uint64_t *sorted, const peri_cuda_call *c)
{
    const uint64_t *from = r.keys_of(0);
    for (int pass = 0; pass < r.passes; pass++) {
        uint64_t *to = pass == r.passes - 1 ? sorted : r.keys_of((pass + 1) % 2);
        PERI_CUDA_TRY(peri_cuda_launch(peri_radix_pass, (unsigned)r.tiles, PERI_RADIX, 0, c, r, pass, from, to));
        from = to;
    }
    return cudaSuccess;
}

#endif
