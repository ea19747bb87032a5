/* SPDX-License-Identifier: Apache-2.0
 *
 * elements.cu: kernels/elements.h. What has strides: a thread an element. Sorts are CUB's: one of all elements by their
 * keys and then, of several lines, one by the line.
 */
#include "cub.cuh"
#include "functions.cuh"
#include "rows.cuh"
#include "value.cuh"

#include "../elements.h"
#include "../order.h"

namespace {

/** Element i by strides. */
__device__ __forceinline__ int64_t place_of(int64_t i, int32_t ndim, const int64_t *shape, const int64_t *stride)
{
    int64_t at = 0;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        const int64_t next = i / shape[d];
        at += (i - next * shape[d]) * stride[d];
        i = next;
    }
    return at;
}

struct compare_one {
    peri_k_compare_args a;
    __device__ void operator()(int64_t i) const
    {
        const peri_value x = peri_load(a.a, place_of(i, a.ndim, a.shape, a.a_stride), a.dtype);
        peri_value y = {x.integer, a.integer, a.value, 0};
        if (a.b) y = peri_load(a.b, place_of(i, a.ndim, a.shape, a.b_stride), a.dtype);
        a.dst[i] = x.integer ? peri_holds(a.op, x.i, y.i) : peri_holds(a.op, x.re, y.re);
    }
};

template <class T> struct integer_one {
    peri_k_binary_args a;
    __device__ void operator()(int64_t i) const
    {
        const int64_t x = ((const T *)a.a)[place_of(i, a.ndim, a.shape, a.a_stride)],
                      y = ((const T *)a.b)[place_of(i, a.ndim, a.shape, a.b_stride)];
        ((T *)a.dst)[i] = (T)peri_integer(a.op, x, y);
    }
};

/** i: an element of dst. */
template <class T> struct integer_product_one {
    peri_k_integer_product_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t row = i / a.cols, rest = row / a.rows;
        const T *x = (const T *)a.a + (row - rest * a.rows) * a.a_row;
        const T *y = (const T *)a.b + (i - row * a.cols) * a.b_col;
        for (int32_t d = a.ndim - 1; d >= 0; d--) {
            const int64_t next = rest / a.shape[d], at = rest - next * a.shape[d];
            x += at * a.a_stride[d];
            y += at * a.b_stride[d];
            rest = next;
        }
        uint64_t sum = 0;
        for (int64_t k = 0; k < a.k; k++) sum += (uint64_t)x[k * a.a_col] * (uint64_t)y[k * a.b_row];
        ((T *)a.dst)[i] = (T)sum;
    }
};

template <class T> struct where_one {
    peri_k_where_args a;
    __device__ void operator()(int64_t i) const
    {
        const bool yes = a.condition[place_of(i, a.ndim, a.shape, a.condition_stride)] != 0;
        const T *from = (const T *)(yes ? a.a : a.b);
        T x = {};
        if (from) x = from[place_of(i, a.ndim, a.shape, yes ? a.a_stride : a.b_stride)];
        ((T *)a.dst)[i] = x;
    }
};

template <class T> struct take_one {
    peri_k_take_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t rest = i, at = 0, index = 0;
        for (int32_t d = a.ndim - 1; d >= 0; d--) {
            const int64_t next = rest / a.shape[d], here = rest - next * a.shape[d];
            rest = next;
            index += here * a.index_stride[d];
            if (d != a.dim) at += here * a.src_stride[d];
        }
        ((T *)a.dst)[i] = ((const T *)a.src)[at + a.index[index] * a.src_stride[a.dim]];
    }
};

template <class T, class Sum> struct take_add_line {
    peri_k_take_add_args a;
    __device__ void operator()(int64_t u) const
    {
        int64_t rest = u, dst = 0, src = 0, index = 0;
        for (int32_t d = a.ndim - 1; d >= 0; d--) {
            if (d == a.dim) continue;
            const int64_t next = rest / a.shape[d], here = rest - next * a.shape[d];
            rest = next;
            dst += here * a.dst_stride[d];
            src += here * a.src_stride[d];
            index += here * a.index_stride[d];
        }
        for (int64_t j = 0; j < a.shape[a.dim]; j++) {
            const int64_t at = dst + a.index[index + j * a.index_stride[a.dim]] * a.dst_stride[a.dim];
            const T x = ((const T *)a.src)[src + j * a.src_stride[a.dim]];
            ((T *)a.dst)[at] = a.put ? x : (T)((Sum)((T *)a.dst)[at] + (Sum)x);
        }
    }
};

/** Lines that are longer than LONG, and so few that a thread for each leaves most of a GPU idle, are not walked: their
 *  elements are sorted by the element of dst that they go to. A sort keeps the order of equal ones, so a thread then
 *  adds up what goes to one element in the order of its line, and sums have the same bits. */
enum { LONG = 128, MANY_LINES = 1 << 14 };

int64_t lines_of(const peri_k_take_add_args *a)
{
    int64_t lines = 1;
    for (int32_t d = 0; d < a->ndim; d++) lines *= d == a->dim ? 1 : a->shape[d];
    return lines;
}

int64_t sorted_of(const peri_k_take_add_args *a) /* how many elements are sorted; 0: lines are walked */
{
    const int64_t lines = lines_of(a), n = a->shape[a->dim];
    return n > LONG && lines < MANY_LINES ? lines * n : 0;
}

/** Where each element goes, as an offset in dst, and where it lies in src. */
struct take_add_keys {
    peri_k_take_add_args a;
    uint64_t *keys;
    int64_t *places;
    __device__ void operator()(int64_t i) const
    {
        int64_t rest = i, dst = 0, src = 0, index = 0;
        for (int32_t d = a.ndim - 1; d >= 0; d--) {
            const int64_t next = rest / a.shape[d], here = rest - next * a.shape[d];
            rest = next;
            if (d != a.dim) dst += here * a.dst_stride[d];
            src += here * a.src_stride[d];
            index += here * a.index_stride[d];
        }
        keys[i] = (uint64_t)(dst + a.index[index] * a.dst_stride[a.dim]);
        places[i] = src;
    }
};

/** What goes to one element of dst: the run of equal keys that begins (put: ends) with number i. */
template <class T, class Sum> struct take_add_run {
    peri_k_take_add_args a;
    const uint64_t *keys;
    const int64_t *places;
    int64_t n;
    __device__ void operator()(int64_t i) const
    {
        const uint64_t key = keys[i];
        T *dst = (T *)a.dst + key;
        const T *src = (const T *)a.src;
        if (a.put) {
            if (i + 1 == n || keys[i + 1] != key) *dst = src[places[i]];
            return;
        }
        if (i > 0 && keys[i - 1] == key) return;
        T sum = *dst;
        for (int64_t j = i; j < n && keys[j] == key; j++) sum = (T)((Sum)sum + (Sum)src[places[j]]);
        *dst = sum;
    }
};

/* -- running sums -------------------------------------------------------------------------------------------------- */

/** Line u by LANES threads, which add up as many neighbours at a time. */
template <int LANES, class T, class Sum> struct running_line {
    peri_k_running_sum_args a;
    __device__ void operator()(int64_t u, int lane, unsigned mask) const
    {
        const int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        Sum before = 0;
        for (int64_t first = 0; first < a.n; first += LANES) {
            const int64_t r = first + lane, at = base + (a.backwards ? a.n - 1 - r : r) * a.inner;
            Sum sum = r < a.n ? (Sum)((const T *)a.x)[at] : Sum(0);
            PERI_UNROLL
            for (int by = 1; by < LANES; by *= 2) {
                const Sum left = __shfl_up_sync(mask, sum, by, LANES);
                if (lane >= by) sum += left;
            }
            sum += before;
            if (r < a.n) ((T *)a.y)[at] = (T)sum;
            before = __shfl_sync(mask, sum, LANES - 1, LANES);
        }
    }
};

template <int LANES>
cudaError_t running_lines(const peri_k_running_sum_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->dtype) {
    case PERI_F64: return each_group<LANES>(begin, end, c, running_line<LANES, double, double>{*a});
    case PERI_I64: return each_group<LANES>(begin, end, c, running_line<LANES, int64_t, uint64_t>{*a});
    default: return each_group<LANES>(begin, end, c, running_line<LANES, float, double>{*a});
    }
}

/** Line u. */
template <class T, class Product> struct running_product_line {
    peri_k_product_dim_args a;
    __device__ void operator()(int64_t u) const
    {
        const int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        Product product = 1;
        for (int64_t r = 0; r < a.n; r++) {
            product *= (Product)((const T *)a.x)[base + r * a.inner];
            ((T *)a.y)[base + r * a.inner] = (T)product;
        }
    }
};

/** Line u: what stands before each element on the way down, and, on the way up, the sum of what stands behind it. */
template <class T> struct running_product_grad_line {
    peri_k_product_dim_grad_args a;
    __device__ void operator()(int64_t u) const
    {
        const int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        const T *x = (const T *)a.x + base, *dy = (const T *)a.dy + base;
        T *dx = (T *)a.dx + base;
        double before = 1, behind = 0;
        for (int64_t r = 0; r < a.n; r++) {
            dx[r * a.inner] = (T)before;
            before *= (double)x[r * a.inner];
        }
        for (int64_t r = a.n - 1; r >= 0; r--) {
            behind += (double)dy[r * a.inner];
            dx[r * a.inner] = (T)((double)dx[r * a.inner] * behind);
            behind *= (double)x[r * a.inner];
        }
    }
};

/** Line u. */
template <class T> struct running_extreme_line {
    peri_k_running_extreme_args a;
    __device__ void operator()(int64_t u) const
    {
        const int64_t base = u / a.inner * a.n * a.inner + u % a.inner;
        int64_t best = base, rank = 0;
        for (int64_t r = 0; r < a.n; r++) {
            const int64_t at = base + r * a.inner;
            if (k_is_extreme(a.x, at, best, a.dtype, a.least)) best = at, rank = r;
            a.indices[at] = rank;
            ((T *)a.values)[at] = ((const T *)a.x)[best];
        }
    }
};

/** Line l. */
template <class T> struct mode_of_line {
    peri_k_mode_args a;
    __device__ void operator()(int64_t l) const
    {
        const int64_t at = l * a.n + k_longest_run(a.sorted, l * a.n, a.n, a.dtype);
        a.indices[l] = a.places[at];
        ((T *)a.values)[l] = ((const T *)a.sorted)[at];
    }
};

struct bin_one {
    peri_k_bin_args a;
    __device__ void operator()(int64_t i) const
    {
        const peri_value x = peri_load(a.x, i, a.dtype);
        if (x.integer || a.dtype == PERI_F64)
            a.dst[i] = k_bin_f64(x.integer ? (double)x.i : x.re, a.least, a.most, a.bins);
        else a.dst[i] = k_bin_f32((float)x.re, (float)a.least, (float)a.most, a.bins);
    }
};

template <class T> struct in_batch_logit {
    peri_k_in_batch_logits_args a;
    __device__ void operator()(int64_t at) const
    {
        const int64_t i = at / a.n, j = at - i * a.n;
        T y = ((const T *)a.x)[at] * (T)a.scale;
        if (a.log_q) y -= ((const T *)a.log_q)[j];
        ((T *)a.dst)[at] = a.ids && i != j && a.ids[i] == a.ids[j] ? (T)a.fill : y;
    }
};

struct unravel_one {
    peri_k_unravel_args a;
    __device__ void operator()(int64_t i) const
    {
        int64_t rest = a.flat[i];
        for (int32_t d = a.ndim - 1; d > 0; d--) {
            const int64_t next = rest / a.shape[d];
            a.dst[i * a.ndim + d] = rest - next * a.shape[d];
            rest = next;
        }
        a.dst[i * a.ndim] = rest;
    }
};

template <class T> struct integer_sum_one {
    peri_k_integer_sum_args a;
    __device__ void operator()(int64_t u) const
    {
        const int64_t line = u / a.inner, o = line / a.blocks, k = line - o * a.blocks, left = a.n - k * a.block,
                      rows = left < a.block ? left : a.block;
        const T *x = (const T *)a.x + (o * a.n + k * a.block) * a.inner + (u - line * a.inner);
        uint64_t sum = 0;
        for (int64_t r = 0; r < rows; r++) sum += (uint64_t)x[r * a.inner];
        a.dst[u] = (int64_t)sum;
    }
};

template <class T> struct triangle_one {
    peri_k_triangle_args a;
    __device__ void operator()(int64_t i) const
    {
        const int64_t row = i / a.cols, c = i - row * a.cols, diagonal = row % a.rows + a.k;
        if (a.upper ? c >= diagonal : c <= diagonal) ((T *)a.dst)[i] = ((const T *)a.x)[i];
        else memcpy((T *)a.dst + i, a.fill, sizeof(T));
    }
};

struct member_one {
    peri_k_member_args a;
    __device__ void operator()(int64_t i) const { a.dst[i] = k_is_member(a.sorted, a.n, a.x, i, a.dtype); }
};

/** A warp a row. */
template <class T> struct cosine_row {
    peri_k_cosine_args a;
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        const T *x = (const T *)a.a + r * a.cols, *z = (const T *)a.b + r * a.cols;
        double ab = 0, aa = 0, bb = 0;
        for (int64_t c = lane; c < a.cols; c += 32) {
            const double p = (double)x[c], q = (double)z[c];
            ab += p * q, aa += p * p, bb += q * q;
        }
        ab = peri_group_sum<32>(ab, mask);
        aa = peri_group_sum<32>(aa, mask);
        bb = peri_group_sum<32>(bb, mask);
        if (lane == 0) ((T *)a.y)[r] = (T)(ab * k_cosine_sizes(aa, bb, a.eps, a.added, a.sizes + 4 * r));
    }
};

/** i: an element of da and db. */
template <class T> struct cosine_grad_one {
    peri_k_cosine_grad_args a;
    __device__ void operator()(int64_t i) const
    {
        const int64_t r = i / a.cols;
        const double *size = a.sizes + 4 * r, g = (double)((const T *)a.dy)[r], y = (double)((const T *)a.y)[r];
        const double both = g * (size[0] * size[1]), x = (double)((const T *)a.a)[i], z = (double)((const T *)a.b)[i];
        if (a.da) ((T *)a.da)[i] = (T)(both * z - g * (y * size[2]) * x);
        if (a.db) ((T *)a.db)[i] = (T)(both * x - g * (y * size[3]) * z);
    }
};

struct search_one {
    peri_k_search_args a;
    __device__ void operator()(int64_t i) const
    {
        a.dst[i] = k_search(a.sorted, a.one ? 0 : i / a.per_line * a.n, a.n, a.x, i, a.dtype, a.right);
    }
};

struct iota_one {
    peri_k_iota_args a;
    __device__ void operator()(int64_t i) const
    {
        const double x = a.start + (double)i * a.step;
        const int64_t integer = a.integer_start + i * a.integer_step;
        switch (a.dtype) {
        case PERI_F64: ((double *)a.dst)[i] = x; break;
        case PERI_I64: ((int64_t *)a.dst)[i] = integer; break;
        case PERI_I32: ((int32_t *)a.dst)[i] = (int32_t)integer; break;
        default: ((float *)a.dst)[i] = (float)x; break;
        }
    }
};

/* -- sorting ------------------------------------------------------------------------------------------------------- */

struct element_keys {
    peri_op_sort_lines a;
    uint64_t *keys;
    int64_t *places;
    __device__ void operator()(int64_t i) const
    {
        keys[i] = k_sort_key(a.x, i, a.dtype, a.descending);
        places[i] = i;
    }
};

struct line_keys {
    const int64_t *places;
    uint64_t *keys;
    int64_t n;
    __device__ void operator()(int64_t i) const { keys[i] = (uint64_t)(places[i] / n); }
};

/** i: an element of the result, number r of line l. */
template <class T> struct sorted_one {
    peri_op_sort_lines a;
    const int64_t *places;
    __device__ void operator()(int64_t i) const
    {
        const int64_t l = i / a.k, *line = places + l * a.n;
        int64_t rank = a.first + i - l * a.k;
        if (a.nan_first && k_is_nan(a.x, line[a.n - 1], a.dtype)) { /* the NaNs are the last ones */
            int64_t high = a.n - 1;
            rank = 0;
            while (rank < high) {
                const int64_t middle = rank + (high - rank) / 2;
                if (k_is_nan(a.x, line[middle], a.dtype)) high = middle;
                else rank = middle + 1;
            }
        }
        const int64_t at = line[rank];
        ((T *)a.values)[i] = ((const T *)a.x)[at];
        a.indices[i] = at - l * a.n;
    }
};

int bits_below(int64_t n)
{
    int bits = 0;
    while (bits < 63 && ((int64_t)1 << bits) < n) bits++;
    return bits;
}

} // namespace

PERI_CUDA_KERNEL(compare) { return each(begin, end, c, compare_one{*a}); }

#define WHERE(T) each(begin, end, c, where_one<T>{*a})
#define TAKE(T) each(begin, end, c, take_one<T>{*a})
PERI_CUDA_KERNEL(where) { return PERI_BY_WORD(a->width, WHERE); }
PERI_CUDA_KERNEL(take) { return PERI_BY_WORD(a->width, TAKE); }

PERI_CUDA_KERNEL(running_sum) { return a->inner < 8 ? running_lines<32>(a, begin, end, c)
                               : running_lines<1>(a, begin, end, c); }

/** The same functor for elements of each integer dtype. */
#define BY_INTEGER(name, begin, end) \
    (a->dtype == PERI_I64   ? each(begin, end, c, name<int64_t>{*a}) \
     : a->dtype == PERI_I32 ? each(begin, end, c, name<int32_t>{*a}) \
     : a->dtype == PERI_I16 ? each(begin, end, c, name<int16_t>{*a}) \
     : a->dtype == PERI_I8  ? each(begin, end, c, name<int8_t>{*a}) \
                            : each(begin, end, c, name<uint8_t>{*a}))
PERI_CUDA_KERNEL(integer) { return BY_INTEGER(integer_one, begin, end); }
PERI_CUDA_KERNEL(integer_product) { return BY_INTEGER(integer_product_one, begin * a->cols, end * a->cols); }
PERI_CUDA_KERNEL(running_product)
{
    switch (a->dtype) {
    case PERI_F64: return each(begin, end, c, running_product_line<double, double>{*a});
    case PERI_I64: return each(begin, end, c, running_product_line<int64_t, uint64_t>{*a});
    default: return each(begin, end, c, running_product_line<float, double>{*a});
    }
}
PERI_CUDA_KERNEL(running_product_grad)
{
    return a->dtype == PERI_F64 ? each(begin, end, c, running_product_grad_line<double>{*a})
                                : each(begin, end, c, running_product_grad_line<float>{*a});
}
#define EXTREME(T) each(begin, end, c, running_extreme_line<T>{*a})
PERI_CUDA_KERNEL(running_extreme) { return PERI_BY_WORD(peri_dtype_bytes(a->dtype), EXTREME); }
#define MODE(T) each(begin, end, c, mode_of_line<T>{*a})
PERI_CUDA_KERNEL(mode_line) { return PERI_BY_WORD(peri_dtype_bytes(a->dtype), MODE); }
PERI_CUDA_KERNEL(bin_number) { return each(begin, end, c, bin_one{*a}); }
PERI_CUDA_KERNEL(in_batch_logits)
{
    return a->dtype == PERI_F64 ? each(begin * a->n, end * a->n, c, in_batch_logit<double>{*a})
                                : each(begin * a->n, end * a->n, c, in_batch_logit<float>{*a});
}
PERI_CUDA_KERNEL(unravel) { return each(begin, end, c, unravel_one{*a}); }
PERI_CUDA_KERNEL(integer_sum)
{
    switch (a->dtype) {
    case PERI_I64: return each(begin, end, c, integer_sum_one<int64_t>{*a});
    case PERI_I32: return each(begin, end, c, integer_sum_one<int32_t>{*a});
    case PERI_I16: return each(begin, end, c, integer_sum_one<int16_t>{*a});
    case PERI_I8: return each(begin, end, c, integer_sum_one<int8_t>{*a});
    default: return each(begin, end, c, integer_sum_one<uint8_t>{*a});
    }
}
#define TRIANGLE(T) each(begin * a->cols, end * a->cols, c, triangle_one<T>{*a})
PERI_CUDA_KERNEL(triangle) { return PERI_BY_WORD(a->width, TRIANGLE); }
PERI_CUDA_KERNEL(member) { return each(begin, end, c, member_one{*a}); }
PERI_CUDA_KERNEL(cosine)
{
    return a->dtype == PERI_F64 ? each_warp(begin, end, c, cosine_row<double>{*a})
                                : each_warp(begin, end, c, cosine_row<float>{*a});
}
PERI_CUDA_KERNEL(cosine_grad)
{
    return a->dtype == PERI_F64 ? each(begin * a->cols, end * a->cols, c, cosine_grad_one<double>{*a})
                                : each(begin * a->cols, end * a->cols, c, cosine_grad_one<float>{*a});
}
PERI_CUDA_KERNEL(search) { return each(begin, end, c, search_one{*a}); }
PERI_CUDA_KERNEL(iota) { return each(begin, end, c, iota_one{*a}); }

/** Keys and sorted keys, places and sorted places, and CUB's. */
static int64_t sort_scratch(int64_t n) { return 4 * peri_part(8 * n) + peri_part((int64_t)peri_sort_bytes(n)); }

PERI_CUDA_SCRATCH(take_add) { return sorted_of(a) ? sort_scratch(sorted_of(a)) : 0; }

PERI_CUDA_OP(take_add)
{
    const int64_t n = sorted_of(a), part = peri_part(8 * n);
    char *at = c->scratch;
    uint64_t *keys = (uint64_t *)at, *sorted = (uint64_t *)(at + part);
    int64_t *places = (int64_t *)(at + 2 * part), *moved = (int64_t *)(at + 3 * part), most = 0;
    if (n == 0) {
#define WALK(T, Sum) each(0, lines_of(a), c, take_add_line<T, Sum>{*a})
        return a->dtype == PERI_F64   ? WALK(double, double)
               : a->dtype == PERI_I64 ? WALK(int64_t, uint64_t)
                                      : WALK(float, float);
    }
    size_t bytes = (size_t)(c->bytes - 4 * part);
    for (int32_t d = 0; d < a->ndim; d++) most += ((d == a->dim ? a->size : a->shape[d]) - 1) * a->dst_stride[d];
    PERI_CUDA_TRY(each(0, n, c, take_add_keys{*a, keys, places}));
    PERI_CUDA_TRY(peri_sort_pairs(at + 4 * part, bytes, (const uint64_t *)keys, sorted, (const int64_t *)places, moved,
                                  n, 0, bits_below(most + 2), c->stream));
#define ADD_RUNS(T, Sum) each(0, n, c, take_add_run<T, Sum>{*a, sorted, moved, n})
    return a->dtype == PERI_F64   ? ADD_RUNS(double, double)
           : a->dtype == PERI_I64 ? ADD_RUNS(int64_t, uint64_t)
                                  : ADD_RUNS(float, float);
}

PERI_CUDA_SCRATCH(sort_lines) { return sort_scratch(a->lines * a->n); }

PERI_CUDA_OP(sort_lines)
{
    const int64_t n = a->lines * a->n, part = peri_part(8 * n), wanted = a->lines * a->k;
    char *at = c->scratch;
    uint64_t *keys = (uint64_t *)at, *sorted = (uint64_t *)(at + part);
    int64_t *places = (int64_t *)(at + 2 * part), *moved = (int64_t *)(at + 3 * part);
    size_t bytes = (size_t)(c->bytes - 4 * part);
    if (wanted == 0) return cudaSuccess;
    PERI_CUDA_TRY(each(0, n, c, element_keys{*a, keys, places}));
    PERI_CUDA_TRY(peri_sort_pairs(at + 4 * part, bytes, (const uint64_t *)keys, sorted, (const int64_t *)places, moved,
                                  n, 0, k_sort_bits(a->dtype), c->stream));
    if (a->lines > 1) {
        PERI_CUDA_TRY(each(0, n, c, line_keys{moved, keys, a->n}));
        PERI_CUDA_TRY(peri_sort_pairs(at + 4 * part, bytes, (const uint64_t *)keys, sorted, (const int64_t *)moved,
                                      places, n, 0, bits_below(a->lines), c->stream));
        moved = places;
    }
#define SORTED(T) each(0, wanted, c, sorted_one<T>{*a, moved})
    return PERI_BY_WORD(peri_dtype_bytes(a->dtype), SORTED);
}
