/* SPDX-License-Identifier: Apache-2.0
 *
 * cub_host.h: the twin of kernels/cuda/cub.cuh on the host: plain loops, run when the stream gets there. They want
 * scratch, and spoil it.
 */
#ifndef PERI_CUDA_HOST_CUB_H
#define PERI_CUDA_HOST_CUB_H

#include "cuda_runtime.h"

#include <algorithm>
#include <vector>

namespace peri_cuda_host {

/** Queue @work; spoil @scratch at its end. False: only the size was asked for. */
template <class F> cudaError_t primitive(void *scratch, size_t &bytes, size_t want, cudaStream_t stream, F work)
{
    if (!scratch) return size(&bytes, want);
    size_t asked = 0;
    cudaError_t error = size(&asked, want); /* the real one asks again, too */
    if (error != cudaSuccess) return error;
    if (bytes < asked) return cudaErrorInvalidValue;
    return task(stream, [=] {
        work();
        memset(scratch, 0xa5, want);
    });
}

template <class K> K digits(K key, int low, int high)
{
    int width = high - low, all = (int)sizeof(K) * 8;
    return width <= 0 ? 0 : width >= all ? key : (K)((key >> low) & (((K)1 << width) - 1));
}

} // namespace peri_cuda_host

template <class K, class V>
static inline cudaError_t peri_sort_pairs(void *scratch, size_t &bytes, const K *keys, K *sorted, const V *values,
                                          V *moved, int64_t n, int low, int high, cudaStream_t stream)
{
    return peri_cuda_host::primitive(scratch, bytes, 64 + (size_t)n * 8, stream, [=] {
        std::vector<int64_t> order((size_t)n);
        for (int64_t i = 0; i < n; i++) order[(size_t)i] = i;
        std::stable_sort(order.begin(), order.end(), [=](int64_t a, int64_t b) {
            return peri_cuda_host::digits(keys[a], low, high) < peri_cuda_host::digits(keys[b], low, high);
        });
        for (int64_t i = 0; i < n; i++) sorted[i] = keys[order[(size_t)i]], moved[i] = values[order[(size_t)i]];
    });
}

template <class K>
static inline cudaError_t peri_sort_keys(void *scratch, size_t &bytes, const K *keys, K *sorted, int64_t n, int low,
                                         int high, cudaStream_t stream)
{
    return peri_cuda_host::primitive(scratch, bytes, 64 + (size_t)n * 8, stream, [=] {
        for (int64_t i = 0; i < n; i++) sorted[i] = keys[i]; /* no memmove: races.cc is told of loads and stores */
        std::stable_sort(sorted, sorted + n, [=](K a, K b) {
            return peri_cuda_host::digits(a, low, high) < peri_cuda_host::digits(b, low, high);
        });
    });
}

template <class In, class Out>
static inline cudaError_t peri_exclusive_sum(void *scratch, size_t &bytes, const In *x, Out *y, int64_t n,
                                             cudaStream_t stream)
{
    return peri_cuda_host::primitive(scratch, bytes, 128, stream, [=] {
        uint64_t sum = 0;
        for (int64_t i = 0; i < n; i++) {
            uint64_t next = sum + (uint64_t)x[i];
            y[i] = (Out)sum;
            sum = next;
        }
    });
}

template <class In, class Out>
static inline cudaError_t peri_inclusive_sum(void *scratch, size_t &bytes, const In *x, Out *y, int64_t n,
                                             cudaStream_t stream)
{
    return peri_cuda_host::primitive(scratch, bytes, 128, stream, [=] {
        uint64_t sum = 0;
        for (int64_t i = 0; i < n; i++) y[i] = (Out)(sum += (uint64_t)x[i]);
    });
}

#endif
