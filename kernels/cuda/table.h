/* SPDX-License-Identifier: Apache-2.0
 *
 * table.h: the kernels and operations of this folder by number (PERI_K_*, PERI_OP_*), for the device backend and for
 * tests.
 */
#ifndef PERI_KERNELS_CUDA_TABLE_H
#define PERI_KERNELS_CUDA_TABLE_H

#include "../kernels.h"
#include "cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef cudaError_t (*peri_cuda_kernel_fn)(const void *args, int64_t begin, int64_t end, const peri_cuda_call *call);
typedef cudaError_t (*peri_cuda_op_fn)(const void *args, const peri_cuda_call *call);
typedef int64_t (*peri_cuda_scratch_fn)(const void *args);

typedef struct peri_cuda_work {
    peri_cuda_kernel_fn kernel; /* of a kernel */
    peri_cuda_op_fn op;         /* of an operation */
    peri_cuda_scratch_fn scratch;
} peri_cuda_work;

extern const peri_cuda_work peri_cuda_table[PERI_WORK_COUNT];

#ifdef __cplusplus
}
#endif
#endif
