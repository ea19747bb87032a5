/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_mark.c: kernels/tbe.h: rows in a bitmap. Items name ascending rows, so the bits of a word come one after the
 * other and are written together. Other threads write to the first and the last word of a range at most: those are
 * written atomically, the rest is not.
 */
#include "../ref/tbe_sorted.h"

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

/** Rows by their words: those of a word follow each other. */
typedef struct tbe_marking {
    const peri_k_tbe_mark_args *a;
    uint64_t word, mask;
    bool first; /* no word has been written yet */
} tbe_marking;

TBE_INLINE void tbe_mark_row(tbe_marking *m, uint64_t row)
{
    if (row / 64 != m->word) {
        if (m->mask) {
            tbe_mark_word(m->a, m->word, m->mask, m->first);
            m->first = false;
        }
        m->word = row / 64;
        m->mask = 0;
    }
    m->mask |= (uint64_t)1 << row % 64;
}

/** An item of [begin, end] in front of which none names a row of @row or above. Items that name no row may stand behind
 *  those of any table, so it need not be the last such item. */
TBE_INLINE int64_t tbe_mark_from(const peri_k_tbe_mark_args *a, int64_t begin, int64_t end, uint64_t row)
{
    while (begin < end) {
        const int64_t middle = begin + (end - begin) / 2;
        if (a->sorted[middle] >> a->payload_bits < row) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

/** Items of a batch. Beside a save most of their bits are set, and each step pays for looking: items are looked at in
 *  groups, without a branch, which has many loads under way, and a group of which no bit is missing is done then. A row
 *  that comes again sets its bit again, which costs less than to find out. */
static void tbe_mark_sorted(const peri_k_tbe_mark_args *a, int64_t begin, int64_t end)
{
    enum { GROUP = 16, AHEAD = 96 }; /* items; a large bitmap is read at random */
    tbe_marking m = {.a = a, .word = UINT64_MAX, .first = true};
    const uint64_t *sorted = a->sorted, first = (uint64_t)a->first, rows = (uint64_t)(a->total_rows - a->first);
    const int32_t bits = a->payload_bits;
    for (int64_t i = tbe_mark_from(a, begin, end, first), past; i < end; i = past) {
        uint64_t missing = 0;
        past = i + GROUP < end ? i + GROUP : end;
        for (int64_t k = i + AHEAD; k < past + AHEAD && k < end; k++)
            __builtin_prefetch(&a->bits[sorted[k] >> bits >> 6]);
        for (int64_t k = i; k < past; k++) {
            const uint64_t row = sorted[k] >> bits, wanted = row - first < rows, word = row / 64 & -wanted;
            missing |= ~__atomic_load_n(&a->bits[word], __ATOMIC_RELAXED) >> row % 64 & wanted;
        }
        for (int64_t k = i; missing && k < past; k++)
            if ((sorted[k] >> bits) - first < rows) tbe_mark_row(&m, sorted[k] >> bits);
    }
    if (m.mask) tbe_mark_word(a, m.word, m.mask, true);
}

static void cpu_tbe_mark(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_mark_args *a = args;
    if (a->sorted) {
        tbe_mark_sorted(a, begin, end < *a->n ? end : *a->n);
        return;
    }
    tbe_marking m = {.a = a, .word = UINT64_MAX, .first = true};
    for (int64_t i = begin; i < end; i++) {
        const uint64_t row = tbe_marked_row(a, i);
        if (row < (uint64_t)a->total_rows) tbe_mark_row(&m, row);
    }
    if (m.mask) tbe_mark_word(a, m.word, m.mask, true);
}
