/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.cu: the elementwise part of kernels/dense.h and the losses: a thread an element, in its own dtype.
 */
#include "cuda.h"
#include "functions.cuh"
#include "random.cuh"
#include "rows.cuh"

namespace {

template <class T> struct axpy_one {
    peri_k_axpy_args a;
    __device__ void operator()(int64_t i) const { ((T *)a.y)[i] += (T)a.alpha * ((const T *)a.x)[i]; }
};

template <class T> struct unary_one {
    peri_k_unary_args a;
    __device__ void operator()(int64_t i) const { ((T *)a.dst)[i] = peri_f(a.op, ((const T *)a.x)[i], (T)a.a, (T)a.b); }
};

template <class T> struct unary_grad_one {
    peri_k_unary_grad_args a;
    __device__ void operator()(int64_t i) const
    {
        T s = peri_reads_saved(a.op) ? ((const T *)a.saved)[i] : T(0);
        ((T *)a.dx)[i] = ((const T *)a.dy)[i] * peri_df(a.op, s, (T)a.a);
    }
};

template <class T> __device__ __forceinline__ T combine(int32_t op, T x, T y)
{
    return op == PERI_BINARY_ADD ? x + y : op == PERI_BINARY_SUB ? x - y : op == PERI_BINARY_MUL ? x * y : x / y;
}

/** FLAT: both operands are laid out like the result. */
template <class T, bool FLAT> struct binary_one {
    peri_k_binary_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t rest = i, at_a = i, at_b = i;
        if (!FLAT) {
            at_a = at_b = 0;
            for (int32_t d = a.ndim - 1; d >= 0; d--) {
                int64_t next = rest / a.shape[d], at = rest - next * a.shape[d];
                rest = next;
                at_a += at * a.a_stride[d];
                at_b += at * a.b_stride[d];
            }
        }
        ((T *)a.dst)[i] = combine(a.op, ((const T *)a.a)[at_a], ((const T *)a.b)[at_b]);
    }
};

template <class T> struct muladd_one {
    peri_k_muladd_args a;
    __device__ void operator()(int64_t i) const
    {
        ((T *)a.dst)[i] = ((const T *)a.a)[i] * ((const T *)a.b)[i] + ((const T *)a.c)[i] * (T)a.scale;
    }
};

template <class T> struct dropout_one {
    peri_k_dropout_args a;
    __device__ void operator()(int64_t i) const
    {
        bool keep = peri_random_word(a.seed, a.random_stream, a.offset + (uint64_t)i) >= a.threshold;
        ((T *)a.y)[i] = keep ? ((const T *)a.x)[i] * (T)a.scale : T(0);
    }
};

/* -- losses ---------------------------------------------------------------------------------------------------------------------------- */

template <class T> struct loss_one {
    peri_k_loss_args a;
    __device__ void operator()(int64_t i) const
    {
        T x = ((const T *)a.x)[i], t = ((const T *)a.t)[i], l;
        T w = a.weight ? ((const T *)a.weight)[i] : T(1), p = a.pos_weight ? ((const T *)a.pos_weight)[i] : T(1);
        if (a.kind == PERI_LOSS_BCE_LOGITS) {
            l = (T(1) - t) * x + (T(1) + (p - T(1)) * t) * peri_softplus(-x);
        } else if (a.kind == PERI_LOSS_BCE) {
            T yes = peri_log(x), no = peri_log1p(-x);
            l = -(t * (yes > -100 ? yes : T(-100)) + (T(1) - t) * (no > -100 ? no : T(-100)));
            if (!(x >= 0 && x <= 1)) l = (T)NAN;
        } else {
            l = (x - t) * (x - t);
        }
        ((T *)a.dst)[i] = w * l;
    }
};

template <class T> struct loss_grad_one {
    peri_k_loss_grad_args a;
    __device__ void operator()(int64_t i) const
    {
        T x = ((const T *)a.x)[i], t = ((const T *)a.t)[i], d;
        T w = a.weight ? ((const T *)a.weight)[i] : T(1), p = a.pos_weight ? ((const T *)a.pos_weight)[i] : T(1);
        if (a.kind == PERI_LOSS_BCE_LOGITS) {
            d = (T(1) - t) - (T(1) + (p - T(1)) * t) * peri_sigmoid(-x);
        } else if (a.kind == PERI_LOSS_BCE) {
            T v = x * (T(1) - x);
            d = (x - t) / (v > T(1e-12) || v != v ? v : T(1e-12));
        } else {
            d = T(2) * (x - t);
        }
        ((T *)a.dx)[i] = (T)a.scale * ((const T *)a.g)[i * a.g_stride] * w * d;
    }
};

bool flat(const int64_t *shape, const int64_t *stride, int32_t ndim)
{
    int64_t want = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        if (shape[d] != 1 && stride[d] != want) return false;
        want *= shape[d];
    }
    return true;
}

} // namespace

/** The same functor in float or double. */
#define BY_DTYPE(call, name) (a->dtype == PERI_F64 ? call(begin, end, c, name<double>{*a}) : call(begin, end, c, name<float>{*a}))

PERI_CUDA_KERNEL(axpy) { return BY_DTYPE(each, axpy_one); }
PERI_CUDA_KERNEL(unary) { return BY_DTYPE(each, unary_one); }
PERI_CUDA_KERNEL(unary_grad) { return BY_DTYPE(each, unary_grad_one); }
PERI_CUDA_KERNEL(muladd) { return BY_DTYPE(each, muladd_one); }
PERI_CUDA_KERNEL(dropout) { return BY_DTYPE(each, dropout_one); }
PERI_CUDA_KERNEL(loss) { return BY_DTYPE(each, loss_one); }
PERI_CUDA_KERNEL(loss_grad) { return BY_DTYPE(each, loss_grad_one); }

PERI_CUDA_KERNEL(binary)
{
    if (flat(a->shape, a->a_stride, a->ndim) && flat(a->shape, a->b_stride, a->ndim)) {
        if (a->dtype == PERI_F64) return each(begin, end, c, binary_one<double, true>{*a});
        return each(begin, end, c, binary_one<float, true>{*a});
    }
    if (a->dtype == PERI_F64) return each(begin, end, c, binary_one<double, false>{*a});
    return each(begin, end, c, binary_one<float, false>{*a});
}
