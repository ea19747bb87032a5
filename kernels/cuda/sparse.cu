/* SPDX-License-Identifier: Apache-2.0
 *
 * sparse.cu: kernels/sparse.h, but for sorts (unique.cu) and buckets (buckets.cu).
 */
#include "cuda.h"
#include "rows.cuh"
#include "value.cuh"

#include "../sparse.h"

namespace {

/* -- buckets ------------------------------------------------------------------------------------------------------- */

/** Warps of a block whose counters of buckets fit into its shared memory (48 KiB need no asking); 0: not one. */
int warps_for(int64_t buckets)
{
    int64_t warps = 12288 / (buckets > 0 ? buckets : 1);
    return warps < PERI_WARPS ? (int)warps : PERI_WARPS;
}

/** Counters in shared memory: a warp's own. */
struct counters {
    uint32_t *of;
    int64_t buckets;
    __device__ counters(uint32_t *all, int64_t n) : of(all + threadIdx.x / 32 * n), buckets(n) {}
    __device__ void clear() const
    {
        for (int64_t b = peri_lane(); b < buckets; b += 32) of[b] = 0;
        __syncwarp();
    }
    /** For 32 ids in their order: how many of this lane's bucket (-1: none) came before it; counts them. */
    __device__ uint32_t place(int64_t bucket) const
    {
        unsigned same = __match_any_sync(0xffffffffu, (long long)bucket);
        uint32_t before = bucket >= 0 ? of[bucket] : 0;
        __syncwarp();
        if (bucket >= 0 && (int)(31 - __clz((int)same)) == peri_lane()) of[bucket] = before + (uint32_t)__popc(same);
        __syncwarp();
        return before + (uint32_t)__popc(same & ((1u << peri_lane()) - 1));
    }
};

__global__ void __launch_bounds__(PERI_BLOCK) replay(peri_k_bucketize_replay_args a, int64_t begin, int64_t end)
{
    PERI_SHARED_DYNAMIC(uint32_t, all);
    counters count(all, a.buckets);
    const int64_t warps = peri_grid_threads() / 32;
    for (int64_t bag = begin + peri_grid_thread() / 32; bag < end; bag += warps) {
        count.clear();
        for (int64_t from = a.offsets[bag]; from < a.offsets[bag + 1]; from += 32) {
            int64_t i = from + peri_lane(), bucket = -1, at = -1;
            if (i < a.offsets[bag + 1]) bucket = peri_index(a.mapping, i, a.mapping_dtype);
            if (bucket >= a.buckets) bucket = -1;
            uint32_t place = count.place(bucket < 0 ? -1 : bucket);
            if (bucket >= 0) at = a.cursor[bucket * a.bags + bag] + place;
            if (i < a.offsets[bag + 1]) peri_set_index(a.unbucketize, i, a.out_dtype, at >= 0 && at < a.n ? at : -1);
        }
        __syncwarp(); /* all have read the cursors */
        for (int64_t b = peri_lane(); b < a.buckets; b += 32) a.cursor[b * a.bags + bag] += count.of[b];
        __syncwarp();
    }
}

/* -- indices and permutations -------------------------------------------------------------------------------------- */

struct start_check {
    int64_t *bad, *extent;
    __device__ void operator()(int64_t) const
    {
        if (bad) *bad = INT64_MAX;
        if (extent) extent[0] = INT64_MAX, extent[1] = INT64_MIN;
    }
};

__global__ void __launch_bounds__(PERI_BLOCK) check_indices(peri_op_index_check a)
{
    int64_t bad = INT64_MAX, min = INT64_MAX, max = INT64_MIN;
    for (int64_t i = peri_grid_thread(); i < a.n; i += peri_grid_threads()) {
        int64_t x = peri_index(a.x, i, a.dtype);
        const bool outside = x < 0 || x >= a.limit;
        if (outside && i < bad) bad = i;
        if (a.safe) peri_set_index(a.safe, i, a.dtype, outside ? 0 : x);
        min = x < min ? x : min;
        max = x > max ? x : max;
    }
    bad = peri_group_min<32>(bad, 0xffffffffu);
    min = peri_group_min<32>(min, 0xffffffffu);
    max = peri_group_max<32>(max, 0xffffffffu);
    if (peri_lane() != 0) return;
    if (a.bad && bad != INT64_MAX) peri_atomic_min(a.bad, bad);
    if (!a.extent || min > max) return;
    peri_atomic_min(a.extent, min);
    peri_atomic_max(a.extent + 1, max);
}

struct place_of {
    peri_k_jagged_places_args a;
    __device__ void operator()(int64_t row) const
    {
        if (row >= peri_offset(a.out_offsets, a.out_dtype, a.out_step, a.segments)) return;
        int64_t t = peri_segment_of(a.out_offsets, a.out_dtype, a.out_step, a.segments, row);
        int64_t p = a.permute ? peri_index(a.permute, t, a.permute_dtype) : t;
        int64_t at = row - peri_offset(a.out_offsets, a.out_dtype, a.out_step, t);
        peri_set_index(a.out, row, a.dtype, peri_offset(a.in_offsets, a.in_dtype, a.in_step, p) + at);
    }
};

struct invert_one {
    peri_k_invert_permute_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t p = peri_index(a.permute, i, a.dtype);
        if (p < 0 || p >= a.n) return;
        if (a.dtype == PERI_I32) peri_store_beside((int32_t *)a.inverse + p, (int32_t)i); /* of equal ones, any */
        else peri_store_beside((int64_t *)a.inverse + p, i);
    }
};

/* -- segments ------------------------------------------------------------------------------------------------------ */

/** 16 threads a segment of floats: the partial sums that the header lays down. */
template <class T> struct sum_segment {
    peri_k_segment_sum_args a;
    __device__ void operator()(int64_t s, int lane, unsigned mask) const
    {
        int64_t first = peri_index(a.offsets, s, a.offsets_dtype) * a.step,
                last = peri_index(a.offsets, s + 1, a.offsets_dtype) * a.step;
        T sum = 0;
        for (int64_t i = first + lane; i < last; i += 16) sum += ((const T *)a.values)[i];
        sum = peri_group_sum<16>(sum, mask);
        if (lane == 0) ((T *)a.out)[s] = sum;
    }
};

struct sum_integers {
    peri_k_segment_sum_args a;
    __device__ void operator()(int64_t s, int lane, unsigned mask) const
    {
        int64_t first = peri_index(a.offsets, s, a.offsets_dtype) * a.step,
                last = peri_index(a.offsets, s + 1, a.offsets_dtype) * a.step;
        uint64_t sum = 0;
        for (int64_t i = first + lane; i < last; i += 16) sum += (uint64_t)peri_index(a.values, i, a.dtype);
        sum = peri_group_sum<16>(sum, mask);
        if (lane == 0) peri_set_index(a.out, s, a.dtype, (int64_t)sum);
    }
};

template <class T> struct spread_segment {
    peri_k_segment_spread_args a;
    __device__ void operator()(int64_t s, int lane, unsigned) const
    {
        int64_t first = peri_index(a.offsets, s, a.offsets_dtype) * a.step,
                last = peri_index(a.offsets, s + 1, a.offsets_dtype) * a.step;
        T *out = (T *)a.out, x = ((const T *)a.grad)[s];
        for (int64_t i = lane; s == 0 && i < first; i += 32) out[i] = 0;
        for (int64_t i = first + lane; i < last; i += 32) out[i] = x;
        for (int64_t i = last + lane; s == a.segments - 1 && i < a.n; i += 32) out[i] = 0;
    }
};

/* -- several levels of bags ---------------------------------------------------------------------------------------- */

/** T: of one element's bits, or of several. */
template <class T> struct level_to_dense {
    peri_k_levels_args a;
    T padding;
    __device__ void operator()(int64_t row, int64_t lane, int64_t lanes) const
    {
        int64_t at[PERI_MAX_LEVELS], bag = row, words = a.width / (int64_t)sizeof(T);
        PERI_UNROLL /* so that `at` stays in registers */
        for (int32_t l = PERI_MAX_LEVELS - 1; l >= 0; l--) {
            if (l >= a.levels) continue;
            at[l] = bag % a.max[l];
            bag /= a.max[l];
        }
        bool there = true;
        PERI_UNROLL
        for (int32_t l = 0; l < PERI_MAX_LEVELS; l++) {
            if (l >= a.levels || !there) break;
            int64_t first = peri_index(a.offsets[l], bag, a.offsets_dtype);
            there = at[l] < peri_index(a.offsets[l], bag + 1, a.offsets_dtype) - first;
            bag = first + at[l];
        }
        T *dst = (T *)a.dense + row * words;
        const T *src = (const T *)a.values + bag * words;
        for (int64_t i = lane; i < words; i += lanes) dst[i] = there ? src[i] : padding;
    }
};

template <class T> struct level_from_dense {
    peri_k_levels_args a;
    __device__ void operator()(int64_t row, int64_t lane, int64_t lanes) const
    {
        int64_t bag = row, place = 0, scale = 1;
        bool there = true;
        for (int32_t l = a.levels - 1; l >= 0; l--) {
            int64_t up = peri_segment_of(a.offsets[l], a.offsets_dtype, 0, a.bags[l], bag);
            int64_t at = bag - peri_index(a.offsets[l], up, a.offsets_dtype);
            there = there && at < a.max[l];
            place += at * scale;
            scale *= a.max[l];
            bag = up;
        }
        const char *src = there ? (const char *)a.dense + (bag * scale + place) * a.width : NULL;
        peri_row_copy<T>((char *)a.values + row * a.width, src, a.width / (int64_t)sizeof(T), lane, lanes);
    }
};

template <class T>
cudaError_t to_dense(const peri_k_levels_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    level_to_dense<T> f = {*a, {}};
    peri_repeat(&f.padding, sizeof f.padding, a->padding, a->element);
    return each_row(begin, end, a->width / (int64_t)sizeof(T), c, f);
}

} // namespace

PERI_CUDA_KERNEL(bucketize_replay)
{
    const int warps = warps_for(a->buckets);
    if (begin >= end) return cudaSuccess;
    if (warps == 0) return cudaErrorNotSupported; /* more buckets than counters fit */
    return peri_cuda_launch(replay, peri_cuda_grid(end - begin, warps, c), (unsigned)warps * 32,
                            (size_t)(warps * a->buckets * 4), c, *a, begin, end);
}

PERI_CUDA_SCRATCH(index_check)
{
    (void)a;
    return 0;
}

PERI_CUDA_OP(index_check)
{
    PERI_CUDA_TRY(each(0, 1, c, start_check{a->bad, a->extent}));
    if (a->n == 0) return cudaSuccess;
    return peri_cuda_launch(check_indices, peri_cuda_grid(a->n, 8 * PERI_BLOCK, c, 4), PERI_BLOCK, 0, c, *a);
}

PERI_CUDA_KERNEL(jagged_places) { return a->segments == 0 ? cudaSuccess : each(begin, end, c, place_of{*a}); }
PERI_CUDA_KERNEL(invert_permute) { return each(begin, end, c, invert_one{*a}); }

PERI_CUDA_KERNEL(segment_sum)
{
    if (a->dtype == PERI_I32 || a->dtype == PERI_I64) return each_group<16>(begin, end, c, sum_integers{*a});
    if (a->dtype == PERI_F64) return each_group<16>(begin, end, c, sum_segment<double>{*a});
    return each_group<16>(begin, end, c, sum_segment<float>{*a});
}

PERI_CUDA_KERNEL(segment_spread)
{
    if (a->dtype == PERI_F64) return each_warp(begin, end, c, spread_segment<double>{*a});
    return each_warp(begin, end, c, spread_segment<float>{*a});
}

PERI_CUDA_KERNEL(levels_to_dense)
{
#define TO_DENSE(T) to_dense<T>(a, begin, end, c)
    return PERI_BY_WORD(peri_padded_word(a->width, a->element, a->values, a->dense), TO_DENSE);
}

PERI_CUDA_KERNEL(levels_from_dense)
{
#define FROM_DENSE(T) each_row(begin, end, a->width / (int64_t)sizeof(T), c, level_from_dense<T>{*a})
    return PERI_BY_WORD(peri_row_word(a->width, a->values, a->dense), FROM_DENSE);
}
