/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/cuda/cuda.h: what the families of this folder share. Each .cu file mirrors one or more of kernels/cpu and
 * defines, for every kernel and operation of its family's header,
 *
 *   PERI_CUDA_KERNEL(name)    the kernel over [begin, end), queued on c->stream
 *   PERI_CUDA_OP(name)        the operation, queued on c->stream; its scratch is c->scratch, of c->bytes
 *   PERI_CUDA_SCRATCH(name)   the bytes of scratch that the operation wants for these arguments
 *
 * which table.c collects. The same sources compile for the host, on tests/cuda_host. Rules:
 *
 * - Nothing here waits, allocates or copies to the host. What fails is a cudaError_t of the launch.
 * - A kernel is launched by `each`, `each_warp`, `each_group`, or `peri_cuda_launch` (or `peri_cuda_launch_early`) with
 * its own shape.
 * - All shared memory by PERI_SHARED or PERI_SHARED_DYNAMIC: the host's stand-in finds what reaches beyond it.
 * - Shuffles, votes and matches name their lanes; a loop around one has the same number of rounds for all of them.
 * - Compiled without contraction of a * b + c; where kernels/ says FMA, call fmaf or fma. Sums that must not depend on
 *   the order of threads are made in an order that the arguments fix.
 * - Numbers of rows, bytes and ids are int64.
 */
#ifndef PERI_KERNELS_CUDA_H
#define PERI_KERNELS_CUDA_H

#ifdef __cplusplus
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif

#include "../work.h"

/** What a launch needs beside its arguments. Lives for the call only. */
typedef struct peri_cuda_call {
    cudaStream_t stream;
    char *scratch; /* of an operation; aligned to 256 bytes */
    int64_t bytes;
    int32_t processors; /* multiprocessors of the device */
    void *blas;         /* of its matrix products: blas.h */
} peri_cuda_call;

#ifdef __cplusplus

#include <type_traits>

#define PERI_CUDA_KERNEL(name) \
    static cudaError_t name##_of(const peri_k_args_of_##name *a, int64_t begin, int64_t end, const peri_cuda_call *c); \
    extern "C" cudaError_t peri_cuda_k_##name(const void *a, int64_t begin, int64_t end, const peri_cuda_call *c) \
    { \
        return name##_of((const peri_k_args_of_##name *)a, begin, end, c); \
    } \
    static cudaError_t name##_of(const peri_k_args_of_##name *a, int64_t begin, int64_t end, const peri_cuda_call *c)
#define PERI_CUDA_OP(name)                                                                                             \
    static cudaError_t name##_of(const peri_op_args_of_##name *a, const peri_cuda_call *c);                            \
    extern "C" cudaError_t peri_cuda_op_##name(const void *a, const peri_cuda_call *c)                                 \
    {                                                                                                                  \
        return name##_of((const peri_op_args_of_##name *)a, c);                                                        \
    }                                                                                                                  \
    static cudaError_t name##_of(const peri_op_args_of_##name *a, const peri_cuda_call *c)
#define PERI_CUDA_SCRATCH(name)                                                                                        \
    static int64_t name##_scratch(const peri_op_args_of_##name *a);                                                    \
    extern "C" int64_t peri_cuda_scratch_##name(const void *a)                                                         \
    {                                                                                                                  \
        return name##_scratch((const peri_op_args_of_##name *)a);                                                      \
    }                                                                                                                  \
    static int64_t name##_scratch(const peri_op_args_of_##name *a)

#define PERI_CUDA_TRY(call) \
    do { \
        cudaError_t error_ = (call); \
        if (error_ != cudaSuccess) return error_; \
    } while (0)

/** Bytes that an operation's parts take in its scratch, one after the other, each aligned. */
static inline int64_t peri_part(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/* -- shared memory ------------------------------------------------------------------------------------------------- */

#if defined(PERI_CUDA_HOST)
#define PERI_SHARED(type, name, n) \
    static peri_cuda_host::slot name##_slot_; \
    type *const name = (type *)peri_cuda_host::shared(&name##_slot_, sizeof(type) * (n), alignof(type))
#define PERI_SHARED_DYNAMIC(type, name) type *const name = (type *)peri_cuda_host::dynamic_shared()
#define PERI_UNROLL
#define PERI_ROLLED
#define PERI_GRID_CONSTANT
#else
/** An array of @n elements (a constant) that the threads of a block share; holds anything at first. */
#define PERI_SHARED(type, name, n) __shared__ type name[n]
/** The bytes that the launch asked for. One a kernel. */
#define PERI_SHARED_DYNAMIC(type, name) \
    extern __shared__ __align__(16) unsigned char peri_dynamic_[]; \
    type *const name = (type *)peri_dynamic_
#define PERI_UNROLL _Pragma("unroll")
#define PERI_ROLLED _Pragma("unroll 1")
/** Before a kernel's parameter: functions get a reference to it instead of a copy. */
#define PERI_GRID_CONSTANT __grid_constant__
#endif

/* -- launches ------------------------------------------------------------------------------------------------------ */

enum { PERI_BLOCK = 256, PERI_WARPS = PERI_BLOCK / 32 };

/** Whether parameters of these types fit into a launch: 4 KiB, what every toolkit and card takes. */
template <class... P> constexpr bool peri_cuda_fits = (sizeof(P) + ... + 0) <= 4096;

/** Launch @kernel(args...) on the call's stream. */
template <class... P, class... A>
static inline cudaError_t peri_cuda_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                                           const peri_cuda_call *c, A... args)
{
    static_assert(peri_cuda_fits<P...>, "the arguments of a launch take 4 KiB at most");
#if defined(PERI_CUDA_HOST)
    return peri_cuda_host::launch((const void *)kernel, grid, block, shared, c->stream,
                                  peri_cuda_host::call_of([=] { kernel(args...); }));
#else
    kernel<<<grid, block, shared, c->stream>>>(args...);
    return cudaPeekAtLastError();
#endif
}

/** Whether kernels on the current device can be placed before the one in front of them has ended: from 9.0 on. */
static inline bool peri_cuda_places_early()
{
#if defined(PERI_CUDA_HOST)
    return false;
#else
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
#endif
}

/** As peri_cuda_launch, but where the kernel in front has said peri_next_may_start, the blocks of this one may be
 *  placed while that one ends: a launch costs less (CUDA's programmatic dependent launch). Every thread calls
 *  peri_wait_for_earlier before it touches memory. */
template <class... P, class... A>
static inline cudaError_t peri_cuda_launch_early(void (*kernel)(P...), dim3 grid, dim3 block, const peri_cuda_call *c,
                                                 A... args)
{
#if defined(PERI_CUDA_HOST)
    return peri_cuda_launch(kernel, grid, block, 0, c, args...);
#else
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.stream = c->stream;
    config.attrs = &early, config.numAttrs = peri_cuda_places_early() ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
#endif
}

/** All kernels in front of this one have ended, and what they wrote is seen. */
static __device__ __forceinline__ void peri_wait_for_earlier()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** The kernel behind this one may be placed as soon as all blocks of this one have begun. */
static __device__ __forceinline__ void peri_next_may_start()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/** Blocks of @per items that n items need; never more than fill the device @waves times over: what is above takes
 *  turns. */
static inline unsigned peri_cuda_grid(int64_t n, int64_t per, const peri_cuda_call *c, int waves = 16)
{
#if defined(PERI_CUDA_HOST)
    waves = 1; /* few blocks, so that those of small cases take turns too */
#endif
    int64_t blocks = (n + per - 1) / per, most = (int64_t)c->processors * waves;
    return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/** The number of the thread in its grid, and of threads. */
static __device__ __forceinline__ int64_t peri_grid_thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ int64_t peri_grid_threads() { return (int64_t)gridDim.x * blockDim.x; }
static __device__ __forceinline__ int peri_lane() { return (int)(threadIdx.x & 31); }

template <class F> __global__ void __launch_bounds__(PERI_BLOCK) peri_each_kernel(F f, int64_t begin, int64_t end)
{
    for (int64_t i = begin + peri_grid_thread(); i < end; i += peri_grid_threads()) f(i);
}

/** f(i) for i in [begin, end), a thread each. F: copied, has `__device__ void operator()(int64_t i) const`. */
template <class F> static inline cudaError_t each(int64_t begin, int64_t end, const peri_cuda_call *c, F f)
{
    if (begin >= end) return cudaSuccess;
    return peri_cuda_launch(peri_each_kernel<F>, peri_cuda_grid(end - begin, PERI_BLOCK, c), PERI_BLOCK, 0, c, f, begin,
                            end);
}

template <int LANES, class F>
__global__ void __launch_bounds__(PERI_BLOCK) peri_group_kernel(F f, int64_t begin, int64_t end)
{
    const int lane = (int)(threadIdx.x % LANES);
    const unsigned mask =
        LANES == 32 ? 0xffffffffu : ((1u << (LANES & 31)) - 1) << ((threadIdx.x & 31) / LANES * LANES);
    for (int64_t i = begin + peri_grid_thread() / LANES; i < end; i += peri_grid_threads() / LANES) f(i, lane, mask);
}

/** f(i, lane, mask) for i in [begin, end) by LANES (1, 2, 4, ..., 32) neighbouring threads each; @mask names them for
 *  warp operations. */
template <int LANES, class F>
static inline cudaError_t each_group(int64_t begin, int64_t end, const peri_cuda_call *c, F f)
{
    if (begin >= end) return cudaSuccess;
    return peri_cuda_launch(peri_group_kernel<LANES, F>, peri_cuda_grid(end - begin, PERI_BLOCK / LANES, c), PERI_BLOCK,
                            0, c, f, begin, end);
}

/** f(i, lane, mask) by a whole warp each. */
template <class F> static inline cudaError_t each_warp(int64_t begin, int64_t end, const peri_cuda_call *c, F f)
{
    return each_group<32>(begin, end, c, f);
}

/* -- sums in a fixed order ----------------------------------------------------------------------------------------- */

/** The sum over the lanes of @mask (LANES of them), in all of them, as a tree whose shape is fixed. */
template <int LANES, class T> static __device__ __forceinline__ T peri_group_sum(T x, unsigned mask)
{
    PERI_UNROLL
    for (int by = LANES / 2; by > 0; by /= 2) x += __shfl_xor_sync(mask, x, by);
    return x;
}

template <int LANES, class T> static __device__ __forceinline__ T peri_group_max(T x, unsigned mask)
{
    PERI_UNROLL
    for (int by = LANES / 2; by > 0; by /= 2) {
        T other = __shfl_xor_sync(mask, x, by);
        x = other > x ? other : x;
    }
    return x;
}

template <int LANES, class T> static __device__ __forceinline__ T peri_group_min(T x, unsigned mask)
{
    PERI_UNROLL
    for (int by = LANES / 2; by > 0; by /= 2) {
        T other = __shfl_xor_sync(mask, x, by);
        x = other < x ? other : x;
    }
    return x;
}

/** *@p, parts of which other threads change by atomic operations meanwhile: the caller takes what it was, or what it
 *  has become. */
template <class T> static __device__ __forceinline__ T peri_load_beside(const T *p)
{
#if defined(PERI_CUDA_HOST)
    return peri_cuda_host::load_beside(p);
#else
    return *p;
#endif
}

/** *@p = @x, where other threads store to it, too: any of them may be the last. */
template <class T> static __device__ __forceinline__ void peri_store_beside(T *p, T x)
{
#if defined(PERI_CUDA_HOST)
    peri_cuda_host::store_beside(p, x);
#else
    *p = x;
#endif
}

/** atomic minimum and maximum of 64-bit numbers. */
static __device__ __forceinline__ int64_t peri_atomic_min(int64_t *p, int64_t x)
{
    return (int64_t)atomicMin((long long *)p, (long long)x);
}
static __device__ __forceinline__ int64_t peri_atomic_max(int64_t *p, int64_t x)
{
    return (int64_t)atomicMax((long long *)p, (long long)x);
}
static __device__ __forceinline__ int64_t peri_atomic_add(int64_t *p, int64_t x)
{
    return (int64_t)atomicAdd((unsigned long long *)p, (unsigned long long)x);
}

/* -- indices of either width --------------------------------------------------------------------------------------- */

/** x[i] of PERI_I32 or PERI_I64. */
static __device__ __forceinline__ int64_t peri_index(const void *x, int64_t i, int32_t dtype)
{
    return dtype == PERI_I32 ? ((const int32_t *)x)[i] : ((const int64_t *)x)[i];
}
static __device__ __forceinline__ void peri_set_index(void *x, int64_t i, int32_t dtype, int64_t value)
{
    if (dtype == PERI_I32) ((int32_t *)x)[i] = (int32_t)value;
    else ((int64_t *)x)[i] = value;
}

#endif /* __cplusplus */
#endif
