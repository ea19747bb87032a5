/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_batch.cu: kernels/tbe.h: the list of a batch, and what is wrong with it. Sums over the blocks of a list, of which
 * there are few, are one thread block's.
 */
#include "tbe.cuh"

namespace {

enum { LISTED = 256 };

/** The sum of @x over threads 0..this of the block, and of all in @all. @room: a word a warp. */
__device__ int64_t block_sum(int64_t x, int64_t *room, int64_t *all)
{
    const int lane = peri_lane(), warp = (int)threadIdx.x / 32;
    PERI_UNROLL
    for (int by = 1; by < 32; by *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, x, by);
        if (lane >= by) x += other;
    }
    if (lane == 31) room[warp] = x;
    __syncthreads();
    int64_t before = 0, total = 0;
    PERI_UNROLL
    for (int w = 0; w < LISTED / 32; w++) {
        if (w < warp) before += room[w];
        total += room[w];
    }
    __syncthreads();
    *all = total;
    return before + x;
}

/** Blocks in tiles of a thread each. What `capacity` cuts: items before a block are the least of the sum of all lengths
 *  and of it. */
__global__ void __launch_bounds__(LISTED) prepare(peri_k_tbe_prepare_args a)
{
    PERI_SHARED(int64_t, room, LISTED / 32);
    peri_next_may_start();
    peri_wait_for_earlier();
    const peri_k_tbe_list *s = &a.list;
    int64_t ids = 0, cost = 0, bags = 0; /* of tiles before */
    for (int64_t tile = 0; tile < s->n_blocks; tile += LISTED) {
        const int64_t k = tile + threadIdx.x;
        int64_t first = 0, length = 0, own_bags = 0, width = 0, all;
        if (k < s->n_blocks) {
            const peri_k_tbe_block *b = &s->blocks[k];
            own_bags = b->bags;
            width = s->tables[b->table].cols + 8;
            first = tbe_clamp(tbe_offset(s, b->first_bag), 0, s->n_ids);
            length = tbe_clamp(tbe_offset(s, b->first_bag + b->bags), first, s->n_ids) - first;
        }
        const int64_t past = ids + block_sum(length, room, &all);
        ids += all;
        const int64_t from = tbe_clamp(past - length, 0, s->capacity), n = tbe_clamp(past, 0, s->capacity) - from;
        const int64_t own = (n + own_bags) * width, after = cost + block_sum(own, room, &all);
        cost += all;
        block_sum(own_bags, room, &all);
        bags += all;
        if (k < s->n_blocks) {
            s->spans[k].first_id = first;
            s->spans[k].items = from;
            s->spans[k].cost = after - own;
        }
    }
    if (threadIdx.x != 0) return;
    const int64_t items = tbe_clamp(ids, 0, s->capacity);
    s->spans[s->n_blocks].first_id = s->n_ids;
    s->spans[s->n_blocks].items = items;
    s->spans[s->n_blocks].cost = cost;
    if (!a.totals) return;
    a.totals[0] += items;
    a.totals[1] += bags;
}

struct check_bag {
    peri_k_tbe_check_args a;
    __device__ void operator()(int64_t k, int64_t j, int lane, unsigned) const
    {
        const peri_k_tbe_list *s = &a.list;
        const int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1);
        peri_tbe_check_bag<8>(s, a.report, k, j, first, past, s->tables[s->blocks[k].table].rows, lane);
    }
};

/** One thread: it has something to do where something is bad only. */
struct describe {
    peri_k_tbe_report_args a;
    __device__ void operator()(int64_t) const { tbe_describe(&a); }
};

struct shift_one {
    peri_k_tbe_shift_args a;
    __device__ void operator()(int64_t i) const
    {
        a.dst[i] = tbe_clamp(peri_index(a.src, i, a.dtype), 0, a.most) + a.add;
    }
};

/** A table in y; the threads in x share its runs. */
__global__ void __launch_bounds__(PERI_BLOCK) run_tables(peri_k_tbe_run_tables_args a, int64_t begin, int64_t end)
{
    for (int64_t t = begin + blockIdx.y; t < end; t += gridDim.y) {
        const int64_t first_row = a.tables[t].first_row;
        int64_t edge[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            int64_t high = *a.runs;
            while (edge[side] < high) {
                const int64_t middle = edge[side] + (high - edge[side]) / 2;
                if (a.run_rows[middle] < first_row + (side ? a.tables[t].rows : 0)) edge[side] = middle + 1;
                else high = middle;
            }
        }
        if (peri_grid_thread() == 0) {
            a.first[t] = edge[0];
            if (t == 0) a.first[a.n_tables] = *a.runs;
        }
        for (int64_t r = edge[0] + peri_grid_thread(); r < edge[1]; r += peri_grid_threads())
            a.rows[r] = a.run_rows[r] - first_row;
    }
}

/** Counters are no less than 0, and as floats in the order of their bits. */
__global__ void __launch_bounds__(PERI_BLOCK) most_counted(peri_k_tbe_most_counted_args a, int64_t begin, int64_t end)
{
    for (int64_t t = begin + blockIdx.y; t < end; t += gridDim.y) {
        const float *counter = a.row_counter + a.tables[t].first_row;
        const int64_t rows = a.tables[t].rows, each = peri_grid_threads();
        float most = 0;
        for (int64_t r = peri_grid_thread(); r < rows; r += each) most = counter[r] > most ? counter[r] : most;
        most = peri_group_max<32>(most, 0xffffffffu);
        if (peri_lane() == 0 && most > 0) atomicMax((int *)&a.max_counter[t], __float_as_int(most));
    }
}

struct start_most {
    float *max_counter;
    __device__ void operator()(int64_t t) const { max_counter[t] = 0; }
};

struct finish_most {
    float *max_counter;
    __device__ void operator()(int64_t t) const { max_counter[t] = 1 + max_counter[t]; }
};

struct mark_one {
    peri_k_tbe_mark_args a;
    __device__ void operator()(int64_t i) const
    {
        uint64_t row = (uint64_t)(a.first + i);
        if (a.touched) {
            if (i < a.first || a.touched[i] == 0) return;
            row = (uint64_t)i;
        } else if (a.sorted) {
            if (i >= *a.n) return;
            row = a.sorted[i] >> a.payload_bits;
            if (row < (uint64_t)a.first) return;
            if (i > 0 && a.sorted[i - 1] >> a.payload_bits == row) return;
        }
        if (row >= (uint64_t)a.total_rows) return;
        const unsigned long long bit = 1ull << row % 64, old = atomicOr((unsigned long long *)&a.bits[row / 64], bit);
        if (!(old & bit) && a.fresh) a.fresh[atomicAdd((unsigned long long *)a.n_fresh, 1ull)] = (int64_t)row;
    }
};

/** The grid of a kernel that works on whole tables: blockIdx.y says which table. A table has several blocks (x) where
 *  one for each table would leave processors idle. */
dim3 tables_grid(int64_t tables, const peri_cuda_call *c)
{
    const int64_t wanted = 8 * c->processors;
    return dim3((unsigned)(tables < wanted ? (wanted + tables - 1) / tables : 1),
                (unsigned)(tables < 65535 ? tables : 65535));
}

} // namespace

PERI_CUDA_SCRATCH(tbe_prepare) { return (void)a, 0; }
PERI_CUDA_OP(tbe_prepare) { return peri_cuda_launch_early(prepare, 1, LISTED, c, *a); }

PERI_CUDA_SCRATCH(tbe_check) { return (void)a, 0; }
PERI_CUDA_OP(tbe_check) { return peri_each_bag<8>(&a->list, c, check_bag{*a}); }

PERI_CUDA_SCRATCH(tbe_report) { return (void)a, 0; }
PERI_CUDA_OP(tbe_report) { return each(0, 1, c, describe{*a}); }

PERI_CUDA_KERNEL(tbe_shift) { return each(begin, end, c, shift_one{*a}); }

PERI_CUDA_KERNEL(tbe_mark) { return each(begin, end, c, mark_one{*a}); }

PERI_CUDA_KERNEL(tbe_run_tables)
{
    if (begin >= end) return cudaSuccess;
    return peri_cuda_launch(run_tables, tables_grid(end - begin, c), PERI_BLOCK, 0, c, *a, begin, end);
}

PERI_CUDA_KERNEL(tbe_most_counted)
{
    if (begin >= end) return cudaSuccess;
    PERI_CUDA_TRY(each(begin, end, c, start_most{a->max_counter}));
    PERI_CUDA_TRY(peri_cuda_launch(most_counted, tables_grid(end - begin, c), PERI_BLOCK, 0, c, *a, begin, end));
    return each(begin, end, c, finish_most{a->max_counter});
}
