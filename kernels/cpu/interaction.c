/* SPDX-License-Identifier: Apache-2.0
 *
 * interaction.c (cpu): pairwise dot products of a sample's vectors, in f32. Forward, a tile of 4 x K_LANES / 4 products
 * is accumulated in K_LANES vectors and then summed across lanes by one tree, which leaves the tile in one vector.
 * Backward is a small symmetric matrix times the vectors, whose coefficients are read where they lie in dy.
 *
 * Sums are arrays that must live in registers. gcc puts an array there if the innermost loop that goes over it is
 * unrolled, so each loop over sums is one loop (row q / columns, column q % columns), never two nested ones.
 */

enum { K_TILE_ROWS = 4, K_TILE_COLS = K_LANES / 4 };
enum { K_WIDE = K_LANES == 16 ? 4 : 2 }; /* vectors of columns in a tile of gradients */

/** Lane l of the result is the sum of the lanes of acc[l]. */
static inline k_vec k_sum_lanes(const k_vec *acc)
{
#if defined(__AVX512F__)
    __m512 quarter[4]; /* quarter[j]: 128-bit part i has 4 partial sums of acc[4 i + j] */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512 a = (__m512)acc[j], b = (__m512)acc[4 + j], c = (__m512)acc[8 + j], d = (__m512)acc[12 + j];
        __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        quarter[j] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    __m512d xy =
        (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
    __m512d zw =
        (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(quarter[2], quarter[3]), _mm512_unpackhi_ps(quarter[2], quarter[3]));
    return (k_vec)_mm512_add_ps((__m512)_mm512_unpacklo_pd(xy, zw), (__m512)_mm512_unpackhi_pd(xy, zw));
#else
    __m256 low =
        _mm256_hadd_ps(_mm256_hadd_ps((__m256)acc[0], (__m256)acc[1]), _mm256_hadd_ps((__m256)acc[2], (__m256)acc[3]));
    __m256 high =
        _mm256_hadd_ps(_mm256_hadd_ps((__m256)acc[4], (__m256)acc[5]), _mm256_hadd_ps((__m256)acc[6], (__m256)acc[7]));
    return (k_vec)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#endif
}

/** Products of rows[0..4) and cols[0..K_TILE_COLS), row-major. */
static inline k_vec k_tile(const float *const *rows, const float *const *cols, int64_t dim)
{
    k_vec acc[K_LANES];
#pragma GCC unroll 16
    for (int q = 0; q < K_LANES; q++) acc[q] = (k_vec){0};
    int64_t d = 0;
    for (; d + K_LANES <= dim; d += K_LANES)
#pragma GCC unroll 16
        for (int q = 0; q < K_LANES; q++)
            acc[q] = k_fma(k_load(rows[q / K_TILE_COLS] + d), k_load(cols[q % K_TILE_COLS] + d), acc[q]);
    if (d < dim)
#pragma GCC unroll 16
        for (int q = 0; q < K_LANES; q++)
            acc[q] = k_fma(k_load_part(rows[q / K_TILE_COLS] + d, dim - d),
                           k_load_part(cols[q % K_TILE_COLS] + d, dim - d), acc[q]);
    return k_sum_lanes(acc);
}

/** Place of the products of vector i with i + 1, i + 2, ... among all products. */
static inline int64_t cpu_pairs_before(int64_t i, int64_t features) { return i * features - i * (i - 1) / 2; }

static inline const float *cpu_vector(const float *dense, const float *sparse, int64_t feature_stride, int64_t i)
{
    return i == 0 ? dense : sparse + (i - 1) * feature_stride;
}

static void cpu_interaction(const void *args, int64_t begin, int64_t end)
{
    const peri_k_interaction_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_interaction(args, begin, end);
        return;
    }
    int64_t last = a->features, width = a->dim + last * (last + 1) / 2;
    for (int64_t b = begin; b < end; b++) {
        const float *dense = (const float *)a->dense + b * a->dense_stride,
                    *sparse = (const float *)a->sparse + b * a->sparse_stride;
        float *y = (float *)a->y + b * width, *pairs = y + a->dim;
        memcpy(y, dense, (size_t)a->dim * sizeof *y);
        for (int64_t i0 = 0; i0 < last; i0 += K_TILE_ROWS) {
            const float *rows[K_TILE_ROWS], *cols[K_TILE_COLS];
            float *to[K_TILE_ROWS]; /* to[i][j]: where the product of vectors i0 + i and j goes */
#pragma GCC unroll 4
            for (int i = 0; i < K_TILE_ROWS; i++) {
                rows[i] = cpu_vector(dense, sparse, a->feature_stride, i0 + i < last ? i0 + i : last);
                to[i] = pairs + cpu_pairs_before(i0 + i, last) - (i0 + i) - 1;
            }
            for (int64_t j0 = i0 / K_TILE_COLS * K_TILE_COLS; j0 <= last; j0 += K_TILE_COLS) {
#pragma GCC unroll 4
                for (int j = 0; j < K_TILE_COLS; j++)
                    cols[j] = cpu_vector(dense, sparse, a->feature_stride, j0 + j < last ? j0 + j : last);
                float tile[K_LANES];
                k_store(tile, k_tile(rows, cols, a->dim));
                bool whole = j0 > i0 + K_TILE_ROWS - 1 && j0 + K_TILE_COLS - 1 <= last && i0 + K_TILE_ROWS - 1 < last;
                if (whole)
#pragma GCC unroll 4
                    for (int i = 0; i < K_TILE_ROWS; i++)
                        memcpy(to[i] + j0, tile + i * K_TILE_COLS, K_TILE_COLS * sizeof *tile);
                else
#pragma GCC unroll 16
                    for (int q = 0; q < K_LANES; q++) {
                        int64_t i = i0 + q / K_TILE_COLS, j = j0 + q % K_TILE_COLS;
                        if (i < j && j <= last) to[q / K_TILE_COLS][j] = tile[q];
                    }
            }
        }
    }
}

/* -- backward ------------------------------------------------------------------------------------------------------ */

/** Inlined everywhere, so that numbers of rows and vectors are known when it is compiled. */
#define K_ALWAYS static inline __attribute__((always_inline))

/** One sample's vectors and upstream gradient. */
typedef struct k_sample {
    const float *dense, *sparse, *pairs; /* pairs: dy behind its first dim columns */
    int64_t features, feature_stride;
} k_sample;

/** acc[r][v] += g[r] times the v-th K_LANES of vector j's columns from d on; if left > 0, there are @left columns. */
K_ALWAYS void k_accumulate(k_vec *acc, const int rows, const int vectors, const k_sample *s, int64_t j, int64_t d,
                           const float *g, int64_t left)
{
    const float *v = cpu_vector(s->dense, s->sparse, s->feature_stride, j) + d;
#pragma GCC unroll 16
    for (int q = 0; q < rows * vectors; q++) {
        k_vec x = left ? k_load_part(v, left) : k_load(v + q % vectors * K_LANES);
        acc[q] = k_fma(k_set(g[q / vectors]), x, acc[q]);
    }
}

/** Gradients of vectors [i0, i0 + rows), columns from d on: `vectors` whole vectors, or, if left > 0, one of `left`
 *  lanes. */
K_ALWAYS void k_gradient_tile(k_vec *gradients, const int rows, const int vectors, const k_sample *s, int64_t i0,
                              int64_t d, int64_t left)
{
    float g[K_TILE_ROWS];
    const float
        *pairs[K_TILE_ROWS]; /* pairs[r][j]: upstream gradient of the product of vectors i0 + r and j > i0 + r */
    k_vec acc[K_TILE_ROWS * K_WIDE];
#pragma GCC unroll 16
    for (int q = 0; q < rows * vectors; q++) acc[q] = (k_vec){0};
    const float *side = s->pairs + i0 - 1; /* side[r]: that of vectors j and i0 + r, which lie side by side */
    for (int64_t j = 0; j < i0; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) g[r] = side[r];
        k_accumulate(acc, rows, vectors, s, j, d, g, left);
        side += s->features - j - 1;
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) pairs[r] = s->pairs + cpu_pairs_before(i0 + r, s->features) - (i0 + r) - 1;
    for (int j = 0; j < rows; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) g[r] = r == j ? 0 : r < j ? pairs[r][i0 + j] : pairs[j][i0 + r];
        k_accumulate(acc, rows, vectors, s, i0 + j, d, g, left);
    }
    for (int64_t j = i0 + rows; j <= s->features; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) g[r] = pairs[r][j];
        k_accumulate(acc, rows, vectors, s, j, d, g, left);
    }
#pragma GCC unroll 16
    for (int q = 0; q < rows * vectors; q++) gradients[q] = acc[q];
}

/** Gradients of vectors [i0, i0 + rows) of sample b. */
K_ALWAYS void k_gradient_rows(const peri_k_interaction_grad_args *a, const k_sample *s, int64_t b, int64_t i0,
                              const int rows)
{
    const float *dy = s->pairs - a->dim;
    for (int64_t d = 0; d < a->dim;) {
        k_vec acc[K_TILE_ROWS * K_WIDE];
        int64_t left = a->dim - d;
        int vectors = left >= K_WIDE * K_LANES ? K_WIDE : 1;
        int64_t part = left < K_LANES ? left : 0;
        if (vectors == K_WIDE) k_gradient_tile(acc, rows, K_WIDE, s, i0, d, 0);
        else if (!part) k_gradient_tile(acc, rows, 1, s, i0, d, 0);
        else k_gradient_tile(acc, rows, 1, s, i0, d, part);
        for (int r = 0; r < rows; r++) {
            int64_t i = i0 + r;
            float *out = i == 0 ? (a->ddense ? (float *)a->ddense + b * a->dim : NULL)
                                : (a->dsparse ? (float *)a->dsparse + (b * a->features + i - 1) * a->dim : NULL);
            for (int q = 0; out && q < vectors; q++) {
                int64_t at = d + q * K_LANES;
                k_vec g = acc[r * vectors + q];
                if (i == 0) g += part ? k_load_part(dy + at, part) : k_load(dy + at);
                if (part) k_store_part(out + at, g, part);
                else k_store(out + at, g);
            }
        }
        d += part ? part : vectors * K_LANES;
    }
}

static void cpu_interaction_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_interaction_grad_args *a = args;
    if (a->dtype != PERI_F32) {
        ref_interaction_grad(args, begin, end);
        return;
    }
    int64_t count = a->features + 1;
    for (int64_t b = begin; b < end; b++) {
        k_sample s = {.dense = (const float *)a->dense + b * a->dense_stride,
                      .sparse = (const float *)a->sparse + b * a->sparse_stride,
                      .pairs = (const float *)a->dy + b * a->dy_stride + a->dim,
                      .features = a->features,
                      .feature_stride = a->feature_stride};
        /* The last tile may overlap the one before: the same numbers are stored twice. */
        const int64_t last = count - K_TILE_ROWS;
        if (last < 0)
            for (int64_t i = 0; i < count; i++) k_gradient_rows(a, &s, b, i, 1);
        else
            for (int64_t i = 0; i < count; i += K_TILE_ROWS)
                k_gradient_rows(a, &s, b, i < last ? i : last, K_TILE_ROWS);
    }
}

#define K_CPU_INTERACTION [PERI_K_interaction] = cpu_interaction, [PERI_K_interaction_grad] = cpu_interaction_grad,
