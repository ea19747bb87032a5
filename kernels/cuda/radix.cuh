/* SPDX-License-Identifier: Apache-2.0
 *
 * radix.cuh: a stable sort of 64-bit keys by some of their bits, for callers that make the keys themselves and count their digits on the
 * way. CUB's sort reads all keys once more to count, sums up in a launch of its own, and clears its memory in pieces; for the few
 * hundred thousand keys of a batch these launches take longer than the sort.
 *
 * From the lowest digit to the highest, one launch a digit. A thread block takes a tile of keys, ranks them in shared memory, and has to
 * know how many keys with each digit lie in the tiles before: it adds up what they have published, from the nearest back to the first that
 * published a sum of its own (Merrill and Garland's decoupled look-back; Adinets and Merrill's Onesweep). Tiles are taken in the order of a
 * counter, so that a block only waits for blocks that run.
 */
#ifndef PERI_KERNELS_CUDA_RADIX_CUH
#define PERI_KERNELS_CUDA_RADIX_CUH

#include "cub.cuh"
#include "scan.cuh"

#if !defined(RADIX_ITEMS)
#define RADIX_ITEMS 16
#endif
enum { PERI_RADIX_BITS = 8, PERI_RADIX = 1 << PERI_RADIX_BITS, PERI_RADIX_PASSES = 8 };

/** A sort of @n keys by bits [low, low + bits). `cleared` bytes of the scratch from `counts` on start as 0. */
struct peri_radix {
    int64_t n, tiles;
    int low, bits, passes, width; /* of a digit; the last one may have fewer */
    unsigned long long *counts;    /* [passes][PERI_RADIX]: keys with each digit */
    unsigned long long *published; /* [passes][tiles][PERI_RADIX]: see peri_radix_state */
    unsigned *next;      /* [passes]: tiles taken */
    uint64_t *keys[2];   /* where the caller puts them, and the other room; the result may be in a place of the caller's */
    int64_t cleared, bytes;

    __host__ __device__ int shift(int pass) const { return low + pass * width; }
    __host__ __device__ int digit_bits(int pass) const { return bits - pass * width < width ? bits - pass * width : width; }
    __device__ __forceinline__ unsigned digit(uint64_t key, int pass) const
    {
        return (unsigned)(key >> shift(pass)) & ((1u << digit_bits(pass)) - 1);
    }
};

enum { PERI_RADIX_THREADS = PERI_RADIX, PERI_RADIX_ITEMS = RADIX_ITEMS, PERI_RADIX_TILE = PERI_RADIX_THREADS * PERI_RADIX_ITEMS };

static inline peri_radix peri_radix_of(char *scratch, int64_t n, int low, int bits)
{
    peri_radix r = {};
    r.n = n;
    r.tiles = (n + PERI_RADIX_TILE - 1) / PERI_RADIX_TILE;
    r.low = low;
    r.bits = bits;
    r.passes = (bits + PERI_RADIX_BITS - 1) / PERI_RADIX_BITS;
    r.width = (bits + r.passes - 1) / r.passes;
    const int64_t counts = peri_part(8 * r.passes * PERI_RADIX), published = peri_part(8 * r.passes * r.tiles * PERI_RADIX);
    const int64_t next = peri_part(4 * r.passes);
    r.counts = (unsigned long long *)scratch;
    r.published = (unsigned long long *)(scratch + counts);
    r.next = (unsigned *)(scratch + counts + published);
    r.cleared = counts + published + next;
    for (int k = 0; k < 2; k++) r.keys[k] = (uint64_t *)(scratch + r.cleared + k * peri_part(8 * n));
    r.bytes = r.cleared + 2 * peri_part(8 * n);
    return r;
}

/** What a tile has published for a digit: its own keys, or those of it and of all tiles before. 0: nothing yet. */
enum { PERI_RADIX_OWN = 1, PERI_RADIX_ALL = 2 };
static __device__ __forceinline__ unsigned long long peri_radix_state(int what, uint64_t keys) { return (unsigned long long)keys << 2 | what; }

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

/** The lanes of the warp that have the same digit. */
static __device__ __forceinline__ unsigned peri_radix_same(unsigned digit)
{
#if defined(PERI_CUDA_HOST)
    return __match_any_sync(0xffffffffu, digit);
#else
    unsigned same = 0xffffffffu;
    PERI_UNROLL
    for (int b = 0; b < PERI_RADIX_BITS; b++) {
        const bool set = digit >> b & 1;
        const unsigned with = __ballot_sync(0xffffffffu, set);
        same &= set ? with : ~with;
    }
    return same;
#endif
}

#if !defined(RADIX_AHEAD)
#define RADIX_AHEAD 8
#endif
template <int ITEMS>
__global__ void __launch_bounds__(PERI_RADIX_THREADS, 3) peri_radix_pass(peri_radix r, int pass, const uint64_t *from, uint64_t *to)
{
    PERI_SHARED(unsigned, tile_of, 1);
    PERI_SHARED(unsigned, ranks, PERI_WARPS * PERI_RADIX); /* [warp][digit]: keys with it in the warps before */
    PERI_SHARED(unsigned, starts, PERI_RADIX);             /* of a digit in the tile */
    PERI_SHARED(int64_t, moves, PERI_RADIX);               /* from there to its place in `to` */
    PERI_SHARED(uint64_t, room, PERI_RADIX_THREADS * ITEMS);
    const int lane = peri_lane(), warp = (int)threadIdx.x / 32;
    enum { AHEAD = RADIX_AHEAD };
    const unsigned digit_of_thread = threadIdx.x;
    if (threadIdx.x == 0) *tile_of = atomicAdd(&r.next[pass], 1u);
    for (int w = 0; w < PERI_WARPS; w++) ranks[w * PERI_RADIX + digit_of_thread] = 0;
    __syncthreads();
    const int64_t tile = *tile_of, begin = tile * (PERI_RADIX_THREADS * ITEMS), left = r.n - begin;
    const int in_tile = (int)(left < PERI_RADIX_THREADS * ITEMS ? left : PERI_RADIX_THREADS * ITEMS);
    uint64_t keys[ITEMS];
    unsigned place[ITEMS];
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        const int at = warp * 32 * ITEMS + i * 32 + lane;
        keys[i] = at < in_tile ? from[begin + at] : ~(uint64_t)0;
    }
    unsigned *const mine = ranks + warp * PERI_RADIX;
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        if (warp * 32 * ITEMS + i * 32 >= in_tile) continue; /* the whole warp */
        const unsigned digit = r.digit(keys[i], pass), same = peri_radix_same(digit), below = same & ((1u << lane) - 1);
        const unsigned before = mine[digit];
        place[i] = before + __popc(below);
        __syncwarp();
        if (below == 0) mine[digit] = before + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    /* From here on, a thread a digit. Keys that are not there have the last digit, behind all others that have it. */
    unsigned own = 0;
    PERI_UNROLL
    for (int w = 0; w < PERI_WARPS; w++) {
        const unsigned n = ranks[w * PERI_RADIX + digit_of_thread];
        ranks[w * PERI_RADIX + digit_of_thread] = own;
        own += n;
    }
    unsigned long long *const published = r.published + ((int64_t)pass * r.tiles + tile) * PERI_RADIX + digit_of_thread;
    peri_radix_publish(published, peri_radix_state(tile == 0 ? PERI_RADIX_ALL : PERI_RADIX_OWN, own));
    int64_t all;
    const int64_t start = peri_block_scan(own, &all) - own;
    const int64_t count = (int64_t)r.counts[pass * PERI_RADIX + digit_of_thread], first = peri_block_scan(count, &all) - count;
    starts[digit_of_thread] = (unsigned)start;
    __syncthreads();
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        if (warp * 32 * ITEMS + i * 32 >= in_tile) continue;
        const unsigned digit = r.digit(keys[i], pass), at = starts[digit] + mine[digit] + place[i];
        if (at < (unsigned)in_tile) room[at] = keys[i];
    }
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
    if (tile > 0) peri_radix_publish(published, peri_radix_state(PERI_RADIX_ALL, before + own));
    moves[digit_of_thread] = first + (int64_t)before - start;
    __syncthreads();
    PERI_UNROLL
    for (int i = 0; i < ITEMS; i++) {
        const int at = i * PERI_RADIX_THREADS + (int)threadIdx.x;
        if (at >= in_tile) continue;
        const uint64_t key = room[at];
        to[moves[r.digit(key, pass)] + at] = key;
    }
}

/** Sort the keys in r.keys[0] into @sorted. */
static inline cudaError_t peri_radix_sort(const peri_radix &r, uint64_t *sorted, const peri_cuda_call *c)
{
    const uint64_t *from = r.keys[0];
    for (int pass = 0; pass < r.passes; pass++) {
        uint64_t *to = pass == r.passes - 1 ? sorted : r.keys[(pass + 1) % 2];
        PERI_CUDA_TRY(peri_cuda_launch(peri_radix_pass<PERI_RADIX_ITEMS>, (unsigned)r.tiles, PERI_RADIX_THREADS, 0, c, r, pass, from, to));
        from = to;
    }
    return cudaSuccess;
}

#endif
