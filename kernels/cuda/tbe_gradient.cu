/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_gradient.cu: kernels/tbe.h: gradients of the ids' weights. Products of rows first, four lanes an item, each with
 * its own part of sum16, eight items of a bag at a time; then each id adds up what the blocks that hold it found, in
 * the order of the blocks. Few blocks hold the ids of one thread block: those are picked first.
 */
#include "tbe.cuh"

namespace {

enum { IDS = 256, VECTORS = 4 };

/** Products of a bag's items, by their places in the list. */
struct multiply_bag {
    peri_k_tbe_weight_gradient_args a;
    float *products;

    /** sum16(gradient * row), by four lanes; both lie at multiples of their vectors if @fast. */
    __device__ float product(const float *grad, int64_t row, int64_t cols, bool fast, int lane, unsigned mask) const
    {
        float s[4] = {0, 0, 0, 0};
        const bool grad_fast = peri_aligned16(grad);
        for (int64_t from = 4 * (lane & 3); from < cols; from += 16 * VECTORS) {
            float x[VECTORS][4], y[VECTORS][4];
            PERI_UNROLL
            for (int v = 0; v < VECTORS; v++) {
                const int64_t d = from + 16 * v;
                peri_load4(grad + d, cols - d, grad_fast, x[v]);
                peri_weight4(a.weight, row + d, cols - d, a.weight_dtype, fast, y[v]);
            }
            PERI_UNROLL
            for (int v = 0; v < VECTORS; v++) {
                PERI_UNROLL
                for (int c = 0; c < 4; c++)
                    if (from + 16 * v + c < cols) s[c] = fmaf(x[v][c], y[v][c], s[c]);
            }
        }
        PERI_UNROLL
        for (int by = 2; by > 0; by--) {
            PERI_UNROLL
            for (int c = 0; c < 4; c++) s[c] += __shfl_xor_sync(mask, s[c], by);
        }
        return (s[0] + s[2]) + (s[1] + s[3]);
    }

    __device__ void operator()(int64_t k, int64_t j, int lane, unsigned) const
    {
        const peri_k_tbe_list *s = &a.list;
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        const int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1);
        const int64_t place = s->spans[k].items - s->spans[k].first_id;
        const unsigned four = 15u << (lane & ~3);
        const float factor = tbe_factor(s, t, b->first_bag + j, past - first);
        const bool fast = peri_aligned16(a.weight) && t->offset % 4 == 0 && t->stride % 4 == 0;
        for (int64_t i = first + lane / 4; i < past; i += 8) {
            const int64_t id = tbe_id(s, i);
            const float *grad = a.grad + b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
            float sum = 0;
            if (id >= 0 && id < t->rows)
                sum = product(grad, t->offset + id * t->stride, t->cols, fast, lane, four) * factor;
            if ((lane & 3) == 0) products[place + i] = sum;
        }
    }
};

struct start_products {
    float *products;
    __device__ void operator()(int64_t i) const { products[i] = 0; }
};

__global__ void __launch_bounds__(IDS) add_products(peri_k_tbe_weight_gradient_args a, const float *products)
{
    PERI_SHARED(int64_t, from, IDS);
    PERI_SHARED(int64_t, past, IDS);
    PERI_SHARED(int64_t, place, IDS);
    PERI_SHARED(int, counts, IDS / 32);
    const peri_k_tbe_list *s = &a.list;
    const int warp = (int)threadIdx.x / 32, lane = peri_lane();
    for (int64_t tile = (int64_t)blockIdx.x * IDS; tile < s->n_ids; tile += (int64_t)gridDim.x * IDS) {
        const int64_t i = tile + threadIdx.x;
        float sum = 0;
        for (int64_t round = 0; round < s->n_blocks; round += IDS) {
            const int64_t k = round + threadIdx.x;
            int64_t first = 0, items = 0;
            if (k < s->n_blocks) first = s->spans[k].first_id, items = tbe_items(s, k);
            const bool mine = items > 0 && first < tile + IDS && first + items > tile;
            const unsigned found = __ballot_sync(0xffffffffu, mine);
            if (lane == 0) counts[warp] = __popc(found);
            __syncthreads();
            int at = __popc(found & ((1u << lane) - 1)), all = 0;
            for (int w = 0; w < IDS / 32; w++) {
                if (w < warp) at += counts[w];
                all += counts[w];
            }
            if (mine) {
                from[at] = first;
                past[at] = first + items;
                place[at] = s->spans[k].items - first;
            }
            __syncthreads();
            for (int b = 0; b < all; b++)
                if (i >= from[b] && i < past[b]) sum += products[place[b] + i];
            __syncthreads();
        }
        if (i < s->n_ids) a.grad_weights[i] = sum;
    }
}

} // namespace

PERI_CUDA_SCRATCH(tbe_weight_gradient) { return 4 * a->list.capacity; }
PERI_CUDA_OP(tbe_weight_gradient)
{
    float *products = (float *)c->scratch;
    if (a->list.n_ids <= 0) return cudaSuccess;
    PERI_CUDA_TRY(each(0, a->list.capacity, c, start_products{products}));
    PERI_CUDA_TRY(peri_each_bag<32>(&a->list, c, multiply_bag{*a, products}));
    return peri_cuda_launch(add_products, peri_cuda_grid(a->list.n_ids, IDS, c), IDS, 0, c, *a,
                            (const float *)products);
}
