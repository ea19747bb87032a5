/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_gradient.c: gradients of the weights of ids.
 */
#include "tbe_forward.h"
#include "tbe_row.h"

/** sum16 of grad[d] * weight row [d]. */
TBE_INLINE float tbe_weight_dot(const float *grad, const void *row, int64_t n, const int32_t dtype)
{
    v16 sum = v16_zero();
    for (int64_t d = 0; d < n; d += 16)
        sum = v16_fma(tbe_get(grad + d, n - d), tbe_get_weights(row, d, n - d, dtype), sum);
    return v16_sum(sum);
}

static void cpu_tbe_weight_gradient(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_weight_gradient_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    int64_t from = tbe_part(s->n_ids, begin, a->chunks), to = tbe_part(s->n_ids, end, a->chunks);
    memset(a->grad_weights + from, 0, sizeof(float) * (size_t)(to - from));
    for (int64_t k = 0; k < s->n_blocks; k++) {
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        int64_t i = tbe_clamp(s->spans[k].first_id, from, to),
                stop = tbe_clamp(s->spans[k].first_id + tbe_items(s, k), from, to);
        if (i >= stop) continue;
        const char *ring[TBE_AHEAD_MOST];
        const tbe_source source = tbe_source_of(s, a->weight, a->weight_dtype, &a->reach);
        /* the rows come from it: with nothing ahead, TBE_AHEAD_LEAST */
        tbe_ahead h = tbe_ahead_start(&source, ring, k, i, stop - i, 0);
        for (int64_t j = tbe_bag_of(s, k, i); i < stop; j++) {
            int64_t first = tbe_bag_start(s, k, j), past = tbe_bag_start(s, k, j + 1);
            float factor = tbe_factor(s, t, b->first_bag + j, past - first);
            if (j + 1 >= b->bags) past = stop;
            for (; i < past && i < stop; i++) {
                const char **place = tbe_ahead_place(&h, ring), *row = *place;
                *place = tbe_ahead_step(&h, &source, 0);
                if (!row) continue;
                const float *grad = a->grad + b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
                float dot = a->weight_dtype == PERI_F32   ? tbe_weight_dot(grad, row, t->cols, PERI_F32)
                            : a->weight_dtype == PERI_F16 ? tbe_weight_dot(grad, row, t->cols, PERI_F16)
                                                          : tbe_weight_dot(grad, row, t->cols, PERI_BF16);
                a->grad_weights[i] += dot * factor;
            }
        }
    }
}
