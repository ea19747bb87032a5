/* SPDX-License-Identifier: Apache-2.0
 *
 * sequence_cases.h: cases of the kernels of kernels/sequence.h for those who take dense_cases.h's.
 */
#ifndef PERI_TESTS_SEQUENCE_CASES_H
#define PERI_TESTS_SEQUENCE_CASES_H

#include "tests/kernels/dense_cases.h"

/** Which members see which, and sizes. */
typedef struct sequence_shape {
    const int64_t *lengths; /* sequences */
    int64_t sequences, heads, dim, v_dim, window, contextual, full;
    bool causal, targets; /* targets: a third of each sequence, rounded up */
} sequence_shape;

static inline int64_t *sequence_ints(dense_case *c, int64_t n)
{
    int64_t *p = malloc((size_t)(n + 1) * sizeof *p);
    c->input[c->inputs++] = p;
    return p;
}

/** Offsets and targets as the shape says; returns the rows. */
static inline int64_t sequence_marks(dense_case *c, const sequence_shape *s, const int64_t **offsets,
                                     const int64_t **targets)
{
    int64_t *o = sequence_ints(c, s->sequences + 1), *t = sequence_ints(c, s->sequences);
    o[0] = 0;
    for (int64_t i = 0; i < s->sequences; i++) {
        o[i + 1] = o[i] + s->lengths[i];
        t[i] = (s->lengths[i] + 2) / 3;
    }
    *offsets = o;
    *targets = s->targets ? t : NULL;
    return o[s->sequences];
}

/** q, k and v, whose rows lie apart; of the gradients also lse, out, dout and delta. */
static inline peri_k_attention_args sequence_args(dense_case *c, const sequence_shape *s, int32_t dtype, int32_t form,
                                                  bool grad)
{
    peri_k_attention_args a = {.sequences = s->sequences,
                               .heads = s->heads,
                               .dim = s->dim,
                               .v_dim = s->v_dim,
                               .window = s->window,
                               .contextual = s->contextual,
                               .full = s->full,
                               .alpha = 0.7 / sqrt((double)s->dim),
                               .scale = 0.03,
                               .dtype = dtype,
                               .form = form,
                               .causal = s->causal};
    a.rows = sequence_marks(c, s, &a.offsets, &a.targets);
    a.q_stride = s->heads * s->dim + 1;
    a.k_stride = s->heads * s->dim + 3;
    a.v_stride = s->heads * s->v_dim + 2;
    a.q = dense_numbers(c, a.rows * a.q_stride, dtype, -1, 1);
    a.k = dense_numbers(c, a.rows * a.k_stride, dtype, -1, 1);
    a.v = dense_numbers(c, a.rows * a.v_stride, dtype, -1, 1);
    c->tolerance = 1e-5;
    if (!grad) return a;
    a.dout = dense_numbers(c, a.rows * s->heads * s->v_dim, dtype, -1, 1);
    a.out = dense_numbers(c, a.rows * s->heads * s->v_dim, dtype, -1, 1);
    a.lse = dense_numbers(c, a.rows * s->heads, dtype, 1, 3);
    a.delta = dense_numbers(c, a.rows * s->heads, dtype, -1, 1);
    return a;
}

static inline void sequence_attention(const sequence_shape *s, int32_t dtype, int32_t form, dense_visit visit,
                                      void *ctx)
{
    const bool softmax = form == PERI_ATTENTION_SOFTMAX;
    dense_case c = dense_begin(softmax ? "attention" : "silu attention", PERI_K_attention, dtype, s->dim, s->v_dim);
    peri_k_attention_args a = sequence_args(&c, s, dtype, form, false);
    const int64_t items = a.heads * a.rows, wide = items * s->v_dim, narrow = items * s->dim;
    DENSE_OUT(&c, peri_k_attention_args, out, wide, dtype, NULL);
    if (softmax) DENSE_OUT(&c, peri_k_attention_args, lse, items, dtype, NULL);
    dense_end(&c, &a, sizeof a, items, visit, ctx);
    c = dense_begin(softmax ? "attention_grad_q" : "silu attention_grad_q", PERI_K_attention_grad_q, dtype, s->dim,
                    s->v_dim);
    a = sequence_args(&c, s, dtype, form, true);
    DENSE_OUT(&c, peri_k_attention_args, dq, narrow, dtype, NULL);
    if (softmax) DENSE_OUT(&c, peri_k_attention_args, delta, items, dtype, NULL);
    dense_end(&c, &a, sizeof a, items, visit, ctx);
    c = dense_begin(softmax ? "attention_grad_kv" : "silu attention_grad_kv", PERI_K_attention_grad_kv, dtype, s->dim,
                    s->v_dim);
    a = sequence_args(&c, s, dtype, form, true);
    DENSE_OUT(&c, peri_k_attention_args, dk, narrow, dtype, NULL);
    DENSE_OUT(&c, peri_k_attention_args, dv, wide, dtype, NULL);
    dense_end(&c, &a, sizeof a, items, visit, ctx);
}

/** Every form and kind of mask on sequences of these lengths. */
static inline void sequence_cases(const int64_t *lengths, int64_t n, int64_t dim, int64_t v_dim, int32_t dtype,
                                  dense_visit visit, void *ctx)
{
    for (int32_t variant = 0; variant < 16; variant++) {
        sequence_shape s = {.lengths = lengths,
                            .sequences = n,
                            .heads = 1 + (variant & 1),
                            .dim = dim,
                            .v_dim = v_dim,
                            .window = variant & 2 ? 5 : 0,
                            .causal = variant & 4,
                            .targets = variant & 8};
        for (int32_t form = 0; form < 2; form++) {
            s.full = (variant / 2 + form + dim) % 3 * 2;
            s.contextual = (variant + form + dim) % 4; /* over the calls, each of them with each mask */
            sequence_attention(&s, dtype, form, visit, ctx);
        }
    }
}

#endif
