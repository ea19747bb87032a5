/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.c (ref): see kernels/dense.h. Elements are computed in f64 and rounded once.
 */
#include "../codes.h"

static double ref_get(const void *p, int64_t i, int32_t dtype)
{
    switch (dtype) {
    case PERI_F64: return ((const double *)p)[i];
    case PERI_F16: return (double)k_f16_to_f32(((const uint16_t *)p)[i]);
    case PERI_BF16: return (double)k_bf16_to_f32(((const uint16_t *)p)[i]);
    default: return (double)((const float *)p)[i];
    }
}

static void ref_put(void *p, int64_t i, int32_t dtype, double x)
{
    switch (dtype) {
    case PERI_F64: ((double *)p)[i] = x; break;
    case PERI_F16: ((uint16_t *)p)[i] = k_f32_to_f16((float)x); break;
    case PERI_BF16: ((uint16_t *)p)[i] = k_f32_to_bf16((float)x); break;
    default: ((float *)p)[i] = (float)x; break;
    }
}

/** The dtype of sums and biases beside numbers of @dtype. */
static int32_t ref_wide(int32_t dtype) { return dtype == PERI_F64 ? PERI_F64 : PERI_F32; }

static void ref_axpy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_axpy_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        if (a->dtype == PERI_F32) ((float *)a->y)[i] += (float)a->alpha * ((const float *)a->x)[i];
        else ref_put(a->y, i, a->dtype, ref_get(a->y, i, a->dtype) + a->alpha * ref_get(a->x, i, a->dtype));
    }
}

/* -- elementwise --------------------------------------------------------------------------------------------------- */

static double ref_sigmoid(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }
static double ref_softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }
static double ref_cube(double x) { return x * x * x; }
static double ref_normal_cdf(double x) { return 0.5 * erfc(x * -0.70710678118654752440); }

static double ref_f(int32_t op, double x, double a, double b)
{
    switch (op) {
    case PERI_UNARY_RELU: return x < 0 ? 0 : x;
    case PERI_UNARY_SIGMOID: return ref_sigmoid(x);
    case PERI_UNARY_TANH: return tanh(x);
    case PERI_UNARY_EXP: return exp(x);
    case PERI_UNARY_SQRT: return sqrt(x);
    case PERI_UNARY_SILU: return x * ref_sigmoid(x);
    case PERI_UNARY_GELU: return x * ref_normal_cdf(x);
    case PERI_UNARY_SOFTPLUS: return ref_softplus(x);
    case PERI_UNARY_LOGSIGMOID: return -ref_softplus(-x);
    case PERI_UNARY_LEAKY_RELU: return x > 0 ? x : a * x;
    case PERI_UNARY_LOG: return log(x);
    case PERI_UNARY_ABS: return fabs(x);
    case PERI_UNARY_SQUARE: return x * x;
    case PERI_UNARY_POW: return pow(x, a);
    case PERI_UNARY_AFFINE: return a * x + b;
    case PERI_UNARY_RECIPROCAL: return a / x;
    case PERI_UNARY_CLAMP: x = x < a ? a : x; return x > b ? b : x;
    case PERI_UNARY_ROOT: return sqrt(x);
    case PERI_UNARY_LOG1P: return log1p(x);
    case PERI_UNARY_EXPM1: return expm1(x);
    case PERI_UNARY_RSQRT: return 1 / sqrt(x);
    case PERI_UNARY_SIN: return sin(x);
    case PERI_UNARY_COS: return cos(x);
    case PERI_UNARY_ERF: return erf(x);
    case PERI_UNARY_FLOOR: return floor(x);
    case PERI_UNARY_CEIL: return ceil(x);
    case PERI_UNARY_ROUND: return rint(x);
    case PERI_UNARY_TRUNC: return trunc(x);
    case PERI_UNARY_SIGN: return x > 0 ? 1 : x < 0 ? -1 : 0;
    default: return x;
    }
}

/** f' from s = y (op <= PERI_UNARY_FROM_OUTPUT) or x. */
static double ref_df(int32_t op, double s, double a, double b)
{
    double sigmoid;
    switch (op) {
    case PERI_UNARY_RELU: return s > 0;
    case PERI_UNARY_SIGMOID: return s * (1 - s);
    case PERI_UNARY_TANH: return 1 - s * s;
    case PERI_UNARY_EXP: return s;
    case PERI_UNARY_SQRT: return 0.5 / s;
    case PERI_UNARY_SILU: sigmoid = ref_sigmoid(s); return sigmoid * (1 + s * (1 - sigmoid));
    case PERI_UNARY_GELU: return ref_normal_cdf(s) + s * 0.39894228040143267794 * exp(-0.5 * s * s);
    case PERI_UNARY_SOFTPLUS: return ref_sigmoid(s);
    case PERI_UNARY_LOGSIGMOID: return ref_sigmoid(-s);
    case PERI_UNARY_LEAKY_RELU: return s > 0 ? 1 : a;
    case PERI_UNARY_LOG: return 1 / s;
    case PERI_UNARY_ABS: return s > 0 ? 1 : s < 0 ? -1 : 0;
    case PERI_UNARY_SQUARE: return 2 * s;
    case PERI_UNARY_POW: return a == 0 ? 0 : a * pow(s, a - 1);
    case PERI_UNARY_AFFINE: return a;
    case PERI_UNARY_RECIPROCAL: return -a / (s * s);
    case PERI_UNARY_CLAMP: return (s > a || a == -INFINITY) && (s < b || b == INFINITY);
    case PERI_UNARY_ROOT: return s == 0 ? 0 : 0.5 / sqrt(s);
    case PERI_UNARY_LOG1P: return 1 / (1 + s);
    case PERI_UNARY_EXPM1: return exp(s);
    case PERI_UNARY_RSQRT: return -0.5 * ref_cube(1 / sqrt(s));
    case PERI_UNARY_SIN: return cos(s);
    case PERI_UNARY_COS: return -sin(s);
    case PERI_UNARY_ERF: return 1.12837916709551257390 * exp(-s * s);
    case PERI_UNARY_FLOOR:
    case PERI_UNARY_CEIL:
    case PERI_UNARY_ROUND:
    case PERI_UNARY_TRUNC:
    case PERI_UNARY_SIGN: return 0;
    default: return 1;
    }
}

static void ref_unary(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unary_args *a = args;
    for (int64_t i = begin; i < end; i++)
        ref_put(a->dst, i, a->dtype, ref_f(a->op, ref_get(a->x, i, a->dtype), a->a, a->b));
}

static bool ref_reads_saved(int32_t op) { return op != PERI_UNARY_IDENTITY && op != PERI_UNARY_AFFINE; }

/** dy times f'. Where RELU and CLAMP are flat nothing of it comes through, be it infinite. */
static double ref_chain(int32_t op, double dy, double s, double a, double b)
{
    const double slope = ref_df(op, s, a, b);
    return slope == 0 && (op == PERI_UNARY_RELU || op == PERI_UNARY_CLAMP) ? 0 : dy * slope;
}

static void ref_unary_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_unary_grad_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double s = ref_reads_saved(a->op) ? ref_get(a->saved, i, a->dtype) : 0;
        ref_put(a->dx, i, a->dtype, ref_chain(a->op, ref_get(a->dy, i, a->dtype), s, a->a, a->b));
    }
}

static double ref_both(int32_t op, double x, double y)
{
    switch (op) {
    case PERI_BINARY_ADD: return x + y;
    case PERI_BINARY_SUB: return x - y;
    case PERI_BINARY_MUL: return x * y;
    case PERI_BINARY_MAX: return x > y || x != x ? x : y;
    case PERI_BINARY_MIN: return x < y || x != x ? x : y;
    case PERI_BINARY_DIV: return x / y;
    default: return peri_binary_rare(op, x, y);
    }
}

static void ref_binary(const void *args, int64_t begin, int64_t end)
{
    const peri_k_binary_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t rest = i, at_a = 0, at_b = 0;
        for (int32_t d = a->ndim - 1; d >= 0; d--) {
            int64_t at = rest % a->shape[d];
            rest /= a->shape[d];
            at_a += at * a->a_stride[d];
            at_b += at * a->b_stride[d];
        }
        double x = ref_get(a->a, at_a, a->dtype), y = ref_get(a->b, at_b, a->dtype);
        ref_put(a->dst, i, a->dtype, ref_both(a->op, x, y));
    }
}

static void ref_muladd(const void *args, int64_t begin, int64_t end)
{
    const peri_k_muladd_args *a = args;
    for (int64_t i = begin; i < end; i++)
        ref_put(a->dst, i, a->dtype,
                ref_get(a->a, i, a->dtype) * ref_get(a->b, i, a->dtype) + ref_get(a->c, i, a->dtype) * a->scale);
}

/* -- the sides of a linear layer ----------------------------------------------------------------------------------- */

static void ref_bias_act(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bias_act_args *a = args;
    for (int64_t r = begin; r < end; r++)
        for (int64_t c = 0; c < a->cols; c++) {
            int64_t i = r * a->cols + c;
            double x = ref_get(a->y, i, a->dtype) + (a->bias ? ref_get(a->bias, c, a->dtype) : 0);
            ref_put(a->y, i, a->dtype, ref_f(a->act, x, 0, 0));
        }
}

/** With rows as codes, too. */
static void ref_code_product(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    for (int64_t r = begin; r < end; r++) {
        peri_k_codes *x = (peri_k_codes *)((char *)a->codes + r * peri_codes_bytes(a->inner, PERI_I8));
        peri_codes_of(x, a->x + r * a->x_stride, a->inner);
        for (int64_t c = 0; c < a->cols; c++) {
            const int64_t w = c % PERI_PANEL;
            const char *panel = (const char *)a->panels + peri_panel_bytes(c - w, a->inner, PERI_I8);
            int32_t sum = 0;
            float scale;
            for (int64_t k = 0; k < a->inner; k++) sum += x->codes[k] * ((const int8_t *)panel)[w + k * PERI_PANEL];
            memcpy(&scale, panel + a->inner * PERI_PANEL + w * 4, sizeof scale);
            const float s = (float)sum * scale * x->scale;
            a->y[r * a->y_stride + c] = (float)ref_f(a->act, a->bias ? s + a->bias[c] : s, 0, 0);
        }
    }
}

/** Results of sums of bf16 are 0 where they are smaller than the least normal number, also those that only rounding
 *  to a denormal number's few digits makes as large as it: they are seen where factors are larger. */
static float ref_halves_fma(float x, float w, float s)
{
    const float sum = fmaf(x, w, s);
    return fabsf(sum) <= 0x1p-126f && fabsf(fmaf(x * 0x1p64f, w, s * 0x1p64f)) < 0x1p-62f ? 0 : sum;
}

static float ref_halves_add(float x, float y) { return fabsf(x + y) < 0x1p-126f ? 0 : x + y; }

/** With rows as bf16, too. */
static void ref_half_product(const peri_k_panel_product_args *a, int64_t begin, int64_t end)
{
    for (int64_t r = begin; r < end; r++) {
        peri_k_codes *row = (peri_k_codes *)((char *)a->codes + r * peri_codes_bytes(a->inner, PERI_BF16));
        const float *x = (const float *)(const void *)row->codes;
        peri_halves_of(row, a->x + r * a->x_stride, a->inner, true);
        for (int64_t c = 0; c < a->cols; c++) {
            const uint16_t *w = (const uint16_t *)a->panels + c / PERI_PANEL * PERI_PANEL * a->inner + c % PERI_PANEL;
            float s = 0;
            for (int64_t k = 0; k < a->inner; k += PERI_HALVES_STEP) {
                float sums[2] = {0, 0};
                for (int64_t i = k; i < ref_min(k + PERI_HALVES_STEP, a->inner); i++) {
                    const float number = k_bf16_to_f32(w[i * PERI_PANEL]);
                    sums[i % 2] = ref_halves_fma(x[i], fabsf(number) < 0x1p-126f ? 0 : number, sums[i % 2]);
                }
                s = ref_halves_add(s, ref_halves_add(sums[0], sums[1]));
            }
            a->y[r * a->y_stride + c] = (float)ref_f(a->act, a->bias ? s + 0.0f + a->bias[c] : s + 0.0f, 0, 0);
        }
    }
}

static void ref_panel_product(const void *args, int64_t begin, int64_t end)
{
    const peri_k_panel_product_args *a = args;
    if (a->codes) {
        if (a->dtype == PERI_BF16) ref_half_product(a, begin, end);
        else ref_code_product(a, begin, end);
        return;
    }
    for (int64_t r = begin; r < end; r++)
        for (int64_t c = 0; c < a->cols; c++) {
            const float *x = a->x + r * a->x_stride;
            const char *panel =
                (const char *)a->panels + peri_panel_bytes(c / PERI_PANEL * PERI_PANEL, a->inner, a->dtype);
            const int64_t w = c % PERI_PANEL;
            float s = 0, scale;
            for (int64_t k = 0; k < a->inner; k++)
                s = fmaf(x[k], a->dtype == PERI_I8 ? (float)((const int8_t *)panel)[w + k * PERI_PANEL]
                                                   : (float)ref_get(panel, w + k * PERI_PANEL, a->dtype), s);
            if (a->dtype == PERI_I8) {
                memcpy(&scale, panel + a->inner * PERI_PANEL + w * 4, sizeof scale);
                s *= scale;
            }
            a->y[r * a->y_stride + c] = (float)ref_f(a->act, a->bias ? s + a->bias[c] : s, 0, 0);
        }
}

static int64_t ref_block_end(int64_t block, int64_t rows)
{
    int64_t end = (block + 1) * PERI_SUM_ROWS;
    return end < rows ? end : rows;
}

static void ref_act_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_act_grad_args *a = args;
    for (int64_t k = begin; k < end; k++)
        for (int64_t c = 0; c < a->cols; c++) {
            double sum = 0;
            for (int64_t r = k * PERI_SUM_ROWS; r < ref_block_end(k, a->rows); r++) {
                double y = a->act == PERI_UNARY_IDENTITY ? 0 : ref_get(a->y, r * a->cols + c, a->dtype);
                double z = ref_chain(a->act, ref_get(a->dy, r * a->dy_stride + c, a->dtype), y, 0, 0);
                if (a->dz) ref_put(a->dz, r * a->cols + c, a->dtype, z);
                sum += z;
            }
            if (a->partial) ref_put(a->partial, k * a->cols + c, ref_wide(a->dtype), sum);
        }
}

/* -- a layer of a cross network ------------------------------------------------------------------------------------ */

static void ref_cross(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cross_args *a = args;
    for (int64_t r = begin; r < end; r++)
        for (int64_t c = 0; c < a->cols; c++) {
            int64_t i = r * a->cols + c;
            double u = ref_get(a->u, i, a->dtype) + (a->bias ? ref_get(a->bias, c, ref_wide(a->dtype)) : 0);
            ref_put(a->y, i, a->dtype, ref_get(a->x0, i, a->dtype) * u + ref_get(a->x, i, a->dtype));
        }
}

static void ref_cross_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cross_grad_args *a = args;
    for (int64_t k = begin; k < end; k++)
        for (int64_t c = 0; c < a->cols; c++) {
            double sum = 0, bias = a->bias ? ref_get(a->bias, c, ref_wide(a->dtype)) : 0;
            for (int64_t r = k * PERI_SUM_ROWS; r < ref_block_end(k, a->rows); r++) {
                int64_t i = r * a->cols + c;
                double dy = ref_get(a->dy, i, a->dtype), x0 = ref_get(a->x0, i, a->dtype),
                       u = ref_get(a->u, i, a->dtype);
                double before = a->add ? ref_get(a->dx0, i, a->dtype) : 0;
                ref_put(a->du, i, a->dtype, dy * x0);
                ref_put(a->dx0, i, a->dtype, before + dy * (u + bias) + (a->same ? dy : 0));
                sum += ref_get(a->du, i, a->dtype);
            }
            if (a->partial) ref_put(a->partial, k * a->cols + c, ref_wide(a->dtype), sum);
        }
}

/* -- reductions ---------------------------------------------------------------------------------------------------- */

static void ref_sum_dim(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sum_dim_args *a = args;
    int64_t blocks = a->n ? (a->n + a->block - 1) / a->block : 1;
    int64_t parts = (a->inner + PERI_SUM_COLUMNS - 1) / PERI_SUM_COLUMNS;
    for (int64_t u = begin; u < end; u++) {
        int64_t first = u % parts * PERI_SUM_COLUMNS, k = u / parts % blocks, o = u / parts / blocks;
        int64_t last = first + PERI_SUM_COLUMNS < a->inner ? first + PERI_SUM_COLUMNS : a->inner;
        int64_t stop = (k + 1) * a->block < a->n ? (k + 1) * a->block : a->n;
        for (int64_t i = first; i < last; i++) {
            double sum = 0;
            for (int64_t r = k * a->block; r < stop; r++) sum += ref_get(a->x, (o * a->n + r) * a->inner + i, a->dtype);
            ref_put(a->dst, (o * blocks + k) * a->inner + i, a->dtype, sum * a->scale);
        }
    }
}

#define REF_MAX(T)                                                                                                     \
    do {                                                                                                               \
        const T *x = (const T *)a->x + base;                                                                           \
        int64_t best = 0;                                                                                              \
        for (int64_t r = 1; r < a->n && x[best * a->inner] == x[best * a->inner]; r++) {                               \
            const T now = x[r * a->inner], most = x[best * a->inner];                                                  \
            if (!(a->least ? now >= most : now <= most)) best = r;                                                     \
        }                                                                                                              \
        ((T *)a->values)[u] = x[best * a->inner];                                                                      \
        a->indices[u] = best;                                                                                          \
    } while (0)

static void ref_max_dim(const void *args, int64_t begin, int64_t end)
{
    const peri_k_max_dim_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        const int64_t base = u / a->inner * a->n * a->inner + u % a->inner;
        if (a->dtype == PERI_F64) REF_MAX(double);
        else if (a->dtype == PERI_I64) REF_MAX(int64_t);
        else REF_MAX(float);
    }
}

static void ref_max_dim_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_max_dim_grad_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        int64_t base = u / a->inner * a->n * a->inner + u % a->inner;
        for (int64_t r = 0; r < a->n; r++)
            ref_put(a->dx, base + r * a->inner, a->dtype, r == a->indices[u] ? ref_get(a->dy, u, a->dtype) : 0);
    }
}

static void ref_product_dim(const void *args, int64_t begin, int64_t end)
{
    const peri_k_product_dim_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        const int64_t base = u / a->inner * a->n * a->inner + u % a->inner;
        if (a->dtype == PERI_I64) {
            uint64_t whole = 1;
            for (int64_t r = 0; r < a->n; r++) whole *= (uint64_t)((const int64_t *)a->x)[base + r * a->inner];
            ((int64_t *)a->y)[u] = (int64_t)whole;
        } else {
            double product = 1;
            for (int64_t r = 0; r < a->n; r++) product *= ref_get(a->x, base + r * a->inner, a->dtype);
            ref_put(a->y, u, a->dtype, product);
        }
    }
}

/** Of each element what stands before it is multiplied on the way down, what stands behind it on the way up. */
#define REF_PRODUCT_GRAD(T)                                                                                            \
    do {                                                                                                               \
        const T *x = (const T *)a->x + base;                                                                           \
        T *dx = (T *)a->dx + base;                                                                                     \
        double before = 1, behind = (double)((const T *)a->dy)[u];                                                     \
        for (int64_t r = 0; r < n; before *= (double)x[r++ * by]) dx[r * by] = (T)before;                              \
        for (int64_t r = n - 1; r >= 0; behind *= (double)x[r-- * by]) dx[r * by] = (T)((double)dx[r * by] * behind);  \
    } while (0)

static void ref_product_dim_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_product_dim_grad_args *a = args;
    const int64_t n = a->n, by = a->inner;
    for (int64_t u = begin; u < end; u++) {
        const int64_t base = u / by * n * by + u % by;
        if (a->dtype == PERI_F64) REF_PRODUCT_GRAD(double);
        else REF_PRODUCT_GRAD(float);
    }
}

static void ref_softmax(const void *args, int64_t begin, int64_t end)
{
    const peri_k_softmax_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        int64_t base = u / a->inner * a->n * a->inner + u % a->inner;
        double max = -INFINITY, sum = 0;
        for (int64_t r = 0; r < a->n; r++) max = fmax(max, ref_get(a->x, base + r * a->inner, a->dtype));
        if (a->zeros && max == -INFINITY) max = 0;
        for (int64_t r = 0; r < a->n; r++) sum += exp(ref_get(a->x, base + r * a->inner, a->dtype) - max);
        if (a->zeros && sum == 0) sum = 1;
        for (int64_t r = 0; r < a->n; r++) {
            double x = ref_get(a->x, base + r * a->inner, a->dtype) - max;
            ref_put(a->y, base + r * a->inner, a->dtype, a->log ? x - log(sum) : exp(x) / sum);
        }
    }
}

static void ref_softmax_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_softmax_grad_args *a = args;
    for (int64_t u = begin; u < end; u++) {
        int64_t base = u / a->inner * a->n * a->inner + u % a->inner;
        double sum = 0;
        for (int64_t r = 0; r < a->n; r++) {
            int64_t i = base + r * a->inner;
            sum += ref_get(a->dy, i, a->dtype) * (a->log ? 1 : ref_get(a->y, i, a->dtype));
        }
        for (int64_t r = 0; r < a->n; r++) {
            int64_t i = base + r * a->inner;
            double g = ref_get(a->dy, i, a->dtype), y = ref_get(a->y, i, a->dtype);
            ref_put(a->dx, i, a->dtype, a->log ? g - exp(y) * sum : y * (g - sum));
        }
    }
}

static void ref_layer_norm(const void *args, int64_t begin, int64_t end)
{
    const peri_k_layer_norm_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        double mean = 0, variance = 0;
        for (int64_t c = 0; c < a->cols; c++) mean += ref_get(a->x, r * a->cols + c, a->dtype);
        mean /= (double)a->cols;
        for (int64_t c = 0; c < a->cols; c++) {
            double d = ref_get(a->x, r * a->cols + c, a->dtype) - mean;
            variance += d * d;
        }
        double rstd = 1 / sqrt(variance / (double)a->cols + a->eps);
        ref_put(a->mean, r, a->dtype, mean);
        ref_put(a->rstd, r, a->dtype, rstd);
        for (int64_t c = 0; c < a->cols; c++) {
            double h = (ref_get(a->x, r * a->cols + c, a->dtype) - mean) * rstd;
            if (a->weight) h *= ref_get(a->weight, c, a->dtype);
            if (a->bias) h += ref_get(a->bias, c, a->dtype);
            ref_put(a->y, r * a->cols + c, a->dtype, h);
        }
    }
}

static void ref_layer_norm_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_layer_norm_grad_args *a = args;
    for (int64_t k = begin; k < end; k++) {
        for (int64_t c = 0; c < a->cols; c++) {
            double dweight = 0, dbias = 0;
            for (int64_t r = k * PERI_SUM_ROWS; r < ref_block_end(k, a->rows); r++) {
                double g = ref_get(a->dy, r * a->cols + c, a->dtype);
                dbias += g;
                dweight += g * (ref_get(a->x, r * a->cols + c, a->dtype) - ref_get(a->mean, r, a->dtype)) *
                           ref_get(a->rstd, r, a->dtype);
            }
            if (a->dweight) ref_put(a->dweight, k * a->cols + c, a->dtype, dweight);
            if (a->dbias) ref_put(a->dbias, k * a->cols + c, a->dtype, dbias);
        }
        for (int64_t r = k * PERI_SUM_ROWS; a->dx && r < ref_block_end(k, a->rows); r++) {
            double mean = ref_get(a->mean, r, a->dtype), rstd = ref_get(a->rstd, r, a->dtype), sum_g = 0, sum_gh = 0;
            for (int pass = 0; pass < 2; pass++)
                for (int64_t c = 0; c < a->cols; c++) {
                    double g =
                        ref_get(a->dy, r * a->cols + c, a->dtype) * (a->weight ? ref_get(a->weight, c, a->dtype) : 1);
                    double h = (ref_get(a->x, r * a->cols + c, a->dtype) - mean) * rstd;
                    if (pass == 0) sum_g += g, sum_gh += g * h;
                    else ref_put(a->dx, r * a->cols + c, a->dtype, rstd * (g - (sum_g + h * sum_gh) / (double)a->cols));
                }
        }
    }
}

static void ref_dropout(const void *args, int64_t begin, int64_t end)
{
    const peri_k_dropout_args *a = args;
    const uint64_t seed = a->drawn ? a->drawn[0] : a->seed, stream = a->drawn ? a->drawn[1] : a->random_stream,
                   offset = a->drawn ? a->drawn[2] : a->offset;
    for (int64_t i = begin; i < end; i++) {
        bool keep = ref_random_word(seed, stream, offset + (uint64_t)i) >= a->threshold;
        ref_put(a->y, i, a->dtype, keep ? ref_get(a->x, i, a->dtype) * a->scale : 0);
    }
}

/* -- pairwise dot products ----------------------------------------------------------------------------------------- */

static void ref_interaction(const void *args, int64_t begin, int64_t end)
{
    const peri_k_interaction_args *a = args;
    int64_t width = a->dim + a->features * (a->features + 1) / 2;
    for (int64_t b = begin; b < end; b++) {
        int64_t at = b * width;
        for (int64_t d = 0; d < a->dim; d++)
            ref_put(a->y, at++, a->dtype, ref_get(a->dense, b * a->dense_stride + d, a->dtype));
        for (int64_t i = 0; i <= a->features; i++)
            for (int64_t j = i + 1; j <= a->features; j++) {
                double sum = 0;
                for (int64_t d = 0; d < a->dim; d++) {
                    double vi =
                        i == 0 ? ref_get(a->dense, b * a->dense_stride + d, a->dtype)
                               : ref_get(a->sparse, b * a->sparse_stride + (i - 1) * a->feature_stride + d, a->dtype);
                    sum += vi * ref_get(a->sparse, b * a->sparse_stride + (j - 1) * a->feature_stride + d, a->dtype);
                }
                ref_put(a->y, at++, a->dtype, sum);
            }
    }
}

/** Place of pair (i, j), i != j, among the products of vectors 0..features. */
static int64_t ref_pair(int64_t i, int64_t j, int64_t features)
{
    int64_t low = i < j ? i : j, high = i < j ? j : i;
    return low * features - low * (low - 1) / 2 + high - low - 1;
}

static void ref_interaction_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_interaction_grad_args *a = args;
    for (int64_t b = begin; b < end; b++)
        for (int64_t i = 0; i <= a->features; i++)
            for (int64_t d = 0; d < a->dim; d++) {
                double sum = i == 0 ? ref_get(a->dy, b * a->dy_stride + d, a->dtype) : 0;
                for (int64_t j = 0; j <= a->features; j++) {
                    if (j == i) continue;
                    double v =
                        j == 0 ? ref_get(a->dense, b * a->dense_stride + d, a->dtype)
                               : ref_get(a->sparse, b * a->sparse_stride + (j - 1) * a->feature_stride + d, a->dtype);
                    sum += v * ref_get(a->dy, b * a->dy_stride + a->dim + ref_pair(i, j, a->features), a->dtype);
                }
                if (i == 0 && a->ddense) ref_put(a->ddense, b * a->dim + d, a->dtype, sum);
                if (i > 0 && a->dsparse) ref_put(a->dsparse, (b * a->features + i - 1) * a->dim + d, a->dtype, sum);
            }
}

/* -- losses -------------------------------------------------------------------------------------------------------- */

static void ref_loss(const void *args, int64_t begin, int64_t end)
{
    const peri_k_loss_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double x = ref_get(a->x, i, a->dtype), t = ref_get(a->t, i, a->dtype), l;
        double w = a->weight ? ref_get(a->weight, i, a->dtype) : 1,
               p = a->pos_weight ? ref_get(a->pos_weight, i, a->dtype) : 1;
        if (a->kind == PERI_LOSS_KIND_BCE_LOGITS) l = (1 - t) * x + (1 + (p - 1) * t) * ref_softplus(-x);
        else if (a->kind == PERI_LOSS_KIND_BCE && !(x >= 0 && x <= 1 && t >= 0 && t <= 1)) l = NAN;
        else if (a->kind == PERI_LOSS_KIND_BCE) l = -(t * fmax(log(x), -100) + (1 - t) * fmax(log1p(-x), -100));
        else l = (x - t) * (x - t);
        ref_put(a->dst, i, a->dtype, w * l);
    }
}

static void ref_loss_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_loss_grad_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double x = ref_get(a->x, i, a->dtype), t = ref_get(a->t, i, a->dtype), d;
        double w = a->weight ? ref_get(a->weight, i, a->dtype) : 1,
               p = a->pos_weight ? ref_get(a->pos_weight, i, a->dtype) : 1;
        if (a->kind == PERI_LOSS_KIND_BCE_LOGITS) d = (1 - t) - (1 + (p - 1) * t) * ref_sigmoid(-x);
        else if (a->kind == PERI_LOSS_KIND_BCE) d = (x - t) / fmax(x * (1 - x), 1e-12);
        else d = 2 * (x - t);
        ref_put(a->dx, i, a->dtype, a->scale * ref_get(a->g, i * a->g_stride, a->dtype) * w * d);
    }
}

static void ref_mean(const void *args, int64_t begin, int64_t end)
{
    const peri_k_mean_args *a = args;
    if (begin >= end) return;
    double total = ref_get(a->sum, 0, a->sum_dtype), n = a->count ? a->count[0] : a->number,
           divisor = n > 1e-30 || n != n ? n : 1e-30;
    if (a->parts) a->parts[0] = total, a->parts[1] = n;
    if (a->value) ref_put(a->value, 0, a->dtype, total / divisor);
    if (a->scale) ref_put(a->scale, 0, a->dtype, a->ranks / divisor);
}

static bool ref_ignored(const peri_k_class_shares *of, int64_t label) { return of->ignores && label == of->ignored; }
static double ref_weight(const peri_k_class_shares *of, int64_t c, int32_t dtype)
{
    return of->weight ? ref_get(of->weight, c, dtype) : 1;
}

/** The loss of row @r, whose lse is known; *count: what its label counts. */
static double ref_label_loss(const peri_k_cross_entropy_args *a, int64_t r, double lse, double *count)
{
    const int64_t label = a->labels[r];
    double shared = 0;
    *count = 0;
    if (ref_ignored(&a->of, label)) return 0;
    *count = ref_weight(&a->of, label, a->dtype);
    for (int64_t c = 0; c < a->classes && a->of.smoothing > 0; c++)
        shared += ref_weight(&a->of, c, a->dtype) * (lse - ref_get(a->x, r * a->classes + c, a->dtype));
    const double own = lse - ref_get(a->x, r * a->classes + label, a->dtype);
    return (1 - a->of.smoothing) * *count * own + a->of.smoothing / (double)a->classes * shared;
}

static void ref_cross_entropy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cross_entropy_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        double max = -INFINITY, sum = 0, count;
        for (int64_t c = 0; c < a->classes; c++) max = fmax(max, ref_get(a->x, r * a->classes + c, a->dtype));
        for (int64_t c = 0; c < a->classes; c++) sum += exp(ref_get(a->x, r * a->classes + c, a->dtype) - max);
        const double lse = max + log(sum), loss = ref_label_loss(a, r, lse, &count);
        ref_put(a->lse, r, a->dtype, lse);
        ref_put(a->loss, r, a->dtype, loss);
        if (a->counts) ref_put(a->counts, r, a->dtype, count);
    }
}

static void ref_cross_entropy_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_cross_entropy_grad_args *a = args;
    const double smoothing = a->of.smoothing, part = smoothing / (double)a->classes;
    double all = 0;
    for (int64_t c = 0; c < a->classes; c++) all += ref_weight(&a->of, c, a->dtype);
    for (int64_t r = begin; r < end; r++) {
        const int64_t label = a->labels[r];
        const bool ignored = ref_ignored(&a->of, label);
        const double g = a->scale * ref_get(a->g, r * a->g_stride, a->dtype), lse = ref_get(a->lse, r, a->dtype),
                     own = ignored ? 0 : (1 - smoothing) * ref_weight(&a->of, label, a->dtype);
        for (int64_t c = 0; c < a->classes; c++) {
            const double p = exp(ref_get(a->x, r * a->classes + c, a->dtype) - lse),
                         target = (c == label ? own : 0) + part * ref_weight(&a->of, c, a->dtype);
            ref_put(a->dx, r * a->classes + c, a->dtype, ignored ? 0 : g * ((own + part * all) * p - target));
        }
    }
}
