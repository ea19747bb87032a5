/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.c (cpu): the f32 cases of kernels/dense.h; f64 and the rare functions are ref's.
 */
#include "philox.h"
#include "vmath.h"

/** Up to K_LANES numbers at p[i]; @n and more of them are there. */
static inline k_vec k_load_n(const void *p, int64_t i, int64_t n)
{
    return n >= K_LANES ? k_load((const float *)p + i) : k_load_part((const float *)p + i, n);
}
static inline void k_store_n(void *p, int64_t i, k_vec v, int64_t n)
{
    if (n >= K_LANES) k_store((float *)p + i, v);
    else k_store_part((float *)p + i, v, n);
}

/** dst[i] = expr for i in [begin, end), where expr computes on v = x[i], and on w = y[i], u = z[i] where given. */
#define K_MAP(dst, x, expr)                                                                                            \
    do {                                                                                                               \
        int64_t i_ = begin;                                                                                            \
        for (; i_ + K_LANES <= end; i_ += K_LANES) {                                                                   \
            k_vec v = k_load((x) + i_);                                                                                \
            k_store((dst) + i_, (expr));                                                                               \
        }                                                                                                              \
        if (i_ < end) {                                                                                                \
            k_vec v = k_load_part((x) + i_, end - i_);                                                                 \
            k_store_part((dst) + i_, (expr), end - i_);                                                                \
        }                                                                                                              \
    } while (0)
#define K_MAP2(dst, x, y, expr)                                                                                        \
    do {                                                                                                               \
        int64_t i_ = begin;                                                                                            \
        for (; i_ + K_LANES <= end; i_ += K_LANES) {                                                                   \
            k_vec v = k_load((x) + i_), w = k_load((y) + i_);                                                          \
            k_store((dst) + i_, (expr));                                                                               \
        }                                                                                                              \
        if (i_ < end) {                                                                                                \
            k_vec v = k_load_part((x) + i_, end - i_), w = k_load_part((y) + i_, end - i_);                            \
            k_store_part((dst) + i_, (expr), end - i_);                                                                \
        }                                                                                                              \
    } while (0)

static void cpu_axpy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_axpy_args *a = args;
    if (a->dtype == PERI_F32) {
        float *y = a->y;
        const float *x = a->x;
        k_vec alpha = k_set((float)a->alpha);
        K_MAP2(y, x, y, k_fma(alpha, v, w));
    } else {
        ref_axpy(args, begin, end);
    }
}

/* -- elementwise --------------------------------------------------------------------------------------------------- */

static void cpu_unary(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unary_args *a = args;
    float *dst = a->dst;
    const float *x = a->x;
    k_vec pa = k_set((float)a->a), pb = k_set((float)a->b), zero = k_set(0);
    if (a->dtype != PERI_F32) {
        ref_unary(args, begin, end);
        return;
    }
    switch (a->op) {
    case PERI_UNARY_RELU: K_MAP(dst, x, k_max(zero, v)); break; /* max gives its second argument if one is NaN */
    case PERI_UNARY_SIGMOID: K_MAP(dst, x, k_sigmoid(v)); break;
    case PERI_UNARY_TANH: K_MAP(dst, x, k_tanh(v)); break;
    case PERI_UNARY_EXP: K_MAP(dst, x, k_exp(v)); break;
    case PERI_UNARY_SQRT: K_MAP(dst, x, k_sqrt(v)); break;
    case PERI_UNARY_SILU: K_MAP(dst, x, v * k_sigmoid(v)); break;
    case PERI_UNARY_GELU: K_MAP(dst, x, v * k_normal_cdf(v, k_gauss(v))); break;
    case PERI_UNARY_SOFTPLUS: K_MAP(dst, x, k_softplus(v)); break;
    case PERI_UNARY_LOGSIGMOID: K_MAP(dst, x, -k_softplus(-v)); break;
    case PERI_UNARY_LEAKY_RELU: K_MAP(dst, x, k_select(v > zero, v, pa * v)); break;
    case PERI_UNARY_LOG: K_MAP(dst, x, k_log(v)); break;
    case PERI_UNARY_ABS: K_MAP(dst, x, k_abs(v)); break;
    case PERI_UNARY_SQUARE: K_MAP(dst, x, v * v); break;
    case PERI_UNARY_AFFINE: K_MAP(dst, x, k_fma(pa, v, pb)); break;
    case PERI_UNARY_RECIPROCAL: K_MAP(dst, x, pa / v); break;
    case PERI_UNARY_CLAMP: K_MAP(dst, x, k_select(k_max(pa, v) > pb, pb, k_max(pa, v))); break;
    case PERI_UNARY_ROOT: K_MAP(dst, x, k_sqrt(v)); break;
    case PERI_UNARY_LOG1P: K_MAP(dst, x, k_select(v < k_set(INFINITY), k_log1p(v), v)); break;
    case PERI_UNARY_EXPM1: K_MAP(dst, x, k_select(k_abs(v) < k_set(0.34f), k_exp_small(v), k_exp(v) - 1)); break;
    case PERI_UNARY_RSQRT: K_MAP(dst, x, 1 / k_sqrt(v)); break;
    case PERI_UNARY_SIN: K_MAP(dst, x, k_sin(v)); break;
    case PERI_UNARY_COS: K_MAP(dst, x, k_cos(v)); break;
    case PERI_UNARY_FLOOR: K_MAP(dst, x, k_floor(v)); break;
    case PERI_UNARY_CEIL: K_MAP(dst, x, k_ceil(v)); break;
    case PERI_UNARY_ROUND: K_MAP(dst, x, k_round(v)); break;
    case PERI_UNARY_TRUNC: K_MAP(dst, x, k_trunc(v)); break;
    case PERI_UNARY_SIGN: K_MAP(dst, x, k_select(v > zero, k_set(1), k_select(v < zero, k_set(-1), zero))); break;
    default: ref_unary(args, begin, end); break;
    }
}

static inline k_vec cpu_cube(k_vec v) { return v * v * v; }

static void cpu_unary_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unary_grad_args *a = args;
    float *dx = a->dx;
    const float *dy = a->dy, *s = a->saved;
    k_vec pa = k_set((float)a->a), zero = k_set(0), one = k_set(1), half = k_set(0.5f);
    if (a->dtype != PERI_F32) {
        ref_unary_grad(args, begin, end);
        return;
    }
    switch (a->op) { /* v = dy, w = saved */
    case PERI_UNARY_RELU: K_MAP2(dx, dy, s, k_select(w > zero, v, zero)); break;
    case PERI_UNARY_SIGMOID: K_MAP2(dx, dy, s, v * w * (one - w)); break;
    case PERI_UNARY_TANH: K_MAP2(dx, dy, s, v * (one - w * w)); break;
    case PERI_UNARY_EXP: K_MAP2(dx, dy, s, v * w); break;
    case PERI_UNARY_SQRT: K_MAP2(dx, dy, s, v * (half / w)); break;
    case PERI_UNARY_SILU: K_MAP2(dx, dy, s, v * k_sigmoid(w) * (one + w * k_sigmoid(-w))); break;
    case PERI_UNARY_GELU:
        K_MAP2(dx, dy, s, v * k_fma(w * k_set(0.398942280f), k_gauss(w), k_normal_cdf(w, k_gauss(w))));
        break;
    case PERI_UNARY_SOFTPLUS: K_MAP2(dx, dy, s, v * k_sigmoid(w)); break;
    case PERI_UNARY_LOGSIGMOID: K_MAP2(dx, dy, s, v * k_sigmoid(-w)); break;
    case PERI_UNARY_LEAKY_RELU: K_MAP2(dx, dy, s, k_select(w > zero, v, pa * v)); break;
    case PERI_UNARY_LOG: K_MAP2(dx, dy, s, v / w); break;
    case PERI_UNARY_SQUARE: K_MAP2(dx, dy, s, 2 * v * w); break;
    case PERI_UNARY_AFFINE: K_MAP(dx, dy, pa * v); break;
    case PERI_UNARY_RECIPROCAL: K_MAP2(dx, dy, s, v * (-pa / (w * w))); break;
    case PERI_UNARY_CLAMP: { /* w > a is w >= the next number; of an infinite bound, w >= it */
        const k_vec low = k_set(a->a > -INFINITY ? nextafterf((float)a->a, INFINITY) : -INFINITY);
        const k_vec high = k_set(a->b < INFINITY ? nextafterf((float)a->b, -INFINITY) : INFINITY);
        K_MAP2(dx, dy, s, k_select(w >= low, k_select(w <= high, v, zero), zero));
        break;
    }
    case PERI_UNARY_ROOT: K_MAP2(dx, dy, s, k_select(w == zero, zero, v * (half / k_sqrt(w)))); break;
    case PERI_UNARY_LOG1P: K_MAP2(dx, dy, s, v / (w + 1)); break;
    case PERI_UNARY_EXPM1: K_MAP2(dx, dy, s, v * k_exp(w)); break;
    case PERI_UNARY_SIN: K_MAP2(dx, dy, s, v * k_cos(w)); break;
    case PERI_UNARY_COS: K_MAP2(dx, dy, s, v * -k_sin(w)); break;
    case PERI_UNARY_RSQRT: K_MAP2(dx, dy, s, v * (-half * cpu_cube(1 / k_sqrt(w)))); break;
    default: ref_unary_grad(args, begin, end); break;
    }
}

/** NaN if either is: where one is, v > w and v < w are false. */
#define K_LARGER(v, w) k_select((v) > (w), (v), k_select((v) == (v), (w), (v)))
#define K_SMALLER(v, w) k_select((v) < (w), (v), k_select((v) == (v), (w), (v)))

/** One row of n elements: dst = a op b with element strides sa and sb. */
static void cpu_binary_row(int32_t op, float *dst, const float *x, int64_t sa, const float *y, int64_t sb, int64_t n)
{
    int64_t begin = 0, end = n;
    if (sa == 1 && sb == 1) {
        switch (op) {
        case PERI_BINARY_ADD: K_MAP2(dst, x, y, v + w); break;
        case PERI_BINARY_SUB: K_MAP2(dst, x, y, v - w); break;
        case PERI_BINARY_MUL: K_MAP2(dst, x, y, v * w); break;
        case PERI_BINARY_MAX: K_MAP2(dst, x, y, K_LARGER(v, w)); break;
        case PERI_BINARY_MIN: K_MAP2(dst, x, y, K_SMALLER(v, w)); break;
        default: K_MAP2(dst, x, y, v / w); break;
        }
    } else if (sa == 1 && sb == 0) {
        k_vec b = k_set(*y);
        switch (op) {
        case PERI_BINARY_ADD: K_MAP(dst, x, v + b); break;
        case PERI_BINARY_SUB: K_MAP(dst, x, v - b); break;
        case PERI_BINARY_MUL: K_MAP(dst, x, v * b); break;
        case PERI_BINARY_MAX: K_MAP(dst, x, K_LARGER(v, b)); break;
        case PERI_BINARY_MIN: K_MAP(dst, x, K_SMALLER(v, b)); break;
        default: K_MAP(dst, x, v / b); break;
        }
    } else if (sa == 0 && sb == 1) {
        k_vec b = k_set(*x);
        switch (op) {
        case PERI_BINARY_ADD: K_MAP(dst, y, b + v); break;
        case PERI_BINARY_SUB: K_MAP(dst, y, b - v); break;
        case PERI_BINARY_MUL: K_MAP(dst, y, b * v); break;
        case PERI_BINARY_MAX: K_MAP(dst, y, K_LARGER(b, v)); break;
        case PERI_BINARY_MIN: K_MAP(dst, y, K_SMALLER(b, v)); break;
        default: K_MAP(dst, y, b / v); break;
        }
    } else {
        for (int64_t i = 0; i < n; i++) dst[i] = (float)ref_both(op, (double)x[i * sa], (double)y[i * sb]);
    }
}

static void cpu_binary(const void *args, int64_t begin, int64_t end)
{
    const peri_k_binary_args *a = args;
    if (a->dtype != PERI_F32 || a->op > PERI_BINARY_LAST_PLAIN) {
        ref_binary(args, begin, end);
        return;
    }
    int32_t last = a->ndim - 1;
    int64_t row = last >= 0 ? a->shape[last] : 1, sa = last >= 0 ? a->a_stride[last] : 1,
            sb = last >= 0 ? a->b_stride[last] : 1;
    for (int64_t i = begin; i < end;) {
        int64_t in_row = i % row, n = row - in_row < end - i ? row - in_row : end - i, rest = i / row;
        int64_t at_a = in_row * sa, at_b = in_row * sb;
        for (int32_t d = last - 1; d >= 0; d--) {
            int64_t at = rest % a->shape[d];
            rest /= a->shape[d];
            at_a += at * a->a_stride[d];
            at_b += at * a->b_stride[d];
        }
        cpu_binary_row(a->op, (float *)a->dst + i, (const float *)a->a + at_a, sa, (const float *)a->b + at_b, sb, n);
        i += n;
    }
}

static void cpu_muladd(const void *args, int64_t begin, int64_t end)
{
    const peri_k_muladd_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_muladd(args, begin, end);
        return;
    }
    float *dst = a->dst;
    const float *x = a->a, *y = a->b, *z = a->c;
    k_vec scale = k_set((float)a->scale);
    int64_t i = begin;
    for (; i + K_LANES <= end; i += K_LANES)
        k_store(dst + i, k_fma(k_load(x + i), k_load(y + i), k_load(z + i) * scale));
    if (i < end)
        k_store_part(
            dst + i,
            k_fma(k_load_part(x + i, end - i), k_load_part(y + i, end - i), k_load_part(z + i, end - i) * scale),
            end - i);
}

/* -- the sides of a linear layer ----------------------------------------------------------------------------------- */

static void cpu_bias_act(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_bias_act_args *a = args;
    if (a->dtype != PERI_F32 || !a->bias) {
        peri_k_unary_args plain = {.dst = a->y, .x = a->y, .dtype = a->dtype, .op = a->act};
        if (a->dtype == PERI_F32) cpu_unary(&plain, begin_row * a->cols, end_row * a->cols);
        else ref_bias_act(args, begin_row, end_row);
        return;
    }
    const float *bias = a->bias;
    k_vec zero = k_set(0);
    for (int64_t r = begin_row; r < end_row; r++) {
        float *y = (float *)a->y + r * a->cols;
        int64_t begin = 0, end = a->cols;
        switch (a->act) {
        case PERI_UNARY_IDENTITY: K_MAP2(y, y, bias, v + w); break;
        case PERI_UNARY_RELU: K_MAP2(y, y, bias, k_max(zero, v + w)); break;
        case PERI_UNARY_SIGMOID: K_MAP2(y, y, bias, k_sigmoid(v + w)); break;
        case PERI_UNARY_TANH: K_MAP2(y, y, bias, k_tanh(v + w)); break;
        default: ref_bias_act(args, r, r + 1); break;
        }
    }
}

static inline k_vec cpu_act_df(int32_t act, k_vec dy, k_vec y)
{
    if (act == PERI_UNARY_RELU) return k_select(y > k_set(0), dy, k_set(0));
    if (act == PERI_UNARY_SIGMOID) return dy * y * (1 - y);
    if (act == PERI_UNARY_TANH) return dy * (1 - y * y);
    return dy;
}

/** Rows [first, last) of act_grad with `act` known to the compiler; the sums go through `partial`, four rows at a
 *  time. */
static inline void cpu_act_grad_rows(const peri_k_act_grad_args *a, int32_t act, int64_t first, int64_t last,
                                     float *partial)
{
    int64_t cols = a->cols;
    for (int64_t r = first; r < last; r += 4) {
        int64_t rows = last - r < 4 ? last - r : 4;
        const float *dy = (const float *)a->dy + r * a->dy_stride,
                    *y = act == PERI_UNARY_IDENTITY ? dy : (const float *)a->y + r * cols;
        int64_t y_stride = act == PERI_UNARY_IDENTITY ? a->dy_stride : cols;
        float *dz = a->dz ? (float *)a->dz + r * cols : NULL;
        int64_t c = 0;
        for (; c + K_LANES <= cols; c += K_LANES) {
            k_vec sum = {0};
            for (int64_t q = 0; q < rows; q++) {
                k_vec z = cpu_act_df(act, k_load(dy + q * a->dy_stride + c), k_load(y + q * y_stride + c));
                if (dz) k_store(dz + q * cols + c, z);
                sum += z;
            }
            if (partial) k_store(partial + c, r == first ? sum : k_load(partial + c) + sum);
        }
        if (c < cols) {
            k_vec sum = {0};
            for (int64_t q = 0; q < rows; q++) {
                k_vec z = cpu_act_df(act, k_load_part(dy + q * a->dy_stride + c, cols - c),
                                     k_load_part(y + q * y_stride + c, cols - c));
                if (dz) k_store_part(dz + q * cols + c, z, cols - c);
                sum += z;
            }
            if (partial)
                k_store_part(partial + c, r == first ? sum : k_load_part(partial + c, cols - c) + sum, cols - c);
        }
    }
}

static void cpu_act_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_act_grad_args *a = args;
    bool known = a->act == PERI_UNARY_IDENTITY || a->act == PERI_UNARY_RELU || a->act == PERI_UNARY_SIGMOID ||
                 a->act == PERI_UNARY_TANH;
    if (a->dtype != PERI_F32 || !known) {
        ref_act_grad(args, begin, end);
        return;
    }
    for (int64_t k = begin; k < end; k++) {
        int64_t first = k * PERI_SUM_ROWS, last = ref_block_end(k, a->rows);
        float *partial = a->partial ? (float *)a->partial + k * a->cols : NULL;
        if (a->act == PERI_UNARY_RELU) cpu_act_grad_rows(a, PERI_UNARY_RELU, first, last, partial);
        else if (a->act == PERI_UNARY_IDENTITY) cpu_act_grad_rows(a, PERI_UNARY_IDENTITY, first, last, partial);
        else if (a->act == PERI_UNARY_SIGMOID) cpu_act_grad_rows(a, PERI_UNARY_SIGMOID, first, last, partial);
        else cpu_act_grad_rows(a, PERI_UNARY_TANH, first, last, partial);
    }
}

/* -- a layer of a cross network ------------------------------------------------------------------------------------ */

static void cpu_cross(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_cross_args *a = args;
    if (a->dtype != PERI_F32 || !a->bias) {
        peri_k_muladd_args plain = {.dst = a->y, .a = a->x0, .b = a->u, .c = a->x, .dtype = a->dtype, .scale = 1};
        if (a->dtype == PERI_F32) cpu_muladd(&plain, begin_row * a->cols, end_row * a->cols);
        else ref_cross(args, begin_row, end_row);
        return;
    }
    const float *bias = a->bias;
    for (int64_t r = begin_row; r < end_row; r++) {
        float *y = (float *)a->y + r * a->cols;
        const float *x0 = (const float *)a->x0 + r * a->cols, *u = (const float *)a->u + r * a->cols;
        const float *x = (const float *)a->x + r * a->cols;
        for (int64_t c = 0; c < a->cols; c += K_LANES) {
            int64_t n = a->cols - c;
            k_store_n(y, c, k_fma(k_load_n(x0, c, n), k_load_n(u, c, n) + k_load_n(bias, c, n), k_load_n(x, c, n)), n);
        }
    }
}

/** One vector of @n numbers at @i of cross_grad; what is left of du. */
static inline k_vec cpu_cross_grad_vector(const peri_k_cross_grad_args *a, int64_t i, k_vec bias, int64_t n)
{
    k_vec dy = k_load_n(a->dy, i, n), du = dy * k_load_n(a->x0, i, n), dx0 = dy * (k_load_n(a->u, i, n) + bias);
    if (a->same) dx0 += dy;
    if (a->add) dx0 += k_load_n(a->dx0, i, n);
    k_store_n(a->du, i, du, n);
    k_store_n(a->dx0, i, dx0, n);
    return du;
}

/** Two rows at a time, so that the sums of columns are loaded and stored half as often. */
static void cpu_cross_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cross_grad_args a = *(const peri_k_cross_grad_args *)args;
    if (a.dtype != PERI_F32) {
        ref_cross_grad(args, begin, end);
        return;
    }
    for (int64_t k = begin; k < end; k++) {
        int64_t first = k * PERI_SUM_ROWS, last = ref_block_end(k, a.rows);
        float *partial = a.partial ? (float *)a.partial + k * a.cols : NULL;
        if (partial) memset(partial, 0, sizeof *partial * (size_t)a.cols);
        for (int64_t r = first; r < last; r += 2)
            for (int64_t c = 0; c < a.cols; c += K_LANES) {
                int64_t n = a.cols - c;
                k_vec bias = a.bias ? k_load_n(a.bias, c, n) : k_set(0),
                      sum = cpu_cross_grad_vector(&a, r * a.cols + c, bias, n);
                if (r + 1 < last) sum += cpu_cross_grad_vector(&a, (r + 1) * a.cols + c, bias, n);
                if (partial) k_store_n(partial, c, k_load_n(partial, c, n) + sum, n);
            }
    }
}

/* -- reductions ---------------------------------------------------------------------------------------------------- */

static float cpu_sum(const float *x, int64_t n)
{
    k_vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    int64_t i = 0;
    for (; i + 4 * K_LANES <= n; i += 4 * K_LANES) {
        s0 += k_load(x + i);
        s1 += k_load(x + i + K_LANES);
        s2 += k_load(x + i + 2 * K_LANES);
        s3 += k_load(x + i + 3 * K_LANES);
    }
    for (; i + K_LANES <= n; i += K_LANES) s0 += k_load(x + i);
    if (i < n) s1 += k_load_part(x + i, n - i);
    return k_sum((s0 + s1) + (s2 + s3));
}

static void cpu_sum_dim(const void *args, int64_t begin_unit, int64_t end_unit)
{
    const peri_k_sum_dim_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_sum_dim(args, begin_unit, end_unit);
        return;
    }
    int64_t blocks = a->n ? (a->n + a->block - 1) / a->block : 1;
    int64_t parts = (a->inner + PERI_SUM_COLUMNS - 1) / PERI_SUM_COLUMNS;
    k_vec scale = k_set((float)a->scale);
    for (int64_t u = begin_unit; u < end_unit; u++) {
        int64_t first = u % parts * PERI_SUM_COLUMNS, k = u / parts % blocks, o = u / parts / blocks;
        int64_t begin = 0, end = first + PERI_SUM_COLUMNS < a->inner ? PERI_SUM_COLUMNS : a->inner - first;
        int64_t start = k * a->block, stop = start + a->block < a->n ? start + a->block : a->n;
        float *dst = (float *)a->dst + (o * blocks + k) * a->inner + first;
        const float *x = (const float *)a->x + (o * a->n + start) * a->inner + first;
        if (a->inner == 1) {
            *dst = cpu_sum(x, stop - start) * (float)a->scale;
            continue;
        }
        if (start < stop) K_MAP(dst, x, v * scale);
        else
            for (int64_t i = 0; i < end; i++) dst[i] = 0 * (float)a->scale;
        for (int64_t r = start + 1; r < stop; r++) {
            x += a->inner;
            K_MAP2(dst, x, dst, k_fma(scale, v, w));
        }
    }
}

static float cpu_max(const float *x, int64_t n)
{
    k_vec m = k_set(-INFINITY);
    int64_t i = 0;
    for (; i + K_LANES <= n; i += K_LANES) m = k_max(m, k_load(x + i));
    float lanes[K_LANES], max = -INFINITY;
    k_store(lanes, m);
    for (int l = 0; l < K_LANES; l++) max = lanes[l] > max ? lanes[l] : max;
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

/** Sum of exp(x - shift); the terms go to `terms` if it is not NULL. */
static float cpu_sum_exp(float *terms, const float *x, float shift, int64_t n)
{
    k_vec sum = {0}, s = k_set(shift);
    int64_t i = 0;
    for (; i + K_LANES <= n; i += K_LANES) {
        k_vec e = k_exp(k_load(x + i) - s);
        if (terms) k_store(terms + i, e);
        sum += e;
    }
    float total = k_sum(sum);
    if (i < n) {
        float lanes[K_LANES];
        k_store(lanes, k_exp(k_load_part(x + i, n - i) - s));
        for (int l = 0; i + l < n; l++) {
            if (terms) terms[i + l] = lanes[l];
            total += lanes[l];
        }
    }
    return total;
}

static void cpu_softmax(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_softmax_args *a = args;
    if (a->dtype != PERI_F32 || a->inner != 1) {
        ref_softmax(args, begin_row, end_row);
        return;
    }
    for (int64_t r = begin_row; r < end_row; r++) {
        const float *x = (const float *)a->x + r * a->n;
        float *y = (float *)a->y + r * a->n, max = cpu_max(x, a->n);
        if (a->zeros && max == -INFINITY) max = 0;
        float sum = cpu_sum_exp(a->log ? NULL : y, x, max, a->n);
        if (a->zeros && sum == 0) sum = 1;
        int64_t begin = 0, end = a->n;
        if (a->log) {
            k_vec shift = k_set(max), log_sum = k_set(logf(sum));
            K_MAP(y, x, v - shift - log_sum);
        } else {
            k_vec scale = k_set(1 / sum);
            K_MAP(y, y, v * scale);
        }
    }
}

static float cpu_dot(const float *x, const float *y, int64_t n)
{
    k_vec s0 = {0}, s1 = {0};
    int64_t i = 0;
    for (; i + 2 * K_LANES <= n; i += 2 * K_LANES) {
        s0 = k_fma(k_load(x + i), k_load(y + i), s0);
        s1 = k_fma(k_load(x + i + K_LANES), k_load(y + i + K_LANES), s1);
    }
    for (; i + K_LANES <= n; i += K_LANES) s0 = k_fma(k_load(x + i), k_load(y + i), s0);
    if (i < n) s1 = k_fma(k_load_part(x + i, n - i), k_load_part(y + i, n - i), s1);
    return k_sum(s0 + s1);
}

static void cpu_softmax_grad(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_softmax_grad_args *a = args;
    if (a->dtype != PERI_F32 || a->inner != 1) {
        ref_softmax_grad(args, begin_row, end_row);
        return;
    }
    for (int64_t r = begin_row; r < end_row; r++) {
        const float *dy = (const float *)a->dy + r * a->n, *y = (const float *)a->y + r * a->n;
        float *dx = (float *)a->dx + r * a->n;
        int64_t begin = 0, end = a->n;
        k_vec sum = k_set(a->log ? cpu_sum(dy, a->n) : cpu_dot(dy, y, a->n));
        if (a->log) K_MAP2(dx, dy, y, v - k_exp(w) * sum);
        else K_MAP2(dx, dy, y, w * (v - sum));
    }
}

static void cpu_layer_norm(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_layer_norm_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_layer_norm(args, begin_row, end_row);
        return;
    }
    for (int64_t r = begin_row; r < end_row; r++) {
        const float *x = (const float *)a->x + r * a->cols, *weight = a->weight, *bias = a->bias;
        float *y = (float *)a->y + r * a->cols, n = (float)a->cols, mean = cpu_sum(x, a->cols) / n;
        int64_t begin = 0, end = a->cols;
        k_vec shift = k_set(mean);
        K_MAP(y, x, v - shift);
        float rstd = 1 / sqrtf(cpu_dot(y, y, a->cols) / n + (float)a->eps);
        ((float *)a->mean)[r] = mean;
        ((float *)a->rstd)[r] = rstd;
        k_vec scale = k_set(rstd);
        if (weight) K_MAP2(y, y, weight, v * scale * w);
        else K_MAP(y, y, v * scale);
        if (bias) K_MAP2(y, y, bias, v + w);
    }
}

/** One row of layer_norm_grad; dx holds g while the sums are made. */
static void cpu_layer_norm_grad_row(const peri_k_layer_norm_grad_args *a, int64_t r)
{
    const float *dy = (const float *)a->dy + r * a->cols, *x = (const float *)a->x + r * a->cols, *weight = a->weight;
    float *dx = (float *)a->dx + r * a->cols, n = (float)a->cols;
    int64_t begin = 0, end = a->cols;
    k_vec mean = k_set(((const float *)a->mean)[r]), rstd = k_set(((const float *)a->rstd)[r]), sum_gh = {0};
    if (weight) K_MAP2(dx, dy, weight, v * w);
    else K_MAP(dx, dy, v);
    int64_t c = 0;
    for (; c + K_LANES <= end; c += K_LANES) sum_gh = k_fma(k_load(dx + c), (k_load(x + c) - mean) * rstd, sum_gh);
    if (c < end) sum_gh = k_fma(k_load_part(dx + c, end - c), (k_load_part(x + c, end - c) - mean) * rstd, sum_gh);
    k_vec g = k_set(cpu_sum(dx, a->cols) / n), gh = k_set(k_sum(sum_gh) / n);
    K_MAP2(dx, dx, x, rstd * (v - g - (w - mean) * rstd * gh));
}

static void cpu_layer_norm_grad(const void *args, int64_t begin_block, int64_t end_block)
{
    const peri_k_layer_norm_grad_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_layer_norm_grad(args, begin_block, end_block);
        return;
    }
    for (int64_t k = begin_block; k < end_block; k++) {
        float *dweight = a->dweight ? (float *)a->dweight + k * a->cols : NULL,
              *dbias = a->dbias ? (float *)a->dbias + k * a->cols : NULL;
        int64_t first = k * PERI_SUM_ROWS, begin = 0, end = a->cols;
        for (int64_t r = first; r < ref_block_end(k, a->rows); r++) {
            const float *dy = (const float *)a->dy + r * a->cols, *x = (const float *)a->x + r * a->cols;
            k_vec mean = k_set(((const float *)a->mean)[r]), rstd = k_set(((const float *)a->rstd)[r]);
            if (dbias && r == first) K_MAP(dbias, dy, v);
            else if (dbias) K_MAP2(dbias, dbias, dy, v + w);
            if (dweight && r == first) {
                K_MAP2(dweight, dy, x, v * (w - mean) * rstd);
            } else if (dweight) {
                for (int64_t c = 0; c < end; c += K_LANES) {
                    int64_t left = end - c;
                    if (left >= K_LANES)
                        k_store(dweight + c, k_fma(k_load(dy + c), (k_load(x + c) - mean) * rstd, k_load(dweight + c)));
                    else
                        k_store_part(dweight + c,
                                     k_fma(k_load_part(dy + c, left), (k_load_part(x + c, left) - mean) * rstd,
                                           k_load_part(dweight + c, left)),
                                     left);
                }
            }
            if (a->dx) cpu_layer_norm_grad_row(a, r);
        }
    }
}

/* -- dropout ------------------------------------------------------------------------------------------------------- */

static void cpu_dropout(const void *args, int64_t begin, int64_t end)
{
    const peri_k_dropout_args *a = args;
    if (a->dtype != PERI_F32 || a->drawn) {
        ref_dropout(args, begin, end);
        return;
    }
    enum { GROUP = 4 * K_LANES };
    const float *x = a->x;
    float *y = a->y, scale = (float)a->scale;
    for (int64_t i = begin; i < end;) { /* a group starts at a multiple of four words, wherever i lies in it */
        uint32_t words[GROUP];
        uint64_t index = a->offset + (uint64_t)i, skip = index & 3;
        int64_t n = end - i < GROUP - (int64_t)skip ? end - i : GROUP - (int64_t)skip;
        k_philox_words(a->seed, a->random_stream, index >> 2, words);
        for (int64_t k = 0; k < n; k++) y[i + k] = words[skip + (uint64_t)k] >= a->threshold ? x[i + k] * scale : 0;
        i += n;
    }
}

/* -- losses -------------------------------------------------------------------------------------------------------- */

static void cpu_loss(const void *args, int64_t begin, int64_t end)
{
    const peri_k_loss_args *a = args;
    if (a->dtype != PERI_F32 || a->kind == PERI_LOSS_KIND_BCE || a->weight || a->pos_weight) {
        ref_loss(args, begin, end);
        return;
    }
    float *dst = a->dst;
    const float *x = a->x, *t = a->t;
    if (a->kind == PERI_LOSS_KIND_BCE_LOGITS) K_MAP2(dst, x, t, k_fma(1 - w, v, k_softplus(-v)));
    else K_MAP2(dst, x, t, (v - w) * (v - w));
}

/** The sum over classes of w[c] * (lse - x[c]). */
static double cpu_shared(const float *x, const float *w, float lse, int64_t classes)
{
    k_vec sum = k_set(0), top = k_set(lse);
    int64_t c = 0;
    for (; c + K_LANES <= classes; c += K_LANES)
        sum = w ? k_fma(k_load(w + c), top - k_load(x + c), sum) : sum + (top - k_load(x + c));
    double shared = k_sum(sum);
    for (; c < classes; c++) shared += (w ? w[c] : 1) * (lse - x[c]);
    return shared;
}

static void cpu_cross_entropy(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_cross_entropy_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_cross_entropy(args, begin_row, end_row);
        return;
    }
    const double smoothing = a->of.smoothing;
    const float *w = a->of.weight;
    for (int64_t r = begin_row; r < end_row; r++) {
        const float *x = (const float *)a->x + r * a->classes;
        const int64_t label = a->labels[r];
        const float max = cpu_max(x, a->classes), lse = max + logf(cpu_sum_exp(NULL, x, max, a->classes));
        const bool ignored = ref_ignored(&a->of, label);
        const float count = ignored ? 0 : w ? w[label] : 1;
        double loss = ignored ? 0 : (1 - smoothing) * (count * (lse - x[label]));
        if (!ignored && smoothing > 0) loss += smoothing / (double)a->classes * cpu_shared(x, w, lse, a->classes);
        ((float *)a->lse)[r] = lse;
        ((float *)a->loss)[r] = (float)loss;
        if (a->counts) ((float *)a->counts)[r] = count;
    }
}

static void cpu_cross_entropy_grad(const void *args, int64_t begin_row, int64_t end_row)
{
    const peri_k_cross_entropy_grad_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_cross_entropy_grad(args, begin_row, end_row);
        return;
    }
    const float *weight = a->of.weight, part = (float)(a->of.smoothing / (double)a->classes);
    double sum = 0; /* of the weights */
    for (int64_t c = 0; c < a->classes && part > 0; c++) sum += weight ? weight[c] : 1;
    for (int64_t r = begin_row; r < end_row; r++) {
        const float *x = (const float *)a->x + r * a->classes;
        const int64_t begin = 0, end = a->classes, label = a->labels[r];
        float *dx = (float *)a->dx + r * a->classes, g = (float)a->scale * ((const float *)a->g)[r * a->g_stride];
        if (ref_ignored(&a->of, label)) {
            memset(dx, 0, sizeof *dx * (size_t)a->classes);
            continue;
        }
        const float own = g * (float)(1 - a->of.smoothing) * (weight ? weight[label] : 1);
        k_vec lse = k_set(((const float *)a->lse)[r]), all = k_set(own + g * part * (float)sum), ps = k_set(g * part);
        if (part == 0) K_MAP(dx, x, all * k_exp(v - lse));
        else if (weight) K_MAP2(dx, x, weight, all * k_exp(v - lse) - ps * w);
        else K_MAP(dx, x, all * k_exp(v - lse) - ps);
        dx[label] -= own;
    }
}

#define K_CPU_DENSE                                                                                                    \
    [PERI_K_axpy] = cpu_axpy, [PERI_K_unary] = cpu_unary, [PERI_K_unary_grad] = cpu_unary_grad,                        \
    [PERI_K_binary] = cpu_binary, [PERI_K_muladd] = cpu_muladd, [PERI_K_bias_act] = cpu_bias_act,                      \
    [PERI_K_act_grad] = cpu_act_grad, [PERI_K_cross] = cpu_cross, [PERI_K_cross_grad] = cpu_cross_grad,                \
    [PERI_K_sum_dim] = cpu_sum_dim, [PERI_K_softmax] = cpu_softmax, [PERI_K_softmax_grad] = cpu_softmax_grad,          \
    [PERI_K_layer_norm] = cpu_layer_norm, [PERI_K_layer_norm_grad] = cpu_layer_norm_grad,                              \
    [PERI_K_dropout] = cpu_dropout, [PERI_K_loss] = cpu_loss, [PERI_K_cross_entropy] = cpu_cross_entropy,              \
    [PERI_K_cross_entropy_grad] = cpu_cross_entropy_grad, K_CPU_INTERACTION
