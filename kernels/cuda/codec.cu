/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.cu: kernels/codec.h. Formats of single numbers: a thread has four neighbours, twice. Formats of blocks: 8 or 32
 * lanes have a block, each lane four neighbours at a time; the second pass over a block finds it in the cache.
 */
#include "quad.cuh"
#include "random.cuh"

#include "../codec.h"

namespace {

/* -- numbers on their own ------------------------------------------------------------------------------------------ */

/** f32 on the wire as 16 bits of T, of magnitude @most at most. */
template <class T> struct code16 {
    float scale, most;
    typedef T type;
    __device__ float encode(float x) const
    {
        x *= scale;
        x = x > most ? most : x;
        return x < -most ? -most : x;
    }
    __device__ float decode(float y) const { return y / scale; }
};

/** Bytes as elements of the wire: their numbers are those of the codes. */
struct byte_element {
    typedef uint8_t type;
    static __device__ __forceinline__ float load(const uint8_t *p, int64_t i) { return (float)p[i]; }
    static __device__ __forceinline__ void store(uint8_t *p, int64_t i, float x) { p[i] = (uint8_t)x; }
};

struct code8 {
    int32_t e, b;
    typedef byte_element type;
    __device__ float encode(float x) const { return (float)k_f32_to_fp8(x, e, b); }
    __device__ float decode(float code) const { return k_fp8_to_f32((uint8_t)code, e, b); }
};

/** Elements [begin + 4 q, begin + 4 q + 4), and those @apart of them: both are in flight at once. */
template <class C, bool BACK> struct code_quads {
    typedef typename C::type wires;
    typedef typename std::conditional<BACK, wires, peri_f32>::type from;
    typedef typename std::conditional<BACK, peri_f32, wires>::type to;
    C code;
    const typename from::type *src;
    typename to::type *dst;
    int64_t begin, end, apart;
    __device__ void operator()(int64_t q) const
    {
        const int64_t i = begin + 4 * q, j = i + 4 * apart;
        float4 v[2];
        peri_load_quads<from>(src, i, j, end, v);
        PERI_UNROLL
        for (int k = 0; k < 2; k++) {
            v[k] =
                BACK ? make_float4(code.decode(v[k].x), code.decode(v[k].y), code.decode(v[k].z), code.decode(v[k].w))
                     : make_float4(code.encode(v[k].x), code.encode(v[k].y), code.encode(v[k].z), code.encode(v[k].w));
            peri_store_quad<to>(dst, k ? j : i, end, v[k]);
        }
    }
};

template <bool BACK, class C>
cudaError_t code_numbers(const peri_k_codec_args *a, int64_t begin, int64_t end, const peri_cuda_call *c, C code)
{
    typedef code_quads<C, BACK> job;
    const int64_t pairs = (end - begin + 7) / 8;
    const void *src = BACK ? (const void *)a->wire : a->x;
    void *dst = BACK ? (void *)a->x : (void *)a->wire;
    return each(0, pairs, c,
                job{code, (const typename job::from::type *)src, (typename job::to::type *)dst, begin, end, pairs});
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

/** Where block @b begins, and how many numbers it has. */
__device__ int64_t block_place(const peri_k_codec_args &a, int64_t b, int64_t *count)
{
    int64_t first_block = 0, first = 0, end = a.n;
    if (a.segments) {
        int64_t low = 0, high = a.n_segments - 1; /* the last segment that begins at b or before: those without blocks
                                                     are passed over */
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (a.segments[2 * middle] <= b) low = middle;
            else high = middle - 1;
        }
        first_block = a.segments[2 * low];
        first = a.segments[2 * low + 1];
        end = a.segments[2 * low + 3];
    }
    first += (b - first_block) * a.block;
    *count = end - first < a.block ? end - first : a.block;
    return first;
}

/** What a block's numbers are like. */
struct range {
    float least, most, magnitude; /* of finite ones */
    bool finite;                  /* all are */
};

__device__ __forceinline__ void widen_range(range &r, float x, bool there)
{
    if (!there) return;
    const float magnitude = fabsf(x);
    r.least = x < r.least ? x : r.least;
    r.most = x > r.most ? x : r.most;
    r.magnitude = magnitude > r.magnitude ? magnitude : r.magnitude;
    r.finite = r.finite && x - x == 0;
}

/** Whether the first zero of a block is -0: which of them is the least. */
template <int LANES> __device__ bool first_zero_negative(const float *x, int64_t n, int lane, unsigned mask)
{
    int64_t first = INT64_MAX;
    for (int64_t i = lane; i < n && first == INT64_MAX; i += LANES)
        if (x[i] == 0) first = i;
    first = peri_group_min<LANES>(first, mask);
    return first < n && __float_as_uint(x[first]) != 0;
}

template <int LANES> __device__ range range_of(const float *x, int64_t n, int lane, unsigned mask)
{
    range r = {INFINITY, -INFINITY, 0, true};
    for (int64_t i = 4 * lane; i < n; i += 4 * LANES) {
        const float4 v = peri_load_quad<peri_f32>(x, i, n, 0);
        widen_range(r, v.x, true), widen_range(r, v.y, i + 1 < n), widen_range(r, v.z, i + 2 < n),
            widen_range(r, v.w, i + 3 < n);
    }
    r.least = peri_group_min<LANES>(r.least, mask);
    r.most = peri_group_max<LANES>(r.most, mask);
    r.magnitude = peri_group_max<LANES>(r.magnitude, mask);
    r.finite = __all_sync(mask, r.finite);
    return r;
}

struct int8_block {
    float factor, scale, least;
    __host__ __device__ static int64_t codes(int64_t block) { return block; } /* bytes of codes */
    __host__ __device__ static int64_t bytes(int64_t block) { return block + 8; }
    template <int LANES>
    __device__ bool measure(const peri_k_codec_args &, const float *x, int64_t n, int64_t, int lane, unsigned mask)
    {
        const range r = range_of<LANES>(x, n, lane, mask);
        const float first = n ? r.least : 0, width = n ? r.most - r.least : 0;
        const bool good = r.finite && width - width == 0;
        factor = 255.0f / (width + 1e-8f);
        scale = good ? width / 255.0f : NAN;
        least = good ? first : NAN;
        if (least == 0 && n) least = first_zero_negative<LANES>(x, n, lane, mask) ? -0.0f : 0.0f;
        return good;
    }
    __device__ uint32_t encode(const peri_k_codec_args &, float x) const
    {
        return (uint32_t)rintf((x - least) * factor) & 255;
    }
    __device__ void end(uint8_t *tail) const { peri_store_float(tail, scale), peri_store_float(tail + 4, least); }
    __device__ void begin(const uint8_t *tail) { scale = peri_load_float(tail), least = peri_load_float(tail + 4); }
    __device__ float decode(const peri_k_codec_args &, uint32_t code) const { return fmaf((float)code, scale, least); }
};

struct fp8_block {
    float scale;
    __host__ __device__ static int64_t codes(int64_t block) { return (block + 3) / 4 * 4; }
    __host__ __device__ static int64_t bytes(int64_t block) { return codes(block) + 8; }
    template <int LANES>
    __device__ bool measure(const peri_k_codec_args &a, const float *x, int64_t n, int64_t, int lane, unsigned mask)
    {
        const range r = range_of<LANES>(x, n, lane, mask);
        scale = r.finite ? k_fp8_largest(a.exponent_bits, a.exponent_bias) / (1e-20f + r.magnitude) : NAN;
        return r.finite;
    }
    __device__ uint32_t encode(const peri_k_codec_args &a, float x) const
    {
        return k_f32_to_fp8(x * scale, a.exponent_bits, a.exponent_bias);
    }
    __device__ void end(uint8_t *tail) const { peri_store_float(tail, scale), peri_store_float(tail + 4, 0); }
    __device__ void begin(const uint8_t *tail) { scale = peri_load_float(tail); }
    __device__ float decode(const peri_k_codec_args &a, uint32_t code) const
    {
        return k_fp8_to_f32((uint8_t)code, a.exponent_bits, a.exponent_bias) / scale;
    }
};

struct mx4_block {
    float scale;
    uint8_t shared;
    __host__ __device__ static int64_t codes(int64_t block) { return block / 2; }
    __host__ __device__ static int64_t bytes(int64_t block) { return block / 2 + 1; }
    template <int LANES>
    __device__ bool measure(const peri_k_codec_args &a, const float *x, int64_t n, int64_t b, int lane, unsigned mask)
    {
        const range r = range_of<LANES>(x, n, lane, mask);
        uint32_t u = k_bits(r.magnitude > 0 ? r.magnitude : 0x1p-126f);
        switch (a.rounding) {
        /* mantissa beyond the square root of 2 */
        case PERI_ROUND_NEAREST: u += (u & 0x7fffffu) > 0x3504f3u ? 0x800000u : 0; break;
        case PERI_ROUND_EVEN: u += 0x200000u; break;
        case PERI_ROUND_CEIL: u += (u & 0x7fffffu) ? 0x800000u : 0; break;
        case PERI_ROUND_STOCHASTIC: u += peri_random_word(a.seed, 0, (uint64_t)b) & 0x3fffffu; break;
        default: break;
        }
        int32_t e = (int32_t)(u >> 23) - 127 - 2;
        e = e < -127 ? -127 : e > 125 ? 125 : e;
        scale = k_two_to(-e);
        shared = r.finite ? (uint8_t)(e + 127) : 255;
        return r.finite;
    }
    __device__ uint32_t encode(const peri_k_codec_args &, float x) const
    {
        const float m = fabsf(x) * scale; /* from here on the next value is nearer: */
        const uint32_t code =
            (m >= 0.25f) + (m >= 0.75f) + (m >= 1.25f) + (m >= 1.75f) + (m >= 2.5f) + (m >= 3.5f) + (m >= 5);
        return code | (k_bits(x) >> 28 & 8u);
    }
    __device__ void end(uint8_t *tail) const { *tail = shared; }
    __device__ void begin(const uint8_t *tail) { scale = *tail == 255 ? NAN : k_two_to(*tail - 127); }
    __device__ float decode(const peri_k_codec_args &, uint32_t code) const
    {
        const uint32_t m = code & 7; /* two bits of exponent, one of mantissa */
        const float magnitude = (m < 2 ? 0.5f * (float)m : k_float((m << 22) + (126u << 23))) * scale;
        return code & 8 ? -magnitude : magnitude;
    }
};

/** The codes of four numbers as bytes, and back: PACK codes a byte. */
template <class F> struct packing {
    enum { PACK = std::is_same<F, mx4_block>::value ? 2 : 1, BYTES = 4 / PACK, BITS = 8 / PACK };
};

template <class F, int LANES> struct encode_block {
    peri_k_codec_args a;
    __device__ void operator()(int64_t b, int lane, unsigned mask) const
    {
        enum { PACK = packing<F>::PACK, BITS = packing<F>::BITS };
        int64_t n;
        const float *x = a.x + block_place(a, b, &n);
        uint8_t *wire = (uint8_t *)a.wire + b * F::bytes(a.block);
        F f;
        const bool good = f.template measure<LANES>(a, x, n, b, lane, mask);
        const int64_t codes = F::codes(a.block);
        for (int64_t i = 4 * lane; i / PACK < codes; i += 4 * LANES) {
            uint32_t word = 0;
            if (good && i < n) {
                const float4 v = peri_load_quad<peri_f32>(x, i, n, 0);
                word = f.encode(a, v.x);
                if (i + 1 < n) word |= f.encode(a, v.y) << BITS;
                if (i + 2 < n) word |= f.encode(a, v.z) << 2 * BITS;
                if (i + 3 < n) word |= f.encode(a, v.w) << 3 * BITS;
            }
            const int64_t left = codes - i / PACK;
            peri_store_bytes(wire + i / PACK, left < 4 / PACK ? left : 4 / PACK, word);
        }
        if (lane == 0) f.end(wire + codes);
    }
};

template <class F, int LANES> struct decode_block {
    peri_k_codec_args a;
    __device__ void operator()(int64_t b, int lane, unsigned) const
    {
        enum {
            PACK = packing<F>::PACK,
            BITS = packing<F>::BITS,
            CODE = (1 << BITS) - 1,
            BYTES = packing<F>::BYTES,
            AHEAD = 4
        };
        int64_t n;
        float *x = a.x + block_place(a, b, &n);
        const uint8_t *wire = (const uint8_t *)a.wire + b * F::bytes(a.block);
        const int64_t codes = F::codes(a.block);
        F f;
        f.begin(wire + codes);
        const auto put = [&](uint32_t word, int64_t i) {
            peri_store_quad<peri_f32>(x, i, n,
                                      make_float4(f.decode(a, word & CODE), f.decode(a, word >> BITS & CODE),
                                                  f.decode(a, word >> 2 * BITS & CODE),
                                                  f.decode(a, word >> 3 * BITS & CODE)));
        };
        int64_t i = 4 * lane;
        for (; ((uintptr_t)wire | (uintptr_t)codes) % BYTES == 0 && i < n; i += AHEAD * 4 * LANES) {
            uint32_t words[AHEAD];
            peri_load_codes(wire + i / PACK, 4 * LANES / PACK, codes - i / PACK, BYTES, words);
            PERI_UNROLL
            for (int k = 0; k < AHEAD; k++) put(words[k], i + 4 * LANES * k);
        }
        for (; i < n; i += 4 * LANES) put((uint32_t)peri_load_code(wire + i / PACK, codes - i / PACK, BYTES), i);
    }
};

template <class F, bool BACK>
cudaError_t code_blocks(const peri_k_codec_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    typedef typename std::conditional<BACK, decode_block<F, 8>, encode_block<F, 8>>::type small;
    typedef typename std::conditional<BACK, decode_block<F, 32>, encode_block<F, 32>>::type large;
    return a->block <= (BACK ? 128 : 32) ? each_group<8>(begin, end, c, small{*a})
                                         : each_group<32>(begin, end, c, large{*a});
}

template <bool BACK> cudaError_t coded(const peri_k_codec_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->format) {
    case PERI_CODEC_FP16: return code_numbers<BACK>(a, begin, end, c, code16<peri_f16>{a->loss_scale, 65504.0f});
    case PERI_CODEC_BF16: return code_numbers<BACK>(a, begin, end, c,
                                                    code16<peri_bf16>{a->loss_scale, k_float(0x7f7f0000u)});
    case PERI_CODEC_INT8: return code_blocks<int8_block, BACK>(a, begin, end, c);
    case PERI_CODEC_MX4: return code_blocks<mx4_block, BACK>(a, begin, end, c);
    default: break;
    }
    if (a->block == 1) return code_numbers<BACK>(a, begin, end, c, code8{a->exponent_bits, a->exponent_bias});
    return code_blocks<fp8_block, BACK>(a, begin, end, c);
}

} // namespace

PERI_CUDA_KERNEL(codec_encode) { return coded<false>(a, begin, end, c); }
PERI_CUDA_KERNEL(codec_decode) { return coded<true>(a, begin, end, c); }
