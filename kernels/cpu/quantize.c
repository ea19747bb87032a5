/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c (cpu): see kernels/quantize.h.
 */

#define QROWS static inline __attribute__((always_inline))

enum { CPU_CODES = 256 }; /* codes that are packed together: a multiple of K_LANES and of 4 */

/** Numbers [c, c + K_LANES) of a row as f32; n of them exist (K_LANES or fewer), the others repeat `rest`. */
QROWS k_vec cpu_numbers(const void *row, int64_t c, int64_t n, int32_t dtype, float rest)
{
    if (n < K_LANES) {
        float x[K_LANES];
        for (int64_t i = 0; i < K_LANES; i++) x[i] = i < n ? ref_number(row, c + i, dtype) : rest;
        return k_load(x);
    }
    if (dtype == PERI_F32) return k_load((const float *)row + c);
    if (dtype == PERI_F16) return k_load_f16((const uint16_t *)row + c);
    return k_load_bf16((const uint16_t *)row + c);
}

#if defined(__AVX512F__)
QROWS k_vec cpu_min(k_vec a, k_vec b) { return (k_vec)_mm512_min_ps((__m512)a, (__m512)b); }
QROWS k_vec cpu_rint(k_vec v)
{
    return (k_vec)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QROWS k_ivec cpu_to_int(k_vec v) { return (k_ivec)_mm512_cvttps_epi32((__m512)v); }
QROWS k_vec cpu_to_float(k_ivec v) { return (k_vec)_mm512_cvtepi32_ps((__m512i)v); }
QROWS void cpu_store_codes(uint8_t *p, k_ivec v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v)); }
QROWS k_ivec cpu_load_codes(const uint8_t *p)
{
    return (k_ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
#else
QROWS k_vec cpu_min(k_vec a, k_vec b) { return (k_vec)_mm256_min_ps((__m256)a, (__m256)b); }
QROWS k_vec cpu_rint(k_vec v)
{
    return (k_vec)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QROWS k_ivec cpu_to_int(k_vec v) { return (k_ivec)_mm256_cvttps_epi32((__m256)v); }
QROWS k_vec cpu_to_float(k_ivec v) { return (k_vec)_mm256_cvtepi32_ps((__m256i)v); }
QROWS void cpu_store_codes(uint8_t *p, k_ivec v)
{
    __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
    __m128i words = _mm_packus_epi32(low, high);
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
QROWS k_ivec cpu_load_codes(const uint8_t *p)
{
    return (k_ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
#endif

QROWS k_vec cpu_select(k_ivec mask, k_vec a, k_vec b) { return (k_vec)(((k_ivec)a & mask) | ((k_ivec)b & ~mask)); }

typedef struct cpu_range {
    float least, largest, rest;
} cpu_range;

/** The least and the largest number of a row (@magnitudes: of |x|); rest is NaN if one is not finite. */
QROWS cpu_range cpu_range_of(const void *row, int64_t cols, int32_t dtype, bool magnitudes)
{
    float first = ref_number(row, 0, dtype);
    if (magnitudes) first = fabsf(first);
    k_vec least[2] = {k_set(first), k_set(first)}, largest[2] = {k_set(first), k_set(first)}, rest = k_set(0);
    const k_ivec positive = (k_ivec){0} + 0x7fffffff;
    int64_t c = 0;
    for (; c + 2 * K_LANES <= cols; c += 2 * K_LANES)
        for (int h = 0; h < 2; h++) {
            k_vec x = cpu_numbers(row, c + h * K_LANES, K_LANES, dtype, 0);
            if (magnitudes) x = (k_vec)((k_ivec)x & positive);
            least[h] = cpu_min(least[h], x);
            largest[h] = k_max(largest[h], x);
            rest += x - x;
        }
    for (; c < cols; c += K_LANES) {
        k_vec x = cpu_numbers(row, c, cols - c < K_LANES ? cols - c : K_LANES, dtype, first);
        if (magnitudes) x = (k_vec)((k_ivec)x & positive);
        least[0] = cpu_min(least[0], x);
        largest[0] = k_max(largest[0], x);
        rest += x - x;
    }
    float a[K_LANES], b[K_LANES];
    cpu_range r = {first, first, k_sum(rest)};
    k_store(a, cpu_min(least[0], least[1]));
    k_store(b, k_max(largest[0], largest[1]));
    for (int i = 0; i < K_LANES; i++) {
        r.least = a[i] < r.least ? a[i] : r.least;
        r.largest = b[i] > r.largest ? b[i] : r.largest;
    }
    return r;
}

/** What encoding and decoding of fp8 need, by formula. */
typedef struct cpu_row_fp8 {
    k_vec largest, smallest, up, down; /* largest number, smallest normal one, 2^(b - 1 + m) and its inverse */
    int32_t m, bias;
} cpu_row_fp8;

QROWS cpu_row_fp8 cpu_row_fp8_of(const peri_k_rows_args *a)
{
    int32_t m = 7 - a->exponent_bits, b = a->exponent_bias;
    return (cpu_row_fp8){k_set(k_fp8_largest(a->exponent_bits, b)), k_set(k_two_to(1 - b)), k_set(k_two_to(b - 1 + m)),
                         k_set(k_two_to(1 - b - m)), m, b};
}

QROWS k_ivec cpu_row_fp8_codes(const cpu_row_fp8 *f, k_vec x)
{
    const k_ivec positive = (k_ivec){0} + 0x7fffffff;
    int32_t drop = 23 - f->m;
    k_vec magnitude = (k_vec)((k_ivec)x & positive);
    k_ivec sign = (k_ivec)((k_uvec)x >> 24) & 0x80;
    magnitude = cpu_select((k_ivec)(magnitude < f->largest), magnitude, f->largest);
    k_ivec small = (k_ivec)(magnitude < f->smallest), u = (k_ivec)magnitude;
    k_ivec steps = cpu_to_int(cpu_rint(cpu_select(small, magnitude, k_set(0)) * f->up));
    u += ((1 << (drop - 1)) - 1) + ((u >> drop) & 1);
    k_ivec code = (u >> drop) - ((127 - f->bias) << f->m);
    return sign | (steps & small) | (code & ~small);
}

QROWS k_vec cpu_row_fp8_values(const cpu_row_fp8 *f, k_ivec code)
{
    k_ivec magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    k_ivec small = (k_ivec)(magnitude < (1 << f->m));
    k_ivec normal = (magnitude << (23 - f->m)) + ((127 - f->bias) << 23);
    k_vec steps = cpu_to_float(magnitude) * f->down; /* of normal ones: not used, and finite */
    return (k_vec)((k_ivec)cpu_select(small, steps, (k_vec)normal) | sign);
}

/** codes[n], one a byte, into n * bits / 8 bytes, rounded up; the last of them may get codes beyond n, which are 0. */
QROWS void cpu_pack(uint8_t *restrict dst, const uint8_t *restrict codes, int64_t n, int32_t bits)
{
    if (bits == 4)
        for (int64_t i = 0; i < (n + 1) / 2; i++) dst[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    else
        for (int64_t i = 0; i < (n + 3) / 4; i++)
            dst[i] = (uint8_t)(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6);
}

QROWS void cpu_unpack(uint8_t *restrict codes, const uint8_t *restrict src, int64_t n, int32_t bits)
{
    if (bits == 4)
        for (int64_t i = 0; i < (n + 1) / 2; i++) {
            codes[2 * i] = src[i] & 15;
            codes[2 * i + 1] = src[i] >> 4;
        }
    else
        for (int64_t i = 0; i < (n + 3) / 4; i++)
            for (int k = 0; k < 4; k++) codes[4 * i + k] = src[i] >> 2 * k & 3;
}

/** The codes of a row, K_LANES at a time, to its bytes. @kind: 0 fp8, 1 with f32 scale, 2 with f16 scale. */
QROWS void cpu_row_codes(const peri_k_rows_args *a, const void *x, uint8_t *dst, k_scale s, const cpu_row_fp8 *f,
                         int32_t dtype, int kind, int32_t bits)
{
    const k_vec bias = k_set(s.bias), inverse = k_set(s.inverse), most = k_set((float)((1 << bits) - 1)),
                zero = k_set(0);
    uint8_t codes[CPU_CODES];
    for (int64_t from = 0; from < a->cols; from += CPU_CODES) {
        int64_t n = ref_min(a->cols - from, CPU_CODES);
        uint8_t *to = bits == 8 && n == CPU_CODES ? dst + from : codes;
        for (int64_t c = 0; c < n; c += K_LANES) {
            k_vec v = cpu_numbers(x, from + c, n - c < K_LANES ? n - c : K_LANES, dtype, s.bias);
            k_ivec code;
            if (kind == 0) {
                code = cpu_row_fp8_codes(f, a->scale_at >= 0 ? v * inverse : v);
            } else {
                v = cpu_rint((v - bias) * inverse);
                if (kind == 2) v = cpu_min(k_max(v, zero), most);
                code = cpu_to_int(v);
            }
            cpu_store_codes(to + c, code);
        }
        if (bits == 8) {
            if (to == codes) memcpy(dst + from, codes, (size_t)n);
            continue;
        }
        for (int64_t c = n; c % 4 != 0; c++) codes[c] = 0;
        cpu_pack(dst + from * bits / 8, codes, n, bits);
    }
}

QROWS void cpu_quantize_run(const peri_k_rows_args *a, int64_t begin, int64_t end, int32_t dtype, int kind,
                            int32_t bits)
{
    bool scaled = a->scale_at >= 0;
    int64_t width = dtype == PERI_F32 ? 4 : 2, code_bytes = (a->cols * bits + 7) / 8;
    cpu_row_fp8 f = {0};
    if (kind == 0) f = cpu_row_fp8_of(a);
    for (int64_t r = begin; r < end; r++) {
        uint8_t *row = (uint8_t *)a->bytes + r * a->stride;
        const void *x = (const char *)a->x + r * a->cols * width;
        k_scale s = {1, 0, 1};
        if (scaled) {
            cpu_range range = cpu_range_of(x, a->cols, dtype, kind == 0);
            if (a->min_max) {
                range.least = a->min_max[2 * r];
                range.largest = a->min_max[2 * r + 1];
                range.rest += (range.least - range.least) + (range.largest - range.largest);
            }
            s = k_row_scale(a, range.least, range.largest, range.rest == 0);
        }
        if (s.scale != s.scale) {
            memset(row, 0, (size_t)a->stride);
        } else {
            int64_t codes_end = a->codes_at + code_bytes;
            cpu_row_codes(a, x, row + a->codes_at, s, &f, dtype, kind, bits);
            memset(row + codes_end, 0, (size_t)(a->stride - codes_end)); /* padding, and where a scale will be */
        }
        ref_scale_store(a, row, s);
    }
}

/** Any format, looked up at run time where the functions above are compiled for one: serves numbers of 16 bits. */
static __attribute__((noinline)) void cpu_quantize_any(const peri_k_rows_args *a, int64_t begin, int64_t end)
{
    cpu_quantize_run(a, begin, end, a->dtype, a->exponent_bits ? 0 : a->half ? 2 : 1, a->bits);
}

static void cpu_rows_quantize(const void *args, int64_t begin, int64_t end)
{
    const peri_k_rows_args *a = args;
    if (a->cols == 0) ref_rows_quantize(args, begin, end);
    else if (a->dtype != PERI_F32) cpu_quantize_any(a, begin, end);
    else if (a->exponent_bits) cpu_quantize_run(a, begin, end, PERI_F32, 0, 8);
    else if (!a->half) cpu_quantize_run(a, begin, end, PERI_F32, 1, 8);
    else if (a->bits == 8) cpu_quantize_run(a, begin, end, PERI_F32, 2, 8);
    else if (a->bits == 4) cpu_quantize_run(a, begin, end, PERI_F32, 2, 4);
    else cpu_quantize_run(a, begin, end, PERI_F32, 2, 2);
}

/* -- back ---------------------------------------------------------------------------------------------------------- */

/** v as numbers [c, c + n) of a row, n <= K_LANES. */
QROWS void cpu_numbers_set(void *row, int64_t c, int64_t n, int32_t dtype, k_vec v)
{
    if (n == K_LANES && dtype == PERI_F32) {
        k_store((float *)row + c, v);
    } else if (n == K_LANES && dtype == PERI_F16) {
        k_store_f16((uint16_t *)row + c, v);
    } else {
        float x[K_LANES];
        k_store(x, v);
        for (int64_t i = 0; i < n; i++) ref_number_set(row, c + i, dtype, x[i]);
    }
}

QROWS void cpu_restore_run(const peri_k_rows_args *a, int64_t begin, int64_t end, int32_t dtype, int kind, int32_t bits)
{
    int64_t width = dtype == PERI_F32 ? 4 : 2;
    cpu_row_fp8 f = {0};
    if (kind == 0) f = cpu_row_fp8_of(a);
    uint8_t codes[CPU_CODES] = {0};
    for (int64_t r = begin; r < end; r++) {
        const uint8_t *row = (const uint8_t *)a->bytes + r * a->stride;
        void *x = (char *)a->x + r * a->cols * width;
        k_scale s = k_scale_load(a, row);
        const k_vec scale = k_set(s.scale), bias = k_set(s.bias);
        for (int64_t from = 0; from < a->cols; from += CPU_CODES) {
            int64_t n = ref_min(a->cols - from, CPU_CODES);
            const uint8_t *src = row + a->codes_at + from * bits / 8;
            if (bits != 8) cpu_unpack(codes, src, n, bits);
            else if (n < CPU_CODES) memcpy(codes, src, (size_t)n);
            if (bits != 8 || n < CPU_CODES) src = codes;
            for (int64_t c = 0; c < n; c += K_LANES) {
                k_ivec code = cpu_load_codes(src + c);
                k_vec v = kind == 0 ? cpu_row_fp8_values(&f, code) : k_fma(cpu_to_float(code), scale, bias);
                if (kind == 0 && a->scale_at >= 0) v = v / scale;
                cpu_numbers_set(x, from + c, n - c < K_LANES ? n - c : K_LANES, dtype, v);
            }
        }
    }
}

static __attribute__((noinline)) void cpu_restore_any(const peri_k_rows_args *a, int64_t begin, int64_t end)
{
    cpu_restore_run(a, begin, end, a->dtype, a->exponent_bits ? 0 : 1, a->bits);
}

static void cpu_rows_restore(const void *args, int64_t begin, int64_t end)
{
    const peri_k_rows_args *a = args;
    if (a->dtype != PERI_F32) cpu_restore_any(a, begin, end);
    else if (a->exponent_bits) cpu_restore_run(a, begin, end, PERI_F32, 0, 8);
    else if (a->bits == 8) cpu_restore_run(a, begin, end, PERI_F32, 1, 8);
    else if (a->bits == 4) cpu_restore_run(a, begin, end, PERI_F32, 1, 4);
    else cpu_restore_run(a, begin, end, PERI_F32, 1, 2);
}

#define K_CPU_QUANTIZE [PERI_K_rows_quantize] = cpu_rows_quantize, [PERI_K_rows_restore] = cpu_rows_restore,
