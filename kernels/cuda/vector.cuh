/* SPDX-License-Identifier: Apache-2.0
 *
 * vector.cuh: numbers of f64, f32, f16 and bf16 by packs of 16 bytes, which one access moves, and matrices that blocks of threads cover
 * pack by pack. What is computed with f16 and bf16 is computed in f32 and rounded when it is stored.
 */
#ifndef PERI_KERNELS_CUDA_VECTOR_CUH
#define PERI_KERNELS_CUDA_VECTOR_CUH

#include "value.cuh"

#if !defined(PERI_CUDA_HOST)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

struct peri_f64 {
    typedef double type;
    static __device__ __forceinline__ double load(const double *p, int64_t i) { return p[i]; }
    static __device__ __forceinline__ void store(double *p, int64_t i, double x) { p[i] = x; }
};

/** The type in which numbers of E are computed. */
template <class E> struct peri_computed {
    typedef float type;
};
template <> struct peri_computed<peri_f64> {
    typedef double type;
};
#define PERI_COMPUTED(E) typename peri_computed<E>::type

/** N neighbouring numbers as they lie in memory. */
template <class E> struct alignas(16) peri_pack {
    enum { N = 16 / (int)sizeof(typename E::type) };
    typename E::type v[N];
};

/** The first @n numbers at @p, the others 0; @whole: all N are there, and p is aligned to 16 bytes. */
template <class E> static __device__ __forceinline__ peri_pack<E> peri_load_pack(const typename E::type *p, int n, bool whole)
{
    if (whole) return *(const peri_pack<E> *)p;
    peri_pack<E> pack;
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++) pack.v[k] = k < n ? p[k] : (typename E::type)0;
    return pack;
}

template <class E> static __device__ __forceinline__ void peri_store_pack(typename E::type *p, int n, bool whole, const peri_pack<E> &pack)
{
    if (whole) {
        *(peri_pack<E> *)p = pack;
        return;
    }
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++)
        if (k < n) p[k] = pack.v[k];
}

/* The numbers of a pack, and back. f16 and bf16 go through the processor's conversions of pairs. */
template <class E> static __device__ __forceinline__ void peri_unpack(const peri_pack<E> &pack, PERI_COMPUTED(E) (&x)[peri_pack<E>::N])
{
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++) x[k] = E::load(pack.v, k);
}
template <class E> static __device__ __forceinline__ peri_pack<E> peri_to_pack(const PERI_COMPUTED(E) (&x)[peri_pack<E>::N])
{
    peri_pack<E> pack;
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++) E::store(pack.v, k, x[k]);
    return pack;
}

#if !defined(PERI_CUDA_HOST)
template <> __device__ __forceinline__ void peri_unpack<peri_bf16>(const peri_pack<peri_bf16> &pack, float (&x)[8])
{
    const uint4 &w = *(const uint4 *)&pack;
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    PERI_UNROLL
    for (int k = 0; k < 4; k++) x[2 * k] = __uint_as_float(words[k] << 16), x[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
}
template <> __device__ __forceinline__ peri_pack<peri_bf16> peri_to_pack<peri_bf16>(const float (&x)[8])
{
    peri_pack<peri_bf16> pack;
    PERI_UNROLL
    for (int k = 0; k < 4; k++) ((__nv_bfloat162 *)&pack)[k] = __floats2bfloat162_rn(x[2 * k], x[2 * k + 1]);
    return pack;
}
template <> __device__ __forceinline__ void peri_unpack<peri_f16>(const peri_pack<peri_f16> &pack, float (&x)[8])
{
    PERI_UNROLL
    for (int k = 0; k < 4; k++) {
        const float2 pair = __half22float2(((const __half2 *)&pack)[k]);
        x[2 * k] = pair.x, x[2 * k + 1] = pair.y;
    }
}
template <> __device__ __forceinline__ peri_pack<peri_f16> peri_to_pack<peri_f16>(const float (&x)[8])
{
    peri_pack<peri_f16> pack;
    PERI_UNROLL
    for (int k = 0; k < 4; k++) ((__half2 *)&pack)[k] = __floats2half2_rn(x[2 * k], x[2 * k + 1]);
    return pack;
}
#endif

/** A rows x cols matrix under blocks of threads: `wide` threads (a power of two) side by side with a pack of columns each, and as many
 *  below one another as there are left. A block has the rows [64 k, 64 (k + 1)) of its columns: what is summed by columns is summed over
 *  these. */
struct peri_tiles {
    int64_t rows, cols;
    int wide, shift; /* wide = 2^shift */
    bool whole;      /* rows of whole packs, all of them aligned */
    unsigned across; /* blocks side by side */
};

/** @bits: all addresses and steps between rows, in bytes. */
template <class E> static inline peri_tiles peri_tiles_of(int64_t rows, int64_t cols, uint64_t bits)
{
    const int n = peri_pack<E>::N;
    int64_t packs = (cols + n - 1) / n;
    peri_tiles t = {rows, cols, 4, 2, cols % n == 0 && bits % 16 == 0, 0};
    while (t.wide < 32 && t.wide < packs) t.wide *= 2, t.shift++;
    t.across = (unsigned)((packs + t.wide - 1) / t.wide);
    return t;
}

#endif
