/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_runs.c: sums of the gradients of a run of equal rows: see tbe_update.h.
 */
#include "../ref/tbe_sorted.h"
#include "tbe_update.h"

enum { TBE_GROUP = 256 };

/** Add columns [0, 16 * nv) (with tail > 0: 16 * (nv - 1) + tail) of an item's gradient row to acc, or begin with
 *  them. */
TBE_INLINE void tbe_sum_item(const peri_k_tbe_update_args *a, const float *row, float scale, v16 *acc, const int nv,
                             const int64_t tail, const bool begin)
{
    float most = a->optimizer.max_gradient;
    v16 factor = v16_set(scale), limit = v16_set(most);
    for (int v = 0; v < nv; v++) {
        v16 x = tail && v == nv - 1 ? v16_load_part(row + 16 * v, tail) : v16_load(row + 16 * v);
        if (most > 0) x = v16_clamp(x, limit);
        if (begin) acc[v] = a->items ? v16_mul(factor, x) : x;
        else acc[v] = a->items ? v16_fma(factor, x, acc[v]) : v16_add(acc[v], x);
    }
}

/** The sum over items [e, past) of those columns, from column c on, into g, which has room for whole sixteens: a load
 *  of what a masked store wrote waits until that is in the cache, and all that follows with it. */
TBE_INLINE void tbe_sum_panel(tbe_updater *u, int64_t e, int64_t past, int64_t c, float *g, const int nv,
                              const int64_t tail)
{
    float scale = 1;
    v16 acc[TBE_PANEL];
    g += c;
    for (int64_t from = e; from < past; from += TBE_GROUP) {
        int64_t stop = past - from > TBE_GROUP ? from + TBE_GROUP : past;
        if (c == 0) tbe_update_ahead(u);
        const float *row = tbe_gradient_row(u, from, &scale) + c;
        tbe_sum_item(u->a, row, scale, acc, nv, tail, true);
        for (int64_t i = from + 1; i < stop; i++) {
            if (c == 0) tbe_update_ahead(u);
            row = tbe_gradient_row(u, i, &scale) + c;
            tbe_sum_item(u->a, row, scale, acc, nv, tail, false);
        }
        for (int v = 0; v < nv; v++) {
            v16 x = from == e ? acc[v] : v16_add(v16_load(g + 16 * v), acc[v]);
            v16_store(g + 16 * v, x);
        }
    }
}

/** The exact sum of kernels/tbe.h; @room: four rows of f32, which hold two of f64. */
static void tbe_exact(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *g, float *room)
{
    double *largest = (double *)room, *sum = largest + (cols + 15) / 16 * 16;
    float scale = 1, most = u->a->optimizer.max_gradient > 0 ? u->a->optimizer.max_gradient : INFINITY;
    memset(largest, 0, sizeof *largest * (size_t)cols);
    memset(sum, 0, sizeof *sum * (size_t)cols);
    for (int64_t i = e; i < past; i++) {
        tbe_update_ahead(u);
        const float *row = tbe_gradient_row(u, i, &scale);
        for (int64_t d = 0; d < cols; d++) {
            double x = row[d] < -most ? -most : row[d] > most ? most : row[d], t = fabs(x * scale);
            largest[d] = t > largest[d] ? t : largest[d];
        }
    }
    for (int64_t d = 0; d < cols; d++) largest[d] = tbe_exact_big(largest[d], past - e);
    for (int64_t i = e; i < past; i++) {
        const float *row = tbe_gradient_row(u, i, &scale);
        for (int64_t d = 0; d < cols; d++) {
            double x = row[d] < -most ? -most : row[d] > most ? most : row[d];
            sum[d] += (x * scale + largest[d]) - largest[d];
        }
    }
    for (int64_t d = 0; d < cols; d++) g[d] = (float)sum[d];
}

void tbe_sum_items(tbe_updater *u, int64_t e, int64_t past, int64_t cols, float *room)
{
    if (u->a->optimizer.exact) {
        tbe_exact(u, e, past, cols, room, room + (cols + 15) / 16 * 16);
        return;
    }
    int64_t c = 0;
    enum { WIDE = TBE_PANEL > 8 ? 8 : TBE_PANEL };
    for (; c + 16 * WIDE <= cols; c += 16 * WIDE) tbe_sum_panel(u, e, past, c, room, WIDE, 0);
#define TBE_STEP(nv)                                                                                                   \
    if (WIDE > (nv) && c + 16 * (nv) <= cols) {                                                                        \
        tbe_sum_panel(u, e, past, c, room, (nv), 0);                                                                   \
        c += 16 * (nv);                                                                                                \
    }
    TBE_STEP(4)
    TBE_STEP(2) TBE_STEP(1)
#undef TBE_STEP
        if (c < cols) tbe_sum_panel(u, e, past, c, room, 1, cols - c);
}
