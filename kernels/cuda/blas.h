/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.h: matrix products of the device, by cuBLASLt. A thin wrapper (blas.cu); kernels/cuda uses cuBLASLt nowhere
 * else, and on tests/cuda_host its twin there takes its place.
 */
#ifndef PERI_KERNELS_CUDA_BLAS_H
#define PERI_KERNELS_CUDA_BLAS_H

#include "cuda.h"

#include "../dense.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What the products of the current device share: cuBLASLt's handle, and the algorithms that were chosen. */
cudaError_t peri_cuda_blas_new(void **out);
void peri_cuda_blas_delete(void *blas);
/** Whether the current device, which is open, has a product of these dtypes and sizes, and with this epilogue. */
bool peri_cuda_has_gemm(const peri_op_gemm *g);

#ifdef __cplusplus
}
#endif
#endif
