/* SPDX-License-Identifier: Apache-2.0
 *
 * host_batch.c: batches in host memory, and the number generator of the samplers.
 */
#include "features.h"

peri_status peri_batch_new(int32_t dense_features, int32_t sparse_features, int64_t rows, int64_t ids, peri_batch **out)
{
    PERI_NEED(out);
    if (dense_features < 0 || dense_features > IO_MAX_FEATURES || sparse_features < 0 ||
        sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "peri_batch_new: %d dense and %d sparse features, allowed: 0..%d",
                          dense_features, sparse_features, IO_MAX_FEATURES);
    if (rows < 0 || rows > IO_MAX_ROWS || ids < 0 || ids > IO_MAX_IDS)
        return peri__fail(PERI_EINVAL, "peri_batch_new: %lld rows and %lld ids, allowed: 0..2^31 and 0..2^40",
                          (long long)rows, (long long)ids);
    peri_batch *batch = peri__alloc_zero(sizeof *batch);
    if (!batch) return PERI_ENOMEM;
    peri__object_count(1);
    batch->dense_features = dense_features;
    batch->sparse_features = sparse_features;
    peri_status status = peri__batch_reserve_rows(batch, rows);
    if (status >= 0) status = peri_batch_reserve(batch, ids);
    if (status < 0) peri_batch_release(batch);
    else *out = batch;
    return status;
}

void peri_batch_release(peri_batch *batch)
{
    if (!batch || peri__border_refuses(__func__)) return;
    peri__free(batch->dense);
    peri__free(batch->labels);
    peri__free(batch->values);
    peri__free(batch->lengths);
    peri__object_count(-1);
    peri__free(batch);
}

/** Grow one array of a batch; it has at least one element. */
static peri_status grow(void **array, int64_t count, size_t element)
{
    void *p = peri__realloc(*array, (size_t)peri__max(count, 1) * element);
    if (!p) return PERI_ENOMEM;
    *array = p;
    return PERI_OK;
}

peri_status peri__batch_reserve_rows(peri_batch *batch, int64_t rows)
{
    if (batch->labels && rows <= batch->row_capacity) return PERI_OK;
    PERI_TRY(grow((void **)&batch->dense, rows * batch->dense_features, sizeof *batch->dense));
    PERI_TRY(grow((void **)&batch->lengths, rows * batch->sparse_features, sizeof *batch->lengths));
    PERI_TRY(grow((void **)&batch->labels, rows, sizeof *batch->labels));
    batch->row_capacity = rows;
    return PERI_OK;
}

peri_status peri_batch_reserve(peri_batch *batch, int64_t ids)
{
    PERI_NEED(batch);
    if (ids < 0 || ids > IO_MAX_IDS)
        return peri__fail(PERI_EINVAL, "peri_batch_reserve: %lld ids, allowed: 0..2^40", (long long)ids);
    if (batch->values && ids <= batch->value_capacity) return PERI_OK;
    PERI_TRY(grow((void **)&batch->values, ids, sizeof *batch->values));
    batch->value_capacity = ids;
    return PERI_OK;
}

void peri__batch_set_ids(peri_batch *b, const int64_t *ids, const int32_t *lengths, int64_t *cursor)
{
    int64_t features = b->sparse_features, n = 0;
    for (int64_t row = 0; row < b->rows; row++) {
        cursor[row] = n;
        for (int64_t f = 0; f < features; f++) n += lengths[row * features + f];
    }
    b->ids = n;
    n = 0;
    for (int64_t f = 0; f < features; f++) {
        for (int64_t row = 0; row < b->rows; row++) {
            int32_t length = lengths[row * features + f];
            const int64_t *from = ids + cursor[row];
            b->lengths[f * b->rows + row] = length;
            for (int32_t k = 0; k < length; k++) b->values[n + k] = from[k];
            cursor[row] += length;
            n += length;
        }
    }
}

void peri_batch_share(int64_t rows, int32_t rank, int32_t world, int64_t *begin, int64_t *end)
{
    if (begin) *begin = world > 0 ? rows * rank / world : 0;
    if (end) *end = world > 0 ? rows * (rank + 1) / world : 0;
}

double peri_random_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    /* peri__hash_mix joins its arguments by xor: the seed is hashed first, or seed and stream could change places. */
    return (double)(peri__hash_mix(peri__hash_mix(peri__hash_mix(seed, 0), stream), index) >> 11) * 0x1p-53;
}

peri_status peri__ids_check(const char *function, int32_t ids, int32_t most, int32_t missing, const int64_t *table_rows,
                            int32_t n)
{
    static const char *const names[] = {"PERI_IDS_HASH", ", PERI_IDS_MOD", ", PERI_IDS_EXACT", ", PERI_IDS_TEXT"};
    if (ids < PERI_IDS_HASH || ids > most)
        return peri__fail(PERI_EINVAL, "%s: ids = %d, allowed: %s%s%s%s", function, ids, names[0], names[1],
                          most > PERI_IDS_MOD ? names[2] : "", most > PERI_IDS_EXACT ? names[3] : "");
    if (missing != PERI_MISSING_EMPTY && missing != PERI_MISSING_ZERO)
        return peri__fail(PERI_EINVAL, "%s: missing = %d, allowed: PERI_MISSING_EMPTY, PERI_MISSING_ZERO", function,
                          missing);
    PERI_TRY(peri__list_check(function, "table_rows", table_rows, n));
    int64_t least = missing == PERI_MISSING_ZERO ? 2 : ids == PERI_IDS_EXACT ? 0 : 1;
    for (int32_t i = 0; i < n; i++)
        if (table_rows[i] < least)
            return peri__fail(PERI_EINVAL, "%s: the table of category %d has %lld rows, allowed: %lld or more",
                              function, i + 1, (long long)table_rows[i], (long long)least);
    return PERI_OK;
}
