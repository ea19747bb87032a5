/* SPDX-License-Identifier: Apache-2.0
 *
 * vector.cuh: numbers of f64, f32, f16 and bf16 by packs of 16 bytes, which one access moves, and matrices that blocks
 * of threads cover pack by pack. What is computed with f16 and bf16 is computed in f32 and rounded when it is stored.
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

/** N neighbouring numbers as they lie in memory, in four words. */
template <class E> struct alignas(16) peri_pack {
    enum { SIZE = (int)sizeof(typename E::type), N = 16 / SIZE };
    uint32_t w[4];
};

/** Number @k of a pack, as it is kept. */
template <class E> static __device__ __forceinline__ typename E::type peri_kept(const peri_pack<E> &pack, int k)
{
    typename E::type x;
    if (peri_pack<E>::SIZE == 8) {
        const uint64_t bits = (uint64_t)pack.w[2 * k + 1] << 32 | pack.w[2 * k];
        memcpy(&x, &bits, sizeof x);
    } else if (peri_pack<E>::SIZE == 4) {
        memcpy(&x, &pack.w[k], sizeof x);
    } else {
        const uint16_t bits = (uint16_t)(pack.w[k / 2] >> 16 * (k % 2));
        memcpy(&x, &bits, sizeof x);
    }
    return x;
}
/** The reverse; numbers are put in from the first to the last. */
template <class E> static __device__ __forceinline__ void peri_keep(peri_pack<E> &pack, int k, typename E::type x)
{
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    if (peri_pack<E>::SIZE == 8) pack.w[2 * k] = (uint32_t)bits, pack.w[2 * k + 1] = (uint32_t)(bits >> 32);
    else if (peri_pack<E>::SIZE == 4) pack.w[k] = (uint32_t)bits;
    else pack.w[k / 2] = k % 2 ? pack.w[k / 2] | (uint32_t)bits << 16 : (uint32_t)bits;
}

/** The first @n numbers at @p, the others 0; @whole: all N are there, and p is aligned to 16 bytes. */
template <class E>
static __device__ __forceinline__ peri_pack<E> peri_load_pack(const typename E::type *p, int n, bool whole)
{
    peri_pack<E> pack;
    if (whole) {
        const uint4 w = *(const uint4 *)p;
        pack.w[0] = w.x, pack.w[1] = w.y, pack.w[2] = w.z, pack.w[3] = w.w;
        return pack;
    }
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++) peri_keep(pack, k, k < n ? p[k] : (typename E::type)0);
    return pack;
}

/** *p = words, in one access: nvcc makes four of a plain assignment whose parts it has computed. */
static __device__ __forceinline__ void peri_store_words(uint4 *p, uint4 words)
{
#if defined(PERI_CUDA_HOST)
    *p = words;
#else
    __stwb(p, words);
#endif
}

template <class E>
static __device__ __forceinline__ void peri_store_pack(typename E::type *p, int n, bool whole, const peri_pack<E> &pack)
{
    if (whole) {
        peri_store_words((uint4 *)p, make_uint4(pack.w[0], pack.w[1], pack.w[2], pack.w[3]));
        return;
    }
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++)
        if (k < n) p[k] = peri_kept(pack, k);
}

/* The numbers of a pack, and back. f16 and bf16 go through the processor's conversions of pairs. */
template <class E>
static __device__ __forceinline__ void peri_unpack(const peri_pack<E> &pack, PERI_COMPUTED(E) (&x)[peri_pack<E>::N])
{
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++) {
        const typename E::type kept = peri_kept(pack, k);
        x[k] = E::load(&kept, 0);
    }
}
template <class E>
static __device__ __forceinline__ peri_pack<E> peri_to_pack(const PERI_COMPUTED(E) (&x)[peri_pack<E>::N])
{
    peri_pack<E> pack;
    PERI_UNROLL
    for (int k = 0; k < peri_pack<E>::N; k++) {
        typename E::type kept;
        E::store(&kept, 0, x[k]);
        peri_keep(pack, k, kept);
    }
    return pack;
}
#if !defined(PERI_CUDA_HOST)
template <> __device__ __forceinline__ void peri_unpack<peri_bf16>(const peri_pack<peri_bf16> &pack, float (&x)[8])
{
    PERI_UNROLL
    for (int k = 0; k < 4; k++)
        x[2 * k] = __uint_as_float(pack.w[k] << 16), x[2 * k + 1] = __uint_as_float(pack.w[k] & 0xffff0000u);
}
template <> __device__ __forceinline__ peri_pack<peri_bf16> peri_to_pack<peri_bf16>(const float (&x)[8])
{
    peri_pack<peri_bf16> pack;
    PERI_UNROLL
    for (int k = 0; k < 4; k++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * k], x[2 * k + 1]);
        memcpy(&pack.w[k], &pair, 4);
    }
    return pack;
}
template <> __device__ __forceinline__ void peri_unpack<peri_f16>(const peri_pack<peri_f16> &pack, float (&x)[8])
{
    PERI_UNROLL
    for (int k = 0; k < 4; k++) {
        __half2 halves;
        memcpy(&halves, &pack.w[k], 4);
        const float2 pair = __half22float2(halves);
        x[2 * k] = pair.x, x[2 * k + 1] = pair.y;
    }
}
template <> __device__ __forceinline__ peri_pack<peri_f16> peri_to_pack<peri_f16>(const float (&x)[8])
{
    peri_pack<peri_f16> pack;
    PERI_UNROLL
    for (int k = 0; k < 4; k++) {
        const __half2 pair = __floats2half2_rn(x[2 * k], x[2 * k + 1]);
        memcpy(&pack.w[k], &pair, 4);
    }
    return pack;
}
#endif

/** A rows x cols matrix under blocks of threads: `wide` threads (a power of two) side by side with a pack of columns
 *  each, and as many below one another as there are left. A block has the rows [64 k, 64 (k + 1)) of its columns: what
 *  is summed by columns is summed over these. */
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
