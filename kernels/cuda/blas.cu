/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.cu: the operation gemm (kernels/dense.h) by cuBLAS: f32, f64, f16 and bf16 (sums in f32). Row-major C = A B is column-major
 * C' = B' A', so the operands change places. PERI_CUDA_TF32=1 lets f32 products use TF32 (10 bits of mantissa).
 */
#include "blas.h"

#if defined(PERI_CUDA_HOST)
#include "blas_host.h"
#else
#include <cublas_v2.h>
#include <cstdlib>
#include <mutex>

namespace {

struct handle {
    std::mutex lock; /* a handle has one stream at a time */
    cublasHandle_t blas = nullptr;
};

cudaError_t error_of(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return cudaSuccess;
    case CUBLAS_STATUS_ALLOC_FAILED: return cudaErrorMemoryAllocation;
    case CUBLAS_STATUS_INVALID_VALUE: return cudaErrorInvalidValue;
    case CUBLAS_STATUS_NOT_SUPPORTED: return cudaErrorNotSupported;
    case CUBLAS_STATUS_NOT_INITIALIZED: return cudaErrorInitializationError;
    default: return cudaErrorUnknown;
    }
}

cudaDataType_t type_of(int32_t dtype)
{
    return dtype == PERI_F64 ? CUDA_R_64F : dtype == PERI_F16 ? CUDA_R_16F : dtype == PERI_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

bool tf32()
{
    static const bool wanted = getenv("PERI_CUDA_TF32") && getenv("PERI_CUDA_TF32")[0] == '1';
    return wanted;
}

cudaError_t product(const peri_op_gemm *g, const peri_cuda_call *c)
{
    handle *h = (handle *)c->blas;
    if (!h) return cudaErrorMemoryAllocation;
    std::lock_guard<std::mutex> hold(h->lock);
    if (!h->blas) PERI_CUDA_TRY(error_of(cublasCreate(&h->blas)));
    PERI_CUDA_TRY(error_of(cublasSetStream(h->blas, c->stream)));
    cudaDataType_t type = type_of(g->dtype);
    cublasComputeType_t compute = g->dtype == PERI_F64             ? CUBLAS_COMPUTE_64F
                                  : g->dtype == PERI_F32 && tf32() ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                   : CUBLAS_COMPUTE_32F;
    float alpha = (float)g->alpha, beta = (float)g->beta;
    const void *one = g->dtype == PERI_F64 ? (const void *)&g->alpha : &alpha, *two = g->dtype == PERI_F64 ? (const void *)&g->beta : &beta;
    return error_of(cublasGemmStridedBatchedEx(h->blas, g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                                               (int)g->n, (int)g->m, (int)g->k, one, g->b, type, (int)g->ldb, g->stride_b, g->a, type,
                                               (int)g->lda, g->stride_a, two, g->c, type, (int)g->ldc, g->stride_c, (int)g->batch, compute,
                                               CUBLAS_GEMM_DEFAULT));
}

} // namespace

void *peri_cuda_blas_new(void) { return new (std::nothrow) handle; }

void peri_cuda_blas_delete(void *blas)
{
    handle *h = (handle *)blas;
    if (h && h->blas) cublasDestroy(h->blas);
    delete h;
}
#endif

bool peri_cuda_has_gemm(const peri_op_gemm *g)
{
    const int64_t most = INT32_MAX;
    bool dtype = g->dtype == PERI_F32 || g->dtype == PERI_F64 || g->dtype == PERI_F16 || g->dtype == PERI_BF16;
    return dtype && g->m <= most && g->n <= most && g->k <= most && g->lda <= most && g->ldb <= most && g->ldc <= most && g->batch <= most;
}

PERI_CUDA_SCRATCH(gemm)
{
    (void)a;
    return 0;
}

PERI_CUDA_OP(gemm) { return a->m > 0 && a->n > 0 && a->batch > 0 ? product(a, c) : cudaSuccess; }
