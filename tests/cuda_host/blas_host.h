/* SPDX-License-Identifier: Apache-2.0
 *
 * blas_host.h: the twin of kernels/cuda/blas.cu's cuBLAS on the host: plain loops.
 */
#ifndef PERI_CUDA_HOST_BLAS_H
#define PERI_CUDA_HOST_BLAS_H

#include "kernels/cuda/value.cuh"

void *peri_cuda_blas_new(void) { return nullptr; }
void peri_cuda_blas_delete(void *) {}

static double gemm_number(const void *p, int64_t i, int32_t dtype) { return peri_load(p, i, dtype).re; }

static cudaError_t product(const peri_op_gemm *op, const peri_cuda_call *c)
{
    peri_op_gemm g = *op;
    return peri_cuda_host::task(c->stream, [=] {
        for (int64_t at = 0; at < g.batch * g.m * g.n; at++) {
            int64_t b = at / (g.m * g.n), i = at / g.n % g.m, j = at % g.n;
            double sum = 0;
            float narrow = 0;
            for (int64_t k = 0; k < g.k; k++) {
                double x = gemm_number(g.a, b * g.stride_a + (g.trans_a ? k * g.lda + i : i * g.lda + k), g.dtype);
                double y = gemm_number(g.b, b * g.stride_b + (g.trans_b ? j * g.ldb + k : k * g.ldb + j), g.dtype);
                sum += x * y;
                narrow += (float)x * (float)y;
            }
            int64_t to = b * g.stride_c + i * g.ldc + j;
            peri_value v = {false, 0, g.alpha * (g.dtype == PERI_F64 ? sum : narrow), 0};
            if (g.beta != 0) v.re += g.beta * gemm_number(g.c, to, g.dtype); /* else what is there may be no number */
            peri_store(g.c, to, g.dtype, v);
        }
    });
}

#endif
