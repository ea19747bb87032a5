/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.cu: kernels/tbe.h: pooled lookups.
 *
 * A group of lanes has a bag: as many lanes as a row has vectors of 16 bytes (rows of bytes: of 4 or 8, for they have no alignment). Each
 * lane reads one id of the bag and works out where its row lies. The lanes then go through these rows together, ROWS at a time: a shuffle
 * tells all lanes where a row lies, each loads its own columns of it, and only when all ROWS loads are under way is the first one added.
 * Each lane keeps the sums of its columns in registers, and adds in the order of the ids.
 *
 * Registers decide how many warps are resident, and so how many rows are under way on a multiprocessor: hence the launch bounds, and the
 * strips' habit of reading again what they need once a bag.
 */
#include "tbe.cuh"

namespace {

/* -- formats -------------------------------------------------------------------------------------------------------------------------- */

/* Each has: VEC, the columns that a lane has of a row; MULTIPLE and ALIGN: a row is `fast` if its columns are a multiple of the one and its
 * address one of the other; ROWS in flight; HEAD: bytes in front of the columns; `load` of a lane's columns at @p, and their `values`. */

struct row_f32 {
    enum { FORMAT = PERI_F32, VEC = 4, MULTIPLE = 4, ALIGN = 16, ROWS = 8, HEAD = 0, CODES = 0 };
    float4 raw;
    __device__ __forceinline__ void load(const char *p, bool, bool) { raw = *(const float4 *)p; }
    __device__ __forceinline__ void values(float, float, float (&x)[VEC]) const { x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w; }
};

template <int32_t DTYPE> struct row_half {
    enum { FORMAT = DTYPE, VEC = 8, MULTIPLE = 8, ALIGN = 16, ROWS = 8, HEAD = 0, CODES = 0 };
    uint4 raw;
    __device__ __forceinline__ void load(const char *p, bool, bool) { raw = *(const uint4 *)p; }
    __device__ __forceinline__ void values(float, float, float (&x)[VEC]) const
    {
        const unsigned word[VEC / 2] = {raw.x, raw.y, raw.z, raw.w};
        PERI_UNROLL
        for (int c = 0; c < VEC; c++) x[c] = peri_half_float(word[c / 2] >> 16 * (c % 2) & 0xffffu, DTYPE == PERI_BF16);
    }
};

/** Rows of codes of BITS bits: a lane has 32 bits of them, of 8-bit codes 64. */
template <int32_t CODES_> struct row_codes {
    enum {
        FORMAT = CODES_, BITS = CODES_ == PERI_ROWS_INT4 ? 4 : CODES_ == PERI_ROWS_INT2 ? 2 : 8, MULTIPLE = 32 / BITS, ALIGN = 4,
        WORDS = BITS == 8 ? 2 : 1, VEC = WORDS * MULTIPLE, ROWS = BITS == 2 ? 4 : 8,
        HEAD = CODES_ == PERI_ROWS_INT8 || CODES_ == PERI_ROWS_FP8 ? 0 : 4, CODES = CODES_ != PERI_ROWS_FP8
    };
    unsigned raw[WORDS];
    /** @pair: p is a multiple of 8. Else, @second: there are columns in the second word. */
    __device__ __forceinline__ void load(const char *p, bool pair, bool second)
    {
        if (WORDS == 2 && pair) {
            const uint2 both = *(const uint2 *)p;
            raw[0] = both.x, raw[WORDS - 1] = both.y;
        } else {
            raw[0] = *(const unsigned *)p;
            if (WORDS == 2) raw[WORDS - 1] = second ? *(const unsigned *)(p + 4) : 0;
        }
    }
    /** Code @c of a word as a float, exactly. Its bits become the last ones of a mantissa where they lie (or 16 below): the float whose
     *  other mantissa bits are 0, and whose exponent gives the lowest of them the value 1, is subtracted. */
    __device__ static __forceinline__ float code(unsigned word, int c)
    {
        const int high = BITS * c + BITS > 23 ? 16 : 0, bit = BITS * c - high;
        const unsigned zero = (unsigned)(150 - bit) << 23;
        return k_float((word >> high & ((1u << BITS) - 1) << bit) | zero) - k_float(zero);
    }
    /** An 8-bit float moves its exponent and mantissa to where f32 has them; 2^120 makes up for the biases, also of subnormal numbers. */
    __device__ static __forceinline__ float fp8(unsigned code) { return k_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f; }
    __device__ __forceinline__ void values(float scale, float bias, float (&x)[VEC]) const
    {
        PERI_UNROLL
        for (int c = 0; c < VEC; c++) {
            const unsigned word = raw[c / MULTIPLE];
            x[c] = CODES_ == PERI_ROWS_FP8 ? fp8(word >> BITS * (c % MULTIPLE)) : fmaf(code(word, c % MULTIPLE), scale, bias);
        }
    }
};

/** Elements [at, at + VEC) of the output, the first @left of them. */
template <int VEC> __device__ __forceinline__ void store_vec(void *out, int64_t at, int left, int32_t dtype, const float (&x)[VEC])
{
    const bool bf16 = dtype == PERI_BF16;
    char *p = (char *)out + at * (dtype == PERI_F32 ? 4 : 2);
    if (left >= VEC && peri_aligned16(p) && dtype == PERI_F32) {
        PERI_UNROLL
        for (int c = 0; c < VEC; c += 4) ((float4 *)p)[c / 4] = make_float4(x[c], x[c + 1], x[c + 2], x[c + 3]);
    } else if (left >= VEC && ((uintptr_t)p & (2 * VEC - 1) & 15) == 0 && dtype != PERI_F32) {
        unsigned word[VEC / 2];
        PERI_UNROLL
        for (int c = 0; c < VEC / 2; c++) word[c] = bf16 ? peri_bf16::pair(x[2 * c], x[2 * c + 1]) : peri_f16::pair(x[2 * c], x[2 * c + 1]);
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

/** Scale and bias of the codes of a row, as they lie in it. */
template <int32_t FORMAT> struct row_scale {
    uint32_t raw[FORMAT == PERI_ROWS_INT8 ? 2 : 1];
    __device__ __forceinline__ void load(const char *row, int cols)
    {
        const uint32_t *p = (const uint32_t *)(FORMAT == PERI_ROWS_INT8 ? row + cols : row);
        raw[0] = p[0];
        if (FORMAT == PERI_ROWS_INT8) raw[FORMAT == PERI_ROWS_INT8] = p[1];
    }
    /** Those of the row of lane @from. */
    __device__ __forceinline__ void get(unsigned mask, int from, int lanes, float *scale, float *bias) const
    {
        const uint32_t first = __shfl_sync(mask, raw[0], from, lanes);
        if (FORMAT == PERI_ROWS_INT8) {
            *scale = k_float(first), *bias = k_float(__shfl_sync(mask, raw[FORMAT == PERI_ROWS_INT8], from, lanes));
        } else {
            *scale = k_f16_to_f32((uint16_t)first), *bias = k_f16_to_f32((uint16_t)(first >> 16));
        }
    }
};

template <class R, int LANES> struct forward_bag {
    peri_k_tbe_forward_args a;

    /** Columns [d, d + VEC) of bag @j of block @k. SINGLE: each id is a bag. ROWS: in flight. */
    template <bool SINGLE, int ROWS>
    __device__ __forceinline__ void strip(int k, int64_t j, int d, float factor, bool fast, int lane, unsigned mask) const
    {
        const peri_k_tbe_list *s = &a.list;
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        const char *weight = (const char *)a.weight;
        const int bits = tbe_bits(R::FORMAT), cols = (int)t->cols, left = cols - d;
        const int column = R::HEAD + (left > 0 ? d : 0) * bits / 8; /* lanes without columns load the first ones */
        const bool pair = R::VEC * bits == 64 && R::HEAD == 0 && (((uintptr_t)weight | t->offset | t->stride | cols) & 7) == 0;
        float acc[R::VEC] = {};
        int64_t from = tbe_bag_start(s, k, j);
        const int64_t past = tbe_bag_start(s, k, j + 1);
        int64_t next = from + lane < past ? tbe_id(s, from + lane) : -1;
        PERI_ROLLED
        for (; from < past; from += LANES) {
            const int n = (int)(past - from < LANES ? past - from : LANES);
            const int64_t own = next >= 0 && next < t->rows ? (t->offset + next * t->stride) * tbe_unit(R::FORMAT) : -1;
            next = lane + LANES < past - from ? tbe_id(s, from + LANES + lane) : -1;
            const float own_weight = s->weights && lane < n ? s->weights[from + lane] : 1;
            row_scale<R::FORMAT> own_scale = {};
            if (R::CODES && fast && own >= 0) own_scale.load(weight + own, cols);
            PERI_ROLLED
            for (int i = 0; fast && i < n; i += ROWS) {
                R row[ROWS] = {}; /* not loaded: 0 in so many words, or the compiler moves what was loaded, and waits for it */
                int64_t at[ROWS];
                PERI_UNROLL
                for (int r = 0; r < ROWS; r++) at[r] = __shfl_sync(mask, own, i + r, LANES);
                PERI_UNROLL
                for (int r = 0; r < ROWS; r++)
                    if (at[r] >= 0) row[r].load(weight + (at[r] + column), pair, left > R::MULTIPLE);
                PERI_UNROLL
                for (int r = 0; r < ROWS; r++) {
                    float x[R::VEC], scale = 1, bias = 0;
                    if (R::CODES) own_scale.get(mask, i + r, LANES, &scale, &bias);
                    const float by = s->weights ? __shfl_sync(mask, own_weight, i + r, LANES) : 1;
                    if (at[r] >= 0) {
                        row[r].values(scale, bias, x);
                        PERI_UNROLL
                        for (int c = 0; c < R::VEC; c++) acc[c] = fmaf(by, x[c], acc[c]);
                    }
                    if (SINGLE && i + r < n) give(b, from + i + r, d, left, factor, acc);
                }
            }
            PERI_ROLLED
            for (int i = 0; !fast && i < n; i++) { /* number by number */
                const int64_t at = __shfl_sync(mask, own, i, LANES);
                const float by = __shfl_sync(mask, own_weight, i, LANES);
                PERI_UNROLL
                for (int c = 0; c < R::VEC; c++)
                    if (at >= 0 && d + c < cols) acc[c] = fmaf(by, tbe_value(weight + at, cols, d + c, R::FORMAT), acc[c]);
                if (SINGLE) give(b, from + i, d, left, factor, acc);
            }
        }
        if (SINGLE) return;
        const int32_t *places = tbe_places(s, b);
        give(b, places ? places[j] : j, d, left, factor, acc);
    }

    /** Row @i of the block's output; the sums begin again. */
    __device__ __forceinline__ void give(const peri_k_tbe_block *b, int64_t i, int d, int left, float factor, float (&acc)[R::VEC]) const
    {
        float x[R::VEC];
        PERI_UNROLL
        for (int c = 0; c < R::VEC; c++) x[c] = acc[c] * factor, acc[c] = 0;
        store_vec<R::VEC>(a.out, b->out_offset + i * b->out_stride + d, left, a.out_dtype, x);
    }

    __device__ __forceinline__ void operator()(int k, int64_t j, int lane, unsigned mask) const
    {
        const peri_k_tbe_list *s = &a.list;
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        const int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1), unit = tbe_unit(R::FORMAT);
        const float factor = tbe_factor(s, t, b->first_bag + j, past - first);
        const bool fast = t->cols % R::MULTIPLE == 0 && ((uintptr_t)((const char *)a.weight + t->offset * unit) % R::ALIGN) == 0 &&
                          t->stride * unit % R::ALIGN == 0;
        if (a.report) peri_tbe_check_bag<LANES>(s, a.report, k, j, first, past, t->rows, lane);
        const int cols = (int)t->cols, pooling = t->pooling;
        PERI_ROLLED
        for (int d = lane * R::VEC; d - lane * R::VEC < cols; d += LANES * R::VEC) {
            if (pooling == PERI_POOLING_NONE) strip<true, 2>(k, j, d, factor, fast, lane, mask);
            else strip<false, (int)R::ROWS < LANES ? (int)R::ROWS : LANES>(k, j, d, factor, fast, lane, mask);
        }
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
