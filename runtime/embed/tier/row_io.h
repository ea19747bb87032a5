/* SPDX-License-Identifier: Apache-2.0
 *
 * row_io.h: reads and writes of files in the background. A job is a list of requests; it is submitted, runs beside
 * whatever the caller does, and is waited for. Reads go through io_uring where the build has liburing and the kernel
 * allows it, else through some threads that call pread; PERI_ROW_IO=uring|threads chooses. Writes go through a thread.
 */
#ifndef PERI_EMBED_ROW_IO_H
#define PERI_EMBED_ROW_IO_H

#include "../../base/base_internal.h"

typedef struct peri__row_request {
    char *data;
    int64_t bytes, offset; /* in the file */
    int64_t done;          /* bytes so far; the caller sets 0 */
    int fd;
    int32_t error;         /* errno; 0: none. ENODATA: the file ended */
    bool write;            /* the same for all of a job */
} peri__row_request;

/** Zero at first. `requests` and what they point to stay untouched between submit and wait. Requests of jobs under way
 *  must not overlap. */
typedef struct peri__row_job {
    peri__row_request *requests;
    int64_t n;
    int64_t next, finished, failed; /* the engine's */
    struct peri__row_job *link;
    bool queued; /* submitted and not yet waited for */
} peri__row_job;

typedef struct peri__row_io peri__row_io;

/** @out new. */
peri_status peri__row_io_new(peri__row_io **out);
/** No job may be under way. NULL is fine. */
void peri__row_io_free(peri__row_io *io);
/** "io_uring" or "threads". */
const char *peri__row_io_name(const peri__row_io *io);
void peri__row_io_submit(peri__row_io *io, peri__row_job *job);
/** Block until all requests of @job have ended; returns how many failed. A job that was not submitted has none. */
int64_t peri__row_io_wait(peri__row_io *io, peri__row_job *job);
/** Nanoseconds that calls have spent there. */
int64_t peri__row_io_waited(const peri__row_io *io);

#endif
