/* SPDX-License-Identifier: Apache-2.0
 *
 * io/features.h (L6): how what a file says of a feature becomes an id or a number of a batch.
 */
#ifndef PERI_IO_FEATURES_H
#define PERI_IO_FEATURES_H

#include "io_internal.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/** How raw ids become rows of a table. */
typedef struct peri__id_rule {
    int32_t mode;        /* PERI_IDS_* */
    bool shifted;        /* PERI_MISSING_ZERO: id 0 is kept for missing ones */
    uint64_t modulus;    /* rows that the others share; 0: ids stay as they are, any 64 bits */
    uint64_t reciprocal; /* floor((2^64 - 1) / modulus) */
} peri__id_rule;

static inline peri__id_rule peri__id_rule_of(int32_t mode, int32_t missing, int64_t table_rows)
{
    uint64_t modulus = (uint64_t)(table_rows - (missing == PERI_MISSING_ZERO));
    return (peri__id_rule){mode, missing == PERI_MISSING_ZERO, modulus, modulus ? UINT64_MAX / modulus : 0};
}

/** PERI_EINVAL, in the name of @function, unless the tables have rows enough and the modes exist. @most: the last of
 *  PERI_IDS_*. */
peri_status peri__ids_check(const char *function, int32_t ids, int32_t most, int32_t missing, const int64_t *table_rows,
                            int32_t n);

/** x mod n without a division: the quotient from the reciprocal (Barrett) is at most 2 too small. */
static inline uint64_t peri__modulo(uint64_t x, uint64_t n, uint64_t reciprocal)
{
    uint64_t quotient = (uint64_t)((__extension__(unsigned __int128) x * reciprocal) >> 64), rest = x - quotient * n;
    rest -= n & (0 - (uint64_t)(rest >= n)); /* no branch: it would be a coin toss */
    return rest - (n & (0 - (uint64_t)(rest >= n)));
}

/** The row of id @x, or -1: PERI_IDS_EXACT, and it is outside. Not for a rule whose ids stay as they are. */
static inline int64_t peri__id_place(const peri__id_rule *r, uint64_t x)
{
    if (r->mode == PERI_IDS_EXACT) return x < r->modulus ? (int64_t)x + r->shifted : -1;
    if (r->mode == PERI_IDS_HASH) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        x = __builtin_bswap64(x);
#endif
        x = XXH3_64bits(&x, sizeof x);
    }
    return (int64_t)peri__modulo(x, r->modulus, r->reciprocal) + r->shifted;
}

/** What becomes of a number x, as PERI_DENSE_* says. */
static inline float peri__dense_of(int32_t kind, double x)
{
    if (kind == PERI_DENSE_RAW) return (float)x;
    if (kind == PERI_DENSE_LOG) return x > 0 ? (float)log1p(x) : 0.0f;
    return x < 0 ? -(float)log1p(-x) : (float)log1p(x);
}

#endif
