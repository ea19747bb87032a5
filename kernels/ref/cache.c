/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c (ref): see kernels/cache.h.
 */

static void ref_cache_move(const peri_k_cache_args *a, int64_t begin, int64_t end, bool fill)
{
    for (int64_t i = begin; i < end; i++) {
        const peri_k_cache_move *m = &a->moves[i];
        const peri_k_tbe_table *t = &a->tables[m->table];
        if (fill && a->slot_row) a->slot_row[t->first_row + m->slot] = m->row;
        char *at = a->records + m->record + PERI_CACHE_RECORD_HEAD;
        for (int32_t p = 0; p < a->n_parts; p++) {
            const peri_k_cache_part *part = &a->part[p];
            int64_t first = part->row ? t->first_row + m->slot : t->offset + m->slot * t->stride;
            size_t bytes = (size_t)(part->row ? 1 : t->cols) * (size_t)part->bytes;
            char *slot = part->base + first * part->bytes;
            memcpy(fill ? slot : at, fill ? at : slot, bytes);
            at += bytes;
        }
    }
}

static void ref_cache_fill(const void *args, int64_t begin, int64_t end) { ref_cache_move(args, begin, end, true); }
static void ref_cache_spill(const void *args, int64_t begin, int64_t end) { ref_cache_move(args, begin, end, false); }
