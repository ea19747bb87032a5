/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c (ref): see kernels/optim.h. Each element is computed in f64; what is stored is rounded once.
 */

/** What of [begin, end) of the range lies in one part of a list: its units [first, last); `before` are in the parts
 *  before it. */
typedef struct ref_slice {
    const peri_optim_part *part;
    int64_t first, last, before;
} ref_slice;

static ref_slice ref_slice_of(const peri_optim_list *list, int32_t q, int64_t begin, int64_t end)
{
    const peri_optim_part *p = &list->part[q];
    int64_t before = q ? p[-1].end : 0, last = end < p->end ? end : p->end;
    return (ref_slice){
        .part = p, .first = begin > before ? begin - before : 0, .last = last - before, .before = before};
}

/** The kernel, of what it does with unit i of a part: ref_NAME_one(args, part, i). */
#define REF_EACH_ELEMENT(name)                                                                                         \
    static void ref_##name(const void *args, int64_t begin, int64_t end)                                               \
    {                                                                                                                  \
        const peri_k_##name##_args *a = args;                                                                          \
        for (int32_t q = 0; q < a->list.n; q++) {                                                                      \
            const ref_slice s = ref_slice_of(&a->list, q, begin, end);                                                 \
            for (int64_t i = s.first; i < s.last; i++) ref_##name##_one(a, s.part, i);                                 \
        }                                                                                                              \
    }

/** The gradient with its sign and weight decay. */
static double ref_decayed(const void *w, const void *g, int64_t i, int32_t dtype, bool maximize, double weight_decay)
{
    double x = maximize ? -ref_get(g, i, dtype) : ref_get(g, i, dtype);
    return weight_decay == 0 ? x : x + weight_decay * ref_get(w, i, dtype);
}

static void ref_optim_sgd_one(const peri_k_optim_sgd_args *a, const peri_optim_part *p, int64_t i)
{
    double g = ref_decayed(p->w, p->g, i, a->dtype, a->maximize, a->weight_decay);
    if (p->state[0]) {
        double m = a->first ? g : a->momentum * ref_get(p->state[0], i, a->dtype) + (1 - a->dampening) * g;
        ref_put(p->state[0], i, a->dtype, m);
        g = a->nesterov ? g + a->momentum * m : m;
    }
    ref_put(p->w, i, a->dtype, ref_get(p->w, i, a->dtype) - a->lr * g);
}
REF_EACH_ELEMENT(optim_sgd)

static void ref_optim_adagrad_one(const peri_k_optim_adagrad_args *a, const peri_optim_part *p, int64_t i)
{
    double g = ref_decayed(p->w, p->g, i, a->dtype, a->maximize, a->weight_decay),
           sum = ref_get(p->state[0], i, a->dtype) + g * g;
    ref_put(p->state[0], i, a->dtype, sum);
    ref_put(p->w, i, a->dtype, ref_get(p->w, i, a->dtype) - a->lr * g / (sqrt(sum) + a->eps));
}
REF_EACH_ELEMENT(optim_adagrad)

static void ref_optim_adam_one(const peri_k_optim_adam_args *a, const peri_optim_part *p, int64_t i)
{
    double w = ref_get(p->w, i, a->dtype), m = ref_get(p->state[0], i, a->dtype), v = ref_get(p->state[1], i, a->dtype);
    double g = ref_decayed(p->w, p->g, i, a->dtype, a->maximize, a->decoupled ? 0 : a->weight_decay);
    if (a->decoupled) w *= 1 - a->lr * a->weight_decay;
    m += (1 - a->beta1) * (g - m);
    v = a->beta2 * v + (1 - a->beta2) * g * g;
    ref_put(p->state[0], i, a->dtype, m);
    ref_put(p->state[1], i, a->dtype, v);
    if (p->state[2]) {
        double most = ref_get(p->state[2], i, a->dtype);
        v = v > most ? v : most;
        ref_put(p->state[2], i, a->dtype, v);
    }
    ref_put(p->w, i, a->dtype, w - a->step_size * m / (sqrt(v) / a->root + a->eps));
}
REF_EACH_ELEMENT(optim_adam)

static void ref_optim_rmsprop_one(const peri_k_optim_rmsprop_args *a, const peri_optim_part *p, int64_t i)
{
    double g = ref_decayed(p->w, p->g, i, a->dtype, a->maximize, a->weight_decay);
    double v = a->alpha * ref_get(p->state[0], i, a->dtype) + (1 - a->alpha) * g * g, d = v;
    ref_put(p->state[0], i, a->dtype, v);
    if (p->state[1]) {
        double average = ref_get(p->state[1], i, a->dtype);
        average += (1 - a->alpha) * (g - average);
        ref_put(p->state[1], i, a->dtype, average);
        d = v - average * average;
    }
    double update = g / (sqrt(d) + a->eps);
    if (p->state[2]) {
        update += a->momentum * ref_get(p->state[2], i, a->dtype);
        ref_put(p->state[2], i, a->dtype, update);
    }
    ref_put(p->w, i, a->dtype, ref_get(p->w, i, a->dtype) - a->lr * update);
}
REF_EACH_ELEMENT(optim_rmsprop)

static void ref_optim_rowwise_adagrad_row(const peri_k_optim_rowwise_adagrad_args *a, const peri_optim_part *p,
                                          int64_t r, int64_t cols)
{
    double squares = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
        double g = ref_decayed(p->w, p->g, i, a->dtype, a->maximize, a->weight_decay);
        squares += g * g;
    }
    double sum = ref_get(p->state[0], r, a->dtype) + (cols ? squares / (double)cols : 0),
           scale = a->lr / (sqrt(sum) + a->eps);
    ref_put(p->state[0], r, a->dtype, sum);
    for (int64_t i = r * cols; i < (r + 1) * cols; i++)
        ref_put(p->w, i, a->dtype,
                ref_get(p->w, i, a->dtype) -
                    scale * ref_decayed(p->w, p->g, i, a->dtype, a->maximize, a->weight_decay));
}

static void ref_optim_rowwise_adagrad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_optim_rowwise_adagrad_args *a = args;
    for (int32_t q = 0; q < a->list.n; q++) {
        const ref_slice s = ref_slice_of(&a->list, q, begin, end);
        for (int64_t r = s.first; r < s.last; r++)
            ref_optim_rowwise_adagrad_row(a, s.part, r, s.part->n / (s.part->end - s.before));
    }
}

static void ref_norm_partial(const void *args, int64_t begin, int64_t end)
{
    const peri_k_norm_partial_args *a = args;
    for (int32_t q = 0; q < a->list.n; q++) {
        const ref_slice s = ref_slice_of(&a->list, q, begin, end);
        for (int64_t k = s.first; k < s.last; k++) {
            int64_t stop = (k + 1) * PERI_NORM_BLOCK < s.part->n ? (k + 1) * PERI_NORM_BLOCK : s.part->n;
            double sum = 0;
            for (int64_t i = k * PERI_NORM_BLOCK; i < stop; i++) {
                double x = fabs(ref_get(s.part->w, i, a->dtype));
                if (isinf(a->p)) sum = x > sum || x != x ? x : sum;
                else sum += a->p == 2 ? x * x : a->p == 1 ? x : pow(x, a->p);
            }
            a->partial[s.before + k] = sum;
        }
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

static void ref_clip_norm_one(const peri_k_clip_norm_args *a, const peri_optim_part *p, int64_t i)
{
    ref_put(p->w, i, a->dtype, ref_get(p->w, i, a->dtype) * ref_clip_factor(a->norm[0], a->limit));
}
REF_EACH_ELEMENT(clip_norm)

static void ref_clip_value_one(const peri_k_clip_value_args *a, const peri_optim_part *p, int64_t i)
{
    double x = ref_get(p->w, i, a->dtype);
    ref_put(p->w, i, a->dtype, x > a->limit ? a->limit : x < -a->limit ? -a->limit : x);
}
REF_EACH_ELEMENT(clip_value)
