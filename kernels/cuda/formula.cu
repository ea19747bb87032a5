/* SPDX-License-Identifier: Apache-2.0
 *
 * formula.cu: the formulas of kernels/dense.h, a thread an element, whose registers are the thread's own memory.
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

    __device__ __forceinline__ T step(const peri_k_formula_step &s, const T *r) const
    {
        switch (s.kind) {
        case PERI_FORMULA_UNARY: return peri_f<T>(s.op, r[s.a], (T)s.x, (T)s.y);
        case PERI_FORMULA_CHAIN: return peri_chain<T>(s.op, r[s.a], r[s.b], (T)s.x, (T)s.y);
        case PERI_FORMULA_BINARY: return peri_both(s.op, r[s.a], r[s.b]);
        case PERI_FORMULA_COMPARE: return peri_holds(s.op, r[s.a], r[s.b]) ? T(1) : T(0);
        case PERI_FORMULA_WHERE: return r[s.a] != T(0) ? r[s.b] : r[s.c];
        default: return (T)s.x;
        }
    }

    __device__ void operator()(int64_t i) const
    {
        T r[PERI_FORMULA_INPUTS + PERI_FORMULA_STEPS];
        for (int32_t k = 0; k < a.n_in; k++) r[k] = input(k, i);
        for (int32_t k = 0; k < a.n_steps; k++) r[a.n_in + k] = step(a.step[k], r);
        for (int32_t k = 0; k < a.n_results; k++) ((T *)a.dst[k])[i] = r[a.result[k]];
    }
};

} // namespace

PERI_CUDA_KERNEL(formula)
{
    return a->dtype == PERI_F64 ? each(begin, end, c, formula_one<double>{*a})
                                : each(begin, end, c, formula_one<float>{*a});
}
