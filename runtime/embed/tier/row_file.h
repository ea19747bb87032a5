/* SPDX-License-Identifier: Apache-2.0
 *
 * row_file.h: the file that keeps the rows of one cached table (or of one shard of it).
 *
 *   bytes 0 .. 4095   header: magic, version, what table it is, how it starts, the optimizer's parts, flush, iteration,
 *                     clean, checksum
 *   then              rows records of record_bytes each: u32 checksum of the rest and of the row's place, u32 0, the
 *                     parts (kernels/cache.h)
 *   then              the map: one bit for each row (of u64 words), set when its record is written. The header has the
 *                     map's checksum
 *
 * Numbers are little-endian. The file is as long as that from the start, with holes where nothing was written: a row
 * that was never written has the value that the initialiser gives it, which depends on (seed, table, row, column) only.
 * Only the map says which these are: zeros in the place of a row that was written are damage.
 *
 * A file is `clean` after a flush: it holds all rows as they were then, and carries the flush: its number, a random
 * stamp, the number of the iteration, and, where a map gives rows to raw ids, the map's mark (perilune/collision.h),
 * since the rows say nothing without it. With the first write after a flush it is marked unclean, and stays so until
 * the next. So after a crash an unclean file holds rows of different times; at most the records that were being written
 * are torn, which their checksums show. Opening an unclean file is an error: restore it from a checkpoint, or remove
 * it.
 *
 * Flushing is done in two halves: peri__row_file_sync brings rows and map to the disk, peri__row_file_mark_clean says
 * of which flush they are. Whoever has several files marks none before all are settled, and opens them only when all
 * carry the same flush. So no half needs to be undone: a crash before the last mark leaves files that do not fit
 * together.
 */
#ifndef PERI_EMBED_ROW_FILE_H
#define PERI_EMBED_ROW_FILE_H

#include "../../base/base_internal.h"

#include <perilune/embed.h>

enum { PERI__ROW_HEADER_BYTES = 4096, PERI__ROW_NAME_MAX = 1024, PERI__ROW_PARTS = 6 };

/** What the header says. */
typedef struct peri__row_header {
    int64_t rows, cols, row_offset, col_offset, total_rows, total_cols;
    int64_t record_bytes;
    int64_t iteration; /* of the table batch at the last flush */
    int64_t flush;     /* number of the last flush; 0: none yet */
    uint64_t stamp;    /* random, one for each flush of a module, so that flushes of different runs differ; 0 with flush
                          0 */
    uint64_t map_sum;  /* of the map as it was at the last flush; 0: no row is in the file */
    peri_ids_mark ids; /* at the last flush: the map of raw ids whose rows these are; sum 0: ids are rows */
    uint64_t seed;
    double init_a, init_b;
    int32_t init, dtype, optimizer; /* PERI_INIT_*, PERI_F32 ..., PERI_TBE_* */
    int32_t clean;                  /* 0, 1 */
    int32_t n_parts;
    int32_t part_bytes[PERI__ROW_PARTS]; /* of an element; negative: one element per row instead of cols */
    bool raw_ids;                        /* of the table that is to have the file, not in it: a map gives its rows to
                                            raw ids */
    char name[PERI__ROW_NAME_MAX];       /* of the table, 0-terminated */
} peri__row_header;

/** The header as bytes, checksum included. */
void peri__row_header_seal(const peri__row_header *header, unsigned char bytes[PERI__ROW_HEADER_BYTES]);
/** Read @size bytes as a header. PERI_EFORMAT says what is wrong and names @path. Fields are within their ranges:
 *  records fit their parts, and rows * record_bytes + header does not overflow. */
peri_status peri__row_header_parse(const char *path, const void *bytes, int64_t size, peri__row_header *out);
/** Bytes of a record with these parts, a multiple of 8. */
int64_t peri__row_record_bytes(const peri__row_header *header);

/* -- which rows are in the file ------------------------------------------------------------------------------------ */

/** The map in memory. A page is 32768 rows. */
typedef struct peri__row_map {
    int64_t rows, pages;
    uint64_t *bits; /* by row: its record was written. Zeroed on demand */
    uint64_t *sums; /* by page: its hash as it is in the file; 0: all zeros */
    bool *news;     /* by page: has bits that are not in the file yet */
} peri__row_map;

peri_status peri__row_map_init(peri__row_map *map, int64_t rows);
void peri__row_map_fini(peri__row_map *map);
/** Its bytes in the file. */
int64_t peri__row_map_bytes(int64_t rows);
/** Read it from byte @at of @fd. PERI_EFORMAT when its checksum is not @sum. */
peri_status peri__row_map_load(peri__row_map *map, const char *path, int fd, int64_t at, uint64_t sum);
/** Write what is new to it; *sum gets its checksum. */
peri_status peri__row_map_store(peri__row_map *map, const char *path, int fd, int64_t at, uint64_t *sum);

/* -- files --------------------------------------------------------------------------------------------------------- */

typedef struct peri__row_file {
    int fd;
    char *path;     /* as the caller wrote it, for messages */
    char *full;     /* the same from the root on, wherever the process goes; NULL: it has no name */
    char *memory;   /* the records, where they lie in the host's memory and not in a file: there is neither fd nor path
                       then, nor checksums. See row_memory.c */
    bool temporary; /* nameless: gone when it is closed */
    bool fresh;     /* made by this process */
    bool unsure;    /* writing the header failed: the disk may hold this one or the one that was to be */
    uint64_t salt;  /* of the records' checksums: which table and part of it */
    peri__row_header header;
    peri__row_map map;
} peri__row_file;

/** Open @directory's file of this table, or make it (its flush and iteration are then 0). @directory NULL: a nameless
 *  file in $TMPDIR or /var/tmp. Holds a lock until it is closed: a file in use is PERI_EIO. A file of something else,
 *  or files of other shards of this table that share rows with it, are PERI_EMISMATCH, a short or unclean one
 *  PERI_EFORMAT; every message names the file. @out new. */
peri_status peri__row_file_open(const char *directory, const peri__row_header *want, peri__row_file **out);
/** Rows in the host's memory instead: temporary. PERI_ENOMEM when they need more than @available bytes; names the
 *  table. @out new. */
peri_status peri__row_memory_new(const peri__row_header *want, int64_t available, peri__row_file **out);
/** How many it has. */
static inline int64_t peri__row_memory_bytes(const peri__row_file *f)
{
    return peri__max(8, f->header.rows * f->header.record_bytes);
}
/** Before rows are written: mark the file unclean. */
peri_status peri__row_file_mark_unclean(peri__row_file *file);
/** Bring everything written so far to the disk. */
peri_status peri__row_file_sync(peri__row_file *file);
/** Mark the file, which is settled, clean and of this flush, its rows those of this map of ids. */
peri_status peri__row_file_mark_clean(peri__row_file *file, int64_t iteration, int64_t flush, uint64_t stamp,
                                const peri_ids_mark *ids);
/** A random number that is not 0. */
uint64_t peri__row_stamp(void);
/** Never fails. A named file that was made here and never written to is removed: a new one is the same. NULL is
 *  fine. */
void peri__row_file_close(peri__row_file *file);

/** A file of some shard of a table. */
typedef struct peri__row_shard {
    char path[1024];
    int64_t row, rows, col, cols; /* from its name */
} peri__row_shard;

/** Call @visit for each file of table @name in @directory, in no order, until it returns false. No such directory:
 *  none. */
peri_status peri__row_files_of(const char *directory, const char *name,
                               bool (*visit)(void *ctx, const peri__row_shard *shard), void *ctx);
/** PERI_EMISMATCH when files of other shards of the table @want share rows and columns with it: it was cut in another
 *  way. */
peri_status peri__row_files_check(const char *directory, const peri__row_header *want);
/** @directory/name.rows-0-1000.cols-0-64.peri, new; with characters that are no part of plain file names as %XX. NULL:
 *  no memory. */
char *peri__row_file_path(const char *directory, const peri__row_header *header);
/** Read the header of a file that may be open elsewhere. */
peri_status peri__row_file_peek(const char *path, peri__row_header *out);

/** Where row @row's record begins. */
static inline int64_t peri__row_offset(const peri__row_file *f, int64_t row)
{
    return PERI__ROW_HEADER_BYTES + row * f->header.record_bytes;
}

/** Whether row @row is in the file. */
static inline bool peri__row_written(const peri__row_file *f, int64_t row)
{
    return f->map.bits[row / 64] >> row % 64 & 1;
}
/** Note that row @row's record is written. */
static inline void peri__row_note_written(peri__row_file *f, int64_t row)
{
    uint64_t *word = &f->map.bits[row / 64], bit = UINT64_C(1) << row % 64;
    if (*word & bit) return;
    *word |= bit;
    f->map.news[row >> 15] = true;
}

/** Write the checksum of row @row's record in front of it. */
void peri__row_record_seal(const peri__row_file *file, int64_t row, void *record);
/** Whether the record is whole, and row @row's. */
bool peri__row_record_is_whole(const peri__row_file *file, int64_t row, const void *record);
/** Whether the record is one that was never written: zeros. */
bool peri__row_record_is_hole(const peri__row_file *file, const void *record);

#endif
