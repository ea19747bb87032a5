/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_rows.c: the optimizers: one row each, by the formulas of kernels/tbe.h.
 */

/** Up to sixteen elements. */
TBE_INLINE v16 tbe_get(const float *p, int64_t n) { return n >= 16 ? v16_load(p) : v16_load_part(p, n); }
TBE_INLINE void tbe_put(float *p, v16 x, int64_t n)
{
    if (n >= 16) v16_store(p, x);
    else v16_store_part(p, x, n);
}

TBE_INLINE void tbe_row_sgd(const peri_k_tbe_optimizer *o, float *w, const float *g, int64_t n)
{
    v16 rate = v16_set(-o->lr);
    for (int64_t d = 0; d < n; d += 16) tbe_put(w + d, v16_fma(rate, tbe_get(g + d, n - d), tbe_get(w + d, n - d)), n - d);
}

TBE_INLINE void tbe_row_adagrad(const peri_k_tbe_optimizer *o, float *w, float *h, const float *g, int64_t n)
{
    v16 rate = v16_set(o->lr), eps = v16_set(o->eps);
    for (int64_t d = 0; d < n; d += 16) {
        v16 x = tbe_get(g + d, n - d), sum = v16_fma(x, x, tbe_get(h + d, n - d));
        tbe_put(h + d, sum, n - d);
        tbe_put(w + d, v16_sub(tbe_get(w + d, n - d), v16_div(v16_mul(rate, x), v16_add(v16_sqrt(sum), eps))), n - d);
    }
}

TBE_INLINE void tbe_row_rowwise_adagrad(const peri_k_tbe_optimizer *o, float *w, float *m, const float *g, int64_t n)
{
    v16 squares = v16_zero(), decay = v16_set(o->weight_decay);
    for (int64_t d = 0; d < n; d += 16) {
        v16 x = tbe_get(g + d, n - d);
        if (o->decay == PERI_K_DECAY_L2) x = v16_fma(decay, tbe_get(w + d, n - d), x);
        squares = v16_fma(x, x, squares);
    }
    *m += v16_sum(squares) / (float)n;
    float mult = o->lr / (sqrtf(*m) + o->eps), corr = 1;
    if (o->decay == PERI_K_DECAY_L2) corr = 1 - mult * o->weight_decay;
    if (o->decay == PERI_K_DECAY_DECOUPLE) corr = 1 - o->lr * o->weight_decay;
    v16 rate = v16_set(-mult), keep = v16_set(corr);
    for (int64_t d = 0; d < n; d += 16) tbe_put(w + d, v16_fma(rate, tbe_get(g + d, n - d), v16_mul(keep, tbe_get(w + d, n - d))), n - d);
}

TBE_INLINE void tbe_row_adam(const peri_k_tbe_optimizer *o, float *w, float *m1, float *m2, float *counter, const float *g, int64_t n)
{
    float c1 = o->correction1, c2 = o->correction2;
    if (o->row_bias_correction) {
        uint64_t step = (uint64_t)(*counter += 1);
        c1 = (float)(1 / (1 - tbe_power(o->exact_beta1, step)));
        c2 = (float)(1 / (1 - tbe_power(o->exact_beta2, step)));
    }
    v16 rate = v16_set(o->lr), eps = v16_set(o->eps), decay = v16_set(o->weight_decay), v1 = v16_set(c1), v2 = v16_set(c2);
    v16 keep1 = v16_set(o->beta1), keep2 = v16_set(o->beta2), rest1 = v16_set(o->rest1), rest2 = v16_set(o->rest2);
    for (int64_t d = 0; d < n; d += 16) {
        v16 x = tbe_get(g + d, n - d), y = tbe_get(w + d, n - d);
        v16 a = v16_fma(rest1, x, v16_mul(keep1, tbe_get(m1 + d, n - d)));
        v16 b = v16_fma(v16_mul(rest2, x), x, v16_mul(keep2, tbe_get(m2 + d, n - d)));
        tbe_put(m1 + d, a, n - d);
        tbe_put(m2 + d, b, n - d);
        v16 step = v16_div(v16_mul(a, v1), v16_add(v16_sqrt(v16_mul(b, v2)), eps));
        tbe_put(w + d, v16_sub(y, v16_mul(rate, v16_fma(decay, y, step))), n - d);
    }
}

/** Update the row at element `at`, number `linear` of the group, with summed gradient @g. @kind is known at compile time. */
TBE_INLINE void tbe_row(const peri_k_tbe_rows *rows, const peri_k_tbe_optimizer *o, int64_t at, int64_t linear, const float *g, int64_t n,
                        const int kind)
{
    float *w = (float *)rows->weight + at;
    switch (kind) {
    case PERI_K_OPTIM_SGD: tbe_row_sgd(o, w, g, n); break;
    case PERI_K_OPTIM_ADAGRAD: tbe_row_adagrad(o, w, rows->momentum1 + at, g, n); break;
    case PERI_K_OPTIM_ROWWISE_ADAGRAD: tbe_row_rowwise_adagrad(o, w, rows->momentum1 + linear, g, n); break;
    case PERI_K_OPTIM_ADAM:
        tbe_row_adam(o, w, rows->momentum1 + at, rows->momentum2 + at, o->row_bias_correction ? rows->row_counter + linear : NULL, g, n);
        break;
    default: break;
    }
}
