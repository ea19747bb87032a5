/* SPDX-License-Identifier: Apache-2.0
 *
 * formula.cu: the formulas of kernels/dense.h, a thread an element. Steps name their registers by number while the
 * kernel runs, which no processor's registers can be; so they lie in shared memory, those of one number side by side.
 */
#include "cuda.h"
#include "functions.cuh"
#include "rows.cuh"

namespace {

template <class T> struct formula_one {
    peri_k_formula_args a;

    __device__ __forceinline__ T input(int32_t k, int64_t i) const
    {
        int64_t at = 0;
        for (int32_t d = a.ndim - 1; d >= 0; d--) {
            const int64_t next = i / a.shape[d];
            at += (i - next * a.shape[d]) * a.stride[k][d];
            i = next;
        }
        return ((const T *)a.in[k])[at];
    }

    /** Step @s of a thread whose register k is r[k * apart]. */
    __device__ __forceinline__ T step(const peri_k_formula_step &s, const T *r, int apart) const
    {
        const T u = r[s.a * apart];
        switch (s.kind) {
        case PERI_FORMULA_UNARY: return peri_f<T>(s.op, u, (T)s.x, (T)s.y);
        case PERI_FORMULA_CHAIN: return peri_chain<T>(s.op, u, r[s.b * apart], (T)s.x, (T)s.y);
        case PERI_FORMULA_BINARY: return peri_both(s.op, u, r[s.b * apart]);
        case PERI_FORMULA_COMPARE: return peri_holds(s.op, u, r[s.b * apart]) ? T(1) : T(0);
        case PERI_FORMULA_WHERE: return u != T(0) ? r[s.b * apart] : r[s.c * apart];
        default: return (T)s.x;
        }
    }

    __device__ __forceinline__ void element(int64_t i, T *r, int apart) const
    {
        for (int32_t k = 0; k < a.n_in; k++) r[k * apart] = input(k, i);
        for (int32_t k = 0; k < a.n_steps; k++) r[(a.n_in + k) * apart] = step(a.step[k], r, apart);
        for (int32_t k = 0; k < a.n_results; k++) ((T *)a.dst[k])[i] = r[a.result[k] * apart];
    }
};

template <class T>
__global__ void __launch_bounds__(PERI_BLOCK) formula_elements(formula_one<T> f, int64_t begin, int64_t end)
{
    PERI_SHARED_DYNAMIC(T, registers);
    for (int64_t i = begin + peri_grid_thread(); i < end; i += peri_grid_threads())
        f.element(i, registers + threadIdx.x, (int)blockDim.x);
}

enum { SHARED_MOST = 48 << 10 }; /* bytes that each block may have without being asked for */

template <class T>
cudaError_t formula(const peri_k_formula_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    const size_t each_thread = sizeof(T) * (size_t)(a->n_in + a->n_steps);
    unsigned threads = PERI_BLOCK; /* 64 of them fit with all steps */
    while (threads * each_thread > SHARED_MOST) threads /= 2;
    if (begin >= end) return cudaSuccess;
    return peri_cuda_launch(formula_elements<T>, peri_cuda_grid(end - begin, threads, c), threads,
                            threads * each_thread, c, formula_one<T>{*a}, begin, end);
}

} // namespace

PERI_CUDA_KERNEL(formula)
{
    return a->dtype == PERI_F64 ? formula<double>(a, begin, end, c) : formula<float>(a, begin, end, c);
}
