/* SPDX-License-Identifier: Apache-2.0
 *
 * interaction.cu: pairwise dot products (kernels/dense.h). A block a sample: its vectors come to shared memory once, in
 * rows that are one number longer than they need be, so that threads with neighbouring vectors read neighbouring banks.
 * Samples too large for it are read in place.
 */
#include "cuda.h"
#include "functions.cuh"

namespace {

enum { SHARED_MOST = 48 << 10 /* what a kernel gets without asking */ };

/** The vectors of a sample: 0 is its row of dense. */
template <class T> struct vectors {
    const T *first, *rest; /* vector 0; vector 1 */
    int64_t step;          /* from one vector to the next */
    __device__ __forceinline__ const T *at(int64_t i) const { return i ? rest + (i - 1) * step : first; }
};

/** @shared: room for (features + 1) x (dim + 1), or NULL. All threads call it. */
template <class T, class A> __device__ vectors<T> load_vectors(const A &a, int64_t b, T *shared)
{
    const T *dense = (const T *)a.dense + b * a.dense_stride, *sparse = (const T *)a.sparse + b * a.sparse_stride;
    if (!shared) return {dense, sparse, a.feature_stride};
    for (int64_t k = threadIdx.x; k < (a.features + 1) * a.dim; k += blockDim.x) {
        int64_t i = k / a.dim, d = k - i * a.dim;
        shared[i * (a.dim + 1) + d] = i ? sparse[(i - 1) * a.feature_stride + d] : dense[d];
    }
    __syncthreads();
    return {shared, shared + a.dim + 1, a.dim + 1};
}

/** Place of pair (i, j), i < j, among the products of vectors 0..features. */
__device__ __forceinline__ int64_t pair_at(int64_t i, int64_t j, int64_t features)
{
    return i * features - i * (i - 1) / 2 + j - i - 1;
}

template <class T>
__global__ void __launch_bounds__(PERI_BLOCK)
    products(peri_k_interaction_args a, bool staged, int64_t begin, int64_t end)
{
    PERI_SHARED_DYNAMIC(T, room);
    const int64_t pairs = a.features * (a.features + 1) / 2;
    for (int64_t b = begin + blockIdx.x; b < end; b += gridDim.x) {
        vectors<T> v = load_vectors<T>(a, b, staged ? room : (T *)NULL);
        T *y = (T *)a.y + b * (a.dim + pairs);
        for (int64_t d = threadIdx.x; d < a.dim; d += blockDim.x) y[d] = v.at(0)[d];
        for (int64_t k = threadIdx.x; k < (a.features + 1) * (a.features + 1); k += blockDim.x) {
            int64_t i = k / (a.features + 1), j = k - i * (a.features + 1);
            if (j <= i) continue;
            const T *x = v.at(i), *z = v.at(j);
            T part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            int64_t d = 0;
            for (; d + 8 <= a.dim; d += 8) {
                PERI_UNROLL
                for (int n = 0; n < 8; n++) part[n] = peri_fma(x[d + n], z[d + n], part[n]);
            }
            PERI_UNROLL
            /* each sum has a register: an index that is not known here would put them into local memory */
            for (int n = 0; n < 8; n++)
                if (d + n < a.dim) part[n] = peri_fma(x[d + n], z[d + n], part[n]);
            y[a.dim + pair_at(i, j, a.features)] =
                ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
        }
        __syncthreads(); /* the next sample's vectors take the room */
    }
}

template <class T>
__global__ void __launch_bounds__(PERI_BLOCK)
    gradients(peri_k_interaction_grad_args a, bool staged, int64_t begin, int64_t end)
{
    PERI_SHARED_DYNAMIC(T, room);
    for (int64_t b = begin + blockIdx.x; b < end; b += gridDim.x) {
        vectors<T> v = load_vectors<T>(a, b, staged ? room : (T *)NULL);
        const T *dy = (const T *)a.dy + b * a.dy_stride, *g = dy + a.dim;
        for (int64_t k = threadIdx.x; k < (a.features + 1) * a.dim; k += blockDim.x) {
            int64_t i = k / a.dim, d = k - i * a.dim;
            T sum = i ? T(0) : dy[d];
            for (int64_t j = 0; j < i; j++) sum = peri_fma(v.at(j)[d], g[pair_at(j, i, a.features)], sum);
            for (int64_t j = i + 1; j <= a.features; j++) sum = peri_fma(v.at(j)[d], g[pair_at(i, j, a.features)], sum);
            if (i == 0 && a.ddense) ((T *)a.ddense)[b * a.dim + d] = sum;
            if (i > 0 && a.dsparse) ((T *)a.dsparse)[(b * a.features + i - 1) * a.dim + d] = sum;
        }
        __syncthreads();
    }
}

template <class T, class A>
cudaError_t by_samples(void (*kernel)(A, bool, int64_t, int64_t), const A *a, int64_t begin, int64_t end,
                       const peri_cuda_call *c)
{
    if (begin >= end) return cudaSuccess;
    int64_t bytes = (a->features + 1) * (a->dim + 1) * (int64_t)sizeof(T);
    bool staged = bytes <= SHARED_MOST;
    return peri_cuda_launch(kernel, peri_cuda_grid(end - begin, 1, c, 32), PERI_BLOCK, staged ? (size_t)bytes : 0, c,
                            *a, staged, begin, end);
}

} // namespace

PERI_CUDA_KERNEL(interaction)
{
    return a->dtype == PERI_F64 ? by_samples<double>(products<double>, a, begin, end, c)
                                : by_samples<float>(products<float>, a, begin, end, c);
}

PERI_CUDA_KERNEL(interaction_grad)
{
    if (a->dtype == PERI_F64) return by_samples<double>(gradients<double>, a, begin, end, c);
    return by_samples<float>(gradients<float>, a, begin, end, c);
}
