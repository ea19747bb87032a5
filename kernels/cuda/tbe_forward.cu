/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_forward.cu: kernels/tbe.h: pooled lookups.
 *
 * A group of lanes has a bag: as many lanes as a row has vectors of 16 bytes (rows of codes: of 16 columns). Each
 * lane reads one id of the bag and works out where its row lies. The lanes then go through these rows together, ROWS at
 * a time: a shuffle tells all lanes where a row lies, each loads its own columns of it, and only when all ROWS loads
 * are under way is the first one added. Each lane keeps the sums of its columns in registers, and adds in the order of
 * the ids.
 *
 * Three loads depend on each other: offsets of a bag, its ids, its rows. So a group has several bags, one after the
 * other, and loads the ids of the next one, and the offsets of the one after it, while it adds up the rows of this one.
 * Rows wider than a group's lanes are several strips of columns, each as if it were a bag of its own.
 *
 * Registers decide how many warps are resident, and so how many rows are under way on a multiprocessor: hence the
 * launch bounds, and hence numbers of a table or block are read again where they are needed, once a bag, instead of
 * being kept.
 */
#include "tbe.cuh"

/** On 8.0 the compiler takes more registers, and would spill. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PERI_LOOKUP_FEWER 1
#else
#define PERI_LOOKUP_FEWER 0
#endif

namespace {

/* -- formats ------------------------------------------------------------------------------------------------------- */

/* Each has: VEC, the columns that a lane has of a row; MULTIPLE and ALIGN: a row is `fast` if its columns are a
 * multiple of the one and its address one of the other; ROWS in flight; HEAD: bytes in front of the columns; BLOCKS
 * that are resident on a multiprocessor, by which registers are handed out (4: 64 a thread, 3: 80); WAVES: how many of
 * them a multiprocessor gets in turn, at most; `load` of a lane's columns at @p, and their `values`. */

struct row_f32 {
    enum {
        FORMAT = PERI_F32,
        VEC = 4,
        MULTIPLE = 4,
        ALIGN = 16,
        ROWS = 4,
        BLOCKS = 4,
        WAVES = 16,
        HEAD = 0,
        CODES = 0,
        PAIR = 0,
        LEAVES = 1
    };
    float4 raw;
    __device__ __forceinline__ void load(const char *p, int, bool, bool leave_soon)
    {
        raw = leave_soon ? __ldcs((const float4 *)p) : *(const float4 *)p;
    }
    __device__ __forceinline__ void values(float, float, unsigned, float (&x)[VEC]) const
    {
        x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
    }
};

template <int32_t DTYPE> struct row_half {
    enum {
        FORMAT = DTYPE,
        VEC = 8,
        MULTIPLE = 8,
        ALIGN = 16,
        ROWS = 4,
        BLOCKS = 4,
        WAVES = 16,
        HEAD = 0,
        CODES = 0,
        PAIR = 0,
        LEAVES = 1
    };
    uint4 raw;
    __device__ __forceinline__ void load(const char *p, int, bool, bool leave_soon)
    {
        raw = leave_soon ? __ldcs((const uint4 *)p) : *(const uint4 *)p;
    }
    __device__ __forceinline__ void values(float, float, unsigned, float (&x)[VEC]) const
    {
        const unsigned word[VEC / 2] = {raw.x, raw.y, raw.z, raw.w};
        PERI_UNROLL
        for (int c = 0; c < VEC; c++) x[c] = peri_half_float(word[c / 2] >> 16 * (c % 2) & 0xffffu, DTYPE == PERI_BF16);
    }
};

/** Rows of codes of BITS bits: a lane has 16 of them. */
template <int32_t CODES_> struct row_codes {
    enum {
        FORMAT = CODES_,
        BITS = CODES_ == PERI_ROWS_INT4   ? 4
               : CODES_ == PERI_ROWS_INT2 ? 2
                                          : 8,
        MULTIPLE = 32 / BITS,
        ALIGN = 4,
        WORDS = BITS / 2,
        VEC = 16,
        ROWS = BITS == 4 ? 8 : 4, /* a row of int4 is few bytes: more of them */
        BLOCKS = BITS == 2 ? 4 : 3,
        WAVES = 2, /* bound by instructions, of which a block that begins has some */
        HEAD = CODES_ == PERI_ROWS_INT8 || CODES_ == PERI_ROWS_FP8 ? 0 : 4,
        CODES = CODES_ != PERI_ROWS_FP8,
        PAIR = BITS == 8 && HEAD == 0 ? 1 : 0,
        LEAVES = 0
    };
    unsigned raw[WORDS];
    /** @left: columns that the row has from @p on. @pair: p is a multiple of 8, and so are these columns. */
    __device__ __forceinline__ void load(const char *p, int left, bool pair, bool)
    {
        PERI_UNROLL
        for (int w = 0; w < WORDS; w += 2) {
            if (PAIR && pair) {
                const uint2 both = w == 0 || left > w * MULTIPLE ? *(const uint2 *)(p + 4 * w) : make_uint2(0, 0);
                raw[w] = both.x, raw[w + PAIR] = both.y;
            } else {
                raw[w] = w == 0 || left > w * MULTIPLE ? *(const unsigned *)(p + 4 * w) : 0;
                if (WORDS > 1)
                    raw[w + (WORDS > 1)] = left > (w + 1) * MULTIPLE ? *(const unsigned *)(p + 4 * w + 4) : 0;
            }
        }
    }
    /** Code @c as a float, exactly: its byte becomes the last one of the mantissa of 2^23, which is subtracted. Codes
     *  of fewer bits become bytes first, those of one place in all bytes of a word at once. @two_to_23: the bits of
     *  2^23, which the kernel gets as an argument: of a constant the compiler makes the operand that the selector could
     *  be, and puts selectors into registers, one a code. */
    __device__ __forceinline__ float code(int c, unsigned two_to_23) const
    {
        const int place = BITS * c % 8, byte = BITS * c % 32 / 8;
        const unsigned bytes =
            BITS == 8 ? raw[c / MULTIPLE] : raw[c / MULTIPLE] >> place & 0x01010101u * ((1u << BITS) - 1);
        return k_float(__byte_perm(bytes, two_to_23, 0x7440u | (unsigned)byte)) - 0x1p23f;
    }
    /** An 8-bit float moves its exponent and mantissa to where f32 has them; 2^120 makes up for the biases, also of
     *  subnormal numbers. */
    __device__ static __forceinline__ float fp8(unsigned code)
    {
        return k_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;
    }
    __device__ __forceinline__ void values(float scale, float bias, unsigned two_to_23, float (&x)[VEC]) const
    {
        PERI_UNROLL
        for (int c = 0; c < VEC; c++) {
            x[c] = CODES_ == PERI_ROWS_FP8 ? fp8(raw[c / MULTIPLE] >> BITS * (c % MULTIPLE))
                                           : fmaf(code(c, two_to_23), scale, bias);
        }
    }
};

/** Elements [at, at + VEC) of the output, the first @left of them. */
template <int VEC>
__device__ __forceinline__ void store_vec(void *out, int64_t at, int left, int32_t dtype, const float (&x)[VEC])
{
    const bool bf16 = dtype == PERI_BF16;
    char *p = (char *)out + at * (dtype == PERI_F32 ? 4 : 2);
    if (left >= VEC && peri_aligned16(p) && dtype == PERI_F32) {
        PERI_UNROLL
        for (int c = 0; c < VEC; c += 4) ((float4 *)p)[c / 4] = make_float4(x[c], x[c + 1], x[c + 2], x[c + 3]);
    } else if (left >= VEC && ((uintptr_t)p & (2 * VEC - 1) & 15) == 0 && dtype != PERI_F32) {
        unsigned word[VEC / 2];
        PERI_UNROLL
        for (int c = 0; c < VEC / 2; c++)
            word[c] = bf16 ? peri_bf16::pair(x[2 * c], x[2 * c + 1]) : peri_f16::pair(x[2 * c], x[2 * c + 1]);
        if (VEC == 4) *(uint2 *)p = make_uint2(word[0], word[1]);
        PERI_UNROLL
        for (int c = 0; c + 4 <= VEC / 2; c += 4)
            ((uint4 *)p)[c / 4] = make_uint4(word[c], word[c + 1], word[c + 2], word[c + 3]);
    } else {
        PERI_UNROLL
        for (int c = 0; c < VEC; c++)
            if (c < left) tbe_store(out, at + c, x[c], dtype);
    }
}

/* -- bags ---------------------------------------------------------------------------------------------------------- */

/** Scale and bias of the codes of a row, as they lie in it. */
template <int32_t FORMAT> struct row_scale {
    enum { BIAS = FORMAT == PERI_ROWS_INT8 };
    uint32_t raw[BIAS + 1];
    /** @pair: the end of the codes is a multiple of 8. */
    __device__ __forceinline__ void load(const char *row, int cols, bool pair)
    {
        const uint32_t *p = (const uint32_t *)(FORMAT == PERI_ROWS_INT8 ? row + cols : row);
        if (BIAS && pair) {
            const uint2 both = *(const uint2 *)p;
            raw[0] = both.x, raw[BIAS] = both.y;
        } else {
            raw[0] = p[0];
            if (BIAS) raw[BIAS] = p[1];
        }
    }
    /** Those of the row of lane @from. */
    __device__ __forceinline__ void get(unsigned mask, int from, int lanes, float *scale, float *bias) const
    {
        const uint32_t first = __shfl_sync(mask, raw[0], from, lanes);
        *scale = BIAS ? k_float(first) : k_f16_to_f32((uint16_t)first);
        *bias = BIAS ? k_float(__shfl_sync(mask, raw[BIAS], from, lanes)) : k_f16_to_f32((uint16_t)(first >> 16));
    }
};

/** The largest @x of the groups of LANES lanes of a warp, each of which has one. */
template <int LANES> __device__ __forceinline__ int most_of_groups(int x)
{
    PERI_UNROLL
    for (int by = LANES; by < 32; by *= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, x, by);
        x = other > x ? other : x;
    }
    return x;
}

/** Where the ids of a bag lie. */
struct bag_ids {
    int64_t first;
    int count;
};

/** A group of lanes at work on block @k. */
template <class R, int LANES> struct group {
    enum : unsigned { ALL = 0xffffffffu };
    enum { ROWS = (int)R::ROWS < LANES ? (int)R::ROWS : LANES, STRIP = LANES * R::VEC };
    const peri_k_tbe_forward_args &a;
    const peri_k_tbe_block *b;
    const peri_k_tbe_table *t;
    int k, lane;
    unsigned mask;
    bool leave_soon; /* rows are the first to leave the caches, of formats that ask (LEAVES) */
    unsigned two_to_23;

    /** The ids of bag @j, if there is one. */
    __device__ __forceinline__ bag_ids bag(int64_t j) const
    {
        bag_ids x = {0, 0};
        if (j >= b->bags) return x;
        x.first = tbe_bag_start(&a.list, k, j);
        x.count = (int)(tbe_bag_start(&a.list, k, j + 1) - x.first);
        return x;
    }
    /** This lane's id of those from @from on; -1: it has none. */
    __device__ __forceinline__ int64_t id_of(const bag_ids &x, int from) const
    {
        return lane < x.count - from ? tbe_id(&a.list, x.first + from + lane) : -1;
    }
    /** Where in the weights the row of @id begins, in bytes; -1: there is none. */
    __device__ __forceinline__ int64_t row_of(int64_t id) const
    {
        return id >= 0 && id < t->rows ? (t->offset + id * t->stride) * tbe_unit(R::FORMAT) : -1;
    }
    __device__ __forceinline__ float weight_of(const bag_ids &x, int from) const
    {
        return a.list.weights && lane < x.count - from ? a.list.weights[x.first + from + lane] : 1;
    }

    __device__ __forceinline__ void report_bag(int64_t j) const
    {
        tbe_count count = {0, 0, 0, 0};
        tbe_count_bag(&a.list, k, j, &count);
        peri_tbe_merge(a.report, count);
    }
    /** @id: the lane's of bag @x from @from on. */
    __device__ __forceinline__ void report_id(const bag_ids &x, int from, int64_t id) const
    {
        tbe_count count = {0, 0, 0, 0};
        tbe_count_id(&a.list, k, x.first + from + lane, id, &count);
        peri_tbe_merge(a.report, count);
    }
    __device__ __forceinline__ bool bad(int64_t id) const { return id != -1 && (id < 0 || id >= t->rows); }

    /** Columns [d, d + VEC) of row @i of the block's output; the sums begin again. */
    __device__ __forceinline__ void give(int64_t i, int d, float factor, float (&acc)[R::VEC]) const
    {
        float x[R::VEC];
        PERI_UNROLL
        for (int c = 0; c < R::VEC; c++) x[c] = acc[c] * factor, acc[c] = 0;
        store_vec<R::VEC>(a.out, b->out_offset + i * b->out_stride + d, (int)t->cols - d, a.out_dtype, x);
    }
    __device__ __forceinline__ float factor_of(int64_t j, const bag_ids &x) const
    {
        return tbe_factor(&a.list, t, b->first_bag + j, x.count);
    }
    __device__ __forceinline__ int64_t place_of(int64_t j) const
    {
        const int32_t *places = tbe_places(&a.list, b);
        return places ? places[j] : j;
    }

    __device__ __forceinline__ bool lies_well() const
    {
        const int64_t unit = tbe_unit(R::FORMAT);
        return t->cols % R::MULTIPLE == 0 && ((uintptr_t)((const char *)a.weight + t->offset * unit) % R::ALIGN) == 0 &&
               t->stride * unit % R::ALIGN == 0;
    }
    /** Codes of 8 bits: whether a lane's two words, and scale and bias, lie at multiples of 8. */
    __device__ __forceinline__ bool lies_in_pairs() const
    {
        return R::PAIR &&
               (((uintptr_t)a.weight | (uintptr_t)t->offset | (uintptr_t)t->stride | (uintptr_t)t->cols) & 7) == 0;
    }

    /** N rows on their way: of lanes @i to i + N, whose rows begin at their @own. */
    template <int N> struct rows_of {
        R raw[N];
        int64_t at[N];
        __device__ __forceinline__ void load(const group &g, unsigned mask, int64_t own, int i, int d, bool pair)
        {
            const int cols = (int)g.t->cols, mine = d < cols ? d : 0; /* lanes without columns load the first ones */
            const int column = R::HEAD + mine * tbe_bits(R::FORMAT) / 8;
            const char *weight = (const char *)g.a.weight;
            PERI_UNROLL
            for (int r = 0; r < N; r++) at[r] = __shfl_sync(mask, own, i + r, LANES);
            PERI_UNROLL
            /* not loaded: 0 in so many words, or the compiler moves what was, and waits for it */
            for (int r = 0; r < N; r++) raw[r] = R{};
            /* loops of their own for what is the same for all rows: no branches between the loads */
            if (R::LEAVES && g.leave_soon) {
                PERI_UNROLL
                for (int r = 0; r < N; r++)
                    if (at[r] >= 0) raw[r].load(weight + (at[r] + column), cols - mine, false, true);
            } else if (R::PAIR && pair) {
                PERI_UNROLL
                for (int r = 0; r < N; r++)
                    if (at[r] >= 0) raw[r].load(weight + (at[r] + column), cols - mine, true, false);
            } else {
                PERI_UNROLL
                for (int r = 0; r < N; r++)
                    if (at[r] >= 0) raw[r].load(weight + (at[r] + column), cols - mine, false, false);
            }
        }
        /** acc += row r, times its lane's @weight. A row that is not there is added without a branch: its numbers,
         *  scale and bias are 0, and 0 times -0 leaves any sum as it is. */
        __device__ __forceinline__ void add(const group &g, unsigned mask, int r, float weight,
                                            const row_scale<R::FORMAT> &own, int i, float (&acc)[R::VEC]) const
        {
            float x[R::VEC], scale = 1, bias = 0;
            if (R::CODES) own.get(mask, i + r, LANES, &scale, &bias);
            const float given = __shfl_sync(mask, weight, i + r, LANES);
            const float by = at[r] < 0 ? -0.0f : given;
            raw[r].values(scale, bias, g.two_to_23, x);
            PERI_UNROLL
            for (int c = 0; c < R::VEC; c++) acc[c] = fmaf(by, x[c], acc[c]);
        }
    };

    /** Well-lying rows, summed. @item: the first of this group's, which are @step apart: strips of bags. The groups of
     *  a warp go through as many rows as the longest of their bags has: shuffles of whole warps need no check of who is
     *  there. */
    __device__ __forceinline__ void pooled(int item, int step) const
    {
        const int strips = ((int)t->cols + STRIP - 1) / STRIP, group_of_warp = (int)(threadIdx.x & 31) / LANES;
        const bool pair = lies_in_pairs();
        const auto bag_at = [&](int item) {
            const int j = strips > 1 ? item / strips : item;
            if (a.report && lane == 0 && j < b->bags && j * strips == item) report_bag(j);
            return bag(j);
        };
        bag_ids x = bag_at(item);
        int64_t id = id_of(x, 0);
        for (; item - group_of_warp < b->bags * strips; item += step) {
            const bag_ids after = bag_at(item + step);
            const int d = (strips > 1 ? item % strips * STRIP : 0) + lane * R::VEC,
                      longest = most_of_groups<LANES>(x.count);
            float acc[R::VEC] = {};
            int from = 0;
            do { /* once also for empty bags: the ids of the next ones are loaded here */
                if (a.report && bad(id) && d < STRIP) report_id(x, from, id);
                const int64_t own = row_of(id);
                id = from + LANES < longest ? id_of(x, from + LANES) : id_of(after, 0);
                const float weight = weight_of(x, from);
                row_scale<R::FORMAT> scale = {};
                if (R::CODES && own >= 0) scale.load((const char *)a.weight + own, (int)t->cols, pair);
                const int n = longest - from < LANES ? longest - from : LANES;
                PERI_ROLLED
                for (int i = 0; i < n; i += ROWS) {
                    rows_of<ROWS> rows;
                    rows.load(*this, ALL, own, i, d, pair);
                    PERI_UNROLL
                    for (int r = 0; r < ROWS; r++) rows.add(*this, ALL, r, weight, scale, i, acc);
                }
                from += LANES;
            } while (from < longest);
            const int j = strips > 1 ? item / strips : item;
            if (j < b->bags) give(place_of(j), d, factor_of(j, x), acc);
            x = after;
        }
    }

    /** Fast rows of bag @j, each id a bag of its own: two rows in flight. */
    __device__ __forceinline__ void single(int64_t j) const
    {
        enum { TWO = 2 };
        const bag_ids x = bag(j);
        const float factor = factor_of(j, x);
        const bool pair = lies_in_pairs();
        if (a.report && lane == 0) report_bag(j);
        PERI_ROLLED
        for (int d = lane * R::VEC; d - lane * R::VEC < (int)t->cols; d += STRIP) {
            PERI_ROLLED
            for (int from = 0; from < x.count; from += LANES) {
                const int64_t id = id_of(x, from), own = row_of(id);
                const float weight = weight_of(x, from);
                if (a.report && bad(id) && d < STRIP) report_id(x, from, id);
                row_scale<R::FORMAT> scale = {};
                if (R::CODES && own >= 0) scale.load((const char *)a.weight + own, (int)t->cols, pair);
                PERI_ROLLED
                for (int i = 0; i < LANES && from + i < x.count; i += TWO) {
                    rows_of<TWO> rows;
                    rows.load(*this, mask, own, i, d, pair);
                    PERI_UNROLL
                    for (int r = 0; r < TWO; r++) {
                        float acc[R::VEC] = {};
                        rows.add(*this, mask, r, weight, scale, i, acc);
                        if (from + i + r < x.count) give(x.first + from + i + r, d, factor, acc);
                    }
                }
            }
        }
    }

    /** Bag @j, number by number: where rows lie badly. */
    __device__ __forceinline__ void slow(int64_t j) const
    {
        const bag_ids x = bag(j);
        const float factor = factor_of(j, x);
        if (a.report && lane == 0) report_bag(j);
        PERI_ROLLED
        for (int d = lane * R::VEC; d - lane * R::VEC < (int)t->cols; d += STRIP) {
            float acc[R::VEC] = {};
            PERI_ROLLED
            for (int from = 0; from < x.count; from += LANES) {
                const int64_t id = id_of(x, from), own = row_of(id);
                const float weight = weight_of(x, from);
                if (a.report && bad(id) && d < STRIP) report_id(x, from, id);
                PERI_ROLLED
                for (int i = 0; i < LANES && from + i < x.count; i++) {
                    const int64_t at = __shfl_sync(mask, own, i, LANES);
                    const float by = __shfl_sync(mask, weight, i, LANES);
                    PERI_UNROLL
                    for (int c = 0; c < R::VEC; c++)
                        if (at >= 0 && d + c < (int)t->cols)
                            acc[c] =
                                fmaf(by, tbe_value((const char *)a.weight + at, t->cols, d + c, R::FORMAT), acc[c]);
                    if (t->pooling == PERI_POOLING_NONE) give(x.first + from + i, d, factor, acc);
                }
            }
            if (t->pooling != PERI_POOLING_NONE) give(place_of(j), d, factor, acc);
        }
    }
};

template <class R, int LANES>
__global__ void __launch_bounds__(PERI_BLOCK, R::BLOCKS - PERI_LOOKUP_FEWER)
    lookup(peri_k_tbe_forward_args a, bool leave_soon, unsigned two_to_23)
{
    const int lane = (int)(threadIdx.x % LANES);
    const unsigned mask =
        LANES == 32 ? 0xffffffffu : ((1u << (LANES & 31)) - 1) << ((threadIdx.x & 31) / LANES * LANES);
    const int first = (int)(peri_grid_thread() / LANES), step = (int)(peri_grid_threads() / LANES);
    peri_next_may_start();
    peri_wait_for_earlier();
    for (int k = (int)blockIdx.y; k < (int)a.list.n_blocks; k += (int)gridDim.y) {
        const peri_k_tbe_block *b = &a.list.blocks[k];
        const peri_k_tbe_table *t = &a.list.tables[b->table];
        const group<R, LANES> g = {a, b, t, k, lane, mask, leave_soon, two_to_23};
        if (!g.lies_well() || b->bags > INT32_MAX / 2 / (t->cols / g.STRIP + 1))
            for (int j = first; j < b->bags; j += step) g.slow(j);
        else if (t->pooling == PERI_POOLING_NONE)
            for (int j = first; j < b->bags; j += step) g.single(j);
        else g.pooled(first, step);
    }
}

/** Bytes of rows of calls that the second-level cache (50 MB on an H100) does not hold, but a good part of. Caches drop
 *  what was used the longest ago: of such a call's rows all, before the next call or the backward pass comes to them
 *  again. Of rows that may leave soon they keep some, and give up others. Calls that are larger still gain nothing, and
 *  lose 1.4 % (f32 rows, H100). */
enum { SOON_FROM = 32 << 20, SOON_TO = 256 << 20 };

/** Each group has some bags to go through, but there are enough blocks that they end at about the same time. */
template <class R, int LANES> cudaError_t launch(const peri_k_tbe_forward_args *a, const peri_cuda_call *c)
{
    const peri_k_tbe_list *s = &a->list;
    if (s->n_blocks <= 0) return cudaSuccess;
    /* places in a block and in a bag are int; a bag's go up to LANES behind its last id */
    if (s->n_ids > INT32_MAX - LANES || s->n_bags > INT32_MAX / 2) return cudaErrorInvalidValue;
    dim3 grid = peri_bags_grid<LANES>(s);
    const int64_t strips = (s->width + LANES * R::VEC - 1) / (LANES * R::VEC),
                  wanted = grid.x * (strips > 1 ? strips : 1);
    const int64_t most = (int64_t)c->processors * R::BLOCKS * R::WAVES / grid.y + 1;
    grid.x = (unsigned)(wanted < most ? wanted : most);
    const int64_t bytes = s->capacity * s->width * tbe_bits(R::FORMAT) / 8;
    return peri_cuda_launch_early(lookup<R, LANES>, grid, PERI_BLOCK, c, *a, bytes >= SOON_FROM && bytes <= SOON_TO,
                                  0x4b000000u);
}

template <class R> cudaError_t forward(const peri_k_tbe_forward_args *a, const peri_cuda_call *c)
{
    if (a->list.width <= 4 * R::VEC) return launch<R, 4>(a, c);
    if (a->list.width <= 8 * R::VEC) return launch<R, 8>(a, c);
    if (a->list.width <= 16 * R::VEC) return launch<R, 16>(a, c);
    return launch<R, 32>(a, c);
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
