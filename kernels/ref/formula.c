/* SPDX-License-Identifier: Apache-2.0
 *
 * formula.c (ref): see kernels/dense.h. The functions are those of dense.c; each step is rounded to the dtype.
 */

/** What step @s computes of the registers @r. */
static double ref_formula_step(const peri_k_formula_step *s, const double *r)
{
    switch (s->kind) {
    case PERI_FORMULA_UNARY: return ref_f(s->op, r[s->a], s->x, s->y);
    case PERI_FORMULA_CHAIN: return ref_chain(s->op, r[s->a], r[s->b], s->x, s->y);
    case PERI_FORMULA_BINARY: return ref_both(s->op, r[s->a], r[s->b]);
    case PERI_FORMULA_COMPARE: return peri_compared(s->op, r[s->a], r[s->b]);
    case PERI_FORMULA_WHERE: return r[s->a] != 0 ? r[s->b] : r[s->c];
    default: return s->x;
    }
}

/** Where input @k has element @i. */
static int64_t ref_formula_place(const peri_k_formula_args *a, int32_t k, int64_t i)
{
    int64_t at = 0;
    for (int32_t d = a->ndim - 1; d >= 0; d--) {
        at += i % a->shape[d] * a->stride[k][d];
        i /= a->shape[d];
    }
    return at;
}

static void ref_formula(const void *args, int64_t begin, int64_t end)
{
    const peri_k_formula_args *a = args;
    double r[PERI_FORMULA_INPUTS + PERI_FORMULA_STEPS];
    for (int64_t i = begin; i < end; i++) {
        for (int32_t k = 0; k < a->n_in; k++) r[k] = ref_get(a->in[k], ref_formula_place(a, k, i), a->dtype);
        for (int32_t k = 0; k < a->n_steps; k++) {
            const double x = ref_formula_step(&a->step[k], r);
            r[a->n_in + k] = a->dtype == PERI_F64 ? x : (double)(float)x;
        }
        for (int32_t k = 0; k < a->n_results; k++) ref_put(a->dst[k], i, a->dtype, r[a->result[k]]);
    }
}
