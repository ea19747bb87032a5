/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.cuh: walking a block list of kernels/tbe.h on the device, and four columns at a time between memory and
 * registers.
 *
 * Bags have no search: the grid is two-dimensional, a block of the list in y and its bags in x, and both take turns
 * where the grid is smaller. The host knows the sizes by peri_k_tbe_list's hints only; a block with fewer bags ends at
 * once.
 */
#ifndef PERI_KERNELS_CUDA_TBE_CUH
#define PERI_KERNELS_CUDA_TBE_CUH

#include "value.cuh"

#include "../tbe.h"
#include "../ref/tbe_list.h"
#include "../ref/tbe_round.h"
#include "../ref/tbe_value.h"

/** The kernel of peri_each_bag. Three blocks a multiprocessor: 80 registers a thread, which is what a lookup takes. */
template <int LANES, class F>
__global__ void __launch_bounds__(PERI_BLOCK, 3) peri_bags_kernel(F f, const peri_k_tbe_block *blocks, int64_t n_blocks)
{
    const int lane = (int)(threadIdx.x % LANES);
    const unsigned mask =
        LANES == 32 ? 0xffffffffu : ((1u << (LANES & 31)) - 1) << ((threadIdx.x & 31) / LANES * LANES);
    for (int k = (int)blockIdx.y; k < (int)n_blocks; k += (int)gridDim.y)
        for (int64_t j = peri_grid_thread() / LANES; j < blocks[k].bags; j += peri_grid_threads() / LANES)
            f(k, j, lane, mask);
}

/** Blocks in y, their bags in x. */
template <int LANES> static inline dim3 peri_bags_grid(const peri_k_tbe_list *s)
{
    const int64_t per = PERI_BLOCK / LANES, bags = s->most_bags < s->all_bags ? s->most_bags : s->all_bags;
    const int64_t x = bags < per ? 1 : bags / per + (bags % per != 0);
    return dim3((unsigned)(x < 65536 ? x : 65536), (unsigned)(s->n_blocks < 65535 ? s->n_blocks : 65535));
}

/** f(k, j, lane, mask) for each bag j of each block k, by LANES neighbouring threads. */
template <int LANES, class F>
static inline cudaError_t peri_each_bag(const peri_k_tbe_list *s, const peri_cuda_call *c, F f)
{
    if (s->n_blocks <= 0) return cudaSuccess;
    return peri_cuda_launch(peri_bags_kernel<LANES, F>, peri_bags_grid<LANES>(s), PERI_BLOCK, 0, c, f, s->blocks,
                            s->n_blocks);
}

/** Whether memory at @p can be read and written 16 bytes at a time. */
static __device__ __forceinline__ bool peri_aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

/** x = p[0..3]; of these only @left are there (the others: 0). @fast: all four, and p is aligned. */
static __device__ __forceinline__ void peri_load4(const float *p, int64_t left, bool fast, float (&x)[4])
{
    if (fast && left >= 4) {
        const float4 v = *(const float4 *)p;
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        return;
    }
    PERI_UNROLL
    for (int c = 0; c < 4; c++) x[c] = c < left ? p[c] : 0.0f;
}

static __device__ __forceinline__ void peri_store4(float *p, int64_t left, bool fast, const float (&x)[4])
{
    if (fast && left >= 4) {
        *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
    PERI_UNROLL
    for (int c = 0; c < 4; c++)
        if (c < left) p[c] = x[c];
}

static __device__ __forceinline__ float peri_half_float(unsigned word, bool bf16)
{
    return bf16 ? k_bf16_to_f32((uint16_t)word) : k_f16_to_f32((uint16_t)word);
}

/** The same of weights or outputs of f32, f16 or bf16, from element @at. @fast: the four lie at a multiple of their
 *  size. */
static __device__ __forceinline__ void peri_weight4(const void *w, int64_t at, int64_t left, int32_t dtype, bool fast,
                                                    float (&x)[4])
{
    if (dtype == PERI_F32) return peri_load4((const float *)w + at, left, fast, x);
    const uint16_t *p = (const uint16_t *)w + at;
    const bool bf16 = dtype == PERI_BF16;
    if (fast && left >= 4) {
        const uint2 v = *(const uint2 *)p;
        x[0] = peri_half_float(v.x & 0xffffu, bf16), x[1] = peri_half_float(v.x >> 16, bf16);
        x[2] = peri_half_float(v.y & 0xffffu, bf16), x[3] = peri_half_float(v.y >> 16, bf16);
        return;
    }
    PERI_UNROLL
    for (int c = 0; c < 4; c++) x[c] = c < left ? peri_half_float(p[c], bf16) : 0.0f;
}

/** The table that holds linear row @row (< total_rows): the last one that starts at or before it. */
static __device__ __forceinline__ int64_t peri_tbe_table_of(const peri_k_tbe_table *tables, int64_t n, int64_t row)
{
    int64_t low = 0, high = n;
    while (low + 1 < high) {
        const int64_t middle = low + (high - low) / 2;
        if (tables[middle].first_row <= row) low = middle;
        else high = middle;
    }
    return low;
}

/** Add what is bad in a bag to @report, if anything is: by one lane. */
static __device__ inline void peri_tbe_merge(peri_k_tbe_report *report, const tbe_count &count)
{
    if (count.bad_ids) {
        peri_atomic_add(&report->bad_ids, count.bad_ids);
        peri_atomic_min(&report->first_item, count.first_item);
    }
    if (count.bad_bags) {
        peri_atomic_add(&report->bad_bags, count.bad_bags);
        peri_atomic_min(&report->first_bag, count.first_bag);
    }
}

/** Count what is bad in bag j of block k, whose LANES lanes share its ids [first, past). */
template <int LANES>
static __device__ __forceinline__ void peri_tbe_check_bag(const peri_k_tbe_list *s, peri_k_tbe_report *report,
                                                          int64_t k, int64_t j, int64_t first, int64_t past,
                                                          int64_t rows, int lane)
{
    tbe_count count = {0, 0, 0, 0};
    if (lane == 0) tbe_count_bag(s, k, j, &count);
    for (int64_t i = first + lane; i < past; i += LANES) {
        const int64_t id = tbe_id(s, i);
        if (id < 0 || id >= rows) tbe_count_id(s, k, i, id, &count);
    }
    peri_tbe_merge(report, count);
}

#endif
