/* SPDX-License-Identifier: Apache-2.0
 *
 * bags.cu: kernels/bags.h.
 */
#include "cuda.h"
#include "rows.cuh"

#include "../bags.h"

namespace {

/** Bag @b: [*first, the result). */
__device__ __forceinline__ int64_t bag_range(const peri_k_bags &s, int64_t b, int64_t *first)
{
    int64_t from = peri_index(s.offsets, b, s.offsets_dtype), to = peri_index(s.offsets, b + 1, s.offsets_dtype);
    *first = from < 0 ? 0 : from > s.n_ids ? s.n_ids : from;
    return to < *first ? *first : to > s.n_ids ? s.n_ids : to;
}

struct pad_id {
    peri_k_bag_pad_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t id = peri_index(a.ids, i, a.dtype);
        peri_set_index(a.out, i, a.dtype, id == a.padding ? -1 : id);
    }
};

struct scale_bag {
    peri_k_bag_scale_args a;
    __device__ void operator()(int64_t b, int lane, unsigned mask) const
    {
        int64_t first, n = 0, past = bag_range(a.bags, b, &first);
        for (int64_t i = first + lane; i < past; i += 8) n += peri_index(a.bags.ids, i, a.bags.ids_dtype) != a.padding;
        n = peri_group_sum<8>(n, mask);
        if (lane == 0) a.scale[b] = n ? 1 / (float)n : 1.0f;
    }
};

/** Threads have neighbouring columns; each goes through the bag's ids. */
struct max_bag {
    peri_k_bag_max_args a;
    __device__ void operator()(int64_t b, int64_t lane, int64_t lanes) const
    {
        int64_t first, past = bag_range(a.bags, b, &first);
        for (int64_t d = lane; d < a.bags.cols; d += lanes) {
            float most = 0;
            int32_t place = -1;
            for (int64_t i = first; i < past; i++) {
                int64_t id = peri_index(a.bags.ids, i, a.bags.ids_dtype);
                if (id < 0 || id >= a.bags.rows) continue;
                float x = a.x[id * a.bags.cols + d];
                if (place < 0 || (most == most && !(x <= most))) most = x, place = (int32_t)(i - first);
            }
            a.out[b * a.bags.cols + d] = most;
            a.places[b * a.bags.cols + d] = place;
        }
    }
};

/** A thread a column, which adds the bags' gradients in their order. */
struct max_grad_column {
    peri_k_bag_max_grad_args a;
    __device__ void operator()(int64_t d) const
    {
        for (int64_t b = 0; b < a.n; b++) {
            int64_t first, past = bag_range(a.bags, b, &first), i = first + a.places[b * a.bags.cols + d];
            if (i < first || i >= past) continue;
            int64_t id = peri_index(a.bags.ids, i, a.bags.ids_dtype);
            if (id >= 0 && id < a.bags.rows) a.dx[id * a.bags.cols + d] += a.grad[b * a.bags.cols + d];
        }
    }
};

/** A warp a row: its numbers are loaded side by side and added in their order by all lanes. */
struct renorm_row {
    peri_k_bag_renorm_args a;
    __device__ void operator()(int64_t i, int lane, unsigned mask) const
    {
        int64_t id = peri_index(a.ids, i, a.dtype);
        if (id < 0 || id >= a.rows) return; /* all lanes alike */
        float *x = a.x + id * a.cols;
        const bool most = isinf(a.norm_type);
        double sum = 0;
        for (int64_t d = 0; d < a.cols; d += 32) {
            double size = d + lane < a.cols ? fabs((double)x[d + lane]) : 0;
            if (!most) size = a.norm_type == 2 ? size * size : a.norm_type == 1 ? size : pow(size, a.norm_type);
            for (int k = 0; k < 32; k++) {
                double next = __shfl_sync(mask, size, k);
                if (d + k >= a.cols) continue;
                sum = !most ? sum + next : next > sum || next != next ? next : sum;
            }
        }
        double norm = a.norm_type == 2 ? sqrt(sum) : most || a.norm_type == 1 ? sum : pow(sum, 1 / a.norm_type);
        for (int64_t d = lane; d < a.cols && norm > a.max_norm; d += 32)
            x[d] = (float)((double)x[d] * (a.max_norm / (norm + 1e-7)));
    }
};

} // namespace

PERI_CUDA_KERNEL(bag_pad) { return each(begin, end, c, pad_id{*a}); }
PERI_CUDA_KERNEL(bag_scale) { return each_group<8>(begin, end, c, scale_bag{*a}); }
PERI_CUDA_KERNEL(bag_max) { return each_row(begin, end, a->bags.cols, c, max_bag{*a}); }
PERI_CUDA_KERNEL(bag_renorm) { return each_warp(begin, end, c, renorm_row{*a}); }

PERI_CUDA_KERNEL(bag_max_grad)
{
    int64_t last = end * PERI_K_BAG_COLUMNS < a->bags.cols ? end * PERI_K_BAG_COLUMNS : a->bags.cols;
    return each(begin * PERI_K_BAG_COLUMNS, last, c, max_grad_column{*a});
}
