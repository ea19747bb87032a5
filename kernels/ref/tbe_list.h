/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_list.h: walking the list of kernels/tbe.h: shared by ref, the instruction sets and CUDA.
 */
#ifndef PERI_KERNELS_TBE_LIST_H
#define PERI_KERNELS_TBE_LIST_H

#include "../inline.h"
#include "../tbe.h"
#include "tbe_place.h"

K_INLINE int64_t tbe_clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

K_INLINE int64_t tbe_id(const peri_k_tbe_list *s, int64_t i)
{
    return s->ids_dtype == PERI_I32 ? ((const int32_t *)s->ids)[i] : ((const int64_t *)s->ids)[i];
}

K_INLINE int64_t tbe_offset(const peri_k_tbe_list *s, int64_t bag)
{
    return s->offsets_dtype == PERI_I32 ? ((const int32_t *)s->offsets)[bag] : ((const int64_t *)s->offsets)[bag];
}

/** Items of block k. */
K_INLINE int64_t tbe_items(const peri_k_tbe_list *s, int64_t k) { return s->spans[k + 1].items - s->spans[k].items; }

/** First id of bag j (0..bags) of block k, inside the block's own ids. */
K_INLINE int64_t tbe_bag_start(const peri_k_tbe_list *s, int64_t k, int64_t j)
{
    int64_t first = s->spans[k].first_id;
    return tbe_clamp(tbe_offset(s, s->blocks[k].first_bag + j), first, first + tbe_items(s, k));
}

/** What multiplies the pooled sum of a bag of @length ids. */
K_INLINE float tbe_factor(const peri_k_tbe_list *s, const peri_k_tbe_table *table, int64_t bag, int64_t length)
{
    float factor = table->pooling == PERI_POOLING_MEAN && length > 0 ? 1.0f / (float)length : 1.0f;
    return s->scale ? factor * s->scale[bag] : factor;
}

/** Where the rows of a block's bags are among those of its output; NULL: one behind the other. */
K_INLINE const int32_t *tbe_places(const peri_k_tbe_list *s, const peri_k_tbe_block *b)
{
    int64_t from = b->first_bag - s->first_placed;
    return s->places && from >= 0 && from < s->n_placed ? s->places + from : NULL;
}

/** Which row of a block's output belongs to id i of bag j. */
K_INLINE int64_t tbe_out_row(const peri_k_tbe_table *table, const int32_t *places, int64_t j, int64_t i)
{
    return table->pooling == PERI_POOLING_NONE ? i : places ? places[j] : j;
}

/** The first bag whose cost is not below chunk c's part of the total; chunks begin and end there. */
K_INLINE tbe_place tbe_seek(const peri_k_tbe_list *s, int64_t c, int64_t chunks)
{
    tbe_place end = {s->n_blocks, 0};
    if (c >= chunks) return end;
    int64_t total = s->spans[s->n_blocks].cost, low = 0, high = s->n_blocks;
    int64_t wanted = total / chunks * c + total % chunks * c / chunks;
    while (low + 1 < high) { /* the last block that starts at or before `wanted` */
        int64_t middle = low + (high - low) / 2;
        if (s->spans[middle].cost <= wanted) low = middle;
        else high = middle;
    }
    if (low >= s->n_blocks) return end;
    int64_t width = s->tables[s->blocks[low].table].cols + 8, first = s->spans[low].first_id;
    int64_t from = 0, to = s->blocks[low].bags;
    while (from < to) {
        int64_t middle = from + (to - from) / 2;
        if (s->spans[low].cost + (tbe_bag_start(s, low, middle) - first + middle) * width < wanted) from = middle + 1;
        else to = middle;
    }
    end.k = from == s->blocks[low].bags ? low + 1 : low;
    end.j = from == s->blocks[low].bags ? 0 : from;
    return end;
}

/** The block that holds item p of the list (0 <= p < all items). */
K_INLINE int64_t tbe_block_of(const peri_k_tbe_list *s, int64_t p)
{
    int64_t low = 0, high = s->n_blocks;
    while (low + 1 < high) {
        int64_t middle = low + (high - low) / 2;
        if (s->spans[middle].items <= p) low = middle;
        else high = middle;
    }
    return low;
}

/** The bag of block k that holds id i: the last that starts at or before it. */
K_INLINE int64_t tbe_bag_of(const peri_k_tbe_list *s, int64_t k, int64_t i)
{
    int64_t low = 0, high = s->blocks[k].bags;
    while (low + 1 < high) {
        int64_t middle = low + (high - low) / 2;
        if (tbe_bag_start(s, k, middle) <= i) low = middle;
        else high = middle;
    }
    return low;
}

/** Begin of part c of [0, n) cut into `chunks` parts. */
K_INLINE int64_t tbe_part(int64_t n, int64_t c, int64_t chunks) { return n / chunks * c + n % chunks * c / chunks; }

/** beta^t in f64 by repeated squaring. */
K_INLINE double tbe_power(double beta, uint64_t t)
{
    double result = 1;
    for (; t; t >>= 1, beta *= beta)
        if (t & 1) result *= beta;
    return result;
}

/** Atomic *low = min(*low, value). */
static inline void tbe_atomic_min(int64_t *low, int64_t value)
{
    int64_t seen = __atomic_load_n(low, __ATOMIC_RELAXED);
    while (value < seen && !__atomic_compare_exchange_n(low, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

static inline void tbe_count_merge(peri_k_tbe_report *report, const tbe_count *count)
{
    if (count->bad_ids) {
        __atomic_fetch_add(&report->bad_ids, count->bad_ids, __ATOMIC_RELAXED);
        tbe_atomic_min(&report->first_item, count->first_item);
    }
    if (count->bad_bags) {
        __atomic_fetch_add(&report->bad_bags, count->bad_bags, __ATOMIC_RELAXED);
        tbe_atomic_min(&report->first_bag, count->first_bag);
    }
}

/** Bags of all blocks before block k: only reports need it. */
K_INLINE int64_t tbe_bags_before(const peri_k_tbe_list *s, int64_t k)
{
    int64_t n = 0;
    for (int64_t b = 0; b < k; b++) n += s->blocks[b].bags;
    return n;
}

/** Whether @end, an end of a bag of block k, lies behind the block's own ids because `capacity` cut them: offsets that
 *  run backwards between the blocks ask for more items than there can be. */
K_INLINE bool tbe_cut(const peri_k_tbe_list *s, int64_t k, int64_t end)
{
    int64_t past = s->spans[k].first_id + tbe_items(s, k);
    return end > past && past < tbe_clamp(tbe_offset(s, s->blocks[k].first_bag + s->blocks[k].bags), 0, s->n_ids);
}

/** Note bag j of block k if its offsets are bad. */
K_INLINE void tbe_count_bag(const peri_k_tbe_list *s, int64_t k, int64_t j, tbe_count *count)
{
    int64_t begin = tbe_offset(s, s->blocks[k].first_bag + j), end = tbe_offset(s, s->blocks[k].first_bag + j + 1);
    if (begin >= 0 && begin <= end && end <= s->n_ids && !tbe_cut(s, k, end)) return;
    int64_t at = tbe_bags_before(s, k) + j;
    if (!count->bad_bags++ || at < count->first_bag) count->first_bag = at;
}

/** Note id i of block k, which is no row of its table, unless it is -1. */
K_INLINE void tbe_count_id(const peri_k_tbe_list *s, int64_t k, int64_t i, int64_t id, tbe_count *count)
{
    if (id == -1) return;
    int64_t at = s->spans[k].items + i - s->spans[k].first_id;
    if (!count->bad_ids++ || at < count->first_item) count->first_item = at;
}

/** Add what was found to the counters, and say of the first that is bad where it is. */
K_INLINE void tbe_describe(const peri_k_tbe_report_args *a)
{
    const peri_k_tbe_list *s = &a->list;
    peri_k_tbe_report *r = a->report;
    if (a->counters) a->counters[0] += r->bad_ids, a->counters[1] += r->bad_bags;
    if (!r->bad_ids && !r->bad_bags) return;
    int64_t k = 0, j;
    if (r->bad_bags) {
        int64_t before = 0;
        while (before + s->blocks[k].bags <= r->first_bag) before += s->blocks[k++].bags;
        j = r->first_bag - before;
    } else {
        k = tbe_block_of(s, r->first_item);
        int64_t i = s->spans[k].first_id + r->first_item - s->spans[k].items;
        j = tbe_bag_of(s, k, i);
        r->place = i - tbe_bag_start(s, k, j);
        r->id = tbe_id(s, i);
    }
    r->block = (int32_t)k;
    r->table = s->blocks[k].table;
    r->feature = s->blocks[k].feature;
    r->rows = s->tables[r->table].rows;
    r->sample = j;
    r->begin = tbe_offset(s, s->blocks[k].first_bag + j);
    r->end = tbe_offset(s, s->blocks[k].first_bag + j + 1);
    r->n_ids = s->n_ids;
}

#endif
