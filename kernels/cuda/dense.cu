/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.cu: the elementwise part of kernels/dense.h, by packs of 16 bytes where arrays are laid out alike (vector.cuh);
 * dropout and the losses: a thread an element.
 */
#include "cuda.h"
#include "functions.cuh"
#include "random.cuh"
#include "rows.cuh"
#include "vector.cuh"

namespace {

/* -- functions of one or more arrays that are laid out alike ------------------------------------------------------- */

/** Packs of a thread: their loads are in flight together. */
enum { PACKS = 2 };

/** F: `element`, INPUTS, in(k), out(), and number operator()(const number (&x)[INPUTS]), of one element of each input.
 *  Elements [begin, end): packs, which are aligned, and then fewer than a pack. */
template <class F> __global__ void __launch_bounds__(PERI_BLOCK) packs_kernel(F f, int64_t begin, int64_t end)
{
    typedef typename F::element E;
    typedef PERI_COMPUTED(E) number;
    const int N = peri_pack<E>::N, INPUTS = F::INPUTS;
    const int64_t packs = (end - begin) / N, size = PACKS * PERI_BLOCK;
    for (int64_t first = blockIdx.x * size + threadIdx.x; first < packs; first += gridDim.x * size) {
        peri_pack<E> in[PACKS][F::INPUTS];
        PERI_UNROLL
        for (int q = 0; q < PACKS; q++) {
            if (first + q * PERI_BLOCK >= packs) continue;
            PERI_UNROLL
            for (int k = 0; k < INPUTS; k++)
                in[q][k] = peri_load_pack<E>((const typename E::type *)f.in(k) + begin + (first + q * PERI_BLOCK) * N,
                                             N, true);
        }
        PERI_UNROLL
        for (int q = 0; q < PACKS; q++) {
            number x[F::INPUTS][peri_pack<E>::N], y[peri_pack<E>::N];
            if (first + q * PERI_BLOCK >= packs) break;
            PERI_UNROLL
            for (int k = 0; k < INPUTS; k++) peri_unpack<E>(in[q][k], x[k]);
            PERI_UNROLL
            for (int j = 0; j < N; j++) {
                number one[F::INPUTS];
                PERI_UNROLL
                for (int k = 0; k < INPUTS; k++) one[k] = x[k][j];
                y[j] = f(one);
            }
            peri_store_pack<E>((typename E::type *)f.out() + begin + (first + q * PERI_BLOCK) * N, N, true,
                               peri_to_pack<E>(y));
        }
    }
    if (blockIdx.x == 0 && (int64_t)threadIdx.x < end - begin - packs * N) f.one(begin + packs * N + threadIdx.x);
}

/** Element i of F. */
template <class F> struct numbers {
    F f;
    __device__ void operator()(int64_t i) const { f.one(i); }
};

template <class F> cudaError_t map(int64_t begin, int64_t end, const peri_cuda_call *c, F f)
{
    uint64_t bits = (uint64_t)f.out();
    for (int k = 0; k < F::INPUTS; k++) bits |= (uint64_t)f.in(k);
    bits |= (uint64_t)begin * sizeof(typename F::element::type);
    if (begin >= end) return cudaSuccess;
    if (bits % 16 != 0) return each(begin, end, c, numbers<F>{f});
    const int64_t size = PACKS * PERI_BLOCK * peri_pack<typename F::element>::N;
    return peri_cuda_launch(packs_kernel<F>, peri_cuda_grid(end - begin, size, c, 1 << 12), PERI_BLOCK, 0, c, f, begin,
                            end);
}

/** What all have in common: element i by itself. */
#define ONE_BY_ONE \
    __device__ __forceinline__ void one(int64_t i) const \
    { \
        number x[INPUTS]; \
        PERI_UNROLL \
        for (int k = 0; k < INPUTS; k++) x[k] = E::load((const typename E::type *)in(k), i); \
        E::store((typename E::type *)out(), i, (*this)(x)); \
    }

#define BOTH __host__ __device__ __forceinline__

template <class E> struct axpy_map {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    enum { INPUTS = 2 };
    peri_k_axpy_args a;
    BOTH const void *in(int k) const { return k ? a.x : a.y; }
    BOTH void *out() const { return a.y; }
    __device__ __forceinline__ number operator()(const number (&x)[2]) const { return x[0] + (number)a.alpha * x[1]; }
    ONE_BY_ONE
};

template <class E> struct muladd_map {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    enum { INPUTS = 3 };
    peri_k_muladd_args a;
    BOTH const void *in(int k) const { return k == 0 ? a.a : k == 1 ? a.b : a.c; }
    BOTH void *out() const { return a.dst; }
    __device__ __forceinline__ number operator()(const number (&x)[3]) const
    {
        return x[0] * x[1] + x[2] * (number)a.scale;
    }
    ONE_BY_ONE
};

/** OP: the function, or -1: a.op, which each element asks for. */
template <class E, int OP> struct unary_map {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    enum { INPUTS = 1 };
    peri_k_unary_args a;
    BOTH const void *in(int) const { return a.x; }
    BOTH void *out() const { return a.dst; }
    __device__ __forceinline__ number operator()(const number (&x)[1]) const
    {
        return peri_f(OP < 0 ? a.op : OP, x[0], (number)a.a, (number)a.b);
    }
    ONE_BY_ONE
};

/** READS: the derivative is a function of what was saved. */
template <class E, int OP, bool READS> struct unary_grad_map {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    enum { INPUTS = READS ? 2 : 1 };
    peri_k_unary_grad_args a;
    BOTH const void *in(int k) const { return k ? a.saved : a.dy; }
    BOTH void *out() const { return a.dx; }
    __device__ __forceinline__ number operator()(const number (&x)[INPUTS]) const
    {
        return peri_chain(OP < 0 ? a.op : OP, x[0], READS ? x[INPUTS - 1] : number(0), (number)a.a, (number)a.b);
    }
    ONE_BY_ONE
};

template <class E, int OP> struct binary_map {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    enum { INPUTS = 2 };
    peri_k_binary_args a;
    BOTH const void *in(int k) const { return k ? a.b : a.a; }
    BOTH void *out() const { return a.dst; }
    __device__ __forceinline__ number operator()(const number (&x)[2]) const { return peri_both(OP, x[0], x[1]); }
    ONE_BY_ONE
};

/* -- arithmetic of arrays that are laid out otherwise -------------------------------------------------------------- */

/** Where both operands of an operation have an element. */
struct operands {
    int64_t a, b;
};

/** Of element @i of the result's dimensions 0 to @last. */
__device__ __forceinline__ operands operands_at(const peri_k_binary_args &args, int32_t last, int64_t i)
{
    operands at = {0, 0};
    for (int32_t d = last; d >= 0; d--) {
        const int64_t next = i / args.shape[d], place = i - next * args.shape[d];
        i = next;
        at.a += place * args.a_stride[d];
        at.b += place * args.b_stride[d];
    }
    return at;
}

/** Row @row of the result, a row being the last dimension: where it begins in both operands is divided out once. */
template <class E> struct binary_row {
    peri_k_binary_args a;
    __device__ void operator()(int64_t row, int64_t lane, int64_t lanes) const
    {
        typedef PERI_COMPUTED(E) number;
        const int32_t last = a.ndim - 1;
        const int64_t cols = a.shape[last], sa = a.a_stride[last], sb = a.b_stride[last];
        const operands at = operands_at(a, last - 1, row);
        for (int64_t c = lane; c < cols; c += lanes) {
            const number x = E::load((const typename E::type *)a.a, at.a + c * sa);
            const number y = E::load((const typename E::type *)a.b, at.b + c * sb);
            E::store((typename E::type *)a.dst, row * cols + c, peri_both(a.op, x, y));
        }
    }
};

/** The same, element by element. */
template <class E> struct binary_one {
    peri_k_binary_args a;
    __device__ void operator()(int64_t i) const
    {
        const operands at = operands_at(a, a.ndim - 1, i);
        const PERI_COMPUTED(E) x = E::load((const typename E::type *)a.a, at.a),
                               y = E::load((const typename E::type *)a.b, at.b);
        E::store((typename E::type *)a.dst, i, peri_both(a.op, x, y));
    }
};

/** The same of the functions after PERI_BINARY_LAST_PLAIN, in f64 as ref computes them. */
template <class E> struct binary_rare {
    peri_k_binary_args a;
    __device__ void operator()(int64_t i) const
    {
        const operands at = operands_at(a, a.ndim - 1, i);
        typedef PERI_COMPUTED(E) number;
        const number x = E::load((const typename E::type *)a.a, at.a), y = E::load((const typename E::type *)a.b, at.b);
        E::store((typename E::type *)a.dst, i, (number)peri_binary_rare(a.op, (double)x, (double)y));
    }
};

template <class T> struct dropout_one {
    peri_k_dropout_args a;
    __device__ void operator()(int64_t i) const
    {
        const uint64_t seed = a.drawn ? a.drawn[0] : a.seed, stream = a.drawn ? a.drawn[1] : a.random_stream;
        bool keep = peri_random_word(seed, stream, (a.drawn ? a.drawn[2] : a.offset) + (uint64_t)i) >= a.threshold;
        ((T *)a.y)[i] = keep ? ((const T *)a.x)[i] * (T)a.scale : T(0);
    }
};

/* -- losses -------------------------------------------------------------------------------------------------------- */

template <class T> struct loss_one {
    peri_k_loss_args a;
    __device__ void operator()(int64_t i) const
    {
        T x = ((const T *)a.x)[i], t = ((const T *)a.t)[i], l;
        T w = a.weight ? ((const T *)a.weight)[i] : T(1), p = a.pos_weight ? ((const T *)a.pos_weight)[i] : T(1);
        if (a.kind == PERI_LOSS_KIND_BCE_LOGITS) {
            l = (T(1) - t) * x + (T(1) + (p - T(1)) * t) * peri_softplus(-x);
        } else if (a.kind == PERI_LOSS_KIND_BCE) {
            T yes = peri_log(x), no = peri_log1p(-x);
            l = -(t * (yes > -100 ? yes : T(-100)) + (T(1) - t) * (no > -100 ? no : T(-100)));
            if (!(x >= 0 && x <= 1 && t >= 0 && t <= 1)) l = (T)NAN;
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
        if (a.kind == PERI_LOSS_KIND_BCE_LOGITS) {
            d = (T(1) - t) - (T(1) + (p - T(1)) * t) * peri_sigmoid(-x);
        } else if (a.kind == PERI_LOSS_KIND_BCE) {
            T v = x * (T(1) - x);
            d = (x - t) / (v > T(1e-12) || v != v ? v : T(1e-12));
        } else {
            d = T(2) * (x - t);
        }
        ((T *)a.dx)[i] = (T)a.scale * ((const T *)a.g)[i * a.g_stride] * w * d;
    }
};

struct mean_one {
    peri_k_mean_args a;
    __device__ void operator()(int64_t) const
    {
        const double total = a.sum_dtype == PERI_F64 ? ((const double *)a.sum)[0] : (double)((const float *)a.sum)[0];
        const double n = a.count ? a.count[0] : a.number, divisor = n > 1e-30 || n != n ? n : 1e-30;
        if (a.parts) a.parts[0] = total, a.parts[1] = n;
        if (a.value) put(a.value, total / divisor);
        if (a.scale) put(a.scale, a.ranks / divisor);
    }
    __device__ __forceinline__ void put(void *p, double x) const
    {
        if (a.dtype == PERI_F64) *(double *)p = x;
        else *(float *)p = (float)x;
    }
};

bool is_flat(const int64_t *shape, const int64_t *stride, int32_t ndim)
{
    int64_t want = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        if (shape[d] != 1 && stride[d] != want) return false;
        want *= shape[d];
    }
    return true;
}

template <class E>
cudaError_t binary_as(const peri_k_binary_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    if (a->op > PERI_BINARY_LAST_PLAIN) return each(begin, end, c, binary_rare<E>{*a});
    if (is_flat(a->shape, a->a_stride, a->ndim) && is_flat(a->shape, a->b_stride, a->ndim)) {
        switch (a->op) {
        case PERI_BINARY_ADD: return map(begin, end, c, binary_map<E, PERI_BINARY_ADD>{*a});
        case PERI_BINARY_SUB: return map(begin, end, c, binary_map<E, PERI_BINARY_SUB>{*a});
        case PERI_BINARY_MUL: return map(begin, end, c, binary_map<E, PERI_BINARY_MUL>{*a});
        case PERI_BINARY_MAX: return map(begin, end, c, binary_map<E, PERI_BINARY_MAX>{*a});
        case PERI_BINARY_MIN: return map(begin, end, c, binary_map<E, PERI_BINARY_MIN>{*a});
        default: return map(begin, end, c, binary_map<E, PERI_BINARY_DIV>{*a});
        }
    }
    const int64_t cols = a->ndim > 0 ? a->shape[a->ndim - 1] : 1;
    if (cols >= 32 && begin % cols == 0 && end % cols == 0)
        return each_row(begin / cols, end / cols, cols, c, binary_row<E>{*a});
    return each(begin, end, c, binary_one<E>{*a});
}

template <class E> cudaError_t unary_as(const peri_k_unary_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->op) {
    case PERI_UNARY_RELU: return map(begin, end, c, unary_map<E, PERI_UNARY_RELU>{*a});
    case PERI_UNARY_SIGMOID: return map(begin, end, c, unary_map<E, PERI_UNARY_SIGMOID>{*a});
    case PERI_UNARY_AFFINE: return map(begin, end, c, unary_map<E, PERI_UNARY_AFFINE>{*a});
    default: return each(begin, end, c, numbers<unary_map<E, -1>>{unary_map<E, -1>{*a}});
    }
}

template <class E>
cudaError_t unary_grad_as(const peri_k_unary_grad_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->op) {
    case PERI_UNARY_RELU: return map(begin, end, c, unary_grad_map<E, PERI_UNARY_RELU, true>{*a});
    case PERI_UNARY_SIGMOID: return map(begin, end, c, unary_grad_map<E, PERI_UNARY_SIGMOID, true>{*a});
    case PERI_UNARY_IDENTITY:
    case PERI_UNARY_AFFINE: return map(begin, end, c, unary_grad_map<E, -1, false>{*a});
    default: return each(begin, end, c, numbers<unary_grad_map<E, -1, true>>{unary_grad_map<E, -1, true>{*a}});
    }
}

} // namespace

/** The same functor in float or double. */
#define BY_DTYPE(call, name)                                                                                           \
    (a->dtype == PERI_F64 ? call(begin, end, c, name<double>{*a}) : call(begin, end, c, name<float>{*a}))

/** The same for numbers of each dtype. */
#define BY_ELEMENT(call) \
    (a->dtype == PERI_F64    ? call(peri_f64) \
     : a->dtype == PERI_F16  ? call(peri_f16) \
     : a->dtype == PERI_BF16 ? call(peri_bf16) \
                             : call(peri_f32))
#define AXPY(E) map(begin, end, c, axpy_map<E>{*a})
#define MULADD(E) map(begin, end, c, muladd_map<E>{*a})
#define UNARY(E) unary_as<E>(a, begin, end, c)
#define UNARY_GRAD(E) unary_grad_as<E>(a, begin, end, c)
#define BINARY(E) binary_as<E>(a, begin, end, c)

PERI_CUDA_KERNEL(axpy) { return BY_ELEMENT(AXPY); }
PERI_CUDA_KERNEL(muladd) { return BY_ELEMENT(MULADD); }
PERI_CUDA_KERNEL(unary) { return BY_ELEMENT(UNARY); }
PERI_CUDA_KERNEL(unary_grad) { return BY_ELEMENT(UNARY_GRAD); }
PERI_CUDA_KERNEL(binary) { return BY_ELEMENT(BINARY); }
PERI_CUDA_KERNEL(dropout) { return BY_DTYPE(each, dropout_one); }
PERI_CUDA_KERNEL(loss) { return BY_DTYPE(each, loss_one); }
PERI_CUDA_KERNEL(loss_grad) { return BY_DTYPE(each, loss_grad_one); }
PERI_CUDA_KERNEL(mean) { return each(begin, end, c, mean_one{*a}); }
