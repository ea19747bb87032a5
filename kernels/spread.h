/* SPDX-License-Identifier: Apache-2.0
 *
 * spread.h: which bucket of a managed-collision table an id belongs to. The rule depends on the id and on the table's
 * number of buckets only, never on ranks: the kernels that route ids to ranks and those that map them to rows share it.
 */
#ifndef PERI_KERNELS_SPREAD_H
#define PERI_KERNELS_SPREAD_H

#include "inline.h"

#include <stdint.h>

/** How ids are spread over buckets: runtime/include/perilune/collision.h has the same numbers (PERI_SPREAD_*). */
enum { PERI_K_SPREAD_HASH = 0, PERI_K_SPREAD_MODULO = 1, PERI_K_SPREAD_RANGE = 2 };

/** The finalizer of MurmurHash3: every bit of the result depends on every bit of @x; one to one. */
K_INLINE uint64_t peri_k_mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

/** The high 64 bits of a * b. */
K_INLINE uint64_t peri_k_high(uint64_t a, uint64_t b) { return (uint64_t)(((unsigned __int128)a * b) >> 64); }

K_INLINE uint64_t peri_k_rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

/** Both halves xored of MurmurHash3 (x64, 128 bits) of the 16 bytes @x, @y under @seed. */
K_INLINE uint64_t peri_k_murmur(uint64_t x, uint64_t y, uint64_t seed)
{
    const uint64_t c1 = 0x87c37b91114253d5u, c2 = 0x4cf5ad432745937fu;
    uint64_t low = seed, high = seed;
    low ^= peri_k_rotate(x * c1, 31) * c2;
    low = (peri_k_rotate(low, 27) + high) * 5 + 0x52dce729u;
    high ^= peri_k_rotate(y * c2, 33) * c1;
    high = (peri_k_rotate(high, 31) + low) * 5 + 0x38495ab5u;
    low ^= 16; /* bytes hashed */
    high ^= 16;
    low += high;
    high += low;
    low = peri_k_mix(low);
    high = peri_k_mix(high);
    low += high;
    high += low;
    return low ^ high;
}

/** @x mod @d, given (2^64 - 1) / d: the quotient is short by 2 at most. */
K_INLINE uint64_t peri_k_rest(uint64_t x, uint64_t d, uint64_t reciprocal)
{
    uint64_t rest = x - peri_k_high(x, reciprocal) * d;
    rest = rest >= d ? rest - d : rest;
    return rest >= d ? rest - d : rest;
}

/** The bucket of @id, in [0, buckets); -1: the id is not legal (RANGE: negative, or beyond the last bucket).
 *  @block: ids of a bucket (RANGE only: ceil(input_hash_size / buckets), >= 1). @buckets >= 1.
 *    HASH    high 64 bits of mix(id) * buckets: even, whatever the pattern of ids
 *    MODULO  id mod buckets, never negative
 *    RANGE   id / block */
K_INLINE int64_t peri_k_bucket(int64_t id, int32_t spread, int64_t buckets, int64_t block)
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
