/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged.cu: kernels/jagged.h. Rows are copied in the widest words that their addresses allow.
 */
#include "cuda.h"
#include "cumsum.cuh"
#include "rows.cuh"
#include "scan.cuh"
#include "value.cuh"

#include "../divide.h"

namespace {

/* -- checks and reports -------------------------------------------------------------------------------------------- */

/** A block has CHECKED bags at a time, all of whose offsets are under way at once; what it finds goes out by one atomic
 *  operation each. */
enum { CHECKED = 4 };

__global__ void __launch_bounds__(PERI_BLOCK) check_bags(peri_op_bags_report a, int64_t *bad, int64_t *most)
{
    int64_t first = INT64_MAX, longest = 0;
    for (int64_t block = blockIdx.x; block * (CHECKED * PERI_BLOCK) + threadIdx.x < a.bags; block += gridDim.x) {
        const int64_t at = block * (CHECKED * PERI_BLOCK) + threadIdx.x;
        int64_t from[CHECKED], to[CHECKED], length[CHECKED];
        PERI_UNROLL
        for (int k = 0; k < CHECKED; k++) {
            const int64_t i = at + k * PERI_BLOCK < a.bags ? at + k * PERI_BLOCK : at;
            from[k] = peri_index(a.offsets, i, a.offsets_dtype);
            to[k] = peri_index(a.offsets, i + 1, a.offsets_dtype);
            length[k] = a.lengths ? peri_index(a.lengths, i, a.lengths_dtype) : to[k] - from[k];
        }
        PERI_UNROLL
        for (int k = 0; k < CHECKED; k++) {
            const int64_t i = at + k * PERI_BLOCK < a.bags ? at + k * PERI_BLOCK : at;
            const bool wrong = from[k] < 0 || to[k] < from[k] || to[k] > a.values;
            if (!wrong && to[k] - from[k] > longest) longest = to[k] - from[k];
            if ((wrong || length[k] != to[k] - from[k]) && i < first) first = i;
        }
    }
    first = peri_block_combine(first, [](int64_t x, int64_t y) { return x < y ? x : y; });
    longest = peri_block_combine(longest, [](int64_t x, int64_t y) { return x > y ? x : y; });
    if (threadIdx.x > 0) return;
    if (first != INT64_MAX) peri_atomic_min(bad, first);
    if (longest > 0) peri_atomic_max(most, longest);
}

struct report_words {
    peri_op_bags_report a;
    const int64_t *bad, *most, *total;
    __device__ void operator()(int64_t i) const
    {
        if (i < a.n_bounds)
            a.report[PERI_REPORT_HEADER + i] =
                peri_index(a.offsets, a.bounds ? a.bounds[i] : i * a.step, a.offsets_dtype);
        if (i > 0) return;
        int64_t first = bad ? *bad : INT64_MAX;
        bool any = first != INT64_MAX;
        a.report[PERI_REPORT_BAD] = any ? first : -1;
        a.report[PERI_REPORT_LENGTH] = any && a.lengths ? peri_index(a.lengths, first, a.lengths_dtype) : 0;
        a.report[PERI_REPORT_BEGIN] = any ? peri_index(a.offsets, first, a.offsets_dtype) : 0;
        a.report[PERI_REPORT_END] = any ? peri_index(a.offsets, first + 1, a.offsets_dtype) : 0;
        a.report[PERI_REPORT_FIRST] = peri_index(a.offsets, 0, a.offsets_dtype);
        a.report[PERI_REPORT_TOTAL] = total ? *total : peri_index(a.offsets, a.bags, a.offsets_dtype);
        a.report[PERI_REPORT_MOST] = most ? *most : 0;
    }
};

/** Given offsets as they are, or zeros if anything is wrong with them. */
struct safe_offset {
    peri_op_bags_report a;
    const int64_t *bad;
    __device__ void operator()(int64_t i) const
    {
        const bool sound = *bad == INT64_MAX && peri_index(a.offsets, 0, a.offsets_dtype) == 0 &&
                           peri_index(a.offsets, a.bags, a.offsets_dtype) == a.values;
        a.sums[i] = sound ? peri_index(a.offsets, i, a.offsets_dtype) : 0;
    }
};

/* -- bounds, lengths, segments ------------------------------------------------------------------------------------- */

struct bound {
    peri_k_jagged_bounds_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t base = a.rebase ? peri_index(a.offsets, a.bounds ? a.bounds[0] : 0, a.offsets_dtype) : 0;
        peri_set_index(a.out, i, a.out_dtype,
                       peri_index(a.offsets, a.bounds ? a.bounds[i] : i * a.step, a.offsets_dtype) - base);
    }
};

struct length_of {
    peri_k_jagged_lengths_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t p = a.permute ? peri_index(a.permute, i, a.permute_dtype) : i;
        uint64_t from = (uint64_t)peri_index(a.offsets, p, a.offsets_dtype),
                 to = (uint64_t)peri_index(a.offsets, p + 1, a.offsets_dtype);
        peri_set_index(a.out, i, a.out_dtype, (int64_t)(to - from));
    }
};

/** How many words a thread copies at once: 64 bytes, 8 words at most. */
template <class T> struct at_once {
    enum { WORDS = sizeof(T) < 8 ? 8 : 64 / (int)sizeof(T) };
};

/** Where the words of a copy come from. */
struct word_source {
    const peri_k_jagged_copy_args &a;
    const peri_k_divisor &words, &step; /* words of a row, rows of a segment of the result where it has no offsets */
    /** How much further segment @t lies in the source, in words. */
    __device__ __forceinline__ int64_t shift(int64_t t) const
    {
        const int64_t p = a.permute ? peri_index(a.permute, t, a.permute_dtype) : t;
        const int64_t from = peri_offset(a.in_offsets, a.in_dtype, a.in_step, p);
        return (from - peri_offset(a.out_offsets, a.out_dtype, a.out_step, t)) * (int64_t)words.by;
    }
    __device__ __forceinline__ int64_t row(int64_t word) const
    {
        return (int64_t)peri_k_quotient((uint64_t)word, &words);
    }
    /** Of word @i, in one of the segments [low, high]. */
    __device__ __forceinline__ int64_t one(int64_t i, int64_t low, int64_t high) const
    {
        const int64_t r = row(i);
        if (a.out_offsets) return i + shift(peri_segment_between(a.out_offsets, a.out_dtype, low, high + 1, r));
        return i + shift((int64_t)peri_k_quotient((uint64_t)r, &step));
    }
    /** Of words first + 32 k + lane (but of none from @stop on) in segments [low, high], at most 32: a lane finds out
     *  about one, and all ask each other. */
    template <int ITEMS>
    __device__ __forceinline__ void few(int64_t first, int64_t stop, int64_t low, int64_t high,
                                        int64_t (&from)[ITEMS]) const
    {
        const int64_t t = low + peri_lane() < high ? low + peri_lane() : high, base = row(first), by = shift(t);
        const int64_t start = peri_index(a.out_offsets, t, a.out_dtype) - base;
        const int begin = start < 0 ? 0 : (int)start, last = (int)(high - low);
        PERI_UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const int64_t i = first + k * 32 + peri_lane() < stop ? first + k * 32 + peri_lane() : first;
            const int at = (int)(row(i) - base);
            int segment = 0;
            PERI_UNROLL
            for (int more = 16; more > 0; more /= 2) {
                const int next = __shfl_sync(0xffffffffu, begin, segment + more);
                if (segment + more <= last && next <= at) segment += more;
            }
            from[k] = i + __shfl_sync(0xffffffffu, by, segment);
        }
    }
};

/** Words of rows [begin, end), a run of neighbours a warp, whatever the length of rows and of segments. The segments of
 *  a run are found by its first and last word: in a long segment it is a plain copy, in short ones each word looks
 *  among those few. */
template <class T>
__global__ void __launch_bounds__(PERI_BLOCK)
    copy_words(const PERI_GRID_CONSTANT peri_k_jagged_copy_args a, const PERI_GRID_CONSTANT peri_k_divisor words,
               const PERI_GRID_CONSTANT peri_k_divisor step, int64_t begin, int64_t end)
{
    enum { ITEMS = at_once<T>::WORDS, RUN = 32 * ITEMS };
    const word_source source = {a, words, step};
    const T *src = (const T *)a.src;
    T *dst = (T *)a.dst;
    const int64_t all = peri_offset(a.out_offsets, a.out_dtype, a.out_step, a.segments) * (int64_t)words.by;
    if (end > all) end = all;
    for (int64_t first = begin + peri_grid_thread() / 32 * RUN; first < end; first += peri_grid_threads() / 32 * RUN) {
        const int64_t stop = first + RUN < end ? first + RUN : end;
        int64_t low = 0, high = INT64_MAX, from[ITEMS];
        T x[ITEMS];
        if (a.out_offsets) { /* the odd lanes search the last word's, the even ones the first one's */
            const int64_t row = source.row(peri_lane() & 1 ? stop - 1 : first);
            const int64_t t = peri_segment_of(a.out_offsets, a.out_dtype, 0, a.segments, row);
            low = __shfl_sync(0xffffffffu, t, 0);
            high = __shfl_sync(0xffffffffu, t, 1);
        }
        if (low == high) {
            const int64_t by = source.shift(low);
            PERI_UNROLL
            for (int k = 0; k < ITEMS; k++) from[k] = first + k * 32 + peri_lane() + by;
        } else if (high - low < 32) {
            source.few<ITEMS>(first, stop, low, high, from);
        } else {
            PERI_UNROLL
            for (int k = 0; k < ITEMS; k++)
                from[k] =
                    source.one(first + k * 32 + peri_lane() < stop ? first + k * 32 + peri_lane() : first, low, high);
        }
        PERI_UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (first + k * 32 + peri_lane() < stop) x[k] = src[from[k]];
        PERI_UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (first + k * 32 + peri_lane() < stop) dst[first + k * 32 + peri_lane()] = x[k];
    }
}

template <class T>
cudaError_t copy_rows(const peri_k_jagged_copy_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    const int64_t words = a->width / (int64_t)sizeof(T);
    if (begin >= end) return cudaSuccess;
    const unsigned grid = peri_cuda_grid((end - begin) * words, PERI_BLOCK * (int)at_once<T>::WORDS, c);
    return peri_cuda_launch(copy_words<T>, grid, PERI_BLOCK, 0, c, *a, peri_k_divisor_of(words),
                            peri_k_divisor_of(a->out_step > 0 ? a->out_step : 1), begin * words, end * words);
}

/** A thread an element of the result. */
template <class T> struct sum_element {
    peri_k_jagged_sum_args a;
    peri_k_divisor columns;
    __device__ void operator()(int64_t i) const
    {
        const int64_t row = (int64_t)peri_k_quotient((uint64_t)i, &columns), c = i - row * a.columns;
        const int64_t p = peri_segment_of(a.in_offsets, PERI_I64, 1, a.segments, row);
        int64_t at = row - peri_offset(a.in_offsets, PERI_I64, 1, p), first = a.list_offsets[p];
        T sum = 0;
        for (int64_t j = first; j < a.list_offsets[p + 1]; j++) {
            T x = ((const T *)a.src)[(peri_offset(a.out_offsets, PERI_I64, 1, a.list[j]) + at) * a.columns + c];
            sum = j == first ? x : sum + x;
        }
        ((T *)a.dst)[i] = sum;
    }
};

/* -- padded rows --------------------------------------------------------------------------------------------------- */

/** T: of one element's bits, or of several. A warp a bag. */
template <class T> struct pad_bag {
    peri_k_jagged_padded_args a;
    T padding;
    __device__ void operator()(int64_t b, int lane, unsigned) const
    {
        int64_t from = peri_index(a.offsets, b, a.offsets_dtype),
                n = peri_index(a.offsets, b + 1, a.offsets_dtype) - from;
        int64_t of = a.width / (int64_t)sizeof(T), kept = (n < a.max ? n : a.max) * of;
        const T *src = (const T *)a.values + from * of;
        T *dst = (T *)a.padded + b * a.max * of;
        for (int64_t i = lane; i < a.max * of; i += 32) dst[i] = i < kept ? src[i] : padding;
    }
};

template <class T> struct unpad_bag {
    peri_k_jagged_padded_args a;
    __device__ void operator()(int64_t b, int lane, unsigned) const
    {
        int64_t from = peri_index(a.offsets, b, a.offsets_dtype),
                n = peri_index(a.offsets, b + 1, a.offsets_dtype) - from;
        int64_t of = a.width / (int64_t)sizeof(T), kept = (n < a.max ? n : a.max) * of;
        const T *src = (const T *)a.padded + b * a.max * of;
        T *dst = (T *)a.values + from * of;
        for (int64_t i = lane; i < n * of; i += 32) {
            T x = {};
            if (i < kept) x = src[i];
            dst[i] = x;
        }
    }
};

template <class T>
cudaError_t pad_rows(const peri_k_jagged_padded_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    pad_bag<T> f = {*a, {}};
    peri_repeat(&f.padding, sizeof f.padding, a->padding, a->element);
    return each_warp(begin, end, c, f);
}

template <class T>
cudaError_t unpad_rows(const peri_k_jagged_padded_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return each_warp(begin, end, c, unpad_bag<T>{*a});
}

/* -- columns ------------------------------------------------------------------------------------------------------- */

/** A warp a row of an item; i = row * n_items + item. T: the element's bits; E: how it is loaded and stored. */
template <class E, class W> struct sum_columns {
    peri_k_columns_sum_args a;
    peri_k_divisor items;
    __device__ void operator()(int64_t i, int lane, unsigned) const
    {
        typedef typename E::type T;
        int64_t row = (int64_t)peri_k_quotient((uint64_t)i, &items);
        const int64_t *item = a.items + (i - row * a.n_items) * PERI_ITEM_WORDS;
        const int64_t *source = a.sources + item[PERI_ITEM_FIRST] * PERI_SOURCE_WORDS, n = item[PERI_ITEM_SOURCES];
        T *dst = (T *)(intptr_t)item[PERI_ITEM_DST] + row * item[PERI_ITEM_STRIDE];
        for (int64_t c = lane; c < item[PERI_ITEM_COLUMNS]; c += 32) {
            W sum = 0;
            for (int64_t s = 0; s < n; s++) {
                const T *src = (const T *)(intptr_t)source[s * PERI_SOURCE_WORDS + PERI_SOURCE_ADDRESS] +
                               row * source[s * PERI_SOURCE_WORDS + PERI_SOURCE_STRIDE];
                if (n == 1) dst[c] = src[c];
                else sum = s ? sum + (W)E::load(src, c) : (W)E::load(src, c);
            }
            if (n != 1) E::store(dst, c, sum);
        }
    }
};

struct wide_element {
    typedef double type;
    static __device__ __forceinline__ double load(const double *p, int64_t i) { return p[i]; }
    static __device__ __forceinline__ void store(double *p, int64_t i, double x) { p[i] = x; }
};

} // namespace

PERI_CUDA_SCRATCH(cumsum) { return peri_cumsum_scratch(a->rows, a->cols); }

PERI_CUDA_OP(cumsum)
{
    return peri_cumsum({a->x, a->y, (int64_t *)c->scratch, a->bad, NULL, a->total, a->rows, a->cols,
                        peri_cumsum_blocks(a->cols), a->limit, a->x_dtype, a->y_dtype, a->mode},
                       c);
}

/** The bad one and the longest, then sums. */
PERI_CUDA_SCRATCH(bags_report) { return a->look == PERI_BAGS_SOUND ? 0 : 8 * (3 + peri_cumsum_blocks(a->bags)); }

PERI_CUDA_OP(bags_report)
{
    int64_t *bad = a->look == PERI_BAGS_SOUND ? NULL : (int64_t *)c->scratch, *most = bad ? bad + 1 : NULL,
            *total = NULL;
    if (a->look == PERI_BAGS_LENGTHS) {
        int64_t blocks = peri_cumsum_blocks(a->bags);
        total = bad + 2 + blocks;
        PERI_CUDA_TRY(peri_cumsum({a->lengths, a->sums, bad + 2, bad, most, NULL, 1, a->bags, blocks, a->values,
                                   a->lengths_dtype, PERI_I64, PERI_CUMSUM_COMPLETE},
                                  c));
    } else if (bad) {
        PERI_CUDA_TRY(each(0, 1, c, set_words{bad, most}));
        if (a->bags > 0)
            PERI_CUDA_TRY(peri_cuda_launch(check_bags, peri_cuda_grid(a->bags, CHECKED * PERI_BLOCK, c), PERI_BLOCK, 0,
                                           c, *a, bad, most));
        if (a->sums) PERI_CUDA_TRY(each(0, a->bags + 1, c, safe_offset{*a, bad}));
    }
    return each(0, a->n_bounds > 0 ? a->n_bounds : 1, c, report_words{*a, bad, most, total});
}

PERI_CUDA_KERNEL(jagged_bounds) { return each(begin, end, c, bound{*a}); }
PERI_CUDA_KERNEL(jagged_lengths) { return each(begin, end, c, length_of{*a}); }

PERI_CUDA_KERNEL(jagged_copy)
{
    if (a->segments == 0 || a->width == 0) return cudaSuccess;
    int32_t word = peri_row_word(a->width, a->dst, a->src);
#define COPY(T) copy_rows<T>(a, begin, end, c)
    return PERI_BY_WORD(word, COPY);
}

PERI_CUDA_KERNEL(jagged_sum)
{
    if (a->columns == 0) return cudaSuccess;
    const peri_k_divisor columns = peri_k_divisor_of(a->columns);
    if (a->dtype == PERI_F64) return each(begin * a->columns, end * a->columns, c, sum_element<double>{*a, columns});
    return each(begin * a->columns, end * a->columns, c, sum_element<float>{*a, columns});
}

PERI_CUDA_KERNEL(jagged_to_padded)
{
#define PAD(T) pad_rows<T>(a, begin, end, c)
    return PERI_BY_WORD(peri_padded_word(a->width, a->element, a->values, a->padded), PAD);
}

PERI_CUDA_KERNEL(jagged_from_padded)
{
#define UNPAD(T) unpad_rows<T>(a, begin, end, c)
    return PERI_BY_WORD(peri_padded_word(a->width, a->element, a->values, a->padded), UNPAD);
}

PERI_CUDA_KERNEL(columns_sum)
{
    if (a->n_items == 0) return cudaSuccess;
    const peri_k_divisor items = peri_k_divisor_of(a->n_items);
    begin *= a->n_items, end *= a->n_items;
    switch (a->dtype) {
    case PERI_F64: return each_warp(begin, end, c, sum_columns<wide_element, double>{*a, items});
    case PERI_F16: return each_warp(begin, end, c, sum_columns<peri_f16, float>{*a, items});
    case PERI_BF16: return each_warp(begin, end, c, sum_columns<peri_bf16, float>{*a, items});
    default: return each_warp(begin, end, c, sum_columns<peri_f32, float>{*a, items});
    }
}
