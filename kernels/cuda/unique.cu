/* SPDX-License-Identifier: Apache-2.0
 *
 * unique.cu: the sorting operations of kernels/sparse.h: lists of equal numbers, unique ids. One sort of the device
 * each (cub.cuh).
 */
#include "cub.cuh"
#include "cuda.h"

#include "../sparse.h"

namespace {

/** Bits that hold every number of [0, n]. */
int bits_of(uint64_t n)
{
    int bits = 1;
    while (bits < 64 && n >> bits) bits++;
    return bits;
}

/** keys[i] = x[i] - least, places[i] = i. */
struct fill_keys {
    const void *x;
    uint64_t *keys;
    int64_t *places, least;
    int32_t dtype;
    __device__ void operator()(int64_t i) const
    {
        keys[i] = (uint64_t)peri_index(x, i, dtype) - (uint64_t)least;
        places[i] = i;
    }
};

/* -- lists --------------------------------------------------------------------------------------------------------- */

/** offsets[l] = the first i with keys[i] >= l. */
struct cut_lists {
    const uint64_t *keys;
    int64_t *offsets, n;
    __device__ void operator()(int64_t l) const
    {
        int64_t low = -1, high = n; /* keys[low] < l <= keys[high] */
        while (high - low > 1) {
            int64_t middle = low + (high - low) / 2;
            if (keys[middle] < (uint64_t)l) low = middle;
            else high = middle;
        }
        offsets[l] = high;
    }
};

/* -- unique ids ---------------------------------------------------------------------------------------------------- */

struct mark_first {
    const uint64_t *keys;
    int64_t *ranks;
    __device__ void operator()(int64_t i) const { ranks[i] = i == 0 || keys[i] != keys[i - 1]; }
};

struct write_unique {
    peri_op_unique a;
    const uint64_t *keys;
    const int64_t *places, *ranks;
    int64_t *starts; /* n + 1 */
    __device__ void operator()(int64_t i) const
    {
        int64_t u = ranks[i] - 1;
        if (i == 0 || ranks[i - 1] == u) {
            peri_set_index(a.unique, u, a.dtype, (int64_t)(keys[i] + (uint64_t)a.least));
            starts[u] = i;
        }
        if (a.inverse) a.inverse[places[i]] = u;
        if (i < a.n - 1) return;
        starts[u + 1] = a.n;
        *a.total = u + 1;
    }
};

struct count_unique {
    const int64_t *starts, *total;
    int64_t *counts;
    __device__ void operator()(int64_t u) const
    {
        if (u < *total) counts[u] = starts[u + 1] - starts[u];
    }
};

size_t sum_bytes(int64_t n)
{
    size_t bytes = 0;
    const int64_t *x = NULL;
    (void)peri_inclusive_sum(NULL, bytes, x, (int64_t *)NULL, n, 0);
    return bytes;
}

} // namespace

/** Keys, sorted keys, places; then CUB's. */
PERI_CUDA_SCRATCH(lists) { return 3 * peri_part(8 * a->n) + peri_part((int64_t)peri_sort_bytes(a->n)); }

PERI_CUDA_OP(lists)
{
    char *at = c->scratch;
    int64_t part = peri_part(8 * a->n);
    uint64_t *keys = (uint64_t *)at, *sorted = (uint64_t *)(at + part);
    int64_t *places = (int64_t *)(at + 2 * part);
    size_t bytes = (size_t)(c->bytes - 3 * part);
    if (a->n > 0) {
        PERI_CUDA_TRY(each(0, a->n, c, fill_keys{a->x, keys, places, 0, a->dtype}));
        PERI_CUDA_TRY(peri_sort_pairs(at + 3 * part, bytes, (const uint64_t *)keys, sorted, (const int64_t *)places,
                                      a->list, a->n, 0, bits_of((uint64_t)a->lists), c->stream));
    }
    return each(0, a->lists + 1, c, cut_lists{sorted, a->offsets, a->n});
}

/** Keys (then ranks), sorted keys, places (then starts), sorted places; then CUB's. */
PERI_CUDA_SCRATCH(unique)
{
    size_t sort = peri_sort_bytes(a->n), sum = sum_bytes(a->n);
    return 4 * peri_part(8 * (a->n + 1)) + peri_part((int64_t)(sort > sum ? sort : sum));
}

PERI_CUDA_OP(unique)
{
    char *at = c->scratch;
    int64_t part = peri_part(8 * (a->n + 1)), *ranks = (int64_t *)at, *places = (int64_t *)(at + 2 * part),
            *moved = (int64_t *)(at + 3 * part);
    uint64_t *keys = (uint64_t *)at, *sorted = (uint64_t *)(at + part);
    int64_t *starts = places;
    size_t bytes = (size_t)(c->bytes - 4 * part);
    int bits = bits_of((uint64_t)a->most - (uint64_t)a->least);
    PERI_CUDA_TRY(each(0, a->n, c, fill_keys{a->x, keys, places, a->least, a->dtype}));
    PERI_CUDA_TRY(peri_sort_pairs(at + 4 * part, bytes, (const uint64_t *)keys, sorted, (const int64_t *)places, moved,
                                  a->n, 0, bits, c->stream));
    PERI_CUDA_TRY(each(0, a->n, c, mark_first{sorted, ranks}));
    PERI_CUDA_TRY(peri_inclusive_sum(at + 4 * part, bytes, (const int64_t *)ranks, ranks, a->n, c->stream));
    PERI_CUDA_TRY(each(0, a->n, c, write_unique{*a, sorted, moved, ranks, starts}));
    return a->counts ? each(0, a->n, c, count_unique{starts, a->total, a->counts}) : cudaSuccess;
}
