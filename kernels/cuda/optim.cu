/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.cu: kernels/optim.h: a thread an element; norms are sums in double whose order the sizes fix.
 */
#include "cuda.h"
#include "functions.cuh"
#include "scan.cuh"

namespace {

/** The gradient with its sign and weight decay. */
template <class T, class A> __device__ __forceinline__ T decayed(const A &a, int64_t i, double weight_decay)
{
    T g = ((const T *)a.g)[i];
    return (a.maximize ? -g : g) + (T)weight_decay * ((const T *)a.w)[i];
}

template <class T> struct sgd_one {
    peri_k_optim_sgd_args a;
    __device__ void operator()(int64_t i) const
    {
        T g = decayed<T>(a, i, a.weight_decay), *w = (T *)a.w, *buffer = (T *)a.momentum_buffer;
        if (buffer) {
            T m = a.first ? g : (T)a.momentum * buffer[i] + (T)(1 - a.dampening) * g;
            buffer[i] = m;
            g = a.nesterov ? g + (T)a.momentum * m : m;
        }
        w[i] -= (T)a.lr * g;
    }
};

template <class T> struct adagrad_one {
    peri_k_optim_adagrad_args a;
    __device__ void operator()(int64_t i) const
    {
        T g = decayed<T>(a, i, a.weight_decay), sum = ((const T *)a.sum)[i] + g * g;
        ((T *)a.sum)[i] = sum;
        ((T *)a.w)[i] -= (T)a.lr * g / (peri_sqrt(sum) + (T)a.eps);
    }
};

template <class T> struct adam_one {
    peri_k_optim_adam_args a;
    __device__ void operator()(int64_t i) const
    {
        T w = ((const T *)a.w)[i], m = ((const T *)a.m)[i], v = ((const T *)a.v)[i];
        T g = decayed<T>(a, i, a.decoupled ? 0 : a.weight_decay);
        if (a.decoupled) w *= (T)(1 - a.lr * a.weight_decay);
        m += (T)(1 - a.beta1) * (g - m);
        v = (T)a.beta2 * v + (T)(1 - a.beta2) * g * g;
        ((T *)a.m)[i] = m;
        ((T *)a.v)[i] = v;
        if (a.most) {
            T most = ((const T *)a.most)[i];
            v = v > most ? v : most;
            ((T *)a.most)[i] = v;
        }
        ((T *)a.w)[i] = w - (T)a.step_size * m / (peri_sqrt(v) / (T)a.root + (T)a.eps);
    }
};

template <class T> struct rmsprop_one {
    peri_k_optim_rmsprop_args a;
    __device__ void operator()(int64_t i) const
    {
        T g = decayed<T>(a, i, a.weight_decay), v = (T)a.alpha * ((const T *)a.v)[i] + (T)(1 - a.alpha) * g * g, d = v;
        ((T *)a.v)[i] = v;
        if (a.average) {
            T average = ((const T *)a.average)[i];
            average += (T)(1 - a.alpha) * (g - average);
            ((T *)a.average)[i] = average;
            d = v - average * average;
        }
        T update = g / (peri_sqrt(d) + (T)a.eps);
        if (a.momentum_buffer) {
            update += (T)a.momentum * ((const T *)a.momentum_buffer)[i];
            ((T *)a.momentum_buffer)[i] = update;
        }
        ((T *)a.w)[i] -= (T)a.lr * update;
    }
};

/** A warp a row. */
template <class T> struct rowwise_row {
    peri_k_optim_rowwise_adagrad_args a;
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        double squares = 0;
        for (int64_t k = lane; k < a.cols; k += 32) {
            double g = (double)decayed<T>(a, r * a.cols + k, a.weight_decay);
            squares += g * g;
        }
        squares = peri_group_sum<32>(squares, mask);
        double sum = (double)((const T *)a.sum)[r] + (a.cols ? squares / (double)a.cols : 0);
        T scale = (T)(a.lr / (sqrt(sum) + a.eps));
        __syncwarp(mask); /* all have read the old sum */
        if (lane == 0) ((T *)a.sum)[r] = (T)sum;
        for (int64_t k = lane; k < a.cols; k += 32) ((T *)a.w)[r * a.cols + k] -= scale * decayed<T>(a, r * a.cols + k, a.weight_decay);
    }
};

struct add {
    __device__ double operator()(double x, double y) const { return x + y; }
};
/** NaN is the largest. */
struct larger {
    __device__ double operator()(double x, double y) const { return y > x || y != y ? y : x; }
};

/** A block of threads a block of elements. */
template <class T> __global__ void __launch_bounds__(PERI_BLOCK) partial_norms(peri_k_norm_partial_args a, int64_t begin, int64_t end)
{
    const bool most = isinf(a.p);
    for (int64_t k = begin + blockIdx.x; k < end; k += gridDim.x) {
        int64_t last = (k + 1) * PERI_NORM_BLOCK < a.n ? (k + 1) * PERI_NORM_BLOCK : a.n;
        double sum = 0;
        for (int64_t i = k * PERI_NORM_BLOCK + threadIdx.x; i < last; i += PERI_BLOCK) {
            double x = fabs((double)((const T *)a.x)[i]);
            if (most) sum = larger()(sum, x);
            else sum += a.p == 2 ? x * x : a.p == 1 ? x : pow(x, a.p);
        }
        sum = most ? peri_block_combine(sum, larger()) : peri_block_combine(sum, add());
        if (threadIdx.x == 0) a.partial[k] = sum;
    }
}

/** One block. */
__global__ void __launch_bounds__(PERI_BLOCK) finish_norm(peri_k_norm_finish_args a)
{
    const bool most = isinf(a.p);
    double sum = 0;
    for (int64_t k = threadIdx.x; k < a.count; k += PERI_BLOCK) sum = most ? larger()(sum, a.partial[k]) : sum + a.partial[k];
    sum = most ? peri_block_combine(sum, larger()) : peri_block_combine(sum, add());
    if (threadIdx.x != 0) return;
    a.out[0] = !a.root || most ? sum : a.p == 2 ? sqrt(sum) : a.p == 1 ? sum : pow(sum, 1 / a.p);
}

template <class T> struct clip_norm_one {
    peri_k_clip_norm_args a;
    __device__ void operator()(int64_t i) const
    {
        double factor = a.limit / (a.norm[0] + 1e-6);
        ((T *)a.x)[i] *= (T)(factor > 1 ? 1 : factor);
    }
};

template <class T> struct clip_value_one {
    peri_k_clip_value_args a;
    __device__ void operator()(int64_t i) const
    {
        T x = ((const T *)a.x)[i], limit = (T)a.limit;
        ((T *)a.x)[i] = x > limit ? limit : x < -limit ? -limit : x;
    }
};

} // namespace

/** The same functor in float or double. */
#define BY_DTYPE(call, name) (a->dtype == PERI_F64 ? call(begin, end, c, name<double>{*a}) : call(begin, end, c, name<float>{*a}))

PERI_CUDA_KERNEL(optim_sgd) { return BY_DTYPE(each, sgd_one); }
PERI_CUDA_KERNEL(optim_adagrad) { return BY_DTYPE(each, adagrad_one); }
PERI_CUDA_KERNEL(optim_adam) { return BY_DTYPE(each, adam_one); }
PERI_CUDA_KERNEL(optim_rmsprop) { return BY_DTYPE(each, rmsprop_one); }
PERI_CUDA_KERNEL(optim_rowwise_adagrad) { return BY_DTYPE(each_warp, rowwise_row); }
PERI_CUDA_KERNEL(clip_norm) { return BY_DTYPE(each, clip_norm_one); }
PERI_CUDA_KERNEL(clip_value) { return BY_DTYPE(each, clip_value_one); }

PERI_CUDA_KERNEL(norm_partial)
{
    if (begin >= end) return cudaSuccess;
    unsigned grid = peri_cuda_grid(end - begin, 1, c);
    if (a->dtype == PERI_F64) return peri_cuda_launch(partial_norms<double>, grid, PERI_BLOCK, 0, c, *a, begin, end);
    return peri_cuda_launch(partial_norms<float>, grid, PERI_BLOCK, 0, c, *a, begin, end);
}

PERI_CUDA_SCRATCH(norm_finish)
{
    (void)a;
    return 0;
}

PERI_CUDA_OP(norm_finish) { return peri_cuda_launch(finish_norm, 1, PERI_BLOCK, 0, c, *a); }
