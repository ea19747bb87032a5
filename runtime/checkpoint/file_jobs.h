/* SPDX-License-Identifier: Apache-2.0
 *
 * file_jobs.h: threads that read and write files while their owner hashes and copies. Jobs are begun in the order in
 * which they were given; disks are faster with several at once.
 *
 *     owner     fill A | give A | fill B | give B | wait for A, fill A | ...
 *     threads                   | write A        |
 *                                        | write B        | ...
 */
#ifndef PERI_CHECKPOINT_FILE_JOBS_H
#define PERI_CHECKPOINT_FILE_JOBS_H

#include "files.h"

/** An open file that jobs work on. */
typedef struct peri__io_file {
    int fd;
    uint64_t device, inode; /* which file it is, for who shares what it reads (shared.h) */
    char path[];            /* for errors */
} peri__io_file;

/** @fd as a file of that path; on failure it is closed. @out new, freed by peri__io_finish or peri__io_file_free. */
peri_status peri__io_file_new(int fd, const char *path, peri__io_file **out);
/** Close it without a sync; NULL is fine. */
void peri__io_file_free(peri__io_file *file);
/** Let reads and writes of whole pages pass by the page cache, where the file system can: the processor then copies
 *  nothing, and what the machine has cached stays. */
void peri__io_file_direct(peri__io_file *file);

enum {
    PERI__IO_PAGE = 4096,   /* what direct reads and writes want of memory, bytes and places: multiples of this */
    PERI__IO_HUGE = 2 << 20 /* a huge page */
};

/** Memory of @bytes for direct reads and writes, on huge pages where the system has them: a disk that is handed each
 *  page of 4 KiB by itself is three to five times slower. NULL: no memory. Freed by peri__io_pages_free with the same
 *  number of bytes. */
char *peri__io_pages(int64_t bytes);
void peri__io_pages_free(char *p, int64_t bytes);

struct peri__shared; /* shared.h */
typedef struct peri__io peri__io;

/** @threads: 1 to 4. @out new. */
peri_status peri__io_new(int32_t threads, peri__io **out);
/** False in a child of fork: the threads are its parent's. Of what they work with nothing but this and release may be
 *  used there. */
bool peri__io_has_threads(const peri__io *io);
/** Wait for all jobs, and end the threads; NULL is fine. Where there are none all is left as they had it. */
void peri__io_release(peri__io *io);
/** Give a job; blocks while too many are waiting. @data stays the owner's, and untouched until the job is done. Returns
 *  its number. */
int64_t peri__io_write(peri__io *io, peri__io_file *file, const void *data, int64_t bytes, int64_t at);
typedef void peri__io_then(const void *context, const char *data, int64_t bytes, int64_t at);
/** Read bytes [@at, @at + @bytes) of the file to @data + @at % PERI__IO_PAGE. @data begins with a page and has room for
 *  all pages that have some of them. The thread that has read them calls @then with their address (NULL: nothing), at
 *  the same time as others; not if a job has failed. Bytes that another process has read, and shares (@shared; NULL:
 *  nobody does), are given to @then from where they are, and put into @data only if @keep. */
int64_t peri__io_read_shared(peri__io *io, struct peri__shared *shared, bool keep, peri__io_file *file, void *data,
                             int64_t bytes, int64_t at, peri__io_then *then, const void *context);
/** When all jobs before are done: sync the file to the disk (unless one has failed), close it, and free it. */
int64_t peri__io_finish(peri__io *io, peri__io_file *file);
/** Whether job @number and all before are done; without blocking. */
bool peri__io_done(peri__io *io, int64_t number);
/** Wait until job @number and all before are done. The error is that of the first job that failed since peri__io_clear:
 *  what was begun afterwards was not done. */
peri_status peri__io_wait(peri__io *io, int64_t number);
/** Wait for all jobs, and forget that one failed. */
void peri__io_clear(peri__io *io);

#endif
