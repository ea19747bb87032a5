/* SPDX-License-Identifier: Apache-2.0
 *
 * bags.c (cpu): see kernels/bags.h. Padding, scales and gradients are ref's, compiled here for the instruction set.
 */
#include "../ref/bags.c"

/** Columns [d, d + n) of a bag, n <= K_LANES. */
static inline __attribute__((always_inline)) void cpu_bag_max_columns(const peri_k_bag_max_args *a, int64_t b, int64_t first, int64_t past,
                                                                      int64_t d, int64_t n)
{
    const int64_t cols = a->bags.cols;
    k_vec most = k_set(0);
    k_ivec place = (k_ivec){0} - 1;
    for (int64_t i = first; i < past; i++) {
        int64_t id = ref_bag_int(a->bags.ids, i, a->bags.ids_dtype);
        if (id < 0 || id >= a->bags.rows) continue;
        const float *row = a->x + id * cols + d;
        k_vec x = n == K_LANES ? k_load(row) : k_load_part(row, n);
        k_ivec take = (place < 0) | ((most == most) & ~(x <= most));
        most = (k_vec)(((k_ivec)x & take) | ((k_ivec)most & ~take));
        place = (((k_ivec){0} + (int32_t)(i - first)) & take) | (place & ~take);
    }
    if (n == K_LANES) k_store(a->out + b * cols + d, most);
    else k_store_part(a->out + b * cols + d, most, n);
    memcpy(a->places + b * cols + d, &place, (size_t)n * sizeof *a->places);
}

static void cpu_bag_max(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bag_max_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t first, past = ref_bag_range(&a->bags, b, &first), d = 0;
        for (; d + K_LANES <= a->bags.cols; d += K_LANES) cpu_bag_max_columns(a, b, first, past, d, K_LANES);
        if (d < a->bags.cols) cpu_bag_max_columns(a, b, first, past, d, a->bags.cols - d);
    }
}

#define K_CPU_BAGS                                                                                                                    \
    [PERI_K_bag_pad] = ref_bag_pad, [PERI_K_bag_scale] = ref_bag_scale, [PERI_K_bag_max] = cpu_bag_max,                               \
    [PERI_K_bag_max_grad] = ref_bag_max_grad,
