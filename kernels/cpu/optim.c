/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c (cpu): the f32 cases of kernels/optim.h. The body of each update is written once, over one vector, and run on
 * whole vectors and on the rest of the range.
 */

/** The gradient with its sign and weight decay. */
static inline k_vec cpu_decayed(k_vec w, k_vec g, bool maximize, float weight_decay)
{
    g = maximize ? -g : g;
    return weight_decay == 0 ? g : k_fma(k_set(weight_decay), w, g);
}

static inline void cpu_sgd_vector(const peri_k_optim_sgd_args *a, const peri_optim_part *p, int64_t i, int64_t n)
{
    k_vec w = k_load_n(p->w, i, n), g = cpu_decayed(w, k_load_n(p->g, i, n), a->maximize, (float)a->weight_decay);
    if (p->state[0]) {
        k_vec momentum = k_set((float)a->momentum), m = g;
        if (!a->first) m = k_fma(momentum, k_load_n(p->state[0], i, n), k_set((float)(1 - a->dampening)) * g);
        k_store_n(p->state[0], i, m, n);
        g = a->nesterov ? k_fma(momentum, m, g) : m;
    }
    k_store_n(p->w, i, k_fma(k_set((float)-a->lr), g, w), n);
}

static inline void cpu_adagrad_vector(const peri_k_optim_adagrad_args *a, const peri_optim_part *p, int64_t i,
                                      int64_t n)
{
    k_vec w = k_load_n(p->w, i, n), g = cpu_decayed(w, k_load_n(p->g, i, n), a->maximize, (float)a->weight_decay);
    k_vec sum = k_fma(g, g, k_load_n(p->state[0], i, n));
    k_store_n(p->state[0], i, sum, n);
    k_store_n(p->w, i, w - k_set((float)a->lr) * g / (k_sqrt(sum) + k_set((float)a->eps)), n);
}

static inline void cpu_adam_vector(const peri_k_optim_adam_args *a, const peri_optim_part *p, int64_t i, int64_t n)
{
    k_vec w = k_load_n(p->w, i, n), m = k_load_n(p->state[0], i, n), v = k_load_n(p->state[1], i, n);
    k_vec g = cpu_decayed(w, k_load_n(p->g, i, n), a->maximize, a->decoupled ? 0 : (float)a->weight_decay);
    if (a->decoupled) w *= k_set((float)(1 - a->lr * a->weight_decay));
    m = k_fma(k_set((float)(1 - a->beta1)), g - m, m);
    v = k_fma(k_set((float)(1 - a->beta2)) * g, g, k_set((float)a->beta2) * v);
    k_store_n(p->state[0], i, m, n);
    k_store_n(p->state[1], i, v, n);
    if (p->state[2]) {
        v = k_max(k_load_n(p->state[2], i, n), v);
        k_store_n(p->state[2], i, v, n);
    }
    k_vec d = k_fma(k_sqrt(v), k_set((float)(1 / a->root)), k_set((float)a->eps));
    k_store_n(p->w, i, w - k_set((float)a->step_size) * m / d, n);
}

static inline void cpu_rmsprop_vector(const peri_k_optim_rmsprop_args *a, const peri_optim_part *p, int64_t i,
                                      int64_t n)
{
    k_vec w = k_load_n(p->w, i, n), g = cpu_decayed(w, k_load_n(p->g, i, n), a->maximize, (float)a->weight_decay);
    k_vec v = k_fma(k_set((float)(1 - a->alpha)) * g, g, k_set((float)a->alpha) * k_load_n(p->state[0], i, n)), d = v;
    k_store_n(p->state[0], i, v, n);
    if (p->state[1]) {
        k_vec average = k_load_n(p->state[1], i, n);
        average = k_fma(k_set((float)(1 - a->alpha)), g - average, average);
        k_store_n(p->state[1], i, average, n);
        d = v - average * average;
    }
    k_vec update = g / (k_sqrt(d) + k_set((float)a->eps));
    if (p->state[2]) {
        update = k_fma(k_set((float)a->momentum), k_load_n(p->state[2], i, n), update);
        k_store_n(p->state[2], i, update, n);
    }
    k_store_n(p->w, i, k_fma(k_set((float)-a->lr), update, w), n);
}

#define K_OPTIMIZER(name)                                                                                              \
    static void cpu_optim_##name(const void *args, int64_t begin, int64_t end)                                         \
    {                                                                                                                  \
        const peri_k_optim_##name##_args *a = args;                                                                    \
        if (a->dtype != PERI_F32) {                                                                                    \
            ref_optim_##name(args, begin, end);                                                                        \
            return;                                                                                                    \
        }                                                                                                              \
        for (int32_t q = 0; q < a->list.n; q++) {                                                                      \
            const ref_slice s = ref_slice_of(&a->list, q, begin, end);                                                 \
            const peri_optim_part part = a->list.part[q]; /* a copy, which stores cannot change */                     \
            int64_t i = s.first;                                                                                       \
            for (; i + K_LANES <= s.last; i += K_LANES) cpu_##name##_vector(a, &part, i, K_LANES);                     \
            if (i < s.last) cpu_##name##_vector(a, &part, i, s.last - i);                                              \
        }                                                                                                              \
    }

K_OPTIMIZER(sgd)
K_OPTIMIZER(adagrad)
K_OPTIMIZER(adam)
K_OPTIMIZER(rmsprop)

/** Squares are added in f64, four at a time in eight sums: a block of f32 loses nothing that matters. */
static double cpu_squares(const float *x, int64_t n)
{
    typedef double k_double8 __attribute__((vector_size(64)));
    typedef float k_float8 __attribute__((vector_size(32), aligned(4)));
    k_double8 sums = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        k_double8 d = __builtin_convertvector(*(const k_float8 *)(x + i), k_double8);
        sums += d * d;
    }
    double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
}

static void cpu_norm_partial(const void *args, int64_t begin, int64_t end)
{
    const peri_k_norm_partial_args *a = args;
    if (a->dtype != PERI_F32 || a->p != 2) {
        ref_norm_partial(args, begin, end);
        return;
    }
    for (int32_t q = 0; q < a->list.n; q++) {
        const ref_slice s = ref_slice_of(&a->list, q, begin, end);
        for (int64_t k = s.first; k < s.last; k++) {
            int64_t first = k * PERI_NORM_BLOCK, left = s.part->n - first;
            a->partial[s.before + k] =
                cpu_squares((const float *)s.part->w + first, left < PERI_NORM_BLOCK ? left : PERI_NORM_BLOCK);
        }
    }
}

static void cpu_clip_norm(const void *args, int64_t begin_unit, int64_t end_unit)
{
    const peri_k_clip_norm_args *a = args;
    k_vec factor = k_set((float)ref_clip_factor(a->norm[0], a->limit));
    if (a->dtype != PERI_F32) {
        ref_clip_norm(args, begin_unit, end_unit);
        return;
    }
    for (int32_t q = 0; q < a->list.n; q++) {
        const ref_slice s = ref_slice_of(&a->list, q, begin_unit, end_unit);
        int64_t begin = s.first, end = s.last;
        float *x = s.part->w;
        K_MAP(x, x, v * factor);
    }
}

#define K_CPU_OPTIM                                                                                                    \
    [PERI_K_optim_sgd] = cpu_optim_sgd, [PERI_K_optim_adagrad] = cpu_optim_adagrad,                                    \
    [PERI_K_optim_adam] = cpu_optim_adam, [PERI_K_optim_rmsprop] = cpu_optim_rmsprop,                                  \
    [PERI_K_norm_partial] = cpu_norm_partial, [PERI_K_clip_norm] = cpu_clip_norm,
