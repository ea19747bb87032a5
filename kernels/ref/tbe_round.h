/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_round.h: weights of f16 and bf16 tables: reading them, and rounding them stochastically, by random bits that
 * depend on the seed, the table and the row. Scalar and normative.
 *
 * Random bits. Stochastic rounding wants 16 bits for every weight that is written, at the speed at which memory takes
 * the weights, so the generator is a counter-based hash, not Philox, which alone would take longer than the update of
 * the row. With c the column of the whole table, 32-bit arithmetic unless said otherwise:
 *   key   = mix64(mix64(mix64(seed ^ random_stream of the table) + iteration) + row of the whole table), in 64 bits;
 *           mix64 is the output function of SplitMix64 (Steele, Lea, Flood 2014)
 *   lane  = c / 32 * 16 + c % 16
 *   x     = low(key) + lane * 0x9e3779b9
 *   x    ^= x >> 16;  x *= 0x7feb352d;  x ^= (x >> 15) ^ high(key);  x *= 0x846ca68b;  x ^= x >> 16
 *           (constants: C. Wellons' lowbias32)
 *   bits  = the lowest bits of x where c / 16 % 2 == 0, else its highest: 16 for bf16, 13 for f16, as many as f32 has
 *           more of
 *
 * Rounding: a number between two neighbours a < b of the narrow type becomes b with probability (x - a) / (b - a); what
 * f16 holds as subnormal numbers only is rounded to multiples of 2^-37 first. A number that the narrow type holds stays
 * as it is. Finite numbers stay finite: beyond the largest they become the largest.
 */
#ifndef PERI_KERNELS_TBE_ROUND_H
#define PERI_KERNELS_TBE_ROUND_H

#include "../tbe.h"
#include "number.h"

K_INLINE uint64_t tbe_mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/** What the keys of table @t's rows have in common. */
K_INLINE uint64_t tbe_table_key(const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t)
{
    return tbe_mix64(tbe_mix64(o->seed ^ t->random_stream) + o->iteration);
}

/** The key of row @row of shard @t. */
K_INLINE uint64_t tbe_row_key(const peri_k_tbe_optimizer *o, const peri_k_tbe_table *t, int64_t row)
{
    return tbe_mix64(tbe_table_key(o, t) + (uint64_t)(t->row_offset + row));
}

/** The row of table @t of which slot @row of a cache holds a copy; of a table without a cache (no slot_row), @row. */
K_INLINE int64_t tbe_row_of_slot(const peri_k_tbe_rows *rows, const peri_k_tbe_table *t, int64_t row)
{
    return rows->slot_row ? rows->slot_row[t->first_row + row] : row;
}

enum { TBE_BITS_F16 = 13, TBE_BITS_BF16 = 16 };

/** The word x of a lane: its lowest bits are those of one column, its highest those of the column 16 behind. */
K_INLINE uint32_t tbe_random_word(uint64_t key, uint32_t lane)
{
    uint32_t x = (uint32_t)key + lane * 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0x846ca68bu;
    return x ^ x >> 16;
}

/** The lane of column @c of the whole table. */
K_INLINE uint32_t tbe_random_lane(int64_t c) { return (uint32_t)((uint64_t)c >> 5) * 16 + ((uint32_t)c & 15); }

K_INLINE uint32_t tbe_low_bits(uint32_t word, int32_t n) { return word & (((uint32_t)1 << n) - 1); }
K_INLINE uint32_t tbe_high_bits(uint32_t word, int32_t n) { return word >> (32 - n); }

/** @n random bits of column @c of the whole table. */
K_INLINE uint32_t tbe_random_bits(uint64_t key, int64_t c, int32_t n)
{
    const uint32_t word = tbe_random_word(key, tbe_random_lane(c));
    return c / 16 % 2 == 0 ? tbe_low_bits(word, n) : tbe_high_bits(word, n);
}

K_INLINE uint16_t tbe_round_bf16(float x, uint32_t bits)
{
    uint32_t u = k_bits(x), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
    if (size >= 0x7f800000u) return k_f32_to_bf16(x); /* infinity, NaN */
    if (size > 0x7f7f0000u) size = 0x7f7f0000u;
    return (uint16_t)(sign | (size + bits) >> 16);
}

K_INLINE uint16_t tbe_round_f16(float x, uint32_t bits)
{
    uint32_t u = k_bits(x), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
    if (size >= 0x7f800000u) return k_f32_to_f16(x);
    if (size > 0x477fe000u) size = 0x477fe000u; /* 65504 */
    /* Subnormal f16 are whole numbers of 2^-24, as are those from 2^-14 to 2^-13: moved there, and back. */
    bool small = size < 0x38800000u;
    if (small) size = k_bits(k_float(size) + 0x1p-14f);
    uint32_t h = (size - 0x38000000u + bits) >> 13;
    return (uint16_t)(sign | (small ? h - 0x400u : h));
}

/** Element @i of weights of @dtype. */
K_INLINE float tbe_weight(const void *weight, int64_t i, int32_t dtype)
{
    if (dtype == PERI_F32) return ((const float *)weight)[i];
    return dtype == PERI_F16 ? k_f16_to_f32(((const uint16_t *)weight)[i])
                             : k_bf16_to_f32(((const uint16_t *)weight)[i]);
}

#endif
