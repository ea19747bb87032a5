/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged.c (cpu): see kernels/jagged.h. Whole blocks run as straight loops that the compiler vectorises; a block with
 * malformed input, and what is small anyway, goes through ref's scalar rules.
 */

/* -- cumulative sums ----------------------------------------------------------------------------------------------- */

/** Sum (modulo 2^64), smallest and largest of x[n]. */
typedef struct cpu_extent {
    int64_t sum, min, max;
} cpu_extent;

static cpu_extent cpu_extent_i32(const int32_t *x, int64_t n)
{
    uint64_t sum = 0;
    int32_t min = INT32_MAX, max = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        sum += (uint64_t)(int64_t)x[i];
        min = x[i] < min ? x[i] : min;
        max = x[i] > max ? x[i] : max;
    }
    return (cpu_extent){(int64_t)sum, min, max};
}

static cpu_extent cpu_extent_i64(const int64_t *x, int64_t n)
{
    uint64_t sum = 0;
    int64_t min = INT64_MAX, max = INT64_MIN;
    for (int64_t i = 0; i < n; i++) {
        sum += (uint64_t)x[i];
        min = x[i] < min ? x[i] : min;
        max = x[i] > max ? x[i] : max;
    }
    return (cpu_extent){(int64_t)sum, min, max};
}

static void cpu_cumsum_sums(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cumsum_args *a = args;
    for (int64_t at = begin; at < end; at++) {
        int64_t r = at / a->blocks, b = at % a->blocks, first = b * PERI_JAGGED_BLOCK;
        int64_t i = r * a->cols + first, n = ref_min(a->cols - first, PERI_JAGGED_BLOCK);
        cpu_extent e = a->x_dtype == PERI_I32 ? cpu_extent_i32((const int32_t *)a->x + i, n)
                                              : cpu_extent_i64((const int64_t *)a->x + i, n);
        if (n > 0 && a->limit >= 0 && (e.min < 0 || e.max > a->limit)) {
            ref_cumsum_sums(args, at, at + 1);
            continue;
        }
        a->sums[r * (a->blocks + 1) + b] = e.sum;
        if (a->bad) a->bad[at] = INT64_MAX;
        if (a->most) a->most[at] = e.max > 0 ? e.max : 0;
    }
}

/** y[i] = sum + x[0] + ... + x[i]. */
#define CPU_SCAN(name, X, Y, U)                                                                                        \
    static void name(const X *restrict x, Y *restrict y, int64_t n, int64_t start)                                     \
    {                                                                                                                  \
        U sum = (U)start;                                                                                              \
        for (int64_t i = 0; i < n; i++) y[i] = (Y)(sum += (U)x[i]);                                                    \
    }
CPU_SCAN(cpu_scan_32_32, int32_t, int32_t, uint32_t)
CPU_SCAN(cpu_scan_32_64_rest, int32_t, int64_t, uint64_t)
CPU_SCAN(cpu_scan_64_32, int64_t, int32_t, uint32_t)
CPU_SCAN(cpu_scan_64_64, int64_t, int64_t, uint64_t)

/** Lengths to offsets: a vector at a time, whose sum is all that the next one waits for. */
static void cpu_scan_32_64(const int32_t *restrict x, int64_t *restrict y, int64_t n, int64_t start)
{
    k_lvec sum = start - (k_lvec){0};
    int64_t i = 0;
    for (; i + K_LONGS <= n; i += K_LONGS) {
        k_lvec scan = k_scan(k_widen(x + i));
        *(k_lvec_unaligned *)(y + i) = sum + scan;
        sum += k_last(scan);
    }
    cpu_scan_32_64_rest(x + i, y + i, n - i, sum[0]);
}

static void cpu_cumsum_write(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cumsum_args *a = args;
    int64_t complete = a->mode == PERI_CUMSUM_COMPLETE, width = a->cols + complete;
    for (int64_t at = begin; at < end; at++) {
        int64_t r = at / a->blocks, b = at % a->blocks, first = b * PERI_JAGGED_BLOCK,
                n = ref_min(a->cols - first, PERI_JAGGED_BLOCK);
        const int64_t *sums = a->sums + r * (a->blocks + 1) + b;
        /* malformed: every step is clamped */
        if (a->limit >= 0 && (!a->bad || a->bad[at] != INT64_MAX || sums[1] > a->limit)) {
            ref_cumsum_write(args, at, at + 1);
            continue;
        }
        int64_t i = r * a->cols + first, o = r * width + first + complete;
        if (complete && b == 0) ref_int_set(a->y, o - 1, a->y_dtype, 0);
        if (a->mode == PERI_CUMSUM_EXCLUSIVE) { /* one later, the last one left out */
            if (n > 0) ref_int_set(a->y, o, a->y_dtype, sums[0]);
            o++;
            n--;
        }
        bool x32 = a->x_dtype == PERI_I32, y32 = a->y_dtype == PERI_I32;
        if (x32 && y32) cpu_scan_32_32((const int32_t *)a->x + i, (int32_t *)a->y + o, n, sums[0]);
        else if (x32) cpu_scan_32_64((const int32_t *)a->x + i, (int64_t *)a->y + o, n, sums[0]);
        else if (y32) cpu_scan_64_32((const int64_t *)a->x + i, (int32_t *)a->y + o, n, sums[0]);
        else cpu_scan_64_64((const int64_t *)a->x + i, (int64_t *)a->y + o, n, sums[0]);
    }
}

/* -- checks and lengths -------------------------------------------------------------------------------------------- */

/** Longest of n bags, -1 if any is malformed. */
#define CPU_BAGS(name, O, L)                                                                                           \
    static int64_t name(const O *restrict offsets, const L *restrict lengths, int64_t n, int64_t limit)                \
    {                                                                                                                  \
        int64_t bad = 0, most = 0;                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            int64_t from = offsets[i], to = offsets[i + 1], length = (int64_t)((uint64_t)to - (uint64_t)from);         \
            bad |= (from < 0) | (to < from) | (to > limit);                                                            \
            if (lengths) bad |= lengths[i] != length;                                                                  \
            most = length > most ? length : most;                                                                      \
        }                                                                                                              \
        return bad ? -1 : most;                                                                                        \
    }
CPU_BAGS(cpu_bags_32_32, int32_t, int32_t)
CPU_BAGS(cpu_bags_32_64, int32_t, int64_t)
CPU_BAGS(cpu_bags_64_32, int64_t, int32_t)
CPU_BAGS(cpu_bags_64_64, int64_t, int64_t)

static void cpu_jagged_check(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_check_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t i = b * PERI_JAGGED_BLOCK, n = ref_min(a->bags - i, PERI_JAGGED_BLOCK), most;
        const int32_t *l32 = a->lengths && a->lengths_dtype == PERI_I32 ? (const int32_t *)a->lengths + i : NULL;
        const int64_t *l64 = a->lengths && a->lengths_dtype == PERI_I64 ? (const int64_t *)a->lengths + i : NULL;
        if (a->offsets_dtype == PERI_I32) {
            const int32_t *offsets = (const int32_t *)a->offsets + i;
            most = l64 ? cpu_bags_32_64(offsets, l64, n, a->limit) : cpu_bags_32_32(offsets, l32, n, a->limit);
        } else {
            const int64_t *offsets = (const int64_t *)a->offsets + i;
            most = l64 ? cpu_bags_64_64(offsets, l64, n, a->limit) : cpu_bags_64_32(offsets, l32, n, a->limit);
        }
        a->bad[b] = INT64_MAX;
        a->most[b] = most;
        if (most < 0) ref_jagged_check(args, b, b + 1);
    }
}

#define CPU_LENGTHS(name, O, L)                                                                                        \
    static void name(const O *restrict offsets, L *restrict out, int64_t n)                                            \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++) out[i] = (L)((uint64_t)offsets[i + 1] - (uint64_t)offsets[i]);                 \
    }
CPU_LENGTHS(cpu_lengths_32_32, int32_t, int32_t)
CPU_LENGTHS(cpu_lengths_32_64, int32_t, int64_t)
CPU_LENGTHS(cpu_lengths_64_32, int64_t, int32_t)
CPU_LENGTHS(cpu_lengths_64_64, int64_t, int64_t)

static void cpu_jagged_lengths(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_lengths_args *a = args;
    int64_t n = end - begin;
    if (a->permute) {
        ref_jagged_lengths(args, begin, end);
    } else if (a->offsets_dtype == PERI_I32) {
        const int32_t *offsets = (const int32_t *)a->offsets + begin;
        if (a->out_dtype == PERI_I32) cpu_lengths_32_32(offsets, (int32_t *)a->out + begin, n);
        else cpu_lengths_32_64(offsets, (int64_t *)a->out + begin, n);
    } else {
        const int64_t *offsets = (const int64_t *)a->offsets + begin;
        if (a->out_dtype == PERI_I32) cpu_lengths_64_32(offsets, (int32_t *)a->out + begin, n);
        else cpu_lengths_64_64(offsets, (int64_t *)a->out + begin, n);
    }
}

/* -- segments ------------------------------------------------------------------------------------------------------ */

typedef struct cpu_16 {
    char bytes[16];
} cpu_16;
typedef struct cpu_32 {
    char bytes[32];
} cpu_32;

#if defined(__AVX512F__)
/** The first n bytes of 64, n clamped to [0, 64]. */
static inline __mmask64 cpu_first(int64_t n)
{
    return n >= 64 ? ~(__mmask64)0 : n <= 0 ? 0 : ((__mmask64)1 << n) - 1;
}
#endif

/** memcpy for pieces that are mostly short and of lengths that no branch predictor knows. */
static inline void cpu_move(char *restrict dst, const char *restrict src, int64_t n)
{
#if defined(__AVX512F__)
    if (n <= 64) {
        __mmask64 mask = cpu_first(n);
        _mm512_mask_storeu_epi8(dst, mask, _mm512_maskz_loadu_epi8(mask, src));
        return;
    }
#endif
    if (n > 512) {
        memcpy(dst, src, (size_t)n);
    } else if (n >= 32) {
        int64_t i = 0;
        for (; i + 32 < n; i += 32) memcpy(dst + i, src + i, sizeof(cpu_32));
        memcpy(dst + n - 32, src + n - 32, sizeof(cpu_32));
    } else if (n >= 16) {
        memcpy(dst, src, sizeof(cpu_16));
        memcpy(dst + n - 16, src + n - 16, sizeof(cpu_16));
    } else if (n >= 8) {
        memcpy(dst, src, 8);
        memcpy(dst + n - 8, src + n - 8, 8);
    } else if (n >= 4) {
        memcpy(dst, src, 4);
        memcpy(dst + n - 4, src + n - 4, 4);
    } else {
        for (int64_t i = 0; i < n; i++) dst[i] = src[i];
    }
}

/** The rows [begin, end) of dst from segment t on; offsets are i64 arrays. The next segments' sources are asked for
 *  ahead. */
static inline __attribute__((always_inline)) void cpu_copy_segments(const peri_k_jagged_copy_args *a, int64_t begin,
                                                                    int64_t end, int64_t t, int32_t permute_dtype)
{
    enum { AHEAD = 8 };
    const int64_t *out = a->out_offsets, *in = a->in_offsets;
    char *dst = a->dst;
    const char *src = a->src;
    for (int64_t row = begin; row < end; t++) {
        int64_t p = permute_dtype < 0 ? t : ref_int(a->permute, t, permute_dtype);
        if (permute_dtype >= 0 && t + AHEAD < a->segments)
            __builtin_prefetch(src + in[ref_int(a->permute, t + AHEAD, permute_dtype)] * a->width);
        int64_t last = ref_min(out[t + 1], end);
        cpu_move(dst + row * a->width, src + (in[p] + row - out[t]) * a->width, (last - row) * a->width);
        row = last;
    }
}

/** dst[row] = src[permute[row]]. */
static void cpu_copy_rows(const peri_k_jagged_copy_args *a, int64_t begin, int64_t end)
{
    enum { AHEAD = 16 };
    const char *src = a->src;
    char *dst = a->dst;
    for (int64_t row = begin; row < end; row++) {
        const char *from = src + ref_int(a->permute, row, a->permute_dtype) * a->width;
        if (row + AHEAD < end) __builtin_prefetch(src + ref_int(a->permute, row + AHEAD, a->permute_dtype) * a->width);
        if (a->width == 8) memcpy(dst + row * 8, from, 8);
        else if (a->width == 4) memcpy(dst + row * 4, from, 4);
        else cpu_move(dst + row * a->width, from, a->width);
    }
}

static void cpu_jagged_copy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_copy_args *a = args;
    if (a->segments == 0) return;
    if (a->permute && !a->out_offsets && !a->in_offsets && a->out_step == 1 && a->in_step == 1) {
        cpu_copy_rows(a, begin, ref_min(end, a->segments));
        return;
    }
    end = ref_min(end, ref_offset(a->out_offsets, a->out_dtype, a->out_step, a->segments));
    if (begin >= end) return;
    int64_t t = ref_segment_of(a->out_offsets, a->out_dtype, a->out_step, a->segments, begin);
    bool wide = a->out_offsets && a->in_offsets && a->out_dtype == PERI_I64 && a->in_dtype == PERI_I64;
    if (wide && !a->permute) {
        cpu_copy_segments(a, begin, end, t, -1);
    } else if (wide && a->permute_dtype == PERI_I32) {
        cpu_copy_segments(a, begin, end, t, PERI_I32);
    } else if (wide) {
        cpu_copy_segments(a, begin, end, t, PERI_I64);
    } else {
        for (int64_t row = begin; row < end; t++) {
            int64_t p = a->permute ? ref_int(a->permute, t, a->permute_dtype) : t;
            int64_t first = ref_offset(a->out_offsets, a->out_dtype, a->out_step, t);
            int64_t last = ref_min(ref_offset(a->out_offsets, a->out_dtype, a->out_step, t + 1), end);
            int64_t from = ref_offset(a->in_offsets, a->in_dtype, a->in_step, p) + row - first;
            cpu_move((char *)a->dst + row * a->width, (const char *)a->src + from * a->width, (last - row) * a->width);
            row = last;
        }
    }
}

/** dst[n] = the sum of src[n] blocks at `places`, first to last. */
static void cpu_sum_f32(float *restrict dst, const float *const *blocks, int64_t count, int64_t n)
{
    memcpy(dst, blocks[0], sizeof *dst * (size_t)n);
    for (int64_t j = 1; j < count; j++) {
        const float *restrict src = blocks[j];
        for (int64_t i = 0; i < n; i++) dst[i] += src[i];
    }
}

static void cpu_jagged_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_sum_args *a = args;
    enum { AT_ONCE = 16 };
    if (a->dtype != PERI_F32 || begin >= end) {
        ref_jagged_sum(args, begin, end);
        return;
    }
    int64_t p = ref_segment_of(a->in_offsets, PERI_I64, 1, a->segments, begin);
    for (int64_t row = begin; row < end; p++) {
        int64_t last = ref_min(ref_offset(a->in_offsets, PERI_I64, 1, p + 1), end),
                at = row - ref_offset(a->in_offsets, PERI_I64, 1, p);
        int64_t n = (last - row) * a->columns;
        float *dst = (float *)a->dst + row * a->columns;
        int64_t j = a->list_offsets[p], stop = a->list_offsets[p + 1];
        if (j == stop) memset(dst, 0, sizeof *dst * (size_t)n);
        for (bool first = true; j < stop; first = false) {
            const float *blocks[AT_ONCE + 1];
            int64_t count = 0;
            if (!first) blocks[count++] = dst; /* go on from what is there */
            while (j < stop && count <= AT_ONCE)
                blocks[count++] =
                    (const float *)a->src + (ref_offset(a->out_offsets, PERI_I64, 1, a->list[j++]) + at) * a->columns;
            if (first) cpu_sum_f32(dst, blocks, count, n);
            else
                for (int64_t k = 1; k < count; k++)
                    for (int64_t i = 0; i < n; i++) dst[i] += blocks[k][i];
        }
        row = last;
    }
}

/* -- padded rows --------------------------------------------------------------------------------------------------- */

/** Repeat one element over n bytes. */
static void cpu_pad(char *dst, int64_t n, const uint64_t *padding, int64_t element)
{
    if (element == 8) {
        uint64_t value = padding[0];
        for (int64_t i = 0; i < n; i += 8) memcpy(dst + i, &value, 8);
    } else if (element == 4) {
        uint32_t value = (uint32_t)padding[0];
        for (int64_t i = 0; i < n; i += 4) memcpy(dst + i, &value, 4);
    } else {
        for (int64_t i = 0; i < n; i += element) memcpy(dst + i, padding, (size_t)element);
    }
}

#if defined(__AVX512F__)
/** Short rows, 64 bytes at a time, each byte a value or padding. */
static void cpu_short_rows(const peri_k_jagged_padded_args *a, int64_t begin, int64_t end)
{
    int64_t row_bytes = a->max * a->width;
    char pattern[64];
    cpu_pad(pattern, 64, a->padding, a->element);
    __m512i padding = _mm512_loadu_si512(pattern);
    for (int64_t b = begin; b < end; b++) {
        int64_t from = ref_int(a->offsets, b, a->offsets_dtype),
                n = ref_int(a->offsets, b + 1, a->offsets_dtype) - from;
        const char *src = (const char *)a->values + from * a->width;
        char *row = (char *)a->padded + b * row_bytes;
        for (int64_t at = 0; at < row_bytes; at += 64) {
            __m512i x = _mm512_mask_loadu_epi8(padding, cpu_first(ref_min(n * a->width, row_bytes) - at), src + at);
            _mm512_mask_storeu_epi8(row + at, cpu_first(row_bytes - at), x);
        }
    }
}
#endif

static void cpu_jagged_to_padded(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_padded_args *a = args;
    int64_t row_bytes = a->max * a->width;
#if defined(__AVX512F__)
    if (row_bytes <= 512) {
        cpu_short_rows(a, begin, end);
        return;
    }
#endif
    for (int64_t b = begin; b < end; b++) {
        int64_t from = ref_int(a->offsets, b, a->offsets_dtype),
                n = ref_int(a->offsets, b + 1, a->offsets_dtype) - from;
        int64_t bytes = ref_min(n, a->max) * a->width;
        char *row = (char *)a->padded + b * row_bytes;
        cpu_move(row, (const char *)a->values + from * a->width, bytes);
        cpu_pad(row + bytes, row_bytes - bytes, a->padding, a->element);
    }
}

static void cpu_jagged_from_padded(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_padded_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t from = ref_int(a->offsets, b, a->offsets_dtype),
                n = ref_int(a->offsets, b + 1, a->offsets_dtype) - from;
        int64_t kept = ref_min(n, a->max);
        char *row = (char *)a->values + from * a->width;
        cpu_move(row, (const char *)a->padded + b * a->max * a->width, kept * a->width);
        if (n > kept) memset(row + kept * a->width, 0, (size_t)((n - kept) * a->width));
    }
}

/* -- columns ------------------------------------------------------------------------------------------------------- */

static void cpu_columns_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_columns_sum_args *a = args;
    int64_t size = a->dtype == PERI_F64 ? 8 : a->dtype == PERI_F32 ? 4 : 2;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < a->n_items; i++) {
            const int64_t *item = a->items + i * PERI_ITEM_WORDS,
                          *source = a->sources + item[PERI_ITEM_FIRST] * PERI_SOURCE_WORDS;
            char *dst = (char *)(intptr_t)item[PERI_ITEM_DST] + row * item[PERI_ITEM_STRIDE] * size;
            int64_t columns = item[PERI_ITEM_COLUMNS], count = item[PERI_ITEM_SOURCES];
            if (count == 0) { /* and there is no source to look at */
                memset(dst, 0, (size_t)(columns * size));
                continue;
            }
            const char *src = (const char *)(intptr_t)source[PERI_SOURCE_ADDRESS];
            if (count == 1) {
                cpu_move(dst, src + row * source[PERI_SOURCE_STRIDE] * size, columns * size);
            } else if (a->dtype == PERI_F32) {
                float *restrict sum = (float *)dst;
                memcpy(sum, src + row * source[PERI_SOURCE_STRIDE] * size, (size_t)(columns * size));
                for (int64_t s = 1; s < count; s++) {
                    const int64_t *from = source + s * PERI_SOURCE_WORDS;
                    const float *restrict x =
                        (const float *)(intptr_t)from[PERI_SOURCE_ADDRESS] + row * from[PERI_SOURCE_STRIDE];
                    for (int64_t c = 0; c < columns; c++) sum[c] += x[c];
                }
            } else {
                peri_k_columns_sum_args one = *a;
                one.items = item;
                one.n_items = 1;
                ref_columns_sum(&one, row, row + 1);
            }
        }
}

#define K_CPU_JAGGED                                                                                                   \
    [PERI_K_cumsum_sums] = cpu_cumsum_sums, [PERI_K_cumsum_write] = cpu_cumsum_write,                                  \
    [PERI_K_jagged_check] = cpu_jagged_check, [PERI_K_jagged_lengths] = cpu_jagged_lengths,                            \
    [PERI_K_jagged_copy] = cpu_jagged_copy, [PERI_K_jagged_sum] = cpu_jagged_sum,                                      \
    [PERI_K_jagged_to_padded] = cpu_jagged_to_padded, [PERI_K_jagged_from_padded] = cpu_jagged_from_padded,            \
    [PERI_K_columns_sum] = cpu_columns_sum,
