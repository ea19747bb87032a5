/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_sort.cu: kernels/tbe.h: the items of a batch in the order of their rows: keys of all items, 8 lanes a bag, then
 * one radix sort of the whole device by the bits of the rows alone, which is stable (radix.cuh). How many items there
 * are is known on the device only: what is beyond them, up to the capacity, sorts behind them.
 */
#include "radix.cuh"
#include "tbe.cuh"

namespace {

enum { LANES = 8 };

/** Counts of digits, of one thread block. */
struct digit_counts {
    int *counts; /* [passes][PERI_RADIX], shared */
    __device__ __forceinline__ void add(const peri_radix &r, uint64_t key, int one) const
    {
        for (int pass = 0; pass < r.passes; pass++) atomicAdd(&counts[pass * PERI_RADIX + r.digit(key, pass)], one);
    }
};

/** Write and count the keys of the items of bag j of block k. Of an item that several bags hold, because offsets run
 *  backwards between them, one key is left: there is one bag less that goes back over the item than bags that hold it,
 *  and those take its digits, which are of its row alone, from the counts. */
__device__ __forceinline__ void keys_of_bag(const peri_op_tbe_sort &a, const peri_radix &r, const digit_counts &digits,
                                            int64_t k, int64_t j, int lane)
{
    const peri_k_tbe_list *s = &a.list;
    const peri_k_tbe_block *b = &s->blocks[k];
    const peri_k_tbe_table *t = &s->tables[b->table];
    const int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1),
                  place = s->spans[k].items - s->spans[k].first_id;
    const float factor = tbe_factor(s, t, b->first_bag + j, past - first);
    auto key_of = [&](int64_t i) {
        const int64_t id = tbe_id(s, i);
        return (uint64_t)(id >= 0 && id < t->rows ? t->first_row + id : a.total_rows) << a.payload_bits;
    };
    for (int64_t i = first + lane; i < past; i += LANES) {
        const int64_t p = place + i, grad = b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
        const uint64_t key = key_of(i) | (uint64_t)(a.items ? p : grad);
        r.keys_of(0)[p] = key;
        digits.add(r, key, 1);
        if (!a.items) continue;
        peri_k_tbe_item item = {grad, s->weights ? s->weights[i] * factor : factor, 0};
        a.items[p] = item;
    }
    for (int64_t i = past + lane; i < first; i += LANES) digits.add(r, key_of(i), -1);
}

/** All keys, and how many of them have each digit. Every item has one, since the bags of a block go from its first id
 *  to its last. Behind the items, up to the capacity, are keys that no row has. */
__global__ void __launch_bounds__(PERI_BLOCK, 4) make_keys(peri_op_tbe_sort a, peri_radix r)
{
    PERI_SHARED(int, counts, PERI_RADIX_PASSES * PERI_RADIX);
    const digit_counts digits = {counts};
    const peri_k_tbe_list *s = &a.list;
    const int lane = (int)(threadIdx.x % LANES);
    for (int i = (int)threadIdx.x; i < r.passes * PERI_RADIX; i += PERI_BLOCK) counts[i] = 0;
    __syncthreads();
    for (int64_t k = blockIdx.y; k < s->n_blocks; k += gridDim.y) {
        const int64_t bags = s->blocks[k].bags;
        for (int64_t j = peri_grid_thread() / LANES; j < bags; j += peri_grid_threads() / LANES)
            keys_of_bag(a, r, digits, k, j, lane);
    }
    for (int64_t e = s->spans[s->n_blocks].items + peri_grid_thread(); blockIdx.y == 0 && e < s->capacity;
         e += peri_grid_threads()) {
        r.keys_of(0)[e] = ~(uint64_t)0;
        digits.add(r, ~(uint64_t)0, 1);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < r.passes * PERI_RADIX; i += PERI_BLOCK)
        if (counts[i]) atomicAdd(&r.counts_of(0)[i], (unsigned long long)(long long)counts[i]);
}

/** The grid of make_keys: four blocks a processor at most, since each block adds its counts of digits to the sums of
 *  all blocks by atomics. */
dim3 keys_grid(const peri_k_tbe_list *s, const peri_cuda_call *c)
{
    dim3 grid = peri_bags_grid<LANES>(s);
    const unsigned most = (unsigned)c->processors * 4, rows = grid.y > 0 ? grid.y : 1, y = rows < most ? rows : most,
                   x = most / y;
    return dim3(grid.x < x ? grid.x : x, y);
}

int row_bits(int64_t total_rows)
{
    int bits = 1;
    while (bits < 63 && total_rows >> bits) bits++;
    return bits;
}

peri_radix radix_of(const peri_op_tbe_sort *a)
{
    return peri_radix_of(a->list.capacity, a->payload_bits, row_bits(a->total_rows));
}

} // namespace

PERI_CUDA_SCRATCH(tbe_sort) { return radix_of(a).bytes; }
PERI_CUDA_OP(tbe_sort)
{
    peri_radix r = radix_of(a);
    r.scratch = c->scratch;
    if (r.n <= 0) return cudaSuccess;
    PERI_CUDA_TRY(cudaMemsetAsync(c->scratch, 0, (size_t)r.cleared, c->stream));
    PERI_CUDA_TRY(peri_cuda_launch(make_keys, keys_grid(&a->list, c), PERI_BLOCK, 0, c, *a, r));
    return peri_radix_sort(r, a->keys, c);
}
