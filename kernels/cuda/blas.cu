/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.cu: the operation gemm (kernels/dense.h) by cuBLASLt: f32 (also by TF32), f64, f16 and bf16. Row-major C = A B
 * is column-major C' = B' A', so the operands change places, and what the contract says of C's columns cuBLASLt says of
 * D's rows.
 *
 * The same product of the same numbers has the same bits, in whatever stream and beside whatever else it runs: the
 * algorithm depends on the numbers of the call alone (what the library suggests first, asked once for each kind of
 * call), its workspace is the call's own scratch, and parts of a sum (split k) are added in f32, in a fixed order.
 */
#include "blas.h"
#include "value.cuh"

#include "../dense.h"

#if defined(PERI_CUDA_HOST)
#include "blas_host.h"
#else
#include <cublasLt.h>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

namespace {

enum { DEVICES_MOST = 64, ALIGNMENT_MOST = 256 };
const size_t WORKSPACE_MOST = 32u << 20; /* what NVIDIA advises for compute capability 9; an algorithm may want less,
                                            and most want none */

/** What an algorithm is chosen by. Compared byte by byte: it is cleared before it is filled. */
struct kind {
    int32_t dtype, c_dtype;
    int64_t flags; /* trans_a, trans_b, tf32, biased, whether beta is 0 */
    int64_t m, n, k, batch, lda, ldb, ldc, stride_a, stride_b, stride_c;
    int32_t align_a, align_b, align_c, align_bias; /* bytes, powers of two */
    bool operator==(const kind &other) const { return !memcmp(this, &other, sizeof *this); }
};

struct kind_hash {
    size_t operator()(const kind &key) const
    {
        uint64_t words[sizeof(kind) / 8], h = 0;
        static_assert(sizeof words == sizeof key, "whole words");
        memcpy(words, &key, sizeof words);
        for (uint64_t w : words) h = (h ^ w) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
        return (size_t)h;
    }
};

struct choice {
    bool found;
    cublasLtMatmulAlgo_t algorithm;
    int64_t workspace;
};

/** The products of one GPU. */
struct products {
    cublasLtHandle_t lt = nullptr;
    std::mutex lock; /* of what was chosen */
    std::unordered_map<kind, choice, kind_hash> chosen;
};

products *of_device[DEVICES_MOST]; /* of GPUs that are open */

/** The current device's. */
products *current()
{
    int device = -1;
    return cudaGetDevice(&device) == cudaSuccess && device >= 0 && device < DEVICES_MOST ? of_device[device] : nullptr;
}

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
    return dtype == PERI_F64    ? CUDA_R_64F
           : dtype == PERI_F16  ? CUDA_R_16F
           : dtype == PERI_BF16 ? CUDA_R_16BF
                                : CUDA_R_32F;
}

int64_t bytes_of(int32_t dtype) { return dtype == PERI_F64 ? 8 : dtype == PERI_F32 ? 4 : 2; }

/** The alignment of a matrix and of those behind it. */
int32_t alignment(const void *p, int64_t stride, int32_t dtype)
{
    uint64_t bits = (uint64_t)(uintptr_t)p | (uint64_t)(stride * bytes_of(dtype)) | ALIGNMENT_MOST;
    return (int32_t)(bits & -bits);
}

kind kind_of(const peri_op_gemm *g)
{
    kind key;
    memset(&key, 0, sizeof key);
    key.dtype = g->dtype, key.c_dtype = g->c_dtype;
    key.flags =
        g->trans_a | g->trans_b << 1 | (g->tf32 && g->dtype == PERI_F32) << 2 | g->biased << 3 | (g->beta == 0) << 4;
    key.m = g->m, key.n = g->n, key.k = g->k, key.batch = g->batch;
    key.lda = g->lda, key.ldb = g->ldb, key.ldc = g->ldc;
    if (g->batch > 1) key.stride_a = g->stride_a, key.stride_b = g->stride_b, key.stride_c = g->stride_c;
    key.align_a = alignment(g->a, key.stride_a, g->dtype);
    key.align_b = alignment(g->b, key.stride_b, g->dtype);
    key.align_c = alignment(g->c, key.stride_c, g->c_dtype);
    key.align_bias = g->biased ? alignment(g->bias, 0, g->c_dtype) : 0;
    return key;
}

/** A product in cuBLASLt's words: its `a` is our B. */
struct described {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
};

cublasStatus_t set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what, const void *value, size_t size)
{
    return cublasLtMatmulDescSetAttribute(d, what, value, size);
}

/** A column-major matrix of @rows x @cols, and those of its batch. */
cublasStatus_t layout(cublasLtMatrixLayoutOpaque_t *l, cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld,
                      int64_t batch, int64_t stride)
{
    int32_t count = (int32_t)batch;
    cublasStatus_t s = cublasLtMatrixLayoutInit(l, type, (uint64_t)rows, (uint64_t)cols, ld);
    if (batch == 1 || s != CUBLAS_STATUS_SUCCESS) return s;
    s = cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    return cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
}

#define BLAS_TRY(call) \
    do { \
        cublasStatus_t status_ = (call); \
        if (status_ != CUBLAS_STATUS_SUCCESS) return status_; \
    } while (0)

/** Fill *d in for the product @g. */
cublasStatus_t describe(const peri_op_gemm *g, described *d)
{
    const bool wide = g->dtype == PERI_F64, tf32 = g->tf32 && g->dtype == PERI_F32;
    cublasComputeType_t compute = wide ? CUBLAS_COMPUTE_64F : tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasOperation_t a = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, b = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cudaDataType_t type = type_of(g->dtype);
    BLAS_TRY(cublasLtMatmulDescInit(&d->product, compute, wide ? CUDA_R_64F : CUDA_R_32F));
    BLAS_TRY(set(&d->product, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a));
    BLAS_TRY(set(&d->product, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b));
    if (g->biased) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        BLAS_TRY(set(&d->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
        BLAS_TRY(set(&d->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    }
    BLAS_TRY(layout(&d->a, type, g->trans_b ? g->k : g->n, g->trans_b ? g->n : g->k, g->ldb, g->batch, g->stride_b));
    BLAS_TRY(layout(&d->b, type, g->trans_a ? g->m : g->k, g->trans_a ? g->k : g->m, g->lda, g->batch, g->stride_a));
    return layout(&d->c, type_of(g->c_dtype), g->n, g->m, g->ldc, g->batch, g->stride_c);
}

cublasStatus_t limit(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what, uint64_t value,
                     size_t size)
{
    uint32_t narrow = (uint32_t)value;
    return cublasLtMatmulPreferenceSetAttribute(p, what, size == 4 ? (const void *)&narrow : &value, size);
}

/** What an algorithm may use for products of kind @key: so much scratch memory, no sums in 16 bits, and no better
 *  alignment than the operands have. */
cublasStatus_t limits(const kind *key, cublasLtMatmulPreference_t p)
{
    const bool wide = key->c_dtype == PERI_F32 || key->c_dtype == PERI_F64;
    /* not in 16 bits */
    const uint32_t sums = wide ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    BLAS_TRY(limit(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_MOST, 8));
    BLAS_TRY(limit(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, sums, 4));
    BLAS_TRY(limit(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint64_t)key->align_b, 4));
    BLAS_TRY(limit(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint64_t)key->align_a, 4));
    BLAS_TRY(limit(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint64_t)key->align_c, 4));
    return limit(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint64_t)key->align_c, 4);
}

/** The algorithm that the library suggests first for these numbers; found is false where it has none. */
choice choose(products *p, const peri_op_gemm *g, const kind &key)
{
    choice c = {};
    described d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t best;
    int count = 0;
    if (describe(g, &d) != CUBLAS_STATUS_SUCCESS ||
        cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS)
        return c;
    if (limits(&key, preference) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoGetHeuristic(p->lt, &d.product, &d.a, &d.b, &d.c, &d.c, preference, 1, &best, &count) ==
            CUBLAS_STATUS_SUCCESS &&
        count > 0 && best.state == CUBLAS_STATUS_SUCCESS) {
        c.found = true;
        c.algorithm = best.algo;
        c.workspace = (int64_t)best.workspaceSize;
    }
    cublasLtMatmulPreferenceDestroy(preference);
    return c;
}

/** The algorithm for the product @g: that which was chosen for the first product of its kind. */
choice chosen(products *p, const peri_op_gemm *g)
{
    const kind key = kind_of(g);
    std::lock_guard<std::mutex> hold(p->lock);
    auto at = p->chosen.find(key);
    if (at == p->chosen.end()) at = p->chosen.emplace(key, choose(p, g, key)).first;
    return at->second;
}

/** Whether cuBLASLt has an algorithm for the product @g. */
bool possible(const peri_op_gemm *g)
{
    products *p = current();
    return p && chosen(p, g).found;
}

/** Bytes of scratch memory that the product @g needs. */
int64_t workspace(const peri_op_gemm *g)
{
    products *p = current();
    return p ? chosen(p, g).workspace : 0;
}

cudaError_t product(const peri_op_gemm *g, const peri_cuda_call *call)
{
    products *p = (products *)call->blas;
    const choice c = chosen(p, g);
    if (!c.found || c.workspace > call->bytes) return cudaErrorNotSupported;
    described d;
    PERI_CUDA_TRY(error_of(describe(g, &d)));
    const float alpha = (float)g->alpha, beta = (float)g->beta;
    const bool wide = g->dtype == PERI_F64;
    return error_of(cublasLtMatmul(p->lt, &d.product, wide ? (const void *)&g->alpha : &alpha, g->b, &d.a, g->a, &d.b,
                                   wide ? (const void *)&g->beta : &beta, g->c, &d.c, g->c, &d.c, &c.algorithm,
                                   call->scratch, (size_t)c.workspace, call->stream));
}

} // namespace

cudaError_t peri_cuda_blas_new(void **out)
{
    int device = -1;
    PERI_CUDA_TRY(cudaGetDevice(&device));
    if (device < 0 || device >= DEVICES_MOST) return cudaErrorInvalidDevice;
    products *p = new (std::nothrow) products;
    if (!p) return cudaErrorMemoryAllocation;
    cudaError_t error = error_of(cublasLtCreate(&p->lt));
    if (error == cudaSuccess) *out = of_device[device] = p;
    else delete p;
    return error;
}

void peri_cuda_blas_delete(void *blas)
{
    products *p = (products *)blas;
    if (!p) return;
    for (products *&at : of_device)
        if (at == p) at = nullptr;
    cublasLtDestroy(p->lt);
    delete p;
}
#endif

namespace {

/** A product of nothing: C = beta * C. */
struct scale_one {
    peri_op_gemm g;
    __device__ void operator()(int64_t i) const
    {
        int64_t row = i / g.n, at = row / g.m * g.stride_c + row % g.m * g.ldc + i % g.n;
        peri_value v = {};
        if (g.beta != 0) v.re = g.beta * peri_load(g.c, at, g.c_dtype).re;
        peri_store(g.c, at, g.c_dtype, v);
    }
};

bool empty(const peri_op_gemm *g) { return g->m == 0 || g->n == 0 || g->k == 0 || g->batch == 0; }

} // namespace

bool peri_cuda_has_gemm(const peri_op_gemm *g)
{
    const int64_t most = INT32_MAX;
    if (g->ordered) return false;
    const bool narrow = g->dtype == PERI_F16 || g->dtype == PERI_BF16;
    if (!narrow && g->dtype != PERI_F32 && g->dtype != PERI_F64) return false;
    if (g->c_dtype != g->dtype && !(narrow && g->c_dtype == PERI_F32)) return false;
    if (g->biased && (g->batch != 1 || g->alpha != 1 || g->beta != 0)) return false;
    if (g->m > most || g->n > most || g->k > most || g->lda > most || g->ldb > most || g->ldc > most || g->batch > most)
        return false;
    return empty(g) ? !g->biased : possible(g);
}

PERI_CUDA_SCRATCH(gemm) { return empty(a) ? 0 : workspace(a); }

PERI_CUDA_OP(gemm) { return empty(a) ? each(0, a->batch * a->m * a->n, c, scale_one{*a}) : product(a, c); }
