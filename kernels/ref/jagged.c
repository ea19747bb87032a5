/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged.c (ref): see kernels/jagged.h.
 */
#include "value.h"

/** Element @i of an i32 or i64 array. */
static inline int64_t ref_int(const void *p, int64_t i, int32_t dtype)
{
    return dtype == PERI_I32 ? ((const int32_t *)p)[i] : ((const int64_t *)p)[i];
}

static inline void ref_int_set(void *p, int64_t i, int32_t dtype, int64_t value)
{
    if (dtype == PERI_I32) ((int32_t *)p)[i] = (int32_t)value;
    else ((int64_t *)p)[i] = value;
}

/** a + b modulo 2^64. */
static inline int64_t ref_add(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

/** x[i] as a cumulative sum counts it. */
static inline int64_t ref_counted(const peri_k_cumsum_args *a, int64_t i)
{
    int64_t x = ref_int(a->x, i, a->x_dtype);
    return a->limit >= 0 && (x < 0 || x > a->limit) ? 0 : x;
}

static void ref_cumsum_sums(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cumsum_args *a = args;
    for (int64_t at = begin; at < end; at++) {
        int64_t r = at / a->blocks, b = at % a->blocks, first = b * PERI_JAGGED_BLOCK,
                last = ref_min(a->cols, first + PERI_JAGGED_BLOCK);
        int64_t sum = 0, bad = INT64_MAX, most = 0;
        for (int64_t c = last - 1; c >= first; c--) {
            int64_t i = r * a->cols + c, x = ref_int(a->x, i, a->x_dtype);
            if (a->limit >= 0 && (x < 0 || x > a->limit)) bad = i;
            if (x > most) most = x;
            sum = ref_add(sum, ref_counted(a, i));
        }
        a->sums[r * (a->blocks + 1) + b] = sum;
        if (a->bad) a->bad[at] = bad;
        if (a->most) a->most[at] = most;
    }
}

static void ref_cumsum_scan(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cumsum_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        int64_t sum = 0, *sums = a->sums + r * (a->blocks + 1);
        for (int64_t b = 0; b < a->blocks; b++) {
            int64_t own = sums[b];
            sums[b] = sum;
            sum = ref_add(sum, own);
        }
        sums[a->blocks] = sum;
    }
}

static void ref_cumsum_write(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cumsum_args *a = args;
    int64_t width = a->mode == PERI_CUMSUM_COMPLETE ? a->cols + 1 : a->cols, cap = a->limit >= 0 ? a->limit : INT64_MAX;
    for (int64_t at = begin; at < end; at++) {
        int64_t r = at / a->blocks, b = at % a->blocks, first = b * PERI_JAGGED_BLOCK,
                last = ref_min(a->cols, first + PERI_JAGGED_BLOCK);
        int64_t sum = a->sums[r * (a->blocks + 1) + b];
        if (a->mode == PERI_CUMSUM_COMPLETE && b == 0) ref_int_set(a->y, r * width, a->y_dtype, 0);
        for (int64_t c = first; c < last; c++) {
            int64_t next = ref_add(sum, ref_counted(a, r * a->cols + c));
            if (a->mode == PERI_CUMSUM_COMPLETE) ref_int_set(a->y, r * width + c + 1, a->y_dtype, ref_min(next, cap));
            else
                ref_int_set(a->y, r * width + c, a->y_dtype,
                            ref_min(a->mode == PERI_CUMSUM_INCLUSIVE ? next : sum, cap));
            sum = next;
        }
    }
}

static void ref_jagged_check(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_check_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t first = b * PERI_JAGGED_BLOCK, last = ref_min(a->bags, first + PERI_JAGGED_BLOCK);
        int64_t bad = INT64_MAX, most = 0;
        for (int64_t i = last - 1; i >= first; i--) {
            int64_t from = ref_int(a->offsets, i, a->offsets_dtype), to = ref_int(a->offsets, i + 1, a->offsets_dtype);
            if (from < 0 || to < from || to > a->limit) {
                bad = i;
                continue;
            }
            if (a->lengths && ref_int(a->lengths, i, a->lengths_dtype) != to - from) bad = i;
            if (to - from > most) most = to - from;
        }
        a->bad[b] = bad;
        a->most[b] = most;
    }
}

static void ref_jagged_report(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_report_args *a = args;
    if (begin >= end) return;
    int64_t bad = INT64_MAX, most = 0;
    for (int64_t b = 0; b < a->blocks; b++) {
        bad = ref_min(bad, a->bad[b]);
        if (a->most[b] > most) most = a->most[b];
    }
    bool any = bad != INT64_MAX;
    a->report[PERI_REPORT_BAD] = any ? bad : -1;
    a->report[PERI_REPORT_LENGTH] = any && a->lengths ? ref_int(a->lengths, bad, a->lengths_dtype) : 0;
    a->report[PERI_REPORT_BEGIN] = any ? ref_int(a->offsets, bad, a->offsets_dtype) : 0;
    a->report[PERI_REPORT_END] = any ? ref_int(a->offsets, bad + 1, a->offsets_dtype) : 0;
    a->report[PERI_REPORT_FIRST] = ref_int(a->offsets, 0, a->offsets_dtype);
    a->report[PERI_REPORT_TOTAL] = a->total ? *a->total : ref_int(a->offsets, a->bags, a->offsets_dtype);
    a->report[PERI_REPORT_MOST] = most;
    for (int64_t i = 0; i < a->n_bounds; i++)
        a->report[PERI_REPORT_HEADER + i] =
            ref_int(a->offsets, a->bounds ? a->bounds[i] : i * a->step, a->offsets_dtype);
}

static void ref_jagged_bounds(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_bounds_args *a = args;
    int64_t base = a->rebase ? ref_int(a->offsets, a->bounds ? a->bounds[0] : 0, a->offsets_dtype) : 0;
    for (int64_t i = begin; i < end; i++)
        ref_int_set(a->out, i, a->out_dtype,
                    ref_int(a->offsets, a->bounds ? a->bounds[i] : i * a->step, a->offsets_dtype) - base);
}

static void ref_jagged_lengths(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_lengths_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t p = a->permute ? ref_int(a->permute, i, a->permute_dtype) : i;
        ref_int_set(a->out, i, a->out_dtype,
                    ref_add(ref_int(a->offsets, p + 1, a->offsets_dtype), -ref_int(a->offsets, p, a->offsets_dtype)));
    }
}

/** Offset t of an array, or of equal steps. */
static inline int64_t ref_offset(const void *offsets, int32_t dtype, int64_t step, int64_t t)
{
    return offsets ? ref_int(offsets, t, dtype) : t * step;
}

/** The last t in [0, segments) with out(t) <= row; rows lie before out(segments). */
static int64_t ref_segment_of(const void *offsets, int32_t dtype, int64_t step, int64_t segments, int64_t row)
{
    if (!offsets) return row / step;
    int64_t low = 0, high = segments;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (ref_int(offsets, middle, dtype) <= row) low = middle;
        else high = middle;
    }
    return low;
}

static void ref_jagged_copy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_copy_args *a = args;
    if (a->segments == 0) return;
    end = ref_min(end, ref_offset(a->out_offsets, a->out_dtype, a->out_step, a->segments));
    for (int64_t row = begin; row < end; row++) {
        int64_t t = ref_segment_of(a->out_offsets, a->out_dtype, a->out_step, a->segments, row);
        int64_t p = a->permute ? ref_int(a->permute, t, a->permute_dtype) : t;
        int64_t at = row - ref_offset(a->out_offsets, a->out_dtype, a->out_step, t);
        int64_t from = ref_offset(a->in_offsets, a->in_dtype, a->in_step, p) + at;
        memcpy((char *)a->dst + row * a->width, (const char *)a->src + from * a->width, (size_t)a->width);
    }
}

static void ref_jagged_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_sum_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        int64_t p = ref_segment_of(a->in_offsets, PERI_I64, 1, a->segments, row),
                at = row - ref_offset(a->in_offsets, PERI_I64, 1, p);
        for (int64_t c = 0; c < a->columns; c++) {
            double wide = 0;
            float sum = 0;
            for (int64_t j = a->list_offsets[p]; j < a->list_offsets[p + 1]; j++) {
                int64_t from = (ref_offset(a->out_offsets, PERI_I64, 1, a->list[j]) + at) * a->columns + c;
                bool first = j == a->list_offsets[p];
                if (a->dtype == PERI_F64)
                    wide = first ? ((const double *)a->src)[from] : wide + ((const double *)a->src)[from];
                else sum = first ? ((const float *)a->src)[from] : sum + ((const float *)a->src)[from];
            }
            if (a->dtype == PERI_F64) ((double *)a->dst)[row * a->columns + c] = wide;
            else ((float *)a->dst)[row * a->columns + c] = sum;
        }
    }
}

static void ref_jagged_to_padded(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_padded_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t from = ref_int(a->offsets, b, a->offsets_dtype),
                n = ref_int(a->offsets, b + 1, a->offsets_dtype) - from;
        char *row = (char *)a->padded + b * a->max * a->width;
        n = ref_min(n, a->max);
        memcpy(row, (const char *)a->values + from * a->width, (size_t)(n * a->width));
        for (int64_t at = n * a->width; at < a->max * a->width; at += a->element)
            memcpy(row + at, a->padding, (size_t)a->element);
    }
}

static void ref_jagged_from_padded(const void *args, int64_t begin, int64_t end)
{
    const peri_k_jagged_padded_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t from = ref_int(a->offsets, b, a->offsets_dtype),
                n = ref_int(a->offsets, b + 1, a->offsets_dtype) - from;
        int64_t kept = ref_min(n, a->max);
        char *row = (char *)a->values + from * a->width;
        memcpy(row, (const char *)a->padded + b * a->max * a->width, (size_t)(kept * a->width));
        memset(row + kept * a->width, 0, (size_t)((n - kept) * a->width));
    }
}

static void ref_columns_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_columns_sum_args *a = args;
    int64_t size = a->dtype == PERI_F64 ? 8 : a->dtype == PERI_F32 ? 4 : 2;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < a->n_items; i++) {
            const int64_t *item = a->items + i * PERI_ITEM_WORDS,
                          *source = a->sources + item[PERI_ITEM_FIRST] * PERI_SOURCE_WORDS;
            char *dst = (char *)(intptr_t)item[PERI_ITEM_DST] + row * item[PERI_ITEM_STRIDE] * size;
            for (int64_t c = 0; c < item[PERI_ITEM_COLUMNS]; c++) {
                ref_value sum = {0};
                float f = 0;
                for (int64_t s = 0; s < item[PERI_ITEM_SOURCES]; s++) {
                    const int64_t *from = source + s * PERI_SOURCE_WORDS;
                    const char *src =
                        (const char *)(intptr_t)from[PERI_SOURCE_ADDRESS] + (row * from[PERI_SOURCE_STRIDE] + c) * size;
                    if (item[PERI_ITEM_SOURCES] == 1) memcpy(dst + c * size, src, (size_t)size);
                    else if (a->dtype == PERI_F64)
                        sum.re = s ? sum.re + ref_load(src, 0, a->dtype).re : ref_load(src, 0, a->dtype).re;
                    else f = s ? f + (float)ref_load(src, 0, a->dtype).re : (float)ref_load(src, 0, a->dtype).re;
                }
                if (a->dtype != PERI_F64) sum.re = f;
                if (item[PERI_ITEM_SOURCES] != 1) ref_store(dst, c, a->dtype, sum);
            }
        }
}
