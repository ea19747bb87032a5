/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.cu: kernels/convert.h. A thread an element; consecutive threads have consecutive elements of the destination.
 */
#include "quad.cuh"
#include "random.cuh"
#include "rows.cuh"

#include "../convert.h"
#include "../divide.h"

namespace {

template <class T> struct fill_words {
    T *dst;
    T value;
    __device__ void operator()(int64_t i) const { dst[i] = value; }
};

/** Where the elements of both tensors lie: the dimensions that are left when those of one element are dropped, and
 *  neighbours joined that lie in both tensors as one would. Contiguous tensors have none or one. */
struct layout {
    int32_t ndim;
    peri_k_divisor shape[PERI_MAX_DIMS];
    int64_t dst_stride[PERI_MAX_DIMS], src_stride[PERI_MAX_DIMS];
    layout(const peri_k_convert_args *a) : ndim(0)
    {
        for (int32_t d = 0; d < a->ndim; d++) {
            if (a->shape[d] == 1) continue;
            const int32_t k = ndim - 1;
            int64_t n = a->shape[d];
            if (k >= 0 && dst_stride[k] == a->dst_stride[d] * n && src_stride[k] == a->src_stride[d] * n)
                n *= (int64_t)shape[k].by;
            else ndim++;
            shape[ndim - 1] = peri_k_divisor_of(n > 0 ? n : 1);
            dst_stride[ndim - 1] = a->dst_stride[d];
            src_stride[ndim - 1] = a->src_stride[d];
        }
    }
    /** The last dimension is contiguous in both. */
    bool rows() const { return ndim == 0 || (dst_stride[ndim - 1] == 1 && src_stride[ndim - 1] == 1); }
    /** The places of element @i in row-major order. */
    __device__ __forceinline__ void find(int64_t i, int64_t *dst, int64_t *src) const
    {
        uint64_t rest = (uint64_t)i;
        *dst = *src = 0;
        for (int32_t d = ndim - 1; d > 0; d--) {
            const uint64_t next = peri_k_quotient(rest, &shape[d]);
            const int64_t at = (int64_t)(rest - next * shape[d].by);
            *dst += at * dst_stride[d];
            *src += at * src_stride[d];
            rest = next;
        }
        if (ndim == 0) return;
        *dst += (int64_t)rest * dst_stride[0];
        *src += (int64_t)rest * src_stride[0];
    }
};

/** Any dtypes and layouts. */
struct convert_one {
    peri_k_convert_args a;
    layout places;
    __device__ void operator()(int64_t i) const
    {
        int64_t dst, src;
        places.find(i, &dst, &src);
        peri_store(a.dst, dst, a.dst_dtype, peri_load(a.src, src, a.src_dtype));
    }
};

/** Of one dtype: sizeof(T) bytes at a time, which are an element, or several of a row. A thread has word i and the one
 *  @apart of it, which are in flight at once. */
template <class T> struct move_two {
    T *dst;
    const T *src;
    layout places;
    int64_t end, apart;
    __device__ void operator()(int64_t i) const
    {
        const bool both = i + apart < end;
        int64_t to[2], from[2];
        T x[2];
        places.find(i, &to[0], &from[0]);
        places.find(both ? i + apart : i, &to[1], &from[1]);
        PERI_UNROLL
        for (int k = 0; k < 2; k++) x[k] = src[from[k]];
        dst[to[0]] = x[0];
        if (both) dst[to[1]] = x[1];
    }
};

template <class D, class S> struct cast_strided {
    typename D::type *dst;
    const typename S::type *src;
    layout places;
    __device__ void operator()(int64_t i) const
    {
        int64_t to, from;
        places.find(i, &to, &from);
        D::store(dst, to, S::load(src, from));
    }
};

/** Both contiguous: elements [begin + 4 q, begin + 4 q + 4), and those @apart quads behind them; both loads are in
 *  flight at once. */
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

/** Both contiguous, of one dtype: sizeof(T) bytes at a time. */
template <class T> struct copy_one {
    T *dst;
    const T *src;
    __device__ void operator()(int64_t i) const { dst[i] = src[i]; }
};

struct random_one {
    peri_k_random_args a;
    peri_k_divisor cols;
    __device__ void operator()(int64_t i) const
    {
        const int64_t row = (int64_t)peri_k_quotient((uint64_t)i, &cols);
        uint64_t index = (uint64_t)((a.row_offset + row) * a.total_cols + a.col_offset + i - row * a.cols);
        peri_value v = {};
        if (a.kind == PERI_RANDOM_UNIFORM) {
            v.re =
                a.low + (a.high - a.low) * ((double)(peri_random_word(a.seed, a.random_stream, index) >> 8) * 0x1p-24);
        } else {
            double u1 = ((double)peri_random_word(a.seed, a.random_stream, index & ~(uint64_t)1) + 1) * 0x1p-32;
            double angle =
                6.283185307179586476925 * ((double)peri_random_word(a.seed, a.random_stream, index | 1) * 0x1p-32);
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

template <class T>
cudaError_t copy_unchanged(const peri_k_convert_args *a, layout l, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    /* elements of a word: more than one in rows only */
    const int64_t of = (int64_t)sizeof(T) / peri_dtype_bytes(a->dst_dtype);
    for (int32_t d = 0; d < l.ndim; d++) {
        if (d + 1 == l.ndim && of > 1) l.shape[d] = peri_k_divisor_of((int64_t)l.shape[d].by / of);
        else l.dst_stride[d] /= of, l.src_stride[d] /= of;
    }
    if (l.ndim == 0 || (l.ndim == 1 && l.dst_stride[0] == 1 && l.src_stride[0] == 1))
        return each(begin / of, end / of, c, copy_one<T>{(T *)a->dst, (const T *)a->src});
    const int64_t pairs = (end / of - begin / of + 1) / 2;
    return each(begin / of, begin / of + pairs, c, move_two<T>{(T *)a->dst, (const T *)a->src, l, end / of, pairs});
}

/** Elements of one dtype, in the widest words of which all rows, and the range, are made. */
cudaError_t moved_by_words(const peri_k_convert_args *a, const layout &l, int64_t begin, int64_t end,
                           const peri_cuda_call *c)
{
    const int64_t bytes = peri_dtype_bytes(a->dst_dtype);
    int64_t odd = (begin | end) * bytes;
    for (int32_t d = 0; d + 1 < l.ndim; d++) odd |= (l.dst_stride[d] | l.src_stride[d]) * bytes;
    if (l.ndim > 0) odd |= (int64_t)l.shape[l.ndim - 1].by * bytes;
    const int32_t word = l.rows() ? peri_padded_word(odd, bytes, a->dst, a->src) : (int32_t)bytes;
#define MOVE_BY(T) copy_unchanged<T>(a, l, begin, end, c)
    return PERI_BY_WORD(word, MOVE_BY);
}

template <class D, class S>
cudaError_t convert_elements(const peri_k_convert_args *a, const layout &l, int64_t begin, int64_t end,
                             const peri_cuda_call *c)
{
    typename D::type *dst = (typename D::type *)a->dst;
    const typename S::type *src = (const typename S::type *)a->src;
    const int64_t pairs = (end - begin + 7) / 8;
    if (l.ndim < 2 && l.rows()) return each(0, pairs, c, cast_quads<D, S>{dst, src, begin, end, pairs});
    return each(begin, end, c, cast_strided<D, S>{dst, src, l});
}

template <class D>
cudaError_t cast_from(const peri_k_convert_args *a, const layout &l, int64_t begin, int64_t end,
                      const peri_cuda_call *c)
{
    switch (a->src_dtype) {
    case PERI_F32: return convert_elements<D, peri_f32>(a, l, begin, end, c);
    case PERI_F16: return convert_elements<D, peri_f16>(a, l, begin, end, c);
    case PERI_BF16: return convert_elements<D, peri_bf16>(a, l, begin, end, c);
    default: return each(begin, end, c, convert_one{*a, l});
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
    const layout l(a);
    if (a->dst_dtype == a->src_dtype && a->dst_dtype != PERI_BOOL) return moved_by_words(a, l, begin, end, c);
    switch (a->dst_dtype) {
    case PERI_F32: return cast_from<peri_f32>(a, l, begin, end, c);
    case PERI_F16: return cast_from<peri_f16>(a, l, begin, end, c);
    case PERI_BF16: return cast_from<peri_bf16>(a, l, begin, end, c);
    default: return each(begin, end, c, convert_one{*a, l});
    }
}

PERI_CUDA_KERNEL(random) { return each(begin, end, c, random_one{*a, peri_k_divisor_of(a->cols > 0 ? a->cols : 1)}); }
PERI_CUDA_KERNEL(reduce) { return each(begin, end, c, reduce_one{*a}); }

PERI_CUDA_KERNEL(divide)
{
    if (a->dtype == PERI_F32)
        return each(begin, end, c, divide_one<float>{(float *)a->dst, (const float *)a->src, (float)a->divisor});
    return each(begin, end, c, divide_one<double>{(double *)a->dst, (const double *)a->src, a->divisor});
}
