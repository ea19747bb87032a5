/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nearest.c: kernels/nearest.h: every set of kernels against ref, on small whole numbers, so that ties are many
 * and all sets must settle them alike, and on thirds of them, whose sums have to be rounded alike; and ref against a
 * search that looks for the best, then the next best, ...
 */
#include "jagged_cases.h"

#include <math.h>

/** @n small whole numbers of a dtype, now and then one that makes NaN or infinity of a product. */
static void *whole(int64_t n, int32_t dtype, bool odd)
{
    static const float odds[] = {INFINITY, -INFINITY, NAN};
    char *x = room(n * (dtype == PERI_F32 ? 4 : 2));
    for (int64_t i = 0; i < n; i++) {
        const float v = odd && draw(40) == 0 ? odds[draw(3)] : (float)((int)draw(7) - 3);
        uint32_t bits;
        memcpy(&bits, &v, 4);
        if (dtype == PERI_F32) ((float *)x)[i] = v;
        else if (dtype == PERI_BF16) ((uint16_t *)x)[i] = (uint16_t)(bits >> 16); /* small numbers need no more */
        else
            ((uint16_t *)x)[i] =
                v != v ? 0x7e00
                : v == 0
                    ? 0
                    : (uint16_t)((bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 0x3ff));
    }
    return x;
}

static float number_of(const peri_op_nearest *op, int64_t item, int64_t d)
{
    const char *row = (const char *)op->items + item * op->stride;
    float f;
    if (op->format.bits) {
        peri_k_rows_args one = op->format;
        float *x = room(4 * op->dim);
        one.bytes = (void *)(uintptr_t)row;
        one.x = x;
        one.dtype = PERI_F32;
        peri_kernels_ref.fn[PERI_K_rows_restore](&one, 0, 1);
        f = x[d];
        free(kept[--kept_count]);
        return f;
    }
    if (op->dtype == PERI_F32) return ((const float *)row)[d];
    const uint16_t h = ((const uint16_t *)row)[d];
    uint32_t bits = (uint32_t)h << 16;
    if (op->dtype == PERI_F16) {
        const float scaled = (float)(h & 0x3ff) / 1024 + 1;
        const int e = (h >> 10 & 31) - 15;
        f = (h & 0x7fff) == 0 ? 0 : (h & 0x7fff) == 0x7c00 ? INFINITY : (h & 0x7fff) > 0x7c00 ? NAN : ldexpf(scaled, e);
        return h & 0x8000 ? -f : f;
    }
    memcpy(&f, &bits, 4);
    return f;
}

/** What ref found is what a plain search finds. */
static void as_searched(const peri_op_nearest *op)
{
    float *all = room(4 * op->n_items);
    for (int64_t q = 0; q < op->n_queries; q++) {
        for (int64_t i = 0; i < op->n_items; i++) {
            all[i] = 0;
            for (int64_t d = 0; d < op->dim; d++)
                all[i] = fmaf(op->queries[q * op->dim + d], number_of(op, i, d), all[i]);
            if (all[i] != all[i]) all[i] = -INFINITY;
        }
        bool *taken = room(op->n_items);
        memset(taken, 0, (size_t)op->n_items);
        for (int64_t k = 0; k < op->k; k++) {
            int64_t best = -1;
            for (int64_t i = 0; i < op->n_items; i++)
                if (!taken[i] && (best < 0 || all[i] > all[best])) best = i;
            taken[best] = true;
            if (op->indices[q * op->k + k] != best || op->scores[q * op->k + k] != all[best])
                fail_msg("query %lld, place %lld: item %lld with %g, wanted %lld with %g", (long long)q, (long long)k,
                         (long long)op->indices[q * op->k + k], (double)op->scores[q * op->k + k], (long long)best,
                         (double)all[best]);
        }
    }
}

static void products(void **unused)
{
    (void)unused;
    static const int32_t kinds[] = {PERI_F32, PERI_F16, PERI_BF16};
    for (int variant = 0; variant < 90; variant++) {
        peri_k_nearest_args a = {.parts = 1 + (int64_t)draw(4)};
        peri_op_nearest *op = &a.op;
        op->dtype = kinds[draw(3)];
        op->dim = 1 + (int64_t)draw(variant % 5 == 0 ? 70 : 20);
        op->n_items = 1 + (int64_t)draw(variant % 4 == 0 ? 400 : 60);
        op->n_queries = variant == 7 ? 0 : 1 + (int64_t)draw(9);
        op->k = 1 + (int64_t)draw((uint64_t)op->n_items);
        float *queries = whole(op->n_queries * op->dim, PERI_F32, variant % 6 == 0);
        for (int64_t i = 0; i < op->n_queries * op->dim && variant % 2 == 1; i++) queries[i] /= 3;
        op->queries = queries;
        const int64_t gap = (int64_t)draw(3), size = op->dtype == PERI_F32 ? 4 : 2;
        op->stride = (op->dim + gap) * size;
        op->items = whole(op->n_items * (op->dim + gap), op->dtype, variant % 6 == 1);
        if (variant % 3 == 0) { /* codes 0 to 255, with a scale of 1 and a bias of -100 */
            uint8_t *rows = room(op->n_items * (op->dim + 8));
            const float pair[2] = {1, -100};
            for (int64_t i = 0; i < op->n_items; i++) {
                for (int64_t d = 0; d < op->dim; d++) rows[i * (op->dim + 8) + d] = (uint8_t)(97 + draw(7));
                memcpy(rows + i * (op->dim + 8) + op->dim, pair, 8);
            }
            op->items = rows;
            op->stride = op->dim + 8;
            op->format = (peri_k_rows_args){.cols = op->dim, .stride = op->stride, .scale_at = op->dim, .bits = 8};
        }
        const int64_t found = a.parts * op->n_queries * op->k, wanted = op->n_queries * op->k;
        a.part_scores = room(4 * found);
        a.part_indices = room(8 * found);
        a.rows = room(4 * a.parts * PERI_NEAREST_ROWS * op->dim);
        compare("parts", PERI_K_nearest_part, &a, a.parts,
                (output[]){OUTPUT(a.part_scores, 4 * found), OUTPUT(a.part_indices, 8 * found)}, 2);
        op->scores = room(4 * wanted);
        op->indices = room(8 * wanted);
        compare("merge", PERI_K_nearest_merge, &a, op->n_queries,
                (output[]){OUTPUT(op->scores, 4 * wanted), OUTPUT(op->indices, 8 * wanted)}, 2);
        as_searched(op);
        drop_all(NULL);
    }
}

int main(void)
{
    seed(NULL);
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(products, drop_all)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
