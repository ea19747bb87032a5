/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_sort.cu: kernels/tbe.h: the items of a batch in the order of their rows: keys of all items, 8 lanes a bag, then one radix sort of
 * the whole device by the bits of the rows alone, which is stable. How many items there are is known on the device only: what is beyond
 * them, up to the capacity, sorts behind them.
 */
#include "tbe.cuh"

namespace {

#if !defined(SORT_LANES)
#define SORT_LANES 8
#endif
enum { LANES = SORT_LANES };

/** keys[p] of the items of bag j of block k. */
__device__ __forceinline__ void keys_of_bag(const peri_op_tbe_sort &a, uint64_t *keys, int64_t k, int64_t j, int lane)
{
    const peri_k_tbe_list *s = &a.list;
    const peri_k_tbe_block *b = &s->blocks[k];
    const peri_k_tbe_table *t = &s->tables[b->table];
    const int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1), place = s->spans[k].items - s->spans[k].first_id;
    const float factor = tbe_factor(s, t, b->first_bag + j, past - first);
    for (int64_t i = first + lane; i < past; i += LANES) {
        const int64_t id = tbe_id(s, i), p = place + i, grad = b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
        const uint64_t row = (uint64_t)(id >= 0 && id < t->rows ? t->first_row + id : a.total_rows);
        keys[p] = row << a.payload_bits | (uint64_t)(a.items ? p : grad);
        if (!a.items) continue;
        peri_k_tbe_item item = {grad, s->weights ? s->weights[i] * factor : factor, 0};
        a.items[p] = item;
    }
}

/** All keys. Every item has one: the bags of a block go from its first id to its last, so each id between lies in one of them, even if
 *  the offsets run backwards on the way. Behind the items, up to the capacity, are keys that no row has. */
__global__ void __launch_bounds__(PERI_BLOCK, 4) make_keys(peri_op_tbe_sort a, uint64_t *keys)
{
    const peri_k_tbe_list *s = &a.list;
    const int lane = (int)(threadIdx.x % LANES);
    for (int64_t k = blockIdx.y; k < s->n_blocks; k += gridDim.y) {
        const int64_t bags = s->blocks[k].bags;
        for (int64_t j = peri_grid_thread() / LANES; j < bags; j += peri_grid_threads() / LANES) keys_of_bag(a, keys, k, j, lane);
    }
    if (blockIdx.y != 0) return;
    for (int64_t e = s->spans[s->n_blocks].items + peri_grid_thread(); e < s->capacity; e += peri_grid_threads()) keys[e] = ~(uint64_t)0;
}

#if !defined(SORT_THREADS)
#define SORT_KEYS peri_sort_keys
#else
template <class K> struct hub {
    using base = cub::detail::radix::policy_hub<K, cub::NullType, unsigned>;
    struct Policy800 : cub::ChainedPolicy<800, Policy800, Policy800> {
        enum { PRIMARY_RADIX_BITS = 7, SINGLE_TILE_RADIX_BITS = 6, SEGMENTED_RADIX_BITS = 6, ONESWEEP = true, ONESWEEP_RADIX_BITS = SORT_BITS };
        using HistogramPolicy = cub::AgentRadixSortHistogramPolicy<128, 16, 1, K, SORT_BITS>;
        using ExclusiveSumPolicy = cub::AgentRadixSortExclusiveSumPolicy<256, SORT_BITS>;
        using OnesweepPolicy = cub::AgentRadixSortOnesweepPolicy<SORT_THREADS, SORT_ITEMS, uint32_t, 1, cub::RADIX_RANK_MATCH_EARLY_COUNTS_ANY,
            cub::BLOCK_SCAN_RAKING_MEMOIZE, cub::RADIX_SORT_STORE_DIRECT, SORT_BITS>;
        using old = typename base::Policy800;
        using ScanPolicy = typename old::ScanPolicy;
        using DownsweepPolicy = typename old::DownsweepPolicy;
        using AltDownsweepPolicy = typename old::AltDownsweepPolicy;
        using UpsweepPolicy = typename old::UpsweepPolicy;
        using AltUpsweepPolicy = typename old::AltUpsweepPolicy;
        using SingleTilePolicy = typename old::SingleTilePolicy;
        using SegmentedPolicy = typename old::SegmentedPolicy;
        using AltSegmentedPolicy = typename old::AltSegmentedPolicy;
    };
    using MaxPolicy = Policy800;
};
template <class K> cudaError_t SORT_KEYS(void *scratch, size_t &bytes, const K *keys, K *sorted, int64_t n, int low, int high, cudaStream_t stream)
{
    cub::DoubleBuffer<K> k(const_cast<K *>(keys), sorted);
    cub::DoubleBuffer<cub::NullType> v;
    return cub::DispatchRadixSort<cub::SortOrder::Ascending, K, cub::NullType, unsigned, cub::detail::identity_decomposer_t, hub<K>>::Dispatch(
        scratch, bytes, k, v, (unsigned)n, low, high, false, stream);
}
#endif

int row_bits(int64_t total_rows)
{
    int bits = 1;
    while (bits < 63 && total_rows >> bits) bits++;
    return bits;
}

size_t sort_bytes(const peri_op_tbe_sort *a)
{
    size_t bytes = 0;
    SORT_KEYS<uint64_t>(NULL, bytes, NULL, NULL, a->list.capacity, a->payload_bits, a->payload_bits + row_bits(a->total_rows), 0);
    return bytes;
}

} // namespace

PERI_CUDA_SCRATCH(tbe_sort) { return peri_part(8 * a->list.capacity) + peri_part((int64_t)sort_bytes(a)); }
PERI_CUDA_OP(tbe_sort)
{
    const int64_t n = a->list.capacity;
    uint64_t *keys = (uint64_t *)c->scratch;
    size_t bytes = sort_bytes(a);
    if (n <= 0) return cudaSuccess;
    PERI_CUDA_TRY(peri_cuda_launch(make_keys, peri_bags_grid<LANES>(&a->list), PERI_BLOCK, 0, c, *a, keys));
    return SORT_KEYS<uint64_t>(c->scratch + peri_part(8 * n), bytes, keys, a->keys, n, a->payload_bits,
                                    a->payload_bits + row_bits(a->total_rows), c->stream);
}
