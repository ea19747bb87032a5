/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c (ref): see kernels/optim.h. Each element is computed in f64; what is stored is rounded once.
 */

/** The gradient with its sign and weight decay. */
static double ref_decayed(const void *w, const void *g, int64_t i, int32_t dtype, bool maximize, double weight_decay)
{
    double x = ref_get(g, i, dtype);
    return (maximize ? -x : x) + weight_decay * ref_get(w, i, dtype);
}

static void ref_optim_sgd(const void *args, int64_t begin, int64_t end)
{
    const peri_k_optim_sgd_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double g = ref_decayed(a->w, a->g, i, a->dtype, a->maximize, a->weight_decay);
        if (a->momentum_buffer) {
            double m = a->first ? g : a->momentum * ref_get(a->momentum_buffer, i, a->dtype) + (1 - a->dampening) * g;
            ref_put(a->momentum_buffer, i, a->dtype, m);
            g = a->nesterov ? g + a->momentum * m : m;
        }
        ref_put(a->w, i, a->dtype, ref_get(a->w, i, a->dtype) - a->lr * g);
    }
}

static void ref_optim_adagrad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_optim_adagrad_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double g = ref_decayed(a->w, a->g, i, a->dtype, a->maximize, a->weight_decay), sum = ref_get(a->sum, i, a->dtype) + g * g;
        ref_put(a->sum, i, a->dtype, sum);
        ref_put(a->w, i, a->dtype, ref_get(a->w, i, a->dtype) - a->lr * g / (sqrt(sum) + a->eps));
    }
}

static void ref_optim_adam(const void *args, int64_t begin, int64_t end)
{
    const peri_k_optim_adam_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double w = ref_get(a->w, i, a->dtype), m = ref_get(a->m, i, a->dtype), v = ref_get(a->v, i, a->dtype);
        double g = ref_decayed(a->w, a->g, i, a->dtype, a->maximize, a->decoupled ? 0 : a->weight_decay);
        if (a->decoupled) w *= 1 - a->lr * a->weight_decay;
        m += (1 - a->beta1) * (g - m);
        v = a->beta2 * v + (1 - a->beta2) * g * g;
        ref_put(a->m, i, a->dtype, m);
        ref_put(a->v, i, a->dtype, v);
        if (a->most) {
            double most = ref_get(a->most, i, a->dtype);
            v = v > most ? v : most;
            ref_put(a->most, i, a->dtype, v);
        }
        ref_put(a->w, i, a->dtype, w - a->step_size * m / (sqrt(v) / a->root + a->eps));
    }
}

static void ref_optim_rmsprop(const void *args, int64_t begin, int64_t end)
{
    const peri_k_optim_rmsprop_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double g = ref_decayed(a->w, a->g, i, a->dtype, a->maximize, a->weight_decay);
        double v = a->alpha * ref_get(a->v, i, a->dtype) + (1 - a->alpha) * g * g, d = v;
        ref_put(a->v, i, a->dtype, v);
        if (a->average) {
            double average = ref_get(a->average, i, a->dtype);
            average += (1 - a->alpha) * (g - average);
            ref_put(a->average, i, a->dtype, average);
            d = v - average * average;
        }
        double update = g / (sqrt(d) + a->eps);
        if (a->momentum_buffer) {
            update += a->momentum * ref_get(a->momentum_buffer, i, a->dtype);
            ref_put(a->momentum_buffer, i, a->dtype, update);
        }
        ref_put(a->w, i, a->dtype, ref_get(a->w, i, a->dtype) - a->lr * update);
    }
}

static void ref_optim_rowwise_adagrad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_optim_rowwise_adagrad_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        double squares = 0;
        for (int64_t i = r * a->cols; i < (r + 1) * a->cols; i++) {
            double g = ref_decayed(a->w, a->g, i, a->dtype, a->maximize, a->weight_decay);
            squares += g * g;
        }
        double sum = ref_get(a->sum, r, a->dtype) + (a->cols ? squares / (double)a->cols : 0), scale = a->lr / (sqrt(sum) + a->eps);
        ref_put(a->sum, r, a->dtype, sum);
        for (int64_t i = r * a->cols; i < (r + 1) * a->cols; i++)
            ref_put(a->w, i, a->dtype,
                    ref_get(a->w, i, a->dtype) - scale * ref_decayed(a->w, a->g, i, a->dtype, a->maximize, a->weight_decay));
    }
}

static void ref_norm_partial(const void *args, int64_t begin, int64_t end)
{
    const peri_k_norm_partial_args *a = args;
    for (int64_t k = begin; k < end; k++) {
        int64_t stop = (k + 1) * PERI_NORM_BLOCK < a->n ? (k + 1) * PERI_NORM_BLOCK : a->n;
        double sum = 0;
        for (int64_t i = k * PERI_NORM_BLOCK; i < stop; i++) {
            double x = fabs(ref_get(a->x, i, a->dtype));
            if (isinf(a->p)) sum = x > sum || x != x ? x : sum;
            else sum += a->p == 2 ? x * x : a->p == 1 ? x : pow(x, a->p);
        }
        a->partial[k] = sum;
    }
}

static void ref_norm_finish(const void *args, int64_t begin, int64_t end)
{
    const peri_k_norm_finish_args *a = args;
    double sum = 0;
    (void)begin, (void)end;
    for (int64_t k = 0; k < a->count; k++) {
        double x = a->partial[k];
        sum = !isinf(a->p) ? sum + x : x > sum || x != x ? x : sum;
    }
    a->out[0] = !a->root || isinf(a->p) ? sum : a->p == 2 ? sqrt(sum) : a->p == 1 ? sum : pow(sum, 1 / a->p);
}

/** The factor of clip_norm; NaN for a NaN norm. */
static double ref_clip_factor(double norm, double limit)
{
    double factor = limit / (norm + 1e-6);
    return factor > 1 ? 1 : factor;
}

static void ref_clip_norm(const void *args, int64_t begin, int64_t end)
{
    const peri_k_clip_norm_args *a = args;
    double factor = ref_clip_factor(a->norm[0], a->limit);
    for (int64_t i = begin; i < end; i++) ref_put(a->x, i, a->dtype, ref_get(a->x, i, a->dtype) * factor);
}

static void ref_clip_value(const void *args, int64_t begin, int64_t end)
{
    const peri_k_clip_value_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        double x = ref_get(a->x, i, a->dtype);
        ref_put(a->x, i, a->dtype, x > a->limit ? a->limit : x < -a->limit ? -a->limit : x);
    }
}
