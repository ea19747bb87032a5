/* SPDX-License-Identifier: Apache-2.0
 *
 * random.cuh: the generator of kernels/convert.h.
 */
#ifndef PERI_KERNELS_CUDA_RANDOM_CUH
#define PERI_KERNELS_CUDA_RANDOM_CUH

#include "cuda.h"

/** Word @i of the numbers that @seed and @stream begin. */
static __device__ __forceinline__ uint32_t peri_random_word(uint64_t seed, uint64_t stream, uint64_t i)
{
    uint32_t c0 = (uint32_t)(i >> 2), c1 = (uint32_t)(i >> 34), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    PERI_UNROLL
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        uint32_t h0 = __umulhi(0xd2511f53u, c0), l0 = 0xd2511f53u * c0, h1 = __umulhi(0xcd9e8d57u, c2),
                 l1 = 0xcd9e8d57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
    }
    uint32_t low = i & 1 ? c1 : c0, high = i & 1 ? c3 : c2;
    return i & 2 ? high : low;
}

#endif
