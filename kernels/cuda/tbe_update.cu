/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.cu: kernels/tbe.h: the backward pass of sorted items. A warp has a window of the sorted items, finds the
 * runs of equal rows that begin there, and deals them out to groups of its lanes. A group sums the gradients of a run,
 * 128 bits a lane and K of them in flight, and updates the row at once. Runs have no numbers but where the summed
 * gradients themselves are asked for, one behind the other.
 *
 * Runs of more than one group of 256 items are cut: sums of whole groups are a warp's each, and the run's group adds
 * them up, in the order that the header fixes. Where the sum of a group lies needs neither a list nor an atomic
 * counter: of the items of
 * [256 w, 256 w + 256) at most one is the first of a cut run and at most one begins a later group of one, since cut
 * runs are longer than that: slots 2 w + 1 and 2 w.
 */
#include "cub.cuh"
#include "tbe_row.cuh"

namespace {

enum {
    GROUP = 256,
    WINDOW = 8, /* items whose runs a warp updates; more would ask for more rows than fit the second-level cache beside
                   the gradients */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ASKS = 1 /* whether a warp asks for the rows of its window before it adds up their gradients: there is an
                instruction for a whole row */
#else
    ASKS = 0
#endif
};

/** Whether a kernel asks so. Adam's rows have three parts, of 3 KiB for 128 columns: it has all of them on their way to
 *  registers. */
__host__ __device__ constexpr bool asks(int kind) { return ASKS && kind >= 0 && kind != PERI_TBE_ADAM; }

/** What lies in the operation's scratch. */
struct runs {
    uint32_t *number; /* of each item: runs that begin at or before it; where runs are numbered */
    float *sums; /* [slots][width]: sums of the groups of runs that are cut */
    double *largest, *exact; /* [slots][width]; exact mode in place of sums. largest: of a run, in the slot of its first
                                group */
    int64_t width;
};

__host__ __device__ inline int64_t slot_of(int64_t from, bool first) { return from / GROUP * 2 + first; }

struct update_args {
    peri_k_tbe_update_args a;
    runs r;

    __device__ __forceinline__ uint64_t row(int64_t e) const { return a.sorted[e] >> a.payload_bits; }
    __device__ __forceinline__ bool valid(int64_t e, int64_t n) const
    {
        return e < n && row(e) < (uint64_t)a.rows.total_rows;
    }
    __device__ __forceinline__ bool head(int64_t e, int64_t n) const
    {
        return valid(e, n) && (e == 0 || row(e - 1) != row(e));
    }

    /** Where a run ends of which item @e is one: steps that double, then halves of the last one. */
    __device__ int64_t end_of(int64_t e, int64_t n) const
    {
        const uint64_t wanted = row(e);
        int64_t step = 1, past;
        while (e + step < n && row(e + step) == wanted) e += step, step *= 2;
        past = e + step < n ? e + step : n;
        while (e + 1 < past) {
            const int64_t middle = e + (past - e) / 2;
            if (row(middle) == wanted) e = middle;
            else past = middle;
        }
        return past;
    }
    /** Where it begins. */
    __device__ int64_t start_of(int64_t e) const
    {
        const uint64_t wanted = row(e);
        int64_t step = 1, before;
        while (e - step >= 0 && row(e - step) == wanted) e -= step, step *= 2;
        before = e - step >= 0 ? e - step : -1;
        while (before + 1 < e) {
            const int64_t middle = before + (e - before) / 2;
            if (row(middle) == wanted) e = middle;
            else before = middle;
        }
        return e;
    }

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
    template <int K> __device__ __forceinline__ void clamp(float (&x)[K][4]) const
    {
        if (!(a.optimizer.max_gradient > 0)) return;
        PERI_UNROLL
        for (int k = 0; k < K; k++) {
            PERI_UNROLL
            for (int c = 0; c < 4; c++) x[k][c] = clamped(x[k][c]);
        }
    }
};

struct mark_heads {
    update_args u;
    __device__ void operator()(int64_t e) const { u.r.number[e] = u.head(e, *u.a.n); }
};

/** Columns d..d+3 of the sum of items [e, past): at most a group. The loads of several are in flight. */
__device__ __forceinline__ void sum_items(const update_args &u, int64_t e, int64_t past, int64_t d, int64_t left,
                                          float (&sum)[4])
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
__device__ __forceinline__ void most_items(const update_args &u, int64_t e, int64_t past, int64_t d, int64_t left,
                                           double (&most)[4])
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

/* -- groups of cut runs -------------------------------------------------------------------------------------------- */

enum { SUMS, LARGEST, EXACT };

/** The group of slot i, if there is one: its run and its items. */
struct piece {
    int64_t start, end, from, past;
    __device__ bool find(const update_args &u, int64_t i)
    {
        const int64_t n = *u.a.n, window = i / 2 * GROUP, next = window + GROUP;
        if (i % 2 == 1) { /* the run that begins in the window and goes on behind it */
            if (next >= n || !u.valid(next - 1, n) || u.row(next) != u.row(next - 1)) return false;
            from = start = u.start_of(next - 1);
            if (start < window) return false;
        } else { /* the run that goes on from the window before into this one */
            if (window >= n || window == 0 || !u.valid(window, n) || u.row(window) != u.row(window - 1)) return false;
            start = u.start_of(window);
            from = start + (window - start + GROUP - 1) / GROUP * GROUP;
        }
        end = u.end_of(from < n && u.row(from) == u.row(start) ? from : start, n);
        past = from + GROUP < end ? from + GROUP : end;
        return end - start > GROUP && from < end;
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
        const int64_t head = slot_of(p.start, true) * u.r.width, items = p.end - p.start;
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

/* -- runs ---------------------------------------------------------------------------------------------------------- */

template <bool IN_ORDER> struct update_runs {
    const update_args &u;

    /** All columns of a lane side by side: their loads are in flight at once. */
    template <class S>
    __device__ __forceinline__ void short_run(peri_tbe_row<S> &row, uint32_t start, uint32_t end, int strip) const
    {
        float scale, next_scale = 1;
        const float *grad = u.item(start, &scale), *next = grad;
        if (start + 1 < end) next = u.item(start + 1, &next_scale); /* read before it is needed */
        row.load(grad, strip, peri_aligned16(grad), row.g);
        u.clamp(row.g);
        if (u.a.items) {
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) {
                PERI_UNROLL
                for (int c = 0; c < 4; c++) row.g[k][c] = scale * row.g[k][c];
            }
        }
        for (uint32_t i = start + 1; i < end; i++) {
            float x[S::K][4];
            grad = next;
            scale = next_scale;
            if (i + 1 < end) next = u.item(i + 1, &next_scale);
            row.load(grad, strip, peri_aligned16(grad), x);
            u.clamp(x);
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) {
                PERI_UNROLL
                for (int c = 0; c < 4; c++)
                    row.g[k][c] = u.a.items ? fmaf(scale, x[k][c], row.g[k][c]) : row.g[k][c] + x[k][c];
            }
        }
    }
    template <class S>
    __device__ __forceinline__ void cut_run(peri_tbe_row<S> &row, uint32_t start, uint32_t end, int strip) const
    {
        for (uint32_t from = start; from < end; from += GROUP) {
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
    template <class S> __device__ void exact_run(peri_tbe_row<S> &row, uint32_t start, uint32_t end, int strip) const
    {
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int d = row.column(strip, k), left = row.cols - d;
            double big[4] = {0, 0, 0, 0}, sum[4] = {0, 0, 0, 0};
            if (left > 0 && end - start <= GROUP) {
                most_items(u, start, end, d, left, big);
                for (int c = 0; c < 4; c++) big[c] = big_of(big[c], end - start);
                sum_exactly(u, start, end, d, left, big, sum);
            }
            for (uint32_t from = start; left > 0 && end - start > GROUP && from < end; from += GROUP)
                for (int c = 0; c < 4; c++) sum[c] += u.r.exact[slot_of(from, from == start) * u.r.width + d + c];
            PERI_UNROLL
            for (int c = 0; c < 4; c++) row.g[k][c] = (float)sum[c];
        }
    }
    template <class S>
    __device__ __forceinline__ void sum(peri_tbe_row<S> &row, uint32_t start, uint32_t end, int strip) const
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

    template <int KIND, class S>
    __device__ __forceinline__ void run(peri_tbe_row<S> &row, uint32_t start, uint32_t end) const
    {
        if (KIND < 0 && u.a.optimizer.kind == PERI_TBE_NONE) return give(row, start, end);
        row.template update<KIND, asks(KIND)>([&](int strip) { sum(row, start, end, strip); });
    }

    /** The gradient alone is asked for. */
    template <class S> __device__ void give(peri_tbe_row<S> &row, uint32_t start, uint32_t end) const
    {
        const int64_t number = u.a.run_values ? (int64_t)u.r.number[start] - 1 : 0;
        float *to = u.a.run_values ? u.a.run_values + number * u.a.run_stride : u.a.dense + row.at;
        const bool fast = peri_aligned16(to);
        row.strips([&](int strip) {
            sum(row, start, end, strip);
            PERI_UNROLL
            for (int k = 0; k < S::K; k++)
                peri_store4(to + row.column(strip, k), row.cols - row.column(strip, k), fast, row.g[k]);
        });
        if (row.lane != 0) return;
        if (u.a.run_values) u.a.run_rows[number] = row.linear;
        else u.a.touched[row.linear] = 1;
    }
};

/** Start to bring a row and its state into the second-level cache. */
__device__ __forceinline__ void ask_for_row(const update_args &u, const peri_tbe_place &place)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const unsigned width = u.a.rows.weight_dtype == PERI_F32 ? 4 : 2, bytes = (unsigned)place.cols * width;
    const char *p = (const char *)u.a.rows.weight + place.at * width;
    if ((((unsigned)(uintptr_t)p | bytes) & 15) == 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes)
                     : "memory");
    if (u.a.rows.momentum1) asm volatile("prefetch.global.L2 [%0];" ::"l"(u.a.rows.momentum1 + place.linear));
#else
    (void)u, (void)place;
#endif
}

/** A run, as a warp hands it to a group of its lanes. */
struct found_run {
    peri_tbe_place place;
    uint32_t start, end;
};

/** The runs that begin in the WINDOW items from @window on, in the order of their rows; all lanes call it. They hold
 *  the item before the window, those in it, and the one behind, so that each sees where a run begins and whether it
 *  ends in the window. */
template <int KIND>
__device__ __forceinline__ int find_runs(const update_args &u, uint32_t window, uint32_t n, found_run *runs)
{
    const unsigned all = 0xffffffffu;
    const int lane = peri_lane();
    const uint32_t e = window - 1 + lane; /* of lane 0 of the first window: 2^32 - 1 */
    const uint64_t row = lane < WINDOW + 2 && e < n ? u.row(e) : (uint64_t)-1;
    const bool valid = row < (uint64_t)u.a.rows.total_rows, begins = __shfl_up_sync(all, row, 1) != row;
    const bool head = valid && begins && lane > 0 && lane <= WINDOW;
    const unsigned heads = __ballot_sync(all, head),
                   edges = __ballot_sync(all, lane < WINDOW + 2 && (begins || !valid));
    __syncwarp(); /* the runs of the window before have been read */
    if (head) {
        const peri_tbe_place place = peri_tbe_place_of(&u.a.rows, &u.a.optimizer, (int64_t)row);
        const unsigned past = edges & ~((2u << lane) - 1);
        if (asks(KIND)) ask_for_row(u, place);
        runs[__popc(heads & ((1u << lane) - 1))] =
            found_run{place, e, past ? window - 2 + __ffs((int)past) : (uint32_t)u.end_of(window + WINDOW, n)};
    }
    __syncwarp();
    return __popc(heads);
}

/** A warp has the runs that begin in a window; each group of its lanes takes the next one. Groups that find none go
 *  along with no column, since all lanes meet in the shuffles. */
template <class S, int KIND, bool IN_ORDER, int BLOCKS>
__global__ void __launch_bounds__(PERI_BLOCK, BLOCKS) update_windows(update_args u, float *rooms, int64_t room)
{
    enum { GROUPS = 32 / S::LANES };
    PERI_SHARED(found_run, found, PERI_WARPS * WINDOW);
    PERI_SHARED(uint32_t, counts, PERI_WARPS);
    const int warp = threadIdx.x / 32, lane = peri_lane() % S::LANES, group = peri_lane() / S::LANES;
    const unsigned mask =
        KIND >= 0 || S::LANES == 32 ? 0xffffffffu : ((1u << (S::LANES & 31)) - 1) << (group * S::LANES);
    const uint32_t n = (uint32_t)*u.a.n;
    found_run *const runs = found + warp * WINDOW;
    uint32_t all = 0;
    for (int64_t window = peri_grid_thread() / 32 * WINDOW; window < n; window += peri_grid_threads() / 32 * WINDOW) {
        const int count = find_runs<KIND>(u, (uint32_t)window, n, runs);
        all += count;
        for (int r = group; r - group < count; r += GROUPS) {
            if (KIND < 0 && r >= count) continue;
            const found_run *f = &runs[r < count ? r : 0];
            peri_tbe_place place = f->place;
            if (KIND >= 0 && r >= count) place.cols = 0;
            peri_tbe_row<S> row(&u.a.rows, &u.a.optimizer, place,
                                S::WIDE ? rooms + peri_grid_thread() / S::LANES * room : NULL, lane, mask);
            update_runs<IN_ORDER>{u}.template run<KIND>(row, f->start, f->end);
        }
    }
    if (peri_lane() == 0) counts[warp] = all;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < PERI_WARPS; w++) all += counts[w];
    peri_atomic_add(u.a.updated, all);
    if (u.a.run_values && blockIdx.x == 0) *u.a.runs = u.r.number[u.a.capacity - 1];
}

/* -- the operation ------------------------------------------------------------------------------------------------- */

struct plan {
    int64_t slots, width, scan; /* bytes of the cumulative sum */
    int64_t room, sums, exact, rooms, bytes; /* places in the scratch */
};

plan plan_of(const peri_k_tbe_update_args *a)
{
    plan p = {};
    size_t scan = 0;
    const int64_t n = a->capacity;
    if (a->run_values) peri_inclusive_sum<uint32_t, uint32_t>(NULL, scan, NULL, NULL, n, 0);
    p.scan = (int64_t)scan;
    p.slots = 2 * ((n + GROUP - 1) / GROUP);
    p.width = (a->rows.max_cols + 3) / 4 * 4;
    p.room = a->run_values ? peri_part(4 * n) : 0;
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

template <class S, int KIND, bool IN_ORDER, int BLOCKS>
cudaError_t update(const update_args &u, float *rooms, const peri_cuda_call *c)
{
    const int64_t windows = (u.a.capacity + WINDOW - 1) / WINDOW, blocks = (windows + PERI_WARPS - 1) / PERI_WARPS;
    const int64_t most = S::WIDE ? PERI_TBE_WIDE_BLOCKS : INT32_MAX;
    const unsigned grid = (unsigned)(blocks < most ? blocks : most);
    return peri_cuda_launch(update_windows<S, KIND, IN_ORDER, BLOCKS>, grid, PERI_BLOCK, 0, c, u, rooms,
                            peri_tbe_room(u.a.rows.max_cols));
}

/** The optimizers that most steps spend their time with: two vectors a lane, so that four blocks fit a multiprocessor
 *  (three of Adam, which keeps the moments in registers, too). */
template <int KIND> cudaError_t update_fast(const update_args &u, float *rooms, const peri_cuda_call *c)
{
    enum { BLOCKS = KIND == PERI_TBE_ADAM ? 3 : 4 };
    const int64_t cols = u.a.rows.max_cols;
    if (cols <= 32) return update<peri_tbe_shape<4, 2>, KIND, true, BLOCKS>(u, rooms, c);
    if (cols <= 64) return update<peri_tbe_shape<8, 2>, KIND, true, BLOCKS>(u, rooms, c);
    if (cols <= 128) return update<peri_tbe_shape<16, 2>, KIND, true, BLOCKS>(u, rooms, c);
    if (cols <= 256) return update<peri_tbe_shape<32, 2>, KIND, true, BLOCKS>(u, rooms, c);
    return update<peri_tbe_shape<32, 4>, KIND, true, BLOCKS / 2>(u, rooms, c); /* Adam would spill with two */
}

template <bool IN_ORDER> cudaError_t update_any(const update_args &u, float *rooms, const peri_cuda_call *c)
{
    if (u.a.rows.max_cols <= 128) return update<peri_tbe_shape<4, 8>, -1, IN_ORDER, 1>(u, rooms, c);
    return update<peri_tbe_wide, -1, IN_ORDER, 1>(u, rooms, c);
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
    const update_args u = {*a, {(uint32_t *)c->scratch, (float *)(c->scratch + p.sums), (double *)(c->scratch + p.sums),
                                (double *)(c->scratch + p.exact), p.width}};
    if (a->run_values) {
        PERI_CUDA_TRY(each(0, n, c, mark_heads{u}));
        PERI_CUDA_TRY(
            (peri_inclusive_sum<uint32_t, uint32_t>(c->scratch + p.room, scan, u.r.number, u.r.number, n, c->stream)));
    }
    PERI_CUDA_TRY(sum_pieces(u, p, c));
    if (a->optimizer.exact) return update_any<false>(u, rooms, c);
    const bool narrow = a->rows.max_cols <= peri_tbe_shape<32, 4>::STRIP;
    if (narrow && a->optimizer.kind == PERI_TBE_SGD) return update_fast<PERI_TBE_SGD>(u, rooms, c);
    if (narrow && a->optimizer.kind == PERI_TBE_ROWWISE_ADAGRAD)
        return update_fast<PERI_TBE_ROWWISE_ADAGRAD>(u, rooms, c);
    if (narrow && a->optimizer.kind == PERI_TBE_ADAM) return update_fast<PERI_TBE_ADAM>(u, rooms, c);
    return update_any<true>(u, rooms, c);
}
