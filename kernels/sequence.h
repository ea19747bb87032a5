/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/sequence.h: attention within the sequences of a jagged array, and the places and times of their members.
 *
 * Words: sequence s has the rows [offsets[s], offsets[s + 1]), which are its members 0, 1, ... Its last targets[s]
 * members are *targets*: items that a ranker is asked about. The members before them are the *history*. Its first
 * members may be *contextual*: not items, but what is known of the person (a country, an age), which belongs to the
 * history. All kernels take i64 offsets (complete) and targets; a number of targets outside of 0..length counts as the
 * nearest allowed one.
 */
#ifndef PERI_KERNELS_SEQUENCE_H
#define PERI_KERNELS_SEQUENCE_H

#include <perilune/base.h>

#include "inline.h"
#include "work.h"

/** Arguments of attention and of its gradients, f32 or f64. A row of q, k and dq, dk has heads x dim numbers, one of v,
 *  out, dout and dv heads x v_dim, head after head. q, k and v lie stride elements from row to row, everything else is
 *  contiguous.
 *
 *  Of query i and key j of one sequence and head: s = alpha * q[i] . k[j], and
 *    PERI_ATTENTION_SOFTMAX  w = exp(s) / sum over the keys that i sees of exp(s)
 *    PERI_ATTENTION_SILU     w = scale * s * sigmoid(s)
 *  out[i] = sum over the keys j that i sees of w * v[j]; peri_k_attention_keys says which these are. */
typedef struct peri_k_attention_args {
    void *out;
    void *lse;   /* [heads][rows]: log of the sum of exp(s); SOFTMAX only. Written by attention, read by the
                    gradients */
    void *dq, *dk, *dv;
    void *delta; /* [heads][rows]: out . dout; SOFTMAX only. Written by attention_grad_q, read by attention_grad_kv */
    const void *q, *k, *v, *dout;
    const int64_t *offsets; /* sequences + 1 */
    const int64_t *targets; /* sequences; NULL: none has targets */
    int64_t rows, sequences, heads, dim, v_dim;
    int64_t q_stride, k_stride, v_stride;
    int64_t window; /* how far back a member looks; 0: everywhere */
    int64_t full;   /* members that stand at most so many places before the end of the history look everywhere in spite
                       of the window; 0: none does */
    int64_t contextual; /* how many of the first members of each sequence are contextual; no history is shorter */
    double alpha, scale;
    int32_t dtype, form; /* PERI_ATTENTION_* */
    bool causal;
} peri_k_attention_args;

/** attention: out, and lse.
 *  attention_grad_q: delta, and dq unless it is NULL: of the gradient g = dout[i] . v[j] of w that of s is
 *    SOFTMAX  w * (g - delta[i])
 *    SILU     scale * g * sigmoid(s) * (1 + s * (1 - sigmoid(s)))
 *  and dq[i] = alpha * sum over j of that * k[j].
 *  attention_grad_kv: dk[j] = alpha * sum over the queries i that see j of the same * q[i] (unless dk is NULL), and
 *    dv[j] = sum of w * dout[i] (unless dv is NULL).
 *  Sums are made in the order of the rows. range: heads * rows; item h * rows + r is head h of row r. */

/** A sequence of n members, the last t of which are targets. */
typedef struct peri_k_sequence {
    int64_t first, n, t; /* first: the row of member 0 */
} peri_k_sequence;

/** Sequence @s. */
K_INLINE peri_k_sequence peri_k_sequence_at(const int64_t *offsets, const int64_t *targets, int64_t s)
{
    peri_k_sequence q;
    q.first = offsets[s];
    q.n = offsets[s + 1] - q.first;
    q.t = targets ? targets[s] : 0;
    if (q.t < 0) q.t = 0;
    if (q.t > q.n) q.t = q.n;
    return q;
}

/** The number of the sequence that has @row, which lies before offsets[sequences]. */
K_INLINE int64_t peri_k_sequence_of(const int64_t *offsets, int64_t sequences, int64_t row)
{
    int64_t low = 0, high = sequences;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

/** Some members of a sequence: [0, head), then [from, to), then [tail, end), and after them member @self, unless it is
 *  -1. head <= from, to <= tail unless tail = end. */
typedef struct peri_k_members {
    int64_t head, from, to, tail, end, self;
} peri_k_members;

/** Where member @i stands, for the window: all contextual members at place 0, the other members of the history one
 *  after the other at the places behind it, all targets where the history ends.
 *
 *     member      0  1  2 | 3  4  5 | 6  7       3 contextual members, 3 of the rest of the history, 2 targets
 *     place       0  0  0   1  2  3   4  4                                                                      */
K_INLINE int64_t peri_k_attention_place(const peri_k_attention_args *a, peri_k_sequence s, int64_t i)
{
    const int64_t history = s.n - s.t, at = i < history ? i : history, skipped = a->contextual - 1;
    return skipped <= 0 ? at : at > skipped ? at - skipped : 0;
}

/** The keys that query @i sees. A target sees the history and itself. A member of the history sees itself and what is
 *  at most `window` places before it; without `causal` also what is at most `window` places behind it. A contextual
 *  member sees, however small the window is, the whole history. Targets, and members near them (`full`), have no
 *  window. */
K_INLINE peri_k_members peri_k_attention_keys(const peri_k_attention_args *a, peri_k_sequence s, int64_t i)
{
    const int64_t history = s.n - s.t, at = i < history ? i : history;
    const int64_t place = peri_k_attention_place(a, s, i), end = peri_k_attention_place(a, s, history);
    const int64_t window = a->window > 0 && !(a->full > 0 && end - place <= a->full) ? a->window : s.n;
    const bool sees_targets = !a->causal && end - place <= window;
    peri_k_members m = {0, place > window ? at - window : 0, 0, 0, 0, i < history ? -1 : i};
    if (i >= history) m.to = history;
    else if (i < a->contextual) m.to = sees_targets ? s.n : history;
    else if (a->causal) m.to = i + 1;
    else m.to = sees_targets ? s.n : i + window + 1;
    return m;
}

/** Add the queries without a window to those that see key @j by theirs: all members from the first one on that is at
 *  most `full` places before the end. */
K_INLINE void peri_k_attention_add_full(const peri_k_attention_args *a, peri_k_sequence s, int64_t j, peri_k_members *m)
{
    const int64_t history = s.n - s.t, skipped = a->contextual > 1 ? a->contextual - 1 : 0;
    const int64_t least = peri_k_attention_place(a, s, history) - a->full; /* their places */
    int64_t first = least > 0 ? least + skipped : 0;
    if (j >= history) { /* targets do not see each other */
        if (!a->causal && first < m->from) m->from = first;
        return;
    }
    if (a->causal && j >= a->contextual && first < j) first = j;
    if (first < m->from) m->from = first;
    if (first <= m->to) m->to = s.n;
    else m->tail = first, m->end = s.n;
}

/** The queries that see key @j: attention_keys turned around. */
K_INLINE peri_k_members peri_k_attention_queries(const peri_k_attention_args *a, peri_k_sequence s, int64_t j)
{
    const int64_t history = s.n - s.t, window = a->window > 0 ? a->window : s.n, at = j < history ? j : history;
    const int64_t place = peri_k_attention_place(a, s, j), end = peri_k_attention_place(a, s, history);
    peri_k_members m = {0, place > window ? at - window : 0, history, 0, 0, j < history ? -1 : j};
    if (j >= history) {
        if (a->causal) m.from = history;
    } else if (j < a->contextual) {
        m.to = end <= window ? s.n : a->contextual + window;
    } else {
        if (a->causal) m.from = j;
        m.to = end - place <= window ? s.n : j + window + 1;
    }
    if (a->full > 0 && a->window > 0) peri_k_attention_add_full(a, s, j, &m);
    if (j < history && j >= a->contextual) m.head = a->contextual < m.from ? a->contextual : m.from;
    return m;
}

/** Member number @c of them. */
K_INLINE int64_t peri_k_member(peri_k_members m, int64_t c)
{
    if (c < m.head) return c;
    c -= m.head;
    if (c < m.to - m.from) return m.from + c;
    c -= m.to - m.from;
    return c < m.end - m.tail ? m.tail + c : m.self;
}
/** How many they are. */
K_INLINE int64_t peri_k_member_count(peri_k_members m)
{
    return m.head + m.to - m.from + m.end - m.tail + (m.self >= 0 ? 1 : 0);
}

/** out[r] of member i of sequence s of n members, t of which are targets: min((n - t) - min(i, n - t), most - 1): how
 *  far it is from the first target, which is n - i where there are no targets; with `number`: s. range: rows. */
typedef struct peri_k_sequence_positions_args {
    int64_t *out;
    const int64_t *offsets, *targets; /* targets: NULL: none */
    int64_t sequences, most;          /* most >= 1 */
    bool number;
} peri_k_sequence_positions_args;

/** out[r] = how long before the last member of its sequence a member happened, in numbers of 0..most: the whole part of
 *  sqrt(x) or log(x) of x = max(d, 1e-6) / increment, d the difference of their times (of i64 and i32 exact, but
 *  rounded to f64; NaN counts as 0). range: rows. */
typedef struct peri_k_time_buckets_args {
    int64_t *out;
    const void *times;
    const int64_t *offsets;
    int64_t sequences, most;
    double increment;
    int32_t dtype; /* PERI_I64, PERI_I32, PERI_F64, PERI_F32 */
    bool log;
} peri_k_time_buckets_args;

/** a - b, exact unless it does not fit in an int64. */
K_INLINE double peri_k_time_between(int64_t a, int64_t b)
{
    const int64_t d = (int64_t)((uint64_t)a - (uint64_t)b);
    return (a < 0) != (b < 0) && (d < 0) != (a < 0) ? (double)a - (double)b : (double)d;
}

PERI_KERNELS_SEQUENCE(PERI_K_ARGS_OF)

#endif
