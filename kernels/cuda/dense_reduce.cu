/* SPDX-License-Identifier: Apache-2.0
 *
 * dense_reduce.cu: the reductions of kernels/dense.h. Where what is reduced lies next to each other a warp does it,
 * else a thread, whose neighbours have neighbouring columns. Sums are made in double, as trees whose shape the sizes
 * fix.
 */
#include "cuda.h"
#include "functions.cuh"

namespace {

/* -- sums and maxima ----------------------------------------------------------------------------------------------- */

/** i: an element of dst, [outer][blocks][inner]. One lane sums few numbers as T in order, which is how parts of ranks
 *  are summed. */
template <int LANES, class T, class Sum> struct sum_one {
    peri_k_sum_dim_args a;
    int64_t blocks;
    __device__ void operator()(int64_t i, int lane, unsigned mask) const
    {
        int64_t at = i / a.inner, column = i - at * a.inner, o = at / blocks, k = at - o * blocks;
        int64_t last = (k + 1) * a.block < a.n ? (k + 1) * a.block : a.n;
        Sum sum = 0;
        for (int64_t r = k * a.block + lane; r < last; r += LANES)
            sum += (Sum)((const T *)a.x)[(o * a.n + r) * a.inner + column];
        sum = peri_group_sum<LANES>(sum, mask);
        if (lane == 0) ((T *)a.dst)[i] = (T)(sum * a.scale);
    }
};

/** The elements of dst that elements [begin, end) of sum_dim's range cover: whole blocks of columns, of one row of them
 *  at a time. */
template <int LANES, class T, class Sum = double>
cudaError_t sum_range(const peri_k_sum_dim_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    int64_t blocks = a->n ? (a->n + a->block - 1) / a->block : 1,
            parts = (a->inner + PERI_SUM_COLUMNS - 1) / PERI_SUM_COLUMNS;
    if (parts == 0 || begin >= end) return cudaSuccess;
    int64_t first = begin % parts * PERI_SUM_COLUMNS, last = end % parts * PERI_SUM_COLUMNS;
    return each_group<LANES>(begin / parts * a->inner + first, end / parts * a->inner + last, c,
                             sum_one<LANES, T, Sum>{*a, blocks});
}

/** Elements [from, to) of dst by blocks of threads: 32 columns side by side, PERI_WARPS rows of x at once. */
template <class T>
__global__ void __launch_bounds__(PERI_BLOCK)
    sum_columns(peri_k_sum_dim_args a, int64_t blocks, int64_t from, int64_t to)
{
    PERI_SHARED(double, parts, PERI_BLOCK);
    const int lane = peri_lane(), warp = (int)(threadIdx.x / 32);
    const int64_t tiles = (a.inner + 31) / 32, first = from / a.inner, rows = (to + a.inner - 1) / a.inner - first;
    for (int64_t b = blockIdx.x; b < rows * tiles; b += gridDim.x) {
        const int64_t row = first + b / tiles, column = b % tiles * 32 + lane, o = row / blocks, k = row - o * blocks;
        const int64_t last = (k + 1) * a.block < a.n ? (k + 1) * a.block : a.n, at = row * a.inner + column;
        const bool mine = column < a.inner && at >= from && at < to;
        const T *x = (const T *)a.x + o * a.n * a.inner + column;
        double sum = 0;
        for (int64_t r = k * a.block + warp; mine && r < last; r += PERI_WARPS) sum += (double)x[r * a.inner];
        parts[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0 && mine) {
            sum = 0;
            PERI_UNROLL
            for (int w = 0; w < PERI_WARPS; w++) sum += parts[w * 32 + lane];
            ((T *)a.dst)[at] = (T)(sum * a.scale);
        }
        __syncthreads(); /* the next round writes the parts */
    }
}

/** What sum_range does, by sum_columns. */
template <class T>
cudaError_t sum_rows(const peri_k_sum_dim_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    const int64_t blocks = a->n ? (a->n + a->block - 1) / a->block : 1,
                  parts = (a->inner + PERI_SUM_COLUMNS - 1) / PERI_SUM_COLUMNS;
    if (parts == 0 || begin >= end) return cudaSuccess;
    const int64_t from = begin / parts * a->inner + begin % parts * PERI_SUM_COLUMNS;
    const int64_t to = end / parts * a->inner + end % parts * PERI_SUM_COLUMNS;
    const int64_t rows = (to + a->inner - 1) / a->inner - from / a->inner, tiles = (a->inner + 31) / 32;
    return peri_cuda_launch(sum_columns<T>, peri_cuda_grid(rows * tiles, 1, c), PERI_BLOCK, 0, c, *a, blocks, from, to);
}

/** Is x a larger maximum than y, or a smaller minimum? NaN wins, and of equal ones the first. */
template <class T> __device__ __forceinline__ bool beats(bool least, T x, int64_t i, T y, int64_t j)
{
    bool nan_x = x != x, nan_y = y != y;
    if (nan_x != nan_y) return nan_x;
    if (!nan_x && x != y) return least ? x < y : x > y;
    return i < j;
}

template <int LANES, class T> struct max_one {
    peri_k_max_dim_args a;
    __device__ void operator()(int64_t u, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.x + u / a.inner * a.n * a.inner + u % a.inner;
        int64_t best = lane < a.n ? lane : 0;
        T max = x[best * a.inner];
        for (int64_t r = lane + LANES; r < a.n; r += LANES)
            if (beats(a.least, x[r * a.inner], r, max, best)) max = x[r * a.inner], best = r;
        PERI_UNROLL
        for (int by = LANES / 2; by > 0; by /= 2) {
            T other = __shfl_xor_sync(mask, max, by);
            int64_t at = __shfl_xor_sync(mask, best, by);
            if (beats(a.least, other, at, max, best)) max = other, best = at;
        }
        if (lane != 0) return;
        ((T *)a.values)[u] = max;
        a.indices[u] = best;
    }
};

/** i: an element of dx, [outer][n][inner]. */
template <class T> struct max_grad_one {
    peri_k_max_dim_grad_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t row = i / a.inner, column = i - row * a.inner, o = row / a.n, u = o * a.inner + column;
        ((T *)a.dx)[i] = row - o * a.n == a.indices[u] ? ((const T *)a.dy)[u] : T(0);
    }
};

/* -- products ------------------------------------------------------------------------------------------------------ */

template <int LANES, class T, class Product> struct product_one {
    peri_k_product_dim_args a;
    __device__ void operator()(int64_t u, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.x + u / a.inner * a.n * a.inner + u % a.inner;
        Product product = 1;
        for (int64_t r = lane; r < a.n; r += LANES) product *= (Product)x[r * a.inner];
        PERI_UNROLL
        for (int by = LANES / 2; by > 0; by /= 2) product *= __shfl_xor_sync(mask, product, by);
        if (lane == 0) ((T *)a.y)[u] = (T)product;
    }
};

template <int LANES>
cudaError_t products_of_lines(const peri_k_product_dim_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->dtype) {
    case PERI_F64: return each_group<LANES>(begin, end, c, product_one<LANES, double, double>{*a});
    case PERI_I64: return each_group<LANES>(begin, end, c, product_one<LANES, int64_t, uint64_t>{*a});
    default: return each_group<LANES>(begin, end, c, product_one<LANES, float, double>{*a});
    }
}

/** Line u: what stands before each element on the way down, what stands behind it on the way up. */
template <class T> struct product_grad_line {
    peri_k_product_dim_grad_args a;
    __device__ void operator()(int64_t u) const
    {
        const int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        const T *x = (const T *)a.x + base;
        T *dx = (T *)a.dx + base;
        double before = 1, behind = (double)((const T *)a.dy)[u];
        for (int64_t r = 0; r < a.n; r++) {
            dx[r * a.inner] = (T)before;
            before *= (double)x[r * a.inner];
        }
        for (int64_t r = a.n - 1; r >= 0; r--) {
            dx[r * a.inner] = (T)((double)dx[r * a.inner] * behind);
            behind *= (double)x[r * a.inner];
        }
    }
};

/* -- softmax ------------------------------------------------------------------------------------------------------- */

template <int LANES, class T>
__device__ __forceinline__ T largest_of_line(const T *x, int64_t n, int64_t step, int lane, unsigned mask)
{
    T max = -(T)INFINITY;
    for (int64_t r = lane; r < n; r += LANES) max = x[r * step] > max ? x[r * step] : max;
    return peri_group_max<LANES>(max, mask);
}

template <int LANES, class T> struct softmax_one {
    peri_k_softmax_args a;
    __device__ void operator()(int64_t u, int lane, unsigned mask) const
    {
        int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        const T *x = (const T *)a.x + base;
        T *y = (T *)a.y + base, max = largest_of_line<LANES>(x, a.n, a.inner, lane, mask);
        double sum = 0;
        if (a.zeros && max == -(T)INFINITY) max = 0;
        for (int64_t r = lane; r < a.n; r += LANES) sum += (double)peri_exp(x[r * a.inner] - max);
        sum = peri_group_sum<LANES>(sum, mask);
        if (a.zeros && sum == 0) sum = 1;
        double log_sum = log(sum);
        for (int64_t r = lane; r < a.n; r += LANES) {
            T d = x[r * a.inner] - max;
            y[r * a.inner] = a.log ? (T)((double)d - log_sum) : (T)((double)peri_exp(d) / sum);
        }
    }
};

template <int LANES, class T> struct softmax_grad_one {
    peri_k_softmax_grad_args a;
    __device__ void operator()(int64_t u, int lane, unsigned mask) const
    {
        int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        const T *dy = (const T *)a.dy + base, *y = (const T *)a.y + base;
        T *dx = (T *)a.dx + base;
        double sum = 0;
        for (int64_t r = lane; r < a.n; r += LANES)
            sum += (double)dy[r * a.inner] * (a.log ? 1.0 : (double)y[r * a.inner]);
        sum = peri_group_sum<LANES>(sum, mask);
        for (int64_t r = lane; r < a.n; r += LANES) {
            double g = (double)dy[r * a.inner];
            dx[r * a.inner] =
                a.log ? (T)(g - (double)peri_exp(y[r * a.inner]) * sum) : (T)((double)y[r * a.inner] * (g - sum));
        }
    }
};

template <class T> __device__ __forceinline__ double class_weight(const peri_k_class_shares &of, int64_t c)
{
    return of.weight ? (double)((const T *)of.weight)[c] : 1.0;
}

template <class T> struct cross_entropy_row {
    peri_k_cross_entropy_args a;
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.x + r * a.classes;
        T max = largest_of_line<32>(x, a.classes, 1, lane, mask);
        double sum = 0;
        for (int64_t c = lane; c < a.classes; c += 32) sum += (double)peri_exp(x[c] - max);
        sum = peri_group_sum<32>(sum, mask);
        double lse = (double)max + log(sum), shared = 0;
        for (int64_t c = lane; c < a.classes && a.of.smoothing > 0; c += 32)
            shared += class_weight<T>(a.of, c) * (lse - (double)x[c]);
        shared = peri_group_sum<32>(shared, mask);
        if (lane != 0) return;
        const int64_t label = a.labels[r];
        const bool ignored = a.of.ignores && label == a.of.ignored;
        const double count = ignored ? 0.0 : class_weight<T>(a.of, label);
        ((T *)a.lse)[r] = (T)lse;
        ((T *)a.loss)[r] = ignored ? T(0)
                                   : (T)((1 - a.of.smoothing) * count * (lse - (double)x[label]) +
                                         a.of.smoothing / (double)a.classes * shared);
        if (a.counts) ((T *)a.counts)[r] = (T)count;
    }
};

template <class T> struct cross_entropy_grad_one {
    peri_k_cross_entropy_grad_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t r = i / a.classes, c = i - r * a.classes;
        T p = peri_exp(((const T *)a.x)[i] - ((const T *)a.lse)[r]);
        ((T *)a.dx)[i] = (T)a.scale * ((const T *)a.g)[r * a.g_stride] * (p - (c == a.labels[r] ? T(1) : T(0)));
    }
};

/** The same where classes have weights, labels are smoothed, or rows are ignored. */
template <class T> struct cross_entropy_grad_row {
    peri_k_cross_entropy_grad_args a;
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.x + r * a.classes;
        T *dx = (T *)a.dx + r * a.classes;
        const int64_t label = a.labels[r];
        const bool ignored = a.of.ignores && label == a.of.ignored;
        const double own = ignored ? 0.0 : (1 - a.of.smoothing) * class_weight<T>(a.of, label),
                     part = a.of.smoothing / (double)a.classes,
                     g = a.scale * (double)((const T *)a.g)[r * a.g_stride];
        double all = 0;
        for (int64_t c = lane; c < a.classes; c += 32) all += class_weight<T>(a.of, c);
        all = peri_group_sum<32>(all, mask);
        for (int64_t c = lane; c < a.classes; c += 32) {
            const double p = (double)peri_exp(x[c] - ((const T *)a.lse)[r]),
                         target = (c == label ? own : 0.0) + part * class_weight<T>(a.of, c);
            dx[c] = ignored ? T(0) : (T)(g * ((own + part * all) * p - target));
        }
    }
};

/* -- layer norm ---------------------------------------------------------------------------------------------------- */

template <class T> struct norm_row {
    peri_k_layer_norm_args a;
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.x + r * a.cols;
        double sum = 0, squares = 0;
        for (int64_t c = lane; c < a.cols; c += 32) sum += (double)x[c];
        double mean = peri_group_sum<32>(sum, mask) / (double)a.cols;
        for (int64_t c = lane; c < a.cols; c += 32) squares += ((double)x[c] - mean) * ((double)x[c] - mean);
        double rstd = 1 / sqrt(peri_group_sum<32>(squares, mask) / (double)a.cols + a.eps);
        if (lane == 0) ((T *)a.mean)[r] = (T)mean, ((T *)a.rstd)[r] = (T)rstd;
        for (int64_t c = lane; c < a.cols; c += 32) {
            double h = ((double)x[c] - mean) * rstd;
            if (a.weight) h *= (double)((const T *)a.weight)[c];
            if (a.bias) h += (double)((const T *)a.bias)[c];
            ((T *)a.y)[r * a.cols + c] = (T)h;
        }
    }
};

template <class T> struct norm_grad_row {
    peri_k_layer_norm_grad_args a;
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.x + r * a.cols, *dy = (const T *)a.dy + r * a.cols, *weight = (const T *)a.weight;
        double mean = (double)((const T *)a.mean)[r], rstd = (double)((const T *)a.rstd)[r], sum_g = 0, sum_gh = 0;
        for (int64_t c = lane; c < a.cols; c += 32) {
            double g = (double)dy[c] * (weight ? (double)weight[c] : 1.0), h = ((double)x[c] - mean) * rstd;
            sum_g += g;
            sum_gh += g * h;
        }
        sum_g = peri_group_sum<32>(sum_g, mask);
        sum_gh = peri_group_sum<32>(sum_gh, mask);
        for (int64_t c = lane; c < a.cols; c += 32) {
            double g = (double)dy[c] * (weight ? (double)weight[c] : 1.0), h = ((double)x[c] - mean) * rstd;
            ((T *)a.dx)[r * a.cols + c] = (T)(rstd * (g - (sum_g + h * sum_gh) / (double)a.cols));
        }
    }
};

/** i = block * cols + column. */
template <class T> struct norm_grad_column {
    peri_k_layer_norm_grad_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t k = i / a.cols, c = i - k * a.cols,
                last = (k + 1) * PERI_SUM_ROWS < a.rows ? (k + 1) * PERI_SUM_ROWS : a.rows;
        double dweight = 0, dbias = 0;
        for (int64_t r = k * PERI_SUM_ROWS; r < last; r++) {
            double g = (double)((const T *)a.dy)[r * a.cols + c];
            dbias += g;
            dweight += g * ((double)((const T *)a.x)[r * a.cols + c] - (double)((const T *)a.mean)[r]) *
                       (double)((const T *)a.rstd)[r];
        }
        if (a.dweight) ((T *)a.dweight)[i] = (T)dweight;
        if (a.dbias) ((T *)a.dbias)[i] = (T)dbias;
    }
};

template <class T>
cudaError_t norm_grad(const peri_k_layer_norm_grad_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    int64_t first = begin * PERI_SUM_ROWS, last = end * PERI_SUM_ROWS < a->rows ? end * PERI_SUM_ROWS : a->rows;
    PERI_CUDA_TRY(each(begin * a->cols, end * a->cols, c, norm_grad_column<T>{*a}));
    return a->dx ? each_warp(first, last, c, norm_grad_row<T>{*a}) : cudaSuccess;
}

} // namespace

/** A warp for each where what is reduced is contiguous, or nearly so, else a thread. */
#define BY_INNER(name, inner)                                                                                          \
    ((inner) < 8 ? (a->dtype == PERI_F64 ? each_group<32>(begin, end, c, name<32, double>{*a})                         \
                                         : each_group<32>(begin, end, c, name<32, float>{*a}))                         \
                 : (a->dtype == PERI_F64 ? each_group<1>(begin, end, c, name<1, double>{*a})                           \
                                         : each_group<1>(begin, end, c, name<1, float>{*a})))

PERI_CUDA_KERNEL(sum_dim)
{
    const int64_t numbers = a->n < a->block ? a->n : a->block;
    if (numbers <= 64)
        return a->dtype == PERI_F64 ? sum_range<1, double>(a, begin, end, c)
                                    : sum_range<1, float, float>(a, begin, end, c);
    if (a->inner < 8)
        return a->dtype == PERI_F64 ? sum_range<32, double>(a, begin, end, c) : sum_range<32, float>(a, begin, end, c);
    return a->dtype == PERI_F64 ? sum_rows<double>(a, begin, end, c) : sum_rows<float>(a, begin, end, c);
}

PERI_CUDA_KERNEL(max_dim)
{
    if (a->dtype != PERI_I64) return BY_INNER(max_one, a->inner);
    return a->inner < 8 ? each_group<32>(begin, end, c, max_one<32, int64_t>{*a})
                        : each_group<1>(begin, end, c, max_one<1, int64_t>{*a});
}

PERI_CUDA_KERNEL(product_dim) { return a->inner < 8 ? products_of_lines<32>(a, begin, end, c)
                               : products_of_lines<1>(a, begin, end, c); }
PERI_CUDA_KERNEL(product_dim_grad)
{
    return a->dtype == PERI_F64 ? each(begin, end, c, product_grad_line<double>{*a})
                                : each(begin, end, c, product_grad_line<float>{*a});
}

PERI_CUDA_KERNEL(max_dim_grad)
{
    if (begin % a->inner || end % a->inner) { /* a part of a row of columns: the outer ones by themselves */
        for (int64_t u = begin, next; u < end; u = next) {
            next = (u / a->inner + 1) * a->inner < end ? (u / a->inner + 1) * a->inner : end;
            for (int64_t r = 0; r < a->n; r++) {
                int64_t at = (u / a->inner * a->n + r) * a->inner + u % a->inner;
                if (a->dtype == PERI_F64) PERI_CUDA_TRY(each(at, at + next - u, c, max_grad_one<double>{*a}));
                else PERI_CUDA_TRY(each(at, at + next - u, c, max_grad_one<float>{*a}));
            }
        }
        return cudaSuccess;
    }
    begin *= a->n, end *= a->n;
    return a->dtype == PERI_F64 ? each(begin, end, c, max_grad_one<double>{*a})
                                : each(begin, end, c, max_grad_one<float>{*a});
}

PERI_CUDA_KERNEL(softmax) { return BY_INNER(softmax_one, a->inner); }
PERI_CUDA_KERNEL(softmax_grad) { return BY_INNER(softmax_grad_one, a->inner); }

PERI_CUDA_KERNEL(layer_norm)
{
    return a->dtype == PERI_F64 ? each_warp(begin, end, c, norm_row<double>{*a})
                                : each_warp(begin, end, c, norm_row<float>{*a});
}

PERI_CUDA_KERNEL(layer_norm_grad)
{
    return a->dtype == PERI_F64 ? norm_grad<double>(a, begin, end, c) : norm_grad<float>(a, begin, end, c);
}

PERI_CUDA_KERNEL(cross_entropy)
{
    if (a->dtype == PERI_F64) return each_warp(begin, end, c, cross_entropy_row<double>{*a});
    return each_warp(begin, end, c, cross_entropy_row<float>{*a});
}

PERI_CUDA_KERNEL(cross_entropy_grad)
{
    if (a->of.weight || a->of.smoothing != 0 || a->of.ignores)
        return a->dtype == PERI_F64 ? each_warp(begin, end, c, cross_entropy_grad_row<double>{*a})
                                    : each_warp(begin, end, c, cross_entropy_grad_row<float>{*a});
    begin *= a->classes, end *= a->classes;
    if (a->dtype == PERI_F64) return each(begin, end, c, cross_entropy_grad_one<double>{*a});
    return each(begin, end, c, cross_entropy_grad_one<float>{*a});
}
