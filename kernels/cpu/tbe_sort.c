/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_sort.c: keys of the stream's items, and the passes of the counting sort that brings equal rows together.
 */

/** Items [p, stop) of block k: keys, and factors where there are any; counts the first digit. */
TBE_INLINE void tbe_keys_block(const peri_k_tbe_keys_args *a, int64_t k, int64_t p, int64_t stop, uint32_t *counts, const bool factors)
{
    const peri_k_tbe_stream *s = &a->stream;
    const peri_k_tbe_block *b = &s->blocks[k];
    const peri_k_tbe_table *t = &s->tables[b->table];
    uint64_t mask = ((uint64_t)1 << a->bits) - 1, none = (uint64_t)a->total_rows << a->payload_bits, first_row = (uint64_t)t->first_row;
    int64_t i = s->spans[k].first_id + p - s->spans[k].items, j = tbe_bag_of(s, k, i);
    for (; p < stop; j++) {
        int64_t from = tbe_bag_start(s, k, j), past = j + 1 < b->bags ? tbe_bag_start(s, k, j + 1) : i + stop - p;
        int64_t grad = b->out_offset + j * b->out_stride;
        float factor = factors ? tbe_factor(s, t, b->first_bag + j, tbe_bag_start(s, k, j + 1) - from) : 1;
        for (; i < past && p < stop; i++, p++) {
            uint64_t id = (uint64_t)tbe_id(s, i);
            uint64_t key = id < (uint64_t)t->rows ? (first_row + id) << a->payload_bits : none;
            key |= factors ? (uint64_t)p : (uint64_t)grad;
            a->keys[p] = key;
            counts[(key >> a->shift) & mask]++;
            if (factors) a->items[p] = (peri_k_tbe_item){.grad = grad, .scale = s->weights ? s->weights[i] * factor : factor};
        }
    }
}

static void cpu_tbe_keys(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_keys_args *a = args;
    const peri_k_tbe_stream *s = &a->stream;
    int64_t n = s->spans[s->n_blocks].items;
    for (int64_t c = begin; c < end; c++) {
        uint32_t *counts = a->counts + (c << a->bits);
        memset(counts, 0, sizeof *counts << a->bits);
        int64_t p = tbe_part(n, c, a->chunks), stop = tbe_part(n, c + 1, a->chunks);
        if (p >= stop) continue;
        for (int64_t k = tbe_block_of(s, p); p < stop; k++) {
            int64_t last = tbe_clamp(s->spans[k + 1].items, p, stop);
            if (last == p) continue;
            if (a->items) tbe_keys_block(a, k, p, last, counts, true);
            else tbe_keys_block(a, k, p, last, counts, false);
            p = last;
        }
    }
}

static void cpu_radix_histogram(const void *args, int64_t begin, int64_t end)
{
    const peri_k_radix_args *a = args;
    uint64_t mask = ((uint64_t)1 << a->bits) - 1;
    const uint64_t *src = a->src;
    int32_t shift = a->shift;
    for (int64_t c = begin; c < end; c++) {
        uint32_t *counts = a->counts + (c << a->bits);
        memset(counts, 0, sizeof *counts << a->bits);
        int64_t last = tbe_part(*a->n, c + 1, a->chunks);
        for (int64_t i = tbe_part(*a->n, c, a->chunks); i < last; i++) counts[(src[i] >> shift) & mask]++;
    }
}

static void cpu_radix_scan(const void *args, int64_t begin, int64_t end)
{
    const peri_k_radix_args *a = args;
    if (begin >= end) return;
    uint32_t sum = 0, *counts = a->counts;
    int64_t digits = (int64_t)1 << a->bits, chunks = a->chunks;
    for (int64_t d = 0; d < digits; d++)
        for (int64_t c = 0; c < chunks; c++) {
            uint32_t n = counts[c * digits + d];
            counts[c * digits + d] = sum;
            sum += n;
        }
}

static void cpu_radix_scatter(const void *args, int64_t begin, int64_t end)
{
    const peri_k_radix_args *a = args;
    uint64_t mask = ((uint64_t)1 << a->bits) - 1;
    const uint64_t *src = a->src;
    uint64_t *dst = a->dst;
    int32_t shift = a->shift;
    for (int64_t c = begin; c < end; c++) {
        uint32_t *counts = a->counts + (c << a->bits);
        int64_t last = tbe_part(*a->n, c + 1, a->chunks);
        for (int64_t i = tbe_part(*a->n, c, a->chunks); i < last; i++) {
            uint64_t key = src[i];
            dst[counts[(key >> shift) & mask]++] = key;
        }
    }
}
