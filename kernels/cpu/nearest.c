/* SPDX-License-Identifier: Apache-2.0
 *
 * nearest.c (cpu): kernels/nearest.h by the products of product.c: items are turned into panels, of which a vector has
 * one number of as many items as it has lanes, so a score is a sum in the order of the numbers, whatever stands beside
 * it. Scores are compared with the worst that their query has; only what is above goes into a heap.
 */

enum {
    CPU_NEAREST_QUERIES = 24, /* whose scores are kept in the first-level cache */
    CPU_NEAREST_AHEAD = PERI_PANEL   /* items */
};

/** Items [i, i + n) as f32: where they lie, or in @room. */
static void cpu_nearest_rows(const peri_op_nearest *op, int64_t i, int64_t n, float *room, const float **rows)
{
    const char *first = (const char *)op->items + i * op->stride;
    if (!op->format.bits && op->dtype == PERI_F32) {
        for (int64_t r = 0; r < n; r++) rows[r] = (const float *)(first + r * op->stride);
        return;
    }
    for (int64_t r = 0; r < n; r++) rows[r] = room + r * op->dim;
    if (op->format.bits) {
        peri_k_rows_args block = op->format;
        block.bytes = (void *)(uintptr_t)first;
        block.x = room;
        block.dtype = PERI_F32;
        block.stride = op->stride;
        cpu_rows_restore(&block, 0, n);
        return;
    }
    for (int64_t r = 0; r < n; r++)
        cpu_convert_row(room + r * op->dim, PERI_F32, 1, first + r * op->stride, op->dtype, 1, op->dim);
}

/* Lanes of two vectors, numbered one behind the other: in place l of the result is lane f(l, h), a constant. */
#define K_EIGHT(f, l, h)                                                                                               \
    f(l, h), f(l + 1, h), f(l + 2, h), f(l + 3, h), f(l + 4, h), f(l + 5, h), f(l + 6, h), f(l + 7, h)
#if defined(__AVX512F__)
#define K_LANE_NUMBERS(f, h) K_EIGHT(f, 0, h), K_EIGHT(f, 8, h)
#else
#define K_LANE_NUMBERS(f, h) K_EIGHT(f, 0, h)
#endif
#define K_LOW(l, h) ((l) & (h) ? K_LANES + (l) - (h) : (l))
#define K_HIGH(l, h) ((l) & (h) ? K_LANES + (l) : (l) + (h))
#if defined(__clang__)
#define K_PICK(a, b, f, h) __builtin_shufflevector(a, b, K_LANE_NUMBERS(f, h))
#else
#define K_PICK(a, b, f, h) __builtin_shuffle(a, b, (k_ivec){K_LANE_NUMBERS(f, h)})
#endif

/* In pairs of vectors of @r h apart, blocks of h lanes change places. */
#define K_SWAP_BLOCKS(r, h) \
    do { \
        _Pragma("GCC unroll 16") for (int i = 0; i < K_LANES; i++) \
        { \
            if (i & (h)) continue; \
            const k_vec a = (r)[i], b = (r)[i + (h)]; \
            (r)[i] = K_PICK(a, b, K_LOW, h); \
            (r)[i + (h)] = K_PICK(a, b, K_HIGH, h); \
        } \
    } while (0)

/** Lane k of vector i and lane i of vector k change places. */
static inline __attribute__((always_inline)) void k_transpose(k_vec r[K_LANES])
{
#if defined(__AVX512F__)
    K_SWAP_BLOCKS(r, 8);
#endif
    K_SWAP_BLOCKS(r, 4);
    K_SWAP_BLOCKS(r, 2);
    K_SWAP_BLOCKS(r, 1);
}

/** K_LANES rows from column d on, turned, to K_LANES lines of a panel, which are PERI_PANEL numbers apart. */
static inline __attribute__((always_inline)) void cpu_nearest_turn(float *to, const float *const *rows, int64_t d,
                                                                   int64_t left)
{
    k_vec r[K_LANES];
    if (left >= K_LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < K_LANES; i++) r[i] = k_load(rows[i] + d);
        k_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < K_LANES; i++) k_store(to + i * PERI_PANEL, r[i]);
        return;
    }
    for (int i = 0; i < K_LANES; i++) r[i] = k_load_part(rows[i] + d, left);
    k_transpose(r);
    for (int64_t i = 0; i < left; i++) k_store(to + i * PERI_PANEL, r[i]);
}

/** PERI_PANEL rows as a panel. */
static inline void cpu_nearest_panel(float *panel, const float *const *rows, int64_t dim)
{
    for (int half = 0; half < PERI_PANEL; half += K_LANES)
        for (int64_t d = 0; d < dim; d += K_LANES)
            cpu_nearest_turn(panel + d * PERI_PANEL + half, rows + half, d, dim - d);
}

/** The lanes in which @a is above @b, one bit each. */
static inline uint32_t cpu_above(k_vec a, k_vec b)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#endif
}

/** What one part has found: its heaps, all of `n` entries. */
typedef struct cpu_nearest_best {
    const peri_op_nearest *op;
    float *scores;
    int64_t *indices, n;
} cpu_nearest_best;

/** Scores s[0..n) of the items from number @i on for query @q. */
static inline void cpu_nearest_offer(const cpu_nearest_best *b, int64_t q, const float *s, int64_t i, int64_t n)
{
    const int64_t k = b->op->k;
    float *scores = b->scores + q * k;
    int64_t *indices = b->indices + q * k, at = 0;
    for (; b->n + at < k && at < n; at++) ref_offer(scores, indices, b->n + at, k, s[at], i + at);
    for (; at < n; at += K_LANES) {
        const k_vec x = n - at < K_LANES ? k_load_part(s + at, n - at) : k_load(s + at);
        const uint32_t lanes = n - at < K_LANES ? (1u << (n - at)) - 1u : ~0u;
        for (uint32_t above = cpu_above(x, k_set(scores[0])) & lanes; above; above &= above - 1) {
            const int64_t l = at + __builtin_ctz(above);
            ref_offer(scores, indices, k, k, s[l], i + l);
        }
    }
}

/** The items from number @i on, in panels, for all queries. */
static inline void cpu_nearest_block(const cpu_nearest_best *b, const float *panels, int64_t i, int64_t n)
{
    const peri_op_nearest *op = b->op;
    float scores[CPU_NEAREST_QUERIES * PERI_NEAREST_ITEMS];
    for (int64_t q = 0; q < op->n_queries; q += CPU_NEAREST_QUERIES) {
        const int64_t queries = op->n_queries - q < CPU_NEAREST_QUERIES ? op->n_queries - q : CPU_NEAREST_QUERIES;
        const peri_k_panel_product_args product = {.y = scores,
                                                   .x = op->queries + q * op->dim,
                                                   .panels = panels,
                                                   .act = PERI_UNARY_IDENTITY,
                                                   .inner = op->dim,
                                                   .cols = n,
                                                   .x_stride = op->dim,
                                                   .y_stride = PERI_NEAREST_ITEMS};
        cpu_panel_product(&product, 0, queries);
        for (int64_t j = 0; j < queries; j++) cpu_nearest_offer(b, q + j, scores + j * PERI_NEAREST_ITEMS, i, n);
    }
}

/** Ask for the items of the next panel: turning reads a line of each in turn, which hardware does not take for one
 *  stream. */
static inline void cpu_nearest_ahead(const peri_op_nearest *op, int64_t i)
{
    if (i + PERI_PANEL > op->n_items) return;
    const char *first = (const char *)op->items + i * op->stride;
    for (int64_t b = 0; b < PERI_PANEL * op->stride; b += 64) _mm_prefetch(first + b, _MM_HINT_T0);
}

static void cpu_nearest_part(const void *args, int64_t begin, int64_t end)
{
    const peri_k_nearest_args *a = args;
    const peri_op_nearest *op = &a->op;
    for (int64_t p = begin; p < end; p++) {
        const int64_t first = p * op->n_items / a->parts, past = (p + 1) * op->n_items / a->parts;
        cpu_nearest_best b = {.op = op, .scores = a->part_scores + p * op->n_queries * op->k,
                              .indices = a->part_indices + p * op->n_queries * op->k};
        float *panels = a->rows + p * PERI_NEAREST_ROWS * op->dim, *room = panels + PERI_NEAREST_ITEMS * op->dim;
        for (int64_t i = first; i < past; i += PERI_NEAREST_ITEMS) {
            const int64_t n = past - i < PERI_NEAREST_ITEMS ? past - i : PERI_NEAREST_ITEMS;
            for (int64_t at = 0; at < n; at += PERI_PANEL) {
                const float *rows[PERI_PANEL];
                const int64_t some = n - at < PERI_PANEL ? n - at : PERI_PANEL;
                cpu_nearest_ahead(op, i + at + CPU_NEAREST_AHEAD);
                cpu_nearest_rows(op, i + at, some, room, rows);
                /* what comes of them is not looked at */
                for (int64_t r = some; r < PERI_PANEL; r++) rows[r] = rows[some - 1];
                cpu_nearest_panel(panels + at * op->dim, rows, op->dim);
            }
            cpu_nearest_block(&b, panels, i, n);
            b.n = b.n + n < op->k ? b.n + n : op->k;
        }
        for (int64_t q = 0; q < op->n_queries; q++) ref_list(b.scores + q * op->k, b.indices + q * op->k, b.n, op->k);
    }
}

#define K_CPU_NEAREST [PERI_K_nearest_part] = cpu_nearest_part,
