/* SPDX-License-Identifier: Apache-2.0
 *
 * nearest.c (ref): kernels/nearest.h. The best so far of a query are a heap whose root is the worst of them.
 */
#include "../nearest.h"

/** Whether (s, i) comes behind (t, j). */
static inline bool ref_behind(float s, int64_t i, float t, int64_t j) { return s < t || (s == t && i > j); }

/** Put (s, i) where the root was, of a heap of n. */
static inline void ref_sink(float *scores, int64_t *indices, int64_t n, float s, int64_t i)
{
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && ref_behind(scores[child + 1], indices[child + 1], scores[child], indices[child])) child++;
        if (!ref_behind(scores[child], indices[child], s, i)) break;
        scores[at] = scores[child];
        indices[at] = indices[child];
    }
    scores[at] = s;
    indices[at] = i;
}

/** Item @i with score @s for a query that has n of at most k; items come by rising numbers. Returns how many it has
 *  then. */
static inline int64_t ref_offer(float *scores, int64_t *indices, int64_t n, int64_t k, float s, int64_t i)
{
    if (!(s == s)) s = -INFINITY;
    if (n == k) {
        if (s > scores[0]) ref_sink(scores, indices, k, s, i);
        return k;
    }
    int64_t at = n, up = (n - 1) / 2;
    for (; at > 0 && ref_behind(s, i, scores[up], indices[up]); at = up, up = (at - 1) / 2) {
        scores[at] = scores[up];
        indices[at] = indices[up];
    }
    scores[at] = s;
    indices[at] = i;
    return n + 1;
}

/** A heap of n becomes a list, the best first; behind it, up to k, is nothing. */
static inline void ref_list(float *scores, int64_t *indices, int64_t n, int64_t k)
{
    for (int64_t last = n - 1; last > 0; last--) {
        const float s = scores[last];
        const int64_t i = indices[last];
        scores[last] = scores[0];
        indices[last] = indices[0];
        ref_sink(scores, indices, last, s, i);
    }
    for (int64_t at = n; at < k; at++) {
        scores[at] = -INFINITY;
        indices[at] = -1;
    }
}

static void ref_nearest_part(const void *args, int64_t begin, int64_t end)
{
    const peri_k_nearest_args *a = args;
    const peri_op_nearest *op = &a->op;
    for (int64_t p = begin; p < end; p++) {
        float *scores = a->part_scores + p * op->n_queries * op->k, *row = a->rows + p * PERI_NEAREST_ROWS * op->dim;
        int64_t *indices = a->part_indices + p * op->n_queries * op->k, n = 0;
        for (int64_t i = p * op->n_items / a->parts; i < (p + 1) * op->n_items / a->parts; i++) {
            const char *item = (const char *)op->items + i * op->stride;
            peri_k_rows_args one = op->format;
            one.bytes = (void *)(uintptr_t)item;
            one.x = row;
            one.dtype = PERI_F32;
            if (one.bits) ref_rows_restore(&one, 0, 1);
            else
                for (int64_t d = 0; d < op->dim; d++) row[d] = ref_number(item, d, op->dtype);
            int64_t next = n;
            for (int64_t q = 0; q < op->n_queries; q++) {
                float s = 0;
                for (int64_t d = 0; d < op->dim; d++) s = fmaf(op->queries[q * op->dim + d], row[d], s);
                next = ref_offer(scores + q * op->k, indices + q * op->k, n, op->k, s, i);
            }
            n = next;
        }
        for (int64_t q = 0; q < op->n_queries; q++) ref_list(scores + q * op->k, indices + q * op->k, n, op->k);
    }
}

static void ref_nearest_merge(const void *args, int64_t begin, int64_t end)
{
    const peri_k_nearest_args *a = args;
    const int64_t k = a->op.k;
    for (int64_t q = begin; q < end; q++) {
        float *scores = a->op.scores + q * k;
        int64_t *indices = a->op.indices + q * k, n = 0;
        for (int64_t p = 0; p < a->parts; p++) {
            const float *s = a->part_scores + (p * a->op.n_queries + q) * k;
            const int64_t *i = a->part_indices + (p * a->op.n_queries + q) * k;
            for (int64_t at = 0; at < k && i[at] >= 0 && (n < k || s[at] > scores[0]); at++)
                n = ref_offer(scores, indices, n, k, s[at], i[at]);
        }
        ref_list(scores, indices, n, k);
    }
}
