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

/** words[w] lane l = word w of counter (first + l, stream). */
static inline void k_philox(uint64_t seed, uint64_t stream, uint64_t first, k_uvec words[4])
{
#if defined(__AVX512F__)
    const k_uvec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    const k_uvec lane = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
    const k_uvec zero = {0};
    k_uvec c0 = lane + (uint32_t)first, c2 = zero + (uint32_t)stream, c3 = zero + (uint32_t)(stream >> 32);
    k_uvec c1 = (uint32_t)(first >> 32) - (k_uvec)(c0 < lane); /* a comparison that holds is -1: the sum went over */
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        k_uvec high0, low0, high1, low1;
        k_multiply(c0, 0xd2511f53u, &high0, &low0);
        k_multiply(c2, 0xcd9e8d57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

/** Of each 128 bits the low (lo) or high (hi) half of a and that of b, by turns of 32 or 64 bits. */
#if defined(__AVX512F__)
#define K_UNPACK(half, bits, a, b) ((k_uvec)_mm512_unpack##half##_epi##bits((__m512i)(a), (__m512i)(b)))
#else
#define K_UNPACK(half, bits, a, b) ((k_uvec)_mm256_unpack##half##_epi##bits((__m256i)(a), (__m256i)(b)))
#endif

/** The words of K_LANES counters from `first` on in their order: words[4 l + w] = word w of counter (first + l,
 *  stream). */
static inline void k_philox_words(uint64_t seed, uint64_t stream, uint64_t first, uint32_t words[4 * K_LANES])
{
    k_uvec w[4];
    k_philox(seed, stream, first, w);
    const k_uvec low01 = K_UNPACK(lo, 32, w[0], w[1]), low23 = K_UNPACK(lo, 32, w[2], w[3]);
    const k_uvec high01 = K_UNPACK(hi, 32, w[0], w[1]), high23 = K_UNPACK(hi, 32, w[2], w[3]);
    /* in each 128 bits the four words of one counter, of the j-th of four */
    const k_uvec x[4] = {K_UNPACK(lo, 64, low01, low23), K_UNPACK(hi, 64, low01, low23),
                         K_UNPACK(lo, 64, high01, high23), K_UNPACK(hi, 64, high01, high23)};
    for (int four = 0; four < K_LANES / 4; four++)
        for (int j = 0; j < 4; j++) memcpy(words + 16 * four + 4 * j, (const char *)&x[j] + 16 * four, 16);
}

#endif
