/* SPDX-License-Identifier: Apache-2.0
 *
 * product.c (cpu): products whose sums have one order. A tile of y, some rows by some panels, is kept in registers
 * while k runs: a vector of each panel is loaded once and multiplied by one number of each row. Few rows take many
 * panels at a time, since an fma has to wait for the one before it in its own sum.
 */

enum { K_PANEL_VECTORS = PERI_PANEL / K_LANES, K_TILE_MOST_ROWS = 6 };

/** f(s + bias) of the columns from @c on, stored at @y. */
static inline void k_panel_end(const peri_k_panel_product_args *a, float *y, int64_t c, k_vec s)
{
    const int64_t left = a->cols - c;
    const bool part = left < K_LANES;
    if (left <= 0) return;
    if (a->bias) s += part ? k_load_part(a->bias + c, left) : k_load(a->bias + c);
    switch (a->act) {
    case PERI_UNARY_RELU: s = k_max(k_set(0), s); break;
    case PERI_UNARY_SIGMOID: s = k_sigmoid(s); break;
    case PERI_UNARY_TANH: s = k_tanh(s); break;
    default: break;
    }
    if (part) k_store_part(y + c, s, left);
    else k_store(y + c, s);
}

/** A vector of a panel. */
static inline __attribute__((always_inline)) k_vec k_panel_load(const char *panel, int64_t at, const int32_t dtype)
{
    if (dtype == PERI_I8) return k_load_i8((const int8_t *)panel + at);
    return dtype == PERI_F32 ? k_load((const float *)(const void *)panel + at)
                             : k_load_bf16((const uint16_t *)(const void *)panel + at);
}

/** Rows [row, row + rows) times panels [panel, panel + n). @rows, @n and @dtype are constants where this is called. */
static inline __attribute__((always_inline)) void k_panel_tile(const peri_k_panel_product_args *a, int64_t row,
                                                               int rows, int64_t panel, int n, const int32_t dtype)
{
    const int64_t step = peri_panel_bytes(PERI_PANEL, a->inner, dtype);
    const char *w = (const char *)a->panels + panel * step;
    const float *x = a->x + row * a->x_stride;
    k_vec s[K_TILE_MOST_ROWS][8 * K_PANEL_VECTORS];
    const int vectors = n * K_PANEL_VECTORS;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) s[r][v] = k_set(0);
    for (int64_t k = 0; k < a->inner; k++) {
        k_vec column[8 * K_PANEL_VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++)
            column[v] =
                k_panel_load(w + v / K_PANEL_VECTORS * step, k * PERI_PANEL + v % K_PANEL_VECTORS * K_LANES, dtype);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const k_vec number = k_set(x[r * a->x_stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < vectors; v++) s[r][v] = k_fma(number, column[v], s[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            const char *scales = w + v / K_PANEL_VECTORS * step + PERI_PANEL * a->inner;
            if (dtype == PERI_I8)
                s[r][v] *= k_load((const float *)(const void *)scales + v % K_PANEL_VECTORS * K_LANES);
            k_panel_end(a, a->y + (row + r) * a->y_stride, panel * PERI_PANEL + v * K_LANES, s[r][v]);
        }
}

/** All rows times panels [panel, panel + n), @most rows at a time. */
static inline __attribute__((always_inline)) void k_panel_rows(const peri_k_panel_product_args *a, int64_t begin,
                                                               int64_t end, int most, int64_t panel, int n,
                                                               const int32_t dtype)
{
    int64_t row = begin;
    for (; row + most <= end; row += most) k_panel_tile(a, row, most, panel, n, dtype);
    switch (end - row) {
    case 1: k_panel_tile(a, row, 1, panel, n, dtype); break;
    case 2: k_panel_tile(a, row, 2, panel, n, dtype); break;
    case 3: k_panel_tile(a, row, 3, panel, n, dtype); break;
    case 4: k_panel_tile(a, row, 4, panel, n, dtype); break;
    case 5: k_panel_tile(a, row, 5, panel, n, dtype); break;
    default: break;
    }
}

/** Panels of a tile of K_TILE_MOST_ROWS rows, and of one row: as many as there are registers for. */
enum { K_PANELS = K_LANES == 16 ? 4 : 1, K_PANELS_OF_ONE = K_LANES == 16 ? 8 : 4 };

static inline __attribute__((always_inline)) void k_panel_product(const peri_k_panel_product_args *a, int64_t begin,
                                                                  int64_t end, const int32_t dtype)
{
    const int64_t panels = (a->cols + PERI_PANEL - 1) / PERI_PANEL;
    int64_t panel = 0;
    if (end - begin == 1)
        for (; panel + K_PANELS_OF_ONE <= panels; panel += K_PANELS_OF_ONE)
            k_panel_tile(a, begin, 1, panel, K_PANELS_OF_ONE, dtype);
    for (; panel + K_PANELS <= panels; panel += K_PANELS)
        k_panel_rows(a, begin, end, K_TILE_MOST_ROWS, panel, K_PANELS, dtype);
    for (; panel < panels; panel++) k_panel_rows(a, begin, end, K_TILE_MOST_ROWS, panel, 1, dtype);
}

static void cpu_panel_product(const void *args, int64_t begin, int64_t end)
{
    const peri_k_panel_product_args *a = args;
    if (a->dtype == PERI_BF16) k_panel_product(a, begin, end, PERI_BF16);
    else if (a->dtype == PERI_I8) k_panel_product(a, begin, end, PERI_I8);
    else k_panel_product(a, begin, end, PERI_F32);
}
