/* SPDX-License-Identifier: Apache-2.0
 *
 * cub.cuh: sorts and cumulative sums of the whole device, by NVIDIA's CUB. A thin wrapper: kernels/cuda includes CUB
 * nowhere else, and on tests/cuda_host its twin there takes its place. Each function is called twice: with scratch NULL
 * it sets @bytes and does nothing else.
 */
#ifndef PERI_KERNELS_CUDA_CUB_CUH
#define PERI_KERNELS_CUDA_CUB_CUH

#include "cuda.h"

#if defined(PERI_CUDA_HOST)
#include "cub_host.h"
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

/** Stable sort of @n keys with their values by bits [low, high) of the keys (unsigned order). Inputs stay; outputs do
 *  not alias them. */
template <class K, class V>
static inline cudaError_t peri_sort_pairs(void *scratch, size_t &bytes, const K *keys, K *sorted, const V *values,
                                          V *moved, int64_t n, int low, int high, cudaStream_t stream)
{
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted, values, moved, n, low, high, stream);
}

template <class K>
static inline cudaError_t peri_sort_keys(void *scratch, size_t &bytes, const K *keys, K *sorted, int64_t n, int low,
                                         int high, cudaStream_t stream)
{
    return cub::DeviceRadixSort::SortKeys(scratch, bytes, keys, sorted, n, low, high, stream);
}

/** y[i] = x[0] + ... + x[i-1]; integers, wrapping. y may be x. */
template <class In, class Out>
static inline cudaError_t peri_exclusive_sum(void *scratch, size_t &bytes, const In *x, Out *y, int64_t n,
                                             cudaStream_t stream)
{
    return cub::DeviceScan::ExclusiveSum(scratch, bytes, x, y, n, stream);
}

/** y[i] = x[0] + ... + x[i]. */
template <class In, class Out>
static inline cudaError_t peri_inclusive_sum(void *scratch, size_t &bytes, const In *x, Out *y, int64_t n,
                                             cudaStream_t stream)
{
    return cub::DeviceScan::InclusiveSum(scratch, bytes, x, y, n, stream);
}
#endif

/** Scratch of a sort of @n keys of 64 bits with values of 64 bits, by all bits. */
static inline size_t peri_sort_bytes(int64_t n)
{
    size_t bytes = 0;
    const uint64_t *keys = NULL;
    const int64_t *places = NULL;
    (void)peri_sort_pairs(NULL, bytes, keys, (uint64_t *)NULL, places, (int64_t *)NULL, n, 0, 64, 0);
    return bytes;
}

#endif
