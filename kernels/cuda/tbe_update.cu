/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.cu: kernels/tbe.h: the backward pass of sorted items: runs of equal rows are found by marking where they begin and a
 * cumulative sum; a group of lanes sums the gradients of a run, 128 bits a lane and K of them in flight, and updates the row at once.
 *
 * Runs of more than one group of 256 items are cut: sums of whole groups are a warp's each, and the run's group adds them up, in the
 * order that the header fixes. Where the sum of a group lies needs neither a list nor an atomic counter: of the items of
 * [256 w, 256 w + 256) at most one is the first of a cut run and at most one begins a later group of one, since cut runs are longer than
 * that: slots 2 w + 1 and 2 w.
 */
#include "tbe_row.cuh"

namespace {

enum { GROUP = 256 };

/** Runs, and sums of their groups, in the operation's scratch. */
struct runs {
    uint32_t *number; /* of each item: runs that begin at or before it */
    uint32_t *start, *end; /* of run r: its items */
    float *sums; /* [slots][width] */
    double *largest, *exact; /* [slots][width]; exact mode in place of sums. largest: of a run, in the slot of its first group */
    int64_t width;
};

__host__ __device__ inline int64_t slot_of(int64_t from, bool first) { return from / GROUP * 2 + first; }

struct update_args {
    peri_k_tbe_update_args a;
    runs r;

    __device__ __forceinline__ uint64_t row(int64_t e) const { return a.sorted[e] >> a.payload_bits; }
    __device__ __forceinline__ bool valid(int64_t e, int64_t n) const { return e < n && row(e) < (uint64_t)a.rows.total_rows; }
    __device__ __forceinline__ bool head(int64_t e, int64_t n) const { return valid(e, n) && (e == 0 || row(e - 1) != row(e)); }
    __device__ __forceinline__ bool tail(int64_t e, int64_t n) const { return valid(e, n) && (e + 1 == n || row(e + 1) != row(e)); }

    /** Item e: where its gradient lies, and its factor. */
    __device__ __forceinline__ const float *item(int64_t e, float *scale) const
    {
        const int64_t payload = (int64_t)(a.sorted[e] & (((uint64_t)1 << a.payload_bits) - 1));
        *scale = 1;
        if (!a.items) return a.grad + payload;
        const peri_k_tbe_item it = a.items[payload];
        *scale = it.scale;
        return a.grad + it.grad;
    }
    __device__ __forceinline__ float clamped(float x) const
    {
        const float most = a.optimizer.max_gradient;
        return most > 0 ? (x < -most ? -most : x > most ? most : x) : x;
    }
};

struct mark_heads {
    update_args u;
    __device__ void operator()(int64_t e) const { u.r.number[e] = u.head(e, *u.a.n); }
};

/** Where runs begin and end, and how many there are. */
struct find_runs {
    update_args u;
    __device__ void operator()(int64_t e) const
    {
        const int64_t n = *u.a.n;
        if (e == 0) {
            const int64_t all = u.r.number[u.a.capacity - 1];
            peri_atomic_add(u.a.updated, all);
            if (u.a.run_values) *u.a.runs = all;
        }
        if (u.head(e, n)) u.r.start[u.r.number[e] - 1] = (uint32_t)e;
        if (u.tail(e, n)) u.r.end[u.r.number[e] - 1] = (uint32_t)(e + 1);
    }
};

/** Columns d..d+3 of the sum of items [e, past): at most a group. The loads of several are in flight. */
__device__ __forceinline__ void sum_items(const update_args &u, int64_t e, int64_t past, int64_t d, int64_t left, float (&sum)[4])
{
    enum { ITEMS = 8 };
    for (int64_t i = e; i < past; i += ITEMS) {
        float scale[ITEMS], x[ITEMS][4];
        const float *grad[ITEMS];
        uintptr_t bits = 0;
        PERI_UNROLL
        for (int r = 0; r < ITEMS; r++) {
            grad[r] = u.item(i + r < past ? i + r : i, &scale[r]) + d;
            bits |= (uintptr_t)grad[r];
        }
        if (bits % 16 == 0 && left >= 4) {
            float4 v[ITEMS];
            PERI_UNROLL
            for (int r = 0; r < ITEMS; r++) v[r] = *(const float4 *)grad[r];
            PERI_UNROLL
            for (int r = 0; r < ITEMS; r++) x[r][0] = v[r].x, x[r][1] = v[r].y, x[r][2] = v[r].z, x[r][3] = v[r].w;
        } else {
            PERI_UNROLL
            for (int r = 0; r < ITEMS; r++) peri_load4(grad[r], left, false, x[r]);
        }
        PERI_UNROLL
        for (int r = 0; r < ITEMS; r++) {
            if (i + r >= past) continue;
            PERI_UNROLL
            for (int c = 0; c < 4; c++) {
                const float y = u.clamped(x[r][c]);
                if (i + r == e) sum[c] = u.a.items ? scale[r] * y : y;
                else sum[c] = u.a.items ? fmaf(scale[r], y, sum[c]) : sum[c] + y;
            }
        }
    }
}

/** The largest |term| of each column. */
__device__ __forceinline__ void most_items(const update_args &u, int64_t e, int64_t past, int64_t d, int64_t left, double (&most)[4])
{
    for (int64_t i = e; i < past; i++) {
        float scale, x[4];
        const float *grad = u.item(i, &scale) + d;
        peri_load4(grad, left, peri_aligned16(grad), x);
        PERI_UNROLL
        for (int c = 0; c < 4; c++) {
            const double t = fabs((double)u.clamped(x[c]) * (double)scale);
            most[c] = t > most[c] ? t : most[c];
        }
    }
}

/** sum += the terms, rounded to multiples that `big` sets. */
__device__ __forceinline__ void sum_exactly(const update_args &u, int64_t e, int64_t past, int64_t d, int64_t left,
                                            const double (&big)[4], double (&sum)[4])
{
    for (int64_t i = e; i < past; i++) {
        float scale, x[4];
        const float *grad = u.item(i, &scale) + d;
        peri_load4(grad, left, peri_aligned16(grad), x);
        PERI_UNROLL
        for (int c = 0; c < 4; c++) sum[c] += ((double)u.clamped(x[c]) * (double)scale + big[c]) - big[c];
    }
}

__device__ double big_of(double largest, int64_t items)
{
    uint64_t bits, l = 0;
    memcpy(&bits, &largest, 8);
    const uint64_t e = bits >> 52;
    if (e == 0 || e >= 0x7ff) return 0; /* 0 (products of two f32 are no subnormal doubles), infinite */
    while ((int64_t)1 << l < items) l++;
    bits = (e + 1 + l + 1) << 52 | (uint64_t)1 << 51;
    memcpy(&largest, &bits, 8);
    return largest;
}

/* -- groups of cut runs ---------------------------------------------------------------------------------------------------------------- */

enum { SUMS, LARGEST, EXACT };

/** The group of slot i, if there is one: its run and its items. */
struct piece {
    int64_t run, from, past;
    __device__ bool find(const update_args &u, int64_t i)
    {
        const int64_t n = *u.a.n, window = i / 2 * GROUP, last = window + GROUP - 1;
        const bool first = i % 2 == 1;
        if (window >= n) return false;
        run = (int64_t)u.r.number[first ? (last < n ? last : n - 1) : window] - 1;
        if (run < 0) return false;
        const int64_t start = u.r.start[run], end = u.r.end[run];
        if (end - start <= GROUP) return false;
        from = first ? start : start + (window - start + GROUP - 1) / GROUP * GROUP;
        if (first ? start < window : start >= window) return false;
        past = from + GROUP < end ? from + GROUP : end;
        return from < end && from <= last;
    }
};

template <int WHAT> struct sum_piece {
    update_args u;
    __device__ void operator()(int64_t i, int lane, unsigned) const
    {
        piece p;
        if (!p.find(u, i)) return;
        const peri_k_tbe_table *tables = u.a.rows.tables;
        const int64_t cols = tables[peri_tbe_table_of(tables, u.a.rows.n_tables, (int64_t)u.row(p.from))].cols;
        const int64_t head = slot_of(u.r.start[p.run], true) * u.r.width, items = (int64_t)u.r.end[p.run] - u.r.start[p.run];
        for (int64_t d = 4 * lane; d < cols; d += 128) {
            if (WHAT == SUMS) {
                float sum[4];
                sum_items(u, p.from, p.past, d, cols - d, sum);
                peri_store4(u.r.sums + i * u.r.width + d, 4, true, sum);
                continue;
            }
            double most[4] = {0, 0, 0, 0}, sum[4] = {0, 0, 0, 0};
            if (WHAT == LARGEST) most_items(u, p.from, p.past, d, cols - d, most);
            if (WHAT == EXACT) {
                for (int c = 0; c < 4; c++) most[c] = big_of(u.r.largest[head + d + c], items);
                sum_exactly(u, p.from, p.past, d, cols - d, most, sum);
            }
            for (int c = 0; c < 4; c++) {
                /* Doubles from 0 on are in the order of their bits. */
                unsigned long long bits;
                memcpy(&bits, &most[c], 8);
                if (WHAT == LARGEST && most[c] > 0) atomicMax((unsigned long long *)&u.r.largest[head + d + c], bits);
                if (WHAT == EXACT) u.r.exact[i * u.r.width + d + c] = sum[c];
            }
        }
    }
};

struct zero_doubles {
    double *x;
    __device__ void operator()(int64_t i) const { x[i] = 0; }
};

/* -- runs ------------------------------------------------------------------------------------------------------------------------------ */

template <bool IN_ORDER> struct update_runs {
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    update_args u;

    __device__ int64_t count() const { return u.r.number[u.a.capacity - 1]; }
    __device__ bool find(int64_t i, int64_t *table, int64_t *linear) const
    {
        *linear = (int64_t)u.row(u.r.start[i]);
        *table = peri_tbe_table_of(rows.tables, rows.n_tables, *linear);
        return true;
    }

    /** All columns of a lane side by side: their loads are in flight at once. */
    template <class S> __device__ __forceinline__ void short_run(peri_tbe_row<S> &row, int64_t start, int64_t end, int64_t strip) const
    {
        float next_scale;
        const float *next = u.item(start, &next_scale); /* read before it is needed */
        for (int64_t i = start; i < end; i++) {
            float x[S::K][4];
            const float *grad = next;
            const float scale = next_scale;
            const bool fast = peri_aligned16(grad);
            if (i + 1 < end) next = u.item(i + 1, &next_scale);
            row.load(grad, strip, fast, x);
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) {
                PERI_UNROLL
                for (int c = 0; c < 4; c++) {
                    const float y = u.clamped(x[k][c]);
                    if (i == start) row.g[k][c] = u.a.items ? scale * y : y;
                    else row.g[k][c] = u.a.items ? fmaf(scale, y, row.g[k][c]) : row.g[k][c] + y;
                }
            }
        }
    }
    template <class S> __device__ __forceinline__ void cut_run(peri_tbe_row<S> &row, int64_t start, int64_t end, int64_t strip) const
    {
        for (int64_t from = start; from < end; from += GROUP) {
            const float *sums = u.r.sums + slot_of(from, from == start) * u.r.width;
            float x[S::K][4];
            row.load(sums, strip, true, x);
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) {
                PERI_UNROLL
                for (int c = 0; c < 4; c++) row.g[k][c] = from == start ? x[k][c] : row.g[k][c] + x[k][c];
            }
        }
    }
    template <class S> __device__ void exact_run(peri_tbe_row<S> &row, int64_t start, int64_t end, int64_t strip) const
    {
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int64_t d = row.column(strip, k), left = row.cols - d;
            double big[4] = {0, 0, 0, 0}, sum[4] = {0, 0, 0, 0};
            if (left > 0 && end - start <= GROUP) {
                most_items(u, start, end, d, left, big);
                for (int c = 0; c < 4; c++) big[c] = big_of(big[c], end - start);
                sum_exactly(u, start, end, d, left, big, sum);
            }
            for (int64_t from = start; left > 0 && end - start > GROUP && from < end; from += GROUP)
                for (int c = 0; c < 4; c++) sum[c] += u.r.exact[slot_of(from, from == start) * u.r.width + d + c];
            PERI_UNROLL
            for (int c = 0; c < 4; c++) row.g[k][c] = (float)sum[c];
        }
    }
    template <class S> __device__ __forceinline__ void sum(peri_tbe_row<S> &row, int64_t start, int64_t end, int64_t strip) const
    {
        if (!IN_ORDER) exact_run(row, start, end, strip);
        else if (end - start <= GROUP) short_run(row, start, end, strip);
        else cut_run(row, start, end, strip);
        if (u.a.halvings == 0) return;
        const float part = ldexpf(1, -u.a.halvings);
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            PERI_UNROLL
            for (int c = 0; c < 4; c++) row.g[k][c] *= part;
        }
    }

    template <int KIND, class S> __device__ __forceinline__ void run(peri_tbe_row<S> &row, int64_t i) const
    {
        const int64_t start = u.r.start[i], end = u.r.end[i];
        if (KIND < 0 && optimizer.kind == PERI_TBE_NONE) return give(row, i, start, end);
        row.template update<KIND>([&](int64_t strip) { sum(row, start, end, strip); });
    }

    /** The gradient alone is asked for. */
    template <class S> __device__ void give(peri_tbe_row<S> &row, int64_t i, int64_t start, int64_t end) const
    {
        float *to = u.a.run_values ? u.a.run_values + i * u.a.run_stride : u.a.dense + row.at;
        const bool fast = peri_aligned16(to);
        row.strips([&](int64_t strip) {
            sum(row, start, end, strip);
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) peri_store4(to + row.column(strip, k), row.cols - row.column(strip, k), fast, row.g[k]);
        });
        if (row.lane != 0) return;
        if (u.a.run_values) u.a.run_rows[i] = row.linear;
        else u.a.touched[row.linear] = 1;
    }
};

/* -- the operation --------------------------------------------------------------------------------------------------------------------- */

struct plan {
    int64_t slots, width, scan; /* bytes of the cumulative sum */
    int64_t start, end, room, sums, exact, rooms, bytes; /* places in the scratch */
};

plan plan_of(const peri_k_tbe_update_args *a)
{
    plan p = {};
    size_t scan = 0;
    const int64_t n = a->capacity;
    peri_inclusive_sum<uint32_t, uint32_t>(NULL, scan, NULL, NULL, n, 0);
    p.scan = (int64_t)scan;
    p.slots = 2 * ((n + GROUP - 1) / GROUP);
    p.width = (a->rows.max_cols + 3) / 4 * 4;
    p.start = peri_part(4 * n);
    p.end = p.start + peri_part(4 * n);
    p.room = p.end + peri_part(4 * n);
    p.sums = p.room + peri_part(p.scan);
    p.exact = p.sums + peri_part((a->optimizer.exact ? 8 : 4) * p.slots * p.width);
    p.rooms = p.exact + (a->optimizer.exact ? peri_part(8 * p.slots * p.width) : 0);
    p.bytes = p.rooms + peri_part(4 * peri_tbe_rooms(a->rows.max_cols));
    return p;
}

/** Sums of the groups of runs that are cut. */
cudaError_t sum_pieces(const update_args &u, const plan &p, const peri_cuda_call *c)
{
    if (!u.a.optimizer.exact) return each_warp(0, p.slots, c, sum_piece<SUMS>{u});
    PERI_CUDA_TRY(each(0, p.slots * p.width, c, zero_doubles{u.r.largest}));
    PERI_CUDA_TRY(each_warp(0, p.slots, c, sum_piece<LARGEST>{u}));
    return each_warp(0, p.slots, c, sum_piece<EXACT>{u});
}

template <class S, int KIND, bool IN_ORDER> cudaError_t update(const update_args &u, float *rooms, const peri_cuda_call *c)
{
    return peri_tbe_each_row<S, KIND>(u.a.capacity, u.a.rows.max_cols, rooms, c, update_runs<IN_ORDER>{u.a.rows, u.a.optimizer, u});
}

/** The two optimizers that most steps spend their time with: four vectors a lane, so that two blocks fit a multiprocessor. */
template <int KIND> cudaError_t update_fast(const update_args &u, float *rooms, const peri_cuda_call *c)
{
    const int64_t cols = u.a.rows.max_cols;
    if (cols <= 64) return update<peri_tbe_shape<4, 4>, KIND, true>(u, rooms, c);
    if (cols <= 128) return update<peri_tbe_shape<8, 4>, KIND, true>(u, rooms, c);
    if (cols <= 256) return update<peri_tbe_shape<16, 4>, KIND, true>(u, rooms, c);
    return update<peri_tbe_shape<32, 4>, KIND, true>(u, rooms, c);
}

template <bool IN_ORDER> cudaError_t update_any(const update_args &u, float *rooms, const peri_cuda_call *c)
{
    if (u.a.rows.max_cols <= 128) return update<peri_tbe_shape<4, 8>, -1, IN_ORDER>(u, rooms, c);
    return update<peri_tbe_wide, -1, IN_ORDER>(u, rooms, c);
}

} // namespace

PERI_CUDA_SCRATCH(tbe_update) { return plan_of(a).bytes; }
PERI_CUDA_OP(tbe_update)
{
    const plan p = plan_of(a);
    const int64_t n = a->capacity;
    float *rooms = (float *)(c->scratch + p.rooms);
    size_t scan = (size_t)p.scan;
    if (n <= 0) return cudaSuccess;
    update_args u = {*a, {(uint32_t *)c->scratch, (uint32_t *)(c->scratch + p.start), (uint32_t *)(c->scratch + p.end),
                          (float *)(c->scratch + p.sums), (double *)(c->scratch + p.sums), (double *)(c->scratch + p.exact), p.width}};
    PERI_CUDA_TRY(each(0, n, c, mark_heads{u}));
    PERI_CUDA_TRY((peri_inclusive_sum<uint32_t, uint32_t>(c->scratch + p.room, scan, u.r.number, u.r.number, n, c->stream)));
    PERI_CUDA_TRY(each(0, n, c, find_runs{u}));
    PERI_CUDA_TRY(sum_pieces(u, p, c));
    if (a->optimizer.exact) return update_any<false>(u, rooms, c);
    const bool narrow = a->rows.max_cols <= peri_tbe_shape<32, 4>::STRIP;
    if (narrow && a->optimizer.kind == PERI_TBE_SGD) return update_fast<PERI_TBE_SGD>(u, rooms, c);
    if (narrow && a->optimizer.kind == PERI_TBE_ROWWISE_ADAGRAD) return update_fast<PERI_TBE_ROWWISE_ADAGRAD>(u, rooms, c);
    return update_any<true>(u, rooms, c);
}
