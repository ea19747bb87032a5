/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/retrieval.h: exact search for the items whose rows have the largest products with a query: the last step of
 * two-tower models.
 *
 * Threads: any; operands as tensor.h says.
 */
#ifndef PERILUNE_RETRIEVAL_H
#define PERILUNE_RETRIEVAL_H

#include <perilune/quantize.h>

/** The most items that are found for a query. */
enum { PERI_TOP_MOST = 2048 };

/** For each row of @queries [Q, D] the @k items with the largest products, the largest first, of equal ones the one
 *  with the smaller number first: @scores f32 [Q, k], @indices i64 [Q, k]. Nothing of size Q x N is made.
 *  @items: [N, D] of f32, f16 or bf16, or, with @format, u8 rows [N, bytes of a row] of codes, which count as what
 *  peri_quantize_restore makes of them. @queries: f32, f16, bf16. Both on one device. 1 <= k <= N, and k <=
 *  PERI_TOP_MOST; D >= 1.
 *  Products and sums are f32, in an order that depends on D (and the processor's vectors) alone, so a query's answer
 *  has the same bits beside any others. A product that is NaN counts as -infinity. No gradient. Does not wait for the
 *  device.
 *  Local. @scores, @indices new; untouched on failure. */
PERI_API peri_status peri_top_products(peri_tensor *queries, peri_tensor *items, const peri_row_format *format,
                                       int64_t k, peri_tensor **scores, peri_tensor **indices);

#endif
