/* SPDX-License-Identifier: Apache-2.0
 *
 * elements.c (ref): see kernels/elements.h. What has strides is done by rows, a row being the last dimension.
 */
#include "../order.h"

static int64_t ref_cols(int32_t ndim, const int64_t *shape) { return ndim ? shape[ndim - 1] : 1; }
static int64_t ref_step(int32_t ndim, const int64_t *stride) { return ndim ? stride[ndim - 1] : 0; }

/** Where row @row begins. */
static int64_t ref_row_place(int64_t row, int32_t ndim, const int64_t *shape, const int64_t *stride)
{
    int64_t at = 0;
    for (int32_t d = ndim - 2; d >= 0; d--) {
        at += row % shape[d] * stride[d];
        row /= shape[d];
    }
    return at;
}

/** For each part of a row of the range [begin, end) of elements: columns [first, last) of row `row`, the first being
 *  element i. */
#define REF_ROWS(cols)                                                                                                 \
    for (int64_t i = begin, row = begin / (cols), first = begin % (cols), last; i < end;                               \
         i += last - first, row++, first = 0)                                                                          \
        if ((last = first + (end - i) < (cols) ? first + (end - i) : (cols)), 1)

/** x > y is y < x: those of greater have x and y in each other's place, and no loops of their own. */
#define REF_COMPARE(T, LOAD, NUMBER)                                                                                   \
    do {                                                                                                               \
        const T number = (T)(NUMBER), *p = (const T *)a->a + at_a, *q = a->b ? (const T *)a->b + at_b : &number;       \
        const T *x = greater ? q : p, *y = greater ? p : q;                                                            \
        switch (op) {                                                                                                  \
        case PERI_COMPARE_EQ:                                                                                          \
            for (int64_t c = 0; c < n; c++) dst[c] = LOAD(x[c * sx]) == LOAD(y[c * sy]);                               \
            break;                                                                                                     \
        case PERI_COMPARE_NE:                                                                                          \
            for (int64_t c = 0; c < n; c++) dst[c] = LOAD(x[c * sx]) != LOAD(y[c * sy]);                               \
            break;                                                                                                     \
        case PERI_COMPARE_LT:                                                                                          \
            for (int64_t c = 0; c < n; c++) dst[c] = LOAD(x[c * sx]) < LOAD(y[c * sy]);                                \
            break;                                                                                                     \
        default:                                                                                                       \
            for (int64_t c = 0; c < n; c++) dst[c] = LOAD(x[c * sx]) <= LOAD(y[c * sy]);                               \
            break;                                                                                                     \
        }                                                                                                              \
    } while (0)
#define REF_SAME(x) (x)

static void ref_compare(const void *args, int64_t begin, int64_t end)
{
    const peri_k_compare_args *a = args;
    const int64_t cols = ref_cols(a->ndim, a->shape), sa = ref_step(a->ndim, a->a_stride);
    const int64_t sb = a->b ? ref_step(a->ndim, a->b_stride) : 0;
    const bool greater = a->op == PERI_COMPARE_GT || a->op == PERI_COMPARE_GE;
    const int32_t op = a->op == PERI_COMPARE_GT ? PERI_COMPARE_LT : a->op == PERI_COMPARE_GE ? PERI_COMPARE_LE : a->op;
    const int64_t sx = greater ? sb : sa, sy = greater ? sa : sb;
    REF_ROWS(cols)
    {
        const int64_t n = last - first, at_a = ref_row_place(row, a->ndim, a->shape, a->a_stride) + first * sa;
        const int64_t at_b = a->b ? ref_row_place(row, a->ndim, a->shape, a->b_stride) + first * sb : 0;
        uint8_t *dst = a->dst + i;
        switch (a->dtype) {
        case PERI_F64: REF_COMPARE(double, REF_SAME, a->value); break;
        case PERI_F16: REF_COMPARE(uint16_t, k_f16_to_f32, k_f32_to_f16((float)a->value)); break;
        case PERI_BF16: REF_COMPARE(uint16_t, k_bf16_to_f32, k_f32_to_bf16((float)a->value)); break;
        case PERI_I64: REF_COMPARE(int64_t, REF_SAME, a->integer); break;
        case PERI_I32: REF_COMPARE(int32_t, REF_SAME, a->integer); break;
        case PERI_I16: REF_COMPARE(int16_t, REF_SAME, a->integer); break;
        case PERI_I8: REF_COMPARE(int8_t, REF_SAME, a->integer); break;
        case PERI_U8:
        case PERI_BOOL: REF_COMPARE(uint8_t, REF_SAME, a->integer); break;
        default: REF_COMPARE(float, REF_SAME, a->value); break;
        }
    }
}

#define REF_INTEGER(T)                                                                                                 \
    do {                                                                                                               \
        const T *x = (const T *)a->a + at_a, *y = (const T *)a->b + at_b;                                              \
        T *dst = (T *)a->dst + i;                                                                                      \
        for (int64_t c = 0; c < n; c++) dst[c] = (T)peri_integer(a->op, x[c * sa], y[c * sb]);                         \
    } while (0)

static void ref_integer(const void *args, int64_t begin, int64_t end)
{
    const peri_k_binary_args *a = args;
    const int64_t cols = ref_cols(a->ndim, a->shape), sa = ref_step(a->ndim, a->a_stride),
                  sb = ref_step(a->ndim, a->b_stride);
    REF_ROWS(cols)
    {
        const int64_t n = last - first, at_a = ref_row_place(row, a->ndim, a->shape, a->a_stride) + first * sa;
        const int64_t at_b = ref_row_place(row, a->ndim, a->shape, a->b_stride) + first * sb;
        switch (a->dtype) {
        case PERI_I64: REF_INTEGER(int64_t); break;
        case PERI_I32: REF_INTEGER(int32_t); break;
        case PERI_I16: REF_INTEGER(int16_t); break;
        case PERI_I8: REF_INTEGER(int8_t); break;
        default: REF_INTEGER(uint8_t); break;
        }
    }
}

#define REF_WHOLE_PRODUCT(T)                                                                                           \
    do {                                                                                                               \
        const T *x = (const T *)a->a + at_a, *y = (const T *)a->b + at_b;                                              \
        T *dst = (T *)a->dst + r * a->cols;                                                                            \
        for (int64_t c = 0; c < a->cols; c++) dst[c] = 0;                                                              \
        for (int64_t i = 0; i < a->k; i++)                                                                             \
            for (int64_t c = 0; c < a->cols; c++)                                                                      \
                dst[c] = (T)((uint64_t)dst[c] + (uint64_t)x[i * a->a_col] * (uint64_t)y[i * a->b_row + c * a->b_col]); \
    } while (0)

static void ref_integer_product(const void *args, int64_t begin, int64_t end)
{
    const peri_k_integer_product_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        int64_t rest = r / a->rows, at_a = r % a->rows * a->a_row, at_b = 0;
        for (int32_t d = a->ndim - 1; d >= 0; d--) {
            at_a += rest % a->shape[d] * a->a_stride[d];
            at_b += rest % a->shape[d] * a->b_stride[d];
            rest /= a->shape[d];
        }
        switch (a->dtype) {
        case PERI_I64: REF_WHOLE_PRODUCT(int64_t); break;
        case PERI_I32: REF_WHOLE_PRODUCT(int32_t); break;
        case PERI_I16: REF_WHOLE_PRODUCT(int16_t); break;
        case PERI_I8: REF_WHOLE_PRODUCT(int8_t); break;
        default: REF_WHOLE_PRODUCT(uint8_t); break;
        }
    }
}

/** An element of 16 bytes. */
typedef struct ref_wide16 {
    uint64_t half[2];
} ref_wide16;

#define REF_WHERE(T)                                                                                                   \
    do {                                                                                                               \
        static const T zero;                                                                                           \
        const T *x = a->a ? (const T *)a->a + at_a : &zero, *y = a->b ? (const T *)a->b + at_b : &zero;                \
        T *dst = (T *)a->dst + i;                                                                                      \
        for (int64_t c = 0; c < n; c++) dst[c] = condition[c * sc] ? x[c * sa] : y[c * sb];                            \
    } while (0)

static void ref_where(const void *args, int64_t begin, int64_t end)
{
    const peri_k_where_args *a = args;
    const int64_t cols = ref_cols(a->ndim, a->shape), sc = ref_step(a->ndim, a->condition_stride);
    const int64_t sa = a->a ? ref_step(a->ndim, a->a_stride) : 0, sb = a->b ? ref_step(a->ndim, a->b_stride) : 0;
    REF_ROWS(cols)
    {
        const int64_t n = last - first;
        const int64_t at_a = a->a ? ref_row_place(row, a->ndim, a->shape, a->a_stride) + first * sa : 0;
        const int64_t at_b = a->b ? ref_row_place(row, a->ndim, a->shape, a->b_stride) + first * sb : 0;
        const uint8_t *condition =
            a->condition + ref_row_place(row, a->ndim, a->shape, a->condition_stride) + first * sc;
        switch (a->width) {
        case 1: REF_WHERE(uint8_t); break;
        case 2: REF_WHERE(uint16_t); break;
        case 4: REF_WHERE(uint32_t); break;
        case 8: REF_WHERE(uint64_t); break;
        default: REF_WHERE(ref_wide16); break;
        }
    }
}

#define REF_TAKE(T)                                                                                                    \
    do {                                                                                                               \
        const T *src = (const T *)a->src + at;                                                                         \
        T *dst = (T *)a->dst + i;                                                                                      \
        for (int64_t c = 0; c < n; c++) dst[c] = src[c * ss + index[c * si] * along];                                  \
    } while (0)

static void ref_take(const void *args, int64_t begin, int64_t end)
{
    const peri_k_take_args *a = args;
    int64_t stride[PERI_MAX_DIMS], along = a->src_stride[a->dim];
    memcpy(stride, a->src_stride, sizeof stride);
    stride[a->dim] = 0;
    const int64_t cols = ref_cols(a->ndim, a->shape), ss = ref_step(a->ndim, stride),
                  si = ref_step(a->ndim, a->index_stride);
    REF_ROWS(cols)
    {
        const int64_t n = last - first, at = ref_row_place(row, a->ndim, a->shape, stride) + first * ss;
        const int64_t *index = a->index + ref_row_place(row, a->ndim, a->shape, a->index_stride) + first * si;
        switch (a->width) {
        case 1: REF_TAKE(uint8_t); break;
        case 2: REF_TAKE(uint16_t); break;
        case 4: REF_TAKE(uint32_t); break;
        case 8: REF_TAKE(uint64_t); break;
        default: REF_TAKE(ref_wide16); break;
        }
    }
}

#define REF_ADD_OR_PUT(T, Sum)                                                                                         \
    do {                                                                                                               \
        T *to_ = (T *)a->dst + at;                                                                                     \
        const T x_ = ((const T *)a->src)[src + j * from];                                                              \
        *to_ = a->put ? x_ : (T)((Sum)*to_ + (Sum)x_);                                                                 \
    } while (0)

static void ref_take_add(const void *args, int64_t begin, int64_t end)
{
    const peri_k_take_add_args *a = args;
    const int64_t to = a->dst_stride[a->dim], from = a->src_stride[a->dim], by = a->index_stride[a->dim];
    for (int64_t u = begin; u < end; u++) {
        int64_t rest = u, dst = 0, src = 0, index = 0;
        for (int32_t d = a->ndim - 1; d >= 0; d--) {
            if (d == a->dim) continue;
            const int64_t at = rest % a->shape[d];
            rest /= a->shape[d];
            dst += at * a->dst_stride[d];
            src += at * a->src_stride[d];
            index += at * a->index_stride[d];
        }
        for (int64_t j = 0; j < a->shape[a->dim]; j++) {
            const int64_t at = dst + a->index[index + j * by] * to;
            switch (a->dtype) {
            case PERI_F64: REF_ADD_OR_PUT(double, double); break;
            case PERI_I64: REF_ADD_OR_PUT(int64_t, uint64_t); break;
            default: REF_ADD_OR_PUT(float, float); break;
            }
        }
    }
}

#define REF_RUNNING(T, Sum)                                                                                            \
    do {                                                                                                               \
        const T *x = (const T *)a->x + at;                                                                             \
        T *y = (T *)a->y + at;                                                                                         \
        Sum sum = 0;                                                                                                   \
        for (int64_t r = 0; r < a->n; r++) y[r * by] = (T)(sum += (Sum)x[r * by]);                                     \
    } while (0)

static void ref_running_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_running_sum_args *a = args;
    const int64_t by = a->backwards ? -a->inner : a->inner;
    for (int64_t u = begin; u < end; u++) {
        const int64_t base = u / a->inner * a->n * a->inner + u % a->inner,
                      at = a->backwards ? base + (a->n - 1) * a->inner : base;
        switch (a->dtype) {
        case PERI_F64: REF_RUNNING(double, double); break;
        case PERI_I64: REF_RUNNING(int64_t, uint64_t); break;
        default: REF_RUNNING(float, double); break;
        }
    }
}

#define REF_RUNNING_PRODUCT(T, Product)                                                                                \
    do {                                                                                                               \
        const T *x = (const T *)a->x + at;                                                                             \
        T *y = (T *)a->y + at;                                                                                         \
        Product product = 1;                                                                                           \
        for (int64_t r = 0; r < a->n; r++) y[r * a->inner] = (T)(product *= (Product)x[r * a->inner]);                 \
    } while (0)

static void ref_running_product(const void *args, int64_t begin, int64_t end)
{
    const peri_k_product_dim_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        const int64_t at = u / a->inner * a->n * a->inner + u % a->inner;
        switch (a->dtype) {
        case PERI_F64: REF_RUNNING_PRODUCT(double, double); break;
        case PERI_I64: REF_RUNNING_PRODUCT(int64_t, uint64_t); break;
        default: REF_RUNNING_PRODUCT(float, double); break;
        }
    }
}

/** On the way down dx gets what stands before each element; on the way up `behind` is the sum of what stands after it,
 *  each with its gradient. */
#define REF_RUNNING_PRODUCT_GRAD(T)                                                                                    \
    do {                                                                                                               \
        const T *x = (const T *)a->x + at, *dy = (const T *)a->dy + at;                                                \
        T *dx = (T *)a->dx + at;                                                                                       \
        double before = 1, behind = 0;                                                                                 \
        for (int64_t r = 0; r < a->n; r++) {                                                                           \
            dx[r * a->inner] = (T)before;                                                                              \
            before *= (double)x[r * a->inner];                                                                         \
        }                                                                                                              \
        for (int64_t r = a->n - 1; r >= 0; r--) {                                                                      \
            behind += (double)dy[r * a->inner];                                                                        \
            dx[r * a->inner] = (T)((double)dx[r * a->inner] * behind);                                                 \
            behind *= (double)x[r * a->inner];                                                                         \
        }                                                                                                              \
    } while (0)

static void ref_running_product_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_product_dim_grad_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        const int64_t at = u / a->inner * a->n * a->inner + u % a->inner;
        if (a->dtype == PERI_F64) REF_RUNNING_PRODUCT_GRAD(double);
        else REF_RUNNING_PRODUCT_GRAD(float);
    }
}

static void ref_search(const void *args, int64_t begin, int64_t end)
{
    const peri_k_search_args *a = args;
    for (int64_t i = begin; i < end; i++)
        a->dst[i] = k_search(a->sorted, a->one ? 0 : i / a->per_line * a->n, a->n, a->x, i, a->dtype, a->right);
}

static void ref_iota(const void *args, int64_t begin, int64_t end)
{
    const peri_k_iota_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        const double x = a->start + (double)i * a->step;
        const int64_t integer = a->integer_start + i * a->integer_step;
        switch (a->dtype) {
        case PERI_F64: ((double *)a->dst)[i] = x; break;
        case PERI_I64: ((int64_t *)a->dst)[i] = integer; break;
        case PERI_I32: ((int32_t *)a->dst)[i] = (int32_t)integer; break;
        default: ((float *)a->dst)[i] = (float)x; break;
        }
    }
}

/* -- running extremes ---------------------------------------------------------------------------------------------- */

/** Bytes of an element. */
static size_t ref_width(int32_t dtype)
{
    return dtype == PERI_F64 || dtype == PERI_I64                       ? 8
           : dtype == PERI_F32 || dtype == PERI_I32                     ? 4
           : dtype == PERI_I8 || dtype == PERI_U8 || dtype == PERI_BOOL ? 1
                                                                        : 2;
}

static void ref_running_extreme(const void *args, int64_t begin, int64_t end)
{
    const peri_k_running_extreme_args *a = args;
    const size_t width = ref_width(a->dtype);
    for (int64_t u = begin; u < end; u++) {
        const int64_t base = u / a->inner * a->n * a->inner + u % a->inner;
        int64_t best = base;
        for (int64_t r = 0; r < a->n; r++) {
            const int64_t at = base + r * a->inner;
            if (k_is_extreme(a->x, at, best, a->dtype, a->least)) best = at;
            a->indices[at] = (best - base) / a->inner;
            memcpy((char *)a->values + (size_t)at * width, (const char *)a->x + (size_t)best * width, width);
        }
    }
}

/* -- numbers of bins, coordinates ---------------------------------------------------------------------------------- */

#define REF_BINS(T, LOAD, BIN, Real)                                                                                   \
    do {                                                                                                               \
        const T *x = a->x;                                                                                             \
        const Real least = (Real)a->least, most = (Real)a->most;                                                       \
        for (int64_t i = begin; i < end; i++) a->dst[i] = BIN(LOAD(x[i]), least, most, a->bins);                       \
    } while (0)

static void ref_bin_number(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bin_args *a = args;
    switch (a->dtype) {
    case PERI_F64: REF_BINS(double, REF_SAME, k_bin_f64, double); break;
    case PERI_F16: REF_BINS(uint16_t, k_f16_to_f32, k_bin_f32, float); break;
    case PERI_BF16: REF_BINS(uint16_t, k_bf16_to_f32, k_bin_f32, float); break;
    case PERI_I64: REF_BINS(int64_t, (double), k_bin_f64, double); break;
    case PERI_I32: REF_BINS(int32_t, REF_SAME, k_bin_f64, double); break;
    case PERI_I16: REF_BINS(int16_t, REF_SAME, k_bin_f64, double); break;
    case PERI_I8: REF_BINS(int8_t, REF_SAME, k_bin_f64, double); break;
    case PERI_U8:
    case PERI_BOOL: REF_BINS(uint8_t, REF_SAME, k_bin_f64, double); break;
    default: REF_BINS(float, REF_SAME, k_bin_f32, float); break;
    }
}

static void ref_unravel(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unravel_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t rest = a->flat[i];
        for (int32_t d = a->ndim - 1; d > 0; d--) {
            a->dst[i * a->ndim + d] = rest % a->shape[d];
            rest /= a->shape[d];
        }
        a->dst[i * a->ndim] = rest;
    }
}

static void ref_mode_line(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mode_args *a = args;
    const size_t width = ref_width(a->dtype);
    for (int64_t l = begin; l < end; l++) {
        const int64_t at = l * a->n + k_longest_run(a->sorted, l * a->n, a->n, a->dtype);
        a->indices[l] = a->places[at];
        memcpy((char *)a->values + (size_t)l * width, (const char *)a->sorted + (size_t)at * width, width);
    }
}

#define REF_IN_BATCH_ROW(T)                                                                                            \
    do {                                                                                                               \
        const T *x = (const T *)a->x + i * a->n, *log_q = a->log_q, scale = (T)a->scale;                               \
        T *dst = (T *)a->dst + i * a->n;                                                                               \
        if (log_q)                                                                                                     \
            for (int64_t j = 0; j < a->n; j++) dst[j] = x[j] * scale - log_q[j];                                       \
        else                                                                                                           \
            for (int64_t j = 0; j < a->n; j++) dst[j] = x[j] * scale;                                                  \
        for (int64_t j = 0; a->ids && j < a->n; j++)                                                                   \
            if (a->ids[j] == a->ids[i] && j != i) dst[j] = (T)a->fill;                                                 \
    } while (0)

static void ref_in_batch_logits(const void *args, int64_t begin, int64_t end)
{
    const peri_k_in_batch_logits_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        if (a->dtype == PERI_F64) REF_IN_BATCH_ROW(double);
        else REF_IN_BATCH_ROW(float);
    }
}

/* -- sums of integers, triangles, members -------------------------------------------------------------------------- */

/** Row k of block sums @o is dst[@from..@to) of it; rows of x are added to it one after the other. */
#define REF_INTEGER_SUM(T)                                                                                             \
    do {                                                                                                               \
        const T *x = (const T *)a->x + (o * a->n + k * a->block) * a->inner;                                           \
        if (a->inner == 1) {                                                                                           \
            uint64_t sum = 0;                                                                                          \
            for (int64_t r = 0; r < rows; r++) sum += (uint64_t)x[r];                                                  \
            dst[0] = (int64_t)sum;                                                                                     \
        } else {                                                                                                       \
            memset(dst + from, 0, sizeof *dst * (size_t)(to - from));                                                  \
            for (int64_t r = 0; r < rows; r++)                                                                         \
                for (int64_t i = from; i < to; i++)                                                                    \
                    dst[i] = (int64_t)((uint64_t)dst[i] + (uint64_t)x[r * a->inner + i]);                              \
        }                                                                                                              \
    } while (0)

static void ref_integer_sum(const void *args, int64_t begin, int64_t end)
{
    const peri_k_integer_sum_args *a = args;
    for (int64_t u = begin, next; u < end; u = next) {
        const int64_t line = u / a->inner, o = line / a->blocks, k = line % a->blocks, left = a->n - k * a->block,
                      rows = left < a->block ? left : a->block, from = u - line * a->inner;
        next = (line + 1) * a->inner < end ? (line + 1) * a->inner : end;
        const int64_t to = from + next - u;
        int64_t *dst = a->dst + line * a->inner;
        switch (a->dtype) {
        case PERI_I64: REF_INTEGER_SUM(int64_t); break;
        case PERI_I32: REF_INTEGER_SUM(int32_t); break;
        case PERI_I16: REF_INTEGER_SUM(int16_t); break;
        case PERI_I8: REF_INTEGER_SUM(int8_t); break;
        default: REF_INTEGER_SUM(uint8_t); break;
        }
    }
}

static void ref_fill_with(char *dst, int64_t n, const uint8_t *fill, size_t width)
{
    for (int64_t i = 0; i < n; i++) memcpy(dst + (size_t)i * width, fill, width);
}

static void ref_triangle(const void *args, int64_t begin, int64_t end)
{
    const peri_k_triangle_args *a = args;
    const size_t width = (size_t)a->width;
    for (int64_t row = begin; row < end; row++) {
        const int64_t at = row % a->rows + a->k + (a->upper ? 0 : 1); /* the column where what is kept begins or ends */
        const int64_t cut = at < 0 ? 0 : at > a->cols ? a->cols : at;
        const int64_t from = a->upper ? cut : 0, to = a->upper ? a->cols : cut;
        const char *x = (const char *)a->x + (size_t)(row * a->cols) * width;
        char *dst = (char *)a->dst + (size_t)(row * a->cols) * width;
        ref_fill_with(dst, from, a->fill, width);
        memcpy(dst + (size_t)from * width, x + (size_t)from * width, (size_t)(to - from) * width);
        ref_fill_with(dst + (size_t)to * width, a->cols - to, a->fill, width);
    }
}

static void ref_member(const void *args, int64_t begin, int64_t end)
{
    const peri_k_member_args *a = args;
    for (int64_t i = begin; i < end; i++) a->dst[i] = k_is_member(a->sorted, a->n, a->x, i, a->dtype);
}

/* -- cosines ------------------------------------------------------------------------------------------------------- */

/** Sums are made of eight, so that they fit into vectors. */
#define REF_COSINE(T)                                                                                                  \
    do {                                                                                                               \
        const T *x = (const T *)a->a + r * a->cols, *z = (const T *)a->b + r * a->cols;                                \
        double ab[8] = {0}, aa[8] = {0}, bb[8] = {0};                                                                  \
        for (int64_t c = 0; c < a->cols; c += 8)                                                                       \
            for (int64_t i = 0; i < (a->cols - c < 8 ? a->cols - c : 8); i++) {                                        \
                const double p = (double)x[c + i], q = (double)z[c + i];                                               \
                ab[i] += p * q, aa[i] += p * p, bb[i] += q * q;                                                        \
            }                                                                                                          \
        for (int i = 1; i < 8; i++) ab[0] += ab[i], aa[0] += aa[i], bb[0] += bb[i];                                    \
        ((T *)a->y)[r] = (T)(ab[0] * k_cosine_sizes(aa[0], bb[0], a->eps, a->added, a->sizes + 4 * r));                \
    } while (0)

static void ref_cosine(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cosine_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        if (a->dtype == PERI_F64) REF_COSINE(double);
        else REF_COSINE(float);
    }
}

#define REF_COSINE_GRAD(T)                                                                                             \
    do {                                                                                                               \
        const double *size = a->sizes + 4 * r, g = (double)((const T *)a->dy)[r], y = (double)((const T *)a->y)[r];    \
        const double both = g * (size[0] * size[1]), of_a = g * (y * size[2]), of_b = g * (y * size[3]);               \
        const T *x = (const T *)a->a + r * a->cols, *z = (const T *)a->b + r * a->cols;                                \
        T *da = a->da, *db = a->db;                                                                                    \
        for (int64_t c = 0; da && c < a->cols; c++)                                                                    \
            da[r * a->cols + c] = (T)(both * (double)z[c] - of_a * (double)x[c]);                                      \
        for (int64_t c = 0; db && c < a->cols; c++)                                                                    \
            db[r * a->cols + c] = (T)(both * (double)x[c] - of_b * (double)z[c]);                                      \
    } while (0)

static void ref_cosine_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cosine_grad_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        if (a->dtype == PERI_F64) REF_COSINE_GRAD(double);
        else REF_COSINE_GRAD(float);
    }
}

/* -- sorting: merges of runs, or by bytes of keys; both keep the order of equal keys ------------------------------- */

enum {
    REF_SORT_RUN = 16,   /* entries of a run that insertion sorts */
    REF_SORT_BYTES = 512 /* entries from which sorting by bytes is faster than merging */
};

static void ref_sort_run(peri_k_sort_entry *e, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        const peri_k_sort_entry x = e[i];
        int64_t j = i;
        for (; j > 0 && e[j - 1].key > x.key; j--) e[j] = e[j - 1];
        e[j] = x;
    }
}

static peri_k_sort_entry *ref_sort_merge(peri_k_sort_entry *e, peri_k_sort_entry *spare, int64_t n)
{
    for (int64_t i = 0; i < n; i += REF_SORT_RUN) ref_sort_run(e + i, n - i < REF_SORT_RUN ? n - i : REF_SORT_RUN);
    for (int64_t run = REF_SORT_RUN; run < n; run *= 2) {
        for (int64_t at = 0; at < n; at += 2 * run) {
            int64_t x = at, middle = at + run < n ? at + run : n, y = middle, end = at + 2 * run < n ? at + 2 * run : n;
            for (int64_t i = at; i < end; i++)
                spare[i] = x < middle && (y == end || e[x].key <= e[y].key) ? e[x++] : e[y++];
        }
        peri_k_sort_entry *swap = e;
        e = spare;
        spare = swap;
    }
    return e;
}

/** From the lowest byte of the keys to the highest: entries are put in the order of the byte, those of one value in the
 *  order that they have. A byte that is the same in all keys is passed over. */
static peri_k_sort_entry *ref_sort_bytes(peri_k_sort_entry *e, peri_k_sort_entry *spare, int64_t n)
{
    int64_t count[8][256] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int32_t b = 0; b < 8; b++) count[b][e[i].key >> 8 * b & 255]++;
    for (int32_t b = 0; b < 8; b++) {
        int64_t at = 0;
        if (count[b][e[0].key >> 8 * b & 255] == n) continue;
        for (int32_t v = 0; v < 256; v++) {
            const int64_t of_v = count[b][v];
            count[b][v] = at;
            at += of_v;
        }
        for (int64_t i = 0; i < n; i++) spare[count[b][e[i].key >> 8 * b & 255]++] = e[i];
        peri_k_sort_entry *swap = e;
        e = spare;
        spare = swap;
    }
    return e;
}

/** The entries e[n] in order, in e or in spare[n]. */
static peri_k_sort_entry *ref_sort_entries(peri_k_sort_entry *e, peri_k_sort_entry *spare, int64_t n)
{
    return n < REF_SORT_BYTES ? ref_sort_merge(e, spare, n) : ref_sort_bytes(e, spare, n);
}

/** The first k of the entries of a line in order, e[k], k >= 1: most of the n elements only look at the last of
 *  them. */
static void ref_sort_first(const peri_op_sort_lines *s, int64_t line, peri_k_sort_entry *e)
{
    int64_t have = 0;
    for (int64_t i = 0; i < s->n; i++) {
        const uint64_t key = k_sort_key(s->x, line * s->n + i, s->dtype, s->descending);
        if (have == s->k && key >= e[have - 1].key) continue;
        int64_t j = have < s->k ? have++ : have - 1;
        for (; j > 0 && e[j - 1].key > key; j--) e[j] = e[j - 1];
        e[j] = (peri_k_sort_entry){key, i};
    }
}

/** The entry of e[n] whose rank is `rank`. From the highest byte of the keys to the lowest, those stay that have the
 *  byte that it has, in their order: so its rank among them is known. */
static peri_k_sort_entry ref_sort_rank(peri_k_sort_entry *e, int64_t n, int64_t rank, int32_t bits)
{
    for (int32_t shift = bits - 8; shift >= 0 && n > 1; shift -= 8) {
        int64_t count[256] = {0}, left = 0;
        uint64_t v = 0;
        for (int64_t i = 0; i < n; i++) count[e[i].key >> shift & 255]++;
        while (rank >= count[v]) rank -= count[v++];
        if (count[v] == n) continue;
        for (int64_t i = 0; i < n; i++) {
            e[left] = e[i];
            left += (e[i].key >> shift & 255) == v;
        }
        n = left;
    }
    return e[rank];
}

/** The entry that comes behind @e, which is not the last one, when the line is sorted. */
static peri_k_sort_entry ref_sort_next(const peri_op_sort_lines *s, int64_t line, peri_k_sort_entry e)
{
    peri_k_sort_entry next = {UINT64_MAX, -1};
    for (int64_t i = 0; i < s->n; i++) {
        const uint64_t key = k_sort_key(s->x, line * s->n + i, s->dtype, s->descending);
        const bool behind = key > e.key || (key == e.key && i > e.place);
        if (behind && (next.place < 0 || key < next.key)) next = (peri_k_sort_entry){key, i};
    }
    return next;
}

/** The entries of ranks first, first + 1, ..., first + k - 1 of a line, k >= 1; room for 2 n. */
static const peri_k_sort_entry *ref_sort_wanted(const peri_op_sort_lines *s, int64_t line, peri_k_sort_entry *e)
{
    if (s->first == 0 && s->k <= REF_SORT_RUN && s->k < s->n) {
        ref_sort_first(s, line, e);
        return e;
    }
    for (int64_t i = 0; i < s->n; i++)
        e[i] = (peri_k_sort_entry){k_sort_key(s->x, line * s->n + i, s->dtype, s->descending), i};
    if (s->k > 2) return ref_sort_entries(e, e + s->n, s->n) + s->first;
    peri_k_sort_entry *found = e + s->n;
    found[0] = ref_sort_rank(e, s->n, s->first, k_sort_bits(s->dtype));
    if (s->k > 1) found[1] = ref_sort_next(s, line, found[0]);
    return found;
}

static void ref_sort_line(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sort_line_args *a = args;
    const peri_op_sort_lines *s = &a->sort;
    const size_t width = ref_width(s->dtype);
    peri_k_sort_entry *room = a->room + 2 * begin * s->n; /* the first line's, for all: it stays in caches */
    for (int64_t l = begin; l < end && s->k > 0; l++) {
        int64_t nan = s->nan_first ? 0 : s->n;
        while (nan < s->n && !k_is_nan(s->x, l * s->n + nan, s->dtype)) nan++;
        const peri_k_sort_entry *e = nan < s->n ? NULL : ref_sort_wanted(s, l, room);
        for (int64_t r = 0; r < s->k; r++) {
            const int64_t place = e ? e[r].place : nan;
            s->indices[l * s->k + r] = place;
            memcpy((char *)s->values + (size_t)(l * s->k + r) * width,
                   (const char *)s->x + (size_t)(l * s->n + place) * width, width);
        }
    }
}
