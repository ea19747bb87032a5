/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence.c (cpu): attention in f32; see kernels/sequence.h.
 *
 * A *tile* is up to CPU_SEQ_ROWS neighbouring rows of one head and sequence. It meets the rows of the other side (keys
 * for queries, queries for keys) in *blocks* of K_LANES, which begin at multiples of K_LANES within the sequence. A
 * block is copied into a *panel*, in which number d of all its rows is one vector, so that the products of a row with
 * the whole block are one vector, too. Which members of the block a row sees is a mask, a bit each. What comes out for
 * a row is a function of its blocks alone, whatever tile it is in.
 */
#include "vmath.h"

enum { CPU_SEQ_ROWS = 32, CPU_SEQ_DEPTH = 64 };

/** Rows of one head: row r begins at p + r * stride. */
typedef struct cpu_seq_rows {
    const float *p;
    int64_t stride, dim;
} cpu_seq_rows;

/** A tile, and what its rows have to do with the rest of their sequence. */
typedef struct cpu_seq_tile {
    const peri_k_attention_args *a;
    peri_k_sequence s;
    int64_t h, first, n; /* first: member; n: rows of the tile */
    peri_k_members sees[CPU_SEQ_ROWS];
    int64_t from, to; /* members that any of them sees lie here */
} cpu_seq_tile;

static inline cpu_seq_rows cpu_seq_head(const void *p, int64_t stride, int64_t dim, const cpu_seq_tile *t)
{
    return (cpu_seq_rows){(const float *)p + t->s.first * stride + t->h * dim, stride, dim};
}
static inline cpu_seq_rows cpu_seq_q(const cpu_seq_tile *t)
{
    return cpu_seq_head(t->a->q, t->a->q_stride, t->a->dim, t);
}
static inline cpu_seq_rows cpu_seq_k(const cpu_seq_tile *t)
{
    return cpu_seq_head(t->a->k, t->a->k_stride, t->a->dim, t);
}
static inline cpu_seq_rows cpu_seq_v(const cpu_seq_tile *t)
{
    return cpu_seq_head(t->a->v, t->a->v_stride, t->a->v_dim, t);
}
static inline cpu_seq_rows cpu_seq_dout(const cpu_seq_tile *t)
{
    return cpu_seq_head(t->a->dout, t->a->heads * t->a->v_dim, t->a->v_dim, t);
}

/** Member @i of an output whose heads have @dim numbers. */
static inline float *cpu_seq_out(void *p, int64_t dim, const cpu_seq_tile *t, int64_t i)
{
    return (float *)p + ((t->s.first + i) * t->a->heads + t->h) * dim;
}

/** The tile that begins with @item and has at most @most rows. @queries: it has queries, else keys. */
static void cpu_seq_begin(cpu_seq_tile *t, const peri_k_attention_args *a, int64_t item, int64_t most, bool queries)
{
    const int64_t row = item % a->rows;
    t->a = a;
    t->h = item / a->rows;
    t->s = peri_k_sequence_at(a->offsets, a->targets, peri_k_sequence_of(a->offsets, a->sequences, row));
    t->first = row - t->s.first;
    t->n = t->s.n - t->first < CPU_SEQ_ROWS ? t->s.n - t->first : CPU_SEQ_ROWS;
    if (t->n > most) t->n = most;
    t->from = t->s.n, t->to = 0;
    for (int64_t r = 0; r < t->n; r++) {
        const int64_t i = t->first + r;
        const peri_k_members m = queries ? peri_k_attention_keys(a, t->s, i) : peri_k_attention_queries(a, t->s, i);
        t->sees[r] = m;
        if (m.head > 0) t->from = 0;
        if (m.from < m.to && m.from < t->from) t->from = m.from;
        if (m.from < m.to && m.to > t->to) t->to = m.to;
        if (m.tail < m.end) { /* which begins behind the others */
            if (m.tail < t->from) t->from = m.tail;
            if (m.end > t->to) t->to = m.end;
        }
        if (m.self >= 0 && m.self < t->from) t->from = m.self;
        if (m.self >= t->to) t->to = m.self + 1;
    }
}

/** Bits [low, high) of a block, cut to it. */
static inline uint32_t cpu_seq_bits(int64_t low, int64_t high)
{
    low = low < 0 ? 0 : low;
    high = high > K_LANES ? K_LANES : high;
    return low < high ? ((1u << high) - 1u) & ~((1u << low) - 1u) : 0;
}

/** Which members from @j on row @r of the tile sees. */
static inline uint32_t cpu_seq_mask(const cpu_seq_tile *t, int64_t r, int64_t j)
{
    const peri_k_members m = t->sees[r];
    return cpu_seq_bits(0, m.head - j) | cpu_seq_bits(m.from - j, m.to - j) |
           cpu_seq_bits(m.tail - j, m.end - j) |
           (m.self >= 0 ? cpu_seq_bits(m.self - j, m.self - j + 1) : 0);
}

/** The mask as lanes. */
static inline k_ivec cpu_seq_lanes(uint32_t mask)
{
    k_ivec bit;
    for (int l = 0; l < K_LANES; l++) bit[l] = (int32_t)(1u << l);
    return (((k_ivec){0} + (int32_t)mask) & bit) != 0;
}

/** Whether any row of the tile sees one of the members from @j on; masks of all. */
static bool cpu_seq_masks(const cpu_seq_tile *t, int64_t j, uint32_t *mask)
{
    uint32_t any = 0;
    for (int64_t r = 0; r < t->n; r++) any |= mask[r] = cpu_seq_mask(t, r, j);
    return any != 0;
}

/** s[r] = products of rows [first, first + n) of @x with the rows of @y from @j on, of which there are @there (the
 *  rest: 0). */
static void cpu_seq_products(k_vec *s, cpu_seq_rows x, int64_t first, int64_t n, cpu_seq_rows y, int64_t j,
                             int64_t there)
{
    float panel[CPU_SEQ_DEPTH * K_LANES];
    for (int64_t r = 0; r < n; r++) s[r] = k_set(0);
    for (int64_t d0 = 0; d0 < x.dim; d0 += CPU_SEQ_DEPTH) {
        const int64_t depth = x.dim - d0 < CPU_SEQ_DEPTH ? x.dim - d0 : CPU_SEQ_DEPTH;
        if (there < K_LANES) memset(panel, 0, (size_t)(depth * K_LANES) * sizeof *panel);
        for (int64_t l = 0; l < there; l++) {
            const float *from = y.p + (j + l) * y.stride + d0;
            for (int64_t d = 0; d < depth; d++) panel[d * K_LANES + l] = from[d];
        }
        int64_t r = 0;
        for (; r + 8 <= n; r += 8) {
            const float *row = x.p + (first + r) * x.stride + d0;
            k_vec acc[8];
            for (int i = 0; i < 8; i++) acc[i] = s[r + i];
            for (int64_t d = 0; d < depth; d++) {
                const k_vec p = k_load(panel + d * K_LANES);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) acc[i] = k_fma(k_set(row[i * x.stride + d]), p, acc[i]);
            }
            for (int i = 0; i < 8; i++) s[r + i] = acc[i];
        }
        for (; r < n; r++) {
            const float *row = x.p + (first + r) * x.stride + d0;
            k_vec acc = s[r];
            for (int64_t d = 0; d < depth; d++) acc = k_fma(k_set(row[d]), k_load(panel + d * K_LANES), acc);
            s[r] = acc;
        }
    }
}

/** out = by * out + sum over the members of the mask of their weight times their row of @x, from @j on; by = 0 does not
 *  read out. */
static void cpu_seq_add(float *out, float by, k_vec weights, uint32_t mask, cpu_seq_rows x, int64_t j)
{
    enum { WIDE = 4 };
    float w[K_LANES];
    k_store(w, weights);
    int64_t c = 0;
    for (; c + WIDE * K_LANES <= x.dim; c += WIDE * K_LANES) {
        k_vec acc[WIDE];
        for (int v = 0; v < WIDE; v++) acc[v] = by == 0 ? k_set(0) : k_load(out + c + v * K_LANES) * by;
        for (uint32_t left = mask; left; left &= left - 1) {
            const int l = __builtin_ctz(left);
            const float *row = x.p + (j + l) * x.stride + c;
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) acc[v] = k_fma(k_set(w[l]), k_load(row + v * K_LANES), acc[v]);
        }
        for (int v = 0; v < WIDE; v++) k_store(out + c + v * K_LANES, acc[v]);
    }
    for (; c < x.dim; c += K_LANES) {
        const int64_t n = x.dim - c < K_LANES ? x.dim - c : K_LANES;
        k_vec acc = by == 0 ? k_set(0) : (n == K_LANES ? k_load(out + c) : k_load_part(out + c, n)) * by;
        for (uint32_t left = mask; left; left &= left - 1) {
            const int l = __builtin_ctz(left);
            const float *row = x.p + (j + l) * x.stride + c;
            acc = k_fma(k_set(w[l]), n == K_LANES ? k_load(row) : k_load_part(row, n), acc);
        }
        if (n == K_LANES) k_store(out + c, acc);
        else k_store_part(out + c, acc, n);
    }
}

static inline float cpu_seq_largest(k_vec v)
{
    float x[K_LANES], most;
    k_store(x, v);
    most = x[0];
    for (int l = 1; l < K_LANES; l++) most = x[l] > most ? x[l] : most;
    return most;
}

/** Weights of scores @s where the mask is, else 0. */
static inline k_vec cpu_seq_weight(const peri_k_attention_args *a, k_vec s, k_vec lse, k_ivec lanes)
{
    const k_vec w = a->form == PERI_ATTENTION_SOFTMAX ? k_exp(s - lse) : (float)a->scale * s * k_sigmoid(s);
    return k_select(lanes, w, k_set(0));
}

/** alpha times the gradients of scores @s, from those of their weights @g. */
static inline k_vec cpu_seq_slope(const peri_k_attention_args *a, k_vec s, k_vec lse, k_vec g, k_vec delta,
                                  k_ivec lanes)
{
    k_vec ds;
    if (a->form == PERI_ATTENTION_SOFTMAX) {
        ds = k_exp(s - lse) * (g - delta);
    } else {
        const k_vec y = k_sigmoid(s);
        ds = (float)a->scale * g * (y * (1 + s * (1 - y)));
    }
    return k_select(lanes, ds * (float)a->alpha, k_set(0));
}

/* -- forward ------------------------------------------------------------------------------------------------------- */

/** What of a query is kept from block to block: the largest score so far, the sum of exp(s - largest), whether it has
 *  seen a block. */
typedef struct cpu_seq_state {
    float most, sum;
    bool begun;
} cpu_seq_state;

/** One query and one block of scores. */
static inline void cpu_seq_attend(const cpu_seq_tile *t, int64_t r, int64_t j, k_vec s, uint32_t mask, cpu_seq_state *q)
{
    const k_ivec lanes = cpu_seq_lanes(mask);
    float *out = cpu_seq_out(t->a->out, t->a->v_dim, t, t->first + r), by = q->begun ? 1 : 0;
    k_vec most = k_set(0);
    if (t->a->form == PERI_ATTENTION_SOFTMAX) {
        float here = cpu_seq_largest(k_select(lanes, s, k_set(-INFINITY)));
        if (q->begun && !(here > q->most)) here = q->most;
        if (q->begun) by = here == q->most ? 1 : expf(q->most - here);
        most = k_set(here);
        q->most = here;
    }
    const k_vec w = cpu_seq_weight(t->a, s, most, lanes);
    q->sum = q->sum * by + k_sum(w);
    cpu_seq_add(out, by, w, mask, cpu_seq_v(t), j);
    q->begun = true;
}

static void cpu_seq_forward(const cpu_seq_tile *t)
{
    const peri_k_attention_args *a = t->a;
    const k_vec alpha = k_set((float)a->alpha);
    cpu_seq_state state[CPU_SEQ_ROWS] = {{0}};
    uint32_t mask[CPU_SEQ_ROWS];
    k_vec s[CPU_SEQ_ROWS];
    for (int64_t j = t->from / K_LANES * K_LANES; j < t->to; j += K_LANES) {
        if (!cpu_seq_masks(t, j, mask)) continue;
        cpu_seq_products(s, cpu_seq_q(t), t->first, t->n, cpu_seq_k(t), j, t->s.n - j < K_LANES ? t->s.n - j : K_LANES);
        for (int64_t r = 0; r < t->n; r++)
            if (mask[r]) cpu_seq_attend(t, r, j, s[r] * alpha, mask[r], &state[r]);
    }
    for (int64_t r = 0; a->form == PERI_ATTENTION_SOFTMAX && r < t->n; r++) {
        float *out = cpu_seq_out(a->out, a->v_dim, t, t->first + r), by = 1 / state[r].sum;
        for (int64_t d = 0; d < a->v_dim; d++) out[d] *= by;
        ((float *)a->lse)[t->h * a->rows + t->s.first + t->first + r] = state[r].most + logf(state[r].sum);
    }
}

/* -- backward ------------------------------------------------------------------------------------------------------ */

static void cpu_seq_backward_q(const cpu_seq_tile *t)
{
    const peri_k_attention_args *a = t->a;
    const bool softmax = a->form == PERI_ATTENTION_SOFTMAX;
    const cpu_seq_rows dout = cpu_seq_dout(t);
    const int64_t at = t->h * a->rows + t->s.first + t->first;
    float lse[CPU_SEQ_ROWS] = {0}, delta[CPU_SEQ_ROWS] = {0};
    bool begun[CPU_SEQ_ROWS] = {false};
    uint32_t mask[CPU_SEQ_ROWS];
    k_vec s[CPU_SEQ_ROWS], g[CPU_SEQ_ROWS];
    for (int64_t r = 0; softmax && r < t->n; r++) {
        const float *out = cpu_seq_out(a->out, a->v_dim, t, t->first + r), *up = dout.p + (t->first + r) * dout.stride;
        for (int64_t d = 0; d < a->v_dim; d++) delta[r] += out[d] * up[d];
        lse[r] = ((const float *)a->lse)[at + r];
        ((float *)a->delta)[at + r] = delta[r];
    }
    for (int64_t j = t->from / K_LANES * K_LANES; a->dq && j < t->to; j += K_LANES) {
        const int64_t there = t->s.n - j < K_LANES ? t->s.n - j : K_LANES;
        if (!cpu_seq_masks(t, j, mask)) continue;
        cpu_seq_products(s, cpu_seq_q(t), t->first, t->n, cpu_seq_k(t), j, there);
        cpu_seq_products(g, dout, t->first, t->n, cpu_seq_v(t), j, there);
        for (int64_t r = 0; r < t->n; r++) {
            if (!mask[r]) continue;
            const k_vec ds =
                cpu_seq_slope(a, s[r] * (float)a->alpha, k_set(lse[r]), g[r], k_set(delta[r]), cpu_seq_lanes(mask[r]));
            cpu_seq_add(cpu_seq_out(a->dq, a->dim, t, t->first + r), begun[r] ? 1 : 0, ds, mask[r], cpu_seq_k(t), j);
            begun[r] = true;
        }
    }
}

static void cpu_seq_backward_kv(const cpu_seq_tile *t)
{
    const peri_k_attention_args *a = t->a;
    const bool softmax = a->form == PERI_ATTENTION_SOFTMAX;
    bool begun[CPU_SEQ_ROWS] = {false};
    uint32_t mask[CPU_SEQ_ROWS];
    k_vec s[CPU_SEQ_ROWS], g[CPU_SEQ_ROWS];
    for (int64_t i = t->from / K_LANES * K_LANES; i < t->to; i += K_LANES) {
        const int64_t there = t->s.n - i < K_LANES ? t->s.n - i : K_LANES, at = t->h * a->rows + t->s.first + i;
        float lse[K_LANES] = {0}, delta[K_LANES] = {0};
        if (!cpu_seq_masks(t, i, mask)) continue;
        cpu_seq_products(s, cpu_seq_k(t), t->first, t->n, cpu_seq_q(t), i, there);
        cpu_seq_products(g, cpu_seq_v(t), t->first, t->n, cpu_seq_dout(t), i, there);
        if (softmax) {
            memcpy(lse, (const float *)a->lse + at, (size_t)there * sizeof *lse);
            memcpy(delta, (const float *)a->delta + at, (size_t)there * sizeof *delta);
        }
        for (int64_t r = 0; r < t->n; r++) {
            if (!mask[r]) continue;
            const k_ivec lanes = cpu_seq_lanes(mask[r]);
            const k_vec score = s[r] * (float)a->alpha, w = cpu_seq_weight(a, score, k_load(lse), lanes);
            const k_vec ds = cpu_seq_slope(a, score, k_load(lse), g[r], k_load(delta), lanes);
            const float by = begun[r] ? 1 : 0;
            if (a->dk) cpu_seq_add(cpu_seq_out(a->dk, a->dim, t, t->first + r), by, ds, mask[r], cpu_seq_q(t), i);
            if (a->dv) cpu_seq_add(cpu_seq_out(a->dv, a->v_dim, t, t->first + r), by, w, mask[r], cpu_seq_dout(t), i);
            begun[r] = true;
        }
    }
}

/* -- the kernels --------------------------------------------------------------------------------------------------- */

static void cpu_seq_each(const peri_k_attention_args *a, int64_t begin, int64_t end, bool queries,
                         void (*f)(const cpu_seq_tile *))
{
    cpu_seq_tile t;
    for (int64_t item = begin; item < end; item += t.n) {
        cpu_seq_begin(&t, a, item, end - item, queries);
        f(&t);
    }
}

static void cpu_attention(const void *args, int64_t begin, int64_t end)
{
    const peri_k_attention_args *a = args;
    if (a->dtype != PERI_F32) ref_attention(args, begin, end);
    else cpu_seq_each(a, begin, end, true, cpu_seq_forward);
}

static void cpu_attention_grad_q(const void *args, int64_t begin, int64_t end)
{
    const peri_k_attention_args *a = args;
    if (a->dtype != PERI_F32) ref_attention_grad_q(args, begin, end);
    else cpu_seq_each(a, begin, end, true, cpu_seq_backward_q);
}

static void cpu_attention_grad_kv(const void *args, int64_t begin, int64_t end)
{
    const peri_k_attention_args *a = args;
    if (a->dtype != PERI_F32) ref_attention_grad_kv(args, begin, end);
    else cpu_seq_each(a, begin, end, false, cpu_seq_backward_kv);
}

#define K_CPU_SEQUENCE                                                                                                 \
    [PERI_K_attention] = cpu_attention, [PERI_K_attention_grad_q] = cpu_attention_grad_q,                              \
    [PERI_K_attention_grad_kv] = cpu_attention_grad_kv,
