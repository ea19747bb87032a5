/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_update.c (ref): the optimizers and the sums that they are given: see kernels/tbe.h.
 */
#include "tbe_sorted.h"

/* -- one row ------------------------------------------------------------------------------------------------------- */

/** sqrt of sum16 of x[d] * x[d]. */
static float ref_tbe_norm(const float *x, int64_t n) { return sqrtf(ref_tbe_dot(x, x, n)); }

/** Where the update of one row takes place: weights in f32, states, sizes. */
typedef struct ref_tbe_place {
    float *w, *m1, *m2, *counter; /* m1, m2: of the row; one number where the optimizer keeps one */
    int64_t *prev;
    float most; /* max_counter of the table */
    int64_t n;
} ref_tbe_place;

static void ref_tbe_sgd(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    float keep = o->decay == PERI_DECAY_DECOUPLE ? 1 - o->lr * o->weight_decay : 1;
    for (int64_t d = 0; d < p->n; d++) {
        float x = o->decay == PERI_DECAY_L2 ? fmaf(o->weight_decay, p->w[d], g[d]) : g[d];
        p->w[d] = fmaf(-o->lr, x, keep * p->w[d]);
    }
}

static void ref_tbe_adagrad(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    float keep = o->decay == PERI_DECAY_DECOUPLE ? 1 - o->lr * o->weight_decay : 1;
    for (int64_t d = 0; d < p->n; d++) {
        float x = o->decay == PERI_DECAY_L2 ? fmaf(o->weight_decay, p->w[d], g[d]) : g[d];
        p->m1[d] = fmaf(x, x, p->m1[d]);
        p->w[d] = keep * p->w[d] - o->lr * x / (sqrtf(p->m1[d]) + o->eps);
    }
}

/** sum16(x * x) of x = fma(wd, w, g) with decay L2, else of g. */
static float ref_tbe_squares(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    float s[16] = {0};
    for (int64_t d = 0; d < p->n; d++) {
        float x = o->decay == PERI_DECAY_L2 ? fmaf(o->weight_decay, p->w[d], g[d]) : g[d];
        s[d % 16] = fmaf(x, x, s[d % 16]);
    }
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) s[l] += s[l + half];
    return s[0];
}

static void ref_tbe_rowwise_adagrad(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    float keep = 1;
    *p->m1 += ref_tbe_squares(o, p, g) / (float)p->n;
    float mult = o->lr / (sqrtf(*p->m1) + o->eps);
    if (o->decay == PERI_DECAY_L2) keep = 1 - mult * o->weight_decay;
    if (o->decay == PERI_DECAY_DECOUPLE) keep = 1 - o->lr * o->weight_decay;
    for (int64_t d = 0; d < p->n; d++) p->w[d] = fmaf(-mult, g[d], keep * p->w[d]);
}

/** adam, lamb and their partial row-wise kin: the moments, and u. */
static void ref_tbe_moments(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g, float *u, bool row)
{
    float c1 = o->correction1, c2 = o->correction2;
    if (o->row_bias_correction) {
        uint64_t step = (uint64_t)(*p->counter += 1);
        c1 = (float)(1 / (1 - tbe_power(o->exact_beta1, step)));
        c2 = (float)(1 / (1 - tbe_power(o->exact_beta2, step)));
    }
    if (row) *p->m2 = fmaf(o->rest2, ref_tbe_dot(g, g, p->n) / (float)p->n, o->beta2 * *p->m2);
    for (int64_t d = 0; d < p->n; d++) {
        p->m1[d] = fmaf(o->rest1, g[d], o->beta1 * p->m1[d]);
        if (!row) p->m2[d] = fmaf(o->rest2 * g[d], g[d], o->beta2 * p->m2[d]);
        u[d] = p->m1[d] * c1 / (sqrtf((row ? *p->m2 : p->m2[d]) * c2) + o->eps);
    }
}

static void ref_tbe_adam(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g, float *u, bool row)
{
    ref_tbe_moments(o, p, g, u, row);
    for (int64_t d = 0; d < p->n; d++) p->w[d] = p->w[d] - o->lr * fmaf(o->weight_decay, p->w[d], u[d]);
}

static void ref_tbe_lamb(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g, float *u, bool row)
{
    ref_tbe_moments(o, p, g, u, row);
    for (int64_t d = 0; d < p->n; d++) u[d] = fmaf(o->weight_decay, p->w[d], u[d]);
    float weights = ref_tbe_norm(p->w, p->n), steps = ref_tbe_norm(u, p->n), rate = o->lr;
    if (weights > 0 && steps > 0) rate = o->lr * (weights / steps);
    for (int64_t d = 0; d < p->n; d++) p->w[d] = fmaf(-rate, u[d], p->w[d]);
}

static void ref_tbe_lars_sgd(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    float weights = ref_tbe_norm(p->w, p->n), below = ref_tbe_norm(g, p->n) + o->weight_decay * weights, rate = o->lr;
    if (weights > 0 && below > 0) rate = o->lr * (o->eta * weights / below);
    for (int64_t d = 0; d < p->n; d++) {
        p->m1[d] = fmaf(rate, fmaf(o->weight_decay, p->w[d], g[d]), o->momentum * p->m1[d]);
        p->w[d] = p->w[d] - p->m1[d];
    }
}

static void ref_tbe_lion(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    for (int64_t d = 0; d < p->n; d++) {
        float c = fmaf(o->rest1, g[d], o->beta1 * p->m1[d]), s = c > 0 ? 1 : c < 0 ? -1 : c;
        p->w[d] = p->w[d] - o->lr * fmaf(o->weight_decay, p->w[d], s);
        p->m1[d] = fmaf(o->rest2, g[d], o->beta2 * p->m1[d]);
    }
}

/** rowwise rmsprop ar, rowwise adagrad with counter. */
static void ref_tbe_stepped(const peri_k_tbe_optimizer *o, const ref_tbe_place *p, const float *g)
{
    tbe_row_numbers row = {.m = p->m1,
                           .counter = p->counter,
                           .prev = p->prev,
                           .most = p->most,
                           .squares = ref_tbe_squares(o, p, g),
                           .weight_norm = ref_tbe_norm(p->w, p->n),
                           .n = p->n};
    tbe_step step = tbe_step_of(o, &row);
    for (int64_t d = 0; d < p->n; d++) p->w[d] = fmaf(-step.rate, g[d], step.keep * p->w[d]);
}

static int64_t ref_tbe_round16(int64_t n) { return (n + 15) / 16 * 16; }

/** Store a row of f32 as f16 or bf16. */
static void ref_tbe_store(const peri_k_tbe_rows *rows, const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t,
                          int64_t row, const float *w)
{
    uint16_t *narrow = (uint16_t *)rows->weight + t->offset + row * t->stride;
    uint64_t key = tbe_row_key(o, t, tbe_row_of_slot(rows, t, row));
    int32_t n = rows->weight_dtype == PERI_F16 ? TBE_BITS_F16 : TBE_BITS_BF16;
    for (int64_t d = 0; d < t->cols; d++) {
        uint32_t bits = o->stochastic ? tbe_random_bits(key, t->col_offset + d, n) : 0;
        if (rows->weight_dtype == PERI_F16) narrow[d] = o->stochastic ? tbe_round_f16(w[d], bits) : k_f32_to_f16(w[d]);
        else narrow[d] = o->stochastic ? tbe_round_bf16(w[d], bits) : k_f32_to_bf16(w[d]);
    }
}

/** Update row @row of table @t with summed gradient @g. @room: three rows. */
static void ref_tbe_row(const peri_k_tbe_rows *rows, const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t,
                        int64_t row, const float *g, float *room)
{
    int64_t n = t->cols, at = t->offset + row * t->stride, linear = t->first_row + row;
    bool wide = rows->weight_dtype == PERI_F32,
         row1 = o->kind == PERI_TBE_ROWWISE_ADAGRAD || o->kind >= PERI_TBE_ROWWISE_RMSPROP_AR,
         row2 = o->kind == PERI_TBE_PARTIAL_ROWWISE_ADAM || o->kind == PERI_TBE_PARTIAL_ROWWISE_LAMB;
    float *u = room + ref_tbe_round16(n);
    ref_tbe_place p = {.w = wide ? (float *)rows->weight + at : room, .n = n};
    if (rows->momentum1) p.m1 = rows->momentum1 + (row1 ? linear : at);
    if (rows->momentum2) p.m2 = rows->momentum2 + (row2 ? linear : at);
    if (rows->row_counter) p.counter = rows->row_counter + linear;
    if (rows->prev_iter) p.prev = rows->prev_iter + linear;
    if (rows->max_counter) p.most = rows->max_counter[t - rows->tables];
    for (int64_t d = 0; !wide && d < n; d++) p.w[d] = tbe_weight(rows->weight, at + d, rows->weight_dtype);
    switch (o->kind) {
    case PERI_TBE_SGD: ref_tbe_sgd(o, &p, g); break;
    case PERI_TBE_ADAGRAD: ref_tbe_adagrad(o, &p, g); break;
    case PERI_TBE_ROWWISE_ADAGRAD: ref_tbe_rowwise_adagrad(o, &p, g); break;
    case PERI_TBE_ROWWISE_RMSPROP_AR:
    case PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER: ref_tbe_stepped(o, &p, g); break;
    case PERI_TBE_ADAM: ref_tbe_adam(o, &p, g, u, false); break;
    case PERI_TBE_PARTIAL_ROWWISE_ADAM: ref_tbe_adam(o, &p, g, u, true); break;
    case PERI_TBE_LAMB: ref_tbe_lamb(o, &p, g, u, false); break;
    case PERI_TBE_PARTIAL_ROWWISE_LAMB: ref_tbe_lamb(o, &p, g, u, true); break;
    case PERI_TBE_LARS_SGD: ref_tbe_lars_sgd(o, &p, g); break;
    case PERI_TBE_LION: ref_tbe_lion(o, &p, g); break;
    default: break;
    }
    float norm = o->max_norm > 0 ? ref_tbe_norm(p.w, n) : 0;
    for (int64_t d = 0; norm > o->max_norm && d < n; d++) p.w[d] = p.w[d] * (o->max_norm / norm);
    if (!wide) ref_tbe_store(rows, o, t, row, p.w);
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */

/** Item e of the sorted keys: element d of its gradient row, clamped; its factor. */
static float ref_tbe_term(const peri_k_tbe_update_args *a, int64_t e, int64_t d, float *scale)
{
    int64_t payload = (int64_t)(a->sorted[e] & (((uint64_t)1 << a->payload_bits) - 1)),
            at = a->items ? a->items[payload].grad : payload;
    float x = a->grad[at + d], most = a->optimizer.max_gradient;
    *scale = a->items ? a->items[payload].scale : 1;
    return most > 0 ? (x < -most ? -most : x > most ? most : x) : x;
}

enum { REF_TBE_GROUP = 256 };

static float ref_tbe_sum(const peri_k_tbe_update_args *a, int64_t e, int64_t past, int64_t d)
{
    float sum = 0, scale;
    for (int64_t from = e; from < past; from += REF_TBE_GROUP) {
        float group = ref_tbe_term(a, from, d, &scale);
        if (a->items) group = scale * group;
        for (int64_t i = from + 1; i < past && i < from + REF_TBE_GROUP; i++) {
            float x = ref_tbe_term(a, i, d, &scale);
            group = a->items ? fmaf(scale, x, group) : group + x;
        }
        sum = from == e ? group : sum + group;
    }
    return sum;
}

static float ref_tbe_exact_sum(const peri_k_tbe_update_args *a, int64_t e, int64_t past, int64_t d)
{
    double largest = 0, sum = 0;
    float scale;
    for (int64_t i = e; i < past; i++) {
        double t = ref_tbe_term(a, i, d, &scale);
        t = fabs(t * scale);
        largest = t > largest ? t : largest;
    }
    double big = tbe_exact_big(largest, past - e);
    for (int64_t i = e; i < past; i++) {
        double t = ref_tbe_term(a, i, d, &scale);
        sum += (t * scale + big) - big;
    }
    return (float)sum;
}

/* -- kernels ------------------------------------------------------------------------------------------------------- */

static void ref_tbe_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_update_args *a = args;
    const peri_k_tbe_rows *rows = &a->rows;
    int64_t n = *a->n, last = tbe_part(n, end, a->chunks), runs = 0, table = 0;
    int64_t r = a->run_values ? a->run_starts[begin] : 0;
    float *g = a->scratch + begin * a->scratch_stride;
    for (int64_t e = tbe_part(n, begin, a->chunks), past; e < last; e = past) {
        uint64_t linear = a->sorted[e] >> a->payload_bits;
        for (past = e + 1; past < n && a->sorted[past] >> a->payload_bits == linear; past++) {
        }
        if (linear >= (uint64_t)rows->total_rows) continue;
        if (e > 0 && a->sorted[e - 1] >> a->payload_bits == linear) continue; /* the run began in an earlier chunk */
        while ((uint64_t)(rows->tables[table].first_row + rows->tables[table].rows) <= linear) table++;
        const peri_k_tbe_table *t = &rows->tables[table];
        int64_t row = (int64_t)linear - t->first_row;
        for (int64_t d = 0; d < t->cols; d++)
            g[d] = ldexpf(a->optimizer.exact ? ref_tbe_exact_sum(a, e, past, d) : ref_tbe_sum(a, e, past, d),
                          -a->halvings);
        runs++;
        if (a->optimizer.kind != PERI_TBE_NONE) {
            ref_tbe_row(rows, &a->optimizer, t, row, g, g + ref_tbe_round16(t->cols));
            continue;
        }
        if (a->run_values) {
            memcpy(a->run_values + r * a->run_stride, g, sizeof *g * (size_t)t->cols);
            a->run_rows[r++] = (int64_t)linear;
            continue;
        }
        for (int64_t d = 0; d < t->cols; d++) a->dense[t->offset + row * t->stride + d] = g[d];
        a->touched[linear] = 1;
    }
    __atomic_fetch_add(a->updated, runs, __ATOMIC_RELAXED);
}

static void ref_tbe_dense_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_dense_update_args *a = args;
    const peri_k_tbe_rows *rows = &a->rows;
    int64_t table = 0, last = tbe_part(rows->total_rows, end, a->chunks);
    float *room = a->scratch + begin * a->scratch_stride;
    for (int64_t linear = tbe_part(rows->total_rows, begin, a->chunks); linear < last; linear++) {
        if (a->touched[linear] == 0) continue;
        while (rows->tables[table].first_row + rows->tables[table].rows <= linear) table++;
        const peri_k_tbe_table *t = &rows->tables[table];
        int64_t row = linear - t->first_row;
        ref_tbe_row(rows, &a->optimizer, t, row, a->dense + t->offset + row * t->stride, room);
    }
}

static void ref_tbe_ema(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_ema_args *a = args;
    const peri_k_tbe_rows *rows = &a->rows;
    int64_t table = 0, last = tbe_part(rows->total_rows, end, a->chunks);
    bool wide = rows->weight_dtype == PERI_F32;
    for (int64_t linear = tbe_part(rows->total_rows, begin, a->chunks); linear < last; linear++) {
        while (rows->tables[table].first_row + rows->tables[table].rows <= linear) table++;
        const peri_k_tbe_table *t = &rows->tables[table];
        int64_t row = linear - t->first_row, at = t->offset + row * t->stride, half = t->cols / 2;
        float *w = wide ? (float *)rows->weight + at : a->scratch + begin * a->scratch_stride;
        for (int64_t d = 0; !wide && d < t->cols; d++) w[d] = tbe_weight(rows->weight, at + d, rows->weight_dtype);
        for (int64_t d = 0; d < half; d++) w[d + half] = fmaf(a->coef, w[d] - w[d + half], w[d + half]);
        if (!wide) ref_tbe_store(rows, &a->optimizer, t, row, w);
    }
}

static void ref_tbe_most_counted(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_most_counted_args *a = args;
    for (int64_t t = begin; t < end; t++) {
        float most = 0;
        const float *counter = a->row_counter + a->tables[t].first_row;
        for (int64_t r = 0; r < a->tables[t].rows; r++) most = counter[r] > most ? counter[r] : most;
        a->max_counter[t] = 1 + most;
    }
}

static void ref_tbe_shift(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_shift_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t x = a->dtype == PERI_I32 ? ((const int32_t *)a->src)[i] : ((const int64_t *)a->src)[i];
        a->dst[i] = tbe_clamp(x, 0, a->most) + a->add;
    }
}

static void ref_tbe_runs(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_runs_args *a = args;
    if (begin >= end) return;
    uint64_t before = UINT64_MAX;
    int64_t runs = 0;
    for (int64_t c = 0, e = 0; c < a->chunks; c++) {
        a->starts[c] = runs;
        for (int64_t last = tbe_part(*a->n, c + 1, a->chunks); e < last; e++) {
            uint64_t linear = a->sorted[e] >> a->payload_bits;
            runs += linear != before && linear < (uint64_t)a->total_rows;
            before = linear;
        }
    }
    a->starts[a->chunks] = runs;
}

static void ref_tbe_run_tables(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_run_tables_args *a = args;
    for (int64_t t = begin; t < end; t++) {
        int64_t edge[2] = {0};
        for (int side = 0; side < 2; side++) {
            int64_t row = a->tables[t].first_row + (side ? a->tables[t].rows : 0), high = *a->runs;
            while (edge[side] < high) {
                int64_t middle = edge[side] + (high - edge[side]) / 2;
                if (a->run_rows[middle] < row) edge[side] = middle + 1;
                else high = middle;
            }
        }
        a->first[t] = edge[0];
        if (t == 0) a->first[a->n_tables] = *a->runs;
        for (int64_t r = edge[0]; r < edge[1]; r++) a->rows[r] = a->run_rows[r] - a->tables[t].first_row;
    }
}
