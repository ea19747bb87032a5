/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.cu: kernels/quantize.h. 8 or 32 lanes have a row. On the way there each has four neighbours at a time, and
 * the second pass over a row finds it in the cache; on the way back, the codes of 16 bytes of the result, several of
 * them in flight.
 */
#include "quad.cuh"

#include "../quantize.h"
#include "../ref/scale.h"

namespace {

/** Bytes of the codes of @cols numbers. */
__device__ __forceinline__ int64_t code_bytes(const peri_k_rows_args &a, int64_t cols)
{
    return (cols * a.bits + 7) / 8;
}

__device__ uint32_t code_of(const peri_k_rows_args &a, const k_scale &s, float x)
{
    if (a.exponent_bits) return k_f32_to_fp8(a.scale_at >= 0 ? x * s.scale : x, a.exponent_bits, a.exponent_bias);
    const float code = rintf((x - s.bias) * s.inverse);
    if (!a.half) return (uint32_t)(int32_t)code & 255;
    return (uint32_t)fminf(fmaxf(code, 0), (float)((1 << a.bits) - 1));
}

__device__ void store_scale(const peri_k_rows_args &a, uint8_t *row, const k_scale &s)
{
    if (a.scale_at < 0) return;
    if (a.half) {
        /* Rows are compared byte by byte: where there is no scale, its NaN has the bits of ref's, not those of the
         * hardware's. */
        peri_store_bytes(row + a.scale_at, 4, s.scale == s.scale ? peri_f16::pair(s.scale, s.bias) : 0x7e007e00u);
    } else {
        peri_store_float(row + a.scale_at, s.scale);
        peri_store_float(row + a.scale_at + 4, s.bias);
    }
}

__device__ k_scale load_scale(const peri_k_rows_args &a, const uint8_t *row)
{
    if (a.scale_at < 0) return k_scale_make(1, 0, 1);
    if (!a.half) return k_scale_make(peri_load_float(row + a.scale_at), peri_load_float(row + a.scale_at + 4), 0);
    const uint32_t pair = peri_load_bytes(row + a.scale_at, 4);
    return k_scale_make(k_f16_to_f32((uint16_t)pair), k_f16_to_f32((uint16_t)(pair >> 16)), 0);
}

template <class T, int LANES> struct quantize_row {
    enum { NARROW = 32 }; /* columns for which 8 lanes will do */
    peri_k_rows_args a;
    /** The scale of row @r: x[cols]. */
    __device__ k_scale scale(const typename T::type *x, int64_t r, int lane, unsigned mask) const
    {
        if (a.scale_at < 0) return k_scale_make(1, 0, 1);
        const bool fp8 = a.exponent_bits > 0;
        const float first = a.cols ? T::load(x, 0) : 0; /* stands for those that are not there */
        float least = INFINITY, largest = fp8 ? 0 : -INFINITY;
        bool finite = true;
        for (int64_t i = 4 * lane; i < a.cols; i += 4 * LANES) {
            const float4 f = peri_load_quad<T>(x, i, a.cols, first);
            const float v[4] = {f.x, f.y, f.z, f.w};
            PERI_UNROLL
            for (int k = 0; k < 4; k++) {
                const float y = fp8 ? fabsf(v[k]) : v[k];
                least = fminf(least, y);
                largest = fmaxf(largest, y);
                finite = finite && k_finite(y);
            }
        }
        least = peri_group_min<LANES>(least, mask);
        largest = peri_group_max<LANES>(largest, mask);
        finite = __all_sync(mask, finite);
        if (a.min_max) {
            least = a.min_max[2 * r];
            largest = a.min_max[2 * r + 1];
            finite = finite && k_finite(least) && k_finite(largest);
        }
        return k_row_scale(&a, least, largest, finite);
    }
    __device__ void operator()(int64_t r, int lane, unsigned mask) const
    {
        const typename T::type *x = (const typename T::type *)a.x + r * a.cols;
        uint8_t *row = (uint8_t *)a.bytes + r * a.stride, *codes = row + a.codes_at;
        const k_scale s = scale(x, r, lane, mask);
        const int64_t bytes = code_bytes(a, a.cols), pair = a.scale_at < 0 ? 0 : a.half ? 4 : 8;
        for (int64_t i = 4 * lane; i < a.cols; i += 4 * LANES) {
            uint32_t word = 0;
            if (s.scale == s.scale) {
                const float4 v = peri_load_quad<T>(x, i, a.cols, s.bias);
                word = code_of(a, s, v.x);
                if (i + 1 < a.cols) word |= code_of(a, s, v.y) << a.bits;
                if (i + 2 < a.cols) word |= code_of(a, s, v.z) << 2 * a.bits;
                if (i + 3 < a.cols) word |= code_of(a, s, v.w) << 3 * a.bits;
            }
            const int64_t left = code_bytes(a, a.cols - i), most = a.bits / 2;
            peri_store_bytes(codes + i * a.bits / 8, left < most ? left : most, word);
        }
        for (int64_t i = lane; i < a.stride - bytes; i += LANES) { /* what is neither codes nor scale */
            const int64_t at = i < a.codes_at ? i : i + bytes;
            if (at < a.scale_at || at >= a.scale_at + pair) row[at] = 0;
        }
        if (lane == 0) store_scale(a, row, s);
    }
};

/** A lane has 16 bytes of the result at a time, of which it reads the codes of AHEAD at once. */
template <class T, int LANES> struct restore_row {
    enum { VEC = 16 / sizeof(typename T::type), AHEAD = 16 / VEC, NARROW = 128 };
    peri_k_rows_args a;
    __device__ float value(const k_scale &s, uint32_t code) const
    {
        if (a.exponent_bits) return k_fp8_to_f32((uint8_t)code, a.exponent_bits, a.exponent_bias) / s.scale;
        return fmaf((float)(code & ((1u << a.bits) - 1)), s.scale, s.bias);
    }
    __device__ void operator()(int64_t r, int lane, unsigned) const
    {
        const uint8_t *row = (const uint8_t *)a.bytes + r * a.stride, *codes = row + a.codes_at;
        const k_scale s = load_scale(a, row);
        const int bytes = VEC * a.bits / 8;
        const auto put = [&](uint64_t word, int64_t i) {
            float v[VEC];
            PERI_UNROLL
            for (int c = 0; c < VEC; c++) v[c] = value(s, (uint32_t)(word >> c * a.bits));
            peri_store_numbers<T, VEC>((typename T::type *)a.x + r * a.cols, i, a.cols, v);
        };
        int64_t i = VEC * lane;
        for (; a.cols % VEC == 0 && (uintptr_t)codes % bytes == 0 && i < a.cols; i += AHEAD * VEC * LANES) {
            typename std::conditional<VEC == 8, uint64_t, uint32_t>::type words[AHEAD];
            peri_load_codes(codes + i * a.bits / 8, LANES * bytes, code_bytes(a, a.cols - i), bytes, words);
            PERI_UNROLL
            for (int k = 0; k < AHEAD; k++) put(words[k], i + VEC * LANES * k);
        }
        for (; i < a.cols; i += VEC * LANES)
            put(peri_load_code(codes + i * a.bits / 8, code_bytes(a, a.cols - i), bytes), i);
    }
};

template <template <class, int> class F, class T>
cudaError_t rows_of(const peri_k_rows_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    return a->cols <= F<T, 8>::NARROW ? each_group<8>(begin, end, c, F<T, 8>{*a})
                                      : each_group<32>(begin, end, c, F<T, 32>{*a});
}

template <template <class, int> class F>
cudaError_t code_rows(const peri_k_rows_args *a, int64_t begin, int64_t end, const peri_cuda_call *c)
{
    switch (a->dtype) {
    case PERI_F32: return rows_of<F, peri_f32>(a, begin, end, c);
    case PERI_F16: return rows_of<F, peri_f16>(a, begin, end, c);
    default: return rows_of<F, peri_bf16>(a, begin, end, c);
    }
}

} // namespace

PERI_CUDA_KERNEL(rows_quantize) { return code_rows<quantize_row>(a, begin, end, c); }
PERI_CUDA_KERNEL(rows_restore) { return code_rows<restore_row>(a, begin, end, c); }
