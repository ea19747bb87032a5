/* SPDX-License-Identifier: Apache-2.0
 *
 * table.c: all kernels and operations by number. One that has no CUDA face is an error of the linker.
 */
#include "table.h"

#define X(name, args) cudaError_t peri_cuda_k_##name(const void *, int64_t, int64_t, const peri_cuda_call *);
PERI_KERNELS(X)
#undef X
#define X(name, args)                                                                                                  \
    cudaError_t peri_cuda_op_##name(const void *, const peri_cuda_call *);                                             \
    int64_t peri_cuda_scratch_##name(const void *);
PERI_OPS(X)
#undef X

const peri_cuda_work peri_cuda_table[PERI_WORK_COUNT] = {
#define X(name, args) [PERI_K_##name] = {.kernel = peri_cuda_k_##name},
    PERI_KERNELS(X)
#undef X
#define X(name, args) [PERI_OP_##name] = {.op = peri_cuda_op_##name, .scratch = peri_cuda_scratch_##name},
        PERI_OPS(X)
#undef X
};
