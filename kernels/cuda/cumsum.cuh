/* SPDX-License-Identifier: Apache-2.0
 *
 * cumsum.cuh: cumulative sums of kernels/jagged.h, in three launches: sums of blocks of PERI_JAGGED_BLOCK elements,
 * their sums, the elements; one for a single block. They are not CUB's since the sums of malformed lengths must not
 * wrap.
 */
#ifndef PERI_KERNELS_CUDA_CUMSUM_CUH
#define PERI_KERNELS_CUDA_CUMSUM_CUH

#include "cuda.h"
#include "scan.cuh"

#include "../jagged.h"

/** What the launches of a cumulative sum share. */
struct peri_cumsum_call {
    const void *x;
    void *y;              /* NULL: only what is found */
    int64_t *sums;        /* rows x (blocks + 1); the last of each row becomes the sum of all */
    int64_t *bad, *most;  /* one word each, or NULL */
    int64_t *total;       /* rows, or NULL */
    int64_t rows, cols, blocks, limit;
    int32_t x_dtype, y_dtype, mode;
    __device__ __forceinline__ int64_t load(int64_t i) const { return peri_index(x, i, x_dtype); }
    __device__ __forceinline__ bool wrong(int64_t v) const { return limit >= 0 && (v < 0 || v > limit); }
};

namespace {

enum { SUM_ITEMS = PERI_JAGGED_BLOCK / PERI_BLOCK };

struct set_words {
    int64_t *bad, *most;
    __device__ void operator()(int64_t) const
    {
        if (bad) *bad = INT64_MAX;
        if (most) *most = 0;
    }
};

/** Block @b of row @r as it counts: the thread's elements are PERI_BLOCK apart; 0 where x is wrong or ends. What is
 *  wrong and the longest are reported. All loads are in flight at once. */
__device__ __forceinline__ void load_block(const peri_cumsum_call &s, int64_t r, int64_t b, bool report,
                                           int64_t (&v)[SUM_ITEMS])
{
    const int64_t first = b * PERI_JAGGED_BLOCK + threadIdx.x;
    int64_t bad = INT64_MAX, most = 0;
    PERI_UNROLL
    for (int k = 0; k < SUM_ITEMS; k++) {
        v[k] = 0;
        if (first + k * PERI_BLOCK < s.cols) v[k] = s.load(r * s.cols + first + k * PERI_BLOCK);
    }
    PERI_UNROLL
    for (int k = SUM_ITEMS - 1; k >= 0; k--) {
        most = v[k] > most ? v[k] : most;
        if (!s.wrong(v[k])) continue;
        bad = r * s.cols + first + k * PERI_BLOCK;
        v[k] = 0;
    }
    if (!report) return;
    if (s.bad && bad != INT64_MAX) peri_atomic_min(s.bad, bad);
    if (s.most) {
        most = peri_group_max<32>(most, 0xffffffffu);
        if (peri_lane() == 0 && most > 0) peri_atomic_max(s.most, most);
    }
}

/** y of a block whose elements are @v, the sum of those before it being @before. Elements pass through shared memory,
 *  where a thread has SUM_ITEMS neighbours: one scan of the block serves all. Returns the sum up to its end. */
__device__ __forceinline__ int64_t write_block(const peri_cumsum_call &s, int64_t r, int64_t b, int64_t before,
                                               const int64_t (&v)[SUM_ITEMS])
{
    /* a word of room behind each thread's: no two in one bank */
    PERI_SHARED(int64_t, lined, PERI_JAGGED_BLOCK + PERI_BLOCK);
    const bool complete = s.mode == PERI_CUMSUM_COMPLETE, inclusive = complete || s.mode == PERI_CUMSUM_INCLUSIVE;
    const int64_t width = complete ? s.cols + 1 : s.cols, cap = s.limit >= 0 ? s.limit : INT64_MAX;
    const int own = (int)threadIdx.x * (SUM_ITEMS + 1);
    uint64_t sum = 0;
    int64_t all;
    PERI_UNROLL
    for (int k = 0; k < SUM_ITEMS; k++) {
        const int i = (int)threadIdx.x + k * PERI_BLOCK;
        lined[i + i / SUM_ITEMS] = v[k];
    }
    __syncthreads();
    PERI_UNROLL
    for (int k = 0; k < SUM_ITEMS; k++) sum += (uint64_t)lined[own + k];
    uint64_t next = (uint64_t)before + (uint64_t)peri_block_scan((int64_t)sum, &all) - sum;
    PERI_UNROLL
    for (int k = 0; k < SUM_ITEMS; k++) {
        const uint64_t x = (uint64_t)lined[own + k];
        const int64_t y = (int64_t)(inclusive ? next + x : next);
        next += x;
        lined[own + k] = y > cap ? cap : y;
    }
    __syncthreads();
    if (complete && b == 0 && threadIdx.x == 0) peri_set_index(s.y, r * width, s.y_dtype, 0);
    PERI_UNROLL
    for (int k = 0; k < SUM_ITEMS; k++) {
        const int i = (int)threadIdx.x + k * PERI_BLOCK;
        const int64_t c = b * PERI_JAGGED_BLOCK + i;
        if (c < s.cols) peri_set_index(s.y, r * width + c + complete, s.y_dtype, lined[i + i / SUM_ITEMS]);
    }
    __syncthreads(); /* the next block writes them */
    return (int64_t)((uint64_t)before + (uint64_t)all);
}

/** A block of threads a block of elements. */
__global__ void __launch_bounds__(PERI_BLOCK) sum_blocks(peri_cumsum_call s)
{
    for (int64_t at = blockIdx.x; at < s.rows * s.blocks; at += gridDim.x) {
        const int64_t r = s.rows == 1 ? 0 : at / s.blocks, b = at - r * s.blocks;
        int64_t v[SUM_ITEMS], all;
        uint64_t sum = 0;
        load_block(s, r, b, true, v);
        PERI_UNROLL
        for (int k = 0; k < SUM_ITEMS; k++) sum += (uint64_t)v[k];
        (void)peri_block_scan((int64_t)sum, &all);
        if (threadIdx.x == 0) s.sums[r * (s.blocks + 1) + b] = all;
    }
}

/** A block of threads a row of sums, which become the sums of what is before. A thread has neighbours. */
__global__ void __launch_bounds__(PERI_BLOCK) scan_sums(peri_cumsum_call s)
{
    const int64_t per = (s.blocks + PERI_BLOCK - 1) / PERI_BLOCK, first = threadIdx.x * per;
    const int64_t last = first + per < s.blocks ? first + per : s.blocks;
    for (int64_t r = blockIdx.x; r < s.rows; r += gridDim.x) {
        int64_t *row = s.sums + r * (s.blocks + 1), all;
        uint64_t sum = 0;
        int beyond = 0; /* a block adds less than 2^62: passing 2^63 shows as negative */
        for (int64_t b = first; b < last; b++) sum += (uint64_t)row[b];
        uint64_t before = (uint64_t)peri_block_scan((int64_t)sum, &all) - sum;
        for (int64_t b = first; b < last; b++) {
            const uint64_t own = (uint64_t)row[b];
            row[b] = (int64_t)before;
            before += own;
            beyond |= s.limit >= 0 && (int64_t)before < 0;
        }
        beyond = __syncthreads_or(beyond);
        if (threadIdx.x == 0) row[s.blocks] = all;
        if (threadIdx.x == 0 && s.total) s.total[r] = beyond ? INT64_MAX : all;
    }
}

__global__ void __launch_bounds__(PERI_BLOCK) write_sums(peri_cumsum_call s)
{
    for (int64_t at = blockIdx.x; at < s.rows * s.blocks; at += gridDim.x) {
        const int64_t r = s.rows == 1 ? 0 : at / s.blocks, b = at - r * s.blocks;
        int64_t v[SUM_ITEMS];
        load_block(s, r, b, false, v);
        (void)write_block(s, r, b, s.sums[r * (s.blocks + 1) + b], v);
    }
}

/** All of it for a single block of elements, whose sum cannot be beyond 2^63 if it is checked. */
__global__ void __launch_bounds__(PERI_BLOCK) sum_one_block(peri_cumsum_call s)
{
    int64_t v[SUM_ITEMS], all;
    uint64_t sum = 0;
    if (threadIdx.x == 0) {
        if (s.bad) *s.bad = INT64_MAX;
        if (s.most) *s.most = 0;
    }
    __syncthreads();
    load_block(s, 0, 0, true, v);
    PERI_UNROLL
    for (int k = 0; k < SUM_ITEMS; k++) sum += (uint64_t)v[k];
    (void)peri_block_scan((int64_t)sum, &all);
    if (s.y) (void)write_block(s, 0, 0, 0, v);
    if (threadIdx.x > 0) return;
    s.sums[1] = all;
    if (s.total) *s.total = all;
}

} // namespace

static inline int64_t peri_cumsum_blocks(int64_t n)
{
    return n > PERI_JAGGED_BLOCK ? (n + PERI_JAGGED_BLOCK - 1) / PERI_JAGGED_BLOCK : 1;
}

/** Bytes of `sums`. */
static inline int64_t peri_cumsum_scratch(int64_t rows, int64_t cols)
{
    return 8 * rows * (peri_cumsum_blocks(cols) + 1);
}

static inline cudaError_t peri_cumsum(const peri_cumsum_call &s, const peri_cuda_call *c)
{
    if (s.rows == 1 && s.blocks == 1) return peri_cuda_launch(sum_one_block, 1, PERI_BLOCK, 0, c, s);
    if (s.bad || s.most) PERI_CUDA_TRY(each(0, 1, c, set_words{s.bad, s.most}));
    if (s.rows == 0) return cudaSuccess;
    const unsigned grid = peri_cuda_grid(s.rows * s.blocks, 1, c);
    PERI_CUDA_TRY(peri_cuda_launch(sum_blocks, grid, PERI_BLOCK, 0, c, s));
    PERI_CUDA_TRY(peri_cuda_launch(scan_sums, peri_cuda_grid(s.rows, 1, c), PERI_BLOCK, 0, c, s));
    return s.y ? peri_cuda_launch(write_sums, grid, PERI_BLOCK, 0, c, s) : cudaSuccess;
}

#endif
