/* SPDX-License-Identifier: Apache-2.0
 *
 * io/io_internal.h (L6): what the readers share.
 */
#ifndef PERI_IO_INTERNAL_H
#define PERI_IO_INTERNAL_H

#include "../base/base_internal.h"

#include <math.h>
#include <perilune/io.h>
#include <stdio.h>

enum { IO_MAX_FEATURES = 4096 };
#define IO_MAX_ROWS ((int64_t)1 << 31)
#define IO_MAX_IDS ((int64_t)1 << 40)

/** Make room for @rows rows; what the batch holds is lost. */
peri_status peri__batch_reserve_rows(peri_batch *batch, int64_t rows);

/** The file @path, new and empty, to be written; NULL with errno. No printed line gets into it (peri__fd_of_ours). */
FILE *peri__stream_new(const char *path);

/** Put ids into a batch of b->rows rows, whose room for them is there: @ids, row by row, of each row feature by
 *  feature, @lengths of them [rows, features]. @cursor: room for a number per row. */
void peri__batch_set_ids(peri_batch *b, const int64_t *ids, const int32_t *lengths, int64_t *cursor);

/** PERI_EINVAL, in the name of @function, unless @batch was made for these features. */
static inline peri_status peri__batch_check(const char *function, const peri_batch *batch, int32_t dense,
                                            int32_t sparse)
{
    if (batch->dense_features == dense && batch->sparse_features == sparse) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: the batch was made for %d dense and %d sparse features, wanted %d and %d",
                      function, batch->dense_features, batch->sparse_features, dense, sparse);
}

/** PERI_DENSE_LOG. */
static inline float peri__dense_log(int64_t x) { return x <= 0 ? 0.0f : (float)log1p((double)x); }

#endif
