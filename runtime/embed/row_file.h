/* SPDX-License-Identifier: Apache-2.0
 *
 * row_file.h: the file that keeps the rows of one cached table (or of one shard of it).
 *
 *   bytes 0 .. 4095   header: magic, version, what table it is, how it starts, the optimizer's parts, iteration, clean, checksum
 *   then              rows records of record_bytes each: u32 checksum of the rest (0: never written), u32 0, the parts (kernels/cache.h)
 *
 * Numbers are little-endian. The file is as long as all records from the start, with holes where nothing was written: a row that was never
 * written has the value that the initialiser gives it, which depends on (seed, table, row, column) only.
 *
 * A file is `clean` after a flush: it holds all rows as they were then, and the number of the iteration. With the first write after a flush
 * it is marked unclean, and stays so until the next. So after a crash an unclean file holds rows of different times; at most the records
 * that were being written are torn, which their checksums show. Opening an unclean file is an error: restore it from a checkpoint, or
 * remove it.
 */
#ifndef PERI_EMBED_ROW_FILE_H
#define PERI_EMBED_ROW_FILE_H

#include "../base/internal.h"

enum { PERI__ROW_HEADER_BYTES = 4096, PERI__ROW_NAME_MAX = 1024, PERI__ROW_PARTS = 6 };

/** What the header says. */
typedef struct peri__row_header {
    int64_t rows, cols, row_offset, col_offset, total_rows, total_cols;
    int64_t record_bytes, iteration;
    uint64_t seed;
    double init_a, init_b;
    int32_t init, dtype, optimizer; /* PERI_INIT_*, PERI_F32 ..., PERI_TBE_* */
    int32_t clean;                  /* 0, 1 */
    int32_t n_parts;
    int32_t part_bytes[PERI__ROW_PARTS]; /* of an element; negative: one element per row instead of cols */
    char name[PERI__ROW_NAME_MAX];       /* of the table, 0-terminated */
} peri__row_header;

/** The header as bytes, checksum included. */
void peri__row_header_seal(const peri__row_header *header, unsigned char bytes[PERI__ROW_HEADER_BYTES]);
/** Read @size bytes as a header. PERI_EFORMAT says what is wrong and names @path. Fields are within their ranges: records fit their parts,
 *  and rows * record_bytes + header does not overflow. */
peri_status peri__row_header_parse(const char *path, const void *bytes, int64_t size, peri__row_header *out);
/** Bytes of a record with these parts, a multiple of 8. */
int64_t peri__row_record_bytes(const peri__row_header *header);

typedef struct peri__row_file {
    int fd;
    char *path;     /* for messages */
    bool temporary; /* nameless: gone when it is closed */
    bool fresh;     /* made by this process: rows are in it only if this process wrote them */
    peri__row_header header;
} peri__row_file;

/** Open @directory's file of this table, or make it (its iteration is then 0). @directory NULL: a nameless file in $TMPDIR or /var/tmp.
 *  Holds a lock until it is closed: a file in use is PERI_EIO. A file of something else is PERI_EMISMATCH, a short or unclean one
 *  PERI_EFORMAT; every message names the file. @out new. */
peri_status peri__row_file_open(const char *directory, const peri__row_header *want, peri__row_file **out);
/** Mark the file clean, with everything written so far and @iteration on the disk, or unclean. */
peri_status peri__row_file_mark(peri__row_file *file, bool clean, int64_t iteration);
/** Never fails. NULL is fine. */
void peri__row_file_close(peri__row_file *file);

/** Where row @row's record begins. */
static inline int64_t peri__row_offset(const peri__row_file *f, int64_t row)
{
    return PERI__ROW_HEADER_BYTES + row * f->header.record_bytes;
}

/** Make a record one that was never written. */
void peri__row_vacate(void *record);
/** Write the checksum of a record in front of it. */
void peri__row_seal(void *record, int64_t bytes);
/** 1: the record is whole; 0: it was never written (a hole in the file, or vacated); -1: it is damaged. */
int32_t peri__row_check(const void *record, int64_t bytes);

#endif
