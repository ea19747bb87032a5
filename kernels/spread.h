/* SPDX-License-Identifier: Apache-2.0
 *
 * spread.h: which bucket of a managed-collision table an id belongs to. The rule depends on the id and on the table's number of buckets
 * only, never on ranks: the kernels that route ids to ranks and those that map them to rows share it.
 */
#ifndef PERI_KERNELS_SPREAD_H
#define PERI_KERNELS_SPREAD_H

#include <stdint.h>

/** How ids are spread over buckets: runtime/include/perilune/collision.h has the same numbers (PERI_SPREAD_*). */
enum { PERI_K_SPREAD_HASH = 0, PERI_K_SPREAD_MODULO = 1, PERI_K_SPREAD_RANGE = 2 };

/** The finalizer of MurmurHash3: every bit of the result depends on every bit of @x; one to one. */
static inline uint64_t peri_k_mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

/** The high 64 bits of a * b. */
static inline uint64_t peri_k_high(uint64_t a, uint64_t b) { return (uint64_t)(((unsigned __int128)a * b) >> 64); }

/** The bucket of @id, in [0, buckets); -1: the id is not legal (RANGE: negative, or beyond the last bucket).
 *  @block: ids of a bucket (RANGE only: ceil(input_hash_size / buckets), >= 1). @buckets >= 1.
 *    HASH    high 64 bits of mix(id) * buckets: even, whatever the pattern of ids
 *    MODULO  id mod buckets, never negative
 *    RANGE   id / block */
static inline int64_t peri_k_bucket(int64_t id, int32_t spread, int64_t buckets, int64_t block)
{
    if (spread == PERI_K_SPREAD_HASH) return (int64_t)peri_k_high(peri_k_mix((uint64_t)id), (uint64_t)buckets);
    if (spread == PERI_K_SPREAD_MODULO) {
        int64_t rest = id % buckets;
        return rest < 0 ? rest + buckets : rest;
    }
    int64_t bucket = id / block;
    return id < 0 || bucket >= buckets ? -1 : bucket;
}

#endif
