/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c (cpu): the f32 cases of kernels/optim.h. The body of each update is written once, over one vector, and run on whole vectors and
 * on the rest of the range.
 */

static inline k_vec k_load_n(const void *p, int64_t i, int64_t n)
{
    return n >= K_LANES ? k_load((const float *)p + i) : k_load_part((const float *)p + i, n);
}
static inline void k_store_n(void *p, int64_t i, k_vec v, int64_t n)
{
    if (n >= K_LANES) k_store((float *)p + i, v);
    else k_store_part((float *)p + i, v, n);
}

/** The gradient with its sign and weight decay. */
static inline k_vec cpu_decayed(k_vec w, k_vec g, bool maximize, float weight_decay)
{
    return k_fma(k_set(weight_decay), w, maximize ? -g : g);
}

static inline void cpu_sgd_vector(const peri_k_optim_sgd_args *a, int64_t i, int64_t n)
{
    k_vec w = k_load_n(a->w, i, n), g = cpu_decayed(w, k_load_n(a->g, i, n), a->maximize, (float)a->weight_decay);
    if (a->momentum_buffer) {
        k_vec momentum = k_set((float)a->momentum), m = g;
        if (!a->first) m = k_fma(momentum, k_load_n(a->momentum_buffer, i, n), k_set((float)(1 - a->dampening)) * g);
        k_store_n(a->momentum_buffer, i, m, n);
        g = a->nesterov ? k_fma(momentum, m, g) : m;
    }
    k_store_n(a->w, i, k_fma(k_set((float)-a->lr), g, w), n);
}

static inline void cpu_adagrad_vector(const peri_k_optim_adagrad_args *a, int64_t i, int64_t n)
{
    k_vec w = k_load_n(a->w, i, n), g = cpu_decayed(w, k_load_n(a->g, i, n), a->maximize, (float)a->weight_decay);
    k_vec sum = k_fma(g, g, k_load_n(a->sum, i, n));
    k_store_n(a->sum, i, sum, n);
    k_store_n(a->w, i, w - k_set((float)a->lr) * g / (k_sqrt(sum) + k_set((float)a->eps)), n);
}

static inline void cpu_adam_vector(const peri_k_optim_adam_args *a, int64_t i, int64_t n)
{
    k_vec w = k_load_n(a->w, i, n), m = k_load_n(a->m, i, n), v = k_load_n(a->v, i, n);
    k_vec g = cpu_decayed(w, k_load_n(a->g, i, n), a->maximize, a->decoupled ? 0 : (float)a->weight_decay);
    if (a->decoupled) w *= k_set((float)(1 - a->lr * a->weight_decay));
    m = k_fma(k_set((float)(1 - a->beta1)), g - m, m);
    v = k_fma(k_set((float)(1 - a->beta2)) * g, g, k_set((float)a->beta2) * v);
    k_store_n(a->m, i, m, n);
    k_store_n(a->v, i, v, n);
    if (a->most) {
        v = k_max(k_load_n(a->most, i, n), v);
        k_store_n(a->most, i, v, n);
    }
    k_vec d = k_fma(k_sqrt(v), k_set((float)(1 / a->root)), k_set((float)a->eps));
    k_store_n(a->w, i, w - k_set((float)a->step_size) * m / d, n);
}

static inline void cpu_rmsprop_vector(const peri_k_optim_rmsprop_args *a, int64_t i, int64_t n)
{
    k_vec w = k_load_n(a->w, i, n), g = cpu_decayed(w, k_load_n(a->g, i, n), a->maximize, (float)a->weight_decay);
    k_vec v = k_fma(k_set((float)(1 - a->alpha)) * g, g, k_set((float)a->alpha) * k_load_n(a->v, i, n)), d = v;
    k_store_n(a->v, i, v, n);
    if (a->average) {
        k_vec average = k_load_n(a->average, i, n);
        average = k_fma(k_set((float)(1 - a->alpha)), g - average, average);
        k_store_n(a->average, i, average, n);
        d = v - average * average;
    }
    k_vec update = g / (k_sqrt(d) + k_set((float)a->eps));
    if (a->momentum_buffer) {
        update = k_fma(k_set((float)a->momentum), k_load_n(a->momentum_buffer, i, n), update);
        k_store_n(a->momentum_buffer, i, update, n);
    }
    k_store_n(a->w, i, k_fma(k_set((float)-a->lr), update, w), n);
}

#define K_OPTIMIZER(name)                                                                                                             \
    static void cpu_optim_##name(const void *args, int64_t begin, int64_t end)                                                        \
    {                                                                                                                                 \
        const peri_k_optim_##name##_args a = *(const peri_k_optim_##name##_args *)args;                                               \
        if (a.dtype != PERI_F32) {                                                                                                    \
            ref_optim_##name(args, begin, end);                                                                                       \
            return;                                                                                                                   \
        }                                                                                                                             \
        int64_t i = begin;                                                                                                            \
        for (; i + K_LANES <= end; i += K_LANES) cpu_##name##_vector(&a, i, K_LANES);                                                 \
        if (i < end) cpu_##name##_vector(&a, i, end - i);                                                                             \
    }

K_OPTIMIZER(sgd)
K_OPTIMIZER(adagrad)
K_OPTIMIZER(adam)
K_OPTIMIZER(rmsprop)

/** Squares are added in f64, four at a time in eight sums: a block of f32 loses nothing that matters. */
static void cpu_norm_partial(const void *args, int64_t begin, int64_t end)
{
    const peri_k_norm_partial_args *a = args;
    if (a->dtype != PERI_F32 || a->p != 2) {
        ref_norm_partial(args, begin, end);
        return;
    }
    typedef double k_double8 __attribute__((vector_size(64)));
    typedef float k_float8 __attribute__((vector_size(32), aligned(4)));
    for (int64_t k = begin; k < end; k++) {
        int64_t i = k * PERI_NORM_BLOCK, stop = i + PERI_NORM_BLOCK < a->n ? i + PERI_NORM_BLOCK : a->n;
        const float *x = a->x;
        k_double8 sums = {0};
        for (; i + 8 <= stop; i += 8) {
            k_double8 d = __builtin_convertvector(*(const k_float8 *)(x + i), k_double8);
            sums += d * d;
        }
        double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        for (; i < stop; i++) sum += (double)x[i] * x[i];
        a->partial[k] = sum;
    }
}

static void cpu_clip_norm(const void *args, int64_t begin, int64_t end)
{
    const peri_k_clip_norm_args *a = args;
    float *x = a->x;
    k_vec factor = k_set((float)ref_clip_factor(a->norm[0], a->limit));
    if (a->dtype == PERI_F32) K_MAP(x, x, v * factor);
    else ref_clip_norm(args, begin, end);
}

#define K_CPU_OPTIM                                                                                                                   \
    [PERI_K_optim_sgd] = cpu_optim_sgd, [PERI_K_optim_adagrad] = cpu_optim_adagrad, [PERI_K_optim_adam] = cpu_optim_adam,             \
    [PERI_K_optim_rmsprop] = cpu_optim_rmsprop, [PERI_K_norm_partial] = cpu_norm_partial, [PERI_K_clip_norm] = cpu_clip_norm,
