/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.c: kernels/cuda as a table of kernels like those of an instruction set (kernels/kernels.h), for tests: each
 * call launches the kernel on the pretended device, with pointers into the host's memory, and waits. What is wrong with
 * a kernel ends the program with a message.
 *
 * The operations of table batches, of buckets, and of rows that a mask picks, stand in the places of the steps that do
 * the same on the device cpu, so that their cases serve here too: the range that begins with chunk 0 does all of it.
 * Other steps are missing.
 *
 * Compiled by nvcc the same runs on a GPU, for `make gpu-check`. Its kernels reach the host's memory where programs
 * have shared it (tests/kernels/isas.h): the driver then holds it in place, and the GPU reads and writes it over the
 * bus.
 */
#include "kernels/cuda/table.h"

#include <stdio.h>
#include <stdlib.h>

static void run(int32_t kernel, const void *args, int64_t begin, int64_t end)
{
    static cudaStream_t stream;
    if (!stream) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    peri_cuda_call call = {.stream = stream, .processors = 2};
    cudaError_t error = begin < end ? peri_cuda_table[kernel].kernel(args, begin, end, &call) : cudaSuccess;
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) return;
    fprintf(stderr, "kernel %d of kernels/cuda: %s\n", kernel, cudaGetErrorString(error));
    abort();
}

/** The operation @op, with scratch of its own. */
static void operate(int32_t op, const void *args, int64_t begin, int64_t end)
{
    static cudaStream_t stream;
    if (begin > 0 || end <= 0) return;
    if (!stream) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    int64_t bytes = peri_cuda_table[op].scratch(args);
    peri_cuda_call call = {.stream = stream, .processors = 2, .bytes = bytes};
    call.scratch = aligned_alloc(256, ((size_t)bytes + 256) / 256 * 256);
    cudaError_t error = call.scratch ? peri_cuda_table[op].op(args, &call) : cudaErrorMemoryAllocation;
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    free(call.scratch);
    if (error == cudaSuccess) return;
    fprintf(stderr, "operation %d of kernels/cuda: %s\n", op, cudaGetErrorString(error));
    abort();
}

/** Steps whose arguments are those of an operation. */
#define STEPS(X)                                                                                                       \
    X(tbe_prepare)                                                                                                     \
    X(tbe_check) X(tbe_report) X(tbe_forward) X(tbe_weight_gradient) X(tbe_update) X(tbe_dense_update) X(tbe_ema)      \
        X(mask_pick) X(mask_spread) X(mask_places) X(take_add)
#define X(name)                                                                                                        \
    static void step_##name(const void *a, int64_t begin, int64_t end) { operate(PERI_OP_##name, a, begin, end); }
STEPS(X)
#undef X

static void step_tbe_sort(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_sort_args *a = args;
    peri_op_tbe_sort sort = {.list = a->list, .keys = a->keys, .items = a->items, .total_rows = a->total_rows,
                             .payload_bits = a->payload_bits};
    operate(PERI_OP_tbe_sort, &sort, begin, end);
}

/** The operation bucketize counts where there is no place for ids; its sums of lengths are scratch of its own. */
static void step_bucketize_count(const void *args, int64_t begin, int64_t end)
{
    peri_k_bucketize_args a = *(const peri_k_bucketize_args *)args;
    a.starts = NULL;
    operate(PERI_OP_bucketize, &a, begin, end);
}

#define X(name, args)                                                                                                  \
    static void host_##name(const void *a, int64_t begin, int64_t end) { run(PERI_K_##name, a, begin, end); }
PERI_KERNELS(X)
#undef X

#if defined(PERI_CUDA_HOST)
static void reach_host(void) { peri_cuda_host_reach_pageable(); }
#else
static void reach_host(void) {}
/** Have the GPU reach these bytes of the host, at the same address; false, with a message: it cannot. */
__attribute__((visibility("default"))) bool peri_cuda_host_share(void *p, size_t bytes);
bool peri_cuda_host_share(void *p, size_t bytes)
{
    int device = 0, reaches = 0;
    void *there = NULL;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&reaches, cudaDevAttrPageableMemoryAccess, device);
    if (error == cudaSuccess && reaches) return true;
    if (error == cudaSuccess) error = cudaHostRegister(p, bytes, cudaHostRegisterMapped);
    if (error == cudaSuccess) error = cudaHostGetDevicePointer(&there, p, 0);
    if (error == cudaSuccess && there == p) return true;
    fprintf(stderr, "kernels/cuda cannot reach %zu bytes of the host at %p: %s\n", bytes, p,
            error == cudaSuccess ? "the device has another address for them" : cudaGetErrorString(error));
    return false;
}
#endif

__attribute__((visibility("default"))) const peri_kernels *peri_cuda_host_kernels(void);
const peri_kernels *peri_cuda_host_kernels(void)
{
    static peri_kernels table = {.isa = "cuda_host"};
    reach_host();
#define X(name, args) table.fn[PERI_K_##name] = host_##name;
    PERI_KERNELS(X)
#undef X
#define X(name) table.fn[PERI_K_##name] = step_##name;
    STEPS(X) X(tbe_sort) X(bucketize_count)
#undef X
    table.fn[PERI_K_bucketize_place] = step_bucketize_count;
    return &table;
}
