/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.cu: kernels/cache.h. A warp a row: its parts lie one after the other in the record, at any alignment.
 */
#include "cuda.h"
#include "rows.cuh"

#include "../cache.h"
#include "../tbe.h"

namespace {

struct move_row {
    peri_k_cache_args a;
    bool fill;
    __device__ void operator()(int64_t i, int lane, unsigned) const
    {
        const peri_k_cache_move m = a.moves[i];
        const peri_k_tbe_table *t = &a.tables[m.table];
        if (fill && a.slot_row && lane == 0) a.slot_row[t->first_row + m.slot] = m.row;
        char *at = a.records + m.record + PERI_CACHE_RECORD_HEAD;
        for (int32_t p = 0; p < a.n_parts; p++) {
            const peri_k_cache_part part = a.part[p];
            int64_t first = part.row ? t->first_row + m.slot : t->offset + m.slot * t->stride;
            int64_t bytes = (part.row ? 1 : t->cols) * part.bytes;
            char *slot = part.base + first * part.bytes, *dst = fill ? slot : at;
            const char *src = fill ? at : slot;
            uintptr_t bits = (uintptr_t)dst | (uintptr_t)src | (uintptr_t)bytes;
            if (bits % 16 == 0) peri_row_copy<uint4>(dst, src, bytes / 16, lane, 32);
            else if (bits % 4 == 0) peri_row_copy<uint32_t>(dst, src, bytes / 4, lane, 32);
            else peri_row_copy<uint8_t>(dst, src, bytes, lane, 32);
            at += bytes;
        }
    }
};

} // namespace

PERI_CUDA_KERNEL(cache_fill) { return each_warp(begin, end, c, move_row{*a, true}); }
PERI_CUDA_KERNEL(cache_spill) { return each_warp(begin, end, c, move_row{*a, false}); }
