/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence.c (ref): see kernels/sequence.h. Elements are computed in f64 and rounded once.
 */

static double ref_seq_get(const void *p, int64_t i, int32_t dtype)
{
    return dtype == PERI_F64 ? ((const double *)p)[i] : (double)((const float *)p)[i];
}

static void ref_seq_put(void *p, int64_t i, int32_t dtype, double x)
{
    if (dtype == PERI_F64) ((double *)p)[i] = x;
    else ((float *)p)[i] = (float)x;
}

/** Head @h of a row of an array whose rows lie @stride apart and whose heads have @dim numbers. */
typedef struct ref_seq_vector {
    const void *p;
    int64_t at, dim;
    int32_t dtype;
} ref_seq_vector;

static double ref_seq_dot(ref_seq_vector a, ref_seq_vector b)
{
    double sum = 0;
    for (int64_t d = 0; d < a.dim; d++)
        sum += ref_seq_get(a.p, a.at + d, a.dtype) * ref_seq_get(b.p, b.at + d, b.dtype);
    return sum;
}

static ref_seq_vector ref_seq_query(const peri_k_attention_args *a, int64_t row, int64_t h)
{
    return (ref_seq_vector){a->q, row * a->q_stride + h * a->dim, a->dim, a->dtype};
}
static ref_seq_vector ref_seq_key(const peri_k_attention_args *a, int64_t row, int64_t h)
{
    return (ref_seq_vector){a->k, row * a->k_stride + h * a->dim, a->dim, a->dtype};
}
static ref_seq_vector ref_seq_value(const peri_k_attention_args *a, int64_t row, int64_t h)
{
    return (ref_seq_vector){a->v, row * a->v_stride + h * a->v_dim, a->v_dim, a->dtype};
}
static ref_seq_vector ref_seq_out(const peri_k_attention_args *a, const void *p, int64_t row, int64_t h)
{
    return (ref_seq_vector){p, (row * a->heads + h) * a->v_dim, a->v_dim, a->dtype};
}

static double ref_seq_score(const peri_k_attention_args *a, int64_t i, int64_t j, int64_t h)
{
    return a->alpha * ref_seq_dot(ref_seq_query(a, i, h), ref_seq_key(a, j, h));
}

static double ref_seq_sigmoid(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }

/** The weight of a score; @lse of its query (SOFTMAX). */
static double ref_seq_weight(const peri_k_attention_args *a, double s, double lse)
{
    return a->form == PERI_ATTENTION_SOFTMAX ? exp(s - lse) : a->scale * s * ref_seq_sigmoid(s);
}

/** The gradient of a score from that of its weight. */
static double ref_seq_slope(const peri_k_attention_args *a, double s, double lse, double g, double delta)
{
    double y = ref_seq_sigmoid(s);
    if (a->form == PERI_ATTENTION_SOFTMAX) return ref_seq_weight(a, s, lse) * (g - delta);
    return a->scale * g * y * (1 + s * (1 - y));
}

/** An item of the range: a head of a row, and the sequence that has it. */
typedef struct ref_seq_item {
    int64_t h, row;
    peri_k_sequence s;
} ref_seq_item;

static ref_seq_item ref_seq_at(const peri_k_attention_args *a, int64_t item)
{
    ref_seq_item x = {item / a->rows, item % a->rows, {0, 0, 0}};
    x.s = peri_k_sequence_at(a->offsets, a->targets, peri_k_sequence_of(a->offsets, a->sequences, x.row));
    return x;
}

static void ref_attention(const void *args, int64_t begin, int64_t end)
{
    const peri_k_attention_args *a = args;
    for (int64_t item = begin; item < end; item++) {
        ref_seq_item x = ref_seq_at(a, item);
        peri_k_members keys = peri_k_attention_keys(a, x.s, x.row - x.s.first);
        int64_t n = peri_k_member_count(keys);
        double max = -INFINITY, sum = 0, lse = 0;
        if (a->form == PERI_ATTENTION_SOFTMAX) {
            for (int64_t c = 0; c < n; c++)
                max = fmax(max, ref_seq_score(a, x.row, x.s.first + peri_k_member(keys, c), x.h));
            for (int64_t c = 0; c < n; c++)
                sum += exp(ref_seq_score(a, x.row, x.s.first + peri_k_member(keys, c), x.h) - max);
            lse = max + log(sum);
            ref_seq_put(a->lse, item, a->dtype, lse);
        }
        /* the weights are made again for every 64 columns: there is no room for them */
        for (int64_t d0 = 0; d0 < a->v_dim; d0 += 64) {
            double out[64] = {0};
            int64_t d1 = a->v_dim - d0 < 64 ? a->v_dim - d0 : 64;
            for (int64_t c = 0; c < n; c++) {
                int64_t j = x.s.first + peri_k_member(keys, c);
                double w = ref_seq_weight(a, ref_seq_score(a, x.row, j, x.h), lse);
                for (int64_t d = 0; d < d1; d++)
                    out[d] += w * ref_seq_get(a->v, ref_seq_value(a, j, x.h).at + d0 + d, a->dtype);
            }
            for (int64_t d = 0; d < d1; d++)
                ref_seq_put(a->out, ref_seq_out(a, NULL, x.row, x.h).at + d0 + d, a->dtype, out[d]);
        }
    }
}

static void ref_attention_grad_q(const void *args, int64_t begin, int64_t end)
{
    const peri_k_attention_args *a = args;
    bool softmax = a->form == PERI_ATTENTION_SOFTMAX;
    for (int64_t item = begin; item < end; item++) {
        ref_seq_item x = ref_seq_at(a, item);
        peri_k_members keys = peri_k_attention_keys(a, x.s, x.row - x.s.first);
        ref_seq_vector dout = ref_seq_out(a, a->dout, x.row, x.h);
        double lse = softmax ? ref_seq_get(a->lse, item, a->dtype) : 0;
        double delta = softmax ? ref_seq_dot(ref_seq_out(a, a->out, x.row, x.h), dout) : 0;
        if (softmax) ref_seq_put(a->delta, item, a->dtype, delta);
        for (int64_t d0 = 0; a->dq && d0 < a->dim; d0 += 64) {
            double dq[64] = {0};
            int64_t d1 = a->dim - d0 < 64 ? a->dim - d0 : 64;
            for (int64_t c = 0; c < peri_k_member_count(keys); c++) {
                int64_t j = x.s.first + peri_k_member(keys, c);
                double ds = ref_seq_slope(a, ref_seq_score(a, x.row, j, x.h), lse,
                                          ref_seq_dot(dout, ref_seq_value(a, j, x.h)), delta);
                for (int64_t d = 0; d < d1; d++)
                    dq[d] += a->alpha * ds * ref_seq_get(a->k, ref_seq_key(a, j, x.h).at + d0 + d, a->dtype);
            }
            for (int64_t d = 0; d < d1; d++)
                ref_seq_put(a->dq, (x.row * a->heads + x.h) * a->dim + d0 + d, a->dtype, dq[d]);
        }
    }
}

/** Columns [d0, d0 + 64) of dk and dv of one key. */
static void ref_seq_grad_kv(const peri_k_attention_args *a, ref_seq_item x, int64_t d0)
{
    bool softmax = a->form == PERI_ATTENTION_SOFTMAX;
    peri_k_members queries = peri_k_attention_queries(a, x.s, x.row - x.s.first);
    double dk[64] = {0}, dv[64] = {0};
    for (int64_t c = 0; c < peri_k_member_count(queries); c++) {
        int64_t i = x.s.first + peri_k_member(queries, c), at = x.h * a->rows + i;
        double lse = softmax ? ref_seq_get(a->lse, at, a->dtype) : 0,
               delta = softmax ? ref_seq_get(a->delta, at, a->dtype) : 0;
        ref_seq_vector dout = ref_seq_out(a, a->dout, i, x.h);
        double s = ref_seq_score(a, i, x.row, x.h), w = ref_seq_weight(a, s, lse);
        double ds = ref_seq_slope(a, s, lse, ref_seq_dot(dout, ref_seq_value(a, x.row, x.h)), delta);
        for (int64_t d = d0; d < d0 + 64; d++) {
            if (d < a->dim) dk[d - d0] += a->alpha * ds * ref_seq_get(a->q, ref_seq_query(a, i, x.h).at + d, a->dtype);
            if (d < a->v_dim) dv[d - d0] += w * ref_seq_get(a->dout, dout.at + d, a->dtype);
        }
    }
    for (int64_t d = d0; d < d0 + 64; d++) {
        if (a->dk && d < a->dim) ref_seq_put(a->dk, (x.row * a->heads + x.h) * a->dim + d, a->dtype, dk[d - d0]);
        if (a->dv && d < a->v_dim) ref_seq_put(a->dv, (x.row * a->heads + x.h) * a->v_dim + d, a->dtype, dv[d - d0]);
    }
}

static void ref_attention_grad_kv(const void *args, int64_t begin, int64_t end)
{
    const peri_k_attention_args *a = args;
    int64_t columns = a->dim > a->v_dim ? a->dim : a->v_dim;
    for (int64_t item = begin; item < end; item++)
        for (int64_t d0 = 0; d0 < columns; d0 += 64) ref_seq_grad_kv(a, ref_seq_at(a, item), d0);
}
