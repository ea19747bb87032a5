/* SPDX-License-Identifier: Apache-2.0
 *
 * row_memory.c: rows in the host's memory instead of a file, under a cache in the memory of a device. Records are those
 * of files, without checksums; they are copied at once, by all threads. See row_file.h and tier.h.
 */
#include "tier.h"
#include "../../base/fault.h"

#include <sys/mman.h>

enum { GRAIN = 64 };

peri_status peri__row_memory_new(const peri__row_header *want, int64_t available, peri__row_file **out)
{
    int64_t bytes;
    if (__builtin_mul_overflow(want->rows, want->record_bytes, &bytes) || bytes > available)
        return peri__fail(PERI_ENOMEM,
                          "peri_tbe_new: table '%.120s': its %lld rows need %.0f MB of the host's memory with their "
                          "states, %.0f MB are "
                          "available; give its cache_params a directory, and they live in a file there",
                          want->name, (long long)want->rows, (double)want->rows * (double)want->record_bytes / 1e6,
                          (double)peri__max(available, 0) / 1e6);
    peri__row_file *f = peri__alloc_zero(sizeof *f);
    if (!f) return PERI_ENOMEM;
    f->fd = -1;
    f->temporary = f->fresh = true;
    f->header = *want;
    f->header.clean = 1;
    peri_status status = peri__row_map_init(&f->map, want->rows);
    if (status >= 0) {
        void *rows = peri__fault(PERI_FAULT_alloc)
                         ? MAP_FAILED
                         : mmap(NULL, (size_t)peri__row_memory_bytes(f), PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (rows != MAP_FAILED) f->memory = rows;
        else
            status = peri__fail(PERI_ENOMEM, "peri_tbe_new: table '%.120s': no address space for %lld bytes",
                                want->name, (long long)peri__row_memory_bytes(f));
    }
    if (status < 0) peri__row_file_close(f);
    else *out = f;
    return status;
}

typedef struct moving {
    const peri__tier *tier;
    const peri__records *stage;
    bool store;
} moving;

/** Copies records [begin, end) of the stage's list: to the rows in memory (store), or from them to the stage. A row
 *  that was never written is not read: its record in the stage stays as it is. */
static void copy_records(void *ctx, int64_t begin, int64_t end)
{
    const moving *x = ctx;
    for (int64_t i = begin; i < end; i++) {
        const peri_k_cache_move *m = &x->stage->moves[i];
        const peri__row_file *f = x->tier->tables[m->table].file;
        if (!f->memory || (!x->store && !peri__row_written(f, m->row))) continue;
        char *row = f->memory + m->row * f->header.record_bytes, *record = x->stage->host + m->record;
        memcpy(x->store ? row : record, x->store ? record : row, (size_t)f->header.record_bytes);
    }
}

void peri__row_memory_move(const peri__tier *tier, const peri__records *stage, bool store)
{
    if (tier->in_memory) peri__parallel_for(stage->n, GRAIN, copy_records, &(moving){tier, stage, store});
}
