/* SPDX-License-Identifier: Apache-2.0
 *
 * numbers_fit.c: whether the rows of a table can hold the numbers that are written to them. What does not fit would
 * become NaN, infinite, or another number, without a word: formats of few bits have neither, or small ranges.
 */
#include "embed_internal.h"

#include <math.h>

enum { CHUNK = 1 << 20 }; /* numbers that are brought to the host at a time */

/** What a format holds, for messages. */
static const char *allowed_numbers(int32_t dtype)
{
    switch (dtype) {
    case PERI_ROWS_INT8: return "finite numbers whose range is finite";
    case PERI_ROWS_FP8: return "finite numbers, -240..240";
    case PERI_F16: return "-65504..65504, inf, nan";
    case PERI_BF16: return "-3.3895314e38..3.3895314e38, inf, nan";
    default:
        return "finite numbers whose least, and whose step (the range divided by the codes), fit f16, -65504..65504";
    }
}

/** The largest magnitude that becomes no other number than by rounding; 0: that is a question of whole rows. */
static double largest_number(int32_t dtype)
{
    return dtype == PERI_ROWS_FP8 ? 240 : dtype == PERI_F16 ? 65519.99 : dtype == PERI_BF16 ? 0x1.fefffep127 : 0;
}

/** Whether the row at @x, of which @bytes was made (NULL: nothing), is held. @at: the column to blame, -1: the row. */
static bool row_fits(int32_t dtype, const float *x, int64_t cols, const uint8_t *bytes, int64_t *at)
{
    bool floats = dtype == PERI_F16 || dtype == PERI_BF16;
    double most = largest_number(dtype);
    *at = -1;
    for (int64_t c = 0; c < cols; c++) {
        bool finite = isfinite(x[c]);
        if (finite ? most == 0 || fabsf(x[c]) <= most : floats) continue;
        *at = c;
        return false;
    }
    if (!bytes || dtype == PERI_ROWS_FP8 || cols == 0) return true;
    if (dtype == PERI_ROWS_INT8) {
        float scale;
        memcpy(&scale, bytes + cols, sizeof scale);
        return !isnan(scale);
    }
    uint16_t scale;
    memcpy(&scale, bytes, sizeof scale);
    return (scale & 0x7fff) <= 0x7c00;
}

/** Row @i of those at @place, the numbers @x, is not held. */
static peri_status fail_row(const peri__rows_place *place, int64_t i, const float *x, int64_t cols, int64_t at)
{
    const long long row = (long long)(place->list ? place->list[i] : place->row + i);
    if (at >= 0)
        return peri__fail(
            PERI_ERANGE,
            "%s: table '%.120s', row %lld: its number %lld is %g, which rows of %s do not hold; allowed: %s",
            place->who, place->table, row, (long long)at, isnan(x[at]) ? (double)NAN : (double)x[at],
            peri__data_type_name(place->dtype), allowed_numbers(place->dtype));
    float least = x[0], largest = x[0];
    for (int64_t c = 1; c < cols; c++) {
        least = fminf(least, x[c]);
        largest = fmaxf(largest, x[c]);
    }
    return peri__fail(
        PERI_ERANGE,
        "%s: table '%.120s', row %lld: its numbers go from %g to %g, which rows of %s do not hold; allowed: %s",
        place->who, place->table, row, (double)least, (double)largest, peri__data_type_name(place->dtype),
        allowed_numbers(place->dtype));
}

/** Rows [begin, end) of @t in host memory: where they are, or read into @room. */
static peri_status on_host(peri_tensor *t, int64_t begin, int64_t end, void *room, const void **out)
{
    int64_t bytes = t->shape[1] * peri_dtype_size(t->dtype);
    if (peri__immediate(peri__device(t))) {
        *out = (const char *)peri__data(t) + begin * bytes;
        return PERI_OK;
    }
    peri_tensor *part;
    PERI_TRY(peri_tensor_slice(t, 0, begin, end, 1, &part));
    peri_status status = peri_tensor_read(part, room, (end - begin) * bytes);
    peri_tensor_release(part);
    *out = room;
    return status;
}

peri_status peri__check_numbers_fit(const peri__rows_place *place, peri_tensor *numbers, peri_tensor *bytes)
{
    int64_t rows = numbers->shape[0], cols = numbers->shape[1], width = bytes ? bytes->shape[1] : 0, at;
    int64_t step = peri__max(1, CHUNK / peri__max(cols, 1));
    float *room = peri__alloc(sizeof *room * (size_t)peri__max(1, step * cols));
    uint8_t *more = peri__alloc((size_t)peri__max(1, step * width));
    peri_status status = room && more ? PERI_OK : PERI_ENOMEM;
    for (int64_t begin = 0; begin < rows && status >= 0; begin += step) {
        int64_t end = peri__min(rows, begin + step);
        const void *x = NULL, *codes = NULL;
        status = on_host(numbers, begin, end, room, &x);
        if (status >= 0 && bytes) status = on_host(bytes, begin, end, more, &codes);
        for (int64_t r = 0; r < end - begin && status >= 0; r++) {
            const float *own = (const float *)x + r * cols;
            if (!row_fits(place->dtype, own, cols, codes ? (const uint8_t *)codes + r * width : NULL, &at))
                status = fail_row(place, begin + r, own, cols, at);
        }
    }
    peri__free(room);
    peri__free(more);
    return status;
}

peri_status peri__encode_rows(const peri__rows_place *place, peri_tensor *numbers, peri_tensor **out)
{
    const bool floats = peri__small_float(place->dtype);
    const peri_row_format format = peri__tbe_row_format(place->dtype);
    const bool scaled = !floats && format.scale_dtype >= 0; /* what they hold is known of the bytes */
    PERI__HELD peri_tensor *wide = NULL, *flat = NULL, *made = NULL;
    PERI_TRY(peri_tensor_to(numbers, PERI_F32, NULL, &wide));
    PERI_TRY(peri_tensor_contiguous(wide, &flat));
    if (!scaled && place->dtype != PERI_F32) PERI_TRY(peri__check_numbers_fit(place, flat, NULL));
    PERI_TRY(floats ? peri_tensor_to(flat, place->dtype, NULL, &made)
                    : peri_quantize_rows(flat, &format, NULL, &made));
    if (scaled) PERI_TRY(peri__check_numbers_fit(place, flat, made));
    *out = peri__hand_over(&made);
    return PERI_OK;
}

peri_status peri_rows_encode(const char *table, int32_t dtype, int64_t row, peri_tensor *x, peri_tensor **out)
{
    PERI_NEED(table);
    PERI_NEED(x);
    PERI_NEED(out);
    if (!peri_row_format_name(dtype))
        return peri__fail(PERI_EINVAL, "peri_rows_encode: no table has rows of dtype %d", dtype);
    if (x->ndim != 2 || !peri__small_float(x->dtype))
        return peri__fail(PERI_EINVAL, "peri_rows_encode: numbers are %s of %d dimensions, wanted: f32, f16, bf16 of 2",
                          peri_dtype_name(x->dtype), x->ndim);
    const peri__rows_place place = {.who = "peri_rows_encode", .table = table, .dtype = dtype, .row = row};
    return peri__encode_rows(&place, x, out);
}

peri_status peri__check_floats_fit(const char *function, const peri_tbe *tbe, int64_t table, int64_t row,
                              const peri_tensor *src)
{
    bool narrow = tbe->dtype == PERI_F16 || tbe->dtype == PERI_BF16;
    bool within = src->dtype == tbe->dtype || src->dtype == PERI_F16; /* BF16's range holds F16's */
    if (!narrow || within || src->ndim != 2) return PERI_OK;
    /* training does not wait for it */
    if (tbe->optimizer.kind != PERI_TBE_NONE && !peri__immediate(peri__device(src))) return PERI_OK;
    peri_tensor *numbers = NULL, *flat = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_to((peri_tensor *)src, PERI_F32, NULL, &numbers), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(numbers, &flat), out);
    const peri__rows_place place = {
        .who = function, .table = tbe->tables[table].name, .dtype = tbe->dtype, .row = row};
    status = peri__check_numbers_fit(&place, flat, NULL);
out:
    peri_tensor_release(numbers);
    peri_tensor_release(flat);
    return status;
}
