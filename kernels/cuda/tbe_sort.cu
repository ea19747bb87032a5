/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_sort.cu: kernels/tbe.h: the items of a batch in the order of their rows: keys of all items, 8 lanes a bag, then one radix sort of
 * the whole device by the bits of the rows alone, which is stable. How many items there are is known on the device only: what is beyond
 * them, up to the capacity, sorts behind them.
 */
#include "tbe.cuh"

namespace {

enum { LANES = 8 };

struct keys_of_bag {
    peri_op_tbe_sort a;
    uint64_t *keys;
    __device__ void operator()(int64_t k, int64_t j, int lane, unsigned) const
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
};

/** Every item has one key only where every id of a block is in a bag of it: offsets that run backwards leave some out. */
struct start_keys {
    uint64_t *keys;
    const peri_k_tbe_span *all;
    uint64_t none;
    __device__ void operator()(int64_t i) const { keys[i] = i < all->items ? none : ~(uint64_t)0; }
};

int row_bits(int64_t total_rows)
{
    int bits = 1;
    while (bits < 63 && total_rows >> bits) bits++;
    return bits;
}

size_t sort_bytes(const peri_op_tbe_sort *a)
{
    size_t bytes = 0;
    peri_sort_keys<uint64_t>(NULL, bytes, NULL, NULL, a->list.capacity, a->payload_bits, a->payload_bits + row_bits(a->total_rows), 0);
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
    PERI_CUDA_TRY(each(0, n, c, start_keys{keys, &a->list.spans[a->list.n_blocks], (uint64_t)a->total_rows << a->payload_bits}));
    PERI_CUDA_TRY(peri_each_bag<LANES>(&a->list, c, keys_of_bag{*a, keys}));
    return peri_sort_keys<uint64_t>(c->scratch + peri_part(8 * n), bytes, keys, a->keys, n, a->payload_bits,
                                    a->payload_bits + row_bits(a->total_rows), c->stream);
}
