/* SPDX-License-Identifier: Apache-2.0
 *
 * route.cuh: which strand an id goes to, and launches over rows and blocks of columns: kernels/route.h.
 */
#ifndef PERI_KERNELS_CUDA_ROUTE_CUH
#define PERI_KERNELS_CUDA_ROUTE_CUH

#include "cuda.h"

#include "../route.h"

/** Id @i of the input. */
static __device__ __forceinline__ int64_t peri_routed_id(const peri_k_routed &in, int64_t i)
{
    return peri_index(in.ids, i, in.ids_i32 ? PERI_I32 : PERI_I64);
}

/** Which part of @p has row (or bucket) @key. */
static __device__ __forceinline__ int32_t peri_route_part(const peri_k_partition *p, const int64_t *bounds, int64_t key)
{
    const int64_t *b = bounds + p->first_bound;
    if (p->block > 0) { /* even parts: a guess, which the boundaries put right */
        int32_t part = (int32_t)((float)key / (float)p->block);
        if (part > p->n_parts - 1) part = p->n_parts - 1;
        while (b[part] > key) part--;
        while (part < p->n_parts - 1 && b[part + 1] <= key) part++;
        return part;
    }
    int32_t low = 0, high = p->n_parts - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (b[middle] <= key) low = middle;
        else high = middle - 1;
    }
    return low;
}

/** An id's strand: its part of the partition; -1: none. */
static __device__ __forceinline__ int32_t peri_route_strand(const peri_k_partition *p, const int64_t *bounds,
                                                            int64_t id)
{
    int64_t key = peri_k_route_key(p, id);
    return key < 0 || key >= p->rows || p->n_parts == 0 ? -1 : peri_route_part(p, bounds, key);
}

template <int LANES, class F>
__global__ void __launch_bounds__(PERI_BLOCK, 4) peri_cells_kernel(F f, int64_t begin, int64_t end, int32_t n)
{
    const int lane = (int)(threadIdx.x % LANES);
    const unsigned mask =
        LANES == 32 ? 0xffffffffu : ((1u << (LANES & 31)) - 1) << ((threadIdx.x & 31) / LANES * LANES);
    for (int32_t o = (int32_t)blockIdx.y; o < n; o += (int32_t)gridDim.y) {
        int64_t from = begin, to = end;
        f.narrow(o, from, to);
        for (int64_t i = from + peri_grid_thread() / LANES; i < to; i += peri_grid_threads() / LANES)
            f(i, o, lane, mask);
    }
}

/** f(i, o, lane, mask) for i in [begin, end) and o in [0, n) by LANES neighbouring threads each. f.narrow(o, from, to)
 *  may leave out of [from, to) what has nothing to do. Blocks: as many as fill the device, for each o a few; four a
 *  multiprocessor leave 64 registers. */
template <int LANES, class F>
static inline cudaError_t peri_each_cell(int64_t begin, int64_t end, int32_t n, const peri_cuda_call *c, F f)
{
    if (begin >= end || n <= 0) return cudaSuccess;
    const int waves = n < 16 ? 64 / n : 4;
    dim3 grid(peri_cuda_grid(end - begin, PERI_BLOCK / LANES, c, waves), (unsigned)(n < 65535 ? n : 65535));
    return peri_cuda_launch(peri_cells_kernel<LANES, F>, grid, PERI_BLOCK, 0, c, f, begin, end, n);
}

#endif
