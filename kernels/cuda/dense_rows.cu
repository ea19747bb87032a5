/* SPDX-License-Identifier: Apache-2.0
 *
 * dense_rows.cu: kernels of kernels/dense.h that repeat a row (a bias) down a matrix, or add up its columns: bias_act,
 * act_grad, cross and cross_grad. Blocks of threads cover the matrix pack by pack (vector.cuh), so that no element's
 * column has to be divided out.
 */
#include "cuda.h"
#include "functions.cuh"
#include "vector.cuh"

namespace {

/** Where a thread works: the pack of columns from `column` on, n of which are there, in rows row, row + step, ...
 *  before last. */
struct strip {
    int64_t row, last, column;
    int step, n;
    bool whole;
};

/** Call f.rows<ROWS, WHOLE>(...): whole packs load ROWS rows at once, others (a matrix of odd width) come number by
 *  number, row by row. */
#define BY_WHOLE(s, ROWS, ...) ((s).whole ? rows<ROWS, true>(__VA_ARGS__) : rows<1, false>(__VA_ARGS__))

/** A row that is repeated, such as a bias: f32 beside f16 and bf16. NULL: zeros. */
template <class E> struct repeated {
    typedef PERI_COMPUTED(E) number;
    number x[peri_pack<E>::N];
    __device__ __forceinline__ repeated(const void *row, const strip &s)
    {
        PERI_UNROLL
        for (int k = 0; k < peri_pack<E>::N; k++)
            x[k] = row && k < s.n ? ((const number *)row)[s.column + k] : number(0);
    }
};

/** Column sums of a block of 64 rows are made in double; of 16-bit numbers, in f32. */
template <class E> struct summed {
    typedef float type;
};
template <> struct summed<peri_f32> {
    typedef double type;
};
template <> struct summed<peri_f64> {
    typedef double type;
};

/** F(s): a strip. */
template <class F>
__global__ void __launch_bounds__(PERI_BLOCK) strips_kernel(F f, peri_tiles t, int64_t begin, int64_t end)
{
    const int n = peri_pack<typename F::element>::N, height = PERI_BLOCK >> t.shift;
    const int x = (int)threadIdx.x & (t.wide - 1), y = (int)threadIdx.x >> t.shift;
    const int64_t bands = (end - begin + PERI_SUM_ROWS - 1) / PERI_SUM_ROWS;
    for (int64_t b = blockIdx.x; b < bands * t.across; b += gridDim.x) {
        const int64_t band = b / t.across, column = ((b - band * t.across) * t.wide + x) * n, left = t.cols - column;
        const int64_t row = begin + band * PERI_SUM_ROWS, last = row + PERI_SUM_ROWS < end ? row + PERI_SUM_ROWS : end;
        if (left > 0) f(strip{row + y, last, column, height, left < n ? (int)left : n, t.whole});
    }
}

/** f over rows [begin, end). */
template <class F> cudaError_t each_strip(int64_t begin, int64_t end, const peri_tiles &t, const peri_cuda_call *c, F f)
{
    if (begin >= end || t.cols == 0) return cudaSuccess;
    const int64_t bands = (end - begin + PERI_SUM_ROWS - 1) / PERI_SUM_ROWS;
    return peri_cuda_launch(strips_kernel<F>, peri_cuda_grid(bands * t.across, 1, c, 1 << 12), PERI_BLOCK, 0, c, f, t,
                            begin, end);
}

/** F(s, sum): a strip, whose column sums it adds to sum[N]; they become row k of `partial`, k in [begin, end) the
 *  blocks of 64 rows. */
template <class F>
__global__ void __launch_bounds__(PERI_BLOCK)
    summed_strips_kernel(F f, peri_tiles t, void *partial, int64_t begin, int64_t end)
{
    typedef typename F::element E;
    typedef typename summed<E>::type sum_type;
    typedef PERI_COMPUTED(E) number;
    const int n = peri_pack<E>::N, height = PERI_BLOCK >> t.shift, width = t.wide * n;
    const int x = (int)threadIdx.x & (t.wide - 1), y = (int)threadIdx.x >> t.shift;
    PERI_SHARED(sum_type, parts, PERI_BLOCK * peri_pack<E>::N); /* [height][width] */
    for (int64_t b = blockIdx.x; b < (end - begin) * t.across; b += gridDim.x) {
        const int64_t band = b / t.across, first = (b - band * t.across) * width, column = first + x * n,
                      left = t.cols - column;
        const int64_t k = begin + band, row = k * PERI_SUM_ROWS,
                      last = row + PERI_SUM_ROWS < t.rows ? row + PERI_SUM_ROWS : t.rows;
        sum_type sum[peri_pack<E>::N];
        PERI_UNROLL
        for (int i = 0; i < n; i++) sum[i] = 0;
        if (left > 0) f(strip{row + y, last, column, height, left < n ? (int)left : n, t.whole}, sum);
        if (!partial) continue;
        PERI_UNROLL
        for (int i = 0; i < n; i++) parts[y * width + x * n + i] = sum[i];
        __syncthreads();
        if ((int)threadIdx.x < width && first + (int)threadIdx.x < t.cols) {
            sum_type total = 0;
            for (int i = 0; i < height; i++) total += parts[i * width + (int)threadIdx.x];
            ((number *)partial)[k * t.cols + first + threadIdx.x] = (number)total;
        }
        __syncthreads(); /* the next round writes the parts */
    }
}

/** f over blocks [begin, end) of 64 rows. */
template <class F>
cudaError_t each_summed_strip(int64_t begin, int64_t end, const peri_tiles &t, void *partial, const peri_cuda_call *c,
                              F f)
{
    if (begin >= end || t.cols == 0) return cudaSuccess;
    const unsigned grid = peri_cuda_grid((end - begin) * t.across, 1, c, 1 << 12);
    return peri_cuda_launch(summed_strips_kernel<F>, grid, PERI_BLOCK, 0, c, f, t, partial, begin, end);
}

/* -- the sides of a linear layer ----------------------------------------------------------------------------------- */

template <class E, int ACT, int AT_ONCE = 4> struct bias_act_strip {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    peri_k_bias_act_args a;
    __device__ void operator()(const strip &s) const { BY_WHOLE(s, AT_ONCE, s); }
    template <int ROWS, bool WHOLE> __device__ __forceinline__ void rows(const strip &s) const
    {
        const int n = peri_pack<E>::N;
        typename E::type *y = (typename E::type *)a.y + s.column;
        number bias[peri_pack<E>::N];
        peri_pack<E> b = {};
        if (a.bias) b = peri_load_pack<E>((const typename E::type *)a.bias + s.column, s.n, false);
        peri_unpack<E>(b, bias);
        for (int64_t r = s.row; r < s.last; r += ROWS * s.step) {
            peri_pack<E> at[ROWS];
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++)
                if (r + q * s.step < s.last) at[q] = peri_load_pack<E>(y + (r + q * s.step) * a.cols, s.n, WHOLE);
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                number x[peri_pack<E>::N];
                if (r + q * s.step >= s.last) break;
                peri_unpack<E>(at[q], x);
                PERI_UNROLL
                for (int k = 0; k < n; k++) x[k] = peri_f(ACT, x[k] + bias[k], number(0), number(0));
                peri_store_pack<E>(y + (r + q * s.step) * a.cols, s.n, WHOLE, peri_to_pack<E>(x));
            }
        }
    }
};

template <class E, int ACT, int AT_ONCE = 8> struct act_grad_strip {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    peri_k_act_grad_args a;
    typedef typename summed<E>::type sums[peri_pack<E>::N];
    __device__ void operator()(const strip &s, sums &sum) const { BY_WHOLE(s, AT_ONCE, s, sum); }
    template <int ROWS, bool WHOLE> __device__ __forceinline__ void rows(const strip &s, sums &sum) const
    {
        const int n = peri_pack<E>::N;
        const typename E::type *dy = (const typename E::type *)a.dy + s.column,
                               *y = (const typename E::type *)a.y + s.column;
        typename E::type *dz = (typename E::type *)a.dz + s.column;
        for (int64_t r = s.row; r < s.last; r += ROWS * s.step) {
            peri_pack<E> at_dy[ROWS], at_y[ROWS];
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                if (r + q * s.step >= s.last) continue;
                at_dy[q] = peri_load_pack<E>(dy + (r + q * s.step) * a.dy_stride, s.n, WHOLE);
                if (ACT != PERI_UNARY_IDENTITY) at_y[q] = peri_load_pack<E>(y + (r + q * s.step) * a.cols, s.n, WHOLE);
            }
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                number z[peri_pack<E>::N], of[peri_pack<E>::N];
                if (r + q * s.step >= s.last) break;
                peri_unpack<E>(at_dy[q], z);
                if (ACT != PERI_UNARY_IDENTITY) peri_unpack<E>(at_y[q], of);
                PERI_UNROLL
                for (int k = 0; k < n; k++)
                    z[k] = peri_chain(ACT, z[k], ACT == PERI_UNARY_IDENTITY ? number(0) : of[k], number(0), number(0));
                const peri_pack<E> rounded = peri_to_pack<E>(z);
                if (a.dz) peri_store_pack<E>(dz + (r + q * s.step) * a.cols, s.n, WHOLE, rounded);
                peri_unpack<E>(rounded, z);
                PERI_UNROLL
                for (int k = 0; k < n; k++) sum[k] += z[k];
            }
        }
    }
};

/* -- a layer of a cross network ------------------------------------------------------------------------------------ */

template <class E, int AT_ONCE = 4> struct cross_strip {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    peri_k_cross_args a;
    __device__ void operator()(const strip &s) const { BY_WHOLE(s, AT_ONCE, s); }
    template <int ROWS, bool WHOLE> __device__ __forceinline__ void rows(const strip &s) const
    {
        const int n = peri_pack<E>::N;
        typename E::type *y = (typename E::type *)a.y + s.column;
        const typename E::type *x0 = (const typename E::type *)a.x0 + s.column,
                               *u = (const typename E::type *)a.u + s.column;
        const typename E::type *x = (const typename E::type *)a.x + s.column;
        const repeated<E> bias(a.bias, s);
        for (int64_t r = s.row; r < s.last; r += ROWS * s.step) {
            peri_pack<E> at_x0[ROWS], at_u[ROWS], at_x[ROWS];
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                const int64_t at = (r + q * s.step) * a.cols;
                if (r + q * s.step >= s.last) continue;
                at_x0[q] = peri_load_pack<E>(x0 + at, s.n, WHOLE);
                at_u[q] = peri_load_pack<E>(u + at, s.n, WHOLE);
                at_x[q] = peri_load_pack<E>(x + at, s.n, WHOLE);
            }
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                number of_x0[peri_pack<E>::N], of_u[peri_pack<E>::N], of_x[peri_pack<E>::N];
                if (r + q * s.step >= s.last) break;
                peri_unpack<E>(at_x0[q], of_x0);
                peri_unpack<E>(at_u[q], of_u);
                peri_unpack<E>(at_x[q], of_x);
                PERI_UNROLL
                for (int k = 0; k < n; k++) of_x[k] += of_x0[k] * (of_u[k] + bias.x[k]);
                peri_store_pack<E>(y + (r + q * s.step) * a.cols, s.n, WHOLE, peri_to_pack<E>(of_x));
            }
        }
    }
};

/** ADD, SAME: the arguments' flags. */
template <class E, bool ADD, bool SAME, int AT_ONCE = 4> struct cross_grad_strip {
    typedef E element;
    typedef PERI_COMPUTED(E) number;
    peri_k_cross_grad_args a;
    typedef typename summed<E>::type sums[peri_pack<E>::N];
    __device__ void operator()(const strip &s, sums &sum) const { BY_WHOLE(s, AT_ONCE, s, sum); }
    template <int ROWS, bool WHOLE> __device__ __forceinline__ void rows(const strip &s, sums &sum) const
    {
        const int n = peri_pack<E>::N;
        typename E::type *du = (typename E::type *)a.du + s.column, *dx0 = (typename E::type *)a.dx0 + s.column;
        const typename E::type *dy = (const typename E::type *)a.dy + s.column,
                               *x0 = (const typename E::type *)a.x0 + s.column;
        const typename E::type *u = (const typename E::type *)a.u + s.column;
        const repeated<E> bias(a.bias, s);
        for (int64_t r = s.row; r < s.last; r += ROWS * s.step) {
            peri_pack<E> at_dy[ROWS], at_x0[ROWS], at_u[ROWS], at_dx0[ROWS];
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                const int64_t at = (r + q * s.step) * a.cols;
                if (r + q * s.step >= s.last) continue;
                at_dy[q] = peri_load_pack<E>(dy + at, s.n, WHOLE);
                at_x0[q] = peri_load_pack<E>(x0 + at, s.n, WHOLE);
                at_u[q] = peri_load_pack<E>(u + at, s.n, WHOLE);
                if (ADD) at_dx0[q] = peri_load_pack<E>(dx0 + at, s.n, WHOLE);
            }
            PERI_UNROLL
            for (int q = 0; q < ROWS; q++) {
                const int64_t at = (r + q * s.step) * a.cols;
                number g[peri_pack<E>::N], v[peri_pack<E>::N], w[peri_pack<E>::N], z[peri_pack<E>::N];
                if (r + q * s.step >= s.last) break;
                peri_unpack<E>(at_dy[q], g);
                peri_unpack<E>(at_x0[q], v);
                peri_unpack<E>(at_u[q], w);
                if (ADD) peri_unpack<E>(at_dx0[q], z);
                PERI_UNROLL
                for (int k = 0; k < n; k++) v[k] *= g[k];
                const peri_pack<E> rounded = peri_to_pack<E>(v);
                peri_unpack<E>(rounded, v);
                PERI_UNROLL
                for (int k = 0; k < n; k++) {
                    sum[k] += v[k];
                    w[k] = g[k] * (w[k] + bias.x[k]);
                    if (SAME) w[k] += g[k];
                    if (ADD) w[k] += z[k];
                }
                peri_store_pack<E>(du + at, s.n, WHOLE, rounded);
                peri_store_pack<E>(dx0 + at, s.n, WHOLE, peri_to_pack<E>(w));
            }
        }
    }
};

template <class E>
cudaError_t cross_grad_as(const peri_k_cross_grad_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    const uint64_t bits = (uint64_t)a->du | (uint64_t)a->dx0 | (uint64_t)a->dy | (uint64_t)a->x0 | (uint64_t)a->u;
    const peri_tiles t = peri_tiles_of<E>(a->rows, a->cols, bits);
    if (a->add && a->same) return each_summed_strip(begin, end, t, a->partial, c, cross_grad_strip<E, true, true>{*a});
    if (a->add) return each_summed_strip(begin, end, t, a->partial, c, cross_grad_strip<E, true, false>{*a});
    if (a->same) return each_summed_strip(begin, end, t, a->partial, c, cross_grad_strip<E, false, true>{*a});
    return each_summed_strip(begin, end, t, a->partial, c, cross_grad_strip<E, false, false>{*a});
}

} // namespace

/** The same functor for numbers of each dtype. */
#define BY_DTYPE(call) \
    (a->dtype == PERI_F64    ? call(peri_f64) \
     : a->dtype == PERI_F16  ? call(peri_f16) \
     : a->dtype == PERI_BF16 ? call(peri_bf16) \
                             : call(peri_f32))

/** The activation as a constant. */
#define BY_ACT(call, E) \
    (a->act == PERI_UNARY_RELU      ? call(E, PERI_UNARY_RELU) \
     : a->act == PERI_UNARY_SIGMOID ? call(E, PERI_UNARY_SIGMOID) \
     : a->act == PERI_UNARY_TANH    ? call(E, PERI_UNARY_TANH) \
     : a->act == PERI_UNARY_EXP     ? call(E, PERI_UNARY_EXP) \
     : a->act == PERI_UNARY_SQRT    ? call(E, PERI_UNARY_SQRT) \
                                    : call(E, PERI_UNARY_IDENTITY))

PERI_CUDA_KERNEL(bias_act)
{
#define RUN(E, ACT)                                                                                                    \
    each_strip(begin, end, peri_tiles_of<E>(end, a->cols, (uint64_t)a->y), c, bias_act_strip<E, ACT>{*a})
#define ACTS(E) BY_ACT(RUN, E)
    return BY_DTYPE(ACTS);
#undef ACTS
#undef RUN
}

PERI_CUDA_KERNEL(act_grad)
{
#define STEP(E) (uint64_t)a->dy_stride * sizeof(E::type)
#define RUN(E, ACT)                                                                                                    \
    each_summed_strip(                                                                                                 \
        begin, end, peri_tiles_of<E>(a->rows, a->cols, (uint64_t)a->dz | (uint64_t)a->dy | (uint64_t)a->y | STEP(E)),  \
        a->partial, c, act_grad_strip<E, ACT>{*a})
#define ACTS(E) BY_ACT(RUN, E)
    return BY_DTYPE(ACTS);
#undef ACTS
#undef RUN
#undef STEP
}

PERI_CUDA_KERNEL(cross)
{
#define RUN(E)                                                                                                         \
    each_strip(begin, end,                                                                                             \
               peri_tiles_of<E>(end, a->cols, (uint64_t)a->y | (uint64_t)a->x0 | (uint64_t)a->u | (uint64_t)a->x), c,  \
               cross_strip<E>{*a})
    return BY_DTYPE(RUN);
#undef RUN
}

PERI_CUDA_KERNEL(cross_grad)
{
#define RUN(E) cross_grad_as<E>(a, begin, end, c)
    return BY_DTYPE(RUN);
#undef RUN
}
