/* SPDX-License-Identifier: Apache-2.0
 *
 * philox.h: the counter-based generator of kernels/convert.h for K_LANES counters at once.
 */
#ifndef PERI_KERNELS_PHILOX_H
#define PERI_KERNELS_PHILOX_H

#include "simd.h"

/** High and low words of the products x * m of all lanes. */
static inline void k_multiply(k_uvec x, uint32_t m, k_uvec *high, k_uvec *low)
{
#if defined(__AVX512F__)
    __m512i factor = _mm512_set1_epi64(m), even = _mm512_mul_epu32((__m512i)x, factor);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), factor);
    *high = (k_uvec)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
    __m256i factor = _mm256_set1_epi64x(m), even = _mm256_mul_epu32((__m256i)x, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), factor);
    *high = (k_uvec)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#endif
    *low = x * m;
}

/** words[4 l + w] = word w of counter (first + l, stream), for l < K_LANES. */
static inline void k_philox(uint64_t seed, uint64_t stream, uint64_t first, uint32_t words[4 * K_LANES])
{
    k_uvec c0, c1, c2 = (k_uvec){0} + (uint32_t)stream, c3 = (k_uvec){0} + (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int l = 0; l < K_LANES; l++) {
        c0[l] = (uint32_t)(first + (uint64_t)l);
        c1[l] = (uint32_t)((first + (uint64_t)l) >> 32);
    }
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        k_uvec high0, low0, high1, low1;
        k_multiply(c0, 0xd2511f53u, &high0, &low0);
        k_multiply(c2, 0xcd9e8d57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
    }
    for (int l = 0; l < K_LANES; l++) {
        words[4 * l] = c0[l];
        words[4 * l + 1] = c1[l];
        words[4 * l + 2] = c2[l];
        words[4 * l + 3] = c3[l];
    }
}

#endif
