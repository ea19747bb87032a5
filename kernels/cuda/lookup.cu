/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.cu: kernels/lookup.h, but for rows that a mask picks (mask.cu).
 */
#include "cub.cuh"
#include "cuda.h"
#include "rows.cuh"
#include "value.cuh"

#include "../lookup.h"
#include "../divide.h"
#include "../spread.h"

namespace {

struct nothing_bad {
    int64_t *bad;
    __device__ void operator()(int64_t) const { *bad = INT64_MAX; }
};

/* -- ids of several tables ----------------------------------------------------------------------------------------- */

struct row_of {
    peri_k_table_rows_args a;
    peri_k_divisor step;
    __device__ void operator()(int64_t i) const
    {
        int64_t bag = peri_segment_of(a.offsets, a.offsets_dtype, 1, a.tables * a.step, i);
        int64_t t = (int64_t)peri_k_quotient((uint64_t)bag, &step);
        int64_t start = peri_index(a.starts, t, a.starts_dtype),
                size = peri_index(a.starts, t + 1, a.starts_dtype) - start;
        int64_t id = peri_index(a.ids, i, a.ids_dtype), out = -1;
        bool whole = a.remap && size == 0, good = id >= 0 && (id < size || whole);
        if (good) out = whole ? id : a.remap ? peri_index(a.remap, start + id, a.remap_dtype) : start + id;
        if (!good && !(a.remap && id == -1)) peri_atomic_min(a.bad, i);
        peri_set_index(a.out, i, a.out_dtype, out);
        if (a.bag) a.bag[i] = bag;
    }
};

/* -- rows of several matrices -------------------------------------------------------------------------------------- */

/** The words (PERI_SELECT_*) of the matrix that holds row @x: the last whose @word, the first row of a matrix among all
 *  of them (PERI_SELECT_ROW) or among those of the result (PERI_SELECT_PLACE), is at most @x. */
__device__ const int64_t *matrix_of(const peri_k_batch_select_args &a, int word, int64_t x)
{
    int64_t low = 0, high = a.matrices;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (a.table[middle * PERI_SELECT_WORDS + word] <= x) low = middle;
        else high = middle;
    }
    return a.table + low * PERI_SELECT_WORDS;
}

/** Where the row of index @k of matrix @m begins in the result. */
__device__ __forceinline__ int64_t place_in_result(const peri_k_batch_select_args &a, const int64_t *m, int64_t k)
{
    return m[PERI_SELECT_TO] + (k - m[PERI_SELECT_PLACE]) * (a.pitch ? a.pitch : m[PERI_SELECT_COLUMNS]);
}

/** T: an element's bits. */
template <class T> struct select_row {
    peri_k_batch_select_args a;
    __device__ void operator()(int64_t k, int lane, unsigned) const
    {
        const int64_t *m = matrix_of(a, PERI_SELECT_PLACE, k);
        const T *from =
            (const T *)a.matrix + m[PERI_SELECT_FROM] + (a.rows[k] - m[PERI_SELECT_ROW]) * m[PERI_SELECT_COLUMNS];
        T *to = (T *)a.result + place_in_result(a, m, k);
        const int64_t words = m[PERI_SELECT_COLUMNS], bytes = words * (int64_t)sizeof(T);
        if (((uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes) % 16 == 0)
            peri_row_copy<uint4>(to, from, bytes / 16, lane, 32);
        else peri_row_copy<T>(to, from, words, lane, 32);
    }
};

template <class T> struct select_sum_row {
    peri_k_batch_select_args a;
    __device__ void operator()(int64_t r, int lane, unsigned) const
    {
        const int64_t *m = matrix_of(a, PERI_SELECT_ROW, r), first = a.list_offsets[r], last = a.list_offsets[r + 1];
        T *to = (T *)a.matrix + m[PERI_SELECT_FROM] + (r - m[PERI_SELECT_ROW]) * m[PERI_SELECT_COLUMNS];
        for (int64_t c = lane; c < m[PERI_SELECT_COLUMNS]; c += 32) {
            T sum = 0;
            for (int64_t j = first; j < last; j++) {
                int64_t k = a.list[j];
                T x = ((const T *)a.result)[place_in_result(a, matrix_of(a, PERI_SELECT_PLACE, k), k) + c];
                sum = j == first ? x : sum + x;
            }
            to[c] = sum;
        }
    }
};

/* -- numbers by id ------------------------------------------------------------------------------------------------- */

/** i = bag * tasks + task. */
template <class T> struct sum_bag {
    peri_k_unary_sum_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t bag = i / a.tasks, task = i - bag * a.tasks, t = bag / a.batch, b = bag - t * a.batch;
        T sum = 0;
        for (int64_t k = peri_index(a.offsets, bag, a.offsets_dtype);
             k < peri_index(a.offsets, bag + 1, a.offsets_dtype); k++)
            sum += ((const T *)a.weight)[task * a.width + a.rows[k]];
        ((T *)a.out)[(task * a.batch + b) * a.tables + t] = sum;
    }
};

/** i = row * tasks + task. */
template <class T> struct sum_bag_back {
    peri_k_unary_sum_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t r = i / a.tasks, task = i - r * a.tasks;
        T sum = 0;
        for (int64_t j = a.list_offsets[r]; j < a.list_offsets[r + 1]; j++) {
            int64_t bag = a.bag[a.list[j]];
            sum += ((const T *)a.out)[(task * a.batch + bag % a.batch) * a.tables + bag / a.batch];
        }
        ((T *)a.weight)[task * a.width + r] = sum;
    }
};

struct keys_of_ids {
    peri_k_weights_by_id_args a;
    uint64_t *keys;
    int64_t *places;
    __device__ void operator()(int64_t i) const
    {
        keys[i] = (uint64_t)peri_index(a.ids, i, a.ids_dtype);
        places[i] = i;
    }
};

/** The first of sorted keys that is not below @x. */
__device__ int64_t first_key(const uint64_t *keys, int64_t n, uint64_t x)
{
    int64_t low = -1, high = n;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (keys[middle] < x) low = middle;
        else high = middle;
    }
    return high;
}

/** The weights of one id in the order of their places, which a stable sort has kept. */
template <class T> struct sum_id {
    peri_k_weights_by_id_args a;
    const uint64_t *keys;
    const int64_t *places;
    __device__ void operator()(int64_t u) const
    {
        int64_t first = first_key(keys, a.n, (uint64_t)u), last = first_key(keys, a.n, (uint64_t)u + 1);
        T sum = 0, count = 0;
        for (int64_t k = first; k < last; k++) sum += ((const T *)a.weights)[places[k]], count += 1;
        ((T *)a.out)[2 * u] = sum;
        ((T *)a.out)[2 * u + 1] = count;
    }
};

struct count_id {
    peri_k_weights_by_id_args a;
    const uint64_t *keys;
    __device__ void operator()(int64_t u) const
    {
        ((int64_t *)a.out)[u] = first_key(keys, a.n, (uint64_t)u + 1) - first_key(keys, a.n, (uint64_t)u);
    }
};

/* -- bags and pruned tables ---------------------------------------------------------------------------------------- */

struct slice_bag {
    peri_k_slice_bounds_args a;
    __device__ void operator()(int64_t b) const
    {
        int64_t first = peri_index(a.offsets, b, a.offsets_dtype),
                members = peri_index(a.offsets, b + 1, a.offsets_dtype) - first;
        int64_t start = peri_index(a.start, b, a.start_dtype), rest = members - start;
        bool good = start >= 0 && start <= members;
        if (!good) peri_atomic_min(a.bad, b);
        a.starts[b] = first + (good ? start : 0);
        peri_set_index(a.lengths, b, a.lengths_dtype, good ? (a.length < rest ? a.length : rest) : 0);
    }
};

struct mark_row {
    peri_k_prune_mark_args a;
    __device__ void operator()(int64_t i) const
    {
        double x = a.indicator[i];
        a.mask[i] = (a.magnitude ? fabs(x) : x) > a.threshold;
    }
};

__device__ uint32_t mix_32(uint32_t h)
{
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

/** Slots of a table, and where an id is, or where it would be put; -1: there is none. */
struct table_slots {
    int64_t first, slots;
    __device__ table_slots(const peri_k_hash_args &a, int64_t t)
        : first(peri_index(a.slots, t, a.slots_dtype)), slots(peri_index(a.slots, t + 1, a.slots_dtype) - first)
    {
    }
    __device__ int64_t probe(const peri_k_hash_args &a, int64_t id) const
    {
        uint64_t hash = a.ids_dtype == PERI_I32 ? mix_32((uint32_t)id) : peri_k_mix((uint64_t)id);
        int64_t slot = (int64_t)(hash % (uint64_t)slots);
        for (int64_t seen = 0; seen < slots; seen++, slot = slot + 1 < slots ? slot + 1 : 0) {
            int64_t found = peri_index(a.pairs, 2 * (first + slot), a.ids_dtype);
            if (found == id || found == -1) return first + slot;
        }
        return -1;
    }
};

/** A thread a table: where an id goes depends on those before it. */
struct insert_table {
    peri_k_hash_args a;
    __device__ void operator()(int64_t t) const
    {
        table_slots s(a, t);
        int64_t i = peri_index(a.offsets, t * a.step, a.offsets_dtype),
                last = peri_index(a.offsets, (t + 1) * a.step, a.offsets_dtype);
        for (; i < last && s.slots > 0; i++) {
            int64_t id = peri_index(a.ids, i, a.ids_dtype), row = peri_index(a.rows, i, a.rows_dtype), slot = -1;
            if (row == -1 && id >= 0) continue;
            if (row >= 0 && id >= 0) slot = s.probe(a, id);
            if (slot < 0) {
                peri_atomic_min(a.bad, i);
                break;
            }
            peri_set_index(a.pairs, 2 * slot, a.ids_dtype, id);
            peri_set_index(a.pairs, 2 * slot + 1, a.ids_dtype, row);
        }
    }
};

struct find_row {
    peri_k_hash_args a;
    peri_k_divisor step;
    __device__ void operator()(int64_t i) const
    {
        const int64_t bag = peri_segment_of(a.offsets, a.offsets_dtype, 1, a.tables * a.step, i);
        table_slots s(a, (int64_t)peri_k_quotient((uint64_t)bag, &step));
        int64_t id = peri_index(a.ids, i, a.ids_dtype), slot = -1, row = -1;
        if (s.slots == 0) row = id;
        else if (id >= 0) slot = s.probe(a, id);
        if (slot >= 0) row = peri_index(a.pairs, 2 * slot + 1, a.ids_dtype);
        peri_set_index(a.rows, i, a.rows_dtype, row);
    }
};

/* -- hashes and calibration ---------------------------------------------------------------------------------------- */

struct hash_one {
    peri_k_murmur_hash3_args a;
    __device__ void operator()(int64_t i) const
    {
        a.out[i] = (int64_t)peri_k_murmur((uint64_t)a.x[i], (uint64_t)(a.y ? a.y[i] : a.y_number),
                                          (uint64_t)(a.seed ? a.seed[i] : a.seed_number));
    }
};

struct calibrate_one {
    peri_k_calibrate_args a;
    __device__ int64_t segment(int64_t i) const
    {
        int64_t first = peri_index(a.segment_ends, i, a.ends_dtype);
        if (peri_index(a.segment_ends, i + 1, a.ends_dtype) - first != 1) return 0;
        int64_t value = peri_index(a.segment_values, first, a.values_dtype);
        return value >= 0 && value < a.segments ? value + 1 : 0;
    }
    __device__ double calibrated(double x, int64_t i, int64_t *bin_at) const
    {
        double width = (a.upper - a.lower) / (double)a.bins, e = exp(-fabs(x)), p = (x < 0 ? e : 1) / (1 + e);
        double place = ceil((p - a.lower) / width) - 1;
        *bin_at = -1;
        if (!(p == p)) return p;
        int64_t bin = place > 0 ? place < (double)(a.bins - 1) ? (int64_t)place : a.bins - 1 : 0;
        if (a.segment_ends) bin += a.bins * segment(i);
        *bin_at = bin;
        if (!(a.examples[bin] > (double)a.in_use_after)) return p;
        return fma(a.weight, a.positives[bin] / a.examples[bin], (1 - a.weight) * p);
    }
    __device__ void operator()(int64_t i) const
    {
        peri_value v = peri_load(a.logit, i, a.dtype);
        v.re = calibrated(v.re + a.shift, i, &a.bin[i]);
        peri_store(a.out, i, a.dtype, v);
    }
};

} // namespace

PERI_CUDA_SCRATCH(table_rows)
{
    (void)a;
    return 0;
}

PERI_CUDA_OP(table_rows)
{
    PERI_CUDA_TRY(each(0, 1, c, nothing_bad{a->bad}));
    return each(0, a->n, c, row_of{*a, peri_k_divisor_of(a->step > 0 ? a->step : 1)});
}

PERI_CUDA_KERNEL(batch_select)
{
#define SELECT(T) each_warp(begin, end, c, select_row<T>{*a})
    return PERI_BY_WORD(a->element, SELECT);
}

PERI_CUDA_KERNEL(batch_select_sum)
{
    if (a->element == 8) return each_warp(begin, end, c, select_sum_row<double>{*a});
    return each_warp(begin, end, c, select_sum_row<float>{*a});
}

PERI_CUDA_KERNEL(unary_sum)
{
    begin *= a->tasks, end *= a->tasks;
    return a->dtype == PERI_F64 ? each(begin, end, c, sum_bag<double>{*a}) : each(begin, end, c, sum_bag<float>{*a});
}

PERI_CUDA_KERNEL(unary_sum_back)
{
    begin *= a->tasks, end *= a->tasks;
    return a->dtype == PERI_F64 ? each(begin, end, c, sum_bag_back<double>{*a})
                                : each(begin, end, c, sum_bag_back<float>{*a});
}

/** Keys, sorted keys, places, sorted places; then CUB's. */
PERI_CUDA_SCRATCH(weights_by_id) { return 4 * peri_part(8 * a->n) + peri_part((int64_t)peri_sort_bytes(a->n)); }

PERI_CUDA_OP(weights_by_id)
{
    int64_t part = peri_part(8 * a->n), *places = (int64_t *)(c->scratch + 2 * part),
            *moved = (int64_t *)(c->scratch + 3 * part);
    uint64_t *keys = (uint64_t *)c->scratch, *sorted = (uint64_t *)(c->scratch + part);
    size_t bytes = (size_t)(c->bytes - 4 * part);
    if (a->n > 0) {
        PERI_CUDA_TRY(each(0, a->n, c, keys_of_ids{*a, keys, places}));
        PERI_CUDA_TRY(peri_sort_pairs(c->scratch + 4 * part, bytes, (const uint64_t *)keys, sorted,
                                      (const int64_t *)places, moved, a->n, 0, 64, c->stream));
    }
    if (!a->weights) return each(0, a->numbers, c, count_id{*a, sorted});
    if (a->dtype == PERI_F64) return each(0, a->numbers, c, sum_id<double>{*a, sorted, moved});
    return each(0, a->numbers, c, sum_id<float>{*a, sorted, moved});
}

PERI_CUDA_SCRATCH(slice_bounds)
{
    (void)a;
    return 0;
}

PERI_CUDA_OP(slice_bounds)
{
    PERI_CUDA_TRY(each(0, 1, c, nothing_bad{a->bad}));
    return each(0, a->bags, c, slice_bag{*a});
}

PERI_CUDA_KERNEL(prune_mark) { return each(begin, end, c, mark_row{*a}); }

PERI_CUDA_SCRATCH(hash_insert)
{
    (void)a;
    return 0;
}

PERI_CUDA_OP(hash_insert)
{
    PERI_CUDA_TRY(each(0, 1, c, nothing_bad{a->bad}));
    return each(0, a->tables, c, insert_table{*a});
}

PERI_CUDA_KERNEL(hash_find) { return each(begin, end, c, find_row{*a, peri_k_divisor_of(a->step > 0 ? a->step : 1)}); }
PERI_CUDA_KERNEL(murmur_hash3) { return each(begin, end, c, hash_one{*a}); }
PERI_CUDA_KERNEL(calibrate) { return each(begin, end, c, calibrate_one{*a}); }
