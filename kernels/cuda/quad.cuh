/* SPDX-License-Identifier: Apache-2.0
 *
 * quad.cuh: four neighbouring numbers or bytes at a time, in one access where they are aligned and all there. Rows of
 * bytes have no alignment.
 */
#ifndef PERI_KERNELS_CUDA_QUAD_CUH
#define PERI_KERNELS_CUDA_QUAD_CUH

#include "value.cuh"

/** Numbers [i, i + 4) of x[n] as f32. Those that are not there are @rest. */
template <class T>
static __device__ __forceinline__ float4 peri_load_quad(const typename T::type *x, int64_t i, int64_t n, float rest)
{
    struct alignas(4 * sizeof(typename T::type)) four {
        typename T::type v[4];
    };
    if (i + 4 <= n && (uintptr_t)(x + i) % sizeof(four) == 0) {
        const four f = *(const four *)(x + i);
        return make_float4(T::load(f.v, 0), T::load(f.v, 1), T::load(f.v, 2), T::load(f.v, 3));
    }
    return make_float4(i < n ? T::load(x, i) : rest, i + 1 < n ? T::load(x, i + 1) : rest,
                       i + 2 < n ? T::load(x, i + 2) : rest, i + 3 < n ? T::load(x, i + 3) : rest);
}

/** Numbers [i, i + 4) and [j, j + 4) of x[n]; those that are not there are 0. Where all are, both loads are in flight
 *  at once. */
template <class T>
static __device__ __forceinline__ void peri_load_quads(const typename T::type *x, int64_t i, int64_t j, int64_t n,
                                                       float4 (&v)[2])
{
    struct alignas(4 * sizeof(typename T::type)) four {
        typename T::type v[4];
    };
    if (i + 4 <= n && j + 4 <= n && ((uintptr_t)(x + i) | (uintptr_t)(x + j)) % sizeof(four) == 0) {
        const four f = *(const four *)(x + i), g = *(const four *)(x + j);
        v[0] = make_float4(T::load(f.v, 0), T::load(f.v, 1), T::load(f.v, 2), T::load(f.v, 3));
        v[1] = make_float4(T::load(g.v, 0), T::load(g.v, 1), T::load(g.v, 2), T::load(g.v, 3));
        return;
    }
    v[0] = peri_load_quad<T>(x, i, n, 0);
    v[1] = peri_load_quad<T>(x, j, n, 0);
}

/** The reverse: numbers that are not there are not written. */
template <class T>
static __device__ __forceinline__ void peri_store_quad(typename T::type *x, int64_t i, int64_t n, float4 v)
{
    struct alignas(4 * sizeof(typename T::type)) four {
        typename T::type v[4];
    };
    if (i + 4 <= n && (uintptr_t)(x + i) % sizeof(four) == 0) {
        four f;
        peri_store_two<T>(f.v, 0, v.x, v.y);
        peri_store_two<T>(f.v, 2, v.z, v.w);
        *(four *)(x + i) = f;
        return;
    }
    if (i < n) T::store(x, i, v.x);
    if (i + 1 < n) T::store(x, i + 1, v.y);
    if (i + 2 < n) T::store(x, i + 2, v.z);
    if (i + 3 < n) T::store(x, i + 3, v.w);
}

/** Numbers [i, i + N) of x[n] in one access where they are aligned and all there. */
template <class T, int N>
static __device__ __forceinline__ void peri_store_numbers(typename T::type *x, int64_t i, int64_t n,
                                                          const float (&v)[N])
{
    struct alignas(N * sizeof(typename T::type)) many {
        typename T::type v[N];
    };
    if (i + N <= n && (uintptr_t)(x + i) % sizeof(many) == 0) {
        many f;
        PERI_UNROLL
        for (int k = 0; k < N; k += 2) peri_store_two<T>(f.v, k, v[k], v[k + 1]);
        *(many *)(x + i) = f;
        return;
    }
    PERI_UNROLL
    for (int k = 0; k < N; k++)
        if (i + k < n) T::store(x, i + k, v[k]);
}

/** Bytes p[0..n), n <= 4, the first the lowest; those that are not there are 0. */
static __device__ __forceinline__ uint32_t peri_load_bytes(const uint8_t *p, int64_t n)
{
    if (n >= 4 && (uintptr_t)p % 4 == 0) return *(const uint32_t *)p;
    if (n == 2 && (uintptr_t)p % 2 == 0) return *(const uint16_t *)p;
    uint32_t word = 0;
    PERI_UNROLL
    for (int k = 0; k < 4; k++)
        if (k < n) word |= (uint32_t)p[k] << 8 * k;
    return word;
}

static __device__ __forceinline__ void peri_store_bytes(uint8_t *p, int64_t n, uint32_t word)
{
    if (n >= 4 && (uintptr_t)p % 4 == 0) {
        *(uint32_t *)p = word;
        return;
    }
    if (n == 2 && (uintptr_t)p % 2 == 0) {
        *(uint16_t *)p = (uint16_t)word;
        return;
    }
    PERI_UNROLL
    for (int k = 0; k < 4; k++)
        if (k < n) p[k] = (uint8_t)(word >> 8 * k);
}

/** words[k] = @bytes (8, 4, 2, 1, no more than a W has) bytes from p + k * @step on, which are aligned, while that is
 *  less than @left; else
 *  0. All loads are in flight at once. */
template <class W, int K>
static __device__ __forceinline__ void peri_load_codes(const uint8_t *p, int step, int64_t left, int bytes,
                                                       W (&words)[K])
{
    PERI_UNROLL
    for (int k = 0; k < K; k++) words[k] = 0;
#define PERI_LOAD_WORDS(type) \
    PERI_UNROLL \
    for (int k = 0; k < K; k++) \
        if (k * step < left) words[k] = (W) * (const type *)(p + k * step)
    if (sizeof(W) == 8 && bytes == 8) {
        PERI_LOAD_WORDS(uint64_t);
    } else if (bytes == 4) {
        PERI_LOAD_WORDS(uint32_t);
    } else if (bytes == 2) {
        PERI_LOAD_WORDS(uint16_t);
    } else {
        PERI_LOAD_WORDS(uint8_t);
    }
#undef PERI_LOAD_WORDS
}

/** The same of one word, of whose bytes @left are there, anywhere. */
static __device__ __forceinline__ uint64_t peri_load_code(const uint8_t *p, int64_t left, int bytes)
{
    const int64_t n = left < bytes ? left : bytes;
    const uint64_t low = peri_load_bytes(p, n < 4 ? n : 4);
    return n > 4 ? low | (uint64_t)peri_load_bytes(p + 4, n - 4) << 32 : low;
}

/** An f32 at any byte. */
static __device__ __forceinline__ float peri_load_float(const uint8_t *p)
{
    return __uint_as_float(peri_load_bytes(p, 4));
}
static __device__ __forceinline__ void peri_store_float(uint8_t *p, float x)
{
    peri_store_bytes(p, 4, __float_as_uint(x));
}

#endif
