/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.cu: kernels/convert.h. A thread an element; consecutive threads have consecutive elements of the destination.
 */
#include "quad.cuh"
#include "random.cuh"

namespace {

template <class T> struct fill_words {
    T *dst;
    T value;
    __device__ void operator()(int64_t i) const { dst[i] = value; }
};

/** Element i of a row-major index space, at its places in both layouts. */
struct convert_one {
    peri_k_convert_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t rest = i, dst = 0, src = 0;
        for (int32_t d = a.ndim - 1; d >= 0; d--) {
            int64_t next = rest / a.shape[d], at = rest - next * a.shape[d];
            rest = next;
            dst += at * a.dst_stride[d];
            src += at * a.src_stride[d];
        }
        peri_store(a.dst, dst, a.dst_dtype, peri_load(a.src, src, a.src_dtype));
    }
};

/** Both contiguous: elements [begin + 4 q, begin + 4 q + 4), and those @apart quads behind them; both loads are in flight at once. */
template <class D, class S> struct cast_quads {
    typename D::type *dst;
    const typename S::type *src;
    int64_t begin, end, apart;
    __device__ void operator()(int64_t q) const
    {
        const int64_t i = begin + 4 * q, j = i + 4 * apart;
        float4 v[2];
        peri_load_quads<S>(src, i, j, end, v);
        peri_store_quad<D>(dst, i, end, v[0]);
        peri_store_quad<D>(dst, j, end, v[1]);
    }
};

/** Both contiguous, of one dtype of sizeof(T) bytes. */
template <class T> struct copy_one {
    T *dst;
    const T *src;
    __device__ void operator()(int64_t i) const { dst[i] = src[i]; }
};

struct random_one {
    peri_k_random_args a;
    __device__ void operator()(int64_t i) const
    {
        uint64_t index = (uint64_t)((a.row_offset + i / a.cols) * a.total_cols + a.col_offset + i % a.cols);
        peri_value v = {};
        if (a.kind == PERI_RANDOM_UNIFORM) {
            v.re = a.low + (a.high - a.low) * ((double)(peri_random_word(a.seed, a.random_stream, index) >> 8) * 0x1p-24);
        } else {
            double u1 = ((double)peri_random_word(a.seed, a.random_stream, index & ~(uint64_t)1) + 1) * 0x1p-32;
            double angle = 6.283185307179586476925 * ((double)peri_random_word(a.seed, a.random_stream, index | 1) * 0x1p-32);
            v.re = a.low + a.high * sqrt(-2 * log(u1)) * (index & 1 ? sin(angle) : cos(angle));
        }
        peri_store(a.dst, i, a.dtype, v);
    }
};

struct reduce_one {
    peri_k_reduce_args a;
    __device__ static peri_value combine(peri_value x, peri_value y, int32_t reduce, bool wide)
    {
        if (reduce == PERI_REDUCE_SUM) {
            x.i = (int64_t)((uint64_t)x.i + (uint64_t)y.i);
            x.re = wide ? x.re + y.re : (double)((float)x.re + (float)y.re);
            x.im = wide ? x.im + y.im : (double)((float)x.im + (float)y.im);
            return x;
        }
        if (x.integer) return (reduce == PERI_REDUCE_MIN ? y.i < x.i : y.i > x.i) ? y : x;
        if (x.re != x.re) return x;
        return y.re != y.re || (reduce == PERI_REDUCE_MIN ? y.re < x.re : y.re > x.re) ? y : x;
    }
    __device__ void operator()(int64_t i) const
    {
        bool wide = a.dtype == PERI_F64 || a.dtype == PERI_C128;
        peri_value v = peri_load(a.src[0], i, a.dtype);
        for (int32_t k = 1; k < a.n; k++) v = combine(v, peri_load(a.src[k], i, a.dtype), a.reduce, wide);
        peri_store(a.dst, i, a.dtype, v);
    }
};

template <class T> struct divide_one {
    T *dst;
    const T *src;
    T divisor;
    __device__ void operator()(int64_t i) const { dst[i] = src[i] / divisor; }
};

/** The stored form of the value of a fill, made once on the host. */
template <class T> cudaError_t fill_with(const peri_k_fill_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    union {
        T words;
        double2 room; /* for any dtype */
    } word;
    peri_value v = {};
    v.integer = a->dtype >= PERI_I64 && a->dtype <= PERI_BOOL;
    v.i = a->ivalue;
    v.re = a->value;
    peri_store(&word, 0, a->dtype, v);
    return each(begin, end, c, fill_words<T>{(T *)a->dst, word.words});
}

bool contiguous(const int64_t *shape, const int64_t *stride, int32_t ndim)
{
    int64_t want = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        if (shape[d] != 1 && stride[d] != want) return false;
        want *= shape[d];
    }
    return true;
}

template <class T> cudaError_t copied(const peri_k_convert_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return each(begin, end, c, copy_one<T>{(T *)a->dst, (const T *)a->src});
}

template <class D, class S> cudaError_t cast(const peri_k_convert_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    const int64_t pairs = (end - begin + 7) / 8;
    return each(0, pairs, c, cast_quads<D, S>{(typename D::type *)a->dst, (const typename S::type *)a->src, begin, end, pairs});
}

template <class D> cudaError_t cast_from(const peri_k_convert_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->src_dtype) {
    case PERI_F32: return cast<D, peri_f32>(a, begin, end, c);
    case PERI_F16: return cast<D, peri_f16>(a, begin, end, c);
    case PERI_BF16: return cast<D, peri_bf16>(a, begin, end, c);
    default: return each(begin, end, c, convert_one{*a});
    }
}

} // namespace

PERI_CUDA_KERNEL(fill)
{
    switch (peri_dtype_bytes(a->dtype)) {
    case 1: return fill_with<uint8_t>(a, begin, end, c);
    case 2: return fill_with<uint16_t>(a, begin, end, c);
    case 4: return fill_with<uint32_t>(a, begin, end, c);
    case 8: return fill_with<uint64_t>(a, begin, end, c);
    default: return fill_with<double2>(a, begin, end, c);
    }
}

PERI_CUDA_KERNEL(convert)
{
    if (!contiguous(a->shape, a->dst_stride, a->ndim) || !contiguous(a->shape, a->src_stride, a->ndim))
        return each(begin, end, c, convert_one{*a});
    if (a->dst_dtype == a->src_dtype && a->dst_dtype != PERI_BOOL)
        switch (peri_dtype_bytes(a->dst_dtype)) {
        case 1: return copied<uint8_t>(a, begin, end, c);
        case 2: return copied<uint16_t>(a, begin, end, c);
        case 4: return copied<uint32_t>(a, begin, end, c);
        case 8: return copied<uint64_t>(a, begin, end, c);
        default: break;
        }
    switch (a->dst_dtype) {
    case PERI_F32: return cast_from<peri_f32>(a, begin, end, c);
    case PERI_F16: return cast_from<peri_f16>(a, begin, end, c);
    case PERI_BF16: return cast_from<peri_bf16>(a, begin, end, c);
    default: return each(begin, end, c, convert_one{*a});
    }
}

PERI_CUDA_KERNEL(random) { return each(begin, end, c, random_one{*a}); }
PERI_CUDA_KERNEL(reduce) { return each(begin, end, c, reduce_one{*a}); }

PERI_CUDA_KERNEL(divide)
{
    if (a->dtype == PERI_F32) return each(begin, end, c, divide_one<float>{(float *)a->dst, (const float *)a->src, (float)a->divisor});
    return each(begin, end, c, divide_one<double>{(double *)a->dst, (const double *)a->src, a->divisor});
}
