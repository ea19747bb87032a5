/* SPDX-License-Identifier: Apache-2.0
 *
 * blas_host.h: the twin of kernels/cuda/blas.cu's cuBLASLt on the host: plain loops.
 */
#ifndef PERI_CUDA_HOST_BLAS_H
#define PERI_CUDA_HOST_BLAS_H

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

static cudaError_t product(const peri_op_gemm *op, const peri_cuda_call *c)
{
    peri_op_gemm g = *op;
    const bool tf32 = g.tf32 && g.dtype == PERI_F32;
    return peri_cuda_host::task(c->stream, [=] {
        for (int64_t at = 0; at < g.batch * g.m * g.n; at++) {
            int64_t b = at / (g.m * g.n), i = at / g.n % g.m, j = at % g.n;
            double sum = 0;
            float narrow = 0;
            for (int64_t k = 0; k < g.k; k++) {
                double x =
                    gemm_number(g.a, b * g.stride_a + (g.trans_a ? k * g.lda + i : i * g.lda + k), g.dtype, tf32);
                double y =
                    gemm_number(g.b, b * g.stride_b + (g.trans_b ? j * g.ldb + k : k * g.ldb + j), g.dtype, tf32);
                sum += x * y;
                narrow += (float)x * (float)y;
            }
            int64_t to = b * g.stride_c + i * g.ldc + j;
            peri_value v = {false, 0, g.alpha * (g.dtype == PERI_F64 ? sum : narrow), 0};
            if (g.beta != 0) v.re += g.beta * gemm_number(g.c, to, g.c_dtype); /* else what is there may be no number */
            if (g.biased) v.re += gemm_number(g.bias, j, g.c_dtype);
            peri_store(g.c, to, g.c_dtype, v);
        }
    });
}

#endif
