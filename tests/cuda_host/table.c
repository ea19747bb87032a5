/* SPDX-License-Identifier: Apache-2.0
 *
 * table.c: the table of kernels/cuda/table.c for the pretended device: it knows which kernels and operations were
 * called. With PERI_CUDA_HOST_UNCALLED set, the process names those that were not when it ends.
 */
#include "kernels/cuda/table.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static bool called[PERI_WORK_COUNT];

#define X(name, args)                                                                                                  \
    cudaError_t peri_cuda_k_##name(const void *, int64_t, int64_t, const peri_cuda_call *);                            \
    static cudaError_t kernel_##name(const void *a, int64_t begin, int64_t end, const peri_cuda_call *c)               \
    {                                                                                                                  \
        called[PERI_K_##name] = true;                                                                                  \
        return peri_cuda_k_##name(a, begin, end, c);                                                                   \
    }
PERI_KERNELS(X)
#undef X
#define X(name, args)                                                                                                  \
    cudaError_t peri_cuda_op_##name(const void *, const peri_cuda_call *);                                             \
    int64_t peri_cuda_scratch_##name(const void *);                                                                    \
    static cudaError_t op_##name(const void *a, const peri_cuda_call *c)                                               \
    {                                                                                                                  \
        called[PERI_OP_##name] = true;                                                                                 \
        return peri_cuda_op_##name(a, c);                                                                              \
    }
PERI_OPS(X)
#undef X

const peri_cuda_work peri_cuda_table[PERI_WORK_COUNT] = {
#define X(name, args) [PERI_K_##name] = {.kernel = kernel_##name},
    PERI_KERNELS(X)
#undef X
#define X(name, args) [PERI_OP_##name] = {.op = op_##name, .scratch = peri_cuda_scratch_##name},
        PERI_OPS(X)
#undef X
};

__attribute__((destructor)) static void name_uncalled(void)
{
    if (!getenv("PERI_CUDA_HOST_UNCALLED")) return;
    fputs("not called:", stderr);
#define X(name, args) if (!called[PERI_K_##name]) fputs(" " #name, stderr);
    PERI_KERNELS(X)
#undef X
#define X(name, args) if (!called[PERI_OP_##name]) fputs(" operation:" #name, stderr);
    PERI_OPS(X)
#undef X
    fputs("\n", stderr);
}
