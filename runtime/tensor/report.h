/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor/report.h (L2): small arrays on their way from a device to the host, which waits for them alone and not for
 * what is queued behind.
 */
#ifndef PERI_TENSOR_REPORT_H
#define PERI_TENSOR_REPORT_H

#include "tensor_internal.h"

/** Host memory for one queued copy and the event that ends it. Reports come from a pool: giving one back while its copy
 *  is still queued is legal and does not block. */
struct peri__report {
    struct peri__report *next;
    peri_device *device;
    void *event; /* the backend's */
    int64_t *words;
    int64_t capacity; /* words */
    int32_t made;     /* reports whose memory was asked for together, if this is the first of them; else 0 */
    bool posted;
    const void *src;  /* what was copied, and how much of it */
    int64_t bytes;
    uint64_t version; /* peri__item_ahead: of the storage, when the copy was queued */
};

peri_status peri__report_take(peri_device *device, int64_t words, peri__report **out);
/** Queue the copy of the first @words words at device address @src. */
peri_status peri__report_post(peri__report *report, const int64_t *src, int64_t words);
/** PERI_OK when report->words are there, PERI_PENDING when not yet; wait blocks. */
peri_status peri__report_test(peri__report *report);
peri_status peri__report_wait(peri__report *report);
/** Back to the pool; NULL is fine. */
void peri__report_return(peri__report *report);

/* -- judged later ------------------------------------------------------------------------------------------------- */

/** What a report that is judged later is about, and who judges it. */
typedef struct peri__late_what {
    const peri__unheard *of;
    int64_t turn;         /* numbers that grow */
    const char *function; /* in whose name errors are */
    /* What @words say: PERI_OK, or an error with @function's name. */
    peri_status (*judge)(const char *function, const int64_t *words, void *with);
    void *with;               /* the judge's own */
    void (*fini)(void *with); /* gives `with` up when the report has been judged; or NULL */
} peri__late_what;
/** Keep a posted report (taken) until somebody has it judged. An error is told to the thread, and the rank, that asked
 *  for the report. On failure neither @report nor @what->with is taken. */
peri_status peri__late_add(peri__report *report, const peri__late_what *what);
/** Judge the reports about @of that this thread asked for: those of turns before @before, for which it waits, and those
 *  that are there. The first error ends it; what is left is judged by the next call. */
peri_status peri__late_of(const peri__unheard *of, int64_t before);
/** Judge the reports of @device that this thread asked for and that are there. */
peri_status peri__late_on(const peri_device *device);
/** @of ends: what its reports say that nobody has heard yet is logged. */
void peri__late_drop(const peri__unheard *of);

/** Whether one more lookup may be judged later; counts it. */
bool peri__unheard_take(peri__unheard *unheard);
/** Called when a backward pass has come to a lookup: one more lookup may be judged later, but no more than 64. */
void peri__unheard_passed(peri__unheard *unheard);

/* -- the root of a backward pass ---------------------------------------------------------------------------------- */

/** Before a backward pass from @root, which nobody else can see: if it has one element, queue a copy of it to the host.
 *  peri_tensor_item then waits for this copy, which lies before the pass, and not for the pass. Does nothing where the
 *  host works in the device's memory. */
peri_status peri__item_ahead(peri_tensor *root);
/** If the @bytes at @src of @t were copied ahead and have not changed since, wait for the copy and write them to @dst;
 *  *found says so. */
peri_status peri__item_ahead_read(const peri_tensor *t, const void *src, int64_t bytes, void *dst, bool *found);

#endif
