/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_whole.cu: kernels/tbe.h: what goes over more than the rows of a batch: updates by a dense gradient, averages in
 * place, Shampoo.
 *
 * Shampoo's root: a thread block a table. Jacobi's method turns all of n / 2 disjoint pairs of rows and columns at
 * once, and as in a tournament every pair comes once a sweep; rotations of disjoint pairs do not meet, so a sweep does
 * what one in the order of rows does.
 */
#include "tbe_row.cuh"

namespace {

/* -- dense gradients ----------------------------------------------------------------------------------------------- */

struct dense_rows {
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    const float *dense, *touched;

    __device__ int64_t count() const { return rows.total_rows; }
    __device__ bool find(int64_t i, int64_t *table, int64_t *linear) const
    {
        if (touched[i] == 0) return false;
        *table = peri_tbe_table_of(rows.tables, rows.n_tables, i);
        *linear = i;
        return true;
    }
    template <int KIND, class S> __device__ __forceinline__ void run(peri_tbe_row<S> &row, int64_t) const
    {
        const float *grad = dense + row.at;
        const bool fast = peri_aligned16(grad);
        row.template update<KIND>([&](int64_t strip) {
            row.load(grad, strip, fast, row.g);
        });
    }
};

/* -- averages in place --------------------------------------------------------------------------------------------- */

struct average_row {
    peri_k_tbe_ema_args a;
    __device__ void operator()(int64_t linear, int lane, unsigned) const
    {
        const peri_k_tbe_table *t = &a.rows.tables[peri_tbe_table_of(a.rows.tables, a.rows.n_tables, linear)];
        const int64_t row = linear - t->first_row, at = t->offset + row * t->stride, half = t->cols / 2;
        const bool fast = peri_aligned16(a.rows.weight) && at % 4 == 0 && half % 4 == 0;
        const uint64_t key =
            a.optimizer.stochastic ? tbe_row_key(&a.optimizer, t, tbe_row_of_slot(&a.rows, t, row)) : 0;
        for (int64_t d = 4 * lane; d < half; d += 32) {
            float left[4], right[4];
            peri_weight4(a.rows.weight, at + d, half - d, a.rows.weight_dtype, fast, left);
            peri_weight4(a.rows.weight, at + half + d, half - d, a.rows.weight_dtype, fast, right);
            PERI_UNROLL
            for (int c = 0; c < 4; c++) right[c] = fmaf(a.coef, left[c] - right[c], right[c]);
            peri_tbe_store4(&a.rows, &a.optimizer, key, at + half + d, t->col_offset + half + d, half - d, fast, right);
        }
    }
};

/* -- Shampoo ------------------------------------------------------------------------------------------------------- */

/** Table t's place among all grams. */
struct square {
    int64_t t, n, offset, columns; /* its columns; elements, columns of the tables before */
    __device__ void first(const peri_k_tbe_table *tables)
    {
        t = offset = columns = 0;
        n = tables[0].cols;
    }
    __device__ void next(const peri_k_tbe_table *tables)
    {
        offset += n * n;
        columns += n;
        n = tables[++t].cols;
    }
    /** Of element @e of all. */
    __device__ square(const peri_k_tbe_table *tables, int64_t e)
    {
        for (first(tables); e >= offset + n * n;) next(tables);
    }
    __device__ static square of(const peri_k_tbe_table *tables, int64_t table)
    {
        square s(tables, 0);
        for (s.first(tables); s.t < table;) s.next(tables);
        return s;
    }
};

struct gram_element {
    peri_k_tbe_shampoo s;
    __device__ void operator()(int64_t e) const
    {
        enum { ROWS = 8 };
        const square q(s.tables, e);
        const int64_t i = (e - q.offset) / q.n, j = (e - q.offset) % q.n, last = s.first[q.t + 1];
        float sum = s.gram[e];
        for (int64_t r = s.first[q.t]; r < last; r += ROWS) {
            float x[ROWS], y[ROWS];
            PERI_UNROLL
            for (int b = 0; b < ROWS; b++) {
                const float *g = s.values + (r + b < last ? r + b : r) * s.stride;
                x[b] = g[i];
                y[b] = g[j];
            }
            PERI_UNROLL
            for (int b = 0; b < ROWS; b++)
                if (r + b < last) sum = fmaf(x[b], y[b], sum);
        }
        s.gram[e] = sum;
    }
};

/** x += the other threads' of the block, in all; in an order that is fixed. */
__device__ double block_total(double x, double *room)
{
    x = peri_group_sum<32>(x, 0xffffffffu);
    if (peri_lane() == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < PERI_WARPS; w++) sum += room[w];
    __syncthreads();
    return sum;
}

/** Pair @h of @round, of @m players (even): the rows p < q. */
__device__ void pair_of(int64_t round, int64_t h, int64_t m, int64_t *p, int64_t *q)
{
    const int64_t one = (round + h) % (m - 1), other = h == 0 ? m - 1 : (round - h + m - 1) % (m - 1);
    *p = one < other ? one : other;
    *q = one < other ? other : one;
}

/** All pairs of a round: their angles, then rows, then columns. */
__device__ void turn_pairs(double *a, double *v, double *angles, int64_t n, int64_t round)
{
    const int64_t m = n + n % 2, pairs = m / 2;
    int64_t p, q;
    for (int64_t h = threadIdx.x; h < pairs; h += PERI_BLOCK) {
        pair_of(round, h, m, &p, &q);
        const double x = q < n ? a[p * n + q] : 0;
        double c = 1, s = 0;
        if (x != 0) {
            const double theta = (a[q * n + q] - a[p * n + p]) / (2 * x);
            const double tangent = (theta >= 0 ? 1 : -1) / (fabs(theta) + sqrt(theta * theta + 1));
            c = 1 / sqrt(tangent * tangent + 1);
            s = tangent * c;
        }
        angles[2 * h] = c;
        angles[2 * h + 1] = s;
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < pairs * n; e += PERI_BLOCK) {
        const int64_t h = e / n, k = e % n;
        const double c = angles[2 * h], s = angles[2 * h + 1];
        pair_of(round, h, m, &p, &q);
        if (q >= n || s == 0) continue;
        for (double *x = a;; x = v) {
            const double y = x[p * n + k], z = x[q * n + k];
            x[p * n + k] = c * y - s * z;
            x[q * n + k] = s * y + c * z;
            if (x == v) break;
        }
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < pairs * n; e += PERI_BLOCK) {
        const int64_t h = e % pairs, k = e / pairs;
        const double c = angles[2 * h], s = angles[2 * h + 1];
        pair_of(round, h, m, &p, &q);
        if (q >= n || s == 0) continue;
        const double y = a[k * n + p], z = a[k * n + q];
        a[k * n + p] = c * y - s * z;
        a[k * n + q] = s * y + c * z;
    }
    __syncthreads();
}

/** A thread block a table: a becomes diagonal, the rows of v its eigenvectors; then the diagonal of the root. */
__global__ void __launch_bounds__(PERI_BLOCK) diagonalize(peri_k_tbe_shampoo s, double *angles)
{
    PERI_SHARED(double, room, PERI_WARPS);
    const square q = square::of(s.tables, blockIdx.x);
    const int64_t n = q.n;
    if (s.first[q.t] == s.first[q.t + 1]) return; /* nothing to precondition */
    double *a = s.room + 2 * q.offset, *v = a + n * n;
    for (int64_t e = threadIdx.x; e < n * n; e += PERI_BLOCK) {
        const int64_t i = e / n, j = e % n;
        a[e] = s.gram[q.offset + (i > j ? i * n + j : j * n + i)];
        v[e] = i == j;
    }
    __syncthreads();
    for (int sweep = 0; sweep < 40; sweep++) {
        double off = 0, all = 0;
        for (int64_t e = threadIdx.x; e < n * n; e += PERI_BLOCK) {
            all += a[e] * a[e];
            if (e / n != e % n) off += a[e] * a[e];
        }
        off = block_total(off, room);
        all = block_total(all, room);
        if (!(off > 1e-26 * all)) break;
        for (int64_t round = 0; round + 1 < n + n % 2; round++) turn_pairs(a, v, angles + q.columns + q.t, n, round);
    }
    for (int64_t i = threadIdx.x; i < n; i += PERI_BLOCK)
        a[i * n + i] = 1 / sqrt((a[i * n + i] > 0 ? a[i * n + i] : 0) + s.eps);
}

struct root_element {
    peri_k_tbe_shampoo s;
    __device__ void operator()(int64_t e) const
    {
        const square q(s.tables, e);
        const int64_t n = q.n, i = (e - q.offset) / n, j = (e - q.offset) % n;
        const double *a = s.room + 2 * q.offset, *v = a + n * n;
        if (s.first[q.t] == s.first[q.t + 1]) return;
        double sum = 0;
        for (int64_t k = 0; k < n; k++) sum += v[k * n + i] * a[k * n + k] * v[k * n + j];
        s.root[e] = (float)sum;
    }
};

struct preconditioned_rows {
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    peri_k_tbe_shampoo s;

    __device__ int64_t count() const { return s.first[s.n_tables]; }
    __device__ bool find(int64_t i, int64_t *table, int64_t *linear) const
    {
        int64_t low = 0, high = s.n_tables;
        while (low + 1 < high) {
            const int64_t middle = low + (high - low) / 2;
            if (s.first[middle] <= i) low = middle;
            else high = middle;
        }
        *table = low;
        *linear = s.tables[low].first_row + s.run_rows[i];
        return true;
    }
    template <int KIND, class S> __device__ __forceinline__ void run(peri_tbe_row<S> &row, int64_t i) const
    {
        const square q = square::of(s.tables, row.t - rows.tables);
        const float *g = s.values + i * s.stride, *root = s.root + q.offset;
        const bool fast = peri_aligned16(root) && q.n % 4 == 0;
        row.template update<KIND>([&](int64_t strip) {
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) {
                PERI_UNROLL
                for (int c = 0; c < 4; c++) row.g[k][c] = 0;
            }
            for (int64_t b = 0; b < q.n; b++) {
                const float by = g[b];
                PERI_UNROLL
                for (int k = 0; k < S::K; k++) {
                    float x[4];
                    peri_load4(root + b * q.n + row.column(strip, k), q.n - row.column(strip, k), fast, x);
                    PERI_UNROLL
                    for (int c = 0; c < 4; c++) row.g[k][c] = fmaf(by, x[c], row.g[k][c]);
                }
            }
        });
    }
};

struct shampoo_plan {
    int64_t root, angles, rooms, bytes; /* places in the scratch */
};

shampoo_plan plan_of(const peri_k_tbe_shampoo *a)
{
    shampoo_plan p;
    p.root = peri_part(16 * a->squares);
    p.angles = p.root + peri_part(4 * a->squares);
    p.rooms = p.angles + peri_part(8 * (a->all_cols + a->n_tables));
    p.bytes = p.rooms + peri_part(4 * peri_tbe_rooms(a->rows.max_cols));
    return p;
}

} // namespace

PERI_CUDA_SCRATCH(tbe_dense_update) { return 4 * peri_tbe_rooms(a->rows.max_cols); }
PERI_CUDA_OP(tbe_dense_update)
{
    const dense_rows job = {a->rows, a->optimizer, a->dense, a->touched};
    const int64_t cols = a->rows.max_cols, n = a->rows.total_rows;
    if (cols <= 128) return peri_tbe_each_row<peri_tbe_shape<4, 8>, -1>(n, cols, (float *)c->scratch, c, job);
    return peri_tbe_each_row<peri_tbe_wide, -1>(n, cols, (float *)c->scratch, c, job);
}

PERI_CUDA_SCRATCH(tbe_ema) { return (void)a, 0; }
PERI_CUDA_OP(tbe_ema) { return each_group<8>(0, a->rows.total_rows, c, average_row{*a}); }

PERI_CUDA_SCRATCH(tbe_shampoo) { return plan_of(a).bytes; }
PERI_CUDA_OP(tbe_shampoo)
{
    const shampoo_plan p = plan_of(a);
    peri_k_tbe_shampoo s = *a;
    s.room = (double *)c->scratch;
    s.root = (float *)(c->scratch + p.root);
    s.optimizer.kind = PERI_TBE_SGD;
    const preconditioned_rows job = {s.rows, s.optimizer, s};
    const int64_t cols = s.rows.max_cols;
    float *rooms = (float *)(c->scratch + p.rooms);
    if (s.n_tables <= 0) return cudaSuccess;
    PERI_CUDA_TRY(each(0, s.squares, c, gram_element{s}));
    PERI_CUDA_TRY(
        peri_cuda_launch(diagonalize, (unsigned)s.n_tables, PERI_BLOCK, 0, c, s, (double *)(c->scratch + p.angles)));
    PERI_CUDA_TRY(each(0, s.squares, c, root_element{s}));
    if (cols <= 128) return peri_tbe_each_row<peri_tbe_shape<4, 8>, PERI_TBE_SGD>(s.most_rows, cols, rooms, c, job);
    return peri_tbe_each_row<peri_tbe_wide, PERI_TBE_SGD>(s.most_rows, cols, rooms, c, job);
}
