/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_sort.c: keys of the list's items, and the passes of the counting sort that brings equal rows together.
 */

/** Items [p, stop) of block k: keys, and factors where there are any; counts the first digit. */
TBE_INLINE void tbe_keys_block(const peri_k_tbe_keys_args *a, int64_t k, int64_t p, int64_t stop, uint32_t *counts,
                               const bool factors)
{
    const peri_k_tbe_list *s = &a->list;
    const peri_k_tbe_block *b = &s->blocks[k];
    const peri_k_tbe_table *t = &s->tables[b->table];
    uint64_t mask = ((uint64_t)1 << a->bits) - 1, none = (uint64_t)a->total_rows << a->payload_bits,
             first_row = (uint64_t)t->first_row;
    int64_t i = s->spans[k].first_id + p - s->spans[k].items, j = tbe_bag_of(s, k, i);
    const int32_t *places = tbe_places(s, b);
    for (; p < stop; j++) {
        int64_t from = tbe_bag_start(s, k, j), past = j + 1 < b->bags ? tbe_bag_start(s, k, j + 1) : i + stop - p;
        int64_t grad = b->out_offset + tbe_out_row(t, places, j, i) * b->out_stride;
        int64_t step = t->pooling == PERI_POOLING_NONE ? b->out_stride : 0;
        float factor = factors ? tbe_factor(s, t, b->first_bag + j, tbe_bag_start(s, k, j + 1) - from) : 1;
        for (; i < past && p < stop; i++, p++, grad += step) {
            uint64_t id = (uint64_t)tbe_id(s, i);
            uint64_t key = id < (uint64_t)t->rows ? (first_row + id) << a->payload_bits : none;
            key |= factors ? (uint64_t)p : (uint64_t)grad;
            a->keys[p] = key;
            counts[(key >> a->shift) & mask]++;
            if (factors)
                a->items[p] = (peri_k_tbe_item){.grad = grad, .scale = s->weights ? s->weights[i] * factor : factor};
        }
    }
}

static void cpu_tbe_keys(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_keys_args *a = args;
    const peri_k_tbe_list *s = &a->list;
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

/* -- table by table ------------------------------------------------------------------------------------------------ */

/** How the keys of one table are sorted: by rows of the table, 0..rows (invalid), in digits. */
typedef struct tbe_digits {
    int32_t passes, bits;
} tbe_digits;

static tbe_digits tbe_digits_of(int64_t rows, int64_t n)
{
    enum { MOST_BITS = 12 };
    int32_t need = 64 - __builtin_clzll((uint64_t)rows | 1);
    tbe_digits best = {0};
    for (int64_t passes = 1, least = INT64_MAX; passes <= 6; passes++) {
        int32_t bits = (int32_t)((need + passes - 1) / passes);
        int64_t cost = passes * (n + ((int64_t)1 << bits));
        if (bits > MOST_BITS || passes << bits > 1 << PERI_K_TBE_SORT_BITS || cost >= least) continue;
        least = cost;
        best = (tbe_digits){(int32_t)passes, bits};
    }
    return best;
}

/** Keys of block k, with rows of its own table; counts all digits. */
TBE_INLINE uint64_t *tbe_sort_block(const peri_k_tbe_sort_args *a, int64_t k, tbe_digits digits, uint64_t *key,
                                    uint32_t *counts, const bool factors, const int passes)
{
    const peri_k_tbe_list *s = &a->list;
    const peri_k_tbe_block *b = &s->blocks[k];
    const peri_k_tbe_table *t = &s->tables[b->table];
    const int32_t bits = digits.bits, payload_bits = a->payload_bits;
    const uint64_t mask = ((uint64_t)1 << bits) - 1, rows = (uint64_t)t->rows;
    const bool none = t->pooling == PERI_POOLING_NONE;
    const int32_t *places = tbe_places(s, b);
    int64_t i = s->spans[k].first_id, end = i + tbe_items(s, k), p = s->spans[k].items;
    for (int64_t j = 0; i < end; j++) {
        int64_t from = i, past = j + 1 < b->bags ? tbe_bag_start(s, k, j + 1) : end;
        if (past <= i) continue;
        uint64_t grad = (uint64_t)(b->out_offset + tbe_out_row(t, places, j, i) * b->out_stride),
                 step = none ? (uint64_t)b->out_stride : 0;
        float factor = factors ? tbe_factor(s, t, b->first_bag + j, past - from) : 1;
        for (; i < past; i++, p++, grad += step) {
            uint64_t id = (uint64_t)tbe_id(s, i), row = id < rows ? id : rows;
            *key++ = row << payload_bits | (factors ? (uint64_t)p : grad);
            for (int d = 0; d < passes; d++) counts[(d << bits) + (row >> (d * bits) & mask)]++;
            if (factors)
                a->items[p] =
                    (peri_k_tbe_item){.grad = (int64_t)grad, .scale = s->weights ? s->weights[i] * factor : factor};
        }
    }
    return key;
}

/** What the sort of a table asks for meanwhile, for that of the next one. */
typedef struct tbe_sort_next {
    const char *ids, *keys;
    int64_t id_bytes;
} tbe_sort_next;

/** Keys [i, past) of a pass. */
TBE_INLINE void tbe_sort_keys(const uint64_t *src, uint64_t *dst, int64_t i, int64_t past, uint32_t *counts,
                              int32_t shift, uint64_t mask, uint64_t add)
{
    for (; i < past; i++) {
        uint64_t key = src[i];
        dst[counts[key >> shift & mask]++] = key + add;
    }
}

/** One pass; @add is added to every key on the way. */
TBE_INLINE void tbe_sort_pass(const uint64_t *src, uint64_t *dst, int64_t n, uint32_t *counts, int32_t shift,
                              uint64_t mask, uint64_t add, tbe_sort_next next)
{
    enum { GROUP = TBE_LINE / 8 };
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        _mm_prefetch(next.ids + i * next.id_bytes, _MM_HINT_T1);
        __builtin_prefetch(next.keys + i * 8, 1, 2);
        tbe_sort_keys(src, dst, i, i + GROUP, counts, shift, mask, add);
    }
    tbe_sort_keys(src, dst, i, n, counts, shift, mask, add);
}

/** Blocks [k, past), which are of one table, with @room for its items. */
static void tbe_sort_table(const peri_k_tbe_sort_args *a, int64_t k, int64_t past, uint32_t *counts, uint64_t *room)
{
    const peri_k_tbe_list *s = &a->list;
    const peri_k_tbe_table *t = &s->tables[s->blocks[k].table];
    int64_t first = s->spans[k].items, n = s->spans[past].items - first;
    tbe_digits digits = tbe_digits_of(t->rows, n);
    uint64_t *src = digits.passes % 2 ? room : a->keys + first, *dst = digits.passes % 2 ? a->keys + first : room;
    uint64_t *key = src, mask = ((uint64_t)1 << digits.bits) - 1;
    int64_t id_bytes = s->ids_dtype == PERI_I32 ? 4 : 8;
    tbe_sort_next next = {(const char *)s->ids + s->spans[past].first_id * id_bytes,
                          (const char *)(a->keys + first + n), id_bytes};
    memset(counts, 0, sizeof *counts * (size_t)((int64_t)digits.passes << digits.bits));
    for (; k < past; k++) {
        if (digits.passes == 2) {
            key = a->items ? tbe_sort_block(a, k, digits, key, counts, true, 2)
                           : tbe_sort_block(a, k, digits, key, counts, false, 2);
        } else {
            key = a->items ? tbe_sort_block(a, k, digits, key, counts, true, digits.passes)
                           : tbe_sort_block(a, k, digits, key, counts, false, digits.passes);
        }
    }
    for (int32_t d = 0; d < digits.passes; d++) {
        uint32_t sum = 0, *count = counts + ((int64_t)d << digits.bits);
        for (uint64_t v = 0; v <= mask; v++) {
            uint32_t c = count[v];
            count[v] = sum;
            sum += c;
        }
        uint64_t add = d + 1 == digits.passes ? (uint64_t)t->first_row << a->payload_bits : 0;
        tbe_sort_pass(src, dst, n, count, a->payload_bits + d * digits.bits, mask, add, next);
        uint64_t *other = src;
        src = dst;
        dst = other;
    }
    uint64_t invalid = (uint64_t)(t->first_row + t->rows), payload = ((uint64_t)1 << a->payload_bits) - 1;
    for (int64_t i = n; i > 0 && src[i - 1] >> a->payload_bits == invalid; i--)
        src[i - 1] = (uint64_t)a->total_rows << a->payload_bits | (src[i - 1] & payload);
}

static void cpu_tbe_sort(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_sort_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    int64_t n = s->spans[s->n_blocks].items, from = tbe_part(n, begin, a->chunks), to = tbe_part(n, end, a->chunks);
    uint64_t *room = NULL; /* that of the first table, for all of them: it stays in the cache */
    for (int64_t k = 0, past; k < s->n_blocks; k = past) {
        for (past = k + 1; past < s->n_blocks && s->blocks[past].table == s->blocks[k].table; past++) {
        }
        if (s->spans[k].items < from || s->spans[k].items >= to || s->spans[past].items == s->spans[k].items) continue;
        if (!room) room = a->room + s->spans[k].items;
        tbe_sort_table(a, k, past, a->counts + (begin << PERI_K_TBE_SORT_BITS), room);
    }
}

/* -- all tables at once -------------------------------------------------------------------------------------------- */

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
