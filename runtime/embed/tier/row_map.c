/* SPDX-License-Identifier: Apache-2.0
 *
 * row_map.c: which rows of a file were ever written: one bit for each, in memory and behind the records. See
 * row_file.h. The checksum is a sum over pages, so that a flush costs what has changed; a page of zeros adds nothing,
 * so that holes need not be read.
 */
#include "row_file.h"
#include "../../base/fault.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <xxhash.h>

enum { PAGE = 4096, READ = 1 << 20 }; /* READ: a multiple of PAGE */

int64_t peri__row_map_bytes(int64_t rows) { return peri__ceil_div(rows, 64) * 8; }

static int64_t memory_bytes(const peri__row_map *m) { return peri__max(8, peri__row_map_bytes(m->rows)); }

peri_status peri__row_map_init(peri__row_map *m, int64_t rows)
{
    *m = (peri__row_map){.rows = rows, .pages = peri__ceil_div(peri__row_map_bytes(rows), PAGE)};
    void *bits = peri__fault(PERI_FAULT_alloc) ? MAP_FAILED
                                               : mmap(NULL, (size_t)memory_bytes(m), PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bits == MAP_FAILED)
        return peri__fail(PERI_ENOMEM, "no memory for one bit for each of %lld rows", (long long)rows);
    m->bits = bits;
    m->sums = peri__alloc_zero(sizeof *m->sums * (size_t)peri__max(1, m->pages));
    m->news = peri__alloc_zero(sizeof *m->news * (size_t)peri__max(1, m->pages));
    return m->sums && m->news ? PERI_OK : PERI_ENOMEM;
}

void peri__row_map_fini(peri__row_map *m)
{
    if (m->bits) munmap(m->bits, (size_t)memory_bytes(m));
    peri__free(m->sums);
    peri__free(m->news);
}

/** Bytes of page @page; the last one may be shorter. */
static int64_t page_bytes(const peri__row_map *m, int64_t page)
{
    return peri__min(PAGE, peri__row_map_bytes(m->rows) - page * PAGE);
}

static uint64_t page_sum(const peri__row_map *m, int64_t page)
{
    const char *at = (const char *)m->bits + page * PAGE;
    int64_t bytes = page_bytes(m, page);
    if (at[0] == 0 && !memcmp(at, at + 1, (size_t)bytes - 1)) return 0;
    return peri__hash_mix(XXH3_64bits(at, (size_t)bytes), (uint64_t)page);
}

static uint64_t map_checksum(const peri__row_map *m)
{
    uint64_t sum = 0;
    for (int64_t p = 0; p < m->pages; p++) sum += m->sums[p];
    return sum;
}

static peri_status fail_io(const char *path, bool write, int64_t bytes, int64_t at, int code)
{
    return peri__fail(PERI_EIO, "row file '%.300s': %s %lld bytes at byte %lld: %s", path,
                      write ? "writing" : "reading", (long long)bytes, (long long)at, strerror(code));
}

/** Read bytes [from, end) of the map. */
static peri_status read_part(peri__row_map *m, const char *path, int fd, int64_t at, int64_t from, int64_t end)
{
    const int64_t done = peri__fault(PERI_FAULT_row_read)
                             ? (errno = EIO, 0)
                             : peri__read_at(fd, (char *)m->bits + from, end - from, at + from);
    if (done == end - from) return PERI_OK;
    return fail_io(path, false, end - from - done, at + from + done, errno ? errno : ENODATA);
}

peri_status peri__row_map_load(peri__row_map *m, const char *path, int fd, int64_t at, uint64_t sum)
{
    int64_t bytes = peri__row_map_bytes(m->rows);
    for (int64_t from = 0; from < bytes;) {
        off_t data = lseek(fd, (off_t)(at + from), SEEK_DATA);
        if (data < 0 && errno == ENXIO) break;                      /* nothing but a hole up to the end */
        if (data > at + from) from = (data - at) / PAGE * PAGE;     /* elsewhere: holes are not known, read on */
        if (from >= bytes) break;
        int64_t end = peri__min(bytes, from + READ);
        PERI_TRY(read_part(m, path, fd, at, from, end));
        from = end;
    }
    for (int64_t p = 0; p < m->pages; p++) m->sums[p] = page_sum(m, p);
    if (map_checksum(m) == sum) return PERI_OK;
    return peri__fail(PERI_EFORMAT,
                      "row file '%.300s': the map of its written rows, behind the records, is damaged (wrong "
                      "checksum); restore all files "
                      "of the module from a checkpoint, or remove all to start from scratch",
                      path);
}

peri_status peri__row_map_store(peri__row_map *m, const char *path, int fd, int64_t at, uint64_t *sum)
{
    for (int64_t p = 0; p < m->pages; p++) {
        if (!m->news[p]) continue;
        const int64_t bytes = page_bytes(m, p), from = at + p * PAGE;
        const int64_t done = peri__fault(PERI_FAULT_row_write)
                                 ? (errno = ENOSPC, 0)
                                 : peri__write_at(fd, (const char *)m->bits + p * PAGE, bytes, from);
        if (done < bytes) return fail_io(path, true, bytes - done, from + done, errno);
        m->sums[p] = page_sum(m, p);
        m->news[p] = false;
    }
    *sum = map_checksum(m);
    return PERI_OK;
}
