/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.cu: kernels/optim.h. A launch updates a list of parameters: each block of threads takes a chunk of one of them,
 * pack by pack (vector.cuh), and looks up whose chunk it is. Norms are sums in double whose order the sizes fix.
 */
#include "cuda.h"
#include "functions.cuh"
#include "scan.cuh"
#include "vector.cuh"

#include "../optim.h"

#if defined(PERI_CUDA_HOST)
#define PERI_CONSTANT
#else
#define PERI_CONSTANT __grid_constant__ /* a parameter that stays where it is, however it is indexed */
#endif

namespace {

/** The first part that has units beyond @unit: the one in which unit number @unit lies. */
__device__ __forceinline__ int part_of(const peri_optim_list &list, int64_t unit)
{
    int low = 0, high = list.n - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (list.part[middle].end > unit) high = middle;
        else low = middle + 1;
    }
    return low;
}
__device__ __forceinline__ int64_t first_element(const peri_optim_list &list, int part)
{
    return part ? list.part[part - 1].end : 0;
}

/** The gradient with its sign and weight decay. */
template <class T, class A> __device__ __forceinline__ T decayed(const A &a, T w, T g, double weight_decay)
{
    g = a.maximize ? -g : g;
    return weight_decay == 0 ? g : g + (T)weight_decay * w;
}

/* -- updates of one element: of its weight w, gradient g and states s, which become the new ones ------------------- */

/** STATES: how many arrays of states there are at most; has[k]: whether this launch has the k-th. GRADIENT: whether it
 *  reads gradients. */
struct sgd_step {
    typedef peri_k_optim_sgd_args arguments;
    enum { STATES = 1, GRADIENT = 1 };
    template <class T>
    static __device__ __forceinline__ void step(const arguments &a, const bool (&has)[3], T &w, T g, T (&s)[3])
    {
        g = decayed<T>(a, w, g, a.weight_decay);
        if (has[0]) {
            const T m = a.first ? g : (T)a.momentum * s[0] + (T)(1 - a.dampening) * g;
            s[0] = m;
            g = a.nesterov ? g + (T)a.momentum * m : m;
        }
        w -= (T)a.lr * g;
    }
};

struct adagrad_step {
    typedef peri_k_optim_adagrad_args arguments;
    enum { STATES = 1, GRADIENT = 1 };
    template <class T>
    static __device__ __forceinline__ void step(const arguments &a, const bool (&)[3], T &w, T g, T (&s)[3])
    {
        g = decayed<T>(a, w, g, a.weight_decay);
        s[0] = s[0] + g * g;
        w -= (T)a.lr * g / (peri_sqrt(s[0]) + (T)a.eps);
    }
};

struct adam_step {
    typedef peri_k_optim_adam_args arguments;
    enum { STATES = 3, GRADIENT = 1 };
    template <class T>
    static __device__ __forceinline__ void step(const arguments &a, const bool (&has)[3], T &w, T g, T (&s)[3])
    {
        g = decayed<T>(a, w, g, a.decoupled ? 0 : a.weight_decay);
        if (a.decoupled) w *= (T)(1 - a.lr * a.weight_decay);
        s[0] += (T)(1 - a.beta1) * (g - s[0]);
        T v = (T)a.beta2 * s[1] + (T)(1 - a.beta2) * g * g;
        s[1] = v;
        if (has[2]) {
            v = v > s[2] ? v : s[2];
            s[2] = v;
        }
        w = w - (T)a.step_size * s[0] / (peri_sqrt(v) / (T)a.root + (T)a.eps);
    }
};

struct rmsprop_step {
    typedef peri_k_optim_rmsprop_args arguments;
    enum { STATES = 3, GRADIENT = 1 };
    template <class T>
    static __device__ __forceinline__ void step(const arguments &a, const bool (&has)[3], T &w, T g, T (&s)[3])
    {
        g = decayed<T>(a, w, g, a.weight_decay);
        T d = (T)a.alpha * s[0] + (T)(1 - a.alpha) * g * g;
        s[0] = d;
        if (has[1]) {
            s[1] += (T)(1 - a.alpha) * (g - s[1]);
            d = d - s[1] * s[1];
        }
        T update = g / (peri_sqrt(d) + (T)a.eps);
        if (has[2]) {
            update += (T)a.momentum * s[2];
            s[2] = update;
        }
        w -= (T)a.lr * update;
    }
};

struct clip_norm_step {
    typedef peri_k_clip_norm_args arguments;
    enum { STATES = 0, GRADIENT = 0 };
    template <class T>
    static __device__ __forceinline__ void step(const arguments &a, const bool (&)[3], T &w, T, T (&)[3])
    {
        const double factor = a.limit / (a.norm[0] + 1e-6);
        w *= (T)(factor > 1 ? 1 : factor);
    }
};

struct clip_value_step {
    typedef peri_k_clip_value_args arguments;
    enum { STATES = 0, GRADIENT = 0 };
    template <class T>
    static __device__ __forceinline__ void step(const arguments &a, const bool (&)[3], T &w, T, T (&)[3])
    {
        const T limit = (T)a.limit;
        w = w > limit ? limit : w < -limit ? -limit : w;
    }
};

/* -- chunks of parameters ------------------------------------------------------------------------------------------ */

/** Packs of a thread in a chunk: their loads are in flight together. */
enum { AT_ONCE = 1 };

/** The chunks of the parts up to each, and whether its arrays lie at multiples of 16 bytes. */
struct chunks {
    uint32_t end[PERI_OPTIM_PARTS];
    uint64_t aligned;
};

template <class E, class S, bool WHOLE>
__device__ __forceinline__ void update_pack(const typename S::arguments &a, const peri_optim_part &p,
                                            const bool (&has)[3], const peri_pack<E> &of_g, peri_pack<E> of_w,
                                            peri_pack<E> (&of_s)[3], int64_t i, int n)
{
    typedef PERI_COMPUTED(E) T;
    const int N = peri_pack<E>::N;
    T w[peri_pack<E>::N], g[peri_pack<E>::N], s[3][peri_pack<E>::N];
    peri_unpack<E>(of_w, w);
    if (S::GRADIENT) peri_unpack<E>(of_g, g);
    PERI_UNROLL
    for (int k = 0; k < S::STATES; k++) peri_unpack<E>(of_s[k], s[k]);
    PERI_UNROLL
    for (int j = 0; j < N; j++) {
        T own[3] = {};
        PERI_UNROLL
        for (int k = 0; k < S::STATES; k++) own[k] = s[k][j];
        S::template step<T>(a, has, w[j], S::GRADIENT ? g[j] : T(0), own);
        PERI_UNROLL
        for (int k = 0; k < S::STATES; k++) s[k][j] = own[k];
    }
    peri_store_pack<E>((typename E::type *)p.w + i, n, WHOLE, peri_to_pack<E>(w));
    PERI_UNROLL
    for (int k = 0; k < S::STATES; k++)
        if (has[k]) peri_store_pack<E>((typename E::type *)p.state[k] + i, n, WHOLE, peri_to_pack<E>(s[k]));
}

/** Elements [first, last) of part p, by a block of threads: PER_THREAD packs of each at once. */
template <class E, class S, int PER_THREAD, bool WHOLE>
__device__ __forceinline__ void update_chunk(const typename S::arguments &a, const peri_optim_part &p, int64_t first,
                                             int64_t last)
{
    const int N = peri_pack<E>::N;
    const bool has[3] = {p.state[0] != NULL, p.state[1] != NULL, p.state[2] != NULL};
    for (int64_t from = first + threadIdx.x * N; from < last; from += PER_THREAD * PERI_BLOCK * N) {
        /* a state that is left out counts as 0 */
        peri_pack<E> w[PER_THREAD] = {}, g[PER_THREAD] = {}, s[PER_THREAD][3] = {};
        PERI_UNROLL
        for (int q = 0; q < PER_THREAD; q++) {
            const int64_t i = from + q * PERI_BLOCK * N, left = last - i;
            const int n = left < N ? (int)left : N;
            if (left <= 0) continue;
            w[q] = peri_load_pack<E>((const typename E::type *)p.w + i, n, WHOLE);
            if (S::GRADIENT) g[q] = peri_load_pack<E>((const typename E::type *)p.g + i, n, WHOLE);
            PERI_UNROLL
            for (int k = 0; k < S::STATES; k++)
                if (has[k]) s[q][k] = peri_load_pack<E>((const typename E::type *)p.state[k] + i, n, WHOLE);
        }
        PERI_UNROLL
        for (int q = 0; q < PER_THREAD; q++) {
            const int64_t i = from + q * PERI_BLOCK * N, left = last - i;
            if (left <= 0) break;
            update_pack<E, S, WHOLE>(a, p, has, g[q], w[q], s[q], i, left < N ? (int)left : N);
        }
    }
}

/** Units [begin, end) of the list, by chunks of PACKS packs a thread. */
template <class E, class S, int PACKS>
__global__ void __launch_bounds__(PERI_BLOCK)
    update_kernel(const PERI_CONSTANT typename S::arguments a, const PERI_CONSTANT chunks c, int64_t begin, int64_t end)
{
    const int64_t size = PACKS * PERI_BLOCK * peri_pack<E>::N;
    const uint32_t count = c.end[a.list.n - 1];
    for (uint32_t b = blockIdx.x; b < count; b += gridDim.x) {
        int low = 0, high = a.list.n - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (c.end[middle] > b) high = middle;
            else low = middle + 1;
        }
        const int64_t before = first_element(a.list, low), all = a.list.part[low].end - before;
        const int64_t start = begin > before ? begin - before : 0, stop = end - before < all ? end - before : all;
        const int64_t first = start + (int64_t)(b - (low ? c.end[low - 1] : 0)) * size,
                      last = first + size < stop ? first + size : stop;
        /* Whole packs first; what is left of the part is less than a pack. */
        const int64_t middle = c.aligned >> low & 1 ? last - (last - first) % peri_pack<E>::N : first;
        update_chunk<E, S, PACKS, true>(a, a.list.part[low], first, middle);
        update_chunk<E, S, 1, false>(a, a.list.part[low], middle, last);
    }
}

template <class E, class S, int PACKS = AT_ONCE>
cudaError_t update_parameters(const typename S::arguments *a, int64_t begin, int64_t end, const peri_cuda_call *call)
{
    const int64_t size = PACKS * PERI_BLOCK * peri_pack<E>::N;
    chunks c = {};
    int64_t count = 0, before = 0;
    for (int32_t i = 0; i < a->list.n; i++) {
        const peri_optim_part *p = &a->list.part[i];
        const int64_t start = begin > before ? begin : before, stop = end < p->end ? end : p->end;
        uint64_t bits =
            (uint64_t)p->w | (uint64_t)p->g | (uint64_t)p->state[0] | (uint64_t)p->state[1] | (uint64_t)p->state[2];
        bits |= (uint64_t)(start - before) * sizeof(typename E::type);
        if (stop > start) count += (stop - start + size - 1) / size;
        if (bits % 16 == 0) c.aligned |= (uint64_t)1 << i;
        c.end[i] = (uint32_t)count;
        before = p->end;
    }
    if (count == 0) return cudaSuccess;
    return peri_cuda_launch(update_kernel<E, S, PACKS>, peri_cuda_grid(count, 1, call, 1 << 12), PERI_BLOCK, 0, call,
                            *a, c, begin, end);
}

/** A warp a row. */
template <class T>
__global__ void __launch_bounds__(PERI_BLOCK)
    rowwise_kernel(const PERI_CONSTANT peri_k_optim_rowwise_adagrad_args a, int64_t begin, int64_t end)
{
    const int lane = peri_lane();
    for (int64_t unit = begin + peri_grid_thread() / 32; unit < end; unit += peri_grid_threads() / 32) {
        const int part = part_of(a.list, unit);
        const peri_optim_part &p = a.list.part[part];
        const int64_t r = unit - first_element(a.list, part), cols = p.n / (p.end - first_element(a.list, part));
        T *w = (T *)p.w + r * cols;
        const T *g = (const T *)p.g + r * cols;
        double squares = 0;
        for (int64_t k = lane; k < cols; k += 32) {
            double x = (double)decayed<T>(a, w[k], g[k], a.weight_decay);
            squares += x * x;
        }
        squares = peri_group_sum<32>(squares, 0xffffffffu);
        double sum = (double)((const T *)p.state[0])[r] + (cols ? squares / (double)cols : 0);
        T scale = (T)(a.lr / (sqrt(sum) + a.eps));
        __syncwarp(0xffffffffu); /* all have read the old sum */
        if (lane == 0) ((T *)p.state[0])[r] = (T)sum;
        for (int64_t k = lane; k < cols; k += 32) w[k] -= scale * decayed<T>(a, w[k], g[k], a.weight_decay);
    }
}

/* -- norms --------------------------------------------------------------------------------------------------------- */

struct add {
    __device__ double operator()(double x, double y) const { return x + y; }
};
/** NaN is the largest. */
struct larger {
    __device__ double operator()(double x, double y) const { return y > x || y != y ? y : x; }
};

/** A block of threads a block of elements. */
template <class T>
__global__ void __launch_bounds__(PERI_BLOCK)
    partial_norms(const PERI_CONSTANT peri_k_norm_partial_args a, int64_t begin, int64_t end)
{
    const bool most = isinf(a.p);
    for (int64_t unit = begin + blockIdx.x; unit < end; unit += gridDim.x) {
        const int part = part_of(a.list, unit);
        const int64_t k = unit - first_element(a.list, part), n = a.list.part[part].n;
        const T *x = (const T *)a.list.part[part].w;
        const int64_t last = (k + 1) * PERI_NORM_BLOCK < n ? (k + 1) * PERI_NORM_BLOCK : n;
        double sum = 0;
        for (int64_t i = k * PERI_NORM_BLOCK + threadIdx.x; i < last; i += PERI_BLOCK) {
            double y = fabs((double)x[i]);
            if (most) sum = larger()(sum, y);
            else sum += a.p == 2 ? y * y : a.p == 1 ? y : pow(y, a.p);
        }
        if (most) sum = peri_block_combine(sum, larger());
        else sum = peri_block_combine(sum, add());
        if (threadIdx.x == 0) a.partial[unit] = sum;
    }
}

/** One block. */
__global__ void __launch_bounds__(PERI_BLOCK) finish_norm(peri_k_norm_finish_args a)
{
    const bool most = isinf(a.p);
    double sum = 0;
    for (int64_t k = threadIdx.x; k < a.count; k += PERI_BLOCK)
        sum = most ? larger()(sum, a.partial[k]) : sum + a.partial[k];
    sum = most ? peri_block_combine(sum, larger()) : peri_block_combine(sum, add());
    if (threadIdx.x != 0) return;
    a.out[0] = !a.root || most ? sum : a.p == 2 ? sqrt(sum) : a.p == 1 ? sum : pow(sum, 1 / a.p);
}

} // namespace

#define BY_DTYPE(step)                                                                                                 \
    (a->dtype == PERI_F64 ? update_parameters<peri_f64, step>(a, begin, end, c)                                        \
                          : update_parameters<peri_f32, step>(a, begin, end, c))

PERI_CUDA_KERNEL(optim_sgd) { return BY_DTYPE(sgd_step); }
PERI_CUDA_KERNEL(optim_adagrad) { return BY_DTYPE(adagrad_step); }
PERI_CUDA_KERNEL(optim_adam) { return BY_DTYPE(adam_step); }
PERI_CUDA_KERNEL(optim_rmsprop) { return BY_DTYPE(rmsprop_step); }
PERI_CUDA_KERNEL(clip_norm) { return BY_DTYPE(clip_norm_step); }
PERI_CUDA_KERNEL(clip_value) { return BY_DTYPE(clip_value_step); }

PERI_CUDA_KERNEL(optim_rowwise_adagrad)
{
    if (begin >= end) return cudaSuccess;
    unsigned grid = peri_cuda_grid(end - begin, PERI_WARPS, c);
    if (a->dtype == PERI_F64) return peri_cuda_launch(rowwise_kernel<double>, grid, PERI_BLOCK, 0, c, *a, begin, end);
    return peri_cuda_launch(rowwise_kernel<float>, grid, PERI_BLOCK, 0, c, *a, begin, end);
}

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
