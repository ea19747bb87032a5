/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_mark.c: kernels/tbe.h: rows in a bitmap. Items name ascending rows, so the bits of a word come one after the other and are written
 * together. Other threads write to the first and the last word of a range at most: those are written atomically, the rest is not.
 */

/** Write the collected bits @mask to word @word, and list those that were 0. */
TBE_INLINE void tbe_mark_word(const peri_k_tbe_mark_args *a, uint64_t word, uint64_t mask, const bool shared)
{
    uint64_t old = __atomic_load_n(&a->bits[word], __ATOMIC_RELAXED), fresh;
    if (!(mask & ~old)) return;
    if (shared) old = __atomic_fetch_or(&a->bits[word], mask, __ATOMIC_RELAXED);
    else __atomic_store_n(&a->bits[word], old | mask, __ATOMIC_RELAXED);
    fresh = mask & ~old;
    if (!a->fresh || !fresh) return;
    int64_t at = __atomic_fetch_add(a->n_fresh, __builtin_popcountll(fresh), __ATOMIC_RELAXED);
    for (; fresh; fresh &= fresh - 1) a->fresh[at++] = (int64_t)(word * 64 + (uint64_t)__builtin_ctzll(fresh));
}

static void cpu_tbe_mark(const void *args, int64_t begin, int64_t end)
{
    enum { AHEAD = 32 }; /* items; a bitmap of some megabytes is read at random */
    const peri_k_tbe_mark_args *a = args;
    uint64_t word = UINT64_MAX, mask = 0;
    bool first = true;
    if (a->sorted) end = end < *a->n ? end : *a->n;
    for (int64_t i = begin; i < end; i++) {
        if (a->sorted && i + AHEAD < end) {
            const uint64_t ahead = a->sorted[i + AHEAD] >> a->payload_bits;
            if (ahead < (uint64_t)a->total_rows) __builtin_prefetch(&a->bits[ahead / 64], 1);
        }
        const uint64_t row = tbe_marked_row(a, i);
        if (row >= (uint64_t)a->total_rows) continue;
        if (row / 64 != word && mask) {
            tbe_mark_word(a, word, mask, first);
            first = false;
            mask = 0;
        }
        word = row / 64;
        mask |= (uint64_t)1 << row % 64;
    }
    if (mask) tbe_mark_word(a, word, mask, true);
}
