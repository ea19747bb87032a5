/* SPDX-License-Identifier: Apache-2.0
 *
 * nearest.c (cpu): kernels/nearest.h by the tiles of interaction.c: 4 queries and some items at once, or 4 items and some queries where
 * there are few. A tile's scores are compared with the worst that its queries have; only what is above goes into a heap.
 */

enum { CPU_FEW = K_TILE_ROWS - 1 /* queries that do not fill a tile's rows */ };

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
    for (int64_t r = 0; r < n; r++) cpu_convert_row(room + r * op->dim, PERI_F32, 1, first + r * op->stride, op->dtype, 1, op->dim);
}

/** Whether a lane of @a is above that of @b. */
static inline bool cpu_any_above(k_vec a, k_vec b)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#endif
}

/** What one part has found: its heaps, all of `n` entries. */
typedef struct cpu_nearest_best {
    const peri_op_nearest *op;
    float *scores;
    int64_t *indices, n;
} cpu_nearest_best;

/** Products of the items rows[0..n), which begin with number i, and queries [q, q + queries), at most K_TILE_ROWS of them. */
static inline void cpu_nearest_tiles(const cpu_nearest_best *b, const float *const *rows, int64_t i, int64_t n, int64_t q, int64_t queries)
{
    const peri_op_nearest *op = b->op;
    const float *own[K_TILE_ROWS], *other[K_TILE_ROWS];
    const bool few = queries <= CPU_FEW && queries <= K_TILE_COLS; /* then the items are the tile's rows */
    const int64_t step = few ? K_TILE_ROWS : K_TILE_COLS, k = op->k;
    float tile[K_LANES], worst[K_LANES];
    for (int l = 0; l < K_LANES; l++) {
        const int64_t query = few ? l % K_TILE_COLS : l / K_TILE_COLS;
        worst[l] = query >= queries ? INFINITY : b->n < k ? -INFINITY : b->scores[(q + query) * k];
    }
    const k_vec least = k_load(worst);
    for (int j = 0; j < K_TILE_ROWS; j++) own[j] = op->queries + (q + (j < queries ? j : 0)) * op->dim;
    for (int64_t r = 0; r < n; r += step) {
        for (int64_t j = 0; j < step; j++) other[j] = rows[r + j < n ? r + j : n - 1];
        const k_vec products = few ? k_tile(other, own, op->dim) : k_tile(own, other, op->dim);
        if (b->n == k && !cpu_any_above(products, least)) continue;
        k_store(tile, products);
        const int64_t items = n - r < step ? n - r : step;
        for (int64_t j = 0; j < items; j++)
            for (int64_t query = 0; query < queries; query++) {
                const int64_t had = b->n + r + j < k ? b->n + r + j : k;
                ref_offer(b->scores + (q + query) * k, b->indices + (q + query) * k, had, k,
                          tile[few ? j * K_TILE_COLS + query : query * K_TILE_COLS + j], i + r + j);
            }
    }
}

static void cpu_nearest_part(const void *args, int64_t begin, int64_t end)
{
    const peri_k_nearest_args *a = args;
    const peri_op_nearest *op = &a->op;
    for (int64_t p = begin; p < end; p++) {
        const int64_t first = p * op->n_items / a->parts, past = (p + 1) * op->n_items / a->parts;
        cpu_nearest_best b = {.op = op, .scores = a->part_scores + p * op->n_queries * op->k,
                              .indices = a->part_indices + p * op->n_queries * op->k};
        const float *rows[PERI_NEAREST_ROWS];
        for (int64_t i = first; i < past; i += PERI_NEAREST_ROWS) {
            const int64_t n = past - i < PERI_NEAREST_ROWS ? past - i : PERI_NEAREST_ROWS;
            cpu_nearest_rows(op, i, n, a->rows + p * PERI_NEAREST_ROWS * op->dim, rows);
            for (int64_t q = 0; q < op->n_queries; q += K_TILE_ROWS)
                cpu_nearest_tiles(&b, rows, i, n, q, op->n_queries - q < K_TILE_ROWS ? op->n_queries - q : K_TILE_ROWS);
            b.n = b.n + n < op->k ? b.n + n : op->k;
        }
        for (int64_t q = 0; q < op->n_queries; q++) ref_list(b.scores + q * op->k, b.indices + q * op->k, b.n, op->k);
    }
}

#define K_CPU_NEAREST [PERI_K_nearest_part] = cpu_nearest_part,
