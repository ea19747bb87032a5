/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.cuh: rows of bytes, copied by neighbouring threads in the widest words that their addresses allow; and where
 * rows of jagged arrays lie.
 */
#ifndef PERI_KERNELS_CUDA_ROWS_CUH
#define PERI_KERNELS_CUDA_ROWS_CUH

#include "cuda.h"

/** Bytes of the widest word (16, 8, 4, 2, 1) of which rows of @width bytes at all of these addresses are made. */
static inline int32_t peri_row_word(int64_t width, const void *a, const void *b)
{
    uintptr_t bits = (uintptr_t)width | (uintptr_t)a | (uintptr_t)b;
    return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

/** The same where some rows are made of an element of @element bytes again and again: no less than it. */
static inline int32_t peri_padded_word(int64_t width, int64_t element, const void *a, const void *b)
{
    const int32_t word = peri_row_word(width, a, b);
    return word > element ? word : (int32_t)element;
}

/** @to[n] = the bytes of @element again and again. */
static inline void peri_repeat(void *to, size_t n, const void *element, int64_t bytes)
{
    for (size_t i = 0; i < n; i++) ((char *)to)[i] = ((const char *)element)[(int64_t)i % bytes];
}

/** log2 of the threads that share a row of @words words: at most a warp. */
static inline int32_t peri_row_shift(int64_t words)
{
    int32_t shift = 0;
    while (shift < 5 && ((int64_t)1 << shift) < words) shift++;
    return shift;
}

/** f(row, lane, lanes) by 2^shift threads each. */
template <class F> struct peri_by_lanes {
    F f;
    int32_t shift;
    __device__ void operator()(int64_t i) const { f(i >> shift, i & (((int64_t)1 << shift) - 1), (int64_t)1 << shift); }
};

/** f(row, lane, lanes) for rows [begin, end), each by as many threads as @words words keep busy. */
template <class F>
static inline cudaError_t each_row(int64_t begin, int64_t end, int64_t words, const peri_cuda_call *c, F f)
{
    int32_t shift = peri_row_shift(words);
    return each(begin << shift, end << shift, c, peri_by_lanes<F>{f, shift});
}

/** Copy a row of @words words. @src NULL: clear it. */
template <class T>
static __device__ __forceinline__ void peri_row_copy(void *dst, const void *src, int64_t words, int64_t lane,
                                                     int64_t lanes)
{
    for (int64_t i = lane; i < words; i += lanes) {
        T x = {};
        if (src) x = ((const T *)src)[i];
        ((T *)dst)[i] = x;
    }
}

/** Call launch<T>() with the type of words of @bytes bytes. */
#define PERI_BY_WORD(bytes, call)                                                                                      \
    ((bytes) == 16  ? call(uint4)                                                                                      \
     : (bytes) == 8 ? call(uint2)                                                                                      \
     : (bytes) == 4 ? call(uint32_t)                                                                                   \
     : (bytes) == 2 ? call(uint16_t)                                                                                   \
                    : call(uint8_t))

/** Offset t of an array, or of equal steps. */
static __device__ __forceinline__ int64_t peri_offset(const void *offsets, int32_t dtype, int64_t step, int64_t t)
{
    return offsets ? peri_index(offsets, t, dtype) : t * step;
}

/** The last t in [low, high) whose offset is at most @row, which that of @low is. */
static __device__ __forceinline__ int64_t peri_segment_between(const void *offsets, int32_t dtype, int64_t low,
                                                               int64_t high, int64_t row)
{
    while (high - low > 1) {
        int64_t middle = (low + high) >> 1;
        if (peri_index(offsets, middle, dtype) <= row) low = middle;
        else high = middle;
    }
    return low;
}

/** The last t in [0, segments) whose offset is at most @row. */
static __device__ __forceinline__ int64_t peri_segment_of(const void *offsets, int32_t dtype, int64_t step,
                                                          int64_t segments, int64_t row)
{
    return offsets ? peri_segment_between(offsets, dtype, 0, segments, row) : row / step;
}

#endif
