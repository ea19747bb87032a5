/* SPDX-License-Identifier: Apache-2.0
 *
 * mask.cu: rows that a mask picks (kernels/lookup.h). Blocks of PERI_JAGGED_BLOCK rows are counted, CUB sums the
 * counts, and a block of threads numbers the rows of each; then its warps copy them.
 */
#include "cub.cuh"
#include "cuda.h"
#include "rows.cuh"
#include "scan.cuh"

#include "../jagged.h"
#include "../lookup.h"

namespace {

int64_t blocks_of(int64_t n) { return n > PERI_JAGGED_BLOCK ? (n + PERI_JAGGED_BLOCK - 1) / PERI_JAGGED_BLOCK : 1; }

/** sums[b] = picked rows of block b; one more entry of 0, which becomes the sum of all. */
__global__ void __launch_bounds__(PERI_BLOCK) count_blocks(peri_k_mask_args a, int64_t blocks)
{
    for (int64_t b = blockIdx.x; b <= blocks; b += gridDim.x) {
        int64_t sum = 0;
        for (int64_t k = 0; k < PERI_JAGGED_BLOCK; k += PERI_BLOCK) {
            int64_t i = b * PERI_JAGGED_BLOCK + k + threadIdx.x;
            sum += __syncthreads_count(b < blocks && i < a.n && a.mask[i] != 0);
        }
        if (threadIdx.x == 0) a.sums[b] = sum;
    }
}

enum { PICK, SPREAD, PLACES };

/** T: words of rows. */
template <int WHAT, class T> __global__ void __launch_bounds__(PERI_BLOCK) move_rows(peri_k_mask_args a, int64_t blocks)
{
    PERI_SHARED(int64_t, places, PERI_BLOCK);
    const int64_t words = a.width / (int64_t)sizeof(T);
    for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
        int64_t before = a.sums[b], all;
        for (int64_t k = 0; k < PERI_JAGGED_BLOCK && b * PERI_JAGGED_BLOCK + k < a.n; k += PERI_BLOCK) {
            int64_t first = b * PERI_JAGGED_BLOCK + k, i = first + threadIdx.x;
            bool picked = i < a.n && a.mask[i] != 0;
            int64_t upto = peri_block_scan(picked, &all); /* called here by all threads, whether their row is picked or
                                                             not */
            int64_t place = picked ? before + upto - 1 : -1;
            before += all;
            if (WHAT == PLACES) {
                if (i < a.n) peri_set_index(a.places, i, a.places_dtype, place);
                continue;
            }
            places[threadIdx.x] = place;
            __syncthreads();
            for (int64_t r = threadIdx.x / 32; r < PERI_BLOCK && first + r < a.n; r += PERI_WARPS) {
                T *row = (T *)a.all + (first + r) * words, *kept = (T *)a.kept + places[r] * words;
                if (WHAT == PICK && places[r] >= 0) peri_row_copy<T>(kept, row, words, peri_lane(), 32);
                if (WHAT == SPREAD) peri_row_copy<T>(row, places[r] >= 0 ? kept : (T *)NULL, words, peri_lane(), 32);
            }
            __syncthreads();
        }
    }
}

struct give_total {
    const int64_t *sum;
    int64_t *total;
    __device__ void operator()(int64_t) const { *total = *sum; }
};

struct count_bag {
    peri_k_mask_args a;
    __device__ void operator()(int64_t b, int lane, unsigned mask) const
    {
        int64_t last = peri_index(a.offsets, b + 1, a.offsets_dtype), sum = 0;
        for (int64_t i = peri_index(a.offsets, b, a.offsets_dtype) + lane; i < last; i += 8) sum += a.mask[i] != 0;
        sum = peri_group_sum<8>(sum, mask);
        if (lane == 0) peri_set_index(a.lengths, b, a.lengths_dtype, sum);
    }
};

size_t sum_bytes(int64_t n)
{
    size_t bytes = 0;
    const int64_t *x = NULL;
    (void)peri_exclusive_sum(NULL, bytes, x, (int64_t *)NULL, n, 0);
    return bytes;
}

int64_t scratch_of(const peri_k_mask_args *a)
{
    int64_t n = blocks_of(a->n) + 1;
    return peri_part(8 * n) + peri_part((int64_t)sum_bytes(n));
}

/** sums become those of what is before each block. */
cudaError_t number(peri_k_mask_args *a, const peri_cuda_call *c)
{
    int64_t blocks = blocks_of(a->n), part = peri_part(8 * (blocks + 1));
    size_t bytes = (size_t)(c->bytes - part);
    a->sums = (int64_t *)c->scratch;
    PERI_CUDA_TRY(peri_cuda_launch(count_blocks, peri_cuda_grid(blocks + 1, 1, c), PERI_BLOCK, 0, c, *a, blocks));
    return peri_exclusive_sum(c->scratch + part, bytes, (const int64_t *)a->sums, a->sums, blocks + 1, c->stream);
}

template <int WHAT, class T> cudaError_t moved(const peri_k_mask_args *given, const peri_cuda_call *c)
{
    peri_k_mask_args a = *given;
    PERI_CUDA_TRY(number(&a, c));
    return peri_cuda_launch(move_rows<WHAT, T>, peri_cuda_grid(blocks_of(a.n), 1, c), PERI_BLOCK, 0, c, a,
                            blocks_of(a.n));
}

} // namespace

PERI_CUDA_SCRATCH(mask_count) { return scratch_of(a); }
PERI_CUDA_SCRATCH(mask_pick) { return scratch_of(a); }
PERI_CUDA_SCRATCH(mask_spread) { return scratch_of(a); }
PERI_CUDA_SCRATCH(mask_places) { return scratch_of(a); }

PERI_CUDA_OP(mask_count)
{
    peri_k_mask_args copy = *a;
    PERI_CUDA_TRY(number(&copy, c));
    return each(0, 1, c, give_total{copy.sums + blocks_of(a->n), a->total});
}

PERI_CUDA_OP(mask_pick)
{
#define PICK_BY(T) moved<PICK, T>(a, c)
    return PERI_BY_WORD(peri_row_word(a->width, a->all, a->kept), PICK_BY);
}

PERI_CUDA_OP(mask_spread)
{
#define SPREAD_BY(T) moved<SPREAD, T>(a, c)
    return PERI_BY_WORD(peri_row_word(a->width, a->all, a->kept), SPREAD_BY);
}

PERI_CUDA_OP(mask_places) { return moved<PLACES, uint8_t>(a, c); }
PERI_CUDA_KERNEL(mask_lengths) { return each_group<8>(begin, end, c, count_bag{*a}); }
