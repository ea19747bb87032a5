/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_row.cuh: kernels/tbe.h: the update of a row by every optimizer, weights and gradient in registers.
 *
 * A row is LANES lanes', each of which holds K vectors of four neighbouring columns. Four lanes hold 16 * K columns,
 * sixteen of them side by side K times, and the next four lanes hold the 16 * K columns behind those. LANES 8, K 2:
 *
 *     columns   0..3   4..7   8..11  12..15 16..19 20..23 24..27 28..31 32..35 36..39 ...
 *     lane      0      1      2      3      0      1      2      3      4      5
 *
 * So memory is met in pieces of 64 bytes, and each of the sixteen partial sums of sum16 stays in one lane for K
 * additions before it goes to the next four lanes. Rows that are wider than a group's registers (WIDE) are met strip by
 * strip, and lie in between in a room of the group's.
 */
#ifndef PERI_KERNELS_CUDA_TBE_ROW_CUH
#define PERI_KERNELS_CUDA_TBE_ROW_CUH

#include "tbe.cuh"

#include "../ref/tbe_step.h"

template <int LANES_, int K_, bool WIDE_ = false> struct peri_tbe_shape {
    enum { LANES = LANES_, K = K_, STRIP = 4 * LANES_ * K_ };
    static constexpr bool WIDE = WIDE_;

    /** The first of the four columns that vector @k of @lane holds, in a strip. */
    static __device__ __forceinline__ int column(int lane, int k)
    {
        return lane / 4 * (16 * K_) + 16 * k + lane % 4 * 4;
    }
};
typedef peri_tbe_shape<32, 8, true> peri_tbe_wide;

/** Blocks of a launch with rooms, and the f32 numbers of all rooms for rows of @cols columns: gradient and weights. */
enum { PERI_TBE_WIDE_BLOCKS = 128 };
static inline int64_t peri_tbe_room(int64_t cols)
{
    const int strip = peri_tbe_wide::STRIP;
    return 2 * ((cols + strip - 1) / strip * strip);
}
static inline int64_t peri_tbe_rooms(int64_t cols)
{
    return cols <= peri_tbe_wide::STRIP ? 0 : PERI_TBE_WIDE_BLOCKS * PERI_WARPS * peri_tbe_room(cols);
}

/** sum16(x * x). */
template <class S> struct peri_sum16 {
    float s[4] = {0, 0, 0, 0};

    /** Columns of a strip, of which the row has @left yet; x(k, c) is column c of vector k. */
    template <class X> __device__ __forceinline__ void add(int left, int lane, unsigned mask, X x)
    {
        PERI_UNROLL
        for (int four = 0; four < S::LANES / 4; four++) {
            if (S::LANES == 32 && 16 * S::K * four >= left) continue; /* where groups share a warp, all meet */
            PERI_UNROLL
            for (int c = 0; c < 4; c++) {
                float sum = s[c];
                PERI_UNROLL
                for (int k = 0; k < S::K; k++) {
                    const float mine = x(k, c);
                    sum = fmaf(mine, mine, sum);
                }
                s[c] = S::LANES == 4 ? sum : __shfl_sync(mask, sum, 4 * four + (lane & 3), S::LANES);
            }
        }
    }
    __device__ __forceinline__ float total(unsigned mask)
    {
        PERI_UNROLL
        for (int by = 2; by > 0; by--) {
            PERI_UNROLL
            for (int c = 0; c < 4; c++) s[c] += __shfl_xor_sync(mask, s[c], by);
        }
        return (s[0] + s[2]) + (s[1] + s[3]);
    }
};

/** Load and store numbers of rows, which a call meets once: the second-level cache gives them up first, and keeps the
 *  gradients, which many rows share. */
template <class T> static __device__ __forceinline__ T peri_load_once(const T *p)
{
#if defined(PERI_CUDA_HOST)
    return *p;
#else
    return __ldcs(p);
#endif
}
template <class T> static __device__ __forceinline__ void peri_store_once(T *p, T x)
{
#if defined(PERI_CUDA_HOST)
    *p = x;
#else
    __stcs(p, x);
#endif
}

/** How weights become numbers of 16 bits. */
struct peri_tbe_narrow {
    bool f16; /* else bf16 */
    float most, least; /* the largest number; the least of f16 that is not subnormal (bf16: 0, its subnormal numbers are
                          f32's) */
    int32_t bits;  /* random ones that stochastic rounding adds */
    uint32_t kept; /* those of f32 that there is room for */
    __device__ __forceinline__ explicit peri_tbe_narrow(bool is_f16)
        : f16(is_f16), most(is_f16 ? 65504.0f : 0x1.fep127f), least(is_f16 ? 0x1p-14f : 0.0f),
          bits(is_f16 ? TBE_BITS_F16 : TBE_BITS_BF16), kept(~0u << (is_f16 ? TBE_BITS_F16 : TBE_BITS_BF16))
    {
    }

    /** What tbe_round_f16 and tbe_round_bf16 make of a finite x, as a float. What is subnormal in f16 is moved up by
     *  2^-14 meanwhile, where f32 goes in steps of 2^-37. */
    __device__ __forceinline__ float shaken(float x, uint32_t random) const
    {
        const float size = fminf(fabsf(x), most), up = size < least ? least : 0.0f;
        return copysignf(k_float((k_bits(size + up) + random) & kept) - up, x);
    }
    __device__ __forceinline__ uint32_t pair(float low, float high) const
    {
        return f16 ? peri_f16::pair(low, high) : peri_bf16::pair(low, high);
    }

    /** Four numbers, rounded. Infinities and NaN, which are rare, are looked after behind one branch. */
    __device__ __forceinline__ void round4(const float (&x)[4], const uint32_t (&random)[4], uint32_t (&y)[2]) const
    {
        bool finite = true;
        PERI_UNROLL
        for (int c = 0; c < 4; c++) finite = finite && fabsf(x[c]) <= 0x1.fffffep127f;
        PERI_UNROLL
        for (int c = 0; c < 2; c++)
            y[c] = pair(shaken(x[2 * c], random[2 * c]), shaken(x[2 * c + 1], random[2 * c + 1]));
        if (finite) return;
        PERI_UNROLL
        for (int c = 0; c < 4; c++) {
            if (fabsf(x[c]) <= 0x1.fffffep127f) continue;
            const int at = c % 2 * 16;
            const uint32_t h = f16 ? k_f32_to_f16(x[c]) : k_f32_to_bf16(x[c]);
            y[c / 2] = (y[c / 2] & 0xffff0000u >> at) | h << at;
        }
    }

    /** The same, to the nearest. */
    __device__ __forceinline__ void nearest4(const float (&x)[4], uint32_t (&y)[2]) const
    {
        PERI_UNROLL
        for (int c = 0; c < 2; c++) y[c] = pair(x[2 * c], x[2 * c + 1]);
    }
};

/** Write four columns of 16 bits to @p, only the first @left of them. @fast: by one store, if all four are written. */
static __device__ __forceinline__ void peri_tbe_put4(uint16_t *p, int64_t left, bool fast, const uint32_t (&y)[2])
{
    if (fast && left >= 4) return peri_store_once((uint2 *)p, make_uint2(y[0], y[1]));
    PERI_UNROLL
    for (int c = 0; c < 4; c++)
        if (c < left) p[c] = (uint16_t)(y[c / 2] >> c % 2 * 16);
}

/** As above, of f32. */
static __device__ __forceinline__ void peri_tbe_put4(float *p, int64_t left, bool fast, const float (&x)[4])
{
    if (fast && left >= 4) return peri_store_once((float4 *)p, make_float4(x[0], x[1], x[2], x[3]));
    peri_store4(p, left, fast, x);
}

/** x as weights from element @at, of column @column of the whole table; rounded as the tables are. @key: of the row. */
static __device__ __forceinline__ void peri_tbe_store4(const peri_k_tbe_rows *rows, const peri_k_tbe_optimizer *o,
                                                       uint64_t key, int64_t at, int64_t column, int64_t left,
                                                       bool fast, const float (&x)[4])
{
    if (rows->weight_dtype == PERI_F32) return peri_tbe_put4((float *)rows->weight + at, left, fast, x);
    if (left <= 0) return;
    const peri_tbe_narrow narrow(rows->weight_dtype == PERI_F16);
    uint32_t y[2];
    if (o->stochastic) {
        uint32_t random[4];
        PERI_UNROLL
        for (int c = 0; c < 4; c++) random[c] = tbe_random_bits(key, column + c, narrow.bits);
        narrow.round4(x, random, y);
    } else narrow.nearest4(x, y);
    peri_tbe_put4((uint16_t *)rows->weight + at, left, fast, y);
}

/** What a row's update comes to, once a row. */
struct peri_tbe_numbers {
    float rate, keep;
    float c1, c2, m2; /* adam and its kin */
};

/** Where a row lies. */
struct peri_tbe_place {
    int64_t linear, at; /* elements from the group's first weight */
    uint64_t key;       /* of its random bits; of tables that round stochastically */
    int32_t table, cols;
};
static __device__ __forceinline__ peri_tbe_place peri_tbe_place_in(const peri_k_tbe_rows *rows,
                                                                   const peri_k_tbe_optimizer *o, int64_t table,
                                                                   int64_t linear)
{
    const peri_k_tbe_table *t = &rows->tables[table];
    const int64_t row = linear - t->first_row;
    const uint64_t key = o->stochastic ? tbe_row_key(o, t, tbe_row_of_slot(rows, t, row)) : 0;
    return peri_tbe_place{linear, t->offset + row * t->stride, key, (int32_t)table, (int32_t)t->cols};
}
static __device__ __forceinline__ peri_tbe_place peri_tbe_place_of(const peri_k_tbe_rows *rows,
                                                                   const peri_k_tbe_optimizer *o, int64_t linear)
{
    return peri_tbe_place_in(rows, o, peri_tbe_table_of(rows->tables, rows->n_tables, linear), linear);
}

template <class S> struct peri_tbe_row {
    const peri_k_tbe_rows *rows;
    const peri_k_tbe_optimizer *o;
    const peri_k_tbe_table *t;
    int64_t linear, at;
    uint64_t key;
    int cols;
    float *room; /* of the group; WIDE */
    int lane;
    unsigned mask;
    bool fast; /* rows lie at multiples of four elements */
    float g[S::K][4], w[S::K][4];
    float m1[S::K][4], m2[S::K][4]; /* the moments, where a kernel of adam's own has asked for them */

    __device__ __forceinline__ peri_tbe_row(const peri_k_tbe_rows *rows_, const peri_k_tbe_optimizer *o_,
                                            const peri_tbe_place &place, float *room_, int lane_, unsigned mask_)
        : rows(rows_), o(o_), t(&rows_->tables[place.table]), linear(place.linear), at(place.at), key(place.key),
          cols(place.cols), room(room_), lane(lane_), mask(mask_)
    {
        fast = at % 4 == 0 &&
               (((uintptr_t)rows->weight | (uintptr_t)rows->momentum1 | (uintptr_t)rows->momentum2) & 15) == 0;
    }

    __device__ __forceinline__ int column(int strip, int k) const { return strip + S::column(lane, k); }

    /** f(strip) for the strips of the row. */
    template <class F> __device__ __forceinline__ void strips(F f)
    {
        if (!S::WIDE) f(0);
        for (int strip = 0; S::WIDE && strip < cols; strip += S::STRIP) f(strip);
    }

    /** x = this lane's columns of the strip, of f32 numbers whose column 0 is at @p. Where no vector is cut, all loads
     *  are in flight. ONCE: see peri_load_once. */
    template <bool ONCE = false>
    __device__ __forceinline__ void load(const float *p, int strip, bool aligned, float (&x)[S::K][4])
    {
        if (aligned && cols % 4 == 0) {
            float4 v[S::K];
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) {
                const float4 *from = (const float4 *)(p + column(strip, k));
                v[k] = make_float4(0, 0, 0, 0);
                if (column(strip, k) < cols) v[k] = ONCE ? peri_load_once(from) : *from;
            }
            PERI_UNROLL
            for (int k = 0; k < S::K; k++) x[k][0] = v[k].x, x[k][1] = v[k].y, x[k][2] = v[k].z, x[k][3] = v[k].w;
            return;
        }
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) peri_load4(p + column(strip, k), cols - column(strip, k), false, x[k]);
    }

    /** Start to load the weights of a strip: nothing waits for them until open_weights. Until then, w holds the two
     *  words of four 16-bit weights in its first two numbers. */
    __device__ __forceinline__ void ask_weights(int strip)
    {
        if (rows->weight_dtype == PERI_F32) return load<true>((const float *)rows->weight + at, strip, fast, w);
        const uint16_t *p = (const uint16_t *)rows->weight + at;
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int d = column(strip, k), left = cols - d;
            uint2 v = make_uint2(0, 0);
            if (fast && left >= 4) {
                v = peri_load_once((const uint2 *)(p + d));
            } else {
                if (left > 0) v.x = p[d];
                if (left > 1) v.x |= (unsigned)p[d + 1] << 16;
                if (left > 2) v.y = p[d + 2];
                if (left > 3) v.y |= (unsigned)p[d + 3] << 16;
            }
            w[k][0] = __uint_as_float(v.x);
            w[k][1] = __uint_as_float(v.y);
        }
    }
    __device__ __forceinline__ void open_weights()
    {
        if (rows->weight_dtype == PERI_F32) return;
        const bool bf16 = rows->weight_dtype == PERI_BF16;
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const unsigned low = __float_as_uint(w[k][0]), high = __float_as_uint(w[k][1]);
            w[k][0] = peri_half_float(low & 0xffffu, bf16), w[k][1] = peri_half_float(low >> 16, bf16);
            w[k][2] = peri_half_float(high & 0xffffu, bf16), w[k][3] = peri_half_float(high >> 16, bf16);
        }
    }

    /** Gradient and weights to the room, and back, where registers do not hold the row. */
    __device__ __forceinline__ void keep(int strip)
    {
        if (!S::WIDE || cols <= S::STRIP) return;
        float *other = room + padded(cols);
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            peri_store4(room + column(strip, k), 4, true, g[k]);
            peri_store4(other + column(strip, k), 4, true, w[k]);
        }
    }
    __device__ __forceinline__ void fetch(int strip)
    {
        if (!S::WIDE || cols <= S::STRIP) return;
        const float *other = room + padded(cols);
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            peri_load4(room + column(strip, k), 4, true, g[k]);
            peri_load4(other + column(strip, k), 4, true, w[k]);
        }
    }
    static __device__ __forceinline__ int padded(int n) { return (n + S::STRIP - 1) / S::STRIP * S::STRIP; }

    /** f(weight, gradient) for all columns of the strip in registers. */
    template <class F> __device__ __forceinline__ void each_column(F f)
    {
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            PERI_UNROLL
            for (int c = 0; c < 4; c++) f(w[k][c], g[k][c]);
        }
    }

    /** f(weight, gradient, state), the state laid out as the weights. */
    template <class F> __device__ __forceinline__ void with_state(int strip, F f)
    {
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int d = column(strip, k);
            float m[4];
            peri_load4(rows->momentum1 + at + d, cols - d, fast, m);
            PERI_UNROLL
            for (int c = 0; c < 4; c++) f(w[k][c], g[k][c], m[c]);
            peri_store4(rows->momentum1 + at + d, cols - d, fast, m);
        }
    }

    /** adam and its kin: the moments of a column with gradient @y, and u. @one: the second one is the row's. */
    __device__ __forceinline__ float moment(const peri_tbe_numbers &n, bool one, float y, float &first,
                                            float &second) const
    {
        first = fmaf(o->rest1, y, o->beta1 * first);
        if (!one) second = fmaf(o->rest2 * y, y, o->beta2 * second);
        return first * n.c1 / (sqrtf(second * n.c2) + o->eps);
    }

    /** The moments of the strip, and f(weight, gradient, u). */
    template <class F> __device__ __forceinline__ void with_moments(int strip, const peri_tbe_numbers &n, bool one, F f)
    {
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int d = column(strip, k);
            float first[4], second[4] = {n.m2, n.m2, n.m2, n.m2};
            peri_load4(rows->momentum1 + at + d, cols - d, fast, first);
            if (!one) peri_load4(rows->momentum2 + at + d, cols - d, fast, second);
            PERI_UNROLL
            for (int c = 0; c < 4; c++) f(w[k][c], g[k][c], moment(n, one, g[k][c], first[c], second[c]));
            peri_store4(rows->momentum1 + at + d, cols - d, fast, first);
            if (!one) peri_store4(rows->momentum2 + at + d, cols - d, fast, second);
        }
    }

    /** The step of a kernel of adam's own, whose moments are in registers. */
    __device__ __forceinline__ void adam(int strip, const peri_tbe_numbers &n)
    {
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int d = column(strip, k);
            PERI_UNROLL
            for (int c = 0; c < 4; c++)
                w[k][c] =
                    w[k][c] - o->lr * fmaf(o->weight_decay, w[k][c], moment(n, false, g[k][c], m1[k][c], m2[k][c]));
            peri_tbe_put4(rows->momentum1 + at + d, cols - d, fast, m1[k]);
            peri_tbe_put4(rows->momentum2 + at + d, cols - d, fast, m2[k]);
        }
    }

    /** Vectors k and k + 1 of a row's weights are 16 columns apart, and share the words of their random bits if the
     *  shard begins at a multiple of 32 columns of the whole table (PAIRED). */
    template <bool PAIRED> __device__ __forceinline__ void store_rounded(int strip)
    {
        const peri_tbe_narrow narrow(rows->weight_dtype == PERI_F16);
        PERI_UNROLL
        for (int k = 0; k < S::K; k += 2) {
            const int d = column(strip, k);
            const int64_t whole = t->col_offset + d;
            const uint32_t first = tbe_random_lane(whole);
            uint32_t near[4], far[4], y[2];
            PERI_UNROLL
            for (int c = 0; c < 4; c++) {
                const uint32_t word = PAIRED ? tbe_random_word(key, first + c) : 0;
                near[c] = PAIRED ? tbe_low_bits(word, narrow.bits) : tbe_random_bits(key, whole + c, narrow.bits);
                far[c] = PAIRED ? tbe_high_bits(word, narrow.bits) : tbe_random_bits(key, whole + 16 + c, narrow.bits);
            }
            narrow.round4(w[k], near, y);
            peri_tbe_put4((uint16_t *)rows->weight + at + d, cols - d, fast, y);
            narrow.round4(w[k + 1], far, y);
            peri_tbe_put4((uint16_t *)rows->weight + at + d + 16, cols - d - 16, fast, y);
        }
    }

    __device__ __forceinline__ void store_weights(int strip)
    {
        if (rows->weight_dtype != PERI_F32 && o->stochastic) {
            if (t->col_offset % 32 == 0) store_rounded<true>(strip);
            else store_rounded<false>(strip);
            return;
        }
        PERI_UNROLL
        for (int k = 0; k < S::K; k++) {
            const int d = column(strip, k);
            peri_tbe_store4(rows, o, key, at + d, t->col_offset + d, cols - d, fast, w[k]);
        }
    }

    /* -- optimizers ------------------------------------------------------------------------------------------------ */

    __device__ __forceinline__ bool is(int kind, int a, int b) const { return kind == a || kind == b; }

    /** The numbers of the row, of sums over it; the row's states become those after the step. @state: momentum1 of
     *  row-wise Adagrad, which was loaded with the weights. */
    template <int KIND>
    __device__ __forceinline__ peri_tbe_numbers numbers(int kind, float state, float squares, float weights,
                                                        float gradients)
    {
        peri_tbe_numbers n = {o->lr, 1, o->correction1, o->correction2, 0};
        if (is(kind, PERI_TBE_SGD, PERI_TBE_ADAGRAD)) {
            if (o->decay == PERI_DECAY_DECOUPLE) n.keep = 1 - o->lr * o->weight_decay;
        } else if (kind == PERI_TBE_ROWWISE_ADAGRAD) {
            const float m = state + squares / (float)cols;
            n.rate = o->lr / (sqrtf(m) + o->eps);
            if (o->decay == PERI_DECAY_L2) n.keep = 1 - n.rate * o->weight_decay;
            if (o->decay == PERI_DECAY_DECOUPLE) n.keep = 1 - o->lr * o->weight_decay;
            __syncwarp(mask); /* all have read */
            if (lane == 0 && cols > 0) rows->momentum1[linear] = m;
        } else if (KIND < 0 || KIND == PERI_TBE_ADAM) {
            more_numbers(kind, squares, weights, gradients, &n);
        }
        return n;
    }

    __device__ inline void more_numbers(int kind, float squares, float weights, float gradients, peri_tbe_numbers *n)
    {
        if (kind == PERI_TBE_LARS_SGD) {
            const float below = gradients + o->weight_decay * weights;
            if (weights > 0 && below > 0) n->rate = o->lr * (o->eta * weights / below);
        } else if (is(kind, PERI_TBE_ROWWISE_RMSPROP_AR, PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER)) {
            float m = rows->momentum1[linear], counter = rows->row_counter ? rows->row_counter[linear] : 0;
            int64_t prev = rows->prev_iter[linear];
            const float most = rows->max_counter ? rows->max_counter[t - rows->tables] : 0;
            tbe_row_numbers numbers = {&m, &counter, &prev, most, squares, weights, cols};
            const tbe_step step = tbe_step_of(o, &numbers);
            n->rate = step.rate;
            n->keep = step.keep;
            __syncwarp(mask);
            if (lane != 0) return;
            rows->momentum1[linear] = m;
            rows->prev_iter[linear] = prev;
            if (rows->row_counter) rows->row_counter[linear] = counter;
        } else if (kind != PERI_TBE_LION) {
            const bool one = is(kind, PERI_TBE_PARTIAL_ROWWISE_ADAM, PERI_TBE_PARTIAL_ROWWISE_LAMB),
                       counted = o->row_bias_correction && cols > 0; /* a group without a row has another's place */
            const float step = counted ? rows->row_counter[linear] + 1 : 0;
            if (counted) n->c1 = (float)(1 / (1 - tbe_power(o->exact_beta1, (uint64_t)step)));
            if (counted) n->c2 = (float)(1 / (1 - tbe_power(o->exact_beta2, (uint64_t)step)));
            if (one) n->m2 = fmaf(o->rest2, gradients / (float)cols, o->beta2 * rows->momentum2[linear]);
            __syncwarp(mask);
            if (lane == 0 && counted) rows->row_counter[linear] = step;
            if (lane == 0 && one) rows->momentum2[linear] = n->m2;
        }
    }

    /** The weights of a strip in registers; of LAMB, r in the place of the gradient. */
    template <int KIND> __device__ __forceinline__ void step(int kind, int strip, const peri_tbe_numbers &n)
    {
        const float wd = o->weight_decay, lr = o->lr, rate = n.rate, keep = n.keep;
        const bool l2 = o->decay == PERI_DECAY_L2;
        if (kind == PERI_TBE_SGD)
            each_column([=](float &x, float y) { x = fmaf(-lr, l2 ? fmaf(wd, x, y) : y, keep * x); });
        else if (KIND == PERI_TBE_ADAM) adam(strip, n);
        else if (kind == PERI_TBE_ROWWISE_ADAGRAD || KIND >= 0)
            each_column([=](float &x, float y) { x = fmaf(-rate, y, keep * x); });
        else more_steps(kind, strip, n);
    }

    __device__ inline void more_steps(int kind, int strip, const peri_tbe_numbers &n)
    {
        const peri_k_tbe_optimizer *const p = o;
        const float wd = o->weight_decay, lr = o->lr, rate = n.rate, keep = n.keep;
        const bool l2 = o->decay == PERI_DECAY_L2;
        const bool one = is(kind, PERI_TBE_PARTIAL_ROWWISE_ADAM, PERI_TBE_PARTIAL_ROWWISE_LAMB);
        switch (kind) {
        case PERI_TBE_ADAGRAD:
            with_state(strip, [=](float &x, float y, float &h) {
                y = l2 ? fmaf(wd, x, y) : y;
                h = fmaf(y, y, h);
                x = keep * x - lr * y / (sqrtf(h) + p->eps);
            });
            break;
        case PERI_TBE_LARS_SGD:
            with_state(strip, [=](float &x, float y, float &m) {
                m = fmaf(rate, fmaf(wd, x, y), p->momentum * m);
                x = x - m;
            });
            break;
        case PERI_TBE_LION:
            with_state(strip, [=](float &x, float y, float &m) {
                const float b = fmaf(p->rest1, y, p->beta1 * m), s = b > 0 ? 1 : b < 0 ? -1 : b;
                x = x - lr * fmaf(wd, x, s);
                m = fmaf(p->rest2, y, p->beta2 * m);
            });
            break;
        case PERI_TBE_ADAM:
        case PERI_TBE_PARTIAL_ROWWISE_ADAM:
            with_moments(strip, n, one, [=](float &x, float &, float u) { x = x - lr * fmaf(wd, x, u); });
            break;
        case PERI_TBE_LAMB:
        case PERI_TBE_PARTIAL_ROWWISE_LAMB:
            with_moments(strip, n, one, [=](float &x, float &y, float u) { y = fmaf(wd, x, u); });
            break;
        default: /* with counters */ each_column([=](float &x, float y) { x = fmaf(-rate, y, keep * x); });
        }
    }

    /** LAMB: w = fma(-(lr * ratio), r, w), @weights being norm(w). */
    __device__ inline void finish_lamb(float weights)
    {
        peri_sum16<S> sum;
        strips([&](int strip) {
            fetch(strip);
            sum.add(cols - strip, lane, mask, [&](int k, int c) { return g[k][c]; });
        });
        const float steps = sqrtf(sum.total(mask)), rate = weights > 0 && steps > 0 ? o->lr * (weights / steps) : o->lr;
        strips([&](int strip) {
            fetch(strip);
            each_column([=](float &x, float y) { x = fmaf(-rate, y, x); });
            keep(strip);
        });
    }

    /** No row is longer than max_norm. */
    __device__ inline void limit()
    {
        peri_sum16<S> sum;
        strips([&](int strip) {
            fetch(strip);
            sum.add(cols - strip, lane, mask, [&](int k, int c) { return w[k][c]; });
        });
        const float norm = sqrtf(sum.total(mask)), by = o->max_norm / norm;
        if (!(norm > o->max_norm)) return;
        strips([&](int strip) {
            fetch(strip);
            each_column([=](float &x, float) { x = x * by; });
            keep(strip);
        });
    }

    /** Update the row; source(strip) puts a strip of its gradient into g. KIND: the optimizer, -1: what o->kind says.
     *  NEAR: the weights are on their way to the second-level cache already, so that they need no registers while the
     *  gradient is added up. */
    template <int KIND, bool NEAR = false, class F> __device__ __forceinline__ void update(F source)
    {
        const int kind = KIND >= 0 ? KIND : o->kind;
        const bool l2 = o->decay == PERI_DECAY_L2, lamb = is(kind, PERI_TBE_LAMB, PERI_TBE_PARTIAL_ROWWISE_LAMB);
        const bool counted = is(kind, PERI_TBE_ROWWISE_RMSPROP_AR, PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER);
        const bool of_weights = KIND < 0 && (lamb || counted || kind == PERI_TBE_LARS_SGD);
        const bool one = is(kind, PERI_TBE_PARTIAL_ROWWISE_ADAM, PERI_TBE_PARTIAL_ROWWISE_LAMB);
        const bool of_gradients = KIND < 0 && (one || kind == PERI_TBE_LARS_SGD);
        const float wd = o->weight_decay;
        peri_sum16<S> squares, weights, gradients;
        const float state = kind == PERI_TBE_ROWWISE_ADAGRAD && cols > 0 ? rows->momentum1[linear] : 0;
        strips([&](int strip) {
            if (!NEAR) ask_weights(strip);
            if (KIND == PERI_TBE_ADAM) {
                load<true>(rows->momentum1 + at, strip, fast, m1);
                load<true>(rows->momentum2 + at, strip, fast, m2);
            }
            source(strip);
            if (NEAR) ask_weights(strip);
            open_weights();
            const int left = cols - strip;
            if (counted || kind == PERI_TBE_ROWWISE_ADAGRAD) {
                if (l2) squares.add(left, lane, mask, [&](int k, int c) { return fmaf(wd, w[k][c], g[k][c]); });
                else squares.add(left, lane, mask, [&](int k, int c) { return g[k][c]; });
            }
            if (of_weights) weights.add(left, lane, mask, [&](int k, int c) { return w[k][c]; });
            if (of_gradients) gradients.add(left, lane, mask, [&](int k, int c) { return g[k][c]; });
            keep(strip);
        });
        const float norm = of_weights ? sqrtf(weights.total(mask)) : 0;
        float all = of_gradients ? gradients.total(mask) : 0;
        if (kind == PERI_TBE_LARS_SGD) all = sqrtf(all);
        const float sum = counted || kind == PERI_TBE_ROWWISE_ADAGRAD ? squares.total(mask) : 0;
        const peri_tbe_numbers n = numbers<KIND>(kind, state, sum, norm, all);
        strips([&](int strip) {
            fetch(strip);
            step<KIND>(kind, strip, n);
            keep(strip);
        });
        if (KIND < 0 && lamb) finish_lamb(norm);
        if (o->max_norm > 0) limit();
        strips([&](int strip) {
            fetch(strip);
            store_weights(strip);
        });
    }
};

/** Rows of a job, a group each: job.rows, job.optimizer; job.count() of them, on the device; job.find(i, &table,
 *  &linear): whether i has anything to do; job.run<KIND>(row, i): do it. */
template <class S, int KIND, class J>
__global__ void __launch_bounds__(PERI_BLOCK, KIND < 0 ? 1 : 2) peri_tbe_rows_kernel(J job, float *rooms, int64_t room)
{
    const int lane = (int)(threadIdx.x % S::LANES);
    const unsigned mask =
        S::LANES == 32 ? 0xffffffffu : ((1u << (S::LANES & 31)) - 1) << ((threadIdx.x & 31) / S::LANES * S::LANES);
    const int64_t group = peri_grid_thread() / S::LANES, groups = peri_grid_threads() / S::LANES, n = job.count();
    for (int64_t i = group; i < n; i += groups) {
        int64_t table, linear;
        if (!job.find(i, &table, &linear)) continue;
        const peri_tbe_place place = peri_tbe_place_in(&job.rows, &job.optimizer, table, linear);
        peri_tbe_row<S> row(&job.rows, &job.optimizer, place, S::WIDE ? rooms + group * room : NULL, lane, mask);
        job.template run<KIND>(row, i);
    }
}

/** @n: count() at most. @rooms: peri_tbe_rooms(max_cols) f32 numbers; for shapes that are WIDE. */
template <class S, int KIND, class J>
static inline cudaError_t peri_tbe_each_row(int64_t n, int64_t max_cols, float *rooms, const peri_cuda_call *c, J job)
{
    if (n <= 0) return cudaSuccess;
    unsigned grid = peri_cuda_grid(n, PERI_BLOCK / S::LANES, c);
    if (S::WIDE && grid > PERI_TBE_WIDE_BLOCKS) grid = PERI_TBE_WIDE_BLOCKS;
    return peri_cuda_launch(peri_tbe_rows_kernel<S, KIND, J>, grid, PERI_BLOCK, 0, c, job, rooms,
                            peri_tbe_room(max_cols));
}

#endif
