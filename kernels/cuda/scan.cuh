/* SPDX-License-Identifier: Apache-2.0
 *
 * scan.cuh: sums over the threads of a block of PERI_BLOCK.
 */
#ifndef PERI_KERNELS_CUDA_SCAN_CUH
#define PERI_KERNELS_CUDA_SCAN_CUH

#include "cuda.h"

/** The sum of x over this thread and those before it, modulo 2^64; *all gets the sum over the block. All threads call
 *  it. */
static __device__ __forceinline__ int64_t peri_block_scan(int64_t x, int64_t *all)
{
    PERI_SHARED(int64_t, sums, PERI_WARPS);
    const int lane = peri_lane(), warp = (int)(threadIdx.x / 32);
    uint64_t sum = (uint64_t)x;
    PERI_UNROLL
    for (int by = 1; by < 32; by *= 2) {
        uint64_t before = __shfl_up_sync(0xffffffffu, sum, (unsigned)by);
        if (lane >= by) sum += before;
    }
    if (lane == 31) sums[warp] = (int64_t)sum;
    __syncthreads();
    uint64_t before = 0, total = 0;
    PERI_UNROLL
    for (int w = 0; w < PERI_WARPS; w++) {
        if (w < warp) before += (uint64_t)sums[w];
        total += (uint64_t)sums[w];
    }
    __syncthreads(); /* the next call writes them */
    *all = (int64_t)total;
    return (int64_t)(before + sum);
}

/** x of all threads of the block, combined by op(a, b) as a tree whose shape is fixed; in all of them. All threads call
 *  it. */
template <class T, class F> static __device__ __forceinline__ T peri_block_combine(T x, F op)
{
    PERI_SHARED(T, parts, PERI_WARPS);
    PERI_UNROLL
    for (int by = 16; by > 0; by /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, by));
    if (peri_lane() == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    PERI_UNROLL
    for (int w = 1; w < PERI_WARPS; w++) x = op(x, parts[w]);
    __syncthreads(); /* the next call writes them */
    return x;
}

#endif
