/* SPDX-License-Identifier: Apache-2.0
 *
 * blas_host.h: the twin of kernels/cuda/blas.cu's cuBLASLt on the host: plain loops.
 */
#ifndef PERI_CUDA_HOST_BLAS_H
#define PERI_CUDA_HOST_BLAS_H

#include <vector>

cudaError_t peri_cuda_blas_new(void **out) { return *out = nullptr, cudaSuccess; }
void peri_cuda_blas_delete(void *) {}

static bool possible(const peri_op_gemm *) { return true; }
static int64_t workspace(const peri_op_gemm *) { return 0; }

/** A factor as TF32 has it: 10 bits of mantissa, the nearest; of two, the one that is farther from 0. */
static double gemm_tf32(double x)
{
    uint32_t u = k_bits((float)x);
    return (u & 0x7f800000u) == 0x7f800000u ? x : (double)k_float((u + 0x1000u) & 0xffffe000u);
}

static double gemm_number(const void *p, int64_t i, int32_t dtype, bool tf32 = false)
{
    double x = peri_load(p, i, dtype).re;
    return tf32 ? gemm_tf32(x) : x;
}

/** The numbers of a factor, @rows rows of @depth: number k of row r is at p[from + r * row + k * step]. They are
 *  converted here once, not once for every number of the result that they are part of. */
template <class T>
static std::vector<T> gemm_factor(const void *p, int64_t from, int64_t rows, int64_t depth, int64_t row, int64_t step,
                                  const peri_op_gemm &g)
{
    const bool tf32 = g.tf32 && g.dtype == PERI_F32;
    std::vector<T> out((size_t)(rows * depth));
    for (int64_t at = 0; at < rows * depth; at++)
        out[(size_t)at] = (T)gemm_number(p, from + at / depth * row + at % depth * step, g.dtype, tf32);
    return out;
}

/** Matrix @b of the batch, summed in T: the dtype of the factors, or f32 if they are narrower. */
template <class T> static void product_of(const peri_op_gemm &g, int64_t b)
{
    const std::vector<T> rows = gemm_factor<T>(g.a, b * g.stride_a, g.m, g.k, g.trans_a ? 1 : g.lda,
                                               g.trans_a ? g.lda : 1, g),
                         columns = gemm_factor<T>(g.b, b * g.stride_b, g.n, g.k, g.trans_b ? g.ldb : 1,
                                                  g.trans_b ? 1 : g.ldb, g);
    for (int64_t at = 0; at < g.m * g.n; at++) {
        const int64_t i = at / g.n, j = at % g.n, to = b * g.stride_c + i * g.ldc + j;
        const T *x = rows.data() + i * g.k, *y = columns.data() + j * g.k;
        T sum = 0;
        for (int64_t k = 0; k < g.k; k++) sum += x[k] * y[k];
        peri_value v = {false, 0, g.alpha * sum, 0};
        if (g.beta != 0) v.re += g.beta * gemm_number(g.c, to, g.c_dtype); /* else what is there may be no number */
        if (g.biased) v.re += gemm_number(g.bias, j, g.c_dtype);
        peri_store(g.c, to, g.c_dtype, v);
    }
}

static cudaError_t product(const peri_op_gemm *op, const peri_cuda_call *c)
{
    peri_op_gemm g = *op;
    return peri_cuda_host::task(c->stream, [=] {
        for (int64_t b = 0; b < g.batch; b++) {
            if (g.dtype == PERI_F64) product_of<double>(g, b);
            else product_of<float>(g, b);
        }
    });
}

#endif
