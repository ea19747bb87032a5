/* SPDX-License-Identifier: Apache-2.0
 *
 * formula.c (cpu): formulas by blocks of elements, whose registers stay in the first cache: each step is the kernel of
 * dense.c that computes the same.
 */

enum { FORMULA_BYTES = 512 };

/** One register of a block: so many elements of f32 or f64. */
typedef union formula_register {
    float f32[FORMULA_BYTES / 4];
    double f64[FORMULA_BYTES / 8];
} formula_register;

/** @to = elements [@i, @i + @n) of input @k; returns where they are: in the input itself if they lie there one behind
 *  the other. */
#define FORMULA_LOAD(T, a, k, i, n, to)                                                                                \
    do {                                                                                                               \
        const T *x_ = (a)->in[k];                                                                                      \
        const int32_t last_ = (a)->ndim - 1;                                                                           \
        if (last_ < 0 || (last_ == 0 && (a)->stride[k][0] == 0)) {                                                     \
            for (int64_t e_ = 0; e_ < (n); e_++) (to)[e_] = *x_;                                                       \
        } else if (last_ == 0 && (a)->stride[k][0] == 1) {                                                             \
            return x_ + (i);                                                                                           \
        } else {                                                                                                       \
            const int64_t row_ = (a)->shape[last_], step_ = (a)->stride[k][last_];                                     \
            for (int64_t e_ = 0; e_ < (n);) {                                                                          \
                const int64_t in_row_ = ((i) + e_) % row_, left_ = row_ - in_row_;                                     \
                const T *from_ = x_ + ref_formula_place((a), k, (i) + e_);                                             \
                const int64_t here_ = left_ < (n) - e_ ? left_ : (n) - e_;                                             \
                for (int64_t q_ = 0; q_ < here_; q_++) (to)[e_ + q_] = from_[q_ * step_];                              \
                e_ += here_;                                                                                           \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)

static const void *formula_load(const peri_k_formula_args *a, int32_t k, int64_t i, int64_t n, formula_register *to)
{
    if (a->dtype == PERI_F64) FORMULA_LOAD(double, a, k, i, n, to->f64);
    else FORMULA_LOAD(float, a, k, i, n, to->f32);
    return to;
}

#define FORMULA_EACH(expr)                                                                                             \
    do {                                                                                                               \
        for (int64_t e = 0; e < n; e++) y[e] = (expr);                                                                 \
    } while (0)
/** Comparisons and choices of @n numbers of type T; all other steps are kernels. */
#define FORMULA_CHOICE(T, s, dst, r, n)                                                                                \
    do {                                                                                                               \
        T *restrict y = (dst);                                                                                         \
        const T *u = (r)[(s)->a], *v = (r)[(s)->b], *w = (r)[(s)->c];                                                  \
        if ((s)->kind == PERI_FORMULA_NUMBER) FORMULA_EACH((T)(s)->x);                                                 \
        else if ((s)->kind == PERI_FORMULA_WHERE) FORMULA_EACH(u[e] != 0 ? v[e] : w[e]);                               \
        else if ((s)->op == PERI_COMPARE_EQ) FORMULA_EACH(u[e] == v[e]);                                               \
        else if ((s)->op == PERI_COMPARE_NE) FORMULA_EACH(u[e] != v[e]);                                               \
        else if ((s)->op == PERI_COMPARE_LT) FORMULA_EACH(u[e] < v[e]);                                                \
        else if ((s)->op == PERI_COMPARE_LE) FORMULA_EACH(u[e] <= v[e]);                                               \
        else if ((s)->op == PERI_COMPARE_GT) FORMULA_EACH(u[e] > v[e]);                                                \
        else FORMULA_EACH(u[e] >= v[e]);                                                                               \
    } while (0)

static void formula_both(int32_t dtype, int32_t op, void *dst, const void *x, const void *y, int64_t n)
{
    if (dtype == PERI_F32) {
        cpu_binary_row(op, dst, x, 1, y, 1, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) ((double *)dst)[i] = ref_both(op, ((const double *)x)[i], ((const double *)y)[i]);
}

/** @dst = step @s of @n elements; @r: where the registers are. */
static void formula_step(int32_t dtype, const peri_k_formula_step *s, void *dst, const void *const *r, int64_t n)
{
    if (s->kind == PERI_FORMULA_UNARY) {
        const peri_k_unary_args u = {.dst = dst, .x = r[s->a], .dtype = dtype, .op = s->op, .a = s->x, .b = s->y};
        cpu_unary(&u, 0, n);
    } else if (s->kind == PERI_FORMULA_CHAIN) {
        const peri_k_unary_grad_args u = {.dx = dst, .dy = r[s->a], .saved = r[s->b], .dtype = dtype, .op = s->op,
                                          .a = s->x, .b = s->y};
        cpu_unary_grad(&u, 0, n);
    } else if (s->kind == PERI_FORMULA_BINARY) {
        formula_both(dtype, s->op, dst, r[s->a], r[s->b], n);
    } else if (dtype == PERI_F64) {
        FORMULA_CHOICE(double, s, dst, r, n);
    } else {
        FORMULA_CHOICE(float, s, dst, r, n);
    }
}

static void cpu_formula(const void *args, int64_t begin, int64_t end)
{
    const peri_k_formula_args *a = args;
    const int64_t size = a->dtype == PERI_F64 ? 8 : 4, block = FORMULA_BYTES / size;
    formula_register room[PERI_FORMULA_INPUTS + PERI_FORMULA_STEPS];
    const void *r[PERI_FORMULA_INPUTS + PERI_FORMULA_STEPS];
    for (int64_t i = begin; i < end; i += block) {
        const int64_t n = end - i < block ? end - i : block;
        for (int32_t k = 0; k < a->n_in; k++) r[k] = formula_load(a, k, i, n, &room[k]);
        for (int32_t k = 0; k < a->n_steps; k++) {
            void *dst = &room[a->n_in + k];
            formula_step(a->dtype, &a->step[k], dst, r, n);
            r[a->n_in + k] = dst;
        }
        for (int32_t k = 0; k < a->n_results; k++)
            memcpy((char *)a->dst[k] + i * size, r[a->result[k]], (size_t)(n * size));
    }
}

#define K_CPU_FORMULA [PERI_K_formula] = cpu_formula
