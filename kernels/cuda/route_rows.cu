/* SPDX-License-Identifier: Apache-2.0
 *
 * route_rows.cu: kernels/route.h: rows on their way back. 16 lanes have a row of a block of columns, by 16 bytes where
 * rows are aligned; the addresses of 16 rows are found by a lane each, so that the rows' loads follow each other
 * without waiting.
 */
#include "route.cuh"

namespace {

enum { LANES = 16, AHEAD = 4 }; /* lanes of a row; loads in flight */

__device__ __forceinline__ bool aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float4 add(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float divide(float a, float d) { return a / d; }
__device__ __forceinline__ float4 divide(float4 a, float d) { return make_float4(a.x / d, a.y / d, a.z / d, a.w / d); }
__device__ __forceinline__ void zero(float &x) { x = 0; }
__device__ __forceinline__ void zero(float4 &x) { x = make_float4(0, 0, 0, 0); }

/* -- pooled rows --------------------------------------------------------------------------------------------------- */

struct combine_cell {
    peri_k_route_combine_args a;
    __device__ void narrow(int32_t, int64_t &, int64_t &) const {}
    __device__ const float *piece(const peri_k_output &out, int64_t k, int64_t bag) const
    {
        const peri_k_piece p = a.pieces[out.first_piece + k];
        return (p.own ? a.own : a.received) + p.offset + bag * out.cols;
    }
    template <class V> __device__ void columns(const peri_k_output &out, V *to, int64_t bag, int64_t n, int lane) const
    {
        for (int64_t c = lane; c < n; c += LANES) {
            V sum, x[AHEAD];
            zero(sum);
            for (int64_t first = 0; first < out.n_pieces; first += AHEAD) {
                PERI_UNROLL
                for (int j = 0; j < AHEAD; j++)
                    if (first + j < out.n_pieces) x[j] = ((const V *)piece(out, first + j, bag))[c];
                PERI_UNROLL
                for (int j = 0; j < AHEAD; j++)
                    if (first + j < out.n_pieces) sum = first + j ? add(sum, x[j]) : x[j];
            }
            to[c] = sum;
        }
    }
    __device__ void operator()(int64_t b, int32_t o, int lane, unsigned mask) const
    {
        const peri_k_output out = a.outputs[o];
        const int64_t bag = out.inverse >= 0 ? a.inverse[out.inverse + b] : b;
        float *to = a.out + b * a.stride + out.column;
        bool wide = aligned16(to) && out.cols % 4 == 0;
        for (int64_t first = 0; first < out.n_pieces; first += LANES) /* a lane a piece */
            wide = __all_sync(mask, wide && (first + lane >= out.n_pieces || aligned16(piece(out, first + lane, bag))));
        if (wide) columns(out, (float4 *)to, bag, out.cols / 4, lane);
        else columns(out, to, bag, out.cols, lane);
    }
};

/** Rows of the gradient to the pieces of outputs without an inverse. */
struct spread_cell {
    peri_k_route_spread_args a;
    __device__ void narrow(int32_t o, int64_t &, int64_t &to) const
    {
        if (a.outputs[o].inverse >= 0) to = 0;
        else if (to > a.rows) to = a.rows;
    }
    template <class V> __device__ static void columns(V *to, const V *grad, float divisor, int n, int lane)
    {
        to += lane, grad += lane, n -= lane;
        for (; n > 0; n -= 2 * LANES, to += 2 * LANES, grad += 2 * LANES) {
            V x[2];
            PERI_UNROLL
            for (int j = 0; j < 2; j++)
                if (j * LANES < n) x[j] = grad[j * LANES];
            PERI_UNROLL
            for (int j = 0; j < 2; j++)
                if (j * LANES < n) to[j * LANES] = divide(x[j], divisor);
        }
    }
    __device__ void operator()(int64_t b, int32_t o, int lane, unsigned) const
    {
        const peri_k_output &out = a.outputs[o];
        const float *grad = a.grad + b * a.stride + out.column;
        for (int64_t k = 0; k < out.n_pieces; k++) {
            const peri_k_piece p = a.pieces[out.first_piece + k];
            float *to = (p.own ? a.own : a.sent) + p.offset + b * out.cols;
            const float divisor = (float)(p.own ? out.divisor : out.sent_divisor);
            const bool wide = aligned16(to) && aligned16(grad) && out.cols % 4 == 0;
            if (wide) columns((float4 *)to, (const float4 *)grad, divisor, (int)out.cols / 4, lane);
            else columns(to, grad, divisor, (int)out.cols, lane);
        }
    }
};

enum { BAGS = 128, TILE = 2048, SEGMENT = TILE / PERI_WARPS, GROUPS = PERI_BLOCK / LANES };

/** grad[0..cols) / divisor is added to the row of @bag of every piece of @out. */
__device__ void spread_add(const peri_k_route_spread_args &a, const peri_k_output &out, int64_t bag, const float *grad,
                           int lane)
{
    for (int64_t k = 0; k < out.n_pieces; k++) {
        const peri_k_piece p = a.pieces[out.first_piece + k];
        float *to = (p.own ? a.own : a.sent) + p.offset + bag * out.cols;
        const float divisor = (float)(p.own ? out.divisor : out.sent_divisor);
        for (int64_t c = lane; c < out.cols; c += LANES) to[c] += grad[c] / divisor;
    }
}

/** The sums of outputs with an inverse. A block has BAGS neighbouring bags of an output, each of which belongs to one
 *  group of lanes. It goes through all rows by tiles: a warp lists those of its stretch of the tile that are of these
 *  bags, and every group goes through the lists in order and adds what is its own. */
__global__ void __launch_bounds__(PERI_BLOCK) spread_inverse(peri_k_route_spread_args a, int64_t begin, int64_t end)
{
    PERI_SHARED(int32_t, rows, TILE);
    PERI_SHARED(uint8_t, bags, TILE);
    PERI_SHARED(int32_t, listed, PERI_WARPS);
    const int lane = (int)(threadIdx.x % LANES), group = (int)(threadIdx.x / LANES), warp = (int)(threadIdx.x / 32);
    const int shift = (int)(threadIdx.x & 31) / LANES * LANES;
    const unsigned mask = ((1u << LANES) - 1) << shift;
    for (int32_t o = (int32_t)blockIdx.y; o < a.n_outputs; o += (int32_t)gridDim.y) {
        const peri_k_output out = a.outputs[o];
        const int64_t first = begin + (int64_t)blockIdx.x * BAGS, stop = end < a.bags[o] ? end : a.bags[o];
        if (out.inverse < 0 || first >= stop) continue;
        const int n = stop - first < BAGS ? (int)(stop - first) : (int)BAGS;
        for (int64_t k = 0; k < out.n_pieces; k++) {
            const peri_k_piece p = a.pieces[out.first_piece + k];
            float *to = (p.own ? a.own : a.sent) + p.offset;
            for (int bag = group; bag < n; bag += GROUPS)
                for (int64_t c = lane; c < out.cols; c += LANES) to[(first + bag) * out.cols + c] = 0;
        }
        for (int64_t tile = 0; tile < a.rows; tile += TILE) {
            int have = 0;
            __syncthreads(); /* the lists of the last tile are done with */
            for (int r = 0; r < SEGMENT; r += 32) {
                const int at = warp * SEGMENT + r + peri_lane();
                const int64_t bag = tile + at < a.rows ? a.inverse[out.inverse + tile + at] - first : -1;
                const bool ours = bag >= 0 && bag < n;
                const unsigned those = __ballot_sync(0xffffffffu, ours);
                const int to = warp * SEGMENT + have + __popc(those & ((1u << peri_lane()) - 1));
                if (ours) rows[to] = at, bags[to] = (uint8_t)bag;
                have += __popc(those);
            }
            if (peri_lane() == 0) listed[warp] = have;
            __syncthreads();
            for (int w = 0; w < PERI_WARPS; w++)
                for (int e = 0; e < listed[w]; e += LANES) {
                    const int at = w * SEGMENT + e + lane;
                    unsigned mine = __ballot_sync(mask, e + lane < listed[w] && bags[at] % GROUPS == group) >> shift &
                                    ((1u << LANES) - 1);
                    for (; mine; mine &= mine - 1) {
                        const int x = w * SEGMENT + e + __ffs((int)mine) - 1;
                        spread_add(a, out, first + bags[x], a.grad + (tile + rows[x]) * a.stride + out.column, lane);
                    }
                }
        }
        __syncthreads();
    }
}

/* -- rows of ids --------------------------------------------------------------------------------------------------- */

/** The row of id @k of an output; NULL: it has none. *divisor: that of the way back; *placed: the row is where it
 *  belongs. */
__device__ __forceinline__ float *row_of(const peri_k_route_rows_args &a, const peri_k_rows &out, int64_t k,
                                         float *divisor, bool *placed)
{
    int32_t part = 0;
    int64_t place = k;
    if (out.place_first >= 0) {
        const peri_k_partition *p = &a.in.partitions[out.partition];
        place = a.places[out.place_first + k];
        if (place < 0) return nullptr;
        if (p->n_parts > 1)
            part = peri_route_part(p, a.in.bounds, peri_k_route_key(p, peri_routed_id(a.in, out.first_id + k)));
    }
    const peri_k_piece piece = a.pieces[out.first_piece + part];
    *divisor = (float)(piece.own ? out.divisor : out.sent_divisor);
    *placed = out.place_first >= 0 && (piece.own ? a.placed : a.direct);
    return (piece.own ? a.own : a.received) + piece.offset + place * out.cols;
}

/** Stretches of LANES rows of the values, counted from row `begin`: a lane finds a row each, then they move all of them
 *  together. */
template <bool BACK> struct rows_cell {
    peri_k_route_rows_args a;
    int64_t begin, end; /* rows */
    __device__ void narrow(int32_t o, int64_t &from, int64_t &to) const
    {
        const peri_k_rows &out = a.outputs[o];
        const int64_t first = out.row > begin ? out.row : begin,
                      stop = out.row + out.ids < end ? out.row + out.ids : end;
        from = (first - begin) / LANES;
        to = first < stop ? (stop - begin + LANES - 1) / LANES : from;
    }
    template <class V> __device__ static void move(V *values, V *row, int n, float divisor, int lane)
    {
        for (int c = lane; c < n; c += 2 * LANES) {
            const V *from = BACK ? values : row;
            V x[2], *to = BACK ? row : values;
            PERI_UNROLL
            for (int j = 0; j < 2; j++) {
                zero(x[j]);
                if (from && c + j * LANES < n) x[j] = from[c + j * LANES];
            }
            PERI_UNROLL
            for (int j = 0; j < 2; j++)
                if (c + j * LANES < n) to[c + j * LANES] = BACK ? divide(x[j], divisor) : x[j];
        }
    }
    __device__ void operator()(int64_t stretch, int32_t o, int lane, unsigned mask) const
    {
        const peri_k_rows out = a.outputs[o];
        const int64_t first = begin + stretch * LANES, row = first + lane;
        const int shift = __ffs((int)mask) - 1;
        const bool here = row < end && row >= out.row && row < out.row + out.ids;
        bool placed = false;
        float divisor = 1, *mine = here ? row_of(a, out, row - out.row, &divisor, &placed) : nullptr;
        const unsigned rows = __ballot_sync(mask, here && !placed) >> shift & ((1u << LANES) - 1);
        const int cols = (int)out.cols;
        float *values = a.values + first * a.stride + out.column;
        for (int r = 0; r < LANES; r++, values += a.stride) {
            float *there = (float *)__shfl_sync(mask, (uintptr_t)mine, r, LANES);
            const float d = __shfl_sync(mask, divisor, r, LANES);
            if (!(rows >> r & 1) || (BACK && !there)) continue;
            if (aligned16(values) && aligned16(there) && cols % 4 == 0)
                move((float4 *)values, (float4 *)there, cols / 4, d, lane);
            else move(values, there, cols, d, lane);
        }
    }
};

template <bool BACK>
cudaError_t rows_moved(const peri_k_route_rows_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return peri_each_cell<LANES>(0, (end - begin + LANES - 1) / LANES, a->n_outputs, c,
                                 rows_cell<BACK>{*a, begin, end});
}

/* -- pooling where rows arrive ------------------------------------------------------------------------------------- */

/** The row of id @i of the input in a pool; NULL: it has none. */
__device__ __forceinline__ const float *pooled_row(const peri_k_route_pool_args &a, const peri_k_pool &pool, int64_t i)
{
    const peri_k_partition *p = &a.rows.in.partitions[pool.rows.partition];
    const int64_t key = peri_k_route_key(p, peri_routed_id(a.rows.in, i));
    float divisor;
    bool placed;
    return key < 0 || key >= p->rows ? nullptr : row_of(a.rows, pool.rows, i - pool.rows.first_id, &divisor, &placed);
}

__device__ __forceinline__ float pool_factor(const peri_k_pool &pool, int64_t length)
{
    return pool.mean && length > 0 ? 1.0f / (float)length : 1.0f;
}

/** Row b of the output in a pool. A lane has every LANES-th column, WIDE of them at a time. */
struct pool_cell {
    enum { WIDE = 4 };
    peri_k_route_pool_args a;
    __device__ void narrow(int32_t, int64_t &, int64_t &) const {}
    __device__ void operator()(int64_t b, int32_t o, int lane, unsigned mask) const
    {
        const peri_k_pool &pool = a.pools[o];
        const int64_t bag = pool.first_bag + (pool.inverse >= 0 ? a.inverse[pool.inverse + b] : b),
                      cols = pool.rows.cols;
        const int64_t from = a.rows.in.offsets[bag], to = a.rows.in.offsets[bag + 1];
        const float factor = pool_factor(pool, to - from);
        float *out = a.rows.values + b * a.rows.stride + pool.rows.column;
        for (int64_t c = lane; c - lane < cols; c += WIDE * LANES) {
            float sum[WIDE] = {0, 0, 0, 0};
            for (int64_t first = from; first < to; first += LANES) {
                const int64_t i = first + lane;
                const float *mine = i < to ? pooled_row(a, pool, i) : nullptr;
                const float weight = i < to && a.weights ? a.weights[i] : 1;
                for (int r = 0; r < LANES && first + r < to; r++) {
                    const float *row = (const float *)__shfl_sync(mask, (uintptr_t)mine, r, LANES);
                    const float w = __shfl_sync(mask, weight, r, LANES);
                    PERI_UNROLL
                    for (int j = 0; j < WIDE; j++)
                        if (row && c + j * LANES < cols) sum[j] = fmaf(w, row[c + j * LANES], sum[j]);
                }
            }
            PERI_UNROLL
            for (int j = 0; j < WIDE; j++)
                if (c + j * LANES < cols) out[c + j * LANES] = sum[j] * factor;
        }
    }
};

/** Bag `bag` of all pools of one feature, in their order: of the first of them. Lane l has the sum of columns l, l +
 *  16, ... of the table. */
struct pool_weights_cell {
    peri_k_route_pool_args a;
    __device__ void narrow(int32_t o, int64_t &, int64_t &to) const
    {
        if (a.pools[o].from != 0) to = 0;
        else if (to > a.pools[o].bags) to = a.pools[o].bags;
    }
    __device__ void table(const peri_k_pool *first, int64_t bag, int lane, unsigned mask) const
    {
        const int64_t from = a.rows.in.offsets[first->first_bag + bag],
                      to = a.rows.in.offsets[first->first_bag + bag + 1];
        for (int64_t i = from; i < to; i++) {
            bool any = false, last = false;
            float s = 0;
            for (const peri_k_pool *pool = first; !last; last = pool++->last) {
                const float *row = pooled_row(a, *pool, i), *grad = a.grad + pool->grad + bag * pool->grad_stride;
                any = any || row;
                for (int64_t c = (lane - pool->from) & (LANES - 1); row && c < pool->rows.cols; c += LANES)
                    s = fmaf(grad[c], row[c], s);
            }
            s = peri_group_sum<LANES>(s, mask);
            if (any && lane == 0) a.grad_weights[i] += s * pool_factor(*first, to - from);
        }
    }
    __device__ void operator()(int64_t bag, int32_t o, int lane, unsigned mask) const
    {
        const int64_t feature = a.pools[o].first_bag;
        for (int32_t first = 0; first < o; first += LANES) { /* another one has this feature */
            const peri_k_pool *pool = a.pools + first + lane;
            if (__any_sync(mask, first + lane < o && pool->from == 0 && pool->first_bag == feature && pool->bags > bag))
                return;
        }
        for (const peri_k_pool *pool = a.pools + o; pool < a.pools + a.n_pools; pool++)
            if (pool->from == 0 && pool->first_bag == feature && pool->bags > bag) table(pool, bag, lane, mask);
    }
};

/* -- rows together and apart --------------------------------------------------------------------------------------- */

/** route_lines: copy row i, by a warp. */
struct line {
    peri_k_route_lines_args a;
    __device__ void operator()(int64_t i, int lane, unsigned) const
    {
        float *apart = a.values + (a.index ? a.index[i] : i) * a.stride, *together = a.together + i * a.cols;
        const float divisor = (float)a.divisor;
        for (int64_t c = lane; c < a.cols; c += 32) {
            if (a.back) together[c] = divide(apart[c], divisor);
            else apart[c] = together[c];
        }
    }
};

/* -- runs of rows -------------------------------------------------------------------------------------------------- */

/** n bytes by @threads threads, of which this is @thread: by words of V where both ends lie alike. */
template <class V>
__device__ __forceinline__ void copy_words(char *to, const char *from, int64_t n, int64_t thread, int64_t threads)
{
    int64_t head = (int64_t)(-(uintptr_t)to & (sizeof(V) - 1));
    if (head > n) head = n;
    const int64_t words = (n - head) / (int64_t)sizeof(V), tail = head + words * (int64_t)sizeof(V);
    for (int64_t i = thread; i < head; i += threads) to[i] = from[i];
    V *t = (V *)(to + head), x[AHEAD];
    const V *f = (const V *)(from + head);
    for (int64_t i = thread; i < words; i += AHEAD * threads) {
        PERI_UNROLL
        for (int j = 0; j < AHEAD; j++)
            if (i + j * threads < words) x[j] = f[i + j * threads];
        PERI_UNROLL
        for (int j = 0; j < AHEAD; j++)
            if (i + j * threads < words) t[i + j * threads] = x[j];
    }
    for (int64_t i = tail + thread; i < n; i += threads) to[i] = from[i];
}

/** Copy line @i of the runs (kernels/route.h, route_place) by @threads threads, of which this is @thread. */
__device__ void place_line(const peri_k_route_place_args &a, int64_t i, int64_t thread, int64_t threads)
{
    const int64_t lines = a.lines > 0 ? a.lines : 1, run = lines > 1 ? i / lines : i, k = i - run * lines;
    const peri_k_run r = a.runs[run];
    const int64_t at = r.from + k * (a.from_step ? a.from_step : r.n), first = r.to + k * (a.step ? a.step : r.n);
    const char *from = (const char *)(r.own ? a.own : a.received) + at * a.width;
    char *to = (char *)a.dst + first * a.width;
    const uintptr_t apart = (uintptr_t)to - (uintptr_t)from;
    if (apart % 16 == 0) copy_words<uint4>(to, from, r.n * a.width, thread, threads);
    else if (apart % 4 == 0) copy_words<uint32_t>(to, from, r.n * a.width, thread, threads);
    else copy_words<char>(to, from, r.n * a.width, thread, threads);
}

/** Copy line i of the runs, where runs are of several lines (columns of a matrix): a warp a line. */
struct place_row {
    peri_k_route_place_args a;
    __device__ void operator()(int64_t i, int lane, unsigned) const { place_line(a, i, lane, 32); }
};

/** Copy runs [begin, end), each of which may be long: all blocks of one y copy run y together, then run y + gridDim.y,
 *  and so on. */
__global__ void __launch_bounds__(PERI_BLOCK) place_runs(peri_k_route_place_args a, int64_t begin, int64_t end)
{
    for (int64_t i = begin + blockIdx.y; i < end; i += gridDim.y)
        place_line(a, i, peri_grid_thread(), peri_grid_threads());
}

} // namespace

PERI_CUDA_KERNEL(route_combine) { return peri_each_cell<LANES>(begin, end, a->n_outputs, c, combine_cell{*a}); }

PERI_CUDA_KERNEL(route_spread)
{
    PERI_CUDA_TRY(peri_each_cell<LANES>(begin, end, a->n_outputs, c, spread_cell{*a}));
    if (!a->inverse || begin >= end || a->n_outputs <= 0) return cudaSuccess;
    const dim3 grid((unsigned)((end - begin + BAGS - 1) / BAGS),
                    (unsigned)(a->n_outputs < 65535 ? a->n_outputs : 65535));
    return peri_cuda_launch(spread_inverse, grid, PERI_BLOCK, 0, c, *a, begin, end);
}

PERI_CUDA_KERNEL(route_rows) { return rows_moved<false>(a, begin, end, c); }
PERI_CUDA_KERNEL(route_rows_back) { return rows_moved<true>(a, begin, end, c); }
PERI_CUDA_KERNEL(route_pool) { return peri_each_cell<LANES>(begin, end, a->n_pools, c, pool_cell{*a}); }
PERI_CUDA_KERNEL(route_pool_weights) { return peri_each_cell<LANES>(begin, end, a->n_pools, c, pool_weights_cell{*a}); }

PERI_CUDA_KERNEL(route_place)
{
    if (begin >= end) return cudaSuccess;
    if (a->lines > 1) return each_warp(begin, end, c, place_row{*a});
    const int64_t blocks = (int64_t)c->processors * 8, y = end - begin < 65535 ? end - begin : 65535;
    const dim3 grid((unsigned)(y < blocks ? (blocks + y - 1) / y : 1), (unsigned)y);
    return peri_cuda_launch(place_runs, grid, PERI_BLOCK, 0, c, *a, begin, end);
}

PERI_CUDA_KERNEL(route_lines) { return each_warp(begin, end, c, line{*a}); }
