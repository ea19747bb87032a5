/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence.cu: kernels/sequence.h. A warp has one row of one head: of 32 members that it sees, each lane makes the
 * score of one; then each lane has columns of the result, to which it adds the members one after the other.
 */
#include "cuda.h"
#include "functions.cuh"

#include "../sequence.h"

namespace {

template <class T> static __device__ __forceinline__ T dot(const T *x, const T *y, int64_t n)
{
    T sum = 0;
    for (int64_t d = 0; d < n; d++) sum = peri_fma(x[d], y[d], sum);
    return sum;
}

/** Rows of one sequence and head. */
template <class T> struct head_of {
    const peri_k_attention_args &a;
    peri_k_sequence s;
    int64_t h, i;
    __device__ __forceinline__ head_of(const peri_k_attention_args &args, int64_t item) : a(args)
    {
        const int64_t row = item % a.rows;
        h = item / a.rows;
        s = peri_k_sequence_at(a.offsets, a.targets, peri_k_sequence_of(a.offsets, a.sequences, row));
        i = row - s.first;
    }
    __device__ __forceinline__ const T *q(int64_t m) const
    {
        return (const T *)a.q + (s.first + m) * a.q_stride + h * a.dim;
    }
    __device__ __forceinline__ const T *k(int64_t m) const
    {
        return (const T *)a.k + (s.first + m) * a.k_stride + h * a.dim;
    }
    __device__ __forceinline__ const T *v(int64_t m) const
    {
        return (const T *)a.v + (s.first + m) * a.v_stride + h * a.v_dim;
    }
    __device__ __forceinline__ int64_t wide(int64_t m) const { return ((s.first + m) * a.heads + h) * a.v_dim; }
    __device__ __forceinline__ int64_t narrow(int64_t m) const { return ((s.first + m) * a.heads + h) * a.dim; }
    __device__ __forceinline__ const T *dout(int64_t m) const { return (const T *)a.dout + wide(m); }
    /** Of a [heads][rows] array. */
    __device__ __forceinline__ int64_t flat(int64_t m) const { return h * a.rows + s.first + m; }
    __device__ __forceinline__ T score(int64_t query, int64_t key) const
    {
        return (T)a.alpha * dot(q(query), k(key), a.dim);
    }
    __device__ __forceinline__ T weight(T x, T lse) const
    {
        return a.form == PERI_ATTENTION_SOFTMAX ? peri_exp(x - lse) : (T)a.scale * x * peri_sigmoid(x);
    }
    /** alpha times the gradient of a score, from that of its weight. */
    __device__ __forceinline__ T slope(T x, T lse, T g, T delta) const
    {
        const T y = peri_sigmoid(x);
        return (T)a.alpha * (a.form == PERI_ATTENTION_SOFTMAX ? peri_exp(x - lse) * (g - delta)
                                                              : (T)a.scale * g * (y * (1 + x * (1 - y))));
    }
};

/** out[c] = by * out[c] + sum over 32 members, number first + l of @m by lane l, of lane l's w times their rows from
 *  @base on; a lane has columns lane, lane + 32, ... `begun`: out holds something. */
template <class T>
static __device__ __forceinline__ void add_rows(T *out, bool begun, T by, T w, const peri_k_members &m, int64_t first,
                                                int n, const T *base, int64_t stride, int64_t columns, int lane,
                                                unsigned mask)
{
    for (int64_t c0 = 0; c0 < columns; c0 += 32) {
        const int64_t c = c0 + lane;
        T sum = begun && c < columns ? out[c] * by : T(0);
        for (int l = 0; l < n; l++) {
            const T weight = __shfl_sync(mask, w, l);
            if (c < columns) sum = peri_fma(weight, base[peri_k_member(m, first + l) * stride + c], sum);
        }
        if (c < columns) out[c] = sum;
    }
}

template <class T> struct attend {
    peri_k_attention_args a;
    __device__ void operator()(int64_t item, int lane, unsigned mask) const
    {
        const head_of<T> x(a, item);
        const peri_k_members keys = peri_k_attention_keys(&a, x.s, x.i);
        const int64_t n = peri_k_member_count(keys);
        const bool softmax = a.form == PERI_ATTENTION_SOFTMAX;
        T most = 0, sum = 0, *out = (T *)a.out + x.wide(x.i);
        for (int64_t first = 0; first < n; first += 32) {
            const bool there = first + lane < n;
            const T s = there ? x.score(x.i, peri_k_member(keys, first + lane)) : T(0);
            T by = 1;
            if (softmax) {
                T here = peri_group_max<32>(there ? s : -(T)INFINITY, mask);
                if (first > 0 && !(here > most)) here = most;
                if (first > 0) by = here == most ? T(1) : peri_exp(most - here);
                most = here;
            }
            const T w = there ? x.weight(s, most) : T(0);
            sum = sum * by + peri_group_sum<32>(w, mask);
            add_rows(out, first > 0, by, w, keys, first, (int)(n - first < 32 ? n - first : 32), x.v(0), a.v_stride,
                     a.v_dim, lane, mask);
        }
        if (!softmax) return;
        for (int64_t c = lane; c < a.v_dim; c += 32) out[c] /= sum;
        if (lane == 0) ((T *)a.lse)[item] = most + peri_log(sum);
    }
};

template <class T> struct attend_grad_q {
    peri_k_attention_args a;
    __device__ void operator()(int64_t item, int lane, unsigned mask) const
    {
        const head_of<T> x(a, item);
        const peri_k_members keys = peri_k_attention_keys(&a, x.s, x.i);
        const int64_t n = peri_k_member_count(keys);
        T lse = 0, delta = 0;
        if (a.form == PERI_ATTENTION_SOFTMAX) {
            for (int64_t c = lane; c < a.v_dim; c += 32)
                delta = peri_fma(((const T *)a.out)[x.wide(x.i) + c], x.dout(x.i)[c], delta);
            delta = peri_group_sum<32>(delta, mask);
            lse = ((const T *)a.lse)[item];
            if (lane == 0) ((T *)a.delta)[item] = delta;
        }
        for (int64_t first = 0; a.dq && first < n; first += 32) {
            T ds = 0;
            if (first + lane < n) {
                const int64_t j = peri_k_member(keys, first + lane);
                ds = x.slope(x.score(x.i, j), lse, dot(x.dout(x.i), x.v(j), a.v_dim), delta);
            }
            add_rows((T *)a.dq + x.narrow(x.i), first > 0, T(1), ds, keys, first,
                     (int)(n - first < 32 ? n - first : 32), x.k(0), a.k_stride, a.dim, lane, mask);
        }
    }
};

template <class T> struct attend_grad_kv {
    peri_k_attention_args a;
    __device__ void operator()(int64_t item, int lane, unsigned mask) const
    {
        const head_of<T> x(a, item);
        const peri_k_members queries = peri_k_attention_queries(&a, x.s, x.i);
        const int64_t n = peri_k_member_count(queries);
        const bool softmax = a.form == PERI_ATTENTION_SOFTMAX;
        for (int64_t first = 0; first < n; first += 32) {
            const int members = (int)(n - first < 32 ? n - first : 32);
            T w = 0, ds = 0;
            if (lane < members) {
                const int64_t i = peri_k_member(queries, first + lane);
                const T s = x.score(i, x.i), lse = softmax ? ((const T *)a.lse)[x.flat(i)] : T(0);
                w = x.weight(s, lse);
                ds = x.slope(s, lse, dot(x.dout(i), x.v(x.i), a.v_dim),
                             softmax ? ((const T *)a.delta)[x.flat(i)] : T(0));
            }
            if (a.dk)
                add_rows((T *)a.dk + x.narrow(x.i), first > 0, T(1), ds, queries, first, members, x.q(0), a.q_stride,
                         a.dim, lane, mask);
            if (a.dv)
                add_rows((T *)a.dv + x.wide(x.i), first > 0, T(1), w, queries, first, members, x.dout(0),
                         a.heads * a.v_dim, a.v_dim, lane, mask);
        }
    }
};

/* -- places and times ---------------------------------------------------------------------------------------------- */

struct position_of {
    peri_k_sequence_positions_args a;
    __device__ void operator()(int64_t r) const
    {
        const int64_t number = peri_k_sequence_of(a.offsets, a.sequences, r);
        const peri_k_sequence s = peri_k_sequence_at(a.offsets, a.targets, number);
        const int64_t history = s.n - s.t, i = r - s.first, from = history - (i < history ? i : history);
        a.out[r] = a.number ? number : from < a.most ? from : a.most - 1;
    }
};

struct bucket_of {
    peri_k_time_buckets_args a;
    __device__ double between(int64_t last, int64_t i) const
    {
        switch (a.dtype) {
        case PERI_I64: return peri_k_time_between(((const int64_t *)a.times)[last], ((const int64_t *)a.times)[i]);
        case PERI_I32: return (double)((const int32_t *)a.times)[last] - (double)((const int32_t *)a.times)[i];
        case PERI_F32: return (double)((const float *)a.times)[last] - (double)((const float *)a.times)[i];
        default: return ((const double *)a.times)[last] - ((const double *)a.times)[i];
        }
    }
    __device__ void operator()(int64_t r) const
    {
        const double d = between(a.offsets[peri_k_sequence_of(a.offsets, a.sequences, r) + 1] - 1, r);
        double x = (d > 1e-6 ? d : 1e-6) / a.increment;
        x = a.log ? peri_log(x) : peri_sqrt(x);
        a.out[r] = !(x > 0) ? 0 : x < (double)a.most ? (int64_t)x : a.most;
    }
};

} // namespace

PERI_CUDA_KERNEL(attention)
{
    return a->dtype == PERI_F64 ? each_warp(begin, end, c, attend<double>{*a})
                                : each_warp(begin, end, c, attend<float>{*a});
}

PERI_CUDA_KERNEL(attention_grad_q)
{
    return a->dtype == PERI_F64 ? each_warp(begin, end, c, attend_grad_q<double>{*a})
                                : each_warp(begin, end, c, attend_grad_q<float>{*a});
}

PERI_CUDA_KERNEL(attention_grad_kv)
{
    return a->dtype == PERI_F64 ? each_warp(begin, end, c, attend_grad_kv<double>{*a})
                                : each_warp(begin, end, c, attend_grad_kv<float>{*a});
}

PERI_CUDA_KERNEL(sequence_positions) { return each(begin, end, c, position_of{*a}); }
PERI_CUDA_KERNEL(time_buckets) { return each(begin, end, c, bucket_of{*a}); }
