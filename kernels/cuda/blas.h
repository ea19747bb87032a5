/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.h: matrix products of the device, by cuBLAS. A thin wrapper (blas.cu); kernels/cuda uses cuBLAS nowhere else, and on
 * tests/cuda_host its
 * twin there takes its place.
 */
#ifndef PERI_KERNELS_CUDA_BLAS_H
#define PERI_KERNELS_CUDA_BLAS_H

#include "cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What the products of the current device share (a handle and its workspace, made when the first product comes). NULL: no memory. */
void *peri_cuda_blas_new(void);
void peri_cuda_blas_delete(void *blas);
/** Whether a product of these dtypes and sizes can be had. */
bool peri_cuda_has_gemm(const peri_op_gemm *g);

#ifdef __cplusplus
}
#endif
#endif
