/* SPDX-License-Identifier: Apache-2.0
 *
 * making.c: tensors of numbers by chance that have more bits than one draw, and of places in a matrix.
 */
#include "tensor_internal.h"
#include "../../kernels/dense.h"

#include <math.h>

peri_status peri_tensor_uniform_words(peri_device *device, int32_t ndim, const int64_t *shape, int32_t words,
                                      uint64_t seed, uint64_t stream, peri_tensor **out)
{
    PERI__HELD peri_tensor *sum = NULL;
    PERI__NOT_AT_BORDER;
    PERI_NEED(out);
    if (words < 1 || words > 3)
        return peri__fail(PERI_EINVAL, "peri_tensor_uniform_words: %d words, allowed: 1..3", words);
    /* A word of 24 bits is the same number in both. Many are drawn faster in f32 and cast, few without the cast. */
    enum { FEW = 1 << 10 };
    int64_t n = 1;
    for (int32_t d = 0; shape && d < ndim && n <= FEW; d++) n *= peri__max(shape[d], 1);
    const int32_t dtype = n <= FEW ? PERI_F64 : PERI_F32;
    for (int32_t k = 0; k < words; k++) {
        PERI__HELD peri_tensor *drawn = NULL, *wide = NULL;
        PERI_TRY(peri_tensor_uniform(device, dtype, ndim, shape, 0, 1, seed, stream + (uint64_t)k, &drawn));
        PERI_TRY(peri__cast(drawn, PERI_F64, &wide));
        if (k == 0) {
            sum = peri__hand_over(&wide);
            continue;
        }
        peri_k_axpy_args args = {.y = peri__data(sum), .x = peri__data(wide), .dtype = PERI_F64,
                                 .alpha = ldexp(1, -24 * k)};
        PERI_TRY(PERI_LAUNCH(peri__device(sum), axpy, &args, peri__numel(sum), 1 << 15));
    }
    *out = peri__hand_over(&sum);
    return PERI_OK;
}

/** The columns [*first, *last) of row @row that peri_tensor_triangle_places names. */
static void triangle_row(int64_t row, int64_t columns, int64_t k, bool upper, int64_t *first, int64_t *last)
{
    const int64_t diagonal = row + k;
    *first = upper ? peri__min(peri__max(diagonal, 0), columns) : 0;
    *last = upper ? columns : peri__min(peri__max(diagonal + 1, 0), columns);
}

peri_status peri_tensor_triangle_places(peri_device *device, int64_t rows, int64_t columns, int64_t k, bool upper,
                                        peri_tensor **out)
{
    const int64_t most = (int64_t)1 << 53;
    int64_t shape[2] = {2, 0}, first, last;
    PERI__HELD peri_tensor *t = NULL;
    PERI_NEED(out);
    if (rows < 0 || columns < 0 || rows > most || columns > most || k < -most || k > most)
        return peri__fail(PERI_ERANGE,
                          "peri_tensor_triangle_places: %lld x %lld from the diagonal %lld, allowed: sizes 0..2^53, "
                          "diagonals -2^53..2^53",
                          (long long)rows, (long long)columns, (long long)k);
    for (int64_t r = 0; r < rows; r++) {
        triangle_row(r, columns, k, upper, &first, &last);
        if (__builtin_add_overflow(shape[1], last - first, &shape[1]))
            return peri__fail(PERI_ERANGE, "peri_tensor_triangle_places: 2^63 places or more");
    }
    PERI_TRY(peri_tensor_new(device, PERI_I64, 2, shape, &t));
    const size_t bytes = sizeof(int64_t) * 2 * (size_t)shape[1];
    int64_t *places = peri__alloc(bytes ? bytes : 1), *at = places;
    if (!places) return PERI_ENOMEM;
    for (int64_t r = 0; r < rows; r++) {
        triangle_row(r, columns, k, upper, &first, &last);
        for (int64_t c = first; c < last; c++, at++) at[0] = r, at[shape[1]] = c;
    }
    const peri_status status = peri_tensor_write(t, places, (int64_t)bytes);
    peri__free(places);
    if (status >= 0) *out = peri__hand_over(&t);
    return status;
}
