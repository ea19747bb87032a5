/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe.c (ref): see kernels/tbe.h.
 */
#include "tbe_list.h"
#include "tbe_value.h"

#include "tbe_round.h"
#include "tbe_step.h"

/* -- the list ------------------------------------------------------------------------------------------------------ */

static void ref_tbe_prepare(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_prepare_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    if (begin >= end) return;
    int64_t items = 0, cost = 0, bags = 0;
    for (int64_t k = 0; k < s->n_blocks; k++) {
        const peri_k_tbe_block *b = &s->blocks[k];
        int64_t first = tbe_clamp(tbe_offset(s, b->first_bag), 0, s->n_ids);
        int64_t last = tbe_clamp(tbe_offset(s, b->first_bag + b->bags), first, s->n_ids);
        int64_t n = tbe_clamp(last - first, 0, s->capacity - items);
        s->spans[k] = (peri_k_tbe_span){.first_id = first, .items = items, .cost = cost};
        items += n;
        cost += (n + b->bags) * (s->tables[b->table].cols + 8);
        bags += b->bags;
    }
    s->spans[s->n_blocks] = (peri_k_tbe_span){.first_id = s->n_ids, .items = items, .cost = cost};
    if (a->totals) a->totals[0] += items, a->totals[1] += bags;
}

static void ref_tbe_check(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_check_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    tbe_count count = {0};
    for (int64_t c = begin; c < end; c++) {
        tbe_place at = tbe_seek(s, c, a->chunks), stop = tbe_seek(s, c + 1, a->chunks);
        for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0) {
            int64_t rows = s->tables[s->blocks[at.k].table].rows;
            int64_t last = at.k == stop.k ? stop.j : s->blocks[at.k].bags;
            for (int64_t j = at.j; j < last; j++) {
                tbe_count_bag(s, at.k, j, &count);
                for (int64_t i = tbe_bag_start(s, at.k, j); i < tbe_bag_start(s, at.k, j + 1); i++) {
                    int64_t id = tbe_id(s, i);
                    if (id < 0 || id >= rows) tbe_count_id(s, at.k, i, id, &count);
                }
            }
        }
    }
    tbe_count_merge(a->report, &count);
}

static void ref_tbe_report(const void *args, int64_t begin, int64_t end)
{
    if (begin < end) tbe_describe(args);
}

/* -- forward ------------------------------------------------------------------------------------------------------- */

/** Ids [first, past) of block k as one bag, to element @at of the output. */
static void ref_tbe_forward_bag(const peri_k_tbe_forward_args *a, int64_t k, int64_t first, int64_t past, float factor,
                                int64_t at)
{
    const peri_k_tbe_list *s = &a->list;
    const peri_k_tbe_table *t = &s->tables[s->blocks[k].table];
    int64_t unit = tbe_unit(a->weight_dtype);
    for (int64_t d = 0; d < t->cols; d++) {
        float acc = 0;
        for (int64_t i = first; i < past; i++) {
            int64_t id = tbe_id(s, i);
            if (id < 0 || id >= t->rows) continue;
            const char *row = (const char *)a->weight + (t->offset + id * t->stride) * unit;
            acc = fmaf(s->weights ? s->weights[i] : 1, tbe_value(row, t->cols, d, a->weight_dtype), acc);
        }
        tbe_store(a->out, at + d, acc * factor, a->out_dtype);
    }
}

static void ref_tbe_forward(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_forward_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    if (a->report) ref_tbe_check(&(peri_k_tbe_check_args){*s, a->report, a->chunks}, begin, end);
    for (int64_t c = begin; c < end; c++) {
        tbe_place at = tbe_seek(s, c, a->chunks), stop = tbe_seek(s, c + 1, a->chunks);
        for (; at.k < stop.k || (at.k == stop.k && at.j < stop.j); at.k++, at.j = 0) {
            const peri_k_tbe_block *b = &s->blocks[at.k];
            const peri_k_tbe_table *t = &s->tables[b->table];
            int64_t last = at.k == stop.k ? stop.j : b->bags;
            for (int64_t j = at.j; j < last; j++) {
                int64_t first = tbe_bag_start(s, at.k, j), past = tbe_bag_start(s, at.k, j + 1);
                float factor = tbe_factor(s, t, b->first_bag + j, past - first);
                if (t->pooling != PERI_POOLING_NONE)
                    ref_tbe_forward_bag(a, at.k, first, past, factor,
                                        b->out_offset + tbe_out_row(t, tbe_places(s, b), j, first) * b->out_stride);
                else
                    for (int64_t i = first; i < past; i++)
                        ref_tbe_forward_bag(a, at.k, i, i + 1, factor, b->out_offset + i * b->out_stride);
            }
        }
    }
}

/** sum16 of x[d] * y[d]. */
static float ref_tbe_dot(const float *x, const float *y, int64_t n)
{
    float s[16] = {0};
    for (int64_t d = 0; d < n; d++) s[d % 16] = fmaf(x[d], y[d], s[d % 16]);
    for (int h = 8; h > 0; h /= 2)
        for (int l = 0; l < h; l++) s[l] += s[l + h];
    return s[0];
}

/** sum16 of x[d] * weight[at + d]. */
static float ref_tbe_weight_dot(const float *x, const void *weight, int64_t at, int32_t dtype, int64_t n)
{
    float s[16] = {0};
    for (int64_t d = 0; d < n; d++) s[d % 16] = fmaf(x[d], tbe_weight(weight, at + d, dtype), s[d % 16]);
    for (int h = 8; h > 0; h /= 2)
        for (int l = 0; l < h; l++) s[l] += s[l + h];
    return s[0];
}

static void ref_tbe_weight_gradient(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_weight_gradient_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    int64_t from = tbe_part(s->n_ids, begin, a->chunks), to = tbe_part(s->n_ids, end, a->chunks);
    for (int64_t i = from; i < to; i++) a->grad_weights[i] = 0;
    for (int64_t k = 0; k < s->n_blocks; k++) {
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        int64_t first = s->spans[k].first_id;
        for (int64_t i = tbe_clamp(first, from, to); i < tbe_clamp(first + tbe_items(s, k), from, to); i++) {
            int64_t id = tbe_id(s, i), j = tbe_bag_of(s, k, i);
            if (id < 0 || id >= t->rows) continue;
            float factor = tbe_factor(s, t, b->first_bag + j, tbe_bag_start(s, k, j + 1) - tbe_bag_start(s, k, j));
            const float *grad = a->grad + b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
            a->grad_weights[i] +=
                ref_tbe_weight_dot(grad, a->weight, t->offset + id * t->stride, a->weight_dtype, t->cols) * factor;
        }
    }
}

/* -- sorting ------------------------------------------------------------------------------------------------------- */

static void ref_radix_histogram(const void *args, int64_t begin, int64_t end)
{
    const peri_k_radix_args *a = args;
    uint64_t mask = ((uint64_t)1 << a->bits) - 1;
    for (int64_t c = begin; c < end; c++) {
        uint32_t *counts = a->counts + (c << a->bits);
        for (uint64_t d = 0; d <= mask; d++) counts[d] = 0;
        int64_t last = tbe_part(*a->n, c + 1, a->chunks);
        for (int64_t i = tbe_part(*a->n, c, a->chunks); i < last; i++) counts[(a->src[i] >> a->shift) & mask]++;
    }
}

static void ref_radix_scan(const void *args, int64_t begin, int64_t end)
{
    const peri_k_radix_args *a = args;
    if (begin >= end) return;
    uint32_t sum = 0;
    for (int64_t d = 0; d < (int64_t)1 << a->bits; d++)
        for (int64_t c = 0; c < a->chunks; c++) {
            uint32_t n = a->counts[(c << a->bits) + d];
            a->counts[(c << a->bits) + d] = sum;
            sum += n;
        }
}

static void ref_radix_scatter(const void *args, int64_t begin, int64_t end)
{
    const peri_k_radix_args *a = args;
    uint64_t mask = ((uint64_t)1 << a->bits) - 1;
    for (int64_t c = begin; c < end; c++) {
        uint32_t *counts = a->counts + (c << a->bits);
        int64_t last = tbe_part(*a->n, c + 1, a->chunks);
        for (int64_t i = tbe_part(*a->n, c, a->chunks); i < last; i++)
            a->dst[counts[(a->src[i] >> a->shift) & mask]++] = a->src[i];
    }
}

static void ref_tbe_keys(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_keys_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    int64_t n = s->spans[s->n_blocks].items;
    for (int64_t p = tbe_part(n, begin, a->chunks); p < tbe_part(n, end, a->chunks); p++) {
        int64_t k = tbe_block_of(s, p), i = s->spans[k].first_id + p - s->spans[k].items, j = tbe_bag_of(s, k, i),
                id = tbe_id(s, i);
        const peri_k_tbe_block *b = &s->blocks[k];
        const peri_k_tbe_table *t = &s->tables[b->table];
        uint64_t row = (uint64_t)(id >= 0 && id < t->rows ? t->first_row + id : a->total_rows);
        int64_t grad = b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
        a->keys[p] = row << a->payload_bits | (uint64_t)(a->items ? p : grad);
        if (!a->items) continue;
        float factor = tbe_factor(s, t, b->first_bag + j, tbe_bag_start(s, k, j + 1) - tbe_bag_start(s, k, j));
        a->items[p] = (peri_k_tbe_item){.grad = grad, .scale = s->weights ? s->weights[i] * factor : factor};
    }
    ref_radix_histogram(&(peri_k_radix_args){.src = a->keys,
                                             .counts = a->counts,
                                             .n = &s->spans[s->n_blocks].items,
                                             .chunks = a->chunks,
                                             .shift = a->shift,
                                             .bits = a->bits},
                        begin, end);
}

/** Items of blocks [k, past), which share a table, in order of their rows: keys in `keys`, by way of `room`. */
static void ref_tbe_sort_table(const peri_k_tbe_sort_args *a, int64_t k, int64_t past)
{
    const peri_k_tbe_list *s = &a->list;
    const peri_k_tbe_table *t = &s->tables[s->blocks[k].table];
    int64_t first = s->spans[k].items, n = s->spans[past].items - first;
    uint64_t *keys = a->keys + first, *room = a->room + first;
    for (int64_t p = first; k < past; k++)
        for (int64_t i = s->spans[k].first_id, end = i + tbe_items(s, k); i < end; i++, p++) {
            const peri_k_tbe_block *b = &s->blocks[k];
            int64_t id = tbe_id(s, i), j = tbe_bag_of(s, k, i);
            int64_t grad = b->out_offset + tbe_out_row(t, tbe_places(s, b), j, i) * b->out_stride;
            uint64_t row = (uint64_t)(id >= 0 && id < t->rows ? t->first_row + id : a->total_rows);
            keys[p - first] = row << a->payload_bits | (uint64_t)(a->items ? p : grad);
            if (!a->items) continue;
            float factor = tbe_factor(s, t, b->first_bag + j, tbe_bag_start(s, k, j + 1) - tbe_bag_start(s, k, j));
            a->items[p] = (peri_k_tbe_item){.grad = grad, .scale = s->weights ? s->weights[i] * factor : factor};
        }
    for (int32_t shift = a->payload_bits; shift < 64; shift += 8) {
        int64_t at[257] = {0};
        for (int64_t i = 0; i < n; i++) at[(keys[i] >> shift & 255) + 1]++;
        for (int d = 0; d < 256; d++) at[d + 1] += at[d];
        for (int64_t i = 0; i < n; i++) room[at[keys[i] >> shift & 255]++] = keys[i];
        memcpy(keys, room, sizeof *keys * (size_t)n);
    }
}

static void ref_tbe_sort(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_sort_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    int64_t n = s->spans[s->n_blocks].items, from = tbe_part(n, begin, a->chunks), to = tbe_part(n, end, a->chunks);
    for (int64_t k = 0, past; k < s->n_blocks; k = past) {
        for (past = k + 1; past < s->n_blocks && s->blocks[past].table == s->blocks[k].table; past++) {
        }
        if (s->spans[k].items >= from && s->spans[k].items < to) ref_tbe_sort_table(a, k, past);
    }
}
