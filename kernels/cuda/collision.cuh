/* SPDX-License-Identifier: Apache-2.0
 *
 * collision.cuh: what kernels/cuda/collision*.cu share: where ids are in a map, and what the threads of a block do
 * together.
 */
#ifndef PERI_KERNELS_CUDA_COLLISION_CUH
#define PERI_KERNELS_CUDA_COLLISION_CUH

#include "cuda.h"

#include "../collision.h"
#include "../spread.h"

enum : unsigned { PERI_WARP = 0xffffffffu };

/* -- maps ---------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t peri_sortable(int64_t x) { return (uint64_t)x ^ (uint64_t)1 << 63; }
static __device__ __forceinline__ int64_t peri_id_of(uint64_t word) { return (int64_t)(word ^ (uint64_t)1 << 63); }

/** The bucket of @id among the map's own. */
static __device__ __forceinline__ const peri_k_collision_bucket *peri_bucket_of(const peri_k_collision_map &m,
                                                                                int64_t id)
{
    return &m.bucket[peri_k_bucket(id, m.spread, m.buckets, m.block) - m.first_bucket];
}

/** The home line of @id among its bucket's. */
static __device__ __forceinline__ int64_t peri_mch_home(const peri_k_collision_bucket &b, int64_t id)
{
    return (int64_t)peri_k_high(peri_k_rotate(peri_k_mix((uint64_t)id), 32), (uint64_t)b.lines);
}

/** The slot of @id; NULL: it has none. A line is four loads of 16 bytes that do not wait for each other. */
static __device__ peri_k_mch_slot *peri_mch_slot(const peri_k_collision_map &m, const peri_k_collision_bucket &b,
                                                 int64_t id)
{
    struct alignas(16) slot {
        int64_t id;
        uint32_t row, window;
    };
    int64_t line = peri_mch_home(b, id);
    for (int64_t seen = 0; seen < b.lines; seen++, line = line + 1 < b.lines ? line + 1 : 0) {
        peri_k_mch_slot *at = &m.slots[(b.first_line + line) * PERI_MCH_LINE];
        slot s[PERI_MCH_LINE];
        PERI_UNROLL
        for (int k = 0; k < PERI_MCH_LINE; k++) s[k] = peri_load_beside((const slot *)at + k);
        PERI_UNROLL
        for (int k = 0; k < PERI_MCH_LINE; k++) {
            if (s[k].row == UINT32_MAX) return nullptr; /* a line fills from its first slot on */
            if (s[k].id == id) return at + k;
        }
    }
    return nullptr;
}

/** Put @id, which the index has not, into it; others do so at the same time, and nobody looks or takes any out. */
static __device__ void peri_mch_put(const peri_k_collision_map &m, const peri_k_collision_bucket &b, int64_t id,
                                    int64_t row)
{
    int64_t line = peri_mch_home(b, id);
    for (int64_t seen = 0; seen < b.lines; seen++, line = line + 1 < b.lines ? line + 1 : 0) {
        peri_k_mch_slot *at = &m.slots[(b.first_line + line) * PERI_MCH_LINE];
        for (int k = 0; k < PERI_MCH_LINE; k++) {
            if (atomicCAS(&at[k].row, UINT32_MAX, (uint32_t)row) != UINT32_MAX) continue;
            at[k].id = id;
            at[k].window = 0;
            return;
        }
    }
}

static __device__ __forceinline__ int64_t peri_hash_home(const peri_k_collision_bucket &b, uint64_t murmur)
{
    return (int64_t)peri_k_rest(murmur, b.usable > 0 ? (uint64_t)b.usable : 1, b.reciprocal);
}

/** The row of @id, -1: none. */
static __device__ int64_t peri_hash_row(const peri_k_collision_map &m, const peri_k_collision_bucket &b, int64_t id)
{
    if (id == -1) return -1;
    int64_t most = m.max_probe < b.usable ? m.max_probe : b.usable,
            at = peri_hash_home(b, peri_k_murmur((uint64_t)id, 0, 0));
    for (int64_t seen = 0; seen < most; seen++, at = at + 1 < b.usable ? at + 1 : 0) {
        int64_t found = m.rows[b.first_row + at].id;
        if (found == id) return b.first_row + at;
        if (found == -1 && !m.full) return -1;
    }
    return -1;
}

/* -- the threads of a block: all of them call these ---------------------------------------------------------------- */

static __device__ int64_t peri_block_sum(int64_t x)
{
    PERI_SHARED(int64_t, parts, PERI_WARPS);
    x = peri_group_sum<32>(x, PERI_WARP);
    __syncthreads();
    if (peri_lane() == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < PERI_WARPS; w++) x += parts[w];
    return x;
}

static __device__ int64_t peri_block_min(int64_t x)
{
    PERI_SHARED(int64_t, parts, PERI_WARPS);
    x = peri_group_min<32>(x, PERI_WARP);
    __syncthreads();
    if (peri_lane() == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    for (int w = 1; w < PERI_WARPS; w++) x = parts[w] < x ? parts[w] : x;
    return x;
}

/** How many threads before this one come with @flag; *total: how many in all. A barrier: what was read before is
 *  read. */
static __device__ int peri_block_place(bool flag, int *total)
{
    PERI_SHARED(int, parts, PERI_WARPS);
    const unsigned those = __ballot_sync(PERI_WARP, flag);
    const int warp = (int)(threadIdx.x / 32);
    int before = __popc(those & ((1u << peri_lane()) - 1));
    __syncthreads();
    if (peri_lane() == 0) parts[warp] = __popc(those);
    __syncthreads();
    *total = 0;
    for (int w = 0; w < PERI_WARPS; w++) {
        before += w < warp ? parts[w] : 0;
        *total += parts[w];
    }
    return before;
}

/** head[word] += @n, the sum over the block. */
static __device__ void peri_head_add(int64_t *head, int word, int64_t n)
{
    n = peri_block_sum(n);
    if (threadIdx.x == 0 && n) peri_atomic_add(&head[word], n);
}

/* -- sorting records: a bitonic network in which the lesser always goes to the lower place, so that what lies behind
 * the last record need not be there. Steps within a tile run in shared memory.
 * ------------------------------------------------------------------------------ */

enum { PERI_SORT_TILE = 512 };

static __device__ __forceinline__ bool peri_record_less(const peri_k_collision_record &a,
                                                        const peri_k_collision_record &b)
{
    PERI_UNROLL
    for (int w = 0; w < 3; w++)
        if (a.word[w] != b.word[w]) return a.word[w] < b.word[w];
    return a.word[3] < b.word[3];
}

/** Pairs @half apart, or @mirrored about the middles of 2 * half. */
static __device__ void peri_sort_step(peri_k_collision_record *r, int64_t n, int64_t half, bool mirrored)
{
    for (int64_t p = threadIdx.x;; p += blockDim.x) {
        const int64_t in = p & (half - 1), i = 2 * (p - in) + in, j = mirrored ? i + 2 * (half - in) - 1 : i + half;
        if (i >= n) break;
        if (j >= n) continue;
        const peri_k_collision_record low = r[i], high = r[j];
        if (peri_record_less(high, low)) r[i] = high, r[j] = low;
    }
    __syncthreads();
}

/** Sort each tile (@whole), or only do the steps after one of two tiles' distance. */
static __device__ void peri_sort_tiles(peri_k_collision_record *r, int64_t n, bool whole)
{
    PERI_SHARED(peri_k_collision_record, tile, PERI_SORT_TILE);
    for (int64_t first = 0; first < n; first += PERI_SORT_TILE) {
        const int m = n - first < PERI_SORT_TILE ? (int)(n - first) : (int)PERI_SORT_TILE;
        for (int i = (int)threadIdx.x; i < m; i += (int)blockDim.x) tile[i] = r[first + i];
        __syncthreads();
        for (int size = whole ? 1 : PERI_SORT_TILE / 2; size < m || (!whole && size < PERI_SORT_TILE); size *= 2) {
            peri_sort_step(tile, m, size, whole);
            for (int half = size / 2; half > 0; half /= 2) peri_sort_step(tile, m, half, false);
        }
        for (int i = (int)threadIdx.x; i < m; i += (int)blockDim.x) r[first + i] = tile[i];
        __syncthreads();
    }
}

/** r[n] ascending. By all threads of a block, which see what the others wrote, before and after. */
static __device__ void peri_sort_records(peri_k_collision_record *r, int64_t n)
{
    __syncthreads();
    peri_sort_tiles(r, n, true);
    for (int64_t size = PERI_SORT_TILE; size < n; size *= 2) {
        peri_sort_step(r, n, size, true);
        for (int64_t half = size / 2; half >= PERI_SORT_TILE; half /= 2) peri_sort_step(r, n, half, false);
        peri_sort_tiles(r, n, false);
    }
}

/* -- launches ------------------------------------------------------------------------------------------------------ */

template <class F> __global__ void __launch_bounds__(PERI_BLOCK) peri_bucket_kernel(F f, int64_t begin, int64_t end)
{
    for (int64_t b = begin + blockIdx.x; b < end; b += gridDim.x) {
        f(b);
        __syncthreads();
    }
}

/** f(b) for the buckets b in [begin, end), a block each. */
template <class F> static inline cudaError_t peri_each_bucket(int64_t begin, int64_t end, const peri_cuda_call *c, F f)
{
    if (begin >= end) return cudaSuccess;
    return peri_cuda_launch(peri_bucket_kernel<F>, peri_cuda_grid(end - begin, 1, c), PERI_BLOCK, 0, c, f, begin, end);
}

#endif
