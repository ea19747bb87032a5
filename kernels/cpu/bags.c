/* SPDX-License-Identifier: Apache-2.0
 *
 * bags.c (cpu): see kernels/bags.h. Padding, scales and gradients are ref's, compiled here for the instruction set.
 */

enum { CPU_BAG_PANEL = 4, CPU_BAG_LINE = 64 }; /* vectors; bytes of a line */

/** Ask for the row of id @i, if there is one. Inlined by force: a function that only prefetches is one that GCC thinks
 *  it may leave out. */
static inline __attribute__((always_inline)) void cpu_bag_ask(const peri_k_bag_max_args *a, int64_t i)
{
    if (i >= a->bags.n_ids) return;
    int64_t id = ref_bag_int(a->bags.ids, i, a->bags.ids_dtype);
    if (id < 0 || id >= a->bags.rows) return;
    const char *row = (const char *)(a->x + id * a->bags.cols);
    for (int64_t at = 0; at < 4 * a->bags.cols; at += CPU_BAG_LINE)
        if (a->reach.near) _mm_prefetch(row + at, _MM_HINT_T0);
        else _mm_prefetch(row + at, _MM_HINT_T1);
}

/** Columns [d, d + (vectors - 1) * K_LANES + tail) of a bag. @ahead: rows to ask for ahead; 0: none. */
static inline __attribute__((always_inline)) void cpu_bag_max_panel(const peri_k_bag_max_args *a, int64_t b,
                                                                    int64_t first, int64_t past, int64_t d,
                                                                    const int vectors, int64_t tail, int64_t ahead)
{
    const int64_t at = b * a->bags.cols + d;
    k_vec most[CPU_BAG_PANEL];
    k_ivec place[CPU_BAG_PANEL];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) most[v] = k_set(0), place[v] = (k_ivec){0} - 1;
    for (int64_t i = first; i < past; i++) {
        int64_t id = ref_bag_int(a->bags.ids, i, a->bags.ids_dtype);
        if (ahead) cpu_bag_ask(a, i + ahead);
        if (id < 0 || id >= a->bags.rows) continue;
        const float *row = a->x + id * a->bags.cols + d;
        const k_ivec here = (k_ivec){0} + (int32_t)(i - first);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            k_vec x =
                v < vectors - 1 || tail == K_LANES ? k_load(row + v * K_LANES) : k_load_part(row + v * K_LANES, tail);
            k_ivec take = (place[v] < 0) | ((most[v] == most[v]) & ~(x <= most[v]));
            most[v] = (k_vec)(((k_ivec)x & take) | ((k_ivec)most[v] & ~take));
            place[v] = (here & take) | (place[v] & ~take);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        int64_t n = v < vectors - 1 ? K_LANES : tail;
        if (n == K_LANES) k_store(a->out + at + v * K_LANES, most[v]);
        else k_store_part(a->out + at + v * K_LANES, most[v], n);
        memcpy(a->places + at + v * K_LANES, &place[v], (size_t)n * sizeof *a->places);
    }
}

static void cpu_bag_max(const void *args, int64_t begin, int64_t end)
{
    enum { PANEL = CPU_BAG_PANEL * K_LANES };
    const peri_k_bag_max_args *a = args;
    const int64_t cols = a->bags.cols,
                  ahead = a->reach.ahead > 0 ? 1 + a->reach.ahead / (4 * cols + 4 * CPU_BAG_LINE) : 0;
    for (int64_t b = begin; b < end; b++) {
        int64_t first, past = ref_bag_range(&a->bags, b, &first), d = 0;
        for (; d + PANEL <= cols; d += PANEL)
            cpu_bag_max_panel(a, b, first, past, d, CPU_BAG_PANEL, K_LANES, d ? 0 : ahead);
        for (; d < cols; d += K_LANES)
            cpu_bag_max_panel(a, b, first, past, d, 1, cols - d < K_LANES ? cols - d : K_LANES, d ? 0 : ahead);
    }
}

#define K_CPU_BAGS                                                                                                     \
    [PERI_K_bag_pad] = ref_bag_pad, [PERI_K_bag_scale] = ref_bag_scale, [PERI_K_bag_max] = cpu_bag_max,                \
    [PERI_K_bag_max_grad] = ref_bag_max_grad,
