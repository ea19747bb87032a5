/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged.cu: kernels/jagged.h. Cumulative sums are made in three launches (sums of blocks of PERI_JAGGED_BLOCK elements, their sums, the
 * elements), since the sums of malformed lengths must not wrap; rows are copied by groups of threads in the widest words.
 */
#include "cuda.h"
#include "rows.cuh"
#include "scan.cuh"
#include "value.cuh"

namespace {

/* -- cumulative sums ------------------------------------------------------------------------------------------------------------------ */

/** What the launches of a cumulative sum share. */
struct sums {
    const void *x;
    void *y;
    int64_t *sums;        /* rows x (blocks + 1) */
    int64_t *bad, *most;  /* one word each, or NULL */
    int64_t *total;
    int64_t rows, cols, blocks, limit;
    int32_t x_dtype, y_dtype, mode;
    __device__ __forceinline__ int64_t load(int64_t i) const { return peri_index(x, i, x_dtype); }
    __device__ __forceinline__ bool wrong(int64_t v) const { return limit >= 0 && (v < 0 || v > limit); }
};

struct set_words {
    int64_t *bad, *most;
    __device__ void operator()(int64_t) const
    {
        if (bad) *bad = INT64_MAX;
        if (most) *most = 0;
    }
};

/** A block of threads a block of elements. */
__global__ void __launch_bounds__(PERI_BLOCK) sum_blocks(sums s)
{
    for (int64_t at = blockIdx.x; at < s.rows * s.blocks; at += gridDim.x) {
        int64_t r = at / s.blocks, b = at % s.blocks, first = b * PERI_JAGGED_BLOCK, sum = 0, bad = INT64_MAX, most = 0, all;
        int64_t last = first + PERI_JAGGED_BLOCK < s.cols ? first + PERI_JAGGED_BLOCK : s.cols;
        for (int64_t c = first + threadIdx.x; c < last; c += PERI_BLOCK) {
            int64_t i = r * s.cols + c, v = s.load(i);
            most = v > most ? v : most;
            if (s.wrong(v)) bad = i < bad ? i : bad;
            else sum = (int64_t)((uint64_t)sum + (uint64_t)v);
        }
        (void)peri_block_scan(sum, &all);
        if (threadIdx.x == 0) s.sums[r * (s.blocks + 1) + b] = all;
        if (s.bad && bad != INT64_MAX) peri_atomic_min(s.bad, bad);
        if (s.most) {
            most = peri_group_max<32>(most, 0xffffffffu);
            if (peri_lane() == 0 && most > 0) peri_atomic_max(s.most, most);
        }
    }
}

/** A block of threads a row of sums, which become the sums of what is before. */
__global__ void __launch_bounds__(PERI_BLOCK) scan_sums(sums s)
{
    for (int64_t r = blockIdx.x; r < s.rows; r += gridDim.x) {
        int64_t *row = s.sums + r * (s.blocks + 1), before = 0, all;
        int beyond = 0; /* a block adds less than 2^62: passing 2^63 shows as negative */
        for (int64_t first = 0; first < s.blocks; first += PERI_BLOCK) {
            int64_t b = first + threadIdx.x, own = b < s.blocks ? row[b] : 0;
            int64_t upto = (int64_t)((uint64_t)before + (uint64_t)peri_block_scan(own, &all));
            if (b < s.blocks) row[b] = (int64_t)((uint64_t)upto - (uint64_t)own);
            beyond |= s.limit >= 0 && b < s.blocks && upto < 0;
            before = (int64_t)((uint64_t)before + (uint64_t)all);
        }
        beyond = __syncthreads_or(beyond);
        if (threadIdx.x == 0) row[s.blocks] = before;
        if (threadIdx.x == 0 && s.total) s.total[r] = beyond ? INT64_MAX : before;
    }
}

__global__ void __launch_bounds__(PERI_BLOCK) write_sums(sums s)
{
    const int64_t width = s.mode == PERI_CUMSUM_COMPLETE ? s.cols + 1 : s.cols, cap = s.limit >= 0 ? s.limit : INT64_MAX;
    for (int64_t at = blockIdx.x; at < s.rows * s.blocks; at += gridDim.x) {
        int64_t r = at / s.blocks, b = at % s.blocks, first = b * PERI_JAGGED_BLOCK, all;
        int64_t last = first + PERI_JAGGED_BLOCK < s.cols ? first + PERI_JAGGED_BLOCK : s.cols;
        int64_t before = s.sums[r * (s.blocks + 1) + b];
        if (s.mode == PERI_CUMSUM_COMPLETE && b == 0 && threadIdx.x == 0) peri_set_index(s.y, r * width, s.y_dtype, 0);
        for (int64_t from = first; from < last; from += PERI_BLOCK) {
            int64_t c = from + threadIdx.x, v = c < last ? s.load(r * s.cols + c) : 0;
            if (s.wrong(v)) v = 0;
            int64_t next = (int64_t)((uint64_t)before + (uint64_t)peri_block_scan(v, &all)), sum = next;
            if (s.mode != PERI_CUMSUM_INCLUSIVE && s.mode != PERI_CUMSUM_COMPLETE) sum = (int64_t)((uint64_t)next - (uint64_t)v);
            if (sum > cap) sum = cap;
            if (c < last) peri_set_index(s.y, r * width + c + (s.mode == PERI_CUMSUM_COMPLETE), s.y_dtype, sum);
            before = (int64_t)((uint64_t)before + (uint64_t)all);
        }
    }
}

int64_t blocks_of(int64_t n) { return n > PERI_JAGGED_BLOCK ? (n + PERI_JAGGED_BLOCK - 1) / PERI_JAGGED_BLOCK : 1; }

cudaError_t sum_up(const sums &s, const peri_cuda_call *c)
{
    if (s.bad || s.most) PERI_CUDA_TRY(each(0, 1, c, set_words{s.bad, s.most}));
    if (s.rows == 0) return cudaSuccess;
    unsigned grid = peri_cuda_grid(s.rows * s.blocks, 1, c);
    PERI_CUDA_TRY(peri_cuda_launch(sum_blocks, grid, PERI_BLOCK, 0, c, s));
    PERI_CUDA_TRY(peri_cuda_launch(scan_sums, peri_cuda_grid(s.rows, 1, c), PERI_BLOCK, 0, c, s));
    return s.y ? peri_cuda_launch(write_sums, grid, PERI_BLOCK, 0, c, s) : cudaSuccess;
}

/* -- checks and reports -------------------------------------------------------------------------------------------------------------- */

struct check_bag {
    peri_op_bags_report a;
    int64_t *bad, *most;
    __device__ void operator()(int64_t i) const
    {
        int64_t from = peri_index(a.offsets, i, a.offsets_dtype), to = peri_index(a.offsets, i + 1, a.offsets_dtype), length = to - from;
        bool wrong = from < 0 || to < from || to > a.values;
        if (!wrong && length > 0 && length > *(volatile const int64_t *)most) peri_atomic_max(most, length);
        if (wrong || (a.lengths && peri_index(a.lengths, i, a.lengths_dtype) != length)) peri_atomic_min(bad, i);
    }
};

struct report_words {
    peri_op_bags_report a;
    const int64_t *bad, *most, *total;
    __device__ void operator()(int64_t i) const
    {
        if (i < a.n_bounds) a.report[PERI_REPORT_HEADER + i] = peri_index(a.offsets, a.bounds ? a.bounds[i] : i * a.step, a.offsets_dtype);
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

/* -- bounds, lengths, segments --------------------------------------------------------------------------------------------------------- */

struct bound {
    peri_k_jagged_bounds_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t base = a.rebase ? peri_index(a.offsets, a.bounds ? a.bounds[0] : 0, a.offsets_dtype) : 0;
        peri_set_index(a.out, i, a.out_dtype, peri_index(a.offsets, a.bounds ? a.bounds[i] : i * a.step, a.offsets_dtype) - base);
    }
};

struct length_of {
    peri_k_jagged_lengths_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t p = a.permute ? peri_index(a.permute, i, a.permute_dtype) : i;
        uint64_t from = (uint64_t)peri_index(a.offsets, p, a.offsets_dtype), to = (uint64_t)peri_index(a.offsets, p + 1, a.offsets_dtype);
        peri_set_index(a.out, i, a.out_dtype, (int64_t)(to - from));
    }
};

/** The row of the input that comes to @row; -1: none. */
__device__ __forceinline__ int64_t source_of(const peri_k_jagged_copy_args &a, int64_t row)
{
    if (row >= peri_offset(a.out_offsets, a.out_dtype, a.out_step, a.segments)) return -1;
    int64_t t = peri_segment_of(a.out_offsets, a.out_dtype, a.out_step, a.segments, row);
    int64_t p = a.permute ? peri_index(a.permute, t, a.permute_dtype) : t;
    return peri_offset(a.in_offsets, a.in_dtype, a.in_step, p) + row - peri_offset(a.out_offsets, a.out_dtype, a.out_step, t);
}

/** Rows of one word: a thread has row begin + i and the one @apart of it, which are in flight at once. */
template <class T> struct copy_words {
    peri_k_jagged_copy_args a;
    int64_t begin, end, apart;
    __device__ void operator()(int64_t i) const
    {
        const int64_t row = begin + i, other = row + apart;
        const int64_t from = source_of(a, row), from_other = other < end ? source_of(a, other) : -1;
        T x = {}, y = {};
        if (from >= 0) x = ((const T *)a.src)[from];
        if (from_other >= 0) y = ((const T *)a.src)[from_other];
        if (from >= 0) ((T *)a.dst)[row] = x;
        if (from_other >= 0) ((T *)a.dst)[other] = y;
    }
};

template <class T> struct copy_row {
    peri_k_jagged_copy_args a;
    __device__ void operator()(int64_t row, int64_t lane, int64_t lanes) const
    {
        const int64_t from = source_of(a, row);
        if (from < 0) return;
        peri_row_copy<T>((char *)a.dst + row * a.width, (const char *)a.src + from * a.width, a.width / (int64_t)sizeof(T), lane, lanes);
    }
};

template <class T> cudaError_t copy_rows(const peri_k_jagged_copy_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    const int64_t words = a->width / (int64_t)sizeof(T), pairs = (end - begin + 1) / 2;
    if (words == 1) return each(0, pairs, c, copy_words<T>{*a, begin, end, pairs});
    return each_row(begin, end, words, c, copy_row<T>{*a});
}

/** A thread an element of the result. */
template <class T> struct sum_element {
    peri_k_jagged_sum_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t row = i / a.columns, c = i - row * a.columns, p = peri_segment_of(a.in_offsets, PERI_I64, 1, a.segments, row);
        int64_t at = row - peri_offset(a.in_offsets, PERI_I64, 1, p), first = a.list_offsets[p];
        T sum = 0;
        for (int64_t j = first; j < a.list_offsets[p + 1]; j++) {
            T x = ((const T *)a.src)[(peri_offset(a.out_offsets, PERI_I64, 1, a.list[j]) + at) * a.columns + c];
            sum = j == first ? x : sum + x;
        }
        ((T *)a.dst)[i] = sum;
    }
};

/* -- padded rows --------------------------------------------------------------------------------------------------------------------- */

/** T: of one element's bits, or of several. A warp a bag. */
template <class T> struct pad_bag {
    peri_k_jagged_padded_args a;
    T padding;
    __device__ void operator()(int64_t b, int lane, unsigned) const
    {
        int64_t from = peri_index(a.offsets, b, a.offsets_dtype), n = peri_index(a.offsets, b + 1, a.offsets_dtype) - from;
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
        int64_t from = peri_index(a.offsets, b, a.offsets_dtype), n = peri_index(a.offsets, b + 1, a.offsets_dtype) - from;
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

template <class T> cudaError_t pad(const peri_k_jagged_padded_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    pad_bag<T> f = {*a, {}};
    peri_repeat(&f.padding, sizeof f.padding, a->padding, a->element);
    return each_warp(begin, end, c, f);
}

template <class T> cudaError_t unpad(const peri_k_jagged_padded_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return each_warp(begin, end, c, unpad_bag<T>{*a});
}

/* -- columns ------------------------------------------------------------------------------------------------------------------------- */

/** A warp a row of an item; i = row * n_items + item. T: the element's bits; E: how it is loaded and stored. */
template <class E, class W> struct sum_columns {
    peri_k_columns_sum_args a;
    __device__ void operator()(int64_t i, int lane, unsigned) const
    {
        typedef typename E::type T;
        int64_t row = i / a.n_items;
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

PERI_CUDA_SCRATCH(cumsum) { return 8 * a->rows * (blocks_of(a->cols) + 1); }

PERI_CUDA_OP(cumsum)
{
    return sum_up({a->x, a->y, (int64_t *)c->scratch, a->bad, NULL, a->total, a->rows, a->cols, blocks_of(a->cols), a->limit, a->x_dtype,
                   a->y_dtype, a->mode}, c);
}

/** The bad one and the longest, then sums. */
PERI_CUDA_SCRATCH(bags_report) { return a->look == PERI_BAGS_SOUND ? 0 : 8 * (3 + blocks_of(a->bags)); }

PERI_CUDA_OP(bags_report)
{
    int64_t *bad = a->look == PERI_BAGS_SOUND ? NULL : (int64_t *)c->scratch, *most = bad ? bad + 1 : NULL, *total = NULL;
    if (a->look == PERI_BAGS_LENGTHS) {
        int64_t blocks = blocks_of(a->bags);
        total = bad + 2 + blocks;
        PERI_CUDA_TRY(sum_up({a->lengths, a->sums, bad + 2, bad, most, NULL, 1, a->bags, blocks, a->values, a->lengths_dtype, PERI_I64,
                              PERI_CUMSUM_COMPLETE}, c));
    } else if (bad) {
        PERI_CUDA_TRY(each(0, 1, c, set_words{bad, most}));
        PERI_CUDA_TRY(each(0, a->bags, c, check_bag{*a, bad, most}));
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
    if (a->dtype == PERI_F64) return each(begin * a->columns, end * a->columns, c, sum_element<double>{*a});
    return each(begin * a->columns, end * a->columns, c, sum_element<float>{*a});
}

PERI_CUDA_KERNEL(jagged_to_padded)
{
#define PAD(T) pad<T>(a, begin, end, c)
    return PERI_BY_WORD(peri_padded_word(a->width, a->element, a->values, a->padded), PAD);
}

PERI_CUDA_KERNEL(jagged_from_padded)
{
#define UNPAD(T) unpad<T>(a, begin, end, c)
    return PERI_BY_WORD(peri_padded_word(a->width, a->element, a->values, a->padded), UNPAD);
}

PERI_CUDA_KERNEL(columns_sum)
{
    begin *= a->n_items, end *= a->n_items;
    switch (a->dtype) {
    case PERI_F64: return each_warp(begin, end, c, sum_columns<wide_element, double>{*a});
    case PERI_F16: return each_warp(begin, end, c, sum_columns<peri_f16, float>{*a});
    case PERI_BF16: return each_warp(begin, end, c, sum_columns<peri_bf16, float>{*a});
    default: return each_warp(begin, end, c, sum_columns<peri_f32, float>{*a});
    }
}
