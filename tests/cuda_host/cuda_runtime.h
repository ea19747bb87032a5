/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_runtime.h: stands in for NVIDIA's header of this name where no GPU is: what CUDA C adds to C++, so that
 * kernels/cuda compiles for the host unchanged. The blocks of a grid run one by one, the threads of a block as
 * coroutines of one thread (threads.cc), which change at barriers, at warp operations and, now and then, at atomic
 * ones. A thread that a barrier or a mask misses, and one that is not expected, is an error in words.
 *
 * Numbers (shuffles, votes, matches, atomics, intrinsics) mean what the CUDA C++ Programming Guide says of them.
 */
#ifndef PERI_CUDA_HOST_RUNTIME_H
#define PERI_CUDA_HOST_RUNTIME_H

#include "cuda_runtime_api.h"

#include <math.h>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace peri_cuda_host {

/** Where the running thread is. */
struct place {
    uint3 thread, block;
    dim3 threads, blocks;
};
extern place *here;

enum kind { SYNC, SHFL, BALLOT, MATCH, ADD, MIN, MAX, AND, OR, XOR };

#if defined(__OPTIMIZE__)
static constexpr bool PLACES = false; /* calls may be copied and merged: an address is not a place in the source */
#else
static constexpr bool PLACES = true;
#endif
/** A meeting of the lanes of @mask: each brings @value (and the lane whose value it wants), and gets the outcome.
 *  @places: all of them must come from one place in the code. */
uint64_t meet(kind k, unsigned mask, uint64_t value, int source, bool places = PLACES);
/** The barrier of the block; tells everybody how many brought something but 0. */
int barrier_count(int predicate, bool places = PLACES);
/** Somebody else may run here. */
void interrupt();
/** The running thread changes @p by an atomic operation. */
void touch_atomic(const void *p, size_t bytes);
/** It loads @p, or stores it, beside those who do. */
void touch_beside(const void *p, size_t bytes);
void touch_store(const void *p, size_t bytes);
#if defined(__SANITIZE_THREAD__)
#define PERI_CUDA_HOST_APART __attribute__((no_sanitize_thread, noinline)) /* races.cc is told in another way */
#else
#define PERI_CUDA_HOST_APART
#endif
/** An array of shared memory in the source. */
struct slot {
    uint64_t block; /* which one it was made for last */
    void *at, *place;
};
/** It in the running block. */
void *shared(slot *s, size_t bytes, size_t align);
void *dynamic_shared();

/** A kernel and its arguments, which are copied with it. */
struct call {
    std::shared_ptr<void> kept;
    size_t bytes;
    void (*run)(const void *kept); /* by each thread */
};
/** So many bytes, copied: a function of all kernels, since what make_shared() makes of each took half of the compiler's
 *  time. */
std::shared_ptr<void> copied(const void *from, size_t bytes, size_t align);
template <class F> call call_of(F f)
{
    static_assert(std::is_trivially_copyable<F>::value, "arguments of kernels are copied as bytes");
    return {copied(&f, sizeof f, alignof(F)), sizeof f, [](const void *kept) { (*(const F *)kept)(); }};
}

/** Queue something that the device does, its memory open. */
cudaError_t task(cudaStream_t stream, std::function<void()> work);
/** @bytes: how much scratch CUB wants on the current device, where @want is its least. */
cudaError_t size(size_t *bytes, size_t want);
/** @kernel: its address. */
cudaError_t launch(const void *kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream, call work);

cudaError_t allow_shared(const void *kernel, int bytes);

template <class T> PERI_CUDA_HOST_APART T load_beside(const T *p)
{
    touch_beside(p, sizeof *p);
    return *p;
}

template <class T> PERI_CUDA_HOST_APART void store_beside(T *p, T x)
{
    touch_store(p, sizeof *p);
    *p = x;
}

template <class T> uint64_t word(T x)
{
    static_assert(sizeof(T) <= 8, "warp operations take up to 64 bits");
    uint64_t w = 0;
    memcpy(&w, &x, sizeof x);
    return w;
}
template <class T> T from(uint64_t w)
{
    T x;
    memcpy(&x, &w, sizeof x);
    return x;
}
inline int lane()
{
    return (int)((here->thread.x + here->threads.x * (here->thread.y + here->threads.y * here->thread.z)) & 31);
}

} // namespace peri_cuda_host

#define threadIdx (peri_cuda_host::here->thread)
#define blockIdx (peri_cuda_host::here->block)
#define blockDim (peri_cuda_host::here->threads)
#define gridDim (peri_cuda_host::here->blocks)
static constexpr int warpSize = 32;

static inline double normcdf(double x) { return 0.5 * erfc(x * -0.70710678118654752440); }
static inline float normcdff(float x) { return (float)normcdf((double)x); }

static inline void __syncthreads() { peri_cuda_host::barrier_count(0); }
static inline int __syncthreads_count(int p) { return peri_cuda_host::barrier_count(p); }
static inline int __syncthreads_or(int p) { return peri_cuda_host::barrier_count(p) > 0; }
static inline int __syncthreads_and(int p) { return peri_cuda_host::barrier_count(!p) == 0; }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { peri_cuda_host::meet(peri_cuda_host::SYNC, mask, 0, 0); }
static inline void __threadfence() { peri_cuda_host::interrupt(); }
static inline void __threadfence_block() { peri_cuda_host::interrupt(); }
static inline void __nanosleep(unsigned) { peri_cuda_host::interrupt(); }

template <class T> static inline T __shfl_sync(unsigned mask, T x, int source, int width = 32)
{
    int lane = peri_cuda_host::lane();
    return peri_cuda_host::from<T>(peri_cuda_host::meet(peri_cuda_host::SHFL, mask, peri_cuda_host::word(x),
                                                        (lane & ~(width - 1)) + (source & (width - 1))));
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32)
{
    int lane = peri_cuda_host::lane(), at = lane - (int)by;
    return peri_cuda_host::from<T>(peri_cuda_host::meet(peri_cuda_host::SHFL, mask, peri_cuda_host::word(x),
                                                        at < (lane & ~(width - 1)) ? lane : at));
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32)
{
    int lane = peri_cuda_host::lane(), at = lane + (int)by;
    return peri_cuda_host::from<T>(peri_cuda_host::meet(peri_cuda_host::SHFL, mask, peri_cuda_host::word(x),
                                                        at > (lane | (width - 1)) ? lane : at));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T x, int by, int width = 32)
{
    int lane = peri_cuda_host::lane(), at = lane ^ by;
    return peri_cuda_host::from<T>(peri_cuda_host::meet(peri_cuda_host::SHFL, mask, peri_cuda_host::word(x),
                                                        at > (lane | (width - 1)) ? lane : at));
}
static inline unsigned __ballot_sync(unsigned mask, int p)
{
    return (unsigned)peri_cuda_host::meet(peri_cuda_host::BALLOT, mask, p != 0, 0);
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
template <class T> static inline unsigned __match_any_sync(unsigned mask, T x)
{
    return (unsigned)peri_cuda_host::meet(peri_cuda_host::MATCH, mask, peri_cuda_host::word(x), 0);
}
static inline unsigned __reduce_add_sync(unsigned mask, unsigned x)
{
    return (unsigned)peri_cuda_host::meet(peri_cuda_host::ADD, mask, x, 0);
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned x)
{
    return (unsigned)peri_cuda_host::meet(peri_cuda_host::MIN, mask, x, 0);
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned x)
{
    return (unsigned)peri_cuda_host::meet(peri_cuda_host::MAX, mask, x, 0);
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned x)
{
    return (unsigned)peri_cuda_host::meet(peri_cuda_host::OR, mask, x, 0);
}
unsigned peri_cuda_host_active(); /* lanes of this warp that have not ended */

/* Atomic operations: threads change at calls only, so that plain accesses do. */
#define PERI_CUDA_HOST_ATOMIC(name, becomes) \
    template <class T> PERI_CUDA_HOST_APART static inline T name(T *p, typename std::common_type<T>::type x) \
    { \
        peri_cuda_host::interrupt(); \
        peri_cuda_host::touch_atomic(p, sizeof *p); \
        T old = *p; \
        *p = becomes; \
        return old; \
    }
PERI_CUDA_HOST_ATOMIC(atomicAdd, (T)(old + x))
PERI_CUDA_HOST_ATOMIC(atomicSub, (T)(old - x))
PERI_CUDA_HOST_ATOMIC(atomicMin, (x < old ? x : old))
PERI_CUDA_HOST_ATOMIC(atomicMax, (x > old ? x : old))
PERI_CUDA_HOST_ATOMIC(atomicExch, x)
PERI_CUDA_HOST_ATOMIC(atomicOr, (T)(old | x))
PERI_CUDA_HOST_ATOMIC(atomicAnd, (T)(old & x))
PERI_CUDA_HOST_ATOMIC(atomicXor, (T)(old ^ x))
template <class T>
PERI_CUDA_HOST_APART static inline T atomicCAS(T *p, typename std::common_type<T>::type want,
                                               typename std::common_type<T>::type x)
{
    peri_cuda_host::interrupt();
    peri_cuda_host::touch_atomic(p, sizeof *p);
    T old = *p;
    if (old == want) *p = x;
    return old;
}

/* Intrinsics. */
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __float_as_uint(float x) { return peri_cuda_host::from<unsigned>(peri_cuda_host::word(x)); }
static inline float __uint_as_float(unsigned x) { return peri_cuda_host::from<float>(x); }
static inline int __float_as_int(float x) { return peri_cuda_host::from<int>(peri_cuda_host::word(x)); }
static inline float __int_as_float(int x) { return peri_cuda_host::from<float>((unsigned)x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
/** Byte k of the result is byte (selector >> 4 k) & 7 of the eight of y and x, x the low ones. */
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned z = 0;
    for (int k = 0; k < 4; k++) z |= (unsigned)(bytes >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k;
    return z;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T x) { *p = x; }

/** The device's kernels may ask for more than 48 KiB of shared memory at a launch only after this. */
template <class F> static inline cudaError_t cudaFuncSetAttribute(F kernel, cudaFuncAttribute, int bytes)
{
    return peri_cuda_host::allow_shared((const void *)kernel, bytes);
}

#endif
