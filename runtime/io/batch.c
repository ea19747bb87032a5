/* SPDX-License-Identifier: Apache-2.0
 *
 * batch.c: batches in host memory, and the number generator of the samplers.
 */
#include "internal.h"

peri_status peri_batch_new(int32_t dense_features, int32_t sparse_features, int64_t rows, int64_t ids, peri_batch **out)
{
    PERI_NEED(out);
    if (dense_features < 0 || dense_features > IO_MAX_FEATURES || sparse_features < 0 || sparse_features > IO_MAX_FEATURES)
        return peri__fail(PERI_EINVAL, "peri_batch_new: %d dense and %d sparse features, allowed: 0..%d", dense_features, sparse_features,
                          IO_MAX_FEATURES);
    if (rows < 0 || rows > IO_MAX_ROWS || ids < 0 || ids > IO_MAX_IDS)
        return peri__fail(PERI_EINVAL, "peri_batch_new: %lld rows and %lld ids, allowed: 0..2^31 and 0..2^40", (long long)rows,
                          (long long)ids);
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
    if (!batch) return;
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
    if (ids < 0 || ids > IO_MAX_IDS) return peri__fail(PERI_EINVAL, "peri_batch_reserve: %lld ids, allowed: 0..2^40", (long long)ids);
    if (batch->values && ids <= batch->value_capacity) return PERI_OK;
    PERI_TRY(grow((void **)&batch->values, ids, sizeof *batch->values));
    batch->value_capacity = ids;
    return PERI_OK;
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
