/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.cu: kernels/tbe.h: pooled lookups. A group of lanes a bag, as many as a row has vectors of 16 bytes (rows of bytes: of 4,
 * for they have no alignment). The lanes read as many ids at once, and hand them to each other by shuffles; ROWS rows are in flight.
 * Each lane keeps the sums of its columns, in the order of the ids.
 */
#include "tbe.cuh"

namespace {

/* -- formats: `raw` is what a lane loads of a row; a row is fast where its vectors are aligned and whole ------------------------------- */

struct row_f32 {
    enum { FORMAT = PERI_F32, VEC = 4, MULTIPLE = 4, ALIGN = 16, ROWS = 4 };
    float4 raw;
    __device__ __forceinline__ void load(const char *row, int64_t, int64_t d, int64_t)
    {
        raw = *(const float4 *)((const float *)row + d); /* of floats: two registers less than of bytes */
    }
    __device__ __forceinline__ float at(int c) const { return c == 0 ? raw.x : c == 1 ? raw.y : c == 2 ? raw.z : raw.w; }
};

template <int32_t DTYPE> struct row_half {
    enum { FORMAT = DTYPE, VEC = 8, MULTIPLE = 8, ALIGN = 16, ROWS = 4 };
    uint4 raw;
    __device__ __forceinline__ void load(const char *row, int64_t, int64_t d, int64_t)
    {
        raw = *(const uint4 *)((const uint16_t *)row + d);
    }
    __device__ __forceinline__ float at(int c) const
    {
        const unsigned word = c / 2 == 0 ? raw.x : c / 2 == 1 ? raw.y : c / 2 == 2 ? raw.z : raw.w;
        return peri_half_float(word >> 16 * (c % 2) & 0xffffu, DTYPE == PERI_BF16);
    }
};

/** 32 bits of codes, of 8-bit ones twice as many: rows lie at multiples of 4 bytes. Scale and bias are the same of all lanes. */
template <int32_t CODES> struct row_codes {
    enum {
        FORMAT = CODES, BITS = CODES == PERI_ROWS_INT4 ? 4 : CODES == PERI_ROWS_INT2 ? 2 : 8, MULTIPLE = 32 / BITS, ALIGN = 4,
        WORDS = BITS == 8 ? 2 : 1, VEC = WORDS * MULTIPLE, ROWS = BITS == 8 ? 8 : BITS == 4 ? 4 : 2,
        HEAD = CODES == PERI_ROWS_INT8 || CODES == PERI_ROWS_FP8 ? 0 : 4
    };
    unsigned raw[WORDS];
    float scale, bias;
    __device__ __forceinline__ void load(const char *row, int64_t cols, int64_t d, int64_t left)
    {
        PERI_UNROLL
        for (int w = 0; w < WORDS; w++) raw[w] = w == 0 || left > w * MULTIPLE ? ((const unsigned *)(row + HEAD + d * BITS / 8))[w] : 0;
        if (CODES == PERI_ROWS_INT8) {
            scale = *(const float *)(row + cols);
            bias = *(const float *)(row + cols + 4);
        } else if (CODES != PERI_ROWS_FP8) {
            const unsigned pair = *(const unsigned *)row;
            scale = k_f16_to_f32((uint16_t)pair);
            bias = k_f16_to_f32((uint16_t)(pair >> 16));
        }
    }
    __device__ __forceinline__ float at(int c) const
    {
        const unsigned code = raw[c / MULTIPLE] >> BITS * (c % MULTIPLE) & ((1u << BITS) - 1);
        return CODES == PERI_ROWS_FP8 ? tbe_fp8_to_f32((uint8_t)code) : fmaf((float)code, scale, bias);
    }
};

__device__ __forceinline__ unsigned half_of(float x, bool bf16) { return bf16 ? k_f32_to_bf16(x) : k_f32_to_f16(x); }

/** Elements [at, at + VEC) of the output, the first @left of them. */
template <int VEC> __device__ __forceinline__ void store_vec(void *out, int64_t at, int64_t left, int32_t dtype, const float (&x)[VEC])
{
    const bool bf16 = dtype == PERI_BF16;
    char *p = (char *)out + at * (dtype == PERI_F32 ? 4 : 2);
    if (left >= VEC && peri_aligned16(p) && dtype == PERI_F32) {
        PERI_UNROLL
        for (int c = 0; c < VEC; c += 4) ((float4 *)p)[c / 4] = make_float4(x[c], x[c + 1], x[c + 2], x[c + 3]);
    } else if (left >= VEC && ((uintptr_t)p & (2 * VEC - 1) & 15) == 0 && dtype != PERI_F32) {
        unsigned word[VEC / 2];
        PERI_UNROLL
        for (int c = 0; c < VEC / 2; c++) word[c] = half_of(x[2 * c], bf16) | half_of(x[2 * c + 1], bf16) << 16;
        if (VEC == 4) *(uint2 *)p = make_uint2(word[0], word[1]);
        PERI_UNROLL
        for (int c = 0; c + 4 <= VEC / 2; c += 4) ((uint4 *)p)[c / 4] = make_uint4(word[c], word[c + 1], word[c + 2], word[c + 3]);
    } else {
        PERI_UNROLL
        for (int c = 0; c < VEC; c++)
            if (c < left) tbe_store(out, at + c, x[c], dtype);
    }
}

/* -- a bag ----------------------------------------------------------------------------------------------------------------------------- */

template <class R, int LANES> struct forward_bag {
    enum { ROWS = (int)R::ROWS < LANES ? (int)R::ROWS : LANES }; /* in flight: lanes hand out no more ids than they are */
    peri_k_tbe_forward_args a;

    /** acc += weight * row, of this lane's columns. */
    __device__ static __forceinline__ void add(const R &row, float weight, float (&acc)[R::VEC])
    {
        PERI_UNROLL
        for (int c = 0; c < R::VEC; c++) acc[c] = fmaf(weight, row.at(c), acc[c]);
    }

    /** The same, number by number. */
    __device__ static void add_slowly(const char *row, int64_t cols, int64_t d, float weight, float (&acc)[R::VEC])
    {
        PERI_UNROLL
        for (int c = 0; c < R::VEC; c++)
            if (d + c < cols) acc[c] = fmaf(weight, tbe_value(row, cols, d + c, R::FORMAT), acc[c]);
    }

    __device__ static void store(const peri_k_tbe_forward_args &a, int64_t at, int64_t left, float factor, float (&acc)[R::VEC])
    {
        PERI_UNROLL
        for (int c = 0; c < R::VEC; c++) acc[c] *= factor;
        store_vec<R::VEC>(a.out, at, left, a.out_dtype, acc);
    }

    /** The row of the output of one id; the sums begin again. */
    __device__ void give(const peri_k_tbe_block *b, int64_t i, int64_t d, int64_t left, float factor, float (&acc)[R::VEC]) const
    {
        store(a, b->out_offset + i * b->out_stride + d, left, factor, acc);
        PERI_UNROLL
        for (int c = 0; c < R::VEC; c++) acc[c] = 0;
    }

    /** Columns from @d of ids [first, past), of table @t of block @b. */
    __device__ void strip(const peri_k_tbe_block *b, const peri_k_tbe_table *t, int64_t j, int64_t first, int64_t past, int64_t d,
                          float factor, bool fast, int lane, unsigned mask) const
    {
        const peri_k_tbe_list *s = &a.list;
        const int64_t unit = tbe_unit(R::FORMAT), cols = t->cols, left = cols - d, stride = t->stride * unit, rows = t->rows;
        const char *base = (const char *)a.weight + t->offset * unit;
        const bool single = t->pooling == PERI_POOLING_NONE;
        float acc[R::VEC] = {};
        for (int64_t from = first; from < past; from += LANES) {
            const int n = (int)(past - from < LANES ? past - from : LANES);
            int64_t own = -1;
            float own_weight = 1;
            if (lane < n) {
                own = tbe_id(s, from + lane);
                if (own >= rows) own = -1;
                if (s->weights) own_weight = s->weights[from + lane];
            }
            for (int i = 0; fast && i < n; i += ROWS) {
                R row[ROWS] = {}; /* not loaded: 0 in so many words, or the compiler moves what was loaded, and waits for it */
                int64_t id[ROWS];
                PERI_UNROLL
                for (int r = 0; r < ROWS; r++) id[r] = __shfl_sync(mask, own, i + r, LANES);
                PERI_UNROLL
                for (int r = 0; r < ROWS; r++)
                    if (id[r] >= 0 && left > 0) row[r].load(base + id[r] * stride, cols, d, left);
                PERI_UNROLL
                for (int r = 0; r < ROWS; r++) {
                    const float weight = __shfl_sync(mask, own_weight, i + r, LANES);
                    if (id[r] >= 0 && left > 0) add(row[r], weight, acc);
                    if (single && i + r < n) give(b, from + i + r, d, left, factor, acc);
                }
            }
            for (int i = 0; !fast && i < n; i++) {
                const int64_t id = __shfl_sync(mask, own, i, LANES);
                const float weight = __shfl_sync(mask, own_weight, i, LANES);
                if (id >= 0 && left > 0) add_slowly(base + id * stride, cols, d, weight, acc);
                if (single) give(b, from + i, d, left, factor, acc);
            }
        }
        if (!single) store(a, b->out_offset + tbe_out_row(t, tbe_places(s, b), j, first) * b->out_stride + d, left, factor, acc);
    }

    __device__ void operator()(int64_t k, int64_t j, int lane, unsigned mask) const
    {
        const peri_k_tbe_list *s = &a.list;
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        const int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1), unit = tbe_unit(R::FORMAT);
        const float factor = tbe_factor(s, t, b->first_bag + j, past - first);
        const bool fast = t->cols % R::MULTIPLE == 0 && ((uintptr_t)((const char *)a.weight + t->offset * unit) % R::ALIGN) == 0 &&
                          t->stride * unit % R::ALIGN == 0;
        if (a.report) peri_tbe_check_bag<LANES>(s, a.report, k, j, first, past, t->rows, lane);
        for (int64_t d = lane * R::VEC; d - lane * R::VEC < t->cols; d += LANES * R::VEC)
            strip(b, t, j, first, past, d, factor, fast, lane, mask);
    }
};

template <class R> cudaError_t forward(const peri_k_tbe_forward_args *a, const peri_cuda_call *c)
{
    if (a->list.width <= 4 * R::VEC) return peri_each_bag<4>(&a->list, c, forward_bag<R, 4>{*a});
    if (a->list.width <= 8 * R::VEC) return peri_each_bag<8>(&a->list, c, forward_bag<R, 8>{*a});
    if (a->list.width <= 16 * R::VEC) return peri_each_bag<16>(&a->list, c, forward_bag<R, 16>{*a});
    return peri_each_bag<32>(&a->list, c, forward_bag<R, 32>{*a});
}

} // namespace

PERI_CUDA_SCRATCH(tbe_forward) { return (void)a, 0; }
PERI_CUDA_OP(tbe_forward)
{
    switch (a->weight_dtype) {
    case PERI_F32: return forward<row_f32>(a, c);
    case PERI_F16: return forward<row_half<PERI_F16>>(a, c);
    case PERI_BF16: return forward<row_half<PERI_BF16>>(a, c);
    case PERI_ROWS_INT8: return forward<row_codes<PERI_ROWS_INT8>>(a, c);
    case PERI_ROWS_INT8_HALF: return forward<row_codes<PERI_ROWS_INT8_HALF>>(a, c);
    case PERI_ROWS_FP8: return forward<row_codes<PERI_ROWS_FP8>>(a, c);
    case PERI_ROWS_INT4: return forward<row_codes<PERI_ROWS_INT4>>(a, c);
    case PERI_ROWS_INT2: return forward<row_codes<PERI_ROWS_INT2>>(a, c);
    default: return cudaErrorInvalidValue;
    }
}
